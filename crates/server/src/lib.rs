//! The memory server: lends this machine's memory to clients.
//!
//! ```text
//!   shard threads     each polls its connections, spins a little before it sleeps, and answers what came in batches
//!   copy workers      a thread for each lease that copies to other servers, and one that starts them
//!   block threads     serve exports to clients of NBD, where there are any
//!   reaper thread     frees the memory of members that left or were given up, off the shards' time
//!   Shared            the directory of leases, one space per lease, the store of frames, counters
//! ```
//! A connection belongs to one shard for its life. A request takes the lock of its own lease only; the
//! directory's lock is for control operations. Pages go from the socket into frames and from frames into the
//! socket; the decisions are `rampool_lease`'s.
//!
//! What a server never does: swap (its frames are locked where that is allowed), trust a number from the
//! wire, or keep a page for a client that did not come back within the grace time.
//!
//! Read `shard` first: `run`, `serve`, `turn`. Then `connection`: `receive` takes a frame, `request` says
//! what it asks for, `present` answers with pages. The other threads, and `store`, are read on their own.

pub mod block;
mod closer;
mod connection;
mod copy_worker;
mod poll_set;
mod query;
mod reaper;
mod shard;
mod shared;
mod status;
pub mod store;
mod tenants;
#[cfg(feature = "fuzzing")]
pub mod threadless;
mod unauthenticated;

pub use query::{QueryError, ask_to_drain, query_status};
pub use status::{LeaseStatus, MemberStatus, OperationCounts, QueueStatus, ServerStatus, TenantStatus};

use crate::block::{BlockConfig, Blocks, ExportError};
use crate::store::{CompressedStore, PageStore, RawStore, StoreConfig};
use rampool_lease::{OpenError, QueueLimits, Rules};
use rampool_net::key::Key;
use rampool_net::transport::{Endpoint, Listener};
use rampool_wire::session::Encryption;
use shared::Shared;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
    /// [`rampool_net::transport::Means::Rings`].
    pub rings: bool,
    /// Let clients on this machine read the frames of all leases in the file that they lie in, instead of asking
    /// for each page. Only for a server whose clients may read each other's memory anyway.
    pub open_frames: bool,
    /// Keep pages in this file on a disk; nobody else has it open.
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
    /// Where the kernel says how long tasks wait for memory (PSI). While that is long, new leases are refused.
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
            open_frames: false,
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
        let each = one + shared::OWN_REPLY_BYTES as u64 + u64::from(rampool_wire::frame::MAX_DIRECT_BYTES);
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
        "{0}: UCX trusts its peers, so any client can end this server and lose the pages of all others. If you trust every client that can reach it, add --ucx-clients trusted"
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
        "NBD at {0} can be reached from other machines, and NBD has no key; let nbdkit with TLS stand in front of it, or say --nbd-plain on a network that you trust"
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

/// Starts memory servers.
pub struct Server;

/// A server at work in threads of this process. Dropping it stops it at once.
pub struct RunningServer {
    shared: Arc<Shared>,
    endpoints: Vec<Endpoint>,
    block_endpoints: Vec<Endpoint>,
    threads: Vec<JoinHandle<()>>,
}

/// Reads a server's state from another thread.
#[derive(Clone)]
pub struct Observer {
    shared: Arc<Shared>,
}

impl Observer {
    #[must_use]
    pub fn status(&self) -> ServerStatus {
        self.shared.status()
    }
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Observer")
    }
}

fn new_store(config: &ServerConfig) -> Arc<dyn PageStore> {
    let store_config = StoreConfig {
        memory_bytes: config.memory_bytes,
        arenas: config.shards,
        transit_bytes: config.transit_bytes(),
        lock: config.lock_memory && config.disk.is_none(),
        open: config.open_frames && config.rings && config.disk.is_none(),
        disk: config.disk.clone(),
    };
    match config.store {
        StoreKind::Raw => Arc::new(RawStore::new(&store_config)),
        StoreKind::Compressed => Arc::new(CompressedStore::new(&store_config)),
    }
}

impl Server {
    /// Starts a server in threads of its own; returns when it listens.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running.
    pub fn start(config: ServerConfig) -> Result<RunningServer, StartError> {
        if config.memory_bytes < 4096
            || config.shards == 0
            || config.max_connections == 0
            || config.max_requests == 0
        {
            return Err(StartError::Nothing);
        }
        if config.listen.is_empty() {
            return Err(StartError::NoEndpoint);
        }
        if config.key.is_none() && config.encryption == Encryption::On {
            return Err(StartError::EncryptionNeedsKey);
        }
        let mut listeners = Vec::new();
        for endpoint in &config.listen {
            let listen_error = |source| StartError::Listen { endpoint: endpoint.clone(), source };
            if config.key.is_none() && !endpoint.is_local().map_err(listen_error)? {
                return Err(StartError::KeyNeeded(endpoint.clone()));
            }
            if matches!(endpoint, Endpoint::Ucx { .. }) {
                if !config.ucx_clients_are_trusted {
                    return Err(StartError::UcxClients(endpoint.clone()));
                }
                rampool_ucx::Context::process().map_err(|error| listen_error(io::Error::other(error)))?;
            }
            let bind =
                if config.allow_uids.is_empty() { Listener::bind } else { Listener::bind_for_all_users };
            listeners.push(bind(endpoint).map_err(listen_error)?);
        }
        let block_listeners = block::bind(&config.block, &config.allow_uids)?;
        let block_endpoints = block_listeners.iter().map(|l| l.endpoint().clone()).collect();
        let endpoints = listeners.iter().map(|l| l.endpoint().clone()).collect();
        let store = new_store(&config);
        let shards = config.shards;
        let (shared, orders, duties) = Shared::new(config, store).map_err(StartError::Poll)?;
        let blocks = Blocks::open(&shared, &shared.config.block)?;
        let block_threads = blocks.threads();
        shared.offer(blocks);
        let shared = Arc::new(shared);
        let mut running =
            RunningServer { shared: Arc::clone(&shared), endpoints, block_endpoints, threads: Vec::new() };
        running.spawn("rampool-reaper", {
            let shared = Arc::clone(&shared);
            move || reaper::run(&shared, &orders)
        })?;
        running.spawn("rampool-copies", {
            let shared = Arc::clone(&shared);
            move || copy_worker::run(&shared, &duties)
        })?;
        let mut block_listeners = Some(block_listeners);
        for index in 0..block_threads {
            let listeners = block_listeners.take().unwrap_or_default();
            let worker = block::Worker::new(index, Arc::clone(&shared), listeners)
                .map_err(|e| StartError::Poll(e.into()))?;
            running.spawn(&format!("rampool-block{index}"), move || worker.run())?;
        }
        let mut listeners = Some(listeners);
        for index in 0..shards {
            let listeners = listeners.take().unwrap_or_default();
            let shard = shard::Shard::new(index, Arc::clone(&shared), listeners)
                .map_err(|e| StartError::Poll(e.into()))?;
            running.spawn(&format!("rampool-shard{index}"), move || shard.run())?;
        }
        Ok(running)
    }
}

impl RunningServer {
    /// Where it listens, with the ports the kernel chose.
    #[must_use]
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Where it serves block devices.
    #[must_use]
    pub fn block_endpoints(&self) -> &[Endpoint] {
        &self.block_endpoints
    }

    /// The first of [`RunningServer::endpoints`].
    #[must_use]
    pub fn addr(&self) -> &Endpoint {
        &self.endpoints[0]
    }

    #[must_use]
    pub fn status(&self) -> ServerStatus {
        self.shared.status()
    }

    #[must_use]
    pub fn observer(&self) -> Observer {
        Observer { shared: Arc::clone(&self.shared) }
    }

    /// Other quotas and revoked keys from now on. Connections whose keys are revoked end; what a tenant has
    /// beyond a smaller quota stays.
    pub fn set_tenants(&self, rules: Rules) {
        self.shared.set_rules(rules);
    }

    /// Tells the clients that the server stops, grants no new leases, waits until every member has left or
    /// `timeout` is over, then stops. Until then leases are served as before: their processes fork, and
    /// reconnect when a connection breaks.
    ///
    /// True: the last one has left. False: some have memory here still.
    pub fn drain(self, timeout: Duration) -> bool {
        self.shared.start_draining(timeout);
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline && self.shared.has_members() {
            std::thread::sleep(Duration::from_millis(5).min(timeout));
        }
        !self.shared.has_members()
    }

    /// Whether the server was asked to drain, and the last member has left.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.shared.draining() && !self.shared.has_members()
    }

    /// Stops at once. Connections are closed, all pages are gone.
    pub fn stop(self) {}

    /// Whether a thread of the server has died, which is a defect.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.threads.iter().any(JoinHandle::is_finished)
            || self.shared.copy_worker_died.load(Ordering::Relaxed)
    }

    /// Waits until no member, lease or connection is left, or the deadline; for tests that look at what is
    /// left then.
    #[must_use]
    pub fn wait_until_idle(&self, deadline: Instant) -> bool {
        loop {
            let status = self.status();
            if status.leases.is_empty() && status.connections == 0 && status.lent_bytes == 0 {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// # Panics
    /// If an invariant of the directory, a lease or (with no connection left) the store is broken.
    pub fn check(&self) {
        self.shared.check();
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), StartError> {
        let thread =
            std::thread::Builder::new().name(name.to_owned()).spawn(work).map_err(StartError::Thread)?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.wake_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the server panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests;
