//! What a thread of a server polls: its doorbell, its listeners, and connections by their tokens; and for how
//! long it looks for more before it sleeps.

use rampool_net::adaptive_spin::AdaptiveSpin;
use rampool_net::transport::Listener;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Tokens beyond those of connections.
const DOORBELL: u64 = u64::MAX;
const FIRST_LISTENER: u64 = u64::MAX - 1024;
/// Events that are taken at a time.
const MOST_EVENTS: usize = 256;

/// What has something to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ready {
    Doorbell,
    Listener(usize),
    Connection(u64),
}

pub(crate) struct PollSet {
    epoll: OwnedFd,
    listeners: Vec<Listener>,
    /// No descriptor is left for one more connection: the listeners are not polled for now.
    is_deaf: bool,
}

/// What a wait has brought. It stays with its thread.
pub(crate) struct Events(Vec<epoll::Event>);

impl Events {
    pub(crate) fn new() -> Self {
        Self(Vec::with_capacity(MOST_EVENTS))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Ready> {
        self.0.iter().map(|event| match event.data.u64() {
            DOORBELL => Ready::Doorbell,
            token if token >= FIRST_LISTENER => {
                Ready::Listener(usize::try_from(token - FIRST_LISTENER).expect("few listeners"))
            }
            token => Ready::Connection(token),
        })
    }
}

impl PollSet {
    pub(crate) fn new(doorbell: &OwnedFd, listeners: Vec<Listener>) -> Result<Self, rustix::io::Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, doorbell, epoll::EventData::new_u64(DOORBELL), epoll::EventFlags::IN)?;
        for (token, listener) in (FIRST_LISTENER..).zip(&listeners) {
            epoll::add(&epoll, listener, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?;
        }
        Ok(Self { epoll, listeners, is_deaf: false })
    }

    pub(crate) fn listener(&self, index: usize) -> &Listener {
        &self.listeners[index]
    }

    /// Connections are accepted from now on, or stay in the kernel until this is called again: it would
    /// report them again and again.
    pub(crate) fn listen(&mut self, listens: bool) {
        if self.is_deaf != listens {
            return;
        }
        self.is_deaf = !listens;
        let flags = if listens { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        for (token, listener) in (FIRST_LISTENER..).zip(&self.listeners) {
            epoll::modify(&self.epoll, listener, epoll::EventData::new_u64(token), flags)
                .expect("a polled descriptor can be polled otherwise");
        }
    }

    /// # Errors
    /// Where others have taken what the kernel has for this.
    pub(crate) fn add(
        &self,
        fd: impl AsFd,
        token: u64,
        flags: epoll::EventFlags,
    ) -> Result<(), rustix::io::Errno> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)
    }

    /// # Panics
    /// If it is not in the set.
    pub(crate) fn modify(&self, fd: impl AsFd, token: u64, flags: epoll::EventFlags) {
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), flags)
            .expect("a polled descriptor can be polled otherwise");
    }

    /// # Errors
    /// Where it is not in the set.
    pub(crate) fn remove(&self, fd: impl AsFd) -> Result<(), rustix::io::Errno> {
        epoll::delete(&self.epoll, fd)
    }

    /// Waits for that long at most.
    pub(crate) fn wait(&self, events: &mut Events, timeout: Duration) {
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(1),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        events.0.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut events.0), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("polling failed: {error}"),
        }
    }
}

/// For how long a thread has had nothing to do, and whether it looks for more or sleeps.
pub(crate) struct Idle {
    spin: AdaptiveSpin,
    since: Option<Instant>,
}

impl Idle {
    pub(crate) fn new(spin: Duration) -> Self {
        Self { spin: AdaptiveSpin::new(spin), since: None }
    }

    fn waited(&self, now: Instant) -> Duration {
        self.since.map_or(Duration::ZERO, |since| now.duration_since(since))
    }

    /// Whether it looks again rather than sleeping.
    pub(crate) fn looks(&self, now: Instant) -> bool {
        self.since.is_none() || self.waited(now) < self.spin.time()
    }

    /// It sleeps now.
    pub(crate) fn sleeps(&mut self) {
        self.spin.sleeps();
    }

    /// It has looked, or slept, for nothing.
    pub(crate) fn found_nothing(&mut self, now: Instant, looked: bool) {
        let waited = self.waited(now);
        self.since = self.since.or(Some(now));
        if looked {
            self.spin.look_again(waited, false);
        }
    }

    pub(crate) fn found(&mut self) {
        if let Some(since) = self.since.take() {
            self.spin.waited(since.elapsed());
        }
    }
}

/// A token's place among its thread's connections.
pub(crate) fn slot_of(token: u64) -> usize {
    usize::try_from(token & u64::from(u32::MAX)).expect("32 bits")
}

/// `generation` tells a new connection of this place from its predecessor.
pub(crate) fn token(index: usize, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::try_from(index).expect("fewer than 2^32 connections")
}

/// Whether a connection could not be accepted for lack of a resource, so that it waits in the kernel. After
/// other errors it is gone.
pub(super) fn is_want(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}
