//! A store of many processes: from keys to bytes that lie in named regions of a lease.
//!
//! ```text
//!   NAME.head    words: the number of buckets, the number of extents, then for each extent the length of its
//!                slots, its owner, and when that was heard of last (seconds)
//!   NAME.index   buckets of 16 words; a key belongs into two of them. A word is the place of a value:
//!                tag (18 bits of the key's hash) | version (14) | slot (16) | extent (16)
//!   NAME.N       extent N: slots of one length; its owner alone puts values there
//! ```
//!
//! Nothing else connects the processes, so one that is killed at any moment leaves the others a whole store.
//!
//! * **put** writes the value into a free slot of an extent of its own, then makes it visible by one
//!   `compare_exchange` of a word.
//! * **get** reads the word, the value, and the word again: if that is the same, the slot has been the
//!   value's all the time. The version changes with each value in a slot.
//! * **An extent of an owner that is not heard of** for a while is taken over: what is visible in it is
//!   moved, and after as long again its region is freed. An owner that is slow, and not dead, finds that the
//!   extent is no longer its own, and puts again. It looks just before it makes a value visible, and once
//!   more after that. If it sleeps for that long between two neighbouring requests, the key has no value
//!   until it goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

use blake2::digest::consts::U24;
use blake2::{Blake2b, Digest};
use rampool_net::key::random_bytes;
use rampool_wire::layout::{Layout, LayoutError};

use super::slots::class;
use super::start_put_parts;
use crate::direct::{Direct, DirectError, DirectRegion, Filter, numbers};
use crate::error::PoolError;

const WORD: u64 = 8;
/// Words of a bucket.
const BUCKET: u64 = 16;
const MOST_EXTENTS: u64 = 1 << 16;
const MOST_SLOTS: u64 = 1 << 16;
const VERSIONS: u64 = 1 << 14;
/// Words of `NAME.head`: buckets, extents, and from here on those of each extent.
const BUCKETS: u64 = 0;
const EXTENTS: u64 = 1;
const FIRST: u64 = 8;
const EACH: u64 = 3;
const SLOT_BYTES: u64 = 0;
const OWNER: u64 = 1;
const HEARD: u64 = 2;
/// Of a slot, before the key and the value: a mark, the length of the key, and that of the value.
const HEADER: u64 = 24;
const MARK: &[u8; 8] = b"rampool1";
const LONGEST_KEY: u64 = 1 << 20;
/// Read at once of a slot: its header, and short values.
const FIRST_READ: u64 = 4096;
const LEAST_EXTENT: u64 = 1 << 20;
const MOST_EXTENT: u64 = 64 << 20;
const SLOTS_AT_BEST: u64 = 64;
/// An owner says that it lives this often, when it puts.
const HEARD_EVERY: Duration = Duration::from_secs(5);
const TRIES: u32 = 1000;
const USUAL_KEYS: u64 = 100_000;
const MOST_KEYS: u64 = 1 << 40;

/// Why an operation of a shared store failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedStoreError {
    #[error(transparent)]
    Direct(#[from] DirectError),
    #[error("the store {name} is for another number of keys: its index has {places} places")]
    OtherKeys { name: String, places: u64 },
    #[error("a key has at most 1 MiB, and a store at most 2^40 keys")]
    TooLong,
    #[error("the index of the store {name} is full: make it for more keys")]
    IndexFull { name: String },
    #[error(
        "the store {name} has had {MOST_EXTENTS} extents, which is all that it can have: make another one"
    )]
    NoExtents { name: String },
    #[error("other processes change this key of the store {name} all the time")]
    Contended { name: String },
}

impl From<LayoutError> for SharedStoreError {
    fn from(error: LayoutError) -> Self {
        Self::Direct(error.into())
    }
}

type Result<T> = std::result::Result<T, SharedStoreError>;

/// The place of a value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Word(u64);

impl Word {
    const EMPTY: Self = Self(0);

    fn new(tag: u64, version: u64, slot: u64, extent: u64) -> Self {
        Self(tag << 46 | version << 32 | slot << 16 | extent)
    }

    fn tag(self) -> u64 {
        self.0 >> 46
    }

    fn slot(self) -> u64 {
        self.0 >> 16 & 0xFFFF
    }

    fn extent(self) -> u64 {
        self.0 & 0xFFFF
    }
}

/// Where a key belongs: two buckets in order, and the tag of its words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Home {
    buckets: [u64; 2],
    tag: u64,
}

impl Home {
    fn of(key: &[u8], buckets: u64) -> Self {
        let hash: [u8; 24] = Blake2b::<U24>::digest(key).into();
        let part = |nth: usize| u64::from_le_bytes(hash[nth * 8..][..8].try_into().expect("8 bytes"));
        let (first, mut second) = (part(0) % buckets, part(1) % buckets);
        if second == first {
            second = (first + 1) % buckets;
        }
        // Never 0: that is an empty word.
        Self { buckets: [first.min(second), first.max(second)], tag: part(2) % ((1 << 18) - 1) + 1 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    region: DirectRegion,
    slot_bytes: u64,
}

/// An extent of this process's.
#[derive(Debug)]
struct Own {
    extent: Extent,
    slots: u64,
    free: Vec<u64>,
    /// Of the slots that were written, what their words had last.
    versions: BTreeMap<u64, u64>,
}

/// What begins a slot.
struct Value {
    key: Vec<u8>,
    bytes: u64,
    /// Of the value, as many as were read with it.
    begins: Vec<u8>,
}

/// A value that is visible: which word of the index says so.
struct Found {
    place: u64,
    word: Word,
    value: Value,
}

/// A mapping from keys to bytes for all members of a lease. Each operation takes effect at once for all of
/// them, blocks until the servers have answered, and takes the [`Direct`] that the store was opened with.
/// With the last member of the lease the store is gone.
///
/// Invariant: no extent is in `own` and in `retired`.
#[derive(Debug)]
pub struct SharedStore {
    name: String,
    stale: Duration,
    head: DirectRegion,
    index: DirectRegion,
    buckets: u64,
    me: u64,
    open: BTreeMap<u64, Extent>,
    own: BTreeMap<u64, Own>,
    /// Extents that it has taken over, and when.
    retired: BTreeMap<u64, Instant>,
    heard: Option<Instant>,
}

impl SharedStore {
    /// The store of this name, which is made if there is none, for as many keys as are named (100,000 if none
    /// are); `stale`: for how long a process that has put must not be heard of until its room is taken over.
    ///
    /// # Errors
    /// [`SharedStoreError::OtherKeys`] if it is for another number, and others.
    pub fn open(direct: &mut Direct, name: &str, keys: Option<u64>, stale: Duration) -> Result<Self> {
        if keys.is_some_and(|keys| keys > MOST_KEYS) {
            return Err(SharedStoreError::TooLong);
        }
        let head_bytes = (FIRST + EACH * MOST_EXTENTS) * WORD;
        let head = direct.open_or_create(&format!("{name}.head"), head_bytes)?;
        // With five places for four keys and two buckets for each key, one is full only when nearly all are.
        let wanted = (keys.unwrap_or(USUAL_KEYS).max(1) * 5 / 4 / BUCKET).max(2).next_power_of_two();
        let has = direct.compare_exchange(head, BUCKETS * WORD, 0, wanted)?;
        let buckets = match (has, keys) {
            (0, _) => wanted,
            (has, None) => has,
            (has, Some(_)) if has == wanted => wanted,
            (has, Some(_)) => {
                return Err(SharedStoreError::OtherKeys { name: name.to_owned(), places: has * BUCKET });
            }
        };
        let index_bytes = buckets.checked_mul(BUCKET * WORD).ok_or(SharedStoreError::TooLong)?;
        let index = direct.open_or_create(&format!("{name}.index"), index_bytes)?;
        Ok(Self {
            name: name.to_owned(),
            stale,
            head,
            index,
            buckets,
            me: u64::from_le_bytes(random_bytes()) >> 1 | 1,
            open: BTreeMap::new(),
            own: BTreeMap::new(),
            retired: BTreeMap::new(),
            heard: None,
        })
    }

    // --- words

    fn contended<T>(&self) -> Result<T> {
        Err(SharedStoreError::Contended { name: self.name.clone() })
    }

    /// Where a word of an extent lies in `NAME.head`.
    fn at(number: u64, word: u64) -> u64 {
        (FIRST + EACH * number + word) * WORD
    }

    fn word_at(&self, direct: &mut Direct, place: u64) -> Result<Word> {
        Ok(Word(direct.get_value(self.index, place * WORD)?))
    }

    /// Replaces a word if it is `before`; whether it was.
    fn replace(&self, direct: &mut Direct, place: u64, before: Word, word: Word) -> Result<bool> {
        Ok(direct.compare_exchange(self.index, place * WORD, before.0, word.0)? == before.0)
    }

    /// The words of a key's buckets with their places.
    fn bucket_words(&self, direct: &mut Direct, home: Home) -> Result<Vec<(u64, Word)>> {
        let bytes = BUCKET * WORD;
        let blocks = home.buckets.map(|bucket| (1, i64::try_from(bucket * bytes).unwrap_or(i64::MAX)));
        let there = Layout::bytes(bytes)?.hindexed(&blocks)?;
        let words = direct.get_values::<u64>(self.index, 0, &there)?;
        let places = home.buckets.into_iter().flat_map(|bucket| bucket * BUCKET..(bucket + 1) * BUCKET);
        Ok(places.zip(words.into_iter().map(Word)).collect())
    }

    /// All words that are not empty, with their places.
    fn words(&self, direct: &mut Direct) -> Result<Vec<(u64, Word)>> {
        let pending = direct.start_get(self.index, 0, &Layout::bytes(self.index.bytes())?)?;
        let words = numbers::<u64>(&direct.wait(pending)?);
        Ok((0..).zip(words.into_iter().map(Word)).filter(|(_, word)| *word != Word::EMPTY).collect())
    }

    /// The extent of a word; none if it is gone.
    fn extent(&mut self, direct: &mut Direct, number: u64) -> Result<Option<Extent>> {
        if let Some(extent) = self.open.get(&number) {
            return Ok(Some(*extent));
        }
        let slot_bytes: u64 = direct.get_value(self.head, Self::at(number, SLOT_BYTES))?;
        match direct.open(&format!("{}.{number}", self.name)) {
            // What others have written there may be anything.
            Ok(region) if slot_bytes >= FIRST_READ => {
                let extent = Extent { region, slot_bytes };
                self.open.insert(number, extent);
                Ok(Some(extent))
            }
            Ok(_) | Err(DirectError::NoSuchName { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// So many bytes of a slot from `first` on; none if its extent is gone, or the slot does not have them.
    fn slot(&mut self, direct: &mut Direct, word: Word, first: u64, bytes: u64) -> Result<Option<Vec<u8>>> {
        let Some(Extent { region, slot_bytes }) = self.extent(direct, word.extent())? else {
            return Ok(None);
        };
        let Some(start) = word.slot().checked_mul(slot_bytes) else { return Ok(None) };
        let fits = first.checked_add(bytes).is_some_and(|end| end <= slot_bytes);
        if !fits || start.checked_add(first + bytes).is_none_or(|end| end > region.bytes()) {
            return Ok(None);
        }
        let pending = direct.start_get(region, start + first, &Layout::bytes(bytes)?);
        match pending.and_then(|pending| direct.wait(pending)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if is_gone(&error) => {
                self.open.remove(&word.extent());
                if self.extent(direct, word.extent())?.is_some() { Err(error.into()) } else { Ok(None) }
            }
            Err(error) => Err(error.into()),
        }
    }

    /// What a slot begins with; none if it has no value.
    fn value(&mut self, direct: &mut Direct, word: Word) -> Result<Option<Value>> {
        let Some(mut read) = self.slot(direct, word, 0, FIRST_READ)? else { return Ok(None) };
        let number = |at: usize| u64::from_le_bytes(read[at..][..8].try_into().expect("8 bytes"));
        let (key_bytes, bytes) = (number(8), number(16));
        if read[..8] != MARK[..] || key_bytes > LONGEST_KEY {
            return Ok(None);
        }
        if HEADER + key_bytes > FIRST_READ {
            let Some(more) = self.slot(direct, word, 0, HEADER + key_bytes)? else { return Ok(None) };
            read = more;
        }
        let ends = usize::try_from(HEADER + key_bytes).expect("a short key");
        let mut begins = read.split_off(ends);
        begins.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        let key = read.split_off(ends - usize::try_from(key_bytes).expect("a short key"));
        Ok(Some(Value { key, bytes, begins }))
    }

    /// The rest of a value, behind what was read with its header.
    fn whole(&mut self, direct: &mut Direct, word: Word, value: Value) -> Result<Option<Vec<u8>>> {
        let Value { key, bytes, mut begins } = value;
        let first = HEADER + key.len() as u64 + begins.len() as u64;
        let left = bytes - begins.len() as u64;
        if left > 0 {
            let Some(rest) = self.slot(direct, word, first, left)? else { return Ok(None) };
            begins.extend_from_slice(&rest);
        }
        Ok(Some(begins))
    }

    /// The values of a key, of which there is one but for moments, and places that are empty.
    fn find(&mut self, direct: &mut Direct, key: &[u8]) -> Result<(Vec<Found>, Vec<u64>)> {
        let home = Home::of(key, self.buckets);
        for _ in 0..TRIES {
            let (mut found, mut empty, mut again) = (Vec::new(), Vec::new(), false);
            for (place, word) in self.bucket_words(direct, home)? {
                if word == Word::EMPTY {
                    empty.push(place);
                } else if word.tag() != home.tag {
                } else if self.extent(direct, word.extent())?.is_none() {
                    // Its owner made it visible when it was too late: it is no value.
                    self.replace(direct, place, word, Word::EMPTY)?;
                    again = true;
                } else if let Some(value) = self.value(direct, word)?.filter(|value| value.key == key) {
                    found.push(Found { place, word, value });
                } else {
                    // Another key, mostly; or the slot has another value by now, and the key another slot.
                    again |= self.word_at(direct, place)? != word;
                }
            }
            if !again {
                return Ok((found, empty));
            }
        }
        self.contended()
    }

    // --- the mapping

    /// The value of a key; none if it has none.
    ///
    /// # Errors
    /// [`SharedStoreError`].
    pub fn get(&mut self, direct: &mut Direct, key: &[u8]) -> Result<Option<Vec<u8>>> {
        for _ in 0..TRIES {
            let (found, _) = self.find(direct, key)?;
            let Some(Found { place, word, value }) = found.into_iter().next() else { return Ok(None) };
            let whole = self.whole(direct, word, value)?;
            if whole.is_some() && self.word_at(direct, place)? == word {
                return Ok(whole);
            }
        }
        self.contended()
    }

    /// Whether a key has a value.
    ///
    /// # Errors
    /// [`SharedStoreError`].
    pub fn contains(&mut self, direct: &mut Direct, key: &[u8]) -> Result<bool> {
        Ok(!self.find(direct, key)?.0.is_empty())
    }

    /// Makes `parts`, one after the other, the value of a key. They are not joined here.
    ///
    /// # Errors
    /// [`DirectError::Full`], [`SharedStoreError::IndexFull`] and others. The key then has the value that it
    /// had.
    pub fn put(&mut self, direct: &mut Direct, key: &[u8], parts: &[&[u8]]) -> Result<()> {
        let parts: Vec<(*const u8, usize)> = parts.iter().map(|part| (part.as_ptr(), part.len())).collect();
        // SAFETY: the parts are borrowed during the call.
        unsafe { self.put_at(direct, key, &parts) }
    }

    /// As [`SharedStore::put`], of parts at addresses.
    ///
    /// # Safety
    /// Each is memory that can be read during the call. If it is written meanwhile, the value has any of the
    /// bytes.
    ///
    /// # Errors
    /// As [`SharedStore::put`].
    pub unsafe fn put_at(
        &mut self,
        direct: &mut Direct,
        key: &[u8],
        parts: &[(*const u8, usize)],
    ) -> Result<()> {
        if key.len() as u64 > LONGEST_KEY {
            return Err(SharedStoreError::TooLong);
        }
        let bytes = parts.iter().map(|(_, len)| *len as u64).sum();
        let head = header(key, bytes);
        let mut all = vec![(head.as_ptr(), head.len())];
        all.extend(parts.iter().filter(|(_, len)| *len > 0));
        for _ in 0..TRIES {
            let (number, slot) = self.take(direct, head.len() as u64 + bytes)?;
            // SAFETY: the caller's promise for the parts; the header is borrowed during the call.
            match unsafe { self.write(direct, number, slot, &all) } {
                Ok(true) if self.show(direct, key, number, slot)? => return Ok(()),
                Ok(_) => {}
                Err(SharedStoreError::Direct(error)) if is_full(&error) => {
                    if !self.has_made_room(direct, number, slot)? {
                        return Err(error.into());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        self.contended()
    }

    /// The servers have no room for a slot: looks for some; whether it is worth another try.
    fn has_made_room(&mut self, direct: &mut Direct, number: u64, slot: u64) -> Result<bool> {
        let Own { extent, versions, .. } = &self.own[&number];
        // A slot that was written before has room already.
        let (slot_bytes, was_written) = (extent.slot_bytes, versions.contains_key(&slot));
        Ok(!was_written && self.collect(direct, slot_bytes)? || self.adopt(direct)? > 0)
    }

    /// Fills a slot; false if its extent is no longer this process's. The slot is free if that fails.
    ///
    /// # Safety
    /// As [`SharedStore::put_at`].
    unsafe fn write(
        &mut self,
        direct: &mut Direct,
        number: u64,
        slot: u64,
        parts: &[(*const u8, usize)],
    ) -> Result<bool> {
        let Extent { region, slot_bytes } = self.own[&number].extent;
        // SAFETY: the caller's promise, until the end of this call, which is that of the operation.
        let pending = unsafe { start_put_parts(direct, region, slot * slot_bytes, parts) };
        let Err(error) = pending.and_then(|pending| direct.wait(pending)) else { return Ok(true) };
        if is_gone(&error) && !self.keeps(direct, number)? {
            // Another process has taken it over and freed it.
            self.open.remove(&number);
            return Ok(false);
        }
        self.own.get_mut(&number).expect("its slot was taken").free.insert(0, slot);
        Err(error.into())
    }

    /// Makes a value that was written visible; false if its extent is no longer this process's.
    fn show(&mut self, direct: &mut Direct, key: &[u8], number: u64, slot: u64) -> Result<bool> {
        let word = self.new_word(Home::of(key, self.buckets).tag, number, slot);
        for _ in 0..TRIES {
            let (found, empty) = self.find(direct, key)?;
            let (place, before) = match (found.first(), empty.first()) {
                (Some(found), _) => (found.place, found.word),
                (None, Some(place)) => (*place, Word::EMPTY),
                (None, None) => {
                    self.let_go(word);
                    return Err(SharedStoreError::IndexFull { name: self.name.clone() });
                }
            };
            if !self.keeps(direct, number)? {
                return Ok(false);
            }
            if self.replace(direct, place, before, word)? {
                self.let_go(before);
                return self.settle(direct, key, number);
            }
        }
        self.let_go(word);
        self.contended()
    }

    /// A value of this process was made visible: the only one of its key. False if it may be lost, because
    /// its extent is no longer this process's.
    fn settle(&mut self, direct: &mut Direct, key: &[u8], number: u64) -> Result<bool> {
        // Two processes may have put a new key into two places. The first is the key's.
        for Found { place, word, .. } in self.find(direct, key)?.0.into_iter().skip(1) {
            if self.replace(direct, place, word, Word::EMPTY)? {
                self.let_go(word);
            }
        }
        // A process that takes an extent over says so first, and then moves what is visible.
        self.keeps(direct, number)
    }

    /// Removes a key with its value; whether it had one.
    ///
    /// # Errors
    /// [`SharedStoreError`].
    pub fn remove(&mut self, direct: &mut Direct, key: &[u8]) -> Result<bool> {
        let mut removed = false;
        for _ in 0..TRIES {
            // The others first: what is left is the key's value.
            let Some(Found { place, word, .. }) = self.find(direct, key)?.0.pop() else { return Ok(removed) };
            if self.replace(direct, place, word, Word::EMPTY)? {
                removed = true;
                self.let_go(word);
            }
        }
        self.contended()
    }

    /// The keys that have a value, in no particular order. Reads the whole index.
    ///
    /// # Errors
    /// [`SharedStoreError`].
    pub fn keys(&mut self, direct: &mut Direct) -> Result<Vec<Vec<u8>>> {
        let mut keys = BTreeSet::new();
        for (_, word) in self.words(direct)? {
            if let Some(value) = self.value(direct, word)?
                && !keys.contains(&value.key)
                && self.contains(direct, &value.key)?
            {
                keys.insert(value.key);
            }
        }
        Ok(keys.into_iter().collect())
    }

    /// How many keys have a value; the servers count.
    ///
    /// # Errors
    /// [`SharedStoreError`].
    pub fn len(&self, direct: &mut Direct) -> Result<u64> {
        let words = Layout::bytes(WORD)?.contiguous(self.index.bytes() / WORD)?;
        Ok(direct.count(self.index, 0, &words, Filter::not_equal(0u64))?)
    }

    // --- extents

    fn is_owner(&self, direct: &mut Direct, number: u64) -> Result<bool> {
        Ok(direct.get_value::<u64>(self.head, Self::at(number, OWNER))? == self.me)
    }

    /// Whether an extent that was this process's still is; if another one has taken it over, it is let go of.
    fn keeps(&mut self, direct: &mut Direct, number: u64) -> Result<bool> {
        let keeps = self.is_owner(direct, number)?;
        if !keeps {
            self.own.remove(&number);
        }
        Ok(keeps)
    }

    /// A value is not visible any more: if its slot is this process's, it is free.
    fn let_go(&mut self, word: Word) {
        if word != Word::EMPTY
            && let Some(own) = self.own.get_mut(&word.extent())
        {
            own.free.push(word.slot());
        }
    }

    fn new_word(&mut self, tag: u64, number: u64, slot: u64) -> Word {
        let versions = &mut self.own.get_mut(&number).expect("it has the slot").versions;
        let version = versions.entry(slot).or_insert_with(|| u64::from_le_bytes(random_bytes()));
        *version = version.wrapping_add(1) % VERSIONS;
        Word::new(tag, *version, slot, number)
    }

    /// A free slot of an extent of this process's.
    fn take(&mut self, direct: &mut Direct, bytes: u64) -> Result<(u64, u64)> {
        self.beat(direct)?;
        let slot_bytes = class(bytes);
        loop {
            if let Some(taken) = self.take_free(slot_bytes) {
                return Ok(taken);
            }
            if !self.collect(direct, slot_bytes)? {
                self.make(direct, slot_bytes)?;
            }
        }
    }

    fn take_free(&mut self, slot_bytes: u64) -> Option<(u64, u64)> {
        let of_class = self.own.iter_mut().filter(|(_, own)| own.extent.slot_bytes == slot_bytes);
        of_class.filter_map(|(number, own)| Some((*number, own.free.pop()?))).next()
    }

    /// Looks which values of this process others have replaced or removed; whether that gives slots that were
    /// written before. No put is under way that has taken a slot.
    fn collect(&mut self, direct: &mut Direct, slot_bytes: u64) -> Result<bool> {
        let is_of_class = |own: &Own| own.extent.slot_bytes == slot_bytes;
        if !self.own.values().any(is_of_class) {
            return Ok(false);
        }
        let words = self.words(direct)?;
        let used: BTreeSet<(u64, u64)> = words.iter().map(|(_, word)| (word.extent(), word.slot())).collect();
        let mut gives = false;
        for (number, own) in self.own.iter_mut().filter(|(_, own)| is_of_class(own)) {
            let free = (0..own.slots).filter(|slot| !used.contains(&(*number, *slot)));
            own.free = free.collect();
            // Those that were written are taken first.
            own.free.sort_by_key(|slot| (own.versions.contains_key(slot), std::cmp::Reverse(*slot)));
            gives |= own.free.last().is_some_and(|slot| own.versions.contains_key(slot));
        }
        Ok(gives)
    }

    /// Makes an extent.
    fn make(&mut self, direct: &mut Direct, slot_bytes: u64) -> Result<()> {
        let number = direct.fetch_add(self.head, EXTENTS * WORD, 1u64)?;
        if number >= MOST_EXTENTS {
            return Err(SharedStoreError::NoExtents { name: self.name.clone() });
        }
        let slots = (slot_bytes * SLOTS_AT_BEST).clamp(LEAST_EXTENT, MOST_EXTENT) / slot_bytes;
        let slots = slots.clamp(1, MOST_SLOTS);
        let words = Layout::bytes(EACH * WORD)?;
        direct.put_values(self.head, Self::at(number, 0), &words, &[slot_bytes, self.me, now()])?;
        let region = direct.open_or_create(&format!("{}.{number}", self.name), slots * slot_bytes)?;
        let extent = Extent { region, slot_bytes };
        self.open.insert(number, extent);
        let free = (0..slots).rev().collect();
        self.own.insert(number, Own { extent, slots, free, versions: BTreeMap::new() });
        Ok(())
    }

    /// Says that this process lives.
    fn beat(&mut self, direct: &mut Direct) -> Result<()> {
        if self.heard.is_none_or(|heard| heard.elapsed() > HEARD_EVERY) {
            self.heard = Some(Instant::now());
            for number in self.own.keys().chain(self.retired.keys()) {
                direct.put_value(self.head, Self::at(*number, HEARD), now())?;
            }
        }
        Ok(())
    }

    /// Takes over the extents of processes that have not been heard of for as long as the store was told, and
    /// gives the room of those back that it took over so long ago; how many of both. A put that finds no room
    /// does it by itself.
    ///
    /// # Errors
    /// [`DirectError::Full`] if there is no room to move values to, and others.
    pub fn adopt(&mut self, direct: &mut Direct) -> Result<u64> {
        let mut count = 0;
        let is_old = |since: &&Instant| since.elapsed() >= self.stale;
        let old: Vec<u64> =
            self.retired.iter().filter(|(_, since)| is_old(since)).map(|(number, _)| *number).collect();
        for number in old {
            self.free(direct, number)?;
            count += 1;
        }
        let extents = direct.get_value::<u64>(self.head, EXTENTS * WORD)?.min(MOST_EXTENTS);
        let rows = Layout::bytes(EACH * WORD * extents)?;
        let rows =
            if extents > 0 { direct.get_values::<u64>(self.head, FIRST * WORD, &rows)? } else { Vec::new() };
        for (number, &[_, owner, heard]) in (0..).zip(rows.as_chunks().0) {
            let is_stale = now().saturating_sub(heard) >= self.stale.as_secs();
            if owner == 0 || owner == self.me || !is_stale {
                continue;
            }
            if direct.compare_exchange(self.head, Self::at(number, OWNER), owner, self.me)? == owner {
                // It may have been this process's before, which was taken for dead.
                self.own.remove(&number);
                self.retired.insert(number, Instant::now());
                direct.put_value(self.head, Self::at(number, HEARD), now())?;
                self.move_all(direct, number)?;
                count += 1;
            }
        }
        Ok(count)
    }

    /// Gives the room of an extent back that it took over.
    fn free(&mut self, direct: &mut Direct, number: u64) -> Result<()> {
        if !self.is_owner(direct, number)? {
            // It has been taken over once more.
            self.retired.remove(&number);
            return Ok(());
        }
        if let Some(extent) = self.extent(direct, number)? {
            // Its former owner may have made something visible since.
            self.move_all(direct, number)?;
            self.open.remove(&number);
            direct.free(extent.region);
        }
        self.retired.remove(&number);
        Ok(direct.put_value(self.head, Self::at(number, OWNER), 0u64)?)
    }

    /// Moves what is visible in an extent that it took over. The former owner may still write to its slots,
    /// so that none of them can be used.
    fn move_all(&mut self, direct: &mut Direct, number: u64) -> Result<()> {
        if self.extent(direct, number)?.is_some() {
            for (_, word) in self.words(direct)?.into_iter().filter(|(_, word)| word.extent() == number) {
                self.move_value(direct, word)?;
            }
        }
        Ok(())
    }

    /// Moves a value to an extent of this process's.
    fn move_value(&mut self, direct: &mut Direct, mut word: Word) -> Result<()> {
        for _ in 0..TRIES {
            let Some(value) = self.value(direct, word)? else { return Ok(()) };
            let (key, bytes) = (value.key.clone(), value.bytes);
            let Some(content) = self.whole(direct, word, value)? else { return Ok(()) };
            let head = header(&key, bytes);
            let slot_bytes = class(head.len() as u64 + bytes);
            let Some((number, slot)) = self.take_free(slot_bytes) else {
                self.make(direct, slot_bytes)?;
                continue;
            };
            let parts = [(head.as_ptr(), head.len()), (content.as_ptr(), content.len())];
            // SAFETY: both are borrowed during the call.
            let is_written =
                unsafe { self.write(direct, number, slot, &parts[..1 + usize::from(!content.is_empty())]) }?;
            // It may itself have been taken over meanwhile.
            if !is_written || !self.keeps(direct, number)? {
                continue;
            }
            let home = Home::of(&key, self.buckets);
            let moved = self.new_word(home.tag, number, slot);
            let mut is_moved = false;
            for (place, there) in self.bucket_words(direct, home)? {
                is_moved |= !is_moved && there == word && self.replace(direct, place, word, moved)?;
            }
            if !is_moved {
                // It was replaced or removed meanwhile.
                self.let_go(moved);
                return Ok(());
            }
            if self.keeps(direct, number)? {
                return Ok(());
            }
            word = moved;
        }
        self.contended()
    }
}

fn header(key: &[u8], bytes: u64) -> Vec<u8> {
    [&MARK[..], &(key.len() as u64).to_le_bytes(), &bytes.to_le_bytes(), key].concat()
}

/// Seconds since 1970, by this machine's clock.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The region was freed by another process.
fn is_gone(error: &DirectError) -> bool {
    use PoolError::{Denied, NoSuchRegion};
    matches!(
        error,
        DirectError::NoSuchName { .. }
            | DirectError::NoSuchRegion
            | DirectError::Pool(NoSuchRegion | Denied { .. })
    )
}

fn is_full(error: &DirectError) -> bool {
    matches!(error, DirectError::Full { .. } | DirectError::Pool(PoolError::Refused { .. }))
}
