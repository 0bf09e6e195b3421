//! Memory that two processes see, in C: copies of paged regions for other processes, and memory that a server
//! on this machine has a key to. Conversions around [`runtime::region::HandedOver`] and
//! [`runtime::direct::Exposed`].

use std::ffi::{c_char, c_void};

use runtime::direct::{Direct, DirectRegion, Exposed};
use runtime::proto::layout::Layout;
use runtime::region::{HandOverError, HandedOver};

use crate::direct::{DirectHandle, DirectRegionHandle, LayoutHandle, failed};
use crate::{Builder, RampoolStatus, RegionHandle, fail, null_pointer, status_of, text, write_text};

/// A copy of a region at the memory servers, and how to reach it.
pub struct HandedOverHandle(HandedOver);

/// Memory of this process that a server on this machine may read and write while an operation names it. Use
/// it from one thread at a time; a forked child does not have it.
pub struct ExposedHandle(Exposed);

/// Counts of operations on exposed memory.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct RampoolKeyStats {
    /// Exposed memories that a server has a key to now.
    pub exposed: u64,
    /// Operations whose bytes did not travel, and those bytes.
    pub requests: u64,
    pub bytes: u64,
    /// Operations that the server refused because it no longer knew the key; they were repeated.
    pub stale: u64,
    /// Exposed memories that were replaced because a server with a key was lost, or its connection broke.
    pub replaced: u64,
}

/// Makes a copy-on-write copy of a region at its memory servers, for other processes. Pages in local memory
/// are stored there, and stay here. The owner continues at once, and its later writes do not show in the
/// copy. Writes of other threads during the call are included or not, page by page. Blocks; faults of the
/// pool wait meanwhile. On success, free `*handed` with rampool_handed_over_free(). Otherwise it is null, and
/// nothing has changed. If the servers have no room, the status is RAMPOOL_STATUS_SERVER, as for their other
/// errors, and rampool_error_message() says which it is.
///
/// The copy lives until it is freed (rampool_direct_region_free()) or the lease's last member leaves.
///
/// # Safety
/// `region` came from rampool_region_alloc() and was not freed; `handed` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_region_hand_over(
    region: *const RegionHandle,
    handed: *mut *mut HandedOverHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(region), Some(out)) = (unsafe { (region.as_ref(), handed.as_mut()) }) else {
        return null_pointer("rampool_region_hand_over");
    };
    *out = std::ptr::null_mut();
    let Some(region) = &region.region else {
        return fail(RampoolStatus::Invalid, "rampool_region_hand_over: the region was freed");
    };
    match region.hand_over() {
        Ok(copy) => {
            *out = Box::into_raw(Box::new(HandedOverHandle(copy)));
            RampoolStatus::Ok
        }
        Err(error @ HandOverError::PagerEnded(_)) => fail(RampoolStatus::System, error),
        Err(error) => fail(RampoolStatus::Server, error),
    }
}

/// Writes a text that says where the copy is to `buffer`, with a terminating zero byte, for another process's
/// rampool_direct_join_handed_over(). A program with the text can use the lease: keep it as secret as a key.
/// RAMPOOL_STATUS_NO_ROOM if it is longer than `size` bytes; 8192 are enough for any 32 servers.
///
/// # Safety
/// `handed` is null or came from rampool_region_hand_over() and was not freed; `buffer` is null or `size`
/// bytes can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_handed_over_text(
    handed: *const HandedOverHandle,
    buffer: *mut c_char,
    size: usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    match unsafe { handed.as_ref() } {
        // SAFETY: as the caller promises.
        Some(handed) => unsafe {
            write_text("rampool_handed_over_text", &handed.0.to_string(), buffer, size)
        },
        None => null_pointer("rampool_handed_over_text"),
    }
}

/// Frees the handle; the copy stays. Null does nothing.
///
/// # Safety
/// `handed` is null or came from rampool_region_hand_over() and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_handed_over_free(handed: *mut HandedOverHandle) {
    if !handed.is_null() {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        drop(unsafe { Box::from_raw(handed) });
    }
}

/// Joins the lease of the process that handed a region over, and opens the copy: its bytes are the `*bytes`
/// bytes of `*region` from `*offset` on, for any operation of the direct view. The builder gives key,
/// encryption and deadlines; its servers are ignored. On success, close `*direct` with rampool_direct_close()
/// and `*region` with rampool_direct_region_free() or rampool_direct_region_close(); otherwise both are null.
///
/// # Safety
/// `builder` came from rampool_builder_new() and was not freed; `handed` is null or ends with a zero byte;
/// the others are null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_join_handed_over(
    builder: *const Builder,
    handed: *const c_char,
    direct: *mut *mut DirectHandle,
    region: *mut *mut DirectRegionHandle,
    offset: *mut u64,
    bytes: *mut u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let outs = unsafe { (direct.as_mut(), region.as_mut(), offset.as_mut(), bytes.as_mut()) };
    let (Some(direct), Some(region), Some(offset), Some(bytes)) = outs else {
        return null_pointer("rampool_direct_join_handed_over");
    };
    (*direct, *region) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: as above.
    let (Some(builder), Some(handed)) = (unsafe { (builder.as_ref(), text(handed)) }) else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_direct_join_handed_over: a null pointer, or a text that is not UTF-8",
        );
    };
    let handed: HandedOver = match handed.parse() {
        Ok(handed) => handed,
        Err(error) => return fail(RampoolStatus::Invalid, error),
    };
    let mut joined = match builder.0.join_direct(handed.lease()) {
        Ok(joined) => joined,
        Err(error) => return fail(status_of(&error), error),
    };
    match joined.open_ticket(handed.region()) {
        Ok(opened) => {
            *direct = Box::into_raw(Box::new(DirectHandle(joined)));
            *region = Box::into_raw(Box::new(DirectRegionHandle(opened)));
            (*offset, *bytes) = (handed.offset(), handed.bytes());
            RampoolStatus::Ok
        }
        Err(error) => {
            joined.pool().close();
            failed(&error)
        }
    }
}

/// Allocates `bytes` bytes of memory, all zero, and gives the key to the first server that is reached through
/// shared memory. If there is none, or it accepts no more (64 memories and 256 MiB for each connection), the
/// memory is ordinary memory: see rampool_direct_is_exposed(). Blocks until the server has answered. On
/// success, free `*memory` with rampool_exposed_free(); otherwise it is null.
///
/// # Safety
/// `direct` came from rampool_direct_open() or _join() and was not closed; `memory` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_expose(
    direct: *mut DirectHandle,
    bytes: usize,
    memory: *mut *mut ExposedHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(direct), Some(out)) = (unsafe { (direct.as_mut(), memory.as_mut()) }) else {
        return null_pointer("rampool_direct_expose");
    };
    *out = std::ptr::null_mut();
    match direct.0.expose(bytes) {
        Ok(memory) => {
            *out = Box::into_raw(Box::new(ExposedHandle(memory)));
            RampoolStatus::Ok
        }
        Err(error) => failed(&error),
    }
}

/// The first byte of exposed memory; the address is valid until the memory is freed. Null for null.
///
/// # Safety
/// `memory` is null or came from rampool_direct_expose() and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_exposed_address(memory: *const ExposedHandle) -> *mut c_void {
    // SAFETY: null or valid, as the caller promises.
    unsafe { memory.as_ref() }.map_or(std::ptr::null_mut(), |memory| memory.0.as_ptr().cast())
}

/// Bytes of exposed memory; 0 for null.
///
/// # Safety
/// As rampool_exposed_address().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_exposed_bytes(memory: *const ExposedHandle) -> usize {
    // SAFETY: null or valid, as the caller promises.
    unsafe { memory.as_ref() }.map_or(0, |memory| memory.0.len())
}

/// Whether a server has a key to the memory now. False from a break of its connection until the reconnect.
/// False for null.
///
/// # Safety
/// `direct` is null or came from rampool_direct_open() or _join() and was not closed; `memory` is null or
/// came from rampool_direct_expose() of it and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_is_exposed(
    direct: *const DirectHandle,
    memory: *const ExposedHandle,
) -> bool {
    // SAFETY: null or valid, as the caller promises.
    let both = unsafe { direct.as_ref().zip(memory.as_ref()) };
    both.is_some_and(|(direct, memory)| direct.0.is_exposed(&memory.0))
}

/// Revokes the key. Blocks until the server confirms that it no longer touches the memory, or until it is
/// lost and the bytes are in other memory at the same addresses. The memory stays, as ordinary memory.
///
/// # Safety
/// As rampool_direct_is_exposed().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_withdraw(
    direct: *mut DirectHandle,
    memory: *const ExposedHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(direct), Some(memory)) = (unsafe { (direct.as_mut(), memory.as_ref()) }) else {
        return null_pointer("rampool_direct_withdraw");
    };
    direct.0.withdraw(&memory.0).map_or_else(|error| failed(&error), |()| RampoolStatus::Ok)
}

/// Frees exposed memory. A server that still has the key loses it with the next rampool_direct_expose(), or
/// when the view is closed. Null does nothing.
///
/// # Safety
/// `memory` is null or came from rampool_direct_expose() and was not freed; nothing uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_exposed_free(memory: *mut ExposedHandle) {
    if !memory.is_null() {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        drop(unsafe { Box::from_raw(memory) });
    }
}

/// Reads the bytes that `there` selects from `offset` of the region on into exposed memory, contiguously from
/// its byte `at` on. With a key, the server writes them there itself.
///
/// # Safety
/// As rampool_direct_is_exposed(); `region` belongs to `direct`; `there` is a layout that was not freed;
/// nothing else uses those bytes of the memory during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_get_into(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    there: *const LayoutHandle,
    memory: *const ExposedHandle,
    at: usize,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe {
        by_key("rampool_direct_get_into", (direct, region, there, memory), |direct, region, there, memory| {
            direct.get_into(region, offset, there, memory, at)
        })
    }
}

/// Writes bytes of exposed memory, from its byte `at` on, to what `there` selects from `offset` of the region
/// on. With a key, the server reads them there itself.
///
/// # Safety
/// As rampool_direct_get_into(), but other threads may read those bytes of the memory during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_put_from(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    there: *const LayoutHandle,
    memory: *const ExposedHandle,
    at: usize,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe {
        by_key("rampool_direct_put_from", (direct, region, there, memory), |direct, region, there, memory| {
            direct.put_from(region, offset, there, memory, at)
        })
    }
}

type Handles = (*mut DirectHandle, *const DirectRegionHandle, *const LayoutHandle, *const ExposedHandle);

/// # Safety
/// The handles are null or valid.
unsafe fn by_key(
    call: &str,
    (direct, region, there, memory): Handles,
    run: impl FnOnce(&mut Direct, DirectRegion, &Layout, &Exposed) -> Result<(), runtime::direct::DirectError>,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    let all = unsafe { (direct.as_mut(), region.as_ref(), there.as_ref(), memory.as_ref()) };
    let (Some(direct), Some(region), Some(there), Some(memory)) = all else {
        return null_pointer(call);
    };
    run(&mut direct.0, region.0, &there.0, &memory.0)
        .map_or_else(|error| failed(&error), |()| RampoolStatus::Ok)
}

/// Writes the counts of operations on exposed memory to `*stats`, as many as fit `size` (pass
/// sizeof(rampool_key_stats)).
///
/// # Safety
/// `direct` is null or came from rampool_direct_open() or _join() and was not closed; `stats` is null or
/// `size` bytes can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_key_stats(
    direct: *const DirectHandle,
    stats: *mut RampoolKeyStats,
    size: usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(direct) = (unsafe { direct.as_ref() }).filter(|_| !stats.is_null()) else {
        return null_pointer("rampool_direct_key_stats");
    };
    let now = direct.0.key_stats();
    let counted = RampoolKeyStats {
        exposed: now.exposed as u64,
        requests: now.requests,
        bytes: now.bytes,
        stale: now.stale,
        replaced: now.replaced,
    };
    let bytes = size.min(size_of::<RampoolKeyStats>());
    // SAFETY: `size` bytes can be written, as the caller promises, and no more than the struct has are read.
    unsafe { std::ptr::copy_nonoverlapping((&raw const counted).cast::<u8>(), stats.cast::<u8>(), bytes) };
    RampoolStatus::Ok
}
