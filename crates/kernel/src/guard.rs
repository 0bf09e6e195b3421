//! Ranges that system calls are using: pages in them do not leave.
//!
//! In fault modes that cannot serve the kernel's own faults, a buffer must stay resident from before a system
//! call until after it, however long that blocks. A thread publishes the range in a slot, waits for what
//! began before, makes it resident, calls, and clears the slot. A thread that takes pages away, or takes
//! memory over, announces it ([`Taking`]) and then reads the slots. So one of the two sees the other:
//!
//! ```text
//!   thread:  publish slot;  read BEGUN, wait until ENDED has caught up;  touch;  system call
//!   pager:   BEGUN += 1;    look at the slots, leave those ranges alone;          ENDED += 1
//! ```
//!
//! A thread that found no free slot, or whose wait timed out, may still meet an absent page: the call fails
//! with EFAULT and is repeated.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::OS_PAGE_BYTES;

const SLOTS: usize = 256;
static STARTS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
static ENDS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
/// Slots from here on were never used.
static HIGH: AtomicUsize = AtomicUsize::new(0);

static BEGUN: AtomicUsize = AtomicUsize::new(0);
static ENDED: AtomicUsize = AtomicUsize::new(0);
/// Taking a batch of pages away takes far less, but the thread that does so may get no CPU for a while in the
/// middle of it. Not every call can be repeated: a message is gone from its socket when the kernel meets an
/// absent page as it hands it over. So no caller goes on sooner, except one that may itself be waited for, in
/// a signal handler say.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// While this lives, pages are being taken away: created by the thread that does so, before it checks whether
/// they are [`in_use`].
#[derive(Debug)]
pub struct Taking(());

impl Taking {
    #[must_use]
    pub fn begin() -> Self {
        BEGUN.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        ENDED.fetch_add(1, Ordering::SeqCst);
    }
}

/// Waits until everything has ended that may not have seen a slot which was published just now.
fn let_others_end() {
    let begun = BEGUN.load(Ordering::SeqCst);
    let behind = || begun.wrapping_sub(ENDED.load(Ordering::SeqCst)).cast_signed() > 0;
    if !behind() {
        return;
    }
    let since = Instant::now();
    while behind() && since.elapsed() < LONGEST_WAIT {
        // SAFETY: gives the CPU up; no preconditions.
        unsafe { libc::sched_yield() };
    }
}

/// Keeps a range until dropped. Without a free slot it keeps nothing, and the call may have to be repeated.
#[derive(Debug)]
pub struct Guard(Option<usize>);

impl Guard {
    /// Returns when no page of the range can leave any more. Async-signal-safe.
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
                let_others_end();
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
    (0..HIGH.load(Ordering::SeqCst))
        .any(|slot| STARTS[slot].load(Ordering::SeqCst) < end && ENDS[slot].load(Ordering::SeqCst) > start)
}

/// Calls `each` with every range that a system call is using.
pub fn each_in_use(mut each: impl FnMut(usize, usize)) {
    for slot in 0..HIGH.load(Ordering::SeqCst) {
        let (start, end) = (STARTS[slot].load(Ordering::SeqCst), ENDS[slot].load(Ordering::SeqCst));
        if start != 0 && end > start {
            each(start, end);
        }
    }
}

/// In a forked child: the calls of the parent's other threads are not ours, nor is what its pager was doing.
pub fn forget_after_fork() {
    ENDED.store(BEGUN.load(Ordering::SeqCst), Ordering::SeqCst);
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

    #[test]
    fn a_guard_waits_for_what_may_not_have_seen_it() {
        let taking = Taking::begin();
        let ended = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let guarding = scope.spawn(|| {
                let guard = Guard::new(0x6001_0000, 0x1000);
                let seen = ended.load(Ordering::SeqCst);
                drop(guard);
                seen
            });
            let since = Instant::now();
            while !in_use(0x6001_0000, 0x6001_1000) && since.elapsed() < LONGEST_WAIT {
                std::thread::yield_now();
            }
            // As if this thread got no CPU for a while.
            std::thread::sleep(Duration::from_millis(200));
            ended.store(true, Ordering::SeqCst);
            drop(taking);
            // A machine that was busy elsewhere for that long has shown nothing.
            assert!(guarding.join().unwrap() || since.elapsed() >= LONGEST_WAIT);
        });
    }
}
