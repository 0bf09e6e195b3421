//! The memory of a server on this machine: pages are copied out of the file that its frames lie in, without
//! asking it ([`rampool_wire::places`]).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use rampool_kernel::memory::address_space_left;
use rampool_kernel::sealed::{SealedMemory, read_at};
use rampool_session::Known;
use rampool_wire::frame::page_crc;
use rampool_wire::places::{PLAN_BYTES, Plan};
use rampool_wire::units::OS_PAGE_BYTES;

/// The mapping is at most one part in this many of the address space that is left: the program and what it
/// cannot do without come first.
const MOST_OF_ADDRESS_SPACE: u64 = 8;

/// The frames file of a server. Its generations are mapped; the frames are not, so that the store does not
/// count as this process's memory.
pub(super) struct FramesFile {
    fd: OwnedFd,
    generations: SealedMemory,
    plan: Plan,
}

impl FramesFile {
    /// `None`: it is no such file, the kernel refuses the mapping, or that would take more than a part of
    /// what a limit on address space has left. Then every page is asked for.
    pub fn adopt(fd: OwnedFd) -> Option<Self> {
        let mut bytes = [0; PLAN_BYTES];
        // SAFETY: memory of our own, of this length.
        if !unsafe { read_at(fd.as_fd(), 0, bytes.as_mut_ptr(), PLAN_BYTES) } {
            return None;
        }
        let plan = Plan::parse(&bytes).ok()?;
        if address_space_left().is_some_and(|left| plan.frames_at() > left / MOST_OF_ADDRESS_SPACE) {
            return None;
        }
        let generations =
            SealedMemory::adopt_to_read(fd.as_fd(), usize::try_from(plan.frames_at()).ok()?).ok()?;
        Some(Self { fd, generations, plan })
    }

    /// Copies a page to `to`. False: it does not lie there any more, and what is at `to` is nothing.
    ///
    /// # Safety
    /// `to` is a page of writable memory that is used by nothing else meanwhile.
    pub unsafe fn read(&self, known: &Known, to: *mut u8, packed: &mut Vec<u8>) -> bool {
        let (place, len) = (known.place, known.place.len as usize);
        if len == 0 || !self.plan.has(place) {
            return false;
        }
        let at = usize::try_from(self.plan.generation_at(place.granule)).expect("a 64-bit machine");
        let generation = self.generations.word32(at);
        let before = generation.load(Ordering::Acquire);
        if !known.held(before, before) {
            return false;
        }
        packed.resize(packed.len().max(OS_PAGE_BYTES), 0);
        let target = if len == OS_PAGE_BYTES { to } else { packed.as_mut_ptr() };
        // SAFETY: the caller's promise, or a buffer of our own that is as long.
        if !unsafe { read_at(self.fd.as_fd(), self.plan.frame_at(place.granule), target, len) } {
            return false;
        }
        // The copy comes before the second look.
        fence(Ordering::Acquire);
        if !known.held(before, generation.load(Ordering::Relaxed)) {
            return false;
        }
        // SAFETY: the caller's promise.
        let page = unsafe { std::slice::from_raw_parts_mut(to, OS_PAGE_BYTES) };
        let whole = len == OS_PAGE_BYTES
            || lz4_flex::block::decompress_into(&packed[..len], page).is_ok_and(|n| n == OS_PAGE_BYTES);
        whole && page_crc(page) == known.crc
    }
}
