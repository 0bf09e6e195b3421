//! How fast what servers have missed is brought to them. While no thread waits for pages, as fast as the
//! connections carry it. While threads do, a piece at a time, of a size and with a pause that leaves the
//! slowest of a hundred answers about what it is without pieces.
//!
//! A level says how fast: from one page with a pause behind it, to pieces of many pages without a pause.
//! Answers that come later than nearly all do without pieces take it down, many others take it up. The lowest
//! level is no standstill: what is missed has one holder less, and what keeps coming would keep it so.
//!
//! The idea is that of transports for work that can wait (LEDBAT, RFC 6817; TCP Nice, Venkataramani et al.
//! 2002): give way to the delay that one causes. Here that delay is seen in the requests that matter,
//! wherever it comes from: a queue in this process, in a kernel or in a switch, or a server's CPU.

use std::time::Duration;

use crate::copies::{PIECE_PAGES, PIECES};
use crate::io::Time;

/// Threads wait for pages now and then, if one has within this time.
pub const CALM: Duration = Duration::from_millis(100);
/// A piece has `2^level` pages, and no pause behind it; or one page, and a pause `2^-level - 1` times as long
/// as it took.
const LOWEST: i32 = -2;
const HIGHEST: i32 = PIECE_PAGES.ilog2().cast_signed();
/// No pause is longer.
const LONGEST_PAUSE: Duration = Duration::from_millis(2);
/// An answer is late if it took more quarters than four of what ninety-nine of a hundred take without pieces.
const LATE_QUARTERS: u32 = 5;
/// One level up after so many answers, unless more than a hundredth of them were late: then two down, at
/// once.
const WINDOW: u32 = 256;
/// Each time that it goes down, it takes twice as many to go up, so many times: what is tried costs late
/// answers.
const MOST_PATIENCE: u32 = 4;
/// So many answers without pieces tell what is usual.
const ENOUGH: u32 = 128;

#[derive(Debug, Default)]
pub(crate) struct Pace {
    level: i32,
    /// When a thread waited last.
    demand_at: Option<Time>,
    usual: Usual,
    /// Answers since the level changed, and late ones among them.
    answers: u32,
    late: u32,
    patience: u32,
    under_way: usize,
    began_at: Time,
    /// When a piece was under way last, and when the next one may begin.
    ended_at: Option<Time>,
    next_at: Time,
}

impl Pace {
    /// A thread waits for something.
    #[inline]
    pub fn demanded(&mut self, now: Time) {
        self.demand_at = Some(now);
    }

    /// What a thread has waited for since `made_at` is there.
    #[inline]
    pub fn answered(&mut self, made_at: Time, now: Time) {
        self.demand_at = Some(now);
        let took = now - made_at;
        if self.under_way == 0 && self.ended_at.is_none_or(|ended| ended < made_at) {
            self.usual.add(took);
        }
        if self.under_way > 0 || self.ended_at.is_some_and(|ended| now <= ended + LONGEST_PAUSE) {
            self.judge(took);
        }
    }

    fn judge(&mut self, took: Duration) {
        let Some(usual) = self.usual.known() else { return };
        self.answers += 1;
        self.late += u32::from(took > usual * LATE_QUARTERS / 4);
        let window = WINDOW << self.patience;
        let step = match self.late * 100 > window {
            true => -2,
            false if self.answers == window => 1,
            false => return,
        };
        if step < 0 {
            self.patience = (self.patience + 1).min(MOST_PATIENCE);
        }
        self.level = (self.level + step).clamp(LOWEST, HIGHEST);
        (self.answers, self.late) = (0, 0);
    }

    pub fn is_busy(&self, now: Time) -> bool {
        self.demand_at.is_some_and(|at| now < at + CALM)
    }

    /// How many pages the next piece may have while no thread waits; `None`: it does not begin now.
    pub fn room(&self) -> Option<u32> {
        (self.under_way < PIECES).then_some(PIECE_PAGES)
    }

    /// The same while threads do.
    pub fn room_beside_demand(&self, now: Time) -> Option<u32> {
        (self.under_way == 0 && now >= self.next_at).then_some(1 << self.level.max(0))
    }

    /// When a piece may begin at the latest that waits for nothing else.
    pub fn next_at(&self) -> Option<Time> {
        (self.under_way == 0).then_some(self.next_at)
    }

    pub fn began(&mut self, now: Time) {
        self.under_way += 1;
        self.began_at = now;
    }

    pub fn ended(&mut self, now: Time) {
        self.under_way -= 1;
        let pauses = (1 << (-self.level).max(0)) - 1;
        self.next_at = now + ((now - self.began_at) * pauses).min(LONGEST_PAUSE);
        self.ended_at = Some(now);
    }
}

/// What ninety-nine of a hundred take no longer than: a longer one takes it up by ninety-nine steps, any
/// other down by one. A step is a part of it, at first a larger one.
#[derive(Debug, Default)]
pub(crate) struct Usual {
    ns: f64,
    count: u32,
}

impl Usual {
    #[inline]
    pub fn add(&mut self, took: Duration) {
        let ns = took.as_secs_f64() * 1e9;
        if self.count == 0 {
            self.ns = ns;
        }
        self.count = self.count.saturating_add(1);
        let step = 1.0 / f64::from(self.count.min(1500) + 100);
        self.ns *= if ns > self.ns { 1.0 + 99.0 * step } else { 1.0 - step };
    }

    pub fn known(&self) -> Option<Duration> {
        (self.count >= ENOUGH).then(|| Duration::from_secs_f64(self.ns / 1e9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    /// A thread that waits for one page after the other, and a server that gets what it has missed, in a
    /// world where a page of a piece costs so much of an answer's time that comes meanwhile.
    struct World {
        pace: Pace,
        now: u64,
        page_costs: u64,
        piece_ends: Option<(u64, u32)>,
        pages: u64,
        slow: u64,
        answers: u64,
    }

    impl World {
        fn new(page_costs: u64) -> Self {
            let (now, piece_ends) = (1, None);
            Self { pace: Pace::default(), now, page_costs, piece_ends, pages: 0, slow: 0, answers: 0 }
        }

        fn answer(&mut self, refills: bool) {
            let began = self.now;
            self.pace.demanded(Time(began));
            if refills
                && self.piece_ends.is_none()
                && let Some(pages) = self.pace.room_beside_demand(Time(began))
            {
                self.pace.began(Time(began));
                self.piece_ends = Some((began + 60 * US * u64::from(pages), pages));
            }
            let cost = self.piece_ends.map_or(0, |(_, pages)| u64::from(pages) * self.page_costs);
            self.now += 100 * US + self.answers % 7 * US + cost;
            self.pace.answered(Time(began), Time(self.now));
            self.answers += 1;
            self.slow += u64::from(self.now - began > 150 * US);
            if let Some((ends, pages)) = self.piece_ends.filter(|(ends, _)| *ends <= self.now) {
                self.pace.ended(Time(ends));
                self.piece_ends = None;
                self.pages += u64::from(pages);
            }
        }
    }

    fn after(page_costs: u64, answers: u64) -> World {
        let mut world = World::new(page_costs);
        (0..2000).for_each(|_| world.answer(false));
        assert_eq!((world.slow, world.pages), (0, 0));
        (0..answers).for_each(|_| world.answer(true));
        world
    }

    #[test]
    fn pieces_grow_where_answers_do_not_notice() {
        let world = after(0, 20_000);
        assert_eq!(world.pace.level, HIGHEST);
        assert_eq!(world.slow, 0);
    }

    #[test]
    fn pieces_stay_as_small_as_answers_need() {
        // Two pages cost less than a quarter, four more.
        let world = after(12 * US, 200_000);
        assert!((0..=2).contains(&world.pace.level), "{:?}", world.pace);
        assert!(world.slow * 100 <= world.answers, "{} of {} were slow", world.slow, world.answers);
    }

    #[test]
    fn pieces_go_on_whatever_they_cost() {
        let world = after(1000 * US, 20_000);
        assert_eq!(world.pace.level, LOWEST);
        let least = world.answers / 10;
        assert!(world.pages > least, "{} pages beside {} answers", world.pages, world.answers);
    }

    #[test]
    fn nothing_is_held_back_where_no_thread_waits() {
        let mut pace = Pace::default();
        pace.demanded(Time(5));
        assert!(pace.is_busy(Time(5)) && !pace.is_busy(Time(5) + CALM));
        for begun in 0..PIECES {
            assert_eq!(pace.room(), Some(PIECE_PAGES), "after {begun}");
            pace.began(Time(6));
        }
        assert_eq!((pace.room(), pace.room_beside_demand(Time(6))), (None, None));
    }

    #[test]
    fn what_is_usual_is_the_slowest_of_a_hundred() {
        let mut usual = Usual::default();
        assert_eq!(usual.known(), None);
        for at in 0..100_000u64 {
            // As many of each.
            usual.add(Duration::from_micros(100 + at * 37 % 1000));
        }
        let us = usual.known().unwrap().as_micros();
        assert!((1050..=1150).contains(&us), "{us}");
    }
}
