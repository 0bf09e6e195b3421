//! Which unused registration is ended first, when the allowance is exceeded.

use std::collections::BTreeSet;
use std::fmt::Debug;

/// An order of the unused registrations. Each is named by the index of its place.
pub trait UnpinPolicy: Debug {
    /// This registration, of this many pages, is unused from now on. The call may be repeated; the last one
    /// counts.
    fn unused(&mut self, index: u32, pages: u64);
    /// It is used again, or ended. Does nothing if it was not unused.
    fn taken(&mut self, index: u32);
    /// The one to end first.
    fn victim(&mut self) -> Option<u32>;
}

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Links {
    before: u32,
    after: u32,
    listed: bool,
}

/// The one that has been unused for longest: a doubly linked list, every step of which takes constant time.
#[derive(Debug, Default)]
pub struct LeastRecentlyUsed {
    links: Vec<Links>,
    /// The one unused for longest, and the one used last.
    ends: Option<(u32, u32)>,
}

impl UnpinPolicy for LeastRecentlyUsed {
    fn unused(&mut self, index: u32, _pages: u64) {
        self.taken(index);
        if self.links.len() <= index as usize {
            self.links.resize(index as usize + 1, Links { before: NONE, after: NONE, listed: false });
        }
        let newest = self.ends.map_or(NONE, |(_, newest)| newest);
        self.links[index as usize] = Links { before: newest, after: NONE, listed: true };
        self.ends = Some(match self.ends {
            Some((oldest, newest)) => {
                self.links[newest as usize].after = index;
                (oldest, index)
            }
            None => (index, index),
        });
    }

    fn taken(&mut self, index: u32) {
        let Some(Links { before, after, listed: true }) = self.links.get(index as usize).copied() else {
            return;
        };
        self.links[index as usize].listed = false;
        let (mut oldest, mut newest) = self.ends.expect("one is listed");
        match before {
            NONE => oldest = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => newest = before,
            after => self.links[after as usize].before = before,
        }
        self.ends = (oldest != NONE).then_some((oldest, newest));
    }

    fn victim(&mut self) -> Option<u32> {
        self.ends.map(|(oldest, _)| oldest)
    }
}

/// GreedyDual-Size (Cao, Irani): first the registration whose pages cost least to register again, for each
/// page that it pins; older ones before newer ones of equal worth.
///
/// A registration costs a kernel call and a share for each page. That share is the same for each page, so
/// registrations differ by the call divided by the pages: worth = age + 1/pages, where the age is the worth
/// of the last victim. Large registrations leave before small ones that were used as recently.
#[derive(Debug, Default)]
pub struct GreedyDualSize {
    /// (worth, turn, index)
    order: BTreeSet<(u64, u64, u32)>,
    /// By index.
    places: Vec<Option<(u64, u64)>>,
    age: u64,
    turn: u64,
}

/// The worth of a registration of one page.
const CALL_WORTH: u64 = 1 << 20;

impl UnpinPolicy for GreedyDualSize {
    fn unused(&mut self, index: u32, pages: u64) {
        self.taken(index);
        if self.places.len() <= index as usize {
            self.places.resize(index as usize + 1, None);
        }
        self.turn += 1;
        let worth = self.age + CALL_WORTH / pages.max(1);
        self.places[index as usize] = Some((worth, self.turn));
        self.order.insert((worth, self.turn, index));
    }

    fn taken(&mut self, index: u32) {
        if let Some((worth, turn)) = self.places.get_mut(index as usize).and_then(Option::take) {
            self.order.remove(&(worth, turn, index));
        }
    }

    fn victim(&mut self) -> Option<u32> {
        let (worth, _, index) = *self.order.first()?;
        self.age = worth;
        Some(index)
    }
}
