//! A framed connection: frames in, frames out, without blocking and without copying pages when plain and over
//! a socket.

use super::means::{Carrier, Means};
use super::seal::{MAX_PLAIN_BYTES, NotAuthentic, Seal};
use super::tcp::{Peer, iovec, iovec_mut};
use super::zero_copy::{Sender, SharedZeroCopy};
use super::{Piece, PieceMut};
use rampool_kernel::ring::Sent;
use rampool_pinning::path::{NoZeroCopy, PathChoice, Wish};
use rampool_wire::frame::{HEADER_BYTES, Header, MAX_TABLE_BYTES, WireError};
use rampool_wire::session::{Security, features};
use rampool_wire::tenant::TenantId;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What may overtake what in the send queue. A frame that has begun to leave is finished first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Urgency {
    /// A thread waits.
    Demand,
    /// The peer is about to wait for it.
    Prefetch,
    /// Not urgent.
    WriteBack,
}

/// Why a link is over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("the peer broke the protocol: {0}")]
    Wire(#[from] WireError),
    #[error("the peer's bytes are not authentic: altered on the way, or sealed with another key")]
    NotAuthentic,
}

impl From<NotAuthentic> for LinkError {
    fn from(_: NotAuthentic) -> Self {
        LinkError::NotAuthentic
    }
}

/// What [`Link::receive`] has for its caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Received {
    /// Nothing complete now; wait until the socket can be read ([`Link::may_sleep`]).
    Blocked,
    /// A header and its table ([`Link::table`]) are in. Where `bulk_len` is not 0, [`Link::place`] must be
    /// called before the next `receive`.
    Head(Header),
    /// The bulk of this frame is in its place.
    Bulk(Header),
}

/// Whether [`Link::flush`] sent everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// Nothing is left to send.
    Empty,
    /// There is no room now; wait for it ([`Link::may_sleep`], [`Link::waits_for_room`]).
    Blocked,
    /// There may be room for more ([`Link::flush_some`]).
    Stopped,
}

/// Receive buffer of a plain link: a header and the longest table always fit, and several small frames come
/// in one call.
const PLAIN_BUFFER_BYTES: usize = 64 * 1024;
const _: () = assert!(PLAIN_BUFFER_BYTES >= HEADER_BYTES + MAX_TABLE_BYTES);
/// Bulk of at least this length should go straight to its place; copying less costs less than a call to the
/// kernel.
const LARGE_BULK_BYTES: usize = 32 * 1024;
/// What is asked for to find the next header while bulk is large, so that little of the bulk comes with it.
const HEAD_READ_BYTES: usize = 4 * 1024;
/// Receive buffer of a sealed link: besides, one whole message fits.
const SEALED_BUFFER_BYTES: usize = HEADER_BYTES + MAX_TABLE_BYTES + MAX_PLAIN_BYTES;
/// While large bulk goes straight to its place, this much beyond it is asked for in the same call: the next
/// header.
const AHEAD_BYTES: usize = 1024;
/// Bulk of this length leaves in one piece with its head, copied: to hand the kernel a list of pieces costs
/// more, and for shared memory to keep them. A page is as long.
const COPIED_BULK_BYTES: usize = 4 * 1024;
const LINE_BYTES: usize = 64;
/// Sealed messages without content that may come in a row.
const MOST_EMPTY: usize = 64;
/// Pieces handed to the kernel in one call.
const MAX_PIECES: usize = 512;
/// Bytes handed to the kernel in one call: more than a socket buffer takes anyway.
const MAX_CALL_BYTES: usize = 4 * 1024 * 1024;

/// A framed, non-blocking connection. `G` guards the memory of a queued frame's pieces: it is dropped when
/// the frame has left or the link ends.
///
/// Not for sharing: one thread drives it.
pub struct Link<G = ()> {
    // Dropped before the socket, whose last bytes it may hold back.
    zero_copy: Result<ZeroCopySender, NoZeroCopy>,
    carrier: Carrier,
    security: Security,
    features: u32,
    /// Client: the file of the server's frames.
    frames: Option<OwnedFd>,
    tenant: Option<TenantId>,
    seal: Option<Sealing>,
    incoming: Incoming,
    outgoing: Outgoing<G>,
}

/// Large pieces leave without a copy.
struct ZeroCopySender {
    sender: Sender,
    socket: std::os::fd::OwnedFd,
}

impl Drop for ZeroCopySender {
    fn drop(&mut self) {
        // Whose memory the kernel still reads has it back now: what has not left by now never leaves.
        if self.sender.is_reading() {
            // Best effort: it fails where the connection is over.
            let _ = socket2::SockRef::from(&self.socket).set_linger(Some(std::time::Duration::ZERO));
        }
    }
}

/// Both directions' buffers of ciphertext.
struct Sealing {
    seal: Seal,
    received: Vec<u8>,
    opened: usize,
    plain: Vec<u8>,
    sealed: Vec<u8>,
    sent: usize,
}

struct Incoming {
    buffer: Box<[u8]>,
    filled: Range<usize>,
    /// The last call to the kernel brought less than it had room for: the socket is empty, do not ask again
    /// at once.
    drained: bool,
    /// The last call was not to go on.
    stopped: bool,
    /// The last frame with bulk had much of it; the next one probably has, too.
    large: bool,
    phase: Phase,
    table: Range<usize>,
    pieces: Vec<PieceMut>,
    /// Index of the piece being filled, and bytes of it that are.
    piece: usize,
    piece_filled: usize,
    calls: Vec<libc::iovec>,
}

#[derive(Clone, Copy)]
enum Phase {
    Head,
    /// Header and table were handed out; `table` is still in the buffer.
    HeadGiven(Header),
    Bulk(Header),
}

struct Outgoing<G> {
    /// The frame that has begun to leave is at the front of its queue; nothing overtakes it.
    started: Option<Urgency>,
    queues: [VecDeque<Frame<G>>; 3],
    /// Bytes of the started frame that have left.
    sent: usize,
    spare: Vec<(Vec<u8>, Vec<Piece>)>,
    calls: Vec<libc::iovec>,
    queued_bytes: usize,
}

struct Frame<G> {
    /// From `start` on the frame's head, and what was copied behind it.
    head: Vec<u8>,
    start: usize,
    pieces: Vec<Piece>,
    bytes: usize,
    /// Held only for its drop.
    _guard: G,
}

impl<G> Frame<G> {
    fn head(&self) -> Piece {
        let head = &self.head[self.start..];
        Piece { ptr: head.as_ptr(), len: head.len() }
    }
}

// SAFETY: the raw pieces are plain addresses; their memory's validity does not depend on the thread that
// drives the link, by the contracts of `send` and `place`.
unsafe impl<G: Send> Send for Link<G> {}

impl<G> Link<G> {
    pub(super) fn new(
        carrier: Carrier,
        seal: Option<Seal>,
        security: Security,
        features: u32,
        tenant: Option<TenantId>,
    ) -> Self {
        let seal = seal.map(|seal| Sealing {
            seal,
            received: Vec::new(),
            opened: 0,
            plain: Vec::new(),
            sealed: Vec::new(),
            sent: 0,
        });
        let buffer_bytes = if seal.is_some() { SEALED_BUFFER_BYTES } else { PLAIN_BUFFER_BYTES };
        let incoming = Incoming {
            buffer: vec![0; buffer_bytes].into_boxed_slice(),
            filled: 0..0,
            drained: false,
            stopped: false,
            large: false,
            phase: Phase::Head,
            table: 0..0,
            pieces: Vec::new(),
            piece: 0,
            piece_filled: 0,
            calls: Vec::new(),
        };
        let outgoing = Outgoing {
            started: None,
            queues: [VecDeque::new(), VecDeque::new(), VecDeque::new()],
            sent: 0,
            spare: Vec::new(),
            calls: Vec::new(),
            queued_bytes: 0,
        };
        Self {
            zero_copy: Err(NoZeroCopy::Off),
            carrier,
            security,
            features,
            tenant,
            frames: None,
            seal,
            incoming,
            outgoing,
        }
    }

    /// What carries its bytes, and the keys, for another kind of frames. Only right after the handshake:
    /// nothing has been sent or received.
    pub fn into_parts(self) -> (Carrier, Option<Seal>) {
        (self.carrier, self.seal.map(|sealing| sealing.seal))
    }

    #[must_use]
    pub fn peer(&self) -> &Peer {
        self.carrier.stream().peer()
    }

    /// The socket that it was made over. It is watched by another descriptor where it has one
    /// ([`Link::as_fd`]).
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.carrier.stream().as_fd()
    }

    /// By what means its bytes travel.
    #[must_use]
    pub fn means(&self) -> Means {
        self.carrier.means()
    }

    #[must_use]
    pub fn security(&self) -> Security {
        self.security
    }

    /// Bits of `session::features` that both sides have.
    #[must_use]
    pub fn features(&self) -> u32 {
        self.features
    }

    /// The client's tenant, whose key both sides have proved; `None`: it has the master, or there is no key.
    #[must_use]
    pub fn tenant(&self) -> Option<TenantId> {
        self.tenant
    }

    /// From now on large pieces leave without a copy, where that pays: `measured` is from how many bytes on.
    /// Nothing of them is to be written before the peer has answered that it has them.
    pub fn send_without_copies(
        &mut self,
        engine: Option<&SharedZeroCopy>,
        wish: Wish,
        measured: Option<u64>,
    ) {
        if !self.carrier.asks_kernel() {
            // Its socket carries none of the bytes.
            self.zero_copy = Err(NoZeroCopy::Missing);
            return;
        }
        let choice = PathChoice::new(wish, self.seal.is_some(), self.is_local(), measured);
        let attach = |engine| {
            let socket = self.carrier.descriptor().try_clone_to_owned().ok()?;
            Some(ZeroCopySender { sender: Sender::attach(engine, choice), socket })
        };
        self.zero_copy = choice.from().and_then(|_| engine.and_then(attach).ok_or(NoZeroCopy::Missing));
    }

    /// From how many bytes on pieces leave without a copy.
    ///
    /// # Errors
    /// Why they never do.
    pub fn zero_copy_from(&self) -> Result<u64, NoZeroCopy> {
        self.zero_copy.as_ref().map_err(|why| *why)?.sender.choice().from()
    }

    /// Whether the socket itself carries the bytes, so that the kernel reports them.
    pub fn asks_kernel(&self) -> bool {
        self.carrier.asks_kernel()
    }

    /// Whether they go through memory that both ends have mapped.
    pub fn shares_memory(&self) -> bool {
        self.carrier.shares_memory()
    }

    /// Whether memory can be handed over to the peer.
    pub fn takes_memory(&self) -> bool {
        self.carrier.shares_memory() && self.seal.is_none() && self.features & features::PUBLISH != 0
    }

    /// Hands a descriptor over, before the frame that speaks of it. False: not over this connection, or not
    /// now.
    pub fn hand_over(&self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        self.carrier.hand_over(fd)
    }

    pub(super) fn set_frames(&mut self, frames: Option<OwnedFd>) {
        self.frames = frames;
    }

    /// Client: the file of the server's frames, if the server has handed it over ([`features::PLACES`]).
    pub fn take_frames(&mut self) -> Option<OwnedFd> {
        self.frames.take()
    }

    /// What the peer has handed over before the frame that came last.
    pub fn take_handed(&mut self) -> Vec<OwnedFd> {
        self.carrier.take_handed()
    }

    /// Whether the peer is on this machine, by its address.
    pub fn is_local(&self) -> bool {
        self.carrier.stream().is_local()
    }

    /// Queues a frame: `head` (an encoded header and table), then the pieces. Nothing leaves before
    /// [`Link::flush`].
    ///
    /// # Safety
    /// Until `guard` is dropped, or the link, every piece is readable memory. Bytes that change meanwhile
    /// arrive as either.
    ///
    /// # Panics
    /// If the pieces are not as long as the header says.
    pub unsafe fn send(&mut self, urgency: Urgency, head: &[u8], pieces: &[Piece], guard: G) {
        let bulk: usize = pieces.iter().map(|p| p.len).sum();
        let announced = head.get(36..40).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize);
        assert_eq!(announced, Some(bulk), "the header announces another length");
        // SAFETY: the caller's promise.
        unsafe { self.outgoing.push(urgency, head, pieces, bulk, self.copies(bulk), guard) };
    }

    /// Whether [`Link::send`] copies this much bulk at once, so that nothing is read from its pieces
    /// afterwards.
    #[must_use]
    pub fn copies(&self, bulk: usize) -> bool {
        bulk <= COPIED_BULK_BYTES
            && self.seal.is_none()
            && (self.carrier.asks_kernel() || self.carrier.shares_memory())
            && self.zero_copy.is_err()
    }

    /// Queues a frame without bulk.
    ///
    /// # Panics
    /// If the header announces bulk.
    pub fn send_head(&mut self, urgency: Urgency, head: &[u8], guard: G) {
        // SAFETY: no pieces.
        unsafe { self.send(urgency, head, &[], guard) };
    }

    /// Bytes queued and not yet taken by the kernel.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.outgoing.queued_bytes + self.seal.as_ref().map_or(0, |s| s.sealed.len() - s.sent)
    }

    /// Frames that have not left completely.
    #[must_use]
    pub fn queued_frames(&self) -> usize {
        self.outgoing.queues.iter().map(VecDeque::len).sum()
    }

    /// Sends as much as the kernel takes now.
    ///
    /// # Errors
    /// [`LinkError::Closed`] or [`LinkError::Io`].
    pub fn flush(&mut self) -> Result<Flush, LinkError> {
        self.flush_some(MAX_CALL_BYTES, || true)
    }

    /// The same by so many bytes at a time, and between two of these only while `goes_on`.
    ///
    /// # Errors
    /// As [`Link::flush`].
    pub fn flush_some(&mut self, at_once: usize, goes_on: impl FnMut() -> bool) -> Result<Flush, LinkError> {
        let flushed = match &mut self.seal {
            None => self.outgoing.flush_plain(
                &mut self.carrier,
                self.zero_copy.as_ref().ok().map(|zero_copy| &zero_copy.sender),
                at_once,
                goes_on,
            ),
            Some(sealing) => self.outgoing.flush_sealed(&mut self.carrier, sealing, goes_on),
        }?;
        self.carrier.drive();
        Ok(flushed)
    }

    /// The next thing that came. Reads from the socket as needed, never blocks; call until it says `Blocked`.
    ///
    /// # Errors
    /// [`LinkError`]; the link is of no use any more.
    ///
    /// # Panics
    /// If the last `Head` announced bulk and [`Link::place`] was not called.
    pub fn receive(&mut self) -> Result<Received, LinkError> {
        self.receive_some(|_| {}, usize::MAX, || true)
    }

    /// As [`Link::receive`]. `glimpse` sees the received bytes from the beginning of a frame, before anything
    /// was checked: at least a header. Bulk comes by about so many bytes at a time, and between two of these
    /// only while `goes_on`; then it says `Blocked`, and [`Link::has_stopped`] is true.
    ///
    /// # Errors
    /// As [`Link::receive`].
    ///
    /// # Panics
    /// As [`Link::receive`].
    pub fn receive_some(
        &mut self,
        glimpse: impl Fn(&[u8]),
        at_once: usize,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Received, LinkError> {
        self.incoming.stopped = false;
        let mut reads = 0;
        loop {
            match self.incoming.phase {
                Phase::HeadGiven(header) => {
                    assert_eq!(header.bulk_len, 0, "`place` must say where the bulk goes");
                    self.incoming.drop_head();
                }
                Phase::Head => {
                    let come = &self.incoming.buffer[self.incoming.filled.clone()];
                    if come.len() >= HEADER_BYTES {
                        glimpse(come);
                    }
                    if let Some(header) = self.incoming.parse_head()? {
                        return Ok(Received::Head(header));
                    }
                    if !self.fill()? {
                        return Ok(Received::Blocked);
                    }
                }
                Phase::Bulk(header) => {
                    if self.incoming.take_bulk() {
                        self.incoming.phase = Phase::Head;
                        return Ok(Received::Bulk(header));
                    }
                    if reads > 0 && !goes_on() {
                        self.incoming.stopped = true;
                        return Ok(Received::Blocked);
                    }
                    reads += 1;
                    let progress = if self.seal.is_some() {
                        self.fill()?
                    } else {
                        self.incoming.read_bulk(&mut self.carrier, at_once)?
                    };
                    if !progress {
                        return Ok(Received::Blocked);
                    }
                }
            }
        }
    }

    /// Whether the last `Blocked` was because it was not to go on: there may be more.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.incoming.stopped
    }

    /// The table of the frame whose `Head` was returned last; valid until `place` or the next `receive`.
    #[must_use]
    pub fn table(&self) -> &[u8] {
        &self.incoming.buffer[self.incoming.table.clone()]
    }

    /// Says where the bulk of the frame goes whose `Head` was returned last.
    ///
    /// # Safety
    /// Until `receive` returns its `Bulk`, or the link is dropped, every piece is writable memory that is not
    /// used otherwise.
    ///
    /// # Panics
    /// If no bulk is expected or the pieces are not exactly as long as announced.
    pub unsafe fn place(&mut self, pieces: &[PieceMut]) {
        let Phase::HeadGiven(header) = self.incoming.phase else { panic!("no bulk is expected") };
        let room: usize = pieces.iter().map(|p| p.len).sum();
        assert!(
            room == header.bulk_len as usize && room > 0,
            "{room} bytes of room for {} bytes",
            header.bulk_len
        );
        self.incoming.drop_head();
        self.incoming.phase = Phase::Bulk(header);
        self.incoming.pieces.clear();
        self.incoming.pieces.extend(pieces.iter().filter(|p| p.len > 0));
        self.incoming.piece = 0;
        self.incoming.piece_filled = 0;
    }

    /// Waits until the socket can be read (or, with something queued, written) or the deadline is past;
    /// returns false at the deadline.
    ///
    /// # Errors
    /// As `poll`.
    pub fn wait(&self, deadline: std::time::Instant) -> io::Result<bool> {
        self.carrier.wait(self.queued_bytes() > 0, deadline)
    }

    /// Call before each sleep on the link's descriptor, after [`Link::receive`] has returned `Blocked`:
    /// through rings, a peer that is not told that this side sleeps does not wake it. `reading`: incoming
    /// bytes end the sleep; so does room, where something is queued. False: do not sleep, there is something
    /// to do.
    #[must_use]
    pub fn may_sleep(&self, reading: bool) -> bool {
        self.carrier.may_sleep(reading, self.queued_bytes() > 0)
    }

    /// Whether to wait for the descriptor to be writable, too: room in rings shows as something to read.
    #[must_use]
    pub fn waits_for_room(&self) -> bool {
        self.queued_bytes() > 0 && self.carrier.asks_kernel()
    }

    /// Brings more plain bytes into the buffer; false if there are none now.
    fn fill(&mut self) -> Result<bool, LinkError> {
        match &mut self.seal {
            None => self.incoming.fill_plain(&mut self.carrier),
            Some(sealing) => self.incoming.fill_sealed(&mut self.carrier, sealing),
        }
    }
}

impl<G> AsFd for Link<G> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.carrier.descriptor()
    }
}

impl Incoming {
    fn parse_head(&mut self) -> Result<Option<Header>, LinkError> {
        let Some(bytes) = self.buffer[self.filled.clone()].first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::parse(bytes)?;
        let table =
            self.filled.start + HEADER_BYTES..self.filled.start + HEADER_BYTES + header.table_len as usize;
        if self.filled.end < table.end {
            return Ok(None);
        }
        header.check_table(&self.buffer[table.clone()])?;
        self.table = table;
        self.phase = Phase::HeadGiven(header);
        if header.bulk_len > 0 {
            self.large = header.bulk_len as usize >= LARGE_BULK_BYTES;
        }
        Ok(Some(header))
    }

    /// Header and table are done with.
    fn drop_head(&mut self) {
        self.filled.start = self.table.end;
        self.table = 0..0;
        self.phase = Phase::Head;
        if self.filled.is_empty() {
            self.filled = 0..0;
        }
    }

    fn fill_plain(&mut self, carrier: &mut Carrier) -> Result<bool, LinkError> {
        if std::mem::take(&mut self.drained) {
            return Ok(false);
        }
        self.compact();
        // A header and its table fit behind what is buffered, however little is asked for at a time.
        let ask = if self.large { HEAD_READ_BYTES } else { usize::MAX };
        let end = self.filled.end.saturating_add(ask).min(self.buffer.len());
        let room = &mut self.buffer[self.filled.end..end];
        let len = room.len();
        match carrier.receive_into(room)? {
            None => Ok(false),
            Some(0) => Err(LinkError::Closed),
            Some(n) => {
                self.filled.end += n;
                self.drained = n < len && carrier.asks_kernel();
                Ok(true)
            }
        }
    }

    /// Moves what is buffered to the front, so that a whole header and table always fit behind it.
    fn compact(&mut self) {
        if self.filled.start > 0 {
            self.buffer.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
        }
    }

    fn fill_sealed(&mut self, carrier: &mut Carrier, sealing: &mut Sealing) -> Result<bool, LinkError> {
        let mut empty = 0;
        loop {
            let waiting = &sealing.received[sealing.opened..];
            if let Some((length, rest)) = waiting.split_first_chunk::<2>()
                && let Some(message) = rest.get(..usize::from(u16::from_le_bytes(*length)))
            {
                self.compact();
                // The buffer has room: its unparsed rest is less than one header and table, or is being moved
                // into a bulk.
                let message_bytes = message.len();
                let plain = sealing.seal.open(message, &mut self.buffer[self.filled.end..])?;
                self.filled.end += plain;
                sealing.opened += 2 + message_bytes;
                if plain == 0 {
                    // No side of ours sends one after the handshake, and they may come without end.
                    empty += 1;
                    if empty > MOST_EMPTY {
                        return Err(LinkError::NotAuthentic);
                    }
                    continue;
                }
                return Ok(true);
            }
            if std::mem::take(&mut self.drained) {
                return Ok(false);
            }
            sealing.received.drain(..sealing.opened);
            sealing.opened = 0;
            let have = sealing.received.len();
            sealing.received.resize(have + 2 * 65_536, 0);
            let got = carrier.receive_into(&mut sealing.received[have..]);
            let (got, error) = match got {
                Ok(Some(n)) => (n, None),
                Ok(None) => (0, Some(Ok(false))),
                Err(error) => (0, Some(Err(error.into()))),
            };
            sealing.received.truncate(have + got);
            match error {
                Some(result) => return result,
                None if got == 0 => return Err(LinkError::Closed),
                None => self.drained = got < 2 * 65_536 && carrier.asks_kernel(),
            }
        }
    }

    /// Moves buffered bytes into the bulk's place; true when it is complete.
    fn take_bulk(&mut self) -> bool {
        while let Some(piece) = self.pieces.get(self.piece) {
            let n = self.filled.len().min(piece.len - self.piece_filled);
            if n == 0 {
                return false;
            }
            let source = &self.buffer[self.filled.start..self.filled.start + n];
            // SAFETY: `place`'s contract: the piece is writable and not used otherwise; `piece_filled + n <=
            // len`.
            unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), piece.ptr.add(self.piece_filled), n) };
            self.filled.start += n;
            self.advance(n);
        }
        true
    }

    /// `n` more bytes of the bulk are in their place. Returns what is left of `n` beyond the bulk.
    fn advance(&mut self, mut n: usize) -> usize {
        while n > 0 {
            let Some(piece) = self.pieces.get(self.piece) else {
                break;
            };
            let step = n.min(piece.len - self.piece_filled);
            self.piece_filled += step;
            n -= step;
            if self.piece_filled == piece.len {
                self.piece += 1;
                self.piece_filled = 0;
            }
        }
        n
    }

    /// Receives straight into the bulk's place, and a little beyond it into the (empty) buffer.
    fn read_bulk(&mut self, carrier: &mut Carrier, at_once: usize) -> Result<bool, LinkError> {
        if std::mem::take(&mut self.drained) {
            return Ok(false);
        }
        self.filled = 0..0;
        self.calls.clear();
        let (mut asked, mut all) = (0, true);
        for (index, piece) in self.pieces[self.piece..].iter().take(MAX_PIECES).enumerate() {
            let skip = if index == 0 { self.piece_filled } else { 0 };
            let len = (piece.len - skip).min(at_once - asked);
            // SAFETY: `skip` is within the piece.
            let ptr = unsafe { piece.ptr.add(skip) };
            self.calls.push(iovec_mut(PieceMut { ptr, len }));
            asked += len;
            all = skip + len == piece.len;
            if asked == at_once {
                break;
            }
        }
        if all && self.calls.len() == self.pieces.len() - self.piece {
            let ahead = if self.large { AHEAD_BYTES } else { self.buffer.len() };
            self.calls.push(iovec_mut(PieceMut { ptr: self.buffer.as_mut_ptr(), len: ahead }));
            asked += ahead;
        }
        // SAFETY: the pieces by `place`'s contract, the buffer because it is ours and its bytes are not in
        // use.
        match unsafe { carrier.receive(&mut self.calls) }? {
            None => Ok(false),
            Some(0) => Err(LinkError::Closed),
            Some(n) => {
                let beyond = self.advance(n);
                self.filled = 0..beyond;
                self.drained = n < asked && carrier.asks_kernel();
                Ok(true)
            }
        }
    }
}

impl<G> Outgoing<G> {
    /// `copied`: the pieces follow the head in its own memory.
    ///
    /// # Safety
    /// As [`Link::send`].
    unsafe fn push(
        &mut self,
        urgency: Urgency,
        head: &[u8],
        pieces: &[Piece],
        bulk: usize,
        copied: bool,
        guard: G,
    ) {
        let (mut own_head, mut own_pieces) = self.spare.pop().unwrap_or_default();
        if copied && bulk >= LINE_BYTES {
            // Where no line is stored in two parts, a page that is in no cache is copied a tenth of a
            // microsecond sooner.
            own_head.reserve(LINE_BYTES + head.len() + bulk);
            let unaligned = (own_head.as_ptr().addr() + head.len()) % LINE_BYTES;
            own_head.resize((LINE_BYTES - unaligned) % LINE_BYTES, 0);
        }
        let start = own_head.len();
        own_head.extend_from_slice(head);
        if copied {
            own_head.reserve(bulk);
            for piece in pieces {
                // SAFETY: readable memory by the caller's promise; what is copied raw may be a program's,
                // that others write.
                unsafe { append(&mut own_head, *piece) };
            }
        } else {
            own_pieces.extend(pieces.iter().filter(|p| p.len > 0));
        }
        let bytes = head.len() + bulk;
        self.queued_bytes += bytes;
        self.queues[urgency as usize].push_back(Frame {
            head: own_head,
            start,
            pieces: own_pieces,
            bytes,
            _guard: guard,
        });
    }

    /// Queue numbers in the order in which frames leave, the started frame's queue first for its one frame.
    fn order(&self) -> impl Iterator<Item = &Frame<G>> {
        let started = self.started.map(|u| u as usize);
        let first = started.and_then(|q| self.queues[q].front());
        let rest = self
            .queues
            .iter()
            .enumerate()
            .flat_map(move |(q, queue)| queue.iter().skip(usize::from(Some(q) == started)));
        first.into_iter().chain(rest)
    }

    /// The urgency of the next frame to leave.
    fn next(&self) -> Option<Urgency> {
        const ALL: [Urgency; 3] = [Urgency::Demand, Urgency::Prefetch, Urgency::WriteBack];
        self.started.or_else(|| ALL.into_iter().find(|u| !self.queues[*u as usize].is_empty()))
    }

    /// What is left to send, where that is one frame in one piece: the usual request, and the usual reply.
    fn only_piece(&self) -> Option<Piece> {
        let frame = self.queues[self.next()? as usize].front()?;
        let rest = frame.bytes - self.sent;
        let only = frame.pieces.is_empty() && rest == self.queued_bytes;
        // `sent` is less than the frame's bytes, all of which are in its head.
        only.then(|| Piece { ptr: frame.head().ptr.wrapping_add(self.sent), len: rest })
    }

    fn flush_plain(
        &mut self,
        carrier: &mut Carrier,
        zero_copy: Option<&Sender>,
        at_once: usize,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Flush, LinkError> {
        let mut calls_made = 0;
        while self.queued_bytes > 0 {
            if calls_made > 0 && !goes_on() {
                return Ok(Flush::Stopped);
            }
            calls_made += 1;
            if let Some(mut piece) = self.only_piece() {
                piece.len = piece.len.min(at_once);
                // SAFETY: the head of a queued frame.
                let sent = unsafe { carrier.send(&[iovec(piece)]) };
                let Some(sent) = sent.map_err(closed_or_io)? else {
                    return Ok(Flush::Blocked);
                };
                self.left(sent);
                if sent < piece.len {
                    return Ok(Flush::Blocked);
                }
                continue;
            }
            let mut without_copy = None;
            let mut calls = std::mem::take(&mut self.calls);
            calls.clear();
            let mut bytes = 0;
            let mut skip = self.sent;
            'gather: for frame in self.order() {
                let head = frame.head();
                for piece in std::iter::once(&head).chain(&frame.pieces) {
                    if skip >= piece.len {
                        skip -= piece.len;
                        continue;
                    }
                    if calls.len() == MAX_PIECES || bytes >= at_once {
                        break 'gather;
                    }
                    // SAFETY: `skip` is within the piece.
                    let ptr = unsafe { piece.ptr.add(skip) };
                    let rest = piece.len - skip;
                    // A head is used again as soon as it has left.
                    let is_head = std::ptr::eq(piece, &raw const head);
                    if !is_head && zero_copy.is_some_and(|sender| sender.takes(rest)) {
                        without_copy = Some(Piece { ptr, len: rest }).filter(|_| calls.is_empty());
                        break 'gather;
                    }
                    let len = rest.min(at_once - bytes);
                    push_merged(&mut calls, Piece { ptr, len });
                    bytes += len;
                    if len < rest {
                        break 'gather;
                    }
                    skip = 0;
                }
            }
            if let Some((piece, sender)) = without_copy.zip(zero_copy) {
                self.calls = calls;
                // SAFETY: the piece is readable by `send`'s contract, and stays so, unchanged, until the peer
                // has all of it, by that of `send_without_copies`.
                match unsafe { sender.send(carrier.descriptor(), piece) }.map_err(closed_or_io)? {
                    Sent::Taken { bytes, .. } => {
                        self.left(bytes);
                        if bytes < piece.len {
                            return Ok(Flush::Blocked);
                        }
                    }
                    Sent::Blocked => return Ok(Flush::Blocked),
                    // Not this one, or not here: the next round copies.
                    Sent::Unsupported => {}
                }
                continue;
            }
            // SAFETY: heads belong to queued frames, pieces are readable by `send`'s contract.
            let sent = unsafe { carrier.send(&calls) };
            self.calls = calls;
            let Some(sent) = sent.map_err(closed_or_io)? else {
                return Ok(Flush::Blocked);
            };
            self.left(sent);
            if sent < bytes {
                return Ok(Flush::Blocked);
            }
        }
        Ok(Flush::Empty)
    }

    /// `n` bytes have left.
    fn left(&mut self, mut n: usize) {
        self.queued_bytes -= n;
        while n > 0 {
            let urgency = self.next().expect("bytes left, so a frame was queued");
            let queue = &mut self.queues[urgency as usize];
            let frame = queue.front().expect("the next frame's queue is not empty");
            let step = n.min(frame.bytes - self.sent);
            n -= step;
            self.sent += step;
            if self.sent < frame.bytes {
                self.started = Some(urgency);
                return;
            }
            let Frame { mut head, mut pieces, .. } = queue.pop_front().expect("seen above");
            self.started = None;
            self.sent = 0;
            if self.spare.len() < 64 {
                head.clear();
                pieces.clear();
                self.spare.push((head, pieces));
            }
        }
    }

    fn flush_sealed(
        &mut self,
        carrier: &mut Carrier,
        sealing: &mut Sealing,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Flush, LinkError> {
        let mut messages = 0;
        loop {
            while sealing.sent < sealing.sealed.len() {
                match carrier.send_from(&sealing.sealed[sealing.sent..]).map_err(closed_or_io)? {
                    Some(n) => sealing.sent += n,
                    None => return Ok(Flush::Blocked),
                }
            }
            sealing.sealed.clear();
            sealing.sent = 0;
            if self.queued_bytes == 0 {
                return Ok(Flush::Empty);
            }
            if messages > 0 && !goes_on() {
                return Ok(Flush::Stopped);
            }
            messages += 1;
            self.gather_plain(&mut sealing.plain);
            let gathered = sealing.plain.len();
            sealing.seal.seal(&sealing.plain, &mut sealing.sealed);
            self.left(gathered);
        }
    }

    /// Copies the next bytes to leave, at most one message's worth.
    fn gather_plain(&self, plain: &mut Vec<u8>) {
        plain.clear();
        let mut skip = self.sent;
        for frame in self.order() {
            let head = frame.head();
            for piece in std::iter::once(&head).chain(&frame.pieces) {
                if skip >= piece.len {
                    skip -= piece.len;
                    continue;
                }
                let n = (piece.len - skip).min(MAX_PLAIN_BYTES - plain.len());
                // SAFETY: `skip + n` is within the piece, readable by `send`'s contract.
                unsafe { append(plain, Piece { ptr: piece.ptr.add(skip), len: n }) };
                skip = 0;
                if plain.len() == MAX_PLAIN_BYTES {
                    return;
                }
            }
        }
    }
}

/// Appends the bytes of a piece.
///
/// # Safety
/// The piece is readable memory; its bytes may change meanwhile.
unsafe fn append(bytes: &mut Vec<u8>, piece: Piece) {
    let end = bytes.len();
    bytes.reserve(piece.len);
    // SAFETY: readable by the caller's promise; there is room behind `end`, written before the length covers
    // it. Raw copies: no reference into memory that its owner still writes.
    unsafe {
        std::ptr::copy_nonoverlapping(piece.ptr, bytes.as_mut_ptr().add(end), piece.len);
        bytes.set_len(end + piece.len);
    }
}

/// Neighbouring frames of a server are neighbours in memory: one piece for the kernel.
fn push_merged(calls: &mut Vec<libc::iovec>, piece: Piece) {
    if let Some(last) = calls.last_mut()
        && last.iov_base.cast::<u8>().wrapping_add(last.iov_len).cast_const() == piece.ptr
    {
        last.iov_len += piece.len;
        return;
    }
    calls.push(iovec(piece));
}

fn closed_or_io(error: io::Error) -> LinkError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => LinkError::Closed,
        _ => LinkError::Io(error),
    }
}
