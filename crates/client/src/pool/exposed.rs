//! Memory of this client that one server has keys to.

use super::body::Body;
use rampool_kernel::exposed::ExposedMemory;
use rampool_net::transport::PieceMut;
use rampool_pinning::keys::{Key, Owner, OwnerOutput, PeerNumber, Rights, ToOwner, ToPeer};
use rampool_session::Request;
use rampool_wire::frame::{ByKey, Opcode, Reach, encode_grant};
use rampool_wire::units::Tick;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

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

pub(super) struct Slot {
    pub memory: Arc<ExposedMemory>,
    /// None after a replacement without a file.
    pub file: Option<OwnedFd>,
    /// What other members may do with it, and how they find it.
    pub published: Option<(Rights, String)>,
}

/// The keys that one server has.
pub(super) struct ExposedMemories {
    pub owner: Owner,
    pub slots: BTreeMap<u32, Slot>,
    /// The connection: the next one is another peer.
    peer: PeerNumber,
    /// What the server has confirmed that it knows.
    pub known: BTreeMap<u32, Key>,
    pub stats: KeyStats,
}

/// The owner's messages travel as requests, which are repeated on a new connection: nothing is due here.
const NOW: Tick = Tick(0);

impl ExposedMemories {
    pub fn new() -> Self {
        Self {
            owner: Owner::new(MAX_EXPOSED, u64::MAX),
            slots: BTreeMap::new(),
            peer: PeerNumber(0),
            known: BTreeMap::new(),
            stats: KeyStats::default(),
        }
    }

    /// Where a request's bytes are, if the server can reach them by key.
    pub fn find(&mut self, of: &Request, body: &Body) -> Option<ByKey> {
        let [PieceMut { ptr, len }] = body.places[..] else { return None };
        let moves = matches!(of.ask.opcode, Opcode::Gather | Opcode::Scatter);
        if !moves || body.bytes < BY_KEY_BYTES || self.known.is_empty() {
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

    /// The table of an `Expose`, its generation, and what to hand over with it. None where the memory is not
    /// to be exposed any more.
    pub fn announce(&mut self, place: u32, table: &mut Vec<u8>) -> Option<(u64, BorrowedFd<'_>)> {
        let file = self.slots.get(&place)?.file.as_ref()?;
        let grant = self.owner.grant(self.peer, place)?;
        encode_grant(&grant, table);
        Some((grant.key.generation, file.as_fd()))
    }

    /// The place of a memory that the server has a key to.
    pub fn place_of(&self, memory: &Arc<ExposedMemory>) -> Option<u32> {
        let is_held = |(place, slot): &(&u32, &Slot)| {
            Arc::ptr_eq(&slot.memory, memory) && self.known.contains_key(place)
        };
        self.slots.iter().find(is_held).map(|(place, _)| *place)
    }

    /// The table of a request that publishes this memory, if it is to be.
    pub fn publication(&self, place: u32) -> Option<Vec<u8>> {
        let (rights, name) = self.slots.get(&place)?.published.as_ref()?;
        let mut table = Vec::new();
        Reach::Publish { key: self.owner.current(place)?, rights: *rights, name }.encode(&mut table);
        Some(table)
    }

    /// The server knows this key.
    pub fn confirmed(&mut self, key: Key) {
        if self.owner.current(key.place) == Some(key) {
            self.known.insert(key.place, key);
        }
    }

    /// The server does not know the key to this place.
    pub fn stale(&mut self, place: u32) {
        self.stats.stale += 1;
        self.known.remove(&place);
    }

    /// The server touches nothing of this key any more.
    pub fn revoked(&mut self, key: Key) {
        self.owner.handle(NOW, self.peer, ToOwner::Revoked(key));
        self.drain();
    }

    /// The connection is over: what the server had a key to is replaced.
    pub fn link_ended(&mut self) {
        self.owner.lost(NOW, self.peer);
        self.peer.0 += 1;
        self.known.clear();
        self.drain();
    }

    /// The key to ask back.
    pub fn withdraw(&mut self, place: u32) -> Option<Key> {
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
                OwnerOutput::Send(_, ToPeer::Grant(_)) => {
                    unreachable!("this server asks for keys by refusing requests")
                }
                OwnerOutput::Replace(key) => {
                    let slot = self.slots.get_mut(&key.place).expect("what is exposed has a slot");
                    // It has no other owner: it goes with its last one.
                    if Arc::strong_count(&slot.memory) > 1 {
                        self.stats.replaced += 1;
                        slot.file = slot.memory.replace().expect(
                            "memory that a lost server may write to is replaced, and there is no memory",
                        );
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

impl Drop for ExposedMemories {
    fn drop(&mut self) {
        // Other owners may still use the memory for anything, and the server may be using it.
        self.link_ended();
    }
}
