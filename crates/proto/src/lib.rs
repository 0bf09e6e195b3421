//! Every decision rampool takes, without any I/O.
//!
//! ```text
//!   elements       updates and scans that a memory server carries out on what it holds
//!   layout         which bytes, in MPI's terms: loops, lists, runs
//!   units          numbers with units: PageIndex, Extent, NodeId ...
//!   wire           the bytes that travel: headers, page tables, control messages
//!   session        who may talk: preface, versions, credits, deadlines
//!   cache          the paged view: page states, which page leaves, which comes early
//!   fingerprint    whether a page that leaves holds what it held when it came
//!   pointers       which pages an array of pointers foretells
//!   table          an entry for each page, of which those that nobody touched take no memory
//!   placement      which server holds which page
//!   registration   the pin-down cache: which memory is registered for zero-copy transfers
//!   rings          bytes between two processes that share memory
//!   fabric         a connection over UCX: how it is set up, and what bounds it
//!   share          the shared view: locks, barriers and six consistency protocols
//!   server         what a memory server does with one request: leases, regions, page tables
//! ```
//!
//! Everything here is driven from outside: a machine is handed inputs with `handle`, drained with `poll` until `None`, and never reads a
//! clock, spawns, locks or performs I/O. The same machines run in the simulator, in the fuzzers and in the runtime.
#![forbid(unsafe_code)]

pub mod cache;
pub mod checksum;
pub mod elements;
pub mod fabric;
pub mod fingerprint;
pub mod layout;
pub mod placement;
pub mod pointers;
pub mod registration;
pub mod rings;
pub mod server;
pub mod session;
pub mod share;
pub mod table;
pub mod units;
pub mod wire;
