//! The counts of a rank.

use std::collections::BTreeMap;
use std::time::Duration;

use rampool_sharing::Stats;
use serde::{Deserialize, Serialize};

/// Messages of one type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Kind {
    pub messages: u64,
    pub bytes: u64,
}

/// Counts of this rank since it joined, or since [`Shared::start_measuring`](super::Shared::start_measuring).
/// Times are sums over its threads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SharedStats {
    /// Work of the protocols since the rank joined.
    pub engine: Stats,
    /// Connections to other ranks by transport: `rings` (shared memory), `tcp`, `udp`.
    pub connections: BTreeMap<&'static str, u64>,
    /// Connections that were cut and resumed without loss, since the rank joined.
    pub reconnections: u64,
    pub sent_messages: u64,
    pub received_messages: u64,
    /// Messages sent, by type.
    pub sent: BTreeMap<&'static str, Kind>,
    /// Between a fault and the page's arrival; simultaneous faults of one page count once, with the kind of
    /// the first.
    pub read_fault_wait: Duration,
    pub write_fault_wait: Duration,
    pub lock_wait: Duration,
    pub unlock_wait: Duration,
    pub barrier_wait: Duration,
    /// For atomic words.
    pub word_wait: Duration,
    /// In other operations: conditions, allocations.
    pub other_wait: Duration,
    /// Handling other ranks' messages while not all threads of this one waited, and while all did.
    pub requests: Duration,
    pub requests_overlapped: Duration,
    /// Twins, diffs and logs that this rank holds now. Approximate.
    pub overhead_bytes: u64,
    /// Bytes of shared pages in this rank's memory now, and of those that are at memory servers only.
    pub resident_bytes: u64,
    pub away_bytes: u64,
    /// Bytes sent to memory servers for lack of room, and brought back, since the rank joined.
    pub away_sent_bytes: u64,
    pub away_brought_bytes: u64,
}
