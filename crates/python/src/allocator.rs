//! NumPy's own allocations in a pool: a handler as NEP 49 describes it.
//!
//! Each allocation from a size on is a region. Smaller ones, and those for which the lease has no room, are
//! the C library's. NumPy keeps the handler with each array that it allocated, so an array is freed by the
//! handler that made it, whenever that is.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use rampool::region::{PagedMemory, Region};

/// NumPy's `PyDataMem_Handler`, version 1 (numpy/ndarraytypes.h).
#[repr(C)]
struct Handler {
    name: [c_char; 127],
    version: u8,
    context: *const Allocations,
    malloc: extern "C" fn(*const Allocations, usize) -> *mut c_void,
    calloc: extern "C" fn(*const Allocations, usize, usize) -> *mut c_void,
    realloc: extern "C" fn(*const Allocations, *mut c_void, usize) -> *mut c_void,
    free: extern "C" fn(*const Allocations, *mut c_void, usize),
}

const CAPSULE: &CStr = c"mem_handler";
/// Where NumPy's table of functions has `PyDataMem_SetHandler`, since NumPy 1.22.
const SET_HANDLER: usize = 304;

struct Allocations {
    memory: PagedMemory,
    over: usize,
    process: u32,
    regions: Mutex<HashMap<usize, Region>>,
    bytes: AtomicU64,
    refused: AtomicU64,
}

impl Allocations {
    /// `None`: it is too small, or there is no room.
    fn region(&self, bytes: usize) -> Option<*mut c_void> {
        if bytes < self.over || std::process::id() != self.process {
            return None;
        }
        let Ok(region) = self.memory.alloc(bytes) else {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let start = region.as_ptr();
        self.bytes.fetch_add(region.len() as u64, Ordering::Relaxed);
        self.lock().insert(start.addr(), region);
        Some(start.cast())
    }

    /// How long the region at this address is.
    fn length(&self, start: *mut c_void) -> Option<usize> {
        self.lock().get(&start.addr()).map(Region::len)
    }

    fn free(&self, start: *mut c_void) {
        let region = self.lock().remove(&start.addr());
        match region {
            // A forked child has no pager to give it back to.
            Some(region) if std::process::id() != self.process => std::mem::forget(region),
            Some(region) => {
                self.bytes.fetch_sub(region.len() as u64, Ordering::Relaxed);
                drop(region);
            }
            // SAFETY: what is no region came from the C library.
            None => unsafe { libc::free(start) },
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Region>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// # Safety
/// As NumPy calls handlers: with their context, which lives as long as the handler.
unsafe fn of<'a>(context: *const Allocations) -> &'a Allocations {
    // SAFETY: the caller's promise.
    unsafe { &*context }
}

extern "C" fn malloc(context: *const Allocations, bytes: usize) -> *mut c_void {
    // SAFETY: NumPy calls it.
    let allocations = unsafe { of(context) };
    // SAFETY: no preconditions.
    allocations.region(bytes).unwrap_or_else(|| unsafe { libc::malloc(bytes.max(1)) })
}

extern "C" fn calloc(context: *const Allocations, count: usize, bytes: usize) -> *mut c_void {
    // SAFETY: NumPy calls it.
    let allocations = unsafe { of(context) };
    let region = count.checked_mul(bytes).and_then(|bytes| allocations.region(bytes));
    // SAFETY: no preconditions; a region is zero.
    region.unwrap_or_else(|| unsafe { libc::calloc(count.max(1), bytes.max(1)) })
}

extern "C" fn realloc(context: *const Allocations, start: *mut c_void, bytes: usize) -> *mut c_void {
    if start.is_null() {
        return malloc(context, bytes);
    }
    // SAFETY: NumPy calls it.
    let allocations = unsafe { of(context) };
    let length = allocations.length(start);
    if length.is_none() && bytes < allocations.over {
        // SAFETY: what is no region came from the C library.
        return unsafe { libc::realloc(start, bytes.max(1)) };
    }
    // SAFETY: as before.
    let has = length.unwrap_or_else(|| unsafe { libc::malloc_usable_size(start) });
    let new = malloc(context, bytes);
    if !new.is_null() {
        // SAFETY: both are as long as that, and apart.
        unsafe { std::ptr::copy_nonoverlapping(start.cast::<u8>(), new.cast::<u8>(), has.min(bytes)) };
        allocations.free(start);
    }
    new
}

extern "C" fn free(context: *const Allocations, start: *mut c_void, _: usize) {
    if !start.is_null() {
        // SAFETY: NumPy calls it.
        unsafe { of(context) }.free(start);
    }
}

/// Ends a handler with the last array that it made.
unsafe extern "C" fn end(capsule: *mut ffi::PyObject) {
    // SAFETY: it was made here, with this pointer and this name.
    unsafe {
        let handler = ffi::PyCapsule_GetPointer(capsule, CAPSULE.as_ptr()).cast::<Handler>();
        if !handler.is_null() {
            let handler = Box::from_raw(handler);
            let allocations = Arc::from_raw(handler.context);
            if std::process::id() != allocations.process {
                std::mem::forget(allocations);
            }
        }
    }
}

/// A handler for NumPy's allocations.
#[pyclass(frozen, module = "rampool._native")]
pub struct Allocator {
    capsule: Py<PyAny>,
    allocations: Arc<Allocations>,
}

impl Allocator {
    pub fn new(py: Python<'_>, memory: PagedMemory, over: usize) -> PyResult<Self> {
        let process = std::process::id();
        let (regions, bytes, refused) = (Mutex::default(), AtomicU64::new(0), AtomicU64::new(0));
        let allocations =
            Arc::new(Allocations { memory, over: over.max(1), process, regions, bytes, refused });
        let mut name = [0; 127];
        for (to, from) in name.iter_mut().zip(b"rampool") {
            *to = c_char::try_from(*from).unwrap_or_default();
        }
        let context = Arc::into_raw(Arc::clone(&allocations));
        let handler =
            Box::into_raw(Box::new(Handler { name, version: 1, context, malloc, calloc, realloc, free }));
        // SAFETY: the pointer is not null, and the name is static; `end` takes the box back.
        let capsule = unsafe {
            Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(handler.cast(), CAPSULE.as_ptr(), Some(end)))
        }?;
        Ok(Self { capsule: capsule.unbind(), allocations })
    }
}

/// Makes a handler the one of the current context; gives the one before.
fn set<'py>(api: &Bound<'py, PyAny>, handler: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: NumPy's capsule holds its table of functions, of which this one has had this place and
    // signature since 1.22.
    unsafe {
        let table = ffi::PyCapsule_GetPointer(api.as_ptr(), std::ptr::null()).cast::<*const c_void>();
        if table.is_null() {
            return Err(PyRuntimeError::new_err(
                "this NumPy has no table of functions where it is looked for",
            ));
        }
        let set: unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject =
            std::mem::transmute(*table.add(SET_HANDLER));
        Bound::from_owned_ptr_or_err(api.py(), set(handler.as_ptr()))
    }
}

#[pymethods]
impl Allocator {
    /// From here on NumPy allocates in the pool, in this context. Gives the handler before.
    fn enter<'py>(&self, api: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        set(api, self.capsule.bind(api.py()))
    }

    /// From here on NumPy allocates as before.
    fn leave(&self, api: &Bound<'_, PyAny>, before: &Bound<'_, PyAny>) -> PyResult<()> {
        set(api, before).map(drop)
    }

    /// Allocations that live, their bytes, and how many found no room.
    fn counts(&self) -> (usize, u64, u64) {
        let (bytes, refused) = (&self.allocations.bytes, &self.allocations.refused);
        (self.allocations.lock().len(), bytes.load(Ordering::Relaxed), refused.load(Ordering::Relaxed))
    }
}
