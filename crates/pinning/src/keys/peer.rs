//! The peer's side: the keys it has, and its uses of them.

use super::rule::Rules;
use super::{Access, Grant, Key, KeyRule, ToOwner};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The most that a peer keeps of one owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyLimits {
    /// Places are numbered below this.
    pub places: u32,
    /// Of all memories together.
    pub bytes: u64,
}

/// Why a key is not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrantRefused {
    #[error("place {place} is not below {places}")]
    Place { place: u32, places: u32 },
    #[error("cannot keep {bytes} bytes: the limit is {most}, {in_use} of them in use")]
    Room { bytes: u64, most: u64, in_use: u64 },
}

/// Why memory cannot be reached with a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UseRefused {
    /// Ask for it: [`ToOwner::Ask`].
    #[error("key {0} is unknown here; ask for it")]
    Unknown(Key),
    /// Ask for the current one.
    #[error("key {0} is old: the memory was withdrawn or replaced; ask for the current key")]
    Stale(Key),
    #[error("{len} bytes at {offset} exceed the {bytes} bytes of key {key}")]
    Bounds { key: Key, offset: u64, len: u64, bytes: u64 },
    #[error("key {key} does not allow to {}", if *.access == Access::Read { "read" } else { "write" })]
    Rights { key: Key, access: Access },
}

/// Memory that stays mapped and unchanged in place until [`KeyCache::end`].
#[must_use]
#[derive(PartialEq, Eq, Debug)]
pub struct Use {
    key: Key,
}

impl Use {
    #[must_use]
    pub fn key(&self) -> Key {
        self.key
    }
}

/// Work for the caller of a [`KeyCache`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerOutput {
    Send(ToOwner),
    /// No use reaches this memory with the key any more: unmap it.
    Drop(Key),
}

#[derive(Debug)]
struct Cached {
    grant: Grant,
    uses: u32,
    /// No use begins any more.
    dead: bool,
    /// When it was used last, counted in uses.
    used: u64,
}

/// The keys to one owner's memory.
///
/// Invariants ([`KeyCache::check`]): a dead key is in use; of each place at most one key is not dead, and its
/// generation is above the floor; the bytes of all keys are within the limit, not counting dead ones.
#[derive(Debug)]
pub struct KeyCache {
    limits: KeyLimits,
    keys: BTreeMap<Key, Cached>,
    /// By place: this generation and all older ones are invalid.
    floors: BTreeMap<u32, u64>,
    /// Revocations to be answered when uses have ended.
    unanswered: BTreeSet<Key>,
    bytes: u64,
    uses: u64,
    outputs: VecDeque<PeerOutput>,
    rules: Rules,
}

impl KeyCache {
    #[must_use]
    pub fn new(limits: KeyLimits) -> Self {
        Self {
            limits,
            keys: BTreeMap::new(),
            floors: BTreeMap::new(),
            unanswered: BTreeSet::new(),
            bytes: 0,
            uses: 0,
            outputs: VecDeque::new(),
            rules: Rules::default(),
        }
    }

    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: KeyRule) {
        self.rules.omit(rule);
    }

    /// A key has come. Returns false if it is known already or comes too late; then the memory that came with
    /// it is not needed.
    ///
    /// # Errors
    /// [`GrantRefused`]; the key is not kept.
    pub fn granted(&mut self, grant: Grant) -> Result<bool, GrantRefused> {
        let Grant { key, bytes, .. } = grant;
        let KeyLimits { places, bytes: most } = self.limits;
        if key.place >= places {
            return Err(GrantRefused::Place { place: key.place, places });
        }
        let revoked = self.floor(key.place) >= key.generation && self.rules.keep(KeyRule::Floor);
        let newest = self.of_place(key.place).map(|(known, _)| known.generation).max();
        if revoked || newest >= Some(key.generation) {
            return Ok(false);
        }
        let in_use = self
            .keys
            .values()
            .filter(|cached| cached.uses > 0 && !cached.dead)
            .map(|cached| cached.grant.bytes)
            .sum();
        if most.checked_sub(in_use).is_none_or(|room| room < bytes) {
            return Err(GrantRefused::Room { bytes, most, in_use });
        }
        // The owner grants a new key only when the old one may no longer be used.
        if key.generation > 1 && self.rules.keep(KeyRule::Floor) {
            self.raise(Key { generation: key.generation - 1, ..key });
        }
        while self.bytes + bytes > most {
            let in_use = self.rules.keep(KeyRule::InUse);
            let unused = self.keys.values().filter(|cached| !cached.dead && (!in_use || cached.uses == 0));
            let oldest = unused.min_by_key(|cached| cached.used).expect("what is in use fits").grant.key;
            self.forget(oldest);
        }
        self.bytes += bytes;
        self.keys.insert(key, Cached { grant, uses: 0, dead: false, used: self.uses });
        Ok(true)
    }

    /// Begins to reach `len` bytes from `offset` on. No message, no kernel call.
    ///
    /// # Errors
    /// [`UseRefused`]: nothing is touched.
    pub fn begin(&mut self, key: Key, offset: u64, len: u64, access: Access) -> Result<Use, UseRefused> {
        let mut found = key;
        if !self.rules.keep(KeyRule::Generation)
            && let Some((newest, _)) = self.of_place(key.place).max_by_key(|(known, _)| known.generation)
        {
            found = *newest;
        }
        let floor = self.floor(key.place);
        let Some(cached) = self.keys.get_mut(&found).filter(|cached| !cached.dead) else {
            let newer = self.of_place(key.place).any(|(known, _)| known.generation > key.generation);
            return Err(if newer || floor >= key.generation {
                UseRefused::Stale(key)
            } else {
                UseRefused::Unknown(key)
            });
        };
        let Grant { bytes, rights, .. } = cached.grant;
        if offset.checked_add(len).is_none_or(|end| end > bytes) && self.rules.keep(KeyRule::Bounds) {
            return Err(UseRefused::Bounds { key, offset, len, bytes });
        }
        if !rights.allow(access) && self.rules.keep(KeyRule::Rights) {
            return Err(UseRefused::Rights { key, access });
        }
        self.uses += 1;
        cached.used = self.uses;
        cached.uses += 1;
        Ok(Use { key: found })
    }

    /// Ends a use.
    ///
    /// # Panics
    /// If it was not begun here.
    pub fn end(&mut self, used: Use) {
        let Use { key } = used;
        let Some(cached) = self.keys.get_mut(&key) else {
            assert!(
                !(self.rules.keep(KeyRule::InUse) && self.rules.keep(KeyRule::Drain)),
                "what ends was begun"
            );
            return;
        };
        cached.uses = cached.uses.checked_sub(1).expect("what ends was begun");
        if cached.dead && cached.uses == 0 {
            self.forget(key);
        }
        self.answer(key.place);
    }

    /// The owner revokes this key and all older ones of its place. The answer follows when no use is under
    /// way.
    pub fn revoke(&mut self, key: Key) {
        if key.place < self.limits.places {
            self.raise(key);
        }
        // One answer for each place is enough: an owner revokes a younger memory only after the older one.
        let older = self.unanswered.range(Key { generation: 0, ..key }..key).next().copied();
        older.map(|older| self.unanswered.remove(&older));
        self.unanswered.insert(key);
        self.answer(key.place);
    }

    pub fn poll(&mut self) -> Option<PeerOutput> {
        self.outputs.pop_front()
    }

    /// Bytes of all memories that it has keys to.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The invariants.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        let mut bytes = 0;
        for (key, cached) in &self.keys {
            assert!(!cached.dead || cached.uses > 0, "{key} is dead but unused");
            if !cached.dead {
                bytes += cached.grant.bytes;
                assert!(key.generation > self.floor(key.place), "{key} was revoked but can be used");
                let other = self.of_place(key.place).filter(|(_, cached)| !cached.dead).count();
                assert_eq!(other, 1, "two memories in one place");
            }
        }
        assert!(
            bytes == self.bytes && bytes <= self.limits.bytes,
            "{bytes} bytes, counted are {}",
            self.bytes
        );
        assert!(self.unanswered.iter().all(|key| self.is_used(*key)), "a pending revocation waits for a use");
    }

    fn of_place(&self, place: u32) -> impl Iterator<Item = (&Key, &Cached)> {
        self.keys.range(Key { place, generation: 0 }..=Key { place, generation: u64::MAX })
    }

    fn floor(&self, place: u32) -> u64 {
        self.floors.get(&place).copied().unwrap_or(0)
    }

    /// From now on this generation and older ones are invalid.
    fn raise(&mut self, key: Key) {
        let floor = self.floors.entry(key.place).or_insert(0);
        *floor = (*floor).max(key.generation);
        let old: Vec<Key> = self
            .of_place(key.place)
            .map(|(known, _)| *known)
            .filter(|known| known.generation <= key.generation)
            .collect();
        for key in old {
            let cached = self.keys.get_mut(&key).expect("seen a moment ago");
            if cached.uses == 0 {
                self.forget(key);
            } else if !std::mem::replace(&mut cached.dead, true) {
                self.bytes -= cached.grant.bytes;
            }
        }
    }

    fn forget(&mut self, key: Key) {
        let cached = self.keys.remove(&key).expect("what is forgotten was known");
        if !cached.dead {
            self.bytes -= cached.grant.bytes;
        }
        self.outputs.push_back(PeerOutput::Drop(key));
    }

    fn is_used(&self, revoked: Key) -> bool {
        self.of_place(revoked.place)
            .any(|(known, cached)| known.generation <= revoked.generation && cached.uses > 0)
    }

    fn answer(&mut self, place: u32) {
        let drain = self.rules.keep(KeyRule::Drain);
        let of_place =
            self.unanswered.range(Key { place, generation: 0 }..=Key { place, generation: u64::MAX });
        let done: Vec<Key> = of_place.copied().filter(|key| !drain || !self.is_used(*key)).collect();
        for key in done {
            self.unanswered.remove(&key);
            self.outputs.push_back(PeerOutput::Send(ToOwner::Revoked(key)));
        }
    }
}
