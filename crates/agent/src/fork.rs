//! A forked child gets its own agent.
//!
//! `fork(3)` calls us before, and after in both processes. Before: a socket pair is made, and no transition
//! from watching to paging may happen. The pager reads the kernel's fork event, takes its own copy of the
//! parent's end, and serves the child from that moment. After, in the child: everything of the parent's agent
//! that the child inherited is abandoned; if the parent's memory was managed, a new agent asks through the
//! socket for the child's context and the list of its absent pages, and goes on with them. After, in the
//! parent: the forking thread waits until the child's end is closed, because a parent that ends at once (a
//! daemon does) takes the only server of the child's faults with it.
//!
//! A child without such a line (made by a bare `clone`, while the program had no descriptor left, or after it
//! gave away the right to join the servers once more) is served by its parent to its end. The fork fallback
//! of the run holds its context as well ([`rampool_run::fork_fallback`]), so that the parent's death leaves
//! no zeroes. A child with a line whose parent is killed before it answered ends with an error, before
//! `fork(3)` returned in it.
//!
//! Where the kernel reports no forks (below the full mode, or without CAP_SYS_PTRACE), the order is another:
//! before the fork the pager stops evicting and lists what is absent; the child registers its memory again
//! before anything else, and only then starts its agent. A child that was not made by `fork(3)` has no
//! managed memory at all there, and ends with SIGSEGV when it needs it: never zeroes.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rampool_client::pool::RegionTicket;
use rampool_kernel::doorbell::Doorbell;
use rampool_kernel::uffd::{Features, Scope, Uffd};
use rampool_net::transport::Endpoint;
use rampool_pager::fault::{CopyThread, FaultCatcher};
use rampool_pager::fork::ChildMemory;
use rampool_paging::space::Span;
use rampool_run::settings::Settings;

use crate::next::Next;
use crate::touch;
use crate::watch::{self, Inheritance};
use crate::{HEAP, end_process};

/// How long a forking thread waits for the agent, and a child for its parent.
const DEADLINE: Duration = Duration::from_secs(30);
const NONE: i32 = -1;

static SETTINGS: OnceLock<&'static Settings> = OnceLock::new();
/// The files that a child opens to join the servers, and the access that it needs.
static NEEDED_TO_JOIN: OnceLock<Vec<(CString, libc::c_int)>> = OnceLock::new();
/// Held from before a fork until after it, while watching becomes paging, and in a child until its own agent
/// serves it. Where the kernel does not tell of changed mappings, also by a thread that changes some, from
/// before the agent hears of it until the system call is over, and by the agent while it takes memory over:
/// otherwise what it has just read of the mappings, or given back, would be something else by the time it
/// acts.
static LOCKED: AtomicBool = AtomicBool::new(false);
/// The thread that holds the lock because it changes mappings, as [`touch::this_thread`] names it; 0: none.
static CHANGING: AtomicUsize = AtomicUsize::new(0);
/// The signals that thread had blocked before.
static SIGNALS: AtomicU64 = AtomicU64::new(0);
/// The process of this agent. A process that was created without the agent's knowledge (by a bare `clone`)
/// has none.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Memory is managed: a child inherits some.
static PAGING: AtomicBool = AtomicBool::new(false);
/// The parent serves this process.
static FORK_SERVED: AtomicBool = AtomicBool::new(false);
/// The two ends of the line of the fork under way, in the program's table of descriptors; the pager takes a
/// copy of the first.
static PARENT_END: AtomicI32 = AtomicI32::new(NONE);
static CHILD_END: AtomicI32 = AtomicI32::new(NONE);
static FORKING_THREAD: AtomicU32 = AtomicU32::new(0);
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The kernel tells the pager of forks.
static FOLLOWED: AtomicBool = AtomicBool::new(true);
/// The features of the context, for children that inherit it.
static FEATURES: AtomicU64 = AtomicU64::new(0);
/// Requests of the program's threads to the pager, where forks are not followed.
static REQUEST: AtomicU32 = AtomicU32::new(REQUEST_NONE);
/// The doorbell's word, and its descriptor in the agent's table.
static RINGS: AtomicU32 = AtomicU32::new(0);
static DOORBELL: AtomicI32 = AtomicI32::new(NONE);
const REQUEST_NONE: u32 = 0;
const REQUEST_PREPARE: u32 = 1;
const REQUEST_THAW: u32 = 2;
const REQUEST_FORGET: u32 = 3;
const REQUEST_DISCARD: u32 = 4;
const REQUEST_RETURN: u32 = 5;
/// The range that a change concerns.
static CHANGE_START: AtomicUsize = AtomicUsize::new(0);
static CHANGE_END: AtomicUsize = AtomicUsize::new(0);

/// How the program changes mappings of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Forget,
    Discard,
    Return,
}

/// While this lives no other thread changes mappings, none forks, and the agent takes nothing over. Signals
/// wait meanwhile: a handler that changed mappings itself, or stopped its thread for long, would never get,
/// or keep, the lock.
pub struct MappingChange(());

impl MappingChange {
    /// `None` if this thread has begun one already.
    pub fn begin() -> Option<Self> {
        if CHANGING.load(Ordering::Relaxed) == touch::this_thread() {
            return None;
        }
        let before = rampool_kernel::thread::hold_signals();
        lock(|| false);
        SIGNALS.store(before, Ordering::Relaxed);
        CHANGING.store(touch::this_thread(), Ordering::Relaxed);
        Some(Self(()))
    }

    /// For callers that cannot hold a Rust value: to be ended with [`MappingChange::resumed`].
    pub fn suspend(self) {
        std::mem::forget(self);
    }

    /// The one that this thread has suspended.
    pub fn resumed() -> Self {
        assert!(CHANGING.load(Ordering::Relaxed) == touch::this_thread(), "no change was begun");
        Self(())
    }
}

impl Drop for MappingChange {
    fn drop(&mut self) {
        let before = SIGNALS.load(Ordering::Relaxed);
        CHANGING.store(0, Ordering::Relaxed);
        LOCKED.store(false, Ordering::Release);
        rampool_kernel::thread::release_signals(before);
    }
}

/// Whether this process has an agent of its own.
pub fn has_agent() -> bool {
    PROCESS.load(Ordering::Relaxed) == std::process::id()
}

/// Tells the pager of a change, before it happens, and waits until it has drawn the consequences. The caller
/// has begun a [`MappingChange`].
pub fn change(what: Change, start: usize, end: usize) {
    CHANGE_START.store(start, Ordering::Relaxed);
    CHANGE_END.store(end, Ordering::Relaxed);
    request(match what {
        Change::Forget => REQUEST_FORGET,
        Change::Discard => REQUEST_DISCARD,
        Change::Return => REQUEST_RETURN,
    });
}

/// For the agent: while this lives, no mapping changes and no fork happens.
pub struct Standstill(());

impl Standstill {
    /// `None` while a thread of the program does either: it may be waiting for the agent.
    pub fn begin() -> Option<Self> {
        // Made only when it is held: to drop one is to give the lock back.
        LOCKED.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok().then(|| Self(()))
    }
}

impl Drop for Standstill {
    fn drop(&mut self) {
        LOCKED.store(false, Ordering::Release);
    }
}

/// What the pager should do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Request {
    Prepare,
    Thaw,
    Change(Change, usize, usize),
}

/// Once a pager is about to start, and before it has any memory: the doorbell needs a thread, and to make one
/// the C library and the dynamic linker read lists that may
/// lie in what is managed.
pub fn note_faults(faults: &FaultCatcher) {
    FOLLOWED.store(faults.follows_forks(), Ordering::Release);
    FEATURES.store(faults.features().0, Ordering::Release);
    if doorbell().is_none() && (!faults.follows_forks() || !faults.follows_mappings()) {
        match Doorbell::new(&RINGS) {
            Ok(doorbell) => DOORBELL.store(doorbell.leak(), Ordering::Release),
            Err(error) => end_process(settings(), &format!("the agent cannot be called: {error}")),
        }
    }
}

/// The parent's context, which a child inherits, cannot move pages.
pub fn inherits_copying() -> bool {
    FOLLOWED.load(Ordering::Acquire) && !Features(FEATURES.load(Ordering::Acquire)).has(Features::MOVE)
}

/// The doorbell that rings when there is a [`Request`].
pub fn doorbell() -> Option<RawFd> {
    let doorbell = DOORBELL.load(Ordering::Acquire);
    (doorbell != NONE).then_some(doorbell)
}

pub fn requested() -> Option<Request> {
    match REQUEST.load(Ordering::Acquire) {
        REQUEST_PREPARE => Some(Request::Prepare),
        REQUEST_THAW => Some(Request::Thaw),
        change => {
            let what = match change {
                REQUEST_FORGET => Change::Forget,
                REQUEST_DISCARD => Change::Discard,
                REQUEST_RETURN => Change::Return,
                _ => return None,
            };
            Some(Request::Change(
                what,
                CHANGE_START.load(Ordering::Relaxed),
                CHANGE_END.load(Ordering::Relaxed),
            ))
        }
    }
}

/// The pager has done what was asked.
pub fn request_done() {
    if let Some(doorbell) = doorbell() {
        let mut rings = 0u64;
        // SAFETY: an eventfd gives eight bytes.
        unsafe { libc::read(doorbell, (&raw mut rings).cast(), 8) };
    }
    REQUEST.store(REQUEST_NONE, Ordering::Release);
    // SAFETY: wakes waiters on a static word.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            REQUEST.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            i32::MAX,
        )
    };
}

/// Asks the pager and waits until it is done.
fn request(what: u32) {
    REQUEST.store(what, Ordering::Release);
    Doorbell::ring(&RINGS);
    let since = Instant::now();
    while REQUEST.load(Ordering::Acquire) == what {
        let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
        // SAFETY: waits on a static word, with a deadline.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                REQUEST.as_ptr(),
                libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                what,
                &raw const second,
            );
        }
        if since.elapsed() > DEADLINE {
            end_process(settings(), "the agent did not become ready for a fork");
        }
    }
}

/// Once, at start.
pub fn install_handlers(settings: &'static Settings) {
    if SETTINGS.set(settings).is_err() {
        return;
    }
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    let sockets = settings.ticket.servers().filter_map(|server| match &server.endpoint {
        Endpoint::Unix(path) => Some((path, libc::W_OK)),
        _ => None,
    });
    let needed = settings.key_file.iter().map(|key| (key, libc::R_OK)).chain(sockets);
    let named =
        needed.filter_map(|(path, access)| Some((CString::new(path.as_os_str().as_bytes()).ok()?, access)));
    let _ = NEEDED_TO_JOIN.set(named.collect());
    rampool_agent_register_child();
    register(Some(before), Some(after_in_parent), None);
}

/// Takes part in forks, in the child. Where the kernel does not tell of them, `librampool_agent_io.so` asks
/// for this before the program's allocator is first used, so that ours is the first handler to run in a
/// child: allocators (jemalloc) have handlers too, which touch what only we make whole again.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_register_child() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if !REGISTERED.swap(true, Ordering::AcqRel) {
        register(None, None, Some(after_in_child));
    }
}

type Handler = Option<unsafe extern "C" fn()>;

fn register(before: Handler, in_parent: Handler, in_child: Handler) {
    // SAFETY: the functions have the signature that pthread_atfork wants and live as long as the program.
    let rc = unsafe { libc::pthread_atfork(before, in_parent, in_child) };
    if rc != 0 {
        end_process(settings(), "the C library has no memory for the fork handlers");
    }
}

/// While this lives, no fork happens.
pub struct Transition(());

/// `None` where the agent's thread is to end instead: the thread that ends it has the lock.
pub fn begin_transition(is_to_end: impl Fn() -> bool) -> Option<Transition> {
    // Made only when it is held: to drop one is to give the lock back.
    lock(is_to_end).then(|| Transition(()))
}

impl Drop for Transition {
    fn drop(&mut self) {
        LOCKED.store(false, Ordering::Release);
    }
}

/// While this lives, nothing of this process is managed, none of its threads forks, and no signal comes that
/// could.
pub struct Unmanaged {
    signals: u64,
}

impl Unmanaged {
    /// `None` if there is no agent, or memory is managed.
    pub fn begin() -> Option<Self> {
        if !has_agent() {
            return None;
        }
        let signals = rampool_kernel::thread::hold_signals();
        lock(|| false);
        let unmanaged = Self { signals };
        (!PAGING.load(Ordering::Acquire) && !FORK_SERVED.load(Ordering::Acquire)).then_some(unmanaged)
    }
}

impl Drop for Unmanaged {
    fn drop(&mut self) {
        LOCKED.store(false, Ordering::Release);
        rampool_kernel::thread::release_signals(self.signals);
    }
}

impl Transition {
    /// The one that a forked child was born with.
    pub fn inherited() -> Self {
        assert!(LOCKED.load(Ordering::Acquire), "a child is born locked");
        Self(())
    }

    /// Memory is managed from now on.
    pub fn complete(self) {
        PAGING.store(true, Ordering::Release);
    }
}

/// False if it was given up instead.
fn lock(is_given_up: impl Fn() -> bool) -> bool {
    let since = Instant::now();
    while LOCKED.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        if is_given_up() {
            return false;
        }
        // SAFETY: gives the CPU up; no preconditions.
        unsafe { libc::sched_yield() };
        if since.elapsed() > DEADLINE {
            end_process(settings(), "the agent did not become ready for a fork");
        }
    }
    true
}

pub fn settings() -> Option<&'static Settings> {
    SETTINGS.get().copied()
}

/// False once this process has given away the rights (or has another root directory) without which a child
/// cannot join the servers, or may not write files as long as the list of pages that a child gets. On a
/// thread of the program.
fn child_can_join() -> bool {
    const LONGEST_LIST: u64 = 16 << 20;
    let mut files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills a structure of ours.
    if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut files) } == 0 && files.rlim_cur < LONGEST_LIST {
        return false;
    }
    // SAFETY: terminated names that live as long as the program.
    let allowed =
        |(path, access): &(CString, libc::c_int)| unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), *access, libc::AT_EACCESS) } == 0;
    NEEDED_TO_JOIN.get().is_none_or(|needed| needed.iter().all(allowed))
}

static NEXT_FORK: Next = Next::new(c"fork");
/// Threads in [`fork`], as [`touch::this_thread`] names them; 0: none.
static IN_FORK: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];
/// In a child: [`fork`] is to start the agent.
static OWED: AtomicBool = AtomicBool::new(false);

/// At start: looking a name up reads what the dynamic linker keeps on the program's heap.
pub fn prepare() {
    NEXT_FORK.find();
}

/// As the C library's function of this name. A child of which nothing is managed gets its agent here, when
/// all handlers of the program and its allocator have run. Forks inside the C library (`daemon`) do not come
/// here.
#[unsafe(no_mangle)]
pub extern "C" fn fork() -> libc::pid_t {
    let next = NEXT_FORK.find();
    // SAFETY: the C library's function of this name has this type.
    let next = unsafe { std::mem::transmute::<usize, Option<extern "C" fn() -> libc::pid_t>>(next) };
    let Some(next) = next else { return -1 };
    let thread = touch::this_thread();
    let free =
        |slot: &&AtomicUsize| slot.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    let slot = IN_FORK.iter().find(free);
    let child = next();
    if child == 0 {
        IN_FORK.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
        if OWED.swap(false, Ordering::Relaxed)
            && let Some(settings) = settings()
        {
            watch::begin(settings, None);
        }
    } else if let Some(slot) = slot {
        slot.store(0, Ordering::Relaxed);
    }
    child
}

/// Whether [`fork`] starts the agent of this child.
fn leave_to_fork() -> bool {
    let thread = touch::this_thread();
    let is_there = IN_FORK.iter().any(|slot| slot.load(Ordering::Relaxed) == thread);
    OWED.store(is_there, Ordering::Relaxed);
    is_there
}

extern "C" fn before() {
    lock(|| false);
    if !PAGING.load(Ordering::Acquire) {
        return;
    }
    let mut ends = [NONE; 2];
    // Without a line the child's faults are served here, where the kernel reports the fork.
    if !FOLLOWED.load(Ordering::Acquire) || child_can_join() {
        // SAFETY: socketpair fills two descriptors, or none.
        let rc = unsafe {
            libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, ends.as_mut_ptr())
        };
        if rc != 0 {
            ends = [NONE; 2];
        }
    }
    let [parent_end, child_end] = ends;
    FORKING_THREAD.store(rampool_kernel::thread::current(), Ordering::Relaxed);
    TAKEN.store(false, Ordering::Relaxed);
    CHILD_END.store(child_end, Ordering::Relaxed);
    PARENT_END.store(parent_end, Ordering::Release);
    if !FOLLOWED.load(Ordering::Acquire) {
        if parent_end == NONE {
            end_process(settings(), "no descriptors are left for a fork");
        }
        request(REQUEST_PREPARE);
        touch::what_fork_touches();
    }
}

extern "C" fn after_in_parent() {
    if PAGING.load(Ordering::Acquire) && !FOLLOWED.load(Ordering::Acquire) {
        request(REQUEST_THAW);
    }
    close(CHILD_END.swap(NONE, Ordering::AcqRel));
    let parent_end = PARENT_END.load(Ordering::Acquire);
    if parent_end != NONE {
        // Closed by the child once it has its memory, by its death, or already if there is no child.
        wait_for_hang_up(parent_end);
        PARENT_END.store(NONE, Ordering::Release);
        close(parent_end);
    }
    LOCKED.store(false, Ordering::Release);
}

fn wait_for_hang_up(line: RawFd) {
    let since = Instant::now();
    while since.elapsed() < DEADLINE {
        let mut poll = libc::pollfd { fd: line, events: 0, revents: 0 };
        // SAFETY: one descriptor. A signal handler of the program may interrupt the wait.
        if unsafe { libc::poll(&raw mut poll, 1, 1000) } > 0 {
            return;
        }
    }
}

extern "C" fn after_in_child() {
    // The only thread of this process, which was copied while the agent's thread may have been anywhere.
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    HEAP.abandon();
    rampool_kernel::memory::forget_own_after_fork();
    rampool_kernel::guard::forget_after_fork();
    rampool_kernel::thread::forget_after_fork();
    watch::forget_after_fork();
    REQUEST.store(REQUEST_NONE, Ordering::Release);
    rampool_kernel::segv::forget_after_fork();
    DOORBELL.store(NONE, Ordering::Release);
    let line = CHILD_END.swap(NONE, Ordering::AcqRel);
    close(PARENT_END.swap(NONE, Ordering::AcqRel));
    let Some(settings) = settings() else {
        LOCKED.store(false, Ordering::Release);
        return;
    };
    if FORK_SERVED.load(Ordering::Acquire) || (PAGING.load(Ordering::Acquire) && line == NONE) {
        // Forks of this process have nothing to hand on either: its server serves them.
        FORK_SERVED.store(true, Ordering::Release);
        PAGING.store(false, Ordering::Release);
        LOCKED.store(false, Ordering::Release);
        return;
    }
    if !PAGING.load(Ordering::Acquire) {
        LOCKED.store(false, Ordering::Release);
        // The allocator may be locked still, by its own handler. Where the program has brought one with it,
        // making a thread waits for that.
        if !leave_to_fork() {
            touch::without_program_heap(|| watch::begin(settings, None));
        }
        return;
    }
    // The agent releases the lock when it serves this process: an earlier fork would get no answer. Its
    // thread must not need memory that only it will serve.
    touch::without_program_heap(|| watch::begin(settings, Some(line)));
    close(line);
}

/// The parent's end of the line to the child whose fork event was just read, as a descriptor of the agent's
/// own.
pub fn take_line() -> Option<OwnedFd> {
    let fd = PARENT_END.load(Ordering::Acquire);
    if fd == NONE || TAKEN.swap(true, Ordering::AcqRel) {
        return None;
    }
    match rampool_kernel::descriptors::take_from(FORKING_THREAD.load(Ordering::Relaxed), fd) {
        Some(line) => Some(line),
        None => end_process(
            settings(),
            "the kernel does not let the agent have the line to a forked child (pidfd_getfd)",
        ),
    }
}

/// What a child said.
pub enum Line {
    Quiet,
    Asked,
    Closed,
}

pub fn listen(line: &OwnedFd) -> Line {
    let mut byte = [0u8; 1];
    // SAFETY: reads into a buffer of ours.
    let n = unsafe { libc::recv(line.as_raw_fd(), byte.as_mut_ptr().cast(), 1, libc::MSG_DONTWAIT) };
    match n {
        1 => Line::Asked,
        _ if n < 0 && rampool_kernel::last_errno() == libc::EAGAIN => Line::Quiet,
        _ => Line::Closed,
    }
}

/// Gives a child its context and its state. A child that is gone meanwhile is no error.
///
/// `uffd` is the child's context, if the kernel reported the fork.
pub fn hand_over(line: &OwnedFd, uffd: Option<&Uffd>, memory: &ChildMemory, region: &RegionTicket) {
    let mut text = region.to_string().into_bytes();
    text.push(b'\n');
    text.extend(memory.encode());
    if let Some(file) = memory_file(&text) {
        let context = uffd.map_or(file.as_raw_fd(), Uffd::raw_fd);
        send_descriptors(line, [context, file.as_raw_fd()]);
    }
}

fn memory_file(bytes: &[u8]) -> Option<OwnedFd> {
    use std::io::Write;
    // SAFETY: a constant, terminated name; the descriptor is new.
    let fd = unsafe { libc::memfd_create(c"rampool-child".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: as above.
    let mut file = unsafe { std::fs::File::from_raw_fd(fd) };
    file.write_all(bytes).ok()?;
    Some(file.into())
}

const CONTROL_BYTES: usize = 64;

/// Room for a control message with two descriptors, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

fn send_descriptors(line: &OwnedFd, descriptors: [RawFd; 2]) {
    let mut byte = [1u8];
    let mut control = Control([0; CONTROL_BYTES]);
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: the message points to locals that live across the call; the control buffer is larger than
    // CMSG_SPACE of two descriptors.
    unsafe {
        let mut message = std::mem::zeroed::<libc::msghdr>();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        let bytes = u32::try_from(size_of_val(&descriptors)).expect("eight");
        message.msg_controllen = libc::CMSG_SPACE(bytes) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(bytes) as usize;
        libc::CMSG_DATA(header).cast::<[RawFd; 2]>().write_unaligned(descriptors);
        libc::sendmsg(line.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL);
    }
}

/// In the child's agent: asks the parent for its state, and waits for it.
///
/// # Errors
/// Why it did not come, for people.
pub fn ask(line: &OwnedFd, settings: &Settings, thread: Option<CopyThread>) -> Result<Inheritance, String> {
    let mut byte = [1u8];
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: sends one byte of ours.
    unsafe { libc::send(line.as_raw_fd(), byte.as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
    let mut poll = libc::pollfd { fd: line.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let millis = i32::try_from(DEADLINE.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one descriptor of ours.
    if unsafe { libc::poll(&raw mut poll, 1, millis) } <= 0 {
        return Err("no answer in time".into());
    }
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: the message points to locals that live across the call, with their true sizes; the header is
    // checked before it is read.
    let [uffd, file] = unsafe {
        let mut message = std::mem::zeroed::<libc::msghdr>();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES;
        let n = libc::recvmsg(line.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if n != 1 || header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Err("the parent is gone".into());
        }
        let received = libc::CMSG_DATA(header).cast::<[RawFd; 2]>().read_unaligned();
        received.map(|fd| OwnedFd::from_raw_fd(fd))
    };
    use std::io::{Read, Seek};
    let mut file = std::fs::File::from(file);
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).map_err(|error| error.to_string())?;
    let end = bytes.iter().position(|b| *b == b'\n').ok_or("the list of pages is damaged")?;
    let region = std::str::from_utf8(&bytes[..end])
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or("the region's name is damaged")?;
    let memory = ChildMemory::decode(&bytes[end + 1..]).ok_or("the list of pages is damaged")?;
    let (faults, memory) = if FOLLOWED.load(Ordering::Acquire) {
        let features = Features(FEATURES.load(Ordering::Acquire));
        let faults = FaultCatcher::from_uffd(Uffd::from_fd(uffd), Scope::Everything, features, thread)
            .map_err(|error| error.to_string())?;
        (faults, memory)
    } else {
        let faults = watch::open_faults(settings)?;
        note_faults(&faults);
        // A mapping that another thread of the parent took away at the last moment is not here.
        let here = |span: &Span| faults.manage(span.start, span.end() - span.start).is_ok();
        let spans = memory.spans.iter().copied().filter(here).collect();
        (faults, ChildMemory { spans, absent: memory.absent })
    };
    Ok(Inheritance { faults, memory, region })
}

fn close(fd: RawFd) {
    if fd != NONE {
        // SAFETY: every caller owns the descriptor it passes.
        unsafe { libc::close(fd) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_did_not_get_the_lock_does_not_give_it_back() {
        let held = Standstill::begin().expect("it is free");
        for _ in 0..2 {
            assert!(Standstill::begin().is_none());
        }
        drop(held);
        let change = MappingChange::begin().expect("it is free");
        assert!(MappingChange::begin().is_none(), "this thread has begun one");
        assert!(Standstill::begin().is_none() && Standstill::begin().is_none());
        change.suspend();
        drop(MappingChange::resumed());
        assert!(Standstill::begin().is_some());
    }
}
