//! Every order of small worlds.

use rampool_sharing::{BarrierKind, CondId, Homes, LockId, LockPath, ProtocolKind, Rank};
use rampool_sim::share::explore::explore;
use rampool_sim::share::{Op, Script, Setup};

use crate::{barrier, keep_barrier, lock, read, several, share, single, unlock, write};

/// More than any of these worlds has.
const MOST_STATES: u64 = 400_000;

/// Explores a world of two pages under `protocol`, all ways of locking.
fn holds_in_every_order(name: &str, protocol: ProtocolKind, ranks: &[Vec<Op>]) {
    threads_hold_in_every_order(name, protocol, &single(ranks.to_vec()));
}

/// The same with several threads a rank.
fn threads_hold_in_every_order(name: &str, protocol: ProtocolKind, scripts: &[Vec<Script>]) {
    for path in [LockPath::Forward, LockPath::Central, LockPath::Either] {
        for home in [Rank(0), Rank(1)] {
            let mut setup = Setup::new(0, protocol, 2, 8, scripts.to_vec());
            setup.lock_path = Some(path);
            setup.homes = Homes::At(home);
            let idles = u8::from(matches!(protocol, ProtocolKind::Aurc | ProtocolKind::Auto));
            match explore(&setup, idles, MOST_STATES) {
                Ok(explored) => {
                    assert!(
                        explored.complete && explored.ends > 0,
                        "{name}, {}: not searched to the end: {explored:?}",
                        protocol.name()
                    )
                }
                Err(failure) => panic!("{name}, {} {path:?} home {home}: {failure:?}", protocol.name()),
            }
        }
    }
}

#[test]
fn a_counter_under_a_lock_in_every_order() {
    let add =
        || vec![lock(1), Op::Mutate { at: 0, len: 1, value: 1 }, unlock(1), lock(1), read(0), unlock(1)];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("counter", protocol, &[add(), add()]);
    }
}

#[test]
fn two_writers_of_one_page_and_a_barrier_in_every_order() {
    let one = vec![write(0, 1), barrier(0), read(0), read(1)];
    let two = vec![write(1, 2), barrier(0), read(0), read(1)];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("false sharing", protocol, &[one.clone(), two.clone()]);
    }
}

#[test]
fn a_page_that_becomes_its_writers_in_every_order() {
    let writer = vec![write(0, 1), keep_barrier(0), write(0, 2), keep_barrier(1), write(0, 3), barrier(2)];
    let reader = vec![keep_barrier(0), keep_barrier(1), read(8), barrier(2), read(0)];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("keep read-write", protocol, &[writer.clone(), reader.clone()]);
    }
}

#[test]
fn a_page_that_is_written_unnoticed_and_then_requested_in_every_order() {
    // After the barrier one rank's writes need no notice, until the other asks; each may be the page's home.
    let owner = vec![
        write(0, 1),
        barrier(0),
        write(0, 2),
        lock(1),
        write(1, 3),
        write(8, 4),
        unlock(1),
        write(0, 5),
        barrier(1),
        read(2),
    ];
    let other = vec![barrier(0), lock(1), read(1), write(2, 6), unlock(1), barrier(1), read(0), read(8)];
    for protocol in [ProtocolKind::Lrc, ProtocolKind::Hlrc] {
        holds_in_every_order("unnoticed", protocol, &[owner.clone(), other.clone()]);
        holds_in_every_order("unnoticed", protocol, &[other.clone(), owner.clone()]);
    }
}

#[test]
fn readers_and_a_writer_of_one_lock_in_every_order() {
    let writer = vec![lock(1), write(0, 1), write(8, 1), unlock(1)];
    let reader = vec![share(1), read(0), read(8), unlock(1)];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("readers", protocol, &[writer.clone(), reader.clone()]);
    }
}

#[test]
fn a_signal_meets_its_waiter_in_every_order() {
    let (cond, on) = (CondId(0), LockId(1));
    let waiter = vec![lock(1), Op::Await { cond, lock: on, at: 0, least: 1 }, unlock(1)];
    let sender = vec![lock(1), write(0, 1), Op::Signal { cond, lock: on, all: false }, unlock(1)];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("signal", protocol, &[waiter.clone(), sender.clone()]);
    }
}

#[test]
fn a_try_meets_a_holder_in_every_order() {
    let tries = vec![
        Op::Try { lock: LockId(1), mode: rampool_sharing::LockMode::Exclusive, skip: 2 },
        Op::Mutate { at: 0, len: 1, value: 3 },
        unlock(1),
    ];
    let holder = vec![lock(1), Op::Mutate { at: 0, len: 1, value: 1 }, unlock(1)];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("try", protocol, &[tries.clone(), holder.clone()]);
    }
}

#[test]
fn homes_and_managers_that_move_in_every_order() {
    let moves = vec![
        Op::SetHome { page: rampool_wire::units::PageIndex(0), home: Rank(1) },
        Op::SetLockManager { lock: LockId(1), manager: Rank(0) },
        write(0, 7),
        Op::Barrier { barrier: rampool_sharing::BarrierId(0), kind: BarrierKind::Normal },
        lock(1),
        write(1, 2),
        unlock(1),
    ];
    let other = vec![
        Op::Barrier { barrier: rampool_sharing::BarrierId(0), kind: BarrierKind::Normal },
        lock(1),
        read(1),
        unlock(1),
        read(0),
    ];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("moves", protocol, &[moves.clone(), other.clone()]);
    }
}

#[test]
fn three_ranks_count_up_under_a_lock_in_every_order() {
    let add = vec![lock(1), Op::Mutate { at: 0, len: 1, value: 1 }, unlock(1)];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("three ranks", protocol, &[add.clone(), add.clone(), add.clone()]);
    }
}

#[test]
fn nested_locks_with_bytes_of_one_page_in_every_order() {
    let outer = vec![
        lock(1),
        write(0, 1),
        lock(2),
        Op::Mutate { at: 1, len: 1, value: 1 },
        unlock(2),
        read(0),
        unlock(1),
    ];
    let inner = vec![lock(2), Op::Mutate { at: 1, len: 1, value: 3 }, unlock(2), lock(1), read(0), unlock(1)];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("nested", protocol, &[outer.clone(), inner.clone()]);
    }
}

/// What was written under a lent lock is released by a fence, and is on its way when the lock is asked for.
#[test]
fn a_lent_lock_and_a_release_that_is_under_way_in_every_order() {
    let section = |ops: &[Op]| [&[lock(1)], ops, &[unlock(1), Op::Fence]].concat();
    let lends = [section(&[]), section(&[Op::Mutate { at: 0, len: 1, value: 1 }])].concat();
    let wants = vec![lock(1), Op::Mutate { at: 0, len: 1, value: 3 }, unlock(1)];
    // The home is neither's: what travels there and what the other gets are in no order.
    holds_in_every_order("lent", ProtocolKind::Auto, &[Vec::new(), lends, wants]);
}

#[test]
fn direct_puts_and_sums_during_stores_in_every_order() {
    let directly = |at: usize, value: u32| {
        vec![
            Op::DirectPut { at, len: 1, value: 9 },
            Op::DirectAdd { at: 4, len: 4, value },
            barrier(0),
            read(0),
            read(1),
            Op::Read { at: 4, len: 4 },
        ]
    };
    let stores = vec![
        read(0),
        write(0, 3),
        Op::DirectAdd { at: 4, len: 4, value: 5 },
        barrier(0),
        read(0),
        read(1),
        Op::Read { at: 4, len: 4 },
    ];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("direct", protocol, &[directly(1, 2), stores.clone()]);
        holds_in_every_order("direct", protocol, &[directly(0, 2), directly(1, 3)]);
    }
}

#[test]
fn words_that_are_fetched_directly_and_otherwise_in_every_order() {
    let directly = vec![Op::DirectFetch { at: 0, value: 3, expect: None }];
    let otherwise = vec![Op::Atomic { at: 0, width: 4, op: rampool_sharing::AtomicOp::Add(5) }];
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("words", protocol, &[directly.clone(), otherwise.clone()]);
    }
}

#[test]
fn words_that_are_fetched_and_added_to_directly_in_every_order() {
    let then = |op| vec![op, barrier(0), Op::Read { at: 0, len: 4 }];
    let fetch = then(Op::DirectSum { at: 0, value: 3 });
    let add = then(Op::DirectAdd { at: 0, len: 4, value: 5 });
    // Under ibec a word belongs to its lock, or to direct operations without one.
    for protocol in ProtocolKind::ALL.into_iter().filter(|&protocol| protocol != ProtocolKind::Ibec) {
        holds_in_every_order("sums", protocol, &[fetch.clone(), add.clone()]);
    }
}

#[test]
fn a_word_that_two_ranks_add_to_in_every_order() {
    let add = Op::Atomic { at: 0, width: 4, op: rampool_sharing::AtomicOp::Add(3) };
    for protocol in ProtocolKind::ALL {
        holds_in_every_order("word", protocol, &[vec![add, add], vec![add, write(4, 1)]]);
    }
}

#[test]
fn a_sibling_writes_during_a_critical_section_in_every_order() {
    let section = || vec![lock(1), Op::Mutate { at: 0, len: 1, value: 1 }, unlock(1), barrier(0), read(1)];
    let sibling = vec![write(1, 1), lock(2), write(2, 1), unlock(2), barrier(0), read(0)];
    for protocol in ProtocolKind::ALL {
        threads_hold_in_every_order(
            "sibling",
            protocol,
            &several(vec![vec![section(), sibling.clone()], vec![section()]]),
        );
    }
}
