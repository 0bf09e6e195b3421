//! The findings of S4 (Barli, Watanabe, Sakai and Tanaka) and S5 (Midorikawa, Ohashi, Katano and Iizuka),
//! reproduced. Counts are exact, times follow from the prices in `cost`.

use rampool_sharing::{BarrierKind, LockPath, ProtocolKind};
use rampool_sim::share::papers::{Program, Variant, eight_locks, sor, two_ranks_one_lock};

/// S4, table 5: for each program the speed-ups on 2 and 4 ranks, in the order of `Variant::ALL`.
fn table_five() -> Vec<(Program, [Vec<f64>; 2])> {
    let of = |program: Program, ranks| {
        Variant::ALL.iter().map(|&variant| program.speed_up(ranks, variant)).collect()
    };
    Program::ALL.into_iter().map(|program| (program, [of(program, 2), of(program, 4)])).collect()
}

#[test]
fn s4_table_5_has_its_shape() {
    let table = table_five();
    for (program, by_ranks) in &table {
        for row in by_ranks {
            let [sc, lrc, hlrc, aurc] = row[..] else { panic!("four protocols") };
            assert!(aurc >= hlrc, "automatic update only takes work away: {program:?} {row:?}");
            assert!(
                aurc >= 0.98 * sc.max(lrc),
                "and is the best, or as good as the best: {program:?} {row:?}"
            );
            if matches!(program, Program::Fft | Program::Ocean) {
                assert!(row.iter().all(|&up| up < 1.0), "faults eat all of the gain: {program:?} {row:?}");
            }
        }
    }
    let row = |program: Program, ranks: usize| {
        table.iter().find(|(of, _)| *of == program).map(|(_, rows)| &rows[ranks / 4]).unwrap()
    };
    let [sc, lrc, hlrc, _] = row(Program::Lu, 4)[..] else { panic!("four protocols") };
    assert!(
        hlrc < lrc && hlrc < sc,
        "blocks are written by one rank and their flushes are useless: {hlrc} {lrc} {sc}"
    );
    assert!(row(Program::Lu, 4).iter().all(|&up| up > 1.0));
    assert!(row(Program::Water, 4).iter().all(|&up| up > 2.0), "{:?}", row(Program::Water, 4));
    let [sc, lrc, hlrc, aurc] = row(Program::Fft, 4)[..] else { panic!("four protocols") };
    assert!(sc < hlrc && lrc < hlrc && hlrc < aurc);
}

#[test]
fn s5_figure_1_the_new_lock_scheme_is_faster_than_the_old() {
    let [old, new] = [LockPath::Forward, LockPath::Central].map(|path| two_ranks_one_lock(path, 1000));
    assert_eq!((old.total_messages(), old.total_bytes()), OLD);
    assert_eq!((new.total_messages(), new.total_bytes()), NEW);
    assert!(old.ticks * 10 > new.ticks * 16, "at least 1.6 times: {} against {}", old.ticks, new.ticks);
}

const OLD: (u64, u64) = (4000, 21_784_090);
const NEW: (u64, u64) = (4002, 59_850);

#[test]
fn s5_table_3_entry_consistency_sends_less_than_lazy_release_consistency() {
    let of = |protocol, spread| {
        let report = eight_locks(protocol, spread, 17);
        (report.total_messages(), report.total_bytes())
    };
    let (entry, lazy) = (of(ProtocolKind::Ibec, false), of(ProtocolKind::Lrc, false));
    assert_eq!((entry, lazy), ((991, 70_889), (1214, 105_936)), "one manager");
    let (entry, lazy) = (of(ProtocolKind::Ibec, true), of(ProtocolKind::Lrc, true));
    assert_eq!((entry, lazy), ((598, 41_288), (1022, 76_680)), "managers spread");
}

#[test]
fn s5_figure_5_pages_of_one_writer_take_fault_handling_from_a_quarter_to_under_a_tenth() {
    // The first barriers, which determine single writers, are excluded.
    let share = |kind| {
        let ((_, before), (_, after)) = (sor(kind, 2), sor(kind, 4));
        (after.faults_us - before.faults_us) / (after.total_us - before.total_us)
    };
    let (normal, kept) = (share(BarrierKind::Normal), share(BarrierKind::KeepReadWrite));
    assert!(normal > 0.2, "{normal}");
    assert!(kept < 0.1, "{kept}");
}
