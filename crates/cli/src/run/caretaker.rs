//! Which processes belong to a run, and which remain when its program has ended.
//!
//! The pages of an ended process are returned at once, not after the grace time. When the program ends but
//! processes that it started live on, as daemons do, a *caretaker* stays behind for them. It is a copy of
//! this process without a terminal, and keeps the lease (and the private server) until the last of them has
//! ended.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::{Duration, Instant};

use rampool_client::pool::{Pool, PoolEvent};
use rampool_kernel::words::remark;
use rampool_run::fork_fallback::ForkFallback;
use rampool_run::process_registry::ProcessRegistry;

use super::hosts::OwnServers;
use super::redundancy::Redundancy;
use crate::rundir::{self, RunDir};

/// How long processes that the program leaves behind may take to end or to register.
const STRAGGLERS: Duration = Duration::from_millis(150);
const UNSIGNED: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How soon the memory of an ended process is returned while other processes of the run live on.
pub const CALL_EVERY: Duration = Duration::from_millis(500);

/// Serves the pool's connections, and says what became of servers.
pub fn serve_pool(pool: &mut Pool) {
    while let Some(event) = pool.poll() {
        tell(&event, pool.copies());
    }
}

/// A server that is drained by command has no time to be done by.
const A_YEAR: Duration = Duration::from_secs(365 * 86_400);

/// Says which servers are stopping, and which were lost without a loss of pages.
pub fn tell(event: &PoolEvent, copies: u8) {
    match event {
        PoolEvent::Draining { name, .. } if copies > 1 => {
            remark(&format!("rampool: server {name} is stopping; its pages move to the other servers"));
        }
        PoolEvent::Drained { name, .. } => remark(&format!(
            "rampool: server {name} is stopping and was left. It is used again when it is back"
        )),
        PoolEvent::Holds { name, out: true, .. } if copies > 1 => {
            remark(&format!("rampool: other servers take the place of {name}, as far as they have room"));
        }
        PoolEvent::Draining { name, left, .. } if *left > A_YEAR => remark(&format!(
            "rampool: server {name} drains, and waits for the end of this program: each page has one copy"
        )),
        PoolEvent::Draining { name, left, .. } => remark(&format!(
            "rampool: server {name} is stopping; it ends in {left:?}, and its pages are lost then"
        )),
        PoolEvent::Degraded { name, reason, .. } => remark(&format!(
            "rampool: server {name} is lost: {reason}. The program goes on: other servers have all of its \
             pages, which have one copy each until it is back or others take its place"
        )),
        PoolEvent::Absent { name, reason, .. } => remark(&format!(
            "rampool: server {name} does not answer: {reason}. The program goes on without it until it is \
             back: other servers have all of its pages"
        )),
        PoolEvent::Returned { name, .. } => {
            remark(&format!("rampool: server {name} is back, and gets the pages that it has missed"));
        }
        _ => {}
    }
}

/// Removes the members whose processes are gone from the lease. Returns how many processes of the run live.
pub fn dismiss_gone(registry: &ProcessRegistry, pool: &mut Pool) -> usize {
    let processes = registry.look();
    for member in &processes.gone {
        pool.dismiss(member);
    }
    processes.present.len()
}

/// What a run has while its program lives.
pub struct Held {
    pub pool: Pool,
    pub redundancy: Redundancy,
    pub registry: ProcessRegistry,
    pub fork_fallback: ForkFallback,
    pub run_dir: RunDir,
    pub own: OwnServers,
}

/// Called when the program has ended: returns everything, unless processes that it started live on. Then a
/// caretaker does so after them.
pub fn end(held: Held, later: Later) {
    let Held { mut pool, mut redundancy, registry, mut fork_fallback, run_dir, own } = held;
    if somebody_lives_on(&registry, &mut pool, run_dir.path(), later) || is_needed(&mut fork_fallback) {
        // SAFETY: this process has one thread, so the copy has all it needs.
        let caretaker = unsafe { libc::fork() };
        if caretaker > 0 {
            // The caretaker owns both now. The connections are closed here and live on there.
            std::mem::forget((run_dir, own));
            return;
        }
        if caretaker == 0 {
            leave_terminal();
            take_care(&mut pool, &mut redundancy, &registry, &mut fork_fallback);
            pool.close();
            drop((own, run_dir));
            // SAFETY: ends the copy without the exit handlers of the original.
            unsafe { libc::_exit(0) };
        }
        // No copy can be made: the run ends for the remaining processes, too.
    }
    pool.close();
    drop((own, run_dir));
}

fn somebody_lives_on(registry: &ProcessRegistry, pool: &mut Pool, run_dir: &Path, mut later: Later) -> bool {
    let since = Instant::now();
    loop {
        let present = dismiss_gone(registry, pool) > 0;
        let waited = since.elapsed();
        // A child that was forked a moment ago may not have registered yet.
        if present && waited >= STRAGGLERS
            || waited >= UNSIGNED
            || !present && !is_anywhere(run_dir, &mut later)
        {
            return present;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process was started as part of this run, by its initial environment.
fn is_anywhere(run_dir: &Path, later: &mut Later) -> bool {
    let of_run = |process| rundir::is_of_run(process, run_dir);
    if let Some(mut numbers) = later.numbers() {
        return numbers.any(of_run);
    }
    let Ok(entries) = std::fs::read_dir("/proc") else { return false };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).any(of_run)
}

/// Finds processes that started later than a program by their ids, which the kernel assigns in order and
/// wraps around.
pub struct Later {
    program: u32,
    /// The id assigned last, as of `looked`. `None` if the ids may have wrapped around.
    latest: Option<u32>,
    looked: Instant,
}

impl Later {
    /// For a program that has just started.
    pub fn than(program: u32) -> Self {
        Self { program, latest: Some(program), looked: Instant::now() }
    }

    pub fn program(&self) -> u32 {
        self.program
    }

    /// Call this several times a second while the program runs.
    pub fn look(&mut self) {
        self.see(latest_process(), self.looked.elapsed());
        self.looked = Instant::now();
    }

    /// `latest`: the id assigned last. `since`: time since the previous call.
    fn see(&mut self, latest: Option<u32>, since: Duration) {
        const MAY_COME_AROUND: Duration = Duration::from_millis(500);
        let before = self.latest.take().filter(|_| since < MAY_COME_AROUND);
        self.latest = before.and_then(|before| latest.filter(|latest| *latest >= before));
    }

    /// The range of ids of later processes. `None` if unknown, or so large that it is better to look at all
    /// processes.
    fn numbers(&mut self) -> Option<RangeInclusive<u32>> {
        const FEW: u32 = 256;
        self.look();
        self.latest.filter(|latest| latest - self.program <= FEW).map(|latest| self.program + 1..=latest)
    }
}

/// The id that was assigned last to a process or thread.
fn latest_process() -> Option<u32> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().nth(4)?.parse().ok()
}

fn leave_terminal() {
    // SAFETY: no preconditions. A reader that waits for the end of our standard output must not wait for the
    // caretaker.
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

/// Output has no reader from here on.
fn is_needed(fork_fallback: &mut ForkFallback) -> bool {
    fork_fallback.look(&mut |_| {});
    fork_fallback.is_needed()
}

fn take_care(
    pool: &mut Pool,
    redundancy: &mut Redundancy,
    registry: &ProcessRegistry,
    fork_fallback: &mut ForkFallback,
) {
    while dismiss_gone(registry, pool) > 0 || is_needed(fork_fallback) {
        let until = Instant::now() + LOOK_EVERY;
        // Messages would have no reader here. A socket that cannot be watched belongs to a lost server.
        while pool.next_event(until).is_ok_and(|event| event.is_some()) {}
        redundancy.look(pool);
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use rampool_run::settings::RUN_DIR_VARIABLE;

    use super::*;

    #[test]
    fn numbers_that_may_have_come_around_say_nothing() {
        let (soon, late) = (Duration::from_millis(100), Duration::from_secs(10));
        let seen = |looks: &[(Option<u32>, Duration)]| {
            let mut later = Later::than(100);
            looks.iter().for_each(|(latest, since)| later.see(*latest, *since));
            later.latest
        };
        assert_eq!(seen(&[(Some(100), soon)]), Some(100), "nothing was started since");
        assert_eq!(
            seen(&[(Some(103), soon), (Some(110), soon), (Some(110), soon)]),
            Some(110),
            "as long as it is called"
        );
        assert_eq!(seen(&[(Some(103), soon), (Some(110), late)]), None, "the last look was too long ago");
        assert_eq!(seen(&[(Some(99), soon)]), None, "they have come around");
        assert_eq!(seen(&[(Some(500), soon), (Some(99), soon), (Some(120), soon)]), None, "they had once");
        assert_eq!(seen(&[(None, soon), (Some(120), soon)]), None, "it cannot be seen");
    }

    #[test]
    fn a_process_of_the_run_is_found_by_its_number_and_by_looking_at_all() {
        let run_dir = tempfile::tempdir().unwrap();
        let mut before = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let mut of_run = std::process::Command::new("sleep")
            .arg("1000")
            .env(RUN_DIR_VARIABLE, run_dir.path())
            .spawn()
            .unwrap();
        let latest = latest_process().unwrap();
        let find = |by_number: bool| {
            let mut later = Later::than(before.id());
            if !by_number {
                later.latest = None;
            }
            is_anywhere(run_dir.path(), &mut later)
        };
        // Its environment appears a moment after `spawn` has returned.
        let deadline = Instant::now() + Duration::from_secs(30);
        let found = [true, false].map(|by_number| {
            while !find(by_number) && Instant::now() < deadline {
                std::thread::yield_now();
            }
            find(by_number)
        });
        of_run.kill().unwrap();
        of_run.wait().unwrap();
        let left = [true, false].map(find);
        before.kill().unwrap();
        before.wait().unwrap();
        assert_eq!((found, left), ([true, true], [false, false]));
        assert!(latest >= of_run.id() || latest < before.id(), "{latest} was given after {}", of_run.id());
    }
}
