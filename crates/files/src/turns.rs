//! What may begin: no page is read or stored while it is being stored, or stored while it is being read.

use std::collections::BTreeMap;

use rampool_wire::units::Extent;

/// What an operation does with its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Read,
    /// Stores or discards.
    Write,
}

/// Operations that have not ended, in the order in which they came. One begins when no earlier one uses its
/// pages in a way that excludes it.
#[derive(Debug, Default)]
pub struct Turns {
    next: u64,
    waiting: BTreeMap<u64, Operation>,
}

#[derive(Debug)]
struct Operation {
    access: Access,
    pages: Vec<Extent>,
    begun: bool,
}

impl Turns {
    /// A new operation: its number, and whether it may begin. If not, [`Turns::leave`] tells when.
    pub fn enter(&mut self, access: Access, pages: Vec<Extent>) -> (u64, bool) {
        let number = self.next;
        self.next += 1;
        let begun = self.is_free(number, access, &pages);
        self.waiting.insert(number, Operation { access, pages, begun });
        (number, begun)
    }

    /// An operation has ended. Those that may begin now, in order.
    ///
    /// # Panics
    /// If it has not begun.
    pub fn leave(&mut self, number: u64) -> Vec<u64> {
        let ended = self.waiting.remove(&number).expect("it has not ended before");
        assert!(ended.begun, "what ends has begun");
        let waiting = || self.waiting.range(number..).filter(|(_, operation)| !operation.begun);
        let free = waiting().filter(|(n, of)| self.is_free(**n, of.access, &of.pages));
        let free: Vec<u64> = free.map(|(number, _)| *number).collect();
        for number in &free {
            self.waiting.get_mut(number).expect("found just now").begun = true;
        }
        free
    }

    fn is_free(&self, number: u64, access: Access, pages: &[Extent]) -> bool {
        self.waiting.range(..number).all(|(_, earlier)| {
            let excludes = access == Access::Write || earlier.access == Access::Write;
            !(excludes && earlier.pages.iter().any(|a| pages.iter().any(|b| overlap(*a, *b))))
        })
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

fn overlap(a: Extent, b: Extent) -> bool {
    a.first < b.end() && b.first < a.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rampool_wire::units::PageIndex;

    fn pages(first: u64, count: u32) -> Vec<Extent> {
        vec![Extent::new(PageIndex(first), count)]
    }

    #[test]
    fn who_comes_later_waits_for_the_same_pages() {
        let mut turns = Turns::default();
        let (read, begun) = turns.enter(Access::Read, pages(0, 4));
        assert!(begun);
        assert!(turns.enter(Access::Read, pages(3, 4)).1, "two read");
        let (write, begun) = turns.enter(Access::Write, pages(2, 1));
        assert!(!begun, "it is being read");
        let (late, begun) = turns.enter(Access::Read, pages(2, 1));
        assert!(!begun, "a store before it waits");
        assert!(turns.enter(Access::Write, pages(100, 1)).1, "other pages");
        assert_eq!(turns.leave(read), [write]);
        assert_eq!(turns.leave(write), [late]);
        assert_eq!(turns.leave(late), []);
    }
}
