//! How to wait for what comes next: look for it again and again, or sleep until the kernel wakes the thread.
//!
//! To wake a CPU that is at rest costs two microseconds on some machines and fifty on others, virtual ones
//! above all. To look costs nothing while nobody else wants the CPU, and a time slice of milliseconds where
//! somebody does: a thread that yields stays in the run queue behind the others, while a sleeping one is
//! woken for the event. No constant tells these apart, so both are [tried](crate::two_ways).
//!
//! Looking is for what comes soon: it ends after `most`, and does not begin while most waits take longer
//! (competitive spinning: Karlin, Li, Manasse, Owicki, SOSP '91).

use std::time::Duration;

use crate::two_ways::{Turns, TwoWays};

/// Waits that are remembered, about.
const MEMORY: u32 = 32;
/// Spinning between two yields of the CPU: a reply from the same machine comes within this time.
const KEEP_CPU: Duration = Duration::from_micros(5);
const TURNS: Turns = Turns { turn: 18, unsettled: 6, each: 2 };

/// How waits of one kind are waited.
#[derive(Clone, Debug)]
pub struct AdaptiveSpin {
    most: Duration,
    /// At most `MEMORY`; things come soon while it is at least the half.
    score: u32,
    /// Looking is the first, sleeping the second.
    ways: TwoWays,
    /// How far the wait under way was when it last offered the CPU.
    offered_at: Duration,
}

impl AdaptiveSpin {
    /// Looks for `most` at a time, from the start.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        Self { most, score: MEMORY / 2, ways: TwoWays::new(TURNS), offered_at: Duration::ZERO }
    }

    /// How long the wait to come looks before it sleeps.
    #[must_use]
    pub fn time(&self) -> Duration {
        if self.comes_soon() && !self.ways.is_second() { self.most } else { Duration::ZERO }
    }

    /// Looking is the way here.
    #[must_use]
    pub fn is_worth_it(&self) -> bool {
        self.comes_soon() && !self.ways.prefers_second()
    }

    fn comes_soon(&self) -> bool {
        self.score >= MEMORY / 2
    }

    /// Between two looks of a wait that has taken `waited` so far. `yielding`: offers the CPU to others at
    /// once, not only after a while.
    pub fn look_again(&mut self, waited: Duration, yielding: bool) {
        if yielding || waited >= self.offered_at + KEEP_CPU {
            self.offered_at = waited;
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }

    /// The time to look is over: the wait goes on asleep.
    pub fn sleeps(&mut self) {
        self.offered_at = Duration::ZERO;
    }

    /// A wait is over that took this long.
    pub fn waited(&mut self, time: Duration) {
        self.offered_at = Duration::ZERO;
        let could_look = self.comes_soon() && !self.most.is_zero();
        self.score =
            if time <= self.most { (self.score + 1).min(MEMORY) } else { self.score.saturating_sub(1) };
        if could_look {
            self.ways.waited(time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(100);
    /// Waits between two trials, at most.
    const MOST_BETWEEN: u32 = 1 << 15;

    /// How long a wait takes on some machine: `look` and `sleep` from the number of the wait. Microseconds.
    struct Machine {
        look: fn(u64) -> u64,
        sleep: fn(u64) -> u64,
    }

    /// Waits of 6 us where the CPU is shared, of 58 where two CPUs wake each other (a virtual machine of two
    /// CPUs, measured).
    const QUIET: Machine = Machine { look: |_| 6, sleep: |_| 58 };
    /// Somebody computes on the CPU: who yields waits for a time slice.
    const BUSY: Machine = Machine { look: |_| 3000, sleep: |_| 15 };
    /// A batch of stores is packed on the CPU now and then, which is no reason not to look.
    const PACKING: Machine = Machine { look: |n| if n % 512 == 0 { 1500 } else { 9 }, sleep: |_| 58 };
    /// Waking is nearly free, and the program's own time differs from phase to phase.
    const METAL: Machine = Machine { look: |n| 5 + n / 3000 % 5 * 10, sleep: |n| 8 + n / 3000 % 5 * 10 };
    const TIE: Machine = Machine { look: |n| 20 + n % 7, sleep: |n| 20 + n % 7 };

    /// Returns the time of all waits, and of how many it looked.
    fn run(spin: &mut AdaptiveSpin, machine: &Machine, waits: std::ops::Range<u64>) -> (u64, u64) {
        let (mut total, mut looked) = (0, 0);
        for n in waits {
            let looks = !spin.time().is_zero();
            let us = if looks { (machine.look)(n) } else { (machine.sleep)(n) };
            total += us;
            looked += u64::from(looks);
            spin.waited(Duration::from_micros(us));
        }
        (total, looked)
    }

    fn total(wait: fn(u64) -> u64, waits: std::ops::Range<u64>) -> u64 {
        waits.map(wait).sum()
    }

    #[test]
    fn the_better_way_is_kept_at_a_small_price() {
        for (machine, best) in [
            (&QUIET, QUIET.look),
            (&BUSY, BUSY.sleep),
            (&PACKING, PACKING.look),
            (&METAL, METAL.look),
            (&TIE, TIE.look),
        ] {
            let mut spin = AdaptiveSpin::new(MOST);
            let (took, _) = run(&mut spin, machine, 0..200_000);
            let least = total(best, 0..200_000);
            assert!(took < least + least / 20, "{took} us, where {least} are possible");
        }
    }

    #[test]
    fn a_change_of_the_machine_is_noticed_both_ways() {
        let mut spin = AdaptiveSpin::new(MOST);
        run(&mut spin, &QUIET, 0..100_000);
        assert_eq!(spin.time(), MOST);
        // At once, because looking now costs a time slice each.
        let (took, looked) = run(&mut spin, &BUSY, 0..10_000);
        assert!(looked <= 24 && took < 10_000 * 24, "looked {looked} times, {took} us");
        // By the next trial, because sleeping costs no more than it did.
        run(&mut spin, &BUSY, 0..300_000);
        let (_, looked) = run(&mut spin, &QUIET, 0..u64::from(2 * MOST_BETWEEN));
        assert!(looked > u64::from(MOST_BETWEEN) / 2, "looked {looked} times");
    }

    #[test]
    fn trials_become_rare_while_they_confirm_the_choice() {
        let mut spin = AdaptiveSpin::new(MOST);
        run(&mut spin, &QUIET, 0..200_000);
        let (_, looked) = run(&mut spin, &QUIET, 0..1_000_000);
        assert!(
            1_000_000 - looked
                <= 1_000_000 / u64::from(MOST_BETWEEN) * u64::from(2 * TURNS.turn)
                    + 2 * u64::from(TURNS.turn)
        );
    }

    #[test]
    fn what_takes_long_is_slept_through() {
        const SLOW: Machine = Machine { look: |n| if n % 3 == 0 { 30 } else { 5000 }, sleep: SLOW_TOO };
        const SLOW_TOO: fn(u64) -> u64 = |n| if n % 3 == 0 { 30 } else { 5000 };
        let mut spin = AdaptiveSpin::new(MOST);
        run(&mut spin, &SLOW, 0..1000);
        assert_eq!(spin.time(), Duration::ZERO);
        run(&mut spin, &QUIET, 0..1000);
        assert_eq!(spin.time(), MOST);
    }

    #[test]
    fn a_rest_of_the_program_says_nothing_about_either_way() {
        let mut spin = AdaptiveSpin::new(MOST);
        for n in 0..100_000 {
            let us = if n % 8 == 0 {
                30_000
            } else if spin.time().is_zero() {
                58
            } else {
                6
            };
            spin.waited(Duration::from_micros(us));
        }
        assert!(spin.is_worth_it());
    }

    #[test]
    fn who_shall_not_look_never_does() {
        let mut spin = AdaptiveSpin::new(Duration::ZERO);
        let (_, looked) = run(&mut spin, &QUIET, 0..10_000);
        assert_eq!(looked, 0);
        assert!(!spin.ways.is_trying());
    }
}
