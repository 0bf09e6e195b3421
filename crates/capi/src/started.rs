//! Gets and puts of the direct view that are started now and waited for later: conversions around
//! [`runtime::direct::Pending`].

use std::ffi::c_void;

use runtime::direct::{Direct, DirectError, DirectRegion, Pending};
use runtime::proto::layout::Layout;

use crate::direct::{DirectHandle, DirectRegionHandle, LayoutHandle, failed};
use crate::{RampoolStatus, null_pointer};

/// An operation that was started. End each with rampool_direct_wait().
pub struct PendingHandle(Pending);

/// # Safety
/// The handles are null or valid; `out` is null or can be written.
unsafe fn started(
    call: &str,
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    out: *mut *mut PendingHandle,
    start: impl FnOnce(&mut Direct, DirectRegion) -> Result<Pending, DirectError>,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(out) = (unsafe { out.as_mut() }) else { return null_pointer(call) };
    *out = std::ptr::null_mut();
    // SAFETY: as above.
    let (Some(direct), Some(region)) = (unsafe { (direct.as_mut(), region.as_ref()) }) else {
        return null_pointer(call);
    };
    match start(&mut direct.0, region.0) {
        Ok(pending) => {
            *out = Box::into_raw(Box::new(PendingHandle(pending)));
            RampoolStatus::Ok
        }
        Err(error) => failed(&error),
    }
}

/// Begins to read `bytes` bytes of the region, from `offset` on, and returns at once. Many operations may be
/// under way; they may end in any order. On success, end `*pending` with rampool_direct_wait(); otherwise it
/// is null.
///
/// # Safety
/// `direct` came from rampool_direct_open() and was not closed; `region` came from
/// rampool_direct_open_region() of it and was not closed or freed; `to` has room for `bytes` bytes, which
/// nothing else uses until rampool_direct_wait() has returned or `direct` is closed; `pending` is null or can
/// be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_start_get(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    to: *mut c_void,
    bytes: u64,
    pending: *mut *mut PendingHandle,
) -> RampoolStatus {
    if to.is_null() && bytes > 0 {
        return null_pointer("rampool_direct_start_get");
    }
    // SAFETY: the caller's promise.
    unsafe {
        started("rampool_direct_start_get", direct, region, pending, |direct, region| {
            let all = Layout::bytes(bytes)?;
            direct.start_get_layout_at(region, offset, &all, to.cast(), &all)
        })
    }
}

/// Begins to write `bytes` bytes to the region, from `offset` on, and returns at once, as
/// rampool_direct_start_get().
///
/// # Safety
/// As rampool_direct_start_get(); `from` has `bytes` bytes, which do not change until rampool_direct_wait()
/// has returned or `direct` is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_start_put(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    from: *const c_void,
    bytes: u64,
    pending: *mut *mut PendingHandle,
) -> RampoolStatus {
    if from.is_null() && bytes > 0 {
        return null_pointer("rampool_direct_start_put");
    }
    // SAFETY: the caller's promise.
    unsafe {
        started("rampool_direct_start_put", direct, region, pending, |direct, region| {
            let all = Layout::bytes(bytes)?;
            direct.start_put_layout_at(region, offset, &all, from.cast(), &all)
        })
    }
}

/// Begins what rampool_direct_get_layout() does, and returns at once, as rampool_direct_start_get(). The
/// layouts may be freed at once.
///
/// # Safety
/// As rampool_direct_start_get(); `there` and `here` are layouts that were not freed; nothing
/// else uses the bytes that `here` selects from `address` on until rampool_direct_wait() has
/// returned or `direct` is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_start_get_layout(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    there: *const LayoutHandle,
    address: *mut c_void,
    here: *const LayoutHandle,
    pending: *mut *mut PendingHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(there), Some(here)) = (unsafe { (there.as_ref(), here.as_ref()) }) else {
        return null_pointer("rampool_direct_start_get_layout");
    };
    // SAFETY: the caller's promise.
    unsafe {
        started("rampool_direct_start_get_layout", direct, region, pending, |direct, region| {
            direct.start_get_layout_at(region, offset, &there.0, address.cast(), &here.0)
        })
    }
}

/// Begins what rampool_direct_put_layout() does, and returns at once, as rampool_direct_start_get(). The
/// layouts may be freed at once.
///
/// # Safety
/// As rampool_direct_start_get_layout(); the bytes that `here` selects do not change until
/// rampool_direct_wait() has returned or `direct` is closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_start_put_layout(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    there: *const LayoutHandle,
    address: *const c_void,
    here: *const LayoutHandle,
    pending: *mut *mut PendingHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(there), Some(here)) = (unsafe { (there.as_ref(), here.as_ref()) }) else {
        return null_pointer("rampool_direct_start_put_layout");
    };
    // SAFETY: the caller's promise.
    unsafe {
        started("rampool_direct_start_put_layout", direct, region, pending, |direct, region| {
            direct.start_put_layout_at(region, offset, &there.0, address.cast(), &here.0)
        })
    }
}

/// Whether an operation has ended; false for null. Does not block, and lets everything under way go on. When
/// it has ended, rampool_direct_wait() returns at once and says how.
///
/// # Safety
/// `direct` is null or was not closed; `pending` is null or was started with it and not waited for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_test(
    direct: *mut DirectHandle,
    pending: *const PendingHandle,
) -> bool {
    // SAFETY: null or valid, as the caller promises.
    match unsafe { (direct.as_mut(), pending.as_ref()) } {
        (Some(direct), Some(pending)) => direct.0.is_done(&pending.0),
        _ => false,
    }
}

/// Blocks until an operation has ended, returns its status, and frees `pending`, also when it failed. Null
/// does nothing.
///
/// # Safety
/// `direct` came from rampool_direct_open() and was not closed; `pending` is null or was started with it and
/// not waited for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_wait(
    direct: *mut DirectHandle,
    pending: *mut PendingHandle,
) -> RampoolStatus {
    if pending.is_null() {
        return RampoolStatus::Ok;
    }
    // SAFETY: null or valid, as the caller promises.
    let Some(direct) = (unsafe { direct.as_mut() }) else { return null_pointer("rampool_direct_wait") };
    // SAFETY: made by `Box::into_raw`, and waited for once, as the caller promises.
    match direct.0.wait(unsafe { Box::from_raw(pending) }.0) {
        Ok(_) => RampoolStatus::Ok,
        Err(error) => failed(&error),
    }
}
