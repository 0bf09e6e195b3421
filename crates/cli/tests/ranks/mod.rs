//! Ranks that a test starts by itself.

use std::process::{Child, Output};
use std::time::{Duration, Instant};

/// A run that takes longer hangs.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Waits for its end. What it says must fit the pipes.
pub fn output(mut child: Child, what: &str) -> Output {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > DEADLINE {
            let _ = child.kill();
            panic!("{what} does not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// The same of a rank. Returns what it said.
pub fn end(child: Child) -> (String, Option<i32>) {
    let output = output(child, "a rank");
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
}
