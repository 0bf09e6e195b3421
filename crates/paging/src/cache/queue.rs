//! Queues of resident pages, linked through the page array: O(1) at both ends and in the middle, no memory of
//! their own.

use super::page::{Page, State};
use crate::table::Table;

const NIL: u32 = u32::MAX;

/// First in, first out. The head is the oldest page.
#[derive(Clone, Debug)]
pub(super) struct Queue {
    id: u32,
    head: u32,
    tail: u32,
    len: u64,
}

impl Queue {
    pub fn new(id: u32) -> Self {
        Self { id, head: NIL, tail: NIL, len: 0 }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn head(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    pub fn push_back(&mut self, pages: &mut Table<Page>, index: u32) {
        let page = &mut pages[index as usize];
        page.set_queue(self.id);
        page.a = self.tail;
        page.b = NIL;
        match self.tail {
            NIL => self.head = index,
            tail => pages[tail as usize].b = index,
        }
        self.tail = index;
        self.len += 1;
    }

    pub fn push_front(&mut self, pages: &mut Table<Page>, index: u32) {
        let page = &mut pages[index as usize];
        page.set_queue(self.id);
        page.a = NIL;
        page.b = self.head;
        match self.head {
            NIL => self.tail = index,
            head => pages[head as usize].a = index,
        }
        self.head = index;
        self.len += 1;
    }

    pub fn remove(&mut self, pages: &mut Table<Page>, index: u32) {
        let Page { a: before, b: after, .. } = pages[index as usize];
        match before {
            NIL => self.head = after,
            before => pages[before as usize].b = after,
        }
        match after {
            NIL => self.tail = before,
            after => pages[after as usize].a = before,
        }
        self.len -= 1;
    }

    /// Walks the whole queue and returns its length.
    ///
    /// # Panics
    /// When the links are broken or a page does not belong here.
    pub fn check(&self, pages: &Table<Page>) -> u64 {
        let (mut before, mut at, mut len) = (NIL, self.head, 0);
        while at != NIL {
            let page = &pages[at as usize];
            assert_eq!(page.state(), State::Resident, "page {at} in queue {}", self.id);
            assert_eq!(page.queue(), self.id, "page {at} stands in another queue");
            assert_eq!(page.a, before, "page {at} links back wrongly");
            (before, at, len) = (at, page.b, len + 1);
        }
        assert_eq!(before, self.tail, "queue {} ends elsewhere", self.id);
        assert_eq!(len, self.len, "queue {} counts wrongly", self.id);
        len
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_queue_keeps_the_order_of_a_deque(ops in prop::collection::vec((0u32..32, any::<bool>()), 0..200)) {
            let mut pages = Table::default();
            pages.grow(32, Page::UNMANAGED);
            let mut queue = Queue::new(1);
            let mut model: VecDeque<u32> = VecDeque::new();
            for (index, front) in ops {
                if let Some(at) = model.iter().position(|&i| i == index) {
                    model.remove(at);
                    queue.remove(&mut pages, index);
                    pages[index as usize].set_state(State::Remote);
                } else {
                    pages[index as usize].set_state(State::Resident);
                    if front {
                        model.push_front(index);
                        queue.push_front(&mut pages, index);
                    } else {
                        model.push_back(index);
                        queue.push_back(&mut pages, index);
                    }
                }
                prop_assert_eq!(queue.head(), model.front().copied());
                prop_assert_eq!(queue.check(&pages), model.len() as u64);
            }
            while let Some(index) = queue.head() {
                prop_assert_eq!(model.pop_front(), Some(index));
                queue.remove(&mut pages, index);
            }
            prop_assert!(model.is_empty());
        }
    }
}
