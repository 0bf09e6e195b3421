//! Keys to registered memory: how two sides agree on it once, use it often without asking, and part without harm.
//!
//! FireCluster (Sato, Hyodo, Nakayama) leaves open by what protocol both sides of a transfer tell each other cheaply what is registered. Here the *owner* of a memory gives each
//! *peer* a key to it (owner and place, generation, bounds, rights). The peer keeps the key, and uses it as often as it likes without a word. The owner takes keys back by
//! generation:
//!
//! ```text
//!   owner                                        peer
//!   expose ──> exposed ── Grant(key, bytes) ──>  cached: begin(key), end(use), begin(key) …      no message
//!   withdraw ─> waits ─── Revoke(key) ────────>  no use begins any more; those that have begun end
//!   free  <───────────── Revoked(key) ────────   when the last has ended
//! ```
//!
//! * **No late use touches memory.** A memory is [`OwnerOutput::Free`] when every peer that was ever sent its key has said `Revoked`, and a peer says so when its uses have ended.
//! * **A peer that is lost** cannot say so, and may be at it for as long as it likes: its memory is *replaced* ([`OwnerOutput::Replace`]): the bytes go to fresh memory of the next
//!   generation, once all other peers are done with the old, and whatever the lost one still does, it does to memory that nobody looks at.
//! * **Old keys.** A generation names one memory and is never given twice. A peer remembers for each place up to which generation it was revoked, so a grant that was on
//!   its way for long opens nothing. A use with an old key is refused ([`UseRefused`]), and the peer asks for the current one ([`ToOwner::Ask`]).
//! * **Messages may be lost, come twice, late, or in another order.** A revocation is repeated until it is answered; everything else may be said again.
//!
//! Neither machine touches memory or knows an address. A key protects against mistakes and lateness, not against a peer that means ill: who may map the memory is decided by whoever
//! hands it over.

mod owner;
mod peer;
mod rule;

pub use owner::{NoPlace, Owner, OwnerOutput};
pub use peer::{GrantRefused, KeyCache, KeyLimits, PeerOutput, Use, UseRefused};
pub use rule::KeyRule;

/// Names one memory of an owner's: the place in its table, and which memory in that place's life.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key {
    pub place: u32,
    /// From 1 on; never used twice.
    pub generation: u64,
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.place, self.generation)
    }
}

/// What a peer wants to do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Access {
    Read,
    Write,
}

/// What a peer may do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rights {
    Read,
    Write,
    Both,
}

impl Rights {
    #[must_use]
    pub fn allow(self, access: Access) -> bool {
        match self {
            Rights::Both => true,
            Rights::Read => access == Access::Read,
            Rights::Write => access == Access::Write,
        }
    }
}

/// A key, and what it opens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    pub key: Key,
    pub bytes: u64,
    pub rights: Rights,
}

/// One end of a line to a peer. A peer that comes back after it was lost is another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PeerNumber(pub u64);

/// From the owner to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ToPeer {
    Grant(Grant),
    /// This key and all older ones of its place are no good any more.
    Revoke(Key),
}

/// From a peer to the owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ToOwner {
    /// No use of this key or an older one of its place is under way, and none will be.
    Revoked(Key),
    /// What is the key to this place now?
    Ask(u32),
}
