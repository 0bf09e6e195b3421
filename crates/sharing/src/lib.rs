//! The shared view: one address range, mapped by ranks on many machines, kept consistent by a protocol chosen
//! per region.
//!
//! ```text
//!   application threads           the host (another crate)             this module
//!   load, store  --page fault-->  Event::Fault         -->  +----------------------------------+
//!   lock, barrier ------------->  Event::Sync          -->  | Engine                           |
//!   other ranks  --frames------>  Event::Receive       -->  |   sync      locks, barriers, conditions
//!                                                           |   protocol  one of six, by region
//!   page table   <--------------  Mem (called inside)  <--  |   home, interval, notice, diff: shared parts
//!   other ranks  <--frames------  Action::Send         <--  +----------------------------------+
//!   threads      <--------------  Action::Done, Retry
//! ```
//!
//! # The driving contract
//!
//! One [`Engine`] is one rank. It is a value: `Clone`, `Hash`, without a clock, a thread, a lock or I/O. Its
//! host keeps these rules:
//!
//! 1. One call of [`Engine::handle`] at a time per rank. It never blocks. It appends [`Action`]s, which the
//!    host carries out in order after the call; actions of one call are done before those of the next.
//! 2. [`Mem`] is called *during* `handle`, takes effect before it returns, and cannot fail. Application
//!    threads keep running meanwhile and may touch whatever the current protection allows.
//! 3. Channels are first-in-first-out and exactly-once for each ordered pair of ranks. On datagrams
//!    [`channel`] supplies that. A rank never receives from itself: the engine keeps its messages to its own
//!    rank.
//! 4. A fault is a hint. It may be reported late, twice or for no reason (the kernel may drop a mapping at
//!    any time); the engine checks its state instead of trusting the report. `Action::Retry` wakes *every*
//!    thread that waits for the page; each runs its access again.
//! 5. A thread has at most one `Event::Sync` outstanding; `Action::Done` ends it.
//! 6. Every running thread takes part in each barrier (it gives their number on its rank); a thread that does
//!    not is blocked in a lock or a condition. Operations that begin while the rank waits in a barrier are
//!    held until the barrier is over.
//! 7. `Action::SetTimer` asks for one `Event::Timer` after at least that many microseconds. `Event::Idle` is
//!    optional: while a rank is idle, its host may offer it unused network bandwidth.
//! 8. After `Action::Fatal` the run is over: every waiting thread has its error, every later operation ends
//!    in it at once, and the other ranks are told.
//!
//! # Walk
//!
//! Read `config` (what a region is), `state` (what all parts share), [`message`] (the messages between ranks),
//! `protocol` (the trait; `plugin` is the list of its implementations), then
//! `protocol/hlrc` as the plainest of six, then `sync/barrier` and `sync/lock`. [`Engine::handle`] ties them
//! together. [`control`], [`relink`], [`stream`] and [`channel`] are the connections between ranks; read them
//! on their own.
//!
//! Words are the literature's: a rank is a *node*, a page has a *home*, a *twin* is a copy made before
//! writing, a *diff* the bytes that differ from it, a *write notice* says that a page changed. Papers: Li and
//! Hudak (sc), Keleher et al. (lrc), Zhou, Iftode and Li (hlrc), Iftode et al. (aurc), Midorikawa et al.
//! (ibec).
#![forbid(unsafe_code)]

mod adapt;
mod ahead;
pub mod allocator;
mod by_lock;
pub mod channel;
pub mod config;
pub mod control;
pub mod diff;
pub mod direct;
mod engine;
mod home;
mod interval;
pub mod message;
mod notice;
mod overlay;
mod pages;
mod plugin;
mod protocol;
pub mod relink;
pub mod residency;
mod rule;
mod state;
mod stats;
pub mod stream;
mod sync;
mod wire;

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

pub use adapt::Mode;
pub use config::{Config, ConfigError, Homes, LockPath, Managers, ProtocolKind, RegionConfig, Tuning};
pub use diff::Diff;
pub use direct::{Access, DirectOp, PageAccess, Spans};
pub use engine::Engine;
pub use message::{Body, Class, Malformed, Message};
pub use rule::Rule;
pub use stats::Stats;

use rampool_wire::units::{Extent, PageIndex};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty), $word:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {}"), self.0)
            }
        }
    };
}

number!(
    /// One process of a parallel program: `0 .. ranks`.
    Rank(u16),
    "rank"
);
number!(
    /// A thread of this rank's application. The host assigns the numbers; they mean nothing on other ranks.
    ThreadId(u16),
    "thread"
);
number!(
    /// A lock. Any number below `1 << 63` names one; no lock needs to be created.
    LockId(u64),
    "lock"
);
number!(
    /// A condition variable. It belongs to the lock that it is used with.
    CondId(u32),
    "condition"
);
number!(
    /// A barrier. At any time all ranks meet at the same one; the number only serves to detect a mismatch.
    BarrierId(u32),
    "barrier"
);

/// The access that the application's view of a page allows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Protection {
    None,
    Read,
    ReadWrite,
}

/// This rank's copy of the shared pages and the application's view of them.
///
/// The host maps one object twice: the application's view, with protection, and an alias of its own. All
/// content moves through the alias, which needs no protection. A page that was never installed or stored to
/// reads as zeroes.
pub trait Mem {
    /// Changes the protection of the application's view of every page in `runs` (ascending, disjoint; one
    /// flush is enough for all of them). When it returns, no thread can act under an older, wider protection,
    /// and every store made under it is in the page.
    fn protect(&mut self, runs: &[Extent], to: Protection);
    /// A thread faulted although the engine allows its access: maps the page again with its present
    /// protection.
    fn reassert(&mut self, page: PageIndex);
    /// Reads the whole page through the alias into `into` (as long as the page). Other threads may write
    /// meanwhile; each byte is one that was there at some instant of the call.
    fn snapshot(&mut self, page: PageIndex, into: &mut [u8]);
    /// Reads a naturally aligned word of the page, of `width` bytes up to 8, as `snapshot` does.
    fn word(&mut self, page: PageIndex, page_bytes: usize, at: usize, width: usize) -> u64 {
        let mut all = vec![0; page_bytes];
        self.snapshot(page, &mut all);
        all[at..at + width].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }
    /// Whether examining the page takes no longer than copying it. A page that is away keeps its content, and
    /// a thread that touches it waits.
    fn is_near(&self, _page: PageIndex) -> bool {
        true
    }
    /// Writes exactly the bytes of `diff`, through the alias and byte by byte: a byte that is not in it may
    /// be written by a thread at the same instant and must survive.
    fn store(&mut self, page: PageIndex, diff: &Diff);
    /// Fills the whole page through the alias, then maps it with `to`. The page is not mapped before; threads
    /// see all of it or none.
    fn install(&mut self, page: PageIndex, bytes: &[u8], to: Protection);
    /// Installs pages, ascending, all with the same protection. Neighbours may be mapped in one go.
    fn install_all(&mut self, pages: &[(PageIndex, &[u8])], to: Protection) {
        for (page, bytes) in pages {
            self.install(*page, bytes, to);
        }
    }
    /// The content of this page (protection `None`) is no longer needed.
    fn discard(&mut self, page: PageIndex);
    /// These pages, all of one region, are unused, whatever their protection, which stays. Their memory goes
    /// back, and they read as zeroes.
    fn clear(&mut self, pages: Extent);
    /// Lends a lock, which is here and free, to the threads of this rank: from now on they take it
    /// (exclusively) and give it back without the engine, until it is recalled. False: it is not lent.
    fn lend(&mut self, _lock: LockId) -> bool {
        false
    }
    /// How often threads have taken this lock, which is lent.
    fn lent_times(&self, _lock: LockId) -> u32 {
        0
    }
    /// A lock that was lent is so no more: the next operation on it is the engine's.
    fn recall(&mut self, _lock: LockId) -> Recalled {
        Recalled::default()
    }
    /// The engine is about to release what was written so far. Uses of lent locks that end from now on are
    /// told apart from earlier ones ([`Recalled::used`]).
    fn begin_release(&mut self) {}
}

/// What became of a lock that was lent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Recalled {
    /// How often threads took it.
    pub times: u32,
    /// One gave it back since the last [`Mem::begin_release`] began.
    pub used: bool,
    /// The one that holds it.
    pub holder: Option<ThreadId>,
}

/// An input of the engine.
#[derive(Debug)]
pub enum Event<'a> {
    /// `thread` waits for access to `page`.
    Fault { thread: ThreadId, page: PageIndex, write: bool },
    /// `thread` asks for an operation and waits until its `Action::Done`.
    Sync { thread: ThreadId, op: SyncOp },
    /// Like `Sync`, for a direct operation on pages, which homes carry out. `under`: a lock of a client whose
    /// operations several ranks carry out in turn; each rank holds it meanwhile, and so learns of the
    /// operations of the rank before.
    Direct { thread: ThreadId, op: DirectOp, under: Option<LockId> },
    /// A message from another rank, in order.
    Receive { from: Rank, message: &'a Message },
    /// An `Action::SetTimer` is due.
    Timer(TimerId),
    /// The rank has time and the network room for about this many bytes.
    Idle { budget_bytes: u32 },
    /// The host needs room. Those of `pages` that are copies which can be fetched again are dropped
    /// ([`Mem::discard`]); nothing is written back for it.
    Evict { pages: &'a [PageIndex] },
    /// These pages were freed on all ranks: no thread uses them, and no rank needs to see what was written
    /// there. At the next barrier all ranks forget what they know of them, if one rank (the root) is also
    /// told to `renew` them; then they are as new.
    Freed { pages: Extent, renew: bool },
    /// This rank cannot be reached any more, and how that was detected.
    PeerLost { peer: Rank, how: &'a str },
    /// Every lock that is lent to threads ([`Mem::lend`]) comes back.
    Recall,
    /// The host ends the run.
    Stop { why: &'a str },
}

/// The operations of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SyncOp {
    /// Waits for the lock. With `wait` false it ends at once in `OpResult::Busy` if the lock is held.
    Lock { lock: LockId, mode: LockMode, wait: bool },
    /// Releases a lock that this thread holds.
    Unlock { lock: LockId },
    /// Waits until `threads` threads of this rank and those of every other rank are here, then makes every
    /// write visible to all.
    Barrier { barrier: BarrierId, kind: BarrierKind, threads: u16 },
    /// Releases `lock` (held exclusively), waits for a signal, takes the lock again.
    Wait { cond: CondId, lock: LockId },
    /// Wakes one waiter of `cond`, or all of them.
    Signal { cond: CondId, lock: LockId, all: bool },
    /// Makes this thread's writes available to every thread that synchronises with it later, without
    /// releasing a lock.
    Fence,
    /// Reads and changes one naturally aligned word of 1, 2, 4 or 8 bytes as one step, ordered like a lock of
    /// that word.
    Atomic { page: PageIndex, offset: u32, width: u8, op: AtomicOp },
    /// From the next barrier on `manager` manages the lock.
    SetLockManager { lock: LockId, manager: Rank },
    /// From the next barrier on `home` is the page's home.
    SetHome { page: PageIndex, home: Rank },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LockMode {
    /// A single thread.
    Exclusive,
    /// Any number of readers, no writer.
    Shared,
    /// S5's non-exclusive lock: it fetches the newest released data and then excludes no one, and is not
    /// released. Only if every region is `ibec`; otherwise it is `Shared`.
    Snapshot,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BarrierKind {
    Normal,
    /// S5's barrier for single-writer data: a page that a single rank wrote becomes that rank's to write
    /// without fault, twin or notice (home-based protocols; elsewhere like `Normal`).
    KeepReadWrite,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AtomicOp {
    Load,
    Store(u64),
    Swap(u64),
    Add(u64),
    And(u64),
    Or(u64),
    Xor(u64),
    /// Adds to an IEEE double (width 8), given and returned as bits.
    AddDouble(u64),
    CompareExchange {
        expect: u64,
        new: u64,
    },
}

/// The result of an operation.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum OpResult {
    Ok,
    /// The lock is held (only for `wait: false`).
    Busy,
    /// The word's value before the atomic operation.
    Value(u64),
    /// The result of a direct operation: the bytes of its accesses, one after the other.
    Bytes(Arc<[u8]>),
    Failed(OpError),
}

/// Why an operation failed. The first group is a mistake of the program, and only this call fails; `Stopped`
/// ends the run.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    #[error("{thread} unlocks {lock} which it does not hold")]
    NotHeld { thread: ThreadId, lock: LockId },
    #[error("{thread} locks {lock} which it holds already")]
    AlreadyHeld { thread: ThreadId, lock: LockId },
    #[error("{page} is in no shared region")]
    NoSuchPage { page: PageIndex },
    #[error("{rank} is not one of the {ranks} ranks")]
    NoSuchRank { rank: Rank, ranks: u16 },
    #[error(
        "an atomic of {width} bytes at byte {offset} of a page of {page_bytes} is not a naturally aligned word of 1, 2, 4 or 8 bytes"
    )]
    Misaligned { width: u8, offset: u32, page_bytes: u32 },
    #[error(
        "a direct operation reaches out of {page}, which has {page_bytes} bytes, cuts an element in two, or is not for such elements"
    )]
    NoSuchAccess { page: PageIndex, page_bytes: u32 },
    #[error("{0}")]
    Stopped(Reason),
}

/// Why a run ended.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    #[error("{peer} is lost: {how}")]
    PeerLost { peer: Rank, how: String },
    #[error("{why}")]
    Stopped { why: String },
    #[error("{peer} ended the run: {why}")]
    Aborted { peer: Rank, why: String },
    #[error("{peer} sent an invalid message: {what}")]
    BadMessage { peer: Rank, what: String },
    #[error("ranks meet at different barriers: {one} at {here}, {other} at {there}")]
    BarrierMismatch { one: Rank, here: String, other: Rank, there: String },
    #[error("{thread} expects {said} threads of {rank} at the barrier, another thread expects {before}")]
    BarrierThreads { rank: Rank, thread: ThreadId, said: u16, before: u16 },
}

/// Names a timer of this engine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum TimerId {
    /// `sc` keeps a page that it has just got until the waiting thread could use it.
    Hold(PageIndex),
    /// A lock that this rank's threads use all the time goes to the rank that wants it.
    Keep(LockId),
}

/// Work for the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Send to another rank, in order.
    Send { to: Rank, message: Message },
    /// The thread's operation is over.
    Done { thread: ThreadId, result: OpResult },
    /// Wake every thread that waits for this page.
    Retry { page: PageIndex },
    /// Deliver `Event::Timer(timer)` after at least this long.
    SetTimer { timer: TimerId, after_us: u32 },
    /// These pages are as new on this rank, and no other rank will use anything older that it knows of them.
    Renewed { pages: Extent },
    /// The run is over.
    Fatal(Reason),
}

/// What the engine exchanges with `Mem`, and where actions go.
pub(crate) struct Io<'a> {
    pub mem: &'a mut dyn Mem,
    pub out: &'a mut Vec<Action>,
}

/// A peer broke the protocol, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Violation(pub String);

impl Violation {
    pub fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

pub(crate) type Checked<T = ()> = Result<T, Violation>;

/// Pages, ascending, as extents.
#[must_use]
pub fn extents(pages: impl IntoIterator<Item = PageIndex>) -> Vec<Extent> {
    let mut runs = Vec::new();
    for page in pages {
        rampool_wire::units::push_page(&mut runs, page);
    }
    runs
}
