//! The socket itself as a transport: what carries the bytes where two ends agree on no other.

use super::means::{Carrier, Means, Transport};
use super::tcp::{Peer, Stream};
use std::io;

impl Means {
    pub const TCP: Self = Self::named("tcp");
    pub const UNIX_SOCKET: Self = Self::named("unix");
}

/// The connection itself carries the bytes.
pub fn carried_by(stream: Stream) -> Carrier {
    Box::new(Socket(stream))
}

struct Socket(Stream);

impl Transport for Socket {
    fn stream(&self) -> &Stream {
        &self.0
    }

    fn means(&self) -> Means {
        match self.0.peer() {
            Peer::Unix { .. } => Means::UNIX_SOCKET,
            Peer::Tcp(_) => Means::TCP,
        }
    }

    unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Option<usize>> {
        // SAFETY: the caller's promise.
        unsafe { self.0.send(pieces) }
    }

    unsafe fn receive(&mut self, pieces: &mut [libc::iovec]) -> io::Result<Option<usize>> {
        // SAFETY: the caller's promise.
        unsafe { self.0.receive(pieces) }
    }

    fn asks_kernel(&self) -> bool {
        true
    }
}
