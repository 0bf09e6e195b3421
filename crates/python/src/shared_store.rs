//! From keys to bytes in the pool, for all members of a lease.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rampool::direct::Direct;
use rampool::values::{self, SharedStoreError};

use crate::bytes::Bytes;
use crate::errors::{Raise, own, raise};
use crate::process::{Own, aside, close_at_drop};

impl Raise for SharedStoreError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Direct(error) => error.raise(),
            Self::IndexFull { .. } | Self::NoExtents { .. } => own("NoRoom", text),
            Self::Contended { .. } => own("Error", text),
            _ => PyValueError::new_err(text),
        }
    }
}

/// For how long others are not heard of until their room is taken over.
fn stale(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| PyValueError::new_err(format!("stale: {error}")))
}

/// A store of several processes, with connections of its own.
#[pyclass(frozen, module = "rampool._native")]
pub struct SharedStore {
    store: Own<(Direct, values::SharedStore)>,
    closed: Mutex<bool>,
}

impl SharedStore {
    /// Opens the store; blocks until the servers have answered.
    pub fn open(mut direct: Direct, name: &str, keys: Option<u64>, seconds: f64) -> PyResult<Self> {
        let opened = stale(seconds)
            .and_then(|stale| values::SharedStore::open(&mut direct, name, keys, stale).map_err(raise));
        match opened {
            Ok(store) => Ok(Self { store: Own::new((direct, store)), closed: Mutex::new(false) }),
            Err(error) => {
                direct.close();
                Err(error)
            }
        }
    }

    /// Calls `f` without the interpreter, and looks for signals meanwhile.
    fn call<T: Send + 'static>(
        slf: &Bound<'_, Self>,
        f: impl FnOnce(&mut values::SharedStore, &mut Direct) -> Result<T, SharedStoreError> + Send + 'static,
    ) -> PyResult<T> {
        let this = slf.get();
        this.store.check()?;
        if *this.closed.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(own("Closed", "the store is closed: call pool.shared_store again".to_owned()));
        }
        let this = slf.clone().unbind();
        let called = aside(slf.py(), move || {
            let (direct, store) = &mut *this.get().store.lock();
            f(store, direct)
        })?;
        called.map_err(raise)
    }
}

impl Drop for SharedStore {
    fn drop(&mut self) {
        close_at_drop(|py| self.close(py));
    }
}

#[pymethods]
impl SharedStore {
    /// Makes the parts, one after the other, the value of a key.
    fn put(slf: Bound<'_, Self>, key: Vec<u8>, parts: Vec<PyBuffer<u8>>) -> PyResult<()> {
        Self::call(&slf, move |store, direct| {
            let at: Vec<_> =
                parts.iter().map(|part| (part.buf_ptr().cast_const().cast(), part.len_bytes())).collect();
            // SAFETY: each is contiguous (the caller casts it), and its buffer is held until the end of this
            // call, also when it is interrupted.
            unsafe { store.put_at(direct, &key, &at) }
        })
    }

    fn get(slf: Bound<'_, Self>, key: Vec<u8>) -> PyResult<Option<Bytes>> {
        Ok(Self::call(&slf, move |store, direct| store.get(direct, &key))?.map(Bytes::new))
    }

    fn contains(slf: Bound<'_, Self>, key: Vec<u8>) -> PyResult<bool> {
        Self::call(&slf, move |store, direct| store.contains(direct, &key))
    }

    fn remove(slf: Bound<'_, Self>, key: Vec<u8>) -> PyResult<bool> {
        Self::call(&slf, move |store, direct| store.remove(direct, &key))
    }

    fn keys<'py>(slf: Bound<'py, Self>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let keys = Self::call(&slf, |store, direct| store.keys(direct))?;
        Ok(keys.iter().map(|key| PyBytes::new(slf.py(), key)).collect())
    }

    fn count(slf: Bound<'_, Self>) -> PyResult<u64> {
        Self::call(&slf, |store, direct| store.len(direct))
    }

    fn adopt(slf: Bound<'_, Self>) -> PyResult<u64> {
        Self::call(&slf, |store, direct| store.adopt(direct))
    }

    fn close(&self, py: Python<'_>) {
        let was = std::mem::replace(&mut *self.closed.lock().unwrap_or_else(PoisonError::into_inner), true);
        if !was && self.store.check().is_ok() {
            py.detach(|| self.store.lock().0.close());
        }
    }
}
