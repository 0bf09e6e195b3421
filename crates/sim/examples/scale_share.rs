//! Many ranks: how fast the simulated shared view runs, and what the protocols send.
//!
//! ```text
//! cargo run --release -p rampool-sim --example scale_share -- [ranks] [pages] [epochs]
//! ```
//! Each rank writes its own strip of pages, takes a few locks, reads its neighbours' borders, and
//! meets all others at barriers.

use std::time::Instant;

use rampool_sharing::ProtocolKind;
use rampool_sim::share::World;
use rampool_sim::share::generate::{WIDE_PAGE, many_ranks};

fn main() {
    let args: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let number = |index: usize, default: usize| args.get(index).copied().unwrap_or(default);
    let (ranks, pages, epochs) = (number(0, 512), number(1, 65_536), number(2, 3));
    println!("{ranks} ranks, {pages} pages of {WIDE_PAGE} bytes, {epochs} epochs");
    println!("protocol   events    messages      bytes  seconds  messages/s");
    for protocol in ProtocolKind::ALL {
        let setup = many_ranks(protocol, ranks, pages, epochs);
        let start = Instant::now();
        let report =
            World::new(setup).run().unwrap_or_else(|failure| panic!("{}: {failure:?}", protocol.name()));
        let seconds = start.elapsed().as_secs_f64();
        let messages = report.total_messages();
        let rate = messages as f64 / seconds;
        println!(
            "{:>8} {:>8} {messages:>11} {:>10} {seconds:>8.2} {rate:>11.0}",
            protocol.name(),
            report.events,
            report.total_bytes()
        );
    }
}
