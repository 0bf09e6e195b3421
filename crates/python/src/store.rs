//! From keys to bytes in the pool.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rampool::values::{self, PendingPut, PendingValue, StoreError};

use crate::bytes::Bytes;
use crate::errors::{Raise, own, raise};
use crate::process::{Own, aside, aside_or, close_at_drop, wait};

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
    /// Puts that a signal interrupted, with the memory that they still read. Dropped after the store, which
    /// then reads nothing.
    interrupted: Mutex<Vec<(PendingPut, Vec<PyBuffer<u8>>)>>,
}

impl Store {
    pub fn new(store: values::Store) -> Self {
        Self { store: Own::new(store), closed: Mutex::new(false), interrupted: Mutex::default() }
    }

    fn check(&self) -> PyResult<()> {
        self.store.check()?;
        if *self.closed.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(own("Closed", "the store is closed: call pool.store again".to_owned()));
        }
        Ok(())
    }

    /// Gives empty regions back.
    fn tidy(slf: &Bound<'_, Self>) -> PyResult<()> {
        let this = slf.get();
        if !slf.py().detach(|| this.store.lock().is_untidy()) {
            return Ok(());
        }
        let store = slf.clone().unbind();
        aside(slf.py(), move || store.get().store.lock().tidy())
    }

    /// Gives back what interrupted puts took, as far as they have come to their end.
    fn clear_interrupted(&self) -> Vec<Vec<PyBuffer<u8>>> {
        let mut interrupted = self.interrupted.lock().unwrap_or_else(PoisonError::into_inner);
        if interrupted.is_empty() {
            return Vec::new();
        }
        let mut store = self.store.lock();
        let (ended, others): (Vec<_>, Vec<_>) =
            interrupted.drain(..).partition(|(put, _)| store.put_until(put, Instant::now()));
        *interrupted = others;
        let ended = ended.into_iter().map(|(put, parts)| {
            store.drop_put(put);
            parts
        });
        ended.collect()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        close_at_drop(|py| self.close(py));
    }
}

#[pymethods]
impl Store {
    /// Makes the parts, one after the other, the value of a key. They must not change meanwhile.
    fn put(slf: Bound<'_, Self>, key: &[u8], parts: Vec<PyBuffer<u8>>) -> PyResult<()> {
        let (this, py) = (slf.get(), slf.py());
        this.check()?;
        let at: Vec<(usize, usize)> =
            parts.iter().map(|part| (part.buf_ptr().expose_provenance(), part.len_bytes())).collect();
        let bytes = at.iter().map(|(_, len)| *len as u64).sum();
        drop(py.detach(|| this.clear_interrupted()));
        // Where a region must be made for it, that may take long.
        let room = if py.detach(|| this.store.lock().has_room(bytes)) {
            None
        } else {
            let (store, undo) = (slf.clone().unbind(), slf.clone().unbind());
            let take = move || store.get().store.lock().take_room(bytes);
            let give_back = move |room| {
                if let Ok(room) = room {
                    undo.get().store.lock().drop_room(room);
                }
            };
            Some(aside_or(py, take, give_back)?.map_err(raise)?)
        };
        let put = py.detach(|| {
            let at: Vec<_> =
                at.iter().map(|(start, len)| (std::ptr::with_exposed_provenance(*start), *len)).collect();
            let mut store = this.store.lock();
            let room = room.map_or_else(|| store.take_room(bytes), Ok)?;
            // SAFETY: each is contiguous (the caller casts it), and its buffer is held until the put has come
            // to its end. That no thread writes there meanwhile is what the method asks of its caller; one
            // that is interrupted never becomes a value.
            unsafe { store.start_put_in(room, key, &at) }
        });
        let put = put.map_err(raise)?;
        if let Err(signal) = wait(py, |soon| this.store.lock().put_until(&put, soon).then_some(())) {
            this.interrupted.lock().unwrap_or_else(PoisonError::into_inner).push((put, parts));
            return Err(signal);
        }
        let finished = py.detach(|| this.store.lock().finish_put(put)).map_err(raise);
        Self::tidy(&slf)?;
        finished
    }

    /// Begins to read the value of a key, as it is now.
    fn start_get(slf: Bound<'_, Self>, key: &[u8]) -> PyResult<Option<Value>> {
        let this = slf.get();
        this.check()?;
        let pending = slf.py().detach(|| this.store.lock().start_get(key)).map_err(raise)?;
        Ok(pending.map(|pending| Value { store: slf.unbind(), pending: Mutex::new(Some(pending)) }))
    }

    fn get(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<Bytes>> {
        self.check()?;
        let Some(pending) = py.detach(|| self.store.lock().start_get(key)).map_err(raise)? else {
            return Ok(None);
        };
        wait(py, |soon| self.store.lock().wait_until(&pending, soon).then_some(()))?;
        py.detach(|| self.store.lock().wait(pending)).map(|bytes| Some(Bytes::new(bytes))).map_err(raise)
    }

    fn remove(slf: Bound<'_, Self>, key: &[u8]) -> PyResult<bool> {
        let this = slf.get();
        this.check()?;
        let removed = slf.py().detach(|| this.store.lock().start_remove(key));
        Self::tidy(&slf)?;
        Ok(removed)
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

/// A value on its way here.
#[pyclass(frozen, module = "rampool._native")]
pub struct Value {
    store: Py<Store>,
    pending: Mutex<Option<PendingValue>>,
}

#[pymethods]
impl Value {
    /// Waits for it, and gives its bytes, once.
    fn take(&self, py: Python<'_>) -> PyResult<Bytes> {
        let store = self.store.get();
        store.check()?;
        let lock = || self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        wait(py, |soon| {
            let pending = lock();
            let ended = pending.as_ref().is_none_or(|pending| store.store.lock().wait_until(pending, soon));
            ended.then_some(())
        })?;
        let pending = lock().take();
        let pending = pending.ok_or_else(|| PyRuntimeError::new_err("its bytes were taken already"))?;
        py.detach(|| store.store.lock().wait(pending)).map(Bytes::new).map_err(raise)
    }
}
