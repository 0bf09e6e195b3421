//! What the lower rungs need from the program's own threads: buffers of system calls made resident, changes of mappings told.
//!
//! `librampool_agent_io.so` replaces functions of the C library and is loaded only on those rungs; it calls the `rampool_agent_*` functions here. Nothing
//! here waits for anything but a page.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use rampool_sys::OS_PAGE_BYTES;
use rampool_sys::guard::Guard;
use rampool_sys::pagetable;

use crate::fork;

/// The thread that must not allocate from the program's heap just now; 0 for none.
static WITHOUT_HEAP: AtomicUsize = AtomicUsize::new(0);
/// The agent's thread; 0 before there is one.
static AGENT: AtomicUsize = AtomicUsize::new(0);
/// The main thread's control block: the kernel writes beside it (rseq), and cannot wait for it.
static MAIN_TCB: AtomicUsize = AtomicUsize::new(0);

/// At start, on the main thread.
pub fn note_main_thread() {
    #[cfg(target_arch = "x86_64")]
    {
        let tcb: usize;
        // SAFETY: on x86-64 Linux the first word of the thread control block, at %fs:0, is its own address (ELF TLS ABI).
        unsafe { std::arch::asm!("mov {}, fs:[0]", out(reg) tcb, options(nostack, readonly, preserves_flags)) };
        MAIN_TCB.store(tcb, Ordering::Relaxed);
    }
}

/// The main thread's static thread-local storage and control block, with room to spare.
pub fn main_thread_block() -> Option<(usize, usize)> {
    let tcb = MAIN_TCB.load(Ordering::Relaxed);
    (tcb != 0).then(|| (tcb.saturating_sub(32 << 10), tcb + 2 * OS_PAGE_BYTES))
}

/// Makes the managed pages of `[start, start + bytes)` resident, and writable for `write`, by touching them; true if there were any.
fn touch(start: usize, bytes: usize, write: bool) -> bool {
    let mut any = false;
    if is_agents_thread() {
        return false;
    }
    let mut page = start & !(OS_PAGE_BYTES - 1);
    let end = start.saturating_add(bytes);
    while page < end {
        if pagetable::mark(page) != 0 {
            any = true;
            let byte = std::ptr::with_exposed_provenance_mut::<u8>(page.max(start));
            if write {
                // SAFETY: a managed page is memory of the program, readable and writable; adding nothing, atomically, disturbs nobody.
                unsafe { AtomicU8::from_ptr(byte) }.fetch_add(0, Ordering::Relaxed);
            } else {
                // SAFETY: as above.
                unsafe { byte.read_volatile() };
            }
        }
        page += OS_PAGE_BYTES;
    }
    any
}

/// A system call is about to use a buffer: keeps it resident until [`rampool_agent_release`] gets what this returns. 0: nothing to release.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_guard(start: *const c_void, bytes: usize, write: c_int) -> usize {
    let start = start.expose_provenance();
    if bytes == 0 || !managed(start, bytes) {
        return 0;
    }
    let guard = Guard::new(start, bytes);
    touch(start, bytes, write != 0);
    guard.into_slot()
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_release(guard: usize) {
    drop(Guard::from_slot(guard));
}

/// After EFAULT: touches a buffer again; 0 if none of it is managed, so that the error is the program's own.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_touch(start: *const c_void, bytes: usize, write: c_int) -> c_int {
    c_int::from(touch(start.expose_provenance(), bytes, write != 0))
}

/// As [`rampool_agent_touch`], for a string that ends with a zero byte.
///
/// # Safety
/// `text` is such a string, or null, or an address where nothing is mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_agent_touch_text(text: *const c_char) -> c_int {
    let start = text.expose_provenance();
    if start == 0 || pagetable::mark(start) == 0 {
        return 0;
    }
    let mut at = text;
    // SAFETY: the caller's promise; each byte is read in turn, which brings its page.
    while unsafe { at.read_volatile() } != 0 {
        at = at.wrapping_add(1);
    }
    1
}

fn managed(start: usize, bytes: usize) -> bool {
    let end = start.saturating_add(bytes);
    let mut page = start & !(OS_PAGE_BYTES - 1);
    while page < end {
        if pagetable::mark(page) != 0 {
            return true;
        }
        page += OS_PAGE_BYTES;
    }
    false
}

/// The C library's memory for threads of the agent's: they must not need the program's heap, which they serve.
const BLOCKS_BYTES: usize = 64 << 20;
static BLOCKS: AtomicUsize = AtomicUsize::new(0);
static BLOCKS_USED: AtomicUsize = AtomicUsize::new(0);
const HEAD_BYTES: usize = 16;

/// At start: where `librampool_agent_io.so` is loaded, its malloc asks for these.
pub fn prepare_blocks() {
    // SAFETY: a constant, terminated name.
    let present = !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"rampool_agent_io".as_ptr()) }.is_null();
    if present && let Ok(mapping) = rampool_sys::memory::Mapping::anonymous(BLOCKS_BYTES) {
        BLOCKS.store(mapping.leak().0, Ordering::Release);
    }
}

/// The calling thread is the agent's from now on.
pub fn this_is_the_agents_thread() {
    AGENT.store(this_thread(), Ordering::Release);
}

/// Names a thread for as long as it lives, without a system call.
fn this_thread() -> usize {
    // SAFETY: no preconditions.
    usize::try_from(unsafe { libc::pthread_self() }).expect("an address")
}

fn is_agents_thread() -> bool {
    let (agent, spawner) = (AGENT.load(Ordering::Relaxed), WITHOUT_HEAP.load(Ordering::Relaxed));
    if agent == 0 && spawner == 0 {
        return false;
    }
    let current = this_thread();
    current == agent || current == spawner
}

/// Zeroed memory for the agent's threads, and for one that is just being made; null for all others. It is never used again: those threads live as long
/// as the process and allocate little.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_allocate(bytes: usize) -> *mut c_void {
    let blocks = BLOCKS.load(Ordering::Acquire);
    if blocks == 0 || bytes > BLOCKS_BYTES / 4 || !is_agents_thread() {
        return std::ptr::null_mut();
    }
    let room = HEAD_BYTES + bytes.next_multiple_of(HEAD_BYTES);
    let at = BLOCKS_USED.fetch_add(room, Ordering::AcqRel);
    if at + room > BLOCKS_BYTES {
        return std::ptr::null_mut();
    }
    let head = std::ptr::with_exposed_provenance_mut::<usize>(blocks + at);
    // SAFETY: inside our own mapping, in a part that nobody else was given.
    unsafe { head.write(bytes.max(1)) };
    head.wrapping_byte_add(HEAD_BYTES).cast()
}

/// The length of a block of [`rampool_agent_allocate`]; 0 for any other address.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_allocated(memory: *const c_void) -> usize {
    let (blocks, at) = (BLOCKS.load(Ordering::Relaxed), memory.expose_provenance());
    if blocks == 0 || !(blocks..blocks + BLOCKS_BYTES).contains(&at) {
        return 0;
    }
    // SAFETY: a block of ours, whose head lies before it.
    unsafe { std::ptr::with_exposed_provenance::<usize>(at - HEAD_BYTES).read() }
}

/// Runs `body` without using the program's heap, where `librampool_agent_io.so` is loaded.
pub fn without_program_heap(body: impl FnOnce()) {
    WITHOUT_HEAP.store(this_thread(), Ordering::Relaxed);
    body();
    WITHOUT_HEAP.store(0, Ordering::Relaxed);
}

/// How the program changes its mappings, where the kernel does not tell.
const CHANGE_FORGET: c_int = 0;
const CHANGE_DISCARD: c_int = 1;
const CHANGE_RETURN: c_int = 2;

/// Before a change of mappings, where the kernel does not tell of it: 0 `munmap` and the like, 1 the content is given up, 2 anything else (everything is
/// brought back first, and the range is the program's alone again).
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_changing(what: c_int, start: *const c_void, bytes: usize) {
    let start = start.expose_provenance() & !(OS_PAGE_BYTES - 1);
    let Some(end) = start.checked_add(bytes).map(|end| end.next_multiple_of(OS_PAGE_BYTES)) else { return };
    if !rampool_sys::segv::manages_any(start, end) || is_agents_thread() {
        return;
    }
    match what {
        CHANGE_FORGET => fork::change(fork::Change::Forget, start, end),
        CHANGE_DISCARD => fork::change(fork::Change::Discard, start, end),
        CHANGE_RETURN => {
            let guard = Guard::new(start, end - start);
            loop {
                touch(start, end - start, false);
                fork::change(fork::Change::Return, start, end);
                if !rampool_sys::segv::manages_any(start, end) {
                    break;
                }
            }
            drop(guard);
        }
        _ => {}
    }
}

/// `sigaction(SIGSEGV)` of the program, where the handler is ours: 0 if it was taken note of instead of done.
///
/// # Safety
/// As `sigaction`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_agent_sigaction(new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    let Some(previous) = rampool_sys::segv::previous_action() else { return -1 };
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(new) = new.as_ref() {
            rampool_sys::segv::chain_to(new);
        }
        if !old.is_null() {
            old.write(previous);
        }
    }
    0
}

/// What the C library touches in a child before our handler there runs: the streams, whose locks it resets, and the heads of malloc's heaps. The
/// pager evicts nothing meanwhile.
pub fn what_fork_touches() {
    /// Where `struct _IO_FILE` of the GNU C library has its chain and its lock; part of its ABI since 2.1.
    const CHAIN: usize = 104;
    const LOCK: usize = 136;
    const STREAM_BYTES: usize = 552;
    // SAFETY: a constant, terminated name.
    let all = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_IO_list_all".as_ptr()) }.cast::<usize>();
    if !all.is_null() {
        // SAFETY: the C library's own list. Another thread may change it meanwhile; streams are never unmapped, so at worst one is missed.
        let mut stream = unsafe { all.read_volatile() };
        for _ in 0..100_000 {
            if stream == 0 {
                break;
            }
            touch(stream, STREAM_BYTES, true);
            // SAFETY: as above.
            let (chain, lock) = unsafe {
                let field = |at: usize| std::ptr::with_exposed_provenance::<usize>(stream + at).read_volatile();
                (field(CHAIN), field(LOCK))
            };
            touch(lock, 16, true);
            stream = chain;
        }
    }
    const HEAP_BYTES: usize = 64 << 20;
    let _ = rampool_sys::maps::read_maps(|vma| {
        if vma.start % HEAP_BYTES == 0 {
            touch(vma.start, OS_PAGE_BYTES, true);
        }
    });
}
