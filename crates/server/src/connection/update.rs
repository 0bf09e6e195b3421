//! `Scatter` and `Accumulate`: bytes that come, and enter pages, all or none. An update that has begun goes
//! on to its end, also without its connection.

use super::edit::Edit;
use super::{Connection, Handled, Membership, Service, Step, Stepped, Work, count_written};
use crate::collect::STEPS_AT_ONCE;
use crate::refused::Refused;
use crate::shared::{Posts, Shared};
use crate::slice::Slice;
use crate::store::Scratch;
use rampool_lease::{FrameIndex, LeaseSpace, StoredPage};
use rampool_net::transport::PieceMut;
use rampool_wire::checksum;
use rampool_wire::elements::{Combine, Kind};
use rampool_wire::frame::{
    Block, FetchOp, Header, MemberId, Opcode, PageEntry, Piece, RegionId, Status, Window, WireError,
    parse_accumulate_arg,
};
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};
use std::time::Instant;

/// So many pieces of an update are entered between two looks at the clock, or as many as are in a row in one
/// page. The pages of an update with more steps are made ready before it.
const READY_AT_ONCE: usize = 64;
/// Whether pages are ready is looked at for so many pieces between two looks at the clock.
const LOOKED_AT_AT_ONCE: u32 = 512;
const PAGES_AT_ONCE: usize = 16;
/// Remembered as the answer to an update that was ended in the middle.
const ENDED_HALFWAY: u64 = 1;

/// A `Scatter` or `Accumulate` whose bytes are on their way: whole pages into frames, the rest into
/// `staging`.
pub(super) struct Part {
    window: Window,
    /// Of a `Scatter`, with a checksum each.
    blocks: Vec<Block>,
    crcs: Vec<u32>,
    staging: Vec<u8>,
    /// Its whole pages, in its order, and sorted.
    whole: Vec<PageIndex>,
    sorted: Vec<PageIndex>,
    update: Option<(Kind, Combine)>,
}

/// A `Scatter` or `Accumulate` whose bytes are all here: its pages are made ready, and then changed.
pub(super) struct Updating {
    header: Header,
    part: Part,
    /// Of its whole pages, as they came.
    frames: Vec<FrameIndex>,
    /// The first of them in their final form.
    whole: Vec<StoredPage>,
    /// Bytes of the window whose pages have been made ready.
    ready: u32,
    /// Something that others see has changed: it goes on to the end, whatever becomes of its connection.
    begun: bool,
    /// Bytes of the window that are entered.
    entered: u32,
    /// Bytes of the staging that are.
    staged: usize,
}

impl Connection {
    /// The table of a `Scatter` or `Accumulate`: says where the bytes go.
    pub(super) fn update(&mut self, service: &mut Service, header: Header) -> Handled {
        let mut part = parse_part(&header, self.link.table())?;
        service.lens.clear();
        service.lens.resize(part.whole.len(), u32::try_from(OS_PAGE_BYTES).expect("4096"));
        let mut frames = Vec::new();
        if let Err(refused) = self.take_frames(service, &mut frames) {
            return self.sink(service, header, refused);
        }
        part.lay_out(&service.shared, &frames, &mut service.places);
        let header = Header { bulk_len: part.window.len, ..header };
        self.await_bytes(service, Updating::new(header, part, frames))
    }

    pub(super) fn fetch_op(&mut self, service: &mut Service, header: Header) -> Handled {
        let op = FetchOp::parse(&header, self.link.table())?;
        let membership = self.membership()?;
        let (mut space, member) = (membership.space()?, membership.member);
        if let Some(answer) = space.answered(member, header.request) {
            drop(space);
            self.answer(header, answer);
            return Ok(());
        }
        let (region, bytes) = (RegionId(header.region), op.kind.bytes());
        space.is_ordinary(region)?;
        space.view(member, region)?.reaches(op.offset + bytes as u64)?;
        let within = usize::try_from(op.offset % OS_PAGE_BYTES as u64).expect("within a page");
        let page = PageIndex(op.offset / OS_PAGE_BYTES as u64);
        let mut edit = Edit::new(&service.shared, self.arena, (member, region), &mut space);
        edit.own(std::iter::once(page), std::iter::empty())?;
        let mut old = [0; 8];
        edit.patch(Piece { page, within, len: bytes }, |bytes| {
            old[..bytes.len()].copy_from_slice(bytes);
            let new = op.apply(u64::from_le_bytes(old)).to_le_bytes();
            bytes.copy_from_slice(&new[..bytes.len()]);
        });
        let (old, released) = (u64::from_le_bytes(old), edit.released);
        space.remember(member, header.request, old);
        drop(space);
        service.shared.store.release(&released);
        self.done(header, old)
    }
}

impl Work for Updating {
    /// Makes pages ready, then enters the bytes.
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let Service { shared, slice, posts, .. } = service;
        let (arena, membership) = (connection.arena, connection.membership()?);
        let all = (self.begun || self.make_ready(shared, arena, membership, slice)?)
            && self.enter(shared, arena, membership, slice, posts)?;
        if !all {
            return Ok(Step::More);
        }
        // Frames that no page table has taken.
        self.release(shared);
        connection.answer(header, 0);
        Ok(Step::Done)
    }

    fn release(&mut self, shared: &Shared) {
        if self.frames.is_empty() {
            return;
        }
        let whole = self.whole.iter().map(|page| page.frame);
        let frames: Vec<_> = whole.chain(self.frames[self.whole.len()..].iter().copied()).collect();
        shared.store.release(&frames);
    }

    /// Others may have seen a part of it: the reaper finishes it.
    fn leave(mut self: Box<Self>, connection: &Connection, shared: &Shared) {
        if let Some(membership) = connection.membership.clone()
            && self.begun
        {
            let arena = connection.arena;
            shared.finish_later(Box::new(move |shared| self.finish(shared, arena, &membership)));
        }
    }
}

impl Updating {
    fn new(header: Header, part: Part, frames: Vec<FrameIndex>) -> Self {
        let (whole, ready, begun, entered, staged) = (Vec::new(), 0, false, 0, 0);
        Self { header, part, frames, whole, ready, begun, entered, staged }
    }

    /// Finishes it. Between two slices others have the lease.
    fn finish(&mut self, shared: &Shared, arena: usize, membership: &Membership) {
        let (mut slice, mut posts, mut goes_on) = (Slice::default(), Vec::new(), true);
        while goes_on {
            let began = Instant::now();
            slice.begin();
            let entered = self.enter(shared, arena, membership, &mut slice, &mut posts);
            // An update that cannot be finished has no client that waits for the answer.
            goes_on = matches!(entered, Ok(false));
            let took = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            membership.lease.tenant.worked(took);
        }
        shared.post(posts);
    }

    /// An error if the bytes must not be changed now: the lease may have been unlocked since this was asked.
    fn is_allowed(&self, space: &LeaseSpace, member: MemberId) -> Result<(), Refused> {
        let region = RegionId(self.header.region);
        let (low, high) = self.part.window.program.bounds();
        let (low, high) = (low.cast_unsigned(), high.cast_unsigned());
        space.view(member, region)?.reaches(high)?;
        Ok(space.may_change(member, region, low, high)?)
    }

    /// Checks the bytes, packs whole pages, and makes the pages of a request that changes many of them ready
    /// to be changed, some at a time: what is refused is mostly refused here, before anything has changed.
    /// False: the slice is over before it is all.
    fn make_ready(
        &mut self,
        shared: &Shared,
        arena: usize,
        membership: &Membership,
        slice: &mut Slice,
    ) -> Result<bool, Refused> {
        let (request, region) = (self.header.request, RegionId(self.header.region));
        if self.ready == 0 && self.whole.is_empty() {
            self.part.check_bytes()?;
        }
        if self.whole.len() < self.part.whole.len() {
            let mut scratch = Scratch::default();
            for crc in self.part.whole_crcs().skip(self.whole.len()) {
                let entry = PageEntry { crc, len: u32::try_from(OS_PAGE_BYTES).expect("4096") };
                let frame = self.frames[self.whole.len()];
                self.whole.push(shared.store.settle(arena, frame, entry, &mut scratch));
                if self.whole.len().is_multiple_of(PAGES_AT_ONCE) && slice.is_over() {
                    return Ok(false);
                }
            }
        }
        if self.part.window.program.steps(self.part.window.from, self.part.window.len.into())
            <= READY_AT_ONCE as u64
        {
            return Ok(true);
        }
        while self.ready < self.part.window.len {
            let mut space = membership.space()?;
            if space.answered(membership.member, request).is_some() {
                return Ok(true);
            }
            self.is_allowed(&space, membership.member)?;
            let Self { part, ready, .. } = self;
            let mut edit = Edit::new(shared, arena, (membership.member, region), &mut space);
            let (mut pages, mut looks, mut last) = (Vec::new(), 0, None);
            for piece in part.window.pieces_of(*ready, part.window.len - *ready) {
                if pages.len() >= PAGES_AT_ONCE || looks >= LOOKED_AT_AT_ONCE {
                    break;
                }
                looks += 1;
                *ready += u32::try_from(piece.len).expect("at most a page");
                if part.is_written_twice(&piece) {
                    return Err(Refused::new(Status::BadRequest, WireError::BadLayout));
                }
                if part.in_place(&piece)
                    && last.replace(piece.page) != Some(piece.page)
                    && !edit.is_ready(piece.page)?
                {
                    pages.push(piece.page);
                }
            }
            let made = edit.own(pages.into_iter(), std::iter::empty());
            let released = edit.released;
            drop(space);
            shared.store.release(&released);
            made?;
            if self.ready < self.part.window.len && slice.is_over() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Enters the bytes from where it stopped: the whole pages and the first [`READY_AT_ONCE`] pieces at
    /// once, the others while there is time. False: the slice is over before it is all. With an error nothing
    /// has changed, or, if it had begun, nothing more does.
    fn enter(
        &mut self,
        shared: &Shared,
        arena: usize,
        membership: &Membership,
        slice: &mut Slice,
        posts: &mut Posts,
    ) -> Result<bool, Refused> {
        let member = membership.member;
        // What has begun needs no membership: none replaces it meanwhile, and to dismiss it does not undo it.
        let mut space = if self.begun { membership.lease.space() } else { membership.space()? };
        if !self.begun
            && let Some(answer) = space.answered(member, self.header.request)
        {
            return if answer == ENDED_HALFWAY { Err(ended_halfway()) } else { Ok(true) };
        }
        let allowed = self.is_allowed(&space, member);
        let mut edit = Edit::new(shared, arena, (member, RegionId(self.header.region)), &mut space);
        let entered = allowed.and_then(|()| self.enter_some(&mut edit, slice));
        let released = edit.released;
        match &entered {
            Ok(false) => space.update_begun(member),
            Ok(true) => {
                space.update_ended(member);
                space.remember(member, self.header.request, 0);
                if self.part.update.is_none() {
                    let low = self.part.window.program.bounds().0.cast_unsigned();
                    let bytes = (RegionId(self.header.region), low, self.part.window.len.into());
                    shared.bytes_came(&mut space, posts, bytes);
                }
            }
            Err(_) if self.begun => {
                space.update_ended(member);
                // If the answer is lost, the repeated request must not do a part of it again.
                space.remember(member, self.header.request, ENDED_HALFWAY);
            }
            Err(_) => {}
        }
        drop(space);
        shared.store.release(&released);
        if matches!(entered, Ok(true)) {
            let came = (self.part.whole.len(), self.header.bulk_len);
            count_written(shared, arena, &membership.lease, came);
        }
        entered
    }

    fn enter_some(&mut self, edit: &mut Edit<'_>, slice: &mut Slice) -> Result<bool, Refused> {
        let Self { part, frames, whole, begun, entered, staged, .. } = self;
        let mut pieces = part.window.pieces_of(*entered, part.window.len - *entered).peekable();
        let mut some: Vec<Piece> = Vec::new();
        loop {
            some.clear();
            // What is in a row in one page is changed at once.
            while let Some(piece) = pieces.next_if(|next| {
                some.len() < READY_AT_ONCE || some.last().is_some_and(|last| last.page == next.page)
            }) {
                *entered += u32::try_from(piece.len).expect("at most a page");
                if part.in_place(&piece) {
                    some.push(piece);
                }
            }
            let whole_pages = part.whole.iter().copied().zip(whole.iter().copied());
            edit.own(some.iter().map(|piece| piece.page), whole_pages)?;
            if !*begun {
                *begun = true;
                // They are the page tables' now.
                frames.clear();
                whole.clear();
            }
            *staged = edit.change((&part.staging, part.update), &some, *staged);
            if *entered == part.window.len {
                return Ok(true);
            }
            if slice.is_over() {
                return Ok(false);
            }
        }
    }
}

pub(super) fn ended_halfway() -> Refused {
    Refused::new(Status::PoolFull, "this update has ended in the middle: a part of it is done")
}

impl Part {
    /// Whether a piece changes its page rather than replacing it.
    fn in_place(&self, piece: &Piece) -> bool {
        self.update.is_some() || !piece.is_whole()
    }

    /// A correct client never writes a page as a whole and in part in one request.
    fn is_written_twice(&self, piece: &Piece) -> bool {
        !self.sorted.is_empty() && self.in_place(piece) && self.sorted.binary_search(&piece.page).is_ok()
    }

    /// Where its bytes are to come.
    fn lay_out(&mut self, shared: &Shared, frames: &[FrameIndex], places: &mut Vec<PieceMut>) {
        places.clear();
        let staging = self.staging.as_mut_ptr();
        let (mut at, mut frames) = (0, frames.iter());
        let all = [Block { len: self.window.len, whole: false }];
        let blocks = if self.update.is_some() { &all[..] } else { &self.blocks[..] };
        for block in blocks {
            let len = block.len as usize;
            let ptr = if block.whole {
                shared.store.memory(*frames.next().expect("a frame for each whole page"))
            } else {
                at += len;
                staging.wrapping_add(at - len)
            };
            match places.last_mut() {
                Some(last) if last.ptr.wrapping_add(last.len) == ptr => last.len += len,
                _ => places.push(PieceMut { ptr, len }),
            }
        }
    }

    /// The checksums of the whole pages.
    fn whole_crcs(&self) -> impl Iterator<Item = u32> {
        self.blocks.iter().zip(&self.crcs).filter(|(block, _)| block.whole).map(|(_, crc)| *crc)
    }

    /// Compares the staged bytes with their checksums. Whole pages keep their checksums for later readers.
    fn check_bytes(&self) -> Result<(), Refused> {
        let damaged = || Refused::new(Status::BadRequest, "the bytes came damaged (checksum differs)");
        if self.update.is_some() {
            return if checksum::crc32c(&self.staging) == self.crcs[0] { Ok(()) } else { Err(damaged()) };
        }
        let mut rest = &self.staging[..];
        for (block, crc) in self.blocks.iter().zip(&self.crcs).filter(|(block, _)| !block.whole) {
            let (bytes, tail) = rest.split_at(block.len as usize);
            rest = tail;
            if checksum::crc32c(bytes) != *crc {
                return Err(damaged());
            }
        }
        Ok(())
    }
}

pub(super) fn parse_part(header: &Header, table: &[u8]) -> Result<Part, WireError> {
    let mut crcs = Vec::new();
    let window = Window::parse_with(table, &mut crcs)?;
    if window.len != header.bulk_len {
        return Err(WireError::BulkLength);
    }
    let (blocks, staging, whole, sorted) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut part = Part { window, blocks, crcs, staging, whole, sorted, update: None };
    let mut staged = part.window.len as usize;
    if header.opcode == Opcode::Accumulate {
        let (kind, how) = parse_accumulate_arg(header.arg)?;
        let bytes = kind.bytes() as u64;
        let whole_elements = part.window.program.is_aligned(bytes)
            && part.window.from.is_multiple_of(bytes)
            && u64::from(part.window.len).is_multiple_of(bytes);
        if !whole_elements || part.crcs.len() != 1 {
            return Err(WireError::WindowRange);
        }
        part.update = Some((kind, how));
    } else {
        // To go through many small pieces takes a while: it is done once.
        part.window.append_blocks(&mut part.blocks);
        if part.blocks.len() != part.crcs.len() {
            return Err(WireError::TableLength);
        }
        let mut at = 0;
        for block in &part.blocks {
            if block.whole {
                let piece = part.window.pieces_of(at, block.len).next().expect("a whole page");
                part.whole.push(piece.page);
                staged -= OS_PAGE_BYTES;
            }
            at += block.len;
        }
        part.sorted.clone_from(&part.whole);
        part.sorted.sort_unstable();
        // Of more pieces this is asked while their pages are made ready.
        let few = part.window.program.steps(part.window.from, part.window.len.into()) <= STEPS_AT_ONCE;
        if few && part.window.pieces().any(|piece| part.is_written_twice(&piece)) {
            return Err(WireError::BadLayout);
        }
    }
    part.staging = vec![0; staged];
    Ok(part)
}
