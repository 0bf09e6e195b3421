//! A run's trace as a program with waits: the input of both methods.
//!
//! A rank is one thread that alternates between computing and waiting, with handlers of messages next to it.
//! Each sent message gets its cause: the handler in whose time it was sent, else the wait, else the
//! computing. Each wait gets the handlers that may have ended it. This module knows nothing about networks.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Longer than any run.
const MOST_NS: u64 = 1 << 53;

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// More than any run has, less than what fills a machine's memory.
const MOST_EVENTS: usize = 20_000_000;
const MOST_RANKS: usize = 4096;

/// A trace that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    #[error("{path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}, line {line}: {why}")]
    Line { path: PathBuf, line: usize, why: String },
    #[error("{0} has no rank-0.jsonl: it was not written by `rampool launch --trace {0}`")]
    Missing(PathBuf),
    #[error(
        "rank {rank} has {threads} threads; a wait for a page names no thread, so only ranks of one thread \
         can be predicted"
    )]
    Threads { rank: usize, threads: usize },
    #[error(
        "rank {to} handled {received} messages from rank {from}, which sent {sent}: one of the traces is \
         incomplete"
    )]
    Unmatched { from: usize, to: usize, sent: usize, received: usize },
    #[error("there are more than {MOST_EVENTS} events: trace a smaller problem")]
    TooMany,
}

/// A line of the file. Unknown fields are those of later versions.
#[derive(Deserialize)]
struct Line {
    /// Since 1970: a float would be off by a quarter of a microsecond.
    at_ns: u64,
    event: String,
    thread: Option<u16>,
    what: Option<String>,
    ns: Option<u64>,
    cpu_ns: Option<u64>,
    to: Option<u16>,
    from: Option<u16>,
    #[serde(rename = "type")]
    kind: Option<String>,
    bytes: Option<u64>,
    lock: Option<u64>,
}

/// S4's categories.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub enum Category {
    ReadFault,
    WriteFault,
    Lock,
    Unlock,
    Barrier,
    Word,
    #[default]
    Other,
}

impl Category {
    pub const ALL: [Self; 7] =
        [Self::ReadFault, Self::WriteFault, Self::Lock, Self::Unlock, Self::Barrier, Self::Word, Self::Other];

    /// As the trace calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadFault => "read fault",
            Self::WriteFault => "write fault",
            Self::Lock => "lock",
            Self::Unlock => "unlock",
            Self::Barrier => "barrier",
            Self::Word => "word",
            Self::Other => "other",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|category| category.name() == name)
    }

    /// Its order against others' requests decides which rank gets a lock, or which is last at a barrier.
    pub fn synchronizes(self) -> bool {
        !matches!(self, Self::ReadFault | Self::WriteFault)
    }
}

/// What a message does to the time of ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Asks for something.
    Request,
    /// Answers a waiting rank.
    Reply,
    /// Arrives at a barrier: the last one ends all waits.
    Arrival,
}

/// Every message type, by its name in the trace, with its role; whether it decides which rank may continue,
/// and not only what ranks see; and whether it carries changes of pages to or from their home, which hardware
/// that maps memory over the network makes unnecessary (AURC as its authors meant it).
const KINDS: [(&str, Role, bool, bool); 40] = [
    ("ScRequest", Role::Request, false, false),
    ("ScForward", Role::Request, false, false),
    ("ScData", Role::Reply, false, false),
    ("ScInvalidate", Role::Request, false, false),
    ("ScAck", Role::Reply, false, false),
    ("ScDone", Role::Request, false, false),
    ("ScMove", Role::Request, false, false),
    ("GetPage", Role::Request, false, false),
    ("Page", Role::Reply, false, false),
    ("GetPages", Role::Request, false, false),
    ("Pages", Role::Reply, false, false),
    ("Push", Role::Reply, false, false),
    ("DiffRequest", Role::Request, false, true),
    ("Diffs", Role::Reply, false, true),
    ("Flush", Role::Request, false, true),
    ("FlushAck", Role::Reply, false, true),
    ("Update", Role::Request, false, true),
    ("Log", Role::Request, false, true),
    ("Direct", Role::Request, false, false),
    ("DirectDone", Role::Reply, false, false),
    ("LockRequest", Role::Request, true, false),
    ("LockForward", Role::Request, true, false),
    ("LockGrant", Role::Reply, true, false),
    ("LockBusy", Role::Reply, true, false),
    ("LockRelease", Role::Request, true, false),
    ("LockReleaseAck", Role::Reply, true, false),
    ("LockHeld", Role::Reply, true, false),
    ("LockReturn", Role::Reply, true, false),
    ("CondWait", Role::Request, true, false),
    ("CondQueued", Role::Reply, true, false),
    ("CondSignal", Role::Request, true, false),
    ("CondWake", Role::Reply, true, false),
    ("BarrierArrive", Role::Arrival, true, false),
    ("BarrierFlush", Role::Reply, true, false),
    ("BarrierFlushed", Role::Arrival, true, false),
    ("BarrierDepart", Role::Reply, true, false),
    ("ManagerMove", Role::Request, true, false),
    ("HomePull", Role::Request, false, false),
    ("HomeMove", Role::Reply, false, false),
    ("Abort", Role::Request, false, false),
];

/// A message of a later version: it takes its time, and ends no wait.
const UNKNOWN: (&str, Role, bool, bool) = ("", Role::Request, false, false);

fn known(name: &str) -> Option<(&'static str, Role, bool, bool)> {
    KINDS.into_iter().find(|kind| kind.0 == name)
}

/// What made a rank send a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// The n-th wait's begin.
    Wait(usize),
    /// The n-th handled message.
    Handler(usize),
    /// A barrier that the rank has come to, and the last page that it had to have for that.
    Arrival { wait: usize, handled: usize },
    /// The computing before the n-th wait.
    Computing(usize),
}

/// A message that was sent. Times in microseconds, by the clock of the trace.
#[derive(Clone, Debug)]
pub struct Sent {
    pub at_us: f64,
    pub to: usize,
    pub bytes: u64,
    pub cause: Cause,
    /// After the cause began.
    pub offset_us: f64,
    pub carries_changes: bool,
    kind: &'static str,
    /// Which of `to`'s handlers it was.
    pub handler: usize,
}

/// A message that came.
#[derive(Clone, Debug)]
pub struct Handled {
    pub at_us: f64,
    pub us: f64,
    pub from: usize,
    pub role: Role,
    pub orders: bool,
    pub lock: Option<u64>,
    pub carries_changes: bool,
    kind: &'static str,
    /// Which of `from`'s messages it was.
    pub sent: usize,
}

/// A wait, and the computing before it.
#[derive(Clone, Default, Debug)]
pub struct Wait {
    pub at_us: f64,
    pub us: f64,
    pub category: Category,
    pub lock: Option<u64>,
    /// The CPU's time since the wait before, without what faults took of it.
    pub computed_us: f64,
    /// What the fault took of its thread's CPU time besides the wait: the way into the kernel and back.
    pub kernel_us: f64,
    /// What the clock shows besides: until the thread that handles faults runs, and this one again.
    pub switch_us: f64,
    /// Since the wait before, on the clock.
    pub between_us: f64,
    /// Handlers that may have ended it, in the order in which they ran; without any, it ended by itself.
    pub ended_by: Vec<usize>,
    /// From the last of these, or from its begin, to its end.
    pub after_us: f64,
}

impl Wait {
    pub fn end_us(&self) -> f64 {
        self.at_us + self.us
    }
    fn is_fault(&self) -> bool {
        !self.category.synchronizes()
    }
    /// What a fault takes besides the wait.
    pub fn fault_us(&self) -> f64 {
        self.kernel_us + self.switch_us
    }
}

/// Whether one of these waits, in the order of time, is under way then.
fn waits_at(waits: &[Wait], at_us: f64) -> bool {
    let begun = waits.partition_point(|wait| wait.at_us <= at_us);
    begun.checked_sub(1).is_some_and(|wait| at_us <= waits[wait].end_us())
}

/// One rank's part.
#[derive(Clone, Debug, Default)]
pub struct RankRecord {
    pub waits: Vec<Wait>,
    pub handled: Vec<Handled>,
    pub sent: Vec<Sent>,
    /// What was measured: from the first of these waits on, before the second.
    pub measured: (usize, usize),
    /// What was measured, on the clock.
    pub elapsed_us: f64,
}

impl RankRecord {
    pub fn measured_waits(&self) -> &[Wait] {
        &self.waits[self.measured.0..self.measured.1]
    }
    /// Whether its thread waits then.
    pub fn waits_at(&self, at_us: f64) -> bool {
        waits_at(&self.waits, at_us)
    }
    pub fn computed_us(&self) -> f64 {
        self.measured_waits().iter().map(|wait| wait.computed_us).sum()
    }
}

/// A run.
#[derive(Clone, Debug)]
pub struct Recording {
    pub ranks: Vec<RankRecord>,
}

impl Recording {
    /// Reads `DIR/rank-N.jsonl`, from 0 on.
    ///
    /// # Errors
    /// Files that cannot be read, are cut short or contradict each other; ranks with several threads.
    pub fn read(dir: &Path) -> Result<Self, RecordingError> {
        let mut files = Vec::new();
        let mut events = 0;
        for rank in 0..MOST_RANKS {
            let path = dir.join(format!("rank-{rank}.jsonl"));
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
                Err(source) => return Err(RecordingError::Read { path, source }),
            };
            files.push(lines(BufReader::new(file), &path, &mut events)?);
        }
        if files.is_empty() {
            return Err(RecordingError::Missing(dir.to_owned()));
        }
        Self::build(files)
    }

    fn build(mut files: Vec<Vec<Line>>) -> Result<Self, RecordingError> {
        // From here on times are floats, which have to be small to be exact.
        let began = files.iter().flatten().map(|line| line.at_ns).min().unwrap_or(0);
        files.iter_mut().flatten().for_each(|line| line.at_ns -= began);
        let mut ranks = Vec::new();
        for (rank, lines) in files.into_iter().enumerate() {
            ranks.push(one_rank(rank, lines)?);
        }
        join(&mut ranks)?;
        Ok(Self { ranks })
    }

    /// For a trace from a busy machine, or of more ranks than it has CPUs: each step besides computing counts
    /// with the lower quartile of the times of such steps. Time above that was spent waiting for a CPU.
    pub fn undisturbed(mut self) -> Self {
        // A switch cannot be told from waiting for a CPU.
        self.ranks.iter_mut().flat_map(|rank| &mut rank.waits).for_each(|wait| wait.switch_us = 0.0);
        let mut steps = Steps::default();
        for pass in [Steps::learn, Steps::apply] {
            for rank in &mut self.ranks {
                for wait in &mut rank.waits {
                    pass(&mut steps, (wait.category.name(), wait.ended_by.is_empty()), &mut wait.after_us);
                }
                for handled in &mut rank.handled {
                    pass(&mut steps, (handled.kind, true), &mut handled.us);
                }
                for sent in rank.sent.iter_mut().filter(|sent| !matches!(sent.cause, Cause::Computing(_))) {
                    pass(&mut steps, (sent.kind, false), &mut sent.offset_us);
                }
            }
        }
        self
    }

    pub fn elapsed_us(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.elapsed_us).fold(0.0, f64::max)
    }

    /// Computing of all ranks: what one rank alone would do, as far as the work is the same.
    pub fn computed_us(&self) -> f64 {
        self.ranks.iter().map(RankRecord::computed_us).sum()
    }

    /// From sending to handling, of each message that met no other, because its receiver had handled all that
    /// came before: bytes, microseconds, and whether the receiver waited when it was sent, and so polled for
    /// it.
    pub fn latencies(&self) -> impl Iterator<Item = (u64, f64, bool)> + '_ {
        self.ranks.iter().flat_map(move |rank| {
            let mut free_from = f64::MIN;
            rank.handled.iter().filter_map(move |handled| {
                let sent = &self.ranks[handled.from].sent[handled.sent];
                let is_free = std::mem::replace(&mut free_from, handled.at_us + handled.us) <= sent.at_us;
                is_free.then(|| (sent.bytes, self.latency_us(sent), rank.waits_at(sent.at_us)))
            })
        })
    }

    pub fn latency_us(&self, sent: &Sent) -> f64 {
        (self.ranks[sent.to].handled[sent.handler].at_us - sent.at_us).max(0.0)
    }
}

/// What each kind of step took.
#[derive(Default)]
struct Steps {
    times: BTreeMap<(&'static str, bool), Vec<f64>>,
    sorted: bool,
}

impl Steps {
    fn learn(&mut self, kind: (&'static str, bool), us: &mut f64) {
        self.times.entry(kind).or_default().push(*us);
    }

    fn apply(&mut self, kind: (&'static str, bool), us: &mut f64) {
        if !std::mem::replace(&mut self.sorted, true) {
            self.times.values_mut().for_each(|times| times.sort_by(f64::total_cmp));
        }
        if let Some(times) = self.times.get(&kind) {
            *us = us.min(times[times.len() / 4]);
        }
    }
}

fn lines(reader: impl BufRead, path: &Path, events: &mut usize) -> Result<Vec<Line>, RecordingError> {
    let mut found = Vec::new();
    for (number, line) in (1..).zip(reader.lines()) {
        let bad = |why: String| RecordingError::Line { path: path.to_owned(), line: number, why };
        let line = line.map_err(|source| RecordingError::Read { path: path.to_owned(), source })?;
        let line: Line = serde_json::from_str(&line).map_err(|error| bad(error.to_string()))?;
        if [line.ns, line.cpu_ns].into_iter().flatten().any(|ns| ns > MOST_NS) {
            return Err(bad("an impossible time".to_owned()));
        }
        if line.to.into_iter().chain(line.from).any(|rank| usize::from(rank) >= MOST_RANKS) {
            return Err(bad("an impossible rank".to_owned()));
        }
        *events += 1;
        if *events > MOST_EVENTS {
            return Err(RecordingError::TooMany);
        }
        found.push(line);
    }
    Ok(found)
}

/// Sums of times are rounded by less. (What is longer than the longest run is not exact to a nanosecond.)
const GRAIN_US: f64 = 0.002;

/// Thread CPU time that is not computing, as measured when the rank began. A trace without it has none.
#[derive(Clone, Copy, Default, Debug)]
struct Costs {
    read_fault_us: f64,
    write_fault_us: f64,
    clock_us: f64,
}

impl Costs {
    fn put(&mut self, what: &str, us: f64) {
        match what {
            "read fault" => self.read_fault_us = us,
            "write fault" => self.write_fault_us = us,
            "clock" => self.clock_us = us,
            _ => {}
        }
    }

    /// CPU time of a fault, without that of reading the clock.
    fn fault_us(&self, category: Category) -> f64 {
        match category {
            Category::ReadFault => (self.read_fault_us - self.clock_us).max(0.0),
            Category::WriteFault => (self.write_fault_us - self.clock_us).max(0.0),
            _ => 0.0,
        }
    }
}

/// What a thread did between two operations.
#[derive(Clone, Copy, Debug)]
struct Segment {
    at_us: f64,
    us: f64,
    cpu_us: f64,
}

fn one_rank(rank: usize, lines: Vec<Line>) -> Result<RankRecord, RecordingError> {
    let mut record = RankRecord::default();
    let mut threads = std::collections::BTreeSet::new();
    let (mut segments, mut faults, mut marks, mut costs) =
        (Vec::new(), Vec::new(), BTreeMap::new(), Costs::default());
    for line in lines {
        let (at_us, us) = (us(line.at_ns), us(line.ns.unwrap_or(0)));
        let cpu_us = line.cpu_ns.map(self::us);
        threads.extend(line.thread);
        match line.event.as_str() {
            "compute" => segments.push(Segment { at_us, us, cpu_us: cpu_us.unwrap_or(us) }),
            "cost" => costs.put(line.what.as_deref().unwrap_or_default(), cpu_us.unwrap_or(0.0)),
            "wait" => {
                let category = line.what.as_deref().and_then(Category::parse).unwrap_or(Category::Other);
                let wait = Wait { at_us, us, category, lock: line.lock, after_us: us, ..Wait::default() };
                if line.thread.is_some() { record.waits.push(wait) } else { faults.push(wait) }
            }
            "send" => {
                let (kind, _, _, carries_changes) =
                    known(line.kind.as_deref().unwrap_or_default()).unwrap_or(UNKNOWN);
                record.sent.push(Sent {
                    at_us,
                    to: line.to.unwrap_or(0).into(),
                    bytes: line.bytes.unwrap_or(0),
                    cause: Cause::Computing(0),
                    offset_us: 0.0,
                    carries_changes,
                    kind,
                    handler: 0,
                });
            }
            "receive" => {
                let (kind, role, orders, carries_changes) =
                    known(line.kind.as_deref().unwrap_or_default()).unwrap_or(UNKNOWN);
                record.handled.push(Handled {
                    at_us,
                    us,
                    from: line.from.unwrap_or(0).into(),
                    role,
                    orders,
                    lock: line.lock,
                    carries_changes,
                    kind,
                    sent: 0,
                });
            }
            "start" | "stop" => {
                marks.insert(line.event, at_us);
            }
            _ => {}
        }
    }
    if threads.len() > 1 {
        return Err(RecordingError::Threads { rank, threads: threads.len() });
    }
    let by_time = |a: f64, b: f64| a.total_cmp(&b);
    // The order of handling and of sending is that of the file; the thread's actions are written when they
    // are over.
    record.handled.sort_by(|a, b| by_time(a.at_us, b.at_us));
    record.waits.sort_by(|a, b| by_time(a.at_us, b.at_us));
    faults.sort_by(|a, b| by_time(a.at_us, b.at_us));
    segments.sort_by(|a: &Segment, b| by_time(a.at_us, b.at_us));
    put_faults(&mut record, faults);
    spread_computing(&mut record, &segments, &costs);
    let start = marks.get("start").copied().unwrap_or(f64::MIN);
    let stop = marks.get("stop").copied().filter(|&stop| stop > start).unwrap_or(f64::MAX);
    let first = record.waits.partition_point(|wait| wait.at_us < start);
    let after = record.waits.partition_point(|wait| wait.at_us < stop);
    record.measured = (first, after);
    record.elapsed_us = match (record.waits.get(first), after.checked_sub(1).map(|last| &record.waits[last]))
    {
        (Some(from), Some(to)) => (to.end_us() - (from.at_us - from.between_us)).max(0.0),
        _ => 0.0,
    };
    find_causes(&mut record);
    find_enders(&mut record);
    Ok(record)
}

/// Waits for pages lie in the computing; one that overlaps another wait is part of it.
fn put_faults(record: &mut RankRecord, faults: Vec<Wait>) {
    let mut all = Vec::with_capacity(record.waits.len() + faults.len());
    let mut faults = faults.into_iter().peekable();
    let mut free_from = f64::MIN;
    let mut put = |wait: Wait, free_from: &mut f64| {
        if wait.at_us >= *free_from {
            *free_from = wait.end_us();
            all.push(wait);
        }
    };
    for wait in std::mem::take(&mut record.waits) {
        while let Some(fault) = faults.next_if(|fault| fault.at_us < wait.at_us) {
            // It cannot have lasted longer than until the thread went on.
            let us = fault.us.min(wait.at_us - fault.at_us);
            put(Wait { us, ..fault }, &mut free_from);
        }
        free_from = free_from.min(wait.at_us);
        put(wait, &mut free_from);
    }
    for fault in faults {
        put(fault, &mut free_from);
    }
    record.waits = all;
}

/// A segment's CPU time without that of its faults, spread over what lies between the waits for pages within
/// it. What its clock shows besides, and no handler took, is spread over its faults.
fn spread_computing(record: &mut RankRecord, segments: &[Segment], costs: &Costs) {
    let (waits, handled) = (&mut record.waits, &record.handled);
    let mut before = None;
    for wait in &mut *waits {
        let free_from = before.unwrap_or(wait.at_us);
        wait.between_us = (wait.at_us - free_from).max(0.0);
        wait.computed_us = wait.between_us;
        before = Some(wait.end_us());
    }
    // The waits within each segment and the one that ends it.
    let mut parts = Vec::with_capacity(segments.len());
    let mut at = 0;
    for segment in segments {
        let first = at + waits[at..].partition_point(|wait| wait.at_us < segment.at_us - GRAIN_US);
        let last = first
            + waits[first..].partition_point(|wait| wait.at_us <= segment.at_us + segment.us + GRAIN_US);
        parts.push(first..last);
        at = last;
    }
    let ordinary_us = ordinary_section_us(waits, segments, &parts, costs);
    for (segment, part) in segments.iter().zip(parts) {
        let ordinary_us = ordinary_us.filter(|_| is_section(waits, &part));
        let within = &mut waits[part];
        let faults = within.iter().filter(|wait| wait.is_fault()).count();
        let handlers_us = handled_between(handled, segment, within);
        let cpu_us = (segment.cpu_us - costs.clock_us).max(0.0);
        let kernel_us: f64 = within.iter().map(|wait| costs.fault_us(wait.category)).sum();
        let computed_us = match ordinary_us {
            Some(ordinary_us) if within.len() > 1 => cpu_us.min(ordinary_us),
            _ => (cpu_us - kernel_us).max(0.0),
        };
        let between: f64 = within.iter().map(|wait| wait.between_us).sum();
        let share = if between > 0.0 { (computed_us / between).min(1.0) } else { 0.0 };
        let switch_us = (between - cpu_us - handlers_us).max(0.0) / faults.max(1) as f64;
        for wait in within {
            wait.computed_us = wait.between_us * share;
            wait.kernel_us = costs.fault_us(wait.category);
            wait.switch_us = if wait.is_fault() { switch_us } else { 0.0 };
        }
    }
}

/// The time of handlers that began in the segment, but in none of its waits.
fn handled_between(handled: &[Handled], segment: &Segment, within: &[Wait]) -> f64 {
    let from = handled.partition_point(|handled| handled.at_us < segment.at_us);
    let to = handled.partition_point(|handled| handled.at_us < segment.at_us + segment.us);
    let began = handled.get(from..to).unwrap_or_default().iter();
    began.filter(|handled| !waits_at(within, handled.at_us)).map(|handled| handled.us).sum()
}

/// Whether the time that ends with these waits lay between taking a lock and releasing it.
fn is_section(waits: &[Wait], part: &Range<usize>) -> bool {
    let before = part.start.checked_sub(1).map(|before| waits[before].category);
    let after = part.end.checked_sub(1).and_then(|last| waits.get(last)).map(|wait| wait.category);
    before == Some(Category::Lock) && after == Some(Category::Unlock)
}

/// Number of critical sections without a fault that is enough to tell what others compute.
const ENOUGH_SECTIONS: usize = 16;

/// What a rank computes in a critical section without faults: the median, if they are alike, by less than a
/// fault takes. Then those with faults compute as much, too, and the rest is the faults'. Their times differ
/// so much that subtracting the usual one from each would leave more than is computed.
fn ordinary_section_us(
    waits: &[Wait],
    segments: &[Segment],
    parts: &[Range<usize>],
    costs: &Costs,
) -> Option<f64> {
    let ordinary = |(_, part): &(&Segment, &Range<usize>)| is_section(waits, part) && part.len() == 1;
    let sections = segments.iter().zip(parts).filter(ordinary);
    let mut times: Vec<f64> =
        sections.map(|(segment, _)| (segment.cpu_us - costs.clock_us).max(0.0)).collect();
    times.sort_by(f64::total_cmp);
    let (median, last) = (*times.get(times.len() / 2)?, times.len() - 1);
    // Of nine in ten.
    let spread = times[last - last / 20] - times[last / 20];
    (times.len() >= ENOUGH_SECTIONS && spread < costs.fault_us(Category::WriteFault)).then_some(median)
}

fn find_causes(record: &mut RankRecord) {
    for sent in &mut record.sent {
        let at = sent.at_us + GRAIN_US;
        let handler = record.handled.partition_point(|handled| handled.at_us <= at).checked_sub(1);
        let wait = record.waits.partition_point(|wait| wait.at_us <= at);
        let inside = handler.filter(|&handler| {
            let handled = &record.handled[handler];
            sent.at_us <= handled.at_us + handled.us + GRAIN_US
        });
        let current =
            wait.checked_sub(1).filter(|&wait| sent.at_us <= record.waits[wait].end_us() + GRAIN_US);
        let (cause, since) = match (inside, current, handler) {
            (Some(handler), _, _) => (Cause::Handler(handler), record.handled[handler].at_us),
            // What a wait's last handler left to do.
            (None, Some(wait), Some(handler)) if record.handled[handler].at_us > record.waits[wait].at_us => {
                (Cause::Handler(handler), record.handled[handler].at_us)
            }
            (None, Some(wait), _) => (Cause::Wait(wait), record.waits[wait].at_us),
            (None, None, _) => (
                Cause::Computing(wait),
                wait.checked_sub(1).map_or(sent.at_us, |before| record.waits[before].end_us()),
            ),
        };
        let arrives = known(sent.kind).is_some_and(|(_, role, ..)| role == Role::Arrival);
        let barrier = current.filter(|&wait| arrives && record.waits[wait].category == Category::Barrier);
        sent.cause = match (cause, barrier) {
            (Cause::Handler(handled), Some(wait)) => Cause::Arrival { wait, handled },
            _ => cause,
        };
        sent.offset_us = (sent.at_us - since).max(0.0);
    }
}

fn find_enders(record: &mut RankRecord) {
    for wait in &mut record.waits {
        let from = record.handled.partition_point(|handled| handled.at_us < wait.at_us - GRAIN_US);
        let to = record.handled.partition_point(|handled| handled.at_us <= wait.end_us());
        let ends = |handled: &Handled| match handled.role {
            Role::Reply => {
                !handled.orders
                    || (wait.category.synchronizes() && (handled.lock.is_none() || handled.lock == wait.lock))
            }
            Role::Arrival => wait.category == Category::Barrier,
            Role::Request => false,
        };
        wait.ended_by = (from..to.max(from)).filter(|&at| ends(&record.handled[at])).collect();
        let since = wait.ended_by.last().map_or(wait.at_us, |&last| record.handled[last].at_us);
        wait.after_us = (wait.end_us() - since).max(0.0);
    }
}

/// The n-th message from a rank to another is the n-th that the other handled of it.
fn join(ranks: &mut [RankRecord]) -> Result<(), RecordingError> {
    let mut queues: BTreeMap<(usize, usize), VecDeque<usize>> = BTreeMap::new();
    for (from, rank) in ranks.iter().enumerate() {
        for (number, sent) in rank.sent.iter().enumerate() {
            queues.entry((from, sent.to)).or_default().push_back(number);
        }
    }
    let mut pairs = Vec::new();
    for (to, rank) in ranks.iter().enumerate() {
        for (number, handled) in rank.handled.iter().enumerate() {
            let from = handled.from;
            let next = queues.get_mut(&(from, to)).and_then(VecDeque::pop_front);
            let Some(sent) = next else {
                let received = rank.handled.iter().filter(|handled| handled.from == from).count();
                let sent =
                    ranks.get(from).map_or(0, |rank| rank.sent.iter().filter(|sent| sent.to == to).count());
                return Err(RecordingError::Unmatched { from, to, sent, received });
            };
            pairs.push((from, sent, to, number));
        }
    }
    for (from, sent, to, handler) in pairs {
        ranks[from].sent[sent].handler = handler;
        ranks[to].handled[handler].sent = sent;
    }
    // Messages on their way to a rank that has stopped listening are dropped.
    let mut lost: Vec<Vec<bool>> = ranks.iter().map(|rank| vec![false; rank.sent.len()]).collect();
    for ((from, _), left) in queues {
        for number in left {
            lost[from][number] = true;
        }
    }
    drop_lost(ranks, &lost);
    Ok(())
}

fn drop_lost(ranks: &mut [RankRecord], lost: &[Vec<bool>]) {
    let numbers: Vec<Vec<usize>> = lost
        .iter()
        .map(|lost| {
            lost.iter()
                .scan(0, |next, &gone| {
                    let this = *next;
                    *next += usize::from(!gone);
                    Some(this)
                })
                .collect()
        })
        .collect();
    for (rank, lost) in ranks.iter_mut().zip(lost) {
        let mut gone = lost.iter();
        rank.sent.retain(|_| !gone.next().copied().unwrap_or(false));
        for handled in &mut rank.handled {
            handled.sent = numbers[handled.from][handled.sent];
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Two ranks: rank 1 fetches a page from rank 0 and meets it at a barrier. Rank 0 computes 100 us, rank 1
    /// 50 us.
    pub fn small() -> Recording {
        let zero = [
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#,
            r#"{"at_ns":31000,"event":"receive","from":1,"type":"GetPage","ns":2000}"#,
            r#"{"at_ns":32000,"event":"send","to":1,"type":"Page","bytes":4109}"#,
            r#"{"at_ns":1000,"event":"compute","thread":0,"ns":100000,"cpu_ns":100000}"#,
            r#"{"at_ns":101000,"event":"wait","thread":0,"what":"barrier","ns":29000}"#,
            r#"{"at_ns":120000,"event":"receive","from":1,"type":"BarrierArrive","ns":1000}"#,
            r#"{"at_ns":120500,"event":"send","to":1,"type":"BarrierDepart","bytes":20}"#,
        ];
        let one = [
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#,
            r#"{"at_ns":21000,"event":"send","to":0,"type":"GetPage","bytes":10}"#,
            r#"{"at_ns":45000,"event":"receive","from":0,"type":"Page","ns":3000}"#,
            r#"{"at_ns":20000,"event":"wait","what":"read fault","ns":30000}"#,
            r#"{"at_ns":1000,"event":"compute","thread":0,"ns":109000,"cpu_ns":50000}"#,
            r#"{"at_ns":111000,"event":"send","to":0,"type":"BarrierArrive","bytes":20}"#,
            r#"{"at_ns":130000,"event":"receive","from":0,"type":"BarrierDepart","ns":1000}"#,
            r#"{"at_ns":110000,"event":"wait","thread":0,"what":"barrier","ns":25000}"#,
        ];
        parse(&[&zero, &one]).unwrap()
    }

    pub fn parse(files: &[&[&str]]) -> Result<Recording, RecordingError> {
        let mut events = 0;
        let mut all = Vec::new();
        for text in files {
            all.push(lines(text.join("\n").as_bytes(), Path::new("trace"), &mut events)?);
        }
        Recording::build(all)
    }

    #[test]
    fn messages_have_their_causes_and_waits_what_ended_them() {
        let found = small();
        let [zero, one] = &found.ranks[..] else { panic!("two ranks") };
        assert_eq!(
            zero.sent.iter().map(|sent| sent.cause).collect::<Vec<_>>(),
            [Cause::Handler(0), Cause::Handler(1)]
        );
        assert_eq!(
            one.sent.iter().map(|sent| sent.cause).collect::<Vec<_>>(),
            [Cause::Wait(1), Cause::Wait(2)]
        );
        assert_eq!(
            zero.waits.iter().map(|wait| wait.ended_by.clone()).collect::<Vec<_>>(),
            [vec![], vec![1]]
        );
        assert_eq!(
            one.waits.iter().map(|wait| wait.ended_by.clone()).collect::<Vec<_>>(),
            [vec![], vec![0], vec![1]]
        );
        assert_eq!(one.waits[1].category, Category::ReadFault);
    }

    #[test]
    fn computing_is_the_cpus_time_between_the_waits() {
        let found = small();
        let computed: Vec<f64> = found.ranks[1].waits.iter().map(|wait| wait.computed_us.round()).collect();
        // 19 us and 60 us on the clock share the 50 us.
        assert_eq!(computed, [0.0, 12.0, 38.0]);
        assert!((found.computed_us() - 150.0).abs() < 0.01, "{}", found.computed_us());
    }

    #[test]
    fn what_the_clock_shows_besides_is_the_faults() {
        // Of 79 us between the waits, rank 1 computes 50; rank 0 has no fault.
        let found = small();
        let switches = |found: &Recording| {
            found
                .ranks
                .iter()
                .flat_map(|rank| rank.waits.iter().map(|wait| wait.switch_us))
                .collect::<Vec<_>>()
        };
        assert_eq!(switches(&found), [0.0, 0.0, 0.0, 29.0, 0.0]);
        assert_eq!(switches(&found.undisturbed()), [0.0; 5], "it may have waited for a CPU");
        let handled = |at_ns: u64| {
            let lines = [
                r#"{"at_ns":0,"event":"wait","thread":0,"what":"barrier","ns":1000}"#.to_owned(),
                r#"{"at_ns":20000,"event":"wait","what":"read fault","ns":30000}"#.to_owned(),
                format!(r#"{{"at_ns":{at_ns},"event":"receive","from":0,"type":"GetPage","ns":9000}}"#),
                r#"{"at_ns":2000,"event":"send","to":0,"type":"GetPage","bytes":1}"#.to_owned(),
                r#"{"at_ns":1000,"event":"compute","thread":0,"ns":109000,"cpu_ns":50000}"#.to_owned(),
                r#"{"at_ns":110000,"event":"wait","thread":0,"what":"barrier","ns":1000}"#.to_owned(),
            ];
            computed(&lines).waits[1].switch_us
        };
        assert_eq!([30_000, 60_000].map(handled), [29.0, 20.0], "a handler between waits takes of it");
    }

    /// As floats of microseconds, today's clock values are whole quarters.
    const TODAY_NS: u64 = 1_795_358_710_802_869_937;

    /// A rank that repeatedly takes lock 7, uses a CPU for this many nanoseconds, with a write fault in it or
    /// not, and releases it. With the cost of reading the clock, and of a fault.
    fn sections(of: &[(u64, bool)]) -> Vec<String> {
        let mut text = vec![
            format!(r#"{{"at_ns":{TODAY_NS},"event":"cost","what":"clock","cpu_ns":200}}"#),
            format!(r#"{{"at_ns":{TODAY_NS},"event":"cost","what":"write fault","cpu_ns":5200}}"#),
        ];
        let mut at = TODAY_NS + 1;
        for &(cpu_ns, faults) in of {
            let span = |at: u64, event: &str, more: &str, ns: u64| {
                format!(r#"{{"at_ns":{at},"event":"{event}",{more},"ns":{ns}}}"#)
            };
            text.push(span(at, "wait", r#""thread":0,"what":"lock","lock":7"#, 1003));
            // On the clock it takes longer: another process has the CPU.
            text.push(span(at + 1003, "compute", &format!(r#""thread":0,"cpu_ns":{cpu_ns}"#), 90_007));
            if faults {
                text.push(span(at + 1100, "wait", r#""what":"write fault""#, 8_000));
            }
            text.push(span(at + 91_010, "wait", r#""thread":0,"what":"unlock","lock":7"#, 301));
            text.push(span(at + 91_311, "compute", r#""thread":0,"cpu_ns":400"#, 506));
            at += 91_817;
        }
        text
    }

    fn computed(text: &[String]) -> RankRecord {
        let lines: Vec<&str> = text.iter().map(String::as_str).collect();
        parse(&[&lines]).unwrap().ranks.remove(0)
    }

    #[test]
    fn short_pieces_of_computing_are_the_cpus_time_whatever_the_year() {
        // Ten sections of 0.3 us, and nine pieces of 0.2 us between them. By the clock they are 900 us.
        let found = computed(&sections(&[(500, false); 10]));
        assert!((found.computed_us() - (10.0 * 0.3 + 9.0 * 0.2)).abs() < 0.01, "{}", found.computed_us());
    }

    #[test]
    fn what_a_fault_takes_of_a_cpu_is_not_computing() {
        // Too few sections without a fault to tell what others compute: the usual cost is subtracted, as far
        // as there is so much.
        let found = computed(&sections(&[(25_200, true), (3_000, true)]));
        let [_, fault, unlock, next, ..] = &found.waits[..] else { panic!("{found:?}") };
        assert_eq!(
            (fault.category, unlock.category, next.category),
            (Category::WriteFault, Category::Unlock, Category::Lock)
        );
        assert!((fault.computed_us + unlock.computed_us - 20.0).abs() < 0.01, "{found:?}");
        assert!((fault.kernel_us - 5.0).abs() < 0.01 && unlock.kernel_us == 0.0, "{found:?}");
        assert!((found.computed_us() - (20.0 + 0.2)).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn a_critical_section_computes_as_much_with_a_fault_as_without() {
        let many = |ordinary: [u64; 2]| {
            let mut of: Vec<(u64, bool)> =
                ordinary.into_iter().cycle().take(40).map(|ns| (ns, false)).collect();
            of.extend([(30_200, true); 10]);
            computed(&sections(&of)).computed_us()
        };
        let between = 49.0 * 0.2;
        // Alike: 0.3 and 0.5 us. The other ten compute 0.5 us, and what is more is their faults'.
        let alike = many([500, 700]);
        assert!((alike - (20.0 * 0.3 + 20.0 * 0.5 + 10.0 * 0.5 + between)).abs() < 0.01, "{alike}");
        // Not alike: 0.3 and 9 us. It is unknown what the ten compute; the usual cost of a fault is
        // subtracted.
        let unlike = many([500, 9200]);
        assert!((unlike - (20.0 * 0.3 + 20.0 * 9.0 + 10.0 * 25.0 + between)).abs() < 0.01, "{unlike}");
    }

    #[test]
    fn only_what_is_between_start_and_stop_is_measured() {
        let lines = [
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"barrier","ns":10000}"#,
            r#"{"at_ns":12000,"event":"start"}"#,
            r#"{"at_ns":10000,"event":"compute","thread":0,"ns":90000,"cpu_ns":90000}"#,
            r#"{"at_ns":100000,"event":"wait","thread":0,"what":"barrier","ns":10000}"#,
            r#"{"at_ns":112000,"event":"stop"}"#,
            r#"{"at_ns":110000,"event":"compute","thread":0,"ns":10000,"cpu_ns":10000}"#,
            r#"{"at_ns":120000,"event":"wait","thread":0,"what":"barrier","ns":10000}"#,
        ];
        let found = parse(&[&lines]).unwrap();
        assert_eq!(found.ranks[0].measured, (1, 2));
        assert!((found.elapsed_us() - 100.0).abs() < 0.01);
        assert!((found.computed_us() - 90.0).abs() < 0.01);
    }

    #[test]
    fn a_step_that_waited_for_a_cpu_counts_as_its_like() {
        let mut text = vec![r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#.to_owned()];
        for (number, us) in (1..).zip([5, 5, 5, 900]) {
            let (at, ns) = (number * 1_000_000, us * 1000);
            text.push(format!(r#"{{"at_ns":{at},"event":"wait","what":"write fault","ns":{ns}}}"#));
        }
        text.push(r#"{"at_ns":9000000,"event":"wait","thread":0,"what":"barrier","ns":1000}"#.to_owned());
        let found = parse(&[&text.iter().map(String::as_str).collect::<Vec<_>>()]).unwrap();
        let faults = |found: &Recording| {
            found.ranks[0].waits[1..5].iter().map(|wait| wait.after_us).collect::<Vec<_>>()
        };
        assert_eq!(faults(&found), [5.0, 5.0, 5.0, 900.0]);
        assert_eq!(faults(&found.undisturbed()), [5.0; 4]);
    }

    #[test]
    fn every_message_type_is_known() {
        for name in rampool_sharing::Body::NAMES {
            assert!(known(name).is_some(), "{name} is not in KINDS");
        }
    }

    #[test]
    fn traces_that_say_nonsense_are_refused() {
        let error = |files: &[&[&str]]| parse(files).unwrap_err().to_string();
        assert!(error(&[&["{"]]).contains("trace, line 1"));
        assert!(error(&[&[r#"{"at_ns":-1000,"event":"start"}"#]]).contains("invalid value"));
        assert!(
            error(&[&[r#"{"at_ns":1,"event":"wait","ns":18446744073709551615}"#]])
                .contains("an impossible time")
        );
        assert!(
            error(&[&[r#"{"at_ns":1000,"event":"send","to":65000,"type":"Page","bytes":1}"#]])
                .contains("an impossible rank")
        );
        let two = [
            r#"{"at_ns":1000,"event":"wait","thread":0,"ns":1000}"#,
            r#"{"at_ns":3000,"event":"wait","thread":1,"ns":1000}"#,
        ];
        assert!(error(&[&two]).contains("2 threads"));
        let unmatched = [r#"{"at_ns":1000,"event":"receive","from":7,"type":"Page","ns":1000}"#];
        assert!(error(&[&unmatched]).contains("rank 0 handled 1 messages from rank 7, which sent 0"));
    }

    #[test]
    fn messages_that_were_never_handled_are_left_out() {
        let zero = [
            r#"{"at_ns":1000,"event":"send","to":1,"type":"Page","bytes":1}"#,
            r#"{"at_ns":2000,"event":"send","to":1,"type":"Page","bytes":2}"#,
        ];
        let one = [r#"{"at_ns":9000,"event":"receive","from":0,"type":"Page","ns":1000}"#];
        let found = parse(&[&zero, &one]).unwrap();
        assert_eq!(found.ranks[0].sent.len(), 1);
        assert_eq!(found.ranks[1].handled[0].sent, 0);
    }
}
