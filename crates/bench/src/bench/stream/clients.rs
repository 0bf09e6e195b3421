//! One to seven client processes on one server: how they share it.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::kernels::{Kernel, RemoteArrays, Replay};
use super::{Bench, CLIENTS, SPIN};
use crate::bench::report::Report;
use crate::bench::service::{Paged, before_exec};
use rampool_pager::fault::FaultModeChoice;

/// One client of the experiment
#[derive(clap::Args, Debug)]
pub struct Args {
    #[arg(long)]
    server: String,
    #[arg(long)]
    key_file: Option<PathBuf>,
    #[arg(long)]
    elements: usize,
    #[arg(long)]
    prefetch_bytes: u32,
    #[arg(long)]
    passes: usize,
}

const LOCAL_BYTES: u64 = 8 << 20;

/// Prints `ready`, waits for a line, runs, prints its bandwidth, waits for a line, checks, prints `ok`.
pub fn run(args: &Args) -> Result<i32> {
    let memory = Paged {
        server: &args.server,
        key: args.key_file.as_deref(),
        memory_bytes: args.elements as u64 * 24 + (32 << 20),
        local_bytes: LOCAL_BYTES,
        page_bytes: 4096,
        prefetch_bytes: args.prefetch_bytes,
        spin: SPIN,
        fault_mode: FaultModeChoice::Auto,
    }
    .open()?;
    let mut remote = RemoteArrays::new(&memory, args.elements)?;
    let mut replay = Replay::default();
    let mut line = String::new();
    let mut next = || std::io::stdin().read_line(&mut line);
    println!("ready");
    next()?;
    let started = Instant::now();
    for _ in 0..args.passes {
        remote.arrays().run(Kernel::Triad);
        replay.did(Kernel::Triad);
    }
    println!(
        "{}",
        Kernel::Triad.bytes(args.elements) * args.passes as f64 / started.elapsed().as_secs_f64() / 1e9
    );
    next()?;
    replay.verify(&remote.arrays())?;
    println!("ok");
    Ok(0)
}

pub(super) fn measure(bench: &Bench<'_>, report: &mut Report) -> Result<()> {
    let common = &bench.args.common;
    let elements = bench.elements / 4;
    report.note(format!(
        "clients: each has arrays of {} MB and 8 MiB local; all clients share {}",
        elements * 24 / 1_000_000,
        if bench.place.server_cpu.is_some() {
            "one CPU, so over loopback that CPU is what they share"
        } else {
            "the CPU with the server"
        }
    ));
    for count in 1..=common.pick(CLIENTS, 2) {
        let mut clients = (0..count).map(|_| Client::start(bench, elements)).collect::<Result<Vec<_>>>()?;
        for client in &clients {
            client.expect_line("ready")?;
        }
        for client in &mut clients {
            client.go_on()?;
        }
        let each: Vec<f64> = clients
            .iter()
            .map(|c| c.line()?.parse::<f64>().context("a client reports no bandwidth"))
            .collect::<Result<_>>()?;
        for client in &mut clients {
            client.go_on()?;
            client.expect_line("ok")?;
        }
        let parameters = |what: &str| {
            let link = &bench.link_name;
            json!({ "experiment": "clients", "clients": count, "what": what, "link": link })
        };
        report.series(&format!("triad, {count} clients, each"), "GB/s", parameters("each"), &each);
        report.series(
            &format!("triad, {count} clients, together"),
            "GB/s",
            parameters("together"),
            &[each.iter().sum()],
        );
    }
    Ok(())
}

/// A client process. Ended when dropped.
struct Client {
    child: Child,
    lines: Receiver<String>,
}

impl Client {
    fn start(bench: &Bench<'_>, elements: usize) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "stream-client", "--server", &bench.server.address]);
        if let Some(key) = bench.place.key {
            command.arg("--key-file").arg(key);
        }
        let passes = bench.args.common.pick(if bench.args.link.is_some() { 1 } else { 4 }, 1);
        command
            .args(["--elements", &elements.to_string(), "--prefetch-bytes", &bench.prefetch().to_string()])
            .args(["--passes", &passes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        before_exec(&mut command, None, None);
        let mut child = command.spawn().context("cannot start a client")?;
        let out = child.stdout.take().expect("it is piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(out).lines().map_while(Result::ok).try_for_each(|l| sender.send(l))
        });
        Ok(Self { child, lines })
    }

    fn go_on(&mut self) -> Result<()> {
        writeln!(self.child.stdin.as_mut().expect("it is piped")).context("a client has ended early")
    }

    fn line(&self) -> Result<String> {
        self.lines.recv_timeout(Duration::from_secs(120)).context("a client ended, or said nothing for 120 s")
    }

    fn expect_line(&self, wanted: &str) -> Result<()> {
        let line = self.line()?;
        if line != wanted {
            bail!("a client says {line:?} instead of {wanted:?}");
        }
        Ok(())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
