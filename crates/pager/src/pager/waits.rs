//! How the pager waits: on which CPU, and for how long it looks before it sleeps.

use std::time::{Duration, Instant};

use rampool_net::adaptive_spin::AdaptiveSpin;
use rampool_paging::follow::{Advice, Follow};

use super::awake::Awake;

/// How a pager waits.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// Spin this long for an answer, or for the next fault, before sleeping: as long as most of them come
    /// within this time, and while yielding the CPU to other threads. Zero: never.
    pub spin: Duration,
    /// Run on the CPU where the faults happen, if they are one thread's and the answers come while the pager
    /// spins.
    pub follow_faults: bool,
}

impl Default for Waiting {
    fn default() -> Self {
        Self { spin: Duration::from_micros(100), follow_faults: true }
    }
}

/// See the module.
pub(super) struct Waits {
    how: Waiting,
    /// With answers that threads wait for.
    answers: AdaptiveSpin,
    /// With what comes while no such answer is due.
    events: AdaptiveSpin,
    idle_since: Option<Instant>,
    /// How often the next event has been looked for since the last one.
    looks: u32,
    follow: Follow,
    /// `None`: this process has not two CPUs, or its pages are not read in place.
    awake: Option<Awake>,
    fault_started: Option<Instant>,
}

impl Waits {
    pub fn new(how: Waiting) -> Self {
        Self {
            how,
            answers: AdaptiveSpin::new(how.spin),
            events: AdaptiveSpin::new(how.spin),
            idle_since: None,
            looks: 0,
            follow: Follow::default(),
            awake: None,
            fault_started: None,
        }
    }

    pub fn keep_awake(&mut self, awake: Option<Awake>) {
        self.awake = awake;
    }

    /// A thread waits for a page.
    pub fn fault(&mut self, now: Instant, thread: u32) {
        self.begin(now);
        self.follow(thread);
        if self.awake.as_mut().is_some_and(|awake| awake.fault(now, self.follow.cpu())) {
            self.follow.look_again();
        }
    }

    /// A fault is about to be served.
    pub fn begin(&mut self, now: Instant) {
        self.fault_started = Some(now);
    }

    /// The thread that waited longest has its page; how long that took, once for each fault.
    pub fn served(&mut self) -> Option<Duration> {
        self.fault_started.take().map(|since| since.elapsed())
    }

    /// The next fault comes late because of what the pager does now: pages leave, or it searches.
    pub fn delays(&mut self) {
        self.awake.iter_mut().for_each(Awake::delays);
    }

    /// Something came. `due`: a thread waited for an answer.
    pub fn came(&mut self, now: Instant, due: bool) {
        self.looks = 0;
        if let Some(since) = self.idle_since.take() {
            self.of(due).waited(now.duration_since(since));
        }
    }

    /// Whether it is looked for events before the pager sleeps.
    pub fn looks_for_events(&self) -> bool {
        !self.events.time().is_zero()
    }

    /// The thread that waited has been let go on. `met`: its next fault is there already; otherwise it waits
    /// for this very CPU.
    pub fn has_let_go_on(&mut self, now: Instant, met: bool) {
        if met {
            self.events.waited(Duration::ZERO);
        } else {
            self.idle_since = Some(now);
            self.events.look_again(Duration::ZERO, true);
        }
    }

    /// There is nothing to do. Whether to look again at once, rather than to sleep.
    pub fn look_again(&mut self, now: Instant, due: bool) -> bool {
        let waited = now.duration_since(*self.idle_since.get_or_insert(now));
        let spin = self.of(due);
        if waited < spin.time() {
            // While no answer is due, the thread that was served last may wait for this very CPU.
            spin.look_again(waited, !due);
            self.looks += 1;
            return true;
        }
        spin.sleeps();
        false
    }

    fn of(&mut self, due: bool) -> &mut AdaptiveSpin {
        if due { &mut self.answers } else { &mut self.events }
    }

    /// Keeps the pager on the CPU where the program takes its faults: waking a sleeping CPU costs more than
    /// everything else in a fault.
    fn follow(&mut self, thread: u32) {
        if !self.how.follow_faults || thread == 0 {
            return;
        }
        let Some(advice) = self.follow.fault(thread, self.looks > 1) else { return };
        let looks = self.how.spin.is_zero() || self.answers.is_worth_it() || self.events.is_worth_it();
        let cpu = match advice {
            Advice::AskFor(thread) if looks => rampool_kernel::thread::cpu_of(thread),
            Advice::AskFor(_) | Advice::Anywhere => None,
        };
        let pinned = match cpu {
            cpu if cpu == self.follow.cpu() => Ok(()),
            Some(cpu) => rampool_kernel::thread::pin_to_cpu(cpu),
            None => rampool_kernel::thread::unpin(),
        };
        self.follow.moved(if pinned.is_ok() { cpu } else { self.follow.cpu() });
    }
}
