//! Reading pages where servers on this machine keep them, instead of asking.

use std::collections::BTreeMap;

use rampool_paging::placement::ServerIndex;
use rampool_session::{Known, Places, Stamp};
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

use super::PoolRegion;
use super::body::Body;
use super::server::Server;

/// Where pages lie, by region, as far as the servers have told.
#[derive(Default)]
pub(super) struct InPlace {
    regions: BTreeMap<PoolRegion, Places>,
    last_stamp: u32,
    /// For packed pages, kept for its capacity.
    packed: Vec<u8>,
}

impl InPlace {
    /// What the answers to a store, or to a request for pages that comes after it, are noted under.
    pub fn stamp(&mut self, store: bool) -> Stamp {
        if store {
            self.last_stamp = self.last_stamp.wrapping_add(1);
        }
        Stamp(self.last_stamp)
    }

    /// These pages are being stored.
    pub fn changing(&mut self, (region, stamp): (PoolRegion, Stamp), extent: Extent) {
        self.regions.entry(region).or_default().changing(stamp, extent);
    }

    pub fn discarded(&mut self, region: PoolRegion, extent: Extent) {
        if let Some(places) = self.regions.get_mut(&region) {
            places.discarded(extent);
        }
    }

    pub fn forget(&mut self, region: PoolRegion) {
        self.regions.remove(&region);
    }

    /// Nothing is read from this server any more.
    pub fn lost(&mut self, server: ServerIndex) {
        self.regions.values_mut().for_each(|places| places.forget(server));
    }

    /// Copies all these pages out of the servers' memory. False: they have to be asked for.
    ///
    /// # Safety
    /// As [`super::Pool::fetch`].
    pub unsafe fn read(
        &mut self,
        servers: &mut [Server],
        region: PoolRegion,
        extents: &[Extent],
        dst: *mut u8,
    ) -> bool {
        let Some(places) = self.regions.get_mut(&region) else { return false };
        let pages = || extents.iter().flat_map(Extent::pages);
        let is_known =
            |page| places.known(page).is_some_and(|known| servers[known.server.as_usize()].frames.is_some());
        if !pages().all(is_known) {
            return false;
        }
        for (page, at) in pages().zip((0..).step_by(OS_PAGE_BYTES)) {
            let known = places.known(page).expect("seen above");
            let server = &mut servers[known.server.as_usize()];
            let frames = server.frames.as_ref().expect("seen above");
            // SAFETY: the caller's promise; a page is within what was promised.
            if !unsafe { frames.read(&known, dst.wrapping_add(at), &mut self.packed) } {
                places.missed(page, known);
                return false;
            }
            server.stats.in_place_pages += 1;
        }
        true
    }

    /// A request for pages has been answered.
    pub fn fetched(&mut self, server: &Server, body: &Body) {
        let Some((region, _)) = body.of.filter(|_| server.frames.is_some()) else { return };
        let places = self.regions.entry(region).or_default();
        for (page, (place, crc)) in body.indices().zip(server.told()) {
            places.fetched(page, Known { server: server.index, place, crc });
        }
    }

    /// A store has been answered.
    pub fn stored(&mut self, server: &mut Server, body: &Body) {
        let Some((region, stamp)) = body.of else { return };
        let Some(places) = self.regions.get_mut(&region) else { return };
        let index = server.index;
        let told = server.stored_at(body.pages() as usize);
        for ((page, place), crc) in body.indices().zip(told).zip(&body.crcs) {
            places.stored(stamp, page, Known { server: index, place: *place, crc: *crc });
        }
    }
}
