//! The kernel's refusals to put a page where it belongs, and how long that may last.
//!
//! No room for a page: threads ask again, until some deadline. A page that the kernel reports as not mapped:
//! for a moment that is so whenever a mapping goes, and its event follows; each such page has a deadline of
//! its own, which other pages do not move. Too many mappings: fewer pages can be resident.
//!
//! Times are those of one clock, in nanoseconds.

use std::collections::BTreeMap;

/// A page is refused for so long before that is an error.
pub const DEADLINE_NS: u64 = 5_000_000_000;
/// The thread that waits asks again at once. A page that was not asked for in so long starts anew.
const FORGOTTEN_NS: u64 = 1_000_000_000;
/// With less no program goes on.
const LEAST_PAGES: u64 = 64;

/// See the module.
#[derive(Clone, Debug)]
pub struct Refusals {
    /// Since when there has been no room for any page.
    no_room_since: Option<u64>,
    /// Addresses of pages that are not mapped, each with when it was refused first and last.
    unexplained: BTreeMap<usize, (u64, u64)>,
    /// The kernel cannot keep more pages apart.
    most_pages: u64,
}

impl Default for Refusals {
    fn default() -> Self {
        Self { no_room_since: None, unexplained: BTreeMap::new(), most_pages: u64::MAX }
    }
}

impl Refusals {
    /// There was no room for a page.
    pub fn no_room(&mut self, now_ns: u64) {
        self.no_room_since.get_or_insert(now_ns);
    }

    #[must_use]
    pub fn has_no_room(&self) -> bool {
        self.no_room_since.is_some()
    }

    /// Whether there has been none for longer than the deadline; said once.
    pub fn lacks_room(&mut self, now_ns: u64) -> bool {
        let over = self.no_room_since.is_some_and(|since| now_ns - since > DEADLINE_NS);
        if over {
            self.no_room_since = None;
        }
        over
    }

    /// The page at `address` is not mapped, says the kernel; whether it has for longer than the deadline.
    pub fn not_mapped(&mut self, now_ns: u64, address: usize) -> bool {
        self.unexplained.retain(|_, (_, last)| now_ns.saturating_sub(*last) < FORGOTTEN_NS);
        let (first, last) = self.unexplained.entry(address).or_insert((now_ns, now_ns));
        *last = now_ns;
        now_ns - *first > DEADLINE_NS
    }

    /// Pages of `[start, end)` have come.
    pub fn came(&mut self, start: usize, end: usize) {
        self.no_room_since = None;
        self.explained(start, end);
    }

    /// An event has told of `[start, end)`.
    pub fn explained(&mut self, start: usize, end: usize) {
        if !self.unexplained.is_empty() {
            self.unexplained.retain(|address, _| !(start..end).contains(address));
        }
    }

    /// The kernel has all the mappings that it keeps while so many pages are resident; how many may be from
    /// now on, if that is news.
    pub fn crowded(&mut self, used_pages: u64) -> Option<u64> {
        if used_pages > self.most_pages {
            return None;
        }
        self.most_pages = (used_pages * 3 / 4).max(LEAST_PAGES);
        Some(self.most_pages)
    }

    /// How many pages can be resident where so many may be.
    #[must_use]
    pub fn can_be(&self, pages: u64) -> u64 {
        pages.min(self.most_pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP_NS: u64 = 10_000_000;
    const STEPS: u64 = 2 * DEADLINE_NS / STEP_NS;

    /// When `[1000, 2000]` are not mapped in turn, and others come between.
    fn over(mut each: impl FnMut(&mut Refusals, u64)) -> Vec<usize> {
        let mut refusals = Refusals::default();
        let mut over = Vec::new();
        for now in (0..STEPS).map(|step| step * STEP_NS) {
            for address in [0x1000, 0x2000] {
                if refusals.not_mapped(now, address) && !over.contains(&address) {
                    over.push(address);
                }
            }
            each(&mut refusals, now);
        }
        over
    }

    #[test]
    fn pages_that_are_refused_in_turn_both_come_to_their_end() {
        assert_eq!(over(|_, _| ()), [0x1000, 0x2000]);
        assert_eq!(over(|refusals, _| refusals.came(0x3000, 0x9000)), [0x1000, 0x2000]);
    }

    #[test]
    fn a_page_that_is_explained_begins_anew() {
        assert_eq!(over(|refusals, _| refusals.explained(0x1000, 0x2000)), [0x2000]);
    }

    #[test]
    fn a_page_that_nobody_asks_for_is_forgotten() {
        let mut refusals = Refusals::default();
        assert!(!refusals.not_mapped(0, 0x1000));
        assert!(!refusals.not_mapped(DEADLINE_NS * 2, 0x1000));
        assert!(!refusals.not_mapped(DEADLINE_NS * 2 + STEP_NS, 0x1000));
    }

    #[test]
    fn a_kernel_without_room_has_until_the_deadline_from_the_last_page_that_came() {
        let mut refusals = Refusals::default();
        refusals.no_room(0);
        refusals.no_room(DEADLINE_NS);
        assert!(!refusals.lacks_room(DEADLINE_NS));
        refusals.came(0x5000, 0x6000);
        assert!(!refusals.lacks_room(2 * DEADLINE_NS));
        refusals.no_room(2 * DEADLINE_NS);
        assert!(refusals.lacks_room(3 * DEADLINE_NS + 1));
        assert!(!refusals.lacks_room(3 * DEADLINE_NS + 2), "it is said once");
    }

    #[test]
    fn a_crowded_kernel_gets_three_quarters_and_is_not_believed_before_there_are_no_more() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.can_be(5000), 5000);
        assert_eq!(refusals.crowded(1000), Some(750));
        assert_eq!((refusals.can_be(5000), refusals.can_be(100)), (750, 100));
        assert_eq!(refusals.crowded(900), None, "pages are on their way out");
        assert_eq!(refusals.crowded(740), Some(555));
        assert_eq!(refusals.crowded(20), Some(LEAST_PAGES));
    }
}
