//! Who belongs to a run, and what is left of it when its program has ended.
//!
//! Pages of a process that ended go back at once, not after the grace time. When the program ends but processes that it started live on, as daemons do,
//! a *caretaker* stays behind for them: a copy of this process without a terminal, which keeps the lease (and the private server) until the last of
//! them has ended.

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

/// The program has ended: gives everything back, unless processes that it started live on. Then a caretaker does so after them.
pub fn end(mut pool: Pool, roll: &Roll, mut guardian: Guardian, run_dir: RunDir, private: Option<PrivateServer>) {
    if somebody_lives_on(roll, &mut pool, run_dir.path()) || is_needed(&mut guardian) {
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

fn somebody_lives_on(roll: &Roll, pool: &mut Pool, run_dir: &Path) -> bool {
    let since = Instant::now();
    loop {
        let present = dismiss_gone(roll, pool) > 0;
        let waited = since.elapsed();
        // A child that was forked a moment ago may not have signed yet.
        if present && waited >= STRAGGLERS || waited >= UNSIGNED || !present && !is_anywhere(run_dir) {
            return present;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether any process was started as part of this run, by the environment that it was started with.
fn is_anywhere(run_dir: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let wanted = [RUN_DIR_VARIABLE.as_bytes(), b"=", run_dir.as_os_str().as_bytes()].concat();
    let Ok(entries) = std::fs::read_dir("/proc") else { return false };
    let of_run = |environment: Vec<u8>| environment.split(|byte| *byte == 0).any(|variable| variable == wanted);
    entries
        .filter_map(|entry| entry.ok())
        .filter(|entry| entry.file_name().as_bytes().iter().all(u8::is_ascii_digit))
        .any(|entry| std::fs::read(entry.path().join("environ")).is_ok_and(of_run))
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
