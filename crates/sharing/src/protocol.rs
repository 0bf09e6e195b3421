//! The interface between a consistency protocol and the synchronisation core.

pub(crate) mod aurc;
pub(crate) mod hlrc;
pub(crate) mod ibec;
pub(crate) mod lrc;
pub(crate) mod sc;

use super::ahead::Ahead;
use super::direct::Changed;

use super::message::{Info, Payload};
use super::rule::Rule;
use super::state::Shared;
use super::{
    Action, BarrierKind, Body, Checked, LockId, LockMode, Mem, Message, Protection, ProtocolKind, Rank,
    ThreadId, TimerId, Violation, extents,
};
use rampool_wire::units::{Extent, PageIndex};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What ends when a release begins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Scope {
    Lock { thread: ThreadId, lock: LockId, mode: LockMode },
    Barrier,
    Fence,
}

/// A consistency protocol. One value per rank and kind; it manages every region of that kind.
///
/// The core calls `release`, waits until every flush begun so far is acknowledged, then calls `released`;
/// only then does it release the lock or arrive at the barrier. Payloads are made at one rank and taken by
/// the same protocol at another.
pub(crate) trait Protocol {
    /// The application's present access to the page.
    fn access(&self, page: PageIndex) -> Protection;
    /// A thread needs more than `access` allows. Ends, now or later, in `Cx::retry`.
    fn fault(&mut self, cx: &mut Cx<'_>, thread: ThreadId, page: PageIndex, write: bool);
    /// A message about pages.
    fn receive(&mut self, cx: &mut Cx<'_>, from: Rank, body: &Body) -> Checked;
    fn timer(&mut self, _cx: &mut Cx<'_>, _page: PageIndex) {}
    fn idle(&mut self, _cx: &mut Cx<'_>, _budget_bytes: u32) {}
    /// Drops those of `pages` (of this protocol, ascending) that are copies without changes and can be
    /// fetched again.
    fn evict(&mut self, _cx: &mut Cx<'_>, _pages: &[PageIndex]) {}

    /// What this rank knows when it requests `lock`.
    fn info(&self, _lock: LockId) -> Info {
        Info::Nothing
    }
    /// `thread` holds `lock` from now on.
    fn opened(&mut self, _cx: &mut Cx<'_>, _thread: ThreadId, _lock: LockId, _mode: LockMode) {}
    /// Whether the writes of a critical section may wait until another rank requests its lock.
    fn may_wait(&self) -> bool {
        false
    }
    /// Begins to make writes available: sends flushes.
    fn release(&mut self, _cx: &mut Cx<'_>, _scope: Scope) {}
    /// The flushes are acknowledged.
    fn released(&mut self, _cx: &mut Cx<'_>) {}
    /// The last holder grants: what the next one, `_to`, has to know. `info` is `None` if it knows nothing of
    /// this epoch.
    fn grant(
        &mut self,
        _cx: &mut Cx<'_>,
        _lock: LockId,
        _to: Rank,
        _info: Option<&Info>,
    ) -> Checked<Payload> {
        Ok(Payload::Nothing)
    }
    /// The payload of a release for the manager.
    fn update(&mut self, _cx: &mut Cx<'_>, _lock: LockId, _manager: Rank) -> Payload {
        Payload::Nothing
    }
    /// The manager stores the payload of a release.
    fn absorb(&mut self, _cx: &mut Cx<'_>, _lock: LockId, _payload: &Payload) -> Checked {
        Ok(())
    }
    /// The manager grants.
    fn serve(&mut self, _cx: &mut Cx<'_>, _lock: LockId, _info: Option<&Info>) -> Checked<Payload> {
        Ok(Payload::Nothing)
    }
    /// Acts on the payload of a grant.
    fn acquire(&mut self, _cx: &mut Cx<'_>, _lock: LockId, _payload: &Payload) -> Checked {
        Ok(())
    }

    /// This rank's payload for the barrier.
    fn arrive(&mut self, _cx: &mut Cx<'_>) -> Payload {
        Payload::Nothing
    }
    /// Merges the payloads of two ranks.
    fn merge(&self, _into: &mut Payload, _from: &Payload) -> Checked {
        Ok(())
    }
    /// Whether all ranks have to do something before they can leave.
    fn wants_flush(&self, _total: &Payload) -> bool {
        false
    }
    /// Does it: begins flushes or fetches.
    fn flush(&mut self, _cx: &mut Cx<'_>, _total: &Payload) -> Checked {
        Ok(())
    }
    /// Whether fetches of `flush` are outstanding.
    fn flushing(&self) -> bool {
        false
    }
    /// This rank's addition to the barrier's payload after `flush`.
    fn flushed(&mut self, _cx: &mut Cx<'_>) -> Payload {
        Payload::Nothing
    }
    /// At the root: pages whose changes their writers have not sent. Other moves of their homes wait for the
    /// next barrier.
    fn unsent(&self, _total: &Payload) -> BTreeSet<PageIndex> {
        BTreeSet::new()
    }
    /// At the root: single-writer pages that become their writer's own.
    fn kept(&mut self, _cx: &Cx<'_>, _kind: BarrierKind, _total: &Payload) -> Vec<(PageIndex, Rank)> {
        Vec::new()
    }
    /// Leaves the barrier: acts on the payload of all ranks.
    fn depart(&mut self, _cx: &mut Cx<'_>, _total: &Payload) -> Checked {
        Ok(())
    }
    /// The barrier is over, homes have moved: fetches the pages that this rank's threads will read. They wait
    /// until `fetches_ahead` is false.
    fn begin_epoch(&mut self, _cx: &mut Cx<'_>) {}
    /// A thread that took no part in the barrier goes on while others wait for those pages. It may have
    /// learnt what they hold.
    fn overtaken(&mut self, _cx: &mut Cx<'_>) {}
    /// Whether pages fetched ahead of their use are on their way. The next barrier waits for them.
    fn fetches_ahead(&self) -> bool {
        false
    }
    /// The page's home moved. `kept`: the new home was its only writer, and all other copies are gone.
    fn rehome(&mut self, cx: &mut Cx<'_>, page: PageIndex, from: Rank, to: Rank, kept: bool);

    /// Whether homes carry out direct operations ([`crate::direct`]). Elsewhere the page moves to the
    /// requesting rank.
    fn serves_direct(&self) -> bool {
        false
    }
    /// Whether this rank may have stored something in the page that its home does not have.
    fn is_unreleased(&self, _page: PageIndex) -> bool {
        false
    }
    /// Homes have carried out the changes of a direct operation of this rank.
    fn direct_done(&mut self, _cx: &mut Cx<'_>, _changed: &[Changed]) {}

    /// These pages are no longer used: this rank's own changes need not be sent.
    fn freed(&mut self, _cx: &mut Cx<'_>, _pages: Extent) {}
    /// In a barrier, on all ranks alike: forgets everything about these unused pages. They are zero, and
    /// their homes stay.
    fn renew(&mut self, cx: &mut Cx<'_>, pages: Extent);

    fn overhead_bytes(&self) -> usize;
    /// Checks invariants.
    fn check(&self, _shared: &Shared) {}
}

/// The context of a protocol while it handles something.
pub(crate) struct Cx<'a> {
    pub shared: &'a mut Shared,
    pub mem: &'a mut dyn Mem,
    pub out: &'a mut Vec<Action>,
}

impl Cx<'_> {
    pub fn me(&self) -> Rank {
        self.shared.rank
    }

    pub fn keep(&self, rule: Rule) -> bool {
        self.shared.rules.keep(rule)
    }

    /// Sends to any rank, this one included.
    pub fn send(&mut self, to: Rank, body: Body) {
        if to == self.shared.rank {
            self.shared.loopback.push_back(body);
        } else {
            self.shared.stats.messages += 1;
            let message = Message { epoch: self.shared.epoch, body };
            self.out.push(Action::Send { to, message });
        }
    }

    pub fn home(&self, page: PageIndex) -> Rank {
        self.shared.tables.home(&self.shared.regions, page)
    }

    pub fn is_home(&self, page: PageIndex) -> bool {
        self.home(page) == self.shared.rank
    }

    /// The protocol of the page.
    pub fn kind(&self, page: PageIndex) -> Option<ProtocolKind> {
        self.shared.regions.find(page).map(|region| region.protocol)
    }

    /// The pages of the region that are to come with this one, ascending.
    pub fn ahead_of(&self, page: PageIndex, ahead: Ahead) -> Vec<PageIndex> {
        self.shared.regions.find(page).map_or_else(Vec::new, |region| ahead.from(page, region.pages))
    }

    /// Those of `pages` that are in the region of `page`.
    pub fn of_region(&self, page: PageIndex, pages: Extent) -> Vec<PageIndex> {
        let region = self.shared.regions.find(page).map(|region| region.pages);
        pages.pages().filter(|&page| region.is_some_and(|region| region.contains(page))).collect()
    }

    pub fn page_bytes(&self, page: PageIndex) -> usize {
        self.shared.regions.find(page).expect("a page of a region").page_bytes as usize
    }

    /// Whether the page's content is in this rank's memory.
    pub fn is_near(&self, page: PageIndex) -> bool {
        self.mem.is_near(page)
    }

    /// The page's content now. Threads may be writing.
    pub fn snapshot(&mut self, page: PageIndex) -> Arc<[u8]> {
        self.snapshot_over(page, None)
    }

    /// Like `snapshot`, into the buffer of an outdated copy if that has no other user.
    pub fn snapshot_over(&mut self, page: PageIndex, over: Option<Arc<[u8]>>) -> Arc<[u8]> {
        let len = self.page_bytes(page);
        let over = over.filter(|over| over.len() == len && Arc::strong_count(over) == 1);
        let mut bytes = over.unwrap_or_else(|| std::iter::repeat_n(0, len).collect());
        self.mem.snapshot(page, Arc::get_mut(&mut bytes).expect("it has no other user"));
        bytes
    }

    pub fn protect(&mut self, page: PageIndex, to: Protection) {
        self.protect_all([page], to);
    }

    /// `pages` ascend.
    pub fn protect_all(&mut self, pages: impl IntoIterator<Item = PageIndex>, to: Protection) {
        let runs = extents(pages);
        if !runs.is_empty() {
            self.shared.stats.protects += 1;
            self.mem.protect(&runs, to);
        }
    }

    /// Makes all of `pages` (in any order, each with its present access) inaccessible to the application.
    pub fn hide(&mut self, pages: impl IntoIterator<Item = (PageIndex, Protection)>) {
        let seen: BTreeSet<PageIndex> = pages
            .into_iter()
            .filter(|&(_, access)| access > Protection::None)
            .map(|(page, _)| page)
            .collect();
        self.protect_all(seen, Protection::None);
    }

    /// Discards the content of `pages` (ascending); those of `mapped` are still visible.
    pub fn forget(&mut self, pages: &[PageIndex], mapped: impl IntoIterator<Item = PageIndex>) {
        self.protect_all(mapped, Protection::None);
        self.shared.stats.evictions += pages.len() as u64;
        for &page in pages {
            self.mem.discard(page);
        }
    }

    /// Wakes every thread that waits for the page.
    pub fn retry(&mut self, page: PageIndex) {
        self.shared.retried.insert(page);
        self.out.push(Action::Retry { page });
    }

    pub fn set_timer(&mut self, timer: TimerId, after_us: u32) {
        self.out.push(Action::SetTimer { timer, after_us });
    }

    pub fn begin_flush(&mut self) -> u64 {
        self.shared.flushes.begin()
    }

    pub fn end_flush(&mut self, flush: u64) -> Checked {
        self.shared.flushes.end(flush)
    }
}

/// A message that this protocol does not know, or not now.
pub(crate) fn unexpected<T>(what: &str) -> Checked<T> {
    Err(Violation::new(format!("unexpected {what}")))
}
