//! Memory that a client on this machine has exposed: bytes of answers are put there, and bytes of requests
//! taken from there, without a way through rings.
//!
//! The client's keys are kept for as long as its connection lasts ([`KeyCache`]); each is one mapping of a
//! memory file that the client has handed over. A request that names a key is checked against it, and carried
//! out, while its shard does nothing else for this connection; so a revocation that comes after it finds no
//! use under way. What is [published](super::published) other connections use too.

use super::held::Held;
use super::{Connection, End, Refused, ScratchBuffers};
use crate::shared::{Lease, Shared};
use rampool_kernel::sealed::SealedMemory;
use rampool_net::transport::Urgency;
use rampool_pinning::keys::{Access, Key, KeyCache, KeyLimits, PeerOutput, Rights, ToOwner, UseRefused};
use rampool_wire::frame::{ByKey, Header, Status, WireError, encode_frame, parse_grant, parse_revocation};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Of one connection.
const LIMITS: KeyLimits = KeyLimits { places: 64, bytes: 256 << 20 };

/// A client's keys, and the memory that they open.
pub(super) struct Exposures {
    keys: KeyCache,
    memories: BTreeMap<Key, Arc<SealedMemory>>,
    /// Those that other members of the lease may use, with their numbers there.
    published: BTreeMap<Key, (Arc<Lease>, u64)>,
}

impl Default for Exposures {
    fn default() -> Self {
        Self { keys: KeyCache::new(LIMITS), memories: BTreeMap::new(), published: BTreeMap::new() }
    }
}

/// What is before the table proper of a request that may name a key.
pub(super) fn split<'a>(header: &Header, table: &'a [u8]) -> Result<(Option<ByKey>, &'a [u8]), WireError> {
    if !header.is_by_key() {
        return Ok((None, table));
    }
    ByKey::split(table).map(|(place, table)| (Some(place), table))
}

impl From<UseRefused> for Refused {
    fn from(error: UseRefused) -> Self {
        let old = matches!(error, UseRefused::Unknown(_) | UseRefused::Stale(_));
        Refused::new(if old { Status::StaleKey } else { Status::BadRequest }, error)
    }
}

impl Exposures {
    /// Carries out a use: `work` gets the first of `len` bytes, which the client may change at any time.
    fn reach(
        &mut self,
        place: ByKey,
        len: u32,
        access: Access,
        work: impl FnOnce(*mut u8),
    ) -> Result<(), Refused> {
        let used = self.keys.begin(place.key, place.offset, len.into(), access)?;
        let offset = usize::try_from(place.offset).expect("within a memory");
        work(self.memories[&used.key()].span(offset, len as usize));
        self.keys.end(used);
        self.drain();
        Ok(())
    }

    /// Lets the members of a lease use memory. A memory has one name at a time.
    pub(super) fn publish(
        &mut self,
        lease: &Arc<Lease>,
        key: Key,
        rights: Rights,
        name: &str,
    ) -> Result<(), Refused> {
        let Some(memory) = self.memories.get(&key).cloned() else {
            return Err(UseRefused::Unknown(key).into());
        };
        self.unpublish(key);
        let number = lease.published().publish(memory, rights, name)?;
        self.published.insert(key, (lease.clone(), number));
        Ok(())
    }

    /// Returns when no other member uses it any more.
    fn unpublish(&mut self, key: Key) {
        if let Some((lease, number)) = self.published.remove(&key) {
            lease.published().withdraw(number);
        }
    }

    /// Unmaps memory that is not needed. Returns whether a revocation is answered.
    fn drain(&mut self) -> bool {
        let mut answered = false;
        while let Some(output) = self.keys.poll() {
            match output {
                PeerOutput::Drop(key) => {
                    self.unpublish(key);
                    self.memories.remove(&key);
                }
                PeerOutput::Send(ToOwner::Revoked(_)) => answered = true,
                PeerOutput::Send(ToOwner::Ask(_)) => {}
            }
        }
        answered
    }
}

impl Drop for Exposures {
    fn drop(&mut self) {
        let keys: Vec<Key> = self.published.keys().copied().collect();
        keys.into_iter().for_each(|key| self.unpublish(key));
    }
}

impl Connection {
    /// Keeps a key, and maps what was handed over with it.
    pub(super) fn expose(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let grant = match parse_grant(self.link.table()) {
            Ok(grant) => grant,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        let mut handed = self.link.take_handed();
        let memory = handed.pop();
        let surplus = !handed.is_empty();
        handed.into_iter().for_each(|fd| shared.close_elsewhere(fd));
        if surplus {
            let error = End::Protocol("more descriptors than one came with a key".to_owned());
            memory.into_iter().for_each(|fd| shared.close_elsewhere(fd));
            return Err(self.protocol_error(shared, buffers, header, error));
        }
        let result = self.membership().map(drop).and_then(|()| {
            if !self.link.takes_keys() {
                return Err(Refused::new(
                    Status::NotAllowed,
                    "memory is exposed over connections through shared memory only",
                ));
            }
            let handed = memory
                .as_ref()
                .ok_or_else(|| Refused::new(Status::BadRequest, "no memory came with the key"))?;
            let limit = |error: &dyn std::fmt::Display| Refused::new(Status::LimitReached, error);
            let bytes = usize::try_from(grant.bytes).ok().filter(|_| grant.bytes <= LIMITS.bytes);
            let bytes = bytes.ok_or_else(|| {
                limit(&format!("{} bytes are more than the {} that are kept", grant.bytes, LIMITS.bytes))
            })?;
            let memory = SealedMemory::adopt(handed.as_fd(), bytes)
                .map_err(|error| Refused::new(Status::BadRequest, error))?;
            if self.exposures.keys.granted(grant).map_err(|error| limit(&error))? {
                self.exposures.memories.insert(grant.key, Arc::new(memory));
            }
            self.exposures.drain();
            Ok(0)
        });
        // Where it was taken, it is memory, which is closed at once.
        if let (Some(fd), Err(_)) = (memory, &result) {
            shared.close_elsewhere(fd);
        }
        self.answer(shared, buffers, header, result);
        Ok(())
    }

    /// Forgets a key. No use of it is under way: each ends with the request that began it.
    pub(super) fn revoke(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let key = match parse_revocation(self.link.table()) {
            Ok(key) => key,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        self.exposures.keys.revoke(key);
        assert!(self.exposures.drain(), "a revocation is answered when nothing is under way");
        self.answer(shared, buffers, header, Ok(0));
        Ok(())
    }

    /// Puts what was gathered (`buffers.pieces`) where the client wants it, and answers with its checksums.
    pub(super) fn deliver(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        place: ByKey,
        table: &[u8],
    ) {
        let len = buffers.pieces.iter().map(|piece| piece.len).sum::<usize>();
        let len = u32::try_from(len).expect("at most MAX_DIRECT_BYTES");
        let put = self.exposures.reach(place, len, Access::Write, |mut to| {
            for piece in &buffers.pieces {
                // SAFETY: the source is a frame, or a buffer, that the caller holds; the target is within our
                // mapping of the client's memory. Raw copies: the client can write there, and compares with
                // the checksums what has arrived.
                unsafe { std::ptr::copy_nonoverlapping(piece.ptr, to, piece.len) };
                to = to.wrapping_add(piece.len);
            }
        });
        match put {
            Ok(()) => {
                buffers.head.clear();
                encode_frame(&mut buffers.head, header.reply(Status::Ok).by_key(), table, 0);
                self.link.send_head(Urgency::Demand, &buffers.head, Held::nothing());
            }
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
    }

    /// Takes the bytes of a put from where the client has them to `buffers.places`, unless it is refused
    /// already.
    pub(super) fn pick_up(&mut self, buffers: &ScratchBuffers, place: ByKey, len: u32) {
        if self.arriving.refused.is_some() {
            return;
        }
        let taken = self.exposures.reach(place, len, Access::Read, |from| {
            let mut from = from.cast_const();
            for place in &buffers.places {
                // SAFETY: the source is within our mapping of the client's memory; the target are frames just
                // taken and the staging of what arrives. Raw copies: what the client writes meanwhile is
                // noticed by the checksums, which are made of what was copied.
                unsafe { std::ptr::copy_nonoverlapping(from, place.ptr, place.len) };
                from = from.wrapping_add(place.len);
            }
        });
        if let Err(Refused { status, arg, message }) = taken {
            self.arriving.refused = Some((status, arg, message));
        }
    }
}
