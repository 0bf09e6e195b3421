//! Pages come under management, leave it, and lose their content, at any moment and in any state.
//!
//! A page that is being moved out when this happens stays `Evicting` until the runtime answers, with the flag
//! `GONE`: until then its frame may be in the program or in the batch, so a fault on it waits.

use super::page::{
    COPY, DIRTY, FOREIGN, FORGOTTEN, GHOST, GIVEN_UP, GONE, PROTECTED, Page, STORING, State, WANTED,
    WANTED_WRITE,
};
use super::{Cache, Output, index_of};
use rampool_wire::units::{Extent, PageIndex};

/// Pages at most in one index space.
const MAX_PAGES: u64 = 1 << 31;

impl Cache {
    pub(super) fn adopt(
        &mut self,
        extent: Extent,
        resident: &[Extent],
        remote: &[Extent],
        given_up: &[Extent],
    ) {
        assert!(extent.end().0 <= MAX_PAGES, "an index space has at most 2^31 pages, adopting {extent:?}");
        let end = usize::try_from(extent.end().0).expect("below 2^31");
        self.pages.grow(end, Page::UNMANAGED);
        self.pages.change(index_of(extent.first) as usize..end, |index, entry| match entry.state() {
            State::Unmanaged => {
                entry.set_state(State::Fresh);
                entry.clear(GHOST);
                entry.clear(GIVEN_UP);
                entry.set_heat(0);
                entry.set_habit(0);
            }
            State::Evicting if entry.has(FORGOTTEN) => {
                entry.clear(FORGOTTEN);
                entry.clear(GIVEN_UP);
            }
            state => panic!("page {index} is adopted while it is {state:?}"),
        });
        for run in given_up {
            assert!(
                run.first >= extent.first && run.end() <= extent.end(),
                "{run:?} is not in the adopted {extent:?}"
            );
            self.pages.change(
                index_of(run.first) as usize..usize::try_from(run.end().0).expect("below 2^31"),
                |_, entry| entry.set(GIVEN_UP),
            );
        }
        for run in resident {
            for page in run.pages() {
                assert!(extent.contains(page), "{page} is not in the adopted {extent:?}");
                let index = index_of(page);
                let entry = &mut self.pages[index as usize];
                assert_eq!(
                    entry.state(),
                    State::Fresh,
                    "{page} is adopted resident while it is being evicted, or twice"
                );
                if entry.has(GIVEN_UP) {
                    // The kernel is about to take it away.
                    continue;
                }
                entry.set(DIRTY);
                entry.set(FOREIGN);
                entry.clear(PROTECTED);
                self.enqueue_adopted(index);
            }
        }
        for page in remote.iter().flat_map(Extent::pages) {
            assert!(extent.contains(page), "{page} is not in the adopted {extent:?}");
            let entry = &mut self.pages[index_of(page) as usize];
            // A page that is resident all the same was copied into a forked child before it left the parent.
            if entry.state() != State::Resident {
                assert!(
                    entry.state() == State::Fresh && !entry.has(STORING),
                    "{page} is adopted remote while it is {entry:?}"
                );
                entry.set(COPY);
                self.becomes_remote(index_of(page), self.evict_clock);
            }
        }
        self.stats.adopted_pages += u64::from(extent.count);
    }

    pub(super) fn forget(&mut self, extent: Extent) {
        self.give_up_all(extent, true);
    }

    pub(super) fn zeroed(&mut self, extent: Extent) {
        self.give_up_all(extent, false);
    }

    fn give_up_all(&mut self, extent: Extent, forget: bool) {
        let (mut at, end) = (
            index_of(extent.first) as usize,
            usize::try_from(extent.end().0).expect("below 2^31").min(self.pages.len()),
        );
        while at < end {
            match self.pages.same_until(at) {
                // They were never touched.
                Some(until) if self.pages[at].is_untouched() => {
                    if forget || !self.pages[at].has(GIVEN_UP) {
                        self.pages.change(at..until.min(end), |_, entry| {
                            entry.put(GIVEN_UP, !forget);
                            if forget {
                                entry.set_state(State::Unmanaged);
                            }
                        });
                    }
                    at = until;
                }
                _ => {
                    self.give_up(PageIndex(at as u64), forget);
                    at += 1;
                }
            }
        }
    }

    /// Discards the content of `page`.
    fn give_up(&mut self, page: PageIndex, forget: bool) {
        let index = index_of(page);
        let Some(entry) = self.pages.get(index as usize).copied() else { return };
        let next = if forget { State::Unmanaged } else { State::Fresh };
        match entry.state() {
            State::Unmanaged => return,
            State::Evicting if entry.has(FORGOTTEN) => return,
            State::Evicting => {
                let entry = &mut self.pages[index as usize];
                entry.set(GONE);
                entry.put(FORGOTTEN, forget);
                entry.put(GIVEN_UP, !forget);
                self.drop_copy(index);
                if forget {
                    self.wake(index);
                }
                return;
            }
            State::Resident => self.leave_resident(index),
            State::Ready => {
                self.pages[index as usize].set_state(next);
                self.ready_gone(entry.a);
            }
            State::Fetching => {
                // Its frame stays reserved until the bytes arrive and are dropped.
            }
            State::Remote => self.curve.returned(entry.a),
            State::Fresh | State::Staged => {}
        }
        let keeps_ghost = matches!(entry.state(), State::Fresh | State::Remote);
        let entry = &mut self.pages[index as usize];
        entry.set_state(next);
        entry.clear(DIRTY);
        entry.clear(PROTECTED);
        entry.clear(FOREIGN);
        entry.put(GIVEN_UP, !forget);
        if !keeps_ghost || forget {
            entry.clear(GHOST);
        }
        self.drop_copy(index);
        let entry = &self.pages[index as usize];
        if entry.has(WANTED) {
            if forget {
                self.wake(index);
            } else {
                self.want(index);
            }
        }
    }

    /// The servers may drop their copy of a page, now or when the store under way is acknowledged.
    pub(super) fn drop_copy(&mut self, index: u32) {
        let entry = &mut self.pages[index as usize];
        if entry.has(COPY) && !entry.has(STORING) {
            entry.clear(COPY);
            self.discard(index);
        }
    }

    /// Queues a `Discard`, together with the one before it where that is its neighbour.
    pub(super) fn discard(&mut self, index: u32) {
        let page = PageIndex(u64::from(index));
        self.stats.discarded_pages += 1;
        if let Some(Output::Discard { extent }) = self.outputs.back_mut()
            && extent.end() == page
            && extent.count < u32::MAX
        {
            extent.count += 1;
            return;
        }
        self.outputs.push_back(Output::Discard { extent: Extent::page(page) });
    }

    /// Nothing to install: wakes the threads that wait for the page.
    pub(super) fn wake(&mut self, index: u32) {
        let entry = &mut self.pages[index as usize];
        if entry.has(WANTED) {
            entry.clear(WANTED);
            entry.clear(WANTED_WRITE);
            self.outputs.push_back(Output::Wake { page: PageIndex(u64::from(index)) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Access, CacheConfig, Input};
    use super::*;
    use crate::table::PIECE;

    #[test]
    fn untouched_pages_take_no_memory() {
        let mut cache = Cache::new(CacheConfig {
            budget_pages: 4096,
            unit_pages: 1,
            batch_pages: 64,
            max_batches: 8,
            max_prefetch_pages: 0,
            fetch_pages: 64,
            max_fetches: 16,
            tells_unchanged: false,
        });
        let reserved = Extent::new(PageIndex(0), 1 << 20);
        for _ in 0..3 {
            cache.handle(Input::Adopt { extent: reserved, resident: &[], remote: &[], given_up: &[] });
            for page in [0, 1, 700_000] {
                cache.handle(Input::Fault { page: PageIndex(page), access: Access::Write });
                while cache.poll().is_some() {}
            }
            assert!(cache.is_resident(PageIndex(700_000)));
            cache.handle(Input::Zeroed { extent: Extent::new(PageIndex(5), 1 << 19) });
            cache.check();
            cache.handle(Input::Forget { extent: reserved });
            while cache.poll().is_some() {}
            cache.check();
            assert!(!cache.is_resident(PageIndex(700_000)));
            assert!(cache.pages.iter().all(|entry| entry.state() == State::Unmanaged));
            // Those around what was touched, and perhaps the last ones.
            assert!(cache.pages.own_pieces() <= 3, "{} pieces of {PIECE} entries", cache.pages.own_pieces());
        }
    }
}
