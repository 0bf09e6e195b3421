//! Bytes of a page, each with the stamp of its write: the newest value of every byte, however often it was
//! written.

use std::collections::BTreeMap;

use super::Diff;
use super::message::Stamp;

/// Disjoint runs by offset.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Overlay {
    runs: BTreeMap<usize, Run>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Run {
    stamp: Stamp,
    /// When it was put here, in the owner's own count.
    at: u64,
    bytes: Vec<u8>,
}

impl Overlay {
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.runs.values().map(|run| run.bytes.len()).sum()
    }

    /// Puts every byte of `diff` that is newer than the one here, and returns those bytes.
    pub fn put(&mut self, diff: &Diff, stamp: Stamp, at: u64) -> Diff {
        let mut accepted = Diff::default();
        for (offset, bytes) in diff.iter() {
            self.put_run(offset, bytes, stamp, at, &mut accepted);
        }
        accepted
    }

    fn put_run(&mut self, start: usize, bytes: &[u8], stamp: Stamp, at: u64, accepted: &mut Diff) {
        let end = start + bytes.len();
        let first = self
            .runs
            .range(..start)
            .next_back()
            .filter(|(offset, run)| *offset + run.bytes.len() > start)
            .map(|(&offset, _)| offset);
        let touched: Vec<usize> =
            first.into_iter().chain(self.runs.range(start..end).map(|(&offset, _)| offset)).collect();
        let mut next = start;
        for offset in touched {
            let run = self.runs.remove(&offset).expect("just found");
            let run_end = offset + run.bytes.len();
            let piece = |from: usize, to: usize| Run {
                stamp: run.stamp,
                at: run.at,
                bytes: run.bytes[from - offset..to - offset].to_vec(),
            };
            if run.stamp >= stamp {
                // The bytes here are as new: only the gap in front of them is filled.
                let gap_end = offset.max(start);
                self.fill(next, &bytes[next - start..gap_end - start], stamp, at, accepted);
                next = run_end.min(end);
                self.runs.insert(offset, run);
                continue;
            }
            if offset < start {
                self.runs.insert(offset, piece(offset, start));
            }
            if run_end > end {
                self.runs.insert(end, piece(end, run_end));
            }
        }
        self.fill(next, &bytes[next - start..], stamp, at, accepted);
    }

    fn fill(&mut self, offset: usize, bytes: &[u8], stamp: Stamp, at: u64, accepted: &mut Diff) {
        if !bytes.is_empty() {
            self.runs.insert(offset, Run { stamp, at, bytes: bytes.to_vec() });
            accepted.push(offset, bytes);
        }
    }

    /// Puts everything that another overlay has.
    pub fn put_all(&mut self, other: &Self) {
        for (stamp, diff) in other.newer_than(0) {
            self.put(&diff, stamp, 1);
        }
    }

    /// Everything put here after `at`, by stamp.
    pub fn newer_than(&self, at: u64) -> Vec<(Stamp, Diff)> {
        let mut by_stamp: BTreeMap<Stamp, Diff> = BTreeMap::new();
        for (&offset, run) in self.runs.iter().filter(|(_, run)| run.at > at) {
            by_stamp.entry(run.stamp).or_default().push(offset, &run.bytes);
        }
        by_stamp.into_iter().collect()
    }

    /// Writes all of it over a page.
    pub fn apply(&self, page: &mut [u8]) {
        for (&offset, run) in &self.runs {
            page[offset..offset + run.bytes.len()].copy_from_slice(&run.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;
    use proptest::prelude::*;

    proptest! {
        /// Compared with the obvious implementation: one slot a byte.
        #[test]
        fn every_byte_has_its_newest_value(puts in proptest::collection::vec((0_usize..40, 1_usize..20, 0_u64..6, any::<u8>()), 0..40)) {
            let mut overlay = Overlay::default();
            let mut plain: Vec<Option<(u64, u8)>> = vec![None; 64];
            for (offset, len, clock, value) in puts {
                let stamp = Stamp { clock, rank: Rank(0) };
                let mut diff = Diff::default();
                diff.push(offset, &vec![value; len]);
                let accepted = overlay.put(&diff, stamp, 1);
                let mut expected = Diff::default();
                for (at, slot) in plain.iter_mut().enumerate().take(offset + len).skip(offset) {
                    if slot.is_none_or(|(known, _)| known < clock) {
                        *slot = Some((clock, value));
                        expected.push(at, &[value]);
                    }
                }
                prop_assert_eq!(accepted, expected);
            }
            let mut page = vec![0; 64];
            overlay.apply(&mut page);
            let want: Vec<u8> = plain.iter().map(|slot| slot.map_or(0, |(_, value)| value)).collect();
            prop_assert_eq!(page, want);
            prop_assert_eq!(overlay.len(), plain.iter().flatten().count());
        }
    }
}
