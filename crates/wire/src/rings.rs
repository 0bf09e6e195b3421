//! Two processes on one machine that share memory: a ring of bytes for each direction, and the message that
//! sets them up.
//!
//! Each ring has one writer and one reader (Lamport, "Proving the correctness of multiprocess programs",
//! 1977): only the writer moves `written`, only the reader moves `read`, and both count bytes since the
//! beginning, so neither waits for a lock of the other. A side that finds nothing to do sets a word in the
//! memory to say that it sleeps, and looks once more. A byte on the socket between the two wakes it.
//!
//! The other process may write anything into the memory at any time. So each side keeps its own counts
//! privately and only publishes them. It reads the other side's count once, and accepts it only within the
//! possible range: [`Writer::saw`] and [`Reader::saw`] check that. The bytes of a ring are a stream like a
//! socket's, and are copied out before they are parsed.
//!
//! This module never touches memory. It says where to access it, and how much.

use crate::checksum;

/// Bytes of an [`Offer`].
pub const OFFER_BYTES: usize = 16;
const OFFER_MAGIC: [u8; 8] = *b"RAMRINGS";
/// The shortest and the longest ring.
pub const MIN_RING_BYTES: u32 = 1 << 12;
pub const MAX_RING_BYTES: u32 = 1 << 24;
/// The counts and sleep words of both rings lie before their bytes.
pub const CONTROL_BYTES: usize = 4096;
/// Each word on a pair of cache lines of its own: processors fetch them in pairs.
const WORD_SPACING: usize = 128;

/// A server's offer of rings, and a client's answer: the same, or zero bytes.
///
/// ```text
///    0  magic "RAMRINGS"        8
///    8  bytes of each ring      u32   a power of two; 0: none
///   12  CRC-32C of the above    u32
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    ring_bytes: u32,
}

/// The bytes are not a valid [`Offer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the message that sets shared memory up is malformed")]
pub struct OfferError;

impl Offer {
    /// No rings: the socket carries everything.
    pub const NONE: Offer = Offer { ring_bytes: 0 };

    /// Rings of this many bytes each.
    ///
    /// # Errors
    /// [`OfferError`] unless it is a power of two between [`MIN_RING_BYTES`] and [`MAX_RING_BYTES`].
    pub fn of(ring_bytes: u32) -> Result<Self, OfferError> {
        let fits = ring_bytes.is_power_of_two() && (MIN_RING_BYTES..=MAX_RING_BYTES).contains(&ring_bytes);
        if fits { Ok(Self { ring_bytes }) } else { Err(OfferError) }
    }

    /// The layout of the rings in their memory, if there are any.
    #[must_use]
    pub fn geometry(self) -> Option<Geometry> {
        (self != Self::NONE).then_some(Geometry { ring_bytes: self.ring_bytes as usize })
    }

    #[must_use]
    pub fn encode(self) -> [u8; OFFER_BYTES] {
        let mut out = [0; OFFER_BYTES];
        out[..8].copy_from_slice(&OFFER_MAGIC);
        out[8..12].copy_from_slice(&self.ring_bytes.to_le_bytes());
        let crc = checksum::crc32c(&out[..12]);
        out[12..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// # Errors
    /// [`OfferError`].
    pub fn parse(bytes: &[u8; OFFER_BYTES]) -> Result<Self, OfferError> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if bytes[..8] != OFFER_MAGIC || word(12) != checksum::crc32c(&bytes[..12]) {
            return Err(OfferError);
        }
        if word(8) == 0 { Ok(Self::NONE) } else { Self::of(word(8)) }
    }
}

/// Which of the two rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    ToServer,
    ToClient,
}

impl Direction {
    #[must_use]
    pub fn reverse(self) -> Self {
        match self {
            Direction::ToServer => Direction::ToClient,
            Direction::ToClient => Direction::ToServer,
        }
    }
}

/// A word that both processes use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Word {
    /// u64: bytes that the writer has put in.
    Written,
    /// u64: bytes that the reader has taken out.
    Read,
    /// u32, 0 or 1: the reader sleeps until there is more. The reader sets the word; the side that wakes it
    /// clears the word.
    ReaderSleeps,
    /// u32, 0 or 1: the writer sleeps until there is room.
    WriterSleeps,
}

/// The offsets of all words and rings.
///
/// ```text
///      0   128   written    u64     the ring to the server
///    128   128   read       u64
///    256   128   the reader sleeps u32
///    384   128   the writer sleeps u32
///    512  4 * 128                   the same of the ring to the client
///   4096     n   bytes of the ring to the server
/// 4096+n     n   bytes of the ring to the client
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    ring_bytes: usize,
}

impl Geometry {
    /// Of one ring.
    #[must_use]
    pub fn ring_bytes(self) -> usize {
        self.ring_bytes
    }

    /// Of all the memory.
    #[must_use]
    pub fn memory_bytes(self) -> usize {
        CONTROL_BYTES + 2 * self.ring_bytes
    }

    /// Where a word lies.
    #[must_use]
    pub fn word(self, direction: Direction, word: Word) -> usize {
        let of_ring = match direction {
            Direction::ToServer => 0,
            Direction::ToClient => 4,
        };
        let of_word = match word {
            Word::Written => 0,
            Word::Read => 1,
            Word::ReaderSleeps => 2,
            Word::WriterSleeps => 3,
        };
        (of_ring + of_word) * WORD_SPACING
    }

    /// Where the bytes of a ring begin.
    #[must_use]
    pub fn bytes(self, direction: Direction) -> usize {
        match direction {
            Direction::ToServer => CONTROL_BYTES,
            Direction::ToClient => CONTROL_BYTES + self.ring_bytes,
        }
    }
}

/// The other process has published an impossible count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer has corrupted the shared memory: a count is {0} instead of {1} to {2}")]
pub struct BadCounter(pub u64, pub u64, pub u64);

/// Consecutive bytes of a ring: their offset and length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    pub at: usize,
    pub len: usize,
}

/// The side that puts bytes in.
///
/// Invariant: `read <= written <= read + capacity`, `read` being what the other side is known to have taken
/// out.
#[derive(Clone, Debug)]
pub struct Writer {
    capacity: u64,
    written: u64,
    read: u64,
}

impl Writer {
    #[must_use]
    pub fn new(geometry: Geometry) -> Self {
        Self { capacity: geometry.ring_bytes as u64, written: 0, read: 0 }
    }

    /// What the reader has published.
    ///
    /// # Errors
    /// [`BadCounter`]: the count is less than before, or more than was written.
    pub fn saw(&mut self, read: u64) -> Result<(), BadCounter> {
        if (self.read..=self.written).contains(&read) {
            self.read = read;
            return Ok(());
        }
        Err(BadCounter(read, self.read, self.written))
    }

    /// Whether a write would find room, if the reader has published this. Also true for an impossible count:
    /// then [`Writer::saw`] reports it.
    #[must_use]
    pub fn would_write(&self, read: u64) -> bool {
        self.written.wrapping_sub(read) != self.capacity
    }

    /// Bytes that are known to fit.
    #[must_use]
    pub fn room(&self) -> usize {
        count(self.capacity - (self.written - self.read))
    }

    /// Where the next bytes go: at most `most` of them, without wrapping around.
    #[must_use]
    pub fn next(&self, most: usize) -> Span {
        span(self.written, self.capacity, most.min(self.room()))
    }

    /// This many bytes were put where [`Writer::next`] said.
    ///
    /// # Panics
    /// If that is more than there was room for.
    pub fn wrote(&mut self, len: usize) {
        assert!(len <= self.room(), "{len} bytes written where {} fit", self.room());
        self.written += len as u64;
    }

    /// The count to publish.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }
}

/// The side that takes bytes out.
///
/// Invariant: `read <= written <= read + capacity`, `written` being what the other side is known to have put
/// in.
#[derive(Clone, Debug)]
pub struct Reader {
    capacity: u64,
    written: u64,
    read: u64,
}

impl Reader {
    #[must_use]
    pub fn new(geometry: Geometry) -> Self {
        Self { capacity: geometry.ring_bytes as u64, written: 0, read: 0 }
    }

    /// What the writer has published.
    ///
    /// # Errors
    /// [`BadCounter`]: the count is less than before, or more than there was room for.
    pub fn saw(&mut self, written: u64) -> Result<(), BadCounter> {
        let most = self.read.saturating_add(self.capacity);
        if (self.written..=most).contains(&written) {
            self.written = written;
            return Ok(());
        }
        Err(BadCounter(written, self.written, most))
    }

    /// Whether a read would find bytes, if the writer has published this. Also true for an impossible count:
    /// then [`Reader::saw`] reports it.
    #[must_use]
    pub fn would_read(&self, written: u64) -> bool {
        self.read != written
    }

    /// Bytes that are known to be there.
    #[must_use]
    pub fn waiting(&self) -> usize {
        count(self.written - self.read)
    }

    /// Where the next bytes lie: at most `most` of them, without wrapping around.
    #[must_use]
    pub fn next(&self, most: usize) -> Span {
        span(self.read, self.capacity, most.min(self.waiting()))
    }

    /// This many bytes were taken from where [`Reader::next`] said.
    ///
    /// # Panics
    /// If that is more than there were.
    pub fn took(&mut self, len: usize) {
        assert!(len <= self.waiting(), "{len} bytes taken where {} were", self.waiting());
        self.read += len as u64;
    }

    /// The count to publish.
    #[must_use]
    pub fn read(&self) -> u64 {
        self.read
    }
}

fn span(from: u64, capacity: u64, len: usize) -> Span {
    let at = from & (capacity - 1);
    Span { at: count(at), len: len.min(count(capacity - at)) }
}

fn count(bytes: u64) -> usize {
    usize::try_from(bytes).expect("no more than a ring holds")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> Geometry {
        Offer::of(MIN_RING_BYTES).unwrap().geometry().unwrap()
    }

    #[test]
    fn the_documented_bytes_of_an_offer_are_these() {
        let offer = Offer::of(0x4_0000).unwrap();
        let mut bytes = *b"RAMRINGS\x00\x00\x04\x00\x00\x00\x00\x00";
        let crc = checksum::crc32c(&bytes[..12]);
        bytes[12..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(offer.encode(), bytes);
        assert_eq!(Offer::parse(&bytes), Ok(offer));
        assert_eq!(Offer::parse(&Offer::NONE.encode()), Ok(Offer::NONE));
        assert_eq!(Offer::NONE.geometry(), None);
    }

    #[test]
    fn the_documented_places_are_these_and_nothing_overlaps() {
        let geometry = Offer::of(0x1_0000).unwrap().geometry().unwrap();
        let words = [Word::Written, Word::Read, Word::ReaderSleeps, Word::WriterSleeps];
        let places = [Direction::ToServer, Direction::ToClient]
            .map(|direction| words.map(|word| geometry.word(direction, word)));
        assert_eq!(places, [[0, 128, 256, 384], [512, 640, 768, 896]]);
        assert_eq!(geometry.bytes(Direction::ToServer), 4096);
        assert_eq!(geometry.bytes(Direction::ToClient), 4096 + 0x1_0000);
        assert_eq!(geometry.memory_bytes(), 4096 + 0x2_0000);
    }

    #[test]
    fn a_ring_of_an_odd_length_is_no_offer() {
        for bytes in [0, 1, MIN_RING_BYTES / 2, MIN_RING_BYTES + 1, 3 << 16, MAX_RING_BYTES * 2, u32::MAX] {
            assert_eq!(Offer::of(bytes), Err(OfferError), "{bytes}");
            let mut message = Offer::NONE.encode();
            message[8..12].copy_from_slice(&bytes.to_le_bytes());
            let crc = checksum::crc32c(&message[..12]);
            message[12..].copy_from_slice(&crc.to_le_bytes());
            assert_eq!(Offer::parse(&message).is_ok(), bytes == 0);
        }
    }

    #[test]
    fn counts_that_cannot_be_are_not_believed() {
        let (mut writer, mut reader) = (Writer::new(geometry()), Reader::new(geometry()));
        assert_eq!(reader.saw(4097), Err(BadCounter(4097, 0, 4096)));
        assert_eq!(reader.saw(u64::MAX), Err(BadCounter(u64::MAX, 0, 4096)));
        assert_eq!(writer.saw(1), Err(BadCounter(1, 0, 0)));
        assert_eq!(reader.saw(4096), Ok(()));
        reader.took(1000);
        assert_eq!(reader.read(), 1000);
        // Neither count goes back.
        assert_eq!(reader.saw(4095), Err(BadCounter(4095, 4096, 5096)));
        assert_eq!(reader.saw(5096), Ok(()));
        writer.wrote(4096);
        assert_eq!(writer.written(), 4096);
        assert_eq!(writer.saw(10), Ok(()));
        assert_eq!(writer.saw(9), Err(BadCounter(9, 10, 4096)));
        assert_eq!(writer.saw(4097), Err(BadCounter(4097, 10, 4096)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(
            bytes in any::<[u8; OFFER_BYTES]>(), altered in 0..OFFER_BYTES, by in 1u8..,
        ) {
            if let Ok(offer) = Offer::parse(&bytes) {
                prop_assert_eq!(offer.encode(), bytes);
            }
            let mut offer = Offer::of(1 << 16).unwrap().encode();
            offer[altered] ^= by;
            prop_assert_eq!(Offer::parse(&offer), Err(OfferError));
        }

        /// A writer and a reader publish at any time: bytes come out in the order they went in, and no span
        /// leaves the ring.
        #[test]
        fn bytes_come_out_as_they_went_in(steps in prop::collection::vec((0..4u8, 0..6000usize), 1..200)) {
            let (mut writer, mut reader) = (Writer::new(geometry()), Reader::new(geometry()));
            let mut ring = vec![0u8; geometry().ring_bytes()];
            let (mut written, mut read) = (0, 0);
            let (mut sent, mut received) = (0u64, 0u64);
            for (what, len) in steps {
                match what {
                    0 => {
                        let span = writer.next(len);
                        for byte in &mut ring[span.at..span.at + span.len] {
                            *byte = u8::try_from(sent % 251).unwrap();
                            sent += 1;
                        }
                        writer.wrote(span.len);
                        written = writer.written();
                    }
                    1 => {
                        prop_assert_eq!(reader.would_read(written), written > received);
                        prop_assert_eq!(reader.saw(written), Ok(()));
                    }
                    2 => {
                        let span = reader.next(len);
                        for byte in &ring[span.at..span.at + span.len] {
                            prop_assert_eq!(u64::from(*byte), received % 251);
                            received += 1;
                        }
                        reader.took(span.len);
                        read = reader.read();
                    }
                    _ => {
                        prop_assert_eq!(writer.saw(read), Ok(()));
                        prop_assert_eq!(writer.would_write(read), writer.room() > 0);
                    }
                }
                prop_assert!(received <= sent && sent - received <= geometry().ring_bytes() as u64);
            }
        }
    }
}
