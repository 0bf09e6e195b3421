//! CRC-32C, the checksum of everything on the wire: headers, tables, pages, blocks of bytes (Castagnoli,
//! Bräuer, Herrmann, 1993; the polynomial of iSCSI).
//!
//! The writer of a page computes its checksum once; the checksum is stored with the page, and every reader
//! compares it. It is computed with the widest carry-less multiplication that the processor has (Gopal et
//! al., Intel, 2009), which takes half the time of its crc32 instruction.

use crc_fast::{CrcAlgorithm, Digest};

/// The checksum of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The checksum of bytes that have the checksum `crc`, followed by `more`.
#[must_use]
pub fn crc32c_append(crc: u32, more: &[u8]) -> u32 {
    if crc == 0 {
        // The checksum so far is that of no bytes: this is the first of several parts, or the only one.
        return crc32c(more);
    }
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(more);
    u32::try_from(digest.finalize()).expect("32 bits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn it_is_the_checksum_of_the_standard() {
        // RFC 3720, B.4, and the catalogue's check value.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&[]), 0);
    }

    proptest! {
        #[test]
        fn in_parts_it_is_that_of_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 0..5000), at: prop::sample::Index,
        ) {
            let (a, b) = bytes.split_at(at.index(bytes.len() + 1));
            // Bit by bit, as the polynomial says.
            let plainly = !bytes.iter().fold(!0u32, |crc, byte| {
                (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                    if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 }
                })
            });
            prop_assert_eq!(crc32c(&bytes), plainly);
            prop_assert_eq!(crc32c_append(crc32c(a), b), plainly);
        }
    }
}
