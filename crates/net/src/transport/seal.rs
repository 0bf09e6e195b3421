//! Sealing: a byte stream as Noise messages, each a 2-byte length and a ciphertext.

use crate::key::Key;
use snow::params::CipherChoice;
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::Cipher;
use snow::{Builder, HandshakeState, TransportState};

/// X25519, AES-256-GCM, SHA-256; the key is mixed in before the first message, so a wrong key shows at once.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// The longest Noise message.
pub const MAX_MESSAGE_BYTES: usize = 65_535;
/// Bytes each message grows by.
pub const TAG_BYTES: usize = 16;
/// The most plain bytes in one message.
pub const MAX_PLAIN_BYTES: usize = MAX_MESSAGE_BYTES - TAG_BYTES;

/// A message did not open: another key, an altered, replayed or reordered stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotAuthentic;

/// The handshake, either side.
pub(super) struct Proof(Box<HandshakeState>);

impl Proof {
    pub(super) fn new(key: &Key, prologue: &[u8], client: bool) -> Self {
        let builder = Builder::new(PATTERN.parse().expect("a pattern snow knows"))
            .psk(0, key.bytes())
            .and_then(|b| b.prologue(prologue))
            .expect("the pattern takes one key and a prologue");
        let state = if client { builder.build_initiator() } else { builder.build_responder() };
        Self(Box::new(state.expect("the pattern needs nothing else")))
    }

    /// The next message of this side, its length before it.
    pub(super) fn write(&mut self) -> Vec<u8> {
        let mut message = vec![0; 2 + 256];
        let len = self
            .0
            .write_message(&[], &mut message[2..])
            .expect("handshake messages of this pattern fit 256 bytes");
        message.truncate(2 + len);
        set_length(&mut message);
        message
    }

    pub(super) fn read(&mut self, message: &[u8]) -> Result<(), NotAuthentic> {
        let mut payload = [0; 256];
        self.0.read_message(message, &mut payload).map(drop).map_err(|_| NotAuthentic)
    }

    pub(super) fn finish(self) -> Seal {
        Seal(Box::new(self.0.into_transport_mode().expect("both handshake messages have passed")))
    }
}

/// The keys of a connection, one per direction, each with its message counter.
pub struct Seal(Box<TransportState>);

impl Seal {
    /// Appends `plain` (at most [`MAX_PLAIN_BYTES`]) as one message.
    pub fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + 2 + plain.len() + TAG_BYTES, 0);
        let len = self
            .0
            .write_message(plain, &mut out[start + 2..])
            .expect("a message within the limits, and fewer than 2^64 of them");
        debug_assert_eq!(len, plain.len() + TAG_BYTES);
        set_length(&mut out[start..]);
    }

    /// Opens one message (without its length) into `out`, which has room for it. Returns the plain length.
    pub fn open(&mut self, message: &[u8], out: &mut [u8]) -> Result<usize, NotAuthentic> {
        self.0.read_message(message, out).map_err(|_| NotAuthentic)
    }
}

/// Bytes of a key for datagrams.
pub const DATAGRAM_KEY_BYTES: usize = 32;
/// Bytes a datagram grows by: the number that its key is used with, and the tag.
pub const DATAGRAM_SEAL_BYTES: usize = 8 + TAG_BYTES;
/// A datagram that was overtaken by more than so many is rejected: it may be a replay.
const MOST_OVERTAKEN: u64 = 4096;

/// Keys for datagrams to and from one peer, which exchanged them over a sealed connection. AES-256-GCM with
/// the number that each datagram carries.
pub struct DatagramSeal {
    ours: Box<dyn Cipher>,
    theirs: Box<dyn Cipher>,
    /// The number of the next datagram, and the highest that came.
    next: u64,
    newest: u64,
}

impl DatagramSeal {
    /// `ours` seals what leaves, `theirs` opens what comes. A key is used for one direction between two ranks
    /// in one run, never again.
    pub fn new(ours: &[u8; DATAGRAM_KEY_BYTES], theirs: &[u8; DATAGRAM_KEY_BYTES]) -> Self {
        let cipher = |key| {
            let mut cipher =
                DefaultResolver.resolve_cipher(&CipherChoice::AESGCM).expect("the cipher of connections");
            cipher.set(key);
            cipher
        };
        Self { ours: cipher(ours), theirs: cipher(theirs), next: 0, newest: 0 }
    }

    /// Replaces `out` by the sealed datagram.
    pub fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.next.to_le_bytes());
        out.resize(DATAGRAM_SEAL_BYTES + plain.len(), 0);
        let (number, sealed) = out.split_at_mut(8);
        let len = self.ours.encrypt(self.next, number, plain, sealed);
        debug_assert_eq!(len, plain.len() + TAG_BYTES);
        self.next += 1;
    }

    /// Opens a datagram into `out`, which has room for it. Returns the plain length.
    pub fn open(&mut self, datagram: &[u8], out: &mut [u8]) -> Result<usize, NotAuthentic> {
        let (head, sealed) = datagram.split_first_chunk::<8>().ok_or(NotAuthentic)?;
        let number = u64::from_le_bytes(*head);
        if sealed.len() < TAG_BYTES
            || number.saturating_add(MOST_OVERTAKEN) < self.newest
            || number == u64::MAX
        {
            return Err(NotAuthentic);
        }
        let len = self.theirs.decrypt(number, head, sealed, out).map_err(|_| NotAuthentic)?;
        self.newest = self.newest.max(number);
        Ok(len)
    }
}

fn set_length(message: &mut [u8]) {
    let len = u16::try_from(message.len() - 2).expect("a Noise message fits 16 bits");
    message[..2].copy_from_slice(&len.to_le_bytes());
}
