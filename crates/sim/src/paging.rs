//! The page cache in its simulated world.
//!
//! ```text
//!   threads --load/store--> MMU (mapped frames, write protection) --fault--> Cache --outputs--> kernel,
//!                              ^------------------- install, unprotect, move out -------------- batches,
//!                                                                                               fetches,
//!                                                                                               servers
//! ```
//!
//! Oracles: every load sees the last value stored (golden memory); no write is lost when messages are
//! delayed, reordered, refused or taken away; the frames in use stay within the budget, counted here and not
//! by the cache; every fault is answered once what is under way has come back; nothing (batch, fetch, frame,
//! server copy) is left when everything is forgotten; and the cache's own `check` holds after each step.
//!
//! It never judges speed: how well the policy chooses is measured in `policy`.

pub mod mutation;
pub mod pattern;
pub mod plan;
pub mod policy;
pub mod world;

pub use mutation::Mutation;
pub use plan::Plan;
pub use world::{World, run};
