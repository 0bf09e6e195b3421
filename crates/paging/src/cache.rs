//! The paged view's page cache: which pages are resident, which leave, which come early.
//!
//! One [`Cache`] manages one dense index space of OS pages for one process (an agent, or a program that uses
//! the library). Local memory is a cache of it; the memory servers hold the rest. The runtime turns addresses
//! into [`PageIndex`]es, kernel events into [`Input`]s and [`Output`]s into kernel calls and network
//! requests. The cache itself never sees an address, a byte or a clock.
//!
//! A page is in exactly one of these states:
//!
//! ```text
//!   Unmanaged --Adopt--> Fresh      never written, or zero again: no content, a fault is answered with zeroes;
//!                                   a page that the kernel has there all the same is the program's own
//!                        Resident   mapped in the program; clean (servers hold the same bytes, write-protected) or dirty
//!                        Evicting   the runtime was told to move it out, has not answered yet
//!                        Staged     moved out into an eviction batch: unmapped, bytes still local; a fault brings it back without traffic
//!                        Remote     content only at the servers
//!                        Fetching   asked for, not yet here
//!                        Ready      fetched ahead of need, bytes local, left unmapped on purpose as a marker of a stream's progress
//! ```
//!
//! Eviction works in batches. `Output::Evict` names the pages of one batch; the runtime moves them out of the
//! program in one go and answers `Input::Evicted` with what became of each. Dirty, non-zero ones are written
//! back (`Output::Store` .. `Input::Stored`). A batch then lingers, a victim buffer that gives every page its
//! second chance, until `Output::ReleaseBatch` gives its frames back. Nothing is released before the servers
//! acknowledged it.
//!
//! ```text
//!   fault.rs      a fault and its answer           fetch.rs      pages on their way in     prefetch.rs   which pages come early
//!   writeback.rs  eviction batches                 policy.rs     which page leaves         rival.rs      which pages deserve to stay
//!   manage.rs     adopted, forgotten, zeroed       budget.rs     frames and watermarks     page.rs, queue.rs   12 bytes a page
//!   neighbours.rs  neighbours that are fetched along
//! ```
//!
//! It never waits, never sends a page whose bytes the servers hold, and never answers a fault twice except
//! with a wake-up.
//!
//! What the program gives up is Fresh from then on, but the kernel may take the old page away only later: by
//! then it may be preempted for as long as the machine likes. Until then the old page is mapped, maybe
//! write-protected. It must not become Resident: it would leave, the removal would find nothing, and the old
//! bytes would come back. So a page becomes Resident by an `InstallZero` only where the kernel did install
//! it. One that was there already (`AlreadyThere`) stays Fresh and is opened to writes; a write-protection
//! fault on a Fresh page opens it and changes nothing else.

mod budget;
mod check;
mod fault;
mod fetch;
mod manage;
mod neighbours;
mod page;
mod policy;
mod prefetch;
mod queue;
mod rival;
mod under_way;
mod writeback;

use std::collections::VecDeque;
use std::fmt;

use crate::curve::Curve;
use crate::table::Table;
use rampool_wire::units::{Extent, PageIndex};

use budget::{Frames, Marks};
use neighbours::Neighbours;
use page::{DIRTY, Page, State};
use policy::Queues;
use prefetch::Streams;
use rival::Rivals;
use under_way::{Batch, Fetch, Installed};

/// The curve tells pages apart that differ by this part of the budget, as a divisor.
const CURVE_DETAIL: u64 = 256;

/// Names an eviction batch, from `Evict` to `ReleaseBatch`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BatchId(pub u32);

/// Names a fetch, from `Fetch` to `ReleaseFetch`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FetchId(pub u32);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Read,
    Write,
    /// A write to a page that is mapped write-protected (clean).
    WriteProtected,
}

/// The outcome for one page of an eviction batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EvictOutcome {
    /// Its bytes are in the batch now.
    Moved,
    /// As `Moved`, but before that it was open to writes for a moment: it counts as written.
    MovedOpened,
    /// Its bytes are in the batch now, and are those that were stored last.
    MovedUnchanged,
    /// Its bytes are in the batch now, all zero: nothing to keep. The runtime need not check clean pages for
    /// that.
    MovedZero,
    /// The kernel had no page there (the program gave it back meanwhile): it is Fresh.
    Vanished,
    /// The kernel refuses (pinned, shared with a child process): it stays resident; do not try it again soon.
    Busy,
    /// As `Busy`, and it is open to writes: it counts as written.
    BusyOpened,
    /// The kernel moves nothing at this moment (an event waits to be read): it stays resident, and nothing is
    /// evicted before the next input.
    Later,
}

pub enum Input<'a> {
    /// These pages come under management. `resident` (sorted, inside `extent`) are mapped and dirty, the
    /// content of `remote` (likewise) is at the servers; the rest is Fresh. The program has given up the
    /// content of `given_up` (likewise): those are Fresh, mapped or not.
    Adopt { extent: Extent, resident: &'a [Extent], remote: &'a [Extent], given_up: &'a [Extent] },
    /// These pages leave management (unmapped): their content is discarded.
    Forget { extent: Extent },
    /// The program gave the content of these pages back (MADV_DONTNEED, MADV_FREE): they are Fresh. The
    /// kernel takes those that are mapped away later, or never.
    Zeroed { extent: Extent },
    /// A thread waits for this page. The same fault may be reported more than once, and for a page that is
    /// resident again.
    Fault { page: PageIndex, access: Access },
    /// A thread will soon want these pages, the first of them soonest. Those that are Remote are fetched as
    /// far as there is room; one of each fetch stays unmapped, so that the fault on it shows the thread's
    /// progress.
    Expect { pages: &'a [PageIndex] },
    /// The answer to `Evict`, one outcome per page in the order of the batch.
    Evicted { batch: BatchId, outcomes: &'a [EvictOutcome] },
    /// Every page of the batch's `Store` is acknowledged by the servers.
    Stored { batch: BatchId },
    /// The bytes of this fetch are local.
    Fetched { fetch: FetchId },
    /// The runtime could not install these pages just now: they are as they were before the `Install*`
    /// output, or at the servers if its source was released since. Threads that wait for them fault again.
    InstallFailed { extent: Extent },
    /// The kernel had a page of its own where the runtime was to install these (EEXIST), and kept it. Threads
    /// that wait for them were woken.
    AlreadyThere { extent: Extent },
    /// The kernel had no page where `Confirm` expects one: it has a page of zeroes now.
    WasMissing { page: PageIndex },
    /// Local memory this cache may use from now on, in pages.
    SetBudget { pages: u64 },
    /// The kernel has dropped the write protection of some of these pages, of which is unknown (it merged
    /// them with others): those that are resident count as written.
    Unguarded { extent: Extent },
    /// The servers take no more pages (pool full), or take some again: while true, only pages that need no
    /// `Store` are evicted.
    PoolFull(bool),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// Map zeroed, writable pages here and wake the threads that wait for them.
    InstallZero { extent: Extent },
    /// A fault on a page that is mapped: a stale duplicate, or the kernel took the page away. Map a zeroed,
    /// writable page if there is none, and answer with `WasMissing` then; wake the waiting threads. Unless it
    /// `may_be_gone`, a page that is not there is lost, and must not be read as zeroes.
    Confirm { page: PageIndex, may_be_gone: bool },
    /// Map pages from a fetch: pages `offset_pages ..` of its buffer. Write-protected unless `writable`.
    /// Wakes the waiting threads.
    InstallFetched { extent: Extent, fetch: FetchId, offset_pages: u32, writable: bool },
    /// Map pages from an eviction batch (second chance): pages `offset_pages ..` of the batch. The batch
    /// keeps its copy. Wakes the waiting threads.
    InstallStaged { extent: Extent, batch: BatchId, offset_pages: u32, writable: bool },
    /// Lift write protection and wake the waiting threads.
    Unprotect { extent: Extent },
    /// Only wake the threads that wait for this page.
    Wake { page: PageIndex },
    /// Move these pages out of the program, in this order, into a new batch; answer with `Evicted`.
    Evict { batch: BatchId, extents: Vec<Extent> },
    /// Send these pages of a batch to the servers: `(extent, offset in the batch in pages)`; answer with
    /// `Stored`.
    Store { batch: BatchId, pages: Vec<(Extent, u32)> },
    /// The batch's local bytes are not needed any more.
    ReleaseBatch { batch: BatchId },
    /// Ask the servers for these pages, in this order; answer with `Fetched`. `demand`: a thread waits.
    Fetch { fetch: FetchId, extents: Vec<Extent>, demand: bool },
    /// The fetch's local bytes are not needed any more.
    ReleaseFetch { fetch: FetchId },
    /// The servers may drop their copies of these pages.
    Discard { extent: Extent },
}

/// How the cache behaves. All counts in OS pages.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Local memory: resident pages, staged pages and fetched pages together never exceed this (a soft limit
    /// only while pages refuse to leave or the pool is full).
    pub budget_pages: u64,
    /// Pages brought by one fault: an aligned unit of this many pages around it (1 = just the page). A power
    /// of two.
    pub unit_pages: u32,
    /// Pages of one eviction batch at most.
    pub batch_pages: u32,
    /// Batches that may exist at a time (in flight and lingering).
    pub max_batches: u32,
    /// The largest prefetch window; 0 turns prefetch off.
    pub max_prefetch_pages: u32,
    /// Pages of one fetch at most.
    pub fetch_pages: u32,
    /// Fetches that may be in flight at a time.
    pub max_fetches: u32,
    /// The runtime tells of pages that leave unchanged ([`EvictOutcome::MovedUnchanged`]): then to open one
    /// that is not written costs little, and pages come open to writes while others are seen to be written.
    pub tells_unchanged: bool,
}

/// Counts of what the cache did so far, and its present contents. All counts in OS pages unless named
/// otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Faults reported, duplicates included.
    pub faults: u64,
    /// Faults on pages that were resident.
    pub spurious_faults: u64,
    /// Faults that only lifted write protection.
    pub unprotect_faults: u64,
    /// Faults answered from an eviction batch, without traffic.
    pub second_chances: u64,
    /// Faults on a page that was already being fetched.
    pub faults_on_fetch: u64,
    /// Times that the first waiting fault found no frame or no fetch slot.
    pub waits: u64,
    pub zero_filled_pages: u64,
    /// Fetches asked for: all, and those with a thread waiting.
    pub fetches: u64,
    pub demand_fetches: u64,
    pub fetched_pages: u64,
    /// Markers that a fault reached: the chunk before was used.
    pub markers_reached: u64,
    /// Pages of a stream that were moved out before their first use.
    pub left_too_early: u64,
    /// Markers that no fault reached.
    pub wasted_markers: u64,
    /// Faults on Remote pages that no stream predicted.
    pub random_faults: u64,
    /// Pages that were fetched along with a wanted neighbour.
    pub company_pages: u64,
    /// Pages fetched because they were expected.
    pub expected_pages: u64,
    pub evicted_pages: u64,
    pub batches: u64,
    pub stored_pages: u64,
    /// Evicted pages that were open to writes, and held what the servers have.
    pub unchanged_pages: u64,
    /// Evicted pages that were all zero.
    pub zero_pages: u64,
    /// Pages that refused to leave.
    pub busy_pages: u64,
    pub discarded_pages: u64,
    pub failed_installs: u64,
    /// Pages that were to be filled with zeroes, and were present: given up, and not taken away yet, or made
    /// by the kernel itself.
    pub pages_there: u64,
    /// Broken promises of the kernel or of the runtime, 0 as long as all is well: pages with content that
    /// were to be installed, and were there;
    pub content_refused: u64,
    /// pages that the program did not give up and that were gone when they were to leave,
    pub vanished_pages: u64,
    /// or when a thread came to them.
    pub missing_pages: u64,
    pub adopted_pages: u64,
    /// Frames taken beyond the budget because nothing could leave.
    pub forced_pages: u64,
    /// Frames in use now: mapped, being moved out, in batches, and for fetches.
    pub resident_now: u64,
    pub evicting_now: u64,
    pub staged_now: u64,
    pub fetching_now: u64,
    pub budget_now: u64,
}

/// The page cache of one index space: all decisions, no I/O.
///
/// Feed it with [`handle`](Self::handle), then drain [`poll`](Self::poll) to `None`, doing what each output
/// says in order. What the runtime has to keep:
///
/// * `Evict`, `Store` and `Fetch` are each answered exactly once, at any time later and in any order among
///   each other.
/// * `InstallFailed`, `AlreadyThere`, `WasMissing` and `Opened` are reported before any other input (except
///   `Evicted`) that follows the drain it belongs to. Whether the source was released in the same drain does
///   not matter: what was released is at the servers.
/// * `Zeroed` and `Forget` are reported as soon as the kernel's event is read, before any answer that learned
///   of it from the kernel (`Vanished`). All that was read together is reported together, without a drain in
///   between: of what is not reported yet the kernel has been told that it is known.
/// * An install where the program has unmapped the memory meanwhile (`ENOENT`) has failed like any other.
/// * `Store`, `Discard` and `Fetch` of one page reach its servers in the order of the outputs.
/// * Pages that were forgotten while an `Evict` names them are not adopted as resident before that is
///   answered.
/// * Batch and fetch ids are small (below `max_batches` and `max_fetches`) and are used again after their
///   release.
///
/// Invariants ([`check`](Self::check) verifies them): `used <= budget` unless counted in `forced_pages`, by
/// an adoption, a lower budget or pages that refuse; each page is in one state and, if resident, in one
/// queue; a page whose bytes the servers do not hold is never dropped.
///
/// `clone` gives the cache of a forked child: the same pages in the same states, with the same things under
/// way.
#[derive(Clone)]
pub struct Cache {
    config: CacheConfig,
    pages: Table<Page>,
    frames: Frames,
    marks: Marks,
    queues: Queues,
    rivals: Rivals,
    /// Resident pages that may leave without a store.
    clean_resident: u64,
    batches: Vec<Batch>,
    /// Acknowledged batches, the oldest first.
    lingering: VecDeque<u32>,
    evictions_in_flight: u32,
    stores_in_flight: u32,
    /// Pages evicted so far, wrapping: the time of the ghost history.
    evict_clock: u32,
    /// The Remote pages, by the time when they left.
    curve: Curve,
    /// For the latest fault: [`Cache::pages_to_avoid`].
    to_avoid: Option<u64>,
    /// The same, of the latest fetch.
    to_avoid_fetch: u64,
    fetches: Vec<Fetch>,
    fetches_in_flight: u32,
    fetch_serial: u64,
    /// Faults that wait for frames or a fetch slot.
    waiting: VecDeque<u32>,
    faults_seen: u32,
    streams: Streams,
    neighbours: Neighbours,
    /// Frames that streams take at a time: kept free beyond the reserve.
    appetite: u64,
    /// Pages that may leave unchanged before no more are opened on suspicion.
    looks: u32,
    pool_full: bool,
    /// The kernel moves nothing just now.
    evictions_pause: bool,
    /// The installs of this step.
    journal: Vec<Installed>,
    outputs: VecDeque<Output>,
    /// What [`Cache::maintain`] does has not been done since the latest input.
    maintenance_due: bool,
    stats: CacheStats,
}

impl Cache {
    /// An empty cache: no page is managed.
    ///
    /// # Panics
    /// When `unit_pages` is no power of two, or a count that cannot be zero is.
    #[must_use]
    pub fn new(config: CacheConfig) -> Self {
        assert!(
            config.unit_pages.is_power_of_two(),
            "unit_pages is {}, not a power of two",
            config.unit_pages
        );
        assert!(
            config.batch_pages > 0
                && config.max_batches > 0
                && config.fetch_pages > 0
                && config.max_fetches > 0,
            "{config:?}"
        );
        let marks = Marks::new(&config, config.budget_pages);
        Self {
            frames: Frames { budget: config.budget_pages, ..Frames::default() },
            marks,
            pages: Table::default(),
            queues: Queues::new(),
            rivals: Rivals::new(config.budget_pages),
            clean_resident: 0,
            batches: vec![Batch::FREE; config.max_batches as usize],
            lingering: VecDeque::new(),
            evictions_in_flight: 0,
            stores_in_flight: 0,
            evict_clock: 0,
            curve: Curve::new(config.budget_pages / CURVE_DETAIL),
            to_avoid: None,
            to_avoid_fetch: 0,
            fetches: vec![Fetch::FREE; config.max_fetches as usize],
            fetches_in_flight: 0,
            fetch_serial: 0,
            waiting: VecDeque::new(),
            faults_seen: 0,
            streams: Streams::new(),
            neighbours: Neighbours::new(),
            appetite: 0,
            looks: 0,
            pool_full: false,
            evictions_pause: false,
            journal: Vec::new(),
            outputs: VecDeque::new(),
            maintenance_due: false,
            stats: CacheStats::default(),
            config,
        }
    }

    /// Whether `page` has content that is not mapped: a thread that touches it waits.
    #[must_use]
    pub fn is_absent(&self, page: PageIndex) -> bool {
        let state = self.pages.get(index_of(page) as usize).map(Page::state);
        matches!(state, Some(State::Remote | State::Fetching | State::Ready))
    }

    /// Whether the page table must have something for `page`, or nothing; `None` where both may be.
    #[must_use]
    pub fn is_expected(&self, page: PageIndex) -> Option<bool> {
        let entry = self.pages.get(index_of(page) as usize)?;
        match entry.state() {
            State::Unmanaged | State::Fresh => None,
            State::Resident => (!entry.has(page::GIVEN_UP)).then_some(true),
            State::Evicting | State::Staged | State::Remote | State::Fetching | State::Ready => Some(false),
        }
    }

    /// Whether a fault on `page` has no answer yet.
    #[must_use]
    pub fn is_wanted(&self, page: PageIndex) -> bool {
        self.pages.get(index_of(page) as usize).is_some_and(|entry| entry.has(page::WANTED))
    }

    /// Whether the servers are not known to hold the bytes of `page`, which has an `Evict` to be answered or
    /// is in a batch.
    #[inline]
    #[must_use]
    pub fn needs_store(&self, page: PageIndex) -> bool {
        self.pages.get(index_of(page) as usize).is_some_and(|entry| entry.has(page::DIRTY))
    }

    /// Whether the program may have let the kernel take the frame of `page` at any time (MADV_FREE): before
    /// the page was adopted, or by a call that went on after the frame was installed.
    #[inline]
    #[must_use]
    pub fn may_be_reclaimed(&self, page: PageIndex) -> bool {
        self.pages.get(index_of(page) as usize).is_some_and(|entry| entry.may_be_reclaimed())
    }

    /// Whether `page` is mapped.
    #[must_use]
    pub fn is_resident(&self, page: PageIndex) -> bool {
        self.pages.get(index_of(page) as usize).is_some_and(|entry| entry.state() == State::Resident)
    }

    /// Faults so far on pages at the servers that no stream predicted.
    #[must_use]
    pub fn random_faults(&self) -> u64 {
        self.stats.random_faults
    }

    /// With so many more pages of local memory the latest fault would not have been, as far as one can know
    /// ([`curve`](crate::curve)); `None` for one that no more memory avoids, as the first touch of a page.
    #[must_use]
    pub fn pages_to_avoid(&self) -> Option<u64> {
        self.to_avoid
    }

    /// Shows the runs of pages that are mapped, until `visit` returns false.
    pub fn resident_runs(&self, mut visit: impl FnMut(Extent) -> bool) {
        let mut at = 0;
        while at < self.pages.len() {
            if let Some(until) = self.pages.same_until(at) {
                // Pages in a queue are no two the same.
                at = until;
                continue;
            }
            let run = (at..self.pages.len())
                .take_while(|&page| self.pages[page].state() == State::Resident)
                .count();
            if run > 0 {
                let extent =
                    Extent::new(PageIndex(at as u64), u32::try_from(run).expect("an index space is smaller"));
                if !visit(extent) {
                    return;
                }
            }
            at += run.max(1);
        }
    }

    /// Takes one event. O(1) for a fault, in proportion to the pages named for everything else. Never blocks.
    ///
    /// # Panics
    /// When the runtime breaks the contract above (an answer to no question, a page adopted twice).
    pub fn handle(&mut self, input: Input<'_>) {
        // Several changes of mappings are one step: nothing is installed or moved before all are known.
        if !matches!(input, Input::Zeroed { .. } | Input::Forget { .. }) {
            self.maintain_if_due();
        }
        self.maintenance_due = true;
        match input {
            Input::InstallFailed { extent } => return self.install_failed(extent),
            Input::AlreadyThere { extent } => return self.already_there(extent),
            Input::WasMissing { page } => return self.was_missing(page),
            _ => {}
        }
        // An eviction may be answered before a failed install of the same drain is reported.
        if !matches!(input, Input::Evicted { .. }) {
            self.settle_installs();
            self.evictions_pause = false;
        }
        match input {
            Input::Adopt { extent, resident, remote, given_up } => {
                self.adopt(extent, resident, remote, given_up)
            }
            Input::Forget { extent } => self.forget(extent),
            Input::Zeroed { extent } => self.zeroed(extent),
            Input::Fault { page, access } => self.fault(page, access),
            Input::Expect { pages } => self.expect(pages),
            Input::Evicted { batch, outcomes } => self.evicted(batch, outcomes),
            Input::Stored { batch } => self.stored(batch),
            Input::Fetched { fetch } => self.fetched(fetch),
            Input::InstallFailed { .. } | Input::AlreadyThere { .. } | Input::WasMissing { .. } => {
                unreachable!("handled above")
            }
            Input::SetBudget { pages } => self.set_budget(pages),
            Input::Unguarded { extent } => self.unguarded(extent),
            Input::PoolFull(full) => self.set_pool_full(full),
        }
    }

    /// The next thing to do, in order; `None` when all is said. What leaves is chosen when all that the input
    /// asked for has been handed out: the request for a page that a thread waits for is on its way by then.
    pub fn poll(&mut self) -> Option<Output> {
        if self.outputs.is_empty() {
            self.maintain_if_due();
        }
        self.outputs.pop_front()
    }

    fn maintain_if_due(&mut self) {
        if std::mem::take(&mut self.maintenance_due) {
            self.maintain();
        }
    }

    #[must_use]
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            resident_now: self.frames.resident,
            evicting_now: self.frames.evicting,
            staged_now: self.frames.staged,
            fetching_now: self.frames.buffered + self.frames.landing,
            budget_now: self.frames.budget,
            ..self.stats.clone()
        }
    }

    #[must_use]
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The pages of a fetch, in order.
    #[must_use]
    pub fn fetch_extents(&self, fetch: FetchId) -> &[Extent] {
        &self.fetches[fetch.0 as usize].extents
    }

    /// Frames this cache may use, in pages.
    #[must_use]
    pub fn budget_pages(&self) -> u64 {
        self.frames.budget
    }

    /// Frames in use: mapped, being moved out, in batches, and for fetches.
    #[must_use]
    pub fn used_pages(&self) -> u64 {
        self.frames.used()
    }
}

impl Cache {
    /// Every page whose content is not mapped in the program, in order: at the servers (`None`), or in a
    /// batch at an offset in pages, not known to be at the servers. For a fork: the child needs all of it.
    ///
    /// # Panics
    /// When an `Evict` is not answered: the place of its pages is unknown then.
    pub fn absent_content(&self, mut take: impl FnMut(Extent, Option<(BatchId, u32)>)) {
        assert_eq!(self.evictions_in_flight, 0, "an eviction is under way");
        let mut run: Option<(Extent, Option<(BatchId, u32)>)> = None;
        for (index, entry) in (0u64..).zip(self.pages.iter()) {
            let at = match entry.state() {
                State::Staged if entry.has(DIRTY) => Some((BatchId(entry.a), entry.b)),
                State::Staged | State::Remote | State::Fetching | State::Ready => None,
                State::Unmanaged | State::Fresh | State::Resident | State::Evicting => continue,
            };
            let page = PageIndex(index);
            match &mut run {
                Some((extent, first))
                    if extent.end() == page
                        && *first == at.map(|(b, o)| (b, o.wrapping_sub(extent.count))) =>
                {
                    extent.count += 1;
                }
                _ => {
                    if let Some((extent, first)) = run.replace((Extent::page(page), at)) {
                        take(extent, first);
                    }
                }
            }
        }
        if let Some((extent, first)) = run {
            take(extent, first);
        }
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("pages", &self.pages.len())
            .field("frames", &self.frames)
            .finish_non_exhaustive()
    }
}

/// The index of a page in the array.
fn index_of(page: PageIndex) -> u32 {
    u32::try_from(page.0).expect("an index space has at most 2^31 pages")
}
