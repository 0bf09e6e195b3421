//! The client's sessions under every fault; and each rule left out, which must be noticed.
//!
//! `SESSION_SEEDS=10000 cargo test -p rampool-sim --test session` runs more seeds, `SESSION_SEED=7` one; with
//! `SESSION_RULE=AgeLimit` as well, the one that stresses this rule.

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rampool_session::Rule;
use rampool_sim::session::{Plan, Tally, run};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

fn seeds() -> u64 {
    number("SESSION_SEEDS").unwrap_or(150)
}

#[test]
fn sessions_keep_their_promises_whatever_goes_wrong() {
    if let Some(seed) = number("SESSION_SEED") {
        let named = std::env::var("SESSION_RULE").ok();
        let rule = named.and_then(|name| Rule::ALL.into_iter().find(|rule| format!("{rule:?}") == name));
        let plan = rule.map_or_else(|| Plan::from_seed(seed), |rule| Plan::stressing(rule, seed));
        println!("{plan:?}\n{:?}", run(plan.clone()));
        return;
    }
    let mut all = Tally::default();
    for seed in 0..seeds() {
        let tally = catch_unwind(|| run(Plan::from_seed(seed)));
        all.add(&tally.unwrap_or_else(|_| panic!("SESSION_SEED={seed}: {:?}", Plan::from_seed(seed))));
    }
    println!("{all:?}");
    // A world in which nothing happens proves nothing.
    assert!(all.counts_mut().into_iter().all(|count| *count > 0), "{all:?}");
}

#[test]
fn a_seed_repeats_its_run() {
    assert_eq!(run(Plan::from_seed(7)), run(Plan::from_seed(7)));
}

#[test]
fn every_rule_left_out_is_noticed() {
    // Expected panics do not fill the log.
    std::panic::set_hook(Box::new(|_| {}));
    let noticed = |rule| {
        let plan = |seed| Plan::stressing(rule, seed);
        let breaks = |seed: &u64| catch_unwind(|| run(Plan { omit: Some(rule), ..plan(*seed) })).is_err();
        let seed = (0..seeds()).find(breaks);
        println!("{rule:?}: {seed:?}");
        // With the rule kept, the same seed is fine.
        seed.is_some_and(|seed| catch_unwind(|| run(plan(seed))).is_ok())
    };
    let (next, unnoticed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(rule) = Rule::ALL.get(next.fetch_add(1, Relaxed)) {
            if !noticed(*rule) {
                unnoticed.lock().unwrap().push(*rule);
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| _ = scope.spawn(work)));
    let _ = std::panic::take_hook();
    let unnoticed = unnoticed.into_inner().unwrap();
    assert!(unnoticed.is_empty(), "left out without a test noticing: {unnoticed:?}");
}
