//! The paged view, as a state machine: which page leaves, which comes early, where it lies.
//!
//! ```text
//!   a fault ---> cache ---> outputs: install, fetch, evict, store
//!                  ^------- reports  what came of them, in order; refusals: how long the kernel may say no
//!                  |-- table        an entry for each page; untouched pages take no memory
//!                  `-- pointers     which pages an array of pointers foretells
//!   space          which page is at which address
//!      |-- changes  changes of addresses, in the order in which they were made
//!      `-- given_up what a program gives up of memory that is about to be taken over
//!   curve          what more local memory would save
//!   fingerprint    whether a page that leaves holds what it held when it came
//!   placement      which server holds which page
//! ```
//!
//! Read `cache` from its first page: the states of a page, then `fault`, `fetch`, `writeback`, `budget`.
//! `policy`, `prefetch` and `pointers` choose; they can be skipped at first. `placement` stands alone: the
//! client of memory servers computes with it where a page lies.
//!
//! The cache is driven from outside: `handle(input)`, then `poll()` until `None`. It sees no address, byte,
//! socket or clock. `space` and `changes` know addresses, and nothing of what is there.
#![forbid(unsafe_code)]

pub mod cache;
pub mod changes;
pub mod curve;
pub mod fingerprint;
pub mod follow;
pub mod given_up;
pub mod page_set;
pub mod placement;
pub mod pointers;
pub mod refusals;
pub mod reports;
pub mod space;
pub mod table;
