//! A file system whose bytes lie in the pages of a pool.
//!
//! ```text
//!   requests of the kernel ──▶ Files ──▶ which pages to read, to write, to clear, to give back
//!                               │ ├── space   which pages are free
//!                               │ └── map     which page of a file is which page of the pool
//!                              Turns      what may begin, so that no page is read while it is being stored
//! ```
//! [`Files`] holds names, attributes and the places of bytes, and no byte of a file. An operation on bytes
//! is a plan ([`Piece`], [`WritePlan`], [`Cleared`]) that the shell carries out in the order in which plans
//! were made: it asks [`Turns`] before each one.
//!
//! Pages of the pool that belong to no file are discarded, and read as zeroes. So do the bytes of a file's
//! last page that lie beyond its end.
//!
//! What this crate never does: hold bytes of a file, read a clock, perform I/O.
//!
//! Read `files`, then `turns`; `space` and `map` are read on their own.

#![forbid(unsafe_code)]

mod attributes;
mod bytes;
mod files;
mod map;
mod refusal;
mod space;
mod turns;

pub use attributes::{Attributes, Change, Kind, Owner};
pub use bytes::{Cleared, Edge, Piece, WritePlan};
pub use files::{Entry, Files, Onto, ROOT, Totals};
pub use refusal::Refusal;
pub use turns::{Access, Turns};

/// Bytes of a page.
pub const PAGE: u64 = rampool_wire::units::OS_PAGE_BYTES as u64;
/// Bytes of a name.
pub const MOST_NAME_BYTES: usize = 255;
/// Names of one file.
pub const MOST_LINKS: u32 = 65_000;
/// Files, directories and all else that has attributes.
pub const MOST_INODES: usize = 1 << 24;
/// The kernel counts a file's bytes in signed numbers.
pub const MOST_BYTES: u64 = i64::MAX as u64;
