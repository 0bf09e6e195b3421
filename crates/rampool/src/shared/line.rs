//! One connection to another rank, over TCP or through shared memory: frames in and out of a byte stream, plain or sealed. Never blocks.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rampool_proto::share::control::{Control, FrameKind, Framed, deframe, frame};
use rampool_proto::share::{Malformed, Message};

use crate::transport::{Carrier, MAX_MESSAGE_BYTES, MAX_PLAIN_BYTES, Means, Peer, Seal, TAG_BYTES};

/// Why a connection is of no use any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    #[error("its connection closed")]
    Closed,
    #[error("its connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Malformed(#[from] Malformed),
    #[error("its bytes are not authentic")]
    NotAuthentic,
}

/// What a frame brought.
#[derive(Debug)]
pub enum Incoming {
    Message(Message),
    Control(Control),
}

/// Bytes to send, of which the first `done` have left.
#[derive(Debug, Default)]
struct Outgoing {
    bytes: Vec<u8>,
    done: usize,
}

impl Outgoing {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.done..]
    }

    fn take(&mut self, count: usize) {
        self.done += count;
        if self.done == self.bytes.len() {
            self.bytes.clear();
            self.done = 0;
            // One large message must not hold its room for ever.
            if self.bytes.capacity() > MOST_IDLE_BYTES {
                self.bytes.shrink_to(READ_BYTES);
            }
        }
    }

    /// Moves what is left to the front, if that makes room worth having.
    fn compact(&mut self) {
        if self.done > READ_BYTES && self.done * 2 > self.bytes.len() {
            self.bytes.drain(..self.done);
            self.done = 0;
        }
    }
}

/// Bytes that came: `bytes[done..filled]` are not used up; what lies behind is room.
#[derive(Debug, Default)]
struct Arrived {
    bytes: Vec<u8>,
    done: usize,
    filled: usize,
}

impl Arrived {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.done..self.filled]
    }

    fn take(&mut self, count: usize) {
        self.done += count;
        if self.done == self.filled {
            self.done = 0;
            self.filled = 0;
            if self.bytes.len() > MOST_IDLE_BYTES {
                self.bytes = Vec::new();
            }
        }
    }

    /// Room for at least this many bytes more.
    fn room(&mut self, wanted: usize) -> &mut [u8] {
        if self.bytes.len() - self.filled < wanted {
            self.bytes.copy_within(self.done..self.filled, 0);
            self.filled -= self.done;
            self.done = 0;
            let len = (self.filled + wanted).max(READ_BYTES);
            if self.bytes.len() < len {
                self.bytes.resize(len.next_power_of_two(), 0);
            }
        }
        &mut self.bytes[self.filled..]
    }
}

/// Asked of the kernel at once, at least.
const READ_BYTES: usize = 64 << 10;
/// A buffer that is empty keeps no more.
const MOST_IDLE_BYTES: usize = 4 << 20;

/// A connection.
pub(super) struct Line {
    carrier: Carrier,
    seal: Option<Seal>,
    /// As it came, where the connection is sealed.
    ciphertext: Arrived,
    plain: Arrived,
    /// Frames to send, and, where the connection is sealed, what became of those before them.
    frames: Outgoing,
    sealed: Outgoing,
}

impl Line {
    pub fn new(carrier: Carrier, seal: Option<Seal>) -> Self {
        Self {
            carrier,
            seal,
            ciphertext: Arrived::default(),
            plain: Arrived::default(),
            frames: Outgoing::default(),
            sealed: Outgoing::default(),
        }
    }

    pub fn peer(&self) -> &Peer {
        self.carrier.peer()
    }

    /// Whether the other rank is on this machine, by its address.
    pub fn is_local(&self) -> bool {
        self.carrier.is_local()
    }

    pub fn means(&self) -> Means {
        self.carrier.means()
    }

    /// Whether to ask the connection whether something has come costs no call into the kernel, and whether it has to be told before a thread sleeps on it
    /// ([`Line::may_sleep`]).
    pub fn is_shared_memory(&self) -> bool {
        self.means() == Means::Rings
    }

    /// Whether what travels is encrypted.
    pub fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }

    /// Returns the frame's bytes.
    pub fn queue_message(&mut self, message: &Message) -> usize {
        let before = self.frames.bytes.len();
        frame(FrameKind::Message, &mut self.frames.bytes, |out| message.encode(out));
        self.frames.bytes.len() - before
    }

    pub fn queue_control(&mut self, control: &Control) {
        frame(FrameKind::Control, &mut self.frames.bytes, |out| control.encode(out));
    }

    /// Whether something waits to be sent.
    pub fn has_backlog(&self) -> bool {
        !self.frames.rest().is_empty() || !self.sealed.rest().is_empty()
    }

    /// Bytes of frames that wait to be sent.
    pub fn queued_bytes(&self) -> usize {
        self.frames.rest().len()
    }

    /// Says to the other end that a thread is about to sleep until something comes, or there is room for what waits to be sent. Every other call takes that back.
    /// False: there is something already.
    pub fn may_sleep(&self) -> bool {
        let writing = self.has_backlog();
        self.carrier.has_said_that_it_sleeps(true, writing) || self.carrier.may_sleep(true, writing)
    }

    /// Whether room for what waits to be sent is to be asked for as such. Otherwise it shows as something to read.
    pub fn shows_room(&self) -> bool {
        self.carrier.shows_room()
    }

    /// Sends what the kernel takes now. True if nothing is left.
    pub fn flush(&mut self) -> Result<bool, LineError> {
        if let Some(seal) = &mut self.seal {
            while !self.frames.rest().is_empty() {
                let rest = self.frames.rest();
                let piece = rest.len().min(MAX_PLAIN_BYTES);
                seal.seal(&rest[..piece], &mut self.sealed.bytes);
                self.frames.take(piece);
            }
        }
        let out = if self.seal.is_some() { &mut self.sealed } else { &mut self.frames };
        while !out.rest().is_empty() {
            match self.carrier.send_from(out.rest())? {
                Some(sent) => out.take(sent),
                None => {
                    out.compact();
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Sends everything, or gives up at the deadline.
    pub fn flush_until(&mut self, deadline: Instant) -> Result<bool, LineError> {
        while !self.flush()? {
            if !self.carrier.wait(true, deadline)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes what has arrived. False if that was nothing. After an error, what came whole before it can still be had.
    pub fn receive(&mut self) -> Result<bool, LineError> {
        let into = if self.seal.is_some() { &mut self.ciphertext } else { &mut self.plain };
        match self.carrier.receive_into(into.room(READ_BYTES / 2))? {
            None => return Ok(false),
            Some(0) => return Err(LineError::Closed),
            Some(got) => into.filled += got,
        }
        if let Some(seal) = &mut self.seal {
            while let Some((head, rest)) = self.ciphertext.rest().split_first_chunk::<2>() {
                let len = usize::from(u16::from_le_bytes(*head));
                if !(TAG_BYTES..=MAX_MESSAGE_BYTES).contains(&len) {
                    return Err(LineError::NotAuthentic);
                }
                let Some(message) = rest.get(..len) else { break };
                let plain = &mut self.plain.room(len - TAG_BYTES)[..len - TAG_BYTES];
                seal.open(message, plain).map_err(|_| LineError::NotAuthentic)?;
                self.plain.filled += len - TAG_BYTES;
                self.ciphertext.take(2 + len);
            }
        }
        Ok(true)
    }

    /// The next frame that is whole.
    pub fn next(&mut self) -> Result<Option<Incoming>, LineError> {
        let (incoming, taken) = match deframe(self.plain.rest())? {
            Framed::Partial => return Ok(None),
            Framed::Whole { kind: FrameKind::Message, content, taken } => (Incoming::Message(Message::decode(content)?), taken),
            Framed::Whole { kind: FrameKind::Control, content, taken } => (Incoming::Control(Control::decode(content)?), taken),
        };
        self.plain.take(taken);
        Ok(Some(incoming))
    }

    /// Waits for one control message, while ranks meet.
    pub fn wait_control(&mut self, deadline: Instant) -> Result<Option<Control>, LineError> {
        loop {
            match self.next()? {
                Some(Incoming::Control(control)) => return Ok(Some(control)),
                Some(Incoming::Message(_)) => return Err(Malformed { what: "a message before the ranks have met", at: 0 }.into()),
                None => {}
            }
            if !self.receive()? && !self.carrier.wait(false, deadline)? {
                return Ok(None);
            }
        }
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.carrier.as_fd()
    }
}
