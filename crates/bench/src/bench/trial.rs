//! One run of a program: natively, under `rampool run`, or within a memory cgroup; its time, its peak, and a
//! digest of what it wrote.

use std::collections::hash_map::DefaultHasher;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::hash::Hasher;
use std::io::Read;
use std::ops::Range;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::service::rampool;
use super::workload::word;

/// A program of a benchmark.
#[derive(Clone)]
pub struct Program {
    pub name: &'static str,
    pub argv: Vec<OsString>,
}

/// How a run ended.
pub enum Outcome {
    Done(Trial),
    /// Ended by a signal: without enough memory, by the kernel's SIGKILL.
    Killed(i32),
    /// Still running after this many seconds, then ended.
    NoEnd(u64),
}

pub struct Trial {
    pub wall_s: f64,
    /// User and system time, of all processes of the run.
    pub cpu_s: f64,
    /// The largest resident set of a process of the run.
    pub peak_bytes: u64,
    digest: (u64, u64),
}

impl Trial {
    /// An error unless both wrote the same bytes.
    pub fn same_output(&self, native: &Self, name: &str) -> Result<()> {
        if self.digest != native.digest {
            bail!(
                "WRONG OUTPUT: {name} wrote {} bytes that differ from the {} it writes natively",
                self.digest.0,
                native.digest.0
            );
        }
        Ok(())
    }
}

impl Program {
    pub fn native(&self) -> Command {
        let mut command = Command::new(&self.argv[0]);
        command.args(&self.argv[1..]).env("LC_ALL", "C");
        command
    }

    /// The same under `rampool run`, with these options.
    pub fn paged(&self, options: &[String]) -> Result<Command> {
        let mut command = rampool()?;
        command.arg("run").args(options).arg("--").args(&self.argv).env("LC_ALL", "C");
        Ok(command)
    }
}

/// Runs a command to its end or to the deadline. A program that ends by itself with anything but 0 is an
/// error.
pub fn run(mut command: Command, deadline: Duration) -> Result<Outcome> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe. `rampool run` passes
    // the signal on to its program.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
    let started = Instant::now();
    let mut child =
        command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let pid = i32::try_from(child.id()).expect("a process id");
    let mut out = child.stdout.take().expect("it is piped");
    let reader = std::thread::spawn(move || {
        let (mut hasher, mut count, mut block) = (DefaultHasher::new(), 0u64, vec![0u8; 256 << 10]);
        while let Ok(n @ 1..) = out.read(&mut block) {
            hasher.write(&block[..n]);
            count += n as u64;
        }
        (count, hasher.finish())
    });
    let (mut late, mut status) = (false, 0);
    // SAFETY: plain data, filled by wait4.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: waits for our own child; both places live across the call.
    while unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut usage) } == 0 {
        if !late && started.elapsed() > deadline {
            late = true;
            // SAFETY: the group of our own child, which is not collected yet.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let wall_s = started.elapsed().as_secs_f64();
    if late {
        return Ok(Outcome::NoEnd(deadline.as_secs()));
    }
    let status = ExitStatus::from_raw(status);
    if let Some(signal) = status.signal() {
        // SAFETY: what is left of the group of the child that just ended.
        unsafe { libc::kill(-pid, libc::SIGKILL) };
        return Ok(Outcome::Killed(signal));
    }
    if !status.success() {
        bail!("`{}` ended with {status}", shown(&command));
    }
    let digest = reader.join().expect("reading does not panic");
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    Ok(Outcome::Done(Trial {
        wall_s,
        cpu_s: seconds(usage.ru_utime) + seconds(usage.ru_stime),
        peak_bytes: u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024,
        digest,
    }))
}

/// Runs a command that must end well.
pub fn must(command: Command, deadline: Duration) -> Result<Trial> {
    let text = shown(&command);
    match run(command, deadline)? {
        Outcome::Done(trial) => Ok(trial),
        Outcome::Killed(signal) => bail!("`{text}` was ended by signal {signal}"),
        Outcome::NoEnd(seconds) => bail!("`{text}` did not end in {seconds} s"),
    }
}

fn shown(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    words.join(" ")
}

/// Where the programs' parts lie.
#[derive(clap::Args, Debug)]
pub struct Parts {
    /// Directory of the scripts of the Python workloads
    #[arg(long, default_value = "tests/programs/work", value_name = "DIR")]
    scripts: PathBuf,

    /// Python with NumPy [default: .venv/bin/python, or else python3]
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
}

impl Parts {
    /// A script of `scripts`, or why it cannot run here.
    pub fn python(&self, name: &'static str, script: &str, arguments: &[&str]) -> Result<Program, String> {
        let own = Path::new(".venv/bin/python");
        let python = match &self.python {
            Some(path) => path.clone(),
            None if own.exists() => own.to_owned(),
            None => "python3".into(),
        };
        let path = self.scripts.join(script);
        if !path.exists() {
            return Err(format!(
                "{} does not exist; start in the checkout, or give --scripts DIR",
                path.display()
            ));
        }
        let probe =
            Command::new(&python).args(["-c", "import numpy, sqlite3"]).stderr(Stdio::null()).status();
        if !probe.is_ok_and(|s| s.success()) {
            return Err(format!("{} lacks NumPy or SQLite; give --python FILE", python.display()));
        }
        let mut argv: Vec<OsString> = vec![python.into(), path.into()];
        argv.extend(arguments.iter().map(Into::into));
        Ok(Program { name, argv })
    }
}

/// A file of random lines, removed when dropped.
pub struct Lines {
    pub path: PathBuf,
}

impl Lines {
    /// About `bytes` bytes of lines with that many random hexadecimal digits each.
    pub fn make(bytes: usize, digits: Range<usize>) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("rampool-bench-{}.lines", std::process::id()));
        let new = Self { path };
        let mut text = String::with_capacity(bytes + digits.end + 32);
        let mut n = 0;
        while text.len() < bytes {
            let spread = u64::try_from(digits.len())?;
            let end = text.len() + digits.start + usize::try_from(word(3, n) % spread)?;
            for part in 0.. {
                if text.len() >= end {
                    break;
                }
                write!(text, "{:016x}", word(4, (n << 8) + part))?;
            }
            text.truncate(end);
            text.push('\n');
            n += 1;
        }
        std::fs::write(&new.path, text).with_context(|| format!("cannot write {}", new.path.display()))?;
        Ok(new)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
