//! Handing paged memory over to processes that read it directly, while its owner goes on with it.
//!
//! The servers' copy of a region is older than the program's memory, by what is in local memory. So the
//! servers make a copy-on-write copy of the region, and the local pages are stored into that copy, from where
//! they are. Nothing leaves local memory for it, and nothing that the program does afterwards shows in the
//! copy. It is what a forked child would see, at the servers.

use std::time::{Duration, Instant};

use rampool_kernel::memory::Mapping;
use rampool_kernel::selfmem::SelfMemory;
use rampool_paging::page_set::PageSet;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

use super::{HAND_OVER_TOKEN, Pager, Supervisor, intersect, page_count, sleep_on};
use crate::backing::{Backing, BackingEvent};

/// Pages that are copied and stored together.
const PIECE_PAGES: usize = 256;
/// The servers take what left before within this time.
const TIMEOUT: Duration = Duration::from_secs(10);

impl<B: Backing> Pager<B> {
    /// Makes a copy at the servers of `bytes` bytes of managed memory from `start` on, and says from which
    /// byte of it on they are. Blocks: faults wait meanwhile. What the program changes meanwhile is in the
    /// copy or not.
    ///
    /// # Errors
    /// Why there is no copy.
    pub fn hand_over(
        &mut self,
        start: usize,
        bytes: usize,
        supervisor: &mut impl Supervisor<B>,
    ) -> Result<(B::Region, u64), String> {
        if self.lost.is_some() {
            return Err("memory servers were lost before".into());
        }
        if !self.requests.refused.is_empty() {
            return Err("the servers have no room for pages that left local memory before".into());
        }
        self.settle(supervisor, Instant::now() + TIMEOUT)?;
        let mut extents = Vec::new();
        self.space.extents_in(start, start + bytes, |_, extent| extents.push(extent));
        let [extent] = extents[..] else { return Err("it is not one piece of memory any more".into()) };
        if extent.count as usize * OS_PAGE_BYTES != bytes {
            return Err("part of it is unmapped".into());
        }
        let settled = self.freeze(supervisor, Instant::now() + TIMEOUT);
        let copied = settled
            .map_err(|unsent| format!("the servers do not take {unsent} pages that left local memory before"))
            .and_then(|()| self.backing.clone_region(self.region))
            .and_then(|copy| match self.store_resident(copy, extent) {
                Ok(()) => Ok(copy),
                Err(reason) => {
                    self.backing.free_region(copy);
                    Err(reason)
                }
            });
        self.unfreeze();
        Ok((copied?, extent.first.0 * OS_PAGE_BYTES as u64))
    }

    /// Stores the pages of `wanted` that are in local memory into `copy`.
    fn store_resident(&mut self, copy: B::Region, wanted: Extent) -> Result<(), String> {
        let memory = SelfMemory::open(false).map_err(|error| error.to_string())?;
        let staging = Mapping::anonymous(PIECE_PAGES * OS_PAGE_BYTES).map_err(|error| error.to_string())?;
        let mut here = PageSet::default();
        self.cache.resident_runs(|run| {
            if let Some(part) = intersect(run, wanted) {
                here.insert(part);
            }
            run.end() < wanted.end()
        });
        // Pages given up lazily and written since are present as well, though the cache does not count them.
        let mut present = Vec::new();
        let start = self.space.address_of(wanted.first).ok_or("part of it is unmapped")?;
        self.pagemap.present_runs(start, start + wanted.count as usize * OS_PAGE_BYTES, &mut present);
        for run in present {
            here.insert(Extent::new(
                wanted.first.offset(((run.start - start) / OS_PAGE_BYTES) as u64),
                page_count(run.bytes),
            ));
        }
        let mut resident = Vec::new();
        for run in here.extents() {
            let (mut at, end) = (run.first, run.end());
            while at < end {
                let pages = u32::try_from((end.0 - at.0).min(PIECE_PAGES as u64)).expect("few pages");
                resident.push(Extent::new(at, pages));
                at = at.offset(pages.into());
            }
        }
        for run in resident {
            let mut from = None;
            self.space.pieces(run, |piece| from = from.or(Some(piece.start)));
            let from = from.ok_or("part of it is unmapped")?;
            let mut done = 0;
            while done < run.count as usize * OS_PAGE_BYTES {
                let at = staging.at(done);
                // SAFETY: within the staging, which is this function's own and as long as the run at least.
                let have = unsafe { memory.read(from + done, at, run.count as usize * OS_PAGE_BYTES - done) };
                let whole = have / OS_PAGE_BYTES * OS_PAGE_BYTES;
                done += whole;
                if done < run.count as usize * OS_PAGE_BYTES {
                    // The program dropped it, and the event was not read yet: it reads as zeroes.
                    // SAFETY: the next page of the staging.
                    unsafe { staging.at(done).write_bytes(0, OS_PAGE_BYTES) };
                    done += OS_PAGE_BYTES;
                }
            }
            // SAFETY: the staging is not touched before the store has ended.
            unsafe { self.backing.store(copy, HAND_OVER_TOKEN, &[(run, staging.at(0).cast_const())]) };
            if let Err(reason) = self.await_hand_over() {
                // Where a server was lost, the pages on their way to another one may still be read.
                std::mem::forget(staging);
                return Err(reason);
            }
        }
        Ok(())
    }

    /// Waits for the one store to a copy that is under way; other events are kept for later.
    fn await_hand_over(&mut self) -> Result<(), String> {
        loop {
            match self.backing.poll() {
                Some(BackingEvent::Stored { token: HAND_OVER_TOKEN }) => return Ok(()),
                Some(
                    BackingEvent::Full { token: HAND_OVER_TOKEN, reason }
                    | BackingEvent::Failed { token: HAND_OVER_TOKEN, reason },
                ) => return Err(reason),
                Some(BackingEvent::Lost { reason }) => {
                    self.requests.deferred.push_back(BackingEvent::Lost { reason: reason.clone() });
                    return Err(reason);
                }
                Some(other) => self.requests.deferred.push_back(other),
                None => {
                    let mut fds = Vec::new();
                    self.backing.poll_fds(&mut fds);
                    sleep_on(&mut fds, Duration::from_millis(1));
                }
            }
        }
    }
}
