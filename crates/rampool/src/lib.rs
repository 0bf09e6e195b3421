//! The RAM of many machines, as one pool: what a program uses.
//!
//! ```text
//!   builder                       from a list of servers to memory, by named options
//!      |-- region                 memory that is paged
//!      |-- pool, direct, values   memory by put and get; what a pool is made of; keys to bytes
//!      |-- error, stats, key, transport, proto    the values in these calls
//!   shared                        one address range for the processes of a parallel program
//!   server                        lends this machine's memory
//! ```
//!
//! This crate holds [`Builder`] and nothing else of its own: it names what the inner crates offer to
//! programs. Start at [`Builder`] for memory, at [`direct::Direct`] for bytes and queues, at
//! [`shared::Shared`] for parallel programs.

pub mod builder;

pub use builder::Builder;
pub use rampool_client::{direct, error, pool, stats, values};
pub use rampool_net::{DEFAULT_PORT, key};
pub use rampool_server as server;
pub use rampool_shared as shared;

/// Memory that is paged: an address range, of which pages leave for the servers and come back.
pub mod region {
    pub use rampool_pager::fault::FaultModeChoice;
    pub use rampool_pager::region::{
        AdviseError, AllocError, HandOverError, HandedOver, PagedError, PagedMemory, Region, RegionAdvice,
    };
}

/// Where servers are, and how they are reached.
pub mod transport {
    pub use rampool_net::transport::{Endpoint, SameHost};
}

/// The values that calls take and give.
pub mod proto {
    pub use rampool_wire::{elements, layout, session, units};
}

/// The programs that the manual shows compile.
#[cfg(doctest)]
mod manual {
    #[doc = include_str!("../../../docs/guide/library.md")]
    struct Library;
    #[doc = include_str!("../../../docs/guide/direct.md")]
    struct Direct;
    #[doc = include_str!("../../../docs/guide/queues.md")]
    struct Queues;
    #[doc = include_str!("../../../docs/internals/zero-copy.md")]
    struct ZeroCopy;
    #[doc = include_str!("../../../docs/guide/parallel.md")]
    struct Sharing;
}
