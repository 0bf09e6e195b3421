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
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use rampool_net::transport::Endpoint;
use rampool_run::settings::Settings;

use crate::exclusion::{
    DEADLINE, FORK_SERVED, PAGING, PROCESS, keep_settings, lock_for_fork, settings, this_thread, unlock,
};
use crate::faults::follows_forks;
use crate::heap::HEAP;
use crate::line::{CHILD_END, FORKING_THREAD, NONE, PARENT_END, TAKEN, close};
use crate::next::Next;
use crate::report::end_process;
use crate::{requests, touch, watch};

/// The files that a child opens to join the servers, and the access that it needs.
static NEEDED_TO_JOIN: OnceLock<Vec<(CString, libc::c_int)>> = OnceLock::new();

/// Once, at start.
pub fn install_handlers(settings: &'static Settings) {
    if !keep_settings(settings) {
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
/// Threads in [`fork`], as [`this_thread`] names them; 0: none.
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
    let thread = this_thread();
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
    let thread = this_thread();
    let is_there = IN_FORK.iter().any(|slot| slot.load(Ordering::Relaxed) == thread);
    OWED.store(is_there, Ordering::Relaxed);
    is_there
}

extern "C" fn before() {
    lock_for_fork();
    if !PAGING.load(Ordering::Acquire) {
        return;
    }
    let mut ends = [NONE; 2];
    // Without a line the child's faults are served here, where the kernel reports the fork.
    if !follows_forks() || child_can_join() {
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
    if !follows_forks() {
        if parent_end == NONE {
            end_process(settings(), "no descriptors are left for a fork");
        }
        requests::prepare_fork();
        touch::what_fork_touches();
    }
}

extern "C" fn after_in_parent() {
    if PAGING.load(Ordering::Acquire) && !follows_forks() {
        requests::thaw();
    }
    close(CHILD_END.swap(NONE, Ordering::AcqRel));
    let parent_end = PARENT_END.load(Ordering::Acquire);
    if parent_end != NONE {
        // Closed by the child once it has its memory, by its death, or already if there is no child.
        wait_for_hang_up(parent_end);
        PARENT_END.store(NONE, Ordering::Release);
        close(parent_end);
    }
    unlock();
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
    rampool_kernel::segv::forget_after_fork();
    requests::forget_after_fork();
    let line = CHILD_END.swap(NONE, Ordering::AcqRel);
    close(PARENT_END.swap(NONE, Ordering::AcqRel));
    let Some(settings) = settings() else {
        unlock();
        return;
    };
    if FORK_SERVED.load(Ordering::Acquire) || (PAGING.load(Ordering::Acquire) && line == NONE) {
        // Forks of this process have nothing to hand on either: its server serves them.
        FORK_SERVED.store(true, Ordering::Release);
        PAGING.store(false, Ordering::Release);
        unlock();
        return;
    }
    if !PAGING.load(Ordering::Acquire) {
        unlock();
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
