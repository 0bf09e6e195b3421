//! One client's connection: requests in, replies out.

mod copies;
mod edit;
pub(super) mod gather;
mod grouped;
pub(super) mod held;
mod keyed;
mod leases;
mod pages;
pub(super) mod published;
pub(super) mod queue;
mod regions;
mod requests;
mod rows;
mod scan;
pub(super) mod update;

use crate::connection::gather::Gathering;
use crate::connection::held::{BufferPool, Held};
use crate::connection::leases::{Attaching, Parked};
use crate::connection::pages::{Getting, Putting};
use crate::connection::scan::Scanning;
use crate::connection::update::{LeftUpdate, Part, Updating};
use crate::shared::{Counts, Lease, OWN_REPLY_BYTES, Posts, Replies, Shared, Space};
use crate::store::Scratch;
use crate::tenants::Tenant;
use rampool_lease::{ConnectionNumber, FrameIndex, OverQuota, SpaceError, StoredPage};
use rampool_net::transport::{Flush, Link, LinkError, Means, Piece, PieceMut, Urgency};
use rampool_wire::frame::{Header, LeaseId, MemberId, Opcode, PageEntry, Status, WireError, encode_error};
use rampool_wire::places::Place;
use rampool_wire::tenant::TenantId;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The longest turn in time, checked after so many frames, or within a long request: a longer one delays the
/// other connections.
pub(super) const TURN: Duration = Duration::from_micros(100);
pub(super) const LOOK_AT_CLOCK_AFTER: usize = 8;
/// After a request of the direct view, this much of a collected reply is sent at once, before the end of the
/// turn: while the next request is worked on, and while it is in the cache. Through shared memory the client
/// takes it from there; for a socket the kernel copies it, and each call to send costs more than the cache
/// gives.
const FLUSH_COLLECTED_BYTES: usize = 32 * 1024;
const FLUSH_COLLECTED_INTO_SOCKET_BYTES: usize = 512 << 10;
/// Bytes that are sent, or received, between two looks at the clock.
const BYTES_AT_ONCE: usize = 512 << 10;
/// Times 512 pages that are freed between two looks at the clock.
const CHUNKS_AT_ONCE: usize = 2;
/// Where the bytes of a refused `Put` go.
const SINK_BYTES: usize = 64 * 1024;

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

impl From<WireError> for End {
    fn from(error: WireError) -> Self {
        End::Protocol(error.to_string())
    }
}

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

/// Buffers of a shard, reused from request to request.
#[derive(Default)]
pub(super) struct ScratchBuffers {
    extents: Vec<Extent>,
    pages: Vec<Option<StoredPage>>,
    entries: Vec<PageEntry>,
    frames: Vec<FrameIndex>,
    lens: Vec<u32>,
    pieces: Vec<Piece>,
    places: Vec<PieceMut>,
    /// Where pages lie, for clients that read them there.
    stored_at: Vec<Place>,
    head: Vec<u8>,
    released: Vec<FrameIndex>,
    scratch: Scratch,
    sink: Vec<u8>,
    buffer_pool: Arc<BufferPool>,
    /// The bytes, checksums and table of a gather that the link copies.
    gathered: Vec<u8>,
    crcs: Vec<u32>,
    table: Vec<u8>,
    /// Answers of queues for other connections.
    pub(super) posts: Posts,
    pub(super) slice: Slice,
    /// When the first request that waits in a queue times out.
    pub(super) alarm: Option<Instant>,
}

/// The time of a turn, from when it is asked about first.
#[derive(Default)]
pub(crate) struct Slice(Option<Instant>);

impl Slice {
    /// A turn begins.
    pub(crate) fn begin(&mut self) {
        self.0 = None;
    }

    /// Whether the turn should end.
    pub(crate) fn is_over(&mut self) -> bool {
        self.0.get_or_insert_with(Instant::now).elapsed() >= TURN
    }
}

impl ScratchBuffers {
    fn set_alarm(&mut self, at: Instant) {
        self.alarm = Some(self.alarm.map_or(at, |set| set.min(at)));
    }

    /// Targets for bytes to discard: all of them are the same memory.
    fn lay_out_sink(&mut self, bytes: usize) {
        self.sink.resize(SINK_BYTES, 0);
        let mut left = bytes;
        while left > 0 {
            let len = left.min(SINK_BYTES);
            self.places.push(PieceMut { ptr: self.sink.as_mut_ptr(), len });
            left -= len;
        }
    }
}

/// The lease of a connection, and its member.
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

/// The `Put`, `Scatter` or `Accumulate` whose bytes are still arriving.
#[derive(Default)]
struct Arriving {
    extents: Vec<Extent>,
    entries: Vec<PageEntry>,
    frames: Vec<FrameIndex>,
    part: Option<Part>,
    /// The reply is known already: the pages go to the sink.
    refused: Option<(Status, u64, String)>,
}

/// A request that goes on with the next turn.
enum Paused {
    Gather(Box<Gathering>),
    Scan(Box<Scanning>),
    Group(Box<grouped::Grouping>),
    Get(Box<Getting>),
    Put(Box<Putting>),
    Clone(Header),
    Update(Box<Updating>),
    /// Pages of freed regions of its lease are being freed.
    Free(Header),
    Discard(Header, Vec<Extent>),
    /// The lease that it joins is busy.
    Attach(Box<Attaching>),
}

pub(super) struct Connection {
    link: Link<Held>,
    tenant: Arc<Tenant>,
    /// As it proved; the master key has none.
    identity: Option<TenantId>,
    membership: Option<Membership>,
    paused: Option<Paused>,
    parked: Option<Parked>,
    arriving: Arriving,
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
    /// Memory of the client that requests address by key.
    exposures: keyed::Exposures,
    since: Instant,
    /// When the last bytes of the client arrived.
    pub(super) heard: Instant,
    /// When it last read something of its queued replies, or nothing was queued.
    pub(super) took: Instant,
    said_draining: bool,
    /// Its replies are being sent, and go on with the next turn.
    sends: bool,
}

/// A refused request: what to tell the client.
pub(super) struct Refused {
    pub(super) status: Status,
    pub(super) arg: u64,
    pub(super) message: String,
}

impl Refused {
    pub(super) fn new(status: Status, message: impl ToString) -> Self {
        Self { status, arg: 0, message: message.to_string() }
    }
}

impl From<SpaceError> for Refused {
    fn from(error: SpaceError) -> Self {
        let (status, arg) = match error {
            SpaceError::Full { free } => (Status::PoolFull, free),
            SpaceError::NoSuchRegion => (Status::NoSuchRegion, 0),
            SpaceError::NotOwner | SpaceError::OfQueue => (Status::NotAllowed, 0),
            SpaceError::MemberGone | SpaceError::Replaced => (Status::MemberGone, 0),
            SpaceError::BeyondRegion { .. } | SpaceError::RegionLength => (Status::BadRequest, 0),
            _ => (Status::LimitReached, 0),
        };
        Self { status, arg, message: error.to_string() }
    }
}

impl From<OverQuota> for Refused {
    fn from(error: OverQuota) -> Self {
        Self::new(Status::LimitReached, error)
    }
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
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
        let arriving = Arriving::default();
        let waiting = BTreeMap::new();
        let exposures = keyed::Exposures::default();
        let identity = link.tenant();
        Self {
            link,
            tenant,
            identity,
            membership: None,
            paused: None,
            parked: None,
            arriving,
            collected: 0,
            replies,
            counted: 0,
            charged: None,
            arena,
            token,
            copies: 0,
            waiting,
            exposures,
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
        tracing::info!(tenant = %self.tenant_name(), generation, lease, member, peer = %self.link.peer(), "lease revoked");
    }

    pub(super) fn tenant_name(&self) -> String {
        super::tenants::in_words(self.tenant.name)
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
        match self.link.means() {
            Means::Rings => FLUSH_COLLECTED_BYTES,
            Means::Tcp | Means::UnixSocket | Means::Ucx => FLUSH_COLLECTED_INTO_SOCKET_BYTES,
        }
    }

    /// Whether so many replies are queued for the client, or for all together, that no more requests are read
    /// before it takes some.
    pub(super) fn is_full(&self, shared: &Shared) -> bool {
        let waiting = self.link.queued_bytes();
        waiting > shared.config.max_bytes as usize
            || (waiting > OWN_REPLY_BYTES && (self.replies.are_many() || self.tenant.replies.are_many()))
    }

    fn count_replies(&mut self) {
        let now = (self.link.queued_bytes() + self.paused_bytes()).saturating_sub(OWN_REPLY_BYTES);
        if now != self.counted {
            self.count(now);
        }
    }

    /// Bytes of a reply that is being collected.
    fn paused_bytes(&self) -> usize {
        match &self.paused {
            Some(Paused::Gather(gathering)) => gathering.bytes(),
            Some(Paused::Scan(scanning)) => scanning.bytes(),
            Some(Paused::Group(grouping)) => grouping.bytes(),
            Some(Paused::Get(getting)) => getting.pieces.iter().map(|piece| piece.len).sum(),
            Some(
                Paused::Free(_)
                | Paused::Discard(..)
                | Paused::Update(_)
                | Paused::Put(_)
                | Paused::Clone(_)
                | Paused::Attach(_),
            )
            | None => 0,
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

    /// Whether it works with a lease, or did.
    pub(super) fn has_lease(&self) -> bool {
        self.membership.is_some()
    }

    /// When it connected, if it has no lease and waits for none.
    pub(super) fn leaseless_since(&self) -> Option<Instant> {
        let attaches = matches!(self.paused, Some(Paused::Attach(_)));
        (!self.has_lease() && !self.is_parked() && !attaches).then_some(self.since)
    }

    /// The connection is over: frees what it holds, and starts the grace time of its member.
    pub(super) fn close(mut self, shared: &Shared) {
        self.count(0);
        match self.paused.take() {
            Some(Paused::Gather(gathering)) => shared.store.release(gathering.frames()),
            Some(Paused::Get(getting)) => shared.store.release(&getting.frames),
            Some(Paused::Update(updating)) => {
                shared.store.release(&updating.frames().collect::<Vec<_>>());
                if let Some(Membership { lease, member, connection }) = &self.membership
                    && updating.has_begun()
                {
                    // The reaper goes on with it.
                    let of = (Arc::clone(lease), *member, *connection);
                    shared.finish_later(LeftUpdate::new(*updating, self.arena, of));
                }
            }
            Some(Paused::Free(_)) => {
                // The reaper goes on with it.
                if let Some(membership) = &self.membership {
                    shared.bury_later(membership.lease.id);
                }
            }
            Some(Paused::Put(putting)) => shared.store.release(&putting.frames().collect::<Vec<_>>()),
            Some(Paused::Clone(_)) => {
                if let Some(membership) = &self.membership
                    && let Ok(mut space) = membership.space()
                {
                    space.stop_cloning(membership.member);
                    drop(space);
                    // The reaper frees what there is of it.
                    shared.bury_later(membership.lease.id);
                }
            }
            Some(Paused::Attach(attaching)) => {
                let Attaching { lease, member, connection, .. } = *attaching;
                shared.directory().disconnected(shared.now(), lease.id, member, connection);
            }
            Some(Paused::Scan(_) | Paused::Group(_) | Paused::Discard(..)) | None => {}
        }
        shared.disconnect(&self.tenant);
        self.link.take_handed().into_iter().for_each(|fd| shared.close_elsewhere(fd));
        shared.store.release(&self.arriving.frames);
        if let Some(Membership { lease, member, connection }) = self.membership.take() {
            let id: LeaseId = lease.id;
            lease.disconnected(member, connection);
            if !self.waiting.is_empty() {
                shared.stop_waiting(&lease, member, connection);
            }
            shared.directory().disconnected(shared.now(), id, member, connection);
        }
    }

    /// Whether its member has reconnected on another connection, as far as that can be seen without waiting for
    /// the lease.
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

    /// Queues a reply without pages.
    fn answer(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        result: Result<u64, Refused>,
    ) {
        match result {
            Ok(arg) => self.link.send_head(
                Urgency::Demand,
                &header.reply(Status::Ok).with_arg(arg).encode(),
                Held::nothing(),
            ),
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
    }

    fn refuse(&mut self, buffers: &mut ScratchBuffers, header: Header, refused: &Refused, shared: &Shared) {
        let lease: Option<&Counts> = self.membership.as_ref().map(|membership| &membership.lease.counts);
        for counts in [Some(&shared.shards[self.arena].counts), lease].into_iter().flatten() {
            count(&counts.refused, 1);
        }
        buffers.head.clear();
        encode_error(&mut buffers.head, header.reply(refused.status).with_arg(refused.arg), &refused.message);
        self.link.send_head(Urgency::Demand, &buffers.head, Held::nothing());
    }

    /// Reports the error to the client, if it still reads; the connection ends with `error`.
    fn protocol_error(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        error: End,
    ) -> End {
        self.refuse(buffers, header, &Refused::new(Status::BadRequest, &error), shared);
        error
    }
}

const NO_LEASE: &str = "this connection has no lease";

fn no_lease() -> Refused {
    Refused::new(Status::NotAllowed, NO_LEASE)
}

const _: () = assert!(SINK_BYTES >= OS_PAGE_BYTES);
