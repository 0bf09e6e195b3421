//! How frames move between two processes.
//!
//! ```text
//!   key            the secret that both ends prove to have
//!      |
//!   transport      handshake ---> link ---> tcp, unix socket, rings of shared memory, UCX
//!      |              `- seal      frames sealed by Noise
//!      |-- zero_copy  long pieces sent from where they lie
//!      |-- registration  pinned memory: the pin-down cache, and what pins for it
//!      `-- blocks     checksums of bytes in pieces
//!   adaptive_spin  whether to poll or to sleep ---> two_ways, which tries both
//! ```
//!
//! Start with the first page of `transport`: `handshake`, `link`, then `means`, and the transports, a file
//! each. `adaptive_spin` and `registration` are independent of it. Nothing here knows what a frame means.

pub mod adaptive_spin;
pub mod blocks;
pub mod key;
pub mod registration;
pub mod transport;
pub mod two_ways;

/// The TCP port of a memory server unless another is named.
pub const DEFAULT_PORT: u16 = 7117;
