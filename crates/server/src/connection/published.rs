//! Exposed memory that every member of the lease may use, from any machine: its owner tells the name, others
//! put bytes into it and get bytes out of it, and this server, on the owner's machine, carries that out.
//!
//! A use holds the lease's list locked, for one copy of a table's length at most. So memory that is
//! withdrawn, with its key or with its owner's connection, has no use under way.

use super::{Connection, End, Held, Refused, ScratchBuffers};
use crate::shared::{Lease, Shared};
use rampool_kernel::sealed::SealedMemory;
use rampool_net::transport::Urgency;
use rampool_pinning::keys::Rights;
use rampool_wire::frame::{Header, Published, Reach, Status, encode_frame};
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};

/// Of a lease.
const MOST_PUBLISHED: usize = 1024;

/// What the members of a lease have published.
#[derive(Default)]
pub(crate) struct PublishedMemories {
    /// The last number given.
    last: u64,
    memories: BTreeMap<u64, (Published, Arc<SealedMemory>)>,
}

impl Lease {
    pub(super) fn published(&self) -> MutexGuard<'_, PublishedMemories> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PublishedMemories {
    pub(super) fn publish(
        &mut self,
        memory: Arc<SealedMemory>,
        rights: Rights,
        name: &str,
    ) -> Result<u64, Refused> {
        if self.memories.values().any(|(one, _)| one.name == name) {
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
        self.memories.insert(number, (published, memory));
        Ok(number)
    }

    pub(super) fn withdraw(&mut self, number: u64) {
        self.memories.remove(&number);
    }

    /// Appends those above a number, and gives the last one if there are more.
    fn list(&self, after: u64, table: &mut Vec<u8>) -> u64 {
        let mut last = 0;
        for (number, (published, _)) in self.memories.range(after.saturating_add(1)..) {
            if !published.encode(table) {
                return last;
            }
            last = *number;
        }
        0
    }

    /// A pointer to `len` bytes of a memory, if they may be used so. It is used while this is borrowed.
    fn find(&self, number: u64, offset: u64, len: usize, writes: bool) -> Result<*mut u8, Refused> {
        let Some((published, memory)) = self.memories.get(&number) else {
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
}

impl Connection {
    pub(super) fn reach(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let mut table = std::mem::take(&mut buffers.table);
        table.clear();
        let result = match Reach::parse(header.arg, self.link.table()) {
            Ok(reach) => reached(
                self.membership.as_ref().map(|one| &one.lease),
                &mut self.exposures,
                reach,
                &mut table,
            ),
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        match result {
            Ok(arg) => {
                buffers.head.clear();
                encode_frame(&mut buffers.head, header.reply(Status::Ok).with_arg(arg), &table, 0);
                self.link.send_head(Urgency::Demand, &buffers.head, Held::nothing());
            }
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
        buffers.table = table;
        Ok(())
    }
}

fn reached(
    lease: Option<&Arc<Lease>>,
    own: &mut super::keyed::Exposures,
    reach: Reach<'_>,
    table: &mut Vec<u8>,
) -> Result<u64, Refused> {
    let lease = lease.ok_or_else(super::no_lease)?;
    match reach {
        Reach::Publish { key, rights, name } => own.publish(lease, key, rights, name).map(|()| 0),
        Reach::List { after } => Ok(lease.published().list(after, table)),
        Reach::Put { number, offset, bytes } => {
            let published = lease.published();
            let to = published.find(number, offset, bytes.len(), true)?;
            // SAFETY: within our mapping of the owner's memory, which stays while the list is locked. A raw
            // copy: the owner may use it at any time.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            Ok(0)
        }
        Reach::Get { number, offset, len } => {
            let published = lease.published();
            let from = published.find(number, offset, len as usize, false)?;
            table.resize(len as usize, 0);
            // SAFETY: as above; the table has as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), table.as_mut_ptr(), len as usize) };
            Ok(0)
        }
    }
}
