//! Keys to registered memory: two sides agree on the memory once, use it often without a message, and end
//! safely.
//!
//! FireCluster (Sato, Hyodo, Nakayama) leaves open by what protocol both sides of a transfer tell each other
//! cheaply what is registered. Here the *owner* of a memory gives each *peer* a key to it (owner and place,
//! generation, bounds, rights). The peer keeps the key and uses it as often as it likes without a message.
//! The owner revokes keys by generation:
//!
//! ```text
//!   owner                                        peer
//!   expose ──> exposed ── Grant(key, bytes) ──>  cached: begin(key), end(use), begin(key) …      no message
//!   withdraw ─> waits ─── Revoke(key) ────────>  no use begins any more; those that have begun end
//!   free  <───────────── Revoked(key) ────────   when the last has ended
//! ```
//!
//! * **No late use touches memory.** A memory is [`OwnerOutput::Free`] when every peer that was ever sent its
//!   key has answered `Revoked`. A peer answers when its uses have ended.
//! * **A lost peer** cannot answer, and may go on using the memory indefinitely. So its memory is *replaced*
//!   ([`OwnerOutput::Replace`]): once all other peers have given up the old key, the bytes move to fresh
//!   memory of the next generation. The lost peer then only touches memory that is no longer in use.
//! * **Old keys.** A generation names one memory and is never given twice. A peer remembers for each place up
//!   to which generation it was revoked, so a delayed grant opens nothing. A use with an old key is refused
//!   ([`UseRefused`]), and the peer asks for the current one ([`ToOwner::Ask`]).
//! * **Messages may be lost, duplicated, delayed or reordered.** A revocation is repeated until it is
//!   answered; every other message may be sent again.
//!
//! Neither machine touches memory or knows an address. A key protects against mistakes and late uses, not
//! against a malicious peer: the side that hands over the memory decides which peer may map it.

mod owner;
mod peer;
mod rule;

pub use owner::{NoPlace, Owner, OwnerOutput};
pub use peer::{GrantRefused, KeyCache, KeyLimits, PeerOutput, Use, UseRefused};
pub use rule::KeyRule;

pub use rampool_wire::keys::{Access, Grant, Key, Rights};

/// One end of a connection to a peer. A peer that comes back after it was lost gets a new number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PeerNumber(pub u64);

/// From the owner to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ToPeer {
    Grant(Grant),
    /// This key and all older ones of its place are no longer valid.
    Revoke(Key),
}

/// From a peer to the owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ToOwner {
    /// No use of this key or an older one of its place is under way, and none will be.
    Revoked(Key),
    /// Asks for the current key to this place.
    Ask(u32),
}
