//! Lazy release consistency without homes (Keleher, Cox and Zwaenepoel, ISCA '92; TreadMarks).
//!
//! A release sends nothing. The next holder of the lock learns which intervals it has not seen and which
//! pages they wrote, and drops those; its next access fetches the missing diffs from their writers and
//! applies them in the order of happens-before. Diffs are made when they are first asked for, so one diff may
//! cover several intervals of its writer.
//!
//! Invariant: a valid copy has no notice pending, and holds every interval in `applied`.
//!
//! The order. `key`, the sum of the writer's vector time when the interval ended, grows along happens-before,
//! so sorting by it is a legal order. A diff of intervals `i ..= k` is applied at the place of `i`: had the
//! writer learned of a foreign interval of that page in between, the diff would have been cut there.
//!
//! It never hands out bytes of an interval that is still open. If the page is being written, an interval with
//! just that page ends first; splitting intervals is always allowed.
//!
//! The page's home only serves a rank without a copy, and keeps a copy when diffs are collected.
//!
//! Differs from the paper: a rank writes unnoticed to a page that no other rank can use without asking it,
//! because no other has had content of it, or because all know of a diff that none has requested. The first
//! request ends that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::hlrc::{info_of, time_of};
use super::{Cx, Protocol, Scope, unexpected};
use crate::adapt::Mode;
use crate::interval::{IntervalId, Intervals, VectorTime};
use crate::message::{Info, IntervalDiff, LazyRecord, PageCopy, Payload};
use crate::notice::{Notice, Notices};
use crate::pages::{take_pages, unlist_pages};
use crate::rule::Rule;
use crate::state::Shared;
use crate::{Body, Checked, Diff, LockId, Protection, Rank, ThreadId};
use rampool_wire::units::{Extent, PageIndex};

#[derive(Clone, Hash, Debug)]
pub(crate) struct Lrc {
    intervals: Intervals<LazyRecord>,
    pages: BTreeMap<PageIndex, Page>,
    /// Pages written in the open interval.
    dirty: BTreeSet<PageIndex>,
    /// This rank's diffs.
    diffs: BTreeMap<PageIndex, Vec<IntervalDiff>>,
    diff_bytes: usize,
    /// Notices that are pending, over all pages.
    pending: usize,
    /// Pages that this home has to bring up to date before diffs may go.
    collecting: BTreeSet<PageIndex>,
    /// Pages that this rank is the new home of and that are on their way here, each with the flush that
    /// stands for it.
    pulling: BTreeMap<PageIndex, u64>,
    /// Pages that have come to their new home and lack diffs. No thread waits for those, but a barrier does:
    /// after it the pages may be freed, and their diffs be gone.
    lacking: BTreeSet<PageIndex>,
    held: Vec<(Rank, Body)>,
}

#[derive(Clone, Hash, Debug)]
struct Page {
    /// There is content, though it may be old.
    copy: bool,
    valid: bool,
    /// Every other rank asks this one before it uses the page: writes need not be noticed.
    alone: bool,
    access: Protection,
    /// Content before the first write that is in no diff yet.
    twin: Option<Arc<[u8]>>,
    /// Own intervals that are closed but in no diff yet.
    closed: Option<Closed>,
    /// Intervals that wrote the page and are not applied.
    pend: Vec<Pend>,
    /// Up to which interval of each writer the content reaches, own ones included.
    applied: BTreeMap<Rank, u32>,
    fetch: Option<Fetch>,
}

#[derive(Clone, Copy, Hash, Debug)]
struct Closed {
    first: u32,
    last: u32,
    key: u64,
    last_key: u64,
}

#[derive(Clone, Copy, Hash, Debug)]
struct Pend {
    rank: Rank,
    number: u32,
}

#[derive(Clone, Hash, Debug)]
struct Fetch {
    write: bool,
    /// A whole page is on its way.
    whole: bool,
    /// Writers that were asked, up to which interval.
    asked: BTreeMap<Rank, u32>,
    got: Vec<(Rank, IntervalDiff)>,
}

impl Page {
    fn new(copy: bool) -> Self {
        Self {
            copy,
            valid: copy,
            alone: copy,
            access: Protection::None,
            twin: None,
            closed: None,
            pend: Vec::new(),
            applied: BTreeMap::new(),
            fetch: None,
        }
    }

    fn has(&self, rank: Rank, number: u32) -> bool {
        self.applied.get(&rank).is_some_and(|&at| at >= number)
    }
}

impl Lrc {
    pub fn new() -> Self {
        Self {
            intervals: Intervals::new(),
            pages: BTreeMap::new(),
            dirty: BTreeSet::new(),
            diffs: BTreeMap::new(),
            diff_bytes: 0,
            pending: 0,
            collecting: BTreeSet::new(),
            pulling: BTreeMap::new(),
            lacking: BTreeSet::new(),
            held: Vec::new(),
        }
    }

    /// The home has a copy of an untouched page.
    fn page(&mut self, cx: &Cx<'_>, page: PageIndex) -> &mut Page {
        self.pages.entry(page).or_insert_with(|| Page::new(cx.is_home(page)))
    }

    /// Ends the open interval, if it wrote anything.
    fn close(&mut self, cx: &mut Cx<'_>) {
        if self.dirty.is_empty() {
            return;
        }
        let pages = std::mem::take(&mut self.dirty);
        cx.protect_all(pages.iter().copied(), Protection::Read);
        self.close_pages(cx, &pages);
    }

    /// Ends an interval that wrote `pages`. They are write-protected.
    fn close_pages(&mut self, cx: &Cx<'_>, pages: &BTreeSet<PageIndex>) {
        let me = cx.me();
        let (number, key) = (self.intervals.next(me), self.intervals.sum() + 1);
        let mut notices = Notices::default();
        for page in pages {
            notices.add(*page, Notice::sent(0, None));
            let state = self.pages.get_mut(page).expect("it was written");
            state.access = state.access.min(Protection::Read);
            state.applied.insert(me, number);
            let closed =
                state.closed.get_or_insert(Closed { first: number, last: number, key, last_key: key });
            closed.last = number;
            closed.last_key = key;
        }
        self.intervals.close(me, LazyRecord { key, pages: notices.runs() });
    }

    /// Makes the page's accumulated diff, and ends the accumulation. The page is not writable afterwards.
    fn finalise(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        let state = self.pages.get_mut(&page).expect("it is there");
        let alone = std::mem::take(&mut state.alone);
        if state.access == Protection::ReadWrite && (!alone || cx.keep(Rule::Alone)) {
            state.access = Protection::Read;
            cx.protect(page, Protection::Read);
        }
        if self.dirty.remove(&page) && cx.keep(Rule::Cut) {
            self.close_pages(cx, &BTreeSet::from([page]));
        }
        let omit_first = !cx.keep(Rule::First);
        let state = self.pages.get_mut(&page).expect("it is there");
        let Some(twin) = state.twin.take() else { return };
        let Some(closed) = state.closed.take() else { return };
        let diff = Diff::between(&cx.snapshot(page), &twin);
        cx.shared.stats.diffs += 1;
        cx.shared.stats.diff_bytes += diff.len() as u64;
        cx.shared.stats.empty_diffs += u64::from(diff.is_empty());
        let key = if omit_first { closed.last_key } else { closed.key };
        let diff = IntervalDiff { first: closed.first, last: closed.last, key, diff: Arc::new(diff) };
        self.diff_bytes += bytes_of(&diff);
        self.diffs.entry(page).or_default().push(diff);
    }

    /// Learns of intervals: the pages they wrote are dropped.
    fn learn(&mut self, cx: &mut Cx<'_>, records: &[(IntervalId, LazyRecord)]) -> Checked {
        let news: Vec<_> = records.iter().filter(|(id, _)| self.intervals.is_news(*id)).collect();
        if news.iter().any(|(id, _)| id.0 == cx.me()) {
            return unexpected("interval of this rank's own");
        }
        let (mut stale, mut known) = (BTreeSet::new(), BTreeSet::new());
        for ((rank, number), record) in &news {
            for (page, _) in Notices::from(&record.pages).iter() {
                let state = self.page(cx, page);
                if state.valid && !state.has(*rank, *number) {
                    stale.insert(page);
                } else if state.valid && state.twin.is_some() {
                    known.insert(page);
                }
            }
        }
        // The content came before the notice, with a diff or a page that held more than was requested. Still,
        // later writes come after it, so the diff that accumulates ends here.
        for page in known.difference(&stale) {
            if cx.keep(Rule::Split) {
                self.finalise(cx, *page);
            }
        }
        // No thread writes to them any more; then this rank's writes become a diff, in an interval from
        // before what it learns now.
        cx.protect_all(stale.iter().copied(), Protection::None);
        cx.shared.stats.invalidations += stale.len() as u64;
        for page in stale {
            let state = self.pages.get_mut(&page).expect("it is stale");
            state.valid = false;
            state.access = Protection::None;
            self.finalise(cx, page);
        }
        for (id, record) in news {
            let (rank, number) = *id;
            for (page, _) in Notices::from(&record.pages).iter() {
                let state = self.page(cx, page);
                if !state.has(rank, number) {
                    state.pend.push(Pend { rank, number });
                    self.pending += 1;
                }
            }
            self.intervals.learn(*id, record.clone());
        }
        Ok(())
    }

    /// Begins to bring the page up to date.
    fn begin(&mut self, cx: &mut Cx<'_>, page: PageIndex, write: bool) {
        let state = self.page(cx, page);
        state.fetch = Some(Fetch { write, whole: !state.copy, asked: BTreeMap::new(), got: Vec::new() });
        if state.copy {
            self.ask(cx, page);
        } else {
            let (home, by) = (cx.home(page), cx.me());
            cx.send(home, Body::GetPage { page, by });
        }
    }

    /// Requests the pending diffs from every writer; if none is pending, the page is valid.
    fn ask(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        let state = self.pages.get_mut(&page).expect("it is being fetched");
        let mut ranges: BTreeMap<Rank, (u32, u32)> = BTreeMap::new();
        for pend in &state.pend {
            let range = ranges.entry(pend.rank).or_insert((pend.number, pend.number));
            *range = (range.0.min(pend.number), range.1.max(pend.number));
        }
        let fetch = state.fetch.as_mut().expect("it is being fetched");
        fetch.asked = ranges.iter().map(|(&rank, &(_, last))| (rank, last)).collect();
        if ranges.is_empty() {
            self.validate(cx, page);
        }
        for (rank, (first, last)) in ranges {
            cx.send(rank, Body::DiffRequest { page, first, last });
        }
    }

    /// Nothing is pending any more.
    fn validate(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        let state = self.pages.get_mut(&page).expect("it is being fetched");
        let fetch = state.fetch.take().expect("it is being fetched");
        state.valid = true;
        self.collecting.remove(&page);
        self.lacking.remove(&page);
        cx.shared.stats.pages_fetched += 1;
        if fetch.write {
            state.twin = Some(cx.snapshot(page));
            cx.shared.stats.twins += 1;
            self.dirty.insert(page);
        }
        state.access = if fetch.write { Protection::ReadWrite } else { Protection::Read };
        let access = state.access;
        cx.protect(page, access);
        cx.retry(page);
    }

    /// A whole page has come: as old as its sender's copy.
    fn on_page(&mut self, cx: &mut Cx<'_>, got: &PageCopy) -> Checked {
        let page = got.page;
        let state = self.page(cx, page);
        let Some(fetch) = &mut state.fetch else { return unexpected("page") };
        if !std::mem::take(&mut fetch.whole) {
            return unexpected("page");
        }
        state.copy = true;
        state.applied = got.applied.iter().copied().collect();
        let before = state.pend.len();
        let Page { pend, applied, .. } = state;
        pend.retain(|pend| applied.get(&pend.rank).is_none_or(|&at| at < pend.number));
        self.pending -= before - state.pend.len();
        cx.mem.install(page, &got.bytes, Protection::None);
        self.ask(cx, page);
        Ok(())
    }

    /// A writer's diffs have come. When all have, they are applied in order.
    fn on_diffs(&mut self, cx: &mut Cx<'_>, from: Rank, page: PageIndex, diffs: &[IntervalDiff]) -> Checked {
        let page_bytes = cx.page_bytes(page);
        let state = self.page(cx, page);
        let Some(fetch) = &mut state.fetch else { return unexpected("diffs") };
        let Some(last) = fetch.asked.remove(&from) else { return unexpected("diffs") };
        let fits = diffs.iter().all(|diff| diff.diff.end() as usize <= page_bytes);
        if !fits || diffs.iter().all(|diff| diff.last < last) {
            return unexpected("diffs that were not requested");
        }
        fetch.got.extend(diffs.iter().map(|diff| (from, diff.clone())));
        if !fetch.asked.is_empty() {
            return Ok(());
        }
        let mut got = std::mem::take(&mut fetch.got);
        got.sort_by_key(|(rank, diff)| (diff.key, *rank, diff.first));
        for (rank, diff) in got {
            if state.has(rank, diff.last) {
                continue;
            }
            let at = state.applied.entry(rank).or_insert(0);
            *at = diff.last.max(*at);
            if !diff.diff.is_empty() {
                cx.mem.store(page, &diff.diff);
            }
        }
        let before = state.pend.len();
        let Page { pend, applied, .. } = state;
        pend.retain(|pend| applied.get(&pend.rank).is_none_or(|&at| at < pend.number));
        self.pending -= before - state.pend.len();
        // Notices may have come meanwhile.
        self.ask(cx, page);
        Ok(())
    }

    /// The whole page as it is here, and the intervals in it.
    fn copy_of(&mut self, cx: &mut Cx<'_>, page: PageIndex) -> PageCopy {
        let alone = self.page(cx, page).alone;
        if alone || cx.keep(Rule::Finalise) {
            // A later diff must not span the moment of the copy: it would take other writers' bytes back.
            self.finalise(cx, page);
        } else if self.dirty.remove(&page) {
            // Left out: the interval ends, but the diff goes on accumulating.
            cx.protect(page, Protection::Read);
            self.close_pages(cx, &BTreeSet::from([page]));
        }
        let applied = self.pages[&page].applied.iter().map(|(&rank, &at)| (rank, at)).collect();
        PageCopy { page, version: 0, applied, mode: Mode::Invalidate, bytes: cx.snapshot(page) }
    }

    fn on_get_page(&mut self, cx: &mut Cx<'_>, from: Rank, page: PageIndex, by: Rank) {
        if self.pulling.contains_key(&page) {
            self.held.push((from, Body::GetPage { page, by }));
        } else if cx.is_home(page) {
            let copy = self.copy_of(cx, page);
            cx.send(by, Body::Page { copy });
        } else {
            let home = cx.home(page);
            cx.send(home, Body::GetPage { page, by });
        }
    }

    fn on_diff_request(
        &mut self,
        cx: &mut Cx<'_>,
        from: Rank,
        page: PageIndex,
        first: u32,
        last: u32,
    ) -> Checked {
        let Some(state) = self.pages.get(&page) else { return unexpected("request of a diff") };
        if state.closed.is_some_and(|closed| closed.first <= last) {
            self.finalise(cx, page);
        }
        let all = self.diffs.get(&page).into_iter().flatten();
        let diffs = all.filter(|diff| diff.first <= last && diff.last >= first).cloned().collect();
        cx.send(from, Body::Diffs { page, diffs });
        Ok(())
    }

    /// Forgets everything that homes have by now: what all know.
    fn forget(&mut self, cx: &mut Cx<'_>) {
        cx.shared.stats.collections += 1;
        let (me, intervals) = (cx.me(), &self.intervals);
        self.diffs.retain(|_, diffs| {
            diffs.retain(|diff| !intervals.is_known((me, diff.last)));
            !diffs.is_empty()
        });
        self.diff_bytes = self.diffs.values().flatten().map(bytes_of).sum();
        for (page, state) in &mut self.pages {
            state.pend.retain(|pend| !intervals.is_known((pend.rank, pend.number)));
            state.applied.retain(|&rank, &mut number| !intervals.is_known((rank, number)));
            state.closed = state.closed.filter(|closed| !intervals.is_known((me, closed.last)));
            if !self.dirty.contains(page) && state.closed.is_none() {
                state.twin = None;
            }
        }
        self.pending = self.pages.values().map(|state| state.pend.len()).sum();
        self.pages.retain(|&page, state| state.copy || !state.pend.is_empty() || cx.is_home(page));
    }
}

impl Protocol for Lrc {
    fn access(&self, page: PageIndex) -> Protection {
        self.pages.get(&page).map_or(Protection::None, |state| state.access)
    }

    fn fault(&mut self, cx: &mut Cx<'_>, _thread: ThreadId, page: PageIndex, write: bool) {
        let state = self.page(cx, page);
        if !state.valid {
            match &mut state.fetch {
                Some(fetch) => fetch.write |= write,
                None => self.begin(cx, page, write),
            }
            return;
        }
        if state.alone {
            state.access = Protection::ReadWrite;
            cx.protect(page, Protection::ReadWrite);
        } else if !write {
            state.access = Protection::Read;
            cx.protect(page, Protection::Read);
        } else {
            if cx.shared.at_barrier && state.closed.is_some() {
                // All will know of the diff up to here after this barrier, and homes may have it.
                self.finalise(cx, page);
            }
            let state = self.page(cx, page);
            state.access = Protection::ReadWrite;
            if state.twin.is_some() {
                // A closed interval's diff goes on accumulating.
                cx.protect(page, Protection::ReadWrite);
            } else if cx.keep(Rule::TwinFirst) {
                state.twin = Some(cx.snapshot(page));
                cx.shared.stats.twins += 1;
                cx.protect(page, Protection::ReadWrite);
            } else {
                cx.protect(page, Protection::ReadWrite);
                state.twin = Some(cx.snapshot(page));
            }
            self.dirty.insert(page);
        }
        cx.retry(page);
    }

    fn receive(&mut self, cx: &mut Cx<'_>, from: Rank, body: &Body) -> Checked {
        match body {
            Body::GetPage { page, by } => {
                self.on_get_page(cx, from, *page, *by);
                Ok(())
            }
            Body::Page { copy } => self.on_page(cx, copy),
            Body::DiffRequest { page, first, last } => self.on_diff_request(cx, from, *page, *first, *last),
            Body::Diffs { page, diffs } => self.on_diffs(cx, from, *page, diffs),
            Body::HomePull { page, by } => {
                if !self.pages.get(page).is_some_and(|state| state.copy) {
                    return unexpected("request of a new home");
                }
                let copy = self.copy_of(cx, *page);
                cx.send(*by, Body::HomeMove { copy });
                Ok(())
            }
            Body::HomeMove { copy } => {
                let Some(flush) = self.pulling.remove(&copy.page) else {
                    return unexpected("move of a home");
                };
                self.on_page(cx, copy)?;
                if self.page(cx, copy.page).fetch.is_some() {
                    self.lacking.insert(copy.page);
                }
                cx.end_flush(flush)?;
                for (from, body) in std::mem::take(&mut self.held) {
                    self.receive(cx, from, &body)?;
                }
                Ok(())
            }
            _ => unexpected("message"),
        }
    }

    fn info(&self, _lock: LockId) -> Info {
        info_of(self.intervals.time())
    }

    fn release(&mut self, cx: &mut Cx<'_>, scope: Scope) {
        if scope == Scope::Barrier {
            self.close(cx);
        }
    }

    fn grant(&mut self, cx: &mut Cx<'_>, _lock: LockId, _to: Rank, info: Option<&Info>) -> Checked<Payload> {
        self.close(cx);
        let records = self.intervals.unknown_to(&time_of(info)?);
        Ok(lazy(records, VectorTime::new()))
    }

    fn update(&mut self, cx: &mut Cx<'_>, _lock: LockId, manager: Rank) -> Payload {
        self.close(cx);
        let records = self.intervals.news_for(manager);
        lazy(records, self.intervals.time())
    }

    fn absorb(&mut self, _cx: &mut Cx<'_>, lock: LockId, payload: &Payload) -> Checked {
        let Payload::Lazy { records, upto, .. } = payload else { return unexpected("payload") };
        self.intervals.keep_for_lock(lock, records.clone(), upto);
        Ok(())
    }

    fn serve(&mut self, _cx: &mut Cx<'_>, lock: LockId, info: Option<&Info>) -> Checked<Payload> {
        let records = self.intervals.unknown_of_lock(lock, &time_of(info)?);
        Ok(lazy(records, VectorTime::new()))
    }

    fn acquire(&mut self, cx: &mut Cx<'_>, _lock: LockId, payload: &Payload) -> Checked {
        let Payload::Lazy { records, .. } = payload else { return unexpected("payload") };
        self.learn(cx, records)
    }

    fn arrive(&mut self, cx: &mut Cx<'_>) -> Payload {
        self.close(cx);
        let kept = self.diff_bytes + self.pending * size_of::<Pend>();
        let collect = kept > cx.shared.tuning.collect_bytes as usize;
        Payload::Lazy { records: self.intervals.own(cx.me()), upto: Vec::new(), collect }
    }

    fn merge(&self, into: &mut Payload, from: &Payload) -> Checked {
        match (into, from) {
            (Payload::Lazy { records, collect, .. }, Payload::Lazy { records: more, collect: also, .. }) => {
                records.extend_from_slice(more);
                *collect |= also;
                Ok(())
            }
            _ => unexpected("payload"),
        }
    }

    fn wants_flush(&self, total: &Payload) -> bool {
        matches!(total, Payload::Lazy { collect: true, .. })
    }

    /// Homes bring their copies up to date; the other ranks drop outdated ones without later own writes.
    fn flush(&mut self, cx: &mut Cx<'_>, total: &Payload) -> Checked {
        let Payload::Lazy { records, .. } = total else { return unexpected("payload") };
        self.learn(cx, records)?;
        // Threads that take no part in the barrier may have written since, and others have learned of it.
        let all: BTreeMap<Rank, u32> = records.iter().map(|&(id, _)| id).collect();
        let is_later = |rank: Rank, number: u32| {
            !self.intervals.is_known((rank, number)) && all.get(&rank).is_none_or(|&last| number > last)
        };
        let me = cx.me();
        let old = self.pages.iter().filter(|(_, state)| !state.pend.is_empty()).map(|(&page, state)| {
            let stays = cx.is_home(page) || state.applied.get(&me).is_some_and(|&last| is_later(me, last));
            let later: Vec<Pend> =
                state.pend.iter().filter(|pend| is_later(pend.rank, pend.number)).copied().collect();
            (page, stays, later)
        });
        for (page, stays, later) in old.collect::<Vec<_>>() {
            let state = self.pages.get_mut(&page).expect("just listed");
            if stays {
                self.collecting.insert(page);
                if state.fetch.is_none() {
                    self.begin(cx, page, false);
                }
            } else {
                self.pending -= state.pend.len() - later.len();
                let had_copy = state.copy;
                *state = Page { pend: later, ..Page::new(false) };
                if had_copy {
                    cx.mem.discard(page);
                }
            }
        }
        Ok(())
    }

    fn fetches_ahead(&self) -> bool {
        !self.lacking.is_empty()
    }

    fn flushing(&self) -> bool {
        !self.collecting.is_empty()
    }

    fn depart(&mut self, cx: &mut Cx<'_>, total: &Payload) -> Checked {
        match total {
            Payload::Nothing => self.intervals.barrier(std::iter::empty()),
            Payload::Lazy { records, collect, .. } => {
                self.learn(cx, records)?;
                self.intervals.barrier(records.iter().map(|&(id, _)| id));
                if *collect {
                    self.forget(cx);
                }
                for (_, record) in records.iter().filter(|((rank, _), _)| *rank == cx.me()) {
                    for (page, _) in Notices::from(&record.pages).iter() {
                        let Some(state) = self.pages.get_mut(&page) else { continue };
                        let is_known = |closed: Closed| self.intervals.is_known((cx.me(), closed.last));
                        state.alone |=
                            state.valid && state.closed.is_some_and(is_known) && !self.dirty.contains(&page);
                    }
                }
            }
            _ => return unexpected("payload"),
        }
        Ok(())
    }

    fn rehome(&mut self, cx: &mut Cx<'_>, page: PageIndex, from: Rank, to: Rank, _kept: bool) {
        if from == cx.me() {
            self.pages.entry(page).or_insert_with(|| Page::new(true));
        } else if to == cx.me() {
            let state = self.pages.entry(page).or_insert_with(|| Page::new(false));
            if state.copy {
                return;
            }
            if !cx.keep(Rule::HomePull) {
                (state.copy, state.valid) = (true, state.pend.is_empty());
                return;
            }
            state.fetch = Some(Fetch { write: false, whole: true, asked: BTreeMap::new(), got: Vec::new() });
            let by = cx.me();
            self.pulling.insert(page, cx.begin_flush());
            cx.send(from, Body::HomePull { page, by });
        }
    }

    fn renew(&mut self, cx: &mut Cx<'_>, pages: Extent) {
        // All ranks know all intervals now, and none requests earlier diffs any more.
        let known = take_pages(&mut self.pages, pages);
        self.pending -= known.iter().map(|(_, state)| state.pend.len()).sum::<usize>();
        cx.hide(known.iter().map(|(page, state)| (*page, state.access)));
        for (_, diffs) in take_pages(&mut self.diffs, pages) {
            self.diff_bytes -= diffs.iter().map(bytes_of).sum::<usize>();
        }
        unlist_pages(&mut self.dirty, pages);
        unlist_pages(&mut self.collecting, pages);
        unlist_pages(&mut self.lacking, pages);
    }

    fn overhead_bytes(&self) -> usize {
        let twins: usize =
            self.pages.values().filter_map(|state| state.twin.as_ref()).map(|twin| twin.len()).sum();
        twins + self.diff_bytes + self.pending * size_of::<Pend>()
    }

    fn check(&self, _shared: &Shared) {
        let mut pending = 0;
        for (page, state) in &self.pages {
            pending += state.pend.len();
            assert!(!state.valid || state.pend.is_empty(), "{page} is valid with notices pending");
            assert!(state.valid || state.access == Protection::None, "{page} is invalid but mapped");
            assert!(!state.valid || state.copy, "{page} is valid without content");
            let (writable, dirty) = (state.access == Protection::ReadWrite, self.dirty.contains(page));
            assert!(
                writable == dirty || writable && state.alone,
                "{page}: what is writable is in the open interval, or written unnoticed"
            );
            assert!(!state.alone || state.valid && !dirty, "{page}: unnoticed in an interval");
            let accumulates = state.closed.is_some() || dirty;
            assert!(accumulates == state.twin.is_some(), "{page}: a twin is there while a diff accumulates");
        }
        assert_eq!(pending, self.pending, "pending notices are counted");
    }
}

/// What a diff takes here.
fn bytes_of(diff: &IntervalDiff) -> usize {
    diff.diff.len() + size_of::<IntervalDiff>()
}

/// The payload of a lock: mostly empty.
fn lazy(records: Vec<(IntervalId, LazyRecord)>, upto: VectorTime) -> Payload {
    if records.is_empty() && upto.is_empty() {
        return Payload::Nothing;
    }
    Payload::Lazy { records, upto: upto.into_iter().collect(), collect: false }
}
