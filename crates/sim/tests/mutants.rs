//! Each rule of the runtime, broken on purpose: the oracle must notice within two thousand
//! seeds. A test of the tests.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rampool_sim::paging::{Mutation, Plan, World};

const SEEDS: u64 = 2000;

#[test]
fn every_broken_rule_is_noticed() {
    // Expected panics do not fill the log.
    std::panic::set_hook(Box::new(|_| {}));
    let unnoticed: Vec<Mutation> =
        Mutation::ALL.into_iter().filter(|m| !(0..SEEDS).any(|seed| is_noticed(seed, *m))).collect();
    let _ = std::panic::take_hook();
    assert!(unnoticed.is_empty(), "broken without a failure: {unnoticed:?}");
}

fn is_noticed(seed: u64, mutation: Mutation) -> bool {
    [Plan::from_seed(seed), Plan::changing(seed)].into_iter().any(|plan| {
        let plan = Plan { mutation: Some(mutation), ..plan };
        catch_unwind(AssertUnwindSafe(|| World::new(plan).run())).is_err()
    })
}
