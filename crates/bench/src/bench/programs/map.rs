//! A hash map of the standard library, filled in random order and looked up in random order: nearly each
//! access is to another page.

use std::collections::HashMap;

use anyhow::{Result, bail};

use crate::bench::workload::word;

/// The program that is measured.
#[derive(clap::Args, Debug)]
pub struct Fill {
    #[arg(long)]
    entries: u64,
}

pub fn fill(args: &Fill) -> Result<i32> {
    let mut map: HashMap<u64, [u64; 4]> = HashMap::with_capacity(usize::try_from(args.entries)?);
    for n in 0..args.entries {
        map.insert(word(11, n), [n; 4]);
    }
    for n in 0..args.entries / 8 {
        let n = word(12, n) % args.entries;
        if map.get(&word(11, n)) != Some(&[n; 4]) {
            bail!("WRONG CONTENT: entry {n} is {:?}", map.get(&word(11, n)));
        }
    }
    println!("{} entries", map.len());
    Ok(0)
}
