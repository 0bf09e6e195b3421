//! Keys to registered memory under loss, duplication, delay, reordering and peers given up too early; and
//! each rule left out, which must be noticed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rampool_pinning::keys::KeyRule;
use rampool_sim::keys::{Tally, run};

const SEEDS: u64 = 400;

#[test]
fn no_late_use_of_a_key_touches_memory_and_every_memory_comes_free() {
    let mut all = Tally::default();
    for seed in 0..SEEDS {
        let tally = catch_unwind(|| run(seed, None)).unwrap_or_else(|_| panic!("seed {seed}"));
        all.uses += tally.uses;
        all.refused_stale += tally.refused_stale;
        all.refused_otherwise += tally.refused_otherwise;
        all.freed += tally.freed;
        all.replaced += tally.replaced;
        all.given_up += tally.given_up;
        all.messages_lost += tally.messages_lost;
    }
    // A world in which nothing happens proves nothing.
    let least = [
        all.uses,
        all.refused_stale,
        all.refused_otherwise,
        all.freed,
        all.replaced,
        all.given_up,
        all.messages_lost,
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
    let unnoticed: Vec<KeyRule> = KeyRule::ALL.into_iter().filter(|rule| !is_noticed(*rule)).collect();
    let _ = std::panic::take_hook();
    assert!(unnoticed.is_empty(), "left out without a failure: {unnoticed:?}");
}
