//! System calls on absent pages of regions, below the full mode, where `librampool_agent_io.so` is loaded
//! (`LD_PRELOAD`).
//!
//! The kernel cannot wait for a page there. That library interposes the C library's functions, and asks the
//! manager of the memory to make it resident before a call and to keep it so meanwhile. In programs that
//! `rampool run` started that is the agent; here it is offered by the program's own pagers.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use rampool_kernel::guard::Guard;
use rampool_kernel::touch::{Use, managed, touch, touch_text};

/// Registers a pager that needs this help. Not in a forked child, which has no regions below the full mode.
static GIVEN: AtomicBool = AtomicBool::new(false);

thread_local! {
    static UNHELPED: Cell<bool> = const { Cell::new(false) };
}

/// While this lives, the system calls of this thread are not looked at: it uses no region, or is a pager,
/// which must not wait for itself.
#[derive(Debug)]
pub struct Unhelped {
    before: bool,
    of_this_thread: PhantomData<*const ()>,
}

impl Unhelped {
    #[must_use]
    pub fn begin() -> Self {
        Self { before: UNHELPED.replace(true), of_this_thread: PhantomData }
    }
}

impl Drop for Unhelped {
    fn drop(&mut self) {
        UNHELPED.set(self.before);
    }
}

/// Offers help to the library that stands before the C library's functions; whether it is there, and takes
/// it. `sigbus`: threads wait for pages in a handler of SIGBUS.
pub(crate) fn offer(sigbus: bool) -> bool {
    const HELP: &CStr = c"rampool_agent_io_help";
    // SAFETY: a constant, terminated name.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, HELP.as_ptr()) };
    if found.is_null() {
        return false;
    }
    type Help = unsafe extern "C" fn(
        *const c_void,
        *const c_void,
        *const c_void,
        *const c_void,
        *const c_void,
        c_int,
    ) -> c_int;
    // SAFETY: the library's function of this name has this type, and the functions have the types that it
    // wants.
    let taken = unsafe {
        std::mem::transmute::<*mut c_void, Help>(found)(
            guard as *const c_void,
            release as *const c_void,
            make_resident as *const c_void,
            make_text_resident as *const c_void,
            sigaction as *const c_void,
            c_int::from(sigbus),
        )
    };
    if taken != 0 {
        GIVEN.store(true, Ordering::Release);
    }
    taken != 0
}

/// In a forked child: its regions are not here, and calls of the parent's other threads are not its own.
pub(crate) fn forget_after_fork() {
    GIVEN.store(false, Ordering::Release);
    rampool_kernel::guard::forget_after_fork();
}

fn helps() -> bool {
    GIVEN.load(Ordering::Acquire) && !UNHELPED.get()
}

fn use_of(write: c_int) -> Use {
    if write != 0 { Use::Write } else { Use::Read }
}

/// A call is about to use a buffer: what of it lies in regions is resident, and stays, until [`release`] gets
/// what this returns. 0: nothing to release.
extern "C" fn guard(start: *const c_void, bytes: usize, write: c_int) -> usize {
    let start = start.expose_provenance();
    if !helps() || !managed(start, bytes) {
        return 0;
    }
    let guard = Guard::new(start, bytes);
    touch(start, bytes, use_of(write), false);
    guard.into_slot()
}

extern "C" fn release(guard: usize) {
    drop(Guard::from_slot(guard));
}

/// After EFAULT: touches a buffer again; 0 if none of it lies in a region, so that the error is the program's
/// own.
extern "C" fn make_resident(start: *const c_void, bytes: usize, write: c_int) -> c_int {
    c_int::from(helps() && touch(start.expose_provenance(), bytes, use_of(write), false))
}

/// As [`make_resident`], for a string that ends with a zero byte.
unsafe extern "C" fn make_text_resident(text: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(helps() && unsafe { touch_text(text, false) })
}

/// The program sets its action for a signal: 0 if the handler is ours, and this was taken note of instead.
unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the caller's promise.
    if GIVEN.load(Ordering::Acquire) && unsafe { rampool_kernel::chain::take_note(signal, new, old) } {
        0
    } else {
        -1
    }
}
