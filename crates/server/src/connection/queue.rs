//! Remote queues: requests in, answers out, some of them later and by way of others.
//!
//! [`rampool_lease::Queues`] decides what a queue does. A request that has to wait is kept here by its
//! number; its reply comes as a [`Post`] from another request, perhaps of another shard.

use super::regions::Freeing;
use super::{Connection, Handled, Service, tell};
use crate::lease::Space;
use crate::refused::Refused;
use crate::shared::Post;
use rampool_lease::{Asker, LeaseSpace, QueueId, Tick};
use rampool_wire::frame::{
    AwaitBody, Header, NamedRegion, Push, PushHeads, QueueBounds, Settlement, Status, Take, WireError,
};

impl Connection {
    pub(super) fn open_queue(&mut self, service: &mut Service, header: Header) -> Handled {
        let (bounds, name) = QueueBounds::parse(self.link.table())?;
        if name.is_empty() || header.arg > 1 {
            return Err(WireError::BadName.into());
        }
        let bounds = (header.arg == 1).then_some(bounds);
        let (queue, region, bounds) = self.act(service, header, |space, _, Asker { member, .. }| {
            let open = |space: &mut LeaseSpace| space.open_queue(member, name, bounds);
            if bounds.is_some() { space.make(1, open) } else { open(space) }
        })?;
        service.table.clear();
        bounds.encode("", &mut service.table);
        let reply = Header { region: region.0, ..header.reply(Status::Ok).with_arg(queue.0) };
        tell(&mut self.link, &mut service.head, reply, &service.table);
        Ok(())
    }

    /// The answer comes when its pages are free.
    pub(super) fn free_queue(&mut self, service: &mut Service, header: Header) -> Handled {
        self.act(service, header, |space, _, _| space.free_queue(QueueId(header.arg)))?;
        self.begin(service, header, Freeing)
    }

    pub(super) fn list_queues(&mut self, service: &mut Service, header: Header) -> Handled {
        let membership = self.membership()?;
        let (space, mut table, mut last) = (membership.space()?, Vec::new(), 0);
        let all = space.queues().list(QueueId(header.arg)).all(|(listed, _)| {
            let fits = listed.encode(&mut table);
            last = if fits { listed.queue } else { last };
            fits
        });
        drop(space);
        let reply = header.reply(Status::Ok).with_arg(if all { 0 } else { last });
        tell(&mut self.link, &mut service.head, reply, &table);
        Ok(())
    }

    pub(super) fn list_regions(&mut self, service: &mut Service, header: Header) -> Handled {
        let behind = std::str::from_utf8(self.link.table()).map_err(|_| WireError::BadName)?;
        let membership = self.membership()?;
        let (space, mut table) = (membership.space()?, Vec::new());
        let all = space.named(behind).all(|(name, region, bytes)| {
            NamedRegion { region, bytes, name: name.to_owned() }.encode(&mut table)
        });
        drop(space);
        let reply = header.reply(Status::Ok).with_arg(u64::from(!all));
        tell(&mut self.link, &mut service.head, reply, &table);
        Ok(())
    }

    pub(super) fn push(&mut self, service: &mut Service, header: Header) -> Handled {
        let (queue, push) = (QueueId(header.arg), Push::parse(self.link.table())?);
        let timeout_ms = push.timeout_ms;
        self.act(service, header, |space, tick, asker| space.push(tick, asker, queue, &push))?;
        self.asked(service, header, timeout_ms)
    }

    pub(super) fn push_heads(&mut self, service: &mut Service, header: Header) -> Handled {
        let (queue, heads) = (QueueId(header.arg), PushHeads::parse(self.link.table())?);
        let timeout_ms = heads.timeout_ms;
        self.act(service, header, |space, tick, asker| space.push_heads(tick, asker, queue, &heads))?;
        self.asked(service, header, timeout_ms)
    }

    pub(super) fn take(&mut self, service: &mut Service, header: Header) -> Handled {
        let (queue, take) = (QueueId(header.arg), Take::parse(self.link.table())?);
        self.act(service, header, |space, tick, asker| {
            space.take(tick, asker, queue, &take);
            Ok::<_, Refused>(())
        })?;
        self.asked(service, header, take.timeout_ms)
    }

    pub(super) fn settle(&mut self, service: &mut Service, header: Header) -> Handled {
        let (how, numbers) = Settlement::parse(self.link.table())?;
        let queue = QueueId(header.arg);
        let settled = self.act(service, header, |space, _, Asker { member, .. }| {
            space.settle(member, queue, &numbers, how)
        })?;
        self.done(header, settled)
    }

    pub(super) fn await_body(&mut self, service: &mut Service, header: Header) -> Handled {
        let (queue, wait) = (QueueId(header.arg), AwaitBody::parse(self.link.table())?);
        self.act(service, header, |space, tick, asker| {
            space.await_body(tick, asker, queue, wait.number, wait.timeout_ms);
            Ok::<_, Refused>(())
        })?;
        self.asked(service, header, wait.timeout_ms)
    }

    /// Does something with queues. Answers that follow from it are among the posts.
    fn act<R, E: Into<Refused>>(
        &self,
        service: &mut Service,
        header: Header,
        act: impl FnOnce(&mut Space<'_>, Tick, Asker) -> Result<R, E>,
    ) -> Result<R, Refused> {
        let membership = self.membership()?;
        let mut space = membership.space()?;
        let origin = (self.arena, self.token);
        let asker = Asker { member: membership.member, request: header.request, origin };
        let done = act(&mut space, service.shared.now(), asker);
        service.shared.collect(&mut space, &mut service.posts);
        done.map_err(Into::into)
    }

    /// A request waits, or its answer is among the posts.
    fn asked(&mut self, service: &mut Service, header: Header, timeout_ms: u32) -> Handled {
        if timeout_ms > 0 {
            service.set_alarm(service.shared.now().0.saturating_add(timeout_ms.into()));
        }
        let (own, number) = ((self.arena, self.token), header.request);
        let is_own = |post: &Post| (post.shard, post.token) == own;
        // Most requests have one answer, their own: it is not collected first.
        match service.posts.iter().position(|post| is_own(post) && post.request == number) {
            Some(at) => {
                let post = service.posts.remove(at);
                self.pass_on(service, header, post);
            }
            None => _ = self.waiting.insert(number, header),
        }
        // The connection's own answers are queued here; the others' leave with the end of this turn.
        while let Some(at) = service.posts.iter().position(is_own) {
            let post = service.posts.remove(at);
            self.told(service, post);
        }
        Ok(())
    }

    /// The answer to a request that waited, if it still does.
    pub(crate) fn told(&mut self, service: &mut Service, post: Post) {
        if let Some(header) = self.waiting.remove(&post.request) {
            self.pass_on(service, header, post);
        }
    }

    fn pass_on(&mut self, service: &mut Service, header: Header, post: Post) {
        match post.result {
            Ok((arg, table)) => {
                tell(&mut self.link, &mut service.head, header.reply(Status::Ok).with_arg(arg), &table);
            }
            Err(refused) => self.refuse(service, header, &refused),
        }
    }

    /// Answers the requests of its lease that have timed out.
    pub(crate) fn queue_alarm(&self, service: &mut Service) {
        if self.waiting.is_empty() {
            return;
        }
        let Ok(membership) = self.membership() else { return };
        let Ok(mut space) = membership.space() else { return };
        space.queue_timeout(service.shared.now());
        service.shared.collect(&mut space, &mut service.posts);
        if let Some(next) = space.queues().poll_timeout() {
            service.set_alarm(next.0);
        }
    }
}
