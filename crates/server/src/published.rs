//! Exposed memory that every member of the lease may use, from any machine: its owner tells the name, others
//! put bytes into it and get bytes out of it, and this server, on the owner's machine, carries that out.
//!
//! A use holds the lease's list locked, for one copy of a table's length at most. So memory that is
//! withdrawn, with its key or with its owner's connection, has no use under way.

use crate::refused::Refused;
use rampool_kernel::sealed::SealedMemory;
use rampool_lease::ConnectionNumber;
use rampool_pinning::keys::Rights;
use rampool_wire::frame::{MemberId, Published, Reach, Status};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Of a lease.
const MOST_PUBLISHED: usize = 1024;

/// What the members of a lease have published.
#[derive(Default)]
pub(crate) struct PublishedMemories {
    /// The last number given.
    last: u64,
    memories: BTreeMap<u64, (Published, Arc<SealedMemory>, Owner)>,
}

/// Who has published a memory: a member, and on which of its connections.
pub(super) type Owner = (MemberId, ConnectionNumber);

impl PublishedMemories {
    pub(super) fn publish(
        &mut self,
        memory: Arc<SealedMemory>,
        rights: Rights,
        name: &str,
        owner: Owner,
    ) -> Result<u64, Refused> {
        // The end of an earlier connection may be noticed later than what comes on the next one.
        self.memories.retain(|_, (one, _, by)| one.name != name || by.0 != owner.0 || by.1 == owner.1);
        if self.memories.values().any(|(one, ..)| one.name == name) {
            let said = format!("there is published memory named {name:?} already");
            return Err(Refused::new(Status::NotAllowed, said));
        }
        if self.memories.len() == MOST_PUBLISHED {
            let said = format!("the lease has {MOST_PUBLISHED} published memories, which is the most");
            return Err(Refused::new(Status::LimitReached, said));
        }
        self.last += 1;
        let (number, bytes) = (self.last, memory.bytes() as u64);
        let published = Published { number, bytes, rights, name: name.to_owned() };
        self.memories.insert(number, (published, memory, owner));
        Ok(number)
    }

    pub(super) fn withdraw(&mut self, number: u64) {
        self.memories.remove(&number);
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
            Reach::Publish { .. } => unreachable!("its owner publishes it"),
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
