//! The pager's own memory: what leaves and what comes lies here on its way.

use rampool_kernel::memory::{MapError, Mapping};
use rampool_paging::cache::CacheConfig;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

use super::ZERO_BYTES;
use super::spare::Spare;
use crate::fork::FORKED_FETCH_PAGES;
use crate::frames::Frames;

/// Slots for frames that wait to be, or are, buffers of fetches.
const SPARE_SLOTS: u32 = 8;

/// See the module.
pub(super) struct OwnMemory {
    /// Of eviction batches, and what they leave to fetches.
    pub batches: Frames,
    pub spare: Spare,
    pub fetches: Frames,
    pub zeroes: Mapping,
    /// Where pages for a forked child arrive.
    pub forked: Mapping,
    /// By batch: the frames that it has, as runs of `(offset, pages)`.
    pub present: Vec<Vec<(u32, u32)>>,
    /// By batch: what was sent of it, with the offsets.
    pub stored: Vec<Vec<(Extent, u32)>>,
}

impl OwnMemory {
    /// `lends`: fetches may use the frames of batches.
    ///
    /// # Errors
    /// When the kernel refuses the memory.
    pub fn new(config: &CacheConfig, lends: bool) -> Result<Self, MapError> {
        let spare_slots = if lends { SPARE_SLOTS + config.max_fetches } else { 0 };
        let batches = config.max_batches as usize;
        Ok(Self {
            batches: Frames::new(config.max_batches + spare_slots, config.batch_pages)?,
            spare: Spare::default(),
            fetches: Frames::new(config.max_fetches, config.fetch_pages)?,
            zeroes: Mapping::huge_aligned(ZERO_BYTES)?,
            forked: Mapping::anonymous(FORKED_FETCH_PAGES as usize * OS_PAGE_BYTES)?,
            present: vec![Vec::new(); batches],
            stored: vec![Vec::new(); batches],
        })
    }

    /// The frames of a fetch.
    pub fn fetched_at(&self, fetch: u32) -> usize {
        self.spare.start_of(fetch).unwrap_or_else(|| self.fetches.start_of(fetch))
    }
}
