//! Remote queues: the FIFOs of one lease (DIMMnet-3's IPUSH), with heads and bodies apart (its LHS, LHC and
//! HTP).
//!
//! ```text
//!   push ──> waiting for room ──> ready ──> held by a receiver ──> done
//!                                   ▲              │
//!                                   └──────────────┘  given back, or the receiver is gone: redelivered
//! ```
//! A sender names a queue, never an address. A queue is bounded in messages and bytes; a sender that finds it
//! full waits for room, in order of arrival, or is told that it is full. A message that was taken stays until
//! its receiver acknowledges it. When a receiver is lost, its messages are delivered again, before later
//! ones. A head is handed over at once, while its body may still arrive. Its receiver waits for the body with
//! [`Queues::await_body`], or acknowledges the message without it; then the rest of the body is received and
//! dropped, and the sender is not told. Bodies lie in pages of a region of the queue's own, where this module
//! assigns each its place; the code that stores them calls [`Queues::body_came`].
//!
//! **Once.** A request that its member repeats, because a connection broke before the answer came, is
//! recognised by its number: a message is appended once, and a repeated take gets the same messages. Members
//! have no more than [`REMEMBERED`] requests unanswered, so no more answers are remembered for each.
//!
//! Driven from outside: commands and [`Queues::handle_timeout`], then [`Queues::poll`] until `None`. No
//! command blocks; what has to wait is answered by a later output.
//!
//! Invariants of each queue: every message is `fresh` (not yet taken) or `taken`; numbers of fresh ones
//! ascend and are above those of taken ones; a taken one is held, `returned` or finished, and only one of it;
//! withdrawn ones are held; what is finished is missing bytes of its body; `bytes` is the sum of its
//! messages' costs, `<= bounds.bytes`; extents of bodies do not overlap; a sender waits only while its
//! message does not fit or others wait before it; a receiver waits only while nothing is ready.

use super::Tick;
use super::answers::Answers;
use rampool_wire::frame::REMEMBERED;
use rampool_wire::frame::{
    Body, Delivery, Listed, MAX_PAGE_INDEX, MAX_TABLE_BYTES, MemberId, Push, PushHeads, QueueBounds,
    RegionId, Settlement, Take,
};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What the server remembers of a message besides its head and reference, for accounting.
const MESSAGE_BYTES: u64 = 256;
/// Likewise of a queue.
const QUEUE_BYTES: u64 = 2048;
const _: () = assert!(REMEMBERED <= 256, "answers are searched one by one");

/// Names a queue within its lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct QueueId(pub u64);

/// The limits that a server sets for each lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueLimits {
    /// Queues of a lease.
    pub queues: usize,
    /// The most that a queue's bounds may be.
    pub bounds: QueueBounds,
}

impl Default for QueueLimits {
    fn default() -> Self {
        Self { queues: 1024, bounds: QueueBounds { messages: 1 << 20, bytes: 1 << 40 } }
    }
}

/// The requester, and where the reply goes; the meaning of the latter is the runtime's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asker {
    pub member: MemberId,
    pub request: u64,
    pub origin: (usize, u64),
}

/// Why a queue refused a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    #[error("no such queue in this lease")]
    NoSuchQueue,
    #[error("a lease can have {0} queues at this server")]
    TooManyQueues(usize),
    #[error("a queue at this server has from 1 to {messages} messages and from 1 to {bytes} bytes")]
    Bounds { messages: u64, bytes: u64 },
    #[error("the message has {needs} bytes, the queue has room for {most} at most")]
    TooLong { needs: u64, most: u64 },
    #[error("the queue is full: {messages} messages are in it")]
    Full { messages: u64 },
    #[error("{count} messages at once do not fit: the queue holds {most} at most")]
    TooMany { count: u64, most: u64 },
    #[error("no such message, or it is not this member's")]
    NoSuchMessage,
    #[error("the sender of the message was lost, or took it back, before its body was there")]
    BodyLost,
}

/// Outputs, to be carried out in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Output {
    /// The message is in the queue; its body goes to this byte of the queue's region. Of several, the number
    /// is the first one's.
    Pushed { to: Asker, number: u64, body_at: Option<u64> },
    /// Messages for a receiver, or none if it timed out. [`Queues::delivery`] has them until the next
    /// command.
    Taken { to: Asker, queue: QueueId, numbers: Vec<u64> },
    /// The body is complete, or the request timed out before.
    Body { to: Asker, there: bool },
    /// The request failed.
    Failed { to: Asker, error: QueueError },
    /// These pages of a queue's region are free again.
    Free { region: RegionId, extent: Extent },
}

/// Counts since the queue was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QueueCounts {
    pub pushed: u64,
    pub done: u64,
    pub redelivered: u64,
    /// Messages whose sender was lost before their body was complete.
    pub withdrawn: u64,
    /// Senders that were told that it is full.
    pub refused: u64,
}

/// The queues of one lease.
#[derive(Debug)]
pub struct Queues {
    limits: QueueLimits,
    queues: BTreeMap<QueueId, Queue>,
    names: BTreeMap<String, QueueId>,
    regions: BTreeMap<RegionId, QueueId>,
    /// The messages that each member's latest requests have appended.
    pushed: BTreeMap<MemberId, Answers>,
    outputs: VecDeque<Output>,
    memory_bytes: u64,
    next: u64,
}

#[derive(Debug)]
struct Queue {
    name: String,
    bounds: QueueBounds,
    region: RegionId,
    /// By ascending numbers.
    fresh: VecDeque<(u64, Message)>,
    taken: BTreeMap<u64, Message>,
    /// The taken messages that no receiver holds any more: they are handed out again, before fresh ones.
    returned: BTreeSet<u64>,
    /// By receiver and the request that took them.
    held: BTreeMap<(MemberId, u64), Handful>,
    /// Bodies: first page, and pages.
    extents: BTreeMap<u64, (u32, u64)>,
    bytes: u64,
    next_number: u64,
    next_page: u64,
    senders: VecDeque<WaitingSender>,
    receivers: VecDeque<WaitingReceiver>,
    for_bodies: Vec<WaitingForBody>,
    counts: QueueCounts,
}

/// What one request took.
#[derive(Debug)]
struct Handful {
    /// In order; also those that were settled meanwhile.
    numbers: Vec<u64>,
    /// How many of them are still held. `> 0`.
    left: usize,
}

#[derive(Debug)]
struct Message {
    sender: MemberId,
    head: Box<[u8]>,
    body: OwnBody,
    /// Bytes of the body that have not come.
    missing: u64,
    /// Its body will never be complete; its receiver has not been told yet.
    withdrawn: bool,
    /// A receiver is done with it; it goes when all of its body has come.
    finished: bool,
    redelivered: bool,
    holder: Option<(MemberId, u64)>,
}

#[derive(Debug)]
enum OwnBody {
    None,
    Bytes { bytes: u64, at: Extent },
    InPool { bytes: u64, reference: Box<[u8]> },
}

#[derive(Debug)]
struct WaitingSender {
    asker: Asker,
    until: Tick,
    /// They enter the queue together. At least one.
    messages: Vec<Message>,
}

impl WaitingSender {
    fn cost(&self) -> u64 {
        self.messages.iter().map(Message::cost).sum()
    }
}

#[derive(Debug)]
struct WaitingReceiver {
    asker: Asker,
    until: Tick,
    most: usize,
}

#[derive(Debug)]
struct WaitingForBody {
    asker: Asker,
    until: Tick,
    number: u64,
}

impl Message {
    /// [`Queues::needs`] must have been called for its length.
    fn new(sender: MemberId, push: &Push<'_>) -> Self {
        let body = match push.body {
            Body::None => OwnBody::None,
            // Its place is found when it enters the queue.
            Body::Bytes(bytes) => OwnBody::Bytes {
                bytes,
                at: Extent::new(PageIndex(0), pages(bytes).expect("asked about before")),
            },
            Body::InPool(bytes, reference) => OwnBody::InPool { bytes, reference: reference.into() },
        };
        let missing = if let Body::Bytes(bytes) = push.body { bytes } else { 0 };
        Self {
            sender,
            head: push.head.into(),
            body,
            missing,
            withdrawn: false,
            finished: false,
            redelivered: false,
            holder: None,
        }
    }

    /// Bytes that count against the queue's bound.
    fn cost(&self) -> u64 {
        self.head.len() as u64 + if let OwnBody::Bytes { bytes, .. } = self.body { bytes } else { 0 }
    }

    /// Bytes of the server's memory besides pages of bodies.
    fn memory_bytes(&self) -> u64 {
        MESSAGE_BYTES + self.head.len() as u64 + self.reference().len() as u64
    }

    fn reference(&self) -> &[u8] {
        if let OwnBody::InPool { reference, .. } = &self.body { reference } else { &[] }
    }
}

/// [`Message::cost`] of one that is not made yet.
fn cost_of(head: &[u8], body: Body<'_>) -> u64 {
    head.len() as u64 + if let Body::Bytes(bytes) = body { bytes } else { 0 }
}

fn pages(bytes: u64) -> Option<u32> {
    u32::try_from(bytes.div_ceil(OS_PAGE_BYTES as u64)).ok()
}

fn first_byte(extent: Extent) -> u64 {
    extent.first.0 * OS_PAGE_BYTES as u64
}

impl Queues {
    #[must_use]
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            limits,
            queues: BTreeMap::new(),
            names: BTreeMap::new(),
            regions: BTreeMap::new(),
            pushed: BTreeMap::new(),
            outputs: VecDeque::new(),
            memory_bytes: 0,
            next: 1,
        }
    }

    /// The queue of this name, its region and its bounds.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`].
    pub fn find(&self, name: &str) -> Result<(QueueId, RegionId, QueueBounds), QueueError> {
        let id = *self.names.get(name).ok_or(QueueError::NoSuchQueue)?;
        let queue = &self.queues[&id];
        Ok((id, queue.region, queue.bounds))
    }

    /// Whether there may be one more queue, with these bounds.
    ///
    /// # Errors
    /// [`QueueError::TooManyQueues`] or [`QueueError::Bounds`].
    pub fn may_add(&self, bounds: QueueBounds) -> Result<(), QueueError> {
        let most = self.limits.bounds;
        if !(1..=most.messages).contains(&bounds.messages) || !(1..=most.bytes).contains(&bounds.bytes) {
            return Err(QueueError::Bounds { messages: most.messages, bytes: most.bytes });
        }
        if self.queues.len() >= self.limits.queues {
            return Err(QueueError::TooManyQueues(self.limits.queues));
        }
        Ok(())
    }

    /// Makes a queue, whose bodies will lie in `region`.
    ///
    /// # Panics
    /// If there is one of this name, or there [may](Self::may_add) be none.
    pub fn add(&mut self, name: &str, bounds: QueueBounds, region: RegionId) -> QueueId {
        self.may_add(bounds).expect("it was checked before");
        let id = QueueId(self.next);
        self.next += 1;
        assert!(self.names.insert(name.to_owned(), id).is_none(), "two queues of one name");
        self.regions.insert(region, id);
        let queue = Queue {
            name: name.to_owned(),
            bounds,
            region,
            fresh: VecDeque::new(),
            taken: BTreeMap::new(),
            returned: BTreeSet::new(),
            held: BTreeMap::new(),
            extents: BTreeMap::new(),
            bytes: 0,
            next_number: 1,
            next_page: 0,
            senders: VecDeque::new(),
            receivers: VecDeque::new(),
            for_bodies: Vec::new(),
            counts: QueueCounts::default(),
        };
        self.queues.insert(id, queue);
        self.memory_bytes += QUEUE_BYTES;
        id
    }

    /// Removes a queue and answers its waiting requests. Returns its region, which the caller frees with all
    /// it holds.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`].
    pub fn remove(&mut self, id: QueueId) -> Result<RegionId, QueueError> {
        let queue = self.queues.remove(&id).ok_or(QueueError::NoSuchQueue)?;
        self.names.remove(&queue.name);
        self.regions.remove(&queue.region);
        let askers = queue.senders.iter().map(|w| w.asker).chain(queue.receivers.iter().map(|w| w.asker));
        for to in askers.chain(queue.for_bodies.iter().map(|w| w.asker)) {
            self.outputs.push_back(Output::Failed { to, error: QueueError::NoSuchQueue });
        }
        let messages = queue.messages().map(|(_, m)| m).chain(queue.senders.iter().flat_map(|w| &w.messages));
        self.memory_bytes -= QUEUE_BYTES + messages.map(Message::memory_bytes).sum::<u64>();
        Ok(queue.region)
    }

    /// Bytes of memory that a message would take: besides pages, and pages.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`], or [`QueueError::TooLong`] if the queue will never have room for it.
    pub fn needs(&self, id: QueueId, push: &Push<'_>) -> Result<(u64, u64), QueueError> {
        let queue = self.queues.get(&id).ok_or(QueueError::NoSuchQueue)?;
        let own = if let Body::Bytes(bytes) = push.body { bytes } else { 0 };
        let (needs, most) = ((push.head.len() as u64).saturating_add(own), queue.bounds.bytes);
        let pages = pages(own).filter(|_| needs <= most).ok_or(QueueError::TooLong { needs, most })?;
        Ok((
            MESSAGE_BYTES + push.head.len() as u64 + push.body.reference().len() as u64,
            u64::from(pages) * OS_PAGE_BYTES as u64,
        ))
    }

    /// Bytes of memory that several messages without bodies would take.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`], or [`QueueError::TooLong`] or [`QueueError::TooMany`] if the queue will
    /// never have room for all of them.
    pub fn heads_need(&self, id: QueueId, heads: &PushHeads<'_>) -> Result<u64, QueueError> {
        let bounds = self.queues.get(&id).ok_or(QueueError::NoSuchQueue)?.bounds;
        let needs = heads.heads().map(|head| head.len() as u64).sum();
        if heads.count() > bounds.messages {
            return Err(QueueError::TooMany { count: heads.count(), most: bounds.messages });
        }
        if needs > bounds.bytes {
            return Err(QueueError::TooLong { needs, most: bounds.bytes });
        }
        Ok(heads.count() * MESSAGE_BYTES + needs)
    }

    /// Whether this very request has appended its message already.
    #[must_use]
    pub fn has_pushed(&self, asker: &Asker) -> bool {
        self.pushed.get(&asker.member).is_some_and(|pushed| pushed.get(asker.request).is_some())
    }

    /// Appends a message, now or when there is room. Ends in [`Output::Pushed`] or [`Output::Failed`].
    pub fn push(&mut self, now: Tick, asker: Asker, id: QueueId, push: &Push<'_>) {
        let may = self.needs(id, push).map(|_| ());
        self.enter(asker, id, may, (now, push.timeout_ms), std::iter::once(*push));
    }

    /// Appends several messages without bodies, all of them now or when there is room for all; no other
    /// message comes between. Ends in [`Output::Pushed`] or [`Output::Failed`].
    pub fn push_heads(&mut self, now: Tick, asker: Asker, id: QueueId, heads: &PushHeads<'_>) {
        let (may, timeout_ms) = (self.heads_need(id, heads).map(|_| ()), heads.timeout_ms);
        let pushes = heads.heads().map(|head| Push { timeout_ms, head, body: Body::None });
        self.enter(asker, id, may, (now, timeout_ms), pushes);
    }

    fn enter<'a>(
        &mut self,
        asker: Asker,
        id: QueueId,
        may: Result<(), QueueError>,
        (now, timeout_ms): (Tick, u32),
        pushes: impl Iterator<Item = Push<'a>> + Clone,
    ) {
        if let Some(number) = self.pushed.get(&asker.member).and_then(|pushed| pushed.get(asker.request)) {
            let message = self.queues.get(&id).and_then(|queue| queue.get(number));
            let body_at = message.and_then(|m| {
                if let OwnBody::Bytes { at, .. } = m.body { Some(first_byte(at)) } else { None }
            });
            self.outputs.push_back(Output::Pushed { to: asker, number, body_at });
            return;
        }
        if let Err(error) = may {
            self.outputs.push_back(Output::Failed { to: asker, error });
            return;
        }
        let queue = self.queues.get_mut(&id).expect("asked about above");
        // One that waits already takes its place at the end.
        queue.forget_senders(|waiting| waiting.is_same(&asker), &mut self.memory_bytes);
        let (count, cost) = pushes
            .clone()
            .fold((0, 0), |(count, cost), push| (count + 1, cost + cost_of(push.head, push.body)));
        if queue.senders.is_empty() && queue.has_room(count, cost) {
            // The usual case: no sender waits.
            let memory_bytes = &mut self.memory_bytes;
            let places = pushes.map(|push| {
                let message = Message::new(asker.member, &push);
                *memory_bytes += message.memory_bytes();
                queue.append(message)
            });
            let (number, body_at) = places.reduce(|first, _| first).expect("one message at least");
            self.pushed.entry(asker.member).or_default().insert(asker.request, number);
            self.outputs.push_back(Output::Pushed { to: asker, number, body_at });
            return self.hand_out(id);
        }
        let messages: Vec<Message> = pushes.map(|push| Message::new(asker.member, &push)).collect();
        self.memory_bytes += messages.iter().map(Message::memory_bytes).sum::<u64>();
        queue.senders.push_back(WaitingSender { asker, until: now.after(timeout_ms), messages });
        self.advance(id);
        if timeout_ms == 0 {
            self.end_waits(id, |_| false, |waiting| waiting.is_same(&asker));
        }
    }

    /// Takes messages, now or when there are any, after acknowledging others. Ends in [`Output::Taken`] or
    /// [`Output::Failed`].
    pub fn take(&mut self, now: Tick, asker: Asker, id: QueueId, take: &Take) {
        if self.settle(asker.member, id, &take.acknowledged, Settlement::Done).is_err() {
            self.outputs.push_back(Output::Failed { to: asker, error: QueueError::NoSuchQueue });
            return;
        }
        let queue = self.queues.get_mut(&id).expect("settled above");
        let holder = (asker.member, asker.request);
        if let Some(handful) = queue.held.get(&holder) {
            // It was answered, and the answer was lost with its connection.
            let numbers =
                handful.numbers.iter().copied().filter(|number| queue.is_held(*number, holder)).collect();
            self.outputs.push_back(Output::Taken { to: asker, queue: id, numbers });
            return;
        }
        queue.receivers.retain(|waiting| !waiting.asker.is_same(&asker));
        queue.receivers.push_back(WaitingReceiver {
            asker,
            until: now.after(take.timeout_ms),
            most: take.most.into(),
        });
        self.advance(id);
        if take.timeout_ms == 0 {
            self.end_waits(id, |_| false, |waiting| waiting.is_same(&asker));
        }
    }

    /// Acknowledges messages, gives them back, or withdraws them. One that ends while its body is on its way
    /// keeps its room until the body is complete. Messages that do not exist or are not the member's are
    /// skipped: they may have been settled before. Returns how many were settled.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`].
    pub fn settle(
        &mut self,
        member: MemberId,
        id: QueueId,
        numbers: &[u64],
        how: Settlement,
    ) -> Result<u64, QueueError> {
        let queue = self.queues.get_mut(&id).ok_or(QueueError::NoSuchQueue)?;
        let mut settled = 0;
        for number in numbers {
            let Some(message) = queue.get(*number) else { continue };
            let holder = message.holder.filter(|(holder, _)| *holder == member);
            match (how, holder) {
                (Settlement::Done, Some(_)) => {
                    queue.counts.done += 1;
                    queue.finish(*number, &mut self.memory_bytes, &mut self.outputs);
                }
                (Settlement::Return, Some(_)) => {
                    queue.release(*number, &mut self.memory_bytes, &mut self.outputs)
                }
                (Settlement::Withdraw, _) if message.sender == member && message.missing > 0 => {
                    queue.withdraw(*number, &mut self.memory_bytes, &mut self.outputs);
                }
                _ => continue,
            }
            settled += 1;
        }
        if settled > 0 {
            self.advance(id);
        }
        Ok(settled)
    }

    /// Waits until the body of a message is there. Ends in [`Output::Body`] or [`Output::Failed`]. A message
    /// whose holder is told that its body is lost is removed from the queue; if that answer is lost, the
    /// repeated request finds no such message.
    pub fn await_body(&mut self, now: Tick, asker: Asker, id: QueueId, number: u64, timeout_ms: u32) {
        let message = self.queues.get(&id).ok_or(QueueError::NoSuchQueue).and_then(|queue| {
            let message =
                queue.get(number).filter(|m| m.holder.is_some_and(|(holder, _)| holder == asker.member));
            message.ok_or(QueueError::NoSuchMessage)
        });
        let output = match message {
            Err(error) => Output::Failed { to: asker, error },
            Ok(message) if message.withdrawn => {
                self.outputs.push_back(Output::Failed { to: asker, error: QueueError::BodyLost });
                let queue = self.queues.get_mut(&id).expect("looked at above");
                queue.drop_message(number, &mut self.memory_bytes, &mut self.outputs);
                return self.advance(id);
            }
            Ok(message) if message.missing == 0 => Output::Body { to: asker, there: true },
            Ok(_) if timeout_ms == 0 => Output::Body { to: asker, there: false },
            Ok(_) => {
                let queue = self.queues.get_mut(&id).expect("looked at above");
                queue.for_bodies.retain(|waiting| !waiting.asker.is_same(&asker));
                queue.for_bodies.push(WaitingForBody { asker, until: now.after(timeout_ms), number });
                return;
            }
        };
        self.outputs.push_back(output);
    }

    /// Whether a member may store these bytes of a queue's region: they are within the body of a message of
    /// its own that is on its way. True for regions of no queue.
    #[must_use]
    pub fn may_store(&self, member: MemberId, region: RegionId, from: u64, end: u64) -> bool {
        let Some(id) = self.regions.get(&region) else { return true };
        let queue = &self.queues[id];
        let Some((first, number)) = queue.body_of(from) else { return false };
        let message = queue.get(number).expect("extents are of messages");
        let OwnBody::Bytes { bytes, .. } = message.body else { unreachable!("extents are of bodies") };
        message.sender == member
            && message.missing > 0
            && !message.withdrawn
            && end <= first * OS_PAGE_BYTES as u64 + bytes
    }

    /// So many bytes of a body have been stored, from this byte of the queue's region on.
    pub fn body_came(&mut self, region: RegionId, from: u64, bytes: u64) {
        let Some(id) = self.regions.get(&region) else { return };
        let queue = self.queues.get_mut(id).expect("regions are those of queues");
        let Some((_, number)) = queue.body_of(from) else { return };
        let message = queue.get_mut(number).expect("extents are of messages");
        message.missing = message.missing.saturating_sub(bytes);
        if message.missing == 0 && message.finished {
            queue.drop_message(number, &mut self.memory_bytes, &mut self.outputs);
            let id = *id;
            return self.advance(id);
        }
        if message.missing == 0 {
            let outputs = &mut self.outputs;
            queue.for_bodies.retain(|waiting| {
                if waiting.number == number {
                    outputs.push_back(Output::Body { to: waiting.asker, there: true });
                }
                waiting.number != number
            });
        }
    }

    /// The region holds bodies, and nothing else.
    #[must_use]
    pub fn owns(&self, region: RegionId) -> bool {
        self.regions.contains_key(&region)
    }

    /// The member's connection broke, or was replaced: its pending requests are dropped, and it asks again
    /// over the new one.
    pub fn disconnected(&mut self, member: MemberId) {
        self.forget_waits(member);
        // The request behind it may be next.
        self.advance_all();
    }

    fn forget_waits(&mut self, member: MemberId) {
        for queue in self.queues.values_mut() {
            queue.forget_senders(|waiting| waiting.member == member, &mut self.memory_bytes);
            queue.receivers.retain(|waiting| waiting.asker.member != member);
            queue.for_bodies.retain(|waiting| waiting.asker.member != member);
        }
    }

    /// The member is gone for good: what it held goes to others, and its incomplete bodies are lost.
    pub fn member_gone(&mut self, member: MemberId) {
        // Nothing is handed out before what it held is back in the queue: that goes first.
        self.forget_waits(member);
        self.pushed.remove(&member);
        for queue in self.queues.values_mut() {
            let held = queue
                .taken
                .iter()
                .filter(|(_, m)| m.holder.is_some_and(|(holder, _)| holder == member))
                .map(|(number, _)| *number);
            for number in held.collect::<Vec<u64>>() {
                queue.release(number, &mut self.memory_bytes, &mut self.outputs);
            }
            let unsent = queue
                .messages()
                .filter(|(_, m)| m.sender == member && m.missing > 0 && !m.withdrawn)
                .map(|(number, _)| number);
            for number in unsent.collect::<Vec<u64>>() {
                queue.withdraw(number, &mut self.memory_bytes, &mut self.outputs);
            }
        }
        self.advance_all();
    }

    /// Answers the requests that have timed out.
    pub fn handle_timeout(&mut self, now: Tick) {
        for id in self.queues.keys().copied().collect::<Vec<_>>() {
            self.end_waits(id, |until| until <= now, |_| false);
        }
    }

    /// When [`Queues::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Tick> {
        let waits = self.queues.values().flat_map(|queue| {
            let senders = queue.senders.iter().map(|w| w.until);
            senders
                .chain(queue.receivers.iter().map(|w| w.until))
                .chain(queue.for_bodies.iter().map(|w| w.until))
        });
        waits.min()
    }

    /// The next output. Call until `None` after each command, before the next.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// A message that was just taken.
    ///
    /// # Panics
    /// If it is not there.
    #[must_use]
    pub fn delivery(&self, id: QueueId, number: u64) -> Delivery<'_> {
        let message = self.queues[&id].get(number).expect("a message that was just taken");
        let (body, body_at) = match &message.body {
            OwnBody::None => (Body::None, 0),
            OwnBody::Bytes { bytes, at } => (Body::Bytes(*bytes), first_byte(*at)),
            OwnBody::InPool { bytes, reference } => (Body::InPool(*bytes, reference), 0),
        };
        let arriving = message.missing > 0;
        Delivery { number, redelivered: message.redelivered, arriving, head: &message.head, body, body_at }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.queues.len()
    }

    /// The queues with numbers above `after`, for the status.
    pub fn list(&self, after: QueueId) -> impl Iterator<Item = (Listed, QueueCounts)> {
        self.queues.range(QueueId(after.0.saturating_add(1))..).map(|(id, queue)| {
            let listed = Listed {
                queue: id.0,
                messages: queue.len(),
                held: queue.held.values().map(|handful| handful.left as u64).sum(),
                bytes: queue.bytes,
                waiting_senders: queue.senders.len() as u64,
                waiting_receivers: queue.receivers.len() as u64,
                most_messages: queue.bounds.messages,
                name: queue.name.clone(),
            };
            (listed, queue.counts)
        })
    }

    /// Bytes of the server's memory besides pages of bodies.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        assert!(self.outputs.is_empty(), "outputs were not fetched");
        assert!(
            self.queues.len() <= self.limits.queues
                && self.names.len() == self.queues.len()
                && self.regions.len() == self.queues.len()
        );
        let mut memory = self.queues.len() as u64 * QUEUE_BYTES;
        for queue in self.queues.values() {
            memory += queue
                .messages()
                .map(|(_, m)| m)
                .chain(queue.senders.iter().flat_map(|w| &w.messages))
                .map(Message::memory_bytes)
                .sum::<u64>();
            queue.check();
        }
        self.pushed.values().for_each(Answers::check);
        assert_eq!(memory, self.memory_bytes, "memory of messages");
    }

    fn advance_all(&mut self) {
        for id in self.queues.keys().copied().collect::<Vec<_>>() {
            self.advance(id);
        }
    }

    /// Admits senders that wait for room, and hands out what is ready.
    fn advance(&mut self, id: QueueId) {
        let queue = self.queues.get_mut(&id).expect("a queue that is there");
        while let Some(first) = queue.senders.front()
            && queue.has_room(first.messages.len(), first.cost())
        {
            let WaitingSender { asker, messages, .. } = queue.senders.pop_front().expect("seen above");
            let mut first = None;
            for message in messages {
                let place = queue.append(message);
                first.get_or_insert(place);
            }
            let (number, body_at) = first.expect("one message at least");
            self.pushed.entry(asker.member).or_default().insert(asker.request, number);
            self.outputs.push_back(Output::Pushed { to: asker, number, body_at });
        }
        self.hand_out(id);
    }

    /// Hands out what is ready.
    fn hand_out(&mut self, id: QueueId) {
        let queue = self.queues.get_mut(&id).expect("a queue that is there");
        while queue.is_anything_ready()
            && let Some(WaitingReceiver { asker, most, .. }) = queue.receivers.pop_front()
        {
            let numbers = queue.hand_out((asker.member, asker.request), most);
            self.outputs.push_back(Output::Taken { to: asker, queue: id, numbers });
        }
    }

    /// Ends the waits that are over, by their deadline or because their member is gone.
    fn end_waits(&mut self, id: QueueId, over: impl Fn(Tick) -> bool, of: impl Fn(&Asker) -> bool) {
        let Self { queues, outputs, memory_bytes, .. } = self;
        let queue = queues.get_mut(&id).expect("a queue that is there");
        let messages = queue.len();
        let ends = |asker: &Asker, until: Tick| over(until) || of(asker);
        let before = queue.senders.len();
        queue.senders.retain(|waiting| {
            let stays = !ends(&waiting.asker, waiting.until);
            if !stays {
                queue.counts.refused += 1;
                *memory_bytes -= waiting.messages.iter().map(Message::memory_bytes).sum::<u64>();
                outputs.push_back(Output::Failed { to: waiting.asker, error: QueueError::Full { messages } });
            }
            stays
        });
        let left = queue.senders.len() < before;
        queue.receivers.retain(|waiting| {
            let stays = !ends(&waiting.asker, waiting.until);
            if !stays {
                outputs.push_back(Output::Taken { to: waiting.asker, queue: id, numbers: Vec::new() });
            }
            stays
        });
        queue.for_bodies.retain(|waiting| {
            let stays = !ends(&waiting.asker, waiting.until);
            if !stays {
                outputs.push_back(Output::Body { to: waiting.asker, there: false });
            }
            stays
        });
        if left {
            // A sender with a shorter message may wait behind it.
            self.advance(id);
        }
    }
}

impl Queue {
    /// Messages in it.
    fn len(&self) -> u64 {
        (self.fresh.len() + self.taken.len()) as u64
    }

    /// All of them, by their numbers.
    fn messages(&self) -> impl Iterator<Item = (u64, &Message)> {
        self.taken
            .iter()
            .map(|(number, message)| (*number, message))
            .chain(self.fresh.iter().map(|(number, message)| (*number, message)))
    }

    fn fresh_at(&self, number: u64) -> Option<usize> {
        self.fresh.binary_search_by_key(&number, |(number, _)| *number).ok()
    }

    fn get(&self, number: u64) -> Option<&Message> {
        self.taken.get(&number).or_else(|| Some(&self.fresh[self.fresh_at(number)?].1))
    }

    fn get_mut(&mut self, number: u64) -> Option<&mut Message> {
        if let Some(at) = self.fresh_at(number) {
            return Some(&mut self.fresh[at].1);
        }
        self.taken.get_mut(&number)
    }

    fn is_held(&self, number: u64, by: (MemberId, u64)) -> bool {
        self.taken.get(&number).is_some_and(|message| message.holder == Some(by))
    }

    fn is_anything_ready(&self) -> bool {
        !self.returned.is_empty() || !self.fresh.is_empty()
    }

    /// Gives a receiver as many messages as it wants, are ready and fit one answer: those that were given
    /// back before others.
    fn hand_out(&mut self, holder: (MemberId, u64), most: usize) -> Vec<u64> {
        let (mut numbers, mut room) =
            (Vec::with_capacity(most.min(self.returned.len() + self.fresh.len())), MAX_TABLE_BYTES);
        let mut fits = |message: &Message| {
            let coded = Delivery::coded_bytes(message.head.len(), message.reference().len());
            let fits = coded <= room;
            room -= if fits { coded } else { 0 };
            fits
        };
        while numbers.len() < most {
            if let Some(number) = self.returned.first() {
                let message = self.taken.get_mut(number).expect("returned messages are taken ones");
                if !fits(message) {
                    break;
                }
                message.holder = Some(holder);
                numbers.extend(self.returned.pop_first());
            } else if let Some((_, message)) = self.fresh.front() {
                if !fits(message) {
                    break;
                }
                let (number, mut message) = self.fresh.pop_front().expect("seen above");
                message.holder = Some(holder);
                self.taken.insert(number, message);
                numbers.push(number);
            } else {
                break;
            }
        }
        self.held.insert(holder, Handful { left: numbers.len(), numbers: numbers.clone() });
        numbers
    }

    fn has_room(&self, messages: usize, cost: u64) -> bool {
        messages as u64 <= self.bounds.messages - self.len() && cost <= self.bounds.bytes - self.bytes
    }

    fn append(&mut self, mut message: Message) -> (u64, Option<u64>) {
        let number = self.next_number;
        self.next_number += 1;
        self.bytes += message.cost();
        self.counts.pushed += 1;
        let mut body_at = None;
        if let OwnBody::Bytes { at, .. } = &mut message.body {
            *at = self.find_place(at.count);
            self.extents.insert(at.first.0, (at.count, number));
            body_at = Some(first_byte(*at));
        }
        self.fresh.push_back((number, message));
        (number, body_at)
    }

    fn forget_senders(&mut self, gone: impl Fn(&Asker) -> bool, memory_bytes: &mut u64) {
        self.senders.retain(|waiting| {
            let stays = !gone(&waiting.asker);
            if !stays {
                *memory_bytes -= waiting.messages.iter().map(Message::memory_bytes).sum::<u64>();
            }
            stays
        });
    }

    /// The next pages that no body has. They come around after 4 PiB.
    fn find_place(&mut self, count: u32) -> Extent {
        let mut first = self.next_page;
        loop {
            if first + u64::from(count) > MAX_PAGE_INDEX {
                first = 0;
            }
            let before = self.extents.range(..first + u64::from(count)).next_back();
            match before {
                Some((other, (pages, _))) if other + u64::from(*pages) > first => {
                    first = other + u64::from(*pages)
                }
                _ => break,
            }
        }
        self.next_page = first + u64::from(count);
        Extent::new(PageIndex(first), count)
    }

    /// The first page and the message of the body that this byte of the region is in.
    fn body_of(&self, byte: u64) -> Option<(u64, u64)> {
        let page = byte / OS_PAGE_BYTES as u64;
        let (first, (pages, number)) = self.extents.range(..=page).next_back()?;
        (page < first + u64::from(*pages)).then_some((*first, *number))
    }

    /// A message that a receiver holds is handed to others again.
    fn release(&mut self, number: u64, memory_bytes: &mut u64, outputs: &mut VecDeque<Output>) {
        let message = self.taken.get_mut(&number).expect("held messages are taken");
        let holder = message.holder.take().expect("it is held");
        message.redelivered = true;
        let withdrawn = message.withdrawn;
        self.forget_holder(holder);
        self.for_bodies.retain(|waiting| waiting.number != number || waiting.asker.member != holder.0);
        self.returned.insert(number);
        if withdrawn {
            self.drop_message(number, memory_bytes, outputs);
        } else {
            self.counts.redelivered += 1;
        }
    }

    /// Its holder is done with a message, which goes, or waits for the rest of its body.
    fn finish(&mut self, number: u64, memory_bytes: &mut u64, outputs: &mut VecDeque<Output>) {
        let message = self.taken.get_mut(&number).expect("held messages are taken");
        if message.missing == 0 || message.withdrawn {
            return self.drop_message(number, memory_bytes, outputs);
        }
        message.finished = true;
        let holder = message.holder.take().expect("it is held");
        self.forget_holder(holder);
        self.end_waits_for_body(number, QueueError::NoSuchMessage, outputs);
    }

    fn end_waits_for_body(&mut self, number: u64, error: QueueError, outputs: &mut VecDeque<Output>) {
        self.for_bodies.retain(|waiting| {
            if waiting.number == number {
                outputs.push_back(Output::Failed { to: waiting.asker, error });
            }
            waiting.number != number
        });
    }

    /// The body of a message will never be complete.
    fn withdraw(&mut self, number: u64, memory_bytes: &mut u64, outputs: &mut VecDeque<Output>) {
        let message = self.get_mut(number).expect("the caller has seen it");
        message.withdrawn = true;
        // What a receiver was done with is counted as done.
        let counts = !message.finished;
        let is_held = message.holder.is_some();
        self.counts.withdrawn += u64::from(counts);
        let waits = self.for_bodies.len();
        self.end_waits_for_body(number, QueueError::BodyLost, outputs);
        // A receiver that holds it and does not wait for it learns of it when it asks for the body or
        // acknowledges the message.
        if !is_held || self.for_bodies.len() < waits {
            self.drop_message(number, memory_bytes, outputs);
        }
    }

    fn drop_message(&mut self, number: u64, memory_bytes: &mut u64, outputs: &mut VecDeque<Output>) {
        let message = match self.taken.remove(&number) {
            Some(message) => message,
            None => {
                self.fresh_at(number).and_then(|at| self.fresh.remove(at)).expect("the caller has seen it").1
            }
        };
        match message.holder {
            Some(holder) => self.forget_holder(holder),
            None => _ = self.returned.remove(&number),
        }
        self.end_waits_for_body(number, QueueError::NoSuchMessage, outputs);
        self.bytes -= message.cost();
        *memory_bytes -= message.memory_bytes();
        if let OwnBody::Bytes { at, .. } = message.body {
            self.extents.remove(&at.first.0);
            outputs.push_back(Output::Free { region: self.region, extent: at });
        }
    }

    fn forget_holder(&mut self, holder: (MemberId, u64)) {
        let handful = self.held.get_mut(&holder).expect("holders are listed");
        handful.left -= 1;
        if handful.left == 0 {
            self.held.remove(&holder);
        }
    }

    fn check(&self) {
        assert!(self.len() <= self.bounds.messages);
        assert_eq!(self.bytes, self.messages().map(|(_, m)| m.cost()).sum::<u64>(), "bytes of messages");
        assert!(self.bytes <= self.bounds.bytes);
        assert!(
            self.messages().is_sorted_by(|(a, _), (b, _)| a < b)
                && self.messages().all(|(number, _)| number < self.next_number)
        );
        for (holder, handful) in &self.held {
            let held = handful.numbers.iter().filter(|number| self.is_held(**number, *holder)).count();
            assert!(held == handful.left && held > 0, "a handful is listed while some of it is held");
        }
        let finished = self.taken.values().filter(|message| message.finished).count();
        assert_eq!(
            self.held.values().map(|h| h.left).sum::<usize>() + self.returned.len() + finished,
            self.taken.len(),
            "a taken message is held, returned or finished"
        );
        assert!(
            self.fresh
                .iter()
                .all(|(_, message)| message.holder.is_none() && !message.withdrawn && !message.finished)
        );
        assert!(self.taken.values().all(|m| !m.finished || (m.holder.is_none() && m.missing > 0)));
        assert!(self.returned.iter().all(|number| !self.taken[number].finished));
        assert!(self.returned.iter().all(|number| self.taken[number].holder.is_none()));
        for (number, message) in self.messages() {
            assert!(!message.withdrawn || message.holder.is_some());
            if let OwnBody::Bytes { at, .. } = message.body {
                assert_eq!(self.extents.get(&at.first.0), Some(&(at.count, number)));
            } else {
                assert_eq!(message.missing, 0);
            }
        }
        let mut end = 0;
        for (first, (pages, number)) in &self.extents {
            assert!(*first >= end && self.get(*number).is_some(), "bodies do not overlap");
            end = first + u64::from(*pages);
        }
        assert!(
            self.senders.front().is_none_or(|first| !self.has_room(first.messages.len(), first.cost())),
            "a sender waits for room that is there"
        );
        assert!(
            self.receivers.is_empty() || !self.is_anything_ready(),
            "a receiver waits for a message that is there"
        );
        assert!(
            self.for_bodies
                .iter()
                .all(|waiting| self.get(waiting.number).is_some_and(|m| m.missing > 0 && !m.withdrawn))
        );
    }
}

impl Asker {
    /// The same request, perhaps over another connection.
    fn is_same(&self, other: &Self) -> bool {
        (self.member, self.request) == (other.member, other.request)
    }
}

#[cfg(test)]
mod tests;
