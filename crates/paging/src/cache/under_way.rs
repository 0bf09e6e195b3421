//! What is under way: batches, fetches and the installs of one step. Their states; what moves them from one to
//! the next is in `writeback`, `fetch` and `fault`.

use rampool_wire::units::Extent;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BatchPhase {
    Free,
    Evicting,
    /// Moved out; its dirty pages are not sent, because the pool is full or because they may yet be wanted
    /// back.
    Held,
    Storing,
    Lingering,
}

#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub phase: BatchPhase,
    /// The pages by their offset in the batch. Some may have come back, or be given up, since: their entries
    /// no longer point here.
    pub pages: Vec<u32>,
    /// Which of them the store under way carries.
    pub storing: Vec<u32>,
    /// Frames the runtime holds for it.
    pub frames: u64,
    /// The eviction clock when it left.
    pub clock: u32,
}

impl Batch {
    pub const FREE: Batch =
        Batch { phase: BatchPhase::Free, pages: Vec::new(), storing: Vec::new(), frames: 0, clock: 0 };
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FetchPhase {
    Free,
    InFlight,
    /// Landed; some of its pages are Ready.
    Idle,
}

#[derive(Clone, Debug)]
pub(super) struct Fetch {
    pub phase: FetchPhase,
    pub extents: Vec<Extent>,
    /// Pages in the buffer.
    pub pages: u32,
    /// Frames reserved for its pages.
    pub landing: u32,
    /// Pages that are Ready in it.
    pub ready: u32,
    /// The page that stays unmapped as the marker of `stream`.
    pub marker: Option<u32>,
    pub stream: Option<StreamId>,
    /// Its pages were expected for another reason than a stream.
    pub expected: bool,
    /// The fetch's age, to drop the oldest idle one first.
    pub serial: u64,
    /// The eviction clock when its first page left.
    pub left: u32,
    /// More pages with which it would not have been needed.
    pub to_avoid: u64,
}

impl Fetch {
    pub const FREE: Fetch = Fetch {
        phase: FetchPhase::Free,
        extents: Vec::new(),
        pages: 0,
        landing: 0,
        ready: 0,
        marker: None,
        stream: None,
        expected: false,
        serial: 0,
        left: 0,
        to_avoid: 0,
    };
}

/// Names a stream of the table, as long as its entry is not used for another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StreamId {
    pub slot: u32,
    pub generation: u32,
}

/// An install of this step, which the runtime may yet report as failed.
#[derive(Clone, Debug)]
pub(super) struct Installed {
    pub extent: Extent,
    pub source: Source,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// Was Fresh.
    Zero,
    /// Was Resident before.
    Nothing,
    Batch {
        slot: u32,
        offset: u32,
        was_dirty: bool,
    },
    Fetch {
        slot: u32,
        offset: u32,
    },
}
