//! The runtime: reading down this list is following a page.
//!
//! ```text
//!   builder    from a list of servers to memory, by named options
//!   region     the paged view for programs that ask for it
//!   system_calls  given absent pages of regions, where the kernel cannot wait for them
//!   space      which page is where in this process
//!   pager      kernel events in, kernel calls out; decisions are rampool_proto::cache's
//!   fault      how faults are caught: the ladder of userfaultfd, its user-mode kind, SIGSEGV
//!   direct     bytes of regions, read and changed where they lie
//!   frames     the pager's own memory: eviction batches and fetches
//!   backing    what stands behind a pager
//!   pool       the client's side of many memory servers: pages fetched, stored, checked
//!   transport  frames over TCP or a Unix socket, plain or sealed
//!   registration  pinned memory: the pin-down cache, and who registers
//!   key        the secret that both ends prove to have
//!   fork       a forked child, served by its parent until it serves itself
//!   guardian   answers a child's faults when the parent that served it is gone
//!   server     lends this machine's memory: connections in shards, pages in a store
//!   store      where a server keeps pages: locked frames, raw or compressed
//!   shared     the shared view: one address range for the processes of a parallel program
//!   blocks     checksums of what the direct view moves
//!   settings   what `rampool run` tells the agent in the programs it starts
//!   roll       which processes of a run live
//!   error      what can go wrong between a program and its servers
//!   stats      counters that others may watch
//! ```

pub mod backing;
mod blocks;
pub mod builder;
pub mod direct;
pub mod error;
pub mod fault;
pub mod fork;
mod frames;
pub mod guardian;
pub mod key;
pub mod pager;
mod patience;
pub mod pool;
pub mod region;
pub mod registration;
pub mod roll;
pub mod server;
pub mod settings;
pub mod shared;
pub mod space;
pub mod stats;
pub mod store;
pub mod system_calls;
pub mod transport;
pub mod words;

pub use builder::Builder;
pub use rampool_proto as proto;

/// The TCP port of a memory server unless another is named.
pub const DEFAULT_PORT: u16 = 7117;

/// The programs that the manual shows compile.
#[cfg(doctest)]
mod manual {
    #[doc = include_str!("../../../docs/library.md")]
    struct Library;
    #[doc = include_str!("../../../docs/direct.md")]
    struct Direct;
    #[doc = include_str!("../../../docs/zero-copy.md")]
    struct ZeroCopy;
    #[doc = include_str!("../../../docs/sharing.md")]
    struct Sharing;
}
