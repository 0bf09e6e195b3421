//! A backing in this process's own memory: for tests, and to measure a pager without a network.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rampool_wire::units::{Extent, OS_PAGE_BYTES, total_pages};

use super::{Backing, BackingEvent};

type Page = Arc<[u8; OS_PAGE_BYTES]>;

/// Answers every request at the next poll.
#[derive(Default)]
pub struct MemoryBacking {
    regions: BTreeMap<u32, BTreeMap<u64, Page>>,
    next_region: u32,
    events: VecDeque<BackingEvent>,
    /// Refuse stores beyond this many pages, all regions together.
    pub capacity_pages: Option<u64>,
}

impl MemoryBacking {
    pub fn create_region(&mut self) -> u32 {
        self.next_region += 1;
        self.regions.insert(self.next_region, BTreeMap::new());
        self.next_region
    }

    /// Pages held in a region.
    #[must_use]
    pub fn pages(&self, region: u32) -> usize {
        self.regions.get(&region).map_or(0, BTreeMap::len)
    }
}

// SAFETY: memory handed in is touched during the call only.
unsafe impl Backing for MemoryBacking {
    type Region = u32;

    unsafe fn fetch(&mut self, region: u32, token: u64, extents: &[Extent], to: *mut u8, _demand: bool) {
        let pages = &self.regions[&region];
        for (index, page) in extents.iter().flat_map(Extent::pages).enumerate() {
            // SAFETY: the caller gives room for every page of the extents.
            unsafe {
                let to = to.add(index * OS_PAGE_BYTES);
                match pages.get(&page.0) {
                    Some(bytes) => to.copy_from_nonoverlapping(bytes.as_ptr(), OS_PAGE_BYTES),
                    None => to.write_bytes(0, OS_PAGE_BYTES),
                }
            }
        }
        self.events.push_back(BackingEvent::Fetched { token });
    }

    unsafe fn store(&mut self, region: u32, token: u64, pages: &[(Extent, *const u8)]) {
        let held: usize = self.regions.values().map(BTreeMap::len).sum();
        let extents: Vec<Extent> = pages.iter().map(|(e, _)| *e).collect();
        if self.capacity_pages.is_some_and(|most| held as u64 + total_pages(&extents) > most) {
            self.events.push_back(BackingEvent::Full { token, reason: "the test's memory is full".into() });
            return;
        }
        let held = self.regions.get_mut(&region).expect("a region");
        for (extent, from) in pages {
            for (index, page) in extent.pages().enumerate() {
                let mut bytes = [0; OS_PAGE_BYTES];
                // SAFETY: the caller gives the bytes of every page of the extent.
                unsafe {
                    bytes
                        .as_mut_ptr()
                        .copy_from_nonoverlapping(from.add(index * OS_PAGE_BYTES), OS_PAGE_BYTES)
                };
                held.insert(page.0, Arc::new(bytes));
            }
        }
        self.events.push_back(BackingEvent::Stored { token });
    }

    fn discard(&mut self, region: u32, extent: Extent) {
        let pages = self.regions.get_mut(&region).expect("a region");
        let gone: Vec<u64> = pages.range(extent.first.0..extent.end().0).map(|(page, _)| *page).collect();
        for page in gone {
            pages.remove(&page);
        }
    }

    fn poll(&mut self) -> Option<BackingEvent> {
        self.events.pop_front()
    }

    fn poll_fds(&self, _out: &mut Vec<libc::pollfd>) {}

    fn next_deadline(&self) -> Option<std::time::Instant> {
        (!self.events.is_empty()).then(std::time::Instant::now)
    }

    fn clone_region(&mut self, region: u32) -> Result<u32, String> {
        let copy = self.regions[&region].clone();
        self.next_region += 1;
        self.regions.insert(self.next_region, copy);
        Ok(self.next_region)
    }

    fn free_region(&mut self, region: u32) {
        self.regions.remove(&region);
    }
}
