//! One attempt to reach a server again: connect, shake hands, ask to be the member that this client was.
//! Nothing here blocks, and nothing is decided: what comes of each step, the session hears.

use std::os::fd::{AsFd, BorrowedFd};

use rampool_net::transport::{
    Connecting, Handshake, HandshakeError, LinkError, LocalPolicy, PeerAddress, Received, Stream, Urgency,
    Wants,
};
use rampool_session::{ATTACH_NUMBER, LinkId};
use rampool_wire::frame::{self, AttachLease, Granted, Header, Opcode, OpenLease};

use super::link::{ServerLink, watched};
use crate::error::LostReason;

/// Where a server is and who the client is there.
pub(super) struct Place {
    pub way: PeerAddress,
    pub local: LocalPolicy,
    pub ask: Joining,
}

/// How the client becomes a member.
#[derive(Clone, Debug)]
pub(super) enum Joining {
    Attach(AttachLease),
    /// By a lease of its own.
    Open(OpenLease),
}

impl Joining {
    fn frame(&self) -> (Opcode, Vec<u8>) {
        match self {
            Self::Attach(attach) => (Opcode::AttachLease, attach.encode()),
            Self::Open(open) => (Opcode::OpenLease, open.encode()),
        }
    }

    /// It is this member from now on.
    pub fn granted(&mut self, granted: &Granted) {
        let (lease, token, member) = (granted.lease, granted.token, granted.member);
        *self = Self::Attach(match self {
            Self::Attach(attach) => AttachLease { lease, token, member, ..attach.clone() },
            Self::Open(OpenLease { pid, name, host, .. }) => {
                AttachLease { lease, token, member, pid: *pid, name: name.clone(), host: host.clone() }
            }
        });
    }
}

/// An attempt under way.
pub(super) struct Attempt {
    pub link: LinkId,
    /// The server has said that it drains.
    pub drains: Option<Header>,
    step: Step,
}

enum Step {
    Connecting(Connecting),
    Shaking(Box<Handshake>),
    /// Until the session wants to attach.
    Connected(Box<ServerLink>),
    Attaching(Box<ServerLink>),
    /// Attached, or over.
    Taken,
}

/// How far an attempt got.
pub(super) enum Reached {
    /// Wait for [`Attempt::watched`].
    NotYet,
    Connected,
    Answer(Header, Option<Granted>),
}

/// Why it got no further.
pub(super) enum Trouble {
    MayPass,
    /// With a better reason than the connection's, where there is one.
    ForGood(Option<LostReason>),
}

impl Attempt {
    pub fn begin(link: LinkId, place: &Place) -> Result<Self, Trouble> {
        let connecting =
            Stream::begin(&place.way).map_err(|error| trouble(&HandshakeError::Connect(error)))?;
        Ok(Self { link, drains: None, step: Step::Connecting(connecting) })
    }

    /// What to sleep on, and whether for room to write.
    pub fn watched(&self) -> Option<(BorrowedFd<'_>, bool)> {
        match &self.step {
            Step::Connecting(connecting) => Some((connecting.as_fd(), true)),
            Step::Shaking(handshake) => Some((handshake.as_fd(), handshake.wants() == Wants::Write)),
            Step::Attaching(link) | Step::Connected(link) => Some(watched(link)),
            Step::Taken => None,
        }
    }

    /// Asks to be the member again that this client was, or a new one.
    pub fn attach(&mut self, place: &Place) {
        let Step::Connected(mut link) = std::mem::replace(&mut self.step, Step::Taken) else { return };
        let mut head = Vec::new();
        let (opcode, table) = place.ask.frame();
        let header = Header::request(opcode, ATTACH_NUMBER);
        frame::encode_frame(&mut head, header, &table, 0);
        link.send_head(Urgency::Demand, &head, None);
        self.step = Step::Attaching(link);
    }

    /// The connection, once it is attached.
    pub fn into_link(self) -> Option<Box<ServerLink>> {
        if let Step::Attaching(link) = self.step { Some(link) } else { None }
    }

    /// Goes on as far as possible without blocking.
    pub fn go_on(&mut self, place: &Place) -> Result<Reached, Trouble> {
        loop {
            self.step = match std::mem::replace(&mut self.step, Step::Taken) {
                Step::Connecting(mut connecting) => match connecting
                    .finish()
                    .map_err(|error| trouble(&HandshakeError::Connect(error)))?
                {
                    Some(stream) => Step::Shaking(Box::new(Handshake::client(stream, place.local.clone()))),
                    None => {
                        self.step = Step::Connecting(connecting);
                        return Ok(Reached::NotYet);
                    }
                },
                Step::Shaking(mut handshake) => match handshake.advance().map_err(|error| trouble(&error))? {
                    Some(link) => {
                        self.step = Step::Connected(Box::new(link));
                        return Ok(Reached::Connected);
                    }
                    None => {
                        self.step = Step::Shaking(handshake);
                        return Ok(Reached::NotYet);
                    }
                },
                Step::Attaching(mut link) => {
                    let may_pass = |_: LinkError| Trouble::MayPass;
                    link.flush().map_err(may_pass)?;
                    let received = link.receive().map_err(may_pass)?;
                    let table = match received {
                        Received::Head(header) if header.is_reply() => {
                            Some((header, Granted::parse(link.table())))
                        }
                        _ => None,
                    };
                    self.step = Step::Attaching(link);
                    match (received, table) {
                        (_, Some((header, granted))) => {
                            return Ok(Reached::Answer(header, granted.ok()));
                        }
                        (Received::Blocked, None) => return Ok(Reached::NotYet),
                        (Received::Head(header), None) if header.opcode == Opcode::Draining => {
                            self.drains = Some(header);
                            continue;
                        }
                        _ => {
                            let odd = LostReason::Protocol("frames that were not asked for".into());
                            return Err(Trouble::ForGood(Some(odd)));
                        }
                    }
                }
                step @ (Step::Connected(_) | Step::Taken) => {
                    self.step = step;
                    return Ok(Reached::NotYet);
                }
            }
        }
    }
}

/// What cannot pass ends the server for this client: it has ended, with its pages, or another one
/// is there, with another key.
fn trouble(error: &HandshakeError) -> Trouble {
    match error {
        error if error.may_pass() => Trouble::MayPass,
        HandshakeError::Connect(_) => Trouble::ForGood(None),
        other => Trouble::ForGood(Some(LostReason::Protocol(other.to_string()))),
    }
}
