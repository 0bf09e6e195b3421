//! Cold remote memory read in order, compared with a plain TCP stream, and the least that it can cost here.

mod floor;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rampool_pager::fault::FaultModeChoice;
use serde_json::json;

use super::Common;
use super::peer::{self, RawStream, Wanted};
use super::report::{Reach, Report};
use super::service::{Paged, Place, Service, Words};
use super::workload::word;

/// Cold remote memory read in order, compared with a plain TCP stream
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

/// What the two kinds of streams are that figures are compared with.
pub const PLAIN_AND_UNPACED: &str = "plain TCP stream: through sockets as this machine makes them for any \
    program; unpaced: its sender does as rampool does within a machine, where the machine's own choice may \
    pace it";
const SEED: u64 = 2;
const PAGE_WORDS: usize = 512;

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let place = Place::loopback();
    let bytes: usize = common.pick(512 << 20, 32 << 20);
    let spin = Duration::from_millis(1);
    let mut report = Report::start("sequential", common.quick);
    report.note(format!(
        "loopback TCP, one connection each, {} MiB local of {} MiB; {}",
        bytes >> 23,
        bytes >> 20,
        place.describe()
    ));
    report.note("a timed pass reads and checks one word of every 4 KiB; an untimed one compares every byte");

    let server = Service::memory_server(&place, 2 * bytes as u64, spin)?;
    let peer = Service::raw_peer(&place, spin)?;
    let plain_peer = Service::plain_peer(&place, spin)?;
    report.note(PLAIN_AND_UNPACED);
    let prefetch_bytes = 2 << 20;
    report.note(
        "least: one thread that receives an unpaced stream, has the kernel put it in place and take \
        as much out, and nothing else",
    );
    for (setting, page_bytes) in [("4 KiB pages", 4096), ("256 KiB pages", 256 << 10)] {
        let memory = Paged {
            server: &server.address,
            key: None,
            memory_bytes: bytes as u64 * 3 / 2,
            local_bytes: bytes as u64 / 8,
            page_bytes,
            prefetch_bytes,
            spin,
            fault_mode: FaultModeChoice::Auto,
        }
        .open()?;
        let region = memory.alloc(bytes)?;
        let words = Words::new(&region);
        words.fill(SEED);
        words.verify(SEED, 0, words.len())?;
        let (mut ours, mut plain, mut raw, mut least) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut fetched = Vec::new();
        for _ in 0..common.rounds(7, 2) {
            let before = memory.stats();
            let started = Instant::now();
            for page in 0..bytes / 4096 {
                let index = page * PAGE_WORDS + page % PAGE_WORDS;
                if words.read(index) != word(SEED, index as u64) {
                    bail!("WRONG CONTENT in page {page}");
                }
            }
            let took = started.elapsed().as_secs_f64();
            let after = memory.stats();
            let pages = (after.demand_pages + after.prefetched_pages)
                - (before.demand_pages + before.prefetched_pages);
            // Only what came from the server counts: part of a repeated scan may have stayed.
            let moved = pages.min(bytes as u64 / 4096) as f64 * 4096.0;
            ours.push(moved / took / 1e9);
            fetched.push(moved / bytes as f64);
            plain.push(stream(&plain_peer.address, spin, bytes)?);
            raw.push(stream(&peer.address, spin, bytes)?);
            least.push(floor::run(&peer.address, spin, bytes, bytes / 8)?);
        }
        words.verify(SEED, 0, words.len())?;
        let parameters =
            |what: &str| json!({ "what": what, "page_bytes": page_bytes, "prefetch_bytes": prefetch_bytes });
        report.series(&format!("{setting}: read from the server"), "GB/s", parameters("ours"), &ours);
        report.series(&format!("{setting}: share that was remote"), "", parameters("remote share"), &fetched);
        report.series("plain TCP stream", "GB/s", parameters("plain"), &plain);
        report.series("unpaced TCP stream", "GB/s", parameters("raw"), &raw);
        report.series(&format!("{setting}: least"), "GB/s", parameters("least"), &least);
        report.ratio(&format!("{setting}: read / plain stream"), &ours, &plain, Some(Reach::AtLeast(0.5)));
        report.ratio(&format!("{setting}: read / unpaced stream"), &ours, &raw, Some(Reach::AtLeast(0.5)));
        report.ratio(&format!("{setting}: least / unpaced stream"), &least, &raw, None);
        report.ratio(&format!("{setting}: read / least"), &ours, &least, None);
    }
    report.finish(common.json.as_deref())
}

/// GB/s of a stream from that peer into a buffer of 1 MiB.
pub fn stream(peer: &str, spin: Duration, bytes: usize) -> Result<f64> {
    stream_into(peer, spin, Wanted::first(bytes as u64), 1)
}

/// The same of what is wanted, into `buffers` of 1 MiB in turns.
pub fn stream_into(peer: &str, spin: Duration, wanted: Wanted, buffers: usize) -> Result<f64> {
    let content = peer::content();
    let mut raw = RawStream::connect(peer, spin)?;
    let mut buffers = vec![vec![0u8; content.len()]; buffers];
    raw.ask(Wanted { bytes: 1, ..wanted })?;
    raw.read_exactly(&mut buffers[0][..1])?;
    let started = Instant::now();
    raw.ask(wanted)?;
    for n in 0..wanted.bytes / content.len() as u64 {
        let buffer = usize::try_from(n)? % buffers.len();
        raw.read_exactly(&mut buffers[buffer])?;
    }
    let took = started.elapsed().as_secs_f64();
    if buffers.iter().any(|buffer| *buffer != content) {
        bail!("WRONG CONTENT from the raw peer");
    }
    Ok(wanted.bytes as f64 / took / 1e9)
}
