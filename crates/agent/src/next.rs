//! The C library's functions behind those of the agent's that have their names.

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};

pub struct Next {
    name: &'static CStr,
    /// 0: not looked for yet.
    found: AtomicUsize,
}

impl Next {
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicUsize::new(0) }
    }

    /// Its address; 0 if the program could not have called it.
    pub fn find(&self) -> usize {
        let mut found = self.found.load(Ordering::Relaxed);
        if found == 0 {
            // SAFETY: a terminated name.
            found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) }.expose_provenance();
            self.found.store(found, Ordering::Relaxed);
        }
        found
    }
}
