//! What `rampool run` and the agent in its programs agree on.
//!
//! ```text
//!   rampool run --- settings ---> the agent in each program      lease, local memory, fault mode
//!       ^                              |
//!       |--- roll ---------------------|   the process registry: locks on files
//!       `--- guardian -----------------'   faults of a forked child whose server has died
//!   libraries      where the agent's libraries lie
//! ```
//!
//! Read `settings` first; `roll`, `guardian` and `libraries` are read on their own.

pub mod guardian;
pub mod libraries;
pub mod roll;
pub mod settings;
