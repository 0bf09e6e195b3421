//! What stands behind a pager: something that stores pages and brings them back.
//!
//! The pool of memory servers is the real one ([`rampool_client::pool::Pool`]); tests use one in local
//! memory. All calls are non-blocking except where stated, and come from the pager thread.

pub mod memory;
pub mod pool;

use rampool_client::pool::{LeaseTicket, RegionTicket};
use rampool_client::stats::PagerStats;
use rampool_wire::units::Extent;

/// Something happened behind the pager.
#[derive(Debug)]
pub enum BackingEvent {
    /// The bytes of fetch `token` have been stored in its target.
    Fetched { token: u64 },
    /// Every page of store `token` is held by the servers.
    Stored { token: u64 },
    /// The servers had no room for store `token`; retry it later.
    Full { token: u64, reason: String },
    /// Fetch or store `token` came to nothing. The rest goes on; what [`Backing::gone`] names cannot be fetched.
    Failed { token: u64, reason: String },
    /// Pages are gone for good. The reason names the server, the operation and what was lost.
    Lost { reason: String },
}

/// # Safety
/// Implementations read and write the memory handed to `fetch` and `store` only until the matching event, and
/// only inside it.
pub unsafe trait Backing {
    /// Names a set of pages at the servers.
    type Region: Copy + std::fmt::Debug;

    /// Brings pages, in order, to `to`.
    ///
    /// # Safety
    /// `to` is writable for all pages of `extents` and not used otherwise until `Fetched`, `Failed` or `Lost`.
    unsafe fn fetch(
        &mut self,
        region: Self::Region,
        token: u64,
        extents: &[Extent],
        to: *mut u8,
        demand: bool,
    );

    /// Those of these pages that are lost, while others are not.
    fn gone(&self, region: Self::Region, extents: &[Extent]) -> Vec<Extent> {
        let _ = (region, extents);
        Vec::new()
    }

    /// As `fetch`, each run to its own address; perhaps none. Called only where some pages are gone.
    ///
    /// # Safety
    /// As `fetch`.
    unsafe fn fetch_parts(
        &mut self,
        region: Self::Region,
        token: u64,
        parts: &[(Extent, *mut u8)],
        demand: bool,
    ) {
        let _ = (region, token, parts, demand);
        unreachable!("no page of this backing is ever gone");
    }

    /// Stores pages, each run from its own address.
    ///
    /// # Safety
    /// The memory stays readable and unchanged until `Stored`, `Full` or `Lost`.
    unsafe fn store(&mut self, region: Self::Region, token: u64, pages: &[(Extent, *const u8)]);

    /// The content of these pages is not needed any more.
    fn discard(&mut self, region: Self::Region, extent: Extent);

    /// Does I/O without blocking; returns the next event.
    fn poll(&mut self) -> Option<BackingEvent>;

    /// Descriptors that become ready when `poll` has work.
    fn poll_fds(&self, out: &mut Vec<libc::pollfd>);

    /// When `poll` must be called even if no descriptor becomes ready.
    fn next_deadline(&self) -> Option<std::time::Instant>;

    /// A copy-on-write copy of a region, with every store acknowledged so far. Blocks, up to the operation
    /// deadline.
    ///
    /// # Errors
    /// What failed and where.
    fn clone_region(&mut self, region: Self::Region) -> Result<Self::Region, String>;

    /// Opens a region, of `bytes` bytes, for every member of the lease. Blocks, up to the operation deadline.
    ///
    /// # Errors
    /// What failed and where, or that no other process could open it.
    fn open_for_all(
        &mut self,
        region: Self::Region,
        bytes: u64,
    ) -> Result<(LeaseTicket, RegionTicket), String> {
        let _ = (region, bytes);
        Err("the backing of this memory cannot be opened by another process".into())
    }

    /// Gives a region up. Does not wait.
    fn free_region(&mut self, region: Self::Region);

    /// Publishes its counters. Called every few milliseconds.
    fn report(&self, to: &PagerStats) {
        let _ = to;
    }

    /// Looks after servers that are lost, where that is this process's part. Called some times a second.
    fn tend(&mut self) {}

    /// The pager has ended in order: disconnects from the servers. Blocks, briefly.
    fn close(&mut self) {}
}
