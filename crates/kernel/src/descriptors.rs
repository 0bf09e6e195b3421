//! A table of descriptors of one thread's own.
//!
//! A thread of ours in a foreign program must not keep its descriptors in the program's table: programs close
//! every descriptor that they do not know, count them, or run out of them, and a reader waits for the end of
//! a pipe as long as any copy of its other end is open. So the thread leaves the shared table
//! (`unshare(CLONE_FILES)`), closes its copies, and takes single descriptors of the program's when it needs
//! one.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Gives the calling thread a table of its own: the null device as 0, 1 and 2, and `keep`, a copy of the
/// program's descriptor.
///
/// # Errors
/// The errno. The thread must end then: what it opens would be the program's.
pub fn leave_shared_table(keep: Option<RawFd>) -> Result<Option<OwnedFd>, i32> {
    // SAFETY: from here on this thread's table is a copy; the program's is untouched.
    if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
        return Err(crate::last_errno());
    }
    let close = |first: u32, last: u32| {
        // SAFETY: closes this thread's copies only; nothing in this thread owns any of them yet.
        let rc = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        if rc == 0 { Ok(()) } else { Err(crate::last_errno()) }
    };
    let mut kept = None;
    match keep.and_then(|fd| u32::try_from(fd).ok()) {
        None => close(0, u32::MAX)?,
        Some(fd) => {
            if fd > 0 {
                close(0, fd - 1)?;
            }
            close(fd + 1, u32::MAX)?;
            let mut raw = i32::try_from(fd).expect("a descriptor");
            if raw < 3 {
                // SAFETY: moves our own copy out of the way.
                raw = unsafe { libc::fcntl(raw, libc::F_DUPFD_CLOEXEC, 3) };
                if raw < 0 {
                    return Err(crate::last_errno());
                }
                close(fd, fd)?;
            }
            // SAFETY: the only copy in this table, with no other owner.
            kept = Some(unsafe { OwnedFd::from_raw_fd(raw) });
        }
    }
    // A habitual write to "standard error" must not hit a descriptor in use.
    let mut null = open_null()?;
    while null < 2 {
        // SAFETY: a copy of the descriptor that was just opened; never closed.
        null = unsafe { libc::dup(null) };
        if null < 0 {
            return Err(crate::last_errno());
        }
    }
    Ok(kept)
}

/// Keeps the lowest descriptors of this thread's table free for later, while something long-lived is opened:
/// a program may lower its limit to where its own descriptors end, and numbers below the limit are then all
/// that is available.
#[derive(Debug)]
pub struct Spare {
    _held: Vec<OwnedFd>,
}

impl Spare {
    /// Holds `count` descriptors until dropped, or fewer where the limit leaves less than as many again for
    /// use.
    #[must_use]
    pub fn hold(count: usize) -> Self {
        let mut held = Vec::with_capacity(2 * count);
        while held.len() < 2 * count {
            // SAFETY: a copy of the null device, new and ours.
            let fd = unsafe { libc::fcntl(0, libc::F_DUPFD_CLOEXEC, 3) };
            if fd < 0 {
                break;
            }
            // SAFETY: as above.
            held.push(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        held.truncate(held.len() / 2);
        Self { _held: held }
    }
}

fn open_null() -> Result<RawFd, i32> {
    // SAFETY: constant, terminated names. A program that changed its root directory may have no /dev.
    let fd = unsafe {
        match libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) {
            -1 => libc::memfd_create(c"null".as_ptr(), 0),
            fd => fd,
        }
    };
    if fd >= 0 { Ok(fd) } else { Err(crate::last_errno()) }
}

/// A copy, in this thread's table, of what `thread` of this process has as `fd`. None where the kernel
/// refuses or there is none.
#[must_use]
pub fn take_from(thread: u32, fd: RawFd) -> Option<OwnedFd> {
    const PIDFD_THREAD: libc::c_int = libc::O_EXCL;
    let process = std::process::id();
    // A thread of its own first (Linux 6.9): the first thread of the process may have ended.
    let attempts = [(thread, PIDFD_THREAD), (process, 0)];
    attempts.iter().find_map(|(id, flags)| {
        // SAFETY: plain system calls; each descriptor they return is new and ours.
        unsafe {
            let pidfd =
                i32::try_from(libc::syscall(libc::SYS_pidfd_open, *id, *flags)).ok().filter(|fd| *fd >= 0)?;
            let pidfd = OwnedFd::from_raw_fd(pidfd);
            let copy = i32::try_from(libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0))
                .ok()
                .filter(|fd| *fd >= 0)?;
            Some(OwnedFd::from_raw_fd(copy))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_one_descriptor_and_the_program_loses_none() {
        let mut ends = [0; 2];
        // SAFETY: fills two descriptors.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        let [read, write] = ends;
        // SAFETY: the id of the calling thread.
        let main = u32::try_from(unsafe { libc::syscall(libc::SYS_gettid) }).unwrap();
        std::thread::spawn(move || {
            let kept = leave_shared_table(Some(write)).unwrap().unwrap();
            // SAFETY: asks whether a descriptor exists.
            assert_eq!(unsafe { libc::fcntl(read, libc::F_GETFD) }, -1);
            let again = take_from(main, read).unwrap();
            for fd in [&kept, &again] {
                assert!(fd.as_raw_fd() > 2);
            }
        })
        .join()
        .unwrap();
        for fd in ends {
            // SAFETY: the test's own descriptors.
            assert_eq!(unsafe { libc::close(fd) }, 0, "the program still has both");
        }
    }
}
