//! The queues' part of a pool. A queue lies at one server, which follows from its name: all members of a
//! lease find it there, without asking.

use super::body::lost;
use super::server::Server;
use super::{Names, Pool, PoolRegion, message_of};
use crate::error::{LostReason, PoolError};
use rampool_paging::placement::ServerIndex;
use rampool_session::{Ask, Class};
use rampool_wire::frame::{Opcode, RegionId, Status};
use std::time::{Duration, Instant};

/// The answer to a request to a queue.
pub(crate) struct QueueReply {
    pub status: Status,
    pub arg: u64,
    pub region: RegionId,
    pub table: Vec<u8>,
    /// What a server that refuses has to say.
    pub message: String,
}

impl Pool {
    /// The server of the queue of this name.
    pub(crate) fn queue_server(&self, name: &str) -> ServerIndex {
        // FNV-1a: the same everywhere, and spread well enough.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let servers = self.server_count() as u64;
        ServerIndex(u16::try_from((hash ^ hash >> 32) % servers).expect("fewer than 65536 servers"))
    }

    /// How long a request may wait in a queue, so that its server does not seem to be lost.
    pub(crate) fn longest_queue_wait(&self) -> Duration {
        self.shell.client.session(ServerIndex(0)).op_deadline() / 4
    }

    pub(crate) fn server_name(&self, server: ServerIndex) -> &str {
        &self.shell.servers[server.as_usize()].name
    }

    pub(crate) fn server_count(&self) -> usize {
        self.shell.servers.len()
    }

    /// Sends a request to a queue's server; [`Pool::queue_reply`] has the answer when it is
    /// there. Does not block.
    pub(crate) fn ask_queue(&mut self, server: ServerIndex, opcode: Opcode, arg: u64, table: &[u8]) -> u64 {
        let now = Instant::now();
        let ask = Ask { class: Class::Demand, wanted: true, ..Ask::control(server, opcode, RegionId(0)) };
        let request = self.shell.control(ask, arg, table, now);
        self.shell.send(now);
        request
    }

    /// Sends a request whose answer is not waited for. Does not block.
    pub(crate) fn tell_queue(&mut self, server: ServerIndex, opcode: Opcode, arg: u64, table: &[u8]) {
        let request = self.ask_queue(server, opcode, arg, table);
        self.forget_queue_reply(request);
    }

    /// This answer is not waited for any more.
    pub(crate) fn forget_queue_reply(&mut self, request: u64) {
        if !self.shell.client.forget(request) {
            self.shell.take_reply(request);
        }
    }

    /// The answer of this number, if it has come by what was received so far; or why it never will.
    pub(crate) fn queue_reply(
        &mut self,
        server: ServerIndex,
        opcode: Opcode,
        request: u64,
    ) -> Option<Result<QueueReply, PoolError>> {
        let reply = self.shell.take_reply(request);
        let Server { name, lost: gone, .. } = &self.shell.servers[server.as_usize()];
        let Some(reply) = reply else {
            return gone.as_ref().map(|reason| Err(lost(name, super::operation_of(opcode), reason)));
        };
        if matches!(reply.status, Status::MemberGone | Status::NoSuchLease) {
            return Some(Err(lost(name, super::operation_of(opcode), &LostReason::GivenUp)));
        }
        let message = if reply.status == Status::Ok { String::new() } else { message_of(&reply) };
        Some(Ok(QueueReply {
            status: reply.status,
            arg: reply.arg,
            region: reply.region,
            table: reply.table,
            message,
        }))
    }

    /// Does what input and output is possible without blocking. Events that come of it wait
    /// for [`Pool::poll`].
    pub(crate) fn turn(&mut self) {
        self.step(Instant::now());
    }

    /// Sleeps until there is something to receive, or the time is up. Servers that cannot be
    /// watched are lost.
    pub(crate) fn rest(&mut self, until: Instant) {
        if let Err(error) = self.sleep(until) {
            self.give_up(&LostReason::Io(error.to_string()));
        }
    }

    /// A region that lies at one server.
    pub(crate) fn remember_at(&mut self, server: ServerIndex, region: RegionId) -> PoolRegion {
        let mut ids = vec![RegionId(0); self.server_count()];
        ids[server.as_usize()] = region;
        self.remember_names(Names { ids, only: Some(server), missed: Vec::new() }, None)
    }

    /// A region of which another member has told the numbers; `None` if they are not as many
    /// as there are servers.
    pub(crate) fn remember_told(&mut self, ids: &[RegionId]) -> Option<PoolRegion> {
        (ids.len() == self.server_count())
            .then(|| self.remember_names(Names { ids: ids.to_vec(), only: None, missed: Vec::new() }, None))
    }

    /// Whether the region was not freed.
    pub(crate) fn knows(&self, region: PoolRegion) -> bool {
        self.names(region).is_ok()
    }

    /// The numbers of a region at the servers; and the server, where it lies at one.
    pub(crate) fn told_as(&self, region: PoolRegion) -> (&[RegionId], Option<ServerIndex>) {
        let names = super::entry(&self.regions, region);
        (&names.ids, names.only)
    }
}
