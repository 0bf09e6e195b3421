//! Scopes and their twins: which bytes leave with a lock when it is released, and how bytes that came with it
//! are merged.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::Cx;
use super::{Holding, Ibec, ScopeTwin};
use crate::home::patched;
use crate::message::{PageCopy, PageDiff, PageRuns, Stamp, in_messages};
use crate::rule::Rule;
use crate::{Body, Diff, Protection, ProtocolKind, Rank};
use rampool_wire::units::PageIndex;

impl Ibec {
    /// Write-protects everything.
    pub(super) fn protect_writable(&mut self, cx: &mut Cx<'_>) {
        let pages = std::mem::take(&mut self.writable);
        cx.protect_all(pages.iter().copied(), Protection::Read);
        for page in pages {
            self.set_access(page, Protection::Read);
        }
    }

    /// Write-protects pages that need a twin; a home without open scopes goes on writing.
    pub(super) fn protect_twinned(&mut self, cx: &mut Cx<'_>) {
        if !self.open.is_empty() {
            return self.protect_writable(cx);
        }
        let away: Vec<PageIndex> =
            self.writable.iter().copied().filter(|page| !self.homes.contains_key(page)).collect();
        cx.protect_all(away.iter().copied(), Protection::Read);
        for page in away {
            self.set_access(page, Protection::Read);
        }
    }

    /// Gives a page the twins that it needs before it is written. `content` is its content.
    pub(super) fn add_twins(
        &mut self,
        cx: &mut Cx<'_>,
        page: PageIndex,
        outer: bool,
        content: Option<&Arc<[u8]>>,
    ) {
        let local = self.locals.entry(page).or_default();
        let missing: Vec<Holding> =
            self.open.iter().copied().filter(|scope| !local.scopes.contains_key(scope)).collect();
        if missing.is_empty() && (!outer || local.outer.is_some()) {
            return;
        }
        let twin = content.cloned().unwrap_or_else(|| cx.snapshot(page));
        cx.shared.stats.twins += 1;
        if outer && local.outer.is_none() {
            local.outer = Some(Arc::clone(&twin));
        }
        if !outer && !missing.is_empty() {
            local.base.get_or_insert_with(|| Arc::clone(&twin));
        }
        local.made += 1;
        for scope in missing {
            local.scopes.insert(scope, ScopeTwin { bytes: Arc::clone(&twin), order: local.made });
        }
    }

    /// A lock's data is about to change a page that others may ask this rank for.
    pub(super) fn keep_base(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        if self.is_master(cx, page) {
            let local = self.locals.entry(page).or_default();
            if local.base.is_none() {
                local.base = Some(cx.snapshot(page));
            }
        }
    }

    /// The content that another rank gets when it requests the page: without changes under locks since the
    /// barrier.
    pub(super) fn as_of_barrier(&self, page: PageIndex, copy: PageCopy) -> PageCopy {
        let kept = self.locals.get(&page).and_then(|local| local.base.as_ref().or(local.outer.as_ref()));
        match kept {
            Some(bytes) => PageCopy { bytes: Arc::clone(bytes), ..copy },
            None => copy,
        }
    }

    /// Makes a page that is here writable.
    pub(super) fn open_for_writing(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        let master = self.is_master(cx, page);
        if cx.keep(Rule::TwinFirst) {
            self.add_twins(cx, page, !master, None);
        }
        if master {
            // Writes under a lock are tracked by other means than a hot page.
            let outside = self.open.is_empty();
            self.home(page).fault(cx, page, true, outside);
        } else {
            cx.protect(page, Protection::ReadWrite);
        }
        self.set_access(page, Protection::ReadWrite);
        if !cx.keep(Rule::TwinFirst) {
            self.add_twins(cx, page, !master, None);
        }
    }

    /// Imports bytes that another rank wrote.
    pub(super) fn import(&mut self, cx: &mut Cx<'_>, page: PageIndex, diff: &Diff, stamp: Stamp) {
        self.clock = self.clock.max(stamp.clock);
        let here = self.is_master(cx, page) || self.copies.get(&page).is_some_and(|copy| copy.valid);
        let local = self.locals.entry(page).or_default();
        let newer = local.stamps.put(diff, stamp, 1);
        let newer = if cx.keep(Rule::Stamps) { newer } else { diff.clone() };
        if newer.is_empty() {
            return;
        }
        if here {
            self.write_through(cx, page, &newer);
        } else {
            self.copies.entry(page).or_default().stash.put(&newer, stamp, 1);
        }
    }

    /// Writes to a page without it looking like a write.
    pub(super) fn write_through(&mut self, cx: &mut Cx<'_>, page: PageIndex, diff: &Diff) {
        if cx.keep(Rule::ImportTwin)
            && let Some(local) = self.locals.get_mut(&page)
        {
            for twin in local.outer.iter_mut().chain(local.scopes.values_mut().map(|twin| &mut twin.bytes)) {
                *twin = patched(twin, diff);
            }
        }
        cx.mem.store(page, diff);
    }

    /// Ends a scope: the changes since it opened, and the bytes it carries, belong to its lock.
    pub(super) fn close(&mut self, cx: &mut Cx<'_>, scope: Holding) {
        self.clock = self.clock.saturating_add(1);
        let now = Stamp { clock: self.clock, rank: cx.me() };
        self.open.remove(&scope);
        let mut update = Vec::new();
        for (&page, local) in &mut self.locals {
            let carried = local.carry.remove(&scope);
            let twin = local.scopes.remove(&scope);
            if carried.is_none() && twin.is_none() {
                continue;
            }
            let mut all = carried.unwrap_or_default();
            if let Some(twin) = twin {
                let now_holds = cx.snapshot(page);
                let diff = Diff::between(&now_holds, &twin.bytes);
                cx.shared.stats.diffs += 1;
                cx.shared.stats.diff_bytes += diff.len() as u64;
                cx.shared.stats.empty_diffs += u64::from(diff.is_empty());
                for younger in local.scopes.values_mut().filter(|other| other.order >= twin.order) {
                    // It may have caught a byte of this scope between two writes, the second of which
                    // restored the old value.
                    if cx.keep(Rule::Transient) && cx.keep(Rule::SiblingTwin) {
                        younger.bytes = Arc::clone(&now_holds);
                    }
                }
                if !diff.is_empty() {
                    for (other, twin) in &mut local.scopes {
                        if cx.keep(Rule::SiblingTwin) {
                            twin.bytes = patched(&twin.bytes, &diff);
                        }
                        if cx.keep(Rule::Carry) {
                            local.carry.entry(*other).or_default().put(&diff, now, 1);
                        }
                    }
                    if let Some(outer) = &mut local.outer
                        && cx.keep(Rule::OuterTwin)
                    {
                        *outer = patched(outer, &diff);
                    }
                    local.stamps.put(&diff, now, 1);
                    all.put(&diff, now, 1);
                }
            }
            if !all.is_empty() {
                update.push(PageRuns { page, runs: all.newer_than(0) });
            }
        }
        if !update.is_empty() {
            self.logged = true;
            self.history.entry(scope.1).or_default().push(update);
        }
    }

    /// Sends changes outside of locks to the pages' homes.
    pub(super) fn flush_outer(&mut self, cx: &mut Cx<'_>) {
        self.protect_twinned(cx);
        let mut by_home: BTreeMap<Rank, Vec<PageDiff>> = BTreeMap::new();
        for (&page, local) in &mut self.locals {
            let Some(twin) = local.outer.take() else { continue };
            let diff = Diff::between(&cx.snapshot(page), &twin);
            cx.shared.stats.diffs += 1;
            cx.shared.stats.diff_bytes += diff.len() as u64;
            if diff.is_empty() {
                cx.shared.stats.empty_diffs += 1;
            } else {
                by_home.entry(cx.home(page)).or_default().push(PageDiff { page, diff });
            }
        }
        for (home, diffs) in by_home {
            for diffs in in_messages(diffs, PageDiff::weight) {
                let flush = cx.begin_flush();
                cx.send(
                    home,
                    Body::Flush {
                        protocol: ProtocolKind::Ibec,
                        flush,
                        under: None,
                        diffs,
                        fences: Vec::new(),
                    },
                );
            }
        }
    }
}
