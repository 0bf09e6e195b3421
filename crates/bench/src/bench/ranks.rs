//! Two ranks of a program over TCP: both on this machine's loopback, or one at either end of a link.

use std::io::Read;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rampool_kernel::thread::allowed_cpus;
use rampool_net::transport::{SAME_HOST_VARIABLE, SameHost};
use rampool_shared::environment::variable;

use super::link::Link;
use super::service::before_exec;

const LIMIT: Duration = Duration::from_secs(120);
const PORT: u16 = 7118;

/// Ended when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where two ranks run.
#[derive(Clone, Copy)]
pub struct Where<'a> {
    /// With rank 1 at its other end.
    pub link: Option<&'a Link>,
    /// Each on a CPU of its own, as on a machine of its own, where there are two.
    pub apart: bool,
}

/// Runs two ranks of what `command` makes and returns what rank 0 printed, at most a pipe's worth. `what`
/// names it in errors.
///
/// # Errors
/// If they cannot be started, fail, or have not ended after two minutes.
pub fn two(
    Where { link, apart }: Where<'_>,
    protocol: &str,
    key: &Path,
    what: &str,
    command: impl Fn() -> Result<Command>,
) -> Result<String> {
    let host = if link.is_some() { Link::HERE } else { "127.0.0.1" };
    // The port is free: nothing else is in this namespace, and it is asked for before the ranks start.
    drop(TcpListener::bind((host, PORT)).with_context(|| format!("cannot listen on {host}:{PORT}"))?);
    let cpus = if apart { allowed_cpus() } else { Vec::new() };
    let mut ranks = Vec::new();
    for rank in 0..2 {
        let mut command = command()?;
        command
            .env(variable::RANK, rank.to_string())
            .env(variable::RANKS, "2")
            .env(variable::RUN, "bench-two-ranks");
        command.env(variable::RENDEZVOUS, format!("{host}:{PORT}"));
        command
            .env("RAMPOOL_PROTOCOL", protocol)
            .env("RAMPOOL_KEY_FILE", key)
            .env("RAMPOOL_ENCRYPTION", "off");
        command.env(SAME_HOST_VARIABLE, SameHost::Socket.to_string());
        command.stdin(Stdio::null()).stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() });
        let there = link.filter(|_| rank == 1).map(|link| link.there.as_raw_fd());
        let own = if rank == 0 { cpus.first() } else { cpus.last() };
        before_exec(&mut command, there, own.copied());
        ranks.push(Running(command.spawn()?));
    }
    let deadline = Instant::now() + LIMIT;
    for (rank, running) in ranks.iter_mut().enumerate() {
        let status = loop {
            if let Some(status) = running.0.try_wait()? {
                break status;
            }
            if Instant::now() >= deadline {
                bail!("{what} under {protocol} has not ended within {} s", LIMIT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        ensure!(status.success(), "rank {rank} of {what} under {protocol} ended with {status}");
    }
    let mut printed = String::new();
    ranks[0].0.stdout.take().expect("it is piped").read_to_string(&mut printed)?;
    Ok(printed)
}
