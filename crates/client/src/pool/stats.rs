//! What a pool counted, as plain numbers.

use std::time::Duration;

use crate::stats::{LATENCY_BUCKETS, Times};
use rampool_net::transport::Means;

/// Steps per power of two: a recorded time is known to a quarter of itself or better.
const STEPS: u64 = STEPS_PER_POWER as u64;
const STEPS_PER_POWER: usize = 8;
const STEP_BITS: u32 = STEPS.trailing_zeros();
const BUCKETS: usize = 42 * STEPS_PER_POWER;

/// Times, counted in buckets whose width grows with the time (nanoseconds to an hour).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Histogram {
    buckets: Box<[u64]>,
    count: u64,
    max: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS].into_boxed_slice(), count: 0, max: Duration::ZERO }
    }
}

impl Histogram {
    pub fn record(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(nanos)] += 1;
        self.count += 1;
        self.max = self.max.max(time);
    }

    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    #[must_use]
    pub fn max(&self) -> Duration {
        self.max
    }

    /// The time that `share` (0.5: the median, 0.99 ...) of all recorded times do not exceed, to within a
    /// bucket; zero when nothing was recorded.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Duration {
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if *count > 0 && seen as f64 >= share * self.count as f64 {
                return Duration::from_nanos(middle_of(bucket)).min(self.max);
            }
        }
        self.max
    }

    /// The same in buckets of a power of two each, as [`crate::stats`] has them.
    #[must_use]
    pub fn by_powers(&self) -> Times {
        let mut times = [0; LATENCY_BUCKETS];
        for (bucket, count) in self.buckets.iter().enumerate() {
            let power = middle_of(bucket).max(1).ilog2() as usize;
            times[power.min(LATENCY_BUCKETS - 1)] += count;
        }
        times
    }

    /// Adds all of `other`.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, others) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += others;
        }
        self.count += other.count;
        self.max = self.max.max(other.max);
    }
}

fn bucket_of(nanos: u64) -> usize {
    if nanos < STEPS {
        // Below STEPS.
        return usize::try_from(nanos).unwrap_or(0);
    }
    let power = nanos.ilog2();
    let step = (nanos >> (power - STEP_BITS)) - STEPS;
    let bucket = u64::from(power - STEP_BITS + 1) * STEPS + step;
    usize::try_from(bucket).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

fn middle_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let power = bucket / STEPS - 1;
    let low = (STEPS + bucket % STEPS) << power;
    low + (1 << power) / 2
}

/// What went to and came from one server.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkStats {
    pub requests: u64,
    pub fetched_pages: u64,
    pub in_place_pages: u64,
    pub stored_pages: u64,
    pub sent_bytes: u64,
    pub received_bytes: u64,
    pub moved: u64,
    pub latency: Histogram,
}

/// How far a server is of use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ServerState {
    /// It has all of its pages.
    Well,
    /// It does not answer; other servers have its pages.
    Absent,
    /// It is back, and gets what it has missed.
    CatchingUp,
    Lost,
}

/// What happened between this pool and one server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerStats {
    pub name: String,
    pub alive: bool,
    pub state: ServerState,
    /// Pages that it has missed and is to get.
    pub missed_pages: u64,
    /// Pages that others hold now, and that still lie here.
    pub left_pages: u64,
    /// By what means it is reached; none while there is no connection.
    pub means: Option<Means>,
    /// The part of the lease this server holds.
    pub lease_bytes: u64,
    pub requests: u64,
    pub fetched_pages: u64,
    /// Pages that were read out of its memory without asking it.
    pub in_place_pages: u64,
    pub stored_pages: u64,
    /// Bytes of frames, heads and tables included.
    pub sent_bytes: u64,
    pub received_bytes: u64,
    /// Requests the server refused, such as stores for which it had no room.
    pub refused: u64,
    /// Answers whose checksum did not fit and that were asked for again.
    pub damaged: u64,
    /// Broken connections that were made again.
    pub reconnects: u64,
    /// Requests for pages that another server was asked for instead.
    pub moved: u64,
    /// Requests that wait to be sent.
    pub queued: usize,
    /// Requests that wait for an answer, and the bytes of their pages.
    pub outstanding: u32,
    pub outstanding_bytes: u64,
    /// From the call of `fetch` to the last byte, of fetches somebody waited for.
    pub latency: Histogram,
}

/// What happened in a pool, server by server in the order of the configuration.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolStats {
    /// On how many servers each page lies as long as none is lost; and on average, without those that are.
    pub copies: u8,
    pub copies_left: f64,
    pub servers: Vec<ServerStats>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_time_is_found_again_to_within_its_bucket(nanos in 0u64..3_600_000_000_000) {
            let mut histogram = Histogram::default();
            histogram.record(Duration::from_nanos(nanos));
            histogram.record(Duration::from_secs(4000));
            let found = histogram.quantile(0.5).as_nanos() as f64;
            prop_assert!((found - nanos as f64).abs() <= 1.0 + nanos as f64 / 8.0, "{} for {}", found, nanos);
        }

        #[test]
        fn every_time_is_in_the_bucket_of_its_power(nanos in 1u64..500_000_000_000) {
            let mut histogram = Histogram::default();
            histogram.record(Duration::from_nanos(nanos));
            let times = histogram.by_powers();
            prop_assert_eq!((times[nanos.ilog2() as usize], times.iter().sum::<u64>()), (1, 1));
        }

        #[test]
        fn quantiles_do_not_fall(times in prop::collection::vec(any::<u64>(), 1..50)) {
            let mut histogram = Histogram::default();
            for nanos in &times {
                histogram.record(Duration::from_nanos(*nanos));
            }
            let quantiles: Vec<_> = (0..=10).map(|n| histogram.quantile(f64::from(n) / 10.0)).collect();
            prop_assert!(quantiles.is_sorted());
            prop_assert!(quantiles[10] <= histogram.max());
        }
    }
}
