//! What a rank counted.

use std::collections::BTreeMap;
use std::time::Duration;

use rampool_proto::share::Stats;
use serde::{Deserialize, Serialize};

/// Messages of one type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Kind {
    pub messages: u64,
    pub bytes: u64,
}

/// Counts of this rank since it joined, or since [`Shared::start_measuring`](super::Shared::start_measuring). Times are sums over its threads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SharedStats {
    /// What the protocols did, since the rank joined.
    pub engine: Stats,
    /// Connections to other ranks by what carries them: `rings` (shared memory), `tcp`, `udp`.
    pub connections: BTreeMap<&'static str, u64>,
    /// Connections that were cut and took up again what was said over them, since the rank joined.
    pub reconnections: u64,
    pub sent_messages: u64,
    pub received_messages: u64,
    /// What was sent, by type.
    pub sent: BTreeMap<&'static str, Kind>,
    /// Between a fault and the moment that the page was there; faults of one page at a time count once, as what the first of them was.
    pub read_fault_wait: Duration,
    pub write_fault_wait: Duration,
    pub lock_wait: Duration,
    pub unlock_wait: Duration,
    pub barrier_wait: Duration,
    /// In other operations: atomic words, conditions, allocations.
    pub other_wait: Duration,
    /// Handling other ranks' messages while not all threads of this one waited, and while they did.
    pub requests: Duration,
    pub requests_overlapped: Duration,
    /// Twins, diffs and logs that this rank holds now. Approximate.
    pub overhead_bytes: u64,
    /// Bytes of shared pages in this rank's memory now, and of those that are at memory servers only.
    pub resident_bytes: u64,
    pub away_bytes: u64,
    /// Bytes that went to memory servers for want of room, and came back, since the rank joined.
    pub away_sent_bytes: u64,
    pub away_brought_bytes: u64,
}
