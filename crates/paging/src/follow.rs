//! On which CPU the pager serves faults: on the one where they happen, if one thread has them all. Then neither
//! has to wake another CPU for the other.
//!
//! Where the thread runs is asked seldom, since the answer is a file of the kernel's. A pager on the thread's
//! CPU finds its next fault as soon as it has let the thread run; one that looks in vain first is probably
//! elsewhere, and asks sooner.
//!
//! The kernel may wake the thread on another CPU again and again, because one is idle. Then following is of no
//! use, and is left for a while.

/// Faults between two questions where nothing suggests one.
const SAMPLE: u32 = 256;
/// Of so many faults, one in this many may be other threads'.
const OTHERS: u32 = 16;
/// Faults in a row that were looked for in vain, before the question.
const SUSPECT: u32 = 2;
/// A move has been of use if the next suspicion is so many faults away.
const OF_USE: u32 = 64;
/// Faults without suspicion after a question or a move that was of no use; doubled each time.
const SHORTEST_PAUSE: u32 = 1 << 8;
const LONGEST_PAUSE: u32 = 1 << 14;

/// What to find out, or to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// The thread's CPU is where the pager belongs; tell [`Follow::moved`].
    AskFor(u32),
    /// Several threads have faults: any CPU will do; tell [`Follow::moved`].
    Anywhere,
}

/// Which CPU the faults are followed to.
#[derive(Clone, Debug)]
pub struct Follow {
    thread: u32,
    faults: u32,
    of_others: u32,
    vain: u32,
    /// The question that is open was asked out of suspicion.
    suspects: bool,
    /// Faults since the last move out of suspicion.
    since_move: u32,
    pause: u32,
    next_pause: u32,
    cpu: Option<usize>,
}

impl Default for Follow {
    fn default() -> Self {
        Self {
            thread: 0,
            faults: 0,
            of_others: 0,
            vain: 0,
            suspects: false,
            since_move: OF_USE,
            pause: 0,
            next_pause: SHORTEST_PAUSE,
            cpu: None,
        }
    }
}

impl Follow {
    /// The CPU that the pager is kept on.
    #[must_use]
    pub fn cpu(&self) -> Option<usize> {
        self.cpu
    }

    /// A fault of `thread`, which was looked for `in_vain` before it came.
    pub fn fault(&mut self, thread: u32, in_vain: bool) -> Option<Advice> {
        if thread != self.thread {
            self.of_others += 1;
            self.thread = thread;
        }
        self.vain = if in_vain { self.vain + 1 } else { 0 };
        self.faults += 1;
        self.since_move = self.since_move.saturating_add(1);
        self.pause = self.pause.saturating_sub(1);
        self.suspects = self.cpu.is_some() && self.vain >= SUSPECT && self.pause == 0;
        if self.faults % SAMPLE != 1 && !self.suspects {
            return None;
        }
        let single = self.of_others <= self.faults.min(SAMPLE).div_ceil(OTHERS);
        if !self.suspects {
            (self.faults, self.of_others) = (1, 0);
        }
        self.vain = 0;
        if single { Some(Advice::AskFor(thread)) } else { self.cpu.take().map(|_| Advice::Anywhere) }
    }

    /// The pager is kept on this CPU now: the one of the thread that was asked for, or none.
    pub fn moved(&mut self, cpu: Option<usize>) {
        let moves = cpu != std::mem::replace(&mut self.cpu, cpu);
        if !self.suspects || cpu.is_none() {
            return;
        }
        // Without a move, the thread was about something else before this fault.
        if moves && self.since_move >= OF_USE {
            self.next_pause = SHORTEST_PAUSE;
        } else {
            self.rest();
        }
        self.since_move = 0;
    }

    /// Threads will stay longer where they are than before.
    pub fn look_again(&mut self) {
        (self.pause, self.next_pause) = (0, SHORTEST_PAUSE);
    }

    fn rest(&mut self) {
        self.pause = self.next_pause;
        self.next_pause = (2 * self.next_pause).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program of one thread, which goes on on CPU `goes_on(fault, at)` after a fault on `at`. Returns how
    /// many faults were served from another CPU, and how often the thread's was asked for.
    fn run(faults: u32, mut goes_on: impl FnMut(u32, usize) -> usize) -> (u32, u32) {
        let (mut follow, mut elsewhere, mut asked, mut at) = (Follow::default(), 0, 0, 0);
        for fault in 0..faults {
            let apart = follow.cpu() != Some(at);
            elsewhere += u32::from(apart);
            if let Some(advice) = follow.fault(7, apart) {
                assert_eq!(advice, Advice::AskFor(7));
                asked += 1;
                follow.moved(Some(at));
            }
            at = goes_on(fault, at);
        }
        (elsewhere, asked)
    }

    #[test]
    fn the_cpu_of_one_thread_is_found_at_its_first_fault() {
        let (elsewhere, asked) = run(10_000, |_, at| at);
        assert_eq!(elsewhere, 1);
        assert!(asked <= 10_000 / SAMPLE + 1, "{asked}");
    }

    #[test]
    fn a_thread_that_moves_now_and_then_is_followed_within_some_faults() {
        let (elsewhere, _) = run(100_000, |fault, at| if fault % 1000 == 999 { 1 - at } else { at });
        assert!(elsewhere <= 100 * (SUSPECT + 1), "{elsewhere}");
    }

    /// As on a machine with idle CPUs whose kernel wakes the thread on the one that the pager has left.
    #[test]
    fn a_thread_that_never_stays_is_asked_about_seldom() {
        let (_, asked) = run(1_000_000, |_, at| 1 - at);
        assert!(asked <= 2 * (1_000_000 / SAMPLE), "{asked}");
    }

    #[test]
    fn several_threads_are_not_followed() {
        let mut follow = Follow::default();
        follow.fault(1, false);
        follow.moved(Some(0));
        let advice: Vec<Advice> = (0..2 * SAMPLE)
            .filter_map(|fault| follow.fault(fault % 3, false).inspect(|_| follow.moved(None)))
            .collect();
        assert_eq!(advice, [Advice::Anywhere]);
        assert_eq!(follow.cpu(), None);
    }

    /// The thread sleeps, or does something else, before its next fault: it is where the pager is.
    #[test]
    fn faults_that_are_late_for_another_reason_are_asked_about_ever_less() {
        let (mut follow, mut asked) = (Follow::default(), 0);
        for _ in 0..100 * SAMPLE {
            if follow.fault(7, true).is_some() {
                asked += 1;
                follow.moved(Some(0));
            }
        }
        assert!(asked <= 100 + 16, "{asked}");
    }

    #[test]
    fn a_thread_that_cannot_be_placed_is_asked_about_as_seldom_as_any() {
        let (mut follow, mut asked) = (Follow::default(), 0);
        for _ in 0..100 * SAMPLE {
            if follow.fault(7, true).is_some() {
                asked += 1;
                follow.moved(None);
            }
        }
        assert_eq!(asked, 100);
    }
}
