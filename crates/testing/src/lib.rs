//! Helpers for the tests of several crates.
//!
//! ```text
//!   skip          a test that cannot run here says so to scripts/test.py
//!   copy_program  a program where every user may run it
//!   free_port     a port that nobody listens at
//! ```

use std::fs::OpenOptions;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// This test cannot run here because `feature` is missing. Reports it to `scripts/test.py`, which checks the
/// machine itself and fails the run if the feature is there after all.
///
/// # Panics
/// If the script's file cannot be written.
pub fn skip(feature: &str, why: &str) {
    eprintln!("skipped: {why}");
    if let Some(path) = std::env::var_os("RAMPOOL_SKIPS") {
        let mut skips = OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .expect("the file of skips can be written");
        writeln!(skips, "{feature}: {}", why.replace('\n', " ")).expect("the file of skips can be written");
    }
}

/// Copies a program or a script to a place where every user may run it.
///
/// Another process writes the copy: the kernel refuses to run a file that is open for writing (ETXTBSY), and
/// children that other tests of this process fork meanwhile briefly hold every file that is open here.
///
/// # Panics
/// If it cannot be copied.
pub fn copy_program(from: &Path, to: &Path) {
    let status =
        Command::new("install").args(["-m", "755"]).args([from, to]).status().expect("install(1) is there");
    assert!(status.success(), "{} is not copied to {}: {status}", from.display(), to.display());
}

/// A free port of this machine, for a process that is started later. It lies outside the range from which the
/// kernel assigns ports by itself: the kernel could assign such a port before it is used, even to the process
/// that connects to it before the server listens.
///
/// # Panics
/// If none is free.
#[must_use]
pub fn free_port() -> u16 {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    const LOWEST: u32 = 10_000;
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .expect("the kernel says which ports it gives");
    let kernels: u32 =
        range.split_whitespace().next().and_then(|first| first.parse().ok()).expect("a range of ports");
    let ours = kernels.saturating_sub(LOWEST);
    // Copies of a test that run at the same time begin at different ports.
    let tries = (0..ours).map(|_| {
        std::process::id().wrapping_mul(101).wrapping_add(GIVEN.fetch_add(1, Ordering::Relaxed)) % ours
    });
    let ports = tries.filter_map(|number| u16::try_from(LOWEST + number).ok()).chain([0]);
    let free = |port| TcpListener::bind(("127.0.0.1", port)).ok()?.local_addr().ok();
    ports.filter_map(free).next().expect("a port is free").port()
}
