//! Shared memory between processes: pages, barriers, locks and a stream, compared with raw requests and
//! replies in the same run, and with ArgoDSM's figures.
//!
//! Each experiment is one `rampool launch` of this binary; its rank 0 measures both sides in turns, checks
//! what it reads, and prints its samples.

pub mod rank;
mod s5;

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rampool_net::transport::{SAME_HOST_VARIABLE, SameHost};
use rampool_parallel::{PROGRAMS, Program};
use rampool_shared::TimeReport;
use rampool_sharing::{Diff, ProtocolKind};
use serde_json::{Value, json};

use super::Common;
use super::report::{Reach, Report};
use super::service::{Place, Service, before_exec, rampool};
use super::workload::random_bytes;

/// Shared memory between processes: remote pages, barriers, locks, a stream, SOR
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Only experiments whose name contains this: page, barrier, dirty, lock, stream, sor, diff; repeatable
    /// [default: all of these]. On request only: `time` (where the time of every program goes, under every
    /// protocol), `s5`, `s5-locks` and `s5-programs` (the lock schemes and barriers of that paper, by two
    /// ranks, and by one to eight; the first needs root for a link), and `auto`, or `auto-` and a program's
    /// name (every program under every protocol, in turns)
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
}

/// Longer than any wait of a round, shorter than a round: a side without a round sleeps.
const SPIN: Duration = Duration::from_millis(2);
/// ArgoDSM's barriers, by ranks, in us: measured on a machine of two CPUs like this project's, but not in
/// these runs.
const ARGO_BARRIER_US: [(u16, f64); 3] = [(2, 2.3), (4, 7.7), (8, 28.0)];
/// ArgoDSM's barriers of 4 ranks, by dirty pages, in us.
const ARGO_DIRTY_US: [(usize, f64); 4] = [(1, 3500.0), (16, 3600.0), (256, 8200.0), (1024, 13_400.0)];
/// ArgoDSM's streaming read of remote memory.
const ARGO_STREAM_GB: f64 = 0.5;

/// How the ranks of a run, which are all on this machine, reach each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Tcp,
    SharedMemory,
}

impl Way {
    const BOTH: [Way; 2] = [Way::Tcp, Way::SharedMemory];

    /// Added to the names of figures.
    fn words(self) -> &'static str {
        match self {
            Way::Tcp => "",
            Way::SharedMemory => ", shared memory",
        }
    }

    fn same_host(self) -> SameHost {
        match self {
            Way::Tcp => SameHost::Socket,
            Way::SharedMemory => SameHost::Rings,
        }
    }
}

/// One run of ranks.
struct Run<'a> {
    ranks: u16,
    protocol: &'a str,
    spin: Duration,
    way: Way,
    experiment: &'a str,
    arguments: Vec<String>,
}

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("shared", common.quick);
    let rounds = common.rounds(9, 2);
    report.note(
        "every process on this machine; messages over loopback TCP, or through shared memory where a \
         figure says so; what is read is checked; ArgoDSM's figures are of an earlier measurement",
    );
    report.note(
        "but for SOR and `time`, each rank's threads run on one CPU, the next rank's on the next, and \
         the raw other end on the last",
    );
    let wanted =
        |name: &str| args.only.is_empty() || args.only.iter().any(|part| name.contains(part.as_str()));
    if wanted("page") {
        pages(&mut report, common, rounds)?;
    }
    if wanted("barrier") {
        barriers(&mut report, common, rounds)?;
    }
    if wanted("dirty") {
        dirty(&mut report, common, rounds)?;
    }
    if wanted("lock") {
        locks(&mut report, common, rounds)?;
    }
    if wanted("stream") {
        stream(&mut report, common, rounds)?;
    }
    if wanted("sor") {
        sor(&mut report, common, rounds)?;
    }
    if wanted("diff") {
        diff(&mut report, rounds);
    }
    if args.only.iter().any(|part| part == "time") {
        time(&mut report, common)?;
    }
    for part in &args.only {
        s5::run(&mut report, common, rounds, part)?;
    }
    for program in &PROGRAMS {
        if args.only.iter().any(|part| part == "auto" || part.strip_prefix("auto-") == Some(program.name)) {
            auto(&mut report, common, rounds, program)?;
        }
    }
    report.finish(common.json.as_deref())
}

fn pages(report: &mut Report, common: &Common, rounds: usize) -> Result<()> {
    let count = common.pick(4000, 100).to_string();
    // Two ranks have a CPU each to spin on; three have not.
    let ways = [
        ("hlrc, spinning", 2, "hlrc", SPIN, 1, Some(2.2)),
        ("hlrc, blocking", 2, "hlrc", Duration::ZERO, 1, Some(2.2)),
        ("sc, spinning", 2, "sc", SPIN, 1, None),
        ("sc over a third rank, blocking", 3, "sc", Duration::ZERO, 2, Some(3.2)),
    ];
    for ((name, ranks, protocol, spin, home, reach), way) in
        ways.into_iter().flat_map(|one| Way::BOTH.map(|way| (one, way)))
    {
        let arguments = vec![count.clone(), rounds.to_string(), home.to_string()];
        let samples = Run { ranks, protocol, spin, way, experiment: "page", arguments }.measure()?;
        let name = &format!("{name}{}", way.words());
        report.samples(&format!("remote page, {name}: p50"), "us", get(&samples, "page")?);
        report.samples(&format!("raw request and reply of 4 KiB, {name}: p50"), "us", get(&samples, "raw")?);
        report.ratio(
            &format!("remote page / raw, {name}"),
            get(&samples, "page")?,
            get(&samples, "raw")?,
            reach.map(Reach::AtMost),
        );
        if let Some(floor) = samples.get("floor") {
            report.samples(&format!("floor of a remote page, {name}: p50"), "us", floor);
            report.ratio(
                &format!("floor of a remote page / raw, {name}"),
                floor,
                get(&samples, "raw")?,
                None,
            );
            report.ratio(&format!("remote page / floor, {name}"), get(&samples, "page")?, floor, None);
        }
        raw_memory(report, &samples, "page", &format!("of 4 KiB, {name}"), "remote page")?;
    }
    report.note(
        "floor of a remote page: a thread that reads one event, asks the raw other end for 4 KiB and \
         copies them in, page by page, and does nothing else",
    );
    Ok(())
}

fn barriers(report: &mut Report, common: &Common, rounds: usize) -> Result<()> {
    for ((ranks, argo), way) in ARGO_BARRIER_US.into_iter().flat_map(|one| Way::BOTH.map(|way| (one, way))) {
        // Over TCP more ranks than CPUs cannot spin; through memory they look, and let the others run in
        // between.
        let spin = if ranks == 2 || way == Way::SharedMemory { SPIN } else { Duration::ZERO };
        let arguments = vec![common.pick(500, 20).to_string(), rounds.to_string()];
        let samples =
            Run { ranks, protocol: "hlrc", spin, way, experiment: "barrier", arguments }.measure()?;
        let barrier = get(&samples, "barrier")?;
        let name = format!("{ranks}{}", way.words());
        report.samples(&format!("barrier of {name}: p50"), "us", barrier);
        report.samples(&format!("raw round trip over TCP next to {name}: p50"), "us", get(&samples, "raw")?);
        // Within a machine ArgoDSM's is the reference, between machines the round trip.
        let (trips, times) = match way {
            Way::Tcp => (Some(Reach::AtMost(1.5)), None),
            Way::SharedMemory => (None, Some(Reach::AtMost(1.0))),
        };
        report.ratio(
            &format!("barrier of {name} / raw round trip over TCP"),
            barrier,
            get(&samples, "raw")?,
            trips,
        );
        if let Some(plain) = samples.get("plain") {
            // The least that so many processes need on so many CPUs.
            report.samples(&format!("plain messages for a barrier of {name}: p50"), "us", plain);
            report.ratio(&format!("barrier of {name} / plain messages for one"), barrier, plain, None);
        }
        raw_memory(report, &samples, "barrier", &format!("next to {name}"), "barrier")?;
        report.ratio(
            &format!("barrier of {name} / ArgoDSM's {argo} us"),
            barrier,
            &vec![argo; barrier.len()],
            times,
        );
    }
    Ok(())
}

fn dirty(report: &mut Report, common: &Common, rounds: usize) -> Result<()> {
    report.note(
        "dirty pages: a word of each, or all, is written away from its home, by one rank or by each of four; \
         the homes' copies are checked after the barrier; through shared memory",
    );
    let measure = |pages: usize, words: usize| {
        let arguments = [pages, words, common.pick(20, 3), rounds].iter().map(usize::to_string).collect();
        let way = Way::SharedMemory;
        Run { ranks: 4, protocol: "hlrc", spin: Duration::ZERO, way, experiment: "dirty", arguments }
            .measure()
    };
    const BY: [(&str, &str); 2] = [("one", "by one rank"), ("each", "by each rank")];
    let whole = measure(1024, 512)?;
    for (way, by) in BY {
        let ms: Vec<f64> = get(&whole, way)?.iter().map(|us| us / 1e3).collect();
        let name = format!("ms for a barrier after 1024 wholly dirty pages {by}");
        report.ratio(&name, &ms, &vec![1.0; ms.len()], (way == "one").then_some(Reach::AtMost(5.0)));
    }
    for (count, argo) in ARGO_DIRTY_US {
        let samples = measure(count, 1)?;
        for (way, by) in BY {
            let barrier = get(&samples, way)?;
            report.samples(&format!("barrier after {count} dirty pages {by}"), "us", barrier);
            let name = format!("ArgoDSM's {argo} us / barrier after {count} dirty pages {by}");
            report.ratio(&name, &vec![argo; barrier.len()], barrier, Some(Reach::AtLeast(5.0)));
        }
    }
    Ok(())
}

fn locks(report: &mut Report, common: &Common, rounds: usize) -> Result<()> {
    for ((path, protocol), way) in
        [("forward", "hlrc"), ("central", "ibec")].into_iter().flat_map(|one| Way::BOTH.map(|way| (one, way)))
    {
        let arguments = vec![common.pick(1000, 50).to_string(), rounds.to_string()];
        let samples = Run { ranks: 2, protocol, spin: SPIN, way, experiment: "lock", arguments }.measure()?;
        let is_forward = path == "forward";
        let path = &format!("{path}{}", way.words());
        let lock = get(&samples, "lock")?;
        report.samples(&format!("remote lock, {path}: p50"), "us", lock);
        report.samples(
            &format!("raw round trip over TCP next to it, {path}: p50"),
            "us",
            get(&samples, "raw")?,
        );
        report.ratio(
            &format!("remote lock, {path} / raw round trip over TCP"),
            lock,
            get(&samples, "raw")?,
            Some(Reach::AtMost(1.2)),
        );
        raw_memory(report, &samples, "lock", &format!("next to it, {path}"), "remote lock")?;
        let again = get(&samples, "again")?;
        report.samples(&format!("the same lock again, {path}: p50"), "us", again);
        let messages = get(&samples, "messages")?;
        // Central locks belong to their manager; only forwarded ones stay with their last holder.
        let reach = is_forward.then_some(Reach::AtMost(0.0));
        report.ratio(
            &format!("messages for the same lock again, {path}"),
            messages,
            &vec![1.0; messages.len()],
            reach,
        );
    }
    Ok(())
}

fn stream(report: &mut Report, common: &Common, rounds: usize) -> Result<()> {
    for (page_bytes, way) in [4096, 65536].into_iter().flat_map(|one| Way::BOTH.map(|way| (one, way))) {
        let arguments =
            vec![common.pick(256, 8).to_string(), rounds.min(3).to_string(), page_bytes.to_string()];
        let samples =
            Run { ranks: 2, protocol: "hlrc", spin: SPIN, way, experiment: "stream", arguments }.measure()?;
        let (ours, raw) = (get(&samples, "stream")?, get(&samples, "raw")?);
        let name = format!("{} KiB pages{}", page_bytes >> 10, way.words());
        report.samples(&format!("256 MiB read in order, {name}"), "GB/s", ours);
        report.samples(&format!("plain TCP stream next to it, {name}"), "GB/s", raw);
        report.ratio(
            &format!("read in order / ArgoDSM's {ARGO_STREAM_GB} GB/s, {name}"),
            ours,
            &vec![ARGO_STREAM_GB; ours.len()],
            Some(Reach::AtLeast(4.0)),
        );
        report.ratio(&format!("read in order / plain TCP stream, {name}"), ours, raw, None);
    }
    Ok(())
}

fn sor(report: &mut Report, common: &Common, rounds: usize) -> Result<()> {
    let sizes = common.pick(["1024", "1536", "200"], ["64", "256", "10"]);
    for protocol in ["hlrc", "sc"] {
        let (mut parallel, mut sequential) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let line: Value = example("sor", &sizes, protocol, "--json=")?;
            parallel.push(seconds(&line, "parallel_s")?);
            sequential.push(seconds(&line, "sequential_s")?);
        }
        let name = format!("SOR {}, {protocol}", sizes.join(" "));
        report.samples(&format!("{name}: sequentially"), "s", &sequential);
        report.samples(&format!("{name}: by two ranks"), "s", &parallel);
        // ArgoDSM: 1.19.
        report.ratio(
            &format!("{name}: sequentially / by two ranks (ArgoDSM: 1.19)"),
            &sequential,
            &parallel,
            Some(Reach::AtLeast(1.6)),
        );
    }
    Ok(())
}

/// A program under each protocol in turns; `auto` against the best of the others.
fn auto(report: &mut Report, common: &Common, rounds: usize, program: &Program) -> Result<()> {
    let mut times: BTreeMap<ProtocolKind, Vec<f64>> = BTreeMap::new();
    for _ in 0..rounds {
        for &protocol in program.protocols {
            let line: Value = example(program.name, small(common), protocol.name(), "--json=")?;
            times.entry(protocol).or_default().push(seconds(&line, "parallel_s")? * 1e3);
        }
    }
    let mut best: Option<(ProtocolKind, f64)> = None;
    for (&protocol, samples) in &times {
        let parameters =
            json!({ "experiment": "auto", "program": program.name, "protocol": protocol.name() });
        let median =
            report.series(&format!("{}, {}", program.name, protocol.name()), "ms", parameters, samples);
        if protocol != ProtocolKind::Auto && best.is_none_or(|(_, least)| median < least) {
            best = Some((protocol, median));
        }
    }
    let (best, _) = best.context("no protocol but auto")?;
    let name = format!("{}: auto / {}, the best of the others", program.name, best.name());
    report.ratio(&name, &times[&ProtocolKind::Auto], &times[&best], Some(Reach::AtMost(1.05)));
    Ok(())
}

fn diff(report: &mut Report, rounds: usize) {
    const CALLS: u32 = 20_000;
    let old = random_bytes(3, 4096);
    let mut one = old.clone();
    one[2000..2008].iter_mut().for_each(|byte| *byte ^= 0xff);
    for (name, new, bytes) in [("identical", &old, 0), ("one word", &one, 8)] {
        assert_eq!(Diff::between(new, &old).len(), bytes);
        let samples: Vec<f64> = (0..rounds)
            .map(|_| {
                let began = Instant::now();
                for _ in 0..CALLS {
                    black_box(Diff::between(black_box(new), black_box(&old)));
                }
                began.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
            })
            .collect();
        report.samples(&format!("diff of 4 KiB, {name}"), "ns", &samples);
        report.ratio(
            &format!("diff of 4 KiB, {name}, in units of 0.1 us"),
            &samples,
            &vec![100.0; samples.len()],
            Some(Reach::AtMost(1.0)),
        );
    }
}

/// S4's categories of each program under each protocol: seconds, as the mean of two ranks.
fn time(report: &mut Report, common: &Common) -> Result<()> {
    report
        .note("seconds of a rank, as the mean of two; computing holds what was lost to other processes, too");
    for program in &PROGRAMS {
        for protocol in program.protocols {
            let ranks: Vec<TimeReport> = example(program.name, small(common), protocol.name(), "--stats=")?;
            ensure!(ranks.len() == 2, "{} ranks of two say where their time went", ranks.len());
            let sent = ranks
                .iter()
                .flat_map(|rank| rank.sent.values())
                .fold((0, 0), |sum, kind| (sum.0 + kind.messages, sum.1 + kind.bytes));
            for (category, of) in TimeReport::CATEGORIES {
                let seconds = ranks.iter().map(of).sum::<f64>() / ranks.len() as f64;
                let parameters = json!({
                    "experiment": "time", "program": program.name, "protocol": protocol.name(),
                    "category": category,
                    "messages": sent.0, "bytes": sent.1,
                });
                report.series(
                    &format!("{}, {}: {category}", program.name, protocol.name()),
                    "s",
                    parameters,
                    &[seconds],
                );
            }
        }
    }
    Ok(())
}

/// Options of an example for small sizes, where these are wanted.
fn small(common: &Common) -> &'static [&'static str] {
    if common.quick { &["--small"] } else { &[] }
}

/// Runs an example by two ranks; what it, or the launcher, writes to a file. `to`: the option that names it.
fn example<T: serde::de::DeserializeOwned>(
    name: &str,
    arguments: &[&str],
    protocol: &str,
    to: &str,
) -> Result<T> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("written");
    let to = format!("{to}{}", file.display());
    let mut command = rampool()?;
    let me = command.get_program().to_owned();
    let (by_launcher, by_program) =
        if to.starts_with("--stats") { (Some(&to), None) } else { (None, Some(&to)) };
    command.args(["launch", "-n", "2", "--protocol", protocol]).args(by_launcher);
    command.arg(me).args(["example", name]).args(arguments).args(by_program);
    output(command)?;
    Ok(serde_json::from_str(&std::fs::read_to_string(&file)?)?)
}

fn seconds(line: &Value, name: &str) -> Result<f64> {
    line[name].as_f64().context("the program reports no time")
}

/// A request and reply over memory that two processes share, where that was measured: the least that two
/// processes need.
fn raw_memory(report: &mut Report, samples: &Samples, what: &str, next_to: &str, name: &str) -> Result<()> {
    let Some(raw) = samples.get("raw memory") else { return Ok(()) };
    report.samples(&format!("raw request and reply over memory {next_to}: p50"), "us", raw);
    report.ratio(&format!("{name} / raw over memory, {next_to}"), get(samples, what)?, raw, None);
    Ok(())
}

type Samples = BTreeMap<String, Vec<f64>>;

fn get<'a>(samples: &'a Samples, name: &str) -> Result<&'a [f64]> {
    samples.get(name).map(Vec::as_slice).with_context(|| format!("rank 0 reports no `{name}`"))
}

impl Run<'_> {
    fn measure(&self) -> Result<Samples> {
        let place = Place {
            host: "127.0.0.1",
            server_cpu: rampool_kernel::thread::allowed_cpus().last().copied(),
            namespace: None,
            key: None,
        };
        let peer = Service::raw_peer(&place, self.spin)?;
        let me = std::env::current_exe()?;
        let mut command = rampool()?;
        // Each rank looks for its CPU itself, and for the one of the raw other end.
        command
            .args(["launch", "-n", &self.ranks.to_string(), "--bind", "none", "--protocol", self.protocol])
            .arg(&me);
        command.args(["bench", "shared-rank", "--raw", &peer.address, self.experiment]).args(&self.arguments);
        command
            .env("RAMPOOL_SPIN_US", self.spin.as_micros().to_string())
            .env(SAME_HOST_VARIABLE, self.way.same_host().to_string());
        let text = output(command)?;
        serde_json::from_str(text.trim())
            .with_context(|| format!("rank 0 of `{}` printed {text:?}", self.experiment))
    }
}

/// What a command that must end well prints.
fn output(mut command: Command) -> Result<String> {
    command.stdin(Stdio::null()).stderr(Stdio::inherit()).env("RAMPOOL_DEADLINE_S", "60");
    before_exec(&mut command, None, None);
    let done = command.output()?;
    if !done.status.success() {
        bail!("a run of ranks ended with {}", done.status);
    }
    Ok(String::from_utf8(done.stdout)?)
}
