//! The bytes on the wire, and what both ends agree on first.
//!
//! ```text
//!   session        preface, versions, encryption, features: who may talk, and how
//!      |-- tenant    the name of a client's tenant, and the generation of its key
//!      |
//!   frame          header, table, bulk: requests and replies of pages, bytes, queues
//!      |-- layout    which bytes, in MPI's terms: loops, lists, runs
//!      |-- elements  updates and scans that a memory server carries out on what it holds
//!      `-- checksum  CRC-32C of headers, tables and pages
//!
//!   rings          bytes between two processes that share memory
//!   places         where pages lie in a server's memory, for clients that read them there
//!   fabric         a connection over UCX: how it is set up, and what bounds it
//!   units          numbers with units: PageIndex, Extent, ByteLen, Tick
//!   listed         enums with a list of their variants
//! ```
//!
//! Read `units`, then `session`, then `frame` with its children in the order of their list: `data` (pages),
//! `control` (leases, regions), `direct` (bytes), `queue`, `reach` (published memory). `rings` and `fabric`
//! are two ways to carry the same frames; read them on their own.
//!
//! Everything from a peer is parsed here once, within fixed bounds. Nothing here performs I/O, reads a clock
//! or panics on any input.
#![forbid(unsafe_code)]

pub mod checksum;
pub mod elements;
pub mod fabric;
pub mod frame;
pub mod layout;
mod listed;
pub mod places;
pub mod rings;
pub mod session;
pub mod tenant;
pub mod units;
