//! Programs at a quarter of their own peak, compared with the same natively, and with kernel swap on zram in
//! the same budget.
//!
//! The server process is on this machine as well, but its memory stands for another machine's, and is not
//! part of the budget. Kernel swap keeps its compressed pages outside the budget, too. The content is random
//! and does not compress.

pub mod kernel_swap;
mod least;
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

    /// Seconds after which a run counts as "no end"
    #[arg(long, default_value_t = 120, value_name = "S")]
    deadline_s: u64,

    /// Only programs whose name contains this; repeatable [default: all]
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,

    /// Leave kernel swap out
    #[arg(long)]
    no_swap: bool,
}

/// What a program was measured with.
struct Bench<'a> {
    args: &'a Args,
    swap: Option<KernelSwap>,
    deadline: Duration,
}

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("programs", common.quick);
    report.note(format!(
        "local memory: {} % of each program's own peak; not pinned; outputs are compared with native ones",
        args.local_percent
    ));
    let swap = if args.no_swap {
        None
    } else {
        match KernelSwap::set_up() {
            Ok(swap) => Some(swap),
            Err(reason) => {
                report.note(format!("kernel swap is not available here: {reason:#}"));
                None
            }
        }
    };
    let bench = Bench { args, swap, deadline: Duration::from_secs(args.deadline_s) };
    let wanted = |name: &str| {
        args.only.is_empty()
            || args.only.iter().any(|part| name.to_lowercase().contains(&part.to_lowercase()))
    };

    if wanted("GNU sort") {
        let size = common.pick(1_000_000_000, 24_000_000);
        for (name, digits) in
            [("GNU sort, 1 GB, lines of 1 kB", 500..1500), ("GNU sort, 1 GB, lines of 48 B", 16..80)]
        {
            let lines = Lines::make(size, digits)?;
            let argv = ["sort", "-S", "4G", "--parallel=2"]
                .into_iter()
                .map(Into::into)
                .chain([lines.path.clone().into()])
                .collect();
            bench.program(
                &mut report,
                &Program { name, argv },
                Wanted { against_native: Some(Reach::AtMost(4.0)), against_swap: None, least: true },
            )?;
        }
        report.note(
            "GNU sort: least: the native time, and what this kernel takes to copy in and to move out, one by one, as many scattered pages of 4 KiB as came from the servers in the run before it: one thread, 64 frames at a time, no network, no other thread, no decision. A pager that puts pages in and out by userfaultfd and reads as many pays that part whatever else it does",
        );
    }
    let twice = Some(Reach::AtMost(0.5));
    for (program, against_swap) in [
        (
            args.parts.python(
                "NumPy column scan, 1 GiB",
                "numpy_work.py",
                &["columns", common.pick("1024", "48"), "1"],
            ),
            twice,
        ),
        (
            args.parts.python(
                "SQLite, 1 M rows",
                "sqlite_work.py",
                &[common.pick("1000000", "60000"), common.pick("200000", "5000"), "1"],
            ),
            twice,
        ),
    ] {
        match program {
            Ok(program) if wanted(program.name) => {
                bench.program(
                    &mut report,
                    &program,
                    Wanted { against_native: None, against_swap, least: false },
                )?;
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

/// The extra measurements of a program, besides its times.
#[derive(Clone, Copy)]
struct Wanted {
    against_native: Option<Reach>,
    against_swap: Option<Reach>,
    /// Also what the kernel alone takes for the pages that came.
    least: bool,
}

impl Bench<'_> {
    fn local_bytes(&self, peak_bytes: u64) -> u64 {
        (peak_bytes * self.args.local_percent / 100).max(4 << 20) / 4096 * 4096
    }

    fn program(&self, report: &mut Report, program: &Program, wanted: Wanted) -> Result<()> {
        let name = program.name;
        // The first run warms the page cache and says how large the program is.
        let first = trial::must(program.native(), self.deadline)?;
        let local = self.local_bytes(first.peak_bytes);
        report.note(format!("{name}: peak {}, local {}", mib(first.peak_bytes), mib(local)));
        let server = server_for(first.peak_bytes)?;
        let counters = Counters::new();
        let options = [
            "--local".into(),
            local.to_string(),
            "--server".into(),
            server.address.clone(),
            "--memory".into(),
            lease_for(first.peak_bytes),
            format!("--stats={}", counters.path.display()),
        ];
        let (mut native, mut paged, mut swapped, mut least) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.args.common.rounds(1, 1) {
            let native_s = trial::must(program.native(), self.deadline)?.wall_s;
            native.push(native_s);
            match trial::run(program.paged(&options)?, self.deadline * 2)? {
                Outcome::Done(trial) => {
                    trial.same_output(&first, name)?;
                    paged.push(trial.wall_s);
                    if wanted.least {
                        let pages = counters.pages_that_came()?;
                        match least::seconds(pages, local) {
                            Ok(kernel_s) => {
                                report.note(format!(
                                    "{name}: {pages} pages came from the servers; the kernel alone took {kernel_s:.2} s for them"
                                ));
                                least.push(native_s + kernel_s);
                            }
                            Err(reason) => report.note(format!("{name}: no least: {reason:#}")),
                        }
                    }
                }
                Outcome::Killed(signal) => bail!("{name}: under rampool it was ended by signal {signal}"),
                Outcome::NoEnd(seconds) => {
                    report.note(format!("{name}: with rampool there was no end in {seconds} s"))
                }
            }
            if let Some(swap) = &self.swap {
                match swap.limit(local)?.run(program.native(), self.deadline)? {
                    Outcome::Done(trial) => {
                        trial.same_output(&first, name)?;
                        swapped.push(trial.wall_s);
                    }
                    Outcome::Killed(signal) => {
                        report.note(format!("{name}: with kernel swap it was ended by signal {signal}"))
                    }
                    Outcome::NoEnd(seconds) => {
                        report.note(format!("{name}: with kernel swap there was no end in {seconds} s"))
                    }
                }
            }
        }
        tell(report, name, "s", self.args.local_percent, [&native, &paged, &swapped]);
        if !paged.is_empty() {
            report.ratio(&format!("{name}: rampool / native"), &paged, &native, wanted.against_native);
        }
        if !least.is_empty() {
            let parameters =
                json!({ "program": name, "what": "least", "local_percent": self.args.local_percent });
            report.series(&format!("{name}: least"), "s", parameters, &least);
            report.ratio(&format!("{name}: least / native"), &least, &native, None);
        }
        if !swapped.is_empty() {
            report.ratio(&format!("{name}: swap / native"), &swapped, &native, None);
        }
        if !paged.is_empty() && !swapped.is_empty() {
            report.ratio(&format!("{name}: rampool / swap"), &paged, &swapped, wanted.against_swap);
        }
        Ok(())
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

/// The series of a program, for each way that has samples.
fn tell(report: &mut Report, name: &str, unit: &str, percent: u64, samples: [&[f64]; 3]) {
    for (way, samples) in ["native", "rampool", "kernel swap on zram"].into_iter().zip(samples) {
        if !samples.is_empty() {
            report.series(
                &format!("{name}: {way}"),
                unit,
                json!({ "program": name, "what": way, "local_percent": percent }),
                samples,
            );
        }
    }
}

/// Room for every process that a program may become.
fn server_for(peak_bytes: u64) -> Result<Service> {
    let place = Place { host: "127.0.0.1", server_cpu: None, namespace: None, key: None };
    Service::memory_server(&place, peak_bytes * 3 + (512 << 20), Duration::from_micros(100))
}

fn lease_for(peak_bytes: u64) -> String {
    (ByteLen(peak_bytes * 5 / 2 + (256 << 20)).0 >> 20 << 20).to_string()
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", short(bytes as f64 / 1_048_576.0))
}
