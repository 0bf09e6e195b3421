//! How long to look for what comes next before sleeping.
//!
//! Waking an idle CPU costs tens of microseconds on many machines (on virtual ones more than a whole fault),
//! so it is better to poll for something that is about to come. The rule is that of competitive spinning
//! (Karlin, Li, Manasse, Owicki: Empirical studies of competitive spinning for a shared-memory
//! multiprocessor, SOSP '91): poll for about as long as a wake-up costs, and only while recent waits ended
//! within that time. Waits that were slept through are counted as well, so that polling begins again when
//! events come fast again.
//!
//! A thread that polls yields its CPU again and again. If it does not get the CPU back soon, the CPU is busy,
//! and the very event that is polled for may be delayed by it: a sleeping thread is woken for the event, a
//! thread in the run queue is not. Then polling is barred, for longer each time that this happens again.

use std::time::Duration;

/// Waits that are remembered, about.
const MEMORY: u32 = 32;
/// Spinning between two yields of the CPU: a reply from the same machine comes within this time.
const KEEP_CPU: Duration = Duration::from_micros(5);
/// A gap between two looks is bad from so many times the time to look on.
const BAD_GAP: u32 = 4;
/// Waits without looking after a bad gap; doubled each time up to `LONGEST_BAR`.
const BAR: u32 = 64;
const LONGEST_BAR: u32 = 1 << 16;
/// Waits without a bad gap after which the next one counts as the first.
const GOOD_RUN: u32 = 1024;

/// What the waits of one kind were like. Invariant: `score <= MEMORY`; looking pays while it is at least the
/// half.
#[derive(Clone, Debug)]
pub struct AdaptiveSpin {
    most: Duration,
    score: u32,
    /// How far the wait under way was at the last look, if it was looked at all.
    looked_at: Option<Duration>,
    /// How far it was when it last offered the CPU.
    offered_at: Duration,
    /// Waits left without looking.
    barred: u32,
    next_bar: u32,
    /// Waits with looks since the last bad gap.
    good: u32,
}

impl AdaptiveSpin {
    /// Looks for `most` at a time, from the start.
    pub fn new(most: Duration) -> Self {
        Self {
            most,
            score: MEMORY / 2,
            looked_at: None,
            offered_at: Duration::ZERO,
            barred: 0,
            next_bar: BAR,
            good: 0,
        }
    }

    /// How long a wait looks before it sleeps.
    pub fn time(&self) -> Duration {
        if self.is_worth_it() { self.most } else { Duration::ZERO }
    }

    /// Most waits ended within the polling time, and polling keeps no other thread from the CPU.
    pub fn is_worth_it(&self) -> bool {
        self.barred == 0 && self.score >= MEMORY / 2
    }

    /// Between two looks of a wait that has taken `waited` so far. `yielding`: offers the CPU to others at
    /// once, not only after a while.
    pub fn look_again(&mut self, waited: Duration, yielding: bool) {
        self.see_gap(waited);
        self.looked_at = Some(waited);
        if yielding || waited >= self.offered_at + KEEP_CPU {
            self.offered_at = waited;
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }

    fn see_gap(&mut self, waited: Duration) {
        if self.looked_at.is_some_and(|last| waited.saturating_sub(last) > self.most * BAD_GAP) {
            self.barred = self.next_bar;
            self.next_bar = (2 * self.next_bar).min(LONGEST_BAR);
            self.good = 0;
        }
    }

    /// The time to look is over: the wait goes on asleep.
    pub fn sleeps(&mut self) {
        (self.looked_at, self.offered_at) = (None, Duration::ZERO);
    }

    /// A wait is over that took this long.
    pub fn waited(&mut self, time: Duration) {
        if self.barred > 0 {
            self.barred -= 1;
        } else {
            self.see_gap(time);
            self.good += u32::from(self.looked_at.is_some());
            if self.good >= GOOD_RUN {
                (self.good, self.next_bar) = (0, BAR);
            }
        }
        (self.looked_at, self.offered_at) = (None, Duration::ZERO);
        self.score =
            if time <= self.most { (self.score + 1).min(MEMORY) } else { self.score.saturating_sub(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(100);

    fn after(waits: impl IntoIterator<Item = u64>) -> AdaptiveSpin {
        let mut adaptive_spin = AdaptiveSpin::new(MOST);
        for us in waits {
            adaptive_spin.waited(Duration::from_micros(us));
        }
        adaptive_spin
    }

    #[test]
    fn it_looks_while_most_things_come_soon() {
        assert_eq!(AdaptiveSpin::new(MOST).time(), MOST);
        assert_eq!(after((0..1000).map(|n| if n % 3 == 0 { 5000 } else { 30 })).time(), MOST);
    }

    #[test]
    fn it_sleeps_while_most_things_take_long_and_looks_again_when_they_do_not() {
        let slow = (0..1000).map(|n| if n % 3 == 0 { 30 } else { 5000 });
        assert_eq!(after(slow.clone()).time(), Duration::ZERO);
        let fast_again = slow.chain((0..u64::from(MEMORY)).map(|_| 30));
        assert_eq!(after(fast_again).time(), MOST);
    }

    #[test]
    fn who_shall_not_look_never_does() {
        let mut adaptive_spin = AdaptiveSpin::new(Duration::ZERO);
        for _ in 0..2 * MEMORY {
            assert_eq!(adaptive_spin.time(), Duration::ZERO);
            adaptive_spin.waited(Duration::from_micros(1));
        }
    }

    /// A thread that polls is away for 4 ms; one that sleeps is woken soon. Returns how many of the waits
    /// were polled through.
    fn with_a_busy_thread(adaptive_spin: &mut AdaptiveSpin, waits: u32) -> u32 {
        let mut looked = 0;
        for _ in 0..waits {
            if adaptive_spin.time().is_zero() {
                adaptive_spin.waited(Duration::from_micros(50));
            } else {
                looked += 1;
                adaptive_spin.look_again(Duration::from_micros(1), true);
                adaptive_spin.waited(Duration::from_millis(4));
            }
        }
        looked
    }

    #[test]
    fn who_does_not_get_the_cpu_back_stops_looking_for_ever_longer() {
        let mut adaptive_spin = AdaptiveSpin::new(MOST);
        let looked = with_a_busy_thread(&mut adaptive_spin, 100_000);
        assert!(looked <= 12, "{looked} waits were looked through");
        // Alone again, it looks again, and one gap is no longer paid for as dearly.
        for _ in 0..LONGEST_BAR + 4 * GOOD_RUN {
            if !adaptive_spin.time().is_zero() {
                adaptive_spin.look_again(Duration::from_micros(1), true);
            }
            adaptive_spin.waited(Duration::from_micros(30));
        }
        assert_eq!(adaptive_spin.time(), MOST);
        assert_eq!(adaptive_spin.next_bar, BAR);
    }

    #[test]
    fn to_sleep_after_looking_is_no_gap() {
        let mut adaptive_spin = AdaptiveSpin::new(MOST);
        adaptive_spin.look_again(Duration::from_micros(90), true);
        adaptive_spin.sleeps();
        adaptive_spin.waited(Duration::from_secs(10));
        assert_eq!(adaptive_spin.barred, 0);
    }
}
