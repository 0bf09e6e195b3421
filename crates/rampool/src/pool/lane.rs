//! The way to one memory server: what waits to be sent, what waits for an answer, and where the bytes of an answer go.
//!
//! Requests wait in one queue per class and leave while credits last: demand first, then prefetch, then write-back. The two lower classes
//! never take the last credits nor more than a bulk window each, so that a demand request always finds room and never waits behind more than that
//! window of page data in either direction of the wire. Pages are sent from and received into the caller's memory, without a copy in between.
//!
//! Every request has a deadline: it ends when the server answers, or the lane is lost. A lane that is lost ends everything it had, once, and
//! never comes back.
//!
//! A broken connection is not a lost server yet: see `comeback`. What had no answer is asked again over the new connection, in the same order. That is
//! right because the server ignores what still arrives over the old one, answers a connection's stores and discards in the order in which they came, so that
//! whatever was made after an unanswered one is unanswered as well, and knows a request that made a region by its number.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rampool_proto::checksum;
use rampool_proto::placement::ServerIndex;
use rampool_proto::registration::keys::Key;
use rampool_proto::registration::path::Wish;
use rampool_proto::server::REMEMBERED;
use rampool_proto::session::{Credits, features};
use rampool_proto::units::{ByteLen, OS_PAGE_BYTES, PageIndex};
use rampool_proto::wire::{self, Block, Header, Opcode, PageEntry, Status};

use super::PoolEvent;
use super::comeback::{Came, Comeback, Place};
use super::direct::SENT_TOGETHER_BYTES;
use super::keyed::Keyring;
use super::request::{CLASSES, Class, Reply, Request, Work, lost};
use super::stats::LaneStats;
use crate::blocks::block_crcs;
use crate::error::{LostReason, Operation, PoolError};
use crate::transport::zero_copy::SharedZeroCopy;
use crate::transport::{Flush, Link, LinkError, Piece, PieceMut, Received, Urgency};

/// Bytes of page data that each of the two lower classes may have outstanding: what a demand request, or its answer, may have to wait behind. A window
/// each, because they travel in opposite directions: pages on their way out must not keep the way in idle.
const BULK_WINDOW_BYTES: u64 = 512 << 10;
/// Bytes handed to the link and not yet sent, above which the lower classes wait here: what is in the link was checksummed already.
const LINK_QUEUE_BYTES: usize = 128 << 10;
/// Page data taken in by one call before the caller hears of what is complete.
const FAIR_BYTES: usize = 1 << 20;
/// A server that answers nothing loses after one deadline; one that goes on sending, but never this answer, after this many.
const PATIENCE: u32 = 8;
/// A server that seems to have passed a deadline is listened to once more for this long: it may be this process that had no time to send or to look.
const LAST_CHANCE: Duration = Duration::from_secs(2);
/// Connections that break one after the other, without an answer in between, before the server counts as lost.
const MAX_BREAKS: u32 = 8;

/// Tells that a frame has left this process (or its link is gone): the pages of a store are not read any more.
pub(super) struct Departure {
    request: u64,
    departed: Rc<RefCell<Vec<u64>>>,
}

impl Drop for Departure {
    fn drop(&mut self) {
        self.departed.borrow_mut().push(self.request);
    }
}

pub(super) struct Lane {
    pub server: ServerIndex,
    pub name: String,
    /// Who this client is over there; zero until the lease is granted.
    pub member: wire::MemberId,
    link: Option<Link<Option<Departure>>>,
    /// While the connection is broken and the server not lost.
    comeback: Option<Box<Comeback>>,
    /// What it takes to come back; known once the lease is granted.
    place: Option<Box<Place>>,
    /// Connections that broke since the last answer.
    breaks: u32,
    /// Since when a deadline has been seen to be over.
    overdue: Option<Instant>,
    lost: Option<LostReason>,
    credits: Credits,
    max_requests: u32,
    max_bytes: u64,
    bulk_bytes: [u64; CLASSES],
    queues: [VecDeque<u32>; CLASSES],
    /// Numbers of sent requests, oldest first; some ended meanwhile.
    outstanding: VecDeque<(u64, Instant)>,
    op_deadline: Duration,
    heartbeat: Option<Duration>,
    last_sent: Instant,
    last_progress: Instant,
    /// Stores whose frame has left since the last look.
    departed: Rc<RefCell<Vec<u64>>>,
    // Scratch, kept for its capacity.
    head: Vec<u8>,
    pieces: Vec<Piece>,
    places: Vec<PieceMut>,
    out_entries: Vec<PageEntry>,
    // The answer that is arriving: its entries, and its compressed pages.
    entries: Vec<PageEntry>,
    packed: Vec<u8>,
    // Or its checksums; and the table of a scan's.
    crcs: Vec<u32>,
    scan_table: Vec<u8>,
    drained: bool,
    compressed: bool,
    /// A part of a page may be asked for without a layout.
    pub takes_pieces: bool,
    zero_copy: Option<ZeroCopyWish>,
    /// Memory that the server reaches by key.
    pub(super) keyring: Option<Box<Keyring>>,
    pub stats: LaneStats,
}

/// How large pieces leave: from how many bytes on it was measured to pay.
#[derive(Clone, Debug)]
pub(super) struct ZeroCopyWish {
    /// None where there is nobody to send that way, or the kernel cannot.
    pub engine: Option<SharedZeroCopy>,
    pub wish: Wish,
    pub measured: Option<u64>,
}

impl Lane {
    /// A lane that may send one request at a time until [`Lane::granted`] says more.
    pub fn new(server: ServerIndex, name: String, link: Link<Option<Departure>>, op_deadline: Duration, now: Instant) -> Self {
        let compressed = link.features() & features::LZ4 != 0;
        let takes_pieces = link.features() & features::PIECES != 0;
        Self {
            server,
            name,
            member: wire::MemberId(0),
            link: Some(link),
            comeback: None,
            place: None,
            breaks: 0,
            overdue: None,
            lost: None,
            credits: Credits::new(1, 0),
            max_requests: 1,
            max_bytes: 0,
            bulk_bytes: [0; CLASSES],
            queues: std::array::from_fn(|_| VecDeque::new()),
            outstanding: VecDeque::new(),
            op_deadline,
            heartbeat: None,
            last_sent: now,
            last_progress: now,
            departed: Rc::default(),
            head: Vec::new(),
            pieces: Vec::new(),
            places: Vec::new(),
            out_entries: Vec::new(),
            entries: Vec::new(),
            packed: Vec::new(),
            crcs: Vec::new(),
            scan_table: Vec::new(),
            drained: true,
            compressed,
            takes_pieces,
            zero_copy: None,
            keyring: None,
            stats: LaneStats::default(),
        }
    }

    /// What the server allows from now on; nothing may be outstanding.
    pub fn granted(&mut self, granted: &wire::Granted) {
        self.member = granted.member;
        // No more than the server remembers the answers to.
        self.max_requests = granted.max_requests.min(u32::try_from(REMEMBERED).expect("a few hundred"));
        self.max_bytes = u64::from(granted.max_bytes);
        self.credits = Credits::new(self.max_requests, granted.max_bytes);
        if granted.heartbeat_ms > 0 {
            // Half the interval: a beat that is late still is in time.
            self.heartbeat = Some(Duration::from_millis(u64::from(granted.heartbeat_ms.div_ceil(2))));
        }
    }

    /// Pages one request to this server may carry.
    pub fn max_pages(&self, limit: u32) -> u32 {
        let by_credit = u32::try_from(self.max_bytes / OS_PAGE_BYTES as u64).unwrap_or(u32::MAX);
        limit.min(by_credit).max(1)
    }

    /// From now on large pieces leave without a copy, over this connection and those that take its place. What they are read from stays as it is until the server has answered.
    pub fn send_without_copies(&mut self, zero_copy: ZeroCopyWish) {
        if let Some(link) = &mut self.link {
            link.send_without_copies(zero_copy.engine.as_ref(), zero_copy.wish, zero_copy.measured);
        }
        self.zero_copy = Some(zero_copy);
    }

    /// How long the server may leave a request unanswered.
    pub fn op_deadline(&self) -> Duration {
        self.op_deadline
    }

    pub fn link(&self) -> Option<&Link<Option<Departure>>> {
        self.link.as_ref()
    }

    /// From now on a broken connection is made again.
    pub fn may_come_back(&mut self, place: Place) {
        self.place = Some(Box::new(place));
    }

    /// From now on a broken connection stays so.
    pub fn stay_away(&mut self) {
        self.place = None;
    }

    /// What to sleep on, and whether for room to write as well. To be asked anew before each sleep.
    pub fn watched(&self) -> Option<(BorrowedFd<'_>, bool)> {
        match (&self.link, &self.comeback) {
            (Some(link), _) => Some(watched(link)),
            (None, Some(comeback)) => comeback.watched(),
            (None, None) => None,
        }
    }

    pub fn lost_reason(&self) -> Option<&LostReason> {
        self.lost.as_ref()
    }

    /// Queues a request; it leaves with the next [`Lane::send`]. On a lost lane it ends at once.
    pub fn enqueue(&mut self, work: &mut Work, slot: u32) {
        if let Some(reason) = &self.lost {
            let request = work.get(slot);
            let error = lost(&self.name, request.operation(), reason);
            let op = request.op;
            if let Some(op) = op {
                work.op_failed(op, error);
            }
            work.finish(slot);
            return;
        }
        let class = work.get(slot).class;
        self.queues[class as usize].push_back(slot);
    }

    /// Sends what credits and the socket take.
    #[inline]
    pub fn send(&mut self, work: &mut Work, now: Instant) {
        let nothing_queued = self.queues.iter().all(VecDeque::is_empty);
        if nothing_queued && self.link.as_ref().is_none_or(|link| link.queued_bytes() == 0) {
            return;
        }
        if let Err(reason) = self.try_send(work, now) {
            self.broke(work, reason, now);
        }
    }

    /// Takes in what has arrived.
    pub fn receive(&mut self, work: &mut Work, now: Instant) {
        if self.comeback.is_some() {
            self.come_back(work, now);
        }
        if let Err(reason) = self.try_receive(work, now) {
            self.broke(work, reason, now);
        }
    }

    /// Sends a heartbeat when one is due; gives the server up when a deadline has passed. Call after [`Lane::receive`].
    pub fn check_time(&mut self, work: &mut Work, now: Instant) {
        if self.link.is_none() {
            return;
        }
        while let Some((id, _)) = self.outstanding.front() {
            if work.find(*id).is_some() {
                break;
            }
            self.outstanding.pop_front();
        }
        // What has arrived and was not looked at yet may be the answer.
        if self.drained && self.oldest_due().is_some_and(|due| now >= due) {
            if now >= *self.overdue.get_or_insert(now) + self.last_chance() {
                self.lose(work, LostReason::Deadline(self.op_deadline));
                return;
            }
        } else {
            self.overdue = None;
        }
        if self.heartbeat.is_some_and(|every| now >= self.last_sent + every) && self.outstanding.is_empty() {
            let slot = work.request(self.server, Opcode::Heartbeat, Class::Demand, wire::RegionId(0), None, now);
            self.enqueue(work, slot);
            self.send(work, now);
        }
    }

    /// When [`Lane::check_time`] wants to be called next, or `now` when bytes are waiting that were read but not handled.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        if let Some(comeback) = &self.comeback {
            return Some(comeback.due());
        }
        self.link.as_ref()?;
        if !self.drained {
            return Some(now);
        }
        let beat = self.heartbeat.filter(|_| self.outstanding.is_empty()).map(|every| self.last_sent + every);
        let due = self.overdue.map(|seen| seen + self.last_chance()).or_else(|| self.oldest_due());
        [due, beat].into_iter().flatten().min()
    }

    fn last_chance(&self) -> Duration {
        LAST_CHANCE.min(self.op_deadline / 4)
    }

    /// Whether stores or discards are queued or unanswered.
    pub fn has_write_backs(&self, work: &mut Work) -> bool {
        let is_one = |id: u64, work: &mut Work| work.find(id).is_some_and(|slot| work.get(slot).class == Class::WriteBack);
        !self.queues[Class::WriteBack as usize].is_empty() || self.outstanding.iter().any(|(id, _)| is_one(*id, work))
    }

    /// Requests that are queued, and outstanding, and the bytes of pages of the latter.
    pub fn load(&self) -> (usize, u32, u64) {
        let (requests, bytes) = self.credits.outstanding();
        (self.queues.iter().map(VecDeque::len).sum(), requests, bytes)
    }

    /// Ends everything this lane had with `reason`. The second time, nothing happens.
    pub fn lose(&mut self, work: &mut Work, reason: LostReason) {
        if self.link.take().is_none() && self.comeback.take().is_none() {
            return;
        }
        self.lost = Some(reason.clone());
        // Before anybody hears of it and does something else with that memory.
        if let Some(keyring) = &mut self.keyring {
            keyring.line_ended();
        }
        let sent = std::mem::take(&mut self.outstanding).into_iter().filter_map(|(id, _)| work.find(id));
        let queued = self.queues.iter_mut().flat_map(std::mem::take);
        let slots: Vec<u32> = sent.chain(queued).collect();
        let operation = slots.first().map_or(Operation::Idle, |slot| work.get(*slot).operation());
        work.events.push_back(PoolEvent::Lost { server: self.server, name: self.name.clone(), operation, reason: reason.clone() });
        for slot in slots {
            let request = work.get(slot);
            let error = lost(&self.name, request.operation(), &reason);
            if let Some(op) = request.op {
                work.op_failed(op, error);
            }
            work.finish(slot);
        }
    }

    /// The connection is of no use any more: tries to come back, or gives the server up.
    fn broke(&mut self, work: &mut Work, reason: LostReason, now: Instant) {
        self.breaks += 1;
        let mut worth = matches!(reason, LostReason::Closed | LostReason::Io(_)) && self.breaks <= MAX_BREAKS;
        for (id, _) in &self.outstanding {
            let Some(slot) = work.find(*id) else { continue };
            let request = work.get(slot);
            // One request, however often repeated, does not wait for ever.
            worth &= now.saturating_duration_since(request.made_at) < self.op_deadline * PATIENCE;
        }
        let Some(place) = self.place.as_ref().filter(|_| worth && self.link.is_some()) else {
            return self.lose(work, reason);
        };
        let patience = place.grace.min(self.op_deadline);
        self.link = None;
        if let Some(keyring) = &mut self.keyring {
            keyring.line_ended();
        }
        // What never left with the broken link has not left.
        self.departed.borrow_mut().clear();
        for (id, _) in std::mem::take(&mut self.outstanding).into_iter().rev() {
            let Some(slot) = work.find(id) else { continue };
            let request = work.get(slot);
            request.sent = false;
            request.departed = false;
            let class = request.class as usize;
            if request.opcode == Opcode::Heartbeat {
                work.finish(slot);
            } else {
                self.queues[class].push_front(slot);
            }
        }
        self.comeback = Some(Box::new(Comeback::begin(reason, now, patience)));
        self.come_back(work, now);
    }

    fn come_back(&mut self, work: &mut Work, now: Instant) {
        let Some(comeback) = &mut self.comeback else { return };
        let Some(place) = &self.place else {
            let reason = comeback.reason.clone();
            return self.lose(work, reason);
        };
        match comeback.go_on(place, now) {
            Came::NotYet => {}
            Came::Lost(reason) => self.lose(work, reason),
            Came::Back(link, granted) => {
                self.stats.comebacks += 1;
                self.comeback = None;
                self.overdue = None;
                self.compressed = link.features() & features::LZ4 != 0;
                self.takes_pieces = link.features() & features::PIECES != 0;
                self.link = Some(*link);
                if let Some(zero_copy) = self.zero_copy.take() {
                    self.send_without_copies(zero_copy);
                }
                self.bulk_bytes = [0; CLASSES];
                self.granted(&granted);
                self.drained = true;
                (self.last_sent, self.last_progress) = (now, now);
                self.tell_all(work, now);
                self.send(work, now);
            }
        }
    }

    fn oldest_due(&self) -> Option<Instant> {
        let (_, sent) = self.outstanding.front()?;
        Some((*sent).max(self.last_progress).min(*sent + self.op_deadline * (PATIENCE - 1)) + self.op_deadline)
    }

    fn try_send(&mut self, work: &mut Work, now: Instant) -> Result<(), LostReason> {
        loop {
            while let Some(slot) = self.next_allowed(work) {
                self.hand_over(work, slot, now);
            }
            let Some(link) = &mut self.link else { return Ok(()) };
            let before = link.queued_bytes();
            if before == 0 {
                return Ok(());
            }
            let flushed = link.flush().map_err(link_lost)?;
            if link.queued_bytes() < before {
                self.last_progress = now;
            }
            if flushed == Flush::Blocked {
                return Ok(());
            }
        }
    }

    /// Takes the next request off the queues if its credits are there.
    fn next_allowed(&mut self, work: &mut Work) -> Option<u32> {
        let in_link = self.link.as_ref()?.queued_bytes();
        for class in 0..CLASSES {
            let Some(slot) = self.queues[class].front().copied() else { continue };
            let request = work.get(slot);
            let bytes = request.credit_bytes();
            if request.class == Class::Demand {
                let carries = matches!(request.opcode, Opcode::Scatter | Opcode::Accumulate);
                if carries && in_link >= SENT_TOGETHER_BYTES {
                    return None;
                }
                let changes = request.changes_bytes().then_some((request.region, request.offset, request.reach));
                if changes.is_some_and(|changes| self.is_being_read(work, changes)) {
                    return None;
                }
                if !self.credits.take(bytes) {
                    return None;
                }
            } else {
                let (requests, taken) = self.credits.outstanding();
                let (spare_requests, spare_bytes) = (self.max_requests / 8, self.max_bytes / 8);
                let first = requests == 0;
                let leaves_spare = requests + spare_requests < self.max_requests && taken + bytes + spare_bytes <= self.max_bytes;
                let in_window = self.bulk_bytes[class] == 0 || self.bulk_bytes[class] + bytes <= BULK_WINDOW_BYTES;
                let link_full = in_link >= LINK_QUEUE_BYTES;
                if leaves_spare && !in_window {
                    continue;
                }
                if link_full || !(first || leaves_spare) || !self.credits.take(bytes) {
                    return None;
                }
                self.bulk_bytes[class] += bytes;
            }
            self.queues[class].pop_front();
            return Some(slot);
        }
        None
    }

    /// Whether somebody still waits to read some of these bytes as they are: a connection that breaks has him ask again, and he would read what was written since.
    fn is_being_read(&self, work: &mut Work, (region, low, high): (wire::RegionId, u64, u64)) -> bool {
        self.outstanding.iter().any(|(id, _)| {
            work.find(*id).is_some_and(|slot| {
                let request = work.get(slot);
                request.reads_bytes() && request.region == region && request.offset < high && low < request.reach
            })
        })
    }

    /// Makes the frame of a request and gives it to the link.
    fn hand_over(&mut self, work: &mut Work, slot: u32, now: Instant) {
        let id = work.id(slot);
        let request = work.get(slot);
        request.sent = true;
        let header = Header { region: request.region.0, ..Header::request(request.opcode, id).with_arg(request.arg) };
        let mut departure = None;
        self.head.clear();
        self.pieces.clear();
        match request.opcode {
            Opcode::Get | Opcode::Discard => wire::encode_extents(&mut self.head, header, &request.extents),
            Opcode::Put => {
                self.out_entries.clear();
                for (extent, memory) in request.extents.iter().zip(&request.memory) {
                    for n in 0..extent.count as usize {
                        let page = memory.wrapping_add(n * OS_PAGE_BYTES);
                        // SAFETY: whoever called `Pool::store` promised that these pages are readable and do not change until the operation
                        // ends, and this request is one of its parts.
                        let entry = entry_of(unsafe { std::slice::from_raw_parts(page, OS_PAGE_BYTES) });
                        if !entry.is_zero() {
                            push_piece(&mut self.pieces, page);
                        }
                        self.out_entries.push(entry);
                    }
                }
                wire::encode_put(&mut self.head, header, &request.extents, &self.out_entries);
                departure = Some(Departure { request: id, departed: self.departed.clone() });
                self.stats.stored_pages += u64::from(request.pages);
            }
            Opcode::Gather => {
                request.table.clear();
                request.window.as_ref().expect("a gather has a window").encode(&mut request.table);
                let header = if self.by_key(work.get(slot)) { header.by_key() } else { header };
                wire::encode_frame(&mut self.head, header, &work.get(slot).table, 0);
            }
            Opcode::Scatter | Opcode::Accumulate => {
                // SAFETY: the places are memory of a put, readable and unchanged until its operation ends.
                unsafe { outgoing(request, &mut self.pieces, &mut self.crcs) };
                request.table.clear();
                request.window.as_ref().expect("a scatter has a window").encode_with(&self.crcs, &mut request.table);
                let by_key = self.by_key(work.get(slot));
                let request = work.get(slot);
                if by_key {
                    self.pieces.clear();
                    wire::encode_frame(&mut self.head, header.by_key(), &request.table, 0);
                } else {
                    wire::encode_frame(&mut self.head, header, &request.table, request.bytes as usize);
                }
                departure = Some(Departure { request: id, departed: self.departed.clone() });
            }
            Opcode::Expose => {
                request.table.clear();
                let place = u32::try_from(request.arg).expect("a place");
                let announced = self.keyring.as_mut().and_then(|keyring| keyring.announce(place, &mut request.table));
                // Without its memory the server refuses the key; what was withdrawn meanwhile has no key, and is refused as well.
                if let Some((generation, file)) = announced {
                    request.by_key = Some(Key { place, generation });
                    let handed = self.link.as_ref().is_some_and(|link| link.hand_over(file).is_ok_and(|handed| handed));
                    if !handed {
                        request.by_key = None;
                    }
                } else {
                    work.finish(slot);
                    self.credits.give_back(0);
                    return;
                }
                wire::encode_frame(&mut self.head, header, &request.table, 0);
            }
            _ => wire::encode_frame(&mut self.head, header, &request.table, 0),
        }
        let request = work.get(slot);
        let urgency = match request.class {
            Class::Demand => Urgency::Demand,
            Class::Prefetch => Urgency::Prefetch,
            Class::WriteBack => Urgency::WriteBack,
        };
        let link = self.link.as_mut().expect("requests are taken off the queues only while there is a link");
        // SAFETY: the pieces are pages of a store, readable until its operation ends; that is not before `departure` was dropped (`head` sees
        // to it), or the link was.
        unsafe { link.send(urgency, &self.head, &self.pieces, departure) };
        self.outstanding.push_back((id, now));
        self.last_sent = now;
        self.stats.requests += 1;
        self.stats.sent_bytes += (self.head.len() + self.pieces.iter().map(|p| p.len).sum::<usize>()) as u64;
    }

    fn try_receive(&mut self, work: &mut Work, now: Instant) -> Result<(), LostReason> {
        let mut taken = 0;
        loop {
            let Some(link) = &mut self.link else { return Ok(()) };
            match link.receive().map_err(link_lost)? {
                Received::Blocked => {
                    self.drained = true;
                    return Ok(());
                }
                Received::Head(header) => {
                    self.last_progress = now;
                    let bytes = header.frame_bytes();
                    taken += bytes;
                    self.stats.received_bytes += bytes as u64;
                    self.head_came(work, &header, now)?;
                }
                Received::Bulk(header) => {
                    self.last_progress = now;
                    let slot = work.find(header.request).expect("the request of an answer lives until its pages are here");
                    match header.opcode {
                        Opcode::Gather | Opcode::ReadPiece => self.bytes_came(work, slot, now),
                        Opcode::Scan => self.scan_came(work, slot, &header)?,
                        _ => self.pages_came(work, slot, now),
                    }
                }
            }
            // A head without its pages leaves the link waiting for them, whatever comes first.
            if taken >= FAIR_BYTES {
                self.drained = false;
                return Ok(());
            }
        }
    }

    /// A head with its table has arrived.
    fn head_came(&mut self, work: &mut Work, header: &Header, now: Instant) -> Result<(), LostReason> {
        if !header.is_reply() {
            if header.opcode == Opcode::Draining && header.bulk_len == 0 {
                let left = Duration::from_millis(header.arg);
                work.events.push_back(PoolEvent::Draining { server: self.server, name: self.name.clone(), left });
                return Ok(());
            }
            return Err(LostReason::Protocol(format!("the server asks for {:?}", header.opcode)));
        }
        let slot = work.find(header.request).filter(|slot| work.get(*slot).sent && work.get(*slot).server == self.server);
        let Some(slot) = slot else {
            return Err(LostReason::Protocol(format!("an answer ({:?}) to nothing that was asked", header.opcode)));
        };
        let request = work.get(slot);
        if request.opcode != header.opcode {
            return Err(LostReason::Protocol(format!("an answer to {:?}, asked was {:?}", header.opcode, request.opcode)));
        }
        let may_carry =
            header.status == Status::Ok && matches!(header.opcode, Opcode::Get | Opcode::Gather | Opcode::ReadPiece | Opcode::Scan);
        if header.bulk_len > 0 && !may_carry {
            return Err(LostReason::Protocol(format!("an answer to {:?} that carries pages", header.opcode)));
        }
        let link = self.link.as_mut().expect("a head came from it");
        if header.opcode == Opcode::Get && header.status == Status::Ok {
            wire::parse_get_reply(header, link.table(), request.pages as usize, self.compressed, &mut self.entries)?;
            if header.bulk_len == 0 {
                self.lay_out(work, slot);
                self.pages_came(work, slot, now);
                return Ok(());
            }
            self.lay_out(work, slot);
            let link = self.link.as_mut().expect("a head came from it");
            // SAFETY: the places are memory of a fetch, writable and nobody else's until its operation ends, which it does not before the bulk is in or
            // the link is dropped; or they are in `packed`, which is not touched meanwhile.
            unsafe { link.place(&self.places) };
            return Ok(());
        }
        if header.status == Status::StaleKey && request.by_key.is_some() && matches!(header.opcode, Opcode::Gather | Opcode::Scatter) {
            self.key_was_stale(work, slot, now);
            return Ok(());
        }
        if header.opcode == Opcode::Gather && header.status == Status::Ok {
            let request = work.get(slot);
            wire::parse_crcs(link.table(), request.blocks.len(), &mut self.crcs)?;
            if header.is_by_key() && request.by_key.is_some() && header.bulk_len == 0 {
                self.bytes_came(work, slot, now);
                return Ok(());
            }
            if header.bulk_len != request.bytes {
                return Err(LostReason::Wire(wire::WireError::BulkLength));
            }
            self.places.clear();
            if request.is_staged() {
                request.staging.resize(request.bytes as usize, 0);
                self.places.push(PieceMut { ptr: request.staging.as_mut_ptr(), len: request.staging.len() });
            } else {
                self.places.extend_from_slice(&request.places);
            }
            // SAFETY: the places are memory of a get, writable and nobody else's until its operation ends, which it does not before the bulk is in or the link
            // is dropped; or they are the request's staging, which is not touched meanwhile.
            unsafe { link.place(&self.places) };
            return Ok(());
        }
        if header.opcode == Opcode::ReadPiece && header.status == Status::Ok {
            let request = work.get(slot);
            if header.bulk_len != request.bytes || header.table_len > 0 {
                return Err(LostReason::Wire(wire::WireError::BulkLength));
            }
            self.crcs.clear();
            self.crcs.push(wire::parse_piece_crc(header)?);
            // SAFETY: the one place is memory of a get, writable and nobody else's until its operation ends, which it does not before the bulk is in or the link is
            // dropped.
            unsafe { link.place(&request.places) };
            return Ok(());
        }
        if header.opcode == Opcode::Scan && header.status == Status::Ok && header.bulk_len > 0 {
            let request = work.get(slot);
            if header.bulk_len > request.bytes {
                return Err(LostReason::Wire(wire::WireError::BulkLength));
            }
            self.scan_table.clear();
            self.scan_table.extend_from_slice(link.table());
            request.staging.resize(header.bulk_len as usize, 0);
            // SAFETY: the request's staging is not touched before the bulk is in or the link is dropped.
            unsafe { link.place(&[PieceMut { ptr: request.staging.as_mut_ptr(), len: request.staging.len() }]) };
            return Ok(());
        }
        let carried = matches!(header.opcode, Opcode::Put | Opcode::Scatter | Opcode::Accumulate);
        if carried && !self.has_departed(work, slot) {
            return Err(LostReason::Protocol("an answer to a store before all of it was sent".into()));
        }
        let link = self.link.as_ref().expect("a head came from it");
        let request = work.get(slot);
        if request.wanted && (header.status == Status::Ok || request.op.is_none()) {
            let reply = Reply {
                request: header.request,
                status: header.status,
                region: wire::RegionId(header.region),
                arg: header.arg,
                table: link.table().to_vec(),
                bulk: Vec::new(),
            };
            work.replies.push(reply);
        } else if header.status != Status::Ok {
            let message = wire::parse_message(link.table());
            self.refused(work, slot, header, &message)?;
        }
        if header.status == Status::Ok
            && let Some((keyring, key)) = self.keyring.as_mut().zip(work.get(slot).by_key)
        {
            match header.opcode {
                Opcode::Expose => keyring.confirmed(key),
                Opcode::Revoke => keyring.revoked(key),
                _ => {}
            }
        }
        self.end_request(work, slot);
        Ok(())
    }

    /// Whether all of a store's frame has left.
    fn has_departed(&mut self, work: &mut Work, slot: u32) -> bool {
        for id in self.departed.borrow_mut().drain(..) {
            if let Some(slot) = work.find(id) {
                work.get(slot).departed = true;
            }
        }
        work.get(slot).departed
    }

    /// Lays out where the pages of an answer go; zero pages are there at once.
    fn lay_out(&mut self, work: &mut Work, slot: u32) {
        self.places.clear();
        let request = work.get(slot);
        let packed_bytes: usize = self.entries.iter().map(|e| e.len as usize).filter(|len| *len < OS_PAGE_BYTES).sum();
        self.packed.resize(packed_bytes.max(self.packed.len()), 0);
        let packed = self.packed.as_mut_ptr();
        let mut packed_at = 0;
        let mut entries = self.entries.iter();
        for (extent, memory) in request.extents.iter().zip(&request.memory) {
            for n in 0..extent.count as usize {
                let entry = entries.next().expect("one entry per page");
                let page = memory.wrapping_add(n * OS_PAGE_BYTES);
                match entry.len as usize {
                    // SAFETY: the caller of `Pool::fetch` promised a page of writable memory here that is nobody else's until the operation ends.
                    0 => unsafe { page.write_bytes(0, OS_PAGE_BYTES) },
                    OS_PAGE_BYTES => push_place(&mut self.places, page),
                    len => {
                        self.places.push(PieceMut { ptr: packed.wrapping_add(packed_at), len });
                        packed_at += len;
                    }
                }
            }
        }
    }

    /// All pages of an answer are in their place: unpack, check, done; or ask once more for what came damaged.
    fn pages_came(&mut self, work: &mut Work, slot: u32, now: Instant) {
        let request = work.get(slot);
        let mut packed_at = 0;
        let mut damaged: Option<PageIndex> = None;
        let mut entries = self.entries.iter();
        for (extent, memory) in request.extents.iter().zip(&request.memory) {
            for n in 0..extent.count as usize {
                let entry = entries.next().expect("one entry per page");
                if entry.is_zero() {
                    continue;
                }
                let page = memory.wrapping_add(n * OS_PAGE_BYTES);
                // SAFETY: the caller of `Pool::fetch` promised a page of writable memory here that is nobody else's until the operation ends.
                let bytes = unsafe { std::slice::from_raw_parts_mut(page, OS_PAGE_BYTES) };
                let len = entry.len as usize;
                let mut whole = true;
                if len < OS_PAGE_BYTES {
                    let packed = &self.packed[packed_at..packed_at + len];
                    whole = lz4_flex::block::decompress_into(packed, bytes).is_ok_and(|n| n == OS_PAGE_BYTES);
                    packed_at += len;
                }
                if !whole || wire::page_crc(bytes) != entry.crc {
                    damaged = damaged.or(Some(extent.first.offset(n as u64)));
                }
            }
        }
        let (class, op, made_at, pages) = (request.class, request.op, request.made_at, request.pages);
        if let Some(page) = damaged {
            if self.came_damaged(work, slot) {
                return;
            }
            if let Some(op) = op {
                work.op_corrupt(op, self.server, &self.name, page);
            }
        } else {
            self.stats.fetched_pages += u64::from(pages);
            if class == Class::Demand {
                self.stats.latency.record(now.saturating_duration_since(made_at));
            }
        }
        self.end_request(work, slot);
    }

    /// All bytes of a gather are here: check them, and take them to their places.
    fn bytes_came(&mut self, work: &mut Work, slot: u32, now: Instant) {
        let request = work.get(slot);
        let staged = request.is_staged();
        // SAFETY: the places are memory of a get, writable and nobody else's until its operation ends.
        let whole = unsafe {
            if staged {
                let whole = are_whole(&request.blocks, &self.crcs, &[Piece { ptr: request.staging.as_ptr(), len: request.staging.len() }]);
                let mut at = request.staging.as_ptr();
                for place in &request.places {
                    copy(at, place.ptr, place.len);
                    at = at.add(place.len);
                }
                whole
            } else {
                self.pieces.clear();
                self.pieces.extend(request.places.iter().map(|place| Piece { ptr: place.ptr, len: place.len }));
                are_whole(&request.blocks, &self.crcs, &self.pieces)
            }
        };
        let (op, made_at, page) = (request.op, request.made_at, PageIndex(request.offset / OS_PAGE_BYTES as u64));
        if !whole {
            if self.came_damaged(work, slot) {
                return;
            }
            if let Some(op) = op {
                work.op_corrupt(op, self.server, &self.name, page);
            }
        } else {
            self.stats.latency.record(now.saturating_duration_since(made_at));
        }
        self.end_request(work, slot);
    }

    /// What a scan found is here.
    fn scan_came(&mut self, work: &mut Work, slot: u32, header: &Header) -> Result<(), LostReason> {
        let request = work.get(slot);
        if u64::from(checksum::crc32c(&request.staging)) != header.arg {
            if self.came_damaged(work, slot) {
                return Ok(());
            }
            return Err(LostReason::Protocol("what it found came damaged twice".into()));
        }
        let reply = Reply {
            request: header.request,
            status: header.status,
            region: wire::RegionId(header.region),
            arg: header.arg,
            table: self.scan_table.clone(),
            bulk: std::mem::take(&mut request.staging),
        };
        work.replies.push(reply);
        self.end_request(work, slot);
        Ok(())
    }

    /// What came is not what was stored. True if it was the first time: then it is asked for once more.
    fn came_damaged(&mut self, work: &mut Work, slot: u32) -> bool {
        self.stats.damaged += 1;
        let first = !work.get(slot).retried;
        if first {
            self.ask_again(work, slot);
        }
        first
    }

    /// Puts a request back to the front of its queue, under a new number: the answer to come is another one.
    pub(super) fn ask_again(&mut self, work: &mut Work, slot: u32) {
        let old = work.id(slot);
        self.give_back(work, slot);
        self.outstanding.retain(|(id, _)| *id != old);
        work.renumber(slot);
        let request = work.get(slot);
        request.retried = true;
        request.sent = false;
        self.queues[request.class as usize].push_front(slot);
    }

    /// The server answered no.
    fn refused(&mut self, work: &mut Work, slot: u32, header: &Header, message: &str) -> Result<(), LostReason> {
        match header.status {
            Status::MemberGone | Status::NoSuchLease => return Err(LostReason::GivenUp),
            Status::OverCredit => return Err(LostReason::Protocol("the server counts more requests than were sent".into())),
            _ => {}
        }
        let request = work.get(slot);
        let Some(op) = request.op else {
            // Nobody waits for it: a discard or heartbeat it would not do costs memory over there, not data here.
            self.stats.refused += 1;
            return Ok(());
        };
        let operation = request.operation();
        let copy_to = request.copy_to.take();
        match (header.status, copy_to) {
            (Status::PoolFull, Some((server, name))) => work.op_full(op, server, &name, ByteLen(header.arg)),
            (Status::PoolFull | Status::LimitReached, _) if is_store(header.opcode) => {
                work.op_full(op, self.server, &self.name, ByteLen(header.arg));
            }
            (status, _) => {
                let message = if message.is_empty() { format!("{status:?}") } else { message.to_owned() };
                work.op_failed(op, PoolError::Denied { server: self.name.clone(), operation, message });
            }
        }
        self.stats.refused += 1;
        Ok(())
    }

    fn end_request(&mut self, work: &mut Work, slot: u32) {
        self.breaks = 0;
        self.give_back(work, slot);
        if self.outstanding.front().is_some_and(|(id, _)| *id == work.id(slot)) {
            self.outstanding.pop_front();
        }
        work.finish(slot);
    }

    fn give_back(&mut self, work: &mut Work, slot: u32) {
        let request = work.get(slot);
        let bytes = request.credit_bytes();
        self.credits.give_back(bytes);
        if request.class != Class::Demand {
            self.bulk_bytes[request.class as usize] -= bytes;
        }
    }
}

/// What to sleep on for a link's sake, and whether for room to write as well.
pub(super) fn watched(link: &Link<Option<Departure>>) -> (BorrowedFd<'_>, bool) {
    // A socket that carries nothing but bells has room to write: who waits for that does not sleep.
    let stays_awake = !link.may_sleep(true);
    if stays_awake { (link.socket(), true) } else { (link.as_fd(), link.waits_for_room()) }
}

/// Whether a request takes room at its server.
fn is_store(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Put | Opcode::Scatter | Opcode::Accumulate | Opcode::FetchOp)
}

/// The pieces to send a window from, and its checksums.
///
/// # Safety
/// The request's places are readable memory that nobody changes.
unsafe fn outgoing(request: &mut Request, pieces: &mut Vec<Piece>, crcs: &mut Vec<u32>) {
    if request.is_staged() {
        if request.staging.is_empty() {
            request.staging.reserve_exact(request.bytes as usize);
            for place in &request.places {
                let end = request.staging.len();
                // SAFETY: the caller's promise; there is room for all places, and the length covers what was written.
                unsafe {
                    copy(place.ptr, request.staging.as_mut_ptr().add(end), place.len);
                    request.staging.set_len(end + place.len);
                }
            }
        }
        pieces.push(Piece { ptr: request.staging.as_ptr(), len: request.staging.len() });
    } else {
        pieces.extend(request.places.iter().map(|place| Piece { ptr: place.ptr, len: place.len }));
    }
    crcs.clear();
    // SAFETY: the caller's promise, or the request's own staging.
    unsafe { block_crcs(&request.blocks, pieces, |crc| crcs.push(crc)) };
}

/// Whether the bytes of all blocks have these checksums.
///
/// # Safety
/// The pieces are readable memory that nobody changes, as long as the blocks.
unsafe fn are_whole(blocks: &[Block], crcs: &[u32], pieces: &[Piece]) -> bool {
    let (mut crcs, mut whole) = (crcs.iter(), true);
    // SAFETY: the caller's promise.
    unsafe { block_crcs(blocks, pieces, |crc| whole &= crcs.next() == Some(&crc)) };
    whole
}

/// Copies without a call for the usual lengths.
///
/// # Safety
/// As `copy_nonoverlapping`.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match len {
            8 => to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned()),
            4 => to.cast::<u32>().write_unaligned(from.cast::<u32>().read_unaligned()),
            _ => std::ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

/// The table entry of a page to store.
fn entry_of(page: &[u8]) -> PageEntry {
    let crc = wire::page_crc(page);
    if crc == wire::ZERO_PAGE_CRC && page.iter().all(|b| *b == 0) {
        return PageEntry::ZERO;
    }
    const LEN: u32 = {
        assert!(OS_PAGE_BYTES <= u32::MAX as usize);
        #[allow(clippy::cast_possible_truncation)]
        let len = OS_PAGE_BYTES as u32;
        len
    };
    PageEntry { crc, len: LEN }
}

/// Adds a page to send, as part of the last piece where it follows that in memory.
fn push_piece(pieces: &mut Vec<Piece>, page: *const u8) {
    match pieces.last_mut() {
        Some(last) if last.ptr.wrapping_add(last.len) == page => last.len += OS_PAGE_BYTES,
        _ => pieces.push(Piece { ptr: page, len: OS_PAGE_BYTES }),
    }
}

/// Adds a page to receive, as part of the last piece where it follows that in memory.
fn push_place(places: &mut Vec<PieceMut>, page: *mut u8) {
    match places.last_mut() {
        Some(last) if last.ptr.wrapping_add(last.len) == page => last.len += OS_PAGE_BYTES,
        _ => places.push(PieceMut { ptr: page, len: OS_PAGE_BYTES }),
    }
}

fn link_lost(error: LinkError) -> LostReason {
    match error {
        LinkError::Closed => LostReason::Closed,
        LinkError::Wire(error) => LostReason::Wire(error),
        LinkError::Io(error) if error.kind() == std::io::ErrorKind::ConnectionReset => LostReason::Closed,
        LinkError::Io(error) => LostReason::Io(error.to_string()),
        other => LostReason::Protocol(other.to_string()),
    }
}
