//! This process's own memory through /proc/self/mem: reads and writes that never wait for a page.
//!
//! The kernel serves such an access without the right to wait for a userfaultfd handler, so an absent
//! registered page is an error here and not a wait for ourselves; and it passes over page protections, so
//! that memory which the program cannot touch yet can be filled.

use std::os::fd::{AsRawFd, OwnedFd};

use crate::OS_PAGE_BYTES;
use crate::memory::Mapping;

#[derive(Debug)]
pub struct SelfMemory {
    fd: OwnedFd,
}

/// Why /proc/self/mem cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelfMemoryError {
    #[error("/proc/self/mem cannot be opened: {0}")]
    Open(std::io::Error),
    /// The kernel was started with `proc_mem.force_override=never` or built so.
    #[error(
        "the kernel does not allow writes to protected memory through /proc/self/mem \
         (proc_mem.force_override)"
    )]
    NoForce,
    #[error(transparent)]
    Memory(#[from] crate::memory::MapError),
}

impl SelfMemory {
    /// For reading only, or (`fill`) also to fill inaccessible memory; tries that out on a page of its own.
    ///
    /// # Errors
    /// [`SelfMemoryError`].
    pub fn open(fill: bool) -> Result<Self, SelfMemoryError> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(fill)
            .open("/proc/self/mem")
            .map_err(SelfMemoryError::Open)?;
        let this = Self { fd: file.into() };
        if fill {
            let page = Mapping::anonymous(OS_PAGE_BYTES)?;
            let word = 0x0072_616d_706f_6f6c_u64.to_le_bytes();
            let mut seen = [0; 8];
            let filled = protect(page.start(), OS_PAGE_BYTES, Protection::None).is_ok()
                // SAFETY: the page is ours, and the buffers are of the stated lengths.
                && unsafe { this.write(page.start(), word.as_ptr(), 8) == 8 && this.read(page.start(), seen.as_mut_ptr(), 8) == 8 };
            if !filled || seen != word {
                return Err(SelfMemoryError::NoForce);
            }
        }
        Ok(this)
    }

    /// Copies `bytes` bytes from address `from` to `to`; returns how many it copied before it met a page that
    /// is not there.
    ///
    /// # Safety
    /// `to` is memory of the caller's, `bytes` long.
    #[must_use]
    pub unsafe fn read(&self, from: usize, to: *mut u8, bytes: usize) -> usize {
        let mut done = 0;
        while done < bytes {
            let Ok(offset) = i64::try_from(from + done) else { return done };
            // SAFETY: the caller owns the buffer.
            let n = unsafe { libc::pread(self.fd.as_raw_fd(), to.add(done).cast(), bytes - done, offset) };
            match usize::try_from(n) {
                Ok(n) if n > 0 => done += n,
                _ if n < 0 && crate::last_errno() == libc::EINTR => {}
                _ => return done,
            }
        }
        done
    }

    /// Copies `bytes` bytes from `from` to address `to`, regardless of its protection; returns how many it
    /// copied before the kernel refused.
    ///
    /// # Safety
    /// `from` is readable for `bytes` bytes. What stands at `to` is the caller's to replace.
    #[must_use]
    pub unsafe fn write(&self, to: usize, from: *const u8, bytes: usize) -> usize {
        let mut done = 0;
        while done < bytes {
            let Ok(offset) = i64::try_from(to + done) else { return done };
            // SAFETY: the caller vouches for both ends.
            let n = unsafe { libc::pwrite(self.fd.as_raw_fd(), from.add(done).cast(), bytes - done, offset) };
            match usize::try_from(n) {
                Ok(n) if n > 0 => done += n,
                _ if n < 0 && crate::last_errno() == libc::EINTR => {}
                _ => return done,
            }
        }
        done
    }
}

/// What the program may do with a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    None,
    Read,
    ReadWrite,
}

/// Sets the protection of whole pages.
///
/// # Errors
/// The errno; ENOMEM also when the process has as many mappings as the kernel allows (vm.max_map_count).
pub fn protect(start: usize, bytes: usize, protection: Protection) -> Result<(), i32> {
    let mode = match protection {
        Protection::None => libc::PROT_NONE,
        Protection::Read => libc::PROT_READ,
        Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
    };
    // SAFETY: changes no content; callers pass ranges that they manage, whose users expect protections to
    // change.
    let rc = unsafe { libc::syscall(libc::SYS_mprotect, start, bytes, mode) };
    if rc == 0 { Ok(()) } else { Err(crate::last_errno()) }
}
