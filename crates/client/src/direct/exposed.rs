//! Memory that a server on this machine reaches by itself ([`rampool_pinning::keys`]).
//!
//! What is read into ordinary memory through rings is copied twice, once by each process. Memory that is
//! *exposed* is mapped by the server as well: it puts the bytes of a get right there, and takes those of a
//! put from there. The server has a key to it, and keeps that until it is taken back.

use super::{Direct, DirectError, DirectRegion, apart, both};
use crate::pool::{Job, KeyStats};
use rampool_kernel::exposed::ExposedMemory;
use rampool_wire::layout::{Layout, LayoutError};
use rampool_wire::units::OS_PAGE_BYTES;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

/// Memory that the server of a [`Direct`] on this machine may write to and read from, while an operation that
/// names it is under way.
///
/// A forked child does not have it: an access there is a SIGSEGV. It belongs to one thread at a time.
#[derive(Debug)]
pub struct Exposed {
    pub(super) memory: Arc<ExposedMemory>,
    bytes: usize,
    /// One thread: no other reads it while bytes are put there.
    _one_thread: PhantomData<Cell<()>>,
}

impl Exposed {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its first byte; the address stays for as long as it lives. For [`Direct::get_layout_at`] and its like,
    /// and for programs that compute in place. No reference is to be made to what an operation under way puts
    /// there.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.start()
    }

    /// Copies bytes out, from `at` on.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(
            at <= self.bytes && into.len() <= self.bytes - at,
            "{} bytes from {at} on, of {}",
            into.len(),
            self.bytes
        );
        self.memory.read(at, into);
    }

    /// Copies bytes in, from `at` on.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(
            at <= self.bytes && bytes.len() <= self.bytes - at,
            "{} bytes from {at} on, of {}",
            bytes.len(),
            self.bytes
        );
        self.memory.write(at, bytes);
    }

    /// The address of `len` bytes from `at` on.
    fn part(&self, at: usize, len: u64) -> Result<*mut u8, DirectError> {
        let len = usize::try_from(len).map_err(|_| LayoutError::TooLarge)?;
        let fits = at.checked_add(len).is_some_and(|end| end <= self.bytes);
        if fits {
            return Ok(self.as_ptr().wrapping_add(at));
        }
        let end = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        Err(LayoutError::OutOfBounds {
            low: end(at),
            high: end(at.saturating_add(len)),
            bytes: self.bytes as u64,
        }
        .into())
    }
}

impl Direct {
    /// Makes `bytes` bytes of memory, all zero, and gives the key to the first server that is reached through
    /// shared memory ([`rampool_net::transport::Means::RINGS`]). Where there is none, or it takes no more (64
    /// memories and 256 MiB for each connection), the memory is as any other ([`Direct::is_exposed`]). Blocks
    /// until the server has answered.
    ///
    /// # Errors
    /// [`DirectError::Memory`].
    pub fn expose(&mut self, bytes: usize) -> Result<Exposed, DirectError> {
        let pages = bytes.max(1).checked_next_multiple_of(OS_PAGE_BYTES).ok_or(LayoutError::TooLarge)?;
        Ok(Exposed { memory: self.pool.expose(pages)?, bytes, _one_thread: PhantomData })
    }

    /// Whether a server has a key to this memory now. False between a break of its connection and the
    /// reconnect.
    #[must_use]
    pub fn is_exposed(&self, memory: &Exposed) -> bool {
        self.pool.is_exposed(&memory.memory)
    }

    /// Takes the key back. Blocks until the server has said that it touches the memory no more, or until it
    /// is lost and the bytes are in other memory at the same addresses. Memory that is dropped is withdrawn
    /// by itself, with the next [`Direct::expose`] at the latest.
    ///
    /// # Errors
    /// [`DirectError::Pool`] where this process's sockets cannot be watched any more.
    pub fn withdraw(&mut self, memory: &Exposed) -> Result<(), DirectError> {
        Ok(self.pool.withdraw(&memory.memory)?)
    }

    /// Reads what `there` selects from `offset` of the region on into `memory`, from its byte `at` on, one
    /// byte after the other.
    ///
    /// # Errors
    /// As [`Direct::get_layout`]; [`LayoutError::OutOfBounds`] if they reach beyond the end of the memory.
    pub fn get_into(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        memory: &Exposed,
        at: usize,
    ) -> Result<(), DirectError> {
        let address = memory.part(at, there.size())?;
        // SAFETY: within the memory, which lives longer than the call, and which no other thread uses.
        unsafe { self.move_exposed(region, offset, Job::Gather, there, address) }
    }

    /// Writes bytes of `memory`, from its byte `at` on, to what `there` selects from `offset` of the region
    /// on.
    ///
    /// # Errors
    /// As [`Direct::put_layout`]; [`LayoutError::OutOfBounds`] if they reach beyond the end of the memory.
    pub fn put_from(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        memory: &Exposed,
        at: usize,
    ) -> Result<(), DirectError> {
        let address = memory.part(at, there.size())?;
        // SAFETY: as above.
        unsafe { self.move_exposed(region, offset, Job::Scatter, there, address) }
    }

    /// # Safety
    /// As many bytes as `there` selects lie at the address, in exposed memory that no other thread uses.
    unsafe fn move_exposed(
        &mut self,
        region: DirectRegion,
        offset: u64,
        job: Job,
        there: &Layout,
        address: *mut u8,
    ) -> Result<(), DirectError> {
        let here = Layout::bytes(there.size())?;
        let (there, here) = both(region, offset, there, there.size(), &here)?;
        if job == Job::Scatter {
            apart(&there)?;
        }
        // SAFETY: the caller's promise.
        let token = unsafe { self.begin_at(region, job, &there, &here, address, true) }?;
        self.finish(token)
    }

    /// What was done by key.
    #[must_use]
    pub fn key_stats(&self) -> KeyStats {
        self.pool.key_stats()
    }
}
