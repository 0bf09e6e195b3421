//! Tenants at work: what each has under way, and what it has had of the server's time.
//!
//! What a tenant may have is decided by `rampool_lease`'s accounts and shares. Here is what many threads
//! count for it.

use super::lock::lock;
use super::replies::Replies;
use rampool_lease::{LogLimiter, Payer, Quota, Rate, Repeated, Rules, Tick};
use rampool_net::transport::Gate;
use rampool_wire::session::Refusal;
use rampool_wire::tenant::TenantId;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Connections beyond its quota that a tenant may have at a time, to come back over when others have broken.
pub(super) const MOST_SURPLUS: u64 = 8;

/// In each minute so many lines of a kind are written about a tenant, and later how many more there were.
const LOG_PERIOD_MS: u64 = 60_000;
pub(super) const LINES_OF_A_KIND: u64 = 10;
/// So many kinds and tenants are kept apart.
const MOST_KINDS: usize = 64;

/// What the log says of leases and those who use them, and about whom.
pub(super) struct LeaseLog(Mutex<LogLimiter<(&'static str, Payer)>>);

impl Default for LeaseLog {
    fn default() -> Self {
        Self(Mutex::new(LogLimiter::new(LOG_PERIOD_MS, MOST_KINDS).in_full(LINES_OF_A_KIND)))
    }
}

impl LeaseLog {
    /// Whether to write a line of this kind now: a client can cause it as often as it likes, so that what is
    /// repeated is counted instead.
    pub(super) fn may_say(&self, now: Tick, what: &'static str, whom: Payer) -> bool {
        lock(&self.0).hear(now, (what, whom))
    }

    /// Logs how often it was, when the minute is over, or, without a time, at the end.
    pub(super) fn say_repeated(&self, now: Option<Tick>) {
        let repeated = lock(&self.0).due(now);
        for Repeated { what, times } in repeated {
            match what {
                Some((what, whom)) => {
                    tracing::info!(
                        tenant = in_words(whom),
                        times,
                        "{what}: more like this in the last minute"
                    )
                }
                None => tracing::info!(times, "more of other kinds, or of other tenants, in the last minute"),
            }
        }
    }
}

/// As the log names it.
pub(super) fn in_words(payer: Payer) -> String {
    payer.map_or_else(|| "-".to_owned(), |name| name.to_string())
}

/// One tenant; or the clients that have the master key, or all clients where there is no key.
pub(super) struct Tenant {
    pub(super) name: Payer,
    pub(super) replies: Replies,
    weight: AtomicU32,
    /// 0: as fast as it can.
    rate_bytes: AtomicU64,
    rate: Mutex<Rate>,
    /// Time that it was served, by all threads.
    served_ns: AtomicU64,
    here: Box<[Here]>,
}

/// What one shard knows of a tenant; only that shard writes it.
#[derive(Default)]
#[repr(align(64))]
struct Here {
    served_ns: AtomicU64,
    /// Time with other threads that has been charged here.
    elsewhere_ns: AtomicU64,
}

impl Tenant {
    fn new(name: Payer, quota: &Quota, shards: usize) -> Self {
        let tenant = Self {
            name,
            replies: Replies::new(u64::MAX),
            weight: AtomicU32::new(1),
            rate_bytes: AtomicU64::new(0),
            rate: Mutex::default(),
            served_ns: AtomicU64::new(0),
            here: (0..shards).map(|_| Here::default()).collect(),
        };
        tenant.set(quota);
        tenant
    }

    fn set(&self, quota: &Quota) {
        self.weight.store(quota.weight, Ordering::Relaxed);
        self.rate_bytes.store(quota.rate_bytes.unwrap_or(0), Ordering::Relaxed);
        self.replies.set_most(quota.reply_bytes.unwrap_or(u64::MAX));
    }

    pub(super) fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// When it may go on, in the server's nanoseconds; 0: now.
    pub(super) fn may_go_on_ns(&self) -> u64 {
        if self.rate_bytes.load(Ordering::Relaxed) == 0 { 0 } else { lock(&self.rate).next_ns() }
    }

    /// It has moved so many bytes.
    pub(super) fn moved(&self, now_ns: impl FnOnce() -> u64, bytes: u64) {
        let rate = self.rate_bytes.load(Ordering::Relaxed);
        if rate > 0 && bytes > 0 {
            lock(&self.rate).charge(now_ns(), bytes, rate);
        }
    }

    /// A thread that is no shard has worked for it.
    pub(super) fn worked(&self, time_ns: u64) {
        self.served_ns.fetch_add(time_ns, Ordering::Relaxed);
    }

    /// A shard has served it. Returns the time with other threads since this was called last.
    pub(super) fn served(&self, shard: usize, time_ns: u64) -> u64 {
        let Here { served_ns, elsewhere_ns } = &self.here[shard];
        let here = served_ns.load(Ordering::Relaxed) + time_ns;
        served_ns.store(here, Ordering::Relaxed);
        let all = self.served_ns.fetch_add(time_ns, Ordering::Relaxed) + time_ns;
        let elsewhere = all.saturating_sub(here);
        let known = elsewhere_ns.load(Ordering::Relaxed);
        elsewhere_ns.store(elsewhere, Ordering::Relaxed);
        elsewhere.saturating_sub(known)
    }

    pub(super) fn served_ns(&self) -> u64 {
        self.served_ns.load(Ordering::Relaxed)
    }
}

/// All tenants that have a connection or a lease, and the rules for them.
pub(super) struct Tenants {
    rules: Arc<RwLock<Rules>>,
    known: Mutex<BTreeMap<Payer, Arc<Tenant>>>,
    /// How often the rules have changed.
    changes: AtomicU64,
    shards: usize,
}

impl Tenants {
    pub(super) fn new(rules: Rules, shards: usize) -> Self {
        let (known, changes) = (Mutex::default(), AtomicU64::new(0));
        Self { rules: Arc::new(RwLock::new(rules)), known, changes, shards }
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Rules> {
        self.rules.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one of this name. Those that have nothing any more are forgotten.
    pub(super) fn of(&self, name: Payer) -> Arc<Tenant> {
        let mut known = lock(&self.known);
        if let Some(tenant) = known.get(&name) {
            return Arc::clone(tenant);
        }
        known.retain(|_, tenant| Arc::strong_count(tenant) > 1);
        let tenant = Arc::new(Tenant::new(name, &self.read().quota(name), self.shards));
        known.insert(name, Arc::clone(&tenant));
        tenant
    }

    pub(super) fn all(&self) -> Vec<Arc<Tenant>> {
        lock(&self.known).values().cloned().collect()
    }

    pub(super) fn is_revoked(&self, tenant: TenantId) -> bool {
        self.read().is_revoked(tenant)
    }

    /// For handshakes.
    pub(super) fn gate(&self) -> Gate {
        let rules = Arc::clone(&self.rules);
        Arc::new(move |tenant| {
            let rules = rules.read().unwrap_or_else(PoisonError::into_inner);
            rules.is_revoked(tenant).then_some(Refusal::Revoked)
        })
    }

    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(super) fn set(&self, rules: Rules) {
        let known = lock(&self.known);
        known.values().for_each(|tenant| tenant.set(&rules.quota(tenant.name)));
        *self.rules.write().unwrap_or_else(PoisonError::into_inner) = rules;
        self.changes.fetch_add(1, Ordering::Release);
    }
}
