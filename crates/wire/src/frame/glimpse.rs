//! A preview of what a request will read, before its checksum is verified: fit for prefetching that memory,
//! and for nothing else.
//!
//! The bytes come from a peer and may be damaged, so the preview may be anything. It is bounded, and its user
//! must be safe with any value.

use super::{HEADER_BYTES, Opcode, Piece, RawHeader, RegionId};
use crate::units::{OS_PAGE_BYTES, PageIndex};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

/// The bytes that a frame with this beginning would read: those of a `ReadPiece`, or the first page of a
/// `Get`. `None` for other frames, and for frames that are too short to tell.
#[must_use]
#[inline]
pub fn glimpse(frame: &[u8]) -> Option<(RegionId, Piece)> {
    let (raw, table) = RawHeader::ref_from_prefix(frame).ok()?;
    let piece = if raw.opcode == Opcode::ReadPiece as u8 {
        Piece::decode(raw.arg.get())
    } else if raw.opcode == Opcode::Get as u8 {
        let (first, _) = U64::read_from_prefix(table).ok()?;
        let page = PageIndex(first.get());
        (page.0 < super::MAX_PAGE_INDEX).then_some(Piece { page, within: 0, len: OS_PAGE_BYTES })
    } else {
        None
    };
    Some((RegionId(raw.region.get()), piece?))
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);

#[cfg(test)]
mod tests {
    use super::super::{Header, encode_extents, encode_frame};
    use super::*;
    use crate::units::Extent;
    use proptest::prelude::*;

    #[test]
    fn it_is_what_a_request_for_bytes_of_a_page_asks_for() {
        let piece = Piece::at(5 * OS_PAGE_BYTES as u64 + 8, 100).unwrap();
        let header = Header::request(Opcode::ReadPiece, 1).with_region(RegionId(3)).with_arg(piece.encode());
        assert_eq!(glimpse(&header.encode()), Some((RegionId(3), piece)));

        let mut frame = Vec::new();
        encode_extents(
            &mut frame,
            Header::request(Opcode::Get, 1).with_region(RegionId(4)),
            &[Extent::new(PageIndex(70), 2)],
        );
        let whole = Piece { page: PageIndex(70), within: 0, len: OS_PAGE_BYTES };
        assert_eq!(glimpse(&frame), Some((RegionId(4), whole)));
        assert_eq!(glimpse(&frame[..HEADER_BYTES]), None, "its table has not come");

        let mut frame = Vec::new();
        encode_frame(&mut frame, Header::request(Opcode::Heartbeat, 1), &[], 0);
        assert_eq!(glimpse(&frame), None);
    }

    proptest! {
        #[test]
        fn whatever_comes_it_is_within_a_page_of_a_region(
            mut frame in prop::collection::vec(any::<u8>(), 0..100), get: bool,
        ) {
            if let Some(opcode) = frame.get_mut(5) {
                *opcode = if get { Opcode::Get as u8 } else { Opcode::ReadPiece as u8 };
            }
            if let Some((_, piece)) = glimpse(&frame) {
                prop_assert_eq!(Piece::at(piece.offset(), piece.len), Some(piece));
            }
        }
    }
}
