//! The value that every load must return, and the ways in which a run can fail.

use rampool_sharing::{Rank, Reason, ThreadId};

/// Every store, in the order in which they happen.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { bytes: vec![0; len] }
    }

    #[must_use]
    pub fn load(&self, at: usize) -> u8 {
        self.bytes[at]
    }

    pub fn store(&mut self, at: usize, value: u8) {
        self.bytes[at] = value;
    }

    #[must_use]
    pub fn range(&self, at: usize, count: usize) -> &[u8] {
        &self.bytes[at..at + count]
    }

    pub fn fill_range(&mut self, at: usize, count: usize, value: u8) {
        self.bytes[at..at + count].fill(value);
    }

    /// A little-endian word.
    #[must_use]
    pub fn word(&self, at: usize, width: usize) -> u64 {
        self.bytes[at..at + width].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    pub fn set_word(&mut self, at: usize, width: usize, value: u64) {
        self.bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
    }
}

/// Why a run failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// A load returned another value than the last store.
    WrongValue { rank: Rank, thread: ThreadId, op: usize, at: usize, got: u64, want: u64 },
    /// An operation ended with another result than the program expects.
    WrongResult { rank: Rank, thread: ThreadId, op: usize, what: String },
    /// An engine ended the run.
    Stopped { rank: Rank, reason: Reason },
    /// No event is left, but threads wait.
    Stuck { waiting: Vec<(Rank, ThreadId, usize)> },
    /// The run does not end.
    Endless { events: u64 },
    /// A message is in flight after all threads ended.
    Unquiet { rank: Rank },
    /// The engine and the MMU disagree on a page's protection, or two ranks may write at once.
    BadProtection { what: String },
    /// A message did not survive encoding and decoding.
    Codec { what: String },
}
