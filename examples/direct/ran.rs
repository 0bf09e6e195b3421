//! The result of an example.

use std::time::Duration;

/// A summary, and the measured parts: an amount of something, and its time without set-up and checks.
pub struct Ran {
    pub says: String,
    pub measured: Vec<(&'static str, u64, Duration)>,
}
