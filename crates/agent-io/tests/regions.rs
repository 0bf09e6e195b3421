//! A program that pages memory of its own, with this library loaded: system calls are given absent pages, on
//! every fault mode below the full one.
//!
//! Each test runs itself again with the library before the C library; the assertions about the calls are in
//! that process.

#[path = "../../rampool/tests/words/mod.rs"]
mod words;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use rampool_kernel::probe::{Capabilities, NEEDED};
use rampool_pager::backing::memory::MemoryBacking;
use rampool_pager::fault::FaultModeChoice;
use rampool_pager::pager::Waiting;
use rampool_pager::region::{PagedConfig, PagedMemory, Region};
use rampool_testing::skip;
use words::{mix, word};

const MIB: usize = 1 << 20;
/// Far above what a test takes.
const WATCHDOG_S: u32 = 120;
/// Set in the process that has the library.
const LOADED: &str = "RAMPOOL_TEST_LOADED";

macro_rules! on_every_lower_mode {
    ($($scenario:ident),* $(,)?) => {
        in_mode!(user_mode, FaultModeChoice::UserMode, false, $($scenario),*);
        in_mode!(user_mode_by_copy, FaultModeChoice::UserMode, true, $($scenario),*);
        in_mode!(in_thread, FaultModeChoice::InThread, false, $($scenario),*);
        in_mode!(segv, FaultModeChoice::Segv, false, $($scenario),*);
    };
}

macro_rules! in_mode {
    ($name:ident, $fault_mode:expr, $copy:expr, $($scenario:ident),*) => {
        mod $name {
            use super::*;
            $(#[test]
            fn $scenario() {
                if allowed($fault_mode) && with_the_library() {
                    super::$scenario($fault_mode, $copy);
                }
            })*
        }
    };
}

on_every_lower_mode!(
    regions_go_through_files_whole,
    what_threads_exchange_while_pages_leave_is_right,
    a_message_that_is_waited_for_finds_the_pages_that_tell_of_it,
    a_call_with_more_than_local_memory_ends,
    bad_addresses_are_still_errors,
    blocked_signals_and_own_handlers_are_no_harm,
);

/// A fault mode is skipped only if the kernel itself reports that it lacks it, or does not allow it to this
/// user.
fn allowed(fault_mode: FaultModeChoice) -> bool {
    let found = Capabilities::probe();
    let answer = match fault_mode {
        FaultModeChoice::Segv => found.segv.as_ref().map(|()| true).map_err(ToString::to_string),
        _ => found.user_mode.as_ref().map(|f| f.has(NEEDED)).map_err(ToString::to_string),
    };
    if answer != Ok(true) {
        skip("uffd-user", &format!("the kernel does not allow {fault_mode:?} here: {answer:?}"));
    }
    answer == Ok(true)
}

/// The library: next to the binary that `RAMPOOL_BIN` names, as `make test` does after building everything.
/// Otherwise it is built here, because tests of a library that Rust programs cannot link do not build it.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let built = match std::env::var_os("RAMPOOL_BIN") {
            Some(binary) => here.join("../..").join(binary).parent().unwrap().to_path_buf(),
            None => {
                let profile =
                    std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_path_buf();
                let mut build = Command::new(env!("CARGO"));
                build
                    .args([
                        "build",
                        "--quiet",
                        "--offline",
                        "--package",
                        env!("CARGO_PKG_NAME"),
                        "--target-dir",
                    ])
                    .arg(profile.parent().unwrap());
                if profile.ends_with("release") {
                    build.arg("--release");
                }
                assert!(build.current_dir(here).status().unwrap().success());
                profile
            }
        };
        let library = built.join("librampool_agent_io.so");
        assert!(library.exists(), "no {}", library.display());
        library
    })
}

/// True in the process that has the library. Otherwise runs this test there, and waits for it.
fn with_the_library() -> bool {
    if std::env::var_os(LOADED).is_some() {
        // One thread that gives up leaves others waiting for it.
        // SAFETY: no preconditions; SIGALRM has no handler and ends the process.
        unsafe { libc::alarm(WATCHDOG_S) };
        return true;
    }
    let this = std::env::current_exe().unwrap();
    let test = std::thread::current().name().expect("tests have names").to_owned();
    let output = Command::new(&this)
        .args(["--exact", &test, "--nocapture"])
        .env("LD_PRELOAD", library())
        .env(LOADED, "1")
        .output()
        .unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{test}: {}: {said}", output.status);
    false
}

fn memory(local: usize, fault_mode: FaultModeChoice, evict_by_copy: bool) -> PagedMemory {
    let mut backing = MemoryBacking::default();
    let region = backing.create_region();
    let config = PagedConfig {
        local_bytes: local as u64,
        // Pages read ahead would be resident before the call that is to meet them.
        prefetch_bytes: 0,
        waiting: Waiting { follow_faults: false, ..Waiting::default() },
        fault_mode,
        evict_by_copy,
        ..PagedConfig::default()
    };
    let memory = PagedMemory::start(&config, backing, region).unwrap();
    assert!(memory.serves_system_calls());
    memory
}

fn fill(region: &Region, seed: u64) {
    for index in 0..region.len() / 8 {
        word(region, index).store(mix(seed + index as u64), Ordering::Relaxed);
    }
}

fn verify(region: &Region, seed: u64) {
    for index in 0..region.len() / 8 {
        assert_eq!(word(region, index).load(Ordering::Relaxed), mix(seed + index as u64), "word {index}");
    }
}

/// The region's bytes as buffers of system calls.
fn bytes(region: &Region, offset: usize, count: usize) -> &[u8] {
    assert!(offset + count <= region.len());
    // SAFETY: inside the region; nothing writes these bytes while the slice is used.
    unsafe { std::slice::from_raw_parts(region.as_ptr().add(offset), count) }
}

#[allow(clippy::mut_from_ref)]
fn bytes_mut(region: &Region, offset: usize, count: usize) -> &mut [u8] {
    assert!(offset + count <= region.len());
    // SAFETY: inside the region; nothing else uses these bytes while the slice is used.
    unsafe { std::slice::from_raw_parts_mut(region.as_ptr().add(offset), count) }
}

/// Only a quarter of what is written is resident, and a quarter of where it is read into.
fn regions_go_through_files_whole(fault_mode: FaultModeChoice, by_copy: bool) {
    let memory = memory(4 * MIB, fault_mode, by_copy);
    let (from, to) = (memory.alloc(16 * MIB).unwrap(), memory.alloc(16 * MIB).unwrap());
    fill(&from, 1);
    let mut file = tempfile::tempfile().unwrap();
    let before = memory.stats().faults;
    // One call, whose pages are nearly all absent.
    assert_eq!(file.write(bytes(&from, 0, from.len())).unwrap(), from.len());
    let faults = memory.stats().faults - before;
    assert!(faults > 2000, "only {faults} pages were absent");
    file.rewind().unwrap();
    assert_eq!(file.read(bytes_mut(&to, 0, to.len())).unwrap(), to.len());
    verify(&to, 1);
    // Page by page, from pages that left long ago; into pages that must be made writable first.
    for at in (0..from.len()).step_by(64 << 10) {
        assert_eq!(file.write_at(bytes(&from, at, 4096), at as u64).unwrap(), 4096);
        assert_eq!(word(&to, at / 8).load(Ordering::Relaxed), mix(1 + at as u64 / 8));
        assert_eq!(file.read_at(bytes_mut(&to, at + 100, 4096), at as u64 + 100).unwrap(), 4096);
    }
    // A name and a structure in a region.
    let name = b"/proc/self/exe\0";
    bytes_mut(&from, 8192, name.len()).copy_from_slice(name);
    (0..from.len()).step_by(4096).skip(8).for_each(|at| _ = word(&from, at / 8).load(Ordering::Relaxed));
    // SAFETY: a terminated name, and room for the structure.
    let rc = unsafe { libc::stat(from.as_ptr().add(8192).cast(), to.as_ptr().add(64).cast()) };
    assert_eq!(rc, 0);
    verify_stat(&to);
}

fn verify_stat(to: &Region) {
    // SAFETY: filled by stat.
    let stat = unsafe { to.as_ptr().add(64).cast::<libc::stat>().read() };
    let size = std::fs::metadata("/proc/self/exe").unwrap().len();
    assert_eq!(u64::try_from(stat.st_size).unwrap(), size);
}

/// Two pairs of threads hand each other all of a region through sockets, while two more read at random and so
/// drive pages out.
fn what_threads_exchange_while_pages_leave_is_right(fault_mode: FaultModeChoice, by_copy: bool) {
    const ROUNDS: u64 = 3;
    let memory = memory(4 * MIB, fault_mode, by_copy);
    let regions: Vec<(Region, Region)> =
        (0..2).map(|_| (memory.alloc(8 * MIB).unwrap(), memory.alloc(8 * MIB).unwrap())).collect();
    let (busy, still_at_it) = (memory.alloc(8 * MIB).unwrap(), AtomicUsize::new(2));
    fill(&busy, 77);
    std::thread::scope(|scope| {
        for (pair, (from, to)) in regions.iter().enumerate() {
            let (mut here, mut there) = UnixStream::pair().unwrap();
            let seed = move |round: u64| 1000 * (pair as u64 + 1) + round;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    fill(from, seed(round));
                    here.write_all(bytes(from, 0, from.len())).unwrap();
                    // The other one has it all.
                    here.read_exact(&mut [0]).unwrap();
                }
            });
            let still_at_it = &still_at_it;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    // In pieces that begin and end anywhere.
                    let (mut at, mut piece) = (0, 1);
                    while at < to.len() {
                        let count = piece.min(to.len() - at);
                        there.read_exact(bytes_mut(to, at, count)).unwrap();
                        at += count;
                        piece = piece * 3 % 150_001;
                    }
                    there.write_all(&[1]).unwrap();
                    verify(to, seed(round));
                }
                still_at_it.fetch_sub(1, Ordering::Release);
            });
        }
        for thread in 0..2u64 {
            let (busy, still_at_it) = (&busy, &still_at_it);
            scope.spawn(move || {
                let mut seed = thread;
                while still_at_it.load(Ordering::Acquire) > 0 {
                    seed = mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
                    let index = usize::try_from(seed % (busy.len() as u64 / 8)).unwrap();
                    assert_eq!(word(busy, index).load(Ordering::Relaxed), mix(77 + index as u64));
                }
            });
        }
    });
    assert!(memory.stats().evicted_pages > 10_000, "{:?}", memory.stats());
}

/// The kernel writes the header of a message, the sender's name and the control data after the message has
/// arrived, and loses the message if it cannot.
fn a_message_that_is_waited_for_finds_the_pages_that_tell_of_it(fault_mode: FaultModeChoice, by_copy: bool) {
    const BODY: &[u8] = b"a message, once";
    let memory = memory(MIB, fault_mode, by_copy);
    let (region, busy) = (memory.alloc(MIB).unwrap(), memory.alloc(4 * MIB).unwrap());
    fill(&busy, 7);
    let (here, there) = UnixDatagram::pair().unwrap();
    // SAFETY: only arithmetic.
    let room = unsafe { libc::CMSG_SPACE(4) } as usize;
    let waits = AtomicI32::new(0);
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let page = |number: usize| region.as_ptr().wrapping_add(number * 4096);
            let (header, vector) = (page(0).cast::<libc::msghdr>(), page(1).cast::<libc::iovec>());
            // SAFETY: pages of the region, which nothing else uses.
            unsafe {
                vector.write(libc::iovec { iov_base: page(2).cast(), iov_len: 4096 });
                header.write(std::mem::zeroed());
                ((*header).msg_iov, (*header).msg_iovlen) = (vector, 1);
                ((*header).msg_name, (*header).msg_namelen) = (page(3).cast(), 128);
                ((*header).msg_control, (*header).msg_controllen) = (page(4).cast(), room);
                waits.store(libc::gettid(), Ordering::Release);
                let count = libc::recvmsg(there.as_raw_fd(), header, 0);
                assert_eq!(usize::try_from(count), Ok(BODY.len()), "{}", std::io::Error::last_os_error());
                assert_eq!(((*header).msg_controllen, (*header).msg_flags), (room, 0));
                let descriptor = libc::CMSG_DATA(libc::CMSG_FIRSTHDR(header)).cast::<i32>().read_unaligned();
                assert!(libc::fcntl(descriptor, libc::F_GETFD) >= 0 && libc::close(descriptor) == 0);
            }
            assert_eq!(bytes(&region, 8192, BODY.len()), BODY);
        });
        let is_in_the_call = || {
            let thread = waits.load(Ordering::Acquire);
            let call =
                std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall")).unwrap_or_default();
            call.split(' ').next() == Some(&libc::SYS_recvmsg.to_string())
        };
        while !is_in_the_call() {
            assert!(!receiver.is_finished(), "nothing was sent");
            std::thread::yield_now();
        }
        // What is not kept for the call leaves.
        (0..2).for_each(|_| verify(&busy, 7));
        // SAFETY: structures of this function's own.
        unsafe {
            let mut control = [0_u64; 8];
            let mut body = libc::iovec { iov_base: BODY.as_ptr().cast_mut().cast(), iov_len: BODY.len() };
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut body, 1);
            (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), room);
            let control = libc::CMSG_FIRSTHDR(&raw const message);
            ((*control).cmsg_level, (*control).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
            (*control).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(control).cast::<i32>().write_unaligned(here.as_raw_fd());
            assert_eq!(
                usize::try_from(libc::sendmsg(here.as_raw_fd(), &raw const message, 0)),
                Ok(BODY.len())
            );
        }
    });
}

/// The buffers of a call may be more than all local memory, in several threads at once.
fn a_call_with_more_than_local_memory_ends(fault_mode: FaultModeChoice, by_copy: bool) {
    let memory = memory(256 << 10, fault_mode, by_copy);
    let region = memory.alloc(12 * MIB).unwrap();
    fill(&region, 5);
    std::thread::scope(|scope| {
        for part in 0..3 {
            let region = &region;
            scope.spawn(move || {
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(bytes(region, part * 4 * MIB, 4 * MIB)).unwrap();
                file.seek(SeekFrom::Start(0)).unwrap();
                file.read_exact(bytes_mut(region, part * 4 * MIB, 4 * MIB)).unwrap();
            });
        }
    });
    verify(&region, 5);
}

fn bad_addresses_are_still_errors(fault_mode: FaultModeChoice, by_copy: bool) {
    let memory = memory(MIB, fault_mode, by_copy);
    let region = memory.alloc(4 * MIB).unwrap();
    fill(&region, 9);
    let file = File::open("/dev/zero").unwrap();
    // SAFETY: addresses where nothing is mapped, which the kernel refuses; nothing is written.
    unsafe {
        for address in [8usize, 1 << 46] {
            assert_eq!(libc::read(file.as_raw_fd(), std::ptr::with_exposed_provenance_mut(address), 100), -1);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
        }
    }
    // SAFETY: a mapping of this test's own, which nothing uses.
    unsafe {
        let pages = libc::mmap(
            std::ptr::null_mut(),
            8192,
            libc::PROT_READ,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_eq!(
            libc::read(file.as_raw_fd(), pages.wrapping_byte_add(100), 100),
            -1,
            "memory that is closed to writing"
        );
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
        libc::munmap(pages, 8192);
    }
    verify(&region, 9);
}

static OWN: AtomicUsize = AtomicUsize::new(0);

extern "C" fn own_handler(_: i32) {
    OWN.fetch_add(1, Ordering::Relaxed);
}

/// A program that does not know which signals bring its pages.
fn blocked_signals_and_own_handlers_are_no_harm(fault_mode: FaultModeChoice, by_copy: bool) {
    let memory = memory(MIB, fault_mode, by_copy);
    let region = memory.alloc(4 * MIB).unwrap();
    fill(&region, 3);
    // SAFETY: sets of signals of this thread's own, and a handler of the right signature.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut()), 0);
        for signal in [libc::SIGBUS, libc::SIGSEGV] {
            libc::signal(signal, own_handler as *const () as usize);
        }
    }
    verify(&region, 3);
    assert_eq!(OWN.load(Ordering::Relaxed), 0, "a fault of ours came to the program");
    // SAFETY: signals to this thread; a set of signals of its own.
    unsafe {
        let mut both: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut both);
        libc::sigaddset(&raw mut both, libc::SIGBUS);
        libc::sigaddset(&raw mut both, libc::SIGSEGV);
        assert_eq!(libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const both, std::ptr::null_mut()), 0);
        libc::raise(libc::SIGBUS);
        libc::raise(libc::SIGSEGV);
    }
    assert_eq!(OWN.load(Ordering::Relaxed), 2, "the program's own signals");
    verify(&region, 3);
}
