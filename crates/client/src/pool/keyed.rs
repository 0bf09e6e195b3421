//! Memory of this client that a server on the same machine reaches by key: what is read lands in it, and what is written is taken from it, with one copy instead of two.
//!
//! The exposed memories of a server are the shell of [`Owner`]: it hands memory files over, says in requests
//! where the bytes are instead of sending them, and takes keys back. It belongs to one server. When that server
//! is lost, or the connection to it breaks, the memory is replaced before anything else is done with it: what
//! the server still does then, it does to a file that is no longer used.
//!
//! What cannot be reached by key, for whatever reason, travels as any other bytes do.

use super::body::{Body, lost};
use super::exposed::{ExposedMemories, KeyStats, Slot};
use super::server::Server;
use super::shell::Shell;
use super::{Pool, operation_of};
use crate::error::{LostReason, PoolError};
use rampool_kernel::exposed::ExposedMemory;
use rampool_paging::placement::ServerIndex;
use rampool_pinning::keys::{Key, Rights};
use rampool_session::{Ask, Request};
use rampool_wire::frame::{ByKey, MAX_TABLE_BYTES, Opcode, RegionId, encode_revocation};
use rampool_wire::layout::Program;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Server {
    /// Whether this server can be given keys.
    fn takes_keys(&self) -> bool {
        self.link.as_ref().is_some_and(rampool_net::transport::Link::takes_keys)
    }

    /// Says in a request's table where its bytes are, where the server can reach them by key.
    pub(super) fn by_key(&mut self, of: &Request, body: &mut Body) -> bool {
        body.by_key = None;
        let Some(exposed) = &mut self.exposed else { return false };
        let Some(place) = exposed.find(of, body) else { return false };
        let mut table = Vec::with_capacity(ByKey::BYTES + body.table.len());
        place.encode(&mut table);
        table.append(&mut body.table);
        if table.len() > MAX_TABLE_BYTES {
            body.table = table.split_off(ByKey::BYTES);
            return false;
        }
        body.table = table;
        body.by_key = Some(place.key);
        true
    }

    /// Makes the table of an `Expose` and hands the memory over. False: it is not to be exposed any more.
    pub(super) fn grant_key(&mut self, body: &mut Body) -> bool {
        body.table.clear();
        let place = u32::try_from(body.arg).expect("a place");
        let announced = self.exposed.as_mut().and_then(|exposed| exposed.announce(place, &mut body.table));
        let Some((generation, file)) = announced else { return false };
        // Without its memory the server refuses the key.
        let handed = self.link.as_ref().is_some_and(|link| link.hand_over(file).is_ok_and(|handed| handed));
        body.by_key = handed.then_some(Key { place, generation });
        true
    }

    /// A request came back because its key is not known any more. True: the server has to hear of the memory again.
    pub(super) fn key_was_stale(&mut self, key: Key) -> bool {
        let exposed = self.exposed.as_mut().expect("there was a key");
        let newly = exposed.known.contains_key(&key.place);
        exposed.stale(key.place);
        newly
    }

    /// The server has answered a request about a key.
    pub(super) fn key_answered(&mut self, opcode: Opcode, key: Key) {
        let Some(exposed) = &mut self.exposed else { return };
        match opcode {
            Opcode::Expose => exposed.confirmed(key),
            Opcode::Revoke => exposed.revoked(key),
            _ => {}
        }
    }
}

impl Shell {
    /// Sends the key to a memory, and gives the number of that request. What is published is so again.
    pub(super) fn announce(&mut self, server: ServerIndex, place: u32, now: Instant) -> u64 {
        let request = self.control(Ask::control(server, Opcode::Expose, RegionId(0)), place.into(), &[], now);
        let exposed = self.servers[server.as_usize()].exposed.as_ref();
        if let Some(table) = exposed.and_then(|exposed| exposed.publication(place)) {
            self.control(Ask::control(server, Opcode::Reach, RegionId(0)), 0, &table, now);
        }
        request
    }

    /// After a connection was made again.
    pub(super) fn announce_all(&mut self, server: ServerIndex, now: Instant) {
        let of = &self.servers[server.as_usize()];
        if !of.takes_keys() {
            return;
        }
        let places: Vec<u32> = of.exposed.iter().flat_map(|exposed| exposed.slots.keys().copied()).collect();
        for place in places {
            self.announce(server, place, now);
        }
    }
}

impl Pool {
    /// Makes memory that the first server reached through shared memory can put bytes into, and take bytes from, by key. Where there is none, the memory is as any other. Blocks until the
    /// server has answered.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub(crate) fn expose(
        &mut self,
        bytes: usize,
    ) -> Result<Arc<ExposedMemory>, rampool_kernel::sealed::SealedError> {
        self.withdraw_unused();
        let (memory, file) = ExposedMemory::create(bytes)?;
        let memory = Arc::new(memory);
        let now = Instant::now();
        if let Some(server) = self.shell.servers.iter_mut().find(|server| server.takes_keys()) {
            let exposed = server.exposed.get_or_insert_with(|| Box::new(ExposedMemories::new()));
            if let Ok(key) = exposed.owner.expose(bytes as u64, Rights::Both) {
                exposed
                    .slots
                    .insert(key.place, Slot { memory: memory.clone(), file: Some(file), published: None });
                let server = server.index;
                let request = self.shell.announce(server, key.place, now);
                self.shell.send(now);
                while self.shell.client.is_under_way(request) {
                    self.step(Instant::now());
                    let waits = self.shell.client.is_under_way(request);
                    if waits && self.sleep(Instant::now() + Duration::from_secs(1)).is_err() {
                        break;
                    }
                }
            }
        }
        Ok(memory)
    }

    /// Takes the key to this memory back. Blocks until the server has answered, or is lost and the memory
    /// replaced: from then on no other process touches it.
    pub(crate) fn withdraw(&mut self, memory: &Arc<ExposedMemory>) -> Result<(), PoolError> {
        let of = |server: &Server| {
            let slots = server.exposed.iter().flat_map(|exposed| &exposed.slots);
            slots.into_iter().find(|(_, slot)| Arc::ptr_eq(&slot.memory, memory)).map(|(place, _)| *place)
        };
        let servers = self.shell.servers.iter().enumerate();
        let Some((index, place)) = { servers }.find_map(|(index, server)| Some((index, of(server)?))) else {
            return Ok(());
        };
        self.ask_back(index, place);
        while of(&self.shell.servers[index]).is_some() {
            self.step(Instant::now());
            if of(&self.shell.servers[index]).is_none() {
                break;
            }
            if let Err(error) = self.sleep(Instant::now() + Duration::from_secs(1)) {
                let reason = LostReason::Io(error.to_string());
                return Err(lost(&self.shell.servers[index].name, operation_of(Opcode::Revoke), &reason));
            }
        }
        Ok(())
    }

    /// Notes that memory is to be published. The server, and the table of the request; none where no server
    /// has a key to it.
    pub(crate) fn publish(
        &mut self,
        memory: &Arc<ExposedMemory>,
        rights: Rights,
        name: &str,
    ) -> Option<(ServerIndex, Vec<u8>)> {
        self.shell.servers.iter_mut().find_map(|server| {
            let exposed = server.exposed.as_mut()?;
            let place = exposed.place_of(memory)?;
            exposed.slots.get_mut(&place)?.published = Some((rights, name.to_owned()));
            Some((server.index, exposed.publication(place)?))
        })
    }

    /// It is not published after all.
    pub(crate) fn forget_publication(&mut self, memory: &Arc<ExposedMemory>) {
        let all = self.shell.servers.iter_mut().filter_map(|server| server.exposed.as_mut());
        for slot in all.flat_map(|exposed| exposed.slots.values_mut()) {
            if Arc::ptr_eq(&slot.memory, memory) {
                slot.published = None;
            }
        }
    }

    pub(crate) fn key_stats(&self) -> KeyStats {
        let mut all = KeyStats::default();
        for exposed in self.shell.servers.iter().filter_map(|server| server.exposed.as_ref()) {
            all.exposed += exposed.known.len();
            all.requests += exposed.stats.requests;
            all.bytes += exposed.stats.bytes;
            all.stale += exposed.stats.stale;
            all.replaced += exposed.stats.replaced;
        }
        all
    }

    /// Whether the server has a key to this memory now.
    pub(crate) fn is_exposed(&self, memory: &Arc<ExposedMemory>) -> bool {
        let mut all = self.shell.servers.iter().filter_map(|server| server.exposed.as_ref());
        all.any(|exposed| exposed.place_of(memory).is_some())
    }

    /// Whether what a layout selects from an address on reaches into exposed memory.
    pub(super) fn is_exposed_at(&self, memory: *const u8, local: &Program) -> bool {
        let mut all = self.shell.servers.iter().filter_map(|server| server.exposed.as_ref());
        all.any(|exposed| {
            let (low, high) = local.bounds();
            let at =
                |offset: i64| memory.addr().wrapping_add_signed(isize::try_from(offset).expect("64 bits"));
            exposed.slots.values().any(|slot| {
                let start = slot.memory.start().addr();
                at(low) < start + slot.memory.bytes() && start < at(high)
            })
        })
    }

    /// Withdraws memory that the program has dropped. Does not block.
    fn withdraw_unused(&mut self) {
        for index in 0..self.shell.servers.len() {
            let slots = self.shell.servers[index].exposed.iter().flat_map(|exposed| &exposed.slots);
            let unused: Vec<u32> = slots
                .filter(|(_, slot)| Arc::strong_count(&slot.memory) == 1)
                .map(|(place, _)| *place)
                .collect();
            for place in unused {
                self.ask_back(index, place);
            }
        }
    }

    fn ask_back(&mut self, index: usize, place: u32) {
        let server = &mut self.shell.servers[index];
        let Some(key) = server.exposed.as_mut().and_then(|exposed| exposed.withdraw(place)) else { return };
        let (now, server) = (Instant::now(), server.index);
        let (id, body) = self.shell.reserve();
        body.arg = place.into();
        encode_revocation(key, &mut body.table);
        body.by_key = Some(key);
        self.shell.submit(id, Ask::control(server, Opcode::Revoke, RegionId(0)), now);
        self.shell.send(now);
    }
}
