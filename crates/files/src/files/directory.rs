//! The names of one directory.

use std::collections::BTreeMap;

use crate::refusal::Refusal;

/// Places of `.` and `..`; names come behind.
pub const PLACES: u64 = 2;

/// One name of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry<'a> {
    pub name: &'a [u8],
    pub number: u64,
    /// Where a list goes on behind it, whatever was made and removed meanwhile.
    pub place: u64,
}

/// Invariant: `places` has what `names` has.
#[derive(Debug)]
pub struct Directory {
    pub parent: u64,
    /// To the inode, and the place in lists.
    names: BTreeMap<Vec<u8>, (u64, u64)>,
    places: BTreeMap<u64, Vec<u8>>,
    next: u64,
}

impl Directory {
    pub fn new(parent: u64) -> Self {
        Self { parent, names: BTreeMap::new(), places: BTreeMap::new(), next: PLACES + 1 }
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn find(&self, name: &[u8]) -> Result<u64, Refusal> {
        self.names.get(name).map(|(number, _)| *number).ok_or(Refusal::NotFound)
    }

    pub fn insert(&mut self, name: &[u8], number: u64) -> Result<(), Refusal> {
        if self.names.contains_key(name) {
            return Err(Refusal::Exists);
        }
        self.names.insert(name.to_vec(), (number, self.next));
        self.places.insert(self.next, name.to_vec());
        self.next += 1;
        Ok(())
    }

    pub fn remove(&mut self, name: &[u8]) {
        if let Some((_, place)) = self.names.remove(name) {
            self.places.remove(&place);
        }
    }

    pub fn list(&self, own: u64, behind: u64) -> impl Iterator<Item = Entry<'_>> {
        let dots = [(&b"."[..], own, 1), (&b".."[..], self.parent, PLACES)];
        let dots = dots.into_iter().map(|(name, number, place)| Entry { name, number, place });
        let named = self.places.range(behind.saturating_add(1)..).map(|(place, name)| {
            let number = self.names[name].0;
            Entry { name, number, place: *place }
        });
        dots.filter(move |entry| entry.place > behind).chain(named)
    }
}
