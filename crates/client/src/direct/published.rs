//! Memory of a process that others use, perhaps from another machine: its owner publishes it by name, and
//! every member of the lease puts bytes into it and gets bytes out of it, in one hop.
//!
//! The server on the owner's machine, which has mapped the memory, carries that out. FireCluster's receivers
//! tell each other what is pinned, and are written to remotely.

use super::{Direct, DirectError};
use crate::error::{Operation, PoolError};
use crate::pool::Publishing;
use rampool_kernel::exposed::ExposedMemory;
use rampool_paging::placement::ServerIndex;
use rampool_wire::frame::{MAX_REACHED_BYTES, Opcode, Published, Reach, Rights, Status, is_name};
use rampool_wire::layout::LayoutError;
use rampool_wire::units::OS_PAGE_BYTES;
use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;

/// Requests under way at a time.
const DEPTH: usize = 32;

/// Memory of this process that the other members of the lease use ([`Direct::publish`]).
///
/// A forked child does not have it: an access there is a SIGSEGV. It belongs to one thread at a time.
#[derive(Debug)]
pub struct PublishedMemory {
    memory: Arc<ExposedMemory>,
    bytes: usize,
    _one_thread: PhantomData<Cell<()>>,
}

impl PublishedMemory {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its first byte; the address stays for as long as it lives. No reference is to be made to what others
    /// may write.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.start()
    }

    /// Copies bytes out, from `at` on.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        self.must_have(at, into.len());
        self.memory.read(at, into);
    }

    /// Copies bytes in, from `at` on.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        self.must_have(at, bytes.len());
        self.memory.write(at, bytes);
    }

    fn must_have(&self, at: usize, len: usize) {
        assert!(at <= self.bytes && len <= self.bytes - at, "{len} bytes from {at} on, of {}", self.bytes);
    }
}

/// Memory that a member of the lease has published.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteMemory {
    server: ServerIndex,
    published: Published,
}

impl RemoteMemory {
    #[must_use]
    pub fn name(&self) -> &str {
        &self.published.name
    }

    /// Whole pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.published.bytes
    }

    /// What others than its owner may do.
    #[must_use]
    pub fn rights(&self) -> Rights {
        self.published.rights
    }

    fn check(&self, at: u64, len: usize) -> Result<(), DirectError> {
        let end = at.checked_add(len as u64).ok_or(LayoutError::TooLarge)?;
        if end <= self.bytes() {
            return Ok(());
        }
        let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let (low, high) = (signed(at), signed(end));
        Err(LayoutError::OutOfBounds { low, high, bytes: self.bytes() }.into())
    }
}

impl Direct {
    /// Makes `bytes` bytes of memory, all zero, and lets every member of the lease use it, under a name. The
    /// first server that is reached through shared memory carries that out; it takes 64 memories, and 256
    /// MiB. Ends with [`Direct::withdraw`], or when this process leaves or is lost; then nothing is under way
    /// in it any more. What is dropped is withdrawn with the next call. Blocks until the server has answered.
    ///
    /// # Errors
    /// [`DirectError::Name`]; [`DirectError::NoServerHere`]; [`DirectError::Memory`];
    /// [`PoolError::Denied`], also for a name that is taken.
    pub fn publish(
        &mut self,
        bytes: usize,
        rights: Rights,
        name: &str,
    ) -> Result<PublishedMemory, DirectError> {
        if name.is_empty() || !is_name(name) {
            return Err(DirectError::Name);
        }
        let pages = bytes.max(1).checked_next_multiple_of(OS_PAGE_BYTES).ok_or(LayoutError::TooLarge)?;
        let published = self.pool.publish(pages, rights, name)?;
        let Publishing { memory, server, place, request } = published.ok_or(DirectError::NoServerHere)?;
        let answered = self.reached(server, Opcode::Publish, request);
        if answered.is_err() {
            self.pool.forget_published(server, place);
        }
        answered.map(|_| PublishedMemory { memory, bytes, _one_thread: PhantomData })
    }

    /// Takes the memory back: it is this process's alone. Blocks until the server has said that it touches
    /// the memory no more. Where it is lost, the bytes move to other memory at the same addresses.
    ///
    /// # Errors
    /// [`DirectError::Memory`] where there is none for that.
    pub fn withdraw(&mut self, memory: &PublishedMemory) -> Result<(), DirectError> {
        let Some((server, place)) = self.pool.withdrawn(&memory.memory) else { return Ok(()) };
        let request = self.pool.ask_queue(server, Opcode::Withdraw, place, &[]);
        if self.reached(server, Opcode::Withdraw, request).is_err() {
            memory.memory.detach()?;
        }
        self.pool.forget_published(server, place);
        Ok(())
    }

    /// What the members of the lease have published, at all servers.
    ///
    /// # Errors
    /// [`DirectError::Pool`].
    pub fn published(&mut self) -> Result<Vec<RemoteMemory>, DirectError> {
        let mut all = Vec::new();
        for server in 0..self.pool.server_count() {
            let server = ServerIndex(u16::try_from(server).expect("fewer than 65536 servers"));
            let mut after = 0;
            loop {
                let mut table = Vec::new();
                let arg = Reach::List { after }.encode(&mut table);
                let request = self.pool.ask_queue(server, Opcode::Reach, arg, &table);
                let (next, table) = self.reached(server, Opcode::Reach, request)?;
                let some = Published::parse_all(&table)
                    .map_err(|error| self.odd(server, Operation::Reach, error))?;
                all.extend(some.into_iter().map(|published| RemoteMemory { server, published }));
                if next <= after {
                    break;
                }
                after = next;
            }
        }
        Ok(all)
    }

    /// Writes bytes into another process's memory, from its byte `at` on. Blocks until they are all there.
    /// Pieces of 12 KiB may arrive in any order, and after a broken connection twice.
    ///
    /// # Errors
    /// [`LayoutError::OutOfBounds`]; [`PoolError::Denied`], with the reason, where writing is not allowed or
    /// the memory is published no more. Some bytes may be there then.
    pub fn put_remote(&mut self, to: &RemoteMemory, at: u64, bytes: &[u8]) -> Result<(), DirectError> {
        to.check(at, bytes.len())?;
        let number = to.published.number;
        let pieces = bytes.chunks(MAX_REACHED_BYTES).enumerate().map(|(n, bytes)| Reach::Put {
            number,
            offset: at + (n * MAX_REACHED_BYTES) as u64,
            bytes,
        });
        self.reach_all(to.server, pieces, |_| true)
    }

    /// Reads bytes of another process's memory, from its byte `at` on.
    ///
    /// # Errors
    /// As [`Direct::put_remote`].
    pub fn get_remote(&mut self, from: &RemoteMemory, at: u64, into: &mut [u8]) -> Result<(), DirectError> {
        from.check(at, into.len())?;
        let (number, bytes) = (from.published.number, into.len());
        let pieces = (0..bytes).step_by(MAX_REACHED_BYTES).map(|start| Reach::Get {
            number,
            offset: at + start as u64,
            len: u32::try_from(MAX_REACHED_BYTES.min(bytes - start)).expect("a piece"),
        });
        let mut places = into.chunks_mut(MAX_REACHED_BYTES);
        self.reach_all(from.server, pieces, |came| {
            let place = places.next().expect("a piece for each request");
            let fits = place.len() == came.len();
            if fits {
                place.copy_from_slice(came);
            }
            fits
        })
    }

    /// Makes requests, some at a time, and hands their answers on in order.
    fn reach_all<'a>(
        &mut self,
        server: ServerIndex,
        requests: impl Iterator<Item = Reach<'a>>,
        mut take: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), DirectError> {
        let (mut requests, mut under_way) = (requests.fuse(), VecDeque::new());
        loop {
            while under_way.len() < DEPTH
                && let Some(reach) = requests.next()
            {
                let mut table = Vec::new();
                let arg = reach.encode(&mut table);
                under_way.push_back(self.pool.ask_queue(server, Opcode::Reach, arg, &table));
            }
            let Some(request) = under_way.pop_front() else { return Ok(()) };
            let result = self.reached(server, Opcode::Reach, request).and_then(|(_, table)| {
                if take(&table) {
                    Ok(())
                } else {
                    Err(self.odd(server, Operation::Reach, "an answer of another length"))
                }
            });
            if result.is_err() {
                under_way.iter().for_each(|request| self.pool.forget_queue_reply(*request));
                return result;
            }
        }
    }

    /// The argument and table of an answer.
    fn reached(
        &mut self,
        server: ServerIndex,
        opcode: Opcode,
        request: u64,
    ) -> Result<(u64, Vec<u8>), DirectError> {
        let reply = self.queue_wait(server, opcode, request, None);
        let reply = reply.expect("there is an answer if there is no deadline")?;
        match reply.status {
            Status::Ok => Ok((reply.arg, reply.table)),
            _ => Err(DirectError::Pool(PoolError::Denied {
                server: self.pool.server_name(server).to_owned(),
                operation: Operation::Reach,
                message: reply.message,
            })),
        }
    }
}
