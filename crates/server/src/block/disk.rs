//! One export's pages.

use super::ExportStatus;
use super::outgoing::Part;
use crate::config::StartError;
use crate::lease::{Counts, Lease};
use crate::shared::Shared;
use crate::store::Scratch;
use rampool_lease::{FrameIndex, StoredPage};
use rampool_nbd::{Export, Failure, Run, StatusExtent};
use rampool_net::key::random_bytes;
use rampool_wire::checksum;
use rampool_wire::frame::{LeaseId, LeaseToken, MemberId, OpenLease, PageEntry, RegionId};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Zeroes between data that are shorter travel as data: a part of a reply has its cost as well.
const SHORTEST_HOLE_BYTES: u32 = 32 << 10;
/// Pages that one request for status looks at.
const STATUS_PAGES: u64 = 1 << 15;

const PAGE: u64 = OS_PAGE_BYTES as u64;
static ZEROES: [u8; OS_PAGE_BYTES] = [0; OS_PAGE_BYTES];
const FULL: Failure = Failure("the memory server's memory is full of pages on their way");
const DAMAGED: Failure = Failure("a page in the memory server is damaged (its checksum differs)");

/// An export. Its lease is of its full size in whole pages, and it has one region, so that no page of it ever
/// lacks room.
pub(super) struct Disk {
    name: String,
    bytes: u64,
    lease: Arc<Lease>,
    member: MemberId,
    region: RegionId,
    pub(super) clients: AtomicUsize,
    failures: AtomicU64,
}

/// Buffers that a worker reuses from command to command.
#[derive(Default)]
pub(super) struct Scratchpad {
    pub(super) runs: Vec<Run>,
    pub(super) extents: Vec<StatusExtent>,
    /// What was read and is not queued yet.
    pub(super) parts: std::collections::VecDeque<Part>,
    pages: Vec<Option<StoredPage>>,
    frames: Vec<FrameIndex>,
    lens: Vec<u32>,
    released: Vec<FrameIndex>,
    packing: Scratch,
}

impl Disk {
    pub(super) fn counts(&self) -> &Counts {
        &self.lease.counts
    }

    pub(super) fn open(shared: &Shared, export: &Export) -> Result<Self, StartError> {
        let bytes = export.bytes.next_multiple_of(PAGE);
        let request = OpenLease {
            bytes,
            pid: std::process::id(),
            name: format!("export {}", export.name),
            host: String::new(),
        };
        let opened = shared.directory().open(None, &request, LeaseToken(random_bytes()));
        let (id, member) =
            opened.map_err(|source| StartError::ExportMemory { name: export.name.clone(), bytes, source })?;
        let lease = shared.open_lease(id, member, bytes, shared.tenants.of(None));
        let region = lease.space().create_region(member).expect("the first region of a lease");
        let (clients, failures) = (AtomicUsize::new(0), AtomicU64::new(0));
        Ok(Self { name: export.name.clone(), bytes: export.bytes, lease, member, region, clients, failures })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn lease_id(&self) -> LeaseId {
        self.lease.id
    }

    #[cfg(test)]
    pub(super) fn stored(&self, page: PageIndex) -> Option<StoredPage> {
        self.lease.space().view(self.member, self.region).expect("an export keeps its region").page(page)
    }

    pub(super) fn status(&self) -> ExportStatus {
        let usage = self.lease.space().usage();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = &self.lease.counts;
        ExportStatus {
            name: self.name.clone(),
            lease: self.lease.id.0,
            bytes: self.bytes,
            used_bytes: usage.used_bytes,
            clients: self.clients.load(Ordering::Relaxed) as u64,
            reads: read(&counts.gets),
            writes: read(&counts.puts),
            discards: read(&counts.discards),
            read_bytes: read(&counts.bytes_out),
            written_bytes: read(&counts.bytes_in),
            failures: read(&self.failures),
        }
    }

    /// Counts a piece of a command that has failed.
    pub(super) fn count_failure(&self, failure: Failure) {
        if self.failures.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::error!(export = self.name, %failure, "a command of a block client failed; those to come \
                are counted only");
        }
    }

    /// Reads into `pad.parts`, each frame with a reference of its own, and says in `pad.runs` what is a hole.
    pub(super) fn read(
        &self,
        shared: &Shared,
        arena: usize,
        pad: &mut Scratchpad,
        offset: u64,
        len: u32,
    ) -> Result<(), Failure> {
        pad.runs.clear();
        assert!(pad.parts.is_empty(), "what was read before has been queued");
        let looked = self.present(shared, arena, pad, offset, len);
        if let Err(failure) = looked {
            pad.released.extend(pad.parts.drain(..).filter_map(Part::frame));
            shared.store.release(&pad.released);
            pad.released.clear();
            return Err(failure);
        }
        join_short_holes(&mut pad.runs);
        self.count(
            |counts| (&counts.gets, &counts.got_pages, &counts.bytes_out),
            pages(offset, len).count(),
            len,
        );
        Ok(())
    }

    fn present(
        &self,
        shared: &Shared,
        arena: usize,
        pad: &mut Scratchpad,
        offset: u64,
        len: u32,
    ) -> Result<(), Failure> {
        {
            let space = self.lease.space();
            let mut view = space.view(self.member, self.region).expect("an export keeps its region");
            for (page, range) in pages(offset, len) {
                let bytes = range.len();
                let len = u32::try_from(bytes).expect("within a page");
                let Some(stored) = view.page(page) else {
                    push_run(&mut pad.runs, len, true);
                    match pad.parts.back_mut() {
                        Some(Part::Zeroes(more)) => *more += bytes,
                        _ => pad.parts.push_back(Part::Zeroes(bytes)),
                    }
                    continue;
                };
                let presented = shared.store.present(arena, &stored, false).map_err(|_| DAMAGED)?;
                let (frame, _) = presented.ok_or(FULL)?;
                push_run(&mut pad.runs, len, false);
                pad.parts.push_back(Part::Frame { frame, crc: stored.crc, from: range.start, len: bytes });
            }
        }
        // The frames are held: they are not written any more.
        for part in &pad.parts {
            if let Part::Frame { frame, crc, .. } = part {
                // SAFETY: a frame of 4096 plain bytes that has been settled, and to which there is a
                // reference.
                let bytes = unsafe { std::slice::from_raw_parts(shared.store.memory(*frame), OS_PAGE_BYTES) };
                if checksum::crc32c(bytes) != *crc {
                    return Err(DAMAGED);
                }
            }
        }
        Ok(())
    }

    /// Replaces bytes. With an error, none of them.
    pub(super) fn write(
        &self,
        shared: &Shared,
        arena: usize,
        pad: &mut Scratchpad,
        offset: u64,
        data: &[u8],
    ) -> Result<(), Failure> {
        let len = u32::try_from(data.len()).expect("a slice");
        pad.pages.clear();
        let result = self.replace(shared, arena, pad, offset, data);
        if result.is_err() {
            pad.released.clear();
            pad.released.extend(pad.pages.iter().flatten().map(|page| page.frame));
        }
        shared.store.release(&pad.released);
        pad.released.clear();
        if result.is_ok() {
            self.count(
                |counts| (&counts.puts, &counts.put_pages, &counts.bytes_in),
                pages(offset, len).count(),
                len,
            );
        }
        result
    }

    fn replace(
        &self,
        shared: &Shared,
        arena: usize,
        pad: &mut Scratchpad,
        offset: u64,
        data: &[u8],
    ) -> Result<(), Failure> {
        let len = u32::try_from(data.len()).expect("a slice");
        let pieces = || {
            let mut rest = data;
            pages(offset, len).map(move |(page, range)| {
                let (piece, behind) = rest.split_at(range.len());
                rest = behind;
                (page, range, piece)
            })
        };
        // Whole pages are made before the lease is locked.
        let is_kept = |piece: &[u8]| piece.len() == OS_PAGE_BYTES && *piece != ZEROES;
        take(shared, arena, pad, pieces().filter(|(_, _, piece)| is_kept(piece)).count())?;
        let mut frames = std::mem::take(&mut pad.frames);
        let mut taken = frames.drain(..);
        for (_, _, piece) in pieces() {
            // What is not kept is zero, or made below.
            let frame = if is_kept(piece) { taken.next() } else { None };
            let page = frame.map(|frame| settle(shared, arena, &mut pad.packing, frame, piece));
            pad.pages.push(page);
        }
        drop(taken);
        pad.frames = frames;
        let mut space = self.lease.space();
        for (index, (page, range, piece)) in
            pieces().enumerate().filter(|(_, (_, range, _))| range.len() < OS_PAGE_BYTES)
        {
            let old = space.view(self.member, self.region).expect("an export keeps its region").page(page);
            let mut whole = ZEROES;
            if let Some(old) = old {
                let (frame, _) =
                    shared.store.present(arena, &old, false).map_err(|_| DAMAGED)?.ok_or(FULL)?;
                // SAFETY: a frame of 4096 plain bytes that has been settled, and to which there is a
                // reference.
                whole.copy_from_slice(unsafe {
                    std::slice::from_raw_parts(shared.store.memory(frame), OS_PAGE_BYTES)
                });
                shared.store.release(&[frame]);
                if checksum::crc32c(&whole) != old.crc {
                    return Err(DAMAGED);
                }
            }
            whole[range].copy_from_slice(piece);
            if whole != ZEROES {
                take(shared, arena, pad, 1)?;
                pad.pages[index] = Some(settle(shared, arena, &mut pad.packing, pad.frames[0], &whole));
            }
        }
        let first = PageIndex(offset / PAGE);
        let extent = Extent::new(first, u32::try_from(pad.pages.len()).expect("pages of a slice"));
        let put = space.put(self.member, self.region, &[extent], &pad.pages, &mut pad.released);
        put.map_err(|_| Failure("the export's lease has no room, which is a defect of the memory server"))
    }

    /// Makes bytes zero; with `hint` only those of whole pages, which costs nothing.
    pub(super) fn zero(
        &self,
        shared: &Shared,
        arena: usize,
        pad: &mut Scratchpad,
        offset: u64,
        len: u32,
        hint: bool,
    ) -> Result<(), Failure> {
        let end = offset + u64::from(len);
        // The last page of an export may be one in part; nothing of it is beyond the end.
        let (first, last) =
            (offset.div_ceil(PAGE), if end == self.bytes { end.div_ceil(PAGE) } else { end / PAGE });
        if first < last {
            let extent =
                Extent::new(PageIndex(first), u32::try_from(last - first).expect("pages of a slice"));
            let discarded =
                self.lease.space().discard(self.member, self.region, &[extent], &mut pad.released);
            discarded.expect("a region that shares nothing needs no room to forget");
            shared.store.release(&pad.released);
            pad.released.clear();
        }
        if !hint {
            let edges = if first < last {
                [offset..first * PAGE, end.min(last * PAGE)..end]
            } else {
                [offset..end, end..end]
            };
            for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
                let zeroes = usize::try_from(edge.end - edge.start).expect("at most two pages in part");
                self.write(shared, arena, pad, edge.start, &[0; 2 * OS_PAGE_BYTES][..zeroes])?;
            }
        }
        self.lease.counts.discards.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// What is stored from `offset` on, in `pad.extents`: at most `most` of them, and not all there is to say
    /// about a long range.
    pub(super) fn extents(&self, pad: &mut Scratchpad, offset: u64, len: u32, most: usize) {
        pad.extents.clear();
        let space = self.lease.space();
        let mut view = space.view(self.member, self.region).expect("an export keeps its region");
        let looked = u64::from(len).min(STATUS_PAGES * PAGE);
        for (page, range) in pages(offset, u32::try_from(looked).expect("no longer than len")) {
            let len = u32::try_from(range.len()).expect("within a page");
            let hole = view.page(page).is_none();
            let count = pad.extents.len();
            match pad.extents.last_mut() {
                Some(last) if last.hole == hole => last.len += len,
                _ if count == most => return,
                _ => pad.extents.push(StatusExtent { len, hole }),
            }
        }
    }

    fn count(
        &self,
        which: impl Fn(&Counts) -> (&AtomicU64, &AtomicU64, &AtomicU64),
        pages: usize,
        bytes: u32,
    ) {
        let (requests, page_count, byte_count) = which(&self.lease.counts);
        requests.fetch_add(1, Ordering::Relaxed);
        page_count.fetch_add(pages as u64, Ordering::Relaxed);
        byte_count.fetch_add(bytes.into(), Ordering::Relaxed);
    }
}
/// Takes frames for so many pages.
fn take(shared: &Shared, arena: usize, pad: &mut Scratchpad, count: usize) -> Result<(), Failure> {
    pad.lens.clear();
    pad.lens.resize(count, u32::try_from(OS_PAGE_BYTES).expect("4096"));
    pad.frames.clear();
    if shared.store.take(arena, &pad.lens, &mut pad.frames) { Ok(()) } else { Err(FULL) }
}

/// Puts a page into a frame that was just taken.
fn settle(
    shared: &Shared,
    arena: usize,
    packing: &mut Scratch,
    frame: FrameIndex,
    page: &[u8],
) -> StoredPage {
    assert_eq!(page.len(), OS_PAGE_BYTES);
    // SAFETY: the frame has 4096 bytes, and no other thread knows of it.
    unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), shared.store.memory(frame), OS_PAGE_BYTES) };
    let entry = PageEntry { crc: checksum::crc32c(page), len: u32::try_from(OS_PAGE_BYTES).expect("4096") };
    shared.store.settle(arena, frame, entry, packing)
}

/// The pages of a range of bytes, each with the bytes of it that are in the range.
fn pages(offset: u64, len: u32) -> impl Iterator<Item = (PageIndex, Range<usize>)> {
    let end = offset + u64::from(len);
    let within = |at: u64, page: u64| usize::try_from(at - page * PAGE).expect("within a page");
    (offset / PAGE..end.div_ceil(PAGE)).map(move |page| {
        let (from, to) = (offset.max(page * PAGE), end.min((page + 1) * PAGE));
        (PageIndex(page), within(from, page)..within(to, page))
    })
}

fn push_run(runs: &mut Vec<Run>, len: u32, hole: bool) {
    match runs.last_mut() {
        Some(last) if last.hole == hole => last.len += len,
        _ => runs.push(Run { len, hole }),
    }
}

/// Makes data of short holes between data.
fn join_short_holes(runs: &mut Vec<Run>) {
    if runs.len() < 2 {
        return;
    }
    let mut joined = Vec::with_capacity(runs.len());
    for run in runs.drain(..) {
        push_run(&mut joined, run.len, run.hole && run.len >= SHORTEST_HOLE_BYTES);
    }
    *runs = joined;
}
