//! Who belongs to a run, and what is left of it when its program has ended.
//!
//! Pages of a process that ended go back at once, not after the grace time. When the program ends but processes that it started live on, as daemons do,
//! a *caretaker* stays behind for them: a copy of this process without a terminal, which keeps the lease (and the private server) until the last of
//! them has ended.

use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rampool::guardian::Guardian;
use rampool::pool::Pool;
use rampool::roll::Roll;
use rampool::settings::RUN_DIR_VARIABLE;

use super::PrivateServer;
use crate::rundir::RunDir;

/// How long what the program leaves behind may take to end by itself, or to say that it is there.
const STRAGGLERS: Duration = Duration::from_millis(150);
const UNSIGNED: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Says goodbye for the members whose processes are gone. Returns how many processes of the run are there.
pub fn dismiss_gone(roll: &Roll, pool: &mut Pool) -> usize {
    let call = roll.call();
    for member in &call.gone {
        pool.dismiss(member);
    }
    call.present.len()
}

/// The program has ended, which was this process for that long: gives everything back, unless processes that it started live on. Then a caretaker does so after them.
pub fn end(mut pool: Pool, roll: &Roll, mut guardian: Guardian, run_dir: RunDir, private: Option<PrivateServer>, program: (i32, Duration)) {
    if somebody_lives_on(roll, &mut pool, run_dir.path(), program) || is_needed(&mut guardian) {
        // SAFETY: this process has one thread, so the copy has all it needs.
        let caretaker = unsafe { libc::fork() };
        if caretaker > 0 {
            // Both are the caretaker's now; the connections are closed here and live on there.
            std::mem::forget((run_dir, private));
            return;
        }
        if caretaker == 0 {
            leave_terminal();
            take_care(&mut pool, roll, &mut guardian);
            pool.leave();
            drop((private, run_dir));
            // SAFETY: ends the copy without what the original does at its end.
            unsafe { libc::_exit(0) };
        }
        // No copy can be made: the run ends for them as well.
    }
    pool.leave();
    drop((private, run_dir));
}

fn somebody_lives_on(roll: &Roll, pool: &mut Pool, run_dir: &Path, (process, lived): (i32, Duration)) -> bool {
    let since = Instant::now();
    loop {
        let present = dismiss_gone(roll, pool) > 0;
        let waited = since.elapsed();
        // A child that was forked a moment ago may not have signed yet.
        if present && waited >= STRAGGLERS
            || waited >= UNSIGNED
            || !present && !is_anywhere(run_dir, process.cast_unsigned(), lived + waited)
        {
            return present;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether any process was started as part of this run, by the environment that it was started with. `program` is the first of them, started so long ago.
fn is_anywhere(run_dir: &Path, program: u32, ago: Duration) -> bool {
    let wanted = [RUN_DIR_VARIABLE.as_bytes(), b"=", run_dir.as_os_str().as_bytes()].concat();
    let of_run = |process: u32| {
        let environment = std::fs::read(format!("/proc/{process}/environ"));
        environment.is_ok_and(|bytes| bytes.split(|byte| *byte == 0).any(|variable| variable == wanted))
    };
    if let Some(mut later) = latest_process().and_then(|latest| started_after(program, latest, ago)) {
        return later.any(of_run);
    }
    let Ok(entries) = std::fs::read_dir("/proc") else { return false };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).any(of_run)
}

/// The number that was given to a process or thread last.
fn latest_process() -> Option<u32> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().nth(4)?.parse().ok()
}

/// Numbers are given in order, around and around: what was started after `program` has one of these, unless that is so long `ago` that they may have come around, or there
/// are so many that it is better to look at all processes that there are.
fn started_after(program: u32, latest: u32, ago: Duration) -> Option<RangeInclusive<u32>> {
    const MAY_COME_AROUND: Duration = Duration::from_millis(500);
    const FEW: u32 = 64;
    let count = latest.checked_sub(program)?;
    (ago < MAY_COME_AROUND && count <= FEW).then_some(program + 1..=latest)
}

fn leave_terminal() {
    // SAFETY: no preconditions; whoever waits for the end of our standard output must not wait for the caretaker.
    unsafe {
        libc::setsid();
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        for standard in 0..3 {
            if null < 0 || libc::dup2(null, standard) < 0 {
                libc::close(standard);
            }
        }
    }
}

/// Nobody reads what is said from here on.
fn is_needed(guardian: &mut Guardian) -> bool {
    guardian.look(&mut |_| {});
    guardian.is_needed()
}

fn take_care(pool: &mut Pool, roll: &Roll, guardian: &mut Guardian) {
    while dismiss_gone(roll, pool) > 0 || is_needed(guardian) {
        let until = Instant::now() + LOOK_EVERY;
        // Events are for people who are not here any more. A socket that cannot be watched is a lost server's.
        while pool.next_event(until).is_ok_and(|event| event.is_some()) {}
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_be_of_the_run_is_looked_at() {
        let (soon, late) = (Duration::from_millis(100), Duration::from_secs(10));
        assert!(started_after(100, 100, soon).is_some_and(|later| later.is_empty()), "nothing was started since");
        assert_eq!(started_after(100, 103, soon), Some(101..=103));
        assert_eq!(started_after(100, 103, late), None, "the numbers may have come around");
        assert_eq!(started_after(100, 99, soon), None, "they have");
        assert_eq!(started_after(100, 100_000, soon), None, "they are many");
    }

    #[test]
    fn a_process_of_the_run_is_found_by_its_number_and_by_looking_at_all() {
        let run_dir = tempfile::tempdir().unwrap();
        let mut before = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let mut of_run = std::process::Command::new("sleep").arg("1000").env(RUN_DIR_VARIABLE, run_dir.path()).spawn().unwrap();
        // Its environment is there a moment after `spawn` has returned.
        let deadline = Instant::now() + Duration::from_secs(30);
        let found = [Duration::ZERO, Duration::from_secs(10)].map(|ago| {
            while !is_anywhere(run_dir.path(), before.id(), ago) && Instant::now() < deadline {
                std::thread::yield_now();
            }
            is_anywhere(run_dir.path(), before.id(), ago)
        });
        let latest = latest_process().unwrap();
        for child in [&mut before, &mut of_run] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(found, [true, true]);
        assert!(latest >= of_run.id() || latest < before.id(), "{latest} was given after {}", of_run.id());
        assert!(
            !is_anywhere(run_dir.path(), before.id(), Duration::ZERO) && !is_anywhere(run_dir.path(), before.id(), Duration::from_secs(10))
        );
    }
}
