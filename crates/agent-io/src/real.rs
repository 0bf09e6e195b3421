//! The functions that this library stands before: the next ones of the same name, found when first called.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Finds the next function of this name and keeps it in `slot`. Null only if the C library has none, and then the program could not have called it.
pub fn next(slot: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = slot.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    // SAFETY: a terminated name.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if found.is_null() {
        // SAFETY: ends the process; nothing sensible can be returned for a function that does not exist.
        unsafe { libc::abort() };
    }
    slot.store(found, Ordering::Release);
    found
}

/// Calls the next function of a name, of the type given.
macro_rules! real {
    ($name:literal, fn($($arg:ty),* $(,)?) -> $ret:ty) => {{
        static SLOT: std::sync::atomic::AtomicPtr<std::ffi::c_void> = std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
        let found = $crate::real::next(&SLOT, $name);
        // SAFETY: the C library's function of this name has this type.
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($arg),*) -> $ret>(found) }
    }};
}
pub(crate) use real;
