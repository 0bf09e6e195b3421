//! Tables of the direct view: which bytes of a region, and what to do with them.
//!
//! ```text
//!   Gather        window, program                              reply: a CRC for each block; bulk: the bytes
//!   Scatter       window, CRCs, program; bulk: the bytes
//!   Accumulate    window, one CRC, program; bulk: the operands
//!   FetchOp       offset u64, operand u64, compare u64         reply: the element before
//!   Scan          window, low u64, high u64, program           reply: count u64, value 16 bytes;
//!                                                              bulk: positions, elements or groups
//!   Scan by keys  window, low u64, high u64, region of the keys u64, length of their program u16,
//!                 program of the keys, program
//!   OpenRegion    name
//!   ListRegions   name                                         reply: regions
//!   Copy          window, lease u64, token 16, region u64, length of the name u16,
//!                 length of the first program u16, name of the other server, program here, program there
//!   window        from u64, len u32, number of CRCs u32
//!   ReadPiece     no table                                     reply: no table; bulk: the bytes
//! ```
//! A program ([`crate::layout::Program`]) says which bytes in which order. The *window* is the part of them
//! that this request covers, so a long operation is cut into many requests. The bytes travel one after the
//! other, in that order.
//!
//! Checksums cover *blocks* ([`Window::blocks`]): a whole page is a block, and so is everything between two
//! of them. A whole page's checksum is the one computed when the page was stored, and is stored with it: end
//! to end, as in the paged view.

use super::{Header, LeaseId, LeaseToken, MAX_PAGE_INDEX, MAX_TABLE_BYTES, Reader, RegionId, WireError};
use super::{parse_list, push_listed};
use crate::checksum;
use crate::elements::{Combine, Kind, MAX_GROUPED, Reduced, Test, Want};
use crate::layout::{Program, Runs};
use crate::units::{OS_PAGE_BYTES, PageIndex};

/// Bytes one request may move.
pub const MAX_DIRECT_BYTES: u32 = 1 << 20;
/// Steps ([`Program::steps`]) that one request may take; for a scan, elements. Adjacent runs count one by
/// one, since each costs a step.
pub const MAX_DIRECT_STEPS: u32 = 64 * 1024;
/// Bytes a coded program may have at most, so that every table has room for it.
pub const MAX_PROGRAM_BYTES: usize = MAX_TABLE_BYTES - WINDOW_BYTES - 4 * MAX_BLOCKS - 16;
/// Blocks of a request: whole pages, and what lies between them.
const MAX_BLOCKS: usize = 2 * (MAX_DIRECT_BYTES as usize / OS_PAGE_BYTES) + 1;
const WINDOW_BYTES: usize = 16;
/// The length of a piece, less one, in the argument of a `ReadPiece`; the rest of the 64 bits is an offset
/// within the longest region.
const PIECE_LENGTH_BITS: u32 = OS_PAGE_BYTES.trailing_zeros();
const _: () = assert!(MAX_PAGE_INDEX == 1 << (64 - 2 * PIECE_LENGTH_BITS));

/// A part of a program's selection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Window {
    pub program: Program,
    /// The first of the selected bytes.
    pub from: u64,
    /// At least 1, at most [`MAX_DIRECT_BYTES`].
    pub len: u32,
}

/// A region in a list: its number, which no other one gets, its length and its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedRegion {
    pub region: RegionId,
    pub bytes: u64,
    pub name: String,
}

impl NamedRegion {
    /// Appends it to the table of a reply to `ListRegions`; false if there is no room.
    #[must_use]
    pub fn encode(&self, out: &mut Vec<u8>) -> bool {
        let numbers = [self.region.0, self.bytes].map(u64::to_le_bytes);
        push_listed(numbers.as_flattened(), &self.name, out)
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse_all(table: &[u8]) -> Result<Vec<Self>, WireError> {
        parse_list(table, |reader| {
            let (region, bytes) = (RegionId(reader.u64()?), reader.u64()?);
            let name = std::str::from_utf8(reader.counted()?).map_err(|_| WireError::BadName)?;
            Ok(Self { region, bytes, name: name.to_owned() })
        })
    }
}

/// A part of one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub page: PageIndex,
    pub within: usize,
    pub len: usize,
}

/// Bytes with a checksum of their own: a whole page, or the bytes between two whole pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    pub len: u32,
    pub whole: bool,
}

impl Piece {
    /// `len` bytes at `offset` of a region; `None` if there are none, or if they reach beyond the longest
    /// region or out of one page.
    #[must_use]
    #[inline]
    pub fn at(offset: u64, len: usize) -> Option<Self> {
        let page = PageIndex(offset / OS_PAGE_BYTES as u64);
        let within = usize::try_from(offset % OS_PAGE_BYTES as u64).expect("within a page");
        (len > 0 && len <= OS_PAGE_BYTES - within && page.0 < MAX_PAGE_INDEX).then_some(Self {
            page,
            within,
            len,
        })
    }

    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.len == OS_PAGE_BYTES
    }

    /// The first byte in the region.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.page.0 * OS_PAGE_BYTES as u64 + self.within as u64
    }

    /// The argument of a `ReadPiece`: `offset` << 12 | `len` - 1.
    #[must_use]
    #[inline]
    pub fn encode(&self) -> u64 {
        self.offset() << PIECE_LENGTH_BITS | (self.len as u64 - 1)
    }

    /// Reads a `ReadPiece`, which has neither table nor bulk.
    ///
    /// # Errors
    /// [`WireError`].
    #[inline]
    pub fn parse(header: &Header) -> Result<Self, WireError> {
        if header.table_len > 0 {
            return Err(WireError::TableLength);
        }
        if header.bulk_len > 0 {
            return Err(WireError::BulkLength);
        }
        Self::decode(header.arg).ok_or(WireError::WindowRange)
    }

    /// The piece with this argument of a `ReadPiece`, if there is one.
    #[inline]
    pub(super) fn decode(arg: u64) -> Option<Self> {
        let len = usize::try_from(arg % OS_PAGE_BYTES as u64).expect("below a page") + 1;
        Self::at(arg >> PIECE_LENGTH_BITS, len)
    }
}

/// Reads the checksum in the reply to a `ReadPiece`.
///
/// # Errors
/// [`WireError::Reserved`].
pub fn parse_piece_crc(header: &Header) -> Result<u32, WireError> {
    u32::try_from(header.arg).map_err(|_| WireError::Reserved)
}

impl Window {
    /// The runs, cut at page boundaries.
    #[must_use]
    pub fn pieces(&self) -> Pieces<'_> {
        self.pieces_of(0, self.len)
    }

    /// The pieces of `len` of its bytes behind the first `done`.
    #[must_use]
    pub fn pieces_of(&self, done: u32, len: u32) -> Pieces<'_> {
        Pieces { runs: self.program.window(self.from + u64::from(done), len.into()), offset: 0, left: 0 }
    }

    /// How many of the bytes behind the first `done` can be gone through in so many steps, or little more: at
    /// least `unit`, and a multiple of it, or all that are left.
    #[must_use]
    pub fn bytes_in(&self, done: u32, most_steps: u64, unit: u32) -> u32 {
        let left = self.len - done;
        let mut len = left;
        loop {
            let steps = self.program.steps(self.from + u64::from(done), len.into());
            if steps <= most_steps || len <= unit {
                return len;
            }
            let share = u64::from(len) * most_steps / steps;
            let share = u32::try_from(share).expect("less than a length").max(len / 8);
            len = (share / unit * unit).max(unit).min(len - 1);
        }
    }

    /// The window as a piece, if it is one without expanding the program.
    #[must_use]
    #[inline]
    pub fn only_piece(&self) -> Option<Piece> {
        let run = self.program.as_run()?;
        Piece::at(run.offset.cast_unsigned() + self.from, self.len as usize)
    }

    /// The blocks that have a checksum each: each whole page, and the bytes between.
    #[must_use]
    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        self.append_blocks(&mut blocks);
        blocks
    }

    /// Like [`Window::blocks`], into an empty vector.
    pub fn append_blocks(&self, blocks: &mut Vec<Block>) {
        const PAGE_BYTES: u64 = OS_PAGE_BYTES as u64;
        // This saves expanding a million elements, or cutting up a window shorter than a page.
        if u64::from(self.len) < PAGE_BYTES
            || self.program.longest_run().is_some_and(|longest| longest < PAGE_BYTES)
        {
            return blocks.push(Block { len: self.len, whole: false });
        }
        for piece in self.pieces() {
            let len = u32::try_from(piece.len).expect("at most a page");
            match blocks.last_mut() {
                Some(last) if !last.whole && !piece.is_whole() => last.len += len,
                _ => blocks.push(Block { len, whole: piece.is_whole() }),
            }
        }
    }

    /// Appends the table of a `Gather`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.encode_with(&[], out);
    }

    /// Appends the table of a `Scatter` or `Accumulate`.
    pub fn encode_with(&self, crcs: &[u32], out: &mut Vec<u8>) {
        self.push_head(crcs.len(), out);
        crcs.iter().for_each(|crc| out.extend_from_slice(&crc.to_le_bytes()));
        self.program.encode(out);
    }

    fn push_head(&self, crcs: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.from.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        out.extend_from_slice(&u32::try_from(crcs).expect("few blocks").to_le_bytes());
    }

    /// Reads the table of a `Gather`.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn parse(table: &[u8]) -> Result<Self, WireError> {
        let mut crcs = Vec::new();
        let window = Self::parse_with(table, &mut crcs)?;
        if crcs.is_empty() { Ok(window) } else { Err(WireError::Reserved) }
    }

    /// Reads the table of a `Scatter` or `Accumulate`; the checksums go into `crcs`, which is cleared first.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn parse_with(table: &[u8], crcs: &mut Vec<u32>) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let (from, len, count) = read_head(&mut reader)?;
        crcs.clear();
        if count as usize > MAX_BLOCKS {
            return Err(WireError::TableLength);
        }
        for _ in 0..count {
            crcs.push(reader.u32()?);
        }
        Self::finish(from, len, reader)
    }

    fn finish(from: u64, len: u32, reader: Reader<'_>) -> Result<Self, WireError> {
        let program = Program::decode(reader.rest()).map_err(|_| WireError::BadLayout)?;
        if len == 0
            || len > MAX_DIRECT_BYTES
            || from.checked_add(len.into()).is_none_or(|end| end > program.bytes())
        {
            return Err(WireError::WindowRange);
        }
        if program.bounds().0 < 0 {
            return Err(WireError::BadLayout);
        }
        let window = Self { program, from, len };
        if window.program.steps(from, len.into()) > MAX_DIRECT_STEPS.into() {
            return Err(WireError::TooManySteps);
        }
        Ok(window)
    }
}

fn read_head(reader: &mut Reader<'_>) -> Result<(u64, u32, u32), WireError> {
    Ok((reader.u64()?, reader.u32()?, reader.u32()?))
}

/// The pieces of a window, which does not reach below byte 0.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    runs: Runs<'a>,
    /// The rest of a run.
    offset: u64,
    left: u64,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        const PAGE_BYTES: u64 = OS_PAGE_BYTES as u64;
        if self.left == 0 {
            let run = self.runs.next()?;
            (self.offset, self.left) = (run.offset.cast_unsigned(), run.len);
        }
        let within = self.offset % PAGE_BYTES;
        let len = self.left.min(PAGE_BYTES - within);
        let page = PageIndex(self.offset / PAGE_BYTES);
        self.offset += len;
        self.left -= len;
        let small = |n: u64| usize::try_from(n).expect("within a page");
        Some(Piece { page, within: small(within), len: small(len) })
    }
}

/// Reads the table of a reply to `Gather`, which must have `blocks` checksums.
///
/// # Errors
/// [`WireError::TableLength`].
pub fn parse_crcs(table: &[u8], blocks: usize, crcs: &mut Vec<u32>) -> Result<(), WireError> {
    crcs.clear();
    let mut reader = Reader::new(table);
    for _ in 0..blocks {
        crcs.push(reader.u32()?);
    }
    reader.end()
}

/// An update of one element that returns the value before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FetchOp {
    pub kind: Kind,
    pub change: Change,
    /// In the region; a multiple of the element's length.
    pub offset: u64,
    /// The element's bits, in the lowest bytes.
    pub operand: u64,
}

/// How the element changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Combine(Combine),
    /// The operand, if the element's bits are these.
    IfEqual(u64),
}

impl FetchOp {
    /// Argument and table.
    #[must_use]
    pub fn encode(&self) -> (u64, Vec<u8>) {
        let (how, compare) = match self.change {
            Change::Combine(combine) => (combine as u64, 0),
            Change::IfEqual(compare) => (0, compare),
        };
        let mut out = Vec::with_capacity(24);
        for word in [self.offset, self.operand, compare] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        (self.kind as u64 | how << 8, out)
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(header: &Header, table: &[u8]) -> Result<Self, WireError> {
        let kind = parse_kind(header.arg)?;
        let mut reader = Reader::new(table);
        let (offset, operand, compare) = (reader.u64()?, reader.u64()?, reader.u64()?);
        reader.end()?;
        let change = if header.arg >> 8 == 0 {
            Change::IfEqual(compare)
        } else {
            Change::Combine(parse_combine(header.arg, kind)?)
        };
        if offset >= crate::layout::MAX_LAYOUT_BYTES || !offset.is_multiple_of(kind.bytes() as u64) {
            return Err(WireError::WindowRange);
        }
        Ok(Self { kind, change, offset, operand })
    }

    /// The element's new bits.
    #[must_use]
    pub fn apply(&self, old: u64) -> u64 {
        let bytes = self.kind.bytes();
        let mut target = old.to_le_bytes();
        match self.change {
            Change::Combine(how) => crate::elements::combine(
                self.kind,
                how,
                &mut target[..bytes],
                &self.operand.to_le_bytes()[..bytes],
            ),
            Change::IfEqual(compare) if target[..bytes] == compare.to_le_bytes()[..bytes] => {
                target = self.operand.to_le_bytes()
            }
            Change::IfEqual(_) => {}
        }
        target[bytes..].fill(0);
        u64::from_le_bytes(target)
    }
}

/// The argument of an `Accumulate`.
#[must_use]
pub fn accumulate_arg(kind: Kind, how: Combine) -> u64 {
    kind as u64 | (how as u64) << 8
}

/// Reads the argument of an `Accumulate`.
///
/// # Errors
/// [`WireError::BadElement`].
pub fn parse_accumulate_arg(arg: u64) -> Result<(Kind, Combine), WireError> {
    let kind = parse_kind(arg)?;
    Ok((kind, parse_combine(arg, kind)?))
}

/// A filter and reduction over a column.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScanRequest {
    pub kind: Kind,
    pub test: Test,
    pub want: Want,
    pub low: [u8; 8],
    pub high: [u8; 8],
    pub window: Window,
    /// Says to which group each element belongs. Then all that is counted are groups.
    pub keys: Option<Keys>,
}

/// A column of integers with a key for each element of another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Keys {
    pub kind: Kind,
    pub region: RegionId,
    pub window: Window,
}

impl ScanRequest {
    /// The argument of a request that groups elements of `kind` by keys.
    #[must_use]
    pub fn keyed_arg(kind: Kind, test: Test, keys: Kind) -> u64 {
        Self::arg(kind, test, Want::Count) | (keys as u64) << 24
    }

    /// The table of a `Scan` by keys. The two windows have as many elements, and begin with the same.
    ///
    /// # Panics
    /// If the program of the keys is too long.
    #[must_use]
    pub fn keyed_table(
        window: &Window,
        (low, high): ([u8; 8], [u8; 8]),
        (region, keys): (RegionId, &Program),
    ) -> Vec<u8> {
        let (mut program, mut out) = (Vec::new(), Vec::new());
        keys.encode(&mut program);
        window.push_head(0, &mut out);
        out.extend_from_slice(&low);
        out.extend_from_slice(&high);
        out.extend_from_slice(&region.0.to_le_bytes());
        out.extend_from_slice(&u16::try_from(program.len()).expect("bounded by the table").to_le_bytes());
        out.extend_from_slice(&program);
        window.program.encode(&mut out);
        out
    }

    /// The argument of the request.
    #[must_use]
    pub fn arg(kind: Kind, test: Test, want: Want) -> u64 {
        kind as u64 | (want as u64) << 8 | (test as u64) << 16
    }

    /// Appends the table of a `Scan`.
    pub fn encode_table(window: &Window, low: [u8; 8], high: [u8; 8], out: &mut Vec<u8>) {
        window.push_head(0, out);
        out.extend_from_slice(&low);
        out.extend_from_slice(&high);
        window.program.encode(out);
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(header: &Header, table: &[u8]) -> Result<Self, WireError> {
        let kind = parse_kind(header.arg)?;
        let byte = |shift: u32| (header.arg >> shift & 0xff) as u8;
        let want = Want::ALL.into_iter().find(|want| *want as u8 == byte(8)).ok_or(WireError::BadElement)?;
        let test = Test::ALL.into_iter().find(|test| *test as u8 == byte(16)).ok_or(WireError::BadElement)?;
        let by = match byte(24) {
            0 => None,
            _ => Some(parse_kind(header.arg >> 24)?),
        };
        if header.arg >> 32 != 0 || (by.is_some() && want != Want::Count) {
            return Err(WireError::Reserved);
        }
        if by.is_some_and(Kind::is_float) {
            return Err(WireError::BadElement);
        }
        let mut reader = Reader::new(table);
        let (from, len, zero) = read_head(&mut reader)?;
        let (low, high) = (reader.array()?, reader.array()?);
        if zero != 0 {
            return Err(WireError::Reserved);
        }
        let by = match by {
            None => None,
            Some(kind) => {
                let (region, program) = (RegionId(reader.u64()?), usize::from(reader.u16()?));
                Some((kind, region, Reader::new(reader.take(program)?)))
            }
        };
        let most = if by.is_some() { MAX_GROUPED } else { MAX_DIRECT_STEPS };
        let window = whole_elements(kind, Window::finish(from, len, reader)?, most)?;
        let keys = match by {
            None => None,
            Some((by, region, program)) => {
                let bytes = kind.bytes() as u64;
                let from = (from / bytes).checked_mul(by.bytes() as u64).ok_or(WireError::WindowRange)?;
                let len = u64::from(len) / bytes * by.bytes() as u64;
                let len = u32::try_from(len).map_err(|_| WireError::WindowRange)?;
                let window = whole_elements(by, Window::finish(from, len, program)?, most)?;
                Some(Keys { kind: by, region, window })
            }
        };
        Ok(Self { kind, test, want, low, high, window, keys })
    }
}

/// The window, if it is of whole elements, and not of too many.
fn whole_elements(kind: Kind, window: Window, most: u32) -> Result<Window, WireError> {
    let bytes = kind.bytes() as u64;
    let (from, len) = (window.from, u64::from(window.len));
    if len > u64::from(most) * bytes {
        return Err(WireError::TooManySteps);
    }
    let whole = window.program.is_aligned(bytes) && from.is_multiple_of(bytes) && len.is_multiple_of(bytes);
    if whole { Ok(window) } else { Err(WireError::WindowRange) }
}

/// A copy from one server to another: bytes `from..from + len` of each program's selection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CopyRequest {
    pub source: Window,
    pub target: Window,
    /// The other server, as its own clients name it.
    pub endpoint: String,
    /// The lease there, and the proof that the requester may use it.
    pub lease: LeaseId,
    pub token: LeaseToken,
    pub region: RegionId,
}

impl CopyRequest {
    /// The longest name of a server.
    pub const MAX_ENDPOINT_BYTES: usize = 300;
    /// Bytes that either program may have, coded.
    pub const MAX_PROGRAM_BYTES: usize = (MAX_PROGRAM_BYTES - 400) / 2;

    /// Appends the table.
    ///
    /// # Panics
    /// If the two windows differ in their position, or a name or program is too long.
    pub fn encode(&self, out: &mut Vec<u8>) {
        assert_eq!((self.source.from, self.source.len), (self.target.from, self.target.len), "one window");
        assert!(
            self.endpoint.len() <= Self::MAX_ENDPOINT_BYTES,
            "a server's name of {} bytes",
            self.endpoint.len()
        );
        let mut program = Vec::new();
        self.source.program.encode(&mut program);
        self.source.push_head(0, out);
        out.extend_from_slice(&self.lease.0.to_le_bytes());
        out.extend_from_slice(&self.token.0);
        out.extend_from_slice(&self.region.0.to_le_bytes());
        for len in [self.endpoint.len(), program.len()] {
            out.extend_from_slice(&u16::try_from(len).expect("bounded by the table").to_le_bytes());
        }
        out.extend_from_slice(self.endpoint.as_bytes());
        out.extend_from_slice(&program);
        self.target.program.encode(out);
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(table: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let (from, len, zero) = read_head(&mut reader)?;
        if zero != 0 {
            return Err(WireError::Reserved);
        }
        let (lease, token, region) =
            (LeaseId(reader.u64()?), LeaseToken(reader.array()?), RegionId(reader.u64()?));
        let (endpoint, program) = (usize::from(reader.u16()?), usize::from(reader.u16()?));
        if endpoint > Self::MAX_ENDPOINT_BYTES {
            return Err(WireError::BadName);
        }
        let endpoint =
            std::str::from_utf8(reader.take(endpoint)?).map_err(|_| WireError::BadName)?.to_owned();
        if endpoint.chars().any(char::is_control) {
            return Err(WireError::BadName);
        }
        let source = Window::finish(from, len, Reader::new(reader.take(program)?))?;
        let target = Window::finish(from, len, reader)?;
        Ok(Self { source, target, endpoint, lease, token, region })
    }
}

/// Appends the table of a reply to `Scan`.
pub fn encode_reduced(reduced: &Reduced, out: &mut Vec<u8>) {
    out.extend_from_slice(&reduced.count.to_le_bytes());
    out.extend_from_slice(&reduced.value);
}

/// Reads the table of a reply to `Scan`.
///
/// # Errors
/// [`WireError::TableLength`].
pub fn parse_reduced(table: &[u8]) -> Result<Reduced, WireError> {
    let mut reader = Reader::new(table);
    let reduced = Reduced { count: reader.u64()?, value: reader.array()? };
    reader.end()?;
    Ok(reduced)
}

fn parse_kind(arg: u64) -> Result<Kind, WireError> {
    Kind::ALL.into_iter().find(|kind| *kind as u64 == arg & 0xff).ok_or(WireError::BadElement)
}

fn parse_combine(arg: u64, kind: Kind) -> Result<Combine, WireError> {
    Combine::ALL
        .into_iter()
        .find(|how| *how as u64 == arg >> 8 && how.fits(kind))
        .ok_or(WireError::BadElement)
}

/// The checksum of a page after some of its bytes change, without reading the others: an error in them stays
/// detectable. `after`: bytes of the page behind the changed ones.
///
/// # Panics
/// If `old` and `new` are not of one length, or `after` is more than a page.
#[must_use]
pub fn patched_crc(crc: u32, old: &[u8], new: &[u8], after: usize) -> u32 {
    assert_eq!(old.len(), new.len());
    // A CRC is linear: the checksums of two pages differ by that of their difference, which is zero except
    // for these bytes.
    let difference = |block: &[u8], state: u32| !checksum::crc32c_append(!state, block);
    let mut state = 0;
    let mut mixed = [0; 64];
    for (old, new) in old.chunks(mixed.len()).zip(new.chunks(mixed.len())) {
        let mixed = &mut mixed[..old.len()];
        mixed.iter_mut().zip(old.iter().zip(new)).for_each(|(m, (a, b))| *m = a ^ b);
        state = difference(mixed, state);
    }
    crc ^ times(state, ZEROES[after])
}

/// CRC-32C's polynomial, bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;
/// Multiplying a checksum's state by `ZEROES[n]` gives the state after `n` more bytes of zeroes.
static ZEROES: [u32; OS_PAGE_BYTES + 1] = {
    let mut table = [0u32; OS_PAGE_BYTES + 1];
    table[0] = 1 << 31;
    let mut n = 0;
    while n < OS_PAGE_BYTES {
        let mut word = table[n];
        let mut bit = 0;
        while bit < 8 {
            word = (word >> 1) ^ (POLYNOMIAL & (word & 1).wrapping_neg());
            bit += 1;
        }
        n += 1;
        table[n] = word;
    }
    table
};

/// The product of two polynomials modulo CRC-32C's.
fn times(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..32).rev() {
        product ^= b & (a >> bit & 1).wrapping_neg();
        b = (b >> 1) ^ (POLYNOMIAL & (b & 1).wrapping_neg());
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Opcode, page_crc};
    use crate::layout::Layout;
    use proptest::prelude::*;

    #[test]
    fn lists_of_regions_come_back() {
        let named =
            |region, name: &str| NamedRegion { region: RegionId(region), bytes: 9, name: name.into() };
        let (mut table, all) = (Vec::new(), vec![named(1, ""), named(2, "a"), named(3, &"b".repeat(255))]);
        assert!(all.iter().all(|one| one.encode(&mut table)));
        assert_eq!(NamedRegion::parse_all(&table), Ok(all));
        assert!(
            (1..table.len())
                .all(|len| { NamedRegion::parse_all(&table[..len]).is_err() || len == 18 || len == 37 })
        );
        table.resize(MAX_TABLE_BYTES, 0);
        assert!(!named(1, "").encode(&mut table));
    }

    fn column() -> Program {
        Layout::bytes(8).unwrap().hvector(1000, 1, 4096).unwrap().placed(16, 1 << 30).unwrap()
    }

    fn table(window: &Window) -> Vec<u8> {
        let mut out = Vec::new();
        window.encode(&mut out);
        out
    }

    proptest! {
        #[test]
        fn a_patched_checksum_is_that_of_the_patched_page(
            seed: u64, at in 0..4096usize, len in 0..300usize, fill: u8,
        ) {
            let mut page: Vec<u8> =
                (0..4096u64).map(|n| (seed.wrapping_mul(n * n + 7) >> 32 & 0xff) as u8).collect();
            let before = page_crc(&page);
            let end = (at + len).min(4096);
            let old = page[at..end].to_vec();
            page[at..end].fill(fill);
            prop_assert_eq!(patched_crc(before, &old, &page[at..end], 4096 - end), page_crc(&page));
        }

        #[test]
        fn windows_come_back_as_they_were(
            from in 0..7000u64, len in 1..900u32, crcs in prop::collection::vec(any::<u32>(), 0..9),
        ) {
            let window = Window { program: column(), from, len };
            let mut out = Vec::new();
            window.encode_with(&crcs, &mut out);
            let mut came = vec![1, 2, 3];
            prop_assert_eq!(Window::parse_with(&out, &mut came), Ok(window.clone()));
            prop_assert_eq!(&came, &crcs);
            prop_assert_eq!(Window::parse(&out).is_ok(), crcs.is_empty());
            let blocks = window.blocks();
            prop_assert_eq!(blocks, vec![Block { len, whole: false }]);
            let copy = CopyRequest {
                source: window.clone(),
                target: Window { program: Program::run(5, 1 << 20).unwrap(), ..window.clone() },
                endpoint: "unix:/run/x".to_owned(),
                lease: LeaseId(from),
                token: LeaseToken([3; 16]),
                region: RegionId(7),
            };
            let mut table = Vec::new();
            copy.encode(&mut table);
            prop_assert_eq!(CopyRequest::parse(&table), Ok(copy));
            prop_assert!(CopyRequest::parse(&table[..table.len() - 1]).is_err());
            let mut scan = Vec::new();
            ScanRequest::encode_table(&window, [1; 8], [2; 8], &mut scan);
            let by = Program::run(4, 1 << 20).unwrap();
            let keyed = ScanRequest::keyed_table(&window, ([1; 8], [2; 8]), (RegionId(7), &by));
            let parse = |arg| ScanRequest::parse(&Header::request(Opcode::Scan, 1).with_arg(arg), &keyed);
            let arg = ScanRequest::keyed_arg(Kind::I64, Test::Less, Kind::U32);
            let parsed = parse(arg);
            prop_assert_eq!(parsed.is_ok(), from.is_multiple_of(8) && len.is_multiple_of(8));
            if let Ok(parsed) = parsed {
                let keys = Keys {
                    kind: Kind::U32,
                    region: RegionId(7),
                    window: Window { program: by, from: from / 2, len: len / 2 },
                };
                prop_assert_eq!((parsed.window, parsed.keys), (window.clone(), Some(keys)));
            }
            let by_floats = ScanRequest::keyed_arg(Kind::I64, Test::Less, Kind::F64);
            for arg in [arg | 1 << 32, by_floats, arg ^ 3 << 8] {
                prop_assert!(parse(arg).is_err());
            }
            let header = Header::request(Opcode::Scan, 1).with_arg(ScanRequest::arg(
                Kind::I64,
                Test::Between,
                Want::Sum,
            ));
            let parsed = ScanRequest::parse(&header, &scan);
            prop_assert_eq!(parsed.is_ok(), from.is_multiple_of(8) && len.is_multiple_of(8));
            if let Ok(parsed) = parsed {
                prop_assert_eq!(
                    (parsed.kind, parsed.test, parsed.want, parsed.window),
                    (Kind::I64, Test::Between, Want::Sum, window)
                );
            }
        }

        #[test]
        fn arbitrary_tables_never_panic(
            bytes in prop::collection::vec(prop_oneof![0..5u8, any::<u8>()], 0..80),
            arg in prop_oneof![0..0x80_ffffu64, 0..0x700_ffffu64, any::<u64>()],
        ) {
            let header = Header::request(Opcode::Scan, 1).with_arg(arg);
            if let Ok(window) = Window::parse_with(&bytes, &mut Vec::new()) {
                prop_assert_eq!(
                    window.pieces().map(|piece| piece.len as u64).sum::<u64>(),
                    u64::from(window.len)
                );
                prop_assert!(window.only_piece().is_none_or(|only| window.pieces().eq([only])));
            }
            let ask = Header::request(Opcode::ReadPiece, 1).with_arg(arg);
            if let Ok(piece) = Piece::parse(&ask) {
                prop_assert!(
                    piece.len > 0
                        && piece.within + piece.len <= OS_PAGE_BYTES
                        && piece.page.0 < MAX_PAGE_INDEX
                );
                prop_assert_eq!(piece.encode(), arg);
            }
            let _ = (
                CopyRequest::parse(&bytes),
                ScanRequest::parse(&header, &bytes),
                FetchOp::parse(&header, &bytes),
                parse_reduced(&bytes),
            );
        }
    }

    #[test]
    fn a_part_of_one_page_is_the_only_piece() {
        let only = |from, len| Window { program: Program::run(8190, 9000).unwrap(), from, len }.only_piece();
        let piece = |page, within, len| Some(Piece { page: PageIndex(page), within, len });
        assert_eq!([only(0, 2), only(0, 3), only(1, 1)], [piece(1, 4094, 2), None, piece(1, 4095, 1)]);
        assert_eq!([only(2, 4096), only(3, 4096), only(2, 4097)], [piece(2, 0, 4096), None, None]);
        let two = Layout::bytes(8).unwrap().hvector(2, 1, 64).unwrap();
        assert_eq!(
            Window { program: two.program().clone(), from: 0, len: 8 }.only_piece(),
            None,
            "not plain to see"
        );
    }

    #[test]
    fn the_documented_argument_of_a_piece_is_this() {
        let ask = |arg| Header::request(Opcode::ReadPiece, 1).with_arg(arg);
        for (page, within, len, arg) in
            [(0, 0, 1, 0), (3, 8, 4088, 0x300_8ff7), (MAX_PAGE_INDEX - 1, 0, 4096, 0xffff_ffff_ff00_0fff)]
        {
            let piece = Piece { page: PageIndex(page), within, len };
            assert_eq!((piece.encode(), Piece::parse(&ask(arg))), (arg, Ok(piece)));
        }
        assert_eq!(Piece::parse(&ask(0x300_8ff8)), Err(WireError::WindowRange), "into the next page");
        assert_eq!(Piece::parse(&Header { table_len: 1, ..ask(0) }), Err(WireError::TableLength));
        assert_eq!(Piece::parse(&Header { bulk_len: 1, ..ask(0) }), Err(WireError::BulkLength));
        assert_eq!(
            [Piece::at(0, 0), Piece::at(4090, 7), Piece::at(1 << 52, 1), Piece::at(u64::MAX, 1)],
            [None; 4]
        );
        assert_eq!(
            [parse_piece_crc(&ask(0xffff_ffff)), parse_piece_crc(&ask(1 << 32))],
            [Ok(u32::MAX), Err(WireError::Reserved)]
        );
    }

    #[test]
    fn a_whole_page_is_a_block_and_so_is_what_lies_between() {
        let window =
            |offset, len: u32| Window { program: Program::run(offset, len.into()).unwrap(), from: 0, len };
        let (page, part) = (Block { len: 4096, whole: true }, |len| Block { len, whole: false });
        assert_eq!(window(0, 8192).blocks(), [page, page]);
        assert_eq!(window(100, 4096).blocks(), [part(4096)], "two parts of pages");
        assert_eq!(window(4000, 96 + 4096 + 5).blocks(), [part(96), page, part(5)]);
        assert!(window(4000, MAX_DIRECT_BYTES).blocks().len() <= MAX_BLOCKS);
        assert_eq!(window(100, 3996).blocks(), [part(3996)]);
        // A run that continues another counts as one.
        let halves = Layout::bytes(2048).unwrap().hindexed(&[(1, 4096), (1, 6144), (1, 0)]).unwrap();
        let window = Window { program: halves.program().clone(), from: 0, len: 6144 };
        assert_eq!(window.blocks(), [page, part(2048)]);
    }

    #[test]
    fn windows_beyond_what_a_request_may_do_are_refused() {
        let parse =
            |program: Program, from, len| Window::parse(&table(&Window { program, from, len })).map(|_| ());
        assert_eq!(parse(column(), 0, 8000), Ok(()));
        assert_eq!(parse(column(), 1, 8000), Err(WireError::WindowRange));
        assert_eq!(parse(column(), u64::MAX, 8), Err(WireError::WindowRange));
        assert_eq!(parse(column(), 0, 0), Err(WireError::WindowRange));
        assert_eq!(parse(Program::run(0, 2 << 20).unwrap(), 0, MAX_DIRECT_BYTES), Ok(()));
        assert_eq!(
            parse(Program::run(0, 2 << 20).unwrap(), 0, MAX_DIRECT_BYTES + 1),
            Err(WireError::WindowRange)
        );
        assert_eq!(parse(Program::run(-1, 9).unwrap(), 0, 1), Err(WireError::BadLayout));
        let bytes = Layout::bytes(1).unwrap().hvector(1 << 20, 1, 2).unwrap().program().clone();
        assert_eq!(parse(bytes.clone(), 5, MAX_DIRECT_STEPS), Ok(()));
        assert_eq!(parse(bytes, 5, MAX_DIRECT_STEPS + 1), Err(WireError::TooManySteps));
        // A million adjacent runs cost one step once joined, but a step each while joining; and nodes around
        // each are counted, too.
        let behind_each_other = |nested: usize, count: &[u8]| {
            let program = [&[2], count, &[2], &[4, 1].repeat(nested)[..], &[1, 0, 1]].concat();
            Window::parse(&[&0u64.to_le_bytes()[..], &(1u32 << 16).to_le_bytes(), &[0; 4], &program].concat())
                .map(|_| ())
        };
        assert_eq!(behind_each_other(0, &[0x80, 0x80, 0x40]), Ok(()));
        assert_eq!(behind_each_other(14, &[0x80, 0x80, 0x40]), Err(WireError::TooManySteps));
        assert_eq!(Window::parse(&[0; 16]), Err(WireError::BadLayout));
        assert_eq!(Window::parse(&[0; 15]), Err(WireError::TableLength));
    }

    #[test]
    fn an_update_of_one_element_does_what_it_says() {
        let op = |kind, change, operand| FetchOp { kind, change, offset: 16, operand };
        let add = op(Kind::U32, Change::Combine(Combine::Sum), 5);
        assert_eq!(add.apply(u32::MAX.into()), 4, "four bytes wrap around in four bytes");
        assert_eq!(op(Kind::U64, Change::IfEqual(7), 9).apply(7), 9);
        assert_eq!(op(Kind::U64, Change::IfEqual(7), 9).apply(8), 8);
        assert_eq!(
            op(Kind::I64, Change::Combine(Combine::Min), (-3i64).cast_unsigned()).apply(4),
            (-3i64).cast_unsigned()
        );
        for op in
            [add, op(Kind::U64, Change::IfEqual(7), 9), op(Kind::F64, Change::Combine(Combine::Replace), 1)]
        {
            let (arg, table) = op.encode();
            assert_eq!(FetchOp::parse(&Header::request(Opcode::FetchOp, 1).with_arg(arg), &table), Ok(op));
        }
        let header = |arg| Header::request(Opcode::FetchOp, 1).with_arg(arg);
        assert_eq!(
            FetchOp::parse(&header(Kind::F64 as u64 | 7 << 8), &[0; 24]),
            Err(WireError::BadElement),
            "bits of a float"
        );
        assert_eq!(FetchOp::parse(&header(9), &[0; 24]), Err(WireError::BadElement));
        assert_eq!(FetchOp::parse(&header(Kind::U64 as u64), &[4; 24]), Err(WireError::WindowRange));
    }
}
