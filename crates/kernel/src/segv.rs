//! Page faults without userfaultfd: SIGSEGV and mprotect.
//!
//! Absent pages are PROT_NONE, clean ones PROT_READ. A thread that meets one gets SIGSEGV; the handler writes
//! the address into a slot, rings the pager's doorbell and sleeps until the pager has answered; then it
//! returns and the access is repeated. The handler decides nothing, takes no lock and calls nothing but
//! system calls. A SIGSEGV at an unmanaged address goes to the previous handler of the signal.
//!
//! What this cannot do: serve a system call on an absent page (it fails with EFAULT), see munmap, mremap and
//! madvise (the caller must be told of them), serve a thread that blocks SIGSEGV (the kernel ends the
//! process).

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use crate::chain::{Chain, is_fetch, is_write};
use crate::doorbell::Doorbell;
use crate::memory::{Advice, MapError, Mapping, advise};
use crate::pagetable::{self, Mark};
use crate::selfmem::{Protection, SelfMemory, SelfMemoryError, protect};
use crate::thread::SpawnError;
use crate::uffd::{Event, Reply};
use crate::{OS_PAGE_BYTES, last_errno};

/// Pagers of this kind in one process.
const CATCHERS: usize = 60;
/// Threads that can wait for a page of one pager at a time; more take turns.
const SLOTS: usize = 512;

const ABSENT: Mark = 0;
const CLEAN: Mark = 1;
const WRITABLE: Mark = 2;
const POISONED: Mark = 3;

fn mark_of(id: u8, state: Mark) -> Mark {
    (Mark::from(id) + 1) << 2 | state
}

/// Catches the faults of one pager.
#[derive(Debug)]
pub struct Segv {
    id: u8,
    slots: &'static Slots,
    doorbell: Doorbell,
    memory: SelfMemory,
    /// More boundaries between protections than this, and installs are refused.
    most_boundaries: i64,
    crowded: bool,
}

/// Why faults cannot be caught this way.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SegvError {
    #[error(transparent)]
    Memory(#[from] MapError),
    #[error(transparent)]
    SelfMemory(#[from] SelfMemoryError),
    #[error("more than {CATCHERS} pagers in one process")]
    TooMany,
    #[error("the SIGSEGV handler cannot be installed (errno {0})")]
    Handler(i32),
    #[error("cannot create the pager's doorbell: {0}")]
    Doorbell(#[from] SpawnError),
}

const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const POSTED: u32 = 2;
const TAKEN: u32 = 3;
const ANSWERED: u32 = 4;

#[derive(Debug)]
struct Slot {
    state: AtomicU32,
    thread: AtomicU32,
    address: AtomicUsize,
    write: AtomicBool,
}

#[derive(Debug)]
struct Slots {
    /// A pager listens.
    alive: AtomicBool,
    /// The doorbell's.
    word: AtomicU32,
    /// Slots from here on were never used.
    high: AtomicUsize,
    all: [Slot; SLOTS],
}

static CATCHING: [AtomicPtr<Slots>; CATCHERS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CATCHERS];
static TAKEN_IDS: [AtomicBool; CATCHERS] = [const { AtomicBool::new(false) }; CATCHERS];

/// In a forked child: the pagers of the parent are not here, and their tables were wiped.
pub fn forget_after_fork() {
    for (taken, catching) in TAKEN_IDS.iter().zip(&CATCHING) {
        catching.store(std::ptr::null_mut(), Ordering::Release);
        taken.store(false, Ordering::Release);
    }
}

impl Segv {
    /// # Errors
    /// [`SegvError`].
    pub fn open() -> Result<Self, SegvError> {
        let memory = SelfMemory::open(true)?;
        let table = Mapping::anonymous(size_of::<Slots>())?;
        handler::install().map_err(SegvError::Handler)?;
        let id = TAKEN_IDS
            .iter()
            .position(|taken| !taken.swap(true, Ordering::AcqRel))
            .ok_or(SegvError::TooMany)?;
        // SAFETY: zeroed memory is a valid table of free slots; it is never unmapped, because a handler may
        // be looking at it at any time.
        let slots: &'static Slots = unsafe { &*table.at(0).cast::<Slots>() };
        // A forked child has no pager until it makes one of its own: its table is wiped, and it gets its
        // SIGSEGV.
        // SAFETY: changes nothing here.
        unsafe { advise(table.start(), table.bytes(), Advice::WipeOnFork) }.map_err(SegvError::Handler)?;
        let _ = table.leak();
        let doorbell = Doorbell::new(&slots.word)?;
        slots.alive.store(true, Ordering::Release);
        CATCHING[id].store(std::ptr::from_ref(slots).cast_mut(), Ordering::Release);
        let most_mappings = std::fs::read_to_string("/proc/sys/vm/max_map_count")
            .ok()
            .and_then(|t| t.trim().parse().ok())
            .unwrap_or(65530i64);
        Ok(Self {
            id: u8::try_from(id).expect("few"),
            slots,
            doorbell,
            memory,
            most_boundaries: most_mappings * 3 / 4 - 2000,
            crowded: false,
        })
    }

    /// Readable when faults wait to be read.
    #[must_use]
    pub fn raw_fd(&self) -> RawFd {
        self.doorbell.raw_fd()
    }

    /// Takes a range over with every page closed; what is present must be opened again with
    /// [`Segv::open_present`].
    ///
    /// # Errors
    /// The errno.
    pub fn register(&self, start: usize, bytes: usize) -> Result<(), i32> {
        self.mark(start, bytes, ABSENT)?;
        protect(start, bytes, Protection::None).inspect_err(|_| {
            // Part of it may be closed already; what cannot be taken over stays the program's.
            let _ = protect(start, bytes, Protection::ReadWrite);
            let _ = pagetable::set(start, bytes, 0);
        })
    }

    /// These pages of a registered range have content.
    pub fn open_present(&self, start: usize, bytes: usize) {
        if protect(start, bytes, Protection::ReadWrite).is_ok() {
            self.mark(start, bytes, WRITABLE).expect("the range has its table");
        }
        self.wake(start, bytes);
    }

    /// The range is not managed any more; what is mapped there stays unchanged.
    pub fn unregister(&self, start: usize, bytes: usize) {
        let _ = pagetable::set(start, bytes, 0);
        self.wake(start, bytes);
    }

    /// The program's mapping was moved.
    ///
    /// # Errors
    /// ENOMEM: the table of the new place.
    pub fn moved(&self, from: usize, to: usize, bytes: usize) -> Result<(), i32> {
        for at in (0..bytes).step_by(OS_PAGE_BYTES) {
            let mark = pagetable::mark(from + at);
            pagetable::set(to + at, OS_PAGE_BYTES, mark).map_err(|_| libc::ENOMEM)?;
        }
        let _ = pagetable::set(from, bytes, 0);
        self.wake(from, bytes);
        Ok(())
    }

    /// The content of the range is given up: its pages are absent from now on.
    pub fn discard(&self, start: usize, bytes: usize) {
        if protect(start, bytes, Protection::None).is_ok() {
            self.mark(start, bytes, ABSENT).expect("the range has its table");
        }
        // SAFETY: the program gave the content up.
        let _ = unsafe { advise(start, bytes, Advice::DontNeed) };
    }

    /// Fills closed pages with the bytes at `from` (they are zero without), then opens them for reading or
    /// (`!write_protect`) writing, and wakes the waiting threads.
    #[must_use]
    pub fn install(&mut self, to: usize, from: Option<usize>, bytes: usize, write_protect: bool) -> Reply {
        match state_of(pagetable::mark(to), self.id) {
            Some(ABSENT) => {}
            Some(_) => return Reply::AlreadyMapped,
            None => return Reply::Gone,
        }
        // Up to the first page that is there already.
        let run = (OS_PAGE_BYTES..bytes)
            .step_by(OS_PAGE_BYTES)
            .find(|at| state_of(pagetable::mark(to + at), self.id) != Some(ABSENT))
            .unwrap_or(bytes);
        if pagetable::boundaries() > self.most_boundaries {
            self.crowded = true;
            return Reply::NoMemory;
        }
        if let Some(from) = from {
            // SAFETY: the pager's own frames, which are not changed; the closed page is absent, so nothing of
            // the program's is replaced.
            let filled = unsafe { self.memory.write(to, std::ptr::with_exposed_provenance(from), run) };
            if filled < run {
                // SAFETY: what was written is still where it came from.
                let _ = unsafe { advise(to, run, Advice::DontNeed) };
                // Nothing is mapped there: the program unmapped it, and the event follows.
                return Reply::Gone;
            }
        }
        let (protection, state) =
            if write_protect { (Protection::Read, CLEAN) } else { (Protection::ReadWrite, WRITABLE) };
        if protect(to, run, protection).is_err() {
            // SAFETY: as above.
            let _ = unsafe { advise(to, run, Advice::DontNeed) };
            let _ = protect(to, run, Protection::None);
            self.crowded = true;
            return Reply::NoMemory;
        }
        self.mark(to, run, state).expect("the range has its table");
        self.wake(to, run);
        if run == bytes { Reply::Done } else { Reply::Partial(run) }
    }

    /// Opens clean pages for writing and wakes the waiting threads.
    #[must_use]
    pub fn unprotect(&mut self, start: usize, bytes: usize) -> Reply {
        if state_of(pagetable::mark(start), self.id).is_none() {
            return Reply::Gone;
        }
        if protect(start, bytes, Protection::ReadWrite).is_err() {
            self.crowded = true;
            return Reply::NoMemory;
        }
        self.mark(start, bytes, WRITABLE).expect("the range has its table");
        self.wake(start, bytes);
        Reply::Done
    }

    /// Closes pages, copies them to `to` and gives them back to the kernel. No thread can write them in
    /// between: it waits at the closed page.
    ///
    /// # Safety
    /// `to` is the pager's own and `bytes` long.
    #[must_use]
    pub unsafe fn evict(&mut self, from: usize, to: usize, bytes: usize) -> Reply {
        if state_of(pagetable::mark(from), self.id).is_none() {
            return Reply::Gone;
        }
        if protect(from, bytes, Protection::None).is_err() {
            return Reply::Busy;
        }
        // SAFETY: the caller's promise.
        let copied = unsafe { self.memory.read(from, std::ptr::with_exposed_provenance_mut(to), bytes) };
        // SAFETY: the content is in `to` now. The kernel refuses locked memory, and then it stays.
        let kept = copied < bytes || unsafe { advise(from, bytes, Advice::DontNeed) }.is_err();
        if kept {
            // Readable again. A page that was writable before meets one more fault, and is opened by it.
            let _ = protect(from, bytes, Protection::Read);
            self.mark(from, bytes, CLEAN).expect("the range has its table");
            self.wake(from, bytes);
            return Reply::Busy;
        }
        self.mark(from, bytes, ABSENT).expect("the range has its table");
        Reply::Done
    }

    /// Every access to these absent pages is a SIGBUS from now on.
    pub fn poison(&self, start: usize, bytes: usize) {
        self.mark(start, bytes, POISONED).expect("the range has its table");
        self.wake(start, bytes);
    }

    /// Lets threads that wait in the range try again.
    pub fn wake(&self, start: usize, bytes: usize) {
        for slot in self.in_use() {
            let address = slot.address.load(Ordering::Relaxed);
            if address >= start && address < start + bytes {
                slot.answer();
            }
        }
    }

    /// Appends the faults that wait; those that need no answer any more are sent on.
    pub fn read_events(&self, out: &mut Vec<Event>) {
        self.doorbell.clear();
        for slot in self.in_use() {
            if slot.state.compare_exchange(POSTED, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            let exact = slot.address.load(Ordering::Relaxed);
            let (address, offset) = (exact & !(OS_PAGE_BYTES - 1), exact & (OS_PAGE_BYTES - 1));
            let write = slot.write.load(Ordering::Relaxed);
            match state_of(pagetable::mark(address), self.id) {
                Some(ABSENT) => {
                    let thread = slot.thread.load(Ordering::Relaxed);
                    out.push(Event::Fault { address, offset, write, write_protected: false, thread });
                }
                Some(CLEAN) if write => {
                    let thread = slot.thread.load(Ordering::Relaxed);
                    out.push(Event::Fault { address, offset, write, write_protected: true, thread });
                }
                _ => slot.answer(),
            }
        }
    }

    /// Whether an install or an unprotection failed since the last call because there are too many mappings.
    pub fn take_crowded(&mut self) -> bool {
        std::mem::take(&mut self.crowded)
    }

    fn in_use(&self) -> impl Iterator<Item = &Slot> {
        self.slots.all[..self.slots.high.load(Ordering::Acquire)].iter()
    }

    fn mark(&self, start: usize, bytes: usize, state: Mark) -> Result<(), i32> {
        pagetable::set(start, bytes, mark_of(self.id, state)).map_err(|_| libc::ENOMEM)
    }
}

impl Drop for Segv {
    /// Threads that wait, or come later, get the SIGSEGV itself: never zeroes.
    fn drop(&mut self) {
        CATCHING[usize::from(self.id)].store(std::ptr::null_mut(), Ordering::Release);
        self.slots.alive.store(false, Ordering::Release);
        for slot in self.in_use() {
            slot.answer();
        }
        TAKEN_IDS[usize::from(self.id)].store(false, Ordering::Release);
    }
}

impl Slot {
    fn answer(&self) {
        for state in [POSTED, TAKEN] {
            if self.state.compare_exchange(state, ANSWERED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                // SAFETY: wakes the one thread that may wait on this word, which is never unmapped.
                unsafe {
                    libc::syscall(
                        libc::SYS_futex,
                        self.state.as_ptr(),
                        libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                        1,
                    )
                };
            }
        }
    }
}

/// The state in a mark, if the page is managed by `id`.
fn state_of(mark: Mark, id: u8) -> Option<Mark> {
    (mark >> 2 == Mark::from(id) + 1).then_some(mark & 3)
}

/// Whether a pager of this kind manages the page at `address`. Async-signal-safe.
#[must_use]
pub fn manages(address: usize) -> bool {
    (1..=CATCHERS).contains(&usize::from(pagetable::mark(address) >> 2))
}

/// Whether a pager of this kind manages any page of `[start, end)`.
#[must_use]
pub fn manages_any(start: usize, end: usize) -> bool {
    (start..end).step_by(OS_PAGE_BYTES).any(manages)
}

/// Whether every managed page of `[start, end)` is present.
#[must_use]
pub fn all_present(start: usize, end: usize) -> bool {
    (start..end)
        .step_by(OS_PAGE_BYTES)
        .all(|page| !manages(page) || matches!(pagetable::mark(page) & 3, CLEAN | WRITABLE))
}

pub(crate) use handler::CHAIN;

mod handler {
    use super::*;

    pub(crate) static CHAIN: Chain = Chain::new(libc::SIGSEGV);
    /// There is a mapping, which does not allow the access.
    pub(super) const SEGV_ACCERR: i32 = 2;

    pub(super) fn install() -> Result<(), i32> {
        // SAFETY: plain data that sigemptyset fills.
        let none = unsafe {
            let mut none = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            none
        };
        // On an alternate stack where the thread has one; other signals may come while a page is waited for.
        CHAIN.install(on_segv, libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART, &none)
    }

    pub(super) extern "C" fn on_segv(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the errno of the interrupted code is saved and put back.
        unsafe {
            let errno = libc::__errno_location();
            let saved = *errno;
            // SAFETY: the kernel gives a valid siginfo; si_addr is meaningful for faults (positive codes).
            let is_fault = (*info).si_code > 0;
            let (address, write) = ((*info).si_addr().addr(), is_write(context));
            let was_given_back =
                || (*info).si_code == SEGV_ACCERR && !is_fetch(context) && is_open(address, write);
            if !(is_fault && (serve(address, write) || was_given_back())) {
                CHAIN.foreign(info, context);
            }
            *errno = saved;
        }
    }

    /// Whether the access would succeed now: the pager may have brought the page, and given it back to the
    /// program for good, after this thread had met it closed and before its handler looked. The access is
    /// repeated then. Kernels before 5.14 do not tell.
    pub(super) fn is_open(address: usize, write: bool) -> bool {
        let page = address & !(OS_PAGE_BYTES - 1);
        // SAFETY: makes present what the program may access anyway; no content changes.
        unsafe {
            advise(page, OS_PAGE_BYTES, if write { Advice::PopulateWrite } else { Advice::PopulateRead })
        }
        .is_ok()
    }

    /// Waits for the page at `address`. False if no pager has it.
    fn serve(address: usize, write: bool) -> bool {
        let mark = pagetable::mark(address);
        let Some(id) = usize::from(mark >> 2).checked_sub(1).filter(|id| *id < CATCHERS) else {
            return false;
        };
        if mark & 3 == POISONED {
            raise_bus(address);
            return true;
        }
        let slots = CATCHING[id].load(Ordering::Acquire);
        // SAFETY: a non-null table is never unmapped.
        let Some(slots) = (unsafe { slots.as_ref() }) else { return false };
        if !slots.alive.load(Ordering::Acquire) {
            return false;
        }
        let Some(slot) = claim(slots) else {
            // SAFETY: gives the CPU up; the access is repeated and comes here again.
            unsafe { libc::sched_yield() };
            return true;
        };
        slot.address.store(address, Ordering::Relaxed);
        slot.write.store(write, Ordering::Relaxed);
        slot.thread.store(crate::thread::current(), Ordering::Relaxed);
        slot.state.store(POSTED, Ordering::Release);
        Doorbell::ring(&slots.word);
        // After a second without an answer the access is simply repeated, which asks again.
        let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
        loop {
            let state = slot.state.load(Ordering::Acquire);
            if state == ANSWERED {
                break;
            }
            // SAFETY: waits on a word that is never unmapped, with a deadline.
            let rc = unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    slot.state.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    state,
                    &raw const second,
                )
            };
            if rc != 0 && last_errno() == libc::ETIMEDOUT {
                break;
            }
        }
        slot.state.store(FREE, Ordering::Release);
        true
    }

    fn claim(slots: &Slots) -> Option<&Slot> {
        for (index, slot) in slots.all.iter().enumerate() {
            if slot.state.load(Ordering::Relaxed) == FREE
                && slot.state.compare_exchange(FREE, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                slots.high.fetch_max(index + 1, Ordering::AcqRel);
                return Some(slot);
            }
        }
        None
    }

    /// The content of the page is lost: SIGBUS at the access, as the kernel does it for a poisoned page.
    fn raise_bus(address: usize) {
        #[repr(C)]
        struct Information {
            signal: i32,
            errno: i32,
            code: i32,
            pad: i32,
            address: usize,
            rest: [u64; 13],
        }
        const BUS_MCEERR_AR: i32 = 4;
        let information = Information {
            signal: libc::SIGBUS,
            errno: 0,
            code: BUS_MCEERR_AR,
            pad: 0,
            address,
            rest: [0; 13],
        };
        // SAFETY: the structure has the size and the layout of the kernel's siginfo; the signal goes to this
        // very thread. It is delivered before the access is repeated.
        unsafe {
            libc::syscall(
                libc::SYS_rt_tgsigqueueinfo,
                libc::getpid(),
                crate::thread::current(),
                libc::SIGBUS,
                &raw const information,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_waits_at_an_absent_page_until_it_is_installed() {
        let mut segv = Segv::open().unwrap();
        let memory = Mapping::anonymous(4 * OS_PAGE_BYTES).unwrap();
        segv.register(memory.start(), memory.bytes()).unwrap();
        let frame = Mapping::anonymous(OS_PAGE_BYTES).unwrap();
        // SAFETY: our own page.
        unsafe { frame.at(8).write(7) };
        let at = memory.at(OS_PAGE_BYTES + 8).expose_provenance();
        // SAFETY: inside the mapping, which outlives the thread.
        let reader = std::thread::spawn(move || unsafe {
            std::ptr::with_exposed_provenance::<u8>(at).read_volatile()
        });
        let mut events = Vec::new();
        while events.is_empty() {
            let mut poll = libc::pollfd { fd: segv.raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one descriptor of ours.
            unsafe { libc::poll(&raw mut poll, 1, 1000) };
            segv.read_events(&mut events);
        }
        let Event::Fault { address, write: false, write_protected: false, .. } = events[0] else {
            panic!("{events:?}")
        };
        assert_eq!(address, memory.start() + OS_PAGE_BYTES);
        assert_eq!(segv.install(address, Some(frame.start()), OS_PAGE_BYTES, true), Reply::Done);
        assert_eq!(reader.join().unwrap(), 7);
        assert_eq!(segv.install(address, Some(frame.start()), OS_PAGE_BYTES, true), Reply::AlreadyMapped);
        // SAFETY: the frame is ours.
        assert_eq!(unsafe { segv.evict(address, frame.start(), OS_PAGE_BYTES) }, Reply::Done);
        segv.unregister(memory.start(), memory.bytes());
        assert!(!manages(address));
    }

    #[test]
    fn an_access_is_repeated_if_its_page_was_given_back_before_the_handler_looked() {
        let memory = Mapping::anonymous(2 * OS_PAGE_BYTES).unwrap();
        let closed = memory.start() + OS_PAGE_BYTES;
        for (protection, open) in [
            (Protection::ReadWrite, [true, true]),
            (Protection::Read, [true, false]),
            (Protection::None, [false, false]),
        ] {
            protect(closed, OS_PAGE_BYTES, protection).unwrap();
            assert_eq!(
                [false, true].map(|write| handler::is_open(closed + 8, write)),
                open,
                "{protection:?}"
            );
        }
    }

    /// As in a thread that got no CPU between its fault and the handler of its signal.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_late_handler_leaves_the_programs_action_alone() {
        let segv = Segv::open().unwrap();
        let memory = Mapping::anonymous(OS_PAGE_BYTES).unwrap();
        segv.register(memory.start(), OS_PAGE_BYTES).unwrap();
        // As the pager gives memory back whose protection the program changes.
        protect(memory.start(), OS_PAGE_BYTES, Protection::ReadWrite).unwrap();
        segv.unregister(memory.start(), OS_PAGE_BYTES);
        // SAFETY: plain data, for which all zeroes is a value; the address of a fault lies 16 bytes behind
        // the start (sigaction(2), siginfo.h).
        let action = unsafe {
            let (mut info, mut context): (libc::siginfo_t, libc::ucontext_t) =
                (std::mem::zeroed(), std::mem::zeroed());
            (info.si_signo, info.si_code) = (libc::SIGSEGV, handler::SEGV_ACCERR);
            (&raw mut info).cast::<usize>().add(2).write(memory.start());
            handler::on_segv(libc::SIGSEGV, &raw mut info, (&raw mut context).cast());
            let mut action: libc::sigaction = std::mem::zeroed();
            assert_eq!(libc::sigaction(libc::SIGSEGV, std::ptr::null(), &raw mut action), 0);
            action.sa_sigaction
        };
        assert_eq!(action, handler::on_segv as *const () as usize);
    }
}
