//! How soon the agent's thread gets a CPU.
//!
//! While others want the CPUs, the program touches fresh memory in its share of the time, and it takes longer
//! to make a page leave than to touch one. So the agent's thread goes first until the program is within its
//! budget, where the system allows that (CAP_SYS_NICE or RLIMIT_NICE).

use rampool_kernel::thread;

/// Of the calling thread.
pub struct ThreadPriority {
    usual: i32,
    on: bool,
}

impl ThreadPriority {
    pub fn begin() -> Self {
        thread::ask_for_short_slices();
        Self { usual: thread::niceness(), on: false }
    }

    pub fn set(&mut self, on: bool) {
        const FIRST: i32 = -20;
        if on != self.on {
            self.on = on;
            thread::be_nice(if on { FIRST } else { self.usual });
        }
    }
}
