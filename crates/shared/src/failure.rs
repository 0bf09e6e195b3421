//! Ends the process when its run is over.

use std::io::Write;
use std::os::fd::FromRawFd;
use std::sync::OnceLock;

use rampool_sharing::{Rank, Reason};

use super::config::{EXIT_FAILED, EXIT_FOLLOWED};
use super::environment::variable;
use rampool_kernel::words::last_words;

static BEFORE_FOLLOWING: OnceLock<fn(Rank)> = OnceLock::new();

/// `say` is called before this process ends because a rank is gone, on a thread of the library. The first
/// call counts.
pub fn before_following(say: fn(Rank)) {
    let _ = BEFORE_FOLLOWING.set(say);
}

/// Ends the process because the run is over.
pub(super) fn end(rank: Rank, reason: &Reason) -> ! {
    let code = match reason {
        Reason::Aborted { .. } | Reason::PeerLost { .. } => EXIT_FOLLOWED,
        _ => EXIT_FAILED,
    };
    if let (Reason::PeerLost { peer: gone, .. }, Some(say)) = (reason, BEFORE_FOLLOWING.get()) {
        say(*gone);
    }
    report(&format!("{rank}: {reason}"));
    exit(code)
}

/// Ends the process because one of its threads cannot continue and has no way to return an error.
pub(super) fn die(rank: Rank, why: &str) -> ! {
    report(&format!("{rank}: {why}"));
    exit(EXIT_FAILED)
}

/// Reports to the launcher, which prints one message for all ranks, or else to standard error.
fn report(what: &str) {
    let fd =
        std::env::var(variable::REPORT_FD).ok().and_then(|fd| fd.parse::<i32>().ok()).filter(|&fd| fd > 2);
    if let Some(fd) = fd {
        // SAFETY: a number from the environment may name no descriptor, or another: then writing fails, or
        // one line goes astray in a process that ends. It is never closed here.
        let mut pipe = std::mem::ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(fd) });
        if pipe.write_all(format!("{what}\n").as_bytes()).is_ok() {
            return;
        }
    }
    let mark = std::env::var(variable::REPORT_MARK).ok().filter(|mark| !mark.is_empty());
    last_words(&format!("{}{what}", mark.as_deref().unwrap_or("rampool: ")));
}

/// Exits at once: threads of the program may be anywhere, so no exit handler runs.
fn exit(code: i32) -> ! {
    // SAFETY: ends the process; no preconditions.
    unsafe { libc::_exit(code) }
}
