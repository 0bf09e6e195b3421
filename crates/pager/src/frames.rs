//! Local memory of the pager's own, in equal slots: one for each eviction batch, one for each fetch.
//!
//! The memory is private to the pager thread and the kernel; the program never sees it. It is handed out as
//! raw pointers, because the kernel moves pages in and out of it.

use rampool_kernel::memory::{Advice, MapError, Mapping, advise, dont_fork};
use rampool_wire::units::OS_PAGE_BYTES;

/// Slots of `slot_pages` OS pages each.
#[derive(Debug)]
pub struct Frames {
    memory: Mapping,
    slot_bytes: usize,
    /// The one that was put back last goes first.
    free: Vec<u32>,
    /// The fewest that were free since the last trim: so many at the bottom were not used.
    least_free: usize,
    /// By slot: it may have frames of the kernel's.
    used: Vec<bool>,
    /// `slots[id]` is the slot that holds the batch or fetch `id`.
    slots: Vec<Option<u32>>,
}

impl Frames {
    /// # Errors
    /// When the kernel refuses the memory.
    pub fn new(slots: u32, slot_pages: u32) -> Result<Self, MapError> {
        let slot_bytes = slot_pages as usize * OS_PAGE_BYTES;
        let memory = Mapping::huge_aligned(slots as usize * slot_bytes)?;
        // A forked child gets its own; sharing these frames copy-on-write would make every page in them
        // unmovable.
        dont_fork(&memory);
        // SAFETY: keeps the content; the mapping is ours. Without huge pages in the kernel the advice has no
        // object, and that is as good.
        let _ = unsafe { advise(memory.start(), memory.bytes(), Advice::NoHugePage) };
        Ok(Self {
            memory,
            slot_bytes,
            free: (0..slots).rev().collect(),
            least_free: slots as usize,
            used: vec![false; slots as usize],
            slots: Vec::new(),
        })
    }

    /// The slot of `id`, taken now if it has none.
    ///
    /// # Panics
    /// When more slots are asked for than exist: the cache promised not to.
    pub fn take(&mut self, id: u32) -> usize {
        let index = id as usize;
        if self.slots.len() <= index {
            self.slots.resize(index + 1, None);
        }
        let slot = *self.slots[index]
            .get_or_insert_with(|| self.free.pop().expect("the cache keeps to its number of slots"));
        self.least_free = self.least_free.min(self.free.len());
        self.used[slot as usize] = true;
        self.memory.start() + slot as usize * self.slot_bytes
    }

    /// Where `id` lies.
    ///
    /// # Panics
    /// If it has no slot.
    #[must_use]
    pub fn start_of(&self, id: u32) -> usize {
        let slot = self.slots.get(id as usize).copied().flatten().expect("a slot in use");
        self.memory.start() + slot as usize * self.slot_bytes
    }

    /// Gives the slot of `id` back; tells where it was.
    ///
    /// # Panics
    /// If it has no slot.
    pub fn release(&mut self, id: u32) -> usize {
        let start = self.start_of(id);
        let slot = self.slots[id as usize].take().expect("a slot in use");
        self.free.push(slot);
        start
    }

    /// Gives back the memory of slots that were not used since the last time. Only for slots that no
    /// userfaultfd knows.
    pub fn trim(&mut self) {
        let idle = self.free.get(..self.least_free).unwrap_or_default();
        for &slot in idle {
            if std::mem::take(&mut self.used[slot as usize]) {
                let start = self.memory.start() + slot as usize * self.slot_bytes;
                // SAFETY: a free slot holds nothing needed. Where the program has all memory locked, the
                // kernel keeps it.
                let _ = unsafe { advise(start, self.slot_bytes, Advice::DontNeed) };
            }
        }
        self.least_free = self.free.len();
    }

    #[must_use]
    pub fn memory(&self) -> &Mapping {
        &self.memory
    }
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }
}

/// Whether the page at `start` holds only zeroes.
///
/// # Safety
/// `start` is a readable page that is not written meanwhile.
#[must_use]
pub unsafe fn is_zero_page(start: usize) -> bool {
    const WORDS: usize = OS_PAGE_BYTES / 8;
    let words: *const u64 = std::ptr::with_exposed_provenance(start);
    // Most pages show a non-zero word early: look at a few spread ones before reading all.
    // SAFETY: the caller vouches for the page; indices stay inside it.
    unsafe {
        for probe in [0, WORDS / 2, WORDS - 1, WORDS / 4] {
            if words.add(probe).read() != 0 {
                return false;
            }
        }
        (0..WORDS / 8).all(|line| (0..8).fold(0, |all, word| all | words.add(line * 8 + word).read()) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident(frames: &Frames) -> usize {
        let mut pages = vec![0u8; frames.memory().bytes() / OS_PAGE_BYTES];
        let memory = frames.memory();
        // SAFETY: one byte for each page of our own mapping.
        let looked = unsafe { libc::mincore(memory.at(0).cast(), memory.bytes(), pages.as_mut_ptr()) };
        assert_eq!(looked, 0);
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn unused_slots_are_given_back_and_the_others_stay() {
        let mut frames = Frames::new(4, 2).unwrap();
        let fill = |frames: &mut Frames, id: u32| {
            let start: *mut u8 = std::ptr::with_exposed_provenance_mut(frames.take(id));
            // SAFETY: the slot is ours, and two pages long.
            unsafe { start.write_bytes(7, 2 * OS_PAGE_BYTES) };
        };
        (0..3).for_each(|id| fill(&mut frames, id));
        frames.trim();
        assert_eq!(resident(&frames), 6, "they are in use");
        for id in 0..3 {
            frames.release(id);
        }
        frames.trim();
        assert_eq!(resident(&frames), 6, "they were in use until now");
        fill(&mut frames, 0);
        frames.release(0);
        frames.trim();
        assert_eq!(resident(&frames), 2, "one was used since");
        frames.trim();
        assert_eq!(resident(&frames), 0);
        fill(&mut frames, 5);
        assert_eq!(resident(&frames), 2);
    }
}
