//! From a connected socket to a [`Link`]: prefaces, then the proof of the key, then the setup of the
//! transport that both have. The decisions are `rampool_wire::session`'s.

use super::fabric::FabricKind;
use super::link::Link;
use super::means::{Carrier, LocalPolicy, Next, Setup, SetupError, Side, TransportKind};
use super::rings::{RING_BYTES, RingsKind};
use super::seal::{MAX_PLAIN_BYTES, Proof, Seal, TAG_BYTES};
use super::socket::carried_by;
use super::tcp::{Endpoint, Peer, Stream};
use crate::key::{Key, random_bytes};
use rampool_wire::frame::WIRE_VERSION;
use rampool_wire::session::{
    AcceptError, PREFACE_BYTES, Preface, PrefaceError, Refusal, Security, ServerPolicy, Verdict, accept,
    agree,
};
use rampool_wire::tenant::{TENANT_BYTES, TenantId};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// What two ends may agree on besides their socket, the best first. A new transport is its file, and its line
/// here.
const TRANSPORTS: [&dyn TransportKind; 2] = [&FabricKind, &RingsKind];

/// What this side has over this socket, of what it has at all.
fn features_over(local: &LocalPolicy, stream: &Stream) -> u32 {
    let one = |all, kind: &&dyn TransportKind| all & !kind.bits().1 | kind.offered(local, stream);
    TRANSPORTS.iter().fold(local.features, one)
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
    /// As well; there is no version that both speak.
    #[error("the client speaks protocol versions {lowest} to {highest}, this server speaks {WIRE_VERSION}")]
    ClientVersion { lowest: u8, highest: u8 },
    #[error("the two sides have different keys (or someone altered the handshake)")]
    WrongKey,
    /// The transport that both have agreed on could not be set up.
    #[error("{0}")]
    Transport(SetupError),
}

impl HandshakeError {
    /// Whether a retry makes sense: the peer exists, and the connection broke or was refused a place. A
    /// machine that answers that no process listens there is not retried.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Connect(error) => !listens_nowhere(error),
            Self::TimedOut | Self::Closed | Self::Io(_) => true,
            Self::NotAccepted(AcceptError::Refused(refusal)) => *refusal == Refusal::TooManyConnections,
            Self::NotAccepted(_)
            | Self::Preface(_)
            | Self::Refused(_)
            | Self::ClientVersion { .. }
            | Self::WrongKey
            | Self::Transport(_) => false,
        }
    }

    /// Whether no process listens there: the machine says so, or the socket is gone. Silence shows neither.
    #[must_use]
    pub fn nobody_listens(&self) -> bool {
        matches!(self, Self::Connect(error) if listens_nowhere(error))
    }
}

fn listens_nowhere(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

fn nobody_there(error: &io::Error) -> &'static str {
    if listens_nowhere(error) { "; is `rampool serve` running there?" } else { "" }
}

/// What a handshake waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wants {
    Read,
    Write,
}

/// A server's judgement of a tenant before the proof of its key.
pub type Gate = Arc<dyn Fn(TenantId) -> Option<Refusal> + Send + Sync>;

/// A handshake under way. Drive it with [`Handshake::advance`] whenever the socket is ready; give up on it at
/// a deadline of your own.
pub struct Handshake {
    /// Until a transport has it.
    stream: Option<Stream>,
    local: LocalPolicy,
    asked: Option<Preface>,
    /// The client's, from its preface; it counts once its key is proved.
    tenant: Option<TenantId>,
    refuse: Option<Refusal>,
    gate: Option<Gate>,
    incoming: Vec<u8>,
    have: usize,
    outgoing: Vec<u8>,
    /// Leave with the first byte of `outgoing`.
    hand_over: Vec<OwnedFd>,
    sent: usize,
    /// Came with what is incoming.
    handed: Vec<OwnedFd>,
    /// Bytes of each ring that a server offers.
    ring_bytes: u32,
    /// The file of the server's frames: what it hands over with the rings, and what the client got.
    frames: Option<OwnedFd>,
    /// Taken when the handshake makes its link.
    transport: Option<Carrier>,
    state: State,
}

enum State {
    /// Server: the client's preface. Client: the server's.
    AwaitPreface,
    /// Server: the client's tenant, behind this preface.
    AwaitTenant(Preface),
    AwaitLength(Box<Keyed>),
    AwaitMessage(Box<Keyed>),
    /// The next message of a setup, as it is; the length of one that may be sealed, and what that may
    /// be; and that one.
    AwaitPlain(SettingUp),
    AwaitSealedLength(SettingUp, RangeInclusive<usize>),
    AwaitSealed(SettingUp),
    /// Everything was read; what is left to send leads to this outcome.
    Finishing(Outcome),
    Over,
}

enum Keyed {
    Proof(Proof, Agreed),
    /// Server: waits for the client's sealed, empty message.
    Confirm(Seal, Agreed),
}

/// A transport is being set up.
struct SettingUp {
    setup: Box<dyn Setup>,
    seal: Option<Seal>,
    agreed: Agreed,
}

#[derive(Clone, Copy)]
struct Agreed {
    security: Security,
    features: u32,
}

enum Outcome {
    /// What is left to set up is the transport that both have agreed on.
    Secured(Option<Seal>, Agreed),
    Link(Option<Seal>, Agreed),
    Failed(HandshakeError),
}

impl Handshake {
    /// Starts as the client: it speaks first.
    #[must_use]
    pub fn client(stream: Stream, local: LocalPolicy) -> Self {
        let features = features_over(&local, &stream);
        let nonce = u64::from_le_bytes(random_bytes());
        let preface = Preface::ask(local.encryption, local.key.is_some(), features, nonce)
            .to_local_peer(stream.is_local())
            .of_tenant(local.key.as_ref().is_some_and(|key| key.tenant().is_some()));
        let tenant = local.key.as_ref().and_then(Key::tenant);
        let mut outgoing = preface.encode().to_vec();
        outgoing.extend(tenant.iter().flat_map(TenantId::encode));
        Self { tenant, ..Self::start(stream, local, Some(preface), None, outgoing) }
    }

    /// Starts as the server: it listens first. `refuse`: a reason of the server's own not to talk to this
    /// peer.
    #[must_use]
    pub fn server(stream: Stream, local: LocalPolicy, refuse: Option<Refusal>) -> Self {
        Self::start(stream, local, None, refuse, Vec::new())
    }

    fn start(
        stream: Stream,
        local: LocalPolicy,
        asked: Option<Preface>,
        refuse: Option<Refusal>,
        outgoing: Vec<u8>,
    ) -> Self {
        let incoming = vec![0; PREFACE_BYTES];
        Self {
            stream: Some(stream),
            local,
            asked,
            tenant: None,
            refuse,
            gate: None,
            incoming,
            have: 0,
            outgoing,
            hand_over: Vec::new(),
            sent: 0,
            handed: Vec::new(),
            ring_bytes: RING_BYTES,
            frames: None,
            transport: None,
            state: State::AwaitPreface,
        }
    }

    /// As a server: offers rings of so many bytes each, a power of two, where shared memory is agreed on.
    #[must_use]
    pub fn with_rings_of(mut self, ring_bytes: u32) -> Self {
        self.ring_bytes = ring_bytes;
        self
    }

    /// As a server: hands this file over, for the client to read, where places are agreed on.
    #[must_use]
    pub fn with_frames(mut self, frames: Option<OwnedFd>) -> Self {
        self.frames = frames;
        self
    }

    /// As a server: asks this which tenants to refuse.
    #[must_use]
    pub fn with_gate(mut self, gate: Gate) -> Self {
        self.gate = Some(gate);
        self
    }

    /// As a server, before any bytes have arrived: refuses this peer for a reason of the server's own.
    pub fn refuse(&mut self, refusal: Refusal) {
        self.refuse = Some(refusal);
    }

    fn stream(&self) -> &Stream {
        self.socket().expect("a finished handshake is not used any more")
    }

    #[must_use]
    pub fn peer(&self) -> &Peer {
        self.stream().peer()
    }

    /// The socket, until it is a link's.
    pub fn socket(&self) -> Option<&Stream> {
        self.stream.as_ref().or_else(|| Some(self.transport.as_ref()?.stream()))
    }

    /// Blocks until the socket is ready for the next [`Handshake::advance`]. False at the deadline.
    pub fn wait(&self, write: bool, deadline: Instant) -> Result<bool, HandshakeError> {
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
                let sent = if self.hand_over.is_empty() {
                    self.stream().send_from(rest)
                } else {
                    let fds: Vec<BorrowedFd<'_>> = self.hand_over.iter().map(AsFd::as_fd).collect();
                    self.stream().send_with(rest, &fds)
                };
                match sent.map_err(HandshakeError::Io)? {
                    Some(n) => self.sent += n,
                    None => return Ok(None),
                }
                self.hand_over.clear();
            }
            if let State::Finishing(Outcome::Secured(..)) = self.state {
                self.choose_kind()?;
                continue;
            }
            if let State::Finishing(_) = self.state {
                return self.finish();
            }
            while self.have < self.incoming.len() {
                let stream = self.stream.as_ref().expect("a finished handshake is not used any more");
                let room = &mut self.incoming[self.have..];
                let received = match self.state {
                    State::AwaitPlain(..) if self.asked.is_some() => {
                        stream.receive_with(room, &mut self.handed)
                    }
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

    /// Both ends have authenticated. Goes on to the transport that they have agreed on.
    fn choose_kind(&mut self) -> Result<(), HandshakeError> {
        let State::Finishing(Outcome::Secured(seal, agreed)) =
            std::mem::replace(&mut self.state, State::Over)
        else {
            unreachable!("called only when secured");
        };
        let Some(kind) = TRANSPORTS.iter().find(|kind| agreed.features & kind.bits().0 != 0) else {
            self.state = State::Finishing(Outcome::Link(seal, agreed));
            return Ok(());
        };
        self.set_up(SettingUp { setup: kind.setup(), seal, agreed }, None)
    }

    /// Goes on with a setup: begins it, or lets it hear a message.
    fn set_up(&mut self, mut one: SettingUp, message: Option<&[u8]>) -> Result<(), HandshakeError> {
        let mut side = Side {
            local: &self.local,
            stream: &mut self.stream,
            is_client: self.asked.is_some(),
            features: one.agreed.features,
            ring_bytes: self.ring_bytes,
            seal: &mut one.seal,
            said: Vec::new(),
            hand_over: &mut self.hand_over,
            handed: &mut self.handed,
            frames: &mut self.frames,
        };
        let next = match message {
            None => one.setup.begin(&mut side),
            Some(message) => one.setup.hear(&mut side, message),
        };
        let said = side.said;
        if !said.is_empty() {
            self.say(said);
        }
        match next.map_err(HandshakeError::Transport)? {
            Next::Await(len) => self.expect(len, State::AwaitPlain(one)),
            Next::AwaitSealed(lens) => self.expect(2, State::AwaitSealedLength(one, lens)),
            Next::Made(transport) => {
                self.transport = transport;
                self.state = State::Finishing(Outcome::Link(one.seal, one.agreed));
            }
            Next::Failed(error) => {
                self.state = State::Finishing(Outcome::Failed(HandshakeError::Transport(error)));
            }
        }
        Ok(())
    }

    /// A message of a setup has come.
    fn hear_sealed(&mut self, mut one: SettingUp) -> Result<(), HandshakeError> {
        let mut message = std::mem::take(&mut self.incoming);
        if let Some(seal) = &mut one.seal {
            let mut plain = vec![0; message.len()];
            let len = seal.open(&message, &mut plain).map_err(|_| HandshakeError::WrongKey)?;
            plain.truncate(len);
            message = plain;
        }
        self.set_up(one, Some(&message))
    }

    fn finish<G>(&mut self) -> Result<Option<Link<G>>, HandshakeError> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Finishing(Outcome::Failed(error)) => Err(error),
            State::Finishing(Outcome::Link(seal, agreed)) => {
                let seal = if agreed.security == Security::Sealed { seal } else { None };
                let socket = self.stream.take().map(carried_by);
                let carrier = self.transport.take().or(socket).expect("a handshake finishes once");
                let mut link = Link::new(carrier, seal, agreed.security, agreed.features, self.tenant);
                if self.asked.is_some() {
                    link.set_frames(self.frames.take());
                }
                Ok(Some(link))
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
                    None if preface.has_tenant => {
                        self.expect(TENANT_BYTES, State::AwaitTenant(preface));
                    }
                    None => self.answer(&preface),
                }
            }
            State::AwaitTenant(preface) => {
                let bytes: [u8; TENANT_BYTES] = self.incoming[..].try_into().expect("a tenant was awaited");
                self.tenant = Some(TenantId::parse(&bytes)?);
                self.answer(&preface);
            }
            State::AwaitLength(keyed) => {
                let len = usize::from(u16::from_le_bytes([self.incoming[0], self.incoming[1]]));
                if len < TAG_BYTES || len > MAX_PLAIN_BYTES.min(1024) {
                    // Length 0 is how the server reports that the proof failed; any other odd length is no
                    // better.
                    return Err(HandshakeError::WrongKey);
                }
                self.expect(len, State::AwaitMessage(keyed));
            }
            State::AwaitMessage(keyed) => self.read_proof(*keyed),
            State::AwaitPlain(one) => {
                let message = std::mem::take(&mut self.incoming);
                self.set_up(one, Some(&message))?;
            }
            State::AwaitSealedLength(one, lens) => {
                let len = usize::from(u16::from_le_bytes([self.incoming[0], self.incoming[1]]));
                if !(*lens.start()..=lens.end() + TAG_BYTES).contains(&len) {
                    // It is none that a setup can read.
                    return self.set_up(one, Some(&[]));
                }
                self.expect(len, State::AwaitSealed(one));
            }
            State::AwaitSealed(one) => self.hear_sealed(one)?,
            State::Finishing(_) | State::Over => unreachable!("nothing is awaited in these states"),
        }
        Ok(())
    }

    /// Client: the server's preface has arrived.
    fn read_answer(&mut self, asked: &Preface, answer: &Preface) -> Result<(), HandshakeError> {
        let (security, agreed_features) = accept(asked, answer)?;
        let absent = TRANSPORTS.iter().filter(|kind| agreed_features & kind.bits().0 == 0);
        if let Some(error) = absent.filter_map(|kind| kind.misses(&self.local)).next() {
            return Err(HandshakeError::Transport(error));
        }
        let agreed = Agreed { security, features: agreed_features };
        match (&self.local.key, security) {
            (_, Security::Open) => self.state = State::Finishing(Outcome::Secured(None, agreed)),
            (None, _) => unreachable!("`accept` allows a proof only where this side has a key"),
            (Some(key), _) => {
                let mut proof = Proof::new(key, &prologue(asked, self.tenant, answer), true);
                let message = proof.write();
                self.say(message);
                self.expect(2, State::AwaitLength(Box::new(Keyed::Proof(proof, agreed))));
            }
        }
        Ok(())
    }

    /// Server: the client's preface has arrived.
    fn answer(&mut self, asked: &Preface) {
        let key = self.local.key.as_ref().and_then(|key| key.towards(self.tenant));
        if asked.has_key && key.is_none() && self.local.key.is_some() {
            self.refuse = self.refuse.or(Some(Refusal::OtherTenant));
        }
        if let (Some(tenant), Some(gate)) = (self.tenant, &self.gate) {
            self.refuse = self.refuse.or_else(|| gate(tenant));
        }
        let policy = ServerPolicy {
            encryption: self.local.encryption,
            has_key: self.local.key.is_some(),
            features: features_over(&self.local, self.stream()),
            local_peer: self.stream().is_local(),
            refuse: self.refuse,
        };
        let answer = agree(asked, &policy, u64::from_le_bytes(random_bytes()));
        self.say(answer.encode().to_vec());
        match (answer.verdict, &key) {
            (Verdict::Refused(Refusal::Version), _) => {
                let error =
                    HandshakeError::ClientVersion { lowest: asked.min_version, highest: asked.max_version };
                self.state = State::Finishing(Outcome::Failed(error));
            }
            (Verdict::Refused(reason), _) => {
                self.state = State::Finishing(Outcome::Failed(HandshakeError::Refused(reason)))
            }
            (Verdict::Agreed(security @ Security::Open), _) => {
                self.state =
                    State::Finishing(Outcome::Secured(None, Agreed { security, features: answer.features }));
            }
            (Verdict::Agreed(security), Some(key)) => {
                let proof = Proof::new(key, &prologue(asked, self.tenant, &answer), false);
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
pub fn connect<G>(
    endpoint: &Endpoint,
    local: LocalPolicy,
    deadline: Instant,
) -> Result<Link<G>, HandshakeError> {
    let stream = Stream::connect(endpoint, deadline).map_err(|e| {
        if e.kind() == io::ErrorKind::TimedOut {
            HandshakeError::TimedOut
        } else {
            HandshakeError::Connect(e)
        }
    })?;
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

/// Both prefaces, and the tenant between them: altering any of it makes the proof fail.
fn prologue(asked: &Preface, tenant: Option<TenantId>, answer: &Preface) -> Vec<u8> {
    let mut prologue = asked.encode().to_vec();
    prologue.extend(tenant.iter().flat_map(TenantId::encode));
    prologue.extend(answer.encode());
    prologue
}
