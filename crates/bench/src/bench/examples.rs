//! The example programs of the direct view, each of which checks its result, compared with plain gets and
//! puts of as many clients.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use rampool_client::direct::{Direct, DirectRegion};
use rampool_client::pool::PoolConfig;
use rampool_wire::units::ByteLen;

use super::Common;
use super::direct::MIB;
use super::report::Report;
use super::service::{Place, Service};
use super::workload::word;
use ran::Ran;

// The published examples themselves, so that the figures are about the code that users read.
#[path = "../../../../examples/direct/halo.rs"]
#[allow(clippy::cast_possible_truncation)]
mod halo;
#[path = "../../../../examples/direct/ledger.rs"]
mod ledger;
#[path = "../../../../examples/direct/mesh.rs"]
mod mesh;
#[path = "../../../../examples/direct/ran.rs"]
mod ran;
#[path = "../../../../examples/direct/scan.rs"]
mod scan;
#[path = "../../../../examples/direct/search.rs"]
#[allow(clippy::cast_possible_truncation)]
mod search;
#[path = "../../../../examples/direct/service.rs"]
mod service;
#[path = "../../../../examples/direct/solver.rs"]
#[allow(clippy::cast_possible_truncation)]
mod solver;
#[path = "../../../../examples/direct/store.rs"]
#[allow(clippy::cast_possible_truncation)]
mod store;
#[path = "../../../../examples/direct/video.rs"]
#[allow(clippy::cast_possible_truncation)]
mod video;

/// Column scan, key-value store, halo exchange, random updates, request and reply, search, solver, mesh and
/// films: the examples, compared with plain gets and puts
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

const SEED: u64 = 17;
const CLIENTS: u64 = 4;
const ENTRY_BYTES: usize = 64;

/// What is run in each round.
struct Sizes {
    rows: u64,
    store_rounds: u64,
    side: u64,
    accounts: u64,
    transfers: u64,
    requests: u64,
    /// Documents of the search, and equations of the solver.
    documents: u64,
}

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let sizes = Sizes {
        rows: common.pick(16 * 1024, 2000),
        store_rounds: common.pick(2500, 100),
        side: common.pick(32, 8),
        accounts: common.pick(100_000, 500),
        transfers: common.pick(10_000, 400),
        requests: common.pick(25, 4),
        documents: common.pick(20_000, 2000),
    };
    let place = Place::loopback();
    let servers = [(); 2].map(|()| Service::memory_server(&place, 256 * MIB, Duration::ZERO));
    let [first, second] = servers;
    let (first, second) = (first?, second?);
    let specs = vec![first.address.parse()?, second.address.parse()?];
    let mut direct = Direct::connect(&PoolConfig::new(specs, ByteLen(256 * MIB), "rampool bench examples"))?;
    let mut report = Report::start("examples", common.quick);
    report.note(format!("two servers over loopback TCP, nothing spins; {}", place.describe()));
    report.note(format!(
        "column scan: {} rows of 4 KiB at the servers, one client; store, ledger and service: {CLIENTS} \
         clients, the service with 64-byte heads and bodies of 1 MiB; halo: {}^4 cells, two \
         workers, all faces",
        sizes.rows, sizes.side
    ));
    report.note("every example checks what it has computed; what is read by plain gets is compared");
    let mut figures = Figures::default();
    let mut said = Vec::new();
    for round in 0..=common.rounds(5, 2) {
        let measured = one_round(&mut direct, &sizes)?;
        said = measured.said;
        if round > 0 {
            figures.add(measured.rates);
        }
    }
    said.into_iter().for_each(|says| report.note(says));
    for (name, samples) in &figures.0 {
        report.samples(name, "1/s", samples);
    }
    for (name, plain) in PLAIN {
        report.ratio(&format!("{name} / {plain}"), figures.of(name), figures.of(plain), None);
    }
    direct.close();
    report.finish(common.json.as_deref())
}

const PLAIN: [(&str, &str); 6] = [
    ("scan: rows", "rows read by plain gets of 1 MiB"),
    ("store: puts and gets", "plain gets of 64 B"),
    ("halo: cells, single precision", "cells of 4 B in one piece, got and put"),
    ("halo: cells, double precision", "cells of 8 B in one piece, got and put"),
    ("ledger: updates", "ledger, one transfer at a time: updates"),
    ("service: requests", "a put and a get of 1 MiB, twice"),
];

/// The result of a round: rates by name, and what the examples reported.
struct Round {
    rates: Vec<(String, f64)>,
    said: Vec<String>,
}

/// Rates by name, in the order in which they were first measured.
#[derive(Default)]
struct Figures(Vec<(String, Vec<f64>)>);

impl Figures {
    fn add(&mut self, measured: Vec<(String, f64)>) {
        for (name, rate) in measured {
            match self.0.iter_mut().find(|(known, _)| *known == name) {
                Some((_, samples)) => samples.push(rate),
                None => self.0.push((name, vec![rate])),
            }
        }
    }

    fn of(&self, name: &str) -> &[f64] {
        &self.0.iter().find(|(known, _)| known == name).expect("each round measures the same").1
    }
}

fn one_round(direct: &mut Direct, sizes: &Sizes) -> Result<Round> {
    let (mut rates, mut said) = (Vec::new(), Vec::new());
    let mut add =
        |name: String, amount: u64, took: Duration| rates.push((name, amount as f64 / took.as_secs_f64()));
    let mut example = |name: &str, ran: Result<Ran, Box<dyn std::error::Error>>| -> Result<()> {
        let ran = ran.map_err(|error| anyhow!("{name}: {error}"))?;
        for (what, amount, took) in ran.measured {
            add(format!("{name}: {what}"), amount, took);
        }
        said.push(format!("{name}: {}", ran.says));
        Ok(())
    };
    example("scan", scan::run(direct, sizes.rows))?;
    example("store", store::run(direct, CLIENTS, sizes.store_rounds))?;
    example("halo", halo::run(direct, sizes.side))?;
    example("ledger", ledger::run(direct, sizes.accounts, CLIENTS, sizes.transfers, 64))?;
    // A tenth of the transfers: each of them waits.
    example(
        "ledger, one transfer at a time",
        ledger::run(direct, sizes.accounts, CLIENTS, sizes.transfers / 10, 0),
    )?;
    example("service", service::run(direct, CLIENTS, sizes.requests, 1 << 20))?;
    example("search", search::run(direct, 500, sizes.documents, sizes.requests * 40))?;
    example("solver", solver::run(direct, sizes.documents))?;
    example("mesh", mesh::run(direct, sizes.side * 4))?;
    example("video", video::run(direct, 4, 64, sizes.requests))?;

    let bytes = sizes.rows * 4096;
    let region = direct.create(bytes)?;
    let took = blocks(direct, region, bytes, MIB, false)?;
    add(PLAIN[0].1.into(), sizes.rows, took);
    let gets = 2 * sizes.store_rounds;
    let took = by_clients(direct, region, |direct, region, client| {
        let (mut entry, each) = ([1; ENTRY_BYTES], ENTRY_BYTES as u64);
        for n in 0..gets {
            direct.get(region, word(SEED + client, n) % (bytes / each) * each, &mut entry)?;
            if entry.iter().any(|byte| *byte != 0) {
                bail!("WRONG CONTENT: this memory was never written");
            }
        }
        Ok(())
    })?;
    add(PLAIN[1].1.into(), CLIENTS * gets, took);
    let cells = {
        let (rest, half) = (sizes.side * sizes.side * sizes.side, sizes.side / 2);
        // Both workers' ghost cells, as the example counts them: two layers across the cut and two in each of
        // the other dimensions.
        2 * (2 * rest + 6 * half * sizes.side * sizes.side)
    };
    for (at, cell_bytes) in [(2, 4), (3, 8)] {
        let took = blocks(direct, region, (cells * cell_bytes).min(bytes), cells * cell_bytes, true)?;
        add(PLAIN[at].1.into(), cells, took);
    }
    let requests = sizes.requests;
    let took = by_clients(direct, region, |direct, region, client| {
        let mut body = vec![0; 1 << 20];
        for _ in 0..2 * requests {
            direct.put(region, client * MIB, &body)?;
            direct.get(region, client * MIB, &mut body)?;
        }
        if body.iter().any(|byte| *byte != 0) {
            bail!("WRONG CONTENT: other bytes were put there")
        } else {
            Ok(())
        }
    })?;
    add(PLAIN[5].1.into(), CLIENTS * requests, took);
    direct.free(region);
    Ok(Round { rates, said })
}

/// Gets so many bytes of zeroes in blocks, and puts each back if that is wanted.
fn blocks(direct: &mut Direct, region: DirectRegion, bytes: u64, block: u64, put: bool) -> Result<Duration> {
    let mut buffer = vec![1; usize::try_from(block)?];
    let started = Instant::now();
    let mut right = true;
    for at in (0..bytes).step_by(usize::try_from(block)?) {
        let buffer = &mut buffer[..usize::try_from(block.min(bytes - at))?];
        direct.get(region, at, buffer)?;
        right &= buffer.first() == Some(&0) && buffer.last() == Some(&0);
        if put {
            direct.put(region, at, buffer)?;
        }
    }
    let took = started.elapsed();
    if right && buffer.iter().all(|byte| *byte == 0) {
        Ok(took)
    } else {
        bail!("WRONG CONTENT: this memory was never written")
    }
}

/// The same by several clients at once, each a thread that has joined the lease.
fn by_clients(
    direct: &mut Direct,
    region: DirectRegion,
    work: impl Fn(&mut Direct, DirectRegion, u64) -> Result<()> + Sync,
) -> Result<Duration> {
    let (lease, ticket) = (direct.pool().lease_ticket(), direct.ticket(region)?);
    let started = Instant::now();
    let done: Vec<Result<()>> = std::thread::scope(|scope| {
        let (lease, ticket, work) = (&lease, &ticket, &work);
        let client = move |number| -> Result<()> {
            let mut direct = Direct::connect(&PoolConfig::attach(lease.clone(), "client"))?;
            let region = direct.open_ticket(ticket)?;
            let done = work(&mut direct, region, number);
            direct.close();
            done
        };
        let threads: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || client(number))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a client panicked"))))
            .collect()
    });
    done.into_iter().collect::<Result<()>>()?;
    Ok(started.elapsed())
}
