//! How well the page cache chooses, as relations between counts. The whole table: `cargo run --release -p
//! rampool-sim --example policy`.

use rampool_sim::paging::policy::{
    Score, Workload, config, fifo_misses, lru_misses, measure, optimum_misses, workloads,
};

const BUDGET: u64 = 2048;

fn named(name: &str) -> Workload {
    workloads(BUDGET).into_iter().find(|w| w.name == name).expect("a workload of the table")
}

fn run(workload: &Workload, prefetch: bool) -> Score {
    measure(workload, config(BUDGET, prefetch), 8)
}

/// Hits in a hundred accesses.
fn hits(misses: u64, accesses: usize) -> u64 {
    100 - 100 * misses / accesses as u64
}

fn percent(share: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 100")]
    let whole = (100.0 * share) as u64;
    whole
}

#[test]
fn a_cyclic_scan_over_twice_the_budget_keeps_most_of_what_can_be_kept() {
    for name in ["cyclic scan, 2x budget", "cyclic scan down, 2x", "every 8th page, 2x"] {
        let workload = named(name);
        let plain = run(&workload, false);
        assert!(plain.hit_share() >= 0.39, "{name}: {}", plain.hit_share());
        let trace = workload.trace();
        assert!(
            hits(lru_misses(&trace, BUDGET), trace.len()) < 6,
            "least recently used keeps nothing, or the test shows nothing"
        );
        assert!(hits(optimum_misses(&trace, BUDGET), trace.len()) <= 51);
    }
}

#[test]
fn with_prefetch_a_scan_does_not_wait_and_keeps_what_it_kept() {
    for name in ["cyclic scan, 2x budget", "cyclic scan down, 2x", "every 8th page, 2x"] {
        let workload = named(name);
        let ahead = run(&workload, true);
        assert!(ahead.hit_share() >= 0.34, "{name}: {}", ahead.hit_share());
        assert!(ahead.wait_share() <= 0.02, "{name}: {} of the accesses wait", ahead.wait_share());
    }
}

#[test]
fn popular_pages_stay_at_least_as_well_as_with_least_recently_used() {
    for name in ["Zipf 0.8, 4x budget", "Zipf 1.0, 4x budget"] {
        let workload = named(name);
        let trace = workload.trace();
        let (fifo, lru) =
            (hits(fifo_misses(&trace, BUDGET), trace.len()), hits(lru_misses(&trace, BUDGET), trace.len()));
        let ours = percent(run(&workload, true).hit_share());
        assert!(
            ours >= fifo + 2 && ours + 1 >= lru,
            "{name}: {ours} against {fifo} (first in, first out) and {lru} (least recently used)"
        );
    }
}

#[test]
fn random_accesses_cost_no_extra_traffic() {
    let workload = named("random, 2x budget");
    let (plain, ahead) = (run(&workload, false), run(&workload, true));
    assert!(plain.hit_share() >= 0.45, "{}", plain.hit_share());
    assert!(
        ahead.hit_share() >= plain.hit_share() - 0.02,
        "{} with prefetch, {} without",
        ahead.hit_share(),
        plain.hit_share()
    );
}

#[test]
fn a_change_of_phase_is_followed() {
    for name in ["phases of 0.75x budget", "phases of 0.3x budget"] {
        let workload = named(name);
        let trace = workload.trace();
        let optimum = hits(optimum_misses(&trace, BUDGET), trace.len());
        let ours = percent(run(&workload, true).hit_share());
        assert!(ours + 6 >= optimum, "{name}: {ours}, the optimum is {optimum}");
    }
}

#[test]
fn what_fits_stays() {
    let score = run(&named("random, 0.8x budget"), true);
    assert_eq!((score.waits, score.stats.evicted_pages), (0, 0));
}
