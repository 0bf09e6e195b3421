//! The server's side of NBD, the network block device protocol, as a state machine.
//!
//! ```text
//!   bytes of the client ──▶ handle ──▶ Session ──▶ poll ──▶ bytes for the client: Send, SendData
//!                             ▲                      │
//!                             └── what came of it ◀──┴───▶ work on the export: Read, Write, Zero, Status
//! ```
//! A [`Session`] is one connection. It speaks the fixed newstyle handshake and structured replies of the
//! public specification (<https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>), and simple
//! replies to clients that know no others.
//!
//! Commands are carried out one after the other, in the order in which they come: a flush is answered when
//! every earlier write has been carried out, and so is a write that asks for it (FUA). The shell carries out
//! work in pieces of at most [`SLICE_BYTES`] (data) or [`ZERO_SLICE_BYTES`] (no data), so that it can serve
//! others between two pieces however long the command is.
//!
//! What this crate never does: hold bytes of a client, read a clock, perform I/O. Every byte
//! of a client is hostile.
//!
//! Read `session`: `handle` takes bytes and what came of work, `poll` gives bytes and work.

#![forbid(unsafe_code)]

mod export;
mod session;
mod wire;

pub use export::{Export, ExportError, Exports, MOST_EXPORTS, MOST_NAME_BYTES};
pub use session::{End, Failure, Input, Output, Run, Session, StatusExtent, Violation};

/// Efficient requests begin and end at multiples of this.
pub const PREFERRED_BYTES: u32 = 4096;
/// The longest read or write.
pub const MOST_PAYLOAD_BYTES: u32 = 32 << 20;
/// The longest piece of a read or write that the shell carries out at a time.
pub const SLICE_BYTES: u32 = 256 << 10;
/// The longest piece of a trim or of writing zeroes.
pub const ZERO_SLICE_BYTES: u32 = 8 << 20;
/// The most bytes that a session may need to see at once before it takes the first of them. The shell's
/// buffer is at least as long.
pub const LARGEST_UNIT_BYTES: usize = session::MOST_OPTION_BYTES + wire::OPTION_BYTES;
