//! SIGTERM and SIGINT, and where it is asked for SIGHUP, as events of a loop instead of interruptions.

use std::io;
use std::time::Duration;

pub struct EndSignals {
    set: libc::sigset_t,
}

impl EndSignals {
    /// Blocks both in this thread and those it starts from now on. They then arrive through
    /// [`EndSignals::wait`].
    pub fn block() -> io::Result<Self> {
        Self::block_with(&[])
    }

    /// The same with further signals.
    pub fn block_with(others: &[i32]) -> io::Result<Self> {
        let mut set = std::mem::MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set before anything else uses it.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
            libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
            others.iter().for_each(|other| _ = libc::sigaddset(set.as_mut_ptr(), *other));
            set.assume_init()
        };
        // SAFETY: a valid set; the old one is not asked for.
        match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } {
            0 => Ok(Self { set }),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// The signal that arrived, or `None` after this time.
    pub fn wait(&self, time: Duration) -> Option<i32> {
        let time = libc::timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        // SAFETY: a valid set and time; the details are not asked for.
        let signal =
            unsafe { libc::sigtimedwait(&raw const self.set, std::ptr::null_mut(), &raw const time) };
        (signal > 0).then_some(signal)
    }
}
