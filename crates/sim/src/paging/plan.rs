//! What a seed decides about a run.

use rampool_paging::cache::CacheConfig;

use super::Mutation;
use crate::rng::Rng;

/// What a seed picked.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub pages: u64,
    pub config: CacheConfig,
    pub steps: u64,
    pub threads: usize,
    /// One in so many steps lets something that is under way go on; the larger, the longer everything takes.
    pub slowness: u64,
    /// One in so many: pages that refuse to leave, installs that fail, events of the program.
    pub busy_odds: u64,
    pub failure_odds: u64,
    pub event_odds: u64,
    /// Evictions are done and answered at once, by the thread that drives the cache.
    pub instant_evictions: bool,
    /// One in so many steps is a changing caller's, not the pager's: the larger, the longer it is preempted.
    pub preemption: u64,
    /// One in so many steps of a caller that has woken takes pages away: the larger, the longer what
    /// was given up stays mapped.
    pub lateness: u64,
    /// Several threads change mappings at a time, and are preempted. Else a change is over before anything
    /// else happens.
    pub concurrent: bool,
    pub mutation: Option<Mutation>,
}

impl Plan {
    /// As [`from_seed`](Self::from_seed), of a program whose threads change mappings all the time, several at
    /// once: events are read together, and acted on while callers have yet to run.
    #[must_use]
    pub fn changing(seed: u64) -> Self {
        Self { event_odds: 5, concurrent: true, ..Self::from_seed(seed) }
    }

    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        // Mostly small, where everything is scarce; some large enough for prefetch.
        let budget_pages = match rng.below(8) {
            0 | 1 => rng.between(32, 48),
            7 => rng.between(256, 1024),
            _ => rng.between(32, 256),
        };
        let small = |rng: &mut Rng, log2: u64| 1u32 << rng.below(log2 + 1);
        let config = CacheConfig {
            budget_pages,
            unit_pages: small(&mut rng, 4),
            batch_pages: small(&mut rng, 7),
            max_batches: u32::try_from(rng.between(1, 12)).expect("small"),
            max_prefetch_pages: if rng.one_in(4) { 0 } else { small(&mut rng, 6) },
            fetch_pages: small(&mut rng, 6),
            max_fetches: u32::try_from(rng.between(1, 12)).expect("small"),
            tells_unchanged: seed.is_multiple_of(2),
        };
        let odds = |rng: &mut Rng| if rng.one_in(2) { u64::MAX } else { rng.between(5, 200) };
        Self {
            seed,
            pages: rng.between(budget_pages / 2, budget_pages * 3),
            config,
            steps: rng.between(200, 1200) * if budget_pages > 256 { 2 } else { 1 },
            threads: rng.index(4) + 1,
            slowness: [2, 3, 5, 20][rng.index(4)],
            busy_odds: odds(&mut rng),
            failure_odds: odds(&mut rng),
            event_odds: odds(&mut rng),
            instant_evictions: rng.one_in(2),
            preemption: [2, 4, 30][rng.index(3)],
            lateness: [1, 4, 16][rng.index(3)],
            concurrent: rng.one_in(2),
            mutation: None,
        }
    }
}
