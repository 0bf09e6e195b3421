//! How long a diff of a 4 KiB page takes. `cargo run --release -p rampool-sim --example diff_speed`

use std::hint::black_box;
use std::time::Instant;

use rampool_sharing::Diff;

const PAGE: usize = 4096;
const ROUNDS: u32 = 20_000;

fn main() {
    let old: Vec<u8> = (0..PAGE).map(|at| u8::try_from(at * 7 % 251).expect("below 251")).collect();
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut new = old.clone();
        change(&mut new);
        new
    };
    let every = |step: usize, len: usize| {
        with(&|page| {
            for start in (0..PAGE).step_by(step) {
                page[start..start + len].iter_mut().for_each(|byte| *byte ^= 0xff);
            }
        })
    };
    let cases = [
        ("identical", old.clone()),
        ("one word", with(&|page| page[2000..2008].iter_mut().for_each(|byte| *byte ^= 0xff))),
        ("32 runs of 16 bytes", every(128, 16)),
        ("256 runs of 8 bytes", every(16, 8)),
        ("every other byte", every(2, 1)),
        ("all changed", every(PAGE, PAGE)),
    ];
    println!("diff of a {PAGE}-byte page, best of 9 averages over {ROUNDS} calls, nanoseconds");
    for (name, new) in &cases {
        let mut best = u128::MAX;
        for _ in 0..9 {
            let start = Instant::now();
            for _ in 0..ROUNDS {
                black_box(Diff::between(black_box(new), black_box(&old)));
            }
            best = best.min(start.elapsed().as_nanos() / u128::from(ROUNDS));
        }
        let diff = Diff::between(new, &old);
        println!("{name:>22} {best:>7}   ({} runs, {} bytes)", diff.runs(), diff.len());
    }
}
