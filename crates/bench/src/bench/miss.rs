//! What a miss costs a program that jumps about: random touches of 4 KiB pages in memory four times as large
//! as the budget, compared with kernel swap on zram in the same budget.
//!
//! ```text
//!   512 MiB, 128 MiB of them local --> private store   what `rampool run` uses without --server
//!                                  --> Unix socket     a memory server that is started for the round
//!                                  --> TCP             the same over loopback
//!                                  --> kernel swap     a memory cgroup of the same size, and zram
//! ```
//! Each way is measured once a round, first while the machine does nothing else, then while each of its CPUs
//! has a thread of another process that never waits ([`Others`]).
//!
//! The program is a process of this binary ([`Touch`]). It fills its memory, touches pages in random order,
//! reads a word of each and changes every second one, and checks each word that it reads; at the end it
//! checks every word. Only the touches are timed. The processor time is that of the program, of its agent, of
//! the server and of `rampool run` during the touches.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rampool_kernel::thread::allowed_cpus;
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

    /// Touches that are timed; a fourth of them while the CPUs are busy
    #[arg(long, default_value_t = 100_000)]
    touches: u64,

    /// Only ways whose name contains this: `private store`, `Unix socket`, `TCP`, `kernel swap`; repeatable
    /// [default: all]
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,

    /// Only content of this kind: `random` or `packs` [default: both]
    #[arg(long, value_name = "KIND")]
    content: Option<Content>,

    /// Only while the CPUs are `quiet` or `busy` with others [default: both]
    #[arg(long, value_name = "WHAT")]
    cpus: Option<Cpus>,
}

/// What the CPUs do besides.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cpus {
    Quiet,
    Busy,
}

impl Cpus {
    fn name(self) -> &'static str {
        match self {
            Cpus::Quiet => "quiet",
            Cpus::Busy => "busy",
        }
    }
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

const WAYS: [&str; 4] = ["private store", "Unix socket", "TCP", "kernel swap"];
const SWAP: usize = 3;
/// What a miss may take of kernel swap's, in time, by way; and in processor time, by any.
const REACH: [f64; 3] = [0.9, 1.1, 1.4];
const REACH_CPU: f64 = 1.5;
/// What a miss may take while the CPUs are busy, of what it takes otherwise.
const REACH_BUSY: f64 = 2.0;
/// A run that takes longer is worth no more waiting.
const DEADLINE: Duration = Duration::from_secs(120);

/// What a miss took in each round, in microseconds: time, and processor time.
type Samples = [Vec<f64>; 2];

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("miss", common.quick);
    let (memory, local) = (common.pick(args.memory.0, 32 << 20), common.pick(args.local.0, 8 << 20));
    let touching = Touching::new(memory, local);
    let touches = common.pick(args.touches, 4000);
    report.note(format!(
        "{} MiB in {} MiB, {touches} touches, a fourth of that while the CPUs are busy, every second one a \
         write; not pinned; a miss is a touch divided by the share of memory that is not local",
        memory >> 20,
        local >> 20,
    ));
    report.note("busy: each CPU has a thread of another process that never waits");
    let wanted = |way: &str| args.only.is_empty() || args.only.iter().any(|part| way.contains(part.as_str()));
    let swap = if wanted(WAYS[SWAP]) { KernelSwap::set_up() } else { Err(anyhow::anyhow!("not asked for")) };
    if let Err(reason) = &swap {
        report.note(format!("kernel swap: {reason:#}"));
    }
    for content in [Content::Random, Content::Packs] {
        if args.content.is_some_and(|only| only != content) {
            continue;
        }
        let mut found: [[Samples; WAYS.len()]; 2] = Default::default();
        for round in 0..common.rounds(5, 1) {
            for cpus in [Cpus::Quiet, Cpus::Busy] {
                // Busy rounds take longer, so there are fewer, unless a number is asked for.
                if args.cpus.is_some_and(|only| only != cpus)
                    || (cpus == Cpus::Busy && round >= common.rounds(3, 1))
                {
                    continue;
                }
                let touches = if cpus == Cpus::Busy { touches / 4 } else { touches };
                let _others = (cpus == Cpus::Busy).then(Others::start);
                for (way, name) in WAYS.iter().enumerate().filter(|(_, name)| wanted(name)) {
                    if way == SWAP && swap.is_err() {
                        continue;
                    }
                    let swap = swap.as_ref().ok();
                    let times =
                        touching.once(content, touches, way, swap).with_context(|| (*name).to_owned())?;
                    for (samples, time) in found[cpus as usize][way].iter_mut().zip(times) {
                        samples.push(time);
                    }
                }
            }
        }
        tell(&mut report, content, &found);
    }
    report.finish(common.json.as_deref())
}

/// The series and ratios of a content, by what the CPUs do besides, and by way.
fn tell(report: &mut Report, content: Content, found: &[[Samples; WAYS.len()]; 2]) {
    let name = content.name();
    for (cpus, found) in [Cpus::Quiet, Cpus::Busy].into_iter().zip(found) {
        for (way, samples) in WAYS.iter().zip(found) {
            for (what, samples) in ["wall", "CPU"].into_iter().zip(samples).filter(|(_, s)| !s.is_empty()) {
                let parameters = json!({ "content": name, "way": way, "what": what, "cpus": cpus.name() });
                report.series(
                    &format!("{name}, {}, {way}: a miss, {what}", cpus.name()),
                    "us",
                    parameters,
                    samples,
                );
            }
        }
        for (way, most) in REACH.into_iter().enumerate() {
            for (what, most) in [most, REACH_CPU].into_iter().enumerate() {
                let (ours, swaps) = (&found[way][what], &found[SWAP][what]);
                if !ours.is_empty() && !swaps.is_empty() {
                    let reach = (cpus == Cpus::Quiet).then_some(Reach::AtMost(most));
                    let what = ["wall", "CPU"][what];
                    let figure = format!("{name}, {}, {} / kernel swap, {what}", cpus.name(), WAYS[way]);
                    report.ratio(&figure, ours, swaps, reach);
                }
            }
        }
    }
    for (way, (quiet, busy)) in WAYS.iter().zip(found[0].iter().zip(&found[1])) {
        if !quiet[0].is_empty() && !busy[0].is_empty() {
            let reach = (*way != WAYS[SWAP]).then_some(Reach::AtMost(REACH_BUSY));
            report.ratio(&format!("{name}, {way}: busy / quiet, wall"), &busy[0], &quiet[0], reach);
        }
    }
}

/// The program and where it writes its times.
pub struct Touching {
    memory: u64,
    local: u64,
    times: Times,
}

impl Touching {
    pub fn new(memory: u64, local: u64) -> Self {
        Self { memory, local, times: Times::new() }
    }

    fn once(
        &self,
        content: Content,
        touches: u64,
        way: usize,
        swap: Option<&KernelSwap>,
    ) -> Result<[f64; 2]> {
        let socket = std::env::temp_dir().join(format!("rampool-bench-{}.sock", std::process::id()));
        let service = match way {
            1 => Some(self.server_at(&format!("unix:{}", socket.display()))?),
            2 => Some(self.server_at("127.0.0.1:0")?),
            _ => None,
        };
        match swap.filter(|_| way == SWAP) {
            Some(swap) => {
                let program = self.program(content, touches, &[])?;
                let outcome = swap.limit(self.local)?.run(program.native(), DEADLINE)?;
                self.read(outcome, touches)
            }
            None => self.paged(content, touches, service.as_slice(), &[]),
        }
    }

    /// A raw memory server, not pinned, with room for all of it.
    pub fn server_at(&self, listen: &str) -> Result<Service> {
        let place = Place { host: "127.0.0.1", server_cpu: None, namespace: None, key: None };
        Service::memory_server_at(&place, listen, self.memory * 2 + (64 << 20), Duration::from_micros(100))
    }

    /// What a miss takes with these servers, or with a private one if there are none.
    pub fn paged(
        &self,
        content: Content,
        touches: u64,
        servers: &[Service],
        options: &[&str],
    ) -> Result<[f64; 2]> {
        let mut words = vec!["--local".to_owned(), self.local.to_string()];
        words.extend(options.iter().map(ToString::to_string));
        for server in servers {
            words.extend(["--server".into(), server.address.clone()]);
        }
        if !servers.is_empty() {
            words.extend(["--memory".into(), (self.memory * 2).to_string()]);
        }
        let program = self.program(content, touches, servers)?;
        self.read(trial::run(program.paged(&words)?, DEADLINE)?, touches)
    }

    fn program(&self, content: Content, touches: u64, servers: &[Service]) -> Result<Program> {
        let mut argv = vec![std::env::current_exe()?.into(), "bench".into(), "touch".into()];
        argv.extend(
            ["--memory", &self.memory.to_string(), "--touches", &touches.to_string()].map(Into::into),
        );
        argv.extend(["--content", content.name(), "--times"].map(Into::into));
        argv.push(self.times.path.clone().into());
        for server in servers {
            argv.extend(["--server-pid", &server.pid().to_string()].map(Into::into));
        }
        Ok(Program { name: "touch", argv })
    }

    fn read(&self, outcome: Outcome, touches: u64) -> Result<[f64; 2]> {
        match outcome {
            Outcome::Done(_) => {
                // Each page is as likely as any other.
                let misses = touches as f64 * (1.0 - self.local as f64 / self.memory as f64).max(0.01);
                Ok(self.times.read()?.map(|ns| ns / 1e3 / misses))
            }
            Outcome::Killed(signal) => bail!("ended by signal {signal}"),
            Outcome::NoEnd(seconds) => bail!("no end in {seconds} s"),
        }
    }
}

/// Threads of this process, one for each CPU, that never wait; ended when dropped.
struct Others {
    end: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Others {
    fn start() -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let start = |_| {
            let end = end.clone();
            std::thread::spawn(move || while !end.load(Ordering::Relaxed) {})
        };
        let threads = allowed_cpus().into_iter().map(start).collect();
        Self { end, threads }
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("spinning does not panic");
        }
    }
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
    /// The servers, where the program's parent has not started them.
    #[arg(long)]
    server_pid: Vec<u32>,
}

const WORDS: u64 = (OS_PAGE_BYTES / 8) as u64;

pub fn touch(args: &Touch) -> Result<i32> {
    let pages = args.memory.0 / OS_PAGE_BYTES as u64;
    let mut memory: Vec<u64> = Vec::with_capacity(usize::try_from(pages * WORDS)?);
    memory.extend((0..pages * WORDS).map(|index| args.content.word(index)));
    // How often the first word of each page was changed.
    let mut changes = vec![0u16; usize::try_from(pages)?];
    let first = |page: u64, changes: u16| args.content.word(page * WORDS) ^ u64::from(changes);
    let watched = processes(&args.server_pid)?;
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

/// This process, the servers, its parent if that is `rampool run`, and what else that has started: the
/// private store.
fn processes(servers: &[u32]) -> Result<Vec<u32>> {
    let parent = std::os::unix::process::parent_id();
    let text = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    let mut all: Vec<u32> = vec![std::process::id()];
    if fs::read_to_string(format!("/proc/{parent}/comm")).is_ok_and(|name| name.trim() == "rampool") {
        all.push(parent);
    }
    let is_store = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("serve"))
    };
    all.extend(text.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(is_store));
    all.extend(servers);
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// The processor time of these processes, with that of threads that have ended.
fn cpu_ns(processes: &[u32]) -> Result<u64> {
    let mut sum = 0;
    for pid in processes {
        let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: the place lives across the call.
        let errno = unsafe { libc::clock_getcpuclockid(pid.cast_signed(), &raw mut clock) };
        // SAFETY: as above.
        if errno != 0 || unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
            bail!("process {pid}, which is measured, has no processor time: has it ended?");
        }
        sum += u64::try_from(time.tv_sec)? * 1_000_000_000 + u64::try_from(time.tv_nsec)?;
    }
    Ok(sum)
}
