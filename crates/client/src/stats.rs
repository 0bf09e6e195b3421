//! Counters that others may watch while a pager runs.
//!
//! They lie in one [`StatsPage`], plain 64-bit words: in private memory for a library user, in a file in
//! shared memory for `rampool run`, so that `rampool top` and the summary read them without disturbing the
//! program. One thread writes, anyone reads; every number only grows, except where marked.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rampool_paging::cache::{Access, CacheStats};
use rampool_paging::curve::BUCKETS;
pub use rampool_paging::curve::{Forecast, bucket_end, bucket_of};

/// Buckets of a latency histogram: bucket `b` counts times of `[2^b, 2^(b+1))` nanoseconds.
pub const LATENCY_BUCKETS: usize = 40;
/// Servers whose times are told apart: the first of the lease.
pub const SERVERS_TOLD: usize = 16;

/// Times, counted in [`LATENCY_BUCKETS`] buckets.
pub type Times = [u64; LATENCY_BUCKETS];

/// The time below which `share` (0 to 1) of the times lie, as the upper end of its bucket, in
/// nanoseconds; 0 without any.
#[must_use]
pub fn quantile_ns(times: &Times, share: f64) -> u64 {
    let mut left = times.iter().sum::<u64>() as f64 * share;
    for (bucket, count) in times.iter().enumerate() {
        left -= *count as f64;
        if *count > 0 && left <= 0.0 {
            return 2u64 << bucket;
        }
    }
    0
}

/// Of times that only grow: those of `now` that came after `before`.
#[must_use]
pub fn times_since(before: &Times, now: &Times) -> Times {
    std::array::from_fn(|bucket| now[bucket].saturating_sub(before[bucket]))
}

/// Counts `more` among them.
pub fn add_times(to: &mut Times, more: &Times) {
    to.iter_mut().zip(more).for_each(|(to, more)| *to += more);
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident),* $(,)?) => {
        /// The layout is part of the protocol between an agent and the `rampool` binary of the same
        /// version ([`StatsPage::VERSION`]).
        #[repr(C)]
        #[derive(Debug)]
        pub struct StatsPage {
            /// [`StatsPage::VERSION`], written last at creation.
            pub version: AtomicU64,
            $($(#[doc = $doc])+ pub $name: AtomicU64,)*
            /// Time from reading a fault to the page being there.
            pub fault_latency: [AtomicU64; LATENCY_BUCKETS],
            /// For each server, in the order of the lease: from asking it for pages that a thread
            /// waits for until they are there.
            pub server_latency: [[AtomicU64; LATENCY_BUCKETS]; SERVERS_TOLD],
            /// Of `waited_ns`: what more local memory would have avoided, in buckets of more
            /// pages ([`bucket_of`]).
            pub avoidable_ns: [AtomicU64; BUCKETS],
        }

        /// The counters at one moment.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct StatsSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)*
            pub fault_latency: Times,
            pub server_latency: [Times; SERVERS_TOLD],
            pub avoidable_ns: [u64; BUCKETS],
        }

        impl Default for StatsSnapshot {
            fn default() -> Self {
                Self {
                    $($name: 0,)*
                    fault_latency: [0; LATENCY_BUCKETS],
                    server_latency: [[0; LATENCY_BUCKETS]; SERVERS_TOLD],
                    avoidable_ns: [0; BUCKETS],
                }
            }
        }

        impl Default for StatsPage {
            fn default() -> Self {
                Self {
                    version: AtomicU64::new(0),
                    $($name: AtomicU64::new(0),)*
                    fault_latency: [const { AtomicU64::new(0) }; LATENCY_BUCKETS],
                    server_latency: [const { [const { AtomicU64::new(0) }; LATENCY_BUCKETS] }; SERVERS_TOLD],
                    avoidable_ns: [const { AtomicU64::new(0) }; BUCKETS],
                }
            }
        }

        impl StatsPage {
            #[must_use]
            pub fn snapshot(&self) -> StatsSnapshot {
                let times = |of: &[AtomicU64; LATENCY_BUCKETS]| of.each_ref().map(|time| time.load(Relaxed));
                StatsSnapshot {
                    $($name: self.$name.load(Relaxed),)*
                    fault_latency: times(&self.fault_latency),
                    server_latency: self.server_latency.each_ref().map(times),
                    avoidable_ns: std::array::from_fn(|b| self.avoidable_ns[b].load(Relaxed)),
                }
            }
        }

        impl StatsSnapshot {
            /// Adds another process's counters to these.
            pub fn add(&mut self, other: &Self) {
                $(self.$name = self.$name.wrapping_add(other.$name);)*
                add_times(&mut self.fault_latency, &other.fault_latency);
                for (mine, theirs) in self.server_latency.iter_mut().zip(&other.server_latency) {
                    add_times(mine, theirs);
                }
                for (mine, theirs) in self.avoidable_ns.iter_mut().zip(&other.avoidable_ns) {
                    *mine += theirs;
                }
            }

            fn fill(&mut self, words: &mut impl Iterator<Item = u64>) {
                $(self.$name = words.next().unwrap_or(0);)*
            }

            /// Name and value of every counter, in order.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Process id.
    pid,
    /// 1 while the process lives, 2 once it has ended in order.
    state,
    /// Local budget in pages (a level).
    budget_pages,
    /// Managed pages that are resident (a level).
    resident_pages,
    /// Highest `resident_pages` seen.
    peak_resident_pages,
    /// Anonymous resident pages of the whole process as the kernel counts them (a level).
    anonymous_pages,
    /// Highest `anonymous_pages` seen.
    peak_anonymous_pages,
    /// Pages under management (a level).
    managed_pages,
    /// Pages ever taken under management.
    adopted_pages,
    /// Faults: all.
    faults,
    /// Faults that only lifted a write protection.
    write_protect_faults,
    /// Nanoseconds from reading a fault to the page being there, of all faults.
    waited_ns,
    /// Pages filled with zeroes.
    zero_filled_pages,
    /// Pages asked from the servers because a thread waited.
    demand_pages,
    /// Fetches that a thread waited for.
    demand_fetches,
    /// Pages asked from the servers ahead of need.
    prefetched_pages,
    /// Those of them that arrays of pointers led to.
    pointer_pages,
    /// Those that the program came to, or past, as far as later faults show it.
    pointer_used_pages,
    /// Pages brought back from an eviction batch, without traffic.
    second_chance_pages,
    /// Pages moved out of the program.
    evicted_pages,
    /// Pages sent to the servers.
    written_back_pages,
    /// Pages that left without being sent, because the servers had them already.
    clean_dropped_pages,
    /// Those of them that were open to writes, and held what the servers have when they left.
    unchanged_pages,
    /// Pages that left without being sent, because they were all zero.
    zero_dropped_pages,
    /// Pages that refused to leave (pinned, or shared with a child).
    busy_pages,
    /// Installs put off because the program was changing its mappings.
    deferred_installs,
    /// Pages that were to be filled with zeroes, and were there: given up by the program and not taken away
    /// yet, or made by the kernel.
    pages_there,
    /// Pages that the program had not given up, and that were gone when they were to leave. Never,
    /// unless something is broken.
    vanished_pages,
    /// Pages that the program had not given up, and that were gone when a thread came to them. Never,
    /// unless something is broken.
    missing_pages,
    /// Pages that were mapped where their content was to be put. Never, unless something is broken.
    refused_contents,
    /// Times the servers had no room.
    pool_full_events,
    /// Forks served.
    forks,
    /// Pages read out of the memory of a server on this machine, without asking it.
    in_place_pages,
    /// Bytes received from servers, headers included.
    received_bytes,
    /// Bytes sent to servers, headers included.
    sent_bytes,
    /// Requests for pages that another server with the same pages was asked for instead.
    moved_requests,
    /// Servers that are lost to the process, or absent, while others have their pages.
    lost_servers,
    /// Pages that servers have missed and have not got yet (a level).
    missed_pages,
    /// Pages stored at the servers, in whole stripes (a level).
    stored_pages,
    /// Copies of pages that there should be, and are not: at servers that are lost or absent, or
    /// have missed them (a level).
    lacking_pages,
    /// Those servers, of the first 64, that are lost or absent: a bit each (a level; means nothing in sums).
    lost_mask,
}

impl StatsPage {
    /// Changes whenever a field does.
    pub const VERSION: u64 = 8;
}

/// The one writer's handle. The page outlives it by construction: it is leaked, or a mapping
/// that is never unmapped.
#[derive(Clone, Copy, Debug)]
pub struct PagerStats {
    page: &'static StatsPage,
}

impl PagerStats {
    #[must_use]
    pub fn new(page: &'static StatsPage) -> Self {
        page.pid.store(u64::from(std::process::id()), Relaxed);
        page.state.store(1, Relaxed);
        page.version.store(StatsPage::VERSION, std::sync::atomic::Ordering::Release);
        Self { page }
    }

    /// Counters in private memory, for a library user.
    #[must_use]
    pub fn private() -> Self {
        Self::new(Box::leak(Box::default()))
    }

    #[must_use]
    pub fn page(&self) -> &'static StatsPage {
        self.page
    }

    pub fn publish(&self, cache: &CacheStats, pointer_used_pages: u64, used_pages: u64, managed_pages: u64) {
        let page = self.page;
        page.pointer_pages.store(cache.expected_pages, Relaxed);
        page.pointer_used_pages.store(pointer_used_pages.min(cache.expected_pages), Relaxed);
        page.managed_pages.store(managed_pages, Relaxed);
        page.budget_pages.store(cache.budget_now, Relaxed);
        page.resident_pages.store(used_pages, Relaxed);
        page.peak_resident_pages.store(page.peak_resident_pages.load(Relaxed).max(used_pages), Relaxed);
        page.busy_pages.store(cache.busy_pages, Relaxed);
        page.unchanged_pages.store(cache.unchanged_pages, Relaxed);
        page.zero_dropped_pages.store(cache.zero_pages, Relaxed);
        page.pages_there.store(cache.pages_there, Relaxed);
        page.vanished_pages.store(cache.vanished_pages, Relaxed);
        page.missing_pages.store(cache.missing_pages, Relaxed);
        page.refused_contents.store(cache.content_refused, Relaxed);
        page.clean_dropped_pages.store(
            cache.evicted_pages.saturating_sub(cache.stored_pages + cache.zero_pages + cache.busy_pages),
            Relaxed,
        );
    }

    /// What the pool counts: bytes from and to all of its servers, pages read in place, and how long a
    /// thread waited for each server.
    pub fn pool(
        &self,
        received_bytes: u64,
        sent_bytes: u64,
        in_place_pages: u64,
        servers: impl Iterator<Item = Times>,
    ) {
        self.page.in_place_pages.store(in_place_pages, Relaxed);
        self.page.received_bytes.store(received_bytes, Relaxed);
        self.page.sent_bytes.store(sent_bytes, Relaxed);
        for (told, times) in self.page.server_latency.iter().zip(servers) {
            told.iter().zip(times).for_each(|(told, count)| told.store(count, Relaxed));
        }
    }

    /// Copies that there should be of so many pages, and are not.
    pub fn lacking(&self, stored_pages: u64, lacking_pages: u64) {
        self.page.stored_pages.store(stored_pages, Relaxed);
        self.page.lacking_pages.store(lacking_pages, Relaxed);
    }

    /// What the pool counts of servers that did not answer.
    pub fn copies(&self, moved_requests: u64, lost: impl Iterator<Item = bool>, missed_pages: u64) {
        let mask = |(mask, bit): (u64, u32), lost: bool| {
            (mask | u64::from(lost).checked_shl(bit).unwrap_or(0), bit + 1)
        };
        let mut lost_servers = 0;
        let (mask, _) = lost.inspect(|lost| lost_servers += u64::from(*lost)).fold((0, 0), mask);
        self.page.lost_mask.store(mask, Relaxed);
        self.page.moved_requests.store(moved_requests, Relaxed);
        self.page.lost_servers.store(lost_servers, Relaxed);
        self.page.missed_pages.store(missed_pages, Relaxed);
    }

    /// What the kernel counts for the whole process.
    pub fn process(&self, anonymous_pages: u64) {
        let page = self.page;
        page.anonymous_pages.store(anonymous_pages, Relaxed);
        page.peak_anonymous_pages
            .store(page.peak_anonymous_pages.load(Relaxed).max(anonymous_pages), Relaxed);
    }
    pub fn fault(&self, access: Access) {
        add(&self.page.faults, 1);
        if access == Access::WriteProtected {
            add(&self.page.write_protect_faults, 1);
        }
    }
    /// A fault was answered; so many more pages would have avoided it.
    pub fn served(&self, time: Duration, pages_to_avoid: Option<u64>) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
        let bucket = (nanos.ilog2() as usize).min(LATENCY_BUCKETS - 1);
        add(&self.page.fault_latency[bucket], 1);
        add(&self.page.waited_ns, nanos);
        if let Some(pages) = pages_to_avoid {
            add(&self.page.avoidable_ns[bucket_of(pages)], nanos);
        }
    }
    pub fn zero_filled(&self, pages: u64) {
        add(&self.page.zero_filled_pages, pages);
    }
    pub fn fetched(&self, pages: u64, demand: bool) {
        if demand {
            add(&self.page.demand_pages, pages);
            add(&self.page.demand_fetches, 1);
        } else {
            add(&self.page.prefetched_pages, pages);
        }
    }
    pub fn second_chance(&self, pages: u64) {
        add(&self.page.second_chance_pages, pages);
    }
    pub fn evicted(&self, pages: u64) {
        add(&self.page.evicted_pages, pages);
    }
    pub fn written_back(&self, pages: u64) {
        add(&self.page.written_back_pages, pages);
    }
    pub fn install_deferred(&self) {
        add(&self.page.deferred_installs, 1);
    }
    pub fn pool_full(&self) {
        add(&self.page.pool_full_events, 1);
    }
    pub fn forked(&self) {
        add(&self.page.forks, 1);
    }
    pub fn adopted(&self, pages: u64) {
        add(&self.page.adopted_pages, pages);
    }
}

fn add(counter: &AtomicU64, more: u64) {
    // One writer: a load and a store are enough, and cheaper than an atomic addition.
    counter.store(counter.load(Relaxed) + more, Relaxed);
}

impl StatsSnapshot {
    /// Reads what a [`StatsPage`] of this version looks like in a file. `None` for anything else, and for a
    /// page that is just being made.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != size_of::<StatsPage>() {
            return None;
        }
        let mut words = bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")));
        if words.next()? != StatsPage::VERSION {
            return None;
        }
        let mut snapshot = Self::default();
        snapshot.fill(&mut words);
        let arrays = snapshot.fault_latency.iter_mut().chain(snapshot.server_latency.as_flattened_mut());
        for bucket in arrays.chain(&mut snapshot.avoidable_ns) {
            *bucket = words.next()?;
        }
        Some(snapshot)
    }

    /// How much of `waited_ns` would have been left with more local memory, a process.
    #[must_use]
    pub fn forecast(&self) -> Forecast {
        Forecast::new(self.waited_ns, &self.avoidable_ns)
    }

    /// [`quantile_ns`] of the faults.
    #[must_use]
    pub fn fault_latency_ns(&self, share: f64) -> u64 {
        quantile_ns(&self.fault_latency, share)
    }

    /// Share of the faults (0 to 1) that did not have to wait for a server; 1 without faults.
    #[must_use]
    pub fn local_share(&self) -> f64 {
        if self.faults == 0 { 1.0 } else { 1.0 - self.demand_fetches as f64 / self.faults as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_read_from_bytes_as_it_was_written() {
        let stats = PagerStats::private();
        stats.fault(Access::Write);
        stats.served(Duration::from_micros(3), Some(1000));
        stats.evicted(77);
        let mut times = [0; LATENCY_BUCKETS];
        times[20] = 5;
        stats.pool(8000, 70, 5, [[0; LATENCY_BUCKETS], times].into_iter());
        let page = stats.page();
        // SAFETY: the page is plain 64-bit words, all written by this thread.
        let bytes: Vec<u8> = unsafe {
            std::slice::from_raw_parts(std::ptr::from_ref(page).cast::<u64>(), size_of::<StatsPage>() / 8)
        }
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect();
        let read = StatsSnapshot::from_bytes(&bytes).unwrap();
        assert_eq!(read, page.snapshot());
        assert_eq!((read.faults, read.evicted_pages, read.fault_latency_ns(0.5)), (1, 77, 4096));
        assert_eq!((read.received_bytes, read.sent_bytes), (8000, 70));
        assert_eq!(
            [0, 1, 2].map(|server: usize| quantile_ns(&read.server_latency[server], 0.99)),
            [0, 2 << 20, 0]
        );
        assert_eq!(StatsSnapshot::from_bytes(&bytes[8..]), None);
        assert_eq!(StatsSnapshot::from_bytes(&vec![0; bytes.len()]), None);
    }
}
