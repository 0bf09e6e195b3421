//! What the tests of several crates share.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::Command;

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
