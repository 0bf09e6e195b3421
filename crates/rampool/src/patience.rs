//! How long to look for what comes next before sleeping.
//!
//! To wake an idle CPU costs tens of microseconds on many machines (on virtual ones more than a whole fault), so who expects something soon does better to
//! look for it. The rule is that of competitive spinning (Karlin, Li, Manasse, Owicki: Empirical studies of competitive spinning for a shared-memory
//! multiprocessor, SOSP '91): look for about as long as a wake-up costs, and only while what was waited for lately came within that time. Waits that
//! were slept through are counted as well, so that looking begins again when things come fast again.
//!
//! Who looks gives its CPU to whoever else wants it, again and again ([`look_again`]); the time that takes counts as waiting. So one who stands in the way of others,
//! or of the very thread that is to answer, soon stops looking.

use std::time::Duration;

/// Waits that are remembered, about.
const MEMORY: u32 = 32;
/// Before it offers the CPU to others: an answer from next door comes within this time.
const KEEP_CPU: Duration = Duration::from_micros(5);

/// What the waits of one kind were like. Invariant: `score <= MEMORY`; looking pays while it is at least the half.
#[derive(Clone, Debug)]
pub(crate) struct Patience {
    most: Duration,
    score: u32,
}

impl Patience {
    /// Looks for `most` at a time, from the start.
    pub fn new(most: Duration) -> Self {
        Self { most, score: MEMORY / 2 }
    }

    /// How long a wait looks before it sleeps.
    pub fn time(&self) -> Duration {
        if self.is_worth_it() { self.most } else { Duration::ZERO }
    }

    /// Most waits ended before one would have stopped looking.
    pub fn is_worth_it(&self) -> bool {
        self.score >= MEMORY / 2
    }

    /// A wait is over that took this long.
    pub fn waited(&mut self, time: Duration) {
        self.score = if time <= self.most { (self.score + 1).min(MEMORY) } else { self.score.saturating_sub(1) };
    }
}

/// Between two looks of a wait that has taken `waited` so far.
pub(crate) fn look_again(waited: Duration) {
    if waited < KEEP_CPU {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(100);

    fn after(waits: impl IntoIterator<Item = u64>) -> Patience {
        let mut patience = Patience::new(MOST);
        for us in waits {
            patience.waited(Duration::from_micros(us));
        }
        patience
    }

    #[test]
    fn it_looks_while_most_things_come_soon() {
        assert_eq!(Patience::new(MOST).time(), MOST);
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
        let mut patience = Patience::new(Duration::ZERO);
        for _ in 0..2 * MEMORY {
            assert_eq!(patience.time(), Duration::ZERO);
            patience.waited(Duration::from_micros(1));
        }
    }
}
