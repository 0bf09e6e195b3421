//! A doorbell that any thread can ring, whatever its table of descriptors, and that can be polled in the
//! table of the thread that made it.
//!
//! Ringing adds to a word and wakes a small thread, which shares the maker's descriptors and makes an eventfd
//! readable. Async-signal-safe.
//!
//! The thread closes the eventfd as its last act. A ringing thread may still be about to write to it, and by
//! then the number could be another file of the program.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::thread::{SpawnError, spawn_detached};

/// Even: listening; the lowest bit ends the thread.
#[derive(Debug)]
pub struct Doorbell {
    word: &'static AtomicU32,
    /// The thread's, open until the word says END.
    fd: RawFd,
}

const END: u32 = 1;

impl Doorbell {
    /// `word` is zero, and is used for nothing else.
    ///
    /// # Errors
    /// When the kernel refuses a descriptor or a thread.
    pub fn new(word: &'static AtomicU32) -> Result<Self, SpawnError> {
        word.store(0, Ordering::Release);
        // SAFETY: a system call without pointers; the descriptor is new.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(SpawnError::Thread { errno: crate::last_errno() });
        }
        // SAFETY: as above.
        let theirs = unsafe { OwnedFd::from_raw_fd(fd) };
        spawn_detached(
            64 << 10,
            Box::new(move || {
                let mut seen = 0;
                loop {
                    // SAFETY: waits on a word that lives as long as the process.
                    unsafe {
                        libc::syscall(
                            libc::SYS_futex,
                            word.as_ptr(),
                            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                            seen,
                            std::ptr::null::<libc::timespec>(),
                        );
                    }
                    let now = word.load(Ordering::Acquire);
                    if now & END != 0 {
                        return;
                    }
                    if now != seen {
                        seen = now;
                        let one = 1u64;
                        // SAFETY: an eventfd takes eight bytes.
                        unsafe { libc::write(theirs.as_raw_fd(), (&raw const one).cast(), 8) };
                    }
                }
            }),
        )?;
        Ok(Self { word, fd })
    }

    /// Rings the doorbell of this word. Async-signal-safe.
    pub fn ring(word: &AtomicU32) {
        word.fetch_add(2, Ordering::AcqRel);
        wake(word);
    }

    /// Keeps it for as long as the process lives; returns its descriptor.
    #[must_use]
    pub fn leak(self) -> RawFd {
        std::mem::ManuallyDrop::new(self).fd
    }

    /// Readable, in the maker's table, after the doorbell was rung.
    #[must_use]
    pub fn raw_fd(&self) -> RawFd {
        self.fd
    }

    /// Makes it silent again.
    pub fn clear(&self) {
        let mut rings = 0u64;
        // SAFETY: an eventfd gives eight bytes.
        unsafe { libc::read(self.fd, (&raw mut rings).cast(), 8) };
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        self.word.fetch_or(END, Ordering::AcqRel);
        wake(self.word);
    }
}

fn wake(word: &AtomicU32) {
    // SAFETY: wakes the one thread that may wait on this word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1) };
}
