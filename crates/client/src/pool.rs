//! The client's side of a pool: pages of regions fetched from, and stored on, many memory servers.
//!
//! A [`Pool`] belongs to one thread, usually a pager's. It never blocks in its data operations, starts no
//! thread and touches only its own memory and the buffers it is handed: the thread submits ([`Pool::fetch`],
//! [`Pool::store`], [`Pool::discard`]), sleeps on the pool's sockets and whatever else it watches
//! ([`Pool::poll_fds`], [`Pool::next_deadline`]), and drains [`Pool::poll`]. Operations on regions and leases
//! are rare and block, within a deadline.
//!
//! Which server holds a page is computed ([`rampool_paging::placement`]); an operation that crosses servers
//! is cut up and completes as one. Every page's checksum is made when it is stored, kept by the server with
//! the page, and checked when it is back.
//!
//! Every operation ends in exactly one event. A broken connection is made again within the grace time that
//! the server has for its clients, and what had no answer is asked again. A server that stops answering
//! within the deadline, breaks the protocol, or cannot be reached in that time is *lost*: one
//! [`PoolEvent::Lost`], a [`PoolEvent::Failed`] for each operation that needed it, and the same for each
//! later one. The pool never returns zeroes for a page it could not get, and never waits for ever.
//!
//! With two copies ([`Copies`]) pages are stored on two servers and read from one. While one of them is
//! silent or its connection broken, the other one is read. A server that is lost costs a
//! [`PoolEvent::Degraded`], as long as every page has another holder. It stays lost to this pool, and to
//! those that take a region over from it, until it is joined anew ([`Pool::join_anew`]), which it can be with
//! an empty store: then it gets its pages from their other holders.

mod body;
mod config;
mod direct;
mod frames;
mod in_place;
mod link;
mod published;
mod queue;
mod reconnect;
mod server;
mod shell;
mod stats;
mod ticket;

pub use config::{Copies, LeaseRequest, PoolConfig, ServerSpec, ServerSpecError};
pub use direct::RegionSelector;
pub(crate) use direct::{GroupPart, Job, MOST_COPIED_BYTES, MOST_GROUPED, MOST_SCANNED, ScanPart};
pub(crate) use published::Publishing;
pub(crate) use queue::QueueReply;
pub use stats::{Histogram, PoolStats, ServerState, ServerStats};
pub use ticket::{LeaseTicket, Membership, RegionTicket, TicketError};

use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rampool_paging::placement::{
    Holders, Placement, ServerIndex, Shortage, Want, apportion, share_copies, share_with_backup,
};
use rampool_wire::frame::{
    AttachLease, Granted, LeaseId, LeaseToken, MAX_NAME_BYTES, MAX_PAGE_INDEX, MemberId, Opcode, OpenLease,
    RegionId, Status, parse_message,
};
use rampool_wire::session::features;
use rampool_wire::units::{ByteLen, Extent, OS_PAGE_BYTES, PageIndex, push_page};

use crate::error::{ConnectError, ConnectReason, LostReason, Operation, PoolError};
use crate::stats::PagerStats;
use body::{Body, Reply, lost};
use rampool_net::transport::{
    Endpoint, HandshakeError, Link, LocalPolicy, Means, Peer, PeerAddress, SameHost, connect,
};
use rampool_session::{Ask, Class, Fill, Grant, HandedOver, History, Input, PageSet, Pages, Stamp};
use reconnect::{Joining, Place};
use server::Server;
use shell::{Shell, fresh};
use ticket::LeasePart;

/// Pages one request for pages asks for at most.
const GET_PAGES: u32 = 64;
/// Pages one store carries at most: a demand request may have to wait until one has left.
const PUT_PAGES: u32 = 32;
/// How long one attempt to reach a server may take where another one has the same pages.
const ATTEMPT: Duration = rampool_session::ATTEMPT;
/// The pause between two attempts to join a lease.
const PAUSE: Duration = rampool_session::PAUSE;
/// How often a lost server is tried again.
pub const KNOCK_EVERY: Duration = Duration::from_secs(1);
/// How often the copy of a region is begun anew, where servers become absent and return while it is made.
const CLONE_TRIES: u32 = 10;
/// How long [`Pool::close`] waits for servers to say goodbye.
const LEAVE_DEADLINE: Duration = Duration::from_secs(1);

/// A region of a pool: a sparse array of pages, zero where never stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PoolRegion(u32);

/// What a region is called at each server.
struct Names {
    /// 0 at a server that was lost before.
    ids: Vec<RegionId>,
    /// All of it lies at this one.
    only: Option<ServerIndex>,
    /// What each server had missed when another process opened the region for the direct view.
    missed: Vec<PageSet>,
}

/// Something that happened in a pool.
#[derive(Clone, Debug)]
pub enum PoolEvent {
    /// All pages of the fetch with this token are in their place, and are what was stored.
    Fetched { token: u64 },
    /// All pages of the store with this token are at their servers.
    Stored { token: u64 },
    /// A server had no room: not all pages of this store are at their servers. The rest may be; to store
    /// again is harmless. `free`: bytes of the lease that are left there.
    Full { token: u64, server: ServerIndex, name: String, free: ByteLen },
    /// Twice in a row, the bytes a server sent for this page were not those that were stored.
    Corrupt { token: u64, server: ServerIndex, name: String, page: PageIndex },
    /// The operation with this token did not succeed; its memory is not touched any more. Its
    /// [`PoolEvent::Lost`], if that is the reason, came before.
    Failed { token: u64, error: PoolError },
    /// A server is gone, with every page it held. Comes once for each server.
    Lost { server: ServerIndex, name: String, operation: Operation, reason: LostReason },
    /// A server is gone, and every page it held is on another one, but for those that this one had missed
    /// ([`Pool::gone`]). Comes once for each server.
    Degraded { server: ServerIndex, name: String, operation: Operation, reason: LostReason },
    /// A server does not answer, and its pages have another one. It is done without until it is back.
    Absent { server: ServerIndex, name: String, operation: Operation, reason: LostReason },
    /// It is back, and gets what it has missed: so many pages.
    Returned { server: ServerIndex, name: String, missed_pages: u64 },
    /// It has all of its pages again.
    CaughtUp { server: ServerIndex, name: String },
    /// Other servers hold the pages of this one from now on, and get them; or it holds its own again. Who
    /// leases looks for room ([`Pool::fit_lease`]).
    Holds { server: ServerIndex, name: String, out: bool },
    /// A server that drains has nothing of this pool any more.
    Drained { server: ServerIndex, name: String },
    /// A server was told to stop and does so after `left`. With two copies, its pages move to others.
    Draining { server: ServerIndex, name: String, left: Duration },
}

/// A client's connections to all servers of a pool, and its lease there.
pub struct Pool {
    shell: Shell,
    /// Where the regions of the direct view lie, which stay where they are.
    placement: Placement,
    /// `None` once it was freed.
    regions: Vec<Option<Names>>,
    ticket: LeaseTicket,
    leased: Vec<u64>,
    /// How servers are joined anew.
    reach: Reach,
    /// Shown to people by the servers.
    name: String,
    /// When lost servers were tried last.
    knocked: Instant,
    /// Which servers held no pages when room was made last for those that take their place.
    made_room_for: Vec<bool>,
}

// SAFETY: what keeps `Pool` from being `Send` by itself are the addresses in `shell`, which are as valid on
// one thread as on another (the contracts of `fetch` and `store` name no thread), and an `Rc` that each
// server shares only with the link inside it: all owners move together.
unsafe impl Send for Pool {}

/// How a pool reaches its servers.
#[derive(Clone)]
struct Reach {
    /// Those on this machine.
    same_host: SameHost,
    policy: LocalPolicy,
    /// For regions that have one copy, although those of others in this lease may have two.
    direct: bool,
}

impl Reach {
    fn of(config: &PoolConfig) -> Result<Self, ConnectError> {
        let same_host =
            config.same_host.map_or_else(SameHost::from_environment, Ok).map_err(ConnectError::SameHost)?;
        let compression = if config.compression { features::LZ4 } else { 0 };
        let rings = if same_host == SameHost::Socket {
            0
        } else {
            let long = if same_host == SameHost::LongRings { features::LONG_RINGS } else { 0 };
            features::RINGS | features::PUBLISH | features::PLACES | long
        };
        let features = compression | rings | features::PIECES;
        let policy =
            LocalPolicy { key: config.key.clone(), encryption: config.encryption, features, ucx: None };
        Ok(Self { same_host, policy, direct: false })
    }

    /// How a server with this address is to be talked to.
    fn policy(&self, endpoint: &Endpoint) -> Result<LocalPolicy, String> {
        let ucx = match endpoint {
            Endpoint::Ucx { .. } => Some(rampool_ucx::Context::process().map_err(|error| error.to_string())?),
            Endpoint::Tcp { .. } | Endpoint::Unix(_) => None,
        };
        Ok(LocalPolicy { ucx, ..self.policy.clone() })
    }
}

impl Pool {
    /// Connects to every server and opens, or joins, the lease. Blocks, for each server at most
    /// `connect_deadline` and a name's resolution.
    ///
    /// Who joins a lease has memory that depends on it: where a connection breaks meanwhile, it is tried
    /// again for as long as a server may leave a request unanswered (`op_deadline`).
    ///
    /// A new lease is shared by the servers as their specifications say; what one without a named amount
    /// cannot give, the others are asked for.
    ///
    /// # Errors
    /// [`ConnectError`], which names the server and what was wrong. Leases already opened return to their
    /// servers.
    pub fn connect(config: &PoolConfig) -> Result<Self, ConnectError> {
        Self::connect_as(config, &Reach::of(config)?)
    }

    /// As [`Pool::connect`], for the direct view: its regions and queues have one copy.
    pub(crate) fn connect_for_direct(config: &PoolConfig) -> Result<Self, ConnectError> {
        Self::connect_as(config, &Reach { direct: true, ..Reach::of(config)? })
    }

    fn connect_as(config: &PoolConfig, reach: &Reach) -> Result<Self, ConnectError> {
        match &config.lease {
            LeaseRequest::Open { servers, bytes, name } => Self::open(config, reach, servers, *bytes, name),
            LeaseRequest::Attach { ticket, name } => {
                let until = Instant::now() + config.op_deadline;
                loop {
                    match Self::attach(config, reach, ticket, name) {
                        Err(error) if error.may_pass() && Instant::now() < until => std::thread::sleep(PAUSE),
                        done => return done,
                    }
                }
            }
        }
    }

    fn open(
        config: &PoolConfig,
        reach: &Reach,
        servers: &[ServerSpec],
        bytes: ByteLen,
        name: &str,
    ) -> Result<Self, ConnectError> {
        if servers.is_empty() {
            return Err(ConnectError::NoServers);
        }
        let bytes = if bytes.0 == 0 { named_bytes(servers, config.copies) } else { bytes };
        let mut pool = Self::unleased(config, reach, name)?;
        // One may be down: the other holders of its pages are there.
        let mut down: Option<ConnectError> = None;
        for server in servers {
            match pool.add_server(config, reach, &server.endpoint) {
                Err(error)
                    if down.is_none() && config.copies != Copies::One && !reach.direct && error.is_down() =>
                {
                    pool.add_down(config, &server.endpoint, &error);
                    down = Some(error);
                }
                added => added?,
            }
        }
        let mut granted: Vec<Option<Granted>> = vec![None; servers.len()];
        pool.ticket.copies = match config.copies {
            Copies::Two | Copies::WithBackup => 2,
            Copies::TwoIfTheyFit if servers.len() > 1 => 2,
            Copies::One | Copies::TwoIfTheyFit => 1,
        };
        pool.ticket.backup = config.copies == Copies::WithBackup;
        let mut shared = pool.lease_shares(config, reach, servers, bytes, name, &mut granted);
        let too_little = matches!(
            shared,
            Err(ConnectError::TooLittle { .. }
                | ConnectError::Server { reason: ConnectReason::Refused { .. }, .. })
        );
        if too_little && down.is_none() && pool.ticket.copies == 2 && config.copies == Copies::TwoIfTheyFit {
            pool.ticket.copies = 1;
            shared = pool.lease_shares(config, reach, servers, bytes, name, &mut granted);
        }
        // With one copy there is none without it, and with two it may be what is missing.
        let needed = down.filter(|_| pool.ticket.copies < 2 || too_little);
        match needed.map_or(shared, Err) {
            Ok(()) => pool.settle(servers, granted),
            Err(error) => {
                // What others have granted would lie idle for the grace time.
                let is_leased =
                    |granted: &Option<Granted>| granted.as_ref().is_some_and(|of| of.lease.0 != 0);
                for server in (0..granted.len()).filter(|server| is_leased(&granted[*server])) {
                    let _ = pool.ask_one(config, server, Opcode::Goodbye, 0, &[]);
                }
                Err(error)
            }
        }
    }

    /// A server that is to have its share of a new lease when it is there.
    fn add_down(&mut self, config: &PoolConfig, endpoint: &Endpoint, error: &ConnectError) {
        let now = self.shell.time(Instant::now());
        let index = self.shell.client.add_absent(config.op_deadline, now);
        let mut server = Server::absent(index, endpoint.to_string());
        // Whoever opens the pool says so.
        server.is_renewed = true;
        server.why = Some(match error {
            ConnectError::Server { reason, .. } => LostReason::Io(reason.to_string()),
            other => LostReason::Io(other.to_string()),
        });
        self.shell.servers.push(server);
    }

    /// Leases from each server its share, of `bytes` in all.
    fn lease_shares(
        &mut self,
        config: &PoolConfig,
        reach: &Reach,
        servers: &[ServerSpec],
        bytes: ByteLen,
        name: &str,
        granted: &mut [Option<Granted>],
    ) -> Result<(), ConnectError> {
        let mut wants: Vec<Want> =
            servers.iter().map(|s| Want { named: s.memory.map(ByteLen::pages), free: None }).collect();
        // Each round but the last learns of one server's limit.
        'shares: loop {
            let shares = if self.ticket.backup {
                share_with_backup(bytes.pages(), &wants)
            } else {
                share_copies(bytes.pages(), self.ticket.copies, &wants)
            };
            let shares = shares.map_err(|shortage| too_little(servers, &wants, bytes, shortage))?;
            for (i, share) in shares.iter().enumerate() {
                let share = ByteLen::from_pages(*share).0;
                let refused = match &mut granted[i] {
                    Some(grant) if grant.lease_bytes == share => None,
                    granted if self.shell.servers[i].link.is_none() => {
                        *granted = Some(no_lease(share));
                        None
                    }
                    Some(grant) => {
                        let reply = self.ask_one(config, i, Opcode::ResizeLease, share, &[])?;
                        let refused = refusal(&self.shell.servers[i].name, &reply, Operation::ResizeLease)?;
                        if refused.is_none() {
                            grant.lease_bytes = share;
                        }
                        // What is free there comes on top of what this pool has already.
                        refused.map(|free| free.saturating_add(grant.lease_bytes))
                    }
                    None if share == 0 => None,
                    None => {
                        let table = OpenLease {
                            bytes: share,
                            pid: std::process::id(),
                            name: cut(name),
                            host: host_name(),
                        }
                        .encode();
                        let reply = self.ask_one(config, i, Opcode::OpenLease, 0, &table)?;
                        let refused = refusal(&self.shell.servers[i].name, &reply, Operation::OpenLease)?;
                        if refused.is_none() {
                            granted[i] = Some(self.grant(
                                reach,
                                i,
                                &servers[i].endpoint,
                                name,
                                &reply,
                                Operation::OpenLease,
                            )?);
                        }
                        refused
                    }
                };
                if let Some(free) = refused {
                    if wants[i].named.is_some() || wants[i].free.is_some_and(|known| free >= known) {
                        let server = self.shell.servers[i].name.clone();
                        return Err(ConnectError::Server {
                            server,
                            reason: ConnectReason::Refused { wanted: ByteLen(share), free: ByteLen(free) },
                        });
                    }
                    wants[i].free = Some(free / OS_PAGE_BYTES as u64);
                    continue 'shares;
                }
            }
            return Ok(());
        }
    }

    fn attach(
        config: &PoolConfig,
        reach: &Reach,
        ticket: &LeaseTicket,
        name: &str,
    ) -> Result<Self, ConnectError> {
        let mut pool = Self::unleased(config, reach, name)?;
        pool.ticket = ticket.clone();
        let spared = ticket.copies > 1 && !reach.direct;
        let mut troubles: Vec<(usize, ConnectError)> = Vec::new();
        for (i, part) in ticket.parts.iter().enumerate() {
            let inherited = spared && config.begins_without(i);
            if i >= ticket.first() {
                break;
            }
            let added = if inherited || !part.is_leased() {
                Err(pool.lost_to_parent(part))
            } else {
                pool.add_server_in_time(config, reach, part, spared)
            };
            if let Err(error) = added {
                let place = later_place(reach, part, name).filter(|_| spared);
                let Some(place) = place else { return Err(error) };
                troubles.push((i, error));
                let now = pool.shell.time(Instant::now());
                let server = pool.shell.client.add_absent(config.op_deadline, now);
                let mut absent = Server::absent(server, part.server.endpoint.to_string());
                (absent.place, absent.is_away) = (Some(Box::new(place)), true);
                pool.shell.servers.push(absent);
            }
            pool.leased.push(0);
        }
        pool.use_placement(ticket.placement()?);
        for part in &ticket.parts[ticket.first()..] {
            pool.add_later(part, config.op_deadline);
        }
        for (i, _) in ticket.parts.iter().enumerate().filter(|(_, part)| !part.is_leased()) {
            pool.has_no_lease(i);
        }
        let out: Vec<bool> = config.without.iter().map(|of| of.out).collect();
        pool.shell.client.begin_without(&out);
        for (i, part) in ticket.parts.iter().enumerate().take(ticket.first()) {
            if troubles.iter().any(|(missing, _)| *missing == i) {
                continue;
            }
            match pool.join(config, reach, i, part, name) {
                Ok(granted) => pool.leased[i] = granted.lease_bytes,
                Err(error) if spared => {
                    let lost = match &error {
                        ConnectError::Server { reason: ConnectReason::Lost { reason, .. }, .. } => {
                            reason.clone()
                        }
                        other => LostReason::Io(other.to_string()),
                    };
                    pool.do_without(i, lost);
                    troubles.push((i, error));
                }
                Err(error) => return Err(error),
            }
        }
        pool.await_later(ticket, config);
        pool.do_without_some(ticket, troubles)
    }

    /// Waits for the servers that came later, a moment and in vain if need be: a region that is handed over
    /// is taken over where there is a connection. Where there is none, its pages are copied there anew.
    fn await_later(&mut self, ticket: &LeaseTicket, config: &PoolConfig) {
        let until = Instant::now() + rampool_session::MOST_SPARE_SILENCE;
        let awaited = |server: &Server| !server.is_there() && server.lost.is_none();
        let later = ticket.first()..ticket.parts.len();
        let later: Vec<usize> = later.filter(|index| !config.begins_without(*index)).collect();
        loop {
            self.step(Instant::now());
            let waits = later.iter().any(|index| awaited(&self.shell.servers[*index]));
            if !waits || Instant::now() >= until || self.sleep(until).is_err() {
                return;
            }
        }
    }

    /// The pool, if what is left has all pages. What those lease now that cannot be asked, if it grew with
    /// the others.
    fn do_without_some(
        mut self,
        ticket: &LeaseTicket,
        troubles: Vec<(usize, ConnectError)>,
    ) -> Result<Self, ConnectError> {
        let lent = |part: &LeasePart| part.server.memory.unwrap_or_default().0;
        let (now, first) = ticket
            .parts
            .iter()
            .zip(&self.leased)
            .filter(|(_, leased)| **leased > 0)
            .fold((0u128, 0u128), |(now, first), (part, leased)| {
                (now + u128::from(*leased), first + u128::from(lent(part)))
            });
        for (i, error) in troubles {
            let share = u128::from(lent(&ticket.parts[i])) * now / first.max(1);
            self.leased[i] = u64::try_from(share).unwrap_or(u64::MAX);
            if !self.shell.client.has_all_pages() {
                return Err(error);
            }
        }
        Ok(self)
    }

    /// There is no lease at this server yet; whoever owns that of the others opens one.
    fn has_no_lease(&mut self, index: usize) {
        let server = &mut self.shell.servers[index];
        if server.lost.is_none() {
            server.is_renewed = true;
            let server = server.index;
            self.shell.hear(Instant::now(), Input::Lose { server });
        }
    }

    /// As [`Self::add_server`]. Where another server has the same pages, the attempts end soon.
    fn add_server_in_time(
        &mut self,
        config: &PoolConfig,
        reach: &Reach,
        part: &LeasePart,
        spared: bool,
    ) -> Result<(), ConnectError> {
        let deadline = config.connect_deadline;
        let config = PoolConfig {
            connect_deadline: if spared { deadline.min(ATTEMPT) } else { deadline },
            ..config.clone()
        };
        let until = Instant::now() + rampool_session::SPARE_SILENCE;
        loop {
            match self.add_server(&config, reach, &part.server.endpoint) {
                Err(error) if spared && error.may_pass() && Instant::now() < until => {
                    std::thread::sleep(PAUSE)
                }
                done => return done,
            }
        }
    }

    fn lost_to_parent(&self, part: &LeasePart) -> ConnectError {
        let reason = ConnectReason::Lost { operation: Operation::AdoptRegion, reason: LostReason::Inherited };
        ConnectError::Server { server: part.server.endpoint.to_string(), reason }
    }

    /// From now on this server is lost.
    fn do_without(&mut self, index: usize, reason: LostReason) {
        let server = &mut self.shell.servers[index];
        if server.lost.is_none() {
            server.why = Some(reason);
            let server = server.index;
            self.shell.hear(Instant::now(), Input::Lose { server });
        }
    }

    fn use_placement(&mut self, placement: Placement) {
        if self.reach.direct {
            self.shell.client.place_alone(&placement);
        } else {
            self.shell.client.place(&placement);
        }
        self.placement = placement;
    }

    /// A server that comes later than the others. It is used once it can be reached.
    fn add_later(&mut self, part: &LeasePart, op_deadline: Duration) -> ServerIndex {
        let lent = part.server.memory.unwrap_or_default();
        let now = self.shell.time(Instant::now());
        let index = self.shell.client.grow(op_deadline, now, lent.pages());
        let mut server = Server::absent(index, part.server.endpoint.to_string());
        let place = later_place(&self.reach, part, &self.name);
        (server.place, server.is_away, server.is_renewed) = (place.map(Box::new), true, true);
        self.shell.servers.push(server);
        self.leased.truncate(index.as_usize());
        self.leased.push(lent.0);
        index
    }

    /// Becomes a member of a lease on one server.
    fn join(
        &mut self,
        config: &PoolConfig,
        reach: &Reach,
        index: usize,
        part: &LeasePart,
        name: &str,
    ) -> Result<Granted, ConnectError> {
        let reply = self.ask_one(config, index, Opcode::AttachLease, 0, &attach_to(part, name).encode())?;
        let server = self.shell.servers[index].name.clone();
        if let Some(free) = refusal(&server, &reply, Operation::AttachLease)? {
            let wanted = part.server.memory.unwrap_or_default();
            let reason = ConnectReason::Refused { wanted, free: ByteLen(free) };
            return Err(ConnectError::Server { server, reason });
        }
        self.grant(reach, index, &part.server.endpoint, name, &reply, Operation::AttachLease)
    }

    /// A pool without servers, to be filled.
    fn unleased(config: &PoolConfig, reach: &Reach, name: &str) -> Result<Self, ConnectError> {
        Ok(Self {
            shell: Shell::new(Instant::now()),
            placement: Placement::new(&[1], config.stripe_pages, 1)?,
            regions: Vec::new(),
            ticket: LeaseTicket {
                stripe_pages: config.stripe_pages,
                copies: 1,
                backup: false,
                later: 0,
                parts: Vec::new(),
            },
            leased: Vec::new(),
            reach: reach.clone(),
            name: name.to_owned(),
            knocked: Instant::now(),
            made_room_for: Vec::new(),
        })
    }

    fn add_server(
        &mut self,
        config: &PoolConfig,
        reach: &Reach,
        endpoint: &Endpoint,
    ) -> Result<(), ConnectError> {
        let name = endpoint.to_string();
        let refuse = |reason| ConnectError::Server {
            server: endpoint.to_string(),
            reason: ConnectReason::Link(reason),
        };
        let local = reach.policy(endpoint).map_err(refuse)?;
        let fail = |error| {
            let reason = match error {
                HandshakeError::TimedOut => ConnectReason::Deadline {
                    operation: Operation::Connect,
                    deadline: config.connect_deadline,
                },
                broken if broken.may_pass() => ConnectReason::Broken(broken.to_string()),
                HandshakeError::Connect(error) => {
                    ConnectReason::NotThere(HandshakeError::Connect(error).to_string())
                }
                other => ConnectReason::Link(other.to_string()),
            };
            ConnectError::Server { server: name.clone(), reason }
        };
        let link = connect(endpoint, local, Instant::now() + config.connect_deadline).map_err(fail)?;
        if reach.same_host == SameHost::Rings && link.means() == Means::UNIX_SOCKET {
            return Err(refuse(
                "it shares no memory with its clients, and nothing else is wanted (same-host is `rings`); \
                 was it started with --no-rings?"
                    .into(),
            ));
        }
        if self.shell.servers.len() > usize::from(u16::MAX) {
            return Err(
                rampool_paging::placement::PlacementError::TooManyServers(self.shell.servers.len()).into()
            );
        }
        let now = self.shell.time(Instant::now());
        let server = self.shell.client.add_server(config.op_deadline, now);
        self.shell.servers.push(Server::new(server, name, link));
        Ok(())
    }

    /// The session may do what its server's reply says, and reconnect.
    fn grant(
        &mut self,
        reach: &Reach,
        index: usize,
        endpoint: &Endpoint,
        name: &str,
        reply: &Reply,
        operation: Operation,
    ) -> Result<Granted, ConnectError> {
        let server = &mut self.shell.servers[index];
        let odd = |reason| ConnectError::Server {
            server: server.name.clone(),
            reason: ConnectReason::Lost { operation, reason },
        };
        let granted = Granted::parse(&reply.table).map_err(|e| odd(LostReason::Wire(e)))?;
        let grant = Grant::from(&granted);
        if !grant.is_usable() {
            return Err(odd(LostReason::Protocol("it grants not even one page at a time".into())));
        }
        let local = reach.policy(endpoint).map_err(|error| odd(LostReason::Protocol(error)))?;
        let way = match (server.link.as_ref().map(Link::peer), endpoint) {
            (Some(Peer::Tcp(address)), _) => Some(PeerAddress::Tcp(*address)),
            (_, Endpoint::Unix(path)) => Some(PeerAddress::Unix(path.clone())),
            (_, Endpoint::Tcp { .. } | Endpoint::Ucx { .. }) => None,
        };
        let attach = AttachLease {
            lease: granted.lease,
            token: granted.token,
            member: granted.member,
            pid: std::process::id(),
            name: cut(name),
            host: host_name(),
        };
        let ask = Joining::Attach(attach);
        server.place = way.map(|way| Box::new(Place { way, local, ask }));
        let (server, reconnects) = (server.index, server.place.is_some());
        self.shell.hear(Instant::now(), Input::Granted { server, grant, reconnects });
        Ok(granted)
    }

    /// Drops servers that were not needed and fixes the placement.
    fn settle(mut self, servers: &[ServerSpec], granted: Vec<Option<Granted>>) -> Result<Self, ConnectError> {
        let is_needed =
            |granted: &Option<Granted>| granted.as_ref().is_some_and(|granted| granted.lease_bytes > 0);
        self.shell.client.retain(|server| is_needed(&granted[server.as_usize()]));
        let all = std::mem::take(&mut self.shell.servers);
        for ((mut server, granted), spec) in all.into_iter().zip(granted).zip(servers) {
            let Some(granted) = granted.filter(|granted| granted.lease_bytes > 0) else { continue };
            server.index =
                ServerIndex(u16::try_from(self.shell.servers.len()).expect("no more than were named"));
            let endpoint = match (server.link.as_ref().map(Link::peer), &spec.endpoint) {
                (Some(Peer::Tcp(address)), Endpoint::Ucx { .. }) => {
                    Endpoint::Ucx { host: address.ip().to_string(), port: address.port() }
                }
                (Some(Peer::Tcp(address)), _) => {
                    Endpoint::Tcp { host: address.ip().to_string(), port: address.port() }
                }
                (None, endpoint) => in_numbers(endpoint),
                _ => spec.endpoint.clone(),
            };
            let lent = ServerSpec { endpoint, memory: Some(ByteLen(granted.lease_bytes)) };
            self.ticket.parts.push(LeasePart { server: lent, lease: granted.lease, token: granted.token });
            self.leased.push(granted.lease_bytes);
            self.shell.servers.push(server);
        }
        self.use_placement(self.ticket.placement()?);
        let parts = 0..self.ticket.parts.len();
        for index in parts.filter(|index| !self.ticket.parts[*index].is_leased()).collect::<Vec<_>>() {
            let place = later_place(&self.reach, &self.ticket.parts[index], &self.name);
            self.shell.servers[index].place = place.map(Box::new);
            self.has_no_lease(index);
        }
        Ok(self)
    }

    /// On how many servers each page lies as long as none is lost.
    #[must_use]
    pub fn copies(&self) -> u8 {
        if self.reach.direct { 1 } else { self.ticket.copies }
    }

    /// What another process needs to become a member of this pool's lease ([`PoolConfig::attach`]).
    #[must_use]
    pub fn lease_ticket(&self) -> LeaseTicket {
        self.ticket.clone()
    }

    /// Who this pool is at its servers.
    #[must_use]
    pub fn membership(&self) -> Membership {
        Membership { members: self.members().collect() }
    }

    /// Whether [`Pool::membership`] would be the same as before.
    pub fn is_member_as(&self, before: &Membership) -> bool {
        self.members().eq(before.members.iter().copied())
    }

    fn members(&self) -> impl Iterator<Item = (MemberId, u64)> {
        let members = self.shell.client.sessions().map(rampool_session::Session::member);
        members.zip(self.ticket.parts.iter().map(LeasePart::mark))
    }

    /// Says goodbye for another member of the lease, whose process is gone: its regions are freed at once
    /// instead of after the grace time. A member that has left, or never was, is no error. Does not block,
    /// and brings no event.
    pub fn dismiss(&mut self, member: &Membership) {
        let now = Instant::now();
        // A server that the other one has done without does not know it: 0 would be this member. And in
        // another lease it is another one.
        let members = member.members.iter().zip(&self.ticket.parts).enumerate();
        let known = members.filter(|(_, ((member, lease), part))| member.0 != 0 && *lease == part.mark());
        for (index, ((member, _), _)) in known {
            let server = self.shell.servers[index].index;
            let ask = Ask { class: Class::Demand, ..Ask::control(server, Opcode::Goodbye, RegionId(0)) };
            self.shell.control(ask, member.0, &[], now);
        }
        self.shell.send(now);
    }

    /// What another member of the lease needs to take this region over ([`Pool::adopt_region`]).
    ///
    /// # Errors
    /// [`PoolError::NoSuchRegion`].
    pub fn region_ticket(&self, region: PoolRegion) -> Result<RegionTicket, PoolError> {
        let leases = self.ticket.parts.iter().map(LeasePart::mark).collect();
        let names = self.names(region)?.iter().zip(&self.shell.servers);
        let name = |(name, server): (&RegionId, &Server)| {
            if server.is_there() { *name } else { RegionId(0) }
        };
        let history = self.shell.client.history(region.0).unwrap_or_default();
        Ok(RegionTicket { handed: HandedOver { names: names.map(name).collect(), history }, leases })
    }

    /// As [`Self::region_ticket`], for a member that takes the region over now: this pool forgets it, and no
    /// longer brings servers up to date there.
    ///
    /// # Errors
    /// [`PoolError::NoSuchRegion`].
    pub fn hand_over(&mut self, region: PoolRegion) -> Result<RegionTicket, PoolError> {
        self.names(region)?;
        let Some((handed, left)) = self.shell.client.hand_over(region.0) else {
            return Err(PoolError::NoSuchRegion);
        };
        self.regions[region.0 as usize] = None;
        self.shell.in_place.forget(region);
        self.give_back(left.into_iter().map(Some), Instant::now());
        let leases = self.ticket.parts.iter().map(LeasePart::mark).collect();
        Ok(RegionTicket { handed, leases })
    }

    /// Gives back what another member has not taken over of a region that was handed over to it, and will
    /// not: where it could not join a server, say. What it has taken over is its own, and stays. Does not
    /// block.
    pub fn free_what_was_not_taken(&mut self, ticket: &RegionTicket) {
        let handed = HandedOver { names: ticket.names_at(&self.ticket.parts), ..ticket.handed.clone() };
        let left = self.shell.client.not_taken(&handed);
        self.give_back(left.into_iter().map(Some), Instant::now());
    }

    /// Makes an empty region, on every server. Blocks until all have answered.
    ///
    /// # Errors
    /// [`PoolError`]; parts made on some servers are given back.
    pub fn create_region(&mut self) -> Result<PoolRegion, PoolError> {
        let nothing = vec![RegionId(0); self.server_count()];
        self.new_region(Opcode::CreateRegion, &nothing, Some(History::default()))
    }

    /// Makes a region that holds what `region` holds now; both change independently from here on. Costs the
    /// servers time by the number of 2 MiB chunks in use, not by bytes. What was stored or discarded before
    /// is so in the copy, too. Blocks until all servers have answered that, and this.
    ///
    /// # Errors
    /// [`PoolError`]; parts made on some servers are given back.
    pub fn clone_region(&mut self, region: PoolRegion) -> Result<PoolRegion, PoolError> {
        let mut tries = 0..CLONE_TRIES;
        loop {
            self.await_holders(region)?;
            self.finish_write_backs(Operation::CloneRegion)?;
            let names = self.names(region)?.to_vec();
            let history = self.shell.client.history(region.0);
            match self.new_region(Opcode::CloneRegion, &names, history) {
                // Servers became absent and came back meanwhile.
                Err(PoolError::Lost { .. })
                    if self.shell.client.has_all_pages() && tries.next().is_some() => {}
                done => return done,
            }
        }
    }

    /// Takes over a region of another member of the same lease, which must not use it any more. Blocks until
    /// all servers have answered. With two copies, it must not have been changed by the direct view, which
    /// changes one of them.
    ///
    /// # Errors
    /// [`PoolError`]; the region may then belong to either member in parts.
    pub fn adopt_region(&mut self, ticket: &RegionTicket) -> Result<PoolRegion, PoolError> {
        if self.copies() < self.ticket.copies {
            return Err(PoolError::TwoCopies);
        }
        if self.copies() < 2 && !ticket.is_of(&self.ticket.parts) {
            return Err(PoolError::NoSuchRegion);
        }
        // Where one of the two has joined a server anew, and the other one has not, there is nothing to take
        // over.
        let mut names = ticket.names_at(&self.ticket.parts);
        if names.len() > self.server_count() {
            return Err(PoolError::NoSuchRegion);
        }
        // It knows nothing of servers that came later.
        names.resize(self.server_count(), RegionId(0));
        let mut replies = self.ask_all(Opcode::AdoptRegion, &names, &vec![0; self.server_count()], &[])?;
        if self.copies() > 1 {
            // A server that does not have it any more gets it anew.
            let absent = || PoolError::NoSuchRegion;
            let refused = |reply: &Result<Reply, _>| reply.as_ref().is_ok_and(|r| r.status != Status::Ok);
            replies.iter_mut().filter(|reply| refused(reply)).for_each(|reply| *reply = Err(absent()));
        } else {
            self.each_ok(&replies, Operation::AdoptRegion)?;
        }
        let taken: Vec<_> = replies.iter().zip(&names).map(|(r, name)| r.is_ok() && name.0 != 0).collect();
        let ids = ticket.handed.taken_names(&taken);
        let (of, now) = (self.next_region(), self.shell.time(Instant::now()));
        if self.shell.client.take_over(now, of, &ticket.handed, &taken) {
            self.regions.push(Some(Names { ids, only: None, missed: Vec::new() }));
            return Ok(PoolRegion(of));
        }
        self.each_ok(&replies, Operation::AdoptRegion)?;
        Ok(self.remember(ids, Some(ticket.handed.history.clone())))
    }

    /// Gives a region back with all its pages. Does not block and always succeeds here; fetches and stores of
    /// it that are still under way fail.
    pub fn free_region(&mut self, region: PoolRegion) {
        // That of a queue's bodies goes with the queue.
        let freed = self
            .regions
            .get_mut(region.0 as usize)
            .and_then(|names| names.take_if(|names| names.only.is_none()));
        if freed.is_none() {
            return;
        }
        let Some(freed) = self.shell.client.close_region(region.0) else { return };
        self.shell.in_place.forget(region);
        let now = Instant::now();
        self.give_back(freed.names.iter().map(|name| Some(*name)), now);
    }

    fn give_back(&mut self, names: impl Iterator<Item = Option<RegionId>>, now: Instant) {
        for (index, name) in names.enumerate() {
            let Some(name) = name.filter(|name| name.0 != 0) else { continue };
            // Behind the stores and discards that were made before.
            let server = self.shell.servers[index].index;
            let ask = Ask { class: Class::WriteBack, ..Ask::control(server, Opcode::FreeRegion, name) };
            self.shell.control(ask, 0, &[], now);
        }
        self.shell.send(now);
    }

    /// Changes the lease to `bytes` over all servers, in the proportions in which pages are placed. Blocks
    /// until all servers have answered.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where a server lacks the room; the lease is then as before.
    pub fn resize_lease(&mut self, bytes: ByteLen) -> Result<(), PoolError> {
        let shares: Vec<u64> = apportion(bytes.pages(), &self.ticket.weights())
            .into_iter()
            .map(|pages| ByteLen::from_pages(pages).0)
            .collect();
        let shares = self.fitting(&shares);
        let nothing = vec![RegionId(0); self.server_count()];
        let replies = self.ask_all(Opcode::ResizeLease, &nothing, &shares, &[])?;
        let Err(error) = self.each_ok(&replies, Operation::ResizeLease) else {
            self.leased = shares;
            return Ok(());
        };
        // The servers that agreed go back. One that grew can always do so; one that shrank could a moment
        // ago.
        let before = self.leased.clone();
        let replies = self.ask_all(Opcode::ResizeLease, &nothing, &before, &[])?;
        self.each_ok(&replies, Operation::ResizeLease)?;
        Err(match error {
            PoolError::Refused { server, free, .. } => PoolError::Refused { server, wanted: bytes, free },
            other => other,
        })
    }

    /// How much is to be leased on each server, as of what each one was to hold at first, if that is so much.
    /// One that is out keeps what it has.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn fitting(&self, shares: &[u64]) -> Vec<u64> {
        let part = |server: ServerIndex, share: u64| {
            let before = self.placement.part(server);
            let now = self.view().part(server);
            let leased = self.leased[server.as_usize()];
            match (self.shell.client.is_out(server), before > 0.0) {
                (true, _) => leased,
                (false, true) if now > before => (share as f64 * now / before) as u64,
                (false, true) => share,
                (false, false) => leased.max(share),
            }
        };
        let shares = shares.iter().zip(&self.shell.servers);
        let fitting = shares.map(|(share, server)| part(server.index, *share));
        fitting.map(|bytes| bytes.next_multiple_of(OS_PAGE_BYTES as u64)).collect()
    }

    /// Leases what servers need that take the place of others. For who owns the lease. Blocks until all
    /// servers have answered. Where one has no room for all of it, it gets what is free: its name, how much
    /// is needed, and what it is.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn fit_lease(&mut self) -> Result<Vec<(String, ByteLen, ByteLen)>, PoolError> {
        let lent: Vec<u64> =
            self.ticket.parts.iter().map(|part| part.server.memory.unwrap_or_default().0).collect();
        let mut wanted: Vec<u64> = self.fitting(&lent);
        wanted.iter_mut().zip(&self.leased).for_each(|(wanted, leased)| *wanted = (*wanted).max(*leased));
        let nothing = vec![RegionId(0); self.server_count()];
        let (page, mut short) = (OS_PAGE_BYTES as u64, Vec::new());
        for round in 0..2 {
            if wanted == self.leased {
                break;
            }
            let replies = self.ask_all(Opcode::ResizeLease, &nothing, &wanted, &[])?;
            for (index, reply) in replies.iter().enumerate() {
                match reply {
                    Ok(reply) if reply.status == Status::LeaseRefused => {
                        let most = self.leased[index] + reply.arg / page * page;
                        if round == 0 {
                            let name = self.shell.servers[index].name.clone();
                            short.push((name, ByteLen(wanted[index]), ByteLen(most)));
                        }
                        wanted[index] = most;
                    }
                    Ok(reply) if reply.status == Status::Ok => self.leased[index] = wanted[index],
                    _ => wanted[index] = self.leased[index],
                }
            }
        }
        Ok(short)
    }

    /// From now on this pool stays at servers that drain, or not. Who owns the lease stays until the
    /// processes that use it have left: it dismisses those that end.
    pub fn stay(&mut self, stays: bool) {
        self.shell.client.stay(stays);
    }

    /// Which servers drain, and have not been left, by [`ServerIndex`].
    pub fn draining_servers(&self) -> impl Iterator<Item = ServerIndex> {
        let sessions = self.shell.client.sessions().zip(&self.shell.servers);
        sessions.filter(|(of, _)| of.is_draining() && of.takes_part()).map(|(_, server)| server.index)
    }

    /// Which servers hold no pages for now, by [`ServerIndex`].
    #[must_use]
    pub fn servers_out(&self) -> Vec<bool> {
        self.shell.servers.iter().map(|server| self.shell.client.is_out(server.index)).collect()
    }

    /// Whether each page has all of its copies, as soon as servers that are there have what they lack.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let is_away = |server: ServerIndex| !self.shell.servers[server.as_usize()].is_there();
        let copies = self.view().copies_without(is_away);
        copies + 1e-9 >= f64::from(self.copies())
    }

    /// Leases memory of one more server, for the processes of [`Pool::lease_ticket`] as well. `server` may
    /// say how much; else it is as much as the others lend. Does not block; the server is used when it is
    /// there. False: pages have one copy, or the server is one of them.
    pub fn grow(&mut self, server: &ServerSpec) -> bool {
        let endpoint = in_numbers(&server.endpoint);
        if self.copies() < 2 || self.ticket.servers().any(|of| of.endpoint == endpoint) {
            return false;
        }
        let lent: Vec<u64> =
            self.ticket.parts.iter().map(|part| part.server.memory.unwrap_or_default().0).collect();
        let memory = server.memory.unwrap_or(ByteLen(lent.iter().max().copied().unwrap_or_default()));
        let server = self.add_part(no_part(ServerSpec { endpoint, memory: Some(memory) }));
        self.has_no_lease(server.as_usize());
        self.lease_anew(server)
    }

    /// The lease has one more server, which answers within the time that the others have.
    fn add_part(&mut self, part: LeasePart) -> ServerIndex {
        let deadline =
            self.shell.client.sessions().next().map_or(Duration::ZERO, |session| session.op_deadline());
        let server = self.add_later(&part, deadline);
        self.ticket.later += 1;
        self.ticket.parts.push(part);
        server
    }

    /// Uses the servers that a newer ticket of the same lease has in addition.
    pub fn grow_to(&mut self, ticket: &LeaseTicket) {
        for part in ticket.parts.iter().skip(self.ticket.parts.len()).take_while(|part| part.is_leased()) {
            self.add_part(part.clone());
            for names in self.regions.iter_mut().flatten() {
                names.ids.push(RegionId(0));
            }
        }
    }

    /// The bytes leased on one server.
    #[must_use]
    pub fn leased(&self, server: ServerIndex) -> Option<ByteLen> {
        self.leased.get(server.as_usize()).copied().map(ByteLen)
    }

    /// The bytes leased on all servers together.
    #[must_use]
    pub fn lease_bytes(&self) -> ByteLen {
        ByteLen(self.leased.iter().sum())
    }

    /// Asks for the pages of `extents`, in that order, into `dst`: ends in [`PoolEvent::Fetched`] with
    /// `token`, or in an event that says why not. Does not block. `demand`: a thread waits; goes before
    /// everything else and leaves at once if credits last. Pages that were never stored, or were discarded,
    /// come as zeroes. A page whose store has not ended must not be asked for.
    ///
    /// # Safety
    /// `dst` is writable memory of 4096 bytes for each page, not used otherwise until the operation's event
    /// has been returned by [`Pool::poll`] or the pool was dropped.
    ///
    /// # Panics
    /// If the region was freed or never existed, or a page is beyond the end of a region (2^40 pages).
    pub unsafe fn fetch(
        &mut self,
        region: PoolRegion,
        token: u64,
        extents: &[Extent],
        dst: *mut u8,
        demand: bool,
    ) {
        // What no thread waits for comes from the server while the caller goes on: it would wait here for the
        // copies.
        // SAFETY: the caller's promise.
        if demand && unsafe { self.shell.read_in_place(region, extents, dst) } {
            self.shell.events.push_back(PoolEvent::Fetched { token });
            return;
        }
        let class = if demand { Class::Demand } else { Class::Prefetch };
        let mut memory = dst;
        let pieces = extents.iter().map(|extent| {
            let of_extent = memory;
            memory = memory.wrapping_add(extent.count as usize * OS_PAGE_BYTES);
            (*extent, of_extent)
        });
        self.submit(region, token, Opcode::Get, class, GET_PAGES, pieces);
    }

    /// Whether a server that is there has yet to get pages that it has missed.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        let mut there = self.shell.servers.iter().filter(|server| server.is_there());
        there.any(|server| self.shell.client.missed_pages(server.index).0 > 0)
    }

    /// Those of these pages that no server has which is there or waited for: two copies were there, one was
    /// lost, and the other one had missed them. To ask for one of them fails.
    #[must_use]
    pub fn gone(&self, region: PoolRegion, extents: &[Extent]) -> Vec<Extent> {
        let mut gone = Vec::new();
        let client = &self.shell.client;
        if self.copies() > 1 && !client.sessions().all(rampool_session::Session::takes_part) {
            let pages = extents.iter().flat_map(Extent::pages);
            pages.filter(|page| client.is_gone(region.0, *page)).for_each(|page| push_page(&mut gone, page));
        }
        gone
    }

    /// As [`Pool::fetch`], each extent to memory of its own; perhaps none.
    ///
    /// # Safety
    /// As there, of all of this memory.
    ///
    /// # Panics
    /// As there.
    pub unsafe fn fetch_parts(
        &mut self,
        region: PoolRegion,
        token: u64,
        parts: &[(Extent, *mut u8)],
        demand: bool,
    ) {
        let class = if demand { Class::Demand } else { Class::Prefetch };
        self.submit(region, token, Opcode::Get, class, GET_PAGES, parts.iter().copied());
    }

    /// Sends pages to their servers: each extent with the memory its pages lie in. Ends in
    /// [`PoolEvent::Stored`] with `token`, or in an event that says why not. Does not block; leaves with the
    /// next [`Pool::poll`]. Stores and discards of a page take effect in the order in which they were made.
    ///
    /// # Safety
    /// The memory is readable, 4096 bytes for each page, and its bytes do not change until the operation's
    /// event has been returned by [`Pool::poll`] or the pool was dropped.
    ///
    /// # Panics
    /// As [`Pool::fetch`].
    pub unsafe fn store(&mut self, region: PoolRegion, token: u64, pages: &[(Extent, *const u8)]) {
        let pieces = pages.iter().map(|(extent, memory)| (*extent, memory.cast_mut()));
        self.submit(region, token, Opcode::Put, Class::WriteBack, PUT_PAGES, pieces);
    }

    /// Tells the servers that they may forget these pages; they read as zero from then on. Does not block,
    /// and brings no event.
    ///
    /// # Panics
    /// As [`Pool::fetch`].
    pub fn discard(&mut self, region: PoolRegion, extent: Extent) {
        if extent.count == 0 {
            return;
        }
        self.names(region).expect("pages of a region that was freed or never existed");
        check_range(extent);
        self.shell.in_place.discarded(region, extent);
        let time = self.shell.time(Instant::now());
        let (client, bodies, _) = self.shell.parts();
        client.discard_pages(time, region.0, extent, |request, extent| {
            fresh(bodies, request).extents.push(extent);
        });
    }

    /// Does what input and output is possible without blocking and returns the next event; `None` when there
    /// is nothing more for now.
    pub fn poll(&mut self) -> Option<PoolEvent> {
        self.ready().or_else(|| self.look(Instant::now()))
    }

    /// The next event that is known already.
    pub(crate) fn ready(&mut self) -> Option<PoolEvent> {
        self.shell.events.pop_front()
    }

    /// As [`Pool::poll`], for who has just read the clock, and has been given the events that were known.
    pub(crate) fn look(&mut self, now: Instant) -> Option<PoolEvent> {
        self.step(now);
        self.shell.events.pop_front()
    }

    /// Appends the sockets to sleep on once [`Pool::poll`] has returned `None`. To be called anew before each
    /// sleep, and the sleep to follow at once: what shall wake this thread is agreed on here.
    pub fn poll_fds(&self, out: &mut Vec<libc::pollfd>) {
        for server in &self.shell.servers {
            if let Some((fd, write)) = server.watched() {
                let events = if write { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
                out.push(libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 });
            }
        }
    }

    /// When [`Pool::poll`] must be called again at the latest, whatever the sockets do; perhaps in the past.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.shell.next_deadline()
    }

    /// Waits for the next event, at most until `deadline`. Blocks; for threads that have nothing else to
    /// watch.
    ///
    /// # Errors
    /// As `poll(2)`.
    pub fn next_event(&mut self, deadline: Instant) -> io::Result<Option<PoolEvent>> {
        loop {
            if let Some(event) = self.poll() {
                return Ok(Some(event));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            self.sleep(deadline)?;
        }
    }

    /// The servers, by [`ServerIndex`].
    pub fn servers(&self) -> impl Iterator<Item = &str> {
        self.shell.servers.iter().map(|server| server.name.as_str())
    }

    /// Whether every server lets this process read pages where they lie, without asking.
    #[must_use]
    pub fn reads_in_place(&self) -> bool {
        self.shell.servers.iter().all(|server| server.frames.is_some())
    }

    /// The server that holds a page, or the first of two.
    #[must_use]
    pub fn holder(&self, page: PageIndex) -> ServerIndex {
        self.view().holder(page)
    }

    /// All servers that hold a page as long as none is lost.
    #[must_use]
    pub fn holders(&self, page: PageIndex) -> Holders {
        self.view().holders(page)
    }

    /// Where pages lie now.
    fn view(&self) -> &Placement {
        self.shell.client.placement()
    }

    /// Fetches and stores whose event has not been returned.
    #[must_use]
    pub fn operations_under_way(&self) -> usize {
        let of_server = |event: &&PoolEvent| {
            matches!(
                event,
                PoolEvent::Lost { .. }
                    | PoolEvent::Degraded { .. }
                    | PoolEvent::Absent { .. }
                    | PoolEvent::Returned { .. }
                    | PoolEvent::CaughtUp { .. }
                    | PoolEvent::Holds { .. }
                    | PoolEvent::Drained { .. }
                    | PoolEvent::Draining { .. }
            )
        };
        let known = self.shell.events.iter().filter(|event| !of_server(event)).count();
        self.shell.client.ops_under_way() + known
    }

    /// What a pager cannot count itself.
    pub fn report(&self, to: &PagerStats) {
        let servers = || self.shell.servers.iter().map(|server| &server.stats);
        let bytes = |of: fn(&stats::LinkStats) -> u64| servers().map(of).sum();
        to.pool(
            bytes(|link| link.received_bytes),
            bytes(|link| link.sent_bytes),
            bytes(|link| link.in_place_pages),
            servers().map(|link| link.latency.by_powers()),
        );
        let lost = self.shell.servers.iter().map(|server| !server.is_there());
        let there = self.shell.servers.iter().filter(|server| server.lost.is_none());
        let missed = there.map(|server| self.shell.client.missed_pages(server.index).0).sum();
        to.copies(bytes(|link| link.moved), lost, missed);
        if self.copies() > 1 {
            let (_, stored) = self.shell.client.missed_pages(ServerIndex(0));
            to.lacking(stored, self.lacking_pages(stored));
        }
    }

    /// Copies that there should be of so many pages in all regions, and are not.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn lacking_pages(&self, stored: u64) -> u64 {
        let of = |server: &Server| match server.is_there() {
            true => self.shell.client.missed_pages(server.index).0,
            false => (stored as f64 * self.view().part(server.index)) as u64,
        };
        let held = self.view().copies_without(|_| false);
        let without_place = (stored as f64 * (f64::from(self.copies()) - held)) as u64;
        self.shell.servers.iter().map(of).sum::<u64>() + without_place
    }

    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let sessions = self.shell.client.sessions();
        let servers = self.shell.servers.iter().zip(sessions).zip(&self.leased).map(
            |((server, session), lease_bytes)| {
                let (queued, outstanding, outstanding_bytes) = session.load();
                let (link, counts) = (server.stats.clone(), session.counts());
                let missed_pages = match server.lost {
                    Some(_) => 0,
                    None => self.shell.client.missed_pages(server.index).0,
                };
                let lost = server.lost.is_some() || server.is_renewed;
                let state = match (lost, server.is_away) {
                    (true, _) => ServerState::Lost,
                    (false, true) => ServerState::Absent,
                    (false, false) if missed_pages > 0 => ServerState::CatchingUp,
                    (false, false) => ServerState::Well,
                };
                ServerStats {
                    state,
                    missed_pages,
                    left_pages: self.shell.client.left_pages(server.index),
                    name: server.name.clone(),
                    alive: !lost,
                    means: server.link.as_ref().map(Link::means),
                    lease_bytes: *lease_bytes,
                    requests: link.requests,
                    fetched_pages: link.fetched_pages,
                    in_place_pages: link.in_place_pages,
                    stored_pages: link.stored_pages,
                    sent_bytes: link.sent_bytes,
                    received_bytes: link.received_bytes,
                    refused: counts.refused,
                    damaged: counts.damaged,
                    reconnects: counts.reconnects,
                    moved: link.moved,
                    queued,
                    outstanding,
                    outstanding_bytes,
                    latency: link.latency,
                }
            },
        );
        let is_out = |server: ServerIndex| !self.shell.servers[server.as_usize()].is_there();
        let (_, stored) = self.shell.client.missed_pages(ServerIndex(0));
        let copies_left = match stored {
            0 => self.view().copies_without(is_out),
            _ => f64::from(self.copies()) - self.lacking_pages(stored) as f64 / stored as f64,
        };
        PoolStats { copies: self.copies(), copies_left, servers: servers.collect() }
    }

    /// Leaves the servers: this member's regions are freed at once instead of after the grace time. Use the
    /// pool for nothing after that. Blocks a second at most. A pool that is merely dropped closes its
    /// connections and nothing else, as befits a copy of it in a forked child.
    pub fn close(&mut self) {
        let deadline = Instant::now() + LEAVE_DEADLINE;
        self.shell.hear(Instant::now(), Input::StayAway);
        let nothing = vec![RegionId(0); self.server_count()];
        let ids = self.start(Opcode::Goodbye, &nothing, &vec![0; self.server_count()], &[]);
        while Instant::now() < deadline && ids.iter().flatten().any(|id| self.shell.client.is_under_way(*id))
        {
            self.step(Instant::now());
            // A socket that cannot be watched ends the courtesy, no more.
            if self.sleep(deadline).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, now: Instant) {
        self.shell.step(now);
        while let Some(server) = self.shell.joined.pop() {
            self.has_joined(server, now);
        }
        if std::mem::take(&mut self.shell.caught_up) {
            // Regions may have names now where they had none.
            for (of, names) in (0..).zip(&mut self.regions) {
                if let (Some(names), Some(region)) = (names, self.shell.client.region(of)) {
                    names.ids.clone_from(&region.names);
                }
            }
        }
    }

    /// The server was joined late or anew: what it leases is what the pool counts on.
    fn has_joined(&mut self, server: ServerIndex, now: Instant) {
        let index = server.as_usize();
        let Some(granted) = self.shell.servers[index].granted.clone() else { return };
        let part = &mut self.ticket.parts[index];
        (part.lease, part.token) = (granted.lease, granted.token);
        let wanted = self.leased[index];
        if granted.lease_bytes >= wanted {
            self.leased[index] = granted.lease_bytes;
        } else {
            // The lease has grown at the others meanwhile. What it lacks room for, it misses.
            let ask = Ask { class: Class::Demand, ..Ask::control(server, Opcode::ResizeLease, RegionId(0)) };
            self.shell.control(ask, wanted, &[], now);
        }
    }

    /// Why a server is lost.
    #[must_use]
    pub fn why_lost(&self, server: ServerIndex) -> Option<&LostReason> {
        self.shell.servers.get(server.as_usize())?.lost.as_ref()
    }

    /// Servers that are lost, and could be joined anew.
    pub fn lost_servers(&self) -> impl Iterator<Item = ServerIndex> {
        let lost = self.shell.servers.iter().filter(|server| server.lost.is_some() && server.place.is_some());
        lost.map(|server| server.index)
    }

    /// Joins a lost server anew, as a new member of the lease that this ticket has there. Does not block;
    /// brings [`PoolEvent::Returned`] when it is there, and then it gets all of its pages. As long as it
    /// cannot be reached, nothing is said. False: it is not lost, or the ticket has no lease there.
    pub fn join_anew(&mut self, server: ServerIndex, ticket: &LeaseTicket) -> bool {
        let part = ticket.parts.get(server.as_usize()).filter(|part| part.is_leased());
        let place = part.and_then(|part| later_place(&self.reach, part, &self.name));
        self.renew(server, place)
    }

    /// As [`Pool::join_anew`], by a new lease of as much as the server had lent before. For who owns the
    /// lease: others hear of it by [`Pool::lease_ticket`].
    pub fn lease_anew(&mut self, server: ServerIndex) -> bool {
        let index = server.as_usize();
        let Some(part) = self.ticket.parts.get(index) else { return false };
        let (pid, name, host) = (std::process::id(), cut(&self.name), host_name());
        let ask = Joining::Open(OpenLease { bytes: self.leased[index], pid, name, host });
        let place = later_place(&self.reach, part, &self.name).map(|place| Place { ask, ..place });
        self.renew(server, place)
    }

    /// Servers that are there again and have no room for what [`Pool::lease_anew`] asked for: their names,
    /// how much that is, and how much is free there.
    pub fn servers_without_room(&self) -> impl Iterator<Item = (&str, ByteLen, ByteLen)> {
        let leased = self.shell.servers.iter().zip(&self.leased);
        leased.filter_map(|(of, wanted)| Some((&*of.name, ByteLen(*wanted), ByteLen(of.free_bytes?))))
    }

    /// Call it about once a second, or more often, if the pool owns the lease: tries lost servers again, and
    /// leases more where servers take the place of others. May block until the servers have answered.
    pub fn tend(&mut self) {
        if self.copies() < 2 {
            return;
        }
        let out = self.servers_out();
        if out != self.made_room_for {
            self.made_room_for = out;
            // What finds no room has one copy.
            let _ = self.fit_lease();
        }
        self.knock();
    }

    /// Tries lost servers again, as [`Pool::lease_anew`], if that was not done for [`KNOCK_EVERY`].
    pub fn knock(&mut self) {
        if self.knocked.elapsed() >= KNOCK_EVERY {
            self.knocked = Instant::now();
            for server in self.lost_servers().collect::<Vec<_>>() {
                self.lease_anew(server);
            }
        }
    }

    fn renew(&mut self, server: ServerIndex, place: Option<Place>) -> bool {
        let lost = self.lost_servers().any(|lost| lost == server) && self.copies() > 1;
        let Some(place) = place.filter(|_| lost) else { return false };
        self.shell.renew(server.as_usize(), place, Instant::now());
        true
    }

    fn sleep(&self, deadline: Instant) -> io::Result<()> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let until = self.next_deadline().map_or(deadline, |due| due.min(deadline));
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(self.server_count());
        for server in &self.shell.servers {
            if let Some((fd, write)) = server.watched() {
                let flags = if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
                fds.push(PollFd::from_borrowed_fd(fd, flags));
            }
        }
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Cuts an operation into requests and queues them.
    fn submit(
        &mut self,
        region: PoolRegion,
        token: u64,
        opcode: Opcode,
        class: Class,
        limit: u32,
        pieces: impl Iterator<Item = (Extent, *mut u8)>,
    ) {
        self.names(region).expect("pages of a region that was freed or never existed");
        let now = Instant::now();
        let op = self.shell.begin(token, opcode == Opcode::Put);
        let of = self.shell.stamp(region, opcode);
        let (time, pages) = (self.shell.time(now), Pages { of: region.0, op, opcode, class, limit });
        let (client, bodies, in_place) = self.shell.parts();
        for (extent, memory) in pieces.filter(|(extent, _)| extent.count > 0) {
            check_range(extent);
            if let Some(of) = of.filter(|_| opcode == Opcode::Put) {
                in_place.changing(of, extent);
            }
            client.submit_pages(time, pages, extent, |part| {
                fill(bodies, part, memory, of);
            });
        }
        client.close_pages(pages, |part| {
            fill(bodies, part, std::ptr::null_mut(), of);
        });
        self.shell.sealed(op, now);
        if class == Class::Demand {
            self.shell.send(now);
        }
    }

    fn names(&self, region: PoolRegion) -> Result<&[RegionId], PoolError> {
        let region = self.shell.client.region(region.0).ok_or(PoolError::NoSuchRegion)?;
        Ok(&region.names)
    }

    fn remember(&mut self, ids: Vec<RegionId>, history: Option<History>) -> PoolRegion {
        self.remember_names(Names { ids, only: None, missed: Vec::new() }, history)
    }

    /// `history`: of a region whose pages lie where placement says.
    fn remember_names(&mut self, names: Names, history: Option<History>) -> PoolRegion {
        let (of, now) = (self.next_region(), self.shell.time(Instant::now()));
        self.shell.client.open_region(now, of, names.ids.clone(), history);
        self.regions.push(Some(names));
        PoolRegion(of)
    }

    fn next_region(&self) -> u32 {
        u32::try_from(self.regions.len()).expect("fewer than four billion regions in a process's life")
    }

    fn new_region(
        &mut self,
        opcode: Opcode,
        from: &[RegionId],
        history: Option<History>,
    ) -> Result<PoolRegion, PoolError> {
        let operation =
            if opcode == Opcode::CloneRegion { Operation::CloneRegion } else { Operation::CreateRegion };
        let replies = self.ask_all(opcode, from, &vec![0; self.server_count()], &[])?;
        let made =
            replies.iter().map(|r| r.as_ref().ok().filter(|r| r.status == Status::Ok).map(|r| r.region));
        let made: Vec<_> = made.collect();
        let mut result = self.each_ok(&replies, operation);
        let names = names_of(replies);
        let of_pages = history.as_ref();
        if result.is_ok() && of_pages.is_some_and(|history| !self.shell.client.is_complete(&names, history)) {
            // One server came back with less than another one had, and this one was absent then.
            let server = &self.shell.servers[0].name;
            result = Err(lost(server, operation, &LostReason::Closed));
        }
        if let Err(error) = result {
            self.give_back(made.into_iter(), Instant::now());
            return Err(error);
        }
        Ok(self.remember(names, history))
    }

    /// Queues one control request to every server; the numbers of those whose answers can be waited for.
    fn start(
        &mut self,
        opcode: Opcode,
        regions: &[RegionId],
        args: &[u64],
        table: &[u8],
    ) -> Vec<Option<u64>> {
        let now = Instant::now();
        // A goodbye overtakes nothing that was asked for before; the copy of a region holds what was changed
        // before.
        let class = if matches!(opcode, Opcode::Goodbye | Opcode::CloneRegion) {
            Class::Demand
        } else {
            Class::Control
        };
        let mut ids = Vec::with_capacity(self.server_count());
        for (index, (region, arg)) in regions.iter().zip(args).enumerate() {
            let server = &self.shell.servers[index];
            // What is not there is neither copied nor taken over.
            let nothing = matches!(opcode, Opcode::CloneRegion | Opcode::AdoptRegion) && region.0 == 0;
            if !server.is_there() || nothing {
                ids.push(None);
                continue;
            }
            let ask = Ask { class, wanted: true, ..Ask::control(server.index, opcode, *region) };
            ids.push(Some(self.shell.control(ask, *arg, table, now)));
        }
        ids
    }

    /// One control request to every server; returns when each has answered or is lost, which takes one
    /// deadline at most (a server that sends other things meanwhile: a few).
    fn ask_all(
        &mut self,
        opcode: Opcode,
        regions: &[RegionId],
        args: &[u64],
        table: &[u8],
    ) -> Result<Vec<Result<Reply, PoolError>>, PoolError> {
        let ids = self.start(opcode, regions, args, table);
        let mut replies: Vec<Option<Result<Reply, PoolError>>> = ids.iter().map(|_| None).collect();
        loop {
            self.step(Instant::now());
            for (index, (id, reply)) in ids.iter().zip(&mut replies).enumerate() {
                if reply.is_some() {
                    continue;
                }
                if let Some(answer) = id.and_then(|id| self.shell.take_reply(id)) {
                    *reply = Some(Ok(answer));
                } else if !id.is_some_and(|id| self.shell.client.is_under_way(id)) {
                    let Server { name, lost: gone, why, .. } = &self.shell.servers[index];
                    let reason = gone.as_ref().or(why.as_ref()).unwrap_or(&LostReason::Closed);
                    *reply = Some(Err(lost(name, operation_of(opcode), reason)));
                }
            }
            if replies.iter().all(Option::is_some) {
                return Ok(replies.into_iter().flatten().collect());
            }
            self.sleep_or_fail(operation_of(opcode))?;
        }
    }

    /// Waits for a server that alone has some pages of the region, for as long as it is waited for at all.
    fn await_holders(&mut self, region: PoolRegion) -> Result<(), PoolError> {
        loop {
            self.step(Instant::now());
            let (names, client) = (self.names(region)?, &self.shell.client);
            let complete = client.history(region.0).is_none_or(|history| client.is_complete(names, &history));
            if complete || !client.has_all_pages() {
                return Ok(());
            }
            self.sleep_or_fail(Operation::CloneRegion)?;
        }
    }

    /// Waits until the servers that live have answered all stores and discards, which control requests
    /// overtake.
    fn finish_write_backs(&mut self, operation: Operation) -> Result<(), PoolError> {
        loop {
            self.step(Instant::now());
            if !self.shell.client.sessions().any(rampool_session::Session::has_write_backs) {
                return Ok(());
            }
            self.sleep_or_fail(operation)?;
        }
    }

    fn sleep_or_fail(&self, operation: Operation) -> Result<(), PoolError> {
        self.sleep(Instant::now() + Duration::from_secs(1)).map_err(|error| {
            // Sockets that cannot be watched are of no use; what is wrong with them is the same for all.
            lost(&self.shell.servers[0].name, operation, &LostReason::Io(error.to_string()))
        })
    }

    /// One control request to one server, while the pool is being made.
    fn ask_one(
        &mut self,
        config: &PoolConfig,
        index: usize,
        opcode: Opcode,
        arg: u64,
        table: &[u8],
    ) -> Result<Reply, ConnectError> {
        let deadline = Instant::now() + config.connect_deadline;
        let operation = operation_of(opcode);
        let ask = Ask { wanted: true, ..Ask::control(self.shell.servers[index].index, opcode, RegionId(0)) };
        let id = self.shell.control(ask, arg, table, Instant::now());
        loop {
            let now = Instant::now();
            self.step(now);
            if let Some(reply) = self.shell.take_reply(id) {
                return Ok(reply);
            }
            let Server { name, lost, .. } = &self.shell.servers[index];
            let fail = |reason| Err(ConnectError::Server { server: name.clone(), reason });
            if let Some(reason) = lost {
                return fail(ConnectReason::Lost { operation, reason: reason.clone() });
            }
            if now >= deadline {
                return fail(ConnectReason::Deadline { operation, deadline: config.connect_deadline });
            }
            if let Err(error) = self.sleep(deadline) {
                return fail(ConnectReason::Lost { operation, reason: LostReason::Io(error.to_string()) });
            }
        }
    }

    /// The first error among the replies of all servers. One that is lost is none if every page has another
    /// holder.
    fn each_ok(&self, replies: &[Result<Reply, PoolError>], operation: Operation) -> Result<(), PoolError> {
        let spared = self.shell.client.has_all_pages();
        for (server, reply) in self.shell.servers.iter().zip(replies) {
            let reply = match reply {
                Ok(reply) => reply,
                Err(PoolError::Lost { .. }) if spared => continue,
                Err(error) => return Err(error.clone()),
            };
            let server = server.name.clone();
            match reply.status {
                Status::Ok => {}
                Status::LeaseRefused => {
                    return Err(PoolError::Refused { server, wanted: ByteLen(0), free: ByteLen(reply.arg) });
                }
                Status::MemberGone | Status::NoSuchLease => {
                    return Err(lost(&server, operation, &LostReason::GivenUp));
                }
                _ => return Err(PoolError::Denied { server, operation, message: message_of(reply) }),
            }
        }
        Ok(())
    }
}

/// What the amounts named with servers make.
fn named_bytes(servers: &[ServerSpec], copies: Copies) -> ByteLen {
    let named =
        servers.iter().filter_map(|server| server.memory).fold(0u64, |sum, of| sum.saturating_add(of.0));
    ByteLen(if copies == Copies::Two { named / 2 } else { named })
}

/// The part of a lease at a server that has granted nothing yet.
fn no_part(server: ServerSpec) -> LeasePart {
    LeasePart { server, lease: LeaseId(0), token: LeaseToken([0; 16]) }
}

/// What a server that is down has granted: a share of a lease that is not there yet.
fn no_lease(share: u64) -> Granted {
    Granted {
        lease: LeaseId(0),
        token: LeaseToken([0; 16]),
        member: MemberId(0),
        server: 0,
        lease_bytes: share,
        max_requests: 0,
        max_bytes: 0,
        grace_ms: 0,
        heartbeat_ms: 0,
    }
}

/// The same endpoint without a name, if that can be resolved: later it is asked for without waiting.
fn in_numbers(endpoint: &Endpoint) -> Endpoint {
    use std::net::ToSocketAddrs;
    let Endpoint::Tcp { host, port } = endpoint else { return endpoint.clone() };
    let found = (host.as_str(), *port).to_socket_addrs().ok().and_then(|mut found| found.next());
    let host = found.map_or_else(|| host.clone(), |address| address.ip().to_string());
    Endpoint::Tcp { host, port: *port }
}

/// How a server that cannot be reached now is reached later.
fn later_place(reach: &Reach, part: &LeasePart, name: &str) -> Option<Place> {
    let endpoint = &part.server.endpoint;
    let way = match endpoint {
        Endpoint::Tcp { host, port } => {
            PeerAddress::Tcp((host.parse::<std::net::IpAddr>().ok()?, *port).into())
        }
        Endpoint::Unix(path) => PeerAddress::Unix(path.clone()),
        Endpoint::Ucx { .. } => return None,
    };
    Some(Place { way, local: reach.policy(endpoint).ok()?, ask: Joining::Attach(attach_to(part, name)) })
}

/// Notes which pages a request is about.
fn fill(bodies: &mut Vec<Body>, part: Fill, memory: *mut u8, of: Option<(PoolRegion, Stamp)>) {
    match part {
        Fill::Pages { request, new, extent, before } => {
            let body = if new { fresh(bodies, request) } else { &mut bodies[request.0 as usize] };
            body.of = of;
            body.extents.push(extent);
            body.memory.push(memory.wrapping_add(before as usize * OS_PAGE_BYTES));
        }
        Fill::Same { request, like } => {
            fresh(bodies, request);
            let [same, body] = bodies
                .get_disjoint_mut([request.0 as usize, like.0 as usize])
                .expect("two requests have two bodies");
            same.of = of;
            same.extents.extend_from_slice(&body.extents);
            same.memory.extend_from_slice(&body.memory);
            let entries = Rc::default();
            (same.entries, body.entries) = (Some(Rc::clone(&entries)), Some(entries));
        }
    }
}

/// What the region is called at each server; 0 where that is lost.
fn names_of(replies: Vec<Result<Reply, PoolError>>) -> Vec<RegionId> {
    replies.into_iter().map(|reply| reply.map_or(RegionId(0), |reply| reply.region)).collect()
}

fn entry(regions: &[Option<Names>], region: PoolRegion) -> &Names {
    regions
        .get(region.0 as usize)
        .and_then(Option::as_ref)
        .expect("pages of a region that was freed or never existed")
}

fn check_range(extent: Extent) {
    assert!(
        extent.first.0 < MAX_PAGE_INDEX && extent.end().0 <= MAX_PAGE_INDEX,
        "{} is beyond the end of a region",
        extent.first
    );
}

pub(crate) fn operation_of(opcode: Opcode) -> Operation {
    match opcode {
        Opcode::OpenLease => Operation::OpenLease,
        Opcode::AttachLease => Operation::AttachLease,
        Opcode::ResizeLease => Operation::ResizeLease,
        Opcode::CreateRegion => Operation::CreateRegion,
        Opcode::CloneRegion => Operation::CloneRegion,
        Opcode::AdoptRegion => Operation::AdoptRegion,
        Opcode::FreeRegion => Operation::FreeRegion,
        Opcode::ListRegions => Operation::ListRegions,
        Opcode::OpenRegion => Operation::OpenRegion,
        Opcode::OpenQueue => Operation::OpenQueue,
        Opcode::FreeQueue => Operation::FreeQueue,
        Opcode::ListQueues => Operation::ListQueues,
        Opcode::Push | Opcode::PushHeads => Operation::Push,
        Opcode::Take => Operation::Take,
        Opcode::Settle => Operation::Settle,
        Opcode::AwaitBody => Operation::AwaitBody,
        Opcode::Publish | Opcode::Withdraw | Opcode::Reach => Operation::Reach,
        Opcode::Heartbeat => Operation::Heartbeat,
        Opcode::Goodbye => Operation::Leave,
        _ => Operation::Idle,
    }
}

fn message_of(reply: &Reply) -> String {
    let message = parse_message(&reply.table);
    if message.is_empty() { format!("{:?}", reply.status) } else { message }
}

/// What a refused lease leaves free; `None` if it was not refused.
fn refusal(server: &str, reply: &Reply, operation: Operation) -> Result<Option<u64>, ConnectError> {
    match reply.status {
        Status::Ok => Ok(None),
        Status::LeaseRefused => Ok(Some(reply.arg)),
        Status::ShortOfMemory => {
            Err(ConnectError::Server { server: server.to_owned(), reason: ConnectReason::ShortOfMemory })
        }
        _ => Err(ConnectError::Server {
            server: server.to_owned(),
            reason: ConnectReason::Denied { operation, message: message_of(reply) },
        }),
    }
}

fn too_little(servers: &[ServerSpec], wants: &[Want], wanted: ByteLen, shortage: Shortage) -> ConnectError {
    let free: Vec<String> = servers
        .iter()
        .zip(wants)
        .filter_map(|(server, want)| {
            Some(format!("{} has {} free", server.endpoint, ByteLen::from_pages(want.free?)))
        })
        .collect();
    let free =
        if free.is_empty() { "each was asked for the amount named with it".into() } else { free.join(", ") };
    ConnectError::TooLittle { wanted, missing: ByteLen::from_pages(shortage.missing), free }
}

fn cut(name: &str) -> String {
    let mut end = name.len().min(MAX_NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].to_owned()
}

/// To become a new member.
fn attach_to(part: &LeasePart, name: &str) -> AttachLease {
    let (pid, host) = (std::process::id(), host_name());
    AttachLease { lease: part.lease, token: part.token, member: MemberId(0), pid, name: cut(name), host }
}

/// This machine's name, for people who look at a server.
fn host_name() -> String {
    cut(&rustix::system::uname().nodename().to_string_lossy())
}

#[cfg(test)]
mod tests;
