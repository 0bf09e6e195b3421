//! Leases: to open, to resize, to join, to leave one.

use super::{Connection, End, Handled, Membership, Service, Step, Stepped, Work, tell};
use crate::lease::Lease;
use crate::refused::Refused;
use crate::shared::Shared;
use rampool_lease::{AttachError, ConnectionNumber, OpenError, ResizeError, resize_lease};
use rampool_net::key::random_bytes;
use rampool_wire::frame::{AttachLease, Granted, Header, LeaseToken, MemberId, OpenLease, Status};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a request waits for memory that closing leases are about to give back: less than clients wait for
/// the reply.
const LEASE_WAIT: Duration = Duration::from_secs(4);
const SHORT_OF_MEMORY: &str =
    "the server's machine is short of memory, so it gives no new leases for now; wait, or use another server";

/// A request for memory. While that is about to be given back, it waits.
struct Asking {
    ask: Ask,
    until: Option<Instant>,
}

enum Ask {
    Open(OpenLease),
    Resize(u64),
}

/// Memory that is not given.
enum Denied {
    Refused(Refused),
    /// It is about to be free.
    Later(Refused),
}

impl<E: Into<Refused>> From<E> for Denied {
    fn from(error: E) -> Self {
        Denied::Refused(error.into())
    }
}

/// A member in the directory, that is not yet one in its lease.
struct Attaching {
    lease: Arc<Lease>,
    member: MemberId,
    connection: ConnectionNumber,
    token: LeaseToken,
    lease_bytes: u64,
}

impl Connection {
    pub(super) fn open_lease(&mut self, service: &mut Service, header: Header) -> Handled {
        let request = OpenLease::parse(self.link.table())?;
        self.ask(service, header, Ask::Open(request))
    }

    pub(super) fn resize_lease(&mut self, service: &mut Service, header: Header) -> Handled {
        self.ask(service, header, Ask::Resize(header.arg))
    }

    fn ask(&mut self, service: &mut Service, header: Header, ask: Ask) -> Handled {
        if self.parked.is_some() {
            let said = "another request for memory of this connection waits";
            return Err(Refused::new(Status::BadRequest, said).into());
        }
        self.parked = Some((header, Box::new(Asking { ask, until: None })));
        self.ask_again(service);
        Ok(())
    }

    /// Asks for memory; again when a lease has closed, and now and then for the deadline.
    pub(crate) fn ask_again(&mut self, service: &mut Service) {
        if let Some((header, mut asking)) = self.parked.take()
            && self.step(service, header, &mut *asking)
        {
            self.parked = Some((header, asking));
        }
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    fn open(&mut self, service: &mut Service, header: Header, request: &OpenLease) -> Result<(), Denied> {
        self.has_no_lease()?;
        let shared = &service.shared;
        if shared.draining() {
            return Err(Refused::new(Status::Draining, "the server is stopping").into());
        }
        if shared.short_of_memory() {
            self.audit_refused(shared, request, &SHORT_OF_MEMORY);
            return Err(Refused::new(Status::ShortOfMemory, SHORT_OF_MEMORY).into());
        }
        let token = LeaseToken(random_bytes());
        let opened = shared.directory().open(self.tenant.name, request, token);
        let (id, member) = opened.map_err(|error| {
            let (status, arg) = match error {
                OpenError::TooLarge { free } | OpenError::Closing { free, .. } => {
                    (Status::LeaseRefused, free)
                }
                OpenError::OverQuota(over) => (Status::LeaseRefused, over.left()),
                OpenError::TooManyOfTenant(over) => (Status::LimitReached, over.left()),
                OpenError::Empty => (Status::BadRequest, 0),
                _ => (Status::LimitReached, 0),
            };
            let message = format!("a lease of {} bytes does not fit: {error}", request.bytes);
            let refused = Refused { status, arg, message };
            if matches!(error, OpenError::Closing { .. }) {
                tracing::debug!(bytes = request.bytes, name = request.name, peer = %self.link.peer(), %error,
                    "lease waits");
                return Denied::Later(refused);
            }
            self.audit_refused(shared, request, &error);
            Denied::Refused(refused)
        })?;
        let lease = shared.open_lease(id, member, request.bytes, Arc::clone(&self.tenant));
        if shared.may_log("lease granted", self.tenant.name) {
            let generation = self.identity.map(|tenant| tenant.generation);
            let OpenLease { bytes, name, host, pid } = request;
            tracing::info!(tenant = %self.tenant_name(), generation, lease = id.0, bytes, name, host, pid,
                peer = %self.link.peer(), "lease granted");
        }
        let (connection, lease_bytes) = (ConnectionNumber::FIRST, request.bytes);
        self.join(service, header, &Attaching { lease, member, connection, token, lease_bytes });
        Ok(())
    }

    /// One line, unless the same was said within this minute.
    fn audit_refused(&self, shared: &Shared, request: &OpenLease, error: &dyn std::fmt::Display) {
        let (tenant, bytes) = (self.tenant_name(), request.bytes);
        let error = format!("tenant {tenant}, {bytes} bytes: {error}");
        shared.log_peer_error("lease refused", Some(self.link.peer()), &error);
    }

    fn resize(&mut self, service: &mut Service, header: Header, bytes: u64) -> Result<(), Denied> {
        let membership = self.membership()?;
        let mut space = membership.space()?;
        if service.shared.short_of_memory() && bytes > space.usage().limit_bytes {
            return Err(Refused::new(Status::ShortOfMemory, SHORT_OF_MEMORY).into());
        }
        let mut directory = service.shared.directory();
        let resized = resize_lease(&mut directory, &mut space, membership.lease.id, bytes);
        drop((directory, space));
        resized.map_err(|error| {
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
            let is_later = matches!(error, ResizeError::Closing { .. });
            if is_later { Denied::Later(refused) } else { Denied::Refused(refused) }
        })?;
        self.answer(header, 0);
        Ok(())
    }

    /// Becomes a member in the directory, and then in the lease.
    pub(super) fn attach_lease(&mut self, service: &mut Service, header: Header) -> Handled {
        let request = AttachLease::parse(self.link.table())?;
        self.has_no_lease()?;
        let shared = &service.shared;
        // Only for this: the lease may be busy for long, and others need the directory.
        let attached = shared.directory().attach(self.tenant.name, &request);
        let (member, connection, lease_bytes) = attached.map_err(|error| {
            shared.log_peer_error("could not join a lease", Some(self.link.peer()), &error);
            let status = match error {
                AttachError::NoSuchLease => Status::NoSuchLease,
                AttachError::MemberGone => Status::MemberGone,
                _ => Status::LimitReached,
            };
            Refused::new(status, error)
        })?;
        let lease = shared.lease(request.lease).ok_or_else(member_gone)?;
        let token = request.token;
        self.begin(service, header, Attaching { lease, member, connection, token, lease_bytes })
    }

    fn has_no_lease(&self) -> Result<(), Refused> {
        let has = self
            .has_lease()
            .then(|| Refused::new(Status::BadRequest, "this connection has its lease already"));
        has.map_or(Ok(()), Err)
    }

    /// It works with this lease from now on.
    fn join(&mut self, service: &mut Service, header: Header, joined: &Attaching) {
        let Attaching { lease, member, connection, token, lease_bytes } = joined;
        let config = &service.shared.config;
        let ms = |duration: Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        let granted = Granted {
            lease: lease.id,
            token: *token,
            member: *member,
            server: service.shared.server,
            lease_bytes: *lease_bytes,
            max_requests: config.max_requests,
            max_bytes: config.max_bytes,
            grace_ms: ms(config.grace),
            heartbeat_ms: ms(config.heartbeat),
        };
        lease.connected(*member, *connection, self.link.means());
        let counted = self.counted;
        self.count(0);
        self.charged = Some(Arc::clone(lease));
        self.count(counted);
        self.membership =
            Some(Membership { lease: Arc::clone(lease), member: *member, connection: *connection });
        tell(&mut self.link, &mut service.head, header.reply(Status::Ok), &granted.encode());
    }

    pub(super) fn goodbye(&mut self, service: &mut Service, header: Header) -> Handled {
        let shared = &service.shared;
        let own = self.membership.as_ref().map(|membership| membership.member.0);
        // For another member of the lease, whose process is gone.
        if header.arg != 0 && own != Some(header.arg) {
            let lease = self.membership()?.lease.id;
            if let Some(departed) = shared.directory().leave(lease, MemberId(header.arg)) {
                tracing::debug!(lease = lease.0, member = header.arg, "dismissed");
                shared.depart(departed);
            }
            self.answer(header, 0);
            return Ok(());
        }
        if let Some(Membership { lease, member, connection }) = self.membership.take() {
            lease.disconnected(member, connection);
            let mut directory = shared.directory();
            let current = directory.is_current(lease.id, member, connection);
            let departed = if current { directory.leave(lease.id, member) } else { None };
            drop(directory);
            departed.into_iter().for_each(|departed| shared.depart(departed));
        }
        self.answer(header, 0);
        Err(End::Goodbye.into())
    }
}

fn member_gone() -> Refused {
    Refused::new(Status::MemberGone, AttachError::MemberGone)
}

impl Work for Asking {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let asked = match &self.ask {
            Ask::Open(request) => connection.open(service, header, request),
            Ask::Resize(bytes) => connection.resize(service, header, *bytes),
        };
        match asked {
            Ok(()) => Ok(Step::Done),
            Err(Denied::Refused(refused)) => Err(refused),
            Err(Denied::Later(refused)) => {
                let now = Instant::now();
                let until = *self.until.get_or_insert(now + LEASE_WAIT);
                if now < until { Ok(Step::More) } else { Err(refused) }
            }
        }
    }
}

/// It becomes a member in the lease as well; while another thread works on that, later: no other connection
/// of this shard waits for a lease that is none of its own.
impl Work for Attaching {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let shared = &service.shared;
        let Some(stays) = shared.attach_member(&self.lease, self.member, self.connection) else {
            return Ok(Step::More);
        };
        if !stays {
            return Err(member_gone());
        }
        let name = connection.tenant.name;
        if self.connection != ConnectionNumber::FIRST && shared.may_log("member reconnected", name) {
            tracing::info!(tenant = %connection.tenant_name(), lease = self.lease.id.0,
                member = self.member.0, peer = %connection.link.peer(), "member reconnected");
        }
        connection.join(service, header, self);
        Ok(Step::Done)
    }

    fn waits(&self) -> bool {
        true
    }

    fn leave(self: Box<Self>, _: &Connection, shared: &Shared) {
        let Self { lease, member, connection, .. } = *self;
        shared.directory().disconnected(shared.now(), lease.id, member, connection);
    }
}
