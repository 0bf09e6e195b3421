//! What a reader notices of a server that is killed, silent, restarted or drained, and how fast that gets its
//! pages again, or others take its place: three servers, two copies of each page, and a client that reads
//! pages in random order, one after the other.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rampool_client::pool::{Copies, Pool, PoolConfig, PoolEvent, PoolRegion, ServerState, ServerStats};
use rampool_net::key::Key;
use rampool_wire::session::Encryption;
use rampool_wire::units::{ByteLen, Extent, OS_PAGE_BYTES, PageIndex};
use rustix::process::{Pid, Signal, kill_process};

use super::super::Common;
use super::super::link::{Link, Rate};
use super::super::report::{Reach, Report};
use super::super::service::{KeyFile, Place, Service};
use super::super::workload::{random_bytes, word};

const SERVERS: usize = 3;
const LINK: Rate = Rate::OneGbit;
/// Ends what would wait for ever.
const WATCHDOG: Duration = Duration::from_secs(60);
/// How often the client looks whether a lost server is there again, while nothing happens.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Pages of one plain store, and how many of these are under way: more than a connection takes at once.
const STORE_PAGES: u32 = 32;
const STORES: usize = 16;

pub fn measure(common: &Common, report: &mut Report) -> Result<()> {
    let place = Place { host: "127.0.0.1", server_cpu: None, namespace: None, key: None };
    let mut cluster = Cluster::start(&place, common.pick(128 << 20, 16 << 20))?;
    let length = Duration::from_millis(common.pick(500, 150));
    let (mut stalls, mut refills) = (Stalls::default(), Refills::default());
    for round in 0..common.rounds(5, 1) {
        cluster.fail(round % SERVERS, length, &mut stalls)?;
        cluster.refill(round % SERVERS, length, &mut refills)?;
        cluster.drain(round % SERVERS, length, &mut stalls)?;
        cluster.rebuild(round % SERVERS, &mut refills)?;
    }
    report.note("stalls, reads and refills: three servers, two copies, one reader of random pages");
    stalls.report(report);
    refills.report("loopback", report);
    // Namespaces belong to threads.
    match std::thread::scope(|scope| scope.spawn(|| over_link(common, length)).join()) {
        Ok(Ok(refills)) => refills.report(LINK.name(), report),
        Ok(Err(error)) => report.note(format!("left out: refills over {}: {error:#}", LINK.name())),
        Err(panic) => std::panic::resume_unwind(panic),
    }
    Ok(())
}

/// Refills where a link is the limit, and not the CPUs that the client shares with the servers.
fn over_link(common: &Common, length: Duration) -> Result<Refills> {
    let (link, key) = (Link::make(LINK)?, KeyFile::make()?);
    let place =
        Place { host: Link::HOST, server_cpu: None, namespace: Some(&link.there), key: Some(&key.path) };
    let mut cluster = Cluster::start(&place, common.pick(64 << 20, 8 << 20))?;
    let mut refills = Refills::default();
    for round in 0..common.rounds(3, 1) {
        cluster.kill(round % SERVERS, Duration::ZERO)?;
        cluster.refill(round % SERVERS, length, &mut refills)?;
        cluster.rebuild(round % SERVERS, &mut refills)?;
    }
    Ok(refills)
}

/// A sample of each for every round.
#[derive(Default)]
struct Stalls {
    calm_ms: Vec<f64>,
    killed_ms: Vec<f64>,
    silent_ms: Vec<f64>,
    restarted_ms: Vec<f64>,
    drained_ms: Vec<f64>,
    healthy_p50: Vec<f64>,
    degraded_p50: Vec<f64>,
}

impl Stalls {
    fn report(&self, report: &mut Report) {
        let mut longest = |what: &str, samples: &[f64], reach: Option<f64>| {
            let name = format!("a reader's longest stall, {what}");
            report.samples(&name, "ms", samples);
            if let Some(most) = reach {
                report.figure(&format!("{name}, ms"), samples, Some(Reach::AtMost(most)));
            }
        };
        longest("nothing happens", &self.calm_ms, None);
        longest("one of three servers is killed", &self.killed_ms, Some(50.0));
        longest("one of three servers is silent", &self.silent_ms, Some(250.0));
        longest("one of three servers is restarted", &self.restarted_ms, Some(50.0));
        longest("one of three servers is drained", &self.drained_ms, Some(50.0));
        for (what, samples) in [("none", &self.healthy_p50), ("one", &self.degraded_p50)] {
            let name = format!("a read, p50, {what} of three servers lost");
            report.samples(&name, "us", samples);
        }
        let most = Some(Reach::AtMost(1.1));
        report.ratio(
            "a read, p50: one of three servers lost / none lost",
            &self.degraded_p50,
            &self.healthy_p50,
            most,
        );
    }
}

#[derive(Default)]
struct Refills {
    refill_mb: Vec<f64>,
    rebuild_mb: Vec<f64>,
    link_mb: Vec<f64>,
    before_p99: Vec<f64>,
    refilling_p99: Vec<f64>,
}

impl Refills {
    fn report(&self, link: &str, report: &mut Report) {
        for (what, unit, samples) in [
            ("refill of one of three servers", "MB/s", &self.refill_mb),
            ("rebuild on two of three servers", "MB/s", &self.rebuild_mb),
            ("plain stores to it", "MB/s", &self.link_mb),
            ("a read, p99, before", "us", &self.before_p99),
            ("a read, p99, while it is refilled", "us", &self.refilling_p99),
        ] {
            report.samples(&format!("{link}: {what}"), unit, samples);
        }
        let name = format!("{link}: bytes a second: refill / plain stores");
        report.ratio(&name, &self.refill_mb, &self.link_mb, Some(Reach::AtLeast(0.8)));
        let name = format!("{link}: bytes a second: rebuild / plain stores");
        report.ratio(&name, &self.rebuild_mb, &self.link_mb, Some(Reach::AtLeast(0.8)));
        let name = format!("{link}: a read, p99: while a server is refilled / before");
        report.ratio(&name, &self.refilling_p99, &self.before_p99, Some(Reach::AtMost(1.5)));
    }
}

/// The servers, and a client of them.
pub(super) struct Cluster<'a> {
    servers: Servers<'a>,
    reader: Reader,
}

impl<'a> Cluster<'a> {
    pub fn start(place: &'a Place<'a>, bytes: usize) -> Result<Self> {
        let mut servers = Servers { place, bytes, addresses: Vec::new(), running: Vec::new() };
        for _ in 0..SERVERS {
            let server = servers.serve(&format!("{}:0", place.host))?;
            servers.addresses.push(server.address.clone());
            servers.running.push(Some(server));
        }
        let reader = Reader::start(&servers, random_bytes(1, bytes))?;
        Ok(Self { servers, reader })
    }

    pub fn address(&self, server: usize) -> &str {
        &self.servers.addresses[server]
    }

    /// The same servers, one of which is reached by another address.
    pub fn by(self, server: usize, address: String) -> Result<Self> {
        let Self { mut servers, mut reader } = self;
        servers.addresses[server] = address;
        reader.pool.close();
        let reader = Reader::start(&servers, reader.content)?;
        Ok(Self { servers, reader })
    }

    /// Silences a server, then kills it.
    fn fail(&mut self, victim: usize, length: Duration, found: &mut Stalls) -> Result<()> {
        let silent = self.read_while(length, |_| true, |servers| servers.signal(victim, Signal::STOP))?;
        found.silent_ms.push(longest_ms(&silent.after()));
        self.servers.signal(victim, Signal::CONT)?;
        self.reader.wait_until_well()?;

        let restarted = self.restart(victim, length)?;
        found.restarted_ms.push(longest_ms(&restarted.after()));

        let killed = self.kill(victim, length)?;
        found.calm_ms.push(longest_ms(&killed.before()));
        found.killed_ms.push(longest_ms(&killed.after()));
        found.healthy_p50.push(us(killed.before(), 50));
        found.degraded_p50.push(us(killed.after(), 50));
        Ok(())
    }

    /// Starts a server that was killed; then once more, while pages are read.
    fn refill(&mut self, victim: usize, length: Duration, found: &mut Refills) -> Result<()> {
        let before = self.reader.stored_bytes(victim);
        self.servers.begin(victim)?;
        let took = self.reader.wait_until_whole()?;
        found.refill_mb.push((self.reader.stored_bytes(victim) - before) / took.as_secs_f64() / 1e6);
        found.link_mb.push(self.plain_stores(victim)?);

        let restarted = self.restart(victim, length)?;
        found.before_p99.push(us(restarted.before(), 99));
        found.refilling_p99.push(us(restarted.refilling(), 99));
        Ok(())
    }

    /// Drains a server while pages are read, until it has ended; then it begins again.
    fn drain(&mut self, victim: usize, length: Duration, found: &mut Stalls) -> Result<()> {
        let left = |heard: &Heard| heard.drained.is_some();
        let drained = self.read_while(length, left, |servers| servers.signal(victim, Signal::TERM))?;
        found.drained_ms.push(longest_ms(&drained.after()));
        self.servers.end(victim)?;
        self.servers.begin(victim)?;
        self.reader.wait_until_well()
    }

    /// Others take the place of a server that is away for good; then it begins again.
    fn rebuild(&mut self, victim: usize, found: &mut Refills) -> Result<()> {
        self.servers.end(victim)?;
        let others = || (0..SERVERS).filter(|server| *server != victim);
        let before: f64 = others().map(|server| self.reader.stored_bytes(server)).sum();
        let took = self.reader.wait_until_rebuilt()?;
        let after: f64 = others().map(|server| self.reader.stored_bytes(server)).sum();
        found.rebuild_mb.push((after - before) / took.as_secs_f64() / 1e6);
        self.servers.begin(victim)?;
        self.reader.wait_until_well()
    }

    fn kill(&mut self, victim: usize, length: Duration) -> Result<Reads> {
        self.read_while(length, |heard| heard.lost.is_some(), |servers| servers.end(victim))
    }

    fn restart(&mut self, victim: usize, length: Duration) -> Result<Reads> {
        self.read_while(
            length,
            |heard| heard.whole.is_some(),
            |servers| {
                servers.end(victim)?;
                servers.begin(victim)
            },
        )
    }

    /// Reads for so long, then goes on while something is done, and for as long after that, and until what
    /// the client has heard is `enough`.
    pub fn read_while(
        &mut self,
        length: Duration,
        enough: impl Fn(&Heard) -> bool + Sync,
        act: impl FnOnce(&mut Servers<'a>) -> Result<()>,
    ) -> Result<Reads> {
        let acted = OnceLock::new();
        let (reader, servers) = (&mut self.reader, &mut self.servers);
        let is_over = || acted.get().is_some_and(|at: &Instant| at.elapsed() >= length);
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| reader.read_until(|heard| is_over() && enough(heard)));
            std::thread::sleep(length);
            let at = Instant::now();
            let done = act(servers);
            acted.set(Instant::now()).expect("set here only");
            let (all, heard) = reading.join().expect("the reader does not panic")?;
            done.map(|()| Reads { all, at, heard })
        })
    }

    /// MB/s of a client with one copy of each page, and so of its only server's link.
    fn plain_stores(&self, server: usize) -> Result<f64> {
        let mut pool = self.servers.connect(server..=server, self.reader.content.len(), Copies::One)?;
        let region = pool.create_region()?;
        let began = Instant::now();
        store(&mut pool, region, &self.reader.content)?;
        let rate = self.reader.content.len() as f64 / began.elapsed().as_secs_f64() / 1e6;
        pool.close();
        Ok(rate)
    }
}

pub(super) struct Servers<'a> {
    place: &'a Place<'a>,
    bytes: usize,
    addresses: Vec<String>,
    /// `None`: ended.
    running: Vec<Option<Service>>,
}

impl Servers<'_> {
    fn serve(&self, listen: &str) -> Result<Service> {
        Service::memory_server_at(
            self.place,
            listen,
            self.bytes as u64 * 4 + (64 << 20),
            Duration::from_micros(100),
        )
    }

    fn connect(&self, of: RangeInclusive<usize>, bytes: usize, copies: Copies) -> Result<Pool> {
        let servers = self.addresses[of].iter().map(|address| address.parse()).collect::<Result<_, _>>()?;
        let mut config = PoolConfig::new(servers, ByteLen(bytes as u64 + (16 << 20)), "rampool bench");
        config.copies = copies;
        config.encryption = Encryption::Off;
        config.key = self.place.key.map(Key::load).transpose()?;
        Ok(Pool::connect(&config)?)
    }

    /// kill -9
    fn end(&mut self, server: usize) -> Result<()> {
        self.running[server].take().map(drop).context("it runs no more")
    }

    /// The same server again, empty.
    fn begin(&mut self, server: usize) -> Result<()> {
        self.running[server] = Some(self.serve(&self.addresses[server])?);
        Ok(())
    }

    fn signal(&self, server: usize, signal: Signal) -> Result<()> {
        let pid = self.running[server].as_ref().context("it runs no more")?.pid();
        let pid = Pid::from_raw(i32::try_from(pid)?).context("no process has number 0")?;
        Ok(kill_process(pid, signal)?)
    }
}

/// What each read took, and when it ended.
pub(super) struct Reads {
    all: Vec<(Instant, Duration)>,
    /// When the reader was disturbed.
    at: Instant,
    heard: Heard,
}

impl Reads {
    fn those(&self, are_meant: impl Fn(Instant) -> bool) -> Vec<Duration> {
        self.all.iter().filter(|(at, _)| are_meant(*at)).map(|(_, took)| *took).collect()
    }

    pub fn all(&self) -> Vec<Duration> {
        self.those(|_| true)
    }

    fn before(&self) -> Vec<Duration> {
        self.those(|at| at <= self.at)
    }

    pub fn after(&self) -> Vec<Duration> {
        self.those(|at| at > self.at)
    }

    fn refilling(&self) -> Vec<Duration> {
        self.those(|at| {
            self.heard.returned.is_some_and(|from| from <= at) && self.heard.whole.is_none_or(|to| at <= to)
        })
    }
}

fn longest_ms(reads: &[Duration]) -> f64 {
    reads.iter().max().map_or(f64::NAN, |took| took.as_secs_f64() * 1e3)
}

/// What this share of the reads, in per cent, took no longer than.
pub(super) fn us(mut reads: Vec<Duration>, share: usize) -> f64 {
    reads.sort_unstable();
    let last = reads.len().saturating_sub(1);
    reads.get(last * share / 100).map_or(f64::NAN, |took| took.as_secs_f64() * 1e6)
}

/// When the client heard what of the server that was disturbed.
#[derive(Default)]
pub(super) struct Heard {
    lost: Option<Instant>,
    returned: Option<Instant>,
    whole: Option<Instant>,
    /// Others have taken its place; it was left.
    moved: Option<Instant>,
    drained: Option<Instant>,
}

struct Reader {
    /// Before what its operations use.
    pool: Pool,
    region: PoolRegion,
    content: Vec<u8>,
    page: Vec<u8>,
    reads: u64,
}

impl Reader {
    fn start(servers: &Servers<'_>, content: Vec<u8>) -> Result<Self> {
        let mut pool = servers.connect(0..=SERVERS - 1, content.len() * 2, Copies::Two)?;
        let region = pool.create_region()?;
        store(&mut pool, region, &content)?;
        Ok(Self { pool, region, content, page: vec![0; OS_PAGE_BYTES], reads: 0 })
    }

    fn read_until(&mut self, is_over: impl Fn(&Heard) -> bool) -> Result<(Vec<(Instant, Duration)>, Heard)> {
        let (began, mut reads, mut heard) = (Instant::now(), Vec::new(), Heard::default());
        while !is_over(&heard) {
            ensure!(began.elapsed() < WATCHDOG, "the server is not used again within {WATCHDOG:?}");
            let pages = (self.content.len() / OS_PAGE_BYTES) as u64;
            let page = word(2, self.reads) % pages;
            self.reads += 1;
            let (sent, extent) = (Instant::now(), Extent::page(PageIndex(page)));
            // SAFETY: the page is not touched until the event is there, and dropped behind the pool.
            unsafe { self.pool.fetch(self.region, 0, &[extent], self.page.as_mut_ptr(), true) };
            while !self.hear(&mut heard)? {
                ensure!(sent.elapsed() < WATCHDOG, "a read has no answer within {WATCHDOG:?}");
            }
            reads.push((Instant::now(), sent.elapsed()));
            let is_page =
                self.content.chunks_exact(OS_PAGE_BYTES).nth(usize::try_from(page)?) == Some(&self.page);
            ensure!(is_page, "WRONG CONTENT: page {page} is another one");
        }
        Ok((reads, heard))
    }

    /// Waits for something for a moment. True: a read has its answer.
    fn hear(&mut self, heard: &mut Heard) -> Result<bool> {
        for server in self.pool.lost_servers().collect::<Vec<_>>() {
            self.pool.lease_anew(server);
        }
        let event = self.pool.next_event(Instant::now() + LOOK_EVERY)?;
        let now = Some(Instant::now());
        match event {
            Some(PoolEvent::Fetched { .. }) => return Ok(true),
            Some(PoolEvent::Degraded { .. }) => heard.lost = now,
            Some(PoolEvent::Returned { .. }) => heard.returned = now,
            Some(PoolEvent::CaughtUp { .. }) => heard.whole = now,
            Some(PoolEvent::Holds { out: true, .. }) => heard.moved = now,
            Some(PoolEvent::Drained { .. }) => heard.drained = now,
            Some(PoolEvent::Absent { .. } | PoolEvent::Draining { .. } | PoolEvent::Holds { .. }) | None => {}
            Some(other) => bail!("{other:?}"),
        }
        Ok(false)
    }

    /// How long a server that is there again gets its pages.
    fn wait_until_whole(&mut self) -> Result<Duration> {
        let (began, mut heard) = (Instant::now(), Heard::default());
        loop {
            if let Some((returned, whole)) = heard.returned.zip(heard.whole) {
                return Ok(whole - returned);
            }
            ensure!(began.elapsed() < WATCHDOG, "the server has not all of its pages within {WATCHDOG:?}");
            self.hear(&mut heard)?;
        }
    }

    /// How long others that take the place of a lost server get its pages.
    fn wait_until_rebuilt(&mut self) -> Result<Duration> {
        let (began, mut heard) = (Instant::now(), Heard::default());
        loop {
            let lacks = |server: &ServerStats| server.missed_pages > 0;
            if let Some(moved) = heard.moved
                && !self.pool.stats().servers.iter().any(lacks)
            {
                return Ok(moved.elapsed());
            }
            ensure!(began.elapsed() < WATCHDOG, "no others have taken its place within {WATCHDOG:?}");
            self.hear(&mut heard)?;
        }
    }

    /// And what lies elsewhere meanwhile is dropped.
    fn wait_until_well(&mut self) -> Result<()> {
        let is_well = |server: &ServerStats| server.state == ServerState::Well && server.left_pages == 0;
        let began = Instant::now();
        while !self.pool.stats().servers.iter().all(is_well) {
            ensure!(began.elapsed() < WATCHDOG, "the server is not used again within {WATCHDOG:?}");
            self.hear(&mut Heard::default())?;
        }
        Ok(())
    }

    fn stored_bytes(&self, server: usize) -> f64 {
        (self.pool.stats().servers[server].stored_pages * OS_PAGE_BYTES as u64) as f64
    }
}

/// Stores all of a region. Its memory is the region's from the first page on.
fn store(pool: &mut Pool, region: PoolRegion, content: &[u8]) -> Result<()> {
    let mut parts =
        (0..).step_by(STORE_PAGES as usize).zip(content.chunks(STORE_PAGES as usize * OS_PAGE_BYTES));
    let until = Instant::now() + WATCHDOG;
    loop {
        while pool.operations_under_way() < STORES
            && let Some((first, part)) = parts.next()
        {
            let extent = Extent::new(PageIndex(first), u32::try_from(part.len() / OS_PAGE_BYTES)?);
            // SAFETY: nothing changes the content, which outlives the pool's use: this waits for all, or the
            // benchmark ends, and the pool with it.
            unsafe { pool.store(region, 0, &[(extent, part.as_ptr())]) };
        }
        if pool.operations_under_way() == 0 {
            return Ok(());
        }
        match pool.next_event(until)?.context("the servers do not take the pages in time")? {
            PoolEvent::Stored { .. } => {}
            other => bail!("{other:?}"),
        }
    }
}
