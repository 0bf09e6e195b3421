//! `rampool run`: an unmodified program with more memory than this machine lends it.

mod caretaker;
mod unmanaged;

use std::ffi::{CString, OsStr, OsString};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rampool::error::ConnectError;
use rampool::guardian::Guardian;
use rampool::key::Key;
use rampool::pool::{LeaseRequest, Pool, PoolConfig, PoolEvent, ServerSpec};
use rampool::roll::Roll;
use rampool::settings::{RUN_DIR_VARIABLE, Settings};
use rampool::transport::{Endpoint, SameHost};
use rampool::words::{remark, say, say_line};
use rampool_proto::session::Encryption;
use rampool_proto::units::ByteLen;
use rampool_sys::probe::{Capabilities, Rung};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;

use crate::rundir::RunDir;
use crate::signals::Signals;
use crate::{available, program, summary};
use unmanaged::Unmanaged;

/// Run a program, unchanged, in more memory than this machine lends it.
///
/// The program keeps at most --local bytes of its memory in this machine's RAM; the rest lies on memory servers (`rampool serve`). While it
/// needs less than that it runs exactly as without rampool. Its exit code, signals, standard input, output and error pass through untouched.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Local memory each process of the program may keep resident, such as 512M or 2G
    #[arg(long, env = "RAMPOOL_LOCAL", value_name = "SIZE")]
    local: ByteLen,

    /// A memory server: HOST[:PORT] or unix:/PATH, perhaps with the amount wanted of it (HOST=4G). Repeat it, or separate by commas.
    /// Without any, a private server with compressed memory is started on this machine
    #[arg(long = "server", env = "RAMPOOL_SERVERS", value_name = "ADDR", value_delimiter = ',')]
    servers: Vec<ServerSpec>,

    /// Memory to lease from the servers [default: the amounts named with the servers if all have one, else four times --local and at least 1 GiB, more when needed; of a private server: what is free]
    #[arg(long, env = "RAMPOOL_MEMORY", value_name = "SIZE")]
    memory: Option<ByteLen>,

    /// The pool's key file (see `rampool key`)
    #[arg(long, env = "RAMPOOL_KEY_FILE", value_name = "FILE")]
    key_file: Option<PathBuf>,

    /// Encrypt what travels: auto (on beyond this machine), on or off
    #[arg(long, env = "RAMPOOL_ENCRYPTION", default_value_t = Encryption::Auto, value_name = "WHEN")]
    encryption: Encryption,

    /// Bytes brought by one fault, 4K to 2M
    #[arg(long, env = "RAMPOOL_PAGE_SIZE", default_value = "4K", value_name = "SIZE")]
    page_size: ByteLen,

    /// The most that is read ahead of a sequential access; 0 turns reading ahead off
    #[arg(long, env = "RAMPOOL_PREFETCH", default_value = "2M", value_name = "SIZE")]
    prefetch: ByteLen,

    /// How page faults are caught: auto, uffd, uffd-user or segv (see `rampool doctor`)
    #[arg(long, env = "RAMPOOL_RUNG", default_value = "auto", value_name = "RUNG")]
    rung: String,

    /// Let pages travel compressed where the server agrees
    #[arg(long, env = "RAMPOOL_COMPRESSION")]
    compression: bool,

    /// A server that does not answer for this long counts as lost
    #[arg(long, env = "RAMPOOL_OP_DEADLINE_MS", default_value_t = 10_000, value_name = "MS")]
    op_deadline_ms: u64,

    /// Spin this long for a server's answer or the next fault before sleeping, while most come within this time; others get the CPU meanwhile
    #[arg(long, env = "RAMPOOL_SPIN_US", default_value_t = 100, value_name = "US")]
    spin_us: u64,

    /// Do not keep the pager on the CPU where a program of one thread takes its faults
    #[arg(long, env = "RAMPOOL_NO_FOLLOW")]
    no_follow: bool,

    /// Print a summary at the end, on standard error or into FILE (every counter, as JSON, if its name ends in .json)
    #[arg(long, env = "RAMPOOL_STATS", value_name = "FILE", num_args = 0..=1, default_missing_value = "-", require_equals = true)]
    stats: Option<PathBuf>,

    /// Show a live line on standard error
    #[arg(long, env = "RAMPOOL_PROGRESS")]
    progress: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Returns the exit code to end with; ends by the program's signal itself where that is how the program ended.
pub fn run(args: &Args) -> Result<i32> {
    let program = program::check(&args.command[0])?;
    if let Some(server) = args.servers.iter().find(|server| matches!(server.endpoint, Endpoint::Ucx { .. })) {
        bail!(
            "{}: UCX is not loaded into programs that did not ask for it, because it changes the process it is in; name the server by its HOST:PORT (it answers there, too) or unix:PATH",
            server.endpoint
        );
    }
    // A summary that cannot be written is refused now, not after hours.
    let mut stats = match &args.stats {
        Some(to) if to != Path::new("-") => {
            Some(std::fs::File::create(to).with_context(|| format!("the summary cannot be written to {}", to.display()))?)
        }
        _ => None,
    };
    let run_dir = RunDir::create().context("the run's directory cannot be made")?;
    // What it takes to start hides behind what there is to find out meanwhile.
    let mut private = args.servers.is_empty().then(|| PrivateServer::start(run_dir.path(), args.memory, args.local)).transpose()?;
    let capabilities = Capabilities::probe();
    let rung = choose_rung(&capabilities, &args.rung)?;
    if rung != Rung::Full {
        program::check_below_full(&program)?;
    }
    let mut libraries = vec![find_library(AGENT, "RAMPOOL_AGENT_LIB")?];
    if rung != Rung::Full || !capabilities.fork_events {
        // Where the kernel cannot wait for pages in system calls, these are helped; where it does not tell of forks, a child's agent needs
        // memory beside the program's heap.
        libraries.push(find_agent_io()?);
    }
    let name = program.file_name().map_or_else(|| "program".into(), |n| n.to_string_lossy().into_owned());

    let mut servers = args.servers.clone();
    let mut bytes = args.memory;
    if let Some(server) = &mut private {
        server.wait_until_ready(run_dir.path())?;
        say_line(&format!(
            "rampool: no server is named, so pages go to a private one on this machine ({} at most, compressed); name others with --server",
            server.memory
        ));
        servers.push(server.spec.clone());
        bytes = Some(server.memory);
    }
    let is_stated = bytes.is_some();
    let bytes = bytes.unwrap_or_else(|| wanted(&servers, args.local));
    if let Ok(there_is) = available::in_all()
        && args.local.0 > there_is
    {
        say_line(&format!(
            "rampool: {} of local memory are more than this machine, or its container, has ({}): the system may end the program before its pages leave",
            args.local,
            ByteLen(there_is)
        ));
    }
    let mut config = PoolConfig::new(servers, bytes, name.as_str());
    if let Some(path) = &args.key_file {
        config.key = Some(Key::load(path)?);
    }
    config.encryption = args.encryption;
    let same_host = SameHost::from_environment().map_err(anyhow::Error::msg)?;
    config.same_host = Some(same_host);
    config.op_deadline = Duration::from_millis(args.op_deadline_ms);
    config.compression = args.compression;
    debug_assert!(matches!(config.lease, LeaseRequest::Open { .. }));
    // Whatever else is wrong with the arguments is found before anything is leased.
    let bytes_of = |length: ByteLen| u32::try_from(length.0).unwrap_or(u32::MAX);
    let (page_bytes, prefetch_bytes) = (bytes_of(args.page_size), bytes_of(args.prefetch));
    rampool::region::PagedConfig { local_bytes: args.local.0, page_bytes, prefetch_bytes, ..Default::default() }.cache_config()?;
    let key_file = args.key_file.as_deref().map(std::fs::canonicalize).transpose()?;
    let mut pool = Pool::connect(&config).map_err(|error| match error {
        ConnectError::TooLittle { .. } if !is_stated => {
            anyhow::anyhow!("{error}; as no amount was stated, {bytes} were asked for: --memory asks for less")
        }
        error => error.into(),
    })?;

    let settings = Settings {
        run_dir: run_dir.path().to_owned(),
        ticket: pool.lease_ticket(),
        key_file,
        encryption: args.encryption,
        same_host,
        local_bytes: args.local.0,
        page_bytes,
        prefetch_bytes,
        rung,
        evict_by_copy: std::env::var_os("RAMPOOL_EVICT_BY_COPY").is_some_and(|value| value == "1"),
        op_deadline_ms: args.op_deadline_ms,
        compression: args.compression,
        spin_us: args.spin_us,
        follow_faults: !args.no_follow,
    };
    let prepare = || {
        settings.write()?;
        let roll = Roll::create(run_dir.path()).context("the run's directory cannot be written")?;
        let guardian = Guardian::create(run_dir.path()).context("the run's directory cannot be written")?;
        let (started, signals) = (Instant::now(), Signals::block()?);
        let process = start(&program, &args.command, &libraries, run_dir.path(), &signals)?;
        anyhow::Ok((roll, guardian, signals, started, process))
    };
    let (roll, mut guardian, signals, started, process) = match prepare() {
        Ok(prepared) => prepared,
        Err(error) => {
            // The lease would stay for the grace time otherwise.
            pool.leave();
            return Err(error);
        }
    };
    let mut unmanaged = Unmanaged::new(&libraries[0].file_name().unwrap_or_default().to_string_lossy());
    let progress = args.progress.then_some(started);
    let mut later = caretaker::Later::than(process.cast_unsigned());
    let status = wait(&mut later, &mut pool, &roll, &mut guardian, &mut unmanaged, &signals, &run_dir, progress)?;
    let wall = started.elapsed();
    if let Some(to) = &args.stats {
        let counters = run_dir.read_stats();
        let unmanaged: Vec<&str> = unmanaged.reasons().collect();
        let text = if to.extension().is_some_and(|e| e == "json") {
            summary::json(&name, &counters, wall, status, args.local, &pool.stats(), &unmanaged)
        } else {
            summary::summary(&name, &counters, wall, status, args.local, most_resident(), &pool.stats(), &unmanaged)
        };
        match &mut stats {
            None => say(&text),
            // The program's exit code says how the program ended, whatever became of the summary.
            Some(file) => {
                if let Err(error) = file.write_all(text.as_bytes()) {
                    say_line(&format!("rampool: the summary cannot be written to {}: {error}", to.display()));
                }
            }
        }
    }
    caretaker::end(pool, &roll, guardian, run_dir, private, later);
    finish(status)
}

/// The most memory, of all kinds, that the program or one of its children that it has waited for had in RAM.
fn most_resident() -> ByteLen {
    // SAFETY: plain data, filled by the call; on a failure it stays zero.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    ByteLen(u64::try_from(usage.ru_maxrss).unwrap_or(0).saturating_mul(1024))
}

/// What to lease when nobody says: what is named with the servers, and at least a sensible amount where one of them may lend what it likes.
pub fn wanted(servers: &[ServerSpec], local: ByteLen) -> ByteLen {
    let named = servers.iter().filter_map(|s| s.memory).fold(0u64, |sum, m| sum.saturating_add(m.0));
    let all_named = servers.iter().all(|s| s.memory.is_some());
    ByteLen(if all_named { named } else { named.max(local.0.saturating_mul(4)).max(1 << 30) })
}

const AGENT: &str = "librampool_agent.so";
/// How soon the memory of a process that ended goes back while others of the run live on.
const CALL_EVERY: Duration = Duration::from_millis(500);

fn choose_rung(capabilities: &Capabilities, wanted: &str) -> Result<Rung> {
    let best = capabilities.best_rung();
    match wanted {
        "auto" => Ok(best),
        name => {
            let rung = Rung::parse(name).with_context(|| format!("--rung is auto, uffd, uffd-user or segv, not `{name}`"))?;
            let user_mode = capabilities.user_mode.as_ref().is_ok_and(|f| f.has(rampool_sys::probe::NEEDED));
            let refused = match rung {
                Rung::Full => best != Rung::Full,
                Rung::UserMode => !user_mode,
                Rung::Segv => {
                    if let Err(error) = &capabilities.segv {
                        bail!("this machine does not allow the rung `{name}`: {error}");
                    }
                    false
                }
            };
            if refused {
                bail!(
                    "this machine does not allow the rung `{name}`, only `{}` and below; `rampool doctor` says what to change",
                    best.name()
                );
            }
            Ok(rung)
        }
    }
}

/// What makes system calls on absent pages work where the kernel cannot wait for them.
pub fn find_agent_io() -> Result<PathBuf> {
    find_library("librampool_agent_io.so", "RAMPOOL_AGENT_IO_LIB")
}

/// The agent's libraries lie beside the binary, or where packages put libraries.
fn find_library(name: &str, variable: &str) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Ok(path.into());
    }
    let binary = std::env::current_exe().context("the path of this binary is unknown")?;
    let here = binary.parent().unwrap_or(Path::new("/"));
    let places = [here.join(name), here.join("../lib/rampool").join(name), here.join("../lib").join(name)];
    places
        .iter()
        .find(|p| p.exists())
        .cloned()
        .with_context(|| format!("{name} is not beside {} nor in ../lib/rampool; set {variable} to its path", binary.display()))
}

/// Starts the program; returns its process id. (`Command` would copy this process first, to give the program the signals that were blocked before.)
fn start(program: &Path, command: &[OsString], libraries: &[PathBuf], run_dir: &Path, signals: &Signals) -> Result<i32> {
    let mut preload = libraries.iter().map(|path| path.as_os_str()).collect::<Vec<_>>().join(OsStr::new(":"));
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let ours = [("LD_PRELOAD", preload.as_os_str()), (RUN_DIR_VARIABLE, run_dir.as_os_str())];
    let inherited = std::env::vars_os().filter(|(name, _)| !ours.iter().any(|(own, _)| name == own));
    let variable = |name: &OsStr, value: &OsStr| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat());
    let environment: Vec<CString> = inherited
        .map(|(name, value)| variable(&name, &value))
        .chain(ours.iter().map(|(name, value)| variable(OsStr::new(name), value)))
        .collect::<Result<_, _>>()?;
    let path = CString::new(program.as_os_str().as_bytes())?;
    let arguments: Vec<CString> = command.iter().map(|argument| CString::new(argument.as_bytes())).collect::<Result<_, _>>()?;
    signals.spawn(&path, &arguments, &environment).with_context(|| format!("{} cannot be started", program.display()))
}

/// Waits for the program, passes signals on, keeps the lease alive.
fn wait(
    later: &mut caretaker::Later,
    pool: &mut Pool,
    roll: &Roll,
    guardian: &mut Guardian,
    unmanaged: &mut Unmanaged,
    signals: &Signals,
    run_dir: &RunDir,
    progress: Option<Instant>,
) -> Result<ExitStatus> {
    let pid = later.program().cast_signed();
    let (mut shown, mut called) = (Instant::now(), Instant::now());
    let mut line = summary::ProgressLine::default();
    loop {
        while let Some(event) = pool.poll() {
            if let PoolEvent::Draining { name, left, .. } = &event {
                remark(&format!("rampool: server {name} was told to stop; it ends in {left:?}, and with it what it holds"));
            }
        }
        let mut raw = 0;
        // SAFETY: waits for our own child; `raw` lives across the call.
        let waited = unsafe { libc::waitpid(pid, &raw mut raw, libc::WNOHANG | libc::WUNTRACED) };
        if waited == pid {
            let status = ExitStatus::from_raw(raw);
            if status.stopped_signal().is_some() {
                // The shell must see us stopped as well; when it continues us, the program continues.
                // SAFETY: stops this process.
                unsafe { libc::raise(libc::SIGSTOP) };
                // SAFETY: our own child.
                unsafe { libc::kill(pid, libc::SIGCONT) };
                continue;
            }
            if progress.is_some() {
                line.clear();
            }
            return Ok(status);
        }
        if let Some(started) = progress
            && shown.elapsed() > Duration::from_millis(500)
        {
            shown = Instant::now();
            line.show(&run_dir.read_stats(), started.elapsed());
        }
        later.look();
        guardian.look(&mut remark);
        unmanaged.look(later.program(), run_dir.path(), &mut remark);
        if called.elapsed() > CALL_EVERY {
            called = Instant::now();
            caretaker::dismiss_gone(roll, pool);
        }
        signals.wait(Duration::from_millis(100), |signal| {
            // SAFETY: our own child.
            unsafe { libc::kill(pid, signal) };
        });
    }
}

fn finish(status: ExitStatus) -> Result<i32> {
    if let Some(signal) = status.signal() {
        std::io::stdout().flush()?;
        // SAFETY: ends this process as the program ended, without a second core file.
        unsafe {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
            libc::signal(signal, libc::SIG_DFL);
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, signal);
            libc::sigprocmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
            libc::raise(signal);
        }
        return Ok(128 + signal);
    }
    Ok(status.code().unwrap_or(1))
}

/// What a private server writes, in the run's directory.
const PRIVATE_LOG: &str = "server.log";

/// A server for this run alone. Ends when this process, and its caretaker if it leaves one, have ended: its standard input closes then.
struct PrivateServer {
    child: Child,
    spec: ServerSpec,
    memory: ByteLen,
}

impl PrivateServer {
    /// It is not ready yet.
    fn start(run_dir: &Path, memory: Option<ByteLen>, local: ByteLen) -> Result<Self> {
        let memory = match memory {
            Some(memory) => memory,
            None => private_memory(available::bytes()?, local.0),
        };
        let endpoint = format!("unix:{}", run_dir.join("server.sock").display());
        let spec = endpoint.parse()?;
        let log = run_dir.join(PRIVATE_LOG);
        let log = std::fs::File::create(&log).with_context(|| format!("the run's directory cannot be written: {}", log.display()))?;
        let mut command = Command::new(std::env::current_exe()?);
        // What is set for a server that this machine lends to others is not for this one: its file, its port for metrics.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_bytes().starts_with(b"RAMPOOL_SERVE_")) {
            command.env_remove(name);
        }
        let child = command
            .args(["serve", "--store", "compressed", "--shards", "1", "--memory"])
            .arg(memory.0.to_string())
            .args(["--listen", &endpoint, "--until-stdin-closes"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            // It must not get the terminal's signals.
            .process_group(0)
            .spawn()
            .context("a private server cannot be started")?;
        Ok(Self { child, spec, memory })
    }

    /// Until it says on its standard output where it listens.
    fn wait_until_ready(&mut self, run_dir: &Path) -> Result<()> {
        const PATIENCE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };
        let output = self.child.stdout.as_mut().context("a private server has no standard output")?;
        let mut watched = [PollFd::new(output, PollFlags::IN)];
        if retry_on_intr(|| poll(&mut watched, Some(&PATIENCE)))? == 0 {
            bail!("the private server did not become ready in {} s", PATIENCE.tv_sec);
        }
        if output.read(&mut [0; 512])? == 0 {
            let status = self.child.wait()?;
            let said = std::fs::read_to_string(run_dir.join(PRIVATE_LOG)).unwrap_or_default();
            bail!("the private server ended at once ({status}): {}", said.trim());
        }
        Ok(())
    }
}

/// What a private server may lend of this machine's own memory: most of what is left beside the program's local memory. Where that is nearly all, a tenth all the same:
/// few programs use as much as they may.
fn private_memory(available: u64, local: u64) -> ByteLen {
    const MIB: u64 = 1 << 20;
    let beside = (available.saturating_sub(local) / 10 * 8).max(available / 10);
    // Whole MiB: a server lends whole pages.
    ByteLen((beside / MIB).max(1) * MIB)
}

impl Drop for PrivateServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_server_leaves_room_for_the_program() {
        let lent = |available: u64, local: u64| private_memory(available << 20, local << 20).0 >> 20;
        assert_eq!(lent(1000, 200), 640);
        assert_eq!(lent(1000, 990), 100);
        assert_eq!(lent(1000, 5000), 100);
        assert_eq!(lent(0, 1), 1, "a server lends something");
    }
}
