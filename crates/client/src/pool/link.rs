//! A link to a server, on which frames say when they have left.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;

use rampool_net::transport::Link;

pub(super) type ServerLink = Link<Option<Departure>>;

/// Tells that a frame has left this process (or its link is gone): the pages of a store are not read any
/// more.
pub(super) struct Departure {
    pub request: u64,
    pub departed: Rc<RefCell<Vec<u64>>>,
}

impl Drop for Departure {
    fn drop(&mut self) {
        self.departed.borrow_mut().push(self.request);
    }
}

/// What to sleep on for a link's sake, and whether for room to write as well.
pub(super) fn watched(link: &ServerLink) -> (BorrowedFd<'_>, bool) {
    // A socket that carries nothing but doorbells has room to write: a thread that waits for that does not
    // sleep.
    let stays_awake = !link.may_sleep(true);
    if stays_awake { (link.socket(), true) } else { (link.as_fd(), link.waits_for_room()) }
}
