//! How accurate `rampool predict` is: programs traced over loopback, predicted for a slower link, and run on
//! that link. On request S4's own experiment: its programs on four of its nodes, over its networks.
//!
//! The link adds its rate and burst, as it was made, and the additional time of the least raw round trip;
//! everything else comes from the trace. Two ranks, one at either end.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rampool_net::transport::{SAME_HOST_VARIABLE, SameHost};
use rampool_parallel::PROGRAMS;
use rampool_shared::environment::variable;
use serde_json::json;

use super::Common;
use super::link::{Link, Rate};
use super::peer::RawStream;
use super::ranks;
use super::report::{Reach, Report, median};
use super::service::{KeyFile, Place, Service, before_exec, rampool};
use crate::predict::additive::additive;
use crate::predict::network::{Bucket, Network};
use crate::predict::recording::Recording;
use crate::predict::replay::{Machine, replay};

/// Parallel programs predicted for a slower link, compared with the same programs on that link
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Links to measure (needs root); repeatable [default: 100m and 1g]
    #[arg(long, value_name = "RATE")]
    link: Vec<Rate>,

    /// Only predict for the papers' machines: two and four nodes of 75 MHz
    #[arg(long, conflicts_with = "link")]
    papers: bool,

    /// Only programs whose name contains this; repeatable [default: those of the papers]
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
}

/// Longer than a round trip on any of the links.
const SPIN: Duration = Duration::from_millis(2);
const SIZES: [u64; 4] = [64, 1024, 4096, 16384];
/// The papers' programs.
const DEFAULT: [&str; 5] = ["sor", "fft", "lu", "ocean", "water"];

pub fn run(args: &Args) -> Result<i32> {
    let mut report = Report::start("predict", args.common.quick);
    report.note(
        "two ranks, each on a CPU of its own; recorded over loopback, predicted for a link between two \
         network namespaces, and run there; answers are verified",
    );
    report.note(
        "a link is its rate, its token bucket's burst, packets of 1448 bytes with 66 of headers, and \
        half of what a raw round trip of 64 B takes longer",
    );
    let links = if args.papers {
        Vec::new()
    } else if args.link.is_empty() {
        vec![Rate::HundredMbit, Rate::OneGbit]
    } else {
        args.link.clone()
    };
    let dir = tempdir()?;
    let done = links.into_iter().try_for_each(|rate| {
        // A namespace of its own for each link: the thread that made it is in it.
        std::thread::scope(|scope| {
            scope.spawn(|| one_link(&mut report, args, rate, &dir)).join().expect("the benchmark's thread")
        })
    });
    let done = done.and_then(|()| if args.papers { papers(&mut report, args, &dir) } else { Ok(()) });
    let _ = std::fs::remove_dir_all(&dir);
    done?;
    report.finish(args.common.json.as_deref())
}

fn tempdir() -> Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("rampool-bench-predict-{}", std::process::id()));
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

/// One program under one protocol.
struct Cell<'a> {
    program: &'a str,
    protocol: &'a str,
    quick: bool,
    key: &'a Path,
}

/// How far predictions were from what was measured: of each cell, and of each run over loopback itself.
#[derive(Default)]
struct Errors {
    replayed: Vec<f64>,
    additive: Vec<f64>,
    own: Vec<f64>,
    /// Pairs of protocols whose order is clear in the measurement, and those that the replay has so.
    pairs: usize,
    right: usize,
}

impl Errors {
    /// A program under all protocols: replayed, and measured.
    fn rank(&mut self, found: &[(f64, f64)]) {
        for (at, a) in found.iter().enumerate() {
            for b in &found[at + 1..] {
                if (a.1 / b.1).max(b.1 / a.1) > 1.1 {
                    self.pairs += 1;
                    self.right += usize::from((a.0 < b.0) == (a.1 < b.1));
                }
            }
        }
    }

    fn report(&self, report: &mut Report, link: &str) {
        let all = [
            ("error of the replay", &self.replayed),
            ("error of the replay of each run over loopback, which it was fitted to", &self.own),
            ("error of the additive method", &self.additive),
        ];
        for (what, errors) in all {
            report.samples(&format!("{link}: {what}"), "", errors);
        }
        let reach = Some(Reach::AtLeast(0.9));
        for (method, errors, reach) in [("replay", &self.replayed, reach), ("additive", &self.additive, None)]
        {
            let within = errors.iter().filter(|error| **error <= 0.15).count() as f64 / errors.len() as f64;
            report.ratio(&format!("{link}: share of cells within 15 %, {method}"), &[within], &[1.0], reach);
        }
        report.note(format!(
            "{link}: of {} pairs of protocols that differ by more than 10 %, the replay has {} in the right \
             order",
            self.pairs, self.right
        ));
    }
}

fn one_link(report: &mut Report, args: &Args, rate: Rate, dir: &Path) -> Result<()> {
    let (link, key) = (Link::make(rate)?, KeyFile::make()?);
    let beyond = described(report, rate, &link)?;
    let mut errors = Errors::default();
    let is_wanted = |name: &str| match &args.only[..] {
        [] => DEFAULT.contains(&name),
        parts => parts.iter().any(|part| name.contains(part)),
    };
    for program in PROGRAMS.iter().filter(|program| is_wanted(program.name)) {
        let mut found = Vec::new();
        for protocol in program.protocols {
            let (program, protocol) = (program.name, protocol.name());
            let cell = Cell { program, protocol, quick: args.common.quick, key: &key.path };
            let (mut replayed, mut added, mut measured) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..args.common.rounds(5, 1) {
                let recording = cell.record(dir)?;
                let recorded = Network::recorded(&recording).context("a run of two ranks sends messages")?;
                let again_us = replay(&recording, &recorded, Machine::SAME)?.elapsed_us();
                errors.own.push((again_us / recording.elapsed_us() - 1.0).abs());
                let network = recorded.over(&beyond);
                replayed.push(replay(&recording, &network, Machine::SAME)?.elapsed_us() / 1e3);
                added.push(additive(&recording, &network, Machine::SAME) / 1e3);
                measured.push(cell.measure(&link, dir)? * 1e3);
            }
            for (what, samples) in [("replayed", &replayed), ("additive", &added), ("measured", &measured)] {
                let parameters = json!({
                    "experiment": "predict", "what": what, "link": rate.name(), "program": program,
                    "protocol": protocol,
                });
                let name = format!("{}, {program}, {protocol}: {what}", rate.name());
                report.series(&name, "ms", parameters, samples);
            }
            let (ours, theirs) = (median(&replayed), median(&measured));
            errors.replayed.push((ours / theirs - 1.0).abs());
            errors.additive.push((median(&added) / theirs - 1.0).abs());
            found.push((ours, theirs));
        }
        errors.rank(&found);
    }
    ensure!(!errors.replayed.is_empty(), "no program has that name");
    errors.report(report, rate.name());
    Ok(())
}

/// A link, as its raw round trips show it.
fn described(report: &mut Report, rate: Rate, link: &Link) -> Result<Network> {
    let (loopback, there) = (round_trips("127.0.0.1", None)?, round_trips(Link::HOST, Some(&link.there))?);
    let beyond = as_network(rate, (there[0] - loopback[0]).max(0.0) / 2.0);
    let rounded = |times: &[f64]| times.iter().map(|us| us.round()).collect::<Vec<_>>();
    let both = SIZES.into_iter().zip(&loopback);
    let modelled: Vec<f64> = both.map(|(bytes, &here)| again_and_again_us(&beyond, bytes, here)).collect();
    report.note(format!(
        "{}: raw round trips of {SIZES:?} bytes take {:?} us there, {:?} us over loopback; the link so \
         described has them take {:?} us",
        rate.name(),
        rounded(&there),
        rounded(&loopback),
        rounded(&modelled),
    ));
    Ok(beyond)
}

/// What is known of the link: TCP's packets with the headers that its token bucket counts.
fn as_network(rate: Rate, latency_us: f64) -> Network {
    Network {
        packet_bytes: 1448.0,
        header_bytes: 66.0,
        burst_bytes: rate.burst_bytes().into(),
        ..Network::line(rate.name(), latency_us, 1e-3 / rate.line_gb())
    }
}

/// What a round trip with an answer of so many bytes takes on a link, one after the other, so that its burst
/// is used up. `here_us`: without the link.
fn again_and_again_us(link: &Network, bytes: u64, here_us: f64) -> f64 {
    let (mut bucket, mut at_us, mut last_us) = (Bucket::default(), 0.0, 0.0);
    for _ in 0..100 {
        let began_us = at_us;
        let answered_us =
            bucket.pass(at_us + here_us / 2.0 + link.latency_us, link.cost(bytes).wire_us, link.burst_us());
        at_us = answered_us + here_us / 2.0 + link.latency_us;
        last_us = at_us - began_us;
    }
    last_us
}

/// S4's programs, each with the slowdown of computing on a node of 75 MHz. It is estimated from the speed of
/// such a processor (about 10 million operations a second where memory is the limit, 20 where it is not),
/// because the paper does not say how long its programs take on one node.
const PAPERS: [(&str, f64); 4] = [("fft", 100.0), ("lu", 300.0), ("ocean", 100.0), ("water", 300.0)];
/// The same for the protocol's software and the kernel's part of a fault, which profit little from what has
/// made processors faster since.
const PAPERS_SOFTWARE: f64 = 30.0;

/// Two and four ranks of each program, recorded here and predicted for S4's nodes and networks. AURC is hlrc
/// whose updates cost no CPU time.
fn papers(report: &mut Report, args: &Args, dir: &Path) -> Result<()> {
    let slower = PAPERS.map(|(program, times)| format!("{program} {times}")).join(", ");
    report.note(format!(
        "papers: 2 and 4 ranks recorded over loopback on this machine, undisturbed steps; computing takes as \
         many times as long ({slower}), the protocol's software \
         {PAPERS_SOFTWARE} times; pages of 8 KiB, as the paper's"
    ));
    for (program, slower) in PAPERS {
        if !args.only.is_empty() && !args.only.iter().any(|part| program.contains(part.as_str())) {
            continue;
        }
        for nodes in [2, 4] {
            let mut recordings = BTreeMap::<_, Vec<(Recording, f64)>>::new();
            for _ in 0..args.common.rounds(3, 1) {
                for protocol in ["sc", "lrc", "hlrc"] {
                    let recorded = recorded_alone(nodes, program, protocol, args.common.quick, dir)?;
                    recordings.entry(protocol).or_default().push(recorded);
                }
            }
            speed_ups(report, nodes, (program, slower), &recordings)?;
        }
    }
    transposes(report, args, dir)
}

/// S4's figure 11, by ranks and pages: the read faults of a rank in each of the FFT's three transposes.
fn transposes(report: &mut Report, args: &Args, dir: &Path) -> Result<()> {
    let stats = dir.join("stats");
    for (nodes, page, protocol) in [2, 4]
        .into_iter()
        .flat_map(|nodes| ["4K", "8K", "16K", "64K"].map(|page| (nodes, page)))
        .flat_map(|(nodes, page)| ["lrc", "hlrc"].map(|protocol| (nodes, page, protocol)))
    {
        let mut command = launch(nodes, protocol, page)?;
        command.arg(format!("--stats={}", stats.display()));
        example(command, "fft", args.common.quick, None)?;
        let ranks: Vec<serde_json::Value> = serde_json::from_str(&std::fs::read_to_string(&stats)?)?;
        let of = |rank: &serde_json::Value| rank["counts"]["read faults"].as_f64().map(|count| count / 3.0);
        let found: Vec<f64> = ranks.iter().map(of).collect::<Option<_>>().context("no rank counts faults")?;
        let what = format!("{nodes} nodes, pages of {page}, {protocol}: read faults of a transpose");
        let parameters = json!({
            "experiment": "transposes", "nodes": nodes, "page": page, "protocol": protocol,
        });
        report.series(&what, "", parameters, &found);
    }
    Ok(())
}

/// The launcher for some ranks on this machine, which talk over TCP.
fn launch(nodes: u32, protocol: &str, page: &str) -> Result<Command> {
    let mut command = rampool()?;
    command.args(["launch", "-n", &nodes.to_string(), "--protocol", protocol, "--page-size", page]);
    // What a trace is to be fitted to is a network.
    command.env(SAME_HOST_VARIABLE, SameHost::Socket.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).env("RAMPOOL_DEADLINE_S", "60");
    before_exec(&mut command, None, None);
    Ok(command)
}

/// Runs an example by a launcher.
fn example(mut command: Command, program: &str, quick: bool, times: Option<&Path>) -> Result<()> {
    let me = command.get_program().to_owned();
    command.arg(me).args(["example", program]).args(quick.then_some("--small"));
    times.map(|times| command.arg("--json").arg(times));
    let status = command.status()?;
    ensure!(status.success(), "{program} ended with {status}: {command:?}");
    Ok(())
}

/// What a program's recordings become on each of the networks, and where messages cost nothing.
fn speed_ups(
    report: &mut Report,
    nodes: u32,
    (program, slower): (&str, f64),
    recordings: &BTreeMap<&str, Vec<(Recording, f64)>>,
) -> Result<()> {
    let named =
        ["eth100-1999", "loh", "loh-hb"].map(Network::named).into_iter().collect::<Result<Vec<_>>>()?;
    for on in named.into_iter().chain([Network::line("free", 0.0, 1e-9)]) {
        for (protocol, name, updates_by_hardware) in
            [("sc", "sc", false), ("lrc", "lrc", false), ("hlrc", "hlrc", false), ("hlrc", "aurc", true)]
        {
            let machine = Machine { slower, software_slower: PAPERS_SOFTWARE, updates_by_hardware };
            let (mut found, mut times_s) = (Vec::new(), Vec::new());
            for (recording, alone_us) in &recordings[protocol] {
                let took_us = replay(recording, &on, machine)?.elapsed_us();
                found.push(alone_us * slower / took_us);
                times_s.push(took_us / 1e6);
            }
            let series = [("papers", "speed-up", "", found), ("networks", "time", "s", times_s)];
            for (experiment, what, unit, samples) in series {
                let parameters = json!({
                    "experiment": experiment, "nodes": nodes, "program": program, "protocol": name,
                    "network": on.name,
                });
                let what = format!("{nodes} nodes, {}, {program}, {name}: {what}", on.name);
                report.series(&what, unit, parameters, &samples);
            }
        }
    }
    Ok(())
}

/// The trace of ranks on this machine, without time spent waiting for a CPU; and the CPU time of one
/// alone in the same run, in microseconds, because computing in the trace is CPU time, too.
fn recorded_alone(
    nodes: u32,
    program: &str,
    protocol: &str,
    quick: bool,
    dir: &Path,
) -> Result<(Recording, f64)> {
    let (trace, times) = (dir.join("trace"), dir.join("times"));
    let mut command = launch(nodes, protocol, "8K")?;
    command.arg("--trace").arg(&trace);
    example(command, program, quick, Some(&times))?;
    let line: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&times)?)?;
    let alone_s = line["sequential_cpu_s"].as_f64().context("the program reports no time")?;
    Ok((Recording::read(&trace)?.undisturbed(), alone_s * 1e6))
}

/// The median of raw round trips with answers of these sizes.
fn round_trips(host: &str, namespace: Option<&File>) -> Result<Vec<f64>> {
    let cpu = rampool_kernel::thread::allowed_cpus().last().copied();
    let peer = Service::raw_peer(&Place { host, server_cpu: cpu, namespace, key: None }, SPIN)?;
    let mut raw = RawStream::connect(&peer.address, SPIN)?;
    let mut medians = Vec::new();
    for bytes in SIZES {
        let mut buffer = vec![0; usize::try_from(bytes)?];
        let mut times = Vec::new();
        for _ in 0..300 {
            let began = Instant::now();
            raw.request(bytes)?;
            raw.read_exactly(&mut buffer)?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        medians.push(median(&times));
    }
    Ok(medians)
}

impl Cell<'_> {
    /// Runs it as two ranks over loopback, and reads its trace.
    fn record(&self, dir: &Path) -> Result<Recording> {
        let trace = dir.join("trace");
        if trace.exists() {
            std::fs::remove_dir_all(&trace)?;
        }
        std::fs::create_dir(&trace)?;
        self.run(None, |command| command.env(variable::TRACE_DIR, &trace))?;
        Recording::read(&trace)
            .with_context(|| format!("the trace of {} under {}", self.program, self.protocol))
    }

    /// Runs it as two ranks at the two ends of a link; the seconds of its parallel part. Without a trace:
    /// writing one takes time, which is not in a prediction.
    fn measure(&self, link: &Link, dir: &Path) -> Result<f64> {
        let times = dir.join("times");
        self.run(Some(link), |command| command.arg("--json").arg(&times))?;
        let line: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&times)?)?;
        line["parallel_s"].as_f64().context("the program reports no time")
    }

    fn run(&self, link: Option<&Link>, more: impl Fn(&mut Command) -> &mut Command) -> Result<()> {
        ranks::two(ranks::Where { link, apart: true }, self.protocol, self.key, self.program, || {
            let mut command = rampool()?;
            command.args(["example", self.program]).args(self.quick.then_some("--small"));
            more(&mut command);
            Ok(command)
        })?;
        Ok(())
    }
}
