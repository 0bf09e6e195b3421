//! Frees what members leave behind, and gives up the ones that do not come back. Freeing gigabytes takes a
//! while: no shard waits for it.

use super::shared::Shared;
use rampool_lease::Departed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// The longest sleep: stopping is noticed within this time.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);
/// Frames released at a time, so that shards get at the store in between.
const BATCH_FRAMES: usize = 4096;

pub(super) fn run(shared: &Shared, orders: &Receiver<Departed>) {
    while !shared.stopping() {
        let sleep = match shared.directory().next_expiry() {
            Some(due) => {
                Duration::from_millis(due.0.saturating_sub(shared.now().0).max(1)).min(LONGEST_SLEEP)
            }
            None => LONGEST_SLEEP,
        };
        match orders.recv_timeout(sleep) {
            Ok(departed) => settle(shared, departed),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let expired = shared.directory().expire(shared.now());
        for departed in expired {
            tracing::warn!(
                lease = departed.lease.0,
                member = departed.member.0,
                "member did not reconnect within the grace time"
            );
            settle(shared, departed);
        }
    }
}

fn settle(shared: &Shared, departed: Departed) {
    // Orders may overtake each other: the one for the last member closes the lease, and frees what the others
    // left in it.
    let Some(lease) = shared.lease(departed.lease) else { return };
    let mut released = Vec::new();
    shared.answer_queues(&lease, |space| {
        space.member_gone(departed.member, &mut released);
        if departed.lease_closes {
            space.close(&mut released);
        }
    });
    for frames in released.chunks(BATCH_FRAMES) {
        shared.store.release(frames);
    }
    if departed.lease_closes {
        shared.remove_lease(departed.lease);
        shared.directory().closed(departed.lease);
        // Requests for a lease may wait at the shards for this memory.
        shared.wake_all();
        tracing::info!(lease = departed.lease.0, pages = released.len(), "lease closed");
    }
}
