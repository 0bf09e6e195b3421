//! Where a memory server keeps pages: frames in locked memory, taken from the kernel as pages arrive and
//! given back when they are free.
//!
//! A frame has a count of references: one for the page tables that name it and one for every send that reads
//! it. It is written between [`PageStore::take`] and [`PageStore::settle`], by the caller that took it. After
//! that only part of a page is written, in place, while the page tables that name it are locked and theirs is
//! the only reference ([`PageStore::is_writable`]). Its bytes are gone with the last reference: reads of a
//! frame never go beyond what was written into it since it was taken, so no tenant ever sees what another
//! left behind. Where the frames are open, though, clients read the file that they lie in: those that may
//! look into the server anyway, or all of a private one's.
//!
//! Two stores stand behind one trait: [`RawStore`] keeps pages as they are, [`CompressedStore`] packs them
//! with LZ4 into frames of 16 sizes.

mod compressed;
mod raw;
mod slab;

pub use compressed::CompressedStore;
pub use raw::RawStore;
pub use slab::Slabs;

use rampool_lease::{FrameIndex, StoredPage};
use rampool_wire::frame::PageEntry;
use rampool_wire::places::Place;
use rampool_wire::units::OS_PAGE_BYTES;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// How large a store may grow.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Bytes of pages to hold.
    pub memory_bytes: u64,
    /// Threads that take frames; each has an arena of its own.
    pub arenas: usize,
    /// Bytes of pages that may be on their way in at a time, beyond `memory_bytes`.
    pub transit_bytes: u64,
    /// Lock the memory, so that it is never swapped out.
    pub lock: bool,
    /// Have the frames in a memory file that clients may read ([`PageStore::file`]), if the kernel allows it.
    pub open: bool,
    /// The file that holds the pages in place of memory, whose own copies of it the kernel may drop. Nobody
    /// else has it open.
    pub disk: Option<Arc<File>>,
}

/// What a store holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreUsage {
    /// Bytes taken from the kernel.
    pub held_bytes: u64,
    /// Bytes of the frames in use. What is held and not used is free space between frames: the store's
    /// fragmentation.
    pub used_bytes: u64,
    /// Frames in use.
    pub frames: u64,
    /// The kernel refused to lock some of the memory: it may be swapped out.
    pub unlocked: bool,
}

/// Buffers that one thread reuses from page to page.
#[derive(Default, Debug)]
pub struct Scratch {
    packed: Vec<u8>,
}

/// A stored page that does not unpack to 4096 bytes: its client packed it wrongly.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a stored page does not unpack")]
pub struct Unpackable;

/// Keeps pages in frames. Shared by all threads of a server.
pub trait PageStore: Send + Sync {
    /// Bits of `session::features` a connection may use with this store.
    fn features(&self) -> u32;

    /// Takes one frame for each length (1..=4096 bytes), each with one reference. False, and nothing taken,
    /// if there is no room. The bytes of a frame that was just taken are anything: write before you read.
    fn take(&self, arena: usize, lens: &[u32], frames: &mut Vec<FrameIndex>) -> bool {
        self.slabs().take(arena, lens, frames)
    }

    /// The bytes of a page have arrived in `frame`: says what to enter in the page table, perhaps another
    /// frame than the one that came.
    ///
    /// # Panics
    /// If the entry's length does not fit the frame.
    fn settle(&self, arena: usize, frame: FrameIndex, entry: PageEntry, scratch: &mut Scratch) -> StoredPage;

    /// Where a page's bytes are for sending, and how many: as stored, or unpacked if `compressed` pages may
    /// not travel. The frame comes with a reference of its own for the caller to release. `Ok(None)`: no room
    /// to unpack.
    ///
    /// # Errors
    /// [`Unpackable`].
    fn present(
        &self,
        arena: usize,
        page: &StoredPage,
        compressed: bool,
    ) -> Result<Option<(FrameIndex, u32)>, Unpackable>;

    /// Enters a page of 4096 plain bytes without compressing it, because its caller goes on changing it.
    fn settle_plain(&self, frame: FrameIndex, crc: u32) -> StoredPage {
        self.slabs().plain_page(frame, crc)
    }

    /// Whether a page may be changed in place: it is plain, and its page table has the only reference to its
    /// frame. Call and act on it while that table is locked.
    fn is_writable(&self, page: &StoredPage) -> bool {
        usize::from(page.len) == OS_PAGE_BYTES && self.slabs().is_held_once(page.frame)
    }

    /// Gives back one reference of each frame.
    fn release(&self, frames: &[FrameIndex]) {
        self.slabs().release(frames);
    }

    /// The file that the frames lie in, to be read only; `None`: they are this process's alone.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.slabs().file()
    }

    /// Where a page lies in that file. Call it while the caller, or the page table, holds the frame.
    fn place(&self, page: &StoredPage) -> Place {
        self.slabs().place(page.frame, page.len.into())
    }

    /// A page is about to change in place, or lies elsewhere now: who reads the frame in the file notices.
    fn touch(&self, frame: FrameIndex) {
        self.slabs().touch(frame);
    }

    /// Where the frames lie.
    fn slabs(&self) -> &Slabs;

    /// The first byte of a frame. Valid while the caller has a reference.
    fn memory(&self, frame: FrameIndex) -> *mut u8 {
        self.slabs().memory(frame)
    }

    fn usage(&self) -> StoreUsage {
        self.slabs().usage()
    }

    /// # Panics
    /// If an invariant is broken. Slow: looks at every frame.
    fn check(&self) {
        self.slabs().check();
    }
}

#[cfg(test)]
mod tests;
