//! Pinned memory: the pin-down cache of [`rampool_pinning`] and the registrars that pin for it.
//!
//! ```text
//!   Pins       the cache and its registrar: acquire, release, invalidate
//!   Registrar  registers memory: fixed buffers of io_uring, mlock, the devices that UCX has
//!   watch      the kernel tells when memory is unmapped, moved or dropped
//! ```
//! Changes to [watched](Pins::watch) memory are read with [`Pins::catch_up`], before each send. For all other
//! memory, the code that changes mappings under it must call [`Pins::invalidate`] before it sends from that
//! memory again; see `docs/internals/zero-copy.md`.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use rampool_kernel::memory;
use rampool_kernel::ring::{Ring, RingError};
use rampool_pinning::{Counts, Held, Limits, Output, PinCache, Refused, RegistrationId, Span, UnpinPolicy};
use rampool_ucx::{Context, Memory, UcxError};
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};
use watch::{Change, Seen, Watcher};

/// All addresses that a program can have.
const ADDRESSES: usize = 1 << 56;

/// Registers memory. Ranges are whole OS pages.
pub trait Registrar {
    /// What people call it.
    fn name(&self) -> &'static str;

    /// Registrations it can have at one time.
    fn places(&self) -> u32;

    /// Pages of one registration.
    fn most_pages(&self) -> u64;

    /// Registers a range in the place `id.index` of its table, which is free.
    ///
    /// # Errors
    /// What the kernel says; nothing is registered then.
    fn register(&mut self, id: RegistrationId, range: Range<usize>) -> io::Result<()>;

    /// Ends a registration.
    fn deregister(&mut self, id: RegistrationId);

    /// The pages of a range are no longer those that were registered.
    fn invalidated(&mut self, range: Range<usize>);
}

/// Fixed buffers of an io_uring: really pinned, and sent from without looking pages up.
#[derive(Debug)]
pub struct FixedBuffers {
    ring: Ring,
}

impl FixedBuffers {
    /// # Errors
    /// [`RingError`].
    pub fn open(places: u16) -> Result<Self, RingError> {
        Ok(Self { ring: Ring::open(places)? })
    }

    /// For sending.
    pub fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// Where in the ring's table a registration is.
    ///
    /// # Panics
    /// If it is none of these.
    #[must_use]
    pub fn place(id: RegistrationId) -> u16 {
        u16::try_from(id.index).expect("a ring's table has fewer places")
    }
}

impl Registrar for FixedBuffers {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn places(&self) -> u32 {
        self.ring.places().into()
    }

    fn most_pages(&self) -> u64 {
        (1 << 30) / OS_PAGE_BYTES as u64
    }

    fn register(&mut self, id: RegistrationId, range: Range<usize>) -> io::Result<()> {
        self.ring.register(Self::place(id), range.start, range.len())
    }

    fn deregister(&mut self, id: RegistrationId) {
        self.ring.deregister(Self::place(id)).expect("an empty buffer takes the place of any");
    }

    /// The ring keeps what it pinned until the registration ends.
    fn invalidated(&mut self, _range: Range<usize>) {}
}

/// Memory locked by `mlock`: it stays resident, but may move, so devices cannot use it; what is sent from it
/// is copied.
///
/// Locks of one page do not add up: what is locked is the union of the registrations, and a page is unlocked
/// with the last of those that have it. A page that the program had locked itself is unlocked with it.
#[derive(Debug, Default)]
pub struct LockedMemory {
    /// What of each registration is still the memory that was locked.
    locked: BTreeMap<u32, Vec<Range<usize>>>,
}

impl Registrar for LockedMemory {
    fn name(&self) -> &'static str {
        "mlock"
    }

    fn places(&self) -> u32 {
        1 << 16
    }

    fn most_pages(&self) -> u64 {
        u64::from(u32::MAX)
    }

    fn register(&mut self, id: RegistrationId, range: Range<usize>) -> io::Result<()> {
        if let Err(errno) = memory::lock(range.start, range.len()) {
            // A part may have been locked before it met a hole, or the limit.
            self.unlock(vec![range]);
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.locked.insert(id.index, vec![range]);
        Ok(())
    }

    fn deregister(&mut self, id: RegistrationId) {
        let ranges = self.locked.remove(&id.index).expect("what ends was registered");
        self.unlock(ranges);
    }

    fn invalidated(&mut self, range: Range<usize>) {
        self.locked.values_mut().for_each(|ranges| *ranges = without(ranges, &range));
    }
}

/// Memory registered with every device that UCX has on this machine and that knows registering: network cards
/// that reach into it, mostly. Where there is none, registering costs little and pins nothing.
#[derive(Debug)]
pub struct FabricMemory {
    context: Context,
    registered: BTreeMap<u32, Memory>,
}

impl FabricMemory {
    /// With the devices of this process's UCX. Loads it, if nothing has yet.
    ///
    /// # Errors
    /// [`UcxError`].
    pub fn open() -> Result<Self, UcxError> {
        Ok(Self::with(Context::process()?))
    }

    /// With the devices of this context.
    #[must_use]
    pub fn with(context: Context) -> Self {
        Self { context, registered: BTreeMap::new() }
    }

    /// What UCX knows a registration by.
    ///
    /// # Panics
    /// If it is none of these.
    #[must_use]
    pub fn memory(&self, id: RegistrationId) -> &Memory {
        &self.registered[&id.index]
    }
}

impl Registrar for FabricMemory {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn places(&self) -> u32 {
        1 << 16
    }

    fn most_pages(&self) -> u64 {
        u64::from(u32::MAX)
    }

    fn register(&mut self, id: RegistrationId, range: Range<usize>) -> io::Result<()> {
        let memory = Memory::register(&self.context, range).map_err(io::Error::other)?;
        self.registered.insert(id.index, memory);
        Ok(())
    }

    fn deregister(&mut self, id: RegistrationId) {
        self.registered.remove(&id.index).expect("what ends was registered");
    }

    /// A device keeps what it pinned until the registration ends.
    fn invalidated(&mut self, _range: Range<usize>) {}
}

impl LockedMemory {
    /// Unlocks what no registration has.
    fn unlock(&self, ranges: Vec<Range<usize>>) {
        let lonely = self.locked.values().flatten().fold(ranges, |left, range| without(&left, range));
        for range in lonely {
            // What was unmapped without a word is unlocked as well.
            let _ = memory::unlock(range.start, range.len());
        }
    }
}

/// The ranges less one.
pub(crate) fn without(ranges: &[Range<usize>], less: &Range<usize>) -> Vec<Range<usize>> {
    let parts = ranges
        .iter()
        .flat_map(|range| [range.start..range.end.min(less.start), range.start.max(less.end)..range.end]);
    parts.filter(|part| part.start < part.end).collect()
}

/// Why memory is not pinned: copy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    #[error("there is no such memory")]
    Nothing,
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("the kernel refuses to register the memory: {0}{hint}", hint = limit_hint(.0))]
    Kernel(#[source] io::Error),
}

/// What is mostly behind it where memory is refused.
fn limit_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EPERM) => {
            "; perhaps the right to lock memory is too small (ulimit -l, LimitMEMLOCK)"
        }
        _ => "",
    }
}

/// The pin-down cache at work: what is acquired is registered until it is released, and stays so while the
/// allowance lasts.
#[derive(Debug)]
pub struct Pins<R: Registrar> {
    cache: PinCache,
    registrar: R,
    /// Since some memory is watched.
    watcher: Option<(&'static Watcher, Seen)>,
}

impl<R: Registrar> Pins<R> {
    #[must_use]
    pub fn new(registrar: R, allowance_bytes: u64, policy: Box<dyn UnpinPolicy + Send>) -> Self {
        let limits = Limits {
            allowance_pages: allowance_bytes / OS_PAGE_BYTES as u64,
            registration_pages: registrar.most_pages(),
            registrations: registrar.places(),
        };
        Self { cache: PinCache::new(limits, policy), registrar, watcher: None }
    }

    /// Whether the kernel tells from now on what happens to this memory.
    pub fn watch(&mut self, memory: &Range<usize>) -> bool {
        let Some(watcher) = Watcher::of_process() else { return false };
        self.watcher.get_or_insert_with(|| (watcher, watcher.now()));
        watcher.watch(memory)
    }

    /// Forgets the registrations of watched memory that was unmapped, moved or dropped, and calls `gone` with
    /// what is not mapped there any more, and so not watched. Call before [`Pins::acquire`]. One load where
    /// nothing has happened.
    pub fn catch_up(&mut self, mut gone: impl FnMut(Range<usize>)) {
        let Some((watcher, mut seen)) = self.watcher else { return };
        watcher.catch_up(&mut seen, |change| {
            let (range, is_gone) = match change {
                Change::Dropped(range) => (range, false),
                Change::Gone(range) => (range, true),
                Change::Unknown => (0..ADDRESSES, true),
            };
            self.invalidate(range.start, range.len());
            if is_gone {
                gone(range);
            }
        });
        self.watcher = Some((watcher, seen));
    }

    /// Registered memory that covers these bytes: from the cache without a kernel call, or newly registered.
    ///
    /// # Errors
    /// [`PinError`].
    pub fn acquire(&mut self, start: usize, bytes: usize) -> Result<Held, PinError> {
        let span = pages(start, bytes).ok_or(PinError::Nothing)?;
        if let Some(held) = self.cache.look_up(span) {
            return Ok(held);
        }
        match self.register(span) {
            // The limit may be the kernel's, or be shared with others: fewer unused registrations may help.
            Err(PinError::Kernel(error)) if error.raw_os_error() == Some(libc::ENOMEM) => {
                self.cache.unpin_unused();
                self.register(span)
            }
            other => other,
        }
    }

    /// The end of a use. The memory stays registered while the allowance lasts.
    pub fn release(&mut self, held: Held) {
        self.cache.release(held);
        self.end_registrations();
    }

    /// The memory of this range was unmapped, moved elsewhere or dropped, or is about to be.
    pub fn invalidate(&mut self, start: usize, bytes: usize) {
        let Some(span) = pages(start, bytes) else { return };
        self.cache.invalidate(span);
        self.registrar.invalidated(addresses(span));
        self.end_registrations();
    }

    /// Unpins what is not in use.
    pub fn unpin_unused(&mut self) {
        self.cache.unpin_unused();
        self.end_registrations();
    }

    #[must_use]
    pub fn counts(&self) -> Counts {
        self.cache.counts()
    }

    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.cache.pinned_pages() * OS_PAGE_BYTES as u64
    }

    pub fn registrar(&mut self) -> &mut R {
        &mut self.registrar
    }

    fn register(&mut self, span: Span) -> Result<Held, PinError> {
        let id = self.cache.admit(span)?;
        while let Some(output) = self.cache.poll() {
            match output {
                Output::Deregister { id, .. } => self.registrar.deregister(id),
                Output::Register { id, span } => {
                    if let Err(error) = self.registrar.register(id, addresses(span)) {
                        self.cache.refused(id);
                        return Err(PinError::Kernel(error));
                    }
                }
            }
        }
        Ok(self.cache.registered(id).expect("nothing came in between"))
    }

    fn end_registrations(&mut self) {
        while let Some(output) = self.cache.poll() {
            let Output::Deregister { id, .. } = output else { unreachable!("nothing was admitted") };
            self.registrar.deregister(id);
        }
    }
}

fn pages(start: usize, bytes: usize) -> Option<Span> {
    Span::of_bytes(start as u64, bytes as u64, OS_PAGE_BYTES as u64)
}

fn addresses(span: Span) -> Range<usize> {
    let address = |page: PageIndex| usize::try_from(page.0).expect("a 64-bit machine") * OS_PAGE_BYTES;
    address(span.first())..address(span.end())
}

pub mod watch;

#[cfg(test)]
mod tests;
