//! The outcome of a run.

use std::collections::BTreeMap;

use rampool_sharing::{OpError, Rank, Stats, ThreadId};

use crate::share::network::Counts;

/// The outcome of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub events: u64,
    pub ticks: u64,
    /// Ticks that all threads together worked without touching shared memory.
    pub computed: u64,
    /// Messages between ranks, and their bytes (where they went through bytes), by kind.
    pub messages: BTreeMap<&'static str, (u64, u64)>,
    pub stats: Stats,
    /// What `Look` saw, by rank and thread.
    pub seen: BTreeMap<(Rank, ThreadId), Vec<u8>>,
    /// Why threads were stopped, by rank and thread.
    pub stopped: BTreeMap<(Rank, ThreadId), OpError>,
    pub refused: usize,
    /// The largest memory any rank held for its protocols.
    pub overhead_bytes: usize,
    pub datagrams: Counts,
}

impl Report {
    #[must_use]
    pub fn total_messages(&self) -> u64 {
        self.messages.values().map(|&(count, _)| count).sum()
    }

    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.messages.values().map(|&(_, bytes)| bytes).sum()
    }
}

/// Adds one rank's counts.
pub(super) fn add(total: &mut Stats, more: &Stats) {
    total.messages += more.messages;
    total.read_faults += more.read_faults;
    total.write_faults += more.write_faults;
    total.spurious_faults += more.spurious_faults;
    total.pages_fetched += more.pages_fetched;
    total.refetches += more.refetches;
    total.invalidations += more.invalidations;
    total.evictions += more.evictions;
    total.twins += more.twins;
    total.diffs += more.diffs;
    total.empty_diffs += more.empty_diffs;
    total.diff_bytes += more.diff_bytes;
    total.scans += more.scans;
    total.protects += more.protects;
    total.lock_acquires += more.lock_acquires;
    total.local_acquires += more.local_acquires;
    total.barriers += more.barriers;
    total.streamed_bytes += more.streamed_bytes;
    total.final_bytes += more.final_bytes;
    total.collections += more.collections;
    total.homes_gained += more.homes_gained;
}
