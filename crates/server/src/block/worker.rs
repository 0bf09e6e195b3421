//! One thread that serves block clients: it polls them, and gives each a turn.

use super::client::{Client, Gone, ScratchBuffers, Turn};
use super::{Blocks, Mailbox};
use crate::lock::lock;
use crate::poll_set::{Events, Idle, PollSet, Ready, is_want, slot_of, token};
use crate::shared::Shared;
use rampool_nbd::End;
use rampool_net::transport::{Listener, Peer, Stream};
use rustix::event::epoll;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A client must choose an export within this time, and take the last answers within it.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Connections that are accepted in one turn: those that are here already are served between.
const MOST_ACCEPTED: usize = 64;
/// The longest time between two looks at the clients.
const SWEEP_EVERY: Duration = Duration::from_millis(500);
/// What a client that reads long stretches may have on its way within this machine, where the kernel allows
/// it.
const SOCKET_BYTES: usize = 1 << 20;

pub(crate) struct Worker {
    index: usize,
    shared: Arc<Shared>,
    blocks: Arc<Blocks>,
    poll: PollSet,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Clients with more to do than one turn.
    again: Vec<u64>,
    draining: bool,
    next: usize,
    buffers: ScratchBuffers,
}

struct Slot {
    /// Tells a new client of this slot from an event for its predecessor.
    generation: u32,
    client: Option<Box<Client>>,
    interest: epoll::EventFlags,
}

impl Worker {
    pub(crate) fn new(
        index: usize,
        shared: Arc<Shared>,
        blocks: Arc<Blocks>,
        listeners: Vec<Listener>,
    ) -> Result<Self, rustix::io::Errno> {
        let poll = PollSet::new(&blocks.threads[index].doorbell, listeners)?;
        let (slots, free, again) = (Vec::new(), Vec::new(), Vec::new());
        let (draining, next) = (false, 0);
        Ok(Self {
            index,
            shared,
            blocks,
            poll,
            slots,
            free,
            again,
            draining,
            next,
            buffers: ScratchBuffers::default(),
        })
    }

    /// Works until the server stops.
    pub(crate) fn run(mut self) {
        let mut events = Events::new();
        let mut idle = Idle::new(self.shared.config.spin);
        rampool_kernel::thread::ask_for_short_slices();
        let mut next_sweep = Instant::now() + SWEEP_EVERY;
        while !self.shared.stopping() {
            let now = Instant::now();
            if now >= next_sweep {
                self.sweep(now);
                next_sweep = now + SWEEP_EVERY;
            }
            let spinning = !self.again.is_empty() || idle.looks(now);
            let timeout = if spinning { Duration::ZERO } else { next_sweep.saturating_duration_since(now) };
            if !spinning {
                idle.sleeps();
                self.blocks.sleeps.fetch_add(1, Ordering::Relaxed);
            }
            self.poll.wait(&mut events, timeout);
            if events.is_empty() && self.again.is_empty() {
                idle.found_nothing(now, spinning);
                continue;
            }
            idle.found();
            let now = Instant::now();
            for token in std::mem::take(&mut self.again) {
                self.ready(token, now);
            }
            for ready in events.iter() {
                match ready {
                    Ready::Doorbell => self.answer_doorbell(now),
                    Ready::Listener(index) => self.accept(index),
                    Ready::Connection(token) => self.ready(token, now),
                }
            }
        }
        for index in 0..self.slots.len() {
            self.close(index, &Gone::Stopping);
        }
    }

    fn mailbox(&self) -> &Mailbox {
        &self.blocks.threads[self.index]
    }

    fn accept(&mut self, listener: usize) {
        for _ in 0..MOST_ACCEPTED {
            let stream = match self.poll.listener(listener).accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(error) => {
                    self.shared.log_peer_error("could not accept a block client", None, &error);
                    if is_want(&error) {
                        // The connection waits in the kernel until the next sweep.
                        self.poll.listen(false);
                        return;
                    }
                    continue;
                }
            };
            if !self.shared.allows(stream.peer()) {
                self.turn_away(&stream, "this user may not use the server's Unix sockets (--allow-uid)");
                continue;
            }
            if !self.blocks.take_place(&self.shared) {
                self.turn_away(
                    &stream,
                    "the server has as many block clients as it allows (a quarter of --max-connections)",
                );
                continue;
            }
            prepare(&stream, self.shared.config.heartbeat);
            let blocks = &self.blocks;
            let target = self.next % blocks.threads();
            self.next = self.next.wrapping_add(1);
            if target == self.index {
                self.add(stream, Instant::now());
            } else {
                blocks.threads[target].send(stream);
            }
        }
    }

    fn turn_away(&self, stream: &Stream, why: &str) {
        self.blocks.failed_handshakes.fetch_add(1, Ordering::Relaxed);
        self.shared.log_peer_error("a block client was turned away", Some(stream.peer()), &why);
    }

    fn answer_doorbell(&mut self, now: Instant) {
        let mut rings = [0; 8];
        // Whether the doorbell was rung more than once makes no difference.
        let _ = rustix::io::read(&self.mailbox().doorbell, &mut rings);
        let arrivals = std::mem::take(&mut *lock(&self.mailbox().arrivals));
        for stream in arrivals {
            self.add(stream, now);
        }
        if self.shared.draining() && !std::mem::replace(&mut self.draining, true) {
            for slot in &mut self.slots {
                if let Some(client) = &mut slot.client {
                    client.say_draining(&self.shared, &self.blocks, &mut self.buffers);
                }
            }
        }
    }

    /// A client has connected, and has a place.
    fn add(&mut self, stream: Stream, now: Instant) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, client: None, interest: epoll::EventFlags::IN });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        slot.generation = slot.generation.wrapping_add(1);
        slot.interest = epoll::EventFlags::IN;
        let token = token(index, slot.generation);
        if let Err(error) = self.poll.add(&stream, token, slot.interest) {
            self.shared.log_peer_error("cannot poll a block client", Some(stream.peer()), &error);
            self.free.push(index);
            self.blocks.give_place_back(&self.shared);
            return;
        }
        let client = Client::new(stream, &self.shared, &self.blocks, self.index, &mut self.buffers, now);
        slot.client = Some(Box::new(client));
        self.ready(token, now);
    }

    /// A client's turn.
    fn ready(&mut self, token: u64, now: Instant) {
        let index = slot_of(token);
        let Some(slot) = self.slots.get_mut(index) else { return };
        let (true, Some(client)) = (u64::from(slot.generation) == token >> 32, &mut slot.client) else {
            return;
        };
        let turn = match client.turn(&self.shared, &self.blocks, &mut self.buffers, now) {
            Ok(turn) => turn,
            Err(gone) => return self.close(index, &gone),
        };
        let mut flags = epoll::EventFlags::empty();
        if turn != Turn::Full {
            flags |= epoll::EventFlags::IN;
        }
        if client.has_queued() {
            flags |= epoll::EventFlags::OUT;
        }
        if turn == Turn::More {
            self.again.push(token);
        }
        if flags != slot.interest {
            slot.interest = flags;
            self.poll.modify(client.as_ref(), token, flags);
        }
    }

    fn sweep(&mut self, now: Instant) {
        self.poll.listen(true);
        for index in 0..self.slots.len() {
            let Some(client) = &self.slots[index].client else { continue };
            if client.is_shaking() && now.duration_since(client.since) >= HANDSHAKE_TIME {
                self.close(index, &Gone::Slow);
            } else if client.has_queued() && now.duration_since(client.took) >= self.longest_wait_of(client) {
                self.close(index, &Gone::Stuck);
            }
        }
    }

    /// How long a client may take nothing of what is queued for it.
    fn longest_wait_of(&self, client: &Client) -> Duration {
        if client.is_over() { HANDSHAKE_TIME } else { self.shared.config.silence }
    }

    fn close(&mut self, index: usize, gone: &Gone) {
        let Some(client) = self.slots[index].client.take() else { return };
        let blocks = &self.blocks;
        let (peer, export) = (client.peer(), client.export());
        match (gone, export) {
            (Gone::Session(End::Violation(_)) | Gone::Slow, None) => {
                blocks.failed_handshakes.fetch_add(1, Ordering::Relaxed);
                self.shared.log_peer_error("the handshake of a block client failed", Some(peer), gone);
            }
            (Gone::Session(End::Violation(_)), Some(export)) => {
                blocks.protocol_errors.fetch_add(1, Ordering::Relaxed);
                self.shared.log_peer_error(
                    "block client disconnected",
                    Some(peer),
                    &format_args!("{export}: {gone}"),
                );
            }
            (Gone::Stuck | Gone::Session(End::ReadFailed(_)), _) => {
                self.shared.log_peer_error("block client disconnected", Some(peer), gone);
            }
            (_, None) => tracing::debug!(%peer, "block client disconnected: {gone}"),
            (_, Some(export)) => {
                if self.shared.may_log("block client disconnected", None) {
                    tracing::info!(%peer, export, "block client disconnected: {gone}");
                }
            }
        }
        drop(client);
        self.free.push(index);
        self.blocks.give_place_back(&self.shared);
    }
}

/// Detects a machine that is gone, and sends long replies in few calls.
fn prepare(stream: &Stream, heartbeat: Duration) {
    if let Err(error) = stream.keep_alive(heartbeat) {
        tracing::debug!(%error, peer = %stream.peer(), "a block client went as it came");
    }
    if let Peer::Unix { .. } = stream.peer() {
        // The kernel may allow less, which is enough.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(stream, SOCKET_BYTES);
    }
}
