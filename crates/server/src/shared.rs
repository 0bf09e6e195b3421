//! What all threads of a server share.

use super::closer::Closer;
use super::copy_worker::{self, CopyTable, Delivered, Order};
use super::unauthenticated::PeerLog;
use super::{ServerConfig, ServerStatus};
use crate::block::Blocks;
use crate::published::PublishedMemories;
use crate::refused::Refused;
use crate::store::PageStore;
use crate::tenants::{LeaseLog, Tenant, Tenants};
use rampool_lease::{
    Charges, ConnectionNumber, Departed, Directory, FrameIndex, LeaseSpace, Limits, QueueOutput, SpaceUsage,
    StoredPage, Tick,
};
use rampool_net::key::random_bytes;
use rampool_net::transport::{Handshake, Means, Peer};
use rampool_wire::frame::{LeaseId, MemberId, RegionId, Status};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, TryLockError};
use std::time::{Duration, Instant};

pub(super) struct Shared {
    pub(super) config: ServerConfig,
    pub(super) store: Arc<dyn PageStore>,
    /// Names this run of the server.
    pub(super) server: u64,
    pub(super) started: Instant,
    pub(super) stopping: AtomicBool,
    /// The machine is short of memory.
    pub(super) short_of_memory: AtomicBool,
    /// Milliseconds since `started` at which a draining server stops; 0 while it does not drain.
    pub(super) drain_until_ms: AtomicU64,
    /// Places taken, by connections and by handshakes under way.
    pub(super) connections: AtomicUsize,
    pub(super) peer_log: PeerLog,
    pub(super) lease_log: LeaseLog,
    pub(super) replies: Arc<Replies>,
    pub(super) tenants: Tenants,
    closer: Closer,
    pub(super) shards: Vec<Mailbox>,
    directory: Arc<Mutex<Directory>>,
    leases: RwLock<BTreeMap<LeaseId, Arc<Lease>>>,
    reaper: Mutex<Sender<Task>>,
    /// A thread that copies to other servers has panicked.
    pub(super) copy_worker_died: AtomicBool,
    copy_workers: Mutex<Sender<copy_worker::Duty>>,
    blocks: OnceLock<Blocks>,
}

/// One lease as connections see it. Locked before the directory where both are needed: work on a lease takes
/// long, and the directory is for all.
pub(super) struct Lease {
    pub(super) id: LeaseId,
    pub(super) tenant: Arc<Tenant>,
    space: Mutex<Charged>,
    /// For its tenant's account.
    directory: Arc<Mutex<Directory>>,
    /// What it used when that was seen last, for those that do not wait for it.
    used: Mutex<Looked>,
    /// Replies that its connections have queued.
    pub(super) replies: Replies,
    pub(super) counts: Counts,
    /// The copy table: orders of copies to other servers.
    pub(super) copy_table: CopyTable,
    /// The transports of its members' connections, for the status.
    means: Mutex<BTreeMap<MemberId, (ConnectionNumber, Means)>>,
    published: Mutex<PublishedMemories>,
}

/// A lease's regions, and what is charged for them to its tenant.
struct Charged {
    space: LeaseSpace,
    charged: Charges,
}

/// A lease's regions, locked. What has become of their number and tables is charged when it is unlocked.
pub(super) struct Space<'a> {
    locked: MutexGuard<'a, Charged>,
    lease: &'a Lease,
}

impl std::ops::Deref for Space<'_> {
    type Target = LeaseSpace;

    fn deref(&self) -> &LeaseSpace {
        &self.locked.space
    }
}

impl std::ops::DerefMut for Space<'_> {
    fn deref_mut(&mut self) -> &mut LeaseSpace {
        &mut self.locked.space
    }
}

impl Space<'_> {
    /// Makes a region, or a queue with its region, if the tenant may have one more.
    pub(super) fn make<R>(&mut self, queues: u64, make: impl FnOnce(&mut LeaseSpace) -> R) -> R {
        let charged = lock(&self.lease.directory).accounts_mut().charge(self.lease.tenant.name, 1, queues);
        if charged.is_ok() {
            self.locked.charged.regions += 1;
            self.locked.charged.queues += queues;
        }
        self.locked.space.set_over_quota(charged.err());
        make(&mut self.locked.space)
    }
}

impl Drop for Space<'_> {
    fn drop(&mut self) {
        let (charged, now) = (self.locked.charged, self.locked.space.charges());
        if charged != now {
            let mut directory = lock(&self.lease.directory);
            directory.accounts_mut().settle(self.lease.tenant.name, charged, now);
            self.locked.charged = now;
        }
    }
}

/// What a lease uses, and its queues, for the status.
pub(super) type Looked = (SpaceUsage, Vec<super::QueueStatus>);

/// Bytes of replies that wait to leave, of many connections together: what a connection has beyond
/// [`OWN_REPLY_BYTES`].
pub(super) struct Replies {
    waiting: AtomicU64,
    most: AtomicU64,
}

/// Bytes of replies that one connection may queue regardless of the others; and, where nothing else may be
/// queued, one reply more.
pub(super) const OWN_REPLY_BYTES: usize = 64 << 10;

impl Replies {
    pub(super) fn new(most: u64) -> Self {
        Self { waiting: AtomicU64::new(0), most: AtomicU64::new(most) }
    }

    pub(super) fn set_most(&self, most: u64) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// A connection's queued bytes are `now` instead of `before`, both beyond its own.
    pub(super) fn change(&self, before: usize, now: usize) {
        match now.checked_sub(before) {
            Some(0) => {}
            Some(more) => _ = self.waiting.fetch_add(more as u64, Ordering::Relaxed),
            None => _ = self.waiting.fetch_sub((before - now) as u64, Ordering::Relaxed),
        }
    }

    /// Whether connections with queued replies must take them before more of their requests are read.
    pub(super) fn are_many(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= self.most.load(Ordering::Relaxed)
    }

    pub(super) fn waiting_bytes(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// Operation counters, written by the requests of one lease or one shard, read by any thread.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Counts {
    pub(super) gets: AtomicU64,
    pub(super) got_pages: AtomicU64,
    pub(super) puts: AtomicU64,
    pub(super) put_pages: AtomicU64,
    pub(super) discards: AtomicU64,
    pub(super) control: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) bytes_in: AtomicU64,
    pub(super) bytes_out: AtomicU64,
}

/// What is left to the reaper.
pub(super) enum Task {
    Settle(Departed),
    /// Freeing pages of this lease's freed regions has stopped halfway.
    Bury(LeaseId),
    /// A connection has ended in the middle of an update.
    Finish(Box<dyn FnOnce(&Shared) + Send>),
}

/// The answer to a request that waits in a queue, for its connection: argument and table.
pub(super) struct Post {
    pub(super) shard: usize,
    pub(super) token: u64,
    pub(super) request: u64,
    pub(super) result: Result<(u64, Vec<u8>), Refused>,
}

pub(super) type Posts = Vec<Post>;

/// A connection that was accepted.
pub(super) struct Arrival {
    pub(super) handshake: Handshake,
    pub(super) may_stay: bool,
}

/// A handle to a shard, for other threads.
pub(super) struct Mailbox {
    pub(super) arrivals: Mutex<Vec<Arrival>>,
    /// Copies that have ended.
    pub(super) delivered: Mutex<Vec<Delivered>>,
    /// Answers of queues.
    pub(super) posts: Mutex<Posts>,
    pub(super) doorbell: OwnedFd,
    pub(super) counts: Counts,
    pub(super) protocol_errors: AtomicU64,
    pub(super) failed_handshakes: AtomicU64,
    pub(super) sleeps: AtomicU64,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of another thread is reported where it happened; what it left is checked by assertions.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lease {
    pub(super) fn new(shared: &Shared, id: LeaseId, bytes: u64, tenant: &Arc<Tenant>) -> Self {
        let space = LeaseSpace::new(bytes).with_queue_limits(shared.config.queues);
        Self {
            id,
            tenant: Arc::clone(tenant),
            space: Mutex::new(Charged { space, charged: Charges::default() }),
            directory: Arc::clone(&shared.directory),
            used: Mutex::default(),
            replies: Replies::new(u64::MAX),
            counts: Counts::default(),
            copy_table: CopyTable::default(),
            means: Mutex::default(),
            published: Mutex::default(),
        }
    }

    /// No thread keeps it locked for longer than a slice of work.
    pub(super) fn space(&self) -> Space<'_> {
        Space { locked: lock(&self.space), lease: self }
    }

    /// As [`Lease::space`], unless another thread holds the lock.
    pub(super) fn idle_space(&self) -> Option<Space<'_>> {
        let locked = match self.space.try_lock() {
            Ok(locked) => locked,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Space { locked, lease: self })
    }

    /// What it uses; while another thread works on it, what it used before.
    pub(super) fn look(&self, look: impl FnOnce(&LeaseSpace) -> Looked) -> Looked {
        match self.idle_space() {
            Some(space) => {
                let looked = look(&space);
                drop(space);
                lock(&self.used).clone_from(&looked);
                looked
            }
            None => lock(&self.used).clone(),
        }
    }

    /// A member's connection travels by these means.
    pub(super) fn connected(&self, member: MemberId, connection: ConnectionNumber, means: Means) {
        lock(&self.means).insert(member, (connection, means));
    }

    /// It has ended; the member may have another one by now.
    pub(super) fn disconnected(&self, member: MemberId, connection: ConnectionNumber) {
        let mut means = lock(&self.means);
        if means.get(&member).is_some_and(|(of, _)| *of == connection) {
            means.remove(&member);
        }
    }

    pub(super) fn published(&self) -> MutexGuard<'_, PublishedMemories> {
        lock(&self.published)
    }

    pub(super) fn means_of(&self, member: MemberId) -> Option<Means> {
        lock(&self.means).get(&member).map(|(_, means)| *means)
    }
}

impl Mailbox {
    pub(super) fn ring(&self) {
        // A full counter rings as well.
        let _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
    }
}

impl Shared {
    pub(super) fn new(
        config: ServerConfig,
        store: Arc<dyn PageStore>,
    ) -> io::Result<(Self, Receiver<Task>, Receiver<copy_worker::Duty>)> {
        let limits = Limits {
            memory_bytes: config.memory_bytes,
            grace_ms: u64::try_from(config.grace.as_millis()).unwrap_or(u64::MAX),
            max_leases: config.max_connections.saturating_mul(4),
            max_members: config.max_connections.saturating_mul(4),
        };
        let mailbox = || -> io::Result<Mailbox> {
            Ok(Mailbox {
                arrivals: Mutex::default(),
                delivered: Mutex::default(),
                posts: Mutex::default(),
                doorbell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
                counts: Counts::default(),
                protocol_errors: AtomicU64::new(0),
                failed_handshakes: AtomicU64::new(0),
                sleeps: AtomicU64::new(0),
            })
        };
        let shards = (0..config.shards).map(|_| mailbox()).collect::<io::Result<_>>()?;
        let (reaper, orders) = channel();
        let (copy_workers, duties) = channel();
        let replies = Arc::new(Replies::new(config.reply_bytes()));
        let tenants = Tenants::new(config.tenants.clone(), config.shards);
        let mut directory = Directory::new(limits);
        directory.accounts_mut().set_rules(config.tenants.clone());
        let shared = Self {
            config,
            store,
            replies,
            tenants,
            server: u64::from_le_bytes(random_bytes()),
            started: Instant::now(),
            stopping: AtomicBool::new(false),
            short_of_memory: AtomicBool::new(false),
            drain_until_ms: AtomicU64::new(0),
            connections: AtomicUsize::new(0),
            peer_log: PeerLog::default(),
            lease_log: LeaseLog::default(),
            closer: Closer::default(),
            shards,
            directory: Arc::new(Mutex::new(directory)),
            leases: RwLock::default(),
            reaper: Mutex::new(reaper),
            copy_worker_died: AtomicBool::new(false),
            copy_workers: Mutex::new(copy_workers),
            blocks: OnceLock::new(),
        };
        Ok((shared, orders, duties))
    }

    pub(super) fn directory(&self) -> MutexGuard<'_, Directory> {
        lock(&self.directory)
    }

    pub(super) fn now(&self) -> Tick {
        Tick(u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    pub(super) fn lease(&self, id: LeaseId) -> Option<Arc<Lease>> {
        self.leases.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    pub(super) fn leases(&self) -> Vec<Arc<Lease>> {
        self.leases.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub(super) fn add_lease(&self, lease: Arc<Lease>) {
        self.leases.write().unwrap_or_else(PoisonError::into_inner).insert(lease.id, lease);
    }

    pub(super) fn remove_lease(&self, id: LeaseId) {
        self.leases.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// Hands a departure to the reaper.
    pub(super) fn depart(&self, departed: Departed) {
        self.leave_to_reaper(Task::Settle(departed));
    }

    /// Lets the reaper free what is left of a lease's freed regions.
    pub(super) fn bury_later(&self, lease: LeaseId) {
        self.leave_to_reaper(Task::Bury(lease));
    }

    /// Lets the reaper finish what a connection has begun.
    pub(super) fn finish_later(&self, finish: Box<dyn FnOnce(&Shared) + Send>) {
        self.leave_to_reaper(Task::Finish(finish));
    }

    fn leave_to_reaper(&self, task: Task) {
        if lock(&self.reaper).send(task).is_err() {
            // The reaper only ends with the server, and then all memory is freed.
            tracing::debug!("a member left while the server stopped");
        }
    }

    /// Hands a copy to its lease's copy worker.
    pub(super) fn order(&self, order: Order) {
        let lease = Arc::clone(&order.lease);
        if let Some(duty) = lease.copy_table.hand_over(order)
            && lock(&self.copy_workers).send(duty).is_err()
        {
            // Copy workers are started until the server ends.
            tracing::debug!("a copy was ordered while the server stopped");
        }
    }

    /// The member uses this connection of its lease from now on. False: it has left by now; `None`: another
    /// thread works on the lease, or the member's old connection is in the middle of an update.
    pub(super) fn attach_member(
        &self,
        lease: &Lease,
        member: MemberId,
        connection: ConnectionNumber,
    ) -> Option<bool> {
        let mut space = lease.idle_space()?;
        if space.is_updating(member) {
            // The request may be repeated over the new connection, and must find it answered.
            return None;
        }
        let mut released = Vec::new();
        space.member_joined(member, connection);
        // It may have been dismissed since the directory was asked, and its departure settled.
        let stays = self.directory().has(lease.id, member);
        if !stays {
            space.member_gone(member);
            // It had no time to make any.
            space.bury(u64::MAX, &mut released);
        } else if space.has_freed() {
            // A clone that its old connection had begun.
            self.bury_later(lease.id);
        }
        self.tell_queues(space);
        self.store.release(&released);
        Some(stays)
    }

    /// The member's connection has ended: what waits in queues is asked for again over the next one.
    pub(super) fn stop_waiting(&self, lease: &Lease, member: MemberId, connection: ConnectionNumber) {
        self.answer_queues(lease, |space| {
            if space.admit(member, connection).is_ok() {
                space.queue_member_disconnected(member);
            }
        });
    }

    /// Changes a lease, and brings the answers of queues that follow from it to their shards.
    pub(super) fn answer_queues(&self, lease: &Lease, change: impl FnOnce(&mut Space<'_>)) {
        let mut space = lease.space();
        change(&mut space);
        self.tell_queues(space);
    }

    fn tell_queues(&self, mut space: Space<'_>) {
        let mut posts = Posts::new();
        self.collect(&mut space, &mut posts);
        drop(space);
        self.post(posts);
    }

    /// Fetches the replies of a lease's queues while the lease is locked. Frames of released bodies go back to
    /// the store.
    pub(super) fn collect(&self, space: &mut LeaseSpace, posts: &mut Posts) {
        let mut released = Vec::new();
        while let Some(output) = space.poll_queues(&mut released) {
            let (to, result) = match output {
                QueueOutput::Pushed { to, number, body_at } => {
                    (to, Ok((number, body_at.map_or_else(Vec::new, |at| at.to_le_bytes().to_vec()))))
                }
                QueueOutput::Taken { to, queue, numbers } => {
                    let mut table = Vec::with_capacity(numbers.len() * 128);
                    numbers
                        .iter()
                        .for_each(|number| space.queues().delivery(queue, *number).encode(&mut table));
                    (to, Ok((numbers.len() as u64, table)))
                }
                QueueOutput::Body { to, there } => (to, Ok((u64::from(there), Vec::new()))),
                QueueOutput::Failed { to, error } => (to, Err(Refused::from(error))),
                _ => continue,
            };
            posts.push(Post { shard: to.origin.0, token: to.origin.1, request: to.request, result });
        }
        self.store.release(&released);
    }

    /// Bytes of a region were stored: this may complete a body that a receiver waits for.
    pub(super) fn bytes_came(
        &self,
        space: &mut LeaseSpace,
        posts: &mut Posts,
        (region, from, bytes): (RegionId, u64, u64),
    ) {
        space.bytes_came(region, from, bytes);
        self.collect(space, posts);
    }

    /// Brings answers of queues to their shards.
    pub(super) fn post(&self, posts: Posts) {
        let mut rings = vec![false; if posts.is_empty() { 0 } else { self.shards.len() }];
        for post in posts {
            let shard = post.shard;
            lock(&self.shards[shard].posts).push(post);
            rings[shard] = true;
        }
        for (shard, _) in self.shards.iter().zip(rings).filter(|(_, rings)| *rings) {
            shard.ring();
        }
    }

    /// Where a page's bytes are for sending, and how many: as stored, or unpacked if `compressed` ones may not
    /// travel. The frame comes with a reference of its own.
    pub(super) fn present(
        &self,
        arena: usize,
        page: &StoredPage,
        compressed: bool,
    ) -> Result<(FrameIndex, u32), Refused> {
        let presented = self.store.present(arena, page, compressed)?;
        presented.ok_or_else(|| Refused::new(Status::PoolFull, "no room to unpack a page"))
    }

    /// Closes an unused descriptor on another thread, because that may take long.
    pub(super) fn close_elsewhere(&self, fd: OwnedFd) {
        self.closer.close(fd);
    }

    /// The server has these block devices.
    pub(super) fn offer(&self, blocks: Blocks) {
        assert!(self.blocks.set(blocks).is_ok(), "block devices are offered once");
    }

    pub(super) fn blocks(&self) -> &Blocks {
        self.blocks.get().expect("offered before any thread starts")
    }

    /// Whether this peer may be a client, as far as its user decides that.
    pub(super) fn allows(&self, peer: &Peer) -> bool {
        match peer {
            Peer::Unix { uid, .. } => {
                let own = rustix::process::geteuid().as_raw();
                *uid == own || *uid == 0 || self.config.allow_uids.contains(uid)
            }
            Peer::Tcp(_) => true,
        }
    }

    /// A place for one more connection. False: all are taken.
    pub(super) fn take_place(&self) -> bool {
        let one_more = |taken: usize| (taken < self.config.max_connections).then_some(taken + 1);
        self.connections.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    pub(super) fn give_place_back(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    pub(super) fn short_of_memory(&self) -> bool {
        self.short_of_memory.load(Ordering::Relaxed)
    }

    pub(super) fn draining(&self) -> bool {
        self.drain_until_ms.load(Ordering::Relaxed) != 0
    }

    pub(super) fn start_draining(&self, timeout: Duration) {
        let until =
            self.now().0.saturating_add(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)).max(1);
        self.drain_until_ms.store(until, Ordering::SeqCst);
        self.wake_all();
    }

    /// Milliseconds a draining server has left.
    pub(super) fn drain_left_ms(&self) -> u64 {
        self.drain_until_ms.load(Ordering::Relaxed).saturating_sub(self.now().0)
    }

    /// A member whose connection broke counts for as long as it may come back.
    pub(super) fn has_members(&self) -> bool {
        // The member of an export's lease is the server itself.
        let is_client = |lease: &rampool_lease::LeaseSummary| {
            !lease.members.is_empty() && !self.blocks().holds(lease.lease)
        };
        self.blocks().has_clients() || self.directory().summary().iter().any(is_client)
    }

    pub(super) fn wake_all(&self) {
        for shard in &self.shards {
            shard.ring();
        }
        if let Some(blocks) = self.blocks.get() {
            blocks.wake_all();
        }
    }

    pub(super) fn status(&self) -> ServerStatus {
        super::status::collect(self, None)
    }

    pub(super) fn check(&self) {
        self.directory().check();
        for lease in self.leases() {
            lease.space().check();
        }
        if self.connections.load(Ordering::Relaxed) == 0 {
            self.store.check();
            assert_eq!(self.replies.waiting_bytes(), 0, "no reply waits without a connection");
            let directory = self.directory();
            assert!(directory.accounts().all().all(|(_, account)| account.connections == 0));
            assert!(self.tenants.all().iter().all(|tenant| tenant.replies.waiting_bytes() == 0));
        }
    }
}
