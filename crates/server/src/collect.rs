//! Bytes of a window, collected while the lease is locked, with a checksum for each block: for answers, and
//! for copies to other servers.
//!
//! Small pieces are copied, large ones leave from their frames as pages do. Small runs lie anywhere: a page,
//! and a line of the cache, for each, and the memory takes longer to bring a line than everything else takes
//! together. So addresses come first, many at a time, each line being asked for as its address is known, and
//! the copies follow one batch later.

use crate::refused::Refused;
use crate::shared::Shared;
use crate::slice::Slice;
use crate::store::Slabs;
use rampool_kernel::memory::prefetch;
use rampool_lease::{FrameIndex, StoredPage, View};
use rampool_net::transport::Piece as Place;
use rampool_wire::checksum;
use rampool_wire::frame::{Piece, Window, ZERO_PAGE_CRC};
use rampool_wire::layout::Row;
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};

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
const PAGE_BYTES: u64 = OS_PAGE_BYTES as u64;
/// Runs of a batch: what the lines of two of them take is well within a cache of the first level, and more
/// than the memory works at at a time.
const BATCH: usize = 128;
/// Lines of a cache of the first level that have the same place within their pages: with the usual eight
/// ways, no more of them can be on their way at a time without driving each other out.
const WAYS: usize = 8;
/// The lines that are asked for of a run longer than one: what comes behind them the processor asks for by
/// itself.
const MOST_LINES: usize = 4;

/// The bytes of a window, ready to be sent: in frames that are held, and in a buffer.
#[derive(Default)]
pub(crate) struct Gathered {
    /// Everything is copied before the lock goes: plain pages are not held.
    pub(crate) copied: bool,
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
    /// again, and what is there stays. With an error, the frames so far are held.
    pub(crate) fn collect(
        &mut self,
        shared: &Shared,
        arena: usize,
        view: &mut View<'_>,
        window: &Window,
        slice: &mut Slice,
    ) -> Result<bool, Refused> {
        view.reaches(window.program.bounds().1.cast_unsigned())?;
        if self.copied
            && let Some(piece) = window.only_piece()
            && let Some((place, crc)) = lies_plain(shared, view.page(piece.page), piece)
        {
            // The usual small window, a part of one page, is sent from where it lies.
            self.pieces.push(place);
            self.crcs.push(crc);
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
            self.note_copied(start);
            self.done += len;
            if self.done < window.len && slice.is_over() {
                return Ok(false);
            }
        }
        let mut ahead = Ahead::default();
        let all = self.collect_pieces(Unpacked::new(shared, arena), view, window, &mut ahead, slice)?;
        self.copy(&mut ahead);
        if all {
            self.blocks.end_block(&self.buffer);
            self.crcs = std::mem::take(&mut self.blocks.crcs);
        }
        Ok(all)
    }

    /// Goes on piece by piece; those that are ahead are copied after it.
    fn collect_pieces(
        &mut self,
        mut unpacked: Unpacked<'_>,
        view: &mut View<'_>,
        window: &Window,
        ahead: &mut Ahead,
        slice: &mut Slice,
    ) -> Result<bool, Refused> {
        let shared = unpacked.shared;
        let mut looks = 0;
        // Most pieces lie in the page of the one before.
        let mut near: Option<(PageIndex, *const u8)> = None;
        for piece in window.pieces_of(self.done, window.len - self.done) {
            looks += 1;
            if looks >= PIECES_AT_ONCE {
                looks = 0;
                if slice.is_over() {
                    return Ok(false);
                }
            }
            self.done += u32::try_from(piece.len).expect("at most a page");
            if piece.len >= FROM_FRAME_BYTES {
                let page = view.page(piece.page);
                if page.is_some_and(|page| usize::from(page.len) < OS_PAGE_BYTES) {
                    looks += PACKED_COUNTS_FOR;
                }
                self.copy(ahead);
                self.point_at(shared, unpacked.arena, piece, page)?;
                continue;
            }
            let memory = match near {
                Some((page, memory)) if page == piece.page => memory,
                _ => match view.page(piece.page) {
                    None => ZEROES.as_ptr(),
                    // It does not change under the lock.
                    Some(page) if usize::from(page.len) == OS_PAGE_BYTES => {
                        shared.store.memory(page.frame).cast_const()
                    }
                    Some(page) => {
                        looks += PACKED_COUNTS_FOR;
                        unpacked.page(piece.page, &page, || self.copy(ahead))?
                    }
                },
            };
            near = Some((piece.page, memory));
            if ahead.is_full() {
                self.copy(ahead);
            }
            ahead.push(memory.wrapping_add(piece.within), piece.len);
        }
        Ok(true)
    }

    /// A long piece leaves from its frame.
    fn point_at(
        &mut self,
        shared: &Shared,
        arena: usize,
        piece: Piece,
        page: Option<StoredPage>,
    ) -> Result<(), Refused> {
        let memory = match &page {
            None => ZEROES.as_ptr(),
            // It does not change under the lock.
            Some(page) if self.copied && usize::from(page.len) == OS_PAGE_BYTES => {
                shared.store.memory(page.frame).cast_const()
            }
            Some(page) => {
                let (frame, _) = shared.present(arena, page, false)?;
                self.frames.push(frame);
                shared.store.memory(frame).cast_const()
            }
        };
        let from = memory.wrapping_add(piece.within);
        let blocks = &mut self.blocks;
        if piece.is_whole() {
            blocks.end_block(&self.buffer);
            blocks.crcs.push(page.map_or(ZERO_PAGE_CRC, |page| page.crc));
        } else {
            blocks.catch_up(&self.buffer);
            blocks.between = true;
            // SAFETY: the piece is within its page; the frame is held, and is not written while it is.
            let bytes = unsafe { std::slice::from_raw_parts(from, piece.len) };
            blocks.crc = checksum::crc32c_append(blocks.crc, bytes);
        }
        self.go_on_from(from, piece.len);
        Ok(())
    }

    /// Copies what is ahead behind what is in the buffer, which has room for the whole window.
    fn copy(&mut self, ahead: &mut Ahead) {
        if ahead.count == 0 {
            return;
        }
        let start = self.buffer.len();
        for (from, len) in &ahead.pieces[..ahead.count] {
            // SAFETY: the invariant of what is ahead; there is room.
            unsafe { append(&mut self.buffer, *from, *len) };
        }
        ahead.count = 0;
        self.note_copied(start);
    }

    /// The bytes of the buffer from `start` on were copied behind what is collected.
    fn note_copied(&mut self, start: usize) {
        let bytes = self.buffer.len() - start;
        self.go_on_from(self.buffer.as_ptr().wrapping_add(start), bytes);
        self.blocks.uncounted += bytes;
        self.blocks.between = true;
    }

    /// These bytes are behind what is collected.
    fn go_on_from(&mut self, from: *const u8, len: usize) {
        match self.pieces.last_mut() {
            Some(last) if last.ptr.wrapping_add(last.len) == from => last.len += len,
            _ => self.pieces.push(Place { ptr: from, len }),
        }
    }

    /// For another window, with memory that has been used before.
    pub(crate) fn clear(&mut self) {
        self.frames.clear();
        self.pieces.clear();
        self.buffer.clear();
        self.crcs.clear();
        self.done = 0;
    }
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
    pub(super) shared: &'a Shared,
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
        let (frame, _) = self.shared.present(self.arena, page, false)?;
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

/// Copies a part of a window of many small runs behind the bytes in `buffer`. False, with no effect, where it
/// is none, or a page is packed. As [`copy_rows`].
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
    copy_rows(shared.store.slabs(), view, window, part, buffer)
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
        copy_one(from, to, len);
        buffer.set_len(end + len);
    }
}

/// Copies `len` bytes of a window, those behind the first `done`, behind those in `buffer`, which has room
/// for them. False, with no effect, where a page is not plain. Call it while the lease of the view is locked,
/// and with a window within the region.
fn copy_rows(
    slabs: &Slabs,
    view: &mut View<'_>,
    window: &Window,
    (done, len): (u32, u32),
    buffer: &mut Vec<u8>,
) -> bool {
    let len = len as usize;
    assert!(buffer.capacity() - buffer.len() >= len, "there is room for the window");
    let to = buffer.spare_capacity_mut().as_mut_ptr().cast();
    let mut copier = Copier { slabs, view, to, batches: [Batch::new(), Batch::new()], filling: 0 };
    for row in window.program.rows(window.from + u64::from(done), len as u64) {
        let done = match row {
            Row::Even { first, stride, count, len } => {
                copier.even(first.cast_unsigned(), stride, count, in_memory(len))
            }
            Row::Listed { base, offsets, len } => copier.listed(base, offsets, in_memory(len)),
        };
        if done.is_none() {
            return false;
        }
    }
    copier.turn();
    copier.turn();
    // SAFETY: all bytes of the window, which the rows make up, are written, and there is room for them.
    unsafe { buffer.set_len(buffer.len() + len) };
    true
}

/// Runs whose memory is on its way.
///
/// Invariant: the first `count` are readable memory, which is not written while the lease is locked; `alike`
/// says that they are all as long as the first.
struct Batch {
    from: [*const u8; BATCH],
    len: [usize; BATCH],
    count: usize,
    alike: bool,
}

impl Batch {
    fn new() -> Self {
        Self { from: [std::ptr::null(); BATCH], len: [0; BATCH], count: 0, alike: true }
    }

    /// `more` runs of this length have been written behind the first `count`.
    fn took(&mut self, more: usize, len: usize) {
        if more > 0 {
            self.len[self.count..self.count + more].fill(len);
            self.count += more;
            self.alike &= self.len[0] == len;
        }
    }
}

/// Two batches in turns: while one is filled, the memory of the other comes.
///
/// Invariant: behind `to` there is room for everything in the batches, and for the rest of the window.
struct Copier<'a, 'b> {
    slabs: &'a Slabs,
    view: &'a mut View<'b>,
    to: *mut u8,
    batches: [Batch; 2],
    filling: usize,
}

/// Where a page lies. None: it is not plain.
#[inline]
fn memory_of(slabs: &Slabs, view: &mut View<'_>, page: PageIndex) -> Option<*const u8> {
    match view.page(page) {
        None => Some(ZEROES.as_ptr()),
        Some(page) if usize::from(page.len) == OS_PAGE_BYTES => Some(slabs.memory(page.frame).cast_const()),
        Some(_) => None,
    }
}

impl Copier<'_, '_> {
    fn listed(&mut self, base: i64, offsets: &[i64], len: usize) -> Option<()> {
        self.anywhere(offsets.len(), len, BATCH, |n| (base + offsets[n]).cast_unsigned())
    }

    fn even(&mut self, mut at: u64, stride: i64, mut count: u64, len: usize) -> Option<()> {
        let step = in_memory(stride.unsigned_abs());
        let most = if count == 1 { BATCH } else { most_ahead(step) };
        if step >= OS_PAGE_BYTES || count == 1 {
            return self.anywhere(in_memory(count), len, most, |n| {
                at.wrapping_add_signed(stride.wrapping_mul((n as u64).cast_signed()))
            });
        }
        while count > 0 {
            let within = in_memory(at % PAGE_BYTES);
            let Some(behind) = (OS_PAGE_BYTES - within).checked_sub(len) else {
                self.across(at, len)?;
                at = at.wrapping_add_signed(stride);
                count -= 1;
                continue;
            };
            // As many as lie in this page.
            let room = if stride < 0 { within } else { behind };
            let fit = room.checked_div(step).map_or(count, |more| count.min(more as u64 + 1));
            let memory = memory_of(self.slabs, self.view, PageIndex(at / PAGE_BYTES))?.wrapping_add(within);
            let signed = isize::try_from(stride).expect("less than a page");
            self.in_page(memory, signed, in_memory(fit), (len, most));
            at = at.wrapping_add_signed(stride.wrapping_mul(fit.cast_signed()));
            count -= fit;
        }
        Some(())
    }

    /// Runs of which each may lie in another page, at most so many in a batch.
    #[inline]
    fn anywhere(&mut self, count: usize, len: usize, most: usize, at: impl Fn(usize) -> u64) -> Option<()> {
        let mut done = 0;
        while done < count {
            let batch = self.room(most);
            // Only addresses in here: a list of a million elements goes through this loop.
            let (slabs, view, filled) = (self.slabs, &mut *self.view, self.batches[batch].count);
            let mut more = 0;
            for (place, n) in self.batches[batch].from[filled..most].iter_mut().zip(done..count) {
                let at = at(n);
                let within = in_memory(at % PAGE_BYTES);
                if within + len > OS_PAGE_BYTES {
                    break;
                }
                let from = memory_of(slabs, view, PageIndex(at / PAGE_BYTES))?.wrapping_add(within);
                prefetch_run(from, len);
                *place = from;
                more += 1;
            }
            self.batches[batch].took(more, len);
            done += more;
            if more == 0 {
                self.across(at(done), len)?;
                done += 1;
            }
        }
        Some(())
    }

    /// A run that goes on where its page ends.
    #[cold]
    fn across(&mut self, at: u64, len: usize) -> Option<()> {
        let within = in_memory(at % PAGE_BYTES);
        let here = len.min(OS_PAGE_BYTES - within);
        let memory = memory_of(self.slabs, self.view, PageIndex(at / PAGE_BYTES))?;
        self.in_page(memory.wrapping_add(within), 0, 1, (here, BATCH));
        if here < len { self.across(at + here as u64, len - here) } else { Some(()) }
    }

    /// Runs of this length that lie in one page, at most so many in a batch.
    fn in_page(&mut self, mut from: *const u8, stride: isize, mut count: usize, (len, most): (usize, usize)) {
        while count > 0 {
            let batch = self.room(most);
            let batch = &mut self.batches[batch];
            let more = count.min(most - batch.count);
            for place in &mut batch.from[batch.count..batch.count + more] {
                prefetch_run(from, len);
                *place = from;
                from = from.wrapping_offset(stride);
            }
            batch.took(more, len);
            count -= more;
        }
    }

    /// The batch that is being filled; there are fewer in it than `most`, which is 1 at least.
    #[inline]
    fn room(&mut self, most: usize) -> usize {
        if self.batches[self.filling].count >= most {
            self.turn();
        }
        self.filling
    }

    /// Copies the batch that has waited, which is the one to fill from now on; the other one waits.
    fn turn(&mut self) {
        self.filling ^= 1;
        let batch = &mut self.batches[self.filling];
        // SAFETY: the invariants of both.
        self.to = unsafe { copy_batch(batch, self.to) };
        (batch.count, batch.alike) = (0, true);
    }
}

/// Copies the runs of a batch one behind the other; tells where the last one ends.
///
/// # Safety
/// There is room for all of them from `to` on.
unsafe fn copy_batch(batch: &Batch, mut to: *mut u8) -> *mut u8 {
    let from = &batch.from[..batch.count];
    // SAFETY: the batch's invariant, and the caller's promise.
    unsafe {
        match (batch.alike, batch.len[0]) {
            (true, 1) => copy_alike::<1>(from, to),
            (true, 2) => copy_alike::<2>(from, to),
            (true, 4) => copy_alike::<4>(from, to),
            (true, 8) => copy_alike::<8>(from, to),
            (true, 16) => copy_alike::<16>(from, to),
            (true, 32) => copy_alike::<32>(from, to),
            (true, 64) => copy_alike::<64>(from, to),
            _ => {
                for (from, len) in from.iter().zip(&batch.len) {
                    copy_one(*from, to, *len);
                    to = to.add(*len);
                }
                to
            }
        }
    }
}

/// # Safety
/// As `copy_batch`, of runs of `N` bytes.
unsafe fn copy_alike<const N: usize>(from: &[*const u8], mut to: *mut u8) -> *mut u8 {
    for from in from {
        // SAFETY: the caller's promise.
        unsafe {
            to.cast::<[u8; N]>().write_unaligned(from.cast::<[u8; N]>().read_unaligned());
            to = to.add(N);
        }
    }
    to
}

/// Copies without a call for the usual lengths.
///
/// # Safety
/// As `copy_nonoverlapping`.
#[inline]
unsafe fn copy_one(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match len {
            8 => to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned()),
            4 => to.cast::<u32>().write_unaligned(from.cast::<u32>().read_unaligned()),
            64 => to.cast::<[u64; 8]>().write_unaligned(from.cast::<[u64; 8]>().read_unaligned()),
            _ => std::ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

/// How many runs of a batch, of which each lies `step` bytes behind the one before. What decides where in the
/// cache a line may be is its place within its page: the higher the power of two that divides the step, the
/// fewer places there are.
fn most_ahead(step: usize) -> usize {
    let places = OS_PAGE_BYTES >> step.trailing_zeros().min(OS_PAGE_BYTES.trailing_zeros());
    (places * WAYS).min(BATCH)
}

/// Asks for the lines of a run, the first ones of a long one. A run that begins with a line has none behind
/// its last byte: to ask for that would take as much of the memory's time as the run itself.
#[inline]
fn prefetch_run(from: *const u8, len: usize) {
    prefetch(from);
    for line in 1..=(len / LINE_BYTES).min(MOST_LINES) {
        prefetch(from.wrapping_add((line * LINE_BYTES).min(len - 1)));
    }
}

fn in_memory(n: u64) -> usize {
    usize::try_from(n).expect("a 64-bit machine")
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
