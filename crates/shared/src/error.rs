//! Errors of a rank, by operation.

use std::io;

use rampool_sharing::{OpError, Rank, Reason};

use super::config::ConfigError;
use super::line::LineError;
use super::memory::MemoryError;
use super::servers::ServersError;
use rampool_net::transport::{EndpointError, HandshakeError};

/// Why a process could not become a rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("rank {rank} of {ranks} does not exist: ranks count from 0")]
    Rank { rank: u16, ranks: u16 },
    #[error("invalid setting: {0}")]
    Engine(#[from] rampool_sharing::ConfigError),
    #[error("cannot map shared memory: {0}")]
    Memory(#[from] MemoryError),
    #[error("cannot use memory servers for shared pages: {0}")]
    Servers(#[from] ServersError),
    #[error("the rendezvous: {0}")]
    Address(#[source] Box<EndpointError>),
    #[error("the rendezvous {address} is not a TCP address")]
    NotTcp { address: String },
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: io::Error },
    #[error("{rank} cannot be reached at {address}: {source}")]
    Unreachable { rank: Rank, address: String, source: io::Error },
    #[error("{rank}: {source} (all ranks need the same key: from `rampool launch`, or in RAMPOOL_KEY_FILE)")]
    Handshake { rank: Rank, source: HandshakeError },
    /// Any process that reaches the address could pose as a rank.
    #[error(
        "the ranks meet at {address}, which is not on this machine, and have no key to prove to each other: make one (rampool key FILE), copy it to every machine, and set RAMPOOL_KEY_FILE; `rampool launch` gives them one"
    )]
    NoKey { address: String },
    #[error(
        "the ranks meet at {address}, where a process of another user (uid {uid}) poses as rank 0; use another address, or set RAMPOOL_KEY_FILE"
    )]
    AnotherUser { address: String, uid: u32 },
    #[error("{rank}: {source}")]
    Line { rank: Rank, source: LineError },
    #[error(
        "{rank} is on this machine, but shares no memory with this one (RAMPOOL_SAME_HOST=rings asks for it; see `rampool doctor`)"
    )]
    NoSharedMemory { rank: Rank },
    /// Ranks that cannot run together; both are named.
    #[error("{why}")]
    Refused { why: String },
    #[error("{ranks} did not come within {seconds} s")]
    Missing { ranks: String, seconds: u64 },
    #[error("a socket failed: {0}")]
    Socket(#[source] io::Error),
    #[error("cannot write the trace: {0}")]
    Trace(#[source] io::Error),
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
}

/// Why an operation on shared memory failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedError {
    /// A mistake of this call; the run goes on.
    #[error("rank {rank}: {error}")]
    Operation { rank: u16, error: OpError },
    /// The run is over.
    #[error("rank {rank}: {reason}")]
    Stopped { rank: u16, reason: Reason },
    #[error("rank {rank}: address {address:#x} is in no shared allocation")]
    NotShared { rank: u16, address: usize },
    #[error("rank {rank}: no shared memory: {why}")]
    Refused { rank: u16, why: String },
    #[error("rank {rank}: lock {lock} and above belong to the runtime")]
    LockNumber { rank: u16, lock: u64 },
    #[error("rank {rank}: semaphore {semaphore} does not exist: there are {}", super::SEMAPHORES)]
    SemaphoreNumber { rank: u16, semaphore: u32 },
    #[error("rank {rank}: more than 65535 threads use shared memory at a time")]
    TooManyThreads { rank: u16 },
    #[error("rank {rank} has finished")]
    Finished { rank: u16 },
    #[error("this process is a forked child of rank {rank}, and not a rank")]
    Forked { rank: u16 },
}
