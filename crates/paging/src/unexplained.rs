//! Pages that the kernel reports as not mapped, while no event says what has become of them.
//!
//! That is so for a moment whenever a mapping goes: its event follows. If none comes, the thread that waits for the
//! page would ask for ever. Each page has a deadline of its own: another page that is refused, or comes, does not
//! move it.

use std::collections::BTreeMap;

/// A page is refused for so long before that is an error.
pub const DEADLINE_NS: u64 = 5_000_000_000;
/// The thread that waits asks again at once. A page that was not asked for in so long starts anew.
const FORGOTTEN_NS: u64 = 1_000_000_000;

/// Addresses of pages, each with when it was refused first and last. Times are those of one clock.
#[derive(Clone, Debug, Default)]
pub struct Unexplained {
    refused: BTreeMap<usize, (u64, u64)>,
}

impl Unexplained {
    /// The page at `address` was refused at `now_ns`; whether it has been for longer than the deadline.
    pub fn refused(&mut self, now_ns: u64, address: usize) -> bool {
        self.refused.retain(|_, (_, last)| now_ns.saturating_sub(*last) < FORGOTTEN_NS);
        let (first, last) = self.refused.entry(address).or_insert((now_ns, now_ns));
        *last = now_ns;
        now_ns - *first > DEADLINE_NS
    }

    /// Pages of `[start, end)` have come, or an event has told of them.
    pub fn explained(&mut self, start: usize, end: usize) {
        if !self.refused.is_empty() {
            self.refused.retain(|address, _| !(start..end).contains(address));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP_NS: u64 = 10_000_000;
    const STEPS: u64 = 2 * DEADLINE_NS / STEP_NS;

    /// When `[1000, 2000]` are refused in turn, and others come between.
    fn over(mut each: impl FnMut(&mut Unexplained, u64)) -> Vec<usize> {
        let mut pages = Unexplained::default();
        let mut over = Vec::new();
        for now in (0..STEPS).map(|step| step * STEP_NS) {
            for address in [0x1000, 0x2000] {
                if pages.refused(now, address) && !over.contains(&address) {
                    over.push(address);
                }
            }
            each(&mut pages, now);
        }
        over
    }

    #[test]
    fn pages_that_are_refused_in_turn_both_come_to_their_end() {
        assert_eq!(over(|_, _| ()), [0x1000, 0x2000]);
        assert_eq!(over(|pages, _| pages.explained(0x3000, 0x9000)), [0x1000, 0x2000]);
    }

    #[test]
    fn a_page_that_is_explained_begins_anew() {
        assert_eq!(over(|pages, _| pages.explained(0x1000, 0x2000)), [0x2000]);
    }

    #[test]
    fn a_page_that_nobody_asks_for_is_forgotten() {
        let mut pages = Unexplained::default();
        assert!(!pages.refused(0, 0x1000));
        assert!(!pages.refused(DEADLINE_NS * 2, 0x1000));
        assert!(!pages.refused(DEADLINE_NS * 2 + STEP_NS, 0x1000));
    }
}
