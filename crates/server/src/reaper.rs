//! Frees what members leave behind, and gives up the ones that do not come back. Freeing gigabytes takes a
//! while: no shard waits for it. It also looks now and then whether the machine is short of memory.

use super::lease::Lease;
use super::shared::{Shared, Task};
use super::tenants::in_words;
use rampool_lease::{Departed, Pressure, Tick};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The longest sleep: stopping is noticed within this time.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);
/// Times 512 pages that are freed at a time, so that shards get at the lease and the store in between.
const BATCH_CHUNKS: u64 = 4;
/// Between two looks at what the kernel says of memory, which is an average of ten seconds.
const PRESSURE_EVERY: Duration = Duration::from_secs(1);

pub(super) fn run(shared: &Shared, orders: &Receiver<Task>) {
    let (mut pressure, mut next_look) = (Pressure::default(), Instant::now());
    while !shared.stopping() {
        if Instant::now() >= next_look {
            next_look = Instant::now() + PRESSURE_EVERY;
            look_at_pressure(shared, &mut pressure);
        }
        let sleep = match shared.directory().next_expiry() {
            Some(due) => {
                Duration::from_millis(due.0.saturating_sub(shared.now().0).max(1)).min(LONGEST_SLEEP)
            }
            None => LONGEST_SLEEP,
        };
        match orders.recv_timeout(sleep) {
            Ok(task) => perform(shared, task),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        give_up(shared, shared.now());
    }
}

pub(super) fn perform(shared: &Shared, task: Task) {
    match task {
        Task::Settle(departed) => settle(shared, departed),
        Task::Bury(lease) => {
            if let Some(lease) = shared.lease(lease) {
                bury(shared, &lease);
            }
        }
        Task::Finish(finish) => finish(shared),
    }
}

/// Gives up the members whose grace time is over.
pub(super) fn give_up(shared: &Shared, now: Tick) {
    let expired = shared.directory().expire(now);
    for departed in expired {
        let tenant = shared.lease(departed.lease).and_then(|lease| lease.tenant.name);
        if shared.may_log("member did not reconnect", tenant) {
            tracing::warn!(
                tenant = in_words(tenant),
                lease = departed.lease.0,
                member = departed.member.0,
                "member did not reconnect within the grace time"
            );
        }
        settle(shared, departed);
    }
}

fn look_at_pressure(shared: &Shared, pressure: &mut Pressure) {
    // What a kernel or a container does not have is no pressure.
    let texts: Vec<String> =
        shared.config.pressure.iter().filter_map(|file| std::fs::read_to_string(file).ok()).collect();
    match pressure.hear(texts.iter().map(String::as_str)) {
        Some(true) => tracing::warn!(
            "this machine is short of memory: programs wait for it (PSI). No new leases are given until that \
             is over. Lend less, or stop this server (SIGTERM): it tells its clients and waits for them to \
             leave"
        ),
        Some(false) => tracing::info!("memory is not short any more: leases are given again"),
        None => return,
    }
    shared.short_of_memory.store(pressure.is_short(), Ordering::Relaxed);
}

fn settle(shared: &Shared, departed: Departed) {
    // Orders may overtake each other: the one for the last member closes the lease, and frees what the others
    // left in it.
    let Some(lease) = shared.lease(departed.lease) else { return };
    shared.answer_queues(&lease, |space| {
        space.member_gone(departed.member);
        if departed.lease_closes {
            space.close();
        }
    });
    let freed = bury(shared, &lease);
    if departed.lease_closes {
        shared.remove_lease(departed.lease);
        shared.directory().closed(departed.lease);
        // Requests for a lease may wait at the shards for this memory.
        shared.wake_all();
        let tenant = lease.tenant.name;
        if shared.may_log("lease closed", tenant) {
            tracing::info!(
                tenant = in_words(tenant),
                lease = departed.lease.0,
                pages = freed,
                "lease closed"
            );
        }
    }
}

/// Frees the pages of freed regions; returns how many.
fn bury(shared: &Shared, lease: &Lease) -> usize {
    let (mut released, mut freed, mut more) = (Vec::new(), 0, true);
    while more {
        more = lease.space().bury(BATCH_CHUNKS, &mut released);
        freed += released.len();
        shared.store.release(&released);
        released.clear();
    }
    freed
}
