//! What a connection does with its turn: it takes requests, each by its line in the [table](Entry::of).

use super::gather::look_ahead;
use super::{
    BYTES_AT_ONCE, Connection, End, Fail, Handled, LOOK_AT_CLOCK_AFTER, Service, Turn, count, count_alone,
    no_lease,
};
use crate::refused::Refused;
use rampool_net::transport::{Flush, Received};
use rampool_wire::frame::{Header, MAX_BULK_BYTES, Opcode, Status};
use std::time::{Duration, Instant};

/// Frames answered before another connection has its turn.
const FRAMES_A_TURN: usize = 64;
/// A request of the direct view counts as so many frames: it may move a megabyte, and touch many pages.
const DIRECT_COUNTS_FOR: usize = 8;
/// Replies that are sent from where they lie, and are sent before the end of the turn: one call for several
/// is faster than one for each.
const FLUSH_BYTES: usize = 1536 << 10;

type Handler = fn(&mut Connection, &mut Service, Header) -> Handled;

/// The table: by opcode.
static TABLE: [Entry; Opcode::ALL.len()] = {
    let mut table = [Entry::of(Opcode::ALL[0]); Opcode::ALL.len()];
    let mut at = 0;
    while at < table.len() {
        table[at] = Entry::of(Opcode::ALL[at]);
        at += 1;
    }
    table
};

/// How requests of one kind are handled.
#[derive(Clone, Copy)]
struct Entry {
    handle: Handler,
    /// Bytes may come with it, which its handler places.
    bulk: bool,
    /// It is of the direct view.
    direct: bool,
    /// Without a lease it is refused unread.
    leased: bool,
    /// It counts as neither get, put nor discard.
    control: bool,
}

impl Entry {
    const fn handled(handle: Handler) -> Self {
        Self { handle, bulk: false, direct: false, leased: false, control: true }
    }

    const fn pages(handle: Handler) -> Self {
        Self { control: false, ..Self::handled(handle) }
    }

    const fn leased(handle: Handler) -> Self {
        Self { leased: true, ..Self::handled(handle) }
    }

    const fn bytes(handle: Handler) -> Self {
        Self { direct: true, ..Self::leased(handle) }
    }

    const fn of(opcode: Opcode) -> Self {
        match opcode {
            Opcode::Get => Self::pages(Connection::get),
            Opcode::Put => Self { bulk: true, ..Self::pages(Connection::put) },
            Opcode::Discard => Self::pages(Connection::discard),

            Opcode::ReadPiece => Self { direct: true, ..Self::pages(Connection::read_piece) },
            Opcode::Gather => Self::bytes(Connection::gather),
            Opcode::Scatter | Opcode::Accumulate => {
                Self { bulk: true, control: false, ..Self::bytes(Connection::update) }
            }
            Opcode::Scan => Self::bytes(Connection::scan),
            Opcode::Copy => Self::bytes(Connection::copy),
            Opcode::FetchOp => Self::handled(Connection::fetch_op),

            Opcode::OpenLease => Self::handled(Connection::open_lease),
            Opcode::AttachLease => Self::handled(Connection::attach_lease),
            Opcode::ResizeLease => Self::handled(Connection::resize_lease),
            Opcode::Goodbye => Self::handled(Connection::goodbye),
            Opcode::Heartbeat => Self::handled(Connection::heartbeat),
            Opcode::Status => Self::handled(Connection::status),
            Opcode::Drain => Self::handled(Connection::drain),

            Opcode::CreateRegion => Self::handled(Connection::create_region),
            Opcode::CloneRegion => Self::handled(Connection::clone_region),
            Opcode::AdoptRegion => Self::handled(Connection::adopt_region),
            Opcode::OpenRegion => Self::handled(Connection::open_region),
            Opcode::FreeRegion => Self::handled(Connection::free_region),
            Opcode::ListRegions => Self::leased(Connection::list_regions),

            Opcode::OpenQueue => Self::leased(Connection::open_queue),
            Opcode::FreeQueue => Self::leased(Connection::free_queue),
            Opcode::ListQueues => Self::leased(Connection::list_queues),
            Opcode::Push => Self::leased(Connection::push),
            Opcode::PushHeads => Self::leased(Connection::push_heads),
            Opcode::Take => Self::leased(Connection::take),
            Opcode::Settle => Self::leased(Connection::settle),
            Opcode::AwaitBody => Self::leased(Connection::await_body),

            Opcode::Publish => Self::handled(Connection::publish),
            Opcode::Withdraw => Self::handled(Connection::withdraw),
            Opcode::Reach => Self::handled(Connection::reach),

            _ => Self::handled(Connection::no_request),
        }
    }
}

impl Connection {
    /// Answers received requests; the replies are sent with [`Connection::flush`]. Ends early where there are
    /// replies for other connections: they have waited longer.
    pub(crate) fn receive(&mut self, service: &mut Service, now: Instant) -> Result<Turn, End> {
        service.slice.begin();
        if self.sends && self.flush(&mut service.slice, now)? == Flush::Stopped {
            return Ok(Turn::More);
        }
        if self.work.is_some() {
            self.heard = now;
            self.resume(service);
        }
        let (mut frames, mut look_at) = (0, LOOK_AT_CLOCK_AFTER);
        while frames < FRAMES_A_TURN && service.posts.is_empty() && self.work.is_none() && !self.sends {
            if frames >= look_at {
                look_at = frames + LOOK_AT_CLOCK_AFTER;
                if service.slice.is_over() {
                    break;
                }
            }
            self.count_replies();
            if self.is_full(&service.shared) {
                return Ok(Turn::Full);
            }
            let Service { shared, slice, .. } = service;
            let membership = self.membership.as_ref();
            let received = self.link.receive_some(
                |frame| look_ahead(shared, membership, frame),
                BYTES_AT_ONCE,
                || !slice.is_over(),
            )?;
            match received {
                Received::Blocked if !self.link.has_stopped() => return Ok(Turn::Idle),
                Received::Blocked => {
                    self.heard = now;
                    return Ok(Turn::More);
                }
                Received::Head(header) => {
                    self.heard = now;
                    frames += self.take_request(service, header, now)?;
                }
                Received::Bulk(header) => {
                    self.heard = now;
                    self.work = self.arriving.take().map(|work| (header, work));
                    self.resume(service);
                }
            }
        }
        Ok(if self.waits() { Turn::Later } else { Turn::More })
    }

    /// Handles a request. Returns for how many frames it counts.
    fn take_request(&mut self, service: &mut Service, header: Header, now: Instant) -> Result<usize, End> {
        if header.is_reply() || header.status != Status::Ok {
            return Err(End::Protocol("a reply where a request was expected".to_owned()));
        }
        let most = service.shared.config.max_requests as usize;
        if self.link.queued_frames() + self.copies + self.waiting.len() > most {
            let said = "more requests outstanding than were granted";
            self.refuse(service, header, &Refused::new(Status::OverCredit, said));
            return Err(End::Protocol(said.to_owned()));
        }
        // They count from one.
        let entry = &TABLE[header.opcode as usize - 1];
        match self.request(service, header, entry) {
            Ok(()) => {}
            Err(Fail::Refused(refused)) => self.refuse(service, header, &refused),
            Err(Fail::End(end)) => {
                if let End::Protocol(_) = end {
                    // The client learns why, if it still reads.
                    self.refuse(service, header, &Refused::new(Status::BadRequest, &end));
                }
                return Err(end);
            }
        }
        if !entry.direct {
            return Ok(1);
        }
        let much = self.collected >= self.flush_collected_bytes() || self.link.queued_bytes() >= FLUSH_BYTES;
        if much {
            self.flush(&mut service.slice, now)?;
        }
        Ok(DIRECT_COUNTS_FOR)
    }

    fn request(&mut self, service: &mut Service, header: Header, entry: &Entry) -> Handled {
        if header.bulk_len > 0 && !entry.bulk {
            return Err(End::Protocol("pages where none belong".to_owned()).into());
        }
        if entry.leased && self.membership.is_none() {
            return self.sink(service, header, no_lease());
        }
        if entry.control {
            count_alone(&service.shared.shards[self.arena].counts.control, 1);
            if let Some(membership) = &self.membership {
                count(&membership.lease.counts.control, 1);
            }
        }
        (entry.handle)(self, service, header)
    }

    fn heartbeat(&mut self, _: &mut Service, header: Header) -> Handled {
        self.done(header, 0)
    }

    /// Drains for as long as there are members: no time ends that, and so no memory with pages in it.
    fn drain(&mut self, service: &mut Service, header: Header) -> Handled {
        if self.tenant.name.is_some() {
            let why = "only who has the master key may ask for that";
            return Err(Refused::new(Status::NotAllowed, why).into());
        }
        tracing::info!(peer = %self.link.peer(), "asked to drain");
        service.shared.start_draining(Duration::MAX);
        service.blocks.wake_all();
        self.done(header, 0)
    }

    fn no_request(&mut self, _: &mut Service, _: Header) -> Handled {
        Err(Refused::new(Status::BadRequest, "not a request of a client").into())
    }

    fn status(&mut self, service: &mut Service, header: Header) -> Handled {
        let mut status = crate::status::collect(&service.shared, &service.blocks, self.tenant.name);
        let json = loop {
            let json = serde_json::to_vec(&status).expect("numbers and strings");
            if json.len() <= MAX_BULK_BYTES {
                break json;
            }
            // More leases than fit one reply: the newest are left out.
            let keep = status.leases.len() / 2;
            status.leases.truncate(keep);
        };
        self.send_bytes(&mut service.head, header.reply(Status::Ok), &[], json);
        Ok(())
    }
}
