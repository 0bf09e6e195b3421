//! A 4 KiB fault compared with a raw request and reply of the same sizes, over the same transport, with the
//! same way of waiting.

pub mod floor;

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::FromRawFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Common;
use super::peer::{self, RawStream, Wanted};
use super::report::{Reach, Report};
use super::service::{Paged, Place, Service, Words};
use super::workload::permutation;
use rampool_pager::fault::FaultModeChoice;
use rampool_pager::region::{PagedMemory, Region};
use rampool_pager::system_calls::Unhelped;

/// 4 KiB page faults, compared with raw requests and replies
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Measure in-thread faults, in a process that has librampool_agent_io.so, and print JSON
    #[arg(long, hide = true)]
    helped: bool,

    /// With --helped: the memory server's CPU [default: none]. The process itself inherits its own
    #[arg(long, hide = true)]
    server_cpu: Option<usize>,
}

const SEED: u64 = 1;
const PAGE_WORDS: usize = 512;
/// What system calls are given.
const COPIED_BYTES: usize = 8 << 20;
/// Longer than any wait of a round, shorter than a round: a side without a round sleeps.
const SPIN: Duration = Duration::from_millis(2);

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    if args.helped {
        let place = Place { host: "127.0.0.1", server_cpu: args.server_cpu, namespace: None, key: None };
        println!("{}", serde_json::to_string(&measure(&place, &HELPED, common)?)?);
        return Ok(0);
    }
    let place = Place::loopback();
    let mut report = Report::start("fault", common.quick);
    report.note(format!(
        "loopback TCP, one connection, no prefetch, clean victims, random order; {}",
        place.describe()
    ));
    report.note(
        "times are the median of a round's accesses that faulted, as the program sees them; every \
        page is compared afterwards",
    );
    report.note(
        "in-thread: each fault is served by the thread that meets it, and system calls on absent pages \
            fail (FaultModeChoice::InThread)",
    );
    report.note(
        "in-thread with system calls: the same in a process with librampool_agent_io.so, where \
        system calls on absent pages work; the raw client's own calls do not go through it",
    );
    report.note(
        "floor: a thread that reads one event (in-thread: that meets the fault, in its SIGBUS \
            handler), asks the raw peer for 4 KiB of as much memory and copies them in, page by page, and \
            does nothing else",
    );
    report.note(
        "of as much memory: the raw peer sends the pages that were faulted for, of as much memory as \
        the server has in pages of 2 MiB; otherwise it sends one page, again and again",
    );
    for way in &WAYS {
        let Measured { ours, raw, raw_of_many, floor, faults, absent } =
            if way.helped { measure_helped(&place, common)? } else { measure(&place, way, common)? };
        let Way { name: way, reach, .. } = *way;
        let parameters = |what: &str| json!({ "way": way, "what": what });
        report.series(&format!("{way}: 4 KiB fault, p50"), "us", parameters("fault"), &ours.p50);
        report.series(&format!("{way}: 4 KiB fault, p99"), "us", parameters("fault p99"), &ours.p99);
        report.series(&format!("{way}: raw request and reply, p50"), "us", parameters("raw"), &raw.p50);
        report.series(&format!("{way}: raw request and reply, p99"), "us", parameters("raw p99"), &raw.p99);
        report.series(
            &format!("{way}: raw request and reply of as much memory, p50"),
            "us",
            parameters("raw of as much memory"),
            &raw_of_many.p50,
        );
        report.ratio(&format!("{way}: fault / raw"), &ours.p50, &raw.p50, Some(Reach::AtMost(reach)));
        report.ratio(
            &format!("{way}: fault / raw of as much memory"),
            &ours.p50,
            &raw_of_many.p50,
            Some(Reach::AtMost(reach)),
        );
        report.series(&format!("{way}: floor, p50"), "us", parameters("floor"), &floor.p50);
        report.ratio(&format!("{way}: floor / raw"), &floor.p50, &raw.p50, None);
        report.note(format!("{faults} faults counted by the pager in the {way} rounds"));
        if absent > 0 {
            report.note(format!(
                "{way}: before that, write(2) and read(2) were given {absent} absent pages, \
                and every byte was compared"
            ));
        }
    }
    report.finish(common.json.as_deref())
}

/// A way to catch faults and to wait.
struct Way {
    name: &'static str,
    spin: Duration,
    fault_mode: FaultModeChoice,
    reach: f64,
    /// In a process that has `librampool_agent_io.so`: system calls on absent pages are seen to work first.
    helped: bool,
}

const HELPED: Way = Way {
    name: "in-thread with system calls, spinning",
    spin: SPIN,
    fault_mode: FaultModeChoice::InThread,
    reach: 2.0,
    helped: true,
};
const WAYS: [Way; 4] = [
    Way { name: "spinning", spin: SPIN, fault_mode: FaultModeChoice::Auto, reach: 2.0, helped: false },
    HELPED,
    Way {
        name: "in-thread, spinning",
        spin: SPIN,
        fault_mode: FaultModeChoice::InThread,
        reach: 1.6,
        helped: false,
    },
    Way {
        name: "blocking",
        spin: Duration::ZERO,
        fault_mode: FaultModeChoice::Auto,
        reach: 2.0,
        helped: false,
    },
];

/// The library stands before the C library's functions from a process's start on, so this is another process,
/// with the same binary.
fn measure_helped(place: &Place<'_>, common: &Common) -> Result<Measured> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["bench", "fault", "--helped"])
        .env("LD_PRELOAD", rampool_run::libraries::agent_io()?)
        .stderr(Stdio::inherit());
    if let Some(cpu) = place.server_cpu {
        command.args(["--server-cpu", &cpu.to_string()]);
    }
    if common.quick {
        command.arg("--quick");
    }
    if let Some(rounds) = common.rounds {
        command.args(["--rounds", &rounds.to_string()]);
    }
    let output = command.output().context("the process with librampool_agent_io.so")?;
    if !output.status.success() {
        bail!("the process with librampool_agent_io.so failed ({})", output.status);
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Passes absent pages to write(2), and reads their content back into absent pages by read(2); returns how
/// many were absent. `copy` was filled before the region, and so is paged out.
fn check_system_calls(memory: &PagedMemory, region: &Region, copy: &Region) -> Result<u64> {
    if !memory.serves_system_calls() {
        bail!("system calls on absent pages fail here: librampool_agent_io.so is not loaded, or too old");
    }
    let bytes = copy.len();
    // SAFETY: a constant, terminated name; the descriptor is new.
    let mut file = unsafe {
        let fd = libc::memfd_create(c"rampool-bench".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        File::from_raw_fd(fd)
    };
    let (from, to) = (absent_pages(region, bytes)?, absent_pages(copy, bytes)?);
    let pages = bytes as u64 / 4096;
    if from.min(to) < pages / 2 {
        bail!("only {from} and {to} of {pages} pages are absent: system calls on them would show nothing");
    }
    // SAFETY: the first bytes of the region, which nothing writes.
    let wrote = file
        .write(unsafe { std::slice::from_raw_parts(region.as_ptr(), bytes) })
        .context("write(2) from absent pages")?;
    file.rewind()?;
    // SAFETY: all of the other region, which nothing else uses.
    let read = file
        .read(unsafe { std::slice::from_raw_parts_mut(copy.as_ptr(), bytes) })
        .context("read(2) into absent pages")?;
    if (wrote, read) != (bytes, bytes) {
        bail!("write(2) and read(2) of {bytes} bytes moved {wrote} and {read}");
    }
    let copied = Words::new(copy);
    copied.verify(SEED, 0, copied.len())?;
    Ok(from + to)
}

/// How many pages of a region's first bytes are not in local memory, as the kernel reports.
fn absent_pages(region: &Region, bytes: usize) -> Result<u64> {
    let mut resident = vec![0u8; bytes / 4096];
    // SAFETY: the range is mapped, and the vector has a byte for each of its pages.
    if unsafe { libc::mincore(region.as_ptr().cast(), bytes, resident.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(resident.iter().filter(|page| **page & 1 == 0).count() as u64)
}

#[derive(Serialize, Deserialize)]
struct Times {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Times {
    const NONE: Self = Self { p50: Vec::new(), p99: Vec::new() };

    fn add(&mut self, mut round: Vec<Duration>) {
        round.sort_unstable();
        let us = |share: usize| round[(round.len() - 1) * share / 100].as_secs_f64() * 1e6;
        self.p50.push(us(50));
        self.p99.push(us(99));
    }
}

#[derive(Serialize, Deserialize)]
struct Measured {
    ours: Times,
    /// The same page again and again.
    raw: Times,
    /// The pages that are faulted for, of as much memory as the server's.
    raw_of_many: Times,
    /// The least that such a fault takes.
    floor: Times,
    faults: u64,
    /// Absent pages that system calls were given and handled correctly; 0 if none were given.
    absent: u64,
}

fn measure(place: &Place<'_>, way: &Way, common: &Common) -> Result<Measured> {
    let &Way { spin, fault_mode, helped, .. } = way;
    let rounds = common.rounds(9, 2);
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
        fault_mode,
    }
    .open()?;
    let region = memory.alloc(bytes)?;
    let words = Words::new(&region);
    let copy = if helped { Some(memory.alloc(COPIED_BYTES)?) } else { None };
    if let Some(copy) = &copy {
        Words::new(copy).fill(SEED + 1);
    }
    words.fill(SEED);
    let absent = copy.map_or(Ok(0), |copy| check_system_calls(&memory, &region, &copy))?;
    let order = permutation(SEED, bytes / 4096);
    let mut at = order.iter().cycle();

    let content = peer::content();
    let mut buffer = vec![0u8; 4096];
    let [mut ours, mut theirs, mut theirs_of_many, mut least] = [const { Times::NONE }; 4];
    let mut faults = 0;
    // Round 0 warms both up: pages written last still have to leave, and are not counted.
    for round in 0..=rounds {
        let before = memory.stats().faults;
        let (mut times, mut pages) = (Vec::with_capacity(samples), Vec::with_capacity(samples));
        for page in at.by_ref().take(samples) {
            let started = Instant::now();
            let first = words.read(page * PAGE_WORDS);
            let took = started.elapsed();
            pages.push((*page, first));
            // A thirty-second of the pages is resident: those accesses are not faults, and are faster than
            // any.
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
        // The raw client runs as it would without rampool.
        let _unhelped = Unhelped::begin();
        // The peer serves one connection at a time.
        let mut raw = RawStream::connect(&peer.address, spin)?;
        let mut raw_times = [(); 2].map(|()| Vec::with_capacity(samples));
        let many = (bytes / content.len()) as u64;
        for (copies, times) in [1, many].into_iter().zip(&mut raw_times) {
            for (page, _) in &pages {
                let from = if copies == 1 { 0 } else { *page * 4096 };
                let started = Instant::now();
                raw.ask(Wanted { from: from as u64, copies, ..Wanted::first(4096) })?;
                raw.read_exactly(&mut buffer)?;
                times.push(started.elapsed());
                if buffer != content[from % content.len()..][..4096] {
                    bail!("WRONG CONTENT from the raw peer");
                }
            }
        }
        if times.is_empty() {
            bail!("no access faulted: all pages fit into local memory");
        }
        if round > 0 {
            faults += faulted;
            ours.add(times);
            for (samples, times) in [&mut theirs, &mut theirs_of_many].into_iter().zip(raw_times) {
                samples.add(times);
            }
        }
        drop(raw);
        let wanted: Vec<_> = pages
            .iter()
            .map(|(page, _)| Wanted { from: (*page * 4096) as u64, copies: many, ..Wanted::first(4096) })
            .collect();
        let mut raw = RawStream::connect(&peer.address, spin)?;
        let times = match fault_mode {
            FaultModeChoice::InThread => floor::in_thread(raw, &wanted)?,
            _ => floor::by_another_thread(&mut raw, &wanted)?,
        };
        if round > 0 {
            least.add(times);
        }
    }
    words.verify(SEED, 0, words.len())?;
    Ok(Measured { ours, raw: theirs, raw_of_many: theirs_of_many, floor: least, faults, absent })
}
