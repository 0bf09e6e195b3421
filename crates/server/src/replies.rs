//! Replies that wait to leave.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of replies that wait to leave, of many connections together: what a connection has beyond
/// [`OWN_REPLY_BYTES`].
pub(super) struct Replies {
    waiting: AtomicU64,
    most: AtomicU64,
}

/// Bytes of replies that one connection may queue regardless of the others; and, where nothing else may be
/// queued, one reply more.
pub(super) const OWN_REPLY_BYTES: usize = 64 << 10;

impl Replies {
    pub(super) fn new(most: u64) -> Self {
        Self { waiting: AtomicU64::new(0), most: AtomicU64::new(most) }
    }

    pub(super) fn set_most(&self, most: u64) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// A connection's queued bytes are `now` instead of `before`, both beyond its own.
    pub(super) fn change(&self, before: usize, now: usize) {
        match now.checked_sub(before) {
            Some(0) => {}
            Some(more) => _ = self.waiting.fetch_add(more as u64, Ordering::Relaxed),
            None => _ = self.waiting.fetch_sub((before - now) as u64, Ordering::Relaxed),
        }
    }

    /// Whether connections with queued replies must take them before more of their requests are read.
    pub(super) fn are_many(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= self.most.load(Ordering::Relaxed)
    }

    pub(super) fn waiting_bytes(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }
}
