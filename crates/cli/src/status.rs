//! `rampool status`: what servers lend, and to whom.

use crate::top::table::{aligned, bytes as size};
use anyhow::{Context, Result};
use rampool_client::pool::ServerSpec;
use rampool_net::transport::LocalPolicy;
use rampool_server::{LeaseStatus, QueryError, ServerStatus, query_status};
use std::time::{Duration, Instant};

use crate::access::Access;
use crate::top;

/// Show what memory servers lend, and to whom
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Memory server to ask: HOST[:PORT] or unix:/PATH. Repeat it, or separate by commas
    #[arg(
        long = "server",
        env = "RAMPOOL_SERVERS",
        value_name = "ADDR",
        value_delimiter = ',',
        default_value = "127.0.0.1"
    )]
    servers: Vec<ServerSpec>,

    #[command(flatten)]
    access: Access,

    /// Print JSON: one object per server, with its address, and its status or the error [default: tables]
    #[arg(long)]
    json: bool,

    /// Milliseconds to wait for an answer
    #[arg(long, default_value_t = 5_000, value_name = "MS")]
    timeout_ms: u64,
}

/// 0 if every server answered, 1 otherwise.
pub fn run(args: &Args) -> Result<i32> {
    let policy = args.access.policy()?;
    let deadline = Instant::now() + Duration::from_millis(args.timeout_ms);
    let answers = ask_all(&args.servers, &policy, deadline);
    if args.json {
        let objects: Vec<_> = answers
            .iter()
            .map(|(name, answer)| match answer {
                Ok(status) => serde_json::json!({ "address": name, "status": status }),
                Err(error) => serde_json::json!({ "address": name, "error": error.to_string() }),
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&objects).context("cannot write the status as JSON")?);
    } else {
        print!("{}", table(&answers));
        top::lacking().iter().for_each(|run| println!("{}", run.said));
    }
    Ok(i32::from(answers.iter().any(|(_, answer)| answer.is_err())))
}

type Answer = (String, Result<ServerStatus, QueryError>);

/// Asks all at once, so that one server that does not answer costs one timeout.
fn ask_all(servers: &[ServerSpec], policy: &LocalPolicy, deadline: Instant) -> Vec<Answer> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = servers
            .iter()
            .map(|server| {
                let thread = scope.spawn(|| query_status(&server.endpoint, policy.clone(), deadline));
                (server.endpoint.to_string(), thread)
            })
            .collect();
        threads
            .into_iter()
            .map(|(name, thread)| (name, thread.join().expect("asking for a status does not panic")))
            .collect()
    })
}

/// Leases, without those that hold a server's own exports.
fn leases_of_programs(status: &ServerStatus) -> impl Iterator<Item = &LeaseStatus> {
    status.leases.iter().filter(|lease| !status.exports.iter().any(|export| export.lease == lease.lease))
}

/// Processes with a lease, and clients of exports.
fn clients(status: &ServerStatus) -> u64 {
    let processes: usize = leases_of_programs(status).map(|lease| lease.members.len()).sum();
    processes as u64 + status.exports.iter().map(|export| export.clients).sum::<u64>()
}

fn table(answers: &[Answer]) -> String {
    let mut out = String::new();
    add(&mut out, ["SERVER", "LENDS", "LEASED", "FREE", "IN USE", "CLIENTS", "STATE"], servers(answers));
    // Of the servers that have answered, with their names.
    let up = || answers.iter().filter_map(|(name, answer)| Some((name, answer.as_ref().ok()?)));
    let head =
        ["LEASE", "SERVER", "NAME", "HOST", "LEASED", "IN USE", "PAGES READ", "PAGES WRITTEN", "PROCESSES"];
    add(&mut out, head, up().flat_map(|(name, status)| leases(name, status)).collect());
    let head =
        ["TENANT", "SERVER", "LEASED", "MAY LEASE", "CONNECTIONS", "REGIONS", "QUEUES", "REPLIES", "SERVED"];
    add(&mut out, head, up().flat_map(|(name, status)| tenants(name, status)).collect());
    let head = [
        "QUEUE", "SERVER", "LEASE", "MESSAGES", "TAKEN", "IN USE", "WAITING", "SENT", "DONE", "AGAIN", "FULL",
    ];
    add(&mut out, head, up().flat_map(|(name, status)| queues(name, status)).collect());
    let head = ["EXPORT", "SERVER", "SIZE", "IN USE", "CLIENTS", "READ", "WRITTEN", "FAILED"];
    add(&mut out, head, up().flat_map(|(name, status)| exports(name, status)).collect());
    let silent: Vec<String> =
        answers.iter().filter_map(|(_, answer)| Some(format!("\n{}", answer.as_ref().err()?))).collect();
    if !silent.is_empty() {
        out.push_str(&silent.concat());
        out.push('\n');
    }
    out
}

/// Adds a table that has rows, after an empty line where it is not the first.
fn add<const N: usize>(out: &mut String, head: [&str; N], rows: Vec<[String; N]>) {
    if rows.is_empty() {
        return;
    }
    if !out.is_empty() {
        out.push('\n');
    }
    let mut all = vec![head.map(String::from)];
    all.extend(rows);
    aligned(out, &all, &[true; N]);
}

fn servers(answers: &[Answer]) -> Vec<[String; 7]> {
    let row = |(name, answer): &Answer| match answer {
        Ok(s) => [
            name.clone(),
            size(s.memory_bytes),
            size(s.lent_bytes),
            size(s.free_bytes),
            size(s.used_bytes),
            clients(s).to_string(),
            state(s),
        ],
        Err(_) => [name, "-", "-", "-", "-", "-", "no answer"].map(String::from),
    };
    answers.iter().map(row).collect()
}

fn leases(server: &str, status: &ServerStatus) -> Vec<[String; 9]> {
    let member = |m: &rampool_server::MemberStatus| match (m.connections, m.means.as_str()) {
        (0, _) => format!("{} (lost)", m.pid),
        // For a server that does not report it.
        (_, "") => m.pid.to_string(),
        (_, means) => format!("{} ({means})", m.pid),
    };
    let row = |lease: &LeaseStatus| {
        [
            lease.lease.to_string(),
            server.to_owned(),
            lease.name.clone(),
            lease.host.clone(),
            size(lease.bytes),
            size(lease.used_bytes),
            lease.operations.got_pages.to_string(),
            lease.operations.put_pages.to_string(),
            lease.members.iter().map(member).collect::<Vec<_>>().join(" "),
        ]
    };
    leases_of_programs(status).map(row).collect()
}

fn tenants(server: &str, status: &ServerStatus) -> Vec<[String; 9]> {
    let named = status.tenants.iter().filter(|tenant| !tenant.name.is_empty());
    named
        .map(|t| {
            [
                t.name.clone(),
                server.to_owned(),
                size(t.lent_bytes),
                t.quota_bytes.map_or_else(|| "-".to_owned(), size),
                t.connections.to_string(),
                t.regions.to_string(),
                t.queues.to_string(),
                size(t.reply_bytes),
                format!("{:.1} s", Duration::from_micros(t.served_us).as_secs_f64()),
            ]
        })
        .collect()
}

fn queues(server: &str, status: &ServerStatus) -> Vec<[String; 11]> {
    let all = status.leases.iter().flat_map(|lease| lease.queues.iter().map(move |queue| (lease, queue)));
    all.map(|(lease, queue)| {
        [
            queue.name.clone(),
            server.to_owned(),
            lease.lease.to_string(),
            queue.messages.to_string(),
            queue.held.to_string(),
            size(queue.bytes),
            format!("{} to send, {} to take", queue.waiting_senders, queue.waiting_receivers),
            queue.pushed.to_string(),
            queue.done.to_string(),
            queue.redelivered.to_string(),
            queue.full.to_string(),
        ]
    })
    .collect()
}

fn exports(server: &str, status: &ServerStatus) -> Vec<[String; 8]> {
    let all = status.exports.iter().map(|export| {
        [
            export.name.clone(),
            server.to_owned(),
            size(export.bytes),
            size(export.used_bytes),
            export.clients.to_string(),
            size(export.read_bytes),
            size(export.written_bytes),
            export.failures.to_string(),
        ]
    });
    all.collect()
}

fn state(status: &ServerStatus) -> String {
    let mut words = vec![if status.draining { "draining" } else { "up" }];
    if status.short_of_memory {
        words.push("SHORT OF MEMORY");
    }
    if status.compressed {
        words.push("compressed");
    }
    if status.unlocked {
        words.push("NOT LOCKED");
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_every_server_and_says_why_one_is_silent() {
        let mut up = ServerStatus::default();
        (up.memory_bytes, up.lent_bytes, up.free_bytes) = (8 << 30, 2 << 30, 6 << 30);
        let queue = r#"{"name": "jobs", "messages": 7, "held": 2, "bytes": 1048576,
                        "waiting_receivers": 1, "pushed": 9}"#;
        up.leases = serde_json::from_str(&format!(r#"[{{"lease": 3, "queues": [{queue}]}}]"#)).unwrap();
        let silent = query_status(
            &"127.0.0.1:1".parse().unwrap(),
            crate::access::policy(None, rampool_wire::session::Encryption::Auto),
            Instant::now() + Duration::from_secs(5),
        );
        let table = table(&[("one:7117".into(), Ok(up)), ("127.0.0.1:1".into(), silent)]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[1], "one:7117     8 GiB  2 GiB   6 GiB  0 bytes  0        up");
        assert!(lines[2].ends_with("no answer"));
        assert!(table.contains("cannot reach 127.0.0.1:1: cannot connect"), "{table}");
        assert!(
            table.contains(
                "jobs   one:7117  3      7         2      1 MiB   0 to send, 1 to take  9     0     0      0"
            ),
            "{table}"
        );
    }
}
