//! Automatic update release consistency (Iftode, Dubnicki, Felten and Li, HPCA '96), on hardware without
//! automatic updates.
//!
//! Like hlrc, but an idle rank compares the pages it writes with their twins and streams the changes to their
//! homes, so that a release finds little left to send. Streamed changes have no version: the release fences
//! each page that was touched, which gives it one.
//!
//! It is correct because every sent byte becomes part of the twin. A word that is caught half-written is
//! completed by a later round or by the release, and no rank may read it before that.
//!
//! It never protects a page to examine it, never streams a page that is invalid or being fetched, and never
//! brings one back to examine it.

use std::collections::{BTreeMap, BTreeSet};

use super::hlrc::Hlrc;
use super::{Cx, Protocol, Scope};
use crate::direct::Changed;
use crate::message::{Info, PageDiff, Payload};
use crate::pages::take_pages;
use crate::rule::Rule;
use crate::state::Shared;
use crate::{BarrierKind, Body, Checked, Diff, LockId, Protection, ProtocolKind, Rank, ThreadId};
use rampool_wire::units::{Extent, PageIndex};

/// The longest pause of a page that changes all the time, in rounds.
const LONGEST_PAUSE: u8 = 64;

#[derive(Clone, Hash, Debug)]
pub(crate) struct Aurc {
    base: Hlrc,
    /// The page after which the next round goes on.
    cursor: PageIndex,
    pauses: BTreeMap<PageIndex, Pause>,
}

/// A page that changes in each round is examined less often: bytes that change twice would be sent twice.
#[derive(Clone, Copy, Hash, Debug)]
struct Pause {
    period: u8,
    left: u8,
}

impl Aurc {
    /// `Aurc` streams every page that is written, `Auto` those in the mode for it.
    pub fn of_kind(kind: ProtocolKind) -> Self {
        Self { base: Hlrc::of_kind(kind), cursor: PageIndex(0), pauses: BTreeMap::new() }
    }

    /// Whether the page's turn has come.
    fn is_due(&mut self, page: PageIndex) -> bool {
        let copy = &self.base.copies[&page];
        if !copy.valid
            || copy.access != Protection::ReadWrite
            || copy.fetch.is_some()
            || !self.base.streams(copy)
        {
            return false;
        }
        let pause = self.pauses.entry(page).or_insert(Pause { period: 1, left: 0 });
        if pause.left > 0 {
            pause.left -= 1;
        }
        pause.left == 0
    }

    /// Compares one page with its twin; the content seen becomes the twin.
    fn scan(&mut self, cx: &mut Cx<'_>, page: PageIndex) -> Diff {
        cx.shared.stats.scans += 1;
        let now = cx.snapshot(page);
        let next = if cx.keep(Rule::Snapshot) { None } else { Some(cx.snapshot(page)) };
        let copy = self.base.copies.get_mut(&page).expect("it has a twin");
        let twin = copy.twin.replace(next.unwrap_or_else(|| now.clone())).expect("it has a twin");
        let diff = Diff::between(&now, &twin);
        let pause = self.pauses.get_mut(&page).expect("it is due");
        pause.period = if diff.is_empty() { 1 } else { (pause.period * 2).min(LONGEST_PAUSE) };
        pause.left = pause.period - 1;
        diff
    }
}

impl Protocol for Aurc {
    fn access(&self, page: PageIndex) -> Protection {
        self.base.access(page)
    }

    fn fault(&mut self, cx: &mut Cx<'_>, thread: ThreadId, page: PageIndex, write: bool) {
        self.base.fault(cx, thread, page, write);
    }

    fn receive(&mut self, cx: &mut Cx<'_>, from: Rank, body: &Body) -> Checked {
        self.base.receive(cx, from, body)
    }

    fn idle(&mut self, cx: &mut Cx<'_>, budget_bytes: u32) {
        let behind = self.base.twinned.range(self.cursor.offset(1)..);
        let round: Vec<PageIndex> = behind.chain(self.base.twinned.range(..=self.cursor)).copied().collect();
        let mut left = budget_bytes as usize;
        let mut by_home: BTreeMap<Rank, Vec<PageDiff>> = BTreeMap::new();
        for page in round {
            if left == 0 {
                break;
            }
            self.cursor = page;
            // A page beyond the budget would push out another, again and again; its changes go with the
            // release.
            if !cx.is_near(page) || !self.is_due(page) {
                continue;
            }
            let diff = self.scan(cx, page);
            if !diff.is_empty() {
                left = left.saturating_sub(diff.len());
                cx.shared.stats.streamed_bytes += diff.len() as u64;
                self.base.streamed.insert(page);
                by_home.entry(cx.home(page)).or_default().push(PageDiff { page, diff });
            }
        }
        for (home, diffs) in by_home {
            cx.send(home, Body::Update { diffs });
        }
    }

    fn evict(&mut self, cx: &mut Cx<'_>, pages: &[PageIndex]) {
        self.base.evict(cx, pages);
    }

    fn info(&self, lock: LockId) -> Info {
        self.base.info(lock)
    }

    fn may_wait(&self) -> bool {
        self.base.may_wait()
    }

    fn release(&mut self, cx: &mut Cx<'_>, scope: Scope) {
        self.base.release(cx, scope);
        self.pauses.clear();
    }

    fn released(&mut self, cx: &mut Cx<'_>) {
        self.base.released(cx);
    }

    fn grant(&mut self, cx: &mut Cx<'_>, lock: LockId, to: Rank, info: Option<&Info>) -> Checked<Payload> {
        self.base.grant(cx, lock, to, info)
    }

    fn update(&mut self, cx: &mut Cx<'_>, lock: LockId, manager: Rank) -> Payload {
        self.base.update(cx, lock, manager)
    }

    fn absorb(&mut self, cx: &mut Cx<'_>, lock: LockId, payload: &Payload) -> Checked {
        self.base.absorb(cx, lock, payload)
    }

    fn serve(&mut self, cx: &mut Cx<'_>, lock: LockId, info: Option<&Info>) -> Checked<Payload> {
        self.base.serve(cx, lock, info)
    }

    fn acquire(&mut self, cx: &mut Cx<'_>, lock: LockId, payload: &Payload) -> Checked {
        self.base.acquire(cx, lock, payload)
    }

    fn arrive(&mut self, cx: &mut Cx<'_>) -> Payload {
        self.base.arrive(cx)
    }

    fn merge(&self, into: &mut Payload, from: &Payload) -> Checked {
        self.base.merge(into, from)
    }

    fn wants_flush(&self, total: &Payload) -> bool {
        self.base.wants_flush(total)
    }

    fn flush(&mut self, cx: &mut Cx<'_>, total: &Payload) -> Checked {
        self.base.flush(cx, total)
    }

    fn flushed(&mut self, cx: &mut Cx<'_>) -> Payload {
        self.base.flushed(cx)
    }

    fn unsent(&self, total: &Payload) -> BTreeSet<PageIndex> {
        self.base.unsent(total)
    }

    fn kept(&mut self, cx: &Cx<'_>, kind: BarrierKind, total: &Payload) -> Vec<(PageIndex, Rank)> {
        self.base.kept(cx, kind, total)
    }

    fn depart(&mut self, cx: &mut Cx<'_>, total: &Payload) -> Checked {
        self.base.depart(cx, total)
    }

    fn begin_epoch(&mut self, cx: &mut Cx<'_>) {
        self.base.begin_epoch(cx);
    }

    fn overtaken(&mut self, cx: &mut Cx<'_>) {
        self.base.overtaken(cx);
    }

    fn fetches_ahead(&self) -> bool {
        self.base.fetches_ahead()
    }

    fn rehome(&mut self, cx: &mut Cx<'_>, page: PageIndex, from: Rank, to: Rank, kept: bool) {
        self.base.rehome(cx, page, from, to, kept);
    }

    fn freed(&mut self, cx: &mut Cx<'_>, pages: Extent) {
        self.base.freed(cx, pages);
    }

    fn renew(&mut self, cx: &mut Cx<'_>, pages: Extent) {
        self.base.renew(cx, pages);
        take_pages(&mut self.pauses, pages);
    }

    fn serves_direct(&self) -> bool {
        self.base.serves_direct()
    }

    fn is_unreleased(&self, page: PageIndex) -> bool {
        self.base.is_unreleased(page)
    }

    fn direct_done(&mut self, cx: &mut Cx<'_>, changed: &[Changed]) {
        self.base.direct_done(cx, changed);
    }

    fn overhead_bytes(&self) -> usize {
        self.base.overhead_bytes()
    }

    fn check(&self, shared: &Shared) {
        self.base.check(shared);
    }
}
