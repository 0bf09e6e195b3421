//! The pages of a rank beyond its budget: at memory servers, in a region of its own, each at its offset in
//! the shared range.
//!
//! Calls block until the servers have answered, at most for the pool's deadline: the rank's engine reads and
//! writes pages as if they were here. A server that is lost with pages that no other one has ends the run.

use std::time::{Duration, Instant};

use rampool_client::error::{ConnectError, PoolError};
use rampool_client::pool::{Pool, PoolConfig, PoolEvent, PoolRegion};
use rampool_wire::units::{ByteLen, Extent, OS_PAGE_BYTES, PageIndex};

/// Why memory servers cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServersError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("memory server {server} has no room for them: {free} of the lease are free there")]
    Full { server: String, free: ByteLen },
    #[error("memory server {server} sent other bytes than were stored for {page}, twice in a row")]
    Damaged { server: String, page: PageIndex },
    #[error("cannot watch the connections to memory servers: {0}")]
    Watch(#[from] std::io::Error),
}

/// Only one operation is under way at a time.
const TOKEN: u64 = 0;
/// The rank's engine waits so long while servers catch up.
const CATCH_UP: Duration = Duration::from_millis(50);
/// Every operation ends; nothing depends on how often that is looked for.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A rank's region at the memory servers.
pub(super) struct Servers {
    pool: Pool,
    region: PoolRegion,
}

impl Servers {
    /// Leases, and makes a region. Only pages that are sent take room there.
    pub fn connect(config: &PoolConfig) -> Result<Self, ServersError> {
        let mut pool = Pool::connect(config)?;
        let region = pool.create_region()?;
        Ok(Self { pool, region })
    }

    /// Sends pages, each with its offset. The servers have them all when it returns.
    pub fn send(&mut self, pages: Vec<(usize, Vec<u8>)>) -> Result<(), ServersError> {
        let part = |(offset, bytes): &(usize, Vec<u8>)| (extent(*offset, bytes.len()), bytes.as_ptr());
        let parts: Vec<_> = pages.iter().map(part).collect();
        // SAFETY: the bytes are not touched before the store's event, and stay for ever if that is not seen.
        unsafe { self.pool.store(self.region, TOKEN, &parts) };
        self.wait().inspect_err(|_| std::mem::forget(pages))
    }

    /// Fetches so many bytes of pages from `offset` on.
    pub fn bring(&mut self, offset: usize, len: usize) -> Result<Vec<u8>, ServersError> {
        let mut bytes = vec![0; len];
        // SAFETY: as long as the pages, and as above.
        unsafe {
            self.pool.fetch(self.region, TOKEN, &[extent(offset, len)], bytes.as_mut_ptr(), true);
        }
        match self.wait() {
            Ok(()) => Ok(bytes),
            Err(error) => {
                std::mem::forget(bytes);
                Err(error)
            }
        }
    }

    fn wait(&mut self) -> Result<(), ServersError> {
        loop {
            match self.pool.next_event(Instant::now() + LOOK_EVERY)? {
                Some(PoolEvent::Fetched { .. } | PoolEvent::Stored { .. }) => return Ok(()),
                Some(PoolEvent::Failed { error, .. }) => return Err(error.into()),
                Some(PoolEvent::Full { name: server, free, .. }) => {
                    return Err(ServersError::Full { server, free });
                }
                Some(PoolEvent::Corrupt { name: server, page, .. }) => {
                    return Err(ServersError::Damaged { server, page });
                }
                // What needs a server that is lost fails.
                Some(_) => {}
                None => self.pool.tend(),
            }
        }
    }

    /// Sends a heartbeat to the servers if it is due, and uses those again that are back: those get what they
    /// have missed, for some milliseconds at a time. Call it about once a second.
    pub fn keep_alive(&mut self) {
        while self.pool.poll().is_some() {}
        self.pool.tend();
        let until = Instant::now() + CATCH_UP;
        // A socket that cannot be watched shows where it is needed.
        while self.pool.is_behind() && Instant::now() < until {
            let _ = self.pool.next_event(until);
        }
    }

    /// Gives the lease back.
    pub fn leave(mut self) {
        self.pool.close();
    }

    /// The servers may drop the page at `offset`. Does not block.
    pub fn forget(&mut self, offset: usize, bytes: usize) {
        self.pool.discard(self.region, extent(offset, bytes));
        // No operation is under way, so nothing that happened is missed.
        while self.pool.poll().is_some() {}
    }
}

fn extent(offset: usize, bytes: usize) -> Extent {
    let pages = u32::try_from(bytes / OS_PAGE_BYTES).expect("a page is small");
    Extent::new(PageIndex((offset / OS_PAGE_BYTES) as u64), pages)
}
