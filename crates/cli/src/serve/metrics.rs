//! Metrics for Prometheus, and a page for people: numbers read from the server on request, over a minimal
//! HTTP.

use anyhow::{Context, Result};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use rampool_net::transport::Endpoint;
use rampool_server::block::ExportStatus;
use rampool_server::{Observer, QueueStatus, ServerStatus};
use rampool_wire::units::OS_PAGE_BYTES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::latest::Latest;
use super::page::Page;
use crate::copies::Lacking;
use crate::top;

/// A client that has not sent its request by then is dropped.
const CLIENT_TIME: Duration = Duration::from_secs(2);
/// With more clients than this, the one that has taken longest to ask is dropped, so that clients never wait
/// for each other.
const MOST_CLIENTS: usize = 16;
/// How long to wait if there are too few descriptors to accept even one client.
const WANT_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_REQUEST_BYTES: usize = 8 * 1024;

type Read64 = fn(&ServerStatus) -> u64;

/// Name, help, value. The format appends `_total` to counters.
const GAUGES: &[(&str, &str, Read64)] = &[
    ("rampool_memory_bytes", "Bytes of memory that this server lends", |s| s.memory_bytes),
    ("rampool_leased_bytes", "Bytes of memory that are leased", |s| s.lent_bytes),
    ("rampool_free_bytes", "Bytes of memory that a new lease could take", |s| s.free_bytes),
    ("rampool_held_bytes", "Bytes of memory taken from the system for pages", |s| s.held_bytes),
    (
        "rampool_used_bytes",
        "Bytes of memory in frames that hold a page; rampool_held_bytes minus this is fragmentation",
        |s| s.used_bytes,
    ),
    ("rampool_frames", "Frames that hold a page", |s| s.frames),
    ("rampool_leases", "Leases", |s| s.leases.len() as u64),
    ("rampool_members", "Processes that are members of a lease", |s| {
        s.leases.iter().map(|l| l.members.len() as u64).sum()
    }),
    ("rampool_connections", "Connections", |s| s.connections),
    ("rampool_queues", "Remote queues", |s| queues(s, |_| 1)),
    ("rampool_queue_messages", "Messages in queues", |s| queues(s, |q| q.messages)),
    ("rampool_queue_held", "Messages that receivers have taken and not acknowledged", |s| {
        queues(s, |q| q.held)
    }),
    ("rampool_queue_bytes", "Bytes of heads and bodies in queues", |s| queues(s, |q| q.bytes)),
    ("rampool_queue_waiting_senders", "Requests that wait for room in a queue", |s| {
        queues(s, |q| q.waiting_senders)
    }),
    ("rampool_queue_waiting_receivers", "Requests that wait for a message", |s| {
        queues(s, |q| q.waiting_receivers)
    }),
    ("rampool_exports", "Block devices", |s| s.exports.len() as u64),
    ("rampool_export_bytes", "Size of the block devices in bytes", |s| exports(s, |e| e.bytes)),
    ("rampool_export_used_bytes", "Bytes of memory in pages of block devices that are not zero", |s| {
        exports(s, |e| e.used_bytes)
    }),
    ("rampool_export_clients", "Connections of clients to block devices", |s| exports(s, |e| e.clients)),
    ("rampool_unlocked", "1 if some memory could not be locked against swapping", |s| u64::from(s.unlocked)),
    ("rampool_short_of_memory", "1 while the machine is short of memory and no new leases are given", |s| {
        u64::from(s.short_of_memory)
    }),
    ("rampool_draining", "1 while the server waits for its clients to leave", |s| u64::from(s.draining)),
    ("rampool_uptime_seconds", "Time since the server started", |s| s.uptime_ms / 1000),
];

const COUNTERS: &[(&str, &str, Read64)] = &[
    ("rampool_gets", "Requests for pages", |s| s.operations.gets),
    ("rampool_got_pages", "Pages read by clients", |s| s.operations.got_pages),
    ("rampool_puts", "Requests that store pages", |s| s.operations.puts),
    ("rampool_put_pages", "Pages stored by clients", |s| s.operations.put_pages),
    ("rampool_discards", "Requests that forget pages", |s| s.operations.discards),
    ("rampool_control", "Other requests", |s| s.operations.control),
    ("rampool_refused", "Requests answered with an error", |s| s.operations.refused),
    ("rampool_received_page_bytes", "Bytes of pages received", |s| s.operations.bytes_in),
    ("rampool_sent_page_bytes", "Bytes of pages sent", |s| s.operations.bytes_out),
    ("rampool_export_read_bytes", "Bytes read from block devices", |s| exports(s, |e| e.read_bytes)),
    ("rampool_export_written_bytes", "Bytes written to block devices", |s| exports(s, |e| e.written_bytes)),
    ("rampool_export_failures", "Parts of block clients' commands that failed", |s| {
        exports(s, |e| e.failures)
    }),
    ("rampool_protocol_errors", "Connections ended because the client broke the protocol", |s| {
        s.protocol_errors
    }),
    ("rampool_failed_handshakes", "Connections refused: wrong key, wrong version, not allowed", |s| {
        s.failed_handshakes
    }),
    ("rampool_sleeps", "Times a serving thread found nothing to do and slept", |s| s.sleeps),
];

type OfRuns = fn(&[Lacking]) -> u64;

/// Gauges of runs of the server's user on its machine: of others it knows leases, but not which pages other
/// servers have as well.
const RUNS: &[(&str, &str, OfRuns)] = &[
    ("rampool_runs_lacking_copies", "Runs here whose pages do not have all of their copies", |runs| {
        runs.len() as u64
    }),
    ("rampool_lacking_bytes", "Bytes of pages of runs here that lack a copy", |runs| {
        runs.iter().map(|run| run.pages * OS_PAGE_BYTES as u64).sum()
    }),
];

/// Sum of a number over block devices.
fn exports(status: &ServerStatus, read: fn(&ExportStatus) -> u64) -> u64 {
    status.exports.iter().map(read).sum()
}

/// Sum of a number over queues.
fn queues(status: &ServerStatus, read: fn(&QueueStatus) -> u64) -> u64 {
    status.leases.iter().flat_map(|lease| &lease.queues).map(read).sum()
}

#[derive(Debug)]
struct Metrics(Arc<Latest>);

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let (status, lacking) = (self.0.status(), top::lacking());
        let gauges = GAUGES.iter().map(|(name, help, read)| (name, help, read(&status)));
        for (name, help, value) in
            gauges.chain(RUNS.iter().map(|(name, help, read)| (name, help, read(&lacking))))
        {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        for (name, help, read) in COUNTERS {
            let counter = ConstCounter::new(read(&status));
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}

/// Answers in a thread of its own until dropped.
pub struct Responder {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Responder {
    /// `endpoints`: where the server listens for its clients.
    pub fn start(address: &SocketAddr, observer: Observer, endpoints: &[Endpoint]) -> Result<Self> {
        let listener = TcpListener::bind(address)
            .with_context(|| format!("cannot listen for metrics clients on {address}"))?;
        let address = listener.local_addr()?;
        let mut registry = Registry::default();
        let latest = Latest::new(observer);
        registry.register_collector(Box::new(Metrics(Arc::clone(&latest))));
        let mut site = Site { registry, page: Page::new(latest, endpoints.to_vec()) };
        let stop = Arc::new(AtomicBool::new(false));
        listener.set_nonblocking(true)?;
        let thread = std::thread::Builder::new().name("rampool-metrics".into()).spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut asking = Asking::default();
                while !stop.load(Ordering::SeqCst) {
                    asking.turn(&listener, &mut site);
                }
            }
        })?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the thread from its wait for a client.
        if TcpStream::connect_timeout(&self.address, CLIENT_TIME).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Clients that have not sent their whole request, or not taken the whole answer, the oldest first.
#[derive(Default)]
struct Asking(VecDeque<Client>);

struct Client {
    stream: TcpStream,
    request: Vec<u8>,
    /// What is left to send; empty before the request is complete.
    answer: Vec<u8>,
    deadline: Instant,
}

impl Asking {
    /// Waits for an event, and handles it.
    fn turn(&mut self, listener: &TcpListener, site: &mut Site) {
        let mut watched = vec![PollFd::new(listener, PollFlags::IN)];
        watched.extend(self.0.iter().map(|client| PollFd::new(&client.stream, client.waits_for())));
        // The deadlines are in order.
        let left = self
            .0
            .front()
            .map_or(CLIENT_TIME, |oldest| oldest.deadline.saturating_duration_since(Instant::now()));
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(1),
            tv_nsec: left.subsec_nanos().into(),
        };
        let is_error = poll(&mut watched, Some(&left)).is_err_and(|error| error != Errno::INTR);
        drop(watched);
        match listener.accept() {
            Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                if self.0.len() == MOST_CLIENTS {
                    self.0.pop_front();
                }
                self.0.push_back(Client {
                    stream,
                    request: Vec::new(),
                    answer: Vec::new(),
                    deadline: Instant::now() + CLIENT_TIME,
                });
            }
            Err(error) if is_error || error.kind() != std::io::ErrorKind::WouldBlock => {
                tracing::debug!(%error, "cannot accept a metrics client");
                // It may be for want of descriptors, which other connections have to release.
                if self.0.pop_front().is_none() {
                    std::thread::sleep(WANT_PAUSE);
                }
            }
            _ => {}
        }
        self.0.retain_mut(|client| match client.go_on(site) {
            Ok(goes_on) => goes_on && Instant::now() < client.deadline,
            Err(error) => {
                tracing::debug!(%error, "a metrics client disconnected");
                false
            }
        });
    }
}

impl Client {
    fn waits_for(&self) -> PollFlags {
        if self.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT }
    }

    /// Takes what has arrived, and answers when the request is complete. Returns false when the client is
    /// done.
    fn go_on(&mut self, site: &mut Site) -> std::io::Result<bool> {
        if self.answer.is_empty() {
            let mut bytes = [0; 1024];
            while !self.request.windows(4).any(|end| end == b"\r\n\r\n") {
                match self.stream.read(&mut bytes) {
                    Ok(0) => return Ok(false),
                    Ok(n) => self.request.extend_from_slice(&bytes[..n]),
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
                    Err(error) => return Err(error),
                }
                if self.request.len() > LONGEST_REQUEST_BYTES {
                    return Ok(false);
                }
            }
            self.answer = site.answer(&self.request);
        }
        while !self.answer.is_empty() {
            match self.stream.write(&self.answer) {
                Ok(0) => return Ok(false),
                Ok(n) => drop(self.answer.drain(..n)),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }
}

/// What can be asked for.
struct Site {
    registry: Registry,
    page: Page,
}

impl Site {
    fn answer(&mut self, request: &[u8]) -> Vec<u8> {
        let (status, kind, body) = self.respond(request);
        // The page runs its own script and loads nothing from elsewhere, whatever names clients have.
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
             Content-Security-Policy: default-src 'self'; frame-ancestors 'none'; base-uri 'none'\r\n\r\n",
            body.len()
        );
        [head.as_bytes(), body.as_bytes()].concat()
    }

    fn respond(&mut self, request: &[u8]) -> (&'static str, &'static str, String) {
        const TEXT: &str = "text/plain; charset=utf-8";
        const NOT_FOUND: &str = "there is / for people and /metrics for Prometheus\n";
        let mut words = request.split(|b| *b == b' ');
        match (words.next(), words.next()) {
            (Some(b"GET"), Some(b"/metrics")) => {
                let mut body = String::new();
                match prometheus_client::encoding::text::encode(&mut body, &self.registry) {
                    Ok(()) => ("200 OK", "application/openmetrics-text; version=1.0.0; charset=utf-8", body),
                    Err(error) => ("500 Internal Server Error", TEXT, format!("{error}\n")),
                }
            }
            (Some(b"GET"), Some(path)) => match self.page.resource(path) {
                Some((kind, body)) => ("200 OK", kind, body),
                None => ("404 Not Found", TEXT, NOT_FOUND.to_owned()),
            },
            _ => ("405 Method Not Allowed", TEXT, "only GET\n".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rampool_server::{Server, ServerConfig};

    fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut client = TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        client.write_all(request).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn prometheus_gets_every_number_and_others_get_an_error() {
        let config = ServerConfig {
            lock_memory: false,
            shards: 1,
            ..ServerConfig::new(64 << 20, "127.0.0.1:0".parse().unwrap())
        };
        let server = Server::start(config).unwrap();
        let metrics =
            Responder::start(&"127.0.0.1:0".parse().unwrap(), server.observer(), server.endpoints()).unwrap();
        let answer = ask(metrics.address(), b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("\nrampool_memory_bytes 67108864\n"), "{answer}");
        let names =
            GAUGES.iter().chain(COUNTERS).map(|(name, ..)| name).chain(RUNS.iter().map(|(name, ..)| name));
        for name in names {
            assert!(answer.contains(&format!("# HELP {name} ")), "{name} is missing");
        }
        assert!(ask(metrics.address(), b"GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(metrics.address(), b"\x00\xff\xff\r\n\r\n").starts_with("HTTP/1.1 405"));
        for (path, kind) in [("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")] {
            let answer = ask(metrics.address(), format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes());
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains(kind), "{answer}");
            assert!(answer.contains("default-src 'self'") && !answer.contains("https://"), "{answer}");
        }
        let answer = ask(metrics.address(), b"GET /rows.json HTTP/1.1\r\n\r\n");
        let rows: serde_json::Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        assert_eq!(rows["status"]["memory_bytes"], 64 << 20);
        assert_eq!(rows["rows"]["servers"][0]["name"], server.endpoints()[0].to_string());
        drop(TcpStream::connect(metrics.address()).unwrap());
        let _silent: Vec<TcpStream> =
            (0..3 * MOST_CLIENTS).map(|_| TcpStream::connect(metrics.address()).unwrap()).collect();
        assert!(ask(metrics.address(), b"GET /metrics HTTP/1.1\r\n\r\n").contains("rampool_gets_total 0"));
    }

    /// What `contrib` has for Grafana and Prometheus asks for what there is.
    #[test]
    fn dashboards_and_alerts_name_metrics_that_exist() {
        let counters = COUNTERS.iter().map(|(name, ..)| format!("{name}_total"));
        let gauges = GAUGES.iter().map(|(name, ..)| name).chain(RUNS.iter().map(|(name, ..)| name));
        let exists: Vec<String> = gauges.map(|name| (*name).to_owned()).chain(counters).collect();
        for text in [
            include_str!("../../../../contrib/grafana/rampool.json"),
            include_str!("../../../../contrib/prometheus/rampool.rules.yml"),
        ] {
            let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            let named: Vec<&str> = words.filter(|word| word.starts_with("rampool_")).collect();
            assert!(named.len() > 5, "{named:?}");
            for name in named {
                assert!(exists.iter().any(|one| one == name), "there is no metric {name}");
            }
        }
    }
}
