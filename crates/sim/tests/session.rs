//! The client's sessions under every fault; and each rule left out, which must be noticed.
//!
//! `SESSION_SEEDS=10000 cargo test -p rampool-sim --test session` runs more seeds, with `SESSION_FIRST=2000`
//! those from there on, `SESSION_SEED=7` one; with `SESSION_RULE=AgeLimit` as well, the one that stresses
//! this rule; with that alone, only this rule is left out.

use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rampool_session::Rule;
use rampool_sim::session::{Plan, Tally, run};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

/// The rule that is named.
fn rule() -> Option<Rule> {
    let named = std::env::var("SESSION_RULE").ok();
    named.and_then(|name| Rule::ALL.into_iter().find(|rule| format!("{rule:?}") == name))
}

fn seeds() -> u64 {
    number("SESSION_SEEDS").unwrap_or(1200)
}

/// Does so many things, each once.
fn on_all_cores(count: u64, work: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(0);
    let worker = || {
        while let Some(index) = Some(next.fetch_add(1, Relaxed)).filter(|index| *index < count) {
            work(index);
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| _ = scope.spawn(worker)));
}

#[test]
fn sessions_keep_their_promises_whatever_goes_wrong() {
    if let Some(seed) = number("SESSION_SEED") {
        let plan = rule().map_or_else(|| Plan::from_seed(seed), |rule| Plan::stressing(rule, seed));
        println!("{plan:?}\n{:?}", run(plan.clone()));
        return;
    }
    let (all, wrong) = (Mutex::new(Tally::default()), Mutex::new(Vec::new()));
    let first = number("SESSION_FIRST").unwrap_or(0);
    on_all_cores(seeds(), |index| {
        let seed = first + index;
        let tally = catch_unwind(|| run(Plan::from_seed(seed)));
        match tally {
            Ok(tally) => all.lock().unwrap().add(&tally),
            Err(_) => wrong.lock().unwrap().push(seed),
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "wrong: SESSION_SEED={wrong:?}");
    let mut all = all.into_inner().unwrap();
    println!("{all:?}");
    // A world in which nothing happens proves nothing.
    assert!(all.counts_mut().into_iter().all(|count| *count > 0), "{all:?}");
}

/// One request for pages of which each holder lacked others found no holder for all of them: lost, though
/// none was.
#[test]
fn pages_that_different_holders_lack_are_read_apart() {
    let _ = run(Plan::from_seed(640));
}

/// What different servers had was asked for at once where no holder was there, and lost.
#[test]
fn what_is_left_and_what_is_waited_for_are_read_apart() {
    let _ = run(Plan::stressing(Rule::FetchFromOther, 1));
}

/// One server refused a store for lack of room before the other one, which had missed the page, took it: the
/// first did not get it later.
#[test]
fn who_refused_gets_what_another_one_takes_later() {
    let _ = run(Plan::from_seed(5198));
}

/// The answer to a fetch that had gone elsewhere said that the server had given the client up.
#[test]
fn who_is_given_up_hears_it_from_any_answer() {
    let _ = run(Plan::from_seed(19396));
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
        let seed = (0..seeds().min(200)).find(breaks);
        println!("{rule:?}: {seed:?}");
        // With the rule kept, the same seed is fine.
        seed.is_some_and(|seed| catch_unwind(|| run(plan(seed))).is_ok())
    };
    let (unnoticed, named) = (Mutex::new(Vec::new()), rule());
    on_all_cores(Rule::ALL.len() as u64, |index| {
        let rule = Rule::ALL[usize::try_from(index).unwrap()];
        if named.is_none_or(|named| named == rule) && !noticed(rule) {
            unnoticed.lock().unwrap().push(rule);
        }
    });
    let _ = std::panic::take_hook();
    let unnoticed = unnoticed.into_inner().unwrap();
    assert!(unnoticed.is_empty(), "left out without a test noticing: {unnoticed:?}");
}
