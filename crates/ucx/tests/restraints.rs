//! What UCX must leave alone in a process that loads it. One test in a process of its own, since the state
//! before loading must be known.

use std::ffi::{CStr, c_void};
use std::time::{Duration, Instant};

const FUNCTIONS: [&CStr; 5] = [c"mmap", c"munmap", c"mremap", c"madvise", c"brk"];
const SIGNALS: [i32; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT, libc::SIGTERM, libc::SIGINT];

/// The first bytes of the functions that hooks are written over, and the signal handlers.
fn fingerprint() -> (Vec<[u8; 32]>, Vec<usize>) {
    let code = FUNCTIONS.map(|name| {
        // SAFETY: a function of the C library's, of more than so many bytes.
        unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()).cast::<[u8; 32]>().read_unaligned() }
    });
    let caught = SIGNALS.map(|signal| {
        // SAFETY: asks only; zeroes are a value of the structure.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut action);
            action.sa_sigaction
        }
    });
    (code.to_vec(), caught.to_vec())
}

fn is_loaded() -> bool {
    // SAFETY: looks only; nothing is loaded.
    let handle: *mut c_void =
        unsafe { libc::dlopen(c"libucp.so.0".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    !handle.is_null()
}

#[test]
fn the_process_stays_as_it_was_but_for_what_it_asked_for() {
    let (before, environment) = (fingerprint(), std::env::vars_os().collect::<Vec<_>>());
    assert!(!is_loaded(), "it is loaded before its first use");
    let version = rampool_ucx::version().expect("the tests need UCX: scripts/setup.sh test installs it");
    assert!(version.major == 1 && is_loaded(), "{version}");
    // As in use: with everything that it finds on this machine.
    let context = rampool_ucx::Context::process().unwrap();
    assert!(context.transports().iter().any(|name| name.starts_with("tcp/")), "{:?}", context.transports());
    let [mut near, mut far] = [(), ()].map(|()| rampool_ucx::Channel::open(&context, 4).unwrap());
    // SAFETY: made by `address`.
    unsafe {
        let mode = near.connect(&far.address().unwrap(), None).unwrap();
        assert_eq!(far.connect(&near.address().unwrap(), Some(mode)).unwrap(), mode);
    }
    let bytes = vec![5u8; 3000];
    assert!(
        near.send(7, |to| {
            // SAFETY: there is room for a message.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, 3000) };
            3000
        })
        .unwrap()
    );
    let deadline = Instant::now() + Duration::from_secs(30);
    while !far.has_bytes() {
        assert!(Instant::now() < deadline, "nothing comes");
        near.progress();
        far.progress();
    }
    assert_eq!(far.number(), Some(7));
    let mut came = [0u8; 3000];
    // SAFETY: room for as many bytes as are taken.
    let took =
        far.take(3000, |from, len| unsafe { std::ptr::copy_nonoverlapping(from, came.as_mut_ptr(), len) });
    assert!(took == Some((3000, true)) && came == [5; 3000]);
    assert_eq!(fingerprint(), before, "functions were rewritten, or signals are caught");
    assert_eq!(std::env::vars_os().collect::<Vec<_>>(), environment);
}
