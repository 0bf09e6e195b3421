//! Which pages come early when a program walks along an array of pointers.
//!
//! A sort of text lines, a list of Python objects, a vector of boxed values: what is touched lies in no order that a stream of page numbers could
//! show, and still the order is written down, in an array that is read from one end to the other. [`Pointers`] finds such arrays by their
//! content. A thread waits for the word at some address: somewhere in resident memory there is a pointer to it. One search yields *suspects*, places where
//! such a pointer stands. If the next faults turn out to be the next entries from a suspect at a constant stride, it is a *walk*, and the entries
//! ahead of it say which pages will be wanted, in order.
//!
//! ```text
//!   fault at A        search: A stands at S          fault at B: stands at S - 32, nothing absent in between    a walk, stride -32
//!   fault at C        C stands in the walk's ring    what is before C has been passed; entries further ahead are read
//! ```
//!
//! It never reads memory itself: [`Memory`] does, and may refuse. A search costs time in proportion to what is resident, so it is paid for by
//! faults that nothing foresaw, and after each failure the next one must be paid for twice as dearly. Where walks have been is searched first, and is cheap: a
//! sort that merges goes through the same array again and again, piece by piece. A wrong guess costs pages that were
//! fetched in vain, at most [`AHEAD`] of them before the walk has to prove itself again.

use std::collections::VecDeque;

use crate::units::PageIndex;

/// Pages that a walk keeps asked for and not yet reached.
pub const AHEAD: usize = 96;
/// Entries kept of a walk, those included whose pages are resident.
const RING: usize = 2048;
/// Entries read at a time.
const READ_ENTRIES: usize = 32;
/// Walks at a time: each thread of a merge has two.
const WALKS: usize = 8;
/// A walk that no fault belonged to for so many faults has ended.
const STALE_AFTER: u64 = 4096;
/// Suspects of one search.
const SUSPECTS: usize = 16;
/// Faults that a search's suspects have to prove themselves.
const SUSPICION: u64 = 64;
/// Words looked at to either side of a suspect.
const AROUND: usize = 64;
/// The first touch of an object may be this far behind where the pointer points.
const OBJECT_HEAD_BYTES: u64 = 64;
/// Entries that must look like pointers before a stride is believed.
const SAMPLE: i64 = 8;
/// Entries in a row that are no pointers end a walk.
const MOST_STRANGERS: u32 = 4;
/// Strides tried, in words.
const STRIDES: [i64; 9] = [1, 2, 3, 4, 5, 6, 8, 12, 16];
/// Faults that pay for the search of so many resident pages.
const PAGES_PER_FAULT: u64 = 8;
const LEAST_FAULTS: u64 = 256;
const MOST_DOUBLINGS: u32 = 12;
/// The same for the pages where walks have been, and near them.
const NEAR_PAGES_PER_FAULT: u64 = 32;
const LEAST_NEAR_FAULTS: u64 = 32;
/// Places where walks have been that are remembered.
const GROUNDS: usize = 4;
/// A walk no further than this from such a place belongs to it.
const GROUND_REACH: u64 = 1 << 20;
/// Words of such a place that are read at a time.
const NEAR_WORDS: usize = 2048;
const PAGE_BYTES: u64 = crate::units::OS_PAGE_BYTES as u64;
const WORD: u64 = 8;

/// The memory that faults come from.
pub trait Memory {
    /// Copies words from `address` on, as far as they are resident, and returns how many. Never waits for a page.
    fn read(&mut self, address: u64, words: &mut [u64]) -> usize;

    /// The managed page that `address` is in, and whether it would have to be fetched.
    fn look(&self, address: u64) -> Option<(PageIndex, bool)>;

    /// Shows resident memory piece by piece, with the address of each, until `visit` returns false.
    fn each_piece(&mut self, visit: &mut dyn FnMut(u64, &[u64]) -> bool);

    /// Pages that [`Memory::each_piece`] would show.
    fn resident_pages(&self) -> u64;
}

/// The walks that are under way. See the module.
#[derive(Debug, Default)]
pub struct Pointers {
    walks: Vec<Walk>,
    suspects: Vec<Suspect>,
    suspected_at: u64,
    /// Faults so far.
    clock: u64,
    /// Of everything resident.
    wide: Account,
    /// Of the grounds.
    near: Account,
    /// Whether the suspects are of the grounds.
    found_near: bool,
    /// The latest last.
    grounds: Vec<Ground>,
}

/// A pointer that may be an entry of an array that is walked along.
#[derive(Debug)]
struct Suspect {
    at: u64,
    /// What stood around it when it was found, and where in that it stands. (What a walk reads is not written meanwhile; and if it is, the walk does
    /// not get far.)
    words: Vec<u64>,
    here: usize,
}

/// What pays for searches of one kind.
#[derive(Debug, Default)]
struct Account {
    /// Faults that nothing foresaw, since the last search.
    strays: u64,
    /// How often the price of a search was doubled.
    doublings: u32,
}

impl Account {
    /// Whether a search of so many pages is paid for; then it is taken as begun.
    fn affords(&mut self, pages: u64, pages_per_fault: u64, least: u64) -> bool {
        let paid = self.strays >= (pages / pages_per_fault).max(least) << self.doublings;
        if paid {
            self.strays = 0;
        }
        paid
    }

    fn failed(&mut self) {
        self.doublings = (self.doublings + 1).min(MOST_DOUBLINGS);
    }
}

/// A stretch of memory where walks have been.
#[derive(Clone, Copy, Debug)]
struct Ground {
    low: u64,
    high: u64,
    /// Bytes from one entry to the next, whichever way.
    stride: u64,
}

impl Ground {
    /// The stretch with as much again around it, in whole pages: where the next walk may be.
    fn around(&self) -> (u64, u64) {
        let margin = (self.high - self.low).max(GROUND_REACH / 4);
        (self.low.saturating_sub(margin) & !(PAGE_BYTES - 1), self.high.saturating_add(margin))
    }
}

#[derive(Debug)]
struct Walk {
    /// Bytes from one entry to the next.
    stride: i64,
    /// The next entry to read.
    next: u64,
    ring: VecDeque<Entry>,
    /// Entries of the ring that were asked for.
    asked: usize,
    strangers: u32,
    used: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    page: PageIndex,
    asked: bool,
}

impl Pointers {
    /// Walks under way.
    #[must_use]
    pub fn walks(&self) -> usize {
        self.walks.len()
    }

    /// A thread waits for a page that is not resident, at `address`. `stray`: nothing else explains the fault. Appends to `ahead` the pages that
    /// will be wanted next, the soonest first.
    pub fn fault(&mut self, address: u64, stray: bool, memory: &mut impl Memory, ahead: &mut Vec<PageIndex>) {
        self.clock += 1;
        let clock = self.clock;
        if self.walks.is_empty() && !stray {
            return;
        }
        let Some((page, _)) = memory.look(address) else { return };
        self.walks.retain(|walk| walk.used + STALE_AFTER >= clock);
        let mut foreseen = false;
        for walk in &mut self.walks {
            if let Some(at) = walk.ring.iter().position(|e| e.page == page) {
                walk.pass(at);
                walk.used = clock;
                foreseen = true;
                walk.was_here(&mut self.grounds);
            }
            if walk.asked < AHEAD / 2 {
                walk.read_on(memory, ahead);
            }
        }
        if foreseen || !stray {
            return;
        }
        self.wide.strays += 1;
        self.near.strays += 1;
        if self.suspects.is_empty() {
            self.search(address, memory);
        } else if self.convict(address, page, memory, ahead) {
            self.suspects.clear();
            self.wide.doublings = 0;
            self.near.doublings = 0;
        } else if self.suspected_at + SUSPICION < clock {
            self.suspects.clear();
            self.searched().failed();
        }
    }

    /// The account of the latest search.
    fn searched(&mut self) -> &mut Account {
        if self.found_near { &mut self.near } else { &mut self.wide }
    }

    /// Looks for pointers to `address`, if enough faults have paid for it.
    fn search(&mut self, address: u64, memory: &mut impl Memory) {
        let mut places = Vec::new();
        let near_pages = self.grounds.iter().map(|g| g.around()).map(|(low, high)| (high - low) / PAGE_BYTES).sum();
        if !self.grounds.is_empty() && self.near.affords(near_pages, NEAR_PAGES_PER_FAULT, LEAST_NEAR_FAULTS) {
            self.found_near = true;
            self.search_grounds(address, memory, &mut places);
        } else if self.wide.affords(memory.resident_pages(), PAGES_PER_FAULT, LEAST_FAULTS) {
            self.found_near = false;
            memory.each_piece(&mut |start, words| find(&mut places, start, words, address));
        } else {
            return;
        }
        self.suspected_at = self.clock;
        self.suspects.extend(places.into_iter().map(|at| Suspect::look_around(at, memory)));
        if self.suspects.is_empty() {
            self.searched().failed();
        }
    }

    fn search_grounds(&self, address: u64, memory: &mut impl Memory, places: &mut Vec<u64>) {
        let mut words = [0; NEAR_WORDS];
        for ground in self.grounds.iter().rev() {
            let (mut at, high) = ground.around();
            while at < high {
                let have = memory.read(at, &mut words);
                if !find(places, at, &words[..have], address) {
                    return;
                }
                // A page that is not there is passed over.
                let read = at + have as u64 * WORD;
                at = if have < NEAR_WORDS { (read & !(PAGE_BYTES - 1)) + PAGE_BYTES } else { read };
            }
        }
    }

    /// Whether one of the suspects foresaw this fault: then a walk begins there.
    fn convict(&mut self, address: u64, page: PageIndex, memory: &mut impl Memory, ahead: &mut Vec<PageIndex>) -> bool {
        for Suspect { at: suspect, words, here } in &self.suspects {
            let here = *here;
            let found = words.iter().enumerate().filter(|(at, word)| *at != here && points_at(**word, address)).map(|(at, _)| at);
            let nearest = found.min_by_key(|at| at.abs_diff(here));
            let Some(found) = nearest else { continue };
            let Some(stride) = stride(words, here, found, page, memory) else { continue };
            // Where an array is known, what looks like a walk at another stride is chance.
            if self.found_near && !self.grounds.iter().any(|g| g.stride == stride.unsigned_abs() * WORD) {
                continue;
            }
            let from = suspect - here as u64 * WORD;
            let mut walk = Walk {
                stride: stride * 8,
                next: (from + found as u64 * WORD).wrapping_add_signed(stride * 8),
                ring: VecDeque::new(),
                asked: 0,
                strangers: 0,
                used: self.clock,
            };
            walk.read_on(memory, ahead);
            if self.walks.len() == WALKS {
                let oldest = (0..WALKS).min_by_key(|at| self.walks[*at].used).expect("there are some");
                self.walks.swap_remove(oldest);
            }
            walk.was_here(&mut self.grounds);
            self.walks.push(walk);
            return true;
        }
        false
    }
}

impl Suspect {
    fn look_around(at: u64, memory: &mut impl Memory) -> Self {
        let mut words = vec![0; 2 * AROUND + 1];
        let start = at.saturating_sub(AROUND as u64 * WORD);
        let mut here = usize::try_from((at - start) / WORD).expect("at most AROUND");
        let mut have = memory.read(start, &mut words);
        if have <= here {
            // The page in front is absent: only what follows is looked at.
            here = 0;
            have = memory.read(at, &mut words[..=AROUND]);
        }
        words.truncate(have);
        Self { at, words, here }
    }
}

impl Walk {
    /// Notes the place.
    fn was_here(&self, grounds: &mut Vec<Ground>) {
        let (at, stride) = (self.next, self.stride.unsigned_abs());
        let near = |g: &Ground| g.low.saturating_sub(GROUND_REACH) <= at && at <= g.high.saturating_add(GROUND_REACH);
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

    /// The program stands at the entry `at` of the ring.
    fn pass(&mut self, at: usize) {
        for entry in self.ring.drain(..=at) {
            self.asked -= usize::from(entry.asked);
        }
    }

    /// Reads entries until enough pages are asked for.
    fn read_on(&mut self, memory: &mut impl Memory, ahead: &mut Vec<PageIndex>) {
        let step_words = usize::try_from(self.stride.unsigned_abs() / WORD).expect("a stride is short");
        let mut words = [0; READ_ENTRIES * 16];
        while self.asked < AHEAD && self.ring.len() < RING && self.strangers < MOST_STRANGERS {
            let mut entries = READ_ENTRIES;
            let span = (entries - 1) * step_words + 1;
            let (mut have, mut low) = (0, self.next);
            if self.stride > 0 {
                have = memory.read(self.next, &mut words[..span]);
            } else {
                // Downwards, the block ends at the next entry; a page border in it may be in the way.
                while entries > 0 && have == 0 {
                    let span = (entries - 1) * step_words + 1;
                    low = self.next.wrapping_sub((span as u64 - 1) * WORD);
                    have = memory.read(low, &mut words[..span]);
                    if have < span {
                        have = 0;
                        entries /= 2;
                    }
                }
            }
            if have == 0 {
                // The array itself has left: its next page is wanted as well.
                if let Some((page, true)) = memory.look(self.next)
                    && !ahead.contains(&page)
                {
                    ahead.push(page);
                }
                return;
            }
            let read = (have - 1) / step_words + 1;
            for n in 0..read.min(entries) {
                let at = if self.stride > 0 { n * step_words } else { usize::try_from((self.next - low) / WORD).expect("in the block") };
                self.take(words[at], memory, ahead);
                if self.stride < 0 {
                    self.next = self.next.wrapping_add_signed(self.stride);
                }
            }
            if self.stride > 0 {
                self.next = self.next.wrapping_add(read.min(entries) as u64 * self.stride.unsigned_abs());
            }
        }
    }

    fn take(&mut self, value: u64, memory: &impl Memory, ahead: &mut Vec<PageIndex>) {
        let Some((page, absent)) = memory.look(value) else {
            self.strangers += 1;
            return;
        };
        self.strangers = 0;
        let asked = absent && !ahead.contains(&page);
        self.ring.push_back(Entry { page, asked });
        self.asked += usize::from(asked);
        if asked {
            ahead.push(page);
        }
    }
}

/// Adds the places of a piece that point at `address`; whether more may be added.
fn find(places: &mut Vec<u64>, start: u64, words: &[u64], address: u64) -> bool {
    for (at, word) in (0u64..).zip(words) {
        if points_at(*word, address) {
            places.push(start + at * WORD);
        }
    }
    places.len() < SUSPECTS
}

#[inline]
fn points_at(word: u64, address: u64) -> bool {
    address.wrapping_sub(word) < OBJECT_HEAD_BYTES
}

/// The stride in words, signed, at which the entry at `found` follows the one at `here`: every entry for a while is a pointer, and none that was
/// passed over points to what is absent, because it would have been waited for.
fn stride(words: &[u64], here: usize, found: usize, page: PageIndex, memory: &impl Memory) -> Option<i64> {
    let index = |at: i64| usize::try_from(at).ok().and_then(|at| words.get(at)).copied();
    let (here, found) = (i64::try_from(here).expect("short"), i64::try_from(found).expect("short"));
    let distance = found - here;
    STRIDES.into_iter().find_map(|stride| {
        let step = stride * distance.signum();
        if distance % step != 0 {
            return None;
        }
        let steps = distance / step;
        let between = (1..steps).all(|n| {
            let looked = index(here + n * step).and_then(|value| memory.look(value));
            looked.is_some_and(|(other, absent)| !absent || other == page)
        });
        let looks_like_pointers = |from: i64, step: i64| {
            let values = (1..=SAMPLE).map_while(|n| index(from + n * step));
            let mut distinct: Vec<u64> = Vec::new();
            for value in values {
                if memory.look(value).is_none() {
                    return false;
                }
                if !distinct.contains(&value) {
                    distinct.push(value);
                }
            }
            distinct.len() > 2
        };
        (between && (looks_like_pointers(here, step) || looks_like_pointers(found, -step))).then_some(step)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const PAGE: u64 = 4096;
    const BASE: u64 = 0x7f00_0000_0000;

    /// Words by address, of which some pages are absent. Page numbers are those of the addresses from `BASE` on.
    struct World {
        words: Vec<u64>,
        absent: BTreeSet<u64>,
        shown: u64,
    }

    impl World {
        fn new(pages: u64) -> Self {
            Self { words: vec![0; usize::try_from(pages * PAGE / WORD).unwrap()], absent: BTreeSet::new(), shown: 0 }
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

        fn each_piece(&mut self, visit: &mut dyn FnMut(u64, &[u64]) -> bool) {
            let page_words = usize::try_from(PAGE / WORD).unwrap();
            for (page, words) in (0u64..).zip(self.words.chunks(page_words)) {
                self.shown += 1;
                if !self.absent.contains(&page) && !visit(BASE + page * PAGE, words) {
                    return;
                }
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

    /// `objects` objects on a page each, absent at first; `entry(n)` is where the pointer to the n-th object touched stands. Everything asked for
    /// becomes resident at once except the first page of each request, which stays out as a marker. What was touched leaves again after a while.
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

    /// An array of pointers to `n` objects behind it, on a page each and in no order, all absent; and the objects in the array's order.
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
        let objects: Vec<u64> = scattered(n).into_iter().map(|at| BASE + (array_pages + at) * PAGE + (at % 100) * 16).collect();
        for (at, object) in (0u64..).zip(&objects) {
            let entry = if downwards { n - 1 - at } else { at };
            world.set(BASE + entry * stride_words * WORD, *object);
        }
        world.absent.extend(array_pages..array_pages + n);
        walk(&mut world, &objects, head)
    }

    #[test]
    fn an_array_of_pointers_foretells_what_is_touched() {
        for (stride, downwards, head) in [(1, false, 0), (1, true, 0), (2, false, 16), (4, true, 0), (4, false, 8), (16, true, 0)] {
            let run = array_of(stride, downwards, head);
            let case = format!("stride {stride}, downwards {downwards}, head {head}");
            assert!(run.unforeseen < 1500, "{case}: {} of {} faults came as a surprise", run.unforeseen, run.faults);
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
            .flat_map(|piece| objects[usize::try_from(piece * each).unwrap()..][..usize::try_from(each).unwrap()].iter().copied())
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
        let order: Vec<u64> = scattered(n).iter().cycle().take(40_000).map(|at| objects[usize::try_from(*at).unwrap()]).collect();
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
        }
        // From here on the array's later pages are away.
        let position = n - order.len() as u64;
        let next = position * WORD / PAGE + 1;
        world.absent.extend(next..array_pages);
        for object in order.take(600) {
            pointers.fault(*object, true, &mut world, &mut ahead);
        }
        assert!(ahead.contains(&PageIndex(next)), "page {next} of the array was not asked for");
    }
}
