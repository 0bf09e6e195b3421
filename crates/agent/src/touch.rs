//! What the lower fault modes need from the program's own threads: buffers of system calls made resident,
//! changes of mappings reported.
//!
//! `librampool_agent_io.so` replaces functions of the C library and is loaded only in those modes; it calls
//! the `rampool_agent_*` functions here. Nothing
//! here waits for anything but a page.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rampool_kernel::OS_PAGE_BYTES;
use rampool_kernel::guard::Guard;
use rampool_kernel::maps::VmaKind;
use rampool_kernel::pagetable;
use rampool_kernel::probe::FaultMode;
use rampool_kernel::thread::Stack;
use rampool_kernel::touch::{Use, managed};

use crate::exclusion::{MappingChange, has_agent, this_thread};
use crate::requests::{self, Change};

/// The thread that must not allocate from the program's heap just now; 0 for none.
static WITHOUT_HEAP: AtomicUsize = AtomicUsize::new(0);
/// The agent's thread; 0 before there is one.
static AGENT: AtomicUsize = AtomicUsize::new(0);
/// System calls on absent pages fail here.
static GUARDING: AtomicBool = AtomicBool::new(false);
/// The kernel does not report changed mappings here.
static TELLING: AtomicBool = AtomicBool::new(false);
/// The main thread's static thread-local storage and control block: the kernel writes next to it (rseq), and
/// cannot wait for it. With room to spare, as far as the mapping went when the program began.
static MAIN_BLOCK: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// At start, on the main thread.
pub fn note_main_thread() {
    #[cfg(target_arch = "x86_64")]
    {
        let tcb: usize;
        // SAFETY: on x86-64 Linux the first word of the thread control block, at %fs:0, is its own address
        // (ELF TLS ABI).
        unsafe {
            std::arch::asm!("mov {}, fs:[0]", out(reg) tcb, options(nostack, readonly, preserves_flags))
        };
        let vma = rampool_kernel::maps::Maps::open().ok().and_then(|maps| maps.at(tcb));
        let (start, end) = vma.map_or((0, usize::MAX), |vma| (vma.start, vma.end));
        MAIN_BLOCK[0].store(tcb.saturating_sub(32 << 10).max(start), Ordering::Relaxed);
        MAIN_BLOCK[1].store((tcb + 2 * OS_PAGE_BYTES).min(end), Ordering::Relaxed);
    }
}

/// The main thread's static thread-local storage and control block.
pub fn main_thread_block() -> Option<(usize, usize)> {
    let [start, end] = [0, 1].map(|bound: usize| MAIN_BLOCK[bound].load(Ordering::Relaxed));
    (end != 0).then_some((start, end))
}

/// As [`rampool_kernel::touch::touch`]; the agent's thread cannot wait for what it serves itself.
fn touch(start: usize, bytes: usize, how: Use, doubt: bool) -> bool {
    !is_agents_thread() && rampool_kernel::touch::touch(start, bytes, how, doubt)
}

fn use_of(write: c_int) -> Use {
    if write != 0 { Use::Write } else { Use::Read }
}

/// A system call is about to use a buffer: keeps it resident until [`rampool_agent_release`] gets what this
/// returns. 0: nothing to release.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_guard(start: *const c_void, bytes: usize, write: c_int) -> usize {
    let (start, how) = (start.expose_provenance(), use_of(write));
    // Before anything is managed the call may still be under way when that changes; if it only reads, it is
    // repeated then.
    if bytes == 0
        || start == 0
        || !GUARDING.load(Ordering::Relaxed)
        || (how == Use::Read && !managed(start, bytes))
        || is_agents_thread()
    {
        return 0;
    }
    let guard = Guard::new(start, bytes);
    touch(start, bytes, how, how == Use::Write && pagetable::has_marks());
    guard.into_slot()
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_release(guard: usize) {
    drop(Guard::from_slot(guard));
}

/// After EFAULT: touches a buffer again; 0 if none of it is managed, so that the error is the program's own.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_touch(start: *const c_void, bytes: usize, write: c_int) -> c_int {
    c_int::from(touch(start.expose_provenance(), bytes, use_of(write), true))
}

/// Memory that the allocator is about to hand out: touches what is managed of it.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_make_resident(start: *const c_void, bytes: usize) {
    touch(start.expose_provenance(), bytes, Use::Write, false);
}

/// As [`rampool_agent_touch`], for a string that ends with a zero byte.
///
/// # Safety
/// `text` is such a string, or null, or an address where nothing is mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_agent_touch_text(text: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(!is_agents_thread() && unsafe { rampool_kernel::touch::touch_text(text, true) })
}

/// The C library's memory for threads of the agent's: they must not need the program's heap, which they
/// serve.
const BLOCKS_BYTES: usize = 64 << 20;
static BLOCKS: AtomicUsize = AtomicUsize::new(0);
static BLOCKS_USED: AtomicUsize = AtomicUsize::new(REHEARSAL_BYTES);
/// The first blocks are for rehearsals, which use them over and over.
const REHEARSAL_BYTES: usize = 64 << 10;
/// How many bytes the rehearsal under way has used; no rehearsal is under way when all are.
static REHEARSED: AtomicUsize = AtomicUsize::new(REHEARSAL_BYTES);
/// The stack of rehearsals, once there is one.
static REHEARSAL_STACK: AtomicUsize = AtomicUsize::new(0);
const REHEARSAL_STACK_BYTES: usize = 256 << 10;
const HEAD_BYTES: usize = 16;

/// At start: where `librampool_agent_io.so` is loaded, its malloc asks for these, and below the full mode for
/// buffers to be kept.
pub fn prepare(fault_mode: FaultMode) {
    // SAFETY: a constant, terminated name.
    let present = !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"rampool_agent_io".as_ptr()) }.is_null();
    if present && let Ok(mapping) = rampool_kernel::memory::Mapping::anonymous(BLOCKS_BYTES) {
        BLOCKS.store(mapping.leak().0, Ordering::Release);
    }
    GUARDING.store(fault_mode != FaultMode::Full, Ordering::Release);
    TELLING.store(fault_mode == FaultMode::Segv, Ordering::Release);
}

/// The calling thread is one of the agent's from now on.
pub fn this_is_the_agents_thread() {
    AGENT.store(this_thread(), Ordering::Release);
}

fn is_agents_thread() -> bool {
    let (agent, spawner) = (AGENT.load(Ordering::Relaxed), WITHOUT_HEAP.load(Ordering::Relaxed));
    if agent == 0 && spawner == 0 {
        return false;
    }
    let current = this_thread();
    current == agent || current == spawner
}

/// Zeroed memory for the agent's threads, and for one that is just being made; null for all others. It is
/// never used again: those threads live as long as the process and allocate little.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_allocate(bytes: usize) -> *mut c_void {
    let blocks = BLOCKS.load(Ordering::Acquire);
    if blocks == 0 || bytes > BLOCKS_BYTES / 4 || !is_agents_thread() {
        return std::ptr::null_mut();
    }
    let room = HEAD_BYTES + bytes.next_multiple_of(HEAD_BYTES);
    let used = REHEARSED.load(Ordering::Relaxed);
    let rehearses = WITHOUT_HEAP.load(Ordering::Relaxed) == this_thread() && used + room <= REHEARSAL_BYTES;
    let at = if rehearses {
        REHEARSED.store(used + room, Ordering::Relaxed);
        used
    } else {
        BLOCKS_USED.fetch_add(room, Ordering::AcqRel)
    };
    if at + room > BLOCKS_BYTES {
        return std::ptr::null_mut();
    }
    let head = std::ptr::with_exposed_provenance_mut::<usize>(blocks + at);
    // SAFETY: inside our own mapping, in a part that was not given out, or that an earlier rehearsal is done
    // with.
    unsafe {
        if rehearses {
            head.cast::<u8>().write_bytes(0, room);
        }
        head.write(bytes.max(1));
    }
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

/// Buffers of stdio streams: the C library gives them to the kernel unseen, so they lie in memory that never
/// leaves.
const STREAM_BUFFERS: usize = 4096;
const STREAM_BUFFER_BYTES: usize = 16 << 10;
static STREAMS: AtomicUsize = AtomicUsize::new(0);
/// A bit for each buffer in use.
static STREAMS_USED: [AtomicU64; STREAM_BUFFERS / 64] = [const { AtomicU64::new(0) }; STREAM_BUFFERS / 64];

/// Made when first needed: `librampool_agent_io.so` may be started before this library is.
fn streams() -> Option<usize> {
    let known = STREAMS.load(Ordering::Acquire);
    if known != 0 {
        return Some(known);
    }
    let new = rampool_kernel::memory::Mapping::anonymous(STREAM_BUFFERS * STREAM_BUFFER_BYTES).ok()?;
    match STREAMS.compare_exchange(0, new.start(), Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Some(new.leak().0),
        Err(other) => Some(other),
    }
}

/// A buffer of `*bytes` bytes, which is set; null where there is none left.
///
/// # Safety
/// `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_agent_stream_buffer(bytes: *mut usize) -> *mut c_void {
    let Some(start) = streams() else { return std::ptr::null_mut() };
    for (index, word) in STREAMS_USED.iter().enumerate() {
        let mut used = word.load(Ordering::Relaxed);
        while used != u64::MAX {
            let bit = used.trailing_ones();
            match word.compare_exchange_weak(used, used | 1 << bit, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    // SAFETY: the caller's promise.
                    unsafe { bytes.write(STREAM_BUFFER_BYTES) };
                    return std::ptr::with_exposed_provenance_mut(
                        start + (index * 64 + bit as usize) * STREAM_BUFFER_BYTES,
                    );
                }
                Err(now) => used = now,
            }
        }
    }
    std::ptr::null_mut()
}

/// A stream that may have had such a buffer is closed. Any other address is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_stream_closed(buffer: *const c_void) {
    let start = STREAMS.load(Ordering::Acquire);
    let Some(offset) = buffer
        .addr()
        .checked_sub(start)
        .filter(|offset| start != 0 && *offset < STREAM_BUFFERS * STREAM_BUFFER_BYTES)
    else {
        return;
    };
    let index = offset / STREAM_BUFFER_BYTES;
    STREAMS_USED[index / 64].fetch_and(!(1 << (index % 64)), Ordering::AcqRel);
}

/// Runs `body` without using the program's heap, where `librampool_agent_io.so` is loaded.
pub fn without_program_heap(body: impl FnOnce()) {
    WITHOUT_HEAP.store(this_thread(), Ordering::Relaxed);
    body();
    WITHOUT_HEAP.store(0, Ordering::Relaxed);
}

/// How the program changes its mappings, where the kernel does not report it.
const CHANGE_FORGET: c_int = 0;
const CHANGE_DISCARD: c_int = 1;
const CHANGE_RETURN: c_int = 2;

/// Before a change of mappings, where the kernel does not report it: 0 `munmap` and the like, 1 the content
/// is given up, 2 anything else (everything is brought back first, and the range is the program's alone
/// again). If this is not 0, the agent takes nothing over until [`rampool_agent_changed`] is called, which is
/// to be done by the same thread once the system call is over.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_changing(what: c_int, start: *const c_void, bytes: usize) -> c_int {
    let start = start.expose_provenance();
    // Any such call fails with EINVAL when the address is not that of a page.
    let Some(end) = start.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(OS_PAGE_BYTES))
    else {
        return 0;
    };
    if !TELLING.load(Ordering::Relaxed)
        || !start.is_multiple_of(OS_PAGE_BYTES)
        || start == end
        || is_agents_thread()
        || !has_agent()
    {
        return 0;
    }
    let managed = || rampool_kernel::segv::manages_any(start, end);
    let change = match what {
        CHANGE_FORGET | CHANGE_DISCARD => {
            let change = MappingChange::begin();
            if managed() {
                requests::change(
                    if what == CHANGE_FORGET { Change::Forget } else { Change::Discard },
                    start,
                    end,
                );
            }
            change
        }
        CHANGE_RETURN => loop {
            // Many pages may have to be fetched, which must not happen under the lock.
            let _guard = managed().then(|| {
                let guard = Guard::new(start, end - start);
                touch(start, end - start, Use::Read, false);
                guard
            });
            let change = MappingChange::begin();
            if managed() {
                requests::change(Change::Return, start, end);
            }
            if !managed() {
                break change;
            }
        },
        _ => None,
    };
    change.map_or(0, |change| {
        change.suspend();
        1
    })
}

/// The system call is over that [`rampool_agent_changing`] announced. Does not change `errno`.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_changed() {
    drop(MappingChange::resumed());
}

/// `sigaction` of the program, where the handler of the signal is ours: 0 if it was taken note of instead of
/// done.
///
/// # Safety
/// As `sigaction`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_agent_sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the caller's promise.
    if unsafe { rampool_kernel::chain::take_note(signal, new, old) } { 0 } else { -1 }
}

/// Starts a thread and lets it end: what the C library reads and writes for that (lists of its own and of the
/// dynamic linker, which may lie next to the program's memory and be managed with it) is resident and
/// writable then.
fn rehearse_the_agents_start() {
    if BLOCKS.load(Ordering::Acquire) == 0 {
        return;
    }
    let start = match REHEARSAL_STACK.load(Ordering::Relaxed) {
        0 => {
            let Ok(mapping) = rampool_kernel::memory::Mapping::anonymous(REHEARSAL_STACK_BYTES) else {
                return;
            };
            let start = mapping.leak().0;
            REHEARSAL_STACK.store(start, Ordering::Relaxed);
            start
        }
        start => start,
    };
    REHEARSED.store(0, Ordering::Relaxed);
    // Without a thread here there will be none in the child either, and that is said there.
    without_program_heap(|| {
        // SAFETY: leaked above, and used by one fork at a time.
        _ = unsafe { rampool_kernel::thread::rehearse(Stack { start, bytes: REHEARSAL_STACK_BYTES }) }
    });
    REHEARSED.store(REHEARSAL_BYTES, Ordering::Relaxed);
}

/// What the C library touches in a child before it has its memory: the streams, whose locks it resets, the
/// heads of malloc's heaps, the control blocks of all threads, which it takes off its lists, and all that the
/// start of the agent's thread takes. The pager evicts nothing meanwhile.
pub fn what_fork_touches() {
    /// More than a control block is long, before and behind the list in it.
    const CONTROL_BLOCK_BYTES: usize = 4096;
    rampool_kernel::thread::each_robust_list(|list| {
        touch(list - CONTROL_BLOCK_BYTES, 2 * CONTROL_BLOCK_BYTES, Use::Write, false);
    });
    rehearse_the_agents_start();
    extern "C" fn look(_: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
        0
    }
    // SAFETY: reads the linker's lists from end to end.
    unsafe { libc::dl_iterate_phdr(Some(look), std::ptr::null_mut()) };
    /// Where `struct _IO_FILE` of the GNU C library has its chain and its lock; part of its ABI since 2.1.
    const CHAIN: usize = 104;
    const LOCK: usize = 136;
    const STREAM_BYTES: usize = 552;
    // SAFETY: a constant, terminated name.
    let all = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_IO_list_all".as_ptr()) }.cast::<usize>();
    if !all.is_null() {
        // SAFETY: the C library's own list. Another thread may change it meanwhile; streams are never
        // unmapped, so at worst one is missed.
        let mut stream = unsafe { all.read_volatile() };
        for _ in 0..100_000 {
            if stream == 0 {
                break;
            }
            touch(stream, STREAM_BYTES, Use::Write, false);
            // SAFETY: as above.
            let (chain, lock) = unsafe {
                let field =
                    |at: usize| std::ptr::with_exposed_provenance::<usize>(stream + at).read_volatile();
                (field(CHAIN), field(LOCK))
            };
            touch(lock, 16, Use::Write, false);
            stream = chain;
        }
    }
    const HEAP_BYTES: usize = 64 << 20;
    // The linker's first lists (of modules with thread-local storage) lie where the heap begins.
    const FIRST_BYTES: usize = 64 << 10;
    let _ = rampool_kernel::maps::read_maps(|vma| {
        if vma.kind == VmaKind::Heap {
            touch(vma.start, FIRST_BYTES.min(vma.bytes()), Use::Write, false);
        }
        if vma.start % HEAP_BYTES == 0 {
            touch(vma.start, OS_PAGE_BYTES, Use::Write, false);
        }
    });
}
