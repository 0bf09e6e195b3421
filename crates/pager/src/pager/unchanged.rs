//! Which pages leave as they came: their fingerprints are those of what was stored last.
//!
//! ```text
//!   leaves, open to writes --> fingerprint --same as stored last--> MovedUnchanged: the servers' copy is good
//!                                          `--another, or none----> Moved --Store--> the one that was stored last
//! ```
//!
//! A fingerprint counts from the `Store` on that carries its page: a page that returns from staging before
//! was never at the servers. Eight bytes a page.

use rampool_paging::fingerprint::{Fingerprint, FingerprintKey};
use rampool_paging::table::Table;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use rampool_net::key::random_bytes;

#[derive(Debug)]
pub(super) struct Unchanged {
    key: FingerprintKey,
    /// By page: of what was stored last.
    stored: Table<Option<Fingerprint>>,
    /// Fingerprints by batch and offset in it, where they were asked for.
    leaving: Vec<Vec<Option<Fingerprint>>>,
}

impl Unchanged {
    pub fn new(batches: u32, batch_pages: u32) -> Self {
        Self {
            key: FingerprintKey::new(&random_bytes()),
            stored: Table::default(),
            leaving: vec![vec![None; batch_pages as usize]; batches as usize],
        }
    }

    /// A batch begins.
    pub fn begin(&mut self, batch: u32, pages: usize) {
        let leaving = &mut self.leaving[batch as usize];
        leaving.clear();
        leaving.resize(pages, None);
    }

    /// `page`, which was open to writes, has left to this place in a batch. Whether it holds what was stored
    /// last.
    pub fn leaves(
        &mut self,
        batch: u32,
        offset: usize,
        page: PageIndex,
        bytes: &[u8; OS_PAGE_BYTES],
    ) -> bool {
        let fingerprint = Some(self.key.of(bytes));
        self.leaving[batch as usize][offset] = fingerprint;
        usize::try_from(page.0).is_ok_and(|index| self.stored.get(index).copied().flatten() == fingerprint)
    }

    /// Pages of a batch are sent to the servers: `(extent, offset in the batch in pages)`.
    pub fn store(&mut self, batch: u32, pages: &[(Extent, u32)]) {
        for (extent, offset) in pages {
            let first = usize::try_from(extent.first.0).expect("an index space fits");
            let (count, offset) = (extent.count as usize, *offset as usize);
            self.stored.grow(first + count, None);
            for (index, fingerprint) in (first..).zip(&self.leaving[batch as usize][offset..offset + count]) {
                self.stored[index] = *fingerprint;
            }
        }
    }

    /// The servers' content of these pages was not stored from here.
    pub fn forget(&mut self, extent: Extent) {
        let first = usize::try_from(extent.first.0).expect("an index space fits").min(self.stored.len());
        let end = (first + extent.count as usize).min(self.stored.len());
        self.stored.change(first..end, |_, fingerprint| *fingerprint = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_unchanged_once_it_was_stored_and_until_it_is_forgotten() {
        let mut unchanged = Unchanged::new(2, 4);
        let (page, other) = (PageIndex(7), PageIndex(8));
        let bytes = |fill: u8| [fill; OS_PAGE_BYTES];
        unchanged.begin(0, 4);
        assert!(!unchanged.leaves(0, 2, page, &bytes(1)), "nothing was stored yet");
        unchanged.begin(1, 1);
        assert!(!unchanged.leaves(1, 0, page, &bytes(1)), "it came back before it was stored");
        unchanged.store(1, &[(Extent::page(page), 0)]);
        unchanged.begin(0, 2);
        assert!(unchanged.leaves(0, 0, page, &bytes(1)));
        assert!(!unchanged.leaves(0, 1, other, &bytes(1)), "another page");
        unchanged.begin(1, 1);
        assert!(!unchanged.leaves(1, 0, page, &bytes(2)));
        unchanged.store(1, &[(Extent::page(page), 0)]);
        unchanged.begin(0, 1);
        assert!(!unchanged.leaves(0, 0, page, &bytes(1)), "what was stored before does not count");
        assert!(unchanged.leaves(0, 0, page, &bytes(2)));
        unchanged.begin(1, 1);
        unchanged.store(1, &[(Extent::page(page), 0)]);
        unchanged.begin(0, 1);
        assert!(!unchanged.leaves(0, 0, page, &bytes(2)), "it was stored unseen");
        unchanged.store(0, &[(Extent::page(page), 0)]);
        unchanged.forget(Extent::new(PageIndex(0), 100));
        assert!(!unchanged.leaves(0, 0, page, &bytes(2)));
    }
}
