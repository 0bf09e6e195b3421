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

use super::tcp::Stream;
use rampool_kernel::sealed::{SealedError, SealedMemory};
use rampool_wire::rings::{Direction, Geometry, Offer, Reader, Span, Word, Writer};
use std::cell::Cell;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

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

/// One side of a pair of rings.
pub(super) struct Rings {
    memory: SealedMemory,
    geometry: Geometry,
    /// The ring that this side writes into.
    out: Direction,
    writer: Writer,
    reader: Reader,
    /// This side has said that it sleeps, as a reader and as a writer, and not yet taken it back.
    asleep: Cell<[bool; 2]>,
    /// The peer was about to ring, and the doorbell had not arrived.
    late: bool,
    looks: u32,
    /// The socket has ended.
    ended: bool,
    /// What a client has handed over with doorbells, until it is asked for.
    handed: Vec<OwnedFd>,
}

impl Rings {
    /// The server's side, and what the client needs to have the other one.
    pub(super) fn offer(ring_bytes: u32) -> Result<(Self, Offer, OwnedFd), SealedError> {
        let offer = Offer::of(ring_bytes).expect("a power of two within the bounds");
        let geometry = offer.geometry().expect("there are rings");
        let (memory, fd) = SealedMemory::create(c"rampool-rings", geometry.memory_bytes())?;
        Ok((Self::new(memory, geometry, Direction::ToClient), offer, fd))
    }

    /// The client's side of what a server offers.
    pub(super) fn take(geometry: Geometry, fd: BorrowedFd<'_>) -> Result<Self, SealedError> {
        let memory = SealedMemory::adopt(fd, geometry.memory_bytes())?;
        Ok(Self::new(memory, geometry, Direction::ToServer))
    }

    fn new(memory: SealedMemory, geometry: Geometry, out: Direction) -> Self {
        let (writer, reader) = (Writer::new(geometry), Reader::new(geometry));
        Self {
            memory,
            geometry,
            out,
            writer,
            reader,
            asleep: Cell::new([false; 2]),
            late: false,
            looks: 0,
            ended: false,
            handed: Vec::new(),
        }
    }

    /// As [`Stream::send`].
    ///
    /// # Safety
    /// Every piece is readable memory for the whole call.
    pub(super) unsafe fn send(
        &mut self,
        stream: &Stream,
        pieces: &[libc::iovec],
    ) -> io::Result<Option<usize>> {
        self.cancel_sleep(stream);
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
                    self.publish_written(stream);
                    unpublished = 0;
                }
            }
        }
        if unpublished > 0 {
            self.publish_written(stream);
        }
        let nothing = total == 0 && pieces.iter().any(|piece| piece.iov_len > 0);
        if nothing {
            self.look_at_socket(stream);
            if self.ended {
                // The peer will not make room any more.
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        Ok((!nothing).then_some(total))
    }

    /// As [`Stream::receive`].
    ///
    /// # Safety
    /// Every piece is writable memory for the whole call, and not used otherwise meanwhile.
    pub(super) unsafe fn receive(
        &mut self,
        stream: &Stream,
        pieces: &mut [libc::iovec],
    ) -> io::Result<Option<usize>> {
        self.cancel_sleep(stream);
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
                    self.publish_read(stream);
                    unpublished = 0;
                }
            }
        }
        if unpublished > 0 {
            self.publish_read(stream);
        }
        if total > 0 {
            self.looks = 0;
            return Ok(Some(total));
        }
        self.look_at_socket(stream);
        // What was written before the end comes first.
        let over = self.ended && !self.reader.would_read(self.count(self.out.reverse(), Word::Written));
        Ok(over.then_some(0))
    }

    /// A poll of the rings was empty.
    fn look_at_socket(&mut self, stream: &Stream) {
        self.looks += 1;
        if self.looks >= LOOKS {
            self.looks = 0;
            self.drain_doorbells(stream);
        }
    }

    /// Announces that this side is about to sleep on the socket, until there is something to read or, if
    /// `writing`, room to write. False: do not sleep, it is there already.
    pub(super) fn may_sleep(&self, reading: bool, writing: bool) -> bool {
        self.asleep.set([reading, writing]);
        let sleeps = |direction, word, yes: bool| {
            self.memory.word32(self.geometry.word(direction, word)).store(yes.into(), Ordering::Relaxed)
        };
        sleeps(self.out.reverse(), Word::ReaderSleeps, reading);
        sleeps(self.out, Word::WriterSleeps, writing);
        // The peer publishes, then checks whether this side sleeps; this side says that it sleeps, then
        // checks what is published. One of the two sees the other.
        fence(Ordering::SeqCst);
        let readable = reading && self.reader.would_read(self.count(self.out.reverse(), Word::Written));
        let writable = writing && self.writer.would_write(self.count(self.out, Word::Read));
        !(readable || writable || self.ended)
    }

    pub(super) fn has_said_that_it_sleeps(&self, reading: bool, writing: bool) -> bool {
        self.asleep.get() == [reading, writing]
    }

    /// Takes back that this side sleeps, and reads the doorbell that was meant for it.
    fn cancel_sleep(&mut self, stream: &Stream) {
        let asleep = self.asleep.replace([false; 2]);
        let mut rang = false;
        for (said, (direction, word)) in
            asleep.into_iter().zip([(self.out.reverse(), Word::ReaderSleeps), (self.out, Word::WriterSleeps)])
        {
            rang |= said
                && self.memory.word32(self.geometry.word(direction, word)).swap(0, Ordering::Relaxed) == 0;
        }
        if rang || (self.late && asleep != [false; 2]) {
            self.late = !self.drain_doorbells(stream);
        }
    }

    /// Takes the doorbells off the socket, which would keep it readable. Whether there were any.
    fn drain_doorbells(&mut self, stream: &Stream) -> bool {
        let mut doorbells = [0; 512];
        let received = match self.out {
            Direction::ToClient => stream.receive_with(&mut doorbells, &mut self.handed),
            Direction::ToServer => stream.receive_into(&mut doorbells),
        };
        self.ended |= matches!(received, Ok(Some(0)) | Err(_)) || self.handed.len() > MOST_HANDED;
        matches!(received, Ok(Some(_)))
    }

    /// Client: hands a descriptor to the server, before the frame that speaks of it. False: not now.
    pub(super) fn hand_over(stream: &Stream, fd: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(stream.send_with(&[1], &[fd])?.is_some())
    }

    /// Server: what the client has handed over. More doorbells before it than an honest client rings are not
    /// taken off: they may come without end.
    pub(super) fn take_handed(&mut self, stream: &Stream) -> Vec<OwnedFd> {
        // A doorbell with a descriptor is the last that one call takes in.
        for _ in 0..MOST_DRAINED {
            if !self.handed.is_empty() || !self.drain_doorbells(stream) || self.ended {
                break;
            }
        }
        std::mem::take(&mut self.handed)
    }

    fn publish_written(&self, stream: &Stream) {
        self.memory
            .word64(self.geometry.word(self.out, Word::Written))
            .store(self.writer.written(), Ordering::Release);
        self.wake(stream, self.out, Word::ReaderSleeps);
    }

    fn publish_read(&self, stream: &Stream) {
        let direction = self.out.reverse();
        self.memory
            .word64(self.geometry.word(direction, Word::Read))
            .store(self.reader.read(), Ordering::Release);
        self.wake(stream, direction, Word::WriterSleeps);
    }

    fn wake(&self, stream: &Stream, direction: Direction, word: Word) {
        fence(Ordering::SeqCst);
        let sleeps = self.memory.word32(self.geometry.word(direction, word));
        if sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0 {
            // A socket that takes no doorbell is full of them, or its other end is closed: the next reader
            // sees that.
            let _ = stream.send_from(&[1]);
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

fn bad_counter(error: rampool_wire::rings::BadCounter) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
