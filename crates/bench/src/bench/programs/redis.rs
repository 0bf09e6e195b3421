//! Redis with random values: the median time of a GET on one connection, each reply compared.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Bench, Wanted, Way, mib};
use crate::bench::report::{Reach, Report, median};
use crate::bench::trial::Program;
use crate::bench::workload::{random_bytes, word};

const NAME: &str = "Redis GET, 1 KB";
const VALUE_BYTES: usize = 1000;

pub fn measure(bench: &Bench<'_>, report: &mut Report) -> Result<()> {
    let probe =
        Command::new("redis-server").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|s| s.success()) {
        report.note("left out: there is no redis-server");
        return Ok(());
    }
    let keys = bench.common.pick(700_000, 20_000);
    let gets = bench.common.pick(60_000, 1_000);
    let mut medians = vec![Vec::new(); bench.ways.len()];
    for _ in 0..bench.common.rounds(1, 1) {
        // Native comes first, and says how large it is.
        let mut peak = 0;
        for (way, medians) in bench.ways.iter().zip(&mut medians) {
            let found = match (*way, &bench.swap) {
                (Way::Native, _) => session(|program| Ok(program.native()), keys, gets),
                (Way::KernelSwap, None) => continue,
                (Way::KernelSwap, Some(swap)) => {
                    let limit = swap.limit(bench.local_bytes(peak))?;
                    let within = |program: &Program| {
                        let mut command = program.native();
                        limit.put(&mut command).map(|()| command)
                    };
                    session(within, keys, gets)
                }
                (way, _) => {
                    let (_servers, options) = bench.under_rampool(way, peak)?;
                    session(|program| program.paged(&options), keys, gets)
                }
            };
            match found {
                Ok((times, resident)) => {
                    medians.push(median(&times));
                    if *way == Way::Native {
                        peak = resident;
                        let local = mib(bench.local_bytes(peak));
                        report.note(format!("{NAME}: {keys} keys, peak {}, local {local}", mib(peak)));
                    }
                }
                Err(error) if *way == Way::KernelSwap => {
                    report.note(format!("{NAME}: with kernel swap: {error:#}"));
                }
                Err(error) => return Err(error),
            }
        }
    }
    bench.tell(report, NAME, "us", &medians);
    let against_swap = Some(Reach::AtMost(1.0));
    bench.ratios(report, NAME, &medians, &Wanted { against_swap, ..Wanted::default() });
    Ok(())
}

/// Fills a Redis, then times random GETs in microseconds. Also gives the peak of its resident set.
fn session(command: impl Fn(&Program) -> Result<Command>, keys: u64, gets: u64) -> Result<(Vec<f64>, u64)> {
    // Free a moment ago; if another process takes it meanwhile, the server reports that and ends.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let arguments = [
        "redis-server",
        "--bind",
        "127.0.0.1",
        "--port",
        &port.to_string(),
        "--save",
        "",
        "--appendonly",
        "no",
    ];
    let program = Program { name: NAME, argv: arguments.into_iter().map(Into::into).collect() };
    let mut command = command(&program)?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe. `rampool run` passes
    // the signal on to its program.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
    let mut running = Running { child: command.spawn().context("cannot start redis-server")? };
    let mut client = Client::connect(port, &mut running.child)?;
    for first in (0..keys).step_by(100) {
        let part = first..(first + 100).min(keys);
        for key in part.clone() {
            client.queue(&[b"SET", name(key).as_bytes(), &random_bytes(key, VALUE_BYTES)]);
        }
        client.send()?;
        for _ in part {
            client.expect_line("+OK")?;
        }
    }
    let mut times = Vec::new();
    for n in 0..gets {
        let key = word(9, n) % keys;
        client.queue(&[b"GET", name(key).as_bytes()]);
        let started = Instant::now();
        client.send()?;
        let value = client.bulk()?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
        if value != random_bytes(key, VALUE_BYTES) {
            bail!("WRONG VALUE of key {key}");
        }
    }
    let peak =
        std::fs::read_to_string(format!("/proc/{}/status", running.child.id())).ok().and_then(|text| {
            let kib = text
                .lines()
                .find_map(|l| l.strip_prefix("VmHWM:"))?
                .trim()
                .strip_suffix("kB")?
                .trim()
                .parse::<u64>()
                .ok()?;
            Some(kib * 1024)
        });
    Ok((times, peak.context("the peak of redis-server is unknown")?))
}

fn name(key: u64) -> String {
    format!("k{key}")
}

/// Ended when dropped, with all of its processes.
struct Running {
    child: Child,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(group) = i32::try_from(self.child.id()) {
            // SAFETY: the group of our own child, which is not collected yet.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        let _ = self.child.wait();
    }
}

/// As much of Redis' protocol as this needs.
struct Client {
    stream: BufReader<TcpStream>,
    out: Vec<u8>,
}

impl Client {
    fn connect(port: u16, server: &mut Child) -> Result<Self> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
                    stream.set_write_timeout(Some(Duration::from_secs(60)))?;
                    return Ok(Self { stream: BufReader::with_capacity(64 << 10, stream), out: Vec::new() });
                }
                Err(e) if e.kind() == ErrorKind::ConnectionRefused && Instant::now() < deadline => {
                    if let Some(status) = server.try_wait()? {
                        bail!("redis-server ended at once ({status})");
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(e) => return Err(e).context("redis-server does not answer"),
            }
        }
    }

    fn queue(&mut self, parts: &[&[u8]]) {
        self.out.extend(format!("*{}\r\n", parts.len()).bytes());
        for part in parts {
            self.out.extend(format!("${}\r\n", part.len()).bytes());
            self.out.extend_from_slice(part);
            self.out.extend_from_slice(b"\r\n");
        }
    }

    fn send(&mut self) -> Result<()> {
        self.stream.get_mut().write_all(&self.out).context("redis-server takes nothing more")?;
        self.out.clear();
        Ok(())
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).context("redis-server does not answer")?;
        line.strip_suffix("\r\n").map(str::to_owned).context("redis-server closed the connection")
    }

    fn expect_line(&mut self, wanted: &str) -> Result<()> {
        let line = self.line()?;
        if line != wanted {
            bail!("redis-server says {line:?} instead of {wanted:?}");
        }
        Ok(())
    }

    fn bulk(&mut self) -> Result<Vec<u8>> {
        let line = self.line()?;
        let length: usize = line
            .strip_prefix('$')
            .and_then(|n| n.parse().ok())
            .with_context(|| format!("redis-server says {line:?}"))?;
        let mut value = vec![0; length + 2];
        self.stream.read_exact(&mut value).context("redis-server closed the connection")?;
        value.truncate(length);
        Ok(value)
    }
}
