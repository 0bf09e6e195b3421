//! The simulated shared view: ranks, threads, memory and network in one process, one seed a run.
//!
//! ```text
//!   program   threads' operations: accesses, locks ...     generate   legal programs from a seed
//!   memory    a rank's pages under a software MMU          golden     the expected value of every load
//!   node      one rank: engine, memory, threads; siblings run *inside* the engine's memory operations
//!   network   lost, duplicated, reordered datagrams        cost       the costs of faults and messages
//!   world     many nodes, a network and virtual time       explore    every order of a small world
//! ```
//!
//! A thread's access is one byte. If the page's protection allows it, it happens at the same instant in the
//! rank's memory and in the golden memory; if not, the thread faults and waits. In a program without data
//! races (or, for entry consistency, one that keeps its locks' data under its locks) conflicting accesses are
//! ordered by synchronisation, hence also in simulated time, so every load must return the value in golden
//! memory. Under sequential consistency that holds for racy programs too.

pub mod cost;
pub mod explore;
pub mod generate;
pub mod golden;
pub mod memory;
pub mod network;
pub mod node;
pub mod papers;
pub mod program;
pub mod world;

pub use golden::Failure;
pub use program::{Op, Script};
pub use world::{Report, Setup, World};
