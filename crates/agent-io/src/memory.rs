//! malloc, and changes of mappings.
//!
//! The C library hands memory that it allocates for itself to the kernel without a visible call. So fresh
//! memory of moderate size is touched, and thus resident, before it is handed out. The agent is told of
//! changes of mappings first, and acts on them where the kernel does not report them.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::agent::{self, Change, touch};
use crate::real::real;

/// Larger memory is the program's, not the C library's own.
const TOUCHED: usize = 64 << 10;

/// Called before the allocator's first use and before looking for symbols that may not exist: the dynamic
/// linker allocates its error message, and frees it at the next request.
pub fn first_use() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.load(Ordering::Relaxed) && !DONE.swap(true, Ordering::AcqRel) {
        let _ = (next_malloc(), next_free());
        agent::register_child();
    }
}

fn next_malloc() -> unsafe extern "C" fn(usize) -> *mut c_void {
    real!(c"malloc", fn(usize) -> *mut c_void)
}

fn next_free() -> unsafe extern "C" fn(*mut c_void) {
    real!(c"free", fn(*mut c_void) -> ())
}

fn fresh(memory: *mut c_void, bytes: usize) -> *mut c_void {
    if !memory.is_null() && bytes <= TOUCHED {
        agent::make_resident(memory, bytes);
    }
    memory
}

/// As `malloc`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    first_use();
    let own = agent::allocate(bytes);
    if !own.is_null() {
        return own;
    }
    // SAFETY: the caller's own argument.
    fresh(unsafe { next_malloc()(bytes) }, bytes)
}

/// As `free`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(memory: *mut c_void) {
    // The agent's threads allocate little, and live as long as the program: memory that they free stays.
    if agent::allocated(memory) == 0 {
        // SAFETY: the caller's own argument.
        unsafe { next_free()(memory) }
    }
}

/// As `realloc`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(memory: *mut c_void, bytes: usize) -> *mut c_void {
    first_use();
    let had = agent::allocated(memory);
    let own = if had > 0 || memory.is_null() { agent::allocate(bytes) } else { std::ptr::null_mut() };
    if !own.is_null() {
        // SAFETY: both are blocks of at least this length.
        unsafe { own.cast::<u8>().copy_from_nonoverlapping(memory.cast(), had.min(bytes)) };
        return own;
    }
    if had > 0 {
        // Another thread's block grows in this one, into the program's heap.
        // SAFETY: as above.
        unsafe {
            let moved = malloc(bytes);
            if !moved.is_null() {
                moved.cast::<u8>().copy_from_nonoverlapping(memory.cast(), had.min(bytes));
            }
            return moved;
        }
    }
    let next = real!(c"realloc", fn(*mut c_void, usize) -> *mut c_void);
    // SAFETY: the caller's own arguments.
    fresh(unsafe { next(memory, bytes) }, bytes)
}

/// As `calloc`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    first_use();
    let bytes = count.saturating_mul(size);
    let own = agent::allocate(bytes);
    if !own.is_null() {
        return own;
    }
    let next = real!(c"calloc", fn(usize, usize) -> *mut c_void);
    // SAFETY: the caller's own arguments.
    fresh(unsafe { next(count, size) }, bytes)
}

/// As `malloc_trim`. It always reports that there was nothing to trim, because trimming would change mappings
/// unseen.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(_keep: usize) -> c_int {
    0
}

/// As `munmap`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(start: *mut c_void, bytes: usize) -> c_int {
    let _changing = agent::changing(Change::Forget, start, bytes);
    let next = real!(c"munmap", fn(*mut c_void, usize) -> c_int);
    // SAFETY: the caller's own arguments.
    unsafe { next(start, bytes) }
}

macro_rules! maps {
    ($($name:ident, $text:literal;)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(start: *mut c_void, bytes: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void {
            let replaces = flags & libc::MAP_FIXED != 0 && flags & libc::MAP_FIXED_NOREPLACE != libc::MAP_FIXED_NOREPLACE;
            let _changing = replaces.then(|| agent::changing(Change::Forget, start, bytes));
            let next = real!($text, fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void);
            // SAFETY: the caller's own arguments.
            unsafe { next(start, bytes, protection, flags, fd, offset) }
        }
    )*};
}

maps! {
    mmap, c"mmap";
    mmap64, c"mmap64";
}

/// As `mremap`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    start: *mut c_void,
    old: usize,
    new: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let _from = agent::changing(Change::Return, start, old);
    let _to = (flags & libc::MREMAP_FIXED != 0).then(|| agent::changing(Change::Forget, to, new));
    let next = real!(c"mremap", fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void);
    // SAFETY: the caller's own arguments.
    unsafe { next(start, old, new, flags, to) }
}

/// As `mprotect`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(start: *mut c_void, bytes: usize, protection: c_int) -> c_int {
    let _changing = agent::changing(Change::Return, start, bytes);
    let next = real!(c"mprotect", fn(*mut c_void, usize, c_int) -> c_int);
    // SAFETY: the caller's own arguments.
    unsafe { next(start, bytes, protection) }
}

/// Linux 6.13.
const MADV_GUARD_INSTALL: c_int = 102;

/// As `madvise`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(start: *mut c_void, bytes: usize, advice: c_int) -> c_int {
    // MADV_FREE allows the kernel to take the content at any time from now on. Dropping it at once is
    // correct, and the only way to know when it happens.
    let advice = if advice == libc::MADV_FREE { libc::MADV_DONTNEED } else { advice };
    if matches!(advice, libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE)
        && touch(start, bytes, advice == libc::MADV_POPULATE_WRITE)
    {
        return 0;
    }
    if advice == MADV_GUARD_INSTALL {
        // The kernel would not say what it takes away. Kernels without guards give this answer, and the C
        // library closes its stacks in another way then.
        // SAFETY: the calling thread's own errno.
        unsafe { *libc::__errno_location() = libc::EINVAL };
        return -1;
    }
    let gives_up = matches!(advice, libc::MADV_DONTNEED | libc::MADV_REMOVE);
    let _changing = gives_up.then(|| agent::changing(Change::Discard, start, bytes));
    let next = real!(c"madvise", fn(*mut c_void, usize, c_int) -> c_int);
    // SAFETY: the caller's own arguments.
    unsafe { next(start, bytes, advice) }
}
