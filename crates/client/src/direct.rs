//! The direct view: bytes of regions, read and changed where they lie, without pages.
//!
//! DIMMnet-3 (Tanabe et al.) lets a processor use a large memory on the network by commands that run *at*
//! that memory. Here a [`Layout`] says which bytes, in MPI's terms; the memory servers that hold them gather,
//! scatter, update, filter or add them up, and only useful bytes travel. It is the same pool as the paged
//! view's: the same servers, leases, regions, placement and wire.
//!
//! ```text
//!   get, put            bytes, or a layout there and a layout here
//!   copy                a layout there to another there, from server to server
//!   accumulate          sum, min, max, and, or, xor of elements into a layout
//!   fetch_op            one element: update it and learn what it was; fetch_add, compare_exchange
//!   reduce, select      count, sum, least, greatest of a column's elements that match; which they are
//!   send, take          messages of named queues, whose heads and bodies travel apart
//! ```
//!
//! **Sharing.** A region is opened for every member of a lease, by name or by ticket; each thread or process
//! has a [`Direct`] of its own. Regions live until a member frees them or the lease's last member leaves.
//! Memory that is paged is handed over as a copy (`rampool::region::Region::hand_over`); pages of a pool by
//! writing everything back, and then opening the region ([`Direct::open_pages`]); one that is open is handed
//! back by adopting it ([`Direct::into_pool`], [`Pool::adopt_region`]). Nothing keeps a pager's copies and
//! direct access in step while both use a region.
//!
//! **Order.** Operations of one `Direct` that touch the same byte take effect in the order in which they were
//! started, waited for or not (one that writes where another still reads waits for that at the servers
//! concerned, and what comes behind it there waits as well). Between different bytes only waiting gives an
//! order. Once an operation was waited for, all members see its effect.
//!
//! **At once.** An aligned word of 8 bytes is read and written at once, and so is each element of an
//! accumulate, a `fetch_op`, and everything within one page that one operation does. A longer operation is
//! cut into requests of 256 KiB or less (copies: 1 MiB); others may see it half done, and if a server is lost
//! or full in the middle, what was done stays done.
//!
//! **Once.** An update is carried out once, also where a connection broke and was made again in between. An
//! operation that ends with an error may have happened in part.
//!
//! **Checked.** Bytes carry checksums: of a whole page the one that was made when it was stored, end to end;
//! of parts of pages one for the way. A page that is changed in part keeps a checksum that tells whether any
//! of its other bytes went wrong.
//!
//! Every wait ends: a server that does not answer within the pool's deadline is lost, and every operation
//! that needs it ends with an error that names it.

mod group;
mod listener;
mod published;
mod queue;

pub use group::{Column, Group, Key};
pub use listener::{ListenError, QueueListener, Verdict};
pub use published::{PublishedMemory, RemoteMemory};
pub use queue::{Message, PendingSend, Queue, QueueError, SendBody};
pub use rampool_wire::frame::{Listed as QueueInfo, MAX_HEAD_BYTES, QueueBounds, Rights};

use crate::error::{ConnectError, LostReason, Operation, PoolError};
use crate::pool::{
    Job, MOST_COPIED_BYTES, MOST_SCANNED, Pool, PoolConfig, PoolEvent, PoolRegion, RegionSelector,
    RegionTicket, ScanPart,
};
use rampool_net::transport::PieceMut;
pub use rampool_net::transport::zero_copy::Kept;
use rampool_net::transport::zero_copy::{self, SharedZeroCopy, ZeroCopyStats};
use rampool_paging::placement::ServerIndex;
use rampool_pinning::path::NoZeroCopy;
use rampool_wire::elements::{Combine, Kind, Reduced, Scan, Test, Want};
use rampool_wire::frame::{Change, FetchOp, MAX_NAME_BYTES, MAX_PAGE_INDEX, NamedRegion, parse_reduced};
use rampool_wire::layout::{Layout, LayoutError, Program};
use rampool_wire::units::{ByteLen, Extent, OS_PAGE_BYTES};
use std::collections::{BTreeMap, VecDeque};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// What is wrong with the answer of a server that is lost for it.
const ODD_SCAN: &str = "the answer to a scan is malformed";

/// A region as the direct view knows it: a number of bytes, zero where never written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectRegion {
    region: PoolRegion,
    bytes: u64,
}

impl DirectRegion {
    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The region as the pool knows it.
    #[must_use]
    pub fn pool_region(&self) -> PoolRegion {
        self.region
    }
}

/// Why a direct operation failed. What names a server names the operation, too.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectError {
    #[error("{0}")]
    Layout(#[from] LayoutError),
    #[error(
        "the layout of the region selects {there} bytes, the local layout {here}; both must select as many"
    )]
    Lengths { there: u64, here: u64 },
    #[error("there are {keys} keys for {elements} elements; each element has one")]
    Keys { keys: u64, elements: u64 },
    #[error("{how:?} is not defined for elements of kind {kind:?}")]
    NotForKind { kind: Kind, how: Combine },
    #[error("a region's name has 1 to {MAX_NAME_BYTES} bytes")]
    Name,
    #[error("a region has from 1 byte to 4 PiB, not {wanted} bytes")]
    RegionLength { wanted: u64 },
    #[error("region {name} has {has} bytes, not the {wanted} it was opened for")]
    OtherLength { name: String, wanted: u64, has: u64 },
    #[error("there is no region {name}")]
    NoSuchName { name: String },
    /// One that this side had, or had a ticket for.
    #[error("there is no such region")]
    NoSuchRegion,
    #[error("memory server {server} has no room for {operation}: {free} of the lease are free there")]
    Full { server: String, operation: Operation, free: ByteLen },
    #[error(
        "memory server {server} sent damaged bytes twice in a row ({operation}): they differ from what was \
         stored"
    )]
    Damaged { server: String, operation: Operation },
    #[error("cannot allocate {bytes} bytes for what the layout selects")]
    NoMemory { bytes: u64 },
    /// More than one call should do: it would take too long, or too many requests.
    #[error("{operation} of {wanted} {what} is too large: one call does {most} at most")]
    TooMuch { operation: Operation, what: &'static str, wanted: u64, most: u64 },
    #[error("no server of the pool is reached through shared memory, and only such a one publishes memory")]
    NoServerHere,
    #[error("cannot allocate memory to publish: {0}")]
    Memory(#[from] rampool_kernel::sealed::SealedError),
    #[error(transparent)]
    Pool(PoolError),
}

impl From<PoolError> for DirectError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::NoSuchRegion => Self::NoSuchRegion,
            other => Self::Pool(other),
        }
    }
}

/// A number that a memory server computes with.
pub trait Number: Copy + private::Sealed {
    const KIND: Kind;
    /// Its bits, in the lowest bytes.
    fn bits(self) -> u64;
    fn from_bits(bits: u64) -> Self;
}

mod private {
    pub trait Sealed {}
}

macro_rules! number {
    ($($type:ty, $kind:ident, $to:expr, $from:expr;)*) => {$(
        impl private::Sealed for $type {}
        impl Number for $type {
            const KIND: Kind = Kind::$kind;
            fn bits(self) -> u64 {
                ($to)(self)
            }
            fn from_bits(bits: u64) -> Self {
                ($from)(bits)
            }
        }
    )*};
}

/// The lowest 4 bytes.
fn low(bits: u64) -> u32 {
    u32::try_from(bits & u64::from(u32::MAX)).expect("32 bits")
}

number! {
    i32, I32, |n: i32| u64::from(n.cast_unsigned()), |bits| low(bits).cast_signed();
    u32, U32, u64::from, low;
    i64, I64, i64::cast_unsigned, u64::cast_signed;
    u64, U64, |n| n, |bits| bits;
    f32, F32, |n: f32| u64::from(n.to_bits()), |bits| f32::from_bits(low(bits));
    f64, F64, f64::to_bits, f64::from_bits;
}

/// Which elements of a column count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Filter<T> {
    test: Test,
    low: T,
    high: T,
}

impl<T: Number> Filter<T> {
    #[must_use]
    pub fn all() -> Self {
        Self { test: Test::All, low: T::from_bits(0), high: T::from_bits(0) }
    }

    #[must_use]
    pub fn equal(to: T) -> Self {
        Self { test: Test::Equal, low: to, high: to }
    }

    #[must_use]
    pub fn not_equal(to: T) -> Self {
        Self { test: Test::NotEqual, low: to, high: to }
    }

    #[must_use]
    pub fn less(than: T) -> Self {
        Self { test: Test::Less, low: than, high: than }
    }

    #[must_use]
    pub fn at_most(most: T) -> Self {
        Self { test: Test::LessOrEqual, low: most, high: most }
    }

    #[must_use]
    pub fn greater(than: T) -> Self {
        Self { test: Test::Greater, low: than, high: than }
    }

    #[must_use]
    pub fn at_least(least: T) -> Self {
        Self { test: Test::GreaterOrEqual, low: least, high: least }
    }

    /// From `low` to `high`, both included.
    #[must_use]
    pub fn between(low: T, high: T) -> Self {
        Self { test: Test::Between, low, high }
    }
}

/// What the elements of a column that count come to.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Total {
    /// Of integers: exact.
    Integer(i128),
    /// Of floating-point numbers: added up part by part, in the servers' order.
    Float(f64),
}

/// An operation under way. [`Direct::wait`] for it; one that is dropped goes on, and its outcome stays with
/// the `Direct` until that ends.
#[must_use]
#[derive(Debug)]
pub struct Pending {
    token: u64,
}

/// An operation that was not waited for yet.
struct Started {
    token: u64,
    operation: Operation,
    /// Its result.
    ended: Option<Result<(), DirectError>>,
}

/// A `fetch_op` under way.
#[must_use]
#[derive(Debug)]
pub struct PendingValue {
    token: u64,
    request: u64,
}

/// One thread's way to the bytes of a lease's regions.
///
/// Invariant: the memory of an operation under way is in `buffers`, or belongs to a caller that does not get
/// it back before the operation has ended.
pub struct Direct {
    // Dropped before the buffers: from then on nothing is received into them.
    pool: Pool,
    buffers: BTreeMap<u64, Vec<u8>>,
    /// What was started and was not waited for yet, in the order of its tokens.
    started: VecDeque<Started>,
    /// How many of them have not ended.
    under_way: usize,
    next: u64,
    spin: Duration,
    zero_copy: Option<SharedZeroCopy>,
    queues: queue::QueueTable,
}

impl Direct {
    /// Connects to the servers, and opens or joins a lease. Where the peers are such that sending without a
    /// copy may pay, finding out takes some tens of milliseconds.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(config: &PoolConfig) -> Result<Self, ConnectError> {
        let mut direct = Self::new(Pool::connect_for_direct(config)?);
        let variable =
            || std::env::var(zero_copy::VARIABLE).ok().and_then(|text| zero_copy::parse_wish(&text).ok());
        let wish = config.zero_copy.or_else(variable).unwrap_or_default();
        direct.zero_copy = direct.pool.send_without_copies(wish, config.pinned.0);
        Ok(direct)
    }

    /// Works on a pool that is not used otherwise. Everything is sent by copying.
    ///
    /// # Panics
    /// If operations of the pool are under way, or its pages have two copies: [`Direct::connect`] joins such
    /// a lease, for regions with one.
    #[must_use]
    pub fn new(pool: Pool) -> Self {
        assert_eq!(pool.copies(), 1, "the direct view changes one copy of each page");
        assert_eq!(
            pool.operations_under_way(),
            0,
            "the pool's operations end before another view of it begins"
        );
        Self {
            pool,
            buffers: BTreeMap::new(),
            started: VecDeque::new(),
            under_way: 0,
            next: 0,
            spin: Duration::ZERO,
            zero_copy: None,
            queues: queue::QueueTable::default(),
        }
    }

    /// How long a wait looks for answers before it sleeps; not at all unless told otherwise. Waking a thread
    /// costs more than a small operation does.
    pub fn spin_for(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// Memory whose registrations may be kept: what is put from it without a copy stays registered for the
    /// next put from it. Other memory is pinned for each transfer.
    ///
    /// Where the kernel lets this process watch the memory ([`Kept::Watched`]), it reports when that is
    /// unmapped, moved or dropped, and nothing stale is ever sent. Otherwise ([`Kept::UntilForgotten`]:
    /// memory of files, of rampool's own regions, or a process that may not use userfaultfd) the caller must
    /// report it ([`Direct::forget`]): until then puts send the pages that were there when they were first
    /// sent, whatever is mapped there by then.
    ///
    /// To unmap watched memory takes some microseconds more. The mappings that the memory lies in are watched
    /// as a whole, for as long as they exist.
    pub fn keep(&mut self, memory: &[u8]) -> Kept {
        // SAFETY: the memory that the slice borrows.
        unsafe { self.keep_at(memory.as_ptr(), memory.len()) }
    }

    /// As [`Direct::keep`], of memory at an address, whose bytes others may change.
    ///
    /// # Safety
    /// The memory is mapped, and readable.
    pub unsafe fn keep_at(&mut self, start: *const u8, bytes: usize) -> Kept {
        // Where nothing is sent without a copy, nothing is registered, and nothing can be stale.
        let Some(engine) = &self.zero_copy else { return Kept::Watched };
        engine
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .keep(start.addr()..start.addr().saturating_add(bytes))
    }

    /// This memory is about to be unmapped (freed), moved or dropped (`munmap`, `mremap`, `madvise`), or just
    /// was. Part of what was kept is enough; what was never kept does no harm.
    pub fn forget(&mut self, start: *const u8, bytes: usize) {
        if let Some(engine) = &self.zero_copy {
            engine
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .forget(start.addr()..start.addr().saturating_add(bytes));
        }
    }

    /// For each server, in the pool's order, from how many bytes on pieces of a put leave without a copy, or
    /// why they never do.
    #[must_use]
    pub fn zero_copy_from(&self) -> Vec<Result<u64, NoZeroCopy>> {
        self.pool.zero_copy_from()
    }

    /// What was sent without a copy.
    #[must_use]
    pub fn zero_copy_stats(&self) -> ZeroCopyStats {
        self.zero_copy
            .as_ref()
            .map(|engine| engine.lock().unwrap_or_else(PoisonError::into_inner).stats())
            .unwrap_or_default()
    }

    /// The pool, for tickets, statistics and what to sleep on.
    ///
    /// It cannot be changed, or taken out, from here: the servers' answers come into buffers of this
    /// `Direct`. Two pools that changed places would go on receiving into buffers that are freed
    /// (`tests/compile_fail.rs` of the pager).
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The pool, for pages. [`Direct::new`] is the way back; regions keep their names.
    ///
    /// # Panics
    /// If operations are under way: [`Direct::wait_all`] comes first.
    #[must_use]
    pub fn into_pool(self) -> Pool {
        assert_eq!(
            self.under_way + self.pool.operations_under_way(),
            0,
            "operations end before another view of a pool begins"
        );
        self.pool
    }

    /// Leaves the servers, as [`Pool::close`]. Operations that are under way may not happen.
    pub fn close(&mut self) {
        self.pool.close();
    }

    /// Tells the servers that they may forget these pages, as [`Pool::discard`].
    pub fn discard(&mut self, region: DirectRegion, extent: Extent) {
        self.pool.discard(region.region, extent);
    }

    /// Makes a region of `bytes` bytes without a name. Blocks, as everything that opens or frees.
    ///
    /// # Errors
    /// [`DirectError`]; [`DirectError::RegionLength`] for 0 bytes, or more than a region can have.
    pub fn create(&mut self, bytes: u64) -> Result<DirectRegion, DirectError> {
        // Checked before a region exists that cannot be opened.
        possible(bytes)?;
        let region = self.pool.create_region()?;
        self.open_pages(region, bytes)
    }

    /// Opens a region of this pool, such as one that was paged, for every member of the lease. `bytes` is its
    /// length, unless it has one.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn open_pages(&mut self, region: PoolRegion, bytes: u64) -> Result<DirectRegion, DirectError> {
        let ticket = self.pool.region_ticket(region)?;
        self.opened(RegionSelector::Ticket(&ticket), bytes)
    }

    /// Opens the region of this name, which is made, with `bytes` bytes, if there is none.
    ///
    /// # Errors
    /// [`DirectError::OtherLength`] if there is one of another length, [`DirectError::RegionLength`] if none
    /// can be.
    pub fn open_or_create(&mut self, name: &str, bytes: u64) -> Result<DirectRegion, DirectError> {
        possible(bytes)?;
        let region = self.opened(RegionSelector::Name(name), bytes)?;
        if region.bytes == bytes {
            Ok(region)
        } else {
            Err(DirectError::OtherLength { name: name.to_owned(), wanted: bytes, has: region.bytes })
        }
    }

    /// Opens the region of this name.
    ///
    /// # Errors
    /// [`DirectError::NoSuchName`] if there is none.
    pub fn open(&mut self, name: &str) -> Result<DirectRegion, DirectError> {
        self.opened(RegionSelector::Name(name), 0)
    }

    /// The regions of the lease that have a name.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn named(&mut self) -> Result<Vec<NamedRegion>, DirectError> {
        Ok(self.pool.named_regions()?)
    }

    /// Opens a region that another member has opened.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn open_ticket(&mut self, ticket: &RegionTicket) -> Result<DirectRegion, DirectError> {
        self.opened(RegionSelector::Ticket(ticket), 0)
    }

    fn opened(&mut self, selector: RegionSelector<'_>, bytes: u64) -> Result<DirectRegion, DirectError> {
        if let RegionSelector::Name(name) = selector
            && (name.is_empty() || name.len() > MAX_NAME_BYTES)
        {
            return Err(DirectError::Name);
        }
        let (region, bytes) =
            self.pool.open_region(selector, bytes).map_err(|error| match (error, selector) {
                (PoolError::NoSuchRegion, RegionSelector::Name(name)) => {
                    DirectError::NoSuchName { name: name.to_owned() }
                }
                (error, _) => error.into(),
            })?;
        Ok(DirectRegion { region, bytes })
    }

    /// What another member of the lease needs to open this region.
    ///
    /// # Errors
    /// [`DirectError::NoSuchRegion`].
    pub fn ticket(&self, region: DirectRegion) -> Result<RegionTicket, DirectError> {
        Ok(self.pool.region_ticket(region.region)?)
    }

    /// Frees a region, for every member. Does not block. That of a message's body is not freed: it goes with
    /// the message.
    pub fn free(&mut self, region: DirectRegion) {
        self.queues.forget(region.region);
        self.pool.free_region(region.region);
    }

    // --- bytes ---------------------------------------------------------------------------------------------

    /// Reads `buffer.len()` bytes from `offset` on.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn get(&mut self, region: DirectRegion, offset: u64, buffer: &mut [u8]) -> Result<(), DirectError> {
        // SAFETY: the buffer is borrowed until the operation has ended.
        if let Some(token) = unsafe {
            self.begin_piece(region, offset, PieceMut { ptr: buffer.as_mut_ptr(), len: buffer.len() })
        } {
            return self.finish(token);
        }
        let (there, here) = plain(region, offset, buffer.len() as u64)?;
        // SAFETY: the buffer is borrowed until the operation has ended.
        let token = unsafe { self.begin(region, Job::Gather, &there, &here, buffer.as_mut_ptr()) }?;
        self.finish(token)
    }

    /// Writes bytes from `offset` on.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn put(&mut self, region: DirectRegion, offset: u64, bytes: &[u8]) -> Result<(), DirectError> {
        let (there, here) = plain(region, offset, bytes.len() as u64)?;
        // SAFETY: the bytes are borrowed until the operation has ended, and only read.
        let token = unsafe { self.begin(region, Job::Scatter, &there, &here, bytes.as_ptr().cast_mut()) }?;
        self.finish(token)
    }

    /// Reads what `there` selects from `offset` of the region on into what `here` selects of `buffer`, byte
    /// for byte in the layouts' order.
    ///
    /// # Errors
    /// [`DirectError`]; `buffer` may then hold some of the bytes. [`LayoutError::Overlap`] if `here` selects
    /// a byte twice.
    pub fn get_layout(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        buffer: &mut [u8],
        here: &Layout,
    ) -> Result<(), DirectError> {
        let (there, here) = both(region, offset, there, buffer.len() as u64, here)?;
        apart(&here)?;
        // SAFETY: the layout is within the buffer, which is borrowed until the operation has ended.
        let token = unsafe { self.begin(region, Job::Gather, &there, &here, buffer.as_mut_ptr()) }?;
        self.finish(token)
    }

    /// Writes what `here` selects of `bytes` to what `there` selects from `offset` of the region on.
    ///
    /// # Errors
    /// [`DirectError`]. [`LayoutError::Overlap`] if `there` selects a byte twice.
    pub fn put_layout(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        bytes: &[u8],
        here: &Layout,
    ) -> Result<(), DirectError> {
        let (there, here) = both(region, offset, there, bytes.len() as u64, here)?;
        apart(&there)?;
        // SAFETY: the layout is within the bytes, which are borrowed until the operation has ended, and only
        // read.
        let token = unsafe { self.begin(region, Job::Scatter, &there, &here, bytes.as_ptr().cast_mut()) }?;
        self.finish(token)
    }

    /// As [`Direct::get_layout`], into what `here` selects from an address on, also before it.
    ///
    /// # Safety
    /// What `here` selects is memory that can be written and is not used otherwise during the call.
    ///
    /// # Errors
    /// As [`Direct::get_layout`].
    pub unsafe fn get_layout_at(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        address: *mut u8,
        here: &Layout,
    ) -> Result<(), DirectError> {
        // SAFETY: the caller's promise, until the end of this call, which is that of the operation.
        let pending = unsafe { self.start_get_layout_at(region, offset, there, address, here) }?;
        self.wait(pending).map(drop)
    }

    /// Begins what [`Direct::get_layout_at`] does; [`Direct::wait`] gives an empty vector.
    ///
    /// # Safety
    /// What `here` selects is memory that can be written and is not used otherwise until the operation has
    /// ended, or the `Direct` is gone.
    ///
    /// # Errors
    /// As [`Direct::get_layout`].
    pub unsafe fn start_get_layout_at(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        address: *mut u8,
        here: &Layout,
    ) -> Result<Pending, DirectError> {
        let (memory, here, bytes) = from_first(address, here)?;
        let (there, here) = both(region, offset, there, bytes, &here)?;
        apart(&here)?;
        // SAFETY: the caller's promise.
        let token = unsafe { self.begin(region, Job::Gather, &there, &here, memory) }?;
        self.buffers.insert(token, Vec::new());
        Ok(Pending { token })
    }

    /// As [`Direct::put_layout`], of what `here` selects from an address on, also before it.
    ///
    /// # Safety
    /// What `here` selects is memory that can be read and is not written during the call.
    ///
    /// # Errors
    /// As [`Direct::put_layout`].
    pub unsafe fn put_layout_at(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        address: *const u8,
        here: &Layout,
    ) -> Result<(), DirectError> {
        // SAFETY: the caller's promise, until the end of this call, which is that of the operation.
        let pending = unsafe { self.start_put_layout_at(region, offset, there, address, here) }?;
        self.wait(pending).map(drop)
    }

    /// Begins what [`Direct::put_layout_at`] does; [`Direct::wait`] gives an empty vector.
    ///
    /// # Safety
    /// What `here` selects is memory that can be read until the operation has ended. If it is written
    /// meanwhile, the operation ends with an error, or any of the bytes are there afterwards.
    ///
    /// # Errors
    /// As [`Direct::put_layout`].
    pub unsafe fn start_put_layout_at(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        address: *const u8,
        here: &Layout,
    ) -> Result<Pending, DirectError> {
        let (memory, here, bytes) = from_first(address.cast_mut(), here)?;
        let (there, here) = both(region, offset, there, bytes, &here)?;
        apart(&there)?;
        // SAFETY: the caller's promise; the memory is only read.
        let token = unsafe { self.begin(region, Job::Scatter, &there, &here, memory) }?;
        self.buffers.insert(token, Vec::new());
        Ok(Pending { token })
    }

    /// Begins to read what `there` selects from `offset` on; [`Direct::wait`] gives the bytes, one after the
    /// other.
    ///
    /// # Errors
    /// [`DirectError::Layout`], or [`DirectError::NoMemory`]: a layout that selects bytes again and again may
    /// select more than there is memory anywhere.
    pub fn start_get(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
    ) -> Result<Pending, DirectError> {
        self.start_get_into(region, offset, there, Vec::new())
    }

    /// As [`Direct::start_get`], into a vector that was used before.
    ///
    /// # Errors
    /// As [`Direct::start_get`].
    pub fn start_get_into(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        buffer: Vec<u8>,
    ) -> Result<Pending, DirectError> {
        there.placed(offset, region.bytes)?;
        let bytes = there.size();
        let buffer = with_length(buffer, bytes).ok_or(DirectError::NoMemory { bytes })?;
        self.start(region, offset, there, Job::Gather, buffer)
    }

    /// Begins to read `bytes` consecutive bytes from `offset` on, as quickly as [`Direct::get`] does.
    ///
    /// # Errors
    /// [`DirectError::Layout`]; [`DirectError::NoMemory`] if they do not fit into this machine's memory.
    pub fn start_get_bytes(
        &mut self,
        region: DirectRegion,
        offset: u64,
        bytes: u64,
    ) -> Result<Pending, DirectError> {
        let mut buffer = with_length(Vec::new(), bytes).ok_or(DirectError::NoMemory { bytes })?;
        let place = PieceMut { ptr: buffer.as_mut_ptr(), len: buffer.len() };
        // SAFETY: the buffer's bytes do not move with it, and it is not touched or dropped before the
        // operation has ended or the pool is gone.
        let token = match unsafe { self.begin_piece(region, offset, place) } {
            Some(token) => token,
            None => {
                let (there, here) = plain(region, offset, bytes)?;
                // SAFETY: as above.
                unsafe { self.begin(region, Job::Gather, &there, &here, place.ptr) }?
            }
        };
        self.buffers.insert(token, buffer);
        Ok(Pending { token })
    }

    /// Begins to write bytes to what `there` selects from `offset` on; [`Direct::wait`] gives the vector
    /// back.
    ///
    /// # Errors
    /// [`DirectError::Layout`] or [`DirectError::Lengths`].
    pub fn start_put(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        bytes: Vec<u8>,
    ) -> Result<Pending, DirectError> {
        apart(&there.placed(offset, region.bytes)?)?;
        self.start(region, offset, there, Job::Scatter, bytes)
    }

    /// Begins to update the elements that `there` selects from `offset` on by as many operands;
    /// [`Direct::wait`] gives the vector back. An element that is selected twice is updated twice.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn start_accumulate(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        kind: Kind,
        how: Combine,
        operands: Vec<u8>,
    ) -> Result<Pending, DirectError> {
        if !how.fits(kind) {
            return Err(DirectError::NotForKind { kind, how });
        }
        aligned(&there.placed(offset, region.bytes)?, kind)?;
        self.start(region, offset, there, Job::Accumulate(kind, how), operands)
    }

    fn start(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        job: Job,
        mut buffer: Vec<u8>,
    ) -> Result<Pending, DirectError> {
        let (there, here) =
            both(region, offset, there, buffer.len() as u64, &Layout::bytes(buffer.len() as u64)?)?;
        // SAFETY: the buffer's bytes do not move with it, and it is not touched or dropped before the
        // operation has ended or the pool is gone.
        let token = unsafe { self.begin(region, job, &there, &here, buffer.as_mut_ptr()) }?;
        self.buffers.insert(token, buffer);
        Ok(Pending { token })
    }

    /// Waits for an operation, and gives its bytes.
    ///
    /// # Errors
    /// [`DirectError`].
    ///
    /// # Panics
    /// If the operation is another `Direct`'s.
    pub fn wait(&mut self, pending: Pending) -> Result<Vec<u8>, DirectError> {
        let result = self.finish(pending.token);
        let buffer = self.buffers.remove(&pending.token).expect("an operation of this client's has a buffer");
        result.map(|()| buffer)
    }

    /// Waits until an operation has ended, but not beyond `deadline`; whether it has.
    /// [`Direct::wait`] then returns at once.
    pub fn wait_until(&mut self, pending: &Pending, deadline: Instant) -> bool {
        self.ended_by(pending.token, deadline)
    }

    fn ended_by(&mut self, token: u64, deadline: Instant) -> bool {
        while !self.has_ended(token) {
            if Instant::now() >= deadline {
                return false;
            }
            self.step_until(deadline);
        }
        true
    }

    /// Whether an operation has ended. Does not block, and lets everything under way go on.
    pub fn is_done(&mut self, pending: &Pending) -> bool {
        self.progress();
        self.has_ended(pending.token)
    }

    /// Waits until everything that was started has ended; the results are still to be waited for.
    pub fn wait_all(&mut self) {
        while self.under_way > 0 {
            self.step();
        }
    }

    /// Lets everything under way go on, without blocking.
    pub fn progress(&mut self) {
        while let Some(event) = self.pool.poll() {
            self.note(event);
        }
    }

    /// Operations that have not ended.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Copies what `source` selects from `from_offset` of one region on to what `target` selects from
    /// `to_offset` of another (or the same), byte for byte in the layouts' order. The bytes go from server to
    /// server: this client only orders it.
    ///
    /// A copy has no place in the order of operations: wait for those that it is to come after. It is carried
    /// out once, also where connections break and are made again, that of this client or that between the
    /// servers.
    ///
    /// # Errors
    /// [`DirectError`]. [`LayoutError::Overlap`] if `target` selects a byte twice, [`DirectError::TooMuch`]
    /// for more than 1 TiB. The layouts must not meet in one region: what is copied is then either.
    pub fn copy(
        &mut self,
        (from, from_offset, source): (DirectRegion, u64, &Layout),
        (to, to_offset, target): (DirectRegion, u64, &Layout),
    ) -> Result<(), DirectError> {
        let token = self.begin_copy((from, from_offset, source), (to, to_offset, target))?;
        self.finish(token)
    }

    /// Begins to copy; [`Direct::wait`] gives an empty vector.
    ///
    /// # Errors
    /// [`DirectError::Layout`] or [`DirectError::Lengths`].
    pub fn start_copy(
        &mut self,
        from: (DirectRegion, u64, &Layout),
        to: (DirectRegion, u64, &Layout),
    ) -> Result<Pending, DirectError> {
        let token = self.begin_copy(from, to)?;
        self.buffers.insert(token, Vec::new());
        Ok(Pending { token })
    }

    fn begin_copy(
        &mut self,
        (from, from_offset, source): (DirectRegion, u64, &Layout),
        (to, to_offset, target): (DirectRegion, u64, &Layout),
    ) -> Result<u64, DirectError> {
        if source.size() != target.size() {
            return Err(DirectError::Lengths { there: source.size(), here: target.size() });
        }
        let (source, target) = (source.placed(from_offset, from.bytes)?, target.placed(to_offset, to.bytes)?);
        apart(&target)?;
        bounded(Operation::Copy(from_offset), "bytes", source.bytes(), MOST_COPIED_BYTES)?;
        self.must_know(from)?;
        self.must_know(to)?;
        let token = self.token(Operation::Copy(from_offset));
        self.pool.copy_bytes(token, (from.region, &source), (to.region, &target));
        Ok(token)
    }

    // --- elements ------------------------------------------------------------------------------------------

    /// Reads one number.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn get_value<T: Number>(&mut self, region: DirectRegion, offset: u64) -> Result<T, DirectError> {
        let mut bytes = [0; 8];
        self.get(region, offset, &mut bytes[..T::KIND.bytes()])?;
        Ok(T::from_bits(u64::from_le_bytes(bytes)))
    }

    /// Writes one number.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn put_value<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        value: T,
    ) -> Result<(), DirectError> {
        self.put(region, offset, &value.bits().to_le_bytes()[..T::KIND.bytes()])
    }

    /// Reads the numbers that `there` selects.
    ///
    /// # Errors
    /// [`DirectError`]. [`LayoutError::Unaligned`] if it selects a part of a number.
    pub fn get_values<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
    ) -> Result<Vec<T>, DirectError> {
        whole_numbers::<T>(there)?;
        let pending = self.start_get(region, offset, there)?;
        Ok(numbers(&self.wait(pending)?))
    }

    /// Writes numbers to what `there` selects.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn put_values<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        values: &[T],
    ) -> Result<(), DirectError> {
        let pending = self.start_put(region, offset, there, to_bytes(values))?;
        self.wait(pending).map(drop)
    }

    /// Updates the numbers that `there` selects, each by its operand.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn accumulate<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        there: &Layout,
        how: Combine,
        operands: &[T],
    ) -> Result<(), DirectError> {
        let pending = self.start_accumulate(region, offset, there, T::KIND, how, to_bytes(operands))?;
        self.wait(pending).map(drop)
    }

    /// Updates one number and gives what it was before.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn fetch_op<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        how: Combine,
        operand: T,
    ) -> Result<T, DirectError> {
        let pending = self.start_fetch_op(region, offset, how, operand)?;
        self.wait_value(pending)
    }

    /// Adds to one number and gives what it was before.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn fetch_add<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        operand: T,
    ) -> Result<T, DirectError> {
        self.fetch_op(region, offset, Combine::Sum, operand)
    }

    /// Writes `new` if the number is `expected`, bit by bit; gives what it was before.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn compare_exchange<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        expected: T,
        new: T,
    ) -> Result<T, DirectError> {
        let pending = self.start_compare_exchange(region, offset, expected, new)?;
        self.wait_value(pending)
    }

    /// Begins to do as [`Direct::compare_exchange`].
    ///
    /// # Errors
    /// [`DirectError::Layout`].
    pub fn start_compare_exchange<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        expected: T,
        new: T,
    ) -> Result<PendingValue, DirectError> {
        self.start_update(region, offset, T::KIND, Change::IfEqual(expected.bits()), new.bits())
    }

    /// Begins to update one number.
    ///
    /// # Errors
    /// [`DirectError::Layout`] or [`DirectError::NotForKind`].
    pub fn start_fetch_op<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        how: Combine,
        operand: T,
    ) -> Result<PendingValue, DirectError> {
        if !how.fits(T::KIND) {
            return Err(DirectError::NotForKind { kind: T::KIND, how });
        }
        self.start_update(region, offset, T::KIND, Change::Combine(how), operand.bits())
    }

    fn start_update(
        &mut self,
        region: DirectRegion,
        offset: u64,
        kind: Kind,
        change: Change,
        operand: u64,
    ) -> Result<PendingValue, DirectError> {
        aligned(&Layout::bytes(kind.bytes() as u64)?.placed(offset, region.bytes)?, kind)?;
        self.must_know(region)?;
        let token = self.token(Operation::FetchOp(offset));
        let request = self.pool.fetch_op(region.region, token, &FetchOp { kind, change, offset, operand });
        Ok(PendingValue { token, request })
    }

    /// Waits until an update has ended, but not beyond `deadline`; whether it has.
    pub fn value_until(&mut self, pending: &PendingValue, deadline: Instant) -> bool {
        self.ended_by(pending.token, deadline)
    }

    /// Waits for an update, and gives what the number was before.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn wait_value<T: Number>(&mut self, pending: PendingValue) -> Result<T, DirectError> {
        self.finish(pending.token)?;
        let (bits, _, _) = self.pool.reply(pending.request).expect("an update that succeeded has an answer");
        Ok(T::from_bits(bits))
    }

    // --- columns -------------------------------------------------------------------------------------------

    /// How many elements of the column count.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn count<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<u64, DirectError> {
        Ok(self.reduce(region, offset, column, filter, Want::Count)?.count)
    }

    /// How many elements of the column count, and their sum.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn sum<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<(u64, Total), DirectError> {
        let reduced = self.reduce(region, offset, column, filter, Want::Sum)?;
        let whole = i128::from_le_bytes(reduced.value);
        let total = match T::KIND {
            Kind::F32 | Kind::F64 => Total::Float(f64::from_bits(first_word(&reduced.value))),
            _ => Total::Integer(whole),
        };
        Ok((reduced.count, total))
    }

    /// The least of the elements that count.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn min<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<Option<T>, DirectError> {
        let reduced = self.reduce(region, offset, column, filter, Want::Min)?;
        Ok((reduced.count > 0).then(|| T::from_bits(first_word(&reduced.value))))
    }

    /// The greatest of the elements that count.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn max<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<Option<T>, DirectError> {
        let reduced = self.reduce(region, offset, column, filter, Want::Max)?;
        Ok((reduced.count > 0).then(|| T::from_bits(first_word(&reduced.value))))
    }

    /// The positions of the elements that count among those of the column, in order.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn select<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<Vec<u64>, DirectError> {
        let element = T::KIND.bytes() as u64;
        let mut positions = Vec::new();
        self.scan(region, offset, column, filter, Want::Positions, |part, _, found| {
            // Positions within the request become positions within the column, span by span.
            let (mut spans, mut before) = (part.spans.iter(), 0);
            let Some((mut first, mut count)) = spans.next().copied() else { return };
            for position in found.chunks_exact(4) {
                let position =
                    u64::from(u32::from_le_bytes(position.try_into().expect("four bytes"))) * element;
                while position - before >= count {
                    before += count;
                    (first, count) = *spans.next().expect("no more positions than elements were asked about");
                }
                positions.push((first + position - before) / element);
            }
        })?;
        positions.sort_unstable();
        Ok(positions)
    }

    /// The elements that count, in no particular order.
    ///
    /// # Errors
    /// [`DirectError`].
    pub fn select_values<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<Vec<T>, DirectError> {
        let mut values = Vec::new();
        self.scan(region, offset, column, filter, Want::Values, |_, _, found| {
            values.extend(numbers::<T>(found))
        })?;
        Ok(values)
    }

    fn reduce<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        column: &Layout,
        filter: Filter<T>,
        want: Want,
    ) -> Result<Reduced, DirectError> {
        let mut all = Reduced::default();
        self.scan(region, offset, column, filter, want, |_, reduced, _| {
            all = Scan::join(T::KIND, want, all, reduced)
        })?;
        Ok(all)
    }

    fn scan<T: Number>(
        &mut self,
        region: DirectRegion,
        offset: u64,
        column: &Layout,
        filter: Filter<T>,
        want: Want,
        mut each: impl FnMut(&ScanPart, Reduced, &[u8]),
    ) -> Result<(), DirectError> {
        let column = column.placed(offset, region.bytes)?;
        aligned(&column, T::KIND)?;
        bounded(Operation::Scan(offset), "elements", column.bytes() / T::KIND.bytes() as u64, MOST_SCANNED)?;
        self.must_know(region)?;
        let token = self.token(Operation::Scan(offset));
        let operands = (filter.low.bits().to_le_bytes(), filter.high.bits().to_le_bytes());
        let parts = self.pool.scan(region.region, token, (T::KIND, filter.test, want), operands, &column);
        let result = self.finish(token);
        let mut odd = None;
        for part in parts {
            // Some parts of a failed operation may have been answered: these answers are dropped.
            let Some((_, table, found)) = self.pool.reply(part.request) else { continue };
            match parse_reduced(&table) {
                Ok(reduced) if result.is_ok() && fits(&part, T::KIND, want, &reduced, &found) => {
                    each(&part, reduced, &found)
                }
                Ok(_) if result.is_err() => {}
                _ => odd = Some(part.server),
            }
        }
        match odd {
            None => result,
            Some(server) => Err(self.odd(server, Operation::Scan(offset), ODD_SCAN)),
        }
    }

    // --- under the hood ------------------------------------------------------------------------------------

    /// A server that sends an invalid answer is lost.
    fn odd(&self, server: ServerIndex, operation: Operation, what: impl ToString) -> DirectError {
        let server = self.pool.server_name(server).to_owned();
        let reason = LostReason::Protocol(what.to_string());
        DirectError::Pool(PoolError::Lost { server, operation, reason })
    }

    fn token(&mut self, operation: Operation) -> u64 {
        self.next += 1;
        self.started.push_back(Started { token: self.next, operation, ended: None });
        self.under_way += 1;
        self.next
    }

    /// # Safety
    /// As [`Pool::move_bytes`].
    unsafe fn begin(
        &mut self,
        region: DirectRegion,
        job: Job,
        there: &Program,
        here: &Program,
        memory: *mut u8,
    ) -> Result<u64, DirectError> {
        self.must_know(region)?;
        let offset = there.bounds().0.cast_unsigned();
        let token = self.token(match job {
            Job::Gather => Operation::Gather(offset),
            Job::Scatter => Operation::Scatter(offset),
            Job::SendBody => Operation::SendBody,
            Job::Accumulate(..) => Operation::Accumulate(offset),
        });
        // SAFETY: the caller's promise.
        unsafe { self.pool.move_bytes(region.region, token, job, there, here, memory) };
        Ok(token)
    }

    /// A handle may outlive its region.
    fn must_know(&self, region: DirectRegion) -> Result<(), DirectError> {
        if self.pool.knows(region.region) { Ok(()) } else { Err(DirectError::NoSuchRegion) }
    }

    /// The short way of a get of consecutive bytes, where there is one.
    ///
    /// # Safety
    /// As [`Pool::read_piece`].
    unsafe fn begin_piece(&mut self, region: DirectRegion, offset: u64, place: PieceMut) -> Option<u64> {
        let within = offset.checked_add(place.len as u64).is_some_and(|end| end <= region.bytes)
            && self.pool.knows(region.region);
        let token = self.next + 1;
        // SAFETY: the caller's promise.
        if !within || !unsafe { self.pool.read_piece(region.region, token, offset, place) } {
            return None;
        }
        Some(self.token(Operation::Gather(offset)))
    }

    fn find(&self, token: u64) -> Option<usize> {
        // Mostly one is under way, or they end in order.
        if self.started.front().is_some_and(|started| started.token == token) {
            return Some(0);
        }
        self.started.binary_search_by_key(&token, |started| started.token).ok()
    }

    fn has_ended(&self, token: u64) -> bool {
        self.find(token).is_some_and(|at| self.started[at].ended.is_some())
    }

    /// The result of an operation. It can be read once.
    fn take_ended(&mut self, token: u64) -> Option<Result<(), DirectError>> {
        let at = self.find(token)?;
        let result = self.started[at].ended.take()?;
        self.started.remove(at);
        Some(result)
    }

    fn operation(&self, token: u64) -> Operation {
        self.find(token).map_or(Operation::Idle, |at| self.started[at].operation)
    }

    /// Waits for the end of an operation, successful or not: nothing of its memory is in use afterwards.
    fn finish(&mut self, token: u64) -> Result<(), DirectError> {
        loop {
            if let Some(result) = self.take_ended(token) {
                return result;
            }
            assert!(self.find(token).is_some(), "an operation of this client's");
            self.step();
        }
    }

    /// Waits for the next event. Each operation has one before its deadline.
    fn step(&mut self) {
        self.step_until(Instant::now() + Duration::from_secs(1));
    }

    fn step_until(&mut self, deadline: Instant) {
        if !self.spin.is_zero() {
            if let Some(event) = self.pool.ready() {
                return self.note(event);
            }
            let started = Instant::now();
            let mut now = started;
            while now.duration_since(started) < self.spin {
                if let Some(event) = self.pool.look(now) {
                    return self.note(event);
                }
                now = Instant::now();
            }
        }
        match self.pool.next_event(deadline) {
            Ok(Some(event)) => self.note(event),
            Ok(None) => {}
            // Sockets that cannot be watched are of no use: everything ends.
            Err(error) => self.pool.give_up(&LostReason::Io(error.to_string())),
        }
    }

    fn note(&mut self, event: PoolEvent) {
        let (token, result) = match event {
            PoolEvent::Fetched { token } | PoolEvent::Stored { token } => (token, Ok(())),
            PoolEvent::Full { token, name, free, .. } => {
                (token, Err(DirectError::Full { server: name, operation: self.operation(token), free }))
            }
            PoolEvent::Corrupt { token, name, .. } => {
                (token, Err(DirectError::Damaged { server: name, operation: self.operation(token) }))
            }
            PoolEvent::Failed { token, error } => (token, Err(error.into())),
            PoolEvent::Lost { .. }
            | PoolEvent::Degraded { .. }
            | PoolEvent::Holds { .. }
            | PoolEvent::Drained { .. }
            | PoolEvent::Absent { .. }
            | PoolEvent::Returned { .. }
            | PoolEvent::CaughtUp { .. }
            | PoolEvent::Draining { .. } => return,
        };
        let Some(at) = self.find(token) else { return };
        if self.started[at].ended.replace(result).is_none() {
            self.under_way -= 1;
        }
    }
}

/// Both sides of an operation on consecutive bytes.
fn plain(region: DirectRegion, offset: u64, bytes: u64) -> Result<(Program, Program), DirectError> {
    let there = Program::run(i64::try_from(offset).map_err(|_| LayoutError::TooFar)?, bytes)?;
    let (low, high) = there.bounds();
    if high.cast_unsigned() > region.bytes {
        return Err(LayoutError::OutOfBounds { low, high, bytes: region.bytes }.into());
    }
    Ok((there, Program::run(0, bytes)?))
}

/// Both sides of an operation, in their places.
fn both(
    region: DirectRegion,
    offset: u64,
    there: &Layout,
    bytes: u64,
    here: &Layout,
) -> Result<(Program, Program), DirectError> {
    if there.size() != here.size() {
        return Err(DirectError::Lengths { there: there.size(), here: here.size() });
    }
    Ok((there.placed(offset, region.bytes)?, here.placed(0, bytes)?))
}

/// The first byte that a layout selects from an address on, the layout as seen from there, and how far it
/// reaches.
fn from_first(address: *mut u8, layout: &Layout) -> Result<(*mut u8, Layout, u64), LayoutError> {
    let (low, high) = layout.program().bounds();
    let first = address.wrapping_offset(isize::try_from(low).map_err(|_| LayoutError::TooFar)?);
    Ok((first, layout.hindexed(&[(1, -low)])?, (high - low).cast_unsigned()))
}

/// What is written must not be selected twice.
pub fn apart(program: &Program) -> Result<(), LayoutError> {
    if program.overlaps()? { Err(LayoutError::Overlap) } else { Ok(()) }
}

/// Elements must not be cut up.
pub fn aligned(program: &Program, kind: Kind) -> Result<(), LayoutError> {
    let bytes = kind.bytes() as u64;
    if program.is_aligned(bytes) { Ok(()) } else { Err(LayoutError::Unaligned(bytes)) }
}

/// What is read as numbers is some, and not a part of one.
pub fn whole_numbers<T: Number>(layout: &Layout) -> Result<(), LayoutError> {
    let bytes = T::KIND.bytes() as u64;
    if layout.size().is_multiple_of(bytes) { Ok(()) } else { Err(LayoutError::Unaligned(bytes)) }
}

/// Whether a region can have so many bytes.
fn possible(bytes: u64) -> Result<(), DirectError> {
    let most = MAX_PAGE_INDEX * OS_PAGE_BYTES as u64;
    if (1..=most).contains(&bytes) { Ok(()) } else { Err(DirectError::RegionLength { wanted: bytes }) }
}

fn bounded(operation: Operation, what: &'static str, wanted: u64, most: u64) -> Result<(), DirectError> {
    if wanted <= most { Ok(()) } else { Err(DirectError::TooMuch { operation, what, wanted, most }) }
}

/// Whether the answer to a part of a scan is one.
fn fits(part: &ScanPart, kind: Kind, want: Want, reduced: &Reduced, found: &[u8]) -> bool {
    let bytes: u64 = part.spans.iter().map(|(_, count)| count).sum();
    let elements = bytes / kind.bytes() as u64;
    let each = match want {
        Want::Positions => 4,
        Want::Values => kind.bytes() as u64,
        _ => 0,
    };
    let ascending = || {
        let mut positions =
            found.chunks_exact(4).map(|p| u32::from_le_bytes(p.try_into().expect("four bytes")));
        let mut last = positions.next();
        positions.all(|next| last.replace(next).is_some_and(|before| before < next))
            && last.is_none_or(|last| u64::from(last) < elements)
    };
    reduced.count <= elements
        && found.len() as u64 == reduced.count * each
        && (want != Want::Positions || ascending())
}

fn first_word(value: &[u8; 16]) -> u64 {
    u64::from_le_bytes(value[..8].try_into().expect("eight bytes"))
}

/// The buffer, made this long, with zeroes where it grows; none if there is no memory for that.
pub fn with_length(mut buffer: Vec<u8>, bytes: u64) -> Option<Vec<u8>> {
    let bytes = usize::try_from(bytes).ok()?;
    buffer.try_reserve(bytes.saturating_sub(buffer.len())).ok()?;
    buffer.resize(bytes, 0);
    Some(buffer)
}

pub fn numbers<T: Number>(bytes: &[u8]) -> Vec<T> {
    let number = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        T::from_bits(u64::from_le_bytes(word))
    };
    bytes.chunks_exact(T::KIND.bytes()).map(number).collect()
}

pub fn to_bytes<T: Number>(values: &[T]) -> Vec<u8> {
    let len = T::KIND.bytes();
    let mut bytes = Vec::with_capacity(values.len() * len);
    values.iter().for_each(|value| bytes.extend_from_slice(&value.bits().to_le_bytes()[..len]));
    bytes
}
