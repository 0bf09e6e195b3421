//! UCX (Unified Communication X), loaded at run time, and nothing else: RDMA and other fabrics through one library that machines which have them have installed.
//!
//! ```text
//!   library   libucp.so.0, found and loaded when it is first wanted, and never before
//!   context   what this process has of UCX: devices and transports, as its own variables (UCX_TLS and the like) choose them
//!   channel   a connection: messages of some KiB in order, over a worker of its own
//!   memory    memory registered with the devices
//! ```
//! Nothing here is linked to UCX: where it is missing, [`Context::process`] says which package has it, and everything else works.
//!
//! **Never in a program that did not ask for it.** Left to itself UCX rewrites the first bytes of the process's `mmap` and `munmap`, catches SIGSEGV and starts threads for looking
//! at it. The first two are turned off while it is loaded, which only works if nobody else has loaded it before; and [`forbid`] is for processes that are somebody else's.
//!
//! **UCX believes its peers.** It was made for the processes of one program: what comes for it from a network is read before anything of ours sees it. So a channel is made only with
//! an address that came from a peer who has proved who it is, where there is a key.

mod api;
mod channel;
mod context;
mod library;
mod memory;

pub use channel::{Channel, Mode, SEGMENT_BYTES, TransferId};
pub use context::Context;
pub use library::{LoadError, Version, forbid, version};
pub use memory::Memory;

/// What UCX says of a call that failed.
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

/// Why UCX does not do what it was asked to.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UcxError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("UCX cannot {what}: {status}")]
    Call { what: &'static str, status: Status },
    /// The text says which transports were tried.
    #[error("no transport of UCX leads there; both sides need one in common (UCX_TLS, UCX_NET_DEVICES; here: {0})")]
    Unreachable(String),
    /// A peer that does not keep to the rules of a channel.
    #[error("the peer broke the rules of the connection over UCX: {0}")]
    Peer(&'static str),
}
