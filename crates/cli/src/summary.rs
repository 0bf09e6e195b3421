//! What a run did, for the user: the summary at its end and the live line.

use std::fmt::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use rampool_client::pool::{PoolStats, ServerState};
use rampool_client::stats::{StatsSnapshot, bucket_end, quantile_ns};
use rampool_kernel::words::show;
use rampool_wire::units::ByteLen;

use crate::advice::{Choice, argument, choices};
use crate::top::table::{bytes, time};
use crate::{copies, rundir};

const PAGE: u64 = 4096;

/// All processes of the run together.
fn total(processes: &[StatsSnapshot]) -> StatsSnapshot {
    let mut all = StatsSnapshot::default();
    for process in processes {
        all.add(process);
    }
    all
}

/// A run that has ended.
pub struct Told<'a> {
    pub name: &'a str,
    pub processes: &'a [StatsSnapshot],
    pub wall: Duration,
    pub status: ExitStatus,
    pub local: ByteLen,
    pub servers: &'a PoolStats,
    /// Why programs of the run were not managed.
    pub unmanaged: &'a [&'a str],
}

/// A line of the summary.
fn line(out: &mut String, what: &str, text: impl std::fmt::Display) {
    let _ = writeln!(out, "  {what:<15}{text}");
}

impl Told<'_> {
    /// `resident`: the peak of a process over all kinds of memory.
    pub fn summary(&self, resident: ByteLen) -> String {
        let Self { name, processes, wall, status, local, unmanaged, .. } = self;
        let ended = match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("ended by signal {signal}"),
            (None, None) => "ended".to_owned(),
        };
        let mut out = String::new();
        let _ = writeln!(out, "rampool: {name}: {:.2} s, {ended}", wall.as_secs_f64());
        let peak = bytes(processes.iter().map(|p| p.peak_anonymous_pages).max().unwrap_or(0) * PAGE);
        let said = format!("{local} a process; highest seen {peak} (anonymous memory, the kernel's count)");
        line(&mut out, "local memory", said);
        for reason in *unmanaged {
            line(&mut out, "not managed", reason);
        }
        let paged = processes.iter().filter(|p| p.adopted_pages > 0).count();
        if paged == 0 {
            line(&mut out, "pool", not_needed(*local, resident));
            return out;
        }
        let all = total(processes);
        let said = format!(
            "{} seen, {paged} larger than their local memory, {} forks served",
            processes.len(),
            all.forks
        );
        line(&mut out, "processes", said);
        self.pages(&all, &mut out);
        self.copies_and_servers(&all, &mut out);
        out
    }

    /// What came from the pool and went there.
    fn pages(&self, all: &StatsSnapshot, out: &mut String) {
        let mib = |pages: u64| bytes(pages * PAGE);
        let said = format!(
            "{}: {:.1} % served without waiting for a server; half within {}, 99 % within {}",
            all.faults,
            all.local_share() * 100.0,
            time(all.fault_latency_ns(0.5)),
            time(all.fault_latency_ns(0.99))
        );
        line(out, "faults", said);
        line(out, "waited", waiting(all, self.wall, self.local));
        let said = format!(
            "{} from the pool: {} on demand, {} ahead of need",
            mib(all.demand_pages + all.prefetched_pages),
            mib(all.demand_pages),
            mib(all.prefetched_pages)
        );
        line(out, "read", said);
        if all.in_place_pages > 0 {
            let said = format!("{} of that without asking the private server", mib(all.in_place_pages));
            line(out, "in place", said);
        }
        if all.pointer_pages > 0 {
            let said = format!(
                "{} of what came ahead: arrays of pointers led there; the program was seen to come to {}",
                mib(all.pointer_pages),
                mib(all.pointer_used_pages)
            );
            line(out, "by pointers", said);
        }
        let said = format!(
            "{}: {} written to the pool, {} were there already, {} were all zero, {} came back at once",
            mib(all.evicted_pages),
            mib(all.written_back_pages),
            mib(all.clean_dropped_pages),
            mib(all.zero_dropped_pages),
            mib(all.second_chance_pages)
        );
        line(out, "left", said);
        if all.pool_full_events > 0 {
            let times = all.pool_full_events;
            let said = format!("{times} times: the program then kept more than its local memory");
            line(out, "pool full", said);
        }
    }

    fn copies_and_servers(&self, all: &StatsSnapshot, out: &mut String) {
        let servers = self.servers;
        if servers.copies > 1 {
            let left = copies::left(servers.copies, self.processes).min(servers.copies_left);
            let mut said = format!("{left:.1} of {} of each page", servers.copies);
            if all.missed_pages > 0 {
                let _ = write!(said, "; servers had missed {} at the end", bytes(all.missed_pages * PAGE));
            }
            line(out, "copies", said);
        }
        for (index, server) in servers.servers.iter().enumerate() {
            let mut said = format!("{}{}", server.name, state(server.state));
            if let Some([p50, p99]) = waited(all, index) {
                let (half, most) = (time(p50), time(p99));
                let _ = write!(said, ": half of the waits for it within {half}, 99 % within {most}");
            }
            line(out, "server", said);
        }
    }

    /// Every counter of every process, as JSON.
    pub fn json(&self) -> String {
        let Self { name, processes, wall, status, local, servers: pool, unmanaged } = self;
        let all = total(processes);
        let servers: Vec<serde_json::Value> = pool
            .servers
            .iter()
            .enumerate()
            .map(|(index, server)| {
                let [p50, p99] = waited(&all, index).unwrap_or_default();
                serde_json::json!({
                    "name": server.name, "alive": server.alive,
                    "absent": server.state == ServerState::Absent,
                    "latency_p50_ns": p50, "latency_p99_ns": p99
                })
            })
            .collect();
        let counters: Vec<serde_json::Value> = processes
            .iter()
            .map(|p| {
                let mut counters: serde_json::Map<String, serde_json::Value> =
                    p.named().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
                counters.insert("fault_latency_p50_ns".into(), p.fault_latency_ns(0.5).into());
                counters.insert("fault_latency_p99_ns".into(), p.fault_latency_ns(0.99).into());
                counters.insert("avoidable_ns".into(), avoidable(p));
                counters.into()
            })
            .collect();
        let with_more: Vec<serde_json::Value> = choices(&all, *local, nanos(*wall))
            .unwrap_or_default()
            .iter()
            .map(|choice| serde_json::json!({ "local_bytes": choice.local.0, "waited_ns": choice.waited_ns }))
            .collect();
        let run = serde_json::json!({
            "waited_ns": all.waited_ns,
            "with_more_local": with_more,
            "program": name,
            "wall_s": wall.as_secs_f64(),
            "exit_code": status.code(),
            "signal": status.signal(),
            "local_bytes": local.0,
            "processes": counters,
            "copies": pool.copies,
            "copies_left": pool.copies_left.min(copies::left(pool.copies, processes)),
            "missed_bytes": all.missed_pages * PAGE,
            "servers": servers,
            "unmanaged": unmanaged,
        });
        format!("{run:#}\n")
    }
}

fn state(of: ServerState) -> &'static str {
    match of {
        ServerState::Lost => " (lost)",
        ServerState::Absent => " (does not answer)",
        _ => "",
    }
}

/// How much of the time of the run went into waiting for pages, and what more memory would have changed.
fn waiting(all: &StatsSnapshot, wall: Duration, local: ByteLen) -> String {
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let mut text = format!(
        "{:.2} s of {:.2} s for pages ({:.0} %)",
        seconds(all.waited_ns),
        wall.as_secs_f64(),
        100.0 * share(all.waited_ns, wall)
    );
    let with = |choice: &Choice| {
        format!("--local {} about {:.1} s", argument(choice.local), seconds(choice.waited_ns))
    };
    match choices(all, local, nanos(wall)).as_deref() {
        None => {}
        Some([]) => text.push_str("; more --local would hardly help"),
        Some(some) => {
            let all: Vec<String> = some.iter().map(with).collect();
            let _ = write!(text, "; with {}", all.join(", with "));
        }
    }
    text
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn share(waited_ns: u64, time: Duration) -> f64 {
    waited_ns as f64 / nanos(time).max(1) as f64
}

/// Times in nanoseconds within which half, and 99 %, of the waits for the server of this number ended. `None`
/// if there were none.
fn waited(all: &StatsSnapshot, server: usize) -> Option<[u64; 2]> {
    let times = all.server_latency.get(server).filter(|times| times.iter().any(|count| *count > 0))?;
    Some([0.5, 0.99].map(|share| quantile_ns(times, share)))
}

fn not_needed(local: ByteLen, resident: ByteLen) -> String {
    if resident.0 > local.0 {
        format!(
            "not needed: anonymous memory fitted; with files and shared memory, which are not managed, a \
             process had {resident}"
        )
    } else {
        "not needed: the program fitted".to_owned()
    }
}

/// What more local memory would have avoided of a process's waiting: for each step, so many more bytes.
fn avoidable(process: &StatsSnapshot) -> serde_json::Value {
    let steps = process.avoidable_ns.iter().enumerate().filter(|(_, nanos)| **nanos > 0);
    steps
        .filter_map(|(bucket, nanos)| {
            Some(serde_json::json!({ "more_bytes": bucket_end(bucket)?.saturating_mul(PAGE), "ns": nanos }))
        })
        .collect()
}

/// One line that is overwritten again and again.
#[derive(Default)]
pub struct ProgressLine {
    before: StatsSnapshot,
    at: Duration,
    shown: bool,
}

impl ProgressLine {
    /// `local`: of each process.
    pub fn show(&mut self, processes: &[StatsSnapshot], local: ByteLen, elapsed: Duration) {
        let text = self.text(processes, rundir::lives, local, elapsed);
        show(&format!("\r\x1b[K{text}"));
        self.shown = true;
    }

    /// Totals include processes that have ended; amounts that processes hold do not.
    fn text(
        &mut self,
        processes: &[StatsSnapshot],
        is_alive: impl Fn(u64) -> bool,
        local: ByteLen,
        elapsed: Duration,
    ) -> String {
        let all = total(processes);
        let resident: u64 = processes
            .iter()
            .filter(|process| is_alive(process.pid))
            .map(|process| process.anonymous_pages)
            .sum();
        let millis = u64::try_from((elapsed - self.at).as_millis()).unwrap_or(u64::MAX).max(1);
        let rate = |now: u64, before: u64| now.saturating_sub(before).saturating_mul(1000) / millis;
        let mut text = format!(
            "rampool {:>5.0} s  resident {}  faults/s {}  in {}/s  out {}/s  local {:.0} %",
            elapsed.as_secs_f64(),
            bytes(resident * PAGE),
            rate(all.faults, self.before.faults),
            bytes(
                rate(
                    all.demand_pages + all.prefetched_pages,
                    self.before.demand_pages + self.before.prefetched_pages
                ) * PAGE
            ),
            bytes(rate(all.written_back_pages, self.before.written_back_pages) * PAGE),
            all.local_share() * 100.0
        );
        // Of the whole run: what it has waited lately jumps about.
        let percent = |waited_ns| format!("{:.0} %", 100.0 * share(waited_ns, elapsed));
        let _ = write!(text, "  waits {}", percent(all.waited_ns));
        if let Some(enough) = choices(&all, local, nanos(elapsed)).as_ref().and_then(|all| all.last()) {
            let _ = write!(text, " (--local {}: {})", argument(enough.local), percent(enough.waited_ns));
        }
        self.before = all;
        self.at = elapsed;
        text
    }

    pub fn clear(&self) {
        if self.shown {
            show("\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use rampool_client::stats::bucket_of;

    use super::*;

    #[test]
    fn what_is_not_managed_is_not_said_to_fit() {
        let mib = |n: u64| ByteLen(n << 20);
        assert_eq!(not_needed(mib(200), mib(20)), "not needed: the program fitted");
        let text = not_needed(mib(200), mib(528));
        assert!(text.contains("shared memory") && text.contains("528 MiB"), "{text}");
    }

    #[test]
    fn waiting_is_told_with_what_more_memory_would_have_changed() {
        let (second, local) = (1_000_000_000u64, ByteLen(1 << 30));
        let process = |waited_s, avoidable_s| {
            let mut process =
                StatsSnapshot { pid: 1, waited_ns: waited_s * second, ..StatsSnapshot::default() };
            process.avoidable_ns[bucket_of(450 << 10)] = avoidable_s * second;
            process
        };
        // The memory is that of each process, so what both would have gained adds up.
        let processes = [process(5, 4), process(4, 4)];
        let mut text = waiting(&total(&processes), Duration::from_secs(30), local);
        assert_eq!(
            text,
            "9.00 s of 30.00 s for pages (30 %); with --local 2G about 5.0 s, with --local 3G about 1.0 s"
        );
        text = waiting(&process(20, 0), Duration::from_secs(30), local);
        assert_eq!(text, "20.00 s of 30.00 s for pages (67 %); more --local would hardly help");
        text = waiting(&process(1, 1), Duration::from_secs(30), local);
        assert_eq!(text, "1.00 s of 30.00 s for pages (3 %)");
        text = ProgressLine::default().text(&processes, |_| true, local, Duration::from_secs(30));
        assert!(text.ends_with("  waits 30 % (--local 3G: 3 %)"), "{text}");
    }

    #[test]
    fn a_process_that_has_ended_holds_nothing() {
        let process = |pid, anonymous_pages, faults| StatsSnapshot {
            pid,
            anonymous_pages,
            faults,
            ..StatsSnapshot::default()
        };
        let processes = [process(1, 256, 100), process(2, 512, 400)];
        let mut line = ProgressLine::default();
        let text = line.text(&processes, |_| true, ByteLen(1 << 20), Duration::from_secs(1));
        assert!(text.contains("resident 3 MiB") && text.contains("faults/s 500 "), "{text}");
        let text = line.text(&processes, |pid| pid == 1, ByteLen(1 << 20), Duration::from_secs(2));
        assert!(text.contains("resident 1 MiB") && text.contains("faults/s 0 "), "{text}");
    }
}
