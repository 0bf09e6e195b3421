//! One client's connection: requests in, replies out.

pub(super) mod direct;
mod grouped;
mod keyed;
pub(super) mod published;
pub(super) mod queue;
mod rows;

use super::shared::{Counts, Lease, OWN_REPLY_BYTES, Posts, Replies, Shared, Space};
use super::tenants::Tenant;
use crate::store::{PageStore, Scratch};
use rampool_lease::{
    AttachError, ConnectionNumber, FrameIndex, LeaseSpace, OpenError, OverQuota, ResizeError, SpaceError,
    StoredPage, resize_lease,
};
use rampool_net::key::random_bytes;
use rampool_net::transport::{Flush, Link, LinkError, Means, Piece, PieceMut, Received, Urgency};
use rampool_wire::frame::{
    AttachLease, Granted, Header, LeaseId, LeaseToken, MAX_BULK_BYTES, MemberId, Opcode, OpenLease,
    PageEntry, RegionId, Status, WireError, encode_error, encode_frame, encode_get_reply, parse_extents,
    parse_put,
};
use rampool_wire::places::{Place, push_places};
use rampool_wire::session::features;
use rampool_wire::tenant::TenantId;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a request waits for memory that closing leases are about to give back: less than clients wait for
/// the reply.
const LEASE_WAIT: Duration = Duration::from_secs(4);
/// Frames answered before another connection has its turn.
const FRAMES_A_TURN: usize = 64;
/// A request of the direct view counts as so many frames: it may move a megabyte, and touch many pages.
const DIRECT_COUNTS_FOR: usize = 8;
/// The longest turn in time, checked after so many frames, or within a long request: a longer one delays the
/// other connections.
pub(super) const TURN: Duration = Duration::from_micros(100);
const LOOK_AT_CLOCK_AFTER: usize = 8;
/// After a request of the direct view, this much of a collected reply is sent at once, before the end of the
/// turn: while the next request is worked on, and while it is in the cache. Through shared memory the client
/// takes it from there; for a socket the kernel copies it, and each call to send costs more than the cache
/// gives.
const FLUSH_COLLECTED_BYTES: usize = 32 * 1024;
const FLUSH_COLLECTED_INTO_SOCKET_BYTES: usize = 512 << 10;
/// Likewise for replies that are sent from where they lie: one call for several is faster than one for each.
const FLUSH_BYTES: usize = 1536 << 10;
/// Bytes that are sent, or received, between two looks at the clock.
const BYTES_AT_ONCE: usize = 512 << 10;
/// Times 512 pages that are freed between two looks at the clock.
const CHUNKS_AT_ONCE: usize = 2;
/// The same of a region that is cloned.
const CLONED_AT_ONCE: usize = 256;
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

/// Keeps the frames of a queued reply.
pub(super) struct Held {
    store: Option<Arc<dyn PageStore>>,
    one: [FrameIndex; 1],
    many: Vec<FrameIndex>,
    /// Other memory of a reply.
    bytes: Vec<u8>,
    /// The pool that it returns to.
    buffer_pool: Option<Arc<BufferPool>>,
}

/// Buffers of sent replies, for the next ones: memory that is in the cache, and that the kernel need not
/// supply.
#[derive(Default, Debug)]
pub(super) struct BufferPool(Mutex<Vec<Vec<u8>>>);

/// Buffers in the pool, and bytes of each.
const MOST_POOLED: usize = 4;
const LARGEST_POOLED: usize = 1 << 20;

impl BufferPool {
    /// An empty buffer with room for `bytes`: the one that was used last, if it has it.
    fn take(&self, bytes: usize) -> Vec<u8> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = found.filter(|buffer| buffer.capacity() >= bytes).unwrap_or_default();
        buffer.reserve_exact(bytes);
        buffer
    }

    fn put_back(&self, mut buffer: Vec<u8>) {
        if buffer.capacity() == 0 || buffer.capacity() > LARGEST_POOLED {
            return;
        }
        buffer.clear();
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if buffers.len() < MOST_POOLED {
            buffers.push(buffer);
        }
    }
}

impl Held {
    pub(super) fn nothing() -> Self {
        Self::bytes(Vec::new())
    }

    fn bytes(bytes: Vec<u8>) -> Self {
        Self { store: None, one: [FrameIndex(0)], many: Vec::new(), bytes, buffer_pool: None }
    }

    /// Its bytes return to the pool when the reply has been sent.
    fn back_to(self, buffer_pool: &Arc<BufferPool>) -> Self {
        let mut held = self;
        held.buffer_pool = Some(Arc::clone(buffer_pool));
        held
    }

    fn frames(store: &Arc<dyn PageStore>, frames: &[FrameIndex]) -> Self {
        Self::frames_and_bytes(store, frames, Vec::new())
    }

    pub(super) fn frames_and_bytes(
        store: &Arc<dyn PageStore>,
        frames: &[FrameIndex],
        bytes: Vec<u8>,
    ) -> Self {
        match frames {
            [] => Self::bytes(bytes),
            // The usual reply, one page, allocates nothing.
            [one] => Self {
                store: Some(Arc::clone(store)),
                one: [*one],
                many: Vec::new(),
                bytes,
                buffer_pool: None,
            },
            many => Self {
                store: Some(Arc::clone(store)),
                one: [FrameIndex(0)],
                many: many.to_vec(),
                bytes,
                buffer_pool: None,
            },
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(store) = &self.store {
            store.release(if self.many.is_empty() { &self.one } else { &self.many });
        }
        if let Some(buffer_pool) = &self.buffer_pool {
            buffer_pool.put_back(std::mem::take(&mut self.bytes));
        }
    }
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
    part: Option<direct::Part>,
    /// The reply is known already: the pages go to the sink.
    refused: Option<(Status, u64, String)>,
}

/// A request for memory that is free as soon as closing leases have been freed.
struct Parked {
    header: Header,
    ask: Ask,
    until: Instant,
}

enum Ask {
    Open(OpenLease),
    Resize(u64),
}

/// The result of asking for memory.
enum Asked {
    Granted(Box<Granted>),
    Resized,
    Refused(Refused),
    /// The memory is about to be free.
    Later(Refused),
}

/// A request that goes on with the next turn.
enum Paused {
    Gather(Box<direct::Gathering>),
    Scan(Box<direct::Scanning>),
    Group(Box<grouped::Grouping>),
    Get(Box<Getting>),
    Put(Box<Putting>),
    Clone(Header),
    Update(Box<direct::Updating>),
    /// Pages of freed regions of its lease are being freed.
    Free(Header),
    Discard(Header, Vec<Extent>),
    /// The lease that it joins is busy.
    Attach(Box<Attaching>),
}

/// A member in the directory, that is not yet one in its lease.
struct Attaching {
    header: Header,
    lease: Arc<Lease>,
    member: MemberId,
    connection: ConnectionNumber,
    token: LeaseToken,
    lease_bytes: u64,
}

/// A `Get` of packed pages that takes more than one turn.
struct Getting {
    header: Header,
    extents: Vec<Extent>,
    entries: Vec<PageEntry>,
    stored_at: Vec<Place>,
    frames: Vec<FrameIndex>,
    pieces: Vec<Piece>,
}

/// A `Put` whose pages are all here, and go into their frames' final form.
struct Putting {
    header: Header,
    arrived: Arriving,
    /// Those that are in it, in the order of the request.
    pages: Vec<Option<StoredPage>>,
    /// How many of the frames they took.
    settled: usize,
}

impl Putting {
    /// What it holds.
    fn frames(&self) -> impl Iterator<Item = FrameIndex> {
        let settled = self.pages.iter().flatten().map(|page| page.frame);
        settled.chain(self.arrived.frames[self.settled..].iter().copied())
    }
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

    /// Answers received requests; the replies are sent with [`Connection::flush`]. Ends early where the
    /// scratch buffers hold replies for other connections: they have waited longer.
    pub(super) fn receive(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        now: Instant,
    ) -> Result<Turn, End> {
        buffers.slice.begin();
        if self.sends && self.flush(&mut buffers.slice, now)? == Flush::Stopped {
            return Ok(Turn::More);
        }
        if let Some(paused) = self.paused.take() {
            self.heard = now;
            self.resume(shared, buffers, paused);
        }
        let (mut frames, mut look_at) = (0, LOOK_AT_CLOCK_AFTER);
        while frames < FRAMES_A_TURN && buffers.posts.is_empty() && self.paused.is_none() {
            if frames >= look_at {
                look_at = frames + LOOK_AT_CLOCK_AFTER;
                if buffers.slice.is_over() {
                    break;
                }
            }
            self.count_replies();
            if self.is_full(shared) {
                return Ok(Turn::Full);
            }
            let membership = self.membership.as_ref();
            let received = self.link.receive_some(
                |frame| direct::look_ahead(shared, membership, frame),
                BYTES_AT_ONCE,
                || !buffers.slice.is_over(),
            )?;
            match received {
                Received::Blocked if self.link.has_stopped() => {
                    self.heard = now;
                    return Ok(Turn::More);
                }
                Received::Blocked => return Ok(Turn::Idle),
                Received::Head(header) => {
                    self.heard = now;
                    if header.is_reply() || header.status != Status::Ok {
                        return Err(End::Protocol("a reply where a request was expected".to_owned()));
                    }
                    if self.link.queued_frames() + self.copies + self.waiting.len()
                        > shared.config.max_requests as usize
                    {
                        self.refuse(
                            buffers,
                            header,
                            &Refused::new(Status::OverCredit, "more requests outstanding than were granted"),
                            shared,
                        );
                        return Err(End::Protocol("more requests outstanding than were granted".to_owned()));
                    }
                    let direct = is_direct(header.opcode);
                    frames += if direct || header.opcode == Opcode::Copy { DIRECT_COUNTS_FOR } else { 1 };
                    if header.opcode == Opcode::ReadPiece && !header.is_by_key() {
                        self.read_piece(shared, buffers, header)?;
                    } else {
                        self.request(shared, buffers, header, now)?;
                    }
                    if direct
                        && (self.collected >= self.flush_collected_bytes()
                            || self.link.queued_bytes() >= FLUSH_BYTES)
                        && self.flush(&mut buffers.slice, now)? == Flush::Stopped
                    {
                        break;
                    }
                }
                Received::Bulk(header) => {
                    self.heard = now;
                    if self.arriving.part.is_some() {
                        self.finish_part(shared, buffers, header);
                    } else {
                        self.finish_put(shared, buffers, header);
                    }
                }
            }
        }
        Ok(if matches!(self.paused, Some(Paused::Attach(_))) { Turn::Later } else { Turn::More })
    }

    fn resume(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, paused: Paused) {
        match paused {
            Paused::Gather(gathering) => self.go_on_gathering(shared, buffers, *gathering, false),
            Paused::Scan(scanning) => self.go_on_scanning(shared, buffers, *scanning),
            Paused::Group(grouping) => self.go_on_grouping(shared, buffers, *grouping),
            Paused::Update(updating) => self.go_on_updating(shared, buffers, *updating),
            Paused::Get(getting) => self.go_on_getting(shared, buffers, *getting),
            Paused::Put(putting) => self.go_on_putting(shared, buffers, *putting),
            Paused::Clone(header) => self.go_on_cloning(shared, buffers, header),
            Paused::Free(header) => self.go_on_freeing(shared, buffers, header),
            Paused::Discard(header, extents) => self.go_on_discarding(shared, buffers, header, extents),
            Paused::Attach(attaching) => self.go_on_attaching(shared, buffers, attaching),
        }
    }

    fn request(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        now: Instant,
    ) -> Result<(), End> {
        let counts = &shared.shards[self.arena].counts;
        if header.is_by_key() && !matches!(header.opcode, Opcode::Gather | Opcode::Scatter) {
            let error = End::Protocol("a key where none belongs".to_owned());
            return Err(self.protocol_error(shared, buffers, header, error));
        }
        if self.membership.is_none() && is_laborious(header.opcode) {
            return self.refuse_unread(shared, buffers, header);
        }
        match header.opcode {
            Opcode::Get => {
                let pages = parse_extents(&header, self.link.table(), &mut buffers.extents);
                match pages.map_err(End::from).and_then(|_| no_bulk(&header)) {
                    Ok(()) => self.get(shared, buffers, header),
                    Err(error) => return Err(self.protocol_error(shared, buffers, header, error)),
                }
            }
            Opcode::Put => return self.begin_put(shared, buffers, header),
            Opcode::Scatter | Opcode::Accumulate => return self.begin_part(shared, buffers, header),
            Opcode::Discard => {
                let pages = parse_extents(&header, self.link.table(), &mut buffers.extents);
                if let Err(error) = pages.map_err(End::from).and_then(|_| no_bulk(&header)) {
                    return Err(self.protocol_error(shared, buffers, header, error));
                }
                count(&counts.discards, 1);
                if let Some(membership) = &self.membership {
                    count(&membership.lease.counts.discards, 1);
                }
                let extents = std::mem::take(&mut buffers.extents);
                self.go_on_discarding(shared, buffers, header, extents);
            }
            _ => {
                if let Err(error) = no_bulk(&header) {
                    return Err(self.protocol_error(shared, buffers, header, error));
                }
                count_alone(&counts.control, 1);
                if let Some(membership) = &self.membership {
                    count(&membership.lease.counts.control, 1);
                }
                return match header.opcode {
                    Opcode::Gather => self.gather(shared, buffers, header),
                    Opcode::FetchOp => self.fetch_op(shared, buffers, header),
                    Opcode::Scan => self.scan(shared, buffers, header),
                    Opcode::Copy => self.copy(shared, buffers, header),
                    Opcode::Expose => self.expose(shared, buffers, header),
                    Opcode::Revoke => self.revoke(shared, buffers, header),
                    Opcode::Reach => self.reach(shared, buffers, header),
                    Opcode::OpenQueue
                    | Opcode::FreeQueue
                    | Opcode::ListQueues
                    | Opcode::ListRegions
                    | Opcode::Push
                    | Opcode::Take
                    | Opcode::Settle
                    | Opcode::AwaitBody
                    | Opcode::PushHeads => self.queue(shared, buffers, header, now),
                    _ => self.control(shared, buffers, header),
                };
            }
        }
        Ok(())
    }

    /// A connection without a lease is told so before any work on its request.
    fn refuse_unread(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let carries = matches!(header.opcode, Opcode::Scatter | Opcode::Accumulate);
        if !carries && let Err(error) = no_bulk(&header) {
            return Err(self.protocol_error(shared, buffers, header, error));
        }
        if header.bulk_len == 0 {
            self.refuse(buffers, header, &no_lease(), shared);
            return Ok(());
        }
        self.arriving.refused = Some((Status::NotAllowed, 0, NO_LEASE.to_owned()));
        buffers.places.clear();
        buffers.lay_out_sink(header.bulk_len as usize);
        // SAFETY: the sink belongs to the shard, is never read, and outlives its connections.
        unsafe { self.link.place(&buffers.places) };
        Ok(())
    }

    fn get(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        buffers.stored_at.clear();
        buffers.entries.clear();
        buffers.frames.clear();
        buffers.pieces.clear();
        self.present(shared, buffers, header);
    }

    fn go_on_getting(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, getting: Getting) {
        let Getting { header, extents, entries, stored_at, frames, pieces } = getting;
        (buffers.extents, buffers.entries, buffers.stored_at, buffers.frames, buffers.pieces) =
            (extents, entries, stored_at, frames, pieces);
        self.present(shared, buffers, header);
    }

    /// Holds the pages of a `Get` from where it stopped, and sends them when it has all.
    fn present(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        let compressed = self.link.features() & features::LZ4 != 0;
        let tells_places = self.link.features() & features::PLACES != 0;
        buffers.pages.clear();
        let counts = &shared.shards[self.arena].counts;
        let (link, mut locked) = (&mut self.link, None);
        let result = self.membership.as_ref().ok_or_else(no_lease).and_then(|membership| {
            let space = membership.space()?;
            space.look_up(
                membership.member,
                RegionId(header.region),
                &buffers.extents,
                &mut buffers.pages,
            )?;
            let copied = buffers.pages.len() == 1 && link.copies(OS_PAGE_BYTES);
            let done = buffers.entries.len();
            // Holds frames before the lock is released: a page that is replaced meanwhile releases a frame
            // that stays. What the link copies is copied before.
            for page in &buffers.pages[done..] {
                if buffers.entries.len() % LOOK_AT_CLOCK_AFTER == LOOK_AT_CLOCK_AFTER - 1
                    && buffers.slice.is_over()
                {
                    return Ok(false);
                }
                if tells_places {
                    let place = page.as_ref().map_or(Place::NONE, |page| shared.store.place(page));
                    buffers.stored_at.push(place);
                }
                let Some(page) = page else {
                    buffers.entries.push(PageEntry::ZERO);
                    continue;
                };
                if copied && usize::from(page.len) == OS_PAGE_BYTES {
                    buffers.entries.push(PageEntry { crc: page.crc, len: page.len.into() });
                    buffers.pieces.push(Piece { ptr: shared.store.memory(page.frame), len: OS_PAGE_BYTES });
                    continue;
                }
                let presented = shared
                    .store
                    .present(self.arena, page, compressed)
                    .map_err(|e| Refused::new(Status::BadRequest, e))?;
                let (frame, len) =
                    presented.ok_or_else(|| Refused::new(Status::PoolFull, "no room to unpack a page"))?;
                buffers.frames.push(frame);
                buffers.entries.push(PageEntry { crc: page.crc, len });
                buffers.pieces.push(Piece { ptr: shared.store.memory(frame), len: len as usize });
            }
            let bytes = buffers.entries.iter().map(|entry| u64::from(entry.len)).sum();
            for counts in [counts, &membership.lease.counts] {
                count_alone(&counts.gets, 1);
                count_alone(&counts.got_pages, buffers.pages.len() as u64);
                count_alone(&counts.bytes_out, bytes);
            }
            locked = copied.then_some(space);
            Ok(true)
        });
        if matches!(result, Ok(false)) {
            let mut take = || std::mem::take(&mut buffers.extents);
            self.paused = Some(Paused::Get(Box::new(Getting {
                header,
                extents: take(),
                entries: std::mem::take(&mut buffers.entries),
                stored_at: std::mem::take(&mut buffers.stored_at),
                frames: std::mem::take(&mut buffers.frames),
                pieces: std::mem::take(&mut buffers.pieces),
            })));
            return;
        }
        let held = Held::frames(&shared.store, &buffers.frames);
        match result {
            Ok(_) => {
                buffers.head.clear();
                encode_get_reply(
                    &mut buffers.head,
                    header.reply(Status::Ok),
                    &buffers.entries,
                    &buffers.stored_at,
                );
                // SAFETY: `held` keeps a reference to every frame until the reply has left, unless the link
                // copies the page at once, and then the page is the table's for as long as the lease is
                // locked; settled frames are not written.
                unsafe { link.send(Urgency::Demand, &buffers.head, &buffers.pieces, held) };
                drop(locked);
            }
            Err(refused) => {
                drop(locked);
                self.refuse(buffers, header, &refused, shared);
            }
        }
    }

    /// Table of a `Put`: takes frames for the pages and lets them come.
    fn begin_put(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let compressed = self.link.features() & features::LZ4 != 0;
        let arriving = &mut self.arriving;
        let parsed =
            parse_put(&header, self.link.table(), compressed, &mut arriving.extents, &mut arriving.entries);
        if let Err(error) = parsed {
            return Err(self.protocol_error(shared, buffers, header, error.into()));
        }
        assert!(arriving.frames.is_empty(), "one put arrives at a time");
        arriving.refused = None;
        if self.membership.is_none() {
            arriving.refused = Some((Status::NotAllowed, 0, NO_LEASE.to_owned()));
        } else {
            buffers.lens.clear();
            buffers.lens.extend(arriving.entries.iter().map(|e| e.len).filter(|len| *len > 0));
            if !shared.store.take(self.arena, &buffers.lens, &mut arriving.frames) {
                arriving.refused = Some((
                    Status::PoolFull,
                    0,
                    "the server's memory is full of pages on their way".to_owned(),
                ));
            }
        }
        buffers.places.clear();
        if self.arriving.refused.is_some() {
            buffers.lay_out_sink(header.bulk_len as usize);
        } else {
            let lens = self.arriving.entries.iter().map(|e| e.len as usize).filter(|len| *len > 0);
            for (frame, len) in self.arriving.frames.iter().zip(lens) {
                buffers.places.push(PieceMut { ptr: shared.store.memory(*frame), len });
            }
        }
        if header.bulk_len == 0 {
            self.finish_put(shared, buffers, header);
        } else {
            // SAFETY: frames just taken belong to `arriving` until `Bulk`, and are released only with or
            // after the link; the sink belongs to the shard, is never read, and outlives its connections.
            unsafe { self.link.place(&buffers.places) };
        }
        Ok(())
    }

    /// All pages of a `Put` are here.
    fn finish_put(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        let mut arriving = std::mem::take(&mut self.arriving);
        if let Some((status, arg, message)) = arriving.refused.take() {
            self.arriving = arriving;
            self.refuse(buffers, header, &Refused { status, arg, message }, shared);
            return;
        }
        buffers.pages.clear();
        let pages = std::mem::take(&mut buffers.pages);
        self.go_on_putting(shared, buffers, Putting { header, arrived: arriving, pages, settled: 0 });
    }

    /// Brings the pages of a `Put` into their final form, from where it stopped, then enters them.
    fn go_on_putting(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, mut putting: Putting) {
        let counts = &shared.shards[self.arena].counts;
        let Putting { arrived, pages, settled, .. } = &mut putting;
        for entry in &arrived.entries[pages.len()..] {
            if pages.len() % LOOK_AT_CLOCK_AFTER == LOOK_AT_CLOCK_AFTER - 1 && buffers.slice.is_over() {
                self.paused = Some(Paused::Put(Box::new(putting)));
                return;
            }
            let page = (!entry.is_zero()).then(|| {
                let frame = arrived.frames[*settled];
                *settled += 1;
                shared.store.settle(self.arena, frame, *entry, &mut buffers.scratch)
            });
            pages.push(page);
        }
        let Putting { header, arrived: mut arriving, pages, .. } = putting;
        arriving.frames.clear();
        buffers.pages = pages;
        // While the frames are this request's alone: others may replace the pages as soon as they are entered.
        buffers.stored_at.clear();
        if self.link.features() & features::PLACES != 0 {
            let place = |page: &Option<_>| page.as_ref().map_or(Place::NONE, |page| shared.store.place(page));
            buffers.stored_at.extend(buffers.pages.iter().map(place));
        }
        buffers.released.clear();
        let result = self.membership().and_then(|membership| {
            let mut space = membership.space()?;
            space.is_ordinary(RegionId(header.region))?;
            space.put(
                membership.member,
                RegionId(header.region),
                &arriving.extents,
                &buffers.pages,
                &mut buffers.released,
            )?;
            drop(space);
            for counts in [counts, &membership.lease.counts] {
                count(&counts.puts, 1);
                count(&counts.put_pages, buffers.pages.len() as u64);
                count(&counts.bytes_in, header.bulk_len.into());
            }
            Ok(0)
        });
        if result.is_err() {
            buffers.released.clear();
            buffers.released.extend(buffers.pages.iter().flatten().map(|page| page.frame));
        }
        shared.store.release(&buffers.released);
        buffers.released.clear();
        self.arriving = arriving;
        if result.is_ok() && !buffers.stored_at.is_empty() {
            buffers.table.clear();
            push_places(&mut buffers.table, &buffers.stored_at);
            buffers.head.clear();
            encode_frame(&mut buffers.head, header.reply(Status::Ok), &buffers.table, 0);
            return self.link.send_head(Urgency::Demand, &buffers.head, Held::nothing());
        }
        self.answer(shared, buffers, header, result);
    }

    fn control(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) -> Result<(), End> {
        let region = RegionId(header.region);
        let result = match header.opcode {
            Opcode::OpenLease => {
                match OpenLease::parse(self.link.table()) {
                    Ok(request) => self.ask(shared, buffers, header, Ask::Open(request), None),
                    Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
                }
                return Ok(());
            }
            Opcode::ResizeLease => {
                self.ask(shared, buffers, header, Ask::Resize(header.arg), None);
                return Ok(());
            }
            Opcode::AttachLease => {
                match self.attach(shared, header) {
                    Ok(Ok(attaching)) => self.go_on_attaching(shared, buffers, Box::new(attaching)),
                    Ok(Err(refused)) => self.refuse(buffers, header, &refused, shared),
                    Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
                }
                return Ok(());
            }
            Opcode::CreateRegion => self.membership().and_then(|membership| {
                let made = membership.space()?.make(0, |space| {
                    space.make_once(membership.member, header.request, |space| {
                        space.create_region(membership.member).map(Some)
                    })
                });
                Ok(made?.expect("it is made at once").0)
            }),
            Opcode::CloneRegion => {
                self.go_on_cloning(shared, buffers, header);
                return Ok(());
            }
            Opcode::AdoptRegion => self.membership().and_then(|membership| {
                Ok(membership.space()?.adopt_region(membership.member, region).map(|()| region.0)?)
            }),
            Opcode::OpenRegion => {
                let opened = self.open_region(header);
                match opened {
                    Ok((region, bytes)) => {
                        self.answer(shared, buffers, Header { region: region.0, ..header }, Ok(bytes))
                    }
                    Err(refused) => self.refuse(buffers, header, &refused, shared),
                }
                return Ok(());
            }
            Opcode::FreeRegion => {
                let freed = self
                    .membership()
                    .and_then(|membership| Ok(membership.space()?.free_region(membership.member, region)?));
                match freed {
                    Ok(()) => {
                        self.go_on_freeing(shared, buffers, header);
                        return Ok(());
                    }
                    Err(refused) => Err(refused),
                }
            }
            Opcode::Heartbeat => Ok(0),
            Opcode::Status => {
                self.send_status(shared, buffers, header);
                return Ok(());
            }
            Opcode::Drain => self.drain(shared).map(|()| 0),
            // For another member of the lease, whose process is gone.
            Opcode::Goodbye if self.is_another(header.arg) => self.membership().map(|membership| {
                let departed = shared.directory().leave(membership.lease.id, MemberId(header.arg));
                if let Some(departed) = departed {
                    tracing::debug!(lease = membership.lease.id.0, member = header.arg, "dismissed");
                    shared.depart(departed);
                }
                0
            }),
            Opcode::Goodbye => {
                if let Some(membership) = self.membership.take() {
                    membership.lease.disconnected(membership.member, membership.connection);
                    let mut directory = shared.directory();
                    let current =
                        directory.is_current(membership.lease.id, membership.member, membership.connection);
                    let departed =
                        if current { directory.leave(membership.lease.id, membership.member) } else { None };
                    drop(directory);
                    if let Some(departed) = departed {
                        shared.depart(departed);
                    }
                }
                self.answer(shared, buffers, header, Ok(0));
                return Err(End::Goodbye);
            }
            _ => Err(Refused::new(Status::BadRequest, "not a request of a client")),
        };
        // The reply's region names the new one.
        let reply = match (&result, header.opcode) {
            (Ok(new), Opcode::CreateRegion) => Header { region: *new, ..header },
            _ => header,
        };
        self.answer(shared, buffers, reply, result.map(|_| 0));
        Ok(())
    }

    /// Clones a region from where it stopped, and answers with the number of the clone.
    fn go_on_cloning(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        let region = RegionId(header.region);
        let result = loop {
            let made = self.membership().and_then(|membership| {
                let mut space = membership.space()?;
                let member = membership.member;
                let made = space.make(0, |space| {
                    let clone = |space: &mut LeaseSpace| space.clone_some(member, region, CLONED_AT_ONCE);
                    space.make_once(member, header.request, clone)
                });
                if made.is_err() && space.has_freed() {
                    shared.bury_later(membership.lease.id);
                }
                Ok(made?)
            });
            match made {
                Ok(Some(clone)) => break Ok(clone),
                Ok(None) if buffers.slice.is_over() => {
                    self.paused = Some(Paused::Clone(header));
                    return;
                }
                Ok(None) => {}
                Err(refused) => break Err(refused),
            }
        };
        match result {
            Ok(clone) => self.answer(shared, buffers, Header { region: clone.0, ..header }, Ok(0)),
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
    }

    /// Makes pages zero from where it stopped, the last extents first, and answers when it was all.
    fn go_on_discarding(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        mut extents: Vec<Extent>,
    ) {
        let region = RegionId(header.region);
        let result = loop {
            let all = self.membership().and_then(|membership| {
                let mut space = membership.space()?;
                space.is_ordinary(region)?;
                let released = &mut buffers.released;
                Ok(space.discard_some(membership.member, region, &mut extents, CHUNKS_AT_ONCE, released)?)
            });
            shared.store.release(&buffers.released);
            buffers.released.clear();
            match all {
                Ok(true) => break Ok(0),
                Ok(false) if buffers.slice.is_over() => {
                    self.paused = Some(Paused::Discard(header, extents));
                    return;
                }
                Ok(false) => {}
                Err(refused) => break Err(refused),
            }
        };
        buffers.extents = extents;
        self.answer(shared, buffers, header, result);
    }

    /// Frees pages of freed regions, and answers when all are free.
    fn go_on_freeing(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        // Also where the member's connection is another one by now: what is freed belongs to no one.
        let Some(membership) = &self.membership else { return };
        let mut more = true;
        while more {
            more = membership.lease.space().bury(CHUNKS_AT_ONCE as u64, &mut buffers.released);
            shared.store.release(&buffers.released);
            buffers.released.clear();
            if more && buffers.slice.is_over() {
                self.paused = Some(Paused::Free(header));
                return;
            }
        }
        self.answer(shared, buffers, header, Ok(0));
    }

    /// Asks for memory, and replies, unless the memory is about to be given back: then the request waits
    /// until `until` at the latest.
    fn ask(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        ask: Ask,
        until: Option<Instant>,
    ) {
        let asked = if self.parked.is_some() {
            Asked::Refused(Refused::new(
                Status::BadRequest,
                "another request for memory of this connection waits",
            ))
        } else {
            match &ask {
                Ask::Open(request) => self.open(shared, request),
                Ask::Resize(bytes) => self.resize(shared, *bytes),
            }
        };
        match asked {
            Asked::Granted(granted) => self.grant(buffers, header, &granted),
            Asked::Resized => self.answer(shared, buffers, header, Ok(0)),
            Asked::Refused(refused) => self.refuse(buffers, header, &refused, shared),
            Asked::Later(refused) => {
                let now = Instant::now();
                let until = until.unwrap_or(now + LEASE_WAIT);
                if now < until {
                    self.parked = Some(Parked { header, ask, until });
                } else {
                    self.refuse(buffers, header, &refused, shared);
                }
            }
        }
    }

    /// Retries what had to wait; called when a lease has closed, and now and then for the deadline.
    pub(super) fn ask_again(&mut self, shared: &Shared, buffers: &mut ScratchBuffers) {
        if let Some(Parked { header, ask, until }) = self.parked.take() {
            self.ask(shared, buffers, header, ask, Some(until));
        }
    }

    pub(super) fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    fn grant(&mut self, buffers: &mut ScratchBuffers, header: Header, granted: &Granted) {
        buffers.head.clear();
        encode_frame(&mut buffers.head, header.reply(Status::Ok), &granted.encode(), 0);
        self.link.send_head(Urgency::Demand, &buffers.head, Held::nothing());
    }

    /// Whether a goodbye is said for another member.
    fn is_another(&self, member: u64) -> bool {
        let own = self.membership.as_ref().is_some_and(|membership| membership.member.0 == member);
        member != 0 && !own
    }

    /// Drains for as long as there are members: no time ends that, and so no memory with pages in it.
    fn drain(&self, shared: &Shared) -> Result<(), Refused> {
        if self.tenant.name.is_some() {
            let why = "only who has the master key may ask for that";
            return Err(Refused::new(Status::NotAllowed, why));
        }
        tracing::info!(peer = %self.link.peer(), "asked to drain");
        shared.start_draining(Duration::MAX);
        Ok(())
    }

    fn open(&mut self, shared: &Shared, request: &OpenLease) -> Asked {
        if let Some(refused) = self.sits_already() {
            return Asked::Refused(refused);
        }
        if shared.draining() {
            return Asked::Refused(Refused::new(Status::Draining, "the server is stopping"));
        }
        if shared.short_of_memory() {
            self.audit_refused(shared, request, &SHORT_OF_MEMORY);
            return Asked::Refused(Refused::new(Status::ShortOfMemory, SHORT_OF_MEMORY));
        }
        let token = LeaseToken(random_bytes());
        let opened = shared.directory().open(self.tenant.name, request, token);
        match opened {
            Ok((id, member)) => {
                let lease = Arc::new(Lease::new(shared, id, request.bytes, &self.tenant));
                lease.space().member_joined(member, ConnectionNumber::FIRST);
                shared.add_lease(Arc::clone(&lease));
                if shared.may_log("lease granted", self.tenant.name) {
                    let generation = self.identity.map(|tenant| tenant.generation);
                    let OpenLease { bytes, name, host, pid } = request;
                    tracing::info!(tenant = %self.tenant_name(), generation, lease = id.0, bytes, name, host, pid,
                        peer = %self.link.peer(), "lease granted");
                }
                Asked::Granted(Box::new(self.sit(
                    shared,
                    lease,
                    (member, ConnectionNumber::FIRST),
                    token,
                    request.bytes,
                )))
            }
            Err(error) => {
                let (status, arg) = match error {
                    OpenError::TooLarge { free } | OpenError::Closing { free, .. } => {
                        (Status::LeaseRefused, free)
                    }
                    OpenError::OverQuota(over) => (Status::LeaseRefused, over.left()),
                    OpenError::TooManyOfTenant(over) => (Status::LimitReached, over.left()),
                    OpenError::Empty => (Status::BadRequest, 0),
                    _ => (Status::LimitReached, 0),
                };
                let refused = Refused {
                    status,
                    arg,
                    message: format!("a lease of {} bytes does not fit: {error}", request.bytes),
                };
                if matches!(error, OpenError::Closing { .. }) {
                    tracing::debug!(bytes = request.bytes, name = request.name, peer = %self.link.peer(), %error, "lease waits");
                    return Asked::Later(refused);
                }
                self.audit_refused(shared, request, &error);
                Asked::Refused(refused)
            }
        }
    }

    /// One line, unless the same was said within this minute.
    fn audit_refused(&self, shared: &Shared, request: &OpenLease, error: &dyn std::fmt::Display) {
        let (tenant, bytes) = (self.tenant_name(), request.bytes);
        let error = format!("tenant {tenant}, {bytes} bytes: {error}");
        shared.log_peer_error("lease refused", Some(self.link.peer()), &error);
    }

    fn resize(&self, shared: &Shared, bytes: u64) -> Asked {
        let membership = match self.membership() {
            Ok(membership) => membership,
            Err(refused) => return Asked::Refused(refused),
        };
        let mut space = match membership.space() {
            Ok(space) => space,
            Err(error) => return Asked::Refused(error.into()),
        };
        if shared.short_of_memory() && bytes > space.usage().limit_bytes {
            return Asked::Refused(Refused::new(Status::ShortOfMemory, SHORT_OF_MEMORY));
        }
        let mut directory = shared.directory();
        let Err(error) = resize_lease(&mut directory, &mut space, membership.lease.id, bytes) else {
            return Asked::Resized;
        };
        let (status, arg) = match error {
            ResizeError::TooLarge { free } | ResizeError::Closing { free, .. } => {
                (Status::LeaseRefused, free)
            }
            ResizeError::OverQuota(over) => (Status::LeaseRefused, over.left()),
            ResizeError::InUse { used } => (Status::PoolFull, used),
            ResizeError::Empty => (Status::BadRequest, 0),
            _ => (Status::NoSuchLease, 0),
        };
        let refused = Refused { status, arg, message: error.to_string() };
        if matches!(error, ResizeError::Closing { .. }) {
            Asked::Later(refused)
        } else {
            Asked::Refused(refused)
        }
    }

    /// Becomes a member in the directory; [`Connection::go_on_attaching`] follows.
    fn attach(&mut self, shared: &Shared, header: Header) -> Result<Result<Attaching, Refused>, WireError> {
        let request = AttachLease::parse(self.link.table())?;
        if let Some(refused) = self.sits_already() {
            return Ok(Err(refused));
        }
        // Only for this: the lease may be busy for long, and others need the directory.
        let attached = shared.directory().attach(self.tenant.name, &request);
        Ok(match attached {
            Ok((member, connection, bytes)) => {
                let Some(lease) = shared.lease(request.lease) else {
                    return Ok(Err(Refused::new(Status::MemberGone, AttachError::MemberGone)));
                };
                let (token, lease_bytes) = (request.token, bytes);
                Ok(Attaching { header, lease, member, connection, token, lease_bytes })
            }
            Err(error) => {
                shared.log_peer_error("could not join a lease", Some(self.link.peer()), &error);
                let status = match error {
                    AttachError::NoSuchLease => Status::NoSuchLease,
                    AttachError::MemberGone => Status::MemberGone,
                    _ => Status::LimitReached,
                };
                Err(Refused::new(status, error))
            }
        })
    }

    /// Becomes a member in the lease as well, and answers; while another thread works on it, later: no other
    /// connection of this shard waits for a lease that is none of its own.
    fn go_on_attaching(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, attaching: Box<Attaching>) {
        let Attaching { header, lease, member, connection, token, lease_bytes } = &*attaching;
        let (header, member, connection) = (*header, *member, *connection);
        match shared.attach_member(lease, member, connection) {
            None => self.paused = Some(Paused::Attach(attaching)),
            Some(false) => {
                let gone = Refused::new(Status::MemberGone, AttachError::MemberGone);
                self.refuse(buffers, header, &gone, shared);
            }
            Some(true) => {
                if connection != ConnectionNumber::FIRST
                    && shared.may_log("member reconnected", self.tenant.name)
                {
                    tracing::info!(tenant = %self.tenant_name(), lease = lease.id.0, member = member.0,
                        peer = %self.link.peer(), "member reconnected");
                }
                let granted = self.sit(shared, Arc::clone(lease), (member, connection), *token, *lease_bytes);
                self.grant(buffers, header, &granted);
            }
        }
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

    fn sits_already(&self) -> Option<Refused> {
        self.has_lease().then(|| Refused::new(Status::BadRequest, "this connection has its lease already"))
    }

    fn sit(
        &mut self,
        shared: &Shared,
        lease: Arc<Lease>,
        (member, connection): (MemberId, ConnectionNumber),
        token: LeaseToken,
        lease_bytes: u64,
    ) -> Granted {
        let ms = |duration: std::time::Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        let granted = Granted {
            lease: lease.id,
            token,
            member,
            server: shared.server,
            lease_bytes,
            max_requests: shared.config.max_requests,
            max_bytes: shared.config.max_bytes,
            grace_ms: ms(shared.config.grace),
            heartbeat_ms: ms(shared.config.heartbeat),
        };
        lease.connected(member, connection, self.link.means());
        let counted = self.counted;
        self.count(0);
        self.charged = Some(Arc::clone(&lease));
        self.count(counted);
        self.membership = Some(Membership { lease, member, connection });
        granted
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
                    shared.finish_later(direct::LeftUpdate::new(*updating, self.arena, of));
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

    fn send_status(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        let mut status = super::status::collect(shared, self.tenant.name);
        let json = loop {
            let json = serde_json::to_vec(&status).expect("numbers and strings");
            if json.len() <= MAX_BULK_BYTES {
                break json;
            }
            // More leases than fit one reply: the newest are left out.
            let keep = status.leases.len() / 2;
            status.leases.truncate(keep);
        };
        buffers.head.clear();
        encode_frame(&mut buffers.head, header.reply(Status::Ok), &[], json.len());
        let piece = [Piece { ptr: json.as_ptr(), len: json.len() }];
        // SAFETY: the guard owns the bytes, whose address does not change with the move of the vector.
        unsafe { self.link.send(Urgency::Demand, &buffers.head, &piece, Held::bytes(json)) };
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

const SHORT_OF_MEMORY: &str =
    "the server's machine is short of memory, so it gives no new leases for now; wait, or use another server";

const NO_LEASE: &str = "this connection has no lease";

fn no_lease() -> Refused {
    Refused::new(Status::NotAllowed, NO_LEASE)
}

fn is_direct(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Gather | Opcode::ReadPiece | Opcode::Scatter | Opcode::Accumulate | Opcode::Scan)
}

/// Whether a request's table takes more work than reading a few numbers.
fn is_laborious(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::Gather
            | Opcode::Scatter
            | Opcode::Accumulate
            | Opcode::Scan
            | Opcode::Copy
            | Opcode::PushHeads
    )
}

fn no_bulk(header: &Header) -> Result<(), End> {
    if header.bulk_len == 0 { Ok(()) } else { Err(End::Protocol("pages where none belong".to_owned())) }
}

const _: () = assert!(SINK_BYTES >= OS_PAGE_BYTES);
