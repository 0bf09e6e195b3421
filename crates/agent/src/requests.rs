//! Requests of the program's threads to the agent's thread, where the kernel does not report what they do.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

use rampool_kernel::doorbell::Doorbell;

use crate::exclusion::{DEADLINE, settings};
use crate::report::end_process;

/// Requests of the program's threads to the pager, where forks are not followed.
static REQUEST: AtomicU32 = AtomicU32::new(REQUEST_NONE);
/// The doorbell's word, and its descriptor in the agent's table.
static RINGS: AtomicU32 = AtomicU32::new(0);
static DOORBELL: AtomicI32 = AtomicI32::new(NO_DOORBELL);
const NO_DOORBELL: i32 = -1;
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

/// What the pager should do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Request {
    Prepare,
    Thaw,
    Change(Change, usize, usize),
}

/// Tells the pager of a change, before it happens, and waits until it has drawn the consequences. The caller
/// has begun a [`MappingChange`](crate::exclusion::MappingChange).
pub fn change(what: Change, start: usize, end: usize) {
    CHANGE_START.store(start, Ordering::Relaxed);
    CHANGE_END.store(end, Ordering::Relaxed);
    request(match what {
        Change::Forget => REQUEST_FORGET,
        Change::Discard => REQUEST_DISCARD,
        Change::Return => REQUEST_RETURN,
    });
}

/// A fork is about to happen: the pager is to stop evicting and to list what is absent.
pub fn prepare_fork() {
    request(REQUEST_PREPARE);
}

/// The fork is over.
pub fn thaw() {
    request(REQUEST_THAW);
}

/// Before the pager has any memory: the doorbell needs a thread, and to make one the C library and the dynamic
/// linker read lists that may lie in what is managed.
pub fn install_doorbell() {
    if doorbell().is_none() {
        match Doorbell::new(&RINGS) {
            Ok(doorbell) => DOORBELL.store(doorbell.leak(), Ordering::Release),
            Err(error) => end_process(settings(), &format!("the agent cannot be called: {error}")),
        }
    }
}

/// In a forked child: its parent's doorbell is not its own.
pub fn forget_after_fork() {
    REQUEST.store(REQUEST_NONE, Ordering::Release);
    DOORBELL.store(NO_DOORBELL, Ordering::Release);
}

/// The doorbell that rings when there is a [`Request`].
pub fn doorbell() -> Option<RawFd> {
    let doorbell = DOORBELL.load(Ordering::Acquire);
    (doorbell != NO_DOORBELL).then_some(doorbell)
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
