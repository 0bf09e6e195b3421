//! One client on one to four servers, each behind a link of its own: STREAM's triad, reading in order, and
//! random faults, compared with the sum of the links.

use std::time::Instant;

use anyhow::{Result, bail};
use rampool_pager::region::PagedMemory;
use serde_json::json;

use super::kernels::{Kernel, RemoteArrays, Replay};
use super::{Args, ELEMENTS, SPIN};
use crate::bench::link::{Link, Rate};
use crate::bench::report::Report;
use crate::bench::service::{KeyFile, Paged, Place, Service, Words, pin_apart};
use crate::bench::workload::word;
use rampool_pager::fault::FaultModeChoice;

const MOST_SERVERS: usize = 4;
const LOCAL_BYTES: u64 = 16 << 20;
const PAGE_WORDS: usize = 512;
const SEED: u64 = 21;

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let rate = args.link.unwrap_or(Rate::OneGbit);
    // Before any thread starts: namespaces belong to threads.
    let links = Link::several(rate, MOST_SERVERS)?;
    let (key, server_cpu) = (KeyFile::make()?, pin_apart());
    let mut report = Report::start(format!("stream, servers behind {}", rate.name()), common.quick);
    let elements = args.elements.unwrap_or(common.pick(ELEMENTS, 3_000_000));
    report.note(format!(
        "one client, its pages spread over the servers, each behind a link of its own; {} MB, \
         {} MiB local, at most {} read ahead; all servers share one CPU",
        elements * 24 / 1_000_000,
        LOCAL_BYTES >> 20,
        args.prefetch,
    ));
    let servers = links
        .iter()
        .map(|link| {
            let place =
                Place { host: &link.host, server_cpu, namespace: Some(&link.there), key: Some(&key.path) };
            Service::memory_server(&place, 2 * elements as u64 * 24 + (64 << 20), SPIN)
        })
        .collect::<Result<Vec<_>>>()?;
    for count in 1..=servers.len() {
        let addresses: Vec<&str> = servers[..count].iter().map(|server| server.address.as_str()).collect();
        let paged = Paged {
            server: &addresses.join(","),
            key: Some(&key.path),
            memory_bytes: elements as u64 * 24 + (64 << 20),
            local_bytes: LOCAL_BYTES,
            page_bytes: 4096,
            prefetch_bytes: u32::try_from(args.prefetch.0).unwrap_or(u32::MAX),
            spin: SPIN,
            fault_mode: FaultModeChoice::Auto,
        };
        let with = With { report: &mut report, args, rate, count };
        with.measure(&paged, elements)?;
    }
    report.finish(common.json.as_deref())
}

/// So many servers.
struct With<'a> {
    report: &'a mut Report,
    args: &'a Args,
    rate: Rate,
    count: usize,
}

impl With<'_> {
    fn measure(mut self, paged: &Paged<'_>, elements: usize) -> Result<()> {
        let rounds = self.args.common.rounds(3, 1);
        let line_gb = self.rate.line_gb() * self.count as f64;
        let triad = triad(&paged.open()?, elements, rounds)?;
        self.keep("triad", "GB/s", &triad);
        self.keep("triad / sum of the links", "", &triad.iter().map(|gb| gb / line_gb).collect::<Vec<_>>());
        let memory = paged.open()?;
        let region = memory.alloc(elements * 24 / 4096 * 4096)?;
        let words = Words::new(&region);
        words.fill(SEED);
        let scan = (0..rounds).map(|_| scan(&memory, &words)).collect::<Result<Vec<_>>>()?;
        self.keep("read in order", "GB/s", &scan);
        let share: Vec<f64> = scan.iter().map(|gb| gb / line_gb).collect();
        self.keep("read in order / sum of the links", "", &share);
        let touches = self.args.common.pick(4000, 1000);
        let faults = (0..rounds).map(|round| faults(&words, touches, round)).collect::<Result<Vec<_>>>()?;
        self.keep("random fault", "us", &faults);
        words.verify(SEED, 0, words.len())
    }

    fn keep(&mut self, what: &str, unit: &str, samples: &[f64]) {
        let parameters =
            json!({ "experiment": "servers", "servers": self.count, "what": what, "link": self.rate.name() });
        self.report.series(&format!("{} servers: {what}", self.count), unit, parameters, samples);
    }
}

/// GB/s that came over the wire.
fn triad(memory: &PagedMemory, elements: usize, rounds: usize) -> Result<Vec<f64>> {
    let mut remote = RemoteArrays::new(memory, elements)?;
    let (mut replay, mut found) = (Replay::default(), Vec::new());
    for _ in 0..rounds {
        let before = arrived(memory);
        let started = Instant::now();
        remote.arrays().run(Kernel::Triad);
        let took = started.elapsed().as_secs_f64();
        replay.did(Kernel::Triad);
        found.push((arrived(memory) - before) as f64 / took / 1e9);
    }
    replay.verify(&remote.arrays())?;
    Ok(found)
}

/// Bytes of pages that have come.
fn arrived(memory: &PagedMemory) -> u64 {
    let stats = memory.stats();
    (stats.demand_pages + stats.prefetched_pages) * 4096
}

/// The same, reading a word of each page in order.
fn scan(memory: &PagedMemory, words: &Words<'_>) -> Result<f64> {
    let before = arrived(memory);
    let started = Instant::now();
    for index in (0..words.len()).step_by(PAGE_WORDS) {
        if words.read(index) != word(SEED, index as u64) {
            bail!("WRONG CONTENT in word {index}");
        }
    }
    Ok((arrived(memory) - before) as f64 / started.elapsed().as_secs_f64() / 1e9)
}

/// Microseconds a random touch takes, one at a time; some find their page here.
fn faults(words: &Words<'_>, touches: usize, round: usize) -> Result<f64> {
    let pages = (words.len() / PAGE_WORDS) as u64;
    let started = Instant::now();
    for touch in 0..touches {
        let page = word(SEED + 1 + round as u64, touch as u64) % pages;
        let index = usize::try_from(page)? * PAGE_WORDS;
        if words.read(index) != word(SEED, index as u64) {
            bail!("WRONG CONTENT in word {index}");
        }
    }
    Ok(started.elapsed().as_secs_f64() * 1e6 / touches as f64)
}
