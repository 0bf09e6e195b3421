//! Programs at a quarter of their own peak: with the private store that `rampool run` uses by itself, and
//! with a server over loopback TCP (called `rampool`), compared with the same natively, and with kernel swap
//! on zram in the same budget.
//!
//! The server process is on this machine as well, but its memory stands for another machine's, and is not
//! part of the budget. Kernel swap keeps its compressed pages outside the budget, too. The content is random
//! and does not compress.

pub mod kernel_swap;
mod least;
pub mod map;
mod redis;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rampool_wire::units::ByteLen;
use serde_json::json;

use super::Common;
use super::report::{Reach, Report, short};
use super::service::{Place, Service};
use super::trial::{self, Lines, Outcome, Parts, Program};
use kernel_swap::KernelSwap;

/// Programs at a quarter of their memory, compared with native and kernel swap
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    parts: Parts,

    /// Local memory as a share of the program's own peak, in percent
    #[arg(long, default_value_t = 25)]
    local_percent: u64,

    /// Seconds after which a native run counts as "no end"; others have twice as long
    #[arg(long, default_value_t = 200, value_name = "S")]
    deadline_s: u64,

    /// Only programs whose name contains this; repeatable [default: all]
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,

    /// Leave kernel swap out
    #[arg(long)]
    no_swap: bool,
}

/// A way to run a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    Native,
    /// What `rampool run` does without a server.
    PrivateStore,
    /// So many servers over loopback TCP, and so many copies of each page.
    Servers(usize, u8),
    /// One server, and copies on a disk of this machine.
    Backup,
    KernelSwap,
}

impl Way {
    /// In ratios, and in a series.
    fn names(self) -> [&'static str; 2] {
        match self {
            Way::Native => ["native"; 2],
            Way::PrivateStore => ["private store"; 2],
            Way::Servers(1, _) => ["rampool"; 2],
            Way::Servers(_, 1) => ["one copy"; 2],
            Way::Servers(..) => ["two copies"; 2],
            Way::Backup => ["a backup", "rampool with a backup"],
            Way::KernelSwap => ["swap", "kernel swap on zram"],
        }
    }
}

const SERVER: Way = Way::Servers(1, 1);
/// The order tells what comes behind kernel swap, after which servers lend nothing for a moment.
const WAYS: [Way; 4] = [Way::Native, SERVER, Way::KernelSwap, Way::PrivateStore];

/// What programs are measured with.
pub struct Bench<'a> {
    pub common: &'a Common,
    pub ways: &'a [Way],
    /// Local memory as a share of the program's own peak, in percent.
    pub local_percent: u64,
    pub swap: Option<KernelSwap>,
    pub deadline: Duration,
}

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("programs", common.quick);
    report.note(format!(
        "local memory: {} % of each program's own peak; not pinned; outputs are compared with native ones; \
         rampool: with one server over loopback TCP",
        args.local_percent
    ));
    let swap = if args.no_swap { Err(anyhow::anyhow!("left out")) } else { KernelSwap::set_up() };
    if let Err(reason) = &swap {
        report.note(format!("kernel swap: {reason:#}"));
    }
    let deadline = Duration::from_secs(args.deadline_s);
    let bench = Bench { common, ways: &WAYS, local_percent: args.local_percent, swap: swap.ok(), deadline };
    let wanted = |name: &str| {
        args.only.is_empty()
            || args.only.iter().any(|part| name.to_lowercase().contains(&part.to_lowercase()))
    };

    for (sort, most) in [(Sort::Kilobyte, 4.0), (Sort::HundredBytes, 15.0)] {
        if wanted(sort.name()) {
            let (_lines, program) = sort.program(common)?;
            let against_native = Some(Reach::AtMost(most));
            bench.program(
                &mut report,
                &program,
                &Wanted { against_native, least: sort == Sort::Kilobyte, ..Wanted::default() },
            )?;
        }
    }
    if wanted(Sort::Kilobyte.name()) {
        report.note(
            "GNU sort: least: the native time, and what this kernel takes to copy in and to move out, one by \
             one, as many scattered pages of 4 KiB as came from the servers in the run before it: one \
             thread, 64 frames at a time, no network, no other thread, no decision. A pager that puts pages \
             in and out by userfaultfd and reads as many pays that part whatever else it does",
        );
    }
    if wanted(map::NAME) {
        let against_native = Some(Reach::AtMost(20.0));
        bench.program(
            &mut report,
            &map::program(common)?,
            &Wanted { against_native, ..Wanted::default() },
        )?;
    }
    let against_swap = Some(Reach::AtMost(0.5));
    let sqlite = args.parts.python(
        "SQLite, 1 M rows",
        "sqlite_work.py",
        &[common.pick("1000000", "60000"), common.pick("200000", "5000"), "1"],
    );
    for program in [columns(&args.parts, common), sqlite] {
        match program {
            Ok(program) if wanted(program.name) => {
                bench.program(&mut report, &program, &Wanted { against_swap, ..Wanted::default() })?;
            }
            Ok(_) => {}
            Err(reason) => report.note(format!("left out: {reason}")),
        }
    }
    if wanted("Redis GET") {
        redis::measure(&bench, &mut report).context("Redis")?;
    }
    report.finish(common.json.as_deref())
}

/// Which lines GNU sort sorts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sort {
    Kilobyte,
    HundredBytes,
}

impl Sort {
    pub fn name(self) -> &'static str {
        match self {
            Sort::Kilobyte => "GNU sort, 1 GB, lines of 1 kB",
            Sort::HundredBytes => "GNU sort, 1 GB, lines of 100 B",
        }
    }

    pub fn program(self, common: &Common) -> Result<(Lines, Program)> {
        let digits = if self == Sort::Kilobyte { 500..1500 } else { 99..100 };
        let lines = Lines::make(common.pick(1_000_000_000, 24_000_000), digits)?;
        let options = ["sort", "-S", "4G", "--parallel=2"].map(Into::into);
        let argv = options.into_iter().chain([lines.path.clone().into()]).collect();
        Ok((lines, Program { name: self.name(), argv }))
    }
}

/// NumPy reads columns in order, or why it cannot.
pub fn columns(parts: &Parts, common: &Common) -> Result<Program, String> {
    parts.python("NumPy column scan, 1 GiB", "numpy_work.py", &["columns", common.pick("1024", "48"), "1"])
}

/// Aims, and what is measured besides times.
#[derive(Clone, Copy, Default)]
pub struct Wanted {
    pub against_native: Option<Reach>,
    pub against_swap: Option<Reach>,
    /// What two copies may take of the time of one.
    pub two_copies: Option<Reach>,
    /// What one server and a disk may take of the time of one server.
    pub backup: Option<Reach>,
    /// Also what the kernel alone takes for the pages that came.
    pub least: bool,
}

impl Bench<'_> {
    fn local_bytes(&self, peak_bytes: u64) -> u64 {
        (peak_bytes * self.local_percent / 100).max(4 << 20) / 4096 * 4096
    }

    pub fn program(&self, report: &mut Report, program: &Program, wanted: &Wanted) -> Result<()> {
        let name = program.name;
        // The first run warms the page cache and says how large the program is.
        let first = trial::must(program.native(), self.deadline)?;
        let local = self.local_bytes(first.peak_bytes);
        report.note(format!("{name}: peak {}, local {}", mib(first.peak_bytes), mib(local)));
        let (mut times, mut least) = (vec![Vec::new(); self.ways.len()], Vec::new());
        for _ in 0..self.common.rounds(1, 1) {
            let mut native_s = f64::NAN;
            for (way, times) in self.ways.iter().zip(&mut times) {
                let counters = Counters::new();
                let Some(outcome) = self.outcome(*way, program, first.peak_bytes, &counters)? else {
                    continue;
                };
                match outcome {
                    Outcome::Done(trial) => {
                        trial.same_output(&first, name)?;
                        times.push(trial.wall_s);
                        if *way == Way::Native {
                            native_s = trial.wall_s;
                        } else if wanted.least && *way == SERVER {
                            let pages = counters.pages_that_came()?;
                            least.extend(least_s(report, name, pages, local).map(|s| native_s + s));
                        }
                    }
                    Outcome::Killed(signal) if *way == Way::KernelSwap => {
                        report.note(format!("{name}: with kernel swap it was ended by signal {signal}"));
                    }
                    Outcome::Killed(signal) => bail!("{name}, {}: ended by signal {signal}", way.names()[1]),
                    Outcome::NoEnd(seconds) => {
                        report.note(format!("{name}, {}: there was no end in {seconds} s", way.names()[1]));
                    }
                }
            }
        }
        self.tell(report, name, "s", &times);
        if !least.is_empty() {
            let parameters = json!({ "program": name, "what": "least", "local_percent": self.local_percent });
            report.series(&format!("{name}: least"), "s", parameters, &least);
        }
        self.ratios(report, name, &times, wanted);
        if !least.is_empty() {
            report.ratio(&format!("{name}: least / native"), &least, &times[0], None);
        }
        Ok(())
    }

    /// One run. None: kernel swap is not there.
    fn outcome(
        &self,
        way: Way,
        program: &Program,
        peak: u64,
        counters: &Counters,
    ) -> Result<Option<Outcome>> {
        match (way, &self.swap) {
            (Way::Native, _) => trial::run(program.native(), self.deadline),
            (Way::KernelSwap, None) => return Ok(None),
            (Way::KernelSwap, Some(swap)) => {
                swap.limit(self.local_bytes(peak))?.run(program.native(), self.deadline * 2)
            }
            (way, _) => {
                let (_servers, mut options) = self.under_rampool(way, peak)?;
                options.push(format!("--stats={}", counters.path.display()));
                trial::run(program.paged(&options)?, self.deadline * 2)
            }
        }
        .map(Some)
    }

    /// The servers of a way, and the options of `rampool run`.
    fn under_rampool(&self, way: Way, peak: u64) -> Result<(Vec<Service>, Vec<String>)> {
        let mut options = vec!["--local".to_owned(), self.local_bytes(peak).to_string()];
        let (count, more) = match way {
            Way::Servers(count, copies) => (count, ["--copies".to_owned(), copies.to_string()]),
            Way::Backup => (1, backup()?),
            _ => return Ok((Vec::new(), options)),
        };
        let servers: Vec<Service> = (0..count).map(|_| server_for(peak)).collect::<Result<_>>()?;
        options.extend(servers.iter().flat_map(|server| ["--server".into(), server.address.clone()]));
        options.extend(["--memory".into(), lease_for(peak)].into_iter().chain(more));
        Ok((servers, options))
    }

    /// The series of a program, for each way that has samples.
    fn tell(&self, report: &mut Report, name: &str, unit: &str, times: &[Vec<f64>]) {
        for (way, times) in self.ways.iter().zip(times).filter(|(_, times)| !times.is_empty()) {
            let [_, way] = way.names();
            let parameters = json!({ "program": name, "what": way, "local_percent": self.local_percent });
            report.series(&format!("{name}: {way}"), unit, parameters, times);
        }
    }

    /// Of each way and the native time, of rampool and kernel swap, of two copies and one; as far
    /// as they ended in each round.
    fn ratios(&self, report: &mut Report, name: &str, times: &[Vec<f64>], wanted: &Wanted) {
        let of = |way| self.ways.iter().position(|one| *one == way).map(|at| &times[at]);
        let against = |way| if way == Way::KernelSwap { None } else { wanted.against_native };
        let mut pairs: Vec<_> = self.ways[1..].iter().map(|way| (*way, Way::Native, against(*way))).collect();
        pairs.extend([SERVER, Way::PrivateStore].map(|way| (way, Way::KernelSwap, wanted.against_swap)));
        pairs.push((Way::Servers(2, 2), Way::Servers(2, 1), wanted.two_copies));
        pairs.push((Way::Backup, SERVER, wanted.backup));
        for (a, b, reach) in pairs {
            if let (Some(ours), Some(theirs)) = (of(a), of(b))
                && !ours.is_empty()
                && ours.len() == theirs.len()
            {
                let figure = format!("{name}: {} / {}", a.names()[0], b.names()[0]);
                report.ratio(&figure, ours, theirs, reach);
            }
        }
    }
}

/// What the kernel alone takes for so many pages, in seconds.
fn least_s(report: &mut Report, name: &str, pages: u64, local: u64) -> Option<f64> {
    match least::seconds(pages, local) {
        Ok(seconds) => {
            report.note(format!(
                "{name}: {pages} pages came from the servers; the kernel alone took {seconds:.2} s for them"
            ));
            Some(seconds)
        }
        Err(reason) => {
            report.note(format!("{name}: no least: {reason:#}"));
            None
        }
    }
}

/// Where a run writes its counters; removed when dropped.
struct Counters {
    path: PathBuf,
}

impl Counters {
    fn new() -> Self {
        Self { path: std::env::temp_dir().join(format!("rampool-bench-{}.stats.json", std::process::id())) }
    }

    /// How many pages came from the servers, in all processes of the run.
    fn pages_that_came(&self) -> Result<u64> {
        let run: serde_json::Value = serde_json::from_slice(&std::fs::read(&self.path)?)?;
        let processes = run["processes"].as_array().context("a summary names its processes")?;
        let count = |process: &serde_json::Value, name: &str| {
            process[name].as_u64().with_context(|| format!("a summary has {name}"))
        };
        processes
            .iter()
            .map(|process| Ok(count(process, "demand_pages")? + count(process, "prefetched_pages")?))
            .sum()
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Room for every process that a program may become.
fn server_for(peak_bytes: u64) -> Result<Service> {
    let place = Place { host: "127.0.0.1", server_cpu: None, namespace: None, key: None };
    Service::memory_server(&place, peak_bytes * 3 + (512 << 20), Duration::from_micros(100))
}

/// Copies on the disk that this binary is on.
pub fn backup() -> Result<[String; 2]> {
    let binary = std::env::current_exe()?;
    let directory = binary.parent().context("a file is in a directory")?;
    Ok(["--backup".into(), directory.display().to_string()])
}

fn lease_for(peak_bytes: u64) -> String {
    (ByteLen(peak_bytes * 5 / 2 + (256 << 20)).0 >> 20 << 20).to_string()
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", short(bytes as f64 / 1_048_576.0))
}
