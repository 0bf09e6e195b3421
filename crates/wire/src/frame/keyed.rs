//! Tables for memory that is reached by key ([`crate::keys`]).
//!
//! ```text
//!   Expose        place u32, rights u32, generation u64, bytes u64    after its descriptor on the socket
//!   Revoke        place u32, zero u32, generation u64
//!   by key        place u32, zero u32, generation u64, offset u64     before a keyed Gather's or Scatter's
//!   rights        1 the server may read, 2 it may write, 3 both
//! ```

use super::{Reader, WireError};
use crate::keys::{Grant, Key, Rights};

/// Where the bytes of a `Gather` or `Scatter` with [`super::flags::KEYED`] are, instead of on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByKey {
    pub key: Key,
    /// The first of them, as an offset in the memory.
    pub offset: u64,
}

impl ByKey {
    /// Bytes it takes in a table.
    pub const BYTES: usize = 24;

    /// Appends it; the table itself follows.
    pub fn encode(&self, out: &mut Vec<u8>) {
        encode_revocation(self.key, out);
        out.extend_from_slice(&self.offset.to_le_bytes());
    }

    /// Reads it off the front of a table, and returns the table itself.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn split(table: &[u8]) -> Result<(Self, &[u8]), WireError> {
        let mut reader = Reader::new(table);
        let key = read_key(&mut reader)?;
        let offset = reader.u64()?;
        Ok((Self { key, offset }, reader.rest()))
    }
}

/// Appends the table of an `Expose`.
pub fn encode_grant(grant: &Grant, out: &mut Vec<u8>) {
    let rights: u32 = match grant.rights {
        Rights::Read => 1,
        Rights::Write => 2,
        Rights::Both => 3,
    };
    out.extend_from_slice(&grant.key.place.to_le_bytes());
    out.extend_from_slice(&rights.to_le_bytes());
    out.extend_from_slice(&grant.key.generation.to_le_bytes());
    out.extend_from_slice(&grant.bytes.to_le_bytes());
}

/// Reads the table of an `Expose`.
///
/// # Errors
/// [`WireError`], also for an empty memory and for generation 0.
pub fn parse_grant(table: &[u8]) -> Result<Grant, WireError> {
    let mut reader = Reader::new(table);
    let (place, rights) = (reader.u32()?, reader.u32()?);
    let (generation, bytes) = (reader.u64()?, reader.u64()?);
    let rights = match rights {
        1 => Rights::Read,
        2 => Rights::Write,
        3 => Rights::Both,
        _ => return Err(WireError::Reserved),
    };
    if !reader.rest().is_empty() {
        return Err(WireError::TableLength);
    }
    if generation == 0 || bytes == 0 {
        return Err(WireError::Reserved);
    }
    Ok(Grant { key: Key { place, generation }, bytes, rights })
}

/// Appends the table of a `Revoke`.
pub fn encode_revocation(key: Key, out: &mut Vec<u8>) {
    out.extend_from_slice(&key.place.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&key.generation.to_le_bytes());
}

/// Reads the table of a `Revoke`.
///
/// # Errors
/// [`WireError`].
pub fn parse_revocation(table: &[u8]) -> Result<Key, WireError> {
    let mut reader = Reader::new(table);
    let key = read_key(&mut reader)?;
    if reader.rest().is_empty() { Ok(key) } else { Err(WireError::TableLength) }
}

fn read_key(reader: &mut Reader<'_>) -> Result<Key, WireError> {
    let (place, zero) = (reader.u32()?, reader.u32()?);
    let generation = reader.u64()?;
    if zero != 0 || generation == 0 {
        return Err(WireError::Reserved);
    }
    Ok(Key { place, generation })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_documented_bytes_are_these() {
        let key = Key { place: 0x0102_0304, generation: 5 };
        let mut out = Vec::new();
        ByKey { key, offset: 0x99 }.encode(&mut out);
        assert_eq!(out, [4, 3, 2, 1, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0x99, 0, 0, 0, 0, 0, 0, 0]);
        out.clear();
        encode_grant(&Grant { key, bytes: 4096, rights: Rights::Both }, &mut out);
        assert_eq!(out, [4, 3, 2, 1, 3, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0]);
        out.clear();
        encode_revocation(key, &mut out);
        assert_eq!(parse_revocation(&out), Ok(key));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_as_they_are_written_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let mut out = Vec::new();
            if let Ok((by_key, rest)) = ByKey::split(&bytes) {
                by_key.encode(&mut out);
                out.extend_from_slice(rest);
                prop_assert_eq!(&out, &bytes);
            }
            out.clear();
            if let Ok(grant) = parse_grant(&bytes) {
                encode_grant(&grant, &mut out);
                prop_assert_eq!(&out, &bytes);
            }
            out.clear();
            if let Ok(key) = parse_revocation(&bytes) {
                encode_revocation(key, &mut out);
                prop_assert_eq!(&out, &bytes);
            }
        }

        #[test]
        fn what_is_written_is_read(place in any::<u32>(), generation in 1u64.., bytes in 1u64.., offset in any::<u64>(), rights in 0usize..3) {
            let key = Key { place, generation };
            let grant = Grant { key, bytes, rights: [Rights::Read, Rights::Write, Rights::Both][rights] };
            let mut out = Vec::new();
            encode_grant(&grant, &mut out);
            prop_assert_eq!(parse_grant(&out), Ok(grant));
            out.push(0);
            prop_assert!(parse_grant(&out).is_err());
            out.clear();
            ByKey { key, offset }.encode(&mut out);
            out.push(7);
            prop_assert_eq!(ByKey::split(&out), Ok((ByKey { key, offset }, &[7u8][..])));
        }
    }
}
