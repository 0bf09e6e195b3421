//! Computation of a memory server on the bytes it holds: updates of elements, and filters and reductions over
//! a column of them.
//!
//! The first steps of near-memory compute (DIMMnet-3): an update travels as its operand, a scan as its
//! result. Elements are little-endian, of 4 or 8 bytes. Sums of integers are exact: updates wrap around, as
//! machine arithmetic does; reductions add up in 128 bits. NaNs match no condition but "not equal". A
//! reduction to the minimum or maximum skips them; in an update they stay, as in IEEE 754-2019's minimum.
//!
//! This module never sees where the bytes lie.

mod groups;

pub use groups::{GROUP_BYTES, Group, Groups, MAX_GROUPED};

/// The type of an element.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    I32 = 1,
    U32 = 2,
    I64 = 3,
    U64 = 4,
    F32 = 5,
    F64 = 6,
}

/// How an operand changes an element.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Combine {
    /// The element becomes the operand.
    Replace = 1,
    Sum = 2,
    Min = 3,
    Max = 4,
    /// For integers only, like the next two.
    And = 5,
    Or = 6,
    Xor = 7,
}

crate::listed! {
    /// Which elements match.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u8)]
    pub enum Test {
        All = 0,
        Equal = 1,
        NotEqual = 2,
        Less = 3,
        LessOrEqual = 4,
        Greater = 5,
        GreaterOrEqual = 6,
        /// From the first operand to the second, both included.
        Between = 7,
    }
}

/// The result of a scan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Want {
    Count = 1,
    Sum = 2,
    Min = 3,
    Max = 4,
    /// The positions of the matching elements.
    Positions = 5,
    /// The matching elements themselves.
    Values = 6,
}

impl Kind {
    pub const ALL: [Self; 6] = [Self::I32, Self::U32, Self::I64, Self::U64, Self::F32, Self::F64];

    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

impl Combine {
    pub const ALL: [Self; 7] =
        [Self::Replace, Self::Sum, Self::Min, Self::Max, Self::And, Self::Or, Self::Xor];

    /// Whether this change exists for this type.
    #[must_use]
    pub fn fits(self, kind: Kind) -> bool {
        !(kind.is_float() && matches!(self, Self::And | Self::Or | Self::Xor))
    }
}

impl Want {
    pub const ALL: [Self; 6] = [Self::Count, Self::Sum, Self::Min, Self::Max, Self::Positions, Self::Values];
}

/// Runs a block with `$type` being the Rust type of a [`Kind`](elements::Kind).
#[macro_export]
macro_rules! of_kind {
    ($kind:expr, $type:ident, $body:expr) => {
        match $kind {
            $crate::elements::Kind::I32 => {
                type $type = i32;
                $body
            }
            $crate::elements::Kind::U32 => {
                type $type = u32;
                $body
            }
            $crate::elements::Kind::I64 => {
                type $type = i64;
                $body
            }
            $crate::elements::Kind::U64 => {
                type $type = u64;
                $body
            }
            $crate::elements::Kind::F32 => {
                type $type = f32;
                $body
            }
            $crate::elements::Kind::F64 => {
                type $type = f64;
                $body
            }
        }
    };
}
pub use crate::of_kind;

/// A machine number.
trait Element: Copy + PartialOrd {
    const BYTES: usize;
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    fn combine(self, operand: Self, combine: Combine) -> Self;
    fn add_to(self, sum: &mut Sum);
    /// NaN.
    fn is_none(self) -> bool;
}

fn passes<T: Element>(test: Test, value: T, low: T, high: T) -> bool {
    match test {
        Test::All => true,
        Test::Equal => value == low,
        Test::NotEqual => value != low,
        Test::Less => value < low,
        Test::LessOrEqual => value <= low,
        Test::Greater => value > low,
        Test::GreaterOrEqual => value >= low,
        Test::Between => value >= low && value <= high,
    }
}

/// A running sum.
#[derive(Clone, Copy, Default)]
struct Sum {
    whole: i128,
    float: f64,
}

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Element for $type {
            const BYTES: usize = size_of::<Self>();
            fn read(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes[..Self::BYTES].try_into().expect("as long as an element"))
            }
            fn write(self, bytes: &mut [u8]) {
                bytes[..Self::BYTES].copy_from_slice(&self.to_le_bytes());
            }
            fn combine(self, operand: Self, combine: Combine) -> Self {
                match combine {
                    Combine::Replace => operand,
                    Combine::Sum => self.wrapping_add(operand),
                    Combine::Min => self.min(operand),
                    Combine::Max => self.max(operand),
                    Combine::And => self & operand,
                    Combine::Or => self | operand,
                    Combine::Xor => self ^ operand,
                }
            }
            fn add_to(self, sum: &mut Sum) {
                sum.whole = sum.whole.wrapping_add(self.into());
            }
            fn is_none(self) -> bool {
                false
            }
        }
    )*};
}

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Element for $type {
            const BYTES: usize = size_of::<Self>();
            fn read(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes[..Self::BYTES].try_into().expect("as long as an element"))
            }
            fn write(self, bytes: &mut [u8]) {
                bytes[..Self::BYTES].copy_from_slice(&self.to_le_bytes());
            }
            fn combine(self, operand: Self, combine: Combine) -> Self {
                match combine {
                    Combine::Sum => self + operand,
                    // What is no number stays, on whichever side it is.
                    Combine::Min if self <= operand || self.is_nan() => self,
                    Combine::Max if self >= operand || self.is_nan() => self,
                    _ => operand,
                }
            }
            fn add_to(self, sum: &mut Sum) {
                sum.float += f64::from(self);
            }
            fn is_none(self) -> bool {
                self.is_nan()
            }
        }
    )*};
}

integer!(i32, u32, i64, u64);
float!(f32, f64);

/// Changes the elements of `target` by those of `operands`, one by one.
///
/// # Panics
/// If the two differ in length, or it is no multiple of an element's.
pub fn combine(kind: Kind, how: Combine, target: &mut [u8], operands: &[u8]) {
    fn all<T: Element>(how: Combine, target: &mut [u8], operands: &[u8]) {
        for (target, operand) in target.chunks_exact_mut(T::BYTES).zip(operands.chunks_exact(T::BYTES)) {
            T::read(target).combine(T::read(operand), how).write(target);
        }
    }
    assert!(target.len() == operands.len() && target.len().is_multiple_of(kind.bytes()), "whole elements");
    of_kind!(kind, T, all::<T>(how, target, operands));
}

/// The result of a scan, or of a part of one.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Reduced {
    /// Matching elements.
    pub count: u64,
    /// For `Sum`: the number, in 128 bits, or the bits of an `f64`. For `Min` and `Max`: the element's bits,
    /// if any matched.
    pub value: [u8; 16],
}

/// A scan under way.
#[derive(Clone, Debug)]
pub struct Scan {
    kind: Kind,
    test: Test,
    want: Want,
    low: [u8; 8],
    high: [u8; 8],
    position: u32,
    reduced: Reduced,
}

impl Scan {
    /// `low` and `high`: the operands of the test, in the first bytes.
    #[must_use]
    pub fn new(kind: Kind, test: Test, want: Want, low: [u8; 8], high: [u8; 8]) -> Self {
        Self { kind, test, want, low, high, position: 0, reduced: Reduced::default() }
    }

    /// The next elements; positions or values are appended to `out`.
    ///
    /// # Panics
    /// If these are not whole elements.
    pub fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        assert!(bytes.len().is_multiple_of(self.kind.bytes()), "whole elements");
        of_kind!(self.kind, T, self.feed_of::<T>(bytes, out));
    }

    #[must_use]
    pub fn reduced(&self) -> Reduced {
        self.reduced
    }

    /// Joins the results of two parts of a scan.
    #[must_use]
    pub fn join(kind: Kind, want: Want, a: Reduced, b: Reduced) -> Reduced {
        fn pick<T: Element>(want: Want, a: [u8; 16], b: [u8; 16]) -> [u8; 16] {
            let how = if want == Want::Min { Combine::Min } else { Combine::Max };
            let mut value = [0; 16];
            T::read(&a).combine(T::read(&b), how).write(&mut value);
            value
        }
        let value = match want {
            Want::Sum if kind.is_float() => {
                let mut value = [0; 16];
                (f64::read(&a.value) + f64::read(&b.value)).write(&mut value);
                value
            }
            Want::Sum => {
                i128::from_le_bytes(a.value).wrapping_add(i128::from_le_bytes(b.value)).to_le_bytes()
            }
            Want::Min | Want::Max if a.count == 0 => b.value,
            Want::Min | Want::Max if b.count == 0 => a.value,
            Want::Min | Want::Max => of_kind!(kind, T, pick::<T>(want, a.value, b.value)),
            Want::Count | Want::Positions | Want::Values => [0; 16],
        };
        Reduced { count: a.count + b.count, value }
    }

    fn feed_of<T: Element>(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let (low, high) = (T::read(&self.low), T::read(&self.high));
        let mut sum =
            Sum { whole: i128::from_le_bytes(self.reduced.value), float: f64::read(&self.reduced.value) };
        let mut best = T::read(&self.reduced.value);
        for chunk in bytes.chunks_exact(T::BYTES) {
            let value = T::read(chunk);
            let position = self.position;
            self.position += 1;
            if !passes(self.test, value, low, high) {
                continue;
            }
            match self.want {
                Want::Count => {}
                Want::Sum => value.add_to(&mut sum),
                Want::Min | Want::Max if value.is_none() => continue,
                Want::Min if self.reduced.count == 0 || value < best => best = value,
                Want::Max if self.reduced.count == 0 || value > best => best = value,
                Want::Min | Want::Max => {}
                Want::Positions => out.extend_from_slice(&position.to_le_bytes()),
                Want::Values => out.extend_from_slice(chunk),
            }
            self.reduced.count += 1;
        }
        match self.want {
            Want::Sum if self.kind.is_float() => sum.float.write(&mut self.reduced.value),
            Want::Sum => self.reduced.value = sum.whole.to_le_bytes(),
            Want::Min | Want::Max if self.reduced.count > 0 => best.write(&mut self.reduced.value),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_scan_in_parts_is_the_scan_of_all(
            values in prop::collection::vec(-50..50i64, 0..60),
            cut in 0..60usize,
            low in -60..60i64,
            span in 0..60i64,
            (test, want) in (0..8usize, 0..6usize).prop_map(|(t, w)| (Test::ALL[t], Want::ALL[w])),
        ) {
            let high = low + span;
            let counts = |v: i64| match test {
                Test::All => true,
                Test::Equal => v == low,
                Test::NotEqual => v != low,
                Test::Less => v < low,
                Test::LessOrEqual => v <= low,
                Test::Greater => v > low,
                Test::GreaterOrEqual => v >= low,
                Test::Between => (low..=high).contains(&v),
            };
            let matching: Vec<i64> = values.iter().copied().filter(|v| counts(*v)).collect();
            let (first, second) = values.split_at(cut.min(values.len()));
            let bytes = |values: &[i64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
            let mut out = Vec::new();
            let new = || Scan::new(Kind::I64, test, want, low.to_le_bytes(), high.to_le_bytes());
            // As one scan fed twice, and as two that are joined.
            let mut whole = new();
            whole.feed(&bytes(first), &mut out);
            whole.feed(&bytes(second), &mut out);
            let part = |values| {
                let mut scan = new();
                scan.feed(&bytes(values), &mut Vec::new());
                scan.reduced()
            };
            let joined = Scan::join(Kind::I64, want, part(first), part(second));
            prop_assert_eq!(joined, whole.reduced());
            prop_assert_eq!(joined.count, matching.len() as u64);
            match want {
                Want::Count => prop_assert!(out.is_empty()),
                Want::Sum => prop_assert_eq!(
                    i128::from_le_bytes(joined.value),
                    matching.iter().map(|v| i128::from(*v)).sum::<i128>()
                ),
                Want::Min => {
                    prop_assert_eq!(i64::read(&joined.value), matching.iter().copied().min().unwrap_or(0))
                }
                Want::Max => {
                    prop_assert_eq!(i64::read(&joined.value), matching.iter().copied().max().unwrap_or(0))
                }
                Want::Values => prop_assert_eq!(out, bytes(&matching)),
                Want::Positions => {
                    let positions: Vec<u8> = (0u32..)
                        .zip(&values)
                        .filter(|(_, v)| counts(**v))
                        .flat_map(|(n, _)| n.to_le_bytes())
                        .collect();
                    prop_assert_eq!(out, positions);
                }
            }
        }
    }

    #[test]
    fn every_kind_is_combined_in_its_own_arithmetic() {
        fn one<const N: usize>(kind: Kind, how: Combine, target: [u8; N], operand: [u8; N]) -> [u8; N] {
            let mut target = target;
            combine(kind, how, &mut target, &operand);
            target
        }
        let (a, b) = (-5i32, 3i32);
        assert_eq!(i32::from_le_bytes(one(Kind::I32, Combine::Min, a.to_le_bytes(), b.to_le_bytes())), -5);
        assert_eq!(u32::from_le_bytes(one(Kind::U32, Combine::Min, a.to_le_bytes(), b.to_le_bytes())), 3);
        assert_eq!(
            u64::from_le_bytes(one(Kind::U64, Combine::Sum, u64::MAX.to_le_bytes(), 2u64.to_le_bytes())),
            1
        );
        assert_eq!(
            i64::from_le_bytes(one(Kind::I64, Combine::Xor, 6i64.to_le_bytes(), 3i64.to_le_bytes())),
            5
        );
        assert_eq!(
            i64::from_le_bytes(one(Kind::I64, Combine::And, 6i64.to_le_bytes(), 3i64.to_le_bytes())),
            2
        );
        assert_eq!(
            i64::from_le_bytes(one(Kind::I64, Combine::Or, 6i64.to_le_bytes(), 3i64.to_le_bytes())),
            7
        );
        assert_eq!(
            i64::from_le_bytes(one(Kind::I64, Combine::Replace, 6i64.to_le_bytes(), 3i64.to_le_bytes())),
            3
        );
        assert_eq!(
            f32::from_le_bytes(one(Kind::F32, Combine::Sum, 1.5f32.to_le_bytes(), 2.25f32.to_le_bytes())),
            3.75
        );
        assert_eq!(
            f64::from_le_bytes(one(
                Kind::F64,
                Combine::Max,
                (-1.5f64).to_le_bytes(),
                (-2.0f64).to_le_bytes()
            )),
            -1.5
        );
        assert!(
            !Combine::Xor.fits(Kind::F64) && Combine::Xor.fits(Kind::I64) && Combine::Sum.fits(Kind::F32)
        );
    }

    #[test]
    fn what_is_no_number_is_never_the_least() {
        let values = [f64::NAN, 2.0, f64::NAN, 1.0];
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let scan = |test, want| {
            let mut scan = Scan::new(Kind::F64, test, want, 1.5f64.to_le_bytes(), [0; 8]);
            scan.feed(&bytes, &mut Vec::new());
            (scan.reduced().count, f64::read(&scan.reduced().value))
        };
        assert_eq!(scan(Test::All, Want::Min), (2, 1.0));
        assert_eq!(scan(Test::Greater, Want::Sum), (1, 2.0));
        assert_eq!(scan(Test::NotEqual, Want::Count).0, 4);
    }
}
