//! Which of two ways to wait is the better one: both are tried.
//!
//! A *trial* sets the other way against the present one, in turns of a few waits, so that both meet the same
//! phase of the program. It ends early where the outcome is clear. Trials become rare where they confirm the
//! choice, and come at once where waits have become longer.

use std::time::Duration;

/// Waits before the next trial, but at least a few times those of a trial; doubled each time that one
/// confirms the choice.
const SOON: u32 = 256;
const LATEST: u32 = 1 << 15;
/// No delay is longer: the program wanted nothing.
const REST: Duration = Duration::from_millis(20);
/// The second way must be better by one part in so many. Two sides that wait for each other, each with a
/// choice of its own, would otherwise talk each other into it.
const MARGIN: u64 = 2;
/// So many times as long as they were, waits ask for a trial at once.
const WORSE: u64 = 4;

/// How a trial goes.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// Waits of one way in a row.
    pub turn: u32,
    /// How many of the first do not count: the threads still stand where the other way has put them.
    pub unsettled: u32,
    /// Turns of each way.
    pub each: u32,
}

impl Turns {
    fn counted(self) -> u32 {
        (self.turn - self.unsettled) * self.each
    }

    fn trial(self) -> u32 {
        2 * self.turn * self.each
    }

    fn soon(self) -> u32 {
        SOON.max(3 * self.trial())
    }

    fn latest(self) -> u32 {
        LATEST.max(64 * self.trial())
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

#[derive(Clone, Copy, Debug, Default)]
struct Trial {
    waits: u32,
    present: Waits,
    other: Waits,
}

/// The choice between two ways, of which the first is taken unless the second has proved better.
#[derive(Clone, Debug)]
pub struct TwoWays {
    turns: Turns,
    is_second: bool,
    trial: Option<Trial>,
    /// Waits until the next trial, and until the one after it if that confirms the choice.
    until_trial: u32,
    next_trial: u32,
    /// A mean of the last waits, and what it was when the present way was last chosen; 0 before.
    recent_ns: u64,
    usual_ns: u64,
}

impl TwoWays {
    #[must_use]
    pub fn new(turns: Turns) -> Self {
        Self {
            turns,
            is_second: false,
            trial: None,
            until_trial: turns.turn,
            next_trial: turns.soon(),
            recent_ns: 0,
            usual_ns: 0,
        }
    }

    /// Takes the second way at first.
    #[must_use]
    pub fn from_the_second(self) -> Self {
        Self { is_second: true, ..self }
    }

    /// The way that is taken apart from trials is the second.
    #[must_use]
    pub fn prefers_second(&self) -> bool {
        self.is_second
    }

    /// The wait to come goes the second way.
    #[must_use]
    pub fn is_second(&self) -> bool {
        self.is_second != self.trial.is_some_and(|trial| self.is_others_turn(trial))
    }

    #[must_use]
    pub fn is_trying(&self) -> bool {
        self.trial.is_some()
    }

    /// The other way has the first turn.
    fn is_others_turn(&self, trial: Trial) -> bool {
        (trial.waits / self.turns.turn).is_multiple_of(2)
    }

    /// A wait is over that took this long.
    pub fn waited(&mut self, time: Duration) {
        if time > REST {
            return;
        }
        let ns = u64::try_from(time.as_nanos()).expect("below REST");
        match self.trial {
            Some(trial) => self.tried(trial, ns),
            None => self.count_down(ns),
        }
    }

    fn count_down(&mut self, ns: u64) {
        self.until_trial = self.until_trial.saturating_sub(1);
        self.recent_ns = self.recent_ns - self.recent_ns / 64 + ns / 64;
        let worse = self.usual_ns != 0 && self.recent_ns / WORSE > self.usual_ns;
        if worse {
            self.next_trial = self.turns.soon();
        }
        if worse || self.until_trial == 0 {
            self.trial = Some(Trial::default());
        }
    }

    fn tried(&mut self, mut trial: Trial, ns: u64) {
        let counted = self.turns.counted();
        let usual = trial.other.mean().into_iter().chain(trial.present.mean()).fold(self.recent_ns, u64::min);
        // A wait that costs as much as all the others counts wherever it falls.
        if trial.waits % self.turns.turn >= self.turns.unsettled || ns > usual * u64::from(counted) {
            if self.is_others_turn(trial) { trial.other.add(ns) } else { trial.present.add(ns) }
        }
        trial.waits += 1;
        self.trial = Some(trial);
        if let Some(is_better) = self.verdict(trial) {
            self.decide(trial, is_better);
        }
    }

    /// Whether the other way is better, once that is known.
    fn verdict(&self, trial: Trial) -> Option<bool> {
        let counted = self.turns.counted();
        let present = trial.present.mean().unwrap_or(self.recent_ns);
        let other = trial.other.mean()?;
        let most = |mean: u64| 2 * u64::from(counted) * mean;
        if trial.other.ns > most(present) {
            Some(false)
        } else if trial.present.ns > most(other) {
            Some(true)
        } else {
            let both = trial.present.count >= counted && trial.other.count >= counted;
            let (first, second) = if self.is_second { (other, present) } else { (present, other) };
            both.then(|| (second + second / MARGIN < first) != self.is_second)
        }
    }

    fn decide(&mut self, trial: Trial, is_better: bool) {
        self.trial = None;
        let chosen = if is_better { trial.other } else { trial.present };
        self.usual_ns = chosen.mean().unwrap_or(self.recent_ns);
        self.recent_ns = self.usual_ns;
        if is_better {
            self.is_second = !self.is_second;
            self.next_trial = self.turns.soon();
        } else {
            self.next_trial = (2 * self.next_trial).min(self.turns.latest());
        }
        self.until_trial = self.next_trial;
    }
}
