//! Memory that a client on this machine has exposed: bytes of answers are put there, and bytes of requests
//! taken from there, without a way through rings.
//!
//! The client's keys are kept for as long as its connection lasts ([`KeyCache`]); each is one mapping of a
//! memory file that the client has handed over. A request that names a key is checked against it, and carried
//! out, while its shard does nothing else for this connection; so a revocation that comes after it finds no
//! use under way. What is [published](crate::published) other connections use too.

use super::{Connection, End, Fail, Handled, Membership, Service, no_lease, tell};
use crate::lease::Lease;
use crate::refused::Refused;
use rampool_kernel::sealed::SealedMemory;
use rampool_net::transport::{Piece, PieceMut};
use rampool_pinning::keys::{
    Access, Grant, Key, KeyCache, KeyLimits, PeerOutput, Rights, ToOwner, UseRefused,
};
use rampool_wire::frame::{ByKey, Header, Reach, Status, WireError, parse_grant, parse_revocation};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
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

impl Exposures {
    /// Carries out a use: `work` gets the first of `len` bytes, which the client may change at any time.
    fn reach(
        &mut self,
        place: ByKey,
        len: usize,
        access: Access,
        work: impl FnOnce(*mut u8),
    ) -> Result<(), Refused> {
        let used = self.keys.begin(place.key, place.offset, len as u64, access)?;
        let offset = usize::try_from(place.offset).expect("within a memory");
        work(self.memories[&used.key()].span(offset, len));
        self.keys.end(used);
        self.drain();
        Ok(())
    }

    /// Puts bytes where the client wants them.
    pub(super) fn put(&mut self, place: ByKey, pieces: &[Piece]) -> Result<(), Refused> {
        let len = pieces.iter().map(|piece| piece.len).sum();
        self.reach(place, len, Access::Write, |mut to| {
            for piece in pieces {
                // SAFETY: the source is a frame, or a buffer, that the caller holds; the target is within our
                // mapping of the client's memory. Raw copies: the client can write there, and compares with
                // the checksums what has arrived.
                unsafe { std::ptr::copy_nonoverlapping(piece.ptr, to, piece.len) };
                to = to.wrapping_add(piece.len);
            }
        })
    }

    /// Takes the bytes of a put from where the client has them.
    pub(super) fn take(&mut self, place: ByKey, places: &[PieceMut]) -> Result<(), Refused> {
        let len = places.iter().map(|place| place.len).sum();
        self.reach(place, len, Access::Read, |from| {
            let mut from = from.cast_const();
            for place in places {
                // SAFETY: the source is within our mapping of the client's memory; the target are frames just
                // taken and the staging of what arrives. Raw copies: what the client writes meanwhile is
                // noticed by the checksums, which are made of what was copied.
                unsafe { std::ptr::copy_nonoverlapping(from, place.ptr, place.len) };
                from = from.wrapping_add(place.len);
            }
        })
    }

    /// Lets the members of a lease use memory. A memory has one name at a time.
    fn publish(&mut self, by: &Membership, key: Key, rights: Rights, name: &str) -> Result<(), Refused> {
        let Some(memory) = self.memories.get(&key).cloned() else {
            return Err(UseRefused::Unknown(key).into());
        };
        self.unpublish(key);
        let number = by.lease.published().publish(memory, rights, name, (by.member, by.connection))?;
        self.published.insert(key, (by.lease.clone(), number));
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
    pub(super) fn expose(&mut self, service: &mut Service, header: Header) -> Handled {
        let grant = parse_grant(self.link.table())?;
        let mut handed = self.link.take_handed();
        let memory = handed.pop();
        let surplus = !handed.is_empty();
        handed.into_iter().for_each(|fd| service.shared.close_elsewhere(fd));
        let kept = if surplus {
            Err(End::Protocol("more descriptors than one came with a key".to_owned()).into())
        } else {
            self.keep(grant, memory.as_ref()).map_err(Fail::Refused)
        };
        if let Err(fail) = kept {
            memory.into_iter().for_each(|fd| service.shared.close_elsewhere(fd));
            return Err(fail);
        }
        // It is memory, which is closed at once.
        self.done(header, 0)
    }

    fn keep(&mut self, grant: Grant, memory: Option<&OwnedFd>) -> Result<(), Refused> {
        self.membership()?;
        if !self.link.takes_keys() {
            let said = "memory is exposed over connections through shared memory only";
            return Err(Refused::new(Status::NotAllowed, said));
        }
        let memory = memory.ok_or_else(|| Refused::new(Status::BadRequest, "no memory came with the key"))?;
        let limit = |error: &dyn std::fmt::Display| Refused::new(Status::LimitReached, error);
        let bytes = usize::try_from(grant.bytes).ok().filter(|_| grant.bytes <= LIMITS.bytes);
        let bytes = bytes.ok_or_else(|| {
            limit(&format!("{} bytes are more than the {} that are kept", grant.bytes, LIMITS.bytes))
        })?;
        let memory = SealedMemory::adopt(memory.as_fd(), bytes)
            .map_err(|error| Refused::new(Status::BadRequest, error))?;
        if self.exposures.keys.granted(grant).map_err(|error| limit(&error))? {
            self.exposures.memories.insert(grant.key, Arc::new(memory));
        }
        self.exposures.drain();
        Ok(())
    }

    /// Forgets a key. No use of it is under way: each ends with the request that began it.
    pub(super) fn revoke(&mut self, _: &mut Service, header: Header) -> Handled {
        self.exposures.keys.revoke(parse_revocation(self.link.table())?);
        assert!(self.exposures.drain(), "a revocation is answered when nothing is under way");
        self.done(header, 0)
    }

    /// Publishes memory, or uses what another member has published.
    pub(super) fn reach(&mut self, service: &mut Service, header: Header) -> Handled {
        let reach = Reach::parse(header.arg, self.link.table())?;
        let membership = self.membership.as_ref().ok_or_else(no_lease)?;
        service.table.clear();
        let arg = match reach {
            Reach::Publish { key, rights, name } => {
                self.exposures.publish(membership, key, rights, name)?;
                0
            }
            other => membership.lease.published().reach(other, &mut service.table)?,
        };
        tell(&mut self.link, &mut service.head, header.reply(Status::Ok).with_arg(arg), &service.table);
        Ok(())
    }
}
