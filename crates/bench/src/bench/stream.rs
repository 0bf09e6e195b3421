//! STREAM (McCalpin 1995), written anew: copy, scale, add and triad over three arrays of doubles that do not
//! fit local memory.
//!
//! The experiments: the four kernels at a share of local memory, compared with the same kernels on local
//! arrays; the two of Saito, Midorikawa and Kai's DLM-M paper: bandwidth against page size with every access
//! remote, and one to seven clients on one server; and what that paper left open, several servers.
//! Bytes are counted as STREAM counts them: 16 an
//! element for copy and scale, 24 for add and triad.

pub mod clients;
mod kernels;
mod servers;

use std::time::{Duration, Instant};

use anyhow::Result;
use rampool_pager::fault::FaultModeChoice;
use rampool_wire::units::ByteLen;
use serde_json::json;

use super::Common;
use super::link::{Link, Rate};
use super::report::{Reach, Report, median, short};
use super::sequential::stream as plain_stream;
use super::service::{KeyFile, Paged, Place, Service, pin_apart};
use kernels::{Kernel, LocalArrays, RemoteArrays, Replay};

/// STREAM at a share of local memory, against page size, and with several clients
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Number of doubles in each of the three arrays [default: 10 million, as in the DLM-M paper]
    #[arg(long, value_name = "N")]
    elements: Option<usize>,

    /// Local memory, as a share of the three arrays, in the experiment `share`
    #[arg(long, default_value_t = 0.5)]
    local_share: f64,

    /// Put the server behind a link of this rate (root only; needs ip and tc) [default: loopback]
    #[arg(long, value_name = "RATE")]
    link: Option<Rate>,

    /// Experiments to run; repeat it or separate by commas [default: all but `servers`]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    experiment: Vec<Experiment>,

    /// Page sizes of the experiment `pages`; repeat it or separate by commas [default: 4K to 2M]
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    page_size: Vec<ByteLen>,

    /// Most bytes to read ahead where reading ahead is on
    #[arg(long, default_value = "2M", value_name = "SIZE")]
    prefetch: ByteLen,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Experiment {
    /// The four kernels at a share of local memory, compared with local arrays
    Share,
    /// Bandwidth against page size, every access remote
    Pages,
    /// One to seven clients on one server
    Clients,
    /// One client on one to four servers, each behind a link of its own; alone, and only if named
    Servers,
}

const SPIN: Duration = Duration::from_millis(1);
/// The paper's arrays.
const ELEMENTS: usize = 10_000_000;
const CLIENTS: usize = 7;

/// What the experiments share.
struct Bench<'a> {
    args: &'a Args,
    place: Place<'a>,
    server: Service,
    elements: usize,
    link_name: &'static str,
}

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    if args.experiment == [Experiment::Servers] {
        return servers::run(args);
    }
    // Before any thread starts: namespaces belong to threads.
    let link = args.link.map(Link::make).transpose()?;
    let key = link.as_ref().map(|_| KeyFile::make()).transpose()?;
    let place = match &link {
        None => Place::loopback(),
        Some(link) => Place {
            host: Link::HOST,
            server_cpu: pin_apart(),
            namespace: Some(&link.there),
            key: key.as_ref().map(|k| k.path.as_path()),
        },
    };
    let link_name = link.as_ref().map_or("loopback", |l| l.rate.name());
    let mut report = Report::start(format!("stream, {link_name}"), common.quick);
    report.note(format!("TCP, one connection a client, not encrypted; {}", place.describe()));
    let elements = args.elements.unwrap_or(common.pick(ELEMENTS, 3_000_000));
    report.note(format!(
        "{elements} doubles an array, {} MB in three, random values; results are computed again and compared",
        elements * 24 / 1_000_000
    ));
    let server =
        Service::memory_server(&place, CLIENTS as u64 * 2 * elements as u64 * 24 + (64 << 20), SPIN)?;
    let peer = Service::plain_peer(&place, SPIN)?;
    let bench = Bench { args, place, server, elements, link_name };

    let wanted = |what| args.experiment.is_empty() || args.experiment.contains(&what);
    let plain: Vec<f64> = (0..common.pick(3, 1))
        .map(|_| plain_stream(&peer.address, SPIN, ((elements * 24) >> 20) << 20))
        .collect::<Result<_>>()?;
    let plain_gb =
        report.series("plain TCP stream", "GB/s", json!({ "what": "raw", "link": link_name }), &plain);
    if wanted(Experiment::Share) {
        bench.share(&mut report)?;
    }
    if wanted(Experiment::Pages) {
        let best = bench.pages(&mut report)?;
        report.note(format!(
            "the best of these, by what came over the wire, is {} of the plain TCP stream",
            percent(best / plain_gb)
        ));
        if let Some(rate) = args.link {
            let reach = (rate == Rate::OneGbit).then_some(Reach::AtLeast(0.9));
            report.ratio(
                &format!("best triad, by what came over the wire / line rate of {}", rate.name()),
                &[best],
                &[rate.line_gb()],
                reach,
            );
        }
    }
    if wanted(Experiment::Clients) {
        clients::measure(&bench, &mut report)?;
    }
    report.finish(common.json.as_deref())
}

impl Bench<'_> {
    fn paged(&self, local_bytes: u64, page_bytes: u32, prefetch_bytes: u32) -> Paged<'_> {
        Paged {
            server: &self.server.address,
            key: self.place.key,
            memory_bytes: self.elements as u64 * 24 + (32 << 20),
            local_bytes,
            page_bytes,
            prefetch_bytes,
            spin: SPIN,
            fault_mode: FaultModeChoice::Auto,
        }
    }

    fn prefetch(&self) -> u32 {
        u32::try_from(self.args.prefetch.0).unwrap_or(u32::MAX)
    }

    fn share(&self, report: &mut Report) -> Result<()> {
        // Whole per mille, so that the product needs no rounding of floating point.
        let per_mille =
            (0..=1000u32).rev().find(|p| f64::from(*p) <= self.args.local_share * 1000.0).unwrap_or(0);
        let local_bytes = self.elements as u64 * 24 * u64::from(per_mille) / 1000;
        let memory = self.paged(local_bytes, 4096, self.prefetch()).open()?;
        let mut remote = RemoteArrays::new(&memory, self.elements)?;
        let mut local = LocalArrays::new(self.elements);
        let mut replay = Replay::default();
        let rounds = self.args.common.rounds(5, 1);
        let mut gb = Kernel::ALL.map(|_| (Vec::new(), Vec::new()));
        for round in 0..=rounds {
            for (kernel, (ours, theirs)) in Kernel::ALL.into_iter().zip(&mut gb) {
                let time = |run: &mut dyn FnMut()| {
                    let started = Instant::now();
                    run();
                    kernel.bytes(self.elements) / started.elapsed().as_secs_f64() / 1e9
                };
                let paged = time(&mut || remote.arrays().run(kernel));
                let plain = time(&mut || local.arrays().run(kernel));
                replay.did(kernel);
                // Round 0 settles what stays local.
                if round > 0 {
                    ours.push(paged);
                    theirs.push(plain);
                }
            }
        }
        replay.verify(&remote.arrays())?;
        replay.verify(&local.arrays())?;
        let share = percent(f64::from(per_mille) / 1000.0);
        for (kernel, (ours, theirs)) in Kernel::ALL.into_iter().zip(&gb) {
            let name = kernel.name();
            let parameters = |what: &str| {
                json!({
                    "experiment": "share", "kernel": name, "what": what,
                    "local_share": self.args.local_share, "link": self.link_name,
                })
            };
            report.series(&format!("{name}, {share} local"), "GB/s", parameters("ours"), ours);
            report.series(&format!("{name}, local arrays"), "GB/s", parameters("local"), theirs);
            let reach = (kernel == Kernel::Triad && self.args.link.is_none() && per_mille == 500)
                .then_some(Reach::AtLeast(0.055));
            report.ratio(&format!("{name}: {share} local / all local"), ours, theirs, reach);
        }
        Ok(())
    }

    /// Returns the best median of what came over the wire, in GB/s.
    fn pages(&self, report: &mut Report) -> Result<f64> {
        let rounds = self.args.common.rounds(if self.args.link.is_some() { 1 } else { 3 }, 1);
        let mut best = 0f64;
        let sizes: Vec<u32> = if self.args.page_size.is_empty() {
            self.args.common.pick(&[4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048][..], &[4, 2048]).to_vec()
        } else {
            self.args.page_size.iter().map(|size| u32::try_from(size.0 >> 10).unwrap_or(u32::MAX)).collect()
        };
        for prefetch in [0, self.prefetch()] {
            for kib in &sizes {
                let page_bytes = kib.saturating_mul(1024);
                // Enough for what is on its way, and little compared with the arrays.
                let local_bytes = (u64::from(page_bytes) * 16).max(16 << 20);
                let memory = self.paged(local_bytes, page_bytes, prefetch).open()?;
                let mut remote = RemoteArrays::new(&memory, self.elements)?;
                let mut replay = Replay::default();
                let (mut gb, mut share) = (Vec::new(), Vec::new());
                for _ in 0..rounds {
                    let before = memory.stats();
                    let started = Instant::now();
                    remote.arrays().run(Kernel::Triad);
                    let took = started.elapsed().as_secs_f64();
                    let after = memory.stats();
                    replay.did(Kernel::Triad);
                    let pages = after.demand_pages + after.prefetched_pages
                        - before.demand_pages
                        - before.prefetched_pages;
                    gb.push(Kernel::Triad.bytes(self.elements) / took / 1e9);
                    share.push(pages as f64 * 4096.0 / (self.elements as f64 * 24.0));
                }
                replay.verify(&remote.arrays())?;
                let ahead = if prefetch == 0 {
                    "no prefetch".to_owned()
                } else {
                    format!("prefetch {}", ByteLen(prefetch.into()))
                };
                let parameters = json!({
                    "experiment": "pages", "page_bytes": page_bytes, "prefetch_bytes": prefetch,
                    "link": self.link_name, "remote_share": median(&share),
                });
                let name = format!("triad, {kib} KiB pages, {ahead} ({} remote)", percent(median(&share)));
                let gb = report.series(&name, "GB/s", parameters, &gb);
                // What stayed here did not come over the wire.
                best = best.max(gb * median(&share).min(1.0));
            }
        }
        Ok(best)
    }
}

fn percent(share: f64) -> String {
    format!("{} %", short(share * 100.0))
}
