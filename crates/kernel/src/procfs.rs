//! The kernel's files about this process, also for a thread whose program has changed its root directory
//! meanwhile.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::atomic::{AtomicU64, Ordering};

const DIRECTORY: &str = "/proc/thread-self/";
/// The thread that has kept the directory, and its descriptor, which means nothing to threads with another
/// table of descriptors. 0: none.
static KEPT: AtomicU64 = AtomicU64::new(0);

/// From now on the calling thread finds these files wherever the root directory is. Once in a process.
///
/// # Errors
/// When /proc is not mounted.
pub fn keep_open() -> io::Result<()> {
    let directory = File::open(DIRECTORY)?;
    let fd = u64::try_from(directory.into_raw_fd()).expect("an open descriptor");
    KEPT.store(this_thread() << 32 | fd, Ordering::Release);
    Ok(())
}

/// Opens `/proc/thread-self/<name>`. No allocation.
///
/// # Errors
/// As `open(2)`.
pub fn open(name: &str) -> io::Result<File> {
    let mut path = [0u8; 64];
    let length = DIRECTORY.len() + name.len();
    assert!(length < path.len(), "a name of one of the kernel's files");
    path[..DIRECTORY.len()].copy_from_slice(DIRECTORY.as_bytes());
    path[DIRECTORY.len()..length].copy_from_slice(name.as_bytes());
    open_at(libc::AT_FDCWD, &path).or_else(|error| {
        let kept = KEPT.load(Ordering::Acquire);
        match i32::try_from(kept & 0xffff_ffff) {
            Ok(fd) if kept >> 32 == this_thread() => open_at(fd, &path[DIRECTORY.len()..]),
            _ => Err(error),
        }
    })
}

/// `path` ends with a zero.
fn open_at(directory: i32, path: &[u8]) -> io::Result<File> {
    // SAFETY: a terminated path that lives across the call.
    let fd = unsafe { libc::openat(directory, path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor with no other owner.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn this_thread() -> u64 {
    // SAFETY: no preconditions.
    u64::try_from(unsafe { libc::gettid() }).expect("a thread's number is positive")
}
