//! Counts of messages and faults, which are exact in the simulated world.

use rampool_sharing::message::PageCopy;
use rampool_sharing::{
    Action, AtomicOp, BarrierId, BarrierKind, Body, Config, Diff, Engine, Event, Homes, LockPath, Managers,
    Mem, Message, Mode, Protection, ProtocolKind, Rank, RegionConfig, ThreadId, Tuning,
};
use rampool_sim::share::{Op, Report, Setup};
use rampool_wire::units::{Extent, PageIndex};

use crate::{barrier, lock, read, run, several, unlock};

fn quiet(protocol: ProtocolKind, ranks: Vec<Vec<Vec<Op>>>) -> Setup {
    let mut setup = Setup::new(1, protocol, 8, 64, several(ranks));
    setup.slow_phases = false;
    setup.siblings = 0;
    setup.idle = 0;
    setup
}

fn report(setup: Setup) -> Report {
    run(setup).expect("a legal program")
}

/// Each rank takes each of `locks` locks `times` times and counts up a byte that the lock guards.
fn counters(ranks: usize, locks: u64, times: usize) -> Vec<Vec<Vec<Op>>> {
    let section = |number: u64| {
        let at = usize::try_from(number).expect("few locks") * 8;
        [lock(number), Op::Add { at, len: 4, value: 1 }, unlock(number)]
    };
    let rank = |first: u64| {
        let round = (0..locks).flat_map(|index| section((first + index) % locks)).collect::<Vec<Op>>();
        round.iter().copied().cycle().take(round.len() * times).collect::<Vec<Op>>()
    };
    (0..ranks).map(|first| vec![rank(first as u64)]).collect()
}

#[test]
fn the_last_holder_takes_a_forwarded_lock_again_without_a_message() {
    let again = [lock(1), unlock(1)].repeat(50);
    let mut setup = quiet(ProtocolKind::Hlrc, vec![vec![vec![]], vec![vec![]], vec![again]]);
    setup.lock_path = Some(LockPath::Forward);
    setup.managers = Managers::At(Rank(0));
    let report = report(setup);
    assert_eq!(report.total_messages(), 2, "one request, one grant: {:?}", report.messages);
    assert_eq!(report.stats.local_acquires, 49);
}

#[test]
fn a_manager_that_chooses_gives_a_token_to_a_rank_alone_and_takes_it_back_for_the_next() {
    let sections = |times: usize| [lock(1), unlock(1)].repeat(times);
    let messages = |path, scripts: Vec<Vec<Op>>| {
        let mut setup = quiet(ProtocolKind::Ibec, scripts.into_iter().map(|script| vec![script]).collect());
        setup.lock_path = Some(path);
        setup.managers = Managers::At(Rank(0));
        let report = report(setup);
        (report.total_messages(), report.stats.local_acquires)
    };
    let alone = |path| messages(path, vec![vec![], sections(50)]);
    assert_eq!(
        alone(LockPath::Either),
        (6, 48),
        "request, grant, release, its acknowledgement, request, token"
    );
    assert_eq!(alone(LockPath::Central).0, 200, "four each");
    // The third rank asks while the second has the token: it gets the lock, and nothing else changes.
    let both = messages(LockPath::Either, vec![vec![], sections(50), sections(1)]);
    assert!(both.0 < 20, "{both:?}");
}

#[test]
fn a_lock_that_gives_updates_to_its_manager_sends_less_than_one_that_passes_all_of_them_on() {
    let bytes = |path| {
        let mut setup = quiet(ProtocolKind::Ibec, counters(2, 1, 200));
        setup.lock_path = Some(path);
        report(setup).total_bytes()
    };
    let (new, old) = (bytes(LockPath::Central), bytes(LockPath::Forward));
    assert!(new * 2 < old, "{new} bytes against {old}");
}

#[test]
fn entry_consistency_sends_fewer_messages_and_bytes_than_lazy_release_on_eight_locks() {
    let of = |protocol| report(quiet(protocol, counters(8, 8, 20)));
    let (entry, lazy) = (of(ProtocolKind::Ibec), of(ProtocolKind::Lrc));
    assert!(
        entry.total_messages() < lazy.total_messages(),
        "{} {}",
        entry.total_messages(),
        lazy.total_messages()
    );
    assert!(entry.total_bytes() < lazy.total_bytes(), "{} {}", entry.total_bytes(), lazy.total_bytes());
}

/// Each rank writes a strip of two pages in every iteration and reads a byte of its neighbour's.
fn strips(kind: BarrierKind) -> Vec<Vec<Vec<Op>>> {
    let rank = |own: usize| {
        let neighbour = (own + 1) % 4;
        let round = |number: u32| {
            [
                Op::Write { at: own * 128, len: 128, value: u8::try_from(number).expect("few rounds") },
                Op::Barrier { barrier: BarrierId(2 * number), kind },
                Op::Read { at: neighbour * 128, len: 1 },
                Op::Barrier { barrier: BarrierId(2 * number + 1), kind },
            ]
        };
        vec![(0..10).flat_map(round).collect::<Vec<Op>>()]
    };
    (0..4).map(rank).collect()
}

#[test]
fn pages_of_one_writer_cost_no_fault_over_barriers_that_keep_them() {
    for protocol in [ProtocolKind::Hlrc, ProtocolKind::Ibec] {
        let faults = |kind| {
            let mut setup = quiet(protocol, strips(kind));
            // Hot pages cost no fault either; here both barriers of the paper are compared without them.
            setup.tuning.hot_after = 255;
            let report = report(setup);
            (report.stats.write_faults, report.stats.twins, report.total_bytes())
        };
        let (normal, kept) = (faults(BarrierKind::Normal), faults(BarrierKind::KeepReadWrite));
        assert!(kept.0 < normal.0, "{}: write faults {kept:?} against {normal:?}", protocol.name());
        assert!(kept.1 * 4 < normal.1, "{}: twins {kept:?} against {normal:?}", protocol.name());
        assert!(kept.2 < normal.2, "{}: bytes {kept:?} against {normal:?}", protocol.name());
    }
}

#[test]
fn pages_of_one_writer_that_others_read_cost_it_no_fault_once_they_are_hot() {
    for protocol in [ProtocolKind::Hlrc, ProtocolKind::Ibec] {
        let faults = |hot_after| {
            let mut setup = quiet(protocol, strips(BarrierKind::KeepReadWrite));
            setup.tuning.hot_after = hot_after;
            report(setup).stats.write_faults
        };
        // Each of 4 ranks writes 2 pages for the first time; one of them is read by another in each of 10
        // rounds.
        let (hot, never) = (faults(3), faults(255));
        assert!(hot + 4 * 5 <= never, "{}: {hot} write faults against {never}", protocol.name());
    }
}

#[test]
fn data_that_is_only_read_is_fetched_once() {
    let reader = || vec![[lock(1), Op::Read { at: 0, len: 64 }, unlock(1)].repeat(10)];
    for protocol in ProtocolKind::ALL {
        let report = report(quiet(protocol, vec![vec![vec![]], reader(), reader()]));
        assert!(
            report.stats.pages_fetched <= 3,
            "{}: {} fetches",
            protocol.name(),
            report.stats.pages_fetched
        );
    }
}

#[test]
fn a_barrier_of_many_ranks_sends_each_of_them_two_messages() {
    let barrier = |number: u32| Op::Barrier { barrier: BarrierId(number), kind: BarrierKind::Normal };
    let ranks = vec![vec![vec![barrier(0), barrier(1), barrier(2)]]; 40];
    let mut setup = quiet(ProtocolKind::Hlrc, ranks);
    setup.tuning.flat_barrier = 16;
    assert_eq!(report(setup).total_messages(), 3 * 2 * 39);
}

#[test]
fn streaming_leaves_less_for_the_release() {
    let writer = |at: usize| {
        let round = [
            lock(1),
            Op::Add { at, len: 1, value: 1 },
            unlock(1),
            Op::Write { at: at + 1, len: 40, value: 3 },
        ];
        let again = [Op::Write { at: at + 1, len: 40, value: 4 }, Op::Look { at, len: 60 }];
        vec![[round.to_vec(), again.to_vec()].concat().repeat(6)]
    };
    let mut setup = quiet(ProtocolKind::Aurc, vec![vec![vec![]], writer(64 * 2)]);
    setup.idle = 60;
    let report = report(setup);
    assert!(report.stats.streamed_bytes > 0, "{:?}", report.stats);
}

/// One page, here or at a memory server, and how often it was read.
struct Budgeted {
    bytes: [u8; 32],
    near: bool,
    looks: u32,
}

impl Mem for Budgeted {
    fn protect(&mut self, _: &[Extent], _: Protection) {}
    fn reassert(&mut self, _: PageIndex) {}
    fn is_near(&self, _: PageIndex) -> bool {
        self.near
    }
    fn snapshot(&mut self, _: PageIndex, into: &mut [u8]) {
        self.looks += 1;
        into.copy_from_slice(&self.bytes);
    }
    fn store(&mut self, _: PageIndex, diff: &Diff) {
        diff.apply(&mut self.bytes);
    }
    fn install(&mut self, _: PageIndex, bytes: &[u8], _: Protection) {
        self.bytes.copy_from_slice(bytes);
    }
    fn discard(&mut self, _: PageIndex) {}
    fn clear(&mut self, _: Extent) {}
}

/// With more written pages than fit a budget, each idle moment brought all of them back, one after the other.
#[test]
fn a_page_that_is_at_a_memory_server_is_not_brought_back_to_be_streamed() {
    let page = PageIndex(0);
    let region = RegionConfig {
        pages: Extent::new(page, 1),
        page_bytes: 32,
        protocol: ProtocolKind::Aurc,
        homes: Homes::Cyclic,
    };
    let tuning = Tuning::default();
    let config = Config {
        rank: Rank(1),
        ranks: 2,
        regions: vec![region],
        managers: Managers::Cyclic,
        lock_path: None,
        tuning,
    };
    let mut engine = Engine::new(&config).unwrap();
    let mut mem = Budgeted { bytes: [0; 32], near: true, looks: 0 };
    let mut out = Vec::new();
    engine.handle(Event::Fault { thread: ThreadId(0), page, write: true }, &mut mem, &mut out);
    let copy =
        PageCopy { page, version: 0, applied: Vec::new(), mode: Mode::Invalidate, bytes: vec![0; 32].into() };
    let message = Message { epoch: 0, body: Body::Page { copy } };
    engine.handle(Event::Receive { from: Rank(0), message: &message }, &mut mem, &mut out);
    assert!(out.iter().any(|action| matches!(action, Action::Retry { .. })), "the thread writes: {out:?}");
    mem.bytes[3] = 9;
    let mut idle = |near: bool| {
        (mem.near, mem.looks) = (near, 0);
        let mut out = Vec::new();
        engine.handle(Event::Idle { budget_bytes: 1 << 20 }, &mut mem, &mut out);
        let updates =
            out.iter().filter(|action| matches!(action, Action::Send { message, .. } if matches!(message.body, Body::Update { .. })));
        (mem.looks, updates.count())
    };
    assert_eq!(idle(false), (0, 0));
    assert_eq!(idle(true), (1, 1));
}

/// How often messages of these kinds were sent.
fn sent(report: &Report, kinds: &[&str]) -> u64 {
    kinds.iter().filter_map(|kind| report.messages.get(kind)).map(|&(messages, _)| messages).sum()
}

const REQUESTS: &[&str] = &["GetPage", "GetPages"];

#[test]
fn auto_sends_readers_what_they_would_ask_for() {
    let of = |protocol| report(quiet(protocol, strips(BarrierKind::KeepReadWrite)));
    let (auto, hlrc) = (of(ProtocolKind::Auto), of(ProtocolKind::Hlrc));
    assert!(sent(&auto, &["Push"]) > 0 && sent(&hlrc, &["Push"]) == 0, "{:?}", auto.messages);
    assert!(
        sent(&auto, REQUESTS) * 3 < sent(&hlrc, REQUESTS) * 2,
        "{:?} against {:?}",
        auto.messages,
        hlrc.messages
    );
}

#[test]
fn auto_gives_pages_along_with_the_lock_that_guards_them() {
    let of = |protocol| {
        // Long enough outside for the other to get its turn.
        let turn = [lock(1), Op::Add { at: 0, len: 4, value: 1 }, unlock(1), Op::Compute { ticks: 2000 }];
        let mut setup = quiet(protocol, vec![vec![turn.repeat(40)], vec![turn.repeat(40)]]);
        setup.lock_path = Some(LockPath::Forward);
        setup.tuning.hot_after = 255;
        report(setup)
    };
    let (auto, hlrc) = (of(ProtocolKind::Auto), of(ProtocolKind::Hlrc));
    assert!(sent(&hlrc, REQUESTS) > 20, "{:?}", hlrc.messages);
    assert!(sent(&auto, REQUESTS) < 6, "{:?}", auto.messages);
    assert!(
        auto.stats.write_faults + 30 < hlrc.stats.write_faults,
        "{:?} against {:?}",
        auto.stats,
        hlrc.stats
    );
}

#[test]
fn auto_gives_pages_to_their_single_writers_at_any_barrier() {
    let of = |protocol| report(quiet(protocol, strips(BarrierKind::Normal))).stats;
    let (auto, hlrc) = (of(ProtocolKind::Auto), of(ProtocolKind::Hlrc));
    assert!(auto.homes_gained > 0 && hlrc.homes_gained == 0);
    assert!(auto.diffs * 2 < hlrc.diffs, "{auto:?} against {hlrc:?}");
}

#[test]
fn auto_opens_pages_that_are_written_in_order() {
    const PAGES: u32 = 32;
    // Ranks in turns read and write every page, so that each is shared.
    let writer = |own: u32, down: bool| {
        let round = |number: u32| {
            let value = u8::try_from(number + 1).expect("few rounds");
            let touch = |page: usize| [read(page * 64), Op::Write { at: page * 64, len: 16, value }];
            let pages = if number % 2 == own { PAGES as usize } else { 0 };
            let mut ops: Vec<Op> = (0..pages).map(|page| read(page * 64)).collect();
            ops.extend((0..pages).map(|page| if down { pages - 1 - page } else { page }).flat_map(touch));
            ops.push(barrier(number));
            ops
        };
        vec![(0..6).flat_map(round).collect::<Vec<Op>>()]
    };
    for down in [false, true] {
        let of = |protocol| {
            let mut setup =
                Setup::new(1, protocol, PAGES, 64, several(vec![writer(0, down), writer(1, down)]));
            (setup.slow_phases, setup.siblings, setup.idle) = (false, 0, 0);
            report(setup).stats
        };
        let (auto, hlrc) = (of(ProtocolKind::Auto), of(ProtocolKind::Hlrc));
        assert!(auto.write_faults * 2 < hlrc.write_faults, "{auto:?} against {hlrc:?}, down: {down}");
    }
}

#[test]
fn auto_brings_the_rest_of_a_block_of_which_many_pages_are_used() {
    const PAGES: u32 = 64;
    // Both ranks write into every page, in no order; with or without a lock before.
    let writer = |own: usize, locks: bool| {
        let round = |number: u32| {
            let value = u8::try_from(number + 1).expect("few rounds");
            let mut ops = if locks { vec![lock(1), unlock(1)] } else { Vec::new() };
            let pages = (0..PAGES as usize).map(|page| page * 27 % PAGES as usize);
            ops.extend(pages.map(|page| Op::Write { at: page * 64 + own * 32, len: 16, value }));
            ops.push(barrier(number));
            ops
        };
        vec![(0..4).flat_map(round).collect::<Vec<Op>>()]
    };
    let faults = |protocol, locks| {
        let ranks = vec![writer(0, locks), writer(1, locks)];
        let mut setup = Setup::new(1, protocol, PAGES, 64, several(ranks));
        (setup.slow_phases, setup.siblings, setup.idle) = (false, 0, 0);
        let stats = report(setup).stats;
        stats.read_faults + stats.write_faults
    };
    let (auto, hlrc) = (faults(ProtocolKind::Auto, false), faults(ProtocolKind::Hlrc, false));
    assert!(auto * 2 < hlrc, "{auto} against {hlrc}");
    assert!(faults(ProtocolKind::Auto, true) > auto * 2, "not where there are locks");
}

#[test]
fn auto_streams_pages_that_change_a_lot() {
    // Two writers at once and then in turns, so that neither becomes the page's owner; the home is a third.
    let writer = |own: u32| {
        let round = |number: u32| {
            let value = u8::try_from(number + 1).expect("few rounds");
            let write = match number {
                0 => Op::Write { at: 32 * own as usize, len: 32, value },
                _ => Op::Write { at: 0, len: 64, value },
            };
            let mut ops = if number == 0 || number % 2 == own {
                vec![write, Op::Compute { ticks: 200 }]
            } else {
                Vec::new()
            };
            ops.push(barrier(number));
            ops
        };
        vec![(0..12).flat_map(round).collect::<Vec<Op>>()]
    };
    let idle = vec![(0..12).map(barrier).collect::<Vec<Op>>()];
    let of = |protocol| {
        let mut setup = quiet(protocol, vec![idle.clone(), writer(0), writer(1)]);
        setup.idle = 30;
        report(setup).stats
    };
    assert!(of(ProtocolKind::Auto).streamed_bytes > 0);
    assert_eq!(of(ProtocolKind::Hlrc).streamed_bytes, 0);
}

#[test]
fn sc_keeps_no_page_from_others_behind_a_barrier() {
    // One reads right before each barrier the bytes that the other writes right behind it.
    let reader = (0..20)
        .flat_map(|round| [Op::Compute { ticks: 1000 }, Op::Read { at: 0, len: 8 }, barrier(round)])
        .collect::<Vec<Op>>();
    let writer = (0..20)
        .flat_map(|round| [barrier(round), Op::Write { at: 8, len: 8, value: 7 }])
        .collect::<Vec<Op>>();
    let ticks = |hold_us| {
        let mut setup = quiet(ProtocolKind::Sc, vec![vec![reader.clone()], vec![writer.clone()]]);
        setup.tuning.hold_us = hold_us;
        let report = report(setup);
        assert!(report.stats.invalidations >= 19, "{:?}", report.stats);
        report.ticks
    };
    let (held, not_held) = (ticks(20_000), ticks(0));
    assert!(
        held < not_held + 20_000,
        "20 rounds take {held} ticks, and {not_held} where pages are not held at all"
    );
}

/// Two ranks add to one word, `adds` times in each of so many rounds, with pauses in between.
fn adding(adds: usize, rounds: usize, ticks: u64, keep_us: u32) -> Report {
    let add = Op::Atomic { at: 0, width: 4, op: AtomicOp::Add(1) };
    let round = || std::iter::repeat_n([add, Op::Compute { ticks: 2 }], adds).flatten();
    let ops: Vec<Op> = (0..rounds).flat_map(|_| round().chain([Op::Compute { ticks }])).collect();
    let mut setup = quiet(ProtocolKind::Auto, vec![vec![ops.clone()], vec![ops]]);
    setup.tuning.keep_us = keep_us;
    report(setup)
}

#[test]
fn a_word_that_is_changed_all_the_time_stays_a_while() {
    let grants = |keep_us| adding(400, 1, 0, keep_us).messages["LockGrant"].0;
    let (kept, not_kept) = (grants(200), grants(0));
    assert!(kept * 4 <= not_kept, "{kept} grants, and {not_kept} where nothing is kept");
}

#[test]
fn a_word_that_was_kept_in_vain_is_mostly_given_at_once() {
    let ticks = |keep_us| adding(8, 40, 3000, keep_us).ticks;
    let (kept, not_kept) = (ticks(20_000), ticks(0));
    // Each time twice as many requests are let through.
    assert!(kept <= not_kept + 2 * 6 * 20_000, "{kept} ticks, and {not_kept} where nothing is kept");
}

#[test]
fn auto_leaves_a_page_at_a_home_that_wrote_it_first() {
    // Rank 0, its home, writes before rank 1 has it, so that no rank is told of that.
    let writes = |at: usize, ticks| {
        let mut ops = vec![barrier(0)];
        ops.extend((1..6).flat_map(|round: u8| {
            [Op::Compute { ticks }, Op::Write { at, len: 8, value: round }, barrier(u32::from(round))]
        }));
        vec![ops]
    };
    let stats = report(quiet(ProtocolKind::Auto, vec![writes(0, 1), writes(8, 2000)])).stats;
    assert_eq!(stats.homes_gained, 0);
}

#[test]
fn a_former_home_can_forget_its_copy_after_the_next_barrier() {
    for protocol in [ProtocolKind::Hlrc, ProtocolKind::Aurc, ProtocolKind::Auto] {
        let rounds = 1..20;
        // One reads bytes that the other does not write, and earlier than the other writes, so that the page
        // changes at every barrier.
        let read = Op::Read { at: 0, len: 8 };
        let mut old_home = vec![read, barrier(0)];
        old_home.extend(rounds.clone().flat_map(|round| [read, barrier(u32::from(round))]));
        let mut new_home = vec![Op::SetHome { page: PageIndex(0), home: Rank(1) }, barrier(0)];
        new_home.extend(rounds.flat_map(|round| {
            [
                Op::Compute { ticks: 2000 },
                Op::Write { at: 8, len: 8, value: round },
                barrier(u32::from(round)),
            ]
        }));
        let mut setup = quiet(protocol, vec![vec![old_home], vec![new_home]]);
        setup.evict = 1000;
        let stats = report(setup).stats;
        assert_eq!(stats.homes_gained, 1, "{}", protocol.name());
        assert!(stats.evictions > 0, "{}: the only copy that there is was never forgotten", protocol.name());
    }
}

#[test]
fn auto_sends_what_was_written_under_a_lock_only_when_somebody_asks_or_at_the_barrier() {
    let sections = (0..20).flat_map(|number| {
        [
            lock(number),
            Op::Add { at: 3 * usize::try_from(number).expect("few"), len: 3, value: 1 },
            unlock(number),
        ]
    });
    let writer = vec![sections.chain([barrier(0)]).collect::<Vec<Op>>()];
    let reader = |asked: u64| {
        // Long enough for the writer to finish.
        let section =
            [lock(asked), Op::Read { at: 3 * usize::try_from(asked).expect("few"), len: 3 }, unlock(asked)];
        vec![
            [
                vec![Op::Compute { ticks: 20_000 }],
                section.to_vec(),
                vec![barrier(0), Op::Read { at: 0, len: 60 }],
            ]
            .concat(),
        ]
    };
    let of = |protocol, asked| {
        let mut setup = quiet(protocol, vec![reader(asked), writer.clone()]);
        setup.lock_path = Some(LockPath::Forward);
        setup.tuning.hot_after = 255;
        let report = report(setup);
        sent(&report, &["Flush"])
    };
    for asked in [0, 7, 19] {
        assert_eq!(
            of(ProtocolKind::Auto, asked),
            1,
            "all sections in one message, when lock {asked} is asked for"
        );
        assert_eq!(of(ProtocolKind::Hlrc, asked), 20);
    }
}

#[test]
fn every_other_page_comes_ahead_of_its_use() {
    for stride in [1, 2, 5] {
        let reads = (0..40).map(|turn| Op::Read { at: turn * stride * 64, len: 1 }).collect::<Vec<Op>>();
        for protocol in [ProtocolKind::Hlrc, ProtocolKind::Aurc, ProtocolKind::Auto] {
            let mut setup = quiet(protocol, vec![vec![vec![]], vec![reads.clone()]]);
            setup.regions = vec![(200, protocol)];
            setup.homes = Homes::At(Rank(0));
            let report = report(setup);
            assert!(
                sent(&report, &["GetPage"]) < 10,
                "{} by {stride}: {:?}",
                protocol.name(),
                report.messages
            );
            // At most what the last request asked for beyond the end.
            assert!(
                report.stats.pages_fetched < 40 + 32,
                "{} by {stride}: {}",
                protocol.name(),
                report.stats.pages_fetched
            );
        }
    }
}
