//! Implicit-binding entry consistency (Midorikawa, Ohashi, Katano and Iizuka; SMS).
//!
//! Writes under a lock belong to that lock and travel with it: the next holder gets the bytes with the grant,
//! and no page is dropped. Everything else becomes visible at the next barrier. The lock's manager keeps the
//! newest value of each byte, so a lock's payload is bounded by its data, not by how often it was held. (On
//! forwarded locks, S5's old scheme, the last holder keeps every update since the barrier and passes all of
//! it on.)
//!
//! A written page has an *outer twin*, its content at the last barrier, and one twin for each open *scope*, a
//! thread holding a lock. Dirty bytes are known by page, not by thread, so a scope includes its siblings'
//! writes. Bytes therefore travel with the time of their write, the *stamp*, and three rules hold. A byte is
//! accepted only if it is newer than the one here. A scope that ends removes its bytes from all other twins
//! of the page, which *carry* them on, stamp and all. And every accepted byte goes into every twin, so that
//! it does not look like a write.
//!
//! Invariant: a writable page has a twin for each open scope, and an outer one unless this rank is its home.
//!
//! At a barrier outer changes go to their homes first, then, in a second round, the locks' data; a home never
//! lets the latter overwrite the former, which is newer wherever both have a byte.
//!
//! A lock never conveys writes from before it was taken. Programs that hand data over that way are free of
//! races but not legal here.

mod direct;
mod scopes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::hlrc::{merge_changed, single_writers};
use super::{Cx, Protocol, Scope, unexpected};
use crate::adapt::Mode;
use crate::direct::Changed;
use crate::home::HomePage;
use crate::message::{Info, PageCopy, PageDiff, PageRuns, Payload, Stamp, in_messages};
use crate::notice::{Notice, Notices};
use crate::overlay::Overlay;
use crate::pages::{take_pages, unlist_pages};
use crate::rule::Rule;
use crate::state::Shared;
use crate::{BarrierKind, Body, Checked, Diff, LockId, LockMode, Protection, ProtocolKind, Rank, ThreadId};
use rampool_wire::units::{Extent, PageIndex};

/// A thread that holds a lock.
type Holding = (ThreadId, LockId);

/// Newer than any write under a lock: a home's changes from outside of locks.
const OUTER: Stamp = Stamp { clock: u64::MAX, rank: Rank(u16::MAX) };

/// Up to this many writable pages get their twin when a scope opens; more are write-protected instead.
const EAGER_TWINS: usize = 4;

#[derive(Clone, Hash, Debug)]
pub(crate) struct Ibec {
    /// Lamport's clock of releases.
    clock: u64,
    homes: BTreeMap<PageIndex, HomePage>,
    copies: BTreeMap<PageIndex, Copy>,
    /// Twins and stamps since the last barrier.
    locals: BTreeMap<PageIndex, Local>,
    /// Pages that are writable now.
    writable: BTreeSet<PageIndex>,
    open: BTreeSet<Holding>,
    /// This rank's timestamp of each lock.
    seen: BTreeMap<LockId, u64>,
    /// Locks that this rank manages: their data.
    logs: BTreeMap<LockId, Log>,
    /// Updates of a lock: not sent to the manager yet, or (forwarded locks) all since the barrier.
    history: BTreeMap<LockId, Vec<Vec<PageRuns>>>,
    /// This rank released something under a lock since the barrier.
    logged: bool,
    /// Pages that changed outside of locks and are at their homes.
    fresh: Notices,
    /// Pages that changed under locks, found in the second round.
    log_pages: Notices,
    pulling: BTreeMap<PageIndex, u64>,
    held: Vec<(Rank, Body)>,
    /// Pages whose home this rank was before the last barrier. The new home may still ask for them.
    lent: BTreeSet<PageIndex>,
}

/// A page at a rank that is not its home.
#[derive(Clone, Hash, Debug, Default)]
struct Copy {
    valid: bool,
    writable: bool,
    mapped: bool,
    fetch: Option<Fetch>,
    /// Bytes that came with locks while there was no content.
    stash: Overlay,
}

#[derive(Clone, Copy, Hash, Debug)]
struct Fetch {
    write: bool,
    restart: bool,
}

#[derive(Clone, Hash, Debug, Default)]
struct Local {
    outer: Option<Arc<[u8]>>,
    scopes: BTreeMap<Holding, ScopeTwin>,
    /// Twins made so far.
    made: u32,
    /// Bytes that other scopes released while this one was open.
    carry: BTreeMap<Holding, Overlay>,
    /// The newest write known of each byte.
    stamps: Overlay,
    /// At the page's home: its content before the first change under a lock. Copies are handed out in that
    /// state: a rank that may read data guarded by a lock gets it with the lock, and no rank may see a
    /// holder's half-finished writes.
    base: Option<Arc<[u8]>>,
}

#[derive(Clone, Hash, Debug)]
struct ScopeTwin {
    bytes: Arc<[u8]>,
    /// The page's twins in the order in which they were made.
    order: u32,
}

#[derive(Clone, Hash, Debug, Default)]
struct Log {
    at: u64,
    pages: BTreeMap<PageIndex, Overlay>,
}

impl Copy {
    fn access(&self) -> Protection {
        match (self.mapped, self.writable) {
            (false, _) => Protection::None,
            (true, false) => Protection::Read,
            (true, true) => Protection::ReadWrite,
        }
    }

    fn set_access(&mut self, to: Protection) {
        self.mapped = to > Protection::None;
        self.writable = to == Protection::ReadWrite;
    }
}

impl Ibec {
    pub fn new() -> Self {
        Self {
            clock: 0,
            homes: BTreeMap::new(),
            copies: BTreeMap::new(),
            locals: BTreeMap::new(),
            writable: BTreeSet::new(),
            open: BTreeSet::new(),
            seen: BTreeMap::new(),
            logs: BTreeMap::new(),
            history: BTreeMap::new(),
            logged: false,
            fresh: Notices::default(),
            log_pages: Notices::default(),
            pulling: BTreeMap::new(),
            held: Vec::new(),
            lent: BTreeSet::new(),
        }
    }

    fn is_master(&self, cx: &Cx<'_>, page: PageIndex) -> bool {
        cx.is_home(page) && !self.pulling.contains_key(&page)
    }

    fn home(&mut self, page: PageIndex) -> &mut HomePage {
        self.homes.entry(page).or_insert_with(HomePage::new)
    }

    /// Records the application's access to a page.
    fn set_access(&mut self, page: PageIndex, to: Protection) {
        match self.homes.get_mut(&page) {
            Some(home) => home.access = to,
            None => self.copies.entry(page).or_default().set_access(to),
        }
        if to == Protection::ReadWrite {
            self.writable.insert(page);
        } else {
            self.writable.remove(&page);
        }
    }

    fn ask(&mut self, cx: &mut Cx<'_>, page: PageIndex, write: bool) {
        self.copies.entry(page).or_default().fetch = Some(Fetch { write, restart: false });
        let (home, by) = (cx.home(page), cx.me());
        cx.send(home, Body::GetPage { page, by });
    }

    fn on_page(&mut self, cx: &mut Cx<'_>, got: &PageCopy) -> Checked {
        let page = got.page;
        if cx.is_home(page) {
            return Ok(());
        }
        let Some(fetch) = self.copies.get(&page).and_then(|copy| copy.fetch) else {
            return unexpected("page");
        };
        if fetch.restart {
            cx.shared.stats.refetches += 1;
            self.ask(cx, page, fetch.write);
        } else {
            self.install(cx, got, fetch.write);
        }
        Ok(())
    }

    fn install(&mut self, cx: &mut Cx<'_>, got: &PageCopy, write: bool) {
        let page = got.page;
        cx.shared.stats.pages_fetched += 1;
        let copy = self.copies.entry(page).or_default();
        let mut content = Arc::clone(&got.bytes);
        if !copy.stash.is_empty() {
            let mut bytes = content.to_vec();
            copy.stash.apply(&mut bytes);
            content = bytes.into();
            copy.stash = Overlay::default();
        }
        copy.valid = true;
        copy.fetch = None;
        let access = if write { Protection::ReadWrite } else { Protection::Read };
        if write {
            self.add_twins(cx, page, true, Some(&content));
        }
        self.set_access(page, access);
        cx.mem.install(page, &content, access);
        cx.retry(page);
    }

    /// A message for a page's home.
    fn at_home(&mut self, cx: &mut Cx<'_>, from: Rank, body: &Body) -> Checked {
        let pages: Vec<PageIndex> = match body {
            Body::GetPage { page, .. } => vec![*page],
            Body::Flush { diffs, .. } => diffs.iter().map(|diff| diff.page).collect(),
            Body::Log { pages, .. } => pages.iter().map(|runs| runs.page).collect(),
            Body::Direct { accesses, .. } => accesses.iter().map(|one| one.page).collect(),
            _ => Vec::new(),
        };
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
                let copy = self.home(*page).copy(cx, *page);
                let copy = self.as_of_barrier(*page, copy);
                if self.access(*page) < Protection::ReadWrite {
                    self.writable.remove(page);
                }
                cx.send(*by, Body::Page { copy });
            }
            Body::Direct { call, accesses } => return self.on_direct(cx, from, *call, accesses),
            _ if !pages.iter().all(|&page| cx.is_home(page)) => {
                return unexpected("changes for another home");
            }
            Body::Flush { flush, diffs, .. } => {
                let mut advances = Vec::with_capacity(diffs.len());
                for PageDiff { page, diff } in diffs {
                    if cx.keep(Rule::OuterLast) {
                        self.locals.entry(*page).or_default().stamps.put(diff, OUTER, 1);
                    }
                    self.write_through(cx, *page, diff);
                    advances.push(self.home(*page).apply(cx, *page, &Diff::default()));
                }
                cx.send(
                    from,
                    Body::FlushAck { protocol: ProtocolKind::Ibec, flush: *flush, pages: advances },
                );
            }
            Body::Log { flush, pages } => {
                for PageRuns { page, runs } in pages {
                    for (stamp, diff) in runs {
                        self.import(cx, *page, diff, *stamp);
                    }
                }
                cx.send(
                    from,
                    Body::FlushAck { protocol: ProtocolKind::Ibec, flush: *flush, pages: Vec::new() },
                );
            }
            _ => return unexpected("message"),
        }
        Ok(())
    }

    /// The new home has the page.
    fn become_home(&mut self, cx: &mut Cx<'_>, page: PageIndex, kept: bool) {
        let copy = self.copies.remove(&page).unwrap_or_default();
        let home = HomePage {
            shared: !kept,
            dirty: copy.writable && !kept,
            access: copy.access(),
            ..HomePage::new()
        };
        self.homes.insert(page, home);
        if kept && copy.access() == Protection::Read && self.open.is_empty() {
            self.set_access(page, Protection::ReadWrite);
            cx.protect(page, Protection::ReadWrite);
        }
    }
}

impl Protocol for Ibec {
    fn access(&self, page: PageIndex) -> Protection {
        match (self.homes.get(&page), self.copies.get(&page)) {
            (Some(home), _) => home.access,
            (None, Some(copy)) => copy.access(),
            (None, None) => Protection::None,
        }
    }

    fn fault(&mut self, cx: &mut Cx<'_>, _thread: ThreadId, page: PageIndex, write: bool) {
        if self.is_master(cx, page) {
            if write {
                self.open_for_writing(cx, page);
            } else {
                let unnoticed = self.open.is_empty();
                self.home(page).fault(cx, page, false, unnoticed);
                let access = self.home(page).access;
                self.set_access(page, access);
            }
            cx.retry(page);
            return;
        }
        let pulling = self.pulling.contains_key(&page);
        let copy = self.copies.entry(page).or_default();
        if copy.valid {
            if write {
                self.open_for_writing(cx, page);
            } else {
                self.set_access(page, Protection::Read);
                cx.protect(page, Protection::Read);
            }
            cx.retry(page);
        } else if let Some(fetch) = &mut copy.fetch {
            fetch.write |= write;
        } else if !pulling {
            self.ask(cx, page, write);
        }
    }

    fn receive(&mut self, cx: &mut Cx<'_>, from: Rank, body: &Body) -> Checked {
        match body {
            Body::GetPage { .. } | Body::Flush { .. } | Body::Log { .. } | Body::Direct { .. } => {
                self.at_home(cx, from, body)
            }
            Body::Page { copy } => self.on_page(cx, copy),
            Body::FlushAck { flush, pages, .. } => {
                cx.end_flush(*flush)?;
                let me = cx.me();
                for advance in pages {
                    self.fresh.add(advance.page, Notice::sent(0, Some(me)));
                }
                Ok(())
            }
            Body::HomePull { page, by } => {
                let copy = PageCopy {
                    page: *page,
                    version: 0,
                    applied: Vec::new(),
                    mode: Mode::Invalidate,
                    bytes: cx.snapshot(*page),
                };
                let copy = self.as_of_barrier(*page, copy);
                cx.send(*by, Body::HomeMove { copy });
                Ok(())
            }
            Body::HomeMove { copy } => {
                let Some(flush) = self.pulling.remove(&copy.page) else {
                    return unexpected("move of a home");
                };
                cx.end_flush(flush)?;
                if !self.copies.entry(copy.page).or_default().stash.is_empty() {
                    self.locals.entry(copy.page).or_default().base = Some(Arc::clone(&copy.bytes));
                }
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
            let Some(copy) = self.copies.get(&page) else { continue };
            // Twins, and bytes that came with locks since the barrier, are not at the home.
            let dirty = (copy.writable || self.locals.contains_key(&page)) && cx.keep(Rule::EvictClean);
            if lent
                || dirty
                || copy.fetch.is_some()
                || !copy.stash.is_empty()
                || self.pulling.contains_key(&page)
            {
                continue;
            }
            if copy.mapped {
                mapped.push(page);
            }
            self.copies.entry(page).or_default().valid = false;
            self.set_access(page, Protection::None);
            gone.push(page);
        }
        cx.forget(&gone, mapped);
    }

    fn info(&self, lock: LockId) -> Info {
        self.seen.get(&lock).map_or(Info::Nothing, |&at| Info::Seen { at })
    }

    fn opened(&mut self, cx: &mut Cx<'_>, thread: ThreadId, lock: LockId, mode: LockMode) {
        if mode != LockMode::Exclusive {
            return;
        }
        self.open.insert((thread, lock));
        if self.writable.len() > EAGER_TWINS {
            self.protect_writable(cx);
            return;
        }
        for page in self.writable.clone() {
            let master = self.is_master(cx, page);
            self.add_twins(cx, page, !master, None);
        }
    }

    fn release(&mut self, cx: &mut Cx<'_>, scope: Scope) {
        let me = cx.me();
        match scope {
            Scope::Lock { thread, lock, mode: LockMode::Exclusive } => self.close(cx, (thread, lock)),
            Scope::Barrier => {
                for (&page, home) in &mut self.homes {
                    if let Some(base) = self.locals.get(&page).and_then(|local| local.base.as_ref()) {
                        // Copies handed out before and after this lack these changes.
                        home.dirty |= cx.snapshot(page) != *base;
                    }
                    if home.release(cx, page).is_some() {
                        self.fresh.add(page, Notice::sent(0, Some(me)));
                    }
                    if home.access < Protection::ReadWrite {
                        self.writable.remove(&page);
                    }
                }
                self.flush_outer(cx);
            }
            Scope::Lock { .. } | Scope::Fence => {}
        }
    }

    fn grant(&mut self, _cx: &mut Cx<'_>, lock: LockId, _to: Rank, _info: Option<&Info>) -> Checked<Payload> {
        let updates = self.history.get(&lock).cloned().unwrap_or_default();
        Ok(if updates.is_empty() { Payload::Nothing } else { Payload::History { updates } })
    }

    fn update(&mut self, _cx: &mut Cx<'_>, lock: LockId, _manager: Rank) -> Payload {
        let mut pages: BTreeMap<PageIndex, Overlay> = BTreeMap::new();
        for PageRuns { page, runs } in self.history.remove(&lock).into_iter().flatten().flatten() {
            let overlay = pages.entry(page).or_default();
            for (stamp, diff) in runs {
                overlay.put(&diff, stamp, 1);
            }
        }
        if pages.is_empty() {
            return Payload::Nothing;
        }
        let seen = self.seen.entry(lock).or_insert(0);
        *seen = seen.saturating_add(1);
        let pages = pages.into_iter().map(|(page, overlay)| PageRuns { page, runs: overlay.newer_than(0) });
        Payload::Runs { at: 0, pages: pages.collect() }
    }

    fn absorb(&mut self, _cx: &mut Cx<'_>, lock: LockId, payload: &Payload) -> Checked {
        let Payload::Runs { pages, .. } = payload else { return unexpected("payload") };
        let log = self.logs.entry(lock).or_default();
        log.at += 1;
        for PageRuns { page, runs } in pages {
            let overlay = log.pages.entry(*page).or_default();
            for (stamp, diff) in runs {
                overlay.put(diff, *stamp, log.at);
            }
        }
        Ok(())
    }

    fn serve(&mut self, _cx: &mut Cx<'_>, lock: LockId, info: Option<&Info>) -> Checked<Payload> {
        let seen = match info {
            None => 0,
            Some(Info::Seen { at }) => *at,
            Some(_) => return unexpected("knowledge"),
        };
        let Some(log) = self.logs.get(&lock) else { return Ok(Payload::Nothing) };
        let newer =
            log.pages.iter().map(|(&page, overlay)| PageRuns { page, runs: overlay.newer_than(seen) });
        let pages = newer.filter(|runs| !runs.runs.is_empty()).collect();
        Ok(Payload::Runs { at: log.at, pages })
    }

    fn acquire(&mut self, cx: &mut Cx<'_>, lock: LockId, payload: &Payload) -> Checked {
        let updates: &[Vec<PageRuns>] = match payload {
            Payload::Runs { at, pages } => {
                self.seen.insert(lock, *at);
                std::slice::from_ref(pages)
            }
            Payload::History { updates } => {
                self.history.insert(lock, updates.clone());
                updates
            }
            _ => return unexpected("payload"),
        };
        for PageRuns { page, runs } in updates.iter().flatten() {
            self.keep_base(cx, *page);
            for (stamp, diff) in runs {
                self.import(cx, *page, diff, *stamp);
            }
        }
        Ok(())
    }

    fn arrive(&mut self, _cx: &mut Cx<'_>) -> Payload {
        let notices = self.fresh.take();
        if notices.is_empty() && !self.logged {
            return Payload::Nothing;
        }
        Payload::Changed { notices: notices.runs(), logged: self.logged }
    }

    fn merge(&self, into: &mut Payload, from: &Payload) -> Checked {
        merge_changed(into, from)
    }

    fn wants_flush(&self, total: &Payload) -> bool {
        matches!(total, Payload::Changed { logged: true, .. })
    }

    /// Managers (and holders of forwarded locks) send the locks' data to the pages' homes.
    fn flush(&mut self, cx: &mut Cx<'_>, _total: &Payload) -> Checked {
        let mut all: BTreeMap<PageIndex, Overlay> = BTreeMap::new();
        for (page, overlay) in self.logs.values().flat_map(|log| &log.pages) {
            all.entry(*page).or_default().put_all(overlay);
        }
        for PageRuns { page, runs } in self.history.values().flatten().flatten() {
            let overlay = all.entry(*page).or_default();
            for (stamp, diff) in runs {
                overlay.put(diff, *stamp, 1);
            }
        }
        let mut by_home: BTreeMap<Rank, Vec<PageRuns>> = BTreeMap::new();
        for (page, overlay) in all {
            self.log_pages.add(page, Notice::sent(0, None));
            by_home.entry(cx.home(page)).or_default().push(PageRuns { page, runs: overlay.newer_than(0) });
        }
        for (home, pages) in by_home {
            for pages in in_messages(pages, PageRuns::weight) {
                let flush = cx.begin_flush();
                cx.send(home, Body::Log { flush, pages });
            }
        }
        Ok(())
    }

    fn flushed(&mut self, _cx: &mut Cx<'_>) -> Payload {
        let notices = self.log_pages.take();
        if notices.is_empty() {
            Payload::Nothing
        } else {
            Payload::Changed { notices: notices.runs(), logged: true }
        }
    }

    fn kept(&mut self, cx: &Cx<'_>, kind: BarrierKind, total: &Payload) -> Vec<(PageIndex, Rank)> {
        if kind == BarrierKind::KeepReadWrite { single_writers(cx, total) } else { Vec::new() }
    }

    fn depart(&mut self, cx: &mut Cx<'_>, total: &Payload) -> Checked {
        let notices = match total {
            Payload::Nothing => Notices::default(),
            Payload::Changed { notices, .. } => Notices::from(notices),
            _ => return unexpected("payload"),
        };
        let mut stale = BTreeSet::new();
        for (page, notice) in notices.iter() {
            if notice.writer == Some(cx.me()) || self.is_master(cx, page) {
                continue;
            }
            let Some(copy) = self.copies.get_mut(&page) else { continue };
            if let Some(fetch) = &mut copy.fetch {
                fetch.restart = true;
            }
            if copy.valid {
                copy.valid = false;
                stale.insert(page);
            }
        }
        cx.shared.stats.invalidations += stale.len() as u64;
        cx.protect_all(stale.iter().copied(), Protection::None);
        for page in stale {
            self.set_access(page, Protection::None);
        }
        self.locals.clear();
        for copy in self.copies.values_mut() {
            copy.stash = Overlay::default();
        }
        self.logs.clear();
        self.history.clear();
        self.seen.clear();
        self.logged = false;
        // Every rank has arrived, so every new home has the page it requested.
        self.lent.clear();
        self.protect_twinned(cx);
        Ok(())
    }

    fn rehome(&mut self, cx: &mut Cx<'_>, page: PageIndex, from: Rank, to: Rank, kept: bool) {
        if to == cx.me() {
            let valid = self.copies.get(&page).is_some_and(|copy| copy.valid);
            if valid || !cx.keep(Rule::HomePull) {
                self.become_home(cx, page, kept);
            } else {
                self.copies.entry(page).or_default();
                self.pulling.insert(page, cx.begin_flush());
                let by = cx.me();
                cx.send(from, Body::HomePull { page, by });
            }
        } else if from == cx.me() {
            let home = self.homes.remove(&page).unwrap_or_else(HomePage::new);
            let access = if kept { Protection::None } else { home.access.min(Protection::Read) };
            if home.access > access {
                cx.protect(page, access);
            }
            self.lent.insert(page);
            self.copies.insert(page, Copy { valid: !kept, ..Copy::default() });
            self.set_access(page, access);
        }
    }

    fn renew(&mut self, cx: &mut Cx<'_>, pages: Extent) {
        let homes = take_pages(&mut self.homes, pages).into_iter().map(|(page, home)| (page, home.access));
        let copies =
            take_pages(&mut self.copies, pages).into_iter().map(|(page, copy)| (page, copy.access()));
        cx.hide(homes.chain(copies));
        take_pages(&mut self.locals, pages);
        for listed in [&mut self.writable, &mut self.lent] {
            unlist_pages(listed, pages);
        }
    }

    fn serves_direct(&self) -> bool {
        true
    }

    fn direct_done(&mut self, cx: &mut Cx<'_>, changed: &[Changed]) {
        self.on_direct_done(cx, changed);
    }

    fn overhead_bytes(&self) -> usize {
        let twins = |local: &Local| {
            local
                .outer
                .iter()
                .chain(&local.base)
                .chain(local.scopes.values().map(|twin| &twin.bytes))
                .map(|twin| twin.len())
                .sum::<usize>()
        };
        let locals: usize = self.locals.values().map(|local| twins(local) + local.stamps.len()).sum();
        let logs: usize = self.logs.values().flat_map(|log| log.pages.values()).map(Overlay::len).sum();
        let runs = self.history.values().flatten().flatten().flat_map(|runs| &runs.runs);
        locals + logs + runs.map(|(_, diff)| diff.len()).sum::<usize>()
    }

    fn check(&self, _shared: &Shared) {
        for page in &self.writable {
            assert_eq!(self.access(*page), Protection::ReadWrite, "{page}: writable pages are listed");
            let local = self.locals.get(page);
            let missing =
                self.open.iter().any(|scope| local.is_none_or(|local| !local.scopes.contains_key(scope)));
            assert!(!missing, "{page} is writable without a twin for an open scope");
            let outer = self.homes.contains_key(page) || local.is_some_and(|local| local.outer.is_some());
            assert!(outer, "{page} is writable without an outer twin");
        }
        for (page, copy) in &self.copies {
            assert!(copy.valid || !copy.mapped, "{page}: an invalid copy is not mapped");
            assert!(!copy.writable || self.writable.contains(page), "{page}: writable pages are listed");
        }
    }
}
