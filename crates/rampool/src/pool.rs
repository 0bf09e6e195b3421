//! The client's side of a pool: pages of regions fetched from, and stored on, many memory servers.
//!
//! A [`Pool`] belongs to one thread, usually a pager's. It never blocks in its data operations, starts no thread and touches only its own memory
//! and the buffers it is handed: the thread submits ([`Pool::fetch`], [`Pool::store`], [`Pool::discard`]), sleeps on the pool's sockets and whatever else
//! it watches ([`Pool::poll_fds`], [`Pool::next_deadline`]), and drains [`Pool::poll`]. Operations on regions and leases are rare and block, within
//! a deadline.
//!
//! Which server holds a page is computed ([`rampool_proto::placement`]); an operation that crosses servers is cut up and completes as one. Every
//! page's checksum is made when it is stored, kept by the server beside the page, and checked when it is back.
//!
//! Every operation ends in exactly one event. A broken connection is made again within the grace time that the server has for its clients, and what
//! had no answer is asked again. A server that stops answering within the deadline, breaks the protocol, or cannot be reached in that time is
//! *lost*: one [`PoolEvent::Lost`], a [`PoolEvent::Failed`] for each operation that needed it, and the same for each later one. The pool never
//! returns zeroes for a page it could not get, and never waits for ever.

mod comeback;
mod config;
mod direct;
mod keyed;
mod lane;
mod queue;
mod request;
mod stats;
mod ticket;

pub use config::{LeaseRequest, PoolConfig, ServerSpec, ServerSpecError};
pub(crate) use direct::{Job, MOST_COPIED_BYTES, MOST_SCANNED, ScanPart};
pub use keyed::KeyStats;
pub(crate) use queue::QueueReply;
pub use stats::{Histogram, PoolStats, ServerStats};
pub use ticket::{LeaseTicket, Membership, RegionTicket, TicketError};

use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rampool_proto::placement::{Placement, ServerIndex, Shortage, Want, apportion, share_lease};
use rampool_proto::session::features;
use rampool_proto::units::{ByteLen, Extent, OS_PAGE_BYTES, PageIndex};
use rampool_proto::wire::{
    AttachLease, Granted, MAX_NAME_BYTES, MAX_PAGE_INDEX, MemberId, Opcode, OpenLease, RegionId, Status, parse_message,
};

use crate::error::{ConnectError, ConnectReason, LostReason, Operation, PoolError};
use crate::stats::PagerStats;
use crate::transport::{Endpoint, HandshakeError, Link, LocalPolicy, Means, Peer, SameHost, Way, connect};
use comeback::Place;
use lane::Lane;
use request::{Class, Reply, Work, lost};
use ticket::LeasePart;

/// Pages one request for pages asks for at most.
const GET_PAGES: u32 = 64;
/// Pages one store carries at most: a demand request may have to wait until one has left.
const PUT_PAGES: u32 = 32;
/// How often the lanes' deadlines are looked at, however often the sockets are.
const CHECK_EVERY: Duration = Duration::from_micros(100);
/// How long [`Pool::leave`] waits for servers to say goodbye.
const LEAVE_DEADLINE: Duration = Duration::from_secs(1);

/// A region of a pool: a sparse array of pages, zero where never stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PoolRegion(u32);

/// What a region is called at each server.
struct Names {
    ids: Vec<RegionId>,
    /// All of it lies at this one.
    only: Option<ServerIndex>,
}

/// Something that happened in a pool.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PoolEvent {
    /// All pages of the fetch with this token are in their place, and are what was stored.
    Fetched { token: u64 },
    /// All pages of the store with this token are at their servers.
    Stored { token: u64 },
    /// A server had no room: not all pages of this store are at their servers. The rest may be; to store again is harmless. `free`: bytes
    /// of the lease that are left there.
    Full { token: u64, server: ServerIndex, name: String, free: ByteLen },
    /// Twice in a row, the bytes a server sent for this page were not those that were stored.
    Corrupt { token: u64, server: ServerIndex, name: String, page: PageIndex },
    /// The operation with this token did not succeed; its memory is not touched any more. Its [`PoolEvent::Lost`], if that is the reason, came before.
    Failed { token: u64, error: PoolError },
    /// A server is gone, with every page it held. Comes once for each server.
    Lost { server: ServerIndex, name: String, operation: Operation, reason: LostReason },
    /// A server was told to stop and does so after `left`.
    Draining { server: ServerIndex, name: String, left: Duration },
}

/// A client's connections to all servers of a pool, and its lease there.
pub struct Pool {
    lanes: Vec<Lane>,
    work: Work,
    placement: Placement,
    /// `None` once it was freed.
    regions: Vec<Option<Names>>,
    ticket: LeaseTicket,
    leased: Vec<u64>,
    /// While an operation is cut up: the request to each server that still has room.
    open: Vec<Option<u32>>,
    /// Before this the lanes' deadlines need not be looked at.
    check_at: Instant,
}

// SAFETY: what keeps `Pool` from being `Send` by itself are the addresses in `work` and `lanes`, which are as valid on one thread as on another (the
// contracts of `fetch` and `store` name no thread), and an `Rc` that each lane shares only with the link inside it: all owners move together.
unsafe impl Send for Pool {}

/// How a pool reaches its servers.
struct Reach {
    /// Those on this machine.
    same_host: SameHost,
    policy: LocalPolicy,
}

impl Reach {
    fn of(config: &PoolConfig) -> Result<Self, ConnectError> {
        let same_host = config.same_host.map_or_else(SameHost::from_environment, Ok).map_err(ConnectError::SameHost)?;
        let compression = if config.compression { features::LZ4 } else { 0 };
        let rings = if same_host == SameHost::Socket { 0 } else { features::RINGS | features::KEYS };
        let features = compression | rings | features::PIECES;
        let policy = LocalPolicy { key: config.key.clone(), encryption: config.encryption, features, ucx: None };
        Ok(Self { same_host, policy })
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
    /// Connects to every server and opens, or joins, the lease. Blocks, for each server at most `connect_deadline` and a name's resolution.
    ///
    /// Who joins a lease has memory that depends on it: where a connection breaks meanwhile, it is tried again for as long as a server may leave a
    /// request unanswered (`op_deadline`).
    ///
    /// A new lease is shared by the servers as their specifications say; what one without a named amount cannot give, the others are asked for.
    ///
    /// # Errors
    /// [`ConnectError`], which names the server and what was wrong. Leases already opened return to their servers.
    pub fn connect(config: &PoolConfig) -> Result<Self, ConnectError> {
        let reach = Reach::of(config)?;
        match &config.lease {
            LeaseRequest::Open { servers, bytes, name } => Self::open(config, &reach, servers, *bytes, name),
            LeaseRequest::Attach { ticket, name } => {
                let until = Instant::now() + config.op_deadline;
                loop {
                    match Self::attach(config, &reach, ticket, name) {
                        Err(error) if error.may_pass() && Instant::now() < until => std::thread::sleep(comeback::PAUSE),
                        done => return done,
                    }
                }
            }
        }
    }

    fn open(config: &PoolConfig, reach: &Reach, servers: &[ServerSpec], bytes: ByteLen, name: &str) -> Result<Self, ConnectError> {
        if servers.is_empty() {
            return Err(ConnectError::NoServers);
        }
        let mut pool = Self::unleased(config)?;
        for (i, server) in servers.iter().enumerate() {
            pool.add_lane(config, reach, &server.endpoint, i)?;
        }
        let mut granted: Vec<Option<Granted>> = vec![None; servers.len()];
        match pool.lease_shares(config, reach, servers, bytes, name, &mut granted) {
            Ok(()) => pool.settle(config, servers, granted),
            Err(error) => {
                // What others have granted would be nobody's for the grace time.
                for lane in (0..granted.len()).filter(|lane| granted[*lane].is_some()) {
                    let _ = pool.ask_one(config, lane, Opcode::Goodbye, 0, Vec::new());
                }
                Err(error)
            }
        }
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
        let mut wants: Vec<Want> = servers.iter().map(|s| Want { named: s.memory.map(ByteLen::pages), free: None }).collect();
        // Each round but the last learns of one server's limit.
        'shares: loop {
            let shares = share_lease(bytes.pages(), &wants).map_err(|shortage| too_little(servers, &wants, bytes, shortage))?;
            for (i, share) in shares.iter().enumerate() {
                let share = ByteLen::from_pages(*share).0;
                let refused = match &mut granted[i] {
                    Some(grant) if grant.lease_bytes == share => None,
                    Some(grant) => {
                        let reply = self.ask_one(config, i, Opcode::ResizeLease, share, Vec::new())?;
                        let refused = refusal(&self.lanes[i].name, &reply, Operation::ResizeLease)?;
                        if refused.is_none() {
                            grant.lease_bytes = share;
                        }
                        // What is free there comes on top of what this pool has already.
                        refused.map(|free| free.saturating_add(grant.lease_bytes))
                    }
                    None if share == 0 => None,
                    None => {
                        let table = OpenLease { bytes: share, pid: std::process::id(), name: cut(name), host: host_name() }.encode();
                        let reply = self.ask_one(config, i, Opcode::OpenLease, 0, table)?;
                        let refused = refusal(&self.lanes[i].name, &reply, Operation::OpenLease)?;
                        if refused.is_none() {
                            granted[i] = Some(self.grant(reach, i, &servers[i].endpoint, name, &reply, Operation::OpenLease)?);
                        }
                        refused
                    }
                };
                if let Some(free) = refused {
                    if wants[i].named.is_some() || wants[i].free.is_some_and(|known| free >= known) {
                        let server = self.lanes[i].name.clone();
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

    fn attach(config: &PoolConfig, reach: &Reach, ticket: &LeaseTicket, name: &str) -> Result<Self, ConnectError> {
        let mut pool = Self::unleased(config)?;
        for (i, part) in ticket.parts.iter().enumerate() {
            pool.add_lane(config, reach, &part.server.endpoint, i)?;
            let attach = AttachLease {
                lease: part.lease,
                token: part.token,
                member: MemberId(0),
                pid: std::process::id(),
                name: cut(name),
                host: host_name(),
            };
            let reply = pool.ask_one(config, i, Opcode::AttachLease, 0, attach.encode())?;
            if let Some(free) = refusal(&pool.lanes[i].name, &reply, Operation::AttachLease)? {
                let server = pool.lanes[i].name.clone();
                let reason = ConnectReason::Refused { wanted: part.server.memory.unwrap_or_default(), free: ByteLen(free) };
                return Err(ConnectError::Server { server, reason });
            }
            let grant = pool.grant(reach, i, &part.server.endpoint, name, &reply, Operation::AttachLease)?;
            pool.leased.push(grant.lease_bytes);
        }
        pool.placement = Placement::new(&ticket.weights(), ticket.stripe_pages)?;
        pool.ticket = ticket.clone();
        Ok(pool)
    }

    /// A pool without servers, to be filled.
    fn unleased(config: &PoolConfig) -> Result<Self, ConnectError> {
        Ok(Self {
            lanes: Vec::new(),
            work: Work::default(),
            placement: Placement::new(&[1], config.stripe_pages)?,
            regions: Vec::new(),
            ticket: LeaseTicket { stripe_pages: config.stripe_pages, parts: Vec::new() },
            leased: Vec::new(),
            open: Vec::new(),
            check_at: Instant::now(),
        })
    }

    fn add_lane(&mut self, config: &PoolConfig, reach: &Reach, endpoint: &Endpoint, index: usize) -> Result<(), ConnectError> {
        let name = endpoint.to_string();
        let refuse = |reason| ConnectError::Server { server: endpoint.to_string(), reason: ConnectReason::Link(reason) };
        let local = reach.policy(endpoint).map_err(refuse)?;
        let fail = |error| {
            let reason = match error {
                HandshakeError::TimedOut => ConnectReason::Deadline { operation: Operation::Connect, deadline: config.connect_deadline },
                broken if broken.may_pass() => ConnectReason::Broken(broken.to_string()),
                other => ConnectReason::Link(other.to_string()),
            };
            ConnectError::Server { server: name.clone(), reason }
        };
        let link = connect(endpoint, local, Instant::now() + config.connect_deadline).map_err(fail)?;
        if reach.same_host == SameHost::Rings && link.means() == Means::UnixSocket {
            return Err(refuse(
                "it shares no memory with its clients, and nothing else is wanted (same-host is `rings`); was it started with --no-rings?"
                    .into(),
            ));
        }
        let server = ServerIndex(u16::try_from(index).map_err(|_| rampool_proto::placement::PlacementError::TooManyServers(index))?);
        self.lanes.push(Lane::new(server, name, link, config.op_deadline, Instant::now()));
        self.open.push(None);
        Ok(())
    }

    /// The lane may do what its server's reply says, and come back to it.
    fn grant(
        &mut self,
        reach: &Reach,
        lane: usize,
        endpoint: &Endpoint,
        name: &str,
        reply: &Reply,
        operation: Operation,
    ) -> Result<Granted, ConnectError> {
        let lane = &mut self.lanes[lane];
        let odd = |reason| ConnectError::Server { server: lane.name.clone(), reason: ConnectReason::Lost { operation, reason } };
        let granted = Granted::parse(&reply.table).map_err(|e| odd(LostReason::Wire(e)))?;
        if granted.max_requests == 0 || (granted.max_bytes as usize) < OS_PAGE_BYTES {
            return Err(odd(LostReason::Protocol("it grants not even one page at a time".into())));
        }
        let local = reach.policy(endpoint).map_err(|error| odd(LostReason::Protocol(error)))?;
        lane.granted(&granted);
        let way = match (lane.link().map(|link| link.peer()), endpoint) {
            (Some(Peer::Tcp(address)), _) => Some(Way::Tcp(*address)),
            (_, Endpoint::Unix(path)) => Some(Way::Unix(path.clone())),
            (_, Endpoint::Tcp { .. } | Endpoint::Ucx { .. }) => None,
        };
        if let Some(way) = way {
            let attach = AttachLease {
                lease: granted.lease,
                token: granted.token,
                member: granted.member,
                pid: std::process::id(),
                name: cut(name),
                host: host_name(),
            };
            let grace = Duration::from_millis(u64::from(granted.grace_ms));
            lane.may_come_back(Place { way, local, attach, server: granted.server, grace });
        }
        Ok(granted)
    }

    /// Drops servers that were not needed and fixes the placement.
    fn settle(mut self, config: &PoolConfig, servers: &[ServerSpec], granted: Vec<Option<Granted>>) -> Result<Self, ConnectError> {
        let lanes = std::mem::take(&mut self.lanes);
        for ((mut lane, granted), spec) in lanes.into_iter().zip(granted).zip(servers) {
            let Some(granted) = granted.filter(|g| g.lease_bytes > 0) else { continue };
            lane.server = ServerIndex(u16::try_from(self.lanes.len()).expect("no more than were named"));
            let endpoint = match (lane.link().map(|link| link.peer()), &spec.endpoint) {
                (Some(Peer::Tcp(address)), Endpoint::Ucx { .. }) => Endpoint::Ucx { host: address.ip().to_string(), port: address.port() },
                (Some(Peer::Tcp(address)), _) => Endpoint::Tcp { host: address.ip().to_string(), port: address.port() },
                _ => spec.endpoint.clone(),
            };
            let server = ServerSpec { endpoint, memory: Some(ByteLen(granted.lease_bytes)) };
            self.ticket.parts.push(LeasePart { server, lease: granted.lease, token: granted.token });
            self.leased.push(granted.lease_bytes);
            self.lanes.push(lane);
        }
        self.open.truncate(self.lanes.len());
        self.placement = Placement::new(&self.ticket.weights(), config.stripe_pages)?;
        Ok(self)
    }

    /// What another process needs to become a member of this pool's lease ([`PoolConfig::attach`]).
    #[must_use]
    pub fn lease_ticket(&self) -> LeaseTicket {
        self.ticket.clone()
    }

    /// Who this pool is at its servers.
    #[must_use]
    pub fn membership(&self) -> Membership {
        Membership { members: self.lanes.iter().map(|lane| lane.member).collect() }
    }

    /// Says goodbye for another member of the lease, whose process is gone: its regions are freed at once instead of after the grace time. A member
    /// that has left, or never was, is no error. Does not block, and brings no event.
    pub fn dismiss(&mut self, member: &Membership) {
        let now = Instant::now();
        for (lane, member) in self.lanes.iter_mut().zip(&member.members) {
            let slot = self.work.request(lane.server, Opcode::Goodbye, Class::Demand, RegionId(0), None, now);
            self.work.get(slot).arg = member.0;
            lane.enqueue(&mut self.work, slot);
            lane.send(&mut self.work, now);
        }
    }

    /// What another member of the lease needs to take this region over ([`Pool::adopt_region`]).
    ///
    /// # Errors
    /// [`PoolError::NoSuchRegion`].
    pub fn region_ticket(&self, region: PoolRegion) -> Result<RegionTicket, PoolError> {
        Ok(RegionTicket { regions: self.names(region)?.to_vec() })
    }

    /// Makes an empty region, on every server. Blocks until all have answered.
    ///
    /// # Errors
    /// [`PoolError`]; parts made on some servers are given back.
    pub fn create_region(&mut self) -> Result<PoolRegion, PoolError> {
        let nothing = vec![RegionId(0); self.lanes.len()];
        self.new_region(Opcode::CreateRegion, &nothing)
    }

    /// Makes a region that holds what `region` holds now; both change independently from here on. Costs the servers time by the number of
    /// 2 MiB chunks in use, not by bytes. What was stored or discarded before is so in the copy, too. Blocks until all servers have answered that, and this.
    ///
    /// # Errors
    /// [`PoolError`]; parts made on some servers are given back.
    pub fn clone_region(&mut self, region: PoolRegion) -> Result<PoolRegion, PoolError> {
        let names = self.names(region)?.to_vec();
        self.finish_write_backs(Operation::CloneRegion)?;
        self.new_region(Opcode::CloneRegion, &names)
    }

    /// Takes over a region of another member of the same lease, which must not use it any more. Blocks until all servers have answered.
    ///
    /// # Errors
    /// [`PoolError`]; the region may then belong to either member in parts.
    pub fn adopt_region(&mut self, ticket: &RegionTicket) -> Result<PoolRegion, PoolError> {
        if ticket.regions.len() != self.lanes.len() {
            return Err(PoolError::NoSuchRegion);
        }
        let replies = self.ask_all(Opcode::AdoptRegion, &ticket.regions, &vec![0; self.lanes.len()], &[])?;
        self.each_ok(&replies, Operation::AdoptRegion)?;
        Ok(self.remember(ticket.regions.clone()))
    }

    /// Gives a region back with all its pages. Does not block and always succeeds here; fetches and stores of it that are still under way fail.
    pub fn free_region(&mut self, region: PoolRegion) {
        // That of a queue's bodies goes with the queue.
        let freed = self.regions.get_mut(region.0 as usize).and_then(|names| names.take_if(|names| names.only.is_none()));
        let Some(names) = freed else { return };
        let now = Instant::now();
        self.give_back(names.ids.iter().map(|name| Some(*name)), now);
    }

    fn give_back(&mut self, names: impl Iterator<Item = Option<RegionId>>, now: Instant) {
        for (lane, name) in self.lanes.iter_mut().zip(names) {
            let Some(name) = name else { continue };
            // Behind the stores and discards that were made before.
            let slot = self.work.request(lane.server, Opcode::FreeRegion, Class::WriteBack, name, None, now);
            lane.enqueue(&mut self.work, slot);
            lane.send(&mut self.work, now);
        }
    }

    /// Changes the lease to `bytes` over all servers, in the proportions in which pages are placed. Blocks until all servers have answered.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where a server lacks the room; the lease is then as before.
    pub fn resize_lease(&mut self, bytes: ByteLen) -> Result<(), PoolError> {
        let shares: Vec<u64> =
            apportion(bytes.pages(), &self.ticket.weights()).into_iter().map(|pages| ByteLen::from_pages(pages).0).collect();
        let nothing = vec![RegionId(0); self.lanes.len()];
        let replies = self.ask_all(Opcode::ResizeLease, &nothing, &shares, &[])?;
        let Err(error) = self.each_ok(&replies, Operation::ResizeLease) else {
            self.leased = shares;
            return Ok(());
        };
        // Whoever agreed goes back; that is always possible for a server that grew, and was possible a moment ago for one that shrank.
        let before = self.leased.clone();
        let replies = self.ask_all(Opcode::ResizeLease, &nothing, &before, &[])?;
        self.each_ok(&replies, Operation::ResizeLease)?;
        Err(match error {
            PoolError::Refused { server, free, .. } => PoolError::Refused { server, wanted: bytes, free },
            other => other,
        })
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

    /// Asks for the pages of `extents`, in that order, into `dst`: ends in [`PoolEvent::Fetched`] with `token`, or in an event that says why not.
    /// Does not block. `demand`: a thread waits; goes before everything else and leaves at once if credits last. Pages that were never stored, or
    /// were discarded, come as zeroes. A page whose store has not ended must not be asked for.
    ///
    /// # Safety
    /// `dst` is writable memory of 4096 bytes for each page, used by nobody else until the operation's event has been returned by
    /// [`Pool::poll`] or the pool was dropped.
    ///
    /// # Panics
    /// If the region was freed or never existed, or a page is beyond the end of a region (2^40 pages).
    pub unsafe fn fetch(&mut self, region: PoolRegion, token: u64, extents: &[Extent], dst: *mut u8, demand: bool) {
        let class = if demand { Class::Demand } else { Class::Prefetch };
        let mut memory = dst;
        let pieces = extents.iter().map(|extent| {
            let of_extent = memory;
            memory = memory.wrapping_add(extent.count as usize * OS_PAGE_BYTES);
            (*extent, of_extent)
        });
        self.submit(region, token, Opcode::Get, class, GET_PAGES, pieces);
    }

    /// Sends pages to their servers: each extent with the memory its pages lie in. Ends in [`PoolEvent::Stored`] with `token`, or in an event that says why
    /// not. Does not block; leaves with the next [`Pool::poll`]. Stores and discards of a page take effect in the order in which they were made.
    ///
    /// # Safety
    /// The memory is readable, 4096 bytes for each page, and its bytes do not change until the operation's event has been returned by
    /// [`Pool::poll`] or the pool was dropped.
    ///
    /// # Panics
    /// As [`Pool::fetch`].
    pub unsafe fn store(&mut self, region: PoolRegion, token: u64, pages: &[(Extent, *const u8)]) {
        let pieces = pages.iter().map(|(extent, memory)| (*extent, memory.cast_mut()));
        self.submit(region, token, Opcode::Put, Class::WriteBack, PUT_PAGES, pieces);
    }

    /// Tells the servers that they may forget these pages; they read as zero from then on. Does not block, and brings no event.
    ///
    /// # Panics
    /// As [`Pool::fetch`].
    pub fn discard(&mut self, region: PoolRegion, extent: Extent) {
        let names = names(&self.regions, region);
        if extent.count == 0 {
            return;
        }
        check_range(extent);
        let (now, servers) = (Instant::now(), self.lanes.len());
        let whole = u64::from(extent.count) <= u64::from(self.placement.stripe_pages());
        let mut add = |lane: usize, extent| {
            let slot = self.work.request(self.lanes[lane].server, Opcode::Discard, Class::WriteBack, names[lane], None, now);
            let request = self.work.get(slot);
            request.extents.push(extent);
            request.pages = extent.count;
            self.lanes[lane].enqueue(&mut self.work, slot);
        };
        if whole {
            for (server, piece) in self.placement.split(extent) {
                add(server.as_usize(), piece);
            }
        } else {
            // One request for each server instead of one for each stripe: pages it does not hold are nothing to it.
            for lane in 0..servers {
                add(lane, extent);
            }
        }
    }

    /// Does what input and output is possible without blocking and returns the next event; `None` when there is nothing more for now.
    pub fn poll(&mut self) -> Option<PoolEvent> {
        self.ready().or_else(|| self.look(Instant::now()))
    }

    /// The next event that is known already.
    pub(crate) fn ready(&mut self) -> Option<PoolEvent> {
        self.work.events.pop_front()
    }

    /// As [`Pool::poll`], for who has just read the clock, and has been given the events that were known.
    pub(crate) fn look(&mut self, now: Instant) -> Option<PoolEvent> {
        self.step(now);
        self.work.events.pop_front()
    }

    /// Appends the sockets to sleep on once [`Pool::poll`] has returned `None`. To be called anew before each sleep, and the sleep to follow at once: what shall
    /// wake this thread is agreed on here.
    pub fn poll_fds(&self, out: &mut Vec<libc::pollfd>) {
        for lane in &self.lanes {
            if let Some((fd, write)) = lane.watched() {
                let events = if write { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
                out.push(libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 });
            }
        }
    }

    /// When [`Pool::poll`] must be called again at the latest, whatever the sockets do; perhaps in the past.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let now = Instant::now();
        self.lanes.iter().filter_map(|lane| lane.next_deadline(now)).min()
    }

    /// Waits for the next event, at most until `deadline`. Blocks; for threads that have nothing else to watch.
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
        self.lanes.iter().map(|lane| lane.name.as_str())
    }

    /// The server that holds a page.
    #[must_use]
    pub fn holder(&self, page: PageIndex) -> ServerIndex {
        self.placement.holder(page)
    }

    /// Fetches and stores that have not ended.
    #[must_use]
    pub fn operations_under_way(&self) -> usize {
        self.work.ops_under_way()
    }

    /// What a pager cannot count itself.
    pub(crate) fn report(&self, to: &PagerStats) {
        let lanes = || self.lanes.iter().map(|lane| &lane.stats);
        let bytes = |of: fn(&stats::LaneStats) -> u64| lanes().map(of).sum();
        to.pool(bytes(|lane| lane.received_bytes), bytes(|lane| lane.sent_bytes), lanes().map(|lane| lane.latency.by_powers()));
    }

    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let servers = self.lanes.iter().zip(&self.leased).map(|(lane, lease_bytes)| {
            let (queued, outstanding, outstanding_bytes) = lane.load();
            let counted = lane.stats.clone();
            ServerStats {
                name: lane.name.clone(),
                alive: lane.lost_reason().is_none(),
                means: lane.link().map(Link::means),
                lease_bytes: *lease_bytes,
                requests: counted.requests,
                fetched_pages: counted.fetched_pages,
                stored_pages: counted.stored_pages,
                sent_bytes: counted.sent_bytes,
                received_bytes: counted.received_bytes,
                refused: counted.refused,
                damaged: counted.damaged,
                comebacks: counted.comebacks,
                queued,
                outstanding,
                outstanding_bytes,
                latency: counted.latency,
            }
        });
        PoolStats { servers: servers.collect() }
    }

    /// Leaves the servers: this member's regions are freed at once instead of after the grace time. Use the pool for nothing after that. Blocks
    /// a second at most. A pool that is merely dropped closes its connections and nothing else, as befits a copy of it in a forked child.
    pub fn leave(&mut self) {
        let deadline = Instant::now() + LEAVE_DEADLINE;
        self.lanes.iter_mut().for_each(Lane::stay_away);
        let nothing = vec![RegionId(0); self.lanes.len()];
        let ids = self.start(Opcode::Goodbye, &nothing, &vec![0; self.lanes.len()], &[]);
        while Instant::now() < deadline && ids.iter().flatten().any(|id| self.work.find(*id).is_some()) {
            self.step(Instant::now());
            // A socket that cannot be watched ends the courtesy, no more.
            if self.sleep(deadline).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, now: Instant) {
        for lane in &mut self.lanes {
            lane.receive(&mut self.work, now);
            lane.send(&mut self.work, now);
        }
        if now >= self.check_at {
            self.check_at = now + CHECK_EVERY;
            for lane in &mut self.lanes {
                lane.check_time(&mut self.work, now);
            }
        }
    }

    fn sleep(&self, deadline: Instant) -> io::Result<()> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let until = self.next_deadline().map_or(deadline, |due| due.min(deadline));
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX), tv_nsec: left.subsec_nanos().into() };
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(self.lanes.len());
        for lane in &self.lanes {
            if let Some((fd, write)) = lane.watched() {
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
        let names = names(&self.regions, region);
        let now = Instant::now();
        let op = self.work.op(token, opcode == Opcode::Put);
        for (extent, memory) in pieces {
            if extent.count == 0 {
                continue;
            }
            check_range(extent);
            let mut memory = memory;
            for (server, mut piece) in self.placement.split(extent) {
                let lane = &mut self.lanes[server.as_usize()];
                let open = &mut self.open[server.as_usize()];
                let limit = lane.max_pages(limit);
                while piece.count > 0 {
                    let slot =
                        *open.get_or_insert_with(|| self.work.request(server, opcode, class, names[server.as_usize()], Some(op), now));
                    let request = self.work.get(slot);
                    let pages = piece.count.min(limit - request.pages);
                    request.extents.push(Extent::new(piece.first, pages));
                    request.memory.push(memory);
                    request.pages += pages;
                    memory = memory.wrapping_add(pages as usize * OS_PAGE_BYTES);
                    piece = Extent::new(piece.first.offset(u64::from(pages)), piece.count - pages);
                    if request.pages == limit {
                        lane.enqueue(&mut self.work, slot);
                        *open = None;
                    }
                }
            }
        }
        for (lane, open) in self.lanes.iter_mut().zip(&mut self.open) {
            if let Some(slot) = open.take() {
                lane.enqueue(&mut self.work, slot);
            }
            if class == Class::Demand {
                lane.send(&mut self.work, now);
            }
        }
        self.work.built(op);
    }

    fn names(&self, region: PoolRegion) -> Result<&[RegionId], PoolError> {
        self.regions.get(region.0 as usize).and_then(Option::as_ref).map(|names| &names.ids[..]).ok_or(PoolError::NoSuchRegion)
    }

    fn remember(&mut self, ids: Vec<RegionId>) -> PoolRegion {
        self.remember_names(Names { ids, only: None })
    }

    fn remember_names(&mut self, names: Names) -> PoolRegion {
        self.regions.push(Some(names));
        PoolRegion(u32::try_from(self.regions.len() - 1).expect("fewer than four billion regions in a process's life"))
    }

    fn new_region(&mut self, opcode: Opcode, from: &[RegionId]) -> Result<PoolRegion, PoolError> {
        let operation = if opcode == Opcode::CloneRegion { Operation::CloneRegion } else { Operation::CreateRegion };
        let replies = self.ask_all(opcode, from, &vec![0; self.lanes.len()], &[])?;
        if let Err(error) = self.each_ok(&replies, operation) {
            let made: Vec<_> = replies.iter().map(|r| r.as_ref().ok().filter(|r| r.status == Status::Ok).map(|r| r.region)).collect();
            self.give_back(made.into_iter(), Instant::now());
            return Err(error);
        }
        let names = replies.into_iter().filter_map(|r| Some(r.ok()?.region)).collect();
        Ok(self.remember(names))
    }

    /// Queues one control request to every server; the numbers of those whose answers can be waited for.
    fn start(&mut self, opcode: Opcode, regions: &[RegionId], args: &[u64], table: &[u8]) -> Vec<Option<u64>> {
        let now = Instant::now();
        let mut ids = Vec::with_capacity(self.lanes.len());
        for (lane, (region, arg)) in self.lanes.iter_mut().zip(regions.iter().zip(args)) {
            if lane.lost_reason().is_some() {
                ids.push(None);
                continue;
            }
            let slot = self.work.request(lane.server, opcode, Class::Demand, *region, None, now);
            let request = self.work.get(slot);
            request.arg = *arg;
            request.table.extend_from_slice(table);
            request.wanted = true;
            ids.push(Some(self.work.id(slot)));
            lane.enqueue(&mut self.work, slot);
        }
        ids
    }

    /// One control request to every server; returns when each has answered or is lost, which takes one deadline at most (a server that sends other
    /// things meanwhile: a few).
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
            for (lane, (id, reply)) in ids.iter().zip(&mut replies).enumerate() {
                if reply.is_some() {
                    continue;
                }
                if let Some(answer) = id.and_then(|id| self.work.take_reply(id)) {
                    *reply = Some(Ok(answer));
                } else if let Some(reason) = self.lanes[lane].lost_reason() {
                    *reply = Some(Err(lost(&self.lanes[lane].name, operation_of(opcode), reason)));
                }
            }
            if replies.iter().all(Option::is_some) {
                return Ok(replies.into_iter().flatten().collect());
            }
            self.sleep_or_fail(operation_of(opcode))?;
        }
    }

    /// Waits until the servers that live have answered all stores and discards, which control requests overtake.
    fn finish_write_backs(&mut self, operation: Operation) -> Result<(), PoolError> {
        loop {
            self.step(Instant::now());
            if self.lanes.iter().all(|lane| lane.lost_reason().is_some() || !lane.has_write_backs(&mut self.work)) {
                return Ok(());
            }
            self.sleep_or_fail(operation)?;
        }
    }

    fn sleep_or_fail(&self, operation: Operation) -> Result<(), PoolError> {
        self.sleep(Instant::now() + Duration::from_secs(1)).map_err(|error| {
            // Sockets that cannot be watched are of no use; what is wrong with them is the same for all.
            lost(&self.lanes[0].name, operation, &LostReason::Io(error.to_string()))
        })
    }

    /// One control request to one server, while the pool is being made.
    fn ask_one(&mut self, config: &PoolConfig, lane: usize, opcode: Opcode, arg: u64, table: Vec<u8>) -> Result<Reply, ConnectError> {
        let deadline = Instant::now() + config.connect_deadline;
        let operation = operation_of(opcode);
        let server = self.lanes[lane].server;
        let slot = self.work.request(server, opcode, Class::Demand, RegionId(0), None, Instant::now());
        let request = self.work.get(slot);
        request.arg = arg;
        request.table = table;
        request.wanted = true;
        let id = self.work.id(slot);
        self.lanes[lane].enqueue(&mut self.work, slot);
        loop {
            let now = Instant::now();
            self.step(now);
            if let Some(reply) = self.work.take_reply(id) {
                return Ok(reply);
            }
            let fail = |reason| Err(ConnectError::Server { server: self.lanes[lane].name.clone(), reason });
            if let Some(reason) = self.lanes[lane].lost_reason() {
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

    /// The first error among the replies of all servers.
    fn each_ok(&self, replies: &[Result<Reply, PoolError>], operation: Operation) -> Result<(), PoolError> {
        for (lane, reply) in self.lanes.iter().zip(replies) {
            let reply = reply.as_ref().map_err(Clone::clone)?;
            let server = lane.name.clone();
            match reply.status {
                Status::Ok => {}
                Status::LeaseRefused => return Err(PoolError::Refused { server, wanted: ByteLen(0), free: ByteLen(reply.arg) }),
                Status::MemberGone | Status::NoSuchLease => return Err(lost(&server, operation, &LostReason::GivenUp)),
                _ => return Err(PoolError::Denied { server, operation, message: message_of(reply) }),
            }
        }
        Ok(())
    }
}

/// The region's name on every server. Panics for a region that is not there: whoever submits pages keeps track of regions.
fn names(regions: &[Option<Names>], region: PoolRegion) -> &[RegionId] {
    &entry(regions, region).ids
}

fn entry(regions: &[Option<Names>], region: PoolRegion) -> &Names {
    regions.get(region.0 as usize).and_then(Option::as_ref).expect("pages of a region that was freed or never existed")
}

fn check_range(extent: Extent) {
    assert!(extent.first.0 < MAX_PAGE_INDEX && extent.end().0 <= MAX_PAGE_INDEX, "{} is beyond the end of a region", extent.first);
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
        Opcode::OpenRegion => Operation::OpenRegion,
        Opcode::OpenQueue => Operation::OpenQueue,
        Opcode::FreeQueue => Operation::FreeQueue,
        Opcode::ListQueues => Operation::ListQueues,
        Opcode::Push | Opcode::PushHeads => Operation::Push,
        Opcode::Take => Operation::Take,
        Opcode::Settle => Operation::Settle,
        Opcode::AwaitBody => Operation::AwaitBody,
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
        _ => {
            Err(ConnectError::Server { server: server.to_owned(), reason: ConnectReason::Denied { operation, message: message_of(reply) } })
        }
    }
}

fn too_little(servers: &[ServerSpec], wants: &[Want], wanted: ByteLen, shortage: Shortage) -> ConnectError {
    let free: Vec<String> = servers
        .iter()
        .zip(wants)
        .filter_map(|(server, want)| Some(format!("{} has {} free", server.endpoint, ByteLen::from_pages(want.free?))))
        .collect();
    let free = if free.is_empty() { "each was asked for the amount named with it".into() } else { free.join(", ") };
    ConnectError::TooLittle { wanted, missing: ByteLen::from_pages(shortage.missing), free }
}

fn cut(name: &str) -> String {
    let mut end = name.len().min(MAX_NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].to_owned()
}

/// This machine's name, for people who look at a server.
fn host_name() -> String {
    cut(&rustix::system::uname().nodename().to_string_lossy())
}

#[cfg(test)]
mod tests;
