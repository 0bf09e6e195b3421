//! Copies of paged regions for other processes, in C. Conversions around [`runtime::region::HandedOver`].

use std::ffi::c_char;

use runtime::region::{HandOverError, HandedOver};

use crate::direct::{DirectHandle, DirectRegionHandle, failed};
use crate::{Builder, RampoolStatus, RegionHandle, fail, null_pointer, status_of, text, write_text};

/// A copy of a region at the memory servers, and how to reach it.
pub struct HandedOverHandle(HandedOver);

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
            joined.close();
            failed(&error)
        }
    }
}
