//! One reading of everything: the counter files of this user's runs, and the answers of servers.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use rampool_client::pool::ServerSpec;
use rampool_client::stats::StatsSnapshot;
use rampool_net::key::Key;
use rampool_net::transport::{Endpoint, LocalPolicy};
use rampool_run::settings::Settings;
use rampool_server::{ServerStatus, query_status};

use crate::access;
use crate::copies::{self, Lacking};
use crate::rundir;

/// A server that does not answer for this long is shown as silent.
const ANSWER: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub struct Look {
    pub processes: Vec<Process>,
    pub servers: Vec<Server>,
    /// Runs whose pages do not have all of their copies.
    pub lacking: Vec<String>,
}

/// A living process of a run.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// Process id of its `rampool run`.
    pub run: u32,
    /// Name of the process, as in `ps`.
    pub name: String,
    /// The most that each process may keep local, as the run was told.
    pub local_bytes: u64,
    /// When the counters were read.
    pub at: Duration,
    pub counters: StatsSnapshot,
    /// The servers of its lease in the lease's order, with their addresses on this machine and the lease's
    /// number there.
    pub servers: Vec<(String, u64)>,
}

/// A server, and its answer or why there is none.
#[derive(Clone, Debug)]
pub struct Server {
    pub name: String,
    /// When it answered.
    pub at: Duration,
    pub answer: Result<ServerStatus, String>,
}

/// Where to look.
pub struct Watch {
    started: Instant,
    named: Vec<(ServerSpec, LocalPolicy)>,
}

/// How to connect to a server.
struct Asked {
    /// The text to show.
    name: String,
    spec: ServerSpec,
    policy: LocalPolicy,
}

impl Watch {
    pub fn new(named: Vec<(ServerSpec, LocalPolicy)>) -> Self {
        Self { started: Instant::now(), named }
    }

    /// Reads everything once. Blocks for as long as the slowest server takes to answer, two seconds at most.
    pub fn look(&mut self) -> Look {
        let mut servers: BTreeMap<String, Asked> = BTreeMap::new();
        for (spec, policy) in &self.named {
            let name = spec.endpoint.to_string();
            let asked = Asked { name: name.clone(), spec: spec.clone(), policy: policy.clone() };
            servers.insert(name, asked);
        }
        let (processes, lacking) = self.runs(|name, spec, settings| {
            let key = || settings.key_file.as_deref().and_then(|path| Key::load(path).ok());
            servers.entry(spec.endpoint.to_string()).or_insert_with(|| Asked {
                name: name.to_owned(),
                spec: spec.clone(),
                policy: access::policy(key(), settings.encryption),
            });
        });
        Look { processes, servers: self.ask(&servers), lacking }
    }

    /// What a server knows without asking another: its own status, and the runs of its user on its machine.
    /// Its endpoints are these; the first one is its name.
    pub fn look_from(&self, endpoints: &[Endpoint], status: &ServerStatus) -> Look {
        let name = endpoints.first().map(Endpoint::to_string).unwrap_or_default();
        let (mut processes, lacking) = self.runs(|_, _, _| {});
        for (server, _) in processes.iter_mut().flat_map(|process| &mut process.servers) {
            if server.parse().is_ok_and(|known| endpoints.iter().any(|own| is_same(own, &known))) {
                server.clone_from(&name);
            }
        }
        let own = Server { name, at: self.started.elapsed(), answer: Ok(status.clone()) };
        Look { processes, servers: vec![own], lacking }
    }

    /// The living processes of the runs of this user, and what is said of runs that lack copies. `uses` hears
    /// of each server of each run, with the text to show for it.
    fn runs(&self, mut uses: impl FnMut(&str, &ServerSpec, &Settings)) -> (Vec<Process>, Vec<String>) {
        let (mut processes, mut lacking) = (Vec::new(), Vec::new());
        for (run, path) in rundir::all_runs().unwrap_or_default() {
            let Some(settings) = running(run, &path) else { continue };
            let mut used = Vec::new();
            for (spec, lease) in settings.ticket.servers().zip(settings.ticket.leases()) {
                let name = match &spec.endpoint {
                    Endpoint::Unix(socket) if socket.starts_with(&path) => format!("private, of run {run}"),
                    other => other.to_string(),
                };
                uses(&name, spec, &settings);
                used.push((name, lease.0));
            }
            lacking.extend(lacking_of(run, &path, &settings).map(|lacking| lacking.said));
            for counters in rundir::read_stats(&path) {
                if let Some(name) = process_name(counters.pid).filter(|_| counters.state == 1) {
                    let (at, servers) = (self.started.elapsed(), used.clone());
                    processes.push(Process {
                        run,
                        name,
                        local_bytes: settings.local_bytes,
                        at,
                        counters,
                        servers,
                    });
                }
            }
        }
        (processes, lacking)
    }

    fn ask(&self, servers: &BTreeMap<String, Asked>) -> Vec<Server> {
        let deadline = Instant::now() + ANSWER;
        std::thread::scope(|scope| {
            let asked: Vec<_> = servers
                .values()
                .map(|asked| (&asked.name, scope.spawn(move || query(asked, deadline))))
                .collect();
            asked
                .into_iter()
                .map(|(name, answer)| Server {
                    name: name.clone(),
                    answer: answer.join().unwrap_or_else(|_| Err("asking it failed".to_owned())),
                    at: self.started.elapsed(),
                })
                .collect()
        })
    }
}

/// Whether a server that listens on `own`, perhaps on all addresses, is the one that a run knows by `known`.
fn is_same(own: &Endpoint, known: &Endpoint) -> bool {
    let address = |endpoint: &Endpoint| endpoint.to_string().parse::<SocketAddr>();
    own == known
        || address(own).is_ok_and(|own| {
            // Only an address of this machine can be bound.
            own.ip().is_unspecified()
                && address(known)
                    .is_ok_and(|known| own.port() == known.port() && UdpSocket::bind((known.ip(), 0)).is_ok())
        })
}

fn query(asked: &Asked, deadline: Instant) -> Result<ServerStatus, String> {
    query_status(&asked.spec.endpoint, asked.policy.clone(), deadline).map_err(|error| error.to_string())
}

/// The runs of this user whose pages do not have all of their copies.
pub fn lacking() -> Vec<Lacking> {
    let runs = rundir::all_runs().unwrap_or_default();
    runs.iter().filter_map(|(run, path)| lacking_of(*run, path, &running(*run, path)?)).collect()
}

fn lacking_of(run: u32, path: &Path, settings: &Settings) -> Option<Lacking> {
    let mut processes = rundir::read_stats(path);
    processes.retain(|process| process.state == 1 && process_name(process.pid).is_some());
    let servers = settings.ticket.servers().map(|server| server.endpoint.to_string());
    let Lacking { pages, said } = copies::lacking(settings.ticket.copies(), servers, &processes)?;
    Some(Lacking { pages, said: format!("Run {run} has {said}.") })
}

/// The settings of a run that goes on.
fn running(run: u32, path: &Path) -> Option<Settings> {
    rundir::is_under_way(run, path).then(|| Settings::read(path).ok())?
}

fn process_name(pid: u64) -> Option<String> {
    Some(std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_owned())
}
