//! Requests that were answered already, so that a repeated one gets the same answer.

use rampool_wire::frame::REMEMBERED;
use std::collections::VecDeque;

/// The answers to a member's latest requests of a kind, [`REMEMBERED`] at most.
///
/// Invariant: `filter` is empty, or counts the numbers in `latest` by what [`Answers::place`] makes of them.
#[derive(Debug, Default)]
pub(super) struct Answers {
    latest: VecDeque<(u64, u64)>,
    /// Most requests are asked about for the first time: one lookup here tells (a counting filter: Fan et
    /// al., Summary cache, SIGCOMM '98).
    filter: Vec<u16>,
}

impl Answers {
    const PLACES: u64 = 1024;

    /// Requests are numbered one after the other, or by a slot in the low half and how often that was used in
    /// the high half.
    fn place(request: u64) -> usize {
        usize::try_from((request ^ (request >> 32).wrapping_mul(37)) % Self::PLACES).expect("below PLACES")
    }

    pub(super) fn get(&self, request: u64) -> Option<u64> {
        if *self.filter.get(Self::place(request))? == 0 {
            return None;
        }
        // Repeated requests are among the latest.
        self.latest.iter().rev().find(|(number, _)| *number == request).map(|(_, answer)| *answer)
    }

    /// Takes the place of the oldest one.
    pub(super) fn insert(&mut self, request: u64, answer: u64) {
        if self.filter.is_empty() {
            self.filter.resize(usize::try_from(Self::PLACES).expect("a thousand"), 0);
        }
        if self.latest.len() == REMEMBERED
            && let Some((oldest, _)) = self.latest.pop_front()
        {
            self.filter[Self::place(oldest)] -= 1;
        }
        self.filter[Self::place(request)] += 1;
        self.latest.push_back((request, answer));
    }

    /// # Panics
    /// If an invariant is broken.
    pub(super) fn check(&self) {
        assert!(self.latest.len() <= REMEMBERED);
        let mut filter = self.filter.clone();
        self.latest.iter().for_each(|(request, _)| filter[Self::place(*request)] -= 1);
        assert!(filter.iter().all(|count| *count == 0), "the filter counts what is remembered");
    }
}
