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

use super::held::Held;
use super::keyed::split;
use super::{Connection, End, Membership, Paused, Refused, ScratchBuffers, Slice, count_alone, no_lease};
use crate::shared::Shared;
use rampool_kernel::memory::prefetch;
use rampool_lease::{FrameIndex, StoredPage, View};
use rampool_net::transport::{Piece as Place, Urgency};
use rampool_wire::checksum;
use rampool_wire::frame::{
    ByKey, Header, Opcode, Piece, RegionId, Status, Window, ZERO_PAGE_CRC, encode_frame, glimpse,
};
use rampool_wire::layout::Program;
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};

/// Bytes of a page that are asked for before they are wanted; what follows comes by itself.
pub(super) const FETCHED_AHEAD: usize = 1024;
/// A piece at least this long leaves from its frame.
pub(super) const FROM_FRAME_BYTES: usize = 1024;
pub(super) const LINE_BYTES: usize = 64;
/// So few runs are not worth the preparations for many.
pub(super) const FEW_RUNS: u64 = 8;
/// Steps between two looks at the clock: of runs that are copied in a row, and of pieces, of which one in a
/// packed page counts for more.
pub(super) const STEPS_AT_ONCE: u64 = 4096;
pub(super) const PIECES_AT_ONCE: u32 = 32;
pub(super) const PACKED_COUNTS_FOR: u32 = 8;
pub(super) static ZEROES: [u8; OS_PAGE_BYTES] = [0; OS_PAGE_BYTES];
/// So many are kept at a time (a MiB), if they do not share a slot.
pub(super) const UNPACKED: usize = 256;
pub(super) const AHEAD: usize = 32;

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

impl Connection {
    pub(super) fn gather(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let parsed =
            split(&header, self.link.table()).and_then(|(place, table)| Ok((place, Window::parse(table)?)));
        match parsed {
            Ok((place, window)) => self.gather_window(shared, buffers, header, place, window),
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        }
        Ok(())
    }

    pub(super) fn gather_window(
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
    pub(super) fn send_plain_piece(
        &mut self,
        shared: &Shared,
        header: Header,
        piece: Piece,
    ) -> Result<bool, Refused> {
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
pub(super) fn lies_plain(shared: &Shared, page: Option<StoredPage>, piece: Piece) -> Option<(Place, u32)> {
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

/// The checksums of what is gathered, block by block.
#[derive(Default)]
pub(super) struct Blocks {
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

/// The bytes of a window, ready to be sent: in frames that are held, and in a buffer.
#[derive(Default)]
pub(crate) struct Gathered {
    pub(crate) frames: Vec<FrameIndex>,
    pub(crate) pieces: Vec<Place>,
    pub(crate) buffer: Vec<u8>,
    /// Of each block, when it is all there.
    pub(crate) crcs: Vec<u32>,
    pub(super) blocks: Blocks,
    /// Bytes of the window.
    pub(super) done: u32,
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
/// none, or a page is packed. As [`rows::copy`](super::rows::copy).
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
    super::rows::copy(shared.store.slabs(), view, window, part, buffer)
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

/// Small pieces to copy, whose memory is on its way into the cache: pieces lie anywhere, and waiting for one
/// after the other takes most of the time.
///
/// Invariant: every piece is readable memory, which is not written until it is copied.
struct Ahead {
    pieces: [(*const u8, usize); AHEAD],
    count: usize,
}

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
        super::rows::copy_one(from, to, len);
        buffer.set_len(end + len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Scratch;
    use crate::{Server, ServerConfig, StoreKind};
    use rampool_wire::frame::{PageEntry, page_crc};

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
