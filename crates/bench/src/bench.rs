//! `rampool bench`: what rampool costs and gains, each figure next to its reference.
//!
//! ```text
//!    fault        a 4 KiB fault compared with a raw request and reply
//!    sequential   cold remote memory read in order, compared with a plain TCP stream
//!   stream       STREAM (McCalpin): at a share of local memory, against page size, with several clients
//!    allocation   memory taken from the pool and given back, compared with mmap and munmap
//!    direct       the direct view compared with raw round trips, streams, single gets and the paged view
//!    examples     the example programs of the direct view compared with plain gets and puts
//!    openmpi      strided gets and gathers compared with OpenMPI's one-sided operations
//!   register     the pin-down cache: look-ups; copies, hits and misses against payload
//!    fifo         remote queues compared with raw connections and redis lists
//!    server       reads of 4 KiB by many connections, compared with redis
//!    shared       shared memory between processes compared with raw requests, and ArgoDSM's figures
//!    tenants      what one tenant of a server notices of another
//!    predict      parallel programs predicted for a slower link, compared with the same programs on it
//!   programs     what `bench/paged.py` measures besides programs of others
//!    redundancy   what a reader notices of a server that fails or is slow
//!   report       rounds, medians, ratios; text and JSON
//!   peer         the raw other end: pages on request, streams
//!   service      server processes of a benchmark, each on its CPU
//!   link         a rate-limited link between two network namespaces
//!   ranks        two ranks of a program, here or at the ends of a link
//! ```
//! A and B always alternate in one run (A B A B ...), and a ratio is the median of the ratios of neighbours,
//! so a disturbance that lasts longer than a round affects both. Answers are verified. No benchmark leaves
//! anything behind.

mod allocation;
mod direct;
mod examples;
mod fault;
mod fifo;
mod link;
mod openmpi;
mod peer;
mod predict;
mod programs;
mod ranks;
mod redundancy;
mod register;
mod report;
mod sequential;
mod server;
mod service;
mod shared;
mod stream;
mod tenants;
mod workload;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Result;

/// Measure rampool and compare it with alternatives
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(clap::Subcommand, Debug)]
enum Bench {
    Fault(fault::Args),
    Sequential(sequential::Args),
    Stream(stream::Args),
    Allocation(allocation::Args),
    Redundancy(redundancy::Args),
    Server(server::Args),
    Direct(direct::Args),
    Examples(examples::Args),
    Openmpi(openmpi::Args),
    Register(register::Args),
    Fifo(fifo::Args),
    Shared(shared::Args),
    Predict(predict::Args),
    Tenants(tenants::Args),
    #[command(hide = true)]
    FillMap(programs::map::Fill),
    #[command(hide = true)]
    Touch(programs::touch::Touch),
    #[command(hide = true)]
    Least(programs::least::Args),
    #[command(hide = true)]
    DirectGets(direct::Gets),
    #[command(hide = true)]
    Peer(peer::Args),
    #[command(hide = true)]
    SharedRank(shared::rank::Args),
    #[command(hide = true)]
    StreamClient(stream::clients::Args),
}

/// Options of every benchmark.
#[derive(clap::Args, Debug)]
pub struct Common {
    /// Also write the figures, with every sample, to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Use small sizes: this shows that the benchmark works, but its figures mean nothing
    #[arg(long)]
    quick: bool,

    /// Number of rounds; everything is measured once a round [default: depends on the benchmark]
    #[arg(long)]
    rounds: Option<NonZeroUsize>,
}

impl Common {
    /// The number of rounds asked for, or one of two numbers by `--quick`.
    fn rounds(&self, full: usize, quick: usize) -> usize {
        self.rounds.map_or(self.pick(full, quick), NonZeroUsize::get)
    }

    /// One of two values, by `--quick`.
    fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

pub fn run(args: Args) -> Result<i32> {
    match args.bench {
        Bench::Fault(args) => fault::run(&args),
        Bench::Sequential(args) => sequential::run(&args),
        Bench::Stream(args) => stream::run(&args),
        Bench::Allocation(args) => allocation::run(&args),
        Bench::FillMap(args) => programs::map::fill(&args),
        Bench::Redundancy(args) => redundancy::run(&args),
        Bench::Touch(args) => programs::touch::touch(&args),
        Bench::Least(args) => programs::least::run(&args),
        Bench::Server(args) => server::run(&args),
        Bench::Direct(args) => direct::run(&args),
        Bench::DirectGets(args) => direct::gets(&args),
        Bench::Examples(args) => examples::run(&args),
        Bench::Openmpi(args) => openmpi::run(&args),
        Bench::Register(args) => register::run(&args),
        Bench::Fifo(args) => fifo::run(&args),
        Bench::Shared(args) => shared::run(&args),
        Bench::Predict(args) => predict::run(&args),
        Bench::Tenants(args) => tenants::run(&args),
        Bench::SharedRank(args) => shared::rank::run(&args),
        Bench::Peer(args) => peer::run(&args),
        Bench::StreamClient(args) => stream::clients::run(&args),
    }
}
