//! One simulated run.

mod changes;
mod kernel;

use std::collections::BTreeMap;

use rampool_paging::cache::{Access, BatchId, Cache, CacheStats, EvictOutcome, FetchId, Input, Output};
use rampool_wire::units::{Extent, PageIndex, push_page, total_pages};

use changes::{Change, Kind};

use super::pattern::Pattern;
use super::{Mutation, Plan};
use crate::rng::Rng;

/// Runs what `seed` picks.
///
/// # Panics
/// With the seed, when a rule is broken.
pub fn run(seed: u64) -> CacheStats {
    World::new(Plan::from_seed(seed)).run()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Frame {
    content: u64,
    protected: bool,
    /// Not counted by the cache: given up and not taken away yet, or made by the kernel itself.
    hidden: bool,
    /// The kernel may take it away.
    lazy: bool,
}

#[derive(Clone, Copy, Default, Debug)]
struct PageModel {
    managed: bool,
    mapped: Option<Frame>,
    /// What the program stored last; 0 is a zero page.
    golden: u64,
    /// It is being given up: zeroes are right as well.
    may_be_zero: bool,
    /// Written since it was given up.
    written: bool,
    /// Removals that are still to come, and all there ever were.
    removals_left: u32,
    removals: u64,
    /// Unmapped by the program, not yet forgotten by the cache.
    leaving: bool,
    /// Changes of its address that the runtime has not heard of.
    moving: u32,
}

/// Something the cache asked for.
#[derive(Debug)]
enum Op {
    Evict { batch: BatchId, extents: Vec<Extent>, done: Option<Vec<EvictOutcome>> },
    Store { batch: BatchId, pages: Vec<(Extent, u32)>, applied: bool },
    Discard { extent: Extent },
    Fetch { fetch: FetchId, extents: Vec<Extent>, applied: bool },
}

impl Op {
    /// The pages that a store or a discard names, done or not.
    fn at_servers_ever(&self) -> Vec<Extent> {
        match self {
            Op::Store { pages, .. } => pages.iter().map(|(e, _)| *e).collect(),
            _ => self.at_servers(),
        }
    }

    /// The pages of it that the servers still have to see, if any.
    fn at_servers(&self) -> Vec<Extent> {
        match self {
            Op::Store { pages, applied: false, .. } => pages.iter().map(|(e, _)| *e).collect(),
            Op::Fetch { extents, applied: false, .. } => extents.clone(),
            Op::Discard { extent } => vec![*extent],
            Op::Evict { .. } | Op::Store { .. } | Op::Fetch { .. } => Vec::new(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ThreadState {
    Idle,
    /// Will try this access (again).
    Trying {
        page: u64,
        write: bool,
    },
    /// Waits in a fault.
    Blocked {
        page: u64,
        write: bool,
    },
}

struct Thread {
    pattern: Pattern,
    writes_one_in: u64,
    state: ThreadState,
}

pub struct World {
    plan: Plan,
    rng: Rng,
    cache: Cache,
    pages: Vec<PageModel>,
    servers: BTreeMap<u64, u64>,
    /// What was sent to the servers last, as the runtime remembers it.
    stored: BTreeMap<u64, u64>,
    batches: BTreeMap<u32, Vec<Option<u64>>>,
    fetches: BTreeMap<u32, Vec<Option<u64>>>,
    ops: Vec<Op>,
    threads: Vec<Thread>,
    pool_full: bool,
    /// Randomness of the kernel is off while a run comes to its end.
    quiet: bool,
    next_content: u64,
    mapped: u64,
    /// Frames kept for fetches to come.
    installs_failed: Vec<Extent>,
    /// Of zero pages and of content, where the kernel had a page.
    already_there: Vec<Extent>,
    /// Of `Confirm`, where the kernel had none.
    missing: Vec<PageIndex>,
    changes: Vec<Change>,
    announcements: u64,
    steps_done: u64,
}

/// Names the seed of a run that panics.
struct SaySeed(u64);

impl Drop for SaySeed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failing seed: {} (rampool_sim::paging::run({0}) replays it)", self.0);
        }
    }
}

impl World {
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        let mut rng = Rng::new(plan.seed ^ 0x5eed);
        let threads = (0..plan.threads)
            .map(|_| Thread {
                pattern: Pattern::any(&mut rng, plan.pages),
                writes_one_in: [1, 2, 5, u64::MAX][rng.index(4)],
                state: ThreadState::Idle,
            })
            .collect();
        Self {
            cache: Cache::new(plan.config.clone()),
            rng,
            pages: vec![PageModel::default(); usize::try_from(plan.pages).expect("few pages")],
            servers: BTreeMap::new(),
            stored: BTreeMap::new(),
            batches: BTreeMap::new(),
            fetches: BTreeMap::new(),
            ops: Vec::new(),
            threads,
            pool_full: false,
            quiet: false,
            next_content: 1,
            mapped: 0,
            installs_failed: Vec::new(),
            already_there: Vec::new(),
            missing: Vec::new(),
            changes: Vec::new(),
            announcements: 0,
            steps_done: 0,
            plan,
        }
    }

    /// The whole run: random steps, then everything under way comes back, every page is read, and everything
    /// is forgotten.
    ///
    /// # Panics
    /// When a rule is broken.
    pub fn run(mut self) -> CacheStats {
        let _seed = SaySeed(self.plan.seed);
        let all = Extent::new(PageIndex(0), u32::try_from(self.plan.pages).expect("few pages"));
        self.adopt(all);
        for _ in 0..self.plan.steps {
            self.step();
        }
        self.finish();
        self.cache.stats()
    }

    fn step(&mut self) {
        if !self.changes.is_empty() && self.rng.one_in(3) {
            if self.rng.one_in(4) {
                self.stale_fault_on_what_goes();
            } else if self.rng.one_in(self.plan.preemption) {
                self.step_change();
            } else if self.rng.one_in(4) {
                // Several threads change mappings at a time.
                self.program_event();
            } else {
                self.read_events();
            }
        } else if self.rng.one_in(self.plan.event_odds) {
            self.program_event();
        } else if self.rng.one_in(self.plan.slowness) {
            let count = self.ops.len();
            if count > 0 {
                let at = self.rng.index(count);
                self.advance(at);
            }
        } else {
            let thread = self.rng.index(self.threads.len());
            self.run_thread(thread);
        }
    }

    // ---- the program ----

    fn run_thread(&mut self, thread: usize) {
        if self.threads[thread].state == ThreadState::Idle {
            let pages = self.plan.pages;
            let t = &mut self.threads[thread];
            let page = t.pattern.next(&mut self.rng, pages);
            let write = t.writes_one_in != u64::MAX && self.rng.one_in(t.writes_one_in);
            t.state = ThreadState::Trying { page, write };
        }
        if let ThreadState::Trying { page, write } = self.threads[thread].state {
            self.access(thread, page, write);
        }
    }

    fn access(&mut self, thread: usize, page: u64, write: bool) {
        let model = &mut self.pages[nth(page)];
        if !model.managed {
            self.threads[thread].state = ThreadState::Idle;
            return;
        }
        let fault = match &mut model.mapped {
            None if write => Access::Write,
            None => Access::Read,
            Some(frame) => {
                if model.may_be_zero && frame.content == 0 {
                    model.golden = 0;
                }
                assert_eq!(frame.content, model.golden, "page {page} does not hold what was stored last");
                model.may_be_zero = model.removals_left > 0;
                if write && frame.protected {
                    Access::WriteProtected
                } else {
                    if write {
                        frame.content = match self.stored.get(&page) {
                            // As it was, or as it was once.
                            Some(content) if self.plan.config.tells_unchanged && self.rng.one_in(3) => {
                                *content
                            }
                            _ if self.rng.one_in(6) => 0,
                            _ => self.next_content,
                        };
                        self.next_content += 1;
                        model.golden = frame.content;
                        model.written = model.removals_left > 0;
                        frame.lazy = false;
                    }
                    self.threads[thread].state = ThreadState::Idle;
                    return;
                }
            }
        };
        self.threads[thread].state = ThreadState::Blocked { page, write };
        self.handle(Input::Fault { page: PageIndex(page), access: fault });
        if !self.quiet && self.rng.one_in(20) {
            self.handle(Input::Fault { page: PageIndex(page), access: fault });
        }
    }

    fn program_event(&mut self) {
        let first = self.rng.below(self.plan.pages);
        let count = self.rng.between(1, (self.plan.pages - first).min(40));
        let extent = Extent::new(PageIndex(first), u32::try_from(count).expect("few pages"));
        match self.rng.below(16) {
            0 => self.begin(Kind::Unmap, extent),
            1 | 2 => self.adopt(extent),
            3 | 4 => self.begin(Kind::Remove, extent),
            10 => self.begin(Kind::Free, extent),
            11 => self.begin(Kind::Remap, extent),
            12 | 14 => self.begin(Kind::Fork, extent),
            13 => self.reclaim(),
            15 => self.merge(),
            5 => {
                let budget = self.plan.config.budget_pages;
                let pages = self.rng.between(32, 2 * budget);
                self.handle(Input::SetBudget { pages });
            }
            6 => {
                self.pool_full = !self.pool_full;
                self.handle(Input::PoolFull(self.pool_full));
            }
            7 => {
                // Anything may be expected, in any order, more than once, and what does not exist as well.
                let pages: Vec<PageIndex> =
                    (0..count).map(|_| PageIndex(self.rng.below(self.plan.pages + 8))).collect();
                self.handle(Input::Expect { pages: &pages });
            }
            _ => {
                // A fault whose thread is gone.
                let access = [Access::Read, Access::Write, Access::WriteProtected][self.rng.index(3)];
                self.handle(Input::Fault { page: PageIndex(first), access });
            }
        }
    }

    fn adopt(&mut self, extent: Extent) {
        if self.refuses() {
            // The runtime asks the kernel first.
            return;
        }
        // Only what is not managed, in runs.
        let mut runs = Vec::new();
        for page in extent.pages().filter(|p| !self.pages[nth(p.0)].managed) {
            assert!(
                !self.pages[nth(page.0)].leaving,
                "{page} is adopted before it was read that it was unmapped"
            );
            push_page(&mut runs, page);
        }
        for run in runs {
            let (mut resident, mut given_up) = (Vec::new(), Vec::new());
            let odds = if self.rng.one_in(4) { 3 } else { u64::MAX };
            let forgetful = self.mutate(Mutation::AdoptionForgetsRemovals);
            let evicting: Vec<Extent> = self
                .ops
                .iter()
                .filter_map(
                    |op| if let Op::Evict { extents, .. } = op { Some(extents.clone()) } else { None },
                )
                .flatten()
                .collect();
            let busy_at_servers: Vec<Extent> = self.ops.iter().flat_map(Op::at_servers_ever).collect();
            let mut remote = Vec::new();
            let mostly = self.rng.one_in(2);
            for page in run.pages() {
                let held = evicting.iter().any(|e| e.contains(page));
                let is_resident =
                    !held && self.mapped < self.plan.config.budget_pages && (mostly != self.rng.one_in(6));
                let model = &mut self.pages[nth(page.0)];
                *model = PageModel { managed: true, removals: model.removals, ..PageModel::default() };
                if is_resident {
                    let content = if self.rng.one_in(6) { 0 } else { self.next_content };
                    self.next_content += 1;
                    model.golden = content;
                    model.mapped = Some(Frame { content, protected: false, hidden: false, lazy: false });
                    self.mapped += 1;
                    let goes = self.rng.one_in(odds);
                    if goes {
                        self.begin_before_adoption(Extent::page(page));
                    }
                    if goes && !forgetful {
                        self.hide(page.0);
                        push_page(&mut given_up, page);
                    } else {
                        push_page(&mut resident, page);
                    }
                } else if !held && self.rng.one_in(12) {
                    // The kernel made it, in place of the shared zero page.
                    model.mapped = Some(Frame { content: 0, protected: false, hidden: true, lazy: false });
                } else if !held && self.rng.one_in(8) && !busy_at_servers.iter().any(|e| e.contains(page)) {
                    // A forked child finds pages of its parent at the servers.
                    model.golden = self.next_content;
                    self.next_content += 1;
                    self.servers.insert(page.0, model.golden);
                    push_page(&mut remote, page);
                }
            }
            for page in run.pages() {
                self.stored.remove(&page.0);
            }
            self.handle(Input::Adopt {
                extent: run,
                resident: &resident,
                remote: &remote,
                given_up: &given_up,
            });
        }
    }

    fn unmap(&mut self, page: u64) -> Option<Frame> {
        let frame = self.pages[nth(page)].mapped.take();
        self.mapped -= u64::from(frame.is_some_and(|frame| !frame.hidden));
        frame
    }

    fn wake(&mut self, extent: Extent) {
        for thread in &mut self.threads {
            if let ThreadState::Blocked { page, write } = thread.state
                && extent.contains(PageIndex(page))
            {
                thread.state = ThreadState::Trying { page, write };
            }
        }
    }

    // ---- the runtime ----

    fn handle(&mut self, input: Input<'_>) {
        let adopted = if let Input::Adopt { resident, .. } = &input { total_pages(resident) } else { 0 };
        self.feed(input, adopted);
        self.report();
    }

    /// Tells the cache what the kernel said to what was just asked of it.
    fn report(&mut self) {
        // As the runtime may: an eviction is done and answered while an install of the same drain still waits
        // to be reported.
        if !self.installs_failed.is_empty()
            && self.rng.one_in(3)
            && let Some(at) = self.ops.iter().position(|op| matches!(op, Op::Evict { done: Some(_), .. }))
            && let Op::Evict { batch, done, .. } = self.ops.remove(at)
        {
            self.feed(Input::Evicted { batch, outcomes: &done.expect("moved") }, 0);
        }
        while let Some(extent) = self.installs_failed.pop() {
            self.feed(Input::InstallFailed { extent }, 0);
        }
        while let Some(extent) = self.already_there.pop() {
            if !self.mutate(Mutation::PresenceUnreported) {
                self.feed(Input::AlreadyThere { extent }, 0);
            }
            for page in extent.pages() {
                self.count_if_resident(page);
            }
        }
        while let Some(page) = self.missing.pop() {
            self.feed(Input::WasMissing { page }, 0);
        }
        // What was just told may have led to more.
        if !(self.installs_failed.is_empty() && self.already_there.is_empty() && self.missing.is_empty()) {
            self.report();
        }
        if self.plan.instant_evictions
            && let Some(at) = self.ops.iter().position(|op| matches!(op, Op::Evict { .. }))
        {
            self.advance(at);
            if matches!(self.ops.get(at), Some(Op::Evict { done: Some(_), .. })) {
                self.advance(at);
            }
        }
    }

    fn feed(&mut self, input: Input<'_>, adopted: u64) {
        let used = self.cache.used_pages();
        let forced = self.cache.stats().forced_pages;
        let failed = if let Input::InstallFailed { extent } = &input { Some(*extent) } else { None };
        self.cache.handle(input);
        self.steps_done += 1;
        if self.plan.pages < 512 || self.steps_done.is_multiple_of(16) {
            self.cache.check();
        }
        if let Some(extent) = failed {
            // The thread that waited there has not been answered: its fault is reported again.
            self.wake(extent);
        }
        self.drain(used, forced, adopted);
    }

    /// Does what the cache asks for; it used `used` pages before, `forced` of which beyond the budget.
    fn drain(&mut self, used: u64, forced: u64, adopted: u64) {
        let allowed = self.cache.budget_pages().max(used + adopted);
        while let Some(output) = self.cache.poll() {
            self.perform(output);
            let (frames, limit) = (self.frames(), allowed + self.cache.stats().forced_pages - forced);
            assert!(frames <= limit, "{frames} frames in use, {limit} allowed");
        }
        // What leaves was chosen while the outputs were handed out.
        if self.plan.pages < 512 || self.steps_done.is_multiple_of(16) {
            self.cache.check();
        }
        assert!(self.frames() <= self.cache.used_pages(), "the cache counts fewer frames than there are");
    }

    fn frames(&self) -> u64 {
        let batched: usize = self.batches.values().map(|b| b.iter().filter(|c| c.is_some()).count()).sum();
        let fetched: usize = self.fetches.values().map(Vec::len).sum();
        self.mapped + (batched + fetched) as u64
    }

    fn mutate(&mut self, mutation: Mutation) -> bool {
        self.plan.mutation == Some(mutation) && self.rng.one_in(3)
    }

    fn perform(&mut self, output: Output) {
        match output {
            Output::InstallZero { extent } => {
                let n = extent.count as usize;
                self.install(extent, &vec![0; n], true);
                if self.mutate(Mutation::ExtraFrames) {
                    let beyond = extent.end();
                    if self.pages.get(nth(beyond.0)).is_some_and(|p| p.managed && p.golden == 0) {
                        self.install(Extent::page(beyond), &[0], true);
                    }
                }
            }
            Output::InstallFetched { extent, fetch, offset_pages, writable } => {
                let from = offset_pages as usize;
                let buffer = self.fetches.get(&fetch.0).expect("the fetch is there");
                let bytes: Vec<u64> = buffer[from..from + extent.count as usize]
                    .iter()
                    .map(|c| c.expect("the fetch has landed"))
                    .collect();
                self.install(extent, &bytes, writable);
            }
            Output::InstallStaged { extent, batch, offset_pages, writable } => {
                let from = offset_pages as usize;
                let buffer = self.batches.get(&batch.0).expect("the batch is there");
                let mut bytes: Vec<u64> = buffer[from..from + extent.count as usize]
                    .iter()
                    .map(|c| c.expect("the page was moved there"))
                    .collect();
                if self.mutate(Mutation::StagedReturnsZero) {
                    bytes.fill(0);
                }
                self.install(extent, &bytes, writable);
            }
            Output::Confirm { page, .. } => self.confirm(page),
            Output::Unprotect { extent } => {
                for page in extent.pages().filter(|_| !self.refuses()).collect::<Vec<_>>() {
                    if let Some(frame) = &mut self.pages[nth(page.0)].mapped {
                        frame.protected = false;
                    }
                }
                self.wake(extent);
            }
            Output::Wake { page } => {
                if !self.mutate(Mutation::WakeLost) {
                    self.wake(Extent::page(page));
                }
            }
            Output::Evict { batch, extents } => {
                assert!(
                    total_pages(&extents) <= u64::from(self.plan.config.batch_pages).max(2),
                    "a batch is too large"
                );
                assert!(batch.0 < self.plan.config.max_batches, "too many batches");
                self.ops.push(Op::Evict { batch, extents, done: None });
            }
            Output::Store { batch, pages } => {
                assert!(!self.pool_full, "a store while the pool is full");
                let buffer = &self.batches[&batch.0];
                for (extent, offset) in &pages {
                    for (page, content) in extent.pages().zip(&buffer[nth(u64::from(*offset))..]) {
                        self.stored.insert(page.0, content.expect("a stored page was moved out"));
                    }
                }
                self.ops.push(Op::Store { batch, pages, applied: false });
                if self.mutate(Mutation::BatchReleasedEarly) {
                    self.batches.remove(&batch.0);
                }
            }
            Output::ReleaseBatch { batch } => {
                for op in &self.ops {
                    assert!(
                        !matches!(op, Op::Store { batch: b, .. } if *b == batch),
                        "{batch:?} is dropped before it is acknowledged"
                    );
                }
                if !self.mutate(Mutation::BatchLeaked) {
                    self.batches.remove(&batch.0).expect("the batch is there");
                }
            }
            Output::Fetch { fetch, extents, .. } => {
                let pages = total_pages(&extents);
                assert!(pages <= u64::from(self.plan.config.fetch_pages), "a fetch is too large");
                assert!(fetch.0 < self.plan.config.max_fetches, "too many fetches");
                let buffer = vec![None; usize::try_from(pages).expect("few pages")];
                assert!(self.fetches.insert(fetch.0, buffer).is_none(), "{fetch:?} is in use");
                self.ops.push(Op::Fetch { fetch, extents, applied: false });
            }
            Output::ReleaseFetch { fetch } => {
                self.fetches.remove(&fetch.0).expect("the fetch is there");
            }
            Output::Discard { extent } => {
                if !self.mutate(Mutation::DiscardLost) {
                    self.ops.push(Op::Discard { extent });
                }
            }
        }
    }

    // ---- the end ----

    fn finish(&mut self) {
        self.quiet = true;
        self.settle("first with the pool as it is");
        if self.pool_full {
            self.pool_full = false;
            self.handle(Input::PoolFull(false));
        }
        self.settle("then with room in the pool");
        for page in 0..self.plan.pages {
            self.threads[0].state = ThreadState::Trying { page, write: false };
            self.settle("while every page is read");
        }
        let all = Extent::new(PageIndex(0), u32::try_from(self.plan.pages).expect("few pages"));
        for page in 0..self.plan.pages {
            self.unmap(page);
            self.pages[nth(page)].managed = false;
        }
        self.handle(Input::Forget { extent: all });
        self.settle("after everything was forgotten");
        // What only lingers goes when its frames are needed.
        self.handle(Input::SetBudget { pages: 0 });
        self.settle("after the budget was taken away");
        assert_eq!(self.cache.used_pages(), 0, "frames leak");
        assert!(self.batches.is_empty(), "batches leak: {:?}", self.batches);
        assert!(self.fetches.is_empty(), "fetches leak: {:?}", self.fetches);
        assert!(self.servers.is_empty(), "the servers keep discarded pages: {:?}", self.servers);
        assert_eq!(self.mapped, 0);
        let stats = self.cache.stats();
        assert_eq!(
            (stats.content_refused, stats.vanished_pages, stats.missing_pages),
            (0, 0, 0),
            "broken promises were counted"
        );
    }

    /// Lets everything under way come back and every thread finish its access.
    fn settle(&mut self, when: &str) {
        for _ in 0..100_000 {
            let mut moved = false;
            for thread in 0..self.threads.len() {
                if let ThreadState::Trying { page, write } = self.threads[thread].state {
                    self.access(thread, page, write);
                    moved = true;
                }
            }
            let stuck = self.pool_full;
            let ready: Vec<usize> = (0..self.ops.len())
                .filter(|&i| !(stuck && matches!(self.ops[i], Op::Store { .. })))
                .collect();
            if let Some(&at) = ready.get(self.rng.index(ready.len().max(1))) {
                self.advance(at);
                moved = true;
            }
            if self.changes_under_way() {
                self.read_events();
                self.step_change();
                moved = true;
            }
            if !moved {
                let blocked = self.threads.iter().find(|t| t.state != ThreadState::Idle);
                if let Some(thread) = blocked {
                    let page = if let ThreadState::Blocked { page, .. } = thread.state { page } else { 0 };
                    let why = self.cache.describe(PageIndex(page));
                    panic!("{when}: nothing is under way that answers {:?}; {why}", thread.state);
                }
                return;
            }
        }
        panic!("{when}: no end");
    }
}

/// A page number as an index.
fn nth(page: u64) -> usize {
    usize::try_from(page).expect("few pages")
}
