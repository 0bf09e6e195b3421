//! Faults served where they happen: the thread that meets one runs the pager itself, in a SIGBUS handler, and
//! no other thread is woken.
//!
//! The pager and all that belongs to it lie behind one lock, which is never held while a thread waits for a
//! server: several threads can wait at a time, and each of them takes in whatever arrives. The pager's own
//! thread still exists for the rest: changes of mappings, commands, and write-back while no thread faults.
//!
//! The handler is called for accesses to regions alone, so the interrupted code holds no lock of the C
//! library, unless it is itself a handler of an asynchronous signal that interrupted a holder: such handlers
//! must not touch regions. All signals are blocked while a fault is served.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rampool_kernel::sigbus::Serve;

use super::RegionSupervisor;
use crate::backing::Backing;
use crate::pager::in_thread::Next;
use crate::pager::{Pager, Supervisor, sleep_on};
use crate::system_calls::Unhelped;

/// How often the pager's thread looks while threads meet faults, and while none does.
const TICK_BUSY: Duration = Duration::from_millis(1);
const TICK_IDLE: Duration = Duration::from_millis(50);
/// How long changes of mappings that are under way are waited for.
const CHANGES_DEADLINE: Duration = Duration::from_secs(5);
const FORK_NAP: Duration = Duration::from_micros(200);

pub(super) struct InThread<B: Backing> {
    /// `None` before the pager begins, and once it has ended.
    state: Mutex<Option<State<B>>>,
    spin: Duration,
    /// Faults were served since the pager's thread looked.
    busy: AtomicBool,
}

struct State<B: Backing> {
    pager: Pager<B>,
    supervisor: RegionSupervisor<B::Region>,
    /// The page of the latest fault.
    latest: usize,
}

impl<B: Backing> InThread<B> {
    /// `spin`: how long a thread spins for an answer before it sleeps.
    pub(super) fn new(spin: Duration) -> Self {
        Self { state: Mutex::new(None), spin, busy: AtomicBool::new(false) }
    }

    /// Before the first region is taken.
    pub(super) fn begin(&self, pager: Pager<B>, supervisor: RegionSupervisor<B::Region>) {
        *self.lock() = Some(State { pager, supervisor, latest: 0 });
    }

    fn lock(&self) -> MutexGuard<'_, Option<State<B>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pager's thread. Returns what is left when the pager is told to stop.
    pub(super) fn run(&self) -> (Pager<B>, RegionSupervisor<B::Region>) {
        let mut fds = Vec::new();
        let mut next_tick = Instant::now();
        loop {
            let mut sleep = if self.busy.swap(false, Ordering::Relaxed) { TICK_BUSY } else { TICK_IDLE };
            fds.clear();
            {
                let mut state = self.lock();
                let State { pager, supervisor, .. } = state.as_mut().expect("only this thread takes it");
                if Supervisor::<B>::fork_pending(supervisor) {
                    sleep = FORK_NAP;
                } else {
                    pager.serve_events(supervisor);
                    if pager.collects() {
                        sleep = FORK_NAP;
                    }
                    pager.serve_backing(supervisor);
                    let now = Instant::now();
                    if now >= next_tick {
                        next_tick = now + supervisor.tick(pager);
                    }
                    if !supervisor.wake_up(pager) {
                        let State { pager, supervisor, .. } = state.take().expect("as above");
                        return (pager, supervisor);
                    }
                    fds.push(libc::pollfd { fd: pager.faults().raw_fd(), events: libc::POLLIN, revents: 0 });
                    Supervisor::<B>::poll_fds(supervisor, &mut fds);
                }
            }
            sleep_on(&mut fds, sleep);
        }
    }
}

impl<B> Serve for InThread<B>
where
    B: Backing + Send,
    B::Region: Send,
{
    fn finish_changes(&self) {
        let _own = Unhelped::begin();
        if let Some(State { pager, supervisor, .. }) = self.lock().as_mut() {
            pager.serve_events(supervisor);
            let _ = pager.settle(supervisor, Instant::now() + CHANGES_DEADLINE);
        }
    }

    fn serve(&self, address: usize, write: bool) -> bool {
        let _own = Unhelped::begin();
        self.busy.store(true, Ordering::Relaxed);
        let mut state = self.lock();
        let Some(State { pager, supervisor, latest }) = state.as_mut() else { return false };
        let again = std::mem::replace(latest, address) == address;
        let page = match pager.fault_here(address, write, again, supervisor) {
            Next::Foreign => return false,
            Next::Repeat => return true,
            Next::Wait(page) => page,
        };
        drop(state);
        let mut since: Option<Instant> = None;
        let mut fds = Vec::new();
        loop {
            let mut until = None;
            {
                let mut state = self.lock();
                let Some(State { pager, supervisor, .. }) = state.as_mut() else { return false };
                let (there, any) = pager.await_here(page, supervisor);
                if there {
                    return true;
                }
                if any {
                    since = None;
                }
                if since.is_some_and(|since| since.elapsed() >= self.spin) {
                    // A page that waits for frames may wait for an event to be read, before which nothing
                    // leaves.
                    pager.serve_events(supervisor);
                    fds.clear();
                    until = Some(pager.backing_fds(&mut fds).unwrap_or_else(|| Instant::now() + TICK_BUSY));
                    fds.push(libc::pollfd { fd: pager.faults().raw_fd(), events: libc::POLLIN, revents: 0 });
                }
            }
            since.get_or_insert_with(Instant::now);
            match until {
                // Another thread may take in what this one waits for, and nothing tells it then.
                Some(until) => {
                    sleep_on(&mut fds, until.saturating_duration_since(Instant::now()).min(TICK_BUSY))
                }
                None => std::hint::spin_loop(),
            }
        }
    }
}
