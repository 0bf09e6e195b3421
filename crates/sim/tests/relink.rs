//! A connection between two ranks that is cut anywhere, in any order of events; and each rule left out, which
//! must be noticed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rampool_sharing::relink::RelinkRule;
use rampool_sim::relink::{Cuts, Tally, run};

const SEEDS: u64 = 300;

#[test]
fn nothing_is_lost_or_heard_twice_however_often_the_connection_is_cut() {
    let mut all = Tally::default();
    for seed in 0..SEEDS {
        let tally = catch_unwind(|| run(seed, Cuts::Random, None)).unwrap_or_else(|_| panic!("seed {seed}"));
        all.said += tally.said;
        all.cuts += tally.cuts;
        all.resumed += tally.resumed;
        all.cut_again += tally.cut_again;
        all.overtaken += tally.overtaken;
        all.unauthenticated += tally.unauthenticated;
        all.held_back += tally.held_back;
        all.acknowledged_alone += tally.acknowledged_alone;
    }
    // A world in which nothing happens proves nothing.
    let least = [
        all.said,
        all.cuts,
        all.resumed,
        all.cut_again,
        all.overtaken,
        all.unauthenticated,
        all.held_back,
        all.acknowledged_alone,
    ];
    assert!(least.into_iter().all(|n| n > SEEDS / 3), "{all:?}");
}

/// A cut after each number of bytes of the run, and another one some bytes later, so that the agreement to
/// resume is cut everywhere, too.
#[test]
fn a_cut_anywhere_and_another_during_the_return_are_survived() {
    for first in (0..900).step_by(9) {
        for then in (0..140).step_by(5) {
            let tally = catch_unwind(|| run(first, Cuts::At(first, then), None))
                .unwrap_or_else(|_| panic!("cuts at {first} and {then}"));
            assert!(tally.cuts > 0, "{first} {then}");
        }
    }
}

#[test]
fn a_seed_repeats_its_run() {
    assert_eq!(run(7, Cuts::Random, None), run(7, Cuts::Random, None));
}

#[test]
fn every_rule_left_out_is_noticed() {
    // Expected panics do not fill the log.
    std::panic::set_hook(Box::new(|_| {}));
    let is_noticed = |rule| {
        (0..SEEDS).any(|seed| catch_unwind(AssertUnwindSafe(|| run(seed, Cuts::Random, Some(rule)))).is_err())
    };
    let unnoticed: Vec<RelinkRule> = RelinkRule::ALL.into_iter().filter(|rule| !is_noticed(*rule)).collect();
    let _ = std::panic::take_hook();
    assert!(unnoticed.is_empty(), "left out without a failure: {unnoticed:?}");
}
