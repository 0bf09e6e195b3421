//! Mappings of our own, and what the kernel counts as resident.

use crate::OS_PAGE_BYTES;

/// A mapping that we own. Dropping it unmaps it. No reference into it is ever handed out: others may write
/// it.
#[derive(Debug)]
pub struct Mapping {
    start: usize,
    bytes: usize,
}

/// Why the kernel gave no memory.
#[derive(Debug, thiserror::Error)]
#[error("the kernel refuses {bytes} bytes of memory (errno {errno}{})", hint(*errno))]
pub struct MapError {
    pub bytes: usize,
    pub errno: i32,
}

/// What a user can do about it.
pub(crate) fn hint(errno: i32) -> &'static str {
    match errno {
        libc::EFBIG => ": files of this process may not be that long, see `ulimit -f`",
        libc::EAGAIN => {
            ": the process locks all that it maps (mlockall), and may not lock that much, see `ulimit -l`"
        }
        libc::ENOMEM if limit(libc::RLIMIT_AS).is_some() => ": see `ulimit -v`",
        libc::ENOMEM if limit(libc::RLIMIT_DATA).is_some() => ": see `ulimit -d`",
        _ => "",
    }
}

/// `None`: there is none.
fn limit(of: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: fills plain data that lives across the call.
    let known = unsafe { libc::getrlimit(of, &raw mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Bytes of address space that this process may still map (`ulimit -v`); `None`: as much as there is.
#[must_use]
pub fn address_space_left() -> Option<u64> {
    let limit = limit(libc::RLIMIT_AS)?;
    let counts = std::fs::read_to_string("/proc/self/statm").ok()?;
    let used: u64 = counts.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(used.saturating_mul(OS_PAGE_BYTES as u64)))
}

impl Mapping {
    /// Readable and writable memory, allocated on first touch. `bytes` is rounded up to whole pages.
    ///
    /// # Errors
    /// When the address space or the overcommit limit is exhausted.
    pub fn anonymous(bytes: usize) -> Result<Self, MapError> {
        Self::map(bytes, libc::MAP_NORESERVE)
    }

    fn map(bytes: usize, flags: i32) -> Result<Self, MapError> {
        let too_large = MapError { bytes, errno: libc::ENOMEM };
        let bytes = bytes.checked_next_multiple_of(OS_PAGE_BYTES).ok_or(too_large)?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs nothing.
        let p = unsafe {
            libc::syscall(
                libc::SYS_mmap,
                0usize,
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
                -1,
                0usize,
            )
        };
        if p == -1 {
            return Err(MapError { bytes, errno: crate::last_errno() });
        }
        let start = usize::try_from(p).expect("a user address");
        own::add(start, bytes);
        Ok(Self { start, bytes })
    }

    /// As [`Mapping::anonymous`], aligned to 2 MiB, so that whole huge pages fit.
    ///
    /// # Errors
    /// As [`Mapping::anonymous`].
    pub fn huge_aligned(bytes: usize) -> Result<Self, MapError> {
        const HUGE: usize = 2 << 20;
        let too_large = || MapError { bytes, errno: libc::ENOMEM };
        let bytes = bytes.checked_next_multiple_of(HUGE).ok_or_else(too_large)?;
        let wide = Self::anonymous(bytes.checked_add(HUGE).ok_or_else(too_large)?)?;
        let start = wide.start.next_multiple_of(HUGE);
        let (head, tail) = (start - wide.start, wide.start + wide.bytes - (start + bytes));
        if head > 0 {
            unmap(wide.start, head);
        }
        if tail > 0 {
            unmap(start + bytes, tail);
        }
        std::mem::forget(wide);
        Ok(Self { start, bytes })
    }

    /// All of `object`, at an address of the kernel's choice, so far without any access ([`Mapping::allow`]).
    /// Not locked into RAM, also where the process locks all that it maps (`mlockall`): of a large object,
    /// most is never touched.
    ///
    /// # Errors
    /// When the address space is exhausted.
    pub fn shared(object: &SharedObject) -> Result<Self, MapError> {
        Self::map_shared(object, 0, 0)
    }

    /// As [`Mapping::shared`], at exactly this address.
    ///
    /// # Errors
    /// EEXIST: something is mapped there.
    pub fn shared_at(object: &SharedObject, address: usize) -> Result<Self, MapError> {
        let mapping = Self::map_shared(object, address, libc::MAP_FIXED_NOREPLACE)?;
        // Kernels before 4.17 take the address as a hint.
        if mapping.start == address {
            Ok(mapping)
        } else {
            Err(MapError { bytes: object.bytes, errno: libc::EEXIST })
        }
    }

    fn map_shared(object: &SharedObject, address: usize, flags: i32) -> Result<Self, MapError> {
        use std::os::fd::AsRawFd;
        let bytes = object.bytes;
        // SAFETY: a new mapping at an address of the kernel's choice, or at one where the kernel makes sure
        // that nothing is, disturbs nothing.
        let p = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | flags;
            libc::syscall(
                libc::SYS_mmap,
                address,
                bytes,
                libc::PROT_NONE,
                flags,
                object.fd.as_raw_fd(),
                0usize,
            )
        };
        if p == -1 {
            return Err(MapError { bytes, errno: crate::last_errno() });
        }
        let start = usize::try_from(p).expect("a user address");
        own::add(start, bytes);
        let mapping = Self { start, bytes };
        unlock(start, bytes).map_err(|errno| MapError { bytes, errno })?;
        Ok(mapping)
    }

    /// Lets the program read and write this part of the mapping.
    ///
    /// # Errors
    /// The errno.
    ///
    /// # Panics
    /// If the range is not whole pages of this mapping.
    pub fn allow(&self, start: usize, bytes: usize) -> Result<(), i32> {
        assert!(start >= self.start && start + bytes <= self.end() && start.is_multiple_of(OS_PAGE_BYTES));
        // SAFETY: inside of our own mapping, to which more access is given.
        let rc =
            unsafe { libc::syscall(libc::SYS_mprotect, start, bytes, libc::PROT_READ | libc::PROT_WRITE) };
        if rc == 0 { Ok(()) } else { Err(crate::last_errno()) }
    }

    /// From now on every access to this part of the mapping is a fault that kills.
    ///
    /// # Errors
    /// The errno.
    ///
    /// # Panics
    /// If the range is not whole pages of this mapping.
    pub fn forbid(&self, start: usize, bytes: usize) -> Result<(), i32> {
        assert!(start >= self.start && start + bytes <= self.end() && start.is_multiple_of(OS_PAGE_BYTES));
        // SAFETY: inside of our own mapping; no reference into it exists.
        let rc = unsafe { libc::syscall(libc::SYS_mprotect, start, bytes, libc::PROT_NONE) };
        if rc == 0 { Ok(()) } else { Err(crate::last_errno()) }
    }

    /// Gives back the memory behind the first `bytes` bytes, rounded up to whole pages.
    pub fn shorten(&mut self, bytes: usize) {
        let Some(bytes) = bytes.checked_next_multiple_of(OS_PAGE_BYTES).filter(|b| *b < self.bytes) else {
            return;
        };
        unmap(self.start + bytes, self.bytes - bytes);
        self.bytes = bytes;
    }

    #[must_use]
    pub fn start(&self) -> usize {
        self.start
    }
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
    #[must_use]
    pub fn end(&self) -> usize {
        self.start + self.bytes
    }
    /// A pointer to the byte at `offset`.
    ///
    /// # Panics
    /// If `offset` is beyond the end.
    #[must_use]
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes);
        std::ptr::with_exposed_provenance_mut(self.start + offset)
    }

    /// Gives the mapping up without unmapping it.
    pub fn leak(self) -> (usize, usize) {
        let this = std::mem::ManuallyDrop::new(self);
        (this.start, this.bytes)
    }
}

/// Memory that can be mapped more than once.
#[derive(Debug)]
pub struct SharedObject {
    fd: std::os::fd::OwnedFd,
    bytes: usize,
}

impl SharedObject {
    /// A new one, all zeroes; pages are taken when they are touched.
    ///
    /// # Errors
    /// When the kernel refuses the descriptor or the size.
    pub fn new(name: &std::ffi::CStr, bytes: usize) -> Result<Self, MapError> {
        use std::os::fd::{AsFd, FromRawFd};
        let error = || MapError { bytes, errno: crate::last_errno() };
        // SAFETY: a terminated name.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        let fd = unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) };
        set_length(fd.as_fd(), bytes).map_err(|errno| MapError { bytes, errno })?;
        Ok(Self { fd, bytes })
    }

    /// A new file as such memory, for its owner only, which other processes [open](SharedObject::open).
    ///
    /// # Errors
    /// As making a file.
    pub fn create(path: &std::path::Path, bytes: usize) -> std::io::Result<Self> {
        use std::os::fd::AsFd;
        use std::os::unix::fs::OpenOptionsExt;
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
        set_length(file.as_fd(), bytes).map_err(std::io::Error::from_raw_os_error)?;
        Ok(Self { fd: file.into(), bytes })
    }

    /// The first bytes of a file that is there. If a process shortens the file, an access to the mapping is a
    /// SIGBUS.
    ///
    /// # Errors
    /// As opening a file; [`std::io::ErrorKind::InvalidData`] if it is shorter than `bytes`.
    pub fn open(path: &std::path::Path, bytes: usize) -> std::io::Result<Self> {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() < bytes as u64 {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        Ok(Self { fd: file.into(), bytes })
    }

    /// Gives this part back to the kernel: it is absent in every mapping of the object, locked or not, and
    /// zero when it comes again.
    ///
    /// # Errors
    /// The errno.
    pub fn give_back(&self, offset: usize, bytes: usize) -> Result<(), i32> {
        use std::os::fd::AsFd;
        crate::sealed::give_back(self.fd.as_fd(), offset, bytes)
    }

    /// Bytes of it that are in memory (or in swap) now; 0 if the kernel does not say.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        use std::os::fd::AsRawFd;
        // SAFETY: plain data, for which all zeroes is a value.
        let mut status: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: a descriptor of ours, and memory that is ours.
        if unsafe { libc::fstat(self.fd.as_raw_fd(), &raw mut status) } != 0 {
            return 0;
        }
        u64::try_from(status.st_blocks).unwrap_or(0) * 512
    }
}

/// Gives an object of memory its length. To go beyond the most that a file of this process may have
/// (`RLIMIT_FSIZE`) would be a signal that ends it: that is asked for first, and refused with EFBIG.
///
/// # Errors
/// The errno.
pub(crate) fn set_length(fd: std::os::fd::BorrowedFd<'_>, bytes: usize) -> Result<(), i32> {
    use std::os::fd::AsRawFd;
    let len = libc::off_t::try_from(bytes).map_err(|_| libc::EFBIG)?;
    let mut most = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: fills plain data of ours.
    if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut most) } == 0 && most.rlim_cur < bytes as u64 {
        return Err(libc::EFBIG);
    }
    // SAFETY: changes the size of an object that is not mapped yet.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), len) } == 0 { Ok(()) } else { Err(crate::last_errno()) }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.start, self.bytes);
    }
}

/// Unmaps a mapping (or its end) that was leaked before.
pub fn unmap_own(start: usize, bytes: usize) {
    unmap(start, bytes.next_multiple_of(OS_PAGE_BYTES));
}

fn unmap(start: usize, bytes: usize) {
    own::remove(start, bytes);
    // SAFETY: only called for ranges of a `Mapping`, which is not used otherwise.
    let rc = unsafe { libc::syscall(libc::SYS_munmap, start, bytes) };
    assert!(rc == 0, "munmap of our own mapping failed");
}

/// The mappings of our own in this process: code that takes over the program's memory must leave these alone.
///
/// Calls `each` with disjoint `[start, end)` ranges, in no order.
pub fn own_mappings(mut each: impl FnMut(usize, usize)) {
    own::each(&mut each);
}

/// In a forked child: forgets own mappings that it did not inherit ([`dont_fork`]).
pub fn forget_own_after_fork() {
    own::forget_not_inherited();
}

/// A forked child does not get this mapping of our own.
pub fn dont_fork(mapping: &Mapping) {
    // SAFETY: changes no content of this process.
    let done = unsafe { advise(mapping.start(), mapping.bytes(), Advice::DontFork) };
    assert!(done.is_ok(), "madvise(MADV_DONTFORK) on our own mapping failed");
    own::mark_not_inherited(mapping.start());
}

/// A fixed table, because it is read and written where nothing may be allocated.
mod own {
    use std::sync::atomic::{
        AtomicBool, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
    };

    const ROWS: usize = 512;
    static STARTS: [AtomicUsize; ROWS] = [const { AtomicUsize::new(0) }; ROWS];
    static ENDS: [AtomicUsize; ROWS] = [const { AtomicUsize::new(0) }; ROWS];
    static NOT_INHERITED: [AtomicBool; ROWS] = [const { AtomicBool::new(false) }; ROWS];

    pub(super) fn add(start: usize, bytes: usize) {
        for row in 0..ROWS {
            if STARTS[row].load(Relaxed) == 0
                && STARTS[row].compare_exchange(0, start, AcqRel, Relaxed).is_ok()
            {
                ENDS[row].store(start + bytes, Release);
                return;
            }
        }
        panic!("more than {ROWS} mappings of rampool's own in one process");
    }

    pub(super) fn remove(start: usize, bytes: usize) {
        let end = start + bytes;
        for row in 0..ROWS {
            let Some((from, to)) = read(row).filter(|(from, to)| *from < end && *to > start) else {
                continue;
            };
            match (from < start, to > end) {
                (true, true) => {
                    ENDS[row].store(start, Release);
                    add(end, to - end);
                }
                (true, false) => ENDS[row].store(start, Release),
                (false, true) => STARTS[row].store(end, Release),
                (false, false) => {
                    NOT_INHERITED[row].store(false, Release);
                    ENDS[row].store(0, Release);
                    STARTS[row].store(0, Release);
                }
            }
        }
    }

    /// What the row holds. Another thread may empty it, and a third fill it, between two looks: the start of
    /// one mapping and the end of another are none.
    fn read(row: usize) -> Option<(usize, usize)> {
        loop {
            let (start, end) = (STARTS[row].load(Acquire), ENDS[row].load(Acquire));
            if STARTS[row].load(Acquire) == start {
                return (start != 0 && end > start).then_some((start, end));
            }
        }
    }

    pub(super) fn mark_not_inherited(start: usize) {
        for row in 0..ROWS {
            if STARTS[row].load(Acquire) == start {
                NOT_INHERITED[row].store(true, Release);
            }
        }
    }

    pub(super) fn forget_not_inherited() {
        for row in 0..ROWS {
            if NOT_INHERITED[row].swap(false, AcqRel) {
                ENDS[row].store(0, Release);
                STARTS[row].store(0, Release);
            }
        }
    }

    pub(super) fn each(act: &mut dyn FnMut(usize, usize)) {
        for row in 0..ROWS {
            if let Some((start, end)) = read(row) {
                act(start, end);
            }
        }
    }
}

/// Advice that rampool gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advice {
    /// Give the pages back: they read as zeroes next time.
    DontNeed,
    /// The same, also of memory that is locked into RAM (Linux 5.18).
    DontNeedLocked,
    /// A forked child does not get this mapping.
    DontFork,
    /// A forked child does.
    DoFork,
    /// A forked child gets it empty.
    WipeOnFork,
    /// Never back it by huge pages.
    NoHugePage,
    HugePage,
    /// Never make one page of it and others that hold the same (KSM), and undo where that was done.
    Unmergeable,
    /// Make every page present now.
    PopulateRead,
    /// Make every page present and writable now (breaks copy-on-write sharing).
    PopulateWrite,
}

/// Advises the kernel about a range.
///
/// # Errors
/// The errno.
///
/// # Safety
/// For [`Advice::DontNeed`] and [`Advice::DontNeedLocked`] the range must be memory whose content its owner
/// has given up.
pub unsafe fn advise(start: usize, bytes: usize, advice: Advice) -> Result<(), i32> {
    let number = match advice {
        Advice::DontNeed => libc::MADV_DONTNEED,
        Advice::DontNeedLocked => libc::MADV_DONTNEED_LOCKED,
        Advice::DontFork => libc::MADV_DONTFORK,
        Advice::DoFork => libc::MADV_DOFORK,
        Advice::WipeOnFork => libc::MADV_WIPEONFORK,
        Advice::NoHugePage => libc::MADV_NOHUGEPAGE,
        Advice::HugePage => libc::MADV_HUGEPAGE,
        Advice::Unmergeable => libc::MADV_UNMERGEABLE,
        Advice::PopulateRead => libc::MADV_POPULATE_READ,
        Advice::PopulateWrite => libc::MADV_POPULATE_WRITE,
    };
    // SAFETY: the caller vouches for the range; the call itself reads and writes no memory of ours.
    let rc = unsafe { libc::syscall(libc::SYS_madvise, start, bytes, number) };
    if rc == 0 { Ok(()) } else { Err(crate::last_errno()) }
}

/// Makes the present page at `address` private to this process, if it is still shared with a parent or a
/// child (copy-on-write), without changing it: the kernel adds nothing to its first word, atomically
/// (`FUTEX_WAKE_OP`). Unlike a plain access it fails where a fault handler would have to answer, so the
/// thread that serves the faults of this memory may call it.
///
/// # Errors
/// The errno: EFAULT for pages that are absent or closed.
pub fn make_own(address: usize) -> Result<(), i32> {
    const ADD: usize = 1 << 28;
    // A waiter there would be woken for nothing, which waiters must expect, if the word were this.
    const UNLIKELY: usize = 0x800;
    let waker = std::sync::atomic::AtomicU32::new(0);
    let address = address & !(OS_PAGE_BYTES - 1);
    // SAFETY: adds nothing, so no content changes; no thread waits on a word of our own.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_futex,
            waker.as_ptr(),
            libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG,
            0usize,
            0usize,
            address,
            ADD | UNLIKELY,
        )
    };
    if rc >= 0 { Ok(()) } else { Err(crate::last_errno()) }
}

/// Whether there is a mapping at `address`, open or closed, its page present or not.
#[must_use]
pub fn is_mapped(address: usize) -> bool {
    let mut present = 0u8;
    let page = address & !(OS_PAGE_BYTES - 1);
    // SAFETY: the byte is ours, for the one page that is asked about; no memory is touched.
    unsafe { libc::syscall(libc::SYS_mincore, page, OS_PAGE_BYTES, &raw mut present) == 0 }
}

/// Asks for the cache line of an address: a hint, valid for any address.
#[inline]
pub fn prefetch(from: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, for any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(from.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}

/// Locks a range into RAM, pages that come later included (MLOCK_ONFAULT).
///
/// # Errors
/// The errno: EPERM or ENOMEM when RLIMIT_MEMLOCK is too small.
pub fn lock_on_fault(start: usize, bytes: usize) -> Result<(), i32> {
    // SAFETY: mlock2 changes no content.
    let rc = unsafe { libc::syscall(libc::SYS_mlock2, start, bytes, libc::MLOCK_ONFAULT) };
    if rc == 0 { Ok(()) } else { Err(crate::last_errno()) }
}

/// Ends the lock of a range, of any locker.
///
/// # Errors
/// The errno: ENOMEM where a part of the range is not mapped.
pub fn unlock(start: usize, bytes: usize) -> Result<(), i32> {
    // SAFETY: munlock changes no content.
    let rc = unsafe { libc::syscall(libc::SYS_munlock, start, bytes) };
    if rc == 0 { Ok(()) } else { Err(crate::last_errno()) }
}

/// What the kernel counts for this process, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Resident {
    /// All resident pages.
    pub total_pages: u64,
    /// Resident pages of files and shared memory.
    pub shared_pages: u64,
}

impl Resident {
    /// Anonymous resident pages.
    #[must_use]
    pub fn anonymous_pages(&self) -> u64 {
        self.total_pages.saturating_sub(self.shared_pages)
    }
}

/// Reads /proc/thread-self/statm (the first thread of the process may end before the others) again and again
/// through one descriptor: about a microsecond a reading, no allocation.
#[derive(Debug)]
pub struct ResidentCounter {
    fd: std::os::fd::OwnedFd,
}

impl ResidentCounter {
    /// # Errors
    /// When /proc is not mounted.
    pub fn open() -> Result<Self, std::io::Error> {
        Ok(Self { fd: crate::procfs::open("statm")?.into() })
    }

    #[must_use]
    pub fn read(&self) -> Resident {
        use std::os::fd::AsRawFd;
        let mut buffer = [0u8; 128];
        // SAFETY: reads into a buffer of our own, of the stated length.
        let n = unsafe { libc::pread(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        let Ok(n) = usize::try_from(n) else { return Resident::default() };
        let mut numbers = buffer[..n].split(|b| *b == b' ').map(|field| {
            field.iter().take_while(|b| b.is_ascii_digit()).fold(0u64, |v, b| v * 10 + u64::from(b - b'0'))
        });
        let _virtual = numbers.next();
        let total_pages = numbers.next().unwrap_or(0);
        let shared_pages = numbers.next().unwrap_or(0);
        Resident { total_pages, shared_pages }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resident_counter_sees_memory_that_is_touched() {
        // Other tests run meanwhile and give memory back, and the kernel counts by CPU: less than that
        // together.
        const UNSEEN_PAGES: u64 = 4096;
        let counter = ResidentCounter::open().unwrap();
        let before = counter.read().anonymous_pages();
        let memory = Mapping::anonymous(64 << 20).unwrap();
        for page in 0..memory.bytes() / OS_PAGE_BYTES {
            // SAFETY: inside our own mapping, which no reference covers.
            unsafe { memory.at(page * OS_PAGE_BYTES).write_volatile(1) };
        }
        let after = counter.read().anonymous_pages();
        let touched = memory.bytes() / OS_PAGE_BYTES;
        assert!(after + UNSEEN_PAGES >= before + touched as u64, "{before} -> {after}");
    }

    #[test]
    fn a_huge_aligned_mapping_is_aligned() {
        let memory = Mapping::huge_aligned(5 << 20).unwrap();
        assert_eq!(memory.start() % (2 << 20), 0);
        assert_eq!(memory.bytes(), 6 << 20);
    }

    #[test]
    fn a_mapping_can_lose_its_end() {
        let mut memory = Mapping::huge_aligned(1).unwrap();
        let start = memory.start();
        memory.shorten(1);
        assert_eq!((memory.start(), memory.bytes()), (start, 4096));
        memory.shorten(1 << 20);
        memory.shorten(usize::MAX);
        assert_eq!(memory.bytes(), 4096);
        let mut ours = 0;
        own_mappings(|from, to| ours += if from == start { to - from } else { 0 });
        assert_eq!(ours, 4096);
    }

    #[test]
    fn more_than_there_are_addresses_is_an_error() {
        for bytes in [usize::MAX, usize::MAX - 4095, 1 << 62] {
            assert!(Mapping::anonymous(bytes).is_err());
            assert!(Mapping::huge_aligned(bytes).is_err());
        }
    }
}
