//! From a fault to its answer.
//!
//! A fault that can be answered at once is. One that needs frames or a fetch slot that cannot be freed just
//! now waits in a queue, in order of arrival, and is retried whenever something is freed. The page's `WANTED`
//! flag means "a thread waits and has no answer".

use super::page::{
    COPY, DIRTY, FOREIGN, FORGOTTEN, GHOST, GIVEN_UP, NEW, PROTECTED, Page, QUEUED, STORING, State, WANTED,
    WANTED_WRITE,
};
use super::policy::Arrival;
use super::under_way::{BatchPhase, Installed, Source};
use super::{Access, Cache, FetchId, Output, index_of};
use rampool_wire::units::{Extent, PageIndex, push_page};

/// The longest run of pages that one write-protection fault opens.
const MAX_UNPROTECT_RUN: u32 = 64;
/// To look at so many pages, whether they leave unchanged, costs about as much as one write-protection fault.
const LOOKS_PER_FAULT: u32 = 32;
const MOST_LOOKS: u32 = 1024;
/// Written pages in a row that are a stream of writes.
const STREAM_OF_WRITES: u32 = 4;

impl Cache {
    pub(super) fn fault(&mut self, page: PageIndex, access: Access) {
        let index = index_of(page);
        self.stats.faults += 1;
        self.faults_seen = self.faults_seen.wrapping_add(1);
        self.to_avoid = None;
        let Some(entry) = self.pages.get_mut(index as usize) else {
            self.outputs.push_back(Output::Wake { page });
            return;
        };
        match entry.state() {
            State::Unmanaged => {
                self.outputs.push_back(Output::Wake { page });
                return;
            }
            State::Evicting if entry.has(FORGOTTEN) => {
                self.outputs.push_back(Output::Wake { page });
                return;
            }
            State::Resident if access == Access::WriteProtected => {
                self.stats.unprotect_faults += 1;
                // It was fetched, as the pages of late, or it would not be protected.
                self.to_avoid = Some(self.to_avoid_fetch);
                self.unprotect(index);
                return;
            }
            State::Resident => {
                self.stats.spurious_faults += 1;
                self.confirm_resident(index);
                return;
            }
            State::Fresh if access == Access::WriteProtected => {
                // A page that was given up and is still there. It is not ours any more; what is written goes
                // with it, or stays with it.
                self.stats.unprotect_faults += 1;
                self.outputs.push_back(Output::Unprotect { extent: Extent::page(page) });
                return;
            }
            State::Fresh
            | State::Evicting
            | State::Staged
            | State::Remote
            | State::Fetching
            | State::Ready => {}
        }
        let state = entry.state();
        let again = entry.has(WANTED);
        let a = entry.a;
        entry.set(WANTED);
        if access != Access::Read {
            entry.set(WANTED_WRITE);
        }
        self.to_avoid = self.to_avoid(state, a);
        let stream = if again || state == State::Evicting {
            None
        } else {
            self.observe(index, state, access != Access::Read)
        };
        if state == State::Remote && !again && stream.is_none() {
            self.stats.random_faults += 1;
            self.observe_neighbours(index);
        }
        match state {
            State::Fetching => self.stats.faults_on_fetch += 1,
            State::Evicting => {}
            _ => {
                self.want(index);
                self.serve_waiting();
            }
        }
        // What a thread waits for goes first.
        if let Some(stream) = stream
            && self.waiting.is_empty()
        {
            self.run_stream(stream);
        }
    }

    /// What would have avoided a fault on a page in `state`, with the word `a` of its entry.
    fn to_avoid(&self, state: State, a: u32) -> Option<u64> {
        match state {
            State::Unmanaged | State::Fresh | State::Resident => None,
            State::Evicting | State::Staged => Some(self.frames.evicting + self.frames.staged),
            State::Remote => Some(self.to_keep(a)),
            State::Fetching | State::Ready => Some(self.fetches[a as usize].to_avoid),
        }
    }

    /// A fault on a page that is Resident: a stale duplicate, or the kernel has taken a page away that the
    /// program gave up before. Zeroes are right in both cases, because the kernel refuses to replace a page
    /// that is there. The page counts as written from now on.
    fn confirm_resident(&mut self, index: u32) {
        let entry = &mut self.pages[index as usize];
        if !entry.has(DIRTY) {
            self.clean_resident -= 1;
        }
        entry.set(DIRTY);
        entry.clear(PROTECTED);
        let may_be_gone = entry.may_be_reclaimed();
        let extent = Extent::page(PageIndex(u64::from(index)));
        self.journal.push(Installed { extent, source: Source::Nothing });
        self.outputs.push_back(Output::Confirm { page: extent.first, may_be_gone });
    }

    /// A page that counts as Resident was not there, and is zero now. That is so where the program gave it up
    /// and its removal came late, or did so lazily before the page was adopted.
    pub(super) fn was_missing(&mut self, page: PageIndex) {
        let entry = &mut self.pages[index_of(page) as usize];
        self.stats.missing_pages += u64::from(!entry.may_be_reclaimed());
        entry.clear(FOREIGN);
    }

    /// The kernel had pages where some were to be installed. Where the program gave the content up, its
    /// removal is still to come, or never comes (MADV_FREE): the page stays Fresh, open to writes. Else the
    /// kernel has made it itself (it was mapped as the shared zero page when it was adopted): it is managed
    /// from now on.
    pub(super) fn already_there(&mut self, extent: Extent) {
        let mut opened: Vec<Extent> = Vec::new();
        for page in extent.pages() {
            let index = index_of(page);
            let Installed { source, .. } = self.installed(page);
            let entry = &mut self.pages[index as usize];
            assert_eq!(entry.state(), State::Resident, "{page} was there but moved on");
            match source {
                Source::Nothing => {}
                Source::Zero => {
                    self.stats.pages_there += 1;
                    if entry.has(GIVEN_UP) {
                        self.back_to_fresh(index);
                        push_page(&mut opened, page);
                    }
                }
                Source::Batch { .. } | Source::Fetch { .. } => {
                    // What the program sees is its page.
                    self.stats.content_refused += 1;
                    if !entry.has(DIRTY) {
                        entry.set(DIRTY);
                        self.clean_resident -= 1;
                    }
                    entry.clear(PROTECTED);
                    push_page(&mut opened, page);
                }
            }
        }
        self.outputs.extend(opened.into_iter().map(|extent| Output::Unprotect { extent }));
    }

    /// How `page` was installed by the step that just ended.
    fn installed(&self, page: PageIndex) -> Installed {
        let installed = self.journal.iter().rev().find(|i| i.extent.contains(page)).cloned();
        installed.unwrap_or_else(|| panic!("{page} was not installed by the step before"))
    }

    /// A page that was not filled with zeroes after all.
    fn back_to_fresh(&mut self, index: u32) {
        self.leave_resident(index);
        let entry = &mut self.pages[index as usize];
        entry.clear(PROTECTED);
        entry.clear(DIRTY);
        entry.clear(GHOST);
        entry.clear(NEW);
        entry.set_state(State::Fresh);
    }

    /// Opens a write-protected resident page, and a growing run of its neighbours where such faults advance
    /// page by page.
    pub(super) fn unprotect(&mut self, index: u32) {
        let page = &mut self.pages[index as usize];
        page.clear(WANTED);
        page.clear(WANTED_WRITE);
        // Written pages behind this one show a stream of writes, and how long it has been: as much is opened
        // ahead of it at once.
        let behind = self.written_run(index, false);
        let ahead = self.written_run(index, true);
        let (upwards, wanted) = if behind >= ahead { (true, behind) } else { (false, ahead) };
        if wanted < STREAM_OF_WRITES {
            // A page that is written on its own may be again. What a stream writes it may never write again,
            // and if it does, one fault opens many.
            self.pages[index as usize].set_habit(super::page::MAX_HABIT);
            self.looks = (self.looks + LOOKS_PER_FAULT).min(MOST_LOOKS);
        }
        let mut count = 0;
        while count <= wanted {
            let at = if upwards { index.checked_add(count) } else { index.checked_sub(count) };
            let Some(entry) = at.and_then(|at| self.pages.get_mut(at as usize)) else { break };
            if count > 0 && !(entry.state() == State::Resident && entry.has(PROTECTED)) {
                break;
            }
            entry.clear(PROTECTED);
            if !entry.has(DIRTY) {
                entry.set(DIRTY);
                self.clean_resident -= 1;
            }
            count += 1;
        }
        let first = if upwards { index } else { index + 1 - count };
        self.outputs.push_back(Output::Unprotect { extent: Extent::new(PageIndex(u64::from(first)), count) });
    }

    /// How many pages in a row next to `index`, above or below it, are resident and writable.
    fn written_run(&self, index: u32, above: bool) -> u32 {
        let mut count = 0;
        while count < MAX_UNPROTECT_RUN {
            let at = if above { index.checked_add(count + 1) } else { index.checked_sub(count + 1) };
            let Some(entry) = at.and_then(|at| self.pages.get(at as usize)) else { break };
            if entry.state() != State::Resident || entry.has(PROTECTED) {
                break;
            }
            count += 1;
        }
        count
    }

    /// Puts a wanted page into the queue of faults to serve.
    pub(super) fn want(&mut self, index: u32) {
        let entry = &mut self.pages[index as usize];
        if !entry.has(QUEUED) {
            entry.set(QUEUED);
            self.waiting.push_back(index);
        }
    }

    /// Serves waiting faults in order until one has to go on waiting.
    pub(super) fn serve_waiting(&mut self) {
        while let Some(&index) = self.waiting.front() {
            if !self.serve(index, false) {
                self.stats.waits += 1;
                return;
            }
            self.waiting_served(index);
        }
    }

    pub(super) fn waiting_served(&mut self, index: u32) {
        self.waiting.pop_front();
        self.pages[index as usize].clear(QUEUED);
    }

    /// Answers the fault on a page, or starts what will lead to the answer. False when it must wait; with
    /// `force` it never waits, and takes frames beyond the budget.
    pub(super) fn serve(&mut self, index: u32, force: bool) -> bool {
        loop {
            let entry = self.pages[index as usize];
            if !entry.has(WANTED) {
                return true;
            }
            let state = entry.state();
            let (frames, needs_fetch) = match state {
                // The answer comes with `Evicted` or `Fetched`, or went out with `Forget`.
                State::Unmanaged | State::Resident | State::Evicting | State::Fetching => return true,
                State::Fresh | State::Staged | State::Ready => (1, false),
                State::Remote => (2, true),
            };
            if needs_fetch && !self.has_fetch_slot() && !self.drop_idle_fetch(None) {
                return false;
            }
            let keep = (state == State::Ready).then_some(entry.a);
            if !self.ensure_frames(frames, keep) {
                if !force {
                    return false;
                }
                self.stats.forced_pages += frames;
            }
            if self.pages[index as usize].state() != state {
                // Freeing frames moved it on.
                continue;
            }
            match state {
                State::Fresh => self.install_zero(index),
                State::Staged => self.install_staged(index),
                State::Ready => self.install_ready(index),
                _ => self.fetch_demand(index),
            }
            return true;
        }
    }

    fn install_zero(&mut self, index: u32) {
        let first = PageIndex(u64::from(index));
        let count = self.fresh_run(index);
        let extent = Extent::new(first, count);
        for page in extent.pages() {
            let index = index_of(page);
            let entry = &mut self.pages[index as usize];
            entry.clear(WANTED);
            entry.clear(WANTED_WRITE);
            entry.clear(PROTECTED);
            entry.set(DIRTY);
            let to_main = self.belongs_in_main(index, false);
            self.enter_resident(index, Arrival::Zero { to_main });
        }
        self.stats.zero_filled_pages += u64::from(count);
        self.journal.push(Installed { extent, source: Source::Zero });
        self.outputs.push_back(Output::InstallZero { extent });
    }

    /// Will the page be written? Asked when it is installed. A wrong "no" costs a write-protection fault; a
    /// wrong "yes" a write-back, or where the runtime tells of unchanged pages no more than the look at one.
    /// Then each fault pays for as many looks as cost what it did.
    pub(super) fn guess_writable(&mut self, index: u32, wants_write: bool, stream_writes: bool) -> bool {
        let entry = &mut self.pages[index as usize];
        if wants_write {
            entry.set_habit(super::page::MAX_HABIT);
            return true;
        }
        if stream_writes {
            return true;
        }
        let habit = entry.habit();
        entry.set_habit(habit.saturating_sub(1));
        habit > 0 || (self.config.tells_unchanged && self.looks > 0 && !self.pool_full)
    }

    /// Resident pages that were protected may have been written without a fault.
    pub(super) fn unguarded(&mut self, extent: Extent) {
        for page in extent.pages() {
            let Some(entry) = self.pages.get_mut(index_of(page) as usize) else { return };
            if entry.state() == State::Resident && !entry.has(DIRTY) {
                entry.set(DIRTY);
                self.clean_resident -= 1;
            }
            if entry.state() == State::Resident {
                entry.clear(PROTECTED);
            }
        }
    }

    /// The step is over and none of its installs can fail any more.
    pub(super) fn settle_installs(&mut self) {
        for installed in self.journal.drain(..) {
            for page in installed.extent.pages() {
                self.pages[index_of(page) as usize].clear(NEW);
            }
        }
    }

    /// The runtime could not do an install of the step that just ended: the pages return to where they were.
    /// Their bytes are still in the fetch or the batch, or else at the servers, which acknowledged them
    /// before the batch was released.
    pub(super) fn install_failed(&mut self, extent: Extent) {
        for page in extent.pages() {
            let index = index_of(page);
            let Installed { extent: run, source } = self.installed(page);
            self.stats.failed_installs += 1;
            if source == Source::Nothing {
                // It was there before, and may be leaving by now.
                continue;
            }
            assert_eq!(
                self.pages[index as usize].state(),
                State::Resident,
                "{page} failed to install but moved on"
            );
            match source {
                Source::Zero => {
                    self.back_to_fresh(index);
                    continue;
                }
                Source::Nothing | Source::Batch { .. } | Source::Fetch { .. } => {}
            }
            self.leave_resident(index);
            let entry = &mut self.pages[index as usize];
            entry.clear(PROTECTED);
            entry.clear(DIRTY);
            entry.clear(GHOST);
            entry.clear(NEW);
            match source {
                Source::Nothing | Source::Zero => {}
                Source::Batch { slot, offset, was_dirty } => {
                    let offset = offset + u32::try_from(page.0 - run.first.0).expect("inside a run");
                    self.back_to_batch(index, slot, offset, was_dirty);
                }
                Source::Fetch { slot, offset } => {
                    let offset = offset + u32::try_from(page.0 - run.first.0).expect("inside a run");
                    self.back_to_fetch(index, slot, offset);
                }
            }
        }
    }

    fn back_to_batch(&mut self, index: u32, slot: u32, offset: u32, was_dirty: bool) {
        let batch = &self.batches[slot as usize];
        let kept = !matches!(batch.phase, BatchPhase::Free | BatchPhase::Evicting)
            && batch.pages.get(offset as usize) == Some(&index);
        let entry = &mut self.pages[index as usize];
        if kept {
            entry.place(State::Staged, slot, offset);
            entry.put(DIRTY, was_dirty);
            assert!(was_dirty || entry.has(COPY), "page {index} would be lost");
        } else {
            assert!(!was_dirty && entry.has(COPY) && !entry.has(STORING), "page {index} would be lost");
            self.becomes_remote(index, self.evict_clock);
        }
    }

    fn back_to_fetch(&mut self, index: u32, slot: u32, offset: u32) {
        let kept = self.fetch_holds(FetchId(slot), offset, index);
        let entry: &mut Page = &mut self.pages[index as usize];
        assert!(entry.has(COPY), "page {index} would be lost");
        if kept {
            entry.place(State::Ready, slot, offset);
            self.fetches[slot as usize].ready += 1;
            self.fetches[slot as usize].landing += 1;
            self.frames.landing += 1;
        } else {
            self.becomes_remote(index, self.evict_clock);
        }
    }
}
