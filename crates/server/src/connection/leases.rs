//! Leases: to open, to resize, to join one.

use super::held::Held;
use super::{Connection, Membership, Paused, Refused, ScratchBuffers};
use crate::shared::{Lease, Shared};
use rampool_lease::{AttachError, ConnectionNumber, OpenError, ResizeError, resize_lease};
use rampool_net::key::random_bytes;
use rampool_net::transport::Urgency;
use rampool_wire::frame::{
    AttachLease, Granted, Header, LeaseToken, MemberId, OpenLease, Status, WireError, encode_frame,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a request waits for memory that closing leases are about to give back: less than clients wait for
/// the reply.
const LEASE_WAIT: Duration = Duration::from_secs(4);
const SHORT_OF_MEMORY: &str =
    "the server's machine is short of memory, so it gives no new leases for now; wait, or use another server";

/// A request for memory that is free as soon as closing leases have been freed.
pub(super) struct Parked {
    header: Header,
    ask: Ask,
    until: Instant,
}

pub(super) enum Ask {
    Open(OpenLease),
    Resize(u64),
}

/// The result of asking for memory.
pub(super) enum Asked {
    Granted(Box<Granted>),
    Resized,
    Refused(Refused),
    /// The memory is about to be free.
    Later(Refused),
}

/// A member in the directory, that is not yet one in its lease.
pub(super) struct Attaching {
    pub(super) header: Header,
    pub(super) lease: Arc<Lease>,
    pub(super) member: MemberId,
    pub(super) connection: ConnectionNumber,
    pub(super) token: LeaseToken,
    pub(super) lease_bytes: u64,
}

impl Connection {
    /// Asks for memory, and replies, unless the memory is about to be given back: then the request waits
    /// until `until` at the latest.
    pub(super) fn ask(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        ask: Ask,
        until: Option<Instant>,
    ) {
        let asked = if self.parked.is_some() {
            Asked::Refused(Refused::new(
                Status::BadRequest,
                "another request for memory of this connection waits",
            ))
        } else {
            match &ask {
                Ask::Open(request) => self.open(shared, request),
                Ask::Resize(bytes) => self.resize(shared, *bytes),
            }
        };
        match asked {
            Asked::Granted(granted) => self.grant(buffers, header, &granted),
            Asked::Resized => self.answer(shared, buffers, header, Ok(0)),
            Asked::Refused(refused) => self.refuse(buffers, header, &refused, shared),
            Asked::Later(refused) => {
                let now = Instant::now();
                let until = until.unwrap_or(now + LEASE_WAIT);
                if now < until {
                    self.parked = Some(Parked { header, ask, until });
                } else {
                    self.refuse(buffers, header, &refused, shared);
                }
            }
        }
    }

    /// Retries what had to wait; called when a lease has closed, and now and then for the deadline.
    pub(crate) fn ask_again(&mut self, shared: &Shared, buffers: &mut ScratchBuffers) {
        if let Some(Parked { header, ask, until }) = self.parked.take() {
            self.ask(shared, buffers, header, ask, Some(until));
        }
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    pub(super) fn grant(&mut self, buffers: &mut ScratchBuffers, header: Header, granted: &Granted) {
        buffers.head.clear();
        encode_frame(&mut buffers.head, header.reply(Status::Ok), &granted.encode(), 0);
        self.link.send_head(Urgency::Demand, &buffers.head, Held::nothing());
    }

    pub(super) fn open(&mut self, shared: &Shared, request: &OpenLease) -> Asked {
        if let Some(refused) = self.sits_already() {
            return Asked::Refused(refused);
        }
        if shared.draining() {
            return Asked::Refused(Refused::new(Status::Draining, "the server is stopping"));
        }
        if shared.short_of_memory() {
            self.audit_refused(shared, request, &SHORT_OF_MEMORY);
            return Asked::Refused(Refused::new(Status::ShortOfMemory, SHORT_OF_MEMORY));
        }
        let token = LeaseToken(random_bytes());
        let opened = shared.directory().open(self.tenant.name, request, token);
        match opened {
            Ok((id, member)) => {
                let lease = Arc::new(Lease::new(shared, id, request.bytes, &self.tenant));
                lease.space().member_joined(member, ConnectionNumber::FIRST);
                shared.add_lease(Arc::clone(&lease));
                if shared.may_log("lease granted", self.tenant.name) {
                    let generation = self.identity.map(|tenant| tenant.generation);
                    let OpenLease { bytes, name, host, pid } = request;
                    tracing::info!(tenant = %self.tenant_name(), generation, lease = id.0, bytes, name, host, pid,
                        peer = %self.link.peer(), "lease granted");
                }
                Asked::Granted(Box::new(self.sit(
                    shared,
                    lease,
                    (member, ConnectionNumber::FIRST),
                    token,
                    request.bytes,
                )))
            }
            Err(error) => {
                let (status, arg) = match error {
                    OpenError::TooLarge { free } | OpenError::Closing { free, .. } => {
                        (Status::LeaseRefused, free)
                    }
                    OpenError::OverQuota(over) => (Status::LeaseRefused, over.left()),
                    OpenError::TooManyOfTenant(over) => (Status::LimitReached, over.left()),
                    OpenError::Empty => (Status::BadRequest, 0),
                    _ => (Status::LimitReached, 0),
                };
                let refused = Refused {
                    status,
                    arg,
                    message: format!("a lease of {} bytes does not fit: {error}", request.bytes),
                };
                if matches!(error, OpenError::Closing { .. }) {
                    tracing::debug!(bytes = request.bytes, name = request.name, peer = %self.link.peer(), %error, "lease waits");
                    return Asked::Later(refused);
                }
                self.audit_refused(shared, request, &error);
                Asked::Refused(refused)
            }
        }
    }

    /// One line, unless the same was said within this minute.
    pub(super) fn audit_refused(&self, shared: &Shared, request: &OpenLease, error: &dyn std::fmt::Display) {
        let (tenant, bytes) = (self.tenant_name(), request.bytes);
        let error = format!("tenant {tenant}, {bytes} bytes: {error}");
        shared.log_peer_error("lease refused", Some(self.link.peer()), &error);
    }

    pub(super) fn resize(&self, shared: &Shared, bytes: u64) -> Asked {
        let membership = match self.membership() {
            Ok(membership) => membership,
            Err(refused) => return Asked::Refused(refused),
        };
        let mut space = match membership.space() {
            Ok(space) => space,
            Err(error) => return Asked::Refused(error.into()),
        };
        if shared.short_of_memory() && bytes > space.usage().limit_bytes {
            return Asked::Refused(Refused::new(Status::ShortOfMemory, SHORT_OF_MEMORY));
        }
        let mut directory = shared.directory();
        let Err(error) = resize_lease(&mut directory, &mut space, membership.lease.id, bytes) else {
            return Asked::Resized;
        };
        let (status, arg) = match error {
            ResizeError::TooLarge { free } | ResizeError::Closing { free, .. } => {
                (Status::LeaseRefused, free)
            }
            ResizeError::OverQuota(over) => (Status::LeaseRefused, over.left()),
            ResizeError::InUse { used } => (Status::PoolFull, used),
            ResizeError::Empty => (Status::BadRequest, 0),
            _ => (Status::NoSuchLease, 0),
        };
        let refused = Refused { status, arg, message: error.to_string() };
        if matches!(error, ResizeError::Closing { .. }) {
            Asked::Later(refused)
        } else {
            Asked::Refused(refused)
        }
    }

    /// Becomes a member in the directory; [`Connection::go_on_attaching`] follows.
    pub(super) fn attach(
        &mut self,
        shared: &Shared,
        header: Header,
    ) -> Result<Result<Attaching, Refused>, WireError> {
        let request = AttachLease::parse(self.link.table())?;
        if let Some(refused) = self.sits_already() {
            return Ok(Err(refused));
        }
        // Only for this: the lease may be busy for long, and others need the directory.
        let attached = shared.directory().attach(self.tenant.name, &request);
        Ok(match attached {
            Ok((member, connection, bytes)) => {
                let Some(lease) = shared.lease(request.lease) else {
                    return Ok(Err(Refused::new(Status::MemberGone, AttachError::MemberGone)));
                };
                let (token, lease_bytes) = (request.token, bytes);
                Ok(Attaching { header, lease, member, connection, token, lease_bytes })
            }
            Err(error) => {
                shared.log_peer_error("could not join a lease", Some(self.link.peer()), &error);
                let status = match error {
                    AttachError::NoSuchLease => Status::NoSuchLease,
                    AttachError::MemberGone => Status::MemberGone,
                    _ => Status::LimitReached,
                };
                Err(Refused::new(status, error))
            }
        })
    }

    /// Becomes a member in the lease as well, and answers; while another thread works on it, later: no other
    /// connection of this shard waits for a lease that is none of its own.
    pub(super) fn go_on_attaching(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        attaching: Box<Attaching>,
    ) {
        let Attaching { header, lease, member, connection, token, lease_bytes } = &*attaching;
        let (header, member, connection) = (*header, *member, *connection);
        match shared.attach_member(lease, member, connection) {
            None => self.paused = Some(Paused::Attach(attaching)),
            Some(false) => {
                let gone = Refused::new(Status::MemberGone, AttachError::MemberGone);
                self.refuse(buffers, header, &gone, shared);
            }
            Some(true) => {
                if connection != ConnectionNumber::FIRST
                    && shared.may_log("member reconnected", self.tenant.name)
                {
                    tracing::info!(tenant = %self.tenant_name(), lease = lease.id.0, member = member.0,
                        peer = %self.link.peer(), "member reconnected");
                }
                let granted = self.sit(shared, Arc::clone(lease), (member, connection), *token, *lease_bytes);
                self.grant(buffers, header, &granted);
            }
        }
    }

    pub(super) fn sits_already(&self) -> Option<Refused> {
        self.has_lease().then(|| Refused::new(Status::BadRequest, "this connection has its lease already"))
    }

    pub(super) fn sit(
        &mut self,
        shared: &Shared,
        lease: Arc<Lease>,
        (member, connection): (MemberId, ConnectionNumber),
        token: LeaseToken,
        lease_bytes: u64,
    ) -> Granted {
        let ms = |duration: std::time::Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        let granted = Granted {
            lease: lease.id,
            token,
            member,
            server: shared.server,
            lease_bytes,
            max_requests: shared.config.max_requests,
            max_bytes: shared.config.max_bytes,
            grace_ms: ms(shared.config.grace),
            heartbeat_ms: ms(shared.config.heartbeat),
        };
        lease.connected(member, connection, self.link.means());
        let counted = self.counted;
        self.count(0);
        self.charged = Some(Arc::clone(&lease));
        self.count(counted);
        self.membership = Some(Membership { lease, member, connection });
        granted
    }
}
