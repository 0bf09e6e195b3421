//! Memory that two processes share and neither can take away from the other.
//!
//! A memory file that may shrink is a trap: a process that has it mapped is killed by SIGBUS when the other
//! side truncates it. A file that is sealed against shrinking cannot be truncated. Its content may change at
//! any time, because the other process writes to it: so only references to atomic words are ever made into
//! it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::last_errno;
use crate::memory::{hint, set_length};

/// A sealed object and this process's mapping of it, which goes when this is dropped.
#[derive(Debug)]
pub struct SealedMemory {
    start: usize,
    bytes: usize,
}

/// Why there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealedError {
    #[error("the kernel refuses {bytes} bytes of memory to share (errno {errno}{})", hint(*errno))]
    Kernel { bytes: usize, errno: i32 },
    /// What a peer has handed over is something else.
    #[error("the peer's file is not a memory file of {bytes} bytes that is sealed against shrinking")]
    NotSealed { bytes: usize },
}

const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

impl SealedMemory {
    /// A new one, all zeroes, and the descriptor to hand to the other process. Pages are taken as they are
    /// touched. `bytes`: whole pages.
    ///
    /// # Errors
    /// [`SealedError::Kernel`].
    pub fn create(name: &std::ffi::CStr, bytes: usize) -> Result<(Self, OwnedFd), SealedError> {
        let refused = || SealedError::Kernel { bytes, errno: last_errno() };
        // SAFETY: a terminated name.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(refused());
        }
        // SAFETY: the descriptor is new and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        set_length(fd.as_fd(), bytes).map_err(|errno| SealedError::Kernel { bytes, errno })?;
        // SAFETY: changes an object that only this function knows.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(refused());
        }
        Ok((Self::map(fd.as_fd(), bytes, libc::PROT_READ | libc::PROT_WRITE)?, fd))
    }

    /// One that another process has made and handed over. Nothing about it is believed: it has to be ordinary
    /// memory, this long at least, and sealed.
    ///
    /// # Errors
    /// [`SealedError`].
    pub fn adopt(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, SealedError> {
        check(fd, bytes)?;
        Self::map(fd, bytes, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// As [`SealedMemory::adopt`], to read its first `bytes` bytes only: a write is a SIGSEGV. Not locked
    /// into RAM, also where the process locks all that it maps (`mlockall`): most of it may never be touched.
    ///
    /// # Errors
    /// [`SealedError`].
    pub fn adopt_to_read(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, SealedError> {
        check(fd, bytes)?;
        // Without any access at first: what is locked is touched at once.
        let memory = Self::map(fd, bytes, libc::PROT_NONE)?;
        let failed = |errno| SealedError::Kernel { bytes, errno };
        crate::memory::unlock(memory.start, bytes).map_err(failed)?;
        // SAFETY: our own mapping, which nothing refers to yet.
        let rc = unsafe { libc::syscall(libc::SYS_mprotect, memory.start, bytes, libc::PROT_READ) };
        if rc == 0 { Ok(memory) } else { Err(failed(last_errno())) }
    }

    /// A file of this process's own: nobody else may shrink it. Who touches a page that its file system has
    /// no room for is killed by SIGBUS ([`take_room`]).
    ///
    /// # Errors
    /// [`SealedError::Kernel`].
    pub fn over(fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, SealedError> {
        Self::map(fd, bytes, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn map(fd: BorrowedFd<'_>, bytes: usize, protection: i32) -> Result<Self, SealedError> {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let p = unsafe {
            libc::syscall(
                libc::SYS_mmap,
                0usize,
                bytes,
                protection,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                fd.as_raw_fd(),
                0usize,
            )
        };
        if p == -1 {
            return Err(SealedError::Kernel { bytes, errno: last_errno() });
        }
        Ok(Self { start: usize::try_from(p).expect("a user address"), bytes })
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A pointer to `len` bytes from `offset` on, which the other process may write at any time.
    ///
    /// # Panics
    /// If they reach beyond the end.
    #[must_use]
    pub fn span(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.bytes && len <= self.bytes - offset);
        std::ptr::with_exposed_provenance_mut(self.start + offset)
    }

    /// A word of the memory.
    ///
    /// # Panics
    /// If it reaches beyond the end or is not aligned.
    #[must_use]
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        // SAFETY: mapped for as long as `self`, aligned, and only ever used atomically by this process.
        unsafe { AtomicU64::from_ptr(self.span(offset, 8).cast()) }
    }

    /// A shorter one.
    ///
    /// # Panics
    /// As [`Self::word64`].
    #[must_use]
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.span(offset, 4).cast()) }
    }
}

/// Whether what another process has handed over is ordinary memory, this long at least, and sealed.
fn check(fd: BorrowedFd<'_>, bytes: usize) -> Result<(), SealedError> {
    let no = SealedError::NotSealed { bytes };
    // SAFETY: asks about a descriptor; fills plain data of ours.
    let (seals, kind, stat) = unsafe {
        let seals = libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS);
        let mut kind: libc::statfs = std::mem::zeroed();
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstatfs(fd.as_raw_fd(), &raw mut kind) != 0
            || libc::fstat(fd.as_raw_fd(), &raw mut stat) != 0
        {
            return Err(no);
        }
        (seals, kind, stat)
    };
    // Huge pages have seals, too, and one that cannot be allocated is a SIGBUS.
    let ordinary = kind.f_type == libc::TMPFS_MAGIC;
    let long_enough = usize::try_from(stat.st_size).is_ok_and(|len| len >= bytes);
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 || !ordinary || !long_enough {
        return Err(no);
    }
    Ok(())
}

/// Copies `len` bytes from `offset` of a memory file to `to`, without a mapping of them: what is not mapped
/// does not count as this process's memory. False: they are not all there.
///
/// # Safety
/// `to` is writable memory of `len` bytes that no other thread uses meanwhile.
#[must_use]
pub unsafe fn read_at(fd: BorrowedFd<'_>, offset: u64, to: *mut u8, len: usize) -> bool {
    let Ok(offset) = libc::off_t::try_from(offset) else { return false };
    // SAFETY: the caller's promise.
    let got = unsafe { libc::syscall(libc::SYS_pread64, fd.as_raw_fd(), to, len, offset) };
    usize::try_from(got) == Ok(len)
}

/// Takes room for a part of a file on its disk.
///
/// # Errors
/// The errno: mostly `ENOSPC`.
pub fn take_room(fd: BorrowedFd<'_>, offset: usize, bytes: usize) -> Result<(), i32> {
    let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(bytes)) else {
        return Err(libc::EFBIG);
    };
    // SAFETY: changes a file; what is there stays, and what was not is zero.
    match unsafe { libc::posix_fallocate(fd.as_raw_fd(), offset, len) } {
        0 => Ok(()),
        errno => Err(errno),
    }
}

/// Gives a part of a memory file back to the kernel: it is absent in every mapping, locked or not, and zero
/// when it comes again.
///
/// # Errors
/// The errno.
pub fn give_back(fd: BorrowedFd<'_>, offset: usize, bytes: usize) -> Result<(), i32> {
    let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(bytes)) else {
        return Err(libc::EFBIG);
    };
    let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: changes a file, whose content its owner has given up; only raw pointers lead into mappings of
    // it.
    let rc = unsafe { libc::fallocate(fd.as_raw_fd(), how, offset, len) };
    if rc == 0 { Ok(()) } else { Err(last_errno()) }
}

impl Drop for SealedMemory {
    fn drop(&mut self) {
        // SAFETY: our own mapping; references into it borrow `self`. A forked child inherits the mapping, so
        // it is its own there as well.
        let rc = unsafe { libc::syscall(libc::SYS_munmap, self.start, self.bytes) };
        assert!(rc == 0, "munmap of our own mapping failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn both_mappings_show_the_same_bytes_and_neither_side_can_shrink_it() {
        let (ours, fd) = SealedMemory::create(c"test", 8192).unwrap();
        let theirs = SealedMemory::adopt(fd.as_fd(), 8192).unwrap();
        ours.word64(4096).store(7, Ordering::Release);
        assert_eq!(theirs.word64(4096).load(Ordering::Acquire), 7);
        // SAFETY: it changes nothing that is mapped, whether it succeeds or fails.
        let (shrunk, unsealed) = unsafe {
            (
                libc::ftruncate(fd.as_raw_fd(), 0),
                libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE),
            )
        };
        assert_eq!((shrunk, unsealed), (-1, -1));
        drop(ours);
        assert_eq!(theirs.word64(4096).load(Ordering::Acquire), 7);
    }

    #[test]
    fn a_reader_sees_what_is_written_and_what_was_given_back_is_zero() {
        let (ours, fd) = SealedMemory::create(c"test", 8192).unwrap();
        let reader = SealedMemory::adopt_to_read(fd.as_fd(), 4096).unwrap();
        ours.word32(8).store(7, Ordering::Release);
        ours.word64(4096).store(9, Ordering::Release);
        assert_eq!(reader.word32(8).load(Ordering::Acquire), 7);
        let read = |offset, len: usize| {
            let mut bytes = vec![1; len];
            // SAFETY: memory of our own, of this length.
            unsafe { read_at(fd.as_fd(), offset, bytes.as_mut_ptr(), len) }.then_some(bytes)
        };
        assert_eq!(read(4096, 8), Some(9u64.to_ne_bytes().to_vec()));
        assert_eq!(read(8188, 8), None, "it ends before");
        assert_eq!(read(u64::MAX, 8), None);
        give_back(fd.as_fd(), 4096, 4096).unwrap();
        assert_eq!((read(4096, 8), ours.word64(4096).load(Ordering::Acquire)), (Some(vec![0; 8]), 0));
    }

    #[test]
    fn what_could_be_taken_away_is_refused() {
        let no = SealedError::NotSealed { bytes: 8192 };
        // SAFETY: a terminated name; the descriptor is new.
        let unsealed = unsafe {
            OwnedFd::from_raw_fd(libc::memfd_create(
                c"test".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            ))
        };
        // SAFETY: an object of our own.
        assert_eq!(unsafe { libc::ftruncate(unsealed.as_raw_fd(), 8192) }, 0);
        assert_eq!(SealedMemory::adopt(unsealed.as_fd(), 8192).unwrap_err(), no);
        let (_short, fd) = SealedMemory::create(c"test", 4096).unwrap();
        assert_eq!(SealedMemory::adopt(fd.as_fd(), 8192).unwrap_err(), no);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(SealedMemory::adopt(file.as_fd(), 8192).unwrap_err(), no);
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(SealedMemory::adopt(socket.as_fd(), 8192).unwrap_err(), no);
    }
}
