//! Keeps two copies of a run's pages: knocks at servers that are lost, leases their part anew when they are
//! back, and tells the processes of the run.

use std::time::{Duration, Instant};

use rampool_client::pool::{Pool, ServerState, ServerStats};
use rampool_client::stats::StatsSnapshot;
use rampool_kernel::words::remark;
use rampool_run::settings::Settings;

use crate::{copies, rundir};

/// How often a lost server is tried again.
pub const KNOCK_EVERY: Duration = Duration::from_secs(1);
/// How often a run says how far it has got.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// Tries servers again that are lost.
pub struct Knocks(Instant);

impl Knocks {
    pub fn new() -> Self {
        Self(Instant::now())
    }

    /// Call this about as often as [`KNOCK_EVERY`], or more often.
    pub fn look(&mut self, pool: &mut Pool) {
        if self.0.elapsed() >= KNOCK_EVERY {
            self.0 = Instant::now();
            for server in pool.lost_servers().collect::<Vec<_>>() {
                pool.lease_anew(server);
            }
        }
    }
}

pub struct Redundancy {
    settings: Settings,
    knocks: Knocks,
    silent: Vec<bool>,
    /// Servers of which was said that they have no room.
    full: Vec<String>,
    misses: bool,
    said: Instant,
}

impl Redundancy {
    pub fn new(settings: Settings) -> Self {
        let silent = vec![false; settings.ticket.servers().count()];
        Self {
            settings,
            knocks: Knocks::new(),
            silent,
            full: Vec::new(),
            misses: false,
            said: Instant::now(),
        }
    }

    /// Call this several times a second.
    pub fn look(&mut self, pool: &mut Pool) {
        if pool.copies() < 2 {
            return;
        }
        let ticket = pool.lease_ticket();
        if ticket != self.settings.ticket {
            self.settings.ticket = ticket;
            if let Err(error) = self.settings.write() {
                remark(&format!(
                    "rampool: the run's processes do not hear of a server that is back: {error}"
                ));
            }
        }
        let mut processes = rundir::read_stats(&self.settings.run_dir);
        processes.retain(|process| rundir::lives(process.pid));
        self.tell_silent(pool, &processes);
        self.tell_whole(pool, &processes);
        self.tell_full(pool);
        self.knocks.look(pool);
    }

    /// Processes that begin now do not wait for servers that do not answer others.
    fn tell_silent(&mut self, pool: &Pool, processes: &[StatsSnapshot]) {
        let mask = processes.iter().fold(0, |mask, process| mask | process.lost_mask);
        let is_out = |(index, server): (u32, ServerStats)| {
            let is_lost = matches!(server.state, ServerState::Lost | ServerState::Absent);
            is_lost || 1u64.checked_shl(index).unwrap_or(0) & mask != 0
        };
        let silent: Vec<bool> = (0..).zip(pool.stats().servers).map(is_out).collect();
        if silent != self.silent && Settings::write_silent(&self.settings.run_dir, &silent).is_ok() {
            self.silent = silent;
        }
    }

    /// Says once of a server that is back that it has no room for its share.
    fn tell_full(&mut self, pool: &Pool) {
        let full = pool.servers_without_room();
        for (name, wanted, free) in full.filter(|(name, ..)| !self.full.iter().any(|full| full == name)) {
            remark(&format!(
                "rampool: server {name} is back and has no room for its share of this run: {wanted} are needed, {free} are \
                 free there. It is asked every second; free memory there, or restart it with more --memory"
            ));
        }
        self.full = pool.servers_without_room().map(|(name, ..)| name.to_owned()).collect();
    }

    /// Says once when every page has all of its copies again, and now and then how far that is.
    fn tell_whole(&mut self, pool: &Pool, processes: &[StatsSnapshot]) {
        let has_missed = |process: &StatsSnapshot| process.missed_pages > 0 || process.lost_servers > 0;
        let is_well = |state| matches!(state, ServerState::Well | ServerState::CatchingUp);
        let misses =
            processes.iter().any(has_missed) || !pool.stats().servers.iter().all(|of| is_well(of.state));
        if std::mem::replace(&mut self.misses, misses) && !misses {
            remark(&format!("rampool: every page has {} copies again", pool.copies()));
        }
        if !misses {
            self.said = Instant::now();
        } else if self.said.elapsed() >= SAY_EVERY {
            self.said = Instant::now();
            let lacking = copies::lacking(pool.copies(), pool.servers().map(str::to_owned), processes);
            lacking.into_iter().for_each(|lacking| remark(&format!("rampool: {}", lacking.said)));
        }
    }
}
