//! The direct view in C: conversions around [`runtime::direct`] and [`runtime::proto::layout`].

use std::ffi::{c_char, c_int, c_void};
use std::slice;

use runtime::direct::{Direct, DirectError, DirectRegion, Kept};
use runtime::pool::LeaseTicket;
use runtime::proto::layout::{Layout, LayoutError, Order};

use crate::{Builder, RampoolStatus, fail, null_pointer, status_of, text, write_text};

/// Order of the elements of a subarray: the last dimension is contiguous, or the first.
pub const RAMPOOL_ORDER_C: u32 = 0;
pub const RAMPOOL_ORDER_FORTRAN: u32 = 1;

/// Which bytes, in which order, as in MPI's derived datatypes. Immutable. Free it with rampool_layout_free(),
/// even after other layouts were made from it.
pub struct LayoutHandle(pub(crate) Layout);

/// One thread's connection to the bytes of regions, which are read and changed at the servers. Use it from
/// one thread at a time.
pub struct DirectHandle(pub Direct);

/// A region of the direct view.
pub struct DirectRegionHandle(pub(crate) DirectRegion);

/// # Safety
/// `out` is null or can be written.
unsafe fn give(
    call: &str,
    out: *mut *mut LayoutHandle,
    layout: Result<Layout, LayoutError>,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(out) = (unsafe { out.as_mut() }) else { return null_pointer(call) };
    *out = std::ptr::null_mut();
    match layout {
        Ok(layout) => {
            *out = Box::into_raw(Box::new(LayoutHandle(layout)));
            RampoolStatus::Ok
        }
        Err(error) => fail(RampoolStatus::Invalid, error),
    }
}

/// # Safety
/// `layout` is null or a layout that was not freed; `out` is null or can be written.
unsafe fn made(
    call: &str,
    layout: *const LayoutHandle,
    out: *mut *mut LayoutHandle,
    make: impl FnOnce(&Layout) -> Result<Layout, LayoutError>,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    match unsafe { layout.as_ref() } {
        // SAFETY: as above.
        Some(layout) => unsafe { give(call, out, make(&layout.0)) },
        None => null_pointer(call),
    }
}

/// The items of a caller's array; none if it is null or empty.
///
/// # Safety
/// `count` is 0, or `items` is null or has that many.
unsafe fn array<'a, T>(items: *const T, count: usize) -> Option<&'a [T]> {
    match (count, items.is_null()) {
        (0, _) => Some(&[]),
        (_, true) => None,
        // SAFETY: the caller's promise.
        (_, false) => Some(unsafe { slice::from_raw_parts(items, count) }),
    }
}

/// `bytes` consecutive bytes.
///
/// # Safety
/// `layout` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_bytes(bytes: u64, layout: *mut *mut LayoutHandle) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe { give("rampool_layout_bytes", layout, Layout::bytes(bytes)) }
}

/// `count` elements, one extent apart.
///
/// # Safety
/// `element` is null or a layout that was not freed; `layout` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_contiguous(
    element: *const LayoutHandle,
    count: u64,
    layout: *mut *mut LayoutHandle,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe { made("rampool_layout_contiguous", element, layout, |element| element.contiguous(count)) }
}

/// `count` blocks of `block` elements, the blocks `stride` extents apart.
///
/// # Safety
/// As rampool_layout_contiguous().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_vector(
    element: *const LayoutHandle,
    count: u64,
    block: u64,
    stride: i64,
    layout: *mut *mut LayoutHandle,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe { made("rampool_layout_vector", element, layout, |element| element.vector(count, block, stride)) }
}

/// `count` blocks of `block` elements, the blocks `stride` bytes apart.
///
/// # Safety
/// As rampool_layout_contiguous().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_hvector(
    element: *const LayoutHandle,
    count: u64,
    block: u64,
    stride: i64,
    layout: *mut *mut LayoutHandle,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe {
        made("rampool_layout_hvector", element, layout, |element| element.hvector(count, block, stride))
    }
}

/// Lengths and displacements, from two arrays of `count` items; `None` if one is missing.
///
/// # Safety
/// Each is null or has `count` items.
unsafe fn pairs(blocks: *const u64, displacements: *const i64, count: usize) -> Option<Vec<(u64, i64)>> {
    // SAFETY: the caller's promise.
    let (blocks, at) = unsafe { array(blocks, count).zip(array(displacements, count)) }?;
    Some(blocks.iter().copied().zip(at.iter().copied()).collect())
}

/// `count` blocks of `blocks[i]` elements at `displacements[i]` extents.
///
/// # Safety
/// As rampool_layout_contiguous(); `blocks` and `displacements` have `count` items.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_indexed(
    element: *const LayoutHandle,
    count: usize,
    blocks: *const u64,
    displacements: *const i64,
    layout: *mut *mut LayoutHandle,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    let Some(blocks) = (unsafe { pairs(blocks, displacements, count) }) else {
        return null_pointer("rampool_layout_indexed");
    };
    // SAFETY: the caller's promise.
    unsafe { made("rampool_layout_indexed", element, layout, |element| element.indexed(&blocks)) }
}

/// `count` blocks of `blocks[i]` elements at `displacements[i]` bytes.
///
/// # Safety
/// As rampool_layout_indexed().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_hindexed(
    element: *const LayoutHandle,
    count: usize,
    blocks: *const u64,
    displacements: *const i64,
    layout: *mut *mut LayoutHandle,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    let Some(blocks) = (unsafe { pairs(blocks, displacements, count) }) else {
        return null_pointer("rampool_layout_hindexed");
    };
    // SAFETY: the caller's promise.
    unsafe { made("rampool_layout_hindexed", element, layout, |element| element.hindexed(&blocks)) }
}

/// `count` fields, each `counts[i]` of `layouts[i]` at `displacements[i]` bytes.
///
/// # Safety
/// `counts`, `displacements` and `fields` have `count` items, the last of which are layouts that were not
/// freed; `layout` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_struct(
    count: usize,
    counts: *const u64,
    displacements: *const i64,
    fields: *const *const LayoutHandle,
    layout: *mut *mut LayoutHandle,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    let Some(((counts, at), fields)) =
        (unsafe { array(counts, count).zip(array(displacements, count)).zip(array(fields, count)) })
    else {
        return null_pointer("rampool_layout_struct");
    };
    let mut parts = Vec::with_capacity(count);
    for ((count, at), field) in counts.iter().zip(at).zip(fields) {
        // SAFETY: null or valid, as the caller promises.
        let Some(field) = (unsafe { field.as_ref() }) else {
            return fail(RampoolStatus::Invalid, "rampool_layout_struct: a null field");
        };
        parts.push((*count, *at, field.0.clone()));
    }
    // SAFETY: the caller's promise.
    unsafe { give("rampool_layout_struct", layout, Layout::structure(&parts)) }
}

/// A part of an array of `dimensions` dimensions: `subsizes[i]` elements from `starts[i]` on, of `sizes[i]`.
/// `order` is RAMPOOL_ORDER_....
///
/// # Safety
/// As rampool_layout_contiguous(); `sizes`, `subsizes` and `starts` have `dimensions` items.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_subarray(
    element: *const LayoutHandle,
    dimensions: usize,
    sizes: *const u64,
    subsizes: *const u64,
    starts: *const u64,
    order: u32,
    layout: *mut *mut LayoutHandle,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    let arrays =
        unsafe { array(sizes, dimensions).zip(array(subsizes, dimensions)).zip(array(starts, dimensions)) };
    let Some(((sizes, subsizes), starts)) = arrays else {
        return null_pointer("rampool_layout_subarray");
    };
    let order = match order {
        RAMPOOL_ORDER_C => Order::C,
        RAMPOOL_ORDER_FORTRAN => Order::Fortran,
        other => {
            return fail(
                RampoolStatus::Invalid,
                format_args!("rampool_layout_subarray: unknown order {other}"),
            );
        }
    };
    // SAFETY: the caller's promise.
    unsafe {
        made("rampool_layout_subarray", element, layout, |element| {
            element.subarray(sizes, subsizes, starts, order)
        })
    }
}

/// The same bytes with other bounds: lower bound `lower`, extent `extent`, in bytes.
///
/// # Safety
/// As rampool_layout_contiguous().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_resized(
    element: *const LayoutHandle,
    lower: i64,
    extent: i64,
    layout: *mut *mut LayoutHandle,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe { made("rampool_layout_resized", element, layout, |element| element.resized(lower, extent)) }
}

/// Bytes that a layout selects; 0 for null.
///
/// # Safety
/// `layout` is null or a layout that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_size(layout: *const LayoutHandle) -> u64 {
    // SAFETY: null or valid, as the caller promises.
    unsafe { layout.as_ref() }.map_or(0, |layout| layout.0.size())
}

/// Extent of a layout: bytes between repetitions; 0 for null.
///
/// # Safety
/// As rampool_layout_size().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_extent(layout: *const LayoutHandle) -> i64 {
    // SAFETY: null or valid, as the caller promises.
    unsafe { layout.as_ref() }.map_or(0, |layout| layout.0.extent())
}

/// The lower bound of a layout; 0 for null.
///
/// # Safety
/// As rampool_layout_size().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_lower(layout: *const LayoutHandle) -> i64 {
    // SAFETY: null or valid, as the caller promises.
    unsafe { layout.as_ref() }.map_or(0, |layout| layout.0.bounds().0)
}

/// Copies the bytes that a layout selects from `address` on to `packed`, contiguously: rampool_layout_size()
/// bytes. Null does nothing.
///
/// # Safety
/// `layout` is null or a layout that was not freed; the bytes it selects can be read; `packed` can be written
/// and does not overlap them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_pack(
    layout: *const LayoutHandle,
    address: *const c_void,
    packed: *mut c_void,
) {
    // SAFETY: null or valid, as the caller promises.
    let Some(layout) = (unsafe { layout.as_ref() }) else { return };
    let mut to = packed.cast::<u8>();
    for run in layout.0.program().runs() {
        let len = usize::try_from(run.len).expect("a 64-bit machine");
        let offset = isize::try_from(run.offset).expect("a 64-bit machine");
        // SAFETY: the caller vouches for the run, and `to` has room for the bytes of all runs.
        unsafe {
            std::ptr::copy_nonoverlapping(address.cast::<u8>().wrapping_offset(offset), to, len);
            to = to.add(len);
        }
    }
}

/// Frees a layout. Null does nothing.
///
/// # Safety
/// `layout` is null or a layout that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_layout_free(layout: *mut LayoutHandle) {
    if !layout.is_null() {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        drop(unsafe { Box::from_raw(layout) });
    }
}

/// Connects to the servers and leases memory there, for the direct view: bytes are read and changed at the
/// servers. The builder's options for paging are ignored. Blocks, for each server at most the option
/// "connect-deadline-ms". On success, close `*direct` with rampool_direct_close(); otherwise it is null.
///
/// # Safety
/// `builder` came from rampool_builder_new() and was not freed; `direct` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_open(
    builder: *const Builder,
    direct: *mut *mut DirectHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(builder), Some(out)) = (unsafe { (builder.as_ref(), direct.as_mut()) }) else {
        return null_pointer("rampool_direct_open");
    };
    *out = std::ptr::null_mut();
    match builder.0.open_direct() {
        Ok(direct) => {
            *out = Box::into_raw(Box::new(DirectHandle(direct)));
            RampoolStatus::Ok
        }
        Err(error) => fail(status_of(&error), error),
    }
}

/// Joins the lease of another client, by its ticket: the same regions and queues by the same names. The
/// builder gives key, encryption and deadlines; its servers are ignored.
///
/// # Safety
/// `builder` came from rampool_builder_new() and was not freed; `ticket` is null or ends with a zero byte;
/// `direct` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_join(
    builder: *const Builder,
    ticket: *const c_char,
    direct: *mut *mut DirectHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (builder, ticket, out) = unsafe { (builder.as_ref(), text(ticket), direct.as_mut()) };
    let (Some(builder), Some(ticket), Some(out)) = (builder, ticket, out) else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_direct_join: a null pointer, or a text that is not UTF-8",
        );
    };
    *out = std::ptr::null_mut();
    let ticket: LeaseTicket = match ticket.parse() {
        Ok(ticket) => ticket,
        Err(error) => return fail(RampoolStatus::Invalid, error),
    };
    match builder.0.join_direct(&ticket) {
        Ok(direct) => {
            *out = Box::into_raw(Box::new(DirectHandle(direct)));
            RampoolStatus::Ok
        }
        Err(error) => fail(status_of(&error), error),
    }
}

/// Writes the ticket of the client's lease to `buffer`, with a terminating zero byte. A program with the
/// ticket can join the lease: keep it as secret as a key. RAMPOOL_STATUS_NO_ROOM if it is longer than `size`
/// bytes; 4096 are enough for any 32 servers.
///
/// # Safety
/// `direct` came from rampool_direct_open() or _join() and was not closed; `buffer` is null or `size` bytes
/// can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_ticket(
    direct: *mut DirectHandle,
    buffer: *mut c_char,
    size: usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(direct) = (unsafe { direct.as_mut() }) else {
        return null_pointer("rampool_direct_ticket");
    };
    let ticket = direct.0.pool().lease_ticket().to_string();
    // SAFETY: as the caller promises.
    unsafe { write_text("rampool_direct_ticket", &ticket, buffer, size) }
}

/// Disconnects from the servers. Regions are freed when the lease's last member leaves. Null does nothing.
///
/// # Safety
/// `direct` is null or came from rampool_direct_open() and was not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_close(direct: *mut DirectHandle) {
    if !direct.is_null() {
        // SAFETY: made by `Box::into_raw`, and closed once, as the caller promises.
        unsafe { Box::from_raw(direct) }.0.close();
    }
}

/// Opens the region of this name, or creates one of `bytes` bytes, all zero. A null name creates one without
/// a name. With 0 bytes, the region must exist. On success, release `*region` with
/// rampool_direct_region_close() or rampool_direct_region_free(); otherwise it is null.
///
/// # Safety
/// `direct` came from rampool_direct_open() and was not closed; `name` is null or ends with a zero byte;
/// `region` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_open_region(
    direct: *mut DirectHandle,
    name: *const c_char,
    bytes: u64,
    region: *mut *mut DirectRegionHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(direct), Some(out)) = (unsafe { (direct.as_mut(), region.as_mut()) }) else {
        return null_pointer("rampool_direct_open_region");
    };
    *out = std::ptr::null_mut();
    // SAFETY: as above.
    let found = match (name.is_null(), unsafe { text(name) }) {
        (true, _) => direct.0.create(bytes),
        (false, None) => {
            return fail(RampoolStatus::Invalid, "rampool_direct_open_region: a name that is not UTF-8");
        }
        (false, Some(name)) if bytes == 0 => direct.0.open(name),
        (false, Some(name)) => direct.0.open_or_create(name, bytes),
    };
    match found {
        Ok(found) => {
            *out = Box::into_raw(Box::new(DirectRegionHandle(found)));
            RampoolStatus::Ok
        }
        Err(error) => failed(&error),
    }
}

/// Bytes of a region; 0 for null.
///
/// # Safety
/// `region` is null or came from rampool_direct_open_region() and was not closed or freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_region_bytes(region: *const DirectRegionHandle) -> u64 {
    // SAFETY: null or valid, as the caller promises.
    unsafe { region.as_ref() }.map_or(0, |region| region.0.bytes())
}

/// Frees the handle of a region; the region stays. Null does nothing.
///
/// # Safety
/// As rampool_direct_region_bytes().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_region_close(region: *mut DirectRegionHandle) {
    if !region.is_null() {
        // SAFETY: made by `Box::into_raw`, and given up once, as the caller promises.
        drop(unsafe { Box::from_raw(region) });
    }
}

/// Frees a region, for every member of the lease, and its handle. Null does nothing.
///
/// # Safety
/// `direct` came from rampool_direct_open() and was not closed; `region` as for
/// rampool_direct_region_bytes().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_region_free(
    direct: *mut DirectHandle,
    region: *mut DirectRegionHandle,
) {
    // SAFETY: null or valid, as the caller promises.
    if let (Some(direct), false) = (unsafe { direct.as_mut() }, region.is_null()) {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        direct.0.free(unsafe { Box::from_raw(region) }.0);
    }
}

/// Writes `bytes` bytes to the region, from `offset` on. Blocks until every server has them.
///
/// # Safety
/// `direct` came from rampool_direct_open() and was not closed; `region` came from
/// rampool_direct_open_region() of it and was not closed or freed; `from` has `bytes` bytes, which do not
/// change during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_put(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    from: *const c_void,
    bytes: u64,
) -> RampoolStatus {
    if from.is_null() && bytes > 0 {
        return null_pointer("rampool_direct_put");
    }
    let layout = Layout::bytes(bytes);
    // SAFETY: the caller's promise.
    unsafe {
        moved("rampool_direct_put", direct, region, layout, |direct, region, all| {
            direct.put_layout_at(region, offset, all, from.cast(), all)
        })
    }
}

/// Reads `bytes` bytes of the region, from `offset` on.
///
/// # Safety
/// As rampool_direct_put(); `to` has room for `bytes` bytes, which nothing else uses during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_get(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    to: *mut c_void,
    bytes: u64,
) -> RampoolStatus {
    if to.is_null() && bytes > 0 {
        return null_pointer("rampool_direct_get");
    }
    let layout = Layout::bytes(bytes);
    // SAFETY: the caller's promise.
    unsafe {
        moved("rampool_direct_get", direct, region, layout, |direct, region, all| {
            direct.get_layout_at(region, offset, all, to.cast(), all)
        })
    }
}

/// Writes the bytes that `here` selects from `address` on to those that `there` selects from `offset` of the
/// region on, in the layouts' order. Both select the same number of bytes.
///
/// # Safety
/// As rampool_direct_put(); `there` and `here` are layouts that were not freed; the bytes that `here` selects
/// can be read, and do not change during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_put_layout(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    there: *const LayoutHandle,
    address: *const c_void,
    here: *const LayoutHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(there), Some(here)) = (unsafe { (there.as_ref(), here.as_ref()) }) else {
        return null_pointer("rampool_direct_put_layout");
    };
    // SAFETY: the caller's promise.
    unsafe {
        moved("rampool_direct_put_layout", direct, region, Ok(here.0.clone()), |direct, region, here| {
            direct.put_layout_at(region, offset, &there.0, address.cast(), here)
        })
    }
}

/// Reads the bytes that `there` selects from `offset` of the region on into those that `here` selects from
/// `address` on. Both select the same number of bytes, and `here` selects none twice.
///
/// # Safety
/// As rampool_direct_put_layout(); the bytes that `here` selects can be written, and nothing else uses them
/// during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_get_layout(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    there: *const LayoutHandle,
    address: *mut c_void,
    here: *const LayoutHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(there), Some(here)) = (unsafe { (there.as_ref(), here.as_ref()) }) else {
        return null_pointer("rampool_direct_get_layout");
    };
    // SAFETY: the caller's promise.
    unsafe {
        moved("rampool_direct_get_layout", direct, region, Ok(here.0.clone()), |direct, region, here| {
            direct.get_layout_at(region, offset, &there.0, address.cast(), here)
        })
    }
}

/// Lets registrations of this memory be kept for sending without a copy.
///
/// Returns 1 if the kernel reports when the memory is unmapped, moved or dropped. Returns 0 if it cannot
/// (files, rampool's own regions, no userfaultfd): then call rampool_direct_forget() when that happens,
/// because until then puts from it send the old pages, whatever is mapped there.
///
/// # Safety
/// `direct` came from rampool_direct_open() and was not closed; the memory is mapped, and readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_keep(
    direct: *mut DirectHandle,
    address: *const c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: null or valid, and mapped memory, as the caller promises.
    let kept = unsafe { direct.as_mut().map(|direct| direct.0.keep_at(address.cast(), bytes)) };
    c_int::from(kept.is_none_or(|kept| kept == Kept::Watched))
}

/// Call this before or right after this memory is unmapped, freed, moved or dropped. For memory that was
/// never kept it does nothing.
///
/// # Safety
/// `direct` came from rampool_direct_open() and was not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_forget(
    direct: *mut DirectHandle,
    address: *const c_void,
    bytes: usize,
) {
    // SAFETY: null or valid, as the caller promises.
    if let Some(direct) = unsafe { direct.as_mut() } {
        direct.0.forget(address.cast(), bytes);
    }
}

/// # Safety
/// The handles are null or valid.
unsafe fn moved(
    call: &str,
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    layout: Result<Layout, LayoutError>,
    run: impl FnOnce(&mut Direct, DirectRegion, &Layout) -> Result<(), DirectError>,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    let (Some(direct), Some(region)) = (unsafe { (direct.as_mut(), region.as_ref()) }) else {
        return null_pointer(call);
    };
    match layout.map_err(DirectError::from).and_then(|layout| run(&mut direct.0, region.0, &layout)) {
        Ok(()) => RampoolStatus::Ok,
        Err(error) => failed(&error),
    }
}

pub(crate) fn failed(error: &DirectError) -> RampoolStatus {
    let status = match error {
        DirectError::Full { .. } => RampoolStatus::NoRoom,
        DirectError::Damaged { .. } | DirectError::Pool(_) => RampoolStatus::Server,
        _ => RampoolStatus::Invalid,
    };
    fail(status, error)
}
