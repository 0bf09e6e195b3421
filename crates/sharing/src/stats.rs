//! The counts of a rank.

use std::hash::{Hash, Hasher};

/// Counts since the start. They do not influence the engine, so they are not part of its hash.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Messages to other ranks.
    pub messages: u64,
    pub read_faults: u64,
    pub write_faults: u64,
    /// Faults for an access that was already allowed.
    pub spurious_faults: u64,
    pub pages_fetched: u64,
    /// Fetches repeated because the answer was too old.
    pub refetches: u64,
    pub invalidations: u64,
    /// Copies that were dropped to make room.
    pub evictions: u64,
    pub twins: u64,
    pub diffs: u64,
    pub empty_diffs: u64,
    /// Bytes in diffs made.
    pub diff_bytes: u64,
    /// Hot pages compared instead of protected.
    pub scans: u64,
    /// Calls of `Mem::protect`.
    pub protects: u64,
    pub lock_acquires: u64,
    /// Acquires that needed no message.
    pub local_acquires: u64,
    /// Locks that went straight to another rank, and how many of those were the next one that this rank
    /// requested.
    pub handed_over: u64,
    pub wanted_back: u64,
    pub barriers: u64,
    /// `aurc`: bytes streamed before the release, and bytes left for it.
    pub streamed_bytes: u64,
    pub final_bytes: u64,
    /// `lrc`: collections of diffs.
    pub collections: u64,
    /// Homes that moved to this rank.
    pub homes_gained: u64,
}

impl Hash for Stats {
    fn hash<H: Hasher>(&self, _state: &mut H) {}
}
