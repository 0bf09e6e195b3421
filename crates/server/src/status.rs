//! What a server says about itself: the reply to `Status`, as JSON, and what `rampool status` and the metrics
//! show.

use super::config::StoreKind;
use super::lease::{Counts, Lease};
use super::shared::Shared;
use super::tenants::Tenant;
use crate::block::{Blocks, ExportStatus};
use rampool_lease::{Account, LeaseSummary, MemberSummary, Payer, QueueCounts, Quota};
use rampool_wire::frame::Listed;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// A server at one moment. Unknown fields are ignored, missing ones are zero: servers and tools of different
/// ages understand each other.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ServerStatus {
    /// Names this run of the server.
    pub server: u64,
    pub version: String,
    pub pid: u32,
    pub uptime_ms: u64,
    pub draining: bool,
    /// Its machine is short of memory: it gives no new leases.
    pub short_of_memory: bool,
    pub compressed: bool,
    pub memory_bytes: u64,
    /// Leased.
    pub lent_bytes: u64,
    /// Could be leased.
    pub free_bytes: u64,
    /// Taken from the kernel for frames.
    pub held_bytes: u64,
    /// Of that, in frames in use. The rest is free space between frames.
    pub used_bytes: u64,
    pub frames: u64,
    /// Some frames could not be locked in memory.
    pub unlocked: bool,
    /// Of replies that wait for their clients to take them, but for 64 KiB of each connection.
    pub reply_bytes: u64,
    pub shards: u64,
    pub connections: u64,
    pub protocol_errors: u64,
    pub failed_handshakes: u64,
    /// Times a shard went to sleep.
    pub sleeps: u64,
    pub operations: OperationCounts,
    pub leases: Vec<LeaseStatus>,
    /// Those that have something here: all for the master key, for a tenant itself.
    pub tenants: Vec<TenantStatus>,
    /// Block devices.
    pub exports: Vec<ExportStatus>,
}

/// Since the start of the server, or of the lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct OperationCounts {
    pub gets: u64,
    pub got_pages: u64,
    pub puts: u64,
    pub put_pages: u64,
    pub discards: u64,
    /// Everything that is neither get, put nor discard.
    pub control: u64,
    /// Requests answered with an error.
    pub refused: u64,
    /// Page bytes from and to clients.
    pub bytes_in: u64,
    pub bytes_out: u64,
}

/// One lease.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct LeaseStatus {
    pub lease: u64,
    /// Empty: that of the master key, or there is none.
    pub tenant: String,
    pub name: String,
    pub host: String,
    pub bytes: u64,
    pub used_bytes: u64,
    pub metadata_bytes: u64,
    /// Of replies that its clients have not taken, but for 64 KiB of each connection.
    pub reply_bytes: u64,
    /// Pages that are not zero.
    pub pages: u64,
    /// Frames that several regions share after a fork.
    pub shared_frames: u64,
    pub regions: u64,
    pub operations: OperationCounts,
    pub members: Vec<MemberStatus>,
    pub queues: Vec<QueueStatus>,
}

/// One tenant: what is charged to it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct TenantStatus {
    /// Empty: the master key, or there is none.
    pub name: String,
    pub weight: u32,
    /// Of its leases, and how much that may be.
    pub lent_bytes: u64,
    pub quota_bytes: Option<u64>,
    pub connections: u64,
    pub regions: u64,
    pub queues: u64,
    pub reply_bytes: u64,
    /// Time that threads of the server have worked for it.
    pub served_us: u64,
}

/// One remote queue.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct QueueStatus {
    pub name: String,
    /// In it now.
    pub messages: u64,
    /// Of these: taken by receivers that have not acknowledged them.
    pub held: u64,
    /// Of heads and bodies.
    pub bytes: u64,
    /// Requests that wait for room, and for messages.
    pub waiting_senders: u64,
    pub waiting_receivers: u64,
    /// Since it was made: appended, acknowledged, given back by lost receivers, taken back by lost senders,
    /// and senders told that it is full.
    pub pushed: u64,
    pub done: u64,
    pub redelivered: u64,
    pub withdrawn: u64,
    pub full: u64,
}

/// One process of a lease.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct MemberStatus {
    pub member: u64,
    pub pid: u32,
    pub name: String,
    pub host: String,
    /// 0: it was lost and its grace time runs.
    pub connections: u32,
    /// By what means it is connected: `tcp`, `unix` or `rings`; empty while it is not.
    pub means: String,
}

impl OperationCounts {
    fn join(&mut self, other: &Self) {
        self.gets += other.gets;
        self.got_pages += other.got_pages;
        self.puts += other.puts;
        self.put_pages += other.put_pages;
        self.discards += other.discards;
        self.control += other.control;
        self.refused += other.refused;
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
    }

    fn add(&mut self, counts: &Counts) {
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        self.gets += read(&counts.gets);
        self.got_pages += read(&counts.got_pages);
        self.puts += read(&counts.puts);
        self.put_pages += read(&counts.put_pages);
        self.discards += read(&counts.discards);
        self.control += read(&counts.control);
        self.refused += read(&counts.refused);
        self.bytes_in += read(&counts.bytes_in);
        self.bytes_out += read(&counts.bytes_out);
    }
}

/// What a tenant may see; `None`: everything.
pub(super) fn collect(shared: &Shared, blocks: &Blocks, viewer: Payer) -> ServerStatus {
    let (mut summaries, lent_bytes, free_bytes, mut accounts, rules) = {
        let directory = shared.directory();
        let accounts = directory.accounts();
        let all: Vec<_> = accounts.all().collect();
        (directory.summary(), directory.lent_bytes(), directory.free_bytes(), all, accounts.rules().clone())
    };
    if viewer.is_some() {
        summaries.retain(|lease| lease.tenant == viewer);
        accounts.retain(|(tenant, _)| *tenant == viewer);
    }
    let known: BTreeMap<_, _> = shared.tenants.all().into_iter().map(|known| (known.name, known)).collect();
    let tenants = accounts.into_iter().map(|(name, account)| {
        TenantStatus::new(name, &rules.quota(name), &account, known.get(&name).map(|known| &**known))
    });
    let leases: BTreeMap<_, _> = shared.leases().into_iter().map(|lease| (lease.id, lease)).collect();
    let summaries = summaries.into_iter().map(|one| {
        let lease = leases.get(&one.lease).map(|lease| &**lease);
        LeaseStatus::new(one, lease)
    });
    let everyones = ServerStatus {
        server: shared.server,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_ms: shared.now().0,
        draining: shared.draining(),
        short_of_memory: shared.short_of_memory(),
        compressed: shared.config.store == StoreKind::Compressed,
        leases: summaries.collect(),
        tenants: tenants.collect(),
        ..ServerStatus::default()
    };
    if let Some(name) = viewer {
        let all = shared.config.memory_bytes;
        let memory_bytes = rules.quota(Some(name)).memory_bytes.map_or(all, |quota| quota.min(all));
        return everyones.of_tenant(memory_bytes, free_bytes);
    }
    let (mut operations, mut events) = (OperationCounts::default(), blocks.events());
    for shard in &shared.shards {
        operations.add(&shard.counts);
        let more = [&shard.protocol_errors, &shard.failed_handshakes, &shard.sleeps];
        events.iter_mut().zip(more).for_each(|(sum, more)| *sum += more.load(Ordering::Relaxed));
    }
    blocks.counts().for_each(|counts| operations.add(counts));
    let ([protocol_errors, failed_handshakes, sleeps], store) = (events, shared.store.usage());
    ServerStatus {
        pid: std::process::id(),
        memory_bytes: shared.config.memory_bytes,
        lent_bytes,
        free_bytes,
        held_bytes: store.held_bytes,
        used_bytes: store.used_bytes,
        frames: store.frames,
        reply_bytes: shared.replies.waiting_bytes(),
        unlocked: store.unlocked,
        shards: shared.shards.len() as u64,
        connections: shared.connections.load(Ordering::Relaxed) as u64,
        protocol_errors,
        failed_handshakes,
        sleeps,
        operations,
        exports: blocks.status(),
        ..everyones
    }
}

fn in_words(name: Payer) -> String {
    name.map_or_else(String::new, |name| name.to_string())
}

impl ServerStatus {
    /// As a tenant sees it, which has these leases: its own part.
    fn of_tenant(self, memory_bytes: u64, free_bytes: u64) -> Self {
        let own = self.tenants.first().cloned().unwrap_or_default();
        let mut operations = OperationCounts::default();
        self.leases.iter().for_each(|lease| operations.join(&lease.operations));
        Self {
            memory_bytes,
            lent_bytes: own.lent_bytes,
            free_bytes: free_bytes.min(memory_bytes.saturating_sub(own.lent_bytes)),
            used_bytes: self.leases.iter().map(|lease| lease.used_bytes).sum(),
            reply_bytes: own.reply_bytes,
            connections: own.connections,
            operations,
            ..self
        }
    }
}

impl TenantStatus {
    fn new(name: Payer, quota: &Quota, account: &Account, known: Option<&Tenant>) -> Self {
        Self {
            name: in_words(name),
            weight: quota.weight,
            lent_bytes: account.lent_bytes,
            quota_bytes: quota.memory_bytes,
            connections: account.connections,
            regions: account.regions,
            queues: account.queues,
            reply_bytes: known.map_or(0, |known| known.replies.waiting_bytes()),
            served_us: known.map_or(0, |known| known.served_ns() / 1000),
        }
    }
}

impl LeaseStatus {
    fn new(summary: LeaseSummary, lease: Option<&Lease>) -> Self {
        let (usage, queues) = lease.map(Lease::look).unwrap_or_default();
        let mut operations = OperationCounts::default();
        lease.iter().for_each(|lease| operations.add(&lease.counts));
        let member = |m: MemberSummary| MemberStatus {
            member: m.member.0,
            pid: m.pid,
            name: m.name,
            host: m.host,
            connections: m.connections,
            means: lease
                .and_then(|lease| lease.means_of(m.member))
                .map_or_else(String::new, |means| means.name().to_owned()),
        };
        Self {
            lease: summary.lease.0,
            tenant: in_words(summary.tenant),
            reply_bytes: lease.map_or(0, |lease| lease.replies.waiting_bytes()),
            name: summary.name,
            host: summary.host,
            bytes: summary.bytes,
            used_bytes: usage.used_bytes,
            metadata_bytes: usage.metadata_bytes,
            pages: usage.pages,
            shared_frames: usage.shared_frames,
            regions: usage.regions,
            operations,
            members: summary.members.into_iter().map(member).collect(),
            queues: queues.into_iter().map(QueueStatus::from).collect(),
        }
    }
}

impl From<(Listed, QueueCounts)> for QueueStatus {
    fn from((listed, counts): (Listed, QueueCounts)) -> Self {
        Self {
            name: listed.name,
            messages: listed.messages,
            held: listed.held,
            bytes: listed.bytes,
            waiting_senders: listed.waiting_senders,
            waiting_receivers: listed.waiting_receivers,
            pushed: counts.pushed,
            done: counts.done,
            redelivered: counts.redelivered,
            withdrawn: counts.withdrawn,
            full: counts.refused,
        }
    }
}
