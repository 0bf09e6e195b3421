//! Pages as they are, each in a frame of 4 KiB.

use super::slab::Slabs;
use super::{PageStore, Scratch, StoreConfig, Unpackable};
use rampool_lease::{FrameIndex, StoredPage};
use rampool_wire::frame::PageEntry;
use rampool_wire::units::OS_PAGE_BYTES;

const SLAB_BYTES: usize = 2 << 20;

/// See the module.
pub struct RawStore {
    slabs: Slabs,
}

impl RawStore {
    /// # Panics
    /// If `config.arenas` is 0.
    #[must_use]
    pub fn new(config: &StoreConfig) -> Self {
        assert!(config.arenas > 0);
        let most = config.memory_bytes.saturating_add(config.transit_bytes).div_ceil(SLAB_BYTES as u64);
        let most = usize::try_from(most).expect("a 64-bit machine");
        let page = u32::try_from(OS_PAGE_BYTES).expect("4096");
        Self { slabs: Slabs::new(vec![page], SLAB_BYTES, most + config.arenas, config) }
    }
}

impl PageStore for RawStore {
    fn features(&self) -> u32 {
        0
    }

    fn settle(
        &self,
        _arena: usize,
        frame: FrameIndex,
        entry: PageEntry,
        _scratch: &mut Scratch,
    ) -> StoredPage {
        let charge = self.slabs.size(frame);
        let len = u16::try_from(entry.len).expect("checked against the frame");
        assert!(len > 0 && len <= charge);
        StoredPage { frame, crc: entry.crc, len, charge }
    }

    fn present(
        &self,
        _arena: usize,
        page: &StoredPage,
        _compressed: bool,
    ) -> Result<Option<(FrameIndex, u32)>, Unpackable> {
        self.slabs.hold(page.frame);
        Ok(Some((page.frame, page.len.into())))
    }

    fn slabs(&self) -> &Slabs {
        &self.slabs
    }
}
