//! How well the policy chooses: counts, against first in first out, least recently used and Belady's optimum.
//!
//! The world here is a plain one: nothing fails, a fetch takes a fixed number of accesses, everything else is
//! instant.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rampool_paging::cache::{
    Access, BatchId, Cache, CacheConfig, CacheStats, EvictOutcome, FetchId, Input, Output,
};
use rampool_paging::curve::{BUCKETS, Forecast, bucket_of};
use rampool_wire::units::{Extent, PageIndex, total_pages};

use super::pattern::Pattern;
use crate::rng::Rng;

/// Which accesses are stores.
#[derive(Clone, Debug)]
pub enum Writes {
    Never,
    OneIn(u64),
    /// Every access number `n` with `n % ways == 0`: one of the arrays of an interleaved walk.
    OneWayOf(usize),
    /// Of each access, whether it is one.
    Recorded(Vec<bool>),
}

/// A workload: how a program walks, over how many pages, how long, and with how much local memory.
#[derive(Clone, Debug)]
pub struct Workload {
    pub name: &'static str,
    pub pattern: Pattern,
    pub pages: u64,
    pub budget: u64,
    pub accesses: usize,
    pub writes: Writes,
}

impl Workload {
    /// The pages in the order of their accesses.
    #[must_use]
    pub fn trace(&self) -> Vec<u64> {
        let mut rng = Rng::new(7);
        let mut pattern = self.pattern.clone();
        (0..self.accesses).map(|_| pattern.next(&mut rng, self.pages)).collect()
    }
}

/// What one run cost.
#[derive(Clone, Debug)]
pub struct Score {
    pub accesses: u64,
    /// Accesses that found their page mapped.
    pub mapped: u64,
    /// Faults answered from local memory.
    pub soft_faults: u64,
    /// Faults whose thread waited for the network.
    pub waits: u64,
    /// Those of them that so many more pages would have avoided, as the cache estimates, by buckets.
    pub avoidable: [u64; BUCKETS],
    pub stats: CacheStats,
}

impl Score {
    /// The share of accesses whose page had not to be brought over the network.
    #[must_use]
    pub fn hit_share(&self) -> f64 {
        1.0 - share(self.stats.fetched_pages, self.accesses)
    }

    /// The share of accesses that waited for the network.
    #[must_use]
    pub fn wait_share(&self) -> f64 {
        share(self.waits, self.accesses)
    }

    /// How many accesses would have waited with so many more pages, as the cache estimates.
    #[must_use]
    pub fn waits_with(&self, more: u64) -> u64 {
        Forecast::new(self.waits, &self.avoidable).with(more)
    }

    /// The share of accesses that faulted without waiting.
    #[must_use]
    pub fn soft_share(&self) -> f64 {
        share(self.soft_faults, self.accesses)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// The configuration used for measuring, with or without prefetch: an eighth of the budget at most on its way
/// out, and as much on its way in.
#[must_use]
pub fn config(budget_pages: u64, prefetch: bool) -> CacheConfig {
    let in_flight = u32::try_from((budget_pages / 8).clamp(16, 4096)).expect("clamped");
    let batch_pages = (in_flight / 4).clamp(4, 512);
    let fetch_pages = (in_flight / 4).clamp(4, 256);
    CacheConfig {
        budget_pages,
        unit_pages: 1,
        batch_pages,
        max_batches: (in_flight / batch_pages).max(2),
        max_prefetch_pages: if prefetch { 512.min(in_flight / 2) } else { 0 },
        fetch_pages,
        max_fetches: (in_flight / fetch_pages).max(4),
        tells_unchanged: false,
    }
}

/// Runs the cache over a workload: all pages are at the servers at first, except that as many as fit are
/// resident.
#[must_use]
pub fn measure(workload: &Workload, config: CacheConfig, fetch_delay: usize) -> Score {
    let mut world = Plain {
        mapped: BTreeMap::new(),
        cache: Cache::new(config),
        arrivals: VecDeque::new(),
        now: 0,
        batches: BTreeMap::new(),
        fetch_delay,
    };
    let resident = u32::try_from(workload.budget.min(workload.pages)).expect("few pages");
    let pages = u32::try_from(workload.pages).expect("few pages");
    for page in 0..u64::from(resident) {
        world.mapped.insert(page, false);
    }
    let remote = [Extent::new(PageIndex(u64::from(resident)), pages - resident)];
    world.tell(&Input::Adopt {
        extent: Extent::new(PageIndex(0), pages),
        resident: &[Extent::new(PageIndex(0), resident)],
        remote: if pages > resident { &remote } else { &[] },
        given_up: &[],
    });
    let before = world.cache.stats();
    let mut score = Score {
        accesses: workload.accesses as u64,
        mapped: 0,
        soft_faults: 0,
        waits: 0,
        avoidable: [0; BUCKETS],
        stats: before.clone(),
    };
    let mut rng = Rng::new(11);
    for (at, page) in workload.trace().into_iter().enumerate() {
        let write = match &workload.writes {
            Writes::Never => false,
            Writes::OneIn(odds) => rng.one_in(*odds),
            Writes::OneWayOf(ways) => at % ways == 0,
            Writes::Recorded(writes) => writes[at],
        };
        world.access(page, write, &mut score);
    }
    let mut stats = world.cache.stats();
    stats.fetched_pages -= before.fetched_pages;
    score.stats = stats;
    score
}

struct Plain {
    /// Mapped pages, and whether they are write-protected.
    mapped: BTreeMap<u64, bool>,
    cache: Cache,
    arrivals: VecDeque<(usize, FetchId)>,
    now: usize,
    batches: BTreeMap<u32, usize>,
    fetch_delay: usize,
}

impl Plain {
    fn access(&mut self, page: u64, write: bool, score: &mut Score) {
        self.now += 1;
        self.arrive(self.now);
        let mut faulted = false;
        let mut waited = false;
        let mut avoid = None;
        loop {
            let access = match self.mapped.get(&page) {
                Some(true) if write => Access::WriteProtected,
                Some(_) => break,
                None if write => Access::Write,
                None => Access::Read,
            };
            faulted = true;
            self.tell(&Input::Fault { page: PageIndex(page), access });
            avoid = self.cache.pages_to_avoid();
            while !self.mapped.contains_key(&page) {
                waited = true;
                let Some(&(at, _)) = self.arrivals.front() else {
                    panic!("{}", self.cache.describe(PageIndex(page)))
                };
                self.now = self.now.max(at);
                self.arrive(self.now);
            }
        }
        score.mapped += u64::from(!faulted);
        score.waits += u64::from(waited);
        if let (true, Some(pages)) = (waited, avoid) {
            score.avoidable[bucket_of(pages)] += 1;
        }
        score.soft_faults += u64::from(faulted && !waited);
    }

    fn arrive(&mut self, now: usize) {
        while let Some(&(at, fetch)) = self.arrivals.front()
            && at <= now
        {
            self.arrivals.pop_front();
            self.tell(&Input::Fetched { fetch });
        }
    }

    fn tell(&mut self, input: &Input<'_>) {
        self.cache.handle(copy_of(input));
        let mut answers = VecDeque::new();
        loop {
            while let Some(output) = self.cache.poll() {
                self.perform(output, &mut answers);
            }
            match answers.pop_front() {
                Some(Answer::Evicted(batch, outcomes)) => {
                    self.cache.handle(Input::Evicted { batch, outcomes: &outcomes })
                }
                Some(Answer::Stored(batch)) => self.cache.handle(Input::Stored { batch }),
                None => return,
            }
        }
    }

    fn perform(&mut self, output: Output, answers: &mut VecDeque<Answer>) {
        match output {
            Output::InstallZero { extent } => self.map(extent, false),
            Output::InstallFetched { extent, writable, .. }
            | Output::InstallStaged { extent, writable, .. } => self.map(extent, !writable),
            Output::Unprotect { extent } => {
                for page in extent.pages() {
                    self.mapped.entry(page.0).and_modify(|p| *p = false);
                }
            }
            Output::Evict { batch, extents } => {
                let pages = extents.iter().flat_map(Extent::pages);
                let outcomes = pages
                    .map(|p| self.mapped.remove(&p.0).map_or(EvictOutcome::Vanished, |_| EvictOutcome::Moved))
                    .collect();
                self.batches.insert(batch.0, usize::try_from(total_pages(&extents)).expect("small"));
                answers.push_back(Answer::Evicted(batch, outcomes));
            }
            Output::Store { batch, .. } => answers.push_back(Answer::Stored(batch)),
            Output::ReleaseBatch { batch, .. } => {
                self.batches.remove(&batch.0);
            }
            Output::Fetch { fetch, .. } => self.arrivals.push_back((self.now + self.fetch_delay, fetch)),
            Output::Confirm { .. }
            | Output::Wake { .. }
            | Output::ReleaseFetch { .. }
            | Output::Discard { .. } => {}
        }
    }

    fn map(&mut self, extent: Extent, protected: bool) {
        for page in extent.pages() {
            self.mapped.entry(page.0).or_insert(protected);
        }
    }
}

enum Answer {
    Evicted(BatchId, Vec<EvictOutcome>),
    Stored(BatchId),
}

fn copy_of<'a>(input: &Input<'a>) -> Input<'a> {
    match *input {
        Input::Adopt { extent, resident, remote, given_up } => {
            Input::Adopt { extent, resident, remote, given_up }
        }
        Input::Fault { page, access } => Input::Fault { page, access },
        Input::Fetched { fetch } => Input::Fetched { fetch },
        _ => unreachable!("the plain world has no other inputs"),
    }
}

/// Misses of first in, first out with `budget` frames; the first pages are there at the start.
#[must_use]
pub fn fifo_misses(trace: &[u64], budget: u64) -> u64 {
    let mut queue: VecDeque<u64> = (0..budget).collect();
    let mut held: BTreeSet<u64> = queue.iter().copied().collect();
    let mut misses = 0;
    for &page in trace {
        if held.insert(page) {
            misses += 1;
            queue.push_back(page);
            if queue.len() as u64 > budget {
                held.remove(&queue.pop_front().expect("not empty"));
            }
        }
    }
    misses
}

/// Misses of least recently used.
#[must_use]
pub fn lru_misses(trace: &[u64], budget: u64) -> u64 {
    let mut last: BTreeMap<u64, u64> = (0..budget).map(|p| (p, p)).collect();
    let mut order: BTreeMap<u64, u64> = (0..budget).map(|p| (p, p)).collect();
    let mut misses = 0;
    for (now, &page) in (budget..).zip(trace) {
        match last.insert(page, now) {
            Some(before) => {
                order.remove(&before);
            }
            None => misses += 1,
        }
        order.insert(now, page);
        if last.len() as u64 > budget {
            let (_, oldest) = order.pop_first().expect("not empty");
            last.remove(&oldest);
        }
    }
    misses
}

/// Misses of the optimum: the page whose next use lies farthest ahead leaves (Belady, IBM Systems Journal
/// '66).
#[must_use]
pub fn optimum_misses(trace: &[u64], budget: u64) -> u64 {
    let never = trace.len();
    let mut next_use = vec![never; trace.len()];
    let mut seen: BTreeMap<u64, usize> = BTreeMap::new();
    for (now, &page) in trace.iter().enumerate().rev() {
        next_use[now] = seen.insert(page, now).unwrap_or(never);
    }
    let mut held: BTreeMap<u64, usize> =
        (0..budget).map(|p| (p, seen.get(&p).copied().unwrap_or(never))).collect();
    let mut order: BTreeSet<(usize, u64)> = held.iter().map(|(&p, &n)| (n, p)).collect();
    let mut misses = 0;
    for (now, &page) in trace.iter().enumerate() {
        match held.insert(page, next_use[now]) {
            Some(before) => {
                order.remove(&(before, page));
            }
            None => misses += 1,
        }
        order.insert((next_use[now], page));
        if held.len() as u64 > budget {
            let (_, farthest) = order.pop_last().expect("not empty");
            held.remove(&farthest);
        }
    }
    misses
}

/// What a program did, as `bench/traces.py` records it: little-endian words of 32 bits, each twice the number
/// of a page, and one more for a store. With this share of its pages as local memory.
///
/// # Panics
/// Where these are not whole words, or none.
#[must_use]
pub fn recorded(name: &'static str, bytes: &[u8], percent: u64) -> Workload {
    let (words, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty() && !words.is_empty(), "{name}: not a trace");
    let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let pages: Vec<u64> = words.iter().map(|word| u64::from(word >> 1)).collect();
    let most = pages.iter().max().expect("not empty") + 1;
    Workload {
        name,
        accesses: pages.len(),
        pattern: Pattern::Recorded { pages, at: 0 },
        pages: most,
        budget: most * percent / 100,
        writes: Writes::Recorded(words.iter().map(|word| word & 1 == 1).collect()),
    }
}

/// The table's workloads, in proportion to a budget in pages.
#[must_use]
pub fn workloads(budget: u64) -> Vec<Workload> {
    let accesses = usize::try_from(60 * budget).expect("few accesses");
    let part = |hundredths: u64| budget * hundredths / 100;
    let of = |name, pattern, hundredths, writes| Workload {
        name,
        pattern,
        pages: part(hundredths),
        budget,
        accesses,
        writes,
    };
    let cyclic = |stride| Pattern::Cyclic { at: 0, stride };
    let phases = |hundredths| Pattern::Phases {
        start: 2 * budget,
        width: part(hundredths),
        left: 20 * part(hundredths),
    };
    vec![
        of("cyclic scan, 1.25x budget", cyclic(1), 125, Writes::Never),
        of("cyclic scan, 1.5x budget", cyclic(1), 150, Writes::Never),
        of("cyclic scan, 2x budget", cyclic(1), 200, Writes::Never),
        of("cyclic scan, 2x, written", cyclic(1), 200, Writes::OneIn(1)),
        of("cyclic scan, 4x budget", cyclic(1), 400, Writes::Never),
        of("cyclic scan down, 2x", cyclic(-1), 200, Writes::Never),
        of("every 8th page, 2x", cyclic(8), 200, Writes::Never),
        of(
            "three arrays, 2x (triad)",
            Pattern::Interleaved { at: (0..3).map(|i| i * part(200) / 3).collect(), turn: 0 },
            200,
            Writes::OneWayOf(3),
        ),
        of("random, 2x budget", Pattern::Random, 200, Writes::OneIn(4)),
        of("Zipf 0.8, 4x budget", Pattern::Zipf { skew: 0.8 }, 400, Writes::OneIn(4)),
        of("Zipf 1.0, 4x budget", Pattern::Zipf { skew: 1.0 }, 400, Writes::OneIn(4)),
        of("phases of 0.75x budget", phases(75), 400, Writes::OneIn(4)),
        of("phases of 0.3x budget", phases(30), 400, Writes::OneIn(4)),
        of("random, 0.97x budget", Pattern::Random, 97, Writes::OneIn(4)),
        of("cyclic scan, 0.97x budget", cyclic(1), 97, Writes::Never),
        of("random, 0.8x budget", Pattern::Random, 80, Writes::OneIn(4)),
    ]
}
