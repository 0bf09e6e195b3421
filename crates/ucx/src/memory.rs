//! Memory registered with the devices of a context.

use crate::api::{MAP_ADDRESS, MAP_LENGTH, MapParams, RawMemory};
use crate::{Context, Status, UcxError};
use std::ops::Range;
use std::ptr::null_mut;

/// A range of this process's memory, registered with every device of a context that supports registration:
/// pinned, and known to the device by its pages. Registered until it is dropped.
///
/// The registration names the pages that were there, not the addresses: pages that are mapped there later are
/// not registered.
pub struct Memory {
    context: Context,
    raw: *mut RawMemory,
}

// SAFETY: a handle that any thread may end, in a context for several threads.
unsafe impl Send for Memory {}

impl Memory {
    /// Registers a range.
    ///
    /// # Errors
    /// [`UcxError::Call`]: the range is not mapped, or more than may be locked.
    pub fn register(context: &Context, range: Range<usize>) -> Result<Self, UcxError> {
        let params = MapParams {
            field_mask: MAP_ADDRESS | MAP_LENGTH,
            address: std::ptr::without_provenance_mut(range.start),
            length: range.len(),
            flags: 0,
            protection: 0,
            memory_type: 0,
            reserve: [0; 8],
        };
        let mut raw = null_mut();
        // SAFETY: a context, parameters whose mask names the fields in use, and a place to write to. Nothing
        // is read or written in the range.
        let status =
            unsafe { (context.functions().memory_map)(context.raw(), &raw const params, &raw mut raw) };
        if status != Status::OK {
            return Err(UcxError::Call { what: "register memory", status });
        }
        Ok(Self { context: context.clone(), raw })
    }

    pub(crate) fn raw(&self) -> *mut RawMemory {
        self.raw
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: registered in this context, and not ended before.
        unsafe { (self.context.functions().memory_unmap)(self.context.raw(), self.raw) };
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ucx::Memory")
    }
}
