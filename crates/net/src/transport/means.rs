//! What a transport is to a connection, and how two ends come to one.
//!
//! A transport is one file: what carries the bytes ([`Transport`]), how two ends that have
//! authenticated set it up over their socket ([`TransportKind`], [`Setup`]), and its name ([`Means`]).
//! One line in `handshake` lists it.

use super::seal::Seal;
use super::tcp::{self, Peer, Stream, iovec, iovec_mut};
use super::{Piece, PieceMut};
use crate::key::Key;
use rampool_kernel::sealed::SealedMemory;
use rampool_ucx::Context;
use rampool_wire::session::Encryption;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// By what means a connection's bytes travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Means(&'static str);

impl Means {
    pub(super) const fn named(name: &'static str) -> Self {
        Self(name)
    }

    /// The word for it in tables and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0
    }
}

impl std::fmt::Display for Means {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// Shows whether a connection has received something, to threads that do not have the connection.
pub struct Glance {
    pub(super) memory: Arc<SealedMemory>,
    /// Where the peer counts what it has written.
    pub(super) written: usize,
    /// How much of that was taken.
    pub(super) taken: Arc<AtomicU64>,
}

impl Glance {
    /// Whether received bytes are left to take.
    #[must_use]
    pub fn has_come(&self) -> bool {
        self.memory.word64(self.written).load(Ordering::Relaxed) != self.taken.load(Ordering::Relaxed)
    }
}

/// A connected, non-blocking stream of bytes: the socket over which its ends have met, or what they
/// have agreed on next to it.
pub trait Transport: Send {
    /// That socket.
    fn stream(&self) -> &Stream;

    fn means(&self) -> Means;

    /// Sends from these pieces, in order, as much as there is room for now. `Ok(None)`: nothing now.
    ///
    /// # Safety
    /// Every piece is readable memory for the whole call.
    ///
    /// # Errors
    /// As `send`.
    unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Option<usize>>;

    /// Receives into these pieces, in order, what has arrived. `Ok(None)`: nothing now;
    /// `Ok(Some(0))`: the peer has closed.
    ///
    /// # Safety
    /// Every piece is writable memory for the whole call, and not used otherwise meanwhile.
    ///
    /// # Errors
    /// As `recv`.
    unsafe fn receive(&mut self, pieces: &mut [libc::iovec]) -> io::Result<Option<usize>>;

    /// Whether it is the socket: a call that brings nothing costs one into the kernel, and room to write
    /// shows there as such. Otherwise that shows as something to read: a doorbell.
    fn asks_kernel(&self) -> bool {
        false
    }

    /// Shows whether something can be received. `None`: only the kernel knows.
    fn glance(&self) -> Option<Glance> {
        None
    }

    /// While the doorbell is held, sends do not wake the peer: the caller [rings](Transport::ring) later.
    fn hold_doorbell(&mut self, _held: bool) {}

    /// Wakes the peer if it sleeps and has not taken everything that was sent.
    fn ring(&self) {}

    /// Whether both ends have mapped the memory through which the bytes go, and can share more.
    fn shares_memory(&self) -> bool {
        false
    }

    /// Makes progress on pending sends, where nothing else does.
    fn drive(&mut self) {}

    /// To be called before each sleep on the descriptor. `reading`, `writing`: what shall end the
    /// sleep. False: do not sleep.
    fn may_sleep(&self, _reading: bool, _writing: bool) -> bool {
        true
    }

    /// Whether what [`Transport::may_sleep`] would say has been said, and no call has taken it back since.
    fn has_said_that_it_sleeps(&self, _reading: bool, _writing: bool) -> bool {
        true
    }

    /// Client: hands a descriptor over, before the frame that speaks of it. False: never, or not now.
    ///
    /// # Errors
    /// As `sendmsg`.
    fn hand_over(&self, _: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(false)
    }

    /// Server: what the client has handed over.
    fn take_handed(&mut self) -> Vec<OwnedFd> {
        Vec::new()
    }

    /// What to sleep on.
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

/// Any transport.
pub type Carrier = Box<dyn Transport>;

impl dyn Transport {
    /// [`Transport::receive`] into memory of our own.
    pub fn receive_into(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let mut piece = [iovec_mut(PieceMut { ptr: buffer.as_mut_ptr(), len: buffer.len() })];
        // SAFETY: the piece is the exclusively borrowed buffer.
        unsafe { self.receive(&mut piece) }
    }

    /// [`Transport::send`] from memory of our own.
    pub fn send_from(&mut self, buffer: &[u8]) -> io::Result<Option<usize>> {
        let piece = [iovec(Piece { ptr: buffer.as_ptr(), len: buffer.len() })];
        // SAFETY: the piece is the borrowed buffer.
        unsafe { self.send(&piece) }
    }

    /// Waits until there is something to read (or room to write, too) or the deadline is past. Returns false
    /// at the deadline.
    pub fn wait(&self, write: bool, deadline: Instant) -> io::Result<bool> {
        if !self.may_sleep(true, write) {
            return Ok(true);
        }
        tcp::wait(self.descriptor(), write && self.asks_kernel(), deadline)
    }
}

/// What this side brings to a handshake.
#[derive(Clone, Debug)]
pub struct LocalPolicy {
    pub key: Option<Key>,
    pub encryption: Encryption,
    /// Bits of `session::features`, but for that of UCX. Those of shared memory count for Unix sockets only.
    pub features: u32,
    /// With it, a client only connects over UCX, and a server accepts UCX from clients that ask for it; the
    /// handshake goes over TCP.
    pub ucx: Option<Context>,
}

/// Why a transport could not be set up.
pub(super) type SetupError = Box<dyn std::error::Error + Send + Sync>;

/// A kind of transport that two ends may agree on.
pub(super) trait TransportKind: Sync {
    /// The bit of `session::features` by which they do, and all that are about it.
    fn bits(&self) -> (u32, u32);

    /// Those of them that this side has over this socket.
    fn offered(&self, local: &LocalPolicy, stream: &Stream) -> u32;

    /// Why this side, a client, does not go on where it was not agreed on.
    fn misses(&self, _: &LocalPolicy) -> Option<SetupError> {
        None
    }

    fn setup(&self) -> Box<dyn Setup>;
}

/// Sets a transport up, by messages over the socket.
pub(super) trait Setup: Send {
    fn begin(&mut self, side: &mut Side<'_>) -> Result<Next, SetupError>;

    /// The message that was awaited.
    fn hear(&mut self, side: &mut Side<'_>, message: &[u8]) -> Result<Next, SetupError>;
}

/// What follows.
pub(super) enum Next {
    /// A message of so many bytes, as they are. A client gets the descriptors that come with it.
    Await(usize),
    /// A message of so many bytes, sealed where the connection has a seal.
    AwaitSealed(RangeInclusive<usize>),
    /// It is set up; `None`: the socket carries everything.
    Made(Option<Carrier>),
    /// The peer is told first.
    Failed(SetupError),
}

/// One side of a handshake, as far as a setup is concerned.
pub(super) struct Side<'a> {
    pub(super) local: &'a LocalPolicy,
    /// The socket, until a transport has it.
    pub(super) stream: &'a mut Option<Stream>,
    pub(super) is_client: bool,
    /// Agreed on.
    pub(super) features: u32,
    /// Bytes of each ring that a server offers.
    pub(super) ring_bytes: u32,
    pub(super) seal: &'a mut Option<Seal>,
    /// What is to be sent, and descriptors that leave with its first byte.
    pub(super) said: Vec<u8>,
    pub(super) hand_over: &'a mut Vec<OwnedFd>,
    /// Descriptors that came.
    pub(super) handed: &'a mut Vec<OwnedFd>,
    /// The file of the server's frames.
    pub(super) frames: &'a mut Option<OwnedFd>,
}

impl Side<'_> {
    pub(super) fn peer(&self) -> &Peer {
        self.stream.as_ref().expect("no transport is made yet").peer()
    }

    pub(super) fn take_stream(&mut self) -> Stream {
        self.stream.take().expect("one transport is made")
    }

    /// For [`Next::AwaitSealed`].
    pub(super) fn say_sealed(&mut self, plain: &[u8]) {
        if let Some(seal) = self.seal {
            seal.seal(plain, &mut self.said);
        } else {
            let len = u16::try_from(plain.len()).expect("some hundred bytes");
            self.said.extend_from_slice(&len.to_le_bytes());
            self.said.extend_from_slice(plain);
        }
    }
}
