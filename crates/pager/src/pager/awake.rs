//! Keeps the other CPU of two awake while one thread of the program waits for page after page.
//!
//! The pager serves such a thread on the CPU where it waits. The kernel wakes it on the other CPU whenever
//! that one is at rest; then the pager follows, and the next wake-up goes back. Where it takes long to wake a
//! CPU (virtual machines, above all), that is half of a miss. A thread of `rampool run`, of the lowest
//! niceness, keeps the other CPU from resting, so the program's thread stays.
//!
//! ```text
//!   fault ---> Rule, tries both ways ---> beat ~~~ shared page ~~~> thread of `rampool run` looks, or sleeps
//!                 ^                                                     | others want the CPU
//!                 '-------- leaves it alone for a while <~~ crowded ~~~~'
//! ```
//!
//! It takes a CPU's time, so it must make faults follow each other one and a half times as fast. With more
//! than two CPUs the kernel would find another one at rest.

use std::time::{Duration, Instant};

use rampool_kernel::awake::AwakePage;
use rampool_net::two_ways::{Turns, TwoWays};

/// It takes thousands of faults until the threads stay where they are.
const TURNS: Turns = Turns { turn: 8192, unsettled: 2048, each: 1 };
/// The CPU is left to others for so long; doubled each time. The store itself is among the others while a
/// program fills its memory, and what comes after that must not wait long.
const SHORTEST_PAUSE: Duration = Duration::from_millis(64);
const LONGEST_PAUSE: Duration = Duration::from_millis(256);

/// Whether the other CPU is to be kept awake.
#[derive(Debug)]
struct Rule {
    /// To let it rest is the first, to keep it awake the second.
    ways: TwoWays,
    last_fault: Duration,
    pause_until: Duration,
    next_pause: Duration,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            ways: TwoWays::new(TURNS).from_the_second(),
            last_fault: Duration::ZERO,
            pause_until: Duration::ZERO,
            next_pause: SHORTEST_PAUSE,
        }
    }
}

impl Rule {
    /// A fault of the one thread that has them, at this time. `delayed`: since the last one, the pager did
    /// something that takes as long either way. Returns whether to keep the CPU awake until the next one.
    fn fault(&mut self, now: Duration, delayed: bool) -> bool {
        let since = now.saturating_sub(std::mem::replace(&mut self.last_fault, now));
        if now < self.pause_until {
            return false;
        }
        if !delayed {
            self.ways.waited(since);
        }
        self.ways.is_second()
    }

    /// Others want the CPU.
    fn crowded(&mut self, now: Duration) {
        self.ways = TwoWays::new(TURNS).from_the_second();
        self.pause_until = now + self.next_pause;
        self.next_pause = (2 * self.next_pause).min(LONGEST_PAUSE);
    }
}

/// Keeps the other CPU awake where that helps.
#[derive(Debug)]
pub struct Awake {
    page: AwakePage,
    cpus: [usize; 2],
    rule: Rule,
    started: Instant,
    /// The pager did something else since the last fault.
    delayed: bool,
    wanted: bool,
    crowded: u32,
}

impl Awake {
    /// `None` unless the process has two CPUs, and the time of both.
    #[must_use]
    pub fn new(page: AwakePage) -> Option<Self> {
        let cpus = two_cpus()?;
        let crowded = page.crowded();
        Some(Self {
            page,
            cpus,
            rule: Rule::default(),
            started: Instant::now(),
            delayed: false,
            wanted: false,
            crowded,
        })
    }

    /// The next fault comes late because of what the pager does now.
    pub(super) fn delays(&mut self) {
        self.delayed = true;
    }

    /// A fault came at `now`, of the one thread that has them, on `here`, where the pager is as well; or
    /// `None`. Returns whether the other CPU is kept awake from now on, and was not.
    pub(super) fn fault(&mut self, now: Instant, here: Option<usize>) -> bool {
        let delayed = std::mem::take(&mut self.delayed);
        let since_start = now.duration_since(self.started);
        let crowded = self.page.crowded();
        if std::mem::replace(&mut self.crowded, crowded) != crowded {
            self.rule.crowded(since_start);
        }
        let other = here.map(|here| if self.cpus[0] == here { self.cpus[1] } else { self.cpus[0] });
        let other = other.filter(|_| self.rule.fault(since_start, delayed));
        if let Some(cpu) = other {
            self.page.beat(cpu);
        }
        !std::mem::replace(&mut self.wanted, other.is_some()) && self.wanted
    }
}

/// The CPUs that the process may use, if they are two and it may use all of their time.
#[must_use]
pub fn two_cpus() -> Option<[usize; 2]> {
    // A container may have less time than it has CPUs.
    let time = std::thread::available_parallelism().map_or(1, usize::from);
    <[usize; 2]>::try_from(rampool_kernel::thread::allowed_cpus()).ok().filter(|cpus| cpus.len() == time)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that has a fault every so many microseconds, while the other CPU rests and while it is
    /// awake. Returns when that was over, and at how many faults it was kept awake.
    fn run(rule: &mut Rule, from: Duration, faults: u32, rests: u64, awake: u64) -> (Duration, u32) {
        let (mut now, mut kept, mut is_awake) = (from, 0, false);
        for _ in 0..faults {
            now += Duration::from_micros(if is_awake { awake } else { rests });
            is_awake = rule.fault(now, false);
            kept += u32::from(is_awake);
        }
        (now, kept)
    }

    #[test]
    fn the_cpu_is_kept_awake_where_faults_follow_each_other_faster_then() {
        let (_, kept) = run(&mut Rule::default(), Duration::ZERO, 2_000_000, 24, 13);
        assert!(kept > 1_800_000, "{kept}");
    }

    #[test]
    fn the_cpu_rests_where_that_gains_little_or_nothing() {
        for awake in [17, 24, 200] {
            let (_, kept) = run(&mut Rule::default(), Duration::ZERO, 2_000_000, 24, awake);
            assert!(kept < 200_000, "{kept} at {awake} us");
        }
    }

    #[test]
    fn evictions_tell_nothing_about_either_way() {
        let (mut rule, mut now, mut kept, mut is_awake) = (Rule::default(), Duration::ZERO, 0, false);
        for fault in 0..2_000_000 {
            let evicts = fault % 512 == 0;
            now += Duration::from_micros(if evicts {
                9000
            } else if is_awake {
                10
            } else {
                24
            });
            is_awake = rule.fault(now, evicts);
            kept += u32::from(is_awake);
        }
        assert!(kept > 1_800_000, "{kept}");
    }

    #[test]
    fn a_cpu_that_others_use_is_left_to_them_ever_longer() {
        let mut rule = Rule::default();
        let mut now = Duration::ZERO;
        for pause in [SHORTEST_PAUSE, 2 * SHORTEST_PAUSE, 4 * SHORTEST_PAUSE] {
            let (at, kept) = run(&mut rule, now, 100_000, 24, 13);
            assert!(kept > 0);
            rule.crowded(at);
            let faults = u32::try_from(pause.as_micros() / 24 - 1).unwrap();
            let (at, kept) = run(&mut rule, at, faults, 24, 13);
            assert_eq!(kept, 0);
            now = at;
        }
    }
}
