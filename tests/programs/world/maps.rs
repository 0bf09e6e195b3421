//! A map of the standard library with small boxes. Usage: maps ENTRIES LOOKUPS
use std::collections::HashMap;

fn main() {
    let numbers: Vec<u64> = std::env::args().skip(1).map(|n| n.parse().expect("a number")).collect();
    let (entries, lookups) = (numbers[0], numbers[1]);
    let mut map: HashMap<u64, Box<[u64; 8]>> = (0..entries).map(|i| (i, Box::new([i; 8]))).collect();
    let (mut state, mut sum) = (1u64, 0u64);
    for i in 0..lookups {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let value = map.get_mut(&((state >> 33) % entries)).expect("an entry");
        value[1] = value[1].wrapping_add(i);
        sum = sum.wrapping_mul(31).wrapping_add(value[1] ^ value[7]);
    }
    println!("{sum:x}");
}
