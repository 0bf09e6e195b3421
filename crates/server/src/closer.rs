//! Closes what other users have handed over, or may have. What a descriptor is of, and how long the kernel
//! takes to close it, is their choice: a socket that lingers, a file of a file system of theirs. No shard
//! waits for that.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

/// The channel to the thread that closes. The thread starts with the first descriptor, and is never joined.
#[derive(Default)]
pub(super) struct Closer(Mutex<Option<Sender<OwnedFd>>>);

impl Closer {
    pub(super) fn close(&self, fd: OwnedFd) {
        // Sockets do not linger, then. It fails for all else.
        let _ = socket2::SockRef::from(&fd).set_linger(None);
        let mut way = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if way.is_none() {
            let (sender, closed) = channel::<OwnedFd>();
            let work = move || closed.into_iter().for_each(drop);
            if let Err(error) = std::thread::Builder::new().name("rampool-closer".to_owned()).spawn(work) {
                tracing::warn!(%error, "cannot start a thread that closes clients' descriptors");
                return;
            }
            *way = Some(sender);
        }
        // The thread lives as long as there is a sender.
        let _ = way.as_ref().map(|way| way.send(fd));
    }
}
