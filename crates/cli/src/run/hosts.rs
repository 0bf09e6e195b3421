//! Memory servers that a run starts on named machines through a remote shell, and that end with it.
//!
//! Each server reads the run's key from its standard input, which stays open as long as the run, its
//! caretaker included, lives: when it closes, whatever the reason, the server ends. So nothing is left
//! behind, and no machine needs a key file.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rampool_client::pool::ServerSpec;
use rampool_kernel::words::say_line;
use rampool_net::key::Key;
use rampool_net::transport::Endpoint;
use rampool_wire::units::ByteLen;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;

use super::private::PrivateServer;
use crate::launch::hosts::quoted;

/// So long a machine may take until its server is ready.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// So long the shells may take to end after the servers were told to.
const END_WITHIN: Duration = Duration::from_secs(3);

/// Servers of a run's own: one on this machine, others elsewhere.
pub type OwnServers = (Option<PrivateServer>, Vec<RemoteServer>);

/// Which servers to start, and how.
#[derive(clap::Args, Debug)]
pub struct HostArgs {
    /// Start a memory server on a machine through a remote shell, as [USER@]HOST[:PORT]=SIZE, and end it with
    /// the run. It has a key of its own, and the port that its system chooses unless one is named. Repeat it,
    /// or separate by commas
    #[arg(
        long = "hosts",
        value_name = "HOST=SIZE",
        value_delimiter = ',',
        conflicts_with_all = ["servers", "key_file"]
    )]
    pub hosts: Vec<Host>,

    /// With --hosts: the command that runs another one on a machine, as `COMMAND HOST SHELL-COMMAND`, passes
    /// standard input on to it, and asks for nothing
    #[arg(long, env = "RAMPOOL_SSH", default_value = "ssh", value_name = "COMMAND")]
    ssh: String,
}

/// A machine, and what it is to lend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host {
    /// As the remote shell knows it.
    login: String,
    /// As clients know it.
    name: String,
    port: u16,
    memory: ByteLen,
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (place, memory) = text
            .rsplit_once('=')
            .ok_or_else(|| format!("{text:?} does not say how much to lend: write HOST=4G"))?;
        let memory = memory.parse().map_err(|error| format!("{place}: {error}"))?;
        let port = |port: &str| port.parse().map_err(|_| format!("{text:?} has no usable port"));
        let (login, port) = match place.rsplit_once(':') {
            Some((login, digits)) if !login.ends_with(':') => (login, port(digits)?),
            _ => (place, 0),
        };
        let name = login.rsplit_once('@').map_or(login, |(_, name)| name);
        if name.is_empty() || login.starts_with('-') || login.contains(char::is_whitespace) {
            return Err(format!("{text:?} names no machine"));
        }
        Ok(Self { login: login.into(), name: name.into(), port, memory })
    }
}

/// A server that was started on a machine, and the shell that leads to it.
pub struct RemoteServer {
    shell: Child,
    host: Host,
    log: PathBuf,
}

impl HostArgs {
    /// Starts the servers. None are left if one cannot be started. Gives them, what they lend, and the file
    /// with their key, in the run's directory.
    pub fn start(&self, run_dir: &Path) -> Result<(Vec<RemoteServer>, Vec<ServerSpec>, PathBuf)> {
        let key = Key::generate();
        let file = run_dir.join("hosts.key");
        key.save_new(&file)?;
        let mut servers = Vec::new();
        for (number, host) in self.hosts.iter().enumerate() {
            let log = run_dir.join(format!("host-{number}.log"));
            let server = RemoteServer::start(host, &self.ssh, &key, log);
            servers.push(server.with_context(|| format!("cannot start a server on {}", host.login))?);
        }
        let by = Instant::now() + READY_WITHIN;
        let specs = servers.iter_mut().map(|server| server.wait_until_ready(by)).collect::<Result<_>>()?;
        let names: Vec<String> =
            self.hosts.iter().map(|host| format!("{} ({})", host.login, host.memory)).collect();
        say_line(&format!(
            "rampool: memory servers were started on {}, and end with the run",
            names.join(", ")
        ));
        Ok((servers, specs, file))
    }
}

impl RemoteServer {
    fn start(host: &Host, ssh: &str, key: &Key, log: PathBuf) -> Result<Self> {
        let mut words = ssh.split_whitespace();
        let mut command = Command::new(words.next().context("--ssh is empty: give a command")?);
        let shell = command
            .args(words)
            .arg(&host.login)
            .arg(remote_command(host, std::env::current_exe()?.as_os_str())?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).with_context(|| format!("cannot write {}", log.display()))?)
            // Keeps the terminal's signals away from it.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot execute `{ssh}`"))?;
        let mut server = Self { shell, host: host.clone(), log };
        // An error here means that the shell has ended, which is reported when it is waited for.
        let _ =
            server.shell.stdin.as_mut().expect("it has a pipe").write_all((key.to_hex() + "\n").as_bytes());
        Ok(server)
    }

    /// Waits until the server says where it listens.
    fn wait_until_ready(&mut self, by: Instant) -> Result<ServerSpec> {
        let mut said = Vec::new();
        let line = loop {
            if let Some(end) = said.iter().position(|byte| *byte == b'\n') {
                let line = String::from_utf8_lossy(&said[..end]).into_owned();
                said.drain(..=end);
                // A login may greet first.
                if let Some(address) = line.strip_prefix("listening on ") {
                    break address.to_owned();
                }
                continue;
            }
            let output = self.shell.stdout.as_mut().expect("it has a pipe");
            let left = by.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
            if retry_on_intr(|| poll(&mut [PollFd::new(output, PollFlags::IN)], Some(&left)))? == 0 {
                bail!(
                    "the server on {} was not ready within {} s{}",
                    self.host.login,
                    READY_WITHIN.as_secs(),
                    self.last_words()
                );
            }
            let mut some = [0; 512];
            let read = output.read(&mut some)?;
            if read == 0 {
                let status = self.shell.wait()?;
                bail!("the server on {} ended at once ({status}){}", self.host.login, self.last_words());
            }
            said.extend_from_slice(&some[..read]);
            ensure!(said.len() < 1 << 16, "what answers on {} is no memory server", self.host.login);
        };
        let port = address_port(&line)
            .with_context(|| format!("the server on {} listens at {line:?}", self.host.login))?;
        let endpoint = Endpoint::Tcp { host: self.host.name.clone(), port };
        Ok(ServerSpec { endpoint, memory: Some(self.host.memory) })
    }

    /// What it, or the shell, has said last.
    fn last_words(&self) -> String {
        let said = std::fs::read(&self.log).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let last: Vec<&str> = said.trim().lines().rev().take(3).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        if last.is_empty() { String::new() } else { format!(": {}", last.join("; ")) }
    }
}

impl Drop for RemoteServer {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let by = Instant::now() + END_WITHIN;
        // In a caretaker this is not its child: it ends by itself.
        while let Ok(None) = self.shell.try_wait() {
            if Instant::now() >= by {
                let _ = self.shell.kill();
                let _ = self.shell.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn address_port(endpoint: &str) -> Option<u16> {
    endpoint.rsplit_once(':')?.1.parse().ok().filter(|port| *port > 0)
}

/// The command for a shell there: this very program, or else the one in the path.
fn remote_command(host: &Host, program: &OsStr) -> Result<String> {
    let Host { port, memory, .. } = host;
    let serve = format!(
        "serve --memory {} --listen 0.0.0.0:{port} --key-file - --until-stdin-closes --log-level warn",
        memory.0
    );
    let program = quoted(program)?;
    Ok(format!("exec sh -c 'test -x \"$0\" && exec \"$0\" \"$@\"; exec rampool \"$@\"' {program} {serve}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_a_name_and_an_amount_and_perhaps_a_user_and_a_port() {
        let of = |text: &str| {
            text.parse::<Host>().map(|host| (host.login, host.name, host.port, host.memory.0 >> 30))
        };
        let is = |login: &str, name: &str, port, gib| Ok((login.to_owned(), name.to_owned(), port, gib));
        assert_eq!(of("a=4G"), is("a", "a", 0, 4));
        assert_eq!(of("me@a.b:7200=1G"), is("me@a.b", "a.b", 7200, 1));
        for (text, word) in [
            ("a", "HOST=4G"),
            ("a=much", "a: "),
            ("a:x=1G", "port"),
            ("=1G", "no machine"),
            ("me@=1G", "no machine"),
            ("-oProxyCommand=x=1G", "no machine"),
            ("a b=1G", "no machine"),
        ] {
            assert!(of(text).unwrap_err().contains(word), "{text}");
        }
    }
}
