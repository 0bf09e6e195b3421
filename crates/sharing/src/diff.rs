//! The bytes in which a page differs from its twin.
//!
//! Byte granularity, without exception: a diff never holds an unchanged byte, for another rank may be writing
//! just that byte. (Comparing words, or closing small gaps between runs, loses writes of programs that put
//! two threads' bytes into one word.)

use crate::wire::{Malformed, Reader, Wire, put_number};

/// Bytes of a page, as ascending, disjoint, non-empty runs.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Diff {
    /// The first run and the following ones. Most diffs have only one, and allocate memory for its bytes
    /// alone.
    first: Option<Run>,
    more: Vec<Run>,
    /// The runs' bytes, one after the other.
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Run {
    offset: u32,
    len: u32,
}

/// Bytes compared at a time: unequal blocks are examined byte by byte through a 64-bit mask.
const BLOCK: usize = 64;
/// Unchanged bytes skipped at a time.
const SPAN: usize = 512;

impl Diff {
    /// The bytes of `new` that differ from `old`. Both are one page long.
    ///
    /// The inner loops are written so that the compiler turns them into vector code: spans are compared
    /// first, then the blocks of those that differ, and only blocks that differ make a mask of their bytes.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn between(new: &[u8], old: &[u8]) -> Self {
        assert_eq!(new.len(), old.len(), "a page and its twin are equally long");
        let mut diff = Self::default();
        let mut open: Option<usize> = None;
        let blocks = new.len() / BLOCK;
        let (new_spans, old_spans) = (new[..blocks * BLOCK].chunks(SPAN), old[..blocks * BLOCK].chunks(SPAN));
        for (index, (new_span, old_span)) in new_spans.zip(old_spans).enumerate() {
            if new_span == old_span {
                if let Some(start) = open.take() {
                    diff.push_range(new, start, index * SPAN);
                }
                continue;
            }
            for (block, (n, o)) in new_span.chunks_exact(BLOCK).zip(old_span.chunks_exact(BLOCK)).enumerate()
            {
                let base = index * SPAN + block * BLOCK;
                let n: &[u8; BLOCK] = n.try_into().expect("a block");
                let o: &[u8; BLOCK] = o.try_into().expect("a block");
                if are_equal(n, o) {
                    if let Some(start) = open.take() {
                        diff.push_range(new, start, base);
                    }
                    continue;
                }
                cut(changed(n, o), base, &mut open, |start, end| diff.push_range(new, start, end));
            }
        }
        for at in blocks * BLOCK..new.len() {
            if new[at] != old[at] {
                open.get_or_insert(at);
            } else if let Some(start) = open.take() {
                diff.push_range(new, start, at);
            }
        }
        if let Some(start) = open {
            diff.push_range(new, start, new.len());
        }
        diff
    }

    /// Every byte of a page.
    #[must_use]
    pub fn whole(page: &[u8]) -> Self {
        let mut diff = Self::default();
        diff.push(0, page);
        diff
    }

    fn push_range(&mut self, page: &[u8], start: usize, end: usize) {
        self.push(start, &page[start..end]);
    }

    /// Appends a run behind all others; one that touches the last grows it.
    ///
    /// # Panics
    /// If it does not begin behind the last run, or ends beyond 4 GiB.
    pub fn push(&mut self, offset: usize, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.push_run(offset, bytes.len());
            self.bytes.extend_from_slice(bytes);
        }
    }

    /// As [`push`](Self::push), but for the bytes: the caller adds them.
    fn push_run(&mut self, offset: usize, len: usize) {
        let offset = u32::try_from(offset).expect("a page is small");
        let len = u32::try_from(len).expect("a page is small");
        assert!(offset >= self.end(), "runs ascend");
        let Some(first) = &mut self.first else {
            self.first = Some(Run { offset, len });
            return;
        };
        let last = self.more.last_mut().unwrap_or(first);
        if last.offset + last.len == offset {
            last.len += len;
        } else {
            self.more.push(Run { offset, len });
        }
    }

    /// The byte behind the last run.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.more.last().or(self.first.as_ref()).map_or(0, |run| run.offset + run.len)
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Changed bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Number of runs.
    #[must_use]
    pub fn runs(&self) -> usize {
        usize::from(self.first.is_some()) + self.more.len()
    }

    /// The runs: offset in the page, bytes.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let mut rest = self.bytes.as_slice();
        self.first.iter().chain(&self.more).map(move |run| {
            let (bytes, behind) = rest.split_at(run.len as usize);
            rest = behind;
            (run.offset as usize, bytes)
        })
    }

    /// Writes the changed bytes into `page`.
    ///
    /// # Panics
    /// If the diff reaches beyond it.
    pub fn apply(&self, page: &mut [u8]) {
        for (offset, bytes) in self.iter() {
            page[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// Turns the mask of one block, which begins at `base`, into runs; `open` is the start of a run that may go
/// on.
fn cut(mut mask: u64, base: usize, open: &mut Option<usize>, mut run: impl FnMut(usize, usize)) {
    let mut at = 0_u32;
    while at < 64 {
        if let Some(start) = *open {
            let ones = (!mask).trailing_zeros().min(64 - at);
            at += ones;
            if at == 64 {
                return;
            }
            mask >>= ones;
            *open = None;
            run(start, base + at as usize);
        } else {
            if mask == 0 {
                return;
            }
            let zeros = mask.trailing_zeros();
            at += zeros;
            mask >>= zeros;
            *open = Some(base + at as usize);
        }
    }
}

/// Bytes of the longest page.
const MOST_PAGE_BYTES: usize = 1 << 16;

/// A form, where the runs are, and the runs' bytes. Form 0 has the gap before each run and its length, form 1
/// a bit for each byte up to the last one: whichever is shorter.
impl Wire for Diff {
    fn put(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let mask_bytes = (self.end() as usize).div_ceil(8);
        // A run takes two bytes at least.
        let is_list = self.runs() * 2 <= mask_bytes + 4;
        if is_list {
            out.push(0);
            put_number(self.runs() as u64, out);
            let mut last = 0;
            for run in self.first.iter().chain(&self.more) {
                put_number(u64::from(run.offset - last), out);
                put_number(u64::from(run.len), out);
                last = run.offset + run.len;
            }
        }
        if !is_list || out.len() - start > mask_bytes + 4 {
            out.truncate(start);
            out.push(1);
            put_number(mask_bytes as u64, out);
            let at = out.len();
            out.resize(at + mask_bytes, 0);
            for run in self.first.iter().chain(&self.more) {
                set_bits(&mut out[at..], run.offset as usize, (run.offset + run.len) as usize);
            }
        }
        out.extend_from_slice(&self.bytes);
    }

    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut diff = Self::default();
        let mut total = 0;
        match from.bytes(1)?[0] {
            0 => {
                let mut at = 0_usize;
                for _ in 0..from.len()? {
                    let gap = u32::take(from)? as usize;
                    let len = u32::take(from)? as usize;
                    at += gap;
                    if len == 0 || at + len > MOST_PAGE_BYTES {
                        return from.fail("a run lies outside of any page");
                    }
                    diff.push_run(at, len);
                    at += len;
                    total += len;
                }
            }
            1 => {
                let len = from.len()?;
                if len > MOST_PAGE_BYTES / 8 {
                    return from.fail("a mask is longer than any page");
                }
                let mut open = None;
                let mut run = |start, end| {
                    diff.push_run(start, end - start);
                    total += end - start;
                };
                for (index, part) in from.bytes(len)?.chunks(8).enumerate() {
                    let mut word = [0; 8];
                    word[..part.len()].copy_from_slice(part);
                    cut(u64::from_le_bytes(word), index * 64, &mut open, &mut run);
                }
                if let Some(start) = open {
                    run(start, len * 8);
                }
            }
            _ => return from.fail("an unknown form of diff"),
        }
        diff.bytes = from.bytes(total)?.to_vec();
        Ok(diff)
    }
}

/// Sets the bits from `start` to before `end`.
fn set_bits(mask: &mut [u8], start: usize, end: usize) {
    let (first, last) = (start / 8, (end - 1) / 8);
    let (head, tail) = (0xff << (start % 8), 0xff >> (7 - (end - 1) % 8));
    if first == last {
        mask[first] |= head & tail;
    } else {
        mask[first] |= head;
        mask[first + 1..last].fill(0xff);
        mask[last] |= tail;
    }
}

/// Compares without a call into the C library, as comparing arrays of this length would make.
fn are_equal(new: &[u8; BLOCK], old: &[u8; BLOCK]) -> bool {
    let part = |block: &[u8; BLOCK], at: usize| {
        u128::from_le_bytes(block[at..at + 16].try_into().expect("sixteen bytes"))
    };
    (0..BLOCK).step_by(16).fold(0, |any, at| any | (part(new, at) ^ part(old, at))) == 0
}

/// Bit `i` is set where byte `i` differs.
fn changed(new: &[u8; BLOCK], old: &[u8; BLOCK]) -> u64 {
    let mut mask = 0_u64;
    for lane in 0..BLOCK / 8 {
        let n = u64::from_le_bytes(new[lane * 8..lane * 8 + 8].try_into().expect("eight bytes"));
        let o = u64::from_le_bytes(old[lane * 8..lane * 8 + 8].try_into().expect("eight bytes"));
        let x = n ^ o;
        // The top bit of each byte of `y` says whether that byte of `x` is not zero; the product gathers the
        // eight bits.
        let y = (((x & 0x7f7f_7f7f_7f7f_7f7f) + 0x7f7f_7f7f_7f7f_7f7f) | x) & 0x8080_8080_8080_8080;
        let bits = (y >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56;
        mask |= bits << (lane * 8);
    }
    mask
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by_byte(new: &[u8], old: &[u8]) -> Vec<(usize, u8)> {
        (0..new.len()).filter(|&at| new[at] != old[at]).map(|at| (at, new[at])).collect()
    }

    fn bytes_of(diff: &Diff) -> Vec<(usize, u8)> {
        diff.iter()
            .flat_map(|(offset, bytes)| bytes.iter().enumerate().map(move |(i, &b)| (offset + i, b)))
            .collect()
    }

    #[test]
    fn equal_pages_give_an_empty_diff() {
        let page = vec![7; 4096];
        assert!(Diff::between(&page, &page).is_empty());
    }

    #[test]
    fn a_gap_of_one_byte_between_two_changes_is_not_closed() {
        let old = vec![0; 128];
        let mut new = old.clone();
        new[62] = 1;
        new[64] = 1;
        assert_eq!(bytes_of(&Diff::between(&new, &old)), vec![(62, 1), (64, 1)]);
    }

    #[test]
    fn a_run_goes_on_over_the_border_of_a_block() {
        let old = vec![0; 200];
        let mut new = old.clone();
        new[60..197].fill(9);
        let diff = Diff::between(&new, &old);
        assert_eq!((diff.runs(), diff.len()), (1, 137));
    }

    proptest! {
        #[test]
        fn a_diff_is_exactly_the_changed_bytes(
            old in proptest::collection::vec(0_u8..3, 0..1600),
            flips in proptest::collection::vec((0_usize..1600, 0_u8..3), 0..80),
        ) {
            let mut new = old.clone();
            for (at, value) in flips {
                if at < new.len() {
                    new[at] = value;
                }
            }
            let diff = Diff::between(&new, &old);
            prop_assert_eq!(bytes_of(&diff), by_byte(&new, &old));
            let mut back = old.clone();
            diff.apply(&mut back);
            prop_assert_eq!(back, new);
        }
    }
}
