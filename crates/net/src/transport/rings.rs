//! Bytes between two processes of one machine: two rings in memory that both have mapped
//! ([`rampool_wire::rings`]).
//!
//! A ring is a byte stream like a socket's, so everything above it is the same. One side copies from where
//! the bytes lie into the ring, the other copies them to where they are to lie: nothing else, no kernel in
//! between, and both at the same time, because what is long is published piece by piece.
//!
//! The socket over which the two ends connected stays open. A byte on it is a doorbell, sent only to a peer
//! that has said in the shared memory that it sleeps. Its end is the end of the peer; what the peer wrote
//! before is read first.

use super::means::{
    Carrier, Glance, LocalPolicy, Means, Next, Setup, SetupError, Side, Transport, TransportKind,
};
use super::tcp::{Peer, Stream};
use rampool_kernel::sealed::{SealedError, SealedMemory};
use rampool_wire::rings::{Direction, Geometry, OFFER_BYTES, Offer, OfferError, Reader, Span, Word, Writer};
use rampool_wire::session::features;
use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Bytes of each ring to a server: both together, and what they are copied from or to, fit the caches that
/// two neighbouring cores have.
pub const RING_BYTES: u32 = 256 << 10;
/// ... and for a client that asks for much at a time and does other work before it takes it: meanwhile the
/// server need not wait for room.
pub const LONG_RING_BYTES: u32 = 2 << 20;
/// So many bytes are published at once: the other side takes them while the next are on their way.
const PUBLISH_BYTES: usize = 16 << 10;
/// After so many reads of an empty ring the socket is read: for the peer's end, and for doorbells that are no
/// longer waited for.
const LOOKS: u32 = 64;

/// Descriptors that a client may hand over before one is asked for.
const MOST_HANDED: usize = 8;
/// Calls that look for a descriptor behind doorbells.
const MOST_DRAINED: usize = 16;

impl Means {
    /// Memory that both processes have mapped; a Unix socket wakes the side that sleeps.
    pub const RINGS: Self = Self::named("rings");
}

/// One side of a pair of rings.
struct Rings {
    stream: Stream,
    memory: Arc<SealedMemory>,
    geometry: Geometry,
    /// The ring that this side writes into.
    out: Direction,
    writer: Writer,
    reader: Reader,
    /// How much the reader has taken, for each [`Glance`].
    taken: Arc<AtomicU64>,
    /// This side has said that it sleeps, as a reader and as a writer, and not yet taken it back.
    asleep: Cell<[bool; 2]>,
    /// The peer was about to ring, and the doorbell had not arrived.
    late: bool,
    looks: u32,
    /// Sends do not wake the peer.
    held: bool,
    /// The socket has ended.
    ended: bool,
    /// What a client has handed over with doorbells, until it is asked for.
    handed: Vec<OwnedFd>,
}

impl Rings {
    fn new(stream: Stream, memory: SealedMemory, geometry: Geometry, out: Direction) -> Self {
        let (writer, reader) = (Writer::new(geometry), Reader::new(geometry));
        Self {
            stream,
            memory: Arc::new(memory),
            geometry,
            out,
            writer,
            reader,
            taken: Arc::default(),
            asleep: Cell::new([false; 2]),
            late: false,
            looks: 0,
            held: false,
            ended: false,
            handed: Vec::new(),
        }
    }

    /// A poll of the rings was empty.
    fn look_at_socket(&mut self) {
        self.looks += 1;
        if self.looks >= LOOKS {
            self.looks = 0;
            self.drain_doorbells();
        }
    }

    /// Takes back that this side sleeps, and reads the doorbell that was meant for it.
    fn cancel_sleep(&mut self) {
        let asleep = self.asleep.replace([false; 2]);
        let mut rang = false;
        for (said, (direction, word)) in
            asleep.into_iter().zip([(self.out.reverse(), Word::ReaderSleeps), (self.out, Word::WriterSleeps)])
        {
            rang |= said
                && self.memory.word32(self.geometry.word(direction, word)).swap(0, Ordering::Relaxed) == 0;
        }
        if rang || (self.late && asleep != [false; 2]) {
            self.late = !self.drain_doorbells();
        }
    }

    /// Takes the doorbells off the socket, which would keep it readable. Whether there were any.
    fn drain_doorbells(&mut self) -> bool {
        let mut doorbells = [0; 512];
        let received = match self.out {
            Direction::ToClient => self.stream.receive_with(&mut doorbells, &mut self.handed),
            Direction::ToServer => self.stream.receive_into(&mut doorbells),
        };
        self.ended |= matches!(received, Ok(Some(0)) | Err(_)) || self.handed.len() > MOST_HANDED;
        matches!(received, Ok(Some(_)))
    }

    /// Whether something can be received.
    fn has_come(&self) -> bool {
        self.reader.would_read(self.count(self.out.reverse(), Word::Written))
    }

    fn publish_written(&self) {
        self.memory
            .word64(self.geometry.word(self.out, Word::Written))
            .store(self.writer.written(), Ordering::Release);
        if !self.held {
            self.wake(self.out, Word::ReaderSleeps);
        }
    }

    fn publish_read(&self) {
        self.taken.store(self.reader.read(), Ordering::Relaxed);
        let direction = self.out.reverse();
        self.memory
            .word64(self.geometry.word(direction, Word::Read))
            .store(self.reader.read(), Ordering::Release);
        self.wake(direction, Word::WriterSleeps);
    }

    fn wake(&self, direction: Direction, word: Word) {
        fence(Ordering::SeqCst);
        let sleeps = self.memory.word32(self.geometry.word(direction, word));
        if sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0 {
            // A socket that takes no doorbell is full of them, or its other end is closed: the next reader
            // sees that.
            let _ = self.stream.send_from(&[1]);
        }
    }

    /// What the other side has published, read once.
    fn count(&self, direction: Direction, word: Word) -> u64 {
        self.memory.word64(self.geometry.word(direction, word)).load(Ordering::Acquire)
    }

    fn place(&self, direction: Direction, span: Span) -> *mut u8 {
        self.memory.span(self.geometry.bytes(direction) + span.at, span.len)
    }
}

impl Transport for Rings {
    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn means(&self) -> Means {
        Means::RINGS
    }

    unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Option<usize>> {
        self.cancel_sleep();
        let (mut total, mut unpublished) = (0, 0);
        'pieces: for piece in pieces {
            let mut done = 0;
            while done < piece.iov_len {
                let want = (piece.iov_len - done).min(PUBLISH_BYTES - unpublished);
                if self.writer.room() < want {
                    self.writer.saw(self.count(self.out, Word::Read)).map_err(bad_counter)?;
                }
                let span = self.writer.next(want);
                if span.len == 0 {
                    break 'pieces;
                }
                let to = self.place(self.out, span);
                // SAFETY: the source by the caller's promise, `done + len` being within the piece; the target
                // is within our mapping, in a part of the ring that the reader leaves alone as long as it
                // keeps to the rules, and spoils for itself if not. Raw copies: the peer can write there.
                unsafe { std::ptr::copy_nonoverlapping(piece.iov_base.cast::<u8>().add(done), to, span.len) };
                self.writer.wrote(span.len);
                done += span.len;
                total += span.len;
                unpublished += span.len;
                if unpublished == PUBLISH_BYTES {
                    self.publish_written();
                    unpublished = 0;
                }
            }
        }
        if unpublished > 0 {
            self.publish_written();
        }
        let nothing = total == 0 && pieces.iter().any(|piece| piece.iov_len > 0);
        if nothing {
            self.look_at_socket();
            if self.ended {
                // The peer will not make room any more.
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        Ok((!nothing).then_some(total))
    }

    unsafe fn receive(&mut self, pieces: &mut [libc::iovec]) -> io::Result<Option<usize>> {
        self.cancel_sleep();
        let (mut total, mut unpublished) = (0, 0);
        'pieces: for piece in pieces.iter() {
            let mut done = 0;
            while done < piece.iov_len {
                if self.reader.waiting() == 0 {
                    self.reader.saw(self.count(self.out.reverse(), Word::Written)).map_err(bad_counter)?;
                }
                let span = self.reader.next((piece.iov_len - done).min(PUBLISH_BYTES - unpublished));
                if span.len == 0 {
                    break 'pieces;
                }
                let from = self.place(self.out.reverse(), span);
                // SAFETY: the target by the caller's promise, `done + len` being within the piece; the source
                // is within our mapping. Raw copies: the peer can write there meanwhile; what arrives is
                // looked at afterwards, where it has arrived.
                unsafe {
                    std::ptr::copy_nonoverlapping(from, piece.iov_base.cast::<u8>().add(done), span.len)
                };
                self.reader.took(span.len);
                done += span.len;
                total += span.len;
                unpublished += span.len;
                if unpublished == PUBLISH_BYTES {
                    self.publish_read();
                    unpublished = 0;
                }
            }
        }
        if unpublished > 0 {
            self.publish_read();
        }
        if total > 0 {
            self.looks = 0;
            return Ok(Some(total));
        }
        self.look_at_socket();
        // What was written before the end comes first.
        let over = self.ended && !self.has_come();
        Ok(over.then_some(0))
    }

    fn glance(&self) -> Option<Glance> {
        let written = self.geometry.word(self.out.reverse(), Word::Written);
        Some(Glance { memory: Arc::clone(&self.memory), written, taken: Arc::clone(&self.taken) })
    }

    fn hold_doorbell(&mut self, held: bool) {
        self.held = held;
    }

    fn ring(&self) {
        if self.count(self.out, Word::Read) != self.writer.written() {
            self.wake(self.out, Word::ReaderSleeps);
        }
    }

    fn shares_memory(&self) -> bool {
        true
    }

    /// Announces that this side is about to sleep on the socket, until there is something to read or, if
    /// `writing`, room to write. False: do not sleep, it is there already.
    fn may_sleep(&self, reading: bool, writing: bool) -> bool {
        self.asleep.set([reading, writing]);
        let sleeps = |direction, word, yes: bool| {
            self.memory.word32(self.geometry.word(direction, word)).store(yes.into(), Ordering::Relaxed)
        };
        sleeps(self.out.reverse(), Word::ReaderSleeps, reading);
        sleeps(self.out, Word::WriterSleeps, writing);
        // The peer publishes, then checks whether this side sleeps; this side says that it sleeps, then
        // checks what is published. One of the two sees the other.
        fence(Ordering::SeqCst);
        let readable = reading && self.has_come();
        let writable = writing && self.writer.would_write(self.count(self.out, Word::Read));
        !(readable || writable || self.ended)
    }

    fn has_said_that_it_sleeps(&self, reading: bool, writing: bool) -> bool {
        self.asleep.get() == [reading, writing]
    }

    fn hand_over(&self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(self.stream.send_with(&[1], &[fd])?.is_some())
    }

    /// More doorbells before it than an honest client rings are not
    /// taken off: they may come without end.
    fn take_handed(&mut self) -> Vec<OwnedFd> {
        // A doorbell with a descriptor is the last that one call takes in.
        for _ in 0..MOST_DRAINED {
            if !self.handed.is_empty() || !self.drain_doorbells() || self.ended {
                break;
            }
        }
        std::mem::take(&mut self.handed)
    }
}

/// Both ends have [`features::RINGS`], over a Unix socket.
pub(super) struct RingsKind;

impl TransportKind for RingsKind {
    fn bits(&self) -> (u32, u32) {
        (features::RINGS, features::SHARED_MEMORY)
    }

    fn offered(&self, local: &LocalPolicy, stream: &Stream) -> u32 {
        let unix = matches!(stream.peer(), Peer::Unix { .. });
        if unix { local.features & features::SHARED_MEMORY } else { 0 }
    }

    fn setup(&self) -> Box<dyn Setup> {
        Box::new(Offering { offer: Offer::NONE, memory: None })
    }
}

/// The server offers rings, and the client answers with the same offer, or that it cannot have them.
struct Offering {
    offer: Offer,
    memory: Option<SealedMemory>,
}

impl Setup for Offering {
    fn begin(&mut self, side: &mut Side<'_>) -> Result<Next, SetupError> {
        if !side.is_client {
            let is_long = side.features & features::LONG_RINGS != 0;
            match offer(if is_long { LONG_RING_BYTES } else { side.ring_bytes }) {
                Ok((offer, memory, fd)) => {
                    (self.offer, self.memory) = (offer, Some(memory));
                    side.hand_over.push(fd);
                    if side.features & features::PLACES != 0 {
                        side.hand_over.extend(side.frames.take());
                    }
                }
                Err(error) => {
                    tracing::warn!(peer = %side.peer(), %error, "no shared memory with a client on this \
                        machine; it is served through its socket");
                }
            }
            side.said.extend(self.offer.encode());
        }
        Ok(Next::Await(OFFER_BYTES))
    }

    fn hear(&mut self, side: &mut Side<'_>, message: &[u8]) -> Result<Next, SetupError> {
        let offer = Offer::parse(message.first_chunk().expect("an offer was awaited"))?;
        let mut out = Direction::ToClient;
        if side.is_client {
            out = Direction::ToServer;
            self.memory = take(side, offer);
            let answer = if self.memory.is_some() { offer } else { Offer::NONE };
            side.said.extend(answer.encode());
        } else if offer == Offer::NONE {
            self.memory = None;
        } else if offer != self.offer {
            return Err(OfferError.into());
        }
        let made = self.memory.take().zip(offer.geometry());
        Ok(Next::Made(made.map(|(memory, geometry)| -> Carrier {
            Box::new(Rings::new(side.take_stream(), memory, geometry, out))
        })))
    }
}

/// What a server offers: memory for both rings.
fn offer(ring_bytes: u32) -> Result<(Offer, SealedMemory, OwnedFd), SealedError> {
    let offer = Offer::of(ring_bytes).expect("a power of two within the bounds");
    let geometry = offer.geometry().expect("there are rings");
    let (memory, fd) = SealedMemory::create(c"rampool-rings", geometry.memory_bytes())?;
    Ok((offer, memory, fd))
}

/// Client: maps what the server offers.
fn take(side: &mut Side<'_>, offer: Offer) -> Option<SealedMemory> {
    let mut handed = std::mem::take(side.handed).into_iter();
    let (geometry, fd) = (offer.geometry()?, handed.next()?);
    *side.frames = handed.next();
    let memory = SealedMemory::adopt(fd.as_fd(), geometry.memory_bytes());
    if let Err(error) = &memory {
        tracing::warn!(peer = %side.peer(), %error, "no shared memory with a server on this machine; it is \
            reached through its socket");
    }
    memory.ok()
}

/// Whether this machine's processes can share memory as rings: bytes of each of the two, or why not.
///
/// # Errors
/// What the kernel refuses.
pub fn probe_rings() -> Result<u32, SealedError> {
    let (offer, _server, fd) = offer(RING_BYTES)?;
    let geometry = offer.geometry().expect("it was offered");
    SealedMemory::adopt(fd.as_fd(), geometry.memory_bytes())?;
    Ok(RING_BYTES)
}

fn bad_counter(error: rampool_wire::rings::BadCounter) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
