//! Block devices: exports that clients of NBD read and write, such as the kernel's.
//!
//! ```text
//!   Disk      one export: a lease of its full size, and a region of it with the export's pages
//!   Worker    one thread: accepts, polls its clients, gives each a bounded turn
//!   Client    one connection: a session of `rampool_nbd`, and the bytes on their way
//! ```
//! The threads are not the shards: a block client keeps no other client waiting but those that share its
//! thread, and what it does in a turn is bounded. An export's memory is leased when the server starts, so
//! that no write ever fails for want of room. Pages that are all zero take none.
//!
//! NBD has no key. What this module never does: listen beyond this machine unless that was asked for by name.

mod client;
mod disk;
mod outgoing;
mod worker;

pub use rampool_nbd::{Export, ExportError};

pub use crate::config::BlockConfig;

use crate::config::StartError;
use crate::lease::Counts;
use crate::lock::lock;
use crate::shared::Shared;
use disk::Disk;
use rampool_nbd::Exports;
use rampool_net::transport::{Endpoint, Listener, Stream};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
pub(crate) use worker::Worker;

/// One export, for the status.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ExportStatus {
    pub name: String,
    /// Names the lease that holds its pages.
    pub lease: u64,
    pub bytes: u64,
    /// Of it, in pages that are not zero.
    pub used_bytes: u64,
    pub clients: u64,
    /// Pieces of commands, since the server started: a long command counts more than once.
    pub reads: u64,
    pub writes: u64,
    /// Trims, and writes of zeroes.
    pub discards: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub failures: u64,
}

/// The block devices of a server.
pub(crate) struct Blocks {
    exports: Arc<Exports>,
    disks: Vec<Arc<Disk>>,
    threads: Vec<Mailbox>,
    /// Connections, and the most there may be: the rest of the server's places are for clients
    /// that prove a key.
    places: AtomicUsize,
    most_places: usize,
    failed_handshakes: AtomicU64,
    protocol_errors: AtomicU64,
    sleeps: AtomicU64,
}

/// A handle to a worker, for other threads.
struct Mailbox {
    arrivals: Mutex<Vec<Stream>>,
    doorbell: OwnedFd,
}

/// Listens where the configuration says.
pub(crate) fn bind(config: &BlockConfig, allow_uids: &[u32]) -> Result<Vec<Listener>, StartError> {
    if config.exports.is_empty() != config.listen.is_empty() {
        return Err(if config.exports.is_empty() {
            StartError::NoExport
        } else {
            StartError::NoBlockEndpoint
        });
    }
    let bind = |endpoint: &Endpoint| {
        let listen_error = |source| StartError::Listen { endpoint: endpoint.clone(), source };
        if let Endpoint::Ucx { .. } = endpoint {
            return Err(listen_error(io::Error::new(
                io::ErrorKind::Unsupported,
                "NBD travels by TCP and Unix sockets",
            )));
        }
        if !config.plain && !endpoint.is_local().map_err(listen_error)? {
            return Err(StartError::PlainBlock(endpoint.clone()));
        }
        let bind = if allow_uids.is_empty() { Listener::bind } else { Listener::bind_for_all_users };
        bind(endpoint).map_err(listen_error)
    };
    config.listen.iter().map(bind).collect()
}

impl Blocks {
    /// Leases the memory of every export.
    pub(crate) fn open(shared: &Shared, config: &BlockConfig) -> Result<Self, StartError> {
        let exports = Arc::new(Exports::new(config.exports.clone())?);
        let disks = exports
            .list()
            .iter()
            .map(|export| Disk::open(shared, export).map(Arc::new))
            .collect::<Result<_, _>>()?;
        let threads = if config.exports.is_empty() { 0 } else { shared.config.shards };
        let mailbox = || -> io::Result<Mailbox> {
            Ok(Mailbox {
                arrivals: Mutex::default(),
                doorbell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            })
        };
        let threads = (0..threads).map(|_| mailbox()).collect::<io::Result<_>>().map_err(StartError::Poll)?;
        Ok(Self {
            exports,
            disks,
            threads,
            places: AtomicUsize::new(0),
            most_places: (shared.config.max_connections / 4).max(1),
            failed_handshakes: AtomicU64::new(0),
            protocol_errors: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
        })
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads.len()
    }

    pub(crate) fn wake_all(&self) {
        self.threads.iter().for_each(Mailbox::ring);
    }

    /// A place for one more connection, here and at the server.
    fn take_place(&self, shared: &Shared) -> bool {
        let one_more = |taken: usize| (taken < self.most_places).then_some(taken + 1);
        if self.places.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_err() {
            return false;
        }
        let has_place = shared.take_place();
        if !has_place {
            self.places.fetch_sub(1, Ordering::Relaxed);
        }
        has_place
    }

    fn give_place_back(&self, shared: &Shared) {
        self.places.fetch_sub(1, Ordering::Relaxed);
        shared.give_place_back();
    }

    /// Whether a client has chosen an export.
    pub(crate) fn has_clients(&self) -> bool {
        self.disks.iter().any(|disk| disk.clients.load(Ordering::Relaxed) > 0)
    }

    /// Whether the lease is an export's: its member is the server itself.
    pub(crate) fn holds(&self, lease: rampool_wire::frame::LeaseId) -> bool {
        self.disks.iter().any(|disk| disk.lease_id() == lease)
    }

    pub(crate) fn status(&self) -> Vec<ExportStatus> {
        self.disks.iter().map(|disk| disk.status()).collect()
    }

    /// Of each export.
    pub(crate) fn counts(&self) -> impl Iterator<Item = &Counts> {
        self.disks.iter().map(|disk| disk.counts())
    }

    /// Protocol errors, failed handshakes, sleeps.
    pub(crate) fn events(&self) -> [u64; 3] {
        [&self.protocol_errors, &self.failed_handshakes, &self.sleeps]
            .map(|counter| counter.load(Ordering::Relaxed))
    }
}

impl Mailbox {
    fn send(&self, stream: Stream) {
        lock(&self.arrivals).push(stream);
        self.ring();
    }

    fn ring(&self) {
        // A full counter rings as well.
        let _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
    }
}
#[cfg(test)]
mod tests;
