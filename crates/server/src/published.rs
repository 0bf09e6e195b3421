//! Memory that every member of the lease may use, from any machine: its owner tells the name, others put
//! bytes into it and get bytes out of it, and this server, on the owner's machine, carries that out.
//!
//! A use holds the lease's list locked, for one copy of a table's length at most. So memory that is
//! withdrawn, or whose owner's connection has ended, has no use under way.

use crate::refused::Refused;
use rampool_kernel::sealed::{SealedError, SealedMemory};
use rampool_lease::ConnectionNumber;
use rampool_wire::frame::{MemberId, Publish, Published, Reach, Rights, Status};
use std::collections::BTreeMap;

/// Of a lease.
const MOST_PUBLISHED: usize = 1024;
/// Of a member: memories, and their bytes.
const MOST_OF_A_MEMBER: usize = 64;
const MOST_BYTES: u64 = 256 << 20;

/// What the members of a lease have published.
#[derive(Default)]
pub(crate) struct PublishedMemories {
    /// The last number given.
    last: u64,
    memories: BTreeMap<u64, (Published, SealedMemory, Owner)>,
}

/// Who has published a memory: a member, at which of its places, and on which of its connections.
#[derive(Clone, Copy)]
pub(super) struct Owner {
    pub member: MemberId,
    pub place: u64,
    pub connection: ConnectionNumber,
}

impl PublishedMemories {
    /// Lists memory instead of what was at the same place. `adopt` maps so many bytes of it.
    pub(super) fn publish(
        &mut self,
        what: Publish<'_>,
        owner: Owner,
        adopt: impl FnOnce(usize) -> Result<SealedMemory, SealedError>,
    ) -> Result<(), Refused> {
        let Publish { bytes, rights, name } = what;
        self.withdraw(owner.member, owner.place);
        if self.memories.values().any(|(one, ..)| one.name == name) {
            let said = format!("there is published memory named {name:?} already");
            return Err(Refused::new(Status::NotAllowed, said));
        }
        let (count, before) = self.of(owner.member);
        let room = MOST_BYTES.checked_sub(before).is_some_and(|room| bytes <= room);
        if self.memories.len() == MOST_PUBLISHED || count == MOST_OF_A_MEMBER || !room {
            let said = format!(
                "a lease has at most {MOST_PUBLISHED} published memories, a member {MOST_OF_A_MEMBER}, of \
                 {MOST_BYTES} bytes together"
            );
            return Err(Refused::new(Status::LimitReached, said));
        }
        let memory = adopt(usize::try_from(bytes).expect("bounded above"))
            .map_err(|error| Refused::new(Status::BadRequest, error))?;
        self.last += 1;
        let published = Published { number: self.last, bytes, rights, name: name.to_owned() };
        self.memories.insert(self.last, (published, memory, owner));
        Ok(())
    }

    /// How many memories of a member there are, and their bytes.
    fn of(&self, member: MemberId) -> (usize, u64) {
        let own = self.memories.values().filter(|(.., by)| by.member == member);
        own.fold((0, 0), |(count, bytes), (one, ..)| (count + 1, bytes + one.bytes))
    }

    pub(super) fn withdraw(&mut self, member: MemberId, place: u64) {
        self.memories.retain(|_, (.., by)| (by.member, by.place) != (member, place));
    }

    /// A connection is over, and with it what it has published.
    pub(super) fn disconnected(&mut self, member: MemberId, connection: ConnectionNumber) {
        self.memories.retain(|_, (.., by)| (by.member, by.connection) != (member, connection));
    }

    /// Appends those above a number, and gives the last one if there are more.
    fn list(&self, after: u64, table: &mut Vec<u8>) -> u64 {
        let mut last = 0;
        for (number, (published, ..)) in self.memories.range(after.saturating_add(1)..) {
            if !published.encode(table) {
                return last;
            }
            last = *number;
        }
        0
    }

    /// A pointer to `len` bytes of a memory, if they may be used so. It is used while this is borrowed.
    fn find(&self, number: u64, offset: u64, len: usize, writes: bool) -> Result<*mut u8, Refused> {
        let Some((published, memory, _)) = self.memories.get(&number) else {
            let said = "this memory is published no more: it was withdrawn, or its owner has left";
            return Err(Refused::new(Status::NoSuchRegion, said));
        };
        let Published { bytes, rights, name, .. } = published;
        if *rights == if writes { Rights::Read } else { Rights::Write } {
            let what = if writes { "written to" } else { "read" };
            return Err(Refused::new(Status::NotAllowed, format!("memory {name:?} may not be {what}")));
        }
        if offset.checked_add(len as u64).is_none_or(|end| end > *bytes) {
            let said = format!("{len} bytes at {offset} exceed the {bytes} bytes of memory {name:?}");
            return Err(Refused::new(Status::BadRequest, said));
        }
        Ok(memory.span(usize::try_from(offset).expect("within a memory"), len))
    }

    /// Lists them, or puts bytes into one or gets bytes out of it. Returns the reply's argument.
    pub(super) fn reach(&self, reach: Reach<'_>, table: &mut Vec<u8>) -> Result<u64, Refused> {
        match reach {
            Reach::List { after } => Ok(self.list(after, table)),
            Reach::Put { number, offset, bytes } => {
                let to = self.find(number, offset, bytes.len(), true)?;
                // SAFETY: within our mapping of the owner's memory, which stays while the list is locked. A
                // raw copy: the owner may use it at any time.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
                Ok(0)
            }
            Reach::Get { number, offset, len } => {
                let from = self.find(number, offset, len as usize, false)?;
                table.resize(len as usize, 0);
                // SAFETY: as above; the table has as many bytes.
                unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), table.as_mut_ptr(), len as usize) };
                Ok(0)
            }
        }
    }
}
