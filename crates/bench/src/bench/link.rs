//! Links of a stated rate on one machine: a network namespace here and one behind each link, a pair of
//! virtual interfaces, a token bucket at either end.
//!
//! Nothing is visible outside: this process moves into one namespace, servers into the other, and the kernel
//! removes both with the last process in them. Needs root, `ip` and `tc`.

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::service::before_exec;

/// How fast a link is.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rate {
    #[value(name = "100m")]
    HundredMbit,
    #[value(name = "1g")]
    OneGbit,
    #[value(name = "10g")]
    TenGbit,
}

impl Rate {
    /// The nominal rate, in GB/s of bytes on the wire, frames included.
    pub fn line_gb(self) -> f64 {
        match self {
            Self::HundredMbit => 0.0125,
            Self::OneGbit => 0.125,
            Self::TenGbit => 1.25,
        }
    }
    pub fn name(self) -> &'static str {
        match self {
            Self::HundredMbit => "100 Mbit/s",
            Self::OneGbit => "1 Gbit/s",
            Self::TenGbit => "10 Gbit/s",
        }
    }
    /// The token bucket's burst: as small as the kernel's timers allow, so that a burst does not look like a
    /// faster link.
    pub fn burst_bytes(self) -> u32 {
        match self {
            Self::HundredMbit => 2 << 10,
            Self::OneGbit => 20 << 10,
            Self::TenGbit => 256 << 10,
        }
    }
    fn bucket(self) -> Vec<String> {
        let (rate, latency) = match self {
            Self::HundredMbit => ("100mbit", "50ms"),
            Self::OneGbit => ("1gbit", "5ms"),
            Self::TenGbit => ("10gbit", "5ms"),
        };
        ["rate", rate, "burst", &self.burst_bytes().to_string(), "latency", latency]
            .map(str::to_owned)
            .to_vec()
    }
}

pub struct Link {
    pub rate: Rate,
    /// The namespace of the servers.
    pub there: File,
    /// Their address.
    pub host: String,
}

impl Link {
    pub const HOST: &'static str = "10.77.0.2";
    pub const HERE: &'static str = "10.77.0.1";

    /// Makes the link. The calling thread, and what it starts from now on, is at this end of it and reaches
    /// nothing else.
    pub fn make(rate: Rate) -> Result<Self> {
        Ok(Self::several(rate, 1)?.remove(0))
    }

    /// The same with several links that have this end in common: each is a machine of its own.
    pub fn several(rate: Rate, count: usize) -> Result<Vec<Self>> {
        let there = (0..count).map(|_| new_namespace()).collect::<Result<Vec<_>>>()?;
        let here = new_namespace()?;
        there.into_iter().enumerate().map(|(n, there)| Self::between(rate, &here, there, n)).collect()
    }

    /// A listener at the other end, whoever accepts from it.
    pub fn listen(&self) -> Result<TcpListener> {
        let bind = || -> Result<TcpListener> {
            // SAFETY: a system call without pointers; it moves this thread alone, which ends soon.
            if unsafe { libc::setns(self.there.as_raw_fd(), libc::CLONE_NEWNET) } != 0 {
                bail!("cannot enter a link's namespace: {}", std::io::Error::last_os_error());
            }
            TcpListener::bind((self.host.as_str(), 0)).context("cannot listen at the end of a link")
        };
        std::thread::scope(|scope| scope.spawn(bind).join().expect("binding does not panic"))
    }

    fn between(rate: Rate, here: &File, there: File, number: usize) -> Result<Self> {
        let path = format!("/proc/{}/fd/{}", std::process::id(), there.as_raw_fd());
        let (near, host) = (format!("near{number}"), format!("10.77.{number}.2"));
        let ends = [(here, near.as_str(), format!("10.77.{number}.1")), (&there, "far", host.clone())];
        tool(here, "ip", &["link", "add", &near, "type", "veth", "peer", "name", "far"])?;
        tool(here, "ip", &["link", "set", "far", "netns", &path])?;
        for (namespace, device, address) in ends {
            tool(namespace, "ip", &["link", "set", "lo", "up"])?;
            // What is longer than the bucket, the kernel cuts up. That takes its CPUs longer than the link,
            // where both directions are busy.
            let longest = (rate.burst_bytes() * 4 / 5).min(64 << 10).to_string();
            tool(namespace, "ip", &["link", "set", device, "gso_max_size", &longest])?;
            tool(namespace, "ip", &["addr", "add", &format!("{address}/30"), "dev", device])?;
            tool(namespace, "ip", &["link", "set", device, "up"])?;
            let mut arguments = vec!["qdisc", "add", "dev", device, "root", "tbf"];
            let bucket = rate.bucket();
            arguments.extend(bucket.iter().map(String::as_str));
            tool(namespace, "tc", &arguments)?;
            // The kernel's default congestion control, or one that every kernel has, whatever this machine is
            // set to: BBR mistakes the few microseconds between two namespaces for the link's round trip.
            let choose = "for name in cubic reno; do echo $name > /proc/sys/net/ipv4/tcp_congestion_control \
                && exit; done 2> /dev/null; exit 1";
            tool(namespace, "sh", &["-c", choose])?;
        }
        Ok(Self { rate, there, host })
    }
}

/// Moves the calling thread into a new network namespace.
fn new_namespace() -> Result<File> {
    // SAFETY: a system call without pointers.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        bail!("cannot create a network namespace ({}); --link needs root", std::io::Error::last_os_error());
    }
    File::open("/proc/thread-self/ns/net").context("cannot open the new network namespace")
}

fn tool(namespace: &File, program: &str, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(program);
    command.args(arguments);
    before_exec(&mut command, Some(namespace.as_raw_fd()), None);
    let done = command.output().with_context(|| format!("cannot run `{program}`; install iproute2"))?;
    if !done.status.success() {
        bail!("`{program} {}` failed: {}", arguments.join(" "), String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}
