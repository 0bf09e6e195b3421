//! `rampool serve`: lends this machine's memory.

mod latest;
mod log;
mod metrics;
mod page;
mod settings;
mod tenants;

pub use settings::Args;

use anyhow::{Context, Result, bail};
use log::Log;
use rampool_net::key::Key;
use rampool_net::transport::Endpoint;
use rampool_server::{OpenFrames, RunningServer, Server, ServerConfig};
use rampool_wire::units::ByteLen;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::available;
use crate::end_signals::EndSignals;

/// How often an idle server checks itself.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Descriptors of a server besides its connections, and roughly those that a connection needs while it is set
/// up.
const OWN_DESCRIPTORS: u64 = 64;

/// Serves until SIGTERM or SIGINT. Then stops when the clients have left, after the time to drain, or at a
/// second signal.
pub fn run(args: Args) -> Result<i32> {
    let settings = args.effective()?;
    let defaults = ServerConfig::new(settings.memory().0, settings.listen[0].clone());
    // Before any thread starts, so that all of them inherit the blocked signals.
    let others: &[i32] = if settings.tenants.is_some() { &[libc::SIGHUP] } else { &[] };
    let signals = EndSignals::block_with(others).context("cannot block signals")?;
    // Dropped last: the other parts may still log.
    let _log = Log::start(&settings)?;
    outlive_full_files();
    allow_descriptors(settings.max_connections.unwrap_or(defaults.max_connections));
    let key = settings.key_file.as_deref().map(key_of).transpose()?;
    if settings.tenants.is_some() && key.as_ref().is_none_or(|key| key.tenant().is_some()) {
        bail!(
            "--tenants needs the master key: without it no tenant is known (rampool key FILE, then \
             --key-file FILE)"
        );
    }
    let server = Server::start(configuration(&settings, key, defaults)?)?;
    if let Ok(there_is) = available::in_all()
        && settings.memory().0 > there_is
        && settings.disk.is_none()
    {
        let there_is = ByteLen(there_is);
        tracing::warn!(memory = %settings.memory(), %there_is, "--memory is more than this machine, or its \
            container, has: when clients use it all, the system will kill processes");
    }
    let metrics = settings
        .metrics
        .as_ref()
        .map(|address| metrics::Responder::start(address, server.observer(), server.endpoints()))
        .transpose()?;
    say_where(&server, &settings);
    if let Some(metrics) = &metrics {
        println!("metrics on http://{0}/metrics, a page on http://{0}/", metrics.address());
    }
    if let Some(file) = &settings.ready_file {
        say_ready(file, server.endpoints())?;
    }
    sd_notify::notify(&[sd_notify::NotifyState::Ready])
        .context("cannot tell systemd that the server is ready")?;

    let mut warned = false;
    let signal = loop {
        match (signals.wait(LOOK_EVERY), &settings.tenants) {
            (Some(libc::SIGHUP), Some(file)) => read_tenants_again(&server, file),
            (Some(signal), _) => break signal,
            (None, _) => {}
        }
        if let Some(why) = ends_by_itself(&server, settings.until_stdin_closes) {
            tracing::info!("{why}");
            return Ok(0);
        }
        if server.is_broken() {
            bail!(
                "a thread of the server panicked (see above). This is a defect in rampool: please report it"
            );
        }
        if !warned && !settings.no_lock && settings.disk.is_none() && server.status().unlocked {
            warned = true;
            tracing::warn!(
                "cannot lock memory, so the kernel may swap out what is lent; raise the limit \
                 (LimitMEMLOCK=infinity, or ulimit -l), or give --no-lock"
            );
        }
    };
    drain(server, &signals, signal, settings.drain_time())
}

/// The settings, as the server takes them; the rest are its defaults.
fn configuration(settings: &Args, key: Option<Key>, defaults: ServerConfig) -> Result<ServerConfig> {
    let rules = settings.tenants.as_deref().map(tenants::load).transpose()?.unwrap_or_default();
    Ok(ServerConfig {
        listen: settings.listen.clone(),
        key,
        encryption: settings.encryption.unwrap_or_default(),
        store: settings.store(),
        shards: settings.shards.unwrap_or(defaults.shards),
        spin: settings.spin_us.map_or(defaults.spin, Duration::from_micros),
        grace: settings.grace_ms.map_or(defaults.grace, Duration::from_millis),
        heartbeat: settings.heartbeat_ms.map_or(defaults.heartbeat, Duration::from_millis),
        silence: settings.silence_ms.map_or(defaults.silence, Duration::from_millis),
        max_connections: settings.max_connections.unwrap_or(defaults.max_connections),
        queues: settings.queue_limits(),
        lock_memory: !settings.no_lock,
        rings: !settings.no_rings,
        open_frames: open_frames(settings),
        disk: settings.disk.as_deref().map(unnamed_file).transpose()?,
        allow_uids: settings.allow_uid.clone(),
        copy_to: settings.copy_to.clone(),
        ucx_clients_are_trusted: settings.ucx_clients.is_some(),
        block: settings.block(),
        tenants: rules,
        pressure: pressure_files(settings.open_frames || settings.disk.is_some()),
        ..defaults
    })
}

/// On standard output for scripts, which cannot know the port otherwise if it is 0, and in the log.
fn say_where(server: &RunningServer, settings: &Args) {
    for endpoint in server.endpoints() {
        println!("listening on {endpoint}");
        let (memory, store, keyed) = (settings.memory(), settings.store(), settings.key_file.is_some());
        tracing::info!(%endpoint, %memory, ?store, keyed, "serving");
    }
    for endpoint in server.block_endpoints() {
        println!("nbd on {endpoint}");
        for export in settings.block().exports {
            tracing::info!(%endpoint, export = export.name, bytes = %ByteLen(export.bytes), "block device");
        }
        if settings.nbd_plain {
            tracing::warn!(%endpoint, "NBD has no key: every client that reaches this address can read and \
                write every export");
        }
    }
}

/// Why a server ends that was sent no signal.
fn ends_by_itself(server: &RunningServer, until_stdin_closes: bool) -> Option<&'static str> {
    if server.is_drained() {
        return Some("drained: the last client has left");
    }
    let closed = until_stdin_closes && stdin_is_closed();
    closed.then_some("standard input is closed: the process that started this server has ended")
}

/// A file below this directory that is on a disk and has no name.
fn unnamed_file(directory: &Path) -> Result<Arc<File>> {
    const IN_MEMORY: [i64; 2] = [libc::TMPFS_MAGIC, 0x8584_58f6];
    let file = File::options()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE)
        .open(directory)
        .with_context(|| format!("cannot make a file without a name in {}", directory.display()))?;
    if IN_MEMORY.contains(&rustix::fs::fstatfs(&file)?.f_type) {
        bail!("{}: its files are in memory; name a directory on a disk", directory.display());
    }
    Ok(Arc::new(file))
}

/// Whose clients read pages in place. A server with Unix sockets alone keeps its frames in a file for that,
/// which has no huge pages: clients on other machines would be served more slowly.
fn open_frames(settings: &Args) -> OpenFrames {
    if settings.open_frames {
        OpenFrames::ForAll
    } else if settings.tenants.is_none() && settings.listen.iter().all(|at| matches!(at, Endpoint::Unix(_))) {
        OpenFrames::ForItsUser
    } else {
        OpenFrames::ForNobody
    }
}

/// By what a server notices that its machine is short of memory. A run's private one, which opens its frames,
/// does not look: it must not refuse just then, and what it takes was the program's memory before. Nor does
/// one that lends a disk.
fn pressure_files(goes_on: bool) -> Vec<PathBuf> {
    if goes_on { Vec::new() } else { available::pressure_files() }
}

fn read_tenants_again(server: &RunningServer, file: &Path) {
    match tenants::load(file) {
        Ok(rules) => {
            tracing::info!(file = %file.display(), tenants = rules.quotas.len(), "read the tenants file \
                again");
            server.set_tenants(rules);
        }
        Err(error) => {
            tracing::error!(%error, "the tenants file does not count; the settings from before stay")
        }
    }
}

/// Makes writing to a file fail when the file reaches `RLIMIT_FSIZE`, as on a full disk. By default the
/// signal would end this process.
fn outlive_full_files() {
    // SAFETY: no handler is set, the signal is ignored.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Raises the limit of descriptors as far as this process may, and warns if that is less than the connections
/// need.
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
            "this process may open fewer descriptors (ulimit -n, or LimitNOFILE= of the service) than \
             --max-connections needs: further connections wait until others end"
        );
    }
}

fn drain(server: RunningServer, signals: &EndSignals, signal: i32, timeout: Duration) -> Result<i32> {
    tracing::info!(signal, ?timeout, "stopping when the clients have left; a second signal stops at once");
    // Tells systemd as soon as possible. Without systemd this does nothing.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    let observer = server.observer();
    let draining =
        std::thread::Builder::new().name("rampool-drain".into()).spawn(move || server.drain(timeout))?;
    while !draining.is_finished() {
        if signals.wait(Duration::from_millis(20)).is_some_and(|signal| signal != libc::SIGHUP) {
            tracing::warn!("stopping at once");
            return Ok(1);
        }
    }
    if draining.join().ok().context("cannot stop the server")? {
        tracing::info!("stopped: all clients have left");
    } else {
        let left = observer.status();
        tracing::warn!(
            clients = left.leases.len(),
            bytes = left.lent_bytes,
            "stopped with clients and their memory"
        );
    }
    Ok(0)
}

/// Whether the other end of standard input is closed.
fn stdin_is_closed() -> bool {
    let stdin = std::io::stdin();
    let mut watched = [PollFd::new(&stdin, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // The end of a socket, which a remote shell may give, is something to read.
    poll(&mut watched, Some(&now)).is_ok_and(|ready| ready > 0)
        && (watched[0].revents().contains(PollFlags::HUP)
            || rustix::io::read(&stdin, &mut [0; 64]).is_ok_and(|read| read == 0))
}

/// The key in a file; of `-`, in the first line of standard input.
fn key_of(path: &Path) -> Result<Key> {
    if path != Path::new("-") {
        return Ok(Key::load(path)?);
    }
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).context("cannot read a key from standard input")?;
    Key::from_hex(line.trim_end()).context("the first line of standard input is no key")
}

/// Writes the addresses, one a line. The file appears complete or not at all.
fn say_ready(file: &Path, endpoints: &[Endpoint]) -> Result<()> {
    let text: String = endpoints.iter().map(|e| format!("{e}\n")).collect();
    let unfinished = file.with_extension("unfinished");
    std::fs::write(&unfinished, text)
        .and_then(|()| std::fs::rename(&unfinished, file))
        .with_context(|| format!("cannot write the ready file {}", file.display()))
}

/// Checks amounts of memory from settings files and arguments.
fn parse_memory(memory: ByteLen) -> Result<ByteLen> {
    if memory.0 < ByteLen::MIB {
        bail!("--memory {memory}: a server must lend at least 1 MiB");
    }
    Ok(memory)
}
