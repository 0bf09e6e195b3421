//! Ranks that die, and peers that send invalid messages.

use rampool_sharing::message::{Ask, Info, Moves, Part, Payload};
use rampool_sharing::{
    Action, BarrierId, BarrierKind, Body, Config, Diff, Engine, Event, Homes, LockId, LockMode, Managers,
    Mem, Message, OpError, OpResult, Protection, ProtocolKind, Rank, Reason, RegionConfig, SyncOp, ThreadId,
    Tuning,
};
use rampool_sim::rng::Rng;
use rampool_sim::share::Setup;
use rampool_sim::share::generate::{Shape, generate};
use rampool_sim::share::network::Loss;
use rampool_wire::units::{Extent, PageIndex};

use crate::{barrier, effort, run, several};

#[test]
fn when_a_rank_dies_every_thread_of_the_others_is_told_who() {
    for protocol in ProtocolKind::ALL {
        for seed in 0..12 * effort() {
            let mut setup = generate(seed, protocol, &Shape::small(protocol));
            let dead = Rank(u16::try_from(seed % setup.scripts.len() as u64).unwrap());
            setup.crash = Some((dead, 50 + 37 * seed));
            if seed % 2 == 1 {
                setup.datagrams = Some(Loss { lost: 5, doubled: 5, spoiled: 2, cut: 0, jitter: 200 });
            }
            let report =
                run(setup).unwrap_or_else(|failure| panic!("{} seed {seed}: {failure:?}", protocol.name()));
            for (at, error) in &report.stopped {
                let text = error.to_string();
                assert!(text.contains(&dead.to_string()), "{at:?} is told of {dead}: {text}");
            }
        }
    }
}

#[test]
fn ranks_at_different_barriers_are_told_which() {
    let ranks = several(vec![vec![vec![barrier(1)]], vec![vec![barrier(2)]], vec![vec![barrier(1)]]]);
    let failure = run(Setup::new(1, ProtocolKind::Hlrc, 1, 16, ranks)).unwrap_err();
    let text = format!("{failure:?}");
    assert!(text.contains("BarrierMismatch") && text.contains("barrier 2"), "{text}");
}

/// Memory for an engine that stands alone.
struct Plain(Vec<u8>);

impl Mem for Plain {
    fn protect(&mut self, _: &[Extent], _: Protection) {}
    fn reassert(&mut self, _: PageIndex) {}
    fn snapshot(&mut self, _: PageIndex, into: &mut [u8]) {
        into.copy_from_slice(&self.0[..into.len()]);
    }
    fn store(&mut self, _: PageIndex, diff: &Diff) {
        diff.apply(&mut self.0);
    }
    fn install(&mut self, _: PageIndex, bytes: &[u8], _: Protection) {
        self.0.copy_from_slice(bytes);
    }
    fn clear(&mut self, _: rampool_wire::units::Extent) {}
    fn discard(&mut self, _: PageIndex) {}
}

fn alone(protocol: ProtocolKind) -> Engine {
    let pages = Extent::new(PageIndex(0), 4);
    let region = RegionConfig { pages, page_bytes: 32, protocol, homes: Homes::Cyclic };
    let tuning = Tuning::default();
    let config = Config {
        rank: Rank(1),
        ranks: 3,
        regions: vec![region],
        managers: Managers::Cyclic,
        lock_path: None,
        tuning,
    };
    Engine::new(&config).unwrap()
}

#[test]
fn a_message_about_a_page_that_does_not_exist_ends_the_run_and_names_the_sender() {
    let mut engine = alone(ProtocolKind::Hlrc);
    let mut out = Vec::new();
    let message = Message { epoch: 0, body: Body::GetPage { page: PageIndex(99), by: Rank(0) } };
    engine.handle(Event::Receive { from: Rank(2), message: &message }, &mut Plain(vec![0; 32]), &mut out);
    let fatal = out
        .iter()
        .find_map(|action| if let Action::Fatal(reason) = action { Some(reason.clone()) } else { None });
    assert!(matches!(fatal, Some(Reason::BadMessage { peer: Rank(2), .. })), "{fatal:?}");
    assert!(matches!(engine.failure(), Some(Reason::BadMessage { .. })));
    let aborts = out.iter().filter(
        |action| matches!(action, Action::Send { message, .. } if matches!(message.body, Body::Abort { .. })),
    );
    assert_eq!(aborts.count(), 2, "both peers are told");
}

/// Found by altering the messages of generated programs: a false claim was only checked when the lock was
/// passed on, and was then attributed to this rank.
#[test]
fn a_lie_about_what_is_known_is_found_when_the_lock_is_given_on_and_names_the_liar() {
    let mut engine = alone(ProtocolKind::Hlrc);
    let mut memory = Plain(vec![0; 32]);
    let mut out = Vec::new();
    let (thread, lock) = (ThreadId(0), LockId(1));
    engine.handle(
        Event::Sync { thread, op: SyncOp::Lock { lock, mode: LockMode::Exclusive, wait: true } },
        &mut memory,
        &mut out,
    );
    let infos = vec![(ProtocolKind::Hlrc, Info::Seen { at: 3 })];
    let ask = Ask { by: Rank(2), mode: LockMode::Exclusive, wait: true, epoch: 0, infos };
    let message = Message { epoch: 0, body: Body::LockRequest { lock, ask } };
    engine.handle(Event::Receive { from: Rank(2), message: &message }, &mut memory, &mut out);
    assert_eq!(engine.failure(), None);
    engine.handle(Event::Sync { thread, op: SyncOp::Unlock { lock } }, &mut memory, &mut out);
    assert!(
        matches!(engine.failure(), Some(Reason::BadMessage { peer: Rank(2), .. })),
        "{:?}",
        engine.failure()
    );
}

#[test]
fn a_lock_with_two_successors_ends_the_run_and_names_who_sent_the_second() {
    let (mut engine, mut memory, mut out) = (alone(ProtocolKind::Hlrc), Plain(vec![0; 32]), Vec::new());
    let lock = LockId(1);
    let op = SyncOp::Lock { lock, mode: LockMode::Exclusive, wait: true };
    engine.handle(Event::Sync { thread: ThreadId(0), op }, &mut memory, &mut out);
    let infos = vec![(ProtocolKind::Hlrc, Info::Seen { at: 0 })];
    let ask = Ask { by: Rank(0), mode: LockMode::Exclusive, wait: true, epoch: 0, infos };
    let message = Message { epoch: 0, body: Body::LockForward { lock, ask, recall: false } };
    engine.handle(Event::Receive { from: Rank(0), message: &message }, &mut memory, &mut out);
    assert_eq!(engine.failure(), None);
    engine.handle(Event::Receive { from: Rank(2), message: &message }, &mut memory, &mut out);
    let reason = engine.failure().map(ToString::to_string).unwrap_or_default();
    assert!(reason.contains("rank 2") && reason.contains("second successor"), "{reason}");
}

/// Rank 0 of two, where the barrier's parts are joined.
fn root() -> Engine {
    let region = RegionConfig {
        pages: Extent::new(PageIndex(0), 4),
        page_bytes: 32,
        protocol: ProtocolKind::Lrc,
        homes: Homes::Cyclic,
    };
    let tuning = Tuning::default();
    let config = Config {
        rank: Rank(0),
        ranks: 2,
        regions: vec![region],
        managers: Managers::Cyclic,
        lock_path: None,
        tuning,
    };
    Engine::new(&config).unwrap()
}

/// A rank brings another protocol's payload. Whether it comes before this rank's own or after it, the sender
/// is named and the engine does not blame itself.
#[test]
fn a_lie_that_is_brought_to_a_barrier_ends_the_run_and_names_the_liar() {
    let lie = Part {
        protocol: ProtocolKind::Lrc,
        payload: Payload::Homed { records: Vec::new(), upto: Vec::new(), riding: Vec::new() },
    };
    let (barrier, kind) = (BarrierId(1), BarrierKind::Normal);
    let arrival =
        Body::BarrierArrive { barrier, kind, rank: Rank(1), moves: Moves::default(), parts: vec![lie] };
    let message = Message { epoch: 0, body: arrival };
    for lie_first in [false, true] {
        let (mut engine, mut memory, mut out) = (root(), Plain(vec![0; 32]), Vec::new());
        let lies = |engine: &mut Engine, memory: &mut Plain, out: &mut Vec<Action>| {
            engine.handle(Event::Receive { from: Rank(1), message: &message }, memory, out);
        };
        if lie_first {
            lies(&mut engine, &mut memory, &mut out);
            assert!(engine.failure().is_none(), "nothing to compare it with yet");
        }
        let op = SyncOp::Barrier { barrier, kind, threads: 1 };
        engine.handle(Event::Sync { thread: ThreadId(0), op }, &mut memory, &mut out);
        if !lie_first {
            lies(&mut engine, &mut memory, &mut out);
        }
        let reason = engine.failure().map(ToString::to_string).unwrap_or_default();
        assert!(reason.contains("rank 1") && !reason.contains("rank 0"), "lie first: {lie_first}: {reason}");
        let told = |action: &Action| {
            matches!(action, Action::Done { result: OpResult::Failed(OpError::Stopped(_)), .. })
        };
        assert!(out.iter().any(told), "the thread that waits at the barrier is told");
        assert!(
            !out.iter().any(|action| matches!(action, Action::Done { result: OpResult::Ok, .. })),
            "no thread leaves the barrier"
        );
    }
}

#[test]
fn whatever_bytes_a_peer_sends_no_engine_panics() {
    let mut random = Rng::new(11);
    let mut decoded = 0;
    for protocol in ProtocolKind::ALL {
        for _ in 0..3000 * effort() {
            let mut engine = alone(protocol);
            let mut memory = Plain(vec![0; 32]);
            let mut out = Vec::new();
            for _ in 0..6 {
                // A kind of message, then bytes that are small enough to name things that exist.
                let kinds = [
                    1, 2, 3, 4, 5, 6, 7, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x20, 0x21, 0x22,
                    0x23, 0x24, 0x25,
                ];
                let more = [0x26, 0x27, 0x28, 0x29, 0x2a, 0x2b, 0x30, 0x31, 0x32, 0x33, 0x38, 0x39, 0x3a];
                let at = random.index(kinds.len() + more.len());
                let mut bytes = vec![0, kinds.iter().chain(&more).copied().nth(at).unwrap()];
                bytes.extend((0..random.index(40)).map(|_| u8::try_from(random.below(4)).unwrap()));
                for len in (2..=bytes.len()).rev() {
                    if let Ok(message) = Message::decode(&bytes[..len]) {
                        decoded += 1;
                        let from = if random.percent(50) { Rank(0) } else { Rank(2) };
                        engine.handle(Event::Receive { from, message: &message }, &mut memory, &mut out);
                        break;
                    }
                }
            }
        }
    }
    assert!(decoded > 1000, "{decoded} were messages");
}

#[test]
fn a_run_that_ended_answers_at_once() {
    use rampool_sharing::{LockMode, OpResult, SyncOp, ThreadId};
    let mut engine = alone(ProtocolKind::Lrc);
    let (mut memory, mut out) = (Plain(vec![0; 32]), Vec::new());
    let wait = SyncOp::Lock { lock: LockId(0), mode: LockMode::Exclusive, wait: true };
    engine.handle(Event::Sync { thread: ThreadId(0), op: wait }, &mut memory, &mut out);
    engine.handle(Event::PeerLost { peer: Rank(0), how: "it is silent" }, &mut memory, &mut out);
    engine.handle(Event::Sync { thread: ThreadId(1), op: wait }, &mut memory, &mut out);
    for id in [ThreadId(0), ThreadId(1)] {
        let told = out.iter().any(|action| {
            let Action::Done { thread, result: OpResult::Failed(OpError::Stopped(why)) } = action else {
                return false;
            };
            *thread == id && matches!(why, Reason::PeerLost { peer: Rank(0), .. })
        });
        assert!(told, "{id} is told");
    }
}

#[test]
fn threads_of_one_rank_agree_on_how_many_they_are() {
    use rampool_sharing::{BarrierId, BarrierKind, SyncOp, ThreadId};
    let mut engine = alone(ProtocolKind::Sc);
    let (mut memory, mut out) = (Plain(vec![0; 32]), Vec::new());
    for (thread, threads) in [(0, 2), (1, 3)] {
        let op = SyncOp::Barrier { barrier: BarrierId(0), kind: BarrierKind::Normal, threads };
        engine.handle(Event::Sync { thread: ThreadId(thread), op }, &mut memory, &mut out);
    }
    assert!(matches!(engine.failure(), Some(Reason::BarrierThreads { said: 3, before: 2, .. })));
}
