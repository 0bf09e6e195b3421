//! A rank's pages under a software MMU. All pages of a world are equally large.

use std::collections::{BTreeMap, BTreeSet};

use rampool_sharing::config::word_of;
use rampool_sharing::{Diff, LockId, Protection, Recalled, ThreadId};
use rampool_wire::units::{Extent, PageIndex};

/// A rank's copy of the shared pages, and the application's view of them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Memory {
    page_bytes: usize,
    pages: BTreeMap<PageIndex, Slot>,
    /// Locks that threads take without the engine, and what they did with them.
    lent: BTreeMap<LockId, Recalled>,
    /// Locks of words that are lent from the end of the event on: what the golden memory holds of the word is
    /// old until then.
    lent_next: BTreeSet<LockId>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Slot {
    /// Empty: all zero.
    bytes: Vec<u8>,
    protection: Protection,
    /// The kernel dropped the mapping: an access faults although the protection allows it.
    unmapped: bool,
}

impl Memory {
    #[must_use]
    pub fn new(page_bytes: usize) -> Self {
        Self { page_bytes, pages: BTreeMap::new(), lent: BTreeMap::new(), lent_next: BTreeSet::new() }
    }

    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// The page and the offset in it of a byte.
    #[must_use]
    pub fn locate(&self, at: usize) -> (PageIndex, usize) {
        (PageIndex((at / self.page_bytes) as u64), at % self.page_bytes)
    }

    fn slot(&mut self, page: PageIndex) -> &mut Slot {
        self.pages.entry(page).or_insert(Slot {
            bytes: Vec::new(),
            protection: Protection::None,
            unmapped: false,
        })
    }

    #[must_use]
    pub fn protection(&self, page: PageIndex) -> Protection {
        self.pages.get(&page).map_or(Protection::None, |slot| slot.protection)
    }

    /// Whether an access to `page` would not fault.
    #[must_use]
    pub fn allows(&self, page: PageIndex, write: bool) -> bool {
        let wanted = if write { Protection::ReadWrite } else { Protection::Read };
        self.pages.get(&page).is_some_and(|slot| slot.protection >= wanted && !slot.unmapped)
    }

    pub fn protect(&mut self, runs: &[Extent], to: Protection) {
        for page in runs.iter().flat_map(Extent::pages) {
            let slot = self.slot(page);
            slot.protection = to;
            slot.unmapped = false;
        }
    }

    pub fn reassert(&mut self, page: PageIndex) {
        self.slot(page).unmapped = false;
    }

    /// The kernel drops the mapping for its own reasons.
    pub fn unmap(&mut self, page: PageIndex) {
        if let Some(slot) = self.pages.get_mut(&page) {
            slot.unmapped = true;
        }
    }

    #[must_use]
    pub fn byte(&self, page: PageIndex, offset: usize) -> u8 {
        self.pages.get(&page).and_then(|slot| slot.bytes.get(offset)).copied().unwrap_or(0)
    }

    pub fn set_byte(&mut self, page: PageIndex, offset: usize, value: u8) {
        let page_bytes = self.page_bytes;
        let slot = self.slot(page);
        slot.bytes.resize(page_bytes, 0);
        slot.bytes[offset] = value;
    }

    pub fn fill_range(&mut self, page: PageIndex, offset: usize, count: usize, value: u8) {
        let page_bytes = self.page_bytes;
        let slot = self.slot(page);
        slot.bytes.resize(page_bytes, 0);
        slot.bytes[offset..offset + count].fill(value);
    }

    pub fn read_into(&self, page: PageIndex, into: &mut [u8]) {
        match self.pages.get(&page) {
            Some(slot) if !slot.bytes.is_empty() => into.copy_from_slice(&slot.bytes),
            _ => into.fill(0),
        }
    }

    pub fn fill(&mut self, page: PageIndex, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.page_bytes);
        self.slot(page).bytes = bytes.to_vec();
    }

    pub fn store(&mut self, page: PageIndex, diff: &Diff) {
        let page_bytes = self.page_bytes;
        let slot = self.slot(page);
        slot.bytes.resize(page_bytes, 0);
        diff.apply(&mut slot.bytes);
    }

    pub fn discard(&mut self, page: PageIndex) {
        let slot = self.slot(page);
        assert_eq!(slot.protection, Protection::None, "{page} is discarded while it is mapped");
        // A real host frees the memory: discarded content must not be read again.
        slot.bytes.fill(0xdb);
    }

    /// Whatever its protection, the page is zero and unmapped.
    pub fn clear(&mut self, page: PageIndex) {
        if let Some(slot) = self.pages.get_mut(&page) {
            slot.bytes.clear();
            slot.unmapped = true;
        }
    }

    pub fn lend(&mut self, lock: LockId) {
        assert!(!self.lent.contains_key(&lock), "{lock} is lent twice");
        if word_of(lock).is_some() {
            assert!(self.lent_next.insert(lock), "{lock} is lent twice");
        } else {
            self.lent.insert(lock, Recalled::default());
        }
    }

    /// The event is over.
    pub fn lend_next(&mut self) {
        for lock in std::mem::take(&mut self.lent_next) {
            self.lent.insert(lock, Recalled::default());
        }
    }

    pub fn lent_times(&self, lock: LockId) -> u32 {
        self.lent.get(&lock).map_or(0, |lent| lent.times)
    }

    pub fn recall(&mut self, lock: LockId) -> Recalled {
        if self.lent_next.remove(&lock) {
            return Recalled::default();
        }
        self.lent.remove(&lock).expect("it was lent")
    }

    pub fn begin_release(&mut self) {
        self.lent.values_mut().for_each(|lent| lent.used = false);
    }

    /// Whether `thread` could take this lock, or give it back, without the engine.
    #[must_use]
    pub fn is_lent(&self, lock: LockId, holder: Option<ThreadId>) -> bool {
        self.lent.get(&lock).is_some_and(|lent| lent.holder == holder)
    }

    /// `thread` takes a lock that is lent and free. False: it is not.
    pub fn take_lent(&mut self, lock: LockId, thread: ThreadId) -> bool {
        let lent = self.lent.get_mut(&lock).filter(|lent| lent.holder.is_none());
        lent.map(|lent| (lent.holder, lent.times) = (Some(thread), lent.times + 1)).is_some()
    }

    /// `thread` gives it back. False: it did not take it, or the lock was recalled meanwhile.
    pub fn give_lent(&mut self, lock: LockId, thread: ThreadId) -> bool {
        let lent = self.lent.get_mut(&lock).filter(|lent| lent.holder == Some(thread));
        lent.map(|lent| (lent.holder, lent.used) = (None, true)).is_some()
    }

    /// The pages that were ever touched.
    pub fn pages(&self) -> impl Iterator<Item = (PageIndex, Protection)> {
        self.pages.iter().map(|(&page, slot)| (page, slot.protection))
    }
}
