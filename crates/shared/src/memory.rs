//! A rank's copy of the shared pages: one object in memory, mapped twice.
//!
//! ```text
//!   view    at the same address on every rank, for the program. Registered with userfaultfd: touching an
//!           unmapped or write-protected page faults. Absent protection is an absent page table entry; the
//!           content stays in the object.
//!   alias   anywhere, for the runtime: always readable and writable, never registered. All content moves
//!           through it.
//! ```
//! A page is installed by filling it through the alias and then mapping it in the view (UFFDIO_CONTINUE):
//! threads see all of it or nothing. `madvise(MADV_DONTNEED)` on the view removes it. Both mappings stay out
//! of forked children and of huge pages.
//!
//! Under a budget the content of a page may be at memory servers instead ([`Residency`]): its protection is
//! as before, but it is not mapped, so a thread that touches it faults; any access by the engine brings it
//! back first. [`Residency`] and the engine decide which pages leave, and when.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rampool_kernel::memory::{Advice, MapError, Mapping, SharedObject, advise, dont_fork, prefetch};
use rampool_kernel::uffd::{Event, Features, OpenError, Reply, Scope, Uffd};
use rampool_sharing::config::word_of;
use rampool_sharing::residency::{Place, Residency};
use rampool_sharing::{Diff, LockId, Mem, Protection, Rank, Recalled, RegionConfig, ThreadId};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use super::account::{Cost, SAMPLES, cpu_of_this_thread};
use super::failure;
use super::lent::{Lent, Name};
use super::servers::{Servers, ServersError};

/// Required kernel features: write protection and minor faults on shared memory (Linux 5.19).
const NEEDED: Features = Features::WP.with(Features::WP_SHMEM).with(Features::MINOR_SHMEM);

/// Why this machine cannot hold shared pages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    #[error("userfaultfd is needed: {0} (see `rampool doctor`)")]
    Userfault(#[from] OpenError),
    #[error(
        "this kernel's userfaultfd lacks {what}, which needs Linux {since} or later (features {features:#x})"
    )]
    Features { what: &'static str, since: &'static str, features: u64 },
    #[error(
        "the shared range of {bytes} bytes at {base:#x} cannot be mapped (errno {errno}): this process has joined a run already, or something else lies there; \
         every rank needs it free, and RAMPOOL_SHARED_BASE chooses another place"
    )]
    Place { base: usize, bytes: usize, errno: i32 },
    #[error("{0}; RAMPOOL_SHARED_RANGE asks for fewer")]
    Map(#[from] MapError),
    #[error("{operation} on shared pages failed (errno {errno})")]
    Kernel { operation: &'static str, errno: i32 },
}

/// Whether system calls wait for absent pages, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// They do.
    SystemCalls,
    /// They do not: this user may only catch faults of its own code. A system call on an absent page fails
    /// with EFAULT; touch the memory first.
    UserCode,
}

/// A thread of this process that waits for a page.
#[derive(Clone, Copy, Debug)]
pub struct FaultAt {
    pub address: usize,
    pub write: bool,
}

/// The pages, and what the view of each allows.
///
/// Invariant: `state` of a page is the protection that the engine set last. The kernel may drop a page table
/// entry by itself; the next access faults, and [`Mem::reassert`] maps it again.
pub struct SharedMemory {
    rank: Rank,
    uffd: Arc<Uffd>,
    reach: Reach,
    object: SharedObject,
    view: Mapping,
    alias: Mapping,
    regions: BTreeMap<PageIndex, Region>,
    events: Vec<Event>,
    /// Start and length of the pages whose threads are to try again.
    to_wake: Vec<(usize, usize)>,
    /// The end of the page that was read last, in the alias.
    read: Cell<usize>,
    residency: Residency,
    servers: Option<Servers>,
    pub traffic: Traffic,
    lent: Arc<Lent>,
    /// Locks that were recalled from the threads that hold them.
    pub recalled: Vec<(LockId, ThreadId)>,
}

/// Bytes to and from memory servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    pub sent_bytes: u64,
    pub brought_bytes: u64,
}

/// A cache line.
const LINE_BYTES: usize = 64;
/// The least that is sent to memory servers at a time.
const SEND_BYTES: usize = 64 << 10;
/// Pages offered to the engine at a time.
pub const OFFER_PAGES: usize = 64;

#[derive(Debug)]
struct Region {
    config: RegionConfig,
    /// The offset of its first page from the beginning of the mappings.
    offset: usize,
    state: Vec<Protection>,
}

impl Region {
    fn page_bytes(&self) -> usize {
        self.config.page_bytes as usize
    }

    fn offset_of(&self, page: PageIndex) -> usize {
        self.offset + index(page, self.config.pages.first) * self.page_bytes()
    }
}

impl AsFd for SharedMemory {
    /// Readable when a thread waits for a page.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

/// How far `page` is behind `first`.
fn index(page: PageIndex, first: PageIndex) -> usize {
    usize::try_from(page.0 - first.0).expect("page numbers fit an address")
}

impl SharedMemory {
    /// Maps an object of `bytes` bytes with its view at `base`. Regions are opened later. `user_faults`: only
    /// faults of user code are caught.
    ///
    /// # Errors
    /// A missing kernel feature, or a mapping in the way.
    pub fn new(rank: Rank, base: usize, bytes: usize, user_faults: bool) -> Result<Self, MemoryError> {
        let (uffd, reach) = match Uffd::open(Scope::Everything, NEEDED) {
            _ if user_faults => (Self::open(Scope::UserMode)?, Reach::UserCode),
            Ok(uffd) => (uffd, Reach::SystemCalls),
            Err(OpenError::NotPermitted) => (Self::open(Scope::UserMode)?, Reach::UserCode),
            Err(_) => (Self::open(Scope::Everything)?, Reach::SystemCalls),
        };
        let object = SharedObject::new(c"rampool-shared", bytes)?;
        let alias = Mapping::shared(&object)?;
        let view = Mapping::shared_at(&object, base).map_err(|error| MemoryError::Place {
            base,
            bytes,
            errno: error.errno,
        })?;
        for mapping in [&alias, &view] {
            dont_fork(mapping);
            // SAFETY: changes no content. Kernels without huge pages refuse it, and do not need it.
            let _ = unsafe { advise(mapping.start(), mapping.bytes(), Advice::NoHugePage) };
        }
        let memory = Self {
            rank,
            uffd: Arc::new(uffd),
            reach,
            object,
            view,
            alias,
            regions: BTreeMap::new(),
            events: Vec::new(),
            to_wake: Vec::new(),
            read: Cell::new(0),
            residency: Residency::default(),
            servers: None,
            traffic: Traffic::default(),
            lent: Arc::new(Lent::new()),
            recalled: Vec::new(),
        };
        memory.try_write_protected_install()?;
        Ok(memory)
    }

    /// From now on at most `budget` bytes of pages are here; pages that cannot be dropped go to memory
    /// servers, if there are some.
    pub fn limit(&mut self, budget: u64, servers: Option<Servers>) {
        assert!(self.regions.is_empty(), "the budget is set before there are pages");
        self.residency = Residency::new(Some(budget));
        self.servers = servers;
    }

    /// Where locks are lent to this rank's threads.
    pub fn lent(&self) -> &Arc<Lent> {
        &self.lent
    }

    /// The lock's name where it is lent. `None`: it never is.
    fn name_of(&self, lock: LockId) -> Option<Name> {
        match word_of(lock) {
            None => Name::of_lock(lock),
            Some((page, offset)) => {
                let (start, bytes) = self.place(page);
                let offset = usize::try_from(offset).expect("64-bit addresses");
                // A page's own lock has a number behind its words.
                if offset < bytes { Name::of_word(start + offset) } else { None }
            }
        }
    }

    /// Opens a context, or reports the missing feature.
    fn open(scope: Scope) -> Result<Uffd, MemoryError> {
        let offered = Uffd::probe(scope)?;
        let wanted = [
            (Features::WP, "write protection", "5.7"),
            (Features::MINOR_SHMEM, "minor faults on shared memory", "5.14"),
            (Features::WP_SHMEM, "write protection of shared memory", "5.19"),
        ];
        for (feature, what, since) in wanted {
            if !offered.has(feature) {
                return Err(MemoryError::Features { what, since, features: offered.0 });
            }
        }
        Ok(Uffd::open(scope, NEEDED)?)
    }

    /// No feature bit announces that pages can be installed write-protected: it is tried once, on the last
    /// page of the mapping.
    fn try_write_protected_install(&self) -> Result<(), MemoryError> {
        let offset = self.view.bytes() - OS_PAGE_BYTES;
        let page = self.view.start() + offset;
        self.make_visible(offset, OS_PAGE_BYTES)?;
        populate(self.rank, self.alias.start() + offset, OS_PAGE_BYTES);
        let reply = self.uffd.continue_silently(page, OS_PAGE_BYTES, true);
        self.conceal(offset, OS_PAGE_BYTES)?;
        match reply {
            Reply::Done => Ok(()),
            _ => Err(MemoryError::Features {
                what: "installing pages write-protected",
                since: "6.4",
                features: NEEDED.0,
            }),
        }
    }

    /// A trace has each operation, so no lock is lent from now on. Returns [`Self::costs_of_faults`].
    pub fn begin_trace(&self) -> Vec<Cost> {
        self.lent.close();
        self.costs_of_faults()
    }

    /// The CPU time of a thread that waits for a page, in addition to waiting: for a read, and for a write to
    /// a page that it can read already. Measured on the page where installing was tried, with a thread that
    /// serves the faults from its sleep. Empty if that thread cannot be started.
    ///
    /// Only before regions are opened: afterwards faults are the program's.
    fn costs_of_faults(&self) -> Vec<Cost> {
        assert!(self.regions.is_empty(), "faults are measured before there are any");
        let offset = self.view.bytes() - OS_PAGE_BYTES;
        let (page, alias) = (self.view.start() + offset, self.alias.start() + offset);
        if self.make_visible(offset, OS_PAGE_BYTES).is_err() {
            return Vec::new();
        }
        populate(self.rank, alias, OS_PAGE_BYTES);
        let (rank, uffd, ended) = (self.rank, &self.uffd, AtomicBool::new(false));
        let serve = || {
            let mut events = Vec::new();
            let millisecond = rustix::event::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            while !ended.load(Ordering::Acquire) {
                let mut watched = [rustix::event::PollFd::new(uffd, rustix::event::PollFlags::IN)];
                // Also checks for its end from time to time.
                let _ = rustix::event::poll(&mut watched, Some(&millisecond));
                uffd.read_events::<1>(&mut events);
                for event in events.drain(..) {
                    let reply = match event {
                        Event::Fault { write_protected: true, .. } => {
                            uffd.allow_writes_silently(page, OS_PAGE_BYTES)
                        }
                        _ => uffd.continue_silently(page, OS_PAGE_BYTES, true),
                    };
                    if reply != Reply::Done {
                        // The kernel may have swapped the page out of the object's memory. The waiting thread
                        // tries again.
                        populate(rank, alias, OS_PAGE_BYTES);
                    }
                    uffd.wake(page, OS_PAGE_BYTES);
                }
            }
        };
        let found = std::thread::scope(|scope| {
            std::thread::Builder::new().name("rampool-faults".to_owned()).spawn_scoped(scope, serve).ok()?;
            let _ended = SetWhenDropped(&ended);
            let (mut reads, mut writes) = (Vec::new(), Vec::new());
            for _ in 0..SAMPLES {
                drop_pages(page, OS_PAGE_BYTES);
                let byte = self.view.at(offset);
                let began = cpu_of_this_thread();
                // SAFETY: in the view, which stays mapped; the other thread maps the page, and no thread
                // writes it.
                let value = unsafe { byte.read_volatile() };
                let read = cpu_of_this_thread();
                // SAFETY: as above; the page has no content in use.
                unsafe { byte.write_volatile(value) };
                reads.push(read.saturating_sub(began));
                writes.push(cpu_of_this_thread().saturating_sub(read));
            }
            Some([Cost::of("read fault", reads), Cost::of("write fault", writes)])
        });
        let concealed = self.conceal(offset, OS_PAGE_BYTES);
        assert!(concealed.is_ok(), "{concealed:?}");
        found.into_iter().flatten().flatten().collect()
    }

    fn make_visible(&self, offset: usize, bytes: usize) -> Result<(), MemoryError> {
        let start = self.view.start() + offset;
        self.uffd
            .register_shared(start, bytes)
            .map_err(|errno| MemoryError::Kernel { operation: "userfaultfd registration", errno })?;
        let allowed =
            self.alias.allow(self.alias.start() + offset, bytes).and_then(|()| self.view.allow(start, bytes));
        allowed.map_err(|errno| MemoryError::Kernel { operation: "mprotect", errno })
    }

    /// This part is unused from now on: only regions are ever touched, also where a program makes the kernel
    /// touch all its memory (`mlockall`).
    fn conceal(&self, offset: usize, bytes: usize) -> Result<(), MemoryError> {
        drop_pages(self.view.start() + offset, bytes);
        self.give_back(offset, bytes);
        let forbidden = self
            .view
            .forbid(self.view.start() + offset, bytes)
            .and_then(|()| self.alias.forbid(self.alias.start() + offset, bytes));
        forbidden.map_err(|errno| MemoryError::Kernel { operation: "mprotect", errno })
    }

    /// Gives memory back to the kernel: pages of the object, which are absent in the view and the alias then.
    /// Their content is at memory servers, or not needed.
    fn give_back(&self, offset: usize, bytes: usize) {
        let done = self.object.give_back(offset, bytes);
        assert!(done.is_ok(), "giving shared pages back failed (errno {})", done.expect_err("checked"));
    }

    #[must_use]
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// The program may use the region's pages from now on; all are absent.
    ///
    /// # Errors
    /// If the kernel refuses, or the region does not fit.
    pub fn open_region(&mut self, config: RegionConfig) -> Result<(), MemoryError> {
        let no_room = MemoryError::Kernel { operation: "placing a region", errno: libc::ENOMEM };
        let offset =
            usize::try_from(config.pages.first.0).ok().and_then(|first| first.checked_mul(OS_PAGE_BYTES));
        let bytes = (config.pages.count as usize).checked_mul(config.page_bytes as usize);
        let (Some(offset), Some(bytes)) = (offset, bytes) else { return Err(no_room) };
        // The last page is the one where installing was tried.
        if offset.checked_add(bytes).is_none_or(|end| end > self.view.bytes() - OS_PAGE_BYTES) {
            return Err(no_room);
        }
        self.make_visible(offset, bytes)?;
        let state = vec![Protection::None; config.pages.count as usize];
        self.regions.insert(config.pages.first, Region { config, offset, state });
        Ok(())
    }

    fn find(&self, page: PageIndex) -> Option<&Region> {
        let found = self.regions.range(..=page).next_back().map(|(_, region)| region);
        found.filter(|region| region.config.pages.contains(page))
    }

    fn region(&self, page: PageIndex) -> &Region {
        self.find(page).expect("the engine names pages of its regions")
    }

    /// The page that holds this address, and where in it.
    #[must_use]
    pub fn locate(&self, address: usize) -> Option<(PageIndex, u32)> {
        let offset = address.checked_sub(self.view.start()).filter(|&offset| offset < self.view.bytes())?;
        // A region's pages may be larger than the numbering unit, so its numbers end early; the first number
        // of each page counts.
        let at = PageIndex((offset / OS_PAGE_BYTES) as u64);
        let (_, region) = self.regions.range(..=at).next_back()?;
        let inside = offset - region.offset;
        let index = (inside / region.page_bytes()) as u64;
        if index >= u64::from(region.config.pages.count) {
            return None;
        }
        let rest = u32::try_from(inside % region.page_bytes()).expect("a page is small");
        Some((region.config.pages.first.offset(index), rest))
    }

    /// The address of a page in the view, and its bytes.
    #[must_use]
    pub fn place(&self, page: PageIndex) -> (usize, usize) {
        let region = self.region(page);
        (self.view.start() + region.offset_of(page), region.page_bytes())
    }

    /// Appends the threads that have begun to wait. Does not block.
    pub fn read_faults(&mut self, out: &mut Vec<FaultAt>) {
        while self.uffd.read_events::<32>(&mut self.events) == 32 {}
        for event in self.events.drain(..) {
            if let Event::Fault { address, write, write_protected, .. } = event {
                out.push(FaultAt { address, write: write || write_protected });
            }
        }
    }

    /// No access to shared pages is possible any more: a touch ends the process.
    pub fn close(&mut self) {
        if let Some(servers) = self.servers.take() {
            servers.leave();
        }
        let closed = self.view.forbid(self.view.start(), self.view.bytes());
        assert!(closed.is_ok(), "mprotect of our own mapping failed");
    }

    /// Every thread that waits for the page is to try again, once the rank's lock is free.
    pub fn wake(&mut self, page: PageIndex) {
        self.to_wake.push(self.place(page));
    }

    /// Whom to wake when the rank's lock is free.
    pub fn take_wakes(&mut self) -> Option<Wakes> {
        if self.to_wake.is_empty() {
            return None;
        }
        Some(Wakes { uffd: Arc::clone(&self.uffd), ranges: std::mem::take(&mut self.to_wake) })
    }

    /// The page's content is read, or replaced, in a moment: prefetches it, since it is in no cache. Accepts
    /// any number.
    pub fn expect(&self, page: PageIndex) {
        if let Some(region) = self.find(page) {
            let alias = self.alias.at(region.offset_of(page));
            (0..region.page_bytes().min(OS_PAGE_BYTES))
                .step_by(LINE_BYTES)
                .for_each(|at| prefetch(alias.wrapping_add(at)));
        }
    }

    fn alias_of(&self, page: PageIndex) -> (*mut u8, usize) {
        let region = self.region(page);
        (self.alias.at(region.offset_of(page)), region.page_bytes())
    }

    /// Changes `count` pages of one region from `first` on, which all have the protection `from`. `offset` is
    /// the first one's, `page_bytes` each one's.
    fn change(
        &mut self,
        first: PageIndex,
        offset: usize,
        page_bytes: usize,
        count: usize,
        from: Protection,
        to: Protection,
    ) {
        let (start, bytes) = (self.view.start() + offset, count * page_bytes);
        match (from, to) {
            (Protection::None, Protection::None) => {}
            (_, Protection::None) => drop_pages(start, bytes),
            (Protection::None, _) if self.residency.budget().is_some() => {
                // One by one: making room for one may evict the one before.
                for index in 0..count {
                    let page = first.offset(index as u64);
                    self.bring(page);
                    self.map_page(page, to);
                }
            }
            (Protection::None, _) => {
                populate(self.rank, self.alias.start() + offset, bytes);
                self.map(start, bytes, to);
            }
            _ => {
                if to == Protection::ReadWrite && self.residency.budget().is_some() {
                    for index in 0..count {
                        self.residency.changed(first.offset(index as u64));
                    }
                }
                let reply = self.set_writable(start, bytes, to);
                assert!(reply == Reply::Done, "changing the protection of shared pages failed: {reply:?}");
            }
        }
    }

    /// Maps one page, which is here.
    fn map_page(&mut self, page: PageIndex, to: Protection) {
        if to == Protection::ReadWrite {
            self.residency.changed(page);
        }
        let (start, bytes) = self.place(page);
        self.map(start, bytes, to);
    }

    // --- residency -----------------------------------------------------------------------------------------

    /// The page will be present, with any content: makes room, and allocates it.
    fn hold(&mut self, page: PageIndex) {
        if self.residency.budget().is_none() {
            return;
        }
        let (alias, bytes) = self.alias_of(page);
        if self.residency.place(page) != Place::Here {
            while self.residency.exceeds(bytes as u64) && self.send_away(Some(page)) {}
            populate(self.rank, alias.addr(), bytes);
        }
        self.residency.used(page, small(bytes));
    }

    /// Brings the page's content back if it is away.
    fn bring(&mut self, page: PageIndex) {
        if self.residency.budget().is_none() {
            return;
        }
        let away = self.residency.place(page) == Place::Away;
        self.hold(page);
        if away {
            let offset = self.region(page).offset_of(page);
            let (into, len) = self.alias_of(page);
            let servers = self.servers.as_mut().expect("only servers have pages that are away");
            let brought = servers.bring(offset, len);
            let bytes = self.or_die(brought, "bringing back");
            self.traffic.brought_bytes += len as u64;
            // SAFETY: the page lies in the alias and is mapped nowhere else: no other thread reads or writes
            // it now.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, len) };
        }
    }

    /// Sends pages to memory servers, except `except`. False if that is not possible.
    fn send_away(&mut self, except: Option<PageIndex>) -> bool {
        if self.servers.is_none() {
            return false;
        }
        let (mut pages, mut bytes) = (Vec::new(), 0);
        for page in self
            .residency
            .to_send(SEND_BYTES / OS_PAGE_BYTES + 1)
            .into_iter()
            .filter(|&page| Some(page) != except)
        {
            bytes += self.region(page).page_bytes();
            pages.push(page);
            if bytes >= SEND_BYTES {
                break;
            }
        }
        self.send_pages(&pages);
        !pages.is_empty()
    }

    /// Sends these pages, which are here, to memory servers. Their protection stays: a thread that touches
    /// one waits until it is back.
    fn send_pages(&mut self, pages: &[PageIndex]) {
        let mut content = Vec::with_capacity(pages.len());
        let mut empty = Vec::new();
        for &page in pages {
            let (start, len) = self.place(page);
            // No thread writes to it from now on.
            drop_pages(start, len);
            if self.residency.is_saved(page) {
                continue;
            }
            let mut bytes = vec![0; len];
            self.read_alias(page, &mut bytes);
            if bytes.iter().all(|&byte| byte == 0) {
                empty.push(page);
            } else {
                content.push((self.region(page).offset_of(page), bytes));
            }
        }
        self.traffic.sent_bytes += content.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        let sent = self.servers.as_mut().expect("there are servers").send(content);
        self.or_die(sent, "sending away");
        for &page in pages {
            if empty.contains(&page) {
                // A zero page takes no memory anywhere.
                self.forget(page);
            } else {
                self.residency.sent(page);
            }
            let region = self.region(page);
            self.give_back(region.offset_of(page), region.page_bytes());
        }
    }

    /// The page's content is no longer needed, neither here nor at memory servers. Returns whether it was
    /// here.
    fn forget(&mut self, page: PageIndex) -> bool {
        let left = self.residency.forget(page);
        let (offset, bytes) = (self.region(page).offset_of(page), self.region(page).page_bytes());
        if left.at_servers
            && let Some(servers) = &mut self.servers
        {
            servers.forget(offset, bytes);
        }
        left.here
    }

    fn or_die<T>(&self, done: Result<T, ServersError>, what: &str) -> T {
        match done {
            Ok(done) => done,
            Err(error) => failure::die(self.rank, &format!("{what} shared pages failed: {error}")),
        }
    }

    /// Call it about once a second.
    pub fn keep_alive(&mut self) {
        if let Some(servers) = &mut self.servers {
            servers.keep_alive();
        }
    }

    /// Bytes of pages that are here, as the kernel counts them.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.object.allocated()
    }

    /// Bytes of pages that are at memory servers only.
    #[must_use]
    pub fn away(&self) -> u64 {
        self.residency.away()
    }

    /// Whether pages should leave to make room for the next ones.
    #[must_use]
    pub fn wants_room(&self) -> bool {
        self.residency.wants_room()
    }

    /// Pages that the engine may drop, ascending; empty when enough have left, or all have been offered.
    #[must_use]
    pub fn to_offer(&self) -> Vec<PageIndex> {
        let mut pages =
            if self.residency.has_room() { Vec::new() } else { self.residency.to_offer(OFFER_PAGES) };
        pages.sort_unstable();
        pages
    }

    /// The engine has been asked to drop these.
    pub fn offered(&mut self, pages: &[PageIndex]) {
        for &page in pages {
            self.residency.refuse(page);
        }
    }

    /// The next pages to go to memory servers, ascending; empty when enough have left. Some may have become
    /// clean since the engine refused them.
    #[must_use]
    pub fn to_send(&self) -> Vec<PageIndex> {
        let mut pages = if self.residency.has_room() || self.servers.is_none() {
            Vec::new()
        } else {
            self.residency.to_send(OFFER_PAGES)
        };
        pages.sort_unstable();
        pages
    }

    /// Sends those of the pages that are still here to memory servers.
    pub fn send(&mut self, pages: &[PageIndex]) {
        let here: Vec<PageIndex> =
            pages.iter().copied().filter(|&page| self.residency.place(page) == Place::Here).collect();
        self.send_pages(&here);
    }

    /// Pages that the engine refused to drop, ascending, if the budget is exceeded and there are no memory
    /// servers.
    #[must_use]
    pub fn in_excess(&self) -> Vec<PageIndex> {
        let mut pages = if self.residency.exceeds(0) && self.servers.is_none() {
            self.residency.refused()
        } else {
            Vec::new()
        };
        pages.sort_unstable();
        pages
    }

    /// Reads the page, whose content is here. Pages are mostly read in order, so the lines of the next one
    /// are prefetched meanwhile: the processor's own prefetcher stops at the end of an OS page.
    fn read_alias(&self, page: PageIndex, into: &mut [u8]) {
        let (from, bytes) = self.alias_of(page);
        assert_eq!(into.len(), bytes);
        let end = from.addr() + bytes;
        let in_order = self.read.replace(end) == from.addr();
        let asked_for = if in_order { bytes } else { bytes.saturating_sub(OS_PAGE_BYTES) };
        let words = from.cast::<u64>();
        for (line, into) in into.chunks_mut(LINE_BYTES).enumerate() {
            let at = line * LINE_BYTES;
            if at < asked_for {
                prefetch(from.wrapping_add(at + OS_PAGE_BYTES));
            }
            for (index, word) in into.chunks_exact_mut(8).enumerate() {
                // SAFETY: inside of the page, which lies in the alias, is aligned, and stays mapped; other
                // threads may write it, so the read is volatile and no reference is made.
                let value = unsafe { words.add(at / 8 + index).read_volatile() };
                word.copy_from_slice(&value.to_ne_bytes());
            }
        }
    }

    /// Sets or lifts the write protection of mapped pages.
    fn set_writable(&self, start: usize, bytes: usize, to: Protection) -> Reply {
        if to == Protection::Read {
            self.uffd.write_protect(start, bytes, true)
        } else {
            self.uffd.allow_writes_silently(start, bytes)
        }
    }

    /// Maps pages whose content is in the object.
    fn map(&self, start: usize, bytes: usize, to: Protection) {
        let mut done = 0;
        while done < bytes {
            match self.uffd.continue_silently(start + done, bytes - done, to == Protection::Read) {
                Reply::Done => return,
                Reply::Partial(some) => done += some,
                // Mapped already, perhaps with another protection.
                Reply::AlreadyMapped => {
                    let reply = self.set_writable(start + done, OS_PAGE_BYTES, to);
                    assert!(
                        reply == Reply::Done,
                        "changing the protection of a shared page failed: {reply:?}"
                    );
                    done += OS_PAGE_BYTES;
                }
                // Another thread changes mappings of this process.
                Reply::MapChanging => {}
                // The kernel has swapped the page out of the object's memory.
                Reply::Busy => {
                    populate(self.rank, self.alias.start() + (start - self.view.start()) + done, bytes - done)
                }
                Reply::Exiting => return,
                other => panic!("mapping a shared page failed: {other:?}"),
            }
        }
    }
}

/// Threads that wait for pages that are here now; dropping it wakes them. The rank's lock is free by then: on
/// one CPU they run at once, instead of this thread, and need the lock next.
pub struct Wakes {
    uffd: Arc<Uffd>,
    ranges: Vec<(usize, usize)>,
}

impl Drop for Wakes {
    fn drop(&mut self) {
        self.ranges.iter().for_each(|&(start, bytes)| self.uffd.wake(start, bytes));
    }
}

/// Stops another thread, even if this one panics.
struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A page's length.
fn small(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("a page is small")
}

/// Makes pages of the object present. `start` is in the alias.
fn populate(rank: Rank, start: usize, bytes: usize) {
    // SAFETY: changes no content.
    let done = unsafe { advise(start, bytes, Advice::PopulateWrite) };
    if let Err(errno) = done {
        failure::die(rank, &format!("no memory for {bytes} bytes of shared pages (errno {errno})"));
    }
}

/// Removes pages from the view, even if the program has locked them. Their content stays in the object.
fn drop_pages(start: usize, bytes: usize) {
    // SAFETY: pages of a shared mapping stay in their object.
    let done = unsafe { advise(start, bytes, Advice::DontNeedLocked) };
    assert!(done.is_ok(), "taking shared pages away failed (errno {})", done.expect_err("checked"));
}

impl Mem for SharedMemory {
    fn protect(&mut self, runs: &[Extent], to: Protection) {
        for run in runs {
            let mut page = run.first;
            while page < run.end() {
                let region = self.region(page);
                let at = index(page, region.config.pages.first);
                let most = index(run.end().min(region.config.pages.end()), region.config.pages.first);
                let from = region.state[at];
                let end = (at..most).find(|&next| region.state[next] != from).unwrap_or(most);
                if from != to {
                    let (first, offset, page_bytes) =
                        (region.config.pages.first, region.offset_of(page), region.page_bytes());
                    self.change(page, offset, page_bytes, end - at, from, to);
                    self.regions.get_mut(&first).expect("it is there").state[at..end].fill(to);
                }
                page = page.offset((end - at) as u64);
            }
        }
    }

    fn reassert(&mut self, page: PageIndex) {
        let region = self.region(page);
        let to = region.state[index(page, region.config.pages.first)];
        if to != Protection::None {
            self.bring(page);
            self.map_page(page, to);
        }
    }

    fn is_near(&self, page: PageIndex) -> bool {
        self.residency.place(page) != Place::Away
    }

    fn snapshot(&mut self, page: PageIndex, into: &mut [u8]) {
        match self.residency.place(page) {
            // Reading it would make it present.
            Place::Nowhere => into.fill(0),
            Place::Here | Place::Away => {
                self.bring(page);
                self.read_alias(page, into);
            }
        }
    }

    fn word(&mut self, page: PageIndex, page_bytes: usize, at: usize, width: usize) -> u64 {
        if self.residency.place(page) == Place::Nowhere {
            return 0;
        }
        self.bring(page);
        let (from, bytes) = self.alias_of(page);
        assert!(bytes == page_bytes && at + width <= bytes);
        // SAFETY: inside of the page, as in `read_alias`: the eight aligned bytes around the word.
        let around = unsafe { from.cast::<u64>().add(at / 8).read_volatile() };
        around >> (at % 8 * 8) & (u64::MAX >> (64 - 8 * width))
    }

    fn store(&mut self, page: PageIndex, diff: &Diff) {
        self.bring(page);
        self.residency.changed(page);
        let (to, bytes) = self.alias_of(page);
        assert!(diff.end() as usize <= bytes);
        for (offset, bytes) in diff.iter() {
            // SAFETY: inside of the page.
            let mut to = unsafe { to.add(offset) };
            let mut rest = bytes;
            while let Some((&byte, behind)) = rest.split_first() {
                if to.addr().is_multiple_of(8)
                    && let Some((word, behind)) = rest.split_first_chunk::<8>()
                {
                    // SAFETY: eight bytes of the diff, aligned, inside of the page; volatile as in
                    // `snapshot`.
                    unsafe { to.cast::<u64>().write_volatile(u64::from_ne_bytes(*word)) };
                    rest = behind;
                    // SAFETY: at most one behind the page.
                    to = unsafe { to.add(8) };
                } else {
                    // SAFETY: one byte of the diff.
                    unsafe { to.write_volatile(byte) };
                    rest = behind;
                    // SAFETY: at most one behind the page.
                    to = unsafe { to.add(1) };
                }
            }
        }
    }

    fn install(&mut self, page: PageIndex, bytes: &[u8], to: Protection) {
        let (into, len) = self.alias_of(page);
        assert_eq!(bytes.len(), len);
        self.hold(page);
        self.residency.changed(page);
        // SAFETY: the page lies in the alias; the view does not map it, so no other thread reads or writes it
        // now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, len) };
        let region = self.region(page);
        let (first, at) = (region.config.pages.first, index(page, region.config.pages.first));
        assert!(region.state[at] == Protection::None, "{page} is installed over a mapping");
        if to != Protection::None {
            let start = self.view.start() + region.offset_of(page);
            self.map(start, len, to);
            self.regions.get_mut(&first).expect("it is there").state[at] = to;
        }
    }

    fn install_all(&mut self, pages: &[(PageIndex, &[u8])], to: Protection) {
        if self.residency.budget().is_some() {
            for &(page, bytes) in pages {
                self.install(page, bytes, to);
            }
            return;
        }
        for (at, &(page, bytes)) in pages.iter().enumerate() {
            if let Some(&(next, _)) = pages.get(at + 1) {
                self.expect(next);
            }
            self.install(page, bytes, Protection::None);
        }
        for run in rampool_sharing::extents(pages.iter().map(|&(page, _)| page)) {
            let (mut page, mut left) = (run.first, run.count as usize);
            while left > 0 {
                let region = self.region(page);
                let (first, at) = (region.config.pages.first, index(page, region.config.pages.first));
                let count = left.min(region.state.len() - at);
                let (start, bytes) =
                    (self.view.start() + region.offset_of(page), count * region.page_bytes());
                self.map(start, bytes, to);
                self.regions.get_mut(&first).expect("it is there").state[at..at + count].fill(to);
                (page, left) = (page.offset(count as u64), left - count);
            }
        }
    }

    fn discard(&mut self, page: PageIndex) {
        if self.residency.budget().is_none() {
            // The bytes stay until the page comes again: giving back single pages costs more than a fault.
            return;
        }
        if self.forget(page) {
            let region = self.region(page);
            self.give_back(region.offset_of(page), region.page_bytes());
        }
    }

    fn lend(&mut self, lock: LockId) -> bool {
        self.name_of(lock).is_some_and(|name| self.lent.lend(name))
    }

    fn lent_times(&self, lock: LockId) -> u32 {
        self.name_of(lock).map_or(0, |name| self.lent.times(name))
    }

    fn recall(&mut self, lock: LockId) -> Recalled {
        let name = self.name_of(lock).expect("it was lent");
        let recalled = self.lent.recall(name);
        self.recalled.extend(recalled.holder.map(|thread| (lock, thread)));
        recalled
    }

    fn begin_release(&mut self) {
        self.lent.begin_release();
    }

    fn clear(&mut self, pages: Extent) {
        let region = self.region(pages.first);
        let count = index(pages.end().min(region.config.pages.end()), pages.first);
        let (offset, page_bytes) = (region.offset_of(pages.first), region.page_bytes());
        for page in self.residency.within(pages) {
            self.forget(page);
        }
        self.give_back(offset, count * page_bytes);
    }
}
