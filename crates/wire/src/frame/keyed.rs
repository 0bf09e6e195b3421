//! Tables for memory that is reached by key ([`crate::keys`]).
//!
//! ```text
//!   Expose        place u32, rights u32, generation u64, bytes u64    after its descriptor on the socket
//!   Revoke        place u32, zero u32, generation u64
//!   by key        place u32, zero u32, generation u64, offset u64     before a keyed Gather's or Scatter's
//!   rights        1 the server may read, 2 it may write, 3 both
//!
//!   Reach         what every member of the lease may do with memory that one has exposed; arg: which
//!     0 publish   place u32, zero u32, generation u64, rights u32, name
//!     1 list      after u64              reply: k times number u64, bytes u64, rights u32, n u16, name
//!     2 put       number u64, offset u64, bytes
//!     3 get       number u64, offset u64, length u32                   reply: the bytes
//! ```

use super::{Reader, WireError, is_name, parse_list, push_listed};
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
    out.extend_from_slice(&grant.key.place.to_le_bytes());
    out.extend_from_slice(&coded(grant.rights).to_le_bytes());
    out.extend_from_slice(&grant.key.generation.to_le_bytes());
    out.extend_from_slice(&grant.bytes.to_le_bytes());
}

/// Reads the table of an `Expose`.
///
/// # Errors
/// [`WireError`], also for an empty memory and for generation 0.
pub fn parse_grant(table: &[u8]) -> Result<Grant, WireError> {
    let mut reader = Reader::new(table);
    let (place, rights) = (reader.u32()?, read_rights(&mut reader)?);
    let (generation, bytes) = (reader.u64()?, reader.u64()?);
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

fn coded(rights: Rights) -> u32 {
    match rights {
        Rights::Read => 1,
        Rights::Write => 2,
        Rights::Both => 3,
    }
}

fn read_rights(reader: &mut Reader<'_>) -> Result<Rights, WireError> {
    match reader.u32()? {
        1 => Ok(Rights::Read),
        2 => Ok(Rights::Write),
        3 => Ok(Rights::Both),
        _ => Err(WireError::Reserved),
    }
}

/// Bytes that one `Reach` moves at most.
pub const MAX_REACHED_BYTES: usize = 12 * 1024;

/// A `Reach`: its argument and table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach<'a> {
    /// Let every member of the lease use memory that the server has a key to.
    Publish {
        key: Key,
        rights: Rights,
        name: &'a str,
    },
    /// Published memories with numbers above this one.
    List {
        after: u64,
    },
    Put {
        number: u64,
        offset: u64,
        bytes: &'a [u8],
    },
    Get {
        number: u64,
        offset: u64,
        len: u32,
    },
}

impl<'a> Reach<'a> {
    /// Appends the table, and gives the argument.
    pub fn encode(&self, out: &mut Vec<u8>) -> u64 {
        match self {
            Self::Publish { key, rights, name } => {
                encode_revocation(*key, out);
                out.extend_from_slice(&coded(*rights).to_le_bytes());
                out.extend_from_slice(name.as_bytes());
                0
            }
            Self::List { after } => {
                out.extend_from_slice(&after.to_le_bytes());
                1
            }
            Self::Put { number, offset, bytes } => {
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(bytes);
                2
            }
            Self::Get { number, offset, len } => {
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(&len.to_le_bytes());
                3
            }
        }
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(arg: u64, table: &'a [u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        match arg {
            0 => {
                let (key, rights) = (read_key(&mut reader)?, read_rights(&mut reader)?);
                Ok(Self::Publish { key, rights, name: read_name(reader.rest())? })
            }
            1 => {
                let after = reader.u64()?;
                reader.end().map(|()| Self::List { after })
            }
            2 => {
                let (number, offset, bytes) = (reader.u64()?, reader.u64()?, reader.rest());
                let fits = (1..=MAX_REACHED_BYTES).contains(&bytes.len());
                if fits { Ok(Self::Put { number, offset, bytes }) } else { Err(WireError::TableLength) }
            }
            3 => {
                let (number, offset, len) = (reader.u64()?, reader.u64()?, reader.u32()?);
                reader.end()?;
                let fits = (1..=MAX_REACHED_BYTES).contains(&(len as usize));
                if fits { Ok(Self::Get { number, offset, len }) } else { Err(WireError::WindowRange) }
            }
            _ => Err(WireError::Reserved),
        }
    }
}

fn read_name(bytes: &[u8]) -> Result<&str, WireError> {
    let name = std::str::from_utf8(bytes).ok();
    name.filter(|name| !name.is_empty() && is_name(name)).ok_or(WireError::BadName)
}

/// Memory that a member has published.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Published {
    /// Never used again in its lease.
    pub number: u64,
    pub bytes: u64,
    /// Of the other members.
    pub rights: Rights,
    pub name: String,
}

impl Published {
    /// Appends it to the table of an answer; false if there is no room.
    #[must_use]
    pub fn encode(&self, out: &mut Vec<u8>) -> bool {
        let numbers = [self.number, self.bytes].map(u64::to_le_bytes);
        let rights = coded(self.rights).to_le_bytes();
        push_listed(&[numbers.as_flattened(), &rights].concat(), &self.name, out)
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse_all(table: &[u8]) -> Result<Vec<Self>, WireError> {
        parse_list(table, |reader| {
            let (number, bytes, rights) = (reader.u64()?, reader.u64()?, read_rights(reader)?);
            Ok(Self { number, bytes, rights, name: read_name(reader.counted()?)?.to_owned() })
        })
    }
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

    proptest! {
        #[test]
        fn arbitrary_tables_of_published_memory_never_panic(
            arg in 0..5u64,
            table in prop::collection::vec(prop_oneof![Just(0u8), 1..4u8, any::<u8>()], 0..60),
        ) {
            if let Ok(reach) = Reach::parse(arg, &table) {
                let mut again = Vec::new();
                prop_assert_eq!((reach.encode(&mut again), &again), (arg, &table));
            }
            if let Ok(all) = Published::parse_all(&table) {
                let mut again = Vec::new();
                prop_assert!(all.iter().all(|one| one.encode(&mut again)));
                prop_assert_eq!(again, table);
            }
        }
    }

    #[test]
    fn what_members_do_with_published_memory_comes_back_as_it_was() {
        let key = Key { place: 3, generation: 9 };
        for reach in [
            Reach::Publish { key, rights: Rights::Write, name: "inbox" },
            Reach::List { after: 7 },
            Reach::Put { number: 1, offset: 4096, bytes: b"abc" },
            Reach::Get { number: 1, offset: 5, len: 12 },
        ] {
            let mut table = Vec::new();
            let arg = reach.encode(&mut table);
            assert_eq!(Reach::parse(arg, &table), Ok(reach));
            assert!(Reach::parse(4, &table).is_err());
        }
        let long = vec![0; MAX_REACHED_BYTES + 1];
        let mut table = Vec::new();
        let arg = Reach::Put { number: 1, offset: 0, bytes: &long }.encode(&mut table);
        assert_eq!(Reach::parse(arg, &table), Err(WireError::TableLength));
        let one = Published { number: 4, bytes: 8192, rights: Rights::Both, name: "inbox".into() };
        let mut table = Vec::new();
        assert!(one.encode(&mut table));
        assert_eq!(Published::parse_all(&table), Ok(vec![one]));
    }

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
