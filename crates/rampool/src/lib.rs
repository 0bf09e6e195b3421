//! The RAM of many machines, as one pool: what a program uses.
//!
//! ```text
//!   builder    from a list of servers to memory, by named options
//!      |-- region, backing, pager, fault, system_calls    the paged view                    (crate `pager`)
//!      |-- pool, direct, error, stats                     the client of memory servers      (crate `client`)
//!      |-- values                                           keys to bytes in the pool         (crate `client`)
//!      |-- transport, key, registration                   how frames move                   (crate `net`)
//!   server, store      lends this machine's memory                                          (crate `server`)
//!   shared             one address range for the processes of a parallel program            (crate `shared`)
//!   proto              layouts, units, elements: the values in the calls above              (crates `wire`, `pinning`)
//! ```
//!
//! This crate holds [`Builder`] and nothing else of its own: it names what the inner crates offer to
//! programs. Start at [`Builder`] for memory, at [`direct::Direct`] for bytes and queues, at
//! [`shared::Shared`] for parallel programs.

pub mod builder;

pub use builder::Builder;
pub use rampool_client::{direct, error, pool, stats, values};
pub use rampool_net::{DEFAULT_PORT, key, registration, transport};
pub use rampool_pager::{backing, fault, pager, region, system_calls};
pub use rampool_server as server;
pub use rampool_server::store;
pub use rampool_shared as shared;

/// The values that calls take and give.
pub mod proto {
    pub use rampool_pinning as registration;
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
