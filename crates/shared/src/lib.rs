//! The shared view: processes on one or many machines map one address range and use it as memory.
//!
//! Each *region* of the range is kept consistent by a protocol that is chosen when it is allocated
//! (`docs/guide/parallel.md` says which for what). The protocols are state machines in [`rampool_sharing`];
//! this module is their host: it maps memory, catches faults, carries messages, and blocks waiting threads.
//!
//! ```text
//!   program's threads                  one lock                one service thread a rank
//!   load, store ----- page fault ----------------------> userfaultfd ---+
//!   lock, barrier --> Host::begin --> Engine --> Mem: SharedMemory      v
//!        sleep <----- Slot <--------- Action::Done      Engine <-- Host::serve <--- connections, timers
//!
//!   shared.rs     the API                             memory    one object, mapped for program and runtime
//!   config        how to join, how to allocate        host      the engine and its state, behind one lock
//!   environment   the rank, from the launcher         service   the service thread
//!   mesh          how ranks meet                      line      one connection: TCP or shared memory
//!   watch         which thread a message wakes        relink    replacements of cut connections
//!   servers       pages beyond the budget             datagrams UDP instead of lines
//!   error, stats  errors, counts                      failure   ends the process when its run ends
//!   account       times, and the trace                outside   processes outside the run
//!   lent          locks taken without the one lock    habit     what mostly pays is done
//!   direct        bytes of regions without their pages
//! ```
//!
//! # What a program does
//!
//! ```no_run
//! use rampool::shared::{AllocOptions, Shared};
//!
//! // Started by `rampool launch -n 4 ./program`, or mpirun, srun, torchrun.
//! let shared = Shared::join_from_env()?;
//! // All ranks together; at the same address everywhere.
//! let table = shared.alloc(1 << 20, AllocOptions::new())?;
//! let counter = table.at::<u64>(0);
//! shared.lock(7)?;
//! // SAFETY: the lock orders every access to the counter.
//! unsafe { *counter += 1 };
//! shared.unlock(7)?;
//! shared.barrier(0)?;
//! shared.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rules
//!
//! * Accesses by different threads, at least one of them writing, must be ordered by a lock, a barrier, a
//!   condition variable, a semaphore or an atomic operation of this module, unless the region's protocol is
//!   `sc`. Bytes are the unit.
//! * Memory of regions is memory that other processes write: use raw pointers, or references only while
//!   nothing else can write what they cover.
//! * Every thread that runs takes part in each barrier; [`Shared::set_threads`] says how many there are.
//! * A thread releases its locks before it ends, and all threads do before the rank finishes; else the run
//!   ends.
//! * A forked child does not have the shared range and is not a rank: its calls fail or do nothing. `exec`
//!   ends a rank like `exit` does.
//! * System calls on shared memory work if userfaultfd serves the kernel too ([`Shared::reach`]); else they
//!   fail with EFAULT on absent pages, and the program touches each page before.
//! * Every call blocks at most as long as [`SharedConfig::deadline`] says. A mistake that makes data wrong or
//!   keeps others waiting for ever ends the run on every rank, with one reason ([`OnFailure`]).

mod account;
mod additions;
mod config;
mod datagrams;
mod direct;
pub mod environment;
mod error;
mod failure;
mod habit;
mod host;
mod lent;
mod line;
mod memory;
mod mesh;
mod outside;
mod relink;
mod servers;
mod service;
mod stats;
mod watch;

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub use account::{TimeReport, cpu_of_this_thread};
pub use config::{
    AllocOptions, Binding, ConfigError, EXIT_FAILED, EXIT_FOLLOWED, LEAST_LOCAL_BYTES, OnFailure,
    SHARED_PAGE_SIZES, SharedConfig, Transport, shared_page_bytes,
};
pub use direct::{SharedDirect, SharedDirectError};
pub use error::{JoinError, SharedError};
pub use failure::before_following;
pub use line::LineError;
pub use memory::{MemoryError, Reach};
pub use outside::{
    Outside, OutsideConfig, OutsideError, OutsideListenError, OutsideTicket, OutsideTicketError,
};
pub use rampool_sharing::{
    AtomicOp, Homes, LockPath, Managers, OpError, ProtocolKind, Rank, Reason, Stats, Tuning,
};
pub use servers::ServersError;
pub use stats::{Kind, SharedStats};

use account::Account;
use datagrams::Datagrams;
use host::{Host, Outcome, Slot, Waiting};
use lent::{Lent, Name};
use memory::{SharedMemory, Wakes};
use mesh::Mesh;
use rampool_kernel::birthplace::Birthplace;
use rampool_kernel::thread::SignalsHeld;
use rampool_kernel::thread_end::ThreadEnd;
use rampool_net::adaptive_spin::AdaptiveSpin;
use rampool_net::transport::Glance;
use rampool_sharing::control::{Answer, Demand};
use rampool_sharing::{
    BarrierId, BarrierKind, CondId, Config, LockId, LockMode, OpResult, RegionConfig, SyncOp, ThreadId,
};
use servers::Servers;
use watch::{Ready, Watch};

/// The number of semaphores: `0 .. SEMAPHORES`.
pub const SEMAPHORES: u32 = 1 << 16;
/// Waiting threads poll the connections themselves with up to this many ranks.
const MOST_LOOKED_AT: u16 = 8;
/// A polling thread yields its CPU once in this many polls; each time where ranks share CPUs.
const LOOKS_A_YIELD: u32 = 8;
/// A yield that takes this long shows that a computing thread shares the CPU, and takes a whole slice each
/// time: milliseconds. From then on that thread gets short slices, unless it belongs to another rank, which
/// pollers would then interrupt.
const LONG_YIELD: Duration = Duration::from_micros(500);
/// For so long a waiting thread rings no doorbell: a peer whose threads call often answers without.
const PATIENCE: Duration = Duration::from_micros(8);
/// How often a waiting thread calls what it was given by [`look_while_waiting`].
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The runtime's own locks begin here.
const OWN_LOCKS: u64 = 1 << 62;

/// This process as one rank of a run. Clones are the same rank.
///
/// Any thread may use it. Invariant: a thread has one operation at a time, since each call returns when it is
/// over.
#[derive(Clone)]
pub struct Shared {
    inner: Arc<Inner>,
}

struct Inner {
    /// The rank's process: a forked child must not touch shared resources, and may find the lock held for
    /// ever.
    process: Birthplace,
    config: SharedConfig,
    host: Mutex<Host>,
    watch: Arc<Watch>,
    lent: Arc<Lent>,
    glances: Vec<Glance>,
    threads: AtomicU16,
    finished: AtomicBool,
    semaphores: Region,
    /// Regions that processes outside the run may use.
    published: outside::Published,
    answering: outside::Answering,
    /// Tells this rank from earlier ranks of the same process.
    instance: u64,
    reach: Reach,
    /// How the program's threads wait where there are more ranks than CPUs.
    crowd: Option<Mutex<AdaptiveSpin>>,
    /// A trace is written.
    traced: bool,
}

impl Inner {
    /// How long the next wait polls before it sleeps.
    fn spin(&self) -> Duration {
        let crowd = self.crowd.as_ref().map(|crowd| crowd.lock().unwrap_or_else(PoisonError::into_inner));
        crowd.map_or(self.config.spin, |crowd| crowd.time())
    }

    /// A thread of the program has waited.
    fn waited(&self, time: Duration) {
        if let Some(crowd) = &self.crowd {
            crowd.lock().unwrap_or_else(PoisonError::into_inner).waited(time);
        }
    }

    /// Whether something has come through shared memory. Needs no lock.
    fn has_something(&self) -> bool {
        self.glances.iter().any(Glance::has_come)
    }

    /// The first step of the program's calls.
    fn enter(&self) -> Result<Driver<'_>, SharedError> {
        let signals = SignalsHeld::new();
        let mut driver = self.enter_held(&signals)?;
        driver.signals = Some(signals);
        Ok(driver)
    }

    /// As [`Inner::enter`], by a thread that holds its signals.
    fn enter_held(&self, _: &SignalsHeld) -> Result<Driver<'_>, SharedError> {
        if self.process.is_here() {
            Ok(self.lock())
        } else {
            Err(SharedError::Forked { rank: self.config.rank })
        }
    }

    /// Locks the host, in the rank's own process only. The thread holds its signals, or blocks them all.
    fn lock(&self) -> Driver<'_> {
        let host = self.host.lock().expect("no thread panicked while changing the rank's state");
        Driver { host, wakes: None, signals: None }
    }

    fn try_lock(&self) -> Option<Driver<'_>> {
        Some(Driver { host: self.host.try_lock().ok()?, wakes: None, signals: None })
    }

    /// Starts a thread that no signal interrupts: a handler that touches shared memory would wait there for a
    /// page that the thread is to serve.
    fn start_thread(
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<std::thread::JoinHandle<()>> {
        let _signals = SignalsHeld::new();
        std::thread::Builder::new().name(name.to_owned()).spawn(run)
    }
}

/// The thread that drives the rank, while it has the rank's lock. Invariant: when it is dropped, no thread of
/// the rank sleeps on memory whose other end does not know that. A thread of the program holds its signals
/// meanwhile: a handler that touches shared memory waits for a page that needs this lock.
struct Driver<'a> {
    host: MutexGuard<'a, Host>,
    /// After the lock.
    wakes: Option<Wakes>,
    /// Released after both.
    signals: Option<SignalsHeld>,
}

impl std::ops::Deref for Driver<'_> {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl std::ops::DerefMut for Driver<'_> {
    fn deref_mut(&mut self) -> &mut Host {
        &mut self.host
    }
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        self.host.tell_of_sleepers();
        self.wakes = self.host.memory.take_wakes();
    }
}

/// Shared memory that was allocated. It lies at the same address on every rank; the value may be sent to
/// other ranks as an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    start: usize,
    bytes: usize,
}

impl Region {
    /// Its first byte.
    #[must_use]
    pub fn address(self) -> usize {
        self.start
    }

    /// Its length in bytes: the requested length, in whole pages.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Its first byte, as a pointer.
    #[must_use]
    pub fn as_ptr(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start)
    }

    /// The `index`-th `T` in it.
    ///
    /// # Panics
    /// If it is not wholly inside.
    #[must_use]
    pub fn at<T>(self, index: usize) -> *mut T {
        let end = index.checked_add(1).and_then(|count| count.checked_mul(size_of::<T>()));
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "element {index} of {} bytes each is outside of {} bytes",
            size_of::<T>(),
            self.bytes
        );
        std::ptr::with_exposed_provenance_mut(self.start + index * size_of::<T>())
    }
}

/// A thread of this process as a member of a rank. Dropped with the thread.
struct Member {
    inner: Weak<Inner>,
    instance: u64,
    thread: ThreadId,
    slot: Arc<Slot>,
    /// The thread's CPU time when its last operation returned, if that is traced.
    returned: Option<Duration>,
    kept: Vec<additions::Addition>,
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade()
            && let Ok(mut host) = inner.enter()
        {
            host.dismiss(self.thread);
        }
    }
}

thread_local! {
    /// The thread's memberships in the ranks of its process. Dropped by [`thread_ends`]: a process that exits
    /// may hold locks, a thread that ends may not.
    static MEMBER: ManuallyDrop<RefCell<Vec<Member>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

static ENDS: LazyLock<Result<ThreadEnd, i32>> = LazyLock::new(ThreadEnd::new);

/// Ends the thread's memberships.
fn thread_ends() {
    let members = MEMBER.with(|members| std::mem::take(&mut *members.borrow_mut()));
    drop(members);
}

static INSTANCES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static LOOK: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// While this thread waits in a call, `look` is called some times a second, without a lock of the runtime.
/// Once it gives true the run ends, and the call with it. For programs whose signal handlers run between
/// calls. `None`: no more.
pub fn look_while_waiting(look: Option<fn() -> bool>) {
    LOOK.set(look);
}

impl Shared {
    /// Joins the run that the environment describes ([`SharedConfig::from_env`]); without a launcher the
    /// process is the only rank.
    ///
    /// # Errors
    /// As [`Shared::join`].
    pub fn join_from_env() -> Result<Self, JoinError> {
        Self::join(SharedConfig::from_env()?)
    }

    /// Joins a run. Blocks until all ranks have come, at most [`SharedConfig::join_deadline`].
    ///
    /// # Errors
    /// If this machine lacks something, a rank did not come, or ranks do not fit together.
    ///
    /// # Panics
    /// If the kernel refuses a descriptor for waking the service thread.
    pub fn join(config: SharedConfig) -> Result<Self, JoinError> {
        if config.rank >= config.ranks {
            return Err(JoinError::Rank { rank: config.rank, ranks: config.ranks });
        }
        let natural =
            if config.protocol == ProtocolKind::Ibec { LockPath::Either } else { LockPath::Forward };
        let engine = Config {
            rank: Rank(config.rank),
            ranks: config.ranks,
            regions: Vec::new(),
            managers: config.managers,
            lock_path: Some(config.lock_path.unwrap_or(natural)),
            tuning: config.tuning,
        };
        let process = Birthplace::new().map_err(MemoryError::from)?;
        let bytes = usize::try_from(config.range_bytes).expect("64-bit addresses");
        let mut memory = SharedMemory::new(Rank(config.rank), config.base, bytes, config.user_faults)?;
        let reach = memory.reach();
        if let Some(budget) = config.local_bytes {
            let servers = config.servers.as_ref().map(Servers::connect).transpose()?;
            memory.limit(budget.max(LEAST_LOCAL_BYTES), servers);
        }
        let Mesh { known, lines, datagrams } = Mesh::meet(&config)?;
        let datagrams = datagrams.map(|(socket, places)| {
            let mut channel = config.channel;
            // As over TCP.
            channel.silence_us = u64::try_from(config.silence.as_micros()).unwrap_or(u64::MAX);
            Datagrams::new(socket, places, channel)
        });
        let mut account = Account::new(Rank(config.rank), config.protocol.name(), config.threads)
            .map_err(JoinError::Trace)?;
        account.costs(|| memory.begin_trace());
        let watch = watch(&memory, &lines, datagrams.as_ref()).map_err(JoinError::Socket)?;
        let mut host = Host::new(&config, &engine, memory, lines, datagrams, Arc::clone(&watch), account)?;
        let orders = Arc::new(relink::Orders::new().map_err(JoinError::Socket)?);
        if let Some(known) = &known {
            host.may_relink(&known.hello, &known.incarnations, Arc::clone(&orders), config.reconnect);
        }
        let wish = AllocOptions::new().wish(u64::from(SEMAPHORES) * 8, &config);
        let semaphores = host.open_first(Demand::Alloc { wish }).map(|region| place(&host, &region));
        host.take_what_came_early();
        let semaphores =
            semaphores.ok_or(MemoryError::Kernel { operation: "opening the first region", errno: 0 })?;
        let inner = Arc::new(Inner {
            process,
            threads: AtomicU16::new(config.threads),
            crowd: config.crowded.then(|| Mutex::new(AdaptiveSpin::new(config.spin))),
            traced: host.account.is_traced(),
            lent: Arc::clone(host.memory.lent()),
            glances: host.glances(),
            host: Mutex::new(host),
            watch,
            finished: AtomicBool::new(false),
            semaphores,
            published: outside::Published::default(),
            answering: outside::Answering::default(),
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            reach,
            config,
        });
        if let Some(known) = known {
            let served = Arc::clone(&inner);
            Inner::start_thread("rampool-relink", move || relink::run(&served, &known, &orders))
                .map_err(JoinError::Thread)?;
        }
        let served = Arc::clone(&inner);
        Inner::start_thread("rampool-share", move || service::run(&served)).map_err(JoinError::Thread)?;
        Ok(Self { inner })
    }

    /// This rank, `0 .. ranks`.
    #[must_use]
    pub fn rank(&self) -> u16 {
        self.inner.config.rank
    }

    #[must_use]
    pub fn ranks(&self) -> u16 {
        self.inner.config.ranks
    }

    /// The settings that it joined with.
    #[must_use]
    pub fn config(&self) -> &SharedConfig {
        &self.inner.config
    }

    /// Whether this process is the rank: false in a child that it forked.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.inner.process.is_here()
    }

    /// Whether system calls may be given absent shared memory.
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.inner.reach
    }

    /// From now on `threads` threads of this rank meet at barriers. At the start it is one. Where the rank
    /// has been bound to fewer CPUs than that ([`SharedConfig::binding`]), this thread, and those that it
    /// starts from now on, may use those of the other ranks on this machine, too.
    pub fn set_threads(&self, threads: u16) {
        let Ok(mut host) = self.inner.enter() else { return };
        host.account.set_threads(threads.max(1));
        drop(host);
        self.unbind(threads);
        self.inner.threads.store(threads.max(1), Ordering::Relaxed);
    }

    fn unbind(&self, threads: u16) {
        let Some(Binding { own, all }) =
            self.inner.config.binding.as_ref().filter(|binding| binding.own.len() < usize::from(threads))
        else {
            return;
        };
        let now = rampool_kernel::thread::allowed_cpus();
        // Affinities that others have set since then stay.
        if now.len() == own.len()
            && own.iter().all(|cpu| now.contains(cpu))
            && let Err(errno) = rampool_kernel::thread::pin_to(all)
        {
            tracing::debug!(errno, "the threads of this rank share its CPUs");
        }
    }

    // --- memory --------------------------------------------------------------------------------------------

    /// Allocates shared memory; every rank makes the same call, in the same order among such calls, by one
    /// thread. It reads as zeroes. Only addresses are reserved: pages take memory when they are touched.
    /// Blocks until all ranks have called.
    ///
    /// # Errors
    /// If there is no room. Ranks that ask for different things end the run.
    pub fn alloc(&self, bytes: usize, options: AllocOptions) -> Result<Region, SharedError> {
        self.allocate(bytes, options, true)
    }

    /// Allocates shared memory for all ranks by a call of this one alone. Blocks until all ranks know of it,
    /// which needs no calls of their programs; the program itself tells the others the address.
    ///
    /// # Errors
    /// If there is no room.
    pub fn alloc_alone(&self, bytes: usize, options: AllocOptions) -> Result<Region, SharedError> {
        self.allocate(bytes, options, false)
    }

    fn allocate(&self, bytes: usize, options: AllocOptions, collective: bool) -> Result<Region, SharedError> {
        let wish = options.wish(bytes as u64, &self.inner.config);
        match self.demand(Demand::Alloc { wish }, collective)? {
            Answer::Region { region } => Ok(place(&*self.inner.enter()?, &region)),
            other => Err(self.odd(&other)),
        }
    }

    /// Frees an allocation; every rank makes the same call. No rank uses the memory any more. When it
    /// returns, the kernel has its pages back everywhere. After the next barrier allocations of the same kind
    /// may get the same addresses, which read as zeroes.
    ///
    /// # Errors
    /// If no allocation begins there.
    pub fn free(&self, region: Region) -> Result<(), SharedError> {
        self.release(region.start, true)
    }

    /// Like [`Shared::free`], by one rank for all, and by address.
    ///
    /// # Errors
    /// As [`Shared::free`].
    pub fn free_alone(&self, address: usize) -> Result<(), SharedError> {
        self.release(address, false)
    }

    fn release(&self, address: usize, collective: bool) -> Result<(), SharedError> {
        let (page, offset) = self.locate(address)?;
        if offset != 0 || address == self.inner.semaphores.start {
            return Err(SharedError::NotShared { rank: self.rank(), address });
        }
        self.withdraw(page);
        match self.demand(Demand::Free { first: page }, collective)? {
            Answer::Freed {} => Ok(()),
            other => Err(self.odd(&other)),
        }
    }

    fn demand(&self, demand: Demand, collective: bool) -> Result<Answer, SharedError> {
        match self.run(Waiting::Allocation, |host, thread| host.demand(thread, collective, demand))? {
            Outcome::Answer(answer) => Ok(answer),
            other => Err(self.ended(other)),
        }
    }

    fn odd(&self, answer: &Answer) -> SharedError {
        let why = match answer {
            Answer::Refused { why } => why.clone(),
            other => format!("rank 0 answers {other:?}"),
        };
        SharedError::Refused { rank: self.rank(), why }
    }

    fn locate(&self, address: usize) -> Result<(rampool_wire::units::PageIndex, u32), SharedError> {
        self.inner
            .enter()?
            .memory
            .locate(address)
            .ok_or(SharedError::NotShared { rank: self.rank(), address })
    }

    // --- locks ---------------------------------------------------------------------------------------------

    /// Takes the lock, which any number below 2^62 names. Blocks until this thread has it. Then everything
    /// written before earlier releases is visible (`ibec`: everything written under this lock).
    ///
    /// # Errors
    /// If this thread holds it already.
    pub fn lock(&self, lock: u64) -> Result<(), SharedError> {
        if self.take_lent(Name::of_lock(LockId(lock)), true).is_some() {
            return Ok(());
        }
        self.lock_in(self.user_lock(lock)?, LockMode::Exclusive, true).map(drop)
    }

    /// Like [`Shared::lock`], without waiting: false if it is held.
    ///
    /// # Errors
    /// As [`Shared::lock`].
    pub fn try_lock(&self, lock: u64) -> Result<bool, SharedError> {
        if self.take_lent(Name::of_lock(LockId(lock)), true).is_some() {
            return Ok(true);
        }
        self.lock_in(self.user_lock(lock)?, LockMode::Exclusive, false)
    }

    /// Takes the lock shared with other readers; waits while it is held exclusively.
    ///
    /// # Errors
    /// As [`Shared::lock`].
    pub fn lock_shared(&self, lock: u64) -> Result<(), SharedError> {
        self.lock_in(self.user_lock(lock)?, LockMode::Shared, true).map(drop)
    }

    /// Like [`Shared::lock_shared`], without waiting: false if it is held exclusively.
    ///
    /// # Errors
    /// As [`Shared::lock`].
    pub fn try_lock_shared(&self, lock: u64) -> Result<bool, SharedError> {
        self.lock_in(self.user_lock(lock)?, LockMode::Shared, false)
    }

    /// Takes S5's non-exclusive lock: it fetches the newest released data and then excludes no one. Only if
    /// everything is `ibec`; otherwise like [`Shared::lock_shared`].
    ///
    /// # Errors
    /// As [`Shared::lock`].
    pub fn lock_snapshot(&self, lock: u64) -> Result<(), SharedError> {
        self.lock_in(self.user_lock(lock)?, LockMode::Snapshot, true).map(drop)
    }

    /// Releases a lock, taken in any mode. Does not wait until others can have this rank's writes: the lock
    /// waits for that before it leaves the rank.
    ///
    /// # Errors
    /// If this thread does not hold it.
    pub fn unlock(&self, lock: u64) -> Result<(), SharedError> {
        if self.give_lent(Name::of_lock(LockId(lock))) {
            return Ok(());
        }
        self.unlock_any(self.user_lock(lock)?)
    }

    fn user_lock(&self, lock: u64) -> Result<LockId, SharedError> {
        if lock < OWN_LOCKS {
            Ok(LockId(lock))
        } else {
            Err(SharedError::LockNumber { rank: self.rank(), lock: OWN_LOCKS })
        }
    }

    fn lock_in(&self, lock: LockId, mode: LockMode, wait: bool) -> Result<bool, SharedError> {
        let result = self.operate(SyncOp::Lock { lock, mode, wait }, Waiting::Lock(lock))?;
        Ok(result != OpResult::Busy)
    }

    fn unlock_any(&self, lock: LockId) -> Result<(), SharedError> {
        self.operate(SyncOp::Unlock { lock }, Waiting::Unlock(lock)).map(drop)
    }

    // --- barriers, conditions, semaphores ------------------------------------------------------------------

    /// Waits for all threads of all ranks ([`Shared::set_threads`]). After it every write is visible
    /// everywhere. All threads name the same barrier, or the run ends with an error that names those that did
    /// not.
    ///
    /// # Errors
    /// Only those that end the run.
    pub fn barrier(&self, barrier: u32) -> Result<(), SharedError> {
        self.meet(barrier, BarrierKind::Normal)
    }

    /// Like [`Shared::barrier`]; pages that a single rank wrote become that rank's own, and cost it nothing
    /// until another reads them (S5's barrier for single-writer data).
    ///
    /// # Errors
    /// As [`Shared::barrier`].
    pub fn barrier_keep(&self, barrier: u32) -> Result<(), SharedError> {
        self.meet(barrier, BarrierKind::KeepReadWrite)
    }

    fn meet(&self, barrier: u32, kind: BarrierKind) -> Result<(), SharedError> {
        let threads = self.inner.threads.load(Ordering::Relaxed);
        let barrier = BarrierId(barrier);
        self.operate(SyncOp::Barrier { barrier, kind, threads }, Waiting::Barrier(barrier)).map(drop)
    }

    /// Releases `lock` (which this thread holds exclusively), waits for a signal, takes the lock again. A
    /// signal given while the lock is held is never lost. Only a signal wakes a waiter, but the awaited state
    /// may be gone again: check in a loop.
    ///
    /// # Errors
    /// If this thread does not hold the lock exclusively.
    pub fn wait(&self, condition: u32, lock: u64) -> Result<(), SharedError> {
        let (cond, lock) = (CondId(condition), self.user_lock(lock)?);
        self.operate(SyncOp::Wait { cond, lock }, Waiting::Condition { cond, lock }).map(drop)
    }

    /// Like [`Shared::wait`], for a thread that is idle until it gets work: it waits without a deadline,
    /// whatever [`SharedConfig::deadline`] says. A lost rank still ends it.
    ///
    /// # Errors
    /// As [`Shared::wait`].
    pub fn wait_idle(&self, condition: u32, lock: u64) -> Result<(), SharedError> {
        let lock = self.user_lock(lock)?;
        self.operate(SyncOp::Wait { cond: CondId(condition), lock }, Waiting::Idle { lock }).map(drop)
    }

    /// Wakes one thread that waits for the condition of this lock.
    ///
    /// # Errors
    /// Only those that end the run.
    pub fn signal(&self, condition: u32, lock: u64) -> Result<(), SharedError> {
        self.signal_any(CondId(condition), self.user_lock(lock)?, false)
    }

    /// Wakes all threads that wait for the condition of this lock.
    ///
    /// # Errors
    /// Only those that end the run.
    pub fn broadcast(&self, condition: u32, lock: u64) -> Result<(), SharedError> {
        self.signal_any(CondId(condition), self.user_lock(lock)?, true)
    }

    fn signal_any(&self, cond: CondId, lock: LockId, all: bool) -> Result<(), SharedError> {
        self.operate(SyncOp::Signal { cond, lock, all }, Waiting::Signal(cond)).map(drop)
    }

    /// A semaphore's lock and its count, which only the lock's holder touches.
    fn semaphore(&self, semaphore: u32) -> Result<(LockId, *mut u64), SharedError> {
        if semaphore >= SEMAPHORES {
            return Err(SharedError::SemaphoreNumber { rank: self.rank(), semaphore });
        }
        Ok((LockId(OWN_LOCKS + u64::from(semaphore)), self.inner.semaphores.at(semaphore as usize)))
    }

    /// Sets semaphore `semaphore` (`0 .. SEMAPHORES`); all are 0 at the start. No thread may wait for it
    /// during the call.
    ///
    /// # Errors
    /// If there is no such semaphore.
    pub fn semaphore_set(&self, semaphore: u32, count: u64) -> Result<(), SharedError> {
        let (lock, at) = self.semaphore(semaphore)?;
        self.lock_in(lock, LockMode::Exclusive, true)?;
        // SAFETY: inside of the runtime's own region, aligned; the lock orders all accesses.
        unsafe { at.write_volatile(count) };
        self.unlock_any(lock)
    }

    /// Takes one from the semaphore; waits while it is 0.
    ///
    /// # Errors
    /// If there is no such semaphore.
    pub fn semaphore_wait(&self, semaphore: u32) -> Result<(), SharedError> {
        let (lock, at) = self.semaphore(semaphore)?;
        self.lock_in(lock, LockMode::Exclusive, true)?;
        // SAFETY: as in `semaphore_set`.
        while unsafe { at.read_volatile() } == 0 {
            self.operate(SyncOp::Wait { cond: CondId(0), lock }, Waiting::Semaphore { semaphore, lock })?;
        }
        // SAFETY: as above.
        unsafe { at.write_volatile(at.read_volatile() - 1) };
        self.unlock_any(lock)
    }

    /// Adds one to the semaphore and wakes one waiter.
    ///
    /// # Errors
    /// If there is no such semaphore.
    pub fn semaphore_post(&self, semaphore: u32) -> Result<(), SharedError> {
        let (lock, at) = self.semaphore(semaphore)?;
        self.lock_in(lock, LockMode::Exclusive, true)?;
        // SAFETY: as in `semaphore_set`.
        unsafe { at.write_volatile(at.read_volatile().wrapping_add(1)) };
        self.signal_any(CondId(0), lock, false)?;
        self.unlock_any(lock)
    }

    /// Makes this thread's writes available to every thread that synchronises with it later, without
    /// releasing a lock.
    ///
    /// # Errors
    /// Only those that end the run.
    pub fn fence(&self) -> Result<(), SharedError> {
        self.operate(SyncOp::Fence, Waiting::Fence).map(drop)
    }

    // --- atomic words --------------------------------------------------------------------------------------

    /// Reads and changes the naturally aligned word of `width` (1, 2, 4, 8) bytes at `address` as one step of
    /// all ranks, ordered like a lock of that word: writes before it are visible to every later operation on
    /// the word. Returns the word's value before. Blocks. Other accesses to the word must not race with it,
    /// unless the region is `sc`.
    ///
    /// # Errors
    /// If no such word is in shared memory.
    pub fn atomic(&self, address: usize, width: u8, op: AtomicOp) -> Result<u64, SharedError> {
        if let Some(before) = self.change_lent(address, width, op)? {
            return Ok(before);
        }
        let (page, offset) = self.locate(address)?;
        match self.operate(SyncOp::Atomic { page, offset, width, op }, Waiting::Word { address })? {
            OpResult::Value(before) => Ok(before),
            _ => Ok(0),
        }
    }

    /// Adds to a word; returns its value before. Wraps.
    ///
    /// # Errors
    /// As [`Shared::atomic`].
    pub fn fetch_add(&self, word: *mut u64, value: u64) -> Result<u64, SharedError> {
        self.atomic(word.expose_provenance(), 8, AtomicOp::Add(value))
    }

    /// Adds to a double; returns its value before.
    ///
    /// # Errors
    /// As [`Shared::atomic`].
    pub fn fetch_add_f64(&self, word: *mut f64, value: f64) -> Result<f64, SharedError> {
        self.atomic(word.expose_provenance(), 8, AtomicOp::AddDouble(value.to_bits())).map(f64::from_bits)
    }

    /// Stores `new` if the word is `expect`; returns the word's value before.
    ///
    /// # Errors
    /// As [`Shared::atomic`].
    pub fn compare_exchange(&self, word: *mut u64, expect: u64, new: u64) -> Result<u64, SharedError> {
        self.atomic(word.expose_provenance(), 8, AtomicOp::CompareExchange { expect, new })
    }

    /// Reads a word.
    ///
    /// # Errors
    /// As [`Shared::atomic`].
    pub fn load(&self, word: *const u64) -> Result<u64, SharedError> {
        self.atomic(word.expose_provenance(), 8, AtomicOp::Load)
    }

    /// Writes a word.
    ///
    /// # Errors
    /// As [`Shared::atomic`].
    pub fn store(&self, word: *mut u64, value: u64) -> Result<(), SharedError> {
        self.atomic(word.expose_provenance(), 8, AtomicOp::Store(value)).map(drop)
    }

    // --- placement, statistics, the end --------------------------------------------------------------------

    /// From the next barrier on, `manager` manages the lock.
    ///
    /// # Errors
    /// If there is no such rank.
    pub fn set_lock_manager(&self, lock: u64, manager: u16) -> Result<(), SharedError> {
        let lock = self.user_lock(lock)?;
        self.operate(SyncOp::SetLockManager { lock, manager: Rank(manager) }, Waiting::Proposal).map(drop)
    }

    /// From the next barrier on, `home` is the home of every page that holds one of these bytes.
    ///
    /// # Errors
    /// If there is no such rank, or a byte is not shared.
    pub fn set_home(&self, address: usize, bytes: usize, home: u16) -> Result<(), SharedError> {
        let mut at = address;
        while at < address.saturating_add(bytes.max(1)) {
            let (page, _) = self.locate(at)?;
            let (start, page_bytes) = self.inner.enter()?.memory.place(page);
            self.operate(SyncOp::SetHome { page, home: Rank(home) }, Waiting::Proposal)?;
            at = start + page_bytes;
        }
        Ok(())
    }

    /// The home, in this epoch, of the page at `address`.
    ///
    /// # Errors
    /// If it is not shared.
    pub fn home(&self, address: usize) -> Result<u16, SharedError> {
        let (page, _) = self.locate(address)?;
        Ok(self.inner.enter()?.home(page).0)
    }

    #[must_use]
    pub fn stats(&self) -> SharedStats {
        self.inner.enter().map(|mut host| host.stats()).unwrap_or_default()
    }

    /// Counts what `rampool launch --stats` shows from here on: [`Shared::stats`] begins at zero again,
    /// except the engine's part.
    pub fn start_measuring(&self) {
        if let Ok(mut host) = self.inner.enter() {
            host.start_measuring();
        }
    }

    /// `rampool launch --stats` shows the counts up to here, not up to the end.
    pub fn stop_measuring(&self) {
        if let Ok(mut host) = self.inner.enter() {
            host.stop_measuring();
        }
    }

    /// Leaves the run. Every rank calls it once, by one thread, when none of its threads uses shared memory
    /// any more. Blocks until all have called. A lock that a thread of this rank still holds ends the run.
    /// Afterwards a touch of shared memory ends the process, and every call fails. Ranks that still wait at a
    /// barrier learn that this one will not come. Outside processes whose operations were done get their
    /// answers first, for up to 2 s.
    ///
    /// # Errors
    /// If the run has ended, or ends meanwhile.
    pub fn close(&self) -> Result<(), SharedError> {
        match self.run(Waiting::Finish, Host::leave)? {
            Outcome::Finished => {
                self.inner.finished.store(true, Ordering::Release);
                self.inner.answering.wait_for_all();
                Ok(())
            }
            other => Err(self.ended(other)),
        }
    }

    /// Ends the run on every rank, with this reason.
    pub fn abort(&self, why: &str) {
        if let Ok(mut host) = self.inner.enter() {
            host.stop(&format!("rank {} gave up: {why}", self.rank()));
        }
    }

    fn operate(&self, op: SyncOp, what: Waiting) -> Result<OpResult, SharedError> {
        self.operation(self.run(what, |host, thread| host.begin(thread, op))?)
    }

    fn operation(&self, outcome: Outcome) -> Result<OpResult, SharedError> {
        match outcome {
            Outcome::Operation(OpResult::Failed(OpError::Stopped(reason))) => {
                Err(SharedError::Stopped { rank: self.rank(), reason })
            }
            Outcome::Operation(OpResult::Failed(error)) => {
                Err(SharedError::Operation { rank: self.rank(), error })
            }
            Outcome::Operation(result) => Ok(result),
            other => Err(self.ended(other)),
        }
    }

    fn ended(&self, outcome: Outcome) -> SharedError {
        match outcome {
            Outcome::Stopped(reason) => SharedError::Stopped { rank: self.rank(), reason },
            other => SharedError::Refused {
                rank: self.rank(),
                why: format!("an answer of another kind: {other:?}"),
            },
        }
    }

    /// Begins an operation of this thread and waits until it is over.
    fn run(&self, what: Waiting, begin: impl FnOnce(&mut Host, ThreadId)) -> Result<Outcome, SharedError> {
        self.add_kept()?;
        let inner = &*self.inner;
        let cpu = inner.traced.then(account::cpu_of_this_thread);
        let began = Instant::now();
        let (thread, slot) = self.member()?;
        let signals = SignalsHeld::new();
        let computed = cpu.and_then(|cpu| Some(cpu.saturating_sub(self.returned_at()?)));
        let mut host = inner.enter_held(&signals)?;
        if host.is_leaving() {
            return Err(SharedError::Finished { rank: self.rank() });
        }
        host.enter(thread, what, computed);
        if inner.has_something() {
            host.take_what_has_come();
        }
        begin(&mut host, thread);
        let mut outcome = slot.take();
        let waits = outcome.is_none();
        let quiet = waits && !inner.config.crowded && what.is_answered_soon() && host.may_be_quiet_at_first();
        if quiet {
            host.flush_quietly();
        } else {
            host.flush();
        }
        if waits {
            // After sending, so that the messages travel meanwhile. If the answer is here already, the
            // service thread is woken in vain.
            host.begin_to_look();
            let ring = host.wants_service();
            drop(host);
            if ring {
                inner.watch.ring();
            }
            let (came, driver) = self.wait_for(&slot, thread, what, quiet, &signals);
            (outcome, host) = (Some(came), driver);
        }
        let outcome = outcome.expect("it has been waited for");
        host.returns(thread, what, &outcome, began);
        let ring = host.wants_service();
        drop(host);
        if ring {
            inner.watch.ring();
        }
        if inner.traced {
            // Last: neither tracing nor the end of an operation counts as the program's computing.
            self.returns();
        }
        Ok(outcome)
    }

    /// Waits for the end of this thread's operation: polls at first, since a later wake-up costs more than a
    /// message takes, then sleeps, with its signals released. Comes back as the rank's driver.
    fn wait_for(
        &self,
        slot: &Slot,
        thread: ThreadId,
        what: Waiting,
        quiet: bool,
        signals: &SignalsHeld,
    ) -> (Outcome, Driver<'_>) {
        let inner = &*self.inner;
        let limit = inner.config.deadline.filter(|_| !matches!(what, Waiting::Idle { .. }));
        let began = Instant::now();
        let mut deadline = limit.map(|limit| began + limit);
        let mut ready = Ready::default();
        let (mut looks, spin) = (true, inner.spin());
        let mut quiet_until = quiet.then(|| began + PATIENCE);
        let (mut look, mut slept) = (LOOK.get(), false);
        loop {
            if slept && signals.released(|| interrupts(&mut look)) {
                self.abort("it was interrupted");
            }
            if looks {
                self.look_for(slot, spin, &mut quiet_until, &mut ready);
            }
            let mut host = inner.lock();
            if quiet_until.take().is_some() {
                host.end_quiet(slot.is_ready());
            }
            if let Some(outcome) = slot.take() {
                if looks {
                    host.end_looking();
                }
                inner.waited(began.elapsed());
                return (outcome, host);
            }
            let now = Instant::now();
            let wake = look.map(|_| now + LOOK_EVERY).into_iter().chain(deadline).min();
            if deadline.is_some_and(|at| at <= now) {
                deadline = Some(host.give_up(thread, now - began, what));
            } else if looks && host.begin_to_sleep(thread) {
                let ring = host.wants_service();
                drop(host);
                if ring {
                    inner.watch.ring();
                }
                let left = wake.map(|wake| wake.saturating_duration_since(now));
                signals.released(|| inner.watch.wait_lines(left, &mut ready));
                slept = true;
                host = inner.lock();
                host.end_sleeping();
                host.look_at(&ready);
            } else {
                // Another thread sleeps on the connections. When it leaves, the service thread takes over.
                if std::mem::take(&mut looks) {
                    host.end_looking();
                }
                drop(host);
                slot.sleep(wake, signals);
                slept = true;
                continue;
            }
            let ring = host.wants_service();
            drop(host);
            if ring {
                inner.watch.ring();
            }
        }
    }

    /// Polls for the end of the operation until nothing has come for a while.
    fn look_for(&self, slot: &Slot, spin: Duration, quiet_until: &mut Option<Instant>, ready: &mut Ready) {
        let inner = &*self.inner;
        if spin.is_zero() || inner.config.ranks > MOST_LOOKED_AT {
            return;
        }
        let mut since = Instant::now();
        let mut looks = 0_u32;
        while !slot.is_ready() {
            let now = Instant::now();
            if now.saturating_duration_since(since) >= spin {
                return;
            }
            match inner.try_lock() {
                Some(mut host) => {
                    if quiet_until.is_some_and(|until| until <= now) {
                        *quiet_until = None;
                        host.end_quiet(false);
                    }
                    if host.look(ready, now) {
                        since = now;
                    } else {
                        // Constant polling keeps the other rank from writing.
                        std::hint::spin_loop();
                    }
                    if host.wants_service() {
                        drop(host);
                        inner.watch.ring();
                    }
                }
                None => std::hint::spin_loop(),
            }
            looks = looks.wrapping_add(1);
            let crowded = inner.config.crowded;
            if (crowded || looks.is_multiple_of(LOOKS_A_YIELD)) && !slot.is_ready() {
                // The awaited rank may need this CPU.
                std::thread::yield_now();
                if !crowded && now.elapsed() >= LONG_YIELD {
                    rampool_kernel::thread::ask_for_short_slices();
                }
            }
        }
    }

    /// This thread's CPU time when its last operation at this rank returned.
    fn returned_at(&self) -> Option<Duration> {
        MEMBER.with(|members| {
            members.borrow().iter().find(|member| member.instance == self.inner.instance)?.returned
        })
    }

    fn returns(&self) {
        MEMBER.with(|members| {
            if let Some(member) =
                members.borrow_mut().iter_mut().find(|member| member.instance == self.inner.instance)
            {
                member.returned = Some(account::cpu_of_this_thread());
            }
        });
    }

    /// This thread's number and slot at this rank.
    fn member(&self) -> Result<(ThreadId, Arc<Slot>), SharedError> {
        let inner = &self.inner;
        MEMBER.with(|members| {
            let mut members = members.borrow_mut();
            if let Some(member) = members.iter().find(|member| member.instance == inner.instance) {
                return Ok((member.thread, Arc::clone(&member.slot)));
            }
            let refused = |errno: i32| SharedError::Refused {
                rank: self.rank(),
                why: std::io::Error::from_raw_os_error(errno).to_string(),
            };
            ENDS.as_ref().map_err(|&errno| errno).and_then(|ends| ends.call(thread_ends)).map_err(refused)?;
            let (thread, slot) =
                inner.enter()?.admit().ok_or(SharedError::TooManyThreads { rank: self.rank() })?;
            let member = Member {
                inner: Arc::downgrade(inner),
                instance: inner.instance,
                thread,
                slot: Arc::clone(&slot),
                returned: None,
                kept: Vec::new(),
            };
            members.retain(|member| member.inner.strong_count() > 0);
            members.push(member);
            Ok((thread, slot))
        })
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .finish_non_exhaustive()
    }
}

/// Whether the thread is to wait no longer; asks no more once it is.
fn interrupts(look: &mut Option<fn() -> bool>) -> bool {
    let interrupted = look.is_some_and(|look| look());
    if interrupted {
        *look = None;
    }
    interrupted
}

fn place(host: &Host, region: &RegionConfig) -> Region {
    let (start, page_bytes) = host.memory.place(region.pages.first);
    Region { start, bytes: region.pages.count as usize * page_bytes }
}

/// Watches everything that a rank waits for.
fn watch(
    memory: &SharedMemory,
    lines: &[Option<line::Line>],
    datagrams: Option<&Datagrams>,
) -> std::io::Result<Arc<Watch>> {
    let watch = Watch::new(memory.as_fd(), datagrams.map(AsFd::as_fd))?;
    for (line, rank) in lines.iter().zip(0..) {
        if let Some(fd) = line.as_ref().and_then(line::Line::fd) {
            watch.add_line(Rank(rank), fd)?;
        }
    }
    Ok(Arc::new(watch))
}
