//! Memory of this client that a server on this machine has mapped, for the other members of the lease.
//!
//! It belongs to one server, over one connection; after a reconnect it is published again.

use super::Pool;
use super::server::Slot;
use super::shell::Shell;
use rampool_kernel::exposed::ExposedMemory;
use rampool_kernel::sealed::SealedError;
use rampool_paging::placement::ServerIndex;
use rampool_session::Ask;
use rampool_wire::frame::{Opcode, Publish, RegionId, Rights};
use std::sync::Arc;
use std::time::Instant;

/// A memory, its place at a server, and the request that publishes it.
pub(crate) struct Publishing {
    pub memory: Arc<ExposedMemory>,
    pub server: ServerIndex,
    pub place: u64,
    pub request: u64,
}

impl Shell {
    /// After a connection was made again.
    pub(super) fn publish_again(&mut self, server: ServerIndex, now: Instant) {
        let of = &self.servers[server.as_usize()];
        if of.takes_memory() {
            let slots = of.published.iter().filter(|(_, slot)| !slot.withdrawn);
            for (place, table) in slots.map(|(place, slot)| (*place, slot.table.clone())).collect::<Vec<_>>()
            {
                self.control(Ask::control(server, Opcode::Publish, RegionId(0)), place, &table, now);
            }
        }
    }
}

impl Pool {
    /// Makes memory for the first server that is reached through shared memory, and asks it to publish it.
    /// None where there is no such server.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub(crate) fn publish(
        &mut self,
        bytes: usize,
        rights: Rights,
        name: &str,
    ) -> Result<Option<Publishing>, SealedError> {
        self.withdraw_unused();
        let Some(server) = self.shell.servers.iter_mut().find(|server| server.takes_memory()) else {
            return Ok(None);
        };
        let (memory, file) = ExposedMemory::create(bytes)?;
        let memory = Arc::new(memory);
        let place = server.published.last_key_value().map_or(0, |(last, _)| last + 1);
        let mut table = Vec::new();
        Publish { rights, bytes: bytes as u64, name }.encode(&mut table);
        let slot = Slot { memory: memory.clone(), file, table: table.clone(), withdrawn: false };
        server.published.insert(place, slot);
        let server = server.index;
        let request = self.ask_queue(server, Opcode::Publish, place, &table);
        Ok(Some(Publishing { memory, server, place, request }))
    }

    /// It is published no more.
    pub(crate) fn forget_published(&mut self, server: ServerIndex, place: u64) {
        self.shell.servers[server.as_usize()].published.remove(&place);
    }

    /// Where a memory is that is to be withdrawn. From now on it is not published again.
    pub(crate) fn withdrawn(&mut self, memory: &Arc<ExposedMemory>) -> Option<(ServerIndex, u64)> {
        self.shell.servers.iter_mut().find_map(|server| {
            let mut slots = server.published.iter_mut();
            let (place, slot) = slots.find(|(_, slot)| Arc::ptr_eq(&slot.memory, memory))?;
            slot.withdrawn = true;
            Some((server.index, *place))
        })
    }

    /// Withdraws memory that the program has dropped. Does not block: nothing waits for the server.
    fn withdraw_unused(&mut self) {
        for index in 0..self.shell.servers.len() {
            let server = &mut self.shell.servers[index];
            let id = server.index;
            let mut unused = Vec::new();
            server.published.retain(|place, slot| {
                let used = Arc::strong_count(&slot.memory) > 1;
                unused.extend((!used).then_some(*place));
                used
            });
            for place in unused {
                self.tell_queue(id, Opcode::Withdraw, place, &[]);
            }
        }
    }
}
