//! A hash table that counts keys: each group of buckets has its chains under one lock. Each rank takes
//! entries from a pool of its own but writes them under the chain's lock, so the table is legal under entry
//! consistency, too.

use super::{ALL, Answer, Program, ProgramError, Team, mix};

pub const PROGRAM: Program = Program {
    name: "hash",
    sizes: &["operations", "keys", "buckets"],
    full: &[40_000, 5000, 1024],
    small: &[600, 90, 64],
    protocols: ALL,
    fits: super::any,
    run,
};

/// Locks; bucket b uses lock b modulo this.
const LOCKS: usize = 64;
/// Words of an entry: the number of the next one plus 1, its key, its count.
const ENTRY: usize = 3;

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let &[operations, keys, buckets] = sizes else { unreachable!("the sizes are checked") };
    // For each chain the number of its first entry plus 1; 0 if the chain is empty.
    let heads = team.array::<u64>(buckets)?;
    let pool = keys.min(operations);
    let entries = team.array::<u64>(ENTRY * pool * team.ranks())?;
    let mut free = team.rank() * pool;
    let mine = team.part(operations);
    let took = team.time(|| {
        for operation in mine.clone() {
            let key = mix(operation as u64) % keys as u64;
            let bucket = word(mix(key) % buckets as u64);
            let lock = bucket % LOCKS;
            team.lock(lock)?;
            // SAFETY: the lock orders all accesses to this chain; an entry in no chain is this rank's.
            unsafe {
                let first = heads.get(bucket);
                let mut at = first;
                while at != 0 && entries.get(ENTRY * word(at - 1) + 1) != key {
                    at = entries.get(ENTRY * word(at - 1));
                }
                if at == 0 {
                    entries.set(ENTRY * free, first);
                    entries.set(ENTRY * free + 1, key);
                    free += 1;
                    at = free as u64;
                    heads.set(bucket, at);
                }
                let count = ENTRY * word(at - 1) + 2;
                entries.set(count, entries.get(count) + 1);
            }
            team.unlock(lock)?;
        }
        Ok::<_, ProgramError>(())
    })?;
    let mut found = Vec::new();
    if team.leads() {
        for bucket in 0..buckets {
            // SAFETY: no rank writes any more.
            let mut at = unsafe { heads.get(bucket) };
            while at != 0 {
                // SAFETY: as above.
                let [next, key, count] =
                    std::array::from_fn(|part| unsafe { entries.get(ENTRY * word(at - 1) + part) });
                found.push((key, count));
                at = next;
            }
        }
    }
    found.sort_unstable();
    Ok(Answer {
        exact: found.into_iter().flat_map(|(key, count)| [key, count]).collect(),
        took,
        ..Answer::default()
    })
}

/// A word as an index.
fn word(word: u64) -> usize {
    usize::try_from(word).expect("as many as there are entries")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn it_counts_as_a_map_does() {
        for sizes in [[600, 90, 64], [600, 90, 1], [10, 1000, 7]] {
            let mut map = BTreeMap::new();
            for operation in 0..sizes[0] {
                *map.entry(mix(operation as u64) % sizes[1] as u64).or_insert(0) += 1;
            }
            let expected: Vec<u64> = map.into_iter().flat_map(|(key, count)| [key, count]).collect();
            assert_eq!(PROGRAM.alone(&sizes).unwrap().exact, expected);
        }
    }
}
