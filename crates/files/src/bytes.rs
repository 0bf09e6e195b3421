//! Operations on the bytes of one file: which pages of the pool they concern.

use std::ops::Range;

use rampool_wire::units::{Extent, PageIndex, push_page};

use crate::map::FileMap;
use crate::space::Space;
use crate::{MOST_BYTES, PAGE};

/// Consecutive pages of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub pages: u32,
    /// Where they are; `None`: a hole, all zero.
    pub at: Option<PageIndex>,
}

/// A page that a write changes in part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Edge {
    /// Its other bytes are those that the pool has.
    Keep(PageIndex),
    /// Its other bytes are zero.
    Zero,
}

/// Where the bytes of a write go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WritePlan {
    /// The pages, in the file's order.
    pub pages: Vec<Extent>,
    /// The first page, and the last one where that is another one, if they are not written as a whole.
    pub head: Option<Edge>,
    pub tail: Option<Edge>,
}

/// What became of a file that lost bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cleared {
    /// These bytes of a page are to be zero, and the others stay.
    pub zero: Vec<(PageIndex, Range<usize>)>,
    /// Pages to discard.
    pub freed: Vec<Extent>,
}

/// There is no room, or the file would be too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoRoom {
    Space,
    Length,
}

/// The bytes of one file.
#[derive(Debug, Default)]
pub struct Bytes {
    pub len: u64,
    map: FileMap,
    /// Those of its pages that nothing was stored in since they were taken. They are zero, which the servers
    /// need not know yet: a read may overtake the discard of what was there before.
    unwritten: FileMap,
}

impl Bytes {
    pub fn pages(&self) -> u64 {
        self.map.pages()
    }

    /// The pages with the bytes from `offset` on, and how many of those bytes there are.
    pub fn read(&self, offset: u64, len: u64) -> (Vec<Piece>, u64) {
        let end = offset.saturating_add(len).min(self.len);
        if offset >= end {
            return (Vec::new(), 0);
        }
        let mut pieces = Vec::new();
        for (mut pages, mut at) in self.written(offset / PAGE..end.div_ceil(PAGE)) {
            while pages > 0 {
                let count = u32::try_from(pages).unwrap_or(u32::MAX);
                pieces.push(Piece { pages: count, at });
                at = at.map(|at| at.offset(count.into()));
                pages -= u64::from(count);
            }
        }
        (pieces, end - offset)
    }

    pub fn write(&mut self, space: &mut Space, offset: u64, len: u64) -> Result<WritePlan, NoRoom> {
        let end = offset.checked_add(len).filter(|end| *end <= MOST_BYTES).ok_or(NoRoom::Length)?;
        if len == 0 {
            return Ok(WritePlan { pages: Vec::new(), head: None, tail: None });
        }
        let (first, last) = (offset / PAGE, (end - 1) / PAGE);
        let edge = |page: u64| {
            let (from, to) = (offset.max(page * PAGE), end.min((page + 1) * PAGE));
            if to - from == PAGE {
                return None;
            }
            // What lies beyond the end of the file is zero already.
            let there = self.len.clamp(page * PAGE, (page + 1) * PAGE);
            let keeps = page * PAGE < from.min(there) || to < there;
            Some(self.find_written(page).filter(|_| keeps).map_or(Edge::Zero, Edge::Keep))
        };
        let (head, tail) = (edge(first), if first == last { None } else { edge(last) });
        self.allocate(space, first..last + 1)?;
        self.unwritten.remove(first..last + 1);
        self.len = self.len.max(end);
        let mut pages = Vec::new();
        for (count, at) in self.map.pieces(first..last + 1) {
            let at = at.expect("no hole is left");
            (0..count).for_each(|page| push_page(&mut pages, at.offset(page)));
        }
        Ok(WritePlan { pages, head, tail })
    }

    /// The pages of a range that something was stored in; all others are zero.
    fn written(&self, range: Range<u64>) -> Vec<(u64, Option<PageIndex>)> {
        let (mut found, mut first) = (Vec::new(), range.start);
        for (count, at) in self.map.pieces(range) {
            let mut done = 0;
            for (pages, unwritten) in self.unwritten.pieces(first..first + count) {
                let at = at.filter(|_| unwritten.is_none()).map(|at| at.offset(done));
                found.push((pages, at));
                done += pages;
            }
            first += count;
        }
        found
    }

    fn find_written(&self, page: u64) -> Option<PageIndex> {
        self.map.find(page).filter(|_| self.unwritten.find(page).is_none())
    }

    /// Takes pages for what is a hole. They are zero.
    pub fn allocate(&mut self, space: &mut Space, range: Range<u64>) -> Result<(), NoRoom> {
        let mut at = range.start;
        let mut holes = Vec::new();
        for (count, there) in self.map.pieces(range) {
            if there.is_none() {
                holes.push((at, count));
            }
            at += count;
        }
        if holes.iter().map(|(_, count)| count).sum::<u64>() > space.free_pages() {
            return Err(NoRoom::Space);
        }
        for (mut at, count) in holes {
            let near = at.checked_sub(1).and_then(|before| self.map.find(before));
            let taken = space.take(count, near.map(|near| near.offset(1))).expect("there are enough");
            for run in taken {
                self.map.insert(at, run);
                self.unwritten.insert(at, run);
                at += u64::from(run.count);
            }
        }
        Ok(())
    }

    pub fn set_len(&mut self, space: &mut Space, len: u64) -> Result<Cleared, NoRoom> {
        if len > MOST_BYTES {
            return Err(NoRoom::Length);
        }
        let mut cleared = Cleared::default();
        if len < self.len {
            cleared = self.clear(space, len..self.len.next_multiple_of(PAGE));
            // Pages that were taken beyond the end go as well.
            let beyond = self.remove(len.div_ceil(PAGE)..u64::MAX);
            beyond.iter().for_each(|run| space.give(*run));
            cleared.freed.extend(beyond);
        }
        self.len = len;
        Ok(cleared)
    }

    /// Makes bytes zero: whole pages become a hole.
    pub fn clear(&mut self, space: &mut Space, range: Range<u64>) -> Cleared {
        let mut cleared = Cleared::default();
        let (whole_from, whole_to) = (range.start.div_ceil(PAGE), range.end / PAGE);
        let mut zero = |page: u64, from: u64, to: u64| {
            if from < to
                && let Some(at) = self.find_written(page)
            {
                let within = |byte: u64| usize::try_from(byte - page * PAGE).expect("within a page");
                cleared.zero.push((at, within(from)..within(to)));
            }
        };
        if whole_from > whole_to {
            zero(whole_to, range.start, range.end);
        } else {
            if !range.start.is_multiple_of(PAGE) {
                zero(range.start / PAGE, range.start, whole_from * PAGE);
            }
            if !range.end.is_multiple_of(PAGE) {
                zero(whole_to, whole_to * PAGE, range.end);
            }
            cleared.freed = self.remove(whole_from..whole_to);
            cleared.freed.iter().for_each(|run| space.give(*run));
        }
        cleared
    }

    fn remove(&mut self, range: Range<u64>) -> Vec<Extent> {
        self.unwritten.remove(range.clone());
        self.map.remove(range)
    }

    /// The file is gone.
    pub fn free(self, space: &mut Space) -> Vec<Extent> {
        let runs: Vec<Extent> = self.map.runs().collect();
        runs.iter().for_each(|run| space.give(*run));
        runs
    }

    pub fn runs(&self) -> impl Iterator<Item = Extent> {
        self.map.runs()
    }
}
