//! Which pages to fetch before they are touched.
//!
//! Three predictors. *Streams*: pages that are missed one behind the other, or three at the same distance, up
//! or down, are used in order. With each miss more of them are fetched, twice as many each time, as in
//! [`rampool_paging::cache`]. A transpose reads every other page, or every fourth. When many pages come
//! ahead, one near the end is a *mark*: it is not mapped when it comes, so that its first touch is seen, and
//! the next ones are requested while there is still something to read. A new stream is taken to be as long as
//! the shorter of the last two of its stride, up to a mark that was not touched: rows of a matrix come whole,
//! and no more. *Habits*: a page that was read in an
//! epoch and changed by others is read again in the next, so it is fetched when the barrier ends. Whether
//! such a page was used is invisible; so a habit is trusted for a while only, then the page has to be missed
//! again, which doubles the while.
//!
//! *Blocks*, for `auto`: where many of some neighbours are missed in an epoch without locks, in no order, the
//! others come with the next one that is.

use std::collections::BTreeMap;

use rampool_wire::units::{Extent, PageIndex};

/// Streams of misses that are followed at a time.
const STREAMS: usize = 8;
/// The largest distance between pages that are read in order.
const LONGEST_STRIDE: i64 = 64;
/// If at least this many pages come ahead, one is a mark, with this part of them behind it: less than the
/// next ones take to arrive is no use, and an earlier mark may fetch more in vain.
const MARKED: u64 = 16;
const BEHIND_MARK: u64 = 4;
/// The fewest pages that come ahead.
const LEAST: u64 = 2;
/// Where a stream is longer than the one before it, this part of what came ahead doubles from there.
const BEYOND_GOAL: u64 = 8;
/// The most epochs for which a habit is trusted.
const LONGEST_TRUST: u8 = 64;

/// Misses that may belong together, the latest first.
#[derive(Clone, Hash, Debug, Default)]
pub(crate) struct Streams {
    recent: Vec<Stream>,
    /// A new stream is taken to be as long as the shorter of the last two of its stride.
    learns: bool,
}

#[derive(Clone, Copy, Hash, Debug)]
struct Stream {
    /// Its last page that was missed, or fetched ahead.
    last: PageIndex,
    /// From one page to the next; a guess while nothing has been fetched ahead. 0: none yet.
    stride: i64,
    /// Pages fetched ahead the last time.
    ahead: u64,
    /// One of them.
    mark: Option<PageIndex>,
    /// Its pages so far, and those behind the mark.
    pages: u64,
    behind: u64,
    /// How many pages it is taken to have: no more are fetched until one more is missed. 0: any number.
    goal: u64,
}

/// Pages to fetch with a missed one: their number, and the way from each to the next, from the missed one on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ahead {
    pub stride: i64,
    pub count: u64,
}

impl Ahead {
    /// Those of them that are within `pages`, ascending; `page` was missed.
    pub fn from(self, page: PageIndex, pages: Extent) -> Vec<PageIndex> {
        let steps = (1..=self.count).map_while(|step| walk(page, self.stride, step));
        let mut pages: Vec<PageIndex> =
            steps.take_while(|&next| next != page && pages.contains(next)).collect();
        if self.stride < 0 {
            pages.reverse();
        }
        pages
    }
}

/// The page so many steps further, if there is one.
fn walk(page: PageIndex, stride: i64, steps: u64) -> Option<PageIndex> {
    let distance = i64::try_from(steps).ok()?.checked_mul(stride)?;
    page.0.checked_add_signed(distance).map(PageIndex)
}

/// The way from one page to another.
fn way(from: PageIndex, to: PageIndex) -> i64 {
    to.0.wrapping_sub(from.0).cast_signed()
}

impl Stream {
    /// A miss that belongs to no stream.
    fn new(page: PageIndex, stride: i64) -> Self {
        Self { last: page, stride, ahead: 0, mark: None, pages: 1, behind: 0, goal: 0 }
    }

    /// This many pages more are fetched ahead behind `page`.
    fn fetch(&mut self, page: PageIndex, count: u64) {
        self.behind = match self.goal {
            0 if count < MARKED => 0,
            0 => count / BEHIND_MARK,
            // The least that is fetched is no guess.
            _ if count <= LEAST => 0,
            _ => (count / BEHIND_MARK).max(1),
        };
        self.mark = walk(page, self.stride, count - self.behind).filter(|_| self.behind > 0);
        self.last = walk(page, self.stride, count).unwrap_or(page);
        self.pages += count;
        self.ahead = count;
    }

    /// How many pages it has for certain: what came with a mark that is not touched may be in vain.
    fn known(&self) -> u64 {
        if self.mark.is_some() { self.pages - self.ahead } else { self.pages }
    }

    /// How many pages are fetched ahead the next time, at most `most`.
    fn next(&self, most: u64) -> u64 {
        (self.ahead * 2).clamp(LEAST, most.max(LEAST)).min(most)
    }

    /// How the stream continues if `page` is its next one.
    fn stride_to(&self, page: PageIndex) -> Option<i64> {
        let way = way(self.last, page);
        // Neighbours upward need no third page as confirmation.
        ((way != 0 && way == self.stride) || (way == 1 && self.ahead == 0)).then_some(way)
    }

    /// The way to `page`, if it may be its next one.
    fn may_lead_to(&self, page: PageIndex) -> Option<i64> {
        let way = way(self.last, page);
        (self.ahead == 0 && way != 0 && way.unsigned_abs() <= LONGEST_STRIDE.unsigned_abs()).then_some(way)
    }
}

impl Streams {
    /// Streams that are as long as the ones before them.
    pub fn learning() -> Self {
        Self { recent: Vec::new(), learns: true }
    }

    /// A thread misses `page`. Returns the pages to fetch with it: at most `most`.
    pub fn missed(&mut self, page: PageIndex, most: u64) -> Ahead {
        let known = self
            .recent
            .iter()
            .enumerate()
            .find_map(|(at, stream)| stream.stride_to(page).map(|stride| (at, stride)));
        let (stream, count) = match known {
            Some((at, stride)) => {
                let mut stream = self.recent.remove(at);
                let alike = self.recent.iter().filter(|other| other.stride == stride && other.ahead > 0);
                let before = alike.take(2).map(Stream::known).min();
                (stream.stride, stream.pages) = (stride, stream.pages + 1);
                let count = match before.filter(|_| self.learns && stream.ahead == 0) {
                    Some(pages) => {
                        stream.goal = pages;
                        stream.goal.saturating_sub(stream.pages).clamp(most.min(LEAST), most)
                    }
                    None => {
                        if std::mem::take(&mut stream.goal) > 0 {
                            stream.ahead /= BEYOND_GOAL;
                        }
                        stream.next(most)
                    }
                };
                stream.fetch(page, count);
                (stream, count)
            }
            None => {
                let ways = self.recent.iter().filter_map(|stream| stream.may_lead_to(page));
                (Stream::new(page, ways.min_by_key(|way| way.unsigned_abs()).unwrap_or(0)), 0)
            }
        };
        self.recent.truncate(STREAMS - 1);
        self.recent.insert(0, stream);
        Ahead { stride: stream.stride, count }
    }

    /// An epoch ends. What lies behind a mark that was not touched was fetched in vain.
    pub fn epoch_ends(&mut self) {
        for stream in &mut self.recent {
            if stream.mark.take().is_some() {
                stream.pages -= stream.behind;
            }
        }
    }

    /// Whether the first touch of `page`, which was fetched ahead, should be seen.
    pub fn is_mark(&self, page: PageIndex) -> bool {
        self.recent.iter().any(|stream| stream.mark == Some(page))
    }

    /// A thread touches a page that was fetched ahead. For a mark, returns the next pages to fetch, at most
    /// `most`, and the page before them.
    pub fn touched(&mut self, page: PageIndex, most: u64) -> Option<(PageIndex, Ahead)> {
        let at = self.recent.iter().position(|stream| stream.mark == Some(page))?;
        let mut stream = self.recent[at];
        let last = stream.last;
        let most = if stream.goal > 0 { most.min(stream.goal.saturating_sub(stream.pages)) } else { most };
        let count = stream.next(most);
        stream.mark = None;
        if count > 0 {
            stream.fetch(last, count);
        }
        self.recent.remove(at);
        self.recent.insert(0, stream);
        Some((last, Ahead { stride: stream.stride, count }))
    }
}

/// Pages of one block; as many missed ones of them make it *dense*.
const BLOCK: u32 = 64;
const DENSE: u32 = 8;

/// Blocks of pages of which many are missed in an epoch, in whatever order: the rest will mostly be used.
/// Not after a lock was given back: each release compares what was opened in vain, and under locks there are
/// many.
#[derive(Clone, Hash, Debug, Default)]
pub(crate) struct Blocks {
    missed: BTreeMap<PageIndex, u64>,
    locks: bool,
}

impl Blocks {
    /// A thread misses `page`. Its block, if that is dense by now.
    pub fn missed(&mut self, page: PageIndex) -> Option<Extent> {
        if self.locks {
            return None;
        }
        let at = page.0 % u64::from(BLOCK);
        let block = Extent::new(PageIndex(page.0 - at), BLOCK);
        let missed = self.missed.entry(block.first).or_default();
        *missed |= 1 << at;
        (missed.count_ones() >= DENSE).then_some(block)
    }

    /// Something is released: at the end of an epoch, or under a lock.
    pub fn released(&mut self, at_barrier: bool) {
        self.missed.clear();
        self.locks = !at_barrier;
    }
}

/// Whether a page is read in each epoch.
#[derive(Clone, Copy, Hash, Debug, Default)]
pub(crate) struct Habit {
    /// Epochs for which it was trusted last.
    trust: u8,
    /// Epochs for which it is still trusted.
    left: u8,
}

impl Habit {
    /// A thread missed the page.
    pub fn missed(&mut self) {
        self.trust = (self.trust * 2).clamp(1, LONGEST_TRUST);
        self.left = self.trust;
    }

    /// The page has changed and was not missed since the change before.
    pub fn unused(&mut self) {
        *self = Self::default();
    }

    /// Whether the page is fetched by itself when it changes.
    pub fn is_believed(&self) -> bool {
        self.left > 0
    }

    /// The page has changed. Returns whether to fetch it by itself.
    pub fn changed(&mut self) -> bool {
        let believed = self.left > 0;
        self.left = self.left.saturating_sub(1);
        believed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_doubles_what_comes_ahead_up_to_the_most() {
        let mut streams = Streams::default();
        let mut page = PageIndex(100);
        let mut came = Vec::new();
        for _ in 0..7 {
            let ahead = streams.missed(page, 20).count;
            came.push(ahead);
            page = page.offset(ahead + 1);
        }
        assert_eq!(came, [0, 2, 4, 8, 16, 20, 20]);
        assert_eq!(streams.missed(page, 0).count, 0, "nothing comes ahead where nothing may");
    }

    #[test]
    fn what_comes_next_is_asked_for_at_a_mark_before_the_end() {
        let mut streams = Streams::default();
        let (mut page, mut marks, mut came) = (PageIndex(100), 0, Vec::new());
        // Up to here all pages have come or been requested.
        let mut end = page;
        for _ in 0..600 {
            if page >= end {
                let ahead = streams.missed(page, 64).count;
                end = page.offset(ahead + 1);
                came.push(ahead);
            } else if streams.is_mark(page) {
                let (behind, ahead) = streams.touched(page, 64).unwrap();
                assert_eq!((behind.offset(1), ahead.stride), (end, 1), "what comes next joins what has come");
                assert!(!streams.is_mark(page) && streams.touched(page, 64).is_none(), "once");
                end = behind.offset(ahead.count + 1);
                marks += 1;
            } else {
                assert!(streams.touched(page, 64).is_none());
            }
            page = page.offset(1);
        }
        assert_eq!(came, [0, 2, 4, 8, 16], "from a mark on nothing is missed any more");
        assert!(marks > 8, "{marks} marks of 600 pages");
        let at = (0..900).map(PageIndex).find(|&page| streams.is_mark(page)).unwrap();
        assert_eq!(
            streams.touched(at, 0).map(|(_, ahead)| ahead.count),
            Some(0),
            "nothing comes ahead where nothing may"
        );
        assert!((0..900).all(|page| !streams.is_mark(PageIndex(page))));
    }

    #[test]
    fn a_stream_is_taken_to_be_as_long_as_those_before_it() {
        let mut streams = Streams::learning();
        let mut row = |first: u64, pages: u64| {
            let (mut came, mut end) = (Vec::new(), first);
            for page in (first..first + pages).map(PageIndex) {
                if page.0 >= end {
                    let ahead = streams.missed(page, 256).count;
                    came.push(ahead);
                    end = page.0 + ahead + 1;
                } else if let Some((last, ahead)) = streams.touched(page, 256)
                    && ahead.count > 0
                {
                    end = last.0 + ahead.count + 1;
                }
            }
            streams.epoch_ends();
            came
        };
        assert_eq!(row(0, 30), [0, 2, 4, 8, 16]);
        assert_eq!(row(1000, 30), [0, 29], "all at once, as many as before");
        assert_eq!(row(2000, 20), [0, 29], "the mark is not touched");
        assert_eq!(row(3000, 20), [0, 22], "so fewer come");
        assert_eq!(row(4000, 30), [0, 22, 4, 8], "and more, if they are missed");
        for first in (10_000..30_000).step_by(1000) {
            row(first, 2);
        }
        assert_eq!(row(40_000, 2), [0, 2], "a pair brings no more than any other, in the end");
    }

    #[test]
    fn short_streams_after_a_long_one_bring_too_much_once() {
        let mut streams = Streams::learning();
        let mut came = Vec::new();
        for page in (0..200).chain((1..8).flat_map(|block| [1000 * block, 1000 * block + 1])).map(PageIndex) {
            if page.0 >= 1000 || came.iter().sum::<u64>() <= page.0 {
                came.push(streams.missed(page, 256).count + 1);
            }
        }
        let pairs = came.split_off(came.len() - 14);
        assert!(pairs[1] > 3 && pairs[2..].chunks(2).all(|pair| pair == [1, 3]), "{pairs:?}");
    }

    #[test]
    fn pages_at_equal_distances_are_a_stream_from_the_third_on() {
        for stride in [2, 3, LONGEST_STRIDE, -1, -2, -LONGEST_STRIDE] {
            let mut streams = Streams::default();
            let mut page = PageIndex(70_000);
            let mut came = Vec::new();
            for _ in 0..6 {
                let ahead = streams.missed(page, 20);
                assert!(ahead.count == 0 || ahead.stride == stride, "{ahead:?}");
                came.push(ahead.count);
                page = walk(page, stride, ahead.count + 1).unwrap();
            }
            assert_eq!(came, [0, 0, 2, 4, 8, 16], "stride {stride}");
        }
        let mut far = Streams::default();
        let came: u64 =
            (0..20).map(|at| far.missed(PageIndex(at * (LONGEST_STRIDE.unsigned_abs() + 1)), 20).count).sum();
        assert_eq!(came, 0);
    }

    #[test]
    fn a_block_is_dense_once_many_of_its_pages_were_missed() {
        let mut blocks = Blocks::default();
        let mut missed = |page: u64| blocks.missed(PageIndex(64 + page * 37 % 64));
        assert!((0..7).all(|page| missed(page).is_none() && missed(page).is_none()), "each counts once");
        assert_eq!(missed(7), Some(Extent::new(PageIndex(64), 64)));
        assert_eq!(blocks.missed(PageIndex(128)), None, "another block");
        blocks.released(true);
        assert_eq!(blocks.missed(PageIndex(127)), None);
        blocks.released(false);
        assert!((0..64).all(|page| blocks.missed(PageIndex(page)).is_none()), "there are locks");
    }

    #[test]
    fn what_comes_ahead_ascends_and_stays_within_the_region() {
        let from = |page, stride, count| {
            Ahead { stride, count }.from(PageIndex(page), Extent::new(PageIndex(10), 10))
        };
        let pages = |numbers: &[u64]| numbers.iter().map(|&page| PageIndex(page)).collect::<Vec<_>>();
        assert_eq!(from(12, 2, 9), pages(&[14, 16, 18]));
        assert_eq!(from(17, -2, 9), pages(&[11, 13, 15]));
        assert_eq!(from(17, 0, 9), pages(&[]));
        assert_eq!(
            Ahead { stride: -3, count: 9 }.from(PageIndex(4), Extent::new(PageIndex(0), 9)),
            pages(&[1])
        );
    }

    #[test]
    fn misses_that_follow_no_order_bring_nothing_ahead() {
        let mut streams = Streams::default();
        for page in [5, 9, 3, 77, 4000, 78] {
            // 78 follows 77, and nothing else follows anything.
            assert_eq!(streams.missed(PageIndex(page), 64).count > 0, page == 78, "page {page}");
        }
    }

    #[test]
    fn two_streams_do_not_disturb_each_other() {
        for second in [10, 1 << 20] {
            let mut streams = Streams::default();
            let mut at = [PageIndex(0), PageIndex(second)];
            for round in 0..5 {
                for page in &mut at {
                    let ahead = streams.missed(*page, 64);
                    assert_eq!(
                        ahead.count,
                        if round == 0 { 0 } else { 1 << round },
                        "the second from {second} on"
                    );
                    *page = page.offset(ahead.count + 1);
                }
            }
        }
    }

    #[test]
    fn a_page_that_is_read_in_each_epoch_is_missed_ever_more_rarely() {
        let mut habit = Habit::default();
        assert!(!habit.changed(), "it was never missed");
        let mut epochs = Vec::new();
        for epoch in 0..150 {
            if !habit.changed() {
                habit.missed();
                epochs.push(epoch);
            }
        }
        assert_eq!(
            epochs,
            [0, 2, 5, 10, 19, 36, 69, 134],
            "believed for 1, 2, 4 epochs and so on, at most 64"
        );
    }

    #[test]
    fn a_page_that_is_used_no_more_is_believed_no_more() {
        let mut habit = Habit::default();
        for _ in 0..6 {
            habit.missed();
        }
        let came = (0..200).filter(|_| habit.changed()).count();
        assert!(came <= 32, "came {came} times for nothing");
        habit.unused();
        habit.missed();
        assert!(habit.changed() && !habit.changed(), "trust begins anew");
    }
}
