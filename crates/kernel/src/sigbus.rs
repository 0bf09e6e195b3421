//! Page faults served by the very thread that meets them.
//!
//! A userfaultfd context with [`Features::SIGBUS`](crate::uffd::Features::SIGBUS) sends no event about a
//! fault: the thread gets SIGBUS, and its handler calls the manager of the page. No other thread is woken,
//! and none has to be. All signals are blocked meanwhile. The handler runs on the thread's own stack, because
//! alternate stacks are too small for what is done there. A SIGBUS at any other address, of another kind (a
//! poisoned page, the end of a file), or sent by a process goes to the previous handler of the signal.
//!
//! What this cannot do: serve a system call on an absent page (it fails with EFAULT), or a thread that blocks
//! SIGBUS (the kernel ends the process).

use std::sync::atomic::{AtomicPtr, Ordering};

use crate::OS_PAGE_BYTES;
use crate::chain::{Chain, is_write};
use crate::pagetable::{self, Mark};

/// Pagers of this kind in one process.
pub const SERVERS: usize = 8;
/// In the table of pages: of the first of them. Between the marks of SIGSEGV's and of userfaultfd's.
const FIRST_MARK: Mark = 0xf4;

/// A manager that brings pages.
pub trait Serve: Sync {
    /// A thread, the calling one, needs the page of `address`. Returns when the access shall be repeated;
    /// false if the page is not managed after all. Called in a signal handler, but only ever for an access of
    /// the program to managed memory.
    fn serve(&self, address: usize, write: bool) -> bool;

    /// Returns when every change of mappings that was announced has its marks in the table of pages.
    fn finish_changes(&self);
}

/// A server as the handler finds it; never freed.
struct Entry(&'static dyn Serve);

static SERVING: [AtomicPtr<Entry>; SERVERS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; SERVERS];
pub(crate) static CHAIN: Chain = Chain::new(libc::SIGBUS);
/// Stands for a slot that is taken while its server is being made.
static RESERVED: Entry = Entry(&NoServer);

struct NoServer;

impl Serve for NoServer {
    fn serve(&self, _: usize, _: bool) -> bool {
        false
    }

    fn finish_changes(&self) {}
}

/// A pager's place among those of its process, given back when dropped.
#[derive(Debug)]
pub struct Slot(usize);

/// Why there is no slot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SigbusError {
    #[error("more than {SERVERS} pagers that serve faults in the faulting thread")]
    TooMany,
    #[error("the SIGBUS handler cannot be installed (errno {0})")]
    Handler(i32),
}

impl Slot {
    /// Takes a slot, and puts our handler before the program's.
    ///
    /// # Errors
    /// [`SigbusError`].
    pub fn take() -> Result<Self, SigbusError> {
        // SAFETY: plain data that sigfillset fills.
        let all = unsafe {
            let mut all = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            all
        };
        CHAIN.install(on_sigbus, libc::SA_RESTART, &all).map_err(SigbusError::Handler)?;
        let reserved = std::ptr::from_ref(&RESERVED).cast_mut();
        let free = |slot: &AtomicPtr<Entry>| {
            slot.compare_exchange(std::ptr::null_mut(), reserved, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        SERVING.iter().position(free).map(Self).ok_or(SigbusError::TooMany)
    }

    /// What pages of this pager are marked with.
    #[must_use]
    pub fn mark(&self) -> Mark {
        FIRST_MARK + Mark::try_from(self.0).expect("few")
    }

    /// From now on `server` is called.
    pub fn serve_by(&self, server: &'static dyn Serve) {
        SERVING[self.0].store(Box::into_raw(Box::new(Entry(server))), Ordering::Release);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // A handler may be looking at the entry: it stays.
        SERVING[self.0].store(std::ptr::null_mut(), Ordering::Release);
    }
}

/// In a forked child: the pagers of the parent are not here.
pub fn forget_after_fork() {
    for slot in &SERVING {
        slot.store(std::ptr::null_mut(), Ordering::Release);
    }
}

extern "C" fn on_sigbus(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    const BUS_ADRERR: i32 = 2;
    // SAFETY: the kernel gives a valid siginfo and context; si_addr is meaningful for faults. The errno of
    // the interrupted code is saved and put back.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        let address = (*info).si_addr().addr();
        if !((*info).si_code == BUS_ADRERR && serve(address, is_write(context))) {
            CHAIN.foreign(info, context);
        }
        *errno = saved;
    }
}

fn serve(address: usize, write: bool) -> bool {
    let address = address & !(OS_PAGE_BYTES - 1);
    let by_mark = || {
        let number = pagetable::mark(address).checked_sub(FIRST_MARK).map(usize::from);
        number.and_then(server).is_some_and(|server| server.serve(address, write))
    };
    by_mark() || {
        // The program may have moved or replaced a mapping, and gone on before the table is updated.
        servers().for_each(Serve::finish_changes);
        by_mark()
    }
}

fn server(number: usize) -> Option<&'static dyn Serve> {
    // SAFETY: a non-null entry is never freed.
    unsafe { SERVING.get(number)?.load(Ordering::Acquire).as_ref() }.map(|entry| entry.0)
}

fn servers() -> impl Iterator<Item = &'static dyn Serve> {
    (0..SERVERS).filter_map(server)
}
