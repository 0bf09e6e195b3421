//! PARMACS macros (Boyle and others; those of the SPLASH programs) on the shared view: what `m4/rampool.m4`
//! calls, declared in `include/rampool_parmacs.h`.
//!
//! ```text
//!   rank 0      main() ... G_MALLOC ... CREATE(f) ............. WAIT_FOR_END ... exit
//!                                          | image, release         ^ acquire     |
//!   rank k      joins before main(), waits +--> f() ----------------+  waits      +--> exit
//! ```
//! Only rank 0 runs `main`. A created process is a rank that was waiting: it takes over the creator's
//! variables and `malloc` memory ([`image`]) and calls `f`, as a forked child would. Locks are named by their
//! addresses. Everything else that processes share lies in shared memory and is accessed under a lock: the
//! module's own state under [`CONTROL`] and [`HEAP`], each pause, semaphore and such under its own.

mod heap;
mod image;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_double, c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rampool::shared::{
    self, AllocOptions, AtomicOp, EXIT_FAILED, Homes, JoinError, ProtocolKind, Rank, Region, Shared,
    SharedConfig, SharedError,
};
use rampool_kernel::words::{last_words, say_line};

use heap::{Heap, NotABlock, PAGE};
use image::{Data, Fingerprint, HEAP_BASE, HEAP_BYTES, Snapshot, Variables};

// Locks of the program are addresses, so these are free.
const CONTROL: u64 = 1;
const HEAP: u64 = 2;
/// The condition of [`CONTROL`] on which rank 0 waits; rank `k` waits on `k + 1`.
const FIRST: u32 = 0;
/// The condition of locks that have only one.
const ONLY: u32 = 0;

/// Larger blocks of `G_MALLOC` are allocations of their own.
const SMALL: usize = 16 << 10;
const CHUNK: usize = 4 << 20;
/// Bytes of variables at most that are compared with what they were.
const MOST_COMPARED: usize = 64 << 20;
/// Names in one message.
const MOST_NAMES: usize = 8;

// Words of the control region.
/// Rank 0's program is over.
const END: usize = 0;
const LAYOUT: usize = 1;
const FILE: usize = 2;
/// Where the creator's `malloc` memory is copied to, the room for it, and its size.
const COPY: usize = 3;
const COPY_ROOM: usize = 4;
const COPY_BYTES: usize = 5;
/// Processes that were created, that have ended, and whose end was waited for.
const CREATED: usize = 6;
const ENDED: usize = 7;
const WAITED: usize = 8;
/// The last number given to a barrier or a condition variable.
const NUMBER: usize = 9;
const HEAP_STATE: usize = 16;
/// For each rank: what it does, and the function it is to call.
const RANKS: usize = HEAP_STATE + heap::STATE_WORDS;

/// What a rank does.
const IDLE: u64 = 0;
const WANTED: u64 = 1;
const RUNNING: u64 = 2;
const GONE: u64 = 3;

struct Parmacs {
    shared: Shared,
    control: Region,
    /// Where the creator's variables are copied to, and which pieces of them are there.
    image: Region,
    pieces: Region,
    data: Data,
    variables: Variables,
    /// For each rank: a bit for each word of the variables that its processes changed.
    changed: Region,
    /// The variables as they were when the process was created, or when the first one created others.
    at_creation: Mutex<Option<Snapshot>>,
    finished: AtomicBool,
    /// Whether the variables that cannot be carried were reported, and those that are not shared.
    warned: AtomicBool,
    named: AtomicBool,
    /// Whether the first process calls the function of those that it created.
    joined: AtomicBool,
}

static PARMACS: OnceLock<Parmacs> = OnceLock::new();
/// Held while the `malloc` heap changes.
static MALLOC: Mutex<()> = Mutex::new(());

/// Why a program cannot start.
#[derive(Debug, thiserror::Error)]
enum BeginError {
    #[error("started twice: put MAIN_ENV into one file of the program only")]
    Twice,
    #[error("{0}")]
    Join(#[from] JoinError),
    #[error("{0}")]
    Shared(#[from] SharedError),
    #[error(
        "link with the shared library librampool.so: variables of a static one would be taken for the \
         program's"
    )]
    Static,
    #[error(
        "protocol ibec hands over only what is written under a lock, but CREATE hands over everything: \
         choose another (RAMPOOL_PROTOCOL)"
    )]
    Ibec,
    #[error("cannot map malloc memory at {HEAP_BASE:#x}: {0}")]
    Heap(std::io::Error),
    #[error("cannot read the program's file: {0}")]
    File(std::io::Error),
    #[error("rank {rank} runs another program than rank 0")]
    OtherProgram { rank: u16 },
    #[error(
        "rank {rank} has the program or its libraries at other addresses than rank 0, so it cannot take over variables: the same libraries \
         are needed everywhere, and no address randomisation{why}"
    )]
    OtherLayout { rank: u16, why: String },
}

fn begin(argv: *mut *mut c_char, data: Data) -> Result<&'static Parmacs, BeginError> {
    if PARMACS.get().is_some() {
        return Err(BeginError::Twice);
    }
    if (data.start..data.start + data.bytes).contains(&(&raw const PARMACS).addr()) {
        return Err(BeginError::Static);
    }
    // Errors that all processes see alike are reported before they meet: later, the end of one would end the
    // others before they have reported them.
    let config = SharedConfig::from_env().map_err(JoinError::Config)?;
    if config.protocol == ProtocolKind::Ibec && config.ranks > 1 {
        return Err(BeginError::Ibec);
    }
    let fixed = if config.ranks > 1 { image::fix_addresses(argv.cast_const().cast()) } else { Ok(()) };
    image::map_heap().map_err(BeginError::Heap)?;
    let shared = Shared::join(config)?;
    let here = AllocOptions::new().homes(Homes::At(Rank(0)));
    let control = shared.alloc((RANKS + 2 * usize::from(shared.ranks())) * 8, here)?;
    let image = shared.alloc(data.bytes.max(1), here)?;
    let pieces = shared.alloc(data.bits_bytes().max(8), here)?;
    let words = changed_words(data) * usize::from(shared.ranks());
    let changed = shared.alloc(words.max(1) * 8, here)?;
    let parmacs = Parmacs {
        shared,
        control,
        image,
        pieces,
        data,
        variables: Variables::of_this_program(),
        changed,
        at_creation: Mutex::default(),
        finished: AtomicBool::new(false),
        warned: AtomicBool::new(false),
        named: AtomicBool::new(false),
        joined: AtomicBool::new(false),
    };
    if let Err(error) = parmacs.compare(fixed) {
        parmacs.die("MAIN_ENV", error);
    }
    shared::before_following(name_own_changes);
    Ok(PARMACS.get_or_init(|| parmacs))
}

/// The words that a rank's bits take. More variables than [`MOST_COMPARED`] are not compared.
fn changed_words(data: Data) -> usize {
    if data.bytes <= MOST_COMPARED { data.bytes.div_ceil(8 * 64) } else { 0 }
}

impl Parmacs {
    fn is_first(&self) -> bool {
        self.shared.rank() == 0
    }

    fn get(&self, word: usize) -> u64 {
        // SAFETY: aligned, in shared memory; its lock orders accesses of all ranks.
        unsafe { self.control.at::<u64>(word).read_volatile() }
    }

    fn set(&self, word: usize, value: u64) {
        // SAFETY: as in `get`.
        unsafe { self.control.at::<u64>(word).write_volatile(value) };
    }

    fn add(&self, word: usize, value: u64) -> u64 {
        let sum = self.get(word) + value;
        self.set(word, sum);
        sum
    }

    fn state(rank: u16) -> usize {
        RANKS + 2 * usize::from(rank)
    }

    /// All ranks must be able to take over each other's variables.
    fn compare(&self, fixed: Result<(), String>) -> Result<(), BeginError> {
        let mine = Fingerprint::here(&self.data).map_err(BeginError::File)?;
        if self.is_first() {
            self.set(LAYOUT, mine.layout);
            self.set(FILE, mine.file);
        }
        self.shared.barrier(0)?;
        let rank = self.shared.rank();
        if mine.file != self.get(FILE) {
            return Err(BeginError::OtherProgram { rank });
        }
        if mine.layout != self.get(LAYOUT) {
            let why = fixed
                .err()
                .map(|why| format!(", which cannot be turned off here ({why})"))
                .unwrap_or_default();
            return Err(BeginError::OtherLayout { rank, why });
        }
        Ok(())
    }

    /// What ranks other than 0 do: wait, and be created, until the program ends.
    fn serve(&self) -> Result<(), SharedError> {
        let rank = self.shared.rank();
        let (state, shared) = (Self::state(rank), &self.shared);
        loop {
            shared.lock(CONTROL)?;
            while self.get(state) != WANTED {
                if self.get(END) != 0 {
                    shared.unlock(CONTROL)?;
                    return self.finish();
                }
                shared.wait_idle(u32::from(rank) + 1, CONTROL)?;
            }
            let start = self.get(state + 1);
            let (copy, bytes) = (self.get(COPY), self.get(COPY_BYTES));
            shared.unlock(CONTROL)?;
            // SAFETY: rank 0 wrote the images before it released the lock and writes them again when all
            // have said that they took them; the fingerprints are alike, and nothing of the program runs here
            // now.
            unsafe {
                self.data.load(self.image.as_ptr(), self.pieces.at::<u64>(0));
                let copy =
                    std::ptr::with_exposed_provenance::<u8>(usize::try_from(copy).expect("an address"));
                let bytes = usize::try_from(bytes).expect("64-bit addresses");
                std::ptr::copy_nonoverlapping(copy, std::ptr::with_exposed_provenance_mut(HEAP_BASE), bytes);
            }
            self.remember();
            self.tell(state, RUNNING)?;
            // SAFETY: the program's function of this type, at the same address in every process.
            let start: extern "C" fn() =
                unsafe { std::mem::transmute(usize::try_from(start).expect("an address")) };
            shared.start_measuring();
            start();
            shared.stop_measuring();
            self.note_changes();
            // SAFETY: writes out all of the program's streams; no preconditions.
            unsafe { libc::fflush(std::ptr::null_mut()) };
            self.ended(state, IDLE)?;
        }
    }

    /// The variables as they are now are what this process began with.
    fn remember(&self) {
        if self.data.bytes <= MOST_COMPARED {
            *self.at_creation.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.data.snapshot());
        }
    }

    /// Marks the variables that this process has changed since.
    fn note_changes(&self) {
        let before = self.at_creation.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(before) = before else { return };
        let first = changed_words(self.data) * usize::from(self.shared.rank());
        self.data.changed_words(&before, |word| {
            let at = self.changed.at::<u64>(first + word / 64);
            // SAFETY: aligned, in shared memory; only this rank writes it while its process runs.
            unsafe { at.write_volatile(at.read_volatile() | 1 << (word % 64)) };
        });
    }

    /// Names the variables that only some of those processes have changed that called the same function, or
    /// only the first: programs for threads expect that all see the change. What each process has changed,
    /// it has for itself. All processes have ended.
    fn report_changes(&self) {
        self.note_changes();
        if self.named.load(Ordering::Relaxed) {
            return;
        }
        let each = changed_words(self.data);
        let changed_by = |rank: usize| {
            let mut names = BTreeSet::new();
            for word in 0..each {
                // SAFETY: aligned, in shared memory, which no process writes now.
                let bits = unsafe { self.changed.at::<u64>(rank * each + word).read_volatile() };
                let words = (0..64).filter(|bit| bits >> bit & 1 != 0).map(|bit| (word * 64 + bit) as u64);
                names.extend(words.filter_map(|word| self.variables.find(word * 8, word * 8 + 8)));
            }
            names
        };
        let created: Vec<BTreeSet<&str>> = (1..self.shared.ranks())
            .filter(|&rank| self.get(Self::state(rank) + 1) != 0)
            .map(|rank| changed_by(rank.into()))
            .collect();
        let by_some: BTreeSet<&str> = created.iter().flatten().copied().collect();
        let by_first = changed_by(0);
        let mut names: BTreeSet<&str> = by_first.difference(&by_some).copied().collect();
        let joined = self.joined.load(Ordering::Relaxed).then_some(&by_first);
        let is_own = |name: &&&str| created.iter().chain(joined).all(|changed| changed.contains(*name));
        names.extend(by_some.iter().filter(|name| !is_own(name)));
        if names.is_empty() {
            return;
        }
        self.named.store(true, Ordering::Relaxed);
        say_line(&format!(
            "rampool: some processes changed the variables {} after CREATE, and the others did not see it: \
             put into G_MALLOC memory what they are to share",
            some_of(&names)
        ));
    }

    /// Rank 0 may learn that this rank does something else now.
    fn tell(&self, state: usize, what: u64) -> Result<(), SharedError> {
        self.shared.lock(CONTROL)?;
        self.set(state, what);
        self.shared.signal(FIRST, CONTROL)?;
        self.shared.unlock(CONTROL)
    }

    fn ended(&self, state: usize, next: u64) -> Result<(), SharedError> {
        self.shared.lock(CONTROL)?;
        self.add(ENDED, 1);
        self.set(state, next);
        self.shared.signal(FIRST, CONTROL)?;
        self.shared.unlock(CONTROL)
    }

    /// Creates `count` processes. Returns when all have what they need, so that the caller's variables may
    /// change.
    fn create(&self, start: usize, count: u16) -> Result<Result<(), String>, SharedError> {
        let shared = &self.shared;
        if count == 0 {
            return Ok(Ok(()));
        }
        if !self.is_first() {
            return Ok(Err("only the program's first process can create others".to_owned()));
        }
        shared.lock(CONTROL)?;
        let idle: Vec<u16> = (1..shared.ranks())
            .filter(|&rank| self.get(Self::state(rank)) == IDLE)
            .take(count.into())
            .collect();
        if idle.len() < usize::from(count) {
            let (ranks, running) = (shared.ranks(), self.get(CREATED) - self.get(ENDED));
            shared.unlock(CONTROL)?;
            return Ok(Err(format!(
                "{count} more processes are wanted, but the run has {ranks} and {} of them are in use: start \
                 it with `rampool launch -n {}`",
                running + 1,
                running + 1 + u64::from(count)
            )));
        }
        self.save()?;
        for &rank in &idle {
            self.set(Self::state(rank) + 1, start as u64);
            self.set(Self::state(rank), WANTED);
            shared.signal(u32::from(rank) + 1, CONTROL)?;
        }
        self.add(CREATED, count.into());
        while idle.iter().any(|&rank| self.get(Self::state(rank)) == WANTED) {
            shared.wait(FIRST, CONTROL)?;
        }
        shared.unlock(CONTROL)?;
        Ok(Ok(()))
    }

    /// No created process is left to be waited for. Only the rank that asks writes these words, so no lock is
    /// needed.
    fn runs_alone(&self) -> bool {
        self.get(CREATED) == self.get(WAITED)
    }

    /// Copies the program's variables and its `malloc` memory into shared memory. The caller has the lock.
    fn save(&self) -> Result<(), SharedError> {
        let guard = malloc_lock();
        let used = malloc_heap().next().saturating_sub(HEAP_BASE);
        if used as u64 > self.get(COPY_ROOM) {
            let room = used.next_power_of_two();
            let old = self.get(COPY);
            if old != 0 {
                self.shared.free_alone(usize::try_from(old).expect("an address"))?;
            }
            let region = self.shared.alloc_alone(room, AllocOptions::new().homes(Homes::At(Rank(0))))?;
            self.set(COPY, region.address() as u64);
            self.set(COPY_ROOM, region.bytes() as u64);
        }
        self.set(COPY_BYTES, used as u64);
        if !self.warned.swap(true, Ordering::Relaxed) {
            for at in self.data.pointers_to_stack() {
                say_line(&format!(
                    "rampool: CREATE: the variable at {at:#x} points to a local variable, which created \
                     processes do not have"
                ));
            }
        }
        // SAFETY: the regions are large enough; no rank reads them while none is WANTED.
        unsafe {
            self.data.save(self.image.as_ptr(), self.pieces.at::<u64>(0));
            let copy = std::ptr::with_exposed_provenance_mut::<u8>(
                usize::try_from(self.get(COPY)).expect("an address"),
            );
            if used != 0 {
                std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance::<u8>(HEAP_BASE), copy, used);
            }
        }
        drop(guard);
        Ok(())
    }

    /// Waits for the ends of `count` processes, or of all that were created and not waited for.
    fn wait_for_end(&self, count: u64) -> Result<(), SharedError> {
        self.shared.lock(CONTROL)?;
        let target = self.get(WAITED) + count.min(self.get(CREATED) - self.get(WAITED));
        while self.get(ENDED) < target {
            self.shared.wait_idle(FIRST, CONTROL)?;
        }
        self.set(WAITED, target);
        self.shared.unlock(CONTROL)
    }

    /// This process of the program ends, in order.
    fn leave(&self) -> Result<(), SharedError> {
        let (rank, shared) = (self.shared.rank(), &self.shared);
        if self.is_first() {
            shared.lock(CONTROL)?;
            while (1..shared.ranks()).any(|rank| self.get(Self::state(rank)) == RUNNING) {
                shared.wait_idle(FIRST, CONTROL)?;
            }
            self.set(END, 1);
            for other in 1..shared.ranks() {
                shared.signal(u32::from(other) + 1, CONTROL)?;
            }
        } else {
            self.note_changes();
            self.ended(Self::state(rank), GONE)?;
            shared.lock(CONTROL)?;
            while self.get(END) == 0 {
                shared.wait_idle(u32::from(rank) + 1, CONTROL)?;
            }
        }
        shared.unlock(CONTROL)?;
        self.finish()
    }

    fn finish(&self) -> Result<(), SharedError> {
        self.shared.close()?;
        self.finished.store(true, Ordering::Release);
        Ok(())
    }

    fn g_malloc(&self, bytes: usize) -> Result<usize, SharedError> {
        if bytes > SMALL {
            // Mostly each process works on a part of it, in the order in which they begin: rank 0 last.
            let first = Rank(1 % self.shared.ranks());
            let options = AllocOptions::new().homes(Homes::BlockedFrom(first));
            return self.shared.alloc_alone(bytes, options).map(Region::address);
        }
        self.shared.lock(HEAP)?;
        let heap = self.heap();
        let block = match heap.alloc(bytes) {
            Some(block) => block,
            None => {
                let chunk = self.shared.alloc_alone(CHUNK, AllocOptions::new())?;
                // SAFETY: new memory, for this heap alone.
                unsafe { heap.grow(chunk.address(), chunk.bytes()) };
                heap.alloc(bytes).expect("a chunk has room for a small block")
            }
        };
        self.shared.unlock(HEAP)?;
        Ok(block)
    }

    fn g_free(&self, address: usize) -> Result<Result<(), NotABlock>, SharedError> {
        if address.is_multiple_of(PAGE) {
            return self.shared.free_alone(address).map(Ok);
        }
        if !address.is_multiple_of(16) || !self.is_shared(address) {
            return Ok(Err(NotABlock::Foreign));
        }
        self.shared.lock(HEAP)?;
        // SAFETY: in shared memory, and not at the beginning of a page.
        let freed = unsafe { self.heap().free(address) };
        self.shared.unlock(HEAP)?;
        Ok(freed)
    }

    fn heap(&self) -> Heap {
        // SAFETY: words of the control region that nothing else uses.
        unsafe { Heap::new(self.control.at::<u64>(HEAP_STATE)) }
    }

    /// What the program calls this address.
    fn name(&self, address: usize) -> String {
        let offset = address.checked_sub(self.data.start).filter(|&offset| offset < self.data.bytes);
        let name = offset.and_then(|offset| self.variables.find(offset as u64, offset as u64 + 1));
        name.map_or_else(|| format!("{address:#x}"), |name| format!("{name} ({address:#x})"))
    }

    fn is_shared(&self, address: usize) -> bool {
        self.shared.home(address).is_ok()
    }

    /// A number that no other barrier or condition variable has.
    fn number(&self) -> Result<u32, SharedError> {
        let number = self.shared.fetch_add(self.control.at::<u64>(NUMBER), 1)?;
        Ok(u32::try_from(number + 1).unwrap_or(u32::MAX))
    }

    /// Ends the run, in all processes.
    fn die(&self, what: &str, why: impl std::fmt::Display) -> ! {
        self.shared.abort(&format!("{what}: {why}"));
        // SAFETY: ends the process; no preconditions.
        unsafe { libc::_exit(EXIT_FAILED) }
    }

    fn must<T>(&self, what: &str, result: Result<T, SharedError>) -> T {
        result.unwrap_or_else(|error| self.die(what, error))
    }

    fn die_for_private(&self, what: &str, object: usize) -> ! {
        let name = self.name(object);
        self.die(what, format_args!("{name} is not in G_MALLOC memory, so no other process sees it"))
    }

    fn word_result<T>(&self, what: &str, word: usize, result: Result<T, SharedError>) -> T {
        if result.is_err() && !self.is_shared(word) {
            self.die_for_private(what, word);
        }
        self.must(what, result)
    }

    /// Changes the object of the macro `what` at `object`, under the lock of its address.
    fn under<T>(
        &self,
        what: &str,
        object: usize,
        change: impl FnOnce(&Shared, u64) -> Result<T, SharedError>,
    ) -> T {
        if !self.is_shared(object) {
            self.die_for_private(what, object);
        }
        let lock = object as u64;
        let result = self.shared.lock(lock).and_then(|()| change(&self.shared, lock));
        self.must(what, result.and_then(|value| self.shared.unlock(lock).map(|()| value)))
    }
}

/// A list of the first names.
fn some_of(names: &BTreeSet<&str>) -> String {
    let first: Vec<&str> = names.iter().take(MOST_NAMES).copied().collect();
    let more = names.len() - first.len();
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{more}", first.join(", "))
}

/// Another process is gone. Mostly a program for threads has crashed because it does not see what this
/// process has changed in its own variables: names them.
fn name_own_changes(gone: Rank) {
    let Some(parmacs) = PARMACS.get() else { return };
    // Held elsewhere, they are not changed any more: the function has returned.
    let Ok(before) = parmacs.at_creation.try_lock() else { return };
    let Some(before) = &*before else { return };
    let mut names = BTreeSet::new();
    parmacs.data.changed_words(before, |word| {
        names.extend(parmacs.variables.find(word as u64 * 8, word as u64 * 8 + 8));
    });
    if !names.is_empty() {
        let me = parmacs.shared.rank();
        last_words(&format!(
            "rampool: {gone} did not see what rank {me} has changed after CREATE in the variables {}: if it \
             crashed, put into G_MALLOC memory what they are to share",
            some_of(&names)
        ));
    }
}

fn parmacs() -> &'static Parmacs {
    PARMACS.get().unwrap_or_else(|| {
        say_line("rampool: no file of this program contains MAIN_ENV");
        std::process::exit(EXIT_FAILED);
    })
}

// --- the program's beginning and end -----------------------------------------------------------------------

/// Called before `main`, by what MAIN_ENV expands to. Returns in rank 0 only.
///
/// # Safety
/// `argv` is what the program was started with; the program's data are from `data_start` to `data_end`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_begin(
    argc: c_int,
    argv: *mut *mut c_char,
    data_start: *mut c_char,
    data_end: *mut c_char,
) {
    let start = data_start.expose_provenance();
    let data = Data { start, bytes: data_end.addr().saturating_sub(start) };
    let parmacs = match begin(argv, data) {
        Ok(parmacs) => parmacs,
        Err(error) => {
            say_line(&format!("rampool: {error}"));
            std::process::exit(1);
        }
    };
    // SAFETY: a function of this type.
    unsafe { on_exit(at_exit, std::ptr::null_mut()) };
    if !parmacs.is_first() {
        parmacs.must("a created process", parmacs.serve());
        std::process::exit(0);
    }
    // Arguments may be kept in variables, and the stack that they are on is not carried.
    for n in 0..usize::try_from(argc).unwrap_or(0) {
        // SAFETY: `argc` texts are there, as the caller promises; they may be replaced.
        unsafe { *argv.add(n) = rampool_parmacs_strdup(*argv.add(n)) };
    }
}

unsafe extern "C" {
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

extern "C" fn at_exit(status: c_int, _: *mut c_void) {
    let parmacs = parmacs();
    // A process that ends with an error ends the run: the others see that it has not finished. A child that
    // the program forked is no rank, so its end does not count.
    if status != 0 || parmacs.finished.load(Ordering::Acquire) || !parmacs.shared.is_here() {
        return;
    }
    // This thread's own state in the library is gone already.
    let left = std::thread::spawn(|| parmacs.leave()).join();
    if let Ok(left) = left {
        parmacs.must("the end of the program", left);
    }
}

/// `joined`: the caller calls the function next, too.
///
/// # Safety
/// `start` is the program's own function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_create(start: extern "C" fn(), count: c_long, joined: c_int) {
    let parmacs = parmacs();
    parmacs.joined.store(joined != 0, Ordering::Relaxed);
    let Ok(count) = u16::try_from(count) else { parmacs.die("CREATE", format_args!("{count} processes")) };
    let alone = parmacs.runs_alone();
    if let Err(why) = parmacs.must("CREATE", parmacs.create(start as usize, count)) {
        parmacs.die("CREATE", why);
    }
    // Statistics and traces of the run cover its parallel part, at every rank.
    if alone {
        parmacs.remember();
        parmacs.shared.start_measuring();
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_wait_for_end(count: c_long) {
    let parmacs = parmacs();
    parmacs.must("WAIT_FOR_END", parmacs.wait_for_end(u64::try_from(count).unwrap_or(0)));
    if parmacs.runs_alone() {
        parmacs.shared.stop_measuring();
        parmacs.report_changes();
    }
}

/// Microseconds since 1970.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_clock() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

// --- memory ------------------------------------------------------------------------------------------------

/// Shared memory. `home`: the rank to be its home, modulo the number of ranks, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_g_malloc(bytes: usize, home: c_long) -> *mut c_void {
    let parmacs = parmacs();
    let address = parmacs.must("G_MALLOC", parmacs.g_malloc(bytes));
    // Programs name processors of the machine they were written for.
    if let Ok(home) = u64::try_from(home) {
        let home =
            u16::try_from(home % u64::from(parmacs.shared.ranks())).expect("below the number of ranks");
        parmacs.must("G_MALLOC", parmacs.shared.set_home(address, bytes, home));
    }
    std::ptr::with_exposed_provenance_mut(address)
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_g_free(memory: *mut c_void) {
    let parmacs = parmacs();
    if !memory.is_null()
        && let Err(error) = parmacs.must("G_FREE", parmacs.g_free(memory.addr()))
    {
        parmacs.die("G_FREE", format_args!("{memory:p} is not a block of G_MALLOC ({error:?})"));
    }
}

fn malloc_lock() -> MutexGuard<'static, ()> {
    // Nothing under this lock leaves the heap half-changed.
    MALLOC.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The heap of the program's own memory. The caller holds [`MALLOC`].
fn malloc_heap() -> Heap {
    let state = std::ptr::with_exposed_provenance_mut(HEAP_BASE);
    // SAFETY: the first bytes of the range, which `begin` mapped, and which are nothing else's.
    let heap = unsafe { Heap::new(state) };
    if heap.next() == 0 {
        let start = HEAP_BASE + PAGE;
        // SAFETY: the rest of the range.
        unsafe { heap.grow(start, HEAP_BYTES - PAGE) };
    }
    heap
}

const _: () = assert!(heap::STATE_WORDS * 8 <= PAGE);

fn is_ours(memory: *mut c_void) -> bool {
    (HEAP_BASE..HEAP_BASE + HEAP_BYTES).contains(&memory.addr())
}

/// As malloc(); created processes get a copy.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_malloc(bytes: usize) -> *mut c_void {
    // Before `main` of a program without MAIN_ENV there is no range.
    let _ = parmacs();
    let guard = malloc_lock();
    let block = malloc_heap().alloc(bytes);
    drop(guard);
    block.map_or_else(
        || {
            // SAFETY: this thread's own variable.
            unsafe { *libc::__errno_location() = libc::ENOMEM };
            std::ptr::null_mut()
        },
        std::ptr::with_exposed_provenance_mut,
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_calloc(count: usize, bytes: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(bytes) else { return std::ptr::null_mut() };
    let memory = rampool_parmacs_malloc(bytes);
    if !memory.is_null() {
        // SAFETY: a new block of at least that size.
        unsafe { memory.write_bytes(0, bytes) };
    }
    memory
}

/// # Safety
/// As realloc().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_realloc(memory: *mut c_void, bytes: usize) -> *mut c_void {
    if memory.is_null() {
        return rampool_parmacs_malloc(bytes);
    }
    if !is_ours(memory) {
        // SAFETY: the C library's own block, as the caller promises.
        return unsafe { libc::realloc(memory, bytes) };
    }
    // SAFETY: in the range, behind its first page.
    let Ok(size) = (unsafe { Heap::size(memory.addr()) }) else {
        parmacs().die("realloc", format_args!("{memory:p} is not a block of malloc"));
    };
    if bytes <= size && bytes > size / 2 {
        return memory;
    }
    let other = rampool_parmacs_malloc(bytes);
    if !other.is_null() {
        // SAFETY: two blocks of at least so many bytes; the old one is the caller's.
        unsafe {
            std::ptr::copy_nonoverlapping(memory.cast::<u8>(), other.cast::<u8>(), size.min(bytes));
            rampool_parmacs_free(memory);
        }
    }
    other
}

/// # Safety
/// As free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_free(memory: *mut c_void) {
    if !is_ours(memory) {
        // SAFETY: null, or the C library's own block, as the caller promises.
        return unsafe { libc::free(memory) };
    }
    let guard = malloc_lock();
    // SAFETY: in the range, behind its first page.
    let freed = unsafe { malloc_heap().free(memory.addr()) };
    drop(guard);
    if let Err(error) = freed {
        parmacs().die("free", format_args!("{memory:p} is not a block of malloc ({error:?})"));
    }
}

/// # Safety
/// `text` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_strdup(text: *const c_char) -> *mut c_char {
    // SAFETY: as the caller promises.
    let bytes = unsafe { CStr::from_ptr(text) }.to_bytes_with_nul();
    let copy = rampool_parmacs_malloc(bytes.len()).cast::<u8>();
    if !copy.is_null() {
        // SAFETY: a new block of that size.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy, bytes.len()) };
    }
    copy.cast()
}

// --- synchronisation ---------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_lock(lock: *const c_void) {
    let parmacs = parmacs();
    parmacs.must("LOCK", parmacs.shared.lock(lock.addr() as u64));
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_unlock(lock: *const c_void) {
    let parmacs = parmacs();
    parmacs.must("UNLOCK", parmacs.shared.unlock(lock.addr() as u64));
}

/// `rampool_parmacs_barrier` of the header.
#[repr(C)]
pub struct Barrier {
    number: u64,
    count: u64,
    arrived: u64,
    turn: u64,
}

/// # Safety
/// `barrier` points to a barrier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_barrier_init(barrier: *mut Barrier, count: c_long) {
    let parmacs = parmacs();
    let number = parmacs.must("BARINIT", parmacs.number());
    // SAFETY: as the caller promises; nothing else uses it yet.
    unsafe {
        barrier.write(Barrier {
            number: number.into(),
            count: u64::try_from(count).unwrap_or(0),
            arrived: 0,
            turn: 0,
        })
    };
}

/// Waits for `count` processes, or as many as the barrier was made for.
///
/// # Safety
/// `barrier` points to a barrier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_barrier(barrier: *mut Barrier, count: c_long) {
    let parmacs = parmacs();
    // SAFETY: as the caller promises; it does not change after BARINIT.
    let (number, made_for) = unsafe {
        ((&raw const (*barrier).number).read_volatile(), (&raw const (*barrier).count).read_volatile())
    };
    let count = u64::try_from(count).ok().filter(|&count| count != 0).unwrap_or(made_for);
    if count == 0 || count > u64::from(parmacs.shared.ranks()) {
        parmacs.die(
            "BARRIER",
            format_args!("{count} processes are to meet, but the run has {}", parmacs.shared.ranks()),
        );
    }
    if count == u64::from(parmacs.shared.ranks()) {
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        return parmacs.must("BARRIER", parmacs.shared.barrier(number));
    }
    parmacs.under("BARRIER", barrier.addr(), |shared, lock| {
        // SAFETY: in shared memory; the lock orders all accesses.
        unsafe {
            let (arrived, turn) = (&raw mut (*barrier).arrived, &raw mut (*barrier).turn);
            rendezvous(shared, lock, count, arrived, turn)
        }
    });
}

/// Waits until `count` processes are here. Returns whether this was the last one. The caller has `lock`.
///
/// # Safety
/// The pointers are valid, and only the holder of the lock uses what they point to.
unsafe fn rendezvous(
    shared: &Shared,
    lock: u64,
    count: u64,
    arrived: *mut u64,
    turn: *mut u64,
) -> Result<bool, SharedError> {
    // SAFETY: as the caller promises.
    unsafe {
        let now = turn.read_volatile();
        arrived.write_volatile(arrived.read_volatile() + 1);
        if arrived.read_volatile() >= count {
            arrived.write_volatile(0);
            turn.write_volatile(now + 1);
            shared.broadcast(ONLY, lock)?;
            return Ok(true);
        }
        while turn.read_volatile() == now {
            shared.wait(ONLY, lock)?;
        }
        Ok(false)
    }
}

/// `rampool_parmacs_condition` of the header.
#[repr(C)]
pub struct Condition {
    number: u64,
    /// The lock of its waiters; a condition belongs to its lock.
    lock: u64,
}

/// # Safety
/// `condition` points to a condition variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_condition_init(condition: *mut Condition) {
    let parmacs = parmacs();
    let number = parmacs.must("CONDVARINIT", parmacs.number());
    // SAFETY: as the caller promises; nothing else uses it yet.
    unsafe { condition.write(Condition { number: number.into(), lock: 0 }) };
}

/// # Safety
/// `condition` points to a condition variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_condition_wait(condition: *mut Condition, lock: *const c_void) {
    let parmacs = parmacs();
    if !parmacs.is_shared(condition.addr()) {
        parmacs.die(
            "CONDVARWAIT",
            format_args!(
                "{} is not in G_MALLOC memory, so no other process sees it",
                parmacs.name(condition.addr())
            ),
        );
    }
    let lock = lock.addr() as u64;
    // SAFETY: in shared memory; the holder of the lock writes it, and a signalling process has had that lock.
    let number = unsafe {
        (&raw mut (*condition).lock).write_volatile(lock);
        (&raw const (*condition).number).read_volatile()
    };
    parmacs.must("CONDVARWAIT", parmacs.shared.wait(u32::try_from(number).unwrap_or(u32::MAX), lock));
}

/// # Safety
/// `condition` points to a condition variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_condition_signal(condition: *const Condition, all: c_int) {
    let parmacs = parmacs();
    // SAFETY: as the caller promises.
    let (number, lock) = unsafe {
        ((&raw const (*condition).number).read_volatile(), (&raw const (*condition).lock).read_volatile())
    };
    // No process has waited that this process could know of.
    if lock == 0 {
        return;
    }
    let number = u32::try_from(number).unwrap_or(u32::MAX);
    let done =
        if all == 0 { parmacs.shared.signal(number, lock) } else { parmacs.shared.broadcast(number, lock) };
    parmacs.must("CONDVARSIGNAL", done);
}

/// Sets a pause variable, or clears it.
///
/// # Safety
/// `pause` points to a word.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_pause_set(pause: *mut u64, value: c_int) {
    parmacs().under("SETPAUSE", pause.addr(), |shared, lock| {
        // SAFETY: in shared memory; the lock orders all accesses.
        unsafe { pause.write_volatile(u64::from(value != 0)) };
        if value != 0 { shared.broadcast(ONLY, lock) } else { Ok(()) }
    });
}

/// Waits until the pause variable is set.
///
/// # Safety
/// `pause` points to a word.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_pause_wait(pause: *mut u64) {
    parmacs().under("WAITPAUSE", pause.addr(), |shared, lock| {
        // SAFETY: in shared memory; the lock orders all accesses.
        while unsafe { pause.read_volatile() } == 0 {
            shared.wait(ONLY, lock)?;
        }
        Ok(())
    });
}

/// # Safety
/// `semaphore` points to a word.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_semaphore_wait(semaphore: *mut u64) {
    parmacs().under("SEMWAIT", semaphore.addr(), |shared, lock| {
        // SAFETY: in shared memory; the lock orders all accesses.
        unsafe {
            while semaphore.read_volatile() == 0 {
                shared.wait(ONLY, lock)?;
            }
            semaphore.write_volatile(semaphore.read_volatile() - 1);
        }
        Ok(())
    });
}

/// # Safety
/// `semaphore` points to a word.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_semaphore_post(semaphore: *mut u64) {
    parmacs().under("SEMPOST", semaphore.addr(), |shared, lock| {
        // SAFETY: in shared memory; the lock orders all accesses.
        unsafe { semaphore.write_volatile(semaphore.read_volatile() + 1) };
        shared.signal(ONLY, lock)
    });
}

/// `rampool_parmacs_subscript` of the header.
#[repr(C)]
pub struct Subscript {
    next: u64,
    arrived: u64,
    turn: u64,
}

/// Returns the next of `0 ..= last`. If there is none, waits until `count` processes know it, returns -1 to
/// all of them, and begins again.
///
/// # Safety
/// `subscript` points to a subscript.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_parmacs_getsub(
    subscript: *mut Subscript,
    last: c_long,
    count: c_long,
) -> c_long {
    parmacs().under("GETSUB", subscript.addr(), |shared, lock| {
        // SAFETY: in shared memory; the lock orders all accesses.
        unsafe {
            let next = &raw mut (*subscript).next;
            let value = c_long::try_from(next.read_volatile()).unwrap_or(c_long::MAX);
            if value <= last {
                next.write_volatile(next.read_volatile() + 1);
                return Ok(value);
            }
            let (arrived, turn) = (&raw mut (*subscript).arrived, &raw mut (*subscript).turn);
            if rendezvous(shared, lock, u64::try_from(count).unwrap_or(1), arrived, turn)? {
                next.write_volatile(0);
            }
            Ok(-1)
        }
    })
}

// --- atomic words ------------------------------------------------------------------------------------------

fn atomic(what: &str, word: *mut c_void, width: usize, op: AtomicOp) -> u64 {
    let parmacs = parmacs();
    let result = parmacs.shared.atomic(word.addr(), u8::try_from(width).unwrap_or(0), op);
    parmacs.word_result(what, word.addr(), result)
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_load(word: *mut c_void, width: usize) -> u64 {
    atomic("LOAD", word, width, AtomicOp::Load)
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_store(word: *mut c_void, width: usize, value: u64) {
    atomic("STORE", word, width, AtomicOp::Store(value));
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_fetch_add(word: *mut c_void, width: usize, value: u64) -> u64 {
    atomic("FETCH_ADD", word, width, AtomicOp::Add(value))
}

/// Returns what the word was before: `expect`, if `new` was stored.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_compare_exchange(
    word: *mut c_void,
    width: usize,
    expect: u64,
    new: u64,
) -> u64 {
    atomic("CAS", word, width, AtomicOp::CompareExchange { expect, new })
}

thread_local! {
    /// What the word was before that this thread has added to at once.
    static BEFORE: Cell<Option<f64>> = const { Cell::new(None) };
}

/// With this process's next synchronisation, unless [`rampool_parmacs_added`] is called before that. At once
/// while the program has one process: it need not synchronise.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_add_double(word: *mut c_void, value: c_double) {
    let parmacs = parmacs();
    let word = word.cast::<f64>();
    let before = if parmacs.is_first() && parmacs.runs_alone() {
        parmacs.shared.add_f64_at_home(word, value).map(Some)
    } else {
        parmacs.shared.add_f64_later(word, value).map(|()| None)
    };
    BEFORE.set(parmacs.word_result("FETCH_ADD_DOUBLE", word.addr(), before));
}

/// What the word was before [`rampool_parmacs_add_double`], which this thread has just called.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_added(word: *const c_void) -> c_double {
    let parmacs = parmacs();
    let before = match BEFORE.take() {
        Some(before) => Ok(Some(before)),
        None => parmacs.shared.add_last_f64(),
    };
    parmacs.word_result("FETCH_ADD_DOUBLE", word.addr(), before).unwrap_or_default()
}

#[unsafe(no_mangle)]
pub extern "C" fn rampool_parmacs_fence() {
    let parmacs = parmacs();
    parmacs.must("FENCE", parmacs.shared.fence());
}
