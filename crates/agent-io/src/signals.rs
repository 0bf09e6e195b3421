//! SIGSEGV stays the agent's on the last fault mode. In programs that page memory of their own, SIGBUS does
//! too if threads wait for pages in its handler.

use std::ffi::c_int;

use crate::agent::{self, Guard};
use crate::real::real;

/// As `sigaction`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    if agent::keeps_open(signal) && agent::sigaction(signal, new, old) {
        return 0;
    }
    let next = real!(c"sigaction", fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int);
    // SAFETY: the caller's own arguments.
    unsafe { next(signal, new, old) }
}

/// As `signal`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t {
    if agent::keeps_open(signal) {
        // SAFETY: plain data.
        let (mut new, mut old) =
            unsafe { (std::mem::zeroed::<libc::sigaction>(), std::mem::zeroed::<libc::sigaction>()) };
        new.sa_sigaction = handler;
        new.sa_flags = libc::SA_RESTART;
        if agent::sigaction(signal, &raw const new, &raw mut old) {
            return old.sa_sigaction;
        }
    }
    let next = real!(c"signal", fn(c_int, libc::sighandler_t) -> libc::sighandler_t);
    // SAFETY: the caller's own arguments.
    unsafe { next(signal, handler) }
}

macro_rules! masks {
    ($($name:ident, $text:literal;)*) => {$(
        /// As the C library's function of this name; the signals in which threads wait for pages are never
        /// blocked.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(how: c_int, new: *const libc::sigset_t, old: *mut libc::sigset_t) -> c_int {
            let next = real!($text, fn(c_int, *const libc::sigset_t, *mut libc::sigset_t) -> c_int);
            let _kept = Guard::new(old.cast(), size_of::<u64>(), true);
            // SAFETY: the caller's own arguments; a copy of its set without one signal.
            unsafe {
                if new.is_null() || how == libc::SIG_UNBLOCK {
                    return next(how, new, old);
                }
                let mut set = *new;
                for signal in [libc::SIGSEGV, libc::SIGBUS] {
                    if agent::keeps_open(signal) {
                        libc::sigdelset(&raw mut set, signal);
                    }
                }
                next(how, &raw const set, old)
            }
        }
    )*};
}

masks! {
    sigprocmask, c"sigprocmask";
    pthread_sigmask, c"pthread_sigmask";
}
