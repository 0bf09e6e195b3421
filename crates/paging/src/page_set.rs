//! Sets of pages, as ranges: what is absent, what was given up, what a holder has missed.

use std::collections::BTreeMap;

use rampool_wire::units::{Extent, PageIndex};

/// So many ranges are kept exactly; beyond, what [`PageSet::insert_about`] adds is rounded to blocks.
const MOST_RANGES: usize = 1 << 16;
const BLOCK_PAGES: u64 = 512;

/// Pages of a region.
///
/// Invariant: the ranges, each from its first page to the one after its last, neither overlap nor touch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PageSet {
    ranges: BTreeMap<u64, u64>,
}

impl PageSet {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How many pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.ranges.iter().map(|(first, end)| end - first).sum()
    }

    /// Each range: its first page and the one after its last.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.ranges.iter().map(|(first, end)| (*first, *end))
    }

    /// The same, each of at most so many pages as an extent has.
    pub fn extents(&self) -> impl Iterator<Item = Extent> {
        self.ranges().flat_map(|(first, end)| {
            let most = u64::from(u32::MAX);
            (first..end).step_by(u32::MAX as usize).map(move |at| {
                Extent::new(PageIndex(at), u32::try_from((end - at).min(most)).expect("no more than that"))
            })
        })
    }

    pub fn insert(&mut self, extent: Extent) {
        self.insert_range(extent.first.0, extent.end().0);
    }

    /// As `insert`; with more pages where there are very many ranges.
    pub fn insert_about(&mut self, extent: Extent) {
        let (first, end) = (extent.first.0, extent.end().0);
        match self.ranges.len() < MOST_RANGES {
            true => self.insert_range(first, end),
            false => {
                self.insert_range(first / BLOCK_PAGES * BLOCK_PAGES, end.next_multiple_of(BLOCK_PAGES));
            }
        }
    }

    /// Adds the pages from `first` to before `end`.
    pub fn insert_range(&mut self, mut first: u64, mut end: u64) {
        if first >= end {
            return;
        }
        // What touches it becomes a part of it.
        while let Some((from, to)) = self.ranges.range(..=end).next_back().map(|(from, to)| (*from, *to)) {
            if to < first {
                break;
            }
            self.ranges.remove(&from);
            (first, end) = (first.min(from), end.max(to));
        }
        self.ranges.insert(first, end);
    }

    pub fn remove(&mut self, extent: Extent) {
        let (first, end) = (extent.first.0, extent.end().0);
        while let Some((from, to)) = self.range_before(end).filter(|(_, to)| *to > first) {
            self.ranges.remove(&from);
            if to > end {
                self.ranges.insert(end, to);
            }
            if from < first {
                self.ranges.insert(from, first);
            }
        }
    }

    /// How many of these pages it holds.
    #[must_use]
    pub fn pages_of(&self, extent: Extent) -> u64 {
        let (first, end) = (extent.first.0, extent.end().0);
        let before = self.range_before(first + 1).map_or(first, |(from, _)| from);
        let of = |(from, to): (&u64, &u64)| (*to).min(end).saturating_sub((*from).max(first));
        self.ranges.range(before..end).map(of).sum()
    }

    /// Those of these pages that it holds.
    pub fn parts_of(&self, extent: Extent) -> impl Iterator<Item = Extent> {
        let mut at = extent.first;
        std::iter::from_fn(move || {
            let (first, end) = self.next_from(at).filter(|(first, _)| *first < extent.end())?;
            at = end;
            let count = end.0.min(extent.end().0) - first.0;
            Some(Extent::new(first, u32::try_from(count).expect("no more than the extent")))
        })
    }

    /// How many pages both hold.
    #[must_use]
    pub fn common_pages(&self, other: &Self) -> u64 {
        let (few, many) = if self.ranges.len() < other.ranges.len() { (self, other) } else { (other, self) };
        if few.is_empty() {
            return 0;
        }
        few.extents().map(|extent| many.pages_of(extent)).sum()
    }

    /// Whether it holds one of these pages.
    #[must_use]
    pub fn overlaps(&self, extent: Extent) -> bool {
        self.range_before(extent.end().0).is_some_and(|(_, to)| to > extent.first.0)
    }

    /// The first pages from `page` on, all of one range.
    #[must_use]
    pub fn next_from(&self, page: PageIndex) -> Option<(PageIndex, PageIndex)> {
        let within = self.range_before(page.0 + 1).filter(|(_, to)| *to > page.0).map(|(_, to)| (page.0, to));
        let (first, end) =
            within.or_else(|| self.ranges.range(page.0..).next().map(|(from, to)| (*from, *to)))?;
        Some((PageIndex(first), PageIndex(end)))
    }

    /// Pages from `page` on, one after the other, at most `most`.
    #[must_use]
    pub fn run_at(&self, page: PageIndex, most: u32) -> u32 {
        self.parts_of(Extent::new(page, most))
            .next()
            .filter(|run| run.first == page)
            .map_or(0, |run| run.count)
    }

    /// The last range that begins before `end`.
    fn range_before(&self, end: u64) -> Option<(u64, u64)> {
        self.ranges.range(..end).next_back().map(|(from, to)| (*from, *to))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_set_of_ranges_is_a_set_of_pages(
            changes in prop::collection::vec((any::<bool>(), 0u64..200, 1u32..30), 1..60),
            looks in prop::collection::vec((0u64..240, 1u32..30), 20),
        ) {
            let (mut set, mut model) = (PageSet::default(), BTreeSet::new());
            for (insert, first, count) in changes {
                let extent = Extent::new(PageIndex(first), count);
                if insert {
                    set.insert(extent);
                    model.extend(first..extent.end().0);
                } else {
                    set.remove(extent);
                    model.retain(|page| !(first..extent.end().0).contains(page));
                }
                prop_assert_eq!(set.pages(), model.len() as u64);
                prop_assert!(set.ranges().zip(set.ranges().skip(1)).all(|(one, next)| one.1 < next.0));
            }
            for (first, count) in looks {
                let extent = Extent::new(PageIndex(first), count);
                prop_assert_eq!(set.overlaps(extent), model.range(first..extent.end().0).next().is_some());
                let parts = set.parts_of(extent).flat_map(|part| part.pages());
                let parts: Vec<u64> = parts.map(|page| page.0).collect();
                let within: Vec<u64> = model.range(first..extent.end().0).copied().collect();
                prop_assert_eq!(parts, within);
                let run = (first..extent.end().0).take_while(|page| model.contains(page)).count();
                prop_assert_eq!(set.run_at(extent.first, count) as usize, run);
                prop_assert_eq!(set.pages_of(extent), model.range(first..extent.end().0).count() as u64);
                let next = set.next_from(PageIndex(first));
                prop_assert_eq!(next.map(|(page, _)| page.0), model.range(first..).next().copied());
                let all = |from: PageIndex, end: PageIndex| (from.0..end.0).all(|page| model.contains(&page));
                prop_assert!(next.is_none_or(|(page, end)| all(page, end)));
            }
        }
    }
}
