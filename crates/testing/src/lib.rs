//! What the tests of several crates share.

use std::fs::OpenOptions;
use std::io::Write;

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
