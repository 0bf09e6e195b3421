//! `rampool launch`: a parallel program on shared memory, as several processes on one or many machines.

mod binding;
pub mod hosts;
mod rank_stderr;
pub mod stats;
mod verdict;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rampool_client::pool::ServerSpec;
use rampool_kernel::words::{say, say_line};
use rampool_net::key::Key;
use rampool_net::transport::{SAME_HOST_VARIABLE, SameHost};
use rampool_shared::environment::variable;
use rampool_shared::{LEAST_LOCAL_BYTES, SHARED_PAGE_SIZES, TimeReport, shared_page_bytes};
use rampool_wire::units::ByteLen;

use crate::other_binary;
use crate::program::ProgramError;
use crate::signals::{Came, SentTo, Signals};
use binding::{Bind, Cpu};
use hosts::Hosts;
use rank_stderr::RankStderr;
use stats::Inbox;
use verdict::{End, verdict};

/// Start a parallel program on shared memory: several processes, on this machine or on many
///
/// The environment tells each process how to find the others, so a program that calls rampool's library joins
/// by itself. Standard input goes to rank 0. Standard output and error pass through unchanged. When a process
/// ends with an error, or is lost, all others are ended, and one message says which process it was and why.
#[derive(clap::Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct Args {
    /// Number of processes, 1 to 4096
    #[arg(short = 'n', long = "ranks", value_name = "N",
        value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks: u16,

    /// Default consistency protocol: sc, lrc, hlrc, aurc, ibec or auto [default: auto]
    #[arg(long, env = "RAMPOOL_PROTOCOL", value_name = "NAME",
        value_parser = ["sc", "lrc", "hlrc", "aurc", "ibec", "auto"])]
    protocol: Option<String>,

    /// Unit in which shared memory is kept consistent, of memory that names none: 4K to 64K, a power of two
    /// [default: 4K]
    #[arg(long, env = "RAMPOOL_SHARED_PAGE_SIZE", value_name = "SIZE", value_parser = page_size)]
    page_size: Option<u32>,

    /// Transport of messages between processes: tcp (within a machine shared memory, see --same-host) or udp
    /// [default: tcp]
    #[arg(long, env = "RAMPOOL_TRANSPORT", value_name = "NAME", value_parser = ["tcp", "udp"])]
    transport: Option<String>,

    /// How processes on one machine reach each other: auto (shared memory where both can, else tcp), rings
    /// (shared memory, or an error) or socket (tcp) [default: auto]
    #[arg(long, env = SAME_HOST_VARIABLE, value_name = "HOW")]
    same_host: Option<SameHost>,

    /// CPUs that each process may use: rank (an equal share of the CPUs of this command, if there is one for
    /// each process) or none (all of them). Not with --hosts
    #[arg(long, env = "RAMPOOL_BIND", value_name = "HOW", default_value = "rank")]
    bind: Bind,

    /// Most shared memory, in bytes, that each process keeps in RAM at a time, such as 512M. Copies that
    /// other processes have are dropped first; the rest goes to --server [default: no limit]
    #[arg(long, env = "RAMPOOL_SHARED_LOCAL", value_name = "SIZE")]
    local: Option<ByteLen>,

    /// A memory server for shared memory that --local has no room for: HOST[:PORT] or unix:/PATH, optionally
    /// with the amount that each process leases from it (HOST=4G). Repeat it, or separate by commas
    #[arg(
        long = "server",
        env = "RAMPOOL_SHARED_SERVERS",
        value_name = "ADDR",
        value_delimiter = ',',
        requires = "local"
    )]
    servers: Vec<ServerSpec>,

    /// Memory, in bytes, that each process leases from the servers [default: the amounts given with --server]
    #[arg(long, env = "RAMPOOL_SHARED_MEMORY", value_name = "SIZE", requires = "servers")]
    memory: Option<ByteLen>,

    /// On how many servers each page lies that --local has no room for: 1, or 2, so that any one server may
    /// be lost. The servers lend twice as much then [default: 2 where two or more have room for that, else 1]
    #[arg(long, env = "RAMPOOL_SHARED_COPIES", value_name = "N", requires = "servers",
        value_parser = clap::value_parser!(u8).range(1..=2))]
    copies: Option<u8>,

    /// Start the processes over ssh on the machines listed in FILE, one a line, optionally with `slots=N`.
    /// All machines must reach the first one by its name
    #[arg(long, value_name = "FILE")]
    hosts: Option<PathBuf>,

    /// With --hosts: the command that runs another one on a machine, as `COMMAND HOST SHELL-COMMAND`, and
    /// passes standard input on to it
    #[arg(long, env = "RAMPOOL_SSH", default_value = "ssh", value_name = "COMMAND")]
    ssh: String,

    /// With --hosts: TCP port on which rank 0 listens
    #[arg(long, default_value_t = 7118, value_name = "PORT")]
    port: u16,

    /// Key file of the memory servers, at the same path on all machines (see `rampool key`). The processes of
    /// a run have a key of their own
    #[arg(long, env = "RAMPOOL_KEY_FILE", value_name = "FILE")]
    key_file: Option<PathBuf>,

    /// Print where the time of each rank went, and what was sent; with =FILE, write it to FILE as JSON. If
    /// the program marks a part to be measured, only that part counts
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, conflicts_with = "hosts")]
    stats: Option<Option<PathBuf>>,

    /// Draw what --stats shows to FILE, as an SVG picture with a stacked bar for each rank (`rampool plot`
    /// draws several runs side by side)
    #[arg(long, value_name = "FILE", conflicts_with = "hosts")]
    plot: Option<PathBuf>,

    /// Write a trace of each rank to DIR/rank-N.jsonl: what it computed, sent, received and waited for
    #[arg(long, value_name = "DIR", conflicts_with = "hosts")]
    trace: Option<PathBuf>,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

fn page_size(text: &str) -> Result<u32, String> {
    shared_page_bytes(text).ok_or_else(|| format!("a shared page has {SHARED_PAGE_SIZES}"))
}

const EXIT_CODES: &str = "\
Exit codes:
  that of the process that ended the run, or 0
  125  rampool failed; the message says why
  126  the program exists and cannot be executed
  127  the program does not exist";

/// After the first failure the others have this long to notice by themselves: their messages may say more.
const GRACE: Duration = Duration::from_secs(1);
/// From SIGTERM to SIGKILL.
const MERCY: Duration = Duration::from_secs(1);

/// A process of the run.
struct Rank {
    child: Child,
    end: Option<End>,
}

/// Returns the exit code of the run: that of the process that ended it, or 0.
pub fn run(args: &Args) -> Result<i32> {
    if args.local.is_some_and(|local| local.0 < LEAST_LOCAL_BYTES) {
        bail!("--local is at least {}", ByteLen(LEAST_LOCAL_BYTES));
    }
    if args.memory.is_none() && args.servers.iter().any(|server| server.memory.is_none()) {
        bail!("--server gives no amount: write HOST=4G, or give --memory");
    }
    let hosts = args.hosts.as_deref().map(Hosts::read).transpose()?;
    let mut signals = Signals::block()?;
    let run = Run::new()?;
    for file in args.stats.iter().flatten().chain(&args.plot) {
        stats::try_file(file)?;
    }
    if args.plot.is_some() {
        other_binary::command("plot")?;
    }
    let wanted = args.stats.is_some() || args.plot.is_some();
    let inbox = wanted.then(|| stats::Inbox::make(&run.name)).transpose()?;
    if let Some(dir) = &args.trace {
        empty_trace(dir)?;
    }
    let (mut reports, report_to) = std::io::pipe().context("cannot create a pipe")?;
    let rank_stderr = RankStderr::new(format!("rampool {}: ", run.name));
    signals.watch_group();
    let mut ranks = match &hosts {
        None => start_here(args, &run, report_to.into(), inbox.as_ref(), &signals)?,
        Some(hosts) => {
            drop(report_to);
            start_there(args, &run, hosts, &rank_stderr, &signals)?
        }
    };
    signals.watch_group();
    let ends = wait(&mut ranks, &mut signals)?;
    if let Some(inbox) = &inbox {
        show(args, inbox, inbox.reports(args.ranks)?)?;
    }
    rustix::fs::fcntl_setfl(&reports, rustix::fs::OFlags::NONBLOCK)?;
    let mut said = Vec::new();
    // No more can arrive, and what cannot be read is dropped.
    let _ = reports.read_to_end(&mut said);
    let said = String::from_utf8_lossy(&said).into_owned() + &rank_stderr.reports();
    let machines = hosts.map(|hosts| hosts.places(args.ranks)).unwrap_or_default();
    match verdict(&ends, &said, &machines) {
        None => Ok(0),
        Some((message, code)) => {
            say_line(&format!("rampool: {message}"));
            Ok(code)
        }
    }
}

/// Shows what the ranks left, in the ways that were asked for.
fn show(args: &Args, inbox: &Inbox, ranks: Vec<TimeReport>) -> Result<()> {
    match &args.stats {
        Some(Some(file)) => stats::write(&ranks, file)?,
        Some(None) => say(&stats::table(&ranks)),
        None => {}
    }
    let Some(file) = &args.plot else { return Ok(()) };
    if ranks.is_empty() {
        say_line(&format!("rampool: {} is not written: no rank finished", file.display()));
        return Ok(());
    }
    let times = inbox.file("times.json");
    stats::write(&ranks, &times)?;
    let mut plot = other_binary::command("plot")?;
    plot.arg("--unlabelled")
        .arg(format!("--title={}", title(&args.command)))
        .arg("--output")
        .arg(file)
        .arg(times);
    let status = plot.status().with_context(|| format!("cannot start {}", plot.get_program().display()))?;
    ensure!(status.success(), "cannot draw {}", file.display());
    Ok(())
}

/// A command as the title of a picture: the program without its directory, at most one line.
fn title(command: &[OsString]) -> String {
    const MOST: usize = 80;
    let program = Path::new(&command[0]).file_name().unwrap_or(&command[0]);
    let words: Vec<_> = std::iter::once(program)
        .chain(command[1..].iter().map(OsString::as_os_str))
        .map(|word| word.to_string_lossy())
        .collect();
    let line = words.join(" ");
    if line.chars().count() <= MOST {
        line
    } else {
        line.chars().take(MOST - 1).chain(['\u{2026}']).collect()
    }
}

/// Creates a directory for the ranks' traces and removes those of an earlier run, which would be taken for
/// this run's if it had more ranks.
fn empty_trace(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry.with_context(|| format!("cannot read {}", dir.display()))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = name.strip_prefix("rank-").and_then(|rest| rest.strip_suffix(".jsonl"));
        if number.is_some_and(|number| number.parse::<u16>().is_ok()) {
            std::fs::remove_file(&path)
                .with_context(|| format!("cannot remove an earlier run's trace {}", path.display()))?;
        }
    }
    Ok(())
}

/// What the processes of this run have in common.
struct Run {
    /// Unique to this run. Appears in file names and command lines.
    name: String,
    /// Secret. Appears in no name, command line or file.
    key: Key,
}

impl Run {
    fn new() -> Result<Self> {
        let mut bytes = [0; 16];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut file| file.read_exact(&mut bytes))
            .context("cannot read /dev/urandom")?;
        Ok(Self { name: bytes.iter().map(|byte| format!("{byte:02x}")).collect(), key: Key::generate() })
    }
}

/// The environment of one rank, without the key.
fn environment(
    args: &Args,
    rank: u16,
    rendezvous: &str,
    run: &Run,
    local_ranks: u16,
) -> Vec<(&'static str, OsString)> {
    let mut variables: Vec<(&'static str, OsString)> = vec![
        (variable::RANK, rank.to_string().into()),
        (variable::RANKS, args.ranks.to_string().into()),
        (variable::RENDEZVOUS, rendezvous.into()),
        (variable::RUN, run.name.clone().into()),
        (variable::LOCAL_RANKS, local_ranks.to_string().into()),
    ];
    if let Some(protocol) = &args.protocol {
        variables.push(("RAMPOOL_PROTOCOL", protocol.into()));
    }
    if let Some(bytes) = args.page_size {
        variables.push(("RAMPOOL_SHARED_PAGE_SIZE", bytes.to_string().into()));
    }
    if let Some(transport) = &args.transport {
        variables.push(("RAMPOOL_TRANSPORT", transport.into()));
    }
    if let Some(how) = args.same_host {
        variables.push((SAME_HOST_VARIABLE, how.to_string().into()));
    }
    if let Some(local) = args.local {
        variables.push(("RAMPOOL_SHARED_LOCAL", local.0.to_string().into()));
    }
    if !args.servers.is_empty() {
        let servers: Vec<String> = args.servers.iter().map(ToString::to_string).collect();
        variables.push(("RAMPOOL_SHARED_SERVERS", servers.join(",").into()));
    }
    if let Some(memory) = args.memory {
        variables.push(("RAMPOOL_SHARED_MEMORY", memory.0.to_string().into()));
    }
    if let Some(copies) = args.copies {
        variables.push(("RAMPOOL_SHARED_COPIES", copies.to_string().into()));
    }
    if let Some(path) = &args.key_file {
        variables.push(("RAMPOOL_KEY_FILE", path.into()));
    }
    variables
}

/// Starts all ranks on this machine. Rank 0 inherits the socket that it listens on, so no other process can
/// take its port.
fn start_here(
    args: &Args,
    run: &Run,
    report_to: OwnedFd,
    inbox: Option<&stats::Inbox>,
    signals: &Signals,
) -> Result<Vec<Rank>> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot open a port for the ranks to meet at")?;
    let rendezvous = listener.local_addr()?.to_string();
    // Copies for the programs to inherit; they are closed here before the next rank starts.
    let mut listener = Some(rustix::io::dup(&listener)?);
    let report_to = rustix::io::dup(&report_to)?;
    let trace = args.trace.as_ref().map(std::path::absolute).transpose()?;
    let shares = (args.bind == Bind::Rank).then(|| binding::shares(Cpu::allowed(), args.ranks)).flatten();
    let mut ranks = Vec::new();
    for rank in 0..args.ranks {
        let mut command = program(&args.command, signals);
        command
            .envs(environment(args, rank, &rendezvous, run, args.ranks))
            .env(variable::RUN_KEY, run.key.to_hex());
        match &shares {
            Some(shares) => binding::bind(&mut command, &shares[usize::from(rank)]),
            None => {
                command.env_remove(variable::BOUND);
            }
        }
        command.env(variable::REPORT_FD, report_to.as_raw_fd().to_string()).env_remove(variable::REPORT_MARK);
        for (name, dir) in [
            (variable::STATS_DIR, inbox.map(stats::Inbox::path)),
            (variable::TRACE_DIR, trace.clone().map(Into::into)),
        ] {
            match dir {
                Some(dir) => command.env(name, dir),
                None => command.env_remove(name),
            };
        }
        match listener.take() {
            Some(listener) => {
                command.env(variable::RENDEZVOUS_FD, listener.as_raw_fd().to_string());
                start(&mut command, rank, &mut ranks)?;
            }
            None => {
                command.env_remove(variable::RENDEZVOUS_FD).stdin(Stdio::null());
                start(&mut command, rank, &mut ranks)?;
            }
        }
    }
    Ok(ranks)
}

/// Starts ranks on other machines, through a shell there.
fn start_there(
    args: &Args,
    run: &Run,
    hosts: &Hosts,
    rank_stderr: &RankStderr,
    signals: &Signals,
) -> Result<Vec<Rank>> {
    let places = hosts.places(args.ranks);
    let rendezvous = format!("{}:{}", places[0], args.port);
    let directory = std::env::current_dir().context("cannot read the current directory")?;
    let mut ranks = Vec::new();
    for (rank, host) in (0..).zip(&places) {
        let local = places.iter().filter(|other| *other == host).count();
        let mut variables =
            environment(args, rank, &rendezvous, run, u16::try_from(local).unwrap_or(u16::MAX));
        variables.push((variable::REPORT_MARK, rank_stderr.mark().into()));
        let mut words = args.ssh.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        if words.is_empty() {
            bail!("--ssh is empty: give a command");
        }
        words.push(host.into());
        words.push(hosts::shell_command(&directory, &variables, variable::RUN_KEY, &args.command)?.into());
        let mut command = program(&words, signals);
        command.stdin(Stdio::piped()).stderr(Stdio::piped());
        start(&mut command, rank, &mut ranks)?;
        let child = &mut ranks.last_mut().expect("it was just started").child;
        give_input(child.stdin.take().expect("it has a pipe"), &run.key, rank == 0);
        rank_stderr.listen(child.stderr.take().expect("it has a pipe"));
    }
    Ok(ranks)
}

/// Writes the key to a remote shell's standard input as the first line. If `goes_on`, this command's own
/// standard input follows.
fn give_input(mut to: ChildStdin, key: &Key, goes_on: bool) {
    // An error here means that the shell has ended, which is reported elsewhere.
    let given = to.write_all((key.to_hex() + "\n").as_bytes());
    if goes_on && given.is_ok() {
        std::thread::spawn(move || _ = std::io::copy(&mut std::io::stdin().lock(), &mut to));
    }
}

/// Makes the child end when this process ends.
fn program(words: &[OsString], signals: &Signals) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    let mask = signals.before();
    // SAFETY: between fork and exec only sigprocmask and prctl are called, which are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            libc::sigprocmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut());
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    command
}

fn start(command: &mut Command, rank: u16, ranks: &mut Vec<Rank>) -> Result<()> {
    match command.spawn() {
        Ok(child) => {
            ranks.push(Rank { child, end: None });
            Ok(())
        }
        Err(error) => {
            for rank in ranks.iter_mut() {
                let _ = rank.child.kill();
                let _ = rank.child.wait();
            }
            let error = ProgramError::from_start(Path::new(command.get_program()), &error);
            Err(error).with_context(|| format!("rank {rank}"))
        }
    }
}

/// Waits until all have ended. After the first failure the others are ended.
fn wait(ranks: &mut [Rank], signals: &mut Signals) -> Result<Vec<End>> {
    let mut bad: Option<Instant> = None;
    let mut order = 0;
    loop {
        for (number, rank) in ranks.iter_mut().enumerate().filter(|(_, rank)| rank.end.is_none()) {
            let Some(status) = rank.child.try_wait().context("cannot wait for a rank")? else { continue };
            let ended_by_us = bad.is_some_and(|since| since.elapsed() >= GRACE);
            rank.end = Some(End { rank: number, status, order, ended_by_us });
            order += 1;
            if !status.success() {
                bad.get_or_insert_with(Instant::now);
            }
        }
        if ranks.iter().all(|rank| rank.end.is_some()) {
            return Ok(ranks.iter_mut().filter_map(|rank| rank.end.take()).collect());
        }
        let mut pause = Duration::from_millis(500);
        if let Some(since) = bad {
            pause = Duration::from_millis(10);
            if since.elapsed() >= GRACE + MERCY {
                end(ranks, libc::SIGKILL);
            } else if since.elapsed() >= GRACE {
                end(ranks, libc::SIGTERM);
                // A stopped process would not see SIGTERM otherwise.
                end(ranks, libc::SIGCONT);
            }
        }
        signals.wait(pause, |came| send(ranks, came));
    }
}

fn end(ranks: &[Rank], signal: i32) {
    send(ranks, Came { signal, sent_to: SentTo::ThisProcess });
}

fn send(ranks: &[Rank], came: Came) {
    for rank in ranks.iter().filter(|rank| rank.end.is_none()) {
        came.pass_to(i32::try_from(rank.child.id()).expect("a process id"));
    }
}
