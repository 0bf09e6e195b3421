//! Touches pages in random order, reads a word of each, changes every second one and checks each word that it
//! reads; at the end it checks every word. Only the touches are timed. The processor time is that of the
//! program, of its agent, of the server and of `rampool run` during the touches.

use std::fs;
use std::time::Instant;

use anyhow::{Result, bail};
use rampool_wire::units::{ByteLen, OS_PAGE_BYTES};

use crate::bench::workload::word;

/// What the pages hold.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Does not compress.
    Random,
    /// Compresses to about a third.
    Packs,
}

impl Content {
    /// Word `index` of the memory before it is changed.
    fn word(self, index: u64) -> u64 {
        match self {
            Content::Packs if index % 8 > 1 => index / 512,
            _ => word(7, index),
        }
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
    /// The servers, where the program's parent has not started them.
    #[arg(long)]
    server_pid: Vec<u32>,
}

const WORDS: u64 = (OS_PAGE_BYTES / 8) as u64;

/// Prints the time and the processor time of the touches, in nanoseconds.
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
    println!("{} {cpu}", wall.as_nanos());
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
