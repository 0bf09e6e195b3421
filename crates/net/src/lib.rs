//! How frames move between two processes.
//!
//! ```text
//!   key            the secret that both ends prove to have
//!      |
//!   transport      handshake ---> link ---> tcp, unix socket, rings of shared memory, UCX
//!      |              `- seal      frames sealed by Noise
//!      |-- zero_copy  long pieces sent from where they lie
//!      |-- registration  pinned memory: the pin-down cache and its registrars
//!      `-- blocks     checksums of bytes in pieces
//!   adaptive_spin  how long to poll before sleeping
//! ```
//!
//! Start with the first page of `transport`: `handshake`, `link`, then `carrier` with the ways below it.
//! `adaptive_spin` and `registration` are independent of it. Nothing here knows what a frame means.

pub mod adaptive_spin;
pub mod blocks;
pub mod key;
pub mod registration;
pub mod transport;

/// The TCP port of a memory server unless another is named.
pub const DEFAULT_PORT: u16 = 7117;
