//! `rampool serve`: lends this machine's memory.

mod log;
mod metrics;
mod settings;

pub use settings::Args;

use anyhow::{Context, Result, bail};
use log::Log;
use rampool::key::Key;
use rampool::proto::units::ByteLen;
use rampool::server::{RunningServer, Server, ServerConfig};
use rampool::transport::Endpoint;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::time::Duration;

use crate::available;
use crate::end_signals::EndSignals;

/// How often the server looks at itself while nothing happens.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// What a server has open besides its connections, and what a connection needs more while it is made, roughly.
const OWN_DESCRIPTORS: u64 = 64;

/// Serves until SIGTERM or SIGINT; then stops when the clients have left, or after the time to drain, or at a second signal.
pub fn run(args: Args) -> Result<i32> {
    let settings = args.settle()?;
    let defaults = ServerConfig::new(settings.memory.0, settings.listen[0].clone());
    // Before any thread starts: all of them inherit that these signals wait to be asked for.
    let signals = EndSignals::block().context("signals cannot be blocked")?;
    // Ends last: it has the other parts' last words.
    let _log = Log::start(&settings)?;
    outlive_full_files();
    allow_descriptors(settings.max_connections.unwrap_or(defaults.max_connections));
    let key = settings.key_file.as_deref().map(Key::load).transpose()?;
    let config = ServerConfig {
        listen: settings.listen.clone(),
        key,
        encryption: settings.encryption,
        store: settings.store,
        shards: settings.shards.unwrap_or(defaults.shards),
        spin: settings.spin_us.map_or(defaults.spin, Duration::from_micros),
        grace: settings.grace_ms.map_or(defaults.grace, Duration::from_millis),
        heartbeat: settings.heartbeat_ms.map_or(defaults.heartbeat, Duration::from_millis),
        silence: settings.silence_ms.map_or(defaults.silence, Duration::from_millis),
        max_connections: settings.max_connections.unwrap_or(defaults.max_connections),
        queues: settings.queues,
        lock_memory: !settings.no_lock,
        rings: !settings.no_rings,
        allow_uids: settings.allow_uid.clone(),
        ..defaults
    };
    let server = Server::start(config)?;
    if let Ok(there_is) = available::in_all()
        && settings.memory.0 > there_is
    {
        let there_is = ByteLen(there_is);
        tracing::warn!(memory = %settings.memory, %there_is, "more is lent than this machine, or its container, has: when clients use it all, the system will end processes");
    }
    let metrics = settings.metrics.as_ref().map(|address| metrics::Responder::start(address, server.observer())).transpose()?;
    for endpoint in server.endpoints() {
        // On standard output for scripts: with port 0 nobody knows the port otherwise.
        println!("listening on {endpoint}");
        tracing::info!(%endpoint, memory = %settings.memory, store = ?settings.store, keyed = settings.key_file.is_some(), "serving");
    }
    if let Some(metrics) = &metrics {
        println!("metrics on http://{}/metrics", metrics.address());
    }
    if let Some(file) = &settings.ready_file {
        say_ready(file, server.endpoints())?;
    }
    sd_notify::notify(&[sd_notify::NotifyState::Ready]).context("systemd cannot be told that the server is ready")?;

    let mut warned = false;
    let signal = loop {
        if let Some(signal) = signals.wait(LOOK_EVERY) {
            break signal;
        }
        if settings.until_stdin_closes && stdin_is_closed() {
            tracing::info!("whoever started this server has ended");
            return Ok(0);
        }
        if server.is_broken() {
            bail!("a thread of the server died; its last words are above. This is a defect of rampool");
        }
        if !warned && !settings.no_lock && server.status().unlocked {
            warned = true;
            tracing::warn!(
                "memory cannot be locked, so the kernel may swap out what is lent; raise the limit (LimitMEMLOCK=infinity, or ulimit -l), or say --no-lock"
            );
        }
    };
    drain(server, &signals, signal, Duration::from_millis(settings.drain_ms))
}

/// Lets writing to a file fail that has become as long as it may (`RLIMIT_FSIZE`), as on a full disk, where it would end this process.
fn outlive_full_files() {
    // SAFETY: no handler is set, the signal is ignored.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Lets the server have as many descriptors as this process may, and says so where they are fewer than it may have connections.
fn allow_descriptors(connections: usize) {
    let mut limit = getrlimit(Resource::Nofile);
    let most = Rlimit { current: limit.maximum, ..limit };
    if limit.current != limit.maximum && setrlimit(Resource::Nofile, most).is_ok() {
        limit = most;
    }
    let descriptors = limit.current.unwrap_or(u64::MAX);
    if descriptors < connections as u64 + OWN_DESCRIPTORS {
        tracing::warn!(
            connections,
            descriptors,
            "this process may have fewer descriptors (ulimit -n, or LimitNOFILE= of the service) than connections are allowed: more than they are enough for wait until others end"
        );
    }
}

fn drain(server: RunningServer, signals: &EndSignals, signal: i32, patience: Duration) -> Result<i32> {
    tracing::info!(signal, ?patience, "stopping when the clients have left; a second signal stops at once");
    // Whoever watches is told as soon as possible; that nobody does is no reason to stay.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    let draining = std::thread::Builder::new().name("rampool-drain".into()).spawn(move || server.drain(patience))?;
    while !draining.is_finished() {
        if signals.wait(Duration::from_millis(20)).is_some() {
            tracing::warn!("stopping at once");
            return Ok(1);
        }
    }
    draining.join().ok().context("stopping the server failed")?;
    tracing::info!("stopped");
    Ok(0)
}

/// Nobody has the other end of standard input any more.
fn stdin_is_closed() -> bool {
    let stdin = std::io::stdin();
    let mut watched = [PollFd::new(&stdin, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut watched, Some(&now)).is_ok_and(|ready| ready > 0) && watched[0].revents().contains(PollFlags::HUP)
}

/// The addresses, one per line. The file appears complete or not at all.
fn say_ready(file: &Path, endpoints: &[Endpoint]) -> Result<()> {
    let text: String = endpoints.iter().map(|e| format!("{e}\n")).collect();
    let unfinished = file.with_extension("unfinished");
    std::fs::write(&unfinished, text)
        .and_then(|()| std::fs::rename(&unfinished, file))
        .with_context(|| format!("the ready file {} cannot be written", file.display()))
}

/// Amounts of memory in settings files and arguments alike.
fn parse_memory(memory: ByteLen) -> Result<ByteLen> {
    if memory.0 < ByteLen::MIB {
        bail!("--memory {memory}: a server must lend at least 1 MiB");
    }
    Ok(memory)
}
