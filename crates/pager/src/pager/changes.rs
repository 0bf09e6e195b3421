//! Changes of mappings: collected while the kernel counts one as under way, then applied in the order in which
//! they were made ([`rampool_paging::changes`]).
//!
//! Meanwhile nothing comes and nothing leaves, as if the kernel refused it: for the kernel does so only up to the
//! moment at which the last caller runs again, and the pager learns of that moment later.

use std::time::{Duration, Instant};

use rampool_kernel::maps::{Maps, Pagemap};
use rampool_kernel::uffd::{Event, Uffd};
use rampool_paging::cache::{Cache, Input};
use rampool_paging::changes::{Change, Facts, Order, order};
use rampool_paging::given_up::GivenUp;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use super::{EVENTS_KEPT, Pager, Supervisor, sleep_on};
use crate::backing::Backing;
use crate::events::{change_of, in_order, take_changes};
use crate::fault::FaultCatcher;

/// Looks at the kernel's count that only yield the CPU to the threads that are to run; then the pager sleeps.
const YIELDS: u32 = 64;
const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

struct KernelFacts<'a> {
    faults: &'a FaultCatcher,
    cache: &'a Cache,
    /// `None`: which pages are there cannot be told, or says nothing.
    pagemap: Option<&'a Pagemap>,
    maps: Option<Maps>,
    /// The contexts of children, by the numbers of the changes.
    children: Vec<Option<&'a Uffd>>,
}

impl Facts for KernelFacts<'_> {
    fn is_registered(&mut self, address: usize) -> bool {
        self.faults.is_registered(address)
    }

    fn has_arrived(&mut self, start: usize, end: usize) -> bool {
        let mut present = Vec::new();
        if let Some(pagemap) = self.pagemap {
            pagemap.present_runs(start, end, &mut present);
        }
        let vma = self.maps.as_ref().and_then(|maps| maps.at(start));
        !present.is_empty() || vma.is_none_or(|vma| vma.start == start)
    }

    fn contradicts(&mut self, start: usize, extent: Extent) -> bool {
        let Some(pagemap) = self.pagemap else { return false };
        extent.pages().zip((start..).step_by(OS_PAGE_BYTES)).any(|(page, address)| {
            self.cache.is_expected(page).is_some_and(|expected| pagemap.has(address) == Ok(!expected))
        })
    }

    fn is_resident(&mut self, page: PageIndex) -> bool {
        self.cache.is_resident(page)
    }

    fn child_has(&mut self, fork: usize, address: usize) -> Option<bool> {
        self.children[fork]?.is_registered(address)
    }
}

/// What is known of the program's mappings beyond where its managed pages are.
pub(super) struct Mappings {
    /// What was read and not handled yet.
    pub events: Vec<Event>,
    /// How often changes that were read were looked at, and could not be applied yet.
    pub collecting: u32,
    /// Changes are being passed to the cache: its outputs wait for the last of them.
    pub changing: bool,
    /// A fork is under way that the kernel will not report: no page leaves.
    pub frozen: bool,
    /// What is never taken over.
    pub left_out: Vec<(usize, usize)>,
    pub given_up: GivenUp,
}

impl Default for Mappings {
    fn default() -> Self {
        Self {
            events: Vec::with_capacity(EVENTS_KEPT),
            collecting: 0,
            changing: false,
            frozen: false,
            left_out: Vec::new(),
            given_up: GivenUp::default(),
        }
    }
}

impl<B: Backing> Pager<B> {
    /// Whether changes that were read wait for others.
    pub(crate) fn collects(&self) -> bool {
        self.mappings.collecting > 0
    }

    /// Tells the cache, and the supervisor, of the changes among `events`, and takes them out, if no change is
    /// under way; returns whether that is so.
    pub(super) fn apply_changes(
        &mut self,
        events: &mut Vec<Event>,
        supervisor: &mut impl Supervisor<B>,
    ) -> bool {
        let changes: Vec<Change> = events.iter().filter_map(change_of).collect();
        if changes.is_empty() {
            return true;
        }
        let order = if self.faults.is_changing() { None } else { self.order(events, &changes) };
        let Some(order) = order else {
            self.mappings.collecting += 1;
            self.faults.hold(true);
            return false;
        };
        self.mappings.collecting = 0;
        self.faults.hold(false);
        // All of them before anything makes the cache install or move: what follows from one change could undo
        // what the next has to be told of.
        self.mappings.changing = true;
        for change in &changes {
            change.ranges().for_each(|(start, end)| self.refusals.explained(start, end));
        }
        for event in in_order(take_changes(events), &order) {
            self.serve_event(event, supervisor);
        }
        for extent in order.either {
            self.unchanged.forget(extent);
            if let Some(verify) = &mut self.verify {
                verify.forget(extent);
            }
            self.tell(Input::Unguarded { extent });
        }
        self.mappings.changing = false;
        self.follow_through();
        true
    }

    /// The order of the changes; `None` where another one has begun while the kernel was asked.
    fn order(&mut self, events: &[Event], changes: &[Change]) -> Option<Order> {
        let mut facts = KernelFacts {
            faults: &self.faults,
            cache: &self.cache,
            pagemap: (self.pagemap.is_readable() && self.lost.is_none()).then_some(&self.pagemap),
            maps: Maps::open().ok(),
            children: events
                .iter()
                .filter(|event| change_of(event).is_some())
                .map(|event| if let Event::Fork { child } = event { Some(child) } else { None })
                .collect(),
        };
        let order = order(changes, &self.space, &mut facts);
        // Only the pager reads events: a change that was begun meanwhile is under way still.
        if self.faults.is_changing() {
            return None;
        }
        Some(order.unwrap_or_else(|doubt| {
            // A single thread tells of each change before it makes the next one.
            if !rampool_kernel::thread::program_has_one() {
                self.breaks(|| doubt.to_string());
            }
            Order { steps: (0..changes.len()).collect(), ..Order::default() }
        }))
    }

    /// Lets the threads that change mappings run.
    pub(super) fn let_changes_end(&self) {
        if self.mappings.collecting < YIELDS {
            std::thread::yield_now();
        } else {
            let longer = SHORTEST_SLEEP.saturating_mul(self.mappings.collecting / YIELDS);
            let mut fds = [libc::pollfd { fd: self.faults.raw_fd(), events: libc::POLLIN, revents: 0 }];
            sleep_on(&mut fds, longer.min(LONGEST_SLEEP));
        }
    }

    /// Serves events until no change that was read waits for others.
    pub(crate) fn settle(
        &mut self,
        supervisor: &mut impl Supervisor<B>,
        deadline: Instant,
    ) -> Result<(), String> {
        while self.collects() {
            if Instant::now() > deadline {
                return Err("the program changes its mappings all the time".into());
            }
            self.let_changes_end();
            self.serve_events(supervisor);
        }
        Ok(())
    }
}
