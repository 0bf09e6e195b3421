//! Pages packed with LZ4, in frames of 256 bytes and its multiples.
//!
//! A page that comes plain is packed on arrival where that saves at least one step of frame size, and travels
//! packed to clients that agreed to it. A lease pays for the frames: the machine lends more pages than it has
//! room for, as far as they pack.

use super::slab::Slabs;
use super::{PageStore, Scratch, StoreConfig, Unpackable};
use rampool_lease::{FrameIndex, StoredPage};
use rampool_wire::frame::PageEntry;
use rampool_wire::session::features;
use rampool_wire::units::OS_PAGE_BYTES;

const STEP_BYTES: u32 = 256;
const SLAB_BYTES: usize = 256 << 10;

/// See the module.
pub struct CompressedStore {
    slabs: Slabs,
}

impl CompressedStore {
    /// # Panics
    /// If `config.arenas` is 0.
    #[must_use]
    pub fn new(config: &StoreConfig) -> Self {
        assert!(config.arenas > 0);
        let sizes: Vec<u32> = (1..=16).map(|n| n * STEP_BYTES).collect();
        // A sixteenth more than lent: frames of one size cannot use the holes of another.
        let most =
            config.memory_bytes.saturating_add(config.memory_bytes / 16).saturating_add(config.transit_bytes);
        let most = usize::try_from(most.div_ceil(SLAB_BYTES as u64)).expect("a 64-bit machine");
        let most = most + config.arenas * sizes.len();
        Self { slabs: Slabs::new(sizes, SLAB_BYTES, most, config) }
    }

    /// The bytes of a frame that the caller has a reference to and that is not written.
    fn bytes(&self, frame: FrameIndex, len: usize) -> &[u8] {
        assert!(len <= usize::from(self.slabs.size(frame)));
        // SAFETY: the frame is mapped while there is a reference, is at least `len` long, and is not written
        // once settled (or is the caller's alone before).
        unsafe { std::slice::from_raw_parts(self.slabs.memory(frame), len) }
    }

    /// Copies into a frame that the caller has just taken.
    fn fill(&self, frame: FrameIndex, bytes: &[u8]) {
        assert!(bytes.len() <= usize::from(self.slabs.size(frame)));
        // SAFETY: the frame is mapped, long enough, and no other thread knows of it yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.slabs.memory(frame), bytes.len()) };
    }
}

impl PageStore for CompressedStore {
    fn features(&self) -> u32 {
        features::LZ4
    }

    fn settle(&self, arena: usize, frame: FrameIndex, entry: PageEntry, scratch: &mut Scratch) -> StoredPage {
        let stored = |frame, len: u32| StoredPage {
            frame,
            crc: entry.crc,
            len: u16::try_from(len).expect("at most 4096"),
            charge: self.slabs.size(frame),
        };
        assert!(entry.len > 0 && entry.len <= u32::from(self.slabs.size(frame)));
        if entry.len as usize != OS_PAGE_BYTES {
            return stored(frame, entry.len);
        }
        scratch.packed.resize(lz4_flex::block::get_maximum_output_size(OS_PAGE_BYTES), 0);
        let packed = lz4_flex::block::compress_into(self.bytes(frame, OS_PAGE_BYTES), &mut scratch.packed)
            .expect("the buffer is as long as the result can get");
        let packed_len = u32::try_from(packed).expect("not much more than a page");
        let mut smaller = Vec::new();
        let saves =
            packed < OS_PAGE_BYTES && self.slabs.size_for(packed_len) < u32::from(self.slabs.size(frame));
        if !saves || !self.slabs.take(arena, &[packed_len], &mut smaller) {
            return stored(frame, entry.len);
        }
        self.fill(smaller[0], &scratch.packed[..packed]);
        self.slabs.release(&[frame]);
        stored(smaller[0], packed_len)
    }

    fn present(
        &self,
        arena: usize,
        page: &StoredPage,
        compressed: bool,
    ) -> Result<Option<(FrameIndex, u32)>, Unpackable> {
        if compressed || usize::from(page.len) == OS_PAGE_BYTES {
            self.slabs.hold(page.frame);
            return Ok(Some((page.frame, page.len.into())));
        }
        let mut plain = [0; OS_PAGE_BYTES];
        let unpacked = lz4_flex::block::decompress_into(self.bytes(page.frame, page.len.into()), &mut plain);
        if unpacked.ok() != Some(OS_PAGE_BYTES) {
            return Err(Unpackable);
        }
        let mut frame = Vec::new();
        let page_bytes = u32::try_from(OS_PAGE_BYTES).expect("4096");
        if !self.slabs.take(arena, &[page_bytes], &mut frame) {
            return Ok(None);
        }
        self.fill(frame[0], &plain);
        Ok(Some((frame[0], page_bytes)))
    }

    fn slabs(&self) -> &Slabs {
        &self.slabs
    }
}
