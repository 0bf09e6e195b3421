//! `rampool bench server`: reads of 4 KiB from many connections, compared with GETs of the same size from
//! redis.
//!
//! One load generator drives both, with the same threads, connections, outstanding requests and check of
//! every byte, in turns: a round of one, a round of the other. Only the protocol differs. A third server,
//! which only receives a request and sends 4 KiB, shows what the sockets and the load generator leave to
//! gain. Within one host, the memory server is also driven over shared memory and over its Unix socket, and
//! redis over its own.

mod least;
mod load;
pub(super) mod memory;
pub(super) mod redis;

use super::Common;
use super::report::{Reach, Report};
use super::service::Service;
use super::service::{before_exec, rampool};
use anyhow::{Context, Result, bail};
use load::{Connection, Load, Sample};
use rampool_wire::session::features;
use rampool_wire::units::OS_PAGE_BYTES;
use rustix::net::sockopt::{set_tcp_congestion, socket_acceptconn};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time for a server to start, and to answer before the measurement.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Reads of 4 KiB from a memory server, compared with GETs of the same size from redis
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Number of connections
    #[arg(long, default_value_t = 16)]
    connections: usize,

    /// Number of threads that drive the connections
    #[arg(long, default_value_t = 1)]
    threads: usize,

    /// Requests that each connection has outstanding
    #[arg(long, default_value_t = 1)]
    depth: usize,

    /// Length of a round
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    round_ms: u64,

    /// Number of different pages read
    #[arg(long, default_value_t = 4096)]
    pages: usize,

    /// Serving threads of the memory server [default: as `rampool serve`]
    #[arg(long)]
    shards: Option<usize>,

    /// Use Unix sockets instead of TCP for both
    #[arg(long)]
    unix: bool,

    /// The redis program to measure against
    #[arg(long, default_value = "redis-server", value_name = "PROGRAM")]
    redis: PathBuf,

    /// Further arguments for redis, such as --io-threads 2
    #[arg(last = true)]
    redis_arguments: Vec<String>,
}

pub fn run(args: &Args) -> Result<i32> {
    if args.connections == 0 || args.threads == 0 || args.depth == 0 || args.pages == 0 {
        bail!("connections, threads, depth and pages must be at least 1");
    }
    let common = &args.common;
    let count = common.pick(args.pages, args.pages.min(256));
    let round_ms = common.pick(args.round_ms, args.round_ms.min(100));
    let mut report = Report::start("server", common.quick);
    report.note(format!(
        "{} connections over {}, {} outstanding on each, {} thread(s) driving; {count} different pages of 4 \
         KiB of random bytes, every answer checked",
        args.connections,
        if args.unix { "Unix sockets" } else { "loopback TCP" },
        args.depth,
        args.threads
    ));
    report.note("nothing is pinned; the servers' own CPU time per operation does not depend on other load");
    let dir = WorkDir::create()?;
    let pages = random_pages(count)?;
    let crcs: Vec<u32> = pages.iter().map(|page| rampool_wire::frame::page_crc(page)).collect();
    let load = Load { depth: args.depth, length: Duration::from_millis(round_ms), crcs: &crcs };

    let (memory_server, endpoint) = start_memory_server(args, &dir.0.join("server"), args.unix)?;
    let mut ours = load::spread(memory::connect(&endpoint, args.connections, &pages, 0)?, args.threads);
    let (rings_server, rings_endpoint) = start_memory_server(args, &dir.0.join("rings"), true)?;
    let mut rings = load::spread(
        memory::connect(&rings_endpoint, args.connections, &pages, features::RINGS)?,
        args.threads,
    );
    let (redis_server, address) = start_redis(&args.redis, args.unix, &args.redis_arguments, &dir.0, None)?;
    let mut theirs = load::spread(redis::connect(&address, args.connections, &pages)?, args.threads);
    // With --unix the first two are those already.
    let mut same_host = if args.unix { None } else { Some(SameHost::start(args, &pages, &dir.0)?) };

    let least_server = Service::least_server()?;
    let least_crcs = least::crcs();
    let least_load = Load { crcs: &least_crcs, ..load };
    let mut least = load::spread(least::connect(&least_server.address, args.connections)?, args.threads);

    let (mut our, mut their, mut least_rounds, mut rings_rounds) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..common.rounds(5, 1) {
        our.push(measure(&load, &mut ours, memory_server.0.id())?);
        their.push(measure(&load, &mut theirs, redis_server.0.id())?);
        least_rounds.push(measure(&least_load, &mut least, least_server.pid())?);
        rings_rounds.push(measure(&load, &mut rings, rings_server.0.id())?);
        if let Some(sockets) = &mut same_host {
            sockets.our.push(measure(&load, &mut sockets.ours, sockets.memory_server.0.id())?);
            sockets.their.push(measure(&load, &mut sockets.theirs, sockets.redis.0.id())?);
        }
    }
    let figures: [Figure; 4] = [
        ("reads", "op/s", |f| f.per_second),
        ("reads, p50", "us", |f| f.median_us),
        ("server's CPU time an operation", "us", |f| f.cpu_us),
        ("load generator's CPU time an operation", "us", |f| f.load_us),
    ];
    for (what, unit, value) in figures {
        let mut servers = vec![
            ("rampool", &our),
            ("redis", &their),
            ("least (TCP)", &least_rounds),
            ("rampool over shared memory", &rings_rounds),
        ];
        if let Some(sockets) = &same_host {
            servers.extend([
                ("rampool over its Unix socket", &sockets.our),
                ("redis over its Unix socket", &sockets.their),
            ]);
        }
        for (who, rounds) in servers {
            let samples: Vec<f64> = rounds.iter().map(value).collect();
            report.samples(&format!("{who}: {what}"), unit, &samples);
        }
    }
    let samples = |rounds: &[Round], value: fn(&Round) -> f64| rounds.iter().map(value).collect::<Vec<_>>();
    let [reads, _, cpu, _] = figures.map(|(_, _, value)| {
        [&our, &their, &least_rounds, &rings_rounds].map(|rounds| samples(rounds, value))
    });
    // The promise is for this many connections, over any transport; a smoke run promises nothing.
    let reach = (args.connections == 16 && !args.unix && !common.quick).then_some(Reach::AtLeast(2.0));
    report.ratio("reads a second: rampool / redis", &reads[0], &reads[1], reach);
    report.ratio("reads a second: least / redis", &reads[2], &reads[1], None);
    report.ratio(
        "reads a second: rampool over shared memory / the same over sockets",
        &reads[3],
        &reads[0],
        None,
    );
    report.ratio("server's CPU time an operation: rampool / redis", &cpu[0], &cpu[1], None);
    report.ratio("server's CPU time an operation: least / redis", &cpu[2], &cpu[1], None);
    if let Some(sockets) = &same_host {
        let [ours, theirs] =
            [&sockets.our, &sockets.their].map(|rounds| samples(rounds, |round| round.per_second));
        report.ratio(
            "same host, reads a second: rampool / redis, over their Unix sockets",
            &ours,
            &theirs,
            None,
        );
        report.ratio(
            "same host, reads a second: rampool over shared memory / redis over its Unix socket",
            &reads[3],
            &theirs,
            reach,
        );
    }
    report.finish(common.json.as_deref())
}

/// Both over their Unix sockets, next to those that are driven over TCP.
struct SameHost {
    memory_server: ServerProcess,
    redis: ServerProcess,
    ours: Vec<Connections>,
    theirs: Vec<Connections>,
    our: Vec<Round>,
    their: Vec<Round>,
}

impl SameHost {
    fn start(args: &Args, pages: &[Vec<u8>], dir: &Path) -> Result<Self> {
        // Not the one that is driven over shared memory: it goes on looking there for a while.
        let (memory_server, endpoint) = start_memory_server(args, &dir.join("unix"), true)?;
        let ours = load::spread(memory::connect(&endpoint, args.connections, pages, 0)?, args.threads);
        let (redis, address) = start_redis(&args.redis, true, &args.redis_arguments, dir, None)?;
        let theirs = load::spread(redis::connect(&address, args.connections, pages)?, args.threads);
        Ok(Self { memory_server, redis, ours, theirs, our: Vec::new(), their: Vec::new() })
    }
}

/// A column of the report: what it is, its unit, and how it follows from a round.
type Figure = (&'static str, &'static str, fn(&Round) -> f64);

/// One round of one server.
struct Round {
    per_second: f64,
    median_us: f64,
    cpu_us: f64,
    load_us: f64,
}

fn measure(load: &Load<'_>, connections: &mut [Connections], server: u32) -> Result<Round> {
    let before = (cpu_time(server)?, own_cpu_time()?);
    let sample: Sample = load.run(connections)?;
    let (server_cpu, load_cpu) =
        (cpu_time(server)?.saturating_sub(before.0), own_cpu_time()?.saturating_sub(before.1));
    let us_each =
        |cpu: Duration| cpu.as_secs_f64() * 1e6 / (sample.per_second() * sample.took().as_secs_f64());
    Ok(Round {
        per_second: sample.per_second(),
        median_us: sample.median_us(),
        cpu_us: us_each(server_cpu),
        load_us: us_each(load_cpu),
    })
}

/// Time that this process has run so far, threads that have ended included.
fn own_cpu_time() -> Result<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Ok(Duration::new(u64::try_from(time.tv_sec)?, u32::try_from(time.tv_nsec)?))
}

fn random_pages(count: usize) -> Result<Vec<Vec<u8>>> {
    let mut random = std::fs::File::open("/dev/urandom")?;
    let mut pages = vec![vec![0; OS_PAGE_BYTES]; count];
    for page in &mut pages {
        std::io::Read::read_exact(&mut random, page)?;
    }
    Ok(pages)
}

/// A directory of our own, removed at the end.
pub(super) struct WorkDir(pub(super) PathBuf);

impl WorkDir {
    pub(super) fn create() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("rampool-bench-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        // What is left lies in the system's temporary directory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server process that ends with the measurement.
pub(super) struct ServerProcess(Child);

/// Time that the threads of a process have run so far, as the scheduler counts it.
fn cpu_time(pid: u32) -> Result<Duration> {
    let mut ns = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        ns += text.split_whitespace().next().context("schedstat is empty")?.parse::<u64>()?;
    }
    Ok(Duration::from_nanos(ns))
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `files`: what its files' names begin with.
fn start_memory_server(
    args: &Args,
    files: &Path,
    unix: bool,
) -> Result<(ServerProcess, rampool_net::transport::Endpoint)> {
    let ready = files.with_extension("ready");
    let listen = if unix {
        format!("unix:{}", files.with_extension("sock").display())
    } else {
        "127.0.0.1:0".to_owned()
    };
    let mut command = rampool()?;
    command.args(["serve", "--log-level", "warn", "--listen", &listen]).arg("--ready-file").arg(&ready);
    command.arg("--memory").arg((args.pages as u64 * OS_PAGE_BYTES as u64 * 2 + (64 << 20)).to_string());
    if let Some(shards) = args.shards {
        command.args(["--shards", &shards.to_string()]);
    }
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context("cannot start the memory server")?;
    let mut server = ServerProcess(child);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Ok(text) = std::fs::read_to_string(&ready) {
            return Ok((server, text.trim().parse()?));
        }
        if let Some(status) = server.0.try_wait()? {
            bail!("the memory server ended at once ({status})");
        }
        if Instant::now() > deadline {
            bail!("the memory server did not start in time");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts a redis that keeps nothing, on a CPU of its own if one is named.
pub(super) fn start_redis(
    program: &Path,
    unix: bool,
    arguments: &[String],
    dir: &Path,
    cpu: Option<usize>,
) -> Result<(ServerProcess, redis::Address)> {
    let mut command = Command::new(program);
    before_exec(&mut command, None, cpu);
    command.args(["--save", "", "--appendonly", "no", "--dir"]).arg(dir);
    let address = if unix {
        let socket = dir.join("redis.sock");
        command.args(["--port", "0", "--unixsocket"]).arg(&socket);
        redis::Address::Unix(socket)
    } else {
        // Free a moment ago; redis cannot choose one itself.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string()]);
        redis::Address::Tcp(port)
    };
    command.args(arguments);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
    let mut server = ServerProcess(
        child.with_context(|| format!("cannot start {}; is redis installed?", program.display()))?,
    );
    let deadline = Instant::now() + TIMEOUT;
    while !redis::answers(&address) {
        if let Some(status) = server.0.try_wait()? {
            bail!("redis ended at once ({status})");
        }
        if Instant::now() > deadline {
            bail!("redis did not start in time");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    if let redis::Address::Tcp(_) = address
        && let Err(error) = send_unpaced(&server.0)
    {
        eprintln!(
            "redis's listening socket cannot be reached ({error:#}): its answers leave as this machine paces \
             them, rampool's unpaced"
        );
    }
    Ok((server, address))
}

/// Turns pacing off for connections that a process accepts from now on: rampool's own connections within a
/// machine are not paced, and redis has no setting for it. A connection inherits this from the listening
/// socket.
fn send_unpaced(server: &Child) -> Result<()> {
    let process = pidfd_open(Pid::from_child(server), PidfdFlags::empty())?;
    for entry in std::fs::read_dir(format!("/proc/{}/fd", server.id()))? {
        let number = entry?.file_name().to_string_lossy().parse()?;
        let fd = match pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) {
            // Closed by now.
            Err(rustix::io::Errno::BADF) => continue,
            got => got?,
        };
        if socket_acceptconn(&fd).is_ok_and(|listens| listens) {
            set_tcp_congestion(&fd, "reno")?;
        }
    }
    Ok(())
}

/// What both kinds of connections share.
type Connections = Vec<Box<dyn Connection>>;
