//! A forked child, served by its parent until it can serve itself.
//!
//! The kernel copies the child's resident pages on write; what is absent is absent in both. The event about
//! the fork brings a context of the child's own, and nothing was installed or moved in the parent between the
//! copy and that event. So, at that moment:
//!
//! * pages whose only content is in an unacknowledged eviction batch are copied into the child at once, or
//!   kept for it where its mappings change already;
//! * everything else that is absent is at the servers, and the child's view of it is a copy-on-write copy of
//!   the region;
//! * a fork fault server ([`ForkFaultServer`]) answers the child's faults from there. A child that was made
//!   by
//!   `fork(3)` soon takes over with a pager of its own ([`ForkFaultServer::hand_over`]); one made by a bare
//!   `clone` system call is served to its end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rampool_kernel::uffd::{Event, Reply, Uffd};
use rampool_kernel::words::last_words;
use rampool_paging::changes::{Change, Doubt, Facts, order};
use rampool_paging::page_set::PageSet;
use rampool_paging::space::{AddressSpace, Span};
use rampool_wire::frame::MAX_PAGE_INDEX;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use crate::events::{born_of, broken_text, change_of, in_order, take_changes};

/// No program has memory from here on.
const HIGHEST: usize = 1 << 56;

/// What a child needs to know to serve itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChildMemory {
    pub spans: Vec<Span>,
    /// Pages whose content is at the servers, sorted.
    pub absent: Vec<Extent>,
}

/// Asks the pager that runs a fork fault server for the bytes of `extent` of `region`, at an address valid
/// until the next call.
pub(crate) type FetchNow<'a, R> = &'a mut dyn FnMut(R, Extent) -> Result<usize, String>;

/// The content of a page that no server has.
type Kept = Arc<[u8; OS_PAGE_BYTES]>;

/// A child that is served by its parent.
#[derive(Debug)]
pub struct ForkFaultServer<R> {
    uffd: Uffd,
    space: AddressSpace,
    /// Pages whose content is at the servers.
    absent: PageSet,
    /// Pages whose content is here alone, because the child's mappings changed just when it was to be copied.
    kept: BTreeMap<PageIndex, Kept>,
    region: R,
    /// Changes that were read and wait for others, with the faults that were read meanwhile.
    events: Vec<Event>,
}

/// Pages fetched by one fault of a child.
pub(crate) const FORKED_FETCH_PAGES: u32 = 16;
/// How long a child that changes its mappings is followed, until there is a moment in which it does not.
const CHANGES_DEADLINE: Duration = Duration::from_secs(10);
/// Pages that are poisoned at once: so many are looked at again when mappings change meanwhile.
const POISONED_AT_ONCE: u32 = 1024;

impl<R: Copy> ForkFaultServer<R> {
    pub(crate) fn new(uffd: Uffd, space: AddressSpace, absent: PageSet, region: R) -> Self {
        Self { uffd, space, absent, kept: BTreeMap::new(), region, events: Vec::new() }
    }

    #[must_use]
    pub fn raw_fd(&self) -> std::os::fd::RawFd {
        self.uffd.raw_fd()
    }
    #[must_use]
    pub fn region(&self) -> R {
        self.region
    }
    pub(crate) fn set_region(&mut self, region: R) {
        self.region = region;
    }

    /// Gives the child a page that no server has: at once, or when it asks.
    ///
    /// # Safety
    /// `content` has an OS page of bytes that do not change meanwhile.
    pub(crate) unsafe fn supply(&mut self, page: PageIndex, content: *const u8) {
        let uffd = &self.uffd;
        let mut given = true;
        self.space.pieces(Extent::page(page), |piece| {
            // A child that is gone needs nothing, nor does one that has the page: it forked after the bytes
            // were copied out and before the page was given back. One whose mappings change is not waited
            // for: its events must be read first.
            let reply = uffd.copy(piece.start, content, piece.bytes, false);
            given &= matches!(reply, Reply::Done | Reply::Exiting | Reply::AlreadyMapped);
        });
        if !given {
            let mut bytes = [0; OS_PAGE_BYTES];
            // SAFETY: the caller's promise.
            unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(content, OS_PAGE_BYTES) };
            self.kept.insert(page, Arc::new(bytes));
        }
    }

    /// This child is not served any more: what it has not got yet is lost to it, and an access to it is a
    /// SIGBUS from now on. Without this, the kernel would answer with zeroes as soon as the context is
    /// closed. Blocks, within limits, until a moment in which the child changes no mapping.
    pub fn give_up(&mut self) {
        let deadline = Instant::now() + CHANGES_DEADLINE;
        for page in std::mem::take(&mut self.kept).into_keys() {
            self.absent.insert(Extent::page(page));
        }
        self.follow();
        while let Some((first, end)) = self.absent.next_from(PageIndex(0)) {
            let most = u64::from(POISONED_AT_ONCE);
            let count = u32::try_from((end.0 - first.0).min(most)).expect("no more than that");
            let extent = Extent::new(first, count);
            let (uffd, mut still) = (&self.uffd, !self.collects());
            self.space.pieces(extent, |piece| still = still && uffd.poison_absent(piece.start, piece.bytes));
            if still {
                self.absent.remove(extent);
            } else if Instant::now() < deadline {
                // A thread that changes mappings goes on once the event has been read, and everything can be
                // poisoned when it has.
                self.follow();
                std::thread::yield_now();
            } else {
                break;
            }
        }
        // Faults that were read are reported again, and answered by the poison.
        self.uffd.wake_all();
    }

    /// Reads the child's changes of mappings, and gives up children that it forks. Faults are read with them,
    /// and wait.
    fn follow(&mut self) {
        // Children last: giving one up may take a while, and meanwhile this one's mappings are what has been
        // read of them.
        let mut born = Vec::new();
        if let Err(doubt) = self.apply_changes(&mut |_| {}, &mut |child| born.push(child)) {
            // Where its pages are is unknown, and what it lacks cannot be poisoned.
            last_words(&format!("rampool: a forked child: {}", broken_text(&doubt.to_string())));
            std::process::abort();
        }
        self.events.retain(|event| !matches!(event, Event::Fault { .. }));
        born.into_iter().for_each(|mut child| child.give_up());
    }

    /// Whether changes that were read wait for others.
    pub(crate) fn collects(&self) -> bool {
        self.events.iter().any(|event| change_of(event).is_some())
    }

    /// Reads events, and follows the changes among them if none is under way any more. Faults stay. `born`
    /// gets a child's context as soon as it was read.
    fn apply_changes(
        &mut self,
        born: &mut dyn FnMut(&Uffd),
        forked: &mut dyn FnMut(Self),
    ) -> Result<(), Doubt> {
        let before = self.events.len();
        while self.uffd.read_events::<16>(&mut self.events) > 0 {}
        born_of(&self.events[before..]).for_each(born);
        let changes: Vec<Change> = self.events.iter().filter_map(change_of).collect();
        if changes.is_empty() || self.uffd.is_changing() {
            return Ok(());
        }
        let order = order(&changes, &self.space, &mut ChildFacts(self))?;
        // Only this server reads events: a change that was begun meanwhile is under way still.
        if self.uffd.is_changing() {
            return Ok(());
        }
        let changes = take_changes(&mut self.events);
        in_order(changes, &order).into_iter().filter_map(|event| self.change(event)).for_each(forked);
        Ok(())
    }

    /// Follows a change of the child's mappings; a fork yields another child with the same region.
    fn change(&mut self, event: Event) -> Option<Self> {
        match event {
            Event::Fault { .. } => {}
            Event::Remove { start, end } => self.drop_content(start, end),
            Event::Unmap { start, end } => {
                self.drop_content(start, end);
                self.space.remove(start, end, |_| {});
            }
            Event::Remap { from, to, bytes } => {
                // Nothing is known there, except where the child was made between a change and its event.
                self.drop_content(to, to + bytes);
                self.space.remove(to, to + bytes, |_| {});
                self.space.remap(from, to, bytes);
            }
            Event::Fork { child } => {
                let (space, absent, kept) = (self.space.clone(), self.absent.clone(), self.kept.clone());
                return Some(Self {
                    uffd: child,
                    space,
                    absent,
                    kept,
                    region: self.region,
                    events: Vec::new(),
                });
            }
        }
        None
    }

    /// Reads and answers the events in the child's context. A child that forks again is given to `forked`,
    /// with the same region.
    ///
    /// # Errors
    /// Why a page could not be brought.
    pub(crate) fn serve(
        &mut self,
        zeroes: usize,
        fetch: FetchNow<'_, R>,
        born: &mut dyn FnMut(&Uffd),
        forked: &mut dyn FnMut(Self),
    ) -> Result<(), String> {
        self.apply_changes(born, forked).map_err(|doubt| doubt.to_string())?;
        if self.collects() {
            return Ok(());
        }
        for event in std::mem::take(&mut self.events) {
            match event {
                Event::Fault { address, write_protected: true, .. } => {
                    if self.uffd.write_protect(address, OS_PAGE_BYTES, false) != Reply::Done {
                        self.uffd.wake(address, OS_PAGE_BYTES);
                    }
                }
                Event::Fault { address, .. } => self.serve_fault(address, zeroes, fetch)?,
                _ => unreachable!("no change is left"),
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
        let kept = self.kept.get(&page).cloned();
        let count = self.absent.run_at(page, FORKED_FETCH_PAGES);
        let (extent, from) = if let Some(content) = &kept {
            (Extent::page(page), content.as_ptr().expose_provenance())
        } else if count == 0 {
            (Extent::page(page), zeroes)
        } else {
            let extent = Extent::new(page, count);
            (extent, fetch(self.region, extent)?)
        };
        let (uffd, absent, still_kept) = (&self.uffd, &mut self.absent, &mut self.kept);
        let mut refused = None;
        self.space.pieces(extent, |piece| {
            let mut done = 0;
            let mut single = false;
            while done < piece.bytes {
                let source = from + piece.offset_pages as usize * OS_PAGE_BYTES + done;
                let wanted = if single { OS_PAGE_BYTES } else { piece.bytes - done };
                let bytes = match uffd.copy(
                    piece.start + done,
                    std::ptr::with_exposed_provenance(source),
                    wanted,
                    false,
                ) {
                    Reply::Done => wanted,
                    Reply::Partial(part) => part,
                    // The child changes its mappings: the thread asks again.
                    Reply::MapChanging | Reply::NoMemory => {
                        uffd.wake(piece.start + done, piece.bytes - done);
                        return;
                    }
                    Reply::AlreadyMapped => {
                        uffd.wake(piece.start + done, OS_PAGE_BYTES);
                        OS_PAGE_BYTES
                    }
                    // Unmapped meanwhile, or divided: the page alone, or the thread asks again once that has
                    // been read.
                    Reply::Gone if piece.bytes - done > OS_PAGE_BYTES && !single => {
                        single = true;
                        continue;
                    }
                    Reply::Gone | Reply::Exiting => {
                        uffd.wake(piece.start + done, piece.bytes - done);
                        return;
                    }
                    reply @ (Reply::Busy | Reply::Unexpected(_)) => {
                        refused = Some(format!(
                            "the kernel does not install its page at {:#x}: {reply:?}",
                            piece.start + done
                        ));
                        return;
                    }
                };
                let first =
                    extent.first.offset(u64::from(piece.offset_pages) + (done / OS_PAGE_BYTES) as u64);
                absent.remove(Extent::new(first, u32::try_from(bytes / OS_PAGE_BYTES).expect("a few pages")));
                if kept.is_some() {
                    still_kept.remove(&page);
                }
                done += bytes;
            }
        });
        refused.map_or(Ok(()), Err)
    }

    fn drop_content(&mut self, start: usize, end: usize) {
        let (absent, kept) = (&mut self.absent, &mut self.kept);
        self.space.extents_in(start, end, |_, extent| {
            absent.remove(extent);
            kept.retain(|page, _| !extent.contains(*page));
        });
    }

    /// Ends the service of this child: the child gets its context and its state.
    ///
    /// # Errors
    /// When pages kept for the child cannot be given to it, because its mappings change without end.
    pub fn hand_over(mut self) -> Result<(Uffd, ChildMemory, R), String> {
        let deadline = Instant::now() + CHANGES_DEADLINE;
        self.follow();
        // Faults that were read are reported again, to the child.
        self.uffd.wake_all();
        while self.collects() || !self.kept.is_empty() {
            let wanted = if self.collects() { None } else { self.kept.pop_first() };
            if let Some((page, content)) = &wanted {
                // SAFETY: a page of bytes that is never written.
                unsafe { self.supply(*page, content.as_ptr()) };
            }
            if wanted.is_none_or(|(page, _)| self.kept.contains_key(&page)) {
                if Instant::now() > deadline {
                    return Err(format!(
                        "its mappings have changed all the time for {} s",
                        CHANGES_DEADLINE.as_secs()
                    ));
                }
                self.follow();
                self.uffd.wake_all();
                std::thread::yield_now();
            }
        }
        let memory =
            ChildMemory { spans: self.space.spans().to_vec(), absent: self.absent.extents().collect() };
        Ok((self.uffd, memory, self.region))
    }
}

/// What the kernel says of a child: which of its pages are present cannot be seen from here.
struct ChildFacts<'a, R>(&'a ForkFaultServer<R>);

impl<R: Copy> Facts for ChildFacts<'_, R> {
    fn is_registered(&mut self, address: usize) -> bool {
        self.0.uffd.is_registered(address) == Some(true)
    }
    fn has_arrived(&mut self, _start: usize, _end: usize) -> bool {
        true
    }
    fn contradicts(&mut self, _start: usize, _extent: Extent) -> bool {
        false
    }
    fn is_resident(&mut self, page: PageIndex) -> bool {
        self.0.absent.run_at(page, 1) == 0 && !self.0.kept.contains_key(&page)
    }
    fn child_has(&mut self, fork: usize, address: usize) -> Option<bool> {
        let changes = self.0.events.iter().filter(|event| change_of(event).is_some());
        match changes.into_iter().nth(fork) {
            Some(Event::Fork { child }) => child.is_registered(address),
            _ => None,
        }
    }
}

impl ChildMemory {
    /// As 64-bit little-endian words: number of spans, (start, pages, first index) each; number of runs,
    /// (first, pages) each.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut words = vec![self.spans.len() as u64];
        words.extend(self.spans.iter().flat_map(|s| [s.start as u64, u64::from(s.pages), s.first.0]));
        words.push(self.absent.len() as u64);
        words.extend(self.absent.iter().flat_map(|e| [e.first.0, u64::from(e.count)]));
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// `None` for anything that `encode` did not make of memory as a process can have it.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        let mut next = || words.next();
        let mut memory = Self::default();
        for _ in 0..next()? {
            let (start, pages, first) = (next()?, next()?, next()?);
            memory.spans.push(Span {
                start: usize::try_from(start).ok()?,
                pages: u32::try_from(pages).ok()?,
                first: PageIndex(first),
            });
        }
        for _ in 0..next()? {
            let (first, count) = (next()?, next()?);
            memory.absent.push(Extent::new(PageIndex(first), u32::try_from(count).ok()?));
        }
        (next().is_none() && rest.is_empty() && memory.is_possible()).then_some(memory)
    }

    /// Spans are as [`AddressSpace`] has them, and pages sorted.
    fn is_possible(&self) -> bool {
        let in_bounds = |extent: &Extent| {
            extent.count > 0 && extent.first.0 <= MAX_PAGE_INDEX && extent.end().0 <= MAX_PAGE_INDEX
        };
        let apart = |extents: &[Extent]| {
            extents.iter().all(in_bounds) && extents.windows(2).all(|two| two[0].end() <= two[1].first)
        };
        let mut indices: Vec<Extent> =
            self.spans.iter().map(|span| Extent::new(span.first, span.pages)).collect();
        indices.sort_unstable_by_key(|extent| extent.first);
        let placed = |span: &Span| span.start.is_multiple_of(OS_PAGE_BYTES) && span.start < HIGHEST;
        self.spans.iter().all(placed)
            && self.spans.windows(2).all(|two| two[0].end() <= two[1].start)
            && apart(&indices)
            && apart(&self.absent)
    }
}

#[cfg(test)]
mod tests {
    use rampool_kernel::memory::Mapping;
    use rampool_kernel::uffd::{Features, Scope};

    use super::*;

    fn e(first: u64, count: u32) -> Extent {
        Extent::new(PageIndex(first), count)
    }

    /// Where pages leave by copying, a fork may come between the copy and the end of the page.
    #[test]
    fn a_child_that_has_a_page_is_not_given_it_again() {
        let Ok(uffd) = Uffd::open(Scope::UserMode, Features::NONE) else {
            return rampool_testing::skip("uffd-user", "a child that has a page");
        };
        let memory = Mapping::anonymous(2 * OS_PAGE_BYTES).unwrap();
        uffd.register(memory.start(), memory.bytes(), false).unwrap();
        let [inherited, left] = [[1u8; OS_PAGE_BYTES], [2u8; OS_PAGE_BYTES]];
        assert_eq!(uffd.copy(memory.start(), inherited.as_ptr(), OS_PAGE_BYTES, false), Reply::Done);
        let spans = [Span { start: memory.start(), pages: 2, first: PageIndex(0) }];
        let mut fork_fault_server =
            ForkFaultServer::new(uffd, AddressSpace::from_spans(&spans), PageSet::default(), ());
        for page in [0, 1] {
            // SAFETY: a page of bytes that lives across the call.
            unsafe { fork_fault_server.supply(PageIndex(page), left.as_ptr()) };
        }
        let (_uffd, handed, ()) = fork_fault_server.hand_over().unwrap();
        assert!(handed.absent.is_empty());
        let first_byte = |page: usize| {
            // SAFETY: both pages are there.
            unsafe { memory.at(page * OS_PAGE_BYTES).read_volatile() }
        };
        assert_eq!([first_byte(0), first_byte(1)], [1, 2]);
    }

    #[test]
    fn child_memory_survives_the_journey_and_nothing_else_does() {
        let memory = ChildMemory {
            spans: vec![Span { start: 0x7000_0000, pages: 7, first: PageIndex(3) }],
            absent: vec![e(3, 2), e(6, 1)],
        };
        let bytes = memory.encode();
        assert_eq!(ChildMemory::decode(&bytes), Some(memory));
        assert_eq!(ChildMemory::decode(&bytes[..bytes.len() - 8]), None);
        assert_eq!(ChildMemory::decode(&[0xff; 64]), None);
        assert_eq!(ChildMemory::decode(&[&bytes[..], &[0]].concat()), None, "a part of a word");
        let span = |start, first| Span { start, pages: 2, first: PageIndex(first) };
        let impossible = [
            ChildMemory { spans: vec![span(0x1000, 0), span(0x2000, 2)], absent: vec![] },
            ChildMemory { spans: vec![span(0x1000, 0), span(0x8000, 1)], absent: vec![] },
            ChildMemory { spans: vec![span(0x1001, 0)], absent: vec![] },
            ChildMemory { spans: vec![span(usize::MAX - 4095, 0)], absent: vec![] },
            ChildMemory { spans: vec![span(0x1000, MAX_PAGE_INDEX - 1)], absent: vec![] },
            ChildMemory { spans: vec![], absent: vec![e(4, 2), e(5, 2)] },
            ChildMemory { spans: vec![], absent: vec![e(4, 0)] },
            ChildMemory { spans: vec![], absent: vec![e(u64::MAX, 1)] },
        ];
        impossible
            .iter()
            .for_each(|memory| assert_eq!(ChildMemory::decode(&memory.encode()), None, "{memory:?}"));
    }
}
