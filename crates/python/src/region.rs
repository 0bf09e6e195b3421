//! Paged memory as a buffer, which NumPy arrays lie in.

use std::ffi::c_int;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use rampool::region::{Region as Paged, RegionAdvice};

use crate::errors::{own, raise};
use crate::process::Own;

/// Memory whose pages come and go. Freed with the last array that lies in it.
#[pyclass(frozen, module = "rampool._native")]
pub struct Region {
    region: Own<Paged>,
    address: usize,
    #[pyo3(get)]
    nbytes: usize,
}

impl Region {
    /// `bytes`: what was asked for; the region may be longer.
    pub fn new(region: Paged, bytes: usize) -> Self {
        let address = region.as_ptr().addr();
        assert!(bytes <= region.len());
        Self { region: Own::new(region), address, nbytes: bytes }
    }
}

#[pymethods]
impl Region {
    /// Copies the region at its servers; the text that another process needs to open the copy.
    fn hand_over(&self, py: Python<'_>) -> PyResult<String> {
        self.region.check()?;
        py.detach(|| self.region.lock().hand_over()).map(|handed| handed.to_string()).map_err(raise)
    }

    /// Says that a range of whole pages is not needed any more (`discard`), or is needed now.
    fn advise(&self, py: Python<'_>, offset: usize, bytes: usize, discard: bool) -> PyResult<()> {
        self.region.check()?;
        let advice = if discard { RegionAdvice::Discard } else { RegionAdvice::WillNeed };
        let done = py.detach(|| self.region.lock().advise(offset, bytes, advice));
        done.map_err(|error| own("Error", error.to_string()))
    }

    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    fn __len__(&self) -> usize {
        self.nbytes
    }

    /// # Safety
    /// As the interpreter calls it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view is given"));
        }
        let this = slf.get();
        let start = std::ptr::with_exposed_provenance_mut(this.address);
        let bytes = isize::try_from(this.nbytes).expect("no longer than the address space");
        // SAFETY: `view` is the interpreter's; the memory lives as long as this object, which the view keeps
        // alive.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
