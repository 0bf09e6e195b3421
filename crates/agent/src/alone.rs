//! Programs that must be single-threaded.
//!
//! The kernel lets a process enter some namespaces only while it has one thread. While nothing of the program
//! is managed, the agent can do without its thread for such a call: the thread ends before, and another one
//! starts after. Sandboxes also count their threads themselves, by the links of `/proc/self/task`, before
//! they fork or restrict themselves. The agent's threads are none of the program's there.

use std::ffi::{CStr, c_char, c_int};

use crate::next::Next;
use crate::{exclusion, watch};

fn set_errno(value: c_int) {
    // SAFETY: the calling thread's own.
    unsafe { *libc::__errno_location() = value }
}

/// Makes a system call that may want a process of one thread.
fn alone(call: impl Fn() -> c_int) -> c_int {
    let result = call();
    let errno = rampool_kernel::last_errno();
    if result == 0 || !matches!(errno, libc::EINVAL | libc::EUSERS) {
        return result;
    }
    let (result, errno) =
        watch::without_thread(|| (call(), rampool_kernel::last_errno())).unwrap_or((result, errno));
    set_errno(errno);
    result
}

/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn unshare(flags: c_int) -> c_int {
    // SAFETY: a system call without pointers.
    alone(|| unsafe { c_int::try_from(libc::syscall(libc::SYS_unshare, flags)).unwrap_or(-1) })
}

/// As the C library's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn setns(fd: c_int, kind: c_int) -> c_int {
    // SAFETY: a system call without pointers.
    alone(|| unsafe { c_int::try_from(libc::syscall(libc::SYS_setns, fd, kind)).unwrap_or(-1) })
}

/// Hides the agent's threads from the link count of the directory of this process's threads, if the program
/// has asked for that.
///
/// # Safety
/// `path` is a terminated string, and the kernel has just filled `found`.
unsafe fn take_ours_off(path: *const c_char, found: *mut libc::stat) {
    // SAFETY: the caller's promise.
    let (path, found) = unsafe { (CStr::from_ptr(path).to_bytes(), &mut *found) };
    let ours = libc::nlink_t::from(rampool_kernel::thread::ours());
    if !path.strip_suffix(b"/").unwrap_or(path).ends_with(b"task") || ours == 0 || !exclusion::has_agent() {
        return;
    }
    // SAFETY: plain data, filled by the call; a terminated name.
    let (rc, own) = unsafe {
        let mut own = std::mem::zeroed::<libc::stat>();
        (
            libc::syscall(libc::SYS_newfstatat, libc::AT_FDCWD, c"/proc/self/task".as_ptr(), &raw mut own, 0),
            own,
        )
    };
    if rc == 0 && (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino) {
        // The directory itself twice, and at least one thread of the program; one of ours may not have begun
        // yet.
        found.st_nlink = found.st_nlink.saturating_sub(ours).max(3);
    }
}

static FSTATAT: Next = Next::new(c"fstatat");
static FSTATAT64: Next = Next::new(c"fstatat64");
static OLD_FSTATAT: Next = Next::new(c"__fxstatat");
static OLD_FSTATAT64: Next = Next::new(c"__fxstatat64");

/// At start: looking a name up reads what the dynamic linker keeps on the program's heap.
pub fn prepare() {
    for next in [&FSTATAT, &FSTATAT64, &OLD_FSTATAT, &OLD_FSTATAT64] {
        next.find();
    }
}

macro_rules! stats {
    ($($name:ident, $next:ident, ($($version:ident)?);)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($version: c_int,)? directory: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
            type Function = unsafe extern "C" fn($(version!($version),)? c_int, *const c_char, *mut libc::stat, c_int) -> c_int;
            let next = $next.find();
            if next == 0 {
                set_errno(libc::ENOSYS);
                return -1;
            }
            // SAFETY: the C library's function of this name has this type; the caller's own arguments.
            unsafe {
                let next = std::mem::transmute::<usize, Function>(next);
                let result = next($($version,)? directory, path, to, flags);
                if result == 0 {
                    take_ours_off(path, to);
                }
                result
            }
        }
    )*};
}
macro_rules! version {
    ($arg:ident) => {
        c_int
    };
}

stats! {
    fstatat, FSTATAT, ();
    fstatat64, FSTATAT64, ();
    // Programs built with the GNU C library before 2.33 call these.
    __fxstatat, OLD_FSTATAT, (version);
    __fxstatat64, OLD_FSTATAT64, (version);
}
