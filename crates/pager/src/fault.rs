//! How the faults of a program's memory are caught: the ladder.
//!
//! ```text
//!   Full       userfaultfd for user code and for the kernel on its behalf
//!   UserMode   userfaultfd for user code; a system call on an absent page fails with EFAULT
//!   InThread   as UserMode, but the thread that meets a fault serves it itself, in a SIGBUS handler: by request only
//!   Segv       SIGSEGV and mprotect; system calls as above; mappings must not be changed behind our back
//! ```
//!
//! A [`FaultCatcher`] is all that the pager knows of the kernel. On kernels without UFFDIO_MOVE (before 6.8)
//! the userfaultfd fault modes evict by copying (`copying`). Nothing here takes a decision about pages.

mod copying;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use rampool_kernel::guard::{self, Taking};
use rampool_kernel::maps::Pagemap;
use rampool_kernel::memory::{Advice, advise, make_own, unlock};
use rampool_kernel::pagetable::{self, Mark};
use rampool_kernel::probe::{Capabilities, FaultMode, NEEDED};
use rampool_kernel::segv::{Segv, SegvError};
use rampool_kernel::selfmem::SelfMemoryError;
use rampool_kernel::sigbus::{Serve, SigbusError, Slot};
use rampool_kernel::thread::SpawnError;
use rampool_kernel::uffd::{Event, Features, OpenError, Reply, Scope, Uffd};
use rampool_paging::cache::EvictOutcome;
use rampool_wire::units::OS_PAGE_BYTES;

pub use copying::CopyThread;
use copying::Copying;

/// Which fault mode to use.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum FaultModeChoice {
    /// The best one that this machine allows.
    #[default]
    Auto,
    Full,
    UserMode,
    /// User mode, with faults served by the faulting thread: faster, for programs that can live with its
    /// limits ([`crate::region`] lists them). Never chosen by `Auto`, nor for programs that know nothing of
    /// rampool.
    InThread,
    Segv,
}

/// What is asked of a [`FaultCatcher`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CatchConfig {
    pub fault_mode: FaultModeChoice,
    /// Evict by copying even where the kernel can move pages (Linux 6.8): for tests and comparisons.
    pub evict_by_copy: bool,
}

/// Why faults cannot be caught.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatchError {
    #[error("{0}")]
    Uffd(#[from] OpenError),
    #[error("this kernel's userfaultfd lacks write protection or mapping events (features {0:#x})")]
    TooOld(u64),
    #[error("{0}")]
    Segv(#[from] SegvError),
    #[error("{0}")]
    Sigbus(#[from] SigbusError),
    #[error("faults served in the faulting thread need a kernel that can move pages (Linux 6.8)")]
    CannotMove,
    #[error("{0}")]
    SelfMemory(#[from] SelfMemoryError),
    #[error("{0}")]
    Thread(#[from] SpawnError),
}

/// A run of pages that must leave: from the program at `from` to the pager's frames at `to`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Departure {
    pub from: usize,
    pub to: usize,
    pub bytes: usize,
}

/// Catches faults, and changes what is mapped. All calls come from the pager's thread, none waits for the
/// program.
#[derive(Debug)]
pub enum FaultCatcher {
    Uffd(UffdCatcher),
    Segv(Segv),
}

/// The two userfaultfd modes.
#[derive(Debug)]
pub struct UffdCatcher {
    uffd: Arc<Uffd>,
    scope: Scope,
    features: Features,
    /// `None`: pages are moved.
    copying: Option<Copying>,
    /// Where the pager's frames lie, and how many bytes.
    frames: (usize, usize),
    /// The kernel has put pages into frames that should be empty: the program has locked all of its memory.
    frames_filled: bool,
    /// What managed pages are marked with in the table of pages.
    mark: Mark,
    /// `None`: faults are read as events, by the pager's thread.
    in_thread: Option<Slot>,
    /// Says what the kernel has moved without saying so.
    map: Pagemap,
    /// What the kernel said to a move, and no move has.
    unexpected: Option<i32>,
    /// Nothing comes or leaves now: changes of mappings were read, and not applied yet.
    held: bool,
}

impl FaultCatcher {
    /// Opens the chosen fault mode.
    ///
    /// # Errors
    /// [`CatchError`] says what is missing.
    pub fn open(config: CatchConfig) -> Result<Self, CatchError> {
        let fault_mode = match config.fault_mode {
            FaultModeChoice::Auto => Capabilities::probe().best_fault_mode(),
            FaultModeChoice::Full => FaultMode::Full,
            FaultModeChoice::UserMode | FaultModeChoice::InThread => FaultMode::UserMode,
            FaultModeChoice::Segv => FaultMode::Segv,
        };
        let scope = match fault_mode {
            FaultMode::Full => Scope::Everything,
            FaultMode::UserMode => Scope::UserMode,
            FaultMode::Segv => return Ok(Self::Segv(Segv::open()?)),
        };
        let offered = Uffd::probe(scope)?;
        if !offered.has(NEEDED) {
            return Err(CatchError::TooOld(offered.0));
        }
        let mut wanted = NEEDED;
        for optional in [Features::THREAD_ID, Features::EXACT_ADDRESS, Features::POISON, Features::MOVE] {
            if offered.has(optional) && !(optional == Features::MOVE && config.evict_by_copy) {
                wanted = wanted.with(optional);
            }
        }
        if config.fault_mode == FaultModeChoice::InThread {
            if !wanted.has(Features::MOVE) {
                return Err(CatchError::CannotMove);
            }
            let features = wanted.with(Features::SIGBUS);
            let uffd = Arc::new(Uffd::open(scope, features)?);
            let slot = Slot::take()?;
            return Ok(Self::Uffd(UffdCatcher {
                uffd,
                scope,
                features,
                copying: None,
                frames: (0, 0),
                frames_filled: false,
                mark: slot.mark(),
                in_thread: Some(slot),
                map: page_map(),
                unexpected: None,
                held: false,
            }));
        }
        // Fork events need CAP_SYS_PTRACE, which the rest of the full mode does not.
        if scope == Scope::Everything
            && let Ok(uffd) = Uffd::open(scope, wanted.with(Features::EVENT_FORK))
        {
            return Self::from_uffd(uffd, scope, wanted.with(Features::EVENT_FORK), None);
        }
        Self::from_uffd(Uffd::open(scope, wanted)?, scope, wanted, None)
    }

    /// Goes on with a context that a parent process opened with these features. `thread`: started while this
    /// process's memory was still served, because creating a thread needs the program's heap; one is started
    /// now where it is needed and not given.
    ///
    /// # Errors
    /// When eviction by copying lacks a resource.
    pub fn from_uffd(
        uffd: Uffd,
        scope: Scope,
        features: Features,
        thread: Option<CopyThread>,
    ) -> Result<Self, CatchError> {
        let uffd = Arc::new(uffd);
        let copying = match thread {
            _ if features.has(Features::MOVE) => None,
            Some(thread) => Some(Copying::new(thread, Arc::clone(&uffd))?),
            None => Some(Copying::new(CopyThread::start()?, Arc::clone(&uffd))?),
        };
        let mark = a_mark_of_its_own();
        Ok(Self::Uffd(UffdCatcher {
            uffd,
            scope,
            features,
            copying,
            frames: (0, 0),
            frames_filled: false,
            mark,
            in_thread: None,
            map: page_map(),
            unexpected: None,
            held: false,
        }))
    }

    #[must_use]
    pub fn fault_mode(&self) -> FaultMode {
        match self {
            Self::Uffd(catcher) if catcher.scope == Scope::Everything => FaultMode::Full,
            Self::Uffd(_) => FaultMode::UserMode,
            Self::Segv(_) => FaultMode::Segv,
        }
    }

    /// Threads that meet a fault call `server` from now on. Only for a catcher that was opened as
    /// [`FaultModeChoice::InThread`].
    pub fn serve_in_thread(&self, server: &'static dyn Serve) {
        if let Self::Uffd(UffdCatcher { in_thread: Some(slot), .. }) = self {
            slot.serve_by(server);
        }
    }

    /// The features of the userfaultfd context, none without one.
    #[must_use]
    pub fn features(&self) -> Features {
        match self {
            Self::Uffd(catcher) => catcher.features,
            Self::Segv(_) => Features::NONE,
        }
    }

    /// A fork is seen, and the child's faults too. Otherwise a child must not inherit managed memory.
    #[must_use]
    pub fn follows_forks(&self) -> bool {
        self.features().has(Features::EVENT_FORK)
    }

    /// munmap, mremap and madvise are seen. Otherwise the code that changes managed mappings must report it.
    #[must_use]
    pub fn follows_mappings(&self) -> bool {
        matches!(self, Self::Uffd(_))
    }

    /// System calls may be given absent pages.
    #[must_use]
    pub fn serves_system_calls(&self) -> bool {
        self.fault_mode() == FaultMode::Full
    }

    /// A fault says which byte is waited for, and what is present can be read by this process without meeting
    /// a fault.
    #[must_use]
    pub fn tells_exact_addresses(&self) -> bool {
        match self {
            Self::Uffd(catcher) => {
                catcher.scope == Scope::Everything && catcher.features.has(Features::EXACT_ADDRESS)
            }
            Self::Segv(_) => false,
        }
    }

    /// Pages that are lost can be made to raise SIGBUS.
    #[must_use]
    pub fn can_poison(&self) -> bool {
        match self {
            Self::Uffd(catcher) => catcher.features.has(Features::POISON),
            Self::Segv(_) => true,
        }
    }

    /// Becomes readable when there are events.
    #[must_use]
    pub fn raw_fd(&self) -> RawFd {
        match self {
            Self::Uffd(catcher) => catcher.uffd.raw_fd(),
            Self::Segv(segv) => segv.raw_fd(),
        }
    }

    /// Keeps the userfaultfd context open after the catcher has ended: once a context is closed, what is
    /// absent reads as zeroes. `None` in the SIGSEGV mode, where closed memory stays closed.
    #[must_use]
    pub fn keep_open(&self) -> Option<Arc<Uffd>> {
        match self {
            Self::Uffd(catcher) => Some(Arc::clone(&catcher.uffd)),
            Self::Segv(_) => None,
        }
    }

    /// From now on faults on absent and on protected pages of the range come here.
    ///
    /// # Errors
    /// The errno of a range that cannot be managed.
    pub fn manage(&self, start: usize, bytes: usize) -> Result<(), i32> {
        let _taking = (!self.serves_system_calls()).then(|| {
            let taking = Taking::begin();
            // Memory in use by a system call must not be absent when it counts as managed.
            guard::each_in_use(|from, to| {
                let (from, to) = (from.max(start), to.next_multiple_of(OS_PAGE_BYTES).min(start + bytes));
                if from < to {
                    // SAFETY: changes no content. Where it fails (before Linux 5.14) the call is repeated.
                    let _ = unsafe { advise(from, to - from, Advice::PopulateWrite) };
                }
            });
            taking
        });
        match self {
            Self::Uffd(catcher) => {
                keep_apart(start, bytes);
                catcher.uffd.register(start, bytes, true)?;
                catcher.mark(start, bytes)
            }
            Self::Segv(segv) => segv.register(start, bytes),
        }?;
        self.inheritable(start, bytes, false);
        Ok(())
    }

    /// Threads that touch absent pages of the range, which may have gaps, wait until it is managed and
    /// served. For memory that no system call could wait for nothing is done, nor where the kernel refuses
    /// it: something else has been mapped there.
    pub(crate) fn hold_absent(&self, start: usize, bytes: usize) {
        if let Self::Uffd(catcher) = self
            && self.serves_system_calls()
        {
            keep_apart(start, bytes);
            let _ = catcher.uffd.register(start, bytes, true);
        }
    }

    /// Ends [`Self::hold_absent`] for a whole mapping.
    pub(crate) fn let_go(&self, start: usize, bytes: usize) {
        if let Self::Uffd(catcher) = self {
            let _ = catcher.uffd.unregister(start, bytes);
        }
    }

    /// Where forks are not seen, a child does not inherit managed memory, because it would find zeroes where
    /// pages are absent. Around a fork after which the child takes care of that itself, it may.
    pub fn inheritable(&self, start: usize, bytes: usize, inheritable: bool) {
        if !self.follows_forks() {
            let advice = if inheritable { Advice::DoFork } else { Advice::DontFork };
            // SAFETY: changes no content. A mapping that is gone meanwhile is not inherited at all.
            let _ = unsafe { advise(start, bytes, advice) };
        }
    }

    /// These pages of a range just managed are present.
    pub fn present(&self, start: usize, bytes: usize) {
        if let Self::Segv(segv) = self {
            segv.open_present(start, bytes);
        }
    }

    /// The program's mapping is gone, or is the program's own again with every page present.
    pub fn unmanage(&self, start: usize, bytes: usize) {
        match self {
            Self::Uffd(catcher) => {
                let _ = catcher.unmark(start, bytes);
            }
            Self::Segv(segv) => segv.unregister(start, bytes),
        }
    }

    /// The program moved a mapping.
    pub fn moved(&self, from: usize, to: usize, bytes: usize) {
        match self {
            Self::Uffd(catcher) => catcher.unmark(from, bytes).and_then(|()| catcher.mark(to, bytes)),
            Self::Segv(segv) => segv.moved(from, to, bytes),
        }
        .expect("the kernel has memory for the table of pages");
    }

    /// The program gave the content of the range up.
    pub fn discarded(&self, start: usize, bytes: usize) {
        if let Self::Segv(segv) = self {
            segv.discard(start, bytes);
        }
    }

    /// Prepares the pager's own frames, one mapping, to receive pages.
    ///
    /// # Errors
    /// The errno.
    pub fn prepare_frames(&mut self, start: usize, bytes: usize) -> Result<(), i32> {
        match self {
            Self::Uffd(UffdCatcher { uffd, copying: None, frames, .. }) => {
                *frames = (start, bytes);
                uffd.register(start, bytes, false)
            }
            _ => Ok(()),
        }
    }

    /// Gives the pager's own frames back to the kernel. Registered memory raises an event when it is emptied,
    /// and the caller itself reads events: so all of them leave the context first. (A part would have to
    /// become a mapping of its own, and the program may have all that the kernel allows it.)
    ///
    /// # Safety
    /// The content of these frames is not needed.
    pub unsafe fn empty_frames(&self, start: usize, bytes: usize) {
        let registered = match self {
            Self::Uffd(UffdCatcher { uffd, copying: None, frames, .. }) => Some((uffd, *frames)),
            _ => None,
        };
        if let Some((uffd, (start, bytes))) = registered {
            uffd.unregister(start, bytes).expect("the pager's own frames are registered");
        }
        // SAFETY: the caller's promise.
        let mut emptied = unsafe { advise(start, bytes, Advice::DontNeed) };
        if emptied == Err(libc::EINVAL) {
            // The program has locked all of its memory, and these with it.
            let (start_of_all, bytes_of_all) = registered.map_or((start, bytes), |(_, frames)| frames);
            // SAFETY: the caller's promise.
            emptied = unlock(start_of_all, bytes_of_all)
                .and_then(|()| unsafe { advise(start, bytes, Advice::DontNeed) });
        }
        emptied.expect("the pager's own frames can be emptied");
        if let Some((uffd, (start, bytes))) = registered {
            uffd.register(start, bytes, false).expect("the pager's own frames can be registered");
        }
    }

    /// Answers a fault in the pager's own frames, if that is where `address` lies: the kernel takes one for
    /// each of them when the program locks all of its memory (`mlockall`), and gets them filled. They are
    /// emptied again before pages move there.
    pub fn let_frames_be_filled(&mut self, address: usize) -> bool {
        match self {
            Self::Uffd(UffdCatcher {
                uffd, copying: None, frames: (start, bytes), frames_filled, ..
            }) if (*start..*start + *bytes).contains(&address) => {
                *frames_filled = true;
                // Threads that wait there are woken.
                uffd.unregister(*start, *bytes).expect("the pager's own frames can be unregistered");
                true
            }
            _ => false,
        }
    }

    /// The pager is about to unmap its frames: they leave the context. Otherwise the kernel waits until that
    /// event is read, for as long as the context is open, and a forked child has it open as well.
    pub fn release_frames(&mut self) {
        if let Self::Uffd(UffdCatcher { uffd, copying: None, frames: (start, bytes @ 1..), .. }) = self {
            uffd.unregister(*start, *bytes).expect("the pager's own frames are registered");
        }
    }

    /// Appends what happened; returns at once.
    pub fn read_events(&mut self, out: &mut Vec<Event>) {
        let before = out.len();
        match self {
            Self::Uffd(UffdCatcher { uffd, copying: None, .. }) => {
                uffd.read_events::<16>(out);
            }
            Self::Uffd(UffdCatcher { uffd, copying: Some(copying), .. }) => copying.read_events(uffd, out),
            Self::Segv(segv) => segv.read_events(out),
        }
        for event in &out[before..] {
            // The program goes on before the change is applied: its system calls find the memory marked.
            if let (Self::Uffd(catcher), Event::Remap { to, bytes, .. }) = (&*self, event) {
                catcher.mark(*to, *bytes).expect("the kernel has memory for the table of pages");
            }
        }
    }

    /// There are events, even if [`raw_fd`](Self::raw_fd) does not show them.
    #[must_use]
    pub fn has_events(&self) -> bool {
        matches!(self, Self::Uffd(UffdCatcher { copying: Some(copying), .. }) if copying.has_events())
    }

    /// A change of mappings is under way, whether or not its event was read.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        match self {
            Self::Uffd(UffdCatcher { copying: Some(copying), .. }) if copying.change_waits() => true,
            Self::Uffd(catcher) => catcher.uffd.is_changing(),
            // A thread that changes mappings reports it first, and waits until that is done.
            Self::Segv(_) => false,
        }
    }

    /// Whether the page at `address` is mapped and registered; false also while mappings change.
    #[must_use]
    pub fn is_registered(&self, address: usize) -> bool {
        match self {
            Self::Uffd(catcher) => catcher.uffd.is_registered(address) == Some(true),
            Self::Segv(_) => true,
        }
    }

    /// While `held`, everything that would install pages, move them or change their protection is answered as
    /// if the kernel refused it, for a change of mappings.
    pub fn hold(&mut self, held: bool) {
        if let Self::Uffd(catcher) = self {
            catcher.held = held;
        }
    }

    fn is_held(&self) -> bool {
        match self {
            Self::Uffd(UffdCatcher { held, copying, .. }) => {
                *held || copying.as_ref().is_some_and(Copying::change_waits)
            }
            Self::Segv(_) => false,
        }
    }

    /// Maps pages with the bytes at `from`, atomically for the program, and wakes the threads that wait for
    /// them. `zero`: the bytes are all zero.
    #[must_use]
    pub fn install(
        &mut self,
        to: usize,
        from: usize,
        bytes: usize,
        write_protect: bool,
        zero: bool,
    ) -> Reply {
        match self {
            _ if self.is_held() => Reply::MapChanging,
            Self::Uffd(catcher) => {
                catcher.uffd.copy(to, std::ptr::with_exposed_provenance(from), bytes, write_protect)
            }
            Self::Segv(segv) => segv.install(to, (!zero).then_some(from), bytes, write_protect),
        }
    }

    /// The program is changing mappings, or has changed them, and the event about it was not read yet.
    /// `managed`: an address that was just registered, whose page is not protected yet.
    #[must_use]
    pub fn mappings_change(&mut self, managed: usize) -> bool {
        match self {
            // The kernel refuses this from before the change until the event has been read; otherwise it does
            // nothing here.
            Self::Uffd(_) => self.unprotect(managed, OS_PAGE_BYTES) == Reply::MapChanging,
            // A thread that changes mappings reports it first, and nothing is taken over until that is done.
            Self::Segv(_) => false,
        }
    }

    /// Opens protected pages for writing and wakes the waiting threads.
    #[must_use]
    pub fn unprotect(&mut self, start: usize, bytes: usize) -> Reply {
        match self {
            _ if self.is_held() => Reply::MapChanging,
            Self::Uffd(catcher) => catcher.uffd.write_protect(start, bytes, false),
            Self::Segv(segv) => segv.unprotect(start, bytes),
        }
    }

    /// Takes pages out of the program. `frames` is where the batch's frames begin; `outcomes[n]` is set for
    /// every page that leaves to frame `n`.
    pub fn evict(&mut self, departures: &[Departure], frames: usize, outcomes: &mut [EvictOutcome]) {
        if self.is_held() {
            for departure in departures {
                outcomes_of(departure, frames, outcomes).fill(EvictOutcome::Later);
            }
            return;
        }
        if self.serves_system_calls() {
            return self.evict_all(departures, frames, outcomes);
        }
        // A call that begins while these leave waits for their end, and finds them absent before it begins.
        let mut free = Vec::new();
        let copying = matches!(self, Self::Uffd(UffdCatcher { copying: Some(_), .. }));
        for departures in departures.chunks(if copying { departures.len().max(1) } else { 1 }) {
            free.clear();
            let _taking = Taking::begin();
            for departure in departures {
                leave_guarded(*departure, frames, outcomes, &mut free);
            }
            self.evict_all(&free, frames, outcomes);
        }
    }

    fn evict_all(&mut self, departures: &[Departure], frames: usize, outcomes: &mut [EvictOutcome]) {
        if matches!(self, Self::Uffd(UffdCatcher { frames_filled: true, .. })) {
            // SAFETY: pages are about to move there, so nothing needed is there yet.
            departures
                .iter()
                .for_each(|departure| unsafe { self.empty_frames(departure.to, departure.bytes) });
        }
        match self {
            Self::Uffd(UffdCatcher { uffd, copying: None, frames: own, map, unexpected, .. }) => {
                for departure in departures {
                    let moved = move_out(uffd, map, *departure, outcomes_of(departure, frames, outcomes));
                    *unexpected = unexpected.or(moved.err());
                }
                let stays =
                    |outcome: &EvictOutcome| matches!(outcome, EvictOutcome::Busy | EvictOutcome::BusyOpened);
                if !outcomes.is_empty() && outcomes.iter().all(stays) {
                    // The kernel moves nothing from memory that is not locked to memory that is, as frames
                    // are once the program has locked all of its own.
                    let _ = unlock(own.0, own.1);
                }
            }
            Self::Uffd(UffdCatcher { uffd, copying: Some(copying), unexpected, .. }) => {
                *unexpected = unexpected.or(copying.evict(uffd, departures, frames, outcomes).err());
            }
            Self::Segv(segv) => {
                for Departure { from, to, bytes } in departures.iter().copied() {
                    // SAFETY: departures lead into the pager's own frames.
                    let outcome = match unsafe { segv.evict(from, to, bytes) } {
                        Reply::Done => EvictOutcome::Moved,
                        Reply::Gone => EvictOutcome::Vanished,
                        _ => EvictOutcome::Busy,
                    };
                    outcomes_of(&Departure { from, to, bytes }, frames, outcomes).fill(outcome);
                }
            }
        }
    }

    /// An errno that a move or a protection does not define: the state of the pages is unknown.
    pub fn take_unexpected(&mut self) -> Option<i32> {
        match self {
            Self::Uffd(catcher) => catcher.unexpected.take(),
            Self::Segv(_) => None,
        }
    }

    /// Frames of the pager's own that the kernel may take at any time, because the program gave them up
    /// lazily (MADV_FREE) before they were moved here, are kept from now on; what the kernel has taken is
    /// zero. They leave the context meanwhile: otherwise a thread that touches a missing one waits for
    /// itself.
    ///
    /// # Safety
    /// The frames are pages of the pager's own, and are not touched otherwise.
    pub unsafe fn keep_frames(&self, frames: &[usize]) {
        let Self::Uffd(UffdCatcher { uffd, copying: None, frames: (start, bytes), .. }) = self else {
            return;
        };
        if frames.is_empty() {
            return;
        }
        uffd.unregister(*start, *bytes).expect("the pager's own frames are registered");
        for frame in frames {
            let byte: *mut u8 = std::ptr::with_exposed_provenance_mut(*frame);
            // SAFETY: the caller's promise. A page that was written is not dropped.
            unsafe { byte.write_volatile(byte.read_volatile()) };
        }
        uffd.register(*start, *bytes, false).expect("the pager's own frames can be registered");
    }

    /// Lets threads that wait in the range try again.
    pub fn wake(&self, start: usize, bytes: usize) {
        match self {
            Self::Uffd(catcher) => catcher.uffd.wake(start, bytes),
            Self::Segv(segv) => segv.wake(start, bytes),
        }
    }

    /// Makes every access to these absent pages a SIGBUS from now on, page by page where some are present.
    ///
    /// # Errors
    /// The errno that the kernel gives without a meaning here: the pages are not poisoned.
    pub fn poison(&mut self, start: usize, bytes: usize) -> Result<(), i32> {
        match self {
            // The page is asked for again when it is met.
            _ if self.is_held() => {}
            Self::Uffd(catcher) => {
                let mut at = start;
                while at < start + bytes {
                    at += match catcher.uffd.poison(at, start + bytes - at) {
                        Reply::Done => start + bytes - at,
                        Reply::Partial(part) => part,
                        // An event waits, or there is no memory now; the page is asked for again when it is
                        // met.
                        Reply::MapChanging | Reply::NoMemory | Reply::Exiting => break,
                        // Present, or unmapped by now.
                        Reply::AlreadyMapped | Reply::Gone | Reply::Busy => OS_PAGE_BYTES,
                        Reply::Unexpected(errno) => return Err(errno),
                    };
                }
                catcher.uffd.wake(start, bytes);
            }
            Self::Segv(segv) => segv.poison(start, bytes),
        }
        Ok(())
    }

    /// Makes every access to this page a SIGBUS if it is not there: `Done` then, and no thread is woken.
    /// None: nothing can be poisoned here.
    pub fn poison_unless_there(&mut self, address: usize) -> Option<Reply> {
        match self {
            _ if self.is_held() => None,
            Self::Uffd(catcher) if catcher.features.has(Features::POISON) => {
                Some(catcher.uffd.poison_silently(address, OS_PAGE_BYTES))
            }
            _ => None,
        }
    }

    /// The process has nearly as many mappings as the kernel allows: fewer pages must be resident.
    pub fn take_crowded(&mut self) -> bool {
        match self {
            Self::Uffd(_) => false,
            Self::Segv(segv) => segv.take_crowded(),
        }
    }
}

/// The kernel drops the write protection of pages that it merges with others (KSM, as of Linux 6.18): what is
/// written afterwards would be lost. So pages of managed memory are not merged.
pub(crate) fn keep_apart(start: usize, bytes: usize) {
    // SAFETY: changes no content. It fails where the kernel merges no pages, or the mapping is gone.
    let _ = unsafe { advise(start, bytes, Advice::Unmergeable) };
}

/// In the table of pages, for a catcher whose faults are read as events. Other kinds use lower marks; a mark
/// comes again only after some 65000 others.
fn a_mark_of_its_own() -> Mark {
    const FIRST: Mark = 0x100;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    FIRST + NEXT.fetch_add(1, Ordering::Relaxed) % (Mark::MAX - FIRST)
}

impl UffdCatcher {
    fn mark(&self, start: usize, bytes: usize) -> Result<(), i32> {
        match self.scope {
            Scope::Everything => Ok(()),
            Scope::UserMode => pagetable::set(start, bytes, self.mark).map_err(|_| libc::ENOMEM),
        }
    }

    /// Only what is marked by this catcher: when the event about an unmapped range is read, the range may be
    /// another one's already.
    fn unmark(&self, start: usize, bytes: usize) -> Result<(), i32> {
        match self.scope {
            Scope::Everything => Ok(()),
            Scope::UserMode => pagetable::replace(start, bytes, self.mark, 0).map_err(|_| libc::ENOMEM),
        }
    }
}

/// Passes on to `free` the ranges that no system call is using; the rest stays.
fn leave_guarded(
    Departure { from, to, bytes }: Departure,
    frames: usize,
    outcomes: &mut [EvictOutcome],
    free: &mut Vec<Departure>,
) {
    if !guard::in_use(from, from + bytes) {
        return free.push(Departure { from, to, bytes });
    }
    for at in (0..bytes).step_by(OS_PAGE_BYTES) {
        let page = Departure { from: from + at, to: to + at, bytes: OS_PAGE_BYTES };
        if guard::in_use(page.from, page.from + OS_PAGE_BYTES) {
            outcomes_of(&page, frames, outcomes).fill(EvictOutcome::Busy);
        } else {
            free.push(page);
        }
    }
}

fn outcomes_of<'a>(
    departure: &Departure,
    frames: usize,
    outcomes: &'a mut [EvictOutcome],
) -> &'a mut [EvictOutcome] {
    let first = (departure.to - frames) / OS_PAGE_BYTES;
    &mut outcomes[first..first + departure.bytes / OS_PAGE_BYTES]
}

/// The page map of this process, or none where it may not be read.
fn page_map() -> Pagemap {
    Pagemap::open().unwrap_or_else(|_| Pagemap::without())
}

/// Moves a run of pages, one outcome a page.
///
/// # Errors
/// An errno without a meaning, of the first page that has one; it counts as still there.
fn move_out(
    uffd: &Uffd,
    map: &Pagemap,
    Departure { from, to, bytes }: Departure,
    outcomes: &mut [EvictOutcome],
) -> Result<(), i32> {
    let mut unexpected = Ok(());
    let mut at = 0;
    let mut most = bytes;
    while at < bytes {
        let wanted = (bytes - at).min(most);
        let (done, outcome) = match uffd.move_pages(to + at, from + at, wanted, map) {
            Reply::Done => {
                most = most.saturating_mul(2).min(bytes);
                (wanted, EvictOutcome::Moved)
            }
            Reply::Partial(part) => (part, EvictOutcome::Moved),
            // The range may lie in two mappings: smaller steps find the border.
            Reply::Busy if wanted > OS_PAGE_BYTES => {
                most = half(wanted);
                continue;
            }
            // The mapping has just gone, or moved: the kernel looks for it before it looks for changes.
            Reply::Gone if uffd.is_changing() => (bytes - at, EvictOutcome::Later),
            Reply::Gone => (OS_PAGE_BYTES, EvictOutcome::Vanished),
            // An event must be read before anything moves: the rest stays where it is.
            Reply::MapChanging | Reply::Exiting => (bytes - at, EvictOutcome::Later),
            Reply::Busy => (OS_PAGE_BYTES, move_shared(uffd, map, to + at, from + at)),
            Reply::Unexpected(errno) => {
                unexpected = unexpected.and(Err(errno));
                (OS_PAGE_BYTES, EvictOutcome::Busy)
            }
            Reply::NoMemory | Reply::AlreadyMapped => (OS_PAGE_BYTES, EvictOutcome::Busy),
        };
        outcomes[at / OS_PAGE_BYTES..(at + done) / OS_PAGE_BYTES].fill(outcome);
        at += done;
    }
    unexpected
}

/// Moves a page that the kernel refused: it may be shared with a child or a parent since a fork, and then a
/// copy of its own can move. The copy is made as a write would make it, so the page must be open for a
/// moment.
fn move_shared(uffd: &Uffd, map: &Pagemap, to: usize, from: usize) -> EvictOutcome {
    match uffd.write_protect(from, OS_PAGE_BYTES, false) {
        Reply::Done => {}
        Reply::MapChanging | Reply::Exiting => return EvictOutcome::Later,
        _ => return EvictOutcome::Busy,
    }
    if make_own(from).is_ok() && uffd.move_pages(to, from, OS_PAGE_BYTES, map) == Reply::Done {
        EvictOutcome::MovedOpened
    } else {
        // Pinned, or in use by the kernel.
        EvictOutcome::BusyOpened
    }
}

/// Half of a number of bytes, in whole pages, at least one.
pub(crate) fn half(bytes: usize) -> usize {
    (bytes / 2 / OS_PAGE_BYTES).max(1) * OS_PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use rampool_kernel::memory::Mapping;

    #[test]
    fn what_the_kernel_moved_without_saying_so_has_moved() {
        const PAGES: usize = 40;
        let bytes = PAGES * OS_PAGE_BYTES;
        if !Uffd::probe(Scope::UserMode).is_ok_and(|features| features.has(Features::MOVE)) {
            return rampool_testing::skip("move", "pages that were moved before");
        }
        let (program, frames) =
            (Mapping::huge_aligned(bytes).unwrap(), Mapping::huge_aligned(bytes).unwrap());
        // Closed before the mappings go: otherwise the unmapping waits until its event is read.
        let uffd = Uffd::open(Scope::UserMode, NEEDED.with(Features::MOVE)).unwrap();
        let word = |memory: &Mapping, page: usize| memory.at(page * OS_PAGE_BYTES).cast::<u64>();
        // A child of another test would share the pages, and they would be busy.
        for memory in [&program, &frames] {
            // SAFETY: changes no content.
            unsafe { advise(memory.start(), bytes, Advice::DontFork) }.unwrap();
        }
        for page in 0..PAGES - 1 {
            // SAFETY: our own memory.
            unsafe { word(&program, page).write(page as u64 + 1) };
        }
        uffd.register(program.start(), bytes, true).unwrap();
        uffd.register(frames.start(), bytes, false).unwrap();
        for page in [0, 7, 8, 9, 30] {
            let at = page * OS_PAGE_BYTES;
            assert_eq!(
                uffd.move_pages(frames.start() + at, program.start() + at, OS_PAGE_BYTES, &page_map()),
                Reply::Done
            );
        }
        let mut outcomes = [EvictOutcome::Later; PAGES];
        move_out(
            &uffd,
            &page_map(),
            Departure { from: program.start(), to: frames.start(), bytes },
            &mut outcomes,
        )
        .unwrap();
        assert_eq!(outcomes[..PAGES - 1], [EvictOutcome::Moved; PAGES - 1]);
        assert_eq!(outcomes[PAGES - 1], EvictOutcome::Vanished, "one that was never there");
        for page in 0..PAGES - 1 {
            // SAFETY: the pages are in our frames now.
            assert_eq!(unsafe { word(&frames, page).read() }, page as u64 + 1);
        }
    }

    #[test]
    fn a_range_that_another_pager_has_taken_over_meanwhile_keeps_its_marks() {
        let bytes = 16 * OS_PAGE_BYTES;
        for fault_mode in [FaultModeChoice::UserMode, FaultModeChoice::InThread] {
            let open = || FaultCatcher::open(CatchConfig { fault_mode, ..CatchConfig::default() });
            let (Ok(before), Ok(after)) = (open(), open()) else {
                return rampool_testing::skip("uffd-user", "two pagers in one process");
            };
            let memory = Mapping::anonymous(bytes).unwrap();
            before.manage(memory.start(), bytes).unwrap();
            // As if it had been unmapped and mapped again, before the events were read.
            before.keep_open().unwrap().unregister(memory.start(), bytes).unwrap();
            after.manage(memory.start(), bytes).unwrap();
            let mark = pagetable::mark(memory.start());
            before.unmanage(memory.start(), bytes);
            assert_eq!(pagetable::mark(memory.start()), mark, "{fault_mode:?}: unmapped");
            let elsewhere = Mapping::anonymous(bytes).unwrap();
            before.moved(memory.start(), elsewhere.start(), bytes);
            assert_eq!(pagetable::mark(memory.start()), mark, "{fault_mode:?}: moved");
            assert_ne!(pagetable::mark(elsewhere.start()), mark, "{fault_mode:?}");
            after.unmanage(memory.start(), bytes);
            assert_eq!(pagetable::mark(memory.start()), 0, "{fault_mode:?}");
            before.unmanage(elsewhere.start(), bytes);
            // Closed before the mappings go: otherwise the unmapping waits until its event is read.
            drop((before, after));
        }
    }

    #[test]
    fn pages_that_a_child_shares_leave_and_stay_what_they_were_for_it() {
        const PAGES: usize = 40;
        let bytes = PAGES * OS_PAGE_BYTES;
        if !Uffd::probe(Scope::UserMode).is_ok_and(|features| features.has(Features::MOVE)) {
            return rampool_testing::skip("move", "pages shared with a child");
        }
        let (program, frames) =
            (Mapping::huge_aligned(bytes).unwrap(), Mapping::huge_aligned(bytes).unwrap());
        // Closed before the mappings go: otherwise the unmapping waits until its event is read.
        let uffd = Uffd::open(Scope::UserMode, NEEDED.with(Features::MOVE)).unwrap();
        let word = |memory: &Mapping, page: usize| memory.at(page * OS_PAGE_BYTES).cast::<u64>();
        for page in 0..PAGES {
            // SAFETY: our own memory.
            unsafe { word(&program, page).write(page as u64 + 1) };
        }
        uffd.register(program.start(), bytes, true).unwrap();
        uffd.register(frames.start(), bytes, false).unwrap();
        assert_eq!(uffd.write_protect(program.start(), bytes / 2, true), Reply::Done);
        let mut line = [0; 2];
        // SAFETY: two descriptors; the child calls nothing but read and _exit, and looks at memory that it
        // has.
        let child = unsafe {
            assert_eq!(libc::pipe(line.as_mut_ptr()), 0);
            let child = libc::fork();
            if child == 0 {
                libc::close(line[1]);
                let mut byte = 0u8;
                libc::read(line[0], (&raw mut byte).cast(), 1);
                let same = (0..PAGES).all(|page| word(&program, page).read_volatile() == page as u64 + 1);
                libc::_exit(if same { 7 } else { 8 });
            }
            child
        };
        assert!(child > 0);
        let mut outcomes = [EvictOutcome::Vanished; PAGES];
        move_out(
            &uffd,
            &page_map(),
            Departure { from: program.start(), to: frames.start(), bytes },
            &mut outcomes,
        )
        .unwrap();
        assert_eq!(outcomes, [EvictOutcome::MovedOpened; PAGES]);
        for page in 0..PAGES {
            // SAFETY: the pages are in our frames now.
            assert_eq!(unsafe { word(&frames, page).read() }, page as u64 + 1);
        }
        // SAFETY: our own descriptors and our own child.
        let status = unsafe {
            libc::close(line[1]);
            libc::close(line[0]);
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            status
        };
        assert_eq!(libc::WEXITSTATUS(status), 7, "the child saw something else (status {status})");
    }
}
