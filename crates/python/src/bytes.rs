//! Bytes that came from servers, which arrays lie in without another copy.

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Writable memory that nothing else uses.
#[pyclass(frozen, module = "rampool._native")]
pub struct Bytes {
    bytes: Mutex<Vec<u8>>,
}

impl Bytes {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: Mutex::new(bytes) }
    }
}

#[pymethods]
impl Bytes {
    fn __len__(&self) -> usize {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// # Safety
    /// As the interpreter calls it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view is given"));
        }
        let (start, bytes) = {
            let mut bytes = slf.get().bytes.lock().unwrap_or_else(PoisonError::into_inner);
            (bytes.as_mut_ptr(), isize::try_from(bytes.len()).expect("no longer than the address space"))
        };
        // SAFETY: `view` is the interpreter's; the vector is never touched again before this object ends,
        // which the view keeps alive.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast(), bytes, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
