//! `auto`: the work that the modes of [`crate::adapt`] add to hlrc.
//!
//! Three things come unrequested: pages pushed at the end of a barrier, pages that ride on a grant, and homes
//! that move to a single writer. Each is refused or dropped for the reasons for which hlrc refuses a
//! requested copy, and for one more: the sender may not have had this rank's own last diff when it made the
//! copy. So a copy is taken only when all own diffs are acknowledged, none is streamed, and it is no older
//! than the newest.
//!
//! A reader and a home agree on pushes without another message: the home says with each copy whether it will
//! push the page the next time, and both see the same notices at a barrier. The agreement ends when the home
//! moves. A page that is to come so stays mapped while it is stale: no thread that left the barrier runs
//! before it has come. For one that took no part in it, it is unmapped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{AHEAD_BYTES, Copy, Hlrc, install_all};
use crate::adapt::{Mode, Record};
use crate::ahead::Ahead;
use crate::interval::IntervalId;
use crate::message::{PageCopy, Payload};
use crate::notice::{Notice, NoticeRuns, Notices};
use crate::protocol::{Cx, unexpected};
use crate::rule::Rule;
use crate::{Body, Checked, Diff, LockId, Protection, ProtocolKind, Rank};
use rampool_wire::units::PageIndex;

/// The most pages that ride on one grant: a wrong guess costs no more than they do.
const MOST_RIDING: usize = 8;
/// The most pages that are opened for writing behind one that is written.
const MOST_OPENED: u64 = 16;

impl Hlrc {
    pub(super) fn adapts(&self) -> bool {
        self.kind == ProtocolKind::Auto
    }

    /// A thread begins to write a page. If it writes pages in order, the next ones are opened with it, since
    /// each would take a fault: one that is not written costs a comparison at the next release, and no rank
    /// is told of it.
    pub(super) fn open_behind(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        if !self.adapts() || cx.shared.at_barrier {
            return;
        }
        let ahead = self.writes.missed(page, MOST_OPENED);
        let next = self.with(cx, page, ahead);
        let opened = next.into_iter().filter(|&page| self.prepare_to_write(cx, page)).collect::<Vec<_>>();
        cx.protect_all(opened, Protection::ReadWrite);
    }

    /// The pages that are to come with a missed one: those that follow it in order, or else its block's.
    pub(super) fn with(&mut self, cx: &Cx<'_>, page: PageIndex, ahead: Ahead) -> Vec<PageIndex> {
        let block = if self.adapts() && !cx.shared.at_barrier && ahead.count == 0 {
            self.blocks.missed(page)
        } else {
            None
        };
        block.map_or_else(|| cx.ahead_of(page, ahead), |block| cx.of_region(page, block))
    }

    /// Whether the page can be made writable now, by which its writes are noticed.
    fn prepare_to_write(&mut self, cx: &mut Cx<'_>, page: PageIndex) -> bool {
        if self.is_master(cx, page) {
            let opened = self.home(page).open(cx, page);
            if self.homes[&page].handed.is_some() {
                self.dirty_homes.insert(page);
            }
            return opened;
        }
        let can_be = |copy: &&mut Copy| copy.access == Protection::Read && copy.twin.is_none();
        let Some(copy) = self.copies.get_mut(&page).filter(can_be) else { return false };
        copy.twin = Some(cx.snapshot(page));
        copy.access = Protection::ReadWrite;
        self.twinned.insert(page);
        cx.shared.stats.twins += 1;
        true
    }

    /// Whether changes of this page are streamed while the rank is idle.
    pub(in crate::protocol) fn streams(&self, copy: &Copy) -> bool {
        !self.adapts() || copy.mode == Mode::Stream
    }

    /// The mode that a rank is told with a copy of a page that this rank is home of.
    pub(super) fn mode_for(&self, cx: &Cx<'_>, page: PageIndex, rank: Rank) -> Mode {
        if !self.adapts() {
            return Mode::Invalidate;
        }
        let record = self.records.get(&page);
        let mode = record.map_or(Mode::Invalidate, |record| record.mode_for(rank));
        let is_earlier = self.homes[&page].begun.is_some_and(|epoch| epoch < cx.shared.epoch);
        match mode {
            Mode::Invalidate | Mode::Push if is_earlier && !record.is_some_and(Record::has_changed) => {
                Mode::Prepared { pushed: mode == Mode::Push }
            }
            _ => mode,
        }
    }

    /// Records the mode that a page's home sends with a requested or pushed copy.
    pub(super) fn told(&mut self, cx: &Cx<'_>, from: Rank, got: &PageCopy, crossed: bool) {
        if !self.adapts() {
            return;
        }
        let by_home = from == cx.home(got.page) && !(crossed && cx.keep(Rule::Moved));
        let copy = self.copy(got.page);
        copy.pushed = by_home && matches!(got.mode, Mode::Push | Mode::Prepared { pushed: true });
        copy.mode = if by_home && got.mode != Mode::Push { got.mode } else { Mode::Invalidate };
    }

    /// The home moves: the old one's announcements and observations are void.
    pub(super) fn forget(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        if !self.adapts() {
            return;
        }
        self.records.remove(&page);
        self.pushes.remove(&page);
        if !cx.keep(Rule::Moved) {
            return;
        }
        self.expected.remove(&page);
        self.hide(cx, page);
        if let Some(copy) = self.copies.get_mut(&page) {
            copy.pushed = false;
            copy.mode = Mode::Invalidate;
            if let Some(fetch) = &mut copy.fetch {
                fetch.crossed = true;
            }
        }
    }

    /// Pages that one rank has written alone for long enough to become its own.
    pub(super) fn owned(&mut self, cx: &Cx<'_>, total: &Payload) -> Vec<(PageIndex, Rank)> {
        let Payload::Changed { notices, .. } = total else { return Vec::new() };
        let notices = Notices::from(notices);
        let owners = notices.iter().filter_map(|(page, notice)| {
            let owner = self.singles.changed(page, notice.writer);
            Some((page, notice.writer.filter(|_| notice.unsent).or(owner)?))
        });
        owners.filter(|&(page, owner)| cx.home(page) != owner).collect()
    }

    /// Pages that another has prepared, and this rank has written: it need not send its changes, since it
    /// becomes their home unless a third or the home wrote them too. Where others did write them, sending
    /// takes a round more; so only what it has changed from end to end.
    pub(super) fn to_keep(&self, cx: &mut Cx<'_>) -> BTreeSet<PageIndex> {
        let is_own = |page: &PageIndex| {
            let copy = &self.copies[page];
            let is_settled = copy.valid && copy.fetch.is_none() && copy.flying == 0;
            is_settled
                && matches!(copy.mode, Mode::Prepared { .. })
                && !self.streamed.contains(page)
                && copy.twin.as_ref().is_some_and(|twin| has_other_ends(cx, *page, twin))
        };
        self.twinned.iter().copied().filter(is_own).collect()
    }

    /// What others are told of such a page.
    pub(super) fn unsent_notice(&self, page: PageIndex, me: Rank) -> Notice {
        let copy = self.copies.get(&page).filter(|copy| copy.valid && copy.twin.is_some());
        let version = copy.map_or(0, |copy| copy.version.saturating_add(1));
        Notice { version, writer: copy.map(|_| me), unsent: true }
    }

    /// These pages changed, and the barrier ends: records which pages this rank will push, and which others
    /// push to it.
    pub(super) fn expect(&mut self, cx: &Cx<'_>, notices: &Notices) {
        let me = cx.me();
        for (page, notice) in notices.iter() {
            if self.is_master(cx, page) {
                let readers = self
                    .records
                    .get_mut(&page)
                    .map(|record| record.changed(notice.writer))
                    .unwrap_or_default();
                if !readers.is_empty() {
                    self.pushes.insert(page, readers);
                }
            } else if let Some(copy) = self.copies.get_mut(&page) {
                if let Some(fetch) = &mut copy.fetch {
                    fetch.crossed = true;
                    copy.pushed = false;
                } else if copy.pushed && notice.writer != Some(me) {
                    copy.pushed = false;
                    self.expected.insert(page);
                }
            }
        }
    }

    /// Unmaps a page that is stale and still mapped.
    pub(super) fn hide(&mut self, cx: &mut Cx<'_>, page: PageIndex) {
        if let Some(copy) = self.copies.get_mut(&page)
            && !copy.valid
            && copy.access > Protection::None
        {
            copy.access = Protection::None;
            cx.protect(page, Protection::None);
        }
    }

    /// Sends the pages that were promised.
    pub(super) fn push(&mut self, cx: &mut Cx<'_>) {
        let mut by_reader: BTreeMap<Rank, Vec<PageIndex>> = BTreeMap::new();
        for (page, readers) in std::mem::take(&mut self.pushes) {
            for reader in readers {
                by_reader.entry(reader).or_default().push(page);
            }
        }
        for (reader, pages) in by_reader {
            for pages in pages.chunks((AHEAD_BYTES / cx.page_bytes(pages[0])).max(1)) {
                let copies = self.hand_out_all(cx, pages, reader);
                cx.send(reader, Body::Push { copies });
            }
        }
    }

    /// Pages pushed by others have come.
    pub(super) fn on_push(&mut self, cx: &mut Cx<'_>, from: Rank, copies: &[PageCopy]) -> Checked {
        let mine = |copy: &PageCopy| cx.kind(copy.page) == Some(self.kind);
        if !self.adapts() || !copies.is_sorted_by(|a, b| a.page < b.page) || !copies.iter().all(mine) {
            return unexpected("push");
        }
        let mut ready = Vec::with_capacity(copies.len());
        for got in copies {
            self.expected.remove(&got.page);
            if cx.is_home(got.page) {
                continue;
            }
            self.told(cx, from, got, false);
            if !self.takes(cx, got) {
                self.hide(cx, got.page);
                continue;
            }
            let copy = self.copy(got.page);
            if copy.twin.is_some() {
                self.install(cx, got, false);
            } else if copy.access == Protection::Read {
                copy.becomes_valid(got.version, Protection::Read);
                cx.shared.stats.pages_fetched += 1;
                cx.mem.store(got.page, &Diff::whole(&got.bytes));
            } else {
                copy.becomes_valid(got.version, Protection::Read);
                ready.push((got.page, &*got.bytes, false));
            }
        }
        install_all(cx, &ready);
        Ok(())
    }

    /// Whether an unrequested copy can be used.
    fn takes(&mut self, cx: &Cx<'_>, got: &PageCopy) -> bool {
        let streamed = self.streamed.contains(&got.page);
        let copy = self.copy(got.page);
        let lacks_own = copy.flying > 0 || streamed || got.version < copy.own;
        !copy.valid
            && copy.fetch.is_none()
            && got.version >= copy.need
            && !(lacks_own && cx.keep(Rule::Early))
    }

    /// The pages that go with `lock` to `to`, which does not know of `records`.
    pub(super) fn riding(
        &mut self,
        cx: &mut Cx<'_>,
        lock: LockId,
        to: Rank,
        records: &[(IntervalId, NoticeRuns)],
    ) -> Vec<PageCopy> {
        let mut news = Notices::default();
        for (_, runs) in records {
            news.merge(runs);
        }
        let away: Vec<PageIndex> =
            news.iter().map(|(page, _)| page).filter(|&page| cx.home(page) != to).collect();
        let mut riding = Vec::new();
        for page in away {
            if riding.len() == MOST_RIDING {
                break;
            }
            if self.is_master(cx, page) {
                let Some(record) = self.records.get_mut(&page).filter(|record| record.mode().rides_on(lock))
                else {
                    continue;
                };
                record.handed(to);
                let mode = record.mode();
                riding.push(PageCopy { mode, ..self.hand_out(cx, page) });
            } else if let Some(copy) = self.copies.get(&page)
                && copy.mode.rides_on(lock)
                && copy.valid
                && copy.flying == 0
                && !self.streamed.contains(&page)
            {
                let (mode, version) = (copy.mode, copy.version);
                let released = copy.twin.as_ref().filter(|_| cx.keep(Rule::Released)).map(Arc::clone);
                let bytes = released.unwrap_or_else(|| cx.snapshot(page));
                riding.push(PageCopy { page, version, applied: Vec::new(), mode, bytes });
            }
        }
        riding
    }

    /// Pages came with a lock.
    pub(super) fn on_riding(&mut self, cx: &mut Cx<'_>, riding: &[PageCopy]) -> Checked {
        for got in riding {
            if cx.kind(got.page) != Some(self.kind) || !self.adapts() {
                return unexpected("page with a lock");
            }
            if cx.is_home(got.page) || self.pulling.contains_key(&got.page) {
                continue;
            }
            self.copy(got.page).mode = got.mode;
            self.hide(cx, got.page);
            if self.takes(cx, got) {
                self.install(cx, got, got.mode.is_migratory());
            }
        }
        Ok(())
    }
}

/// Whether the first and the last word of a page differ from its twin's.
fn has_other_ends(cx: &mut Cx<'_>, page: PageIndex, twin: &[u8]) -> bool {
    if !cx.is_near(page) {
        return false;
    }
    let bytes = twin.len();
    let differs = |at: usize| {
        let word = cx.mem.word(page, bytes, at, WORD_BYTES);
        word.to_le_bytes() != twin[at..at + WORD_BYTES]
    };
    [0, bytes - WORD_BYTES].into_iter().all(differs)
}

/// Pages have at least as many.
const WORD_BYTES: usize = size_of::<u64>();
