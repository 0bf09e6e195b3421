//! The tables of S4 and S5 that the simulated world reproduces. `cargo run --release -p rampool-sim --example papers_share`

use rampool_sharing::{BarrierKind, LockPath, ProtocolKind};
use rampool_sim::share::papers::{Program, Variant, eight_locks, sor, two_ranks_one_lock};

fn main() {
    println!("S4, table 5: speed-up on Ethernet of 1999, 4 ranks (2 ranks)");
    for program in Program::ALL {
        print!("{:>6}", format!("{program:?}"));
        for variant in Variant::ALL {
            let of = |ranks| program.speed_up(ranks, variant);
            print!("  {} {:.2} ({:.2})", variant.name(), of(4), of(2));
        }
        println!();
    }
    println!("S5, figure 1: 2 ranks, 1 lock, 1000 increments each");
    let (old, new) =
        (two_ranks_one_lock(LockPath::Forward, 1000), two_ranks_one_lock(LockPath::Central, 1000));
    for (name, report) in [("old", old), ("new", new)] {
        println!(
            "  {name}: {} ms, {} messages, {} bytes",
            report.ticks / 1000,
            report.total_messages(),
            report.total_bytes()
        );
    }
    println!("S5, table 3: 8 ranks, 8 locks");
    for spread in [false, true] {
        for protocol in [ProtocolKind::Ibec, ProtocolKind::Lrc] {
            let report = eight_locks(protocol, spread, 17);
            println!(
                "  spread {spread}: {} {} messages, {} bytes",
                protocol.name(),
                report.total_messages(),
                report.total_bytes()
            );
        }
    }
    println!("S5, figure 5: SOR");
    for kind in [BarrierKind::Normal, BarrierKind::KeepReadWrite] {
        let ((_, before), (report, after)) = (sor(kind, 2), sor(kind, 6));
        let share = 100.0 * (after.faults_us - before.faults_us) / (after.total_us - before.total_us);
        println!(
            "  {kind:?}: {share:.0} % in faults, {} write faults, {} ms",
            report.stats.write_faults,
            report.ticks / 1000
        );
    }
}
