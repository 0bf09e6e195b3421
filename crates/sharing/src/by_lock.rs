//! A rank's records of each lock, found by the lock's number in one step: a program may have many thousands,
//! and the handling of one message looks the same lock up again and again. A tree of that many would spread
//! its levels over more memory than any cache holds.
//!
//! The order of the entries depends on their history, which is the same in every run. No decision depends on
//! it: every use of all entries is independent of the order, and the hash of a table is that of its entries
//! in the order of their locks.

use std::hash::{Hash, Hasher};

use indexmap::IndexMap;
use rustc_hash::FxBuildHasher;

use super::LockId;

#[derive(Clone, Debug)]
pub(crate) struct ByLock<T> {
    entries: IndexMap<LockId, T, FxBuildHasher>,
    /// The place of the last entry looked up. The handling of one message concerns one lock, so the next
    /// look-up is mostly of the same.
    last: usize,
}

impl<T> Default for ByLock<T> {
    fn default() -> Self {
        Self { entries: IndexMap::default(), last: 0 }
    }
}

/// Equal for equal tables, whatever their history.
impl<T: Hash> Hash for ByLock<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut sorted: Vec<(&LockId, &T)> = self.entries.iter().collect();
        sorted.sort_unstable_by_key(|&(lock, _)| lock);
        sorted.hash(state);
    }
}

impl<T> ByLock<T> {
    /// In any order.
    pub fn iter(&self) -> impl Iterator<Item = (LockId, &T)> {
        self.entries.iter().map(|(lock, value)| (*lock, value))
    }

    /// The entry of the last look-up, if it is of this lock.
    fn again(&self, lock: LockId) -> Option<&T> {
        self.entries.get_index(self.last).filter(|&(&of, _)| of == lock).map(|(_, value)| value)
    }

    pub fn get(&self, lock: LockId) -> Option<&T> {
        self.again(lock).or_else(|| self.entries.get(&lock))
    }

    pub fn get_mut(&mut self, lock: LockId) -> Option<&mut T> {
        if self.again(lock).is_none() {
            self.last = self.entries.get_index_of(&lock)?;
        }
        Some(&mut self.entries[self.last])
    }

    /// The entry, which `make` makes if there is none.
    pub fn get_or_insert_with(&mut self, lock: LockId, make: impl FnOnce() -> T) -> &mut T {
        if self.again(lock).is_none() {
            let entry = self.entries.entry(lock);
            self.last = entry.index();
            entry.or_insert_with(make);
        }
        &mut self.entries[self.last]
    }

    pub fn insert(&mut self, lock: LockId, value: T) {
        self.entries.insert(lock, value);
    }

    pub fn remove(&mut self, lock: LockId) -> Option<T> {
        self.entries.swap_remove(&lock)
    }
}

#[cfg(test)]
mod tests {
    use std::hash::DefaultHasher;

    use super::*;

    fn hash_of(table: &ByLock<u32>) -> u64 {
        let mut hasher = DefaultHasher::new();
        table.hash(&mut hasher);
        hasher.finish()
    }

    #[test]
    fn equal_tables_have_the_same_hash_whatever_became_of_them_before() {
        let (mut table, mut other) = (ByLock::default(), ByLock::default());
        (0..100).for_each(|lock| _ = table.get_or_insert_with(LockId(lock), || 7));
        (0..100).step_by(3).for_each(|lock| _ = table.remove(LockId(lock)));
        (0..100).rev().filter(|lock| lock % 3 != 0).for_each(|lock| other.insert(LockId(lock), 7));
        assert!(table.iter().ne(other.iter()), "they have another order");
        assert_eq!(hash_of(&table), hash_of(&other));
        other.insert(LockId(1), 8);
        assert_ne!(hash_of(&table), hash_of(&other));
    }

    #[test]
    fn what_was_looked_up_last_is_not_taken_for_what_lies_there_now() {
        let mut table = ByLock::default();
        (0..3).for_each(|lock| _ = table.get_or_insert_with(LockId(lock), || lock));
        assert_eq!(table.get_mut(LockId(0)), Some(&mut 0));
        assert_eq!(table.remove(LockId(0)), Some(0));
        assert_eq!(table.get(LockId(0)), None, "the last one has taken its place");
        assert_eq!(table.get_mut(LockId(0)), None);
        assert_eq!(table.get(LockId(2)), Some(&2));
        assert_eq!(table.get_mut(LockId(2)), Some(&mut 2));
        assert_eq!((table.remove(LockId(1)), table.remove(LockId(2))), (Some(1), Some(2)));
        assert_eq!(table.get(LockId(2)), None, "nothing lies there");
        assert_eq!(table.get_mut(LockId(2)), None);
        assert_eq!(table.get_or_insert_with(LockId(5), || 5), &5);
    }
}
