//! Owners and peers of registered memory ([`rampool_pinning::keys`]) in a world that loses, repeats, delays and reorders messages, and where the owner gives peers up that are
//! still at it.
//!
//! Memory is an object with a fate: *live* while its key is current, *detached* when its bytes were put elsewhere, *free* when the owner may use it for something else. Whatever a peer
//! writes is judged by the fate of what it writes to:
//!
//! | | live | detached | free |
//! |---|---|---|---|
//! | a peer of the owner's | fine | wrong: the bytes are lost | wrong: it is somebody else's memory |
//! | a peer that the owner gave up | fine | fine: it is not read | wrong |
//!
//! At the end the faults stop, and every memory must come free.

use rampool_pinning::keys::{
    Access, Grant, Key, KeyCache, KeyLimits, KeyRule, Owner, OwnerOutput, PeerNumber, PeerOutput, Rights,
    ToOwner, ToPeer, Use, UseRefused,
};
use rampool_wire::units::Tick;
use std::collections::BTreeMap;

use crate::rng::Rng;

const PLACES: u32 = 3;
const PEERS: usize = 3;
const STEPS: u64 = 600;
const REPEAT_AFTER: u64 = 25;
/// All memories that there can be, and less than all of them at a peer.
const LIMITS: KeyLimits = KeyLimits { places: PLACES, bytes: 12_000 };

/// What went on in a run, so that a test can tell that it was worth it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    pub uses: u64,
    pub refused_stale: u64,
    pub refused_otherwise: u64,
    pub freed: u64,
    pub replaced: u64,
    pub given_up: u64,
    pub messages_lost: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Live,
    Detached,
    Free,
}

#[derive(Debug)]
struct Object {
    key: Key,
    bytes: u64,
    rights: Rights,
    fate: Fate,
}

/// A message on its way: to a peer with the memory that comes with a grant, or to the owner.
#[derive(Clone, Copy, Debug)]
enum Mail {
    ToPeer(usize, ToPeer, Option<usize>),
    ToOwner(usize, ToOwner),
}

#[derive(Debug)]
struct Working {
    used: Use,
    object: usize,
    offset: u64,
    len: u64,
    access: Access,
    until: u64,
}

struct Peer {
    number: PeerNumber,
    cache: KeyCache,
    /// What is mapped.
    objects: BTreeMap<Key, usize>,
    working: Vec<Working>,
    /// Every key it ever heard of.
    heard: Vec<Grant>,
    given_up: bool,
}

impl Peer {
    fn new(number: u64, omit: Option<KeyRule>) -> Self {
        let mut cache = KeyCache::new(LIMITS);
        if let Some(rule) = omit {
            leave_out_of_cache(&mut cache, rule);
        }
        Self {
            number: PeerNumber(number),
            cache,
            objects: BTreeMap::new(),
            working: Vec::new(),
            heard: Vec::new(),
            given_up: false,
        }
    }
}

#[cfg(feature = "mutants")]
fn leave_out_of_cache(cache: &mut KeyCache, rule: KeyRule) {
    cache.omit(rule);
}

#[cfg(not(feature = "mutants"))]
fn leave_out_of_cache(_cache: &mut KeyCache, _rule: KeyRule) {
    panic!("rules are left out in builds for tests only");
}

#[cfg(feature = "mutants")]
fn leave_out_of_owner(owner: &mut Owner, rule: KeyRule) {
    owner.omit(rule);
}

#[cfg(not(feature = "mutants"))]
fn leave_out_of_owner(_owner: &mut Owner, _rule: KeyRule) {
    panic!("rules are left out in builds for tests only");
}

struct World {
    rng: Rng,
    now: u64,
    owner: Owner,
    peers: Vec<Peer>,
    objects: Vec<Object>,
    /// What is at each place now.
    places: BTreeMap<u32, usize>,
    mail: Vec<(u64, Mail)>,
    faults: bool,
    loss: u64,
    repeat: u64,
    delay: u64,
    omit: Option<KeyRule>,
    tally: Tally,
}

/// Runs a world that follows from the seed; with `omit`, without that rule.
///
/// # Panics
/// If something is wrong: that is what it looks for.
#[must_use]
pub fn run(seed: u64, omit: Option<KeyRule>) -> Tally {
    let mut rng = Rng::new(seed);
    let (loss, repeat, delay) = (rng.below(30), rng.below(30), rng.between(1, 40));
    let mut owner = Owner::new(PLACES, REPEAT_AFTER);
    if let Some(rule) = omit {
        leave_out_of_owner(&mut owner, rule);
    }
    let peers = (0..PEERS).map(|number| Peer::new(number as u64, omit)).collect();
    let mut world = World {
        rng,
        now: 0,
        owner,
        peers,
        objects: Vec::new(),
        places: BTreeMap::new(),
        mail: Vec::new(),
        faults: true,
        loss,
        repeat,
        delay,
        omit,
        tally: Tally::default(),
    };
    for _ in 0..STEPS {
        world.act();
        world.step();
    }
    world.end();
    world.tally
}

impl World {
    /// Somebody does something.
    fn act(&mut self) {
        match self.rng.below(20) {
            0 => self.expose(),
            1 => {
                let place = self.place();
                self.owner.withdraw(Tick(self.now), place);
            }
            2 if self.rng.one_in(4) => self.give_up(),
            3..6 => {
                let (peer, place) = (self.rng.index(self.peers.len()), self.place());
                self.grant(peer, place);
            }
            _ => {
                let peer = self.rng.index(self.peers.len());
                self.begin(peer);
            }
        }
    }

    fn step(&mut self) {
        self.now += 1;
        self.owner.handle_timeout(Tick(self.now));
        let due: Vec<Mail> = {
            let now = self.now;
            let (due, later): (Vec<_>, Vec<_>) =
                std::mem::take(&mut self.mail).into_iter().partition(|(at, _)| *at <= now);
            self.mail = later;
            due.into_iter().map(|(_, mail)| mail).collect()
        };
        for mail in due {
            self.deliver(mail);
            self.drain();
        }
        for peer in 0..self.peers.len() {
            self.work(peer);
        }
        self.drain();
    }

    fn place(&mut self) -> u32 {
        u32::try_from(self.rng.below(u64::from(PLACES))).expect("few places")
    }

    fn expose(&mut self) {
        let (bytes, rights) =
            (self.rng.between(1, 9000), [Rights::Read, Rights::Write, Rights::Both][self.rng.index(3)]);
        if let Ok(key) = self.owner.expose(bytes, rights) {
            self.objects.push(Object { key, bytes, rights, fate: Fate::Live });
            self.places.insert(key.place, self.objects.len() - 1);
        }
    }

    /// The owner gives a key to a peer that is not given up.
    fn grant(&mut self, peer: usize, place: u32) {
        if self.peers[peer].given_up {
            return;
        }
        if let Some(grant) = self.owner.grant(self.peers[peer].number, place) {
            self.send_grant(peer, grant);
        }
    }

    fn send_grant(&mut self, peer: usize, grant: Grant) {
        let object = self.places[&grant.key.place];
        assert_eq!(self.objects[object].key, grant.key, "a key is sent with its own memory");
        self.post(Mail::ToPeer(peer, ToPeer::Grant(grant), Some(object)));
    }

    /// The owner believes that a peer is gone; it is not. Another one takes its place.
    fn give_up(&mut self) {
        let peer = self.rng.index(self.peers.len());
        if std::mem::replace(&mut self.peers[peer].given_up, true) {
            return;
        }
        self.tally.given_up += 1;
        let number = self.peers[peer].number;
        self.owner.lost(Tick(self.now), number);
        self.peers.push(Peer::new(self.peers.len() as u64, self.omit));
    }

    /// A peer uses some key it has heard of, whatever became of it.
    fn begin(&mut self, index: usize) {
        if self.peers[index].heard.is_empty() {
            return;
        }
        let which = self.rng.index(self.peers[index].heard.len());
        let Grant { key, bytes, .. } = self.peers[index].heard[which];
        let offset = self.rng.below(bytes + 1);
        // Too much, now and then.
        let len = if self.rng.one_in(10) {
            bytes - offset + self.rng.between(1, 5000)
        } else {
            self.rng.below(bytes - offset + 1)
        };
        let access = if self.rng.one_in(2) { Access::Read } else { Access::Write };
        let until = self.now + self.rng.between(1, 60);
        let peer = &mut self.peers[index];
        match peer.cache.begin(key, offset, len, access) {
            Ok(used) => {
                self.tally.uses += 1;
                assert!(used.key() == key, "an old key opens a younger memory");
                let object = peer.objects[&key];
                peer.working.push(Working { used, object, offset, len, access, until });
            }
            Err(UseRefused::Stale(_) | UseRefused::Unknown(_)) => {
                self.tally.refused_stale += 1;
                self.post(Mail::ToOwner(index, ToOwner::Ask(key.place)));
            }
            Err(_) => self.tally.refused_otherwise += 1,
        }
    }

    /// What is under way at a peer touches its memory; what is over ends.
    fn work(&mut self, index: usize) {
        let peer = &mut self.peers[index];
        for working in &peer.working {
            let object = &self.objects[working.object];
            assert!(
                object.fate != Fate::Free,
                "a late use of {} touches memory that is something else by now",
                object.key
            );
            assert!(
                object.fate == Fate::Live || peer.given_up,
                "what is done with {} is lost: its bytes are elsewhere",
                object.key
            );
            assert!(working.offset + working.len <= object.bytes, "a use beyond the end of {}", object.key);
            assert!(
                object.rights.allow(working.access),
                "a use of {} that its key does not allow",
                object.key
            );
        }
        let now = self.now;
        let (over, on): (Vec<_>, Vec<_>) =
            std::mem::take(&mut peer.working).into_iter().partition(|working| working.until <= now);
        peer.working = on;
        for working in over {
            peer.cache.end(working.used);
        }
    }

    fn deliver(&mut self, mail: Mail) {
        match mail {
            Mail::ToOwner(peer, message) => {
                // The line to a peer that was given up is closed.
                if !self.peers[peer].given_up {
                    let number = self.peers[peer].number;
                    self.owner.handle(Tick(self.now), number, message);
                }
            }
            Mail::ToPeer(peer, ToPeer::Revoke(key), _) => self.peers[peer].cache.revoke(key),
            Mail::ToPeer(index, ToPeer::Grant(grant), object) => {
                let peer = &mut self.peers[index];
                if peer.cache.granted(grant) == Ok(true) {
                    let before = peer.objects.insert(grant.key, object.expect("memory comes with a grant"));
                    assert!(before.is_none(), "two memories for one key");
                    peer.heard.push(grant);
                }
            }
        }
    }

    /// Does what both sides order.
    fn drain(&mut self) {
        while let Some(output) = self.owner.poll() {
            match output {
                OwnerOutput::Send(number, message) => {
                    let peer = self
                        .peers
                        .iter()
                        .position(|peer| peer.number == number)
                        .expect("a peer that there is");
                    match message {
                        ToPeer::Grant(grant) => self.send_grant(peer, grant),
                        ToPeer::Revoke(_) => self.post(Mail::ToPeer(peer, message, None)),
                    }
                }
                OwnerOutput::Replace(key) => {
                    self.tally.replaced += 1;
                    let old = self.places[&key.place];
                    self.objects[old].fate = Fate::Detached;
                    let Object { bytes, rights, .. } = self.objects[old];
                    self.owner.replaced(key);
                    if let Some(key) = self.owner.current(key.place) {
                        self.objects.push(Object { key, bytes, rights, fate: Fate::Live });
                        self.places.insert(key.place, self.objects.len() - 1);
                    }
                }
                OwnerOutput::Free(key) => {
                    self.tally.freed += 1;
                    let object = &mut self.objects[self.places[&key.place]];
                    assert_eq!(object.key, key, "what comes free is what was withdrawn");
                    if object.fate == Fate::Live {
                        object.fate = Fate::Free;
                    }
                }
            }
        }
        self.owner.check();
        for index in 0..self.peers.len() {
            while let Some(output) = self.peers[index].cache.poll() {
                match output {
                    PeerOutput::Send(message) => self.post(Mail::ToOwner(index, message)),
                    PeerOutput::Drop(key) => {
                        let peer = &mut self.peers[index];
                        let object = peer.objects.remove(&key).expect("what is dropped was mapped");
                        assert!(
                            peer.working.iter().all(|working| working.object != object),
                            "what is in use is unmapped"
                        );
                    }
                }
            }
            if self.omit.is_none() {
                self.peers[index].cache.check();
            }
        }
    }

    /// A message leaves: it is lost, or comes once or more, some time.
    fn post(&mut self, mail: Mail) {
        if self.faults && self.rng.percent(self.loss) {
            self.tally.messages_lost += 1;
            return;
        }
        let times = if self.faults && self.rng.percent(self.repeat) { 3 } else { 1 };
        for _ in 0..times {
            let at = self.now + self.rng.between(1, self.delay);
            self.mail.push((at, mail));
        }
    }

    /// The faults stop, and everything is withdrawn: it comes free.
    fn end(&mut self) {
        self.faults = false;
        for place in 0..PLACES {
            self.owner.withdraw(Tick(self.now), place);
        }
        for _ in 0..500 {
            self.step();
        }
        for object in &self.objects {
            assert!(object.fate != Fate::Live, "{} was withdrawn, and never comes free", object.key);
        }
        assert!(self.owner.poll_timeout().is_none(), "somebody is still to answer");
        for peer in &self.peers {
            assert!(
                peer.given_up || peer.working.is_empty() && peer.objects.is_empty(),
                "a peer keeps what was withdrawn"
            );
        }
    }
}
