//! Tables of the data operations: which pages, how long each is on the wire, and its checksum.
//!
//! ```text
//!   Get, Discard     extents                     16 bytes each: first u64, count u32, zero u32
//!   Put              extents, page entries        8 bytes each: crc u32, length u32
//!   reply to Get     page entries, and places if agreed on (12 bytes each, see `crate::places`)
//!   reply to Put     places, if agreed on
//! ```
//! Pages follow in the order of the extents. A page's length is 4096 (plain), 0 (the zero page: no bytes
//! travel and no server keeps a frame for it) or, where compression was agreed, 1..=4095 (one LZ4 block that
//! unpacks to 4096 bytes).

use super::{Header, MAX_PAGE_INDEX, Reader, WireError};
use crate::places::{Place, push_places};
use crate::units::{Extent, OS_PAGE_BYTES, PageIndex};

/// Pages one request may name.
pub const MAX_PAGES: usize = 512;
/// Extents one request may carry: never more than pages.
pub const MAX_EXTENTS: usize = MAX_PAGES;

const EXTENT_BYTES: usize = 16;
const ENTRY_BYTES: usize = 8;

/// One page in a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageEntry {
    /// CRC-32C of the plain 4096 bytes; 0 for the zero page.
    pub crc: u32,
    /// Bytes on the wire: 0, 4096, or the compressed length.
    pub len: u32,
}

impl PageEntry {
    /// A page that is all zero.
    pub const ZERO: PageEntry = PageEntry { crc: 0, len: 0 };

    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.len == 0
    }
}

/// Appends a frame for `Get` or `Discard`.
///
/// # Panics
/// If there are no pages, more than [`MAX_EXTENTS`] extents, or (for `Get`) more than [`MAX_PAGES`] pages.
pub fn encode_extents(out: &mut Vec<u8>, header: Header, extents: &[Extent]) {
    let start = begin_frame(out);
    let pages = push_extents(out, extents);
    assert!(
        header.opcode == super::Opcode::Discard || pages <= MAX_PAGES as u64,
        "{pages} pages in one request"
    );
    end_frame(out, start, header.with_arg(extents.len() as u64), 0);
}

/// Appends the head of a `Put`; the pages' bytes, in the order of `entries`, must follow on the wire. Returns
/// how many bytes that is.
///
/// # Panics
/// If there are no pages, more than [`MAX_PAGES`], or not one entry per page.
pub fn encode_put(out: &mut Vec<u8>, header: Header, extents: &[Extent], entries: &[PageEntry]) -> usize {
    let start = begin_frame(out);
    let pages = push_extents(out, extents);
    assert!(pages <= MAX_PAGES as u64 && pages == entries.len() as u64, "one entry per page");
    let bulk = push_entries(out, entries);
    end_frame(out, start, header.with_arg(extents.len() as u64), bulk);
    bulk
}

/// Appends the head of a reply to `Get`; the pages' bytes must follow on the wire. `places`: where they lie,
/// if that was agreed on ([`crate::places`]). Returns how many bytes follow.
///
/// # Panics
/// If there are more than [`MAX_PAGES`] entries.
pub fn encode_get_reply(out: &mut Vec<u8>, reply: Header, entries: &[PageEntry], places: &[Place]) -> usize {
    assert!(entries.len() <= MAX_PAGES, "at most {MAX_PAGES} pages a reply");
    let start = begin_frame(out);
    let bulk = push_entries(out, entries);
    push_places(out, places);
    end_frame(out, start, reply, bulk);
    bulk
}

/// Reads the table of a `Get` or `Discard` into `extents` (cleared first). Returns the number of pages.
///
/// # Errors
/// [`WireError`] where the table is not exactly `header.arg` well-formed extents.
pub fn parse_extents(header: &Header, table: &[u8], extents: &mut Vec<Extent>) -> Result<usize, WireError> {
    let mut reader = Reader::new(table);
    let pages = read_extents(header, &mut reader, extents)?;
    reader.end()?;
    Ok(pages)
}

/// Reads the table of a `Put`. `compressed`: whether LZ4 was agreed. Returns the number of pages.
///
/// # Errors
/// [`WireError`] where the table is malformed or the entries do not add up to the bulk.
pub fn parse_put(
    header: &Header,
    table: &[u8],
    compressed: bool,
    extents: &mut Vec<Extent>,
    entries: &mut Vec<PageEntry>,
) -> Result<usize, WireError> {
    let mut reader = Reader::new(table);
    let pages = read_extents(header, &mut reader, extents)?;
    read_entries(header, &mut reader, pages, compressed, entries)?;
    Ok(pages)
}

/// Reads the table of a reply to a `Get` of `pages` pages.
///
/// # Errors
/// [`WireError`] where the table is malformed or the entries do not add up to the bulk.
pub fn parse_get_reply(
    header: &Header,
    table: &[u8],
    pages: usize,
    compressed: bool,
    entries: &mut Vec<PageEntry>,
) -> Result<(), WireError> {
    let mut reader = Reader::new(table);
    read_entries(header, &mut reader, pages, compressed, entries)
}

fn begin_frame(out: &mut Vec<u8>) -> usize {
    let start = out.len();
    out.resize(start + super::HEADER_BYTES, 0);
    start
}

fn end_frame(out: &mut [u8], start: usize, header: Header, bulk: usize) {
    // The table was written in place; the header takes its length and checksum from it.
    let (head, table) = out[start..].split_at_mut(super::HEADER_BYTES);
    let table_len = u32::try_from(table.len()).expect("tables are bounded by MAX_PAGES");
    let bulk_len = u32::try_from(bulk).expect("bulk is bounded by MAX_PAGES");
    head.copy_from_slice(
        &Header { table_len, bulk_len, table_crc: super::table_crc(table), ..header }.encode(),
    );
}

fn push_extents(out: &mut Vec<u8>, extents: &[Extent]) -> u64 {
    let pages: u64 = extents.iter().map(|e| u64::from(e.count)).sum();
    assert!(pages > 0 && extents.len() <= MAX_EXTENTS, "{pages} pages in {} extents", extents.len());
    for extent in extents {
        out.extend_from_slice(&extent.first.0.to_le_bytes());
        out.extend_from_slice(&extent.count.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
    }
    pages
}

fn push_entries(out: &mut Vec<u8>, entries: &[PageEntry]) -> usize {
    let mut bulk = 0;
    for entry in entries {
        out.extend_from_slice(&entry.crc.to_le_bytes());
        out.extend_from_slice(&entry.len.to_le_bytes());
        bulk += entry.len as usize;
    }
    bulk
}

fn read_extents(
    header: &Header,
    reader: &mut Reader<'_>,
    extents: &mut Vec<Extent>,
) -> Result<usize, WireError> {
    extents.clear();
    let count = usize::try_from(header.arg).map_err(|_| WireError::TooManyPages)?;
    if count == 0 {
        return Err(WireError::NoPages);
    }
    if count > MAX_EXTENTS {
        return Err(WireError::TooManyPages);
    }
    let mut rest = reader.take(count * EXTENT_BYTES)?;
    let mut pages = 0;
    while let Some((bytes, tail)) = rest.split_first_chunk::<EXTENT_BYTES>() {
        rest = tail;
        let mut fields = Reader::new(bytes);
        let (first, count, zero) = (fields.u64()?, fields.u32()?, fields.u32()?);
        if zero != 0 {
            return Err(WireError::Reserved);
        }
        if count == 0 {
            return Err(WireError::NoPages);
        }
        if first >= MAX_PAGE_INDEX || first + u64::from(count) > MAX_PAGE_INDEX {
            return Err(WireError::ExtentRange);
        }
        // `Discard` moves no pages, so its extents may be as long as a region.
        if header.opcode != super::Opcode::Discard {
            pages += count as usize;
            if pages > MAX_PAGES {
                return Err(WireError::TooManyPages);
            }
        }
        extents.push(Extent::new(PageIndex(first), count));
    }
    Ok(pages)
}

fn read_entries(
    header: &Header,
    reader: &mut Reader<'_>,
    pages: usize,
    compressed: bool,
    entries: &mut Vec<PageEntry>,
) -> Result<(), WireError> {
    entries.clear();
    let mut bulk = 0u64;
    for _ in 0..pages {
        let (crc, len) = (reader.u32()?, reader.u32()?);
        let allowed =
            len == 0 || len as usize == OS_PAGE_BYTES || (compressed && (len as usize) < OS_PAGE_BYTES);
        if !allowed {
            return Err(WireError::PageLength);
        }
        if len == 0 && crc != 0 {
            return Err(WireError::Reserved);
        }
        bulk += u64::from(len);
        entries.push(PageEntry { crc, len });
    }
    reader.end()?;
    const { assert!(ENTRY_BYTES * MAX_PAGES + EXTENT_BYTES * MAX_EXTENTS <= super::MAX_TABLE_BYTES) };
    if bulk != u64::from(header.bulk_len) {
        return Err(WireError::BulkLength);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{HEADER_BYTES, Opcode, Status};
    use proptest::prelude::*;

    fn any_extents() -> impl Strategy<Value = Vec<Extent>> {
        prop::collection::vec((0..MAX_PAGE_INDEX - 64, 1..8u32), 1..60).prop_map(|list| {
            list.into_iter().map(|(first, count)| Extent::new(PageIndex(first), count)).collect()
        })
    }

    fn any_entry() -> impl Strategy<Value = PageEntry> {
        prop_oneof![
            Just(PageEntry::ZERO),
            any::<u32>().prop_map(|crc| PageEntry { crc, len: 4096 }),
            (any::<u32>(), 1..4096u32).prop_map(|(crc, len)| PageEntry { crc, len }),
        ]
    }

    fn split(frame: &[u8]) -> (Header, &[u8]) {
        let header = Header::parse(frame[..HEADER_BYTES].try_into().unwrap()).unwrap();
        header.check_table(&frame[HEADER_BYTES..]).unwrap();
        (header, &frame[HEADER_BYTES..])
    }

    proptest! {
        #[test]
        fn a_put_comes_back_as_it_was(
            extents in any_extents(), pool in prop::collection::vec(any_entry(), 480),
        ) {
            let pages = usize::try_from(crate::units::total_pages(&extents)).unwrap();
            let mut out = Vec::new();
            let bulk = encode_put(&mut out, Header::request(Opcode::Put, 1), &extents, &pool[..pages]);
            let (header, table) = split(&out);
            prop_assert_eq!(header.bulk_len as usize, bulk);
            let (mut got_extents, mut got_entries) = (Vec::new(), Vec::new());
            prop_assert_eq!(parse_put(&header, table, true, &mut got_extents, &mut got_entries), Ok(pages));
            prop_assert_eq!(got_extents, extents);
            prop_assert_eq!(&got_entries[..], &pool[..pages]);
            // Without agreed compression the same table is valid only when no page is compressed.
            let plain = pool[..pages].iter().all(|e| e.len == 0 || e.len == 4096);
            let refused = parse_put(&header, table, false, &mut Vec::new(), &mut Vec::new()).is_err();
            prop_assert_eq!(refused, !plain);
        }

        #[test]
        fn a_get_and_its_reply_come_back_as_they_were(
            extents in any_extents(), pool in prop::collection::vec(any_entry(), 480),
        ) {
            let mut out = Vec::new();
            encode_extents(&mut out, Header::request(Opcode::Get, 1), &extents);
            let (header, table) = split(&out);
            let mut got = Vec::new();
            let pages = parse_extents(&header, table, &mut got).unwrap();
            prop_assert_eq!(got, extents);
            let mut out = Vec::new();
            encode_get_reply(&mut out, header.reply(Status::Ok), &pool[..pages], &[]);
            let (reply, table) = split(&out);
            let mut entries = Vec::new();
            prop_assert_eq!(parse_get_reply(&reply, table, pages, true, &mut entries), Ok(()));
            prop_assert_eq!(&entries[..], &pool[..pages]);
            prop_assert_eq!(
                parse_get_reply(&reply, table, pages + 1, true, &mut entries),
                Err(WireError::TableLength)
            );
            prop_assert_eq!(
                parse_get_reply(&reply, table, pages - 1, true, &mut entries),
                Err(WireError::TableLength)
            );
        }

        #[test]
        fn arbitrary_tables_never_panic_and_what_they_yield_is_bounded(
            table in prop::collection::vec(any::<u8>(), 0..600),
            count in prop_oneof![0..40u64, any::<u64>()],
            bulk_len: u32,
            compressed: bool,
        ) {
            let header = Header { bulk_len, ..Header::request(Opcode::Put, 1).with_arg(count) };
            let (mut extents, mut entries) = (Vec::new(), Vec::new());
            if parse_put(&header, &table, compressed, &mut extents, &mut entries).is_ok() {
                prop_assert!(entries.len() <= MAX_PAGES);
                prop_assert!(extents.iter().all(|e| e.end().0 <= MAX_PAGE_INDEX && e.count > 0));
                prop_assert_eq!(entries.iter().map(|e| e.len).sum::<u32>(), bulk_len);
            }
            let _ = parse_extents(&header, &table, &mut extents);
        }
    }

    fn table(first: u64, count: u32, reserved: u32) -> Vec<u8> {
        [&first.to_le_bytes()[..], &count.to_le_bytes(), &reserved.to_le_bytes()].concat()
    }

    #[test]
    fn malformed_extents_are_named_for_what_they_are() {
        let get = |arg, table: &[u8]| {
            parse_extents(&Header::request(Opcode::Get, 1).with_arg(arg), table, &mut Vec::new())
        };
        assert_eq!(get(0, &[]), Err(WireError::NoPages));
        assert_eq!(get(u64::MAX, &[]), Err(WireError::TooManyPages));
        assert_eq!(get(2, &table(0, 1, 0)), Err(WireError::TableLength));
        assert_eq!(get(1, &table(0, 0, 0)), Err(WireError::NoPages));
        assert_eq!(get(1, &table(0, 1, 1)), Err(WireError::Reserved));
        assert_eq!(get(1, &table(MAX_PAGE_INDEX - 1, 2, 0)), Err(WireError::ExtentRange));
        assert_eq!(get(1, &table(u64::MAX, u32::MAX, 0)), Err(WireError::ExtentRange));
        assert_eq!(get(1, &table(0, 513, 0)), Err(WireError::TooManyPages));
        assert_eq!(get(1, &table(0, 512, 0)), Ok(512));
        let discard = Header::request(Opcode::Discard, 1).with_arg(1);
        assert_eq!(
            parse_extents(&discard, &table(0, u32::MAX, 0), &mut Vec::new()),
            Ok(0),
            "a discard may span a region"
        );
    }

    #[test]
    fn page_lengths_must_add_up() {
        let mut out = Vec::new();
        encode_put(
            &mut out,
            Header::request(Opcode::Put, 1),
            &[Extent::page(PageIndex(3))],
            &[PageEntry { crc: 1, len: 4096 }],
        );
        let (header, table) = split(&out);
        let parse = |header: &Header| parse_put(header, table, false, &mut Vec::new(), &mut Vec::new());
        assert_eq!(parse(&header), Ok(1));
        assert_eq!(parse(&Header { bulk_len: 4095, ..header }), Err(WireError::BulkLength));
    }
}
