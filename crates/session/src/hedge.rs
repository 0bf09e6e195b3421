//! What is done about a server that answers, but late. A read that takes longer than nearly all others there
//! turns to another holder of its pages, and the first answer counts. A server whose reads are mostly late is
//! *slow*: others are read instead, and now and then one read is tried there, until that is over.
//!
//! ```text
//!             8 of 16 reads late
//!   prompt ------------------------> slow
//!      ^    16 in a row on time       |      one read in 100 begins there, and turns away at once
//!      '------------------------------'
//! ```
//!
//! A read that turns costs the servers two. So each read earns three tokens, and turning takes a hundred: a
//! network or a process in which everything is late gets 3 % more to do, and no more.
//!
//! The idea is that of hedged requests (Dean and Barroso, The Tail at Scale, 2013).

use std::collections::VecDeque;
use std::time::Duration;

use crate::io::Time;
use crate::pace::Usual;

/// A read turns elsewhere after so many halves of what ninety-nine of a hundred take, but not before this;
/// and when it is late.
const LONG_HALVES: u32 = 3;
const LEAST: Duration = Duration::from_micros(200);
/// A read is late if it takes so many times as long as ninety-nine of a hundred do at another server ...
const SLOW_TIMES: u32 = 4;
/// ... but not before this.
const SLOW: Duration = Duration::from_millis(1);
/// So many late reads of the last sixteen make a server slow.
const LATE: u32 = 8;
const EARNS: u32 = 3;
const COSTS: u32 = 100;
/// A server may become slow after a long calm: so many reads may turn at once then.
const MOST_TOKENS: u32 = 16 * COSTS;
/// One read in so many of those that a slow server would get begins there.
const PROBE_EVERY: u32 = 100;

/// How prompt the answers of one server are, to reads for which threads wait.
#[derive(Debug, Default)]
pub(crate) struct Promptness {
    usual: Usual,
    /// Of the last sixteen reads, which were late.
    late: u16,
    slow: bool,
    late_after: Option<Duration>,
    /// Of reads that were sent up to then, it is known whether they are late.
    known_until: Time,
    /// Reads that were sent, and have not turned to another server; some have been answered.
    pub reads: VecDeque<(u64, Time)>,
}

impl Promptness {
    /// What ninety-nine of a hundred take no longer than, once that is known.
    pub fn usual(&self) -> Option<Duration> {
        self.usual.known()
    }

    /// What is usual at the fastest other server.
    pub fn compare(&mut self, other: Option<Duration>) {
        self.late_after = other.map(|other| (other * SLOW_TIMES).max(SLOW));
    }

    pub fn answered(&mut self, sent: Time, now: Time) {
        self.usual.add(now - sent);
        if let Some(most) = self.late_after.filter(|_| sent > self.known_until) {
            self.judge(now - sent >= most);
        }
    }

    /// Which of these reads without an answer are late by now; by when they were sent, oldest first.
    pub fn waits(&mut self, sent: impl Iterator<Item = Time>, now: Time) {
        let Some(most) = self.late_after else { return };
        for at in sent.take_while(|at| now - *at >= most) {
            self.known_until = at;
            self.judge(true);
        }
    }

    pub fn known_until(&self) -> Time {
        self.known_until
    }

    fn judge(&mut self, is_late: bool) {
        self.late = self.late << 1 | u16::from(is_late);
        let is_slow = if self.slow { self.late > 0 } else { self.late.count_ones() >= LATE };
        if is_slow && !self.slow {
            self.late = u16::MAX;
        }
        self.slow = is_slow;
    }

    pub fn is_slow(&self) -> bool {
        self.slow
    }

    /// How long a read waits here until it turns to another server.
    pub fn patience(&self) -> Option<Duration> {
        if self.slow {
            return Some(Duration::ZERO);
        }
        let long = self.usual().map(|usual| (usual * LONG_HALVES / 2).max(LEAST));
        [long, self.late_after].into_iter().flatten().min()
    }

    /// It comes back after a while, and begins anew.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}

/// What turning reads may cost.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    tokens: u32,
    /// Reads that a slow server would have got.
    spared: u32,
}

impl Budget {
    /// A read of what two servers hold.
    pub fn earn(&mut self) {
        self.tokens = (self.tokens + EARNS).min(MOST_TOKENS);
    }

    pub fn is_enough(&self) -> bool {
        self.tokens >= COSTS
    }

    pub fn spend(&mut self) {
        self.tokens = self.tokens.saturating_sub(COSTS);
    }

    /// Whether a read that a slow server is not to get begins there all the same.
    pub fn probes(&mut self) -> bool {
        self.spared += 1;
        self.spared.is_multiple_of(PROBE_EVERY) && self.is_enough()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(of: &mut Promptness, us: u64) {
        of.answered(Time(1), Time(1 + us * 1000));
    }

    fn known(us: u64) -> Promptness {
        let mut of = Promptness::default();
        (0..2000).for_each(|_| answer(&mut of, us));
        of
    }

    #[test]
    fn a_server_is_slow_while_reads_are_late_and_no_longer() {
        let (fast, mut slow) = (known(100), known(100));
        slow.compare(fast.usual());
        let (on_time, late) = (900, 1100);
        for at in 0..32 {
            answer(&mut slow, if at % 2 == 0 { late } else { on_time });
            assert_eq!(slow.is_slow(), at >= 14, "after read {at}");
        }
        answer(&mut slow, late);
        for at in 0..16 {
            assert!(slow.is_slow(), "after {at} on time");
            answer(&mut slow, on_time);
        }
        assert!(!slow.is_slow());
        // Seven of sixteen are not enough.
        for at in 0..64 {
            answer(&mut slow, if at % 16 < 7 { late } else { on_time });
            assert!(!slow.is_slow(), "after read {at}");
        }
    }

    #[test]
    fn a_read_without_an_answer_is_late_once() {
        let ms = |ms: u64| Time(ms * 1_000_000);
        let mut of = Promptness { late_after: Some(Duration::from_millis(4)), ..Promptness::default() };
        of.waits((1..=9).map(ms), ms(8));
        assert_eq!((of.late, of.known_until()), (0b1111, ms(4)));
        (1..=4).for_each(|sent| of.answered(ms(sent), ms(9)));
        assert_eq!(of.late, 0b1111);
        of.answered(ms(5), ms(9));
        of.answered(ms(6), ms(9));
        assert_eq!(of.late, 0b11_1110);
    }

    #[test]
    fn nobody_is_slow_where_nobody_is_faster() {
        let mut of = Promptness::default();
        of.compare(None);
        (0..100).for_each(|_| answer(&mut of, 1_000_000));
        assert!(!of.is_slow());
    }

    #[test]
    fn a_read_waits_for_longer_than_usual_unless_another_server_is_much_faster() {
        let (fast, mut slower, mut unknown) = (known(1000), known(2000), Promptness::default());
        assert_eq!(unknown.patience(), None);
        unknown.compare(fast.usual());
        assert_eq!(unknown.patience(), unknown.late_after);
        assert!(fast.patience() > fast.usual() && fast.patience() < slower.patience());
        slower.compare(fast.usual());
        assert!(slower.patience() < slower.late_after);
        slower.compare(known(300).usual());
        assert_eq!(slower.patience(), slower.late_after);
        assert_eq!(known(1).patience(), Some(LEAST));
    }

    #[test]
    fn three_reads_of_a_hundred_turn() {
        let mut budget = Budget::default();
        let mut turned = 0;
        for _ in 0..10_000 {
            assert!(!budget.probes());
            budget.earn();
            while budget.is_enough() {
                budget.spend();
                turned += 1;
            }
        }
        assert_eq!(turned, 300);
        (0..10_000).for_each(|_| budget.earn());
        assert_eq!(budget.tokens, MOST_TOKENS);
        assert_eq!((0..10_000).filter(|_| budget.probes()).count(), 100);
    }
}
