//! From keys to bytes in the pool.

use std::sync::{Mutex, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rampool::values::{self, StoreError};

use crate::bytes::Bytes;
use crate::errors::{Raise, own, raise};
use crate::process::{Own, wait};

impl Raise for StoreError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Direct(error) => error.raise(),
            _ => pyo3::exceptions::PyValueError::new_err(text),
        }
    }
}

/// A store, with connections of its own.
#[pyclass(frozen, module = "rampool._native")]
pub struct Store {
    store: Own<values::Store>,
    closed: Mutex<bool>,
}

impl Store {
    pub fn new(store: values::Store) -> Self {
        Self { store: Own::new(store), closed: Mutex::new(false) }
    }

    fn check(&self) -> PyResult<()> {
        self.store.check()?;
        if *self.closed.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(own("Closed", "the store is closed: call pool.store again".to_owned()));
        }
        Ok(())
    }
}

#[pymethods]
impl Store {
    /// Makes the parts, one after the other, the value of a key. They must not change meanwhile.
    fn put(&self, py: Python<'_>, key: &[u8], parts: Vec<PyBuffer<u8>>) -> PyResult<()> {
        self.check()?;
        let at: Vec<(usize, usize)> =
            parts.iter().map(|part| (part.buf_ptr().expose_provenance(), part.len_bytes())).collect();
        let put = || {
            let at: Vec<_> =
                at.iter().map(|(start, len)| (std::ptr::with_exposed_provenance(*start), *len)).collect();
            // SAFETY: each is contiguous (the caller casts it), and its buffer is held until the end of this
            // call. That no thread writes there meanwhile is what the method asks of its caller.
            unsafe { self.store.lock().put_at(key, &at) }
        };
        py.detach(put).map_err(raise)
    }

    fn get(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<Bytes>> {
        self.check()?;
        let Some(pending) = py.detach(|| self.store.lock().start_get(key)).map_err(raise)? else {
            return Ok(None);
        };
        wait(py, |soon| self.store.lock().wait_until(&pending, soon).then_some(()))?;
        py.detach(|| self.store.lock().wait(pending)).map(|bytes| Some(Bytes::new(bytes))).map_err(raise)
    }

    fn remove(&self, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        self.check()?;
        Ok(py.detach(|| self.store.lock().remove(key)))
    }

    fn value_bytes(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<u64>> {
        self.check()?;
        Ok(py.detach(|| self.store.lock().value_bytes(key)))
    }

    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        self.check()?;
        let keys: Vec<Vec<u8>> = py.detach(|| self.store.lock().keys().map(<[u8]>::to_vec).collect());
        Ok(keys.iter().map(|key| PyBytes::new(py, key)).collect())
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.check()?;
        Ok(py.detach(|| self.store.lock().bytes()))
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.check()?;
        Ok(py.detach(|| self.store.lock().len()))
    }

    fn close(&self, py: Python<'_>) {
        let was = std::mem::replace(&mut *self.closed.lock().unwrap_or_else(PoisonError::into_inner), true);
        if !was && self.store.check().is_ok() {
            py.detach(|| self.store.lock().close());
        }
    }
}
