//! Shared regions in the direct view, in C: conversions around [`runtime::shared::SharedDirect`], for ranks
//! and for processes outside the run.

use std::ffi::{c_char, c_void};
use std::sync::{Arc, PoisonError};

use runtime::proto::layout::Layout;
use runtime::shared::{
    Outside, OutsideConfig, OutsideError, OutsideTicket, Region, SharedDirect, SharedDirectError,
};

use crate::direct::LayoutHandle;
use crate::elements::{combine_of, kind_of, no_such};
use crate::shared::{SharedHandle, failed as failed_as_rank};
use crate::{RampoolStatus, bytes_at, fail, null_pointer, text, write_text};

/// A shared region whose bytes are read and changed at the homes of its pages. Any threads may use it.
pub struct SharedDirectHandle(SharedDirect);

/// A process outside the run, connected to the listeners of its ranks. Any threads may use it; their
/// operations take turns.
pub struct OutsideHandle(Arc<Outside>);

/// Opens the region that begins at `address`, which all ranks allocated together, for direct operations. On
/// success, close `*view` with rampool_shared_direct_close(); otherwise it is null.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished; `view` is null or can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_open(
    shared: *const SharedHandle,
    address: *const c_void,
    view: *mut *mut SharedDirectHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(shared), Some(out)) = (unsafe { (shared.as_ref(), view.as_mut()) }) else {
        return null_pointer("rampool_shared_direct_open");
    };
    *out = std::ptr::null_mut();
    let Some(region) = region_at(shared, address) else {
        return fail(
            RampoolStatus::Invalid,
            format_args!("rampool_shared_direct_open: no allocation of all ranks begins at {address:p}"),
        );
    };
    match shared.shared.direct(region) {
        Ok(opened) => {
            *out = Box::into_raw(Box::new(SharedDirectHandle(opened)));
            RampoolStatus::Ok
        }
        Err(error) => failed_as_rank(&error),
    }
}

fn region_at(shared: &SharedHandle, address: *const c_void) -> Option<Region> {
    shared.regions.lock().unwrap_or_else(PoisonError::into_inner).get(&address.addr()).copied()
}

/// Closes the view; the region stays. Null does nothing.
///
/// # Safety
/// `view` is null or came from rampool_shared_direct_open() or rampool_outside_open_region() and was not
/// closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_close(view: *mut SharedDirectHandle) {
    if !view.is_null() {
        // SAFETY: made by `Box::into_raw`, and closed once, as the caller promises.
        drop(unsafe { Box::from_raw(view) });
    }
}

/// Bytes of the region; 0 for null.
///
/// # Safety
/// As rampool_shared_direct_close().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_bytes(view: *const SharedDirectHandle) -> u64 {
    // SAFETY: null or valid, as the caller promises.
    unsafe { view.as_ref() }.map_or(0, |view| view.0.bytes())
}

/// Publishes the region that begins at `address`, which all ranks allocated together, under this name for
/// processes outside the run. Every rank makes the call.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished; `name` is null or ends with a
/// zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_publish(
    shared: *const SharedHandle,
    name: *const c_char,
    address: *const c_void,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(shared), Some(name)) = (unsafe { (shared.as_ref(), text(name)) }) else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_shared_publish: a null pointer, or a name that is not UTF-8",
        );
    };
    let Some(region) = region_at(shared, address) else {
        return fail(
            RampoolStatus::Invalid,
            format_args!("rampool_shared_publish: no allocation of all ranks begins at {address:p}"),
        );
    };
    shared.shared.publish(name, region).map_or_else(|error| failed_as_rank(&error), |()| RampoolStatus::Ok)
}

/// Opens a listener on every rank for processes outside the run, which may use what is published. Every
/// rank makes the call, each with its own address ("HOST:PORT"; with port 0 the kernel chooses). Each
/// gets the same ticket, with a terminating zero byte, for rampool_outside_open(). Blocks until all have
/// called. RAMPOOL_STATUS_NO_ROOM if the ticket is longer than `size` bytes; 256 for each rank and 64
/// for the secret are enough.
///
/// # Safety
/// `shared` is null or came from rampool_shared_join() and was not finished; `listen` is null or ends with a
/// zero byte; `buffer` is null or `size` bytes can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_listen(
    shared: *const SharedHandle,
    listen: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(shared), Some(listen)) = (unsafe { (shared.as_ref(), text(listen)) }) else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_shared_listen: a null pointer, or an address that is not UTF-8",
        );
    };
    match shared.shared.listen(listen) {
        // SAFETY: as the caller promises.
        Ok(ticket) => unsafe { write_text("rampool_shared_listen", &ticket.to_string(), buffer, size) },
        Err(error) => fail(RampoolStatus::Run, error),
    }
}

/// Connects to the listeners of a run, by the ticket of rampool_shared_listen(). From another machine it
/// needs the run's key, in the file `key_file` (null: none). Blocks at most a minute. On success, close
/// `*outside` with rampool_outside_close(); otherwise it is null.
///
/// # Safety
/// `ticket` and `key_file` are null or end with a zero byte; `outside` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_outside_open(
    ticket: *const c_char,
    key_file: *const c_char,
    outside: *mut *mut OutsideHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(ticket), Some(out)) = (unsafe { (text(ticket), outside.as_mut()) }) else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_outside_open: a null pointer, or the ticket is not UTF-8",
        );
    };
    *out = std::ptr::null_mut();
    let ticket: OutsideTicket = match ticket.parse() {
        Ok(ticket) => ticket,
        Err(error) => return fail(RampoolStatus::Invalid, error),
    };
    let mut config = OutsideConfig::default();
    if !key_file.is_null() {
        // SAFETY: as the caller promises.
        let Some(path) = (unsafe { text(key_file) }) else {
            return fail(RampoolStatus::Invalid, "rampool_outside_open: the key file's name is not UTF-8");
        };
        match runtime::key::Key::load(path.as_ref()) {
            Ok(key) => config.key = Some(key),
            Err(error) => return fail(RampoolStatus::Invalid, error),
        }
    }
    match Outside::connect(&ticket, config) {
        Ok(opened) => {
            *out = Box::into_raw(Box::new(OutsideHandle(opened)));
            RampoolStatus::Ok
        }
        Err(error) => failed(error.into()),
    }
}

/// Disconnects from the run. Views that are open stay valid until they are closed. Null does nothing.
///
/// # Safety
/// `outside` is null or came from rampool_outside_open() and was not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_outside_close(outside: *mut OutsideHandle) {
    if !outside.is_null() {
        // SAFETY: made by `Box::into_raw`, and closed once, as the caller promises.
        drop(unsafe { Box::from_raw(outside) });
    }
}

/// Opens a region that the ranks have published. RAMPOOL_STATUS_INVALID if there is none of that name. On
/// success, close `*view` with rampool_shared_direct_close(); otherwise it is null.
///
/// # Safety
/// `outside` is null or came from rampool_outside_open() and was not closed; `name` is null or ends with a
/// zero byte; `view` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_outside_open_region(
    outside: *const OutsideHandle,
    name: *const c_char,
    view: *mut *mut SharedDirectHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(outside), Some(name), Some(out)) = (unsafe { (outside.as_ref(), text(name), view.as_mut()) })
    else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_outside_open_region: a null pointer, or a name that is not UTF-8",
        );
    };
    *out = std::ptr::null_mut();
    match outside.0.open(name) {
        Ok(opened) => {
            *out = Box::into_raw(Box::new(SharedDirectHandle(opened)));
            RampoolStatus::Ok
        }
        Err(error) => failed(error.into()),
    }
}

/// Reads the bytes that `there` selects from `offset` of the region on into those that `here` selects from
/// `address` on. Both select the same number of bytes. Only those bytes travel.
///
/// # Safety
/// `view` is null or was opened and not closed; `there` and `here` are null or layouts that were not freed;
/// the bytes that `here` selects can be written, and nothing else uses them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_get_layout(
    view: *const SharedDirectHandle,
    offset: u64,
    there: *const LayoutHandle,
    address: *mut c_void,
    here: *const LayoutHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let all = unsafe { (view.as_ref(), there.as_ref(), here.as_ref()) };
    let (Some(view), Some(there), Some(here)) = all else {
        return null_pointer("rampool_shared_direct_get_layout");
    };
    if there.0.size() != here.0.size() {
        return failed(SharedDirectError::Lengths { there: there.0.size(), here: here.0.size() });
    }
    match view.0.get_packed(offset, &there.0) {
        Ok(bytes) => {
            // SAFETY: the caller's promise; there are as many bytes as `here` selects.
            unsafe { spread(&bytes, address.cast(), &here.0) };
            RampoolStatus::Ok
        }
        Err(error) => failed(error),
    }
}

/// Writes the bytes that `here` selects from `address` on to those that `there` selects from `offset` of the
/// region on. Both select the same number of bytes, and `there` selects none twice.
///
/// # Safety
/// As rampool_shared_direct_get_layout(); the bytes that `here` selects can be read, and do not change during
/// the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_put_layout(
    view: *const SharedDirectHandle,
    offset: u64,
    there: *const LayoutHandle,
    address: *const c_void,
    here: *const LayoutHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let all = unsafe { (view.as_ref(), there.as_ref(), here.as_ref()) };
    let (Some(view), Some(there), Some(here)) = all else {
        return null_pointer("rampool_shared_direct_put_layout");
    };
    // Check before reading: a layout may reach anywhere, and select more than any region has.
    if let Err(error) = there.0.placed(offset, view.0.bytes()) {
        return failed(error.into());
    }
    if there.0.size() != here.0.size() {
        return failed(SharedDirectError::Lengths { there: there.0.size(), here: here.0.size() });
    }
    let bytes = usize::try_from(here.0.size()).expect("a 64-bit machine");
    let mut packed = Vec::<u8>::new();
    if packed.try_reserve_exact(bytes).is_err() {
        return failed(SharedDirectError::NoMemory { bytes: bytes as u64 });
    }
    packed.resize(bytes, 0);
    // SAFETY: the caller's promise; there is room for as many bytes as `here` selects.
    unsafe { crate::direct::rampool_layout_pack(&raw const *here, address, packed.as_mut_ptr().cast()) };
    view.0.put_packed(offset, &there.0, packed).map_or_else(failed, |()| RampoolStatus::Ok)
}

/// Reads `bytes` bytes of the region, from `offset` on.
///
/// # Safety
/// `view` is null or was opened and not closed; `to` has room for `bytes` bytes, which nothing else uses
/// during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_get(
    view: *const SharedDirectHandle,
    offset: u64,
    to: *mut c_void,
    bytes: u64,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe {
        whole("rampool_shared_direct_get", to.is_null(), bytes, |all| {
            rampool_shared_direct_get_layout(view, offset, all, to, all)
        })
    }
}

/// Writes `bytes` bytes to the region, from `offset` on. When it returns they are there, as if the rank that
/// executed it had stored and released them.
///
/// # Safety
/// `view` is null or was opened and not closed; `from` has `bytes` bytes, which do not change during the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_put(
    view: *const SharedDirectHandle,
    offset: u64,
    from: *const c_void,
    bytes: u64,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe {
        whole("rampool_shared_direct_put", from.is_null(), bytes, |all| {
            rampool_shared_direct_put_layout(view, offset, all, from, all)
        })
    }
}

/// # Safety
/// As the function that `run` calls.
unsafe fn whole(
    call: &str,
    null: bool,
    bytes: u64,
    run: impl FnOnce(*const LayoutHandle) -> RampoolStatus,
) -> RampoolStatus {
    match Layout::bytes(bytes) {
        _ if null && bytes > 0 => null_pointer(call),
        Ok(all) => {
            let all = LayoutHandle(all);
            run(&raw const all)
        }
        Err(error) => failed(error.into()),
    }
}

/// Combines each element of this kind that `there` selects from `offset` of the region on with an operand:
/// `element = combine(element, operand)`. `operands` has one operand for each element, contiguously. Each
/// change is atomic among direct operations, but not with rampool_shared_atomic() or stores of ranks to the
/// same word.
///
/// # Safety
/// `view` is null or was opened and not closed; `there` is null or a layout that was not freed; `operands`
/// has rampool_layout_size(there) bytes, which do not change during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_accumulate(
    view: *const SharedDirectHandle,
    offset: u64,
    there: *const LayoutHandle,
    kind: u32,
    combine: u32,
    operands: *const c_void,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(view), Some(there)) = (unsafe { (view.as_ref(), there.as_ref()) }) else {
        return null_pointer("rampool_shared_direct_accumulate");
    };
    if operands.is_null() && there.0.size() > 0 {
        return null_pointer("rampool_shared_direct_accumulate");
    }
    let (Some(kind), Some(how)) = (kind_of(kind), combine_of(combine)) else {
        return no_such("rampool_shared_direct_accumulate", kind, combine);
    };
    if let Err(error) = there.0.placed(offset, view.0.bytes()) {
        return failed(error.into());
    }
    let bytes = usize::try_from(there.0.size()).expect("a 64-bit machine");
    // SAFETY: as many bytes as the caller promises.
    let operands = unsafe { bytes_at(operands, bytes) }.to_vec();
    view.0.accumulate_bytes(offset, &there.0, kind, how, operands).map_or_else(failed, |()| RampoolStatus::Ok)
}

/// Combines one element of this kind with an operand, and stores its previous value in `*old` unless that is
/// null. Ordered like a lock of that word, as rampool_shared_atomic() is.
///
/// # Safety
/// `view` is null or was opened and not closed; `operand` is null or points to a number of this kind; one can
/// be written to `old` if that is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_fetch_op(
    view: *const SharedDirectHandle,
    offset: u64,
    kind: u32,
    combine: u32,
    operand: *const c_void,
    old: *mut c_void,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(view), false) = (unsafe { view.as_ref() }, operand.is_null()) else {
        return null_pointer("rampool_shared_direct_fetch_op");
    };
    let (Some(kind), Some(how)) = (kind_of(kind), combine_of(combine)) else {
        return no_such("rampool_shared_direct_fetch_op", kind, combine);
    };
    // SAFETY: the caller's promise.
    unsafe { given(view.0.fetch_bits(offset, kind, how, bits(operand, kind.bytes())), kind.bytes(), old) }
}

/// Writes `*desired` to one element of this kind if it equals `*expected` bit by bit, and stores its previous
/// value in `*old`. Ordered as rampool_shared_direct_fetch_op().
///
/// # Safety
/// As rampool_shared_direct_fetch_op(); `expected` and `desired` are null or point to numbers of this kind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_shared_direct_compare_exchange(
    view: *const SharedDirectHandle,
    offset: u64,
    kind: u32,
    expected: *const c_void,
    desired: *const c_void,
    old: *mut c_void,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(view), false, false) = (unsafe { view.as_ref() }, expected.is_null(), desired.is_null()) else {
        return null_pointer("rampool_shared_direct_compare_exchange");
    };
    let Some(kind) = kind_of(kind) else { return no_such("rampool_shared_direct_compare_exchange", kind, 0) };
    let len = kind.bytes();
    // SAFETY: the caller's promise.
    unsafe { given(view.0.swap_bits(offset, kind, bits(expected, len), bits(desired, len)), len, old) }
}

/// # Safety
/// `from` has `len` bytes, at most 8.
unsafe fn bits(from: *const c_void, len: usize) -> u64 {
    let mut word = [0; 8];
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), word.as_mut_ptr(), len) };
    u64::from_le_bytes(word)
}

/// # Safety
/// `old` is null, or `len` bytes (at most 8) can be written there.
unsafe fn given(result: Result<u64, SharedDirectError>, len: usize, old: *mut c_void) -> RampoolStatus {
    match result {
        Ok(before) => {
            if !old.is_null() {
                // SAFETY: the caller's promise.
                unsafe {
                    std::ptr::copy_nonoverlapping(before.to_le_bytes().as_ptr(), old.cast::<u8>(), len)
                };
            }
            RampoolStatus::Ok
        }
        Err(error) => failed(error),
    }
}

/// Copies contiguous bytes to those that a layout selects from an address on.
///
/// # Safety
/// The bytes that it selects can be written, and are as many.
unsafe fn spread(bytes: &[u8], address: *mut u8, layout: &Layout) {
    let mut rest = bytes;
    for run in layout.program().runs() {
        let (mine, behind) = rest.split_at(usize::try_from(run.len).expect("a 64-bit machine"));
        let offset = isize::try_from(run.offset).expect("a 64-bit machine");
        // SAFETY: the caller vouches for the run.
        unsafe { std::ptr::copy_nonoverlapping(mine.as_ptr(), address.wrapping_offset(offset), mine.len()) };
        rest = behind;
    }
}

fn failed(error: SharedDirectError) -> RampoolStatus {
    let status = match &error {
        SharedDirectError::Shared(error) => return failed_as_rank(error),
        SharedDirectError::Outside(OutsideError::Refused { .. }) => RampoolStatus::Invalid,
        SharedDirectError::Outside(_) => RampoolStatus::Run,
        _ => RampoolStatus::Invalid,
    };
    fail(status, error)
}
