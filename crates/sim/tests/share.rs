//! The shared view's protocols in the simulated world: litmus tests, generated programs, mutants, exhaustive
//! search, failures.

#[path = "share/counts.rs"]
mod counts;
#[path = "share/documents.rs"]
mod documents;
#[path = "share/failures.rs"]
mod failures;
#[path = "share/generated.rs"]
mod generated;
#[path = "share/litmus.rs"]
mod litmus;
#[path = "share/mutants.rs"]
mod mutants;
#[path = "share/papers.rs"]
mod papers;
#[path = "share/search.rs"]
mod search;

use std::sync::Arc;

use rampool_sharing::{BarrierId, BarrierKind, LockId, LockMode, ProtocolKind};
use rampool_sim::share::{Failure, Op, Report, Script, Setup, World};

/// Multiplies the number of runs: `SHARE_EFFORT=20 cargo test -p rampool-sim --test share`.
fn effort() -> u64 {
    std::env::var("SHARE_EFFORT").ok().and_then(|value| value.parse().ok()).unwrap_or(1)
}

/// The protocols under which every race-free program is sequentially consistent.
const RELEASE_CONSISTENT: [ProtocolKind; 5] =
    [ProtocolKind::Sc, ProtocolKind::Lrc, ProtocolKind::Hlrc, ProtocolKind::Aurc, ProtocolKind::Auto];

fn lock(lock: u64) -> Op {
    Op::Lock { lock: LockId(lock), mode: LockMode::Exclusive }
}

fn share(lock: u64) -> Op {
    Op::Lock { lock: LockId(lock), mode: LockMode::Shared }
}

fn unlock(lock: u64) -> Op {
    Op::Unlock { lock: LockId(lock) }
}

fn write(at: usize, value: u8) -> Op {
    Op::Write { at, len: 1, value }
}

fn read(at: usize) -> Op {
    Op::Read { at, len: 1 }
}

fn barrier(number: u32) -> Op {
    Op::Barrier { barrier: BarrierId(number), kind: BarrierKind::Normal }
}

fn keep_barrier(number: u32) -> Op {
    Op::Barrier { barrier: BarrierId(number), kind: BarrierKind::KeepReadWrite }
}

/// One thread on each rank.
fn single(ranks: Vec<Vec<Op>>) -> Vec<Vec<Script>> {
    ranks.into_iter().map(|ops| vec![Arc::from(ops)]).collect()
}

/// Several threads on each rank.
fn several(ranks: Vec<Vec<Vec<Op>>>) -> Vec<Vec<Script>> {
    ranks.into_iter().map(|threads| threads.into_iter().map(Arc::from).collect()).collect()
}

fn run(setup: Setup) -> Result<Report, Failure> {
    World::new(setup).run()
}
