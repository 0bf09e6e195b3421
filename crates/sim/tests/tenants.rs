//! Tenants that mean no good, next to one that works; and each rule left out, which must be noticed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rampool_lease::TenantRule;
use rampool_sim::tenants::{Tally, run};

const SEEDS: u64 = 60;

#[test]
fn no_tenant_hurts_another_and_nothing_is_left_of_any() {
    let mut all = Tally::default();
    for seed in 0..SEEDS {
        let tally = catch_unwind(|| run(seed, None)).unwrap_or_else(|_| panic!("seed {seed}"));
        all.answered += tally.answered;
        all.refused += tally.refused;
        all.slices += tally.slices;
        all.clones += tally.clones;
        all.changed_while_cloned += tally.changed_while_cloned;
        all.stolen += tally.stolen;
        all.lost += tally.lost;
        all.crashed += tally.crashed;
        all.kept_out += tally.kept_out;
        all.victim += tally.victim;
    }
    // A world in which nothing happens proves nothing.
    let least = [
        all.answered,
        all.refused,
        all.slices,
        all.clones,
        all.changed_while_cloned,
        all.stolen,
        all.lost,
        all.crashed,
        all.kept_out,
        all.victim,
    ];
    assert!(least.into_iter().all(|n| n > SEEDS), "{all:?}");
}

#[test]
fn a_seed_repeats_its_run() {
    assert_eq!(run(7, None), run(7, None));
}

#[test]
fn every_rule_left_out_is_noticed() {
    // Expected panics do not fill the log.
    std::panic::set_hook(Box::new(|_| {}));
    let is_noticed =
        |rule| (0..SEEDS).any(|seed| catch_unwind(AssertUnwindSafe(|| run(seed, Some(rule)))).is_err());
    let unnoticed: Vec<TenantRule> = TenantRule::ALL.into_iter().filter(|rule| !is_noticed(*rule)).collect();
    let _ = std::panic::take_hook();
    assert!(unnoticed.is_empty(), "left out without a failure: {unnoticed:?}");
}
