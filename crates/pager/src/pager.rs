//! The pager: kernel events and network completions in, kernel calls and network requests out.
//!
//! One thread runs one [`Pager`]. It takes no decision about pages: those are
//! [`rampool_paging::cache::Cache`]'s. What it adds is where things are (addresses, frames, tokens), the
//! order of work (faults first), and what to do when the kernel says "not now".
//!
//! What everything here rests on: from before the program changes its mappings (fork, munmap, mremap), or
//! from before the pages go (madvise), until the pager has *read* the event about it, the kernel refuses
//! every install and every move of this context. So a page is never moved out of, or installed into, memory
//! that has become something else meanwhile. Two things follow for the pager, and are not done by the kernel:
//!
//! * What is read is known to the pager, as far as the kernel is concerned. So all that was read is told to
//!   the cache before anything is installed or moved. Threads may be read in another order than they made
//!   their changes in, so changes wait until none is under way ([`changes`]).
//! * `madvise` takes the pages away *after* the event was read, and its caller may be preempted before it
//!   does, for as long as the machine likes: until then the old pages are mapped, and installs and moves
//!   work. The cache knows which pages have been given up, and lets none leave that it did not install since.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rampool_kernel::maps::{NotInherited, Pagemap};
use rampool_kernel::memory::MapError;
use rampool_kernel::uffd::{Event, Reply, Uffd};
use rampool_paging::cache::{Access, BatchId, Cache, CacheConfig, EvictOutcome, FetchId, Input, Output};
use rampool_paging::page_set::PageSet;
use rampool_paging::refusals::{DEADLINE_NS as REFUSALS_DEADLINE_NS, Refusals};
use rampool_paging::reports::{Report, Reports};
use rampool_paging::space::AddressSpace;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex, total_pages};

use crate::backing::{Backing, BackingEvent};
use crate::events::{born_of, broken_text};
use crate::fault::{Departure, FaultCatcher, half};
use crate::fork::{ChildMemory, ForkFaultServer};
use crate::frames::is_zero_page;
use rampool_client::stats::PagerStats;

mod adopt;
pub mod awake;
pub(crate) mod changes;
mod hand_over;
pub(crate) mod in_thread;
mod lost;
mod merged;
mod own;
mod pointer_prefetcher;
mod unchanged;
mod verify;
mod waits;

pub use adopt::hold_absent;
use awake::Awake;
use changes::Mappings;
use lost::Lost;
use merged::Merged;
use own::OwnMemory;
use pointer_prefetcher::PointerPrefetcher;
use unchanged::Unchanged;
use verify::Verify;
pub use waits::Waiting;
use waits::Waits;

const FETCH_TOKEN: u64 = 1 << 32;
/// Events read by one call, and how many are kept during a fork: threads that wait cause no more than one
/// each.
const EVENTS_READ_AT_ONCE: usize = 16;
const EVENTS_KEPT: usize = 1024;
/// Memory for fetches that was not used for so long goes back: it is part of the budget that the program
/// gets.
const TRIM_EVERY: Duration = Duration::from_secs(1);
const ZERO_BYTES: usize = 256 << 10;
/// A pager that ends waits this long for changes of mappings to come to their end.
const END_DEADLINE: Duration = Duration::from_secs(5);

/// What a pager needs from its runtime.
pub trait Supervisor<B: Backing> {
    /// Called at start and then when the returned time has passed: adopt memory, set the budget, publish
    /// statistics.
    fn tick(&mut self, pager: &mut Pager<B>) -> Duration;

    /// The process has a child: the event was read just now, and the child may run already. What the fork
    /// means is not yet known.
    fn born(&mut self, _child: &Uffd) {}

    /// The process forked. The event is read, nothing has been installed or moved since the child's memory
    /// was copied.
    fn forked(&mut self, pager: &mut Pager<B>, child: Uffd);

    /// Pages are lost: end the program, or poison them.
    fn lost(&mut self, pager: &mut Pager<B>, reason: String);

    /// Called when a promise is broken on which the content of pages rests: ends the program, before it sees
    /// wrong bytes.
    fn broken(&mut self, reason: String) {
        rampool_kernel::words::last_words(&format!("rampool: {}", broken_text(&reason)));
        std::process::abort();
    }

    /// More descriptors to sleep on.
    fn poll_fds(&self, out: &mut Vec<libc::pollfd>);

    /// While this is true the process is about to fork: the pager only reads events and touches nothing else.
    /// A pager whose memory comes from the program's allocator needs it, because a fork holds the allocator's
    /// lock until the event about it was read.
    fn fork_pending(&mut self) -> bool {
        false
    }

    /// Called after every sleep and every tick; false ends the pager.
    fn wake_up(&mut self, pager: &mut Pager<B>) -> bool;
}

pub struct Pager<B: Backing> {
    pub(crate) faults: FaultCatcher,
    pub(crate) space: AddressSpace,
    pub(crate) cache: Cache,
    pub(crate) backing: B,
    pub(crate) region: B::Region,
    pagemap: Pagemap,
    stats: PagerStats,
    started: Instant,
    /// The pager's own frames.
    own: OwnMemory,
    /// What the servers were asked for.
    requests: Requests,
    /// For the cache, once its outputs are drained.
    reports: Reports,
    /// By the kernel.
    refusals: Refusals,
    mappings: Mappings,
    waits: Waits,
    /// `None`: nothing is fetched ahead, or the program's memory cannot be read without waiting.
    pointer_prefetcher: Option<PointerPrefetcher>,
    unchanged: Unchanged,
    merged: Merged,
    verify: Option<Verify>,
    /// Why the program must end.
    broken: Option<String>,
    /// Why nothing comes from the servers any more.
    lost: Option<Lost>,
}

/// What the servers were asked for.
#[derive(Default)]
struct Requests {
    /// Fetches that threads wait for.
    demands: u32,
    /// Stores that were refused for lack of room, to be sent again.
    refused: Vec<BatchId>,
    /// What is not in a fetch, because it is lost while other pages are not.
    gone: BTreeMap<FetchId, Vec<Extent>>,
    /// Events that arrived while the pager waited for another one.
    deferred: VecDeque<BackingEvent>,
}

/// Why a pager could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PagerError {
    #[error(transparent)]
    Memory(#[from] MapError),
    #[error("the pager's own frames cannot be registered with userfaultfd (errno {errno})")]
    Register { errno: i32 },
}

impl<B: Backing> Drop for Pager<B> {
    fn drop(&mut self) {
        self.faults.release_frames();
    }
}

impl<B: Backing> Pager<B> {
    /// # Errors
    /// When its own memory cannot be allocated.
    pub fn new(
        mut faults: FaultCatcher,
        pagemap: Pagemap,
        backing: B,
        region: B::Region,
        config: CacheConfig,
        waiting: Waiting,
        stats: PagerStats,
    ) -> Result<Self, PagerError> {
        let own = OwnMemory::new(&config)?;
        let unchanged = Unchanged::new(config.max_batches, config.batch_pages);
        let pointer_prefetcher = (config.max_prefetch_pages > 1 && faults.tells_exact_addresses())
            .then(PointerPrefetcher::default);
        let batches = own.batches.memory();
        faults
            .prepare_frames(batches.start(), batches.bytes())
            .map_err(|errno| PagerError::Register { errno })?;
        Ok(Self {
            faults,
            space: AddressSpace::default(),
            cache: Cache::new(config),
            backing,
            region,
            pagemap,
            stats,
            started: Instant::now(),
            own,
            requests: Requests::default(),
            reports: Reports::default(),
            refusals: Refusals::default(),
            mappings: Mappings::default(),
            waits: Waits::new(waiting),
            pointer_prefetcher,
            unchanged,
            merged: Merged::default(),
            verify: None,
            broken: None,
            lost: None,
        })
    }

    /// Goes on in a forked child, with the managed memory that its parent handed over. Resident pages count
    /// as dirty. What lies in `stays` is present, and is managed no longer: forgotten only afterwards, it
    /// could have left by then, and its content would be gone.
    pub fn take_over(&mut self, memory: &ChildMemory, stays: Option<(usize, usize)>) {
        self.space = AddressSpace::from_spans(&memory.spans);
        if let Some((start, end)) = stays {
            self.space.extents_in(start, end, |at, extent| {
                let bytes = extent.count as usize * OS_PAGE_BYTES;
                self.faults.inheritable(at, bytes, true);
                self.faults.unmanage(at, bytes);
            });
            self.space.remove(start, end, |_| {});
        }
        for span in self.space.spans().to_vec() {
            let extent = Extent::new(span.first, span.pages);
            let mut present = Vec::new();
            self.pagemap.present_runs(span.start, span.end(), &mut present);
            let resident = self.resident_extents(&present, span.start, extent);
            let remote: Vec<Extent> = memory.absent.iter().filter_map(|e| intersect(*e, extent)).collect();
            self.stats.adopted(u64::from(extent.count));
            self.tell(Input::Adopt { extent, resident: &resident, remote: &remote, given_up: &[] });
        }
    }

    /// From now on every page that leaves is compared with the bytes that return; the program ends when they
    /// differ.
    pub fn verify(&mut self) {
        self.verify = Some(Verify::new());
    }

    /// Local memory that the cache may use from now on.
    pub fn set_budget(&mut self, pages: u64) {
        self.tell(Input::SetBudget { pages: self.refusals.can_be(pages) });
    }

    /// The kernel keeps no more mappings apart: fewer pages can be resident.
    fn relieve(&mut self) {
        if !self.faults.take_crowded() {
            return;
        }
        let Some(most) = self.refusals.crowded(self.cache.used_pages()) else { return };
        let pages = self.cache.budget_pages().min(most);
        self.tell(Input::SetBudget { pages });
    }

    #[must_use]
    pub fn space(&self) -> &AddressSpace {
        &self.space
    }
    #[must_use]
    pub fn cache(&self) -> &Cache {
        &self.cache
    }
    #[must_use]
    pub fn stats(&self) -> &PagerStats {
        &self.stats
    }
    /// To ask it something. It cannot be changed, or taken out, from here: it writes into frames of this
    /// pager (`tests/compile_fail.rs`).
    #[must_use]
    pub fn backing(&self) -> &B {
        &self.backing
    }
    /// Gives a region up that this pager has made and nothing uses any more.
    pub fn free_region(&mut self, region: B::Region) {
        self.backing.free_region(region);
    }
    #[must_use]
    pub fn faults(&self) -> &FaultCatcher {
        &self.faults
    }

    /// Publishes the cache's levels and counts.
    pub fn publish(&self) {
        let pointer_used_pages = self.pointer_prefetcher.as_ref().map_or(0, PointerPrefetcher::used_pages);
        self.stats.publish(
            &self.cache.stats(),
            pointer_used_pages,
            self.cache.used_pages(),
            self.space.managed_pages(),
        );
        self.backing.report(&self.stats);
    }

    /// Keeps the other CPU awake from now on, where that helps.
    pub fn keep_awake(&mut self, awake: Option<Awake>) {
        self.waits.keep_awake(awake);
    }

    /// Serves until the supervisor says stop.
    pub fn run(&mut self, supervisor: &mut impl Supervisor<B>) {
        let mut fds = Vec::new();
        let mut next_tick = Instant::now();
        let mut next_trim = next_tick + TRIM_EVERY;
        rampool_kernel::thread::ask_for_short_slices();
        loop {
            if supervisor.fork_pending() {
                self.sit_out_fork(supervisor);
            }
            let due = self.requests.demands > 0;
            let mut busy = self.serve_events(supervisor);
            if !self.collects() {
                busy |= self.serve_answers(supervisor) || self.faults.has_events();
            }
            let now = Instant::now();
            if now >= next_tick {
                next_tick = now + supervisor.tick(self);
                self.undo_merging(now);
                if !supervisor.wake_up(self) {
                    return self.end(supervisor);
                }
                if now >= next_trim {
                    next_trim = now + TRIM_EVERY;
                    self.own.fetches.trim();
                }
            }
            if self.collects() {
                self.let_changes_end();
                continue;
            }
            if !busy && self.search() {
                continue;
            }
            if busy {
                self.waits.came(now, due);
                if due && self.requests.demands == 0 && self.waits.looks_for_events() {
                    // Mostly the woken thread runs first, and has met its next fault by now.
                    let met = !supervisor.fork_pending() && self.serve_events(supervisor);
                    self.waits.has_let_go_on(now, met);
                }
                continue;
            }
            if self.waits.look_again(now, due) {
                continue;
            }
            fds.clear();
            fds.push(libc::pollfd { fd: self.faults.raw_fd(), events: libc::POLLIN, revents: 0 });
            self.backing.poll_fds(&mut fds);
            supervisor.poll_fds(&mut fds);
            let until = self.backing.next_deadline().map_or(next_tick, |deadline| deadline.min(next_tick));
            sleep_on(&mut fds, until.saturating_duration_since(now));
            if !supervisor.wake_up(self) {
                return self.end(supervisor);
            }
        }
    }

    /// Children whose fork was read are told to the supervisor before the pager ends.
    fn end(&mut self, supervisor: &mut impl Supervisor<B>) {
        if let Err(reason) = self.settle(supervisor, Instant::now() + END_DEADLINE) {
            rampool_kernel::words::remark(&format!("rampool: {reason}"));
        }
    }

    /// Reads events, as many as there is room for without allocating, until the fork is over. They are
    /// handled after.
    fn sit_out_fork(&mut self, supervisor: &mut impl Supervisor<B>) {
        let mut fds = [libc::pollfd { fd: self.faults.raw_fd(), events: libc::POLLIN, revents: 0 }];
        while supervisor.fork_pending() {
            if self.mappings.events.capacity() - self.mappings.events.len() >= EVENTS_READ_AT_ONCE {
                self.faults.read_events(&mut self.mappings.events);
            }
            sleep_on(&mut fds, Duration::from_micros(200));
        }
    }

    /// Reads and handles the kernel's events; returns whether there were any.
    pub fn serve_events(&mut self, supervisor: &mut impl Supervisor<B>) -> bool {
        let mut events = std::mem::take(&mut self.mappings.events);
        let before = events.len();
        self.faults.read_events(&mut events);
        born_of(&events[before..]).for_each(|child| supervisor.born(child));
        let any = !events.is_empty();
        // Changes of mappings first, all of them: the picture must be right before anything is installed or
        // moved. Faults wait with them.
        if self.apply_changes(&mut events, supervisor) {
            for event in events.drain(..) {
                self.serve_event(event, supervisor);
            }
        }
        self.mappings.events = events;
        self.relieve();
        self.end_if_broken(supervisor);
        if self.refusals.has_no_room() && self.refusals.lacks_room(self.now_ns()) {
            let reason = format!(
                "the kernel has had no room for a page for {} s: it is out of memory, or this process has all the mappings that it may have (sysctl vm.max_map_count)",
                REFUSALS_DEADLINE_NS / 1_000_000_000
            );
            supervisor.lost(self, reason);
        }
        any
    }

    fn serve_event(&mut self, event: Event, supervisor: &mut impl Supervisor<B>) {
        match event {
            Event::Fault { address, offset, write, write_protected, thread } => {
                let access = match (write, write_protected) {
                    (_, true) => Access::WriteProtected,
                    (true, false) => Access::Write,
                    (false, false) => Access::Read,
                };
                self.waits.fault(Instant::now(), thread);
                let mut page = self.space.page_at(address);
                if page.is_none() && self.faults.let_frames_be_filled(address) {
                    return;
                }
                if page.is_none() {
                    self.adopt_around(address);
                    page = self.space.page_at(address);
                }
                match page {
                    Some(page) if self.lost.is_some() => self.serve_without_servers(page, address, access),
                    Some(page) => {
                        self.stats.fault(access);
                        let absent = self.pointer_prefetcher.is_some() && self.cache.is_absent(page);
                        self.tell(Input::Fault { page, access });
                        if absent {
                            self.look_ahead(address + offset);
                        }
                    }
                    // Nothing of ours is there: the mapping is gone, and its event follows.
                    None => self.faults.wake(address, OS_PAGE_BYTES),
                }
            }
            // SAFETY: the kernel says that the program has done so, or is about to.
            Event::Remove { start, end } => unsafe { self.discard(start, end) },
            // SAFETY: as above.
            Event::Unmap { start, end } => unsafe { self.forget(start, end) },
            Event::Remap { from, to, bytes } => self.moved(from, to, bytes),
            Event::Fork { child } => supervisor.forked(self, child),
        }
    }

    /// A thread waits for the page at `address`: this may tell which pages are wanted next.
    fn look_ahead(&mut self, address: usize) {
        let Some(mut pointer_prefetcher) = self.pointer_prefetcher.take() else { return };
        let pages = pointer_prefetcher.fault(address, &self.space, &self.cache);
        if !pages.is_empty() {
            self.tell(Input::Expect { pages });
        }
        self.pointer_prefetcher = Some(pointer_prefetcher);
    }

    /// Idle time: takes one step of a search for arrays of pointers, if there is one; returns whether there
    /// was.
    fn search(&mut self) -> bool {
        let Some(pointer_prefetcher) = self.pointer_prefetcher.as_mut().filter(|f| f.is_searching()) else {
            return false;
        };
        self.waits.delays();
        pointer_prefetcher.search(&self.space, &self.cache);
        true
    }

    /// Ends the program where it must end.
    fn end_if_broken(&mut self, supervisor: &mut impl Supervisor<B>) {
        if let Some(reason) = self.broken.take() {
            supervisor.broken(reason);
        }
    }

    fn breaks(&mut self, reason: impl FnOnce() -> String) {
        self.broken.get_or_insert_with(reason);
    }

    /// The program gave the content of a range up. The kernel has yet to take the pages away, except where
    /// changes of mappings are told before they are made.
    ///
    /// # Safety
    /// The program has given it up: what was there may read as zeroes.
    pub unsafe fn discard(&mut self, start: usize, end: usize) {
        if self.faults.follows_mappings() {
            // Registered, and about to be taken over.
            let given_up = &mut self.mappings.given_up;
            self.space.gaps(start, end, |from, to| given_up.insert(pages_at(from, to)));
        }
        let mut extents = Vec::new();
        self.space.extents_in(start, end, |at, extent| {
            self.faults.discarded(at, extent.count as usize * OS_PAGE_BYTES);
            extents.push(extent);
        });
        for extent in extents {
            self.give_up(extent);
            self.tell(Input::Zeroed { extent });
        }
    }

    /// The program moved a mapping.
    fn moved(&mut self, from: usize, to: usize, bytes: usize) {
        // Nothing is known there, except in a child that was forked between a change and its event.
        // SAFETY: whatever was there is not any more.
        unsafe { self.forget(to, to + bytes) };
        self.mappings.given_up.moved(pages_at(from, from + bytes), pages_at(to, to + bytes));
        self.space.extents_in(from, from + bytes, |at, extent| {
            self.faults.moved(at, at - from + to, extent.count as usize * OS_PAGE_BYTES);
        });
        self.space.remap(from, to, bytes);
    }

    /// Ends management of a range.
    ///
    /// # Safety
    /// The program has unmapped it, or all of its pages are present.
    pub unsafe fn forget(&mut self, start: usize, end: usize) {
        self.mappings.given_up.unmapped(pages_at(start, end));
        let mut gone = Vec::new();
        self.space.extents_in(start, end, |at, extent| {
            self.faults.unmanage(at, extent.count as usize * OS_PAGE_BYTES)
        });
        self.space.remove(start, end, |extent| gone.push(extent));
        for extent in gone {
            self.give_up(extent);
            self.tell(Input::Forget { extent });
        }
    }

    /// Ends management of a range whose pages are all present, and leaves them to the program. Does nothing
    /// while one is absent. For fault modes that are not told of changed mappings.
    ///
    /// # Safety
    /// It is the program's memory, which no thread protects or maps anew meanwhile: it becomes open to
    /// writes.
    pub unsafe fn give_back(&mut self, start: usize, end: usize) {
        if rampool_kernel::segv::all_present(start, end) {
            // Open first: between the two, a writing thread would otherwise meet a protection without an
            // owner.
            self.space.extents_in(start, end, |at, extent| {
                let bytes = extent.count as usize * OS_PAGE_BYTES;
                let _ = rampool_kernel::selfmem::protect(
                    at,
                    bytes,
                    rampool_kernel::selfmem::Protection::ReadWrite,
                );
                // A child inherits it as any memory of the program's own.
                self.faults.inheritable(at, bytes, true);
            });
            // SAFETY: all of its pages are present.
            unsafe { self.forget(start, end) };
        }
    }

    /// Handles the servers' events; returns whether there were any.
    pub fn serve_backing(&mut self, supervisor: &mut impl Supervisor<B>) -> bool {
        let mut any = false;
        while self.serve_backing_event(supervisor) {
            any = true;
        }
        any
    }

    /// As [`serve_backing`](Self::serve_backing), up to the last answer that a thread waits for: the thread
    /// goes first.
    fn serve_answers(&mut self, supervisor: &mut impl Supervisor<B>) -> bool {
        let due = self.requests.demands > 0;
        let mut any = false;
        while self.serve_backing_event(supervisor) {
            any = true;
            if due && self.requests.demands == 0 {
                break;
            }
        }
        any
    }

    /// As [`serve_backing`](Self::serve_backing), for one thing.
    fn serve_backing_event(&mut self, supervisor: &mut impl Supervisor<B>) -> bool {
        let Some(event) = self.requests.deferred.pop_front().or_else(|| self.backing.poll()) else {
            return false;
        };
        match event {
            BackingEvent::Fetched { token } => {
                let fetch = FetchId(id_of(token & !FETCH_TOKEN & !DEMAND_TOKEN));
                if token & DEMAND_TOKEN != 0 {
                    self.requests.demands -= 1;
                }
                self.tell(Input::Fetched { fetch });
            }
            BackingEvent::Stored { token } => {
                let batch = BatchId(id_of(token));
                self.tell(Input::Stored { batch });
                if !self.requests.refused.is_empty() {
                    self.retry_refused();
                }
            }
            BackingEvent::Full { token, reason } => {
                if self.requests.refused.is_empty() {
                    let _ = reason;
                    self.stats.pool_full();
                    self.tell(Input::PoolFull(true));
                }
                self.requests.refused.push(BatchId(id_of(token)));
            }
            BackingEvent::Failed { token, reason } if token & FETCH_TOKEN != 0 => {
                self.fetch_again(token, reason)
            }
            BackingEvent::Failed { reason, .. } | BackingEvent::Lost { reason } => {
                supervisor.lost(self, reason)
            }
        }
        self.end_if_broken(supervisor);
        true
    }

    /// Creates a fork fault server for a child whose fork event was just read. Nothing was installed or moved
    /// since its memory was copied. The child runs by now, and may have begun to change its mappings.
    ///
    /// # Errors
    /// Why the child cannot be served: a server failed, or the kernel does not say what it has not inherited.
    /// Where the kernel can poison pages, what the child lacks is poisoned then.
    pub fn fork_child(&mut self, child: Uffd) -> Result<ForkFaultServer<B::Region>, String> {
        self.stats.forked();
        let mut absent = PageSet::default();
        let mut unsent = Vec::new();
        self.cache.absent_content(|extent, staged| match staged {
            Some((batch, offset_pages)) => unsent.extend(
                extent.pages().zip(offset_pages..).map(|(page, offset_pages)| (page, batch, offset_pages)),
            ),
            None => absent.insert(extent),
        });
        let result = if self.lost.is_some() {
            Err("memory servers were lost before".into())
        } else {
            self.copy_for_child()
        };
        let (region, lacks) = match result {
            Ok(copied) => copied,
            Err(reason) => {
                // Its context stays with it, without a server.
                if self.faults.can_poison() {
                    unsent.iter().for_each(|(page, ..)| absent.insert(Extent::page(*page)));
                    ForkFaultServer::new(child, self.space.clone(), absent, self.region).give_up();
                }
                return Err(reason);
            }
        };
        let mut space = self.space.clone();
        for range in lacks {
            let (NotInherited::Missing { start, end, .. } | NotInherited::Wiped { start, end }) = range;
            self.space.extents_in(start, end, |_, extent| {
                absent.remove(extent);
                unsent.retain(|(page, ..)| !extent.contains(*page));
            });
            if matches!(range, NotInherited::Missing { .. }) {
                space.remove(start, end, |_| {});
            }
        }
        let mut fork_fault_server = ForkFaultServer::new(child, space, absent, region);
        for (page, batch, offset_pages) in unsent {
            let content = self.own.batches.start_of(batch.0) + offset_pages as usize * OS_PAGE_BYTES;
            // SAFETY: the page lies in a batch, which is not written.
            unsafe { fork_fault_server.supply(page, std::ptr::with_exposed_provenance(content)) };
        }
        Ok(fork_fault_server)
    }

    /// The child's copy of the region, and the memory that it has not inherited.
    fn copy_for_child(&mut self) -> Result<(B::Region, Vec<NotInherited>), String> {
        let lacks = rampool_kernel::maps::not_inherited()
            .map_err(|error| format!("/proc/self/smaps cannot be read: {error}"))?;
        Ok((self.backing.clone_region(self.region)?, lacks))
    }

    /// Before a fork that the kernel will not tell of: from now on no page leaves, everything that left is at
    /// the servers, and managed memory may be inherited. Returns what a child must know, which stays true
    /// until [`thaw`](Self::thaw): what it finds present goes before what is named absent.
    ///
    /// # Errors
    /// When the servers do not take what left before, or cannot copy the region.
    pub fn prepare_fork(
        &mut self,
        supervisor: &mut impl Supervisor<B>,
        deadline: Instant,
    ) -> Result<(ChildMemory, B::Region), String> {
        self.stats.forked();
        self.settle(supervisor, deadline)?;
        let mut absent = PageSet::default();
        self.freeze(supervisor, deadline)
            .map_err(|unsent| format!("{unsent} pages could not be stored before the fork"))?;
        self.cache.absent_content(|extent, _| absent.insert(extent));
        let mut watched = Vec::new();
        for range in rampool_kernel::maps::not_inherited()
            .map_err(|error| format!("/proc/self/smaps cannot be read: {error}"))?
        {
            match range {
                NotInherited::Wiped { start, end } => {
                    self.space.extents_in(start, end, |_, extent| absent.remove(extent))
                }
                NotInherited::Missing { start, end, watched: true } => watched.push((start, end)),
                // What else does not come along is known after the fork: there, the child looks at what it
                // has.
                NotInherited::Missing { .. } => {}
            }
        }
        self.pass_on_what_is_not_managed(&watched);
        let region = self.backing.clone_region(self.region)?;
        for span in self.space.spans() {
            self.faults.inheritable(span.start, span.end() - span.start, true);
        }
        Ok((ChildMemory { spans: self.space.spans().to_vec(), absent: absent.extents().collect() }, region))
    }

    /// What `mremap` left behind or added is registered as its mapping was, and no page of it is managed
    /// before it is touched: nothing of it ever left, so a child inherits it. `watched`: what is registered
    /// and would not be inherited. Our own frames are.
    fn pass_on_what_is_not_managed(&self, watched: &[(usize, usize)]) {
        let mut others: Vec<(usize, usize)> =
            self.space.spans().iter().map(|span| (span.start, span.end())).collect();
        rampool_kernel::memory::own_mappings(|from, to| others.push((from, to)));
        others.sort_unstable();
        for &(start, end) in watched {
            let mut at = start;
            for &(from, to) in others.iter().filter(|(from, to)| *to > start && *from < end) {
                if at < from {
                    self.faults.inheritable(at, from - at, true);
                }
                at = at.max(to);
            }
            if at < end {
                self.faults.inheritable(at, end - at, true);
            }
        }
    }

    /// From now on no page leaves; returns when everything that left is at the servers, or how many pages are
    /// not.
    fn freeze(&mut self, supervisor: &mut impl Supervisor<B>, deadline: Instant) -> Result<(), u32> {
        self.mappings.frozen = true;
        loop {
            let mut unsent = 0;
            self.cache.absent_content(|extent, staged| unsent += staged.map_or(0, |_| extent.count));
            if unsent == 0 {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(unsent);
            }
            if !self.serve_backing(supervisor) {
                let mut fds = Vec::new();
                self.backing.poll_fds(&mut fds);
                sleep_on(&mut fds, Duration::from_millis(1));
            }
        }
    }

    /// The fork is over.
    pub fn thaw(&mut self) {
        for span in self.space.spans() {
            self.faults.inheritable(span.start, span.end() - span.start, false);
        }
        self.unfreeze();
    }

    /// Pages leave again.
    fn unfreeze(&mut self) {
        self.mappings.frozen = false;
        let pages = self.cache.budget_pages();
        self.tell(Input::SetBudget { pages });
    }

    /// Answers the faults of a child that is served here; returns children that it forked itself. `born` gets
    /// their contexts at once.
    ///
    /// # Errors
    /// Why a page could not be brought.
    pub fn serve_forked(
        &mut self,
        fork_fault_server: &mut ForkFaultServer<B::Region>,
        born: &mut dyn FnMut(&Uffd),
    ) -> Result<Vec<ForkFaultServer<B::Region>>, String> {
        let zeroes = self.own.zeroes.start();
        let mut forked = Vec::new();
        fork_fault_server.serve(
            zeroes,
            &mut |region, extent| self.fetch_now(region, extent),
            born,
            &mut |child| forked.push(child),
        )?;
        let mut served = Vec::new();
        let mut failed = None;
        for mut child in forked {
            match self.backing.clone_region(child.region()) {
                Ok(region) => {
                    child.set_region(region);
                    served.push(child);
                }
                Err(reason) => {
                    child.give_up();
                    failed = Some(reason);
                }
            }
        }
        match failed {
            None => Ok(served),
            Some(reason) => {
                served.iter_mut().for_each(ForkFaultServer::give_up);
                Err(reason)
            }
        }
    }

    /// Fetches a few pages and waits for them; everything else that arrives meanwhile is kept for later.
    fn fetch_now(&mut self, region: B::Region, extent: Extent) -> Result<usize, String> {
        let start = self.own.forked.start();
        // SAFETY: the frames belong to this call, which waits for the answer.
        unsafe { self.backing.fetch(region, FORKED_TOKEN, &[extent], self.own.forked.at(0), true) };
        let mut fds = Vec::new();
        loop {
            match self.backing.poll() {
                Some(BackingEvent::Fetched { token: FORKED_TOKEN }) => return Ok(start),
                Some(
                    BackingEvent::Failed { token: FORKED_TOKEN, reason } | BackingEvent::Lost { reason },
                ) => return Err(reason),
                Some(other) => self.requests.deferred.push_back(other),
                None => {
                    fds.clear();
                    self.backing.poll_fds(&mut fds);
                    let now = Instant::now();
                    let until = self.backing.next_deadline().unwrap_or(now + Duration::from_millis(10));
                    sleep_on(&mut fds, until.saturating_duration_since(now));
                }
            }
        }
    }

    /// Whether stores wait that the servers had no room for.
    #[must_use]
    pub fn has_refused(&self) -> bool {
        !self.requests.refused.is_empty()
    }

    /// Sends again what the servers had no room for.
    pub fn retry_refused(&mut self) {
        if self.requests.refused.is_empty() {
            return;
        }
        let refused = std::mem::take(&mut self.requests.refused);
        for batch in refused {
            self.store(batch);
        }
        self.tell(Input::PoolFull(false));
    }

    /// Hands one input to the cache and carries out everything that follows from it.
    fn tell(&mut self, input: Input<'_>) {
        if self.lost.is_some() {
            return;
        }
        if let Input::Adopt { extent, .. } = input {
            self.unchanged.forget(extent);
        }
        if let Input::Adopt { extent, .. } | Input::Zeroed { extent } | Input::Forget { extent } = input
            && let Some(verify) = &mut self.verify
        {
            verify.forget(extent);
        }
        self.cache.handle(input);
        if !self.mappings.changing {
            self.follow_through();
        }
    }

    /// Carries out what the cache wants, and everything that follows from it.
    fn follow_through(&mut self) {
        self.carry_out();
        loop {
            let step = self.reports.next_step();
            if step.is_empty() {
                break;
            }
            step.iter().for_each(|report| self.cache.handle(report.input()));
            self.carry_out();
            step.into_iter().for_each(|report| self.told(report));
        }
        let stats = self.cache.stats();
        if stats.vanished_pages + stats.missing_pages + stats.content_refused > 0 {
            self.breaks(|| {
                format!(
                    "{} pages were gone when they were to leave and {} when they were touched though the program had not given them up (MADV_GUARD_INSTALL by a bare system call is not reported), and {} were mapped when their content was to be put there",
                    stats.vanished_pages, stats.missing_pages, stats.content_refused
                )
            });
        }
    }

    /// The cache knows of this, and has had its way. Threads that wait for pages that the kernel refused are
    /// woken: they fault again, and by then the main loop has read the event.
    fn told(&mut self, report: Report) {
        if let Report::Failed(extent) = report {
            self.stats.install_deferred();
            let faults = &self.faults;
            self.space.pieces(extent, |piece| faults.wake(piece.start, piece.bytes));
        }
    }

    fn carry_out(&mut self) {
        while let Some(output) = self.cache.poll() {
            match output {
                Output::InstallZero { extent } => {
                    self.stats.zero_filled(u64::from(extent.count));
                    let checked =
                        self.verify.as_mut().map_or(Ok(()), |verify| verify.comes_as_zeroes(extent));
                    self.install_checked(extent, None, true, checked);
                }
                Output::Confirm { page, may_be_gone } => self.confirm(page, may_be_gone),
                Output::InstallFetched { extent, fetch, offset_pages, writable } => {
                    self.install_fetched(extent, fetch, offset_pages, writable)
                }
                Output::InstallStaged { extent, batch, offset_pages, writable } => {
                    self.stats.second_chance(u64::from(extent.count));
                    let from = self.own.batches.start_of(batch.0) + offset_pages as usize * OS_PAGE_BYTES;
                    let checked = self.come(extent, from, "the eviction batch that it was in");
                    self.install_checked(extent, Some(from), writable, checked);
                }
                Output::Unprotect { extent } => self.unprotect(extent),
                Output::Wake { page } => {
                    if let Some(address) = self.space.address_of(page) {
                        self.faults.wake(address, OS_PAGE_BYTES);
                    }
                }
                Output::Evict { batch, extents } => self.evict(batch, &extents),
                Output::Store { batch, pages } => {
                    self.stats.written_back(pages.iter().map(|(e, _)| u64::from(e.count)).sum());
                    self.unchanged.store(batch.0, &pages);
                    self.own.stored[batch.0 as usize] = pages;
                    self.store(batch);
                }
                Output::ReleaseBatch { batch } => {
                    let start = self.own.batches.release(batch.0);
                    self.empty_batch(start);
                }
                Output::Fetch { fetch, extents, demand } => self.fetch(fetch, &extents, demand),
                Output::ReleaseFetch { fetch } => {
                    self.own.fetches.release(fetch.0);
                }
                Output::Discard { extent } => self.backing.discard(self.region, extent),
            }
        }
    }

    fn fetch(&mut self, fetch: FetchId, extents: &[Extent], demand: bool) {
        self.stats.fetched(total_pages(extents), demand);
        let to = std::ptr::with_exposed_provenance_mut(self.own.fetches.take(fetch.0));
        let mut token = FETCH_TOKEN | u64::from(fetch.0);
        if demand {
            self.requests.demands += 1;
            token |= DEMAND_TOKEN;
        }
        self.requests.gone.remove(&fetch);
        let gone = self.backing.gone(self.region, extents);
        if gone.is_empty() {
            // SAFETY: the slot belongs to this fetch until ReleaseFetch, which follows Fetched.
            unsafe { self.backing.fetch(self.region, token, extents, to, demand) };
        } else {
            self.fetch_around(token, extents, gone, to);
        }
    }

    /// Installs pages of a fetch, except those that are lost.
    fn install_fetched(&mut self, extent: Extent, fetch: FetchId, offset_pages: u32, writable: bool) {
        let Some(gone) = self.requests.gone.get(&fetch) else {
            return self.install_part(extent, fetch, offset_pages, writable);
        };
        for (part, is_gone) in parts_of(extent, gone) {
            if is_gone {
                self.reports.push(Report::Failed(part));
            } else {
                let before = u32::try_from(part.first.0 - extent.first.0).expect("within it");
                self.install_part(part, fetch, offset_pages + before, writable);
            }
        }
    }

    fn install_part(&mut self, extent: Extent, fetch: FetchId, offset_pages: u32, writable: bool) {
        let from = self.own.fetches.start_of(fetch.0) + offset_pages as usize * OS_PAGE_BYTES;
        let checked = self.come(extent, from, "a server");
        self.install_checked(extent, Some(from), writable, checked);
    }

    /// Fetches what is not gone. Ends the program where a thread waits for what is.
    fn fetch_around(&mut self, token: u64, extents: &[Extent], gone: Vec<Extent>, to: *mut u8) {
        let mut parts: Vec<(Extent, *mut u8)> = Vec::new();
        for (at, page) in extents.iter().flat_map(Extent::pages).enumerate() {
            if gone.iter().any(|of| of.contains(page)) {
                if self.cache.is_wanted(page) {
                    let reason = format!(
                        "{page} was only at a memory server that is lost: the other one that holds it had not caught up"
                    );
                    self.requests.deferred.push_back(BackingEvent::Lost { reason });
                }
            } else {
                parts.push((Extent::page(page), to.wrapping_add(at * OS_PAGE_BYTES)));
            }
        }
        self.requests.gone.insert(FetchId(id_of(token & !FETCH_TOKEN & !DEMAND_TOKEN)), gone);
        // SAFETY: parts of the fetch's slot, which belongs to it until ReleaseFetch.
        unsafe { self.backing.fetch_parts(self.region, token, &parts, token & DEMAND_TOKEN != 0) };
    }

    /// A fetch came to nothing, because some of its pages are gone by now: without those.
    fn fetch_again(&mut self, token: u64, reason: String) {
        let fetch = FetchId(id_of(token & !FETCH_TOKEN & !DEMAND_TOKEN));
        let extents = self.cache.fetch_extents(fetch).to_vec();
        let gone = self.backing.gone(self.region, &extents);
        let known = self.requests.gone.get(&fetch).map_or(0, |gone| total_pages(gone));
        if total_pages(&gone) <= known {
            return self.requests.deferred.push_back(BackingEvent::Lost { reason });
        }
        let to = self.own.fetches.start_of(fetch.0);
        self.fetch_around(token, &extents, gone, std::ptr::with_exposed_provenance_mut(to));
    }

    /// Pages at `from` are about to return: with `--verify`, checks that they are the bytes that left.
    fn come(&mut self, extent: Extent, from: usize, whence: &str) -> Result<(), String> {
        let Some(verify) = &mut self.verify else { return Ok(()) };
        for (page, at) in extent.pages().zip((from..).step_by(OS_PAGE_BYTES)) {
            // SAFETY: frames of ours, whole pages, which are not written while they wait to be installed.
            let bytes: &[u8; OS_PAGE_BYTES] = unsafe { &*std::ptr::with_exposed_provenance(at) };
            verify.comes(page, bytes, whence)?;
        }
        Ok(())
    }

    /// As [`install`](Self::install), unless the content is wrong: then the program ends.
    fn install_checked(
        &mut self,
        extent: Extent,
        from: Option<usize>,
        writable: bool,
        checked: Result<(), String>,
    ) {
        match checked {
            Ok(()) => self.install(extent, from, writable),
            Err(reason) => {
                self.breaks(|| reason);
                self.reports.push(Report::Failed(extent));
            }
        }
    }

    /// A fault on a page that counts as resident: zeroes if there is none, which the kernel refuses if there
    /// is.
    fn confirm(&mut self, page: PageIndex, may_be_gone: bool) {
        let Some(address) = self.space.address_of(page) else { return };
        let lost = if may_be_gone { None } else { self.faults.poison_unless_there(address) };
        let reply = lost.unwrap_or_else(|| {
            self.faults.install(address, self.own.zeroes.start(), OS_PAGE_BYTES, false, true)
        });
        match reply {
            Reply::Done => self.reports.push(Report::WasMissing(page)),
            Reply::AlreadyMapped => self.faults.wake(address, OS_PAGE_BYTES),
            reply => self.refused(page, address, reply),
        }
        self.served();
    }

    /// The kernel did not install this page, for any reason except that it has one. Waiting threads fault
    /// again.
    fn refused(&mut self, page: PageIndex, address: usize, reply: Reply) {
        match reply {
            Reply::NoMemory => {
                self.refusals.no_room(self.now_ns());
            }
            // Unmapped meanwhile, or mapped as something else: the event follows.
            Reply::Gone => {
                if self.refusals.not_mapped(self.now_ns(), address) {
                    self.breaks(|| {
                        format!("the kernel has said for 5 s that {address:#x} is not managed, and not what has become of it")
                    });
                }
            }
            Reply::MapChanging | Reply::Exiting => {}
            reply => {
                self.breaks(|| format!("the kernel does not install the page at {address:#x}: {reply:?}"))
            }
        }
        self.reports.push(Report::Failed(Extent::page(page)));
    }

    /// Maps `extent` with the bytes at `from` (zeroes without), page by page where the kernel stops half-way.
    fn install(&mut self, extent: Extent, from: Option<usize>, writable: bool) {
        let mut refused = Vec::new();
        let mut rest = Vec::new();
        let (faults, zeroes) = (&mut self.faults, self.own.zeroes.start());
        let (refusals, reports) = (&mut self.refusals, &mut self.reports);
        self.space.pieces(extent, |piece| {
            let mut done = 0;
            // The kernel takes a range of one mapping only, and advice or protection may have divided ours:
            // then smaller steps find the border.
            let mut most = piece.bytes;
            while done < piece.bytes {
                let (source, bytes) = match from {
                    Some(from) => (
                        from + piece.offset_pages as usize * OS_PAGE_BYTES + done,
                        (piece.bytes - done).min(most),
                    ),
                    None => (zeroes, (piece.bytes - done).min(ZERO_BYTES).min(most)),
                };
                match faults.install(piece.start + done, source, bytes, !writable, from.is_none()) {
                    Reply::Done => {
                        refusals.came(piece.start + done, piece.start + done + bytes);
                        done += bytes;
                    }
                    Reply::Partial(part) => done += part,
                    // The program's own: waiting threads may go on.
                    Reply::AlreadyMapped => {
                        faults.wake(piece.start + done, OS_PAGE_BYTES);
                        reports.push(Report::AlreadyThere(Extent::page(page_of(extent, &piece, done))));
                        done += OS_PAGE_BYTES;
                    }
                    Reply::Gone if bytes > OS_PAGE_BYTES => most = half(bytes),
                    reply @ Reply::Gone => {
                        refused.push((page_of(extent, &piece, done), piece.start + done, reply));
                        done += OS_PAGE_BYTES;
                        most = piece.bytes;
                    }
                    reply => {
                        refused.push((page_of(extent, &piece, done), piece.start + done, reply));
                        if piece.bytes - done > OS_PAGE_BYTES {
                            let next = page_of(extent, &piece, done + OS_PAGE_BYTES);
                            rest.push(Extent::new(next, page_count(piece.bytes - done - OS_PAGE_BYTES)));
                        }
                        break;
                    }
                }
            }
        });
        if refused.is_empty() {
            self.served();
            return;
        }
        for (page, address, reply) in refused {
            self.refused(page, address, reply);
        }
        rest.into_iter().for_each(|extent| self.reports.push(Report::Failed(extent)));
    }

    fn unprotect(&mut self, extent: Extent) {
        let faults = &mut self.faults;
        let mut unexpected = None;
        self.space.pieces(extent, |piece| match faults.unprotect(piece.start, piece.bytes) {
            Reply::Done => {}
            // An event waits to be read, or there is no memory to divide a mapping: the thread meets the
            // protection again.
            Reply::MapChanging | Reply::Gone | Reply::NoMemory | Reply::Exiting => {
                faults.wake(piece.start, piece.bytes)
            }
            reply => unexpected = Some((piece.start, reply)),
        });
        if let Some((address, reply)) = unexpected {
            self.breaks(|| format!("the kernel does not open the page at {address:#x} to writes: {reply:?}"));
        }
        self.served();
    }

    /// Where the batch's frames are.
    fn begin_batch(&mut self, batch: BatchId) -> usize {
        self.waits.delays();
        self.own.batches.take(batch.0)
    }

    /// Moves the pages of a batch out of the program.
    fn evict(&mut self, batch: BatchId, extents: &[Extent]) {
        let to = self.begin_batch(batch);
        // Pages without content left management: there is nothing of them.
        let mut outcomes =
            vec![EvictOutcome::Vanished; usize::try_from(total_pages(extents)).expect("a batch is small")];
        let mut departures = Vec::with_capacity(extents.len());
        let mut slot = to;
        for extent in extents {
            self.space.pieces(*extent, |piece| {
                let to = slot + piece.offset_pages as usize * OS_PAGE_BYTES;
                departures.push(Departure { from: piece.start, to, bytes: piece.bytes });
            });
            slot += extent.count as usize * OS_PAGE_BYTES;
        }
        if self.mappings.frozen {
            outcomes.fill(EvictOutcome::Later);
        } else {
            self.faults.evict(&departures, to, &mut outcomes);
            if let Some(errno) = self.faults.take_unexpected() {
                self.breaks(|| {
                    format!("the kernel does not move pages out of the program, nor say what has become of them (errno {errno})")
                });
            }
            self.keep_what_may_be_reclaimed(extents, &outcomes, to);
        }
        self.judge_departures(batch, extents, &mut outcomes, to);
        self.reports.push(Report::Evicted(batch, outcomes));
    }

    /// Pages of a batch have been moved to frames from `to` on, or not: finds those that need not be sent.
    fn judge_departures(
        &mut self,
        batch: BatchId,
        extents: &[Extent],
        outcomes: &mut [EvictOutcome],
        to: usize,
    ) {
        let mut moved = 0;
        self.unchanged.begin(batch.0, outcomes.len());
        // Asked after the pages have left: what is merged from now on is none of them.
        let may_hide_writes = self.merged.may_hide_writes();
        let pages = extents.iter().flat_map(Extent::pages);
        for (index, (page, outcome)) in pages.zip(outcomes).enumerate() {
            if matches!(outcome, EvictOutcome::Moved | EvictOutcome::MovedOpened) {
                moved += 1;
                let frame = to + index * OS_PAGE_BYTES;
                let written = *outcome == EvictOutcome::MovedOpened || self.cache.needs_store(page);
                if let Some(verify) = &mut self.verify {
                    // SAFETY: the page was just moved into the batch, which only this thread touches.
                    let bytes: &[u8; OS_PAGE_BYTES] = unsafe { &*std::ptr::with_exposed_provenance(frame) };
                    if let Err(reason) = verify.leaves(page, bytes, written) {
                        self.broken.get_or_insert(reason);
                    }
                }
                if !written && !may_hide_writes {
                    // The servers hold the same bytes. Reading it would bring it into the CPU's cache for
                    // nothing.
                    continue;
                }
                // SAFETY: the page was just moved into the batch, which only this thread touches.
                let bytes: &[u8; OS_PAGE_BYTES] = unsafe { &*std::ptr::with_exposed_provenance(frame) };
                // SAFETY: as above.
                if unsafe { is_zero_page(frame) } {
                    *outcome = EvictOutcome::MovedZero;
                } else if self.unchanged.leaves(batch.0, index, page, bytes) {
                    *outcome = EvictOutcome::MovedUnchanged;
                } else if !written {
                    *outcome = EvictOutcome::MovedOpened;
                }
            }
            if matches!(outcome, EvictOutcome::MovedZero | EvictOutcome::Vanished)
                && let Some(verify) = &mut self.verify
            {
                verify.forget(Extent::page(page));
            }
        }
        self.stats.evicted(moved);
    }

    /// Frames that the program may have let the kernel take (MADV_FREE) become ours for good.
    fn keep_what_may_be_reclaimed(&mut self, extents: &[Extent], outcomes: &[EvictOutcome], to: usize) {
        let moved =
            |outcome: &EvictOutcome| matches!(outcome, EvictOutcome::Moved | EvictOutcome::MovedOpened);
        let pages = extents.iter().flat_map(Extent::pages).zip(outcomes).enumerate();
        let frames: Vec<usize> = pages
            .filter(|(_, (page, outcome))| moved(outcome) && self.cache.may_be_reclaimed(*page))
            .map(|(index, _)| to + index * OS_PAGE_BYTES)
            .collect();
        // SAFETY: pages that were just moved into the batch, which only this thread touches.
        unsafe { self.faults.keep_frames(&frames) };
    }

    fn store(&mut self, batch: BatchId) {
        let start = self.own.batches.start_of(batch.0);
        let pages: Vec<(Extent, *const u8)> = self.own.stored[batch.0 as usize]
            .iter()
            .map(|(extent, offset)| {
                (*extent, std::ptr::with_exposed_provenance(start + *offset as usize * OS_PAGE_BYTES))
            })
            .collect();
        // SAFETY: the batch's frames stay until ReleaseBatch, which follows Stored; they are not written.
        unsafe { self.backing.store(self.region, u64::from(batch.0), &pages) };
    }

    /// Gives a batch's frames back to the kernel.
    fn empty_batch(&mut self, start: usize) {
        // SAFETY: the cache released the batch: its content is not needed.
        unsafe { self.faults.empty_frames(start, self.own.batches.slot_bytes()) };
    }

    /// The thread whose fault came last has its page.
    fn served(&mut self) {
        if let Some(took) = self.waits.served() {
            self.stats.served(took, self.cache.pages_to_avoid());
        }
    }

    fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos().try_into().unwrap_or(u64::MAX)
    }
}

const DEMAND_TOKEN: u64 = 1 << 33;
const FORKED_TOKEN: u64 = 1 << 34;
const HAND_OVER_TOKEN: u64 = 1 << 35;

/// Runs of these pages, and whether they are gone.
fn parts_of(extent: Extent, gone: &[Extent]) -> Vec<(Extent, bool)> {
    let mut parts: Vec<(Extent, bool)> = Vec::new();
    for page in extent.pages() {
        let is_gone = gone.iter().any(|of| of.contains(page));
        match parts.last_mut() {
            Some((part, same)) if *same == is_gone => part.count += 1,
            _ => parts.push((Extent::page(page), is_gone)),
        }
    }
    parts
}

fn intersect(a: Extent, b: Extent) -> Option<Extent> {
    let (first, end) = (a.first.max(b.first), a.end().min(b.end()));
    (first < end).then(|| Extent::new(first, u32::try_from(end.0 - first.0).expect("shorter than either")))
}

/// The numbers of the pages of `[start, end)`.
fn pages_at(start: usize, end: usize) -> Extent {
    let pages = u32::try_from((end - start) / OS_PAGE_BYTES).unwrap_or(u32::MAX);
    Extent::new(PageIndex((start / OS_PAGE_BYTES) as u64), pages)
}

/// The page of `extent` that lies `done` bytes behind the start of `piece`.
fn page_of(extent: Extent, piece: &rampool_paging::space::Piece, done: usize) -> PageIndex {
    extent.first.offset(u64::from(piece.offset_pages) + (done / OS_PAGE_BYTES) as u64)
}

fn id_of(token: u64) -> u32 {
    u32::try_from(token & 0xffff_ffff).expect("masked")
}

fn page_count(bytes: usize) -> u32 {
    u32::try_from(bytes / OS_PAGE_BYTES).expect("a span has fewer than 2^32 pages")
}

pub(crate) fn sleep_on(fds: &mut [libc::pollfd], time: Duration) {
    let timeout = libc::timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    // SAFETY: the descriptors and the timeout live across the call, with their true count.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, &raw const timeout, std::ptr::null()) };
}
