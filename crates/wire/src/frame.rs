//! The bytes that travel between a client and a memory server.
//!
//! A connection starts with one [`crate::session::Preface`] each way and a proof of the key if there is one.
//! From then on both directions are a sequence of frames:
//!
//! ```text
//!   +-------------------+----------------------+---------------------------+
//!   | header, 48 bytes  | table, table_len     | bulk, bulk_len            |
//!   | checksummed       | checksummed, parsed  | page bytes, each page has |
//!   |                   | before bulk is read  | its checksum in the table |
//!   +-------------------+----------------------+---------------------------+
//! ```
//!
//! All numbers are little-endian. The table says what the bulk is, so a receiver knows where every page goes
//! before it reads the first byte of it. Requests are pipelined and may be answered in any order: a reply
//! repeats the request's number and opcode and carries [`flags::REPLY`].
//!
//! Everything read from a peer is parsed here once, against fixed bounds, into types whose shape is valid.
//! Nothing in this module panics on any input or allocates more than the bounds below.

mod control;
mod data;
mod direct;
mod glimpse;
mod queue;
mod reach;

pub use control::{AttachLease, Granted, LeaseId, LeaseToken, MAX_NAME_BYTES, MemberId, OpenLease, RegionId};
pub use data::{
    MAX_EXTENTS, MAX_PAGES, PageEntry, encode_extents, encode_get_reply, encode_put, parse_extents,
    parse_get_reply, parse_put,
};

pub use direct::{
    Block, Change, CopyRequest, FetchOp, Keys, MAX_DIRECT_BYTES, MAX_DIRECT_STEPS, MAX_PROGRAM_BYTES,
    NamedRegion, Piece, Pieces, ScanRequest, Window, accumulate_arg, encode_reduced, parse_accumulate_arg,
    parse_crcs, parse_piece_crc, parse_reduced, patched_crc,
};

pub use glimpse::glimpse;

pub use queue::{
    AwaitBody, Body, Delivery, Listed, MAX_HEAD_BYTES, MAX_REFERENCE_BYTES, MAX_SETTLED, Push, PushHeads,
    QueueBounds, Reference, Settlement, Take,
};

pub use reach::{MAX_REACHED_BYTES, Publish, Published, Reach, Rights};

use crate::checksum;
use crate::units::PageIndex;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first four bytes of every frame, "RPf1".
pub const FRAME_MAGIC: [u8; 4] = *b"RPf1";
/// The protocol version this build speaks.
pub const WIRE_VERSION: u8 = 1;
/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 48;
/// The longest table a frame may carry.
pub const MAX_TABLE_BYTES: usize = 16 * 1024;
/// The longest bulk a frame may carry.
pub const MAX_BULK_BYTES: usize = 2 * 1024 * 1024;
/// Answers to updates that are remembered for each member: the most updates that may be unanswered when its
/// connection breaks.
pub const REMEMBERED: usize = 256;
/// Page indices are below this: a region spans at most 4 PiB.
pub const MAX_PAGE_INDEX: u64 = 1 << 40;
/// The longest text of an error reply.
pub const MAX_MESSAGE_BYTES: usize = 1024;

/// Bits of [`Header::flags`].
pub mod flags {
    /// This frame answers the request with the same number.
    pub const REPLY: u8 = 1;
    /// Every bit that has a meaning; the others are zero.
    pub const KNOWN: u8 = REPLY;
}

crate::listed! {
    /// The operation that a frame requests, or answers.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    #[repr(u8)]
    #[non_exhaustive]
    pub enum Opcode {
        /// Take a lease and become its first member. Table: [`OpenLease`]; reply: [`Granted`].
        OpenLease = 1,
        /// Become a member of a lease, or a connection of an existing member. Table: [`AttachLease`]; reply:
        /// [`Granted`].
        AttachLease = 2,
        /// Change the size of the lease to `arg` bytes.
        ResizeLease = 3,
        /// Make an empty region; the reply's `region` names it.
        CreateRegion = 4,
        /// Make a copy-on-write copy of `region`; the reply's `region` names it.
        CloneRegion = 5,
        /// Take over `region` from another member of the same lease.
        AdoptRegion = 6,
        /// Give up `region` with all its pages.
        FreeRegion = 7,
        /// Read pages. Table: extents (`arg` = how many). Reply: page entries, then bulk.
        Get = 8,
        /// Write pages. Table: extents (`arg` = how many), page entries; bulk: the pages.
        Put = 9,
        /// Forget pages: they read as zero again. Table: extents (`arg` = how many).
        Discard = 10,
        /// Keeps the member alive.
        Heartbeat = 11,
        /// The server's status, as JSON in the reply's bulk. Needs no lease.
        Status = 12,
        /// The member leaves; its regions are freed at once.
        Goodbye = 13,
        /// Server to client, unasked: the server stops in `arg` milliseconds.
        Draining = 14,
        /// Open a region for every member of the lease: `region`, or the one whose name is the table. `arg`:
        /// its length, used if the region is created or has no length yet. The reply's `region` names it,
        /// `arg` is its length.
        OpenRegion = 15,
        /// Read the bytes of a layout. Table: [`Window`]. Reply: a checksum for each block, then the bytes.
        Gather = 16,
        /// Write the bytes of a layout. Table: [`Window`] and checksums; bulk: the bytes.
        Scatter = 17,
        /// Update the elements of a layout ([`accumulate_arg`]). As `Scatter`; the bulk are the operands.
        Accumulate = 18,
        /// Update one element and return its value before. Table and `arg`: [`FetchOp`]; the reply's `arg`:
        /// the element's bits before.
        FetchOp = 19,
        /// Filter and reduce the elements of a layout. Table and `arg`: [`ScanRequest`]. Reply: count and
        /// value; bulk: positions or elements.
        Scan = 20,
        /// Copy the bytes of a layout to another server. Table: [`CopyRequest`].
        Copy = 21,
        /// Open the queue whose name and bounds are the table ([`QueueBounds`]), or create it, if `arg` is 1
        /// and there is none. The reply's `arg` is its number, `region` the region of its bodies.
        OpenQueue = 22,
        /// Give up the queue with the number `arg`, and all that is in it.
        FreeQueue = 23,
        /// The queues of the lease with numbers above `arg`. Reply: [`Listed`], as many as fit.
        ListQueues = 24,
        /// Append a message ([`Push`]) to queue `arg`. The reply's `arg` is the message's number; its table,
        /// if a body follows, is the place of the body.
        Push = 25,
        /// Take messages out of queue `arg` ([`Take`]). Reply: [`Delivery`]s, none at the timeout.
        Take = 26,
        /// Acknowledge messages of queue `arg`, give them back, or withdraw them ([`Settlement`]).
        Settle = 27,
        /// Wait for the body of a message of queue `arg` ([`AwaitBody`]). The reply's `arg`: 1, or 0 at the
        /// timeout.
        AwaitBody = 28,
        /// Append several messages without bodies ([`PushHeads`]) to queue `arg`, all or none. The reply's
        /// `arg` is the first one's number; the others' follow it.
        PushHeads = 29,
        /// Publish memory whose descriptor went over the socket ([`Publish`]). `arg`: its place, of the
        /// member.
        Publish = 30,
        /// Withdraw the memory of place `arg`; after the answer the server no longer touches it.
        Withdraw = 31,
        /// Read a part of one page: the usual small `Gather`, in headers without tables. `arg`:
        /// [`Piece::encode`]. Reply: `arg` is the bytes' checksum; bulk: the bytes.
        ReadPiece = 32,
        /// The named regions of the lease, by name, behind the name in the table. Reply: [`NamedRegion`], as
        /// many as fit; `arg`: 1 if more follow.
        ListRegions = 33,
        /// Use what a member of the lease has published ([`Reach`], by `arg`).
        Reach = 34,
        /// Drain: grant no new leases, tell the clients ([`Opcode::Draining`]), and stop when the last one
        /// has left. For who has the master key. Needs no lease.
        Drain = 35,
    }
}

impl Opcode {
    fn parse(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte).checked_sub(1)?).copied()
    }
}

crate::listed! {
    /// The outcome of a request. Requests carry `Ok`.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    #[repr(u8)]
    #[non_exhaustive]
    pub enum Status {
        Ok = 0,
        /// The lease holds no more pages; nothing of the request was stored. `arg`: bytes still free in the
        /// lease.
        PoolFull = 1,
        /// The server cannot lend that much. `arg`: bytes it could lend.
        LeaseRefused = 2,
        /// No such lease, or a wrong token.
        NoSuchLease = 3,
        /// No such region in this lease.
        NoSuchRegion = 4,
        /// The region belongs to another member, or the peer holds no lease.
        NotAllowed = 5,
        /// The request is invalid; the text says why.
        BadRequest = 6,
        /// The server is stopping and accepts no new requests.
        Draining = 7,
        /// More requests or bytes outstanding than were granted.
        OverCredit = 8,
        /// A limit other than bytes: regions of a lease, members, page table memory.
        LimitReached = 9,
        /// The member was removed after its grace time; its regions are gone.
        MemberGone = 10,
        /// Another server, which the request needs, does not answer or rejects this one; the text names it.
        PeerLost = 11,
        /// The queue has no room, and had none until the sender's timeout. `arg`: messages in it.
        QueueFull = 12,
        /// No such queue in this lease.
        NoSuchQueue = 13,
        /// The message is not in the queue (any more), or not the member's; or its sender was lost before its
        /// body arrived.
        NoSuchMessage = 14,
        /// The server's machine is short of memory: it gives no new leases for now.
        ShortOfMemory = 15,
    }
}

impl Status {
    fn parse(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

/// Why bytes from a peer were rejected. The connection they came from is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    #[error("the frame does not start with rampool's magic number")]
    BadMagic,
    #[error("the frame has protocol version {0}, but this side speaks {WIRE_VERSION}")]
    BadVersion(u8),
    #[error("the frame header is damaged (checksum differs)")]
    HeaderChecksum,
    #[error("the frame's table is damaged (checksum differs)")]
    TableChecksum,
    #[error("unknown operation {0}")]
    UnknownOpcode(u8),
    #[error("unknown status {0}")]
    UnknownStatus(u8),
    #[error("unknown flags {0:#04x}")]
    UnknownFlags(u8),
    #[error("a table of {0} bytes is longer than the {MAX_TABLE_BYTES} allowed")]
    TableTooLong(u32),
    #[error("{0} bytes of pages are more than the {MAX_BULK_BYTES} allowed")]
    BulkTooLong(u32),
    #[error("the table is too short or too long")]
    TableLength,
    #[error("an empty list of pages")]
    NoPages,
    #[error("more than {MAX_PAGES} pages in one request")]
    TooManyPages,
    #[error("an extent reaches beyond the end of a region")]
    ExtentRange,
    #[error("a reserved field is not zero")]
    Reserved,
    #[error("an invalid page length")]
    PageLength,
    #[error("the lengths of the pages do not add up to the bytes sent")]
    BulkLength,
    #[error("a name that is too long or not UTF-8")]
    BadName,
    #[error("a layout that is malformed, or reaches below byte 0")]
    BadLayout,
    #[error("a part of a layout that is empty, too long, cuts an element in two, or reaches beyond its end")]
    WindowRange,
    #[error("more than {MAX_DIRECT_STEPS} runs in one request, or nodes on the way to them")]
    TooManySteps,
    #[error("an unknown element type, or an operation that it does not support")]
    BadElement,
    #[error("an invalid message or list of messages")]
    BadMessage,
}

/// A frame header, parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    pub opcode: Opcode,
    pub status: Status,
    /// See [`flags`].
    pub flags: u8,
    /// Chosen by the requester, repeated in the reply.
    pub request: u64,
    pub region: u64,
    /// Its meaning depends on the opcode and status.
    pub arg: u64,
    pub table_len: u32,
    pub bulk_len: u32,
    /// CRC-32C of the table; 0 without a table.
    pub table_crc: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    version: u8,
    opcode: u8,
    status: u8,
    flags: u8,
    request: U64,
    region: U64,
    arg: U64,
    table_len: U32,
    bulk_len: U32,
    table_crc: U32,
    header_crc: U32,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);

impl Header {
    /// A request with neither table nor bulk; [`encode_frame`] and the data encoders fill these in.
    #[must_use]
    pub fn request(opcode: Opcode, request: u64) -> Self {
        Self {
            opcode,
            status: Status::Ok,
            flags: 0,
            request,
            region: 0,
            arg: 0,
            table_len: 0,
            bulk_len: 0,
            table_crc: 0,
        }
    }

    /// The reply to this request, empty so far.
    #[must_use]
    pub fn reply(&self, status: Status) -> Self {
        Self {
            opcode: self.opcode,
            status,
            flags: flags::REPLY,
            request: self.request,
            region: self.region,
            arg: 0,
            table_len: 0,
            bulk_len: 0,
            table_crc: 0,
        }
    }

    #[must_use]
    pub fn with_region(self, region: RegionId) -> Self {
        Self { region: region.0, ..self }
    }

    #[must_use]
    pub fn with_arg(self, arg: u64) -> Self {
        Self { arg, ..self }
    }

    #[must_use]
    pub fn is_reply(&self) -> bool {
        self.flags & flags::REPLY != 0
    }

    /// The bytes of the header, checksum included.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let raw = RawHeader {
            magic: FRAME_MAGIC,
            version: WIRE_VERSION,
            opcode: self.opcode as u8,
            status: self.status as u8,
            flags: self.flags,
            request: self.request.into(),
            region: self.region.into(),
            arg: self.arg.into(),
            table_len: self.table_len.into(),
            bulk_len: self.bulk_len.into(),
            table_crc: self.table_crc.into(),
            header_crc: U32::ZERO,
        };
        let mut bytes: [u8; HEADER_BYTES] = zerocopy::transmute!(raw);
        let crc = checksum::crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`WireError`] for anything that is not a well-formed header of this version within the size limits.
    /// After an error the stream has no known frame boundary any more.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let raw: &RawHeader = zerocopy::transmute_ref!(bytes);
        if raw.magic != FRAME_MAGIC {
            return Err(WireError::BadMagic);
        }
        if raw.version != WIRE_VERSION {
            return Err(WireError::BadVersion(raw.version));
        }
        if checksum::crc32c(&bytes[..HEADER_BYTES - 4]) != raw.header_crc.get() {
            return Err(WireError::HeaderChecksum);
        }
        let opcode = Opcode::parse(raw.opcode).ok_or(WireError::UnknownOpcode(raw.opcode))?;
        let status = Status::parse(raw.status).ok_or(WireError::UnknownStatus(raw.status))?;
        if raw.flags & !flags::KNOWN != 0 {
            return Err(WireError::UnknownFlags(raw.flags));
        }
        let header = Self {
            opcode,
            status,
            flags: raw.flags,
            request: raw.request.get(),
            region: raw.region.get(),
            arg: raw.arg.get(),
            table_len: raw.table_len.get(),
            bulk_len: raw.bulk_len.get(),
            table_crc: raw.table_crc.get(),
        };
        if header.table_len as usize > MAX_TABLE_BYTES {
            return Err(WireError::TableTooLong(header.table_len));
        }
        if header.bulk_len as usize > MAX_BULK_BYTES {
            return Err(WireError::BulkTooLong(header.bulk_len));
        }
        Ok(header)
    }

    /// Checks the table against the header that came before it.
    ///
    /// # Errors
    /// [`WireError::TableLength`] or [`WireError::TableChecksum`].
    pub fn check_table(&self, table: &[u8]) -> Result<(), WireError> {
        if table.len() != self.table_len as usize {
            return Err(WireError::TableLength);
        }
        if table_crc(table) != self.table_crc {
            return Err(WireError::TableChecksum);
        }
        Ok(())
    }

    /// Bytes of the whole frame.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        HEADER_BYTES + self.table_len as usize + self.bulk_len as usize
    }
}

/// The checksum of a table in headers.
#[must_use]
pub fn table_crc(table: &[u8]) -> u32 {
    if table.is_empty() { 0 } else { checksum::crc32c(table) }
}

/// The checksum of 4096 zeroes.
pub const ZERO_PAGE_CRC: u32 = 0x98f9_4189;

/// The checksum of a page in tables: CRC-32C of its 4096 plain bytes; the zero page, which does not travel,
/// has 0.
#[must_use]
pub fn page_crc(page: &[u8]) -> u32 {
    checksum::crc32c(page)
}

/// Appends header and table to `out`, with lengths and checksum filled in. `bulk_len` bytes must follow on
/// the wire.
///
/// # Panics
/// If table or bulk exceed the limits: a caller must not send more.
pub fn encode_frame(out: &mut Vec<u8>, header: Header, table: &[u8], bulk_len: usize) {
    assert!(
        table.len() <= MAX_TABLE_BYTES && bulk_len <= MAX_BULK_BYTES,
        "a frame of {} + {bulk_len} bytes exceeds the limits",
        table.len()
    );
    let table_len = u32::try_from(table.len()).expect("bounded above");
    let bulk_len = u32::try_from(bulk_len).expect("bounded above");
    let header = Header { table_len, bulk_len, table_crc: table_crc(table), ..header };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(table);
}

/// Appends an error reply with a readable text. The text is cut to [`MAX_MESSAGE_BYTES`].
pub fn encode_error(out: &mut Vec<u8>, reply: Header, message: &str) {
    let mut end = message.len().min(MAX_MESSAGE_BYTES);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    encode_frame(out, reply, &message.as_bytes()[..end], 0);
}

/// The text of an error reply, with anything unprintable replaced: it came from a peer and goes to a terminal
/// or a log.
#[must_use]
pub fn parse_message(table: &[u8]) -> String {
    let end = table.len().min(MAX_MESSAGE_BYTES);
    String::from_utf8_lossy(&table[..end]).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Whether a page index may appear on the wire.
#[must_use]
pub fn page_in_range(page: PageIndex) -> bool {
    page.0 < MAX_PAGE_INDEX
}

/// Reads fixed-size fields off the front of a table.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(WireError::TableLength)?;
        self.rest = rest;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(WireError::TableLength)?;
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    /// As many bytes as the number of 16 bits before them says.
    pub(crate) fn counted(&mut self) -> Result<&'a [u8], WireError> {
        let len = self.u16()?;
        self.take(len.into())
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(crate) fn end(&self) -> Result<(), WireError> {
        if self.rest.is_empty() { Ok(()) } else { Err(WireError::TableLength) }
    }
}

/// Whether a queue or published memory may have this name. One that is known otherwise may have none.
#[must_use]
pub fn is_name(name: &str) -> bool {
    name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control)
}

/// Appends an entry of a list to a table: numbers, and a name behind its length. False if there is no room.
fn push_listed(numbers: &[u8], name: &str, out: &mut Vec<u8>) -> bool {
    let len = u16::try_from(name.len()).expect("at most MAX_NAME_BYTES").to_le_bytes();
    if out.len() + numbers.len() + len.len() + name.len() > MAX_TABLE_BYTES {
        return false;
    }
    [numbers, &len, name.as_bytes()].iter().for_each(|part| out.extend_from_slice(part));
    true
}

/// The entries of a list.
fn parse_list<'a, T>(
    table: &'a [u8],
    mut parse: impl FnMut(&mut Reader<'a>) -> Result<T, WireError>,
) -> Result<Vec<T>, WireError> {
    let (mut reader, mut all) = (Reader::new(table), Vec::new());
    while !reader.rest().is_empty() {
        all.push(parse(&mut reader)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_header() -> impl Strategy<Value = Header> {
        let op = (0..Opcode::ALL.len()).prop_map(|i| Opcode::ALL[i]);
        let status = (0..Status::ALL.len()).prop_map(|i| Status::ALL[i]);
        let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>());
        (op, status, 0..=1u8, numbers, 0..=16384u32, 0..=2097152u32).prop_map(
            |(opcode, status, flags, (request, region, arg, table_crc), table_len, bulk_len)| Header {
                opcode,
                status,
                flags,
                request,
                region,
                arg,
                table_len,
                bulk_len,
                table_crc,
            },
        )
    }

    proptest! {
        #[test]
        fn a_header_comes_back_as_it_was(header in any_header()) {
            prop_assert_eq!(Header::parse(&header.encode()), Ok(header));
        }

        #[test]
        fn a_header_with_one_flipped_bit_is_refused(header in any_header(), bit in 0..HEADER_BYTES * 8) {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::parse(&bytes).is_err());
        }

        #[test]
        fn arbitrary_bytes_never_parse_as_a_header(bytes in any::<[u8; HEADER_BYTES]>()) {
            prop_assert!(Header::parse(&bytes).is_err());
        }
    }

    fn with_crc(mut bytes: [u8; HEADER_BYTES]) -> [u8; HEADER_BYTES] {
        let crc = checksum::crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn every_opcode_and_status_is_in_the_document() {
        let document = include_str!("../../../docs/reference/wire.md");
        let opcodes = Opcode::ALL.map(|opcode| format!("| {} {opcode:?} |", opcode as u8));
        let statuses = Status::ALL.map(|status| format!("| {} {status:?} |", status as u8));
        let is_missing = |row: &&String| !document.lines().any(|line| line.starts_with(row.as_str()));
        let missing: Vec<&String> = opcodes.iter().chain(&statuses).filter(is_missing).collect();
        assert!(missing.is_empty(), "docs/reference/wire.md lacks {missing:?}");
    }

    /// Headers with the right checksum but invalid content, as a hostile peer would send.
    #[test]
    fn well_sealed_nonsense_is_named_for_what_it_is() {
        let good = Header::request(Opcode::Get, 7).encode();
        let change = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            Header::parse(&with_crc(bytes))
        };
        assert_eq!(change(0, b'X'), Err(WireError::BadMagic));
        assert_eq!(change(4, 9), Err(WireError::BadVersion(9)));
        assert_eq!(change(5, 0), Err(WireError::UnknownOpcode(0)));
        assert_eq!(change(5, 99), Err(WireError::UnknownOpcode(99)));
        assert_eq!(change(6, 200), Err(WireError::UnknownStatus(200)));
        assert_eq!(change(7, 4), Err(WireError::UnknownFlags(4)));
        assert_eq!(change(35, 1), Err(WireError::TableTooLong(1 << 24)));
        assert_eq!(change(39, 1), Err(WireError::BulkTooLong(1 << 24)));
    }

    #[test]
    fn the_documented_bytes_of_a_header_are_these() {
        let header = Header {
            opcode: Opcode::Put,
            status: Status::PoolFull,
            flags: flags::REPLY,
            request: 0x0102_0304_0506_0708,
            region: 2,
            arg: 3,
            table_len: 0x10,
            bulk_len: 0x1000,
            table_crc: 0xaabb_ccdd,
        };
        let bytes = header.encode();
        let mut want = Vec::from(*b"RPf1\x01\x09\x01\x01");
        want.extend([8, 7, 6, 5, 4, 3, 2, 1]);
        want.extend([2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        want.extend([0x10, 0, 0, 0, 0, 0x10, 0, 0, 0xdd, 0xcc, 0xbb, 0xaa]);
        assert_eq!(bytes[..44], want[..]);
    }

    #[test]
    fn a_damaged_or_cut_table_is_refused() {
        let mut out = Vec::new();
        encode_frame(&mut out, Header::request(Opcode::Discard, 1), b"sixteen bytes...", 0);
        let header = Header::parse(out[..HEADER_BYTES].try_into().unwrap()).unwrap();
        assert_eq!(header.check_table(&out[HEADER_BYTES..]), Ok(()));
        assert_eq!(header.check_table(&out[HEADER_BYTES + 1..]), Err(WireError::TableLength));
        out[HEADER_BYTES] ^= 1;
        assert_eq!(header.check_table(&out[HEADER_BYTES..]), Err(WireError::TableChecksum));
    }

    #[test]
    fn error_texts_are_cut_at_a_character_and_lose_control_codes() {
        let mut out = Vec::new();
        let reply = Header::request(Opcode::Get, 1).reply(Status::BadRequest);
        encode_error(&mut out, reply, &"ä".repeat(1000));
        assert_eq!(out.len(), HEADER_BYTES + MAX_MESSAGE_BYTES);
        assert_eq!(parse_message(&out[HEADER_BYTES..]), "ä".repeat(512));
        assert_eq!(parse_message(b"a\x1b[31m\xff"), "a [31m\u{fffd}");
    }
}
