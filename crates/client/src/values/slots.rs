//! Which slot of which extent is taken. Decides only: what an extent is, it does not know.

use std::collections::{BTreeMap, BTreeSet};

const PAGE: u64 = 4096;
/// An extent has so many bytes, or one slot where that is larger.
const LEAST_EXTENT: u64 = 4 << 20;
const MOST_EXTENT: u64 = 64 << 20;
const SLOTS_AT_BEST: u64 = 64;

/// A slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    pub extent: u64,
    /// In the extent, in bytes.
    pub offset: u64,
}

pub struct Taken {
    pub place: Place,
    /// The extent is new, and so long.
    pub extent_bytes: Option<u64>,
}

/// Invariant: an extent is in its class's `with_room` as long as it has free slots; no extent but the only
/// one of these, if it is small, has nothing but free slots.
#[derive(Default)]
pub struct Slots {
    /// By the length of a slot.
    with_room: BTreeMap<u64, BTreeSet<u64>>,
    extents: BTreeMap<u64, Extent>,
    next: u64,
}

struct Extent {
    slot_bytes: u64,
    slots: u64,
    free: Vec<u64>,
}

/// Whole pages: up to four as they are, then four classes to each power of two.
pub fn class(bytes: u64) -> u64 {
    let pages = bytes.div_ceil(PAGE).max(1);
    let step = 1 << pages.ilog2().saturating_sub(2);
    pages.next_multiple_of(step) * PAGE
}

impl Slots {
    /// Whether [`Slots::take`] needs no new extent.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.with_room.get(&class(bytes)).is_some_and(|extents| !extents.is_empty())
    }

    /// A slot for so many bytes, at least one.
    pub fn take(&mut self, bytes: u64) -> Taken {
        let slot_bytes = class(bytes);
        let with_room = self.with_room.entry(slot_bytes).or_default();
        let (number, extent_bytes) = match with_room.first() {
            Some(number) => (*number, None),
            None => {
                let slots =
                    ((slot_bytes * SLOTS_AT_BEST).clamp(LEAST_EXTENT, MOST_EXTENT) / slot_bytes).max(1);
                let number = self.next;
                self.next += 1;
                with_room.insert(number);
                self.extents.insert(number, Extent { slot_bytes, slots, free: (0..slots).rev().collect() });
                (number, Some(slots * slot_bytes))
            }
        };
        let extent = self.extents.get_mut(&number).expect("each extent with room is there");
        let slot = extent.free.pop().expect("it has room");
        if extent.free.is_empty() {
            with_room.remove(&number);
        }
        Taken { place: Place { extent: number, offset: slot * slot_bytes }, extent_bytes }
    }

    /// Gives a slot back. The extent, if nothing is in it and it is not kept.
    pub fn give_back(&mut self, place: Place) -> Option<u64> {
        let extent = self.extents.get_mut(&place.extent).expect("a slot that was taken");
        extent.free.push(place.offset / extent.slot_bytes);
        let is_empty = extent.free.len() as u64 == extent.slots;
        let with_room = self.with_room.entry(extent.slot_bytes).or_default();
        with_room.insert(place.extent);
        // A program that puts and removes one value again and again would make and free a region each time.
        // A large one would keep what was written to it, all that time, at the servers.
        let is_kept = with_room.len() == 1 && extent.slots * extent.slot_bytes <= LEAST_EXTENT;
        if !is_empty || is_kept {
            return None;
        }
        self.forget(place.extent);
        Some(place.extent)
    }

    /// There is no such extent.
    pub fn forget(&mut self, number: u64) {
        if let Some(extent) = self.extents.remove(&number)
            && let Some(with_room) = self.with_room.get_mut(&extent.slot_bytes)
        {
            with_room.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_slot_is_at_most_a_quarter_longer_than_what_is_in_it() {
        assert_eq!([1, 4096, 4097, 5 * 4096, 9 * 4096].map(class), [4096, 4096, 8192, 5 * 4096, 10 * 4096]);
        for bytes in (4096..1 << 22).step_by(1023) {
            let slot = class(bytes);
            assert!(slot >= bytes && slot <= bytes.next_multiple_of(PAGE) * 5 / 4, "{bytes}: {slot}");
        }
    }

    proptest! {
        #[test]
        fn no_two_values_have_a_byte_in_common(
            steps in prop::collection::vec((1_u64..200 << 20, 0_usize..20, any::<bool>()), 1..200),
        ) {
            let (mut slots, mut extents) = (Slots::default(), BTreeMap::new());
            let mut taken = Vec::<(Place, u64)>::new();
            for (bytes, which, remove) in steps {
                if remove && !taken.is_empty() {
                    let (place, _) = taken.swap_remove(which % taken.len());
                    if let Some(gone) = slots.give_back(place) {
                        prop_assert!(taken.iter().all(|(place, _)| place.extent != gone));
                        prop_assert!(extents.remove(&gone).is_some());
                    }
                    continue;
                }
                let bytes = (bytes >> (which % 16)).max(1);
                let has_room = slots.has_room(bytes);
                let Taken { place, extent_bytes } = slots.take(bytes);
                prop_assert_eq!(has_room, extent_bytes.is_none());
                if let Some(length) = extent_bytes {
                    prop_assert!(extents.insert(place.extent, length).is_none());
                }
                prop_assert!(place.offset + bytes <= extents[&place.extent]);
                for (other, length) in &taken {
                    let apart = other.offset + length <= place.offset || place.offset + bytes <= other.offset;
                    prop_assert!(apart || other.extent != place.extent);
                }
                taken.push((place, bytes));
            }
            for (place, _) in taken {
                if let Some(gone) = slots.give_back(place) {
                    extents.remove(&gone);
                }
            }
            let most = slots.with_room.values().map(BTreeSet::len).max();
            prop_assert!(most.is_none_or(|most| most <= 1), "what is empty is freed, but for one extent of a \
                class");
            prop_assert!(extents.values().all(|length| *length <= LEAST_EXTENT));
        }
    }
}
