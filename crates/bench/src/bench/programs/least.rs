//! What the kernel alone takes to bring scattered pages in and out: no network, no waiting program, no other
//! thread, no decision.
//!
//! A page comes by `UFFDIO_COPY` and leaves by `UFFDIO_MOVE`, one call each, as a pager on userfaultfd moves
//! pages that are not used together. Pages that left lie in frames, which are emptied when all are full.

use std::time::Instant;

use anyhow::{Result, bail};
use rampool_kernel::maps::Pagemap;
use rampool_kernel::memory::{Advice, Mapping, advise, dont_fork};
use rampool_kernel::uffd::{Features, Reply, Scope, Uffd};
use rampool_wire::units::{ByteLen, OS_PAGE_BYTES};

use crate::bench::workload::{permutation, word};

/// Pages that come, or leave, before the others have their turn.
const FRAMES: usize = 64;
/// The memory that the pages belong to is so many times what is resident of it.
const SPREAD: usize = 4;
/// The kernel may hold a page for a moment.
const TRIES: u32 = 1000;

/// What the kernel alone takes for pages of a program.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[arg(long)]
    pages: u64,
    #[arg(long)]
    local: ByteLen,
}

pub fn run(args: &Args) -> Result<i32> {
    println!("{}", seconds(args.pages, args.local.0)?);
    Ok(0)
}

/// Seconds for `pages` pages in and as many out, while `local_bytes` are resident.
fn seconds(pages: u64, local_bytes: u64) -> Result<f64> {
    let resident = usize::try_from(local_bytes)? / OS_PAGE_BYTES / FRAMES * FRAMES;
    if resident == 0 {
        bail!("less than {FRAMES} pages of local memory");
    }
    let memory = Mapping::anonymous(resident * SPREAD * OS_PAGE_BYTES)?;
    let (frames, source) =
        (Mapping::anonymous(FRAMES * OS_PAGE_BYTES)?, Mapping::anonymous(FRAMES * OS_PAGE_BYTES)?);
    for at in (0..source.bytes()).step_by(8) {
        // SAFETY: our own memory, which nothing else uses.
        unsafe { source.at(at).cast::<u64>().write(word(21, at as u64)) };
    }
    // What a child shares cannot move.
    for mapping in [&memory, &frames, &source] {
        dont_fork(mapping);
    }
    // Closed before the mappings go.
    let uffd = Uffd::open(Scope::UserMode, Features::WP.with(Features::MOVE))?;
    for (mapping, write_protect) in [(&memory, true), (&frames, false)] {
        if let Err(errno) = uffd.register(mapping.start(), mapping.bytes(), write_protect) {
            bail!("cannot register memory with userfaultfd: {}", std::io::Error::from_raw_os_error(errno));
        }
    }
    let map = Pagemap::open()?;
    let order = permutation(22, resident * SPREAD);
    let address = |turn: usize| memory.start() + order[turn % order.len()] * OS_PAGE_BYTES;
    let mut come = 0;
    let mut bring = |count: usize| {
        for frame in 0..count {
            let from = source.at(frame % FRAMES * OS_PAGE_BYTES).cast_const();
            done(|| uffd.copy(address(come), from, OS_PAGE_BYTES, true))?;
            come += 1;
        }
        anyhow::Ok(())
    };
    bring(resident)?;
    let mut left = usize::try_from(pages)?;
    let mut gone = 0;
    let started = Instant::now();
    while left > 0 {
        let count = left.min(FRAMES);
        for frame in 0..count {
            let to = frames.start() + frame * OS_PAGE_BYTES;
            done(|| uffd.move_pages(to, address(gone), OS_PAGE_BYTES, &map))?;
            gone += 1;
        }
        // SAFETY: the frames are ours, and their content is not needed. (The context is not told of it: it
        // did not ask to be.)
        if let Err(errno) = unsafe { advise(frames.start(), frames.bytes(), Advice::DontNeed) } {
            bail!("cannot empty frames: {}", std::io::Error::from_raw_os_error(errno));
        }
        bring(count)?;
        left -= count;
    }
    Ok(started.elapsed().as_secs_f64())
}

/// Repeats a call until the kernel has done it.
fn done(call: impl Fn() -> Reply) -> Result<()> {
    let mut reply = call();
    for _ in 0..TRIES {
        if reply != Reply::Busy {
            break;
        }
        std::thread::yield_now();
        reply = call();
    }
    if reply != Reply::Done {
        bail!("the kernel refuses to bring or to take a page: {reply:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_and_leave() {
        if !Uffd::probe(Scope::UserMode).is_ok_and(|features| features.has(Features::MOVE)) {
            return rampool_testing::skip("move", "what the kernel alone takes");
        }
        let pages = 10_000;
        assert!(seconds(pages, 1 << 20).unwrap() > 0.0);
        assert!(seconds(pages, 4096).is_err(), "no room");
    }
}
