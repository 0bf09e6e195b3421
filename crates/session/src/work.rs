//! What is under way: *operations* (what the caller asked for, with its token) and the *requests* (one frame
//! to one server) that each was cut into.
//!
//! Both live in slots that are used again, so nothing is allocated once the tables are large enough. A
//! request's number on the wire is its slot and a generation: an answer to a request that ended earlier
//! is not taken for another's.

use std::collections::VecDeque;

use rampool_paging::placement::ServerIndex;
use rampool_wire::frame::{Opcode, RegionId, Status};
use rampool_wire::units::{Extent, PageIndex};

use crate::io::{Ask, Class, Lost, OpId, Outcome, Output, RequestId, Time, What};
use crate::pace::Pace;
use crate::rule::{Rule, Rules};

/// One request, without its body.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    generation: u32,
    phase: Phase,
    pub ask: Ask,
    pub made_at: Time,
    /// Its bytes came damaged once, or its key was not known, and it was asked again.
    pub asked_again: bool,
    /// The bytes that another holder has of it are damaged.
    pub(crate) is_odd: bool,
    /// It took long, and turned to another server.
    pub(crate) turned: bool,
    /// All of its frame has left.
    pub(crate) departed: bool,
    /// How often pages had got other holders when it was made.
    pub(crate) turn: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
pub(crate) enum Phase {
    Free,
    /// The shell makes its body.
    Reserved,
    Queued,
    Sent,
    /// Its answer has come, and the bytes that follow it are coming.
    Receiving,
}

impl Request {
    #[must_use]
    pub fn what(&self) -> What {
        What { opcode: self.ask.opcode, at: self.ask.at }
    }

    /// Whether a thread waits for it, and another server can be asked.
    pub(crate) fn is_paired_read(&self) -> bool {
        let Ask { opcode, class, other, piece, .. } = self.ask;
        (opcode, class, piece) == (Opcode::Get, Class::Demand, None) && other.is_some()
    }

    /// Whether it reads bytes of the direct view.
    pub(crate) fn reads_bytes(&self) -> bool {
        matches!(self.ask.opcode, Opcode::Gather | Opcode::ReadPiece | Opcode::Scan)
    }

    /// Whether it changes bytes of the direct view.
    pub(crate) fn changes_bytes(&self) -> bool {
        matches!(self.ask.opcode, Opcode::Scatter | Opcode::Accumulate | Opcode::FetchOp)
    }

    /// Whether its frame carries bytes of the caller's memory.
    pub(crate) fn carries(&self) -> bool {
        matches!(self.ask.opcode, Opcode::Put | Opcode::Scatter | Opcode::Accumulate)
    }

    /// Whether it takes room at its server.
    pub(crate) fn is_store(&self) -> bool {
        matches!(self.ask.opcode, Opcode::Put | Opcode::Scatter | Opcode::Accumulate | Opcode::FetchOp)
    }

    /// Whether it makes a region.
    pub(crate) fn makes_region(&self) -> bool {
        matches!(self.ask.opcode, Opcode::CreateRegion | Opcode::CloneRegion)
    }
}

/// What the caller asked for under one token.
#[derive(Debug)]
struct Op {
    token: u64,
    store: bool,
    parts: u32,
    outcome: Outcome,
}

/// Everything under way.
///
/// Invariant: a live operation's `parts` is the number of live requests that name it, plus one
/// until it is sealed.
#[derive(Debug, Default)]
pub(crate) struct Work {
    requests: Vec<Request>,
    free_requests: Vec<u32>,
    ops: Vec<Op>,
    free_ops: Vec<u32>,
    pub outputs: VecDeque<Output>,
    /// Requests that got no use of their server, for the client to decide about.
    pub orphans: VecDeque<(RequestId, Orphaned)>,
    /// Steps of pieces that ended: which piece, and the server's name for what was made; none:
    /// it came to nothing.
    pub steps: VecDeque<(u8, Option<RegionId>)>,
    /// Changes that a server behind has acknowledged: of which region, and which pages.
    pub repairs: Vec<(ServerIndex, u32, Vec<Extent>)>,
    /// The pages of each request, where another server holds them as well.
    pub pages: Vec<Vec<Extent>>,
    /// A server was lost, or is absent or back, since that was looked at.
    pub changed: bool,
    /// A server is well again since that was looked at.
    pub well_again: bool,
    /// How often pages got other holders.
    pub turns: u32,
    pub pace: Pace,
    pub rules: Rules,
}

/// Why a request gets no use of its server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Orphaned {
    /// It is lost.
    Lost(Lost),
    /// It is away for the moment.
    Away,
    /// It has no room but this.
    Full(u64),
    /// It sent this page damaged twice.
    Damaged(PageIndex),
}

impl Work {
    pub fn reserve(&mut self) -> RequestId {
        if let Some(slot) = self.free_requests.pop() {
            self.pages[slot as usize].clear();
            let request = &mut self.requests[slot as usize];
            assert!(request.phase == Phase::Free, "a free slot is in use");
            request.phase = Phase::Reserved;
            request.generation = request.generation.wrapping_add(1);
            return RequestId(slot);
        }
        let slot = u32::try_from(self.requests.len()).expect("memory ends long before four billion requests");
        let ask = Ask::control(ServerIndex(0), Opcode::Heartbeat, RegionId(0));
        self.pages.push(Vec::new());
        self.requests.push(Request {
            generation: 1,
            phase: Phase::Reserved,
            ask,
            made_at: Time::default(),
            asked_again: false,
            is_odd: false,
            turned: false,
            departed: false,
            turn: 0,
        });
        RequestId(slot)
    }

    /// The request is complete; its operation has one more part.
    pub fn submit(&mut self, id: RequestId, ask: Ask, now: Time) {
        let request = &mut self.requests[id.0 as usize];
        assert!(request.phase == Phase::Reserved, "request {} was submitted before", id.0);
        let generation = request.generation;
        *request = Request {
            generation,
            phase: Phase::Queued,
            ask,
            made_at: now,
            asked_again: false,
            is_odd: false,
            turned: false,
            departed: false,
            turn: self.turns,
        };
        if let Some(op) = ask.op {
            self.ops[op.0 as usize].parts += 1;
        }
        if ask.class == Class::Demand {
            self.pace.demanded(now);
        }
    }

    #[inline]
    pub fn get(&self, id: RequestId) -> &Request {
        &self.requests[id.0 as usize]
    }

    #[inline]
    pub fn get_mut(&mut self, id: RequestId) -> &mut Request {
        &mut self.requests[id.0 as usize]
    }

    pub fn phase(&self, id: RequestId) -> Phase {
        self.get(id).phase
    }

    pub fn set_phase(&mut self, id: RequestId, phase: Phase) {
        self.get_mut(id).phase = phase;
    }

    /// The number of a request on the wire.
    #[inline]
    pub fn number(&self, id: RequestId) -> u64 {
        u64::from(id.0) | u64::from(self.get(id).generation) << 32
    }

    /// The request of this number, if it is under way.
    #[inline]
    pub fn find(&self, number: u64) -> Option<RequestId> {
        // The low half is the slot.
        #[allow(clippy::cast_possible_truncation)]
        let slot = number as u32;
        let request = self.requests.get(slot as usize)?;
        let same = u64::from(request.generation) == number >> 32 || !self.rules.keep(Rule::Generation);
        (request.phase != Phase::Free && same).then_some(RequestId(slot))
    }

    /// The same, if it waits for its answer.
    #[inline]
    pub fn sent(&self, number: u64) -> Option<RequestId> {
        self.find(number).filter(|id| self.phase(*id) == Phase::Sent)
    }

    /// The request that went elsewhere when its number was this one, and waits there for its answer.
    pub fn moved(&self, number: u64) -> Option<RequestId> {
        let id = self.find(number.wrapping_add(1 << 32))?;
        let waits = matches!(self.phase(id), Phase::Queued | Phase::Sent);
        (waits && self.get(id).ask.opcode == Opcode::Get).then_some(id)
    }

    /// The request goes to the other holder of its pages, which has this name for their region.
    pub fn turn_to_other(&mut self, id: RequestId, region: RegionId) {
        let from = self.get(id).ask.server;
        self.belongs_to_other(id, region);
        self.outputs.push_back(Output::Moved { request: id, from });
    }

    /// The same for one that the other holder answers already.
    pub fn belongs_to_other(&mut self, id: RequestId, region: RegionId) {
        self.renumber(id);
        let own_name = self.rules.keep(Rule::OwnName);
        let request = self.get_mut(id);
        request.phase = Phase::Queued;
        (request.asked_again, request.departed) = (false, false);
        let ask = &mut request.ask;
        ask.server = ask.other.replace(ask.server).expect("only what has another holder turns to it");
        if own_name {
            ask.region = region;
        }
    }

    /// From now on the answer to the old number is none of this request's.
    pub fn renumber(&mut self, id: RequestId) {
        let request = self.get_mut(id);
        request.generation = request.generation.wrapping_add(1);
    }

    /// The end of a request; its operation ends with its last one.
    pub fn finish(&mut self, id: RequestId) {
        let request = self.get_mut(id);
        assert!(request.phase != Phase::Free, "request {} ends twice", id.0);
        request.phase = Phase::Free;
        let op = request.ask.op;
        self.free_requests.push(id.0);
        if let Some(op) = op {
            self.end_part(op);
        }
    }

    /// A new operation, open for parts until it is sealed.
    pub fn begin(&mut self, token: u64, store: bool) -> OpId {
        let op = Op { token, store, parts: 1, outcome: Outcome::Done };
        if let Some(slot) = self.free_ops.pop() {
            self.ops[slot as usize] = op;
            return OpId(slot);
        }
        self.ops.push(op);
        OpId(u32::try_from(self.ops.len() - 1).expect("fewer operations than requests"))
    }

    pub fn sealed(&mut self, op: OpId) {
        self.end_part(op);
    }

    pub fn op_full(&mut self, op: OpId, server: ServerIndex, free: u64) {
        let op = &mut self.ops[op.0 as usize];
        if matches!(op.outcome, Outcome::Done) && self.rules.keep(Rule::FullIsNotStored) {
            op.outcome = Outcome::Full { server, free };
        }
    }

    pub fn op_corrupt(&mut self, op: OpId, server: ServerIndex, page: PageIndex) {
        let op = &mut self.ops[op.0 as usize];
        if matches!(op.outcome, Outcome::Done | Outcome::Full { .. }) {
            op.outcome = Outcome::Corrupt { server, page };
        }
    }

    pub fn op_denied(&mut self, op: OpId, server: ServerIndex, what: What, status: Status) {
        self.ops[op.0 as usize].outcome = Outcome::Denied { server, what, status };
    }

    pub fn op_lost(&mut self, op: OpId, server: ServerIndex, what: What, reason: Lost) {
        if self.rules.keep(Rule::FailAsOne) || self.ops[op.0 as usize].parts == 1 {
            self.ops[op.0 as usize].outcome = Outcome::Lost { server, what, reason };
        }
    }

    fn end_part(&mut self, id: OpId) {
        let op = &mut self.ops[id.0 as usize];
        op.parts -= 1;
        if op.parts > 0 && self.rules.keep(Rule::EveryPart) {
            return;
        }
        let outcome = std::mem::replace(&mut op.outcome, Outcome::Done);
        let (token, store) = (op.token, op.store);
        self.free_ops.push(id.0);
        self.outputs.push_back(Output::Ended { op: id, token, store, outcome });
    }

    /// Whether this server was asked for the same store, and has not answered.
    pub fn is_also_at(&self, id: RequestId, server: ServerIndex) -> bool {
        let Ask { op, at, .. } = self.get(id).ask;
        let same = |request: &Request| {
            let Ask { op: of, at: first, .. } = request.ask;
            request.phase > Phase::Reserved && request.ask.server == server && (of, first) == (op, at)
        };
        op.is_some() && self.requests.iter().any(same)
    }

    /// Whether a change of some of these pages of a region is under way.
    pub fn is_changing(&self, of: u32, pages: Extent) -> bool {
        let changes = |request: &Request| {
            request.phase > Phase::Reserved
                && matches!(request.ask.opcode, Opcode::Put | Opcode::Discard)
                && (request.ask.of, request.ask.piece) == (of, None)
        };
        let meets = |extent: &Extent| extent.first < pages.end() && pages.first < extent.end();
        let pages = self.requests.iter().zip(&self.pages);
        pages.filter(|(request, _)| changes(request)).any(|(_, pages)| pages.iter().any(meets))
    }

    /// Whether some of these pages of a region are being read at a server.
    pub fn is_reading(&self, server: ServerIndex, of: u32, pages: Extent) -> bool {
        let reads = |request: &Request| {
            let Ask { opcode, of: region, .. } = request.ask;
            let at = request.ask.server == server || request.ask.other == Some(server);
            request.phase > Phase::Reserved && at && (opcode, region) == (Opcode::Get, of)
        };
        let meets = |extent: &Extent| extent.first < pages.end() && pages.first < extent.end();
        let all = self.requests.iter().zip(&self.pages);
        all.filter(|(request, _)| reads(request)).any(|(_, pages)| pages.iter().any(meets))
    }

    /// Operations that have not ended.
    pub fn ops_under_way(&self) -> usize {
        self.ops.len() - self.free_ops.len()
    }

    /// Checks what must hold between two inputs.
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        let live = self.requests.iter().filter(|request| request.phase != Phase::Free).count();
        assert_eq!(live + self.free_requests.len(), self.requests.len(), "each request is live or free");
        let mut parts = vec![0; self.ops.len()];
        for request in self.requests.iter().filter(|request| request.phase > Phase::Reserved) {
            if let Some(op) = request.ask.op {
                parts[op.0 as usize] += 1;
            }
        }
        for (op, parts) in self.ops.iter().zip(parts) {
            assert!(op.parts == parts || op.parts == parts + 1, "an operation counts its parts");
        }
    }
}
