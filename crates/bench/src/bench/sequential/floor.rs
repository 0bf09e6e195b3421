//! The least that a sequential read costs on this machine: one thread takes a plain stream, has the kernel
//! put it into a program's memory and take as much out again. No faults, requests, checksums or decisions:
//! only what any pager needs of the kernel.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rampool_kernel::memory::{Advice, Mapping, advise};
use rampool_kernel::uffd::{Features, Reply, Scope, Uffd};

use super::super::peer::{self, RawStream};

const PAGE: usize = 4096;

/// Bytes received before they are put in place. In smaller pieces receiving alone takes twice as long, and so
/// do moves, page by page.
const CHUNK_BYTES: usize = 1 << 20;
/// How far a stream reads before it is paged out, as a part of local memory. The rest may hold more useful
/// pages, and frames are still in the CPU's cache when they are received into again.
const PASSED: usize = 16;

/// GB/s of `bytes` read in order with `local_bytes` of local memory.
pub fn run(peer: &str, spin: Duration, bytes: usize, local_bytes: usize) -> Result<f64> {
    let content = peer::content();
    let chunk = CHUNK_BYTES;
    let present = (local_bytes / PASSED).next_multiple_of(chunk);
    let uffd = Uffd::open(Scope::UserMode, Features::WP)?;
    let memory = Mapping::huge_aligned(bytes)?;
    // SAFETY: keeps the content; the mapping is ours.
    let _ = unsafe { advise(memory.start(), memory.bytes(), Advice::NoHugePage) };
    uffd.register(memory.start(), memory.bytes(), true).map_err(std::io::Error::from_raw_os_error)?;
    let mut raw = RawStream::connect(peer, spin)?;
    let mut buffer = vec![0u8; chunk];
    let started = Instant::now();
    raw.request(bytes as u64)?;
    for at in (0..bytes).step_by(chunk) {
        let (place, last) = (memory.start() + at, at.checked_sub(present).map(|gone| memory.start() + gone));
        raw.read_exactly(&mut buffer)?;
        if uffd.copy(place, buffer.as_ptr(), chunk, true) != Reply::Done {
            bail!("the kernel did not put a chunk in place");
        }
        if let Some(last) = last {
            // SAFETY: these pages are not needed any more.
            unsafe { advise(last, chunk, Advice::DontNeed) }.map_err(std::io::Error::from_raw_os_error)?;
        }
        for page in (0..chunk).step_by(PAGE) {
            let word = page + (at + page) / PAGE % (PAGE / 8) * 8;
            let expected = (at + word) % content.len();
            // SAFETY: the page was put there just now.
            let found: u64 =
                unsafe { std::ptr::with_exposed_provenance::<u64>(place + word).read_volatile() };
            if found.to_ne_bytes() != content[expected..expected + 8] {
                bail!("WRONG CONTENT in page {}", (at + page) / PAGE);
            }
        }
    }
    Ok(bytes as f64 / started.elapsed().as_secs_f64() / 1e9)
}
