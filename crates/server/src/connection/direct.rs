//! The direct view: bytes of layouts, gathered and changed where they lie.
//!
//! A request works on a region while its lease is locked, so it happens at once for every other request of
//! the lease; one that takes longer than a slice stops between two pages, and others come between. An update
//! that has begun goes on to its end: if its connection ends, the reaper finishes it, and its member cannot
//! come back before.
//!
//! Small pieces are copied, large ones leave from their frames as pages do. Bytes are changed in place where
//! only the page table refers to the frame; otherwise in a copy that replaces the page, so that bytes being
//! sent do not change.

use super::grouped::Grouping;
use super::{
    Connection, End, Held, Membership, Paused, Refused, ScratchBuffers, Slice, count, count_alone, keyed,
    no_lease, queue, rows,
};
use crate::copy_worker::{Delivered, Order};
use crate::shared::{Lease, Posts, Shared};
use crate::store::Scratch;
use rampool_kernel::memory::prefetch;
use rampool_lease::{
    ConnectionNumber, FrameIndex, LeaseSpace, PageState, RegionSelector, SpaceError, StoredPage, View,
};
use rampool_net::transport::{Piece as Place, PieceMut, Urgency};
use rampool_wire::checksum;
use rampool_wire::elements::{Combine, Kind, Scan, Want, combine};
use rampool_wire::frame::{
    Block, ByKey, CopyRequest, FetchOp, Header, MAX_NAME_BYTES, MemberId, Opcode, PageEntry, Piece, RegionId,
    ScanRequest, Status, Window, WireError, ZERO_PAGE_CRC, encode_frame, encode_reduced, glimpse,
    parse_accumulate_arg, patched_crc,
};
use rampool_wire::layout::Program;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use std::sync::Arc;
use std::time::Instant;

/// A piece at least this long leaves from its frame.
const FROM_FRAME_BYTES: usize = 1024;
/// Bytes of a page that are asked for before they are wanted; what follows comes by itself.
const FETCHED_AHEAD: usize = 1024;
const LINE_BYTES: usize = 64;
/// So few runs are not worth the preparations for many.
const FEW_RUNS: u64 = 8;
/// Steps between two looks at the clock: of runs that are copied in a row, and of pieces, of which one in a
/// packed page counts for more.
const STEPS_AT_ONCE: u64 = 4096;
pub(super) const PIECES_AT_ONCE: u32 = 32;
pub(super) const PACKED_COUNTS_FOR: u32 = 8;
/// So many pieces of an update are entered between two looks at the clock, or as many as are in a row in one
/// page. The pages of an update with more steps are made ready before it.
const READY_AT_ONCE: usize = 64;
/// Whether pages are ready is looked at for so many pieces between two looks at the clock.
const LOOKED_AT_AT_ONCE: u32 = 512;
const PAGES_AT_ONCE: usize = 16;
/// Remembered as the answer to an update that was ended in the middle.
const ENDED_HALFWAY: u64 = 1;
/// Bytes that are scanned between two looks at the clock.
const SCANNED_AT_ONCE: u32 = 64 << 10;
pub(super) static ZEROES: [u8; OS_PAGE_BYTES] = [0; OS_PAGE_BYTES];

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

/// A `Gather` that goes on with the next turn.
pub(super) struct Gathering {
    header: Header,
    place: Option<ByKey>,
    window: Window,
    gathered: Gathered,
}

impl Gathering {
    /// What it holds.
    pub(super) fn frames(&self) -> &[FrameIndex] {
        &self.gathered.frames
    }

    /// Of its reply.
    pub(super) fn bytes(&self) -> usize {
        self.window.len as usize
    }
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

/// An update in the middle of which its connection has ended.
pub(crate) struct LeftUpdate {
    updating: Updating,
    arena: usize,
    lease: Arc<Lease>,
    member: MemberId,
    connection: ConnectionNumber,
}

impl LeftUpdate {
    pub(super) fn new(
        updating: Updating,
        arena: usize,
        (lease, member, connection): (Arc<Lease>, MemberId, ConnectionNumber),
    ) -> Self {
        Self { updating, arena, lease, member, connection }
    }

    /// Finishes it. Between two slices others have the lease.
    pub(crate) fn finish(self, shared: &Shared) {
        let Self { mut updating, arena, lease, member, connection } = self;
        let membership = Membership { lease, member, connection };
        let (mut slice, mut posts, mut goes_on) = (Slice::default(), Vec::new(), true);
        while goes_on {
            let began = Instant::now();
            slice.begin();
            let entered = updating.enter(shared, arena, &membership, &mut slice, &mut posts);
            // If it cannot be finished, nobody waits for the answer.
            goes_on = matches!(entered, Ok(false));
            let took = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            membership.lease.tenant.worked(took);
        }
        shared.post(posts);
    }
}

/// A `Scan` that goes on with the next turn.
pub(super) struct Scanning {
    header: Header,
    request: ScanRequest,
    scan: Scan,
    found: Vec<u8>,
    done: u32,
}

impl Scanning {
    /// Of its reply, so far.
    pub(super) fn bytes(&self) -> usize {
        self.found.len()
    }
}

/// The checksums of what is gathered, block by block.
#[derive(Default)]
struct Blocks {
    crcs: Vec<u32>,
    /// The part of the block between two pages, as far as it is counted.
    crc: u32,
    /// Bytes at the end of the buffer that are not.
    uncounted: usize,
    between: bool,
}

/// Packed pages that one request has unpacked, which it may go to and fro between.
pub(super) struct Unpacked<'a> {
    shared: &'a Shared,
    arena: usize,
    /// By the lowest bits of their numbers. Each has a reference of its own.
    pages: Vec<Option<(PageIndex, FrameIndex)>>,
}

/// So many are kept at a time (a MiB), if they do not share a slot.
const UNPACKED: usize = 256;

impl<'a> Unpacked<'a> {
    pub(super) fn new(shared: &'a Shared, arena: usize) -> Self {
        Self { shared, arena, pages: Vec::new() }
    }

    /// The page's bytes, valid until another page is asked for. `before` is called before the bytes of an
    /// earlier page are overwritten.
    pub(super) fn page(
        &mut self,
        number: PageIndex,
        page: &StoredPage,
        before: impl FnOnce(),
    ) -> Result<*const u8, Refused> {
        let store = &self.shared.store;
        self.pages.resize(UNPACKED, None);
        let place = &mut self.pages[usize::try_from(number.0 % UNPACKED as u64).expect("below UNPACKED")];
        if let Some((kept, frame)) = place
            && *kept == number
        {
            return Ok(store.memory(*frame).cast_const());
        }
        let presented =
            store.present(self.arena, page, false).map_err(|e| Refused::new(Status::BadRequest, e))?;
        let (frame, _) =
            presented.ok_or_else(|| Refused::new(Status::PoolFull, "no room to unpack a page"))?;
        if let Some((_, old)) = place.replace((number, frame)) {
            before();
            store.release(&[old]);
        }
        Ok(store.memory(frame).cast_const())
    }
}

impl Drop for Unpacked<'_> {
    fn drop(&mut self) {
        let frames: Vec<FrameIndex> = self.pages.iter().flatten().map(|(_, frame)| *frame).collect();
        self.shared.store.release(&frames);
    }
}

impl Blocks {
    fn catch_up(&mut self, buffer: &[u8]) {
        if self.uncounted > 0 {
            self.crc = checksum::crc32c_append(self.crc, &buffer[buffer.len() - self.uncounted..]);
            self.uncounted = 0;
        }
    }

    fn end_block(&mut self, buffer: &[u8]) {
        if std::mem::take(&mut self.between) {
            self.catch_up(buffer);
            self.crcs.push(std::mem::take(&mut self.crc));
        }
    }
}

impl Connection {
    pub(super) fn gather(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let parsed = keyed::split(&header, self.link.table())
            .and_then(|(place, table)| Ok((place, Window::parse(table)?)));
        match parsed {
            Ok((place, window)) => self.gather_window(shared, buffers, header, place, window),
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        }
        Ok(())
    }

    fn gather_window(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        place: Option<ByKey>,
        window: Window,
    ) {
        let mut gathered = Gathered {
            frames: std::mem::take(&mut buffers.frames),
            pieces: std::mem::take(&mut buffers.pieces),
            ..Gathered::default()
        };
        // What is copied here does not have to stay until it has been sent.
        let copied = place.is_none() && self.link.copies(window.len as usize);
        gathered.buffer = if copied {
            std::mem::take(&mut buffers.gathered)
        } else {
            buffers.buffer_pool.take(window.len as usize)
        };
        gathered.crcs = std::mem::take(&mut buffers.crcs);
        gathered.frames.clear();
        gathered.pieces.clear();
        gathered.buffer.clear();
        gathered.crcs.clear();
        self.go_on_gathering(shared, buffers, Gathering { header, place, window, gathered }, copied);
    }

    /// Collects a window, from where it stopped, and sends it when it has all.
    pub(super) fn go_on_gathering(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        gathering: Gathering,
        copied: bool,
    ) {
        let Gathering { header, place, window, mut gathered } = gathering;
        let mut urgency = Urgency::Demand;
        let mut locked = None;
        let result = self.membership.as_ref().ok_or_else(no_lease).and_then(|membership| {
            let space = membership.space()?;
            let mut view = space.view(membership.member, RegionId(header.region))?;
            if space.is_ordinary(RegionId(header.region)).is_err() {
                // The body of a message: heads go first.
                urgency = Urgency::Prefetch;
            }
            if !gathered.collect(shared, self.arena, &mut view, &window, copied, &mut buffers.slice)? {
                return Ok(false);
            }
            for counts in [&shared.shards[self.arena].counts, &membership.lease.counts] {
                count_alone(&counts.gets, 1);
                count_alone(&counts.bytes_out, window.len.into());
            }
            locked = copied.then_some(space);
            Ok(true)
        });
        if matches!(result, Ok(false)) {
            // What was to be copied is not held: it begins again.
            let gathered = if copied {
                shared.store.release(&gathered.frames);
                Gathered::default()
            } else {
                gathered
            };
            self.paused = Some(Paused::Gather(Box::new(Gathering { header, place, window, gathered })));
            return;
        }
        let Gathered { frames, pieces, buffer, crcs, .. } = gathered;
        self.collected += buffer.len();
        (buffers.frames, buffers.pieces, buffers.crcs) = (frames, pieces, crcs);
        let held = if copied {
            buffers.gathered = buffer;
            Held::frames(&shared.store, &buffers.frames)
        } else {
            Held::frames_and_bytes(&shared.store, &buffers.frames, buffer).back_to(&buffers.buffer_pool)
        };
        match result {
            Ok(_) => {
                buffers.head.clear();
                let mut table = std::mem::take(&mut buffers.table);
                table.clear();
                let mut reply = header.reply(Status::Ok);
                if header.opcode == Opcode::ReadPiece {
                    reply.arg = buffers.crcs[0].into();
                } else {
                    table.extend(buffers.crcs.iter().flat_map(|crc| crc.to_le_bytes()));
                }
                if let Some(place) = place {
                    drop(locked);
                    self.deliver(shared, buffers, header, place, &table);
                    drop(held);
                    buffers.table = table;
                    return;
                }
                encode_frame(&mut buffers.head, reply, &table, window.len as usize);
                buffers.table = table;
                // SAFETY: `held` keeps a reference to every frame until the reply is sent, and the buffer.
                // Where the link copies this much at once, the page tables keep the frames while the lease is
                // locked. A frame is only written while its page table holds the only reference.
                unsafe { self.link.send(urgency, &buffers.head, &buffers.pieces, held) };
                drop(locked);
            }
            Err(refused) => {
                drop(locked);
                self.refuse(buffers, header, &refused, shared);
            }
        }
    }

    /// A part of one page: where the link copies it, straight from the page into what leaves.
    pub(super) fn read_piece(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let piece = match Piece::parse(&header) {
            Ok(piece) => piece,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        if self.link.copies(piece.len) {
            match self.send_plain_piece(shared, header, piece) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(refused) => {
                    self.refuse(buffers, header, &refused, shared);
                    return Ok(());
                }
            }
        }
        let run = Program::run(piece.offset().cast_signed(), piece.len as u64)
            .expect("a part of a page of a region");
        let window = Window { program: run, from: 0, len: u32::try_from(piece.len).expect("at most a page") };
        self.gather_window(shared, buffers, header, None, window);
        Ok(())
    }

    /// False, with no effect, if the page is packed.
    fn send_plain_piece(&mut self, shared: &Shared, header: Header, piece: Piece) -> Result<bool, Refused> {
        let membership = self.membership.as_ref().ok_or_else(no_lease)?;
        let region = RegionId(header.region);
        let space = membership.space()?;
        let mut view = space.view(membership.member, region)?;
        view.reaches(piece.offset() + piece.len as u64)?;
        let Some((place, crc)) = lies_plain(shared, view.page(piece.page), piece) else { return Ok(false) };
        // The body of a message: heads go first.
        let urgency = if space.is_ordinary(region).is_ok() { Urgency::Demand } else { Urgency::Prefetch };
        for counts in [&shared.shards[self.arena].counts, &membership.lease.counts] {
            count_alone(&counts.gets, 1);
            count_alone(&counts.bytes_out, piece.len as u64);
        }
        let bulk_len = u32::try_from(piece.len).expect("at most a page");
        let head = Header { bulk_len, ..header.reply(Status::Ok).with_arg(crc.into()) }.encode();
        // SAFETY: the link copies this much at once, and the page is the table's, unchanged, while the lease
        // is locked.
        unsafe { self.link.send(urgency, &head, &[place], Held::nothing()) };
        drop(space);
        Ok(true)
    }

    /// The table of a `Scatter` or `Accumulate`: says where the bytes go.
    pub(super) fn begin_part(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let parsed = keyed::split(&header, self.link.table())
            .and_then(|(place, table)| Ok((place, parse_part(&header, table)?)));
        let (place, mut part) = match parsed {
            Ok(parsed) => parsed,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        let header = Header { bulk_len: part.window.len, ..header };
        assert!(self.arriving.frames.is_empty() && self.arriving.part.is_none(), "one put arrives at a time");
        self.arriving.refused = None;
        buffers.lens.clear();
        buffers.lens.resize(part.whole.len(), u32::try_from(OS_PAGE_BYTES).expect("4096"));
        if !shared.store.take(self.arena, &buffers.lens, &mut self.arriving.frames) {
            self.arriving.refused =
                Some((Status::PoolFull, 0, "the server's memory is full of pages on their way".to_owned()));
        }
        buffers.places.clear();
        if self.arriving.refused.is_some() {
            buffers.lay_out_sink(header.bulk_len as usize);
        } else {
            let staging = part.staging.as_mut_ptr();
            let (mut at, mut frames) = (0, self.arriving.frames.iter());
            let all = [Block { len: header.bulk_len, whole: false }];
            let blocks = if part.update.is_some() { &all[..] } else { &part.blocks[..] };
            let place = |block: &Block| {
                let len = block.len as usize;
                let ptr = if block.whole {
                    shared.store.memory(*frames.next().expect("a frame for each whole page"))
                } else {
                    at += len;
                    staging.wrapping_add(at - len)
                };
                PieceMut { ptr, len }
            };
            let mut places: Vec<PieceMut> = Vec::with_capacity(blocks.len());
            for piece in blocks.iter().map(place) {
                match places.last_mut() {
                    Some(last) if last.ptr.wrapping_add(last.len) == piece.ptr => last.len += piece.len,
                    _ => places.push(piece),
                }
            }
            buffers.places = places;
        }
        self.arriving.part = Some(part);
        if let Some(place) = place {
            self.pick_up(buffers, place, header.bulk_len);
            self.finish_part(shared, buffers, header);
            return Ok(());
        }
        // SAFETY: frames just taken and the staging belong to `arriving` until `Bulk`, and are released only
        // with or after the link; the sink belongs to the shard, is never read, and outlives its connections.
        unsafe { self.link.place(&buffers.places) };
        Ok(())
    }

    /// All bytes of a `Scatter` or `Accumulate` are here: enters them, all or none.
    pub(super) fn finish_part(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        let part = self.arriving.part.take().expect("its bytes were arriving");
        let frames = std::mem::take(&mut self.arriving.frames);
        if let Some((status, arg, message)) = self.arriving.refused.take() {
            return self.refuse(buffers, header, &Refused { status, arg, message }, shared);
        }
        self.go_on_updating(shared, buffers, Updating::new(header, part, frames));
    }

    /// Makes pages ready, then enters the bytes, from where it stopped.
    pub(super) fn go_on_updating(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        mut updating: Updating,
    ) {
        let result = self.membership().and_then(|membership| {
            let slice = &mut buffers.slice;
            Ok((updating.begun || updating.make_ready(shared, self.arena, membership, slice)?)
                && updating.enter(shared, self.arena, membership, slice, &mut buffers.posts)?)
        });
        if matches!(result, Ok(false)) {
            self.paused = Some(Paused::Update(Box::new(updating)));
            return;
        }
        // Frames that no page table has taken.
        if !updating.frames.is_empty() {
            shared.store.release(&updating.frames().collect::<Vec<_>>());
        }
        let Updating { header, mut frames, .. } = updating;
        frames.clear();
        self.arriving.frames = frames;
        self.answer(shared, buffers, header, result.map(|_| 0));
    }

    pub(super) fn fetch_op(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let op = match FetchOp::parse(&header, self.link.table()) {
            Ok(op) => op,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        let result = self.membership().and_then(|membership| {
            let mut space = membership.space()?;
            if let Some(answer) = space.answered(membership.member, header.request) {
                return Ok(answer);
            }
            let region = RegionId(header.region);
            let bytes = op.kind.bytes();
            space.is_ordinary(region)?;
            space.view(membership.member, region)?.reaches(op.offset + bytes as u64)?;
            let within = usize::try_from(op.offset % OS_PAGE_BYTES as u64).expect("within a page");
            let page = PageIndex(op.offset / OS_PAGE_BYTES as u64);
            let (arena, member) = (self.arena, membership.member);
            let mut edit = Edit { shared, arena, member, region, space: &mut space };
            let mut frames = Vec::new();
            if let Err(refused) = edit.own_pages(vec![page], &mut frames, &mut buffers.released) {
                shared.store.release(&frames);
                return Err(refused);
            }
            let mut old = [0; 8];
            edit.patch(Piece { page, within, len: bytes }, |bytes| {
                old[..bytes.len()].copy_from_slice(bytes);
                let new = op.apply(u64::from_le_bytes(old)).to_le_bytes();
                bytes.copy_from_slice(&new[..bytes.len()]);
            });
            let old = u64::from_le_bytes(old);
            space.remember(membership.member, header.request, old);
            Ok(old)
        });
        shared.store.release(&buffers.released);
        buffers.released.clear();
        self.answer(shared, buffers, header, result);
        Ok(())
    }

    pub(super) fn scan(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let request = match ScanRequest::parse(&header, self.link.table()) {
            Ok(request) => request,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        if let Some(keys) = &request.keys {
            let grouping = Grouping::new(header, request.clone(), keys);
            self.go_on_grouping(shared, buffers, grouping);
            return Ok(());
        }
        let scan = Scan::new(request.kind, request.test, request.want, request.low, request.high);
        let scanning = Scanning { header, request, scan, found: Vec::new(), done: 0 };
        self.go_on_scanning(shared, buffers, scanning);
        Ok(())
    }

    /// Scans a window from where it stopped, and answers when it was all.
    pub(super) fn go_on_scanning(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        mut scanning: Scanning,
    ) {
        let Scanning { header, request, scan, found, done } = &mut scanning;
        let (header, window) = (*header, &request.window);
        let unit = u32::try_from(request.kind.bytes()).expect("at most 8");
        let result = self.membership().and_then(|membership| {
            let space = membership.space()?;
            let mut view = space.view(membership.member, RegionId(header.region))?;
            view.reaches(window.program.bounds().1.cast_unsigned())?;
            let mut together = Vec::new();
            let mut unpacked = Unpacked::new(shared, self.arena);
            while *done < window.len {
                let len = window.bytes_in(*done, STEPS_AT_ONCE, unit).min(SCANNED_AT_ONCE);
                together.clear();
                // Small runs lie anywhere, and copying them in a row takes far less time than one by one.
                if copy_small_runs(shared, &mut view, window, (*done, len), &mut together) {
                    scan.feed(&together, found);
                    *done += len;
                } else {
                    let mut looks = 0;
                    for piece in window.pieces_of(*done, len) {
                        looks += 1;
                        *done += u32::try_from(piece.len).expect("at most a page");
                        let Some(page) = view.page(piece.page) else {
                            scan.feed(&ZEROES[..piece.len], found);
                            continue;
                        };
                        let memory = if usize::from(page.len) == OS_PAGE_BYTES {
                            shared.store.memory(page.frame).cast_const()
                        } else {
                            looks += PACKED_COUNTS_FOR;
                            unpacked.page(piece.page, &page, || {})?
                        };
                        // SAFETY: the piece is within the page, which is not written while the lease is locked,
                        // or within the unpacked one, which is kept.
                        let bytes =
                            unsafe { std::slice::from_raw_parts(memory.add(piece.within), piece.len) };
                        scan.feed(bytes, found);
                        if looks >= PIECES_AT_ONCE {
                            break;
                        }
                    }
                }
                if *done < window.len && buffers.slice.is_over() {
                    return Ok(false);
                }
            }
            for counts in [&shared.shards[self.arena].counts, &membership.lease.counts] {
                count_alone(&counts.gets, 1);
                count_alone(&counts.bytes_out, found.len() as u64);
            }
            Ok(true)
        });
        match result {
            Ok(false) => self.paused = Some(Paused::Scan(Box::new(scanning))),
            Ok(true) => {
                let Scanning { request, scan, found, .. } = scanning;
                buffers.head.clear();
                let mut table = Vec::with_capacity(24);
                encode_reduced(&scan.reduced(), &mut table);
                let crc = if matches!(request.want, Want::Positions | Want::Values) {
                    checksum::crc32c(&found)
                } else {
                    0
                };
                encode_frame(
                    &mut buffers.head,
                    header.reply(Status::Ok).with_arg(crc.into()),
                    &table,
                    found.len(),
                );
                let piece = [Place { ptr: found.as_ptr(), len: found.len() }];
                // SAFETY: the guard owns the bytes, whose address does not change with the move of the
                // vector.
                unsafe { self.link.send(Urgency::Demand, &buffers.head, &piece, Held::bytes(found)) };
            }
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
    }

    /// Orders a copy to another server; the answer comes when it has arrived there.
    pub(super) fn copy(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let copy = match CopyRequest::parse(self.link.table()) {
            Ok(copy) => copy,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        match self.membership() {
            Ok(Membership { lease, member, connection }) => {
                let (lease, member, connection) = (Arc::clone(lease), *member, *connection);
                shared.order(Order {
                    shard: self.arena,
                    token: self.token,
                    header,
                    lease,
                    member,
                    connection,
                    identity: self.identity,
                    copy,
                });
                self.copies += 1;
            }
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
        Ok(())
    }

    /// A copy has ended.
    pub(crate) fn delivered(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, done: Delivered) {
        self.copies -= 1;
        self.answer(shared, buffers, done.header, done.result);
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

impl Updating {
    fn new(header: Header, part: Part, frames: Vec<FrameIndex>) -> Self {
        let (whole, ready, begun, entered, staged) = (Vec::new(), 0, false, 0, 0);
        Self { header, part, frames, whole, ready, begun, entered, staged }
    }

    /// What it holds.
    pub(super) fn frames(&self) -> impl Iterator<Item = FrameIndex> {
        let whole = self.whole.iter().map(|page| page.frame);
        whole.chain(self.frames[self.whole.len()..].iter().copied())
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun
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
        let (mut released, mut frames) = (Vec::new(), Vec::new());
        while self.ready < self.part.window.len {
            let mut space = membership.space()?;
            if space.answered(membership.member, request).is_some() {
                return Ok(true);
            }
            self.is_allowed(&space, membership.member)?;
            let Self { part, ready, .. } = self;
            let mut edit = Edit { shared, arena, member: membership.member, region, space: &mut space };
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
            let made = edit.own_pages(pages, &mut frames, &mut released);
            drop(space);
            shared.store.release(&frames);
            shared.store.release(&released);
            frames.clear();
            released.clear();
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
        let mut released = Vec::new();
        let entered = self
            .is_allowed(&space, member)
            .and_then(|()| self.enter_some(shared, arena, member, &mut space, &mut released, slice));
        match &entered {
            Ok(false) => space.update_begun(member),
            Ok(true) => {
                space.update_ended(member);
                space.remember(member, self.header.request, 0);
                if self.part.update.is_none() {
                    let low = self.part.window.program.bounds().0.cast_unsigned();
                    let bytes = (RegionId(self.header.region), low, self.part.window.len.into());
                    queue::bytes_came(shared, &mut space, posts, bytes);
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
            for counts in [&shared.shards[arena].counts, &membership.lease.counts] {
                count(&counts.puts, 1);
                count(&counts.put_pages, self.part.whole.len() as u64);
                count(&counts.bytes_in, self.header.bulk_len.into());
            }
        }
        entered
    }

    fn enter_some(
        &mut self,
        shared: &Shared,
        arena: usize,
        member: MemberId,
        space: &mut LeaseSpace,
        released: &mut Vec<FrameIndex>,
        slice: &mut Slice,
    ) -> Result<bool, Refused> {
        let Self { header, part, frames, whole, begun, entered, staged, .. } = self;
        let mut edit = Edit { shared, arena, member, region: RegionId(header.region), space };
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
            edit.own(some.iter().map(|piece| piece.page), part, whole, released)?;
            if !*begun {
                *begun = true;
                // They are the page tables' now.
                frames.clear();
                whole.clear();
            }
            *staged = edit.change(part, &some, *staged);
            if *entered == part.window.len {
                return Ok(true);
            }
            if slice.is_over() {
                return Ok(false);
            }
        }
    }
}

fn ended_halfway() -> Refused {
    Refused::new(Status::PoolFull, "this update has ended in the middle: a part of it is done")
}

/// Changes pages of one region while its lease is locked.
struct Edit<'a> {
    shared: &'a Shared,
    arena: usize,
    member: MemberId,
    region: RegionId,
    space: &'a mut LeaseSpace,
}

impl Edit<'_> {
    /// Makes pages ready to be changed in part, and stores whole pages, as long as there are any: all or
    /// nothing. The `whole` ones stay the caller's with an error.
    fn own(
        &mut self,
        in_part: impl Iterator<Item = PageIndex>,
        part: &Part,
        whole: &[StoredPage],
        released: &mut Vec<FrameIndex>,
    ) -> Result<(), Refused> {
        let (mut pages, mut last) = (Vec::new(), None);
        for page in in_part {
            if last.replace(page) != Some(page) && !self.is_ready(page)? {
                pages.push(page);
            }
        }
        if pages.is_empty() && whole.is_empty() {
            return Ok(());
        }
        let mut list = self.copies(pages, &mut Vec::new())?;
        let made = list.len();
        list.extend(part.whole.iter().copied().zip(whole.iter().copied()));
        let mut frames = Vec::new();
        let entered = self.enter(&list, &mut frames, released);
        if entered.is_err() {
            self.shared.store.release(&frames[..made]);
        }
        entered
    }

    /// Makes pages ready to be changed in part.
    fn own_pages(
        &mut self,
        pages: Vec<PageIndex>,
        frames: &mut Vec<FrameIndex>,
        released: &mut Vec<FrameIndex>,
    ) -> Result<(), Refused> {
        let mut wanting = Vec::new();
        for page in pages {
            if !self.is_ready(page)? {
                wanting.push(page);
            }
        }
        if wanting.is_empty() {
            return Ok(());
        }
        let list = self.copies(wanting, &mut Vec::new())?;
        self.enter(&list, frames, released)
    }

    fn is_ready(&self, page: PageIndex) -> Result<bool, SpaceError> {
        let state = self.space.page_state(self.member, self.region, page)?;
        Ok(matches!(state, PageState::Own(page) if self.shared.store.is_writable(&page)))
    }

    /// A copy of each page, in a frame with no other reference.
    fn copies(
        &self,
        mut pages: Vec<PageIndex>,
        frames: &mut Vec<FrameIndex>,
    ) -> Result<Vec<(PageIndex, StoredPage)>, Refused> {
        pages.sort_unstable();
        pages.dedup();
        let lens = vec![u32::try_from(OS_PAGE_BYTES).expect("4096"); pages.len()];
        let full = || Refused::new(Status::PoolFull, "the server's memory is full of pages on their way");
        if !self.shared.store.take(self.arena, &lens, frames) {
            return Err(full());
        }
        let store = &self.shared.store;
        let mut list = Vec::with_capacity(pages.len());
        for (page, frame) in pages.iter().zip(frames.iter()) {
            let target = store.memory(*frame);
            let fill = |from: *const u8| {
                // SAFETY: a frame that was just taken, of 4096 bytes; the source is another page, which is
                // not written while the lease is locked.
                unsafe { std::ptr::copy_nonoverlapping(from, target, OS_PAGE_BYTES) };
            };
            let state = self
                .space
                .page_state(self.member, self.region, *page)
                .expect("the region was there a moment ago");
            let (PageState::Own(old) | PageState::Shared(old)) = state else {
                fill(ZEROES.as_ptr());
                list.push((*page, store.settle_plain(*frame, ZERO_PAGE_CRC)));
                continue;
            };
            let presented = match store.present(self.arena, &old, false) {
                Ok(Some((source, _))) => source,
                other => {
                    store.release(frames);
                    return Err(other
                        .err()
                        .map_or_else(full, |error| Refused::new(Status::BadRequest, error)));
                }
            };
            fill(store.memory(presented));
            store.release(&[presented]);
            list.push((*page, store.settle_plain(*frame, old.crc)));
        }
        Ok(list)
    }

    /// Enters pages into the tables; with an error none, and then their frames are appended to `frames`.
    fn enter(
        &mut self,
        list: &[(PageIndex, StoredPage)],
        frames: &mut Vec<FrameIndex>,
        released: &mut Vec<FrameIndex>,
    ) -> Result<(), Refused> {
        let extents: Vec<Extent> = list.iter().map(|(page, _)| Extent::page(*page)).collect();
        let pages: Vec<Option<StoredPage>> = list.iter().map(|(_, page)| Some(*page)).collect();
        self.space.put(self.member, self.region, &extents, &pages, released).map_err(|error| {
            frames.extend(list.iter().map(|(_, page)| page.frame));
            error.into()
        })
    }

    /// Carries out the staged operation on these pieces, whose bytes begin at `at` of the staging. Returns
    /// where they end.
    ///
    /// Pieces in a row that are of one page are one change of it: to look for a page and to follow its
    /// checksum takes far longer than to change a few bytes.
    fn change(&mut self, part: &Part, pieces: &[Piece], mut at: usize) -> usize {
        for together in pieces.chunk_by(|one, next| one.page == next.page) {
            let first = &together[0];
            let mut span = first.within..first.within + first.len;
            for next in &together[1..] {
                span = span.start.min(next.within)..span.end.max(next.within + next.len);
            }
            let all = Piece { page: first.page, within: span.start, len: span.len() };
            self.patch(all, |target| {
                for piece in together {
                    let bytes = &part.staging[at..at + piece.len];
                    at += piece.len;
                    let target = &mut target[piece.within - span.start..][..piece.len];
                    match part.update {
                        None => target.copy_from_slice(bytes),
                        Some((kind, how)) => combine(kind, how, target, bytes),
                    }
                }
            });
        }
        at
    }

    /// Changes a part of a page that is ready for it.
    fn patch(&mut self, piece: Piece, change: impl FnOnce(&mut [u8])) {
        let state = self
            .space
            .page_state(self.member, self.region, piece.page)
            .expect("the region was there a moment ago");
        let PageState::Own(page) = state else { panic!("a page that is to be changed is its region's own") };
        assert!(self.shared.store.is_writable(&page), "a page that is changed has one reference");
        self.shared.store.touch(page.frame);
        // Most pieces are small, and to clear a page for each takes longer than to change them.
        if piece.len <= LINE_BYTES {
            self.patch_in(piece, page, (&mut [0; LINE_BYTES], &mut [0; LINE_BYTES]), change);
        } else {
            self.patch_in(piece, page, (&mut [0; OS_PAGE_BYTES], &mut [0; OS_PAGE_BYTES]), change);
        }
    }

    fn patch_in(
        &mut self,
        piece: Piece,
        page: StoredPage,
        (old, new): (&mut [u8], &mut [u8]),
        change: impl FnOnce(&mut [u8]),
    ) {
        let (old, new) = (&mut old[..piece.len], &mut new[..piece.len]);
        // SAFETY: the piece is within the page; only its page table refers to the frame, and that is locked:
        // no other thread reads or writes it.
        let target = unsafe {
            std::slice::from_raw_parts_mut(self.shared.store.memory(page.frame).add(piece.within), piece.len)
        };
        old.copy_from_slice(target);
        new.copy_from_slice(target);
        change(new);
        target.copy_from_slice(new);
        let crc = patched_crc(page.crc, old, new, OS_PAGE_BYTES - piece.within - piece.len);
        self.space
            .page_changed(self.member, self.region, piece.page, crc)
            .expect("the region was there a moment ago");
    }
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

fn parse_part(header: &Header, table: &[u8]) -> Result<Part, WireError> {
    let mut crcs = Vec::new();
    let window = Window::parse_with(table, &mut crcs)?;
    let on_the_wire = if header.is_by_key() { 0 } else { window.len };
    if on_the_wire != header.bulk_len {
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

/// The bytes of a window, ready to be sent: in frames that are held, and in a buffer.
#[derive(Default)]
pub(crate) struct Gathered {
    pub(crate) frames: Vec<FrameIndex>,
    pub(crate) pieces: Vec<Place>,
    pub(crate) buffer: Vec<u8>,
    /// Of each block, when it is all there.
    pub(crate) crcs: Vec<u32>,
    blocks: Blocks,
    /// Bytes of the window.
    done: u32,
}

impl Gathered {
    /// Collects a window while the lease is locked. False: the slice is over before it is complete; call it
    /// again, and what is there stays. With an error, the frames so far are held. `copied`: it is copied before
    /// the lock goes, and plain pages are not held.
    pub(crate) fn collect(
        &mut self,
        shared: &Shared,
        arena: usize,
        view: &mut View<'_>,
        window: &Window,
        copied: bool,
        slice: &mut Slice,
    ) -> Result<bool, Refused> {
        view.reaches(window.program.bounds().1.cast_unsigned())?;
        if copied
            && let Some(piece) = window.only_piece()
            && self.point_at(shared, view.page(piece.page), piece)
        {
            return Ok(true);
        }
        if self.done == 0 {
            // It never grows after this: pieces point into it.
            self.buffer.reserve_exact(window.len as usize);
            self.blocks.crcs = std::mem::take(&mut self.crcs);
        }
        while self.done < window.len {
            let len = window.bytes_in(self.done, STEPS_AT_ONCE, 1);
            let start = self.buffer.len();
            if !copy_small_runs(shared, view, window, (self.done, len), &mut self.buffer) {
                break;
            }
            note_copied(&self.buffer, start, &mut self.pieces, &mut self.blocks);
            self.done += len;
            if self.done < window.len && slice.is_over() {
                return Ok(false);
            }
        }
        let mut looks = 0;
        let blocks = &mut self.blocks;
        let mut ahead = Ahead::default();
        let mut unpacked = Unpacked::new(shared, arena);
        // Most pieces lie in the page of the one before.
        let mut near: Option<(PageIndex, *const u8)> = None;
        for piece in window.pieces_of(self.done, window.len - self.done) {
            looks += 1;
            if looks >= PIECES_AT_ONCE {
                looks = 0;
                if slice.is_over() {
                    ahead.copy(&mut self.buffer, &mut self.pieces, blocks);
                    return Ok(false);
                }
            }
            self.done += u32::try_from(piece.len).expect("at most a page");
            let from_frame = piece.len >= FROM_FRAME_BYTES;
            if !from_frame
                && let Some((page, memory)) = near
                && page == piece.page
            {
                if ahead.is_full() {
                    ahead.copy(&mut self.buffer, &mut self.pieces, blocks);
                }
                ahead.push(memory.wrapping_add(piece.within), piece.len);
                continue;
            }
            let page = view.page(piece.page);
            let (frame, memory) = match page {
                None => (None, ZEROES.as_ptr()),
                // It does not change under the lock.
                Some(page) if (copied || !from_frame) && usize::from(page.len) == OS_PAGE_BYTES => {
                    (None, shared.store.memory(page.frame).cast_const())
                }
                Some(page) if !from_frame => {
                    looks += PACKED_COUNTS_FOR;
                    let before = || ahead.copy(&mut self.buffer, &mut self.pieces, blocks);
                    (None, unpacked.page(piece.page, &page, before)?)
                }
                Some(page) => {
                    if usize::from(page.len) < OS_PAGE_BYTES {
                        looks += PACKED_COUNTS_FOR;
                    }
                    let presented = shared
                        .store
                        .present(arena, &page, false)
                        .map_err(|e| Refused::new(Status::BadRequest, e))?;
                    let (frame, _) = presented
                        .ok_or_else(|| Refused::new(Status::PoolFull, "no room to unpack a page"))?;
                    (Some(frame), shared.store.memory(frame).cast_const())
                }
            };
            let from = memory.wrapping_add(piece.within);
            if !from_frame {
                if ahead.is_full() {
                    ahead.copy(&mut self.buffer, &mut self.pieces, blocks);
                }
                ahead.push(from, piece.len);
                near = Some((piece.page, memory));
                continue;
            }
            ahead.copy(&mut self.buffer, &mut self.pieces, blocks);
            self.frames.extend(frame);
            if piece.is_whole() {
                blocks.end_block(&self.buffer);
                blocks.crcs.push(page.map_or(ZERO_PAGE_CRC, |page| page.crc));
            } else {
                blocks.catch_up(&self.buffer);
                blocks.between = true;
                // SAFETY: the piece is within its page; the frame is held, and is not written while it is.
                blocks.crc = checksum::crc32c_append(blocks.crc, unsafe {
                    std::slice::from_raw_parts(from, piece.len)
                });
            }
            match self.pieces.last_mut() {
                Some(last) if last.ptr.wrapping_add(last.len) == from => last.len += piece.len,
                _ => self.pieces.push(Place { ptr: from, len: piece.len }),
            }
        }
        ahead.copy(&mut self.buffer, &mut self.pieces, blocks);
        blocks.end_block(&self.buffer);
        self.crcs = std::mem::take(&mut blocks.crcs);
        Ok(true)
    }

    /// The usual small window, a part of one page, is sent from where it lies. False, with no effect, if the
    /// page is packed.
    fn point_at(&mut self, shared: &Shared, page: Option<StoredPage>, piece: Piece) -> bool {
        let Some((place, crc)) = lies_plain(shared, page, piece) else { return false };
        self.pieces.push(place);
        self.crcs.push(crc);
        true
    }
}

/// Copies a part of a window of many small runs behind the bytes in `buffer`. False, with no effect, where it is
/// none, or a page is packed. As [`rows::copy`].
pub(super) fn copy_small_runs(
    shared: &Shared,
    view: &mut View<'_>,
    window: &Window,
    part: (u32, u32),
    buffer: &mut Vec<u8>,
) -> bool {
    let short = |longest| longest < FROM_FRAME_BYTES as u64;
    if window.program.run_count() <= FEW_RUNS || !window.program.longest_run().is_some_and(short) {
        return false;
    }
    buffer.reserve_exact(part.1 as usize);
    rows::copy(shared.store.slabs(), view, window, part, buffer)
}

/// The bytes of the buffer from `start` on were copied behind what is collected.
fn note_copied(buffer: &[u8], start: usize, places: &mut Vec<Place>, blocks: &mut Blocks) {
    let (at, bytes) = (buffer.as_ptr().wrapping_add(start), buffer.len() - start);
    match places.last_mut() {
        Some(last) if last.ptr.wrapping_add(last.len) == at => last.len += bytes,
        _ => places.push(Place { ptr: at, len: bytes }),
    }
    blocks.uncounted += bytes;
    blocks.between = true;
}

/// Prefetches memory for a frame that begins like this: if it asks for bytes of a page, they are brought into
/// the cache while the frame is checked and its reply begun. A hostile frame can only bring lines of pages
/// into the cache that its peer may read. Does not block.
pub(super) fn look_ahead(shared: &Shared, membership: Option<&Membership>, frame: &[u8]) {
    let Some((region, piece)) = glimpse(frame) else { return };
    let Some((membership, space)) =
        membership.and_then(|membership| Some((membership, membership.lease.idle_space()?)))
    else {
        return;
    };
    if let Ok(mut view) = space.view(membership.member, region)
        && let Some(page) = view.page(piece.page)
        && usize::from(page.len) == OS_PAGE_BYTES
    {
        let from = shared.store.memory(page.frame).wrapping_add(piece.within).cast_const();
        (0..piece.len.min(FETCHED_AHEAD)).step_by(LINE_BYTES).for_each(|at| prefetch(from.wrapping_add(at)));
    }
}

/// Where a part of a page lies, and its checksum. None if the page is packed. The lease is locked.
fn lies_plain(shared: &Shared, page: Option<StoredPage>, piece: Piece) -> Option<(Place, u32)> {
    let (memory, page_crc) = match page {
        None => (ZEROES.as_ptr(), ZERO_PAGE_CRC),
        Some(page) if usize::from(page.len) == OS_PAGE_BYTES => {
            (shared.store.memory(page.frame).cast_const(), page.crc)
        }
        Some(_) => return None,
    };
    let ptr = memory.wrapping_add(piece.within);
    let crc = if piece.is_whole() {
        page_crc
    } else {
        // SAFETY: the piece is within its page, which is not written while the lease is locked.
        checksum::crc32c(unsafe { std::slice::from_raw_parts(ptr, piece.len) })
    };
    Some((Place { ptr, len: piece.len }, crc))
}

/// Small pieces to copy, whose memory is on its way into the cache: pieces lie anywhere, and waiting for one
/// after the other takes most of the time.
///
/// Invariant: every piece is readable memory, which is not written until it is copied.
struct Ahead {
    pieces: [(*const u8, usize); AHEAD],
    count: usize,
}

const AHEAD: usize = 32;

impl Default for Ahead {
    fn default() -> Self {
        Self { pieces: [(std::ptr::null(), 0); AHEAD], count: 0 }
    }
}

impl Ahead {
    fn is_full(&self) -> bool {
        self.count == AHEAD
    }

    fn push(&mut self, from: *const u8, len: usize) {
        prefetch(from);
        self.pieces[self.count] = (from, len);
        self.count += 1;
    }

    /// Copies them behind what is in the buffer, which has room for the whole window they are a part of.
    fn copy(&mut self, buffer: &mut Vec<u8>, places: &mut Vec<Place>, blocks: &mut Blocks) {
        if self.count == 0 {
            return;
        }
        let start = buffer.len();
        for (from, len) in &self.pieces[..self.count] {
            // SAFETY: the invariant; there is room.
            unsafe { append(buffer, *from, *len) };
        }
        self.count = 0;
        note_copied(buffer, start, places, blocks);
    }
}

/// Appends bytes without a call for the usual lengths.
///
/// # Safety
/// `from` is readable for `len` bytes that are not written meanwhile, outside of `buffer`, which has room for
/// as many more.
unsafe fn append(buffer: &mut Vec<u8>, from: *const u8, len: usize) {
    let end = buffer.len();
    debug_assert!(buffer.capacity() - end >= len);
    // SAFETY: the caller's promise.
    unsafe {
        let to = buffer.as_mut_ptr().add(end);
        rows::copy_one(from, to, len);
        buffer.set_len(end + len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Scratch;
    use crate::{Server, ServerConfig, StoreKind};
    use rampool_wire::frame::page_crc;

    /// A request that goes to and fro between packed pages unpacks each of them once, as long as they do not
    /// share a place.
    #[test]
    fn a_packed_page_is_unpacked_once_for_a_request() {
        let mut config = ServerConfig::new(8 << 20, "127.0.0.1:0".parse().unwrap());
        (config.store, config.lock_memory) = (StoreKind::Compressed, false);
        let server = Server::start(config).unwrap();
        let shared = &server.shared;
        let packed = |byte: u8| {
            let page = [byte; OS_PAGE_BYTES];
            let mut frames = Vec::new();
            assert!(shared.store.take(0, &[4096], &mut frames));
            // SAFETY: a frame that was just taken, of 4096 bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(page.as_ptr(), shared.store.memory(frames[0]), OS_PAGE_BYTES)
            };
            let entry = PageEntry { crc: page_crc(&page), len: 4096 };
            let stored = shared.store.settle(0, frames[0], entry, &mut Scratch::default());
            assert!(usize::from(stored.len) < OS_PAGE_BYTES);
            stored
        };
        let pages: Vec<StoredPage> = (0..4).map(packed).collect();
        let before = shared.store.usage().frames;
        let mut unpacked = Unpacked::new(shared, 0);
        let mut first = Vec::new();
        for (number, page) in (0..).zip(&pages) {
            let memory = unpacked.page(PageIndex(number), page, || panic!("nothing gives way")).ok().unwrap();
            // SAFETY: it is valid until another page is asked for.
            assert_eq!(u64::from(unsafe { memory.read() }), number);
            first.push(memory);
        }
        for round in 0..100_u64 {
            let number = round * 3 % 4;
            let memory = unpacked
                .page(PageIndex(number), &pages[usize::try_from(number).unwrap()], || {})
                .ok()
                .unwrap();
            assert_eq!(memory, first[usize::try_from(number).unwrap()], "it is the same copy");
        }
        assert_eq!(shared.store.usage().frames, before + 4);
        // One with the same place gives way, and what is copied from it is copied before.
        let mut gave_way = false;
        let number = PageIndex(UNPACKED as u64);
        assert!(unpacked.page(number, &pages[1], || gave_way = true).is_ok() && gave_way);
        drop(unpacked);
        shared.store.release(&pages.iter().map(|page| page.frame).collect::<Vec<_>>());
    }
}
