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
            // SAFETY: within the piece, which is readable and unchanged.
            crc = checksum::crc32c_append(crc, unsafe { std::slice::from_raw_parts(piece.ptr, len) });
            piece = Piece { ptr: piece.ptr.wrapping_add(len), len: piece.len - len };
            left -= len;
        }
        tell(crc);
    }
}
