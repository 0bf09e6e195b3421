//! The least that a sequential read costs on this machine: one thread takes a plain stream, has the kernel
//! put it into a program's memory and take as much out again. No faults, requests, checksums or decisions:
//! only what any pager needs of the kernel.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rampool_kernel::maps::Pagemap;
use rampool_kernel::memory::{Advice, Mapping, advise};
use rampool_kernel::uffd::{Features, Reply, Scope, Uffd};

use super::super::peer::{self, RawStream};

const PAGE: usize = 4096;

/// How bytes come into the program's memory, and leave it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// `UFFDIO_COPY` out of one buffer, write-protected; `MADV_DONTNEED`.
    Copied,
    /// `UFFDIO_MOVE` of the frames that they were received into, then write-protected; `UFFDIO_MOVE` back, to
    /// receive into them again.
    Moved,
    /// As that, with huge pages, each moved as one: what the same would cost if the program's memory were
    /// made of them.
    MovedWhole,
}

/// Bytes received before they are put in place. In smaller pieces receiving alone takes twice as long, and so
/// do moves, page by page.
const CHUNK_BYTES: usize = 1 << 20;
/// The same, where each huge page is moved as one.
const WHOLE_CHUNK_BYTES: usize = 2 << 20;
/// How far a stream reads before it is paged out, as a part of local memory. The rest may hold more useful
/// pages, and frames are still in the CPU's cache when they are received into again.
const PASSED: usize = 16;

/// GB/s of `bytes` read in order with `local_bytes` of local memory.
pub fn run(way: Way, peer: &str, spin: Duration, bytes: usize, local_bytes: usize) -> Result<f64> {
    let content = peer::content();
    let chunk = if way == Way::MovedWhole { WHOLE_CHUNK_BYTES } else { CHUNK_BYTES };
    let present = (local_bytes / PASSED).next_multiple_of(chunk);
    let (features, pages) = match way {
        Way::Copied => (Features::WP, Advice::NoHugePage),
        Way::Moved => (Features::WP.with(Features::MOVE), Advice::NoHugePage),
        Way::MovedWhole => (Features::WP.with(Features::MOVE), Advice::HugePage),
    };
    let uffd = Uffd::open(Scope::UserMode, features)?;
    let memory = Mapping::huge_aligned(bytes)?;
    let frames = Mapping::huge_aligned(chunk)?;
    for mapping in [&memory, &frames] {
        // SAFETY: keeps the content; the mapping is ours.
        let _ = unsafe { advise(mapping.start(), mapping.bytes(), pages) };
    }
    let register = |mapping: &Mapping, protect| {
        uffd.register(mapping.start(), mapping.bytes(), protect).map_err(std::io::Error::from_raw_os_error)
    };
    register(&memory, true)?;
    let map = Pagemap::open()?;
    let mut frames_registered = false;
    let mut raw = RawStream::connect(peer, spin)?;
    let mut buffer = vec![0u8; chunk];
    let started = Instant::now();
    raw.request(bytes as u64)?;
    for at in (0..bytes).step_by(chunk) {
        let (place, last) = (memory.start() + at, at.checked_sub(present).map(|gone| memory.start() + gone));
        match way {
            Way::Copied => {
                raw.read_exactly(&mut buffer)?;
                done(uffd.copy(place, buffer.as_ptr(), chunk, true))?;
                if let Some(last) = last {
                    // SAFETY: these pages are not needed any more.
                    unsafe { advise(last, chunk, Advice::DontNeed) }
                        .map_err(std::io::Error::from_raw_os_error)?;
                }
            }
            Way::Moved | Way::MovedWhole => {
                if let Some(last) = last {
                    // Until pages leave the kernel makes new frames, where none are registered.
                    if !std::mem::replace(&mut frames_registered, true) {
                        register(&frames, false)?;
                    }
                    done(uffd.move_pages(frames.start(), last, chunk, &map))?;
                }
                // SAFETY: the frames are present, or made when they are touched; ours, and unused by anything
                // else before they are moved.
                let room = unsafe {
                    std::slice::from_raw_parts_mut(
                        std::ptr::with_exposed_provenance_mut(frames.start()),
                        chunk,
                    )
                };
                raw.read_exactly(room)?;
                done(uffd.move_pages(place, frames.start(), chunk, &map))?;
                done(uffd.write_protect(place, chunk, true))?;
            }
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

fn done(reply: Reply) -> Result<()> {
    if reply == Reply::Done { Ok(()) } else { bail!("the kernel did not put a chunk in place: {reply:?}") }
}
