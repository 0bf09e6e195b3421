//! What the operator says about tenants, and what each of them has.
//!
//! A tenant is who has one of the keys derived from a pool's master; `None` stands for the master itself, or
//! for everybody where there is no key. Leases, connections, regions and queues are charged to the tenant
//! that has them. Whatever is more than its quota is refused, and nothing that it has is taken away when the
//! quota shrinks.
//!
//! Invariant: an account is there exactly while something is charged to it.

use rampool_wire::tenant::{TenantId, TenantName};
use std::collections::{BTreeMap, BTreeSet};

/// Who pays: a tenant, or (`None`) a client with the master key.
pub type Payer = Option<TenantName>;

/// The highest weight: one tenant's share is at most so many times another's.
pub const MAX_WEIGHT: u32 = 100;

/// What one tenant may have. `None`: as much as the server has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Quota {
    /// Of all its leases, and of their page tables, as far as [`Account::table_bytes`] counts them.
    pub memory_bytes: Option<u64>,
    pub connections: Option<u64>,
    pub regions: Option<u64>,
    pub queues: Option<u64>,
    /// Of replies that it has not taken, but for 64 KiB of each connection.
    pub reply_bytes: Option<u64>,
    /// Of requests and replies, a second.
    pub rate_bytes: Option<u64>,
    /// Its share of the server's time, against the others' weights; from 1 to [`MAX_WEIGHT`].
    pub weight: u32,
}

impl Default for Quota {
    fn default() -> Self {
        Self {
            memory_bytes: None,
            connections: None,
            regions: None,
            queues: None,
            reply_bytes: None,
            rate_bytes: None,
            weight: 1,
        }
    }
}

/// Keys of one tenant that are not accepted any more.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Revoked {
    Generations(BTreeSet<u32>),
    All,
}

/// What the operator says about all tenants.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rules {
    /// For tenants that have no quota of their own.
    pub default: Quota,
    pub quotas: BTreeMap<TenantName, Quota>,
    pub revoked: BTreeMap<TenantName, Revoked>,
}

impl Rules {
    /// The master has no quota, and weight 1.
    #[must_use]
    pub fn quota(&self, payer: Payer) -> Quota {
        payer.map_or_else(Quota::default, |name| self.quotas.get(&name).unwrap_or(&self.default).clone())
    }

    #[must_use]
    pub fn is_revoked(&self, tenant: TenantId) -> bool {
        match self.revoked.get(&tenant.name) {
            None => false,
            Some(Revoked::All) => true,
            Some(Revoked::Generations(generations)) => generations.contains(&tenant.generation),
        }
    }
}

/// What is charged to one tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Account {
    pub lent_bytes: u64,
    pub leases: u64,
    pub connections: u64,
    /// Members without a connection, within their grace time.
    pub lost: u64,
    pub regions: u64,
    pub queues: u64,
    /// Of its leases' free page tables, beyond a 64th of each lease.
    pub table_bytes: u64,
}

/// What one lease has of what is charged to its tenant as it comes and goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Charges {
    pub regions: u64,
    pub queues: u64,
    /// Of page tables that it has for free, beyond a 64th of it.
    pub table_bytes: u64,
}

/// A tenant has as much as its quota allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this tenant has {has} of the {quota} {what} that it may have")]
pub struct OverQuota {
    pub what: &'static str,
    pub has: u64,
    pub quota: u64,
}

impl OverQuota {
    /// What it could have more.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.quota.saturating_sub(self.has)
    }
}

/// The accounts of all tenants.
#[derive(Debug, Default)]
pub struct Accounts {
    rules: Rules,
    accounts: BTreeMap<Payer, Account>,
}

impl Accounts {
    pub fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    #[must_use]
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    #[must_use]
    pub fn of(&self, payer: Payer) -> Account {
        self.accounts.get(&payer).copied().unwrap_or_default()
    }

    /// Everybody to whom something is charged.
    pub fn all(&self) -> impl Iterator<Item = (Payer, Account)> {
        self.accounts.iter().map(|(payer, account)| (*payer, *account))
    }

    /// Whether the tenant may have so many bytes more in leases.
    ///
    /// # Errors
    /// [`OverQuota`].
    pub fn may_lend(&self, payer: Payer, more: u64) -> Result<(), OverQuota> {
        let has = self.of(payer);
        within("bytes", has.lent_bytes + has.table_bytes, more, self.rules.quota(payer).memory_bytes)
    }

    /// Whether the tenant may have one lease more, where none may have more than `most`. The master may: who
    /// has it has no quota, and where nobody has another key, there is nobody else.
    ///
    /// # Errors
    /// [`OverQuota`].
    pub(crate) fn may_open(&self, payer: Payer, most: u64) -> Result<(), OverQuota> {
        within("leases", self.of(payer).leases, 1, payer.map(|_| most))
    }

    /// It has so many leases more, or fewer.
    pub(crate) fn count_leases(&mut self, payer: Payer, more: u64, fewer: u64) {
        self.change(payer, |account| account.leases = account.leases + more - fewer);
    }

    /// So many more of its members have lost their connections, or fewer.
    pub(crate) fn count_lost(&mut self, payer: Payer, more: u64, fewer: u64) {
        self.change(payer, |account| account.lost = account.lost + more - fewer);
    }

    /// Its leases are of so many bytes more, or fewer.
    pub(crate) fn lend(&mut self, payer: Payer, more: u64, fewer: u64) {
        self.change(payer, |account| account.lent_bytes = account.lent_bytes + more - fewer);
    }

    /// Charges a connection, however many there are already; see [`Accounts::too_many_connections`].
    pub fn connect(&mut self, payer: Payer) {
        self.change(payer, |account| account.connections += 1);
    }

    pub fn disconnect(&mut self, payer: Payer) {
        self.change(payer, |account| account.connections -= 1);
    }

    /// How far its connections are beyond its quota; `None`: they are within. A member that has lost its
    /// connection and may come back counts as one.
    #[must_use]
    pub fn too_many_connections(&self, payer: Payer) -> Option<OverQuota> {
        let Account { connections, lost, .. } = self.of(payer);
        within("connections", connections + lost, 0, self.rules.quota(payer).connections).err()
    }

    /// Charges regions and queues that are about to be made.
    ///
    /// # Errors
    /// [`OverQuota`]; nothing is charged.
    pub fn charge(&mut self, payer: Payer, regions: u64, queues: u64) -> Result<(), OverQuota> {
        let (has, quota) = (self.of(payer), self.rules.quota(payer));
        if regions > 0 {
            within("regions", has.regions, regions, quota.regions)?;
        }
        if queues > 0 {
            within("queues", has.queues, queues, quota.queues)?;
        }
        self.change(payer, |account| {
            account.regions += regions;
            account.queues += queues;
        });
        Ok(())
    }

    /// A lease has so much now where `charged` was charged.
    pub fn settle(&mut self, payer: Payer, charged: Charges, now: Charges) {
        self.change(payer, |account| {
            account.regions = account.regions + now.regions - charged.regions;
            account.queues = account.queues + now.queues - charged.queues;
            account.table_bytes = account.table_bytes + now.table_bytes - charged.table_bytes;
        });
    }

    fn change(&mut self, payer: Payer, change: impl FnOnce(&mut Account)) {
        let account = self.accounts.entry(payer).or_default();
        change(account);
        if *account == Account::default() {
            self.accounts.remove(&payer);
        }
    }

    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        assert!(self.accounts.values().all(|account| *account != Account::default()));
    }
}

fn within(what: &'static str, has: u64, more: u64, quota: Option<u64>) -> Result<(), OverQuota> {
    match quota {
        Some(quota) if has.saturating_add(more) > quota => Err(OverQuota { what, has, quota }),
        _ => Ok(()),
    }
}

/// Bytes a second of one tenant: when its next request may be read (a token bucket, told by the time at which
/// everything so far is paid: Turner's leaky bucket as ATM's virtual scheduling algorithm).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rate {
    paid_at_ns: u64,
}

/// What a tenant that was idle may take at once.
const BURST_NS: u64 = 100_000_000;

impl Rate {
    /// So many bytes were moved.
    pub fn charge(&mut self, now_ns: u64, bytes: u64, rate_bytes: u64) {
        let cost = u128::from(bytes) * 1_000_000_000 / u128::from(rate_bytes.max(1));
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        self.paid_at_ns = self.paid_at_ns.max(now_ns).saturating_add(cost);
    }

    /// When more may be moved; not after `now_ns`: at once.
    #[must_use]
    pub fn next_ns(&self) -> u64 {
        self.paid_at_ns.saturating_sub(BURST_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(text: &str) -> TenantName {
        text.parse().unwrap()
    }

    fn rules() -> Rules {
        let few = Quota {
            memory_bytes: Some(100),
            connections: Some(2),
            regions: Some(3),
            queues: Some(1),
            ..Quota::default()
        };
        Rules {
            default: Quota { regions: Some(1), ..Quota::default() },
            quotas: BTreeMap::from([(name("alice"), few)]),
            revoked: BTreeMap::from([
                (name("alice"), Revoked::Generations(BTreeSet::from([1, 3]))),
                (name("mallory"), Revoked::All),
            ]),
        }
    }

    #[test]
    fn a_revoked_generation_is_no_other() {
        let rules = rules();
        let is_revoked = |who: &str, generation| rules.is_revoked(TenantId { name: name(who), generation });
        assert!(is_revoked("alice", 1) && is_revoked("alice", 3) && !is_revoked("alice", 2));
        assert!(is_revoked("mallory", 0) && is_revoked("mallory", 9) && !is_revoked("bob", 1));
    }

    #[test]
    fn what_is_beyond_a_quota_is_refused_and_changes_nothing() {
        let mut accounts = Accounts::default();
        accounts.set_rules(rules());
        let alice = Some(name("alice"));
        accounts.charge(alice, 2, 1).unwrap();
        assert_eq!(accounts.charge(alice, 2, 0), Err(OverQuota { what: "regions", has: 2, quota: 3 }));
        assert_eq!(accounts.charge(alice, 1, 1), Err(OverQuota { what: "queues", has: 1, quota: 1 }));
        assert_eq!(accounts.of(alice), Account { regions: 2, queues: 1, ..Account::default() });
        accounts.charge(alice, 1, 0).unwrap();
        assert_eq!(accounts.may_lend(alice, 101), Err(OverQuota { what: "bytes", has: 0, quota: 100 }));
        assert_eq!(accounts.may_lend(alice, 100), Ok(()));
        // The rules for others, and none for the master.
        assert!(accounts.charge(Some(name("bob")), 2, 0).is_err());
        accounts.charge(None, 1000, 1000).unwrap();
        accounts.settle(None, Charges { regions: 1000, queues: 1000, table_bytes: 0 }, Charges::default());
        // A smaller quota takes nothing away.
        accounts
            .set_rules(Rules { default: Quota { regions: Some(0), ..Quota::default() }, ..Rules::default() });
        assert_eq!(accounts.of(alice).regions, 3);
        assert!(accounts.charge(alice, 1, 0).is_err());
        accounts.charge(alice, 0, 1).unwrap();
        accounts.settle(alice, Charges { regions: 3, queues: 2, table_bytes: 0 }, Charges::default());
        assert_eq!(accounts.all().count(), 0);
    }

    #[test]
    fn tables_are_memory() {
        let mut accounts = Accounts::default();
        accounts.set_rules(rules());
        let alice = Some(name("alice"));
        let some = Charges { table_bytes: 30, ..Charges::default() };
        accounts.settle(alice, Charges::default(), some);
        assert_eq!(accounts.may_lend(alice, 70), Ok(()));
        assert_eq!(accounts.may_lend(alice, 71), Err(OverQuota { what: "bytes", has: 30, quota: 100 }));
        accounts.settle(alice, some, Charges::default());
        assert_eq!(accounts.all().count(), 0);
    }

    #[test]
    fn connections_beyond_the_quota_are_told_apart() {
        let mut accounts = Accounts::default();
        accounts.set_rules(rules());
        let alice = Some(name("alice"));
        accounts.connect(alice);
        accounts.connect(alice);
        assert_eq!(accounts.too_many_connections(alice), None);
        accounts.connect(alice);
        assert!(accounts.too_many_connections(alice).is_some());
        (0..3).for_each(|_| accounts.disconnect(alice));
        assert_eq!(accounts.all().count(), 0);
    }

    proptest! {
        /// Over any time, no more than the rate, and what may be taken at once, and one request.
        #[test]
        fn a_rate_holds_for_any_pattern(
            gaps in prop::collection::vec((0..200_000_000u64, 1..100_000u64), 1..80),
            rate in 1_000..1_000_000u64,
        ) {
            let (mut now, mut bucket, mut moved, mut largest) = (0, Rate::default(), 0, 0);
            for (gap, bytes) in gaps {
                now += gap;
                if bucket.next_ns() <= now {
                    bucket.charge(now, bytes, rate);
                    moved += bytes;
                    largest = largest.max(bytes);
                }
                let most =
                    u128::from(rate) * u128::from(now + BURST_NS) / 1_000_000_000 + u128::from(largest);
                prop_assert!(u128::from(moved) <= most + 80, "{moved} {most}");
            }
            // A tenant with something to send is never kept out for longer than what it has sent takes.
            prop_assert!(
                u128::from(bucket.next_ns().saturating_sub(now))
                    <= u128::from(largest) * 1_000_000_000 / u128::from(rate) + 1
            );
        }
    }
}
