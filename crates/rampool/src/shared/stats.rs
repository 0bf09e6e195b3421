//! What a rank counted.

use std::time::Duration;

use rampool_proto::share::Stats;

/// Counts of this rank since it joined. Times are sums over its threads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SharedStats {
    /// What the protocols did.
    pub engine: Stats,
    pub sent_messages: u64,
    pub received_messages: u64,
    /// Between a fault and the moment that the page was there; faults of one page at a time count once.
    pub fault_wait: Duration,
    pub lock_wait: Duration,
    pub unlock_wait: Duration,
    pub barrier_wait: Duration,
    /// Twins, diffs and logs that this rank holds now. Approximate.
    pub overhead_bytes: u64,
}
