//! The functions that this library replaces: the next ones of the same name, all found when it is loaded.
//!
//! A look-up reads memory of the dynamic linker on the program's heap. The agent's thread calls these
//! functions too, and it cannot wait for memory that it serves.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// One function: its address once it is found, and its name.
#[repr(C)]
pub struct Entry {
    pub slot: AtomicPtr<c_void>,
    pub name: *const c_char,
}
// SAFETY: the name is a constant.
unsafe impl Sync for Entry {}

unsafe extern "C" {
    #[link_name = "__start_rampool_real"]
    static FIRST: [Entry; 0];
    #[link_name = "__stop_rampool_real"]
    static END: [Entry; 0];
}

/// Finds them all.
pub fn find_all() {
    let (mut entry, end) = ((&raw const FIRST).cast::<Entry>(), (&raw const END).cast::<Entry>());
    while entry < end {
        // SAFETY: the linker puts the entries of the section behind one another between these two symbols.
        unsafe {
            let name = CStr::from_ptr((*entry).name);
            let found = libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
            if !found.is_null() {
                (*entry).slot.store(found, Ordering::Release);
            }
            entry = entry.add(1);
        }
    }
}

/// The next function of an entry, looked up now if that was not done yet. If the C library has none, the
/// program could not have called it.
pub fn next(entry: &Entry) -> *mut c_void {
    let known = entry.slot.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    // SAFETY: a terminated name.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, entry.name) };
    if found.is_null() {
        // SAFETY: ends the process; nothing sensible can be returned for a function that does not exist.
        unsafe { libc::abort() };
    }
    entry.slot.store(found, Ordering::Release);
    found
}

/// Calls the next function of a name, of the type given.
macro_rules! real {
    ($name:literal, fn($($arg:ty),* $(,)?) -> $ret:ty) => {{
        #[used]
        // SAFETY: the section holds nothing but entries, which `find_all` reads.
        #[unsafe(link_section = "rampool_real")]
        static ENTRY: $crate::real::Entry =
            $crate::real::Entry { slot: std::sync::atomic::AtomicPtr::new(std::ptr::null_mut()), name: $name.as_ptr() };
        let found = $crate::real::next(&ENTRY);
        // SAFETY: the C library's function of this name has this type.
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($arg),*) -> $ret>(found) }
    }};
}
pub(crate) use real;
