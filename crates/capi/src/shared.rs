//! The shared view in C: conversions around [`runtime::shared`].

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, PoisonError};

use runtime::proto::units::ByteLen;
use runtime::shared::{
    AllocOptions, AtomicOp, Homes, JoinError, ProtocolKind, Rank, Region, Shared, SharedError,
};

use crate::{RampoolStatus, fail, null_pointer, text};

/// Atomic operations, for rampool_shared_atomic(). LOAD ignores the operand.
pub const RAMPOOL_ATOMIC_LOAD: u32 = 0;
pub const RAMPOOL_ATOMIC_STORE: u32 = 1;
pub const RAMPOOL_ATOMIC_SWAP: u32 = 2;
pub const RAMPOOL_ATOMIC_ADD: u32 = 3;
pub const RAMPOOL_ATOMIC_AND: u32 = 4;
pub const RAMPOOL_ATOMIC_OR: u32 = 5;
pub const RAMPOOL_ATOMIC_XOR: u32 = 6;

/// This process as one rank of a run: several processes that use one address range as memory.
pub struct SharedHandle {
    pub(crate) shared: Shared,
    /// The allocations that all ranks made together, by address.
    pub(crate) regions: Mutex<BTreeMap<usize, Region>>,
}

/// Counts of a rank since it joined; times are sums over its threads.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct RampoolSharedStats {
    pub sent_messages: u64,
    pub received_messages: u64,
    pub read_faults: u64,
    pub write_faults: u64,
    pub pages_fetched: u64,
    pub invalidations: u64,
    pub twins: u64,
    pub diffs: u64,
    /// Bytes in diffs.
    pub diff_bytes: u64,
    pub lock_acquires: u64,
    /// How many of them needed no message.
    pub local_acquires: u64,
    pub barriers: u64,
    /// Nanoseconds of waiting for pages.
    pub fault_wait_ns: u64,
    /// Nanoseconds in lock, unlock and barrier calls.
    pub lock_wait_ns: u64,
    pub unlock_wait_ns: u64,
    pub barrier_wait_ns: u64,
    /// Bytes of twins, diffs and logs that this rank holds now.
    pub overhead_bytes: u64,
    /// Bytes of shared pages in this rank's memory now, and of those that are only at memory servers.
    pub resident_bytes: u64,
    pub away_bytes: u64,
    /// Copies that were dropped to make room.
    pub evictions: u64,
}

/// Joins the run that the environment describes: that of `rampool launch`, mpirun, srun, torchrun or a
/// Kubernetes job. Without one, it starts a run of this process alone. Blocks until all ranks have joined. On
/// success, leave with rampool_shared_close(); otherwise `*shared` is null.
///
/// If the run fails later, on any rank, every process of it ends with the same reason, on standard error or
/// through `rampool launch`. A child that the process forks is no rank: calls in it return
/// RAMPOOL_STATUS_INVALID, or do nothing.
///
/// # Safety
/// `shared` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_join(shared: *mut *mut SharedHandle) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(out) = (unsafe { shared.as_mut() }) else {
        return null_pointer("rampool_shared_join");
    };
    *out = std::ptr::null_mut();
    match Shared::join_from_env() {
        Ok(shared) => {
            *out = Box::into_raw(Box::new(SharedHandle { shared, regions: Mutex::default() }));
            RampoolStatus::Ok
        }
        Err(error) => {
            let status = match &error {
                JoinError::Config(_) | JoinError::Rank { .. } | JoinError::Engine(_) => {
                    RampoolStatus::Invalid
                }
                JoinError::Memory(_) | JoinError::Thread(_) => RampoolStatus::System,
                _ => RampoolStatus::Run,
            };
            fail(status, error)
        }
    }
}

/// Leaves the run and frees the handle. One thread of every rank calls it once, after its last use of shared
/// memory; blocks until all have. Afterwards an access to shared memory ends the process. Null does nothing.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished; no other call uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_close(shared: *mut SharedHandle) -> RampoolStatus {
    if shared.is_null() {
        return RampoolStatus::Ok;
    }
    // SAFETY: made by `Box::into_raw`, and finished once, as the caller promises.
    let handle = unsafe { Box::from_raw(shared) };
    status(handle.shared.close())
}

/// This rank, from 0 on; 0 for null.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_rank(shared: *const SharedHandle) -> u32 {
    // SAFETY: null or valid, as the caller promises.
    unsafe { shared.as_ref() }.map_or(0, |handle| handle.shared.rank().into())
}

/// Number of ranks; 0 for null.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_ranks(shared: *const SharedHandle) -> u32 {
    // SAFETY: null or valid, as the caller promises.
    unsafe { shared.as_ref() }.map_or(0, |handle| handle.shared.ranks().into())
}

/// Sets how many threads of this rank meet at barriers from now on. It is 1 at the start.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_set_threads(
    shared: *const SharedHandle,
    threads: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(handle) = (unsafe { shared.as_ref() }) else { return no_handle() };
    match u16::try_from(threads) {
        Ok(threads @ 1..) => {
            handle.shared.set_threads(threads);
            RampoolStatus::Ok
        }
        _ => fail(
            RampoolStatus::Invalid,
            format_args!("rampool_shared_set_threads: {threads} threads; give 1 to 65535"),
        ),
    }
}

/// Allocates `bytes` bytes, in whole pages, at the same address on every rank. Every rank makes the same
/// call, in the same order among such calls. The memory reads as zeroes. Only addresses are reserved: pages
/// take memory when they are touched.
///
/// `options` is null or words such as "protocol=hlrc homes=blocked page-size=16K": protocol sc, lrc, hlrc,
/// aurc, ibec or auto (default: the run's); homes cyclic, blocked or the number of one rank (default:
/// cyclic); page-size from 4K to 64K, a power of two (default: the run's).
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished; `options` is null or ends with a
/// zero byte; `address` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_alloc(
    shared: *const SharedHandle,
    bytes: usize,
    options: *const c_char,
    address: *mut *mut c_void,
) -> RampoolStatus {
    // SAFETY: promised by the caller.
    unsafe { alloc(shared, bytes, options, address, true) }
}

/// As rampool_shared_alloc(), for all ranks by a call of this one alone. The program passes the address to
/// the others.
///
/// # Safety
/// As rampool_shared_alloc().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_alloc_alone(
    shared: *const SharedHandle,
    bytes: usize,
    options: *const c_char,
    address: *mut *mut c_void,
) -> RampoolStatus {
    // SAFETY: promised by the caller.
    unsafe { alloc(shared, bytes, options, address, false) }
}

/// # Safety
/// As rampool_shared_alloc().
unsafe fn alloc(
    shared: *const SharedHandle,
    bytes: usize,
    options: *const c_char,
    address: *mut *mut c_void,
    collective: bool,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(handle), Some(out)) = (unsafe { (shared.as_ref(), address.as_mut()) }) else {
        return null_pointer("rampool_shared_alloc");
    };
    *out = std::ptr::null_mut();
    let words = if options.is_null() {
        ""
    } else {
        // SAFETY: as the caller promises.
        match unsafe { text(options) } {
            Some(words) => words,
            None => return fail(RampoolStatus::Invalid, "rampool_shared_alloc: the options are not UTF-8"),
        }
    };
    let options = match alloc_options(words) {
        Ok(options) => options,
        Err(why) => return fail(RampoolStatus::Invalid, why),
    };
    let region = if collective {
        handle.shared.alloc(bytes, options)
    } else {
        handle.shared.alloc_alone(bytes, options)
    };
    match region {
        Ok(region) => {
            if collective {
                handle
                    .regions
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(region.address(), region);
            }
            *out = region.as_ptr().cast();
            RampoolStatus::Ok
        }
        Err(error) => failed(&error),
    }
}

fn alloc_options(words: &str) -> Result<AllocOptions, String> {
    let mut options = AllocOptions::new();
    for word in words.split_whitespace() {
        let parsed = match word.split_once('=') {
            Some(("protocol", name)) => ProtocolKind::from_name(name).map(|kind| options.protocol(kind)),
            Some(("homes", "cyclic")) => Some(options.homes(Homes::Cyclic)),
            Some(("homes", "blocked")) => Some(options.homes(Homes::Blocked)),
            Some(("homes", rank)) => rank.parse().ok().map(|rank| options.homes(Homes::At(Rank(rank)))),
            Some(("page-size", size)) => {
                let bytes = size.parse::<ByteLen>().ok().and_then(|bytes| u32::try_from(bytes.0).ok());
                bytes.map(|bytes| options.page_bytes(bytes))
            }
            _ => None,
        };
        options = parsed.ok_or_else(|| format!("rampool_shared_alloc: unknown option {word:?}"))?;
    }
    Ok(options)
}

/// Frees memory of rampool_shared_alloc(). Every rank makes the same call, after its last use of the memory.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_free(
    shared: *const SharedHandle,
    address: *mut c_void,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(handle) = (unsafe { shared.as_ref() }) else { return no_handle() };
    let region = handle.regions.lock().unwrap_or_else(PoisonError::into_inner).remove(&address.addr());
    match region {
        Some(region) => status(handle.shared.free(region)),
        None => fail(
            RampoolStatus::Invalid,
            format_args!("rampool_shared_free: no allocation of all ranks begins at {address:p}"),
        ),
    }
}

/// Frees, for all ranks, memory of rampool_shared_alloc_alone() of this rank or another. No rank may use it
/// any more.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_free_alone(
    shared: *const SharedHandle,
    address: *mut c_void,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.free_alone(address.addr())) }
}

/// Takes the lock, named by any number below 2^62, for this thread alone. Then all writes before earlier
/// releases are visible (protocol ibec: those under this lock).
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_lock(shared: *const SharedHandle, lock: u64) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.lock(lock)) }
}

/// As rampool_shared_lock(), without waiting: RAMPOOL_STATUS_BUSY if it is held.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_try_lock(shared: *const SharedHandle, lock: u64) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { tried(shared, lock, Shared::try_lock) }
}

/// Takes the lock together with other readers, while no thread has it exclusively.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_lock_shared(shared: *const SharedHandle, lock: u64) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.lock_shared(lock)) }
}

/// As rampool_shared_lock_shared(), without waiting: RAMPOOL_STATUS_BUSY if a thread has it exclusively.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_try_lock_shared(
    shared: *const SharedHandle,
    lock: u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { tried(shared, lock, Shared::try_lock_shared) }
}

/// Takes S5's non-exclusive lock: it brings the newest released data, and keeps no thread out. Only where
/// everything is ibec; elsewhere as rampool_shared_lock_shared().
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_lock_snapshot(
    shared: *const SharedHandle,
    lock: u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.lock_snapshot(lock)) }
}

/// Releases a lock, however it was taken. RAMPOOL_STATUS_INVALID if this thread does not hold it.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_unlock(shared: *const SharedHandle, lock: u64) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.unlock(lock)) }
}

/// Waits for all threads of all ranks (rampool_shared_set_threads()). Afterwards all writes are visible to
/// all threads. All name the same barrier.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_barrier(shared: *const SharedHandle, barrier: u32) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.barrier(barrier)) }
}

/// As rampool_shared_barrier(). Pages that only one rank wrote become that rank's own, and cost it nothing
/// until another rank reads them.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_barrier_keep(
    shared: *const SharedHandle,
    barrier: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.barrier_keep(barrier)) }
}

/// Releases `lock`, which this thread holds exclusively, waits for a signal of this condition of the lock,
/// and takes the lock again. Check the condition in a loop.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_wait(
    shared: *const SharedHandle,
    condition: u32,
    lock: u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.wait(condition, lock)) }
}

/// Wakes one thread that waits for this condition of the lock.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_signal(
    shared: *const SharedHandle,
    condition: u32,
    lock: u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.signal(condition, lock)) }
}

/// Wakes all threads that wait for this condition of the lock.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_broadcast(
    shared: *const SharedHandle,
    condition: u32,
    lock: u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.broadcast(condition, lock)) }
}

/// Sets one of 65536 semaphores, numbered from 0; all are 0 at the start. No thread may wait for it during
/// the call.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_semaphore_set(
    shared: *const SharedHandle,
    semaphore: u32,
    count: u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.semaphore_set(semaphore, count)) }
}

/// Takes one from the semaphore; waits while it is 0.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_semaphore_wait(
    shared: *const SharedHandle,
    semaphore: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.semaphore_wait(semaphore)) }
}

/// Adds one to the semaphore and wakes one waiting thread.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_semaphore_post(
    shared: *const SharedHandle,
    semaphore: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.semaphore_post(semaphore)) }
}

/// Makes this thread's writes visible to threads that synchronise with it later, without releasing anything.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_fence(shared: *const SharedHandle) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, Shared::fence) }
}

/// Reads and changes (RAMPOOL_ATOMIC_...) the naturally aligned word of `width` bytes (1, 2, 4 or 8) at
/// `word`, in shared memory, atomically among all ranks, ordered like a lock of that word. `*before`, unless
/// null, gets the word's value before.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished; `before` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_atomic(
    shared: *const SharedHandle,
    word: *mut c_void,
    width: usize,
    operation: u32,
    operand: u64,
    before: *mut u64,
) -> RampoolStatus {
    let op = match operation {
        RAMPOOL_ATOMIC_LOAD => AtomicOp::Load,
        RAMPOOL_ATOMIC_STORE => AtomicOp::Store(operand),
        RAMPOOL_ATOMIC_SWAP => AtomicOp::Swap(operand),
        RAMPOOL_ATOMIC_ADD => AtomicOp::Add(operand),
        RAMPOOL_ATOMIC_AND => AtomicOp::And(operand),
        RAMPOOL_ATOMIC_OR => AtomicOp::Or(operand),
        RAMPOOL_ATOMIC_XOR => AtomicOp::Xor(operand),
        other => {
            return fail(
                RampoolStatus::Invalid,
                format_args!("rampool_shared_atomic: unknown operation {other}"),
            );
        }
    };
    // SAFETY: as the caller promises.
    unsafe { atomic(shared, word, width, op, before) }
}

/// Stores `desired` in the word if it equals `expected`, as rampool_shared_atomic(). It was stored if
/// `*before` equals `expected` afterwards.
///
/// # Safety
/// As rampool_shared_atomic().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_compare_exchange(
    shared: *const SharedHandle,
    word: *mut c_void,
    width: usize,
    expected: u64,
    desired: u64,
    before: *mut u64,
) -> RampoolStatus {
    // SAFETY: as the caller promises.
    unsafe {
        atomic(shared, word, width, AtomicOp::CompareExchange { expect: expected, new: desired }, before)
    }
}

/// Adds to a double, as rampool_shared_atomic(). `*before`, unless null, gets its value before.
///
/// # Safety
/// As rampool_shared_atomic().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_add_double(
    shared: *const SharedHandle,
    word: *mut f64,
    value: f64,
    before: *mut f64,
) -> RampoolStatus {
    // SAFETY: as the caller promises; a double has the size and the alignment of its bits.
    unsafe { atomic(shared, word.cast(), 8, AtomicOp::AddDouble(value.to_bits()), before.cast()) }
}

/// # Safety
/// As rampool_shared_atomic().
unsafe fn atomic(
    shared: *const SharedHandle,
    word: *mut c_void,
    width: usize,
    op: AtomicOp,
    before: *mut u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(handle), before) = (unsafe { (shared.as_ref(), before.as_mut()) }) else { return no_handle() };
    let Some(width) = u8::try_from(width).ok().filter(|width| [1, 2, 4, 8].contains(width)) else {
        return fail(
            RampoolStatus::Invalid,
            format_args!("invalid width {width}: an atomic word has 1, 2, 4 or 8 bytes"),
        );
    };
    match handle.shared.atomic(word.addr(), width, op) {
        Ok(value) => {
            if let Some(before) = before {
                *before = value;
            }
            RampoolStatus::Ok
        }
        Err(error) => failed(&error),
    }
}

/// From the next barrier on, rank `manager` manages the lock.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_set_lock_manager(
    shared: *const SharedHandle,
    lock: u64,
    manager: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.set_lock_manager(lock, u16::try_from(manager).unwrap_or(u16::MAX))) }
}

/// From the next barrier on, rank `home` is the home of every page that holds one of these bytes.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_set_home(
    shared: *const SharedHandle,
    address: *const c_void,
    bytes: usize,
    home: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    unsafe {
        on(shared, |shared| shared.set_home(address.addr(), bytes, u16::try_from(home).unwrap_or(u16::MAX)))
    }
}

/// Writes the rank that is now the home of the page at `address` to `*home`.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished; `home` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_home(
    shared: *const SharedHandle,
    address: *const c_void,
    home: *mut u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(out) = (unsafe { home.as_mut() }) else {
        return null_pointer("rampool_shared_home");
    };
    // SAFETY: null or valid, as the caller promises.
    unsafe { on(shared, |shared| shared.home(address.addr()).map(|home| *out = home.into())) }
}

/// Writes the rank's counts to `*stats`, as many as fit `size` (pass sizeof(rampool_shared_stats)).
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished; `stats` is null or `size` bytes
/// can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_count(
    shared: *const SharedHandle,
    stats: *mut RampoolSharedStats,
    size: usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(handle) = (unsafe { shared.as_ref() }).filter(|_| !stats.is_null()) else {
        return null_pointer("rampool_shared_count");
    };
    let now = handle.shared.stats();
    let ns = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let counted = RampoolSharedStats {
        sent_messages: now.sent_messages,
        received_messages: now.received_messages,
        read_faults: now.engine.read_faults,
        write_faults: now.engine.write_faults,
        pages_fetched: now.engine.pages_fetched,
        invalidations: now.engine.invalidations,
        twins: now.engine.twins,
        diffs: now.engine.diffs,
        diff_bytes: now.engine.diff_bytes,
        lock_acquires: now.engine.lock_acquires,
        local_acquires: now.engine.local_acquires,
        barriers: now.engine.barriers,
        fault_wait_ns: ns(now.read_fault_wait + now.write_fault_wait),
        lock_wait_ns: ns(now.lock_wait),
        unlock_wait_ns: ns(now.unlock_wait),
        barrier_wait_ns: ns(now.barrier_wait),
        overhead_bytes: now.overhead_bytes,
        resident_bytes: now.resident_bytes,
        away_bytes: now.away_bytes,
        evictions: now.engine.evictions,
    };
    let bytes = size.min(size_of::<RampoolSharedStats>());
    // SAFETY: `size` bytes can be written, as the caller promises, and no more than the struct has are read.
    unsafe { std::ptr::copy_nonoverlapping((&raw const counted).cast::<u8>(), stats.cast::<u8>(), bytes) };
    RampoolStatus::Ok
}

/// Ends the run on every rank, this one included, with this reason.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished; `why` is null or ends with a
/// zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_abort(
    shared: *const SharedHandle,
    why: *const c_char,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(handle) = (unsafe { shared.as_ref() }) else { return no_handle() };
    // SAFETY: null or a text, as the caller promises.
    handle.shared.abort(unsafe { text(why) }.unwrap_or("no reason given"));
    RampoolStatus::Ok
}

/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
unsafe fn on(
    shared: *const SharedHandle,
    operation: impl FnOnce(&Shared) -> Result<(), SharedError>,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    match unsafe { shared.as_ref() } {
        Some(handle) => status(operation(&handle.shared)),
        None => no_handle(),
    }
}

/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished.
unsafe fn tried(
    shared: *const SharedHandle,
    lock: u64,
    operation: impl FnOnce(&Shared, u64) -> Result<bool, SharedError>,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(handle) = (unsafe { shared.as_ref() }) else { return no_handle() };
    match operation(&handle.shared, lock) {
        Ok(true) => RampoolStatus::Ok,
        Ok(false) => fail(RampoolStatus::Busy, format_args!("lock {lock} is held")),
        Err(error) => failed(&error),
    }
}

fn no_handle() -> RampoolStatus {
    fail(RampoolStatus::Invalid, "the rampool_shared is null")
}

fn status(result: Result<(), SharedError>) -> RampoolStatus {
    match result {
        Ok(()) => RampoolStatus::Ok,
        Err(error) => failed(&error),
    }
}

pub(crate) fn failed(error: &SharedError) -> RampoolStatus {
    let status = match error {
        SharedError::Stopped { .. } | SharedError::Finished { .. } => RampoolStatus::Run,
        SharedError::Refused { .. } => RampoolStatus::NoRoom,
        _ => RampoolStatus::Invalid,
    };
    fail(status, error)
}
