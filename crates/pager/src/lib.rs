//! The paged view: memory of a program that lies at memory servers.
//!
//! ```text
//!   region     memory for programs that ask for it                 the agent starts at `pager`
//!      |   `- system_calls  absent pages, where the kernel cannot wait for them
//!      |
//!   pager      kernel events in, kernel calls out; decisions are `rampool_paging::cache`'s
//!      |-- fault    how faults are caught: the ladder of userfaultfd, its user-mode kind, SIGSEGV
//!      |-- frames   the pager's own memory: eviction batches and fetches
//!      |-- events   changes of mappings, in order
//!      |-- fork     a forked child, served by its parent until it serves itself
//!      `-- backing  what stands behind a pager: a pool of servers, or memory
//! ```
//!
//! Read `rampool_paging::space`, `frames` and `backing`, which are small; then `fault`, then `pager`, whose
//! walk is a fault: `serve_events`, `carry_out`, `install`. `fork` and `region` come last.

pub mod backing;
pub mod events;
pub mod fault;
pub mod fork;
mod frames;
pub mod pager;
pub mod region;
pub mod system_calls;
