//! Admission and membership: the size of each lease, and its members.
//!
//! A member that says goodbye is gone at once. A member whose last connection breaks has a grace time to
//! reconnect; after that it is given up. A lease without members closes. A member has one connection: a new
//! one replaces the old, which may look alive for a while. What still arrives over the replaced one is
//! ignored. On a departure the caller frees the member's memory first and calls [`Directory::closed`] last,
//! so that nothing is lent twice.
//!
//! A lease is a tenant's, whose members alone may join it, and is charged to its account. A tenant has at
//! most a quarter of the places for leases, so that it takes four to keep others out. A member whose
//! connection broke counts as a connection of its tenant for as long as it may come back: who connects, takes
//! a lease and goes away, again and again, has at most as many leases as it may have connections.
//!
//! Invariants: `lent_bytes` = sum of the leases' bytes `<= memory_bytes`; a member is *lost* exactly while
//! its connection is broken.

use super::rule::{Kept, TenantRule};
use super::space::{LeaseSpace, SpaceError};
use super::tenants::{Accounts, OverQuota, Payer};
use super::{ConnectionNumber, Tick};
use rampool_wire::frame::{AttachLease, LeaseId, LeaseToken, MemberId, OpenLease};
use std::collections::BTreeMap;

/// A tenant has at most this part of the places for leases.
const PART_OF_PLACES: usize = 4;

/// What a server lends, and to how many clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    pub memory_bytes: u64,
    /// How long a member without a connection is kept.
    pub grace_ms: u64,
    pub max_leases: usize,
    /// Members of one lease.
    pub max_members: usize,
}

/// Why a lease was not granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// `free` counts what closing leases are about to give back.
    #[error("{free} bytes are free")]
    TooLarge { free: u64 },
    /// It fits as soon as closing leases have been freed: ask again after [`Directory::closed`].
    #[error("{free} bytes are free; {closing} more are being freed by closing leases")]
    Closing { free: u64, closing: u64 },
    #[error("a lease must be of at least one byte")]
    Empty,
    #[error("the server's limit of leases is reached")]
    TooMany,
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    /// Not of memory: of leases, or of connections.
    #[error("{0}, counting what has lost its connection and may come back")]
    TooManyOfTenant(OverQuota),
}

/// Why a process did not become a member.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The reasons are not told apart on purpose: a peer that guesses learns nothing.
    #[error("no such lease, or a wrong token")]
    NoSuchLease,
    #[error("the member was given up after its grace time")]
    MemberGone,
    #[error("the lease's limit of members is reached")]
    TooMany,
    #[error("{0}, counting what has lost its connection and may come back")]
    TooManyOfTenant(OverQuota),
}

/// Why a lease keeps its size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// `free` counts what closing leases are about to give back.
    #[error("{free} bytes are free")]
    TooLarge { free: u64 },
    /// As [`OpenError::Closing`].
    #[error("{free} bytes are free; {closing} more are being freed by closing leases")]
    Closing { free: u64, closing: u64 },
    #[error("{used} bytes of it are in use")]
    InUse { used: u64 },
    #[error("a lease must be of at least one byte")]
    Empty,
    #[error("no such lease")]
    NoSuchLease,
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
}

/// A member is gone for good: its regions must be freed, and with `lease_closes` everything of the lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Departed {
    pub lease: LeaseId,
    pub member: MemberId,
    /// It was the last one. The lease's bytes stay lent until [`Directory::closed`].
    pub lease_closes: bool,
}

/// One lease, for the status.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseSummary {
    pub lease: LeaseId,
    pub tenant: Payer,
    pub bytes: u64,
    pub name: String,
    pub host: String,
    pub members: Vec<MemberSummary>,
}

/// One member, for the status.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberSummary {
    pub member: MemberId,
    pub pid: u32,
    pub name: String,
    pub host: String,
    pub connections: u32,
}

/// All leases of a server.
#[derive(Debug)]
pub struct Directory {
    limits: Limits,
    lent_bytes: u64,
    accounts: Accounts,
    leases: BTreeMap<LeaseId, Lease>,
    next_lease: u64,
    next_member: u64,
    rules: Kept,
}

#[derive(Debug)]
struct Lease {
    token: LeaseToken,
    tenant: Payer,
    bytes: u64,
    name: String,
    host: String,
    members: BTreeMap<MemberId, Member>,
}

#[derive(Debug)]
struct Member {
    pid: u32,
    name: String,
    host: String,
    /// The current connection.
    connection: ConnectionNumber,
    lost_at: Option<Tick>,
}

impl Directory {
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let accounts = Accounts::default();
        let (leases, rules) = (BTreeMap::new(), Kept::default());
        Self { limits, lent_bytes: 0, accounts, leases, next_lease: 1, next_member: 1, rules }
    }

    /// Leaves a rule out.
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: TenantRule) {
        self.rules.omit(rule);
    }

    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        self.lent_bytes
    }

    /// Bytes a new lease could have.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.limits.memory_bytes - self.lent_bytes
    }

    #[must_use]
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    pub fn accounts_mut(&mut self) -> &mut Accounts {
        &mut self.accounts
    }

    /// Grants a lease; the asker is its first member, with one connection. `token`: fresh random bytes.
    ///
    /// # Errors
    /// [`OpenError`]; nothing has changed.
    pub fn open(
        &mut self,
        tenant: Payer,
        request: &OpenLease,
        token: LeaseToken,
    ) -> Result<(LeaseId, MemberId), OpenError> {
        if request.bytes == 0 {
            return Err(OpenError::Empty);
        }
        let free = self.free_bytes();
        if let Some(over) = self.too_many_connections(tenant) {
            return Err(OpenError::TooManyOfTenant(over));
        }
        if let Err(over) = self.accounts.may_lend(tenant, request.bytes)
            && self.rules.keep(TenantRule::Quota)
        {
            let closing = self.closing_bytes_of(tenant);
            let waits = self.accounts.may_lend(tenant, request.bytes.saturating_sub(closing)).is_ok();
            return Err(if waits && closing > 0 {
                OpenError::Closing { free, closing }
            } else {
                over.into()
            });
        }
        let most = self.limits.max_leases.div_ceil(PART_OF_PLACES) as u64;
        if let Err(over) = self.accounts.may_open(tenant, most)
            && self.rules.keep(TenantRule::Places)
        {
            let mut own = self.leases.values().filter(|lease| lease.tenant == tenant);
            return Err(if own.any(Lease::closes) {
                OpenError::Closing { free, closing: self.closing_bytes_of(tenant) }
            } else {
                OpenError::TooManyOfTenant(over)
            });
        }
        if request.bytes > free || self.leases.len() >= self.limits.max_leases {
            // Only here is it worth counting what is about to be freed.
            let closing = self.closing_bytes();
            if request.bytes > free + closing {
                return Err(OpenError::TooLarge { free: free + closing });
            }
            if self.leases.values().any(Lease::closes) {
                return Err(OpenError::Closing { free, closing });
            }
            return Err(OpenError::TooMany);
        }
        let id = LeaseId(self.next_lease);
        self.next_lease += 1;
        let mut lease = Lease {
            token,
            tenant,
            bytes: request.bytes,
            name: request.name.clone(),
            host: request.host.clone(),
            members: BTreeMap::new(),
        };
        let member = self.add_member(&mut lease, request.pid, &request.name, &request.host);
        self.lent_bytes += lease.bytes;
        self.accounts.lend(tenant, lease.bytes, 0);
        self.accounts.count_leases(tenant, 1, 0);
        self.leases.insert(id, lease);
        Ok((id, member))
    }

    /// Joins a lease of the same tenant as a new member, or reconnects as an existing one, whose old
    /// connection is replaced. Returns the member, the number of its connection, and the lease's bytes.
    ///
    /// # Errors
    /// [`AttachError`]; nothing has changed.
    pub fn attach(
        &mut self,
        tenant: Payer,
        request: &AttachLease,
    ) -> Result<(MemberId, ConnectionNumber, u64), AttachError> {
        let max_members = self.limits.max_members;
        let over = self.too_many_connections(tenant);
        let Some(lease) = self.leases.get_mut(&request.lease) else {
            return Err(AttachError::NoSuchLease);
        };
        // A lease without members is closing: no process can join it any more.
        let is_theirs = lease.tenant == tenant || !self.rules.keep(TenantRule::Ticket);
        if !lease.token.matches(&request.token) || !is_theirs || lease.closes() {
            return Err(AttachError::NoSuchLease);
        }
        let bytes = lease.bytes;
        if request.member == MemberId(0) {
            if let Some(over) = over {
                return Err(AttachError::TooManyOfTenant(over));
            }
            if lease.members.len() >= max_members {
                return Err(AttachError::TooMany);
            }
            let member = MemberId(self.next_member);
            self.next_member += 1;
            lease.members.insert(member, Member::new(request.pid, &request.name, &request.host));
            return Ok((member, ConnectionNumber::FIRST, bytes));
        }
        // Who comes back replaces a connection.
        let member = lease.members.get_mut(&request.member).ok_or(AttachError::MemberGone)?;
        member.connection = member.connection.next();
        let was_lost = member.lost_at.take().is_some();
        self.accounts.count_lost(lease.tenant, 0, u64::from(was_lost));
        Ok((request.member, member.connection, bytes))
    }

    /// A connection of this member broke, without a goodbye. Unknown members are ignored, since they may have
    /// left meanwhile; so are connections that were replaced, or broke before.
    pub fn disconnected(
        &mut self,
        now: Tick,
        lease: LeaseId,
        member: MemberId,
        connection: ConnectionNumber,
    ) {
        let Some(lease) = self.leases.get_mut(&lease) else { return };
        let Some(member) = lease.members.get_mut(&member) else { return };
        if member.connection == connection && member.lost_at.is_none() {
            member.lost_at = Some(now);
            self.accounts.count_lost(lease.tenant, 1, 0);
        }
    }

    /// Whether this connection is the current one.
    #[must_use]
    pub fn is_current(&self, lease: LeaseId, member: MemberId, connection: ConnectionNumber) -> bool {
        self.leases
            .get(&lease)
            .and_then(|l| l.members.get(&member))
            .is_some_and(|m| m.connection == connection)
    }

    /// Whether it is a member still.
    #[must_use]
    pub fn has(&self, lease: LeaseId, member: MemberId) -> bool {
        self.leases.get(&lease).is_some_and(|lease| lease.members.contains_key(&member))
    }

    /// The member says goodbye. `None`: it had left already.
    pub fn leave(&mut self, lease: LeaseId, member: MemberId) -> Option<Departed> {
        let of = self.leases.get_mut(&lease)?;
        let was_lost = of.members.remove(&member)?.lost_at.is_some();
        self.accounts.count_lost(of.tenant, 0, u64::from(was_lost));
        Some(Departed { lease, member, lease_closes: of.members.is_empty() })
    }

    /// Gives up the members whose grace time is over.
    pub fn expire(&mut self, now: Tick) -> Vec<Departed> {
        let grace = self.limits.grace_ms;
        let over = |m: &Member| m.lost_at.is_some_and(|lost| now.0.saturating_sub(lost.0) >= grace);
        let due: Vec<_> = (self.leases.iter())
            .flat_map(|(lease, l)| {
                l.members.iter().filter(|(_, m)| over(m)).map(|(member, _)| (*lease, *member))
            })
            .collect();
        due.into_iter().filter_map(|(lease, member)| self.leave(lease, member)).collect()
    }

    /// When [`Directory::expire`] has something to do, if no lost member reconnects.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Tick> {
        let lost = self.leases.values().flat_map(|l| l.members.values()).filter_map(|m| m.lost_at);
        lost.min().map(|lost| Tick(lost.0.saturating_add(self.limits.grace_ms)))
    }

    /// The memory of a lease that closes has been freed: its bytes can be lent again.
    ///
    /// # Panics
    /// If the lease does not exist or still has members.
    pub fn closed(&mut self, lease: LeaseId) {
        let lease = self.leases.remove(&lease).expect("a lease closes once");
        assert!(lease.members.is_empty(), "a lease closes after its last member has left");
        self.lent_bytes -= lease.bytes;
        self.accounts.count_leases(lease.tenant, 0, 1);
        if self.rules.keep(TenantRule::Closed) {
            self.accounts.lend(lease.tenant, 0, lease.bytes);
        }
    }

    /// The leases and members, for the status.
    #[must_use]
    pub fn summary(&self) -> Vec<LeaseSummary> {
        let member = |(id, m): (&MemberId, &Member)| MemberSummary {
            member: *id,
            pid: m.pid,
            name: m.name.clone(),
            host: m.host.clone(),
            connections: u32::from(m.lost_at.is_none()),
        };
        let lease = |(id, l): (&LeaseId, &Lease)| LeaseSummary {
            lease: *id,
            tenant: l.tenant,
            bytes: l.bytes,
            name: l.name.clone(),
            host: l.host.clone(),
            members: l.members.iter().map(member).collect(),
        };
        self.leases.iter().map(lease).collect()
    }

    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        assert_eq!(self.lent_bytes, self.leases.values().map(|l| l.bytes).sum::<u64>());
        assert!(self.lent_bytes <= self.limits.memory_bytes);
        assert!(self.leases.len() <= self.limits.max_leases);
        let mut has: BTreeMap<Payer, (u64, u64, u64)> = BTreeMap::new();
        for lease in self.leases.values() {
            let lost = lease.members.values().filter(|member| member.lost_at.is_some());
            let (bytes, leases, all_lost) = has.entry(lease.tenant).or_default();
            (*bytes, *leases, *all_lost) =
                (*bytes + lease.bytes, *leases + 1, *all_lost + lost.count() as u64);
        }
        self.accounts.check();
        let charged = self.accounts.all().filter(|(_, account)| account.leases > 0);
        let charged = charged.map(|(tenant, has)| (tenant, (has.lent_bytes, has.leases, has.lost)));
        assert!(charged.eq(has), "what is charged is what there is");
        for lease in self.leases.values() {
            assert!(lease.members.len() <= self.limits.max_members);
        }
    }

    fn too_many_connections(&self, tenant: Payer) -> Option<OverQuota> {
        let over = self.accounts.too_many_connections(tenant)?;
        let lost = if self.rules.keep(TenantRule::Lost) { 0 } else { self.accounts.of(tenant).lost };
        (over.has - lost > over.quota).then_some(over)
    }

    fn closing_bytes(&self) -> u64 {
        self.leases.values().filter(|lease| lease.closes()).map(|lease| lease.bytes).sum()
    }

    fn closing_bytes_of(&self, tenant: Payer) -> u64 {
        let closing = self.leases.values().filter(|lease| lease.closes() && lease.tenant == tenant);
        closing.map(|lease| lease.bytes).sum()
    }

    fn add_member(&mut self, lease: &mut Lease, pid: u32, name: &str, host: &str) -> MemberId {
        let id = MemberId(self.next_member);
        self.next_member += 1;
        lease.members.insert(id, Member::new(pid, name, host));
        id
    }
}

impl Lease {
    /// Its last member has left; its memory is being freed.
    fn closes(&self) -> bool {
        self.members.is_empty()
    }
}

impl Member {
    fn new(pid: u32, name: &str, host: &str) -> Self {
        Self {
            pid,
            name: name.to_owned(),
            host: host.to_owned(),
            connection: ConnectionNumber::FIRST,
            lost_at: None,
        }
    }
}

/// Changes the size of a lease, in the directory and in its space at once.
///
/// # Errors
/// [`ResizeError`]; nothing has changed.
pub fn resize_lease(
    directory: &mut Directory,
    space: &mut LeaseSpace,
    lease: LeaseId,
    bytes: u64,
) -> Result<(), ResizeError> {
    if bytes == 0 {
        return Err(ResizeError::Empty);
    }
    let free = directory.free_bytes();
    let closing = directory.closing_bytes();
    let entry = directory.leases.get_mut(&lease).ok_or(ResizeError::NoSuchLease)?;
    let more = bytes.saturating_sub(entry.bytes);
    if more > 0 {
        directory.accounts.may_lend(entry.tenant, more)?;
    }
    if more > free + closing {
        return Err(ResizeError::TooLarge { free: free + closing });
    }
    if more > free {
        return Err(ResizeError::Closing { free, closing });
    }
    space.set_limit(bytes).map_err(|error| match error {
        SpaceError::Full { .. } => ResizeError::InUse { used: space.usage().used_bytes },
        other => unreachable!("setting a limit can only fail for what is in use, not with {other}"),
    })?;
    directory.lent_bytes = directory.lent_bytes - entry.bytes + bytes;
    directory.accounts.lend(entry.tenant, bytes, entry.bytes);
    entry.bytes = bytes;
    Ok(())
}

#[cfg(test)]
mod tests;
