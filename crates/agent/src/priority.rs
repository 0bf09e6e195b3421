//! How soon the agent's thread gets a CPU.
//!
//! While others want the CPUs, the program touches fresh memory in its share of the time, and it takes longer
//! to make a page leave than to touch one. So the agent's thread goes first until the program is within its
//! budget, where the system allows that (CAP_SYS_NICE or RLIMIT_NICE).

/// Of the calling thread.
pub struct ThreadPriority {
    usual: libc::c_int,
    on: bool,
}

impl ThreadPriority {
    pub fn begin() -> Self {
        rampool_kernel::thread::ask_for_short_slices();
        // SAFETY: no preconditions; on Linux this is the calling thread's own.
        Self { usual: unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }, on: false }
    }

    pub fn set(&mut self, on: bool) {
        const FIRST: libc::c_int = -20;
        if on != self.on {
            self.on = on;
            // SAFETY: no preconditions. Where it is refused, nothing changes.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, if on { FIRST } else { self.usual }) };
        }
    }
}
