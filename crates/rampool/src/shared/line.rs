//! One connection to another rank: frames in and out of a byte stream, plain or sealed. Never blocks.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rampool_proto::share::control::{Control, FrameKind, Framed, deframe, frame};
use rampool_proto::share::{Malformed, Message};

use crate::transport::{MAX_MESSAGE_BYTES, MAX_PLAIN_BYTES, Seal, Stream, TAG_BYTES};

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

/// Bytes of which the first `done` are used up.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    done: usize,
}

impl Buffer {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.done..]
    }

    fn take(&mut self, count: usize) {
        self.done += count;
        if self.done == self.bytes.len() {
            self.bytes.clear();
            self.done = 0;
            // One large message must not hold its room for ever.
            if self.bytes.capacity() > 4 << 20 {
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

/// Asked of the kernel at once.
const READ_BYTES: usize = 128 << 10;

/// A connection.
pub(super) struct Line {
    stream: Stream,
    seal: Option<Seal>,
    /// As it came, where the connection is sealed.
    ciphertext: Buffer,
    plain: Buffer,
    /// Frames to send, and, where the connection is sealed, what became of those before them.
    frames: Buffer,
    sealed: Buffer,
}

impl Line {
    pub fn new(stream: Stream, seal: Option<Seal>) -> Self {
        Self { stream, seal, ciphertext: Buffer::default(), plain: Buffer::default(), frames: Buffer::default(), sealed: Buffer::default() }
    }

    pub fn stream(&self) -> &Stream {
        &self.stream
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
            match self.stream.send_from(out.rest())? {
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
            if !self.stream.wait(true, deadline)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes what has arrived. False if that was nothing. After an error, what came whole before it can still be had.
    pub fn receive(&mut self) -> Result<bool, LineError> {
        let into = if self.seal.is_some() { &mut self.ciphertext } else { &mut self.plain };
        into.compact();
        let len = into.bytes.len();
        into.bytes.resize(len + READ_BYTES, 0);
        let got = self.stream.receive_into(&mut into.bytes[len..]);
        into.bytes.truncate(len + got.as_ref().ok().copied().flatten().unwrap_or(0));
        match got? {
            None => return Ok(false),
            Some(0) => return Err(LineError::Closed),
            Some(_) => {}
        }
        if let Some(seal) = &mut self.seal {
            while let Some((head, rest)) = self.ciphertext.rest().split_first_chunk::<2>() {
                let len = usize::from(u16::from_le_bytes(*head));
                if !(TAG_BYTES..=MAX_MESSAGE_BYTES).contains(&len) {
                    return Err(LineError::NotAuthentic);
                }
                let Some(message) = rest.get(..len) else { break };
                let at = self.plain.bytes.len();
                self.plain.bytes.resize(at + len - TAG_BYTES, 0);
                seal.open(message, &mut self.plain.bytes[at..]).map_err(|_| LineError::NotAuthentic)?;
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
            if !self.receive()? && !self.stream.wait(false, deadline)? {
                return Ok(None);
            }
        }
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
