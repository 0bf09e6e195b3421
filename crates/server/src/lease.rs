//! A lease as the threads of a server see it, and the orders of its copies to other servers.

use crate::lock::lock;
use crate::published::PublishedMemories;
use crate::refused::Refused;
use crate::replies::Replies;
use crate::store::PageStore;
use crate::tenants::Tenant;
use rampool_lease::{Charges, ConnectionNumber, Directory, LeaseSpace, QueueCounts, QueueId, SpaceUsage};
use rampool_net::transport::Means;
use rampool_wire::frame::{CopyRequest, Header, LeaseId, Listed, MemberId};
use rampool_wire::tenant::TenantId;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// One lease as connections see it. Locked before the directory where both are needed: work on a lease takes
/// long, and the directory is for all.
pub(super) struct Lease {
    pub(super) id: LeaseId,
    pub(super) tenant: Arc<Tenant>,
    space: Mutex<Charged>,
    /// For its tenant's account.
    directory: Arc<Mutex<Directory>>,
    store: Arc<dyn PageStore>,
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

/// A lease's regions, locked. When it is unlocked, what has become of their number and tables is charged, and
/// who knows the frame of a page that has left it will not read it there.
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
        // Before its last reference is given back, which is done after this.
        self.locked.space.left().for_each(|frame| self.lease.store.touch(frame));
        let (charged, now) = (self.locked.charged, self.locked.space.charges());
        if charged != now {
            let mut directory = lock(&self.lease.directory);
            directory.accounts_mut().settle(self.lease.tenant.name, charged, now);
            self.locked.charged = now;
        }
    }
}

/// What a lease uses, and its queues, for the status.
pub(super) type Looked = (SpaceUsage, Vec<(Listed, QueueCounts)>);

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

impl Lease {
    pub(super) fn new(
        id: LeaseId,
        space: LeaseSpace,
        tenant: Arc<Tenant>,
        directory: Arc<Mutex<Directory>>,
        store: Arc<dyn PageStore>,
    ) -> Self {
        Self {
            id,
            tenant,
            space: Mutex::new(Charged { space, charged: Charges::default() }),
            directory,
            store,
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
    pub(super) fn look(&self) -> Looked {
        match self.idle_space() {
            Some(space) => {
                let looked = (space.usage(), space.queues().list(QueueId(0)).collect());
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
        drop(means);
        self.published().disconnected(member, connection);
    }

    pub(super) fn published(&self) -> MutexGuard<'_, PublishedMemories> {
        lock(&self.published)
    }

    pub(super) fn means_of(&self, member: MemberId) -> Option<Means> {
        lock(&self.means).get(&member).map(|(_, means)| *means)
    }
}

/// A copy, and where its completion goes.
pub(super) struct Order {
    pub shard: usize,
    pub token: u64,
    pub header: Header,
    pub lease: Arc<Lease>,
    pub member: MemberId,
    pub connection: ConnectionNumber,
    pub identity: Option<TenantId>,
    pub copy: CopyRequest,
}

/// The result of a copy, for the shard of its connection.
pub(super) struct Delivered {
    pub token: u64,
    pub header: Header,
    pub result: Result<u64, Refused>,
}

/// A copy worker that is to start: its lease, and what it is to carry out.
pub(super) struct Duty {
    pub(super) lease: Arc<Lease>,
    pub(super) orders: Receiver<Order>,
}

/// How orders reach a lease's copy worker.
///
/// Invariant: while there is a sender, its copy worker runs or is about to start.
#[derive(Default)]
pub(super) struct CopyTable(Mutex<Option<Sender<Order>>>);

impl CopyTable {
    /// Hands an order over. Returns the copy worker to start, if the lease had none.
    pub(super) fn hand_over(&self, order: Order) -> Option<Duty> {
        let mut copy_table = lock(&self.0);
        let order = match &*copy_table {
            None => order,
            Some(copy_worker) => match copy_worker.send(order) {
                Ok(()) => return None,
                // It has panicked, which is reported where it happened.
                Err(SendError(order)) => order,
            },
        };
        let (copy_worker, orders) = channel();
        let lease = Arc::clone(&order.lease);
        copy_worker.send(order).expect("the receiver is here");
        *copy_table = Some(copy_worker);
        Some(Duty { lease, orders })
    }

    /// The copy worker ends, unless there is an order left.
    pub(super) fn close(&self, orders: &Receiver<Order>) -> Option<Order> {
        let mut copy_table = lock(&self.0);
        let left = orders.try_recv().ok();
        if left.is_none() {
            *copy_table = None;
        }
        left
    }
}
