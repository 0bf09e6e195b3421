//! The events that a rank waits for, and the thread that each of them wakes.
//!
//! ```text
//!   all ---- doorbell the service thread shall look again
//!       ---- faults   userfaultfd
//!       ---- lines -- connections to other ranks, datagrams
//!                  -- nudge   the thread that sleeps on `lines` shall look at its slot
//! ```
//! The service thread sleeps on `all`. A thread of the program that waits for a message polls `lines` itself
//! at first, then sleeps on it: the message wakes its recipient directly, without a detour through another
//! thread. Meanwhile `lines` is switched off in `all`, so that no other thread is woken. Switching it on also
//! checks whether something is there already (`EPOLL_CTL_MOD` does that), so no event in between is missed.
//!
//! A thread that polls few connections over TCP makes those quiet instead ([`super::line::Line::set_quiet`]):
//! that costs half as much, and the kernel does not go through the two sets for each message. Where the same
//! answer ends such a wait again and again, it costs nothing: the answer stays in the socket, and the next
//! bytes wake the thread that sleeps then ([`super::line::Line::rest`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use rampool_sharing::Rank;

const DOORBELL: u64 = 0;
const FAULTS: u64 = 1;
const LINES: u64 = 2;
/// In `lines`; smaller numbers are ranks.
const DATAGRAMS: u64 = 1 << 32;
const NUDGE: u64 = (1 << 32) + 1;
/// Events taken at once. The rest comes next time.
const EVENTS: usize = 64;

/// See the module.
pub(super) struct Watch {
    all: OwnedFd,
    lines: OwnedFd,
    doorbell: OwnedFd,
    nudge: OwnedFd,
}

/// Events that are ready.
#[derive(Default)]
pub(super) struct Ready {
    pub faults: bool,
    pub datagrams: bool,
    pub lines: Vec<Rank>,
    events: Vec<epoll::Event>,
}

impl Watch {
    /// # Errors
    /// If there are too many descriptors.
    pub fn new(faults: BorrowedFd<'_>, datagrams: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (doorbell, nudge) = (eventfd(0, flags)?, eventfd(0, flags)?);
        let (all, lines) =
            (epoll::create(epoll::CreateFlags::CLOEXEC)?, epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let add = |to: &OwnedFd, fd: BorrowedFd<'_>, key| {
            epoll::add(to, fd, epoll::EventData::new_u64(key), epoll::EventFlags::IN)
        };
        add(&all, doorbell.as_fd(), DOORBELL)?;
        add(&all, faults, FAULTS)?;
        add(&all, lines.as_fd(), LINES)?;
        add(&lines, nudge.as_fd(), NUDGE)?;
        if let Some(datagrams) = datagrams {
            add(&lines, datagrams, DATAGRAMS)?;
        }
        Ok(Self { all, lines, doorbell, nudge })
    }

    /// # Errors
    /// If there are too many descriptors.
    pub fn add_line(&self, rank: Rank, line: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.lines, line, epoll::EventData::new_u64(rank.0.into()), epoll::EventFlags::IN)?)
    }

    /// Whether to report, too, when the connection takes more.
    pub fn set_backlog(&self, rank: Rank, line: BorrowedFd<'_>, backlog: bool) {
        let interest =
            if backlog { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        let changed = epoll::modify(&self.lines, line, epoll::EventData::new_u64(rank.0.into()), interest);
        assert!(changed.is_ok(), "a watched connection could not be changed: {changed:?}");
    }

    /// The connection is no longer used.
    pub fn remove_line(&self, line: BorrowedFd<'_>) {
        let removed = epoll::delete(&self.lines, line);
        assert!(removed.is_ok(), "a watched connection could not be removed: {removed:?}");
    }

    /// Whether messages wake the service thread.
    pub fn set_lines(&self, on: bool) {
        let interest = if on { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let changed = epoll::modify(&self.all, &self.lines, epoll::EventData::new_u64(LINES), interest);
        assert!(changed.is_ok(), "the watched connections could not be changed: {changed:?}");
    }

    /// Wakes the service thread.
    pub fn ring(&self) {
        // It can only fail if the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes());
    }

    /// The thread that sleeps in [`Watch::wait_lines`] returns, now or when it gets there, until
    /// [`Watch::end_nudge`].
    pub fn nudge(&self) {
        let _ = rustix::io::write(&self.nudge, &1_u64.to_ne_bytes());
    }

    pub fn end_nudge(&self) {
        let _ = rustix::io::read(&self.nudge, &mut [0; 8]);
    }

    /// Waits until there is something to do, at most for `timeout`. True if there is, or the doorbell rang.
    /// For the service thread.
    pub fn wait(&self, timeout: Duration, ready: &mut Ready) -> bool {
        ready.clear();
        take(&self.all, Some(timeout), &mut ready.events);
        let (mut lines, mut any) = (false, false);
        for event in ready.events.drain(..) {
            any = true;
            match event.data.u64() {
                DOORBELL => drop(rustix::io::read(&self.doorbell, &mut [0; 8])),
                FAULTS => ready.faults = true,
                _ => lines = true,
            }
        }
        if lines {
            self.add_lines(Some(Duration::ZERO), ready);
        }
        any
    }

    /// Waits for messages (or to be nudged), at most for `timeout`.
    pub fn wait_lines(&self, timeout: Option<Duration>, ready: &mut Ready) {
        ready.clear();
        self.add_lines(timeout, ready);
    }

    fn add_lines(&self, timeout: Option<Duration>, ready: &mut Ready) {
        take(&self.lines, timeout, &mut ready.events);
        for event in ready.events.drain(..) {
            match event.data.u64() {
                NUDGE => {}
                DATAGRAMS => ready.datagrams = true,
                rank => ready.lines.push(Rank(u16::try_from(rank).expect("connections are watched by rank"))),
            }
        }
    }
}

impl Ready {
    /// Clears all events.
    pub fn clear(&mut self) {
        self.faults = false;
        self.datagrams = false;
        self.lines.clear();
        self.events.clear();
    }

    /// Whether other ranks have sent something, or take more.
    pub fn has_lines(&self) -> bool {
        self.datagrams || !self.lines.is_empty()
    }
}

/// Takes events. A signal may end the wait early.
fn take(from: &OwnedFd, timeout: Option<Duration>, events: &mut Vec<epoll::Event>) {
    let timeout = timeout.map(|time| Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    });
    events.reserve(EVENTS);
    match epoll::wait(from, spare_capacity(events), timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => panic!("epoll_wait on descriptors of our own: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;
    use rampool_net::transport::Stream;

    /// Longer than any of these waits takes.
    const LONG: Duration = Duration::from_secs(60);

    /// A watch with one connection, and the other end of that.
    fn watched() -> (Watch, UnixStream, UnixStream, OwnedFd) {
        let faults = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let watch = Watch::new(faults.as_fd(), None).unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        watch.add_line(Rank(3), near.as_fd()).unwrap();
        (watch, near, far, faults)
    }

    #[test]
    fn a_message_wakes_the_service_thread_only_while_no_other_thread_looks() {
        let (watch, near, mut far, _faults) = watched();
        let mut ready = Ready::default();
        assert!(!watch.wait(Duration::ZERO, &mut ready), "nothing has come");
        far.write_all(b"x").unwrap();
        assert!(watch.wait(LONG, &mut ready));
        assert_eq!(ready.lines, [Rank(3)]);
        watch.set_lines(false);
        assert!(!watch.wait(Duration::ZERO, &mut ready), "it is another thread's");
        watch.wait_lines(Some(LONG), &mut ready);
        assert_eq!(ready.lines, [Rank(3)]);
        watch.set_lines(true);
        watch.remove_line(near.as_fd());
        assert!(!watch.wait(Duration::ZERO, &mut ready), "no thread asks about it any more");
    }

    #[test]
    fn what_came_while_somebody_else_looked_wakes_the_service_thread_that_sleeps() {
        let (watch, _near, mut far, _faults) = watched();
        watch.set_lines(false);
        far.write_all(b"x").unwrap();
        let woken = std::thread::scope(|scope| {
            let service = scope.spawn(|| {
                let mut ready = Ready::default();
                watch.wait(LONG, &mut ready) && ready.lines == [Rank(3)]
            });
            watch.set_lines(true);
            service.join().unwrap()
        });
        assert!(woken);
    }

    /// A watched TCP connection that wakes no thread until much has come, and its other end.
    fn watched_quietly() -> (Watch, Stream, std::net::TcpStream, OwnedFd) {
        let faults = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let watch = Watch::new(faults.as_fd(), None).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near =
            Stream::adopt(std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        watch.add_line(Rank(3), near.as_fd()).unwrap();
        near.wake_from(1 << 16);
        (watch, near, far, faults)
    }

    #[test]
    fn a_quiet_connection_wakes_no_thread_until_it_is_quiet_no_more() {
        let (watch, near, mut far, _faults) = watched_quietly();
        let mut ready = Ready::default();
        for _ in 0..3 {
            far.write_all(b"x").unwrap();
            assert!(!watch.wait(Duration::ZERO, &mut ready), "the polling thread takes it");
            let mut byte = [0];
            let deadline = Instant::now() + LONG;
            while near.receive_into(&mut byte).unwrap().is_none() {
                assert!(Instant::now() < deadline, "polling threads take what is there");
            }
        }
        far.write_all(b"x").unwrap();
        let woken = std::thread::scope(|scope| {
            let service = scope.spawn(|| {
                let mut ready = Ready::default();
                watch.wait(LONG, &mut ready) && ready.lines == [Rank(3)]
            });
            near.wake_from(1);
            service.join().unwrap()
        });
        assert!(woken, "earlier messages are not missed");
    }

    #[test]
    fn the_end_of_a_quiet_connection_wakes_the_service_thread() {
        let (watch, _near, far, _faults) = watched_quietly();
        drop(far);
        let mut ready = Ready::default();
        assert!(watch.wait(LONG, &mut ready));
        assert_eq!(ready.lines, [Rank(3)]);
    }

    #[test]
    fn a_nudge_ends_the_wait_for_messages_and_is_none() {
        let (watch, _near, _far, faults) = watched();
        let mut ready = Ready::default();
        watch.nudge();
        watch.wait_lines(Some(LONG), &mut ready);
        assert!(!ready.has_lines());
        watch.end_nudge();
        assert!(!watch.wait(Duration::ZERO, &mut ready), "it is over");
        watch.ring();
        assert!(watch.wait(LONG, &mut ready) && !ready.faults, "the doorbell is the service thread's");
        rustix::io::write(&faults, &1_u64.to_ne_bytes()).unwrap();
        assert!(watch.wait(LONG, &mut ready) && ready.faults);
    }
}
