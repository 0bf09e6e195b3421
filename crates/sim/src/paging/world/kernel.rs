//! The kernel and the servers of a simulated run: what they do, when they do it, and when they will not.

use rampool_paging::cache::{BatchId, EvictOutcome, Input};
use rampool_wire::units::{Extent, PageIndex, push_page};

use super::{Frame, Op, World, nth};
use crate::paging::Mutation;

impl World {
    pub(super) fn install(&mut self, extent: Extent, contents: &[u64], writable: bool) {
        if self.refuses() {
            if !self.mutate(Mutation::FailureUnreported) {
                self.installs_failed.push(extent);
            }
        } else if !self.quiet && self.rng.one_in(self.plan.failure_odds) {
            // The kernel did a part of it.
            let done = u32::try_from(self.rng.below(u64::from(extent.count))).expect("below a u32");
            let rest = Extent::new(extent.first.offset(u64::from(done)), extent.count - done);
            if done > 0 {
                self.map(Extent::new(extent.first, done), contents, writable);
            }
            if !self.mutate(Mutation::FailureUnreported) {
                self.installs_failed.push(rest);
            }
        } else {
            self.map(extent, contents, writable);
        }
    }

    /// Zeroes where a page is expected to be.
    pub(super) fn confirm(&mut self, page: PageIndex) {
        let (extent, model) = (Extent::page(page), self.pages[nth(page.0)]);
        if self.refuses() || !model.managed {
            self.installs_failed.push(extent);
        } else {
            assert_eq!(model.moving, 0, "{page} is confirmed where it is no longer");
            if model.mapped.is_none() {
                self.pages[nth(page.0)].mapped =
                    Some(Frame { content: 0, protected: false, hidden: false, lazy: false });
                self.mapped += 1;
                self.missing.push(page);
            }
            self.wake(extent);
        }
    }

    /// The kernel merges all pages with others: that drops their protection.
    pub(super) fn merge(&mut self) {
        let extent = Extent::new(PageIndex(0), u32::try_from(self.plan.pages).expect("few pages"));
        for page in extent.pages() {
            if let Some(frame) = &mut self.pages[nth(page.0)].mapped {
                frame.protected = false;
            }
        }
        if self.plan.mutation != Some(Mutation::MergesUnreported) {
            self.handle(Input::Unguarded { extent });
        }
    }

    /// A page that was there already, and that the cache counts now.
    pub(super) fn count_if_resident(&mut self, page: PageIndex) {
        let resident = self.cache.is_resident(page);
        if let Some(frame) = &mut self.pages[nth(page.0)].mapped
            && resident
            && std::mem::replace(&mut frame.hidden, false)
        {
            self.mapped += 1;
        }
    }

    fn map(&mut self, extent: Extent, contents: &[u64], writable: bool) {
        let mut there = Vec::new();
        for (page, &content) in extent.pages().zip(contents) {
            let protected = !writable && !self.mutate(Mutation::ProtectionIgnored);
            let model = &mut self.pages[nth(page.0)];
            assert!(model.managed, "{page} is installed where nothing is");
            assert_eq!(model.moving, 0, "{page} is installed where it is no longer");
            if model.mapped.is_none() {
                model.mapped = Some(Frame { content, protected, hidden: false, lazy: false });
                self.mapped += 1;
            } else {
                push_page(&mut there, page);
            }
        }
        self.already_there.extend(there);
        self.wake(extent);
    }

    /// One step of something under way; it may have to wait for an earlier one of the same pages.
    pub(super) fn advance(&mut self, at: usize) {
        let pages = self.ops[at].at_servers();
        let overlaps = |e: &Extent| pages.iter().any(|p| p.first < e.end() && e.first < p.end());
        if self.ops[..at].iter().any(|earlier| earlier.at_servers().iter().any(overlaps)) {
            return;
        }
        if let Op::Evict { batch, extents, done: None } = &self.ops[at] {
            let (batch, extents) = (*batch, extents.clone());
            let outcomes = self.move_out(batch, &extents);
            if let Op::Evict { done, .. } = &mut self.ops[at] {
                *done = Some(outcomes);
            }
            return;
        }
        if matches!(&self.ops[at], Op::Store { .. }) && self.pool_full {
            // Kept until there is room again.
            return;
        }
        match &mut self.ops[at] {
            Op::Store { batch, pages, applied: applied @ false } => {
                *applied = true;
                let (batch, pages) = (*batch, pages.clone());
                let lost = self.mutate(Mutation::StoreLosesPage);
                let buffer = self.batches.get(&batch.0).expect("the batch is there while it is stored");
                for (extent, offset) in pages {
                    for (page, content) in extent.pages().zip(&buffer[offset as usize..]) {
                        self.servers.insert(page.0, content.expect("a stored page was moved out"));
                    }
                    if lost {
                        self.servers.insert(extent.first.0, 0);
                    }
                }
                return;
            }
            Op::Fetch { fetch, extents, applied: applied @ false } => {
                *applied = true;
                let (fetch, extents) = (*fetch, extents.clone());
                let shift = u64::from(self.mutate(Mutation::FetchShifted));
                let pages = extents.iter().flat_map(Extent::pages);
                let buffer = self.fetches.get_mut(&fetch.0).expect("the fetch is there");
                for (page, content) in pages.zip(buffer.iter_mut()) {
                    let kept = self.servers.get(&(page.0 + shift)).or_else(|| self.servers.get(&page.0));
                    *content =
                        Some(*kept.unwrap_or_else(|| {
                            panic!("{page} is asked for, but the servers do not have it")
                        }));
                }
                return;
            }
            _ => {}
        }
        match self.ops.remove(at) {
            Op::Evict { batch, done, .. } => {
                self.handle(Input::Evicted { batch, outcomes: &done.expect("moved") })
            }
            Op::Store { batch, .. } => self.handle(Input::Stored { batch }),
            Op::Fetch { fetch, .. } => self.handle(Input::Fetched { fetch }),
            Op::Discard { extent } => {
                for page in extent.pages() {
                    let dropped = self.servers.remove(&page.0);
                    assert!(dropped.is_some(), "{page} is dropped, but the servers do not have it");
                }
            }
        }
    }

    fn move_out(&mut self, batch: BatchId, extents: &[Extent]) -> Vec<EvictOutcome> {
        let mut contents = Vec::new();
        let mut outcomes = Vec::new();
        let mut later = self.refuses();
        for page in extents.iter().flat_map(Extent::pages) {
            if self.refuses() {
                contents.push(None);
                outcomes.push(EvictOutcome::Later);
                continue;
            }
            assert_eq!(self.pages[nth(page.0)].moving, 0, "{page} is moved out from where it is no longer");
            let busy = !self.quiet && self.rng.one_in(self.plan.busy_odds);
            if busy && self.pages[nth(page.0)].mapped.is_some() {
                contents.push(None);
                let lie = self.mutate(Mutation::BusyReportedMoved);
                if lie {
                    contents.pop();
                    contents.push(Some(0));
                }
                // It was opened to be taken away, and could not be taken away all the same.
                let opened = !lie && self.rng.one_in(2);
                if opened && let Some(frame) = &mut self.pages[nth(page.0)].mapped {
                    frame.protected = false;
                }
                outcomes.push(match (lie, opened) {
                    (true, _) => EvictOutcome::Moved,
                    (_, true) => EvictOutcome::BusyOpened,
                    _ => EvictOutcome::Busy,
                });
                continue;
            }
            later |= !self.quiet && self.rng.one_in(self.plan.busy_odds);
            if later && self.pages[nth(page.0)].mapped.is_some() {
                contents.push(None);
                outcomes.push(EvictOutcome::Later);
                continue;
            }
            let frame = self.unmap(page.0);
            contents.push(frame.map(|f| f.content));
            outcomes.push(match frame {
                None => EvictOutcome::Vanished,
                Some(Frame { content: 0, .. }) => EvictOutcome::MovedZero,
                Some(_) if self.mutate(Mutation::ContentReportedZero) => EvictOutcome::MovedZero,
                Some(_) if self.mutate(Mutation::WrittenReportedUnchanged) => EvictOutcome::MovedUnchanged,
                Some(Frame { content, .. })
                    if self.plan.config.tells_unchanged && self.stored.get(&page.0) == Some(&content) =>
                {
                    EvictOutcome::MovedUnchanged
                }
                // Shared with a child, it had to be opened first.
                Some(_) if self.rng.one_in(16) => EvictOutcome::MovedOpened,
                Some(_) => EvictOutcome::Moved,
            });
        }
        assert!(self.batches.insert(batch.0, contents).is_none(), "{batch:?} is in use");
        outcomes
    }
}
