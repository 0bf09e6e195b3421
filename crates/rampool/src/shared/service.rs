//! The thread that serves a rank while its program computes: faults, messages, time.
//!
//! It sleeps in the kernel. While a thread of the program waits it asks again and again for a while first: what wakes a sleeping thread costs
//! more than a message takes.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Inner;
use super::host::{Descriptors, Plan, Ready};

/// Serves until the rank has finished.
pub(super) fn run(inner: &Arc<Inner>, descriptors: &Descriptors, spin: Duration) {
    let _guard = EndWithPanic;
    let mut plan = Plan::default();
    let mut ready = Ready::default();
    let mut watched = Watched::default();
    loop {
        inner.lock().serve(&ready, &mut plan);
        if plan.stop {
            return;
        }
        wait(inner, descriptors, spin, &plan, &mut watched, &mut ready);
    }
}

/// What a wait asks the kernel about; kept, so that waits allocate nothing.
#[derive(Default)]
struct Watched<'a> {
    /// The bell, faults, connections, perhaps datagrams.
    fds: Vec<PollFd<'a>>,
    /// Whose the connections are.
    ranks: Vec<usize>,
}

/// Waits until something can be served, or it is time.
fn wait<'a>(inner: &'a Inner, descriptors: &'a Descriptors, spin: Duration, plan: &Plan, watched: &mut Watched<'a>, ready: &mut Ready) {
    let Watched { fds, ranks } = watched;
    fds.clear();
    fds.extend([PollFd::new(&inner.bell, PollFlags::IN), PollFd::new(&descriptors.faults, PollFlags::IN)]);
    let first_line = fds.len();
    ranks.clear();
    for (rank, line) in descriptors.lines.iter().enumerate() {
        if let Some(line) = line.as_ref().filter(|_| plan.open.get(rank).is_none_or(|&open| open)) {
            let backlog = plan.backlog.get(rank).is_some_and(|&is| is);
            fds.push(PollFd::new(line, if backlog { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }));
            ranks.push(rank);
        }
    }
    if let Some(datagrams) = &descriptors.datagrams {
        fds.push(PollFd::new(datagrams, PollFlags::IN));
    }
    let began = Instant::now();
    loop {
        let now = Instant::now();
        let left = plan.until.map(|until| until.saturating_duration_since(now));
        let spinning = now.duration_since(began) < spin && (plan.urgent || inner.asleep.load(Ordering::Relaxed) > 0);
        let timeout = if spinning { Some(Duration::ZERO) } else { left };
        let timeout = timeout
            .map(|time| Timespec { tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(time.subsec_nanos()) });
        match poll(fds, timeout.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) if !spinning || left.is_some_and(|left| left.is_zero()) => break,
            Ok(0) | Err(_) => std::thread::yield_now(),
            Ok(_) => break,
        }
    }
    let came = |fd: &PollFd<'_>| !fd.revents().is_empty();
    if came(&fds[0]) {
        let _ = rustix::io::read(&inner.bell, &mut [0; 8]);
    }
    ready.faults = came(&fds[1]);
    ready.lines.clear();
    ready.lines.resize(descriptors.lines.len(), false);
    for (rank, fd) in ranks.iter().zip(&fds[first_line..]) {
        ready.lines[*rank] = came(fd);
    }
    ready.datagrams = fds.get(first_line + ranks.len()).is_some_and(came);
}

/// Lets the service thread look again.
pub(super) fn ring(bell: &OwnedFd) {
    // It can only fail because it has been rung more often than anybody counts.
    let _ = rustix::io::write(bell.as_fd(), &1_u64.to_ne_bytes());
}

/// Without this thread nothing moves any more: if it panics, the process ends instead of hanging.
struct EndWithPanic;

impl Drop for EndWithPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
