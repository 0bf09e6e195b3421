//! Home-based lazy release consistency (Zhou, Iftode and Li, OSDI '96).
//!
//! A page that is written has a twin. At release the diff goes to the page's home, which acknowledges it with
//! the page's new version. At acquire, pages named in newer write notices are dropped; the next access
//! fetches the page from its home.
//!
//! Invariant: for every valid copy, `version >= need`, and the copy holds every released write of versions up
//! to `version`.
//!
//! Differs from the paper: versions are scalars assigned by the home, not vectors, and a release waits until
//! its diffs are acknowledged. A dirty page that is invalidated keeps its twin and is merged with the home's
//! copy later. A page that is written in interval after interval stays writable and is compared with its twin
//! at each release. Pages are also fetched ahead of their use ([`crate::ahead`]): no thread waits for them,
//! but they are refused for the same reasons, and a barrier waits until they have come, so that a request is
//! answered by the home it was sent to.
//!
//! It never sends a byte that this rank did not change, and never compares live memory that it then reads
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

mod direct;
mod modes;

use super::{Cx, Protocol, Scope, unexpected};
use crate::adapt::{Mode, Record, Singles};
use crate::ahead::{Blocks, Habit, Streams};
use crate::direct::Changed;
use crate::home::{HomePage, patched};
use crate::interval::{IntervalId, Intervals, VectorTime};
use crate::message::{Advance, Info, PageCopy, PageDiff, Payload, in_messages};
use crate::notice::{Notice, NoticeRuns, Notices};
use crate::pages::{take_pages, unlist_pages};
use crate::rule::Rule;
use crate::state::Shared;
use crate::{BarrierKind, Body, Checked, Diff, LockId, LockMode, Protection, ProtocolKind, Rank, ThreadId};
use rampool_wire::units::{Extent, PageIndex};

#[derive(Clone, Hash, Debug)]
pub(crate) struct Hlrc {
    kind: ProtocolKind,
    homes: BTreeMap<PageIndex, HomePage>,
    pub(super) copies: BTreeMap<PageIndex, Copy>,
    intervals: Intervals<NoticeRuns>,
    /// Changes that are at their homes but in no interval yet.
    fresh: Notices,
    /// Copies that have a twin.
    pub(super) twinned: BTreeSet<PageIndex>,
    /// Home pages that are dirty.
    dirty_homes: BTreeSet<PageIndex>,
    /// Pages with changes that were streamed to their home since the last release (aurc).
    pub(super) streamed: BTreeSet<PageIndex>,
    /// Pages that this rank is the new home of and that are on their way here, each with the flush that
    /// stands for it.
    pulling: BTreeMap<PageIndex, u64>,
    /// Messages for those pages.
    held: Vec<(Rank, Body)>,
    streams: Streams,
    /// auto: pages that are written in order.
    writes: Streams,
    /// auto: pages that are used in no order.
    blocks: Blocks,
    /// Pages to ask for when the epoch begins.
    wanted: Vec<PageIndex>,
    /// Unanswered requests for pages ahead of their use.
    ahead: u32,
    /// Pages whose home this rank was before the last barrier. The new home may still ask for them.
    lent: BTreeSet<PageIndex>,
    /// auto: this rank's observations of the pages that it is home of.
    records: BTreeMap<PageIndex, Record>,
    /// auto, at the root of the barrier: single writers of pages.
    singles: Singles,
    /// auto: pages to send when the epoch begins, and to whom.
    pushes: BTreeMap<PageIndex, Vec<Rank>>,
    /// auto: pages that their homes are sending.
    expected: BTreeSet<PageIndex>,
    /// auto: pages of other homes that this rank wrote before the barrier that it has arrived at, or is about
    /// to, and that it compares and sends only if another has written them.
    unsent: BTreeSet<PageIndex>,
    /// The threads that meet at a barrier have been through; it has not ended.
    leaving: bool,
}

/// A page at a rank that is not its home.
#[derive(Clone, Hash, Debug)]
pub(super) struct Copy {
    pub valid: bool,
    version: u32,
    /// The newest version named in a notice.
    need: u32,
    pub access: Protection,
    /// The page when its changes were last sent to its home.
    pub twin: Option<Arc<[u8]>>,
    pub fetch: Option<Fetch>,
    /// auto: the mode announced by its home.
    pub mode: Mode,
    /// auto: the home sends it when it has changed and a barrier ends.
    pushed: bool,
    /// Own diffs that the home has not acknowledged, and the version that the last one made.
    flying: u32,
    own: u32,
    habit: Habit,
    /// Intervals in which it was written.
    heat: u8,
    /// Scans since then without a change.
    quiet: u8,
}

#[derive(Clone, Copy, Hash, Debug)]
pub(super) struct Fetch {
    /// The answer may predate this rank's own diff.
    pub restart: bool,
    write: bool,
    /// A thread waits for it.
    waited: bool,
    /// A barrier has ended since the request: the mode in the answer may be outdated.
    crossed: bool,
}

impl Copy {
    fn new() -> Self {
        Self {
            valid: false,
            version: 0,
            need: 0,
            access: Protection::None,
            twin: None,
            fetch: None,
            mode: Mode::Invalidate,
            pushed: false,
            flying: 0,
            own: 0,
            habit: Habit::default(),
            heat: 0,
            quiet: 0,
        }
    }

    /// A fetched or pushed page is accepted.
    fn becomes_valid(&mut self, version: u32, access: Protection) {
        (self.valid, self.version, self.access, self.fetch) = (true, version, access, None);
    }
}

impl Hlrc {
    pub fn new() -> Self {
        Self::of_kind(ProtocolKind::Hlrc)
    }

    pub(super) fn of_kind(kind: ProtocolKind) -> Self {
        Self {
            kind,
            homes: BTreeMap::new(),
            copies: BTreeMap::new(),
            intervals: Intervals::new(),
            fresh: Notices::default(),
            twinned: BTreeSet::new(),
            dirty_homes: BTreeSet::new(),
            streamed: BTreeSet::new(),
            pulling: BTreeMap::new(),
            held: Vec::new(),
            streams: Streams::learning(),
            writes: Streams::default(),
            blocks: Blocks::default(),
            wanted: Vec::new(),
            ahead: 0,
            lent: BTreeSet::new(),
            records: BTreeMap::new(),
            singles: Singles::default(),
            pushes: BTreeMap::new(),
            expected: BTreeSet::new(),
            unsent: BTreeSet::new(),
            leaving: false,
        }
    }

    fn copy(&mut self, page: PageIndex) -> &mut Copy {
        self.copies.entry(page).or_insert_with(Copy::new)
    }

    /// Whether this rank answers for the page now.
    fn is_master(&self, cx: &Cx<'_>, page: PageIndex) -> bool {
        cx.is_home(page) && !self.pulling.contains_key(&page)
    }

    /// Makes a valid page writable: first the twin, while no thread can write.
    fn open_for_writing(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        let twin = if cx.keep(Rule::TwinFirst) {
            let twin = cx.snapshot(page);
            cx.protect(page, Protection::ReadWrite);
            twin
        } else {
            cx.protect(page, Protection::ReadWrite);
            cx.snapshot(page)
        };
        cx.shared.stats.twins += 1;
        let copy = self.copy(page);
        copy.twin = Some(twin);
        copy.access = Protection::ReadWrite;
        copy.heat = copy.heat.saturating_add(1);
        self.twinned.insert(page);
    }

    fn ask(&mut self, cx: &mut Cx<'_>, page: PageIndex, write: bool) {
        self.copy(page).fetch = Some(Fetch { restart: false, write, waited: true, crossed: false });
        let (home, by) = (cx.home(page), cx.me());
        cx.send(home, Body::GetPage { page, by });
    }

    /// Requests those of `pages` (ascending) that are not here, and that no thread waits for.
    fn ask_ahead(&mut self, cx: &mut Cx<'_>, pages: impl Iterator<Item = PageIndex>) {
        let mut by_home: BTreeMap<Rank, Vec<PageIndex>> = BTreeMap::new();
        for page in pages {
            if cx.is_home(page) || self.pulling.contains_key(&page) {
                continue;
            }
            let copy = self.copy(page);
            if !copy.valid && copy.fetch.is_none() && copy.access == Protection::None {
                copy.fetch = Some(Fetch { restart: false, write: false, waited: false, crossed: false });
                by_home.entry(cx.home(page)).or_default().push(page);
            }
        }
        for (home, pages) in by_home {
            for pages in pages.chunks((AHEAD_BYTES / cx.page_bytes(pages[0])).max(1)) {
                self.ahead += 1;
                cx.send(home, Body::GetPages { pages: pages.to_vec() });
            }
        }
    }

    /// How many pages like this one may come ahead at a time.
    fn most_ahead(cx: &Cx<'_>, page: PageIndex) -> u64 {
        if cx.shared.at_barrier {
            0
        } else {
            u64::from(cx.shared.tuning.ahead_bytes) / cx.page_bytes(page) as u64
        }
    }

    /// Pages fetched ahead have come.
    fn on_pages(&mut self, cx: &mut Cx<'_>, from: Rank, copies: &[PageCopy]) -> Checked {
        let Some(ahead) = self.ahead.checked_sub(1) else { return unexpected("pages") };
        self.ahead = ahead;
        if !copies.is_sorted_by(|a, b| a.page < b.page) {
            return unexpected("order of pages");
        }
        let mut ready = Vec::with_capacity(copies.len());
        for got in copies {
            let Some(fetch) = self.copies.get(&got.page).and_then(|copy| copy.fetch) else {
                return unexpected("page among others");
            };
            self.told(cx, from, got, fetch.crossed);
            // Its first touch must be seen.
            let is_mark = !fetch.waited && self.streams.is_mark(got.page);
            let copy = self.copy(got.page);
            let refused = cx.keep(Rule::Ahead) && (fetch.restart || got.version < copy.need);
            if refused && fetch.waited {
                cx.shared.stats.refetches += 1;
                self.ask(cx, got.page, fetch.write);
            } else if refused {
                copy.fetch = None;
            } else if fetch.write || copy.twin.is_some() {
                self.install(cx, got, fetch.write);
            } else if is_mark {
                copy.becomes_valid(got.version, Protection::None);
                cx.shared.stats.pages_fetched += 1;
                cx.mem.install(got.page, &got.bytes, Protection::None);
            } else {
                copy.becomes_valid(got.version, Protection::Read);
                ready.push((got.page, &*got.bytes, fetch.waited));
            }
        }
        install_all(cx, &ready);
        Ok(())
    }

    /// A thread touches a page that was fetched ahead, or is on its way: more are fetched, if it is a mark.
    fn touch(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        if let Some((last, ahead)) = self.streams.touched(page, Self::most_ahead(cx, page)) {
            let pages = cx.ahead_of(last, ahead);
            self.ask_ahead(cx, pages.into_iter());
        }
    }

    /// The home's copy has come.
    fn on_page(&mut self, cx: &mut Cx<'_>, from: Rank, got: &PageCopy) -> Checked {
        let page = got.page;
        if cx.is_home(page) {
            // The request predates this rank's becoming the home.
            return Ok(());
        }
        let Some(fetch) = self.copy(page).fetch else { return unexpected("page") };
        self.told(cx, from, got, fetch.crossed);
        let copy = self.copy(page);
        // A home that has moved since may be written without notice.
        let late = (fetch.restart && cx.keep(Rule::Restart))
            || (got.version < copy.need && cx.keep(Rule::Need))
            || from != cx.home(page);
        if late {
            cx.shared.stats.refetches += 1;
            self.ask(cx, page, fetch.write);
            return Ok(());
        }
        self.install(cx, got, fetch.write);
        Ok(())
    }

    /// Makes the copy valid. Changes of this rank that are not at the home yet stay.
    fn install(&mut self, cx: &mut Cx<'_>, got: &PageCopy, write: bool) {
        let page = got.page;
        cx.shared.stats.pages_fetched += 1;
        let twin = self.copy(page).twin.take();
        let mut content = Arc::clone(&got.bytes);
        if let Some(twin) = &twin {
            // The page is unmapped: no thread writes to it now.
            content = patched(&content, &Diff::between(&cx.snapshot(page), twin));
        }
        let writable = write || twin.is_some();
        let copy = self.copy(page);
        let access = if writable { Protection::ReadWrite } else { Protection::Read };
        copy.becomes_valid(got.version, access);
        if writable {
            copy.twin = Some(Arc::clone(&got.bytes));
            copy.heat = copy.heat.saturating_add(u8::from(twin.is_none()));
            self.twinned.insert(page);
            cx.shared.stats.twins += 1;
        }
        cx.mem.install(page, &content, access);
        cx.retry(page);
    }

    /// Takes the changes of these pages with twins. Cold pages are write-protected first, all in one go, and
    /// lose their twins; hot ones stay writable, and the compared content becomes the twin.
    fn collect(&mut self, cx: &mut Cx<'_>, pages: &[PageIndex]) -> BTreeMap<PageIndex, Diff> {
        let (hot_after, cool_after) = (cx.shared.tuning.hot_after, cx.shared.tuning.cool_after);
        let is_hot = |copy: &Copy| copy.valid && copy.heat >= hot_after && copy.quiet < cool_after;
        let cold = pages.iter().copied().filter(|page| {
            let copy = &self.copies[page];
            copy.access == Protection::ReadWrite && !is_hot(copy)
        });
        cx.protect_all(cold.collect::<Vec<_>>(), Protection::Read);
        let mut diffs = BTreeMap::new();
        let mut spare = None;
        for &page in pages {
            let now = cx.snapshot_over(page, spare.take());
            let omit_snapshot = !cx.keep(Rule::Snapshot);
            let copy = self.copies.get_mut(&page).expect("a page with a twin has a copy");
            let twin = copy.twin.take().expect("it has a twin");
            let diff = Diff::between(&now, &twin);
            if is_hot(copy) {
                cx.shared.stats.scans += 1;
                copy.quiet = if diff.is_empty() { copy.quiet + 1 } else { 0 };
                copy.twin = Some(if omit_snapshot { cx.snapshot(page) } else { now });
                spare = Some(twin);
            } else {
                spare = Some(now);
                if copy.quiet >= cool_after {
                    (copy.heat, copy.quiet) = (0, 0);
                }
                if copy.valid {
                    copy.access = Protection::Read;
                }
                self.twinned.remove(&page);
            }
            cx.shared.stats.diffs += 1;
            if diff.is_empty() {
                cx.shared.stats.empty_diffs += 1;
            } else {
                cx.shared.stats.diff_bytes += diff.len() as u64;
                if let Some(fetch) = &mut copy.fetch {
                    fetch.restart = true;
                }
                diffs.insert(page, diff);
            }
        }
        diffs
    }

    /// Sends the changes of these pages with twins to their homes, and fences behind what was streamed.
    fn send(&mut self, cx: &mut Cx<'_>, pages: &[PageIndex], under: Option<LockId>) {
        let mut by_home: BTreeMap<Rank, (Vec<PageDiff>, Vec<PageIndex>)> = BTreeMap::new();
        let diffs = self.collect(cx, pages);
        let streamed = std::mem::take(&mut self.streamed);
        for page in streamed.into_iter().filter(|page| !diffs.contains_key(page)) {
            by_home.entry(cx.home(page)).or_default().1.push(page);
        }
        for (page, diff) in diffs {
            cx.shared.stats.final_bytes += diff.len() as u64;
            by_home.entry(cx.home(page)).or_default().0.push(PageDiff { page, diff });
        }
        for (home, (diffs, fences)) in by_home {
            for page in diffs.iter().map(|diff| diff.page).chain(fences.iter().copied()) {
                self.copy(page).flying += 1;
            }
            let mut fences = Some(fences);
            for diffs in in_messages(diffs, PageDiff::weight) {
                let flush = cx.begin_flush();
                cx.send(
                    home,
                    Body::Flush {
                        protocol: self.kind,
                        flush,
                        under,
                        diffs,
                        fences: fences.take().unwrap_or_default(),
                    },
                );
            }
        }
    }

    /// A message for a page's home.
    fn at_home(&mut self, cx: &mut Cx<'_>, from: Rank, body: &Body) -> Checked {
        let pages: Vec<PageIndex> = match body {
            Body::GetPage { page, .. } => vec![*page],
            Body::GetPages { pages } => pages.clone(),
            Body::Flush { diffs, fences, .. } => {
                diffs.iter().map(|d| d.page).chain(fences.iter().copied()).collect()
            }
            Body::Update { diffs } => diffs.iter().map(|d| d.page).collect(),
            Body::Direct { accesses, .. } => accesses.iter().map(|one| one.page).collect(),
            _ => Vec::new(),
        };
        // Messages that wait for one page must not be overtaken by later ones of the same rank about another.
        let behind = self.held.iter().any(|&(rank, _)| rank == from);
        if behind || pages.iter().any(|page| self.pulling.contains_key(page)) {
            self.held.push((from, body.clone()));
            return Ok(());
        }
        match body {
            Body::GetPage { page, by } => {
                if !cx.is_home(*page) {
                    let home = cx.home(*page);
                    cx.send(home, body.clone());
                    return Ok(());
                }
                let mut copy = self.hand_out(cx, *page);
                if self.adapts() {
                    self.records.entry(*page).or_default().missed(*by);
                    copy.mode = self.mode_for(cx, *page, *by);
                }
                cx.send(*by, Body::Page { copy });
            }
            Body::GetPages { .. } => {
                let mine = |&page: &PageIndex| cx.is_home(page) && cx.kind(page) == Some(self.kind);
                if pages.len() > MOST_AT_ONCE || !pages.is_sorted_by(|a, b| a < b) || !pages.iter().all(mine)
                {
                    return unexpected("request for several pages");
                }
                let copies = self.hand_out_all(cx, &pages, from);
                cx.send(from, Body::Pages { copies });
            }
            Body::Flush { flush, under, diffs, fences, .. } => {
                if !pages.iter().all(|&page| cx.is_home(page)) {
                    return unexpected("diff for another home");
                }
                let mut pages = Vec::with_capacity(diffs.len() + fences.len());
                for PageDiff { page, diff } in diffs {
                    pages.push(self.apply(cx, *page, diff, from, *under));
                }
                let nothing = Diff::default();
                for &page in fences {
                    pages.push(self.apply(cx, page, &nothing, from, *under));
                }
                cx.send(from, Body::FlushAck { protocol: self.kind, flush: *flush, pages });
            }
            Body::Update { diffs } => {
                if !pages.iter().all(|&page| cx.is_home(page)) {
                    return unexpected("update for another home");
                }
                for PageDiff { page, diff } in diffs {
                    cx.mem.store(*page, diff);
                    self.not_own(*page, diff);
                }
            }
            Body::Direct { call, accesses } => return self.on_direct(cx, from, *call, accesses),
            _ => return unexpected("message"),
        }
        Ok(())
    }

    fn home(&mut self, page: PageIndex) -> &mut HomePage {
        self.homes.entry(page).or_insert_with(HomePage::new)
    }

    fn hand_out(&mut self, cx: &mut Cx<'_>, page: PageIndex) -> PageCopy {
        let home = self.home(page);
        let copy = home.copy(cx, page);
        if home.dirty || home.handed.is_some() {
            self.dirty_homes.insert(page);
        }
        copy
    }

    /// Copies of these pages (ascending) for one rank.
    fn hand_out_all(&mut self, cx: &mut Cx<'_>, pages: &[PageIndex], to: Rank) -> Vec<PageCopy> {
        let open: Vec<PageIndex> = pages.iter().copied().filter(|&page| self.home(page).close(cx)).collect();
        cx.protect_all(open, Protection::Read);
        let one = |&page: &PageIndex| {
            let mut copy = self.hand_out(cx, page);
            if let Some(record) = self.records.get_mut(&page) {
                record.handed(to);
            }
            copy.mode = self.mode_for(cx, page, to);
            copy
        };
        pages.iter().map(one).collect()
    }

    fn apply(
        &mut self,
        cx: &mut Cx<'_>,
        page: PageIndex,
        diff: &Diff,
        from: Rank,
        under: Option<LockId>,
    ) -> Advance {
        self.not_own(page, diff);
        let adapts = self.adapts();
        let home = self.home(page);
        let before = home.version;
        if adapts {
            home.count_own(cx);
        }
        let mut advance = Advance { before, ..home.apply(cx, page, diff) };
        if home.dirty {
            self.dirty_homes.insert(page);
        }
        if self.adapts() {
            let record = self.records.entry(page).or_default();
            record.released(from, under, is_large(diff, cx.page_bytes(page)));
            advance.mode = record.mode();
        }
        advance
    }

    /// In a barrier another rank's changes come. If the home moves, what is left in the page is this rank's.
    fn not_own(&mut self, page: PageIndex, diff: &Diff) {
        if self.leaving
            && let Some(handed) = self.homes.get_mut(&page).and_then(|home| home.handed.as_mut())
        {
            *handed = patched(handed, diff);
        }
    }

    fn on_flushed(&mut self, cx: &mut Cx<'_>, flush: u64, pages: &[Advance]) -> Checked {
        cx.end_flush(flush)?;
        let me = cx.me();
        for &Advance { page, before, after, mode } in pages {
            // More than one version: the home has changed it, too.
            let alone = after <= before.saturating_add(1);
            self.fresh.add(page, Notice::sent(after, alone.then_some(me)));
            let Some(copy) = self.copies.get_mut(&page) else { continue };
            copy.flying = copy.flying.saturating_sub(1);
            copy.own = copy.own.max(after);
            copy.mode = mode;
            if copy.valid && copy.version == before {
                copy.version = after;
            }
        }
        Ok(())
    }

    /// Drops the copies that these notices make stale; returns those that are unmapped.
    fn invalidate(
        &mut self,
        cx: &mut Cx<'_>,
        notices: impl Iterator<Item = (PageIndex, Notice)>,
    ) -> BTreeSet<PageIndex> {
        let me = cx.me();
        let mut stale = BTreeSet::new();
        for (page, notice) in notices {
            if notice.writer == Some(me) || self.is_master(cx, page) {
                continue;
            }
            let Some(copy) = self.copies.get_mut(&page) else { continue };
            copy.need = copy.need.max(notice.version);
            if copy.valid && copy.version < notice.version {
                copy.valid = false;
                cx.shared.stats.invalidations += 1;
                let is_to_come = self.expected.contains(&page);
                if is_to_come && copy.access == Protection::Read && copy.twin.is_none() {
                    // Until it comes, its threads wait: it need not be unmapped and mapped again.
                    continue;
                }
                copy.access = Protection::None;
                stale.insert(page);
            } else if !copy.valid && copy.fetch.is_none() {
                copy.habit.unused();
            }
        }
        cx.protect_all(stale.iter().copied(), Protection::None);
        for &page in &stale {
            if !cx.keep(Rule::ThreeWay) && self.twinned.remove(&page) {
                self.copy(page).twin = None;
            }
        }
        stale
    }

    fn learn(&mut self, cx: &mut Cx<'_>, records: &[(IntervalId, NoticeRuns)]) -> Checked {
        let mut news = Notices::default();
        for (id, runs) in records {
            if self.intervals.is_news(*id) {
                if id.0 == cx.me() {
                    return unexpected("interval of this rank's own");
                }
                news.merge(runs);
                self.intervals.learn(*id, runs.clone());
            }
        }
        self.invalidate(cx, news.iter());
        Ok(())
    }

    /// The new home has the page: it answers from now on.
    fn become_home(&mut self, cx: &mut Cx<'_>, page: PageIndex, kept: bool) {
        let copy = self.copies.remove(&page).expect("a new home has a copy");
        self.twinned.remove(&page);
        let (version, access) = (copy.version, copy.access);
        let begun = kept.then(|| cx.shared.epoch.saturating_sub(1));
        let mut home = HomePage { version, shared: !kept, access, begun, ..HomePage::new() };
        if kept && home.access == Protection::Read {
            home.access = Protection::ReadWrite;
            cx.protect(page, Protection::ReadWrite);
        }
        if home.shared && home.access == Protection::ReadWrite {
            home.dirty = true;
            self.dirty_homes.insert(page);
        }
        self.homes.insert(page, home);
    }
}

impl Protocol for Hlrc {
    fn access(&self, page: PageIndex) -> Protection {
        match (self.homes.get(&page), self.copies.get(&page)) {
            (Some(home), _) => home.access,
            (None, Some(copy)) => copy.access,
            (None, None) => Protection::None,
        }
    }

    fn fault(&mut self, cx: &mut Cx<'_>, _thread: ThreadId, page: PageIndex, write: bool) {
        if self.is_master(cx, page) {
            let leaving = self.leaving;
            let home = self.home(page);
            if write && leaving && home.shared && cx.keep(Rule::Outside) {
                // The barrier may move the home; what this thread writes goes to the new one.
                home.handed.get_or_insert_with(|| cx.snapshot(page));
            }
            home.fault(cx, page, write, true);
            if home.dirty || home.handed.is_some() {
                self.dirty_homes.insert(page);
            }
            cx.retry(page);
            if write {
                self.open_behind(cx, page);
            }
            return;
        }
        let pulling = self.pulling.contains_key(&page);
        self.hide(cx, page);
        let copy = self.copy(page);
        if copy.valid {
            if write {
                self.open_for_writing(cx, page);
                self.open_behind(cx, page);
            } else {
                copy.access = Protection::Read;
                cx.protect(page, Protection::Read);
            }
            cx.retry(page);
            self.touch(cx, page);
        } else if let Some(fetch) = &mut copy.fetch {
            fetch.write |= write;
            if !std::mem::replace(&mut fetch.waited, true) {
                copy.habit.missed();
                self.touch(cx, page);
            }
        } else if !pulling {
            copy.habit.missed();
            self.ask(cx, page, write);
            let ahead = self.streams.missed(page, Self::most_ahead(cx, page));
            let pages = self.with(cx, page, ahead);
            self.ask_ahead(cx, pages.into_iter());
        }
    }

    fn receive(&mut self, cx: &mut Cx<'_>, from: Rank, body: &Body) -> Checked {
        match body {
            Body::GetPage { .. }
            | Body::GetPages { .. }
            | Body::Flush { .. }
            | Body::Update { .. }
            | Body::Direct { .. } => self.at_home(cx, from, body),
            Body::Page { copy } => self.on_page(cx, from, copy),
            Body::Pages { copies } => self.on_pages(cx, from, copies),
            Body::Push { copies } => self.on_push(cx, from, copies),
            Body::FlushAck { flush, pages, .. } => self.on_flushed(cx, *flush, pages),
            Body::HomePull { page, by } => {
                let (version, twin) = match (self.copies.get(page), self.homes.get(page)) {
                    (Some(copy), _) => (copy.version, copy.twin.clone()),
                    (None, Some(home)) => (home.version, None),
                    (None, None) => return unexpected("request of a new home"),
                };
                // Only released writes: a byte that is written and restored before the next release would be
                // in no diff.
                let released = if cx.keep(Rule::Released) { twin } else { None };
                let bytes = released.unwrap_or_else(|| cx.snapshot(*page));
                let copy =
                    PageCopy { page: *page, version, applied: Vec::new(), mode: Mode::Invalidate, bytes };
                cx.send(*by, Body::HomeMove { copy });
                Ok(())
            }
            Body::HomeMove { copy } => {
                let Some(flush) = self.pulling.remove(&copy.page) else {
                    return unexpected("move of a home");
                };
                cx.end_flush(flush)?;
                self.install(cx, copy, false);
                self.become_home(cx, copy.page, false);
                for (from, body) in std::mem::take(&mut self.held) {
                    self.at_home(cx, from, &body)?;
                }
                Ok(())
            }
            _ => unexpected("message"),
        }
    }

    fn evict(&mut self, cx: &mut Cx<'_>, pages: &[PageIndex]) {
        let (mut gone, mut mapped) = (Vec::new(), Vec::new());
        for &page in pages {
            let lent = self.lent.contains(&page) && cx.keep(Rule::EvictLent);
            let Some(copy) = self.copies.get_mut(&page) else { continue };
            let dirty = copy.twin.is_some() && cx.keep(Rule::EvictClean);
            if lent || dirty || copy.fetch.is_some() || self.pulling.contains_key(&page) {
                continue;
            }
            if copy.access > Protection::None {
                mapped.push(page);
            }
            // Known versions stay: every answer of the home from now on is as new as every notice that came
            // so far.
            (copy.valid, copy.access, copy.twin) = (false, Protection::None, None);
            self.twinned.remove(&page);
            gone.push(page);
        }
        cx.forget(&gone, mapped);
    }

    fn info(&self, _lock: LockId) -> Info {
        info_of(self.intervals.time())
    }

    fn may_wait(&self) -> bool {
        self.adapts()
    }

    fn release(&mut self, cx: &mut Cx<'_>, scope: Scope) {
        let me = cx.me();
        let at_barrier = matches!(scope, Scope::Barrier);
        self.blocks.released(at_barrier);
        if at_barrier {
            self.streams.epoch_ends();
        }
        let under = match scope {
            Scope::Lock { lock, mode: LockMode::Exclusive, .. } => Some(lock),
            _ => None,
        };
        for page in std::mem::take(&mut self.dirty_homes) {
            let Some(home) = self.homes.get_mut(&page) else { continue };
            if let Some(version) = home.release(cx, page) {
                self.fresh.add(page, Notice::sent(version, Some(me)));
                if self.adapts() {
                    self.records.entry(page).or_default().released(me, under, false);
                }
            } else if home.handed.is_some() {
                self.dirty_homes.insert(page);
            }
        }
        // Who gets a lock that was given back may read them before it arrives.
        let may_keep = self.adapts() && !(cx.shared.released && cx.keep(Rule::Unsent));
        if at_barrier {
            self.leaving = true;
            self.unsent = if may_keep { self.to_keep(cx) } else { BTreeSet::new() };
        }
        // Where one of those is released under a lock after that, the barrier waits for it.
        let pages: Vec<PageIndex> = if at_barrier {
            self.twinned.difference(&self.unsent).copied().collect()
        } else {
            self.twinned.iter().copied().collect()
        };
        self.send(cx, &pages, under);
    }

    fn released(&mut self, cx: &mut Cx<'_>) {
        if !self.fresh.is_empty() {
            let notices = self.fresh.take();
            self.intervals.close(cx.me(), notices.runs());
        }
    }

    fn grant(&mut self, cx: &mut Cx<'_>, lock: LockId, to: Rank, info: Option<&Info>) -> Checked<Payload> {
        let records = self.intervals.unknown_to(&time_of(info)?);
        let riding = if self.adapts() { self.riding(cx, lock, to, &records) } else { Vec::new() };
        Ok(homed(records, VectorTime::new(), riding))
    }

    fn update(&mut self, _cx: &mut Cx<'_>, _lock: LockId, manager: Rank) -> Payload {
        let records = self.intervals.news_for(manager);
        homed(records, self.intervals.time(), Vec::new())
    }

    fn absorb(&mut self, _cx: &mut Cx<'_>, lock: LockId, payload: &Payload) -> Checked {
        let Payload::Homed { records, upto, .. } = payload else { return unexpected("payload") };
        self.intervals.keep_for_lock(lock, records.clone(), upto);
        Ok(())
    }

    fn serve(&mut self, _cx: &mut Cx<'_>, lock: LockId, info: Option<&Info>) -> Checked<Payload> {
        let records = self.intervals.unknown_of_lock(lock, &time_of(info)?);
        Ok(homed(records, VectorTime::new(), Vec::new()))
    }

    fn acquire(&mut self, cx: &mut Cx<'_>, _lock: LockId, payload: &Payload) -> Checked {
        let Payload::Homed { records, riding, .. } = payload else { return unexpected("payload") };
        self.learn(cx, records)?;
        self.on_riding(cx, riding)
    }

    fn arrive(&mut self, cx: &mut Cx<'_>) -> Payload {
        let mut notices = Notices::default();
        for (_, runs) in self.intervals.own(cx.me()) {
            notices.merge(&runs);
        }
        for &page in &self.unsent {
            notices.add(page, self.unsent_notice(page, cx.me()));
        }
        changed(&notices)
    }

    fn wants_flush(&self, total: &Payload) -> bool {
        matches!(total, Payload::Changed { notices, .. } if notices.disputed().next().is_some())
    }

    /// What others have written as well goes to its home.
    fn flush(&mut self, cx: &mut Cx<'_>, total: &Payload) -> Checked {
        let Payload::Changed { notices, .. } = total else { return Ok(()) };
        if !cx.keep(Rule::Disputed) {
            return Ok(());
        }
        let disputed = notices.disputed().filter(|page| self.unsent.remove(page));
        let pages: Vec<PageIndex> = disputed.filter(|page| self.twinned.contains(page)).collect();
        self.send(cx, &pages, None);
        Ok(())
    }

    fn flushed(&mut self, cx: &mut Cx<'_>) -> Payload {
        let payload = changed(&self.fresh);
        self.released(cx);
        payload
    }

    fn merge(&self, into: &mut Payload, from: &Payload) -> Checked {
        merge_changed(into, from)
    }

    fn unsent(&self, total: &Payload) -> BTreeSet<PageIndex> {
        let Payload::Changed { notices, .. } = total else { return BTreeSet::new() };
        notices.unsent().collect()
    }

    fn kept(&mut self, cx: &Cx<'_>, kind: BarrierKind, total: &Payload) -> Vec<(PageIndex, Rank)> {
        let owned = if self.adapts() { self.owned(cx, total) } else { Vec::new() };
        if kind == BarrierKind::KeepReadWrite { single_writers(cx, total) } else { owned }
    }

    fn depart(&mut self, cx: &mut Cx<'_>, total: &Payload) -> Checked {
        match total {
            Payload::Nothing => {}
            Payload::Changed { notices, .. } => {
                let notices = Notices::from(notices);
                if self.adapts() {
                    self.expect(cx, &notices);
                }
                let stale = self.invalidate(cx, notices.iter());
                if !self.adapts() {
                    let habitual =
                        |page: &PageIndex| self.copies.get_mut(page).is_some_and(|copy| copy.habit.changed());
                    self.wanted = stale.into_iter().filter(habitual).collect();
                }
            }
            _ => return unexpected("payload"),
        }
        // Every rank has arrived, so every new home has the page it requested, and earlier writes are known
        // to all.
        self.lent.clear();
        self.intervals.restart();
        Ok(())
    }

    fn rehome(&mut self, cx: &mut Cx<'_>, page: PageIndex, from: Rank, to: Rank, kept: bool) {
        self.forget(cx, page);
        if to == cx.me() {
            let valid = self.copies.get(&page).is_some_and(|copy| copy.valid);
            if valid {
                if self.unsent.remove(&page) {
                    self.copy(page).version += 1;
                }
                self.become_home(cx, page, kept);
            } else if cx.keep(Rule::HomePull) {
                self.copy(page);
                self.pulling.insert(page, cx.begin_flush());
                let by = cx.me();
                cx.send(from, Body::HomePull { page, by });
            } else {
                self.copy(page);
                self.become_home(cx, page, kept);
            }
        } else if from == cx.me() {
            let home = self.homes.remove(&page).unwrap_or_else(HomePage::new);
            self.dirty_homes.remove(&page);
            self.lent.insert(page);
            let (version, access, twin) = (home.version, home.access, home.handed);
            let mut copy = Copy { valid: !kept, version, access, twin, ..Copy::new() };
            let down = match copy.twin {
                _ if kept => Protection::None,
                Some(_) => Protection::ReadWrite,
                None => Protection::Read,
            };
            if copy.twin.is_some() {
                self.twinned.insert(page);
            }
            if copy.access > down {
                copy.access = down;
                cx.protect(page, down);
            }
            self.copies.insert(page, copy);
        } else if kept
            && let Some(copy) = self.copies.get_mut(&page)
            && copy.valid
        {
            // It may be of the newest version, but the new home will write without notice.
            copy.valid = false;
            if copy.access > Protection::None {
                copy.access = Protection::None;
                cx.protect(page, Protection::None);
            }
        }
    }

    fn freed(&mut self, cx: &mut Cx<'_>, pages: Extent) {
        let twinned: Vec<PageIndex> = self.twinned.range(pages.first..pages.end()).copied().collect();
        let mut gone = Vec::new();
        for page in twinned {
            let copy = self.copies.get_mut(&page).expect("a page with a twin has a copy");
            if copy.fetch.is_none() {
                (copy.valid, copy.access, copy.twin) = (false, Protection::None, None);
                self.twinned.remove(&page);
                gone.push(page);
            }
        }
        cx.protect_all(gone, Protection::None);
    }

    fn renew(&mut self, cx: &mut Cx<'_>, pages: Extent) {
        let homes = take_pages(&mut self.homes, pages).into_iter().map(|(page, home)| (page, home.access));
        let copies = take_pages(&mut self.copies, pages).into_iter().map(|(page, copy)| (page, copy.access));
        cx.hide(homes.chain(copies));
        let listed =
            [&mut self.twinned, &mut self.dirty_homes, &mut self.streamed, &mut self.lent, &mut self.unsent];
        for listed in listed {
            unlist_pages(listed, pages);
        }
        self.wanted.retain(|&page| !pages.contains(page));
        take_pages(&mut self.records, pages);
        take_pages(&mut self.pushes, pages);
        unlist_pages(&mut self.expected, pages);
        self.singles.forget(pages);
    }

    fn begin_epoch(&mut self, cx: &mut Cx<'_>) {
        self.leaving = false;
        self.push(cx);
        let mut left = cx.shared.tuning.ahead_bytes as usize;
        let fits = |&page: &PageIndex| {
            let rest = left.checked_sub(cx.page_bytes(page));
            left = rest.unwrap_or(left);
            rest.is_some()
        };
        let pages: Vec<PageIndex> = std::mem::take(&mut self.wanted).into_iter().filter(fits).collect();
        self.ask_ahead(cx, pages.into_iter());
    }

    fn overtaken(&mut self, cx: &mut Cx<'_>) {
        for page in self.expected.clone() {
            self.hide(cx, page);
        }
    }

    fn fetches_ahead(&self) -> bool {
        self.ahead > 0 || !self.expected.is_empty()
    }

    fn serves_direct(&self) -> bool {
        true
    }

    fn is_unreleased(&self, page: PageIndex) -> bool {
        self.twinned.contains(&page)
    }

    fn direct_done(&mut self, cx: &mut Cx<'_>, changed: &[Changed]) {
        self.on_direct_done(cx, changed);
    }

    fn overhead_bytes(&self) -> usize {
        let twins = self.copies.values().filter_map(|copy| copy.twin.as_ref());
        let handed = self.homes.values().flat_map(|home| home.handed.iter().chain(&home.spare.0));
        twins.chain(handed).map(|bytes| bytes.len()).sum()
    }

    fn check(&self, _shared: &Shared) {
        for (page, copy) in &self.copies {
            assert!(copy.twin.is_some() == self.twinned.contains(page), "{page}: twins are listed");
            let hidden = copy.valid || copy.access == Protection::None || self.expected.contains(page);
            assert!(hidden, "{page}: an invalid copy is not mapped");
            assert!(
                copy.access != Protection::ReadWrite || copy.twin.is_some(),
                "{page}: writable without a twin"
            );
            assert!(!self.homes.contains_key(page), "{page}: home and copy");
        }
        for (page, home) in &self.homes {
            let looked_at = home.dirty || home.handed.is_some();
            assert!(!looked_at || self.dirty_homes.contains(page), "{page}: dirty homes are listed");
            let noticed = !home.shared || looked_at || home.access != Protection::ReadWrite;
            assert!(noticed, "{page}: a shared page is written unnoticed");
        }
    }
}

/// Makes copies readable that are valid already: the pages, their content, and whether a thread waits.
fn install_all(cx: &mut Cx<'_>, ready: &[(PageIndex, &[u8], bool)]) {
    cx.shared.stats.pages_fetched += ready.len() as u64;
    let pages: Vec<_> = ready.iter().map(|&(page, bytes, _)| (page, bytes)).collect();
    cx.mem.install_all(&pages, Protection::Read);
    for &(page, _, _) in ready.iter().filter(|&&(_, _, waited)| waited) {
        cx.retry(page);
    }
}

/// Whether these changes are a large part of a page.
fn is_large(diff: &Diff, page_bytes: usize) -> bool {
    diff.len() * 4 >= page_bytes
}

/// The bytes fetched ahead in one message, at least one page.
const AHEAD_BYTES: usize = 64 << 10;
/// More pages than any rank requests in one message: pages have at least 8 bytes.
const MOST_AT_ONCE: usize = AHEAD_BYTES / 8;

/// The payload of a lock: mostly empty.
fn homed(records: Vec<(IntervalId, NoticeRuns)>, upto: VectorTime, riding: Vec<PageCopy>) -> Payload {
    if records.is_empty() && upto.is_empty() && riding.is_empty() {
        return Payload::Nothing;
    }
    Payload::Homed { records, upto: upto.into_iter().collect(), riding }
}

/// The knowledge that a requester sends. A requester that knows nothing of this epoch sends nothing.
pub(super) fn info_of(time: VectorTime) -> Info {
    if time.is_empty() { Info::Nothing } else { Info::Time { at: time.into_iter().collect() } }
}

/// The knowledge that a requester sent.
pub(super) fn time_of(info: Option<&Info>) -> Checked<VectorTime> {
    match info {
        None => Ok(VectorTime::new()),
        Some(Info::Time { at }) => Ok(at.iter().copied().collect()),
        Some(_) => unexpected("knowledge"),
    }
}

/// The payload of a barrier.
fn changed(notices: &Notices) -> Payload {
    if notices.is_empty() {
        return Payload::Nothing;
    }
    Payload::Changed { notices: notices.runs(), logged: false }
}

/// Joins the changed pages of two ranks.
pub(super) fn merge_changed(into: &mut Payload, from: &Payload) -> Checked {
    match (into, from) {
        (Payload::Changed { notices, logged }, Payload::Changed { notices: more, logged: also }) => {
            let mut all = Notices::from(&*notices);
            all.merge(more);
            *notices = all.runs();
            *logged |= also;
            Ok(())
        }
        _ => unexpected("payload"),
    }
}

/// Pages that a single rank wrote, and whose home is elsewhere.
pub(super) fn single_writers(cx: &Cx<'_>, total: &Payload) -> Vec<(PageIndex, Rank)> {
    let Payload::Changed { notices, .. } = total else { return Vec::new() };
    let notices = Notices::from(notices);
    let single = notices.iter().filter_map(|(page, notice)| notice.writer.map(|writer| (page, writer)));
    single.filter(|&(page, writer)| cx.home(page) != writer).collect()
}
