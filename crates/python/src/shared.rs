//! Memory that the processes of a parallel program have in common.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;

use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use rampool::shared::{
    self, AllocOptions, AtomicOp, Homes, JoinError, OnFailure, ProtocolKind, SharedConfig, SharedError,
};

use crate::errors::{Raise, own, raise};
use crate::process::aside;

impl Raise for JoinError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Config(_) | Self::Rank { .. } | Self::Engine(_) => PyValueError::new_err(text),
            Self::NoKey { .. } | Self::AnotherUser { .. } | Self::Handshake { .. } => own("NotAllowed", text),
            Self::Missing { .. } => own("Timeout", text),
            _ => own("Error", text),
        }
    }
}

impl Raise for SharedError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Operation { .. } | Self::LockNumber { .. } | Self::NotShared { .. } => {
                PyValueError::new_err(text)
            }
            Self::Finished { .. } => own("Closed", text),
            Self::Forked { .. } => own("ForkError", text),
            Self::Refused { .. } => own("NoRoom", text),
            _ => own("Error", text),
        }
    }
}

thread_local! {
    /// This thread is inside of a call: a signal handler must not begin another.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// What a signal handler raised while this thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Called while a thread waits.
fn has_signal() -> bool {
    let Err(error) = Python::attach(|py| py.check_signals()) else { return false };
    RAISED.with(|raised| raised.borrow_mut().replace(error));
    true
}

/// One rank of a run.
#[pyclass(frozen, module = "rampool._native")]
pub struct Shared {
    shared: shared::Shared,
}

impl Shared {
    /// Calls `f` without the interpreter. Signals are looked for while it waits; what their handler raises
    /// ends the run, since an operation of several ranks cannot be taken back.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&shared::Shared) -> Result<T, SharedError> + Send,
    ) -> PyResult<T> {
        if INSIDE.replace(true) {
            return Err(PyRuntimeError::new_err("a signal handler cannot use the rank that it interrupts"));
        }
        let ended = py.detach(|| {
            shared::look_while_waiting(Some(has_signal));
            let ended = f(&self.shared);
            shared::look_while_waiting(None);
            ended
        });
        INSIDE.set(false);
        match RAISED.with(|raised| raised.borrow_mut().take()) {
            Some(raised) => Err(raised),
            None => ended.map_err(raise),
        }
    }
}

#[pymethods]
impl Shared {
    /// Joins the run that the environment describes.
    #[staticmethod]
    fn join(py: Python<'_>) -> PyResult<Self> {
        let mut config = SharedConfig::from_env().map_err(|error| raise(JoinError::from(error)))?;
        // Exceptions say more than the end of the process.
        config.on_failure = OnFailure::ReturnError;
        Ok(Self { shared: aside(py, move || shared::Shared::join(config))?.map_err(raise)? })
    }

    #[getter]
    fn rank(&self) -> u16 {
        self.shared.rank()
    }

    #[getter]
    fn ranks(&self) -> u16 {
        self.shared.ranks()
    }

    /// Memory of so many bytes, all zero; each rank makes the same call.
    #[pyo3(signature = (nbytes, protocol, blocked, page_bytes))]
    fn alloc(
        &self,
        py: Python<'_>,
        nbytes: usize,
        protocol: Option<&str>,
        blocked: bool,
        page_bytes: Option<u32>,
    ) -> PyResult<SharedRegion> {
        let mut options = AllocOptions::new();
        if let Some(name) = protocol {
            let kind = ProtocolKind::from_name(name).ok_or_else(|| {
                PyValueError::new_err(format!("{name:?} is not sc, lrc, hlrc, aurc, ibec or auto"))
            })?;
            options = options.protocol(kind);
        }
        if blocked {
            options = options.homes(Homes::Blocked);
        }
        if let Some(bytes) = page_bytes {
            options = options.page_bytes(bytes);
        }
        let region = self.call(py, |shared| shared.alloc(nbytes, options))?;
        Ok(SharedRegion { address: region.address(), nbytes })
    }

    /// Frees memory; each rank makes the same call.
    fn free(&self, py: Python<'_>, address: usize) -> PyResult<()> {
        self.call(py, |shared| shared.free_alone(address))
    }

    /// Takes a lock, for itself or with other readers; whether it has it.
    fn lock(&self, py: Python<'_>, number: u64, readers: bool, wait: bool) -> PyResult<bool> {
        self.call(py, |shared| match (readers, wait) {
            (false, true) => shared.lock(number).map(|()| true),
            (false, false) => shared.try_lock(number),
            (true, true) => shared.lock_shared(number).map(|()| true),
            (true, false) => shared.try_lock_shared(number),
        })
    }

    fn unlock(&self, py: Python<'_>, number: u64) -> PyResult<()> {
        self.call(py, |shared| shared.unlock(number))
    }

    fn barrier(&self, py: Python<'_>, number: u32, keep: bool) -> PyResult<()> {
        self.call(py, |shared| if keep { shared.barrier_keep(number) } else { shared.barrier(number) })
    }

    fn wait(&self, py: Python<'_>, condition: u32, lock: u64) -> PyResult<()> {
        self.call(py, |shared| shared.wait(condition, lock))
    }

    fn signal(&self, py: Python<'_>, condition: u32, lock: u64, all: bool) -> PyResult<()> {
        self.call(
            py,
            |shared| {
                if all { shared.broadcast(condition, lock) } else { shared.signal(condition, lock) }
            },
        )
    }

    /// Adds to a word of 1, 2, 4 or 8 bytes, or to a double; the bits from before.
    fn fetch_add(&self, py: Python<'_>, address: usize, width: u8, double: bool, bits: u64) -> PyResult<u64> {
        let op = if double { AtomicOp::AddDouble(bits) } else { AtomicOp::Add(bits) };
        self.call(py, |shared| shared.atomic(address, width, op))
    }

    fn set_threads(&self, threads: u16) {
        self.shared.set_threads(threads);
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, shared::Shared::close)
    }

    fn abort(&self, py: Python<'_>, why: &str) {
        py.detach(|| self.shared.abort(why));
    }
}

/// Memory that all ranks have at one address, until the end of the run.
#[pyclass(frozen, module = "rampool._native")]
pub struct SharedRegion {
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    nbytes: usize,
}

#[pymethods]
impl SharedRegion {
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
        // SAFETY: `view` is the interpreter's; addresses of shared memory stay reserved as long as the
        // process lives.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
