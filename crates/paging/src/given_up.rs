//! What a program gives up of memory that is about to be taken over.
//!
//! The kernel tells of memory from its registration on; the cache knows it from its adoption on. Pages given
//! up between the two may be mapped still, and will vanish: the adoption says which.
//!
//! Places are addresses, as numbers of pages.

use rampool_wire::units::Extent;

use crate::page_set::PageSet;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct GivenUp {
    places: PageSet,
}

impl GivenUp {
    /// The program gave up what is here, which is registered and not adopted.
    pub fn insert(&mut self, here: Extent) {
        self.places.insert(here);
    }

    /// Nothing is here any more.
    pub fn unmapped(&mut self, here: Extent) {
        self.places.remove(here);
    }

    /// The mapping of all of `old` is at `new` now, which is as long.
    pub fn moved(&mut self, old: Extent, new: Extent) {
        let parts: Vec<Extent> = self.places.parts_of(old).collect();
        self.places.remove(old);
        for part in parts {
            self.places.insert(Extent::new(new.first.offset(part.first.0 - old.first.0), part.count));
        }
    }

    /// What is here is adopted as `pages`: those of them that were given up before.
    pub fn adopted(&mut self, here: Extent, pages: Extent) -> Vec<Extent> {
        let part = |part: Extent| Extent::new(pages.first.offset(part.first.0 - here.first.0), part.count);
        let given_up = self.places.parts_of(here).map(part).collect();
        self.places.remove(here);
        given_up
    }
}

#[cfg(test)]
mod tests {
    use rampool_wire::units::PageIndex;

    use super::*;

    fn e(first: u64, count: u32) -> Extent {
        Extent::new(PageIndex(first), count)
    }

    #[test]
    fn what_was_given_up_is_told_once_and_by_the_numbers_of_the_adopted_pages() {
        let mut given_up = GivenUp::default();
        given_up.insert(e(100, 10));
        given_up.insert(e(200, 10));
        assert_eq!(given_up.adopted(e(105, 50), e(7, 50)), [e(7, 5)]);
        assert_eq!(given_up.adopted(e(105, 50), e(7, 50)), []);
        assert_eq!(given_up.adopted(e(90, 20), e(0, 20)), [e(10, 5)]);
        given_up.unmapped(e(204, 2));
        assert_eq!(given_up.adopted(e(200, 10), e(0, 10)), [e(0, 4), e(6, 4)]);
    }

    #[test]
    fn it_goes_where_its_mapping_goes() {
        let mut given_up = GivenUp::default();
        given_up.insert(e(100, 4));
        given_up.insert(e(110, 4));
        given_up.moved(e(102, 10), e(205, 10));
        assert_eq!(given_up.adopted(e(90, 40), e(0, 40)), [e(10, 2), e(22, 2)]);
        assert_eq!(given_up.adopted(e(200, 20), e(7, 20)), [e(12, 2), e(20, 2)]);
    }
}
