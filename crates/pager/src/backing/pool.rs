//! The pool of memory servers behind a pager.

use rampool_paging::placement::ServerIndex;
use rampool_wire::units::{ByteLen, Extent};

use super::{Backing, BackingEvent};
use crate::pager::Pager;
use rampool_client::error::PoolError;
use rampool_client::pool::{LeaseTicket, Pool, PoolEvent, PoolRegion, RegionSelector, RegionTicket};
use rampool_client::stats::PagerStats;

impl Pager<Pool> {
    /// As [`Pool::resize_lease`].
    ///
    /// # Errors
    /// As there.
    pub fn resize_lease(&mut self, bytes: ByteLen) -> Result<(), PoolError> {
        self.backing.resize_lease(bytes)
    }

    /// As [`Pool::hand_over`], of a region that this pager has made for a child. Its own region stays.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If it is the pager's own.
    pub fn hand_over_region(&mut self, region: PoolRegion) -> Result<RegionTicket, PoolError> {
        assert!(region != self.region, "a pager's own region is used by it");
        self.backing.hand_over(region)
    }

    /// As [`Pool::join_anew`].
    pub fn join_anew(&mut self, server: ServerIndex, ticket: &LeaseTicket) -> bool {
        self.backing.join_anew(server, ticket)
    }

    /// As [`Pool::grow_to`].
    pub fn grow_to(&mut self, ticket: &LeaseTicket) {
        self.backing.grow_to(ticket);
    }

    /// As [`Pool::free_what_was_not_taken`].
    pub fn free_what_was_not_taken(&mut self, ticket: &RegionTicket) {
        self.backing.free_what_was_not_taken(ticket);
    }
}

// SAFETY: the pool reads and writes the memory of an operation only until its event, as `Pool::fetch` and
// `Pool::store` say; after a server was lost, operations that need it end in `Failed`, and until then their
// other parts may still be written.
unsafe impl Backing for Pool {
    type Region = PoolRegion;

    unsafe fn fetch(
        &mut self,
        region: PoolRegion,
        token: u64,
        extents: &[Extent],
        to: *mut u8,
        demand: bool,
    ) {
        // SAFETY: the caller's promise is the same.
        unsafe { Pool::fetch(self, region, token, extents, to, demand) };
    }

    fn gone(&self, region: PoolRegion, extents: &[Extent]) -> Vec<Extent> {
        Pool::gone(self, region, extents)
    }

    unsafe fn fetch_parts(
        &mut self,
        region: PoolRegion,
        token: u64,
        parts: &[(Extent, *mut u8)],
        demand: bool,
    ) {
        // SAFETY: the caller's promise is the same.
        unsafe { Pool::fetch_parts(self, region, token, parts, demand) };
    }

    unsafe fn store(&mut self, region: PoolRegion, token: u64, pages: &[(Extent, *const u8)]) {
        // SAFETY: the caller's promise is the same.
        unsafe { Pool::store(self, region, token, pages) };
    }

    fn discard(&mut self, region: PoolRegion, extent: Extent) {
        Pool::discard(self, region, extent);
    }

    fn poll(&mut self) -> Option<BackingEvent> {
        loop {
            return Some(match Pool::poll(self)? {
                PoolEvent::Fetched { token } => BackingEvent::Fetched { token },
                PoolEvent::Stored { token } => BackingEvent::Stored { token },
                PoolEvent::Full { token, name, free, .. } => BackingEvent::Full {
                    token,
                    reason: format!("memory server {name} has {free} of this lease left"),
                },
                PoolEvent::Corrupt { name, page, .. } => BackingEvent::Lost {
                    reason: format!(
                        "memory server {name} returned other bytes than were stored for {page}, twice"
                    ),
                },
                PoolEvent::Failed { token, error } if self.copies() > 1 => {
                    BackingEvent::Failed { token, reason: error.to_string() }
                }
                PoolEvent::Failed { error, .. } => BackingEvent::Lost { reason: error.to_string() },
                PoolEvent::Lost { server, name, operation, reason } => {
                    let held = self.leased(server).unwrap_or(ByteLen(0));
                    let reason = format!(
                        "memory server {name} is lost (while waiting for {operation}): {reason}; the pages it held, up to {held}, are gone"
                    );
                    BackingEvent::Lost { reason }
                }
                // The server says good-bye in time; it is lost when it goes. And what another server has is not lost.
                PoolEvent::Draining { .. }
                | PoolEvent::Degraded { .. }
                | PoolEvent::Holds { .. }
                | PoolEvent::Drained { .. }
                | PoolEvent::Absent { .. }
                | PoolEvent::Returned { .. }
                | PoolEvent::CaughtUp { .. } => continue,
            });
        }
    }

    fn poll_fds(&self, out: &mut Vec<libc::pollfd>) {
        Pool::poll_fds(self, out);
    }

    fn next_deadline(&self) -> Option<std::time::Instant> {
        Pool::next_deadline(self)
    }

    fn clone_region(&mut self, region: PoolRegion) -> Result<PoolRegion, String> {
        Pool::clone_region(self, region).map_err(|e| e.to_string())
    }

    fn open_for_all(
        &mut self,
        region: PoolRegion,
        bytes: u64,
    ) -> Result<(LeaseTicket, RegionTicket), String> {
        let ticket = self.region_ticket(region).map_err(|error| error.to_string())?;
        if let Err(error) = self.open_region(RegionSelector::Ticket(&ticket), bytes) {
            Pool::free_region(self, region);
            return Err(error.to_string());
        }
        // Its pages stay where they are, also where others take the place of a server.
        let ticket = Pool::hand_over(self, region).map_err(|error| error.to_string())?;
        Ok((self.lease_ticket(), ticket))
    }

    fn free_region(&mut self, region: PoolRegion) {
        Pool::free_region(self, region);
    }

    fn report(&self, to: &PagerStats) {
        Pool::report(self, to);
    }

    fn tend(&mut self) {
        Pool::tend(self);
    }

    fn close(&mut self) {
        Pool::close(self);
    }
}
