//! The paged view on the real kernel, in every fault mode, with its pages in this process's own memory behind
//! the pager.

mod words;

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rampool::proto::units::Extent;
use rampool_kernel::probe::{Capabilities, FaultMode, NEEDED};
use rampool_pager::backing::memory::MemoryBacking;
use rampool_pager::backing::{Backing, BackingEvent};
use rampool_pager::fault::FaultModeChoice;
use rampool_pager::pager::Waiting;
use rampool_pager::region::{PagedConfig, PagedMemory, Region, RegionAdvice};
use rampool_testing::skip;
use words::{mix, word};

const MIB: usize = 1 << 20;

/// A fault mode, and the way pages leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct How {
    fault_mode: FaultModeChoice,
    evict_by_copy: bool,
}

/// Every scenario in every fault mode. A mode is left out only when the kernel's own answer is that it does
/// not have it, or does not allow it to this user.
macro_rules! on_every_mode {
    ($($scenario:ident),* $(,)?) => {
        in_mode!(full, FaultModeChoice::Full, false, $($scenario),*);
        in_mode!(full_by_copy, FaultModeChoice::Full, true, $($scenario),*);
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
                let how = How { fault_mode: $fault_mode, evict_by_copy: $copy };
                if allowed(how) {
                    super::$scenario(how);
                }
            })*
        }
    };
}

on_every_mode!(
    what_was_written_is_read_again_though_only_a_quarter_fits,
    random_reads_and_writes_by_several_threads_keep_every_value,
    fork_is_right_or_the_child_has_no_region,
    discarded_ranges_are_zero_and_regions_can_be_freed_and_taken_again,
    regions_outlive_their_memory_and_count_to_the_page,
    changed_mappings_are_followed_where_the_kernel_tells_of_them,
    system_calls_on_absent_pages_work_or_fail_but_never_lie,
    writers_that_race_with_eviction_lose_nothing,
    scans_that_race_with_writers_and_forks_keep_every_value,
    lost_servers_poison_what_they_held_and_nothing_else,
    a_child_whose_parent_lets_its_memory_go_reads_no_zeroes,
    a_child_that_changes_its_mappings_while_it_is_given_up_reads_no_zeroes,
    a_child_that_changes_its_mappings_at_once_has_what_had_not_been_stored,
    forks_while_other_threads_take_and_drop_memory_are_right,
    a_sigbus_of_the_programs_own_goes_to_its_own_handler,
);

/// What the kernel says about a fault mode, asked without the code under test.
fn allowed(how: How) -> bool {
    let found = Capabilities::probe();
    let answer = match how.fault_mode {
        FaultModeChoice::Full => found.full.as_ref().map(|f| f.has(NEEDED)).map_err(ToString::to_string),
        FaultModeChoice::UserMode | FaultModeChoice::InThread => {
            found.user_mode.as_ref().map(|f| f.has(NEEDED)).map_err(ToString::to_string)
        }
        _ => found.segv.as_ref().map(|()| true).map_err(ToString::to_string),
    };
    match answer {
        Ok(true) => true,
        other => {
            let feature = if how.fault_mode == FaultModeChoice::Full { "uffd" } else { "uffd-user" };
            skip(feature, &format!("the kernel does not allow {how:?} here: {other:?}"));
            false
        }
    }
}

fn config(local: usize, how: How) -> PagedConfig {
    PagedConfig {
        local_bytes: local as u64,
        waiting: Waiting { follow_faults: false, ..Waiting::default() },
        fault_mode: how.fault_mode,
        evict_by_copy: how.evict_by_copy,
        ..PagedConfig::default()
    }
}

fn memory(local: usize, how: How) -> PagedMemory {
    let mut backing = MemoryBacking::default();
    let region = backing.create_region();
    PagedMemory::start(&config(local, how), backing, region).unwrap()
}

fn what_was_written_is_read_again_though_only_a_quarter_fits(how: How) {
    let memory = memory(8 * MIB, how);
    let region = memory.alloc(32 * MIB).unwrap();
    let words = region.len() / 8;
    for round in 0..3u64 {
        for index in 0..words {
            word(&region, index).store(mix(index as u64 + round), Ordering::Relaxed);
        }
        for index in 0..words {
            assert_eq!(
                word(&region, index).load(Ordering::Relaxed),
                mix(index as u64 + round),
                "word {index} in round {round}"
            );
        }
    }
    let stats = memory.stats();
    assert!(stats.evicted_pages > 3 * 6_000, "{stats:?}");
}

fn random_reads_and_writes_by_several_threads_keep_every_value(how: How) {
    let memory = memory(8 * MIB, how);
    let region = memory.alloc(32 * MIB).unwrap();
    let words = region.len() / 8;
    // The copying ways take longer for a page that leaves alone.
    let rounds = if how.evict_by_copy { 20_000 } else { 60_000 };
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let region = &region;
            scope.spawn(move || {
                // Each thread owns every fourth word, so neighbours in a page belong to others.
                let mut expected = vec![0u64; words / 4];
                let mut seed = mix(thread as u64 + 99);
                for _ in 0..rounds {
                    seed = mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
                    let slot = usize::try_from(seed % expected.len() as u64).unwrap();
                    let cell = word(region, slot * 4 + thread);
                    assert_eq!(cell.load(Ordering::Relaxed), expected[slot], "thread {thread} slot {slot}");
                    if seed & (1 << 40) != 0 {
                        expected[slot] = seed;
                        cell.store(seed, Ordering::Relaxed);
                    }
                }
            });
        }
    });
}

/// A page is written by one thread as fast as it can while another makes it leave again and again: no store
/// may fall between the copy and the moment when the page is gone.
fn writers_that_race_with_eviction_lose_nothing(how: How) {
    let memory = memory(MIB, how);
    let region = memory.alloc(8 * MIB).unwrap();
    let pages = region.len() / 4096;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2usize)
            .map(|writer| {
                let (region, stop) = (&region, &stop);
                scope.spawn(move || {
                    let mut counts = [0u64; 16];
                    while !stop.load(Ordering::Relaxed) {
                        for (n, count) in counts.iter_mut().enumerate() {
                            let cell = word(region, n * 16 * 512 + writer);
                            assert_eq!(cell.load(Ordering::Relaxed), *count, "page {n}");
                            *count += 1;
                            cell.store(*count, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        // Two sweeps over everything push the writers' pages out many times.
        for sweep in 0..4 {
            for page in 0..pages {
                word(&region, page * 512 + 100).store(mix((page + sweep) as u64), Ordering::Relaxed);
            }
        }
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            writer.join().unwrap();
        }
    });
    for page in 0..pages {
        assert_eq!(word(&region, page * 512 + 100).load(Ordering::Relaxed), mix((page + 3) as u64));
    }
}

/// Pages are read ahead and installed in runs while others are written, leave, and are copied by forks.
fn scans_that_race_with_writers_and_forks_keep_every_value(how: How) {
    let memory = memory(8 * MIB, how);
    let region = memory.alloc(32 * MIB).unwrap();
    let pages = region.len() / 4096;
    for page in 0..pages {
        word(&region, page * 512).store(mix(page as u64), Ordering::Relaxed);
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (1..3usize)
            .map(|writer| {
                let (region, stop) = (&region, &stop);
                scope.spawn(move || {
                    let mut counts = vec![0u64; pages];
                    let mut seed = mix(writer as u64);
                    while !stop.load(Ordering::Relaxed) {
                        seed = mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
                        let page = usize::try_from(seed % pages as u64).unwrap();
                        let cell = word(region, page * 512 + writer);
                        assert_eq!(
                            cell.load(Ordering::Relaxed),
                            counts[page],
                            "page {page} of writer {writer}"
                        );
                        counts[page] += 1;
                        cell.store(counts[page], Ordering::Relaxed);
                    }
                    for (page, count) in counts.into_iter().enumerate() {
                        assert_eq!(
                            word(region, page * 512 + writer).load(Ordering::Relaxed),
                            count,
                            "page {page} of writer {writer}"
                        );
                    }
                })
            })
            .collect();
        for scan in 0..6 {
            for page in 0..pages {
                assert_eq!(
                    word(&region, page * 512).load(Ordering::Relaxed),
                    mix(page as u64),
                    "page {page} in scan {scan}"
                );
            }
            // SAFETY: the child only reads the region, where it has one, and leaves by _exit.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let followed = how.fault_mode == FaultModeChoice::Full && Capabilities::probe().fork_events;
                let wrong = followed
                    && (0..pages)
                        .step_by(7)
                        .any(|page| word(&region, page * 512).load(Ordering::Relaxed) != mix(page as u64));
                // SAFETY: ends the child without running anything of the parent's.
                unsafe { libc::_exit(i32::from(wrong)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child of scan {scan} saw wrong values");
        }
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            writer.join().unwrap();
        }
    });
}

fn fork_is_right_or_the_child_has_no_region(how: How) {
    let memory = memory(8 * MIB, how);
    let region = memory.alloc(32 * MIB).unwrap();
    let pages = region.len() / 4096;
    for page in 0..pages {
        word(&region, page * 512).store(mix(page as u64), Ordering::Relaxed);
    }
    let followed = memory.fault_mode() == FaultMode::Full && Capabilities::probe().fork_events;
    // SAFETY: the child only touches the region and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut wrong = 0;
        for page in 0..pages {
            let cell = word(&region, page * 512);
            wrong += i32::from(cell.load(Ordering::Relaxed) != mix(page as u64));
            cell.store(7, Ordering::Relaxed);
        }
        for page in 0..pages {
            wrong += i32::from(word(&region, page * 512).load(Ordering::Relaxed) != 7);
        }
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(i32::from(wrong != 0)) };
    }
    assert!(child > 0);
    for page in 0..pages {
        word(&region, page * 512 + 1).store(page as u64, Ordering::Relaxed);
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if followed {
        assert_eq!(status, 0, "the child saw wrong values");
    } else {
        assert!(
            libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV,
            "status {status:#x}: the child must not see zeroes"
        );
    }
    for page in 0..pages {
        assert_eq!(word(&region, page * 512).load(Ordering::Relaxed), mix(page as u64));
        assert_eq!(word(&region, page * 512 + 1).load(Ordering::Relaxed), page as u64);
    }
}

fn discarded_ranges_are_zero_and_regions_can_be_freed_and_taken_again(how: How) {
    let memory = memory(4 * MIB, how);
    for round in 1..4u64 {
        let region = memory.alloc(16 * MIB).unwrap();
        let pages = region.len() / 4096;
        for page in 0..pages {
            let cell = word(&region, page * 512);
            assert_eq!(cell.load(Ordering::Relaxed), 0, "fresh page {page}");
            cell.store(page as u64 + round, Ordering::Relaxed);
        }
        region.advise(4 * MIB, 4 * MIB, RegionAdvice::Discard).unwrap();
        region.advise(15 * MIB, MIB, RegionAdvice::Discard).unwrap();
        region.advise(0, MIB, RegionAdvice::WillNeed).unwrap();
        for page in 0..pages {
            let gone = (1024..2048).contains(&page) || page >= 3840;
            let want = if gone { 0 } else { page as u64 + round };
            assert_eq!(word(&region, page * 512).load(Ordering::Relaxed), want, "page {page}");
        }
    }
}

fn regions_outlive_their_memory_and_count_to_the_page(how: How) {
    let mut backing = MemoryBacking::default();
    let lease = backing.create_region();
    let config = PagedConfig { capacity_bytes: Some(16 * MIB as u64), ..config(MIB, how) };
    let memory = PagedMemory::start(&config, backing, lease).unwrap();
    // A page each, whatever the alignment.
    let small: Vec<Region> = (0..16).map(|_| memory.alloc(1).unwrap()).collect();
    assert!(small.iter().all(|r| r.len() == 4096));
    let region = memory.alloc(16 * MIB - 16 * 4096).unwrap();
    assert!(memory.alloc(1).is_err(), "the capacity is taken to the page");
    for region in &small {
        word(region, 511).store(7, Ordering::Relaxed);
    }
    for page in 0..region.len() / 4096 {
        word(&region, page * 512).store(mix(page as u64), Ordering::Relaxed);
    }
    // What is away now has to come back, although the memory itself has no other holder any more.
    drop(memory);
    for page in 0..region.len() / 4096 {
        assert_eq!(word(&region, page * 512).load(Ordering::Relaxed), mix(page as u64), "page {page}");
    }
    assert!(
        small
            .iter()
            .all(|r| word(r, 511).load(Ordering::Relaxed) == 7 && word(r, 0).load(Ordering::Relaxed) == 0)
    );
}

fn changed_mappings_are_followed_where_the_kernel_tells_of_them(how: How) {
    if how.fault_mode == FaultModeChoice::Segv {
        // Not allowed there, as `Region` says.
        return;
    }
    let memory = memory(4 * MIB, how);
    let region = memory.alloc(16 * MIB).unwrap();
    let pages = region.len() / 4096;
    for page in 0..pages {
        word(&region, page * 512).store(page as u64 + 1, Ordering::Relaxed);
    }
    // SAFETY: the range is inside the region.
    unsafe {
        assert_eq!(libc::madvise(region.as_ptr().add(4 * MIB).cast(), 4 * MIB, libc::MADV_DONTNEED), 0)
    };
    for page in 0..pages {
        let gone = (1024..2048).contains(&page);
        let want = if gone { 0 } else { page as u64 + 1 };
        assert_eq!(word(&region, page * 512).load(Ordering::Relaxed), want, "page {page}");
    }
    // SAFETY: moves the last 4 MiB of the region elsewhere; the region is not used there again.
    let moved = unsafe {
        libc::mremap(region.as_ptr().add(12 * MIB).cast(), 4 * MIB, 8 * MIB, libc::MREMAP_MAYMOVE)
            .cast::<AtomicU64>()
    };
    // What other tests map must not come to lie in the region's place, which is unmapped as a whole.
    // SAFETY: nothing is mapped there any more.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        libc::mmap(region.as_ptr().add(12 * MIB).cast(), 4 * MIB, libc::PROT_NONE, flags, -1, 0);
    }
    for page in 0..1024 {
        // SAFETY: inside the moved mapping.
        let cell = unsafe { &*moved.add(page * 512) };
        assert_eq!(cell.load(Ordering::Relaxed), 3072 + page as u64 + 1);
    }
    // SAFETY: the grown part of the moved mapping.
    unsafe {
        if how.fault_mode != FaultModeChoice::InThread {
            (*moved.add(1500 * 512)).store(5, Ordering::Relaxed);
            assert_eq!((*moved.add(1500 * 512)).load(Ordering::Relaxed), 5);
        }
        libc::munmap(moved.cast(), 8 * MIB);
    }
}

fn system_calls_on_absent_pages_work_or_fail_but_never_lie(how: How) {
    use std::io::{Read, Seek, SeekFrom, Write};
    let memory = memory(4 * MIB, how);
    let region = memory.alloc(16 * MIB).unwrap();
    for index in 0..region.len() / 8 {
        word(&region, index).store(mix(index as u64), Ordering::Relaxed);
    }
    let mut file = tempfile::tempfile().unwrap();
    let copy = memory.alloc(16 * MIB).unwrap();
    if how.fault_mode == FaultModeChoice::Full {
        // SAFETY: the region is not written while these bytes are read.
        file.write_all(unsafe { std::slice::from_raw_parts(region.as_ptr(), region.len()) }).unwrap();
        file.rewind().unwrap();
        // SAFETY: only this thread uses the second region.
        file.read_exact(unsafe { std::slice::from_raw_parts_mut(copy.as_ptr(), copy.len()) }).unwrap();
    } else {
        let mut faults = 0;
        for at in (0..region.len()).step_by(4096) {
            loop {
                // SAFETY: as above, a page at a time.
                let wrote = file.write(unsafe { std::slice::from_raw_parts(region.as_ptr().add(at), 4096) });
                match wrote {
                    Ok(4096) => break,
                    Err(error) if error.raw_os_error() == Some(libc::EFAULT) => faults += 1,
                    other => panic!("{other:?}"),
                }
                // What the documentation asks for: touch, then call.
                word(&region, at / 8).load(Ordering::Relaxed);
            }
        }
        // Every page that no fault brought before (reading ahead brings many) makes a call fail.
        assert!(faults > 20, "only a quarter is resident, but {faults} calls failed");
        for at in (0..copy.len()).step_by(4096) {
            word(&copy, at / 8).store(1, Ordering::Relaxed);
            loop {
                file.seek(SeekFrom::Start(at as u64)).unwrap();
                // SAFETY: as above.
                match file.read(unsafe { std::slice::from_raw_parts_mut(copy.as_ptr().add(at), 4096) }) {
                    Ok(4096) => break,
                    Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                        word(&copy, at / 8).store(1, Ordering::Relaxed)
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    for index in 0..region.len() / 8 {
        assert_eq!(word(&copy, index).load(Ordering::Relaxed), mix(index as u64), "word {index}");
    }
}

static OWN_SIGBUS: AtomicU64 = AtomicU64::new(0);

/// A file that ends before its mapping does, a signal sent by a process: both are the program's, before and
/// after a fault of ours.
fn a_sigbus_of_the_programs_own_goes_to_its_own_handler(how: How) {
    const CHILD: &str = "RAMPOOL_TEST_SIGBUS";
    if std::env::var_os(CHILD).is_none() {
        // Handlers belong to the process: this one has its own.
        let name = std::thread::current().name().expect("tests have names").to_owned();
        let mut test = Command::new(std::env::current_exe().unwrap());
        let output = test.args(["--exact", &name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        assert!(
            output.status.success(),
            "{how:?}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    extern "C" fn on_sigbus(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the kernel's siginfo. The page of a fault is replaced by one that can be read.
        unsafe {
            if (*info).si_code > 0 {
                let page = std::ptr::with_exposed_provenance_mut((*info).si_addr().addr() & !4095);
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                libc::mmap(page, 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            }
        }
        OWN_SIGBUS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: a handler of the right signature, and a mapping that is larger than its file.
    let beyond = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()), 0);
        let file = tempfile::tempfile().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        libc::mmap(std::ptr::null_mut(), 8192, libc::PROT_READ, libc::MAP_SHARED, fd, 0).cast::<u8>()
    };
    let memory = memory(MIB, how);
    let region = memory.alloc(4 * MIB).unwrap();
    for page in 0..1024 {
        word(&region, page * 512).store(mix(page as u64), Ordering::Relaxed);
        // SAFETY: mapped; the handler makes it readable. A signal to this very thread.
        unsafe {
            if page == 300 {
                assert_eq!(beyond.read_volatile(), 0);
            }
            if page == 600 {
                assert_eq!(libc::raise(libc::SIGBUS), 0);
            }
        }
    }
    for page in 0..1024 {
        assert_eq!(word(&region, page * 512).load(Ordering::Relaxed), mix(page as u64));
    }
    assert_eq!(OWN_SIGBUS.load(Ordering::Relaxed), 2);
}

/// Memory behind the pager whose answers go through a test's hands.
struct Through<P> {
    inner: MemoryBacking,
    poll: P,
}

// SAFETY: forwards to a backing that keeps the promise.
unsafe impl<P: FnMut(&mut MemoryBacking) -> Option<BackingEvent>> Backing for Through<P> {
    type Region = u32;

    unsafe fn fetch(&mut self, region: u32, token: u64, extents: &[Extent], to: *mut u8, demand: bool) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.fetch(region, token, extents, to, demand) };
    }
    unsafe fn store(&mut self, region: u32, token: u64, pages: &[(Extent, *const u8)]) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.store(region, token, pages) };
    }
    fn discard(&mut self, region: u32, extent: Extent) {
        self.inner.discard(region, extent);
    }
    fn poll(&mut self) -> Option<BackingEvent> {
        (self.poll)(&mut self.inner)
    }
    fn poll_fds(&self, out: &mut Vec<libc::pollfd>) {
        self.inner.poll_fds(out);
    }
    /// What is held back is told by no descriptor.
    fn next_deadline(&self) -> Option<Instant> {
        Some(Instant::now() + Duration::from_millis(1))
    }
    fn clone_region(&mut self, region: u32) -> Result<u32, String> {
        self.inner.clone_region(region)
    }
    fn free_region(&mut self, region: u32) {
        self.inner.free_region(region);
    }
}

fn memory_through(
    local: usize,
    how: How,
    poll: impl FnMut(&mut MemoryBacking) -> Option<BackingEvent> + Send + 'static,
) -> PagedMemory {
    let mut inner = MemoryBacking::default();
    let region = inner.create_region();
    PagedMemory::start(&config(local, how), Through { inner, poll }, region).unwrap()
}

const LOSE: &str = "RAMPOOL_TEST_LOSE";

fn a_child_whose_parent_lets_its_memory_go_reads_no_zeroes(how: How) {
    let memory = memory(MIB, how);
    if memory.fault_mode() != FaultMode::Full || !Capabilities::probe().fork_events {
        // It has no region.
        return;
    }
    let region = memory.alloc(4 * MIB).unwrap();
    (0..1024).for_each(|page| word(&region, page * 512).store(mix(page as u64), Ordering::Relaxed));
    // The kernel poisons no range of more than one mapping, and this divides the region's.
    // SAFETY: pages in the middle of the region, whose content stays.
    let divided =
        unsafe { libc::madvise(region.as_ptr().byte_add(2 * MIB).cast(), MIB, libc::MADV_DONTDUMP) };
    assert_eq!(divided, 0);
    let (mut go, begin) = std::os::unix::net::UnixStream::pair().unwrap();
    // SAFETY: the child only reads the region and a socket, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let wrong = |page: usize| word(&region, page * 512).load(Ordering::Relaxed) != mix(page as u64);
        // Some of it while there is a parent that serves it.
        let before = (0..100).any(wrong);
        let mut byte = 0u8;
        // SAFETY: one byte of this stack; ends the child without running anything of the parent's.
        unsafe {
            libc::write(std::os::fd::AsRawFd::as_raw_fd(&begin), (&raw const byte).cast(), 1);
            libc::read(std::os::fd::AsRawFd::as_raw_fd(&begin), (&raw mut byte).cast(), 1);
            // First what lies before the border of two mappings.
            libc::_exit(if before {
                2
            } else if (500..512).chain(0..1024).any(wrong) {
                3
            } else {
                0
            });
        }
    }
    assert!(child > 0);
    drop(begin);
    std::io::Read::read_exact(&mut go, &mut [0]).expect("the child has read some");
    drop((region, memory));
    std::io::Write::write_all(&mut go, &[1]).unwrap();
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(
        libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS,
        "{how:?}: status {status:#x}"
    );
}

/// Ends the child of a test: without anything of the parent's.
fn end_child(code: i32) -> ! {
    // SAFETY: no preconditions.
    unsafe { libc::_exit(code) }
}

fn status_of(child: i32) -> i32 {
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: waits for a child of this test.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

fn a_child_that_changes_its_mappings_while_it_is_given_up_reads_no_zeroes(how: How) {
    if how.fault_mode != FaultModeChoice::Full || !Capabilities::probe().fork_events {
        // It has no region.
        return;
    }
    const PAGES: usize = 4096;
    let memory = memory(MIB, how);
    let region = memory.alloc(PAGES * 4096).unwrap();
    (0..PAGES).for_each(|page| word(&region, page * 512).store(mix(page as u64), Ordering::Relaxed));
    let (mut go, begin) = std::os::unix::net::UnixStream::pair().unwrap();
    // SAFETY: the child only touches the region and a socket, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        for page in 0..PAGES / 2 {
            // Every other page, so that each call is one that the parent must have read about.
            // SAFETY: pages of the region that nothing here looks at any more.
            unsafe { libc::munmap(region.as_ptr().byte_add(page * 2 * 4096).cast(), 4096) };
            if page == 10 {
                let byte = 0u8;
                // SAFETY: one byte of this stack.
                unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&begin), (&raw const byte).cast(), 1) };
            }
        }
        let wrong = |page: usize| word(&region, page * 512).load(Ordering::Relaxed) != mix(page as u64);
        end_child(if (0..PAGES / 2).any(|page| wrong(page * 2 + 1)) { 3 } else { 0 });
    }
    drop(begin);
    std::io::Read::read_exact(&mut go, &mut [0]).expect("the child has begun");
    drop((region, memory));
    let status = status_of(child);
    assert!(
        libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS,
        "{how:?}: status {status:#x}"
    );
}

fn forks_while_other_threads_take_and_drop_memory_are_right(how: How) {
    let inherited = how.fault_mode == FaultModeChoice::Full && Capabilities::probe().fork_events;
    let kept = memory(MIB, how);
    let region = kept.alloc(2 * MIB).unwrap();
    (0..512).for_each(|page| word(&region, page * 512).store(mix(page as u64), Ordering::Relaxed));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let done = &done;
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let memory = memory(MIB, how);
                    let region = memory.alloc(2 * MIB).unwrap();
                    (0..512).for_each(|page| {
                        word(&region, page * 512).store(mix(page as u64 + thread), Ordering::Relaxed)
                    });
                    let right = |page: usize| {
                        word(&region, page * 512).load(Ordering::Relaxed) == mix(page as u64 + thread)
                    };
                    assert!((0..512).all(right));
                    // One or the other goes first.
                    if thread == 0 {
                        drop(memory);
                        assert!((0..512).all(right));
                    }
                }
            });
        }
        for _ in 0..12 {
            // SAFETY: the child only reads the region, and leaves by _exit.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let wrong =
                    |page: usize| word(&region, page * 512).load(Ordering::Relaxed) != mix(page as u64);
                end_child(if inherited && (0..512).any(wrong) { 3 } else { 0 });
            }
            assert_eq!(status_of(child), 0, "{how:?}");
        }
        done.store(true, Ordering::Relaxed);
    });
}

fn a_child_that_changes_its_mappings_at_once_has_what_had_not_been_stored(how: How) {
    if how.fault_mode != FaultModeChoice::Full || !Capabilities::probe().fork_events {
        // It has no region.
        return;
    }
    const PAGES: usize = 2048;
    let held = Arc::new(AtomicBool::new(false));
    let (hold, mut answers) = (Arc::clone(&held), Vec::new());
    let memory = memory_through(2 * MIB, how, move |inner| {
        loop {
            if !hold.load(Ordering::Acquire)
                && let Some(answer) = answers.pop()
            {
                return Some(answer);
            }
            match inner.poll() {
                Some(answer @ BackingEvent::Stored { .. }) => answers.push(answer),
                other => return other,
            }
        }
    });
    let region = memory.alloc(PAGES * 4096).unwrap();
    for page in 0..PAGES {
        word(&region, page * 512).store(mix(page as u64), Ordering::Relaxed);
        // The last of what leaves is not stored when the child is made.
        held.store(page >= PAGES - 24, Ordering::Release);
    }
    for round in 0..20 {
        // SAFETY: the child only touches the region, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            for page in (0..PAGES).step_by(64) {
                // SAFETY: pages of the region that nothing here looks at any more.
                unsafe { libc::munmap(region.as_ptr().byte_add(page * 4096).cast(), 4096) };
            }
            let wrong = |page: usize| word(&region, page * 512).load(Ordering::Relaxed) != mix(page as u64);
            end_child(if (0..PAGES).filter(|page| page % 64 != 0).any(wrong) { 3 } else { 0 });
        }
        let status = status_of(child);
        assert_eq!(status, 0, "{how:?}: round {round}: status {status:#x}");
    }
    held.store(false, Ordering::Release);
    for page in 0..PAGES {
        assert_eq!(word(&region, page * 512).load(Ordering::Relaxed), mix(page as u64));
    }
}

fn lost_servers_poison_what_they_held_and_nothing_else(how: How) {
    if std::env::var_os(LOSE).is_none() {
        let name = std::thread::current().name().expect("tests have names").to_owned();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env(LOSE, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            output.status.signal(),
            Some(libc::SIGBUS),
            "{how:?}: {said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(said.contains("everything local is right"), "{how:?}: {said}");
        return;
    }
    let lose = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&lose);
    let memory = memory_through(4 * MIB, how, move |inner| match inner.poll() {
        Some(_) if told.load(Ordering::Acquire) => {
            Some(BackingEvent::Lost { reason: "the test's server is lost".into() })
        }
        answer => answer,
    });
    let region = memory.alloc(16 * MIB).unwrap();
    let pages = region.len() / 4096;
    // The last pages stay fresh.
    for page in 0..pages - 16 {
        word(&region, page * 512).store(page as u64 + 1, Ordering::Relaxed);
    }
    lose.store(true, Ordering::Release);
    // A thread meets a page that can only come from the server; it ends the process with SIGBUS, after the
    // main thread has looked around.
    let (hold, held) = std::sync::mpsc::channel::<()>();
    if how.fault_mode == FaultModeChoice::InThread {
        // The thread that needs the page is the one that learns of the loss; a handler that is set now would
        // stand before ours.
        println!("everything local is right");
        word(&region, 0).load(Ordering::Relaxed);
        (0..pages)
            .for_each(|page| assert_eq!(word(&region, page * 512).load(Ordering::Relaxed), page as u64 + 1));
        panic!("a lost page was read");
    }
    let mut resident = vec![0u8; pages];
    // SAFETY: the range is mapped, and the vector has a byte for each of its pages.
    assert_eq!(unsafe { libc::mincore(region.as_ptr().cast(), region.len(), resident.as_mut_ptr()) }, 0);
    extern "C" fn park(_: i32) {
        // Stays here, asleep, until the main thread puts the default action back and sends the signal again.
        loop {
            // SAFETY: sleeps until a signal.
            unsafe { libc::pause() };
        }
    }
    // SAFETY: a handler of the right signature.
    unsafe { libc::signal(libc::SIGBUS, park as *const () as usize) };
    let absent = resident.iter().position(|r| r & 1 == 0).expect("something is absent");
    let cell = std::ptr::from_ref(word(&region, absent * 512)).expose_provenance();
    std::thread::spawn(move || {
        // SAFETY: the region outlives the process, in effect: the main thread never drops it.
        let value = unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(cell) }.load(Ordering::Relaxed);
        println!("an absent page was read as {value}");
        drop(hold);
    });
    while memory.lost().is_none() {
        assert!(held.try_recv() != Err(std::sync::mpsc::TryRecvError::Disconnected), "the read came back");
        std::thread::yield_now();
    }
    assert!(memory.lost().unwrap().contains("the test's server"));
    assert!(memory.alloc(4096).is_err());
    for (page, present) in resident.iter().enumerate().take(pages - 16) {
        if present & 1 == 1 {
            let cell = word(&region, page * 512);
            assert_eq!(cell.load(Ordering::Relaxed), page as u64 + 1);
            cell.store(9, Ordering::Relaxed);
        }
    }
    for page in pages - 16..pages {
        assert_eq!(word(&region, page * 512).load(Ordering::Relaxed), 0);
        word(&region, page * 512).store(9, Ordering::Relaxed);
    }
    println!("everything local is right");
    // SAFETY: the default action, which the lost page then meets.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    word(&region, absent * 512).load(Ordering::Relaxed);
    panic!("a lost page was read");
}

/// The user-mode and SIGSEGV fault modes are for those without privileges: run them without.
#[test]
fn the_lower_fault_modes_need_no_privileges() {
    const UNPRIVILEGED: u32 = 65534;
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: this user has no privileges, so the other tests have shown it");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("paged");
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    rampool_testing::copy_program(&std::env::current_exe().unwrap(), &program);
    for fault_mode in ["user_mode::", "user_mode_by_copy::what", "segv::"] {
        let output = Command::new(&program)
            .arg(fault_mode)
            .current_dir("/")
            .uid(UNPRIVILEGED)
            .gid(UNPRIVILEGED)
            .output()
            .unwrap();
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{fault_mode} without rights: {said}");
        assert!(
            !said.contains("skipped:") && said.contains(" passed") && !said.contains(" 0 passed"),
            "{fault_mode} without rights: {said}"
        );
    }
}
