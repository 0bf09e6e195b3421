//! The pin-down cache: which memory is registered (pinned) for zero-copy transfers, and what is unpinned when
//! too much is pinned.
//!
//! FireCluster (Sato, Hyodo, Nakayama) pins memory for a transfer and afterwards only marks it unused. It
//! unpins memory when the user's allowance of pinned memory is exceeded. A look-up without a kernel call
//! decides whether a transfer needs to pin at all. Here that table is a map of disjoint intervals over a list
//! of registrations:
//!
//! ```text
//!   pages          0 1 2 3 4 5 6 7 8 9 …
//!   intervals        [--A--]   [A][-B-]      where a look-up finds something
//!   registrations    A: pages 1 to 7, used by 2     B: pages 7 to 9, unused
//! ```
//!
//! * A request that lies in one interval is a *hit*. Everything else is a miss: one new registration covers
//!   the request and the intervals it overlaps (*merge*), which it takes over.
//! * Memory that the program unmapped, moved or dropped is cut out of the intervals at once
//!   ([`PinCache::invalidate`]), perhaps in the middle of one (*split*): a registration still refers to the
//!   old pages, so no look-up may find it. The rest of it can still be found while that is at least half.
//! * A registration that no look-up can find any more is ended as soon as it is unused, and never while it is
//!   in use.
//!
//! Inputs are method calls; [`PinCache::poll`] gives the kernel's work in the order in which it has to be
//! done. The cache registers nothing itself, knows no address (a page is a number), and never decides
//! *whether* copying would be cheaper: see [`crate::path`].
//!
//! Read this page's [`PinCache`] first, then [`path`] (copy or zero copy).
#![forbid(unsafe_code)]

use rampool_wire::units::PageIndex;
use std::collections::VecDeque;

pub mod path;
mod policy;

use policy::LeastRecentlyUsed;

/// Consecutive pages of one address space, from `first` up to but not including `end`. Never empty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Span {
    first: PageIndex,
    end: PageIndex,
}

impl Span {
    /// The pages from `first` up to but not including `end`; `None` if the span is empty.
    #[must_use]
    pub fn new(first: PageIndex, end: PageIndex) -> Option<Self> {
        (first < end).then_some(Self { first, end })
    }

    /// The pages that `bytes` bytes at `address` touch; `None` for no bytes, or bytes beyond the end of the
    /// address space.
    #[must_use]
    pub fn of_bytes(address: u64, bytes: u64, page_bytes: u64) -> Option<Self> {
        let last = address.checked_add(bytes.checked_sub(1)?)?;
        Self::new(PageIndex(address / page_bytes), PageIndex(last / page_bytes + 1))
    }

    #[must_use]
    pub fn first(&self) -> PageIndex {
        self.first
    }

    /// The page after the last.
    #[must_use]
    pub fn end(&self) -> PageIndex {
        self.end
    }

    #[must_use]
    pub fn pages(&self) -> u64 {
        self.end.0 - self.first.0
    }

    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.first <= other.first && other.end <= self.end
    }

    /// The pages that both have.
    #[must_use]
    pub fn overlap(&self, other: &Self) -> Option<Self> {
        Self::new(self.first.max(other.first), self.end.min(other.end))
    }

    /// The shortest span that covers both.
    #[must_use]
    pub fn hull(&self, other: &Self) -> Self {
        Self { first: self.first.min(other.first), end: self.end.max(other.end) }
    }
}

/// Names a registration: its place in the kernel's table, and how often that place was used before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RegistrationId {
    pub index: u32,
    pub generation: u32,
}

/// Memory that stays registered until [`PinCache::release`].
#[must_use]
#[derive(PartialEq, Eq, Debug)]
pub struct Held {
    registration: RegistrationId,
    /// From the registration's first page to the first that was asked for.
    offset_pages: u64,
}

impl Held {
    #[must_use]
    pub fn registration(&self) -> RegistrationId {
        self.registration
    }

    #[must_use]
    pub fn offset_pages(&self) -> u64 {
        self.offset_pages
    }
}

/// Work for the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output {
    /// Register these pages in this place of the table; report with [`PinCache::registered`] or
    /// [`PinCache::refused`].
    Register { id: RegistrationId, span: Span },
    /// End this registration. It is unused.
    Deregister { id: RegistrationId, span: Span },
}

/// Why memory is not registered: the caller copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    #[error("{pages} pages are more than one registration may have ({most})")]
    TooLarge { pages: u64, most: u64 },
    #[error("{wanted} pages do not fit the allowance of {allowance} while {used} are in use")]
    Allowance { wanted: u64, allowance: u64, used: u64 },
    #[error("all {0} places for registrations are in use")]
    Places(u32),
}

/// What the cache may pin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Pages that all registrations together may have, the unused ones included.
    pub allowance_pages: u64,
    /// Pages of one registration.
    pub registration_pages: u64,
    /// Registrations at one time.
    pub registrations: u32,
}

/// Outcomes of look-ups, and work done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Counts {
    pub hits: u64,
    pub misses: u64,
    pub registered: u64,
    pub deregistered: u64,
    /// Registrations that were ended for others to fit the allowance.
    pub unpinned: u64,
    /// Ranges from which something was cut because the program changed its mappings.
    pub invalidated: u64,
    /// Registrations that the kernel refused.
    pub refused: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    /// The kernel is working on it; a caller waits for this part.
    Registering {
        wanted: Span,
    },
    Registered,
}

#[derive(Clone, Debug)]
struct Registration {
    generation: u32,
    state: State,
    span: Span,
    /// Pages that look-ups can find.
    reachable: u64,
    uses: u32,
}

#[derive(Clone, Copy, Debug)]
struct Interval {
    span: Span,
    index: u32,
}

/// The pin-down cache of one address space.
///
/// Invariants ([`PinCache::check`]): intervals are disjoint and in order, each within its registration;
/// `pinned = sum of the pages of all registrations <= allowance` (unless the allowance was lowered while they
/// were in use); a registration is in order if and only if it is unused; an unused one can be
/// found for at least half of its pages.
#[derive(Debug)]
pub struct PinCache {
    limits: Limits,
    order: LeastRecentlyUsed,
    intervals: Vec<Interval>,
    registrations: Vec<Registration>,
    free: Vec<u32>,
    pinned_pages: u64,
    /// Of those, the ones of registrations that are in use or being made.
    used_pages: u64,
    used: u32,
    /// The interval of the last hit.
    last: usize,
    outputs: VecDeque<Output>,
    counts: Counts,
}

impl PinCache {
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            order: LeastRecentlyUsed::default(),
            intervals: Vec::new(),
            registrations: Vec::new(),
            free: Vec::new(),
            pinned_pages: 0,
            used_pages: 0,
            used: 0,
            last: 0,
            outputs: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    /// A registration that covers all of `span`, if there is one. No kernel call, no allocation.
    pub fn look_up(&mut self, span: Span) -> Option<Held> {
        let Some(at) = self.find(span) else {
            self.counts.misses += 1;
            return None;
        };
        self.last = at;
        let index = self.intervals[at].index;
        let registration = &self.registrations[index as usize];
        if registration.state != State::Registered {
            self.counts.misses += 1;
            return None;
        }
        self.counts.hits += 1;
        Some(self.hold(index, span))
    }

    /// After a miss: makes room for a registration of `span` and everything that overlaps it, and orders it.
    /// Drain [`PinCache::poll`] next.
    ///
    /// # Errors
    /// [`Refused`]; nothing has changed then.
    pub fn admit(&mut self, span: Span) -> Result<RegistrationId, Refused> {
        let Limits { allowance_pages, registration_pages, registrations } = self.limits;
        let fits = |span: &Span| {
            span.pages() <= registration_pages && self.used_pages + span.pages() <= allowance_pages
        };
        let overlapping = self.overlapping(span);
        let merged = self.intervals[overlapping].iter().fold(span, |all, interval| all.hull(&interval.span));
        let whole = if fits(&merged) { merged } else { span };
        if whole.pages() > registration_pages {
            return Err(Refused::TooLarge { pages: whole.pages(), most: registration_pages });
        }
        if !fits(&whole) {
            return Err(Refused::Allowance {
                wanted: whole.pages(),
                allowance: allowance_pages,
                used: self.used_pages,
            });
        }
        if self.used >= registrations {
            return Err(Refused::Places(registrations));
        }
        self.cut(whole);
        while self.pinned_pages + whole.pages() > allowance_pages || self.live() >= registrations {
            assert!(self.unpin_one(), "an unused registration can be unpinned");
        }
        let fresh = Registration {
            generation: 0,
            state: State::Registering { wanted: span },
            span: whole,
            reachable: whole.pages(),
            uses: 0,
        };
        let index = match self.free.pop() {
            Some(index) => {
                let place = &mut self.registrations[index as usize];
                *place = Registration { generation: place.generation.wrapping_add(1), ..fresh };
                index
            }
            None => {
                self.registrations.push(fresh);
                u32::try_from(self.registrations.len() - 1).expect("fewer than `Limits::registrations`")
            }
        };
        self.pinned_pages += whole.pages();
        self.used_pages += whole.pages();
        self.used += 1;
        let at = self.intervals.partition_point(|interval| interval.span.first < whole.first);
        self.intervals.insert(at, Interval { span: whole, index });
        let id = self.id(index);
        self.outputs.push_back(Output::Register { id, span: whole });
        Ok(id)
    }

    /// The kernel has carried out an [`Output::Register`]. Returns the request, unless it was invalidated
    /// or overlapped in the meantime: ask again, or copy.
    ///
    /// # Panics
    /// If it is not being registered.
    pub fn registered(&mut self, id: RegistrationId) -> Option<Held> {
        let wanted = self.end_registering(id, true);
        self.counts.registered += 1;
        let found = self.find(wanted).is_some_and(|at| self.intervals[at].index == id.index);
        if found {
            return Some(self.hold(id.index, wanted));
        }
        self.keep_or_end(id.index);
        None
    }

    /// The kernel could not register it.
    ///
    /// # Panics
    /// If it is not being registered.
    pub fn refused(&mut self, id: RegistrationId) {
        self.end_registering(id, false);
        self.counts.refused += 1;
        self.hide(id.index);
        self.forget(id.index);
    }

    /// Ends a use.
    ///
    /// # Panics
    /// If it was not held.
    pub fn release(&mut self, held: Held) {
        let Held { registration: id, .. } = held;
        let registration = &mut self.registrations[id.index as usize];
        assert!(
            registration.generation == id.generation && registration.uses > 0,
            "what is released was held"
        );
        registration.uses -= 1;
        if registration.uses == 0 {
            self.used_pages -= registration.span.pages();
            self.used -= 1;
            self.keep_or_end(id.index);
        }
    }

    /// The pages of `span` have changed: unmapped, moved or dropped. No look-up finds their old registration
    /// from now on.
    pub fn invalidate(&mut self, span: Span) {
        if self.cut(span) {
            self.counts.invalidated += 1;
        }
    }

    /// Any mapping may have changed.
    pub fn invalidate_all(&mut self) {
        if let (Some(first), Some(last)) = (self.intervals.first(), self.intervals.last()) {
            self.invalidate(first.span.hull(&last.span));
        }
    }

    /// Unpins everything unused, for example when the kernel refuses to pin more.
    pub fn unpin_unused(&mut self) {
        while self.unpin_one() {}
    }

    /// Changes the allowance; unused memory that no longer fits is unpinned.
    pub fn allow(&mut self, pages: u64) {
        self.limits.allowance_pages = pages;
        while self.pinned_pages > pages && self.unpin_one() {}
    }

    /// The kernel's next piece of work, in the order in which it has to be done.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    #[must_use]
    pub fn pinned_pages(&self) -> u64 {
        self.pinned_pages
    }

    /// The pinned pages whose registrations are in use or being made.
    #[must_use]
    pub fn used_pages(&self) -> u64 {
        self.used_pages
    }

    /// The number of registrations.
    #[must_use]
    pub fn live(&self) -> u32 {
        u32::try_from(self.registrations.len() - self.free.len()).expect("at most `Limits::registrations`")
    }

    /// The invariants.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        let mut before = PageIndex(0);
        let mut reachable = vec![0; self.registrations.len()];
        for Interval { span, index } in &self.intervals {
            let registration = &self.registrations[*index as usize];
            assert!(span.first < span.end && before <= span.first, "intervals are disjoint and in order");
            assert!(
                registration.span.covers(span) && registration.state != State::Free,
                "an interval is within its registration"
            );
            reachable[*index as usize] += span.pages();
            before = span.end;
        }
        let (mut pinned, mut used_pages, mut used) = (0, 0, 0);
        for (registration, reachable) in self.registrations.iter().zip(reachable) {
            match registration.state {
                State::Free => {
                    assert_eq!((registration.uses, reachable), (0, 0), "nothing is left of what has ended");
                    continue;
                }
                State::Registering { .. } => {
                    assert_eq!(registration.uses, 0, "an unfinished registration is unused")
                }
                State::Registered => {}
            }
            assert_eq!(registration.reachable, reachable, "the pages that can be found are counted");
            pinned += registration.span.pages();
            if registration.uses > 0 || registration.state != State::Registered {
                used += 1;
                used_pages += registration.span.pages();
            } else {
                assert!(
                    2 * reachable >= registration.span.pages(),
                    "an unused registration can be found, or is ended"
                );
            }
        }
        assert_eq!(
            (self.pinned_pages, self.used_pages, self.used),
            (pinned, used_pages, used),
            "pages and uses are counted"
        );
        assert!(
            pinned <= self.limits.allowance_pages || pinned == used_pages,
            "unused memory is pinned within the allowance only"
        );
    }

    fn id(&self, index: u32) -> RegistrationId {
        RegistrationId { index, generation: self.registrations[index as usize].generation }
    }

    /// The interval that covers the span.
    fn find(&self, span: Span) -> Option<usize> {
        if self.intervals.get(self.last).is_some_and(|interval| interval.span.covers(&span)) {
            return Some(self.last);
        }
        let at =
            self.intervals.partition_point(|interval| interval.span.first <= span.first).checked_sub(1)?;
        (span.end <= self.intervals[at].span.end).then_some(at)
    }

    /// The intervals that overlap the span.
    fn overlapping(&self, span: Span) -> std::ops::Range<usize> {
        let from = self.intervals.partition_point(|interval| interval.span.end <= span.first);
        let count = self.intervals[from..].partition_point(|interval| interval.span.first < span.end);
        from..from + count
    }

    fn hold(&mut self, index: u32, span: Span) -> Held {
        let registration = &mut self.registrations[index as usize];
        if registration.uses == 0 {
            self.used_pages += registration.span.pages();
            self.used += 1;
            self.order.taken(index);
        }
        registration.uses += 1;
        Held {
            registration: RegistrationId { index, generation: registration.generation },
            offset_pages: span.first.0 - registration.span.first.0,
        }
    }

    fn end_registering(&mut self, id: RegistrationId, worked: bool) -> Span {
        let registration = &mut self.registrations[id.index as usize];
        let State::Registering { wanted } = registration.state else {
            panic!("{id:?} is not being registered")
        };
        assert_eq!(registration.generation, id.generation, "it is this one that is being registered");
        registration.state = State::Registered;
        self.used_pages -= registration.span.pages();
        self.used -= 1;
        if worked {
            // In order from here on, as everything that is registered and not in use.
            self.order.unused(id.index);
        }
        wanted
    }

    /// Cuts the span out of all intervals. Returns whether it overlapped any.
    fn cut(&mut self, span: Span) -> bool {
        let range = self.overlapping(span);
        if range.is_empty() {
            return false;
        }
        let mut left: Vec<Interval> = Vec::new();
        let cut: Vec<Interval> = self.intervals[range.clone()].to_vec();
        for Interval { span: old, index } in &cut {
            self.registrations[*index as usize].reachable -=
                old.overlap(&span).map_or(0, |both| both.pages());
            let rests = [Span::new(old.first, span.first), Span::new(span.end, old.end)];
            left.extend(rests.into_iter().flatten().map(|span| Interval { span, index: *index }));
        }
        self.intervals.splice(range, left);
        for Interval { index, .. } in cut {
            let registration = &self.registrations[index as usize];
            if registration.state == State::Registered && registration.uses == 0 {
                self.order.taken(index);
                self.keep_or_end(index);
            }
        }
        true
    }

    /// Of an unused registration: keeps it, in order, or ends it.
    fn keep_or_end(&mut self, index: u32) {
        let registration = &self.registrations[index as usize];
        assert!(
            registration.state == State::Registered && registration.uses == 0,
            "it is registered and unused"
        );
        self.order.unused(index);
        if 2 * registration.reachable < registration.span.pages() {
            self.end(index);
        }
        while self.pinned_pages > self.limits.allowance_pages && self.unpin_one() {}
    }

    fn unpin_one(&mut self) -> bool {
        let Some(index) = self.order.victim() else { return false };
        self.counts.unpinned += 1;
        self.end(index);
        true
    }

    /// Ends an unused registration.
    fn end(&mut self, index: u32) {
        self.order.taken(index);
        self.hide(index);
        self.counts.deregistered += 1;
        self.outputs.push_back(Output::Deregister {
            id: self.id(index),
            span: self.registrations[index as usize].span,
        });
        self.forget(index);
    }

    /// Removes its intervals.
    fn hide(&mut self, index: u32) {
        let mut range = self.overlapping(self.registrations[index as usize].span);
        while let Some(at) = range.next_back() {
            if self.intervals[at].index == index {
                self.intervals.remove(at);
            }
        }
    }

    /// Frees its place.
    fn forget(&mut self, index: u32) {
        let registration = &mut self.registrations[index as usize];
        registration.state = State::Free;
        registration.reachable = 0;
        self.pinned_pages -= registration.span.pages();
        self.free.push(index);
    }
}

#[cfg(test)]
mod tests;
