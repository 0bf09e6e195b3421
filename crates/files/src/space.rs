//! Which pages of the pool are free.

use std::collections::BTreeMap;

use rampool_wire::units::{Extent, PageIndex};

/// Free pages as runs. Invariant: no two runs touch, except where one would be too long to count.
#[derive(Debug, Default)]
pub struct Space {
    /// First page to how many.
    runs: BTreeMap<u64, u32>,
    free: u64,
    all: u64,
    /// Where the last page was taken: the next ones come from behind it, so that a file lies in one run.
    cursor: u64,
}

impl Space {
    pub fn new(pages: impl IntoIterator<Item = Extent>) -> Self {
        let mut space = Self::default();
        pages.into_iter().for_each(|run| space.give(run));
        space.all = space.free;
        space
    }

    pub fn free_pages(&self) -> u64 {
        self.free
    }

    pub fn all_pages(&self) -> u64 {
        self.all
    }

    /// Takes so many pages, from `near` on if those are free. `None`: there are not so many.
    pub fn take(&mut self, pages: u64, near: Option<PageIndex>) -> Option<Vec<Extent>> {
        if pages > self.free {
            return None;
        }
        let (mut left, mut taken) = (pages, Vec::new());
        let mut wish =
            near.map_or(self.cursor, |near| if self.is_free(near.0) { near.0 } else { self.cursor });
        while left > 0 {
            let (first, count) = self.run_at(wish);
            let from = if (first..first + u64::from(count)).contains(&wish) { wish } else { first };
            let there = u64::from(count) - (from - first);
            let run = Extent::new(PageIndex(from), u32::try_from(there.min(left)).expect("of a run"));
            self.cut(first, count, run);
            left -= u64::from(run.count);
            wish = run.end().0;
            taken.push(run);
        }
        (self.cursor, self.free) = (wish, self.free - pages);
        Some(taken)
    }

    /// Gives pages back.
    ///
    /// # Panics
    /// If one is free.
    pub fn give(&mut self, pages: Extent) {
        if pages.count == 0 {
            return;
        }
        self.free += u64::from(pages.count);
        let (mut first, mut count) = (pages.first.0, pages.count);
        if let Some((&after, &more)) = self.runs.range(first..).next() {
            assert!(pages.end().0 <= after, "page {after} is given back twice");
            if pages.end().0 == after
                && let Some(sum) = count.checked_add(more)
            {
                self.runs.remove(&after);
                count = sum;
            }
        }
        if let Some((&before, &less)) = self.runs.range(..first).next_back() {
            let end = before + u64::from(less);
            assert!(end <= first, "page {first} is given back twice");
            if end == first
                && let Some(sum) = count.checked_add(less)
            {
                (first, count) = (before, sum);
            }
        }
        self.runs.insert(first, count);
    }

    fn is_free(&self, page: u64) -> bool {
        self.runs.range(..=page).next_back().is_some_and(|(first, count)| page < first + u64::from(*count))
    }

    /// The run that has this page, or the next one; the first one of all behind the last.
    fn run_at(&self, page: u64) -> (u64, u32) {
        let has =
            self.runs.range(..=page).next_back().filter(|(first, count)| page < *first + u64::from(**count));
        let found = has.or_else(|| self.runs.range(page..).next()).or_else(|| self.runs.iter().next());
        found.map(|(first, count)| (*first, *count)).expect("some pages are free")
    }

    /// Takes a part out of a run.
    fn cut(&mut self, first: u64, count: u32, part: Extent) {
        self.runs.remove(&first);
        let before = u32::try_from(part.first.0 - first).expect("within a run");
        if before > 0 {
            self.runs.insert(first, before);
        }
        let after = count - before - part.count;
        if after > 0 {
            self.runs.insert(part.end().0, after);
        }
    }

    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        let sum: u64 = self.runs.values().map(|count| u64::from(*count)).sum();
        assert_eq!(sum, self.free, "free pages are counted");
        assert!(self.runs.values().all(|count| *count > 0));
        let ends = self.runs.iter().map(|(first, count)| first + u64::from(*count));
        assert!(ends.zip(self.runs.keys().skip(1)).all(|(end, next)| end <= *next), "no page is in two runs");
    }
}
