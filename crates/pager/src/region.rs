//! The paged view for programs that ask for it: regions larger than local memory.
//!
//! A [`PagedMemory`] is a budget of local memory, a backing, and one pager thread. A [`Region`] is ordinary
//! memory at a fixed address: any thread may read and write it. How its faults are caught
//! ([`FaultModeChoice`]) decides what else is possible:
//!
//! | | full | user mode | SIGSEGV |
//! |---|---|---|---|
//! | system calls given pointers into absent pages | work | EFAULT, or helped | EFAULT, or helped |
//! | a forked child | keeps the content while this process lives (with CAP_SYS_PTRACE), else has no region
//! there | has no region there | has no region there |
//! | `madvise`, `munmap`, `mremap` of parts of a region | followed | followed | not allowed: use
//! [`Region::advise`] |
//! | threads that block SIGSEGV, or replace its handler | | | not allowed, or helped |
//!
//! *Helped* where `librampool_agent_io.so` is loaded (`LD_PRELOAD`), which stands before the C library's
//! functions: [`PagedMemory::serves_system_calls`] says whether it is, and `docs/internals/faults.md` which
//! calls it covers.
//!
//! [`FaultModeChoice::InThread`] is as user mode, but each thread serves its own faults, in a SIGBUS handler:
//! a fault wakes no other thread, and takes about a quarter less time. On request only, because it asks more
//! of the program:
//!
//! * no thread that touches a region blocks SIGBUS; handlers of SIGBUS are set before the first
//!   [`PagedMemory`] (they still get what is not ours). Where `librampool_agent_io.so` is loaded it sees to
//!   both, for threads and handlers that come after the first such [`PagedMemory`];
//! * handlers of other signals do not touch regions, and wait while a fault is served;
//! * the memory of the program's allocator, and the stacks of its threads, do not lie in regions; a thread
//!   has some 64 KiB of stack to spare where it touches one;
//! * a region, or a part of it, that `mremap` makes larger is not served beyond its old end;
//! * pages leave in the thread that meets a fault, in batches, while its own page is on the way. At most
//!   [`SERVERS`](rampool_kernel::sigbus::SERVERS) such pagers in one process.
//!
//! When servers are lost, what is in local memory stays usable and an access to a lost page raises SIGBUS;
//! [`PagedMemory::lost`] says why. Kernels before 6.6 cannot do that in the userfaultfd modes: the process is
//! ended with the reason on standard error.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rampool_kernel::memory::{Advice, Mapping, advise, dont_fork};
use rampool_kernel::probe::FaultMode;
use rampool_kernel::uffd::Uffd;
use rampool_paging::cache::CacheConfig;
use rampool_wire::units::{ByteLen, OS_PAGE_BYTES};

use crate::backing::Backing;
use crate::fault::{CatchConfig, CatchError, FaultCatcher, FaultModeChoice};
use crate::fork::ForkFaultServer;
use crate::pager::{Pager, PagerError, Supervisor, Waiting};
use crate::system_calls::{self, Unhelped};
use rampool_client::stats::{PagerStats, StatsSnapshot};
use rampool_kernel::words::{last_words, remark};

mod hand_over;
mod in_thread;

pub use hand_over::{HandOverError, HandedOver};
use in_thread::InThread;

/// How much local memory, in which pieces.
#[derive(Clone, Debug)]
pub struct PagedConfig {
    /// Local memory for all regions together, in bytes. At least 256 KiB.
    pub local_bytes: u64,
    /// Bytes brought by one fault: a power of two, 4 KiB to 2 MiB.
    pub page_bytes: u32,
    /// The most that is read ahead of a stream, in bytes; 0 turns prefetch off.
    pub prefetch_bytes: u32,
    /// What all regions together may be, in bytes; `None`: limited by the address space only.
    pub capacity_bytes: Option<u64>,
    pub waiting: Waiting,
    /// How faults are caught.
    pub fault_mode: FaultModeChoice,
    /// Evict by copying even where the kernel can move pages: for tests and comparisons.
    pub evict_by_copy: bool,
}

impl Default for PagedConfig {
    fn default() -> Self {
        Self {
            local_bytes: 1 << 30,
            page_bytes: 4096,
            prefetch_bytes: 2 << 20,
            capacity_bytes: None,
            waiting: Waiting::default(),
            fault_mode: FaultModeChoice::Auto,
            evict_by_copy: false,
        }
    }
}

/// Why paged memory could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PagedError {
    #[error("the page size {0} is not a power of two between 4 KiB and 2 MiB")]
    PageSize(u32),
    #[error("{0} bytes of local memory are too few: at least 256 KiB")]
    TooLittleLocal(u64),
    #[error("cannot catch page faults: {0}; `rampool doctor` says what to change")]
    Faults(#[from] CatchError),
    #[error(transparent)]
    Pager(#[from] PagerError),
    #[error("cannot read this process's page map: {0}")]
    Proc(#[from] std::io::Error),
    #[error(transparent)]
    Thread(#[from] rampool_kernel::thread::SpawnError),
    #[error("cannot create the pager's doorbell: {0}")]
    Doorbell(std::io::Error),
}

/// Why a region could not be allocated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    #[error("a region must have at least 1 byte")]
    Empty,
    #[error("cannot allocate {wanted}: {left} of the lease is free")]
    NoRoom { wanted: ByteLen, left: ByteLen },
    #[error(transparent)]
    Memory(#[from] rampool_kernel::memory::MapError),
    #[error("the kernel refuses to watch the region (errno {0})")]
    Register(i32),
    #[error("the pager has ended: {0}")]
    PagerEnded(String),
    #[error("memory servers were lost: {0}")]
    Lost(String),
}

impl PagedConfig {
    /// The cache's settings that follow from these.
    ///
    /// # Errors
    /// When a setting is out of range.
    pub fn cache_config(&self) -> Result<CacheConfig, PagedError> {
        if !self.page_bytes.is_power_of_two() || !(4096..=2 << 20).contains(&self.page_bytes) {
            return Err(PagedError::PageSize(self.page_bytes));
        }
        if self.local_bytes < 256 << 10 {
            return Err(PagedError::TooLittleLocal(self.local_bytes));
        }
        let pages = |bytes: u32| bytes / 4096;
        let budget_pages = self.local_bytes / 4096;
        // At most an eighth of the budget is on its way out, and no more than 16 MiB; as much may be on its
        // way in.
        let in_flight = u32::try_from((budget_pages / 8).clamp(16, 4096)).expect("clamped");
        let batch_pages = (in_flight / 4).clamp(4, 512);
        // Many small fetches rather than a few large ones: several streams have two each, and faults find one
        // that is free.
        let fetch_pages = (in_flight / 16).clamp(4, 64).max(pages(self.page_bytes).min(in_flight / 2));
        Ok(CacheConfig {
            budget_pages,
            unit_pages: pages(self.page_bytes),
            batch_pages,
            max_batches: (in_flight / batch_pages).max(2),
            max_prefetch_pages: pages(self.prefetch_bytes).min(in_flight / 2),
            fetch_pages,
            max_fetches: (in_flight / fetch_pages).max(4),
            tells_unchanged: true,
        })
    }
}

/// A pager that is told to stop ends what it has under way with the servers first; each of these operations
/// has a deadline of its own.
const STOP_DEADLINE: Duration = Duration::from_secs(60);

enum Command {
    Adopt { start: usize, bytes: usize, reply: Arc<Reply> },
    Discard { start: usize, bytes: usize, reply: Arc<Reply> },
    Forget { start: usize, bytes: usize, reply: Arc<Reply> },
    HandOver { start: usize, bytes: usize, reply: Arc<Reply<Result<HandedOver, String>>> },
    SetBudget { pages: u64 },
    Stop,
}

struct Reply<T = Result<(), i32>> {
    result: Mutex<Option<T>>,
    ready: Condvar,
}

struct Shared {
    /// Bytes that regions may still take.
    room: Mutex<u64>,
    commands: Mutex<VecDeque<Command>>,
    doorbell: OwnedFd,
    ended: Mutex<Option<String>>,
    ended_ready: Condvar,
    fault_mode: FaultMode,
    serves_system_calls: bool,
    follows_forks: bool,
    follows_mappings: bool,
    /// Why pages are lost.
    lost: Mutex<Option<String>>,
    /// The latest fork that the pager sits out.
    sits_out: AtomicU32,
}

impl Shared {
    fn send(&self, command: Command) {
        self.commands.lock().expect("no panic under this lock").push_back(command);
        self.ring();
    }

    /// Before everything that waits.
    fn send_first(&self, command: Command) {
        self.commands.lock().expect("no panic under this lock").push_front(command);
        self.ring();
    }

    fn ring(&self) {
        let one = 1u64;
        // SAFETY: an eventfd takes eight bytes.
        unsafe { libc::write(self.doorbell.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Sends a command and waits until the pager has carried it out.
    fn call<T>(&self, command: impl FnOnce(Arc<Reply<T>>) -> Command) -> Result<T, String> {
        let reply = Arc::new(Reply { result: Mutex::new(None), ready: Condvar::new() });
        self.send(command(Arc::clone(&reply)));
        let mut result = reply.result.lock().expect("no panic under this lock");
        loop {
            if let Some(result) = result.take() {
                return Ok(result);
            }
            if let Some(reason) = self.ended.lock().expect("no panic under this lock").clone() {
                return Err(reason);
            }
            result = reply
                .ready
                .wait_timeout(result, Duration::from_millis(100))
                .expect("no panic under this lock")
                .0;
        }
    }
}

impl<T> Reply<T> {
    fn give(&self, result: T) {
        *self.result.lock().expect("no panic under this lock") = Some(result);
        self.ready.notify_all();
    }
}

/// Local memory, a backing and the pager between them. The pager ends when this and every region of it is
/// gone.
pub struct PagedMemory {
    pager: Arc<RunningPager>,
    stats: PagerStats,
}

/// A pager's thread. Held by the memory and by each of its regions, because without it what is absent would
/// read as zeroes.
struct RunningPager {
    shared: Arc<Shared>,
}

/// Memory whose pages come and go. Freed when dropped; the pool's copies with it. It may outlive its
/// [`PagedMemory`].
pub struct Region {
    mapping: Mapping,
    share: Share,
}

/// A region's share of the capacity, returned when dropped.
struct Share {
    pager: Arc<RunningPager>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        *self.pager.shared.room.lock().expect("no panic under this lock") += self.bytes;
    }
}

/// What a program can say about a range of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RegionAdvice {
    /// Its content is not needed any more: it reads as zeroes from now on, locally and at the servers.
    Discard,
    /// It is needed now: the call returns once every page has been brought here. More than the local memory
    /// holds does not stay.
    WillNeed,
}

/// Why advice could not be followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdviseError {
    #[error(
        "{bytes} bytes from {offset} on are not a range of whole OS pages inside a region of {region} bytes"
    )]
    Range { offset: usize, bytes: usize, region: usize },
    #[error("the kernel refuses the advice (errno {0})")]
    Kernel(i32),
}

impl PagedMemory {
    /// Starts a pager on a thread of its own, which takes the backing with it.
    ///
    /// # Errors
    /// [`PagedError`] for settings out of range and for what the kernel refuses.
    pub fn start<B>(config: &PagedConfig, backing: B, region: B::Region) -> Result<Self, PagedError>
    where
        B: Backing + Send + 'static,
        B::Region: Send,
    {
        let cache = config.cache_config()?;
        let faults = FaultCatcher::open(CatchConfig {
            fault_mode: config.fault_mode,
            evict_by_copy: config.evict_by_copy,
        })?;
        // SAFETY: a system call without pointers; the descriptor is new.
        let doorbell = unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if fd < 0 {
                return Err(PagedError::Doorbell(std::io::Error::last_os_error()));
            }
            OwnedFd::from_raw_fd(fd)
        };
        let shared = Arc::new(Shared {
            room: Mutex::new(config.capacity_bytes.unwrap_or(u64::MAX)),
            commands: Mutex::default(),
            doorbell,
            ended: Mutex::default(),
            ended_ready: Condvar::new(),
            fault_mode: faults.fault_mode(),
            serves_system_calls: faults.serves_system_calls()
                || system_calls::offer(config.fault_mode == FaultModeChoice::InThread),
            follows_forks: faults.follows_forks(),
            follows_mappings: faults.follows_mappings(),
            lost: Mutex::default(),
            sits_out: AtomicU32::new(0),
        });
        at_fork::watch(&shared);
        let stats = PagerStats::private();
        let mut pager = Pager::new(
            faults,
            rampool_kernel::maps::Pagemap::open()?,
            backing,
            region,
            cache,
            config.waiting,
            stats,
        )?;
        let mut supervisor =
            RegionSupervisor { shared: Arc::clone(&shared), fork_fault_servers: Vec::new(), ended: None };
        let body: Box<dyn FnOnce() + Send> = if config.fault_mode == FaultModeChoice::InThread {
            // Threads may look at it at any time: it stays, emptied, when the pager has ended.
            let pagers: &'static InThread<B> = Box::leak(Box::new(InThread::new(config.waiting.spin)));
            pager.faults().serve_in_thread(pagers);
            pagers.begin(pager, supervisor);
            Box::new(move || {
                let _own = Unhelped::begin();
                let (pager, supervisor) = pagers.run();
                supervisor.end(pager);
            })
        } else {
            Box::new(move || {
                let _own = Unhelped::begin();
                pager.run(&mut supervisor);
                supervisor.end(pager);
            })
        };
        rampool_kernel::thread::spawn_detached(1 << 20, body)?;
        Ok(Self { pager: Arc::new(RunningPager { shared }), stats })
    }

    /// Memory of `bytes` bytes (rounded up to whole OS pages), all zero. Blocks until the pager has it.
    ///
    /// # Errors
    /// [`AllocError`].
    ///
    /// # Panics
    /// Never in practice: only if a thread panicked while it held the pager's queue.
    pub fn alloc(&self, bytes: usize) -> Result<Region, AllocError> {
        if bytes == 0 {
            return Err(AllocError::Empty);
        }
        if let Some(reason) = self.lost() {
            return Err(AllocError::Lost(reason));
        }
        let share = self.take_share(bytes)?;
        let mut mapping = Mapping::huge_aligned(bytes)?;
        mapping.shorten(bytes);
        let shared = &self.pager.shared;
        if !shared.follows_forks {
            dont_fork(&mapping);
        }
        let (start, bytes) = (mapping.start(), mapping.bytes());
        shared
            .call(|reply| Command::Adopt { start, bytes, reply })
            .map_err(AllocError::PagerEnded)?
            .map_err(AllocError::Register)?;
        Ok(Region { mapping, share })
    }

    fn take_share(&self, bytes: usize) -> Result<Share, AllocError> {
        let bytes = (bytes as u64).div_ceil(OS_PAGE_BYTES as u64).saturating_mul(OS_PAGE_BYTES as u64);
        let mut room = self.pager.shared.room.lock().expect("no panic under this lock");
        *room = room
            .checked_sub(bytes)
            .ok_or(AllocError::NoRoom { wanted: ByteLen(bytes), left: ByteLen(*room) })?;
        Ok(Share { pager: Arc::clone(&self.pager), bytes })
    }

    /// Changes how much local memory the regions may use.
    pub fn set_local_bytes(&self, bytes: u64) {
        self.pager.shared.send(Command::SetBudget { pages: bytes / 4096 });
    }

    /// The fault mode in use.
    #[must_use]
    pub fn fault_mode(&self) -> FaultMode {
        self.pager.shared.fault_mode
    }

    /// System calls may be given absent pages: in full mode, and below it where `librampool_agent_io.so` was
    /// loaded before this memory was started and no `rampool run` manages the program's other memory there.
    /// Otherwise they fail with EFAULT.
    #[must_use]
    pub fn serves_system_calls(&self) -> bool {
        self.pager.shared.serves_system_calls
    }

    /// Why pages are lost, if any are: an access to one of them raises SIGBUS.
    ///
    /// # Panics
    /// Never in practice: only if a thread panicked while it held this lock.
    #[must_use]
    pub fn lost(&self) -> Option<String> {
        self.pager.shared.lost.lock().expect("no panic under this lock").clone()
    }

    /// Counters, now.
    #[must_use]
    pub fn stats(&self) -> StatsSnapshot {
        self.stats.page().snapshot()
    }
}

impl Drop for RunningPager {
    /// Ends the pager, and waits until it has left the servers: usually for what is under way with them, at
    /// most a minute.
    fn drop(&mut self) {
        self.shared.send(Command::Stop);
        let mut ended = self.shared.ended.lock().expect("no panic under this lock");
        while ended.is_none() {
            let (guard, timeout) =
                self.shared.ended_ready.wait_timeout(ended, STOP_DEADLINE).expect("no panic under this lock");
            ended = guard;
            if timeout.timed_out() {
                return;
            }
        }
    }
}

impl Region {
    /// The first byte, aligned to 2 MiB. Any thread may read and write `len()` bytes from here while the
    /// region lives.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.at(0)
    }

    /// Bytes of the region: what was asked for, rounded up to whole OS pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mapping.bytes()
    }
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Makes a copy of the region at its memory servers, which other processes read directly: what is in
    /// local memory is stored there, and stays here. The copy is the region as of now: later writes of this
    /// process do not show in it. Threads that write during the call are not stopped: each aligned 4096 bytes
    /// of the copy are as they were at some moment of the call.
    ///
    /// The copy lives until it is freed ([`rampool_client::direct::Direct::free`]) or the lease's last member
    /// leaves, and takes room of the lease for every page that is in local memory or changed later. Blocks;
    /// faults of this memory wait meanwhile.
    ///
    /// # Errors
    /// [`HandOverError`], such as a lease without room.
    pub fn hand_over(&self) -> Result<HandedOver, HandOverError> {
        let (start, bytes) = (self.mapping.start(), self.len());
        let shared = &self.share.pager.shared;
        let handed = shared.call(|reply| Command::HandOver { start, bytes, reply });
        handed.map_err(HandOverError::PagerEnded)?.map_err(HandOverError::NotCopied)
    }

    /// Says something about `bytes` bytes from `offset` on, both multiples of 4096. May be called from any
    /// thread; what other threads have in a discarded range is lost.
    ///
    /// # Errors
    /// [`AdviseError`].
    pub fn advise(&self, offset: usize, bytes: usize, advice: RegionAdvice) -> Result<(), AdviseError> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.len());
        if !inside || !offset.is_multiple_of(OS_PAGE_BYTES) || !bytes.is_multiple_of(OS_PAGE_BYTES) {
            return Err(AdviseError::Range { offset, bytes, region: self.len() });
        }
        if bytes == 0 {
            return Ok(());
        }
        let shared = &self.share.pager.shared;
        let start = self.mapping.start() + offset;
        let advice = match advice {
            RegionAdvice::Discard if !shared.follows_mappings => {
                // A pager that has ended holds nothing to discard.
                return shared
                    .call(|reply| Command::Discard { start, bytes, reply })
                    .unwrap_or(Ok(()))
                    .map_err(AdviseError::Kernel);
            }
            RegionAdvice::WillNeed if shared.fault_mode != FaultMode::Full => {
                for page in (offset..offset + bytes).step_by(OS_PAGE_BYTES) {
                    // SAFETY: inside the region; the fault brings the page.
                    unsafe { self.mapping.at(page).read_volatile() };
                }
                return Ok(());
            }
            RegionAdvice::Discard => Advice::DontNeed,
            RegionAdvice::WillNeed => Advice::PopulateRead,
        };
        // SAFETY: the range is inside this region's own mapping, and its owner gives up its content where
        // that is the advice.
        unsafe { advise(start, bytes, advice) }.map_err(AdviseError::Kernel)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let shared = &self.share.pager.shared;
        if !shared.follows_mappings {
            let (start, bytes) = (self.mapping.start(), self.mapping.bytes());
            // A pager that has ended manages nothing.
            let _ = shared.call(|reply| Command::Forget { start, bytes, reply });
        }
    }
}

/// Runs a library user's pager.
struct RegionSupervisor<R> {
    shared: Arc<Shared>,
    fork_fault_servers: Vec<ForkFaultServer<R>>,
    ended: Option<String>,
}

impl<R: Copy> RegionSupervisor<R> {
    /// The pager was told to stop, and has. Children that it served have what they got until now: the rest is
    /// a SIGBUS, never zeroes.
    fn end<B: Backing<Region = R>>(mut self, mut pager: Pager<B>) {
        self.fork_fault_servers.iter_mut().for_each(ForkFaultServer::give_up);
        pager.backing.close();
        drop(pager);
        let shared = self.shared;
        *shared.ended.lock().expect("no panic under this lock") = Some(self.ended.unwrap_or_default());
        shared.ended_ready.notify_all();
    }
}

impl<B: Backing> Supervisor<B> for RegionSupervisor<B::Region> {
    fn tick(&mut self, pager: &mut Pager<B>) -> Duration {
        pager.publish();
        pager.retry_refused();
        pager.backing.tend();
        Duration::from_millis(50)
    }

    fn forked(&mut self, pager: &mut Pager<B>, child: Uffd) {
        match pager.fork_child(child) {
            Ok(fork_fault_server) => self.fork_fault_servers.push(fork_fault_server),
            Err(reason) if pager.faults().can_poison() => {
                remark(&format!("rampool: a forked child has only what was in local memory: {reason}"))
            }
            Err(reason) => {
                last_words(&format!("rampool: a forked child cannot be served: {reason}"));
                std::process::abort();
            }
        }
    }

    fn lost(&mut self, pager: &mut Pager<B>, reason: String) {
        let mut lost = self.shared.lost.lock().expect("no panic under this lock");
        if lost.is_some() {
            return;
        }
        if pager.go_on_without_servers().is_none() {
            last_words(&format!("rampool: {reason}"));
            std::process::abort();
        }
        *lost = Some(reason);
    }

    fn fork_pending(&mut self) -> bool {
        at_fork::pending(&self.shared)
    }

    fn poll_fds(&self, out: &mut Vec<libc::pollfd>) {
        out.push(libc::pollfd { fd: self.shared.doorbell.as_raw_fd(), events: libc::POLLIN, revents: 0 });
        out.extend(self.fork_fault_servers.iter().map(|f| libc::pollfd {
            fd: f.raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }));
    }

    fn wake_up(&mut self, pager: &mut Pager<B>) -> bool {
        let mut rings = 0u64;
        // SAFETY: an eventfd gives eight bytes.
        unsafe { libc::read(self.shared.doorbell.as_raw_fd(), (&raw mut rings).cast(), 8) };
        let mut more = Vec::new();
        for fork_fault_server in &mut self.fork_fault_servers {
            match pager.serve_forked(fork_fault_server, &mut |_| {}) {
                Ok(children) => more.extend(children),
                Err(reason) => {
                    last_words(&format!("rampool: a forked child cannot be served: {reason}"));
                    std::process::abort();
                }
            }
        }
        self.fork_fault_servers.append(&mut more);
        loop {
            let command = self.shared.commands.lock().expect("no panic under this lock").pop_front();
            match command {
                None => return true,
                Some(Command::Adopt { start, bytes, reply }) => match pager.adopt(start, bytes) {
                    Err(libc::EAGAIN) => {
                        // Once more after the events have been read.
                        self.shared.send_first(Command::Adopt { start, bytes, reply });
                        return true;
                    }
                    done => reply.give(done),
                },
                Some(Command::Discard { start, bytes, reply }) => {
                    // SAFETY: the memory is the region's, whose owner gives its content up.
                    unsafe { pager.discard(start, start + bytes) };
                    reply.give(Ok(()));
                }
                Some(Command::Forget { start, bytes, reply }) => {
                    // SAFETY: the memory is the region's, which unmaps it before anything else touches it.
                    unsafe { pager.forget(start, start + bytes) };
                    reply.give(Ok(()));
                }
                Some(Command::HandOver { start, bytes, reply }) => {
                    let copied = pager.hand_over(start, bytes, self);
                    reply.give(copied.and_then(|(region, offset)| {
                        let bytes = bytes as u64;
                        let opened = pager.backing.open_for_all(region, offset + bytes);
                        opened.map(|(lease, region)| HandedOver { lease, region, offset, bytes })
                    }));
                }
                Some(Command::SetBudget { pages }) => pager.set_budget(pages),
                Some(Command::Stop) => return false,
            }
        }
    }
}

/// Forks, seen from the pagers of this process.
///
/// `fork(3)` holds the allocator's lock until every pager has read the kernel's event about the fork. A pager
/// that waited for that lock would never read it. So before a fork every pager is asked to sit it out,
/// touching nothing but its events, and the fork waits until all do.
mod at_fork {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Mutex, Once, Weak};
    use std::time::{Duration, Instant};

    use super::Shared;

    const DEADLINE: Duration = Duration::from_secs(10);
    static PAGERS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
    static HANDLERS: Once = Once::new();
    /// Forks under way, and forks so far.
    static UNDER_WAY: AtomicU32 = AtomicU32::new(0);
    static COUNT: AtomicU32 = AtomicU32::new(0);

    pub(super) fn watch(shared: &Arc<Shared>) {
        HANDLERS.call_once(|| {
            // SAFETY: the functions have the signature that pthread_atfork wants and live as long as the
            // program.
            let done =
                unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
            assert!(done == 0, "no memory for the fork handlers");
        });
        let mut pagers = PAGERS.lock().expect("no panic under this lock");
        pagers.retain(|pager| pager.strong_count() > 0);
        pagers.push(Arc::downgrade(shared));
    }

    /// Asked by the pager again and again: whether to sit out.
    pub(super) fn pending(shared: &Shared) -> bool {
        let count = COUNT.load(Ordering::SeqCst);
        if UNDER_WAY.load(Ordering::SeqCst) == 0 {
            return false;
        }
        shared.sits_out.store(count, Ordering::SeqCst);
        true
    }

    fn alive() -> Vec<Arc<Shared>> {
        PAGERS.lock().expect("no panic under this lock").iter().filter_map(Weak::upgrade).collect()
    }

    extern "C" fn before() {
        UNDER_WAY.fetch_add(1, Ordering::SeqCst);
        let this = COUNT.fetch_add(1, Ordering::SeqCst) + 1;
        let since = Instant::now();
        for shared in alive() {
            shared.ring();
            while shared.sits_out.load(Ordering::SeqCst) < this
                && shared.ended.lock().expect("no panic under this lock").is_none()
                && since.elapsed() < DEADLINE
            {
                // SAFETY: gives the CPU up; no preconditions.
                unsafe { libc::sched_yield() };
            }
        }
    }

    extern "C" fn after_in_parent() {
        UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
    }

    extern "C" fn after_in_child() {
        UNDER_WAY.store(0, Ordering::SeqCst);
        rampool_kernel::sigbus::forget_after_fork();
        super::system_calls::forget_after_fork();
        // The pagers did not come along. A lock that another thread held in the parent stays locked here for
        // ever: it is passed over.
        let Ok(pagers) = PAGERS.try_lock() else { return };
        for shared in pagers.iter().filter_map(Weak::upgrade) {
            if let Ok(mut ended) = shared.ended.try_lock() {
                *ended = Some("this process was forked; its memory is served by its parent".to_owned());
            }
        }
    }
}

const _: () = assert!(OS_PAGE_BYTES == 4096, "sizes above are in pages of 4096 bytes");
