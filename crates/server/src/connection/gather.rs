//! The direct view: bytes of layouts, gathered and changed where they lie.
//!
//! A request works on a region while its lease is locked, so it happens at once for every other request of
//! the lease; one that takes longer than a slice stops between two pages, and others come between. An update
//! that has begun goes on to its end: if its connection ends, the reaper finishes it, and its member cannot
//! come back before.
//!
//! Bytes are changed in place where only the page table refers to the frame; otherwise in a copy that
//! replaces the page, so that bytes being sent do not change.

use super::{Connection, Handled, Membership, Reused, Service, Step, Stepped, Work, count_read, no_lease};
use crate::collect::{Gathered, LINE_BYTES, lies_plain};
use crate::held::Held;
use crate::refused::Refused;
use crate::shared::Shared;
use rampool_kernel::memory::prefetch;
use rampool_net::transport::Urgency;
use rampool_wire::frame::{Header, Opcode, Piece, RegionId, Status, Window, encode_frame, glimpse};
use rampool_wire::layout::Program;
use rampool_wire::units::OS_PAGE_BYTES;

/// Bytes of a page that are asked for before they are wanted; what follows comes by itself.
const FETCHED_AHEAD: usize = 1024;

/// A `Gather` or `ReadPiece`: collects a window, and sends it when it has all.
struct Gathering {
    window: Window,
    gathered: Reused<Gathered>,
}

impl Connection {
    pub(super) fn gather(&mut self, service: &mut Service, header: Header) -> Handled {
        let window = Window::parse(self.link.table())?;
        self.gather_window(service, header, window)
    }

    fn gather_window(&mut self, service: &mut Service, header: Header, window: Window) -> Handled {
        let mut gathered = service.gathered.take();
        // What is copied here does not have to stay until it has been sent.
        gathered.copied = self.link.copies(window.len as usize);
        if !gathered.copied {
            gathered.buffer = service.buffer_pool.take(window.len as usize);
        }
        self.begin(service, header, Gathering { window, gathered })
    }

    /// A part of one page: where the link copies it, straight from the page into what leaves.
    pub(super) fn read_piece(&mut self, service: &mut Service, header: Header) -> Handled {
        let piece = Piece::parse(&header)?;
        if self.link.copies(piece.len) && self.send_plain_piece(&service.shared, header, piece)? {
            return Ok(());
        }
        let run = Program::run(piece.offset().cast_signed(), piece.len as u64)
            .expect("a part of a page of a region");
        let window = Window { program: run, from: 0, len: u32::try_from(piece.len).expect("at most a page") };
        self.gather_window(service, header, window)
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
        count_read(shared, self.arena, &membership.lease, (0, piece.len as u64));
        let bulk_len = u32::try_from(piece.len).expect("at most a page");
        let head = Header { bulk_len, ..header.reply(Status::Ok).with_arg(crc.into()) }.encode();
        // SAFETY: the link copies this much at once, and the page is the table's, unchanged, while the lease
        // is locked.
        unsafe { self.link.send(urgency, &head, &[place], Held::nothing()) };
        drop(space);
        Ok(true)
    }
}

impl Work for Gathering {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let Self { window, gathered } = self;
        let Connection { link, membership, arena, collected, .. } = connection;
        let Service { shared, slice, head, table, buffer_pool, .. } = service;
        let membership = membership.as_ref().ok_or_else(no_lease)?;
        let (space, region) = (membership.space()?, RegionId(header.region));
        let mut view = space.view(membership.member, region)?;
        // The body of a message: heads go first.
        let urgency = if space.is_ordinary(region).is_ok() { Urgency::Demand } else { Urgency::Prefetch };
        if !gathered.collect(shared, *arena, &mut view, window, slice)? {
            if gathered.copied {
                // What was to be copied is not held: it begins again.
                shared.store.release(&gathered.frames);
                **gathered = Gathered::default();
            }
            return Ok(Step::More);
        }
        count_read(shared, *arena, &membership.lease, (0, window.len.into()));
        *collected += gathered.buffer.len();
        let locked = gathered.copied.then_some(space);
        let held = if gathered.copied {
            Held::frames(&shared.store, &gathered.frames)
        } else {
            let buffer = std::mem::take(&mut gathered.buffer);
            Held::frames_and_bytes(&shared.store, &gathered.frames, buffer).back_to(buffer_pool)
        };
        gathered.frames.clear();
        table.clear();
        let mut reply = header.reply(Status::Ok);
        if header.opcode == Opcode::ReadPiece {
            reply.arg = gathered.crcs[0].into();
        } else {
            table.extend(gathered.crcs.iter().flat_map(|crc| crc.to_le_bytes()));
        }
        head.clear();
        encode_frame(head, reply, table, window.len as usize);
        // SAFETY: `held` keeps a reference to every frame until the reply is sent, and the buffer. Where the
        // link copies this much at once, the page tables keep the frames while the lease is locked. A frame
        // is only written while its page table holds the only reference.
        unsafe { link.send(urgency, head, &gathered.pieces, held) };
        drop(locked);
        gathered.clear();
        service.gathered.put_back(gathered);
        Ok(Step::Done)
    }

    fn bytes(&self) -> usize {
        self.window.len as usize
    }

    fn release(&mut self, shared: &Shared) {
        shared.store.release(&self.gathered.frames);
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
