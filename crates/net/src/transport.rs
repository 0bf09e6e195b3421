//! How frames move: a non-blocking framed [`Link`] over TCP, a Unix socket, or rings of shared memory next to
//! a Unix socket, plain or sealed by Noise. Both ends use the same one.
//!
//! A link sends bytes from where they lie (memory of the program, frames of the server) and receives the bulk
//! of a frame into the place that its receiver names once header and table are known; nothing is copied on
//! the way when the link is plain, but for the first few KiB that came along with the header. It never
//! blocks, allocates nothing per frame once warm, and knows nothing of what a frame means.
//!
//! [`connect`] and [`Handshake`] make links; only a finished handshake makes one.

mod fabric;
mod handshake;
mod link;
mod means;
mod rings;
mod same_host;
mod seal;
mod socket;
mod tcp;
pub mod zero_copy;

pub use fabric::FabricError;
pub use handshake::{Gate, Handshake, HandshakeError, Wants, connect};
pub use link::{Flush, Link, LinkError, Received, Urgency};
pub use means::{Carrier, Glance, LocalPolicy, Means, Transport};
pub use rings::{RING_BYTES, probe_rings};
pub use same_host::{SAME_HOST_VARIABLE, SameHost};
pub use seal::{
    DATAGRAM_KEY_BYTES, DATAGRAM_SEAL_BYTES, DatagramSeal, MAX_MESSAGE_BYTES, MAX_PLAIN_BYTES, Seal,
    TAG_BYTES,
};
pub use socket::carried_by;
pub use tcp::is_host;
pub use tcp::{Connecting, Endpoint, EndpointError, Listener, Peer, PeerAddress, Stream};

/// From now on nothing loads UCX into this process: it is a program's that did not ask for it.
pub fn forbid_ucx() {
    rampool_ucx::forbid();
}

/// The UCX installed here, which is loaded for this call: its version and its transports, each as `tcp/eth0`.
///
/// # Errors
/// Why there is none.
pub fn probe_ucx() -> Result<(rampool_ucx::Version, Vec<String>), rampool_ucx::UcxError> {
    let version = rampool_ucx::version()?;
    Ok((version, rampool_ucx::Context::process()?.transports()))
}

/// Memory to send from. The owner keeps it valid, and its bytes unchanged, until the link says that it was
/// sent.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub ptr: *const u8,
    pub len: usize,
}

/// Memory to receive into. No other code reads or writes it until the link says that it is filled.
#[derive(Clone, Copy, Debug)]
pub struct PieceMut {
    pub ptr: *mut u8,
    pub len: usize,
}

// SAFETY: a piece is an address and a length; whether its memory may be used is the contract of the functions
// that take it, on any thread.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Send for PieceMut {}

#[cfg(test)]
mod tests;
