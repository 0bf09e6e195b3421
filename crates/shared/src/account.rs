//! Accounts for a rank's time: S4's categories, messages by type, and the trace.
//!
//! A rank's time, times its threads, is the sum of its parts: waiting for pages to read and to write, for
//! locks, unlocks, barriers and other operations; handling requests of other ranks while no thread waited
//! (the rest of that work cost nothing, since a thread waited anyway); and computing, which is the remainder
//! and includes time lost to other processes on the same CPUs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rampool_sharing::{Body, LockId, Message, Rank, Stats, ThreadId};
use serde::{Deserialize, Serialize};

use super::environment::variable;
use super::stats::{Kind, SharedStats};

/// What a thread waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Category {
    Lock,
    Unlock,
    Barrier,
    Word,
    Other,
}

impl Category {
    fn name(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Unlock => "unlock",
            Self::Barrier => "barrier",
            Self::Word => "word",
            Self::Other => "other",
        }
    }
}

/// One rank's time and messages, as `rampool launch --stats` gathers them. Seconds are sums over its threads.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TimeReport {
    pub rank: u16,
    pub protocol: String,
    pub threads: u16,
    /// The CPUs that the program may use.
    #[serde(default)]
    pub cpus: Vec<usize>,
    /// The measured time, on the clock.
    pub elapsed_s: f64,
    pub computing_s: f64,
    pub read_fault_s: f64,
    pub write_fault_s: f64,
    /// Handling other ranks' messages while no thread of this one waited.
    pub requests_s: f64,
    pub lock_s: f64,
    pub unlock_s: f64,
    pub barrier_s: f64,
    /// Atomic words.
    #[serde(default)]
    pub word_s: f64,
    /// Waiting in operations without a category of their own: allocations, conditions.
    pub other_s: f64,
    /// Handling other ranks' messages while a thread waited: not part of the sum.
    pub requests_overlapped_s: f64,
    /// Connections to other ranks by transport: `rings` (shared memory), `tcp`, `udp`.
    #[serde(default)]
    pub connections: BTreeMap<String, u64>,
    /// Messages that this rank sent, by type.
    pub sent: BTreeMap<String, Kind>,
    pub counts: BTreeMap<String, u64>,
}

/// Selects one category's seconds.
type Seconds = fn(&TimeReport) -> f64;

impl TimeReport {
    /// The parts of a rank's time: S4's categories, and the rest.
    pub const CATEGORIES: [(&str, Seconds); 9] = [
        ("computing", |rank| rank.computing_s),
        ("read fault", |rank| rank.read_fault_s),
        ("write fault", |rank| rank.write_fault_s),
        ("requests", |rank| rank.requests_s),
        ("lock", |rank| rank.lock_s),
        ("unlock", |rank| rank.unlock_s),
        ("barrier", |rank| rank.barrier_s),
        ("word", |rank| rank.word_s),
        ("other", |rank| rank.other_s),
    ];

    /// The seconds of all categories, which are those of all its threads.
    #[must_use]
    pub fn total_s(&self) -> f64 {
        Self::CATEGORIES.iter().map(|(_, seconds)| seconds(self)).sum()
    }
}

/// The counts of a rank. Part of the host, under the host's lock.
pub(super) struct Account {
    rank: Rank,
    protocol: &'static str,
    threads: u16,
    began: Instant,
    /// The engine's counts when counting began.
    base: Stats,
    /// Threads that are in an operation.
    waiting: usize,
    /// When the handling of other ranks' messages began, and whether it costs nothing because every thread
    /// waits.
    handling: Option<(Instant, bool)>,
    /// Everything except the messages by type, which are in `sent`.
    pub stats: SharedStats,
    /// Messages sent, in the order of [`Body::NAMES`].
    sent: [Kind; Body::NAMES.len()],
    /// The report, once measuring has ended.
    fixed: Option<TimeReport>,
    trace: Option<Trace>,
}

impl Account {
    pub fn new(rank: Rank, protocol: &'static str, threads: u16) -> std::io::Result<Self> {
        let trace = std::env::var_os(variable::TRACE_DIR).filter(|dir| !dir.is_empty());
        Ok(Self {
            rank,
            protocol,
            threads,
            began: Instant::now(),
            base: Stats::default(),
            waiting: 0,
            handling: None,
            stats: SharedStats::default(),
            sent: [Kind::default(); Body::NAMES.len()],
            fixed: None,
            trace: trace.map(|dir| Trace::create(Path::new(&dir), rank)).transpose()?,
        })
    }

    pub fn set_threads(&mut self, threads: u16) {
        self.threads = threads;
    }

    /// Counts what `rampool launch --stats` shows from now on.
    pub fn start(&mut self, engine: &Stats) {
        let connections = std::mem::take(&mut self.stats.connections);
        self.stats =
            SharedStats { connections, reconnections: self.stats.reconnections, ..SharedStats::default() };
        self.sent = [Kind::default(); Body::NAMES.len()];
        self.base = engine.clone();
        self.began = Instant::now();
        self.fixed = None;
        if let Some(trace) = &mut self.trace {
            trace.mark("start", self.began);
        }
    }

    /// Later counts are not shown.
    pub fn stop(&mut self, engine: &Stats) {
        self.fixed = Some(self.report(engine));
        if let Some(trace) = &mut self.trace {
            trace.mark("stop", Instant::now());
        }
    }

    /// The rank leaves: waiting from now on does not count for its program.
    pub fn conclude(&mut self, engine: &Stats) {
        if self.fixed.is_none() {
            self.stop(engine);
        }
    }

    /// The calling thread begins to wait. `computed`: its CPU time since its last operation returned, if that
    /// is traced.
    pub fn enter(&mut self, thread: ThreadId, computed: Option<Duration>) {
        self.waiting += 1;
        if let Some(trace) = &mut self.trace
            && let Some(free) = trace.free.get_mut(&thread)
        {
            free.computed = computed;
        }
    }

    pub fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Writes the CPU time that faults and clock readings take of a thread on this machine, where a trace is
    /// written.
    pub fn costs(&mut self, of_faults: impl FnOnce() -> Vec<Cost>) {
        if let Some(trace) = &mut self.trace {
            of_faults().into_iter().chain(Cost::of_the_clock()).for_each(|cost| trace.cost(&cost));
        }
    }

    /// A thread's wait is over.
    pub fn leave(&mut self) {
        self.waiting -= 1;
    }

    /// How many threads the rank says it has.
    pub fn threads(&self) -> u16 {
        self.threads
    }

    /// The calling thread was in an operation from `began` until `ended`; on `lock`, if it was a lock
    /// operation.
    pub fn operation(
        &mut self,
        thread: ThreadId,
        category: Category,
        lock: Option<LockId>,
        began: Instant,
        ended: Instant,
    ) {
        let took = ended.saturating_duration_since(began);
        let into = match category {
            Category::Lock => &mut self.stats.lock_wait,
            Category::Unlock => &mut self.stats.unlock_wait,
            Category::Barrier => &mut self.stats.barrier_wait,
            Category::Word => &mut self.stats.word_wait,
            Category::Other => &mut self.stats.other_wait,
        };
        *into += took;
        if let Some(trace) = &mut self.trace {
            if let Some(free) = trace.free.remove(&thread) {
                let span = Span { thread: Some(thread), cpu: free.computed, ..Span::default() };
                trace.span("compute", &span, free.since, began.saturating_duration_since(free.since));
            }
            trace.span(
                "wait",
                &Span { thread: Some(thread), what: Some(category.name()), lock, ..Span::default() },
                began,
                took,
            );
            trace.free.insert(thread, Free { since: ended, computed: None });
        }
    }

    /// A page that a thread had waited for since `since` has come. Returns the time.
    pub fn page_came(&mut self, write: bool, since: Instant) -> Instant {
        let now = Instant::now();
        let took = now.saturating_duration_since(since);
        *(if write { &mut self.stats.write_fault_wait } else { &mut self.stats.read_fault_wait }) += took;
        if let Some(trace) = &mut self.trace {
            let what = if write { "write fault" } else { "read fault" };
            trace.span("wait", &Span { what: Some(what), ..Span::default() }, since, took);
        }
        now
    }

    /// A message has been handled, of those found at `now`; `began`, if a trace is written, says when.
    /// `page_waits`: pages that threads wait for.
    pub fn received(
        &mut self,
        from: Rank,
        message: &Message,
        now: Instant,
        began: Option<Instant>,
        page_waits: usize,
    ) {
        self.stats.received_messages += 1;
        let overlapped = self.waiting + page_waits >= usize::from(self.threads);
        self.handling.get_or_insert((now, overlapped));
        if let Some((trace, began)) = self.trace.as_mut().zip(began) {
            trace.message("receive", ("from", from), message, None, began, Some(began.elapsed()));
        }
    }

    /// All messages that had come have been handled and answered: the clock is not read before that.
    pub fn handled(&mut self) {
        if let Some((since, overlapped)) = self.handling.take() {
            *(if overlapped { &mut self.stats.requests_overlapped } else { &mut self.stats.requests }) +=
                since.elapsed();
        }
    }

    pub fn sent(&mut self, to: Rank, message: &Message, bytes: usize) {
        self.stats.sent_messages += 1;
        let kind = &mut self.sent[message.kind()];
        kind.messages += 1;
        kind.bytes += bytes as u64;
        if let Some(trace) = &mut self.trace {
            trace.message("send", ("to", to), message, Some(bytes), Instant::now(), None);
        }
    }

    fn sent_by_name(&self) -> impl Iterator<Item = (&'static str, Kind)> {
        Body::NAMES.iter().copied().zip(self.sent).filter(|(_, kind)| kind.messages > 0)
    }

    /// The counts so far.
    pub fn stats(&self) -> SharedStats {
        SharedStats { sent: self.sent_by_name().collect(), ..self.stats.clone() }
    }

    fn report(&self, engine: &Stats) -> TimeReport {
        let stats = &self.stats;
        let elapsed = self.began.elapsed();
        let waits = stats.read_fault_wait
            + stats.write_fault_wait
            + stats.lock_wait
            + stats.unlock_wait
            + stats.barrier_wait
            + stats.word_wait
            + stats.other_wait;
        let computing = (elapsed * self.threads.into()).saturating_sub(waits + stats.requests);
        let since = |now: u64, base: u64| now.saturating_sub(base);
        let counts = [
            ("read faults", since(engine.read_faults, self.base.read_faults)),
            ("write faults", since(engine.write_faults, self.base.write_faults)),
            ("pages fetched", since(engine.pages_fetched, self.base.pages_fetched)),
            ("invalidations", since(engine.invalidations, self.base.invalidations)),
            ("copies forgotten for room", since(engine.evictions, self.base.evictions)),
            ("twins", since(engine.twins, self.base.twins)),
            ("diffs", since(engine.diffs, self.base.diffs)),
            ("diff bytes", since(engine.diff_bytes, self.base.diff_bytes)),
            ("lock acquires", since(engine.lock_acquires, self.base.lock_acquires)),
            ("acquires without a message", since(engine.local_acquires, self.base.local_acquires)),
            ("barriers", since(engine.barriers, self.base.barriers)),
        ];
        let cut =
            (stats.reconnections > 0).then(|| ("connections made again".to_owned(), stats.reconnections));
        TimeReport {
            rank: self.rank.0,
            protocol: self.protocol.to_owned(),
            threads: self.threads,
            cpus: rampool_kernel::thread::allowed_cpus(),
            elapsed_s: elapsed.as_secs_f64(),
            computing_s: computing.as_secs_f64(),
            read_fault_s: stats.read_fault_wait.as_secs_f64(),
            write_fault_s: stats.write_fault_wait.as_secs_f64(),
            requests_s: stats.requests.as_secs_f64(),
            lock_s: stats.lock_wait.as_secs_f64(),
            unlock_s: stats.unlock_wait.as_secs_f64(),
            barrier_s: stats.barrier_wait.as_secs_f64(),
            word_s: stats.word_wait.as_secs_f64(),
            other_s: stats.other_wait.as_secs_f64(),
            requests_overlapped_s: stats.requests_overlapped.as_secs_f64(),
            connections: stats.connections.iter().map(|(&name, &count)| (name.to_owned(), count)).collect(),
            sent: self.sent_by_name().map(|(name, kind)| (name.to_owned(), kind)).collect(),
            counts: counts.into_iter().map(|(name, count)| (name.to_owned(), count)).chain(cut).collect(),
        }
    }

    /// The rank has finished: writes the statistics for `rampool launch`.
    pub fn write(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.flush();
        }
        let dir = std::env::var_os(variable::STATS_DIR).filter(|dir| !dir.is_empty());
        if let Some((dir, report)) = dir.zip(self.fixed.as_ref()) {
            let path = Path::new(&dir).join(format!("rank-{}.json", self.rank.0));
            let text = serde_json::to_string(report).expect("numbers and names");
            if let Err(error) = std::fs::write(&path, text) {
                tracing::warn!(%error, path = %path.display(), "the rank's statistics cannot be written");
            }
        }
    }
}

/// Bytes written to the file at once.
const BUFFER: usize = 1 << 20;

/// A file of events, one JSON object a line. See `docs/reference/trace.md`.
struct Trace {
    out: BufWriter<File>,
    /// One moment on two clocks; ranks on one machine share the second.
    started: Instant,
    started_ns: u64,
    /// Threads in no operation now, or when last seen.
    free: BTreeMap<ThreadId, Free>,
}

/// A thread after its last operation.
struct Free {
    since: Instant,
    /// Its CPU time from its return until its next operation began.
    computed: Option<Duration>,
}

/// CPU time that is not the program's computing, although the thread's clock counts it as such.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cost {
    pub what: &'static str,
    pub median: Duration,
}

impl Cost {
    /// The cost, from several samples. `None` if there are none.
    pub fn of(what: &'static str, mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        Some(Self { what, median: *times.get(times.len() / 2)? })
    }

    /// Two readings of the clock in a row.
    pub fn of_the_clock() -> Option<Self> {
        let look = |_| {
            let before = cpu_of_this_thread();
            cpu_of_this_thread().saturating_sub(before)
        };
        Self::of("clock", (0..SAMPLES).map(look).collect())
    }
}

/// The number of samples.
pub(super) const SAMPLES: usize = 64;

/// A span's attributes other than its time.
#[derive(Default)]
struct Span {
    /// A fault does not say which thread caused it.
    thread: Option<ThreadId>,
    what: Option<&'static str>,
    lock: Option<LockId>,
    cpu: Option<Duration>,
}

/// What the calling thread has used of a CPU.
#[must_use]
pub fn cpu_of_this_thread() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(used.tv_sec.try_into().unwrap_or(0), used.tv_nsec.try_into().unwrap_or(0))
}

/// Nanoseconds. Numbers are written as integers: formatting floats takes a thread many times as long, under
/// the host's lock; and a reader that parses them as floats would round times since 1970 to a quarter of a
/// microsecond.
fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// One moment on two clocks, the second in nanoseconds since 1970, from the try with the shortest interval
/// between the readings. If the moments of two ranks differed by microseconds, some messages would seem to
/// take no time.
fn one_moment() -> (Instant, u64) {
    let tries = (0..16).map(|_| {
        let before = Instant::now();
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        (before.elapsed(), before, since_epoch)
    });
    let (gap, before, since_epoch) = tries.min_by_key(|&(gap, ..)| gap).expect("there are tries");
    (before + gap / 2, ns(since_epoch))
}

impl Trace {
    fn create(dir: &Path, rank: Rank) -> std::io::Result<Self> {
        let file = File::create(dir.join(format!("rank-{}.jsonl", rank.0)))?;
        let out = BufWriter::with_capacity(BUFFER, file);
        let (started, started_ns) = one_moment();
        Ok(Self { out, started, started_ns, free: BTreeMap::new() })
    }

    fn at_ns(&self, at: Instant) -> u64 {
        self.started_ns.saturating_add(ns(at.saturating_duration_since(self.started)))
    }

    fn span(&mut self, event: &str, span: &Span, at: Instant, took: Duration) {
        // A full disk must not end the run.
        let _ = self.try_span(event, span, at, took);
    }

    fn try_span(&mut self, event: &str, span: &Span, at: Instant, took: Duration) -> std::io::Result<()> {
        let at = self.at_ns(at);
        let out = &mut self.out;
        write!(out, r#"{{"at_ns":{at},"event":"{event}""#)?;
        if let Some(thread) = span.thread {
            write!(out, r#","thread":{}"#, thread.0)?;
        }
        if let Some(what) = span.what {
            write!(out, r#","what":"{what}""#)?;
        }
        if let Some(lock) = span.lock {
            write!(out, r#","lock":{}"#, lock.0)?;
        }
        write!(out, r#","ns":{}"#, ns(took))?;
        if let Some(cpu) = span.cpu {
            write!(out, r#","cpu_ns":{}"#, ns(cpu))?;
        }
        out.write_all(b"}\n")
    }

    fn message(
        &mut self,
        event: &str,
        peer: (&str, Rank),
        message: &Message,
        bytes: Option<usize>,
        at: Instant,
        took: Option<Duration>,
    ) {
        // As for spans.
        let _ = self.try_message(event, peer, message, bytes, at, took);
    }

    fn try_message(
        &mut self,
        event: &str,
        (way, peer): (&str, Rank),
        message: &Message,
        bytes: Option<usize>,
        at: Instant,
        took: Option<Duration>,
    ) -> std::io::Result<()> {
        let at = self.at_ns(at);
        let out = &mut self.out;
        write!(out, r#"{{"at_ns":{at},"event":"{event}","{way}":{},"type":"{}""#, peer.0, message.name())?;
        if let Some(lock) = message.lock() {
            write!(out, r#","lock":{}"#, lock.0)?;
        }
        if let Some(bytes) = bytes {
            write!(out, r#","bytes":{bytes}"#)?;
        }
        if let Some(took) = took {
            write!(out, r#","ns":{}"#, ns(took))?;
        }
        out.write_all(b"}\n")
    }

    fn mark(&mut self, event: &str, at: Instant) {
        let at = self.at_ns(at);
        let _ = writeln!(self.out, r#"{{"at_ns":{at},"event":"{event}"}}"#);
    }

    fn cost(&mut self, cost: &Cost) {
        let at = self.at_ns(Instant::now());
        let _ = writeln!(
            self.out,
            r#"{{"at_ns":{at},"event":"cost","what":"{}","cpu_ns":{}}}"#,
            cost.what,
            ns(cost.median)
        );
    }

    fn flush(&mut self) {
        let _ = self.out.flush();
    }
}
