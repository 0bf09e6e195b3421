//! How well the page cache chooses, as relations between counts. The whole table: `cargo run --release -p
//! rampool-sim --example policy`.

use std::collections::BTreeMap;

use rampool_paging::curve::Curve;
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

/// Accesses that wait with more memory, in hundredths of those that wait without: as estimated from the run
/// without, and as they are.
fn with_more(workload: &Workload, percent: u64) -> [u64; 2] {
    let here = run(workload, false);
    let budget = BUDGET * percent / 100;
    let larger = Workload { budget, ..workload.clone() };
    let there = measure(&larger, config(budget, false), 8);
    [here.waits_with(budget - BUDGET), there.waits].map(|waits| 100 * waits / here.waits)
}

#[test]
fn what_more_memory_saves_is_known_without_it() {
    // The most that the estimate is wrong by, in hundredths of the waits. After a change of phase this cache
    // does not keep what least recently used would.
    let all = [
        ("cyclic scan, 1.25x budget", 14),
        ("cyclic scan, 2x budget", 8),
        ("cyclic scan, 4x budget", 8),
        ("every 8th page, 2x", 8),
        ("three arrays, 2x (triad)", 8),
        ("random, 2x budget", 5),
        ("Zipf 0.8, 4x budget", 5),
        ("Zipf 1.0, 4x budget", 5),
        ("phases of 0.75x budget", 26),
        ("phases of 0.3x budget", 26),
    ];
    for (name, most) in all {
        let workload = Workload { accesses: 2 * named(name).accesses, ..named(name) };
        for percent in [112, 125, 150, 200, 300, 400] {
            let [estimated, real] = with_more(&workload, percent);
            assert!(
                estimated.abs_diff(real) <= most,
                "{name}, {percent} % of the budget: {estimated} of 100 instead of {real}"
            );
        }
    }
}

#[test]
fn the_curve_of_least_recently_used_is_exact_to_a_group() {
    for workload in workloads(BUDGET) {
        let trace = workload.trace();
        let misses = lru_misses(&trace, BUDGET);
        let depths = depths_of_misses(&trace, BUDGET);
        assert_eq!(depths.len() as u64, misses, "{}", workload.name);
        for percent in [112, 125, 150, 200, 300, 400] {
            let more = BUDGET * percent / 100 - BUDGET;
            // What lies next to the edge is not judged: all of a scan may.
            let (near, far) = (more - more / 32 - 16, more + more / 32 + 16);
            let misses_with = |more: u64| depths.iter().filter(|d| d.is_none_or(|d| d > more)).count() as u64;
            let (most, least) = (misses_with(near), misses_with(far));
            let real = lru_misses(&trace, BUDGET + more);
            // The larger memory begins with more pages in it than the smaller one has seen leave.
            let slack = misses / 50 + more;
            assert!(
                real <= most + slack && real + slack >= least,
                "{}, {percent} %: {least} to {most} of {misses} instead of {real}",
                workload.name
            );
        }
    }
}

/// Least recently used with `budget` frames: for every miss, with how many more it had been none.
fn depths_of_misses(trace: &[u64], budget: u64) -> Vec<Option<u64>> {
    let mut last: BTreeMap<u64, u64> = (0..budget).map(|p| (p, p)).collect();
    let mut order = last.clone();
    let mut left: BTreeMap<u64, u32> = BTreeMap::new();
    let mut curve = Curve::new(budget / 256);
    let mut clock = 0;
    let mut depths = Vec::new();
    for (now, &page) in (budget..).zip(trace) {
        match last.insert(page, now) {
            Some(before) => {
                order.remove(&before);
            }
            None => depths.push(left.remove(&page).map(|clock| {
                let depth = curve.newer(clock);
                curve.returned(clock);
                depth
            })),
        }
        order.insert(now, page);
        if last.len() as u64 > budget {
            let (_, oldest) = order.pop_first().expect("not empty");
            last.remove(&oldest);
            clock += 1;
            left.insert(oldest, clock);
            curve.left(clock);
        }
    }
    depths
}
