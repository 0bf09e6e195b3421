//! What a memory server does with one request, without the memory.
//!
//! ```text
//!   lease   Directory: the leases and their sizes; members join, go silent, reconnect or are given up
//!   space   LeaseSpace: one lease's regions and what each of their pages is: a frame, a checksum, a length
//!   table   the page tables below a region, in chunks that copy-on-write clones share
//!   tenants  Rules, Accounts: what each tenant may have, and has
//!   shares  Shares: whose turn it is
//!   log_limiter  LogLimiter: limits the log lines that unauthenticated peers cause
//!   pressure  Pressure: whether the server's machine is short of memory
//!   rule    TenantRule: the rules that keep tenants apart, by name, for tests that leave one out
//!   queue   Queues: one lease's remote FIFOs; the waiting requests, what is held, what is delivered again
//! ```
//!
//! Read `lease` first, then `table`, then `space`, which uses it and `queue`; `queue`, `tenants`, `shares`,
//! `pressure` and `log_limiter` are read on their own.
//!
//! A [`FrameIndex`] stands for memory of the runtime's store. This crate decides which page is in which frame
//! and when a frame is free, and never sees a byte of it. One `Directory` serves the whole server and only
//! handles control operations; every lease has its own `LeaseSpace`, so that clients of different leases
//! never wait for each other.
#![forbid(unsafe_code)]

mod answers;
mod lease;
mod log_limiter;
mod pressure;
mod queue;
mod rule;
mod shares;
mod space;
mod table;
mod tenants;

pub use lease::{
    AttachError, Departed, Directory, LeaseSummary, Limits, MemberSummary, OpenError, ResizeError,
    resize_lease,
};
pub use log_limiter::{LogLimiter, Repeated};
pub use pressure::Pressure;
pub use queue::{Asker, Output as QueueOutput, QueueCounts, QueueError, QueueId, QueueLimits, Queues};
pub use rampool_wire::units::Tick;
pub use rule::TenantRule;
pub use shares::{MOST_ELSEWHERE_NS, Shares};
pub use space::{LeaseSpace, QueueSpaceError, RegionSelector, SpaceError, SpaceUsage, View};
pub use table::{PageState, StoredPage};
pub use tenants::{Account, Accounts, Charges, MAX_WEIGHT, OverQuota, Payer, Quota, Rate, Revoked, Rules};

/// Names a frame of the store, which alone knows what the number means.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FrameIndex(pub u64);

/// How often a member has connected: tells its connections apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ConnectionNumber(u32);

impl ConnectionNumber {
    pub const FIRST: Self = Self(1);

    fn next(self) -> Self {
        Self(self.0.checked_add(1).expect("fewer than four billion connections of one member"))
    }
}
