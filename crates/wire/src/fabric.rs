//! A connection over UCX: the message that sets it up, and the counts that limit the messages in flight.
//!
//! A link's bytes travel in messages. Each side grants the other a *window*: the number of messages that may
//! be in flight or wait to be read. Every message carries how many of the other side's messages its sender
//! has read since the beginning. A side that has read a quarter of a window without anything to send reports
//! that in a message without bytes, which does not count. So neither side ever holds more for the other than
//! it has granted, however slowly it reads (credit-based flow control: Kung, Blackwell and Chapman, SIGCOMM
//! '94).
//!
//! This module never moves bytes.

use crate::checksum;

const OFFER_MAGIC: [u8; 8] = *b"RAMPLUCX";
/// Bytes of an [`Offer`] besides its address.
pub const OFFER_BYTES: usize = 28;
/// The longest address.
pub const MAX_ADDRESS_BYTES: usize = 8192;
/// The largest window, in messages.
pub const MAX_WINDOW: u32 = 4096;

/// The first message of a server, and a client's answer.
///
/// ```text
///    0  magic "RAMPLUCX"           8
///    8  major version of UCX       u16
///   10  how the client watches     u8    0: not chosen (the server), 1: UCX itself, 2: only the socket
///   11  0                          u8
///   12  bytes of a message         u32   at most
///   16  window                     u32   messages that may be in flight; 0: no connection over UCX
///   20  bytes of the address       u32
///   24  address                          UCX's
///   ..  CRC-32C of the above       u32
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    pub major: u16,
    pub watch: u8,
    pub message_bytes: u32,
    pub window: u32,
    pub address: Vec<u8>,
}

/// Bytes that are no [`Offer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the message that sets the connection over UCX up is malformed")]
pub struct OfferError;

impl Offer {
    /// This side turns out to have no UCX.
    pub const NONE: Offer = Offer { major: 0, watch: 0, message_bytes: 0, window: 0, address: Vec::new() };

    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(OFFER_BYTES + self.address.len());
        bytes.extend_from_slice(&OFFER_MAGIC);
        bytes.extend_from_slice(&self.major.to_le_bytes());
        bytes.extend_from_slice(&[self.watch, 0]);
        bytes.extend_from_slice(&self.message_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.window.to_le_bytes());
        bytes.extend_from_slice(
            &u32::try_from(self.address.len()).expect("an address of some hundred bytes").to_le_bytes(),
        );
        bytes.extend_from_slice(&self.address);
        let sum = checksum::crc32c(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// # Errors
    /// [`OfferError`] unless it is one, to the last byte, and its numbers are within the bounds.
    pub fn parse(bytes: &[u8]) -> Result<Self, OfferError> {
        let (body, sum) = bytes.split_last_chunk::<4>().ok_or(OfferError)?;
        let (head, address) = body.split_first_chunk::<24>().ok_or(OfferError)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let offer = Self {
            major: u16::from_le_bytes([head[8], head[9]]),
            watch: head[10],
            message_bytes: word(12),
            window: word(16),
            address: address.to_vec(),
        };
        let whole = head.starts_with(&OFFER_MAGIC) && head[11] == 0 && word(20) as usize == address.len();
        let bounded = address.len() <= MAX_ADDRESS_BYTES && offer.window <= MAX_WINDOW && offer.watch <= 2;
        let empty =
            (offer.window == 0) == address.is_empty() && (offer.window == 0) == (offer.message_bytes == 0);
        if whole && bounded && empty && checksum::crc32c(body) == u32::from_le_bytes(*sum) {
            Ok(offer)
        } else {
            Err(OfferError)
        }
    }
}

/// A peer claims to have read messages that were never sent, or fewer than before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer claims to have read {read} of {sent} messages sent")]
pub struct BadCounter {
    read: u64,
    sent: u64,
}

/// One side's counts of messages, all since the beginning. Invariants: `heard <= sent <= heard + theirs`,
/// `told <= read`.
#[derive(Clone, Debug)]
pub struct Flow {
    /// The window that this side grants, and the one that it was granted.
    ours: u64,
    theirs: u64,
    sent: u64,
    /// The number that the peer says it has read.
    heard: u64,
    read: u64,
    /// The number that this side has reported as read.
    told: u64,
}

impl Flow {
    #[must_use]
    pub fn new(ours: u32, theirs: u32) -> Self {
        Self { ours: ours.into(), theirs: theirs.into(), sent: 0, heard: 0, read: 0, told: 0 }
    }

    /// Whether one more message may leave.
    #[must_use]
    pub fn may_send(&self) -> bool {
        self.sent - self.heard < self.theirs
    }

    /// A message has left, which carried [`Flow::read`].
    pub fn has_sent(&mut self) {
        self.sent += 1;
        self.told = self.read;
    }

    /// A message without bytes has left.
    pub fn has_told(&mut self) {
        self.told = self.read;
    }

    /// The peer says that it has read this many.
    ///
    /// # Errors
    /// [`BadCounter`] if that is impossible.
    pub fn hears(&mut self, read: u64) -> Result<(), BadCounter> {
        if read < self.heard || read > self.sent {
            return Err(BadCounter { read, sent: self.sent });
        }
        self.heard = read;
        Ok(())
    }

    /// A message was read.
    pub fn has_read(&mut self) {
        self.read += 1;
    }

    /// Whether to report to the peer what was read, although there is nothing to send.
    #[must_use]
    pub fn should_tell(&self) -> bool {
        self.read - self.told >= self.ours.div_ceil(4)
    }

    /// Messages sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Messages read.
    #[must_use]
    pub fn read(&self) -> u64 {
        self.read
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offer(address: Vec<u8>) -> Offer {
        Offer { major: 1, watch: 1, message_bytes: 7936, window: 64, address }
    }

    #[test]
    fn offers_are_read_as_they_were_written_and_nothing_else_is() {
        for offer in [offer(vec![7; 79]), Offer::NONE, offer(vec![1; MAX_ADDRESS_BYTES])] {
            let bytes = offer.encode();
            assert_eq!(bytes.len(), OFFER_BYTES + offer.address.len());
            assert_eq!(Offer::parse(&bytes), Ok(offer));
            assert_eq!(Offer::parse(&bytes[..bytes.len() - 1]), Err(OfferError));
        }
        for wrong in [
            offer(vec![1; MAX_ADDRESS_BYTES + 1]),
            offer(Vec::new()),
            Offer { window: MAX_WINDOW + 1, ..offer(vec![1]) },
            Offer { window: 0, ..offer(vec![1]) },
            Offer { message_bytes: 0, ..offer(vec![1]) },
            Offer { watch: 3, ..offer(vec![1]) },
        ] {
            assert_eq!(Offer::parse(&wrong.encode()), Err(OfferError), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn an_altered_offer_is_none(at in 0..OFFER_BYTES + 40, bit in 0..8u8) {
            let mut bytes = offer(vec![9; 40]).encode();
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Offer::parse(&bytes), Err(OfferError));
        }

        /// Two sides send, read and report in any order: neither window is ever exceeded, and a side that
        /// reads everything lets the other continue.
        #[test]
        fn windows_hold_and_never_close_for_good(
            steps in prop::collection::vec((any::<bool>(), 0..3u8), 0..400), windows in (1..9u32, 1..9u32),
        ) {
            let mut sides = [Flow::new(windows.0, windows.1), Flow::new(windows.1, windows.0)];
            let mut waiting = [0u64; 2];
            let settle = |sides: &mut [Flow; 2], who: usize, what: u8, waiting: &mut [u64; 2]| match what {
                0 if sides[who].may_send() => {
                    let read = sides[who].read();
                    sides[who].has_sent();
                    waiting[1 - who] += 1;
                    sides[1 - who].hears(read).unwrap();
                }
                1 if waiting[who] > 0 => {
                    waiting[who] -= 1;
                    sides[who].has_read();
                }
                2 if sides[who].should_tell() => {
                    let read = sides[who].read();
                    sides[who].has_told();
                    sides[1 - who].hears(read).unwrap();
                }
                _ => {}
            };
            for (who, what) in steps {
                settle(&mut sides, usize::from(who), what, &mut waiting);
                for who in 0..2 {
                    prop_assert!(waiting[who] <= sides[who].ours);
                    prop_assert_eq!(sides[who].read() + waiting[who], sides[1 - who].sent());
                }
            }
            for who in 0..2 {
                while waiting[who] > 0 {
                    settle(&mut sides, who, 1, &mut waiting);
                }
                settle(&mut sides, who, 2, &mut waiting);
            }
            prop_assert!(sides[0].may_send() && sides[1].may_send());
        }

        #[test]
        fn counts_that_cannot_be_are_refused(sent in 0..20u64, first in 0..30u64, second in 0..30u64) {
            let mut flow = Flow::new(64, 64);
            (0..sent).for_each(|_| flow.has_sent());
            prop_assert_eq!(flow.hears(first).is_ok(), first <= sent);
            if first <= sent {
                prop_assert_eq!(flow.hears(second).is_ok(), (first..=sent).contains(&second));
            }
        }
    }
}
