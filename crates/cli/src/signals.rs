//! Passes signals on to programs that rampool started.

use std::ffi::{CStr, CString, c_char};
use std::time::Duration;

use anyhow::{Result, bail};

/// Signals that are taken one by one instead of interrupting this process.
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
                bail!("cannot block signals");
            }
            Ok(Self { before, taken })
        }
    }

    /// Starts a program with the signal mask from before, and with the default action of SIGPIPE; returns its
    /// process id. Unlike `fork`, this does not copy the process.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub fn spawn(
        &self,
        program: &CStr,
        arguments: &[CString],
        environment: &[CString],
    ) -> std::io::Result<i32> {
        let pointers = |strings: &[CString]| -> Vec<*mut c_char> {
            strings.iter().map(|s| s.as_ptr().cast_mut()).chain([std::ptr::null_mut()]).collect()
        };
        let (arguments, environment) = (pointers(arguments), pointers(environment));
        let result =
            |errno: i32| if errno == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(errno)) };
        let flags = libc::POSIX_SPAWN_SETSIGMASK | libc::POSIX_SPAWN_SETSIGDEF;
        let mut process = 0;
        // SAFETY: the attributes and the set are initialised by the calls that fill them, and the attributes
        // are released once; both lists end with a null pointer, and what they point to lives across the
        // call, which does not change it.
        unsafe {
            let mut default = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut default);
            libc::sigaddset(&raw mut default, libc::SIGPIPE);
            let mut attributes = std::mem::zeroed::<libc::posix_spawnattr_t>();
            result(libc::posix_spawnattr_init(&raw mut attributes))?;
            let started =
                result(libc::posix_spawnattr_setsigmask(&raw mut attributes, &raw const self.before))
                    .and_then(|()| {
                        result(libc::posix_spawnattr_setsigdefault(&raw mut attributes, &raw const default))
                    })
                    .and_then(|()| {
                        result(libc::posix_spawnattr_setflags(
                            &raw mut attributes,
                            flags.try_into().expect("small flags"),
                        ))
                    })
                    .and_then(|()| {
                        let (attributes, arguments, environment) =
                            (&raw const attributes, arguments.as_ptr(), environment.as_ptr());
                        result(libc::posix_spawn(
                            &raw mut process,
                            program.as_ptr(),
                            std::ptr::null(),
                            attributes,
                            arguments,
                            environment,
                        ))
                    });
            libc::posix_spawnattr_destroy(&raw mut attributes);
            started?;
        }
        Ok(process)
    }

    /// The signals that were blocked before: programs start with them.
    pub fn before(&self) -> libc::sigset_t {
        self.before
    }

    /// Waits for a signal for at most `time`, and gives `pass` those that the program must get from this
    /// process. The terminal signals the whole foreground group, the program included; such signals are not
    /// passed twice.
    pub fn wait(&self, time: Duration, mut pass: impl FnMut(i32)) {
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
