//! Whether somebody else wants the CPU on which the pager spins.
//!
//! Spinning for an answer saves a wake-up, which costs more than everything else in a fault, as long as the CPU is idle otherwise: the thread that waits
//! for the page would sleep on it. Where others want it (more threads than CPUs, a memory server on the same machine) a spinning pager keeps out the
//! very thread that is to answer. The signs are gaps: between two looks at the clock there is time in which somebody else ran.

use std::time::{Duration, Instant};

/// Between two looks while spinning passes far less, unless something else ran on this CPU.
const GAP: Duration = Duration::from_micros(15);
/// Waits after which it is decided anew.
const SAMPLE: u32 = 128;
/// One disturbed wait in so many is company.
const DISTURBED: u32 = 8;
/// Samples without spinning after a disturbed one; doubled each time up to `LONGEST_CALM`.
const CALM: u32 = 8;
const LONGEST_CALM: u32 = 512;

#[derive(Debug)]
pub(super) struct Company {
    last_look: Option<Instant>,
    disturbed: bool,
    waits: u32,
    disturbed_waits: u32,
    /// Samples left without spinning.
    calm: u32,
    next_calm: u32,
}

impl Default for Company {
    fn default() -> Self {
        Self { last_look: None, disturbed: false, waits: 0, disturbed_waits: 0, calm: 0, next_calm: CALM }
    }
}

impl Company {
    /// Somebody else needs this CPU: do not spin on it, and do not bind to it.
    pub fn expected(&self) -> bool {
        self.calm > 0
    }

    /// Called at every look of a spinning wait.
    pub fn spinning(&mut self, now: Instant) {
        if self.last_look.is_some_and(|last| now.duration_since(last) > GAP) {
            self.disturbed = true;
        }
        self.last_look = Some(now);
    }

    /// The answer did not come while there was spinning for it: whoever is to give it may wait for this very CPU, or is far away.
    pub fn in_vain(&mut self) {
        self.disturbed |= self.last_look.is_some();
    }

    /// A wait for an answer is over, or there was none. Counts those in which was spun, and all of them while spinning is off.
    pub fn waited(&mut self) {
        let spun = self.last_look.take().is_some();
        if !spun && self.calm == 0 {
            return;
        }
        self.waits += 1;
        self.disturbed_waits += u32::from(std::mem::take(&mut self.disturbed));
        if self.waits < SAMPLE {
            return;
        }
        if self.calm > 0 {
            self.calm -= 1;
        } else if self.disturbed_waits * DISTURBED > self.waits {
            self.calm = self.next_calm;
            self.next_calm = (self.next_calm * 2).min(LONGEST_CALM);
        } else {
            self.next_calm = CALM;
        }
        (self.waits, self.disturbed_waits) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(company: &mut Company, now: &mut Instant, gap: Duration) {
        if !company.expected() {
            for step in [Duration::from_micros(1), gap, Duration::from_micros(1)] {
                *now += step;
                company.spinning(*now);
            }
        }
        company.waited();
    }

    #[test]
    fn it_stops_for_company_and_tries_again_ever_more_rarely() {
        let (mut company, mut now) = (Company::default(), Instant::now());
        let mut spun = 0;
        for _ in 0..100_000 {
            spun += u32::from(!company.expected());
            wait(&mut company, &mut now, Duration::from_micros(40));
        }
        assert!(spun <= SAMPLE * 14, "{spun} waits were spun in spite of company");
        for _ in 0..LONGEST_CALM * SAMPLE {
            wait(&mut company, &mut now, Duration::from_micros(1));
        }
        assert!(!company.expected(), "alone again");
    }

    #[test]
    fn alone_it_goes_on_spinning() {
        let (mut company, mut now) = (Company::default(), Instant::now());
        for n in 0..10_000 {
            // Now and then a timer, or another machine's guest, takes a moment.
            wait(&mut company, &mut now, Duration::from_micros(if n % 50 == 0 { 30 } else { 1 }));
            assert!(!company.expected());
        }
    }
}
