//! Guards (`MADV_GUARD_INSTALL`) take pages away, and the kernel reports it to no userfaultfd.
//!
//! The pager would take such a page for lost, and end the program. So what is to be guarded is given up first:
//! the kernel reports that, and the pages read as zeroes once the guard is gone, as without rampool. A program
//! that makes the system call itself is not helped. In the lower modes `librampool_agent_io.so` refuses guards.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use rampool_kernel::probe::FaultMode;

use crate::next::Next;

/// Linux 6.13.
const MADV_GUARD_INSTALL: c_int = 102;

/// The kernel reports to the pager what is given up.
static REPORTED: AtomicBool = AtomicBool::new(false);
static MADVISE: Next = Next::new(c"madvise");

/// At start: looking a name up reads what the dynamic linker keeps on the program's heap.
pub fn prepare(fault_mode: FaultMode) {
    MADVISE.find();
    REPORTED.store(fault_mode == FaultMode::Full, Ordering::Relaxed);
}

/// As the C library's function of this name.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(start: *mut c_void, bytes: usize, advice: c_int) -> c_int {
    type Function = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;
    // SAFETY: the C library's function of this name has this type; it calls the program's own `madvise`.
    let next = unsafe { std::mem::transmute::<usize, Function>(MADVISE.find()) };
    // SAFETY: the caller's own arguments. The contents go with the guard anyhow; a kernel without guards, which
    // would keep them, says so where there is nothing to guard. Between the two calls zeroes may be put there
    // ahead of use: the third reports that they are gone, too. It leaves the guard as it is.
    unsafe {
        let guards = advice == MADV_GUARD_INSTALL && REPORTED.load(Ordering::Relaxed);
        if !guards || next(start, 0, advice) != 0 || next(start, bytes, libc::MADV_DONTNEED) != 0 {
            return next(start, bytes, advice);
        }
        let result = next(start, bytes, advice);
        if result == 0 {
            next(start, bytes, libc::MADV_DONTNEED);
        }
        result
    }
}
