//! The least that a fault served by another thread costs here: a read of the event, a raw request and reply, one `UFFDIO_COPY`, and nothing else.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rampool_sys::memory::Mapping;
use rampool_sys::uffd::{Event, Features, Reply, Scope, Uffd};

use crate::bench::peer::{self, RawStream, Wanted};

const PAGE_BYTES: usize = 4096;
/// A fault that takes longer than this will not be served.
const DEADLINE: Duration = Duration::from_secs(60);

/// Times of accesses to absent pages, each answered by the raw peer with what is wanted, and compared with that.
pub fn measure(raw: &mut RawStream, wanted: &[Wanted]) -> Result<Vec<Duration>> {
    let samples = wanted.len();
    let memory = Mapping::anonymous(samples * PAGE_BYTES)?;
    let uffd = Uffd::open(Scope::UserMode, Features(0))?;
    uffd.register(memory.start(), memory.bytes(), false).map_err(|errno| anyhow!("userfaultfd refuses the memory (errno {errno})"))?;
    let content = peer::content();
    std::thread::scope(|scope| {
        // When this ends early, the context closes, and who waits for a page goes on with zeroes.
        let server = scope.spawn(move || serve(&uffd, raw, wanted));
        let mut times = Vec::with_capacity(samples);
        let mut wrong = None;
        for (n, wanted) in wanted.iter().enumerate() {
            let started = Instant::now();
            // SAFETY: inside the mapping; nobody writes it but the kernel, before this read returns.
            let first = unsafe { memory.at(n * PAGE_BYTES).cast::<u64>().read_volatile() };
            times.push(started.elapsed());
            if first.to_le_bytes() != content[usize::try_from(wanted.from)? % content.len()..][..8] {
                wrong = Some(n);
                break;
            }
        }
        if wrong.is_none() || server.is_finished() {
            server.join().expect("serving does not panic")?;
        }
        match wrong {
            Some(page) => bail!("WRONG CONTENT: page {page} of the floor"),
            None => Ok(times),
        }
    })
}

fn serve(uffd: &Uffd, raw: &mut RawStream, wanted: &[Wanted]) -> Result<()> {
    let mut frame = vec![0u8; PAGE_BYTES];
    let mut events = Vec::new();
    let mut left = wanted.iter();
    while !left.as_slice().is_empty() {
        if uffd.read_events::<1>(&mut events) == 0 {
            let mut poll = libc::pollfd { fd: uffd.raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd, which lives across the call.
            let ready = unsafe { libc::poll(&raw mut poll, 1, i32::try_from(DEADLINE.as_millis())?) };
            if ready <= 0 {
                bail!("no fault came in {} s", DEADLINE.as_secs());
            }
            continue;
        }
        for event in events.drain(..) {
            let Event::Fault { address, .. } = event else { continue };
            raw.ask(*left.next().context("a fault too many")?)?;
            raw.read_exactly(&mut frame).context("the raw peer does not answer")?;
            if uffd.copy(address, frame.as_ptr(), PAGE_BYTES, false) != Reply::Done {
                bail!("the kernel does not take a page");
            }
        }
    }
    Ok(())
}
