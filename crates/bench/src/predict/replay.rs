//! The run again, event by event, on another network.
//!
//! Computing and handlers take as long as in the trace (times a factor for another CPU); messages take the
//! target network's time. A link carries one message at a time, at either end. A rank handles one message at
//! a time, in the order of arrival, and handling while its thread computes delays the thread. Barriers are
//! joined again: the last rank in the replay ends the wait. Locks go to ranks in the order of the trace. The
//! replay does not ask which rank would get a lock, or whether a page would be fetched, on another network.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use super::network::{Bucket, Network};
use super::recording::{Category, Cause, Recording, Role};

/// Other differences of the machine.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Machine {
    /// Factor by which computing takes longer.
    pub slower: f64,
    /// The factor of the protocol's software and the kernel's part of a fault.
    pub software_slower: f64,
    /// Changes of pages reach their home by memory-mapped hardware, as AURC's authors meant it: making,
    /// sending and applying them costs no CPU time. They travel a few words at a time, between other
    /// messages, which do not wait for them.
    pub updates_by_hardware: bool,
}

impl Resources {
    fn link(&mut self, by_hardware: bool) -> &mut Link {
        if by_hardware { &mut self.link_of_updates } else { &mut self.link }
    }
}

impl Machine {
    /// Whether a message needs no software.
    fn moves_by_hardware(self, carries_changes: bool) -> bool {
        self.updates_by_hardware && carries_changes
    }

    /// The one on which the trace was taken.
    pub const SAME: Self = Self { slower: 1.0, software_slower: 1.0, updates_by_hardware: false };
}

/// A trace in which something happened before its cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the trace contradicts itself: {left} of its events wait for each other")]
pub struct Contradiction {
    left: usize,
}

/// The predicted run. Microseconds; of each rank, the measured part.
#[derive(Clone, Debug)]
pub struct Prediction {
    pub ranks: Vec<RankTime>,
}

#[derive(Clone, Debug, Default)]
pub struct RankTime {
    pub elapsed_us: f64,
    pub computing_us: f64,
    pub waits_us: BTreeMap<Category, f64>,
    /// When each phase ends, from the begin of what is measured on, and its computing.
    phases: Vec<Phase>,
}

/// What lies between the ends of two barriers.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Phase {
    pub us: f64,
    /// Of all ranks: what one alone would take.
    pub computing_us: f64,
}

impl Phase {
    /// What it takes longer than one rank alone would.
    pub fn lost_us(self) -> f64 {
        self.us - self.computing_us
    }
}

impl Prediction {
    pub fn elapsed_us(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.elapsed_us).fold(0.0, f64::max)
    }

    /// The run's phases: each from where the last rank leaves a barrier to where it leaves the next.
    pub fn phases(&self) -> Vec<Phase> {
        let count = self.ranks.iter().map(|rank| rank.phases.len()).max().unwrap_or(0);
        let mut begins_us = 0.0;
        let phase = |number: usize| {
            let of_ranks = || self.ranks.iter().filter_map(|rank| rank.phases.get(number));
            let ends_us = of_ranks().map(|phase| phase.us).fold(begins_us, f64::max);
            let us = ends_us - std::mem::replace(&mut begins_us, ends_us);
            Phase { us, computing_us: of_ranks().map(|phase| phase.computing_us).sum() }
        };
        (0..count).map(phase).collect()
    }
}

#[derive(Clone, Copy)]
enum Kind {
    /// The thread of `rank` comes to its `wait`-th wait after computing.
    Begin {
        rank: usize,
        wait: usize,
    },
    /// The thread continues.
    End {
        rank: usize,
    },
    Send {
        rank: usize,
        sent: usize,
    },
    Handle {
        rank: usize,
        handled: usize,
    },
}

struct Node {
    kind: Kind,
    /// Its causes that have not happened yet.
    missing: u32,
    ready_us: f64,
    at_us: f64,
    /// The nodes that it causes, and the least delay of each.
    then: Vec<(usize, f64)>,
}

/// Where a rank's nodes are.
struct Places {
    begins: usize,
    ends: usize,
    sends: usize,
    handles: usize,
}

struct Graph {
    nodes: Vec<Node>,
    places: Vec<Places>,
}

impl Graph {
    fn node(&mut self, kind: Kind) {
        self.nodes.push(Node { kind, missing: 0, ready_us: 0.0, at_us: 0.0, then: Vec::new() });
    }

    fn edge(&mut self, from: usize, to: usize, lag_us: f64) {
        self.nodes[to].missing += 1;
        self.nodes[from].then.push((to, lag_us.max(0.0)));
    }

    fn build(recording: &Recording, machine: Machine) -> Self {
        let mut graph = Self { nodes: Vec::new(), places: Vec::new() };
        for (rank, record) in recording.ranks.iter().enumerate() {
            let begins = graph.nodes.len();
            let ends = begins + record.waits.len();
            let sends = ends + record.waits.len();
            let handles = sends + record.sent.len();
            (0..record.waits.len()).for_each(|wait| graph.node(Kind::Begin { rank, wait }));
            (0..record.waits.len()).for_each(|_| graph.node(Kind::End { rank }));
            (0..record.sent.len()).for_each(|sent| graph.node(Kind::Send { rank, sent }));
            (0..record.handled.len()).for_each(|handled| graph.node(Kind::Handle { rank, handled }));
            graph.places.push(Places { begins, ends, sends, handles });
        }
        for rank in 0..recording.ranks.len() {
            graph.connect(recording, rank, machine);
        }
        graph
    }

    fn connect(&mut self, recording: &Recording, rank: usize, machine: Machine) {
        let record = &recording.ranks[rank];
        let Places { begins, ends, sends, handles } = self.places[rank];
        for (number, wait) in record.waits.iter().enumerate() {
            if number == 0 {
                // Ranks do not begin at one moment.
                self.nodes[begins].ready_us = wait.at_us;
            } else {
                self.edge(ends + number - 1, begins + number, wait.computed_us * machine.slower);
            }
            let after = (wait.after_us + wait.fault_us()) * machine.software_slower;
            self.edge(begins + number, ends + number, if wait.ended_by.is_empty() { after } else { 0.0 });
            for &handled in &wait.ended_by {
                self.edge(handles + handled, ends + number, after);
            }
        }
        for (number, sent) in record.sent.iter().enumerate() {
            let offset = if machine.moves_by_hardware(sent.carries_changes) {
                0.0
            } else {
                sent.offset_us * machine.software_slower
            };
            match sent.cause {
                Cause::Wait(wait) => self.edge(begins + wait, sends + number, offset),
                Cause::Handler(handled) => self.edge(handles + handled, sends + number, offset),
                Cause::Arrival { wait, handled } => {
                    self.edge(handles + handled, sends + number, offset);
                    self.edge(begins + wait, sends + number, 0.0);
                }
                Cause::Computing(wait) if wait > 0 => self.edge(ends + wait - 1, sends + number, offset),
                Cause::Computing(_) => self.nodes[sends + number].ready_us = sent.at_us,
            }
            self.edge(sends + number, self.places[sent.to].handles + sent.handler, 0.0);
        }
        // The order of requests for a lock, and of arrivals at a barrier, is that of the trace.
        let mut steps: Vec<(f64, usize, Option<u64>)> = Vec::new();
        for (number, wait) in record.waits.iter().enumerate().filter(|(_, wait)| wait.category.synchronizes())
        {
            steps.push((wait.at_us, begins + number, wait.lock));
        }
        for (number, handled) in record.handled.iter().enumerate() {
            if handled.orders && handled.role != Role::Reply {
                steps.push((handled.at_us, handles + number, handled.lock));
            }
        }
        steps.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut before: BTreeMap<Option<u64>, usize> = BTreeMap::new();
        for (_, node, lock) in steps {
            if let Some(earlier) = before.insert(lock, node) {
                self.edge(earlier, node, 0.0);
            }
        }
    }
}

/// The next node to happen: the earliest; of those at one moment, the first.
#[derive(PartialEq)]
struct Next {
    ready_us: f64,
    node: usize,
}

impl Eq for Next {}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        other.ready_us.total_cmp(&self.ready_us).then(other.node.cmp(&self.node))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A rank's link to all others, both ways.
#[derive(Clone, Copy, Default)]
struct Link {
    out: Bucket,
    into: Bucket,
}

/// The state of a rank.
#[derive(Clone, Default)]
struct Resources {
    link: Link,
    /// As the hardware's updates use it.
    link_of_updates: Link,
    handler_free_us: f64,
    /// Its thread waits, and so polls for messages.
    waits: bool,
    /// CPU time of handlers so far.
    handled_us: f64,
    /// Of these, what the thread has paid for already, or did not compute during.
    settled_us: f64,
}

/// What `recording` would take on `network`.
///
/// # Errors
/// [`Contradiction`].
pub fn replay(
    recording: &Recording,
    network: &Network,
    machine: Machine,
) -> Result<Prediction, Contradiction> {
    let mut graph = Graph::build(recording, machine);
    let mut resources = vec![Resources::default(); recording.ranks.len()];
    let mut heap: BinaryHeap<Next> = (0..graph.nodes.len())
        .filter(|&node| graph.nodes[node].missing == 0)
        .map(|node| Next { ready_us: graph.nodes[node].ready_us, node })
        .collect();
    let mut left = graph.nodes.len();
    while let Some(Next { ready_us, node }) = heap.pop() {
        let mut happens_us = ready_us;
        // What follows is counted.
        let mut done_us = ready_us;
        match graph.nodes[node].kind {
            Kind::Begin { rank, wait } => {
                let own = &mut resources[rank];
                let stolen = own.handled_us - own.settled_us;
                own.settled_us = own.handled_us;
                if stolen > 0.0 && wait > 0 {
                    heap.push(Next { ready_us: ready_us + stolen, node });
                    continue;
                }
                own.waits = true;
            }
            // Handling during the wait took nothing from the thread.
            Kind::End { rank } => {
                resources[rank].settled_us = resources[rank].handled_us;
                resources[rank].waits = false;
            }
            Kind::Send { rank, sent } => {
                let sent = &recording.ranks[rank].sent[sent];
                let by_hardware = machine.moves_by_hardware(sent.carries_changes);
                let cost = network.cost(sent.bytes);
                let cost = if by_hardware { cost.by_hardware() } else { cost };
                let own = &mut resources[rank];
                own.handled_us += cost.sending_us;
                let out_us = own.link(by_hardware).out.pass(
                    ready_us + cost.sending_us,
                    cost.wire_us,
                    network.burst_us(),
                );
                // The link's other end passes it on while it comes.
                let first_us = (out_us - cost.wire_us).max(ready_us + cost.sending_us) + cost.latency_us;
                done_us = resources[sent.to]
                    .link(by_hardware)
                    .into
                    .pass(first_us, cost.wire_us, network.burst_us())
                    .max(out_us + cost.latency_us);
            }
            // The memory of its home has changed already.
            Kind::Handle { rank, handled }
                if machine.moves_by_hardware(recording.ranks[rank].handled[handled].carries_changes) => {}
            Kind::Handle { rank, handled } => {
                let handled = &recording.ranks[rank].handled[handled];
                let cost = network.cost(recording.ranks[handled.from].sent[handled.sent].bytes);
                let takes_us = handled.us * machine.software_slower;
                let own = &mut resources[rank];
                // A rank that still handles another message is awake.
                let sleeps = !own.waits && own.handler_free_us <= ready_us;
                happens_us = ready_us.max(own.handler_free_us)
                    + cost.receiving_us
                    + if sleeps { network.wake_us } else { 0.0 };
                own.handler_free_us = happens_us + takes_us;
                own.handled_us += cost.receiving_us + takes_us;
                done_us = happens_us;
            }
        }
        graph.nodes[node].at_us = happens_us;
        left -= 1;
        for (next, lag_us) in std::mem::take(&mut graph.nodes[node].then) {
            let following = &mut graph.nodes[next];
            following.ready_us = following.ready_us.max(done_us + lag_us);
            following.missing -= 1;
            if following.missing == 0 {
                heap.push(Next { ready_us: following.ready_us, node: next });
            }
        }
    }
    if left > 0 {
        return Err(Contradiction { left });
    }
    Ok(Prediction {
        ranks: (0..recording.ranks.len()).map(|rank| rank_time(recording, &graph, rank, machine)).collect(),
    })
}

fn rank_time(recording: &Recording, graph: &Graph, rank: usize, machine: Machine) -> RankTime {
    let record = &recording.ranks[rank];
    let Places { begins, ends, .. } = graph.places[rank];
    let at = |node: usize| graph.nodes[node].at_us;
    let (first, after) = record.measured;
    let mut time = RankTime::default();
    if first == after {
        return time;
    }
    let from = match first {
        0 => 0.0,
        first => at(ends + first - 1),
    };
    time.elapsed_us = at(ends + after - 1) - from;
    let mut phase = Phase::default();
    for number in first..after {
        let wait = &record.waits[number];
        *time.waits_us.entry(wait.category).or_default() += at(ends + number) - at(begins + number);
        time.computing_us += wait.computed_us * machine.slower;
        phase.computing_us += wait.computed_us * machine.slower;
        if wait.category == Category::Barrier || number + 1 == after {
            phase.us = at(ends + number) - from;
            time.phases.push(std::mem::take(&mut phase));
        }
    }
    time
}

#[cfg(test)]
mod tests {
    use super::super::recording::tests::{parse, small};
    use super::*;

    fn network(latency_us: f64, mb_per_s: f64) -> Network {
        Network::line("test", latency_us, 1.0 / mb_per_s)
    }

    #[test]
    fn what_a_barrier_waits_for_is_found_again() {
        let found = small();
        // Rank 0 computes 100 us and handles a request for 2 us meanwhile; rank 1 computes 50 us and fetches
        // a page. With no network at all rank 0 is last, and its own coming sends the departure: nothing in
        // the record does that but the other's arrival, handled 0.5 us before.
        let fast = replay(&found, &network(0.0, 1e5), Machine::SAME).unwrap();
        let zero = fast.ranks[0].elapsed_us;
        assert!((zero - (1.0 + 100.0 + 2.0 + 10.0)).abs() < 2.0, "{zero}");
        // With 1000 us for a message, rank 1 is last: a request, a page, its arrival. Its fault takes 29 us
        // besides.
        let slow = replay(&found, &network(1000.0, 1e5), Machine::SAME).unwrap();
        assert!((slow.ranks[0].elapsed_us - (3000.0 + 50.0 + 29.0)).abs() < 30.0, "{:?}", slow.ranks[0]);
        assert!((slow.ranks[1].elapsed_us - (4000.0 + 50.0 + 29.0)).abs() < 30.0, "{:?}", slow.ranks[1]);
        assert!((slow.ranks[1].waits_us[&Category::ReadFault] - (2000.0 + 29.0)).abs() < 30.0);
        assert!((slow.ranks[1].computing_us - 50.0).abs() < 0.1);
    }

    #[test]
    fn phases_are_the_whole_run_and_pay_where_messages_are_cheap() {
        let found = small();
        let on = |latency_us: f64| {
            let there = replay(&found, &network(latency_us, 1e5), Machine::SAME).unwrap();
            let phases = there.phases();
            let sum: f64 = phases.iter().map(|phase| phase.us).sum();
            assert!((sum - there.elapsed_us()).abs() < 0.01, "{phases:?} {there:?}");
            let [phase] = phases[..] else { panic!("one barrier: {phases:?}") };
            assert!((phase.computing_us - 150.0).abs() < 0.1, "{phase:?}");
            phase.lost_us()
        };
        assert!(on(0.0) < 0.0 && on(1000.0) > 3800.0, "{} {}", on(0.0), on(1000.0));
    }

    #[test]
    fn ranks_that_begin_later_come_later() {
        let zero = [
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#,
            r#"{"at_ns":1000,"event":"compute","thread":0,"ns":9000,"cpu_ns":9000}"#,
            r#"{"at_ns":10000,"event":"wait","thread":0,"what":"barrier","ns":520000}"#,
            r#"{"at_ns":520000,"event":"receive","from":1,"type":"BarrierArrive","ns":1000}"#,
            r#"{"at_ns":520500,"event":"send","to":1,"type":"BarrierDepart","bytes":20}"#,
        ];
        let one = [
            r#"{"at_ns":500000,"event":"wait","thread":0,"what":"other","ns":1000}"#,
            r#"{"at_ns":501000,"event":"compute","thread":0,"ns":9000,"cpu_ns":9000}"#,
            r#"{"at_ns":510000,"event":"wait","thread":0,"what":"barrier","ns":25000}"#,
            r#"{"at_ns":511000,"event":"send","to":0,"type":"BarrierArrive","bytes":20}"#,
            r#"{"at_ns":530000,"event":"receive","from":0,"type":"BarrierDepart","ns":1000}"#,
        ];
        let found = parse(&[&zero, &one]).unwrap();
        let fast = replay(&found, &network(0.0, 1e5), Machine::SAME).unwrap();
        let waited = fast.ranks[0].waits_us[&Category::Barrier];
        assert!((waited - 511.0).abs() < 20.0, "{fast:?}");
    }

    #[test]
    fn nobody_arrives_at_a_barrier_before_it_has_computed() {
        // Rank 1 comes to the barrier 100 us after it has asked for pages ahead of their use, and waits for
        // them there, because rank 0 answers late. Over a faster network they come while it computes.
        let zero = [
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#,
            r#"{"at_ns":1000,"event":"compute","thread":0,"ns":9000,"cpu_ns":9000}"#,
            r#"{"at_ns":10000,"event":"wait","thread":0,"what":"barrier","ns":345000}"#,
            r#"{"at_ns":200000,"event":"receive","from":1,"type":"GetPages","ns":2000}"#,
            r#"{"at_ns":201000,"event":"send","to":1,"type":"Pages","bytes":4109}"#,
            r#"{"at_ns":350000,"event":"receive","from":1,"type":"BarrierArrive","ns":1000}"#,
            r#"{"at_ns":350500,"event":"send","to":1,"type":"BarrierDepart","bytes":20}"#,
        ];
        let one = [
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#,
            r#"{"at_ns":2000,"event":"send","to":0,"type":"GetPages","bytes":10}"#,
            r#"{"at_ns":1000,"event":"compute","thread":0,"ns":100000,"cpu_ns":100000}"#,
            r#"{"at_ns":101000,"event":"wait","thread":0,"what":"barrier","ns":300000}"#,
            r#"{"at_ns":300000,"event":"receive","from":0,"type":"Pages","ns":5000}"#,
            r#"{"at_ns":303000,"event":"send","to":0,"type":"BarrierArrive","bytes":20}"#,
            r#"{"at_ns":390000,"event":"receive","from":0,"type":"BarrierDepart","ns":1000}"#,
        ];
        let found = parse(&[&zero, &one]).unwrap();
        assert_eq!(found.ranks[1].sent[1].cause, Cause::Arrival { wait: 1, handled: 0 });
        let fast = replay(&found, &network(0.0, 1e5), Machine::SAME).unwrap();
        let waited = fast.ranks[0].waits_us[&Category::Barrier];
        assert!((90.0..110.0).contains(&waited), "{fast:?}");
    }

    #[test]
    fn a_slow_link_counts_bytes() {
        let found = small();
        let slow = replay(&found, &network(0.0, 1.0), Machine::SAME).unwrap();
        // 10 + 4109 bytes at a byte a microsecond, and 29 us.
        let fault = slow.ranks[1].waits_us[&Category::ReadFault];
        assert!((fault - (4119.0 + 29.0)).abs() < 30.0, "{fault}");
    }

    #[test]
    fn a_slower_machine_computes_longer() {
        let found = small();
        let there = replay(&found, &network(0.0, 1e5), Machine { slower: 10.0, ..Machine::SAME }).unwrap();
        assert!((there.ranks[0].computing_us - 1000.0).abs() < 0.1);
        assert!(there.ranks[0].elapsed_us > 1000.0);
    }

    #[test]
    fn a_link_carries_one_message_at_a_time() {
        // Three ranks ask rank 0 for a page at once; its link is what they share.
        let zero = |us: u64| {
            (1..4)
                .flat_map(|rank| {
                    let at = us * 1000 + rank * 10_000;
                    [
                        format!(
                            r#"{{"at_ns":{at},"event":"receive","from":{rank},"type":"GetPage","ns":1000}}"#
                        ),
                        format!(
                            r#"{{"at_ns":{},"event":"send","to":{rank},"type":"Page","bytes":1000}}"#,
                            at + 500
                        ),
                    ]
                })
                .collect::<Vec<_>>()
        };
        let other = |rank: u64| {
            vec![
                r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#.to_owned(),
                r#"{"at_ns":2000,"event":"send","to":0,"type":"GetPage","bytes":1}"#.to_owned(),
                format!(
                    r#"{{"at_ns":{},"event":"receive","from":0,"type":"Page","ns":1000}}"#,
                    (60 + rank) * 1000
                ),
                r#"{"at_ns":2000,"event":"wait","what":"read fault","ns":70000}"#.to_owned(),
                r#"{"at_ns":1000,"event":"compute","thread":0,"ns":79000,"cpu_ns":9000}"#.to_owned(),
                r#"{"at_ns":80000,"event":"wait","thread":0,"what":"other","ns":1000}"#.to_owned(),
            ]
        };
        let files = [zero(20), other(1), other(2), other(3)];
        let texts: Vec<Vec<&str>> =
            files.iter().map(|file| file.iter().map(String::as_str).collect()).collect();
        let found = parse(&texts.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
        let there = replay(&found, &network(0.0, 1.0), Machine::SAME).unwrap();
        let mut faults: Vec<f64> =
            there.ranks[1..].iter().map(|rank| rank.waits_us[&Category::ReadFault]).collect();
        faults.sort_by(f64::total_cmp);
        for (fault, pages) in faults.iter().zip([1000.0, 2000.0, 3000.0]) {
            assert!((fault - pages).abs() < 100.0, "{faults:?}");
        }
    }

    #[test]
    fn who_computes_is_woken_and_who_waits_looks() {
        let found = small();
        let awake = replay(&found, &network(10.0, 1e5), Machine::SAME).unwrap();
        let asleep =
            replay(&found, &Network { wake_us: 1000.0, ..network(10.0, 1e5) }, Machine::SAME).unwrap();
        let later =
            |rank: usize, of: Category| asleep.ranks[rank].waits_us[&of] - awake.ranks[rank].waits_us[&of];
        // Rank 0 computes when it is asked for the page; rank 1 waits for that, and both wait at the barrier.
        assert!((later(1, Category::ReadFault) - 1000.0).abs() < 0.1, "{asleep:?}");
        assert!((later(0, Category::Barrier) - 1000.0).abs() < 120.0, "{asleep:?}");
    }

    #[test]
    fn no_rank_waits_for_what_hardware_moves() {
        // Rank 1 sends its changes to rank 0 and then asks for a page, whose home no other rank asks for a
        // while.
        let zero = [
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#,
            r#"{"at_ns":30000,"event":"receive","from":1,"type":"Flush","ns":9000}"#,
            r#"{"at_ns":41000,"event":"receive","from":1,"type":"GetPage","ns":1000}"#,
            r#"{"at_ns":41500,"event":"send","to":1,"type":"Page","bytes":100}"#,
        ];
        let one = [
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#,
            r#"{"at_ns":20000,"event":"wait","thread":0,"what":"unlock","ns":2000}"#,
            r#"{"at_ns":21000,"event":"send","to":0,"type":"Flush","bytes":4000}"#,
            r#"{"at_ns":23000,"event":"wait","what":"read fault","ns":40000}"#,
            r#"{"at_ns":24000,"event":"send","to":0,"type":"GetPage","bytes":10}"#,
            r#"{"at_ns":60000,"event":"receive","from":0,"type":"Page","ns":1000}"#,
            r#"{"at_ns":64000,"event":"wait","thread":0,"what":"other","ns":1000}"#,
        ];
        let found = parse(&[&zero, &one]).unwrap();
        let fault = |updates_by_hardware: bool| {
            let there = Machine { updates_by_hardware, ..Machine::SAME };
            replay(&found, &network(0.0, 1.0), there).unwrap().ranks[1].waits_us[&Category::ReadFault]
        };
        // The request behind 4000 bytes at a byte a microsecond, and behind 9 us of applying them; or alone.
        let (software, hardware) = (fault(false), fault(true));
        assert!((hardware - 115.5).abs() < 5.0, "{hardware}");
        assert!((software - hardware - 4000.0).abs() < 15.0, "{software} {hardware}");
    }

    #[test]
    fn a_burst_passes_at_once() {
        let found = small();
        let fault = |burst_bytes: f64| {
            let there = Network { burst_bytes, ..network(0.0, 1.0) };
            replay(&found, &there, Machine::SAME).unwrap().ranks[1].waits_us[&Category::ReadFault]
        };
        // The page's 4109 bytes and the request's 10, at a byte a microsecond.
        assert!(
            (fault(0.0) - fault(1000.0) - 1010.0).abs() < 1.0
                && (fault(0.0) - fault(10_000.0) - 4119.0).abs() < 1.0
        );
    }

    #[test]
    fn a_faults_way_through_the_kernel_is_software() {
        let mut found = small();
        found.ranks[1].waits[1].kernel_us = 5.0;
        let fault = |software_slower: f64| {
            let there = Machine { software_slower, ..Machine::SAME };
            replay(&found, &network(0.0, 1e5), there).unwrap().ranks[1].waits_us[&Category::ReadFault]
        };
        let before = fault(1.0);
        found.ranks[1].waits[1].kernel_us = 105.0;
        let fault = |software_slower: f64| {
            let there = Machine { software_slower, ..Machine::SAME };
            replay(&found, &network(0.0, 1e5), there).unwrap().ranks[1].waits_us[&Category::ReadFault]
        };
        assert!((fault(1.0) - before - 100.0).abs() < 0.1);
        assert!(
            (fault(30.0) - fault(1.0) - 29.0 * before - 2900.0).abs() < 3.0,
            "{} {} {before}",
            fault(30.0),
            fault(1.0)
        );
    }

    #[test]
    fn a_trace_that_contradicts_itself_is_refused() {
        // Each answers what the other sends only then.
        let zero = [
            r#"{"at_ns":5000,"event":"receive","from":1,"type":"Page","ns":1000}"#,
            r#"{"at_ns":5500,"event":"send","to":1,"type":"Page","bytes":1}"#,
        ];
        let one = [
            r#"{"at_ns":5000,"event":"receive","from":0,"type":"Page","ns":1000}"#,
            r#"{"at_ns":5500,"event":"send","to":0,"type":"Page","bytes":1}"#,
        ];
        let found = parse(&[&zero, &one]).unwrap();
        assert_eq!(replay(&found, &network(1.0, 1.0), Machine::SAME).unwrap_err(), Contradiction { left: 4 });
    }
}
