//! Remote queues: messages to a name, with heads and bodies that travel apart.
//!
//! DIMMnet-3's IPUSH appends to a remote FIFO that the sender knows by name only; LHS lets the head of a
//! message arrive at once in a small fast buffer, while its tail goes to large memory; LHC joins a head with
//! a body that lies in large memory already; HTP prefetches the tail when the head is seen. Here the queue is
//! at a memory server. A head (256 bytes at most) is handed to a receiver as soon as the server has it. A
//! body that comes with it follows in pieces of 128 KiB, which other heads overtake, into pool memory; one
//! that lies in the pool stays where it is, and the receiver of the message gets it from the servers that
//! hold it. Either way a body is a [place in a region](Direct::body_place): it can be read, in part or as a
//! layout, summed up there, copied on from server to server, or left alone.
//!
//! **Order.** Messages of one sender arrive in the order of its sends, if it waits for each or none fails.
//! What was delivered and not acknowledged comes again before what was sent later.
//!
//! **Once.** A send that succeeded has appended its message exactly once, also where a connection broke in
//! between. A send that failed has not, except where the server or this process was lost: then the message
//! may be in the queue. A message is *delivered at least once*: it stays in the queue until its receiver is
//! [done](Direct::done) with it. A receiver that leaves, or is lost for longer than the server's grace time,
//! gives back what it holds, and the next receiver gets it with [`Message::redelivered`] set. A sender that
//! is lost in the middle of a body takes the message back: a receiver that has seen its head gets
//! [`QueueError::BodyLost`] instead of the body.
//!
//! **Bounded.** A queue holds so many messages and bytes. A send to a full one waits for room, in the order
//! of coming, for as long as its caller says; zero means not at all. Queues belong to the lease, whose memory
//! their messages take; with its last member they are gone.

use super::{Direct, DirectError, DirectRegion, Job, Pending, both, bounded, with_length};
use crate::error::{Operation, PoolError};
use crate::pool::{MOST_COPIED_BYTES, PoolRegion, QueueReply};
use rampool_paging::placement::ServerIndex;
use rampool_wire::frame::{
    AwaitBody, Body, Delivery, Listed, MAX_HEAD_BYTES, MAX_NAME_BYTES, MAX_PAGE_INDEX, MAX_SETTLED, Opcode,
    Push, PushHeads, QueueBounds, Reference, RegionId, Settlement, Status, Take, is_name,
};
use rampool_wire::layout::{Layout, Program};
use rampool_wire::units::{ByteLen, OS_PAGE_BYTES};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages that one request brings at most, unless asked for otherwise.
const BATCH: u16 = 64;
/// Acknowledgements that are not kept waiting for the next request any more.
const MOST_UNSENT: usize = MAX_SETTLED / 2;

/// A queue of a lease, open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Queue {
    name: Arc<str>,
    server: ServerIndex,
    id: u64,
    region: DirectRegion,
    bounds: QueueBounds,
}

impl Queue {
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    #[must_use]
    pub fn bounds(&self) -> QueueBounds {
        self.bounds
    }
}

/// Why an operation on a queue failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    #[error("a queue's name has 1 to {MAX_NAME_BYTES} bytes and no control characters")]
    Name,
    #[error("queue {queue}: a head has at most {MAX_HEAD_BYTES} bytes, not {bytes}")]
    Head { queue: String, bytes: usize },
    /// A body that lies in the pool is in more pieces than a message has room to name, or is empty, or lies
    /// in a queue itself.
    #[error(
        "queue {queue}: a body in the pool must be a layout of at least 1 byte that takes at most 4 KiB to \
         describe"
    )]
    Reference { queue: String },
    #[error("memory server {server} has no queue {queue}")]
    NoSuchQueue { queue: String, server: String },
    /// It had no room, and got none for as long as the sender was willing to wait.
    #[error("queue {queue} at memory server {server} is full: {messages} messages are in it")]
    Full { queue: String, server: String, messages: u64 },
    #[error(
        "memory server {server} has no room for a message to queue {queue}: {free} of the lease are free \
         there"
    )]
    NoRoom { queue: String, server: String, free: ByteLen },
    #[error(
        "queue {queue}: the sender of message {number} ended before its body was at memory server {server}"
    )]
    BodyLost { queue: String, server: String, number: u64 },
    /// The body was not there in time. It may still come.
    #[error("queue {queue}: the body of message {number} is not at memory server {server} yet")]
    BodyLate { queue: String, server: String, number: u64 },
    #[error("queue {queue}: message {number} has a body of {bytes} bytes, there is room for {room}")]
    Room { queue: String, number: u64, bytes: u64, room: u64 },
    #[error("memory server {server} refuses {operation} (queue {queue}): {message}")]
    Refused { queue: String, server: String, operation: Operation, message: String },
    /// A server is lost, or what a message says of its body is invalid.
    #[error("queue {queue}: {source}")]
    Direct { queue: String, source: DirectError },
}

/// What goes with the head of a message.
#[derive(Clone, Copy, Debug)]
pub enum SendBody<'a> {
    None,
    /// These bytes; they are copied into the pool.
    Bytes(&'a [u8]),
    /// What a layout selects from `offset` of a region on. It is not copied: it stays the region's, and is
    /// what it is when the receiver reads it.
    InPool {
        region: DirectRegion,
        offset: u64,
        layout: &'a Layout,
    },
}

/// A message that was taken. It is this member's until it is [done](Direct::done) with it or [gives it
/// back](Direct::give_back); one that is dropped stays with the member until that leaves.
#[must_use = "a message stays in its queue until its receiver is done with it"]
#[derive(Debug)]
pub struct Message {
    queue: Queue,
    number: u64,
    redelivered: bool,
    head: [u8; MAX_HEAD_BYTES],
    head_bytes: usize,
    body: Option<Place>,
    arriving: bool,
    fetch: Option<Fetch>,
}

/// Where a body lies.
#[derive(Clone, Debug)]
struct Place {
    region: PoolRegion,
    program: Program,
}

/// A body on its way here.
#[derive(Debug)]
enum Fetch {
    /// The server tells when it has all of it.
    Awaiting(u64),
    Getting(Pending),
}

impl Message {
    #[must_use]
    pub fn head(&self) -> &[u8] {
        &self.head[..self.head_bytes]
    }

    /// Bytes of its body.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        self.body.as_ref().map_or(0, |place| place.program.bytes())
    }

    /// It was delivered before, to a receiver that was not done with it.
    #[must_use]
    pub fn redelivered(&self) -> bool {
        self.redelivered
    }

    /// Its number in its queue: later messages have greater ones.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    #[must_use]
    pub fn queue(&self) -> &Queue {
        &self.queue
    }
}

/// A send under way. [`Direct::wait_send`] for it; one that is dropped goes on, and its outcome stays with
/// the `Direct`.
#[must_use]
#[derive(Debug)]
pub struct PendingSend {
    id: u64,
}

/// A client's part of its queues.
#[derive(Default)]
pub(super) struct QueueTable {
    /// Sends whose result was not fetched yet.
    sends: BTreeMap<u64, Sending>,
    /// Those of them that have a body.
    with_bodies: Vec<u64>,
    /// By server and number of the queue.
    inboxes: BTreeMap<(ServerIndex, u64), Inbox>,
    /// Regions that other members' messages have named.
    told: BTreeMap<Vec<RegionId>, PoolRegion>,
    /// Bodies on their way here that are not wanted any more.
    dropped: Vec<u64>,
    next: u64,
}

#[derive(Default)]
struct Inbox {
    /// Messages that came with others.
    messages: VecDeque<Message>,
    /// Messages that the server does not know yet to be done.
    done: Vec<u64>,
    /// A request for messages that [`Direct::poll_message`] has at the server.
    standing: Option<u64>,
    /// Bodies of at most so many bytes are fetched when their heads arrive.
    ahead: u64,
}

impl QueueTable {
    /// A region is freed: a later message about it opens it anew.
    pub(super) fn forget(&mut self, region: PoolRegion) {
        self.told.retain(|_, told| *told != region);
    }
}

struct Sending {
    queue: Queue,
    request: u64,
    stage: Stage,
}

enum Stage {
    /// The head is on its way; this is its body.
    Head(Option<Vec<u8>>),
    Body {
        number: u64,
        pending: Pending,
    },
    Ended(Result<(), QueueError>),
}

impl Direct {
    /// Opens a queue.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`] if there is none.
    pub fn open_queue(&mut self, name: &str) -> Result<Queue, QueueError> {
        self.open_queue_as(name, None)
    }

    /// Opens a queue, which is made with these bounds if there is none. One that is there keeps its own
    /// ([`Queue::bounds`]).
    ///
    /// # Errors
    /// [`QueueError::Refused`] for bounds beyond the server's.
    pub fn open_or_create_queue(&mut self, name: &str, bounds: QueueBounds) -> Result<Queue, QueueError> {
        self.open_queue_as(name, Some(bounds))
    }

    fn open_queue_as(&mut self, name: &str, bounds: Option<QueueBounds>) -> Result<Queue, QueueError> {
        if name.is_empty() || !is_name(name) {
            return Err(QueueError::Name);
        }
        let server = self.pool.queue_server(name);
        let mut table = Vec::new();
        bounds.unwrap_or(QueueBounds { messages: 0, bytes: 0 }).encode(name, &mut table);
        let request = self.pool.ask_queue(server, Opcode::OpenQueue, u64::from(bounds.is_some()), &table);
        let reply = self.queue_answer(name, server, Opcode::OpenQueue, request)?;
        let (bounds, _) = QueueBounds::parse(&reply.table)
            .map_err(|error| self.nonsense(name, server, Opcode::OpenQueue, error))?;
        let region = self.told_region(server, reply.region);
        let region = DirectRegion { region, bytes: MAX_PAGE_INDEX * OS_PAGE_BYTES as u64 };
        Ok(Queue { name: name.into(), server, id: reply.arg, region, bounds })
    }

    /// Removes a queue with all that is in it, for every member. Members that wait for it are told that there
    /// is no such queue.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn free_queue(&mut self, queue: &Queue) -> Result<(), QueueError> {
        let request = self.pool.ask_queue(queue.server, Opcode::FreeQueue, queue.id, &[]);
        self.queue_answer(&queue.name, queue.server, Opcode::FreeQueue, request)?;
        self.queues.inboxes.remove(&(queue.server, queue.id));
        Ok(())
    }

    /// The queues of the lease, at all servers.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn queues(&mut self) -> Result<Vec<Listed>, QueueError> {
        let mut all = Vec::new();
        for server in 0..self.pool.server_count() {
            let server = ServerIndex(u16::try_from(server).expect("fewer than 65536 servers"));
            let mut after = 0;
            loop {
                let request = self.pool.ask_queue(server, Opcode::ListQueues, after, &[]);
                let reply = self.queue_answer("*", server, Opcode::ListQueues, request)?;
                let listed = Listed::parse_all(&reply.table)
                    .map_err(|error| self.nonsense("*", server, Opcode::ListQueues, error))?;
                all.extend(listed);
                if reply.arg <= after {
                    break;
                }
                after = reply.arg;
            }
        }
        Ok(all)
    }

    // --- sending -------------------------------------------------------------------------------------------

    /// Appends a message to a queue. Blocks until the server has all of it, at most for as long as there is
    /// no room (`timeout`; zero: not at all), and the time of its transfer.
    ///
    /// # Errors
    /// [`QueueError`]. Except where the server is lost, the message is then not in the queue.
    pub fn send(
        &mut self,
        queue: &Queue,
        head: &[u8],
        body: SendBody<'_>,
        timeout: Duration,
    ) -> Result<(), QueueError> {
        let until = Instant::now() + timeout;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let request = self.push(queue, head, body, left)?;
            match self.queue_answer(&queue.name, queue.server, Opcode::Push, request) {
                // It waited for as long as one request may.
                Err(QueueError::Full { .. }) if Instant::now() < until => {}
                Err(error) => return Err(error),
                Ok(reply) => {
                    let SendBody::Bytes(bytes) = body else { return Ok(()) };
                    if bytes.is_empty() {
                        return Ok(());
                    }
                    let (there, here) = self.body_sides(queue, &reply, bytes.len())?;
                    // SAFETY: the layout is within the bytes, which are borrowed until the operation has
                    // ended, and only read.
                    let begun = unsafe {
                        self.begin(queue.region, Job::SendBody, &there, &here, bytes.as_ptr().cast_mut())
                    };
                    let result = begun.and_then(|token| self.finish(token));
                    return result.map_err(|error| self.take_back(queue, reply.arg, error));
                }
            }
        }
    }

    /// Begins to append a message; its head leaves at once, a body of its own follows while this `Direct` is
    /// used or waited for. If the queue is full it waits for room for `timeout`, or for as long as a request
    /// may if that is shorter (a quarter of the pool's deadline for operations).
    ///
    /// # Errors
    /// [`QueueError`] for a head that is too long.
    pub fn start_send(
        &mut self,
        queue: &Queue,
        head: &[u8],
        body: Vec<u8>,
        timeout: Duration,
    ) -> Result<PendingSend, QueueError> {
        let request = self.push(queue, head, SendBody::Bytes(&body), timeout)?;
        Ok(self.note_send(queue, request, (!body.is_empty()).then_some(body)))
    }

    fn note_send(&mut self, queue: &Queue, request: u64, body: Option<Vec<u8>>) -> PendingSend {
        self.queues.next += 1;
        let id = self.queues.next;
        if body.is_some() {
            self.queues.with_bodies.push(id);
        }
        self.queues.sends.insert(id, Sending { queue: queue.clone(), request, stage: Stage::Head(body) });
        PendingSend { id }
    }

    /// Appends many messages without bodies, which costs a fraction of one send for each: they travel in
    /// groups of up to 16 KiB (heads, and 2 bytes for each), and a group enters the queue whole, with no
    /// other message in between. Blocks until all are in the queue; at most for `timeout` for each group,
    /// while there is no room for it. Returns how many are in the queue, the first ones: fewer than there are
    /// if there was no room for more.
    ///
    /// # Errors
    /// [`QueueError`] if none was appended. As with [`Direct::send`], except where the server is lost, none
    /// is in the queue then.
    pub fn send_many(
        &mut self,
        queue: &Queue,
        heads: &[&[u8]],
        timeout: Duration,
    ) -> Result<usize, QueueError> {
        let mut sent = 0;
        while sent < heads.len() {
            let until = Instant::now() + timeout;
            let result = loop {
                let left = until.saturating_duration_since(Instant::now());
                let (pending, count) = self.start_send_many(queue, &heads[sent..], left)?;
                match self.wait_send(pending) {
                    // It waited for as long as one request may.
                    Err(QueueError::Full { .. }) if Instant::now() < until => {}
                    result => break result.map(|()| count),
                }
            };
            match result {
                Ok(count) => sent += count,
                Err(error) if sent == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(sent)
    }

    /// Begins to append as many of these messages without bodies as fit one group (see
    /// [`Direct::send_many`]); returns how many they are, at least one. The group leaves at once, and so do
    /// others behind it: many may be in flight. If the queue has no room for all of the group, it waits as
    /// [`Direct::start_send`] does.
    ///
    /// # Errors
    /// [`QueueError::Head`] for a head among them that is too long; nothing was sent then.
    ///
    /// # Panics
    /// If there are none.
    pub fn start_send_many(
        &mut self,
        queue: &Queue,
        heads: &[&[u8]],
        timeout: Duration,
    ) -> Result<(PendingSend, usize), QueueError> {
        assert!(!heads.is_empty(), "no messages to send");
        let bytes = heads.iter().map(|head| head.len()).max().unwrap_or_default();
        if bytes > MAX_HEAD_BYTES {
            return Err(QueueError::Head { queue: queue.name.to_string(), bytes });
        }
        // A queue may be made for fewer messages than a group has.
        let holds = usize::try_from(queue.bounds.messages).unwrap_or(usize::MAX).min(heads.len());
        let mut count = PushHeads::fit(&heads[..holds]);
        while count > 1
            && heads[..count].iter().map(|head| head.len() as u64).sum::<u64>() > queue.bounds.bytes
        {
            count -= 1;
        }
        let mut table = Vec::new();
        PushHeads::encode(self.timeout_ms(timeout), &heads[..count], &mut table);
        let request = self.pool.ask_queue(queue.server, Opcode::PushHeads, queue.id, &table);
        Ok((self.note_send(queue, request, None), count))
    }

    /// Waits until a message is in its queue with all of its body; or a group of messages.
    ///
    /// # Errors
    /// As [`Direct::send`].
    ///
    /// # Panics
    /// If the send is another `Direct`'s.
    pub fn wait_send(&mut self, pending: PendingSend) -> Result<(), QueueError> {
        let mut waiting = Waiting::default();
        loop {
            let sending = self.queues.sends.get(&pending.id).expect("a send of this client's");
            if let Stage::Head(None) = sending.stage {
                let Sending { queue, request, .. } =
                    self.queues.sends.remove(&pending.id).expect("seen above");
                return self.queue_answer(&queue.name, queue.server, Opcode::Push, request).map(drop);
            }
            self.advance_sends();
            if let Some(Sending { stage: Stage::Ended(_), .. }) = self.queues.sends.get(&pending.id)
                && let Some(Sending { stage: Stage::Ended(result), .. }) =
                    self.queues.sends.remove(&pending.id)
            {
                return result;
            }
            self.pause(&mut waiting, Instant::now() + Duration::from_secs(1));
        }
    }

    /// Puts the head of a message on its way.
    fn push(
        &mut self,
        queue: &Queue,
        head: &[u8],
        body: SendBody<'_>,
        timeout: Duration,
    ) -> Result<u64, QueueError> {
        if head.len() > MAX_HEAD_BYTES {
            return Err(QueueError::Head { queue: queue.name.to_string(), bytes: head.len() });
        }
        let reference;
        let body = match body {
            SendBody::None | SendBody::Bytes([]) => Body::None,
            SendBody::Bytes(bytes) => Body::Bytes(bytes.len() as u64),
            SendBody::InPool { region, offset, layout } => {
                let refused = || QueueError::Reference { queue: queue.name.to_string() };
                let direct = |source| QueueError::Direct { queue: queue.name.to_string(), source };
                let program = layout.placed(offset, region.bytes).map_err(|error| direct(error.into()))?;
                self.must_know(region).map_err(direct)?;
                let (regions, only) = self.pool.told_as(region.region);
                if program.bytes() == 0 || only.is_some() {
                    return Err(refused());
                }
                let bytes = program.bytes();
                reference = Reference { regions: regions.to_vec(), program }.encode().ok_or_else(refused)?;
                Body::InPool(bytes, &reference)
            }
        };
        let mut table = Vec::with_capacity(64 + head.len());
        Push { timeout_ms: self.timeout_ms(timeout), head, body }.encode(&mut table);
        Ok(self.pool.ask_queue(queue.server, Opcode::Push, queue.id, &table))
    }

    /// Lets the bodies of sends that were started follow their heads, as far as that is possible without
    /// blocking. Every operation on a queue that waits does so, too.
    pub fn advance_sends(&mut self) {
        self.progress();
        for id in std::mem::take(&mut self.queues.with_bodies) {
            let Some(Sending { queue, request, stage }) = self.queues.sends.remove(&id) else { continue };
            let stage = match stage {
                Stage::Head(Some(body)) => match self.pool.queue_reply(queue.server, Opcode::Push, request) {
                    None => Stage::Head(Some(body)),
                    Some(reply) => match self.start_body(&queue, reply, body) {
                        Ok(stage) => stage,
                        Err(error) => Stage::Ended(Err(error)),
                    },
                },
                Stage::Body { number, pending } if self.has_ended(pending.token) => Stage::Ended(
                    self.wait(pending).map(drop).map_err(|error| self.take_back(&queue, number, error)),
                ),
                other => other,
            };
            if !matches!(stage, Stage::Ended(_)) {
                self.queues.with_bodies.push(id);
            }
            self.queues.sends.insert(id, Sending { queue, request, stage });
        }
    }

    fn start_body(
        &mut self,
        queue: &Queue,
        reply: Result<QueueReply, PoolError>,
        mut body: Vec<u8>,
    ) -> Result<Stage, QueueError> {
        let reply = self.judge(&queue.name, queue.server, Opcode::Push, reply)?;
        let (there, here) = self.body_sides(queue, &reply, body.len())?;
        // SAFETY: the buffer's bytes do not move with it, and it is not touched or dropped before the
        // operation has ended or the pool is gone.
        let begun = unsafe { self.begin(queue.region, Job::SendBody, &there, &here, body.as_mut_ptr()) };
        let token = begun.map_err(|source| QueueError::Direct { queue: queue.name.to_string(), source })?;
        self.buffers.insert(token, body);
        Ok(Stage::Body { number: reply.arg, pending: Pending { token } })
    }

    /// Where a body goes, and what it is here.
    fn body_sides(
        &mut self,
        queue: &Queue,
        reply: &QueueReply,
        bytes: usize,
    ) -> Result<(Program, Program), QueueError> {
        let at = reply
            .table
            .first_chunk::<8>()
            .map(|at| u64::from_le_bytes(*at))
            .filter(|_| reply.table.len() == 8);
        let sides = at.and_then(|at| {
            let layout = Layout::bytes(bytes as u64).ok()?;
            both(queue.region, at, &layout, bytes as u64, &layout).ok()
        });
        sides.ok_or_else(|| {
            self.nonsense(&queue.name, queue.server, Opcode::Push, "it does not say where the body goes")
        })
    }

    /// A body did not arrive: its receiver must not wait for it.
    fn take_back(&mut self, queue: &Queue, number: u64, error: DirectError) -> QueueError {
        let mut table = Vec::new();
        Settlement::Withdraw.encode(&[number], &mut table);
        let request = self.pool.ask_queue(queue.server, Opcode::Settle, queue.id, &table);
        // Where the server is lost, so is the message.
        let _ = self.queue_answer(&queue.name, queue.server, Opcode::Settle, request);
        match error {
            DirectError::Full { server, free, .. } => {
                QueueError::NoRoom { queue: queue.name.to_string(), server, free }
            }
            source => QueueError::Direct { queue: queue.name.to_string(), source },
        }
    }

    // --- taking --------------------------------------------------------------------------------------------

    /// Takes the next message. Blocks until there is one, or for `timeout`: then `None`. Tells the server on
    /// its way which messages are [done](Direct::done).
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn take(&mut self, queue: &Queue, timeout: Duration) -> Result<Option<Message>, QueueError> {
        self.fill(queue, 1, timeout)?;
        Ok(self.inbox(queue).messages.pop_front())
    }

    /// Takes up to `most` messages (at least one request's worth of which come at once). Blocks until there
    /// is one, or for `timeout`: then there are none.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn take_many(
        &mut self,
        queue: &Queue,
        most: usize,
        timeout: Duration,
    ) -> Result<Vec<Message>, QueueError> {
        self.fill(queue, u16::try_from(most).unwrap_or(u16::MAX).clamp(1, BATCH), timeout)?;
        let inbox = self.inbox(queue);
        let count = inbox.messages.len().min(most);
        Ok(inbox.messages.drain(..count).collect())
    }

    /// Takes the next message whose head `wanted` accepts, as MPI matches by source and tag. Blocks until
    /// there is one, or for `timeout`: then `None`. Messages that it passes over stay here, in their order,
    /// for later calls of any kind: they count against the queue's bounds, and no other receiver gets them
    /// unless this one leaves.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn take_where(
        &mut self,
        queue: &Queue,
        wanted: impl Fn(&[u8]) -> bool,
        timeout: Duration,
    ) -> Result<Option<Message>, QueueError> {
        let until = Instant::now() + timeout;
        let mut passed = 0;
        loop {
            let messages = &mut self.inbox(queue).messages;
            let found = messages.iter().skip(passed).position(|message| wanted(message.head()));
            if let Some(at) = found {
                return Ok(messages.remove(passed + at));
            }
            passed = messages.len();
            if !self.fill_once(queue, 1, until)? {
                return Ok(None);
            }
            if self.inbox(queue).messages.len() == passed && Instant::now() >= until {
                return Ok(None);
            }
        }
    }

    /// From now on the body of a message starts to come here as soon as its head does, without a call, if it
    /// has at most so many bytes; 0: none does. Every message that is here may then have so many bytes here.
    pub fn prefetch_bodies(&mut self, queue: &Queue, at_most: u64) {
        self.inbox(queue).ahead = at_most;
    }

    /// Takes the next message if it is here. Never blocks: a request stands at the server, and its answer is
    /// looked for in this process. So from the first poll on a message may be on its way here. After the last
    /// poll, take it, or leave the lease: then it is delivered to others.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn poll_message(&mut self, queue: &Queue) -> Result<Option<Message>, QueueError> {
        if let Some(message) = self.inbox(queue).messages.pop_front() {
            return Ok(Some(message));
        }
        let request = match self.inbox(queue).standing {
            Some(request) => request,
            None => {
                let longest = self.pool.longest_queue_wait();
                let request = self.ask_take(queue, 1, longest);
                self.inbox(queue).standing = Some(request);
                request
            }
        };
        self.advance_sends();
        if let Some(reply) = self.pool.queue_reply(queue.server, Opcode::Take, request) {
            self.inbox(queue).standing = None;
            self.took(queue, reply)?;
        }
        Ok(self.inbox(queue).messages.pop_front())
    }

    /// The message is done with: it will not be delivered again. Does not block; the server hears of it with
    /// the next request for messages of that queue, or by [`Direct::flush_done`]. If this process is lost
    /// before, the message comes again.
    pub fn done(&mut self, mut message: Message) {
        self.drop_fetch(message.fetch.take());
        let inbox = self.inbox(&message.queue);
        inbox.done.push(message.number);
        if inbox.done.len() >= MOST_UNSENT {
            let done = std::mem::take(&mut inbox.done);
            let queue = &message.queue;
            let mut table = Vec::new();
            Settlement::Done.encode(&done, &mut table);
            // What becomes of it shows with the next request.
            self.pool.tell_queue(queue.server, Opcode::Settle, queue.id, &table);
        }
    }

    /// Blocks until the server knows of every message that is done with.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn flush_done(&mut self, queue: &Queue) -> Result<(), QueueError> {
        let done = std::mem::take(&mut self.inbox(queue).done);
        self.settle(queue, &done, Settlement::Done)
    }

    /// Gives a message back: the next receiver gets it, before what came later. Blocks until the server has
    /// it.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn give_back(&mut self, mut message: Message) -> Result<(), QueueError> {
        self.drop_fetch(message.fetch.take());
        self.settle(&message.queue, &[message.number], Settlement::Return)
    }

    fn settle(&mut self, queue: &Queue, numbers: &[u64], how: Settlement) -> Result<(), QueueError> {
        if numbers.is_empty() {
            return Ok(());
        }
        let mut table = Vec::new();
        how.encode(numbers, &mut table);
        let request = self.pool.ask_queue(queue.server, Opcode::Settle, queue.id, &table);
        self.queue_answer(&queue.name, queue.server, Opcode::Settle, request).map(drop)
    }

    fn inbox(&mut self, queue: &Queue) -> &mut Inbox {
        self.queues.inboxes.entry((queue.server, queue.id)).or_default()
    }

    /// Brings messages here if there are none.
    fn fill(&mut self, queue: &Queue, most: u16, timeout: Duration) -> Result<(), QueueError> {
        let until = Instant::now() + timeout;
        while self.inbox(queue).messages.is_empty() {
            if !self.fill_once(queue, most, until)? || Instant::now() >= until {
                break;
            }
        }
        Ok(())
    }

    /// Brings more messages here, if there are any by then. False: a request of an earlier poll still stands.
    fn fill_once(&mut self, queue: &Queue, most: u16, until: Instant) -> Result<bool, QueueError> {
        let standing = self.inbox(queue).standing.take();
        let request = match standing {
            Some(request) => request,
            None => self.ask_take(queue, most, until.saturating_duration_since(Instant::now())),
        };
        let deadline = standing.is_some().then_some(until);
        match self.queue_wait(queue.server, Opcode::Take, request, deadline) {
            Some(reply) => {
                self.took(queue, reply)?;
                Ok(true)
            }
            None => {
                self.inbox(queue).standing = standing;
                Ok(false)
            }
        }
    }

    fn ask_take(&mut self, queue: &Queue, most: u16, timeout: Duration) -> u64 {
        let mut acknowledged = std::mem::take(&mut self.inbox(queue).done);
        let rest = acknowledged.split_off(acknowledged.len().min(MAX_SETTLED));
        self.inbox(queue).done = rest;
        let mut table = Vec::with_capacity(16 + acknowledged.len() * 8);
        Take { timeout_ms: self.timeout_ms(timeout), most, acknowledged }.encode(&mut table);
        self.pool.ask_queue(queue.server, Opcode::Take, queue.id, &table)
    }

    /// Messages have arrived.
    fn took(&mut self, queue: &Queue, reply: Result<QueueReply, PoolError>) -> Result<(), QueueError> {
        let reply = self.judge(&queue.name, queue.server, Opcode::Take, reply)?;
        let deliveries = Delivery::parse_all(&reply.table)
            .map_err(|error| self.nonsense(&queue.name, queue.server, Opcode::Take, error))?;
        for delivery in deliveries {
            let body = match delivery.body {
                Body::None => None,
                Body::Bytes(bytes) => {
                    let program = Layout::bytes(bytes)
                        .and_then(|layout| layout.placed(delivery.body_at, queue.region.bytes));
                    let program = program
                        .map_err(|error| self.nonsense(&queue.name, queue.server, Opcode::Take, error))?;
                    Some(Place { region: queue.region.region, program })
                }
                // Invalid values there are found when the body is asked for: the head is good.
                Body::InPool(bytes, reference) => Some(self.place_in_pool(bytes, reference)),
            };
            let mut head = [0; MAX_HEAD_BYTES];
            head[..delivery.head.len()].copy_from_slice(delivery.head);
            let mut message = Message {
                queue: queue.clone(),
                number: delivery.number,
                redelivered: delivery.redelivered,
                head,
                head_bytes: delivery.head.len(),
                body,
                arriving: delivery.arriving,
                fetch: None,
            };
            if (1..=self.inbox(queue).ahead).contains(&message.body_bytes()) {
                self.prefetch_body(&mut message);
            }
            self.inbox(queue).messages.push_back(message);
        }
        Ok(())
    }

    fn place_in_pool(&mut self, bytes: u64, reference: &[u8]) -> Place {
        let servers = self.pool.server_count();
        let reference = Reference::parse(reference)
            .ok()
            .filter(|told| told.program.bytes() == bytes && told.regions.len() == servers);
        let Reference { regions, program } = reference.unwrap_or_else(|| {
            let program = Program::run(0, bytes.min(1 << 50)).expect("a length");
            Reference { regions: vec![RegionId(0); servers], program }
        });
        let pool = &mut self.pool;
        let told = self.queues.told.entry(regions);
        let region = *told
            .or_insert_with_key(|regions| pool.remember_told(regions).expect("as many as there are servers"));
        Place { region, program }
    }

    // --- bodies --------------------------------------------------------------------------------------------

    /// Begins to bring the body of a message here, or to wait for it where it is on its way still
    /// (DIMMnet-3's HTP). Does not block. [`Direct::body`] has it then.
    pub fn prefetch_body(&mut self, message: &mut Message) {
        if message.fetch.is_none()
            && let Some(place) = &message.body
        {
            message.fetch = if message.arriving {
                let wait = self.pool.longest_queue_wait();
                Some(Fetch::Awaiting(self.ask_body(&message.queue, message.number, wait)))
            } else {
                // What there is no memory for is an error where the body is asked for.
                self.start_get_place(place).map(Fetch::Getting)
            };
        }
    }

    /// The body of a message, empty if it has none. Blocks until all of it is at the server, at most for
    /// `timeout`, and here. A second call brings it here again.
    ///
    /// # Errors
    /// [`QueueError::BodyLost`], [`QueueError::BodyLate`], or the error of the servers that hold it.
    pub fn body(&mut self, message: &mut Message, timeout: Duration) -> Result<Vec<u8>, QueueError> {
        self.await_body(message, timeout)?;
        let Some(place) = &message.body else { return Ok(Vec::new()) };
        let pending = match message.fetch.take() {
            Some(Fetch::Getting(pending)) => Some(pending),
            _ => self.start_get_place(place),
        };
        let pending = pending.ok_or_else(|| {
            let (queue, number, bytes) =
                (message.queue.name.to_string(), message.number, message.body_bytes());
            QueueError::Room { queue, number, bytes, room: 0 }
        })?;
        self.wait(pending)
            .map_err(|source| QueueError::Direct { queue: message.queue.name.to_string(), source })
    }

    /// Reads the body of a message into the front of `buffer`; returns its length.
    ///
    /// # Errors
    /// As [`Direct::body`]; [`QueueError::Room`] if the buffer is too short.
    pub fn body_into(
        &mut self,
        message: &mut Message,
        buffer: &mut [u8],
        timeout: Duration,
    ) -> Result<usize, QueueError> {
        let (bytes, room) = (message.body_bytes(), buffer.len() as u64);
        if bytes > room {
            return Err(QueueError::Room {
                queue: message.queue.name.to_string(),
                number: message.number,
                bytes,
                room,
            });
        }
        if matches!(message.fetch, Some(Fetch::Getting(_))) {
            let body = self.body(message, timeout)?;
            buffer[..body.len()].copy_from_slice(&body);
            return Ok(body.len());
        }
        self.await_body(message, timeout)?;
        let Some(place) = &message.body else { return Ok(0) };
        let direct = |source| QueueError::Direct { queue: message.queue.name.to_string(), source };
        let bytes = usize::try_from(bytes).expect("no longer than the buffer");
        let here = Program::run(0, bytes as u64).map_err(|error| direct(error.into()))?;
        let region = DirectRegion { region: place.region, bytes: u64::MAX };
        // SAFETY: the program is within the buffer, which is borrowed until the operation has ended.
        let begun = unsafe { self.begin(region, Job::Gather, &place.program, &here, buffer.as_mut_ptr()) };
        begun.and_then(|token| self.finish(token)).map_err(direct)?;
        Ok(bytes)
    }

    /// Copies the body of a message to a region, from `offset` on, from server to server: not a byte of it
    /// comes here.
    ///
    /// # Errors
    /// As [`Direct::body`], and [`Direct::copy`].
    pub fn land_body(
        &mut self,
        message: &mut Message,
        region: DirectRegion,
        offset: u64,
        timeout: Duration,
    ) -> Result<(), QueueError> {
        self.await_body(message, timeout)?;
        let Some(place) = &message.body else { return Ok(()) };
        let direct = |source| QueueError::Direct { queue: message.queue.name.to_string(), source };
        let target =
            Layout::bytes(place.program.bytes()).and_then(|layout| layout.placed(offset, region.bytes));
        let target = target.map_err(|error| direct(error.into()))?;
        bounded(Operation::Copy(offset), "bytes", target.bytes(), MOST_COPIED_BYTES).map_err(direct)?;
        self.must_know(region).map_err(direct)?;
        let token = self.token(Operation::Copy(offset));
        self.pool.copy_bytes(token, (place.region, &place.program), (region.region, &target));
        self.finish(token).map_err(direct)
    }

    /// Where the body of a message lies, as a region and the offset of its first byte, if it is in one piece:
    /// every operation of the direct view works there. Blocks until it is there, at most for `timeout`. A
    /// body that came with its message may only be read, and is gone when the message is done with.
    ///
    /// # Errors
    /// As [`Direct::body`].
    pub fn body_place(
        &mut self,
        message: &mut Message,
        timeout: Duration,
    ) -> Result<Option<(DirectRegion, u64)>, QueueError> {
        self.await_body(message, timeout)?;
        let Some(place) = &message.body else { return Ok(None) };
        let (low, high) = place.program.bounds();
        if (high - low).cast_unsigned() != place.program.bytes() {
            return Ok(None);
        }
        Ok(Some((DirectRegion { region: place.region, bytes: high.cast_unsigned() }, low.cast_unsigned())))
    }

    /// Waits until the server has all of a body.
    fn await_body(&mut self, message: &mut Message, timeout: Duration) -> Result<(), QueueError> {
        if message.body.as_ref().is_some_and(|place| !self.pool.knows(place.region)) {
            return Err(QueueError::Direct {
                queue: message.queue.name.to_string(),
                source: DirectError::NoSuchRegion,
            });
        }
        let until = Instant::now() + timeout;
        while message.arriving {
            let queue = &message.queue;
            let request = match message.fetch.take() {
                Some(Fetch::Awaiting(request)) => request,
                _ => self.ask_body(queue, message.number, until.saturating_duration_since(Instant::now())),
            };
            let Some(reply) = self.queue_wait(queue.server, Opcode::AwaitBody, request, None) else {
                continue;
            };
            let reply = match self.judge(&queue.name, queue.server, Opcode::AwaitBody, reply) {
                Err(QueueError::BodyLost { queue, server, .. }) => {
                    return Err(QueueError::BodyLost { queue, server, number: message.number });
                }
                other => other?,
            };
            message.arriving = reply.arg == 0;
            if message.arriving && Instant::now() >= until {
                let server = self.pool.server_name(queue.server).to_owned();
                return Err(QueueError::BodyLate {
                    queue: queue.name.to_string(),
                    server,
                    number: message.number,
                });
            }
        }
        Ok(())
    }

    fn ask_body(&mut self, queue: &Queue, number: u64, timeout: Duration) -> u64 {
        let mut table = Vec::new();
        AwaitBody { number, timeout_ms: self.timeout_ms(timeout) }.encode(&mut table);
        self.pool.ask_queue(queue.server, Opcode::AwaitBody, queue.id, &table)
    }

    /// Begins to read a body; `None` if this process has no memory for what its sender says.
    fn start_get_place(&mut self, place: &Place) -> Option<Pending> {
        let bytes = place.program.bytes();
        let mut buffer = with_length(Vec::new(), bytes)?;
        let here = Program::run(0, bytes).expect("as long as what it is read from");
        let region = DirectRegion { region: place.region, bytes: u64::MAX };
        // SAFETY: the buffer's bytes do not move with it, and it is not touched or dropped before the
        // operation has ended or the pool is gone.
        let token =
            unsafe { self.begin(region, Job::Gather, &place.program, &here, buffer.as_mut_ptr()) }.ok()?;
        self.buffers.insert(token, buffer);
        Some(Pending { token })
    }

    /// Drops what was begun for a message.
    fn drop_fetch(&mut self, fetch: Option<Fetch>) {
        match fetch {
            Some(Fetch::Awaiting(request)) => self.pool.forget_queue_reply(request),
            Some(Fetch::Getting(pending)) => self.queues.dropped.push(pending.token),
            None => {}
        }
        let mut dropped = std::mem::take(&mut self.queues.dropped);
        dropped.retain(|token| {
            let over = self.take_ended(*token).is_some();
            if over {
                self.buffers.remove(token);
            }
            !over
        });
        self.queues.dropped = dropped;
    }

    // --- under the hood ------------------------------------------------------------------------------------

    /// Waits for an answer, which comes before the server counts as lost.
    fn queue_answer(
        &mut self,
        queue: &str,
        server: ServerIndex,
        opcode: Opcode,
        request: u64,
    ) -> Result<QueueReply, QueueError> {
        let reply = self
            .queue_wait(server, opcode, request, None)
            .expect("there is an answer if there is no deadline");
        self.judge(queue, server, opcode, reply)
    }

    /// Waits for an answer, or until the deadline.
    pub(super) fn queue_wait(
        &mut self,
        server: ServerIndex,
        opcode: Opcode,
        request: u64,
        deadline: Option<Instant>,
    ) -> Option<Result<QueueReply, PoolError>> {
        let mut waiting = Waiting::default();
        loop {
            if self.queues.with_bodies.is_empty() {
                self.pool.turn();
            } else {
                self.advance_sends();
            }
            if let Some(reply) = self.pool.queue_reply(server, opcode, request) {
                return Some(reply);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return None;
            }
            self.pause(&mut waiting, deadline.unwrap_or(now + Duration::from_secs(1)));
        }
    }

    /// Returns at once while there is time to spin; else sleeps until something comes.
    fn pause(&mut self, waiting: &mut Waiting, until: Instant) {
        if !self.spin.is_zero() && waiting.since.get_or_insert_with(Instant::now).elapsed() < self.spin {
            return;
        }
        self.pool.rest(until);
    }

    /// What an answer means.
    fn judge(
        &self,
        queue: &str,
        server: ServerIndex,
        opcode: Opcode,
        reply: Result<QueueReply, PoolError>,
    ) -> Result<QueueReply, QueueError> {
        let queue = queue.to_owned();
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => return Err(QueueError::Direct { queue, source: error.into() }),
        };
        let server = || self.pool.server_name(server).to_owned();
        match reply.status {
            Status::Ok => Ok(reply),
            Status::QueueFull => Err(QueueError::Full { queue, server: server(), messages: reply.arg }),
            Status::NoSuchQueue => Err(QueueError::NoSuchQueue { queue, server: server() }),
            Status::NoSuchMessage => Err(QueueError::BodyLost { queue, server: server(), number: 0 }),
            Status::PoolFull => Err(QueueError::NoRoom { queue, server: server(), free: ByteLen(reply.arg) }),
            _ => {
                let operation = crate::pool::operation_of(opcode);
                Err(QueueError::Refused { queue, server: server(), operation, message: reply.message })
            }
        }
    }

    /// As [`Direct::odd`], of a queue.
    fn nonsense(&self, queue: &str, server: ServerIndex, opcode: Opcode, what: impl ToString) -> QueueError {
        let source = self.odd(server, crate::pool::operation_of(opcode), what);
        QueueError::Direct { queue: queue.to_owned(), source }
    }

    /// The region of a queue's bodies. The same one, however often the queue is opened.
    fn told_region(&mut self, server: ServerIndex, region: RegionId) -> PoolRegion {
        let mut ids = vec![RegionId(0); self.pool.server_count()];
        ids[server.as_usize()] = region;
        let pool = &mut self.pool;
        *self.queues.told.entry(ids).or_insert_with(|| pool.remember_at(server, region))
    }

    fn timeout_ms(&self, timeout: Duration) -> u32 {
        u32::try_from(timeout.min(self.pool.longest_queue_wait()).as_micros().div_ceil(1000))
            .unwrap_or(u32::MAX)
    }
}

#[derive(Default)]
struct Waiting {
    since: Option<Instant>,
}
