//! What a connection does with its turn: takes requests, and sees to them.

use super::held::Held;
use super::leases::Ask;
use super::{
    BYTES_AT_ONCE, Connection, End, LOOK_AT_CLOCK_AFTER, NO_LEASE, Paused, Refused, ScratchBuffers, Turn,
    count, count_alone, no_lease,
};
use crate::shared::Shared;
use rampool_net::transport::{Flush, Piece, Received, Urgency};
use rampool_wire::frame::{
    Header, MAX_BULK_BYTES, MemberId, Opcode, OpenLease, RegionId, Status, encode_frame, parse_extents,
};
use std::time::Instant;

/// Frames answered before another connection has its turn.
const FRAMES_A_TURN: usize = 64;
/// A request of the direct view counts as so many frames: it may move a megabyte, and touch many pages.
const DIRECT_COUNTS_FOR: usize = 8;
/// Likewise for replies that are sent from where they lie: one call for several is faster than one for each.
const FLUSH_BYTES: usize = 1536 << 10;

impl Connection {
    /// Answers received requests; the replies are sent with [`Connection::flush`]. Ends early where the
    /// scratch buffers hold replies for other connections: they have waited longer.
    pub(crate) fn receive(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        now: Instant,
    ) -> Result<Turn, End> {
        buffers.slice.begin();
        if self.sends && self.flush(&mut buffers.slice, now)? == Flush::Stopped {
            return Ok(Turn::More);
        }
        if let Some(paused) = self.paused.take() {
            self.heard = now;
            self.resume(shared, buffers, paused);
        }
        let (mut frames, mut look_at) = (0, LOOK_AT_CLOCK_AFTER);
        while frames < FRAMES_A_TURN && buffers.posts.is_empty() && self.paused.is_none() {
            if frames >= look_at {
                look_at = frames + LOOK_AT_CLOCK_AFTER;
                if buffers.slice.is_over() {
                    break;
                }
            }
            self.count_replies();
            if self.is_full(shared) {
                return Ok(Turn::Full);
            }
            let membership = self.membership.as_ref();
            let received = self.link.receive_some(
                |frame| super::gather::look_ahead(shared, membership, frame),
                BYTES_AT_ONCE,
                || !buffers.slice.is_over(),
            )?;
            match received {
                Received::Blocked if self.link.has_stopped() => {
                    self.heard = now;
                    return Ok(Turn::More);
                }
                Received::Blocked => return Ok(Turn::Idle),
                Received::Head(header) => {
                    self.heard = now;
                    if header.is_reply() || header.status != Status::Ok {
                        return Err(End::Protocol("a reply where a request was expected".to_owned()));
                    }
                    if self.link.queued_frames() + self.copies + self.waiting.len()
                        > shared.config.max_requests as usize
                    {
                        self.refuse(
                            buffers,
                            header,
                            &Refused::new(Status::OverCredit, "more requests outstanding than were granted"),
                            shared,
                        );
                        return Err(End::Protocol("more requests outstanding than were granted".to_owned()));
                    }
                    let direct = is_direct(header.opcode);
                    frames += if direct || header.opcode == Opcode::Copy { DIRECT_COUNTS_FOR } else { 1 };
                    if header.opcode == Opcode::ReadPiece && !header.is_by_key() {
                        self.read_piece(shared, buffers, header)?;
                    } else {
                        self.request(shared, buffers, header, now)?;
                    }
                    if direct
                        && (self.collected >= self.flush_collected_bytes()
                            || self.link.queued_bytes() >= FLUSH_BYTES)
                        && self.flush(&mut buffers.slice, now)? == Flush::Stopped
                    {
                        break;
                    }
                }
                Received::Bulk(header) => {
                    self.heard = now;
                    if self.arriving.part.is_some() {
                        self.finish_part(shared, buffers, header);
                    } else {
                        self.finish_put(shared, buffers, header);
                    }
                }
            }
        }
        Ok(if matches!(self.paused, Some(Paused::Attach(_))) { Turn::Later } else { Turn::More })
    }

    pub(super) fn resume(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, paused: Paused) {
        match paused {
            Paused::Gather(gathering) => self.go_on_gathering(shared, buffers, *gathering, false),
            Paused::Scan(scanning) => self.go_on_scanning(shared, buffers, *scanning),
            Paused::Group(grouping) => self.go_on_grouping(shared, buffers, *grouping),
            Paused::Update(updating) => self.go_on_updating(shared, buffers, *updating),
            Paused::Get(getting) => self.go_on_getting(shared, buffers, *getting),
            Paused::Put(putting) => self.go_on_putting(shared, buffers, *putting),
            Paused::Clone(header) => self.go_on_cloning(shared, buffers, header),
            Paused::Free(header) => self.go_on_freeing(shared, buffers, header),
            Paused::Discard(header, extents) => self.go_on_discarding(shared, buffers, header, extents),
            Paused::Attach(attaching) => self.go_on_attaching(shared, buffers, attaching),
        }
    }

    pub(super) fn request(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        now: Instant,
    ) -> Result<(), End> {
        let counts = &shared.shards[self.arena].counts;
        if header.is_by_key() && !matches!(header.opcode, Opcode::Gather | Opcode::Scatter) {
            let error = End::Protocol("a key where none belongs".to_owned());
            return Err(self.protocol_error(shared, buffers, header, error));
        }
        if self.membership.is_none() && is_laborious(header.opcode) {
            return self.refuse_unread(shared, buffers, header);
        }
        match header.opcode {
            Opcode::Get => {
                let pages = parse_extents(&header, self.link.table(), &mut buffers.extents);
                match pages.map_err(End::from).and_then(|_| no_bulk(&header)) {
                    Ok(()) => self.get(shared, buffers, header),
                    Err(error) => return Err(self.protocol_error(shared, buffers, header, error)),
                }
            }
            Opcode::Put => return self.begin_put(shared, buffers, header),
            Opcode::Scatter | Opcode::Accumulate => return self.begin_part(shared, buffers, header),
            Opcode::Discard => {
                let pages = parse_extents(&header, self.link.table(), &mut buffers.extents);
                if let Err(error) = pages.map_err(End::from).and_then(|_| no_bulk(&header)) {
                    return Err(self.protocol_error(shared, buffers, header, error));
                }
                count(&counts.discards, 1);
                if let Some(membership) = &self.membership {
                    count(&membership.lease.counts.discards, 1);
                }
                let extents = std::mem::take(&mut buffers.extents);
                self.go_on_discarding(shared, buffers, header, extents);
            }
            _ => {
                if let Err(error) = no_bulk(&header) {
                    return Err(self.protocol_error(shared, buffers, header, error));
                }
                count_alone(&counts.control, 1);
                if let Some(membership) = &self.membership {
                    count(&membership.lease.counts.control, 1);
                }
                return match header.opcode {
                    Opcode::Gather => self.gather(shared, buffers, header),
                    Opcode::FetchOp => self.fetch_op(shared, buffers, header),
                    Opcode::Scan => self.scan(shared, buffers, header),
                    Opcode::Copy => self.copy(shared, buffers, header),
                    Opcode::Expose => self.expose(shared, buffers, header),
                    Opcode::Revoke => self.revoke(shared, buffers, header),
                    Opcode::Reach => self.reach(shared, buffers, header),
                    Opcode::OpenQueue
                    | Opcode::FreeQueue
                    | Opcode::ListQueues
                    | Opcode::ListRegions
                    | Opcode::Push
                    | Opcode::Take
                    | Opcode::Settle
                    | Opcode::AwaitBody
                    | Opcode::PushHeads => self.queue(shared, buffers, header, now),
                    _ => self.control(shared, buffers, header),
                };
            }
        }
        Ok(())
    }

    /// A connection without a lease is told so before any work on its request.
    pub(super) fn refuse_unread(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let carries = matches!(header.opcode, Opcode::Scatter | Opcode::Accumulate);
        if !carries && let Err(error) = no_bulk(&header) {
            return Err(self.protocol_error(shared, buffers, header, error));
        }
        if header.bulk_len == 0 {
            self.refuse(buffers, header, &no_lease(), shared);
            return Ok(());
        }
        self.arriving.refused = Some((Status::NotAllowed, 0, NO_LEASE.to_owned()));
        buffers.places.clear();
        buffers.lay_out_sink(header.bulk_len as usize);
        // SAFETY: the sink belongs to the shard, is never read, and outlives its connections.
        unsafe { self.link.place(&buffers.places) };
        Ok(())
    }

    pub(super) fn control(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let region = RegionId(header.region);
        let result = match header.opcode {
            Opcode::OpenLease => {
                match OpenLease::parse(self.link.table()) {
                    Ok(request) => self.ask(shared, buffers, header, Ask::Open(request), None),
                    Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
                }
                return Ok(());
            }
            Opcode::ResizeLease => {
                self.ask(shared, buffers, header, Ask::Resize(header.arg), None);
                return Ok(());
            }
            Opcode::AttachLease => {
                match self.attach(shared, header) {
                    Ok(Ok(attaching)) => self.go_on_attaching(shared, buffers, Box::new(attaching)),
                    Ok(Err(refused)) => self.refuse(buffers, header, &refused, shared),
                    Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
                }
                return Ok(());
            }
            Opcode::CreateRegion => self.membership().and_then(|membership| {
                let made = membership.space()?.make(0, |space| {
                    space.make_once(membership.member, header.request, |space| {
                        space.create_region(membership.member).map(Some)
                    })
                });
                Ok(made?.expect("it is made at once").0)
            }),
            Opcode::CloneRegion => {
                self.go_on_cloning(shared, buffers, header);
                return Ok(());
            }
            Opcode::AdoptRegion => self.membership().and_then(|membership| {
                Ok(membership.space()?.adopt_region(membership.member, region).map(|()| region.0)?)
            }),
            Opcode::OpenRegion => {
                let opened = self.open_region(header);
                match opened {
                    Ok((region, bytes)) => {
                        self.answer(shared, buffers, Header { region: region.0, ..header }, Ok(bytes))
                    }
                    Err(refused) => self.refuse(buffers, header, &refused, shared),
                }
                return Ok(());
            }
            Opcode::FreeRegion => {
                let freed = self
                    .membership()
                    .and_then(|membership| Ok(membership.space()?.free_region(membership.member, region)?));
                match freed {
                    Ok(()) => {
                        self.go_on_freeing(shared, buffers, header);
                        return Ok(());
                    }
                    Err(refused) => Err(refused),
                }
            }
            Opcode::Heartbeat => Ok(0),
            Opcode::Status => {
                self.send_status(shared, buffers, header);
                return Ok(());
            }
            // For another member of the lease, whose process is gone.
            Opcode::Goodbye
                if header.arg != 0
                    && self
                        .membership
                        .as_ref()
                        .is_none_or(|membership| membership.member.0 != header.arg) =>
            {
                self.membership().map(|membership| {
                    let departed = shared.directory().leave(membership.lease.id, MemberId(header.arg));
                    if let Some(departed) = departed {
                        tracing::debug!(lease = membership.lease.id.0, member = header.arg, "dismissed");
                        shared.depart(departed);
                    }
                    0
                })
            }
            Opcode::Goodbye => {
                if let Some(membership) = self.membership.take() {
                    membership.lease.disconnected(membership.member, membership.connection);
                    let mut directory = shared.directory();
                    let current =
                        directory.is_current(membership.lease.id, membership.member, membership.connection);
                    let departed =
                        if current { directory.leave(membership.lease.id, membership.member) } else { None };
                    drop(directory);
                    if let Some(departed) = departed {
                        shared.depart(departed);
                    }
                }
                self.answer(shared, buffers, header, Ok(0));
                return Err(End::Goodbye);
            }
            _ => Err(Refused::new(Status::BadRequest, "not a request of a client")),
        };
        // The reply's region names the new one.
        let reply = match (&result, header.opcode) {
            (Ok(new), Opcode::CreateRegion) => Header { region: *new, ..header },
            _ => header,
        };
        self.answer(shared, buffers, reply, result.map(|_| 0));
        Ok(())
    }

    pub(super) fn send_status(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header) {
        let mut status = crate::status::collect(shared, self.tenant.name);
        let json = loop {
            let json = serde_json::to_vec(&status).expect("numbers and strings");
            if json.len() <= MAX_BULK_BYTES {
                break json;
            }
            // More leases than fit one reply: the newest are left out.
            let keep = status.leases.len() / 2;
            status.leases.truncate(keep);
        };
        buffers.head.clear();
        encode_frame(&mut buffers.head, header.reply(Status::Ok), &[], json.len());
        let piece = [Piece { ptr: json.as_ptr(), len: json.len() }];
        // SAFETY: the guard owns the bytes, whose address does not change with the move of the vector.
        unsafe { self.link.send(Urgency::Demand, &buffers.head, &piece, Held::bytes(json)) };
    }
}

pub(super) fn is_direct(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Gather | Opcode::ReadPiece | Opcode::Scatter | Opcode::Accumulate | Opcode::Scan)
}

/// Whether a request's table takes more work than reading a few numbers.
pub(super) fn is_laborious(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::Gather
            | Opcode::Scatter
            | Opcode::Accumulate
            | Opcode::Scan
            | Opcode::Copy
            | Opcode::PushHeads
    )
}

pub(super) fn no_bulk(header: &Header) -> Result<(), End> {
    if header.bulk_len == 0 { Ok(()) } else { Err(End::Protocol("pages where none belong".to_owned())) }
}
