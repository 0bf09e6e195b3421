//! Keeps two copies of a run's pages: knocks at servers that are lost, leases their part anew when they are
//! back, and tells the processes of the run.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rampool_client::pool::{LeaseTicket, Pool, ServerSpec, ServerState, ServerStats};
use rampool_client::stats::StatsSnapshot;
use rampool_kernel::words::remark;
use rampool_paging::placement::ServerIndex;
use rampool_run::settings::Settings;

use crate::{copies, rundir};

/// How often a run says how far it has got.
const SAY_EVERY: Duration = Duration::from_secs(30);
/// Until then processes that have ended were dismissed.
const DISMISSED: Duration = Duration::from_millis(1200);
/// In a run's directory: a server that is to be used in addition.
const GROW: &str = "grow";

pub struct Redundancy {
    settings: Settings,
    silent: Vec<bool>,
    /// Servers of which was said that they have no room.
    full: Vec<String>,
    /// Servers that hold no pages for now.
    out: Vec<bool>,
    /// Servers that drain or were left, with the lease that the run had there.
    drained: Vec<(ServerIndex, LeaseTicket)>,
    /// When a process of the run was last seen at a server that drains.
    stayed: Instant,
    misses: bool,
    said: Instant,
}

/// Asks a run for one more server, which its processes may use from then on.
pub fn ask_to_grow(run: &Path, server: &ServerSpec) -> std::io::Result<()> {
    let (asked, new) = (run.join(GROW), run.join("grow.new"));
    std::fs::write(&new, server.to_string())?;
    std::fs::rename(new, asked)
}

/// Whether a run has heard of that.
pub fn has_heard(run: &Path) -> bool {
    !run.join(GROW).exists()
}

impl Redundancy {
    pub fn new(settings: Settings, pool: &mut Pool) -> Self {
        pool.stay(true);
        let silent = vec![false; settings.ticket.servers().count()];
        Self {
            settings,
            silent,
            full: Vec::new(),
            out: Vec::new(),
            drained: Vec::new(),
            stayed: Instant::now(),
            misses: false,
            said: Instant::now(),
        }
    }

    /// Call this several times a second.
    pub fn look(&mut self, pool: &mut Pool) {
        if pool.copies() < 2 {
            return;
        }
        let asked = self.grow(pool);
        let ticket = self.ticket(pool);
        if ticket != self.settings.ticket {
            self.settings.ticket = ticket;
            if let Err(error) = self.settings.write() {
                remark(&format!(
                    "rampool: the run's processes do not hear of a server that is back: {error}"
                ));
            }
        }
        if let Some(asked) = asked {
            let _ = std::fs::remove_file(asked);
        }
        let mut processes = rundir::read_stats(&self.settings.run_dir);
        processes.retain(|process| rundir::lives(process.pid));
        self.tell_silent(pool, &processes);
        self.tell_whole(pool, &processes);
        self.tell_full(pool);
        self.make_room(pool);
        // It dismisses processes that end there. One that has asked no server for anything is at none.
        let is_left = |of: ServerIndex| {
            let bit = 1u64.checked_shl(of.0.into()).unwrap_or(0);
            let stays = |process: &&StatsSnapshot| process.state == 1 && process.sent_bytes > 0;
            processes.iter().filter(stays).all(|process| process.lost_mask & bit != 0)
        };
        let drains = pool.draining_servers().next().is_some();
        if !drains || !pool.draining_servers().all(is_left) {
            self.stayed = Instant::now();
        }
        pool.stay(self.stayed.elapsed() < DISMISSED);
        pool.knock();
    }

    /// For processes that begin now. They do not join a server that drains, nor one that was left before it
    /// has a new lease: the old one ends there with its last process.
    fn ticket(&mut self, pool: &Pool) -> LeaseTicket {
        let ticket = pool.lease_ticket();
        self.drained.retain(|(of, lease)| ticket.is_same_at(lease, *of));
        for of in pool.draining_servers() {
            if self.drained.iter().all(|(known, _)| *known != of) {
                self.drained.push((of, ticket.clone()));
            }
        }
        self.drained.iter().fold(ticket, |ticket, (of, _)| ticket.leaving(*of))
    }

    /// Takes in a server that somebody has named meanwhile.
    fn grow(&mut self, pool: &mut Pool) -> Option<PathBuf> {
        let asked = self.settings.run_dir.join(GROW);
        let text = std::fs::read_to_string(&asked).ok()?;
        match text.parse::<ServerSpec>() {
            Ok(server) if pool.grow(&server) => {
                remark(&format!("rampool: server {} is to be used in addition", server.endpoint));
            }
            Ok(server) => {
                remark(&format!("rampool: server {} is one of this run's already", server.endpoint))
            }
            Err(error) => remark(&format!("rampool: no server is added: {error}")),
        }
        Some(asked)
    }

    /// Leases more where servers take the place of others.
    fn make_room(&mut self, pool: &mut Pool) {
        let out = pool.servers_out();
        if out == self.out {
            return;
        }
        self.out = out;
        for (name, wanted, free) in pool.fit_lease().unwrap_or_default() {
            remark(&format!(
                "rampool: server {name} is to hold pages of others and lacks room: {wanted} are needed, \
                 it lends {free}. What does not fit has one copy"
            ));
        }
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
                "rampool: server {name} is back and has no room for its share of this run: {wanted} are \
                 needed, {free} are \
                 free there. It is asked every second; free memory there, or restart it with more --memory"
            ));
        }
        self.full = pool.servers_without_room().map(|(name, ..)| name.to_owned()).collect();
    }

    /// Says once when every page has all of its copies again, and now and then how far that is.
    fn tell_whole(&mut self, pool: &Pool, processes: &[StatsSnapshot]) {
        let misses = processes.iter().any(|process| process.lacking_pages > 0) || !pool.is_whole();
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
