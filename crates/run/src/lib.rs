//! What `rampool run` and the agent in its programs agree on.
//!
//! ```text
//!   rampool run --- settings ---> the agent in each program      lease, local memory, fault mode
//!       ^                              |
//!       |--- process_registry ---------|   which processes live: locks on files
//!       `--- fork_fallback ------------'   faults of a forked child whose server has died
//!   libraries      where the agent's libraries lie
//! ```
//!
//! Read `settings` first; `process_registry`, `fork_fallback` and `libraries` are read on their own.

pub mod fork_fallback;
pub mod libraries;
pub mod process_registry;
pub mod settings;
