//! Which shared pages take memory on this rank, and which of them leave first under a budget.
//!
//! ```text
//!   nowhere ---> here ---> away     nowhere: it reads as zeroes, or its content is not needed.
//!      ^          |  ^------'       here: in this rank's memory; a server may have this or an older content.
//!      '----------'                 away: at memory servers.
//! ```
//! The least recently requested page leaves first (accesses to mapped pages are invisible). Pages are offered
//! to the engine, which drops copies that others have; refused pages are remembered and go to memory servers.
//!
//! Invariant: `resident` is the sum of the sizes of pages that are here; each of them is in exactly one of
//! `fresh` and `refused`.
//!
//! Without a budget nothing is counted: every page counts as here.
//!
//! It never moves a page by itself. The host does, and reports it.

use std::collections::BTreeMap;

use rampool_wire::units::{Extent, PageIndex};

/// Where a page's content is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    Nowhere,
    Here,
    Away,
}

/// See the module.
#[derive(Clone, Hash, Debug, Default)]
pub struct Residency {
    budget: Option<u64>,
    resident: u64,
    away: u64,
    pages: BTreeMap<PageIndex, Page>,
    /// By the time of their last request.
    fresh: BTreeMap<u64, PageIndex>,
    refused: BTreeMap<u64, PageIndex>,
    clock: u64,
}

#[derive(Clone, Copy, Hash, Debug)]
struct Page {
    bytes: u32,
    state: State,
}

#[derive(Clone, Copy, Hash, Debug)]
enum State {
    Here { asked: u64, saved: Saved },
    Away,
}

/// What memory servers hold of a page that is here.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Saved {
    Nothing,
    Older,
    Same,
}

/// Where a dropped page was.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Left {
    pub here: bool,
    /// Memory servers have it, with its last or an earlier content.
    pub at_servers: bool,
}

/// Room is made when less than this part of the budget is left, so that the pages of one event fit.
const HEADROOM_PART: u64 = 16;
/// The least headroom.
const HEADROOM_BYTES: u64 = 128 << 10;

impl Residency {
    /// At most `budget` bytes may be here; without one, any number.
    #[must_use]
    pub fn new(budget: Option<u64>) -> Self {
        Self { budget, ..Self::default() }
    }

    #[must_use]
    pub fn budget(&self) -> Option<u64> {
        self.budget
    }

    /// Bytes that are here, counted only under a budget.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.resident
    }

    /// Bytes that are at memory servers only.
    #[must_use]
    pub fn away(&self) -> u64 {
        self.away
    }

    #[must_use]
    pub fn place(&self, page: PageIndex) -> Place {
        match self.pages.get(&page) {
            None if self.budget.is_none() => Place::Here,
            None => Place::Nowhere,
            Some(Page { state: State::Here { .. }, .. }) => Place::Here,
            Some(Page { state: State::Away, .. }) => Place::Away,
        }
    }

    /// Whether the page is here and a memory server has the same content.
    #[must_use]
    pub fn is_saved(&self, page: PageIndex) -> bool {
        matches!(self.pages.get(&page), Some(Page { state: State::Here { saved: Saved::Same, .. }, .. }))
    }

    /// The page of `bytes` bytes is here, and was requested now. A page that was away is saved.
    pub fn used(&mut self, page: PageIndex, bytes: u32) {
        if self.budget.is_none() {
            return;
        }
        self.clock += 1;
        let saved = match self.pages.get(&page).map(|page| page.state) {
            Some(State::Here { asked, saved }) => {
                self.unlist(asked);
                saved
            }
            Some(State::Away) => {
                self.away -= u64::from(bytes);
                self.resident += u64::from(bytes);
                Saved::Same
            }
            None => {
                self.resident += u64::from(bytes);
                Saved::Nothing
            }
        };
        self.pages.insert(page, Page { bytes, state: State::Here { asked: self.clock, saved } });
        self.fresh.insert(self.clock, page);
    }

    /// The page, which is here, may differ from the content at memory servers.
    pub fn changed(&mut self, page: PageIndex) {
        if let Some(Page { state: State::Here { saved: saved @ Saved::Same, .. }, .. }) =
            self.pages.get_mut(&page)
        {
            *saved = Saved::Older;
        }
    }

    /// Its content is dropped everywhere. Returns where it was.
    pub fn forget(&mut self, page: PageIndex) -> Left {
        let Some(Page { bytes, state }) = self.pages.remove(&page) else { return Left::default() };
        match state {
            State::Here { asked, saved } => {
                self.unlist(asked);
                self.resident -= u64::from(bytes);
                Left { here: true, at_servers: saved != Saved::Nothing }
            }
            State::Away => {
                self.away -= u64::from(bytes);
                Left { here: false, at_servers: true }
            }
        }
    }

    /// The page, which was here, is only at memory servers now.
    pub fn sent(&mut self, page: PageIndex) {
        let Some(Page { bytes, state }) = self.pages.get_mut(&page) else { return };
        if let State::Here { asked, .. } = std::mem::replace(state, State::Away) {
            self.resident -= u64::from(*bytes);
            self.away += u64::from(*bytes);
            self.unlist(asked);
        }
    }

    /// The engine does not drop the page now: it is a home's, or has changes.
    pub fn refuse(&mut self, page: PageIndex) {
        if let Some(Page { state: State::Here { asked, .. }, .. }) = self.pages.get(&page)
            && let Some(page) = self.fresh.remove(asked)
        {
            self.refused.insert(*asked, page);
        }
    }

    fn unlist(&mut self, asked: u64) {
        if self.fresh.remove(&asked).is_none() {
            self.refused.remove(&asked);
        }
    }

    /// Up to `count` pages that have not been offered to the engine since they were requested, the oldest
    /// first.
    #[must_use]
    pub fn to_offer(&self, count: usize) -> Vec<PageIndex> {
        self.fresh.values().take(count).copied().collect()
    }

    /// Up to `count` pages to send to memory servers: those that the engine refused, the oldest first, then
    /// others.
    #[must_use]
    pub fn to_send(&self, count: usize) -> Vec<PageIndex> {
        self.refused.values().chain(self.fresh.values()).take(count).copied().collect()
    }

    /// Pages that the engine refused.
    #[must_use]
    pub fn refused(&self) -> Vec<PageIndex> {
        self.refused.values().copied().collect()
    }

    /// Those of `pages` that are here or away.
    #[must_use]
    pub fn within(&self, pages: Extent) -> Vec<PageIndex> {
        self.pages.range(pages.first..pages.end()).map(|(&page, _)| page).collect()
    }

    /// Whether `bytes` more do not fit the budget.
    #[must_use]
    pub fn exceeds(&self, bytes: u64) -> bool {
        self.budget.is_some_and(|budget| self.resident + bytes > budget)
    }

    fn headroom(budget: u64) -> u64 {
        (budget / HEADROOM_PART).max(HEADROOM_BYTES).min(budget / 2)
    }

    /// Whether room should be made before more is needed.
    #[must_use]
    pub fn wants_room(&self) -> bool {
        self.budget.is_some_and(|budget| self.resident + Self::headroom(budget) > budget)
    }

    /// Whether enough room was made.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.budget.is_none_or(|budget| self.resident + 2 * Self::headroom(budget) <= budget)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn what_was_not_asked_for_the_longest_goes_first_and_what_is_refused_is_not_offered_again() {
        let mut pages = Residency::new(Some(1 << 20));
        for page in [5, 3, 9, 3] {
            pages.used(PageIndex(page), 4096);
        }
        assert_eq!(pages.to_offer(9), [PageIndex(5), PageIndex(9), PageIndex(3)]);
        pages.refuse(PageIndex(9));
        assert_eq!(pages.to_offer(9), [PageIndex(5), PageIndex(3)]);
        assert_eq!(pages.to_send(2), [PageIndex(9), PageIndex(5)]);
        pages.used(PageIndex(9), 4096);
        assert_eq!(
            pages.to_offer(9),
            [PageIndex(5), PageIndex(3), PageIndex(9)],
            "asked for again, it is offered again"
        );
    }

    #[test]
    fn a_page_that_comes_back_is_saved_until_it_changes() {
        let mut pages = Residency::new(Some(1 << 20));
        pages.used(PageIndex(1), 4096);
        assert!(!pages.is_saved(PageIndex(1)));
        pages.sent(PageIndex(1));
        assert_eq!((pages.place(PageIndex(1)), pages.resident(), pages.away()), (Place::Away, 0, 4096));
        pages.used(PageIndex(1), 4096);
        pages.used(PageIndex(1), 4096);
        assert!(pages.is_saved(PageIndex(1)));
        pages.changed(PageIndex(1));
        assert!(!pages.is_saved(PageIndex(1)));
    }

    #[test]
    fn what_servers_have_of_a_page_is_known_when_it_is_forgotten_even_if_it_has_changed_since() {
        let mut pages = Residency::new(Some(1 << 20));
        let page = PageIndex(1);
        assert_eq!(pages.forget(page), Left { here: false, at_servers: false });
        pages.used(page, 4096);
        pages.changed(page);
        assert_eq!(pages.forget(page), Left { here: true, at_servers: false }, "it has never been there");
        pages.used(page, 4096);
        pages.sent(page);
        pages.used(page, 4096);
        pages.changed(page);
        pages.used(page, 4096);
        assert!(!pages.is_saved(page));
        assert_eq!(
            pages.forget(page),
            Left { here: true, at_servers: true },
            "the older content takes room there"
        );
    }

    #[test]
    fn room_is_wanted_before_the_budget_is_used_up() {
        let mut pages = Residency::new(Some(1 << 20));
        let mut page = 0;
        while !pages.wants_room() {
            pages.used(PageIndex(page), 4096);
            page += 1;
        }
        assert!(!pages.exceeds(4096 * 16) && !pages.has_room());
        while !pages.has_room() {
            page -= 1;
            pages.forget(PageIndex(page));
        }
        assert!(!pages.wants_room());
        let mut boundless = Residency::new(None);
        boundless.used(PageIndex(1), 4096);
        assert!(
            !boundless.exceeds(u64::MAX / 2) && boundless.to_offer(1).is_empty(),
            "without a budget everything fits"
        );
        assert_eq!(boundless.place(PageIndex(2)), Place::Here);
    }

    proptest! {
        #[test]
        fn what_is_here_is_counted_and_listed_once(steps in proptest::collection::vec((0_u64..12, 0_u8..5), 0..200)) {
            let mut pages = Residency::new(Some(1 << 20));
            let mut at_servers = BTreeSet::new();
            let bytes = |page: u64| 4096_u32 << (page % 3);
            for (page, step) in steps {
                let index = PageIndex(page);
                match step {
                    0 => pages.used(index, bytes(page)),
                    1 => pages.changed(index),
                    2 => {
                        let here = pages.place(index) == Place::Here;
                        let left = pages.forget(index);
                        prop_assert_eq!(left, Left { here, at_servers: at_servers.remove(&page) });
                    }
                    3 => {
                        if pages.place(index) == Place::Here {
                            at_servers.insert(page);
                        }
                        pages.sent(index);
                    }
                    _ => pages.refuse(index),
                }
                let of = |place: Place| (0..12).filter(|&page| pages.place(PageIndex(page)) == place).collect::<Vec<u64>>();
                let sum = |these: &[u64]| these.iter().map(|&page| u64::from(bytes(page))).sum::<u64>();
                prop_assert_eq!(pages.resident(), sum(&of(Place::Here)));
                prop_assert_eq!(pages.away(), sum(&of(Place::Away)));
                let listed = pages.to_send(100);
                let unique: BTreeSet<u64> = listed.iter().map(|page| page.0).collect();
                prop_assert_eq!(unique.len(), listed.len());
                prop_assert_eq!(unique.into_iter().collect::<Vec<_>>(), of(Place::Here));
            }
        }
    }
}
