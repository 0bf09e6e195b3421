//! What a server lends and how, and why one does not start.

use crate::replies::OWN_REPLY_BYTES;
use rampool_lease::{OpenError, QueueLimits, Rules};
use rampool_nbd::{Export, ExportError};
use rampool_net::key::Key;
use rampool_net::transport::{Endpoint, Stream};
use rampool_wire::session::Encryption;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Who may read the frames of all leases in the file that they lie in, through a Unix socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OpenFrames {
    #[default]
    ForNobody,
    /// The server's own user, outside containers, which may look into the server anyway.
    ForItsUser,
    /// Every client.
    ForAll,
}

impl OpenFrames {
    pub(crate) fn are_for(self, client: &Stream) -> bool {
        match self {
            Self::ForNobody => false,
            Self::ForItsUser => client.is_of_this_user(),
            Self::ForAll => true,
        }
    }
}

/// How pages are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StoreKind {
    /// As they are: the fastest.
    #[default]
    Raw,
    /// Packed with LZ4: more pages than memory, as far as they pack.
    Compressed,
}

/// What a server lends and how. Start from [`ServerConfig::new`].
#[derive(Clone, Debug)]
pub struct ServerConfig {
    pub memory_bytes: u64,
    pub listen: Vec<Endpoint>,
    pub key: Option<Key>,
    pub encryption: Encryption,
    pub store: StoreKind,
    pub shards: usize,
    /// How long an idle shard looks for work before it sleeps, as long as most work comes within this time.
    pub spin: Duration,
    /// How long a member without a connection keeps its pages.
    pub grace: Duration,
    /// How often a client must send something, and how often the kernel probes the client's machine. A
    /// machine that does not answer three times is gone.
    pub heartbeat: Duration,
    /// How long a client may send nothing, or read nothing, while its machine answers: it may be stopped, by
    /// job control or a debugger, and go on later.
    pub silence: Duration,
    pub max_connections: usize,
    /// Credits of a connection.
    pub max_requests: u32,
    pub max_bytes: u32,
    /// The limits of a lease's queues.
    pub queues: QueueLimits,
    /// Lock the frames in memory.
    pub lock_memory: bool,
    /// Let clients on this machine, which come through a Unix socket, use shared memory instead:
    /// [`rampool_net::transport::Means::RINGS`].
    pub rings: bool,
    /// Whose clients read pages in place instead of asking for each.
    pub open_frames: OpenFrames,
    /// Keep pages in this file on a disk. No other process uses it.
    pub disk: Option<Arc<File>>,
    /// Users that may use its Unix sockets, besides the server's own and root.
    pub allow_uids: Vec<u32>,
    /// Your statement, needed to listen at `ucx:`, that you trust every client there not to crash this
    /// process: UCX trusts its peers.
    pub ucx_clients_are_trusted: bool,
    /// The servers that clients may let this one copy to; empty: any at a TCP address. Without a key only
    /// those of this machine.
    pub copy_to: Vec<Endpoint>,
    /// Quotas of tenants, and keys that are revoked.
    pub tenants: Rules,
    /// Where the kernel says how long tasks wait for memory (PSI). While that is long, new
    /// leases are refused.
    pub pressure: Vec<PathBuf>,
    /// Block devices for clients of NBD.
    pub block: BlockConfig,
}

impl ServerConfig {
    /// `memory_bytes` at one endpoint, everything else as `rampool serve` has it by default.
    #[must_use]
    pub fn new(memory_bytes: u64, listen: Endpoint) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            memory_bytes,
            listen: vec![listen],
            key: None,
            encryption: Encryption::Auto,
            store: StoreKind::Raw,
            shards: cores,
            spin: Duration::from_micros(if cores == 1 { 0 } else { 100 }),
            grace: Duration::from_secs(10),
            heartbeat: Duration::from_secs(2),
            silence: Duration::from_secs(3600),
            max_connections: 1024,
            max_requests: 256,
            max_bytes: 16 << 20,
            queues: QueueLimits::default(),
            lock_memory: true,
            rings: true,
            open_frames: OpenFrames::default(),
            disk: None,
            allow_uids: Vec::new(),
            ucx_clients_are_trusted: false,
            copy_to: Vec::new(),
            tenants: Rules::default(),
            pressure: vec![PathBuf::from("/proc/pressure/memory")],
            block: BlockConfig::default(),
        }
    }
}

impl ServerConfig {
    /// Bytes of replies that may wait to leave, of all connections together; one reply for each shard beyond
    /// it.
    pub(crate) fn reply_bytes(&self) -> u64 {
        (self.memory_bytes / 16).clamp(32 << 20, 1 << 30)
    }

    /// Upper bound of pages in flight beyond `memory_bytes`: each connection has either bytes that arrive or
    /// one reply that leaves, and its lease one copy to another server, in addition to what counts among all
    /// replies. With room for all of it a granted
    /// lease can be filled, even when other clients do not read.
    pub(crate) fn transit_bytes(&self) -> u64 {
        let one = rampool_wire::frame::MAX_BULK_BYTES as u64;
        let each = one + OWN_REPLY_BYTES as u64 + u64::from(rampool_wire::frame::MAX_DIRECT_BYTES);
        (self.max_connections as u64)
            .saturating_mul(each)
            .saturating_add(self.reply_bytes())
            .saturating_add(self.shards as u64 * one)
    }
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error("a server must lend at least one page and have at least one shard and one connection")]
    Nothing,
    #[error("no address to listen on: name one")]
    NoEndpoint,
    #[error(
        "{0} can be reached from other machines; that needs a key (rampool key FILE, then --key-file FILE)"
    )]
    KeyNeeded(Endpoint),
    #[error(
        "{0}: UCX trusts its peers, so any client can end this server and lose the pages of all others. If \
         you trust every client that can reach it, add --ucx-clients trusted"
    )]
    UcxClients(Endpoint),
    #[error("encryption needs a key (rampool key FILE, then --key-file FILE)")]
    EncryptionNeedsKey,
    #[error("cannot listen on {endpoint}: {source}")]
    Listen { endpoint: Endpoint, source: io::Error },
    #[error("there is an address for NBD and nothing to export (--export NAME=SIZE)")]
    NoExport,
    #[error("there is an export and no address for NBD to serve it at (--nbd unix:PATH)")]
    NoBlockEndpoint,
    #[error(
        "NBD at {0} can be reached from other machines, and NBD has no key; let nbdkit with TLS stand in \
         front of it, or say --nbd-plain on a network that you trust"
    )]
    PlainBlock(Endpoint),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error("export {name:?} of {bytes} bytes does not fit: {source}; lend more (--memory), or export less")]
    ExportMemory { name: String, bytes: u64, source: OpenError },
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    #[error("cannot set up polling: {0}")]
    Poll(io::Error),
}

/// Which block devices a server offers, and where.
#[derive(Clone, Debug, Default)]
pub struct BlockConfig {
    pub listen: Vec<Endpoint>,
    pub exports: Vec<Export>,
    /// Listen beyond this machine too, although NBD has no key and no encryption.
    pub plain: bool,
}
