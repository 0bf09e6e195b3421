//! What all threads of a server share.

use crate::closer::Closer;
use crate::config::ServerConfig;
use crate::lease::{Counts, Delivered, Duty, Lease, Order, Space};
use crate::lock::lock;
use crate::refused::Refused;
use crate::replies::Replies;
use crate::store::PageStore;
use crate::tenants::{LeaseLog, MOST_SURPLUS, Tenant, Tenants};
use crate::unauthenticated::PeerLog;
use rampool_lease::{
    ConnectionNumber, Departed, Directory, FrameIndex, LeaseSpace, Limits, Payer, QueueOutput, Revoked,
    Rules, StoredPage, Tick,
};
use rampool_net::key::random_bytes;
use rampool_net::transport::{Handshake, Peer};
use rampool_wire::frame::{LeaseId, MemberId, RegionId, Status};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
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
    peer_log: PeerLog,
    lease_log: LeaseLog,
    pub(super) replies: Arc<Replies>,
    pub(super) tenants: Tenants,
    closer: Closer,
    pub(super) shards: Vec<Mailbox>,
    directory: Arc<Mutex<Directory>>,
    leases: RwLock<BTreeMap<LeaseId, Arc<Lease>>>,
    reaper: Mutex<Sender<Task>>,
    /// A thread that copies to other servers has panicked.
    pub(super) copy_worker_died: AtomicBool,
    copy_workers: Mutex<Sender<Duty>>,
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
    ) -> io::Result<(Self, Receiver<Task>, Receiver<Duty>)> {
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

    /// A lease that the directory has opened for its first member.
    pub(super) fn open_lease(
        &self,
        id: LeaseId,
        member: MemberId,
        bytes: u64,
        tenant: Arc<Tenant>,
    ) -> Arc<Lease> {
        let space = LeaseSpace::new(bytes).with_queue_limits(self.config.queues);
        let lease =
            Arc::new(Lease::new(id, space, tenant, Arc::clone(&self.directory), Arc::clone(&self.store)));
        lease.space().member_joined(member, ConnectionNumber::FIRST);
        self.leases.write().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::clone(&lease));
        lease
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

    /// Fetches the replies of a lease's queues while the lease is locked. Frames of released
    /// bodies go back to the store.
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

    /// Where a page's bytes are for sending, and how many: as stored, or unpacked if `compressed` ones may
    /// not travel. The frame comes with a reference of its own.
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

    /// Other rules from now on. Connections whose keys they revoke end.
    pub(super) fn set_rules(&self, rules: Rules) {
        for (name, revoked) in &rules.revoked {
            match revoked {
                Revoked::All => tracing::info!(tenant = %name, "all keys of this tenant are revoked"),
                Revoked::Generations(generations) => {
                    tracing::info!(tenant = %name, ?generations, "keys of this tenant are revoked")
                }
            }
        }
        self.directory().accounts_mut().set_rules(rules.clone());
        self.tenants.set(rules);
        self.wake_all();
    }

    /// Charges a connection to its tenant. False: it has too many, and this one must end.
    pub(super) fn connect(&self, tenant: &Tenant) -> bool {
        let mut directory = self.directory();
        let accounts = directory.accounts_mut();
        let has = accounts.of(tenant.name).connections;
        let most = accounts.rules().quota(tenant.name).connections;
        let fits = most.is_none_or(|most| has < most.saturating_add(MOST_SURPLUS));
        if fits {
            accounts.connect(tenant.name);
        }
        fits
    }

    pub(super) fn disconnect(&self, tenant: &Tenant) {
        self.directory().accounts_mut().disconnect(tenant.name);
    }

    pub(super) fn may_log(&self, what: &'static str, whom: Payer) -> bool {
        self.lease_log.may_say(self.now(), what, whom)
    }

    pub(super) fn log_peer_error(&self, what: &'static str, peer: Option<&Peer>, error: &dyn Display) {
        self.peer_log.say(self.now(), what, peer, error);
    }

    /// Logs how often what is repeated was, when the minute is over, or at the end.
    pub(super) fn log_repeated(&self, at_the_end: bool) {
        let now = (!at_the_end).then(|| self.now());
        self.peer_log.say_repeated(now);
        self.lease_log.say_repeated(now);
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

    pub(super) fn wake_all(&self) {
        for shard in &self.shards {
            shard.ring();
        }
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
