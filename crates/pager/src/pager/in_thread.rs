//! A fault served by the thread that met it, instead of by the pager's.

use std::time::Instant;

use rampool_paging::cache::{Access, Input};
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};

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
    /// Called by the thread that met a fault. `again`: so it did before at this address, so the kernel may
    /// have refused to map the page until an event has been read.
    pub(crate) fn fault_here(
        &mut self,
        address: usize,
        write: bool,
        again: bool,
        supervisor: &mut impl Supervisor<B>,
    ) -> Next {
        if again {
            self.serve_events(supervisor);
        }
        while self.collects() {
            self.let_changes_end();
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
        self.waits.begin(Instant::now());
        self.stats.fault(access);
        if again && access == Access::WriteProtected {
            // The signal does not say whether the page is closed to writes or gone: what was given up may go
            // late.
            self.tell(Input::Fault { page, access: Access::Write });
        }
        self.tell(Input::Fault { page, access });
        self.end_if_broken(supervisor);
        if self.cache.is_wanted(page) { Next::Wait(page) } else { Next::Repeat }
    }

    /// Handles the servers' events until `page` is present. Returns whether it is, and whether there were
    /// any.
    pub(crate) fn await_here(
        &mut self,
        page: PageIndex,
        supervisor: &mut impl Supervisor<B>,
    ) -> (bool, bool) {
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

    /// Appends the descriptors that become ready for the servers' events, and returns when to poll even if
    /// none does.
    pub(crate) fn backing_fds(&self, fds: &mut Vec<libc::pollfd>) -> Option<Instant> {
        self.backing.poll_fds(fds);
        self.backing.next_deadline()
    }
}
