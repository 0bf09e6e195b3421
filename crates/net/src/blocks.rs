//! Checksums of the direct view's blocks, wherever their bytes lie.

use rampool_wire::checksum;
use rampool_wire::frame::Block;

use crate::transport::Piece;

/// The checksum of each block of what lies in the pieces, one after the other.
///
/// # Safety
/// The pieces are readable memory that does not change, together as long as the blocks.
pub unsafe fn block_crcs(blocks: &[Block], pieces: &[Piece], mut tell: impl FnMut(u32)) {
    let mut pieces = pieces.iter().copied();
    let mut piece = Piece { ptr: std::ptr::null(), len: 0 };
    for block in blocks {
        let (mut left, mut crc) = (block.len as usize, 0);
        while left > 0 {
            if piece.len == 0 {
                piece = pieces.next().expect("the pieces are as long as the blocks");
                continue;
            }
            let len = left.min(piece.len);
            // SAFETY: a part of a piece, which is readable and unchanged.
            crc = checksum::crc32c_append(crc, unsafe { std::slice::from_raw_parts(piece.ptr, len) });
            piece = Piece { ptr: piece.ptr.wrapping_add(len), len: piece.len - len };
            left -= len;
        }
        tell(crc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksums_are_those_of_the_bytes_wherever_the_pieces_end() {
        let bytes: Vec<u8> = (0..30_000u32).map(|n| ((n * n) >> 7).to_le_bytes()[0]).collect();
        let blocks = [1, 4095, 4097, 12_000, 9807].map(|len| Block { len, whole: false });
        let mut pieces = Vec::new();
        let mut rest = &bytes[..];
        for len in [3, 8192, 1, 10_000, 11_804] {
            let (piece, after) = rest.split_at(len);
            pieces.push(Piece { ptr: piece.as_ptr(), len });
            rest = after;
        }
        let mut wanted = Vec::new();
        let mut rest = &bytes[..];
        for block in &blocks {
            let (bytes, after) = rest.split_at(block.len as usize);
            wanted.push(checksum::crc32c(bytes));
            rest = after;
        }
        assert!(rest.is_empty());
        let mut found = Vec::new();
        // SAFETY: the pieces are within `bytes`, which nothing changes, and as long as the blocks.
        unsafe { block_crcs(&blocks, &pieces, |crc| found.push(crc)) };
        assert_eq!(found, wanted);
    }
}
