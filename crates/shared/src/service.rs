//! The thread that serves a rank while its program computes: faults, messages, time.
//!
//! It sleeps in the kernel. While a thread of the program waits for a page, it polls for a while first:
//! waking a sleeping thread costs more than a message takes. Messages that a thread of the program waits for
//! are left to that thread ([`super::watch`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::host::Plan;
use super::watch::Ready;
use super::{Inner, LOOKS_A_YIELD};

/// Serves until the rank has finished.
pub(super) fn run(inner: &Arc<Inner>) {
    let _guard = EndWithPanic;
    if !inner.config.crowded {
        rampool_kernel::thread::ask_for_short_slices();
    }
    let mut plan = Plan::default();
    let mut ready = Ready::default();
    loop {
        inner.lock().serve(&ready, &mut plan);
        if plan.stop {
            return;
        }
        wait(inner, &plan, &mut ready);
    }
}

/// Waits until there is work, or a timer is due.
fn wait(inner: &Inner, plan: &Plan, ready: &mut Ready) {
    if plan.urgent {
        look(inner, inner.spin(), plan.until, ready);
    }
    let left = {
        let mut host = inner.lock();
        if host.wants_service() {
            ready.clear();
            return;
        }
        host.let_service_sleep();
        plan.until.saturating_duration_since(Instant::now())
    };
    if !inner.watch.wait(left, ready) {
        // Time is up. A thread that wanted to poll the connections itself may be delayed, by a signal handler
        // for example: its work is done now.
        inner.lock().look(ready, Instant::now());
    }
}

/// Polls for messages and faults until nothing has come for a while, or there is other work.
fn look(inner: &Inner, spin: Duration, until: Instant, ready: &mut Ready) {
    if spin.is_zero() {
        return;
    }
    inner.lock().begin_to_look();
    let mut since = Instant::now();
    let mut looks = 0_u32;
    loop {
        let mut host = inner.lock();
        let now = Instant::now();
        // While a page is on its way, its message is the next event.
        let awaits = host.awaits_page() && !looks.is_multiple_of(LOOKS_A_YIELD);
        if (!awaits && host.look_for_faults(now)) | host.look(ready, now) {
            since = now;
        }
        if host.needs_service()
            || !host.is_urgent(now)
            || now >= until
            || now.saturating_duration_since(since) >= spin
        {
            host.end_looking();
            return;
        }
        let awaits = host.awaits_page();
        drop(host);
        looks = looks.wrapping_add(1);
        if !awaits || inner.config.crowded || looks.is_multiple_of(LOOKS_A_YIELD) {
            // Yields to the thread that was waiting: if it waits for the next page in a moment, no wake-up is
            // needed. Or to any other thread that needs this CPU.
            std::thread::yield_now();
        }
    }
}

/// If the service thread panics, the process ends instead of hanging.
pub(super) struct EndWithPanic;

impl Drop for EndWithPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
