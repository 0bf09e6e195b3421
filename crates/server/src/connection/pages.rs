//! Whole pages: `Get`, `Put`, `Discard`. They leave from their frames, and arrive in theirs.

use super::{
    Connection, Handled, LOOK_AT_CLOCK_AFTER, Pages, Reused, Service, Step, Stepped, Work, count, count_read,
    count_written, no_lease, tell,
};
use crate::held::Held;
use crate::refused::Refused;
use crate::shared::Shared;
use crate::slice::Slice;
use crate::store::Scratch;
use rampool_lease::FrameIndex;
use rampool_net::transport::{Piece, PieceMut, Urgency};
use rampool_wire::frame::{Header, PageEntry, RegionId, Status, encode_get_reply, parse_extents, parse_put};
use rampool_wire::places::{Place, push_places};
use rampool_wire::session::features;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

/// Times 512 pages that are discarded between two looks at the clock.
const CHUNKS_AT_ONCE: usize = 2;

/// A `Get`: holds pages, and sends them when it has all.
struct Getting(Reused<Pages>);

/// A `Put` whose pages are all here: brings them into their final form, and then enters them.
struct Putting {
    pages: Reused<Pages>,
    /// How many of its frames are in it.
    settled: usize,
}

/// A `Discard`: makes pages zero, the last extents first.
struct Discarding(Vec<Extent>);

/// What came with a request is not wanted.
pub(super) struct Refusing(pub(super) Refused);

impl Connection {
    pub(super) fn get(&mut self, service: &mut Service, header: Header) -> Handled {
        let mut pages = service.pages.take();
        parse_extents(&header, self.link.table(), &mut pages.extents)?;
        self.begin(service, header, Getting(pages))
    }

    /// The table of a `Put`: takes frames for the pages and lets them come.
    pub(super) fn put(&mut self, service: &mut Service, header: Header) -> Handled {
        let compressed = self.link.features() & features::LZ4 != 0;
        let mut pages = service.pages.take();
        let Pages { extents, entries, .. } = &mut *pages;
        parse_put(&header, self.link.table(), compressed, extents, entries)?;
        let lens = pages.entries.iter().map(|entry| entry.len).filter(|len| *len > 0);
        service.lens.clear();
        service.lens.extend(lens);
        service.places.clear();
        if let Err(refused) = self.take_frames(service, &mut pages.frames) {
            return self.sink(service, header, refused);
        }
        let memory = |(frame, len): (&FrameIndex, &u32)| PieceMut {
            ptr: service.shared.store.memory(*frame),
            len: *len as usize,
        };
        service.places.extend(pages.frames.iter().zip(&service.lens).map(memory));
        let putting = Putting { pages, settled: 0 };
        if header.bulk_len == 0 {
            return self.begin(service, header, putting);
        }
        self.await_bytes(service, putting)
    }

    /// Takes a frame for each of the lengths.
    pub(super) fn take_frames(&self, service: &Service, frames: &mut Vec<FrameIndex>) -> Result<(), Refused> {
        self.membership()?;
        if service.shared.store.take(self.arena, &service.lens, frames) {
            return Ok(());
        }
        Err(Refused::new(Status::PoolFull, "the server's memory is full of pages on their way"))
    }

    /// Lets the bytes of a request come to the places that are laid out, which are the work's.
    pub(super) fn await_bytes(&mut self, service: &Service, work: impl Work + 'static) -> Handled {
        assert!(self.arriving.is_none(), "one put arrives at a time");
        self.arriving = Some(Box::new(work));
        // SAFETY: the work has frames and a buffer of its own, which it keeps until `Bulk`, or until the link
        // is used no more; the sink belongs to the shard, is never read, and outlives its connections.
        unsafe { self.link.place(&service.places) };
        Ok(())
    }

    /// Lets the bytes of a request come to nowhere, and then refuses it.
    pub(super) fn sink(&mut self, service: &mut Service, header: Header, refused: Refused) -> Handled {
        if header.bulk_len == 0 {
            return Err(refused.into());
        }
        service.lay_out_sink(header.bulk_len as usize);
        self.await_bytes(service, Refusing(refused))
    }

    pub(super) fn discard(&mut self, service: &mut Service, header: Header) -> Handled {
        let mut extents = Vec::new();
        parse_extents(&header, self.link.table(), &mut extents)?;
        count(&service.shared.shards[self.arena].counts.discards, 1);
        if let Some(membership) = &self.membership {
            count(&membership.lease.counts.discards, 1);
        }
        self.begin(service, header, Discarding(extents))
    }
}

impl Work for Refusing {
    fn step(&mut self, _: &mut Connection, _: &mut Service, _: Header) -> Stepped {
        let Refused { status, arg, message } = &mut self.0;
        Err(Refused { status: *status, arg: *arg, message: std::mem::take(message) })
    }
}

impl Work for Getting {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let Connection { link, membership, arena, .. } = connection;
        let shared = &service.shared;
        let membership = membership.as_ref().ok_or_else(no_lease)?;
        let space = membership.space()?;
        let pages = &mut *self.0;
        pages.stored.clear();
        let region = RegionId(header.region);
        space.look_up(membership.member, region, &pages.extents, &mut pages.stored)?;
        let copied = pages.stored.len() == 1 && link.copies(OS_PAGE_BYTES);
        // Holds frames before the lock is released: a page that is replaced meanwhile releases a frame that
        // stays. What the link copies is copied before.
        if !self.hold(shared, (*arena, copied), link.features(), &mut service.slice)? {
            return Ok(Step::More);
        }
        let Pages { entries, stored, stored_at, frames, pieces, .. } = &mut *self.0;
        let bytes = entries.iter().map(|entry| u64::from(entry.len)).sum();
        count_read(shared, *arena, &membership.lease, (stored.len(), bytes));
        let locked = copied.then_some(space);
        let held = Held::frames(&shared.store, frames);
        service.head.clear();
        encode_get_reply(&mut service.head, header.reply(Status::Ok), entries, stored_at);
        // SAFETY: `held` keeps a reference to every frame until the reply has left, unless the link copies
        // the page at once, and then the page is the table's for as long as the lease is locked; settled
        // frames are not written.
        unsafe { link.send(Urgency::Demand, &service.head, pieces, held) };
        drop(locked);
        self.0.clear();
        service.pages.put_back(&mut self.0);
        Ok(Step::Done)
    }

    fn bytes(&self) -> usize {
        self.0.pieces.iter().map(|piece| piece.len).sum()
    }

    fn release(&mut self, shared: &Shared) {
        shared.store.release(&self.0.frames);
    }
}

impl Getting {
    /// Holds the pages behind those that it has. False: the slice is over before it has all.
    fn hold(
        &mut self,
        shared: &Shared,
        (arena, copied): (usize, bool),
        features: u32,
        slice: &mut Slice,
    ) -> Result<bool, Refused> {
        let (compressed, tells_places) = (features & features::LZ4 != 0, features & features::PLACES != 0);
        let Pages { entries, stored, stored_at, frames, pieces, .. } = &mut *self.0;
        for page in &stored[entries.len()..] {
            if entries.len() % LOOK_AT_CLOCK_AFTER == LOOK_AT_CLOCK_AFTER - 1 && slice.is_over() {
                return Ok(false);
            }
            if tells_places {
                stored_at.push(page.as_ref().map_or(Place::NONE, |page| shared.store.place(page)));
            }
            let Some(page) = page else {
                entries.push(PageEntry::ZERO);
                continue;
            };
            let (frame, len) = if copied && usize::from(page.len) == OS_PAGE_BYTES {
                (page.frame, page.len.into())
            } else {
                let held = shared.present(arena, page, compressed)?;
                frames.push(held.0);
                held
            };
            entries.push(PageEntry { crc: page.crc, len });
            pieces.push(Piece { ptr: shared.store.memory(frame), len: len as usize });
        }
        Ok(true)
    }
}

impl Work for Putting {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        if !self.settle(&service.shared, connection.arena, &mut service.slice, &mut service.scratch) {
            return Ok(Step::More);
        }
        let shared = &service.shared;
        let Pages { extents, stored, stored_at, released, .. } = &mut *self.pages;
        // While the frames are this request's alone: others may replace the pages as soon as
        // they are entered.
        if connection.link.features() & features::PLACES != 0 {
            let place = |page: &Option<_>| page.as_ref().map_or(Place::NONE, |page| shared.store.place(page));
            stored_at.extend(stored.iter().map(place));
        }
        let membership = connection.membership()?;
        let mut space = membership.space()?;
        let region = RegionId(header.region);
        space.is_ordinary(region)?;
        space.put(membership.member, region, extents, stored, released)?;
        drop(space);
        count_written(shared, connection.arena, &membership.lease, (stored.len(), header.bulk_len));
        shared.store.release(released);
        if stored_at.is_empty() {
            connection.answer(header, 0);
        } else {
            service.table.clear();
            push_places(&mut service.table, stored_at);
            tell(&mut connection.link, &mut service.head, header.reply(Status::Ok), &service.table);
        }
        self.pages.clear();
        service.pages.put_back(&mut self.pages);
        Ok(Step::Done)
    }

    fn release(&mut self, shared: &Shared) {
        let settled = self.pages.stored.iter().flatten().map(|page| page.frame);
        let all = settled.chain(self.pages.frames[self.settled..].iter().copied());
        shared.store.release(&all.collect::<Vec<_>>());
    }
}

impl Putting {
    /// Brings pages into their final form, from where it stopped. False: the slice is over before.
    fn settle(&mut self, shared: &Shared, arena: usize, slice: &mut Slice, scratch: &mut Scratch) -> bool {
        let Pages { entries, frames, stored, .. } = &mut *self.pages;
        for entry in &entries[stored.len()..] {
            if stored.len() % LOOK_AT_CLOCK_AFTER == LOOK_AT_CLOCK_AFTER - 1 && slice.is_over() {
                return false;
            }
            let page = (!entry.is_zero()).then(|| {
                let frame = frames[self.settled];
                self.settled += 1;
                shared.store.settle(arena, frame, *entry, scratch)
            });
            stored.push(page);
        }
        true
    }
}

impl Work for Discarding {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let (region, mut released) = (RegionId(header.region), Vec::new());
        loop {
            let all = connection.membership().and_then(|membership| {
                let mut space = membership.space()?;
                space.is_ordinary(region)?;
                let member = membership.member;
                Ok(space.discard_some(member, region, &mut self.0, CHUNKS_AT_ONCE, &mut released)?)
            });
            service.shared.store.release(&released);
            released.clear();
            if all? {
                connection.answer(header, 0);
                return Ok(Step::Done);
            }
            if service.slice.is_over() {
                return Ok(Step::More);
            }
        }
    }
}
