//! One rank of an experiment. Rank 0 prints the samples, as one JSON object of lists.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rampool_kernel::thread::{allowed_cpus, pin_to_cpu};
use rampool_net::transport::Means;
use rampool_parallel::{Program, Report, Ways};
use rampool_shared::{AllocOptions, Homes, LockPath, Managers, Rank, Region, Shared, SharedConfig};

use super::Samples;
use crate::bench::fault::floor;
use crate::bench::peer::{self, REQUEST_BYTES, RawMemory, RawStream, Wanted};
use crate::bench::report::median;
use crate::bench::service::{Place, Service};
use crate::bench::workload::{permutation, word};

/// One rank of a benchmark of shared memory
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The raw other end, for experiments that measure one
    #[arg(long)]
    raw: Option<String>,

    experiment: String,

    sizes: Vec<usize>,
}

const PAGE: usize = 4096;
const SEED: u64 = 6;

struct Bench {
    shared: Shared,
    /// Rank 0's.
    raw: Option<RawStream>,
    /// The CPU of raw other ends.
    last_cpu: Option<usize>,
    samples: Samples,
}

pub fn run(args: &Args) -> Result<i32> {
    // Each rank with its two threads on one CPU, as a node would be; threads started later inherit it.
    let cpus = allowed_cpus();
    let rank: usize = std::env::var("RAMPOOL_RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0);
    if cpus.len() > 1 {
        pin_to_cpu(cpus[rank % cpus.len()]).map_err(std::io::Error::from_raw_os_error)?;
    }
    let mut config = SharedConfig::from_env()?;
    match (args.experiment.as_str(), &args.sizes[..]) {
        ("several-locks", &[_, _, spread, path, _]) => {
            if spread == 0 {
                config.managers = Managers::At(Rank(0));
            }
            config.lock_path = lock_path(path);
        }
        ("one-lock", &[_, path, _]) | ("water" | "sor", &[_, _, path, ..]) => {
            config.lock_path = lock_path(path)
        }
        _ => {}
    }
    let shared = Shared::join(config)?;
    let raw = args
        .raw
        .as_ref()
        .filter(|_| shared.rank() == 0)
        .map(|raw| RawStream::connect(raw, shared.config().spin))
        .transpose()?;
    let mut bench = Bench { shared, raw, last_cpu: cpus.last().copied(), samples: BTreeMap::new() };
    match (args.experiment.as_str(), &args.sizes[..]) {
        ("page", &[count, rounds, home]) => bench.pages(count, rounds, home)?,
        ("barrier", &[count, rounds]) => bench.barriers(count, rounds)?,
        ("dirty", &[pages, words, count, rounds]) => bench.dirty((pages, words), count, rounds)?,
        ("lock", &[count, rounds]) => bench.locks(count, rounds)?,
        ("stream", &[mib, rounds, page_bytes]) => bench.stream(mib, rounds, page_bytes)?,
        ("several-locks", &[sections, own, spread, _, apart_us]) => {
            bench.several_locks(sections, own, spread == 1, pause(apart_us)?)?
        }
        ("one-lock", &[count, _, apart_us]) => bench.one_lock(count, pause(apart_us)?)?,
        (name @ ("sor" | "water"), [keep, spread, _, sizes @ ..]) => {
            let homes = if *spread == 1 { Homes::Cyclic } else { Homes::Blocked };
            bench.program(name, Ways { homes, keep: *keep == 1 }, sizes)?;
        }
        (other, sizes) => bail!("unknown experiment {other} with {} sizes", sizes.len()),
    }
    bench.shared.barrier(99)?;
    bench.shared.close()?;
    if bench.shared.rank() == 0 {
        println!("{}", serde_json::to_string(&bench.samples)?);
    }
    Ok(0)
}

/// The `at`-th word of a region.
///
/// Each experiment makes sure that a barrier lies between a write and its readers.
fn read(region: Region, at: usize) -> u64 {
    // SAFETY: in the region, aligned; see above.
    unsafe { region.at::<u64>(at).read_volatile() }
}

fn write(region: Region, at: usize, value: u64) {
    // SAFETY: in the region, aligned; see `read`.
    unsafe { region.at::<u64>(at).write_volatile(value) };
}

/// A barrier of nothing but messages: each says to the first that it is there, and the first to all that they
/// are.
fn meet(streams: &mut [RawStream], is_first: bool) -> Result<()> {
    let mut word = [0; REQUEST_BYTES];
    for stream in &mut *streams {
        if !is_first {
            stream.write_exactly(&word)?;
        }
        stream.read_exactly(&mut word)?;
    }
    for stream in streams.iter_mut().filter(|_| is_first) {
        stream.write_exactly(&word)?;
    }
    Ok(())
}

/// The locks' old scheme, the new one, or the default.
fn lock_path(path: usize) -> Option<LockPath> {
    [Some(LockPath::Forward), Some(LockPath::Central)].get(path).copied().flatten()
}

fn pause(us: usize) -> Result<Duration> {
    Ok(Duration::from_micros(us.try_into()?))
}

fn us(took: Duration) -> f64 {
    took.as_secs_f64() * 1e6
}

impl Bench {
    fn add(&mut self, name: &str, value: f64) {
        self.samples.entry(name.to_owned()).or_default().push(value);
    }

    /// Rank 0: the median time of this many raw requests for `bytes` bytes. If ranks share memory and spin,
    /// also over memory that only the two have, spinning.
    fn raw(&mut self, count: usize, bytes: usize) -> Result<()> {
        let raw = self.raw.as_mut().context("rank 0 has the raw connection")?;
        let (content, mut buffer, mut times) = (peer::content(), vec![0; bytes], Vec::with_capacity(count));
        for _ in 0..count {
            let began = Instant::now();
            raw.request(bytes as u64)?;
            raw.read_exactly(&mut buffer)?;
            times.push(us(began.elapsed()));
        }
        ensure!(buffer == content[..bytes], "WRONG CONTENT from the raw peer");
        let p50 = median(&times);
        self.add("raw", p50);
        let shared = &self.shared;
        if shared.config().spin.is_zero() || !shared.stats().connections.contains_key(Means::RINGS.name()) {
            return Ok(());
        }
        // It never sleeps, so it is there for no longer than it is needed.
        let (memory, file) = RawMemory::create()?;
        let place = Place { host: "127.0.0.1", server_cpu: self.last_cpu, namespace: None, key: None };
        let service = Service::raw_memory_peer(&place, file.as_fd())?;
        times.clear();
        for _ in 0..count {
            let began = Instant::now();
            memory.get(&mut buffer)?;
            times.push(us(began.elapsed()));
        }
        drop(service);
        ensure!(buffer == content[..bytes], "WRONG CONTENT from the raw peer over memory");
        let p50 = median(&times);
        self.add("raw memory", p50);
        Ok(())
    }

    /// Rank 0, of two connected over TCP: the least that a page served by a thread of its own costs, for as
    /// many pages in the order of that round.
    fn floor(&mut self, round: u64, count: usize) -> Result<()> {
        if self.shared.ranks() > 2 || self.shared.stats().connections.contains_key(Means::RINGS.name()) {
            return Ok(());
        }
        let raw = self.raw.as_mut().context("rank 0 has the raw connection")?;
        let copies = (count * PAGE).div_ceil(peer::CONTENT_BYTES) as u64;
        let wanted = permutation(round, count).into_iter().map(|page| Wanted {
            from: (page * PAGE) as u64,
            copies,
            ..Wanted::first(PAGE as u64)
        });
        let times: Vec<f64> =
            floor::by_another_thread(raw, &wanted.collect::<Vec<_>>())?.into_iter().map(us).collect();
        let p50 = median(&times);
        self.add("floor", p50);
        Ok(())
    }

    /// Rank 1 writes a page's worth each; rank 0 reads them in random order, each for the first time since.
    /// Round 0 warms up.
    fn pages(&mut self, count: usize, rounds: usize, home: usize) -> Result<()> {
        let options = AllocOptions::new().homes(Homes::At(Rank(u16::try_from(home)?)));
        let region = self.shared.alloc(count * PAGE, options)?;
        for round in 0..=rounds {
            if self.shared.rank() == 1 {
                for at in 0..count * PAGE / 8 {
                    write(region, at, word(SEED + round as u64, at as u64));
                }
            }
            self.shared.barrier(1)?;
            if self.shared.rank() == 0 {
                let mut times = Vec::with_capacity(count);
                for page in permutation(round as u64, count) {
                    let at = page * PAGE / 8;
                    let began = Instant::now();
                    let first = read(region, at);
                    times.push(us(began.elapsed()));
                    ensure!(
                        first == word(SEED + round as u64, at as u64),
                        "WRONG CONTENT: page {page} begins with {first:#x}"
                    );
                }
                if round > 0 {
                    self.add("page", median(&times));
                    self.raw(count, PAGE)?;
                    self.floor(round as u64, count)?;
                }
                for at in 0..count * PAGE / 8 {
                    let value = read(region, at);
                    ensure!(
                        value == word(SEED + round as u64, at as u64),
                        "WRONG CONTENT: word {at} is {value:#x}"
                    );
                }
            }
            self.shared.barrier(2)?;
        }
        Ok(())
    }

    fn barriers(&mut self, count: usize, rounds: usize) -> Result<()> {
        let mut plain = self.plain()?;
        for round in 0..=rounds {
            self.shared.barrier(1)?;
            let mut times = Vec::with_capacity(count);
            for _ in 0..count {
                let began = Instant::now();
                self.shared.barrier(2)?;
                times.push(us(began.elapsed()));
            }
            if self.shared.rank() == 0 && round > 0 {
                self.add("barrier", median(&times));
                self.raw(count, 64)?;
            }
            if let Some(streams) = &mut plain {
                self.shared.barrier(1)?;
                times.clear();
                for _ in 0..count {
                    let began = Instant::now();
                    meet(streams, self.shared.rank() == 0)?;
                    times.push(us(began.elapsed()));
                }
                if self.shared.rank() == 0 && round > 0 {
                    self.add("plain", median(&times));
                }
            }
        }
        Ok(())
    }

    /// Connections of these processes for a barrier of nothing but messages: rank 0's to all others, theirs
    /// to it. `None` where ranks share memory.
    fn plain(&self) -> Result<Option<Vec<RawStream>>> {
        let shared = &self.shared;
        if shared.stats().connections.contains_key(Means::RINGS.name()) {
            return Ok(None);
        }
        let port = shared.alloc(PAGE, AllocOptions::new())?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        if shared.rank() == 0 {
            write(port, 0, listener.local_addr()?.port().into());
        }
        shared.barrier(1)?;
        let spin = shared.config().spin;
        let streams = if shared.rank() == 0 {
            (1..shared.ranks())
                .map(|_| Ok(RawStream::new(listener.accept()?.0, spin)?))
                .collect::<Result<_>>()?
        } else {
            vec![RawStream::connect(&format!("127.0.0.1:{}", read(port, 0)), spin)?]
        };
        Ok(Some(streams))
    }

    /// Ranks write some words of each of `pages` pages whose home is the next rank, and meet. The time of the
    /// last rank to arrive counts.
    fn dirty(&mut self, (pages, words): (usize, usize), count: usize, rounds: usize) -> Result<()> {
        let ranks = usize::from(self.shared.ranks());
        let mut regions = Vec::new();
        for rank in 0..self.shared.ranks() {
            let home = Rank((rank + 1) % self.shared.ranks());
            regions.push(self.shared.alloc(pages * PAGE, AllocOptions::new().homes(Homes::At(home)))?);
        }
        // Each rank's times, in nanoseconds, on pages of its own.
        let width = (count * 8).next_multiple_of(PAGE) / 8;
        let times = self.shared.alloc(ranks * width * 8, AllocOptions::new().homes(Homes::Blocked))?;
        let (me, before) =
            (usize::from(self.shared.rank()), (usize::from(self.shared.rank()) + ranks - 1) % ranks);
        for (way, writers) in [("one", 1..2), ("each", 0..ranks)] {
            for round in 0..=rounds {
                let mut own = Vec::with_capacity(count);
                for step in 0..count {
                    let written = |page: usize| {
                        let slot = (round * count + step) % (PAGE / 8);
                        (0..words).map(move |number| page * PAGE / 8 + (slot + number) % (PAGE / 8))
                    };
                    let value = |page: usize| word(SEED, ((round * count + step) * pages + page) as u64);
                    if writers.contains(&me) {
                        for page in 0..pages {
                            written(page).for_each(|at| write(regions[me], at, value(page)));
                        }
                    }
                    let began = Instant::now();
                    self.shared.barrier(2)?;
                    own.push(u64::try_from(began.elapsed().as_nanos())?);
                    if writers.contains(&before) {
                        for page in 0..pages {
                            let wrong = written(page)
                                .map(|at| read(regions[before], at))
                                .find(|&at| at != value(page));
                            ensure!(
                                wrong.is_none(),
                                "WRONG CONTENT: page {page} of rank {before} has {wrong:#x?} in step {step}"
                            );
                        }
                    }
                    self.shared.barrier(3)?;
                }
                for (step, time) in own.into_iter().enumerate() {
                    write(times, me * width + step, time);
                }
                self.shared.barrier(4)?;
                if me == 0 && round > 0 {
                    let last = |step: usize| {
                        (0..ranks).map(|rank| read(times, rank * width + step)).min().unwrap_or(0)
                    };
                    let all: Vec<f64> = (0..count).map(|step| last(step) as f64 / 1e3).collect();
                    self.add(way, median(&all));
                }
                self.shared.barrier(5)?;
            }
        }
        Ok(())
    }

    /// Rank 0 takes locks that rank 1 manages and that were never taken, and then each once more.
    fn locks(&mut self, count: usize, rounds: usize) -> Result<()> {
        if self.shared.rank() == 0 {
            let mut next = 1_u64;
            for round in 0..=rounds {
                let (mut first, mut again, mut messages) = (Vec::new(), Vec::new(), 0);
                for _ in 0..count {
                    let began = Instant::now();
                    self.shared.lock(next)?;
                    first.push(us(began.elapsed()));
                    self.shared.unlock(next)?;
                    let before = self.shared.stats().engine.messages;
                    let began = Instant::now();
                    self.shared.lock(next)?;
                    again.push(us(began.elapsed()));
                    self.shared.unlock(next)?;
                    messages += self.shared.stats().engine.messages - before;
                    next += 2;
                }
                if round > 0 {
                    self.add("lock", median(&first));
                    self.add("again", median(&again));
                    self.add("messages", messages as f64 / count as f64);
                    self.raw(count, 64)?;
                }
            }
        }
        Ok(())
    }

    /// S5, figures 2 and 3, table 3: ranks count, each under `own` locks in turn: all ranks under the same
    /// eight, or each two neighbours under one. `apart`: between a rank's critical sections, not counted.
    fn several_locks(&mut self, sections: usize, own: usize, spread: bool, apart: Duration) -> Result<()> {
        let homes = if spread { Homes::Cyclic } else { Homes::At(Rank(0)) };
        let ranks = usize::from(self.shared.ranks());
        let locks = own.max(ranks);
        let (counters, sums) = (
            self.shared.alloc(locks * PAGE, AllocOptions::new().homes(homes))?,
            self.shared.alloc(3 * ranks * PAGE, AllocOptions::new())?,
        );
        let me = usize::from(self.shared.rank());
        self.shared.barrier(1)?;
        self.shared.start_measuring();
        let mut took = Duration::ZERO;
        for section in 0..sections {
            let lock = (me + section % own) % locks;
            let began = Instant::now();
            self.shared.lock(lock as u64)?;
            let at = lock * PAGE / 8;
            write(counters, at, read(counters, at) + 1);
            self.shared.unlock(lock as u64)?;
            took += began.elapsed();
            std::thread::sleep(apart);
        }
        self.shared.barrier(2)?;
        let sent = self.shared.stats().sent;
        let messages = sent.values().map(|kind| kind.messages).sum();
        let bytes = sent.values().map(|kind| kind.bytes).sum();
        for (which, total) in [messages, bytes, u64::try_from(took.as_nanos())?].into_iter().enumerate() {
            write(sums, (3 * me + which) * PAGE / 8, total);
        }
        self.shared.barrier(3)?;
        if me == 0 {
            let counted: u64 = (0..locks).map(|lock| read(counters, lock * PAGE / 8)).sum();
            ensure!(counted == (ranks * sections) as u64, "WRONG CONTENT: {counted} critical sections");
            let of = |which: usize| (0..ranks).map(move |rank| read(sums, (3 * rank + which) * PAGE / 8));
            let [messages, all, took] = [0, 1, 2].map(|which| of(which).sum::<u64>() as f64);
            self.add("messages", messages);
            self.add("bytes", all);
            self.add("first", bytes as f64);
            self.add("section", took / 1e3 / counted as f64);
        }
        Ok(())
    }

    /// S5, figure 1: ranks count under one lock; the time of a critical section, from before the lock to
    /// behind the unlock. `apart`: between a rank's critical sections, not counted.
    fn one_lock(&mut self, count: usize, apart: Duration) -> Result<()> {
        let counter = self.shared.alloc(PAGE, AllocOptions::new().homes(Homes::At(Rank(0))))?;
        self.shared.barrier(1)?;
        self.shared.start_measuring();
        let mut own = Duration::ZERO;
        for _ in 0..count {
            let began = Instant::now();
            self.shared.lock(1)?;
            write(counter, 0, read(counter, 0) + 1);
            self.shared.unlock(1)?;
            own += began.elapsed();
            std::thread::sleep(apart);
        }
        self.shared.barrier(2)?;
        let ranks = usize::from(self.shared.ranks());
        let times = self.shared.alloc(ranks * PAGE, AllocOptions::new())?;
        write(times, usize::from(self.shared.rank()) * PAGE / 8, u64::try_from(own.as_nanos())?);
        self.shared.barrier(3)?;
        if self.shared.rank() == 0 {
            let counted = read(counter, 0);
            ensure!(counted == (count * ranks) as u64, "WRONG CONTENT: {counted} critical sections");
            let all: u64 = (0..ranks).map(|rank| read(times, rank * PAGE / 8)).sum();
            self.add("section", all as f64 / 1e3 / (count * ranks) as f64);
            let acquires = self.shared.stats().engine;
            self.add("local", acquires.local_acquires as f64 / acquires.lock_acquires as f64);
        }
        Ok(())
    }

    /// S5, figures 4 and 5: a program, whose answer is checked.
    fn program(&mut self, name: &str, ways: Ways, sizes: &[usize]) -> Result<()> {
        let program = Program::find(name).context("there is no such program")?;
        let Report { parallel, sequential } = program.run(&self.shared, sizes, ways)?;
        for (name, took) in [
            ("alone", sequential.clock),
            ("parallel", parallel.clock),
            ("faults", parallel.write_faults),
            ("overhead", parallel.waits),
        ] {
            self.add(name, us(took) / 1e3);
        }
        Ok(())
    }

    /// Rank 1 writes, rank 0 reads all of it in order.
    fn stream(&mut self, mib: usize, rounds: usize, page_bytes: usize) -> Result<()> {
        let bytes = mib << 20;
        let options = AllocOptions::new().homes(Homes::At(Rank(1))).page_bytes(u32::try_from(page_bytes)?);
        let region = self.shared.alloc(bytes, options)?;
        for round in 0..=rounds {
            let value = |at: usize| (at as u64).wrapping_mul(round as u64 * 2 + 3);
            if self.shared.rank() == 1 {
                for at in 0..bytes / 8 {
                    write(region, at, value(at));
                }
            }
            self.shared.barrier(1)?;
            if self.shared.rank() == 0 {
                let began = Instant::now();
                // One word of every 64 bytes: the transfer is measured, not the reading.
                let sum = (0..bytes / 8).step_by(8).fold(0_u64, |sum, at| sum.wrapping_add(read(region, at)));
                let took = began.elapsed();
                ensure!(
                    sum == (0..bytes / 8).step_by(8).fold(0_u64, |sum, at| sum.wrapping_add(value(at))),
                    "WRONG CONTENT: the sum is {sum:#x}"
                );
                let raw = self.raw.as_mut().context("rank 0 has the raw connection")?;
                let mut buffer = vec![0; 1 << 20];
                let began = Instant::now();
                raw.request(bytes as u64)?;
                for _ in 0..mib {
                    raw.read_exactly(&mut buffer)?;
                }
                let raw_took = began.elapsed();
                if round > 0 {
                    self.add("stream", bytes as f64 / took.as_secs_f64() / 1e9);
                    self.add("raw", bytes as f64 / raw_took.as_secs_f64() / 1e9);
                }
            }
            self.shared.barrier(2)?;
        }
        Ok(())
    }
}
