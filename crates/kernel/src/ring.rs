//! io_uring, as far as sending without a copy needs it: a table of registered buffers, and `SEND_ZC` on a
//! non-blocking socket.
//!
//! A registered buffer is pinned: its pages stay where they are, and every send from it reads *those* pages,
//! whatever is mapped at its addresses by then. So the code that registers must be told of every change of
//! the mapping and end the registration.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, Probe, cqueue, opcode, types};

/// Sends whose memory the kernel may still read, at most.
const MOST_UNDER_WAY: u32 = 256;

/// Why there is no ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    #[error(
        "io_uring is not available ({0}); in a container its system calls may be forbidden, and \
         kernel.io_uring_disabled must be 0"
    )]
    Unavailable(#[source] io::Error),
    #[error(
        "the kernel refuses the memory that io_uring would pin ({0}); the right to lock memory is too small \
         (ulimit -l, LimitMEMLOCK)"
    )]
    Memory(#[source] io::Error),
    #[error("this kernel's io_uring does not send without a copy (Linux 6.2 does)")]
    NoZeroCopy,
    #[error("the table of {places} registered buffers: {source}")]
    Table { places: u16, source: io::Error },
}

impl From<io::Error> for RingError {
    fn from(error: io::Error) -> Self {
        if error.raw_os_error() == Some(libc::ENOMEM) {
            Self::Memory(error)
        } else {
            Self::Unavailable(error)
        }
    }
}

/// What became of a send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sent {
    /// So many bytes were taken. The kernel may read them until the send of this number has ended
    /// ([`Ring::ended`]).
    Taken { bytes: usize, number: u64 },
    /// Nothing now: wait until the socket can be written, or until earlier sends have ended.
    Blocked,
    /// This socket, or this memory, cannot be sent from without a copy.
    Unsupported,
}

/// The end of a send: its memory is read no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    pub number: u64,
    /// The network copied the bytes after all.
    pub copied: bool,
}

/// One ring, driven by one thread. Dropping it ends all registrations.
pub struct Ring {
    ring: IoUring,
    places: u16,
    next: u64,
    under_way: u32,
    ended: Vec<Ended>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("places", &self.places)
            .field("under_way", &self.under_way)
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring whose table has this many places for buffers, all empty.
    ///
    /// # Errors
    /// [`RingError`].
    pub fn open(places: u16) -> Result<Self, RingError> {
        let ring = IoUring::builder().dontfork().build(MOST_UNDER_WAY)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        // SENDMSG_ZC came with 6.1; that sends report whether they were copied, with 6.2, which nothing but
        // trying tells.
        if !probe.is_supported(opcode::SendZc::CODE) {
            return Err(RingError::NoZeroCopy);
        }
        ring.submitter()
            .register_buffers_sparse(places.into())
            .map_err(|source| RingError::Table { places, source })?;
        Ok(Self { ring, places, next: 0, under_way: 0, ended: Vec::new() })
    }

    #[must_use]
    pub fn places(&self) -> u16 {
        self.places
    }

    /// Registers (pins) memory in a slot of the table; the slot's previous memory is unregistered.
    ///
    /// # Errors
    /// EFAULT: the memory is not mapped, cannot be written, or is a file's; ENOMEM: more than this process
    /// may lock (RLIMIT_MEMLOCK); EINVAL: more than 1 GiB.
    pub fn register(&self, place: u16, start: usize, bytes: usize) -> io::Result<()> {
        self.update(
            place,
            libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(start), iov_len: bytes },
        )
    }

    /// Ends a registration. Sends under way from it go on, and keep its pages until they have ended.
    ///
    /// # Errors
    /// As `io_uring_register`.
    pub fn deregister(&self, place: u16) -> io::Result<()> {
        self.update(place, libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 })
    }

    fn update(&self, place: u16, memory: libc::iovec) -> io::Result<()> {
        // SAFETY: registering reads and writes nothing. The kernel pins whatever is mapped there and refuses
        // what is not; it is only read by sends, whose callers vouch for it.
        unsafe { self.ring.submitter().register_buffers_update(place.into(), &[memory], None) }
    }

    /// Sends from memory without a copy, as much as the socket takes now: from the registration at `place`,
    /// which must cover it, or pinned for this call.
    ///
    /// # Safety
    /// The memory is readable until the send has ended. Bytes that change meanwhile arrive as either. With a
    /// place, its registration refers to what is mapped there now.
    ///
    /// # Errors
    /// As `send(2)`.
    pub unsafe fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        memory: *const u8,
        bytes: usize,
        place: Option<u16>,
    ) -> io::Result<Sent> {
        if self.is_full() {
            return Ok(Sent::Blocked);
        }
        let number = self.next;
        self.next += 1;
        let len = u32::try_from(bytes).unwrap_or(u32::MAX);
        let entry = opcode::SendZc::new(types::Fd(socket.as_raw_fd()), memory, len)
            .buf_index(place)
            .flags(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            .zc_flags(REPORT_USAGE)
            .build()
            .user_data(number);
        // SAFETY: the entry's memory stays readable until the send has ended, as the caller promises; the
        // descriptor is open for this call, in which the send is begun.
        unsafe { self.ring.submission().push(&entry) }.expect("the queue is empty between calls");
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            let mut result = None;
            for completion in self.ring.completion() {
                let (of, code, flags) = (completion.user_data(), completion.result(), completion.flags());
                if cqueue::notif(flags) {
                    self.under_way -= 1;
                    self.ended.push(Ended { number: of, copied: code.cast_unsigned() & USAGE_COPIED != 0 });
                } else {
                    assert_eq!(of, number, "one send is begun at a time");
                    self.under_way += u32::from(cqueue::more(flags));
                    result = Some((code, cqueue::more(flags)));
                }
            }
            let Some((code, announced)) = result else { continue };
            return match usize::try_from(code) {
                Ok(bytes) => {
                    if !announced {
                        self.ended.push(Ended { number, copied: true });
                    }
                    Ok(Sent::Taken { bytes, number })
                }
                Err(_) => match -code {
                    libc::EAGAIN | libc::EINTR => Ok(Sent::Blocked),
                    libc::EOPNOTSUPP | libc::EFAULT | libc::EINVAL | libc::ENOMEM | libc::ENOBUFS => {
                        Ok(Sent::Unsupported)
                    }
                    errno => Err(io::Error::from_raw_os_error(errno)),
                },
            };
        }
    }

    /// A send that has ended and was not returned yet. Does not block.
    pub fn ended(&mut self) -> Option<Ended> {
        if self.ended.is_empty() {
            self.gather();
        }
        self.ended.pop()
    }

    /// Sends that have not ended.
    #[must_use]
    pub fn under_way(&self) -> u32 {
        self.under_way
    }

    /// Whether so many sends are under way that no more can begin.
    pub fn is_full(&mut self) -> bool {
        if self.under_way >= MOST_UNDER_WAY {
            self.gather();
        }
        self.under_way >= MOST_UNDER_WAY
    }

    /// Waits until one more send has ended, if one is under way.
    ///
    /// # Errors
    /// As `io_uring_enter`.
    pub fn wait(&mut self) -> io::Result<()> {
        while self.ended.is_empty() && self.under_way > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            self.gather();
        }
        Ok(())
    }

    fn gather(&mut self) {
        for completion in self.ring.completion() {
            assert!(cqueue::notif(completion.flags()), "sends are answered as they are begun");
            self.under_way -= 1;
            self.ended.push(Ended {
                number: completion.user_data(),
                copied: completion.result().cast_unsigned() & USAGE_COPIED != 0,
            });
        }
    }
}

/// IORING_SEND_ZC_REPORT_USAGE, and what is reported then: IORING_NOTIF_USAGE_ZC_COPIED.
const REPORT_USAGE: u16 = 1 << 3;
const USAGE_COPIED: u32 = 1 << 31;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OS_PAGE_BYTES;
    use crate::memory::{Advice, Mapping, advise};
    use rampool_testing::skip;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        sender.set_nonblocking(true).unwrap();
        (sender, listener.accept().unwrap().0)
    }

    /// Whether this kernel lets us have a ring.
    fn possible() -> bool {
        let Err(error) = Ring::open(1) else { return true };
        skip("io-uring", &error.to_string());
        false
    }

    #[test]
    fn who_may_lock_too_little_is_told_so_and_not_that_io_uring_is_forbidden() {
        let says = |errno| RingError::from(io::Error::from_raw_os_error(errno)).to_string();
        assert!(
            says(libc::ENOMEM).contains("ulimit -l") && !says(libc::ENOMEM).contains("io_uring_disabled")
        );
        assert!(says(libc::EPERM).contains("io_uring_disabled") && !says(libc::EPERM).contains("ulimit"));
    }

    fn fill(mapping: &Mapping, byte: u8) {
        // SAFETY: a mapping of this test's own.
        unsafe { mapping.at(0).write_bytes(byte, mapping.bytes()) };
    }

    /// What arrives when the first page of the mapping is sent from place 0.
    fn sent(ring: &mut Ring, mapping: &Mapping) -> Vec<u8> {
        let (sender, mut receiver) = pair();
        // SAFETY: the mapping lives until the send has ended, which is waited for.
        let sent = unsafe { ring.send(sender.as_fd(), mapping.at(0), OS_PAGE_BYTES, Some(0)) }.unwrap();
        assert!(matches!(sent, Sent::Taken { bytes: OS_PAGE_BYTES, .. }), "{sent:?}");
        let mut got = vec![0; OS_PAGE_BYTES];
        receiver.read_exact(&mut got).unwrap();
        ring.wait().unwrap();
        assert!(
            ring.ended().is_some_and(|ended| ended.copied),
            "on loopback, zero copy is a copy, and the kernel says so"
        );
        got
    }

    #[test]
    fn a_stale_registration_sends_the_page_that_was_there() {
        if !possible() {
            return;
        }
        let mut ring = Ring::open(4).unwrap();
        let mapping = Mapping::anonymous(OS_PAGE_BYTES).unwrap();
        fill(&mapping, 1);
        ring.register(0, mapping.start(), mapping.bytes()).unwrap();
        fill(&mapping, 2);
        assert_eq!(
            sent(&mut ring, &mapping),
            [2; OS_PAGE_BYTES],
            "what is written to the pages that are registered is sent"
        );
        // SAFETY: the mapping is this test's own.
        unsafe { advise(mapping.start(), mapping.bytes(), Advice::DontNeed) }.unwrap();
        fill(&mapping, 3);
        assert_eq!(
            sent(&mut ring, &mapping),
            [2; OS_PAGE_BYTES],
            "the page that was dropped goes on being sent"
        );
        ring.register(0, mapping.start(), mapping.bytes()).unwrap();
        assert_eq!(sent(&mut ring, &mapping), [3; OS_PAGE_BYTES]);
    }

    #[test]
    fn what_cannot_be_sent_without_a_copy_is_told_apart_from_errors() {
        if !possible() {
            return;
        }
        let mut ring = Ring::open(4).unwrap();
        let mapping = Mapping::anonymous(OS_PAGE_BYTES).unwrap();
        assert_eq!(ring.register(0, 0x1000, OS_PAGE_BYTES).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        fill(&mapping, 1);
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (tcp, other) = pair();
        // SAFETY: the mapping lives until the sends have ended: none begins.
        unsafe {
            assert_eq!(ring.send(unix.as_fd(), mapping.at(0), 100, None).unwrap(), Sent::Unsupported);
            assert_eq!(
                ring.send(tcp.as_fd(), mapping.at(0), 100, Some(1)).unwrap(),
                Sent::Unsupported,
                "nothing is registered there"
            );
        }
        drop(other);
        // SAFETY: as above.
        let ended =
            (0..10).find_map(|_| unsafe { ring.send(tcp.as_fd(), mapping.at(0), OS_PAGE_BYTES, None) }.err());
        assert!(ended.is_some(), "a peer that is gone is an error");
    }

    #[test]
    fn a_full_socket_blocks() {
        if !possible() {
            return;
        }
        let mut ring = Ring::open(1).unwrap();
        let mapping = Mapping::anonymous(1 << 20).unwrap();
        fill(&mapping, 1);
        ring.register(0, mapping.start(), mapping.bytes()).unwrap();
        let (sender, mut receiver) = pair();
        let mut taken = 0;
        loop {
            // SAFETY: the mapping lives until the sends have ended, which is waited for.
            match unsafe { ring.send(sender.as_fd(), mapping.at(0), mapping.bytes(), Some(0)) }.unwrap() {
                Sent::Taken { bytes, .. } => taken += bytes,
                Sent::Blocked => break,
                Sent::Unsupported => panic!("TCP can do it"),
            }
        }
        let mut got = vec![0; taken];
        receiver.read_exact(&mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == 1));
        while ring.under_way() > 0 {
            ring.wait().unwrap();
            while ring.ended().is_some() {}
        }
    }
}
