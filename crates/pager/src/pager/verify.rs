//! Checks on request (`rampool run --verify`): every page returns as it left.
//!
//! A fingerprint is kept of each page that leaves. It is compared on every way back: with what a server sent,
//! with what a batch kept, with what leaves again without having been written, and with zeroes that are about
//! to be put where content was. A page whose content was discarded has none; one that a forked child took
//! over gets one when it is first seen. Eight bytes a page, and one read of each page each way.

use rampool_paging::fingerprint::{Fingerprint, FingerprintKey};
use rampool_paging::table::Table;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use rampool_net::key::random_bytes;

#[derive(Debug)]
pub(super) struct Verify {
    key: FingerprintKey,
    /// By page: of what it held when it last left.
    left: Table<Option<Fingerprint>>,
}

impl Verify {
    pub fn new() -> Self {
        Self { key: FingerprintKey::new(&random_bytes()), left: Table::default() }
    }

    /// `page` has left with these bytes. `written`: they may be other ones than when it left before.
    ///
    /// # Errors
    /// They are other ones though they were not written.
    pub fn leaves(
        &mut self,
        page: PageIndex,
        bytes: &[u8; OS_PAGE_BYTES],
        written: bool,
    ) -> Result<(), String> {
        let fingerprint = self.key.of(bytes);
        let before = self.entry(page).replace(fingerprint);
        if !written && before.is_some_and(|before| before != fingerprint) {
            return Err(format!(
                "{page} was not written since it came, and leaves with other bytes than it left with before"
            ));
        }
        Ok(())
    }

    /// `page` is about to return with these bytes.
    ///
    /// # Errors
    /// They are not those that it left with.
    pub fn comes(&mut self, page: PageIndex, bytes: &[u8; OS_PAGE_BYTES], from: &str) -> Result<(), String> {
        let fingerprint = self.key.of(bytes);
        let left = self.entry(page).get_or_insert(fingerprint);
        if *left == fingerprint {
            Ok(())
        } else {
            Err(format!("{page} comes back from {from} with other bytes than it left with"))
        }
    }

    /// `page` is about to be filled with zeroes.
    ///
    /// # Errors
    /// It left with content, which was not discarded.
    pub fn comes_as_zeroes(&mut self, extent: Extent) -> Result<(), String> {
        match extent.pages().find(|page| self.entry(*page).is_some()) {
            None => Ok(()),
            Some(page) => Err(format!(
                "{page} is to be filled with zeroes, but left with content that the program has not given up"
            )),
        }
    }

    /// The content of these pages is discarded.
    pub fn forget(&mut self, extent: Extent) {
        let first = usize::try_from(extent.first.0).expect("an index space fits").min(self.left.len());
        let end = (first + extent.count as usize).min(self.left.len());
        self.left.change(first..end, |_, fingerprint| *fingerprint = None);
    }

    fn entry(&mut self, page: PageIndex) -> &mut Option<Fingerprint> {
        let index = usize::try_from(page.0).expect("an index space fits");
        self.left.grow(index + 1, None);
        &mut self.left[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: [u8; OS_PAGE_BYTES] = [7; OS_PAGE_BYTES];
    const OTHERS: [u8; OS_PAGE_BYTES] = [8; OS_PAGE_BYTES];

    #[test]
    fn a_page_comes_back_as_it_left_or_is_told() {
        let mut verify = Verify::new();
        let page = PageIndex(1000);
        assert_eq!(verify.comes_as_zeroes(Extent::page(page)), Ok(()));
        assert_eq!(verify.leaves(page, &BYTES, true), Ok(()));
        assert_eq!(verify.comes(page, &BYTES, "a server"), Ok(()));
        assert!(verify.comes(page, &OTHERS, "a server").is_err());
        assert!(verify.comes_as_zeroes(Extent::new(PageIndex(990), 20)).is_err());
        assert_eq!(verify.leaves(page, &BYTES, false), Ok(()));
        assert_eq!(verify.leaves(page, &OTHERS, true), Ok(()));
        assert!(verify.leaves(page, &BYTES, false).is_err());
    }

    #[test]
    fn what_was_given_up_is_not_missed_and_what_was_taken_over_is_learned() {
        let mut verify = Verify::new();
        let page = PageIndex(3);
        assert_eq!(verify.comes(page, &BYTES, "a server"), Ok(()));
        assert!(verify.comes(page, &OTHERS, "a server").is_err());
        verify.forget(Extent::new(PageIndex(0), 4000));
        assert_eq!(verify.comes_as_zeroes(Extent::page(page)), Ok(()));
        assert_eq!(verify.leaves(page, &OTHERS, false), Ok(()));
    }
}
