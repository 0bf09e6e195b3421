//! Going on after the loss of servers: local pages stay usable, lost pages are poisoned on access.

use std::collections::BTreeMap;

use rampool_kernel::uffd::Reply;
use rampool_paging::cache::{Access, BatchId};
use rampool_paging::page_set::PageSet;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use super::Pager;
use crate::backing::Backing;

/// What was not in the program when the servers went.
pub(super) struct Lost {
    /// Lost pages that were not given up since.
    absent: PageSet,
    /// Pages whose bytes are still in an eviction batch.
    staged: BTreeMap<PageIndex, (BatchId, u32)>,
}

impl<B: Backing> Pager<B> {
    /// Pages that are at the servers, or on their way, are lost. From now on an access to one raises SIGBUS
    /// (EFAULT or EHWPOISON from a system call); everything that is here goes on being used, nothing leaves
    /// any more, and fresh pages are zero.
    ///
    /// Returns how many pages are lost; `None` if the kernel cannot poison them, and then nothing was
    /// changed.
    pub fn go_on_without_servers(&mut self) -> Option<u64> {
        if !self.faults.can_poison() {
            return None;
        }
        let mut lost = Lost { absent: PageSet::default(), staged: BTreeMap::new() };
        let mut pages = 0;
        self.cache.absent_content(|extent, staged| match staged {
            Some((batch, offset)) => {
                lost.staged
                    .extend(extent.pages().zip(offset..).map(|(page, offset)| (page, (batch, offset))));
            }
            None => {
                lost.absent.insert(extent);
                pages += u64::from(extent.count);
            }
        });
        self.lost = Some(lost);
        // A thread that waits for an answer asks again, and gets it from here.
        for span in self.space.spans() {
            self.faults.wake(span.start, span.end() - span.start);
        }
        Some(pages)
    }

    /// Whether the content of `page` went with the servers.
    pub(super) fn is_lost(&self, page: PageIndex) -> bool {
        self.lost.as_ref().is_some_and(|lost| lost.absent.run_at(page, 1) > 0)
    }

    pub(super) fn serve_without_servers(&mut self, page: PageIndex, address: usize, access: Access) {
        let lost = self.lost.as_mut().expect("only called then");
        if lost.absent.run_at(page, 1) > 0 {
            // Stays in the set: a page can be poisoned again, and nothing else may ever be put there.
            if let Err(errno) = self.faults.poison(address, OS_PAGE_BYTES) {
                self.breaks(|| {
                    format!("the kernel does not poison the lost page at {address:#x} (errno {errno})")
                });
            }
            self.faults.wake(address, OS_PAGE_BYTES);
            return;
        }
        let reply = match (access, lost.staged.get(&page)) {
            (Access::WriteProtected, _) => self.faults.unprotect(address, OS_PAGE_BYTES),
            (_, Some((batch, offset))) => {
                let from = self.own.batches.start_of(batch.0) + *offset as usize * OS_PAGE_BYTES;
                self.faults.install(address, from, OS_PAGE_BYTES, false, false)
            }
            (_, None) => self.faults.install(address, self.own.zeroes.start(), OS_PAGE_BYTES, false, true),
        };
        if let Reply::Unexpected(errno) = reply {
            self.breaks(|| format!("the kernel does not serve the page at {address:#x} (errno {errno})"));
        }
        if reply == Reply::Done {
            self.lost.as_mut().expect("as above").staged.remove(&page);
        } else {
            self.faults.wake(address, OS_PAGE_BYTES);
        }
    }

    /// The program gave the content of these pages up: they are lost no longer.
    pub(super) fn give_up(&mut self, extent: Extent) {
        if let Some(lost) = &mut self.lost {
            lost.absent.remove(extent);
            for page in extent.pages() {
                lost.staged.remove(&page);
            }
        }
    }
}
