//! Runs generated programs under a sharing protocol until one fails.
//!
//! ```text
//! cargo run --release -p rampool-sim --example fuzz_share -- <protocol | all> <first seed> <runs>
//! ```
//! A failure prints its seed; the same command with that seed and one run replays it, and prints every
//! event if `SHARE_TRACE` is set.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use rampool_sharing::ProtocolKind;
use rampool_sim::share::World;
use rampool_sim::share::generate::{Shape, generate};
use rampool_sim::share::network::Loss;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let protocols: Vec<ProtocolKind> = match args.first().map(String::as_str) {
        None | Some("all") => ProtocolKind::ALL.to_vec(),
        Some(name) => match ProtocolKind::from_name(name) {
            Some(protocol) => vec![protocol],
            None => {
                eprintln!("{name} is no protocol: all, sc, lrc, hlrc, aurc, ibec or auto");
                return ExitCode::FAILURE;
            }
        },
    };
    let number =
        |index: usize, default: u64| args.get(index).and_then(|arg| arg.parse().ok()).unwrap_or(default);
    let (first, runs) = (number(1, 0), number(2, 1000));
    let mut failed = 0;
    for protocol in protocols {
        let mut events = 0;
        for seed in first..first + runs {
            let shape = if seed % 3 == 1 { Shape::crowded(protocol) } else { Shape::small(protocol) };
            let mut setup = generate(seed, protocol, &shape);
            if seed % 8 == 7 {
                setup.datagrams = Some(Loss { lost: 10, doubled: 10, spoiled: 3, cut: 5, jitter: 400 });
            }
            setup.trace = std::env::var_os("SHARE_TRACE").is_some();
            let result = catch_unwind(AssertUnwindSafe(|| World::new(setup).run()));
            match result {
                Ok(Ok(report)) => events += report.events,
                Ok(Err(failure)) => {
                    failed += 1;
                    println!("{} seed {seed}: {failure:?}", protocol.name());
                }
                Err(_) => {
                    failed += 1;
                    println!("{} seed {seed}: panic", protocol.name());
                }
            }
            if failed >= 8 {
                return ExitCode::FAILURE;
            }
        }
        println!("{}: {runs} runs from seed {first}, {events} events", protocol.name());
    }
    if failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
