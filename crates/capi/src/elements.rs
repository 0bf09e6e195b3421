//! Updates, filters, totals and copies of elements in the direct view, in C. Conversions around
//! [`runtime::direct`].

use std::ffi::c_void;

use runtime::direct::{Direct, DirectError, DirectRegion, Filter, Number, Total};
use runtime::proto::elements::{Combine, Kind, of_kind};
use runtime::proto::layout::Layout;

use crate::direct::{DirectHandle, DirectRegionHandle, LayoutHandle, failed};
use crate::{RampoolStatus, bytes_at, fail, null_pointer};

/// Kind of an element: little-endian, of 4 or 8 bytes, at a multiple of its length from the start of its
/// region.
pub const RAMPOOL_KIND_I32: u32 = 1;
pub const RAMPOOL_KIND_U32: u32 = 2;
pub const RAMPOOL_KIND_I64: u32 = 3;
pub const RAMPOOL_KIND_U64: u32 = 4;
pub const RAMPOOL_KIND_F32: u32 = 5;
pub const RAMPOOL_KIND_F64: u32 = 6;

/// How an operand changes an element. AND, OR and XOR are for integers; sums of integers wrap around.
pub const RAMPOOL_COMBINE_REPLACE: u32 = 1;
pub const RAMPOOL_COMBINE_SUM: u32 = 2;
pub const RAMPOOL_COMBINE_MIN: u32 = 3;
pub const RAMPOOL_COMBINE_MAX: u32 = 4;
pub const RAMPOOL_COMBINE_AND: u32 = 5;
pub const RAMPOOL_COMBINE_OR: u32 = 6;
pub const RAMPOOL_COMBINE_XOR: u32 = 7;

/// How elements of a column are tested. BETWEEN is from `low` to `high`, both included; the others compare
/// with `low`.
pub const RAMPOOL_TEST_ALL: u32 = 0;
pub const RAMPOOL_TEST_EQUAL: u32 = 1;
pub const RAMPOOL_TEST_NOT_EQUAL: u32 = 2;
pub const RAMPOOL_TEST_LESS: u32 = 3;
pub const RAMPOOL_TEST_LESS_OR_EQUAL: u32 = 4;
pub const RAMPOOL_TEST_GREATER: u32 = 5;
pub const RAMPOOL_TEST_GREATER_OR_EQUAL: u32 = 6;
pub const RAMPOOL_TEST_BETWEEN: u32 = 7;

/// Selects the elements of a column that pass a test against one or two numbers of the column's kind.
#[repr(C)]
pub struct RampoolFilter {
    /// RAMPOOL_TEST_....
    pub test: u32,
    /// Points to a number of the column's kind. May be null for RAMPOOL_TEST_ALL.
    pub low: *const c_void,
    /// Likewise, for RAMPOOL_TEST_BETWEEN; otherwise it may be null.
    pub high: *const c_void,
}

/// The sum of the selected elements of a column.
#[repr(C)]
pub struct RampoolTotal {
    /// Number of selected elements.
    pub count: u64,
    /// For integers: the exact sum is `high` * 2^64 + `low`. For floating-point numbers: 0.
    pub low: u64,
    pub high: i64,
    /// The sum as a floating-point number; for integers, rounded.
    pub real: f64,
}

impl RampoolTotal {
    pub(crate) fn new(count: u64, total: Total) -> Self {
        let bytes = if let Total::Integer(whole) = total { whole.to_le_bytes() } else { [0; 16] };
        let (low, high) = bytes.split_at(8);
        Self {
            count,
            low: u64::from_le_bytes(low.try_into().expect("eight bytes")),
            high: i64::from_le_bytes(high.try_into().expect("eight bytes")),
            real: match total {
                #[expect(clippy::cast_precision_loss, reason = "rounded, as documented")]
                Total::Integer(whole) => whole as f64,
                Total::Float(real) => real,
                _ => f64::NAN,
            },
        }
    }
}

/// The error for a filter that [`filter_of`] does not know.
pub(crate) fn bad_filter(call: &str) -> RampoolStatus {
    let why = "the filter has an unknown test, or lacks a number to compare with";
    fail(RampoolStatus::Invalid, format_args!("{call}: {why}"))
}

/// The error for an unknown kind or way to combine.
pub(crate) fn no_such(call: &str, kind: u32, combine: u32) -> RampoolStatus {
    fail(
        RampoolStatus::Invalid,
        format_args!("{call}: unknown kind {kind}, or unknown way {combine} to combine"),
    )
}

pub(crate) fn kind_of(kind: u32) -> Option<Kind> {
    Some(match kind {
        RAMPOOL_KIND_I32 => Kind::I32,
        RAMPOOL_KIND_U32 => Kind::U32,
        RAMPOOL_KIND_I64 => Kind::I64,
        RAMPOOL_KIND_U64 => Kind::U64,
        RAMPOOL_KIND_F32 => Kind::F32,
        RAMPOOL_KIND_F64 => Kind::F64,
        _ => return None,
    })
}

pub(crate) fn combine_of(combine: u32) -> Option<Combine> {
    Some(match combine {
        RAMPOOL_COMBINE_REPLACE => Combine::Replace,
        RAMPOOL_COMBINE_SUM => Combine::Sum,
        RAMPOOL_COMBINE_MIN => Combine::Min,
        RAMPOOL_COMBINE_MAX => Combine::Max,
        RAMPOOL_COMBINE_AND => Combine::And,
        RAMPOOL_COMBINE_OR => Combine::Or,
        RAMPOOL_COMBINE_XOR => Combine::Xor,
        _ => return None,
    })
}

/// # Safety
/// `from` points to a number of this kind.
unsafe fn load<T: Number>(from: *const c_void) -> T {
    let mut bits = [0; 8];
    // SAFETY: the caller's promise; a number has at most 8 bytes.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), bits.as_mut_ptr(), T::KIND.bytes()) };
    T::from_bits(u64::from_le_bytes(bits))
}

/// # Safety
/// A number of this kind can be written to `to`.
unsafe fn store<T: Number>(value: T, to: *mut c_void) {
    let bits = value.bits().to_le_bytes();
    // SAFETY: the caller's promise; a number has at most 8 bytes.
    unsafe { std::ptr::copy_nonoverlapping(bits.as_ptr(), to.cast::<u8>(), T::KIND.bytes()) };
}

/// `None` if the filter is invalid.
///
/// # Safety
/// `filter` is null or valid, and its numbers are null or of this kind.
pub(crate) unsafe fn filter_of<T: Number>(filter: *const RampoolFilter) -> Option<Filter<T>> {
    // SAFETY: the caller's promise.
    let Some(filter) = (unsafe { filter.as_ref() }) else { return Some(Filter::all()) };
    if filter.test == RAMPOOL_TEST_ALL {
        return Some(Filter::all());
    }
    if filter.low.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let low = unsafe { load(filter.low) };
    Some(match filter.test {
        RAMPOOL_TEST_EQUAL => Filter::equal(low),
        RAMPOOL_TEST_NOT_EQUAL => Filter::not_equal(low),
        RAMPOOL_TEST_LESS => Filter::less(low),
        RAMPOOL_TEST_LESS_OR_EQUAL => Filter::at_most(low),
        RAMPOOL_TEST_GREATER => Filter::greater(low),
        RAMPOOL_TEST_GREATER_OR_EQUAL => Filter::at_least(low),
        // SAFETY: the caller's promise.
        RAMPOOL_TEST_BETWEEN if !filter.high.is_null() => Filter::between(low, unsafe { load(filter.high) }),
        _ => return None,
    })
}

fn ended(result: Result<(), DirectError>) -> RampoolStatus {
    result.map_or_else(|error| failed(&error), |()| RampoolStatus::Ok)
}

/// Combines each element of this kind that `there` selects from `offset` of the region on with an operand, at
/// the servers: `element = combine(element, operand)`. `operands` has one operand for each element,
/// contiguously; an element that is selected twice is changed twice. Each change is atomic and happens
/// exactly once. Blocks until all are done.
///
/// # Safety
/// `direct` came from rampool_direct_open() or _join() and was not closed; `region` belongs to it; `there` is
/// a layout that was not freed; `operands` has rampool_layout_size(there) bytes, which do not change during
/// the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_accumulate(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    there: *const LayoutHandle,
    kind: u32,
    combine: u32,
    operands: *const c_void,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, region, there) = unsafe { (direct.as_mut(), region.as_ref(), there.as_ref()) };
    let (Some(direct), Some(region), Some(there)) = (direct, region, there) else {
        return null_pointer("rampool_direct_accumulate");
    };
    if operands.is_null() && there.0.size() > 0 {
        return null_pointer("rampool_direct_accumulate");
    }
    let (Some(kind), Some(how)) = (kind_of(kind), combine_of(combine)) else {
        return no_such("rampool_direct_accumulate", kind, combine);
    };
    // Check before reading the operands: a layout may select more than any region has.
    if let Err(error) = there.0.placed(offset, region.0.bytes()) {
        return failed(&error.into());
    }
    let bytes = usize::try_from(there.0.size()).expect("a 64-bit machine");
    // SAFETY: as many bytes as the caller promises.
    let operands = unsafe { bytes_at(operands, bytes) }.to_vec();
    let started = direct.0.start_accumulate(region.0, offset, &there.0, kind, how, operands);
    ended(started.and_then(|pending| direct.0.wait(pending).map(drop)))
}

struct Update {
    call: &'static str,
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    how: How,
    operand: *const c_void,
    old: *mut c_void,
}

/// How an element changes.
enum How {
    /// To the operand, if it equals this number.
    IfEqual(*const c_void),
    Combine(Combine),
}

impl Update {
    fn run<T: Number>(self) -> RampoolStatus {
        // SAFETY: null or valid, as the caller of the C function promises.
        let (Some(direct), Some(region)) = (unsafe { (self.direct.as_mut(), self.region.as_ref()) }) else {
            return null_pointer(self.call);
        };
        // SAFETY: likewise; the caller of this has checked for null.
        let operand = unsafe { load::<T>(self.operand) };
        let updated = match self.how {
            How::IfEqual(expected) => {
                // SAFETY: likewise.
                let expected = unsafe { load::<T>(expected) };
                direct.0.compare_exchange(region.0, self.offset, expected, operand)
            }
            How::Combine(how) => direct.0.fetch_op(region.0, self.offset, how, operand),
        };
        match updated {
            Ok(old) => {
                if !self.old.is_null() {
                    // SAFETY: likewise.
                    unsafe { store(old, self.old) };
                }
                RampoolStatus::Ok
            }
            Err(error) => failed(&error),
        }
    }
}

/// Combines one element of this kind with an operand, and stores its previous value in `*old` unless that is
/// null. Atomic, and exactly once: with RAMPOOL_COMBINE_SUM it is fetch-and-add. Blocks until the server has
/// answered.
///
/// # Safety
/// `direct` and `region` as for rampool_direct_accumulate(); `operand` points to a number of this kind, and
/// one can be written to `old` if that is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_fetch_op(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    kind: u32,
    combine: u32,
    operand: *const c_void,
    old: *mut c_void,
) -> RampoolStatus {
    let (Some(kind), Some(how), false) = (kind_of(kind), combine_of(combine), operand.is_null()) else {
        return fail(
            RampoolStatus::Invalid,
            format_args!(
                "rampool_direct_fetch_op: a null pointer, unknown kind {kind}, or unknown way {combine} to \
                 combine"
            ),
        );
    };
    let call = "rampool_direct_fetch_op";
    let update = Update { call, direct, region, offset, how: How::Combine(how), operand, old };
    of_kind!(kind, T, update.run::<T>())
}

/// Writes `*desired` to one element of this kind if it equals `*expected` bit by bit, and stores its previous
/// value in `*old`. The write happened if `*old` equals `*expected`. Atomic, and exactly once. Blocks until
/// the server has answered.
///
/// # Safety
/// As rampool_direct_fetch_op(); `expected` and `desired` point to numbers of this kind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_compare_exchange(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    kind: u32,
    expected: *const c_void,
    desired: *const c_void,
    old: *mut c_void,
) -> RampoolStatus {
    let (Some(kind), false, false) = (kind_of(kind), expected.is_null(), desired.is_null()) else {
        return fail(
            RampoolStatus::Invalid,
            format_args!("rampool_direct_compare_exchange: a null pointer, or unknown kind {kind}"),
        );
    };
    let call = "rampool_direct_compare_exchange";
    let update = Update { call, direct, region, offset, how: How::IfEqual(expected), operand: desired, old };
    of_kind!(kind, T, update.run::<T>())
}

/// A column, and the operation on it.
struct Column<'a, F> {
    call: &'static str,
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    column: *const LayoutHandle,
    filter: *const RampoolFilter,
    want: &'a mut F,
}

/// The operation on a column of any kind.
trait Want {
    fn of<T: Number>(
        &mut self,
        direct: &mut Direct,
        region: DirectRegion,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<(), DirectError>;
}

impl<F: Want> Column<'_, F> {
    fn run<T: Number>(self) -> RampoolStatus {
        // SAFETY: null or valid, as the caller of the C function promises.
        let (direct, region, column) =
            unsafe { (self.direct.as_mut(), self.region.as_ref(), self.column.as_ref()) };
        let (Some(direct), Some(region), Some(column)) = (direct, region, column) else {
            return null_pointer(self.call);
        };
        // SAFETY: likewise.
        let Some(filter) = (unsafe { filter_of::<T>(self.filter) }) else {
            return bad_filter(self.call);
        };
        ended(self.want.of(&mut direct.0, region.0, &column.0, filter))
    }
}

/// # Safety
/// Handles and filter are null or valid.
unsafe fn scanned(
    call: &'static str,
    (direct, region, column): (*mut DirectHandle, *const DirectRegionHandle, *const LayoutHandle),
    kind: u32,
    filter: *const RampoolFilter,
    want: &mut impl Want,
) -> RampoolStatus {
    match kind_of(kind) {
        Some(kind) => {
            let column = Column { call, direct, region, column, filter, want };
            of_kind!(kind, T, column.run::<T>())
        }
        None => fail(RampoolStatus::Invalid, format_args!("{call}: unknown kind {kind}")),
    }
}

struct Sum {
    offset: u64,
    total: RampoolTotal,
}

impl Want for Sum {
    fn of<T: Number>(
        &mut self,
        direct: &mut Direct,
        region: DirectRegion,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<(), DirectError> {
        let (count, total) = direct.sum(region, self.offset, column, filter)?;
        self.total = RampoolTotal::new(count, total);
        Ok(())
    }
}

/// Counts and sums the selected elements of a column. The servers add up, and only the results travel. The
/// column is what `column` selects from `offset` of the region on, elements of this kind. Blocks until all
/// servers have answered.
///
/// # Safety
/// `direct` and `region` as for rampool_direct_accumulate(); `column` is a layout that was not freed;
/// `filter` is null (all elements) or valid; `total` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_sum(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    column: *const LayoutHandle,
    kind: u32,
    filter: *const RampoolFilter,
    total: *mut RampoolTotal,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(out) = (unsafe { total.as_mut() }) else { return null_pointer("rampool_direct_sum") };
    let mut sum = Sum { offset, total: RampoolTotal { count: 0, low: 0, high: 0, real: 0.0 } };
    // SAFETY: the caller's promise.
    let status = unsafe { scanned("rampool_direct_sum", (direct, region, column), kind, filter, &mut sum) };
    *out = sum.total;
    status
}

struct Extreme {
    offset: u64,
    greatest: bool,
    value: *mut c_void,
    found: bool,
}

impl Want for Extreme {
    fn of<T: Number>(
        &mut self,
        direct: &mut Direct,
        region: DirectRegion,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<(), DirectError> {
        let value = if self.greatest {
            direct.max(region, self.offset, column, filter)?
        } else {
            direct.min(region, self.offset, column, filter)?
        };
        self.found = value.is_some();
        if let Some(value) = value {
            // SAFETY: a number of this kind can be written there, as the caller of the C function promises.
            unsafe { store(value, self.value) };
        }
        Ok(())
    }
}

/// # Safety
/// As rampool_direct_min().
unsafe fn extreme(
    call: &'static str,
    (direct, region, column): (*mut DirectHandle, *const DirectRegionHandle, *const LayoutHandle),
    offset: u64,
    (kind, filter): (u32, *const RampoolFilter),
    (value, found): (*mut c_void, *mut bool),
    greatest: bool,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(out), false) = (unsafe { found.as_mut() }, value.is_null()) else {
        return null_pointer(call);
    };
    let mut want = Extreme { offset, greatest, value, found: false };
    // SAFETY: the caller's promise.
    let status = unsafe { scanned(call, (direct, region, column), kind, filter, &mut want) };
    *out = want.found;
    status
}

/// Stores the least of the selected elements of a column in `*value`; `*found` is false if none is selected.
/// NaNs are skipped.
///
/// # Safety
/// As rampool_direct_sum(); a number of this kind can be written to `value`; `found` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_min(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    column: *const LayoutHandle,
    kind: u32,
    filter: *const RampoolFilter,
    value: *mut c_void,
    found: *mut bool,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe {
        extreme("rampool_direct_min", (direct, region, column), offset, (kind, filter), (value, found), false)
    }
}

/// Stores the greatest of the selected elements of a column in `*value`; `*found` is false if none is
/// selected.
///
/// # Safety
/// As rampool_direct_min().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_max(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    column: *const LayoutHandle,
    kind: u32,
    filter: *const RampoolFilter,
    value: *mut c_void,
    found: *mut bool,
) -> RampoolStatus {
    // SAFETY: the caller's promise.
    unsafe {
        extreme("rampool_direct_max", (direct, region, column), offset, (kind, filter), (value, found), true)
    }
}

struct Select {
    offset: u64,
    /// Where positions or values go.
    to: Result<*mut u64, *mut c_void>,
    room: usize,
    count: u64,
}

impl Want for Select {
    fn of<T: Number>(
        &mut self,
        direct: &mut Direct,
        region: DirectRegion,
        column: &Layout,
        filter: Filter<T>,
    ) -> Result<(), DirectError> {
        match self.to {
            Ok(positions) => {
                let found = direct.select(region, self.offset, column, filter)?;
                self.count = found.len() as u64;
                // SAFETY: there is room for as many, as the caller of the C function promises.
                unsafe {
                    std::ptr::copy_nonoverlapping(found.as_ptr(), positions, found.len().min(self.room))
                };
            }
            Err(values) => {
                let found = direct.select_values(region, self.offset, column, filter)?;
                self.count = found.len() as u64;
                for (n, value) in found.into_iter().take(self.room).enumerate() {
                    // SAFETY: likewise.
                    unsafe { store(value, values.cast::<u8>().add(n * T::KIND.bytes()).cast()) };
                }
            }
        }
        Ok(())
    }
}

/// Writes the positions of the selected elements among the elements of the column, in order: the first `room`
/// of them. `*count` is the number of selected elements; if it is more than `room`, the call succeeds and the
/// rest is not written.
///
/// # Safety
/// As rampool_direct_sum(); `positions` has room for `room` items, and is not null unless `room` is 0;
/// `count` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_select(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    column: *const LayoutHandle,
    kind: u32,
    filter: *const RampoolFilter,
    positions: *mut u64,
    room: usize,
    count: *mut u64,
) -> RampoolStatus {
    let to = if room == 0 { std::ptr::NonNull::dangling().as_ptr() } else { positions };
    // SAFETY: the caller's promise.
    unsafe {
        selected(
            "rampool_direct_select",
            (direct, region, column),
            (kind, filter),
            Select { offset, to: Ok(to), room, count: 0 },
            count,
        )
    }
}

/// Writes the values of the selected elements of a column, in no particular order. `room` and `*count` as for
/// rampool_direct_select().
///
/// # Safety
/// As rampool_direct_select(); `values` has room for `room` numbers of this kind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_select_values(
    direct: *mut DirectHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    column: *const LayoutHandle,
    kind: u32,
    filter: *const RampoolFilter,
    values: *mut c_void,
    room: usize,
    count: *mut u64,
) -> RampoolStatus {
    let to = if room == 0 { std::ptr::NonNull::<u64>::dangling().as_ptr().cast() } else { values };
    // SAFETY: the caller's promise.
    unsafe {
        selected(
            "rampool_direct_select_values",
            (direct, region, column),
            (kind, filter),
            Select { offset, to: Err(to), room, count: 0 },
            count,
        )
    }
}

/// # Safety
/// As rampool_direct_select().
unsafe fn selected(
    call: &'static str,
    handles: (*mut DirectHandle, *const DirectRegionHandle, *const LayoutHandle),
    (kind, filter): (u32, *const RampoolFilter),
    mut want: Select,
    count: *mut u64,
) -> RampoolStatus {
    let to_null = want.to.map_or_else(|values| values.is_null(), |positions| positions.is_null());
    // SAFETY: null or valid, as the caller promises.
    let (Some(out), false) = (unsafe { count.as_mut() }, to_null) else {
        return null_pointer(call);
    };
    // SAFETY: the caller's promise.
    let status = unsafe { scanned(call, handles, kind, filter, &mut want) };
    *out = want.count;
    status
}

/// Copies the bytes that `source` selects from `from_offset` of one region on to those that `target` selects
/// from `to_offset` of another, or the same, in the layouts' order. The bytes go from server to server, not
/// through this process. Both select the same number of bytes, `target` selects none twice, and the two do
/// not overlap. Exactly once; blocks until it is done. It is not ordered with other operations: those that
/// must come before it must have ended.
///
/// # Safety
/// `direct`, `from` and `to` as for rampool_direct_accumulate(); `source` and `target` are layouts that were
/// not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_direct_copy(
    direct: *mut DirectHandle,
    from: *const DirectRegionHandle,
    from_offset: u64,
    source: *const LayoutHandle,
    to: *const DirectRegionHandle,
    to_offset: u64,
    target: *const LayoutHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, from, source, to, target) =
        unsafe { (direct.as_mut(), from.as_ref(), source.as_ref(), to.as_ref(), target.as_ref()) };
    let (Some(direct), Some(from), Some(source), Some(to), Some(target)) = (direct, from, source, to, target)
    else {
        return null_pointer("rampool_direct_copy");
    };
    ended(direct.0.copy((from.0, from_offset, &source.0), (to.0, to_offset, &target.0)))
}
