//! One connection, from the greeting to its end.

mod handshake;
mod transmission;

use crate::export::Exports;
use crate::wire::{self, Write};
use handshake::Handshake;
use std::collections::VecDeque;
use std::sync::Arc;
use transmission::Transmission;

pub use handshake::MOST_OPTION_BYTES;

/// What happens to a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input<'a> {
    /// Bytes of the client that it has not taken yet. How many of them it takes is the answer of
    /// [`Session::handle`]; 0 where it needs more of them first.
    Bytes(&'a [u8]),
    /// What an [`Output::Read`] has found: runs that together are as long as it.
    Found(&'a [Run]),
    /// An [`Output::Write`] or [`Output::Zero`] has been carried out.
    Done,
    /// What an [`Output::Status`] has found, from its offset on: at least one extent, at most as many as were
    /// asked for, none of no length, and no more bytes than were asked for.
    Extents(&'a [StatusExtent]),
    /// The work on the export that was asked for last has failed.
    Failed(Failure),
    /// The server takes no new clients. Those that have chosen an export are served as before.
    Draining,
}

/// What a session wants. After one of `Read`, `Write`, `Zero` and `Status` the next input but
/// `Draining` is what came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output<'a> {
    /// These bytes are for the client.
    Send(&'a [u8]),
    /// The next bytes of what was read last are for the client; zeroes where there is a hole.
    SendData { len: u32 },
    /// The next bytes of what was read last are not sent.
    SkipData { len: u32 },
    /// The client has chosen the export of this number. Comes once, before any work on it.
    Opened { export: usize },
    /// Read within the export, at most [`crate::SLICE_BYTES`].
    Read { offset: u64, len: u32 },
    /// Write the bytes that were taken by the last [`Input::Bytes`]; at most [`crate::SLICE_BYTES`].
    Write { offset: u64, len: u32 },
    /// Make bytes zero; at most [`crate::ZERO_SLICE_BYTES`]. `hint`: only what costs nothing.
    Zero { offset: u64, len: u32, hint: bool },
    /// Say what is stored from this offset on, in at most `most` extents.
    Status { offset: u64, len: u32, most: usize },
    /// Close the connection when everything has been sent. The last output.
    Close(End),
}

/// A run of bytes that were read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub len: u32,
    /// All zero, and not stored.
    pub hole: bool,
}

/// What is stored in a part of an export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusExtent {
    pub len: u32,
    /// All zero, and not stored.
    pub hole: bool,
}

/// Why work on an export failed, for the client's user. The client hears of an I/O error.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Failure(pub &'static str);

/// Why a session ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum End {
    #[error("the client said goodbye")]
    Goodbye,
    #[error("the client broke the protocol: {0}")]
    Violation(#[from] Violation),
    /// A simple reply that has begun cannot tell of an error otherwise.
    #[error("a read failed after a part of it had been sent: {0}")]
    ReadFailed(Failure),
}

/// What a client may not do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    #[error("flags {0:#x} were not offered")]
    ClientFlags(u32),
    #[error("these bytes are no option")]
    NoOption,
    #[error("option {option} has {len} bytes")]
    LongOption { option: u32, len: u32 },
    #[error("more than {} options", handshake::MOST_OPTIONS)]
    ManyOptions,
    #[error("it asks for an export that does not exist, in a way that allows no answer")]
    NoSuchExport,
    #[error("these bytes are no request")]
    NoRequest,
    #[error("a write of {0} bytes")]
    LongWrite(u32),
}

/// The server's side of one connection.
///
/// Invariants: it holds no byte of the client; what it holds for the client is at most one answer, of at most
/// [`crate::SLICE_BYTES`] and their heads.
#[derive(Debug)]
pub struct Session {
    exports: Arc<Exports>,
    phase: Phase,
    outputs: Outputs,
}

#[derive(Debug)]
enum Phase {
    Handshake(Handshake),
    Transmission(Transmission),
    Over,
}

/// What [`Session::poll`] gives out.
#[derive(Debug, Default)]
struct Outputs {
    queue: VecDeque<Item>,
    /// Bytes of the [`Item::Send`]s in the queue, after `sent` that have left it.
    bytes: Vec<u8>,
    sent: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Item {
    Send(usize),
    Other(Output<'static>),
}

impl Outputs {
    fn push(&mut self, output: Output<'static>) {
        self.queue.push_back(Item::Other(output));
    }

    fn clear(&mut self) {
        assert!(self.queue.is_empty(), "outputs are taken before the next input comes");
        self.bytes.clear();
        self.sent = 0;
    }
}

impl Write for Outputs {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes.put(bytes);
        match self.queue.back_mut() {
            Some(Item::Send(len)) => *len += bytes.len(),
            _ => self.queue.push_back(Item::Send(bytes.len())),
        }
    }
}

impl Session {
    /// A client has connected. Outputs follow.
    #[must_use]
    pub fn new(exports: Arc<Exports>) -> Self {
        let mut outputs = Outputs::default();
        outputs.greeting();
        Self { exports, phase: Phase::Handshake(Handshake::default()), outputs }
    }

    /// Takes an input, and answers how many bytes it has taken of [`Input::Bytes`]. Outputs follow; all of
    /// them are to be taken before the next input.
    ///
    /// # Panics
    /// If outputs were left, or the input does not answer the output that asked for it.
    pub fn handle(&mut self, input: Input<'_>) -> usize {
        self.outputs.clear();
        match (&mut self.phase, input) {
            // Bytes after the end belong to no request.
            (Phase::Over, Input::Bytes(bytes)) => bytes.len(),
            (Phase::Over, _) => 0,
            (Phase::Handshake(handshake), input) => {
                match handshake.handle(&self.exports, input, &mut self.outputs) {
                    Ok((taken, None)) => taken,
                    Ok((taken, Some(chosen))) => {
                        self.outputs.push(Output::Opened { export: chosen.export });
                        let bytes = self.exports.list()[chosen.export].bytes;
                        self.phase = Phase::Transmission(Transmission::new(
                            bytes,
                            chosen.structured,
                            chosen.allocation,
                        ));
                        taken
                    }
                    Err(end) => self.close(end, input),
                }
            }
            (Phase::Transmission(transmission), input) => match transmission.handle(input, &mut self.outputs)
            {
                Ok(taken) => taken,
                Err(end) => self.close(end, input),
            },
        }
    }

    /// The next output.
    pub fn poll(&mut self) -> Option<Output<'_>> {
        match self.outputs.queue.pop_front()? {
            Item::Send(len) => {
                let start = self.outputs.sent;
                self.outputs.sent += len;
                Some(Output::Send(&self.outputs.bytes[start..start + len]))
            }
            Item::Other(output) => Some(output),
        }
    }

    /// Whether the client has yet to choose an export.
    #[must_use]
    pub fn is_shaking(&self) -> bool {
        matches!(self.phase, Phase::Handshake(_))
    }

    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        let left = self
            .outputs
            .queue
            .iter()
            .map(|item| if let Item::Send(len) = item { *len } else { 0 })
            .sum::<usize>();
        assert_eq!(
            self.outputs.sent + left,
            self.outputs.bytes.len(),
            "every byte for the client is in one output"
        );
        if let Phase::Transmission(transmission) = &self.phase {
            transmission.check();
        }
    }

    fn close(&mut self, end: End, input: Input<'_>) -> usize {
        self.phase = Phase::Over;
        self.outputs.push(Output::Close(end));
        if let Input::Bytes(bytes) = input { bytes.len() } else { 0 }
    }
}

/// The bytes at the front, if there are so many.
fn front<const LEN: usize>(bytes: &[u8]) -> Option<&[u8; LEN]> {
    bytes.first_chunk()
}

/// What a handshake leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Chosen {
    export: usize,
    structured: bool,
    /// Block status may be asked for.
    allocation: bool,
}

/// What an export can do, for a client that has agreed to structured replies or has not.
fn features(structured: bool) -> u16 {
    use wire::feature::*;
    let always = HAS_FLAGS | FLUSH | FUA | TRIM | WRITE_ZEROES | MULTI_CONN | CACHE | FAST_ZERO;
    if structured { always | DONT_FRAGMENT } else { always }
}
