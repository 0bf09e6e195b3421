//! Every rule left out must be noticed: by a wrong value, a broken invariant, or a run that cannot end.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rampool_sharing::{Homes, ProtocolKind, Rank, Rule};
use rampool_sim::share::generate::{Shape, generate};
use rampool_sim::share::{Op, Setup};
use rampool_wire::units::PageIndex;

use crate::litmus::outside;
use crate::{barrier, effort, lock, read, run, several, unlock, write};

/// Leaves `rule` out in generated programs until one fails that succeeds with the rule. Most are caught
/// within a few dozen runs.
fn is_caught(protocol: ProtocolKind, rule: Rule, runs: u64, shape: Shape) {
    let makes_room = matches!(rule, Rule::EvictClean | Rule::EvictTold | Rule::EvictLent);
    let outcome = |seed: u64, omit: Option<Rule>| {
        let mut setup = generate(seed, protocol, &shape);
        setup.evict = if makes_room { 150 } else { 0 };
        setup.omit = omit;
        setup.most_events = 400_000;
        catch_unwind(AssertUnwindSafe(|| run(setup)))
    };
    for seed in 0..runs * effort() {
        if !matches!(outcome(seed, Some(rule)), Ok(Ok(_))) {
            let kept = outcome(seed, None);
            assert!(
                matches!(kept, Ok(Ok(_))),
                "{} seed {seed} fails with {rule:?}, too: {kept:?}",
                protocol.name()
            );
            return;
        }
    }
    panic!("{} without {rule:?}: nothing noticed in {runs} runs", protocol.name());
}

macro_rules! caught {
    ($($name:ident: $protocol:ident, $rule:ident, $runs:literal;)*) => {
        $(
            #[test]
            fn $name() {
                let protocol = ProtocolKind::$protocol;
                is_caught(protocol, Rule::$rule, $runs, Shape::crowded(protocol));
            }
        )*

        const CAUGHT: &[Rule] = &[$(Rule::$rule),*];
    };
}

caught! {
    sc_without_the_directorys_word_is_caught: Sc, Directory, 200;
    sc_without_waiting_for_acknowledgements_is_caught: Sc, Acks, 200;
    hlrc_with_a_second_look_at_live_memory_is_caught: Hlrc, Snapshot, 1500;
    aurc_with_a_second_look_at_live_memory_is_caught: Aurc, Snapshot, 400;
    hlrc_with_a_twin_made_too_late_is_caught: Hlrc, TwinFirst, 100;
    lrc_with_a_twin_made_too_late_is_caught: Lrc, TwinFirst, 100;
    ibec_with_a_twin_made_too_late_is_caught: Ibec, TwinFirst, 200;
    hlrc_that_drops_a_dirty_twin_is_caught: Hlrc, ThreeWay, 100;
    hlrc_that_waits_only_for_its_own_flushes_is_caught: Hlrc, Generation, 600;
    hlrc_that_takes_a_page_older_than_its_own_diff_is_caught: Hlrc, Restart, 1500;
    hlrc_that_takes_a_page_older_than_a_notice_is_caught: Hlrc, Need, 3000;
    hlrc_that_believes_whatever_comes_ahead_is_caught: Hlrc, Ahead, 1500;
    aurc_that_believes_whatever_comes_ahead_is_caught: Aurc, Ahead, 1500;
    auto_that_takes_a_page_without_its_own_diff_is_caught: Auto, Early, 3000;
    auto_that_believes_what_a_former_home_told_is_caught: Auto, Moved, 600;
    auto_that_passes_a_lock_on_before_what_was_written_under_it_is_caught: Auto, Owed, 600;
    auto_that_passes_a_lent_lock_on_before_what_was_written_under_it_is_caught: Auto, Lent, 600;
    hlrc_whose_home_forgets_what_it_handed_out_is_caught: Hlrc, Handed, 1500;
    lrc_that_hands_out_open_intervals_is_caught: Lrc, Cut, 200;
    lrc_that_orders_diffs_by_their_last_interval_is_caught: Lrc, First, 3000;
    lrc_that_lets_a_diff_span_a_copy_is_caught: Lrc, Finalise, 1500;
    lrc_that_lets_a_diff_span_what_it_learns_is_caught: Lrc, Split, 6000;
    lrc_that_writes_unnoticed_to_what_others_have_is_caught: Lrc, Alone, 200;
    hlrc_that_takes_messages_of_the_next_epoch_is_caught: Hlrc, Park, 600;
    ibec_that_takes_messages_of_the_next_epoch_is_caught: Ibec, Park, 600;
    ibec_that_arrives_before_its_releases_is_caught: Ibec, ReleaseFence, 1000;
    ibec_without_stamps_is_caught: Ibec, Stamps, 300;
    ibec_without_carrying_is_caught: Ibec, Carry, 300;
    ibec_that_leaves_sibling_twins_alone_is_caught: Ibec, SiblingTwin, 600;
    ibec_that_leaves_the_outer_twin_alone_is_caught: Ibec, OuterTwin, 300;
    ibec_that_takes_an_import_for_a_write_is_caught: Ibec, ImportTwin, 300;
    ibec_that_lets_logs_overwrite_outer_changes_is_caught: Ibec, OuterLast, 300;
    hlrc_whose_new_home_answers_too_early_is_caught: Hlrc, HomePull, 600;
    lrc_whose_new_home_answers_too_early_is_caught: Lrc, HomePull, 1500;
    hlrc_that_forgets_what_it_wrote_is_caught: Hlrc, EvictClean, 100;
    ibec_that_forgets_what_it_wrote_is_caught: Ibec, EvictClean, 100;
    sc_that_forgets_a_copy_in_secret_is_caught: Sc, EvictTold, 200;
    hlrc_whose_old_home_forgets_the_page_too_early_is_caught: Hlrc, EvictLent, 600;
    ibec_whose_old_home_forgets_the_page_too_early_is_caught: Ibec, EvictLent, 600;
}

macro_rules! caught_with_direct_operations {
    ($($name:ident: $protocol:ident, $rule:ident, $runs:literal;)*) => {
        $(
            #[test]
            fn $name() {
                let shape = Shape { direct: 50, ..Shape::crowded(ProtocolKind::$protocol) };
                is_caught(ProtocolKind::$protocol, Rule::$rule, $runs, shape);
            }
        )*

        const CAUGHT_DIRECTLY: &[Rule] = &[$(Rule::$rule),*];
    };
}

caught_with_direct_operations! {
    hlrc_that_goes_to_the_home_before_what_it_stored_is_caught: Hlrc, DirectRelease, 200;
    hlrc_that_tells_nobody_of_a_direct_put_is_caught: Hlrc, DirectTold, 200;
    auto_that_tells_nobody_of_a_direct_put_is_caught: Auto, DirectTold, 200;
    ibec_that_tells_nobody_of_a_direct_put_is_caught: Ibec, DirectTold, 200;
    hlrc_that_keeps_its_own_copy_after_a_direct_put_is_caught: Hlrc, DirectOwn, 200;
    aurc_that_keeps_its_own_copy_after_a_direct_put_is_caught: Aurc, DirectOwn, 200;
}

/// Leaves `rule` out in a program made to need it, until a run fails. With the rule, none does.
fn is_needed(protocol: ProtocolKind, rule: Rule, program: &[Vec<Vec<Op>>], runs: u64) {
    let outcome = |seed: u64, omit: Option<Rule>| {
        let mut setup = Setup::new(seed, protocol, 4, 16, several(program.to_vec()));
        setup.homes = Homes::At(Rank(0));
        setup.omit = omit;
        catch_unwind(AssertUnwindSafe(|| run(setup)))
    };
    for seed in 0..runs {
        let kept = outcome(seed, None);
        assert!(matches!(kept, Ok(Ok(_))), "{} seed {seed}: {kept:?}", protocol.name());
    }
    let noticed = (0..runs * effort()).any(|seed| !matches!(outcome(seed, Some(rule)), Ok(Ok(_))));
    assert!(noticed, "{} without {rule:?}: nothing noticed in {runs} runs", protocol.name());
}

/// Writes a byte and, a moment later, puts the old value back.
fn there_and_back(at: usize) -> [Op; 3] {
    [write(at, 5), Op::Compute { ticks: 60 }, write(at, 0)]
}

#[test]
fn hlrc_whose_old_home_hands_out_what_is_not_released_is_caught() {
    let rank = |own: usize| {
        let epoch = |number: u32| {
            let home = Rank(u16::try_from(number % 3).unwrap());
            // The writes of all ranks before the move leave the new home without a copy: it has to ask.
            let mut ops = vec![
                Op::SetHome { page: PageIndex(0), home },
                Op::Add { at: own + 4, len: 1, value: 1 },
                barrier(2 * number),
            ];
            ops.extend(there_and_back(own));
            ops.extend([barrier(2 * number + 1), read(0), read(1), read(2)]);
            ops
        };
        vec![(0..6).flat_map(epoch).collect::<Vec<Op>>()]
    };
    is_needed(ProtocolKind::Hlrc, Rule::Released, &[rank(0), rank(1), rank(2)], 60);
}

/// A page is hot at its home: it stays writable when it is handed out. One reader gets it in its first and
/// last state, another in between, and all have it when another byte changes.
fn hot_at_home() -> [Vec<Vec<Op>>; 4] {
    let home = |number: u32| {
        let mut ops =
            vec![Op::Compute { ticks: 100 }, Op::Add { at: 1, len: 1, value: 1 }, barrier(2 * number)];
        ops.extend(there_and_back(0));
        ops.extend([barrier(2 * number + 1), read(0)]);
        ops
    };
    let reader = |rank: u64| {
        let epoch = move |number: u32| {
            let later = Op::Compute { ticks: 1 + 40 * (rank + u64::from(number)) % 160 };
            [barrier(2 * number), later, read(8), read(1), barrier(2 * number + 1), read(0)]
        };
        vec![(0..12).flat_map(epoch).collect::<Vec<Op>>()]
    };
    [vec![(0..12).flat_map(home).collect::<Vec<Op>>()], reader(1), reader(2), reader(3)]
}

#[test]
fn hlrc_whose_home_hands_out_two_copies_that_differ_is_caught() {
    is_needed(ProtocolKind::Hlrc, Rule::HandedTwice, &hot_at_home(), 60);
}

#[test]
fn ibec_whose_home_hands_out_two_copies_that_differ_is_caught() {
    is_needed(ProtocolKind::Ibec, Rule::HandedTwice, &hot_at_home(), 60);
}

#[test]
fn ibec_whose_home_forgets_what_it_handed_out_is_caught() {
    is_needed(ProtocolKind::Ibec, Rule::Handed, &hot_at_home(), 60);
}

#[test]
fn ibec_whose_twins_keep_what_was_only_there_for_a_moment_is_caught() {
    let (x, y) = (0, 1);
    let moment = Op::Compute { ticks: 150 };
    // In the end x is unchanged, so no byte of it may travel with the lock that the sibling holds.
    let back = [lock(1), write(x, 5), moment, write(x, 0), unlock(1)].repeat(4);
    let sibling = [lock(2), Op::Add { at: y, len: 1, value: 1 }, moment, moment, unlock(2)].repeat(3);
    let later = Op::Compute { ticks: 1200 };
    let other =
        [later, lock(1), write(x, 9), unlock(1), lock(2), read(y), unlock(2), lock(1), read(x), unlock(1)]
            .to_vec();
    is_needed(ProtocolKind::Ibec, Rule::Transient, &[vec![back, sibling], vec![other]], 300);
}

/// Rank 0 prepares each page. `use_it` says what each rank does with it in the next epoch; all read it in the
/// one after that.
fn prepared(use_it: impl Fn(usize, usize) -> Vec<Op>) -> Vec<Vec<Vec<Op>>> {
    let rank = |rank: usize| {
        let epoch = |page: usize| {
            let number = 3 * u32::try_from(page).unwrap();
            let mut ops =
                if rank == 0 { vec![Op::Write { at: 16 * page, len: 16, value: 1 }] } else { Vec::new() };
            ops.push(barrier(number));
            ops.extend(use_it(rank, 16 * page));
            ops.extend([barrier(number + 1), Op::Read { at: 16 * page, len: 16 }, barrier(number + 2)]);
            ops
        };
        vec![(0..4).flat_map(epoch).collect::<Vec<Op>>()]
    };
    (0..3).map(rank).collect()
}

#[test]
fn auto_that_keeps_what_was_written_under_a_lock_is_caught() {
    let program = prepared(|rank, at| {
        let later = Op::Compute { ticks: 400 * rank as u64 };
        vec![later, lock(1), Op::Add { at, len: 16, value: 1 }, unlock(1)]
    });
    is_needed(ProtocolKind::Auto, Rule::Unsent, &program, 60);
}

#[test]
fn auto_that_keeps_what_others_wrote_too_is_caught() {
    let program = prepared(|rank, at| match rank {
        0 => vec![Op::Compute { ticks: 400 }, write(at + 7, 9)],
        1 => vec![Op::Write { at, len: 7, value: 5 }, Op::Write { at: at + 8, len: 8, value: 5 }],
        _ => Vec::new(),
    });
    is_needed(ProtocolKind::Auto, Rule::Disputed, &program, 60);
}

#[test]
fn auto_that_forgets_what_a_thread_outside_of_the_barrier_wrote_is_caught() {
    let noticed = (0..60).any(|seed| {
        let mut setup = outside(seed, ProtocolKind::Auto);
        setup.omit = Some(Rule::Outside);
        !matches!(catch_unwind(AssertUnwindSafe(|| run(setup))), Ok(Ok(_)))
    });
    assert!(noticed, "nothing noticed in 60 runs");
}

#[test]
fn every_rule_is_left_out_by_some_test() {
    let directed =
        [Rule::Released, Rule::Transient, Rule::HandedTwice, Rule::Unsent, Rule::Disputed, Rule::Outside];
    for rule in Rule::ALL {
        assert!(
            CAUGHT.contains(&rule) || CAUGHT_DIRECTLY.contains(&rule) || directed.contains(&rule),
            "nothing leaves {rule:?} out"
        );
    }
}
