//! The coding of values. Numbers are little-endian base 128 ("varints"), lists carry their length first.
//!
//! Bytes from a peer are hostile: [`Wire::take`] never panics and never allocates more than its input could
//! fill. Its result still has to pass [`Wire::sane`], which knows the existing ranks and pages.

use std::sync::Arc;

use super::config::Regions;
use super::{CondId, Diff, LockId, Rank, ThreadId};
use rampool_wire::units::PageIndex;

/// Bytes that are not a message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a message of the sharing protocol: {what} at byte {at}")]
pub struct Malformed {
    pub what: &'static str,
    pub at: usize,
}

/// Bytes that are being taken apart.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub fn fail<T>(&self, what: &'static str) -> Result<T, Malformed> {
        Err(Malformed { what, at: self.at })
    }

    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        if len > self.left() {
            return self.fail("the message is too short");
        }
        let bytes = &self.bytes[self.at..self.at + len];
        self.at += len;
        Ok(bytes)
    }

    pub fn number(&mut self) -> Result<u64, Malformed> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.bytes(1)?[0];
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        self.fail("a number is too long")
    }

    /// A length: at least that many bytes follow.
    pub fn len(&mut self) -> Result<usize, Malformed> {
        match usize::try_from(self.number()?) {
            Ok(len) if len <= self.left() => Ok(len),
            _ => self.fail("a list is longer than the message"),
        }
    }
}

pub(crate) fn put_number(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push((value & 0x7f) as u8);
}

/// The ranks and pages that a value may name.
pub(crate) struct Limits<'a> {
    pub ranks: u16,
    pub regions: &'a Regions,
}

impl Limits<'_> {
    pub fn page_bytes(&self, page: PageIndex) -> Option<usize> {
        self.regions.find(page).map(|region| region.page_bytes as usize)
    }

    /// Whether `diff` lies inside `page`.
    pub fn fits(&self, page: PageIndex, diff: &Diff) -> bool {
        self.page_bytes(page).is_some_and(|bytes| diff.end() as usize <= bytes)
    }

    /// Whether `bytes` are exactly the content of `page`.
    pub fn fills(&self, page: PageIndex, bytes: &[u8]) -> bool {
        self.page_bytes(page) == Some(bytes.len())
    }
}

pub(crate) trait Wire: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed>;
    /// Whether every rank, page and length in it exists.
    fn sane(&self, _limits: &Limits<'_>) -> bool {
        true
    }
}

macro_rules! wire_number {
    ($($type:ty),*) => { $(
        impl Wire for $type {
            fn put(&self, out: &mut Vec<u8>) {
                put_number(u64::from(*self), out);
            }
            fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
                let value = from.number()?;
                match Self::try_from(value) {
                    Ok(value) => Ok(value),
                    Err(_) => from.fail("a number is too large"),
                }
            }
        }
    )* };
}
wire_number!(u8, u16, u32, u64);

macro_rules! wire_newtype {
    ($($name:ident),*) => { $(
        impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                self.0.put(out);
            }
            fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
                Ok(Self(Wire::take(from)?))
            }
        }
    )* };
}
wire_newtype!(ThreadId, LockId, CondId);

impl Wire for Rank {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self(Wire::take(from)?))
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        self.0 < limits.ranks
    }
}

impl Wire for PageIndex {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self(u64::from(u32::take(from)?)))
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        limits.regions.find(*self).is_some()
    }
}

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        match from.bytes(1)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            _ => from.fail("neither yes nor no"),
        }
    }
}

impl Wire for String {
    fn put(&self, out: &mut Vec<u8>) {
        put_number(self.len() as u64, out);
        out.extend_from_slice(self.as_bytes());
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let len = from.len()?;
        Ok(String::from_utf8_lossy(from.bytes(len)?).into_owned())
    }
}

impl Wire for Arc<[u8]> {
    fn put(&self, out: &mut Vec<u8>) {
        put_number(self.len() as u64, out);
        out.extend_from_slice(self);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let len = from.len()?;
        Ok(from.bytes(len)?.into())
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(if bool::take(from)? { Some(T::take(from)?) } else { None })
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        self.as_ref().is_none_or(|value| value.sane(limits))
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        put_number(self.len() as u64, out);
        for value in self {
            value.put(out);
        }
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let len = from.len()?;
        // Elements may be larger in memory than on the wire: the list grows as they come.
        let mut list = Self::with_capacity(len.min(1024));
        for _ in 0..len {
            list.push(T::take(from)?);
        }
        Ok(list)
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        self.iter().all(|value| value.sane(limits))
    }
}

impl<T: Wire> Wire for Arc<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (**self).put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Arc::new(T::take(from)?))
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        (**self).sane(limits)
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok((A::take(from)?, B::take(from)?))
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        self.0.sane(limits) && self.1.sane(limits)
    }
}

/// A struct goes over the wire field by field.
macro_rules! wire_struct {
    ($name:ident { $($field:ident),* $(,)? }) => {
        impl $crate::wire::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $( $crate::wire::Wire::put(&self.$field, out); )*
            }
            fn take(from: &mut $crate::wire::Reader<'_>) -> Result<Self, $crate::wire::Malformed> {
                $( let $field = $crate::wire::Wire::take(from)?; )*
                Ok(Self { $($field),* })
            }
            fn sane(&self, limits: &$crate::wire::Limits<'_>) -> bool {
                $( $crate::wire::Wire::sane(&self.$field, limits) && )* true
            }
        }

        #[cfg(test)]
        impl $name {
            /// For the test that compares it with the document.
            pub(crate) const FIELDS: (&str, &[&str]) = (stringify!($name), &[$( stringify!($field) ),*]);
        }
    };
}

/// An enum goes over the wire as one byte that names the variant, then its fields.
macro_rules! wire_enum {
    ($name:ident { $($tag:literal => $variant:ident { $($field:ident),* $(,)? }),* $(,)? }) => {
        impl $crate::wire::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $( Self::$variant { $($field),* } => {
                        out.push($tag);
                        $( $crate::wire::Wire::put($field, out); )*
                    } )*
                }
            }
            fn take(from: &mut $crate::wire::Reader<'_>) -> Result<Self, $crate::wire::Malformed> {
                match from.bytes(1)?[0] {
                    $( $tag => {
                        $( let $field = $crate::wire::Wire::take(from)?; )*
                        Ok(Self::$variant { $($field),* })
                    } )*
                    _ => from.fail("an unknown kind"),
                }
            }
            fn sane(&self, limits: &$crate::wire::Limits<'_>) -> bool {
                match self {
                    $( Self::$variant { $($field),* } => {
                        let _ = limits;
                        $( $crate::wire::Wire::sane($field, limits) && )* true
                    } )*
                }
            }
        }

        #[cfg(test)]
        impl $name {
            /// For the test that compares them with the document.
            pub(crate) const KINDS: &[(u8, &str, &[&str])] = &[$( ($tag, stringify!($variant), &[$( stringify!($field) ),*]) ),*];
        }
    };
}

pub(crate) use {wire_enum, wire_struct};

#[cfg(test)]
mod tests {
    use super::super::adapt::Mode;
    use super::super::control::{
        Answer, Control, Demand, FrameKind, Hello, Resume, SHARE_WIRE_VERSION, Wait, Wish, frame,
    };
    use super::super::direct::{Access, Changed};
    use super::super::message::{
        Advance, Ask, Body, Departure, Info, IntervalDiff, LazyRecord, LockState, Message, Moves, Part,
        Payload, Stamp,
    };
    use super::super::notice::{NoticeRun, Writers};
    use super::*;

    const DOCUMENT: &str = include_str!("../../../docs/reference/wire-shared.md");

    /// Whether a row of a table begins with this cell, and names these fields, and no others, in the next.
    fn has_row(first: &str, fields: &[&str]) -> bool {
        let rows = DOCUMENT.lines().filter_map(|line| line.strip_prefix(&format!("| {first} |")));
        let mut found = rows.map(|rest| rest.split('|').next().unwrap_or_default());
        found.any(|cell| named(cell) == fields)
    }

    /// The first word of each field: `page, owner rank, readers list of (rank, thread)` are three.
    fn named(cell: &str) -> Vec<&str> {
        let mut depth = 0_i32;
        let fields = cell.split(move |letter| {
            depth += i32::from(letter == '(') - i32::from(letter == ')');
            letter == ',' && depth == 0
        });
        fields.filter_map(|field| field.split_whitespace().next()).collect()
    }

    /// `docs/reference/wire-shared.md` lists every message, with its number and its fields in order. A new
    /// structure or enum that is not in the lists here is an unused constant, of which the compiler warns.
    #[test]
    fn every_kind_of_message_is_in_the_document() {
        let decimal = |number: u8| number.to_string();
        let hexadecimal = |number: u8| format!("{number:#04x}");
        let mut missing = Vec::new();
        let kinds = [
            Control::KINDS,
            Wait::KINDS,
            Demand::KINDS,
            Answer::KINDS,
            Access::KINDS,
            Info::KINDS,
            Payload::KINDS,
            Mode::KINDS,
            Writers::KINDS,
        ];
        let all = kinds.into_iter().flatten().map(|kind| (decimal(kind.0), kind));
        for (number, (_, name, fields)) in
            all.chain(Body::KINDS.iter().map(|kind| (hexadecimal(kind.0), kind)))
        {
            if !has_row(&format!("{number} {name}"), fields) {
                missing.push(format!("| {number} {name} | {} |", fields.join(", ")));
            }
        }
        for (name, fields) in [
            Hello::FIELDS,
            Resume::FIELDS,
            Wish::FIELDS,
            IntervalDiff::FIELDS,
            Advance::FIELDS,
            Stamp::FIELDS,
            Ask::FIELDS,
            Part::FIELDS,
            LazyRecord::FIELDS,
            Moves::FIELDS,
            Departure::FIELDS,
            LockState::FIELDS,
            Changed::FIELDS,
            NoticeRun::FIELDS,
        ] {
            if !has_row(name, fields) {
                missing.push(format!("| {name} | {} |", fields.join(", ")));
            }
        }
        assert!(
            missing.is_empty(),
            "docs/reference/wire-shared.md lacks, or has otherwise:\n{}",
            missing.join("\n")
        );
        assert!(
            DOCUMENT.contains(&format!("version **{SHARE_WIRE_VERSION}** of the sharing protocol")),
            "the document is of another version"
        );
    }

    #[test]
    fn the_documented_bytes_of_a_message_are_these() {
        let message = Message { epoch: 300, body: Body::GetPage { page: PageIndex(1000), by: Rank(2) } };
        let mut out = Vec::new();
        frame(FrameKind::Message, 0, &mut out, |out| message.encode(out));
        assert_eq!(out, [0x0b, 0, 0, 0, 0, 0, 0, 0, 0, 0xac, 0x02, 0x10, 0xe8, 0x07, 0x02]);
        let words: String = out.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(DOCUMENT.lines().any(|line| line.replace(' ', "") == words), "it is in the document");
    }
}
