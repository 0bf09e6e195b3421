//! Threads on stacks of our own, and where they run.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::memory::{MapError, Mapping};

/// Threads of [`spawn_detached`], from before they begin until they end.
static OURS: AtomicU32 = AtomicU32::new(0);

/// In a forked child: threads are not inherited.
pub fn forget_after_fork() {
    OURS.store(0, Ordering::Relaxed);
    spare::forget();
}

/// How many threads of ours there are.
#[must_use]
pub fn ours() -> u32 {
    OURS.load(Ordering::Relaxed)
}

/// Whether the program has one thread now, apart from ours and the calling one. False where
/// /proc does not say.
#[must_use]
pub fn program_has_one() -> bool {
    use std::os::unix::fs::MetadataExt;
    let threads =
        std::fs::metadata("/proc/self/task").map_or(u64::MAX, |task| task.nlink().saturating_sub(2));
    threads <= u64::from(ours().max(1)) + 1
}

/// None of our threads is there any more, also for the kernel.
#[must_use]
pub fn ours_are_gone() -> bool {
    OURS.load(Ordering::Acquire) == 0 && spare::are_gone()
}

/// The GNU C library's count of threads. Where `main` has ended with `pthread_exit`, a thread that ends and
/// finds itself the only one in the count calls `exit(0)`. Threads of ours take themselves out of the count,
/// or that would never happen. `None` where the C library does not show it, as before version 2.34.
fn threads_of_the_c_library() -> Option<&'static AtomicU32> {
    const NOT_LOOKED: usize = 0;
    const NONE: usize = 1;
    static FOUND: AtomicUsize = AtomicUsize::new(NOT_LOOKED);
    let mut found = FOUND.load(Ordering::Acquire);
    if found == NOT_LOOKED {
        // SAFETY: a terminated name; looking a symbol up has no preconditions.
        let count = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__nptl_nthreads".as_ptr()) };
        found = if count.is_null() { NONE } else { count.expose_provenance() };
        FOUND.store(found, Ordering::Release);
    }
    // SAFETY: the C library's variable of this name is an `unsigned int` that it changes atomically, and it
    // is never unloaded.
    (found != NONE).then(|| unsafe { &*std::ptr::with_exposed_provenance::<AtomicU32>(found) })
}

/// Runs `body` on a new thread whose stack (and with it its thread control block) is `stack`, with all
/// signals blocked.
///
/// In a process whose heap we manage, a pager thread must not live on memory that it serves: its stack is a
/// mapping of our own. The thread is detached. Its stack is never unmapped: the next thread with the same
/// stack size reuses it, once the kernel reports that this one is gone.
///
/// # Errors
/// When the kernel refuses the memory or the thread.
pub fn spawn_detached(stack_bytes: usize, body: Box<dyn FnOnce() + Send>) -> Result<Stack, SpawnError> {
    extern "C" fn enter(argument: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: `spawn_detached` leaked exactly this box for exactly this thread.
        let Start { body, stack } = *unsafe { Box::from_raw(argument.cast::<Start>()) };
        // Neither the kernel nor the C library tells the program's threads from ours. The program has others:
        // at least the creator of this one.
        let counted = threads_of_the_c_library();
        if let Some(count) = counted {
            count.fetch_sub(1, Ordering::AcqRel);
        }
        body();
        if let Some(count) = counted {
            count.fetch_add(1, Ordering::AcqRel);
        }
        spare::leave(stack, current());
        OURS.fetch_sub(1, Ordering::Release);
        std::ptr::null_mut()
    }
    // Looked up on this thread: the new one may have to do without the program's heap.
    let _ = threads_of_the_c_library();
    let stack = if let Some(stack) = spare::take(stack_bytes) {
        stack
    } else {
        let (start, bytes) = Mapping::anonymous(stack_bytes)?.leak();
        Stack { start, bytes }
    };
    let argument = Box::into_raw(Box::new(Start { body, stack }));
    OURS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the stack mapping is leaked, so it outlives the thread; the thread that had it before is gone.
    match unsafe { create(stack, libc::PTHREAD_CREATE_DETACHED, enter, argument.cast()) } {
        Ok(_) => Ok(stack),
        Err(errno) => {
            // SAFETY: the thread was not made, so the box is still ours alone.
            drop(unsafe { Box::from_raw(argument) });
            OURS.fetch_sub(1, Ordering::Relaxed);
            spare::leave(stack, spare::NO_THREAD);
            Err(SpawnError::Thread { errno })
        }
    }
}

/// What a thread of [`spawn_detached`] begins with.
struct Start {
    body: Box<dyn FnOnce() + Send>,
    stack: Stack,
}

/// Stacks whose threads have ended, or are about to. A fixed table, because it is written where nothing may
/// be allocated.
mod spare {
    use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

    use super::Stack;

    const ROWS: usize = 64;
    const FREE: u32 = 0;
    /// A row that is being filled or emptied.
    const BUSY: u32 = u32::MAX;
    /// In place of a thread's number where no thread uses the stack.
    pub(super) const NO_THREAD: u32 = u32::MAX - 1;
    /// Each row's thread, `FREE` or `BUSY`.
    static THREADS: [AtomicU32; ROWS] = [const { AtomicU32::new(FREE) }; ROWS];
    static STARTS: [AtomicUsize; ROWS] = [const { AtomicUsize::new(0) }; ROWS];
    static BYTES: [AtomicUsize; ROWS] = [const { AtomicUsize::new(0) }; ROWS];

    /// `thread` leaves its stack; where no row is free, it stays mapped and unused.
    pub(super) fn leave(stack: Stack, thread: u32) {
        for row in 0..ROWS {
            if THREADS[row].compare_exchange(FREE, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                STARTS[row].store(stack.start, Ordering::Relaxed);
                BYTES[row].store(stack.bytes, Ordering::Relaxed);
                THREADS[row].store(thread, Ordering::Release);
                return;
            }
        }
    }

    /// An unused stack of so many bytes.
    pub(super) fn take(bytes: usize) -> Option<Stack> {
        for row in 0..ROWS {
            let thread = THREADS[row].load(Ordering::Acquire);
            if matches!(thread, FREE | BUSY)
                || BYTES[row].load(Ordering::Relaxed) != bytes
                || !is_gone(thread)
            {
                continue;
            }
            if THREADS[row].compare_exchange(thread, BUSY, Ordering::Acquire, Ordering::Relaxed).is_err() {
                continue;
            }
            let stack = Stack {
                start: STARTS[row].load(Ordering::Relaxed),
                bytes: BYTES[row].load(Ordering::Relaxed),
            };
            if stack.bytes != bytes || !is_gone(thread) {
                // Emptied and filled again since it was looked at.
                THREADS[row].store(thread, Ordering::Release);
                continue;
            }
            THREADS[row].store(FREE, Ordering::Release);
            return Some(stack);
        }
        None
    }

    /// All threads that have left their stacks.
    pub(super) fn are_gone() -> bool {
        THREADS.iter().all(|thread| match thread.load(Ordering::Acquire) {
            FREE => true,
            BUSY => false,
            thread => is_gone(thread),
        })
    }

    /// The kernel has no such thread of this process any more: nothing runs on its stack. Another one that
    /// got the number meanwhile only keeps the stack from being used.
    fn is_gone(thread: u32) -> bool {
        if thread == NO_THREAD {
            return true;
        }
        // SAFETY: system calls without pointers; signal 0 is never sent.
        let rc = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) };
        rc != 0 && crate::last_errno() == libc::ESRCH
    }

    /// In a forked child, which may not have inherited the stacks.
    pub(super) fn forget() {
        THREADS.iter().for_each(|thread| thread.store(FREE, Ordering::Release));
    }
}

/// Lets no signal reach this thread but those that its own instructions raise; returns which it had blocked,
/// for [`release_signals`].
#[must_use]
pub fn hold_signals() -> u64 {
    let raised = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
    let all = raised.iter().fold(u64::MAX, |set, signal| set & !(1 << (signal - 1)));
    let mut before = 0u64;
    set_signals(libc::SIG_BLOCK, all, &mut before);
    before
}

/// Blocks exactly those signals.
pub fn release_signals(before: u64) {
    set_signals(libc::SIG_SETMASK, before, std::ptr::null_mut());
}

/// While it lives, no signal reaches this thread but those that its own instructions raise. For a thread that
/// holds a lock which another thread needs to serve the page that a signal handler may touch, and around the
/// start of a thread that must never run a handler.
#[derive(Debug)]
pub struct SignalsHeld {
    before: u64,
    /// It concerns this thread.
    _here: std::marker::PhantomData<*const ()>,
}

impl SignalsHeld {
    #[must_use]
    pub fn new() -> Self {
        Self { before: hold_signals(), _here: std::marker::PhantomData }
    }

    /// Lets signals in during `wait`.
    pub fn released<T>(&self, wait: impl FnOnce() -> T) -> T {
        release_signals(self.before);
        let result = wait();
        let _ = hold_signals();
        result
    }
}

impl Default for SignalsHeld {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for SignalsHeld {
    fn drop(&mut self) {
        release_signals(self.before);
    }
}

/// The kernel's own call: the C library's function may be another library's by now.
fn set_signals(how: i32, set: u64, before: *mut u64) {
    // SAFETY: the kernel's set of signals is one word; `before` is null, or the caller's.
    let rc =
        unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const set, before, size_of::<u64>()) };
    assert!(rc == 0, "a valid set of signals is refused");
}

/// Makes a thread as [`spawn_detached`] does, one that does nothing, and waits for its end: what the C
/// library needs to make one was in use a moment ago.
///
/// # Errors
/// When the kernel refuses the thread.
///
/// # Safety
/// `stack` is mapped, not used otherwise, and never unmapped.
pub unsafe fn rehearse(stack: Stack) -> Result<(), SpawnError> {
    extern "C" fn nothing(_: *mut libc::c_void) -> *mut libc::c_void {
        std::ptr::null_mut()
    }
    // SAFETY: the caller's promise; the thread is waited for once.
    unsafe {
        let id = create(stack, libc::PTHREAD_CREATE_JOINABLE, nothing, std::ptr::null_mut())
            .map_err(|errno| SpawnError::Thread { errno })?;
        libc::pthread_join(id, std::ptr::null_mut());
    }
    Ok(())
}

/// # Safety
/// `stack` outlives the thread, and is not used otherwise.
unsafe fn create(
    stack: Stack,
    state: i32,
    enter: extern "C" fn(*mut libc::c_void) -> *mut libc::c_void,
    argument: *mut libc::c_void,
) -> Result<libc::pthread_t, i32> {
    // SAFETY: attr is initialised before use and destroyed after; signals are restored on the calling thread.
    unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        let mut old = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let mut attr = std::mem::zeroed::<libc::pthread_attr_t>();
        libc::pthread_attr_init(&raw mut attr);
        libc::pthread_attr_setstack(
            &raw mut attr,
            std::ptr::with_exposed_provenance_mut(stack.start),
            stack.bytes,
        );
        libc::pthread_attr_setdetachstate(&raw mut attr, state);
        let mut id = std::mem::zeroed::<libc::pthread_t>();
        let rc = libc::pthread_create(&raw mut id, &raw const attr, enter, argument);
        libc::pthread_attr_destroy(&raw mut attr);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
        if rc == 0 { Ok(id) } else { Err(rc) }
    }
}

/// Calls `each` with the address of the list of robust mutexes of every thread of this process: in the GNU C
/// library it lies within the thread's control block. No allocation.
pub fn each_robust_list(mut each: impl FnMut(usize)) {
    // SAFETY: a constant, terminated path; a non-negative result is a new descriptor with no other owner.
    let directory = unsafe {
        let fd =
            libc::open(c"/proc/self/task".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC);
        if fd < 0 {
            return;
        }
        OwnedFd::from_raw_fd(fd)
    };
    /// Where `struct linux_dirent64` has its length and its name.
    const LENGTH: usize = 16;
    const NAME: usize = 19;
    let mut entries = [0u8; 2048];
    loop {
        // SAFETY: the buffer is ours and of the stated length.
        let n = unsafe {
            libc::syscall(libc::SYS_getdents64, directory.as_raw_fd(), entries.as_mut_ptr(), entries.len())
        };
        let Some(n) = usize::try_from(n).ok().filter(|n| *n > 0) else { return };
        let mut rest = &entries[..n];
        while rest.len() > NAME {
            let length = usize::from(u16::from_ne_bytes([rest[LENGTH], rest[LENGTH + 1]]));
            let (entry, others) = rest.split_at(length.clamp(NAME, rest.len()));
            rest = others;
            let name = entry[NAME..].split(|b| *b == 0).next().unwrap_or_default();
            let Some(thread) = number(name).and_then(|number| i32::try_from(number).ok()) else { continue };
            let (mut head, mut bytes) = (0usize, 0usize);
            // SAFETY: the kernel writes two words that live across the call. A thread that is gone has no
            // list.
            if unsafe { libc::syscall(libc::SYS_get_robust_list, thread, &raw mut head, &raw mut bytes) } == 0
                && head != 0
            {
                each(head);
            }
        }
    }
}

/// Where a thread of ours has its stack.
#[derive(Clone, Copy, Debug)]
pub struct Stack {
    pub start: usize,
    pub bytes: usize,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    #[error(transparent)]
    Memory(#[from] MapError),
    #[error("the kernel refuses a thread (errno {errno})")]
    Thread { errno: i32 },
}

/// Lets the calling thread run on `cpu` only.
///
/// # Errors
/// The errno.
pub fn pin_to_cpu(cpu: usize) -> Result<(), i32> {
    pin_to(&[cpu])
}

/// Lets the calling thread, and those that it starts from now on, run on these CPUs only. No allocation, so
/// also between fork and exec.
///
/// # Errors
/// The errno: EINVAL if the machine has none of them, or the process may not use any.
pub fn pin_to(cpus: &[usize]) -> Result<(), i32> {
    if cpus.iter().any(|&cpu| cpu >= libc::CPU_SETSIZE as usize) {
        return Err(libc::EINVAL);
    }
    // SAFETY: cpu_set_t is plain data, and only bits inside of it are set; pid 0 is the calling thread.
    let rc = unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        for &cpu in cpus {
            libc::CPU_SET(cpu, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if rc == 0 { Ok(()) } else { Err(crate::last_errno()) }
}

/// The niceness of the calling thread.
#[must_use]
pub fn niceness() -> i32 {
    // SAFETY: no preconditions; on Linux this is the calling thread's own.
    unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
}

/// Changes the niceness of the calling thread. Nothing changes where the kernel refuses that.
pub fn be_nice(niceness: i32) {
    // SAFETY: no preconditions; on Linux this is the calling thread's own.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, niceness) };
}

/// Asks the scheduler for short time slices: when the calling thread wakes up, it need not wait for the end
/// of another thread's long one. Its share of the CPU does not grow. Kernels before 6.12 do not know this,
/// and nothing changes.
pub fn ask_for_short_slices() {
    /// `struct sched_attr` of the kernel, as far as all versions have it.
    #[repr(C)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    /// The shortest that the kernel gives, in nanoseconds.
    const SLICE_NS: u64 = 100_000;
    let bytes = u32::try_from(size_of::<Attributes>()).expect("a small structure");
    let mut now = Attributes {
        size: bytes,
        policy: 0,
        flags: 0,
        nice: 0,
        priority: 0,
        runtime: 0,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the kernel writes at most the stated size into a structure that lives across the call; thread 0
    // is the calling one.
    let known = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut now, bytes, 0) } == 0;
    let normal = u32::try_from(libc::SCHED_OTHER).expect("a small number");
    if known && now.policy == normal {
        now.runtime = SLICE_NS;
        // SAFETY: as above; everything but the slice stays as the kernel has just said it is. A refusal is no
        // harm.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const now, 0) };
    }
}

/// Nanoseconds that the other threads of this process have run so far, those included that have ended. No
/// allocation; the kernel adds up all threads.
#[must_use]
pub fn others_cpu_ns() -> u64 {
    let read = |clock| {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a valid place, written by the call.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
    };
    // This thread's first: it goes on meanwhile.
    let own = read(libc::CLOCK_THREAD_CPUTIME_ID);
    read(libc::CLOCK_PROCESS_CPUTIME_ID).saturating_sub(own)
}

/// CPUs the calling thread may run on.
#[must_use]
pub fn allowed_cpus() -> Vec<usize> {
    allowed_cpus_of(0)
}

/// CPUs that the first thread of the process that started this one may run on.
#[must_use]
pub fn allowed_cpus_of_parent() -> Vec<usize> {
    // SAFETY: no preconditions.
    allowed_cpus_of(unsafe { libc::getppid() })
}

/// 0 is the calling thread.
fn allowed_cpus_of(thread: libc::pid_t) -> Vec<usize> {
    // SAFETY: cpu_set_t is plain data and of the stated size.
    unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        if libc::sched_getaffinity(thread, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return vec![0];
        }
        (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).collect()
    }
}

/// Lets the calling thread run on every CPU again.
///
/// # Errors
/// The errno.
pub fn unpin() -> Result<(), i32> {
    // SAFETY: cpu_set_t is plain data; the kernel ignores CPUs that the machine does not have or the process
    // may not use.
    let rc = unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        for cpu in 0..libc::CPU_SETSIZE as usize {
            libc::CPU_SET(cpu, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if rc == 0 { Ok(()) } else { Err(crate::last_errno()) }
}

/// The CPU on which a thread of this process ran last. No allocation.
#[must_use]
pub fn cpu_of(thread: u32) -> Option<usize> {
    let mut text = [0u8; STAT_BYTES];
    Some(Stat::read(&open_of(thread, b"/stat\0")?, &mut text)?.cpu)
}

/// The exit code of the main thread if it and all others have ended, but for those of [`spawn_detached`].
///
/// Opens a file each time: a process may have few descriptors.
#[must_use]
pub fn only_ours_are_left() -> Option<i32> {
    // The process's, which is two directories above the thread's.
    let file = crate::procfs::open("../../stat").ok()?;
    let mut text = [0u8; 2 * STAT_BYTES];
    let text = read_again(&file.into(), &mut text)?;
    let stat = Stat::parse(text)?;
    // The main thread stays, as a zombie, for as long as there are others.
    let alone = stat.state == b'Z' && stat.threads == OURS.load(Ordering::Relaxed) + 1;
    // The last field, written as wait(2) gives it.
    let status = number(text.rsplit(|b| *b == b' ').next()?)?;
    alone.then(|| libc::WEXITSTATUS(i32::try_from(status).unwrap_or(0)))
}

const STAT_BYTES: usize = 512;

/// What `/proc/self/task/<thread>/stat` says.
struct Stat {
    state: u8,
    threads: u32,
    cpu: usize,
}

impl Stat {
    fn read(file: &OwnedFd, text: &mut [u8]) -> Option<Self> {
        Self::parse(read_again(file, text)?)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let after_name = text.iter().rposition(|b| *b == b')')? + 2;
        // Fields 3, 20 and 39 of proc_pid_stat(5).
        let mut fields = text[after_name..].split(|b| *b == b' ');
        let state = *fields.next()?.first()?;
        let threads = u32::try_from(number(fields.nth(16)?)?).ok()?;
        let cpu = usize::try_from(number(fields.nth(18)?)?).ok()?;
        Some(Self { state, threads, cpu })
    }
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.trim_end().parse().ok()
}

/// A file of /proc, read from its beginning.
fn read_again<'a>(file: &OwnedFd, text: &'a mut [u8]) -> Option<&'a [u8]> {
    // SAFETY: the buffer is ours and of the stated length.
    let n = unsafe { libc::pread(file.as_raw_fd(), text.as_mut_ptr().cast(), text.len(), 0) };
    Some(&text[..usize::try_from(n).ok()?])
}

/// Opens `/proc/self/task/<thread><name>`. No allocation.
fn open_of(thread: u32, name: &[u8]) -> Option<OwnedFd> {
    let mut path = [0u8; 48];
    let prefix = b"/proc/self/task/";
    path[..prefix.len()].copy_from_slice(prefix);
    let mut digits = [0u8; 10];
    let mut first = digits.len();
    let mut rest = thread;
    loop {
        first -= 1;
        digits[first] = b'0' + u8::try_from(rest % 10).expect("a digit");
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    let number = &digits[first..];
    path[prefix.len()..prefix.len() + number.len()].copy_from_slice(number);
    path[prefix.len() + number.len()..][..name.len()].copy_from_slice(name);
    // SAFETY: the path is terminated; a non-negative result is a new descriptor with no other owner.
    unsafe {
        let fd = libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
    }
}

/// The kernel's number of the calling thread.
#[must_use]
pub fn current() -> u32 {
    // SAFETY: gettid has no preconditions.
    let id = unsafe { libc::syscall(libc::SYS_gettid) };
    u32::try_from(id).expect("thread numbers are positive")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_has_its_control_block_found() {
        let count = || {
            let mut found = Vec::new();
            each_robust_list(|list| found.push(list));
            found
        };
        // SAFETY: no preconditions.
        let own = usize::try_from(unsafe { libc::pthread_self() }).unwrap();
        assert!(count().iter().any(|list| (own..own + 4096).contains(list)), "the calling thread's");
        let (to, from) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            // SAFETY: no preconditions.
            to.send(usize::try_from(unsafe { libc::pthread_self() }).unwrap()).unwrap();
            let _ = ended.recv();
        });
        let block = from.recv().unwrap();
        assert!(count().iter().any(|list| (block..block + 4096).contains(list)), "another thread's");
        drop(end);
        other.join().unwrap();
    }

    #[test]
    fn what_another_thread_has_run_counts_even_when_it_has_ended() {
        const RUN_NS: u64 = 3_000_000;
        let before = others_cpu_ns();
        let runs = || {
            let own = || {
                let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                // SAFETY: a valid place, written by the call.
                unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
                u64::try_from(time.tv_sec * 1_000_000_000 + time.tv_nsec).unwrap()
            };
            while own() < RUN_NS {}
        };
        std::thread::spawn(runs).join().unwrap();
        assert!(others_cpu_ns() - before >= RUN_NS);
    }

    #[test]
    fn stacks_of_threads_that_have_ended_are_used_again() {
        // Longer than any other test's, and more threads than there may be mappings of our own in a process.
        const BYTES: usize = 320 << 10;
        let (to, from) = std::sync::mpsc::channel();
        let mut stacks = std::collections::BTreeSet::new();
        for n in 0..600 {
            let to = to.clone();
            let stack = spawn_detached(BYTES, Box::new(move || to.send((n, current())).unwrap())).unwrap();
            let (body, thread) = from.recv().unwrap();
            assert_eq!(body, n);
            stacks.insert(stack.start);
            // Gone in a moment, and not before it has left its stack.
            while std::path::Path::new(&format!("/proc/self/task/{thread}")).exists() {
                std::thread::yield_now();
            }
        }
        assert_eq!(stacks.len(), 1, "one after the other");
    }

    #[test]
    fn threads_at_the_same_time_have_stacks_of_their_own() {
        const BYTES: usize = 384 << 10;
        for _ in 0..50 {
            let (to, from) = std::sync::mpsc::channel();
            let wait = std::sync::Arc::new(std::sync::Barrier::new(9));
            let stacks: std::collections::BTreeSet<usize> = (0..8)
                .map(|n| {
                    let (to, wait) = (to.clone(), std::sync::Arc::clone(&wait));
                    let body = move || {
                        wait.wait();
                        to.send(n).unwrap();
                    };
                    spawn_detached(BYTES, Box::new(body)).unwrap().start
                })
                .collect();
            assert_eq!(stacks.len(), 8);
            wait.wait();
            assert_eq!(from.iter().take(8).sum::<i32>(), 28);
        }
    }

    #[test]
    fn a_stack_serves_for_one_rehearsal_after_the_other() {
        let (start, bytes) = Mapping::anonymous(256 << 10).unwrap().leak();
        for _ in 0..3 {
            // SAFETY: leaked, and not used otherwise.
            unsafe { rehearse(Stack { start, bytes }) }.unwrap();
        }
        // The thread control block lies at the stack's end: a thread has been there.
        // SAFETY: our own memory.
        let used = unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(start + bytes - 4096), 4096)
        };
        assert!(used.iter().any(|byte| *byte != 0));
    }

    #[test]
    fn short_slices_change_neither_policy_nor_niceness() {
        // SAFETY: system calls without pointers, about the calling thread.
        let look = || unsafe { (libc::sched_getscheduler(0), libc::getpriority(libc::PRIO_PROCESS, 0)) };
        // SAFETY: as above; a thread may always make itself nicer.
        assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, look().1 + 1) }, 0);
        let before = look();
        ask_for_short_slices();
        assert_eq!(look(), before);
    }

    #[test]
    fn a_thread_is_bound_to_cpus_that_there_are_and_no_others() {
        let all = allowed_cpus();
        pin_to(&all[..1]).unwrap();
        assert_eq!(allowed_cpus(), all[..1]);
        for none in [&[][..], &[usize::MAX]] {
            assert_eq!(pin_to(none), Err(libc::EINVAL));
        }
        assert_eq!(allowed_cpus(), all[..1]);
        pin_to(&all).unwrap();
        assert_eq!(allowed_cpus(), all);
    }

    #[test]
    fn a_pinned_thread_is_seen_on_its_cpu() {
        let cpu = *allowed_cpus().last().unwrap();
        pin_to_cpu(cpu).unwrap();
        assert_eq!(cpu_of(current()), Some(cpu));
        unpin().unwrap();
        assert!(allowed_cpus().contains(&cpu));
    }
}
