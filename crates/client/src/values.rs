//! A store: from keys to bytes in the pool, for what a program would otherwise spill to its disk.
//!
//! A value lies in a slot of the next size class (four to each power of two, so at most a fifth of a slot is
//! empty), slots lie in extents, and an extent is a region of the direct view. The index is in this process:
//! a [`Store`] is its own alone, and with its lease everything is gone.
//!
//! ```text
//!   put    takes a slot, writes all buffers there in one operation, then lets go of what the key had
//!   get    one operation
//!   remove gives the slot back; the last of an extent frees the region, unless it is small and the only one
//!          of its class that has room
//! ```
//!
//! **At once.** A put that fails leaves the key as it was. Nothing is cached: bytes that were never written
//! take no room at the servers.

mod shared;
mod slots;

use std::collections::BTreeMap;
use std::time::Instant;

use rampool_wire::layout::{Layout, LayoutError};

use crate::direct::{Direct, DirectError, DirectRegion, Pending};
pub use shared::{SharedStore, SharedStoreError};
use slots::{Place, Slots};

/// Why an operation of a store failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error(transparent)]
    Direct(#[from] DirectError),
    #[error("the value has {bytes} bytes, there is room for {room}")]
    Room { bytes: u64, room: u64 },
}

impl From<LayoutError> for StoreError {
    fn from(error: LayoutError) -> Self {
        Self::Direct(error.into())
    }
}

/// A mapping from keys to bytes, which lie at the memory servers of a lease.
///
/// Invariant: each value's slot is taken in `slots`, and each extent of `slots` has a region.
pub struct Store {
    direct: Direct,
    slots: Slots,
    regions: BTreeMap<u64, DirectRegion>,
    /// Of extents that are no more; not freed yet.
    unused: Vec<DirectRegion>,
    index: BTreeMap<Vec<u8>, Value>,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Value {
    /// None of no bytes.
    place: Option<Place>,
    bytes: u64,
}

impl Store {
    /// A store in the lease that `direct` has opened, or joined.
    #[must_use]
    pub fn new(direct: Direct) -> Self {
        Self {
            direct,
            slots: Slots::default(),
            regions: BTreeMap::new(),
            unused: Vec::new(),
            index: BTreeMap::new(),
            bytes: 0,
        }
    }

    /// Values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.index.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Bytes of all values together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.index.keys().map(Vec::as_slice)
    }

    /// Bytes of the value of this key.
    #[must_use]
    pub fn value_bytes(&self, key: &[u8]) -> Option<u64> {
        self.index.get(key).map(|value| value.bytes)
    }

    /// Makes `parts`, one after the other, the value of a key. They are not joined here. Blocks until they
    /// are at the servers.
    ///
    /// # Errors
    /// [`DirectError::Full`] and others; the key then has the value that it had before.
    pub fn put(&mut self, key: &[u8], parts: &[&[u8]]) -> Result<(), StoreError> {
        let parts: Vec<(*const u8, usize)> = parts.iter().map(|part| (part.as_ptr(), part.len())).collect();
        // SAFETY: the parts are borrowed during the call.
        unsafe { self.put_at(key, &parts) }
    }

    /// As [`Store::put`], of parts at addresses.
    ///
    /// # Safety
    /// Each is memory that can be read during the call and does not change meanwhile.
    ///
    /// # Errors
    /// As [`Store::put`].
    pub unsafe fn put_at(&mut self, key: &[u8], parts: &[(*const u8, usize)]) -> Result<(), StoreError> {
        // SAFETY: the caller's promise, until the end of this call, which is that of the operation.
        let put = unsafe { self.start_put_at(key, parts) }?;
        let finished = self.finish_put(put);
        self.tidy();
        finished
    }

    /// Begins to put. The key has its new value once [`Store::finish_put`] has returned. If what was begun is
    /// given up instead ([`Store::drop_put`]), it keeps what it has.
    ///
    /// # Safety
    /// As [`Store::put_at`], until the put is finished or dropped. Parts that change meanwhile are no value
    /// to finish.
    ///
    /// # Errors
    /// As [`Store::put`].
    pub unsafe fn start_put_at(
        &mut self,
        key: &[u8],
        parts: &[(*const u8, usize)],
    ) -> Result<PendingPut, StoreError> {
        let bytes = parts.iter().map(|(_, len)| *len as u64).sum();
        let room = self.take_room(bytes)?;
        // SAFETY: the caller's promise.
        unsafe { self.start_put_in(room, key, parts) }
    }

    /// Whether [`Store::take_room`] for so many bytes asks no server.
    #[must_use]
    pub fn has_room(&self, bytes: u64) -> bool {
        bytes == 0 || self.slots.has_room(bytes)
    }

    /// Room for a value, in a new region if there is none. Blocks as long as that takes.
    ///
    /// # Errors
    /// [`StoreError::Direct`].
    pub fn take_room(&mut self, bytes: u64) -> Result<Room, StoreError> {
        Ok(Room { place: if bytes == 0 { None } else { Some(self.take(bytes)?) }, bytes })
    }

    /// Gives room back.
    pub fn drop_room(&mut self, room: Room) {
        room.place.into_iter().for_each(|place| self.give_back(place));
    }

    /// As [`Store::start_put_at`], into room for as many bytes as the parts have.
    ///
    /// # Safety
    /// As [`Store::start_put_at`].
    ///
    /// # Errors
    /// As [`Store::put`].
    ///
    /// # Panics
    /// If the room is for another number of bytes.
    pub unsafe fn start_put_in(
        &mut self,
        room: Room,
        key: &[u8],
        parts: &[(*const u8, usize)],
    ) -> Result<PendingPut, StoreError> {
        let parts: Vec<(*const u8, usize)> = parts.iter().copied().filter(|(_, len)| *len > 0).collect();
        let bytes = parts.iter().map(|(_, len)| *len as u64).sum::<u64>();
        assert_eq!(bytes, room.bytes, "the room is for the parts");
        let (key, value) = (key.to_vec(), Value { place: room.place, bytes });
        let Some(place) = room.place else { return Ok(PendingPut { key, value, pending: None }) };
        // SAFETY: the caller's promise.
        match unsafe { start_put_parts(&mut self.direct, self.regions[&place.extent], place.offset, &parts) }
        {
            Ok(pending) => Ok(PendingPut { key, value, pending: Some(pending) }),
            Err(error) => {
                self.give_back(place);
                Err(error.into())
            }
        }
    }

    /// Waits until a put has come to its end, but not beyond `deadline`; whether it has.
    pub fn put_until(&mut self, put: &PendingPut, deadline: Instant) -> bool {
        put.pending.as_ref().is_none_or(|pending| self.direct.wait_until(pending, deadline))
    }

    /// Waits for the end of a put, and makes its bytes the value of its key. The room of the value before may
    /// wait for [`Store::tidy`].
    ///
    /// # Errors
    /// As [`Store::put`].
    pub fn finish_put(&mut self, put: PendingPut) -> Result<(), StoreError> {
        let PendingPut { key, value, pending } = put;
        if let Some(pending) = pending
            && let Err(error) = self.direct.wait(pending)
        {
            value.place.into_iter().for_each(|place| self.give_back(place));
            return Err(error.into());
        }
        self.bytes += value.bytes;
        if let Some(before) = self.index.insert(key, value) {
            self.let_go(before);
        }
        Ok(())
    }

    /// Waits for the end of a put, and gives its room back, as [`Store::finish_put`] does.
    pub fn drop_put(&mut self, put: PendingPut) {
        if let Some(pending) = put.pending {
            // Failed or not, nothing refers to what it wrote.
            drop(self.direct.wait(pending));
        }
        put.value.place.into_iter().for_each(|place| self.give_back(place));
    }

    /// The value of a key.
    ///
    /// # Errors
    /// [`StoreError::Direct`].
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(pending) = self.start_get(key)? else { return Ok(None) };
        Ok(Some(self.wait(pending)?))
    }

    /// Reads the value of a key into the first bytes of a buffer; gives its length.
    ///
    /// # Errors
    /// [`StoreError::Room`] if the buffer is too short.
    pub fn get_into(&mut self, key: &[u8], buffer: &mut [u8]) -> Result<Option<usize>, StoreError> {
        let Some(value) = self.index.get(key).copied() else { return Ok(None) };
        let room = buffer.len() as u64;
        let fits = usize::try_from(value.bytes).ok().and_then(|bytes| buffer.get_mut(..bytes));
        let Some(buffer) = fits else { return Err(StoreError::Room { bytes: value.bytes, room }) };
        if let Some(place) = value.place {
            self.direct.get(self.regions[&place.extent], place.offset, buffer)?;
        }
        Ok(Some(buffer.len()))
    }

    /// Begins to read the value of a key, as it is now. [`Store::wait`] gives it.
    ///
    /// # Errors
    /// [`DirectError::NoMemory`] where this process has none for it.
    pub fn start_get(&mut self, key: &[u8]) -> Result<Option<PendingValue>, StoreError> {
        let Some(value) = self.index.get(key).copied() else { return Ok(None) };
        let Some(place) = value.place else { return Ok(Some(PendingValue { pending: None })) };
        let pending =
            self.direct.start_get(self.regions[&place.extent], place.offset, &Layout::bytes(value.bytes)?)?;
        Ok(Some(PendingValue { pending: Some(pending) }))
    }

    /// Waits until a value is here, but not beyond `deadline`; whether it is.
    pub fn wait_until(&mut self, value: &PendingValue, deadline: Instant) -> bool {
        value.pending.as_ref().is_none_or(|pending| self.direct.wait_until(pending, deadline))
    }

    /// Waits for a value.
    ///
    /// # Errors
    /// [`StoreError::Direct`].
    pub fn wait(&mut self, value: PendingValue) -> Result<Vec<u8>, StoreError> {
        Ok(value.pending.map_or_else(|| Ok(Vec::new()), |pending| self.direct.wait(pending))?)
    }

    /// Removes a key with its value; whether it had one. Blocks only where that leaves a region empty.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        let removed = self.start_remove(key);
        self.tidy();
        removed
    }

    /// Removes a key with its value, without blocking; whether it had one. Its room may wait for
    /// [`Store::tidy`].
    pub fn start_remove(&mut self, key: &[u8]) -> bool {
        let Some(value) = self.index.remove(key) else { return false };
        self.let_go(value);
        true
    }

    /// Whether [`Store::tidy`] has something to do.
    #[must_use]
    pub fn is_untidy(&self) -> bool {
        !self.unused.is_empty()
    }

    /// Gives regions that are empty back to the servers. Blocks as long as that takes.
    pub fn tidy(&mut self) {
        if self.unused.is_empty() {
            return;
        }
        // What is still read there has been asked for before, and comes.
        self.direct.wait_all();
        for region in self.unused.drain(..) {
            self.direct.free(region);
        }
    }

    /// Leaves the lease.
    pub fn close(&mut self) {
        self.direct.wait_all();
        self.direct.close();
    }

    fn let_go(&mut self, value: Value) {
        self.bytes -= value.bytes;
        if let Some(place) = value.place {
            self.give_back(place);
        }
    }

    /// A slot for so many bytes, in a region.
    fn take(&mut self, bytes: u64) -> Result<Place, StoreError> {
        let taken = self.slots.take(bytes);
        let extent = taken.place.extent;
        if let Some(bytes) = taken.extent_bytes {
            self.tidy();
            match self.direct.create(bytes) {
                Ok(region) => drop(self.regions.insert(extent, region)),
                Err(error) => {
                    self.slots.forget(extent);
                    return Err(error.into());
                }
            }
        }
        Ok(taken.place)
    }

    fn give_back(&mut self, place: Place) {
        if let Some(extent) = self.slots.give_back(place) {
            self.unused.extend(self.regions.remove(&extent));
        }
    }
}

/// Room for a value that is to come.
#[must_use]
#[derive(Debug)]
pub struct Room {
    /// None for no bytes.
    place: Option<Place>,
    bytes: u64,
}

/// A put under way. It keeps its room until it is finished or dropped by its [`Store`].
#[must_use]
#[derive(Debug)]
pub struct PendingPut {
    key: Vec<u8>,
    value: Value,
    pending: Option<Pending>,
}

/// A value on its way here.
#[must_use]
#[derive(Debug)]
pub struct PendingValue {
    pending: Option<Pending>,
}

/// Begins to put parts, one after the other, as one operation.
///
/// # Safety
/// Each is memory that can be read until the operation has ended. There is a part.
unsafe fn start_put_parts(
    direct: &mut Direct,
    region: DirectRegion,
    offset: u64,
    parts: &[(*const u8, usize)],
) -> Result<Pending, DirectError> {
    let first = parts[0].0;
    let far = |start: *const u8| start.addr().cast_signed().wrapping_sub(first.addr().cast_signed()) as i64;
    let blocks: Vec<(u64, i64)> = parts.iter().map(|(start, len)| (*len as u64, far(*start))).collect();
    let bytes = parts.iter().map(|(_, len)| *len as u64).sum();
    let (there, here) = (Layout::bytes(bytes)?, Layout::bytes(1)?.hindexed(&blocks)?);
    // SAFETY: the layout selects the parts and nothing else; for them the caller has promised it.
    unsafe { direct.start_put_layout_at(region, offset, &there, first, &here) }
}
