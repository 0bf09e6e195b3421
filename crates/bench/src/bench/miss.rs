//! What a miss costs a program that jumps about: random touches of 4 KiB pages in memory four times as large
//! as the budget, compared with kernel swap on zram in the same budget.
//!
//! ```text
//!   512 MiB, 128 MiB of them local --> private store   what `rampool run` uses without --server
//!                                  --> Unix socket     a memory server that is started for the round
//!                                  --> kernel swap     a memory cgroup of the same size, and zram
//! ```
//! The program is a process of this binary ([`Touch`]). It fills its memory, touches pages in random order,
//! reads a word of each and changes every second one, and checks each word that it reads; at the end it checks
//! every word. Only the touches are timed. The processor time is that of the program, of its agent and of the
//! server during the touches.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rampool_wire::units::{ByteLen, OS_PAGE_BYTES};
use serde_json::json;

use super::Common;
use super::programs::kernel_swap::KernelSwap;
use super::report::{Reach, Report};
use super::service::{Place, Service};
use super::trial::{self, Outcome, Program};
use super::workload::word;

/// Random touches of pages that are away, compared with kernel swap
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Memory of the program, in bytes
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: ByteLen,

    /// Local memory, in bytes
    #[arg(long, default_value = "128M", value_name = "SIZE")]
    local: ByteLen,

    /// Touches that are timed
    #[arg(long, default_value_t = 200_000)]
    touches: u64,

    /// Only ways whose name contains this: `private store`, `Unix socket`, `kernel swap`; repeatable [default:
    /// all]
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,

    /// Only content of this kind: `random` or `packs` [default: both]
    #[arg(long, value_name = "KIND")]
    content: Option<Content>,
}

/// What the pages hold.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Does not compress.
    Random,
    /// Compresses to about a third.
    Packs,
}

impl Content {
    fn name(self) -> &'static str {
        match self {
            Content::Random => "random",
            Content::Packs => "packs",
        }
    }

    /// Word `index` of the memory before it is changed.
    fn word(self, index: u64) -> u64 {
        match self {
            Content::Packs if index % 8 > 1 => index / 512,
            _ => word(7, index),
        }
    }
}

const WAYS: [&str; 3] = ["private store", "Unix socket", "kernel swap"];
/// A run that takes longer is worth no more waiting.
const DEADLINE: Duration = Duration::from_secs(120);

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("miss", common.quick);
    let memory = common.pick(args.memory.0, 32 << 20);
    let local = common.pick(args.local.0, 8 << 20);
    let touches = common.pick(args.touches, 4000);
    // Each page is as likely as any other.
    let misses = touches as f64 * (1.0 - local as f64 / memory as f64).max(0.01);
    report.note(format!(
        "{} MiB in {} MiB, {touches} touches, every second one a write; not pinned; a miss is a touch divided by the share of memory that is not local",
        memory >> 20,
        local >> 20
    ));
    let wanted = |way: &str| args.only.is_empty() || args.only.iter().any(|part| way.contains(part.as_str()));
    let swap = if wanted(WAYS[2]) { KernelSwap::set_up() } else { Err(anyhow::anyhow!("not asked for")) };
    if let Err(reason) = &swap {
        report.note(format!("kernel swap: {reason:#}"));
    }
    let times = Times::new();
    for content in [Content::Random, Content::Packs] {
        if args.content.is_some_and(|only| only != content) {
            continue;
        }
        let (mut wall, mut cpu) = (vec![Vec::new(); WAYS.len()], vec![Vec::new(); WAYS.len()]);
        for _ in 0..common.rounds(5, 1) {
            for (way, name) in WAYS.iter().enumerate().filter(|(_, name)| wanted(name)) {
                let service = (way == 1).then(|| server_for(memory)).transpose()?;
                let program = touch_program(content, memory, touches, &times, service.as_ref())?;
                let mut options = vec!["--local".to_owned(), local.to_string()];
                let outcome = match way {
                    2 => match &swap {
                        Ok(swap) => swap.limit(local)?.run(program.native(), DEADLINE)?,
                        Err(_) => continue,
                    },
                    _ => {
                        if let Some(service) = &service {
                            options.extend(["--server".into(), service.address.clone()]);
                            options.extend(["--memory".into(), (memory * 2).to_string()]);
                        }
                        trial::run(program.paged(&options)?, DEADLINE)?
                    }
                };
                match outcome {
                    Outcome::Done(_) => {
                        let [wall_ns, cpu_ns] = times.read()?;
                        wall[way].push(wall_ns / 1e3 / misses);
                        cpu[way].push(cpu_ns / 1e3 / misses);
                    }
                    Outcome::Killed(signal) => bail!("{name}: ended by signal {signal}"),
                    Outcome::NoEnd(seconds) => bail!("{name}: no end in {seconds} s"),
                }
            }
        }
        tell(&mut report, content, [&wall, &cpu]);
    }
    report.finish(common.json.as_deref())
}

fn tell(report: &mut Report, content: Content, [wall, cpu]: [&[Vec<f64>]; 2]) {
    for (what, samples) in [("wall", wall), ("CPU", cpu)] {
        for (way, samples) in WAYS.iter().zip(samples).filter(|(_, samples)| !samples.is_empty()) {
            report.series(
                &format!("{}, {way}: a miss, {what}", content.name()),
                "us",
                json!({ "content": content.name(), "way": way, "what": what }),
                samples,
            );
        }
        for (way, most) in [(0, [1.0, 1.5]), (1, [0.9, 1.5])] {
            if !samples[way].is_empty() && !samples[2].is_empty() {
                report.ratio(
                    &format!("{}, {} / kernel swap, {what}", content.name(), WAYS[way]),
                    &samples[way],
                    &samples[2],
                    Some(Reach::AtMost(most[usize::from(what == "CPU")])),
                );
            }
        }
    }
}

/// A raw memory server at a Unix socket, not pinned.
fn server_for(memory: u64) -> Result<Service> {
    let place = Place { host: "127.0.0.1", server_cpu: None, namespace: None, key: None };
    let socket = std::env::temp_dir().join(format!("rampool-bench-{}.sock", std::process::id()));
    Service::memory_server_at(
        &place,
        &format!("unix:{}", socket.display()),
        memory * 2 + (64 << 20),
        Duration::from_micros(100),
    )
}

fn touch_program(
    content: Content,
    memory: u64,
    touches: u64,
    times: &Times,
    service: Option<&Service>,
) -> Result<Program> {
    let mut argv = vec![std::env::current_exe()?.into(), "bench".into(), "touch".into()];
    argv.extend(["--memory", &memory.to_string(), "--touches", &touches.to_string()].map(Into::into));
    argv.extend(["--content", content.name(), "--times"].map(Into::into));
    argv.push(times.path.clone().into());
    if let Some(service) = service {
        argv.extend(["--server-pid", &service.pid().to_string()].map(Into::into));
    }
    Ok(Program { name: "touch", argv })
}

/// Where the program writes its times; removed when dropped.
struct Times {
    path: PathBuf,
}

impl Times {
    fn new() -> Self {
        Self { path: std::env::temp_dir().join(format!("rampool-bench-{}.times", std::process::id())) }
    }

    /// Wall time and processor time of the touches, in nanoseconds.
    fn read(&self) -> Result<[f64; 2]> {
        let text = fs::read_to_string(&self.path).context("the program wrote no times")?;
        let mut numbers = text.split_whitespace().map(str::parse);
        let mut next = || numbers.next().context("a number is missing")?.context("not a number");
        Ok([next()?, next()?])
    }
}

impl Drop for Times {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The program that is measured.
#[derive(clap::Args, Debug)]
pub struct Touch {
    #[arg(long)]
    memory: ByteLen,
    #[arg(long)]
    touches: u64,
    #[arg(long)]
    content: Content,
    /// Where to write the times to.
    #[arg(long)]
    times: PathBuf,
    /// The server, where the program's parent has not started it.
    #[arg(long)]
    server_pid: Option<u32>,
}

const WORDS: u64 = (OS_PAGE_BYTES / 8) as u64;

pub fn touch(args: &Touch) -> Result<i32> {
    let pages = args.memory.0 / OS_PAGE_BYTES as u64;
    let mut memory: Vec<u64> = Vec::with_capacity(usize::try_from(pages * WORDS)?);
    memory.extend((0..pages * WORDS).map(|index| args.content.word(index)));
    // How often the first word of each page was changed.
    let mut changes = vec![0u16; usize::try_from(pages)?];
    let first = |page: u64, changes: u16| args.content.word(page * WORDS) ^ u64::from(changes);
    let watched = processes(args.server_pid)?;
    let (cpu_before, started) = (cpu_ns(&watched)?, Instant::now());
    for n in 0..args.touches {
        let (page, number) = (word(11, n) % pages, usize::try_from(word(11, n) % pages)?);
        let at = usize::try_from(page * WORDS)?;
        if memory[at] != first(page, changes[number]) {
            bail!("WRONG CONTENT: page {page} begins with {:#x}", memory[at]);
        }
        if n % 2 == 1 {
            changes[number] += 1;
            memory[at] = first(page, changes[number]);
        }
    }
    let (wall, cpu) = (started.elapsed(), cpu_ns(&watched)? - cpu_before);
    for (page, changes) in (0..pages).zip(&changes) {
        for index in page * WORDS..(page + 1) * WORDS {
            let should = if index == page * WORDS { first(page, *changes) } else { args.content.word(index) };
            let is = memory[usize::try_from(index)?];
            if is != should {
                bail!("WRONG CONTENT: word {index} is {is:#x} instead of {should:#x}");
            }
        }
    }
    fs::write(&args.times, format!("{} {cpu}\n", wall.as_nanos()))
        .with_context(|| format!("cannot write {}", args.times.display()))?;
    Ok(0)
}

/// This process, the server, and what else its parent has started: the private store.
fn processes(server: Option<u32>) -> Result<Vec<u32>> {
    let parent = std::os::unix::process::parent_id();
    let text = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    let mut all: Vec<u32> = vec![std::process::id()];
    let is_store = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("serve"))
    };
    all.extend(text.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(is_store));
    all.extend(server);
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// The processor time of all threads of these processes.
fn cpu_ns(processes: &[u32]) -> Result<u64> {
    let mut sum = 0;
    for pid in processes {
        for task in fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task"))? {
            let text = fs::read_to_string(task?.path().join("schedstat"))?;
            let ns: u64 = text.split_whitespace().next().context("no schedstat")?.parse()?;
            sum += ns;
        }
    }
    Ok(sum)
}
