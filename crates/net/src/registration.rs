//! Pinned memory: the pin-down cache of [`rampool_pinning`], and what pins for it.
//!
//! ```text
//!   Pins          the cache at work: acquire, release, invalidate
//!   FixedBuffers  registers memory with an io_uring
//!   watch         the kernel tells when memory is unmapped, moved or dropped
//! ```
//! Changes to [watched](Pins::watch) memory are read with [`Pins::catch_up`], before each send. For all other
//! memory, the code that changes mappings under it must call [`Pins::invalidate`] before it sends from that
//! memory again; see `docs/internals/zero-copy.md`.

use std::io;
use std::ops::Range;

use rampool_kernel::ring::{Ring, RingError};
use rampool_pinning::{Counts, Held, Limits, Output, PinCache, Refused, RegistrationId, Span};
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};
use watch::{Change, Seen, Watcher};

/// All addresses that a program can have.
const ADDRESSES: usize = 1 << 56;

/// Fixed buffers of an io_uring: really pinned, and sent from without looking pages up.
#[derive(Debug)]
pub struct FixedBuffers {
    ring: Ring,
}

impl FixedBuffers {
    /// Bytes of one registration.
    const MOST_BYTES: u64 = 1 << 30;

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

    fn register(&mut self, id: RegistrationId, range: Range<usize>) -> io::Result<()> {
        self.ring.register(Self::place(id), range.start, range.len())
    }

    fn deregister(&mut self, id: RegistrationId) {
        self.ring.deregister(Self::place(id)).expect("an empty buffer takes the place of any");
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
pub struct Pins {
    cache: PinCache,
    buffers: FixedBuffers,
    /// Since some memory is watched.
    watcher: Option<(&'static Watcher, Seen)>,
}

impl Pins {
    #[must_use]
    pub fn new(buffers: FixedBuffers, allowance_bytes: u64) -> Self {
        let limits = Limits {
            allowance_pages: allowance_bytes / OS_PAGE_BYTES as u64,
            registration_pages: FixedBuffers::MOST_BYTES / OS_PAGE_BYTES as u64,
            registrations: buffers.ring.places().into(),
        };
        Self { cache: PinCache::new(limits), buffers, watcher: None }
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

    pub fn buffers(&mut self) -> &mut FixedBuffers {
        &mut self.buffers
    }

    fn register(&mut self, span: Span) -> Result<Held, PinError> {
        let id = self.cache.admit(span)?;
        while let Some(output) = self.cache.poll() {
            match output {
                Output::Deregister { id, .. } => self.buffers.deregister(id),
                Output::Register { id, span } => {
                    if let Err(error) = self.buffers.register(id, addresses(span)) {
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
            self.buffers.deregister(id);
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
