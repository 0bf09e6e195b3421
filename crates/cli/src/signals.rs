//! Signals on their way to programs that rampool started.

use std::time::Duration;

use anyhow::{Result, bail};

/// Signals are taken one by one instead of interrupting us.
pub struct Signals {
    before: libc::sigset_t,
    taken: libc::sigset_t,
}

impl Signals {
    /// Blocks them in this thread and those it starts from now on.
    pub fn block() -> Result<Self> {
        // SAFETY: the sets are initialised by the calls that fill them.
        unsafe {
            let mut taken = std::mem::zeroed::<libc::sigset_t>();
            let mut before = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut taken);
            for signal in [
                libc::SIGCHLD,
                libc::SIGINT,
                libc::SIGQUIT,
                libc::SIGTERM,
                libc::SIGHUP,
                libc::SIGUSR1,
                libc::SIGUSR2,
                libc::SIGTSTP,
                libc::SIGCONT,
                libc::SIGWINCH,
                libc::SIGALRM,
            ] {
                libc::sigaddset(&raw mut taken, signal);
            }
            if libc::sigprocmask(libc::SIG_BLOCK, &raw const taken, &raw mut before) != 0 {
                bail!("signals cannot be blocked");
            }
            Ok(Self { before, taken })
        }
    }

    /// The signals that were blocked before: what programs start with.
    pub fn before(&self) -> libc::sigset_t {
        self.before
    }

    /// Waits for a signal at most `time`; `pass` gets those that the program must have from us. What the terminal sends reaches the whole
    /// foreground group, the program included, and is not passed twice.
    pub fn wait(&self, time: Duration, pass: impl Fn(i32)) {
        let time = libc::timespec { tv_sec: 0, tv_nsec: i64::from(time.subsec_nanos()) };
        // SAFETY: the set, the information and the time live across the call.
        let (signal, info) = unsafe {
            let mut info = std::mem::zeroed::<libc::siginfo_t>();
            (libc::sigtimedwait(&raw const self.taken, &raw mut info, &raw const time), info)
        };
        const FROM_KERNEL: i32 = 0x80;
        if signal > 0 && signal != libc::SIGCHLD && info.si_code != FROM_KERNEL {
            pass(signal);
        }
    }
}
