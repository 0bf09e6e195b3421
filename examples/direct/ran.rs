//! What an example did.

use std::time::Duration;

/// What it says of itself, and what of it is worth measuring: so much of something in so long, without what it takes to set up and to compare.
pub struct Ran {
    pub says: String,
    pub measured: Vec<(&'static str, u64, Duration)>,
}
