//! Memory of this process that another one may be given to write into, and that can be taken away from it.
//!
//! It is a mapping of a sealed memory file ([`crate::sealed`]). A process with the file reaches the same
//! bytes, until they are moved out of it ([`ExposedMemory::detach`]): later writes of the other process go
//! to a file that is no longer read. A forked child does not have this memory: its addresses are
//! not mapped there, so parent and child never see what arrives for the other.

use crate::last_errno;
use crate::sealed::{SealedError, SealedMemory};
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;

/// Invariant: in the process that made it, `bytes` bytes are mapped at `start`, the same address for as long
/// as it lives.
#[derive(Debug)]
pub struct ExposedMemory {
    memory: ManuallyDrop<SealedMemory>,
    /// In a forked child there is something else, or nothing, at these addresses.
    process: u32,
}

impl ExposedMemory {
    /// All zeroes, and the descriptor for the other process. `bytes`: whole pages.
    ///
    /// # Errors
    /// [`SealedError::Kernel`].
    pub fn create(bytes: usize) -> Result<(Self, OwnedFd), SealedError> {
        let (memory, fd) = SealedMemory::create(c"rampool-exposed", bytes)?;
        not_for_children(&memory)?;
        Ok((Self { memory: ManuallyDrop::new(memory), process: std::process::id() }, fd))
    }

    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.memory.span(0, self.memory.bytes())
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Moves the bytes to memory of this process alone, at the same addresses: what is mapped there changes
    /// at once, between two accesses. What another thread writes meanwhile may be lost. In a forked child
    /// nothing happens.
    ///
    /// # Errors
    /// [`SealedError::Kernel`] where the kernel has no memory: everything is as it was.
    pub fn detach(&self) -> Result<(), SealedError> {
        if self.process != std::process::id() {
            return Ok(());
        }
        let bytes = self.bytes();
        let refused = || SealedError::Kernel { bytes, errno: last_errno() };
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let fresh = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if fresh == libc::MAP_FAILED {
            return Err(refused());
        }
        // SAFETY: both are mappings of `bytes` bytes; no other code knows the fresh one. The old one is
        // memory that others may write: a raw copy.
        unsafe { std::ptr::copy_nonoverlapping(self.start(), fresh.cast(), bytes) };
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: moves the fresh mapping, which has no other reference, over our own, whose addresses stay
        // mapped, with the same bytes. A pointer into it accesses one or the other.
        let moved = unsafe { libc::mremap(fresh, bytes, bytes, flags, self.start()) };
        if moved == libc::MAP_FAILED {
            let error = refused();
            // SAFETY: the fresh mapping is ours, and unknown.
            unsafe { libc::munmap(fresh, bytes) };
            return Err(error);
        }
        Ok(())
    }

    /// Copies bytes out.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.memory.span(offset, into.len());
        // SAFETY: mapped, checked above; a raw copy, since the other process may write there.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.memory.span(offset, bytes.len());
        // SAFETY: mapped, checked above; a raw copy, since the other process may read or write there.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
}

impl Drop for ExposedMemory {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: dropped once, here; in the process that mapped it.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

fn not_for_children(memory: &SealedMemory) -> Result<(), SealedError> {
    let bytes = memory.bytes();
    // SAFETY: our own mapping; its bytes do not change.
    let done = unsafe { libc::madvise(memory.span(0, bytes).cast(), bytes, libc::MADV_DONTFORK) };
    if done == 0 { Ok(()) } else { Err(SealedError::Kernel { bytes, errno: last_errno() }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn what_the_other_side_writes_after_it_was_detached_does_not_show() {
        let (ours, fd) = ExposedMemory::create(8192).unwrap();
        let theirs = SealedMemory::adopt(fd.as_fd(), 8192).unwrap();
        let write = |at: usize, byte: u8| {
            // SAFETY: within the mapping.
            unsafe { theirs.span(at, 1).write(byte) };
        };
        let read = |at: usize| {
            let mut byte = [0];
            ours.read(at, &mut byte);
            byte[0]
        };
        write(5000, 7);
        ours.write(1, &[9]);
        assert_eq!((read(5000), read(1)), (7, 9));
        let start = ours.start();
        ours.detach().unwrap();
        assert_eq!((ours.start(), read(5000), read(1)), (start, 7, 9));
        write(5000, 8);
        write(1, 8);
        assert_eq!((read(5000), read(1)), (7, 9), "a late write shows");
        ours.write(2, &[3]);
        assert_eq!(read(2), 3);
    }

    #[test]
    fn a_forked_child_does_not_have_it_and_leaves_what_is_there_alone() {
        let (ours, _fd) = ExposedMemory::create(4096).unwrap();
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: asks about a page.
            let absent = unsafe { libc::msync(ours.start().cast(), 4096, libc::MS_ASYNC) } != 0
                && last_errno() == libc::ENOMEM;
            let untouched = ours.detach().is_ok();
            // SAFETY: ends this process.
            unsafe { libc::_exit(if absent && untouched { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        ours.write(0, &[1]);
    }
}
