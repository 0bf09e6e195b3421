//! `rampool bench tenants`: what one tenant notices of another.
//!
//! A server with one shard. In turns, within each round: a victim alone, then next to each kind of load that
//! another tenant can legally make; two equal tenants, one with 1 connection and one with many; and with
//! another build of the server's program (`--before`), the same small reads from both, so that the cost of
//! accounts and scheduler shows. Then what a server with many connections uses when their tenants do their
//! worst, and how soon a client connects while strangers come and say nothing.
//!
//! The hostile tenant's thread has a CPU only while no other wants it: so the victim waits for the server,
//! and not for a CPU that on two machines would be its own.

use super::Common;
use super::report::{Reach, Report};
use super::server::memory::answer;
use super::service::{Place, Service, rampool};
use anyhow::{Context, Result, ensure};
use rampool_net::key::Key;
use rampool_net::transport::{Endpoint, Link, LocalPolicy, PieceMut, Received, Urgency, connect};
use rampool_wire::checksum;
use rampool_wire::elements::{Combine, Kind, Test, Want};
use rampool_wire::frame::{
    Header, Opcode, OpenLease, PageEntry, RegionId, ScanRequest, Status, Window, accumulate_arg,
    encode_extents, encode_frame, encode_put, page_crc, parse_message,
};
use rampool_wire::layout::Layout;
use rampool_wire::session::Encryption;
use rampool_wire::tenant::TenantId;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::collections::VecDeque;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);
const REGION_PAGES: u64 = 4096;
const PAGE: u64 = OS_PAGE_BYTES as u64;
const MIB: u64 = 1 << 20;

/// What one tenant notices of another: latency next to a hostile one, shares of two equal ones
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Length of each measurement
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    round_ms: u64,

    /// Connections of the tenant that has many
    #[arg(long, default_value_t = 64)]
    connections: usize,

    /// Another build of rampool, to compare the small reads a second with
    #[arg(long, value_name = "PROGRAM")]
    before: Option<PathBuf>,
}

/// What a hostile tenant asks for again and again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Load {
    Gathers,
    Scans,
    Gets,
    Updates,
    Clones,
    Frees,
    Unread,
}

const LOADS: [Load; 7] =
    [Load::Gathers, Load::Scans, Load::Gets, Load::Updates, Load::Clones, Load::Frees, Load::Unread];

impl Load {
    fn name(self) -> &'static str {
        match self {
            Self::Gathers => "gathers of 64,000 pieces",
            Self::Scans => "scans of 32,768 elements",
            Self::Gets => "gets of 2 MiB",
            Self::Updates => "updates of 30,000 pieces",
            Self::Clones => "clones of 4096 parts",
            Self::Frees => "regions made, filled and freed",
            Self::Unread => "gathers whose answers are not read",
        }
    }
}

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("tenants", common.quick);
    let round = Duration::from_millis(common.pick(args.round_ms, args.round_ms.min(100)));
    let rounds = common.rounds(5, 1);
    let place = Place { host: "127.0.0.1", server_cpu: None, namespace: None, key: None };
    report.note(
        "one shard; nothing is pinned, and the hostile tenant's thread gives way to the others; loopback \
         TCP, keys proved, not encrypted; all in turns within a round",
    );
    let master = Key::generate();
    let dir = std::env::temp_dir().join(format!("rampool-bench-tenants-{}.key", std::process::id()));
    master.save_new(&dir)?;
    let outcome = measure(args, &mut report, round, rounds, (&master, &dir), &place);
    let _ = std::fs::remove_file(&dir);
    outcome?;
    report.finish(common.json.as_deref())
}

fn measure(
    args: &Args,
    report: &mut Report,
    round: Duration,
    rounds: usize,
    (master, key_file): (&Key, &Path),
    place: &Place<'_>,
) -> Result<()> {
    let server = start(rampool()?, key_file, place, &[])?;
    let endpoint: Endpoint = server.address.parse()?;
    let policy = |name: &str| -> Result<LocalPolicy> {
        let key = master.derive(TenantId { name: name.parse()?, generation: 1 })?;
        Ok(LocalPolicy { key: Some(key), encryption: Encryption::Off, features: 0, ucx: None })
    };
    let master_policy =
        LocalPolicy { key: Some(master.clone()), encryption: Encryption::Off, features: 0, ucx: None };
    let old = match &args.before {
        Some(before) => Some(start(Command::new(before), key_file, place, &[])?),
        None => None,
    };
    let mut now = Pair::start(&endpoint, policy("victim")?, policy("hostile")?)?;
    // The other build knows no tenants.
    let mut before = match &old {
        Some(old) => Some(Pair::start(&old.address.parse()?, master_policy.clone(), master_policy.clone())?),
        None => None,
    };
    for _ in 0..rounds {
        now.measure(round)?;
        if let Some(before) = &mut before {
            before.measure(round)?;
        }
    }
    now.tell(report, "");
    if let Some(before) = &before {
        before.tell(report, "before: ");
        for ((load, is), was) in LOADS.iter().zip(&now.next_to).zip(&before.next_to) {
            let name = format!("p99 next to {}, now against before", load.name());
            report.ratio(&name, is, was, None);
        }
    }

    let (mut one, mut many) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let ends = AtomicBool::new(false);
        let counts = [AtomicU64::new(0), AtomicU64::new(0)];
        std::thread::scope(|scope| -> Result<()> {
            let workers = [(0, "one", 1), (1, "many", args.connections)].map(|(index, name, connections)| {
                let (endpoint, count, ends) = (&endpoint, &counts[index], &ends);
                let policy = policy(name);
                scope.spawn(move || scans(endpoint, &policy?, connections, count, ends))
            });
            std::thread::sleep(round / 5);
            let before: Vec<u64> = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
            std::thread::sleep(2 * round);
            let done: Vec<u64> =
                counts.iter().zip(before).map(|(count, b)| count.load(Ordering::Relaxed) - b).collect();
            ends.store(true, Ordering::Relaxed);
            for worker in workers {
                worker.join().expect("a tenant does not panic")?;
            }
            let [first, second] = [done[0] as f64, done[1] as f64];
            one.push(first);
            many.push(second);
            Ok(())
        })?;
    }
    report.samples("scans of a tenant with 1 connection", "", &one);
    let name = format!("scans of a tenant with {} connections", args.connections);
    report.samples(&name, "", &many);
    report.ratio("many connections against one", &many, &one, Some(Reach::AtMost(1.2)));
    report.ratio("one connection against many", &one, &many, Some(Reach::AtMost(1.2)));

    if let Some(old) = &old {
        let mut sides = [old, &server].map(|server| -> Result<Vec<Client>> {
            let endpoint = server.address.parse()?;
            (0..8)
                .map(|_| {
                    let mut client = Client::new(&endpoint, &master_policy, 4 << 20)?;
                    client.fill(256)?;
                    Ok(client)
                })
                .collect()
        });
        let mut reads = [Vec::new(), Vec::new()];
        for _ in 0..2 * rounds {
            for (side, samples) in sides.iter_mut().zip(&mut reads) {
                let clients = side.as_mut().map_err(|error| anyhow::anyhow!("{error:#}"))?;
                samples.push(reads_a_second(clients, round)?);
            }
        }
        report.samples("4 KiB reads, before", "op/s", &reads[0]);
        report.samples("4 KiB reads, now", "op/s", &reads[1]);
        let reach = Some(Reach::AtLeast(0.97));
        report.ratio("4 KiB reads a second, now against before", &reads[1], &reads[0], reach);
    }
    drop((now, before, old, server));
    measure_memory(args, report, rounds, key_file, place, &policy)?;
    measure_strangers(args, report, rounds, key_file, place, &policy)
}

/// Tenants of many connections do their worst: half of them take no answers, the others send all of a large
/// put but its last byte.
fn measure_memory(
    args: &Args,
    report: &mut Report,
    rounds: usize,
    key_file: &Path,
    place: &Place<'_>,
    policy: &dyn Fn(&str) -> Result<LocalPolicy>,
) -> Result<()> {
    let connections: u64 = args.common.pick(1024, 32);
    let (lent, shards) = (64 << 20, 1);
    // As the guide states it (docs/guide/serve.md).
    let stated = connections * (3 * MIB + (64 << 10)) + (lent / 16).max(32 * MIB) + shards * 2 * MIB;
    let (mut used, mut bounds) = (Vec::new(), Vec::new());
    for _ in 0..rounds.min(3) {
        let more =
            ["--memory", "64M", "--max-connections", &(connections + 8).to_string()].map(str::to_owned);
        let server = start(rampool()?, key_file, place, &more)?;
        let endpoint: Endpoint = server.address.parse()?;
        let before = resident_bytes(server.pid())?;
        let mut clients = Vec::new();
        for number in 0..connections {
            let mut client = Client::new(&endpoint, &policy(&format!("tenant{}", number % 8))?, 16 << 10)?;
            if number % 2 == 0 {
                client.unread_gathers()?
            } else {
                client.most_of_a_put()?
            };
            clients.push(client);
        }
        // Until it grows no more.
        let deadline = Instant::now() + TIMEOUT;
        let mut last = 0;
        let resident = loop {
            clients.iter_mut().try_for_each(|client| client.link.flush().map(drop))?;
            std::thread::sleep(Duration::from_millis(200));
            let now = resident_bytes(server.pid())?;
            if now <= last + (1 << 20) || Instant::now() > deadline {
                break now;
            }
            last = now;
        };
        used.push((resident - before) as f64 / MIB as f64);
        bounds.push(stated as f64 / MIB as f64);
    }
    let name = format!("memory beyond --memory, {connections} connections at their worst");
    report.samples(&name, "MiB", &used);
    report.ratio("of what the guide states", &used, &bounds, Some(Reach::AtMost(1.0)));
    let aim = vec![lent as f64 / 10.0 / MIB as f64 + 64.0; used.len()];
    report.ratio("of a tenth of --memory and 64 MiB", &used, &aim, None);
    Ok(())
}

/// What the kernel counts for a process.
fn resident_bytes(pid: u32) -> Result<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm"))?;
    let pages: u64 = statm.split(' ').nth(1).context("no resident pages in statm")?.parse()?;
    Ok(pages * PAGE)
}

/// Ten thousand connections a minute that say nothing, more than the server has places for, and clients that
/// have a key.
fn measure_strangers(
    args: &Args,
    report: &mut Report,
    rounds: usize,
    key_file: &Path,
    place: &Place<'_>,
    policy: &dyn Fn(&str) -> Result<LocalPolicy>,
) -> Result<()> {
    let length = Duration::from_secs(60) / 5;
    let length = args.common.pick(length, Duration::from_millis(300));
    let more = ["--max-connections", "256"].map(str::to_owned);
    let server = start(rampool()?, key_file, place, &more)?;
    let endpoint: Endpoint = server.address.parse()?;
    let alice = policy("alice")?;
    let ends = AtomicBool::new(false);
    let (mut slowest, mut medians) = (Vec::new(), Vec::new());
    let mut strangers = std::thread::scope(|scope| -> Result<f64> {
        let come = scope.spawn(|| come_and_say_nothing(&server.address, &ends));
        let mut watch = || -> Result<()> {
            for _ in 0..rounds {
                let (began, mut times) = (Instant::now(), Vec::new());
                while began.elapsed() < length {
                    let sent = Instant::now();
                    drop(Client::new(&endpoint, &alice, 1 << 20)?);
                    times.push(sent.elapsed().as_secs_f64());
                    std::thread::sleep(Duration::from_millis(50));
                }
                times.sort_by(f64::total_cmp);
                medians.push(times[times.len() / 2]);
                slowest.push(times[times.len() - 1]);
            }
            Ok(())
        };
        let watched = watch();
        ends.store(true, Ordering::Relaxed);
        let came = come.join().expect("the strangers do not panic");
        watched.and(came)
    })?;
    strangers *= 60.0;
    report.note(format!("{strangers:.0} silent connections a minute, 256 places"));
    report.samples("connected, with a key, among silent strangers", "s", &medians);
    report.samples("the slowest of a round", "s", &slowest);
    let second = vec![1.0; slowest.len()];
    report.ratio("the slowest, in seconds", &slowest, &second, Some(Reach::AtMost(1.0)));
    Ok(())
}

/// Returns how many came in a second.
fn come_and_say_nothing(address: &str, ends: &AtomicBool) -> Result<f64> {
    let every = Duration::from_secs(60) / 10_000;
    let (began, mut count) = (Instant::now(), 0_u32);
    let mut silent = VecDeque::new();
    while !ends.load(Ordering::Relaxed) {
        silent.push_back((Instant::now(), TcpStream::connect(address)?));
        count += 1;
        // The server has ended these.
        while silent.front().is_some_and(|(since, _)| since.elapsed() > Duration::from_secs(7)) {
            silent.pop_front();
        }
        std::thread::sleep((every * count).saturating_sub(began.elapsed()));
    }
    Ok(f64::from(count) / began.elapsed().as_secs_f64())
}

fn start(mut command: Command, key: &Path, place: &Place<'_>, more: &[String]) -> Result<Service> {
    command.args(["serve", "--shards", "1", "--log-level", "error", "--grace-ms", "100"]);
    if !more.iter().any(|option| option == "--memory") {
        command.args(["--memory", "512M", "--store", "compressed"]);
    }
    command
        .args(more)
        .args(["--no-lock", "--listen", "127.0.0.1:0", "--encryption", "off", "--key-file"])
        .arg(key);
    Service::start(command, place).context("the memory server did not start")
}

/// A victim of one server, and what it has seen: alone, and next to each load.
struct Pair {
    endpoint: Endpoint,
    hostile: LocalPolicy,
    victim: Client,
    alone: Vec<f64>,
    next_to: Vec<Vec<f64>>,
}

impl Pair {
    fn start(endpoint: &Endpoint, victim: LocalPolicy, hostile: LocalPolicy) -> Result<Self> {
        let mut victim = Client::new(endpoint, &victim, 64 << 20)?;
        victim.fill(256)?;
        let (alone, next_to) = (Vec::new(), vec![Vec::new(); LOADS.len()]);
        Ok(Self { endpoint: endpoint.clone(), hostile, victim, alone, next_to })
    }

    fn measure(&mut self, round: Duration) -> Result<()> {
        self.alone.push(self.victim.p99_us(round)?);
        for (load, samples) in LOADS.iter().zip(&mut self.next_to) {
            let ends = AtomicBool::new(false);
            let (endpoint, policy, victim) = (&self.endpoint, &self.hostile, &mut self.victim);
            let sample = std::thread::scope(|scope| {
                let hostile = scope.spawn(|| hostile(endpoint, policy, *load, &ends));
                std::thread::sleep(round / 10);
                let sample = victim.p99_us(round);
                ends.store(true, Ordering::Relaxed);
                hostile.join().expect("the hostile tenant does not panic")?;
                sample
            })?;
            samples.push(sample);
        }
        Ok(())
    }

    fn tell(&self, report: &mut Report, which: &str) {
        let name = format!("{which}victim's 4 KiB get, p99, alone");
        report.samples(&name, "us", &self.alone);
        for (load, samples) in LOADS.iter().zip(&self.next_to) {
            let name = format!("{which}victim's 4 KiB get, p99, next to {}", load.name());
            report.samples(&name, "us", samples);
            let reach = which.is_empty().then_some(Reach::AtMost(3.0));
            let name = format!("{which}p99 next to {}, against alone", load.name());
            report.ratio(&name, samples, &self.alone, reach);
        }
    }
}

struct Client {
    link: Link,
    region: RegionId,
    request: u64,
    head: Vec<u8>,
    bulk: Vec<u8>,
}

impl Client {
    fn new(endpoint: &Endpoint, policy: &LocalPolicy, bytes: u64) -> Result<Self> {
        let link = connect(endpoint, policy.clone(), Instant::now() + TIMEOUT)?;
        let mut client =
            Self { link, region: RegionId(0), request: 0, head: Vec::new(), bulk: vec![0; 2 << 20] };
        let open = OpenLease { bytes, pid: std::process::id(), name: "bench".into(), host: "here".into() };
        client.call(Opcode::OpenLease, 0, &open.encode())?;
        client.region = RegionId(client.call(Opcode::OpenRegion, REGION_PAGES * PAGE, b"bench")?.region);
        Ok(client)
    }

    fn send(&mut self, header: Header, table: &[u8]) {
        self.request += 1;
        self.head.clear();
        encode_frame(&mut self.head, Header { request: self.request, ..header }, table, 0);
        self.link.send_head(Urgency::Demand, &self.head, ());
    }

    fn call(&mut self, opcode: Opcode, arg: u64, table: &[u8]) -> Result<Header> {
        let region = if opcode == Opcode::OpenRegion { RegionId(0) } else { self.region };
        self.send(Header::request(opcode, 0).with_region(region).with_arg(arg), table);
        Ok(answer(&mut self.link)?.0)
    }

    /// Pages that pack well, each another.
    fn fill(&mut self, count: u64) -> Result<()> {
        for first in (0..count).step_by(256) {
            let pages: Vec<Vec<u8>> = (first..count.min(first + 256))
                .map(|number| number.to_le_bytes().repeat(OS_PAGE_BYTES / 8))
                .collect();
            let full = u32::try_from(OS_PAGE_BYTES)?;
            let entries: Vec<PageEntry> =
                pages.iter().map(|page| PageEntry { crc: page_crc(page), len: full }).collect();
            let bytes = pages.concat();
            let extent = Extent::new(PageIndex(first), u32::try_from(pages.len())?);
            self.request += 1;
            self.head.clear();
            let header = Header::request(Opcode::Put, self.request).with_region(self.region);
            encode_put(&mut self.head, header, &[extent], &entries);
            let piece = [rampool_net::transport::Piece { ptr: bytes.as_ptr(), len: bytes.len() }];
            // SAFETY: the bytes are there until the answer has come, which is after the frame has left.
            unsafe { self.link.send(Urgency::Demand, &self.head, &piece, ()) };
            answer(&mut self.link)?;
        }
        Ok(())
    }

    /// A page in each part of the page table.
    fn fill_sparsely(&mut self, parts: u64) -> Result<()> {
        self.region = RegionId(self.call(Opcode::OpenRegion, parts * 512 * PAGE, b"sparse")?.region);
        let page = [7; OS_PAGE_BYTES];
        for part in 0..parts {
            self.request += 1;
            self.head.clear();
            let header = Header::request(Opcode::Put, self.request).with_region(self.region);
            let entry = PageEntry { crc: page_crc(&page), len: u32::try_from(PAGE)? };
            encode_put(&mut self.head, header, &[Extent::page(PageIndex(part * 512))], &[entry]);
            let piece = [rampool_net::transport::Piece { ptr: page.as_ptr(), len: page.len() }];
            // SAFETY: the bytes are there until the answer has come, which is after the frame has left.
            unsafe { self.link.send(Urgency::Demand, &self.head, &piece, ()) };
            answer(&mut self.link)?;
        }
        Ok(())
    }

    /// With so many bytes, which are zero.
    fn send_with(&mut self, header: Header, table: &[u8], bytes: usize) {
        static ZEROES: [u8; 1 << 20] = [0; 1 << 20];
        self.request += 1;
        self.head.clear();
        let header = Header { request: self.request, ..header.with_region(self.region) };
        encode_frame(&mut self.head, header, table, bytes);
        let piece = [rampool_net::transport::Piece { ptr: ZEROES.as_ptr(), len: bytes }];
        // SAFETY: a static.
        unsafe { self.link.send(Urgency::Demand, &self.head, &piece, ()) };
    }

    fn ask_pages(&mut self, first: u64, count: u32) {
        self.request += 1;
        self.head.clear();
        let header = Header::request(Opcode::Get, self.request).with_region(self.region);
        encode_extents(&mut self.head, header, &[Extent::new(PageIndex(first), count)]);
        self.link.send_head(Urgency::Demand, &self.head, ());
    }

    /// Asks for all that its share of replies allows, and more.
    fn unread_gathers(&mut self) -> Result<()> {
        let layout = Layout::bytes(16)?.hvector(1 << 16, 1, 64)?;
        let mut table = Vec::new();
        Window { program: layout.program().clone(), from: 0, len: 1 << 20 }.encode(&mut table);
        (0..24).for_each(|_| self.send(Header::request(Opcode::Gather, 0).with_region(self.region), &table));
        Ok(())
    }

    /// A put of 2 MiB, of which the last byte does not come.
    fn most_of_a_put(&mut self) -> Result<()> {
        let entries = vec![PageEntry { crc: 1, len: u32::try_from(PAGE)? }; 512];
        self.head.clear();
        let header = Header::request(Opcode::Put, 1 << 40).with_region(self.region);
        encode_put(&mut self.head, header, &[Extent::new(PageIndex(0), 512)], &entries);
        let mut bytes = std::mem::take(&mut self.head);
        bytes.resize(bytes.len() + (2 << 20) - 1, 7);
        let (mut sent, deadline) = (0, Instant::now() + TIMEOUT);
        while sent < bytes.len() {
            // The link never sends a part of a frame alone; nothing else is queued.
            match rustix::io::write(self.link.socket(), &bytes[sent..]) {
                Ok(some) => sent += some,
                Err(rustix::io::Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => return Err(error.into()),
            }
            ensure!(Instant::now() < deadline, "the server does not take a put");
        }
        Ok(())
    }

    /// The next answer, with its bytes. `None`: it was not there at the deadline.
    fn answered(&mut self, deadline: Instant) -> Result<Option<Header>> {
        loop {
            self.link.flush()?;
            match self.link.receive()? {
                Received::Blocked => {
                    if !self.link.wait(deadline)? {
                        return Ok(None);
                    }
                }
                Received::Head(header) => {
                    ensure!(
                        header.status == Status::Ok,
                        "the server says: {}",
                        parse_message(self.link.table())
                    );
                    if header.bulk_len == 0 {
                        return Ok(Some(header));
                    }
                    let place = PieceMut { ptr: self.bulk.as_mut_ptr(), len: header.bulk_len as usize };
                    // SAFETY: no reply is longer than the buffer, which nothing else touches before `Bulk`.
                    unsafe { self.link.place(&[place]) };
                }
                Received::Bulk(header) => return Ok(Some(header)),
            }
        }
    }

    /// One page after the other for so long: what a hundredth of them take longer than.
    fn p99_us(&mut self, length: Duration) -> Result<f64> {
        let (began, mut samples, mut number) = (Instant::now(), Vec::new(), 0);
        while began.elapsed() < length {
            let sent = Instant::now();
            self.ask_pages(number, 1);
            self.answered(sent + TIMEOUT)?.context("the server did not answer")?;
            ensure!(self.bulk[..8] == number.to_le_bytes(), "page {number} is another one");
            samples.push(sent.elapsed().as_secs_f64() * 1e6);
            number = (number + 1) % 256;
            // As a program that thinks; a flood would be a load of its own.
            std::thread::sleep(Duration::from_micros(200));
        }
        samples.sort_by(f64::total_cmp);
        Ok(samples[samples.len() * 99 / 100])
    }
}

/// Asks until it is told to end.
fn hostile(endpoint: &Endpoint, policy: &LocalPolicy, load: Load, ends: &AtomicBool) -> Result<()> {
    // This thread's alone: the victim goes first.
    rustix::process::nice(19)?;
    let connections = if load == Load::Unread { 16 } else { 4 };
    let mut clients = (0..connections)
        .map(|_| {
            let bytes = match load {
                Load::Clones => 64 << 20,
                // What is changed is not packed any more.
                Load::Updates => 32 << 20,
                _ => 8 << 20,
            };
            let mut client = Client::new(endpoint, policy, bytes)?;
            if load == Load::Clones {
                client.fill_sparsely(4096)?
            } else {
                client.fill(REGION_PAGES)?
            }
            Ok(client)
        })
        .collect::<Result<Vec<Client>>>()?;
    let mut table = Vec::new();
    let header = match load {
        Load::Gathers | Load::Unread => {
            let layout = Layout::bytes(16)?.hvector(4000, 1, 4096)?.hvector(16, 1, 16)?;
            Window { program: layout.program().clone(), from: 0, len: 4000 * 256 }.encode(&mut table);
            Header::request(Opcode::Gather, 0)
        }
        Load::Scans => {
            let layout = Layout::bytes(8)?.hvector(REGION_PAGES, 1, 4096)?.hvector(8, 1, 8)?;
            let window = Window { program: layout.program().clone(), from: 0, len: 1 << 18 };
            ScanRequest::encode_table(&window, [7; 8], [7; 8], &mut table);
            Header::request(Opcode::Scan, 0).with_arg(ScanRequest::arg(Kind::U64, Test::Equal, Want::Count))
        }
        Load::Updates => {
            let layout = Layout::bytes(8)?.hvector(30_000, 1, 520)?;
            let window = Window { program: layout.program().clone(), from: 0, len: 240_000 };
            window.encode_with(&[checksum::crc32c(&vec![0; 240_000])], &mut table);
            Header::request(Opcode::Accumulate, 0).with_arg(accumulate_arg(Kind::U64, Combine::Xor))
        }
        Load::Gets | Load::Frees | Load::Clones => Header::request(Opcode::Get, 0),
    };
    let mut round = 0;
    while !ends.load(Ordering::Relaxed) {
        round += 1;
        for client in &mut clients {
            match load {
                Load::Updates => (0..4).for_each(|_| client.send_with(header, &table, 240_000)),
                Load::Clones => {
                    let clone = client.call(Opcode::CloneRegion, 0, &[])?;
                    let own = std::mem::replace(&mut client.region, RegionId(clone.region));
                    client.call(Opcode::FreeRegion, 0, &[])?;
                    client.region = own;
                }
                Load::Gets => (0..4).for_each(|n| client.ask_pages(n * 512, 512)),
                Load::Frees => {
                    let region = client.call(
                        Opcode::OpenRegion,
                        REGION_PAGES * PAGE,
                        format!("r{round}").as_bytes(),
                    )?;
                    let own = std::mem::replace(&mut client.region, RegionId(region.region));
                    client.fill(1024)?;
                    client.call(Opcode::FreeRegion, 0, &[])?;
                    client.region = own;
                }
                _ => (0..4).for_each(|_| client.send(header.with_region(client.region), &table)),
            }
            client.link.flush()?;
        }
        match load {
            Load::Unread => std::thread::sleep(Duration::from_millis(20)),
            Load::Frees | Load::Clones => {}
            _ => {
                for client in &mut clients {
                    for _ in 0..4 {
                        client.answered(Instant::now() + TIMEOUT)?.context("no answer")?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// The same scans over so many connections, each with some under way.
fn scans(
    endpoint: &Endpoint,
    policy: &LocalPolicy,
    connections: usize,
    count: &AtomicU64,
    ends: &AtomicBool,
) -> Result<()> {
    let layout = Layout::bytes(8)?.hvector(60_000, 1, 256)?;
    let window = Window { program: layout.program().clone(), from: 0, len: 480_000 };
    let mut table = Vec::new();
    ScanRequest::encode_table(&window, [7; 8], [7; 8], &mut table);
    let arg = ScanRequest::arg(Kind::U64, Test::Equal, Want::Count);
    let header = Header::request(Opcode::Scan, 0).with_arg(arg);
    let mut clients =
        (0..connections).map(|_| Client::new(endpoint, policy, 1 << 20)).collect::<Result<Vec<Client>>>()?;
    let under_way = if connections == 1 { 32 } else { 4 };
    for client in &mut clients {
        (0..under_way).for_each(|_| client.send(header.with_region(client.region), &table));
    }
    while !ends.load(Ordering::Relaxed) {
        for client in &mut clients {
            // Whatever is there; the one with a single connection waits for it.
            let mut deadline = Instant::now() + if connections == 1 { TIMEOUT } else { Duration::ZERO };
            while client.answered(deadline)?.is_some() {
                count.fetch_add(1, Ordering::Relaxed);
                client.send(header.with_region(client.region), &table);
                deadline = Instant::now();
            }
        }
    }
    Ok(())
}

/// Reads of a page each from all connections, one under way on each.
fn reads_a_second(clients: &mut [Client], length: Duration) -> Result<f64> {
    let (began, mut reads) = (Instant::now(), 0u32);
    clients.iter_mut().for_each(|client| client.ask_pages(0, 1));
    while began.elapsed() < length {
        for client in clients.iter_mut() {
            client.answered(Instant::now() + TIMEOUT)?.context("the server did not answer")?;
            reads += 1;
            client.ask_pages(u64::from(reads % 256), 1);
            client.link.flush()?;
        }
    }
    let rate = f64::from(reads) / began.elapsed().as_secs_f64();
    for client in clients.iter_mut() {
        client.answered(Instant::now() + TIMEOUT)?.context("the server did not answer")?;
    }
    Ok(rate)
}
