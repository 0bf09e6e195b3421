//! The thread that serves a rank while its program computes: faults, messages, time.
//!
//! It sleeps in the kernel. While a thread of the program waits for a page it asks again and again for a while first: what wakes a sleeping thread
//! costs more than a message takes. Messages for which a thread of the program waits are that thread's own ([`super::watch`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Inner;
use super::host::Plan;
use super::watch::Ready;

/// Serves until the rank has finished.
pub(super) fn run(inner: &Arc<Inner>, spin: Duration) {
    let _guard = EndWithPanic;
    let mut plan = Plan::default();
    let mut ready = Ready::default();
    loop {
        inner.lock().serve(&ready, &mut plan);
        if plan.stop {
            return;
        }
        wait(inner, spin, &plan, &mut ready);
    }
}

/// Waits until something can be served, or it is time.
fn wait(inner: &Inner, spin: Duration, plan: &Plan, ready: &mut Ready) {
    let began = Instant::now();
    loop {
        let now = Instant::now();
        let left = plan.until.saturating_duration_since(now);
        let spinning = plan.urgent && now.duration_since(began) < spin;
        let mut came = false;
        if spinning {
            if plan.looks {
                let mut host = inner.lock();
                came = host.look(ready) | host.wants_service();
            }
            // To the thread that was waiting: if it waits for the next page in a moment, nobody has to be woken.
            std::thread::yield_now();
        } else {
            inner.lock().let_service_sleep();
        }
        if inner.watch.wait(if spinning { Duration::ZERO } else { left }, ready) {
            return;
        }
        if came {
            return;
        }
        if !spinning || left.is_zero() {
            // Time is up. A thread that wanted to look at the connections itself may be kept from it, by a signal handler say: what it left is done now.
            inner.watch.wait_lines(Some(Duration::ZERO), ready);
            return;
        }
    }
}

/// Without its thread nothing moves any more: if that panics, the process ends instead of hanging.
pub(super) struct EndWithPanic;

impl Drop for EndWithPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
