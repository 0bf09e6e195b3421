//! Totals of a column for each key in another, in C. Conversions around [`runtime::direct::Direct::group`].

use runtime::direct::{self, Direct, DirectError, Key, Number};
use runtime::proto::elements::{Kind, of_kind};

use crate::direct::{DirectHandle, DirectRegionHandle, LayoutHandle, failed};
use crate::elements::{RampoolFilter, RampoolTotal, bad_filter, filter_of, kind_of};
use crate::{RampoolStatus, fail, null_pointer};

/// A column of numbers: what `layout` selects from `offset` of the region on.
#[repr(C)]
pub struct RampoolColumn {
    pub region: *const DirectRegionHandle,
    pub offset: u64,
    pub layout: *const LayoutHandle,
    /// RAMPOOL_KIND_....
    pub kind: u32,
}

/// A number of a column's kind.
#[repr(C)]
#[derive(Clone, Copy)]
pub union RampoolNumber {
    pub i32: i32,
    pub u32: u32,
    pub i64: i64,
    pub u64: u64,
    pub f32: f32,
    pub f64: f64,
}

/// A key, and what the elements that have it and are selected come to. NaNs are no least or greatest where
/// there is another.
#[repr(C)]
pub struct RampoolGroup {
    pub key: RampoolNumber,
    pub total: RampoolTotal,
    pub least: RampoolNumber,
    pub greatest: RampoolNumber,
}

/// Where the groups go.
struct Room {
    groups: *mut RampoolGroup,
    room: usize,
}

fn number<T: Number>(value: T) -> RampoolNumber {
    RampoolNumber { u64: value.bits() }
}

/// # Safety
/// The column is valid: its region and layout are null or were not freed.
unsafe fn column(column: &RampoolColumn) -> Option<direct::Column<'_>> {
    // SAFETY: null or valid, as the caller promises.
    let (region, layout) = unsafe { (column.region.as_ref()?, column.layout.as_ref()?) };
    Some((region.0, column.offset, &layout.0))
}

/// # Safety
/// The filter is null or valid, with numbers of the column's kind; there is room for as many groups.
unsafe fn grouped<K: Key, T: Number>(
    direct: &mut Direct,
    keys: direct::Column<'_>,
    elements: direct::Column<'_>,
    filter: *const RampoolFilter,
    to: &Room,
) -> Result<u64, Option<DirectError>> {
    // SAFETY: the caller's promise.
    let filter = unsafe { filter_of::<T>(filter) }.ok_or(None)?;
    let found = direct.group::<K, T>(keys, elements, filter).map_err(Some)?;
    for (n, group) in found.iter().take(to.room).enumerate() {
        let group = RampoolGroup {
            key: number(group.key),
            total: RampoolTotal::new(group.count, group.sum),
            least: number(group.min),
            greatest: number(group.max),
        };
        // SAFETY: the caller's promise.
        unsafe { to.groups.add(n).write(group) };
    }
    Ok(found.len() as u64)
}

/// Counts and sums the selected elements of a column for each key, and finds their least and greatest: the
/// elements of `keys`, integers, say to which group each element of `column` belongs, and are as many. The
/// filter is of the elements. The servers add up. Writes the first `room` groups, by ascending keys; `*count`
/// is the number of all; if it is more than `room`, the call succeeds and the rest is not written. More than
/// 2^20 different keys are refused. Blocks until all servers have answered. A change of keys that was started
/// in another region than the column's must have ended.
///
/// # Safety
/// `direct` as for rampool_direct_accumulate(); `keys` and `column` are null or valid, with regions that
/// belong to it and layouts that were not freed; `filter` is null (all elements) or valid; `groups` has room
/// for `room` items, and is not null unless `room` is 0; `count` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_group(
    direct: *mut DirectHandle,
    keys: *const RampoolColumn,
    column: *const RampoolColumn,
    filter: *const RampoolFilter,
    groups: *mut RampoolGroup,
    room: usize,
    count: *mut u64,
) -> RampoolStatus {
    const CALL: &str = "rampool_direct_group";
    // SAFETY: null or valid, as the caller promises.
    let given = unsafe { (direct.as_mut(), keys.as_ref(), column.as_ref(), count.as_mut()) };
    let (Some(direct), Some(keys), Some(elements), Some(count)) = given else { return null_pointer(CALL) };
    // SAFETY: likewise.
    let (Some(by), Some(of)) = (unsafe { (self::column(keys), self::column(elements)) }) else {
        return null_pointer(CALL);
    };
    if groups.is_null() && room > 0 {
        return null_pointer(CALL);
    }
    let (Some(key), Some(kind)) = (kind_of(keys.kind), kind_of(elements.kind)) else {
        let kinds = (keys.kind, elements.kind);
        return fail(RampoolStatus::Invalid, format_args!("{CALL}: unknown kind {} or {}", kinds.0, kinds.1));
    };
    let (to, direct) = (Room { groups, room }, &mut direct.0);
    // SAFETY: the caller's promise.
    let found = of_kind!(kind, T, unsafe {
        match key {
            Kind::I32 => grouped::<i32, T>(direct, by, of, filter, &to),
            Kind::U32 => grouped::<u32, T>(direct, by, of, filter, &to),
            Kind::I64 => grouped::<i64, T>(direct, by, of, filter, &to),
            Kind::U64 => grouped::<u64, T>(direct, by, of, filter, &to),
            Kind::F32 | Kind::F64 => {
                return fail(RampoolStatus::Invalid, format_args!("{CALL}: keys are integers"));
            }
        }
    });
    match found {
        Ok(all) => {
            *count = all;
            RampoolStatus::Ok
        }
        Err(Some(error)) => failed(&error),
        Err(None) => bad_filter(CALL),
    }
}
