//! The pages of a rank beyond its budget: at memory servers, in a region of its own, each at its offset in
//! the shared range.
//!
//! Calls block until the servers have answered, at most for the pool's deadline: the rank's engine reads and
//! writes pages as if they were here. A lost server ends the run, since its pages are lost.

use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use rampool_client::direct::{Direct, DirectError, DirectRegion};
use rampool_client::error::ConnectError;
use rampool_client::pool::{Pool, PoolConfig};
use rampool_wire::layout::Layout;

/// Why memory servers cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServersError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Region(#[from] DirectError),
}

/// A rank's region at the memory servers.
pub(super) struct Servers {
    direct: Direct,
    region: DirectRegion,
}

impl Servers {
    /// Leases, and makes a region as long as the shared range. Only pages that are sent take room there.
    pub fn connect(config: &PoolConfig, range_bytes: usize) -> Result<Self, ServersError> {
        let mut direct = Direct::new(Pool::connect(config)?);
        let region = direct.create(range_bytes as u64)?;
        Ok(Self { direct, region })
    }

    /// Sends pages, each with its offset. The servers have them all when it returns.
    pub fn send(&mut self, pages: Vec<(usize, Vec<u8>)>) -> Result<(), DirectError> {
        let mut sent = Vec::with_capacity(pages.len());
        for (offset, bytes) in pages {
            let there = Layout::bytes(bytes.len() as u64)?;
            sent.push(self.direct.start_put(self.region, offset as u64, &there, bytes)?);
        }
        for pending in sent {
            self.direct.wait(pending)?;
        }
        Ok(())
    }

    /// Fetches the page at `offset`.
    pub fn bring(&mut self, offset: usize, into: &mut [u8]) -> Result<(), DirectError> {
        self.direct.get(self.region, offset as u64, into)
    }

    /// Sends a heartbeat to the servers if it is due. Does not block.
    pub fn keep_alive(&mut self) {
        self.direct.progress();
    }

    /// Gives the lease back.
    pub fn leave(mut self) {
        self.direct.pool().close();
    }

    /// The servers may drop the page at `offset`. Does not block.
    pub fn forget(&mut self, offset: usize, bytes: usize) {
        let pages = u32::try_from(bytes / OS_PAGE_BYTES).expect("a page is small");
        let extent = Extent::new(PageIndex((offset / OS_PAGE_BYTES) as u64), pages);
        self.direct.pool().discard(self.region.pool_region(), extent);
        self.direct.progress();
    }
}
