//! The end of a program none of whose threads calls `exit`.
//!
//! A process lives as long as one of its threads, the agent's included. Where the last one ends as the C
//! library ends threads, that calls `exit`, because our threads are not in its count
//! ([`rampool_kernel::thread`]). One that ends by the system call itself, or with a C library that does not
//! show its count, is noticed here.

use std::time::{Duration, Instant};

use rampool_kernel::thread::only_ours_are_left;

const LOOK_EVERY: Duration = Duration::from_millis(100);

pub struct Ending {
    next: Instant,
}

impl Ending {
    pub fn new() -> Self {
        Self { next: Instant::now() + LOOK_EVERY }
    }

    /// Ends the process if only the agent is left of it. Called by the agent's thread now and then; reads one
    /// line of /proc at most ten times a second.
    pub fn look(&mut self) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + LOOK_EVERY;
        if let Some(code) = only_ours_are_left() {
            // The kernel remembers no other thread's exit code.
            // SAFETY: ends every thread of this process; nothing of the program is left that could mind.
            unsafe { libc::syscall(libc::SYS_exit_group, code) };
        }
    }
}
