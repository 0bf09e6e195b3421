//! Compares two readings. Counters that only grow become rates. A process or server that is new, or
//! restarted, shows none at first.

use std::time::Duration;

use rampool_client::stats::{LATENCY_BUCKETS, StatsSnapshot, Times, add_times, quantile_ns, times_since};
use rampool_server::{OperationCounts, ServerStatus};
use rampool_wire::units::{ByteLen, OS_PAGE_BYTES};
use serde::Serialize;

use crate::advice::choices;

use super::look::{Look, Process};

const PAGE: u64 = OS_PAGE_BYTES as u64;

/// What the screen shows.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rows {
    pub processes: Vec<ProcessRow>,
    pub servers: Vec<ServerRow>,
    /// What is said of runs whose pages do not have all of their copies.
    pub lacking: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProcessRow {
    pub run: u32,
    pub pid: u64,
    pub name: String,
    /// Anonymous memory in RAM.
    pub resident_bytes: u64,
    pub local_bytes: u64,
    pub faults_per_s: f64,
    /// Share of the faults in which no thread waited for a server; `None` without faults.
    pub hit_rate: Option<f64>,
    /// Threads that waited for a page at a time, on average: 1 is one thread that does nothing else.
    pub waiting: f64,
    pub in_bytes_per_s: f64,
    pub out_bytes_per_s: f64,
    /// Half, 99 % and 99.9 % of the faults were served within this time; 0 without faults.
    pub latency_ns: [u64; 3],
    /// What the waiting would be with more local memory: `None` if it is not worth a word,
    /// empty if it would be the same.
    #[serde(serialize_with = "in_bytes")]
    pub with_more: Option<Vec<(ByteLen, f64)>>,
}

fn in_bytes<S: serde::Serializer>(
    choices: &Option<Vec<(ByteLen, f64)>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    choices
        .as_ref()
        .map(|choices| choices.iter().map(|(local, waiting)| (local.0, *waiting)).collect::<Vec<_>>())
        .serialize(serializer)
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ServerRow {
    pub name: String,
    pub state: ServerState,
    pub memory_bytes: u64,
    pub lent_bytes: u64,
    pub held_bytes: u64,
    pub free_bytes: u64,
    pub connections: u64,
    pub rates: TrafficRates,
    /// Times within which half and 99 % of the waits of processes here for this server ended; 0 if there were
    /// none.
    pub latency_ns: [u64; 2],
    pub clients: Vec<ClientRow>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub enum ServerState {
    #[default]
    Serving,
    /// It was told to stop.
    Draining,
    /// Why there are no numbers.
    Silent(String),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClientRow {
    pub name: String,
    pub host: String,
    pub processes: usize,
    pub leased_bytes: u64,
    pub used_bytes: u64,
    pub rates: TrafficRates,
    /// As the server's, of this client alone.
    pub latency_ns: [u64; 2],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TrafficRates {
    pub requests_per_s: f64,
    pub read_bytes_per_s: f64,
    pub written_bytes_per_s: f64,
}

/// The rows of `now`, with rates since `before`.
pub fn compare(before: &Look, now: &Look) -> Rows {
    let earlier_of = |process: &Process| {
        before.processes.iter().find(|p| p.counters.pid == process.counters.pid && p.run == process.run)
    };
    let processes = now.processes.iter().map(|process| process_row(earlier_of(process), process));
    // What each process has waited for each of its servers since.
    let mut waits: Vec<Wait<'_>> = Vec::new();
    for process in &now.processes {
        let Some(earlier) = earlier_of(process) else { continue };
        let times = earlier.counters.server_latency.iter().zip(&process.counters.server_latency);
        waits.extend(process.servers.iter().zip(times).map(|((server, lease), (before, now))| Wait {
            server,
            lease: *lease,
            times: times_since(before, now),
        }));
    }
    let servers = now.servers.iter().map(|server| {
        let earlier = before.servers.iter().find(|s| s.name == server.name);
        match &server.answer {
            Ok(numbers) => {
                let earlier = earlier
                    .and_then(|s| Some((s.at, s.answer.as_ref().ok()?)))
                    .filter(|(_, e)| e.server == numbers.server);
                server_row(&server.name, earlier, server.at, numbers, &waits)
            }
            Err(reason) => ServerRow {
                name: server.name.clone(),
                state: ServerState::Silent(reason.clone()),
                ..ServerRow::default()
            },
        }
    });
    let lacking = now.lacking.clone();
    Rows { processes: processes.collect(), servers: servers.collect(), lacking }
}

/// What a process has waited for a server between two readings.
struct Wait<'a> {
    server: &'a str,
    lease: u64,
    times: Times,
}

/// Times within which half and 99 % of the wanted waits ended, all taken together.
fn latency(waits: &[Wait<'_>], wanted: impl Fn(&Wait<'_>) -> bool) -> [u64; 2] {
    let mut all: Times = [0; LATENCY_BUCKETS];
    for wait in waits.iter().filter(|wait| wanted(wait)) {
        add_times(&mut all, &wait.times);
    }
    [0.5, 0.99].map(|share| quantile_ns(&all, share))
}

fn process_row(before: Option<&Process>, now: &Process) -> ProcessRow {
    let counters = &now.counters;
    let (since, seconds) = match before {
        Some(before) => (difference(&before.counters, counters), now.at.saturating_sub(before.at)),
        None => (difference(counters, counters), Duration::ZERO),
    };
    ProcessRow {
        run: now.run,
        pid: counters.pid,
        name: now.name.clone(),
        resident_bytes: counters.anonymous_pages.max(counters.resident_pages) * PAGE,
        local_bytes: now.local_bytes,
        faults_per_s: rate(since.faults, seconds),
        hit_rate: (since.faults > 0).then(|| since.local_share()),
        waiting: rate(since.waited_ns, seconds) / 1e9,
        in_bytes_per_s: rate((since.demand_pages + since.prefetched_pages) * PAGE, seconds),
        out_bytes_per_s: rate(since.written_back_pages * PAGE, seconds),
        latency_ns: [0.5, 0.99, 0.999].map(|share| since.fault_latency_ns(share)),
        with_more: with_more(&since, ByteLen(now.local_bytes), seconds),
    }
}

fn with_more(since: &StatsSnapshot, local: ByteLen, time: Duration) -> Option<Vec<(ByteLen, f64)>> {
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let choices = choices(since, local, nanos)?;
    Some(choices.iter().map(|choice| (choice.local, rate(choice.waited_ns, time) / 1e9)).collect())
}

/// The counters that become rates. A counter that shrank (another process with the same id) counts as
/// nothing.
fn difference(before: &StatsSnapshot, now: &StatsSnapshot) -> StatsSnapshot {
    let mut since = StatsSnapshot {
        faults: now.faults.saturating_sub(before.faults),
        waited_ns: now.waited_ns.saturating_sub(before.waited_ns),
        demand_fetches: now.demand_fetches.saturating_sub(before.demand_fetches),
        demand_pages: now.demand_pages.saturating_sub(before.demand_pages),
        prefetched_pages: now.prefetched_pages.saturating_sub(before.prefetched_pages),
        written_back_pages: now.written_back_pages.saturating_sub(before.written_back_pages),
        ..StatsSnapshot::default()
    };
    since.fault_latency = times_since(&before.fault_latency, &now.fault_latency);
    since.avoidable_ns = std::array::from_fn(|i| now.avoidable_ns[i].saturating_sub(before.avoidable_ns[i]));
    since
}

fn server_row(
    name: &str,
    before: Option<(Duration, &ServerStatus)>,
    at: Duration,
    now: &ServerStatus,
    waits: &[Wait<'_>],
) -> ServerRow {
    let seconds = before.map_or(Duration::ZERO, |(then, _)| at.saturating_sub(then));
    let clients = now.leases.iter().map(|lease| {
        let earlier = before.and_then(|(_, status)| status.leases.iter().find(|l| l.lease == lease.lease));
        ClientRow {
            name: lease.name.clone(),
            host: lease.host.clone(),
            processes: lease.members.len(),
            leased_bytes: lease.bytes,
            used_bytes: lease.used_bytes,
            rates: traffic(earlier.map(|l| &l.operations), &lease.operations, seconds),
            latency_ns: latency(waits, |wait| wait.server == name && wait.lease == lease.lease),
        }
    });
    ServerRow {
        name: name.to_owned(),
        state: if now.draining { ServerState::Draining } else { ServerState::Serving },
        memory_bytes: now.memory_bytes,
        lent_bytes: now.lent_bytes,
        held_bytes: now.held_bytes,
        free_bytes: now.free_bytes,
        connections: now.connections,
        rates: traffic(before.map(|(_, s)| &s.operations), &now.operations, seconds),
        latency_ns: latency(waits, |wait| wait.server == name),
        clients: clients.collect(),
    }
}

fn traffic(before: Option<&OperationCounts>, now: &OperationCounts, seconds: Duration) -> TrafficRates {
    let Some(before) = before else { return TrafficRates::default() };
    let requests = |counts: &OperationCounts| counts.gets + counts.puts + counts.discards + counts.control;
    TrafficRates {
        requests_per_s: rate(requests(now).saturating_sub(requests(before)), seconds),
        // What the server sends is what its clients read.
        read_bytes_per_s: rate(now.bytes_out.saturating_sub(before.bytes_out), seconds),
        written_bytes_per_s: rate(now.bytes_in.saturating_sub(before.bytes_in), seconds),
    }
}

fn rate(count: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use rampool_client::stats::bucket_of;
    use rampool_server::LeaseStatus;

    use super::*;
    use crate::top::look::Server;

    fn process(at_ms: u64, change: impl FnOnce(&mut StatsSnapshot)) -> Look {
        let mut counters =
            StatsSnapshot { pid: 7, state: 1, anonymous_pages: 100, ..StatsSnapshot::default() };
        change(&mut counters);
        let servers = vec![("b".into(), 1), ("a".into(), 9)];
        let process = Process {
            run: 3,
            name: "sort".into(),
            local_bytes: 1 << 20,
            at: Duration::from_millis(at_ms),
            counters,
            servers,
        };
        Look { processes: vec![process], servers: Vec::new(), lacking: Vec::new() }
    }

    /// `counted`: requests, bytes read and bytes written.
    fn server(at_ms: u64, start: u64, counted: [u64; 3]) -> Look {
        let mut status = ServerStatus::default();
        let mut operations = OperationCounts::default();
        [operations.gets, operations.bytes_out, operations.bytes_in] = counted;
        (status.server, status.operations, status.leases) = (start, operations, vec![lease(9, operations)]);
        Look {
            lacking: Vec::new(),
            processes: Vec::new(),
            servers: vec![Server { name: "a".into(), at: Duration::from_millis(at_ms), answer: Ok(status) }],
        }
    }

    fn lease(number: u64, operations: OperationCounts) -> LeaseStatus {
        let mut lease = LeaseStatus::default();
        (lease.lease, lease.operations) = (number, operations);
        lease
    }

    #[test]
    fn counters_become_rates_over_the_time_between_the_looks() {
        let before = process(1000, |c| {
            c.faults = 1000;
            c.demand_fetches = 900;
            c.fault_latency[10] = 1000;
        });
        let now = process(1500, |c| {
            c.faults = 1200;
            c.demand_fetches = 950;
            c.waited_ns = 300_000_000;
            c.avoidable_ns[bucket_of(1000)] = 240_000_000;
            c.demand_pages = 10;
            c.prefetched_pages = 30;
            c.written_back_pages = 20;
            c.fault_latency[10] = 1000;
            c.fault_latency[14] = 198;
            c.fault_latency[20] = 2;
        });
        let rows = compare(&before, &now);
        let row = &rows.processes[0];
        assert_eq!((row.pid, row.run, row.resident_bytes), (7, 3, 100 * PAGE));
        assert_eq!((row.faults_per_s, row.hit_rate, row.waiting), (400.0, Some(0.75), 0.6));
        assert_eq!((row.in_bytes_per_s, row.out_bytes_per_s), (80.0 * PAGE as f64, 40.0 * PAGE as f64));
        assert_eq!(row.latency_ns, [1 << 15, 1 << 15, 1 << 21], "of the new faults alone");
        assert_eq!(row.with_more, Some(vec![(ByteLen(3 << 20), 0.36), (ByteLen(5 << 20), 0.12)]));
    }

    #[test]
    fn what_is_new_or_has_started_over_shows_no_rate() {
        let old = process(0, |c| c.faults = 5000);
        let fresh = process(1000, |c| c.faults = 10);
        let row = &compare(&old, &fresh).processes[0];
        assert_eq!((row.faults_per_s, row.hit_rate, row.latency_ns), (0.0, None, [0; 3]));
        let row = &compare(&Look::default(), &old).processes[0];
        assert_eq!((row.faults_per_s, row.hit_rate), (0.0, None));

        let before = server(0, 1, [500; 3]);
        let restarted = server(1000, 2, [900; 3]);
        assert_eq!(compare(&before, &restarted).servers[0].rates, TrafficRates::default());
    }

    #[test]
    fn a_server_and_each_of_its_clients_have_rates() {
        let before = server(1000, 1, [10, 0, 100]);
        let now = server(3000, 1, [30, 4096, 300]);
        let rows = compare(&before, &now);
        let wanted =
            TrafficRates { requests_per_s: 10.0, read_bytes_per_s: 2048.0, written_bytes_per_s: 100.0 };
        assert_eq!(rows.servers[0].rates, wanted);
        assert_eq!(rows.servers[0].clients[0].rates, wanted);
    }

    #[test]
    fn a_server_and_the_client_that_waits_for_it_have_latencies() {
        let mut before = server(1000, 1, [0; 3]);
        let waits = |at_ms, counts: [u64; 2]| {
            process(at_ms, |c| {
                c.server_latency[0][30] = 77;
                c.server_latency[1][14] = counts[0];
                c.server_latency[1][20] = counts[1];
            })
            .processes
        };
        before.processes = waits(1000, [500, 500]);
        let mut now = server(2000, 1, [0; 3]);
        let other = lease(10, OperationCounts::default());
        now.servers[0].answer.as_mut().unwrap().leases.push(other);
        now.processes = waits(2000, [598, 502]);
        let row = &compare(&before, &now).servers[0];
        assert_eq!(row.latency_ns, [1 << 15, 1 << 21], "of the new waits for this server alone");
        assert_eq!(row.clients[0].latency_ns, row.latency_ns);
        assert_eq!(row.clients[1].latency_ns, [0, 0], "no process here uses this lease");
        assert_eq!(
            compare(&Look::default(), &now).servers[0].latency_ns,
            [0, 0],
            "a process that is new shows none"
        );
    }

    #[test]
    fn a_silent_server_keeps_its_row_and_says_why() {
        let mut now = server(3000, 1, [0; 3]);
        now.servers[0].answer = Err("cannot reach a: refused".into());
        let rows = compare(&Look::default(), &now);
        assert_eq!(rows.servers[0].state, ServerState::Silent("cannot reach a: refused".into()));
    }
}
