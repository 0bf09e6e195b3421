//! Memory that the kernel itself tells about when it is unmapped, moved or dropped: userfaultfd's events,
//! without any fault.
//!
//! ```text
//!   a thread of the program           the watcher's thread
//!   munmap ── event, and waits ──────> reads it, writes it down
//!          <─────────────────────────
//!   sends: has anything been written down since? ── one load if not
//! ```
//! A thread that unmaps or moves watched memory goes on only when the event has been read. The watcher
//! increments a count before each reading, and holds the log until it has written down what it read. A thread
//! that has returned from `munmap` sees another count, waits for the log, and finds the change in it.
//!
//! One watcher serves the whole process and lives as long as that does: were it to end, the next `munmap` of
//! watched memory would wait for ever. For the same reason its thread never frees or allocates: the
//! allocator's memory may be what is watched.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rampool_kernel::maps::Maps;
use rampool_kernel::uffd::{Event, Features, Scope, Uffd};

/// How many past changes are remembered. A reader that is further behind takes all memory as changed.
const REMEMBERED: usize = 256;
/// Events of one reading.
const BATCH: usize = 16;

/// What has become of watched memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// There are other pages now, or none; the mapping is the same, and is still watched.
    Dropped(Range<usize>),
    /// The mapping is gone.
    Gone(Range<usize>),
    /// More has changed since the last question than is remembered: everything counts as changed.
    Unknown,
}

/// The process's watcher.
pub struct Watcher {
    uffd: Uffd,
    /// The process whose memory it is.
    process: u32,
    /// Counts readings, before each.
    readings: AtomicU64,
    log: Mutex<Log>,
}

struct Log {
    /// Entries so far; the last [`REMEMBERED`] of them are kept, each at its number's place.
    written: u64,
    entries: [Option<Change>; REMEMBERED],
}

/// What one asker has seen of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Seen {
    readings: u64,
    written: u64,
}

impl Watcher {
    /// The one of this process; `None` where the kernel or its rules do not allow it, in a forked child of a
    /// process that had one, and under `rampool run`, whose agent has the program's memory.
    #[must_use]
    pub fn of_process() -> Option<&'static Self> {
        static WATCHER: OnceLock<Option<Watcher>> = OnceLock::new();
        let watcher = WATCHER.get_or_init(Self::open).as_ref()?;
        let run = || watcher.run();
        static RUNS: OnceLock<bool> = OnceLock::new();
        let runs =
            *RUNS.get_or_init(|| rampool_kernel::thread::spawn_detached(64 << 10, Box::new(run)).is_ok());
        (runs && watcher.process == std::process::id()).then_some(watcher)
    }

    fn open() -> Option<Self> {
        // SAFETY: a terminated name; looking a symbol up has no preconditions.
        let agent = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"rampool_agent_touch_text".as_ptr()) };
        if !agent.is_null() {
            return None;
        }
        // Faults never come here, so it does not matter whose they would be; this scope needs no right.
        let uffd = Uffd::open(Scope::UserMode, Features::EVENTS_MAPPING.with(Features::WP)).ok()?;
        Some(Self {
            uffd,
            process: std::process::id(),
            readings: AtomicU64::new(0),
            log: Mutex::new(Log::new()),
        })
    }

    /// Where a reader that starts now begins.
    #[must_use]
    pub fn now(&self) -> Seen {
        let readings = self.readings.load(Ordering::SeqCst);
        Seen { readings, written: self.log().written }
    }

    /// Whether changes of this memory are told from now on. The mappings that it lies in are watched as a
    /// whole: one that were in two parts could not be moved as one any more. Not all memory can be watched:
    /// not files, and not what another userfaultfd context has, such as rampool's own regions.
    #[must_use]
    pub fn watch(&self, memory: &Range<usize>) -> bool {
        let Ok(maps) = Maps::open() else { return false };
        let mut at = memory.start;
        while at < memory.end {
            let Some(vma) = maps.at(at).filter(|vma| vma.is_private_memory()) else { return false };
            if self.uffd.watch(vma.start, vma.bytes()).is_err() {
                return false;
            }
            at = vma.end;
        }
        true
    }

    /// Calls `each` with what has changed since `seen`, in order. One load where nothing has.
    pub fn catch_up(&self, seen: &mut Seen, mut each: impl FnMut(Change)) {
        // This load is before the log is looked at: a reading that begins in between is looked at twice,
        // never not at all.
        let readings = self.readings.load(Ordering::SeqCst);
        if readings == seen.readings {
            return;
        }
        let log = self.log();
        let from = std::mem::replace(seen, Seen { readings, written: log.written }).written;
        log.since(from, &mut each);
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut events = Vec::with_capacity(BATCH);
        loop {
            let mut poll = libc::pollfd { fd: self.uffd.raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one descriptor, which lives as long as the process.
            unsafe { libc::poll(&raw mut poll, 1, -1) };
            let mut log = self.log();
            self.readings.fetch_add(1, Ordering::SeqCst);
            self.uffd.read_events::<BATCH>(&mut events);
            for event in events.drain(..) {
                match event {
                    Event::Unmap { start, end } => log.write(Change::Gone(start..end)),
                    Event::Remap { from, bytes, .. } => log.write(Change::Gone(from..from + bytes)),
                    Event::Remove { start, end } => log.write(Change::Dropped(start..end)),
                    // Nothing is ever protected by this context: a fault can only be left over from one that
                    // was. The faulting thread retries.
                    Event::Fault { address, .. } => {
                        _ = self.uffd.write_protect(address, rampool_kernel::OS_PAGE_BYTES, false)
                    }
                    Event::Fork { .. } => {}
                }
            }
        }
    }
}

impl Log {
    fn new() -> Self {
        Self { written: 0, entries: [const { None }; REMEMBERED] }
    }

    fn write(&mut self, change: Change) {
        self.entries[place(self.written)] = Some(change);
        self.written += 1;
    }

    fn since(&self, from: u64, each: &mut impl FnMut(Change)) {
        if self.written - from > REMEMBERED as u64 {
            return each(Change::Unknown);
        }
        (from..self.written)
            .for_each(|number| each(self.entries[place(number)].clone().expect("written down")));
    }
}

fn place(number: u64) -> usize {
    usize::try_from(number % REMEMBERED as u64).expect("less than the number of places")
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("process", &self.process).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_tells_each_change_in_order_or_that_it_has_lost_some() {
        let mut log = Log::new();
        let since = |log: &Log, from| {
            let mut changes = Vec::new();
            log.since(from, &mut |change| changes.push(change));
            changes
        };
        for number in 0..300 {
            log.write(Change::Gone(number..number + 1));
        }
        assert_eq!(since(&log, 300), []);
        assert_eq!(since(&log, 298), [Change::Gone(298..299), Change::Gone(299..300)]);
        assert_eq!(since(&log, 44).len(), REMEMBERED);
        assert_eq!(since(&log, 44)[0], Change::Gone(44..45));
        assert_eq!(since(&log, 43), [Change::Unknown]);
    }
}
