//! Remote queues: requests in, answers out, some of them later and by way of others.
//!
//! [`rampool_lease::Queues`] decides what a queue does. A request that has to wait is kept here by its
//! number; its reply comes as a [`Post`] from another request, perhaps of another shard.

use super::{Connection, End, Refused, ScratchBuffers};
use crate::shared::{Post, Posts, Shared};
use rampool_lease::{Asker, LeaseSpace, QueueError, QueueId, QueueOutput, QueueSpaceError};
use rampool_wire::frame::{
    AwaitBody, Header, NamedRegion, Opcode, Push, PushHeads, QueueBounds, RegionId, Settlement, Status, Take,
    WireError, encode_frame,
};
use std::time::{Duration, Instant};

/// The immediate result of a request to a queue.
enum Now {
    /// It waits, or its answer is among the posts.
    Asked,
    /// The answer comes when its pages are free.
    Freed,
    Answer {
        arg: u64,
        region: u64,
        table: Vec<u8>,
    },
}

fn list_queues(space: &LeaseSpace, behind: QueueId) -> Now {
    let (mut table, mut last) = (Vec::new(), 0);
    for (listed, _) in space.queues().list(behind) {
        if !listed.encode(&mut table) {
            return Now::Answer { arg: last, region: 0, table };
        }
        last = listed.queue;
    }
    Now::Answer { arg: 0, region: 0, table }
}

fn list_regions(space: &LeaseSpace, behind: &str) -> Now {
    let mut table = Vec::new();
    let all_fit = space
        .named(behind)
        .all(|(name, region, bytes)| NamedRegion { region, bytes, name: name.to_owned() }.encode(&mut table));
    Now::Answer { arg: u64::from(!all_fit), region: 0, table }
}

impl From<QueueError> for Refused {
    fn from(error: QueueError) -> Self {
        let (status, arg) = match error {
            QueueError::NoSuchQueue => (Status::NoSuchQueue, 0),
            QueueError::TooManyQueues(_) => (Status::LimitReached, 0),
            QueueError::Full { messages } => (Status::QueueFull, messages),
            QueueError::NoSuchMessage | QueueError::BodyLost => (Status::NoSuchMessage, 0),
            _ => (Status::BadRequest, 0),
        };
        Self { status, arg, message: error.to_string() }
    }
}

impl From<QueueSpaceError> for Refused {
    fn from(error: QueueSpaceError) -> Self {
        match error {
            QueueSpaceError::Queue(error) => error.into(),
            QueueSpaceError::Space(error) => error.into(),
            other => Self::new(Status::BadRequest, other),
        }
    }
}

/// Fetches the replies of a lease's queues while the lease is locked. Frames of released bodies go back to
/// the store.
pub(crate) fn collect(shared: &Shared, space: &mut LeaseSpace, posts: &mut Posts) {
    let mut released = Vec::new();
    while let Some(output) = space.poll_queues(&mut released) {
        let (to, result) = match output {
            QueueOutput::Pushed { to, number, body_at } => {
                (to, Ok((number, body_at.map_or_else(Vec::new, |at| at.to_le_bytes().to_vec()))))
            }
            QueueOutput::Taken { to, queue, numbers } => {
                let mut table = Vec::with_capacity(numbers.len() * 128);
                numbers.iter().for_each(|number| space.queues().delivery(queue, *number).encode(&mut table));
                (to, Ok((numbers.len() as u64, table)))
            }
            QueueOutput::Body { to, there } => (to, Ok((u64::from(there), Vec::new()))),
            QueueOutput::Failed { to, error } => (to, Err(Refused::from(error))),
            _ => continue,
        };
        posts.push(Post { shard: to.origin.0, token: to.origin.1, request: to.request, result });
    }
    shared.store.release(&released);
}

impl Connection {
    /// Handles a request to a queue. Replies to other requests are in the scratch buffers' posts afterwards.
    pub(super) fn queue(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
        now: Instant,
    ) -> Result<(), End> {
        let asked = match self.ask_queue(shared, buffers, &header, now) {
            Ok(asked) => asked,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        match asked {
            Ok(Now::Asked) => {
                let (own, number) = ((self.arena, self.token), header.request);
                let is_own = |post: &Post| (post.shard, post.token) == own;
                // Most requests have one answer, their own: it is not collected first.
                match buffers.posts.iter().position(|post| is_own(post) && post.request == number) {
                    Some(at) => {
                        let post = buffers.posts.remove(at);
                        self.pass_on(shared, buffers, header, post);
                    }
                    None => _ = self.waiting.insert(number, header),
                }
                // The connection's own answers are queued here; the others' leave with the end of this turn.
                while let Some(at) = buffers.posts.iter().position(is_own) {
                    let post = buffers.posts.remove(at);
                    self.told(shared, buffers, post);
                }
            }
            Ok(Now::Freed) => self.go_on_freeing(shared, buffers, header),
            Ok(Now::Answer { arg, region, table }) => {
                self.tell(buffers, Header { region, ..header }, arg, &table)
            }
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
        Ok(())
    }

    fn ask_queue(
        &self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: &Header,
        now: Instant,
    ) -> Result<Result<Now, Refused>, WireError> {
        let table = self.link.table();
        let Ok(membership) = self.membership() else {
            return Ok(Err(Refused::new(Status::NotAllowed, super::NO_LEASE)));
        };
        let (queue, tick) = (QueueId(header.arg), shared.now());
        let asker =
            Asker { member: membership.member, request: header.request, origin: (self.arena, self.token) };
        let mut timeout_ms = 0;
        let queues = u64::from(header.opcode == Opcode::OpenQueue && header.arg == 1);
        let mut act = |command: &mut dyn FnMut(&mut LeaseSpace) -> Result<Now, QueueSpaceError>| {
            let mut space = membership.space()?;
            let done = if queues > 0 { space.make(queues, command) } else { command(&mut space) };
            collect(shared, &mut space, &mut buffers.posts);
            Ok(done?)
        };
        let answer = |arg| Ok(Now::Answer { arg, region: 0, table: Vec::new() });
        let result = match header.opcode {
            Opcode::OpenQueue => {
                let (bounds, name) = QueueBounds::parse(table)?;
                if name.is_empty() || header.arg > 1 {
                    return Err(WireError::BadName);
                }
                act(&mut |space| {
                    let (queue, region, bounds) =
                        space.open_queue(membership.member, name, (header.arg == 1).then_some(bounds))?;
                    let mut table = Vec::new();
                    bounds.encode("", &mut table);
                    Ok(Now::Answer { arg: queue.0, region: region.0, table })
                })
            }
            Opcode::FreeQueue => act(&mut |space| {
                space.free_queue(queue)?;
                Ok(Now::Freed)
            }),
            Opcode::ListQueues => act(&mut |space| Ok(list_queues(space, queue))),
            Opcode::ListRegions => {
                let behind = std::str::from_utf8(table).map_err(|_| WireError::BadName)?;
                act(&mut |space| Ok(list_regions(space, behind)))
            }
            Opcode::Push => {
                let push = Push::parse(table)?;
                timeout_ms = push.timeout_ms;
                act(&mut |space| {
                    space.push(tick, asker, queue, &push)?;
                    Ok(Now::Asked)
                })
            }
            Opcode::PushHeads => {
                let heads = PushHeads::parse(table)?;
                timeout_ms = heads.timeout_ms;
                act(&mut |space| {
                    space.push_heads(tick, asker, queue, &heads)?;
                    Ok(Now::Asked)
                })
            }
            Opcode::Take => {
                let take = Take::parse(table)?;
                timeout_ms = take.timeout_ms;
                act(&mut |space| {
                    space.take(tick, asker, queue, &take);
                    Ok(Now::Asked)
                })
            }
            Opcode::Settle => {
                let (how, numbers) = Settlement::parse(table)?;
                act(&mut |space| answer(space.settle(membership.member, queue, &numbers, how)?))
            }
            _ => {
                let wait = AwaitBody::parse(table)?;
                timeout_ms = wait.timeout_ms;
                act(&mut |space| {
                    space.await_body(tick, asker, queue, wait.number, wait.timeout_ms);
                    Ok(Now::Asked)
                })
            }
        };
        if timeout_ms > 0 {
            // A millisecond more: the machine counts whole ones.
            buffers.set_alarm(now + Duration::from_millis(u64::from(timeout_ms) + 1));
        }
        Ok(result)
    }

    /// The answer to a request that waited, if it still does.
    pub(crate) fn told(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, post: Post) {
        if let Some(header) = self.waiting.remove(&post.request) {
            self.pass_on(shared, buffers, header, post);
        }
    }

    fn pass_on(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, header: Header, post: Post) {
        match post.result {
            Ok((arg, table)) => self.tell(buffers, header, arg, &table),
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
    }

    fn tell(&mut self, buffers: &mut ScratchBuffers, header: Header, arg: u64, table: &[u8]) {
        buffers.head.clear();
        encode_frame(&mut buffers.head, header.reply(Status::Ok).with_arg(arg), table, 0);
        self.link.send_head(rampool_net::transport::Urgency::Demand, &buffers.head, super::Held::nothing());
    }

    /// Answers the requests of its lease that have timed out.
    pub(crate) fn queue_alarm(&self, shared: &Shared, buffers: &mut ScratchBuffers) {
        if self.waiting.is_empty() {
            return;
        }
        let Ok(membership) = self.membership() else { return };
        let Ok(mut space) = membership.space() else { return };
        space.queue_timeout(shared.now());
        collect(shared, &mut space, &mut buffers.posts);
        if let Some(next) = space.queues().poll_timeout() {
            buffers.set_alarm(shared.started + Duration::from_millis(next.0.saturating_add(1)));
        }
    }
}

/// Bytes of a region were stored: this may complete a body that a receiver waits for.
pub(super) fn bytes_came(
    shared: &Shared,
    space: &mut LeaseSpace,
    posts: &mut Posts,
    (region, from, bytes): (RegionId, u64, u64),
) {
    space.bytes_came(region, from, bytes);
    collect(shared, space, posts);
}
