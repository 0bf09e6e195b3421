//! Sending without a copy: io_uring's `SEND_ZC` for the large pieces of a pool's plain TCP connections.
//!
//! A piece that is sent this way is pinned and read by the network from where it lies, instead of being
//! copied into the socket's buffer. Which pieces, the connection's [`PathChoice`] says. How they are pinned
//! depends on whose memory they are:
//!
//! * Memory that this engine was told of ([`ZeroCopy::keep`]) is registered through the pin-down cache and
//!   stays so: later sends find it without a kernel call. When it goes, the kernel says so, where it can be
//!   watched; elsewhere the caller of `keep` does ([`ZeroCopy::forget`]).
//! * All other memory is pinned for the one send. Nothing about it is remembered, so nothing can be stale.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rampool_kernel::memory::Mapping;
use rampool_kernel::ring::{RingError, Sent};
use rampool_pinning::Held;
use rampool_pinning::path::{Cost, Path, PathChoice, Wish, crossover};

use super::Piece;
use crate::registration::{FixedBuffers, Pins, without};

/// Registrations at one time.
const PLACES: u16 = 4096;
/// Lengths at which the two paths are compared.
const MEASURED_BYTES: [usize; 5] = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Of so many trials of each, the median counts.
const TRIALS: usize = 7;

/// The engine of one pool, shared by its links.
pub type SharedZeroCopy = Arc<Mutex<ZeroCopy>>;

/// How the end of kept memory is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kept {
    /// By the kernel alone.
    Watched,
    /// By the caller that kept it: this memory cannot be watched.
    UntilForgotten,
}

/// What was sent without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ZeroCopyStats {
    pub sends: u64,
    pub bytes: u64,
    /// Of the sends that have ended, those that the network copied after all.
    pub copied: u64,
    /// Sends from registered memory; the others were pinned for the one send.
    pub registered: u64,
}

/// Sends without copies for the links of one pool.
#[derive(Debug)]
pub struct ZeroCopy {
    pins: Pins,
    /// Kept memory, whose end the kernel or its owner reports. Disjoint, in order.
    kept: Vec<Range<usize>>,
    /// By link.
    choices: Vec<PathChoice>,
    /// Sends that have not ended: whose they are, and what they hold.
    under_way: BTreeMap<u64, (usize, Option<Held>)>,
    stats: ZeroCopyStats,
}

impl ZeroCopy {
    /// # Errors
    /// [`RingError`].
    pub fn open(allowance_bytes: u64) -> Result<Self, RingError> {
        let pins = Pins::new(FixedBuffers::open(PLACES)?, allowance_bytes);
        Ok(Self {
            pins,
            kept: Vec::new(),
            choices: Vec::new(),
            under_way: BTreeMap::new(),
            stats: ZeroCopyStats::default(),
        })
    }

    /// Registrations of this memory may be kept from now on, until it is forgotten, or the kernel reports
    /// that it is gone.
    pub fn keep(&mut self, memory: Range<usize>) -> Kept {
        if memory.is_empty() {
            return Kept::Watched;
        }
        // The previous memory there must not be taken for this one.
        self.catch_up();
        let kept = if self.pins.watch(&memory) { Kept::Watched } else { Kept::UntilForgotten };
        let mut all = memory;
        self.kept.retain(|range| {
            let apart = range.end < all.start || all.end < range.start;
            if !apart {
                all = all.start.min(range.start)..all.end.max(range.end);
            }
            apart
        });
        let at = self.kept.partition_point(|range| range.start < all.start);
        self.kept.insert(at, all);
        kept
    }

    /// Hears what the kernel has said of watched memory.
    fn catch_up(&mut self) {
        let Self { pins, kept, .. } = self;
        pins.catch_up(|gone| *kept = without(kept, &gone));
    }

    /// This memory is unmapped, or the mapping behind its addresses changes. Call before that memory is used
    /// again.
    pub fn forget(&mut self, memory: Range<usize>) {
        self.kept = without(&self.kept, &memory);
        self.pins.invalidate(memory.start, memory.len());
    }

    #[must_use]
    pub fn stats(&self) -> ZeroCopyStats {
        self.stats
    }

    /// Bytes that registrations pin now.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.pins.pinned_bytes()
    }

    fn is_kept(&self, memory: &Range<usize>) -> bool {
        let at = self.kept.partition_point(|range| range.start <= memory.start);
        at.checked_sub(1).is_some_and(|at| memory.end <= self.kept[at].end)
    }

    fn gather(&mut self) {
        while let Some(ended) = self.pins.buffers().ring().ended() {
            let Some((link, held)) = self.under_way.remove(&ended.number) else { continue };
            self.choices[link].completed(ended.copied);
            self.stats.copied += u64::from(ended.copied);
            if let Some(held) = held {
                self.pins.release(held);
            }
        }
    }

    /// # Safety
    /// As [`rampool_kernel::ring::Ring::send`].
    unsafe fn send(&mut self, link: usize, socket: BorrowedFd<'_>, piece: Piece) -> io::Result<Sent> {
        self.gather();
        self.catch_up();
        let memory = piece.ptr.addr()..piece.ptr.addr() + piece.len;
        // What cannot be registered, for want of an allowance or because it is read-only, is pinned for the
        // one send.
        let held =
            if self.is_kept(&memory) { self.pins.acquire(memory.start, memory.len()).ok() } else { None };
        let place = held.as_ref().map(|held| FixedBuffers::place(held.registration()));
        // SAFETY: the caller's promise; what was found in the cache is what is mapped there: otherwise the
        // kernel, or the caller that had it kept, would have reported the change.
        let sent = unsafe { self.pins.buffers().ring().send(socket, piece.ptr, piece.len, place) };
        if let Ok(Sent::Taken { bytes, number }) = sent {
            self.stats.sends += 1;
            self.stats.bytes += bytes as u64;
            self.stats.registered += u64::from(held.is_some());
            self.under_way.insert(number, (link, held));
            self.gather();
            return sent;
        }
        if let Some(held) = held {
            self.pins.release(held);
        }
        if matches!(sent, Ok(Sent::Unsupported)) {
            self.choices[link].unsupported();
        }
        sent
    }
}

/// A link's part in the engine.
#[derive(Debug)]
pub(super) struct Sender {
    engine: SharedZeroCopy,
    link: usize,
}

impl Sender {
    pub fn attach(engine: &SharedZeroCopy, choice: PathChoice) -> Self {
        let mut shared = engine.lock().unwrap_or_else(PoisonError::into_inner);
        shared.choices.push(choice);
        Self { engine: engine.clone(), link: shared.choices.len() - 1 }
    }

    pub fn choice(&self) -> PathChoice {
        self.locked().choices[self.link]
    }

    /// Whether a piece of this length goes without a copy.
    pub fn takes(&self, bytes: usize) -> bool {
        let mut shared = self.locked();
        shared.choices[self.link].path(bytes as u64) == Path::ZeroCopy
            && !shared.pins.buffers().ring().is_full()
    }

    /// # Safety
    /// As [`rampool_kernel::ring::Ring::send`].
    pub unsafe fn send(&self, socket: BorrowedFd<'_>, piece: Piece) -> io::Result<Sent> {
        // SAFETY: the caller's promise.
        unsafe { self.locked().send(self.link, socket, piece) }
    }

    /// Whether the kernel may still read memory for this link.
    pub fn is_reading(&self) -> bool {
        let mut shared = self.locked();
        shared.gather();
        shared.under_way.values().any(|(link, _)| *link == self.link)
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, ZeroCopy> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a copy costs on this machine, and what pinning for one transfer does, which is the dearest that
/// sending without a copy can be: at several lengths. Takes some tens of milliseconds, and 56 MiB while it
/// does.
///
/// # Errors
/// [`RingError`], also for want of memory or of the right to lock it.
pub fn measure() -> Result<Vec<Cost>, RingError> {
    let ring = rampool_kernel::ring::Ring::open(1)?;
    // Each trial has bytes of its own: what a program sends is seldom in the CPU's small caches.
    let most = TRIALS * MEASURED_BYTES.last().expect("there are some");
    let unavailable =
        |error: rampool_kernel::memory::MapError| RingError::from(io::Error::from_raw_os_error(error.errno));
    let (from, to) =
        (Mapping::anonymous(most).map_err(unavailable)?, Mapping::anonymous(most).map_err(unavailable)?);
    for mapping in [&from, &to] {
        // SAFETY: a mapping of this function's own.
        unsafe { mapping.at(0).write_bytes(1, most) };
    }
    let nanos = |started: Instant| u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let mut costs = Vec::new();
    for bytes in MEASURED_BYTES {
        let (mut copies, mut pins) = ([0; TRIALS], [0; TRIALS]);
        for (trial, (copy, pin)) in copies.iter_mut().zip(&mut pins).enumerate() {
            let at = trial * (most / TRIALS);
            let started = Instant::now();
            // SAFETY: both mappings are this function's own and longer.
            unsafe { std::ptr::copy_nonoverlapping(from.at(at), to.at(at), bytes) };
            // The compiler may not leave the copy out.
            std::hint::black_box(to.at(at));
            *copy = nanos(started);
            let started = Instant::now();
            ring.register(0, from.start() + at, bytes)?;
            ring.deregister(0)?;
            *pin = nanos(started);
        }
        copies.sort_unstable();
        pins.sort_unstable();
        costs.push(Cost { bytes: bytes as u64, copy_ns: copies[TRIALS / 2], zero_copy_ns: pins[TRIALS / 2] });
    }
    Ok(costs)
}

/// From how many bytes on pinning for one transfer costs less than a copy; none where it never does, or
/// cannot be done.
#[must_use]
pub fn measured_crossover() -> Option<u64> {
    measure().ok().and_then(|costs| crossover(&costs))
}

/// The variable that says what the user wants where the program does not: `auto`, `off`, or an amount.
pub const VARIABLE: &str = "RAMPOOL_ZERO_COPY";

/// `auto`, `off`, or from how many bytes on.
///
/// # Errors
/// Why it is none of these.
pub fn parse_wish(text: &str) -> Result<Wish, String> {
    match text {
        "auto" => Ok(Wish::Auto),
        "off" => Ok(Wish::Never),
        amount => match amount.parse::<rampool_wire::units::ByteLen>() {
            Ok(bytes) => Ok(Wish::From(bytes.0)),
            Err(error) => Err(format!("{amount:?} is neither `auto` nor `off`, and no amount: {error}")),
        },
    }
}
