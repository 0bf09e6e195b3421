//! Eviction where the kernel cannot move pages (before Linux 6.8): protect, copy, give back.
//!
//! Write protection stops the program's stores; the bytes are read through /proc/self/mem, which never waits
//! for a page; then MADV_DONTNEED gives the pages back. A write that met the protection in between keeps its
//! page. The kernel announces the DONTNEED to this very context and blocks the caller until the announcement
//! is read, so a thread of its own makes the call while the pager reads, and says what it has given back. The
//! pager tells its own announcements from the program's by counting: each page given back is announced
//! exactly once for us, every further time was the program.
//!
//! What this cannot do: notice that a page is pinned (O_DIRECT, registered buffers) while it leaves; what a
//! device writes then is lost. And between the last look at the mapping and MADV_DONTNEED, a few hundred
//! nanoseconds apart, the program must not unmap the range and map and fill something else there.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rampool_kernel::maps::Pagemap;
use rampool_kernel::memory::{Advice, advise};
use rampool_kernel::selfmem::SelfMemory;
use rampool_kernel::thread::SpawnError;
use rampool_kernel::uffd::{Event, Reply, Uffd};
use rampool_paging::cache::EvictOutcome;
use rampool_wire::units::OS_PAGE_BYTES;

use super::{CatchError, Departure, outcomes_of};

/// A range of addresses, `[start, end)`.
type Range = (usize, usize);

pub(super) struct Copying {
    memory: SelfMemory,
    uffd: Arc<Uffd>,
    giver: CopyThread,
    /// Events that were read while pages were given back, not handled yet.
    backlog: VecDeque<Event>,
    /// Changes of mappings among them.
    changes: usize,
    events: Vec<Event>,
}

impl std::fmt::Debug for Copying {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copying").field("backlog", &self.backlog.len()).finish_non_exhaustive()
    }
}

/// The thread that gives pages back.
struct Giver {
    work: Mutex<Work>,
    ready: Condvar,
    /// Rings when the work is done.
    doorbell: OwnedFd,
}

#[derive(Default)]
struct Work {
    uffd: Option<Arc<Uffd>>,
    ranges: Vec<Range>,
    /// What of the ranges was given back.
    given: Vec<Range>,
    pending: bool,
    stop: bool,
}

/// The thread that gives pages back, ready for a context.
pub struct CopyThread(Arc<Giver>);

impl std::fmt::Debug for CopyThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CopyThread")
    }
}

impl CopyThread {
    /// # Errors
    /// When the kernel refuses a thread or a descriptor.
    pub fn start() -> Result<Self, SpawnError> {
        // SAFETY: a system call without pointers; the descriptor is new.
        let doorbell = unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if fd < 0 {
                return Err(SpawnError::Thread { errno: rampool_kernel::last_errno() });
            }
            OwnedFd::from_raw_fd(fd)
        };
        let giver = Arc::new(Giver { work: Mutex::default(), ready: Condvar::new(), doorbell });
        let theirs = Arc::clone(&giver);
        rampool_kernel::thread::spawn_detached(256 << 10, Box::new(move || theirs.run()))?;
        Ok(Self(giver))
    }
}

impl Drop for CopyThread {
    fn drop(&mut self) {
        if let Ok(mut work) = self.0.work.lock() {
            work.stop = true;
        }
        self.0.ready.notify_one();
    }
}

impl Copying {
    pub(super) fn new(giver: CopyThread, uffd: Arc<Uffd>) -> Result<Self, CatchError> {
        Ok(Self {
            memory: SelfMemory::open(false)?,
            uffd,
            giver,
            backlog: VecDeque::new(),
            changes: 0,
            events: Vec::new(),
        })
    }

    /// The program changed its mappings, and the event was not read yet.
    pub(super) fn change_waits(&self) -> bool {
        self.changes > 0
    }

    /// There are events that no descriptor shows.
    pub(super) fn has_events(&self) -> bool {
        !self.backlog.is_empty()
    }

    pub(super) fn read_events(&mut self, uffd: &Uffd, out: &mut Vec<Event>) {
        self.changes = 0;
        out.extend(self.backlog.drain(..));
        uffd.read_events::<16>(out);
    }

    /// # Errors
    /// An errno without a meaning; what it was about stays.
    pub(super) fn evict(
        &mut self,
        uffd: &Uffd,
        departures: &[Departure],
        frames: usize,
        outcomes: &mut [EvictOutcome],
    ) -> Result<(), i32> {
        let mut copied: Vec<Departure> = Vec::new();
        let mut unexpected = Ok(());
        for departure in departures {
            unexpected = unexpected.and(self.copy_out(uffd, *departure, frames, outcomes, &mut copied));
        }
        // Writes that met the protection keep their pages; after a change of mappings nothing leaves.
        self.hear(uffd, |_, _| false);
        let written: Vec<usize> = self
            .backlog
            .iter()
            .filter_map(|event| match event {
                Event::Fault { address, write_protected: true, .. } => Some(*address),
                _ => None,
            })
            .collect();
        let mut ranges = Vec::new();
        for departure in copied {
            let kept = outcomes_of(&departure, frames, outcomes);
            for (page, outcome) in kept.iter_mut().enumerate() {
                let address = departure.from + page * OS_PAGE_BYTES;
                if self.change_waits() {
                    *outcome = EvictOutcome::Later;
                } else if written.contains(&address) {
                    *outcome = EvictOutcome::Busy;
                } else {
                    push_range(&mut ranges, address);
                }
            }
        }
        if ranges.is_empty() {
            return unexpected;
        }
        let (given, again) = self.give_back(uffd, ranges);
        for departure in departures {
            let kept = outcomes_of(departure, frames, outcomes);
            for (page, outcome) in kept.iter_mut().enumerate() {
                let address = departure.from + page * OS_PAGE_BYTES;
                if *outcome == EvictOutcome::Moved
                    && !given.iter().any(|(start, end)| (*start..*end).contains(&address))
                {
                    *outcome = EvictOutcome::Busy;
                }
            }
        }
        for (start, end) in again {
            self.backlog.push_back(Event::Remove { start, end });
            self.changes += 1;
        }
        unexpected
    }

    /// Protects and copies one run; what of it has bytes in the frames now is appended to `copied` and set to
    /// `Moved`.
    fn copy_out(
        &mut self,
        uffd: &Uffd,
        Departure { from, to, bytes }: Departure,
        frames: usize,
        outcomes: &mut [EvictOutcome],
        copied: &mut Vec<Departure>,
    ) -> Result<(), i32> {
        let (outcome, result) = match uffd.write_protect(from, bytes, true) {
            Reply::Done => (None, Ok(())),
            Reply::MapChanging | Reply::Exiting => (Some(EvictOutcome::Later), Ok(())),
            Reply::Unexpected(errno) => (Some(EvictOutcome::Busy), Err(errno)),
            Reply::Gone | Reply::NoMemory | Reply::Busy | Reply::AlreadyMapped | Reply::Partial(_) => {
                (Some(EvictOutcome::Busy), Ok(()))
            }
        };
        if let Some(outcome) = outcome {
            outcomes_of(&Departure { from, to, bytes }, frames, outcomes).fill(outcome);
            return result;
        }
        let mut at = 0;
        while at < bytes {
            // SAFETY: departures lead into the pager's own frames.
            let read = unsafe {
                self.memory.read(from + at, std::ptr::with_exposed_provenance_mut(to + at), bytes - at)
            };
            let read = read & !(OS_PAGE_BYTES - 1);
            if read > 0 {
                let part = Departure { from: from + at, to: to + at, bytes: read };
                outcomes_of(&part, frames, outcomes).fill(EvictOutcome::Moved);
                copied.push(part);
                at += read;
            }
            if at < bytes {
                let hole = Departure { from: from + at, to: to + at, bytes: OS_PAGE_BYTES };
                // Or its mapping has just gone, or moved.
                let outcome = if uffd.is_changing() { EvictOutcome::Later } else { EvictOutcome::Vanished };
                outcomes_of(&hole, frames, outcomes).fill(outcome);
                at += OS_PAGE_BYTES;
            }
        }
        Ok(())
    }

    /// Has the ranges given back by the other thread. Returns those given back, and those that the program
    /// gave up meanwhile.
    fn give_back(&mut self, uffd: &Uffd, ranges: Vec<Range>) -> (Vec<Range>, Vec<Range>) {
        let mut announced = Vec::new();
        {
            let mut work = self.giver.0.work.lock().expect("no panic under this lock");
            work.uffd = Some(Arc::clone(&self.uffd));
            work.ranges = ranges;
            work.pending = true;
            self.giver.0.ready.notify_one();
        }
        loop {
            self.hear(uffd, |start, end| {
                announced.push((start, end));
                true
            });
            let mut rings = 0u64;
            // SAFETY: an eventfd gives eight bytes.
            let n = unsafe { libc::read(self.giver.0.doorbell.as_raw_fd(), (&raw mut rings).cast(), 8) };
            if n == 8 {
                break;
            }
            let mut fds = [uffd.raw_fd(), self.giver.0.doorbell.as_raw_fd()].map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            });
            // SAFETY: two descriptors of ours; a bounded sleep, after which both are looked at again.
            unsafe { libc::poll(fds.as_mut_ptr(), 2, 100) };
        }
        // An announcement may be read by us last.
        self.hear(uffd, |start, end| {
            announced.push((start, end));
            true
        });
        let given = std::mem::take(&mut self.giver.0.work.lock().expect("no panic under this lock").given);
        (given.clone(), beyond(given, &announced))
    }

    /// Reads events into the backlog. `removed` is called for announcements of emptied ranges: true keeps
    /// them out of the backlog.
    fn hear(&mut self, uffd: &Uffd, mut removed: impl FnMut(usize, usize) -> bool) {
        let mut events = std::mem::take(&mut self.events);
        uffd.read_events::<16>(&mut events);
        for event in events.drain(..) {
            if let Event::Remove { start, end } = event
                && removed(start, end)
            {
                continue;
            }
            self.changes += usize::from(!matches!(event, Event::Fault { .. }));
            self.backlog.push_back(event);
        }
        self.events = events;
    }
}

impl Giver {
    fn run(&self) {
        loop {
            let (uffd, ranges) = {
                let mut work = self.work.lock().expect("no panic under this lock");
                while !work.pending && !work.stop {
                    work = self
                        .ready
                        .wait_timeout(work, Duration::from_secs(60))
                        .expect("no panic under this lock")
                        .0;
                }
                if work.stop {
                    return;
                }
                work.pending = false;
                (work.uffd.take(), std::mem::take(&mut work.ranges))
            };
            let uffd = uffd.expect("work names its context");
            let mut given = Vec::new();
            for (start, end) in ranges {
                give(&uffd, start, end, &mut given);
            }
            self.work.lock().expect("no panic under this lock").given = given;
            let one = 1u64;
            // SAFETY: an eventfd takes eight bytes.
            unsafe { libc::write(self.doorbell.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }
}

/// Gives one range back, unless its mapping has changed since it was copied, and appends the given-back part
/// to `given`.
fn give(uffd: &Uffd, start: usize, end: usize, given: &mut Vec<Range>) {
    if uffd.write_protect(start, end - start, true) != Reply::Done {
        // The program changes mappings, perhaps these: the announcement is its own.
        return;
    }
    // SAFETY: the bytes are in the pager's frames, and the protection was never lifted in between.
    if unsafe { advise(start, end - start, Advice::DontNeed) }.is_ok() {
        return given.push((start, end));
    }
    // Locked or unmapped in part meanwhile.
    let map = Pagemap::open().unwrap_or_else(|_| Pagemap::without());
    (start..end)
        .step_by(OS_PAGE_BYTES)
        .filter(|page| map.has(*page) != Ok(true))
        .for_each(|page| push_range(given, page));
}

/// Ranges announced more often than this side gave them back: the program gave them up.
fn beyond(mut ours: Vec<Range>, announced: &[Range]) -> Vec<Range> {
    let mut rest = Vec::new();
    for &(start, end) in announced {
        claim(&mut ours, start, end, &mut rest);
    }
    rest
}

fn push_range(ranges: &mut Vec<Range>, page: usize) {
    match ranges.last_mut() {
        Some(last) if last.1 == page => last.1 += OS_PAGE_BYTES,
        _ => ranges.push((page, page + OS_PAGE_BYTES)),
    }
}

/// Takes `[start, end)` out of `ours`; what was not in it goes to `rest`.
fn claim(ours: &mut Vec<Range>, start: usize, end: usize, rest: &mut Vec<Range>) {
    let mut at = start;
    let mut left = Vec::with_capacity(ours.len() + 1);
    let mut taken = Vec::new();
    for &(from, to) in ours.iter() {
        let (a, b) = (from.max(start), to.min(end));
        if a >= b {
            left.push((from, to));
            continue;
        }
        taken.push((a, b));
        if from < a {
            left.push((from, a));
        }
        if b < to {
            left.push((b, to));
        }
    }
    taken.sort_unstable();
    for (a, b) in taken {
        if at < a {
            rest.push((at, a));
        }
        at = b;
    }
    if at < end {
        rest.push((at, end));
    }
    *ours = left;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_given_back_by_us_and_is_announced_was_given_up_by_the_program() {
        assert_eq!(beyond(vec![(10, 20)], &[(12, 30)]), [(20, 30)]);
        assert_eq!(
            beyond(vec![], &[(10, 20)]),
            [(10, 20)],
            "ours was refused, because the program was faster"
        );
        assert_eq!(beyond(vec![(10, 20)], &[(10, 20), (15, 20)]), [(15, 20)]);
    }

    #[test]
    fn each_page_is_ours_once_and_the_programs_after_that() {
        let mut ours = vec![(10, 20), (30, 40)];
        let mut rest = Vec::new();
        claim(&mut ours, 12, 14, &mut rest);
        assert_eq!((ours.clone(), rest.clone()), (vec![(10, 12), (14, 20), (30, 40)], vec![]));
        claim(&mut ours, 10, 20, &mut rest);
        assert_eq!((ours.clone(), rest.clone()), (vec![(30, 40)], vec![(12, 14)]));
        claim(&mut ours, 25, 35, &mut rest);
        assert_eq!((ours, rest), (vec![(35, 40)], vec![(12, 14), (25, 30)]));
    }
}
