//! Which page of a file is which page of the pool.

use std::collections::BTreeMap;
use std::ops::Range;

use rampool_wire::units::{Extent, PageIndex};

/// The pages of one file; those that are not there are holes.
#[derive(Debug, Default)]
pub struct FileMap {
    /// The file's page to as many pages of the pool.
    runs: BTreeMap<u64, Extent>,
    pages: u64,
}

impl FileMap {
    /// How many pages are there.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The pages of this range in order, holes included: how many, and where.
    pub fn pieces(&self, range: Range<u64>) -> Vec<(u64, Option<PageIndex>)> {
        let mut found = Vec::new();
        let mut at = range.start;
        for (first, run) in self.overlapping(&range) {
            if first > at {
                found.push((first - at, None));
                at = first;
            }
            let end = (first + u64::from(run.count)).min(range.end);
            found.push((end - at, Some(run.first.offset(at - first))));
            at = end;
        }
        if at < range.end {
            found.push((range.end - at, None));
        }
        found
    }

    /// Where this page of the file is.
    pub fn find(&self, page: u64) -> Option<PageIndex> {
        let (first, run) = self.runs.range(..=page).next_back()?;
        (page < first + u64::from(run.count)).then(|| run.first.offset(page - first))
    }

    /// Puts pages where a hole was.
    pub fn insert(&mut self, at: u64, run: Extent) {
        debug_assert!(self.overlapping(&(at..at + u64::from(run.count))).next().is_none());
        self.pages += u64::from(run.count);
        if let Some((first, before)) = self.runs.range_mut(..at).next_back()
            && *first + u64::from(before.count) == at
            && before.end() == run.first
            && let Some(sum) = before.count.checked_add(run.count)
        {
            before.count = sum;
            return;
        }
        self.runs.insert(at, run);
    }

    /// Makes a range a hole; the pages that were there.
    pub fn remove(&mut self, range: Range<u64>) -> Vec<Extent> {
        let cut: Vec<(u64, Extent)> = self.overlapping(&range).collect();
        let mut removed = Vec::new();
        for (first, run) in cut {
            self.runs.remove(&first);
            let end = first + u64::from(run.count);
            let (from, to) = (first.max(range.start), end.min(range.end));
            let part = |from: u64, to: u64| {
                let count = u32::try_from(to - from).expect("a part of a run");
                Extent::new(run.first.offset(from - first), count)
            };
            if first < from {
                self.runs.insert(first, part(first, from));
            }
            if to < end {
                self.runs.insert(to, part(to, end));
            }
            self.pages -= to - from;
            removed.push(part(from, to));
        }
        removed
    }

    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, Extent)> + use<'_> {
        let before = self.runs.range(..range.start).next_back();
        let has = before.filter(|(first, run)| *first + u64::from(run.count) > range.start);
        let rest = (range.start < range.end).then(|| self.runs.range(range.clone()));
        let has = has.filter(|_| range.start < range.end);
        has.into_iter().chain(rest.into_iter().flatten()).map(|(first, run)| (*first, *run))
    }

    /// Every run, as pages of the pool.
    pub fn runs(&self) -> impl Iterator<Item = Extent> {
        self.runs.values().copied()
    }
}
