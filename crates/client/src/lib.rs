//! The client's side of many memory servers.
//!
//! ```text
//!   values     from keys to bytes, for one process or for all members of a lease
//!      |
//!   direct     bytes of regions, read and changed where they lie; queues; exposed memory
//!      |
//!   pool       pages fetched and stored; leases, regions; the shell around the session machine
//!      |
//!   error      what can go wrong between a program and its servers, by operation
//!   stats      counters that other threads may read
//! ```
//!
//! Read `error`, then `rampool_session`'s first page, then `pool`: [`pool::Pool::fetch`] down through
//! `shell`, which carries what the session machine orders, and `server`, which makes and takes in the bytes
//! of frames. `direct` stands on it: a layout becomes requests in `pool/direct`. Decisions are not made here.

pub mod direct;
pub mod error;
pub mod pool;
pub mod stats;
pub mod values;
