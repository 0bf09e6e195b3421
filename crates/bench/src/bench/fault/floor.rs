//! The least that a fault costs here: a raw request and reply, one `UFFDIO_COPY`, and nothing else, by a
//! thread that reads the fault's event, or by the thread that takes the fault.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rampool_kernel::memory::Mapping;
use rampool_kernel::pagetable;
use rampool_kernel::sigbus::{Serve, Slot};
use rampool_kernel::uffd::{Event, Features, Reply, Scope, Uffd};

use crate::bench::peer::{self, RawStream, Wanted};

const PAGE_BYTES: usize = 4096;
/// A fault that takes longer than this fails.
const DEADLINE: Duration = Duration::from_secs(60);

/// Times of accesses to absent pages. Another thread answers each with the wanted content from the raw peer,
/// and the content is compared.
pub fn by_another_thread(raw: &mut RawStream, wanted: &[Wanted]) -> Result<Vec<Duration>> {
    let memory = Mapping::anonymous(wanted.len() * PAGE_BYTES)?;
    let uffd = watched(&memory, Features::NONE)?;
    std::thread::scope(|scope| {
        // If this ends early, the context closes, and a thread that waits for a page continues with zeroes.
        let server = scope.spawn(move || serve(&uffd, raw, wanted));
        let times = access(&memory, wanted);
        if times.is_ok() || server.is_finished() {
            server.join().expect("serving does not panic")?;
        }
        times
    })
}

/// The same, each served by the thread that takes the fault, in the handler that calls rampool's own.
pub fn in_thread(raw: RawStream, wanted: &[Wanted]) -> Result<Vec<Duration>> {
    let memory = Mapping::anonymous(wanted.len() * PAGE_BYTES)?;
    let uffd = watched(&memory, Features::SIGBUS)?;
    let slot = Slot::take()?;
    let frame = vec![0; PAGE_BYTES];
    // The handler may look at it for as long as the process runs.
    let here: &'static InThread = Box::leak(Box::new(InThread(Mutex::new(Some(State {
        uffd,
        raw,
        wanted: wanted.to_vec(),
        next: 0,
        frame,
    })))));
    slot.serve_by(here);
    pagetable::set(memory.start(), memory.bytes(), slot.mark())?;
    let times = access(&memory, wanted);
    pagetable::set(memory.start(), memory.bytes(), 0)?;
    // The peer's connection ends here.
    here.state().take();
    times
}

struct InThread(Mutex<Option<State>>);

impl InThread {
    fn state(&self) -> MutexGuard<'_, Option<State>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct State {
    uffd: Uffd,
    raw: RawStream,
    wanted: Vec<Wanted>,
    next: usize,
    frame: Vec<u8>,
}

impl Serve for InThread {
    /// A fault that cannot be served ends the process by its SIGBUS.
    fn serve(&self, address: usize, _: bool) -> bool {
        let mut state = self.state();
        let Some(State { uffd, raw, wanted, next, frame }) = &mut *state else { return false };
        let asked = wanted.get(*next).is_some_and(|wanted| raw.ask(*wanted).is_ok());
        *next += 1;
        asked
            && raw.read_exactly(frame).is_ok()
            && uffd.copy(address, frame.as_ptr(), PAGE_BYTES, false) == Reply::Done
    }

    fn finish_changes(&self) {}
}

fn watched(memory: &Mapping, features: Features) -> Result<Uffd> {
    let uffd = Uffd::open(Scope::UserMode, features)?;
    uffd.register(memory.start(), memory.bytes(), false)
        .map_err(|errno| anyhow!("userfaultfd refuses the memory (errno {errno})"))?;
    Ok(uffd)
}

fn access(memory: &Mapping, wanted: &[Wanted]) -> Result<Vec<Duration>> {
    let content = peer::content();
    let mut times = Vec::with_capacity(wanted.len());
    for (n, wanted) in wanted.iter().enumerate() {
        let started = Instant::now();
        // SAFETY: inside the mapping; only the kernel writes it, before this read returns.
        let first = unsafe { memory.at(n * PAGE_BYTES).cast::<u64>().read_volatile() };
        times.push(started.elapsed());
        if first.to_le_bytes() != content[usize::try_from(wanted.from)? % content.len()..][..8] {
            bail!("WRONG CONTENT: page {n} of the floor");
        }
    }
    Ok(times)
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
            raw.ask(*left.next().context("more faults than pages")?)?;
            raw.read_exactly(&mut frame).context("the raw peer does not answer")?;
            if uffd.copy(address, frame.as_ptr(), PAGE_BYTES, false) != Reply::Done {
                bail!("the kernel refuses a page");
            }
        }
    }
    Ok(())
}
