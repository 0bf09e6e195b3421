//! Regions: to open, to clone, to free one.

use super::{CHUNKS_AT_ONCE, Connection, Paused, Refused, ScratchBuffers};
use crate::shared::Shared;
use rampool_lease::{LeaseSpace, RegionSelector};
use rampool_wire::frame::{Header, MAX_NAME_BYTES, RegionId, Status};

/// The same of a region that is cloned.
const CLONED_AT_ONCE: usize = 256;

impl Connection {
    /// Clones a region from where it stopped, and answers with the number of the clone.
    pub(super) fn go_on_cloning(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        let region = RegionId(header.region);
        let result = loop {
            let made = self.membership().and_then(|membership| {
                let mut space = membership.space()?;
                let member = membership.member;
                let made = space.make(0, |space| {
                    let clone = |space: &mut LeaseSpace| space.clone_some(member, region, CLONED_AT_ONCE);
                    space.make_once(member, header.request, clone)
                });
                if made.is_err() && space.has_freed() {
                    shared.bury_later(membership.lease.id);
                }
                Ok(made?)
            });
            match made {
                Ok(Some(clone)) => break Ok(clone),
                Ok(None) if buffers.slice.is_over() => {
                    self.paused = Some(Paused::Clone(header));
                    return;
                }
                Ok(None) => {}
                Err(refused) => break Err(refused),
            }
        };
        match result {
            Ok(clone) => self.answer(shared, buffers, Header { region: clone.0, ..header }, Ok(0)),
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
    }

    /// Frees pages of freed regions, and answers when all are free.
    pub(super) fn go_on_freeing(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        // Also where the member's connection is another one by now: what is freed belongs to no one.
        let Some(membership) = &self.membership else { return };
        let mut more = true;
        while more {
            more = membership.lease.space().bury(CHUNKS_AT_ONCE as u64, &mut buffers.released);
            shared.store.release(&buffers.released);
            buffers.released.clear();
            if more && buffers.slice.is_over() {
                self.paused = Some(Paused::Free(header));
                return;
            }
        }
        self.answer(shared, buffers, header, Ok(0));
    }

    pub(super) fn open_region(&mut self, header: Header) -> Result<(RegionId, u64), Refused> {
        let table = self.link.table();
        let membership = self.membership()?;
        let selector = if header.region != 0 {
            if !table.is_empty() {
                return Err(Refused::new(
                    Status::BadRequest,
                    "a region is opened by its name or by its number",
                ));
            }
            RegionSelector::Region(RegionId(header.region))
        } else {
            let name = std::str::from_utf8(table)
                .ok()
                .filter(|name| !name.is_empty() && name.len() <= MAX_NAME_BYTES);
            RegionSelector::Name(name.ok_or_else(|| {
                Refused::new(Status::BadRequest, "a region's name has 1 to 255 bytes of UTF-8")
            })?)
        };
        // A name may be new.
        Ok(membership.space()?.make(0, |space| space.open_region(membership.member, selector, header.arg))?)
    }
}
