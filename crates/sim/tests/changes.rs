//! Many seeds of threads that change mappings, and each rule broken on purpose.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rampool_sim::changes::{Mutation, Seen, run};

#[test]
fn no_seed_brings_other_content_back_and_together_they_see_everything() {
    let all: Vec<Seen> = (0..20_000).map(|seed| run(seed, None)).collect();
    let sum = |count: fn(&Seen) -> u64| all.iter().map(count).sum::<u64>();
    assert!(sum(|s| s.overtaken) > 5000, "changes overtake each other");
    assert!(sum(|s| s.either) > 0, "pages that may be of two contents");
    assert!(sum(|s| s.children) > 1000 && sum(|s| s.returned) > 1000);
    assert!(all.iter().any(|s| s.largest > 16), "many changes at a time");
    assert!(sum(|s| s.doubts) * 25 < all.len() as u64, "most orders can be told: {}", sum(|s| s.doubts));
}

#[test]
fn every_broken_rule_is_noticed() {
    // Expected panics do not fill the log.
    std::panic::set_hook(Box::new(|_| {}));
    let is_noticed = |seed, mutation| catch_unwind(AssertUnwindSafe(|| run(seed, Some(mutation)))).is_err();
    let unnoticed: Vec<Mutation> =
        Mutation::ALL.into_iter().filter(|m| !(0..40_000).any(|seed| is_noticed(seed, *m))).collect();
    let _ = std::panic::take_hook();
    assert!(unnoticed.is_empty(), "broken without a failure: {unnoticed:?}");
}
