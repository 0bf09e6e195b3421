//! What the tests of several crates share.

use std::fs::OpenOptions;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// This test cannot run here, for want of `feature`: says so, and tells `scripts/test.py`, which asks the machine itself and fails the run if it has the feature after all.
///
/// # Panics
/// If the script's file cannot be written.
pub fn skip(feature: &str, why: &str) {
    eprintln!("skipped: {why}");
    if let Some(path) = std::env::var_os("RAMPOOL_SKIPS") {
        let mut skips = OpenOptions::new().append(true).create(true).open(path).expect("the file of skips can be written");
        writeln!(skips, "{feature}: {}", why.replace('\n', " ")).expect("the file of skips can be written");
    }
}

/// Copies a program or a script to where anybody may run it.
///
/// Another process writes it: the kernel runs no file that somebody has open for writing (ETXTBSY), and children that other tests of this process fork meanwhile have, for a
/// moment, whatever is open here.
///
/// # Panics
/// If it cannot be copied.
pub fn copy_program(from: &Path, to: &Path) {
    let status = Command::new("install").args(["-m", "755"]).args([from, to]).status().expect("install(1) is there");
    assert!(status.success(), "{} is not copied to {}: {status}", from.display(), to.display());
}

/// A port of this machine's that nobody has, for somebody who is started later. Not one of those that the kernel gives to whoever asks for none: it could give it away before it
/// is used, also to the very process that connects to it before anybody listens.
///
/// # Panics
/// If none is free.
#[must_use]
pub fn free_port() -> u16 {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    const LOWEST: u32 = 10_000;
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").expect("the kernel says which ports it gives");
    let kernels: u32 = range.split_whitespace().next().and_then(|first| first.parse().ok()).expect("a range of ports");
    let ours = kernels.saturating_sub(LOWEST);
    // Copies of a test that run side by side begin at different ones.
    let tries = (0..ours).map(|_| std::process::id().wrapping_mul(101).wrapping_add(GIVEN.fetch_add(1, Ordering::Relaxed)) % ours);
    let ports = tries.filter_map(|number| u16::try_from(LOWEST + number).ok()).chain([0]);
    let free = |port| TcpListener::bind(("127.0.0.1", port)).ok()?.local_addr().ok();
    ports.filter_map(free).next().expect("a port is free").port()
}
