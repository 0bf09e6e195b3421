//! Legal programs from seeds, under every protocol, judged at every load.

use rampool_proto::share::{Managers, ProtocolKind, Rank};
use rampool_sim::rng::Rng;
use rampool_sim::share::generate::{Shape, generate, many_ranks};
use rampool_sim::share::network::Loss;
use rampool_sim::share::{Op, Setup};

use crate::{effort, run, several};

fn conforms(protocol: ProtocolKind) {
    for seed in 0..60 * effort() {
        let setup = generate(seed, protocol, &Shape::small(protocol));
        if let Err(failure) = run(setup) {
            panic!("{} seed {seed}: {failure:?}", protocol.name());
        }
    }
}

#[test]
fn sc_conforms() {
    conforms(ProtocolKind::Sc);
}

#[test]
fn lrc_conforms() {
    conforms(ProtocolKind::Lrc);
}

#[test]
fn hlrc_conforms() {
    conforms(ProtocolKind::Hlrc);
}

#[test]
fn aurc_conforms() {
    conforms(ProtocolKind::Aurc);
}

#[test]
fn auto_conforms() {
    conforms(ProtocolKind::Auto);
}

#[test]
fn ibec_conforms() {
    conforms(ProtocolKind::Ibec);
}

#[test]
fn racy_programs_are_sequentially_consistent_under_sc() {
    for seed in 0..60 * effort() {
        let mut random = Rng::new(seed);
        let ranks = random.between(2, 4);
        let threads = random.between(1, 3);
        let scripts = (0..ranks).map(|_| (0..threads).map(|_| racy_script(&mut random)).collect()).collect();
        let mut setup = Setup::new(seed, ProtocolKind::Sc, 3, 16, several(scripts));
        setup.tuning.hold_us = if seed % 2 == 0 { 0 } else { 50 };
        setup.unmap = if seed % 3 == 0 { 20 } else { 0 };
        if let Err(failure) = run(setup) {
            panic!("seed {seed}: {failure:?}");
        }
    }
}

fn racy_script(random: &mut Rng) -> Vec<Op> {
    let access = |random: &mut Rng| {
        let (at, len) = (random.index(46), 1 + random.index(2));
        if random.percent(50) { Op::Read { at, len } } else { Op::Write { at, len, value: random.byte() } }
    };
    (0..25).map(|_| access(random)).collect()
}

#[test]
fn regions_of_all_protocols_live_side_by_side() {
    for seed in 0..30 * effort() {
        // Locks carry payloads of all protocols; ibec's rules hold for all objects, so hand-over is left out.
        let mut setup = generate(seed, ProtocolKind::Ibec, &Shape { pages: (6, 6), ..Shape::small(ProtocolKind::Ibec) });
        setup.regions = ProtocolKind::ALL.into_iter().map(|protocol| (1, protocol)).collect();
        setup.idle = 20;
        if let Err(failure) = run(setup) {
            panic!("seed {seed}: {failure:?}");
        }
    }
}

#[test]
fn a_network_that_loses_doubles_and_reorders_changes_nothing() {
    let mut lost = 0;
    for protocol in ProtocolKind::ALL {
        for seed in 0..6 * effort() {
            let mut setup = generate(seed, protocol, &Shape::small(protocol));
            setup.datagrams = Some(Loss { lost: 10, doubled: 10, spoiled: 3, cut: 5, jitter: 400 });
            match run(setup) {
                Ok(report) => lost += report.datagrams.lost,
                Err(failure) => panic!("{} seed {seed}: {failure:?}", protocol.name()),
            }
        }
    }
    assert!(lost > 0, "the network lost something");
}

#[test]
fn a_commutative_program_ends_with_the_sequential_memory() {
    // The checker compares every load with the sequential memory; here only sums are written, so the order cannot matter.
    for protocol in ProtocolKind::ALL {
        for seed in 500..500 + 10 * effort() {
            let shape = Shape { commutative: true, ..Shape::small(protocol) };
            if let Err(failure) = run(generate(seed, protocol, &shape)) {
                panic!("{} seed {seed}: {failure:?}", protocol.name());
            }
        }
    }
}

#[test]
fn many_ranks_meet_in_the_barrier_tree() {
    for protocol in ProtocolKind::ALL {
        let shape = Shape {
            ranks: (20, 20),
            threads: (1, 1),
            pages: (20, 20),
            epochs: (3, 3),
            actions: (1, 3),
            locks: 12,
            ..Shape::small(protocol)
        };
        let mut setup = generate(7, protocol, &shape);
        setup.tuning.flat_barrier = 4;
        setup.tuning.barrier_arity = 3;
        setup.managers = Managers::At(Rank(5));
        if let Err(failure) = run(setup) {
            panic!("{}: {failure:?}", protocol.name());
        }
    }
}

#[test]
fn five_hundred_and_twelve_ranks_share_65536_pages() {
    for protocol in ProtocolKind::ALL {
        let report = run(many_ranks(protocol, 512, 65_536, 1)).unwrap_or_else(|failure| panic!("{}: {failure:?}", protocol.name()));
        assert_eq!(report.stats.barriers, 2 * 512);
    }
}
