//! Ranges that system calls are using: pages in them do not leave.
//!
//! On rungs that cannot serve the kernel's own faults, a buffer must stay resident from before a system call until after it, however long that
//! blocks. A thread publishes the range in a slot, makes it resident, calls, and clears the slot. Whoever evicts looks at the slots first. A page that was
//! on its way out when the slot appeared can still leave: the call then fails with EFAULT and is repeated.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::OS_PAGE_BYTES;

const SLOTS: usize = 256;
static STARTS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
static ENDS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
/// Slots from here on were never used.
static HIGH: AtomicUsize = AtomicUsize::new(0);

/// Keeps a range until dropped. Without a free slot it keeps nothing, and the call may have to be repeated.
#[derive(Debug)]
pub struct Guard(Option<usize>);

impl Guard {
    /// Async-signal-safe.
    #[must_use]
    pub fn new(start: usize, bytes: usize) -> Self {
        if bytes == 0 || start == 0 {
            return Self(None);
        }
        let first = start & !(OS_PAGE_BYTES - 1);
        for slot in 0..SLOTS {
            if STARTS[slot].load(Ordering::Relaxed) == 0
                && STARTS[slot].compare_exchange(0, first, Ordering::SeqCst, Ordering::Relaxed).is_ok()
            {
                ENDS[slot].store(start.saturating_add(bytes), Ordering::SeqCst);
                HIGH.fetch_max(slot + 1, Ordering::SeqCst);
                return Self(Some(slot));
            }
        }
        Self(None)
    }

    /// The slot, for callers that cannot hold a Rust value; to be given to [`Guard::from_slot`] once.
    #[must_use]
    pub fn into_slot(self) -> usize {
        let slot = self.0.map_or(0, |slot| slot + 1);
        std::mem::forget(self);
        slot
    }

    #[must_use]
    pub fn from_slot(slot: usize) -> Self {
        Self(slot.checked_sub(1).filter(|slot| *slot < SLOTS))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            ENDS[slot].store(0, Ordering::SeqCst);
            STARTS[slot].store(0, Ordering::SeqCst);
        }
    }
}

/// Whether a system call is using part of `[start, end)`.
#[must_use]
pub fn in_use(start: usize, end: usize) -> bool {
    (0..HIGH.load(Ordering::SeqCst)).any(|slot| STARTS[slot].load(Ordering::SeqCst) < end && ENDS[slot].load(Ordering::SeqCst) > start)
}

/// In a forked child: the calls of the parent's other threads are not ours.
pub fn forget_after_fork() {
    for slot in 0..SLOTS {
        ENDS[slot].store(0, Ordering::SeqCst);
        STARTS[slot].store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_in_use_until_its_guard_goes() {
        let guard = Guard::new(0x5001_0010, 0x2000);
        assert!(in_use(0x5001_0000, 0x5001_1000));
        assert!(in_use(0x5001_2000, 0x5001_3000));
        assert!(!in_use(0x5001_3000, 0x5001_4000));
        drop(Guard::from_slot(guard.into_slot()));
        assert!(!in_use(0x5001_0000, 0x5001_1000));
    }
}
