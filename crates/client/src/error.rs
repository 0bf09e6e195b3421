//! What can go wrong between a program and its memory servers, one enum per operation; every error names the
//! server and what was being done.

use std::fmt;
use std::time::Duration;

use rampool_paging::placement::PlacementError;
use rampool_wire::frame::WireError;
use rampool_wire::units::{ByteLen, PageIndex};

/// Why no pool could be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    #[error("no memory server is named")]
    NoServers,
    /// The variable `RAMPOOL_SAME_HOST` does not say how.
    #[error("invalid environment variable {0}")]
    SameHost(String),
    #[error("memory server {server}: {reason}")]
    Server { server: String, reason: ConnectReason },
    #[error("the memory servers together cannot lend {wanted}: {missing} more are needed ({free})")]
    TooLittle { wanted: ByteLen, missing: ByteLen, free: String },
    #[error("cannot distribute pages over the memory servers: {0}")]
    Placement(#[from] PlacementError),
}

impl ConnectError {
    /// The machine of this memory server is short of memory, which may pass.
    #[must_use]
    pub fn short_of_memory(&self) -> Option<&str> {
        match self {
            Self::Server { server, reason: ConnectReason::ShortOfMemory } => Some(server),
            _ => None,
        }
    }

    /// Whether the server is down, or its machine cannot be reached.
    pub(crate) fn is_down(&self) -> bool {
        use ConnectReason::{Broken, Deadline, NotThere};
        let Self::Server { reason, .. } = self else { return false };
        matches!(reason, NotThere(_) | Broken(_) | Deadline { operation: Operation::Connect, .. })
    }

    /// Whether trying again makes sense: the server was there, and the way to it broke.
    pub(crate) fn may_pass(&self) -> bool {
        let Self::Server { reason, .. } = self else { return false };
        matches!(
            reason,
            ConnectReason::Broken(_)
                | ConnectReason::Lost { reason: LostReason::Closed | LostReason::Io(_), .. }
        )
    }
}

/// Why one server could not be made part of a pool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectReason {
    #[error("its name {host:?} cannot be resolved: {error}")]
    Resolve { host: String, error: String },
    /// Nobody listens there.
    #[error("{0}")]
    NotThere(String),
    /// A wrong key, a version that does not fit: any error that ends a connection before it is usable.
    #[error("{0}")]
    Link(String),
    /// The peer may exist, but the connection broke before it was usable, or was refused a place. A retry may
    /// succeed.
    #[error("{0}")]
    Broken(String),
    #[error("no answer to {operation} within {deadline:?}")]
    Deadline { operation: Operation, deadline: Duration },
    /// A retry may succeed, once its machine has memory again.
    #[error("its machine is short of memory, so it gives no new leases for now; wait, or use another server")]
    ShortOfMemory,
    #[error("it has {free} free, {wanted} are wanted")]
    Refused { wanted: ByteLen, free: ByteLen },
    #[error("it refuses {operation}: {message}")]
    Denied { operation: Operation, message: String },
    #[error("lost during {operation}: {reason}")]
    Lost { operation: Operation, reason: LostReason },
}

/// Why an operation of a connected pool failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The server is gone for good, with every page it held.
    #[error("memory server {server} is lost (while waiting for {operation}): {reason}")]
    Lost { server: String, operation: Operation, reason: LostReason },
    /// The server answered, and refused.
    #[error("memory server {server} refuses {operation}: {message}")]
    Denied { server: String, operation: Operation, message: String },
    /// The server cannot lend that much; `free` is what is left.
    #[error("memory server {server} cannot lend {wanted}: {free} are free there")]
    Refused { server: String, wanted: ByteLen, free: ByteLen },
    #[error("the region is not known to this pool")]
    NoSuchRegion,
    /// The direct view changes one copy of pages, and the lease is one of two.
    #[error(
        "pages of this lease have two copies, of which the direct view changes one: page the region in a \
         lease with one copy"
    )]
    TwoCopies,
    /// Regions that are open for other processes have one copy.
    #[error(
        "memory server {server} is not there, and what other processes open has one copy, on all servers: \
         try again when it is back"
    )]
    NotThere { server: String },
}

/// Why a server counts as lost.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LostReason {
    #[error("it closed the connection")]
    Closed,
    #[error("{0}")]
    Io(String),
    #[error("no answer within {0:?}")]
    Deadline(Duration),
    /// What it sent is invalid.
    #[error("protocol error: {0}")]
    Wire(#[from] WireError),
    #[error("protocol error: {0}")]
    Protocol(String),
    /// The process that this one was forked by had lost it, and what was stored since is not there.
    #[error("it was lost to this process's parent")]
    Inherited,
    /// It took this client for dead and freed its regions.
    #[error(
        "it does not know this client any more: it was restarted, or gave the client up and freed its pages"
    )]
    GivenUp,
    /// It was told to stop, and nothing of this client is left there.
    #[error("it drains")]
    Drained,
}

/// What was being done with a server when something went wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Operation {
    Connect,
    OpenLease,
    AttachLease,
    ResizeLease,
    CreateRegion,
    CloneRegion,
    AdoptRegion,
    FreeRegion,
    Fetch(PageIndex),
    Store(PageIndex),
    Discard(PageIndex),
    OpenRegion,
    ListRegions,
    /// The direct view's, from this byte of the region on.
    Gather(u64),
    Scatter(u64),
    Accumulate(u64),
    FetchOp(u64),
    Scan(u64),
    Copy(u64),
    OpenQueue,
    FreeQueue,
    ListQueues,
    /// Of memory that a member has published.
    Reach,
    Push,
    SendBody,
    Take,
    Settle,
    AwaitBody,
    Heartbeat,
    Leave,
    /// Nothing was outstanding.
    Idle,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("the connection"),
            Self::OpenLease => f.write_str("a lease"),
            Self::AttachLease => f.write_str("joining a lease"),
            Self::ResizeLease => f.write_str("a lease of another size"),
            Self::CreateRegion => f.write_str("a new region"),
            Self::CloneRegion => f.write_str("a copy of a region"),
            Self::AdoptRegion => f.write_str("taking over a region"),
            Self::FreeRegion => f.write_str("giving back a region"),
            Self::Fetch(page) => write!(f, "the fetch of {page}"),
            Self::Store(page) => write!(f, "the write-back of {page}"),
            Self::Discard(page) => write!(f, "the discard of {page}"),
            Self::OpenRegion => f.write_str("opening a region"),
            Self::ListRegions => f.write_str("the list of regions"),
            Self::Gather(byte) => write!(f, "the get from byte {byte} on"),
            Self::Scatter(byte) => write!(f, "the put from byte {byte} on"),
            Self::Accumulate(byte) => write!(f, "the update from byte {byte} on"),
            Self::FetchOp(byte) => write!(f, "the update of byte {byte}"),
            Self::Scan(byte) => write!(f, "the scan from byte {byte} on"),
            Self::Copy(byte) => write!(f, "the copy to another server from byte {byte} on"),
            Self::OpenQueue => f.write_str("opening a queue"),
            Self::FreeQueue => f.write_str("giving up a queue"),
            Self::ListQueues => f.write_str("the list of queues"),
            Self::Reach => f.write_str("the use of published memory"),
            Self::Push => f.write_str("a message to a queue"),
            Self::SendBody => f.write_str("the body of a message on its way to a queue"),
            Self::Take => f.write_str("a message out of a queue"),
            Self::Settle => f.write_str("the acknowledgement of messages"),
            Self::AwaitBody => f.write_str("the body of a message"),
            Self::Heartbeat => f.write_str("a heartbeat"),
            Self::Leave => f.write_str("the goodbye"),
            Self::Idle => f.write_str("something to do"),
        }
    }
}
