//! A fault served by the thread that met it, instead of by the pager's.

use std::time::Instant;

use rampool_proto::cache::{Access, Input};
use rampool_proto::units::{OS_PAGE_BYTES, PageIndex};

use super::{Pager, Supervisor};
use crate::backing::Backing;

/// What the thread does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// The page is not managed, or lost.
    Foreign,
    /// The access shall be repeated.
    Repeat,
    /// The page is on its way: wait until the cache does not count it as wanted.
    Wait(PageIndex),
}

impl<B: Backing> Pager<B> {
    /// Called by the thread that met a fault. `again`: so it did before at this address, so the kernel may have refused to map the page until an event has
    /// been read.
    pub(crate) fn fault_here(&mut self, address: usize, write: bool, again: bool, supervisor: &mut impl Supervisor<B>) -> Next {
        if again {
            self.serve_events(supervisor);
        }
        let address = address & !(OS_PAGE_BYTES - 1);
        let Some(page) = self.space.page_at(address) else { return Next::Foreign };
        let access = match (self.cache.is_resident(page), write) {
            // Another thread's fault brought it meanwhile.
            (true, false) if !again => return Next::Repeat,
            (true, true) => Access::WriteProtected,
            (_, true) => Access::Write,
            (_, false) => Access::Read,
        };
        if self.is_lost(page) {
            // The SIGBUS is the program's.
            return Next::Foreign;
        }
        if self.lost.is_some() {
            self.serve_without_servers(page, address, access);
            return Next::Repeat;
        }
        self.fault_started = Some(Instant::now());
        self.stats.fault(access);
        self.tell(Input::Fault { page, access });
        if self.cache.is_wanted(page) { Next::Wait(page) } else { Next::Repeat }
    }

    /// Handles what the servers have to say, until `page` is there. Whether it is, and whether there was anything.
    pub(crate) fn await_here(&mut self, page: PageIndex, supervisor: &mut impl Supervisor<B>) -> (bool, bool) {
        let mut any = false;
        loop {
            if self.lost.is_some() || !self.cache.is_wanted(page) {
                return (true, any);
            }
            if !self.serve_backing_event(supervisor) {
                return (false, any);
            }
            any = true;
        }
    }

    /// Appends what becomes ready when the servers have something to say; and when to look even if it does not.
    pub(crate) fn backing_fds(&self, fds: &mut Vec<libc::pollfd>) -> Option<Instant> {
        self.backing.poll_fds(fds);
        self.backing.next_deadline()
    }
}
