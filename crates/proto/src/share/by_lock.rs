//! What a rank knows of each lock, found by the lock's number in one step: a program may have many thousands, and all that is done with a message
//! about one looks it up again and again. A tree of so many has its levels in as many lines of memory that no cache holds.
//!
//! Places are found by hashing, so the order of the entries depends on what came before. It decides nothing: what is asked of all entries is asked in
//! any order, and the hash of a table is that of its entries in the order of their locks.

use std::hash::{Hash, Hasher};

use super::LockId;

/// A table. Invariants: `places` is empty or a power of two and at least twice as long as `entries`; each entry's number is in it once, at the place
/// that the lock's hash says or behind it, with no free place in between.
#[derive(Clone, Debug)]
pub(crate) struct ByLock<T> {
    entries: Vec<(LockId, T)>,
    places: Vec<u32>,
}

const FREE: u32 = u32::MAX;
const LEAST_PLACES: usize = 8;

impl<T> Default for ByLock<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), places: Vec::new() }
    }
}

/// The same for equal tables, whatever became of them before.
impl<T: Hash> Hash for ByLock<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut sorted: Vec<&(LockId, T)> = self.entries.iter().collect();
        sorted.sort_unstable_by_key(|&&(lock, _)| lock);
        sorted.hash(state);
    }
}

impl<T> ByLock<T> {
    /// In any order.
    pub fn iter(&self) -> impl Iterator<Item = (LockId, &T)> {
        self.entries.iter().map(|(lock, value)| (*lock, value))
    }

    pub fn contains(&self, lock: LockId) -> bool {
        self.find(lock).is_some()
    }

    pub fn get(&self, lock: LockId) -> Option<&T> {
        let (_, number) = self.find(lock)?;
        Some(&self.entries[number].1)
    }

    /// The entry, which `make` makes if there is none.
    pub fn get_or_insert_with(&mut self, lock: LockId, make: impl FnOnce() -> T) -> &mut T {
        let number = match self.find(lock) {
            Some((_, number)) => number,
            None => self.add(lock, make()),
        };
        &mut self.entries[number].1
    }

    pub fn insert(&mut self, lock: LockId, value: T) {
        match self.find(lock) {
            Some((_, number)) => self.entries[number].1 = value,
            None => {
                self.add(lock, value);
            }
        }
    }

    pub fn remove(&mut self, lock: LockId) -> Option<T> {
        let (mut gap, number) = self.find(lock)?;
        // Those behind it are found without it: whoever may lie in the gap moves there, which leaves the next one.
        let mut at = self.behind(gap);
        while self.places[at] != FREE {
            let wanted = self.first_place(self.entries[self.places[at] as usize].0);
            if self.distance(wanted, at) >= self.distance(gap, at) {
                self.places[gap] = self.places[at];
                gap = at;
            }
            at = self.behind(at);
        }
        self.places[gap] = FREE;
        let last = self.entries.len() - 1;
        if number < last {
            let (place, _) = self.find(self.entries[last].0).expect("every entry has a place");
            self.places[place] = as_place(number);
        }
        Some(self.entries.swap_remove(number).1)
    }

    /// Its place and its number.
    fn find(&self, lock: LockId) -> Option<(usize, usize)> {
        if self.places.is_empty() {
            return None;
        }
        let mut at = self.first_place(lock);
        loop {
            let number = self.places[at];
            if number == FREE {
                return None;
            }
            if self.entries[number as usize].0 == lock {
                return Some((at, number as usize));
            }
            at = self.behind(at);
        }
    }

    /// There is none for this lock. Returns its number.
    fn add(&mut self, lock: LockId, value: T) -> usize {
        let number = self.entries.len();
        self.entries.push((lock, value));
        if self.entries.len() * 2 > self.places.len() {
            self.places = vec![FREE; (self.places.len() * 2).max(LEAST_PLACES)];
            (0..=number).for_each(|number| self.put(number));
        } else {
            self.put(number);
        }
        number
    }

    fn put(&mut self, number: usize) {
        let mut at = self.first_place(self.entries[number].0);
        while self.places[at] != FREE {
            at = self.behind(at);
        }
        self.places[at] = as_place(number);
    }

    /// Multiplied by the golden ratio, numbers that differ in any bits differ in the highest.
    fn first_place(&self, lock: LockId) -> usize {
        let high = lock.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - self.places.len().ilog2());
        usize::try_from(high).expect("a place is below the number of places")
    }

    fn behind(&self, place: usize) -> usize {
        (place + 1) & (self.places.len() - 1)
    }

    fn distance(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & (self.places.len() - 1)
    }
}

fn as_place(number: usize) -> u32 {
    u32::try_from(number).ok().filter(|&number| number != FREE).expect("fewer locks than that fit into memory")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::hash::DefaultHasher;

    use super::*;
    use proptest::prelude::*;

    fn hash_of(table: &ByLock<u32>) -> u64 {
        let mut hasher = DefaultHasher::new();
        table.hash(&mut hasher);
        hasher.finish()
    }

    fn sorted(table: &ByLock<u32>) -> Vec<(LockId, u32)> {
        let mut all: Vec<_> = table.iter().map(|(lock, &value)| (lock, value)).collect();
        all.sort_unstable();
        all
    }

    proptest! {
        /// Few numbers, many of which begin at the same place, put in and taken out in any order.
        #[test]
        fn a_table_holds_what_a_map_holds(steps in proptest::collection::vec((0_u64..40, any::<bool>(), any::<u32>()), 0..300)) {
            let (mut table, mut map) = (ByLock::default(), BTreeMap::new());
            for (number, takes, value) in steps {
                let lock = LockId(number << 58 | number >> 2);
                if takes {
                    prop_assert_eq!(table.remove(lock), map.remove(&lock));
                } else {
                    prop_assert_eq!(*table.get_or_insert_with(lock, || value), *map.entry(lock).or_insert(value));
                }
                for number in 0..40 {
                    let lock = LockId(number << 58 | number >> 2);
                    prop_assert_eq!(table.get(lock), map.get(&lock));
                    prop_assert_eq!(table.contains(lock), map.contains_key(&lock));
                }
            }
            prop_assert_eq!(sorted(&table), map.clone().into_iter().collect::<Vec<_>>());
            let mut other = ByLock::default();
            for (&lock, &value) in map.iter().rev() {
                other.get_or_insert_with(lock, || value);
            }
            prop_assert_eq!(hash_of(&table), hash_of(&other), "equal tables have the same hash");
        }
    }

    #[test]
    fn ten_thousand_locks_that_are_multiples_of_a_power_of_two_are_found_at_once() {
        let mut table = ByLock::default();
        for number in 0..10_000_u32 {
            table.get_or_insert_with(LockId(u64::from(number) << 12), || number);
        }
        let far = |number: u64| {
            let lock = LockId(number << 12);
            let (place, _) = table.find(lock).unwrap();
            table.distance(table.first_place(lock), place)
        };
        assert!((0..10_000_u64).map(far).sum::<usize>() < 10_000, "most are where they are looked for first");
    }
}
