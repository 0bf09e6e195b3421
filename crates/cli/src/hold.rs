//! `rampool hold`: memory for a process that runs already. `rampool.attach` of the Python package starts it.
//!
//! It is `rampool run` without the start: it leases, writes the run's directory, says where that is, and
//! keeps the lease until the process has ended. The process loads the agent itself, with `RAMPOOL_RUN_DIR`
//! set to the directory.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rampool_kernel::probe::FaultMode;
use rampool_kernel::words::remark;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::run::Options;
use crate::run::caretaker::{self, Held};

/// Lease memory for a process that runs already, until it ends.
///
/// The process loads the agent itself (`rampool.attach` in Python does). The first line on standard output is
/// the run's directory, for its variable RAMPOOL_RUN_DIR; the second is the agent's library. Needs
/// userfaultfd in full (see `rampool doctor`).
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The process
    #[arg(long = "for", value_name = "PID")]
    process: i32,

    #[command(flatten)]
    options: Options,
}

/// How soon the memory of a forked child that ended goes back.
const LOOK_EVERY: Duration = Duration::from_millis(100);

pub fn run(args: &Args) -> Result<i32> {
    let process = Pid::from_raw(args.process)
        .filter(|_| args.process > 0)
        .with_context(|| format!("{} is no process id", args.process))?;
    let watched = pidfd_open(process, PidfdFlags::empty())
        .with_context(|| format!("process {} cannot be watched", args.process))?;
    args.options.check()?;
    let below_full = || {
        bail!(
            "a process that runs already needs userfaultfd in full, which this machine does not allow; \
             `rampool doctor` says what to change"
        )
    };
    let name = program_name(args.process);
    let begun = args.options.begin(&name, below_full)?;
    debug_assert_eq!(begun.settings.fault_mode, FaultMode::Full);
    let (mut held, ()) = begun.hold(|begun| {
        let mut out = std::io::stdout();
        writeln!(out, "{}\n{}", begun.run_dir.path().display(), begun.libraries[0].display())?;
        Ok(out.flush()?)
    })?;
    wait(&watched, &mut held)?;
    caretaker::end(held, caretaker::Later::than(args.process.cast_unsigned()));
    Ok(0)
}

/// Keeps the lease alive until the process has ended.
fn wait(watched: &OwnedFd, held: &mut Held) -> Result<()> {
    let Held { pool, redundancy, registry, fork_fallback, .. } = held;
    let mut called = Instant::now();
    loop {
        caretaker::serve_pool(pool);
        fork_fallback.look(&mut remark);
        if called.elapsed() > caretaker::CALL_EVERY {
            called = Instant::now();
            caretaker::dismiss_gone(registry, pool);
            redundancy.look(pool);
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(LOOK_EVERY.subsec_nanos()) };
        match poll(&mut [PollFd::new(watched, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error).context("the process cannot be watched"),
        }
    }
}

/// What servers show people.
fn program_name(process: i32) -> String {
    let mut name = String::new();
    let read =
        File::open(format!("/proc/{process}/comm")).and_then(|mut file| file.read_to_string(&mut name));
    if read.is_ok() { name.trim().to_owned() } else { "program".to_owned() }
}
