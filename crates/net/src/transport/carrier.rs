//! What carries a link's bytes: a socket, or a faster way next to one.

use super::fabric::Fabric;
use super::rings::Rings;
use super::tcp::{self, Peer, Stream, iovec, iovec_mut};
use super::{Piece, PieceMut};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// By what means a connection's bytes travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Means {
    Tcp,
    UnixSocket,
    /// Memory that both processes have mapped; a Unix socket wakes the side that sleeps.
    Rings,
    /// UCX over whatever fabric it has found; a TCP connection stays open next to it.
    Ucx,
}

impl Means {
    /// The word for it in tables and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Means::Tcp => "tcp",
            Means::UnixSocket => "unix",
            Means::Rings => "rings",
            Means::Ucx => "ucx",
        }
    }
}

impl std::fmt::Display for Means {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// How a client reaches servers on its own machine, those named `unix:PATH`, and a rank of the shared view
/// the ranks on its machine. Servers with another kind of address are of no concern to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SameHost {
    /// Through shared memory where both can, else through the socket: the Unix socket to a server, TCP to a
    /// rank.
    #[default]
    Auto,
    /// Through shared memory; a server that cannot is not used, and ranks that cannot do not run together.
    Rings,
    /// As `Auto`, and rings to servers are long: for one that moves MiBs at a time. They take 4 MiB each
    /// instead of half a MiB.
    LongRings,
    /// Through the socket.
    Socket,
}

/// The variable that chooses where the program does not.
pub const SAME_HOST_VARIABLE: &str = "RAMPOOL_SAME_HOST";

impl std::fmt::Display for SameHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SameHost::Auto => "auto",
            SameHost::Rings => "rings",
            SameHost::LongRings => "long-rings",
            SameHost::Socket => "socket",
        })
    }
}

impl std::str::FromStr for SameHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(SameHost::Auto),
            "rings" => Ok(SameHost::Rings),
            "long-rings" => Ok(SameHost::LongRings),
            "socket" => Ok(SameHost::Socket),
            _ => Err(format!("{text:?} is not `auto`, `rings`, `long-rings` or `socket`")),
        }
    }
}

impl SameHost {
    /// What the environment says, `Auto` if nothing.
    ///
    /// # Errors
    /// A text that names the variable and says what is wrong with its value.
    pub fn from_environment() -> Result<Self, String> {
        match std::env::var(SAME_HOST_VARIABLE) {
            Ok(text) => text.parse().map_err(|error| format!("{SAME_HOST_VARIABLE}: {error}")),
            Err(_) => Ok(SameHost::Auto),
        }
    }
}

/// A connected, non-blocking stream of bytes.
pub struct Carrier {
    pub(super) stream: Stream,
    pub(super) kind: CarrierKind,
}

/// What carries the bytes: the socket, or what takes its place.
pub(super) enum CarrierKind {
    Socket,
    Rings(Box<Rings>),
    Fabric(Box<Fabric>),
}

impl Carrier {
    /// A socket and no other way.
    /// The connection itself carries the bytes.
    pub fn over(stream: Stream) -> Self {
        Self { stream, kind: CarrierKind::Socket }
    }

    pub fn peer(&self) -> &Peer {
        self.stream.peer()
    }

    /// Whether the peer is on this machine, by its address.
    pub fn is_local(&self) -> bool {
        self.stream.is_local()
    }

    pub fn means(&self) -> Means {
        match (&self.kind, self.stream.peer()) {
            (CarrierKind::Rings(_), _) => Means::Rings,
            (CarrierKind::Fabric(_), _) => Means::Ucx,
            (CarrierKind::Socket, Peer::Unix { .. }) => Means::UnixSocket,
            (CarrierKind::Socket, Peer::Tcp(_)) => Means::Tcp,
        }
    }

    /// Sends from these pieces, in order, as much as there is room for now. `Ok(None)`: nothing now.
    ///
    /// # Safety
    /// Every piece is readable memory for the whole call.
    pub unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Option<usize>> {
        // SAFETY: the caller's promise.
        unsafe {
            match &mut self.kind {
                CarrierKind::Rings(rings) => rings.send(&self.stream, pieces),
                CarrierKind::Fabric(fabric) => fabric.send(&self.stream, pieces),
                CarrierKind::Socket => self.stream.send(pieces),
            }
        }
    }

    /// Receives into these pieces, in order, what has arrived. `Ok(None)`: nothing now; `Ok(Some(0))`: the
    /// peer has closed.
    ///
    /// # Safety
    /// Every piece is writable memory for the whole call, and not used otherwise meanwhile.
    pub unsafe fn receive(&mut self, pieces: &mut [libc::iovec]) -> io::Result<Option<usize>> {
        // SAFETY: the caller's promise.
        unsafe {
            match &mut self.kind {
                CarrierKind::Rings(rings) => rings.receive(&self.stream, pieces),
                CarrierKind::Fabric(fabric) => fabric.receive(&self.stream, pieces),
                CarrierKind::Socket => self.stream.receive(pieces),
            }
        }
    }

    /// [`Self::receive`] into memory of our own.
    pub fn receive_into(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let mut piece = [iovec_mut(PieceMut { ptr: buffer.as_mut_ptr(), len: buffer.len() })];
        // SAFETY: the piece is the exclusively borrowed buffer.
        unsafe { self.receive(&mut piece) }
    }

    /// [`Stream::peek_into`], of a connection whose bytes come over TCP itself.
    pub fn peek_into(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        self.stream.peek_into(buffer)
    }

    /// [`Stream::discard`], of such a connection.
    pub fn discard(&mut self, bytes: usize) -> io::Result<Option<usize>> {
        self.stream.discard(bytes)
    }

    /// [`Self::send`] from memory of our own.
    pub fn send_from(&mut self, buffer: &[u8]) -> io::Result<Option<usize>> {
        let piece = [iovec(Piece { ptr: buffer.as_ptr(), len: buffer.len() })];
        // SAFETY: the piece is the borrowed buffer.
        unsafe { self.send(&piece) }
    }

    /// [`Stream::wake_from`], where the bytes come over TCP itself.
    pub fn wake_from(&self, bytes: i32) {
        if self.means() == Means::Tcp {
            self.stream.wake_from(bytes);
        }
    }

    /// Makes progress on pending sends: the kernel sends what it was given by itself, UCX only while it is
    /// called.
    pub fn drive(&mut self) {
        if let CarrierKind::Fabric(fabric) = &mut self.kind {
            fabric.drive();
        }
    }

    /// Whether a call that brings nothing costs one into the kernel.
    pub fn asks_kernel(&self) -> bool {
        matches!(self.kind, CarrierKind::Socket)
    }

    /// Whether what [`Carrier::may_sleep`] would say has been said, and no call has taken it back since.
    pub fn has_said_that_it_sleeps(&self, reading: bool, writing: bool) -> bool {
        match &self.kind {
            CarrierKind::Rings(rings) => rings.has_said_that_it_sleeps(reading, writing),
            // UCX is asked each time.
            CarrierKind::Fabric(_) => false,
            CarrierKind::Socket => true,
        }
    }

    /// To be called before each sleep on the socket. `reading`, `writing`: what shall end the sleep. False:
    /// do not sleep.
    pub fn may_sleep(&self, reading: bool, writing: bool) -> bool {
        match &self.kind {
            CarrierKind::Rings(rings) => rings.may_sleep(reading, writing),
            CarrierKind::Fabric(fabric) => fabric.may_sleep(&self.stream, reading, writing),
            CarrierKind::Socket => true,
        }
    }

    /// Whether room to write shows on the socket as such. Otherwise it shows as something to read: a
    /// doorbell.
    pub fn shows_room(&self) -> bool {
        matches!(self.kind, CarrierKind::Socket)
    }

    /// Client, with rings: hands a descriptor over, before the frame that speaks of it. False: not over this
    /// connection, or not now.
    pub fn hand_over(&self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        if matches!(self.kind, CarrierKind::Rings(_)) {
            Rings::hand_over(&self.stream, fd)
        } else {
            Ok(false)
        }
    }

    /// Server: what the client has handed over.
    pub fn take_handed(&mut self) -> Vec<OwnedFd> {
        match &mut self.kind {
            CarrierKind::Rings(rings) => rings.take_handed(&self.stream),
            CarrierKind::Fabric(_) | CarrierKind::Socket => Vec::new(),
        }
    }

    /// Waits until there is something to read (or room to write, too) or the deadline is past. Returns false
    /// at the deadline.
    pub fn wait(&self, write: bool, deadline: Instant) -> io::Result<bool> {
        if !self.may_sleep(true, write) {
            return Ok(true);
        }
        tcp::wait(self.as_fd(), write && self.shows_room(), deadline)
    }
}

impl AsFd for Carrier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.kind {
            CarrierKind::Fabric(fabric) => fabric.as_fd(),
            CarrierKind::Rings(_) | CarrierKind::Socket => self.stream.as_fd(),
        }
    }
}
