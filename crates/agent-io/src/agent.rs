//! The agent's side: `librampool_agent.so`, found by name when this library is loaded. Without it every
//! function here does nothing, unless the program pages memory of its own. Then the pager in the program
//! offers the same functions ([`rampool_agent_io_help`]).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

struct Symbol(AtomicPtr<c_void>);

impl Symbol {
    const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }
    fn find(&self, name: &CStr) {
        // SAFETY: a terminated name.
        self.0.store(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }, Ordering::Release);
    }
}

static GUARD: Symbol = Symbol::new();
static RELEASE: Symbol = Symbol::new();
static TOUCH: Symbol = Symbol::new();
static TOUCH_TEXT: Symbol = Symbol::new();
static ALLOCATE: Symbol = Symbol::new();
static ALLOCATED: Symbol = Symbol::new();
static CHANGING: Symbol = Symbol::new();
static CHANGED: Symbol = Symbol::new();
static SIGACTION: Symbol = Symbol::new();
static MAKE_RESIDENT: Symbol = Symbol::new();
static STREAM_BUFFER: Symbol = Symbol::new();
static STREAM_CLOSED: Symbol = Symbol::new();

pub fn find() {
    GUARD.find(c"rampool_agent_guard");
    RELEASE.find(c"rampool_agent_release");
    TOUCH.find(c"rampool_agent_touch");
    TOUCH_TEXT.find(c"rampool_agent_touch_text");
    ALLOCATE.find(c"rampool_agent_allocate");
    ALLOCATED.find(c"rampool_agent_allocated");
    CHANGING.find(c"rampool_agent_changing");
    CHANGED.find(c"rampool_agent_changed");
    SIGACTION.find(c"rampool_agent_sigaction");
    MAKE_RESIDENT.find(c"rampool_agent_make_resident");
    STREAM_BUFFER.find(c"rampool_agent_stream_buffer");
    STREAM_CLOSED.find(c"rampool_agent_stream_closed");
}

/// The agent's function, if there is one.
macro_rules! agent {
    ($symbol:ident, fn($($arg:ty),*) $(-> $ret:ty)?) => {{
        let found = $symbol.0.load(Ordering::Acquire);
        // SAFETY: the agent's function of this name has this type.
        (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(found) })
    }};
}

/// Keeps a buffer resident while it lives.
pub struct Guard(usize);

impl Guard {
    pub fn new(start: *const c_void, bytes: usize, write: bool) -> Self {
        // SAFETY: the agent looks at addresses, and touches those that it manages.
        Self(
            agent!(GUARD, fn(*const c_void, usize, c_int) -> usize)
                .map_or(0, |call| unsafe { call(start, bytes, c_int::from(write)) }),
        )
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.0 != 0
            && let Some(call) = agent!(RELEASE, fn(usize))
        {
            // SAFETY: the number came from the agent and is given back once.
            unsafe { call(self.0) };
        }
    }
}

/// True if part of the range is managed; it has been touched then.
pub fn touch(start: *const c_void, bytes: usize, write: bool) -> bool {
    // SAFETY: as for `Guard::new`.
    agent!(TOUCH, fn(*const c_void, usize, c_int) -> c_int)
        .is_some_and(|call| unsafe { call(start, bytes, c_int::from(write)) } != 0)
}

/// As [`touch`], for a terminated string.
pub fn touch_text(text: *const c_char) -> bool {
    // SAFETY: a string of the program's; the agent does not look at it unless it manages the page.
    agent!(TOUCH_TEXT, fn(*const c_char) -> c_int).is_some_and(|call| unsafe { call(text) } != 0)
}

/// Zeroed memory for the agent's own threads, and for one that is being created; null for the program's
/// threads.
pub fn allocate(bytes: usize) -> *mut c_void {
    // SAFETY: no preconditions.
    agent!(ALLOCATE, fn(usize) -> *mut c_void).map_or(std::ptr::null_mut(), |call| unsafe { call(bytes) })
}

/// The length of a block from [`allocate`]; 0 for any other address.
pub fn allocated(memory: *const c_void) -> usize {
    // SAFETY: the agent looks at the block only if it is its own.
    agent!(ALLOCATED, fn(*const c_void) -> usize).map_or(0, |call| unsafe { call(memory) })
}

#[derive(Clone, Copy)]
pub enum Change {
    Forget = 0,
    Discard = 1,
    Return = 2,
}

/// While this lives, the agent does not change the program's mappings.
#[must_use]
pub struct Changing(bool);

/// Call before the program changes a mapping. Drop the result after the change.
pub fn changing(what: Change, start: *const c_void, bytes: usize) -> Changing {
    let call = agent!(CHANGING, fn(c_int, *const c_void, usize) -> c_int);
    // SAFETY: the agent looks at addresses only.
    Changing(call.is_some_and(|call| unsafe { call(what as c_int, start, bytes) } != 0))
}

impl Drop for Changing {
    fn drop(&mut self) {
        if self.0
            && let Some(call) = agent!(CHANGED, fn())
        {
            // SAFETY: this thread told the agent of the change, and does so once.
            unsafe { call() };
        }
    }
}

/// True if a handler of ours runs before the program's, which has then been recorded.
pub fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> bool {
    let call = agent!(SIGACTION, fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int);
    // SAFETY: the program's own pointers, as sigaction(2) takes them.
    call.is_some_and(|call| unsafe { call(signal, new, old) } == 0)
}

/// Whether threads wait for pages in a handler of SIGBUS.
static SIGBUS_TOO: AtomicBool = AtomicBool::new(false);

/// Whether no thread may block this signal.
pub fn keeps_open(signal: c_int) -> bool {
    signal == libc::SIGSEGV || signal == libc::SIGBUS && SIGBUS_TOO.load(Ordering::Relaxed)
}

/// A program that pages memory of its own offers functions like the agent's, for that memory. Any thread may
/// call them, and they do nothing for other addresses. `sigbus`: not 0 if threads wait for pages in a handler
/// of SIGBUS. Returns 0 if there is an agent, which takes precedence.
///
/// # Safety
/// The functions have the types that `rampool_agent_guard`, `rampool_agent_release`, `rampool_agent_touch`,
/// `rampool_agent_touch_text` and `rampool_agent_sigaction` have, and stay as long as the process lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_agent_io_help(
    guard: *mut c_void,
    release: *mut c_void,
    touch: *mut c_void,
    touch_text: *mut c_void,
    sigaction: *mut c_void,
    sigbus: c_int,
) -> c_int {
    // The agent offers functions for which there is no substitute.
    if !ALLOCATED.0.load(Ordering::Acquire).is_null() {
        return 0;
    }
    if sigbus != 0 {
        SIGBUS_TOO.store(true, Ordering::Relaxed);
    }
    for (symbol, found) in [
        (&RELEASE, release),
        (&GUARD, guard),
        (&TOUCH, touch),
        (&TOUCH_TEXT, touch_text),
        (&SIGACTION, sigaction),
    ] {
        symbol.0.store(found, Ordering::Release);
    }
    1
}

/// Makes memory that is about to be handed out resident, where it is managed.
pub fn make_resident(memory: *const c_void, bytes: usize) {
    if let Some(call) = agent!(MAKE_RESIDENT, fn(*const c_void, usize)) {
        // SAFETY: memory that the allocator has just given.
        unsafe { call(memory, bytes) };
    }
}

/// A buffer that is never paged out, and its length.
pub fn stream_buffer() -> Option<(*mut c_char, usize)> {
    let mut bytes = 0;
    // SAFETY: the agent writes the length.
    let buffer =
        agent!(STREAM_BUFFER, fn(*mut usize) -> *mut c_void).map(|call| unsafe { call(&raw mut bytes) })?;
    (!buffer.is_null()).then_some((buffer.cast(), bytes))
}

/// The stream that had `buffer` is closed.
pub fn stream_closed(buffer: *const c_void) {
    if let Some(call) = agent!(STREAM_CLOSED, fn(*const c_void)) {
        // SAFETY: the agent looks at the address only.
        unsafe { call(buffer) };
    }
}

/// Makes the agent's fork handler the first to run in children. Called before [`find`].
pub fn register_child() {
    let register = Symbol::new();
    register.find(c"rampool_agent_register_child");
    if let Some(call) = agent!(register, fn()) {
        // SAFETY: no preconditions.
        unsafe { call() };
    }
}
