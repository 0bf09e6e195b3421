//! Which pages come early.
//!
//! Several streams at a time are recognised from the faults on remote pages: upwards, downwards, or by a
//! constant stride. Pages in between that are resident do not break a stream. Once a page is mapped its use
//! is invisible, so of each chunk that is fetched ahead the first page stays unmapped, its bytes at hand: the
//! *marker*.
//!
//! ```text
//!   fault fault fault | chunk 1        | chunk 2                | chunk 3 ...
//!   a     a+1   a+2     ^marker          ^marker: its fault proves chunk 1 used, doubles the window and asks for chunk 3 .. 4
//! ```
//!
//! Two chunks are kept ahead, so a scan does not wait for the network. A marker that no fault reaches, and a
//! page that was fetched ahead and left before its use, shrink the window; after enough of them, longer runs
//! are asked for before anything is fetched ahead. Random faults lead to no prefetch at all. The same growth
//! serves pages that are filled with zeroes for the first time.

use super::Cache;
use super::page::{EARLY, State};
use super::policy::SMALL_SHARE;
use super::under_way::{Fetch, FetchPhase, StreamId};
use rampool_wire::units::{Extent, PageIndex, push_page};

const STREAMS: usize = 32;
/// Faults further apart than this are not steps of one stream.
const NEAR: i64 = 256;
/// Pages in between that are looked at to see whether a step skips only pages which need no fetch.
const LOOK_BETWEEN: i64 = 64;
const FIRST_WINDOW: u32 = 4;
/// Chunks kept ahead of the last marker that was reached.
const CHUNKS_AHEAD: usize = 2;
/// Faults after which a stream that none of them belonged to counts as ended.
const STALE_AFTER: u64 = 128;
/// Pages of one fetch of expected pages: each of them reports progress once.
const EXPECTED_PAGES: u32 = 32;
/// A fetch of expected pages of which none was used while so many others were asked for was useless.
const VAIN_AFTER: u64 = 64;
const MAX_TRUST: u32 = 8;
/// The longest run of Fresh pages that one fault fills.
const MAX_FRESH_RUN: u32 = 512;

#[derive(Clone, Debug, Default)]
struct Stream {
    generation: u32,
    last: i64,
    /// Pages from one step to the next; 0 after a single fault.
    stride: i64,
    /// Equal steps in a row.
    steps: u32,
    trained: bool,
    /// The next page to look at for prefetch.
    frontier: i64,
    window: u32,
    writes: bool,
    /// Some of its steps led over pages that needed no fetch.
    gaps: bool,
    used: u64,
}

impl Stream {
    /// Between the last fault and the frontier, on a step.
    fn is_behind_frontier(&self, page: i64) -> bool {
        let (from, to) =
            ((page - self.last) * self.stride.signum(), (self.frontier - page) * self.stride.signum());
        from > 0 && to > 0 && from % self.stride.abs() == 0
    }

    fn shrink(&mut self) {
        self.window = (self.window / 2).max(FIRST_WINDOW);
    }
}

/// Runs of pages that grow while the next fault stands at one of their ends: a few walks at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct Growths {
    walks: [Walk; 4],
    /// The walk in use.
    turn: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Walk {
    /// The pages before and after the run that was taken last.
    below: Option<u32>,
    above: Option<u32>,
    run: u32,
}

impl Growths {
    /// A fault on `index`: whether it leads upwards, and how many pages may be taken at once.
    pub fn step(&mut self, index: u32, most: u32) -> (bool, u32) {
        let found = self.walks.iter().position(|w| w.below == Some(index) || w.above == Some(index));
        self.turn = found.unwrap_or((self.turn + 1) % self.walks.len());
        let walk = &mut self.walks[self.turn];
        walk.run = if found.is_some() { (2 * walk.run).min(most) } else { 1 };
        (found.is_none() || walk.above == Some(index), walk.run)
    }

    /// `count` pages were taken, from `index` on in the direction of the step.
    pub fn took(&mut self, index: u32, count: u32, upwards: bool) {
        let (first, last) = if upwards { (index, index + (count - 1)) } else { (index - (count - 1), index) };
        let walk = &mut self.walks[self.turn];
        walk.below = first.checked_sub(1);
        walk.above = last.checked_add(1);
    }
}

#[derive(Clone, Debug)]
pub(super) struct Streams {
    table: Vec<Stream>,
    /// How many of them are trained.
    trained: usize,
    /// Fresh pages filled with zeroes.
    fills: Growths,
    /// Staged pages brought back.
    pub second_chances: Growths,
    clock: u64,
    /// How well prefetch did of late: the less, the more equal steps before it starts.
    trust: u32,
}

impl Streams {
    pub fn new() -> Self {
        Self {
            table: vec![Stream::default(); STREAMS],
            trained: 0,
            fills: Growths::default(),
            second_chances: Growths::default(),
            clock: 0,
            trust: MAX_TRUST / 2,
        }
    }

    fn get(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.table.get_mut(id.slot as usize).filter(|s| s.generation == id.generation)
    }

    fn steps_needed(&self, stream: &Stream) -> u32 {
        let steps = match self.trust {
            0 => 6,
            1..=3 => 4,
            _ => 2,
        };
        steps + u32::from(stream.stride.abs() > 1) + 2 * u32::from(stream.gaps)
    }

    /// # Panics
    /// When the count of trained streams is wrong.
    pub fn check(&self) {
        assert_eq!(self.table.iter().filter(|s| s.trained).count(), self.trained, "trained streams");
    }

    fn proved(&mut self) {
        self.trust = (self.trust + 1).min(MAX_TRUST);
    }

    fn failed(&mut self) {
        self.trust = self.trust.saturating_sub(2);
    }
}

impl Cache {
    /// Streams that a fault belonged to lately.
    fn active_streams(&self) -> u64 {
        if self.streams.trained == 0 {
            return 1;
        }
        let now = self.streams.clock;
        self.streams.table.iter().filter(|s| s.trained && s.used + STALE_AFTER >= now).count().max(1) as u64
    }

    /// The largest window: three of them for each active stream fit the small queue, or pages would leave
    /// before their use.
    fn prefetch_window(&self) -> u32 {
        let most =
            u32::try_from(self.frames.budget / (4 * SMALL_SHARE * self.active_streams())).unwrap_or(u32::MAX);
        self.config.max_prefetch_pages.min(most)
    }

    /// Chunks that a stream may have ahead of it, in its share of the fetches.
    fn chunks_ahead(&self) -> usize {
        let share = (self.fetches.len() as u64 - self.demand_slots()) / self.active_streams();
        usize::try_from(share).expect("few fetches").clamp(1, CHUNKS_AHEAD)
    }

    /// Fetches that only faults may use.
    fn demand_slots(&self) -> u64 {
        (self.fetches.len() as u64 / 4).max(1)
    }

    /// A fault on a page that is not resident: the stream it belongs to, if that should now be run.
    pub(super) fn observe(&mut self, index: u32, state: State, write: bool) -> Option<StreamId> {
        let most = self.prefetch_window();
        if most < 2 {
            return None;
        }
        self.streams.clock += 1;
        let page = i64::from(index);
        match state {
            State::Ready | State::Fetching => return self.reached(index, write, most),
            State::Remote => {}
            _ => {
                if self.pages[index as usize].has(EARLY) {
                    self.left_too_early(page);
                }
                return None;
            }
        }
        let slot = self.matching(page)?;
        let needed = self.streams.steps_needed(&self.streams.table[slot]);
        let clock = self.streams.clock;
        let stream = &mut self.streams.table[slot];
        stream.used = clock;
        stream.writes = write;
        stream.last = page;
        if stream.trained {
            if stream.is_behind_frontier(page) {
                // It was fetched ahead, and left before its use.
                stream.shrink();
            }
        } else {
            if stream.steps < needed {
                return None;
            }
            stream.trained = true;
            self.streams.trained += 1;
            stream.window = FIRST_WINDOW.min(most);
        }
        stream.frontier = page + stream.stride;
        Some(StreamId { slot: u32::try_from(slot).expect("few streams"), generation: stream.generation })
    }

    /// A thread came to a page that was fetched ahead.
    fn reached(&mut self, index: u32, write: bool, most: u32) -> Option<StreamId> {
        let fetch = &mut self.fetches[self.pages[index as usize].a as usize];
        let id = fetch.stream?;
        let serial = fetch.serial;
        let was_marker = fetch.marker == Some(index);
        if was_marker && fetch.phase == FetchPhase::InFlight && self.frames.free() > 0 {
            // It will be mapped with the rest, which needs a frame for it.
            fetch.marker = None;
            fetch.landing += 1;
            self.frames.landing += 1;
        }
        let in_order =
            !self.fetches.iter().any(|f| f.stream == Some(id) && f.marker.is_some() && f.serial < serial);
        let clock = self.streams.clock;
        let stream = self.streams.get(id)?;
        stream.used = clock;
        stream.last = i64::from(index);
        stream.writes = write;
        if !in_order {
            // A stream reaches its markers one after the other; other accesses are no stream.
            stream.shrink();
            self.streams.failed();
            return None;
        }
        if was_marker {
            stream.window = (2 * stream.window).min(most);
            self.streams.proved();
            self.stats.markers_reached += 1;
        }
        Some(id)
    }

    /// A page that came early was moved out before its first use: the stream around it looks too far ahead.
    fn left_too_early(&mut self, page: i64) {
        self.stats.left_too_early += 1;
        self.early_page_had_left();
        let around = self.streams.table.iter_mut().find(|s| s.trained && s.is_behind_frontier(page));
        if let Some(stream) = around {
            stream.shrink();
        }
    }

    /// The stream that a fault on the remote `page` continues; it starts one if there is none.
    fn matching(&mut self, page: i64) -> Option<usize> {
        let mut near: Option<(usize, i64)> = None;
        for (slot, stream) in self.streams.table.iter().enumerate() {
            if stream.used == 0 {
                continue;
            }
            let step = page - stream.last;
            if step == 0 {
                return None;
            }
            if stream.trained {
                if stream.is_behind_frontier(page) || self.is_next(stream, page) {
                    return Some(slot);
                }
            } else if step.abs() <= NEAR && near.is_none_or(|(_, s)| step.abs() < s.abs()) {
                near = Some((slot, step));
            }
        }
        let Some((slot, step)) = near else {
            self.start_stream(page);
            return None;
        };
        let over_gap = step.abs() > 1 && self.nothing_remote_between(page - step, page);
        let step = if over_gap { step.signum() } else { step };
        let stream = &mut self.streams.table[slot];
        stream.gaps |= over_gap;
        if step == stream.stride {
            stream.steps += 1;
        } else {
            stream.stride = step;
            stream.steps = 1;
            stream.gaps = over_gap;
        }
        Some(slot)
    }

    /// Is `page` where a trained stream would next have to fetch?
    fn is_next(&self, stream: &Stream, page: i64) -> bool {
        let ahead = (page - stream.frontier) * stream.stride.signum();
        if ahead < 0 || ahead > LOOK_BETWEEN * stream.stride.abs() || ahead % stream.stride.abs() != 0 {
            return false;
        }
        let steps = ahead / stream.stride.abs();
        (0..steps)
            .all(|s| !u32::try_from(stream.frontier + s * stream.stride).is_ok_and(|p| self.is_remote(p)))
    }

    fn nothing_remote_between(&self, from: i64, to: i64) -> bool {
        let (low, high) = (from.min(to) + 1, from.max(to));
        high - low <= LOOK_BETWEEN && (low..high).all(|p| !u32::try_from(p).is_ok_and(|p| self.is_remote(p)))
    }

    /// A first fault somewhere: takes the entry of the stream that was idle longest, those that never came to
    /// anything first.
    fn start_stream(&mut self, page: i64) {
        let only_untrained = self.streams.trained <= STREAMS - STREAMS / 4;
        let mut slot = 0;
        let mut oldest = u64::MAX;
        for (at, stream) in self.streams.table.iter().enumerate() {
            if stream.used < oldest && !(only_untrained && stream.trained) {
                (slot, oldest) = (at, stream.used);
            }
        }
        let old = &self.streams.table[slot];
        let generation = old.generation;
        if old.trained {
            self.streams.trained -= 1;
            self.abandon_stream(StreamId { slot: u32::try_from(slot).expect("few streams"), generation });
        }
        self.streams.table[slot] = Stream {
            generation: generation.wrapping_add(1),
            last: page,
            used: self.streams.clock,
            ..Stream::default()
        };
    }

    /// Drops what a stream fetched ahead and did not use.
    fn abandon_stream(&mut self, id: StreamId) {
        for slot in 0..self.fetches.len() {
            let fetch = &mut self.fetches[slot];
            if fetch.stream == Some(id) {
                if fetch.phase == FetchPhase::Idle {
                    self.abandon_fetch(u32::try_from(slot).expect("few fetches"));
                } else {
                    fetch.stream = None;
                }
            }
        }
    }

    /// A marker was given up before a fault reached it.
    pub(super) fn marker_wasted(&mut self, id: Option<StreamId>) {
        self.stats.wasted_markers += 1;
        self.streams.failed();
        if let Some(stream) = id.and_then(|id| self.streams.get(id)) {
            stream.shrink();
        }
    }

    /// Fetches ahead until enough chunks wait for the stream, as far as there is room.
    pub(super) fn run_stream(&mut self, id: StreamId) {
        let most = self.chunks_ahead();
        for _ in 0..most {
            let ahead = self.fetches.iter().filter(|f| f.stream == Some(id) && f.marker.is_some()).count();
            if ahead >= most || !self.fetch_chunk(id) {
                return;
            }
        }
    }

    fn fetch_chunk(&mut self, id: StreamId) -> bool {
        let Some(stream) = self.streams.get(id) else { return false };
        let Stream { stride, window, writes, mut frontier, .. } = *stream;
        let mut slots = self.spare_fetch_slots();
        if slots == 0 {
            if !self.drop_stale_fetch() {
                return false;
            }
            slots = self.spare_fetch_slots();
        }
        let room = self.room_for_prefetch(2 * u64::from(window)) / 2;
        let window = u64::from(window).min(room).min(u64::from(self.config.fetch_pages) * slots);
        let mut chunk = Vec::new();
        let mut looks = 4 * window + 64;
        while (chunk.len() as u64) < window && looks > 0 {
            looks -= 1;
            let Some(page) = u32::try_from(frontier).ok().and_then(|i| self.pages.get(i as usize).map(|_| i))
            else {
                break;
            };
            match self.pages[page as usize].state() {
                State::Remote => chunk.push(page),
                State::Unmanaged => break,
                _ => {}
            }
            frontier += stride;
        }
        let Some(&marker) = chunk.first() else { return false };
        if let Some(stream) = self.streams.get(id) {
            stream.frontier = frontier;
        }
        for (part, pages) in chunk.chunks_mut(self.config.fetch_pages as usize).enumerate() {
            pages.sort_unstable();
            let mut extents: Vec<Extent> = Vec::new();
            for &mut page in pages {
                push_page(&mut extents, PageIndex(u64::from(page)));
            }
            self.start_fetch(extents, false, (part == 0).then_some(marker), Some(id), writes);
        }
        true
    }

    /// Fetches pages that will be wanted, in any order, the first ones first, as far as there is room.
    pub(super) fn expect(&mut self, pages: &[PageIndex]) {
        if self.config.max_prefetch_pages < 2 {
            return;
        }
        let most = EXPECTED_PAGES.min(self.config.fetch_pages) as usize;
        let mut pages = pages.iter().map(|page| super::index_of(*page));
        loop {
            if self.spare_fetch_slots() == 0 && !self.drop_stale_fetch() {
                return;
            }
            let room = usize::try_from(self.room_for_prefetch(2 * most as u64) / 2).expect("fits");
            let mut chunk = Vec::new();
            while chunk.len() < most.min(room) {
                let Some(index) = pages.next() else { break };
                if self.is_remote(index) && !chunk.contains(&index) {
                    chunk.push(index);
                }
            }
            let Some(&marker) = chunk.first() else { return };
            let mut extents: Vec<Extent> = Vec::new();
            for index in &chunk {
                push_page(&mut extents, PageIndex(u64::from(*index)));
            }
            self.stats.expected_pages += chunk.len() as u64;
            let slot = self.start_fetch(extents, false, Some(marker), None, false);
            self.fetches[slot as usize].expected = true;
        }
    }

    /// Fetch slots that prefetch may use now.
    fn spare_fetch_slots(&self) -> u64 {
        let free = self.fetches.iter().filter(|f| f.phase == FetchPhase::Free).count();
        (free as u64).saturating_sub(self.demand_slots())
    }

    /// Gives up the marker of a stream that has ended, or seems to have.
    fn drop_stale_fetch(&mut self) -> bool {
        let now = self.streams.clock;
        let (table, serial) = (&self.streams.table, self.fetch_serial);
        let is_stale = |fetch: &Fetch| {
            if fetch.expected {
                return fetch.serial + VAIN_AFTER < serial;
            }
            let stream = fetch
                .stream
                .and_then(|id| table.get(id.slot as usize).filter(|s| s.generation == id.generation));
            stream.is_none_or(|s| s.used + STALE_AFTER < now)
        };
        let stale = self.fetches.iter().position(|f| f.phase == FetchPhase::Idle && is_stale(f));
        let Some(slot) = stale else { return false };
        self.abandon_fetch(u32::try_from(slot).expect("few fetches"));
        true
    }

    /// Frames that prefetch may take, up to `wanted`: what is free beyond the reserve, and what lingering
    /// batches give.
    fn room_for_prefetch(&mut self, wanted: u64) -> u64 {
        self.appetite = self.appetite.max(wanted).min(self.frames.budget / 16);
        while self.frames.free() < self.marks.reserve + wanted && self.release_oldest() {}
        self.frames.free().saturating_sub(self.marks.reserve).min(wanted)
    }

    /// How many Fresh pages, from this one, are filled at once: a run that doubles while faults continue it.
    pub(super) fn fresh_run(&mut self, index: u32) -> u32 {
        let most = u32::try_from(self.frames.budget / 64).unwrap_or(u32::MAX).clamp(1, MAX_FRESH_RUN);
        let (upwards, run) = self.streams.fills.step(index, most);
        let room = u32::try_from(self.frames.free().saturating_sub(self.marks.reserve)).unwrap_or(u32::MAX);
        let run = if upwards { run.min(room) } else { 1 };
        let mut count = 1;
        while count < run
            && self.pages.get((index + count) as usize).is_some_and(|p| p.state() == State::Fresh)
        {
            count += 1;
        }
        self.streams.fills.took(index, count, upwards);
        count
    }
}
