//! Copies from this server to another, without the client in between (DIMMnet-3's VCOPY, and from layout to
//! layout, VDDC).
//!
//! Each lease whose members order copies has a copy worker, a thread that carries them out. A server that
//! hangs delays only the leases that copy to it. The worker joins the other server's lease with the token
//! that the client has for it, and writes as any member does. It leaves when it was idle for a while, when
//! the client's lease here ends, or when the other server stops; until then the connection stays, because a
//! new connection is slow at first. A worker without connections ends. It reads under the lease's lock, one
//! request at a time; several requests are in flight at once, and completions are passed to the shards in
//! batches.
//!
//! **Once.** A copy is made once, also when its client orders it again because its connection broke before
//! the reply. The lease remembers copies that have ended, as it does updates; a copy in flight answers over
//! the new connection. When the connection to the other server breaks, the worker reconnects as the same
//! member and resends what is unanswered under the same numbers, by which that server knows what it has
//! already stored.
//! A server without a key only connects to addresses of its own machine, since it is only reachable from
//! there.

use super::collect::Gathered;
use super::held::Held;
use super::lease::{Delivered, Duty, Order};
use super::lock::lock;
use super::refused::Refused;
use super::shared::Shared;
use super::slice::Slice;
use rampool_net::blocks::block_crcs;
use rampool_net::transport::{Endpoint, Link, LocalPolicy, Received, Urgency, connect};
use rampool_wire::frame::{
    AttachLease, CopyRequest, Granted, Header, LeaseId, MemberId, Opcode, RegionId, Status, encode_frame,
    parse_message,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The longest sleep: stopping is noticed within this time.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);
/// Less than clients wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(4);
/// How long a connection that is not used stays.
const IDLE: Duration = Duration::from_secs(5);
/// How long a server that did not answer is not tried again: copies to it fail at once.
const DOWN: Duration = Duration::from_secs(5);
/// What a client is told when no connection is established, for any reason.
const NO_SERVER: &str = "no server of this pool can be reached there; the log of this one says more";
const FAR: &str = "a server without a key copies to its own machine only";
/// Copies of a lease on their way at a time, and bytes of them, unless it is one.
const AT_ONCE: usize = 32;
const BYTES_AT_ONCE: u64 = 4 << 20;

/// The connection to another server's lease.
struct TargetServer {
    link: Link<Held>,
    /// This server's membership there.
    member: MemberId,
    next: u64,
    used: Instant,
    /// The other server has said that it stops.
    draining: bool,
    /// Orders whose bytes are on their way.
    waiting: BTreeMap<u64, Order>,
}

#[derive(Default)]
struct Ways {
    open: BTreeMap<(String, LeaseId), TargetServer>,
    /// Servers that did not answer, since when, and why.
    down: BTreeMap<String, (Instant, String)>,
    /// Shards whose doorbell must ring.
    told: BTreeSet<usize>,
}

impl TargetServer {
    fn bytes(&self) -> u64 {
        self.waiting.values().map(|order| u64::from(order.copy.source.len)).sum()
    }

    /// Whether at most half of the window is in flight.
    fn has_room(&self) -> bool {
        self.waiting.len() <= AT_ONCE / 2 && self.bytes() <= BYTES_AT_ONCE / 2
    }
}

impl Ways {
    /// Whether one more copy may be sent.
    fn have_room_for(&self, order: &Order) -> bool {
        let count: usize = self.open.values().map(|way| way.waiting.len()).sum();
        let bytes: u64 = self.open.values().map(TargetServer::bytes).sum();
        count == 0 || (count < AT_ONCE && bytes + u64::from(order.copy.source.len) <= BYTES_AT_ONCE)
    }

    fn are_idle(&self) -> bool {
        self.open.values().all(|way| way.waiting.is_empty())
    }
}

/// Starts copy workers, until the server stops and they have ended.
pub(super) fn run(shared: &Shared, duties: &Receiver<Duty>) {
    std::thread::scope(|scope| {
        while !shared.stopping() {
            let duty = match duties.recv_timeout(LONGEST_SLEEP) {
                Ok(duty) => Arc::new(Mutex::new(duty)),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let begun = std::thread::Builder::new().name("rampool-copies".to_owned()).spawn_scoped(scope, {
                let duty = Arc::clone(&duty);
                move || {
                    let _alarm = Alarm(shared);
                    carry(shared, &lock(&duty));
                }
            });
            if let Err(error) = begun {
                tracing::warn!(%error, "cannot start a thread that copies to other servers");
                refuse_all(shared, &lock(&duty), &error.to_string());
            }
        }
    });
}

/// Reports a copy worker that panics.
struct Alarm<'a>(&'a Shared);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.copy_worker_died.store(true, Ordering::Relaxed);
        }
    }
}

/// The copy worker could not be started.
fn refuse_all(shared: &Shared, Duty { lease, orders }: &Duty, message: &str) {
    let mut told = BTreeSet::new();
    while let Some(order) = lease.copy_table.close(orders) {
        tell(
            shared,
            &mut told,
            order,
            Err(Refused::new(Status::LimitReached, format!("cannot start a thread for the copy: {message}"))),
        );
    }
    told.into_iter().for_each(|shard| shared.shards[shard].ring());
}

/// The work of one copy worker.
fn carry(shared: &Shared, Duty { lease, orders }: &Duty) {
    let mut ways = Ways::default();
    let mut next = None;
    while !shared.stopping() {
        if next.is_none() && ways.are_idle() {
            match orders.recv_timeout(LONGEST_SLEEP) {
                Ok(order) => next = Some(order),
                Err(RecvTimeoutError::Timeout) if ways.open.is_empty() && ways.down.is_empty() => {
                    next = lease.copy_table.close(orders);
                    if next.is_none() {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        while let Some(order) = next.take().or_else(|| orders.try_recv().ok()) {
            if !ways.have_room_for(&order) {
                next = Some(order);
                break;
            }
            send_off(shared, &mut ways, order);
        }
        let now = Instant::now();
        let Ways { open, down, told } = &mut ways;
        down.retain(|_, (since, _)| now.duration_since(*since) < DOWN);
        open.retain(|(name, _), way| {
            if way.waiting.is_empty() {
                let stays = now.duration_since(way.used) < IDLE
                    && shared.lease(lease.id).is_some()
                    && !way.draining
                    && is_quiet(way);
                if !stays {
                    way.link.send_head(
                        Urgency::Demand,
                        &Header::request(Opcode::Goodbye, u64::MAX).encode(),
                        Held::nothing(),
                    );
                    // If the goodbye is lost, the grace time ends the membership.
                    let _ = way.link.flush();
                }
                return stays;
            }
            let deadline = Instant::now() + TIMEOUT;
            let more = next.is_some();
            let collected = collect(shared, way, more, told, deadline).or_else(|message| {
                if shared.may_log("the connection to another server broke", None) {
                    tracing::info!(peer = name, message, "the connection to another server broke");
                }
                come_back(shared, way, told, deadline)?;
                collect(shared, way, more, told, deadline)
            });
            if let Err(message) = collected {
                fail(shared, way, name, told, &message);
                down.insert(name.clone(), (Instant::now(), message));
                return false;
            }
            true
        });
        for shard in std::mem::take(told) {
            shared.shards[shard].ring();
        }
    }
}

/// Leaves a completion for the shard of an order, which reads it when its doorbell rings.
fn tell(shared: &Shared, told: &mut BTreeSet<usize>, order: Order, result: Result<u64, Refused>) {
    lock(&shared.shards[order.shard].delivered).push(Delivered {
        token: order.token,
        header: order.header,
        result,
    });
    told.insert(order.shard);
}

/// Whether an idle connection is still usable: anything that arrives there says that the other server stops,
/// or is gone.
fn is_quiet(way: &mut TargetServer) -> bool {
    matches!(way.link.receive(), Ok(Received::Blocked))
}

fn lost(name: &str, message: &str) -> Refused {
    Refused::new(Status::PeerLost, format!("memory server {name}: {message}"))
}

fn fail(shared: &Shared, way: &mut TargetServer, name: &str, told: &mut BTreeSet<usize>, message: &str) {
    shared.log_peer_error("copies to another server failed", None, &format_args!("{name}: {message}"));
    for order in std::mem::take(&mut way.waiting).into_values() {
        tell(shared, told, order, Err(lost(name, message)));
    }
}

/// Reads the bytes to copy and sends them, unless the copy was ordered before.
fn send_off(shared: &Shared, ways: &mut Ways, order: Order) {
    let twin =
        |other: &&mut Order| (other.member, other.header.request) == (order.member, order.header.request);
    if let Some(under_way) = ways.open.values_mut().flat_map(|way| way.waiting.values_mut()).find(twin) {
        // The client that ordered it before has reconnected with this connection.
        *under_way = order;
        return;
    }
    let admitted = {
        let space = order.lease.space();
        space
            .admit(order.member, order.connection)
            .map(|()| space.answered(order.member, order.header.request))
    };
    match admitted {
        Ok(None) => {}
        Ok(Some(answer)) => return tell(shared, &mut ways.told, order, Ok(answer)),
        Err(error) => return tell(shared, &mut ways.told, order, Err(error.into())),
    }
    let key = (order.copy.endpoint.clone(), order.copy.lease);
    if !ways.open.contains_key(&key) {
        let gone = match ways.down.get(&key.0) {
            Some((_, message)) => Err(message.clone()),
            None => go(shared, &order, MemberId(0), Instant::now() + TIMEOUT).inspect_err(|message| {
                _ = ways.down.insert(key.0.clone(), (Instant::now(), message.clone()))
            }),
        };
        match gone {
            Ok((link, member, draining)) => {
                let way = TargetServer {
                    link,
                    member,
                    next: 0,
                    used: Instant::now(),
                    draining,
                    waiting: BTreeMap::new(),
                };
                _ = ways.open.insert(key.clone(), way);
            }
            Err(message) => {
                let refused = lost(&order.copy.endpoint, &message);
                return tell(shared, &mut ways.told, order, Err(refused));
            }
        }
    }
    let way = ways.open.get_mut(&key).expect("there is a way now");
    way.next += 1;
    way.used = Instant::now();
    let number = way.next;
    match send(shared, way, &order, number) {
        Ok(()) => _ = way.waiting.insert(number, order),
        Err(refused) => tell(shared, &mut ways.told, order, Err(refused)),
    }
}

/// Sends the bytes of a copy as the request of this number.
fn send(shared: &Shared, way: &mut TargetServer, order: &Order, number: u64) -> Result<(), Refused> {
    let (gathered, held) = read(shared, order)?;
    // SAFETY: frames and buffer are held; a held frame is not written.
    let crcs = unsafe { crcs_there(&order.copy, &gathered) };
    let (mut table, mut head) = (Vec::new(), Vec::new());
    order.copy.target.encode_with(&crcs, &mut table);
    let header = Header::request(Opcode::Scatter, number).with_region(order.copy.region);
    encode_frame(&mut head, header, &table, order.copy.target.len as usize);
    // SAFETY: the guard keeps the buffer and a reference to every frame until the frame has left.
    unsafe { way.link.send(Urgency::Demand, &head, &gathered.pieces, held) };
    // What cannot be sent now is sent when answers are collected.
    let _ = way.link.flush();
    Ok(())
}

/// The connection broke: reconnects as the same member, and resends what is unanswered. An error if the other
/// server is gone, or does not know this one any more.
fn come_back(
    shared: &Shared,
    way: &mut TargetServer,
    told: &mut BTreeSet<usize>,
    deadline: Instant,
) -> Result<(), String> {
    let Some(first) = way.waiting.values().next() else { return Err("the connection broke".to_owned()) };
    (way.link, way.member, way.draining) = go(shared, first, way.member, deadline)?;
    for (number, order) in std::mem::take(&mut way.waiting) {
        // Its bytes are read again: if the first ones were entered there, these are not.
        match send(shared, way, &order, number) {
            Ok(()) => _ = way.waiting.insert(number, order),
            Err(refused) => tell(shared, told, order, Err(refused)),
        }
    }
    Ok(())
}

/// The bytes to copy. With an error, nothing is held.
fn read(shared: &Shared, order: &Order) -> Result<(Gathered, Held), Refused> {
    let mut gathered = Gathered::default();
    let mut collect = || {
        let mut slice = Slice::default();
        let began = Instant::now();
        let space = order.lease.space();
        let mut view = space.view(order.member, RegionId(order.header.region))?;
        let all = gathered.collect(shared, order.shard, &mut view, &order.copy.source, &mut slice);
        order.lease.tenant.worked(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        all
    };
    // Between two slices others have the lease.
    let result: Result<(), Refused> = loop {
        match collect() {
            Ok(true) => break Ok(()),
            Ok(false) => {}
            Err(refused) => break Err(refused),
        }
    };
    // The buffer's bytes do not move with it.
    let held = Held::frames_and_bytes(&shared.store, &gathered.frames, std::mem::take(&mut gathered.buffer));
    result.map(|()| (gathered, held))
}

/// The checksums of the target's blocks: those of the source where both are cut alike, so that a page keeps
/// the one that was made when it was stored.
///
/// # Safety
/// The pieces are readable memory that is not written.
unsafe fn crcs_there(copy: &CopyRequest, gathered: &Gathered) -> Vec<u32> {
    let blocks = copy.target.blocks();
    if blocks == copy.source.blocks() {
        return gathered.crcs.clone();
    }
    let mut crcs = Vec::with_capacity(blocks.len());
    // SAFETY: the caller's promise; source and target select as many bytes.
    unsafe { block_crcs(&blocks, &gathered.pieces, |crc| crcs.push(crc)) };
    crcs
}

/// Connects to the other server and joins the lease there, as this member (0: a new one). The link, the
/// member it speaks for, and whether that server stops.
fn go(
    shared: &Shared,
    order: &Order,
    member: MemberId,
    deadline: Instant,
) -> Result<(Link<Held>, MemberId, bool), String> {
    let (config, copy) = (&shared.config, &order.copy);
    let endpoint: Endpoint = copy.endpoint.parse().map_err(|error| format!("{error}"))?;
    let may_go = if config.copy_to.is_empty() {
        matches!(endpoint, Endpoint::Tcp { .. })
    } else {
        config.copy_to.contains(&endpoint)
    };
    if !may_go {
        return Err("this server does not copy there (--copy-to names where it does)".to_owned());
    }
    // As the tenant whose lease it is: this server can be any, and is none for others' leases.
    let key = config.key.as_ref().and_then(|key| key.towards(order.identity));
    let local = LocalPolicy { key, encryption: config.encryption, features: 0, ucx: None };
    let is_local = || config.key.is_some() || endpoint.is_local().unwrap_or(false);
    let reached = if is_local() {
        connect::<Held>(&endpoint, local, deadline).map_err(|error| error.to_string())
    } else {
        Err(FAR.to_owned())
    };
    // A client that can make this server connect anywhere learns no more about that address.
    let mut link = reached.map_err(|error| {
        shared.log_peer_error("cannot copy to another server", None, &format_args!("{endpoint}: {error}"));
        NO_SERVER
    })?;
    let attach = AttachLease {
        lease: copy.lease,
        token: copy.token,
        member,
        pid: std::process::id(),
        name: "copy from another server".to_owned(),
        host: String::new(),
    };
    let mut head = Vec::new();
    encode_frame(&mut head, Header::request(Opcode::AttachLease, 0), &attach.encode(), 0);
    link.send_head(Urgency::Demand, &head, Held::nothing());
    let mut draining = false;
    let (header, table) = reply(&mut link, &mut draining, Some(deadline))?.ok_or("no answer")?;
    if header.status != Status::Ok {
        return Err(parse_message(&table));
    }
    let granted = Granted::parse(&table).map_err(|error| error.to_string())?;
    Ok((link, granted.member, draining))
}

/// Waits for an answer or, with `more` to send, for room; takes all answers that have arrived by then.
fn collect(
    shared: &Shared,
    way: &mut TargetServer,
    more: bool,
    told: &mut BTreeSet<usize>,
    deadline: Instant,
) -> Result<(), String> {
    let before = way.waiting.len();
    while !way.waiting.is_empty() {
        let enough = way.waiting.len() < before && (!more || way.has_room());
        let Some((header, table)) = reply(&mut way.link, &mut way.draining, (!enough).then_some(deadline))?
        else {
            return Ok(());
        };
        let order = way.waiting.remove(&header.request).ok_or("it answers a request that was not sent")?;
        let result = if header.status == Status::Ok {
            order.lease.space().remember(order.member, order.header.request, 0);
            Ok(0)
        } else {
            // For the client, the server without room or without such a region is the other one.
            Err(Refused {
                status: header.status,
                arg: header.arg,
                message: format!("memory server {}: {}", order.copy.endpoint, parse_message(&table)),
            })
        };
        tell(shared, told, order, result);
    }
    Ok(())
}

/// The next answer. Without a deadline: if it is there. Notes where the other server says that it stops.
fn reply(
    link: &mut Link<Held>,
    draining: &mut bool,
    deadline: Option<Instant>,
) -> Result<Option<(Header, Vec<u8>)>, String> {
    loop {
        link.flush().map_err(|error| error.to_string())?;
        match (link.receive().map_err(|error| error.to_string())?, deadline) {
            (Received::Blocked, None) => return Ok(None),
            (Received::Blocked, Some(deadline)) => {
                if !link.wait(deadline).map_err(|error| error.to_string())? {
                    return Err(format!("no answer within {TIMEOUT:?}"));
                }
            }
            (Received::Head(header), _) if header.opcode == Opcode::Draining => *draining = true,
            (Received::Head(header), _) if header.is_reply() && header.bulk_len == 0 => {
                return Ok(Some((header, link.table().to_vec())));
            }
            (Received::Head(_) | Received::Bulk(_), _) => {
                return Err("it sent a frame that was not asked for".to_owned());
            }
        }
    }
}
