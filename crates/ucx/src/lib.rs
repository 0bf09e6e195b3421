//! UCX (Unified Communication X), loaded at run time: RDMA and other fabrics through one library that
//! machines with such networks have installed.
//!
//! ```text
//!   library   libucp.so.0, found and loaded on first use
//!   context   the process's devices and transports, chosen by UCX's own variables (UCX_TLS and the like)
//!   channel   a connection: messages of some KiB in order, over a worker of its own
//! ```
//! This crate does not link to UCX: where UCX is missing, [`Context::process`] says which package has it, and
//! everything else works.
//!
//! **Never in a program that did not ask for it.** By default UCX rewrites the first bytes of the process's
//! `mmap` and `munmap`, catches SIGSEGV, and starts threads by itself. The first two are turned off while it
//! is loaded, which only works if no other code has loaded it before. [`forbid`] is for processes that run
//! another user's program.
//!
//! **UCX trusts its peers.** It was made for the processes of one program: it reads what comes from a network
//! before any code of ours sees it. So a channel is made only with an address that came from a peer that has
//! proved its identity, where there is a key.

mod api;
mod channel;
mod context;
mod library;

pub use channel::{Channel, Mode, SEGMENT_BYTES};
pub use context::Context;
pub use library::{LoadError, Version, forbid, version};

/// The status of a failed UCX call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Status(i8);

impl Status {
    const OK: Status = Status(0);
    const IN_PROGRESS: Status = Status(1);
    const BUSY: Status = Status(-15);
    const UNREACHABLE: Status = Status(-6);
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match library::loaded() {
            Some(library) => f.write_str(&library.explain(*self)),
            None => write!(f, "UCX status {}", self.0),
        }
    }
}

/// Why an operation of UCX failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UcxError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("UCX cannot {what}: {status}")]
    Call { what: &'static str, status: Status },
    /// The text says which transports were tried.
    #[error(
        "no UCX transport reaches the peer; give both sides a common one (UCX_TLS, UCX_NET_DEVICES; here: \
         {0})"
    )]
    Unreachable(String),
    /// The peer broke the rules of a channel.
    #[error("the peer broke the rules of the connection over UCX: {0}")]
    Peer(&'static str),
}
