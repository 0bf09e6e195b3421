//! Eviction batches: moved out together, written back together, lingering together, released together.
//!
//! ```text
//!   Evict --Evicted--> Held ----> Storing --Stored--> Lingering ----> ReleaseBatch
//!                       '--- nothing dirty ------------^
//! ```
//!
//! One kernel call and one TLB flush move a whole batch. A page that is faulted back from it has shown that
//! it is in use, which is the only reference bit there is: hits on mapped pages are invisible. Invariant: a
//! batch is released only when none of its staged pages is dirty, and a page has at most one store under way.

use super::page::{
    COPY, DIRTY, EARLY, FOREIGN, FORGOTTEN, FROM_MAIN, GHOST, GONE, PROTECTED, Page, STORING, State, WANTED,
    WANTED_WRITE,
};
use super::policy::Arrival;
use super::under_way::{BatchPhase, Installed, Source};
use super::{BatchId, Cache, EvictOutcome, Output, index_of};
use rampool_wire::units::{Extent, PageIndex, push_page};

/// The longest run of staged pages that one fault brings back.
const MAX_STAGED_RUN: u32 = 64;

impl Cache {
    /// Moves up to `limit` pages out as one batch. False when no page may leave or no batch is free.
    pub(super) fn evict(&mut self, limit: u64, desperate: bool) -> bool {
        let Some(slot) = self.batches.iter().position(|b| b.phase == BatchPhase::Free) else { return false };
        let mut victims = std::mem::take(&mut self.batches[slot].pages);
        victims.clear();
        self.pick_victims(limit, desperate, &mut victims);
        if victims.is_empty() {
            self.batches[slot].pages = victims;
            return false;
        }
        let slot = u32::try_from(slot).expect("few batches");
        // In address order neighbours leave by one call, and a later scan finds them together at the servers.
        // They are a few runs mostly, which a stable sort finds.
        victims.sort();
        let mut extents = Vec::new();
        self.evict_clock =
            self.evict_clock.wrapping_add(u32::try_from(victims.len()).expect("a batch is small"));
        for (offset, &index) in (0u32..).zip(&victims) {
            self.leave_resident(index);
            self.pages[index as usize].place(State::Evicting, slot, offset);
            push_page(&mut extents, PageIndex(u64::from(index)));
        }
        let count = victims.len() as u64;
        self.frames.evicting += count;
        self.stats.evicted_pages += count;
        self.stats.batches += 1;
        self.forget_early_pages(count);
        let batch = &mut self.batches[slot as usize];
        assert!(batch.storing.is_empty() && batch.frames == 0, "a free batch holds nothing");
        batch.phase = BatchPhase::Evicting;
        batch.clock = self.evict_clock;
        self.sample_victims(&victims, self.evict_clock);
        self.batches[slot as usize].pages = victims;
        self.evictions_in_flight += 1;
        self.outputs.push_back(Output::Evict { batch: BatchId(slot), extents });
        true
    }

    pub(super) fn evicted(&mut self, id: BatchId, outcomes: &[EvictOutcome]) {
        let slot = id.0;
        let pages = std::mem::take(&mut self.batches[slot as usize].pages);
        assert_eq!(self.batches[slot as usize].phase, BatchPhase::Evicting, "{id:?} is not being evicted");
        assert_eq!(outcomes.len(), pages.len(), "{id:?}: one outcome for each page");
        self.evictions_in_flight -= 1;
        self.frames.evicting -= pages.len() as u64;
        let clock = self.batches[slot as usize].clock;
        let mut frames = 0;
        for ((offset, &index), &outcome) in (0u32..).zip(&pages).zip(outcomes) {
            let entry = &mut self.pages[index as usize];
            assert!(
                entry.is_at(State::Evicting, slot, offset),
                "page {index} left {id:?} before it was answered"
            );
            if matches!(
                outcome,
                EvictOutcome::Moved
                    | EvictOutcome::MovedOpened
                    | EvictOutcome::MovedUnchanged
                    | EvictOutcome::MovedZero
            ) {
                frames += 1;
                entry.clear(FOREIGN);
            }
            if matches!(outcome, EvictOutcome::MovedOpened | EvictOutcome::BusyOpened) {
                entry.set(DIRTY);
                entry.clear(PROTECTED);
            }
            if entry.has(GONE) {
                entry.clear(GONE);
                let forgotten = entry.has(FORGOTTEN);
                entry.clear(FORGOTTEN);
                entry.clear(FOREIGN);
                self.becomes_empty(index, if forgotten { State::Unmanaged } else { State::Fresh });
                continue;
            }
            match outcome {
                // What was stored last counts only as long as the servers keep it.
                EvictOutcome::MovedUnchanged if entry.has(COPY) => {
                    entry.set_state(State::Staged);
                    entry.clear(DIRTY);
                    self.stats.unchanged_pages += 1;
                    self.looks = self.looks.saturating_sub(1);
                }
                EvictOutcome::Moved | EvictOutcome::MovedOpened | EvictOutcome::MovedUnchanged => {
                    entry.set_state(State::Staged)
                }
                EvictOutcome::MovedZero => {
                    self.stats.zero_pages += 1;
                    self.becomes_empty(index, State::Fresh);
                    self.remember(index, clock);
                }
                EvictOutcome::Vanished => {
                    self.stats.vanished_pages += u64::from(!entry.may_be_reclaimed());
                    entry.clear(FOREIGN);
                    self.becomes_empty(index, State::Fresh);
                }
                EvictOutcome::Busy | EvictOutcome::BusyOpened | EvictOutcome::Later => {
                    self.stats.busy_pages += 1;
                    if outcome == EvictOutcome::Later {
                        self.evictions_pause = true;
                        self.enqueue_again(index);
                    } else {
                        self.enqueue_busy(index);
                    }
                    let entry = &mut self.pages[index as usize];
                    if entry.has(WANTED_WRITE) && entry.has(PROTECTED) {
                        self.unprotect(index);
                    } else {
                        self.wake(index);
                    }
                    continue;
                }
            }
        }
        self.frames.staged += frames;
        let batch = &mut self.batches[slot as usize];
        batch.frames = frames;
        batch.phase = BatchPhase::Held;
        for &index in &pages {
            if self.pages[index as usize].has(WANTED) {
                self.want(index);
            }
        }
        self.batches[slot as usize].pages = pages;
        self.serve_waiting();
        if self.batches[slot as usize].phase == BatchPhase::Held {
            self.advance(slot);
        }
    }

    /// A page without content: only its history stays.
    fn becomes_empty(&mut self, index: u32, state: State) {
        let entry = &mut self.pages[index as usize];
        entry.set_state(state);
        entry.clear(DIRTY);
        entry.clear(PROTECTED);
        entry.clear(GHOST);
        self.drop_copy(index);
        if state == State::Unmanaged {
            self.wake(index);
        }
    }

    /// Sends what of a Held batch must be sent, or lets it linger.
    pub(super) fn advance(&mut self, slot: u32) {
        assert_eq!(self.batches[slot as usize].phase, BatchPhase::Held, "batch {slot} is not held");
        let mut runs: Vec<(Extent, u32)> = Vec::new();
        let mut storing = std::mem::take(&mut self.batches[slot as usize].storing);
        assert!(storing.is_empty(), "batch {slot} has a store under way");
        let mut live = false;
        for (offset, &index) in (0u32..).zip(&self.batches[slot as usize].pages) {
            let entry = &self.pages[index as usize];
            if !entry.is_at(State::Staged, slot, offset) {
                continue;
            }
            live = true;
            if entry.has(DIRTY) {
                add_run(&mut runs, index, offset);
                storing.push(index);
            }
        }
        // An install of this very step may still fail, and then the batch has the only copy: it is sent too.
        for installed in &self.journal {
            if let Source::Batch { slot: from, offset, was_dirty: true } = installed.source
                && from == slot
            {
                for (offset, page) in (offset..).zip(installed.extent.pages()) {
                    let index = index_of(page);
                    let entry = &self.pages[index as usize];
                    if entry.state() == State::Resident && !entry.has(STORING) {
                        add_run(&mut runs, index, offset);
                        storing.push(index);
                    }
                }
            }
        }
        if runs.is_empty() {
            let batch = &mut self.batches[slot as usize];
            batch.storing = storing;
            batch.phase = BatchPhase::Lingering;
            self.lingering.push_back(slot);
            if !live {
                self.release(slot);
            }
        } else if self.pool_full {
            storing.clear();
            self.batches[slot as usize].storing = storing;
        } else {
            for &index in &storing {
                let entry = &mut self.pages[index as usize];
                assert!(!entry.has(STORING), "page {index} is stored twice at a time");
                entry.set(STORING);
            }
            self.stats.stored_pages += storing.len() as u64;
            self.stores_in_flight += 1;
            let batch = &mut self.batches[slot as usize];
            batch.storing = storing;
            batch.phase = BatchPhase::Storing;
            self.outputs.push_back(Output::Store { batch: BatchId(slot), pages: runs });
        }
    }

    pub(super) fn stored(&mut self, id: BatchId) {
        let slot = id.0;
        let mut storing = std::mem::take(&mut self.batches[slot as usize].storing);
        assert_eq!(self.batches[slot as usize].phase, BatchPhase::Storing, "{id:?} has no store under way");
        self.stores_in_flight -= 1;
        for &index in &storing {
            let entry = &mut self.pages[index as usize];
            assert!(entry.has(STORING), "page {index} is not being stored");
            entry.clear(STORING);
            match entry.state() {
                State::Fresh | State::Unmanaged => {
                    entry.clear(COPY);
                    self.discard(index);
                }
                State::Staged => {
                    entry.set(COPY);
                    entry.clear(DIRTY);
                }
                // Still the bytes that were sent: the page could not be written.
                State::Resident if entry.has(PROTECTED) => {
                    entry.set(COPY);
                    if entry.has(DIRTY) {
                        entry.clear(DIRTY);
                        self.clean_resident += 1;
                    }
                }
                State::Resident => entry.set(COPY),
                state => panic!("page {index} is {state:?} while it is stored"),
            }
        }
        storing.clear();
        let batch = &mut self.batches[slot as usize];
        batch.storing = storing;
        batch.phase = BatchPhase::Held;
        // An install that failed may have brought back a dirty page which the store did not carry: it is sent
        // now.
        self.advance(slot);
    }

    /// Gives the frames of a lingering batch back. What is still staged in it is at the servers.
    pub(super) fn release(&mut self, slot: u32) {
        self.lingering.retain(|&s| s != slot);
        let pages = std::mem::take(&mut self.batches[slot as usize].pages);
        assert_eq!(
            self.batches[slot as usize].phase,
            BatchPhase::Lingering,
            "batch {slot} is not acknowledged"
        );
        for (offset, &index) in (0u32..).zip(&pages) {
            let entry = &mut self.pages[index as usize];
            if entry.is_at(State::Staged, slot, offset) {
                assert!(!entry.has(DIRTY) && entry.has(COPY), "page {index} would be lost");
                let clock = self.batches[slot as usize].clock;
                self.becomes_remote(index, clock);
                self.remember(index, clock);
                if self.pages[index as usize].has(WANTED) {
                    self.want(index);
                }
            }
        }
        let batch = &mut self.batches[slot as usize];
        let frames = std::mem::take(&mut batch.frames);
        self.frames.staged -= frames;
        batch.phase = BatchPhase::Free;
        batch.pages = pages;
        self.outputs.push_back(Output::ReleaseBatch { batch: BatchId(slot) });
    }

    /// Ends the lingering of the batch that left first. False when none is acknowledged.
    pub(super) fn release_oldest(&mut self) -> bool {
        let Some(&slot) = self.lingering.front() else { return false };
        self.release(slot);
        true
    }

    pub(super) fn set_pool_full(&mut self, full: bool) {
        self.pool_full = full;
        if !full {
            for slot in 0..self.batches.len() {
                if self.batches[slot].phase == BatchPhase::Held {
                    self.advance(u32::try_from(slot).expect("few batches"));
                }
            }
        }
    }

    /// Copies go back into the program: the wanted page and, where such faults advance page by page, a
    /// growing run of its neighbours; the batch keeps its own.
    pub(super) fn install_staged(&mut self, index: u32) {
        let Page { a: slot, b: offset, .. } = self.pages[index as usize];
        let (before, after) = self.staged_run(index);
        let wants_write = self.pages[index as usize].has(WANTED_WRITE);
        let was_dirty = self.pages[index as usize].has(DIRTY);
        let writable = self.guess_writable(index, wants_write, false);
        let extent = Extent::new(PageIndex(u64::from(index - before)), before + 1 + after);
        for page in index - before..=index + after {
            let entry = &mut self.pages[page as usize];
            // The first use of a prefetched page says nothing about a second one, and the use of the
            // neighbours is unknown.
            let in_use = page == index && !entry.has(EARLY);
            if in_use {
                let heat = entry.heat();
                entry.set_heat(2 * heat + 1);
            }
            let to_main = in_use || (page != index && entry.has(FROM_MAIN));
            entry.clear(EARLY);
            entry.clear(WANTED);
            entry.clear(WANTED_WRITE);
            entry.put(PROTECTED, !writable);
            if writable {
                entry.set(DIRTY);
            }
            self.enter_resident(page, Arrival::SecondChance { to_main });
        }
        self.stats.second_chances += 1;
        let source = Source::Batch { slot, offset: offset - before, was_dirty };
        self.journal.push(Installed { extent, source });
        self.outputs.push_back(Output::InstallStaged {
            extent,
            batch: BatchId(slot),
            offset_pages: offset - before,
            writable,
        });
    }

    /// How many neighbours before and after a staged page come back with it: they are next to it in the
    /// batch, and the servers have the same bytes of them.
    fn staged_run(&mut self, index: u32) -> (u32, u32) {
        let Page { a: slot, b: offset, .. } = self.pages[index as usize];
        let dirty = self.pages[index as usize].has(DIRTY);
        let room = u32::try_from(self.frames.free().saturating_sub(self.marks.reserve)).unwrap_or(u32::MAX);
        let (upwards, most) = self.streams.second_chances.step(index, MAX_STAGED_RUN);
        let most = most.min(room.saturating_add(1));
        let mut count = 1;
        while count < most {
            let (page, at) = if upwards {
                (index.checked_add(count), offset.checked_add(count))
            } else {
                (index.checked_sub(count), offset.checked_sub(count))
            };
            let (Some(page), Some(at)) = (page, at) else { break };
            let Some(entry) = self.pages.get(page as usize) else { break };
            if !entry.is_at(State::Staged, slot, at) || entry.has(DIRTY) != dirty {
                break;
            }
            count += 1;
        }
        self.streams.second_chances.took(index, count, upwards);
        if upwards { (0, count - 1) } else { (count - 1, 0) }
    }
}

fn add_run(runs: &mut Vec<(Extent, u32)>, index: u32, offset: u32) {
    let page = PageIndex(u64::from(index));
    match runs.last_mut() {
        Some((extent, first)) if extent.end() == page && *first + extent.count == offset => extent.count += 1,
        _ => runs.push((Extent::page(page), offset)),
    }
}
