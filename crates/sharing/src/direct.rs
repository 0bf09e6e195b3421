//! Direct operations on shared pages: bytes are read and changed at a page's home, and the page does not move
//! to the requester.
//!
//! A direct operation is a list of [`Access`]es, each of one page. In the home-based protocols (`hlrc`,
//! `aurc`, `auto`, `ibec`) those of one home travel in one message. The home reads from its master copy,
//! which holds everything released before, or changes it. The answer has the bytes, and for each changed page
//! the version that the change made. From then on it is as if the *requesting* rank had written and released
//! those bytes: its own copy is stale, and its next interval names the page, so a rank that synchronises with
//! it learns of the change. In `ibec` the change is one outside of locks: visible at the next barrier.
//!
//! `sc` and `lrc` have no such home: there the page moves to the requesting rank, through the directory or as
//! diffs, and the operation is an ordinary access of that rank, made in one step.
//!
//! It orders nothing but itself. An operation that returns an element's value before ([`Access::Fetch`],
//! [`Access::Swap`]) is the exception: the requesting rank holds the word's lock meanwhile, the one that
//! [`super::SyncOp::Atomic`] takes, and so is ordered like those.

use std::sync::Arc;

use super::config::word_lock;
use super::wire::{Limits, Malformed, Reader, Wire, put_number, wire_enum, wire_struct};
use super::{Diff, LockId};
use rampool_wire::elements::{Combine, Kind, combine};
use rampool_wire::units::PageIndex;

/// Runs of bytes of one page, ascending and disjoint.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Spans(Vec<(u32, u32)>);

impl Spans {
    /// Appends a run; one that touches the last grows it. False, and no change, if it does not lie behind the
    /// last.
    pub fn push(&mut self, offset: u32, len: u32) -> bool {
        let end = self.end();
        if offset < end || offset.checked_add(len).is_none() {
            return false;
        }
        match self.0.last_mut() {
            _ if len == 0 => {}
            Some(last) if offset == end => last.1 += len,
            _ => self.0.push((offset, len)),
        }
        true
    }

    /// The byte behind the last run.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.0.last().map_or(0, |&(offset, len)| offset + len)
    }

    /// Bytes in all runs.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|&(_, len)| len as usize).sum()
    }

    fn iter(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.0.iter().map(|&(offset, len)| offset as usize..(offset + len) as usize)
    }

    fn are_whole(&self, kind: Kind) -> bool {
        let element = u32::try_from(kind.bytes()).expect("4 or 8");
        self.0.iter().all(|&(offset, len)| offset.is_multiple_of(element) && len.is_multiple_of(element))
    }
}

/// Gaps and lengths.
impl Wire for Spans {
    fn put(&self, out: &mut Vec<u8>) {
        put_number(self.0.len() as u64, out);
        let mut last = 0;
        for &(offset, len) in &self.0 {
            put_number(u64::from(offset - last), out);
            put_number(u64::from(len), out);
            last = offset + len;
        }
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let count = from.len()?;
        let mut spans = Self::default();
        for _ in 0..count {
            let gap = u32::take(from)?;
            let len = u32::take(from)?;
            let Some(offset) = spans.end().checked_add(gap) else {
                return from.fail("a run lies outside of any page");
            };
            if len == 0 || !spans.push(offset, len) {
                return from.fail("a run lies outside of any page");
            }
        }
        Ok(spans)
    }
}

/// The operation on one page.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Returns these bytes.
    Get { spans: Spans },
    /// Writes these bytes.
    Put { diff: Diff },
    /// Changes each element by its operand.
    Update { spans: Spans, kind: Kind, how: Combine, operands: Arc<[u8]> },
    /// Changes one element by an operand, in the lowest bytes, and returns its value before.
    Fetch { offset: u32, kind: Kind, how: Combine, operand: u64 },
    /// Writes `new` if the element's bits are `expect`, and returns its value before.
    Swap { offset: u32, kind: Kind, expect: u64, new: u64 },
}
wire_enum!(Access {
    0 => Get { spans },
    1 => Put { diff },
    2 => Update { spans, kind, how, operands },
    3 => Fetch { offset, kind, how, operand },
    4 => Swap { offset, kind, expect, new },
});

/// The result of an access: its changes, and the bytes that it returns.
pub(crate) struct Outcome {
    pub diff: Diff,
    pub bytes: Vec<u8>,
}

impl Access {
    /// Bytes that it returns.
    #[must_use]
    pub fn answer_bytes(&self) -> usize {
        match self {
            Self::Get { spans } => spans.bytes(),
            Self::Put { .. } | Self::Update { .. } => 0,
            Self::Fetch { kind, .. } | Self::Swap { kind, .. } => kind.bytes(),
        }
    }

    /// Its approximate length on the wire.
    pub(crate) fn request_bytes(&self) -> usize {
        8 + match self {
            Self::Get { spans } => 4 * spans.0.len(),
            Self::Put { diff } => 4 * diff.runs() + diff.len(),
            Self::Update { spans, operands, .. } => 4 * spans.0.len() + operands.len(),
            Self::Fetch { .. } | Self::Swap { .. } => 16,
        }
    }

    /// Whether it may change something.
    #[must_use]
    pub fn writes(&self) -> bool {
        !matches!(self, Self::Get { .. })
    }

    /// Whether what it writes depends on what it reads.
    pub(crate) fn is_update(&self) -> bool {
        matches!(self, Self::Update { .. } | Self::Fetch { .. } | Self::Swap { .. })
    }

    /// Whether it is valid for a page of this many bytes.
    pub(crate) fn fits(&self, page_bytes: usize) -> bool {
        let aligned = |offset: u32, kind: Kind| {
            let offset = offset as usize;
            offset.is_multiple_of(kind.bytes())
                && offset.checked_add(kind.bytes()).is_some_and(|end| end <= page_bytes)
        };
        match self {
            Self::Get { spans } => spans.end() as usize <= page_bytes,
            Self::Put { diff } => diff.end() as usize <= page_bytes,
            Self::Update { spans, kind, how, operands } => {
                spans.end() as usize <= page_bytes
                    && spans.are_whole(*kind)
                    && spans.bytes() == operands.len()
                    && how.fits(*kind)
            }
            Self::Fetch { offset, kind, how, .. } => aligned(*offset, *kind) && how.fits(*kind),
            Self::Swap { offset, kind, .. } => aligned(*offset, *kind),
        }
    }

    /// The lock that orders it among atomic operations of the same word.
    pub(crate) fn word_lock(&self, page: PageIndex) -> Option<LockId> {
        match *self {
            Self::Fetch { offset, .. } | Self::Swap { offset, .. } => Some(word_lock(page, offset)),
            _ => None,
        }
    }

    /// Carries it out on a page's content. It must fit.
    pub(crate) fn carry_out(&self, content: &[u8]) -> Outcome {
        let mut outcome = Outcome { diff: Diff::default(), bytes: Vec::new() };
        match self {
            Self::Get { spans } => {
                spans.iter().for_each(|run| outcome.bytes.extend_from_slice(&content[run]))
            }
            Self::Put { diff } => outcome.diff = diff.clone(),
            Self::Update { spans, kind, how, operands } => {
                let mut rest = &operands[..];
                for run in spans.iter() {
                    let (operands, behind) = rest.split_at(run.len());
                    rest = behind;
                    let mut elements = content[run.clone()].to_vec();
                    combine(*kind, *how, &mut elements, operands);
                    outcome.diff.push(run.start, &elements);
                }
            }
            &Self::Fetch { offset, kind, how, operand } => {
                let at = offset as usize;
                outcome.bytes = content[at..at + kind.bytes()].to_vec();
                let mut element = outcome.bytes.clone();
                combine(kind, how, &mut element, &operand.to_le_bytes()[..kind.bytes()]);
                outcome.diff.push(at, &element);
            }
            &Self::Swap { offset, kind, expect, new } => {
                let at = offset as usize;
                outcome.bytes = content[at..at + kind.bytes()].to_vec();
                if outcome.bytes == expect.to_le_bytes()[..kind.bytes()] {
                    outcome.diff.push(at, &new.to_le_bytes()[..kind.bytes()]);
                }
            }
        }
        outcome
    }
}

/// The most bytes that a home returns in one answer. A rank requests less at a time.
const MOST_ANSWER_BYTES: usize = 1 << 20;

/// Whether a home answers this much at a time.
pub(crate) fn can_be_answered(accesses: &[PageAccess]) -> bool {
    accesses.iter().map(|one| one.access.answer_bytes()).sum::<usize>() <= MOST_ANSWER_BYTES
}

/// An access and its page.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PageAccess {
    pub page: PageIndex,
    pub access: Access,
}

impl Wire for PageAccess {
    fn put(&self, out: &mut Vec<u8>) {
        self.page.put(out);
        self.access.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { page: Wire::take(from)?, access: Wire::take(from)? })
    }
    fn sane(&self, limits: &Limits<'_>) -> bool {
        limits.page_bytes(self.page).is_some_and(|bytes| self.access.fits(bytes))
    }
}

/// A direct operation: accesses, in the order of their bytes in the answer. An access that is ordered by its
/// word is alone.
pub type DirectOp = Arc<[PageAccess]>;

/// The work of a home.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Changed {
    pub page: PageIndex,
    /// Home-based protocols with versions: the one that the change made.
    pub version: u32,
}
wire_struct!(Changed { page, version });

macro_rules! wire_listed {
    ($($type:ty),*) => { $(
        impl Wire for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(*self as u8);
            }
            fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
                let byte = from.bytes(1)?[0];
                match Self::ALL.into_iter().find(|one| *one as u8 == byte) {
                    Some(one) => Ok(one),
                    None => from.fail("an unknown kind of element or change"),
                }
            }
        }
    )* };
}
wire_listed!(Kind, Combine);

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(runs: &[(u32, u32)]) -> Spans {
        let mut spans = Spans::default();
        assert!(runs.iter().all(|&(offset, len)| spans.push(offset, len)));
        spans
    }

    #[test]
    fn runs_ascend_and_neighbours_join() {
        let mut some = spans(&[(4, 4), (8, 8), (20, 1)]);
        assert_eq!((some.0.as_slice(), some.bytes(), some.end()), (&[(4, 12), (20, 1)][..], 13, 21));
        assert!(!some.push(20, 1) && !some.push(u32::MAX, 1), "behind the last, and within 4 GiB");
    }

    #[test]
    fn accesses_do_what_they_say() {
        let page: Vec<u8> = (0..32).collect();
        let got = Access::Get { spans: spans(&[(1, 2), (30, 2)]) }.carry_out(&page);
        assert!(got.bytes == [1, 2, 30, 31] && got.diff.is_empty());
        let mut words = vec![0; 32];
        words[8] = 5;
        let operands: Arc<[u8]> = [7_u64, 1].iter().flat_map(|word| word.to_le_bytes()).collect();
        let sum = Access::Update { spans: spans(&[(8, 16)]), kind: Kind::U64, how: Combine::Sum, operands };
        assert!(sum.fits(24) && !sum.fits(23));
        sum.carry_out(&words).diff.apply(&mut words);
        assert_eq!((words[8], words[16]), (12, 1));
        let fetched =
            Access::Fetch { offset: 8, kind: Kind::U32, how: Combine::Max, operand: 3 }.carry_out(&words);
        assert_eq!(fetched.bytes, [12, 0, 0, 0]);
        let refused = Access::Swap { offset: 8, kind: Kind::U32, expect: 3, new: 4 }.carry_out(&words);
        assert!(refused.diff.is_empty() && refused.bytes == [12, 0, 0, 0]);
        let swapped = Access::Swap { offset: 8, kind: Kind::U32, expect: 12, new: 4 }.carry_out(&words);
        swapped.diff.apply(&mut words);
        assert_eq!(words[8], 4);
    }

    #[test]
    fn what_does_not_fit_is_noticed() {
        let operands: Arc<[u8]> = vec![0; 8].into();
        for bad in [
            Access::Get { spans: spans(&[(60, 8)]) },
            Access::Update {
                spans: spans(&[(4, 8)]),
                kind: Kind::I64,
                how: Combine::Sum,
                operands: Arc::clone(&operands),
            },
            Access::Update {
                spans: spans(&[(8, 16)]),
                kind: Kind::I64,
                how: Combine::Sum,
                operands: Arc::clone(&operands),
            },
            Access::Update { spans: spans(&[(8, 8)]), kind: Kind::F64, how: Combine::Xor, operands },
            Access::Fetch { offset: 4, kind: Kind::F64, how: Combine::Sum, operand: 0 },
            Access::Fetch { offset: 64, kind: Kind::F64, how: Combine::Sum, operand: 0 },
            Access::Swap { offset: u32::MAX - 7, kind: Kind::U64, expect: 0, new: 0 },
        ] {
            assert!(!bad.fits(64), "{bad:?}");
        }
    }
}
