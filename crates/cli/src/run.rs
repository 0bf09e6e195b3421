//! `rampool run`: starts an unmodified program in more memory than this machine provides.

pub mod caretaker;
pub mod hosts;
pub mod private;
pub mod redundancy;
mod shared_memory;
mod unmanaged;

use std::ffi::{CString, OsStr, OsString};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rampool_client::error::ConnectError;
use rampool_client::pool::{Copies, LeaseRequest, Pool, PoolConfig, ServerSpec};
use rampool_kernel::awake::AwakePage;
use rampool_kernel::probe::{Capabilities, FaultMode};
use rampool_kernel::words::{remark, say, say_line};
use rampool_net::key::Key;
use rampool_net::transport::{Endpoint, SameHost};
use rampool_pager::pager::awake;
use rampool_run::fork_fallback::ForkFallback;
use rampool_run::libraries;
use rampool_run::process_registry::ProcessRegistry;
use rampool_run::settings::{RUN_DIR_VARIABLE, Settings};
use rampool_wire::session::Encryption;
use rampool_wire::units::ByteLen;

use self::caretaker::Held;
use self::hosts::{HostArgs, OwnServers, RemoteServer};
use self::private::{Backup, PrivateServer};
use self::redundancy::Redundancy;
use crate::program::{Found, ProgramError, SHELL};
use crate::rundir::RunDir;
use crate::signals::Signals;
use crate::{available, program, summary};
use unmanaged::Unmanaged;

/// Run an unchanged program in more memory than this machine has
///
/// The program keeps at most --local bytes of its memory in this machine's RAM. The rest lies on memory
/// servers (`rampool serve`). While it needs less than --local it runs exactly as without rampool. Its exit
/// code, signals, standard input, output and error pass through unchanged.
#[derive(clap::Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct Args {
    #[command(flatten)]
    options: Options,

    /// Print a summary at the end on standard error, or write it to FILE (every counter, as JSON, if its name
    /// ends in .json)
    #[arg(long, env = "RAMPOOL_STATS", value_name = "FILE", num_args = 0..=1, default_missing_value = "-",
        require_equals = true)]
    stats: Option<PathBuf>,

    /// Show a live status line on standard error
    #[arg(long, env = "RAMPOOL_PROGRESS")]
    progress: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

/// Which servers, and how they are talked to.
#[derive(clap::Args, Clone, Debug)]
pub struct PoolOptions {
    /// A memory server: HOST[:PORT] or unix:/PATH, optionally with the amount to lease from it (HOST=4G).
    /// Repeat it, or separate by commas [default: a private server on this machine, with compressed memory]
    #[arg(long = "server", env = "RAMPOOL_SERVERS", value_name = "ADDR", value_delimiter = ',')]
    pub servers: Vec<ServerSpec>,

    /// On how many servers each page lies: 1, or 2, so that any one server may be lost. The servers lend
    /// twice as much then [default: 2 where two or more servers have room for that, else 1]
    #[arg(long, env = "RAMPOOL_COPIES", value_name = "N",
        value_parser = clap::value_parser!(u8).range(1..=2))]
    copies: Option<u8>,

    /// Key file of the pool (see `rampool key`)
    #[arg(long, env = "RAMPOOL_KEY_FILE", value_name = "FILE")]
    key_file: Option<PathBuf>,

    /// Encrypt connections: auto (those to other machines), on or off
    #[arg(long, env = "RAMPOOL_ENCRYPTION", default_value_t = Encryption::Auto, value_name = "WHEN")]
    encryption: Encryption,

    /// Compress pages on the network if the server agrees [default: off]
    #[arg(long, env = "RAMPOOL_COMPRESSION")]
    compression: bool,

    /// Milliseconds without an answer after which a server counts as lost
    #[arg(long, env = "RAMPOOL_OP_DEADLINE_MS", default_value_t = 10_000, value_name = "MS")]
    op_deadline_ms: u64,
}

impl PoolOptions {
    pub fn check(&self) -> Result<()> {
        self.check_copies(self.servers.len())
    }

    fn check_copies(&self, servers: usize) -> Result<()> {
        if self.copies == Some(2) && servers < 2 {
            bail!("--copies 2 needs two servers: name each one with --server");
        }
        Ok(())
    }

    /// A pool on these servers, with a new lease.
    pub fn config(&self, servers: Vec<ServerSpec>, bytes: ByteLen, name: &str) -> Result<PoolConfig> {
        let mut config = PoolConfig::new(servers, bytes, name);
        config.key = self.key_file.as_deref().map(Key::load).transpose()?;
        config.encryption = self.encryption;
        config.same_host = Some(SameHost::from_environment().map_err(anyhow::Error::msg)?);
        config.op_deadline = Duration::from_millis(self.op_deadline_ms);
        config.compression = self.compression;
        config.copies = match self.copies {
            Some(2) => Copies::Two,
            Some(_) => Copies::One,
            None => Copies::TwoIfTheyFit,
        };
        Ok(config)
    }
}

/// Which servers, how much of their memory, and how pages come and go.
#[derive(clap::Args, Debug)]
pub struct Options {
    /// Most memory, in bytes, that each process of the program keeps in local RAM, such as 512M or 2G
    #[arg(long, env = "RAMPOOL_LOCAL", value_name = "SIZE")]
    local: ByteLen,

    #[command(flatten)]
    of_pool: PoolOptions,

    #[command(flatten)]
    elsewhere: HostArgs,

    /// Memory, in bytes, to lease from the servers [default: the sum of the amounts in --server if each names
    /// one; else four times --local, at least 1 GiB, at most what is free, and more when needed; from a
    /// private server: what is free]
    #[arg(long, env = "RAMPOOL_MEMORY", value_name = "SIZE")]
    memory: Option<ByteLen>,

    /// Directory on a disk of this machine that gets a copy of each page, perhaps with the most that copies
    /// may take there (DIR=64G): all servers may be lost then. Without servers the pages themselves go there
    /// [default: none; its size: nine tenths of what is free]
    #[arg(long, env = "RAMPOOL_BACKUP", value_name = "DIR[=SIZE]", conflicts_with = "copies")]
    backup: Option<Backup>,

    /// Bytes that one fault fetches, 4K to 2M
    #[arg(long, env = "RAMPOOL_PAGE_SIZE", default_value = "4K", value_name = "SIZE")]
    page_size: ByteLen,

    /// Most bytes to read ahead of a sequential access; 0 disables reading ahead
    #[arg(long, env = "RAMPOOL_PREFETCH", default_value = "2M", value_name = "SIZE")]
    prefetch: ByteLen,

    /// How to catch page faults: auto, uffd, uffd-user or segv (see `rampool doctor`)
    #[arg(long, env = "RAMPOOL_FAULT_MODE", default_value = "auto", value_name = "MODE")]
    fault_mode: String,

    /// Microseconds to spin for a server's answer or the next fault before sleeping, as long as most arrive
    /// within this time
    #[arg(long, env = "RAMPOOL_SPIN_US", default_value_t = 100, value_name = "US")]
    spin_us: u64,

    /// Do not keep the pager on the CPU where a single-threaded program takes its faults, nor the other
    /// of two CPUs awake meanwhile [default: keep it there]
    #[arg(long, env = "RAMPOOL_NO_FOLLOW")]
    no_follow: bool,

    /// Compare every page that returns to local memory with what left, and end the program with an error if
    /// they differ (slow; to find faults) [default: off]
    #[arg(long, env = "RAMPOOL_VERIFY")]
    verify: bool,
}

const EXIT_CODES: &str = "\
Exit codes:
  that of the program, if it ran; if a signal ended it, rampool ends by the same signal
  74   a memory server is lost, and with it pages that the program needs
  125  rampool failed, or refuses the program; the message says why
  126  the program exists and cannot be executed
  127  the program does not exist";

/// Returns the exit code to end with. If a signal ended the program, ends this process by the same signal.
pub fn run(args: &Args) -> Result<i32> {
    let found = program::check(&args.command[0])?;
    args.options.check()?;
    // Refuses a summary that cannot be written now, not after hours.
    let mut stats = match &args.stats {
        Some(to) if to != Path::new("-") => Some(
            std::fs::File::create(to)
                .with_context(|| format!("cannot write the summary to {}", to.display()))?,
        ),
        _ => None,
    };
    let name = found.path.file_name().map_or_else(|| "program".into(), |n| n.to_string_lossy().into_owned());
    let below_full = || Ok(program::check_below_full(&found.path)?);
    let begun = args.options.begin(&name, below_full)?;
    let mut unmanaged = Unmanaged::new(&begun.libraries[0].file_name().unwrap_or_default().to_string_lossy());
    let (mut held, (mut signals, started, process)) = begun.hold(|begun| {
        let (started, mut signals) = (Instant::now(), Signals::block()?);
        signals.watch_group();
        let process = start(&found, &args.command, begun, &signals)?;
        signals.watch_group();
        Ok((signals, started, process))
    })?;
    let progress = args.progress.then_some((started, args.options.local));
    let mut later = caretaker::Later::than(process.cast_unsigned());
    let Ended { status, most_resident } =
        wait(&mut held, &mut later, &mut unmanaged, &mut signals, progress)?;
    drop(signals);
    let wall = started.elapsed();
    if let Some(to) = &args.stats {
        let told = summary::Told {
            name: &name,
            processes: &held.run_dir.read_stats(),
            wall,
            status,
            local: args.options.local,
            servers: &held.pool.stats(),
            unmanaged: &unmanaged.reasons().collect::<Vec<_>>(),
        };
        let as_json = to.extension().is_some_and(|e| e == "json");
        let text = if as_json { told.json() } else { told.summary(most_resident) };
        match &mut stats {
            None => say(&text),
            // The program's exit code stands, even if the summary cannot be written.
            Some(file) => {
                if let Err(error) = file.write_all(text.as_bytes()) {
                    say_line(&format!("rampool: cannot write the summary to {}: {error}", to.display()));
                }
            }
        }
    }
    caretaker::end(held, later);
    finish(status)
}

/// Keeps one of two CPUs awake while programs of the run ask for it. Without that, they only wait longer. A
/// server on this machine that has to be asked keeps a CPU awake itself.
fn keep_awake(settings: &Settings, pool: &Pool) {
    let looks = settings.spin_us > 0 && settings.follow_faults;
    if !looks || awake::two_cpus().is_none() || !pool.reads_in_place() {
        return;
    }
    if let Ok(page) = AwakePage::create(&Settings::awake_path(&settings.run_dir)) {
        let _ = std::thread::Builder::new().name("rampool-awake".into()).spawn(move || page.keep());
    }
}

/// A run that is about to begin: its servers are joined and its directory is there, but no program has
/// started.
pub struct Begun {
    pub run_dir: RunDir,
    pub own: OwnServers,
    pub pool: Pool,
    pub settings: Settings,
    /// What programs load, the agent first.
    pub libraries: Vec<PathBuf>,
}

impl Begun {
    /// Starts a program, as `start` does. If that fails, the lease does not stay for the grace time.
    pub fn hold<T>(self, start: impl FnOnce(&Self) -> Result<T>) -> Result<(Held, T)> {
        let prepare = || {
            self.settings.write()?;
            let directory = self.run_dir.path();
            let registry = ProcessRegistry::create(directory).context("cannot write the run's directory")?;
            let fork_fallback =
                ForkFallback::create(directory).context("cannot write the run's directory")?;
            anyhow::Ok((registry, fork_fallback, start(&self)?))
        };
        let prepared = prepare();
        let Self { run_dir, own, mut pool, settings, .. } = self;
        match prepared {
            Ok((registry, fork_fallback, started)) => {
                let redundancy = Redundancy::new(settings, &mut pool);
                Ok((Held { pool, redundancy, registry, fork_fallback, run_dir, own }, started))
            }
            Err(error) => {
                pool.close();
                Err(error)
            }
        }
    }
}

impl Options {
    /// Refuses options that fit no program.
    pub fn check(&self) -> Result<()> {
        if let Some(server) =
            self.of_pool.servers.iter().find(|server| matches!(server.endpoint, Endpoint::Ucx { .. }))
        {
            bail!(
                "{}: `rampool run` does not use UCX, because it changes the process that loads it; name the \
                 server by its HOST:PORT (it listens there, too) or unix:PATH",
                server.endpoint
            );
        }
        self.of_pool.check_copies(self.of_pool.servers.len() + self.elsewhere.hosts.len())
    }

    /// Starts servers on named machines, and gives the options as if they had been there.
    fn with_hosts(&self, run_dir: &Path) -> Result<(PoolOptions, Vec<RemoteServer>)> {
        let mut of_pool = self.of_pool.clone();
        if self.elsewhere.hosts.is_empty() {
            return Ok((of_pool, Vec::new()));
        }
        let (remote, servers, key) = self.elsewhere.start(run_dir)?;
        (of_pool.servers, of_pool.key_file) = (servers, Some(key));
        Ok((of_pool, remote))
    }

    /// Leases memory for a program. Calls `below_full` where the machine does not allow the best fault mode.
    pub fn begin(&self, name: &str, below_full: impl FnOnce() -> Result<()>) -> Result<Begun> {
        let run_dir = RunDir::create().context("cannot create the run's directory")?;
        let (of_pool, remote) = self.with_hosts(run_dir.path())?;
        // The server starts while the machine and the program are examined.
        let mut private = match &self.backup {
            Some(backup) => {
                Some(PrivateServer::on_disk(run_dir.path(), backup, of_pool.key_file.as_deref())?)
            }
            None if of_pool.servers.is_empty() => {
                Some(PrivateServer::in_memory(run_dir.path(), self.memory, self.local)?)
            }
            None => None,
        };
        let capabilities = Capabilities::probe();
        let fault_mode = choose_fault_mode(&capabilities, &self.fault_mode)?;
        if fault_mode != FaultMode::Full {
            below_full()?;
        }
        let mut libraries = vec![libraries::agent()?];
        if fault_mode != FaultMode::Full || !capabilities.fork_events {
            // Where the kernel cannot wait for pages in system calls, the agent helps. Where the kernel does
            // not report forks, a child's agent needs memory apart from the program's heap.
            libraries.push(libraries::agent_io()?);
        }

        let mut servers = of_pool.servers.clone();
        let mut bytes = self.memory;
        if let Some(server) = &mut private {
            server.wait_until_ready(run_dir.path())?;
            servers.push(server.spec.clone());
            if of_pool.servers.is_empty() {
                let to = match &self.backup {
                    Some(backup) => format!("the disk of {}", backup.directory.display()),
                    None => "a private server on this machine".to_owned(),
                };
                let most = server.memory;
                say_line(&format!(
                    "rampool: no --server given: pages go to {to} (at most {most}, compressed)"
                ));
                bytes = bytes.or(Some(server.memory));
            }
        }
        let is_stated = bytes.is_some();
        let bytes = bytes.unwrap_or_else(|| wanted(&servers, self.local, of_pool.copies.unwrap_or(1)));
        if let Ok(there_is) = available::in_all()
            && self.local.0 > there_is
        {
            say_line(&format!(
                "rampool: --local {} is more than this machine, or its container, has ({}): the system may \
                 kill the program before its pages leave",
                self.local,
                ByteLen(there_is)
            ));
        }
        let mut config = of_pool.config(servers, bytes, name)?;
        if self.backup.is_some() && !of_pool.servers.is_empty() {
            config.copies = Copies::WithBackup;
        }
        // Finds all other mistakes in the arguments before anything is leased.
        let bytes_of = |length: ByteLen| u32::try_from(length.0).unwrap_or(u32::MAX);
        let (page_bytes, prefetch_bytes) = (bytes_of(self.page_size), bytes_of(self.prefetch));
        rampool_pager::region::PagedConfig {
            local_bytes: self.local.0,
            page_bytes,
            prefetch_bytes,
            ..Default::default()
        }
        .cache_config()?;
        let key_file = of_pool.key_file.as_deref().map(std::fs::canonicalize).transpose()?;
        let pool = match connect(&config, Duration::from_secs(1)) {
            Err(ConnectError::TooLittle { wanted, missing, .. })
                if !is_stated && wanted.0 - missing.0 >= LEAST_LEASE =>
            {
                let free = ByteLen(wanted.0 - missing.0);
                say_line(&format!(
                    "rampool: the servers have only {free} free; the lease takes all of it instead of the \
                     usual {wanted} (--memory sets another amount)"
                ));
                if let LeaseRequest::Open { bytes, .. } = &mut config.lease {
                    *bytes = free;
                }
                connect(&config, Duration::from_secs(1))
            }
            result => result,
        }?;
        self.say_what_survives(&pool, &of_pool);

        let settings = Settings {
            run_dir: run_dir.path().to_owned(),
            ticket: pool.lease_ticket(),
            key_file,
            encryption: of_pool.encryption,
            same_host: config.same_host.unwrap_or_default(),
            local_bytes: self.local.0,
            page_bytes,
            prefetch_bytes,
            fault_mode,
            evict_by_copy: std::env::var_os("RAMPOOL_EVICT_BY_COPY").is_some_and(|value| value == "1"),
            verify: self.verify,
            op_deadline_ms: of_pool.op_deadline_ms,
            compression: of_pool.compression,
            spin_us: self.spin_us,
            follow_faults: !self.no_follow,
        };
        Ok(Begun { run_dir, own: (private, remote), pool, settings, libraries })
    }

    fn say_what_survives(&self, pool: &Pool, of_pool: &PoolOptions) {
        if let Some(backup) = self.backup.as_ref().filter(|_| !of_pool.servers.is_empty()) {
            let directory = backup.directory.display();
            say_line(&format!(
                "rampool: 2 copies of each page, one of them on the disk of {directory}: all servers may be \
                 lost"
            ));
        } else if of_pool.servers.len() > 1 {
            say_line(&format!(
                "rampool: {}",
                survives(pool.copies(), pool.servers().count(), of_pool.copies)
            ));
        }
        for server in pool.lost_servers() {
            let name = pool.servers().nth(server.as_usize()).unwrap_or_default();
            let reason = pool.why_lost(server).map(ToString::to_string).unwrap_or_default();
            say_line(&format!(
                "rampool: server {name} is not there: {reason}. The program starts without it, and uses it \
                 when it is; until then the pages that it is to hold have one copy each"
            ));
        }
    }
}

/// What becomes of the program when a server is lost. `asked`: the number of copies that was asked for.
fn survives(copies: u8, servers: usize, asked: Option<u8>) -> String {
    match (copies, asked) {
        (2, _) => format!("2 copies of each page, on {servers} servers: any one of them may be lost"),
        (_, None) => format!(
            "1 copy of each page: {servers} servers have no room for 2; if one of them is lost, the program \
             ends"
        ),
        _ => "1 copy of each page: if a server is lost, the program ends".into(),
    }
}

/// The default lease: what the amounts named with the servers make with so many copies, and at least a
/// sensible amount if one of them names none.
pub fn wanted(servers: &[ServerSpec], local: ByteLen, copies: u8) -> ByteLen {
    let named = servers.iter().filter_map(|s| s.memory).fold(0u64, |sum, m| sum.saturating_add(m.0));
    let all_named = servers.iter().all(|s| s.memory.is_some());
    let named = named / u64::from(copies);
    ByteLen(if all_named { named } else { named.max(local.0.saturating_mul(4)).max(1 << 30) })
}

/// A server with less than this free cannot serve a program.
const LEAST_LEASE: u64 = 16 << 20;
/// A program that takes longer than this to end after SIGTERM looks as if it hangs; it may only be waiting
/// for its pages.
const SLOW_END: Duration = Duration::from_secs(5);
/// How long this process sleeps at a time.
const LONGEST_TURN: Duration = Duration::from_millis(100);
/// A session that listens to a silent server once more, 30 ms long, must be looked at four times meanwhile.
const SHORTEST_TURN: Duration = Duration::from_millis(5);

fn choose_fault_mode(capabilities: &Capabilities, wanted: &str) -> Result<FaultMode> {
    let best = capabilities.best_fault_mode();
    match wanted {
        "auto" => Ok(best),
        name => {
            let fault_mode = FaultMode::parse(name).with_context(|| {
                format!("invalid --fault-mode `{name}`: give auto, uffd, uffd-user or segv")
            })?;
            let user_mode =
                capabilities.user_mode.as_ref().is_ok_and(|f| f.has(rampool_kernel::probe::NEEDED));
            let refused = match fault_mode {
                FaultMode::Full => best != FaultMode::Full,
                FaultMode::UserMode => !user_mode,
                FaultMode::Segv => {
                    if let Err(error) = &capabilities.segv {
                        bail!("this machine does not allow the fault mode `{name}`: {error}");
                    }
                    false
                }
            };
            if refused {
                bail!(
                    "this machine does not allow the fault mode `{name}`, only `{}` and below; `rampool \
                     doctor` says what to change",
                    best.name()
                );
            }
            Ok(fault_mode)
        }
    }
}

/// Starts the program, with the signal mask from before, and what keeps a CPU awake for it; returns its
/// process id. (`Command` would copy this process first.)
fn start(found: &Found, command: &[OsString], begun: &Begun, signals: &Signals) -> Result<i32> {
    let Begun { libraries, settings, pool, .. } = begun;
    keep_awake(settings, pool);
    let run_dir = &settings.run_dir;
    let mut preload = libraries.iter().map(|path| path.as_os_str()).collect::<Vec<_>>().join(OsStr::new(":"));
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let ours = [("LD_PRELOAD", preload.as_os_str()), (RUN_DIR_VARIABLE, run_dir.as_os_str())];
    let inherited = std::env::vars_os().filter(|(name, _)| !ours.iter().any(|(own, _)| name == own));
    let variable =
        |name: &OsStr, value: &OsStr| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat());
    let environment: Vec<CString> = inherited
        .map(|(name, value)| variable(&name, &value))
        .chain(ours.iter().map(|(name, value)| variable(OsStr::new(name), value)))
        .collect::<Result<_, _>>()?;
    let script = found.path.as_os_str();
    let (program, words) = if found.for_shell {
        (OsStr::new(SHELL), vec![OsStr::new(SHELL), script])
    } else {
        (script, vec![command[0].as_os_str()])
    };
    let words = words.into_iter().chain(command[1..].iter().map(OsString::as_os_str));
    let arguments: Vec<CString> =
        words.map(|argument| CString::new(argument.as_bytes())).collect::<Result<_, _>>()?;
    let started = signals.spawn(&CString::new(program.as_bytes())?, &arguments, &environment);
    started.map_err(|error| ProgramError::from_start(&found.path, &error).into())
}

/// How the program ended.
struct Ended {
    status: ExitStatus,
    /// Peak resident memory of all kinds, of the program or of a child that it has waited for.
    most_resident: ByteLen,
}

/// Waits for the program, passes signals on, keeps the lease alive.
fn wait(
    held: &mut Held,
    later: &mut caretaker::Later,
    unmanaged: &mut Unmanaged,
    signals: &mut Signals,
    progress: Option<(Instant, ByteLen)>,
) -> Result<Ended> {
    let Held { pool, redundancy, registry, fork_fallback, run_dir, .. } = held;
    let pid = later.program().cast_signed();
    let (mut shown, mut called) = (Instant::now(), Instant::now());
    let mut line = summary::ProgressLine::default();
    let mut slow_end = SlowEnd::default();
    loop {
        caretaker::serve_pool(pool);
        let mut raw = 0;
        // SAFETY: plain data.
        let mut usage = unsafe { std::mem::zeroed::<libc::rusage>() };
        // SAFETY: waits for our own child; `raw` and `usage` live across the call.
        let waited =
            unsafe { libc::wait4(pid, &raw mut raw, libc::WNOHANG | libc::WUNTRACED, &raw mut usage) };
        if waited == pid {
            let status = ExitStatus::from_raw(raw);
            if status.stopped_signal().is_some() {
                // The shell must see this process stopped as well. When the shell continues it, SIGCONT is
                // passed on like any other signal.
                if !signals.is_continued() {
                    // SAFETY: stops this process.
                    unsafe { libc::raise(libc::SIGSTOP) };
                }
                continue;
            }
            if progress.is_some() {
                line.clear();
            }
            let kib = u64::try_from(usage.ru_maxrss).unwrap_or(0);
            return Ok(Ended { status, most_resident: ByteLen(kib.saturating_mul(1024)) });
        }
        if let Some((started, local)) = progress
            && shown.elapsed() > Duration::from_millis(500)
        {
            shown = Instant::now();
            line.show(&run_dir.read_stats(), local, started.elapsed());
        }
        later.look();
        fork_fallback.look(&mut remark);
        unmanaged.look(later.program(), run_dir.path(), &mut remark);
        if called.elapsed() > caretaker::CALL_EVERY {
            called = Instant::now();
            caretaker::dismiss_gone(registry, pool);
            redundancy.look(pool);
        }
        // The pool judges silence by the times at which it is looked at.
        let due = pool.next_deadline().map(|due| due.saturating_duration_since(Instant::now()));
        let turn = due.unwrap_or(LONGEST_TURN).clamp(SHORTEST_TURN, LONGEST_TURN);
        signals.wait(turn, |came| {
            came.pass_to(pid);
            if came.signal == libc::SIGTERM {
                slow_end.told_to_end(run_dir);
            }
        });
        slow_end.look(pid, run_dir);
    }
}

/// Tells once that a program takes long to end after SIGTERM.
#[derive(Default)]
struct SlowEnd {
    /// When it was told to end, and how many faults there had been.
    since: Option<(Instant, u64)>,
    said: bool,
}

impl SlowEnd {
    fn told_to_end(&mut self, run_dir: &RunDir) {
        self.since.get_or_insert_with(|| (Instant::now(), faults(run_dir)));
    }

    fn look(&mut self, pid: i32, run_dir: &RunDir) {
        let Some((since, before)) = self.since.filter(|(since, _)| since.elapsed() > SLOW_END) else {
            return;
        };
        if std::mem::replace(&mut self.said, true) {
            return;
        }
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let waited = faults(run_dir).saturating_sub(before);
        let seconds = since.elapsed().as_secs();
        remark(&format!(
            "rampool: {} has not ended {seconds} s after SIGTERM; it has waited for {waited} pages since. \
             `kill -9 {pid}` ends it at once",
            name.trim()
        ));
    }
}

/// How often the run's processes have waited for a page so far.
fn faults(run_dir: &RunDir) -> u64 {
    run_dir.read_stats().iter().map(|process| process.faults).sum()
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

/// Leases memory. A server whose machine is short of memory is asked again, `every` so often, for as long as
/// short needs mostly last.
fn connect(config: &PoolConfig, every: Duration) -> Result<Pool, ConnectError> {
    const ASKED_AGAIN: u32 = 30;
    for asked in 0.. {
        let result = Pool::connect(config);
        let Err(Some(server)) = result.as_ref().map_err(ConnectError::short_of_memory) else { return result };
        if asked == ASKED_AGAIN {
            return result;
        }
        if asked == 0 {
            say_line(&format!(
                "rampool: the machine of memory server {server} is short of memory and gives no new leases \
                 now; waiting for up to {} s",
                every.as_secs() * u64::from(ASKED_AGAIN)
            ));
        }
        std::thread::sleep(every);
    }
    unreachable!("it returns when it has asked often enough")
}
