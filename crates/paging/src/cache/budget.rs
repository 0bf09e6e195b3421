//! Frames: what local memory is used for, and when pages must leave.
//!
//! ```text
//!   used = resident + evicting + staged + buffered + landing <= budget
//! ```
//!
//! Watermarks: `reserve` frames are kept free, so that a demand fault need not wait for an eviction, and
//! about `staging` frames belong to batches, most of them lingering. Frames are won back in this order:
//! release an acknowledged batch, drop an unused prefetch, evict. The budget is exceeded only when nothing
//! can leave and nothing under way will free a frame.

use super::{Cache, CacheConfig};

/// The demand of streams is halved after this many faults; streams that go on renew it.
const APPETITE_FAULTS: u32 = 1024;

#[derive(Clone, Debug, Default)]
pub(super) struct Frames {
    pub budget: u64,
    /// Mapped in the program.
    pub resident: u64,
    /// In an `Evict` that is not answered.
    pub evicting: u64,
    /// Held by batches.
    pub staged: u64,
    /// Held by fetches.
    pub buffered: u64,
    /// Reserved for the pages of fetches under way, and of those that wait unmapped.
    pub landing: u64,
}

impl Frames {
    pub fn used(&self) -> u64 {
        self.resident + self.evicting + self.staged + self.buffered + self.landing
    }

    pub fn free(&self) -> u64 {
        self.budget.saturating_sub(self.used())
    }
}

/// Watermarks, all in frames, derived from the budget.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks {
    /// Kept free.
    pub reserve: u64,
    /// Aimed at in batches.
    pub staging: u64,
    /// The most in batches, while the servers are slow.
    pub staging_max: u64,
    /// Pages of one batch.
    pub batch: u64,
}

impl Marks {
    pub fn new(config: &CacheConfig, budget: u64) -> Self {
        let batch = u64::from(config.batch_pages).min(budget / 16).max(2);
        let staging = (budget / 32).max(2 * batch).min(batch * u64::from(config.max_batches));
        let staging_max = (budget / 4).max(staging);
        let reserve = (budget / 64).clamp(2, 2 * batch.max(u64::from(config.fetch_pages)));
        Self { reserve, staging, staging_max, batch }
    }
}

impl Cache {
    pub(super) fn set_budget(&mut self, pages: u64) {
        if pages != self.frames.budget {
            self.marks = Marks::new(&self.config, pages);
            self.rivals.set_budget(pages);
            self.curve.set_detail(pages / super::CURVE_DETAIL);
        }
        self.frames.budget = pages;
    }

    /// Makes `count` frames free, without waiting. `keep` names a fetch that must not be dropped for it.
    pub(super) fn ensure_frames(&mut self, count: u64, keep: Option<u32>) -> bool {
        while self.frames.free() < count {
            if !self.release_oldest() && !self.drop_idle_fetch(keep) {
                return false;
            }
        }
        true
    }

    /// After every input: keeps the reserve, and retries waiting faults.
    pub(super) fn maintain(&mut self) {
        self.retry_busy();
        if self.faults_seen.is_multiple_of(APPETITE_FAULTS) {
            self.appetite /= 2;
        }
        self.serve_waiting();
        while self.frames.free() < self.marks.reserve && self.release_oldest() {}
        self.serve_waiting();
        while self.should_evict() && self.evict(self.marks.batch, false) {}
        while !self.waiting.is_empty() && !self.progress_is_certain() {
            if !self.evictions_pause && self.evict(self.marks.batch, true) {
                break;
            }
            let index = self.waiting[0];
            if !self.serve(index, true) {
                break;
            }
            self.waiting_served(index);
        }
    }

    fn should_evict(&self) -> bool {
        if self.evictions_pause {
            return false;
        }
        let wanted = self.marks.reserve + self.appetite;
        let frames = &self.frames;
        let leaving = frames.evicting + frames.staged;
        let free = frames.free();
        if frames.used() > frames.budget + leaving {
            return true;
        }
        free + leaving < wanted + self.marks.staging
            || (free < wanted
                && self.lingering.is_empty()
                && self.evictions_in_flight == 0
                && leaving < self.marks.staging_max)
    }

    /// A pending operation will free frames or a fetch slot.
    fn progress_is_certain(&self) -> bool {
        self.evictions_in_flight > 0
            || self.fetches_in_flight > 0
            || (self.stores_in_flight > 0 && !self.pool_full)
    }
}
