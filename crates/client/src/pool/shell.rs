//! The shell around the client's sessions: carries bytes between the session machine and the
//! links, and decides nothing.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rampool_net::transport::{Flush, Received};
use rampool_paging::placement::ServerIndex;
use rampool_session::{
    Ask, Break, Class, Client, Failed, Grant, Input, LinkId, Lost, OpId, Outcome, Output, PIECE_PAGES,
    PIECES, RequestId, Stamp, Time, What,
};
use rampool_wire::frame::{Opcode, RegionId, Status, parse_message};
use rampool_wire::units::{ByteLen, Extent, OS_PAGE_BYTES};

use super::body::{Body, Reply, lost, operation};
use super::in_place::InPlace;
use super::reconnect::{Attempt, Place, Reached, Trouble};
use super::server::{Placed, Server, link_lost};
use super::{PoolEvent, PoolRegion};
use crate::error::{LostReason, Operation, PoolError};

/// Page data taken in by one call before the caller hears of what is complete.
const FAIR_BYTES: usize = 1 << 20;

pub(super) struct Shell {
    pub client: Client,
    pub servers: Vec<Server>,
    bodies: Vec<Body>,
    pub events: VecDeque<PoolEvent>,
    replies: Vec<Reply>,
    pub in_place: InPlace,
    /// What pieces bring to a server that has missed it. An order to receive or send is over
    /// before the next one begins.
    pieces: Vec<Box<[u8]>>,
    /// A server has all of its pages again, since that was looked at.
    pub caught_up: bool,
    /// Servers that were joined late or anew, since that was looked at.
    pub joined: Vec<ServerIndex>,
    /// What servers said about operations that they refuse.
    messages: BTreeMap<OpId, String>,
    epoch: Instant,
}

impl Shell {
    pub fn new(now: Instant) -> Self {
        Self {
            client: Client::new(),
            servers: Vec::new(),
            bodies: Vec::new(),
            events: VecDeque::new(),
            replies: Vec::new(),
            in_place: InPlace::default(),
            pieces: Vec::new(),
            caught_up: false,
            joined: Vec::new(),
            messages: BTreeMap::new(),
            epoch: now,
        }
    }

    #[inline]
    pub fn time(&self, now: Instant) -> Time {
        let since = now.saturating_duration_since(self.epoch);
        Time(since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos()))
    }

    #[inline]
    fn tell(&mut self, now: Instant, input: Input) {
        let now = self.time(now);
        self.client.handle(now, input);
    }

    /// Says something about a server of which the machine hears at once.
    pub fn hear(&mut self, now: Instant, input: Input) {
        self.tell(now, input);
        self.pump(now);
    }

    // --- Submitting ----------------------------------------------------------------------------------------

    pub fn begin(&mut self, token: u64, store: bool) -> OpId {
        self.client.begin(token, store)
    }

    /// A place for a request, and its empty body.
    pub fn reserve(&mut self) -> (RequestId, &mut Body) {
        let id = self.client.reserve();
        (id, fresh(&mut self.bodies, id))
    }

    /// The client's machine and the bodies, to fill these while it cuts pages up.
    pub fn parts(&mut self) -> (&mut Client, &mut Vec<Body>, &mut InPlace) {
        (&mut self.client, &mut self.bodies, &mut self.in_place)
    }

    /// What the answers to a request for pages, or to a store, are noted under; `None`: there is no
    /// server whose memory can be read.
    pub fn stamp(&mut self, region: PoolRegion, opcode: Opcode) -> Option<(PoolRegion, Stamp)> {
        let any = self.servers.iter().any(|server| server.frames.is_some());
        any.then(|| (region, self.in_place.stamp(opcode == Opcode::Put)))
    }

    /// Copies all these pages out of the servers' memory. False: they have to be asked for.
    ///
    /// # Safety
    /// As [`super::Pool::fetch`].
    pub unsafe fn read_in_place(&mut self, region: PoolRegion, extents: &[Extent], dst: *mut u8) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.in_place.read(&mut self.servers, region, extents, dst) }
    }

    pub fn submit(&mut self, id: RequestId, ask: Ask, now: Instant) {
        self.tell(now, Input::Submit(id, ask));
    }

    pub fn sealed(&mut self, op: OpId, now: Instant) {
        self.tell(now, Input::Sealed(op));
    }

    /// A request whose body is its argument and table; its number.
    pub fn control(&mut self, ask: Ask, arg: u64, table: &[u8], now: Instant) -> u64 {
        let (id, body) = self.reserve();
        body.arg = arg;
        body.table.extend_from_slice(table);
        let number = self.client.number(id);
        self.submit(id, ask, now);
        number
    }

    /// The reply to the request of this number, once it is there.
    pub fn take_reply(&mut self, number: u64) -> Option<Reply> {
        let at = self.replies.iter().position(|reply| reply.request == number)?;
        Some(self.replies.swap_remove(at))
    }

    // --- Carrying ------------------------------------------------------------------------------------------

    /// Takes in what has come, sends what may leave, and tells the time.
    pub fn step(&mut self, now: Instant) {
        for index in 0..self.servers.len() {
            self.receive(index, now);
        }
        self.tell(now, Input::Time);
        self.send(now);
    }

    /// Sends what credits and sockets take.
    pub fn send(&mut self, now: Instant) {
        self.pump(now);
        for index in 0..self.servers.len() {
            self.flush(index, now);
        }
    }

    fn flush(&mut self, index: usize, now: Instant) {
        loop {
            let server = &mut self.servers[index];
            let id = server.id();
            let Some(link) = &mut server.link else { return };
            if link.queued_bytes() == 0 {
                return;
            }
            let flushed = match link.flush() {
                Ok(flushed) => flushed,
                Err(error) => return self.down(index, link_lost(error), now),
            };
            let waiting = link.queued_bytes();
            self.tell(now, Input::Written { link: id, waiting });
            self.pump(now);
            if flushed == Flush::Blocked {
                return;
            }
        }
    }

    /// Carries out what the machine orders.
    fn pump(&mut self, now: Instant) {
        while let Some(output) = self.client.poll() {
            self.carry_out(output, now);
        }
    }

    fn carry_out(&mut self, output: Output, now: Instant) {
        match output {
            Output::Send { link, request, number } => self.hand_over(link, request, number, now),
            Output::Receive { link, request } => {
                self.servers[link.server.as_usize()].receiving = Some(request)
            }
            Output::Answered { link, request, number, wanted, refused } => {
                self.answered(link, request, number, wanted, refused);
            }
            Output::Connect { link } => self.connect(link, now),
            Output::Attach { link } => {
                let server = &mut self.servers[link.server.as_usize()];
                if let (Some(attempt), Some(place)) = (&mut server.attempt, &server.place) {
                    attempt.attach(place);
                }
            }
            Output::Close { link } => self.servers[link.server.as_usize()].close(),
            Output::Back { link } => {
                self.servers[link.server.as_usize()].back(link);
                self.publish_again(link.server, now);
            }
            Output::Lost { server, during, reason, spare } => self.lost(server, during, reason, spare),
            Output::Moved { from, .. } => self.servers[from.as_usize()].stats.moved += 1,
            Output::Piece { request, piece, pages } => self.make_piece(request, piece, pages),
            Output::Absent { server, during, reason } => self.absent(server, during, reason),
            Output::Returned { server } => {
                let of = &mut self.servers[server.as_usize()];
                (of.is_away, of.is_renewed) = (false, false);
                if let (Some(place), Some(granted)) = (&mut of.place, &of.granted) {
                    place.ask.granted(granted);
                    self.joined.push(server);
                }
                let (name, missed_pages) = (of.name.clone(), self.client.missed_pages(server).0);
                self.events.push_back(PoolEvent::Returned { server, name, missed_pages });
            }
            Output::CaughtUp { server } => {
                self.caught_up = true;
                let name = self.servers[server.as_usize()].name.clone();
                self.events.push_back(PoolEvent::CaughtUp { server, name });
            }
            Output::Drop { link } => self.servers[link.server.as_usize()].drop_bytes(),
            Output::Holds { server, out } => {
                let name = self.servers[server.as_usize()].name.clone();
                self.events.push_back(PoolEvent::Holds { server, name, out });
            }
            Output::Draining { server, left_ms } => {
                let name = self.servers[server.as_usize()].name.clone();
                self.events.push_back(PoolEvent::Draining {
                    server,
                    name,
                    left: Duration::from_millis(left_ms),
                });
            }
            Output::Ended { op, token, store, outcome } => self.ended(op, token, store, outcome),
        }
    }

    fn hand_over(&mut self, link: LinkId, request: RequestId, number: u64, now: Instant) {
        let of = *self.client.request(request);
        // A heartbeat is the machine's own and has no body yet.
        let body = match of.ask.opcode {
            Opcode::Heartbeat => fresh(&mut self.bodies, request),
            _ => &mut self.bodies[request.0 as usize],
        };
        let server = &mut self.servers[link.server.as_usize()];
        let waiting = server.hand_over(&of, body, number);
        self.tell(now, Input::Queued { link, waiting });
    }

    fn receive(&mut self, index: usize, now: Instant) {
        if self.servers[index].attempt.is_some() {
            self.go_on(index, now);
        }
        let mut taken = 0;
        loop {
            let server = &mut self.servers[index];
            let id = server.id();
            let Some(link) = &mut server.link else { return };
            match link.receive() {
                Err(error) => return self.down(index, link_lost(error), now),
                Ok(Received::Blocked) => {
                    if !std::mem::replace(&mut server.drained, true) {
                        self.tell(now, Input::Drained { link: id, all: true });
                    }
                    return;
                }
                Ok(Received::Head(header)) => {
                    taken += header.frame_bytes();
                    server.stats.received_bytes += header.frame_bytes() as u64;
                    server.head = Some(header);
                    if matches!(header.opcode, Opcode::Put | Opcode::Scatter | Opcode::Accumulate) {
                        let departed = server.departed.clone();
                        for number in departed.borrow_mut().drain(..) {
                            self.tell(now, Input::Departed { number });
                        }
                    }
                    self.hear(now, Input::Head { link: id, header });
                    let server = &mut self.servers[index];
                    if let Some(request) = server.receiving {
                        match server.place(&mut self.bodies[request.0 as usize], &header) {
                            Ok(Placed::Coming) => {}
                            Ok(Placed::Here) => self.body_came(index, now),
                            Err(reason) => return self.down(index, reason, now),
                        }
                    }
                }
                Ok(Received::Bulk(_)) if std::mem::take(&mut server.dropping) => {}
                Ok(Received::Bulk(_)) => self.body_came(index, now),
            }
            // A head without its pages leaves the link waiting for them, whatever comes first.
            if taken >= FAIR_BYTES {
                self.servers[index].drained = false;
                self.tell(now, Input::Drained { link: id, all: false });
                return;
            }
        }
    }

    /// All bytes of an answer are in their places.
    fn body_came(&mut self, index: usize, now: Instant) {
        let server = &mut self.servers[index];
        let (link, request) =
            (server.id(), server.receiving.take().expect("an answer with bytes was announced"));
        let of = self.client.request(request);
        let waited = self.time(now) - of.made_at;
        let damaged = self.servers[index].check(of, &mut self.bodies[request.0 as usize]);
        if damaged.is_none() {
            self.in_place.fetched(&self.servers[index], &self.bodies[request.0 as usize]);
            let of = self.client.request(request);
            let (demand, pages) = (of.ask.class == Class::Demand, self.bodies[request.0 as usize].pages());
            let stats = &mut self.servers[index].stats;
            stats.fetched_pages += u64::from(pages);
            if demand && of.ask.opcode != Opcode::Scan {
                stats.latency.record(waited);
            }
        }
        self.hear(now, Input::Body { link, request, damaged });
    }

    fn answered(&mut self, link: LinkId, request: RequestId, number: u64, wanted: bool, refused: bool) {
        let server = &mut self.servers[link.server.as_usize()];
        let header = server.head.expect("a head was told of");
        if header.opcode == Opcode::Put && header.status == Status::Ok {
            return self.in_place.stored(server, &self.bodies[request.0 as usize]);
        }
        let body = &mut self.bodies[request.0 as usize];
        let of = self.client.request(request);
        if wanted {
            let (table, bulk) = server.take_reply(&header, body);
            let region = RegionId(header.region);
            self.replies.push(Reply {
                request: number,
                status: header.status,
                region,
                arg: header.arg,
                table,
                bulk,
            });
        } else if refused && let Some(op) = of.ask.op {
            let message = parse_message(server.table());
            let message = if message.is_empty() { format!("{:?}", header.status) } else { message };
            self.messages.insert(op, message);
        }
    }

    fn ended(&mut self, op: OpId, token: u64, store: bool, outcome: Outcome) {
        let message = self.messages.remove(&op);
        let name = |server: ServerIndex| self.servers[server.as_usize()].name.clone();
        self.events.push_back(match outcome {
            Outcome::Done if store => PoolEvent::Stored { token },
            Outcome::Done => PoolEvent::Fetched { token },
            Outcome::Full { server, free } => {
                PoolEvent::Full { token, server, name: name(server), free: ByteLen(free) }
            }
            Outcome::Corrupt { server, page } => {
                PoolEvent::Corrupt { token, server, name: name(server), page }
            }
            Outcome::Denied { server, what, status } => {
                let message = message.unwrap_or_else(|| format!("{status:?}"));
                let error = PoolError::Denied { server: name(server), operation: operation(what), message };
                PoolEvent::Failed { token, error }
            }
            Outcome::Lost { server, what, reason } => {
                let server = &self.servers[server.as_usize()];
                let error = lost(&server.name, operation(what), &server.reason(reason));
                PoolEvent::Failed { token, error }
            }
        });
    }

    // --- Losing and finding again --------------------------------------------------------------------------

    /// The connection is of no use any more.
    fn down(&mut self, index: usize, reason: LostReason, now: Instant) {
        let server = &mut self.servers[index];
        let why = if matches!(reason, LostReason::Closed | LostReason::Io(_)) {
            Break::MayPass
        } else {
            Break::Final
        };
        let link = server.id();
        server.why = Some(reason);
        self.hear(now, Input::Down { link, why });
    }

    fn connect(&mut self, link: LinkId, now: Instant) {
        let server = &mut self.servers[link.server.as_usize()];
        let Some(place) = &server.place else {
            return self.tell(now, Input::Failed { link, why: Failed::ForGood });
        };
        match Attempt::begin(link, place) {
            Ok(attempt) => {
                server.attempt = Some(attempt);
                self.go_on(link.server.as_usize(), now);
            }
            Err(trouble) => self.failed(link, trouble, now),
        }
    }

    /// Takes an attempt as far as it goes.
    fn go_on(&mut self, index: usize, now: Instant) {
        loop {
            let server = &mut self.servers[index];
            let (Some(attempt), Some(place)) = (&mut server.attempt, &server.place) else { return };
            let link = attempt.link;
            match attempt.go_on(place) {
                Ok(Reached::NotYet) => return,
                Ok(Reached::Connected) => self.hear(now, Input::Connected { link }),
                Ok(Reached::Answer(header, granted)) => {
                    let grant = granted.as_ref().map(Grant::from);
                    server.granted = granted;
                    let drains = attempt.drains;
                    server.free_bytes = (header.status == Status::LeaseRefused).then_some(header.arg);
                    self.hear(now, Input::Attached { link, header, grant });
                    if let Some(header) = drains {
                        self.hear(now, Input::Head { link, header });
                    }
                    return;
                }
                Err(trouble) => return self.failed(link, trouble, now),
            }
        }
    }

    fn failed(&mut self, link: LinkId, trouble: Trouble, now: Instant) {
        let server = &mut self.servers[link.server.as_usize()];
        server.attempt = None;
        let why = match trouble {
            Trouble::MayPass => Failed::MayPass,
            Trouble::ForGood(better) => {
                server.why = better.or(server.why.take());
                Failed::ForGood
            }
        };
        self.hear(now, Input::Failed { link, why });
    }

    /// The body of a request that copies pages to a server that has missed them.
    fn make_piece(&mut self, request: RequestId, piece: u8, pages: Extent) {
        let body = fresh(&mut self.bodies, request);
        if pages.count > 0 {
            let bytes = PIECE_PAGES as usize * OS_PAGE_BYTES;
            self.pieces.resize_with(PIECES, || vec![0; bytes].into_boxed_slice());
            body.extents.push(pages);
            body.memory.push(self.pieces[usize::from(piece)].as_mut_ptr());
        }
    }

    fn absent(&mut self, server: ServerIndex, during: Option<What>, reason: Lost) {
        let of = &mut self.servers[server.as_usize()];
        let reason = of.reason(reason);
        of.is_away = true;
        let operation = during.map_or(Operation::Idle, operation);
        let name = of.name.clone();
        self.events.push_back(PoolEvent::Absent { server, name, operation, reason });
    }

    fn lost(&mut self, server: ServerIndex, during: Option<What>, reason: Lost, spare: bool) {
        let of = &mut self.servers[server.as_usize()];
        let reason = of.reason(reason);
        of.lost = Some(reason.clone());
        of.is_away = false;
        if std::mem::take(&mut of.is_renewed) {
            // It is known to be lost.
            return;
        }
        let operation = during.map_or(Operation::Idle, operation);
        let name = of.name.clone();
        self.events.push_back(if reason == LostReason::Drained {
            PoolEvent::Drained { server, name }
        } else if spare {
            PoolEvent::Degraded { server, name, operation, reason }
        } else {
            PoolEvent::Lost { server, name, operation, reason }
        });
    }

    /// A lost server is joined anew, where and how `place` says.
    pub fn renew(&mut self, index: usize, place: Place, now: Instant) {
        let of = &mut self.servers[index];
        of.place = Some(Box::new(place));
        (of.lost, of.is_away, of.is_renewed) = (None, true, true);
        let server = of.index;
        // Where pages lay there, others lie.
        self.in_place.lost(server);
        self.hear(now, Input::Renew { server });
    }

    /// Gives every server up: everything under way ends.
    pub fn give_up(&mut self, reason: &LostReason, now: Instant) {
        for index in 0..self.servers.len() {
            let server = &mut self.servers[index];
            if server.lost.is_none() {
                server.why = Some(reason.clone());
                let server = server.index;
                self.hear(now, Input::Lose { server });
            }
        }
    }

    /// When [`Shell::step`] is due at the latest; perhaps in the past.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.client.poll_timeout().map(|due| self.epoch + Duration::from_nanos(due.0))
    }
}

/// The body of a new request.
pub(super) fn fresh(bodies: &mut Vec<Body>, id: RequestId) -> &mut Body {
    let slot = id.0 as usize;
    if slot >= bodies.len() {
        bodies.resize_with(slot + 1, Body::default);
    }
    bodies[slot].clear();
    &mut bodies[slot]
}
