//! One client's connection: requests in, replies out.
//!
//! Here is what all requests have in common: the connection, and what goes on with the next turn. `requests`
//! has the table of requests, and the other files how each kind is handled.

mod copies;
mod edit;
mod gather;
mod grouped;
mod leases;
mod pages;
mod published;
mod queue;
mod regions;
mod requests;
mod scan;
mod update;

use crate::block::Blocks;
use crate::collect::Gathered;
use crate::held::{BufferPool, Held};
use crate::lease::{Lease, Space};
use crate::refused::Refused;
use crate::replies::{OWN_REPLY_BYTES, Replies};
use crate::shared::{Posts, Shared};
use crate::slice::Slice;
use crate::store::Scratch;
use crate::tenants::Tenant;
use rampool_lease::{ConnectionNumber, FrameIndex, SpaceError, StoredPage};
use rampool_net::transport::{Flush, Link, LinkError, Piece, PieceMut, Urgency};
use rampool_wire::frame::{
    Header, LeaseId, MemberId, Opcode, PageEntry, Status, WireError, encode_error, encode_frame,
};
use rampool_wire::places::Place;
use rampool_wire::tenant::TenantId;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Frames, and pages, that are seen to between two looks at the clock.
const LOOK_AT_CLOCK_AFTER: usize = 8;
/// After a request of the direct view, this much of a collected reply is sent at once, before the end of the
/// turn: while the next request is worked on, and while it is in the cache. Through shared memory the client
/// takes it from there; for a socket the kernel copies it, and each call to send costs more than the cache
/// gives.
const FLUSH_COLLECTED_BYTES: usize = 32 * 1024;
const FLUSH_COLLECTED_INTO_SOCKET_BYTES: usize = 512 << 10;
/// Bytes that are sent, or received, between two looks at the clock.
const BYTES_AT_ONCE: usize = 512 << 10;
/// Where the bytes of a refused `Put` go.
const SINK_BYTES: usize = 64 * 1024;
/// Sets of buffers that are kept of each kind.
const MOST_SPARE: usize = 4;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the client said goodbye")]
    Goodbye,
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("the client broke the protocol: {0}")]
    Protocol(String),
    #[error("the client sent nothing for too long")]
    Silent,
    #[error("it had no lease, and its place was given to another client")]
    MadeRoom,
    #[error("the client does not read its replies")]
    Stuck,
    #[error("the client has reconnected on another connection")]
    Replaced,
    #[error("the server stops")]
    Stopping,
    #[error("its key is revoked")]
    Revoked,
}

/// A request that is not answered.
enum Fail {
    Refused(Refused),
    /// It ends the connection.
    End(End),
}

impl<E: Into<Refused>> From<E> for Fail {
    fn from(error: E) -> Self {
        Fail::Refused(error.into())
    }
}

impl From<End> for Fail {
    fn from(end: End) -> Self {
        Fail::End(end)
    }
}

impl From<WireError> for Fail {
    fn from(error: WireError) -> Self {
        Fail::End(End::Protocol(error.to_string()))
    }
}

/// A request that was taken: answered, or begun.
type Handled = Result<(), Fail>;

/// What a turn left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// All received requests are answered.
    Idle,
    /// There is more; the connection wants another turn.
    More,
    /// The client must read replies before more of its requests are read.
    Full,
    /// It waits for what another thread works on, and wants another turn in a while.
    Later,
}

/// What a shard has for the requests of its connections, one at a time.
pub(super) struct Service {
    pub(super) shared: Arc<Shared>,
    /// For the status.
    blocks: Arc<Blocks>,
    pub(super) slice: Slice,
    /// Answers of queues for other connections.
    pub(super) posts: Posts,
    /// When the first request that waits in a queue times out.
    pub(super) alarm: Option<Instant>,
    /// Buffers that are used again from request to request.
    head: Vec<u8>,
    table: Vec<u8>,
    lens: Vec<u32>,
    places: Vec<PieceMut>,
    sink: Vec<u8>,
    scratch: Scratch,
    buffer_pool: Arc<BufferPool>,
    pages: Spare<Pages>,
    gathered: Spare<Gathered>,
}

impl Service {
    pub(super) fn new(shared: Arc<Shared>, blocks: Arc<Blocks>) -> Self {
        Self {
            shared,
            blocks,
            slice: Slice::default(),
            posts: Posts::default(),
            alarm: None,
            head: Vec::new(),
            table: Vec::new(),
            lens: Vec::new(),
            places: Vec::new(),
            sink: Vec::new(),
            scratch: Scratch::default(),
            buffer_pool: Arc::default(),
            pages: Spare::default(),
            gathered: Spare::default(),
        }
    }

    /// The alarm sounds when the lease's queues count this millisecond as over.
    fn set_alarm(&mut self, tick_ms: u64) {
        let at = self.shared.started + Duration::from_millis(tick_ms.saturating_add(1));
        self.alarm = Some(self.alarm.map_or(at, |set| set.min(at)));
    }

    /// Targets for bytes to discard: all of them are the same memory.
    fn lay_out_sink(&mut self, bytes: usize) {
        self.sink.resize(SINK_BYTES, 0);
        let ptr = self.sink.as_mut_ptr();
        let lens = (0..bytes).step_by(SINK_BYTES).map(|at| SINK_BYTES.min(bytes - at));
        self.places.clear();
        self.places.extend(lens.map(|len| PieceMut { ptr, len }));
    }
}

/// The lease of a connection, and its member.
#[derive(Clone)]
struct Membership {
    lease: Arc<Lease>,
    member: MemberId,
    connection: ConnectionNumber,
}

impl Membership {
    /// The lease's pages, if this connection still speaks for its member.
    fn space(&self) -> Result<Space<'_>, SpaceError> {
        let space = self.lease.space();
        space.admit(self.member, self.connection)?;
        Ok(space)
    }
}

/// Pages of a request, in its order.
#[derive(Default)]
struct Pages {
    extents: Vec<Extent>,
    entries: Vec<PageEntry>,
    /// Of each page that is not zero; a page that takes no frame of its own has none here.
    frames: Vec<FrameIndex>,
    stored: Vec<Option<StoredPage>>,
    /// Where they lie, for clients that read them there.
    stored_at: Vec<Place>,
    pieces: Vec<Piece>,
    released: Vec<FrameIndex>,
}

impl Pages {
    /// For another request, with memory that has been used before.
    fn clear(&mut self) {
        self.extents.clear();
        self.entries.clear();
        self.frames.clear();
        self.stored.clear();
        self.stored_at.clear();
        self.pieces.clear();
        self.released.clear();
    }
}

/// Buffers that requests leave for the next ones. They stay where they are: to move them takes time.
#[derive(Default)]
struct Spare<T>(Vec<Box<T>>);

impl<T: Default> Spare<T> {
    fn take(&mut self) -> Reused<T> {
        Reused(Some(self.0.pop().unwrap_or_default()))
    }

    /// They are empty.
    fn put_back(&mut self, one: &mut Reused<T>) {
        if self.0.len() < MOST_SPARE {
            self.0.extend(one.0.take());
        }
    }
}

/// Some of them in use.
struct Reused<T>(Option<Box<T>>);

impl<T> Deref for Reused<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is put back when all is done")
    }
}

impl<T> DerefMut for Reused<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("it is put back when all is done")
    }
}

/// What a step of work leaves.
enum Step {
    /// All is done and answered.
    Done,
    /// The slice is over before.
    More,
}

type Stepped = Result<Step, Refused>;

/// A request that may take more than one turn: it takes a step in each, and others have theirs in between.
trait Work: Send {
    /// Goes on from where it stopped. With an error, the request is refused.
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped;

    /// Bytes of its reply, as far as it holds them: they count as queued ones do.
    fn bytes(&self) -> usize {
        0
    }

    /// Whether it waits for another thread, and wants its next turn in a while.
    fn waits(&self) -> bool {
        false
    }

    /// It is refused, or its connection is over: gives back the frames that it holds.
    fn release(&mut self, _: &Shared) {}

    /// Its connection is over: undoes what it has begun, or lets the reaper finish it.
    fn leave(self: Box<Self>, _: &Connection, _: &Shared) {}
}

pub(super) struct Connection {
    link: Link<Held>,
    tenant: Arc<Tenant>,
    /// As it proved; the master key has none.
    identity: Option<TenantId>,
    membership: Option<Membership>,
    /// What goes on with the next turn.
    work: Option<(Header, Box<dyn Work>)>,
    /// A request for memory that is free as soon as closing leases have been freed.
    parked: Option<(Header, Box<dyn Work>)>,
    /// What begins when the bytes of its request have arrived.
    arriving: Option<Box<dyn Work>>,
    /// Bytes that were collected for answers since the last flush.
    collected: usize,
    replies: Arc<Replies>,
    /// The part of its replies that counts among those of all connections, of its tenant, and of this lease.
    counted: usize,
    charged: Option<Arc<Lease>>,
    arena: usize,
    /// Its slot in its shard.
    token: u64,
    /// Copies that the copy worker has.
    copies: usize,
    /// Requests that wait in queues.
    waiting: BTreeMap<u64, Header>,
    since: Instant,
    /// When the last bytes of the client arrived.
    pub(super) heard: Instant,
    /// When it last read something of its queued replies, or nothing was queued.
    pub(super) took: Instant,
    said_draining: bool,
    /// Its replies are being sent, and go on with the next turn.
    sends: bool,
}

/// Queues a reply that is a table.
fn tell(link: &mut Link<Held>, head: &mut Vec<u8>, reply: Header, table: &[u8]) {
    head.clear();
    encode_frame(head, reply, table, 0);
    link.send_head(Urgency::Demand, head, Held::nothing());
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Pages and bytes of a lease, which is locked, are on their way to a client.
fn count_read(shared: &Shared, arena: usize, lease: &Lease, (pages, bytes): (usize, u64)) {
    for counts in [&shared.shards[arena].counts, &lease.counts] {
        count_alone(&counts.gets, 1);
        count_alone(&counts.got_pages, pages as u64);
        count_alone(&counts.bytes_out, bytes);
    }
}

/// They have come, and are the lease's.
fn count_written(shared: &Shared, arena: usize, lease: &Lease, (pages, bytes): (usize, u32)) {
    for counts in [&shared.shards[arena].counts, &lease.counts] {
        count(&counts.puts, 1);
        count(&counts.put_pages, pages as u64);
        count(&counts.bytes_in, bytes.into());
    }
}

/// As [`count`], for a counter with one writer: it is the shard's, or the lease is locked.
fn count_alone(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

impl Connection {
    pub(super) fn new(
        link: Link<Held>,
        tenant: Arc<Tenant>,
        replies: Arc<Replies>,
        arena: usize,
        token: u64,
        now: Instant,
    ) -> Self {
        let waiting = BTreeMap::new();
        let identity = link.tenant();
        Self {
            link,
            tenant,
            identity,
            membership: None,
            work: None,
            parked: None,
            arriving: None,
            collected: 0,
            replies,
            counted: 0,
            charged: None,
            arena,
            token,
            copies: 0,
            waiting,
            since: now,
            heard: now,
            took: now,
            said_draining: false,
            sends: false,
        }
    }

    pub(super) fn link(&self) -> &Link<Held> {
        &self.link
    }

    pub(super) fn tenant(&self) -> &Arc<Tenant> {
        &self.tenant
    }

    /// Whether its key was revoked since it came.
    pub(super) fn is_revoked(&self, shared: &Shared) -> bool {
        self.identity.is_some_and(|tenant| shared.tenants.is_revoked(tenant))
    }

    /// Writes down that a lease loses this connection because its key is revoked.
    pub(super) fn audit_revoked(&self) {
        let lease = self.membership.as_ref().map(|membership| membership.lease.id.0);
        let member = self.membership.as_ref().map(|membership| membership.member.0);
        let generation = self.identity.map(|tenant| tenant.generation);
        let (tenant, peer) = (self.tenant_name(), self.link.peer());
        tracing::info!(%tenant, generation, lease, member, %peer, "lease revoked");
    }

    pub(super) fn tenant_name(&self) -> String {
        crate::tenants::in_words(self.tenant.name)
    }

    /// Sends what is queued, for a slice: what has stopped goes on with the next turn.
    pub(super) fn flush(&mut self, slice: &mut Slice, now: Instant) -> Result<Flush, End> {
        let before = self.link.queued_bytes();
        self.collected = 0;
        let flushed = self.link.flush_some(BYTES_AT_ONCE, || !slice.is_over());
        self.count_replies();
        let flushed = flushed?;
        self.sends = flushed == Flush::Stopped;
        if flushed == Flush::Empty || self.link.queued_bytes() < before {
            self.took = now;
        }
        Ok(flushed)
    }

    /// Whether its replies are being sent, and go on with the next turn.
    pub(super) fn sends(&self) -> bool {
        self.sends
    }

    /// For so long the shard did not listen to the client.
    pub(super) fn excuse(&mut self, away: Duration, now: Instant) {
        self.heard = (self.heard + away).min(now);
        self.took = (self.took + away).min(now);
    }

    fn flush_collected_bytes(&self) -> usize {
        if self.link.shares_memory() { FLUSH_COLLECTED_BYTES } else { FLUSH_COLLECTED_INTO_SOCKET_BYTES }
    }

    /// Whether so many replies are queued for the client, or for all together, that no more requests are read
    /// before it takes some.
    pub(super) fn is_full(&self, shared: &Shared) -> bool {
        let waiting = self.link.queued_bytes();
        waiting > shared.config.max_bytes as usize
            || (waiting > OWN_REPLY_BYTES && (self.replies.are_many() || self.tenant.replies.are_many()))
    }

    fn count_replies(&mut self) {
        let now = (self.link.queued_bytes() + self.work.as_ref().map_or(0, |(_, work)| work.bytes()))
            .saturating_sub(OWN_REPLY_BYTES);
        if now != self.counted {
            self.count(now);
        }
    }

    fn count(&mut self, now: usize) {
        self.replies.change(self.counted, now);
        self.tenant.replies.change(self.counted, now);
        if let Some(lease) = &self.charged {
            lease.replies.change(self.counted, now);
        }
        self.counted = now;
    }

    /// Call before the shard sleeps. False: there is something to do.
    pub(super) fn may_sleep(&self, shared: &Shared) -> bool {
        self.link.may_sleep(!self.is_full(shared))
    }

    /// Whether its request waits for what another thread works on.
    fn waits(&self) -> bool {
        self.work.as_ref().is_some_and(|(_, work)| work.waits())
    }

    /// Takes the first step of work. What is left of it goes on with the next turn.
    fn begin(&mut self, service: &mut Service, header: Header, mut work: impl Work + 'static) -> Handled {
        if self.step(service, header, &mut work) {
            self.work = Some((header, Box::new(work)));
        }
        Ok(())
    }

    /// Goes on with what has begun.
    fn resume(&mut self, service: &mut Service) {
        if let Some((header, mut work)) = self.work.take()
            && self.step(service, header, &mut *work)
        {
            self.work = Some((header, work));
        }
    }

    /// Whether there is more to do.
    fn step(&mut self, service: &mut Service, header: Header, work: &mut (impl Work + ?Sized)) -> bool {
        match work.step(self, service, header) {
            Ok(step) => matches!(step, Step::More),
            Err(refused) => {
                work.release(&service.shared);
                self.refuse(service, header, &refused);
                false
            }
        }
    }

    /// Whether it works with a lease, or did.
    pub(super) fn has_lease(&self) -> bool {
        self.membership.is_some()
    }

    /// When it connected, if it has no lease and waits for none.
    pub(super) fn leaseless_since(&self) -> Option<Instant> {
        (!self.has_lease() && !self.is_parked() && !self.waits()).then_some(self.since)
    }

    /// The connection is over: frees what it holds, and starts the grace time of its member.
    pub(super) fn close(mut self, shared: &Shared) {
        self.count(0);
        if let Some((_, mut work)) = self.work.take() {
            work.release(shared);
            work.leave(&self, shared);
        }
        shared.disconnect(&self.tenant);
        self.link.take_handed().into_iter().for_each(|fd| shared.close_elsewhere(fd));
        if let Some(mut arriving) = self.arriving.take() {
            arriving.release(shared);
        }
        if let Some(Membership { lease, member, connection }) = self.membership.take() {
            let id: LeaseId = lease.id;
            lease.disconnected(member, connection);
            if !self.waiting.is_empty() {
                shared.stop_waiting(&lease, member, connection);
            }
            shared.directory().disconnected(shared.now(), id, member, connection);
        }
    }

    /// Whether its member has reconnected on another connection, as far as that can be seen
    /// without waiting for the lease.
    pub(super) fn is_replaced(&self) -> bool {
        let is_replaced = |membership: &Membership| {
            Some(
                membership.lease.idle_space()?.admit(membership.member, membership.connection)
                    == Err(SpaceError::Replaced),
            )
        };
        self.membership.as_ref().and_then(is_replaced).unwrap_or(false)
    }

    /// Tells the client, once, that the server stops.
    pub(super) fn say_draining(&mut self, shared: &Shared) {
        if !self.said_draining {
            self.said_draining = true;
            let header = Header::request(Opcode::Draining, 0).with_arg(shared.drain_left_ms());
            self.link.send_head(Urgency::Demand, &header.encode(), Held::nothing());
        }
    }

    fn membership(&self) -> Result<&Membership, Refused> {
        self.membership.as_ref().ok_or_else(no_lease)
    }

    /// Queues a reply that is a number.
    fn answer(&mut self, header: Header, arg: u64) {
        let head = header.reply(Status::Ok).with_arg(arg).encode();
        self.link.send_head(Urgency::Demand, &head, Held::nothing());
    }

    /// A request is answered.
    fn done(&mut self, header: Header, arg: u64) -> Handled {
        self.answer(header, arg);
        Ok(())
    }

    /// Queues a reply with bytes of its own.
    fn send_bytes(&mut self, head: &mut Vec<u8>, reply: Header, table: &[u8], bytes: Vec<u8>) {
        head.clear();
        encode_frame(head, reply, table, bytes.len());
        let piece = [Piece { ptr: bytes.as_ptr(), len: bytes.len() }];
        // SAFETY: the guard owns the bytes, whose address does not change with the move of the vector.
        unsafe { self.link.send(Urgency::Demand, head, &piece, Held::bytes(bytes)) };
    }

    fn refuse(&mut self, service: &mut Service, header: Header, refused: &Refused) {
        count(&service.shared.shards[self.arena].counts.refused, 1);
        if let Some(membership) = &self.membership {
            count(&membership.lease.counts.refused, 1);
        }
        service.head.clear();
        let reply = header.reply(refused.status).with_arg(refused.arg);
        encode_error(&mut service.head, reply, &refused.message);
        self.link.send_head(Urgency::Demand, &service.head, Held::nothing());
    }
}

const NO_LEASE: &str = "this connection has no lease";

fn no_lease() -> Refused {
    Refused::new(Status::NotAllowed, NO_LEASE)
}

const _: () = assert!(SINK_BYTES >= OS_PAGE_BYTES);
