//! librampool: the C interface.
//!
//! ```text
//!   lib            rampool.h: builder, pool, region, statistics, errors: conversions around `rampool`
//!   shared         rampool.h too: the shared view
//!   direct         rampool.h too: the direct view and its layouts
//!   started        rampool.h too: gets and puts of the direct view that are started now and waited for later
//!   elements       rampool.h too: updates, filters, totals and copies in the direct view
//!   group          rampool.h too: totals for each key
//!   handed         rampool.h too: regions handed over to other processes
//!   queue          rampool.h too: the direct view's queues
//!   shared_direct  rampool.h too: shared regions in the direct view, for ranks and other processes
//! ```
//!
//! Read `lib` first; the others are read on their own.
//!
//! The papers' interfaces (dlmm.h, tsm.h, PARMACS) are in the crate `compat`, whose functions this library
//! exports with its own. `include/rampool.h` is generated from the modules above (`make header`, or the test
//! `header` with `RAMPOOL_WRITE_HEADER=1`) and committed.

mod direct;
mod elements;
mod group;
mod handed;
mod queue;
mod shared;
mod shared_direct;
mod started;
mod store;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rampool_compat as _;
use runtime::builder::OpenError;
use runtime::proto::units::OS_PAGE_BYTES;
use runtime::region::{AdviseError, AllocError, PagedMemory, Region, RegionAdvice};

/// The library's own heap; the program's is as the program wants it. Twins, diffs and messages come and go
/// all the time, and glibc gives their memory back to the kernel in between.
#[global_allocator]
static HEAP: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How a call ended.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RampoolStatus {
    Ok = 0,
    /// An argument is invalid: a null pointer, an unknown option, a value out of range.
    Invalid = 1,
    /// A memory server could not be reached, refused, or cannot lend the wanted amount.
    Server = 2,
    /// The region does not fit the lease; or the queue is full; or the buffer is too short.
    NoRoom = 3,
    /// The kernel does not allow what is needed; `rampool doctor` says what to change.
    System = 4,
    /// The pool still has regions; or another thread holds the lock; or the body of a message has not arrived
    /// yet.
    Busy = 5,
    /// The ranks of a run did not all join, or the run is over.
    Run = 6,
    /// The queue does not exist; or the sender of a message was lost before its body arrived.
    Gone = 7,
}

/// Advice: the content of the range is no longer needed; it reads as zeroes from now on.
pub const RAMPOOL_ADVICE_DISCARD: u32 = 0;
/// Advice: the range is needed now; the call returns when it is in local memory.
pub const RAMPOOL_ADVICE_WILL_NEED: u32 = 1;

/// Options of a pool, by name. Names, values and defaults are those of the command line without the dashes:
/// "server", "memory", "local", "page-size", "prefetch", "fault-mode", "name", "key-file", "encryption",
/// "compression", "stripe", "same-host", "zero-copy", "pinned", "connect-deadline-ms", "op-deadline-ms".
/// Write amounts as 4096, 512M or 1.5G.
pub struct Builder(runtime::Builder);

/// Local memory, memory servers and the pager between them.
pub struct PoolHandle {
    memory: PagedMemory,
    regions: AtomicUsize,
}

/// A piece of memory in a pool.
pub struct RegionHandle {
    region: Option<Region>,
    pool: Arc<PoolHandle>,
}

impl Drop for RegionHandle {
    fn drop(&mut self) {
        // Dropped first: a pool can be closed only without regions.
        drop(self.region.take());
        self.pool.regions.fetch_sub(1, Ordering::Release);
    }
}

/// Counters of a pool since it was opened. A page has 4096 bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct RampoolStats {
    /// Local memory that the regions may use, and use now.
    pub budget_pages: u64,
    pub resident_pages: u64,
    /// Pages of all regions now.
    pub managed_pages: u64,
    pub faults: u64,
    /// Pages filled with zeroes, because they were never written.
    pub zero_filled_pages: u64,
    /// Fetches that a thread waited for, and their pages.
    pub demand_fetches: u64,
    pub demand_pages: u64,
    /// Pages fetched ahead of need.
    pub prefetched_pages: u64,
    /// Pages that were about to leave and were needed again, without traffic.
    pub second_chance_pages: u64,
    /// Pages that left, and how many of them had to be sent.
    pub evicted_pages: u64,
    pub written_back_pages: u64,
    /// Times that a server had no room.
    pub pool_full_events: u64,
}

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

fn fail(status: RampoolStatus, message: impl std::fmt::Display) -> RampoolStatus {
    let text: Vec<u8> = message.to_string().into_bytes().into_iter().filter(|b| *b != 0).collect();
    MESSAGE.with(|m| *m.borrow_mut() = CString::new(text).unwrap_or_default());
    status
}

/// The message of the last failed call on this thread: one line, in English. Valid until the next failed call
/// on this thread; empty before the first. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_error_message() -> *const c_char {
    MESSAGE.with(|m| m.borrow().as_ptr())
}

/// The version of the library, such as "0.1.0". Static.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version without zero bytes"),
        };
    VERSION.as_ptr()
}

/// A builder with every option at its default. Free it with rampool_builder_free().
#[unsafe(no_mangle)]
pub extern "C" fn rampool_builder_new() -> *mut Builder {
    Box::into_raw(Box::new(Builder(runtime::Builder::new())))
}

/// Sets an option. "server" may be set several times, once for each server; others keep the last value.
/// RAMPOOL_STATUS_INVALID for an unknown name or an invalid value; the builder is then unchanged.
///
/// # Safety
/// `builder` came from rampool_builder_new() and was not freed; `name` and `value` are null or end with a
/// zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_builder_set(
    builder: *mut Builder,
    name: *const c_char,
    value: *const c_char,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (builder, name, value) = unsafe { (builder.as_mut(), text(name), text(value)) };
    let (Some(builder), Some(name), Some(value)) = (builder, name, value) else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_builder_set: a null pointer, or a text that is not UTF-8",
        );
    };
    match builder.0.set(name, value) {
        Ok(()) => RampoolStatus::Ok,
        Err(error) => fail(RampoolStatus::Invalid, error),
    }
}

/// Frees a builder; pools opened from it stay open. Null does nothing.
///
/// # Safety
/// `builder` is null or came from rampool_builder_new() and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_builder_free(builder: *mut Builder) {
    if !builder.is_null() {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        drop(unsafe { Box::from_raw(builder) });
    }
}

/// Connects to the servers, leases memory there and starts the pager, a thread of this process. Blocks, for
/// each server at most the option "connect-deadline-ms". On success, close `*pool` with rampool_close();
/// otherwise it is null.
///
/// # Safety
/// `builder` came from rampool_builder_new() and was not freed; `pool` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_open(builder: *const Builder, pool: *mut *mut PoolHandle) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(builder), Some(out)) = (unsafe { (builder.as_ref(), pool.as_mut()) }) else {
        return null_pointer("rampool_open");
    };
    *out = std::ptr::null_mut();
    match builder.0.open() {
        Ok(memory) => {
            *out = Arc::into_raw(Arc::new(PoolHandle { memory, regions: AtomicUsize::new(0) })).cast_mut();
            RampoolStatus::Ok
        }
        Err(error) => fail(status_of(&error), error),
    }
}

/// Stops the pager and disconnects from the servers. While the pool has regions it does nothing and returns
/// RAMPOOL_STATUS_BUSY. Null does nothing.
///
/// # Safety
/// `pool` is null or came from rampool_open() and was not closed; no other call uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_close(pool: *mut PoolHandle) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(handle) = (unsafe { pool.as_ref() }) else { return RampoolStatus::Ok };
    let regions = handle.regions.load(Ordering::Acquire);
    if regions > 0 {
        return fail(
            RampoolStatus::Busy,
            format_args!("rampool_close: {regions} regions of the pool are not freed"),
        );
    }
    // SAFETY: made by `Arc::into_raw`, and closed once, as the caller promises.
    drop(unsafe { Arc::from_raw(pool.cast_const()) });
    RampoolStatus::Ok
}

/// Allocates `bytes` bytes of memory, rounded up to whole pages, all zero. On success, free `*region` with
/// rampool_region_free(); otherwise it is null.
///
/// # Safety
/// `pool` came from rampool_open() and was not closed; `region` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_region_alloc(
    pool: *mut PoolHandle,
    bytes: usize,
    region: *mut *mut RegionHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(handle), Some(out)) = (unsafe { (pool.as_ref(), region.as_mut()) }) else {
        return null_pointer("rampool_region_alloc");
    };
    *out = std::ptr::null_mut();
    match handle.memory.alloc(bytes) {
        Ok(memory) => {
            handle.regions.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the handle came from `Arc::into_raw`; the region holds a share of its own.
            let pool = unsafe {
                Arc::increment_strong_count(pool.cast_const());
                Arc::from_raw(pool.cast_const())
            };
            *out = Box::into_raw(Box::new(RegionHandle { region: Some(memory), pool }));
            RampoolStatus::Ok
        }
        Err(error) => {
            let status = match &error {
                AllocError::Empty => RampoolStatus::Invalid,
                AllocError::NoRoom { .. } => RampoolStatus::NoRoom,
                AllocError::PagerEnded(_) => RampoolStatus::Server,
                _ => RampoolStatus::System,
            };
            fail(status, error)
        }
    }
}

/// The first byte of a region; null for null.
///
/// # Safety
/// `region` is null or came from rampool_region_alloc() and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_region_address(region: *const RegionHandle) -> *mut c_void {
    // SAFETY: null or valid, as the caller promises.
    let region = unsafe { region.as_ref() }.and_then(|r| r.region.as_ref());
    region.map_or(std::ptr::null_mut(), |r| r.as_ptr().cast())
}

/// Bytes of a region; 0 for null.
///
/// # Safety
/// `region` is null or came from rampool_region_alloc() and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_region_bytes(region: *const RegionHandle) -> usize {
    // SAFETY: null or valid, as the caller promises.
    unsafe { region.as_ref() }.and_then(|r| r.region.as_ref()).map_or(0, Region::len)
}

/// Gives advice (RAMPOOL_ADVICE_...) on `bytes` bytes of a region from `offset` on, both multiples of 4096.
///
/// # Safety
/// `region` is null or came from rampool_region_alloc() and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_region_advise(
    region: *const RegionHandle,
    offset: usize,
    bytes: usize,
    advice: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(region) = (unsafe { region.as_ref() }).and_then(|r| r.region.as_ref()) else {
        return null_pointer("rampool_region_advise");
    };
    let advice = match advice {
        RAMPOOL_ADVICE_DISCARD => RegionAdvice::Discard,
        RAMPOOL_ADVICE_WILL_NEED => RegionAdvice::WillNeed,
        other => {
            return fail(
                RampoolStatus::Invalid,
                format_args!("rampool_region_advise: unknown advice {other}"),
            );
        }
    };
    match region.advise(offset, bytes, advice) {
        Ok(()) => RampoolStatus::Ok,
        Err(error @ AdviseError::Range { .. }) => fail(RampoolStatus::Invalid, error),
        Err(error) => fail(RampoolStatus::System, error),
    }
}

/// Frees a region, here and at the servers. Null does nothing.
///
/// # Safety
/// `region` is null or came from rampool_region_alloc() and was not freed; nothing uses its memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_region_free(region: *mut RegionHandle) {
    if !region.is_null() {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        drop(unsafe { Box::from_raw(region) });
    }
}

/// Writes the pool's counters to `*stats`, as many as fit `size` (pass sizeof(rampool_stats)), so that a
/// program built with an older header keeps working.
///
/// # Safety
/// `pool` came from rampool_open() and was not closed; `stats` is null or `size` bytes can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_pool_stats(
    pool: *const PoolHandle,
    stats: *mut RampoolStats,
    size: usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(handle) = (unsafe { pool.as_ref() }).filter(|_| !stats.is_null()) else {
        return null_pointer("rampool_pool_stats");
    };
    let now = handle.memory.stats();
    let counted = RampoolStats {
        budget_pages: now.budget_pages,
        resident_pages: now.resident_pages,
        managed_pages: now.managed_pages,
        faults: now.faults,
        zero_filled_pages: now.zero_filled_pages,
        demand_fetches: now.demand_fetches,
        demand_pages: now.demand_pages,
        prefetched_pages: now.prefetched_pages,
        second_chance_pages: now.second_chance_pages,
        evicted_pages: now.evicted_pages,
        written_back_pages: now.written_back_pages,
        pool_full_events: now.pool_full_events,
    };
    let bytes = size.min(size_of::<RampoolStats>());
    // SAFETY: `size` bytes can be written, as the caller promises, and no more than the struct has are read.
    unsafe { std::ptr::copy_nonoverlapping((&raw const counted).cast::<u8>(), stats.cast::<u8>(), bytes) };
    RampoolStatus::Ok
}

fn status_of(error: &OpenError) -> RampoolStatus {
    match error {
        OpenError::Connect(_) | OpenError::Pool(_) => RampoolStatus::Server,
        OpenError::Paged(
            runtime::region::PagedError::PageSize(_) | runtime::region::PagedError::TooLittleLocal(_),
        ) => RampoolStatus::Invalid,
        OpenError::Paged(_) => RampoolStatus::System,
        _ => RampoolStatus::Invalid,
    }
}

/// Writes a text and a terminating zero byte to a caller's buffer.
///
/// # Safety
/// `buffer` is null or `size` bytes can be written there.
unsafe fn write_text(call: &str, text: &str, buffer: *mut c_char, size: usize) -> RampoolStatus {
    if buffer.is_null() {
        return null_pointer(call);
    }
    if text.len() >= size {
        return fail(
            RampoolStatus::NoRoom,
            format_args!("{call}: the buffer is too short: the text takes {} bytes", text.len() + 1),
        );
    }
    // SAFETY: `size` bytes can be written, as the caller promises, and the text and the zero byte are no
    // more.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, text.len());
        *buffer.add(text.len()) = 0;
    }
    RampoolStatus::Ok
}

/// The error for a null argument.
fn null_pointer(call: &str) -> RampoolStatus {
    fail(RampoolStatus::Invalid, format_args!("{call}: a null pointer"))
}

/// # Safety
/// `at` is null, or can be read for `len` bytes that do not change while the result is used.
unsafe fn bytes_at<'a>(at: *const c_void, len: usize) -> &'a [u8] {
    // SAFETY: promised by the caller.
    if at.is_null() || len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(at.cast(), len) } }
}

/// # Safety
/// `text` is null or ends with a zero byte, and does not change while the result is used.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

const _: () = assert!(OS_PAGE_BYTES == 4096, "the header promises pages of 4096 bytes");

#[cfg(test)]
mod tests {
    use super::direct::*;
    use super::elements::*;
    use super::shared_direct::*;
    use super::store::*;
    use super::*;
    use std::ptr::{null, null_mut};

    fn message() -> String {
        // SAFETY: a text that ends with a zero byte, until the next call of this thread.
        unsafe { CStr::from_ptr(rampool_error_message()) }.to_str().unwrap().to_owned()
    }

    macro_rules! refuse_nothing {
        ($($call:ident($($argument:expr),*);)*) => {$(
            // SAFETY: null is allowed everywhere.
            assert!(unsafe { $call($($argument),*) } == RampoolStatus::Invalid);
            assert!(
                message().starts_with(concat!(stringify!($call), ": ")),
                "{} says: {}",
                stringify!($call),
                message()
            );
        )*};
    }

    #[test]
    fn a_call_that_lacks_something_is_named() {
        let number = [1u64];
        let number = number.as_ptr().cast::<c_void>();
        let (mut layout, mut byte) = (null_mut(), null_mut());
        let (mut found, mut count, filter) =
            (false, 0, RampoolFilter { test: 99, low: number, high: null() });
        let mut total = RampoolTotal { count: 0, low: 0, high: 0, real: 0.0 };
        refuse_nothing! {
            rampool_layout_bytes(1, null_mut());
            rampool_layout_contiguous(null(), 1, &raw mut layout);
            rampool_layout_vector(null(), 1, 1, 1, &raw mut layout);
            rampool_layout_hvector(null(), 1, 1, 1, &raw mut layout);
            rampool_layout_indexed(null(), 0, null(), null(), &raw mut layout);
            rampool_layout_hindexed(null(), 0, null(), null(), &raw mut layout);
            rampool_layout_struct(0, null(), null(), null(), null_mut());
            rampool_layout_subarray(null(), 0, null(), null(), null(), RAMPOOL_ORDER_C, &raw mut layout);
            rampool_layout_resized(null(), 0, 1, &raw mut layout);
            rampool_store_open(null_mut(), null(), 0, 0, null_mut());
            rampool_store_put(null_mut(), null_mut(), number, 8, number, 8);
            rampool_store_get(null_mut(), null_mut(), number, 8, null_mut(), 0, null_mut());
            rampool_store_remove(null_mut(), null_mut(), number, 8);
            rampool_store_count(null_mut(), null(), null_mut());
            rampool_direct_put(null_mut(), null(), 0, number, 1);
            rampool_direct_get(null_mut(), null(), 0, number.cast_mut(), 1);
            rampool_direct_put_layout(null_mut(), null(), 0, null(), number, null());
            rampool_direct_get_layout(null_mut(), null(), 0, null(), number.cast_mut(), null());
            rampool_direct_accumulate(
                null_mut(), null(), 0, null(), RAMPOOL_KIND_U64, RAMPOOL_COMBINE_SUM, number
            );
            rampool_direct_fetch_op(
                null_mut(), null(), 0, RAMPOOL_KIND_U64, RAMPOOL_COMBINE_SUM, number, null_mut()
            );
            rampool_direct_compare_exchange(
                null_mut(), null(), 0, RAMPOOL_KIND_U64, number, number, null_mut()
            );
            rampool_direct_sum(null_mut(), null(), 0, null(), 77, null(), &raw mut total);
            rampool_direct_min(
                null_mut(), null(), 0, null(), RAMPOOL_KIND_U64, null(), number.cast_mut(), &raw mut found
            );
            rampool_direct_max(
                null_mut(), null(), 0, null(), RAMPOOL_KIND_U64, null(), null_mut(), &raw mut found
            );
            rampool_direct_select(
                null_mut(), null(), 0, null(), RAMPOOL_KIND_U64, &raw const filter, null_mut(), 0,
                &raw mut count
            );
            rampool_direct_select_values(
                null_mut(), null(), 0, null(), RAMPOOL_KIND_U64, null(), null_mut(), 0, null_mut()
            );
            rampool_shared_direct_get(null(), 0, null_mut(), 1);
            rampool_shared_direct_put(null(), 0, null(), 1);
            rampool_shared_direct_accumulate(
                null(), 0, null(), RAMPOOL_KIND_U64, RAMPOOL_COMBINE_SUM, number
            );
        }
        // SAFETY: the layout is freed once.
        unsafe {
            assert!(rampool_layout_bytes(1, &raw mut byte) == RampoolStatus::Ok);
            assert!(rampool_layout_contiguous(byte, 1, null_mut()) == RampoolStatus::Invalid);
            rampool_layout_free(byte);
        }
        assert_eq!(message(), "rampool_layout_contiguous: a null pointer");
    }
}
