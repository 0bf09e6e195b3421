//! A 4 KiB fault beside a raw request and reply of the same sizes, over the same transport, waiting the same way.

mod floor;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::json;

use super::Common;
use super::peer::{self, RawStream};
use super::report::{Reach, Report};
use super::service::{Paged, Place, Service, Words};
use super::workload::permutation;
use rampool::fault::RungChoice;
use rampool::pager::InstallBy;

/// 4 KiB page faults beside raw requests and replies
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

const SEED: u64 = 1;
const PAGE_WORDS: usize = 512;
/// Longer than any wait of a round, shorter than a round: whoever has no round sleeps.
const SPIN: Duration = Duration::from_millis(2);

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let place = Place::loopback();
    let mut report = Report::start("fault", common.quick);
    report.note(format!("loopback TCP, one connection, no prefetch, clean victims, random order; {}", place.describe()));
    report.note("times are the median of a round's accesses that faulted, as the program sees them; every page is compared afterwards");
    report
        .note("in-thread: each fault is served by the thread that meets it, and system calls on absent pages fail (RungChoice::InThread)");
    let ways = [
        ("spinning", SPIN, RungChoice::Auto, 2.0),
        ("in-thread, spinning", SPIN, RungChoice::InThread, 1.6),
        ("blocking", Duration::ZERO, RungChoice::Auto, 2.0),
    ];
    report
        .note("floor: a thread that reads one event, asks the raw peer for 4 KiB and copies them in, page by page, and does nothing else");
    for (way, spin, rung, reach) in ways {
        let Measured { ours, raw, floor, faults } = measure(&place, spin, rung, common.rounds(9, 2), common)?;
        let parameters = |what: &str| json!({ "way": way, "what": what });
        report.series(&format!("{way}: 4 KiB fault, p50"), "us", parameters("fault"), &ours.p50);
        report.series(&format!("{way}: 4 KiB fault, p99"), "us", parameters("fault p99"), &ours.p99);
        report.series(&format!("{way}: raw request and reply, p50"), "us", parameters("raw"), &raw.p50);
        report.series(&format!("{way}: raw request and reply, p99"), "us", parameters("raw p99"), &raw.p99);
        report.ratio(&format!("{way}: fault / raw"), &ours.p50, &raw.p50, Some(Reach::AtMost(reach)));
        if !floor.p50.is_empty() {
            report.series(&format!("{way}: floor, p50"), "us", parameters("floor"), &floor.p50);
            report.ratio(&format!("{way}: floor / raw"), &floor.p50, &raw.p50, None);
        }
        report.note(format!("{faults} faults counted by the pager in the {way} rounds"));
    }
    report.finish(common.json.as_deref())
}

#[derive(Default)]
struct Times {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Times {
    fn add(&mut self, mut round: Vec<Duration>) {
        round.sort_unstable();
        let us = |share: usize| round[(round.len() - 1) * share / 100].as_secs_f64() * 1e6;
        self.p50.push(us(50));
        self.p99.push(us(99));
    }
}

struct Measured {
    ours: Times,
    raw: Times,
    /// Empty where it would be the floor of something else.
    floor: Times,
    faults: u64,
}

fn measure(place: &Place<'_>, spin: Duration, rung: RungChoice, rounds: usize, common: &Common) -> Result<Measured> {
    let bytes: usize = common.pick(512 << 20, 32 << 20);
    let samples = common.pick(10_000, 500);
    let server = Service::memory_server(place, 2 * bytes as u64, spin)?;
    let peer = Service::raw_peer(place, spin)?;
    let memory = Paged {
        server: &server.address,
        key: None,
        memory_bytes: bytes as u64 * 3 / 2,
        local_bytes: bytes as u64 / 32,
        page_bytes: 4096,
        prefetch_bytes: 0,
        spin,
        install_by: InstallBy::Copy,
        rung,
    }
    .open()?;
    let region = memory.alloc(bytes)?;
    let words = Words::new(&region);
    words.fill(SEED);
    let order = permutation(SEED, bytes / 4096);
    let mut at = order.iter().cycle();

    let content = peer::content();
    let mut buffer = vec![0u8; 4096];
    let (mut ours, mut theirs, mut least, mut faults) = (Times::default(), Times::default(), Times::default(), 0);
    // Round 0 warms both up: what was written last still has to leave, and is not counted.
    for round in 0..=rounds {
        let before = memory.stats().faults;
        let (mut times, mut pages) = (Vec::with_capacity(samples), Vec::with_capacity(samples));
        for page in at.by_ref().take(samples) {
            let started = Instant::now();
            let first = words.read(page * PAGE_WORDS);
            let took = started.elapsed();
            pages.push((*page, first));
            // A thirty-second of the pages is resident: those accesses are no faults, and faster than any.
            if took > Duration::from_micros(1) {
                times.push(took);
            }
        }
        let faulted = memory.stats().faults - before;
        for (page, first) in &pages {
            if *first != super::workload::word(SEED, (page * PAGE_WORDS) as u64) {
                bail!("WRONG CONTENT: page {page} began with {first:#x}");
            }
        }
        // The peer serves one connection at a time.
        let mut raw = RawStream::connect(&peer.address, spin)?;
        let mut raw_times = Vec::with_capacity(samples);
        for _ in 0..samples {
            let started = Instant::now();
            raw.request(4096)?;
            raw.read_exactly(&mut buffer)?;
            raw_times.push(started.elapsed());
            if buffer != content[..4096] {
                bail!("WRONG CONTENT from the raw peer");
            }
        }
        if times.is_empty() {
            bail!("no access faulted: the budget holds everything");
        }
        if round > 0 {
            faults += faulted;
            ours.add(times);
            theirs.add(raw_times);
        }
        drop(raw);
        // A fault that its own thread serves has another floor.
        if rung != RungChoice::InThread {
            let times = floor::measure(&peer.address, spin, samples)?;
            if round > 0 {
                least.add(times);
            }
        }
    }
    words.verify(SEED, 0, words.len())?;
    Ok(Measured { ours, raw: theirs, floor: least, faults })
}
