//! The memory server: lends this machine's memory to clients.
//!
//! ```text
//!   shard threads     each polls its connections, spins before it sleeps, and answers what came in batches
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
//! Read `shard` first: `run`, `serve`, `turn`. Then `connection`: a request is a `Work` of steps; and in it
//! `requests`: `receive` takes a frame, `Entry::of` is the table of who handles it. Each kind of request has
//! a file there; `pages` is the simplest. The other threads, and `store`, are read on their own.

pub mod block;
mod closer;
mod collect;
mod config;
mod connection;
mod copy_worker;
mod held;
mod lease;
mod lock;
mod poll_set;
mod published;
mod query;
mod reaper;
mod refused;
mod replies;
mod shard;
mod shared;
mod slice;
mod status;
pub mod store;
mod tenants;
#[cfg(feature = "fuzzing")]
pub mod threadless;
mod unauthenticated;

pub use config::{OpenFrames, ServerConfig, StartError, StoreKind};
pub use query::{QueryError, ask_to_drain, query_status};
pub use status::{LeaseStatus, MemberStatus, OperationCounts, QueueStatus, ServerStatus, TenantStatus};

use crate::block::Blocks;
use crate::store::{CompressedStore, PageStore, RawStore, StoreConfig};
use rampool_lease::Rules;
use rampool_net::transport::{Endpoint, Listener};
use rampool_wire::session::Encryption;
use shared::Shared;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Starts memory servers.
pub struct Server;

/// A server at work in threads of this process. Dropping it stops it at once.
pub struct RunningServer {
    shared: Arc<Shared>,
    blocks: Arc<Blocks>,
    endpoints: Vec<Endpoint>,
    block_endpoints: Vec<Endpoint>,
    threads: Vec<JoinHandle<()>>,
}

/// Reads a server's state from another thread.
#[derive(Clone)]
pub struct Observer {
    shared: Arc<Shared>,
    blocks: Arc<Blocks>,
}

impl Observer {
    #[must_use]
    pub fn status(&self) -> ServerStatus {
        status::collect(&self.shared, &self.blocks, None)
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
        open: config.open_frames != OpenFrames::ForNobody && config.rings && config.disk.is_none(),
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
        let (shared, threads) = (Arc::new(shared), Vec::new());
        let blocks = Arc::new(Blocks::open(&shared, &shared.config.block)?);
        let (shared_, blocks_) = (Arc::clone(&shared), Arc::clone(&blocks));
        let mut running =
            RunningServer { shared: shared_, blocks: blocks_, endpoints, block_endpoints, threads };
        running.spawn("rampool-reaper", {
            let shared = Arc::clone(&shared);
            move || reaper::run(&shared, &orders)
        })?;
        running.spawn("rampool-copies", {
            let shared = Arc::clone(&shared);
            move || copy_worker::run(&shared, &duties)
        })?;
        let mut block_listeners = Some(block_listeners);
        for index in 0..blocks.threads() {
            let listeners = block_listeners.take().unwrap_or_default();
            let worker = block::Worker::new(index, Arc::clone(&shared), Arc::clone(&blocks), listeners)
                .map_err(|e| StartError::Poll(e.into()))?;
            running.spawn(&format!("rampool-block{index}"), move || worker.run())?;
        }
        let mut listeners = Some(listeners);
        for index in 0..shards {
            let listeners = listeners.take().unwrap_or_default();
            let shard = shard::Shard::new(index, Arc::clone(&shared), Arc::clone(&blocks), listeners)
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
        status::collect(&self.shared, &self.blocks, None)
    }

    #[must_use]
    pub fn observer(&self) -> Observer {
        Observer { shared: Arc::clone(&self.shared), blocks: Arc::clone(&self.blocks) }
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
        self.blocks.wake_all();
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline && self.has_members() {
            std::thread::sleep(Duration::from_millis(5).min(timeout));
        }
        !self.has_members()
    }

    /// Whether the server was asked to drain, and the last member has left.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.shared.draining() && !self.has_members()
    }

    /// A member whose connection broke counts for as long as it may come back.
    fn has_members(&self) -> bool {
        // The member of an export's lease is the server itself.
        let is_client = |lease: &rampool_lease::LeaseSummary| {
            !lease.members.is_empty() && !self.blocks.holds(lease.lease)
        };
        self.blocks.has_clients() || self.shared.directory().summary().iter().any(is_client)
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
        self.blocks.wake_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the server panicked");
            }
        }
        // Each of the threads may have had a line to write until its end.
        self.shared.log_repeated(true);
    }
}

#[cfg(test)]
mod tests;
