//! Legal programs from seeds, under every protocol, with every load checked.

use rampool_sharing::{Managers, ProtocolKind, Rank};
use rampool_sim::rng::Rng;
use rampool_sim::share::generate::{Shape, generate, many_ranks};
use rampool_sim::share::network::Loss;
use rampool_sim::share::{Op, Setup};
use rampool_wire::units::PageIndex;

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
fn direct_operations_are_true_under_every_protocol() {
    for protocol in ProtocolKind::ALL {
        let mut asked = 0;
        for seed in 0..120 * effort() {
            let shape = if seed % 2 == 0 { Shape::small(protocol) } else { Shape::crowded(protocol) };
            let mut setup = generate(seed, protocol, &Shape { direct: 50, ..shape });
            setup.evict = [0, 0, 100][usize::try_from(seed % 3).unwrap()];
            match run(setup) {
                Ok(report) => asked += report.messages.get("Direct").map_or(0, |&(count, _)| count),
                Err(failure) => panic!("{} seed {seed}: {failure:?}", protocol.name()),
            }
        }
        // Without homes the page moves to the requester.
        assert_eq!(
            asked > 0,
            !matches!(protocol, ProtocolKind::Sc | ProtocolKind::Lrc),
            "{}: {asked} messages",
            protocol.name()
        );
    }
}

#[test]
fn copies_that_are_forgotten_to_make_room_change_nothing() {
    for protocol in ProtocolKind::ALL {
        let mut evictions = 0;
        for seed in 0..60 * effort() {
            let mut setup = generate(seed, protocol, &Shape::small(protocol));
            setup.evict = [20, 100, 400][usize::try_from(seed % 3).unwrap()];
            match run(setup) {
                Ok(report) => evictions += report.stats.evictions,
                Err(failure) => panic!("{} seed {seed}: {failure:?}", protocol.name()),
            }
        }
        // Under lrc no other rank may have the changes in a copy.
        assert_eq!(
            evictions > 0,
            protocol != ProtocolKind::Lrc,
            "{}: {evictions} copies were forgotten",
            protocol.name()
        );
    }
}

/// Pages are written, read and freed by turns; each page has one use in an epoch.
fn reuse(seed: u64, protocol: ProtocolKind) -> Setup {
    const PAGES: usize = 6;
    let mut random = Rng::new(seed);
    let ranks = 2 + random.index(3);
    let mut scripts: Vec<Vec<Op>> = vec![Vec::new(); ranks];
    for epoch in 0..14 {
        for page in 0..PAGES {
            let at = 16 * page;
            match random.index(6) {
                0 => scripts[random.index(ranks)].push(Op::Mutate {
                    at: at + random.index(8),
                    len: 1 + random.index(8),
                    value: 1 + random.byte() % 9,
                }),
                1 => {
                    for (rank, script) in scripts.iter_mut().enumerate() {
                        script.push(Op::Write { at: at + 3 * rank, len: 3, value: random.byte() });
                    }
                }
                2 => scripts.iter_mut().for_each(|script| script.push(Op::Read { at, len: 16 })),
                3 => {
                    for script in &mut scripts {
                        script.extend([
                            crate::lock(page as u64),
                            Op::Add { at, len: 9, value: 3 },
                            crate::unlock(page as u64),
                        ]);
                    }
                }
                4 if random.percent(40) => {
                    let home = Rank(u16::try_from(random.index(ranks)).unwrap());
                    scripts[random.index(ranks)].push(Op::SetHome { page: PageIndex(page as u64), home });
                }
                _ => scripts[random.index(ranks)].push(Op::Free { page: PageIndex(page as u64) }),
            }
        }
        let number = u32::try_from(epoch).unwrap();
        let meet = if random.percent(30) { crate::keep_barrier(number) } else { crate::barrier(number) };
        scripts.iter_mut().for_each(|script| script.push(meet));
    }
    scripts.iter_mut().for_each(|script| script.push(Op::Read { at: 0, len: 16 * PAGES }));
    let mut setup = Setup::new(seed, protocol, u32::try_from(PAGES).unwrap(), 16, crate::single(scripts));
    setup.evict = if seed.is_multiple_of(3) { 100 } else { 0 };
    setup.unmap = if seed.is_multiple_of(2) { 50 } else { 0 };
    setup.tuning.collect_bytes = if seed.is_multiple_of(5) { 64 } else { setup.tuning.collect_bytes };
    setup.tuning.hot_after = [1, 2, setup.tuning.hot_after][usize::try_from(seed % 3).unwrap()];
    setup
}

#[test]
fn a_barrier_waits_for_the_diffs_that_a_new_home_lacks() {
    // Its page is freed at the next barrier, where their writer forgets them.
    run(reuse(1303, ProtocolKind::Lrc)).unwrap();
}

#[test]
fn pages_that_are_freed_are_zero_when_they_are_used_again() {
    for protocol in ProtocolKind::ALL {
        for seed in 0..80 * effort() {
            if let Err(failure) = run(reuse(seed, protocol)) {
                panic!("{} seed {seed}: {failure:?}", protocol.name());
            }
        }
    }
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
        setup.evict = if seed % 4 == 0 { 100 } else { 0 };
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
        let mut setup =
            generate(seed, ProtocolKind::Ibec, &Shape { pages: (6, 6), ..Shape::small(ProtocolKind::Ibec) });
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
    // The checker compares every load with the sequential memory; here only sums are written, so the order
    // cannot matter.
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
        let report = run(many_ranks(protocol, 512, 65_536, 1))
            .unwrap_or_else(|failure| panic!("{}: {failure:?}", protocol.name()));
        assert_eq!(report.stats.barriers, 2 * 512);
    }
}
