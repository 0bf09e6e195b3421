//! Memory of this client that a server on the same machine reaches by key: what is read lands in it, and what is written is taken from it, with one copy instead of two.
//!
//! The keyring of a lane is the shell of [`Owner`]: it hands memory files over, says in requests where the bytes are instead of sending them, and takes keys back. It belongs to one
//! server: where that is lost, or the connection to it breaks, the memory is replaced before anything else is done with it, so that whatever a server does which nobody hears of any more, it
//! does to a file that nobody looks at.
//!
//! What cannot be reached by key, for whatever reason, travels as any other bytes do.

use super::lane::Lane;
use super::request::{Class, Request, Work, lost};
use super::{Pool, operation_of};
use crate::error::{LostReason, PoolError};
use crate::transport::PieceMut;
use rampool_proto::registration::keys::{Key, Owner, OwnerOutput, PeerNumber, Rights, ToOwner, ToPeer};
use rampool_proto::server::Tick;
use rampool_proto::wire::{ByKey, MAX_TABLE_BYTES, Opcode, RegionId, encode_grant, encode_revocation};
use rampool_sys::exposed::ExposedMemory;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Memories of one client that a server has keys to.
const MAX_EXPOSED: u32 = 64;
/// Fewer bytes than this travel: saying where they are to go costs as much as the copy that it saves.
const BY_KEY_BYTES: u32 = 16 << 10;

/// What was done by key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct KeyStats {
    /// Memories that a server has a key to now.
    pub exposed: usize,
    /// Requests whose bytes did not travel.
    pub requests: u64,
    pub bytes: u64,
    /// Requests that the server refused because it did not know the key any more; they were made again.
    pub stale: u64,
    /// Memories that were replaced because a server with a key was lost, or its connection broke.
    pub replaced: u64,
}

struct Slot {
    memory: Arc<ExposedMemory>,
    /// None after a replacement without a file.
    file: Option<OwnedFd>,
}

/// The keys that one server has.
pub(super) struct Keyring {
    owner: Owner,
    slots: BTreeMap<u32, Slot>,
    /// The connection: the next one is another peer.
    peer: PeerNumber,
    /// What the server has confirmed that it knows.
    known: BTreeMap<u32, Key>,
    stats: KeyStats,
}

/// The owner's messages travel as requests, which are repeated by whoever makes the connection again: nothing is due here.
const NOW: Tick = Tick(0);

impl Keyring {
    fn new() -> Self {
        Self {
            owner: Owner::new(MAX_EXPOSED, u64::MAX),
            slots: BTreeMap::new(),
            peer: PeerNumber(0),
            known: BTreeMap::new(),
            stats: KeyStats::default(),
        }
    }

    /// Where a request's bytes are, if the server can reach them by key.
    pub fn find(&mut self, request: &Request) -> Option<ByKey> {
        let [PieceMut { ptr, len }] = request.places[..] else { return None };
        if !matches!(request.opcode, Opcode::Gather | Opcode::Scatter) || request.bytes < BY_KEY_BYTES || self.known.is_empty() {
            return None;
        }
        let (place, offset) = self.slots.iter().find_map(|(place, slot)| {
            let offset = ptr.addr().checked_sub(slot.memory.start().addr())?;
            (offset + len <= slot.memory.bytes()).then_some((*place, offset))
        })?;
        let key = self.owner.current(place).filter(|key| self.known.get(&place) == Some(key))?;
        self.stats.requests += 1;
        self.stats.bytes += len as u64;
        Some(ByKey { key, offset: offset as u64 })
    }

    /// The table of an `Expose`, its generation, and what to hand over with it. None where the memory is not to be exposed any more.
    pub fn announce(&mut self, place: u32, table: &mut Vec<u8>) -> Option<(u64, BorrowedFd<'_>)> {
        let file = self.slots.get(&place)?.file.as_ref()?;
        let grant = self.owner.grant(self.peer, place)?;
        encode_grant(&grant, table);
        Some((grant.key.generation, file.as_fd()))
    }

    /// The server knows this key.
    pub fn confirmed(&mut self, key: Key) {
        if self.owner.current(key.place) == Some(key) {
            self.known.insert(key.place, key);
        }
    }

    /// The server does not know the key to this place.
    fn stale(&mut self, place: u32) {
        self.stats.stale += 1;
        self.known.remove(&place);
    }

    /// The server touches nothing of this key any more.
    pub fn revoked(&mut self, key: Key) {
        self.owner.handle(NOW, self.peer, ToOwner::Revoked(key));
        self.drain();
    }

    /// The connection is over: what the server had a key to is replaced.
    pub fn line_ended(&mut self) {
        self.owner.lost(NOW, self.peer);
        self.peer.0 += 1;
        self.known.clear();
        self.drain();
    }

    /// The key to ask back.
    fn withdraw(&mut self, place: u32) -> Option<Key> {
        self.known.remove(&place);
        self.owner.withdraw(NOW, place);
        self.drain()
    }

    /// Does what the owner orders; gives the revocation to be sent, if there is one.
    fn drain(&mut self) -> Option<Key> {
        let mut revocation = None;
        while let Some(output) = self.owner.poll() {
            match output {
                OwnerOutput::Send(_, ToPeer::Revoke(key)) => revocation = Some(key),
                OwnerOutput::Send(_, ToPeer::Grant(_)) => unreachable!("this server asks for keys by refusing requests"),
                OwnerOutput::Replace(key) => {
                    let slot = self.slots.get_mut(&key.place).expect("what is exposed has a slot");
                    // Nobody else has it: it goes with its last owner.
                    if Arc::strong_count(&slot.memory) > 1 {
                        self.stats.replaced += 1;
                        slot.file = slot
                            .memory
                            .replace()
                            .expect("memory that a lost server may still write to has to be replaced, and there is no memory");
                    }
                    self.owner.replaced(key);
                }
                OwnerOutput::Free(key) => {
                    self.slots.remove(&key.place);
                }
            }
        }
        revocation
    }
}

impl Drop for Keyring {
    fn drop(&mut self) {
        // Whoever still has the memory may use it for anything, and the server may be at it.
        self.line_ended();
    }
}

impl Lane {
    /// Whether this server can be given keys.
    fn takes_keys(&self) -> bool {
        self.link().is_some_and(crate::transport::Link::takes_keys)
    }

    /// Says in a request's table where its bytes are, where the server can reach them by key.
    pub(super) fn by_key(&mut self, request: &mut Request) -> bool {
        request.by_key = None;
        let Some(keyring) = &mut self.keyring else { return false };
        let Some(place) = keyring.find(request) else { return false };
        let mut table = Vec::with_capacity(ByKey::BYTES + request.table.len());
        place.encode(&mut table);
        table.append(&mut request.table);
        if table.len() > MAX_TABLE_BYTES {
            request.table = table.split_off(ByKey::BYTES);
            return false;
        }
        request.table = table;
        request.by_key = Some(place.key);
        true
    }

    /// A request came back because its key is not known any more: its bytes travel, and the server hears of the memory again.
    pub(super) fn key_was_stale(&mut self, work: &mut Work, slot: u32, now: Instant) {
        let key = work.get(slot).by_key.take().expect("only what named a key comes back");
        let keyring = self.keyring.as_mut().expect("there was a key");
        let newly = keyring.known.contains_key(&key.place);
        keyring.stale(key.place);
        self.ask_again(work, slot);
        if newly {
            self.tell(work, key.place, now);
        }
    }

    /// Sends the key to a memory, and gives the number of that request.
    fn tell(&mut self, work: &mut Work, place: u32, now: Instant) -> u64 {
        let slot = work.request(self.server, Opcode::Expose, Class::Demand, RegionId(0), None, now);
        work.get(slot).arg = place.into();
        let request = work.id(slot);
        self.enqueue(work, slot);
        request
    }

    /// After a connection was made again.
    pub(super) fn tell_all(&mut self, work: &mut Work, now: Instant) {
        if !self.takes_keys() {
            return;
        }
        let places: Vec<u32> = self.keyring.iter().flat_map(|keyring| keyring.slots.keys().copied()).collect();
        for place in places {
            self.tell(work, place, now);
        }
    }
}

impl Pool {
    /// Makes memory that the first server reached through shared memory can put bytes into, and take bytes from, by key. Where there is none, the memory is as any other. Blocks until the
    /// server has answered.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub(crate) fn expose(&mut self, bytes: usize) -> Result<Arc<ExposedMemory>, rampool_sys::sealed::SealedError> {
        self.withdraw_unused();
        let (memory, file) = ExposedMemory::create(bytes)?;
        let memory = Arc::new(memory);
        let now = Instant::now();
        if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.takes_keys()) {
            let keyring = lane.keyring.get_or_insert_with(|| Box::new(Keyring::new()));
            if let Ok(key) = keyring.owner.expose(bytes as u64, Rights::Both) {
                keyring.slots.insert(key.place, Slot { memory: memory.clone(), file: Some(file) });
                let request = lane.tell(&mut self.work, key.place, now);
                lane.send(&mut self.work, now);
                while self.work.find(request).is_some() {
                    self.step(Instant::now());
                    if self.work.find(request).is_some() && self.sleep(Instant::now() + Duration::from_secs(1)).is_err() {
                        break;
                    }
                }
            }
        }
        Ok(memory)
    }

    /// Takes the key to this memory back. Blocks until the server has answered, or is lost and the memory replaced: then nobody else touches it.
    pub(crate) fn withdraw(&mut self, memory: &Arc<ExposedMemory>) -> Result<(), PoolError> {
        let of = |lane: &Lane| {
            let slots = lane.keyring.iter().flat_map(|keyring| &keyring.slots);
            slots.into_iter().find(|(_, slot)| Arc::ptr_eq(&slot.memory, memory)).map(|(place, _)| *place)
        };
        let Some((index, place)) = self.lanes.iter().enumerate().find_map(|(index, lane)| Some((index, of(lane)?))) else { return Ok(()) };
        self.ask_back(index, place);
        while of(&self.lanes[index]).is_some() {
            self.step(Instant::now());
            if of(&self.lanes[index]).is_none() {
                break;
            }
            if let Err(error) = self.sleep(Instant::now() + Duration::from_secs(1)) {
                let reason = LostReason::Io(error.to_string());
                return Err(lost(&self.lanes[index].name, operation_of(Opcode::Revoke), &reason));
            }
        }
        Ok(())
    }

    pub(crate) fn key_stats(&self) -> KeyStats {
        let mut all = KeyStats::default();
        for keyring in self.lanes.iter().filter_map(|lane| lane.keyring.as_ref()) {
            all.exposed += keyring.known.len();
            all.requests += keyring.stats.requests;
            all.bytes += keyring.stats.bytes;
            all.stale += keyring.stats.stale;
            all.replaced += keyring.stats.replaced;
        }
        all
    }

    /// Whether the server has a key to this memory now.
    pub(crate) fn is_exposed(&self, memory: &Arc<ExposedMemory>) -> bool {
        self.lanes
            .iter()
            .filter_map(|lane| lane.keyring.as_ref())
            .any(|keyring| keyring.slots.iter().any(|(place, slot)| Arc::ptr_eq(&slot.memory, memory) && keyring.known.contains_key(place)))
    }

    /// Memory that nobody has any more but the keyring. Does not block.
    fn withdraw_unused(&mut self) {
        for index in 0..self.lanes.len() {
            let slots = self.lanes[index].keyring.iter().flat_map(|keyring| &keyring.slots);
            let unused: Vec<u32> = slots.filter(|(_, slot)| Arc::strong_count(&slot.memory) == 1).map(|(place, _)| *place).collect();
            for place in unused {
                self.ask_back(index, place);
            }
        }
    }

    fn ask_back(&mut self, index: usize, place: u32) {
        let lane = &mut self.lanes[index];
        let Some(key) = lane.keyring.as_mut().and_then(|keyring| keyring.withdraw(place)) else { return };
        let now = Instant::now();
        let slot = self.work.request(lane.server, Opcode::Revoke, Class::Demand, RegionId(0), None, now);
        let request = self.work.get(slot);
        request.arg = place.into();
        encode_revocation(key, &mut request.table);
        request.by_key = Some(key);
        lane.enqueue(&mut self.work, slot);
        lane.send(&mut self.work, now);
    }
}
