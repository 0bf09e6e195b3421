//! The papers' interfaces in C, each on the crate `rampool`.
//!
//! ```text
//!   dlmm     dlmm.h: the interface of DLM-M (Saito, Midorikawa, Kai), on one pool a process
//!   tsm      tsm.h: the interface of the software DSM of Barli, Watanabe, Sakai and Tanaka, on one run a process
//!   parmacs  what the macros of m4/rampool.m4 call, for the SPLASH programs
//! ```
//!
//! Read each on its own. This is a Rust library: the C library of the crate `capi` links it, so that C
//! programs have one `librampool.so`. The headers are written by hand and lie with the C library's.

mod dlmm;
mod parmacs;
mod tsm;
