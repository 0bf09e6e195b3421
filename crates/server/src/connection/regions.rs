//! Regions: to make, to open, to clone, to take over, to free one.

use super::{Connection, Handled, Service, Step, Stepped, Work};
use crate::refused::Refused;
use crate::shared::Shared;
use rampool_lease::{LeaseSpace, RegionSelector};
use rampool_wire::frame::{Header, MAX_NAME_BYTES, RegionId, Status};

/// Times 512 pages that are cloned between two looks at the clock.
const CLONED_AT_ONCE: usize = 256;
/// The same of pages that are freed.
const FREED_AT_ONCE: u64 = 2;

/// A `CloneRegion`; the reply's region names the clone.
struct Cloning;

/// A region or queue is freed: its pages, and those of others that were freed before.
pub(super) struct Freeing;

impl Connection {
    pub(super) fn create_region(&mut self, _: &mut Service, header: Header) -> Handled {
        let membership = self.membership()?;
        let member = membership.member;
        let made = membership.space()?.make(0, |space| {
            space.make_once(member, header.request, |space| space.create_region(member).map(Some))
        });
        let region = made?.expect("it is made at once").0;
        self.done(Header { region, ..header }, 0)
    }

    pub(super) fn clone_region(&mut self, service: &mut Service, header: Header) -> Handled {
        self.begin(service, header, Cloning)
    }

    pub(super) fn adopt_region(&mut self, _: &mut Service, header: Header) -> Handled {
        let membership = self.membership()?;
        membership.space()?.adopt_region(membership.member, RegionId(header.region))?;
        self.done(header, 0)
    }

    pub(super) fn free_region(&mut self, service: &mut Service, header: Header) -> Handled {
        let membership = self.membership()?;
        membership.space()?.free_region(membership.member, RegionId(header.region))?;
        self.begin(service, header, Freeing)
    }

    pub(super) fn open_region(&mut self, _: &mut Service, header: Header) -> Handled {
        let table = self.link.table();
        let membership = self.membership()?;
        let bad = |message: &str| Refused::new(Status::BadRequest, message);
        let selector = if header.region == 0 {
            let name = std::str::from_utf8(table).ok();
            let name = name.filter(|name| !name.is_empty() && name.len() <= MAX_NAME_BYTES);
            RegionSelector::Name(name.ok_or_else(|| bad("a region's name has 1 to 255 bytes of UTF-8"))?)
        } else if table.is_empty() {
            RegionSelector::Region(RegionId(header.region))
        } else {
            return Err(bad("a region is opened by its name or by its number").into());
        };
        // A name may be new.
        let opened =
            membership.space()?.make(0, |space| space.open_region(membership.member, selector, header.arg));
        let (region, bytes) = opened?;
        self.done(Header { region: region.0, ..header }, bytes)
    }
}

impl Work for Cloning {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let region = RegionId(header.region);
        loop {
            let membership = connection.membership()?;
            let (mut space, member) = (membership.space()?, membership.member);
            let made = space.make(0, |space| {
                let clone = |space: &mut LeaseSpace| space.clone_some(member, region, CLONED_AT_ONCE);
                space.make_once(member, header.request, clone)
            });
            if made.is_err() && space.has_freed() {
                service.shared.bury_later(membership.lease.id);
            }
            drop(space);
            if let Some(clone) = made? {
                connection.answer(Header { region: clone.0, ..header }, 0);
                return Ok(Step::Done);
            }
            if service.slice.is_over() {
                return Ok(Step::More);
            }
        }
    }

    fn leave(self: Box<Self>, connection: &Connection, shared: &Shared) {
        if let Ok(membership) = connection.membership()
            && let Ok(mut space) = membership.space()
        {
            space.stop_cloning(membership.member);
            drop(space);
            // The reaper frees what there is of it.
            shared.bury_later(membership.lease.id);
        }
    }
}

impl Work for Freeing {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let (shared, mut released) = (&service.shared, Vec::new());
        // Also where the member's connection is another one by now: what is freed belongs to no one.
        let lease = &connection.membership()?.lease;
        while lease.space().bury(FREED_AT_ONCE, &mut released) {
            shared.store.release(&released);
            released.clear();
            if service.slice.is_over() {
                return Ok(Step::More);
            }
        }
        shared.store.release(&released);
        connection.answer(header, 0);
        Ok(Step::Done)
    }

    /// The reaper goes on with it.
    fn leave(self: Box<Self>, connection: &Connection, shared: &Shared) {
        if let Ok(membership) = connection.membership() {
            shared.bury_later(membership.lease.id);
        }
    }
}
