//! A forked child, served by its parent until it can serve itself.
//!
//! The kernel copies the child's resident pages on write; what is absent is absent in both. The event about the fork brings a context of the
//! child's own, and nothing was installed or moved in the parent between the copy and that event. So, at that moment:
//!
//! * pages whose only content is in an unacknowledged eviction batch are copied into the child at once;
//! * everything else that is absent is at the servers, and the child's view of it is a copy-on-write copy of the region;
//! * a [`Foster`] answers the child's faults from there. A child that was made by `fork(3)` soon takes over with a pager of its own
//!   ([`Foster::hand_over`]); one made by a bare `clone` system call is served to its end.

use std::collections::BTreeMap;

use rampool_proto::units::{Extent, OS_PAGE_BYTES, PageIndex};
use rampool_sys::uffd::{Event, Reply, Uffd};

use crate::space::{AddressSpace, Span};

/// What a child needs to know to serve itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChildMemory {
    pub spans: Vec<Span>,
    /// Pages whose content is at the servers, sorted.
    pub absent: Vec<Extent>,
}

/// A set of pages as merged runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageSet {
    /// First page of a run -> pages in it; runs neither overlap nor touch.
    runs: BTreeMap<u64, u64>,
}

impl PageSet {
    pub(crate) fn insert(&mut self, extent: Extent) {
        self.remove(extent);
        let (mut first, mut end) = (extent.first.0, extent.end().0);
        if let Some((&left, &count)) = self.runs.range(..first).next_back()
            && left + count == first
        {
            self.runs.remove(&left);
            first = left;
        }
        if let Some(count) = self.runs.remove(&end) {
            end += count;
        }
        self.runs.insert(first, end - first);
    }

    pub(crate) fn remove(&mut self, extent: Extent) {
        let (first, end) = (extent.first.0, extent.end().0);
        while let Some((&from, &count)) = self.runs.range(..end).next_back() {
            let to = from + count;
            if to <= first {
                break;
            }
            self.runs.remove(&from);
            if to > end {
                self.runs.insert(end, to - end);
            }
            if from < first {
                self.runs.insert(from, first - from);
                break;
            }
        }
    }

    /// Pages from `page` on that are in the set, at most `most`.
    pub(crate) fn run_at(&self, page: PageIndex, most: u32) -> u32 {
        self.runs.range(..=page.0).next_back().map_or(0, |(&first, &count)| {
            let left = (first + count).saturating_sub(page.0).min(u64::from(most));
            u32::try_from(left).expect("at most `most`")
        })
    }

    pub(crate) fn extents(&self) -> Vec<Extent> {
        let mut out = Vec::new();
        for (&first, &count) in &self.runs {
            let (mut at, mut left) = (first, count);
            while left > 0 {
                let part = u32::try_from(left).unwrap_or(u32::MAX);
                out.push(Extent::new(PageIndex(at), part));
                at += u64::from(part);
                left -= u64::from(part);
            }
        }
        out
    }
}

/// What a foster asks of the pager that runs it: the bytes of `extent` of `region`, at an address valid until the next call.
pub(crate) type FetchNow<'a, R> = &'a mut dyn FnMut(R, Extent) -> Result<usize, String>;

/// A child that is served by its parent.
#[derive(Debug)]
pub struct Foster<R> {
    uffd: Uffd,
    space: AddressSpace,
    absent: PageSet,
    region: R,
}

/// Pages fetched by one fault of a child.
pub(crate) const FOSTER_FETCH_PAGES: u32 = 16;

impl<R: Copy> Foster<R> {
    pub(crate) fn new(uffd: Uffd, space: AddressSpace, absent: PageSet, region: R) -> Self {
        Self { uffd, space, absent, region }
    }

    #[must_use]
    pub fn raw_fd(&self) -> std::os::fd::RawFd {
        self.uffd.raw_fd()
    }
    #[must_use]
    pub fn region(&self) -> R {
        self.region
    }

    /// Nobody will serve this child any more: what it has not got yet is lost to it, and an access to it is a SIGBUS from now on. Without this, the
    /// kernel would answer with zeroes as soon as the context is closed.
    pub fn give_up(&self) {
        for extent in self.absent.extents() {
            self.space.pieces(extent, |piece| self.uffd.poison_absent(piece.start, piece.bytes));
        }
    }

    /// Reads and answers what waits in the child's context. A child that forks again is given to `forked`.
    ///
    /// # Errors
    /// Why a page could not be had.
    pub(crate) fn serve(
        &mut self,
        zeroes: usize,
        fetch: FetchNow<'_, R>,
        forked: &mut dyn FnMut(Uffd, AddressSpace, PageSet),
    ) -> Result<(), String> {
        let mut events = Vec::new();
        self.uffd.read_events::<16>(&mut events);
        events.sort_by_key(|event| matches!(event, Event::Fault { .. }));
        for event in events {
            match event {
                Event::Fault { address, write_protected: true, .. } => {
                    if self.uffd.write_protect(address, OS_PAGE_BYTES, false) != Reply::Done {
                        self.uffd.wake(address, OS_PAGE_BYTES);
                    }
                }
                Event::Fault { address, .. } => self.serve_fault(address, zeroes, fetch)?,
                Event::Remove { start, end } => self.drop_content(start, end),
                Event::Unmap { start, end } => {
                    self.drop_content(start, end);
                    self.space.remove(start, end, |_| {});
                }
                Event::Remap { from, to, bytes } => self.space.remap(from, to, bytes),
                Event::Fork { child } => forked(child, self.space.clone(), self.absent.clone()),
            }
        }
        Ok(())
    }

    fn serve_fault(&mut self, address: usize, zeroes: usize, fetch: FetchNow<'_, R>) -> Result<(), String> {
        let Some(page) = self.space.page_at(address) else {
            // Memory that grew in place: registered, never filled.
            let _ = self.uffd.copy(address, std::ptr::with_exposed_provenance(zeroes), OS_PAGE_BYTES, false);
            self.uffd.wake(address, OS_PAGE_BYTES);
            return Ok(());
        };
        let count = self.absent.run_at(page, FOSTER_FETCH_PAGES);
        let (extent, from) = if count == 0 {
            (Extent::page(page), zeroes)
        } else {
            let extent = Extent::new(page, count);
            (extent, fetch(self.region, extent)?)
        };
        let (uffd, absent) = (&self.uffd, &mut self.absent);
        self.space.pieces(extent, |piece| {
            let mut done = 0;
            while done < piece.bytes {
                let source = from + piece.offset_pages as usize * OS_PAGE_BYTES + done;
                let bytes = match uffd.copy(piece.start + done, std::ptr::with_exposed_provenance(source), piece.bytes - done, false) {
                    Reply::Done => piece.bytes - done,
                    Reply::Partial(part) => part,
                    // The child changes its mappings: the thread asks again.
                    Reply::MapChanging | Reply::NoMemory => {
                        uffd.wake(piece.start + done, piece.bytes - done);
                        return;
                    }
                    Reply::AlreadyMapped | Reply::Gone | Reply::Busy | Reply::Exiting => {
                        uffd.wake(piece.start + done, OS_PAGE_BYTES);
                        OS_PAGE_BYTES
                    }
                };
                let first = extent.first.offset(u64::from(piece.offset_pages) + (done / OS_PAGE_BYTES) as u64);
                absent.remove(Extent::new(first, u32::try_from(bytes / OS_PAGE_BYTES).expect("a few pages")));
                done += bytes;
            }
        });
        Ok(())
    }

    fn drop_content(&mut self, start: usize, end: usize) {
        let absent = &mut self.absent;
        self.space.extents_in(start, end, |_, extent| absent.remove(extent));
    }

    /// Ends the fostering: the child gets its context and what it must know.
    #[must_use]
    pub fn hand_over(self) -> (Uffd, ChildMemory, R) {
        let memory = ChildMemory { spans: self.space.spans().to_vec(), absent: self.absent.extents() };
        (self.uffd, memory, self.region)
    }
}

impl ChildMemory {
    /// As 64-bit little-endian words: number of spans, (start, pages, first index) each; number of runs, (first, pages) each.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut words = vec![self.spans.len() as u64];
        words.extend(self.spans.iter().flat_map(|s| [s.start as u64, u64::from(s.pages), s.first.0]));
        words.push(self.absent.len() as u64);
        words.extend(self.absent.iter().flat_map(|e| [e.first.0, u64::from(e.count)]));
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// `None` for anything that `encode` did not make.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")));
        let mut next = || words.next();
        let mut memory = Self::default();
        for _ in 0..next()? {
            let (start, pages, first) = (next()?, next()?, next()?);
            memory.spans.push(Span { start: usize::try_from(start).ok()?, pages: u32::try_from(pages).ok()?, first: PageIndex(first) });
        }
        for _ in 0..next()? {
            let (first, count) = (next()?, next()?);
            memory.absent.push(Extent::new(PageIndex(first), u32::try_from(count).ok()?));
        }
        next().is_none().then_some(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn e(first: u64, count: u32) -> Extent {
        Extent::new(PageIndex(first), count)
    }

    #[test]
    fn a_page_set_merges_splits_and_finds_runs() {
        let mut set = PageSet::default();
        set.insert(e(10, 5));
        set.insert(e(20, 5));
        set.insert(e(15, 5));
        assert_eq!(set.extents(), [e(10, 15)]);
        set.remove(e(12, 2));
        assert_eq!(set.extents(), [e(10, 2), e(14, 11)]);
        assert_eq!(set.run_at(PageIndex(14), 4), 4);
        assert_eq!(set.run_at(PageIndex(24), 4), 1);
        assert_eq!(set.run_at(PageIndex(12), 4), 0);
        set.insert(e(11, 6));
        assert_eq!(set.extents(), [e(10, 15)]);
        set.remove(e(0, 100));
        assert_eq!(set.extents(), []);
    }

    #[test]
    fn child_memory_survives_the_journey_and_nothing_else_does() {
        let memory =
            ChildMemory { spans: vec![Span { start: 0x7000_0000, pages: 7, first: PageIndex(3) }], absent: vec![e(3, 2), e(6, 1)] };
        let bytes = memory.encode();
        assert_eq!(ChildMemory::decode(&bytes), Some(memory));
        assert_eq!(ChildMemory::decode(&bytes[..bytes.len() - 8]), None);
        assert_eq!(ChildMemory::decode(&[0xff; 64]), None);
    }
}
