//! From a connected socket to a [`Link`]: prefaces, then the proof of the key, then perhaps shared memory. The decisions are `rampool_proto::session`'s and
//! `rampool_proto::rings`'.

use super::carrier::Carrier;
use super::link::Link;
use super::rings::{RING_BYTES, Rings};
use super::seal::{MAX_PLAIN_BYTES, Proof, Seal, TAG_BYTES};
use super::tcp::{Endpoint, Peer, Stream};
use crate::key::{Key, random_bytes};
use rampool_proto::rings::{OFFER_BYTES, Offer, OfferError};
use rampool_proto::session::{
    AcceptError, Encryption, PREFACE_BYTES, Preface, PrefaceError, Refusal, Security, ServerPolicy, Verdict, accept, agree, features,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// What this side brings to a handshake.
#[derive(Clone, Debug)]
pub struct LocalPolicy {
    pub key: Option<Key>,
    pub encryption: Encryption,
    /// Bits of `session::features`. Those of rings and keys count for Unix sockets only.
    pub features: u32,
}

impl LocalPolicy {
    fn features_over(&self, stream: &Stream) -> u32 {
        let unix = matches!(stream.peer(), Peer::Unix { .. });
        if unix { self.features } else { self.features & !(features::RINGS | features::KEYS) }
    }
}

/// Why a handshake ended without a link. The connection is closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    #[error("cannot connect: {0}{hint}", hint = nobody_there(.0))]
    Connect(io::Error),
    #[error("no answer within the time allowed")]
    TimedOut,
    #[error("the peer closed the connection during the handshake")]
    Closed,
    #[error("the connection failed: {0}")]
    Io(io::Error),
    #[error(transparent)]
    Preface(#[from] PrefaceError),
    /// The server does not want this client, or chose what the client does not accept.
    #[error(transparent)]
    NotAccepted(#[from] AcceptError),
    /// This server does not want the client.
    #[error("refused: {0}")]
    Refused(Refusal),
    #[error("the two sides have different keys (or someone altered the handshake)")]
    WrongKey,
    /// What came does not set shared memory up, and is nothing else either.
    #[error(transparent)]
    Rings(#[from] OfferError),
}

impl HandshakeError {
    /// Whether trying again makes sense: somebody is there, and the way to it broke, or was taken. A machine that says that nobody listens there means it.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Connect(error) => !matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound),
            Self::TimedOut | Self::Closed | Self::Io(_) => true,
            Self::NotAccepted(AcceptError::Refused(refusal)) => *refusal == Refusal::TooManyConnections,
            Self::NotAccepted(_) | Self::Preface(_) | Self::Refused(_) | Self::WrongKey | Self::Rings(_) => false,
        }
    }
}

fn nobody_there(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => "; is `rampool serve` running there?",
        _ => "",
    }
}

/// What a handshake waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wants {
    Read,
    Write,
}

/// A handshake under way. Drive it with [`Handshake::advance`] whenever the socket is ready; give up on it at a deadline of your own.
pub struct Handshake {
    /// Taken when the handshake makes its link.
    stream: Option<Stream>,
    local: LocalPolicy,
    asked: Option<Preface>,
    refuse: Option<Refusal>,
    incoming: Vec<u8>,
    have: usize,
    outgoing: Vec<u8>,
    /// Leaves with the first byte of `outgoing`.
    hand_over: Option<OwnedFd>,
    sent: usize,
    /// Came with what is incoming.
    handed: Option<OwnedFd>,
    rings: Option<Box<Rings>>,
    /// Bytes of each ring that a server offers.
    ring_bytes: u32,
    state: State,
}

enum State {
    /// Server: the client's preface. Client: the server's.
    AwaitPreface,
    AwaitLength(Box<Keyed>),
    AwaitMessage(Box<Keyed>),
    /// Client: the server's offer of shared memory.
    AwaitOffer(Option<Seal>, Agreed),
    /// Server: the client's answer to this offer.
    AwaitTaken(Offer, Option<Seal>, Agreed),
    /// Everything was read; what is left to send leads to this outcome.
    Finishing(Outcome),
    Over,
}

enum Keyed {
    Proof(Proof, Agreed),
    /// Server: waits for the client's sealed, empty message.
    Confirm(Seal, Agreed),
}

#[derive(Clone, Copy)]
struct Agreed {
    security: Security,
    features: u32,
}

enum Outcome {
    /// What is left to agree on is shared memory, where both have it.
    Secured(Option<Seal>, Agreed),
    Link(Option<Seal>, Agreed),
    Failed(HandshakeError),
}

impl Handshake {
    /// Starts as the client: it speaks first.
    #[must_use]
    pub fn client(stream: Stream, local: LocalPolicy) -> Self {
        let features = local.features_over(&stream);
        let preface = Preface::ask(local.encryption, local.key.is_some(), features, u64::from_le_bytes(random_bytes()));
        Self::start(stream, local, Some(preface), None, preface.encode().to_vec())
    }

    /// Starts as the server: it listens first. `refuse`: a reason of the server's own not to talk to this peer.
    #[must_use]
    pub fn server(stream: Stream, local: LocalPolicy, refuse: Option<Refusal>) -> Self {
        Self::start(stream, local, None, refuse, Vec::new())
    }

    fn start(stream: Stream, local: LocalPolicy, asked: Option<Preface>, refuse: Option<Refusal>, outgoing: Vec<u8>) -> Self {
        let incoming = vec![0; PREFACE_BYTES];
        Self {
            stream: Some(stream),
            local,
            asked,
            refuse,
            incoming,
            have: 0,
            outgoing,
            hand_over: None,
            sent: 0,
            handed: None,
            rings: None,
            ring_bytes: RING_BYTES,
            state: State::AwaitPreface,
        }
    }

    /// As a server: offers rings of so many bytes each, a power of two, where shared memory is agreed on.
    #[must_use]
    pub(crate) fn with_rings_of(mut self, ring_bytes: u32) -> Self {
        self.ring_bytes = ring_bytes;
        self
    }

    fn stream(&self) -> &Stream {
        self.stream.as_ref().expect("a finished handshake is not used any more")
    }

    #[must_use]
    pub fn peer(&self) -> &Peer {
        self.stream().peer()
    }

    /// Blocks until the socket is ready for the next [`Handshake::advance`]. False at the deadline.
    pub(crate) fn wait(&self, write: bool, deadline: Instant) -> Result<bool, HandshakeError> {
        self.stream().wait(write, deadline).map_err(HandshakeError::Io)
    }

    /// What to wait for before the next [`Handshake::advance`].
    #[must_use]
    pub fn wants(&self) -> Wants {
        if self.sent < self.outgoing.len() { Wants::Write } else { Wants::Read }
    }

    /// Goes on as far as possible without blocking. `Ok(None)`: wait for [`Handshake::wants`].
    ///
    /// # Errors
    /// [`HandshakeError`]; do not call again.
    ///
    /// # Panics
    /// If called after it returned a link or an error.
    pub fn advance<G>(&mut self) -> Result<Option<Link<G>>, HandshakeError> {
        loop {
            while self.sent < self.outgoing.len() {
                let rest = &self.outgoing[self.sent..];
                let sent = match &self.hand_over {
                    Some(fd) => self.stream().send_with(rest, fd.as_fd()),
                    None => self.stream().send_from(rest),
                };
                match sent.map_err(HandshakeError::Io)? {
                    Some(n) => self.sent += n,
                    None => return Ok(None),
                }
                self.hand_over = None;
            }
            if let State::Finishing(Outcome::Secured(..)) = self.state {
                self.share_memory();
                continue;
            }
            if let State::Finishing(_) = self.state {
                return self.finish();
            }
            while self.have < self.incoming.len() {
                let stream = self.stream.as_ref().expect("a finished handshake is not used any more");
                let room = &mut self.incoming[self.have..];
                let received = match self.state {
                    State::AwaitOffer(..) => stream.receive_with(room, &mut self.handed),
                    _ => stream.receive_into(room),
                };
                match received.map_err(HandshakeError::Io)? {
                    Some(0) => return Err(HandshakeError::Closed),
                    Some(n) => self.have += n,
                    None => return Ok(None),
                }
            }
            self.step()?;
        }
    }

    /// The two are who they say they are. Goes on to shared memory where both have that.
    fn share_memory(&mut self) {
        let State::Finishing(Outcome::Secured(seal, agreed)) = std::mem::replace(&mut self.state, State::Over) else {
            unreachable!("called only when secured");
        };
        if agreed.features & features::RINGS == 0 {
            self.state = State::Finishing(Outcome::Link(seal, agreed));
        } else if self.asked.is_some() {
            self.expect(OFFER_BYTES, State::AwaitOffer(seal, agreed));
        } else {
            let offer = match Rings::offer(self.ring_bytes) {
                Ok((rings, offer, fd)) => {
                    self.rings = Some(Box::new(rings));
                    self.hand_over = Some(fd);
                    offer
                }
                Err(error) => {
                    tracing::warn!(peer = %self.peer(), %error, "a client on this machine is served through its socket");
                    Offer::NONE
                }
            };
            self.say(offer.encode().to_vec());
            self.expect(OFFER_BYTES, State::AwaitTaken(offer, seal, agreed));
        }
    }

    /// Client: maps what the server offers.
    fn take(&mut self, offer: Offer) -> Offer {
        let (Some(geometry), Some(fd)) = (offer.geometry(), self.handed.take()) else { return Offer::NONE };
        match Rings::take(geometry, fd.as_fd()) {
            Ok(rings) => {
                self.rings = Some(Box::new(rings));
                offer
            }
            Err(error) => {
                tracing::warn!(peer = %self.peer(), %error, "a server on this machine is reached through its socket");
                Offer::NONE
            }
        }
    }

    fn finish<G>(&mut self) -> Result<Option<Link<G>>, HandshakeError> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Finishing(Outcome::Failed(error)) => Err(error),
            State::Finishing(Outcome::Link(seal, agreed)) => {
                let stream = self.stream.take().expect("a handshake finishes once");
                let seal = if agreed.security == Security::Sealed { seal } else { None };
                let carrier = Carrier { stream, rings: self.rings.take() };
                Ok(Some(Link::new(carrier, seal, agreed.security, agreed.features)))
            }
            _ => unreachable!("called only when finishing"),
        }
    }

    fn say(&mut self, bytes: Vec<u8>) {
        self.outgoing = bytes;
        self.sent = 0;
    }

    fn expect(&mut self, len: usize, state: State) {
        self.incoming = vec![0; len];
        self.have = 0;
        self.state = state;
    }

    /// Everything awaited is in `incoming`.
    fn step(&mut self) -> Result<(), HandshakeError> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::AwaitPreface => {
                let bytes: [u8; PREFACE_BYTES] = self.incoming[..].try_into().expect("a preface was awaited");
                let preface = Preface::parse(&bytes)?;
                match self.asked {
                    Some(asked) => self.read_answer(&asked, &preface)?,
                    None => self.answer(&preface),
                }
            }
            State::AwaitLength(keyed) => {
                let len = usize::from(u16::from_le_bytes([self.incoming[0], self.incoming[1]]));
                if len < TAG_BYTES || len > MAX_PLAIN_BYTES.min(1024) {
                    // Length 0 is the server's way to say that the proof failed; anything else odd is no better.
                    return Err(HandshakeError::WrongKey);
                }
                self.expect(len, State::AwaitMessage(keyed));
            }
            State::AwaitMessage(keyed) => self.read_proof(*keyed),
            State::AwaitOffer(seal, agreed) => {
                let offer = Offer::parse(self.offer_bytes())?;
                let taken = self.take(offer);
                self.say(taken.encode().to_vec());
                self.state = State::Finishing(Outcome::Link(seal, agreed));
            }
            State::AwaitTaken(offer, seal, agreed) => {
                let taken = Offer::parse(self.offer_bytes())?;
                if taken == Offer::NONE {
                    self.rings = None;
                } else if taken != offer {
                    return Err(OfferError.into());
                }
                self.state = State::Finishing(Outcome::Link(seal, agreed));
            }
            State::Finishing(_) | State::Over => unreachable!("nothing is awaited in these states"),
        }
        Ok(())
    }

    fn offer_bytes(&self) -> &[u8; OFFER_BYTES] {
        self.incoming.first_chunk().expect("an offer, or the answer to one, was awaited")
    }

    /// Client: the server's preface has come.
    fn read_answer(&mut self, asked: &Preface, answer: &Preface) -> Result<(), HandshakeError> {
        let (security, features) = accept(asked, answer)?;
        let agreed = Agreed { security, features };
        match (&self.local.key, security) {
            (_, Security::Open) => self.state = State::Finishing(Outcome::Secured(None, agreed)),
            (None, _) => unreachable!("`accept` allows a proof only where this side has a key"),
            (Some(key), _) => {
                let mut proof = Proof::new(key, &prologue(asked, answer), true);
                let message = proof.write();
                self.say(message);
                self.expect(2, State::AwaitLength(Box::new(Keyed::Proof(proof, agreed))));
            }
        }
        Ok(())
    }

    /// Server: the client's preface has come.
    fn answer(&mut self, asked: &Preface) {
        let policy = ServerPolicy {
            encryption: self.local.encryption,
            has_key: self.local.key.is_some(),
            features: self.local.features_over(self.stream()),
            local_peer: self.stream().is_local(),
            refuse: self.refuse,
        };
        let answer = agree(asked, &policy, u64::from_le_bytes(random_bytes()));
        self.say(answer.encode().to_vec());
        match (answer.verdict, &self.local.key) {
            (Verdict::Refused(reason), _) => self.state = State::Finishing(Outcome::Failed(HandshakeError::Refused(reason))),
            (Verdict::Agreed(security @ Security::Open), _) => {
                self.state = State::Finishing(Outcome::Secured(None, Agreed { security, features: answer.features }));
            }
            (Verdict::Agreed(security), Some(key)) => {
                let proof = Proof::new(key, &prologue(asked, &answer), false);
                let agreed = Agreed { security, features: answer.features };
                self.expect(2, State::AwaitLength(Box::new(Keyed::Proof(proof, agreed))));
            }
            (Verdict::Agreed(_), None) | (Verdict::Ask, _) => {
                unreachable!("`agree` asks for a proof only where this side has a key")
            }
        }
    }

    fn read_proof(&mut self, keyed: Keyed) {
        let is_client = self.asked.is_some();
        let done = match keyed {
            Keyed::Proof(mut proof, agreed) => proof.read(&self.incoming).map(|()| (proof, agreed)),
            Keyed::Confirm(mut seal, agreed) => {
                let mut plain = [0; 1024];
                match seal.open(&self.incoming, &mut plain) {
                    Ok(0) => {
                        self.state = State::Finishing(Outcome::Secured(Some(seal), agreed));
                        return;
                    }
                    Ok(_) | Err(_) => Err(super::seal::NotAuthentic),
                }
            }
        };
        let Ok((mut proof, agreed)) = done else {
            if !is_client {
                self.say(vec![0, 0]);
            }
            self.state = State::Finishing(Outcome::Failed(HandshakeError::WrongKey));
            return;
        };
        if is_client {
            let mut seal = proof.finish();
            let mut confirm = Vec::new();
            seal.seal(&[], &mut confirm);
            self.say(confirm);
            self.state = State::Finishing(Outcome::Secured(Some(seal), agreed));
        } else {
            let message = proof.write();
            self.say(message);
            self.expect(2, State::AwaitLength(Box::new(Keyed::Confirm(proof.finish(), agreed))));
        }
    }
}

impl AsFd for Handshake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

/// Connects and shakes hands. Blocks until done or `deadline`.
///
/// # Errors
/// [`HandshakeError`]; `TimedOut` at the deadline.
pub fn connect<G>(endpoint: &Endpoint, local: LocalPolicy, deadline: Instant) -> Result<Link<G>, HandshakeError> {
    let stream = Stream::connect(endpoint, deadline)
        .map_err(|e| if e.kind() == io::ErrorKind::TimedOut { HandshakeError::TimedOut } else { HandshakeError::Connect(e) })?;
    let mut handshake = Handshake::client(stream, local);
    loop {
        if let Some(link) = handshake.advance()? {
            return Ok(link);
        }
        let write = handshake.wants() == Wants::Write;
        if !handshake.wait(write, deadline)? {
            return Err(HandshakeError::TimedOut);
        }
    }
}

/// Both prefaces: altering either makes the proof fail.
fn prologue(asked: &Preface, answer: &Preface) -> [u8; 2 * PREFACE_BYTES] {
    let mut prologue = [0; 2 * PREFACE_BYTES];
    prologue[..PREFACE_BYTES].copy_from_slice(&asked.encode());
    prologue[PREFACE_BYTES..].copy_from_slice(&answer.encode());
    prologue
}
