//! Changes of mappings as the kernel makes them: step by step, with preemption between any two.
//!
//! ```text
//!   MADV_DONTNEED, MADV_FREE   announced --read--> caller wakes --> the pages go, one by one
//!   munmap, mremap, fork       done --> announced --read--> caller wakes
//! ```
//!
//! From the announcement on, or from before the change where that comes first, the kernel refuses every
//! install and every move, until the caller has woken. That is some time after the announcement was read.
//! What is given up goes later still: by then the kernel installs and moves again.

use rampool_paging::cache::{Access, Input};
use rampool_wire::units::{Extent, PageIndex};

use super::{Op, World, nth};
use crate::paging::Mutation;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Remove,
    /// MADV_FREE: the pages stay until the kernel wants them, or the program writes.
    Free,
    Unmap,
    Remap,
    Fork,
}

impl Kind {
    /// The mutant that acts before it is told of such a change, which it has read.
    fn told_too_late(self) -> Mutation {
        match self {
            Kind::Remove | Kind::Free => Mutation::ActsBeforeRemove,
            Kind::Unmap => Mutation::ActsBeforeUnmap,
            Kind::Remap => Mutation::ActsBeforeRemap,
            Kind::Fork => Mutation::ActsBeforeFork,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The change is made, and will be announced.
    Made,
    Announced,
    /// The caller may wake.
    Read,
    /// The caller runs: nothing is refused on its behalf any more.
    Awake,
}

/// What a child has got by a fork, and what it is to see.
#[derive(Debug)]
struct Copied {
    mapped: Option<u64>,
    golden: u64,
    may_be_zero: bool,
    removals: u64,
}

#[derive(Debug)]
pub(super) struct Change {
    kind: Kind,
    extent: Extent,
    phase: Phase,
    /// The order of announcements.
    announced: u64,
    /// Pages that are still to go.
    left: Vec<u64>,
    child: Vec<Copied>,
}

impl World {
    /// The kernel installs and moves nothing just now.
    pub(super) fn refuses(&self) -> bool {
        self.changes.iter().any(|change| change.phase != Phase::Awake)
    }

    pub(super) fn changes_under_way(&self) -> bool {
        !self.changes.is_empty()
    }

    /// A thread of the program calls.
    pub(super) fn begin(&mut self, kind: Kind, extent: Extent) {
        let mut change =
            Change { kind, extent, phase: Phase::Made, announced: 0, left: Vec::new(), child: Vec::new() };
        match kind {
            Kind::Remove | Kind::Free => {
                self.announce(&mut change);
                self.will_go(&mut change);
            }
            Kind::Unmap => {
                self.misses(extent);
                for page in extent.pages() {
                    self.unmap(page.0);
                    let model = &mut self.pages[nth(page.0)];
                    model.leaving |= model.managed;
                    model.managed = false;
                }
            }
            Kind::Remap => {
                self.misses(extent);
                extent.pages().for_each(|page| self.pages[nth(page.0)].moving += 1);
            }
            Kind::Fork => {
                let copied = |model: &super::PageModel| Copied {
                    mapped: model.mapped.map(|frame| frame.content),
                    golden: model.golden,
                    may_be_zero: model.may_be_zero,
                    removals: model.removals,
                };
                change.child = self.pages.iter().map(copied).collect();
            }
        }
        self.changes.push(change);
        while !self.plan.concurrent && self.changes_under_way() {
            self.step_change();
            self.read_events();
        }
    }

    /// Pages whose removal was read of before they were adopted, and is still to come.
    pub(super) fn begin_before_adoption(&mut self, extent: Extent) {
        let mut change = Change {
            kind: Kind::Remove,
            extent,
            phase: Phase::Awake,
            announced: 0,
            left: Vec::new(),
            child: Vec::new(),
        };
        self.will_go(&mut change);
        self.changes.push(change);
    }

    fn announce(&mut self, change: &mut Change) {
        self.announcements += 1;
        change.announced = self.announcements;
        change.phase = Phase::Announced;
    }

    fn will_go(&mut self, change: &mut Change) {
        for page in change.extent.pages() {
            let model = &mut self.pages[nth(page.0)];
            if model.managed {
                model.written &= model.removals_left > 0;
                model.removals_left += 1;
                model.removals += 1;
                model.may_be_zero = true;
                change.left.push(page.0);
            }
        }
    }

    /// Pages that are still to leave from here stay: they were moved, or are gone.
    fn misses(&mut self, extent: Extent) {
        let mut changes = std::mem::take(&mut self.changes);
        for change in &mut changes {
            for page in change.left.extract_if(.., |page| extent.contains(PageIndex(*page))) {
                self.gone(page, false);
            }
        }
        self.changes = changes;
    }

    /// A removal is over for this page; `was_mapped`: it was there and went.
    fn gone(&mut self, page: u64, was_mapped: bool) {
        let model = &mut self.pages[nth(page)];
        model.removals_left -= 1;
        if let Some(frame) = model.mapped {
            // It stays, and what it holds is what the program will see.
            assert!(
                frame.content == model.golden || (model.may_be_zero && frame.content == 0),
                "page {page} has another page's content"
            );
            model.golden = frame.content;
            model.may_be_zero = model.removals_left > 0;
        } else if was_mapped || !model.written {
            model.golden = 0;
            model.may_be_zero = false;
        }
    }

    /// One step of one caller.
    pub(super) fn step_change(&mut self) {
        if self.changes.is_empty() {
            return;
        }
        let at = self.rng.index(self.changes.len());
        let mut change = self.changes.swap_remove(at);
        match change.phase {
            Phase::Made => self.announce(&mut change),
            // The pager's turn.
            Phase::Announced => {}
            Phase::Read => change.phase = Phase::Awake,
            Phase::Awake => {
                // Preempted before it takes any page away, or between two.
                let pages = if self.rng.one_in(self.plan.lateness) { self.rng.between(1, 8) } else { 0 };
                for _ in 0..pages {
                    if !change.left.is_empty() {
                        self.take_away(change.kind, change.left.remove(0));
                    }
                }
            }
        }
        if change.phase != Phase::Awake || !change.left.is_empty() {
            self.changes.push(change);
        }
    }

    fn take_away(&mut self, kind: Kind, page: u64) {
        if kind == Kind::Free
            && let Some(frame) = &mut self.pages[nth(page)].mapped
        {
            frame.lazy = true;
            return self.gone(page, false);
        }
        let was_mapped = self.unmap(page).is_some();
        self.gone(page, was_mapped);
    }

    /// A page that is still to go is asked for: by a thread that was interrupted since, or because the
    /// program does not care.
    pub(super) fn stale_fault_on_what_goes(&mut self) {
        let at = self.rng.index(self.changes.len());
        let Some(&page) = self.changes[at].left.first() else { return };
        let access = [Access::Read, Access::Write, Access::WriteProtected][self.rng.index(3)];
        self.handle(Input::Fault { page: PageIndex(page), access });
    }

    /// The kernel wants a page back that was freed lazily.
    pub(super) fn reclaim(&mut self) {
        let lazy: Vec<u64> = (0..self.plan.pages)
            .filter(|page| self.pages[nth(*page)].mapped.is_some_and(|frame| frame.lazy))
            .collect();
        if !lazy.is_empty() {
            let page = lazy[self.rng.index(lazy.len())];
            self.unmap(page);
            self.pages[nth(page)].golden = 0;
        }
    }

    /// The pager reads what was announced, oldest first, perhaps several at once, and tells the cache.
    pub(super) fn read_events(&mut self) {
        let mut announced: Vec<u64> =
            self.changes.iter().filter(|c| c.phase == Phase::Announced).map(|c| c.announced).collect();
        if announced.is_empty() {
            return;
        }
        // The pager moves pages out in one go: it reads nothing meanwhile.
        self.finish_evictions();
        announced.sort_unstable();
        announced.truncate(self.rng.index(announced.len().min(16)) + 1);
        let mut read = Vec::new();
        for number in announced {
            let change =
                self.changes.iter_mut().find(|change| change.announced == number).expect("announced");
            change.phase = Phase::Read;
            read.push((change.kind, change.extent, std::mem::take(&mut change.child)));
        }
        let (used, forced) = (self.cache.used_pages(), self.cache.stats().forced_pages);
        for (kind, extent, child) in read {
            // Callers may wake as soon as they were read, all of them, and go on.
            for change in self.changes.iter_mut().filter(|change| change.phase == Phase::Read) {
                if self.rng.one_in(2) {
                    change.phase = Phase::Awake;
                }
            }
            while self.rng.one_in(2) {
                self.step_change();
            }
            if self.mutate(kind.told_too_late()) {
                self.drain(used, forced, 0);
                self.report();
                self.serve_faults_around(extent);
            }
            match kind {
                Kind::Remove | Kind::Free => {
                    for page in extent.pages() {
                        self.hide(page.0);
                    }
                    self.cache.handle(Input::Zeroed { extent });
                }
                Kind::Unmap => {
                    extent.pages().for_each(|page| self.pages[nth(page.0)].leaving = false);
                    self.cache.handle(Input::Forget { extent });
                }
                Kind::Remap => extent.pages().for_each(|page| self.pages[nth(page.0)].moving -= 1),
                Kind::Fork => self.look_at_child(&child),
            }
        }
        self.drain(used, forced, 0);
        self.report();
    }

    /// Faults that were read together with a change are answered before the change is known.
    fn serve_faults_around(&mut self, extent: Extent) {
        for _ in 0..4 {
            let page = (extent.first.0 + self.rng.below(u64::from(extent.count) + 8)).saturating_sub(4);
            let access = [Access::Read, Access::Write][self.rng.index(2)];
            self.handle(Input::Fault { page: PageIndex(page), access });
        }
        self.finish_evictions();
    }

    fn finish_evictions(&mut self) {
        for _ in 0..2 * self.ops.len() {
            if let Some(at) = self.ops.iter().position(|op| matches!(op, Op::Evict { .. })) {
                self.advance(at);
            }
        }
    }

    /// A mapped page that the cache does not count.
    pub(super) fn hide(&mut self, page: u64) {
        if let Some(frame) = &mut self.pages[nth(page)].mapped
            && !std::mem::replace(&mut frame.hidden, true)
        {
            self.mapped -= 1;
        }
    }

    /// A child was made: what it got from the kernel, and what the cache says that it lacks, are what the
    /// program had.
    fn look_at_child(&mut self, child: &[Copied]) {
        if self.ops.iter().any(|op| matches!(op, Op::Evict { .. })) {
            return;
        }
        let mut absent = vec![None; child.len()];
        self.cache.absent_content(|extent, staged| {
            for (page, offset) in extent.pages().zip(0..) {
                absent[nth(page.0)] = Some(staged.map(|(batch, first)| (batch.0, first + offset)));
            }
        });
        for ((page, copied), absent) in (0u64..).zip(child).zip(absent) {
            let model = &self.pages[nth(page)];
            if !model.managed {
                continue;
            }
            let content = match (copied.mapped, absent) {
                (Some(content), _) => content,
                (None, None) => 0,
                (None, Some(Some((batch, offset)))) => {
                    self.batches[&batch][nth(offset.into())].expect("it was moved there")
                }
                (None, Some(None)) => self.at_servers(page),
            };
            let may_be_zero = copied.may_be_zero || model.removals != copied.removals;
            assert!(
                content == copied.golden || (may_be_zero && content == 0),
                "a child finds {content} in page {page}, not {}",
                copied.golden
            );
        }
    }

    /// What the servers have of a page once all that was sent has arrived.
    fn at_servers(&self, page: u64) -> u64 {
        let mut content = self.servers.get(&page).copied();
        for op in &self.ops {
            match op {
                Op::Store { batch, pages, applied: false } => {
                    for (extent, offset) in
                        pages.iter().filter(|(extent, _)| extent.contains(PageIndex(page)))
                    {
                        content = self.batches[&batch.0][nth(u64::from(*offset) + page - extent.first.0)];
                    }
                }
                Op::Discard { extent } if extent.contains(PageIndex(page)) => content = None,
                _ => {}
            }
        }
        content.unwrap_or_else(|| panic!("a child's page {page} is lost"))
    }
}
