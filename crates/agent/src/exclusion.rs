//! Who may change mappings or fork, one at a time, and what this process is to the agent.
//!
//! The program's threads, the fork handlers and the agent's thread exclude each other here. Each waits with a
//! deadline; the agent's thread never waits for a thread of the program that may be waiting for the agent.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rampool_run::settings::Settings;

use crate::report::end_process;

/// How long a forking thread waits for the agent, and a child for its parent.
pub const DEADLINE: Duration = Duration::from_secs(30);

static SETTINGS: OnceLock<&'static Settings> = OnceLock::new();
/// Held from before a fork until after it, while watching becomes paging, and in a child until its own agent
/// serves it. Where the kernel does not tell of changed mappings, also by a thread that changes some, from
/// before the agent hears of it until the system call is over, and by the agent while it takes memory over:
/// otherwise what it has just read of the mappings, or given back, would be something else by the time it
/// acts.
static LOCKED: AtomicBool = AtomicBool::new(false);
/// The thread that holds the lock because it changes mappings, as [`this_thread`] names it; 0: none.
static CHANGING: AtomicUsize = AtomicUsize::new(0);
/// The signals that thread had blocked before.
static SIGNALS: AtomicU64 = AtomicU64::new(0);
/// The process of this agent. A process that was created without the agent's knowledge (by a bare `clone`)
/// has none.
pub static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Memory is managed: a child inherits some.
pub static PAGING: AtomicBool = AtomicBool::new(false);
/// The parent serves this process.
pub static FORK_SERVED: AtomicBool = AtomicBool::new(false);

/// Names a thread for as long as it lives, without a system call.
pub fn this_thread() -> usize {
    // SAFETY: no preconditions.
    usize::try_from(unsafe { libc::pthread_self() }).expect("an address")
}

/// Whether this process has an agent of its own.
pub fn has_agent() -> bool {
    PROCESS.load(Ordering::Relaxed) == std::process::id()
}

/// While this lives no other thread changes mappings, none forks, and the agent takes nothing over. Signals
/// wait meanwhile: a handler that changed mappings itself, or stopped its thread for long, would never get,
/// or keep, the lock.
pub struct MappingChange(());

impl MappingChange {
    /// `None` if this thread has begun one already.
    pub fn begin() -> Option<Self> {
        if CHANGING.load(Ordering::Relaxed) == this_thread() {
            return None;
        }
        let before = rampool_kernel::thread::hold_signals();
        lock(|| false);
        SIGNALS.store(before, Ordering::Relaxed);
        CHANGING.store(this_thread(), Ordering::Relaxed);
        Some(Self(()))
    }

    /// For callers that cannot hold a Rust value: to be ended with [`MappingChange::resumed`].
    pub fn suspend(self) {
        std::mem::forget(self);
    }

    /// The one that this thread has suspended.
    pub fn resumed() -> Self {
        assert!(CHANGING.load(Ordering::Relaxed) == this_thread(), "no change was begun");
        Self(())
    }
}

impl Drop for MappingChange {
    fn drop(&mut self) {
        let before = SIGNALS.load(Ordering::Relaxed);
        CHANGING.store(0, Ordering::Relaxed);
        unlock();
        rampool_kernel::thread::release_signals(before);
    }
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
        unlock();
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
        unlock();
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
        unlock();
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

/// Takes the lock for a fork. On the forking thread.
pub fn lock_for_fork() {
    lock(|| false);
}

/// Gives back what the caller holds: a fork is over, or a child is served.
pub fn unlock() {
    LOCKED.store(false, Ordering::Release);
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

/// Keeps the settings, once. False if there were some.
pub fn keep_settings(settings: &'static Settings) -> bool {
    SETTINGS.set(settings).is_ok()
}

pub fn settings() -> Option<&'static Settings> {
    SETTINGS.get().copied()
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
