//! S4's own method: subtract from each wait the cost of its messages where they were recorded, and add their
//! cost on the other network.
//!
//! A waiting rank pays the single trips of the request that began its wait and of the message that ended it.
//! An answering rank pays the receiver's and the sender's software. The order of arrival at barriers, and the
//! lengths of queues, do not change: [`replay`](super::replay) covers those.

use super::network::Network;
use super::recording::{Category, Cause, RankRecord, Recording, Wait};
use super::replay::Machine;

/// What the run would take, in microseconds.
pub fn additive(recording: &Recording, network: &Network, machine: Machine) -> f64 {
    recording
        .ranks
        .iter()
        .enumerate()
        .map(|(rank, record)| rank_us(recording, rank, record, network, machine))
        .fold(0.0, f64::max)
}

fn rank_us(
    recording: &Recording,
    rank: usize,
    record: &RankRecord,
    network: &Network,
    machine: Machine,
) -> f64 {
    let (first, after) = record.measured;
    let mut opened: Vec<Option<usize>> = vec![None; record.waits.len()];
    for (number, sent) in record.sent.iter().enumerate() {
        if let Cause::Wait(wait) = sent.cause {
            opened[wait].get_or_insert(number);
        }
    }
    let mut total_us = 0.0;
    for (wait, opened) in record.waits.iter().zip(&opened).take(after).skip(first) {
        total_us += wait.computed_us * machine.slower;
        let request = opened.map(|sent| (rank, sent));
        let answer =
            wait.ended_by.last().map(|&handled| (record.handled[handled].from, record.handled[handled].sent));
        // A wait at a barrier ends when the last rank arrives, whenever this rank's own message was sent.
        let request = if wait.category == Category::Barrier && answer.is_none() { None } else { request };
        total_us += wait_us(recording, wait, [request, answer], network, machine);
    }
    let (Some(from), Some(last)) =
        (record.waits.get(first), after.checked_sub(1).map(|last| &record.waits[last]))
    else {
        return total_us;
    };
    // What it did for others, as they would interrupt it there.
    let (from_us, to_us) = (from.at_us - from.between_us, last.end_us());
    for handled in record.handled.iter().filter(|handled| (from_us..to_us).contains(&handled.at_us)) {
        let free = machine.updates_by_hardware && handled.carries_changes;
        if !record.waits_at(handled.at_us) && !free {
            let bytes = recording.ranks[handled.from].sent[handled.sent].bytes;
            total_us += network.cost(bytes).receiving_us + handled.us * machine.software_slower;
        }
    }
    for sent in record.sent.iter().filter(|sent| (from_us..to_us).contains(&sent.at_us)) {
        let by_handler = matches!(sent.cause, Cause::Handler(_) | Cause::Arrival { .. });
        if by_handler && !(machine.updates_by_hardware && sent.carries_changes) {
            total_us += network.cost(sent.bytes).sending_us;
        }
    }
    total_us
}

fn wait_us(
    recording: &Recording,
    wait: &Wait,
    messages: [Option<(usize, usize)>; 2],
    network: &Network,
    machine: Machine,
) -> f64 {
    let (mut was_us, mut will_be_us) = (0.0, 0.0);
    for (rank, sent) in messages.into_iter().flatten() {
        let sent = &recording.ranks[rank].sent[sent];
        was_us += recording.latency_us(sent);
        let cost = network.cost(sent.bytes);
        will_be_us +=
            if machine.updates_by_hardware && sent.carries_changes { cost.by_hardware() } else { cost }
                .single_trip_us();
    }
    ((wait.us - was_us).max(0.0) + wait.fault_us()) * machine.software_slower + will_be_us
}

#[cfg(test)]
mod tests {
    use super::super::recording::tests::small;
    use super::*;

    #[test]
    fn a_fetched_page_costs_two_messages_more() {
        let found = small();
        let network = |latency_us| Network::line("test", latency_us, 1e-5);
        let (near, far) = (
            additive(&found, &network(100.0), Machine::SAME),
            additive(&found, &network(1100.0), Machine::SAME),
        );
        // Rank 1: request and page, arrival and departure.
        assert!((far - near - 4000.0).abs() < 1.0, "{near} {far}");
    }
}
