//! The pages of a rank that its budget has no room for: at memory servers, in a region of its own, each at its offset in the shared range.
//!
//! Calls block until the servers have answered, at most for the pool's deadline: the rank's engine reads and writes pages as if they were here. A server
//! that is lost ends the run, since what it had is lost.

use rampool_proto::units::{Extent, OS_PAGE_BYTES, PageIndex};

use crate::direct::{Direct, DirectError, DirectRegion};
use crate::error::ConnectError;
use crate::pool::{Pool, PoolConfig};
use rampool_proto::layout::Layout;

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
    /// Leases, and makes a region as long as the shared range. Only what is sent takes room there.
    pub fn connect(config: &PoolConfig, range_bytes: usize) -> Result<Self, ServersError> {
        let mut direct = Direct::new(Pool::connect(config)?);
        let region = direct.create(range_bytes as u64)?;
        Ok(Self { direct, region })
    }

    /// Sends pages, each with its offset. All are there when it returns.
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

    /// Brings the page at `offset`.
    pub fn bring(&mut self, offset: usize, into: &mut [u8]) -> Result<(), DirectError> {
        self.direct.get(self.region, offset as u64, into)
    }

    /// Lets the servers hear that this rank is there, if it is time to. Does not block.
    pub fn keep_alive(&mut self) {
        self.direct.progress();
    }

    /// Gives the lease back.
    pub fn leave(mut self) {
        self.direct.pool().leave();
    }

    /// The servers may forget the page at `offset`. Does not block.
    pub fn forget(&mut self, offset: usize, bytes: usize) {
        let pages = u32::try_from(bytes / OS_PAGE_BYTES).expect("a page is small");
        let extent = Extent::new(PageIndex((offset / OS_PAGE_BYTES) as u64), pages);
        self.direct.pool().discard(self.region.pool_region(), extent);
        self.direct.progress();
    }
}
