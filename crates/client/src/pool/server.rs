//! The shell's side of one server: the link, and the bytes of frames that leave and arrive.
//!
//! Pages are sent from and received into the caller's memory, without a copy in between.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use rampool_kernel::exposed::ExposedMemory;
use rampool_net::blocks::block_crcs;
use rampool_net::transport::zero_copy::SharedZeroCopy;
use rampool_net::transport::{LinkError, Piece, PieceMut, Urgency};
use rampool_paging::placement::ServerIndex;
use rampool_pinning::path::Wish;
use rampool_session::{Class, LinkId, Lost, Request, RequestId};
use rampool_wire::checksum;
use rampool_wire::frame::{self, Block, Granted, Header, Opcode, PageEntry};
use rampool_wire::places::{Place as Whereabouts, parse_places, split_places};
use rampool_wire::session::features;
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};

use super::body::Body;
use super::frames::FramesFile;
use super::link::{Departure, ServerLink, watched};
use super::reconnect::{Attempt, Place};
use super::stats::LinkStats;
use crate::error::LostReason;

/// How large pieces leave: from how many bytes on it was measured to pay.
#[derive(Clone, Debug)]
pub(super) struct ZeroCopyWish {
    /// None where no server is reached that way, or the kernel cannot.
    pub engine: Option<SharedZeroCopy>,
    pub wish: Wish,
    pub measured: Option<u64>,
}

pub(super) struct Server {
    pub index: ServerIndex,
    pub name: String,
    pub link: Option<ServerLink>,
    /// The number of the connection.
    connection: u32,
    /// While the connection is broken and the server not lost.
    pub attempt: Option<Attempt>,
    /// What it takes to reconnect; known once the lease is granted.
    pub place: Option<Box<Place>>,
    /// Why the connection broke, in words.
    pub why: Option<LostReason>,
    pub lost: Option<LostReason>,
    /// It is done without until it is back.
    pub is_away: bool,
    /// It is lost, and is joined anew as soon as it can be reached.
    pub is_renewed: bool,
    /// It is there, and its answer to the lease that was asked for anew was that only so many bytes are free.
    pub free_bytes: Option<u64>,
    /// What it granted when it was joined last.
    pub granted: Option<Granted>,
    /// Stores whose frame has left since the last look.
    pub departed: Rc<RefCell<Vec<u64>>>,
    /// The head that came last, and the request whose bytes follow it.
    pub head: Option<Header>,
    pub receiving: Option<RequestId>,
    /// The bytes that are coming have no place.
    pub dropping: bool,
    pub drained: bool,
    compressed: bool,
    /// A part of a page may be asked for without a layout.
    pub takes_pieces: bool,
    /// Its answers say where pages lie.
    tells_places: bool,
    /// Where they can be read, while there is a connection.
    pub frames: Option<FramesFile>,
    zero_copy: Option<ZeroCopyWish>,
    /// Memory that the server has mapped, by place.
    pub published: BTreeMap<u64, Slot>,
    pub stats: LinkStats,
    // Scratch, kept for its capacity.
    frame: Vec<u8>,
    pieces: Vec<Piece>,
    places: Vec<PieceMut>,
    out_entries: Vec<PageEntry>,
    out_crcs: Vec<u32>,
    // The answer that is arriving: its entries, and its compressed pages.
    entries: Vec<PageEntry>,
    packed: Vec<u8>,
    told: Vec<Whereabouts>,
    // Or its checksums; and the table of a scan's.
    crcs: Vec<u32>,
    scan_table: Vec<u8>,
}

/// A memory, at its place of a server.
pub(super) struct Slot {
    pub memory: Arc<ExposedMemory>,
    pub file: OwnedFd,
    /// Of the request that publishes it.
    pub table: Vec<u8>,
    /// Its owner has taken it back, or dropped it.
    pub withdrawn: bool,
}

/// Where the bytes of an answer are.
pub(super) enum Placed {
    Coming,
    Here,
}

impl Server {
    pub fn new(index: ServerIndex, name: String, link: ServerLink) -> Self {
        let mut server = Self::absent(index, name);
        server.use_link(link);
        server
    }

    /// One that cannot be reached.
    pub fn absent(index: ServerIndex, name: String) -> Self {
        Self {
            index,
            name,
            link: None,
            connection: 0,
            attempt: None,
            place: None,
            why: None,
            lost: None,
            is_away: false,
            is_renewed: false,
            free_bytes: None,
            granted: None,
            departed: Rc::default(),
            head: None,
            receiving: None,
            dropping: false,
            drained: true,
            compressed: false,
            takes_pieces: false,
            tells_places: false,
            frames: None,
            zero_copy: None,
            published: BTreeMap::new(),
            stats: LinkStats::default(),
            frame: Vec::new(),
            pieces: Vec::new(),
            places: Vec::new(),
            out_entries: Vec::new(),
            out_crcs: Vec::new(),
            entries: Vec::new(),
            packed: Vec::new(),
            told: Vec::new(),
            crcs: Vec::new(),
            scan_table: Vec::new(),
        }
    }

    fn use_link(&mut self, mut link: ServerLink) {
        self.tells_places = link.features() & features::PLACES != 0;
        self.frames = link.take_frames().and_then(FramesFile::adopt);
        self.compressed = link.features() & features::LZ4 != 0;
        self.takes_pieces = link.features() & features::PIECES != 0;
        self.link = Some(link);
    }

    /// Whether it can be asked.
    pub fn is_there(&self) -> bool {
        self.lost.is_none() && !self.is_away
    }

    /// The connection, as the machine calls it.
    pub fn id(&self) -> LinkId {
        LinkId { server: self.index, connection: self.connection }
    }

    /// The table of the head that came last.
    pub fn table(&self) -> &[u8] {
        self.link.as_ref().map_or(&[], ServerLink::table)
    }

    /// From now on large pieces leave without a copy, over this connection and those that take its place.
    /// What they are read from stays as it is until the server has answered.
    pub fn send_without_copies(&mut self, zero_copy: ZeroCopyWish) {
        if let Some(link) = &mut self.link {
            link.send_without_copies(zero_copy.engine.as_ref(), zero_copy.wish, zero_copy.measured);
        }
        self.zero_copy = Some(zero_copy);
    }

    /// What to sleep on, and whether for room to write as well. To be asked anew before each sleep.
    pub fn watched(&self) -> Option<(BorrowedFd<'_>, bool)> {
        match (&self.link, &self.attempt) {
            (Some(link), _) => Some(watched(link)),
            (None, Some(attempt)) => attempt.watched(),
            (None, None) => None,
        }
    }

    /// Drops the connection, or the attempt to make one.
    pub fn close(&mut self) {
        self.attempt = None;
        self.receiving = None;
        self.dropping = false;
        self.drained = true;
        self.frames = None;
        self.link = None;
        // What never left with the broken link has not left.
        self.departed.borrow_mut().clear();
    }

    /// The attempt succeeded.
    pub fn back(&mut self, link: LinkId) {
        let made = self.attempt.take().and_then(Attempt::into_link).expect("an attempt attached");
        self.connection = link.connection;
        self.use_link(*made);
        if let Some(zero_copy) = self.zero_copy.take() {
            self.send_without_copies(zero_copy);
        }
    }

    /// Why the server is lost, in words.
    pub fn reason(&self, lost: Lost) -> LostReason {
        match lost {
            Lost::Connection => self.why.clone().unwrap_or(LostReason::Closed),
            Lost::Deadline(deadline) => LostReason::Deadline(deadline),
            Lost::GivenUp => LostReason::GivenUp,
            Lost::Drained => LostReason::Drained,
            Lost::Breach(breach) => LostReason::Protocol(breach.to_string()),
        }
    }

    /// Whether memory can be handed over to it.
    pub fn takes_memory(&self) -> bool {
        self.link.as_ref().is_some_and(ServerLink::takes_memory)
    }

    /// Hands the memory over that a `Publish` is about, which follows. The server refuses one without memory.
    fn hand_memory(&self, place: u64) {
        let slot = self.published.get(&place).filter(|slot| !slot.withdrawn);
        if let (Some(slot), Some(link)) = (slot, &self.link) {
            // What cannot be handed over is missed by the server, which says so.
            let _ = link.hand_over(slot.file.as_fd());
        }
    }

    /// Makes the frame of a request and gives it to the link, where so many bytes wait then.
    pub fn hand_over(&mut self, of: &Request, body: &mut Body, number: u64) -> usize {
        let ask = &of.ask;
        let header =
            Header { region: ask.region.0, ..Header::request(ask.opcode, number).with_arg(body.arg) };
        let mut departure = None;
        self.frame.clear();
        self.pieces.clear();
        match ask.opcode {
            Opcode::Get | Opcode::Discard => frame::encode_extents(&mut self.frame, header, &body.extents),
            Opcode::Put => {
                self.out_entries.clear();
                let made = body.entries.as_ref().and_then(|entries| entries.get());
                if let Some(made) = made {
                    self.out_entries.extend_from_slice(made);
                }
                let mut at = 0;
                for (extent, memory) in body.extents.iter().zip(&body.memory) {
                    for n in 0..extent.count as usize {
                        let page = memory.wrapping_add(n * OS_PAGE_BYTES);
                        if made.is_none() {
                            // SAFETY: the caller of `Pool::store` promised that these pages are readable and
                            // do not change until the operation ends, and this request is one of its parts.
                            let bytes = unsafe { std::slice::from_raw_parts(page, OS_PAGE_BYTES) };
                            self.out_entries.push(entry_of(bytes));
                        }
                        if !self.out_entries[at].is_zero() {
                            push_piece(&mut self.pieces, page);
                        }
                        at += 1;
                    }
                }
                // For pages read in place, which are checked against them.
                if body.of.is_some() {
                    body.crcs.clear();
                    body.crcs.extend(self.out_entries.iter().map(|entry| entry.crc));
                }
                if let Some(entries) = &body.entries {
                    entries.get_or_init(|| self.out_entries.clone());
                }
                frame::encode_put(&mut self.frame, header, &body.extents, &self.out_entries);
                departure = Some(Departure { request: number, departed: self.departed.clone() });
                self.stats.stored_pages += u64::from(body.pages());
            }
            Opcode::Gather => {
                body.table.clear();
                body.window.as_ref().expect("a gather has a window").encode(&mut body.table);
                frame::encode_frame(&mut self.frame, header, &body.table, 0);
            }
            Opcode::Scatter | Opcode::Accumulate => {
                // SAFETY: the places are memory of a put, readable and unchanged until its operation ends.
                unsafe { outgoing(body, &mut self.pieces, &mut self.out_crcs) };
                body.table.clear();
                body.window
                    .as_ref()
                    .expect("a scatter has a window")
                    .encode_with(&self.out_crcs, &mut body.table);
                frame::encode_frame(&mut self.frame, header, &body.table, body.bytes as usize);
                departure = Some(Departure { request: number, departed: self.departed.clone() });
            }
            Opcode::Publish => {
                self.hand_memory(body.arg);
                frame::encode_frame(&mut self.frame, header, &body.table, 0);
            }
            _ => frame::encode_frame(&mut self.frame, header, &body.table, 0),
        }
        let urgency = match ask.class {
            Class::Control | Class::Demand => Urgency::Demand,
            Class::Prefetch => Urgency::Prefetch,
            Class::WriteBack => Urgency::WriteBack,
        };
        let link = self.link.as_mut().expect("the machine sends only while there is a link");
        // SAFETY: the pieces are pages of a store, readable until its operation ends; that is not before
        // `departure` was dropped (the machine sees to it), or the link was.
        unsafe { link.send(urgency, &self.frame, &self.pieces, departure) };
        self.stats.requests += 1;
        self.stats.sent_bytes += (self.frame.len() + self.pieces.iter().map(|p| p.len).sum::<usize>()) as u64;
        link.queued_bytes()
    }

    /// A head with its table has come, and bytes follow it: says where they go.
    pub fn place(&mut self, body: &mut Body, header: &Header) -> Result<Placed, LostReason> {
        let link = self.link.as_mut().expect("a head came from it");
        let wrong_length = || Err(LostReason::Wire(frame::WireError::BulkLength));
        match header.opcode {
            Opcode::Get => {
                let pages = body.pages() as usize;
                let (table, places) = match self.tells_places {
                    true => split_places(link.table(), pages)?,
                    false => (link.table(), &[][..]),
                };
                frame::parse_get_reply(header, table, pages, self.compressed, &mut self.entries)?;
                parse_places(places, if self.tells_places { pages } else { 0 }, &mut self.told)?;
                self.lay_out(body);
                if header.bulk_len == 0 {
                    return Ok(Placed::Here);
                }
            }
            Opcode::Gather => {
                frame::parse_crcs(link.table(), body.blocks.len(), &mut self.crcs)?;
                if header.bulk_len != body.bytes {
                    return wrong_length();
                }
                self.places.clear();
                if body.is_staged() {
                    body.staging.resize(body.bytes as usize, 0);
                    self.places.push(PieceMut { ptr: body.staging.as_mut_ptr(), len: body.staging.len() });
                } else {
                    self.places.extend_from_slice(&body.places);
                }
            }
            Opcode::ReadPiece => {
                if header.bulk_len != body.bytes || header.table_len > 0 {
                    return wrong_length();
                }
                self.crcs.clear();
                self.crcs.push(frame::parse_piece_crc(header)?);
                self.places.clear();
                self.places.extend_from_slice(&body.places);
            }
            Opcode::Scan => {
                if header.bulk_len > body.bytes {
                    return wrong_length();
                }
                self.scan_table.clear();
                self.scan_table.extend_from_slice(link.table());
                body.staging.resize(header.bulk_len as usize, 0);
                self.places.clear();
                self.places.push(PieceMut { ptr: body.staging.as_mut_ptr(), len: body.staging.len() });
            }
            other => unreachable!("the machine lets no bytes of {other:?} come"),
        }
        let link = self.link.as_mut().expect("a head came from it");
        // SAFETY: the places are memory of a fetch or a get, writable and no other operation's until that
        // operation ends, which it does not before the bulk is in or the link is dropped; or they are in
        // `packed` or the body's staging, which are not touched meanwhile.
        unsafe { link.place(&self.places) };
        Ok(Placed::Coming)
    }

    /// A head with its table has come, and bytes follow it that nothing waits for any more.
    pub fn drop_bytes(&mut self) {
        let bytes = self.head.map_or(0, |head| head.bulk_len as usize);
        self.packed.resize(bytes.max(self.packed.len()), 0);
        self.places.clear();
        self.places.push(PieceMut { ptr: self.packed.as_mut_ptr(), len: bytes });
        self.dropping = true;
        if let Some(link) = &mut self.link {
            // SAFETY: the place is in `packed`, which is not touched before the bulk is in or
            // the link is dropped.
            unsafe { link.place(&self.places) };
        }
    }

    /// All bytes of an answer are in their places: unpacks and checks them. The first page of
    /// what is damaged.
    pub fn check(&mut self, of: &Request, body: &mut Body) -> Option<PageIndex> {
        match of.ask.opcode {
            Opcode::Get => self.check_pages(body),
            Opcode::Scan => {
                let header = self.head.expect("a head came before its bytes");
                let whole = u64::from(checksum::crc32c(&body.staging)) == header.arg;
                (!whole).then_some(PageIndex(of.ask.at / OS_PAGE_BYTES as u64))
            }
            _ => {
                let whole = self.check_bytes(body);
                (!whole).then_some(PageIndex(of.ask.at / OS_PAGE_BYTES as u64))
            }
        }
    }

    /// Where the pages of a `Get` lie, that has just been answered, and their checksums.
    pub fn told(&self) -> impl Iterator<Item = (Whereabouts, u32)> {
        self.told.iter().zip(&self.entries).map(|(place, entry)| (*place, entry.crc))
    }

    /// Where the pages of a `Put` lie, that has just been answered.
    pub fn stored_at(&mut self, pages: usize) -> &[Whereabouts] {
        let table = self.link.as_ref().map_or(&[][..], ServerLink::table);
        if !self.tells_places || parse_places(table, pages, &mut self.told).is_err() {
            // Not knowing where pages lie is no harm.
            self.told.clear();
        }
        &self.told
    }

    /// The table and the bytes of a reply that is waited for.
    pub fn take_reply(&self, header: &Header, body: &mut Body) -> (Vec<u8>, Vec<u8>) {
        if header.opcode == Opcode::Scan && header.bulk_len > 0 {
            (self.scan_table.clone(), std::mem::take(&mut body.staging))
        } else {
            (self.table().to_vec(), Vec::new())
        }
    }

    /// Lays out where the pages of an answer go; zero pages are there at once.
    fn lay_out(&mut self, body: &Body) {
        self.places.clear();
        let packed_bytes: usize =
            self.entries.iter().map(|e| e.len as usize).filter(|len| *len < OS_PAGE_BYTES).sum();
        self.packed.resize(packed_bytes.max(self.packed.len()), 0);
        let packed = self.packed.as_mut_ptr();
        let mut packed_at = 0;
        let mut entries = self.entries.iter();
        for (extent, memory) in body.extents.iter().zip(&body.memory) {
            for n in 0..extent.count as usize {
                let entry = entries.next().expect("one entry per page");
                let page = memory.wrapping_add(n * OS_PAGE_BYTES);
                match entry.len as usize {
                    // SAFETY: the caller of `Pool::fetch` promised a page of writable memory here that is no
                    // other operation's until this one ends.
                    0 => unsafe { page.write_bytes(0, OS_PAGE_BYTES) },
                    OS_PAGE_BYTES => push_place(&mut self.places, page),
                    len => {
                        self.places.push(PieceMut { ptr: packed.wrapping_add(packed_at), len });
                        packed_at += len;
                    }
                }
            }
        }
    }

    fn check_pages(&mut self, body: &Body) -> Option<PageIndex> {
        let mut packed_at = 0;
        let mut damaged: Option<PageIndex> = None;
        let mut entries = self.entries.iter();
        for (extent, memory) in body.extents.iter().zip(&body.memory) {
            for n in 0..extent.count as usize {
                let entry = entries.next().expect("one entry per page");
                if entry.is_zero() {
                    continue;
                }
                let page = memory.wrapping_add(n * OS_PAGE_BYTES);
                // SAFETY: the caller of `Pool::fetch` promised a page of writable memory here that is no
                // other operation's until this one ends.
                let bytes = unsafe { std::slice::from_raw_parts_mut(page, OS_PAGE_BYTES) };
                let len = entry.len as usize;
                let mut whole = true;
                if len < OS_PAGE_BYTES {
                    let packed = &self.packed[packed_at..packed_at + len];
                    whole = lz4_flex::block::decompress_into(packed, bytes).is_ok_and(|n| n == OS_PAGE_BYTES);
                    packed_at += len;
                }
                if !whole || frame::page_crc(bytes) != entry.crc {
                    damaged = damaged.or(Some(extent.first.offset(n as u64)));
                }
            }
        }
        damaged
    }

    /// Checks the bytes of a gather, and takes them to their places.
    fn check_bytes(&mut self, body: &Body) -> bool {
        // SAFETY: the places are memory of a get, writable and no other operation's until its operation ends.
        unsafe {
            if body.is_staged() {
                let staged = [Piece { ptr: body.staging.as_ptr(), len: body.staging.len() }];
                let whole = are_whole(&body.blocks, &self.crcs, &staged);
                let mut at = body.staging.as_ptr();
                for place in &body.places {
                    copy(at, place.ptr, place.len);
                    at = at.add(place.len);
                }
                whole
            } else {
                self.pieces.clear();
                self.pieces.extend(body.places.iter().map(|place| Piece { ptr: place.ptr, len: place.len }));
                are_whole(&body.blocks, &self.crcs, &self.pieces)
            }
        }
    }
}

/// The pieces to send a window from, and its checksums.
///
/// # Safety
/// The request's places are readable memory, which does not change.
unsafe fn outgoing(request: &mut Body, pieces: &mut Vec<Piece>, crcs: &mut Vec<u32>) {
    if request.is_staged() {
        if request.staging.is_empty() {
            request.staging.reserve_exact(request.bytes as usize);
            for place in &request.places {
                let end = request.staging.len();
                // SAFETY: the caller's promise; there is room for all places, and the length
                // covers what was written.
                unsafe {
                    copy(place.ptr, request.staging.as_mut_ptr().add(end), place.len);
                    request.staging.set_len(end + place.len);
                }
            }
        }
        pieces.push(Piece { ptr: request.staging.as_ptr(), len: request.staging.len() });
    } else {
        pieces.extend(request.places.iter().map(|place| Piece { ptr: place.ptr, len: place.len }));
    }
    crcs.clear();
    // SAFETY: the caller's promise, or the request's own staging.
    unsafe { block_crcs(&request.blocks, pieces, |crc| crcs.push(crc)) };
}

/// Whether the bytes of all blocks have these checksums.
///
/// # Safety
/// The pieces are readable memory, as long as the blocks, which does not change.
unsafe fn are_whole(blocks: &[Block], crcs: &[u32], pieces: &[Piece]) -> bool {
    let (mut crcs, mut whole) = (crcs.iter(), true);
    let compare = |crc| whole &= crcs.next() == Some(&crc);
    // SAFETY: the caller's promise.
    unsafe { block_crcs(blocks, pieces, compare) };
    whole
}

/// Copies without a call for the usual lengths.
///
/// # Safety
/// As `copy_nonoverlapping`.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match len {
            8 => to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned()),
            4 => to.cast::<u32>().write_unaligned(from.cast::<u32>().read_unaligned()),
            _ => std::ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

/// The table entry of a page to store.
fn entry_of(page: &[u8]) -> PageEntry {
    let crc = frame::page_crc(page);
    if crc == frame::ZERO_PAGE_CRC && page.iter().all(|b| *b == 0) {
        return PageEntry::ZERO;
    }
    const LEN: u32 = {
        assert!(OS_PAGE_BYTES <= u32::MAX as usize);
        #[allow(clippy::cast_possible_truncation)]
        let len = OS_PAGE_BYTES as u32;
        len
    };
    PageEntry { crc, len: LEN }
}

/// Adds a page to send, as part of the last piece where it follows that in memory.
fn push_piece(pieces: &mut Vec<Piece>, page: *const u8) {
    match pieces.last_mut() {
        Some(last) if last.ptr.wrapping_add(last.len) == page => last.len += OS_PAGE_BYTES,
        _ => pieces.push(Piece { ptr: page, len: OS_PAGE_BYTES }),
    }
}

/// Adds a page to receive, as part of the last piece where it follows that in memory.
fn push_place(places: &mut Vec<PieceMut>, page: *mut u8) {
    match places.last_mut() {
        Some(last) if last.ptr.wrapping_add(last.len) == page => last.len += OS_PAGE_BYTES,
        _ => places.push(PieceMut { ptr: page, len: OS_PAGE_BYTES }),
    }
}

pub(super) fn link_lost(error: LinkError) -> LostReason {
    match error {
        LinkError::Closed => LostReason::Closed,
        LinkError::Wire(error) => LostReason::Wire(error),
        LinkError::Io(error) if error.kind() == std::io::ErrorKind::ConnectionReset => LostReason::Closed,
        LinkError::Io(error) => LostReason::Io(error.to_string()),
        other => LostReason::Protocol(other.to_string()),
    }
}
