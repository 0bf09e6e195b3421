//! Whole pages: `Get`, `Put`, `Discard`. They leave from their frames, and arrive in theirs.

use super::held::Held;
use super::{
    Arriving, CHUNKS_AT_ONCE, Connection, End, LOOK_AT_CLOCK_AFTER, NO_LEASE, Paused, Refused,
    ScratchBuffers, count, count_alone, no_lease,
};
use crate::shared::Shared;
use rampool_lease::{FrameIndex, StoredPage};
use rampool_net::transport::{Piece, PieceMut, Urgency};
use rampool_wire::frame::{Header, PageEntry, RegionId, Status, encode_frame, encode_get_reply, parse_put};
use rampool_wire::places::{Place, push_places};
use rampool_wire::session::features;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

/// A `Get` of packed pages that takes more than one turn.
pub(super) struct Getting {
    header: Header,
    extents: Vec<Extent>,
    entries: Vec<PageEntry>,
    stored_at: Vec<Place>,
    pub(super) frames: Vec<FrameIndex>,
    pub(super) pieces: Vec<Piece>,
}

/// A `Put` whose pages are all here, and go into their frames' final form.
pub(super) struct Putting {
    header: Header,
    arrived: Arriving,
    /// Those that are in it, in the order of the request.
    pages: Vec<Option<StoredPage>>,
    /// How many of the frames they took.
    settled: usize,
}

impl Putting {
    /// What it holds.
    pub(super) fn frames(&self) -> impl Iterator<Item = FrameIndex> {
        let settled = self.pages.iter().flatten().map(|page| page.frame);
        settled.chain(self.arrived.frames[self.settled..].iter().copied())
    }
}

impl Connection {
    pub(super) fn get(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        buffers.stored_at.clear();
        buffers.entries.clear();
        buffers.frames.clear();
        buffers.pieces.clear();
        self.present(shared, buffers, header);
    }

    pub(super) fn go_on_getting(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, getting: Getting) {
        let Getting { header, extents, entries, stored_at, frames, pieces } = getting;
        (buffers.extents, buffers.entries, buffers.stored_at, buffers.frames, buffers.pieces) =
            (extents, entries, stored_at, frames, pieces);
        self.present(shared, buffers, header);
    }

    /// Holds the pages of a `Get` from where it stopped, and sends them when it has all.
    pub(super) fn present(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        let compressed = self.link.features() & features::LZ4 != 0;
        let tells_places = self.link.features() & features::PLACES != 0;
        buffers.pages.clear();
        let counts = &shared.shards[self.arena].counts;
        let (link, mut locked) = (&mut self.link, None);
        let result = self.membership.as_ref().ok_or_else(no_lease).and_then(|membership| {
            let space = membership.space()?;
            space.look_up(
                membership.member,
                RegionId(header.region),
                &buffers.extents,
                &mut buffers.pages,
            )?;
            let copied = buffers.pages.len() == 1 && link.copies(OS_PAGE_BYTES);
            let done = buffers.entries.len();
            // Holds frames before the lock is released: a page that is replaced meanwhile releases a frame
            // that stays. What the link copies is copied before.
            for page in &buffers.pages[done..] {
                if buffers.entries.len() % LOOK_AT_CLOCK_AFTER == LOOK_AT_CLOCK_AFTER - 1
                    && buffers.slice.is_over()
                {
                    return Ok(false);
                }
                if tells_places {
                    let place = page.as_ref().map_or(Place::NONE, |page| shared.store.place(page));
                    buffers.stored_at.push(place);
                }
                let Some(page) = page else {
                    buffers.entries.push(PageEntry::ZERO);
                    continue;
                };
                if copied && usize::from(page.len) == OS_PAGE_BYTES {
                    buffers.entries.push(PageEntry { crc: page.crc, len: page.len.into() });
                    buffers.pieces.push(Piece { ptr: shared.store.memory(page.frame), len: OS_PAGE_BYTES });
                    continue;
                }
                let presented = shared
                    .store
                    .present(self.arena, page, compressed)
                    .map_err(|e| Refused::new(Status::BadRequest, e))?;
                let (frame, len) =
                    presented.ok_or_else(|| Refused::new(Status::PoolFull, "no room to unpack a page"))?;
                buffers.frames.push(frame);
                buffers.entries.push(PageEntry { crc: page.crc, len });
                buffers.pieces.push(Piece { ptr: shared.store.memory(frame), len: len as usize });
            }
            let bytes = buffers.entries.iter().map(|entry| u64::from(entry.len)).sum();
            for counts in [counts, &membership.lease.counts] {
                count_alone(&counts.gets, 1);
                count_alone(&counts.got_pages, buffers.pages.len() as u64);
                count_alone(&counts.bytes_out, bytes);
            }
            locked = copied.then_some(space);
            Ok(true)
        });
        if matches!(result, Ok(false)) {
            let mut take = || std::mem::take(&mut buffers.extents);
            self.paused = Some(Paused::Get(Box::new(Getting {
                header,
                extents: take(),
                entries: std::mem::take(&mut buffers.entries),
                stored_at: std::mem::take(&mut buffers.stored_at),
                frames: std::mem::take(&mut buffers.frames),
                pieces: std::mem::take(&mut buffers.pieces),
            })));
            return;
        }
        let held = Held::frames(&shared.store, &buffers.frames);
        match result {
            Ok(_) => {
                buffers.head.clear();
                encode_get_reply(
                    &mut buffers.head,
                    header.reply(Status::Ok),
                    &buffers.entries,
                    &buffers.stored_at,
                );
                // SAFETY: `held` keeps a reference to every frame until the reply has left, unless the link
                // copies the page at once, and then the page is the table's for as long as the lease is
                // locked; settled frames are not written.
                unsafe { link.send(Urgency::Demand, &buffers.head, &buffers.pieces, held) };
                drop(locked);
            }
            Err(refused) => {
                drop(locked);
                self.refuse(buffers, header, &refused, shared);
            }
        }
    }

    /// Table of a `Put`: takes frames for the pages and lets them come.
    pub(super) fn begin_put(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let compressed = self.link.features() & features::LZ4 != 0;
        let arriving = &mut self.arriving;
        let parsed =
            parse_put(&header, self.link.table(), compressed, &mut arriving.extents, &mut arriving.entries);
        if let Err(error) = parsed {
            return Err(self.protocol_error(shared, buffers, header, error.into()));
        }
        assert!(arriving.frames.is_empty(), "one put arrives at a time");
        arriving.refused = None;
        if self.membership.is_none() {
            arriving.refused = Some((Status::NotAllowed, 0, NO_LEASE.to_owned()));
        } else {
            buffers.lens.clear();
            buffers.lens.extend(arriving.entries.iter().map(|e| e.len).filter(|len| *len > 0));
            if !shared.store.take(self.arena, &buffers.lens, &mut arriving.frames) {
                arriving.refused = Some((
                    Status::PoolFull,
                    0,
                    "the server's memory is full of pages on their way".to_owned(),
                ));
            }
        }
        buffers.places.clear();
        if self.arriving.refused.is_some() {
            buffers.lay_out_sink(header.bulk_len as usize);
        } else {
            let lens = self.arriving.entries.iter().map(|e| e.len as usize).filter(|len| *len > 0);
            for (frame, len) in self.arriving.frames.iter().zip(lens) {
                buffers.places.push(PieceMut { ptr: shared.store.memory(*frame), len });
            }
        }
        if header.bulk_len == 0 {
            self.finish_put(shared, buffers, header);
        } else {
            // SAFETY: frames just taken belong to `arriving` until `Bulk`, and are released only with or
            // after the link; the sink belongs to the shard, is never read, and outlives its connections.
            unsafe { self.link.place(&buffers.places) };
        }
        Ok(())
    }

    /// All pages of a `Put` are here.
    pub(super) fn finish_put(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        let mut arriving = std::mem::take(&mut self.arriving);
        if let Some((status, arg, message)) = arriving.refused.take() {
            self.arriving = arriving;
            self.refuse(buffers, header, &Refused { status, arg, message }, shared);
            return;
        }
        buffers.pages.clear();
        let pages = std::mem::take(&mut buffers.pages);
        self.go_on_putting(shared, buffers, Putting { header, arrived: arriving, pages, settled: 0 });
    }

    /// Brings the pages of a `Put` into their final form, from where it stopped, then enters them.
    pub(super) fn go_on_putting(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        mut putting: Putting,
    ) {
        let counts = &shared.shards[self.arena].counts;
        let Putting { arrived, pages, settled, .. } = &mut putting;
        for entry in &arrived.entries[pages.len()..] {
            if pages.len() % LOOK_AT_CLOCK_AFTER == LOOK_AT_CLOCK_AFTER - 1 && buffers.slice.is_over() {
                self.paused = Some(Paused::Put(Box::new(putting)));
                return;
            }
            let page = (!entry.is_zero()).then(|| {
                let frame = arrived.frames[*settled];
                *settled += 1;
                shared.store.settle(self.arena, frame, *entry, &mut buffers.scratch)
            });
            pages.push(page);
        }
        let Putting { header, arrived: mut arriving, pages, .. } = putting;
        arriving.frames.clear();
        buffers.pages = pages;
        // While the frames are this request's alone: others may replace the pages as soon as they are entered.
        buffers.stored_at.clear();
        if self.link.features() & features::PLACES != 0 {
            let place = |page: &Option<_>| page.as_ref().map_or(Place::NONE, |page| shared.store.place(page));
            buffers.stored_at.extend(buffers.pages.iter().map(place));
        }
        buffers.released.clear();
        let result = self.membership().and_then(|membership| {
            let mut space = membership.space()?;
            space.is_ordinary(RegionId(header.region))?;
            space.put(
                membership.member,
                RegionId(header.region),
                &arriving.extents,
                &buffers.pages,
                &mut buffers.released,
            )?;
            drop(space);
            for counts in [counts, &membership.lease.counts] {
                count(&counts.puts, 1);
                count(&counts.put_pages, buffers.pages.len() as u64);
                count(&counts.bytes_in, header.bulk_len.into());
            }
            Ok(0)
        });
        if result.is_err() {
            buffers.released.clear();
            buffers.released.extend(buffers.pages.iter().flatten().map(|page| page.frame));
        }
        shared.store.release(&buffers.released);
        buffers.released.clear();
        self.arriving = arriving;
        if result.is_ok() && !buffers.stored_at.is_empty() {
            buffers.table.clear();
            push_places(&mut buffers.table, &buffers.stored_at);
            buffers.head.clear();
            encode_frame(&mut buffers.head, header.reply(Status::Ok), &buffers.table, 0);
            return self.link.send_head(Urgency::Demand, &buffers.head, Held::nothing());
        }
        self.answer(shared, buffers, header, result);
    }

    /// Makes pages zero from where it stopped, the last extents first, and answers when it was all.
    pub(super) fn go_on_discarding(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        mut extents: Vec<Extent>,
    ) {
        let region = RegionId(header.region);
        let result = loop {
            let all = self.membership().and_then(|membership| {
                let mut space = membership.space()?;
                space.is_ordinary(region)?;
                let released = &mut buffers.released;
                Ok(space.discard_some(membership.member, region, &mut extents, CHUNKS_AT_ONCE, released)?)
            });
            shared.store.release(&buffers.released);
            buffers.released.clear();
            match all {
                Ok(true) => break Ok(0),
                Ok(false) if buffers.slice.is_over() => {
                    self.paused = Some(Paused::Discard(header, extents));
                    return;
                }
                Ok(false) => {}
                Err(refused) => break Err(refused),
            }
        };
        buffers.extents = extents;
        self.answer(shared, buffers, header, result);
    }
}
