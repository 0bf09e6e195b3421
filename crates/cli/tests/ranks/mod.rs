//! Ranks that a test starts by itself.

use std::net::TcpListener;
use std::process::Child;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(120);

/// Waits for its end. Returns what it said.
pub fn end(mut child: Child) -> (String, Option<i32>) {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > DEADLINE {
            let _ = child.kill();
            panic!("a rank does not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
