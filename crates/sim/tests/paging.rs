//! Many seeds. Their findings become named scenarios in the cache's own tests.

use rampool_paging::cache::CacheStats;
use rampool_sim::paging::{Plan, World, run};

fn from_env(name: &str, otherwise: u64) -> u64 {
    std::env::var(name)
        .map_or(otherwise, |s| s.parse().unwrap_or_else(|_| panic!("{name} is not a number: {s}")))
}

/// Threads change mappings all the time, several at once, and are preempted anywhere.
#[test]
fn no_seed_of_changing_mappings_breaks_a_rule() {
    let first = from_env("RAMPOOL_SIM_FIRST_SEED", 0);
    let seeds = from_env("RAMPOOL_SIM_SEEDS", 3000) / 3;
    let met =
        (first..first + seeds).map(|seed| World::new(Plan::changing(seed)).run().pages_there).sum::<u64>();
    assert!(met > 0 || seeds < 1000, "no page was still there when it was to be filled with zeroes");
}

/// `RAMPOOL_SIM_FIRST_SEED` and `RAMPOOL_SIM_SEEDS` override the default seeds.
#[test]
fn no_seed_breaks_a_rule_and_together_they_see_everything() {
    let first = from_env("RAMPOOL_SIM_FIRST_SEED", 0);
    let seeds = from_env("RAMPOOL_SIM_SEEDS", 3000);
    let all: Vec<CacheStats> = (first..first + seeds).map(run).collect();
    if seeds < 1000 {
        return;
    }
    // A simulator that no longer reaches a situation proves nothing about it.
    let seen = |what: &str, count: fn(&CacheStats) -> u64| {
        let runs = all.iter().filter(|s| count(s) > 0).count();
        assert!(runs >= 20, "only {runs} of {seeds} runs saw {what}");
    };
    seen("faults on resident pages", |s| s.spurious_faults);
    seen("write-protection faults", |s| s.unprotect_faults);
    seen("second chances", |s| s.second_chances);
    seen("faults on pages under way", |s| s.faults_on_fetch);
    seen("faults that waited for frames", |s| s.waits);
    seen("fresh pages", |s| s.zero_filled_pages);
    seen("demand fetches", |s| s.demand_fetches);
    seen("prefetch", |s| s.fetches - s.demand_fetches);
    seen("pages that came along with a neighbour", |s| s.company_pages);
    seen("markers that were reached", |s| s.markers_reached);
    seen("markers that were not", |s| s.wasted_markers);
    seen("pages that left before their first use", |s| s.left_too_early);
    seen("stores", |s| s.stored_pages);
    seen("pages that left unchanged", |s| s.unchanged_pages);
    seen("zero pages", |s| s.zero_pages);
    seen("pages that refused", |s| s.busy_pages);
    seen("discards", |s| s.discarded_pages);
    seen("failed installs", |s| s.failed_installs);
    seen("pages that were there when zeroes were to be installed", |s| s.pages_there);
    seen("a budget that could not be kept", |s| s.forced_pages);
}
