//! The owner's side: which memory is exposed, which peers have a key to it, and when it may be reused.

use super::rule::Rules;
use super::{Grant, Key, KeyRule, PeerNumber, Rights, ToOwner, ToPeer};
use rampool_wire::units::Tick;
use std::collections::{BTreeMap, VecDeque};

/// Work for the caller of an [`Owner`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OwnerOutput {
    Send(PeerNumber, ToPeer),
    /// A lost peer may touch the memory of this key indefinitely: put its bytes into other memory, then call
    /// [`Owner::replaced`].
    Replace(Key),
    /// No peer touches the memory of this key any more, and it is no longer exposed.
    Free(Key),
}

/// All places for exposed memory are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0} memories are exposed already, which is as many as can be")]
pub struct NoPlace(pub u32);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The last memory is free.
    Free,
    /// Peers may have keys.
    Exposed,
    /// Its holders are asked to give up the key; then the memory is free, or replaced.
    Closing,
    /// Its bytes are being moved to other memory.
    Replacing,
}

#[derive(Debug)]
struct Place {
    generation: u64,
    bytes: u64,
    rights: Rights,
    state: State,
    /// The peers that were sent the key, and when each was asked to give it up.
    holders: BTreeMap<PeerNumber, Option<Tick>>,
    /// A holder was lost.
    tainted: bool,
    /// It becomes free instead of being exposed again.
    withdrawn: bool,
}

/// The table of exposed memory.
///
/// Invariants ([`Owner::check`]): a place that is free or being replaced has no holders; one that is exposed
/// is neither tainted nor withdrawn; generations only grow.
#[derive(Debug)]
pub struct Owner {
    places: Vec<Place>,
    most: u32,
    repeat_after: u64,
    outputs: VecDeque<OwnerOutput>,
    rules: Rules,
}

impl Owner {
    /// At most `most` memories at a time; a revocation without an answer is repeated after `repeat_after`
    /// ticks.
    #[must_use]
    pub fn new(most: u32, repeat_after: u64) -> Self {
        Self { places: Vec::new(), most, repeat_after, outputs: VecDeque::new(), rules: Rules::default() }
    }

    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: KeyRule) {
        self.rules.omit(rule);
    }

    /// Exposes a memory. No peer has a key to it yet.
    ///
    /// # Errors
    /// [`NoPlace`].
    pub fn expose(&mut self, bytes: u64, rights: Rights) -> Result<Key, NoPlace> {
        let fresh = |generation| Place {
            generation,
            bytes,
            rights,
            state: State::Exposed,
            holders: BTreeMap::new(),
            tainted: false,
            withdrawn: false,
        };
        if let Some(at) = self.places.iter().position(|place| place.state == State::Free) {
            let place = &mut self.places[at];
            *place = fresh(place.generation + 1);
            return Ok(Key { place: number(at), generation: place.generation });
        }
        if number(self.places.len()) >= self.most {
            return Err(NoPlace(self.most));
        }
        self.places.push(fresh(1));
        Ok(Key { place: number(self.places.len() - 1), generation: 1 })
    }

    /// The key to send to a peer, which counts as a holder from now on. `None` while the memory may not be
    /// used by key.
    pub fn grant(&mut self, peer: PeerNumber, place: u32) -> Option<Grant> {
        let closed = self.rules.keep(KeyRule::Closed);
        let at = self.places.get_mut(place as usize)?;
        if at.state != State::Exposed && (closed || at.state != State::Closing) {
            return None;
        }
        at.holders.entry(peer).or_insert(None);
        Some(Grant { key: Key { place, generation: at.generation }, bytes: at.bytes, rights: at.rights })
    }

    /// The key to a place, if peers may use it.
    #[must_use]
    pub fn current(&self, place: u32) -> Option<Key> {
        let at = self.places.get(place as usize)?;
        (at.state == State::Exposed).then_some(Key { place, generation: at.generation })
    }

    /// Takes the memory back: [`OwnerOutput::Free`] follows. A second call, or one with an invalid key, does
    /// nothing.
    pub fn withdraw(&mut self, now: Tick, place: u32) {
        if let Some(at) = self.places.get_mut(place as usize)
            && at.state != State::Free
        {
            at.withdrawn = true;
            self.close(now, place);
        }
    }

    /// Takes a message from a peer.
    pub fn handle(&mut self, now: Tick, peer: PeerNumber, message: ToOwner) {
        match message {
            ToOwner::Revoked(key) => self.revoked(key, peer),
            ToOwner::Ask(place) => {
                if let Some(grant) = self.grant(peer, place) {
                    self.outputs.push_back(OwnerOutput::Send(peer, ToPeer::Grant(grant)));
                } else if let Some(at) = self.places.get(place as usize)
                    && (at.state == State::Free || at.withdrawn)
                {
                    self.outputs.push_back(OwnerOutput::Send(
                        peer,
                        ToPeer::Revoke(Key { place, generation: at.generation }),
                    ));
                }
                // While it is being replaced there is no answer yet: the peer asks again.
            }
        }
        let _ = now;
    }

    /// The peer is lost. Every memory that it had a key to is replaced.
    pub fn lost(&mut self, now: Tick, peer: PeerNumber) {
        for place in 0..number(self.places.len()) {
            let at = &mut self.places[place as usize];
            if at.holders.remove(&peer).is_none() {
                continue;
            }
            if self.rules.keep(KeyRule::Fence) {
                at.tainted = true;
                self.close(now, place);
            } else {
                self.end_closing(place);
            }
        }
    }

    /// This key's bytes are in other memory now, at the same place, with the next generation.
    ///
    /// # Panics
    /// If no [`OwnerOutput::Replace`] asked for it.
    pub fn replaced(&mut self, key: Key) {
        let at = &mut self.places[key.place as usize];
        assert!(
            at.state == State::Replacing && at.generation == key.generation,
            "{key} is replaced although no replacement was asked for"
        );
        at.tainted = false;
        if at.withdrawn {
            at.state = State::Free;
            self.outputs.push_back(OwnerOutput::Free(key));
        } else {
            at.generation += 1;
            at.state = State::Exposed;
        }
    }

    /// Repeats overdue revocations.
    pub fn handle_timeout(&mut self, now: Tick) {
        if !self.rules.keep(KeyRule::Repeat) {
            return;
        }
        for (number, place) in (0..).zip(&mut self.places) {
            let key = Key { place: number, generation: place.generation };
            for (peer, asked) in &mut place.holders {
                if asked.is_some_and(|asked| now.0 >= asked.0 + self.repeat_after) {
                    *asked = Some(now);
                    self.outputs.push_back(OwnerOutput::Send(*peer, ToPeer::Revoke(key)));
                }
            }
        }
    }

    /// When [`Owner::handle_timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Tick> {
        let asked = self.places.iter().flat_map(|place| place.holders.values()).filter_map(|asked| *asked);
        asked.min().map(|asked| Tick(asked.0 + self.repeat_after))
    }

    pub fn poll(&mut self) -> Option<OwnerOutput> {
        self.outputs.pop_front()
    }

    /// The invariants.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        for place in &self.places {
            let without = matches!(place.state, State::Free | State::Replacing);
            assert!(!without || place.holders.is_empty(), "a free or replaced memory has no holders");
            assert!(
                place.state != State::Exposed || !(place.tainted || place.withdrawn),
                "an exposed memory is neither tainted nor withdrawn"
            );
            assert!(
                place.state != State::Closing || place.tainted || place.withdrawn,
                "what closes has a reason"
            );
            let asked = place.holders.values().all(Option::is_some);
            assert!(
                place.state != State::Closing || asked || !self.rules.keep(KeyRule::Closed),
                "every holder is asked to give it up"
            );
        }
    }

    fn close(&mut self, now: Tick, place: u32) {
        let at = &mut self.places[place as usize];
        if at.state == State::Exposed {
            at.state = State::Closing;
            let key = Key { place, generation: at.generation };
            for (peer, asked) in &mut at.holders {
                *asked = Some(now);
                self.outputs.push_back(OwnerOutput::Send(*peer, ToPeer::Revoke(key)));
            }
        }
        self.end_closing(place);
    }

    fn revoked(&mut self, key: Key, peer: PeerNumber) {
        let exact = self.rules.keep(KeyRule::Exact);
        let Some(at) = self.places.get_mut(key.place as usize) else { return };
        if at.state != State::Closing || (exact && at.generation != key.generation) {
            return;
        }
        if at.holders.remove(&peer).is_some() && !self.rules.keep(KeyRule::EveryPeer) {
            at.holders.clear();
        }
        self.end_closing(key.place);
    }

    /// A closing memory without holders becomes free, or is replaced.
    fn end_closing(&mut self, place: u32) {
        let at = &mut self.places[place as usize];
        if at.state != State::Closing || !at.holders.is_empty() {
            return;
        }
        let key = Key { place, generation: at.generation };
        if at.tainted {
            at.state = State::Replacing;
            self.outputs.push_back(OwnerOutput::Replace(key));
        } else {
            at.state = State::Free;
            self.outputs.push_back(OwnerOutput::Free(key));
        }
    }
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("fewer places than `most`")
}
