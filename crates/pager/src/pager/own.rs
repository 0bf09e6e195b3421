//! The pager's own memory: what leaves and what comes lies here on its way.

use rampool_kernel::memory::{MapError, Mapping};
use rampool_paging::cache::CacheConfig;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

use super::ZERO_BYTES;
use crate::fork::FORKED_FETCH_PAGES;
use crate::frames::Frames;

/// See the module.
pub(super) struct OwnMemory {
    pub batches: Frames,
    pub fetches: Frames,
    pub zeroes: Mapping,
    /// Where pages for a forked child arrive.
    pub forked: Mapping,
    /// By batch: what was sent of it, with the offsets.
    pub stored: Vec<Vec<(Extent, u32)>>,
}

impl OwnMemory {
    /// # Errors
    /// When the kernel refuses the memory.
    pub fn new(config: &CacheConfig) -> Result<Self, MapError> {
        let batches = config.max_batches as usize;
        Ok(Self {
            batches: Frames::new(config.max_batches, config.batch_pages)?,
            fetches: Frames::new(config.max_fetches, config.fetch_pages)?,
            zeroes: Mapping::huge_aligned(ZERO_BYTES)?,
            forked: Mapping::anonymous(FORKED_FETCH_PAGES as usize * OS_PAGE_BYTES)?,
            stored: vec![Vec::new(); batches],
        })
    }
}
