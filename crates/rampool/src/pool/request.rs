//! What a pool has under way: *operations* (what the caller asked for, with its token) and the *requests* (one frame to one server) that each
//! operation was cut into.
//!
//! Both live in tables whose slots are used again, with their vectors' capacity, so that a fetch in the steady state allocates nothing. A request's
//! number on the wire is its slot and a generation: an answer to a request that ended earlier is recognised, never taken for another's.

use std::collections::VecDeque;
use std::time::Instant;

use rampool_proto::placement::ServerIndex;
use rampool_proto::registration::keys::Key;
use rampool_proto::units::{ByteLen, Extent, OS_PAGE_BYTES, PageIndex};
use rampool_proto::wire::{Block, Opcode, RegionId, Status, Window};

use super::PoolEvent;
use crate::error::{LostReason, Operation, PoolError};
use crate::transport::PieceMut;

/// What goes first. Within a class, requests to one server leave in the order in which they were made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Class {
    /// A thread waits. Control requests belong here too.
    Demand = 0,
    Prefetch = 1,
    /// Stores and discards; in one class so that they never overtake each other.
    WriteBack = 2,
}

pub(super) const CLASSES: usize = 3;

/// One frame to one server.
pub(super) struct Request {
    generation: u32,
    live: bool,
    pub opcode: Opcode,
    pub class: Class,
    pub server: ServerIndex,
    pub region: RegionId,
    pub arg: u64,
    /// The operation this is a part of; control requests and discards have none.
    pub op: Option<u32>,
    /// For Get, Put and Discard. `memory[i]` is where the pages of `extents[i]` lie (Get: will lie); unused by Discard.
    pub extents: Vec<Extent>,
    pub memory: Vec<*mut u8>,
    pub pages: u32,
    /// The table of a control request, a `FetchOp` or a `Scan`.
    pub table: Vec<u8>,
    /// For Gather, Scatter and Accumulate.
    pub window: Option<Window>,
    /// The blocks of a Gather or Scatter that have a checksum each.
    pub blocks: Vec<Block>,
    /// Where the bytes of a window lie, or will, one after the other.
    pub places: Vec<PieceMut>,
    /// The bytes themselves, where the places are too many to be sent from or received into; or the answer to a scan.
    pub staging: Vec<u8>,
    /// Bytes of a window, or the most that a scan answers with.
    pub bytes: u32,
    /// Where in the region a window, an element or a column begins, for error texts.
    pub offset: u64,
    /// The byte after the last of them.
    pub reach: u64,
    /// Of a copy: the server that is to store the bytes, and its name.
    pub copy_to: Option<(ServerIndex, String)>,
    /// Someone waits for the reply itself.
    pub wanted: bool,
    pub made_at: Instant,
    pub sent: bool,
    /// A store's frame has left altogether.
    pub departed: bool,
    /// Its pages came damaged once and were asked for again.
    pub retried: bool,
    /// The key that its frame named instead of carrying bytes, or that it takes back.
    pub by_key: Option<Key>,
}

impl Request {
    /// Whether the bytes of a window take the way through the staging: the places are too many, and too small, for the kernel.
    pub fn is_staged(&self) -> bool {
        self.places.len() > 1 && self.places.len() * 1024 > self.bytes as usize
    }

    /// Whether it reads bytes of the direct view.
    pub fn reads_bytes(&self) -> bool {
        matches!(self.opcode, Opcode::Gather | Opcode::ReadPiece | Opcode::Scan)
    }

    /// Whether it changes bytes of the direct view.
    pub fn changes_bytes(&self) -> bool {
        matches!(self.opcode, Opcode::Scatter | Opcode::Accumulate | Opcode::FetchOp)
    }

    /// Bytes of credit it takes: of pages or of a window, sent or asked for.
    pub fn credit_bytes(&self) -> u64 {
        match self.opcode {
            Opcode::Get | Opcode::Put => u64::from(self.pages) * OS_PAGE_BYTES as u64,
            Opcode::Gather | Opcode::ReadPiece | Opcode::Scatter | Opcode::Accumulate | Opcode::Scan => self.bytes.into(),
            _ => 0,
        }
    }

    /// For error texts.
    pub fn operation(&self) -> Operation {
        let first = self.extents.first().map_or(PageIndex(0), |e| e.first);
        match self.opcode {
            Opcode::Get => Operation::Fetch(first),
            Opcode::Put => Operation::Store(first),
            Opcode::Discard => Operation::Discard(first),
            Opcode::Gather | Opcode::ReadPiece => Operation::Gather(self.offset),
            Opcode::Scatter => Operation::Scatter(self.offset),
            Opcode::Accumulate => Operation::Accumulate(self.offset),
            Opcode::FetchOp => Operation::FetchOp(self.offset),
            Opcode::Scan => Operation::Scan(self.offset),
            Opcode::Copy => Operation::Copy(self.offset),
            other => super::operation_of(other),
        }
    }
}

/// How an operation ends.
enum Outcome {
    Done,
    Full { server: ServerIndex, name: String, free: ByteLen },
    Corrupt { server: ServerIndex, name: String, page: PageIndex },
    Failed { error: PoolError },
}

/// What the caller asked for under one token.
struct Op {
    token: u64,
    store: bool,
    parts: u32,
    outcome: Outcome,
}

/// The answer to a request somebody waits for.
pub(super) struct Reply {
    pub request: u64,
    pub status: Status,
    pub region: RegionId,
    pub arg: u64,
    pub table: Vec<u8>,
    pub bulk: Vec<u8>,
}

/// Everything under way, shared by all lanes of a pool.
///
/// Invariant: every live operation has `parts > 0`, and `parts` is the number of live requests that name it (plus one while it is being built).
#[derive(Default)]
pub(super) struct Work {
    requests: Vec<Request>,
    free_requests: Vec<u32>,
    ops: Vec<Op>,
    free_ops: Vec<u32>,
    pub events: VecDeque<PoolEvent>,
    pub replies: Vec<Reply>,
}

impl Work {
    /// A fresh request in some slot, its lists empty.
    pub fn request(&mut self, server: ServerIndex, opcode: Opcode, class: Class, region: RegionId, op: Option<u32>, now: Instant) -> u32 {
        if let Some(op) = op {
            self.ops[op as usize].parts += 1;
        }
        if let Some(slot) = self.free_requests.pop() {
            let request = &mut self.requests[slot as usize];
            assert!(!request.live && request.extents.is_empty(), "a free slot is in use");
            request.generation = request.generation.wrapping_add(1);
            request.live = true;
            request.opcode = opcode;
            request.class = class;
            request.server = server;
            request.region = region;
            request.arg = 0;
            request.op = op;
            request.pages = 0;
            request.bytes = 0;
            request.offset = 0;
            request.reach = 0;
            request.copy_to = None;
            request.wanted = false;
            request.made_at = now;
            request.sent = false;
            request.departed = false;
            request.retried = false;
            request.by_key = None;
            return slot;
        }
        let slot = u32::try_from(self.requests.len()).expect("credits and memory end long before four billion requests");
        self.requests.push(Request {
            generation: 1,
            live: true,
            opcode,
            class,
            server,
            region,
            arg: 0,
            op,
            extents: Vec::new(),
            memory: Vec::new(),
            pages: 0,
            table: Vec::new(),
            window: None,
            blocks: Vec::new(),
            places: Vec::new(),
            staging: Vec::new(),
            bytes: 0,
            offset: 0,
            reach: 0,
            copy_to: None,
            wanted: false,
            made_at: now,
            sent: false,
            departed: false,
            retried: false,
            by_key: None,
        });
        slot
    }

    pub fn get(&mut self, slot: u32) -> &mut Request {
        let request = &mut self.requests[slot as usize];
        assert!(request.live, "request {slot} ended before");
        request
    }

    /// The number of a request on the wire.
    pub fn id(&self, slot: u32) -> u64 {
        u64::from(slot) | u64::from(self.requests[slot as usize].generation) << 32
    }

    /// The slot of the request with this number, if it still waits for its answer.
    pub fn find(&self, id: u64) -> Option<u32> {
        // The low half is the slot.
        #[allow(clippy::cast_possible_truncation)]
        let slot = id as u32;
        let request = self.requests.get(slot as usize)?;
        (request.live && u64::from(request.generation) == id >> 32).then_some(slot)
    }

    /// Gives a live request a new number.
    pub fn renumber(&mut self, slot: u32) {
        let request = &mut self.requests[slot as usize];
        request.generation = request.generation.wrapping_add(1);
    }

    /// The end of a request; its operation ends with its last one.
    pub fn finish(&mut self, slot: u32) {
        let request = &mut self.requests[slot as usize];
        assert!(request.live, "request {slot} ends twice");
        request.live = false;
        request.extents.clear();
        request.memory.clear();
        request.table.clear();
        request.window = None;
        request.blocks.clear();
        request.places.clear();
        request.staging.clear();
        let op = request.op;
        self.free_requests.push(slot);
        if let Some(op) = op {
            self.end_part(op);
        }
    }

    /// A new operation, open for parts until [`Work::built`].
    pub fn op(&mut self, token: u64, store: bool) -> u32 {
        let op = Op { token, store, parts: 1, outcome: Outcome::Done };
        if let Some(slot) = self.free_ops.pop() {
            self.ops[slot as usize] = op;
            return slot;
        }
        self.ops.push(op);
        u32::try_from(self.ops.len() - 1).expect("fewer operations than requests")
    }

    /// All parts of the operation are made.
    pub fn built(&mut self, op: u32) {
        self.end_part(op);
    }

    pub fn op_full(&mut self, op: u32, server: ServerIndex, name: &str, free: ByteLen) {
        let op = &mut self.ops[op as usize];
        if matches!(op.outcome, Outcome::Done) {
            op.outcome = Outcome::Full { server, name: name.to_owned(), free };
        }
    }

    pub fn op_corrupt(&mut self, op: u32, server: ServerIndex, name: &str, page: PageIndex) {
        let op = &mut self.ops[op as usize];
        if matches!(op.outcome, Outcome::Done | Outcome::Full { .. }) {
            op.outcome = Outcome::Corrupt { server, name: name.to_owned(), page };
        }
    }

    pub fn op_failed(&mut self, op: u32, error: PoolError) {
        self.ops[op as usize].outcome = Outcome::Failed { error };
    }

    fn end_part(&mut self, slot: u32) {
        let op = &mut self.ops[slot as usize];
        op.parts -= 1;
        if op.parts > 0 {
            return;
        }
        let token = op.token;
        let event = match std::mem::replace(&mut op.outcome, Outcome::Done) {
            Outcome::Done if op.store => PoolEvent::Stored { token },
            Outcome::Done => PoolEvent::Fetched { token },
            Outcome::Full { server, name, free } => PoolEvent::Full { token, server, name, free },
            Outcome::Corrupt { server, name, page } => PoolEvent::Corrupt { token, server, name, page },
            Outcome::Failed { error } => PoolEvent::Failed { token, error },
        };
        self.free_ops.push(slot);
        self.events.push_back(event);
    }

    /// The reply to the request of this number, once it is there.
    pub fn take_reply(&mut self, id: u64) -> Option<Reply> {
        let at = self.replies.iter().position(|r| r.request == id)?;
        Some(self.replies.swap_remove(at))
    }

    /// Operations that have not ended.
    pub fn ops_under_way(&self) -> usize {
        self.ops.len() - self.free_ops.len()
    }
}

/// The error every later use of a lost server gets.
pub(super) fn lost(server: &str, operation: Operation, reason: &LostReason) -> PoolError {
    PoolError::Lost { server: server.to_owned(), operation, reason: reason.clone() }
}
