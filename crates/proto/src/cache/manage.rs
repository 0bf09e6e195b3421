//! Pages come under management, leave it, and lose their content, at any moment and in any state.
//!
//! A page that is being moved out when this happens stays `Evicting` until the runtime answers, with the flag `GONE`: until then nobody
//! knows whether its frame is in the program or in the batch, so a fault on it waits.

use super::page::{COPY, DIRTY, FORGOTTEN, GHOST, GONE, PROTECTED, Page, STORING, State, WANTED, WANTED_WRITE};
use super::{Cache, Output, index_of};
use crate::units::{Extent, PageIndex};

/// Pages at most in one index space.
const MAX_PAGES: u64 = 1 << 31;

impl Cache {
    pub(super) fn adopt(&mut self, extent: Extent, resident: &[Extent], remote: &[Extent]) {
        assert!(extent.end().0 <= MAX_PAGES, "an index space has at most 2^31 pages, adopting {extent:?}");
        let end = usize::try_from(extent.end().0).expect("below 2^31");
        if end > self.pages.len() {
            self.pages.resize(end, Page::UNMANAGED);
        }
        for page in extent.pages() {
            let entry = &mut self.pages[index_of(page) as usize];
            match entry.state() {
                State::Unmanaged => {
                    entry.set_state(State::Fresh);
                    entry.clear(GHOST);
                    entry.set_heat(0);
                    entry.set_habit(0);
                }
                State::Evicting if entry.has(FORGOTTEN) => entry.clear(FORGOTTEN),
                state => panic!("{page} is adopted while it is {state:?}"),
            }
        }
        for run in resident {
            for page in run.pages() {
                assert!(extent.contains(page), "{page} is not in the adopted {extent:?}");
                let index = index_of(page);
                let entry = &mut self.pages[index as usize];
                assert_eq!(entry.state(), State::Fresh, "{page} is adopted resident while it is being evicted, or twice");
                entry.set(DIRTY);
                entry.clear(PROTECTED);
                self.enqueue_adopted(index);
            }
        }
        for page in remote.iter().flat_map(Extent::pages) {
            assert!(extent.contains(page), "{page} is not in the adopted {extent:?}");
            let entry = &mut self.pages[index_of(page) as usize];
            // A page that is resident all the same was copied into a forked child before it left the parent.
            if entry.state() != State::Resident {
                assert!(entry.state() == State::Fresh && !entry.has(STORING), "{page} is adopted remote while it is {entry:?}");
                entry.set_state(State::Remote);
                entry.set(COPY);
            }
        }
        self.spare_gives_way(0);
        self.stats.adopted_pages += u64::from(extent.count);
    }

    pub(super) fn forget(&mut self, extent: Extent) {
        for page in extent.pages() {
            self.give_up(page, true);
        }
    }

    pub(super) fn zeroed(&mut self, extent: Extent) {
        for page in extent.pages() {
            self.give_up(page, false);
        }
    }

    /// The content of `page` is nobody's any more.
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
            State::Fresh | State::Staged | State::Remote => {}
        }
        let keeps_ghost = matches!(entry.state(), State::Fresh | State::Remote);
        let entry = &mut self.pages[index as usize];
        entry.set_state(next);
        entry.clear(DIRTY);
        entry.clear(PROTECTED);
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

    /// Nothing to install: wakes whoever waits for the page.
    pub(super) fn wake(&mut self, index: u32) {
        let entry = &mut self.pages[index as usize];
        if entry.has(WANTED) {
            entry.clear(WANTED);
            entry.clear(WANTED_WRITE);
            self.outputs.push_back(Output::Wake { page: PageIndex(u64::from(index)) });
        }
    }
}
