//! userfaultfd through raw ioctls.
//!
//! One [`Uffd`] is one kernel context of this process. Every operation reports what the kernel said as an
//! enum: the caller decides what it means. The one error that every caller must expect is
//! [`Reply::MapChanging`]: an event (fork, unmap, remove, remap) waits to be read, and until it has been read
//! the kernel refuses to change mappings, because the caller's picture of memory is out of date.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use linux_raw_sys::general as k;

use crate::maps::Pagemap;

const WP_MODE_WP: u64 = 1;
const WP_MODE_DONTWAKE: u64 = 2;
/// Linux 6.4.
const CONTINUE_MODE_DONTWAKE: u64 = 1;
const CONTINUE_MODE_WP: u64 = 2;

/// Below this address no program has memory of its own.
const LOWEST: usize = 1 << 16;

// The request numbers that the kernel headers of this crate's age lack.
const fn read_write(number: u32, size: usize) -> u64 {
    (3 << 30) | ((size as u64) << 16) | (0xAA << 8) | number as u64
}
const IOCTL_MOVE: u64 = read_write(k::_UFFDIO_MOVE, size_of::<k::uffdio_move>());
const IOCTL_POISON: u64 = read_write(k::_UFFDIO_POISON, size_of::<k::uffdio_poison>());

/// What a kernel and this user's rights allow a context to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features(pub u64);

impl Features {
    pub const WP: Self = Self(k::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64);
    pub const EVENT_FORK: Self = Self(k::UFFD_FEATURE_EVENT_FORK as u64);
    pub const EVENTS_MAPPING: Self = Self(
        (k::UFFD_FEATURE_EVENT_REMAP | k::UFFD_FEATURE_EVENT_REMOVE | k::UFFD_FEATURE_EVENT_UNMAP) as u64,
    );
    pub const SIGBUS: Self = Self(k::UFFD_FEATURE_SIGBUS as u64);
    pub const THREAD_ID: Self = Self(k::UFFD_FEATURE_THREAD_ID as u64);
    pub const MINOR_SHMEM: Self = Self(k::UFFD_FEATURE_MINOR_SHMEM as u64);
    pub const WP_SHMEM: Self = Self(k::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64);
    pub const POISON: Self = Self(k::UFFD_FEATURE_POISON as u64);
    pub const WP_ASYNC: Self = Self(k::UFFD_FEATURE_WP_ASYNC as u64);
    pub const MOVE: Self = Self(k::UFFD_FEATURE_MOVE as u64);
    pub const EXACT_ADDRESS: Self = Self(k::UFFD_FEATURE_EXACT_ADDRESS as u64);
    pub const NONE: Self = Self(0);

    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Why a context could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error("this kernel has no userfaultfd (CONFIG_USERFAULTFD)")]
    NotInKernel,
    #[error("this user may not use userfaultfd here")]
    NotPermitted,
    #[error("the kernel refuses the userfaultfd features {wanted:#x} (errno {errno})")]
    Features { wanted: u64, errno: i32 },
    #[error("userfaultfd failed (errno {errno})")]
    Other { errno: i32 },
}

/// Whose faults a context serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Faults of user code and faults that the kernel takes on its behalf (`read(2)` into an absent page).
    Everything,
    /// Faults of user code only; a system call on an absent page fails with EFAULT.
    UserMode,
}

/// What the kernel said to a change of mappings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply {
    Done,
    /// This many bytes were done; ask again for the rest to learn why it stopped.
    Partial(usize),
    /// An event must be read first.
    MapChanging,
    /// The destination already has a page (install) or the batch's frame is taken (move).
    AlreadyMapped,
    /// There is no such mapping any more, or (move) no page at the source.
    Gone,
    /// The kernel cannot do it to this page now: pinned, shared with a child, a mapping of another kind, or
    /// (poison) no kernel that can.
    Busy,
    /// The process is going away.
    Exiting,
    /// No memory for a frame.
    NoMemory,
    /// An errno that this call does not define: the state of the pages is unknown.
    Unexpected(i32),
}

/// One message from the kernel.
#[derive(Debug)]
pub enum Event {
    /// Thread `thread` (its kernel id; 0 without THREAD_ID) waits for the page at `address` (page aligned),
    /// for the byte at `offset` of it (0 without EXACT_ADDRESS).
    Fault {
        address: usize,
        offset: usize,
        write: bool,
        write_protected: bool,
        thread: u32,
    },
    /// The process forked; this context serves the child.
    Fork {
        child: Uffd,
    },
    Remap {
        from: usize,
        to: usize,
        bytes: usize,
    },
    /// The content of the range was given up (MADV_DONTNEED, MADV_REMOVE, MADV_FREE). The pages themselves go
    /// *after* this event was read, some time after: by then the kernel installs and moves again.
    Remove {
        start: usize,
        end: usize,
    },
    Unmap {
        start: usize,
        end: usize,
    },
}

/// One userfaultfd context.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens a context with exactly these features. Needs no right for `UserMode`; `Everything` needs root,
    /// CAP_SYS_PTRACE, access to /dev/userfaultfd or `vm.unprivileged_userfaultfd=1`; `EVENT_FORK` needs
    /// CAP_SYS_PTRACE.
    ///
    /// # Errors
    /// [`OpenError`] says which of these is missing.
    pub fn open(scope: Scope, features: Features) -> Result<Self, OpenError> {
        let fd = match scope {
            Scope::UserMode => syscall_open(k::UFFD_USER_MODE_ONLY as i32)?,
            Scope::Everything => match syscall_open(0) {
                Ok(fd) => fd,
                Err(OpenError::NotPermitted) => device_open()?,
                Err(other) => return Err(other),
            },
        };
        let mut api = k::uffdio_api { api: u64::from(k::UFFD_API), features: features.0, ioctls: 0 };
        let this = Self { fd };
        // SAFETY: UFFDIO_API takes a pointer to an uffdio_api, which lives across the call.
        let rc = unsafe {
            libc::ioctl(this.fd.as_raw_fd(), u64::from(linux_raw_sys::ioctl::UFFDIO_API) as _, &raw mut api)
        };
        if rc != 0 {
            return Err(OpenError::Features { wanted: features.0, errno: crate::last_errno() });
        }
        Ok(this)
    }

    /// The features this kernel offers for `scope`, whether or not this user may ask for all of them.
    ///
    /// # Errors
    /// As [`Uffd::open`].
    pub fn probe(scope: Scope) -> Result<Features, OpenError> {
        let probe = match scope {
            Scope::UserMode => syscall_open(k::UFFD_USER_MODE_ONLY as i32)?,
            Scope::Everything => match syscall_open(0) {
                Ok(fd) => fd,
                Err(OpenError::NotPermitted) => device_open()?,
                Err(other) => return Err(other),
            },
        };
        let mut api = k::uffdio_api { api: u64::from(k::UFFD_API), features: 0, ioctls: 0 };
        // SAFETY: as in `open`.
        let rc = unsafe {
            libc::ioctl(probe.as_raw_fd(), u64::from(linux_raw_sys::ioctl::UFFDIO_API) as _, &raw mut api)
        };
        if rc != 0 {
            return Err(OpenError::Other { errno: crate::last_errno() });
        }
        Ok(Features(api.features))
    }

    /// Takes over a context received from elsewhere (a parent process hands a child its own).
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    #[must_use]
    pub fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// From now on faults on absent (and, with `write_protect`, protected) pages of the range come to this
    /// context.
    ///
    /// # Errors
    /// The errno, for mappings that cannot be registered (special, or of another context).
    pub fn register(&self, start: usize, bytes: usize, write_protect: bool) -> Result<(), i32> {
        let mut mode = u64::from(k::UFFDIO_REGISTER_MODE_MISSING);
        if write_protect {
            mode |= u64::from(k::UFFDIO_REGISTER_MODE_WP);
        }
        let mut arg = k::uffdio_register { range: range(start, bytes), mode, ioctls: 0 };
        self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_REGISTER), &mut arg)
    }

    /// From now on this context receives events about changes of the mapping ([`Features::EVENTS_MAPPING`]),
    /// and no faults: the kernel supplies absent pages as usual.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn watch(&self, start: usize, bytes: usize) -> Result<(), i32> {
        let mut arg = k::uffdio_register {
            range: range(start, bytes),
            mode: u64::from(k::UFFDIO_REGISTER_MODE_WP),
            ioctls: 0,
        };
        self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_REGISTER), &mut arg)
    }

    /// Faults of the range go to the kernel again; threads that waited go on.
    ///
    /// # Errors
    /// The errno.
    pub fn unregister(&self, start: usize, bytes: usize) -> Result<(), i32> {
        let mut arg = range(start, bytes);
        self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_UNREGISTER), &mut arg)
    }

    /// Maps new pages with the bytes at `from`, atomically for the program, and wakes the threads that wait
    /// for them. `bytes` is a multiple of the OS page. `from` must be memory of our own that does not change
    /// during the call.
    #[must_use]
    pub fn copy(&self, to: usize, from: *const u8, bytes: usize, write_protect: bool) -> Reply {
        let mut arg = k::uffdio_copy {
            dst: to as u64,
            src: from as u64,
            len: bytes as u64,
            mode: if write_protect { u64::from(k::UFFDIO_COPY_MODE_WP) } else { 0 },
            copy: 0,
        };
        let result = self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_COPY), &mut arg);
        reply(Call::Copy, result, arg.copy)
    }

    /// Moves pages themselves (no copy) from `from` to `to`. The destination must be registered here and
    /// empty. Threads that wait for the destination are woken where all of it was moved. `map` tells what the
    /// kernel has moved without reporting it. Where it cannot be read, what is present in memory that was
    /// empty counts as moved: only the caller may put anything there.
    #[must_use]
    pub fn move_pages(&self, to: usize, from: usize, bytes: usize, map: &Pagemap) -> Reply {
        let mut arg =
            k::uffdio_move { dst: to as u64, src: from as u64, len: bytes as u64, mode: 0, move_: 0 };
        let result = self.ioctl(IOCTL_MOVE, &mut arg);
        if result.is_ok() {
            return Reply::Done;
        }
        let said = usize::try_from(arg.move_).unwrap_or(0);
        if !map.is_readable() {
            return match reply(Call::Move, result, arg.move_) {
                Reply::AlreadyMapped if bytes == crate::OS_PAGE_BYTES => Reply::Done,
                Reply::AlreadyMapped => Reply::Partial(crate::OS_PAGE_BYTES),
                reply => reply,
            };
        }
        match moved_unsaid(map, to + said, from + said, bytes - said) {
            Err(errno) => Reply::Unexpected(errno),
            Ok(0) => reply(Call::Move, result, arg.move_),
            Ok(unsaid) if said + unsaid == bytes => Reply::Done,
            Ok(unsaid) => Reply::Partial(said + unsaid),
        }
    }

    /// Sets or lifts write protection; lifting wakes the waiting threads.
    #[must_use]
    pub fn write_protect(&self, start: usize, bytes: usize, protect: bool) -> Reply {
        self.write_protect_in_mode(start, bytes, if protect { WP_MODE_WP } else { 0 })
    }

    /// Lifts write protection; threads that wait go on waiting, until [`wake`](Self::wake).
    #[must_use]
    pub fn allow_writes_silently(&self, start: usize, bytes: usize) -> Reply {
        self.write_protect_in_mode(start, bytes, WP_MODE_DONTWAKE)
    }

    fn write_protect_in_mode(&self, start: usize, bytes: usize, mode: u64) -> Reply {
        let mut arg = k::uffdio_writeprotect { range: range(start, bytes), mode };
        let result = self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_WRITEPROTECT), &mut arg);
        reply(Call::WriteProtect, result, 0)
    }

    /// Lets threads that wait in the range try again.
    pub fn wake(&self, start: usize, bytes: usize) {
        let mut arg = range(start, bytes);
        let result = self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_WAKE), &mut arg);
        debug_assert!(result.is_ok() || result == Err(libc::ESRCH));
    }

    /// Makes every waiting thread repeat its access: events that another reader took from this context
    /// without answering are sent again.
    pub fn wake_all(&self) {
        // Beyond where any program has memory the kernel refuses the range: so many bits have the addresses
        // of x86-64, and of arm64 and others.
        for bits in [47, 48] {
            let mut arg = range(LOWEST, (1 << bits) - 2 * LOWEST);
            let _ = self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_WAKE), &mut arg);
        }
    }

    /// Makes every access to these absent pages a SIGBUS from now on: their content is lost.
    /// Threads that wait for them are woken.
    #[must_use]
    pub fn poison(&self, start: usize, bytes: usize) -> Reply {
        self.poison_in_mode(start, bytes, 0)
    }

    /// As [`Uffd::poison`], and threads that wait go on waiting.
    #[must_use]
    pub fn poison_silently(&self, start: usize, bytes: usize) -> Reply {
        const DONTWAKE: u64 = 1;
        self.poison_in_mode(start, bytes, DONTWAKE)
    }

    fn poison_in_mode(&self, start: usize, bytes: usize, mode: u64) -> Reply {
        let mut arg = k::uffdio_poison { range: range(start, bytes), mode, updated: 0 };
        let result = self.ioctl(IOCTL_POISON, &mut arg);
        reply(Call::Poison, result, arg.updated)
    }

    /// Poisons what is absent of the range, across mappings: present pages stay, and where there is no
    /// mapping there is nothing to poison. False: mappings are changing now, and nothing can be poisoned
    /// before the events of that change have been read.
    #[must_use]
    pub fn poison_absent(&self, start: usize, bytes: usize) -> bool {
        let (mut at, end) = (start, start + bytes);
        // The kernel takes a range of one mapping only, and advice or protection may have divided it: smaller
        // steps find the border, larger ones follow.
        let mut most = bytes;
        while at < end {
            let step = most.min(end - at);
            at += match self.poison(at, step) {
                Reply::Done => {
                    most = step.saturating_mul(2);
                    step
                }
                Reply::Partial(part) => part,
                Reply::AlreadyMapped => crate::OS_PAGE_BYTES,
                Reply::Exiting => return true,
                Reply::MapChanging => return false,
                Reply::Gone | Reply::Busy | Reply::Unexpected(_) if step > crate::OS_PAGE_BYTES => {
                    most = (step / 2).next_multiple_of(crate::OS_PAGE_BYTES);
                    0
                }
                Reply::Gone | Reply::Busy | Reply::NoMemory | Reply::Unexpected(_) => crate::OS_PAGE_BYTES,
            };
        }
        true
    }

    /// As [`register`](Self::register) for a mapping of shared memory: faults on pages that its object has,
    /// but that are not mapped here, come to this context as well.
    ///
    /// # Errors
    /// The errno.
    pub fn register_shared(&self, start: usize, bytes: usize) -> Result<(), i32> {
        let mode =
            k::UFFDIO_REGISTER_MODE_MISSING | k::UFFDIO_REGISTER_MODE_MINOR | k::UFFDIO_REGISTER_MODE_WP;
        let mut arg = k::uffdio_register { range: range(start, bytes), mode: u64::from(mode), ioctls: 0 };
        self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_REGISTER), &mut arg)
    }

    /// Maps pages that the object of a shared mapping has already; threads that wait for them go on waiting,
    /// until [`wake`](Self::wake).
    #[must_use]
    pub fn continue_silently(&self, start: usize, bytes: usize, write_protect: bool) -> Reply {
        let mode = CONTINUE_MODE_DONTWAKE | if write_protect { CONTINUE_MODE_WP } else { 0 };
        let mut arg = k::uffdio_continue { range: range(start, bytes), mode, mapped: 0 };
        let result = self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_CONTINUE), &mut arg);
        reply(Call::Continue, result, arg.mapped)
    }

    /// Whether a change of mappings is under way: from before it is made, or from before its event where the
    /// change comes later, until its caller runs again after the event was read.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        // The kernel looks at that before it looks at the range, which is none.
        let mut arg = k::uffdio_zeropage { range: range(0, 0), mode: 0, zeropage: 0 };
        self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_ZEROPAGE), &mut arg) == Err(libc::EAGAIN)
    }

    /// Whether the page at `address`, of a private mapping, is registered with a context; `None` if a change
    /// of mappings is under way, or the process has ended.
    #[must_use]
    pub fn is_registered(&self, address: usize) -> Option<bool> {
        // The kernel refuses this for private memory, after it has looked for the mapping.
        let mut arg = k::uffdio_continue { range: range(address, crate::OS_PAGE_BYTES), mode: 0, mapped: 0 };
        match self.ioctl(u64::from(linux_raw_sys::ioctl::UFFDIO_CONTINUE), &mut arg) {
            Err(libc::EINVAL) => Some(true),
            Err(libc::ENOENT) => Some(false),
            _ => None,
        }
    }

    /// Reads up to `N` events without blocking and appends them to `out`; returns how many.
    pub fn read_events<const N: usize>(&self, out: &mut Vec<Event>) -> usize {
        // SAFETY: uffd_msg is plain data; all-zero is a valid value.
        let mut messages: [k::uffd_msg; N] = unsafe { std::mem::zeroed() };
        // SAFETY: the buffer is ours and of the stated length.
        let n =
            unsafe { libc::read(self.fd.as_raw_fd(), messages.as_mut_ptr().cast(), size_of_val(&messages)) };
        let Ok(n) = usize::try_from(n) else { return 0 };
        let count = n / size_of::<k::uffd_msg>();
        for message in &messages[..count] {
            if let Some(event) = decode(message) {
                out.push(event);
            }
        }
        count
    }

    fn ioctl<T>(&self, request: u64, arg: &mut T) -> Result<(), i32> {
        loop {
            // SAFETY: each caller pairs the request number with the structure the kernel expects for it; it
            // lives across the call.
            let rc = unsafe { libc::ioctl(self.fd.as_raw_fd(), request as _, std::ptr::from_mut(arg)) };
            if rc == 0 {
                return Ok(());
            }
            let errno = crate::last_errno();
            if errno != libc::EINTR {
                return Err(errno);
            }
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn syscall_open(flags: i32) -> Result<OwnedFd, OpenError> {
    // SAFETY: a system call without pointers; a non-negative result is a new descriptor with no other owner.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | flags) };
    match i32::try_from(fd) {
        // SAFETY: as above.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(match crate::last_errno() {
            libc::ENOSYS => OpenError::NotInKernel,
            libc::EPERM | libc::EACCES => OpenError::NotPermitted,
            errno => OpenError::Other { errno },
        }),
    }
}

fn device_open() -> Result<OwnedFd, OpenError> {
    const USERFAULTFD_IOC_NEW: u64 = 0xAA00;
    // SAFETY: a constant, terminated path.
    let device = unsafe { libc::open(c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    if device < 0 {
        return Err(OpenError::NotPermitted);
    }
    // SAFETY: `device` was just opened and has no other owner.
    let device = unsafe { OwnedFd::from_raw_fd(device) };
    // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and returns a new descriptor.
    let fd = unsafe {
        libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, libc::O_CLOEXEC | libc::O_NONBLOCK)
    };
    if fd < 0 {
        return Err(OpenError::Other { errno: crate::last_errno() });
    }
    // SAFETY: the kernel just returned it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn range(start: usize, bytes: usize) -> k::uffdio_range {
    k::uffdio_range { start: start as u64, len: bytes as u64 }
}

/// How many bytes were moved by a call that does not count them.
///
/// Where the kernel finds a page that it is just moving itself (it compacts memory, say), it retries. Linux
/// 6.18 moves the page, still remembers to retry, and does so: it finds the destination taken, and fails with
/// EEXIST, or with the count of what it moved before. A caller that trusts this result loses the pages.
///
/// # Errors
/// The errno of a page map that cannot be read: then the outcome is unknown.
fn moved_unsaid(map: &Pagemap, to: usize, from: usize, bytes: usize) -> Result<usize, i32> {
    let mut moved = 0;
    while moved < bytes && !map.has(from + moved)? && map.has(to + moved)? {
        moved += crate::OS_PAGE_BYTES;
    }
    Ok(moved)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Copy,
    Move,
    WriteProtect,
    Poison,
    Continue,
}

/// What an errno of a call means. One that is not here has no meaning: [`Reply::Unexpected`].
fn meaning(call: Call, errno: i32) -> Reply {
    match (call, errno) {
        (_, libc::EAGAIN) => Reply::MapChanging,
        (_, libc::ESRCH) => Reply::Exiting,
        (_, libc::ENOMEM) => Reply::NoMemory,
        // No mapping of this context, or more than one.
        (_, libc::ENOENT) => Reply::Gone,
        (Call::Copy | Call::Move | Call::Poison | Call::Continue, libc::EEXIST) => Reply::AlreadyMapped,
        // Pinned or shared; mappings of different kinds; an entry of the page table that cannot move.
        (Call::Move, libc::EBUSY | libc::EINVAL | libc::EFAULT) => Reply::Busy,
        // The object lacks the page.
        (Call::Continue, libc::EFAULT) => Reply::Busy,
        // Before Linux 6.6 there is no such call.
        (Call::Poison, libc::EINVAL) => Reply::Busy,
        _ => Reply::Unexpected(errno),
    }
}

fn reply(call: Call, result: Result<(), i32>, done: i64) -> Reply {
    let Err(errno) = result else { return Reply::Done };
    if let Ok(bytes) = usize::try_from(done)
        && bytes > 0
    {
        return Reply::Partial(bytes);
    }
    meaning(call, errno)
}

fn decode(message: &k::uffd_msg) -> Option<Event> {
    let address = |a: u64| usize::try_from(a).expect("64-bit addresses fit");
    // The structure is packed: fields are copied out, never referenced.
    match u32::from(message.event) {
        k::UFFD_EVENT_PAGEFAULT => {
            // SAFETY: the event tells which member of the union the kernel filled.
            let fault = unsafe { message.arg.pagefault };
            let flags = fault.flags;
            Some(Event::Fault {
                address: address(fault.address) & !(crate::OS_PAGE_BYTES - 1),
                offset: address(fault.address) & (crate::OS_PAGE_BYTES - 1),
                write: flags & u64::from(k::UFFD_PAGEFAULT_FLAG_WRITE) != 0,
                write_protected: flags & u64::from(k::UFFD_PAGEFAULT_FLAG_WP) != 0,
                // SAFETY: the only member of this union; zero where THREAD_ID was not asked for.
                thread: unsafe { fault.feat.ptid },
            })
        }
        k::UFFD_EVENT_FORK => {
            // SAFETY: as above; the kernel created this descriptor for us.
            let child = unsafe {
                let fork = message.arg.fork;
                OwnedFd::from_raw_fd(i32::try_from(fork.ufd).expect("a descriptor"))
            };
            Some(Event::Fork { child: Uffd { fd: child } })
        }
        k::UFFD_EVENT_REMAP => {
            // SAFETY: as above.
            let remap = unsafe { message.arg.remap };
            Some(Event::Remap { from: address(remap.from), to: address(remap.to), bytes: address(remap.len) })
        }
        k::UFFD_EVENT_REMOVE | k::UFFD_EVENT_UNMAP => {
            // SAFETY: as above.
            let remove = unsafe { message.arg.remove };
            let (start, end) = (address(remove.start), address(remove.end));
            Some(if u32::from(message.event) == k::UFFD_EVENT_REMOVE {
                Event::Remove { start, end }
            } else {
                Event::Unmap { start, end }
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OS_PAGE_BYTES;
    use crate::memory::Mapping;

    #[test]
    fn each_errno_of_each_call_has_one_meaning_and_the_rest_is_unexpected() {
        const CALLS: [Call; 5] = [Call::Copy, Call::Move, Call::WriteProtect, Call::Poison, Call::Continue];
        for call in CALLS {
            for errno in 1..134 {
                let expected = match (errno, call) {
                    (libc::EAGAIN, _) => Reply::MapChanging,
                    (libc::ESRCH, _) => Reply::Exiting,
                    (libc::ENOMEM, _) => Reply::NoMemory,
                    (libc::ENOENT, _) => Reply::Gone,
                    (libc::EEXIST, Call::WriteProtect) => Reply::Unexpected(errno),
                    (libc::EEXIST, _) => Reply::AlreadyMapped,
                    (libc::EBUSY | libc::EINVAL | libc::EFAULT, Call::Move)
                    | (libc::EFAULT, Call::Continue)
                    | (libc::EINVAL, Call::Poison) => Reply::Busy,
                    _ => Reply::Unexpected(errno),
                };
                assert_eq!(reply(call, Err(errno), 0), expected, "{call:?}, errno {errno}");
                assert_eq!(
                    reply(call, Err(errno), -i64::from(errno)),
                    expected,
                    "the kernel counts an error as one"
                );
                assert_eq!(reply(call, Err(errno), 8192), Reply::Partial(8192), "{call:?}, errno {errno}");
            }
            assert_eq!(reply(call, Ok(()), 4096), Reply::Done);
        }
    }

    /// What the kernel itself says.
    #[test]
    fn the_kernel_says_what_is_written_here() {
        let bytes = 4 * OS_PAGE_BYTES;
        let (program, frames, zeroes) = (
            Mapping::anonymous(bytes).unwrap(),
            Mapping::anonymous(bytes).unwrap(),
            Mapping::anonymous(bytes).unwrap(),
        );
        let Ok(features) = Uffd::probe(Scope::UserMode) else {
            return rampool_testing::skip("uffd-user", "what the kernel says");
        };
        let can_move = features.has(Features::MOVE);
        let wanted = if can_move { Features::WP.with(Features::MOVE) } else { Features::WP };
        let uffd = Uffd::open(Scope::UserMode, wanted).unwrap();
        let (to, from) = (program.start(), zeroes.at(0).cast_const());
        assert_eq!(uffd.copy(to, from, OS_PAGE_BYTES, false), Reply::Gone, "not registered");
        assert_eq!(uffd.write_protect(to, OS_PAGE_BYTES, true), Reply::Gone, "not registered");
        assert_eq!(uffd.is_registered(to), Some(false));
        uffd.register(to, bytes, true).unwrap();
        uffd.register(frames.start(), bytes, false).unwrap();
        assert_eq!(uffd.is_registered(to), Some(true));
        assert!(!uffd.is_changing());
        assert_eq!(
            uffd.copy(to, std::ptr::without_provenance(OS_PAGE_BYTES), OS_PAGE_BYTES, false),
            Reply::Unexpected(libc::EFAULT),
            "a source that is not there"
        );
        assert_eq!(
            uffd.copy(to, from, OS_PAGE_BYTES / 2, false),
            Reply::Unexpected(libc::EINVAL),
            "half a page"
        );
        assert_eq!(
            uffd.copy(frames.start(), from, OS_PAGE_BYTES, true),
            Reply::Unexpected(libc::EINVAL),
            "protection that is not registered"
        );
        assert_eq!(uffd.copy(to, from, OS_PAGE_BYTES, true), Reply::Done);
        assert_eq!(uffd.copy(to, from, OS_PAGE_BYTES, true), Reply::AlreadyMapped);
        assert_eq!(uffd.copy(to + OS_PAGE_BYTES, from, OS_PAGE_BYTES, false), Reply::Done);
        if can_move {
            let map = Pagemap::open().unwrap();
            assert_eq!(uffd.move_pages(frames.start(), to, OS_PAGE_BYTES, &map), Reply::Done);
            assert_eq!(
                uffd.move_pages(frames.start(), to, OS_PAGE_BYTES, &Pagemap::without()),
                Reply::Done,
                "it can only be what was moved"
            );
            assert_eq!(
                uffd.move_pages(frames.start() + OS_PAGE_BYTES, to, OS_PAGE_BYTES, &map),
                Reply::Gone,
                "nothing is there"
            );
            assert_eq!(
                uffd.move_pages(frames.start(), to + OS_PAGE_BYTES, OS_PAGE_BYTES, &map),
                Reply::AlreadyMapped,
                "the frame is taken"
            );
        }
        // Closed before the mappings go.
        drop(uffd);
    }
}
