//! How to wait for what comes next: look for it again and again, or sleep until the kernel wakes the thread.
//!
//! To wake a CPU that is at rest costs two microseconds on some machines and fifty on others, virtual ones
//! above all. To look costs nothing while nobody else wants the CPU, and a time slice of milliseconds where
//! somebody does: a thread that yields stays in the run queue behind the others, while a sleeping one is woken
//! for the event. No constant tells these apart, so both ways are tried, and the one with the shorter waits is
//! kept:
//!
//! * Looking is for what comes soon: it ends after `most`, and does not begin while most waits take longer
//!   (competitive spinning: Karlin, Li, Manasse, Owicki, SOSP '91).
//! * A *trial* sets the other way against the present one, in turns of a few waits, so that both meet the
//!   same phase of the program. It ends early where the outcome is clear.
//! * Trials become rare where they confirm the choice, and come at once where waits have become longer.

use std::time::Duration;

/// Waits that are remembered, about.
const MEMORY: u32 = 32;
/// Spinning between two yields of the CPU: a reply from the same machine comes within this time.
const KEEP_CPU: Duration = Duration::from_micros(5);
/// Waits of one way in a row during a trial, and how many of the first do not count: the threads still stand
/// where the other way has put them.
const TURN: u32 = 18;
const UNSETTLED: u32 = 6;
/// Waits of each way that count in a trial, at most.
const TRIAL: u32 = 24;
/// Waits before the next trial. Doubled each time that one confirms the choice.
const SOON: u32 = 256;
const LATEST: u32 = 1 << 15;
/// No delay is longer: the program wanted nothing.
const REST: Duration = Duration::from_millis(20);
/// The other way must be better by one part in so many.
const MARGIN: u64 = 8;
/// So many times as long as they were, waits ask for a trial at once.
const WORSE: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Look,
    Sleep,
}

impl Way {
    fn other(self) -> Self {
        match self {
            Self::Look => Self::Sleep,
            Self::Sleep => Self::Look,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Waits {
    ns: u64,
    count: u32,
}

impl Waits {
    fn add(&mut self, ns: u64) {
        self.ns += ns;
        self.count += 1;
    }

    fn mean(self) -> Option<u64> {
        self.ns.checked_div(self.count.into())
    }
}

/// The other way against the present one.
#[derive(Clone, Copy, Debug, Default)]
struct Trial {
    waits: u32,
    present: Waits,
    other: Waits,
}

impl Trial {
    /// Whether the wait to come goes the other way, which has the first turn.
    fn is_others_turn(&self) -> bool {
        (self.waits / TURN).is_multiple_of(2)
    }

    fn waited(&mut self, ns: u64, recent_ns: u64) {
        let usual = self.other.mean().into_iter().chain(self.present.mean()).fold(recent_ns, u64::min);
        // A wait that costs as much as all the others counts wherever it falls.
        if self.waits % TURN >= UNSETTLED || ns > usual * u64::from(TRIAL) {
            if self.is_others_turn() { self.other.add(ns) } else { self.present.add(ns) }
        }
        self.waits += 1;
    }

    /// Whether the other way is better, once that is known. `recent_ns`: a wait of the present way before.
    fn verdict(&self, recent_ns: u64) -> Option<bool> {
        let present = self.present.mean().unwrap_or(recent_ns);
        let other = self.other.mean()?;
        let most = |mean: u64| 2 * u64::from(TRIAL) * mean;
        if self.other.ns > most(present) {
            Some(false)
        } else if self.present.ns > most(other) {
            Some(true)
        } else {
            let both = self.present.count >= TRIAL && self.other.count >= TRIAL;
            both.then(|| other + other / MARGIN < present)
        }
    }
}

/// How waits of one kind are waited.
#[derive(Clone, Debug)]
pub struct AdaptiveSpin {
    most: Duration,
    /// At most `MEMORY`; things come soon while it is at least the half.
    score: u32,
    way: Way,
    trial: Option<Trial>,
    /// Waits until the next trial, and until the one after it if that confirms the choice.
    until_trial: u32,
    next_trial: u32,
    /// A mean of the last waits, and what it was when the present way was last chosen; 0 before.
    recent_ns: u64,
    usual_ns: u64,
    /// How far the wait under way was when it last offered the CPU.
    offered_at: Duration,
}

impl AdaptiveSpin {
    /// Looks for `most` at a time, from the start.
    pub fn new(most: Duration) -> Self {
        Self {
            most,
            score: MEMORY / 2,
            way: Way::Look,
            trial: None,
            until_trial: TURN,
            next_trial: SOON,
            recent_ns: 0,
            usual_ns: 0,
            offered_at: Duration::ZERO,
        }
    }

    /// How long the wait to come looks before it sleeps.
    pub fn time(&self) -> Duration {
        let way = match &self.trial {
            Some(trial) if trial.is_others_turn() => self.way.other(),
            _ => self.way,
        };
        if way == Way::Look && self.comes_soon() { self.most } else { Duration::ZERO }
    }

    /// Looking is the way here.
    pub fn is_worth_it(&self) -> bool {
        self.way == Way::Look && self.comes_soon()
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
        if !could_look || time > REST {
            return;
        }
        let ns = u64::try_from(time.as_nanos()).expect("below REST");
        match self.trial.as_mut() {
            Some(trial) => trial.waited(ns, self.recent_ns),
            None => self.count_down(ns),
        }
        let verdict = self.trial.as_ref().and_then(|trial| trial.verdict(self.recent_ns));
        if let Some(is_better) = verdict {
            self.decide(is_better);
        }
    }

    fn count_down(&mut self, ns: u64) {
        self.until_trial = self.until_trial.saturating_sub(1);
        self.recent_ns = self.recent_ns - self.recent_ns / 64 + ns / 64;
        let worse = self.usual_ns != 0 && self.recent_ns / WORSE > self.usual_ns;
        if worse || self.until_trial == 0 {
            if worse {
                self.next_trial = SOON;
            }
            self.trial = Some(Trial::default());
        }
    }

    fn decide(&mut self, is_better: bool) {
        let Some(trial) = self.trial.take() else { return };
        let chosen = if is_better { trial.other } else { trial.present };
        self.usual_ns = chosen.mean().unwrap_or(self.recent_ns);
        self.recent_ns = self.usual_ns;
        if is_better {
            self.way = self.way.other();
            self.next_trial = SOON;
        } else {
            self.next_trial = (2 * self.next_trial).min(LATEST);
        }
        self.until_trial = self.next_trial;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(100);

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
        let (_, looked) = run(&mut spin, &QUIET, 0..u64::from(2 * LATEST));
        assert!(looked > u64::from(LATEST) / 2, "looked {looked} times");
    }

    #[test]
    fn trials_become_rare_while_they_confirm_the_choice() {
        let mut spin = AdaptiveSpin::new(MOST);
        run(&mut spin, &QUIET, 0..200_000);
        let (_, looked) = run(&mut spin, &QUIET, 0..1_000_000);
        assert!(
            1_000_000 - looked <= 1_000_000 / u64::from(LATEST) * u64::from(2 * TURN) + 2 * u64::from(TURN)
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
        assert!(spin.usual_ns < 20_000, "{}", spin.usual_ns);
    }

    #[test]
    fn who_shall_not_look_never_does() {
        let mut spin = AdaptiveSpin::new(Duration::ZERO);
        let (_, looked) = run(&mut spin, &QUIET, 0..10_000);
        assert_eq!(looked, 0);
        assert!(spin.trial.is_none());
    }
}
