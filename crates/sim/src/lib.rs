//! The simulated world: everything the pure machines meet outside, from one seed, in one
//! thread, without a clock.
//!
//! ```text
//!   changes   threads that move and unmap memory, a kernel that tells of it late, and the books of a pager
//!   relink    two ranks, and a connection that is cut again and again
//!   tenants   a server's tenants, some of which mean no good: leases, accounts, and shares of time
//!   rng       one u64 seed picks everything that happens
//!   paging    a program with threads, a software MMU, the kernel's replies and servers, around the cache
//!   session   a client's sessions with memory servers, and everything that goes wrong between them
//!   share     ranks with threads that share memory, a network, and golden memory that judges every load
//! ```
//!
//! A run that breaks a rule panics with its seed; the same seed replays it. Never shipped.
//!
//! Read `paging` first: its world is a program, a kernel and servers around one pure machine. The others are
//! built alike.
#![forbid(unsafe_code)]

pub mod changes;
pub mod paging;
pub mod relink;
pub mod rng;
pub mod session;
pub mod share;
pub mod tenants;
