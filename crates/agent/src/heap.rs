//! The agent's own heap.
//!
//! The agent lives in a foreign process and takes that process's heap away page by page, so it must never
//! allocate from it: a fault on memory that only the faulting thread could bring back would never end. Every
//! allocation of the agent comes from here: size classes of powers of two, carved from mappings that
//! [`rampool_kernel::memory`] knows as our own.
//!
//! After a fork the child abandons this heap (another thread may have been inside it) and starts an empty
//! one.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, Ordering};

use rampool_kernel::memory::Mapping;

const SMALLEST: usize = 16;
const CLASSES: usize = 18; // 16 bytes .. 2 MiB
const LARGEST: usize = SMALLEST << (CLASSES - 1);
const CHUNK_BYTES: usize = 4 << 20;

#[cfg(not(test))]
#[global_allocator]
pub static HEAP: Heap = Heap::new();
#[cfg(test)]
pub static HEAP: Heap = Heap::new();

pub struct Heap {
    locked: AtomicBool,
    state: std::cell::UnsafeCell<State>,
}

struct State {
    /// Heads of singly linked lists of free blocks, one per class; the link lies in the block.
    free: [usize; CLASSES],
    chunk: usize,
    chunk_end: usize,
}

const EMPTY: State = State { free: [0; CLASSES], chunk: 0, chunk_end: 0 };

// SAFETY: `state` is only touched while `locked` is held.
unsafe impl Sync for Heap {}

impl Heap {
    pub const fn new() -> Self {
        Self { locked: AtomicBool::new(false), state: std::cell::UnsafeCell::new(EMPTY) }
    }

    /// Forgets everything, in a forked child whose only thread is the caller.
    pub fn abandon(&self) {
        // SAFETY: the caller is the only thread; a previous holder of the lock does not exist here.
        unsafe { *self.state.get() = EMPTY };
        self.locked.store(false, Ordering::Release);
    }

    fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        while self.locked.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::hint::spin_loop();
        }
        // SAFETY: the lock is held.
        let result = act(unsafe { &mut *self.state.get() });
        self.locked.store(false, Ordering::Release);
        result
    }
}

fn class_of(layout: Layout) -> Option<usize> {
    let bytes = layout.size().max(layout.align()).max(SMALLEST).next_power_of_two();
    (bytes <= LARGEST).then(|| (bytes / SMALLEST).ilog2() as usize)
}

// SAFETY: blocks of a class are disjoint, at least as large and as aligned as the layout asks (powers of two,
// carved from page-aligned chunks at multiples of their own size), and on one list or in one hand at a time.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(class) = class_of(layout) else {
            // Too large for a class: a mapping of its own.
            return match Mapping::anonymous(layout.size()) {
                Ok(mapping) if layout.align() <= rampool_kernel::OS_PAGE_BYTES => {
                    std::ptr::with_exposed_provenance_mut(mapping.leak().0)
                }
                _ => std::ptr::null_mut(),
            };
        };
        let bytes = SMALLEST << class;
        self.with(|state| {
            let head = state.free[class];
            if head != 0 {
                // SAFETY: a free block of ours holds the link to the next in its first word.
                state.free[class] = unsafe { std::ptr::with_exposed_provenance::<usize>(head).read() };
                return std::ptr::with_exposed_provenance_mut(head);
            }
            let mut at = state.chunk.next_multiple_of(bytes);
            if state.chunk == 0 || at + bytes > state.chunk_end {
                let Ok(chunk) = Mapping::huge_aligned(CHUNK_BYTES) else { return std::ptr::null_mut() };
                let (start, length) = chunk.leak();
                (at, state.chunk_end) = (start, start + length);
            }
            state.chunk = at + bytes;
            std::ptr::with_exposed_provenance_mut(at)
        })
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let Some(class) = class_of(layout) else {
            rampool_kernel::memory::unmap_own(block.expose_provenance(), layout.size());
            return;
        };
        self.with(|state| {
            // SAFETY: the block is free now, so its first word is ours.
            unsafe { block.cast::<usize>().write(state.free[class]) };
            state.free[class] = block.expose_provenance();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_disjoint_and_used_again() {
        let heap = Heap::new();
        let mut held = Vec::new();
        for (size, align) in [(1, 1), (24, 8), (100, 64), (4096, 4096), (70_000, 16), (3 << 20, 4096)] {
            let layout = Layout::from_size_align(size, align).unwrap();
            for _ in 0..3 {
                // SAFETY: valid layouts of non-zero size.
                let block = unsafe { heap.alloc(layout) };
                assert!(!block.is_null() && block.addr() % align == 0);
                held.push((block.addr(), size, block, layout));
            }
        }
        let mut ranges: Vec<_> = held.iter().map(|(at, size, ..)| (*at, at + size)).collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|w| w[0].1 <= w[1].0));
        let (_, _, block, layout) = held[0];
        // SAFETY: allocated above with this layout, freed once.
        unsafe { heap.dealloc(block, layout) };
        // SAFETY: as above.
        assert_eq!(unsafe { heap.alloc(layout) }, block);
    }
}
