//! Which pages come early when a program walks along an array of pointers.
//!
//! A sort of text lines, a list of Python objects, a vector of boxed values: what is touched lies in no order
//! that a stream of page numbers could show, and still the order is written down, in an array that is read
//! from one end to the other. [`Pointers`] finds such arrays by their content (content-directed prefetching:
//! Cooksey, Jourdan, Grunwald, ASPLOS '02) and runs ahead of the program along them (as jump-pointer
//! prefetching does: Roth, Sohi, ISCA '99).
//!
//! ```text
//!   random faults A B C   one search over resident memory: A, B and C stand at S, S - 32, S - 64      a trial begins behind S - 64
//!   fault at D        D is the first page on the trial's way that is absent; so is the next one    a walk, stride -32
//!   fault at E        E stands in the walk's ring: what is before it has been passed; more entries ahead of it are read
//! ```
//!
//! A *random fault* is one that nothing predicted. The latest ones are searched for together, piece
//! by piece in idle time, so that no thread waits for a search. Where they are found in a row, or where the
//! array is known, a *trial* begins: it reads the entries that follow and asks for nothing before faults
//! reached them in their order. (A merge also writes the pointers in that order, but what follows there is
//! old.) A search costs time in proportion to what is resident, so it is paid for by random faults, and after
//! each failure the next one must be paid for twice as dearly. Memory of earlier walks is searched first,
//! which is cheap: a sort that merges goes through the same array again and again, piece by piece.
//!
//! A walk keeps a *window* of pages asked for, which doubles with each proof that the program comes to them;
//! nothing more is asked for without one, so a wrong guess costs a few pages. Objects that reach into the
//! page after the one pointed at are known by the faults there.
//!
//! It never reads memory itself: [`Memory`] does, and may refuse. What it reads may be written meanwhile and
//! is never more than a hint.

use std::collections::VecDeque;

use rampool_wire::units::PageIndex;

/// Pages that a walk keeps asked for and not yet reached, at most and at first.
pub const AHEAD: usize = 96;
const FIRST_WINDOW: usize = 16;
/// Entries kept of a walk, those included whose pages are resident.
const RING: usize = 2048;
/// Entries of a trial.
const TRIAL_RING: usize = 512;
/// Walks at a time: each thread of a merge has two.
const WALKS: usize = 8;
const TRIALS: usize = 16;
/// A walk that no fault belonged to for so many faults has ended.
const STALE_AFTER: u64 = 4096;
/// Faults that trials have to prove themselves, and how many have to be theirs.
const TRIAL_FAULTS: u64 = 96;
const PROOFS: u32 = 2;
/// Absent pages that a proof may pass over: another thread may be there just now.
const PASSED_OVER: usize = 1;
/// Random faults that are looked for together.
const RANDOM_FAULTS: usize = 16;
/// Places that a search notes.
const PLACES: usize = 256;
/// Words looked at to either side of a place, and the furthest that two of a row stand apart.
const AROUND: usize = 64;
/// The first touch of an object may be this far behind where the pointer points.
const OBJECT_HEAD_BYTES: u64 = 64;
/// Entries that must look like pointers before a stride is believed.
const SAMPLE: usize = 8;
/// Entries in a row that are no pointers end a walk.
const MOST_NON_POINTERS: u32 = 4;
/// Strides tried, in words.
const STRIDES: [i64; 9] = [1, 2, 3, 4, 5, 6, 8, 12, 16];
/// Random faults that pay for the search of so many resident pages.
const PAGES_PER_FAULT: u64 = 1;
const LEAST_RANDOM_FAULTS: u64 = 256;
const MOST_DOUBLINGS: u32 = 12;
/// The same for the pages where walks have been, and near them.
const NEAR_PAGES_PER_FAULT: u64 = 64;
const LEAST_NEAR_FAULTS: u64 = 32;
/// Places where walks have been that are remembered.
const GROUNDS: usize = 4;
/// A walk no further than this from such a place belongs to it.
const GROUND_REACH: u64 = 1 << 20;
/// Words that a search reads at a time, and pieces of one step.
const PIECE_WORDS: usize = 2048;
const PIECES_A_STEP: usize = 8;
/// One in so many pages that objects reach into is not asked for, to see whether the program still comes
/// there.
const PROBE: u32 = 8;
/// Objects that reached into the next page or did not, of which is remembered how many did.
const REACHES: u32 = 64;
const PAGE_BYTES: u64 = rampool_wire::units::OS_PAGE_BYTES as u64;
const PAGE_WORDS: usize = rampool_wire::units::OS_PAGE_BYTES / 8;
const WORD: u64 = 8;

/// The memory that faults come from.
pub trait Memory {
    /// Copies words from `address` on, as far as they are resident, and returns how many. Never waits for a
    /// page.
    fn read(&mut self, address: u64, words: &mut [u64]) -> usize;

    /// The managed page that `address` is in, and whether it would have to be fetched.
    fn look(&self, address: u64) -> Option<(PageIndex, bool)>;

    /// Copies the first words that are resident in `[from, until)`, after looking at a bounded number of
    /// pages. Returns where they stand and how many they are; with none, how far it has looked.
    fn next_piece(&mut self, from: u64, until: u64, words: &mut [u64]) -> (u64, usize);

    /// Pages that [`Memory::next_piece`] would show, all in all.
    fn resident_pages(&self) -> u64;
}

/// The walks that are under way. See the module.
#[derive(Debug, Default)]
pub struct Pointers {
    walks: Vec<Walk>,
    trials: Vec<Walk>,
    tried_since: u64,
    /// Whether one of them became a walk.
    tried_well: bool,
    /// Whether the latest search was one of the grounds.
    found_near: bool,
    search: Option<Search>,
    /// Where threads waited for what nothing foresaw, the latest last.
    random_faults: VecDeque<u64>,
    /// Faults so far.
    clock: u64,
    /// Of everything resident.
    wide: Account,
    /// Of the grounds.
    near: Account,
    /// The latest last.
    grounds: Vec<Ground>,
    used_pages: u64,
}

/// What pays for searches of one kind.
#[derive(Debug, Default)]
struct Account {
    /// Random faults since the last search.
    random_faults: u64,
    /// How often the price of a search was doubled.
    doublings: u32,
}

impl Account {
    /// Whether a search of so many pages is paid for; then it is taken as begun.
    fn affords(&mut self, pages: u64, pages_per_fault: u64, least: u64) -> bool {
        let paid = self.random_faults >= (pages / pages_per_fault).max(least) << self.doublings;
        if paid {
            self.random_faults = 0;
        }
        paid
    }

    fn failed(&mut self) {
        self.doublings = (self.doublings + 1).min(MOST_DOUBLINGS);
    }
}

/// A search under way.
#[derive(Debug)]
struct Search {
    /// What pointers to are looked for, the latest last.
    targets: Vec<u64>,
    /// A bit for each line of a target and the one before it, by the lowest bits of its number: what a
    /// pointer must hit.
    lines: [u64; 16],
    /// `(address, target)` of what was found.
    places: Vec<(u64, usize)>,
    /// What is searched, the next stretch last, and how far.
    stretches: Vec<(u64, u64)>,
}

impl Search {
    fn new(targets: Vec<u64>, stretches: Vec<(u64, u64)>) -> Self {
        let mut lines = [0; 16];
        for target in &targets {
            for line in [target / OBJECT_HEAD_BYTES, (target / OBJECT_HEAD_BYTES).wrapping_sub(1)] {
                lines[(line / 64 % 16) as usize] |= 1 << (line % 64);
            }
        }
        Self { targets, lines, places: Vec::new(), stretches }
    }

    fn visit(&mut self, start: u64, words: &[u64]) {
        for (at, word) in (0u64..).zip(words) {
            let line = word / OBJECT_HEAD_BYTES;
            let row = self.lines[(line / 64 % 16) as usize];
            if row >> (line % 64) & 1 == 1
                && let Some(target) = self.targets.iter().position(|target| points_at(*word, *target))
                && self.places.len() < PLACES
            {
                self.places.push((start + at * WORD, target));
            }
        }
    }
}

/// A stretch of memory where walks have been.
#[derive(Clone, Copy, Debug)]
struct Ground {
    low: u64,
    high: u64,
    /// Bytes from one entry to the next, signed.
    stride: i64,
}

impl Ground {
    /// The stretch with as much again around it, in whole pages: where the next walk may be.
    fn around(&self) -> (u64, u64) {
        let margin = (self.high - self.low).max(GROUND_REACH / 4);
        (self.low.saturating_sub(margin) & !(PAGE_BYTES - 1), self.high.saturating_add(margin))
    }
}

/// A walk is, or was, at `at`.
fn note_ground(grounds: &mut Vec<Ground>, at: u64, stride: i64) {
    let near =
        |g: &Ground| g.low.saturating_sub(GROUND_REACH) <= at && at <= g.high.saturating_add(GROUND_REACH);
    let known = grounds.iter().position(|g| g.stride == stride && near(g));
    let mut ground = match known {
        Some(index) => grounds.remove(index),
        None => Ground { low: at, high: at, stride },
    };
    ground.low = ground.low.min(at);
    ground.high = ground.high.max(at);
    if grounds.len() == GROUNDS {
        grounds.remove(0);
    }
    grounds.push(ground);
}

#[derive(Debug)]
struct Walk {
    /// Bytes from one entry to the next.
    stride: i64,
    /// The next entry to read.
    next: u64,
    /// What was read there and not looked at yet.
    values: VecDeque<u64>,
    ring: VecDeque<Entry>,
    /// The entry that was passed last.
    last: Option<Entry>,
    /// Entries of the ring that were looked at to ask for their pages.
    considered: usize,
    /// Pages of the ring that were asked for.
    asked: usize,
    window: usize,
    non_pointers: u32,
    used: u64,
    proofs: u32,
    reach: Reach,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    value: u64,
    page: PageIndex,
    asked: bool,
    /// The page after it, where the object may reach into it, and whether that was asked for.
    tail: Option<(PageIndex, bool)>,
}

/// How far the objects of a walk reach beyond where their pointers point.
#[derive(Clone, Copy, Debug, Default)]
struct Reach {
    /// Bytes: about as far as any.
    bytes: u64,
    /// Of the last objects that this would lead into the next page, so many did go there and so many did not.
    did: u32,
    did_not: u32,
    turn: u32,
}

impl Reach {
    fn saw(&mut self, bytes: u64, did: bool) {
        if did {
            self.bytes += bytes.saturating_sub(self.bytes).div_ceil(4);
            self.did += 1;
        } else if bytes <= self.bytes {
            self.did_not += 1;
        }
        if self.did + self.did_not >= REACHES {
            (self.did, self.did_not) = (self.did / 2, self.did_not / 2);
        }
    }

    /// Whether to ask for the next page, so many bytes behind where an object begins.
    fn leads(&mut self, bytes: u64) -> bool {
        if bytes > self.bytes || self.did < self.did_not.max(2) {
            return false;
        }
        self.turn += 1;
        !self.turn.is_multiple_of(PROBE)
    }
}

impl Pointers {
    /// Walks under way.
    #[must_use]
    pub fn walks(&self) -> usize {
        self.walks.len()
    }

    /// Pages asked for that the program came to, or past: seen by the faults behind them, so a walk's last
    /// ones are not among them.
    #[must_use]
    pub fn used_pages(&self) -> u64 {
        self.used_pages
    }

    /// A thread waits for a page that is not resident, at `address`. `random`: nothing else explains the
    /// fault. Appends to `ahead` the pages that will be wanted next, the soonest first.
    pub fn fault(
        &mut self,
        address: u64,
        random: bool,
        memory: &mut impl Memory,
        ahead: &mut Vec<PageIndex>,
    ) {
        self.clock += 1;
        let clock = self.clock;
        if self.walks.is_empty() && !random {
            return;
        }
        let Some((page, _)) = memory.look(address) else { return };
        self.walks.retain(|walk| walk.used + STALE_AFTER >= clock);
        let mut foreseen = false;
        for walk in &mut self.walks {
            if let Some(place) = walk.comes_to(address, page) {
                self.used_pages += walk.pass(place, memory);
                walk.used = clock;
                walk.window = (2 * walk.window).min(AHEAD);
                foreseen = true;
                note_ground(&mut self.grounds, walk.next, walk.stride);
            }
            if walk.asked <= walk.window / 2 {
                walk.ask(memory, ahead);
            }
        }
        if foreseen || !random {
            return;
        }
        if self.random_faults.len() == RANDOM_FAULTS {
            self.random_faults.pop_front();
        }
        self.random_faults.push_back(address);
        self.wide.random_faults += 1;
        self.near.random_faults += 1;
        if self.trials.is_empty() {
            self.begin_search(memory);
        } else {
            self.try_out(address, page, memory, ahead);
        }
    }

    /// Whether [`search`](Self::search) has something to do.
    #[must_use]
    pub fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// A step of the search that is under way: a bounded number of pages is read.
    pub fn search(&mut self, memory: &mut impl Memory) {
        let Some(search) = &mut self.search else { return };
        let mut words = [0; PIECE_WORDS];
        for _ in 0..PIECES_A_STEP {
            let Some((from, until)) = search.stretches.last_mut() else {
                self.end_search(memory);
                return;
            };
            let (at, have) = memory.next_piece(*from, *until, &mut words);
            // A word that a page border cuts off is passed over.
            *from = (at + have as u64 * WORD).max(*from + WORD);
            if *from >= *until {
                search.stretches.pop();
            }
            search.visit(at, &words[..have]);
        }
    }

    /// Begins to look for pointers to the latest random faults, if enough of them have paid for it.
    fn begin_search(&mut self, memory: &impl Memory) {
        if self.search.is_some() || self.random_faults.len() < RANDOM_FAULTS {
            return;
        }
        let mut stretches: Vec<(u64, u64)> = Vec::new();
        let mut around: Vec<(u64, u64)> = self.grounds.iter().map(Ground::around).collect();
        around.sort_unstable();
        for (low, high) in around {
            match stretches.last_mut() {
                Some((_, end)) if *end >= low => *end = high.max(*end),
                _ => stretches.push((low, high)),
            }
        }
        let near_pages = stretches.iter().map(|(low, high)| (high - low) / PAGE_BYTES).sum();
        self.found_near =
            !stretches.is_empty() && self.near.affords(near_pages, NEAR_PAGES_PER_FAULT, LEAST_NEAR_FAULTS);
        if !self.found_near {
            if !self.wide.affords(memory.resident_pages(), PAGES_PER_FAULT, LEAST_RANDOM_FAULTS) {
                return;
            }
            stretches = vec![(0, u64::MAX)];
        }
        self.search = Some(Search::new(self.random_faults.iter().copied().collect(), stretches));
    }

    /// All has been looked at: trials begin behind what was found.
    fn end_search(&mut self, memory: &mut impl Memory) {
        let Some(Search { mut places, .. }) = self.search.take() else { return };
        places.sort_unstable();
        // The end of each row of places in the order of the faults, with its direction; the latest fault
        // first.
        let mut ends: Vec<(usize, u64, Option<u64>)> = Vec::new();
        for (n, &(at, target)) in places.iter().enumerate() {
            let neighbours =
                [n.checked_sub(1), Some(n + 1)].into_iter().flatten().filter_map(|n| places.get(n));
            let before = neighbours
                .filter(|(other, t)| at.abs_diff(*other) <= AROUND as u64 * WORD && *t < target)
                .max_by_key(|(_, t)| *t);
            ends.push((target, at, before.map(|(other, _)| *other)));
        }
        ends.sort_unstable_by(|a, b| b.cmp(a));
        for (_, at, before) in ends {
            if self.trials.len() >= TRIALS {
                break;
            }
            match before {
                Some(before) => {
                    if let Some(stride) = stride_between(before, at, memory) {
                        self.begin_trial(at, stride, memory);
                        // Faults may come faster than a search goes: the program may be out of the trial's
                        // sight. The next search begins here, and is short.
                        note_ground(&mut self.grounds, at, stride);
                    }
                }
                None if self.found_near => {
                    let mut strides: Vec<i64> = self.grounds.iter().map(|g| g.stride).collect();
                    strides.sort_unstable();
                    strides.dedup();
                    for stride in strides {
                        self.begin_trial(at, stride, memory);
                    }
                }
                None => {}
            }
        }
        (self.tried_since, self.tried_well) = (self.clock, false);
        if self.trials.is_empty() {
            self.searched().failed();
        }
    }

    /// The account of the latest search.
    fn searched(&mut self) -> &mut Account {
        if self.found_near { &mut self.near } else { &mut self.wide }
    }

    fn begin_trial(&mut self, at: u64, stride: i64, memory: &mut impl Memory) {
        // Where an array is known, what looks like a walk at another stride is chance.
        let known = !self.found_near || self.grounds.iter().any(|g| g.stride.abs() == stride.abs());
        let next = at.wrapping_add_signed(stride);
        if known && !self.trials.iter().any(|t| t.stride == stride && t.begins_near(next)) {
            let mut trial = Walk::new(stride, next, self.clock);
            trial.fill(TRIAL_RING, memory);
            self.trials.push(trial);
        }
    }

    /// A random fault may prove a trial, or end them all.
    fn try_out(
        &mut self,
        address: u64,
        page: PageIndex,
        memory: &mut impl Memory,
        ahead: &mut Vec<PageIndex>,
    ) {
        let mut proved = None;
        for (n, trial) in self.trials.iter_mut().enumerate() {
            let Some(at) = trial.ring.iter().position(|e| e.page == page && points_at(e.value, address))
            else {
                continue;
            };
            let absent =
                |e: &&Entry| e.page != page && memory.look(e.value).is_some_and(|(_, absent)| absent);
            if trial.ring.iter().take(at).filter(absent).count() > PASSED_OVER {
                continue;
            }
            trial.ring.drain(..=at);
            trial.proofs += 1;
            if trial.proofs == PROOFS {
                proved = Some(n);
            }
        }
        if let Some(n) = proved {
            let mut walk = self.trials.remove(n);
            walk.used = self.clock;
            walk.ask(memory, ahead);
            if self.walks.len() == WALKS {
                let oldest = (0..WALKS).min_by_key(|at| self.walks[*at].used).expect("there are some");
                self.walks.swap_remove(oldest);
            }
            note_ground(&mut self.grounds, walk.next, walk.stride);
            self.walks.push(walk);
            self.tried_well = true;
            self.wide.doublings = 0;
            self.near.doublings = 0;
        }
        if self.tried_since + TRIAL_FAULTS < self.clock {
            if !self.tried_well {
                self.searched().failed();
            }
            self.trials.clear();
        }
    }
}

impl Walk {
    fn new(stride: i64, next: u64, clock: u64) -> Self {
        Self {
            stride,
            next,
            values: VecDeque::new(),
            ring: VecDeque::new(),
            last: None,
            considered: 0,
            asked: 0,
            window: FIRST_WINDOW,
            non_pointers: 0,
            used: clock,
            proofs: 0,
            reach: Reach::default(),
        }
    }

    /// Notes the place.
    /// Whether a trial that begins at `next` would be this one, or would begin just behind it.
    fn begins_near(&self, next: u64) -> bool {
        let read = (self.ring.len() + self.values.len()) as u64 * self.stride.unsigned_abs();
        let (low, high) = if self.stride > 0 {
            (self.next.saturating_sub(read), self.next)
        } else {
            (self.next, self.next.saturating_add(read))
        };
        let around = AROUND as u64 * WORD;
        low.saturating_sub(around) <= next && next <= high.saturating_add(around)
    }

    /// Whether the fault belongs to an entry that lies ahead, or to the object of the one that was passed
    /// last.
    fn comes_to(&self, address: u64, page: PageIndex) -> Option<Place> {
        let (mut tail, mut in_page) = (None, None);
        for (at, entry) in self.ring.iter().take(self.considered).enumerate() {
            if points_at(entry.value, address) {
                return Some(Place::Head(at));
            }
            if tail.is_none() && reaches_to(entry.value, address) {
                tail = Some(Place::Tail(at));
            }
            if in_page.is_none() && entry.page == page {
                in_page = Some(Place::Head(at));
            }
        }
        if self.last.is_some_and(|e| reaches_to(e.value, address)) {
            return Some(Place::LastTail);
        }
        tail.or(in_page)
    }

    /// The program stands there; returns how many pages that were asked for it has used.
    fn pass(&mut self, place: Place, memory: &impl Memory) -> u64 {
        let mut used = 0;
        let (Place::Head(at) | Place::Tail(at)) = place else {
            self.touched_tail();
            return 0;
        };
        for entry in self.ring.drain(..=at) {
            let asked = usize::from(entry.asked) + usize::from(matches!(entry.tail, Some((_, true))));
            used += asked as u64;
            self.asked -= asked;
            self.considered = self.considered.saturating_sub(1);
            if let Some(before) = self.last.replace(entry)
                && let Some((_, false)) = before.tail
                && memory.look(next_page(before.value)).is_some_and(|(_, absent)| absent)
            {
                self.reach.saw(next_page(before.value) - before.value, false);
            }
        }
        if let Place::Tail(_) = place {
            self.touched_tail();
        }
        used
    }

    /// The object of the last entry reaches into the next page.
    fn touched_tail(&mut self) {
        if let Some(last) = &mut self.last {
            last.tail = None;
            self.reach.saw(next_page(last.value) - last.value, true);
        }
    }

    /// Asks for the pages of entries until the window is full.
    fn ask(&mut self, memory: &mut impl Memory, ahead: &mut Vec<PageIndex>) {
        while self.asked < self.window {
            if self.considered == self.ring.len() {
                if self.ring.len() >= RING {
                    return;
                }
                self.fill(self.ring.len() + 1, memory);
                if self.considered == self.ring.len() {
                    // The array itself may have left: its next page is wanted as well.
                    if self.non_pointers < MOST_NON_POINTERS
                        && let Some((page, true)) = memory.look(self.next)
                    {
                        add(page, ahead);
                    }
                    return;
                }
            }
            let entry = &mut self.ring[self.considered];
            self.considered += 1;
            if memory.look(entry.value).is_some_and(|(_, absent)| absent) {
                entry.asked = add(entry.page, ahead);
                self.asked += usize::from(entry.asked);
            }
            let next = next_page(entry.value);
            if let Some((page, true)) = memory.look(next) {
                let leads = self.reach.leads(next - entry.value) && add(page, ahead);
                entry.tail = Some((page, leads));
                self.asked += usize::from(leads);
            }
        }
    }

    /// Reads entries until the ring has so many, as far as the array is resident.
    fn fill(&mut self, entries: usize, memory: &mut impl Memory) {
        while self.ring.len() < entries && self.non_pointers < MOST_NON_POINTERS {
            let Some(value) = self.values.pop_front() else {
                self.read_on(memory);
                if self.values.is_empty() {
                    return;
                }
                continue;
            };
            match memory.look(value) {
                Some((page, _)) => {
                    self.non_pointers = 0;
                    self.ring.push_back(Entry { value, page, asked: false, tail: None });
                }
                None => self.non_pointers += 1,
            }
        }
    }

    /// Reads the entries from the next one to the border of its page.
    fn read_on(&mut self, memory: &mut impl Memory) {
        let step = usize::try_from(self.stride.unsigned_abs() / WORD).expect("a stride is short");
        let in_page = usize::try_from(self.next % PAGE_BYTES / WORD).expect("inside a page");
        let mut words = [0; PAGE_WORDS];
        let entries = if self.stride > 0 {
            let have = memory.read(self.next, &mut words[..PAGE_WORDS - in_page]);
            self.values.extend(words[..have].iter().step_by(step));
            have.div_ceil(step)
        } else {
            let span = in_page / step * step + 1;
            let have = memory.read(self.next.wrapping_sub((span as u64 - 1) * WORD), &mut words[..span]);
            if have < span {
                return;
            }
            self.values.extend(words[..span].iter().rev().step_by(step));
            span.div_ceil(step)
        };
        let bytes = self.stride.saturating_mul(i64::try_from(entries).expect("a page has few"));
        self.next = self.next.wrapping_add_signed(bytes);
    }
}

/// Where in a walk a thread stands: at the beginning of the object of an entry, or in the page after it.
#[derive(Clone, Copy)]
enum Place {
    Head(usize),
    Tail(usize),
    LastTail,
}

fn add(page: PageIndex, ahead: &mut Vec<PageIndex>) -> bool {
    let new = !ahead.contains(&page);
    if new {
        ahead.push(page);
    }
    new
}

#[inline]
fn points_at(word: u64, address: u64) -> bool {
    address.wrapping_sub(word) < OBJECT_HEAD_BYTES
}

/// Where the page after the one of `value` begins.
fn next_page(value: u64) -> u64 {
    (value | (PAGE_BYTES - 1)).wrapping_add(1)
}

/// Whether `address` is in the page after the one that `value` points into.
fn reaches_to(value: u64, address: u64) -> bool {
    address & !(PAGE_BYTES - 1) == next_page(value)
}

/// The stride in bytes, signed, at which the entry at `to` follows the one at `from`: what goes on from there
/// are pointers for a while.
fn stride_between(from: u64, to: u64, memory: &mut impl Memory) -> Option<i64> {
    let distance = to.abs_diff(from) / WORD;
    let upwards = to > from;
    let mut words = vec![0; SAMPLE * 16 + 1];
    if upwards {
        let have = memory.read(to, &mut words);
        words.truncate(have);
    } else {
        let mut low = to.saturating_sub((words.len() as u64 - 1) * WORD);
        let mut have = memory.read(low, &mut words);
        if have < words.len() {
            // A page border is in the way.
            low = to & !(PAGE_BYTES - 1);
            let span = usize::try_from((to - low) / WORD + 1).expect("a page");
            words.truncate(span);
            have = memory.read(low, &mut words);
        }
        words.truncate(have);
        words.reverse();
    }
    STRIDES.into_iter().find_map(|stride| {
        let step = usize::try_from(stride).expect("a short one");
        if !distance.is_multiple_of(step as u64) {
            return None;
        }
        let mut distinct: Vec<u64> = Vec::new();
        for value in words.iter().step_by(step).take(SAMPLE + 1) {
            memory.look(*value)?;
            if !distinct.contains(value) {
                distinct.push(*value);
            }
        }
        let bytes = stride * 8;
        (distinct.len() > 2).then_some(if upwards { bytes } else { -bytes })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const PAGE: u64 = 4096;
    const BASE: u64 = 0x7f00_0000_0000;

    /// Words by address, of which some pages are absent. Page numbers are those of the addresses from `BASE`
    /// on.
    struct World {
        words: Vec<u64>,
        absent: BTreeSet<u64>,
        shown: u64,
    }

    impl World {
        fn new(pages: u64) -> Self {
            Self {
                words: vec![0; usize::try_from(pages * PAGE / WORD).unwrap()],
                absent: BTreeSet::new(),
                shown: 0,
            }
        }

        fn index(address: u64) -> Option<usize> {
            address.checked_sub(BASE).map(|bytes| usize::try_from(bytes / WORD).unwrap())
        }

        fn set(&mut self, address: u64, value: u64) {
            self.words[World::index(address).unwrap()] = value;
        }
    }

    impl Memory for World {
        fn read(&mut self, address: u64, words: &mut [u64]) -> usize {
            let mut done = 0;
            while done < words.len() {
                let at = address + done as u64 * WORD;
                match World::index(at).and_then(|at| self.words.get(at)) {
                    Some(word) if !self.absent.contains(&((at - BASE) / PAGE)) => words[done] = *word,
                    _ => break,
                }
                done += 1;
            }
            done
        }

        fn look(&self, address: u64) -> Option<(PageIndex, bool)> {
            let at = World::index(address).filter(|at| *at < self.words.len())?;
            let page = at as u64 * WORD / PAGE;
            Some((PageIndex(page), self.absent.contains(&page)))
        }

        fn next_piece(&mut self, from: u64, until: u64, words: &mut [u64]) -> (u64, usize) {
            let end = until.min(BASE + self.words.len() as u64 * WORD);
            let from = from.max(BASE);
            let page = (from - BASE) / PAGE;
            if from >= end {
                return (until, 0);
            }
            self.shown += 1;
            let next = BASE + (page + 1) * PAGE;
            let most = usize::try_from((next.min(end) - from) / WORD).unwrap().min(words.len());
            match self.read(from, &mut words[..most]) {
                0 => (next, 0),
                have => (from, have),
            }
        }

        fn resident_pages(&self) -> u64 {
            self.words.len() as u64 * WORD / PAGE - self.absent.len() as u64
        }
    }

    /// A permutation of `0..n` without a pattern that a stream could follow.
    fn scattered(n: u64) -> Vec<u64> {
        let mut all: Vec<u64> = (0..n).collect();
        let mut state = 88_172_645_463_325_252u64;
        for at in (1..all.len()).rev() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            all.swap(at, usize::try_from(state % (at as u64 + 1)).unwrap());
        }
        all
    }

    /// What a run of accesses in the array's order met: faults, and how many of those nothing had asked for.
    struct Run {
        faults: u64,
        unforeseen: u64,
        fetched: u64,
    }

    /// The search that is under way, to its end.
    fn search_all(pointers: &mut Pointers, world: &mut World) {
        while pointers.is_searching() {
            pointers.search(world);
        }
    }

    /// `objects` objects on a page each, absent at first; `entry(n)` is where the pointer to the n-th object
    /// touched stands. Everything asked for becomes resident at once except the first page of each request,
    /// which stays out as a marker. What was touched leaves again after a while.
    fn walk(world: &mut World, objects: &[u64], head: u64) -> Run {
        let mut pointers = Pointers::default();
        let (mut asked, mut recent) = (BTreeSet::new(), VecDeque::new());
        let mut run = Run { faults: 0, unforeseen: 0, fetched: 0 };
        for object in objects {
            let page = (object - BASE) / PAGE;
            if world.absent.contains(&page) {
                run.faults += 1;
                let foreseen = asked.remove(&page);
                run.unforeseen += u64::from(!foreseen);
                let mut ahead = Vec::new();
                pointers.fault(object + head, !foreseen, world, &mut ahead);
                search_all(&mut pointers, world);
                run.fetched += ahead.len() as u64;
                for (n, page) in ahead.iter().enumerate() {
                    asked.insert(page.0);
                    if n % 32 != 0 {
                        world.absent.remove(&page.0);
                    }
                }
            }
            world.absent.remove(&page);
            recent.push_back(page);
            if recent.len() > 512 {
                let left = recent.pop_front().unwrap();
                world.absent.insert(left);
            }
        }
        run
    }

    /// An array of pointers to `n` objects behind it, on a page each and in no order, all absent; and the
    /// objects in the array's order.
    fn array_of_scattered(n: u64) -> (World, Vec<u64>) {
        let array_pages = (n * WORD).div_ceil(PAGE);
        let mut world = World::new(array_pages + n);
        let objects: Vec<u64> = scattered(n).into_iter().map(|at| BASE + (array_pages + at) * PAGE).collect();
        for (at, object) in (0u64..).zip(&objects) {
            world.set(BASE + at * WORD, *object);
        }
        world.absent.extend(array_pages..array_pages + n);
        (world, objects)
    }

    fn array_of(stride_words: u64, downwards: bool, head: u64) -> Run {
        let n = 20_000;
        let array_pages = (n * stride_words * WORD).div_ceil(PAGE);
        let mut world = World::new(array_pages + n);
        let objects: Vec<u64> =
            scattered(n).into_iter().map(|at| BASE + (array_pages + at) * PAGE + (at % 100) * 16).collect();
        for (at, object) in (0u64..).zip(&objects) {
            let entry = if downwards { n - 1 - at } else { at };
            world.set(BASE + entry * stride_words * WORD, *object);
        }
        world.absent.extend(array_pages..array_pages + n);
        walk(&mut world, &objects, head)
    }

    #[test]
    fn an_array_of_pointers_foretells_what_is_touched() {
        for (stride, downwards, head) in
            [(1, false, 0), (1, true, 0), (2, false, 16), (4, true, 0), (4, false, 8), (16, true, 0)]
        {
            let run = array_of(stride, downwards, head);
            let case = format!("stride {stride}, downwards {downwards}, head {head}");
            assert!(
                run.unforeseen < 1500,
                "{case}: {} of {} faults came as a surprise",
                run.unforeseen,
                run.faults
            );
            assert!(run.faults < 3000, "{case}: {} faults", run.faults);
            assert!(run.fetched < 20_500, "{case}: {} pages were asked for", run.fetched);
        }
    }

    #[test]
    fn two_sequences_that_are_merged_are_two_walks() {
        let (half, stride) = (10_000u64, 4);
        let array_pages = (2 * half * stride * WORD).div_ceil(PAGE);
        let mut world = World::new(array_pages + 2 * half);
        let places = scattered(2 * half);
        let object = |at: u64| BASE + (array_pages + places[usize::try_from(at).unwrap()]) * PAGE;
        for at in 0..2 * half {
            world.set(BASE + at * stride * WORD, object(at));
        }
        // Both are walked from their ends, one after the other in an irregular order.
        let (mut low, mut high, mut order) = (half, 2 * half, Vec::new());
        for turn in scattered(2 * half) {
            let from_low = (turn % 2 == 0 && low > 0) || high == half;
            let side = if from_low { &mut low } else { &mut high };
            *side -= 1;
            order.push(object(*side));
        }
        world.absent.extend(array_pages..array_pages + 2 * half);
        let run = walk(&mut world, &order, 0);
        assert!(run.unforeseen < 4000, "{} of {} faults came as a surprise", run.unforeseen, run.faults);
    }

    #[test]
    fn a_walk_where_others_have_been_is_found_soon() {
        let (pieces, each) = (40u64, 1000u64);
        let n = pieces * each;
        let (mut world, objects) = array_of_scattered(n);
        // The array is walked piece by piece, in no order.
        let order: Vec<u64> = scattered(pieces)
            .into_iter()
            .flat_map(|piece| {
                objects[usize::try_from(piece * each).unwrap()..][..usize::try_from(each).unwrap()]
                    .iter()
                    .copied()
            })
            .collect();
        let run = walk(&mut world, &order, 0);
        assert!(run.unforeseen < 6000, "{} of {} faults came as a surprise", run.unforeseen, run.faults);
        assert!(run.fetched < n + n / 4, "{} pages were asked for", run.fetched);
    }

    #[test]
    fn without_pointers_nothing_is_asked_for_and_searches_become_rare() {
        let pages = 4000;
        let mut world = World::new(pages);
        world.absent.extend(2000..pages);
        let mut pointers = Pointers::default();
        let mut ahead = Vec::new();
        for at in scattered(2000).into_iter().cycle().take(100_000) {
            pointers.fault(BASE + (2000 + at) * PAGE, true, &mut world, &mut ahead);
            search_all(&mut pointers, &mut world);
        }
        assert!(ahead.is_empty());
        assert!(world.shown < 12 * pages, "{} pages were searched", world.shown);
    }

    #[test]
    fn pointers_in_no_order_are_not_followed() {
        // A hash table: the pointers are there, but not in the order of use.
        let n = 4000;
        let mut world = World::new(16 + n);
        let objects: Vec<u64> = (0..n).map(|at| BASE + (16 + at) * PAGE).collect();
        for (at, object) in (0u64..).zip(&objects) {
            world.set(BASE + at * WORD, *object);
        }
        world.absent.extend(16..16 + n);
        let order: Vec<u64> = scattered(n)
            .iter()
            .cycle()
            .take(40_000)
            .map(|at| objects[usize::try_from(*at).unwrap()])
            .collect();
        let run = walk(&mut world, &order, 0);
        assert!(run.fetched < run.faults / 4, "{} pages asked for, {} faults", run.fetched, run.faults);
    }

    #[test]
    fn an_array_that_is_absent_itself_is_asked_for() {
        let n = 20_000;
        let (mut world, objects) = array_of_scattered(n);
        let array_pages = (n * WORD).div_ceil(PAGE);
        let mut pointers = Pointers::default();
        let mut ahead = Vec::new();
        let mut order = objects.iter();
        while pointers.walks() == 0 {
            let object = order.next().expect("a walk is found");
            pointers.fault(*object, true, &mut world, &mut ahead);
            search_all(&mut pointers, &mut world);
        }
        // From here on the array's later pages are away.
        let position = n - order.len() as u64;
        let next = position * WORD / PAGE + 1;
        world.absent.extend(next..array_pages);
        for object in order.take(1600) {
            pointers.fault(*object, true, &mut world, &mut ahead);
        }
        // The trial may have read one page more before it left.
        assert!(
            (next..next + 2).any(|page| ahead.contains(&PageIndex(page))),
            "page {next} of the array was not asked for"
        );
    }

    #[test]
    fn objects_that_reach_into_the_next_page_bring_it_along() {
        let n = 8000u64;
        let array_pages = (n * WORD).div_ceil(PAGE);
        let mut world = World::new(array_pages + 2 * n);
        let mut touches = Vec::new();
        for (at, place) in (0u64..).zip(scattered(n)) {
            let page = BASE + (array_pages + 2 * place) * PAGE;
            world.set(BASE + at * WORD, page + 3000);
            touches.extend([page + 3000, page + PAGE]);
        }
        world.absent.extend(array_pages..array_pages + 2 * n);
        let run = walk(&mut world, &touches, 0);
        assert!(run.unforeseen < 3500, "{} of {} faults came as a surprise", run.unforeseen, run.faults);
        assert!(run.fetched < 2 * n + n / 10, "{} pages were asked for", run.fetched);
    }

    #[test]
    fn objects_that_do_not_reach_into_the_next_page_do_not_bring_it_along() {
        let run = array_of(4, true, 0);
        assert!(run.fetched < 20_500, "{} pages were asked for", run.fetched);
    }

    #[test]
    fn an_array_that_is_rewritten_under_a_walk_ends_it() {
        let n = 20_000;
        let (mut world, objects) = array_of_scattered(n);
        let mut pointers = Pointers::default();
        let mut order = objects.iter();
        let mut ahead = Vec::new();
        while pointers.walks() == 0 {
            pointers.fault(*order.next().expect("a walk is found"), true, &mut world, &mut ahead);
            search_all(&mut pointers, &mut world);
        }
        let values = [0, 1, u64::MAX, BASE - 1, BASE + (1 << 40), 7 << 61];
        for (entry, value) in (0..n).zip(values.into_iter().cycle()) {
            world.set(BASE + entry * WORD, value);
        }
        ahead.clear();
        for object in order.take(10_000) {
            pointers.fault(*object, true, &mut world, &mut ahead);
            search_all(&mut pointers, &mut world);
        }
        assert!(ahead.len() < 2 * RING, "{} pages were asked for", ahead.len());
        assert_eq!(pointers.walks(), 0, "the walk goes on without pointers");
    }

    proptest::proptest! {
        /// Whatever memory contains and whichever pages fault: only absent pages that exist are asked for.
        #[test]
        fn only_absent_pages_are_asked_for(
            seed in 1u64..u64::MAX,
            stride in 1u64..5,
            wild in 0u64..4,
            faults in 300usize..1500,
        ) {
            let (n, array_pages) = (600u64, 5u64);
            let mut world = World::new(array_pages + n);
            let mut state = seed;
            let mut random = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            };
            for entry in 0..n.min(array_pages * PAGE / WORD / stride) {
                let value = match random() % 8 {
                    kind if kind < wild => random(),
                    _ => BASE + (array_pages + random() % n) * PAGE + random() % PAGE,
                };
                world.set(BASE + entry * stride * WORD, value);
            }
            world.absent.extend((array_pages..array_pages + n).filter(|page| page % 7 != 0));
            let mut pointers = Pointers::default();
            let mut asked = Vec::new();
            for step in 0..faults as u64 {
                let entry = world.words[World::index(BASE + step % 500 * stride * WORD).unwrap()];
                let address = if random() % 16 == 0 { random() } else { entry };
                let mut ahead = Vec::new();
                pointers.fault(address, true, &mut world, &mut ahead);
                search_all(&mut pointers, &mut world);
                for page in &ahead {
                    proptest::prop_assert!(world.absent.contains(&page.0), "{page} is present, or does not exist");
                }
                asked.extend(ahead);
                // What was asked for comes now and then, and others leave.
                if random() % 3 == 0 {
                    for page in asked.drain(..) {
                        world.absent.remove(&page.0);
                    }
                }
                world.absent.insert(array_pages + random() % n);
            }
        }
    }
}
