//! Tables for memory that a member of a lease publishes to the others.
//!
//! ```text
//!   Publish       rights u32, zero u32, bytes u64, name   after its descriptor; arg: its place
//!   rights        1 others may read, 2 they may write, 3 both
//!
//!   Reach         what every member of the lease may do with it; arg: which
//!     0 list      after u64              reply: k times number u64, bytes u64, rights u32, n u16, name
//!     1 put       number u64, offset u64, bytes
//!     2 get       number u64, offset u64, length u32                   reply: the bytes
//! ```

use super::{Reader, WireError, is_name, parse_list, push_listed};

/// What others than its owner may do with published memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rights {
    Read = 1,
    Write = 2,
    Both = 3,
}

impl Rights {
    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        match reader.u32()? {
            1 => Ok(Self::Read),
            2 => Ok(Self::Write),
            3 => Ok(Self::Both),
            _ => Err(WireError::Reserved),
        }
    }

    fn encode(self) -> [u8; 4] {
        (self as u32).to_le_bytes()
    }
}

/// The table of a `Publish`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Publish<'a> {
    pub rights: Rights,
    pub bytes: u64,
    pub name: &'a str,
}

impl<'a> Publish<'a> {
    /// Appends the table.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.rights.encode());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(self.name.as_bytes());
    }

    /// # Errors
    /// [`WireError`], also for an empty memory.
    pub fn parse(table: &'a [u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let (rights, zero, bytes) = (Rights::read(&mut reader)?, reader.u32()?, reader.u64()?);
        if zero != 0 || bytes == 0 {
            return Err(WireError::Reserved);
        }
        Ok(Self { rights, bytes, name: read_name(reader.rest())? })
    }
}

/// Bytes that one `Reach` moves at most.
pub const MAX_REACHED_BYTES: usize = 12 * 1024;

/// A `Reach`: its argument and table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach<'a> {
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
            Self::List { after } => {
                out.extend_from_slice(&after.to_le_bytes());
                0
            }
            Self::Put { number, offset, bytes } => {
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(bytes);
                1
            }
            Self::Get { number, offset, len } => {
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(&len.to_le_bytes());
                2
            }
        }
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(arg: u64, table: &'a [u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        match arg {
            0 => {
                let after = reader.u64()?;
                reader.end().map(|()| Self::List { after })
            }
            1 => {
                let (number, offset, bytes) = (reader.u64()?, reader.u64()?, reader.rest());
                let fits = (1..=MAX_REACHED_BYTES).contains(&bytes.len());
                if fits { Ok(Self::Put { number, offset, bytes }) } else { Err(WireError::TableLength) }
            }
            2 => {
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
        let rights = self.rights.encode();
        push_listed(&[numbers.as_flattened(), &rights].concat(), &self.name, out)
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse_all(table: &[u8]) -> Result<Vec<Self>, WireError> {
        parse_list(table, |reader| {
            let (number, bytes, rights) = (reader.u64()?, reader.u64()?, Rights::read(reader)?);
            Ok(Self { number, bytes, rights, name: read_name(reader.counted()?)?.to_owned() })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_tables_of_published_memory_never_panic(
            arg in 0..4u64,
            table in prop::collection::vec(prop_oneof![Just(0u8), 1..4u8, any::<u8>()], 0..60),
        ) {
            if let Ok(reach) = Reach::parse(arg, &table) {
                let mut again = Vec::new();
                prop_assert_eq!((reach.encode(&mut again), &again), (arg, &table));
            }
            if let Ok(publish) = Publish::parse(&table) {
                let mut again = Vec::new();
                publish.encode(&mut again);
                prop_assert_eq!(&again, &table);
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
        for reach in [
            Reach::List { after: 7 },
            Reach::Put { number: 1, offset: 4096, bytes: b"abc" },
            Reach::Get { number: 1, offset: 5, len: 12 },
        ] {
            let mut table = Vec::new();
            let arg = reach.encode(&mut table);
            assert_eq!(Reach::parse(arg, &table), Ok(reach));
            assert!(Reach::parse(3, &table).is_err());
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
        let publish = Publish { rights: Rights::Both, bytes: 4096, name: "in" };
        let mut out = Vec::new();
        publish.encode(&mut out);
        assert_eq!(out, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, b'i', b'n']);
        assert_eq!(Publish::parse(&out), Ok(publish));
        assert_eq!(Publish::parse(&out[..16]), Err(WireError::BadName));
    }
}
