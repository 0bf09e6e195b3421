//! One thread of a server: it polls its connections and answers them.
//!
//! After work it looks for more for a short while before it sleeps, because a wake-up costs more than a
//! request. What came for several requests or connections by then is answered in one go.
//!
//! Who is served next, and for how long, is [`Shares`]'s decision: connections wait with what they have to
//! do, those whose handshake goes on as if they were one tenant more.

use super::block::Blocks;
use super::connection::{Connection, End, Service, Turn};
use super::held::Held;
use super::lock::lock;
use super::poll_set::{Events, Idle, PollSet, Ready, is_want, slot_of, token};
use super::shared::{Arrival, Shared};
use super::tenants::Tenant;
use super::unauthenticated::Unauthenticated;
use rampool_lease::{Payer, Shares};
use rampool_net::transport::{
    Endpoint, Handshake, Link, LinkError, Listener, LocalPolicy, Peer, Stream, Wants,
};
use rampool_wire::session::{Refusal, features};
use rustix::event::epoll;
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A client must finish its handshake within this time.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// A client asks for its lease within this time, or sends another request.
const LEASELESS_SILENCE: Duration = Duration::from_secs(5);
/// A connection that has had no lease for so long gives up its place where all places are taken.
const LEASELESS_PLACE: Duration = Duration::from_secs(2);
/// Connections that are accepted in one turn: those that are here already are served between.
const MOST_ACCEPTED: usize = 16;
/// A connection that waits for a lease which another thread works on asks again after this.
const ASKS_AGAIN_AFTER: Duration = Duration::from_micros(100);
/// Connections have their turns for so long before this shard looks for others that have something to do.
const BETWEEN_LOOKS: Duration = Duration::from_micros(100);
/// Refused connections that are told the reason at a time; a peer that is slow to read it is closed without.
const MOST_TURNED_AWAY: usize = 64;
/// While it looks for more work, a shard reads the sockets that had data last, if they are this few, instead
/// of polling the poll set: one call less for each.
const MOST_WARM: usize = 4;
/// How many empty reads of the warm sockets it makes before it polls everything.
const WARM_LOOKS: u32 = 16;
/// The same where all connections are over shared memory.
const RING_LOOKS: u32 = 256;
/// A warm socket that had data so often without this shard falling asleep in between leaves the poll set.
/// Within a machine the sender pays for each event of the poll set, and a socket that is polled anyway needs
/// none.
const LEAVES_AFTER: u32 = 64;
/// It is back in the poll set after so many empty reads: for a millisecond or so.
const BACK_AFTER: u32 = 4096;
/// Connections over shared memory that are polled without asking their clients to ring.
const MOST_AWAKE: usize = 16;
/// How often they are asked to ring at all: the busy ones must not starve the others.
const WARM_TURNS: u32 = 64;
const RING_TURNS: u32 = 1024;

pub(super) struct Shard {
    index: usize,
    shared: Arc<Shared>,
    poll: PollSet,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Connections with something to do; `None`: those whose handshake goes on.
    shares: Shares<Option<Payer>>,
    /// Those of tenants that have had as much as they may for now, and until when.
    delayed: BTreeSet<(Instant, u64)>,
    /// The tenants' rules when they were last looked at.
    rules: u64,
    /// Connections of the last events, but for those over shared memory.
    warm: Vec<u64>,
    /// Connections over shared memory whose client does not ring for its writes; no more than `MOST_AWAKE`,
    /// the latest last.
    awake: VecDeque<u64>,
    /// Handshakes that go on, of those that have a place, and of those that have none.
    unauthenticated: Unauthenticated,
    turned_away: Unauthenticated,
    turning_away: usize,
    next_shard: usize,
    service: Service,
}

struct Slot {
    /// Tells a new connection of this slot from an event for its predecessor.
    generation: u32,
    state: State,
    interest: epoll::EventFlags,
    /// It is among those that are awake.
    awake: bool,
    /// It is in the poll set. Invariant: what is not is warm, and asked before this shard sleeps or forgets
    /// that it is.
    polled: bool,
    /// How often a read had data, since it came into the poll set; and how often it was empty, since the last
    /// data.
    found: u32,
    missed: u32,
}

enum State {
    Free,
    /// `has_place`: it counts as a connection; otherwise it is told that it cannot be one.
    Shaking {
        handshake: Box<Handshake>,
        deadline: Instant,
        has_place: bool,
    },
    Connected(Box<Connection>),
}

impl Slot {
    /// Whether this token is of the connection that it has now.
    fn has(&self, token: u64) -> bool {
        u64::from(self.generation) == token >> 32
    }

    /// The kernel does not report its bytes: it must be polled, or asked to ring.
    fn bypasses_kernel(&self) -> bool {
        matches!(&self.state, State::Connected(connection) if !connection.link().asks_kernel())
    }
}

impl Shard {
    pub(super) fn new(
        index: usize,
        shared: Arc<Shared>,
        blocks: Arc<Blocks>,
        listeners: Vec<Listener>,
    ) -> Result<Self, rustix::io::Errno> {
        let poll = PollSet::new(&shared.shards[index].doorbell, listeners)?;
        let (slots, free, warm) = (Vec::new(), Vec::new(), Vec::with_capacity(MOST_WARM));
        let awake = VecDeque::with_capacity(MOST_AWAKE + 1);
        let (unauthenticated, turned_away) = (Unauthenticated::default(), Unauthenticated::default());
        let service = Service::new(Arc::clone(&shared), blocks);
        let (turning_away, next_shard) = (0, 0);
        Ok(Self {
            index,
            shared,
            poll,
            slots,
            free,
            shares: Shares::default(),
            delayed: BTreeSet::new(),
            rules: 0,
            warm,
            awake,
            unauthenticated,
            turned_away,
            turning_away,
            next_shard,
            service,
        })
    }

    /// Works until the server stops.
    pub(super) fn run(mut self) {
        let sweep_every = self.sweep_interval();
        let mut events = Events::new();
        let mut idle = Idle::new(self.shared.config.spin);
        rampool_kernel::thread::ask_for_short_slices();
        let mut next_sweep = Instant::now() + sweep_every;
        let (mut looks, mut turns) = (0, 0);
        let mut looked = Instant::now();
        while !self.shared.stopping() {
            let now = Instant::now();
            let away = now.duration_since(std::mem::replace(&mut looked, now));
            if away > 2 * sweep_every {
                self.excuse(away, now);
            }
            if self.service.alarm.is_some_and(|alarm| now >= alarm) {
                self.sound_alarm(now);
            }
            if now >= next_sweep {
                self.sweep(now);
                next_sweep = now + sweep_every;
            }
            self.end_delays(now);
            let busy = !self.shares.is_empty();
            let spinning = busy || idle.looks(now);
            let (most_looks, most_turns) =
                if self.warm.is_empty() { (RING_LOOKS, RING_TURNS) } else { (WARM_LOOKS, WARM_TURNS) };
            let any = !(self.warm.is_empty() && self.awake.is_empty());
            if spinning && !busy && looks < most_looks && turns < most_turns && any {
                looks += 1;
                turns += 1;
                if self.look_at_warm(now) {
                    idle.found();
                    looks = 0;
                } else {
                    idle.found_nothing(now, true);
                }
                continue;
            }
            (looks, turns) = (0, 0);
            if !spinning {
                if !self.let_all_ring() {
                    continue;
                }
                self.poll_all();
            }
            let due = self.service.alarm.map_or(next_sweep, |alarm| alarm.min(next_sweep));
            let due = self.delayed.first().map_or(due, |(until, _)| due.min(*until));
            let timeout = if spinning { Duration::ZERO } else { due.saturating_duration_since(now) };
            if !spinning {
                idle.sleeps();
                self.shared.shards[self.index].sleeps.fetch_add(1, Ordering::Relaxed);
            }
            self.poll.wait(&mut events, timeout);
            if events.is_empty() && !busy {
                idle.found_nothing(now, spinning);
                continue;
            }
            idle.found();
            self.warm_up(&events);
            let now = Instant::now();
            if busy {
                // The poll set does not tell of all of these.
                self.wake_warm();
            }
            for ready in events.iter() {
                match ready {
                    Ready::Doorbell => self.answer_doorbell(now),
                    Ready::Listener(index) => self.accept(index),
                    Ready::Connection(token) => self.wake(token),
                }
            }
            self.serve(now);
        }
        for index in 0..self.slots.len() {
            self.close(index, &End::Stopping);
        }
    }

    /// Connections with data now probably have more soon. Of those that were warm, the ones outside of the
    /// poll set stay.
    fn warm_up(&mut self, events: &Events) {
        self.warm.retain(|token| {
            self.slots.get(slot_of(*token)).is_some_and(|slot| !slot.polled && slot.has(*token))
        });
        if self.shared.config.spin.is_zero() || self.warm.len() + events.len() > MOST_WARM {
            return self.poll_all();
        }
        for ready in events.iter() {
            if let Ready::Connection(token) = ready
                && self.slots.get(slot_of(token)).is_some_and(|slot| !slot.bypasses_kernel())
            {
                self.warm.push(token);
            }
        }
    }

    /// Nothing is warm, and everything is in the poll set.
    fn poll_all(&mut self) {
        while let Some(token) = self.warm.pop() {
            let slot = &mut self.slots[slot_of(token)];
            if slot.has(token) {
                slot.found = 0;
                self.poll_again(slot_of(token));
            }
        }
    }

    /// Puts a connection back into the poll set, which reports at once what has arrived meanwhile.
    fn poll_again(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let State::Connected(connection) = &slot.state else { return };
        if std::mem::replace(&mut slot.polled, true) {
            return;
        }
        (slot.found, slot.missed) = (0, 0);
        let token = token(index, slot.generation);
        if let Err(error) = self.poll.add(connection.link(), token, slot.interest) {
            // Others have taken what the kernel has for this.
            self.close(index, &End::Link(LinkError::Io(error.into())));
        }
    }

    /// A warm connection was read. False: it is not warm any more.
    fn count_look(&mut self, token: u64, found: bool) -> bool {
        let index = slot_of(token);
        let slot = &mut self.slots[index];
        if slot.bypasses_kernel() || !slot.has(token) {
            return true;
        }
        if found {
            slot.missed = 0;
            slot.found = slot.found.saturating_add(1);
            if slot.found >= LEAVES_AFTER
                && slot.interest == epoll::EventFlags::IN
                && let State::Connected(connection) = &slot.state
                && std::mem::take(&mut slot.polled)
            {
                self.poll.remove(connection.link()).expect("it is in the poll set");
            }
            return true;
        }
        slot.missed += 1;
        let goes_on = slot.missed < BACK_AFTER;
        if !goes_on {
            slot.missed = 0;
            self.poll_again(index);
        }
        goes_on
    }

    /// Reads the warm and the awake connections; returns whether any had data.
    fn look_at_warm(&mut self, now: Instant) -> bool {
        let mut any = false;
        let mut tokens = [0; MOST_WARM + MOST_AWAKE];
        let mut count = 0;
        for (place, token) in tokens.iter_mut().zip(self.warm.iter().chain(&self.awake)) {
            *place = *token;
            count += 1;
        }
        self.wake_warm();
        self.serve(now);
        for token in &tokens[..count] {
            let slot = &self.slots[slot_of(*token)];
            let found = matches!(&slot.state, State::Connected(connection) if connection.heard == now);
            any |= found;
            if !self.count_look(*token, found) {
                self.warm.retain(|warm| warm != token);
            }
        }
        any
    }

    /// A connection over shared memory has had its turn: it is polled while this shard is awake, instead of
    /// being asked to ring.
    fn keep_awake(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        if std::mem::replace(&mut slot.awake, true) {
            return;
        }
        self.awake.push_back(token(index, slot.generation));
        if self.awake.len() > MOST_AWAKE {
            self.let_one_ring();
        }
    }

    /// The connection that has been awake for longest is asked to ring from now on. What it has written
    /// already is read now.
    fn let_one_ring(&mut self) {
        let Some(token) = self.awake.pop_front() else { return };
        let Some(slot) = self.slots.get_mut(slot_of(token)) else { return };
        if !slot.has(token) {
            return;
        }
        slot.awake = false;
        let State::Connected(connection) = &slot.state else { return };
        if !connection.may_sleep(&self.shared) {
            self.wake(token);
        }
    }

    /// Before this shard sleeps. False: do not sleep, there is something to do.
    fn let_all_ring(&mut self) -> bool {
        while !self.awake.is_empty() {
            self.let_one_ring();
        }
        self.shares.is_empty()
    }

    fn sweep_interval(&self) -> Duration {
        let config = &self.shared.config;
        (config.silence.min(config.grace) / 2).clamp(Duration::from_millis(5), Duration::from_millis(500))
    }

    fn accept(&mut self, listener: usize) {
        for _ in 0..MOST_ACCEPTED {
            let stream = match self.poll.listener(listener).accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(error) => {
                    self.shared.log_peer_error("could not accept a connection", None, &error);
                    if is_want(&error) && !self.make_room(Instant::now()) {
                        // The connection waits in the kernel until the next sweep.
                        self.poll.listen(false);
                        return;
                    }
                    continue;
                }
            };
            if let Err(error) = stream.keep_alive(self.shared.config.heartbeat) {
                tracing::debug!(%error, peer = %stream.peer(), "a connection went as it came");
                continue;
            }
            let refusal = self.judge(&stream);
            let may_stay = refusal.is_none();
            let config = &self.shared.config;
            let rings = match config.rings {
                true => features::RINGS | features::PUBLISH | features::LONG_RINGS,
                false => 0,
            };
            let ucx = match self.poll.listener(listener).endpoint() {
                // Made when the server began to listen.
                Endpoint::Ucx { .. } => rampool_ucx::Context::process().ok(),
                Endpoint::Tcp { .. } | Endpoint::Unix(_) => None,
            };
            let file = self.shared.store.file().filter(|_| config.open_frames.are_for(&stream));
            let places = if file.is_some() { features::PLACES } else { 0 };
            let features = self.shared.store.features() | rings | places | features::PIECES;
            let local = LocalPolicy { key: config.key.clone(), encryption: config.encryption, features, ucx };
            let frames = file.and_then(|file| file.try_clone_to_owned().ok());
            let gate = self.shared.tenants.gate();
            let handshake = Handshake::server(stream, local, refusal).with_frames(frames).with_gate(gate);
            let target = self.next_shard % self.shared.shards.len();
            self.next_shard = self.next_shard.wrapping_add(1);
            if target == self.index {
                self.add(Arrival { handshake, may_stay }, Instant::now());
            } else {
                let mailbox = &self.shared.shards[target];
                lock(&mailbox.arrivals).push(Arrival { handshake, may_stay });
                mailbox.ring();
            }
        }
    }

    /// Whether this peer may not be a client, even if there is room.
    fn judge(&self, stream: &Stream) -> Option<Refusal> {
        (!self.shared.allows(stream.peer())).then_some(Refusal::User)
    }

    fn answer_doorbell(&mut self, now: Instant) {
        let mut rings = [0; 8];
        // Whether the doorbell was rung more than once makes no difference.
        let _ = rustix::io::read(&self.shared.shards[self.index].doorbell, &mut rings);
        let arrivals = std::mem::take(&mut *lock(&self.shared.shards[self.index].arrivals));
        for arrival in arrivals {
            self.add(arrival, now);
        }
        let delivered = std::mem::take(&mut *lock(&self.shared.shards[self.index].delivered));
        for done in delivered {
            let index = slot_of(done.token);
            let Some(slot) = self.slots.get_mut(index) else { continue };
            let State::Connected(connection) = &mut slot.state else { continue };
            if u64::from(slot.generation) == done.token >> 32 {
                let began = Instant::now();
                connection.delivered(&mut self.service, done);
                let flushed = connection.flush(&mut self.service.slice, now);
                self.pay(index, began);
                self.after(index, flushed.map(|_| Turn::Idle));
            }
        }
        self.service.posts = std::mem::take(&mut *lock(&self.shared.shards[self.index].posts));
        self.hand_out(now);
        let draining = self.shared.draining();
        let rules = self.shared.tenants.changes();
        let changed = std::mem::replace(&mut self.rules, rules) != rules;
        for index in 0..self.slots.len() {
            let State::Connected(connection) = &mut self.slots[index].state else { continue };
            if changed && connection.is_revoked(&self.shared) {
                self.close(index, &End::Revoked);
                continue;
            }
            if draining {
                connection.say_draining(&self.shared);
            }
            let began = Instant::now();
            if connection.is_parked() {
                connection.ask_again(&mut self.service);
            } else if !draining {
                continue;
            }
            let flushed = connection.flush(&mut self.service.slice, now);
            self.pay(index, began);
            self.after(index, flushed.map(|_| Turn::Idle));
        }
    }

    /// Starts the handshake of a new connection. Where no place is free, it takes the place of the connection
    /// that has been in its handshake for longest, if there is one.
    fn add(&mut self, arrival: Arrival, now: Instant) {
        let Arrival { mut handshake, may_stay } = arrival;
        let has_place =
            may_stay && (self.shared.take_place() || self.make_room(now) && self.shared.take_place());
        if may_stay && !has_place {
            handshake.refuse(Refusal::TooManyConnections);
        }
        let index = self.free.pop().unwrap_or_else(|| {
            let interest = epoll::EventFlags::IN;
            self.slots.push(Slot {
                generation: 0,
                state: State::Free,
                interest,
                awake: false,
                polled: true,
                found: 0,
                missed: 0,
            });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        slot.generation = slot.generation.wrapping_add(1);
        slot.interest = epoll::EventFlags::IN;
        (slot.awake, slot.polled) = (false, true);
        (slot.found, slot.missed) = (0, 0);
        let token = token(index, slot.generation);
        if let Err(error) = self.poll.add(&handshake, token, slot.interest) {
            self.shared.log_peer_error("cannot poll a new connection", Some(handshake.peer()), &error);
            self.free.push(index);
            if has_place {
                self.shared.give_place_back();
            }
            return;
        }
        slot.state =
            State::Shaking { handshake: Box::new(handshake), deadline: now + HANDSHAKE_TIME, has_place };
        self.shares.join(index, None);
        let slots = &self.slots;
        if has_place {
            self.unauthenticated.add(token, |token| shakes(slots, token));
        } else {
            self.turned_away.add(token, |token| shakes(slots, token));
            self.turning_away += 1;
            if self.turning_away > MOST_TURNED_AWAY
                && let Some(oldest) = self.turned_away.take_oldest(|token| shakes(slots, token))
            {
                self.forget(slot_of(oldest));
            }
        }
        // At once: a client that has sent all it must is not one that keeps its place in silence.
        self.turn(index, now);
    }

    /// Something happened on this connection, or it has more to do.
    fn wake(&mut self, token: u64) {
        if self.slots.get(slot_of(token)).is_some_and(|slot| slot.has(token)) {
            self.shares.wake(slot_of(token));
        }
    }

    /// Those that the poll set does not tell of, or not soon.
    fn wake_warm(&mut self) {
        for place in 0..self.warm.len() {
            self.wake(self.warm[place]);
        }
        for place in 0..self.awake.len() {
            self.wake(self.awake[place]);
        }
    }

    /// Gives turns, until none has anything to do, or it is time to look for others.
    fn serve(&mut self, now: Instant) {
        let began = Instant::now();
        let mut at = began;
        while let Some(index) = self.shares.pick() {
            let tenant = match &self.slots[index].state {
                State::Connected(connection) => Some(Arc::clone(connection.tenant())),
                State::Free | State::Shaking { .. } => None,
            };
            let moved = self.moved_bytes();
            match &tenant {
                Some(tenant) if self.delay(index, tenant, now) => {}
                _ => self.turn(index, now),
            }
            let end = Instant::now();
            let time_ns = u64::try_from(end.duration_since(at).as_nanos()).unwrap_or(u64::MAX);
            at = end;
            let (mut elsewhere_ns, mut weight) = (0, 1);
            if let Some(tenant) = tenant {
                (elsewhere_ns, weight) = (tenant.served(self.index, time_ns), tenant.weight());
                let now_ns = || self.shared.now_ns();
                tenant.moved(now_ns, self.moved_bytes().wrapping_sub(moved));
            }
            self.shares.served(time_ns, elsewhere_ns, weight);
            if end.duration_since(began) >= BETWEEN_LOOKS {
                return;
            }
        }
    }

    /// Something was done for this connection since then. Its tenant pays; in a turn the turn does. Returns
    /// what the time is.
    fn pay(&mut self, index: usize, since: Instant) -> Instant {
        if self.shares.is_serving() {
            return since;
        }
        let now = Instant::now();
        if let State::Connected(connection) = &self.slots[index].state {
            let time_ns = u64::try_from(now.duration_since(since).as_nanos()).unwrap_or(u64::MAX);
            let tenant = connection.tenant();
            let (elsewhere_ns, weight) = (tenant.served(self.index, time_ns), tenant.weight());
            self.shares.charge(index, time_ns, elsewhere_ns, weight);
        }
        now
    }

    /// Bytes of pages that this shard has moved.
    fn moved_bytes(&self) -> u64 {
        let counts = &self.shared.shards[self.index].counts;
        counts.bytes_in.load(Ordering::Relaxed).wrapping_add(counts.bytes_out.load(Ordering::Relaxed))
    }

    /// Whether the tenant of this connection has had as much as it may for now. Then it goes on later.
    fn delay(&mut self, index: usize, tenant: &Tenant, now: Instant) -> bool {
        let until_ns = tenant.may_go_on_ns();
        if until_ns == 0 || until_ns <= self.shared.now_ns() {
            return false;
        }
        let until = (self.shared.started + Duration::from_nanos(until_ns)).max(now);
        self.delayed.insert((until, token(index, self.slots[index].generation)));
        let State::Connected(connection) = &self.slots[index].state else { return true };
        let queued = connection.link().queued_bytes() > 0;
        self.watch(index, if queued { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() });
        true
    }

    /// Those that may go on by now have something to do.
    fn end_delays(&mut self, now: Instant) {
        while let Some((until, token)) = self.delayed.first().copied()
            && until <= now
        {
            self.delayed.pop_first();
            let index = slot_of(token);
            if self.slots[index].has(token) {
                self.watch(index, epoll::EventFlags::IN);
                self.wake(token);
            }
        }
    }

    /// Makes room: the connection of this shard whose handshake goes on for longest ends, or the one that has
    /// had no lease for longest. False: there is none.
    fn make_room(&mut self, now: Instant) -> bool {
        let slots = &self.slots;
        if let Some(oldest) = self.unauthenticated.take_oldest(|token| shakes(slots, token)) {
            self.fail(slot_of(oldest), "it did not finish before its place was given to another client");
            return true;
        }
        let since = |slot: &Slot| match &slot.state {
            State::Connected(connection) => connection
                .leaseless_since()
                .filter(|since| now.saturating_duration_since(*since) >= LEASELESS_PLACE),
            State::Free | State::Shaking { .. } => None,
        };
        let leaseless = self.slots.iter().enumerate().filter_map(|(index, slot)| Some((since(slot)?, index)));
        let Some((_, index)) = leaseless.min() else { return false };
        self.close(index, &End::MadeRoom);
        true
    }

    /// A handshake has failed.
    fn fail(&mut self, index: usize, error: impl std::fmt::Display) {
        let State::Shaking { handshake, .. } = &self.slots[index].state else { return };
        self.shared.log_peer_error("handshake failed", Some(handshake.peer()), &error);
        self.shared.shards[self.index].failed_handshakes.fetch_add(1, Ordering::Relaxed);
        self.forget(index);
    }

    /// The turn of this connection.
    fn turn(&mut self, index: usize, now: Instant) {
        let slot = &mut self.slots[index];
        let token = token(index, slot.generation);
        match &mut slot.state {
            State::Free => {}
            State::Shaking { handshake, has_place, .. } => match handshake.advance::<Held>() {
                Ok(None) => {
                    let flags = match handshake.wants() {
                        Wants::Read => epoll::EventFlags::IN,
                        Wants::Write => epoll::EventFlags::OUT,
                    };
                    self.watch(index, flags);
                }
                Ok(Some(link)) => {
                    assert!(*has_place, "a connection without a place is refused");
                    if link.as_fd().as_raw_fd() != link.socket().as_raw_fd()
                        && !self.watch_instead(index, &link)
                    {
                        return self.forget(index);
                    }
                    tracing::debug!(peer = %link.peer(), security = ?link.security(), means = %link.means(), "connected");
                    let tenant = self.shared.tenants.of(link.tenant().map(|tenant| tenant.name));
                    if !self.shared.connect(&tenant) {
                        self.shared.log_peer_error(
                            "a tenant has too many connections",
                            Some(link.peer()),
                            &tenant.name.map_or_else(String::new, |name| name.to_string()),
                        );
                        drop(link);
                        return self.forget(index);
                    }
                    self.shares.leave(index);
                    self.shares.join(index, Some(tenant.name));
                    let slot = &mut self.slots[index];
                    let replies = Arc::clone(&self.shared.replies);
                    let mut connection = Connection::new(link, tenant, replies, self.index, token, now);
                    // A process of a program that is still served, or a status query: only a new lease is
                    // refused.
                    if self.shared.draining() {
                        connection.say_draining(&self.shared);
                    }
                    let is_revoked = connection.is_revoked(&self.shared);
                    slot.state = State::Connected(Box::new(connection));
                    if is_revoked {
                        // While it shook hands.
                        return self.close(index, &End::Revoked);
                    }
                    self.wake(token);
                }
                Err(error) => self.fail(index, error),
            },
            State::Connected(connection) => {
                let received = connection.receive(&mut self.service, now);
                if !self.service.posts.is_empty() {
                    // Others have waited for these: they leave before the connection's own answers.
                    self.hand_out(now);
                }
                let slot = &mut self.slots[index];
                let quiet = matches!(received, Ok(Turn::Idle))
                    && slot.interest == epoll::EventFlags::IN
                    && !slot.bypasses_kernel();
                let State::Connected(connection) = &mut slot.state else { return };
                if quiet && connection.heard != now && connection.link().queued_bytes() == 0 {
                    // An empty read.
                    connection.took = now;
                    return;
                }
                // Replies before an error are still sent: the client learns why.
                let flushed = if connection.sends() && received.is_ok() {
                    Ok(())
                } else {
                    connection.flush(&mut self.service.slice, now).map(drop)
                };
                self.after(index, received.and_then(|turn| flushed.map(|()| turn)));
            }
        }
    }

    /// Brings the queue replies in the service to their connections and sends them, those of one
    /// connection in one go.
    fn hand_out(&mut self, now: Instant) {
        let (mut others, mut told) = (Vec::new(), Vec::new());
        let mut at = Instant::now();
        for post in std::mem::take(&mut self.service.posts) {
            if post.shard != self.index {
                others.push(post);
                continue;
            }
            let index = slot_of(post.token);
            let Some(slot) = self.slots.get_mut(index) else { continue };
            let State::Connected(connection) = &mut slot.state else { continue };
            if u64::from(slot.generation) == post.token >> 32 {
                connection.told(&mut self.service, post);
                if !told.contains(&index) {
                    told.push(index);
                }
                at = self.pay(index, at);
            }
        }
        for index in told {
            let State::Connected(connection) = &mut self.slots[index].state else { continue };
            let flushed = connection.flush(&mut self.service.slice, now);
            at = self.pay(index, at);
            self.after(index, flushed.map(|_| Turn::Idle));
        }
        self.shared.post(others);
    }

    /// A request has waited in a queue for long enough.
    fn sound_alarm(&mut self, now: Instant) {
        self.service.alarm = None;
        for index in 0..self.slots.len() {
            if let State::Connected(connection) = &self.slots[index].state {
                let began = Instant::now();
                connection.queue_alarm(&mut self.service);
                self.pay(index, began);
            }
        }
        self.hand_out(now);
    }

    /// What follows a turn.
    fn after(&mut self, index: usize, turn: Result<Turn, End>) {
        let turn = match turn {
            Ok(turn) => turn,
            Err(end) => return self.close(index, &end),
        };
        let slot = &self.slots[index];
        let State::Connected(connection) = &slot.state else { return };
        // A connection that was full and has room again after sending may have requests in its buffer that no
        // event will tell of.
        if turn == Turn::More
            || connection.sends()
            || (turn == Turn::Full && !connection.is_full(&self.shared))
        {
            self.shares.wake(index);
        } else if turn == Turn::Later {
            self.delayed.insert((Instant::now() + ASKS_AGAIN_AFTER, token(index, slot.generation)));
        }
        if slot.bypasses_kernel() {
            // Whatever happens there, the doorbell rings or the socket ends.
            self.keep_awake(index);
            return self.watch(index, epoll::EventFlags::IN);
        }
        let mut flags = epoll::EventFlags::empty();
        if !matches!(turn, Turn::Full | Turn::Later) {
            flags |= epoll::EventFlags::IN;
        }
        if connection.link().queued_bytes() > 0 {
            flags |= epoll::EventFlags::OUT;
        }
        self.watch(index, flags);
    }

    /// A connection is watched by a descriptor other than the socket that it was made over. False: that
    /// failed.
    fn watch_instead(&mut self, index: usize, link: &Link<Held>) -> bool {
        let slot = &mut self.slots[index];
        slot.interest = epoll::EventFlags::IN;
        let token = token(index, slot.generation);
        let watched =
            self.poll.remove(link.socket()).and_then(|()| self.poll.add(link, token, slot.interest));
        if let Err(error) = &watched {
            tracing::warn!(%error, peer = %link.peer(), "cannot poll a new connection");
        }
        watched.is_ok()
    }

    fn watch(&mut self, index: usize, flags: epoll::EventFlags) {
        let slot = &mut self.slots[index];
        if slot.interest == flags {
            return;
        }
        slot.interest = flags;
        if !slot.polled {
            return self.poll_again(index);
        }
        let fd: BorrowedFd<'_> = match &slot.state {
            State::Free => return,
            State::Shaking { handshake, .. } => handshake.as_fd(),
            State::Connected(connection) => connection.link().as_fd(),
        };
        self.poll.modify(fd, token(index, slot.generation), flags);
    }

    /// This shard did not run for so long, for want of a CPU, say. It has not yet read what came meanwhile,
    /// so no deadline advances by that time.
    fn excuse(&mut self, away: Duration, now: Instant) {
        for slot in &mut self.slots {
            match &mut slot.state {
                State::Free => {}
                State::Shaking { deadline, .. } => *deadline += away,
                State::Connected(connection) => connection.excuse(away, now),
            }
        }
    }

    /// Ends what has been silent, stuck or unfinished for too long.
    fn sweep(&mut self, now: Instant) {
        self.poll.listen(true);
        if self.index == 0 {
            self.shared.log_repeated(false);
        }
        let silence = self.shared.config.silence;
        let draining_over = self.shared.draining() && self.shared.drain_left_ms() == 0;
        for index in 0..self.slots.len() {
            let end = match &mut self.slots[index].state {
                State::Free => None,
                State::Shaking { deadline, .. } => {
                    if now >= *deadline {
                        self.fail(index, "it was not finished in time");
                    }
                    None
                }
                State::Connected(_) if draining_over => Some(End::Stopping),
                State::Connected(connection) => {
                    if connection.is_parked() {
                        let began = Instant::now();
                        connection.ask_again(&mut self.service);
                        let flushed = connection.flush(&mut self.service.slice, now);
                        self.pay(index, began);
                        self.after(index, flushed.map(|_| Turn::Idle));
                        continue;
                    }
                    let (unread, unheard) =
                        (connection.link().queued_bytes() > 0, now.duration_since(connection.heard));
                    let leaseless = connection.leaseless_since().is_some();
                    if unread && now.duration_since(connection.took) >= silence {
                        Some(End::Stuck)
                    } else if (!unread && unheard >= silence) || (leaseless && unheard >= LEASELESS_SILENCE) {
                        Some(End::Silent)
                    } else if connection.is_replaced() {
                        Some(End::Replaced)
                    } else {
                        None
                    }
                }
            };
            if let Some(end) = end {
                self.close(index, &end);
            }
        }
    }

    fn close(&mut self, index: usize, end: &End) {
        if !matches!(self.slots[index].state, State::Connected(_)) {
            return self.forget(index);
        }
        let State::Connected(mut connection) = std::mem::replace(&mut self.slots[index].state, State::Free)
        else {
            unreachable!()
        };
        let peer = connection.link().peer().clone();
        match end {
            End::Goodbye | End::Replaced | End::Stopping => tracing::debug!(%peer, "disconnected: {end}"),
            End::Revoked => {
                connection.audit_revoked();
                self.shared.log_peer_error("disconnected", Some(&peer), end);
            }
            End::MadeRoom => self.shared.log_peer_error("disconnected", Some(&peer), end),
            // Status queries come and go, every second perhaps.
            End::Link(LinkError::Closed | LinkError::Io(_)) if !connection.has_lease() => {
                tracing::debug!(%peer, "disconnected: {end}")
            }
            End::Link(LinkError::Closed | LinkError::Io(_)) => {
                if self.shared.may_log("disconnected", connection.tenant().name) {
                    tracing::info!(tenant = %connection.tenant_name(), %peer, "disconnected: {end}");
                }
            }
            End::Link(_) | End::Protocol(_) => {
                self.shared.shards[self.index].protocol_errors.fetch_add(1, Ordering::Relaxed);
                self.shared.log_peer_error("disconnected", Some(&peer), end);
            }
            End::Silent | End::Stuck => self.shared.log_peer_error("disconnected", Some(&peer), end),
        }
        // What is queued, perhaps the reason, leaves if the socket takes it.
        let _ = connection.flush(&mut self.service.slice, Instant::now());
        self.let_go(connection.link().peer(), connection.link().socket());
        connection.close(&self.shared);
        self.shares.leave(index);
        self.release_slot(index);
    }

    /// A Unix socket is about to be closed, and with it untaken descriptors in it, so another thread closes
    /// it.
    fn let_go(&self, peer: &Peer, socket: BorrowedFd<'_>) {
        if !matches!(peer, Peer::Unix { .. }) {
            return;
        }
        // It stays open for a while. It may not be watched now.
        let _ = self.poll.remove(socket);
        if let Ok(socket) = socket.try_clone_to_owned() {
            // The client learns of it now, however long others keep the thread that closes.
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
            self.shared.close_elsewhere(socket);
        }
    }

    /// A handshake is over without a connection.
    fn forget(&mut self, index: usize) {
        if let State::Shaking { handshake, .. } = &self.slots[index].state
            && let Some(stream) = handshake.socket()
        {
            self.let_go(stream.peer(), stream.as_fd());
        }
        self.shares.leave(index);
        match std::mem::replace(&mut self.slots[index].state, State::Free) {
            State::Free => {}
            State::Shaking { has_place: false, .. } => {
                self.turning_away -= 1;
                self.free.push(index);
            }
            State::Shaking { has_place: true, .. } | State::Connected(_) => self.release_slot(index),
        }
    }

    /// The descriptor is closed, and with it out of the poll set.
    fn release_slot(&mut self, index: usize) {
        self.free.push(index);
        self.shared.give_place_back();
    }
}

/// Whether the handshake of this token's connection goes on.
fn shakes(slots: &[Slot], token: u64) -> bool {
    slots
        .get(slot_of(token))
        .is_some_and(|slot| slot.has(token) && matches!(slot.state, State::Shaking { .. }))
}
