//! What can go wrong for a rank, by operation.

use std::io;

use rampool_proto::share::{OpError, Rank, Reason};

use super::config::ConfigError;
use super::line::LineError;
use super::memory::MemoryError;
use super::servers::ServersError;
use crate::transport::{EndpointError, HandshakeError};

/// Why a process could not become a rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("rank {rank} of {ranks}: there is no such rank")]
    Rank { rank: u16, ranks: u16 },
    #[error("a setting is refused: {0}")]
    Engine(#[from] rampool_proto::share::ConfigError),
    #[error("no shared memory: {0}")]
    Memory(#[from] MemoryError),
    #[error("memory servers for shared pages: {0}")]
    Servers(#[from] ServersError),
    #[error("the rendezvous: {0}")]
    Address(#[source] Box<EndpointError>),
    #[error("the rendezvous {address} is no TCP address")]
    NotTcp { address: String },
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: io::Error },
    #[error("{rank} cannot be reached at {address}: {source}")]
    Unreachable { rank: Rank, address: String, source: io::Error },
    #[error("{rank}: {source} (ranks beyond this machine need the same RAMPOOL_KEY_FILE)")]
    Handshake { rank: Rank, source: HandshakeError },
    #[error("{rank}: {source}")]
    Line { rank: Rank, source: LineError },
    #[error("{rank} is on this machine, but shares no memory with this one (RAMPOOL_SAME_HOST=rings asks for it; see `rampool doctor`)")]
    NoSharedMemory { rank: Rank },
    /// Ranks that cannot run together; both are named.
    #[error("{why}")]
    Refused { why: String },
    #[error("{ranks} did not come within {seconds} s")]
    Missing { ranks: String, seconds: u64 },
    #[error("a socket failed: {0}")]
    Socket(#[source] io::Error),
    #[error("the trace cannot be written: {0}")]
    Trace(#[source] io::Error),
    #[error("the kernel refuses a thread: {0}")]
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
    #[error("rank {rank}: semaphore {semaphore}: there are {} of them", super::SEMAPHORES)]
    SemaphoreNumber { rank: u16, semaphore: u32 },
    #[error("rank {rank}: more than 65535 threads use shared memory at a time")]
    TooManyThreads { rank: u16 },
    #[error("rank {rank} has finished")]
    Finished { rank: u16 },
    #[error("this process is a child that rank {rank} forked, and no rank")]
    Forked { rank: u16 },
}
