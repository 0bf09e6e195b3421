//! Where pages live in this process: address ranges on one side, page indices on the other.
//!
//! The cache and the servers name a page by its index, which never changes; its address does, when the
//! program calls `mremap`. An [`AddressSpace`] is the list of spans under management. Invariant: spans are
//! sorted by address, disjoint in addresses and in indices.

use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

/// A run of managed pages at consecutive addresses with consecutive indices.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Span {
    pub start: usize,
    pub pages: u32,
    pub first: PageIndex,
}

impl Span {
    #[must_use]
    pub fn end(&self) -> usize {
        self.start + self.pages as usize * OS_PAGE_BYTES
    }
    #[must_use]
    pub fn extent(&self) -> Extent {
        Extent::new(self.first, self.pages)
    }
}

/// Part of an extent at consecutive addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub start: usize,
    pub bytes: usize,
    /// Pages of the extent before this piece.
    pub offset_pages: u32,
}

#[derive(Clone, Debug, Default)]
pub struct AddressSpace {
    /// Sorted by address.
    by_address: Vec<Span>,
    /// The same spans, sorted by index.
    by_index: Vec<Span>,
    /// Index ranges that were used and are free again, sorted by index, merged.
    free: Vec<Extent>,
    next: u64,
}

impl AddressSpace {
    /// A space with these spans, as another process had them.
    #[must_use]
    pub fn from_spans(spans: &[Span]) -> Self {
        let mut space = Self::default();
        for span in spans {
            space.next = space.next.max(span.extent().end().0);
            space.insert_span(*span);
        }
        let mut at = 0;
        for span in space.by_index.clone() {
            space.give_range(at, span.first.0);
            at = span.extent().end().0;
        }
        space.check();
        space
    }

    /// Brings `[start, start + pages)` under management and gives it indices.
    ///
    /// # Panics
    /// If part of it is managed already, or the range is empty or unaligned.
    pub fn insert(&mut self, start: usize, pages: u32) -> Extent {
        assert!(pages > 0 && start.is_multiple_of(OS_PAGE_BYTES));
        let end = start + pages as usize * OS_PAGE_BYTES;
        let at = self.by_address.partition_point(|s| s.end() <= start);
        assert!(self.by_address.get(at).is_none_or(|s| s.start >= end), "a span is managed twice");
        let first = self.take_indices(pages);
        self.insert_span(Span { start, pages, first });
        Extent::new(first, pages)
    }

    /// Ends management of every page in `[start, end)`; tells which indices that were.
    pub fn remove(&mut self, start: usize, end: usize, mut gone: impl FnMut(Extent)) {
        while let Some(span) = self.first_overlap(start, end) {
            self.remove_span(span);
            let (cut_start, cut_end) = (span.start.max(start), span.end().min(end));
            let cut = sub_span(span, cut_start, cut_end);
            if cut_start > span.start {
                self.insert_span(sub_span(span, span.start, cut_start));
            }
            if cut_end < span.end() {
                self.insert_span(sub_span(span, cut_end, span.end()));
            }
            self.give_indices(cut.extent());
            gone(cut.extent());
        }
    }

    /// The program moved `[from, from + bytes)` to `to`: the pages keep their indices.
    pub fn remap(&mut self, from: usize, to: usize, bytes: usize) {
        let end = from + bytes;
        let mut moved = Vec::new();
        while let Some(span) = self.first_overlap(from, end) {
            self.remove_span(span);
            let (cut_start, cut_end) = (span.start.max(from), span.end().min(end));
            if cut_start > span.start {
                self.insert_span(sub_span(span, span.start, cut_start));
            }
            if cut_end < span.end() {
                self.insert_span(sub_span(span, cut_end, span.end()));
            }
            let cut = sub_span(span, cut_start, cut_end);
            moved.push(Span { start: cut.start - from + to, ..cut });
        }
        for span in moved {
            self.insert_span(span);
        }
    }

    /// The page at `address`, if it is managed.
    #[must_use]
    pub fn page_at(&self, address: usize) -> Option<PageIndex> {
        let at = self.by_address.partition_point(|s| s.end() <= address);
        let span = self.by_address.get(at).filter(|s| s.start <= address)?;
        Some(span.first.offset(((address - span.start) / OS_PAGE_BYTES) as u64))
    }

    /// The span that `address` is in, or else the next one.
    #[must_use]
    pub fn span_from(&self, address: usize) -> Option<Span> {
        let at = self.by_address.partition_point(|s| s.end() <= address);
        self.by_address.get(at).copied()
    }

    /// The indices of the managed pages in `[start, end)`, by address.
    pub fn extents_in(&self, start: usize, end: usize, mut each: impl FnMut(usize, Extent)) {
        let from = self.by_address.partition_point(|s| s.end() <= start);
        for span in self.by_address[from..].iter().take_while(|s| s.start < end) {
            let cut = sub_span(*span, span.start.max(start), span.end().min(end));
            each(cut.start, cut.extent());
        }
    }

    /// Where the pages of `extent` are now, as runs of addresses. Pages that left management are passed over.
    pub fn pieces(&self, extent: Extent, mut each: impl FnMut(Piece)) {
        let from = self.by_index.partition_point(|s| s.extent().end() <= extent.first);
        for span in self.by_index[from..].iter().take_while(|s| s.first < extent.end()) {
            let first = span.first.max(extent.first);
            let end = span.extent().end().min(extent.end());
            each(Piece {
                start: span.start + pages_usize(first.0 - span.first.0) * OS_PAGE_BYTES,
                bytes: pages_usize(end.0 - first.0) * OS_PAGE_BYTES,
                offset_pages: pages_u32(first.0 - extent.first.0),
            });
        }
    }

    /// The address of one page.
    #[must_use]
    pub fn address_of(&self, page: PageIndex) -> Option<usize> {
        let mut found = None;
        self.pieces(Extent::page(page), |piece| found = Some(piece.start));
        found
    }

    /// Pages under management.
    #[must_use]
    pub fn managed_pages(&self) -> u64 {
        self.by_address.iter().map(|s| u64::from(s.pages)).sum()
    }

    #[must_use]
    pub fn spans(&self) -> &[Span] {
        &self.by_address
    }

    /// Parts of `[start, end)` that are not managed.
    pub fn gaps(&self, start: usize, end: usize, mut each: impl FnMut(usize, usize)) {
        let mut at = start;
        self.extents_in(start, end, |cut, extent| {
            if cut > at {
                each(at, cut);
            }
            at = cut + extent.count as usize * OS_PAGE_BYTES;
        });
        if at < end {
            each(at, end);
        }
    }

    /// Checks the invariant.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn check(&self) {
        assert_eq!(self.by_address.len(), self.by_index.len());
        assert!(self.by_address.windows(2).all(|w| w[0].end() <= w[1].start));
        assert!(self.by_index.windows(2).all(|w| w[0].extent().end() <= w[1].first));
        assert!(self.free.windows(2).all(|w| w[0].end() <= w[1].first));
        assert!(self.by_index.last().is_none_or(|s| s.extent().end().0 <= self.next));
    }

    fn first_overlap(&self, start: usize, end: usize) -> Option<Span> {
        let at = self.by_address.partition_point(|s| s.end() <= start);
        self.by_address.get(at).copied().filter(|s| s.start < end)
    }

    fn insert_span(&mut self, span: Span) {
        let at = self.by_address.partition_point(|s| s.start < span.start);
        self.by_address.insert(at, span);
        let at = self.by_index.partition_point(|s| s.first < span.first);
        self.by_index.insert(at, span);
    }

    fn remove_span(&mut self, span: Span) {
        self.by_address.retain(|s| s.start != span.start);
        self.by_index.retain(|s| s.first != span.first);
    }

    fn take_indices(&mut self, pages: u32) -> PageIndex {
        // First fit: freed index ranges are reused, so that the arrays behind them stay dense.
        if let Some(at) = self.free.iter().position(|e| e.count >= pages) {
            let hole = &mut self.free[at];
            let first = hole.first;
            hole.first = hole.first.offset(u64::from(pages));
            hole.count -= pages;
            if hole.count == 0 {
                self.free.remove(at);
            }
            return first;
        }
        let first = PageIndex(self.next);
        self.next += u64::from(pages);
        first
    }

    fn give_range(&mut self, mut from: u64, to: u64) {
        while from < to {
            let part = u32::try_from(to - from).unwrap_or(u32::MAX);
            self.free.push(Extent::new(PageIndex(from), part));
            from += u64::from(part);
        }
    }

    fn give_indices(&mut self, extent: Extent) {
        let at = self.free.partition_point(|e| e.first < extent.first);
        self.free.insert(at, extent);
        // Merge with the right, then the left neighbour.
        for left in [at, at.wrapping_sub(1)] {
            if let (Some(a), Some(b)) =
                (self.free.get(left).copied(), self.free.get(left.wrapping_add(1)).copied())
                && a.end() == b.first
                && let Some(count) = a.count.checked_add(b.count)
            {
                self.free[left].count = count;
                self.free.remove(left + 1);
            }
        }
    }
}

pub(crate) fn sub_span(span: Span, start: usize, end: usize) -> Span {
    let skipped = (start - span.start) / OS_PAGE_BYTES;
    Span {
        start,
        pages: pages_u32(((end - start) / OS_PAGE_BYTES) as u64),
        first: span.first.offset(skipped as u64),
    }
}

fn pages_usize(pages: u64) -> usize {
    usize::try_from(pages).expect("a page count fits an address")
}

fn pages_u32(pages: u64) -> u32 {
    u32::try_from(pages).expect("a span has fewer than 2^32 pages")
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: usize = OS_PAGE_BYTES;

    #[test]
    fn a_hole_in_the_middle_keeps_the_indices_of_both_sides() {
        let mut space = AddressSpace::default();
        let all = space.insert(100 * P, 10);
        let mut gone = Vec::new();
        space.remove(103 * P, 105 * P, |e| gone.push(e));
        space.check();
        assert_eq!(gone, [Extent::new(all.first.offset(3), 2)]);
        assert_eq!(space.page_at(102 * P), Some(all.first.offset(2)));
        assert_eq!(space.page_at(103 * P), None);
        assert_eq!(space.page_at(105 * P), Some(all.first.offset(5)));
        let mut gaps = Vec::new();
        space.gaps(98 * P, 112 * P, |a, b| gaps.push((a / P, b / P)));
        assert_eq!(gaps, [(98, 100), (103, 105), (110, 112)]);
    }

    #[test]
    fn remapped_pages_keep_their_indices_and_get_new_addresses() {
        let mut space = AddressSpace::default();
        let all = space.insert(100 * P, 10);
        space.remap(104 * P, 500 * P, 6 * P);
        space.check();
        assert_eq!(space.page_at(501 * P), Some(all.first.offset(5)));
        assert_eq!(space.address_of(all.first.offset(9)), Some(505 * P));
        let mut pieces = Vec::new();
        space.pieces(all, |p| pieces.push((p.start / P, p.bytes / P, p.offset_pages)));
        assert_eq!(pieces, [(100, 4, 0), (500, 6, 4)]);
    }

    #[test]
    fn freed_indices_are_used_again_and_merge() {
        let mut space = AddressSpace::default();
        space.insert(0x10 * P, 4);
        space.insert(0x20 * P, 4);
        space.insert(0x30 * P, 4);
        for start in [0x10, 0x30, 0x20] {
            space.remove(start * P, (start + 4) * P, |_| {});
            space.check();
        }
        assert_eq!(space.free, [Extent::new(PageIndex(0), 12)]);
        assert_eq!(space.insert(0x99 * P, 12).first, PageIndex(0));
    }
}
