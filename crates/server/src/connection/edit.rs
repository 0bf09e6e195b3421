//! Pages of one region, changed while its lease is locked. They are made ready first: each in a frame to
//! which only the page table refers.

use crate::collect::{LINE_BYTES, ZEROES};
use crate::refused::Refused;
use crate::shared::Shared;
use rampool_lease::{FrameIndex, LeaseSpace, PageState, SpaceError, StoredPage};
use rampool_wire::elements::{Combine, Kind, combine};
use rampool_wire::frame::{MemberId, Piece, RegionId, Status, ZERO_PAGE_CRC, patched_crc};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

/// Changes pages of one region while its lease is locked.
pub(super) struct Edit<'a> {
    shared: &'a Shared,
    arena: usize,
    member: MemberId,
    region: RegionId,
    space: &'a mut LeaseSpace,
    /// Frames of pages that were replaced, for its user to release when the lease is unlocked.
    pub(super) released: Vec<FrameIndex>,
}

impl<'a> Edit<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        arena: usize,
        (member, region): (MemberId, RegionId),
        space: &'a mut LeaseSpace,
    ) -> Self {
        Self { shared, arena, member, region, space, released: Vec::new() }
    }

    /// Makes pages ready to be changed in part, and stores `whole` pages: all or nothing. Those stay the
    /// caller's with an error.
    pub(super) fn own(
        &mut self,
        in_part: impl Iterator<Item = PageIndex>,
        whole: impl Iterator<Item = (PageIndex, StoredPage)>,
    ) -> Result<(), Refused> {
        let (mut pages, mut last) = (Vec::new(), None);
        for page in in_part {
            if last.replace(page) != Some(page) && !self.is_ready(page)? {
                pages.push(page);
            }
        }
        let mut list = if pages.is_empty() { Vec::new() } else { self.copies(pages)? };
        let made = list.len();
        list.extend(whole);
        if list.is_empty() {
            return Ok(());
        }
        let extents: Vec<Extent> = list.iter().map(|(page, _)| Extent::page(*page)).collect();
        let pages: Vec<Option<StoredPage>> = list.iter().map(|(_, page)| Some(*page)).collect();
        let entered = self.space.put(self.member, self.region, &extents, &pages, &mut self.released);
        if entered.is_err() {
            let frames: Vec<FrameIndex> = list[..made].iter().map(|(_, page)| page.frame).collect();
            self.shared.store.release(&frames);
        }
        Ok(entered?)
    }

    pub(super) fn is_ready(&self, page: PageIndex) -> Result<bool, SpaceError> {
        let state = self.space.page_state(self.member, self.region, page)?;
        Ok(matches!(state, PageState::Own(page) if self.shared.store.is_writable(&page)))
    }

    /// A copy of each page, in a frame with no other reference.
    fn copies(&self, mut pages: Vec<PageIndex>) -> Result<Vec<(PageIndex, StoredPage)>, Refused> {
        pages.sort_unstable();
        pages.dedup();
        let lens = vec![u32::try_from(OS_PAGE_BYTES).expect("4096"); pages.len()];
        let (store, mut frames) = (&self.shared.store, Vec::new());
        if !store.take(self.arena, &lens, &mut frames) {
            let said = "the server's memory is full of pages on their way";
            return Err(Refused::new(Status::PoolFull, said));
        }
        let copies = pages.iter().zip(&frames).map(|(page, frame)| Ok((*page, self.copy(*page, *frame)?)));
        let copies: Result<_, Refused> = copies.collect();
        if copies.is_err() {
            store.release(&frames);
        }
        copies
    }

    fn copy(&self, page: PageIndex, frame: FrameIndex) -> Result<StoredPage, Refused> {
        let store = &self.shared.store;
        let target = store.memory(frame);
        let fill = |from: *const u8| {
            // SAFETY: a frame that was just taken, of 4096 bytes; the source is another page, which is not
            // written while the lease is locked.
            unsafe { std::ptr::copy_nonoverlapping(from, target, OS_PAGE_BYTES) };
        };
        let state =
            self.space.page_state(self.member, self.region, page).expect("the region was there a moment ago");
        let (PageState::Own(old) | PageState::Shared(old)) = state else {
            fill(ZEROES.as_ptr());
            return Ok(store.settle_plain(frame, ZERO_PAGE_CRC));
        };
        let (source, _) = self.shared.present(self.arena, &old, false)?;
        fill(store.memory(source));
        store.release(&[source]);
        Ok(store.settle_plain(frame, old.crc))
    }

    /// Carries out the staged operation on these pieces, whose bytes begin at `at` of the staging. Returns
    /// where they end.
    ///
    /// Pieces in a row that are of one page are one change of it: to look for a page and to follow its
    /// checksum takes far longer than to change a few bytes.
    pub(super) fn change(
        &mut self,
        (staging, update): (&[u8], Option<(Kind, Combine)>),
        pieces: &[Piece],
        mut at: usize,
    ) -> usize {
        for together in pieces.chunk_by(|one, next| one.page == next.page) {
            let first = &together[0];
            let mut span = first.within..first.within + first.len;
            for next in &together[1..] {
                span = span.start.min(next.within)..span.end.max(next.within + next.len);
            }
            let all = Piece { page: first.page, within: span.start, len: span.len() };
            self.patch(all, |target| {
                for piece in together {
                    let bytes = &staging[at..at + piece.len];
                    at += piece.len;
                    let target = &mut target[piece.within - span.start..][..piece.len];
                    match update {
                        None => target.copy_from_slice(bytes),
                        Some((kind, how)) => combine(kind, how, target, bytes),
                    }
                }
            });
        }
        at
    }

    /// Changes a part of a page that is ready for it.
    pub(super) fn patch(&mut self, piece: Piece, change: impl FnOnce(&mut [u8])) {
        let state = self
            .space
            .page_state(self.member, self.region, piece.page)
            .expect("the region was there a moment ago");
        let PageState::Own(page) = state else { panic!("a page that is to be changed is its region's own") };
        assert!(self.shared.store.is_writable(&page), "a page that is changed has one reference");
        self.shared.store.touch(page.frame);
        // Most pieces are small, and to clear a page for each takes longer than to change them.
        if piece.len <= LINE_BYTES {
            self.patch_in(piece, page, (&mut [0; LINE_BYTES], &mut [0; LINE_BYTES]), change);
        } else {
            self.patch_in(piece, page, (&mut [0; OS_PAGE_BYTES], &mut [0; OS_PAGE_BYTES]), change);
        }
    }

    fn patch_in(
        &mut self,
        piece: Piece,
        page: StoredPage,
        (old, new): (&mut [u8], &mut [u8]),
        change: impl FnOnce(&mut [u8]),
    ) {
        let (old, new) = (&mut old[..piece.len], &mut new[..piece.len]);
        // SAFETY: the piece is within the page; only its page table refers to the frame, and that is locked:
        // no other thread reads or writes it.
        let target = unsafe {
            std::slice::from_raw_parts_mut(self.shared.store.memory(page.frame).add(piece.within), piece.len)
        };
        old.copy_from_slice(target);
        new.copy_from_slice(target);
        change(new);
        target.copy_from_slice(new);
        let crc = patched_crc(page.crc, old, new, OS_PAGE_BYTES - piece.within - piece.len);
        self.space
            .page_changed(self.member, self.region, piece.page, crc)
            .expect("the region was there a moment ago");
    }
}
