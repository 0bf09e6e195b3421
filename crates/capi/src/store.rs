//! Shared stores in C: conversions around [`runtime::values`].

use std::ffi::{c_char, c_void};
use std::time::Duration;

use runtime::values::{SharedStore, SharedStoreError};

use crate::direct::DirectHandle;
use crate::{RampoolStatus, bytes_at, fail, null_pointer, text};

/// A mapping from keys to bytes in the pool, for all members of the lease. Each operation takes effect at
/// once for all of them, and blocks until the servers have answered. Values stay when the handle is freed.
pub struct StoreHandle(SharedStore);

/// Opens the store of this name, which is made if there is none, for at most `keys` keys (0: as many as the
/// store is for that there is, or else 100000). The room of a process that has put, and has not been heard of
/// for `stale_ms` milliseconds, is taken over (0: 60 seconds). Rust and Python open the same store. On
/// success, free `*store` with rampool_store_free(); otherwise it is null.
///
/// # Safety
/// `direct` came from rampool_direct_open() or _join() and was not closed; `name` is null or ends with a zero
/// byte; `store` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_store_open(
    direct: *mut DirectHandle,
    name: *const c_char,
    keys: u64,
    stale_ms: u32,
    store: *mut *mut StoreHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, name, out) = unsafe { (direct.as_mut(), text(name), store.as_mut()) };
    let (Some(direct), Some(name), Some(out)) = (direct, name, out) else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_store_open: a null pointer, or a name that is not UTF-8",
        );
    };
    *out = std::ptr::null_mut();
    let stale = Duration::from_millis(if stale_ms == 0 { 60_000 } else { stale_ms.into() });
    match SharedStore::open(&mut direct.0, name, (keys > 0).then_some(keys), stale) {
        Ok(store) => {
            *out = Box::into_raw(Box::new(StoreHandle(store)));
            RampoolStatus::Ok
        }
        Err(error) => status(&error),
    }
}

/// Frees the handle. Null does nothing.
///
/// # Safety
/// `store` is null or came from rampool_store_open() and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_store_free(store: *mut StoreHandle) {
    if !store.is_null() {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        drop(unsafe { Box::from_raw(store) });
    }
}

/// Makes `bytes` bytes the value of a key. Without room the status is RAMPOOL_STATUS_NO_ROOM, and the key has
/// the value that it had.
///
/// # Safety
/// `direct` and `store` are null or valid, and `store` is of `direct`; `key` and `value` can be read for the
/// given number of bytes, or are null if that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_store_put(
    direct: *mut DirectHandle,
    store: *mut StoreHandle,
    key: *const c_void,
    key_bytes: usize,
    value: *const c_void,
    bytes: usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, store) = unsafe { (direct.as_mut(), store.as_mut()) };
    let (Some(direct), Some(store), false, false) =
        (direct, store, key.is_null() && key_bytes > 0, value.is_null() && bytes > 0)
    else {
        return null_pointer("rampool_store_put");
    };
    // SAFETY: the caller promises as many readable bytes, which do not change during the call.
    let (key, value) = unsafe { (bytes_at(key, key_bytes), bytes_at(value, bytes)) };
    match store.0.put(&mut direct.0, key, &[value]) {
        Ok(()) => RampoolStatus::Ok,
        Err(error) => status(&error),
    }
}

/// Reads the value of a key: `*bytes` is its length, and the buffer gets it. If the key has no value the
/// status is RAMPOOL_STATUS_GONE; if the value is longer than `room`, RAMPOOL_STATUS_NO_ROOM, and only
/// `*bytes` is written.
///
/// # Safety
/// `direct` and `store` are null or valid, and `store` is of `direct`; `key` can be read and `buffer` written
/// for the given number of bytes, or they are null if that is 0; `bytes` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_store_get(
    direct: *mut DirectHandle,
    store: *mut StoreHandle,
    key: *const c_void,
    key_bytes: usize,
    buffer: *mut c_void,
    room: usize,
    bytes: *mut usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, store, bytes) = unsafe { (direct.as_mut(), store.as_mut(), bytes.as_mut()) };
    let (Some(direct), Some(store), Some(bytes), false, false) =
        (direct, store, bytes, key.is_null() && key_bytes > 0, buffer.is_null() && room > 0)
    else {
        return null_pointer("rampool_store_get");
    };
    // SAFETY: the caller promises as many readable bytes, which do not change during the call.
    let key = unsafe { bytes_at(key, key_bytes) };
    match store.0.get(&mut direct.0, key) {
        Ok(Some(value)) => {
            *bytes = value.len();
            if value.len() > room {
                let text = format_args!("the value has {} bytes, there is room for {room}", value.len());
                return fail(RampoolStatus::NoRoom, text);
            }
            if !value.is_empty() {
                // SAFETY: the caller promises `room` writable bytes, at least as many as the value has.
                unsafe { buffer.cast::<u8>().copy_from_nonoverlapping(value.as_ptr(), value.len()) };
            }
            RampoolStatus::Ok
        }
        Ok(None) => fail(RampoolStatus::Gone, "the key has no value"),
        Err(error) => status(&error),
    }
}

/// Removes a key with its value. If it has none the status is RAMPOOL_STATUS_GONE.
///
/// # Safety
/// As rampool_store_get().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_store_remove(
    direct: *mut DirectHandle,
    store: *mut StoreHandle,
    key: *const c_void,
    key_bytes: usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, store) = unsafe { (direct.as_mut(), store.as_mut()) };
    let (Some(direct), Some(store), false) = (direct, store, key.is_null() && key_bytes > 0) else {
        return null_pointer("rampool_store_remove");
    };
    // SAFETY: the caller promises as many readable bytes, which do not change during the call.
    match store.0.remove(&mut direct.0, unsafe { bytes_at(key, key_bytes) }) {
        Ok(true) => RampoolStatus::Ok,
        Ok(false) => fail(RampoolStatus::Gone, "the key has no value"),
        Err(error) => status(&error),
    }
}

/// How many keys have a value.
///
/// # Safety
/// `direct` and `store` are null or valid, and `store` is of `direct`; `count` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_store_count(
    direct: *mut DirectHandle,
    store: *const StoreHandle,
    count: *mut u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, store, count) = unsafe { (direct.as_mut(), store.as_ref(), count.as_mut()) };
    let (Some(direct), Some(store), Some(count)) = (direct, store, count) else {
        return null_pointer("rampool_store_count");
    };
    match store.0.len(&mut direct.0) {
        Ok(keys) => {
            *count = keys;
            RampoolStatus::Ok
        }
        Err(error) => status(&error),
    }
}

fn status(error: &SharedStoreError) -> RampoolStatus {
    match error {
        SharedStoreError::Direct(error) => crate::direct::failed(error),
        SharedStoreError::IndexFull { .. } | SharedStoreError::NoExtents { .. } => {
            fail(RampoolStatus::NoRoom, error)
        }
        SharedStoreError::Contended { .. } => fail(RampoolStatus::Busy, error),
        _ => fail(RampoolStatus::Invalid, error),
    }
}
