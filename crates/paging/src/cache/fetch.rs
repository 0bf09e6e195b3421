//! Fetches: asked for together, landing together.
//!
//! A fetch counts twice against the budget while it is under way: its buffer, and the frames its pages will
//! be copied into. So the budget holds at every step, and nothing that was asked for ever waits for a frame.
//! After it landed the buffer is released, unless a page stays in it unmapped (`Ready`): the marker of a
//! stream.

use super::page::{COPY, DIRTY, EARLY, PROTECTED, State, TO_MAIN, TO_WRITE, WANTED, WANTED_WRITE};
use super::policy::Arrival;
use super::under_way::{Fetch, FetchPhase, Installed, Source, StreamId};
use super::{Cache, FetchId, Output, index_of};
use rampool_wire::units::{Extent, PageIndex, push_page, total_pages};

impl Cache {
    pub(super) fn has_fetch_slot(&self) -> bool {
        self.fetches.iter().any(|f| f.phase == FetchPhase::Free)
    }

    /// Fetches a wanted Remote page and those of its aligned unit that are Remote too. The caller made sure
    /// of a slot and two frames.
    pub(super) fn fetch_demand(&mut self, index: u32) {
        let unit = self.config.unit_pages;
        let start = index & !(unit - 1);
        let room = (self.frames.free().saturating_sub(self.marks.reserve / 2) / 2)
            .min(u64::from(self.config.fetch_pages));
        let mut extents = Vec::new();
        // The wanted page is always among them; the others as far as there is room, the ones after it first.
        let (mut first, mut last) = self.company(index, room.saturating_sub(1));
        let mut count = u64::from(last - first) + 1;
        self.stats.company_pages += count - 1;
        while last + 1 < start.saturating_add(unit) && count < room && self.is_remote(last + 1) {
            last += 1;
            count += 1;
        }
        while first > start && count < room && self.is_remote(first - 1) {
            first -= 1;
            count += 1;
        }
        for page in first..=last {
            push_page(&mut extents, PageIndex(u64::from(page)));
        }
        self.stats.demand_fetches += 1;
        self.start_fetch(extents, true, None, None, false);
    }

    pub(super) fn is_remote(&self, index: u32) -> bool {
        self.pages.get(index as usize).is_some_and(|p| p.state() == State::Remote)
    }

    /// Asks for pages, all Remote; returns the fetch's slot. The caller made sure of one; frames are taken
    /// here.
    pub(super) fn start_fetch(
        &mut self,
        extents: Vec<Extent>,
        demand: bool,
        marker: Option<u32>,
        stream: Option<StreamId>,
        writes: bool,
    ) -> u32 {
        let slot = self.fetches.iter().position(|f| f.phase == FetchPhase::Free).expect("a free fetch slot");
        let slot = u32::try_from(slot).expect("few fetches");
        let left = self.pages[index_of(extents[0].first) as usize].a;
        self.to_avoid_fetch = match self.to_avoid {
            Some(pages) if demand => pages,
            _ => self.to_keep(left),
        };
        let mut offset = 0;
        for extent in &extents {
            for page in extent.pages() {
                let index = index_of(page);
                let to_main = self.belongs_in_main(index, stream.is_some());
                let entry = &mut self.pages[index as usize];
                assert_eq!(entry.state(), State::Remote, "{page} is fetched but not remote");
                self.curve.returned(entry.a);
                entry.place(State::Fetching, slot, offset);
                entry.put(TO_MAIN, to_main);
                entry.put(TO_WRITE, writes);
                offset += 1;
            }
        }
        assert!(offset > 0 && u64::from(offset) == total_pages(&extents), "a fetch asks for something");
        let landing = if marker.is_some() { offset - 1 } else { offset };
        self.frames.buffered += u64::from(offset);
        self.frames.landing += u64::from(landing);
        self.stats.fetched_pages += u64::from(offset);
        self.stats.fetches += 1;
        self.fetch_serial += 1;
        self.fetches_in_flight += 1;
        self.fetches[slot as usize] = Fetch {
            phase: FetchPhase::InFlight,
            extents: extents.clone(),
            pages: offset,
            landing,
            ready: 0,
            marker,
            stream,
            expected: false,
            serial: self.fetch_serial,
            left,
            to_avoid: self.to_avoid_fetch,
        };
        self.outputs.push_back(Output::Fetch { fetch: FetchId(slot), extents, demand });
        slot
    }

    pub(super) fn fetched(&mut self, id: FetchId) {
        let slot = id.0;
        let fetch = &mut self.fetches[slot as usize];
        assert_eq!(fetch.phase, FetchPhase::InFlight, "{id:?} was not asked for");
        let marker = fetch.marker;
        self.fetches_in_flight -= 1;
        fetch.phase = FetchPhase::Idle;
        let pages: Vec<u32> = fetch.extents.iter().flat_map(Extent::pages).map(index_of).collect();
        for (at, &index) in (0u32..).zip(&pages) {
            let entry = &mut self.pages[index as usize];
            // Some were given up meanwhile.
            if entry.is_at(State::Fetching, slot, at) && marker == Some(index) {
                entry.set_state(State::Ready);
                self.fetches[slot as usize].ready += 1;
                if self.pages[index as usize].has(WANTED) {
                    self.want(index);
                }
            }
        }
        self.land_all(slot, &pages, State::Fetching);
        self.frames.landing -= u64::from(std::mem::take(&mut self.fetches[slot as usize].landing));
        let fetch = &self.fetches[slot as usize];
        if fetch.ready == 0 {
            self.release_fetch(slot);
        }
    }

    /// The pages of a fetch that are still in `state` become Resident, in runs as long as may be.
    fn land_all(&mut self, slot: u32, pages: &[u32], state: State) {
        let mut run: Option<(Extent, u32, bool)> = None;
        let mut count = 0;
        let expected = self.fetches[slot as usize].expected;
        for (at, &index) in (0u32..).zip(pages) {
            if !self.pages[index as usize].is_at(state, slot, at) {
                continue;
            }
            let page = PageIndex(u64::from(index));
            let writable = self.land(index, expected);
            count += 1;
            match &mut run {
                Some((extent, first, w))
                    if extent.end() == page && *first + extent.count == at && *w == writable =>
                {
                    extent.count += 1
                }
                _ => {
                    if let Some((extent, first, writable)) = run.replace((Extent::page(page), at, writable)) {
                        self.install_fetched(slot, extent, first, writable);
                    }
                }
            }
        }
        if let Some((extent, first, writable)) = run {
            self.install_fetched(slot, extent, first, writable);
        }
        let fetch = &mut self.fetches[slot as usize];
        if state == State::Ready {
            fetch.ready -= count;
        }
        self.trim_landing(slot);
    }

    /// No more frames stay reserved than there are pages which wait to be mapped.
    fn trim_landing(&mut self, slot: u32) {
        let fetch = &mut self.fetches[slot as usize];
        let beyond = fetch.landing.saturating_sub(fetch.ready);
        fetch.landing -= beyond;
        self.frames.landing -= u64::from(beyond);
    }

    /// One page of a fetch becomes Resident; its install is queued by the caller, together with its
    /// neighbours'.
    fn land(&mut self, index: u32, expected: bool) -> bool {
        let entry = &mut self.pages[index as usize];
        let wants_write = entry.has(WANTED_WRITE);
        let demanded = entry.has(WANTED);
        let stream_writes = entry.has(TO_WRITE);
        entry.clear(WANTED);
        entry.clear(WANTED_WRITE);
        let writable = self.guess_writable(index, wants_write, stream_writes);
        let entry = &mut self.pages[index as usize];
        assert!(entry.has(COPY), "page {index} came from nowhere");
        entry.put(PROTECTED, !writable);
        entry.put(DIRTY, writable);
        entry.put(EARLY, !demanded);
        if expected && !demanded {
            // How soon it will be used cannot be seen from outside: it goes round once more before it leaves.
            entry.set_heat(entry.heat().max(1));
        }
        let arrival = Arrival::Fetched { to_main: entry.has(TO_MAIN) };
        self.enter_resident(index, arrival);
        writable
    }

    fn install_fetched(&mut self, slot: u32, extent: Extent, offset: u32, writable: bool) {
        self.journal.push(Installed { extent, source: Source::Fetch { slot, offset } });
        self.outputs.push_back(Output::InstallFetched {
            extent,
            fetch: FetchId(slot),
            offset_pages: offset,
            writable,
        });
    }

    /// A thread reached a marker: the chunk before it was of use, and the stream goes on. What else waits in
    /// that fetch comes with it, and so do the parts of the same chunk that were asked for after it: they
    /// come first, while the thread still waits.
    pub(super) fn install_ready(&mut self, index: u32) {
        let slot = self.pages[index as usize].a;
        let pages: Vec<u32> =
            self.fetches[slot as usize].extents.iter().flat_map(Extent::pages).map(index_of).collect();
        self.land_all(slot, &pages, State::Ready);
        self.release_fetch(slot);
    }

    /// A Ready page left its fetch.
    pub(super) fn ready_gone(&mut self, slot: u32) {
        let fetch = &mut self.fetches[slot as usize];
        fetch.ready -= 1;
        let empty = fetch.ready == 0 && fetch.phase == FetchPhase::Idle;
        self.trim_landing(slot);
        if empty {
            self.release_fetch(slot);
        }
    }

    fn release_fetch(&mut self, slot: u32) {
        let fetch = &mut self.fetches[slot as usize];
        assert!(fetch.phase == FetchPhase::Idle && fetch.ready == 0, "fetch {slot} is in use");
        self.frames.buffered -= u64::from(fetch.pages);
        self.frames.landing -= u64::from(fetch.landing);
        *fetch = Fetch::FREE;
        self.outputs.push_back(Output::ReleaseFetch { fetch: FetchId(slot) });
    }

    pub(super) fn fetch_holds(&self, id: FetchId, offset: u32, index: u32) -> bool {
        let fetch = &self.fetches[id.0 as usize];
        if fetch.phase != FetchPhase::Idle {
            return false;
        }
        let mut at = 0;
        for extent in &fetch.extents {
            if offset < at + extent.count {
                return extent.first.0 + u64::from(offset - at) == u64::from(index);
            }
            at += extent.count;
        }
        false
    }

    /// Gives up the oldest fetch that is only kept for its marker: the page is Remote again. `keep` is
    /// spared.
    pub(super) fn drop_idle_fetch(&mut self, keep: Option<u32>) -> bool {
        let oldest = (0u32..)
            .zip(&self.fetches)
            .filter(|(slot, f)| f.phase == FetchPhase::Idle && Some(*slot) != keep)
            .min_by_key(|(_, f)| f.serial);
        let Some((slot, _)) = oldest else { return false };
        self.abandon_fetch(slot);
        true
    }

    /// Gives up the Ready pages of a landed fetch.
    pub(super) fn abandon_fetch(&mut self, slot: u32) {
        let extents = self.fetches[slot as usize].extents.clone();
        let (stream, expected) = (self.fetches[slot as usize].stream, self.fetches[slot as usize].expected);
        let left = self.fetches[slot as usize].left;
        let mut offset = 0;
        for extent in extents {
            for page in extent.pages() {
                let index = index_of(page);
                let entry = &mut self.pages[index as usize];
                if entry.is_at(State::Ready, slot, offset) {
                    entry.clear(super::page::GHOST);
                    self.becomes_remote(index, left);
                    self.fetches[slot as usize].ready -= 1;
                }
                offset += 1;
            }
        }
        if !expected {
            self.marker_wasted(stream);
        }
        self.release_fetch(slot);
    }
}
