//! Buffers of requests, to be used again: whole pages, not cleared.

use std::sync::{Mutex, PoisonError};

use rampool_wire::units::OS_PAGE_BYTES;

/// Buffers that are kept, and the longest of them.
const MOST_KEPT: usize = 64;
const MOST_BYTES: usize = (1 << 20) + 2 * OS_PAGE_BYTES;

#[derive(Default)]
pub struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// At least so many bytes, of any content.
    pub fn take(&self, bytes: usize) -> Vec<u8> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = kept.unwrap_or_default();
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        buffer
    }

    pub fn give(&self, buffer: Vec<u8>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MOST_KEPT && buffer.len() <= MOST_BYTES {
            kept.push(buffer);
        }
    }
}
