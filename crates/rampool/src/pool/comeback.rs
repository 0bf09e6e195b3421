//! The way back to a server whose connection broke.
//!
//! A server keeps a member without a connection for the grace time. Within it, and within the time that a server may leave a request unanswered, a new
//! connection is tried again and again; the client attaches as the member that it was, and the server from then on ignores whatever still
//! arrives over the old one. Nothing here blocks. It never gives a server up that is there, and never waits for one that refuses the connection: who
//! listens no more has lost its pages.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rampool_proto::wire::{self, AttachLease, Granted, Header, Opcode, Status};

use super::lane::{Departure, watched};
use crate::error::LostReason;
use crate::transport::{Connecting, Handshake, HandshakeError, Link, LocalPolicy, Received, Stream, Urgency, Wants, Way};

/// One attempt may take this long; a lost packet of it is sent again after a second by the kernel.
const ATTEMPT: Duration = Duration::from_millis(2500);
/// The pause after an attempt that failed.
pub(super) const PAUSE: Duration = Duration::from_millis(100);
/// The number of the one request that this makes; no request of a pool has it.
const ATTACH: u64 = u64::MAX;

/// Where a server is and who the client is there: what it takes to come back.
pub(super) struct Place {
    pub way: Way,
    pub local: LocalPolicy,
    pub attach: AttachLease,
    /// This run of the server.
    pub server: u64,
    /// How long the server keeps a member without a connection.
    pub grace: Duration,
}

/// A comeback under way.
pub(super) struct Comeback {
    /// Why the connection broke.
    pub reason: LostReason,
    until: Instant,
    step: Step,
    /// When the step has failed, or, while pausing, the next attempt begins.
    due: Instant,
}

enum Step {
    Pausing,
    Connecting(Connecting),
    Shaking(Box<Handshake>),
    Attaching(Box<Link<Option<Departure>>>),
}

/// What came of trying.
pub(super) enum Came {
    /// Not there yet: wait for [`Comeback::watched`] or [`Comeback::due`].
    NotYet,
    Back(Box<Link<Option<Departure>>>, Granted),
    /// It is over.
    Lost(LostReason),
}

/// Why a step went no further.
enum Trouble {
    /// Perhaps the next attempt succeeds.
    Again,
    Never(LostReason),
}

impl Comeback {
    /// `patience`: how long to try at most.
    pub fn begin(reason: LostReason, now: Instant, patience: Duration) -> Self {
        Self { reason, until: now + patience, step: Step::Pausing, due: now }
    }

    /// When [`Comeback::go_on`] must be called again at the latest.
    pub fn due(&self) -> Instant {
        self.due.min(self.until)
    }

    /// What to sleep on, and whether for room to write.
    pub fn watched(&self) -> Option<(BorrowedFd<'_>, bool)> {
        match &self.step {
            Step::Pausing => None,
            Step::Connecting(connecting) => Some((connecting.as_fd(), true)),
            Step::Shaking(handshake) => Some((handshake.as_fd(), handshake.wants() == Wants::Write)),
            Step::Attaching(link) => Some(watched(link)),
        }
    }

    /// Goes on as far as possible without blocking.
    pub fn go_on(&mut self, place: &Place, now: Instant) -> Came {
        if now >= self.until {
            return Came::Lost(self.reason.clone());
        }
        let pausing = matches!(self.step, Step::Pausing);
        if pausing && now < self.due {
            return Came::NotYet;
        }
        let outcome = if !pausing && now >= self.due { Err(Trouble::Again) } else { self.advance(place, now) };
        match outcome {
            Ok(None) => Came::NotYet,
            Ok(Some((link, granted))) => Came::Back(link, granted),
            Err(Trouble::Again) => {
                self.step = Step::Pausing;
                self.due = now + PAUSE;
                Came::NotYet
            }
            Err(Trouble::Never(reason)) => Came::Lost(reason),
        }
    }

    #[allow(clippy::type_complexity)]
    fn advance(&mut self, place: &Place, now: Instant) -> Result<Option<(Box<Link<Option<Departure>>>, Granted)>, Trouble> {
        loop {
            self.step = match std::mem::replace(&mut self.step, Step::Pausing) {
                Step::Pausing => {
                    self.due = now + ATTEMPT;
                    Step::Connecting(Stream::begin(&place.way).map_err(|error| self.trouble(&HandshakeError::Connect(error)))?)
                }
                Step::Connecting(mut connecting) => {
                    match connecting.finish().map_err(|error| self.trouble(&HandshakeError::Connect(error)))? {
                        Some(stream) => Step::Shaking(Box::new(Handshake::client(stream, place.local.clone()))),
                        None => {
                            self.step = Step::Connecting(connecting);
                            return Ok(None);
                        }
                    }
                }
                Step::Shaking(mut handshake) => match handshake.advance().map_err(|error| self.trouble(&error))? {
                    Some(mut link) => {
                        let mut head = Vec::new();
                        wire::encode_frame(&mut head, Header::request(Opcode::AttachLease, ATTACH), &place.attach.encode(), 0);
                        link.send_head(Urgency::Demand, &head, None);
                        Step::Attaching(Box::new(link))
                    }
                    None => {
                        self.step = Step::Shaking(handshake);
                        return Ok(None);
                    }
                },
                Step::Attaching(mut link) => {
                    link.flush().map_err(|_| Trouble::Again)?;
                    match link.receive().map_err(|_| Trouble::Again)? {
                        Received::Blocked => {
                            self.step = Step::Attaching(link);
                            return Ok(None);
                        }
                        Received::Head(header) if header.opcode == Opcode::Draining && !header.is_reply() => Step::Attaching(link),
                        Received::Head(header) => {
                            let granted = self.answer(place, &header, link.table())?;
                            return Ok(Some((link, granted)));
                        }
                        Received::Bulk(_) => return Err(Trouble::Never(LostReason::Protocol("pages that nobody asked for".into()))),
                    }
                }
            }
        }
    }

    fn answer(&self, place: &Place, header: &Header, table: &[u8]) -> Result<Granted, Trouble> {
        if !header.is_reply() || header.request != ATTACH || header.opcode != Opcode::AttachLease || header.bulk_len > 0 {
            return Err(Trouble::Never(LostReason::Protocol(format!("an answer ({:?}) to nothing that was asked", header.opcode))));
        }
        match header.status {
            Status::Ok => {}
            // Also a new server at the same address, which knows nothing of this lease.
            Status::NoSuchLease | Status::MemberGone => return Err(Trouble::Never(LostReason::GivenUp)),
            _ => return Err(Trouble::Never(self.reason.clone())),
        }
        let granted = Granted::parse(table).map_err(|error| Trouble::Never(LostReason::Wire(error)))?;
        if granted.server != place.server || granted.member != place.attach.member || granted.lease != place.attach.lease {
            return Err(Trouble::Never(LostReason::Protocol("it took this client for another".into())));
        }
        if granted.max_requests == 0 || (granted.max_bytes as usize) < rampool_proto::units::OS_PAGE_BYTES {
            return Err(Trouble::Never(LostReason::Protocol("it grants not even one page at a time".into())));
        }
        Ok(granted)
    }

    /// What cannot pass ends the server for this client: it has ended, with its pages, or there is another one, with another key.
    fn trouble(&self, error: &HandshakeError) -> Trouble {
        match error {
            error if error.may_pass() => Trouble::Again,
            HandshakeError::Connect(_) => Trouble::Never(self.reason.clone()),
            other => Trouble::Never(LostReason::Protocol(other.to_string())),
        }
    }
}
