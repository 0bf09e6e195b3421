//! A server without threads, for fuzz targets: who has it says what each thread of a server would do next, so
//! that a run follows from its input.
//!
//! Connections are socket pairs. What a client writes and what it is answered are bytes.

use super::connection::{Connection, End, Service, Turn};
use super::lease::Duty;
use super::lock::lock;
use super::reaper::{give_up, perform};
use super::shared::{Shared, Task};
use super::{Blocks, ServerConfig};
use rampool_lease::{ConnectionNumber, Tick};
use rampool_net::transport::{Handshake, LocalPolicy, Stream};
use rampool_wire::frame::{AttachLease, LeaseId, LeaseToken, MemberId, OpenLease, PageEntry};
use rampool_wire::session::{Encryption, Preface, features};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

/// More turns than any request takes.
const MOST_TURNS: usize = 1_000_000;

pub struct Threadless {
    shared: Arc<Shared>,
    tasks: Receiver<Task>,
    /// What the reaper has not done yet.
    waiting: Vec<Task>,
    /// Nobody carries them out.
    _copies: Receiver<Duty>,
    service: Service,
    /// A connection's number is its place; those that are over leave it empty.
    connections: Vec<Option<(Connection, UnixStream)>>,
}

impl std::fmt::Debug for Threadless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Threadless")
    }
}

impl Threadless {
    /// A server that lends so much, to a few clients without a key.
    ///
    /// # Panics
    /// If the system does not give it a descriptor.
    #[must_use]
    pub fn new(config: ServerConfig) -> Self {
        let config = ServerConfig { shards: 1, lock_memory: false, ..config };
        let store = super::new_store(&config);
        let (shared, tasks, copies) = Shared::new(config, store).expect("a descriptor");
        let blocks = Arc::new(Blocks::open(&shared, &shared.config.block).expect("there are no exports"));
        let shared = Arc::new(shared);
        let (waiting, service) = (Vec::new(), Service::new(Arc::clone(&shared), blocks));
        Self { shared, tasks, waiting, _copies: copies, service, connections: Vec::new() }
    }

    // --- connections ----------------------------------------------------------------------------------

    /// A new connection; returns its number.
    ///
    /// # Panics
    /// If the system does not give it a socket pair, or the server turns it away.
    pub fn connect(&mut self) -> usize {
        let (mut client, server) = UnixStream::pair().expect("a socket pair");
        let features = self.shared.store.features() | features::PIECES;
        let policy = LocalPolicy { key: None, encryption: Encryption::Auto, features, ucx: None };
        let mut handshake = Handshake::server(Stream::adopt(server).expect("it is connected"), policy, None);
        client
            .write_all(&Preface::ask(Encryption::Auto, false, features, 1).encode())
            .expect("it fits the socket's buffer");
        let link = handshake.advance().expect("a good preface").expect("nothing else is awaited");
        let mut preface = [0; rampool_wire::session::PREFACE_BYTES];
        client.read_exact(&mut preface).expect("the server's preface");
        client.set_nonblocking(true).expect("a socket");
        let tenant = self.shared.tenants.of(None);
        assert!(self.shared.take_place() && self.shared.connect(&tenant), "there is a place");
        let number = self.connections.len();
        let replies = Arc::clone(&self.shared.replies);
        let connection = Connection::new(link, tenant, replies, 0, number as u64, Instant::now());
        self.connections.push(Some((connection, client)));
        number
    }

    /// The client sends these bytes, and takes whatever it is answered until nothing is left to do. `None`:
    /// its connection is over.
    ///
    /// # Panics
    /// If that never ends.
    pub fn say(&mut self, number: usize, mut bytes: &[u8]) -> Option<Vec<u8>> {
        let mut answers = Vec::new();
        for _ in 0..MOST_TURNS {
            let (_, client) = self.connections[number].as_mut()?;
            match client.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
            }
            let turn = self.turn(number);
            let (connection, client) = self.connections[number].as_mut()?;
            let before = answers.len();
            // All that there is, and then it would wait.
            let _ = client.read_to_end(&mut answers);
            let is_quiet = turn == Some(Turn::Idle) && answers.len() == before;
            if is_quiet && bytes.is_empty() && connection.link().queued_bytes() == 0 {
                return Some(answers);
            }
        }
        panic!("it is never done");
    }

    /// As a shard does it.
    fn turn(&mut self, number: usize) -> Option<Turn> {
        let now = Instant::now();
        let (connection, _) = self.connections[number].as_mut()?;
        let turn = connection.receive(&mut self.service, now);
        for post in std::mem::take(&mut self.service.posts) {
            self.bring(post);
        }
        let (connection, _) = self.connections[number].as_mut()?;
        let flushed = connection.flush(&mut self.service.slice, now).map(drop);
        match turn.and_then(|turn| flushed.map(|()| turn)) {
            Ok(turn) => Some(turn),
            Err(end) => {
                self.close(number, &end);
                None
            }
        }
    }

    fn bring(&mut self, post: super::shared::Post) {
        let to = usize::try_from(post.token).expect("a number of a connection");
        if let Some(Some((connection, _))) = self.connections.get_mut(to) {
            connection.told(&mut self.service, post);
        }
    }

    fn close(&mut self, number: usize, _: &End) {
        if let Some((connection, _)) = self.connections[number].take() {
            connection.close(&self.shared);
            self.shared.give_place_back();
        }
    }

    /// The client is gone.
    pub fn hang_up(&mut self, number: usize) {
        self.close(number, &End::Stopping);
    }

    /// What other threads would do by now: the reaper its tasks, the shard what waits for them. With
    /// `grace_is_over`, members without a connection are given up.
    pub fn let_others_work(&mut self, grace_is_over: bool) {
        while !self.waiting.is_empty() || self.has_task() {
            self.reap(0);
        }
        if grace_is_over {
            give_up(&self.shared, Tick(u64::MAX));
        }
        for place in 0..self.connections.len() {
            let posts = std::mem::take(&mut *lock(&self.shared.shards[0].posts));
            posts.into_iter().for_each(|post| self.bring(post));
            if let Some((connection, _)) = &mut self.connections[place] {
                connection.queue_alarm(&mut self.service);
                connection.ask_again(&mut self.service);
            }
            for post in std::mem::take(&mut self.service.posts) {
                self.bring(post);
            }
            let _ = self.turn(place);
        }
    }

    // --- the reaper -----------------------------------------------------------------------------------

    /// As a connection that asks for a lease.
    pub fn open(&mut self, bytes: u64, token: LeaseToken) -> Option<(LeaseId, MemberId)> {
        let request = OpenLease { bytes, pid: 1, name: String::new(), host: String::new() };
        let (id, member) = self.shared.directory().open(None, &request, token).ok()?;
        self.shared.open_lease(id, member, bytes, self.shared.tenants.of(None));
        Some((id, member))
    }

    /// As a connection that joins a lease, or comes back to it.
    pub fn attach(
        &mut self,
        lease: LeaseId,
        token: LeaseToken,
        member: MemberId,
    ) -> Option<(MemberId, ConnectionNumber)> {
        let request = AttachLease { lease, token, member, pid: 1, name: String::new(), host: String::new() };
        let (member, connection, _) = self.shared.directory().attach(None, &request).ok()?;
        let lease = self.shared.lease(lease)?;
        let stays = self.shared.attach_member(&lease, member, connection).expect("no other thread has it");
        stays.then_some((member, connection))
    }

    /// The member's connection breaks at this time.
    pub fn lose(&mut self, now: Tick, lease: LeaseId, member: MemberId, connection: ConnectionNumber) {
        if self.shared.directory().has(lease, member) {
            self.shared.directory().disconnected(now, lease, member, connection);
        }
    }

    /// The member says goodbye; the reaper hears of it.
    pub fn leave(&mut self, lease: LeaseId, member: MemberId) {
        let departed = self.shared.directory().leave(lease, member);
        departed.into_iter().for_each(|departed| self.shared.depart(departed));
    }

    /// Stores a page in a new region of the member, if there is room.
    pub fn store_page(&mut self, lease: LeaseId, member: MemberId, connection: ConnectionNumber) {
        let Some(lease) = self.shared.lease(lease) else { return };
        let mut space = lease.space();
        if space.admit(member, connection).is_err() {
            return;
        }
        let Ok(region) = space.make(0, |space| space.create_region(member)) else { return };
        let len = u32::try_from(OS_PAGE_BYTES).expect("4096");
        let (mut frames, mut released) = (Vec::new(), Vec::new());
        if !self.shared.store.take(0, &[len], &mut frames) {
            return;
        }
        // SAFETY: a frame that was just taken, of 4096 bytes.
        unsafe { self.shared.store.memory(frames[0]).write_bytes(1, OS_PAGE_BYTES) };
        let entry = PageEntry { crc: 0, len };
        let page = self.shared.store.settle(0, frames[0], entry, &mut super::store::Scratch::default());
        if space.put(member, region, &[Extent::page(PageIndex(0))], &[Some(page)], &mut released).is_err() {
            released.push(page.frame);
        }
        drop(space);
        self.shared.store.release(&released);
    }

    fn has_task(&mut self) -> bool {
        self.waiting.extend(self.tasks.try_iter());
        !self.waiting.is_empty()
    }

    /// The reaper does one of the tasks that it was told, in any order.
    pub fn reap(&mut self, which: usize) {
        if self.has_task() {
            let task = self.waiting.swap_remove(which % self.waiting.len());
            perform(&self.shared, task);
        }
    }

    /// The reaper gives up the members whose grace time is over at this time.
    pub fn expire(&mut self, now: Tick) {
        give_up(&self.shared, now);
    }

    // --- what is left ---------------------------------------------------------------------------------

    /// Leases and frames.
    #[must_use]
    pub fn left(&self) -> (usize, u64) {
        (self.shared.leases().len(), self.shared.store.usage().frames)
    }

    /// # Panics
    /// If an invariant is broken; with no connection left, if anything is charged that is not there.
    pub fn check(&self) {
        self.shared.check();
        if self.connections.iter().all(Option::is_none) && self.shared.leases().is_empty() {
            assert_eq!(self.shared.directory().accounts().all().count(), 0, "an account is left");
            assert_eq!(self.shared.store.usage().frames, 0, "frames are left");
        }
    }
}
