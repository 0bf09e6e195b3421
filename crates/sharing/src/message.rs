//! Messages between ranks. `encode` and `decode` convert a message to the bytes of a frame and back.

use std::sync::Arc;

use super::adapt::Mode;
use super::direct::{Changed, PageAccess};
use super::interval::IntervalId;
use super::notice::NoticeRuns;
pub use super::wire::Malformed;
use super::wire::{Limits, Reader, Wire, wire_enum, wire_struct};
use super::{BarrierId, BarrierKind, CondId, Diff, LockId, LockMode, ProtocolKind, Rank, ThreadId};
use rampool_wire::units::PageIndex;

/// A message, stamped with the number of barriers its sender has left.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Message {
    pub epoch: u32,
    pub body: Body,
}

/// The network priority of a message. A higher class never waits for a lower one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Class {
    /// Requests, acknowledgements, locks: small, bounded in number.
    Control,
    /// Carries pages, diffs or notices.
    Data,
    /// May wait for room.
    Background,
}

impl Message {
    /// Appends the message's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.epoch.put(out);
        self.body.put(out);
    }

    /// Reads a message that fills `bytes` exactly.
    ///
    /// # Errors
    /// If the bytes are not a message. A valid one may still name pages or ranks that do not exist; the
    /// engine refuses those.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = Reader::new(bytes);
        let message = Self { epoch: Wire::take(&mut from)?, body: Wire::take(&mut from)? };
        if from.left() > 0 {
            return from.fail("there is more than one message");
        }
        Ok(message)
    }

    #[must_use]
    pub fn class(&self) -> Class {
        match &self.body {
            Body::Update { .. } => Class::Background,
            Body::ScData { bytes: Some(_), .. }
            | Body::Page { .. }
            | Body::Pages { .. }
            | Body::Push { .. }
            | Body::Diffs { .. }
            | Body::Flush { .. }
            | Body::Direct { .. }
            | Body::DirectDone { .. }
            | Body::Log { .. }
            | Body::LockGrant { .. }
            | Body::LockRelease { .. }
            | Body::LockReturn { .. }
            | Body::BarrierArrive { .. }
            | Body::BarrierFlush { .. }
            | Body::BarrierFlushed { .. }
            | Body::BarrierDepart { .. }
            | Body::HomeMove { .. } => Class::Data,
            _ => Class::Control,
        }
    }

    /// No thread waits for it: it may travel together with the next message.
    #[must_use]
    pub fn can_wait(&self) -> bool {
        matches!(self.body, Body::LockReleaseAck { .. })
    }

    /// Its kind, as a place in [`Body::NAMES`].
    #[must_use]
    pub fn kind(&self) -> usize {
        self.body.kind()
    }

    /// The name of its kind.
    #[must_use]
    pub fn name(&self) -> &'static str {
        Body::NAMES[self.kind()]
    }

    /// The lock that it is about.
    pub fn lock(&self) -> Option<LockId> {
        match self.body {
            Body::LockRequest { lock, .. }
            | Body::LockForward { lock, .. }
            | Body::LockGrant { lock, .. }
            | Body::LockBusy { lock }
            | Body::LockRelease { lock, .. }
            | Body::LockReleaseAck { lock }
            | Body::LockHeld { lock }
            | Body::LockReturn { lock, .. }
            | Body::CondWait { lock, .. }
            | Body::CondQueued { lock, .. }
            | Body::CondSignal { lock, .. }
            | Body::CondWake { lock, .. }
            | Body::ManagerMove { lock, .. } => Some(lock),
            _ => None,
        }
    }

    pub(crate) fn sane(&self, limits: &Limits<'_>) -> bool {
        self.body.sane(limits)
    }
}

/// The content of a message.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Body {
    // sc: requester -> home -> owner -> requester -> home.
    ScRequest {
        page: PageIndex,
        write: bool,
        by: Rank,
    },
    ScForward {
        page: PageIndex,
        write: bool,
        to: Rank,
        acks: u16,
    },
    ScData {
        page: PageIndex,
        write: bool,
        acks: u16,
        bytes: Option<Arc<[u8]>>,
    },
    ScInvalidate {
        page: PageIndex,
        to: Rank,
    },
    ScAck {
        page: PageIndex,
    },
    ScDone {
        page: PageIndex,
        write: bool,
        by: Rank,
    },
    ScMove {
        page: PageIndex,
        owner: Rank,
        copies: Vec<Rank>,
    },

    // Pages and their changes.
    GetPage {
        page: PageIndex,
        by: Rank,
    },
    Page {
        copy: PageCopy,
    },
    /// Pages of one home that no thread waits for yet, ascending; answered by `Pages`.
    GetPages {
        pages: Vec<PageIndex>,
    },
    Pages {
        copies: Vec<PageCopy>,
    },
    /// auto: pages that changed, unasked, at the end of a barrier.
    Push {
        copies: Vec<PageCopy>,
    },
    DiffRequest {
        page: PageIndex,
        first: u32,
        last: u32,
    },
    Diffs {
        page: PageIndex,
        diffs: Vec<IntervalDiff>,
    },
    /// Changes for their home; answered by `FlushAck`. `fences` are pages whose changes were streamed before;
    /// under sc, where nothing else is flushed, pages whose copies the sender has dropped. `under`: the lock
    /// whose release it is.
    Flush {
        protocol: ProtocolKind,
        flush: u64,
        under: Option<LockId>,
        diffs: Vec<PageDiff>,
        fences: Vec<PageIndex>,
    },
    FlushAck {
        protocol: ProtocolKind,
        flush: u64,
        pages: Vec<Advance>,
    },
    /// Changes streamed to their home, never answered.
    Update {
        diffs: Vec<PageDiff>,
    },
    /// ibec: writes under locks, for the pages' homes, at a barrier; answered by `FlushAck`.
    Log {
        flush: u64,
        pages: Vec<PageRuns>,
    },
    /// Direct operations on pages of one home and one protocol; answered by `DirectDone`. `call` is a flush
    /// of the sender's, too.
    Direct {
        call: u64,
        accesses: Vec<PageAccess>,
    },
    /// `bytes`: the results of the accesses, one after the other.
    DirectDone {
        call: u64,
        bytes: Arc<[u8]>,
        changed: Vec<Changed>,
    },

    // Locks and conditions.
    LockRequest {
        lock: LockId,
        ask: Ask,
    },
    /// To the last holder. `recall`: the manager itself wants the lock back, to manage it centrally.
    LockForward {
        lock: LockId,
        ask: Ask,
        recall: bool,
    },
    LockGrant {
        lock: LockId,
        mode: LockMode,
        central: bool,
        parts: Vec<Part>,
    },
    LockBusy {
        lock: LockId,
    },
    LockRelease {
        lock: LockId,
        by: Rank,
        mode: LockMode,
        parts: Vec<Part>,
    },
    LockReleaseAck {
        lock: LockId,
    },
    /// The recalled lock is in use.
    LockHeld {
        lock: LockId,
    },
    /// A recalled lock returns.
    LockReturn {
        lock: LockId,
        by: Rank,
        /// How often threads of the rank took it without a message.
        again: u32,
        parts: Vec<Part>,
    },
    /// Queue this waiter; `release` releases a centrally managed lock in the same step.
    CondWait {
        cond: CondId,
        lock: LockId,
        by: Rank,
        thread: ThreadId,
        release: Option<Vec<Part>>,
    },
    CondQueued {
        lock: LockId,
        thread: ThreadId,
    },
    CondSignal {
        cond: CondId,
        lock: LockId,
        all: bool,
    },
    CondWake {
        lock: LockId,
        thread: ThreadId,
    },

    // Barriers.
    BarrierArrive {
        barrier: BarrierId,
        kind: BarrierKind,
        rank: Rank,
        moves: Moves,
        parts: Vec<Part>,
    },
    BarrierFlush {
        parts: Arc<Vec<Part>>,
    },
    BarrierFlushed {
        parts: Vec<Part>,
    },
    BarrierDepart {
        departure: Arc<Departure>,
    },

    // Tables that move.
    ManagerMove {
        lock: LockId,
        state: LockState,
    },
    HomePull {
        page: PageIndex,
        by: Rank,
    },
    HomeMove {
        copy: PageCopy,
    },

    /// The run is over.
    Abort {
        why: String,
    },
}

/// The names of all kinds.
macro_rules! names {
    ($($variant:ident),* $(,)?) => {
        enum Kind {
            $($variant),*
        }

        impl Body {
            pub const NAMES: &[&str] = &[$(stringify!($variant)),*];

            fn kind(&self) -> usize {
                match self {
                    $( Self::$variant { .. } => Kind::$variant as usize, )*
                }
            }
        }
    };
}

names!(
    ScRequest,
    ScForward,
    ScData,
    ScInvalidate,
    ScAck,
    ScDone,
    ScMove,
    GetPage,
    Page,
    GetPages,
    Pages,
    Push,
    DiffRequest,
    Diffs,
    Flush,
    FlushAck,
    Update,
    Log,
    Direct,
    DirectDone,
    LockRequest,
    LockForward,
    LockGrant,
    LockBusy,
    LockRelease,
    LockReleaseAck,
    LockHeld,
    LockReturn,
    CondWait,
    CondQueued,
    CondSignal,
    CondWake,
    BarrierArrive,
    BarrierFlush,
    BarrierFlushed,
    BarrierDepart,
    ManagerMove,
    HomePull,
    HomeMove,
    Abort,
);

wire_enum!(Body {
    1 => ScRequest { page, write, by },
    2 => ScForward { page, write, to, acks },
    3 => ScData { page, write, acks, bytes },
    4 => ScInvalidate { page, to },
    5 => ScAck { page },
    6 => ScDone { page, write, by },
    7 => ScMove { page, owner, copies },
    0x10 => GetPage { page, by },
    0x11 => Page { copy },
    0x12 => DiffRequest { page, first, last },
    0x13 => Diffs { page, diffs },
    0x14 => Flush { protocol, flush, under, diffs, fences },
    0x15 => FlushAck { protocol, flush, pages },
    0x16 => Update { diffs },
    0x17 => Log { flush, pages },
    0x18 => GetPages { pages },
    0x19 => Pages { copies },
    0x1a => Push { copies },
    0x1b => Direct { call, accesses },
    0x1c => DirectDone { call, bytes, changed },
    0x20 => LockRequest { lock, ask },
    0x21 => LockForward { lock, ask, recall },
    0x22 => LockGrant { lock, mode, central, parts },
    0x23 => LockBusy { lock },
    0x24 => LockRelease { lock, by, mode, parts },
    0x25 => LockReleaseAck { lock },
    0x26 => LockReturn { lock, by, again, parts },
    0x27 => LockHeld { lock },
    0x28 => CondWait { cond, lock, by, thread, release },
    0x29 => CondQueued { lock, thread },
    0x2a => CondSignal { cond, lock, all },
    0x2b => CondWake { lock, thread },
    0x30 => BarrierArrive { barrier, kind, rank, moves, parts },
    0x31 => BarrierFlush { parts },
    0x32 => BarrierFlushed { parts },
    0x33 => BarrierDepart { departure },
    0x38 => ManagerMove { lock, state },
    0x39 => HomePull { page, by },
    0x3a => HomeMove { copy },
    0x63 => Abort { why },
});

/// A whole page.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PageCopy {
    pub page: PageIndex,
    /// Home-based protocols: how many releases of it the home has seen.
    pub version: u32,
    /// lrc: up to which interval of each writer the content reaches.
    pub applied: Vec<(Rank, u32)>,
    /// auto: the page's mode.
    pub mode: Mode,
    pub bytes: Arc<[u8]>,
}

impl Wire for PageCopy {
    fn put(&self, out: &mut Vec<u8>) {
        self.page.put(out);
        self.version.put(out);
        self.applied.put(out);
        self.mode.put(out);
        self.bytes.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            page: Wire::take(from)?,
            version: Wire::take(from)?,
            applied: Wire::take(from)?,
            mode: Wire::take(from)?,
            bytes: Wire::take(from)?,
        })
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        limits.fills(self.page, &self.bytes) && self.applied.sane(limits)
    }
}

/// Changes for one home are sent in messages of about this many bytes: the home stores those of one while the
/// next is on its way.
const MESSAGE_OF_CHANGES: usize = 256 << 10;

/// Splits changes for one home into messages, at least one, in their order.
pub(super) fn in_messages<T>(changes: Vec<T>, weight: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let mut messages = vec![Vec::new()];
    let mut left = MESSAGE_OF_CHANGES;
    for change in changes {
        let weight = weight(&change);
        if weight > left && messages.last().is_some_and(|last| !last.is_empty()) {
            messages.push(Vec::new());
            left = MESSAGE_OF_CHANGES;
        }
        left = left.saturating_sub(weight);
        messages.last_mut().expect("there is one").push(change);
    }
    messages
}

/// Changes of one page.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PageDiff {
    pub page: PageIndex,
    pub diff: Diff,
}

impl PageDiff {
    /// An upper bound of its length in a message.
    pub(super) fn weight(&self) -> usize {
        self.diff.len() + self.diff.runs() * 2 * size_of::<u64>() + 2 * size_of::<u64>()
    }
}

impl Wire for PageDiff {
    fn put(&self, out: &mut Vec<u8>) {
        self.page.put(out);
        self.diff.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { page: Wire::take(from)?, diff: Wire::take(from)? })
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        limits.fits(self.page, &self.diff)
    }
}

/// lrc: one rank's changes of a page in its intervals `first ..= last`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct IntervalDiff {
    pub first: u32,
    pub last: u32,
    /// Sum of the writer's vector time at `first`: the diff's place among others.
    pub key: u64,
    pub diff: Arc<Diff>,
}
wire_struct!(IntervalDiff { first, last, key, diff });

/// The home took a diff: the page's version before and after.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Advance {
    pub page: PageIndex,
    pub before: u32,
    pub after: u32,
    /// auto: the page's mode.
    pub mode: Mode,
}
wire_struct!(Advance { page, before, after, mode });

/// When, in program order, a byte was written: Lamport clock, then rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Stamp {
    pub clock: u64,
    pub rank: Rank,
}
wire_struct!(Stamp { clock, rank });

/// ibec: bytes of a page with the stamps of their writes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PageRuns {
    pub page: PageIndex,
    pub runs: Vec<(Stamp, Diff)>,
}

impl PageRuns {
    /// An upper bound of its length in a message.
    pub(super) fn weight(&self) -> usize {
        let runs = self.runs.iter().map(|(_, diff)| diff.len() + (diff.runs() * 2 + 4) * size_of::<u64>());
        runs.sum::<usize>() + 2 * size_of::<u64>()
    }
}

impl Wire for PageRuns {
    fn put(&self, out: &mut Vec<u8>) {
        self.page.put(out);
        self.runs.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { page: Wire::take(from)?, runs: Wire::take(from)? })
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        self.runs.iter().all(|(stamp, diff)| stamp.sane(limits) && limits.fits(self.page, diff))
    }
}

/// A request for a lock.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Ask {
    pub by: Rank,
    pub mode: LockMode,
    pub wait: bool,
    /// The requester's epoch: `infos` of an older one are void.
    pub epoch: u32,
    pub infos: Vec<(ProtocolKind, Info)>,
}
wire_struct!(Ask { by, mode, wait, epoch, infos });

/// What a requester knows already, for one protocol.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Info {
    Nothing,
    /// Its vector time.
    Time {
        at: Vec<(Rank, u32)>,
    },
    /// ibec: the requester's timestamp of the lock.
    Seen {
        at: u64,
    },
}
wire_enum!(Info { 0 => Nothing {}, 1 => Time { at }, 2 => Seen { at } });

/// The payload of synchronisation for one protocol.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Part {
    pub protocol: ProtocolKind,
    pub payload: Payload,
}
wire_struct!(Part { protocol, payload });

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Payload {
    Nothing,
    /// hlrc, aurc, auto: intervals as notices. For a manager, `upto` is the time that the lock's next holder
    /// has to know. `riding`: pages that come with the lock.
    Homed {
        records: Vec<(IntervalId, NoticeRuns)>,
        upto: Vec<(Rank, u32)>,
        riding: Vec<PageCopy>,
    },
    /// lrc: intervals. At barriers `collect` asks for a collection of diffs.
    Lazy {
        records: Vec<(IntervalId, LazyRecord)>,
        upto: Vec<(Rank, u32)>,
        collect: bool,
    },
    /// Pages that changed, at a barrier. `logged`: there were writes under locks (ibec).
    Changed {
        notices: NoticeRuns,
        logged: bool,
    },
    /// ibec: a lock's data up to timestamp `at`.
    Runs {
        at: u64,
        pages: Vec<PageRuns>,
    },
    /// ibec, old scheme: every update since the last barrier, one after the other.
    History {
        updates: Vec<Vec<PageRuns>>,
    },
}
wire_enum!(Payload {
    0 => Nothing {},
    1 => Homed { records, upto, riding },
    2 => Lazy { records, upto, collect },
    3 => Changed { notices, logged },
    4 => Runs { at, pages },
    5 => History { updates },
});

/// lrc: an interval's pages.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct LazyRecord {
    /// Sum of the writer's vector time when it ended.
    pub key: u64,
    pub pages: NoticeRuns,
}
wire_struct!(LazyRecord { key, pages });

/// Moves requested of a barrier.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Moves {
    /// The proposing rank, and the new home. The lowest proposer wins.
    pub homes: Vec<(PageIndex, (Rank, Rank))>,
    pub managers: Vec<(LockId, (Rank, Rank))>,
    /// Unused pages, as first page and count, all of one region.
    pub freed: Vec<(PageIndex, u32)>,
}
wire_struct!(Moves { homes, managers, freed });

/// The end of a barrier.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Departure {
    pub kind: BarrierKind,
    pub moves: Moves,
    /// Pages that become their single writer's, with no copy left elsewhere.
    pub kept: Vec<(PageIndex, Rank)>,
    pub parts: Vec<Part>,
}
wire_struct!(Departure { kind, moves, kept, parts });

/// A lock's management on its way to another rank.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct LockState {
    /// The last requester, where the lock passes from holder to holder.
    pub last: Option<Rank>,
    /// It has been recalled, but has not returned yet.
    pub recalling: bool,
    pub holder: Option<Rank>,
    pub readers: Vec<Rank>,
    pub queue: Vec<Ask>,
    pub waiters: Vec<(CondId, Vec<(Rank, ThreadId)>)>,
}
wire_struct!(LockState { last, recalling, holder, readers, queue, waiters });

macro_rules! wire_plain {
    ($name:ident { $($tag:literal => $variant:ident),* $(,)? }) => {
        impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(match self { $( Self::$variant => $tag ),* });
            }
            fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
                match from.bytes(1)?[0] {
                    $( $tag => Ok(Self::$variant), )*
                    _ => from.fail("an unknown kind"),
                }
            }
        }
    };
}
wire_plain!(ProtocolKind { 0 => Sc, 1 => Lrc, 2 => Hlrc, 3 => Aurc, 4 => Ibec, 5 => Auto });
wire_plain!(LockMode { 0 => Exclusive, 1 => Shared, 2 => Snapshot });
wire_plain!(BarrierKind { 0 => Normal, 1 => KeepReadWrite });

impl Wire for BarrierId {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self(Wire::take(from)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::MOST_FRAME_BYTES;

    #[test]
    fn changes_of_any_number_of_pages_fit_into_frames() {
        let page_bytes = 4096;
        // Every other word of 300 MiB.
        let mut diff = Diff::default();
        (0..page_bytes / 2).step_by(4).for_each(|at| diff.push(at * 2, &[1; 4]));
        let changes: Vec<PageDiff> = (0..300_u64 << 20 >> 12)
            .map(|page| PageDiff { page: PageIndex(page), diff: diff.clone() })
            .collect();
        let pages: Vec<PageIndex> = changes.iter().map(|change| change.page).collect();
        let messages = in_messages(changes, PageDiff::weight);
        assert!(messages.len() > 10, "{}", messages.len());
        assert_eq!(messages.iter().flatten().map(|change| change.page).collect::<Vec<_>>(), pages);
        for diffs in messages {
            let weight: usize = diffs.iter().map(PageDiff::weight).sum();
            let body = Body::Flush {
                protocol: ProtocolKind::Hlrc,
                flush: u64::MAX,
                under: None,
                diffs,
                fences: Vec::new(),
            };
            let mut out = Vec::new();
            Message { epoch: u32::MAX, body }.encode(&mut out);
            assert!(
                out.len() <= weight + 64 && weight <= MESSAGE_OF_CHANGES && out.len() < MOST_FRAME_BYTES,
                "{} {weight}",
                out.len()
            );
        }
        assert_eq!(in_messages(Vec::new(), PageDiff::weight), [Vec::new()]);
        // A change that is too large for one message is alone.
        assert_eq!(
            in_messages(vec![1, MESSAGE_OF_CHANGES + 1, 2], |&weight| weight),
            [vec![1], vec![MESSAGE_OF_CHANGES + 1], vec![2]]
        );
    }
}
