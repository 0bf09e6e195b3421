//! Threads that unmap, move, grow, give up and fork memory, a kernel that tells of it late,
//! and the pager's books.
//!
//! ```text
//!   thread: change --preempted--> event queued --> event read --preempted--> runs again
//!           `-------------- the kernel counts a change as under way -------------'
//! ```
//!
//! A place that was left is taken by the next mapping that fits: the kernel gives out the highest one. Events
//! are read in the order in which they were queued, which is not that of the changes. The books are applied
//! in the order that [`order`] finds.
//!
//! Oracle: each page that is absent comes back with the content that it had, for the program and for each
//! child. An order in doubt ends a run; [`Seen`] counts it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rampool_paging::changes::{Change, Facts, Order, order};
use rampool_paging::space::AddressSpace;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use crate::rng::Rng;

rampool_wire::listed! {
    /// One rule that is broken on purpose.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Mutation {
        /// Changes are applied in the order of reading.
        ReadOrder,
        /// Changes are applied while others are under way.
        NoClosing,
        /// Pages are moved out while changes that were read are not applied.
        MovesWhileCollecting,
        /// Memory is taken over while changes are under way.
        AdoptsWhileChanging,
        /// All addresses are said to be registered.
        AllRegistered,
        /// Forks are taken for earlier than all changes that were read with them.
        ForksFirst,
        /// Forks are taken for later.
        ForksLast,
    }
}

/// What a run met.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Seen {
    pub applied: u64,
    pub largest: u64,
    /// Applied in another order than they were read in.
    pub overtaken: u64,
    pub either: u64,
    pub doubts: u64,
    pub children: u64,
    pub returned: u64,
}

const PAGES: usize = 64;
const P: usize = OS_PAGE_BYTES;

#[derive(Clone, Copy, Debug)]
struct Page {
    /// What the program stored last.
    content: u64,
    present: bool,
    /// Not written since it was installed.
    protected: bool,
    registered: bool,
    mapping: u64,
    given_up: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Books {
    Resident { copy: Option<u64> },
    Away(u64),
    Fresh,
}

#[derive(Clone, Debug)]
enum Event {
    Change(Change),
    Fork(Vec<Option<Page>>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Runs,
    Made,
    Queued,
    Read,
}

struct Thread {
    phase: Phase,
    /// What it has still to tell, in order. The kernel counts each.
    events: VecDeque<Event>,
    /// Given up once the event was read: a range of pages.
    goes: Option<(usize, usize)>,
    blocks: Vec<(usize, usize)>,
}

struct World {
    rng: Rng,
    mutation: Option<Mutation>,
    kernel: Vec<Option<Page>>,
    threads: Vec<Thread>,
    queue: VecDeque<usize>,
    next: u64,
    space: AddressSpace,
    books: BTreeMap<PageIndex, Books>,
    collected: Vec<Event>,
    /// Contents that were given up.
    given_up: BTreeSet<u64>,
    /// How often a thread runs before the pager does; the larger, the longer others are preempted.
    preemption: u64,
    forks: bool,
    seen: Seen,
}

/// Runs what `seed` picks.
///
/// # Panics
/// With the seed, when a page comes back with other content.
#[must_use]
pub fn run(seed: u64, mutation: Option<Mutation>) -> Seen {
    let mut rng = Rng::new(seed ^ 0xc4a6);
    let threads = rng.index(4) + 1;
    let preemption = [1, 3, 8][rng.index(3)];
    let forks = rng.one_in(2);
    let thread = || Thread { phase: Phase::Runs, events: VecDeque::new(), goes: None, blocks: Vec::new() };
    let mut world = World {
        rng,
        mutation,
        kernel: vec![None; PAGES],
        threads: (0..threads).map(|_| thread()).collect(),
        queue: VecDeque::new(),
        next: 1,
        space: AddressSpace::default(),
        books: BTreeMap::new(),
        collected: Vec::new(),
        given_up: BTreeSet::new(),
        preemption,
        forks,
        seen: Seen::default(),
    };
    for _ in 0..600 {
        if world.rng.one_in(world.preemption + 1) {
            world.pager();
        } else {
            let thread = world.rng.index(threads);
            world.thread(thread);
        }
        if world.seen.doubts > 0 {
            return world.seen;
        }
    }
    world.finish(seed);
    world.seen
}

impl World {
    fn under_way(&self) -> bool {
        self.threads.iter().any(|thread| !thread.events.is_empty())
    }

    fn is(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    // ---- the program ----

    fn thread(&mut self, who: usize) {
        match self.threads[who].phase {
            Phase::Made => {
                self.queue.push_back(who);
                self.threads[who].phase = Phase::Queued;
            }
            Phase::Queued => {}
            Phase::Read => {
                let thread = &mut self.threads[who];
                thread.events.pop_front();
                thread.phase = if thread.events.is_empty() { Phase::Runs } else { Phase::Made };
            }
            Phase::Runs => {
                if let Some((from, to)) = self.threads[who].goes.take() {
                    for page in self.kernel[from..to].iter_mut().flatten() {
                        (page.content, page.present, page.given_up) = (0, false, false);
                    }
                } else {
                    self.call(who);
                }
            }
        }
    }

    fn call(&mut self, who: usize) {
        let count = self.threads[who].blocks.len();
        let what = self.rng.below(12);
        if count == 0 || (what == 0 && count < 4) {
            return self.map(who);
        }
        let nth = self.rng.index(count);
        let (start, pages) = self.threads[who].blocks[nth];
        match what {
            1 | 2 => {
                self.threads[who].blocks.swap_remove(nth);
                self.unmap(who, start, start + pages);
            }
            3 | 4 => self.resize(who, nth),
            5 if self.rng.one_in(3) => self.leave_empty(who, nth),
            5 => self.replace(who, nth),
            6 => {
                let from = start + self.rng.index(pages);
                let to = from + 1 + self.rng.index(start + pages - from);
                if self.kernel[from].is_some_and(|page| page.registered) {
                    for page in self.kernel[from..to].iter_mut().flatten() {
                        page.given_up = true;
                        self.given_up.insert(page.content);
                    }
                    self.tell(who, Change::GiveUp { start: from * P, end: to * P });
                    self.threads[who].goes = Some((from, to));
                }
            }
            7 if self.forks && self.rng.one_in(2) => {
                let child = self.kernel.clone();
                self.threads[who].events.push_back(Event::Fork(child));
                self.threads[who].phase = Phase::Made;
            }
            _ => {
                let at = start + self.rng.index(pages);
                let write = self.rng.one_in(2);
                self.touch(at, write);
            }
        }
    }

    fn tell(&mut self, who: usize, change: Change) {
        self.threads[who].events.push_back(Event::Change(change));
        self.threads[who].phase = Phase::Made;
    }

    /// The highest place that has room.
    fn place(&self, pages: usize) -> Option<usize> {
        (1..=PAGES - pages)
            .rev()
            .find(|&at| self.kernel[at - 1..at + pages].iter().skip(1).all(Option::is_none))
    }

    fn map(&mut self, who: usize) {
        let pages = 1 + self.rng.index(5);
        let Some(at) = self.place(pages) else { return };
        let mapping = self.fresh();
        for at in at..at + pages {
            let content = self.fresh();
            let page = Page {
                content,
                present: true,
                protected: false,
                registered: false,
                mapping,
                given_up: false,
            };
            self.kernel[at] = Some(page);
        }
        self.threads[who].blocks.push((at, pages));
    }

    fn unmap(&mut self, who: usize, from: usize, to: usize) {
        let registered = self.kernel[from..to].iter().flatten().any(|page| page.registered);
        self.kernel[from..to].fill(None);
        if registered {
            self.tell(who, Change::Unmap { start: from * P, end: to * P });
        }
    }

    /// `mremap`: in place, where it can be, or at another place.
    fn resize(&mut self, who: usize, nth: usize) {
        let (start, pages) = self.threads[who].blocks[nth];
        let wanted = 1 + self.rng.index(6);
        if wanted < pages {
            self.threads[who].blocks[nth] = (start, wanted);
            return self.unmap(who, start + wanted, start + pages);
        }
        // A place that was just left, and is grown over while a fork is under way, may be wrong in the child.
        let quiet = !self.forks || (!self.under_way() && self.collected.is_empty());
        let room = quiet
            && start + wanted <= PAGES
            && self.kernel[start + pages..start + wanted].iter().all(Option::is_none);
        if wanted > pages && room {
            // No event tells of it.
            let like = self.kernel[start].expect("a block is mapped");
            for at in start + pages..start + wanted {
                self.kernel[at] =
                    Some(Page { content: 0, present: false, protected: false, given_up: false, ..like });
            }
            self.threads[who].blocks[nth] = (start, wanted);
        } else if let Some(to) = self.place(wanted) {
            self.threads[who].blocks[nth] = (to, wanted);
            self.relocate(who, start, pages, to, wanted);
        }
    }

    /// Moves pages, with room for more, to where nothing is.
    fn relocate(&mut self, who: usize, from: usize, pages: usize, to: usize, wanted: usize) {
        let mapping = self.fresh();
        let like = self.kernel[from].expect("a block is mapped");
        for nth in 0..wanted {
            let moved = if nth < pages { self.kernel[from + nth].take() } else { None };
            let empty = Page { content: 0, present: false, protected: false, given_up: false, ..like };
            self.kernel[to + nth] = Some(Page { mapping, ..moved.unwrap_or(empty) });
        }
        if like.registered {
            self.tell(who, Change::Move { from: from * P, to: to * P, bytes: pages * P });
            self.tell(who, Change::Unmap { start: from * P, end: (from + pages) * P });
        }
    }

    /// `mremap` with `MREMAP_DONTUNMAP`: the place stays mapped, and is empty.
    fn leave_empty(&mut self, who: usize, nth: usize) {
        let (start, pages) = self.threads[who].blocks[nth];
        let Some(to) = self.place(pages) else { return };
        let before: Vec<Option<Page>> = self.kernel[start..start + pages].to_vec();
        self.relocate(who, start, pages, to, pages);
        for (at, page) in (start..).zip(before) {
            let empty =
                |page: Page| Page { content: 0, present: false, protected: false, given_up: false, ..page };
            self.kernel[at] = page.map(empty);
        }
        if matches!(self.threads[who].events.back(), Some(Event::Change(Change::Unmap { .. }))) {
            self.threads[who].events.pop_back();
        }
        self.threads[who].blocks.push((to, pages));
    }

    /// `mremap` with `MREMAP_FIXED` to where another block is.
    fn replace(&mut self, who: usize, nth: usize) {
        let (start, pages) = self.threads[who].blocks[nth];
        let fits = |&(other, block): &(usize, &(usize, usize))| other != nth && block.1 >= pages;
        let Some((other, &(to, room))) = self.threads[who].blocks.iter().enumerate().find(fits) else {
            return;
        };
        self.unmap(who, to, to + pages);
        self.relocate(who, start, pages, to, pages);
        let blocks = &mut self.threads[who].blocks;
        blocks[nth] = (to, pages);
        blocks[other] = (to + pages, room - pages);
        blocks.retain(|block| block.1 > 0);
    }

    fn touch(&mut self, at: usize, write: bool) {
        let page = self.kernel[at].expect("a thread touches its own blocks");
        if !page.present && page.registered {
            if self.under_way() || !self.collected.is_empty() {
                // It waits: later.
                return;
            }
            self.bring(at);
        }
        let content = self.fresh();
        if let Some(page) = &mut self.kernel[at] {
            page.present = true;
            if write {
                (page.content, page.protected) = (content, false);
            }
        }
    }

    // ---- the pager ----

    /// A fault: brings what the books say is there.
    fn bring(&mut self, at: usize) {
        if self.space.page_at(at * P).is_none() {
            self.adopt(at);
        }
        let index = self.space.page_at(at * P).expect("it was taken over");
        let page = self.kernel[at].as_mut().expect("mapped");
        let books = self.books.get_mut(&index).expect("known");
        let (content, copy) = match *books {
            Books::Away(content) => (content, Some(content)),
            Books::Fresh => (0, None),
            Books::Resident { .. } => panic!("page {at} is absent and counts as resident"),
        };
        assert_eq!(content, page.content, "page {at} comes back with other content");
        (page.present, page.protected) = (true, copy.is_some());
        *books = Books::Resident { copy };
        self.seen.returned += 1;
    }

    /// Takes the mapping around `at` over, as far as it is not known.
    fn adopt(&mut self, at: usize) {
        let Some(Page { mapping, .. }) = self.kernel[at] else { return };
        for at in 0..PAGES {
            let Some(page) = self.kernel[at].as_mut().filter(|page| page.mapping == mapping) else {
                continue;
            };
            page.registered = true;
            let present = page.present;
            if self.space.page_at(at * P).is_none() {
                let index = self.space.insert(at * P, 1).first;
                self.books.insert(index, if present { Books::Resident { copy: None } } else { Books::Fresh });
            }
        }
    }

    fn pager(&mut self) {
        for _ in 0..self.rng.below(5) {
            let Some(who) = self.queue.pop_front() else { break };
            self.collected.push(self.threads[who].events[0].clone());
            self.threads[who].phase = Phase::Read;
        }
        let closed = !self.under_way() || self.is(Mutation::NoClosing);
        if closed && !self.collected.is_empty() {
            self.apply();
        }
        let still = self.collected.is_empty();
        let (held, changing) = (!still && !self.is(Mutation::MovesWhileCollecting), self.under_way());
        let at = self.rng.index(PAGES);
        match self.rng.below(3) {
            0 if !changing && !held => self.move_out(at),
            1 if (!changing && still) || self.is(Mutation::AdoptsWhileChanging) => self.adopt(at),
            _ => {}
        }
    }

    fn move_out(&mut self, first: usize) {
        for at in first..(first + 4).min(PAGES) {
            let Some(index) = self.space.page_at(at * P) else { continue };
            let Some(Books::Resident { copy }) = self.books.get(&index).copied() else { continue };
            let Some(page) = self.kernel[at].as_mut().filter(|page| page.present && page.registered) else {
                panic!("page {at} is gone when it is to leave");
            };
            // What was not written is not stored again.
            let left = copy.filter(|_| page.protected).unwrap_or(page.content);
            page.present = false;
            self.books.insert(index, Books::Away(left));
        }
    }

    fn apply(&mut self) {
        let changes: Vec<Change> = self
            .collected
            .iter()
            .map(|event| if let Event::Change(change) = event { *change } else { Change::Fork })
            .collect();
        self.seen.applied += changes.len() as u64;
        self.seen.largest = self.seen.largest.max(changes.len() as u64);
        let read = Order { steps: (0..changes.len()).collect(), either: Vec::new() };
        let space = self.space.clone();
        let found =
            if self.is(Mutation::ReadOrder) { Ok(read.clone()) } else { order(&changes, &space, self) };
        let Ok(mut found) = found else {
            self.seen.doubts += 1;
            return;
        };
        let is_fork = |step: &usize| changes[*step] == Change::Fork;
        if self.is(Mutation::ForksFirst) {
            found.steps.sort_by_key(|step| !is_fork(step));
        } else if self.is(Mutation::ForksLast) {
            found.steps.sort_by_key(is_fork);
        }
        self.seen.overtaken += u64::from(found.steps != read.steps);
        // Where several threads change mappings, registered memory alone may not tell when a child was made.
        let sure = changes.iter().filter(|change| **change != Change::Fork).count() <= 2;
        let mut collected: Vec<Option<Event>> =
            std::mem::take(&mut self.collected).into_iter().map(Some).collect();
        for step in found.steps {
            match collected[step].take().expect("each change once") {
                Event::Change(change) => self.follow(change),
                Event::Fork(child) if sure => self.look_at_child(&child),
                Event::Fork(_) => {}
            }
        }
        for extent in found.either {
            self.seen.either += 1;
            for page in extent.pages() {
                if let Some(Books::Resident { copy }) = self.books.get_mut(&page) {
                    *copy = None;
                }
            }
        }
    }

    fn follow(&mut self, change: Change) {
        let books = &mut self.books;
        match change {
            Change::Unmap { start, end } => self.space.remove(start, end, |extent| {
                books.retain(|page, _| !extent.contains(*page));
            }),
            Change::Move { from, to, bytes } => {
                self.space.remove(to, to + bytes, |extent| {
                    books.retain(|page, _| !extent.contains(*page));
                });
                self.space.remap(from, to, bytes);
            }
            Change::GiveUp { start, end } => self.space.extents_in(start, end, |_, extent| {
                books.extend(extent.pages().map(|page| (page, Books::Fresh)));
            }),
            Change::Fork => {}
        }
        self.space.check();
    }

    fn look_at_child(&mut self, child: &[Option<Page>]) {
        self.seen.children += 1;
        for (at, page) in child.iter().enumerate() {
            let Some(page) = page.filter(|page| page.registered && !page.present && !page.given_up) else {
                continue;
            };
            let content = match self.space.page_at(at * P).map(|page| self.books[&page]) {
                Some(Books::Away(content)) => content,
                _ => 0,
            };
            if content == 0 && self.given_up.contains(&page.content) {
                // Given up while the fork was under way.
                continue;
            }
            assert_eq!(content, page.content, "a child finds other content in page {at}");
        }
    }

    /// Everything under way comes to its end, and every page is touched.
    fn finish(&mut self, seed: u64) {
        for _ in 0..10_000 {
            if !self.under_way() && self.collected.is_empty() {
                break;
            }
            for who in 0..self.threads.len() {
                if self.threads[who].phase != Phase::Runs {
                    self.thread(who);
                }
            }
            self.pager();
            if self.seen.doubts > 0 {
                return;
            }
        }
        assert!(self.collected.is_empty(), "seed {seed}: changes are never applied");
        for who in 0..self.threads.len() {
            if self.threads[who].goes.is_some() {
                self.thread(who);
            }
        }
        for at in 0..PAGES {
            if self.kernel[at].is_some() {
                self.touch(at, false);
            }
        }
    }
}

impl Facts for World {
    fn is_registered(&mut self, address: usize) -> bool {
        self.is(Mutation::AllRegistered) || self.kernel[address / P].is_some_and(|page| page.registered)
    }

    fn has_arrived(&mut self, start: usize, end: usize) -> bool {
        let mapping = |at: usize| self.kernel[at].map(|page| page.mapping);
        let begins = mapping(start / P) != mapping(start / P - 1);
        let present = self.kernel[start / P..end / P].iter().flatten().any(|page| page.present);
        begins || present
    }

    fn contradicts(&mut self, start: usize, extent: Extent) -> bool {
        extent.pages().zip(start / P..).any(|(page, at)| {
            let present = self.kernel[at].is_some_and(|page| page.present);
            match self.books[&page] {
                Books::Resident { .. } => !present,
                Books::Away(_) => present,
                Books::Fresh => false,
            }
        })
    }

    fn is_resident(&mut self, page: PageIndex) -> bool {
        matches!(self.books.get(&page), Some(Books::Resident { .. }))
    }

    fn child_has(&mut self, fork: usize, address: usize) -> Option<bool> {
        let Event::Fork(child) = &self.collected[fork] else { return None };
        Some(child[address / P].is_some_and(|page| page.registered))
    }
}
