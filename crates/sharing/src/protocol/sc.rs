//! Sequential consistency by invalidation (Li and Hudak, TOCS '89, fixed distributed managers).
//!
//! A page has one writer or many readers. Its home keeps a *blocking* directory: owner, copies, one
//! transaction at a time, the rest in a queue. A reader's request goes to the home and on to the owner, which
//! sends the data. A writer's request removes all other copies first, each acknowledged to the writer. Locks
//! and barriers move no data.
//!
//! It never gives write permission before the last copy is gone, and never trusts a requester's claim to have
//! a copy: a copy may be taken away while the request is queued.
//!
//! Invariant, over all ranks: a page that is writable at one rank is mapped at no other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::{Cx, Protocol, unexpected};
use crate::message::Payload;
use crate::rule::Rule;
use crate::state::Shared;
use crate::{Body, Checked, Protection, ProtocolKind, Rank, ThreadId, TimerId};
use rampool_wire::units::{Extent, PageIndex};

#[derive(Clone, Hash, Debug)]
pub(crate) struct Sc {
    pages: BTreeMap<PageIndex, Local>,
    /// Pages that have just come stay until their timer is due, or the rank arrives at a barrier: the waiting
    /// threads have used them then.
    held: BTreeSet<PageIndex>,
    directory: BTreeMap<PageIndex, Entry>,
    /// Pages whose directory entry is on its way here.
    awaited: BTreeMap<PageIndex, Awaited>,
    /// Messages about copies that this rank has dropped, until they are acknowledged. The next barrier waits
    /// for them, since homes may move there.
    forgetting: BTreeSet<u64>,
    /// The number of the next one.
    next_forgetting: u64,
}

/// A directory entry that is on its way here.
#[derive(Clone, Hash, Debug)]
struct Awaited {
    from: Rank,
    /// A flush that keeps this rank from arriving at a barrier, where the page may move on, before the entry
    /// is here.
    flush: u64,
    /// Requests that came meanwhile.
    waiting: Vec<(Rank, Body)>,
    /// Ranks that dropped a copy meanwhile.
    forgot: Vec<Rank>,
}

/// A page at a rank.
#[derive(Clone, Hash, Debug)]
struct Local {
    access: Protection,
    /// Another rank is the owner.
    borrowed: bool,
    wants: Option<Want>,
    /// Requests that take it away as soon as it is no longer held.
    taken: Vec<Body>,
}

/// A request that is under way.
#[derive(Clone, Hash, Debug)]
struct Want {
    write: bool,
    /// The answer: data or a note that none is needed, with the number of acknowledgements to wait for.
    granted: Option<Grant>,
    acks: u16,
}

#[derive(Clone, Hash, Debug)]
struct Grant {
    write: bool,
    acks: u16,
    bytes: Option<Arc<[u8]>>,
}

/// A page at its home.
#[derive(Clone, Hash, Debug)]
struct Entry {
    owner: Rank,
    copies: BTreeSet<Rank>,
    /// A transaction is under way.
    busy: bool,
    queue: VecDeque<Request>,
    /// The home moves as soon as no transaction is under way.
    leaves: Option<Rank>,
}

#[derive(Clone, Copy, Hash, Debug)]
struct Request {
    by: Rank,
    write: bool,
    /// Whether the requester had a copy when it sent the request. (It may have lost it since.)
    had_copy: bool,
}

impl Entry {
    fn new(home: Rank) -> Self {
        Self {
            owner: home,
            copies: BTreeSet::from([home]),
            busy: false,
            queue: VecDeque::new(),
            leaves: None,
        }
    }
}

impl Local {
    fn new() -> Self {
        Self { access: Protection::None, borrowed: false, wants: None, taken: Vec::new() }
    }
}

impl Sc {
    pub fn new() -> Self {
        Self {
            pages: BTreeMap::new(),
            held: BTreeSet::new(),
            directory: BTreeMap::new(),
            awaited: BTreeMap::new(),
            forgetting: BTreeSet::new(),
            next_forgetting: 0,
        }
    }

    fn local(&mut self, page: PageIndex) -> &mut Local {
        self.pages.entry(page).or_insert_with(Local::new)
    }

    fn entry(&mut self, cx: &Cx<'_>, page: PageIndex) -> &mut Entry {
        let me = cx.me();
        self.directory.entry(page).or_insert_with(|| Entry::new(me))
    }

    /// A message for the page's home.
    fn at_home(&mut self, cx: &mut Cx<'_>, from: Rank, page: PageIndex, body: &Body) -> Checked {
        if let Some(awaited) = self.awaited.get_mut(&page) {
            match body {
                // The old home waits for the end of its last transaction before it lets the page go.
                Body::ScDone { .. } => cx.send(awaited.from, body.clone()),
                _ => awaited.waiting.push((from, body.clone())),
            }
            return Ok(());
        }
        let leaves = self.directory.get(&page).is_some_and(|entry| entry.leaves.is_some());
        let awaited = leaves && matches!(body, Body::ScDone { .. });
        if !(cx.is_home(page) || awaited) {
            let home = cx.home(page);
            cx.send(home, body.clone());
            return Ok(());
        }
        match *body {
            Body::ScRequest { write, by, .. } => {
                let entry = self.entry(cx, page);
                let had_copy = entry.copies.contains(&by);
                entry.queue.push_back(Request { by, write, had_copy });
            }
            Body::ScDone { .. } => {
                let entry = self.entry(cx, page);
                if !entry.busy {
                    return unexpected("end of a transaction");
                }
                entry.busy = false;
                if let Some(to) = entry.leaves {
                    self.hand_over(cx, page, to);
                    return Ok(());
                }
            }
            _ => return unexpected("message"),
        }
        self.serve(cx, page);
        Ok(())
    }

    /// Begins the next transaction, if none is under way.
    fn serve(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        let entry = self.entry(cx, page);
        if entry.busy {
            return;
        }
        let Some(Request { by, write, had_copy }) = entry.queue.pop_front() else { return };
        entry.busy = true;
        let has_copy = if cx.keep(Rule::Directory) { entry.copies.contains(&by) } else { had_copy };
        let owner = entry.owner;
        if write {
            let others: Vec<Rank> = entry
                .copies
                .iter()
                .copied()
                .filter(|&rank| rank != by && (has_copy || rank != owner))
                .collect();
            entry.owner = by;
            entry.copies = BTreeSet::from([by]);
            let acks = u16::try_from(others.len()).expect("fewer than there are ranks");
            for rank in others {
                cx.send(rank, Body::ScInvalidate { page, to: by });
            }
            if has_copy {
                cx.send(by, Body::ScData { page, write, acks, bytes: None });
            } else {
                cx.send(owner, Body::ScForward { page, write, to: by, acks });
            }
        } else if has_copy {
            let alone = entry.copies.len() == 1;
            cx.send(by, Body::ScData { page, write: alone, acks: 0, bytes: None });
        } else {
            entry.copies.insert(by);
            cx.send(owner, Body::ScForward { page, write, to: by, acks: 0 });
        }
    }

    /// The directory entry goes to the new home; requests that are queued follow it.
    fn hand_over(&mut self, cx: &mut Cx<'_>, page: PageIndex, to: Rank) {
        let entry = self.directory.remove(&page).expect("it is being handed over");
        cx.send(to, Body::ScMove { page, owner: entry.owner, copies: entry.copies.into_iter().collect() });
        for Request { by, write, .. } in entry.queue {
            cx.send(to, Body::ScRequest { page, write, by });
        }
    }

    /// `from` has dropped its copies of these pages. If one was taken away meanwhile, the directory knows
    /// already.
    fn forgotten(&mut self, cx: &mut Cx<'_>, from: Rank, flush: u64, pages: &[PageIndex]) -> Checked {
        for &page in pages {
            if !cx.is_home(page) {
                return unexpected("forgotten copy of another home's page");
            }
            if let Some(awaited) = self.awaited.get_mut(&page) {
                awaited.forgot.push(from);
                continue;
            }
            let entry = self.entry(cx, page);
            if entry.owner == from {
                return unexpected("owner that has dropped its page");
            }
            entry.copies.remove(&from);
        }
        cx.send(from, Body::FlushAck { protocol: ProtocolKind::Sc, flush, pages: Vec::new() });
        Ok(())
    }

    /// Another rank wants the page.
    fn take_away(&mut self, cx: &mut Cx<'_>, page: PageIndex, body: &Body) -> Checked {
        if self.held.contains(&page) {
            self.local(page).taken.push(body.clone());
            return Ok(());
        }
        let local = self.local(page);
        match *body {
            Body::ScForward { write, to, acks, .. } => {
                let down = if write { Protection::None } else { Protection::Read };
                if local.access > down {
                    local.access = down;
                    cx.protect(page, down);
                }
                if write {
                    cx.shared.stats.invalidations += 1;
                }
                let bytes = Some(cx.snapshot(page));
                if write {
                    cx.mem.discard(page);
                }
                cx.send(to, Body::ScData { page, write, acks, bytes });
            }
            Body::ScInvalidate { to, .. } => {
                if local.access > Protection::None {
                    local.access = Protection::None;
                    cx.protect(page, Protection::None);
                }
                cx.shared.stats.invalidations += 1;
                cx.mem.discard(page);
                cx.send(to, Body::ScAck { page });
            }
            _ => return unexpected("message"),
        }
        Ok(())
    }

    /// The page is no longer held: requests that came meanwhile are served.
    fn let_go(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        for body in std::mem::take(&mut self.local(page).taken) {
            self.take_away(cx, page, &body).expect("it was looked at when it came");
        }
    }

    /// Ends this rank's request, if everything is here.
    fn complete(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        let local = self.local(page);
        let Some(want) = &local.wants else { return };
        let Some(grant) = &want.granted else { return };
        if want.acks < grant.acks && cx.keep(Rule::Acks) {
            return;
        }
        let access = if grant.write { Protection::ReadWrite } else { Protection::Read };
        let Grant { write, bytes, acks } = grant.clone();
        local.access = access;
        local.borrowed = !write && (bytes.is_some() || local.borrowed);
        local.wants = None;
        let hold_us = cx.shared.tuning.hold_us;
        if hold_us > 0 && (bytes.is_some() || acks > 0) {
            self.held.insert(page);
            cx.set_timer(TimerId::Hold(page), hold_us);
        }
        match bytes {
            Some(bytes) => {
                cx.shared.stats.pages_fetched += 1;
                cx.mem.install(page, &bytes, access);
            }
            None => cx.protect(page, access),
        }
        let (home, by) = (cx.home(page), cx.me());
        cx.send(home, Body::ScDone { page, write, by });
        cx.retry(page);
    }
}

impl Protocol for Sc {
    fn access(&self, page: PageIndex) -> Protection {
        self.pages.get(&page).map_or(Protection::None, |local| local.access)
    }

    fn fault(&mut self, cx: &mut Cx<'_>, _thread: ThreadId, page: PageIndex, write: bool) {
        let local = self.local(page);
        if local.wants.is_none() {
            local.wants = Some(Want { write, granted: None, acks: 0 });
            let (home, by) = (cx.home(page), cx.me());
            cx.send(home, Body::ScRequest { page, write, by });
        }
    }

    fn receive(&mut self, cx: &mut Cx<'_>, from: Rank, body: &Body) -> Checked {
        match body {
            Body::ScRequest { page, .. } | Body::ScDone { page, .. } => self.at_home(cx, from, *page, body),
            Body::ScForward { page, .. } | Body::ScInvalidate { page, .. } => self.take_away(cx, *page, body),
            Body::ScData { page, write, acks, bytes } => {
                if bytes.as_ref().is_some_and(|bytes| bytes.len() != cx.page_bytes(*page)) {
                    return unexpected("length of a page");
                }
                let Some(want) = &mut self.local(*page).wants else { return unexpected("data") };
                if want.granted.is_some() || (want.write && !write) {
                    return unexpected("data");
                }
                want.granted = Some(Grant { write: *write, acks: *acks, bytes: bytes.clone() });
                self.complete(cx, *page);
                Ok(())
            }
            Body::ScAck { page } => {
                let omitted = !cx.keep(Rule::Acks);
                let Some(want) = &mut self.local(*page).wants else {
                    return if omitted { Ok(()) } else { unexpected("acknowledgement") };
                };
                want.acks = want.acks.saturating_add(1);
                self.complete(cx, *page);
                Ok(())
            }
            Body::ScMove { page, owner, copies } => {
                if !copies.contains(owner) {
                    return unexpected("directory entry");
                }
                let Some(Awaited { flush, waiting, forgot, .. }) = self.awaited.remove(page) else {
                    return unexpected("directory entry");
                };
                cx.end_flush(flush)?;
                let mut entry = Entry::new(*owner);
                entry.copies =
                    copies.iter().copied().filter(|rank| rank == owner || !forgot.contains(rank)).collect();
                self.directory.insert(*page, entry);
                for (from, body) in waiting {
                    self.at_home(cx, from, *page, &body)?;
                }
                Ok(())
            }
            Body::Flush { flush, fences, diffs, .. } if diffs.is_empty() => {
                self.forgotten(cx, from, *flush, fences)
            }
            Body::FlushAck { flush, .. } => {
                if self.forgetting.remove(flush) {
                    Ok(())
                } else {
                    unexpected("acknowledgement")
                }
            }
            _ => unexpected("message"),
        }
    }

    fn evict(&mut self, cx: &mut Cx<'_>, pages: &[PageIndex]) {
        if cx.shared.at_barrier {
            return;
        }
        let (mut gone, mut mapped) = (Vec::new(), Vec::new());
        let mut by_home: BTreeMap<Rank, Vec<PageIndex>> = BTreeMap::new();
        for &page in pages {
            let Some(local) = self.pages.get_mut(&page) else { continue };
            let idle = local.wants.is_none() && !self.held.contains(&page) && local.taken.is_empty();
            if local.access == Protection::Read && local.borrowed && idle {
                (local.access, local.borrowed) = (Protection::None, false);
                mapped.push(page);
                gone.push(page);
                by_home.entry(cx.home(page)).or_default().push(page);
            }
        }
        cx.forget(&gone, mapped);
        if !cx.keep(Rule::EvictTold) {
            return;
        }
        for (home, fences) in by_home {
            let flush = self.next_forgetting;
            self.next_forgetting += 1;
            self.forgetting.insert(flush);
            cx.send(
                home,
                Body::Flush { protocol: ProtocolKind::Sc, flush, diffs: Vec::new(), fences, under: None },
            );
        }
    }

    fn fetches_ahead(&self) -> bool {
        !self.forgetting.is_empty()
    }

    fn timer(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        // It may have been released and come again since: then it stays for less time.
        if self.held.remove(&page) {
            self.let_go(cx, page);
        }
    }

    fn arrive(&mut self, cx: &mut Cx<'_>) -> Payload {
        for page in std::mem::take(&mut self.held) {
            self.let_go(cx, page);
        }
        Payload::Nothing
    }

    fn rehome(&mut self, cx: &mut Cx<'_>, page: PageIndex, from: Rank, to: Rank, _kept: bool) {
        if from == cx.me() {
            let entry = self.entry(cx, page);
            if entry.busy {
                entry.leaves = Some(to);
            } else {
                self.hand_over(cx, page, to);
            }
        } else if to == cx.me() {
            let flush = cx.begin_flush();
            self.awaited.insert(page, Awaited { from, flush, waiting: Vec::new(), forgot: Vec::new() });
        }
    }

    /// Every copy becomes zero at once, so copies and owner stay.
    fn renew(&mut self, _cx: &mut Cx<'_>, _pages: Extent) {}

    fn overhead_bytes(&self) -> usize {
        0
    }

    fn check(&self, _shared: &Shared) {
        for (page, entry) in &self.directory {
            assert!(entry.busy || entry.queue.is_empty(), "{page} is free and asked for");
            assert!(entry.copies.contains(&entry.owner), "the owner of {page} has a copy");
        }
        for (page, local) in &self.pages {
            assert!(
                self.held.contains(page) || local.taken.is_empty(),
                "{page} is not held but was not taken"
            );
        }
    }
}
