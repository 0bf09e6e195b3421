//! What a queued reply keeps until it has been sent.

use crate::store::PageStore;
use rampool_lease::FrameIndex;
use std::sync::{Arc, Mutex, PoisonError};

/// Buffers in the pool, and bytes of each.
const MOST_POOLED: usize = 4;
const LARGEST_POOLED: usize = 1 << 20;

/// Keeps the frames of a queued reply.
pub(crate) struct Held {
    store: Option<Arc<dyn PageStore>>,
    one: [FrameIndex; 1],
    many: Vec<FrameIndex>,
    /// Other memory of a reply.
    bytes: Vec<u8>,
    /// The pool that it returns to.
    buffer_pool: Option<Arc<BufferPool>>,
}

/// Buffers of sent replies, for the next ones: memory that is in the cache, and that the kernel need not
/// supply.
#[derive(Default, Debug)]
pub(super) struct BufferPool(Mutex<Vec<Vec<u8>>>);

impl BufferPool {
    /// An empty buffer with room for `bytes`: the one that was used last, if it has it.
    pub(super) fn take(&self, bytes: usize) -> Vec<u8> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = found.filter(|buffer| buffer.capacity() >= bytes).unwrap_or_default();
        buffer.reserve_exact(bytes);
        buffer
    }

    fn put_back(&self, mut buffer: Vec<u8>) {
        if buffer.capacity() == 0 || buffer.capacity() > LARGEST_POOLED {
            return;
        }
        buffer.clear();
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if buffers.len() < MOST_POOLED {
            buffers.push(buffer);
        }
    }
}

impl Held {
    pub(crate) fn nothing() -> Self {
        Self::bytes(Vec::new())
    }

    pub(super) fn bytes(bytes: Vec<u8>) -> Self {
        Self { store: None, one: [FrameIndex(0)], many: Vec::new(), bytes, buffer_pool: None }
    }

    /// Its bytes return to the pool when the reply has been sent.
    pub(super) fn back_to(self, buffer_pool: &Arc<BufferPool>) -> Self {
        let mut held = self;
        held.buffer_pool = Some(Arc::clone(buffer_pool));
        held
    }

    pub(super) fn frames(store: &Arc<dyn PageStore>, frames: &[FrameIndex]) -> Self {
        Self::frames_and_bytes(store, frames, Vec::new())
    }

    pub(crate) fn frames_and_bytes(
        store: &Arc<dyn PageStore>,
        frames: &[FrameIndex],
        bytes: Vec<u8>,
    ) -> Self {
        match frames {
            [] => Self::bytes(bytes),
            // The usual reply, one page, allocates nothing.
            [one] => Self {
                store: Some(Arc::clone(store)),
                one: [*one],
                many: Vec::new(),
                bytes,
                buffer_pool: None,
            },
            many => Self {
                store: Some(Arc::clone(store)),
                one: [FrameIndex(0)],
                many: many.to_vec(),
                bytes,
                buffer_pool: None,
            },
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(store) = &self.store {
            store.release(if self.many.is_empty() { &self.one } else { &self.many });
        }
        if let Some(buffer_pool) = &self.buffer_pool {
            buffer_pool.put_back(std::mem::take(&mut self.bytes));
        }
    }
}
