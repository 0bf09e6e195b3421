//! Which page leaves.
//!
//! Hits on mapped pages are invisible, so recency is known only for pages that fault. The structure is that
//! of S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson, SOSP '23): new pages pass a *small* queue, a sixteenth of
//! the resident set; the rest is the *main* queue, a clock; and the page array remembers for every page when
//! it left (the ghost history, so it costs no list).
//!
//! ```text
//!   fetched, filled --> small --> batch --(faulted back while staged)--> main <--> clock, heat: passes of the hand it survives
//!                         |         `--> servers --(fetched while its ghost is young: a candidate)--> main or small, see `rival.rs`
//!                         `--(while main has room)--> main
//! ```
//!
//! Prefetched pages pass through small before their first use. Where such pages are wanted soon after they
//! have left, small grows at the expense of main, and shrinks again when that ends (as ARC moves the border
//! between its lists: Megiddo, Modha, FAST '03).
//!
//! Differs from the paper: a reference bit is set by a fault on a staged page, the only hit that can be seen;
//! and a ghost hit alone does not lead to main, because in a cyclic scan every page is a ghost hit and main
//! would be no better than one long queue. Candidates displace main pages only while they are seen to come
//! back more often than pages that leave main. So a cyclic scan over twice the budget finds nearly half of
//! its pages resident.

use super::Cache;
use super::page::{CANDIDATE, DIRTY, EARLY, FROM_MAIN, GHOST, MAX_HEAT, NEW, STORING, State};
use super::queue::Queue;
use super::rival::Class;

pub(super) const SMALL: u32 = 0;
pub(super) const MAIN: u32 = 1;
pub(super) const BUSY: u32 = 2;

/// How a page became Resident.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arrival {
    Zero {
        to_main: bool,
    },
    /// From an eviction batch.
    SecondChance {
        to_main: bool,
    },
    Fetched {
        to_main: bool,
    },
}

/// Pages that refused to leave are tried again after this many faults.
const BUSY_RETRY_FAULTS: u32 = 256;
/// One batch in so many leaves from main although small is large enough, to see whether main pages come back.
const SAMPLE_BATCHES: u32 = 16;
/// The small queue's share of the resident set, as a divisor.
pub(super) const SMALL_SHARE: u64 = 16;
/// Pages by which small grows for one that came early and left too early, and the most that it grows by, as a
/// divisor of the budget.
const EARLY_STEP: u64 = 8;
const EARLY_SHARE: u64 = 4;
/// What small has grown by is forgotten within about so many parts of the budget that leave.
const EARLY_MEMORY: u64 = 2;
/// OS pages of a huge page.
const HUGE_PAGES: u32 = 512;

#[derive(Clone, Debug)]
pub(super) struct Queues {
    pub all: [Queue; 3],
    busy_tried: u32,
    batches_since_sample: u32,
    /// What small may hold beyond its share, because pages that came early left before their use.
    room_for_early: u64,
}

impl Queues {
    pub fn new() -> Self {
        Self {
            all: [Queue::new(SMALL), Queue::new(MAIN), Queue::new(BUSY)],
            busy_tried: 0,
            batches_since_sample: 0,
            room_for_early: 0,
        }
    }

    pub fn len(&self, queue: u32) -> u64 {
        self.all[queue as usize].len()
    }
}

impl Cache {
    pub(super) fn enqueue_adopted(&mut self, index: u32) {
        self.enqueue(index, MAIN);
    }

    pub(super) fn enqueue_busy(&mut self, index: u32) {
        self.enqueue(index, BUSY);
    }

    /// A page that could not leave just now goes back to the queue it came from.
    pub(super) fn enqueue_again(&mut self, index: u32) {
        let from_main = self.pages[index as usize].has(FROM_MAIN);
        self.enqueue(index, if from_main { MAIN } else { SMALL });
    }

    pub(super) fn enter_resident(&mut self, index: u32, arrival: Arrival) {
        let queue = match arrival {
            Arrival::SecondChance { to_main: true }
            | Arrival::Zero { to_main: true }
            | Arrival::Fetched { to_main: true } => MAIN,
            Arrival::SecondChance { to_main: false }
            | Arrival::Zero { to_main: false }
            | Arrival::Fetched { to_main: false } => SMALL,
        };
        self.enqueue(index, queue);
        self.pages[index as usize].set(NEW);
    }

    fn enqueue(&mut self, index: u32, queue: u32) {
        let entry = &mut self.pages[index as usize];
        entry.set_state(State::Resident);
        if !entry.has(DIRTY) {
            self.clean_resident += 1;
        }
        self.frames.resident += 1;
        self.queues.all[queue as usize].push_back(&mut self.pages, index);
    }

    /// Takes a page out of the resident set; the caller sets what it becomes.
    pub(super) fn leave_resident(&mut self, index: u32) {
        let entry = &mut self.pages[index as usize];
        assert_eq!(entry.state(), State::Resident, "page {index} leaves the resident set");
        if !entry.has(DIRTY) {
            self.clean_resident -= 1;
        }
        let queue = entry.queue();
        entry.put(FROM_MAIN, queue != SMALL);
        if queue != SMALL {
            entry.clear(CANDIDATE);
        }
        self.frames.resident -= 1;
        self.queues.all[queue as usize].remove(&mut self.pages, index);
    }

    /// From now on the content of a page that left at `clock` is at the servers only.
    pub(super) fn becomes_remote(&mut self, index: u32, clock: u32) {
        let entry = &mut self.pages[index as usize];
        entry.set_state(State::Remote);
        entry.a = clock;
        self.curve.left(clock);
    }

    /// More pages with which a page that left at `clock` would be mapped still. Of those that are on their way
    /// out there would be as many.
    pub(super) fn to_keep(&self, clock: u32) -> u64 {
        self.curve.newer(clock) + self.frames.evicting + self.frames.staged
    }

    /// The history of a page that has just left.
    pub(super) fn remember(&mut self, index: u32, clock: u32) {
        let entry = &mut self.pages[index as usize];
        entry.set(GHOST);
        entry.a = clock;
    }

    /// Decides for a page that returns, Remote or Fresh, whether it goes to main, and forgets its ghost.
    /// Pages of a stream go through small.
    pub(super) fn belongs_in_main(&mut self, index: u32, in_stream: bool) -> bool {
        let clock = self.evict_clock;
        let window = self.rivals.window();
        let entry = &mut self.pages[index as usize];
        let young = entry.has(GHOST) && clock.wrapping_sub(entry.a) < window;
        entry.clear(GHOST);
        entry.put(CANDIDATE, young);
        if !young {
            entry.set_heat(0);
            return false;
        }
        // A main page takes its place back while it is free, but it evicts no other page for it: in a scan,
        // that would turn main over.
        let has_place = entry.has(FROM_MAIN) && self.queues.len(MAIN) < self.main_share();
        has_place || (!in_stream && self.rivals.admits())
    }

    /// Chooses up to `limit` pages to leave.
    pub(super) fn pick_victims(&mut self, limit: u64, desperate: bool, victims: &mut Vec<u32>) {
        if self.pool_full && self.clean_resident == 0 {
            return;
        }
        if desperate {
            for queue in [SMALL, MAIN] {
                self.pick_from(queue, limit, true, victims);
            }
            return;
        }
        self.refill_main();
        // Between the two there is room for a batch, so that main does not turn over for want of a page or
        // two in small.
        let small = self.queues.len(MAIN) <= self.main_share() + self.marks.batch;
        self.queues.batches_since_sample += 1;
        let sample = self.queues.batches_since_sample >= SAMPLE_BATCHES;
        if !small || sample {
            self.queues.batches_since_sample = 0;
        }
        let order = if small && !sample { [SMALL, MAIN] } else { [MAIN, SMALL] };
        for queue in order {
            // Where everything is warm, the hand goes round until something has cooled down.
            for _ in 0..=MAX_HEAT {
                let cooled = self.pick_from(queue, limit, false, victims);
                if !victims.is_empty() {
                    return;
                }
                if !cooled {
                    break;
                }
            }
        }
    }

    /// While main is short of its share, the oldest pages of small move up without leaving.
    fn refill_main(&mut self) {
        let enough = self.main_share().saturating_sub(self.marks.batch);
        while self.queues.len(MAIN) < enough {
            let Some(index) = self.queues.all[SMALL as usize].head() else { break };
            self.queues.all[SMALL as usize].remove(&mut self.pages, index);
            self.queues.all[MAIN as usize].push_back(&mut self.pages, index);
            self.pages[index as usize].clear(CANDIDATE);
        }
    }

    fn main_share(&self) -> u64 {
        let resident = self.queues.len(SMALL) + self.queues.len(MAIN);
        resident - resident / SMALL_SHARE - self.queues.room_for_early.min(resident / EARLY_SHARE)
    }

    /// A page that came early was wanted when it had just left.
    pub(super) fn early_page_had_left(&mut self) {
        self.queues.room_for_early =
            (self.queues.room_for_early + EARLY_STEP).min(self.frames.budget / EARLY_SHARE);
    }

    /// So many pages leave.
    pub(super) fn forget_early_pages(&mut self, leaving: u64) {
        let room = self.queues.room_for_early;
        self.queues.room_for_early = room
            - (room * leaving * EARLY_MEMORY / self.frames.budget.max(1)).clamp(u64::from(room > 0), room);
    }

    /// One stretch of the hand over a queue; whether a warm page cooled down a little.
    fn pick_from(&mut self, id: u32, limit: u64, desperate: bool, victims: &mut Vec<u32>) -> bool {
        let mut cooled = false;
        let len = self.queues.len(id);
        let mut steps = if desperate { len } else { len.min(4 * limit + 64) };
        while steps > 0 && (victims.len() as u64) < limit {
            steps -= 1;
            let queue = &mut self.queues.all[id as usize];
            let Some(index) = queue.head() else { break };
            queue.remove(&mut self.pages, index);
            queue.push_back(&mut self.pages, index);
            let entry = &mut self.pages[index as usize];
            let tied = entry.has(NEW) || entry.has(STORING) || (self.pool_full && entry.has(DIRTY));
            if tied {
                continue;
            }
            if entry.heat() == 0 || desperate {
                if !desperate && self.should_end_before(index, limit, victims) {
                    let queue = &mut self.queues.all[id as usize];
                    queue.remove(&mut self.pages, index);
                    queue.push_front(&mut self.pages, index);
                    return cooled;
                }
                victims.push(index);
            } else {
                entry.set_heat(entry.heat() - 1);
                cooled = true;
            }
        }
        cooled
    }

    /// A batch ends where a whole huge page follows that would not fit any more: moved as one it costs a
    /// hundredth of what it costs in parts, and it does not have to be split. (Takes the index space to be
    /// aligned like the addresses.)
    fn should_end_before(&self, index: u32, limit: u64, victims: &[u32]) -> bool {
        let left = limit - victims.len() as u64;
        if !index.is_multiple_of(HUGE_PAGES)
            || victims.is_empty()
            || left >= u64::from(HUGE_PAGES)
            || limit < u64::from(HUGE_PAGES)
        {
            return false;
        }
        // `index` itself went to the tail of the queue just now; its neighbours follow at the head.
        let head = self.queues.all[self.pages[index as usize].queue() as usize].head();
        head == Some(index + 1)
            && (index + 1..index + HUGE_PAGES - 1).all(|i| {
                let entry = &self.pages[i as usize];
                entry.state() == State::Resident && entry.b == i + 1 && entry.heat() == 0
            })
    }

    /// Notes which pages left, to see which kind returns.
    pub(super) fn sample_victims(&mut self, victims: &[u32], clock: u32) {
        for &index in victims {
            let entry = &self.pages[index as usize];
            if entry.has(FROM_MAIN) {
                self.rivals.left(Class::Main, index, clock);
            } else if entry.has(CANDIDATE) && !entry.has(EARLY) {
                self.rivals.left(Class::Candidate, index, clock);
            }
        }
        let (pages, batches) = (&self.pages, &self.batches);
        self.rivals.judge(clock, |index, clock| {
            let entry = &pages[index as usize];
            match entry.state() {
                State::Remote => Some(!(entry.has(GHOST) && entry.a == clock)),
                State::Staged | State::Evicting => Some(batches[entry.a as usize].clock != clock),
                State::Resident | State::Fetching | State::Ready => Some(true),
                State::Fresh | State::Unmanaged => None,
            }
        });
    }

    /// Pages that refused get another chance to leave, now and then.
    pub(super) fn retry_busy(&mut self) {
        let waited = self.faults_seen.wrapping_sub(self.queues.busy_tried);
        if self.queues.len(BUSY) == 0 || waited < BUSY_RETRY_FAULTS {
            return;
        }
        self.queues.busy_tried = self.faults_seen;
        for _ in 0..self.marks.batch {
            let Some(index) = self.queues.all[BUSY as usize].head() else { break };
            self.queues.all[BUSY as usize].remove(&mut self.pages, index);
            self.queues.all[MAIN as usize].push_front(&mut self.pages, index);
        }
    }
}
