//! One rank: its engine, its pages, its connections, and the threads that wait. Whichever thread holds the
//! lock drives it: the service thread with faults, messages and time, the program's threads with their
//! operations.
//!
//! The engine decides; this module carries out its decisions. See the driving contract in
//! [`rampool_sharing`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rampool_kernel::thread::SignalsHeld;
use rampool_sharing::allocator::{Allocator, Order};
use rampool_sharing::control::{Answer, Control, Demand};
use rampool_sharing::{
    Action, BarrierId, Body, Config, DirectOp, Engine, Event, LockId, Message, OpResult, ProtocolKind, Rank,
    Reason, RegionConfig, SyncOp, ThreadId, TimerId,
};
use rampool_wire::units::{ByteLen, OS_PAGE_BYTES, PageIndex};

use super::account::{Account, Category};
use super::config::{OnFailure, SharedConfig, Transport};
use super::datagrams::Datagrams;
use super::failure;
use super::line::{Incoming, Line, LineError, Stay};
use super::memory::{FaultAt, SharedMemory};
use super::stats::SharedStats;
use super::watch::{Ready, Watch};
use rampool_net::transport::{Glance, Means};
use relink::{Link, Links};
use waiters::{Waiters, Wake};
pub(super) use waits::Waiting;
use waits::{Inquiry, Thread};

mod relink;
mod waiters;
mod waits;

/// The result of a thread's wait.
#[derive(Debug)]
pub(super) enum Outcome {
    Operation(OpResult),
    Answer(Answer),
    /// All ranks have finished.
    Finished,
    Stopped(Reason),
}

/// Where a thread waits for its one outstanding operation.
#[derive(Debug, Default)]
pub(super) struct Slot {
    ready: AtomicBool,
    state: Mutex<SlotState>,
}

#[derive(Debug, Default)]
struct SlotState {
    outcome: Option<Outcome>,
    /// The thread, while it sleeps.
    sleeper: Option<std::thread::Thread>,
}

impl Slot {
    fn complete(&self, outcome: Outcome) {
        let mut state = self.state();
        state.outcome = Some(outcome);
        self.ready.store(true, Ordering::Release);
        if let Some(sleeper) = &state.sleeper {
            sleeper.unpark();
        }
    }

    /// Whether the outcome is there.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// The outcome, if it is there.
    pub fn take(&self) -> Option<Outcome> {
        let outcome = self.state().outcome.take();
        if outcome.is_some() {
            self.ready.store(false, Ordering::Release);
        }
        outcome
    }

    /// Waits until the outcome is there, or until `deadline`. Signals come in while the thread sleeps: it
    /// holds no lock then, so a handler may touch shared memory.
    pub fn sleep(&self, deadline: Option<Instant>, signals: &SignalsHeld) {
        self.state().sleeper = Some(std::thread::current());
        while !self.is_ready() {
            match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => signals.released(std::thread::park),
                Some(left) if left.is_zero() => break,
                Some(left) => signals.released(|| std::thread::park_timeout(left)),
            }
        }
        self.state().sleeper = None;
    }

    fn state(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().expect("no thread panics while holding it")
    }
}

/// Another rank.
struct Peer {
    line: Line,
    heard: Instant,
    /// When the last heartbeat was sent to it.
    beat: Instant,
    /// It has finished, after this many barriers.
    bye: Option<u32>,
    /// The end of what this rank sent to it.
    bye_end: u64,
    closed: bool,
    /// Reconnects it, if its connection may be cut.
    link: Option<Link>,
    /// The watch reports when the connection takes more.
    backlog: bool,
}

/// A rank. See the module.
pub(super) struct Host {
    rank: Rank,
    ranks: u16,
    on_failure: OnFailure,
    deadline: Option<Duration>,
    silence: Duration,
    engine: Engine,
    pub memory: SharedMemory,
    watch: Arc<Watch>,
    peers: Vec<Option<Peer>>,
    links: Links,
    /// When it last checked the other ranks.
    looked_after: Instant,
    began: Instant,
    /// Ranks that it shares memory with, and whether there are others.
    nearby: Vec<Rank>,
    sockets: bool,
    datagrams: Option<Datagrams>,
    waiters: Waiters,
    /// While a thread looks for messages, the connections may be [quiet](Line::set_quiet): there are few of
    /// them, so that is cheaper than changing the service thread's epoll set.
    may_be_quiet: bool,
    /// Messages queued since connections were last flushed.
    unsent: Unsent,
    /// When a polling thread last found something.
    came: Instant,
    threads: Vec<Thread>,
    idle_threads: VecDeque<ThreadId>,
    timers: BinaryHeap<Reverse<(Instant, TimerId)>>,
    actions: Vec<Action>,
    faults: Vec<FaultAt>,
    /// Pages that threads wait for.
    awaited: BTreeMap<PageIndex, Awaited>,
    /// When a thread last began to wait for a page, or its page came.
    last_fault: Instant,
    /// Barriers that threads wait in.
    in_barrier: BTreeMap<ThreadId, BarrierId>,
    /// The question to other ranks about what keeps a thread waiting, and how many have been asked so far.
    inquiry: Option<Inquiry>,
    inquiries: u32,
    /// Rank 0's allocator.
    allocator: Option<Allocator>,
    /// Allocations that threads wait for.
    tickets: BTreeMap<u64, ThreadId>,
    next_ticket: u64,
    turn: u32,
    stopped: Option<Reason>,
    leaving: Leaving,
    /// `aurc`, `auto`: when to offer idle time next, and how long to wait after that.
    offer: Option<(Instant, Duration)>,
    /// When memory servers last heard from this rank for no other reason.
    servers_heard: Instant,
    /// The budget of shared pages.
    local_bytes: Option<u64>,
    pub account: Account,
}

/// Since when a page is awaited, and whether the first thread to wait wanted to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Awaited {
    since: Instant,
    write: bool,
}

/// Messages that no thread waits for are sent together with the next one that a thread does wait for, or when
/// nothing has come for a moment: sending costs as much time as travelling, and more if it wakes a thread.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Unsent {
    Nothing,
    CanWait,
    Urgent,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Leaving {
    No,
    /// This thread waits in `finish`; the other ranks are told once this rank has nothing under way.
    Wanted(ThreadId),
    Told(ThreadId),
    Done,
}

/// What the service thread waits for next.
#[derive(Debug)]
pub(super) struct Plan {
    pub until: Instant,
    /// [`Host::is_urgent`].
    pub urgent: bool,
    pub stop: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self { until: Instant::now(), urgent: false, stop: false }
    }
}

/// Idle time is offered at most this often, and at least this often (for `aurc` and `auto`).
const OFFER_LEAST: Duration = Duration::from_millis(1);
const OFFER_MOST: Duration = Duration::from_millis(64);
const OFFER_BYTES: u32 = 16 << 10;
/// Each other rank hears from this rank at least this often.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Up to this many ranks, each connection is polled by itself, instead of asking epoll which of them have
/// something.
const FEW_RANKS: u16 = 3;
/// This many bytes are sent without waiting for the end of the handling.
const MUCH_BYTES: u64 = 128 << 10;
/// A moment, for a polling thread.
const MOMENT: Duration = Duration::from_micros(20);
/// Up to this many pages are prefetched into the cache while they are on their way.
const MOST_EXPECTED: usize = 4;
/// How long a failing rank may take to send its last messages.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// For this long after a fault the next one is looked for.
const FAULTS_COME_TOGETHER: Duration = Duration::from_micros(100);
/// The meaning of a connection's end when it cannot be replaced, or its peer's listener is gone.
const PROCESS_ENDED: &str = "its process ended without finishing";
/// A fault does not name its thread, and no protocol asks.
const SOMEONE: ThreadId = ThreadId(u16::MAX);

impl Host {
    pub fn new(
        config: &SharedConfig,
        engine: &Config,
        memory: SharedMemory,
        lines: Vec<Option<Line>>,
        datagrams: Option<Datagrams>,
        watch: Arc<Watch>,
        mut account: Account,
    ) -> Result<Self, rampool_sharing::ConfigError> {
        let now = Instant::now();
        let by_rank = || {
            lines
                .iter()
                .zip(0..)
                .filter_map(|(line, rank)| Some((line.as_ref()?.is_shared_memory(), Rank(rank))))
        };
        let nearby = by_rank().filter_map(|(is_shared, rank)| is_shared.then_some(rank)).collect();
        let sockets = datagrams.is_some() || by_rank().any(|(is_shared, _)| !is_shared);
        let means = |line: &Line| matches!(line.means(), Means::TCP | Means::RINGS);
        let may_be_quiet = datagrams.is_none()
            && config.ranks <= FEW_RANKS
            && !config.spin.is_zero()
            && lines.iter().flatten().all(means);
        for line in lines.iter().flatten() {
            let name = if datagrams.is_some() { Transport::Udp.name() } else { line.means().name() };
            *account.stats.connections.entry(name).or_default() += 1;
        }
        let peer = |line| Peer {
            line,
            heard: now,
            beat: now,
            bye: None,
            bye_end: 0,
            closed: false,
            link: None,
            backlog: false,
        };
        let rank = Rank(config.rank);
        Ok(Self {
            rank,
            ranks: config.ranks,
            on_failure: config.on_failure,
            deadline: config.deadline,
            silence: config.silence,
            engine: Engine::new(engine)?,
            memory,
            watch,
            peers: lines.into_iter().map(|line| line.map(peer)).collect(),
            links: Links::default(),
            looked_after: now,
            began: now,
            nearby,
            sockets,
            datagrams,
            waiters: Waiters::new(now),
            may_be_quiet,
            unsent: Unsent::Nothing,
            came: now,
            threads: Vec::new(),
            idle_threads: VecDeque::new(),
            timers: BinaryHeap::new(),
            actions: Vec::new(),
            faults: Vec::new(),
            awaited: BTreeMap::new(),
            last_fault: now,
            in_barrier: BTreeMap::new(),
            inquiry: None,
            inquiries: 0,
            allocator: (rank == Rank(0))
                .then(|| Allocator::new(config.ranks, config.range_bytes / OS_PAGE_BYTES as u64 - 1)),
            tickets: BTreeMap::new(),
            next_ticket: 0,
            turn: 0,
            stopped: None,
            leaving: Leaving::No,
            offer: None,
            servers_heard: now,
            local_bytes: config.local_bytes,
            account,
        })
    }

    // --- threads of the program ----------------------------------------------------------------------------

    /// Gives a thread a number and a slot to wait in. `None`: there are too many threads.
    pub fn admit(&mut self) -> Option<(ThreadId, Arc<Slot>)> {
        let thread = match self.idle_threads.pop_front() {
            Some(thread) => {
                self.threads[usize::from(thread.0)] = Thread::default();
                thread
            }
            None => {
                let number = u16::try_from(self.threads.len()).ok().filter(|&number| number < SOMEONE.0)?;
                self.threads.push(Thread::default());
                ThreadId(number)
            }
        };
        Some((thread, Arc::clone(&self.threads[usize::from(thread.0)].slot)))
    }

    /// Begins an operation; its outcome comes to the thread's slot, perhaps before this returns.
    pub fn begin(&mut self, thread: ThreadId, op: SyncOp) {
        if let SyncOp::Barrier { barrier, .. } = op {
            self.in_barrier.insert(thread, barrier);
            self.look_for_absent();
        }
        self.handle(Event::Sync { thread, op });
    }

    /// Like `begin`, for a direct operation. If it may not wait, and the rank is at a barrier, it ends in
    /// `Busy`.
    pub fn begin_direct(&mut self, thread: ThreadId, op: DirectOp, under: Option<LockId>, waits: bool) {
        if !waits && self.engine.is_at_barrier() {
            self.complete(thread, Outcome::Operation(OpResult::Busy));
        } else {
            self.handle(Event::Direct { thread, op, under });
        }
    }

    pub fn has_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// Begins an allocation or a release.
    pub fn demand(&mut self, thread: ThreadId, collective: bool, demand: Demand) {
        if let Some(reason) = &self.stopped {
            self.complete(thread, Outcome::Stopped(reason.clone()));
            return;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets.insert(ticket, thread);
        let turn = collective.then_some(self.turn);
        self.turn += u32::from(collective);
        if self.allocator.is_some() {
            self.allocator_ask(self.rank, ticket, turn, demand);
        } else {
            self.tell(Rank(0), &Control::Ask { ticket, turn, demand });
        }
    }

    /// Begins to leave the run. The outcome comes when all ranks leave. A lock that is still held ends the
    /// run, since it could never be given back.
    pub fn leave(&mut self, thread: ThreadId) {
        self.recall();
        if self.stopped.is_none()
            && let Some((holder, lock)) = self.holder()
        {
            self.stop(&format!("{} finishes while its {holder} holds {lock}", self.rank));
            self.flush();
        }
        if let Some(reason) = &self.stopped {
            self.complete(thread, Outcome::Stopped(reason.clone()));
            return;
        }
        self.memory.lent().close();
        self.account.conclude(self.engine.stats());
        self.leaving = Leaving::Wanted(thread);
        self.look_for_end();
        self.waiters.need_service();
    }

    /// The connections that show without this rank's lock whether something has come.
    pub fn glances(&self) -> Vec<Glance> {
        self.peers.iter().flatten().filter_map(|peer| peer.line.glance()).collect()
    }

    /// Whether operations are possible at all.
    pub fn is_leaving(&self) -> bool {
        self.leaving != Leaving::No
    }

    fn present_peers(&self) -> impl Iterator<Item = Rank> + '_ {
        let peers = self
            .peers
            .iter()
            .zip(0..)
            .filter(|(peer, _)| peer.as_ref().is_some_and(|peer| peer.bye.is_none()));
        peers.map(|(_, rank)| Rank(rank))
    }

    /// The ranks with an open connection.
    fn open_peers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.peers
            .iter()
            .zip(0..)
            .filter(|(peer, _)| peer.as_ref().is_some_and(|peer| !peer.closed))
            .map(|(_, rank)| Rank(rank))
    }

    // --- the service thread --------------------------------------------------------------------------------

    /// Handles everything that is ready, and plans the next wait.
    pub fn serve(&mut self, ready: &Ready, plan: &mut Plan) {
        self.waiters.service_serves();
        let now = Instant::now();
        if ready.faults {
            self.take_faults(now);
        }
        let came = self.take_nearby(now);
        for &rank in &ready.lines {
            self.take_frames(rank, now);
        }
        if ready.datagrams || self.datagrams.is_some() {
            self.take_datagrams(now);
        }
        self.take_timers(now);
        self.offer_idle(now);
        self.look_after_peers(now);
        if now.saturating_duration_since(self.servers_heard) >= HEARTBEAT {
            self.servers_heard = now;
            self.memory.keep_alive();
        }
        self.look_for_end();
        // Messages that no thread waits for leave with the next message, or when nothing is left to take.
        let backlog = self.peers.iter().flatten().any(|peer| peer.backlog);
        if (ready.lines.is_empty() && !came) || self.unsent == Unsent::Urgent || backlog {
            self.flush();
        }
        self.account.handled();
        self.plan(now, plan);
    }

    // --- threads that wait ---------------------------------------------------------------------------------

    /// A thread polls for messages from now on, so they wake no other thread.
    pub fn begin_to_look(&mut self) {
        if !self.waiters.begin_to_look() || !self.sockets {
            return;
        }
        if self.may_be_quiet {
            for peer in self.peers.iter_mut().flatten().filter(|peer| !peer.closed) {
                peer.line.set_quiet();
            }
        } else {
            self.wake_service(false);
        }
    }

    fn wake_service(&mut self, yes: bool) {
        if self.waiters.wake_service(yes) {
            self.watch.set_lines(yes);
        }
    }

    /// It stops polling.
    pub fn end_looking(&mut self) {
        let was_last = self.waiters.end_looking();
        self.flush();
        if was_last {
            self.wake_service(true);
        }
    }

    /// Takes the messages of other ranks. True if there were any.
    pub fn look(&mut self, ready: &mut Ready, now: Instant) -> bool {
        let mut any = self.take_nearby(now);
        if self.sockets && self.ranks <= FEW_RANKS && self.datagrams.is_none() {
            for rank in 0..self.ranks {
                any |= self.take_frames(Rank(rank), now);
            }
        } else if self.sockets {
            self.watch.wait_lines(Some(Duration::ZERO), ready);
            any |= self.take_from_sockets(ready, now);
        }
        self.looked(any, now);
        any
    }

    /// Takes what has come through shared memory: the thread that begins an operation is awake, the service
    /// thread, which was rung, has to wake up first.
    pub fn take_what_has_come(&mut self) {
        let takes = self.waiters.habits.takes_messages(self.engine.stats());
        self.memory.lent().let_look(takes);
        if takes {
            let now = Instant::now();
            let any = self.take_nearby(now);
            self.looked(any, now);
        }
    }

    /// Takes everything on the connections in `ready`, and in shared memory.
    pub fn look_at(&mut self, ready: &Ready) {
        let now = Instant::now();
        let any = self.take_nearby(now) | self.take_from_sockets(ready, now);
        self.looked(any, now);
    }

    fn take_from_sockets(&mut self, ready: &Ready, now: Instant) -> bool {
        for &rank in &ready.lines {
            self.take_frames(rank, now);
        }
        if ready.datagrams {
            self.take_datagrams(now);
        }
        ready.has_lines()
    }

    /// Takes everything that has come through shared memory.
    fn take_nearby(&mut self, now: Instant) -> bool {
        let mut any = false;
        for at in 0..self.nearby.len() {
            any |= self.take_frames(self.nearby[at], now);
        }
        any
    }

    fn looked(&mut self, any: bool, now: Instant) {
        if any {
            self.look_for_end();
            self.came = now;
        }
        let send = match self.unsent {
            Unsent::Urgent => true,
            Unsent::CanWait => now.saturating_duration_since(self.came) >= MOMENT,
            Unsent::Nothing => !any,
        };
        if send {
            self.flush();
        }
        self.account.handled();
        if any && !self.may_be_quiet {
            for peer in self.peers.iter_mut().flatten() {
                // The next receive reports a failure.
                let _ = peer.line.empty_socket();
            }
        }
    }

    /// What may be left in sockets. Nothing at the end: closing a socket with unread bytes resets it and
    /// loses what it has sent last.
    fn may_stay(&self) -> Stay {
        match self.leaving {
            _ if !self.waiters.look() => Stay::Nothing,
            Leaving::No if self.may_be_quiet => Stay::Little,
            Leaving::No => Stay::BehindUnanswered,
            _ => Stay::Nothing,
        }
    }

    /// This thread sleeps on the connections. False: another one does.
    pub fn begin_to_sleep(&mut self, thread: ThreadId) -> bool {
        let is_free = self.waiters.begin_to_sleep(thread);
        if is_free {
            self.flush();
            self.wake_service(false);
        }
        is_free
    }

    /// It no longer does so.
    pub fn end_sleeping(&mut self) {
        if self.waiters.end_sleeping() {
            self.watch.end_nudge();
        }
    }

    /// The service thread is about to sleep.
    pub fn let_service_sleep(&mut self) {
        self.waiters.service_sleeps();
    }

    /// A thread that had the lock has used shared memory as one that is awake, so peers no longer ring its
    /// doorbell. If a thread of this rank sleeps, the peers are told so again; anything they sent in between
    /// wakes it. So does anything that arrives over sockets.
    pub fn tell_of_sleepers(&mut self) {
        if !self.waiters.rely_on_rings() {
            return;
        }
        if self.may_be_quiet {
            for peer in self.peers.iter_mut().flatten().filter(|peer| !peer.closed) {
                peer.line.rest();
            }
        }
        let mut something = false;
        for rank in &self.nearby {
            if let Some(peer) = self.peers[usize::from(rank.0)].as_ref().filter(|peer| !peer.closed) {
                something |= !peer.line.may_sleep();
            }
        }
        match if something { self.waiters.something_came() } else { Wake::Nobody } {
            Wake::Nobody => {}
            Wake::Service => self.watch.ring(),
            Wake::Sleeper => self.watch.nudge(),
        }
    }

    /// A thread's wait is over.
    fn complete(&mut self, thread: ThreadId, outcome: Outcome) {
        self.threads[usize::from(thread.0)].slot.complete(outcome);
        self.forget_inquiry_of(thread);
        if self.waiters.is_over(thread) {
            self.watch.nudge();
        }
    }

    /// Takes the faults of this rank's threads, and sends their requests. True if there were any.
    pub fn look_for_faults(&mut self, now: Instant) -> bool {
        let taken = self.take_faults(now);
        if taken {
            self.flush();
            // While its page is on its way.
            for &page in self.awaited.keys().take(MOST_EXPECTED) {
                self.memory.expect(page);
            }
        }
        taken
    }

    /// Whether a thread of this rank waits for a page.
    pub fn awaits_page(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Whether a thread waits for a page, or has just done so: the next message is wanted soon.
    pub fn is_urgent(&self, now: Instant) -> bool {
        self.awaits_page() || now.saturating_duration_since(self.last_fault) < FAULTS_COME_TOGETHER
    }

    fn take_faults(&mut self, now: Instant) -> bool {
        let mut faults = std::mem::take(&mut self.faults);
        self.memory.read_faults(&mut faults);
        let any = !faults.is_empty();
        for FaultAt { address, write } in faults.drain(..) {
            let Some((page, _)) = self.memory.locate(address) else {
                failure::die(self.rank, &format!("a thread touches {address:#x}, which is not allocated"));
            };
            if let Some(reason) = &self.stopped {
                failure::die(self.rank, &format!("a thread waits for {page}, which cannot come: {reason}"));
            }
            self.awaited.entry(page).or_insert(Awaited { since: now, write });
            self.last_fault = now;
            self.handle(Event::Fault { thread: SOMEONE, page, write });
        }
        self.faults = faults;
        any
    }

    /// True if something came.
    fn take_frames(&mut self, from: Rank, now: Instant) -> bool {
        let stay = self.may_stay();
        let Some(peer) = self.peers[usize::from(from.0)].as_mut().filter(|peer| !peer.closed) else {
            return false;
        };
        let was_held_back = peer.line.is_held_back();
        let received = peer.line.receive(stay);
        if !matches!(received, Ok(false)) {
            peer.heard = now;
        }
        // Messages that came before the connection broke count.
        while let Some(peer) = self.peers[usize::from(from.0)].as_mut().filter(|peer| !peer.closed) {
            match peer.line.next() {
                Ok(Some(Incoming::Message(message))) => self.take_message(from, &message, now),
                Ok(Some(Incoming::Control(control))) => self.take_control(from, control),
                Ok(None) => break,
                Err(error) => {
                    self.lose(from, &error.to_string());
                    return true;
                }
            }
        }
        if let Some(peer) = &self.peers[usize::from(from.0)]
            && (peer.line.owes_answer() || (was_held_back && !peer.line.is_held_back()))
        {
            self.unsent = Unsent::Urgent;
        }
        match received {
            Ok(any) => return any,
            Err(LineError::Closed) => self.closed(from, PROCESS_ENDED),
            Err(error) => self.closed(from, &error.to_string()),
        }
        true
    }

    /// Messages of other ranks may have come together with their last message of the meeting: no connection
    /// becomes readable for them.
    pub fn take_what_came_early(&mut self) {
        let now = Instant::now();
        for rank in 0..self.ranks {
            self.take_frames(Rank(rank), now);
        }
        self.account.handled();
    }

    fn take_message(&mut self, from: Rank, message: &Message, now: Instant) {
        if self.stopped.is_some() {
            return;
        }
        let began = self.account.is_traced().then(Instant::now);
        if let Body::GetPage { page, .. } = message.body {
            self.memory.expect(page);
        }
        // First, since what comes with this message ends a wait.
        let page_waits = self.awaited.len();
        // The engine refuses invalid messages. Should one be so well forged that it breaks an invariant of
        // the engine, its sender is named nevertheless.
        let handled = catch_unwind(AssertUnwindSafe(|| self.handle(Event::Receive { from, message })));
        self.account.received(from, message, now, began, page_waits);
        if handled.is_err() {
            self.actions.clear();
            self.lose(from, "a message of it corrupted this rank's state");
        }
    }

    fn take_datagrams(&mut self, now: Instant) {
        let Some(datagrams) = &mut self.datagrams else { return };
        let mut arrived = Vec::new();
        let lost = datagrams.receive(&mut arrived);
        for (from, message) in arrived {
            match Message::decode(&message) {
                Ok(message) => self.take_message(from, &message, now),
                Err(error) => self.lose(from, &error.to_string()),
            }
        }
        for rank in lost {
            self.lose(
                rank,
                &format!(
                    "no datagram of it has come for {} s: it hangs, or the network is cut",
                    self.silence.as_secs()
                ),
            );
        }
    }

    fn take_timers(&mut self, now: Instant) {
        while let Some(&Reverse((due, timer))) = self.timers.peek()
            && due <= now
        {
            self.timers.pop();
            self.handle(Event::Timer(timer));
        }
    }

    fn offer_idle(&mut self, now: Instant) {
        let Some((due, every)) = self.offer.filter(|&(due, _)| due <= now && self.stopped.is_none()) else {
            return;
        };
        debug_assert!(due <= now);
        let busy = self.peers.iter().flatten().any(|peer| peer.line.has_backlog());
        let before = self.account.stats.sent_messages;
        if !busy {
            self.handle(Event::Idle { budget_bytes: OFFER_BYTES });
        }
        let useful = self.account.stats.sent_messages > before;
        let every = if useful { OFFER_LEAST } else { (every * 2).min(OFFER_MOST) };
        self.offer = Some((now + every, every));
    }

    /// Sends heartbeats, and gives up ranks that have been silent for too long.
    fn look_after_peers(&mut self, now: Instant) {
        if self.stopped.is_some() || self.leaving == Leaving::Done {
            return;
        }
        self.look_after_links(now);
        let away = now.saturating_duration_since(std::mem::replace(&mut self.looked_after, now));
        if away > 2 * HEARTBEAT {
            // This rank was stopped, perhaps the whole run: the others get the time to send something.
            for peer in self.peers.iter_mut().flatten() {
                peer.heard = now.min(peer.heard + (away - HEARTBEAT));
            }
        }
        let (mut silent, mut perhaps_cut) = (None, None);
        for (peer, rank) in self.peers.iter_mut().zip(0..) {
            let Some(peer) = peer.as_mut().filter(|peer| !peer.closed && !peer.line.is_cut()) else {
                continue;
            };
            if now.saturating_duration_since(peer.beat) >= HEARTBEAT {
                peer.line.queue_control(&Control::Heartbeat {});
                peer.beat = now;
            }
            if now.saturating_duration_since(peer.heard) >= self.silence {
                silent = Some(Rank(rank));
            } else if peer.link.is_some() && now.saturating_duration_since(peer.heard) >= self.silence / 2 {
                perhaps_cut = Some(Rank(rank));
            }
        }
        if let Some(rank) = perhaps_cut {
            // Its machine, or one between, may have silently dropped the connection.
            self.cut(rank, "it says nothing", true);
        }
        if let Some(rank) = silent {
            self.lose(
                rank,
                &format!(
                    "it has said nothing for {} s: it hangs, or the network is cut",
                    self.silence.as_secs()
                ),
            );
        }
        if let Some(deadline) = self.deadline
            && let Some((&page, &Awaited { since, .. })) = self
                .awaited
                .iter()
                .find(|(_, awaited)| now.saturating_duration_since(awaited.since) >= deadline)
        {
            let home = self.engine.home(page);
            let why = format!(
                "{} has waited {} s for {page}, whose home is {home}",
                self.rank,
                now.saturating_duration_since(since).as_secs()
            );
            self.stop(&why);
        }
    }

    fn plan(&mut self, now: Instant, plan: &mut Plan) {
        let mut until = now + HEARTBEAT.min(self.silence / 4).max(Duration::from_millis(1));
        if let Some(Reverse((due, _))) = self.timers.peek() {
            until = until.min(*due);
        }
        if let Some((due, _)) = self.offer {
            until = until.min(due);
        }
        if let Some(due) = self.datagrams.as_ref().and_then(Datagrams::due) {
            until = until.min(due);
        }
        if let Some(due) = self.links_due() {
            until = until.min(due);
        }
        plan.until = if self.unsent == Unsent::CanWait { now } else { until };
        self.waiters.plan(until);
        // A thread that has just waited for a page often wants the next one.
        plan.urgent = self.is_urgent(now);
        plan.stop = self.leaving == Leaving::Done;
    }

    // --- the engine's actions -------------------------------------------------------------------------------

    fn handle(&mut self, event: Event<'_>) {
        self.step(event);
        if self.memory.wants_room() {
            self.make_room();
        }
    }

    /// Evicts pages until the next ones have room: first copies that can be fetched again, then, to memory
    /// servers, the least recently fetched.
    fn make_room(&mut self) {
        if self.stopped.is_some() {
            return;
        }
        let mut offer = self.memory.to_offer();
        while !offer.is_empty() {
            self.step(Event::Evict { pages: &offer });
            self.memory.offered(&offer);
            offer = self.memory.to_offer();
        }
        let mut send = self.memory.to_send();
        while !send.is_empty() {
            self.step(Event::Evict { pages: &send });
            self.memory.send(&send);
            send = self.memory.to_send();
        }
        // Without servers: a refused page may have become clean.
        let excess = self.memory.in_excess();
        if !excess.is_empty() {
            self.step(Event::Evict { pages: &excess });
        }
        if !self.memory.in_excess().is_empty() {
            let why = format!(
                "{} holds {} of shared pages that it cannot forget (their home is here, or they were written), and its budget is {}: name memory servers \
                 (--server), or give it more (--local)",
                self.rank,
                ByteLen(self.memory.resident()),
                ByteLen(self.local_bytes.unwrap_or_default()),
            );
            self.stop(&why);
        }
    }

    fn step(&mut self, event: Event<'_>) {
        self.engine.handle(event, &mut self.memory, &mut self.actions);
        let mut actions = std::mem::take(&mut self.actions);
        while let Some((lock, thread)) = self.memory.recalled.pop() {
            self.holds(thread, lock);
        }
        for action in actions.drain(..) {
            self.act(action);
        }
        self.actions = actions;
    }

    /// Every lock that is lent to threads comes back.
    fn recall(&mut self) {
        self.handle(Event::Recall);
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Send { to, message } => {
                self.unsent =
                    self.unsent.max(if message.can_wait() { Unsent::CanWait } else { Unsent::Urgent });
                let bytes = match &mut self.datagrams {
                    Some(datagrams) => datagrams.send(to, &message),
                    None => match self.peers[usize::from(to.0)].as_mut().filter(|peer| !peer.closed) {
                        Some(peer) => {
                            let bytes = peer.line.queue_message(&message);
                            if peer.line.queued_bytes() >= MUCH_BYTES && !peer.backlog {
                                // The other end can work on it while this one goes on. The next flush reports
                                // a failure.
                                let _ = peer.line.flush();
                            }
                            bytes
                        }
                        None => 0,
                    },
                };
                self.account.sent(to, &message, bytes);
            }
            Action::Done { thread, result } => {
                self.in_barrier.remove(&thread);
                self.complete(thread, Outcome::Operation(result));
            }
            Action::Retry { page } => {
                if let Some(Awaited { since, write }) = self.awaited.remove(&page) {
                    self.last_fault = self.account.page_came(write, since);
                }
                self.memory.wake(page);
            }
            Action::SetTimer { timer, after_us } => {
                let due = Instant::now() + Duration::from_micros(after_us.into());
                self.timers.push(Reverse((due, timer)));
                self.expect(due);
            }
            Action::Renewed { pages } => {
                if let Some(allocator) = &mut self.allocator {
                    allocator.renewed(pages);
                }
            }
            Action::Fatal(reason) => self.fatal(reason),
        }
    }

    /// The run is over. The other ranks' messages are queued already.
    fn fatal(&mut self, reason: Reason) {
        let deadline = Instant::now() + LAST_WORDS;
        for peer in self.peers.iter_mut().flatten().filter(|peer| !peer.closed) {
            // A peer that does not take it notices by itself. As in `may_stay`, nothing is left in the
            // socket.
            let _ = peer.line.empty_socket().and_then(|()| peer.line.flush_until(deadline));
        }
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.flush();
        }
        if self.on_failure == OnFailure::EndProcess {
            failure::end(self.rank, &reason);
        }
        for thread in std::mem::take(&mut self.tickets).into_values() {
            self.complete(thread, Outcome::Stopped(reason.clone()));
        }
        if let Leaving::Wanted(thread) | Leaving::Told(thread) = self.leaving {
            self.complete(thread, Outcome::Stopped(reason.clone()));
            self.leaving = Leaving::No;
        }
        if let Some(page) = self.awaited.keys().next() {
            failure::die(self.rank, &format!("a thread waits for {page}, which cannot come: {reason}"));
        }
        self.in_barrier.clear();
        self.memory.lent().close();
        self.stopped = Some(reason);
    }

    /// Ends the run for a reason of this rank's own.
    pub fn stop(&mut self, why: &str) {
        self.handle(Event::Stop { why });
    }

    fn lose(&mut self, peer: Rank, how: &str) {
        self.shut(peer);
        self.handle(Event::PeerLost { peer, how });
    }

    /// Nothing comes from this rank any more, and nothing goes to it.
    fn shut(&mut self, rank: Rank) {
        if let Some(peer) = self.peers[usize::from(rank.0)].as_mut().filter(|peer| !peer.closed) {
            peer.closed = true;
            peer.link = None;
            if let Some(fd) = peer.line.fd() {
                self.watch.remove_line(fd);
            }
        }
    }

    /// A connection ended. It is made again, or else the peer is lost.
    fn closed(&mut self, from: Rank, how: &str) {
        if self.peers[usize::from(from.0)].as_ref().is_some_and(|peer| !peer.closed)
            && !self.cut(from, how, false)
        {
            self.lose_unless_done(from, how);
        }
    }

    /// This rank has no connection any more: it is lost, unless it has finished.
    fn lose_unless_done(&mut self, rank: Rank, how: &str) {
        let Some(peer) = self.peers[usize::from(rank.0)].as_ref().filter(|peer| !peer.closed) else { return };
        // A finished rank leaves when all others have finished, too, and this rank knows that.
        let done = peer.bye.is_some() && matches!(self.leaving, Leaving::Told(_) | Leaving::Done);
        self.shut(rank);
        if !done {
            self.lose(rank, how);
        }
    }

    /// Sends everything queued.
    pub fn flush(&mut self) {
        self.flush_by(Line::flush);
    }

    /// As [`Host::flush`], but wakes no rank that shares memory with this one: [`Host::end_quiet`] does.
    pub fn flush_quietly(&mut self) {
        self.flush_by(Line::flush_quietly);
    }

    /// Whether a thread that waits may wake its peers a moment later: often they have answered by then.
    pub fn may_be_quiet_at_first(&mut self) -> bool {
        self.waiters.habits.patience.takes()
    }

    /// The moment is over. Wakes those that sleep and have not taken what was sent to them.
    pub fn end_quiet(&mut self, is_answered: bool) {
        self.waiters.habits.patience.tried(1, is_answered.into());
        for rank in &self.nearby {
            if let Some(peer) = self.peers[usize::from(rank.0)].as_ref().filter(|peer| !peer.closed) {
                peer.line.ring();
            }
        }
    }

    fn flush_by(&mut self, flush: fn(&mut Line) -> Result<bool, LineError>) {
        self.unsent = Unsent::Nothing;
        let mut failed = Vec::new();
        for (peer, rank) in self.peers.iter_mut().zip(0..) {
            let Some(peer) = peer.as_mut().filter(|peer| !peer.closed && peer.line.has_backlog()) else {
                continue;
            };
            match flush(&mut peer.line) {
                Ok(all) if all == peer.backlog => {
                    peer.backlog = !all;
                    if let Some(fd) = peer.line.fd().filter(|_| peer.line.shows_room()) {
                        self.watch.set_backlog(Rank(rank), fd, !all);
                    }
                }
                Ok(_) => {}
                Err(error) => failed.push((Rank(rank), error)),
            }
        }
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.flush();
            if let Some(due) = datagrams.due() {
                self.expect(due);
            }
        }
        for (rank, error) in failed {
            // The peer's last messages may tell why.
            self.take_frames(rank, Instant::now());
            if self.peers[usize::from(rank.0)].as_ref().is_some_and(|peer| !peer.closed) {
                self.closed(rank, &error.to_string());
            }
        }
    }

    /// The service thread has something to do at `due`.
    fn expect(&mut self, due: Instant) {
        self.waiters.expect(due);
    }

    /// Whether the service thread has work that it does not poll for.
    pub fn needs_service(&self) -> bool {
        self.waiters.needs_service()
    }

    /// Whether to wake the service thread. True once.
    pub fn wants_service(&mut self) -> bool {
        self.waiters.wants_service()
    }

    fn tell(&mut self, to: Rank, control: &Control) {
        if let Some(peer) = self.peers[usize::from(to.0)].as_mut().filter(|peer| !peer.closed) {
            peer.line.queue_control(control);
            self.unsent = Unsent::Urgent;
        }
    }

    // --- messages outside of the engine --------------------------------------------------------------------

    fn take_control(&mut self, from: Rank, control: Control) {
        if self.stopped.is_some() {
            return;
        }
        match control {
            Control::Heartbeat {} => {}
            Control::Ask { ticket, turn, demand } if self.allocator.is_some() => {
                self.allocator_ask(from, ticket, turn, demand)
            }
            Control::Added { serial } if self.allocator.is_some() => self.allocator_added(from, serial),
            Control::Add { serial, region } if from == Rank(0) => {
                if self.open(region) {
                    self.tell(from, &Control::Added { serial });
                }
            }
            Control::Drop { serial, region } if from == Rank(0) => {
                self.handle(Event::Freed { pages: region.pages, renew: false });
                self.tell(from, &Control::Added { serial });
            }
            Control::Given { ticket, answer } if from == Rank(0) => self.given(ticket, answer),
            Control::Bye { epoch } => {
                let peer = self.peers[usize::from(from.0)].as_mut().expect("it is connected");
                peer.bye = Some(epoch);
                // It stays until it knows that this has come.
                peer.line.answer_now();
                self.unsent = Unsent::Urgent;
                self.look_for_absent();
            }
            Control::WhoKeeps { inquiry, wait } => self.on_who_keeps(from, inquiry, wait),
            Control::Keeps { inquiry, who } => self.on_keeps(from, inquiry, who),
            Control::DatagramKey { .. } => self.lose(from, "it changes its key in the middle of the run"),
            other => self.lose(from, &format!("it sent an unexpected message: {other:?}")),
        }
    }

    /// A region exists from now on. False: it cannot be mapped, and the run is over.
    fn open(&mut self, region: RegionConfig) -> bool {
        // Its protocol may have to know who holds which lock.
        self.recall();
        let opened = self.memory.open_region(region).map_err(|error| error.to_string());
        let added = opened.and_then(|()| self.engine.add_region(region).map_err(|error| error.to_string()));
        if let Err(error) = added {
            let why = format!("{} cannot map the new shared region: {error}", self.rank);
            self.stop(&why);
            return false;
        }
        if matches!(region.protocol, ProtocolKind::Aurc | ProtocolKind::Auto) && self.offer.is_none() {
            self.offer = Some((Instant::now(), OFFER_LEAST));
            self.waiters.need_service();
        }
        true
    }

    /// Adds a region that every rank adds by itself, before anything is sent.
    pub fn open_first(&mut self, demand: Demand) -> Option<RegionConfig> {
        let mut allocator = Allocator::new(1, u64::from(u32::MAX));
        let of_all = self.allocator.as_mut().unwrap_or(&mut allocator);
        of_all.ask(self.rank, 0, None, demand);
        let mut found = None;
        while let Some(order) = of_all.poll() {
            if let Order::Add { serial, region } = order {
                for rank in 0..self.ranks {
                    let _ = of_all.carried_out(Rank(rank), serial);
                }
                found = Some(region);
            }
        }
        found.filter(|&region| self.open(region))
    }

    fn allocator_ask(&mut self, from: Rank, ticket: u64, turn: Option<u32>, demand: Demand) {
        self.allocator.as_mut().expect("rank 0").ask(from, ticket, turn, demand);
        self.allocator_orders();
    }

    fn allocator_added(&mut self, from: Rank, serial: u64) {
        if self.allocator.as_mut().expect("rank 0").carried_out(from, serial) {
            self.allocator_orders();
        } else {
            self.lose(from, "it reports an operation that it was not given");
        }
    }

    fn allocator_orders(&mut self) {
        while self.stopped.is_none()
            && let Some(order) = self.allocator.as_mut().expect("rank 0").poll()
        {
            match order {
                Order::Add { serial, region } => {
                    for rank in 1..self.ranks {
                        self.tell(Rank(rank), &Control::Add { serial, region });
                    }
                    if self.open(region) {
                        let _ = self.allocator.as_mut().expect("rank 0").carried_out(self.rank, serial);
                    }
                }
                Order::Drop { serial, region } => {
                    for rank in 1..self.ranks {
                        self.tell(Rank(rank), &Control::Drop { serial, region });
                    }
                    self.handle(Event::Freed { pages: region.pages, renew: false });
                    let _ = self.allocator.as_mut().expect("rank 0").carried_out(self.rank, serial);
                }
                Order::Renew { pages } => self.handle(Event::Freed { pages, renew: true }),
                Order::Give { to, ticket, answer } if to == self.rank => self.given(ticket, answer),
                Order::Give { to, ticket, answer } => self.tell(to, &Control::Given { ticket, answer }),
                Order::Mismatch { why } => self.stop(&why),
            }
        }
    }

    fn given(&mut self, ticket: u64, answer: Answer) {
        match self.tickets.remove(&ticket) {
            Some(thread) => self.complete(thread, Outcome::Answer(answer)),
            None => self.lose(Rank(0), "it answers a question that was not asked"),
        }
    }

    /// A rank that has finished comes to no barrier any more.
    fn look_for_absent(&mut self) {
        let Some(&barrier) = self.in_barrier.values().next().filter(|_| !self.engine.is_entering()) else {
            return;
        };
        let epoch = self.engine.epoch();
        let gone = self
            .peers
            .iter()
            .zip(0..)
            .find(|(peer, _)| peer.as_ref().and_then(|peer| peer.bye).is_some_and(|left| left <= epoch));
        if let Some((_, gone)) = gone {
            let why = format!("{} waits at {barrier}, but {} has finished", self.rank, Rank(gone));
            self.stop(&why);
        }
    }

    /// Continues leaving.
    fn look_for_end(&mut self) {
        if let Leaving::Wanted(thread) = self.leaving
            && self.engine.is_quiescent()
            && self.datagrams.as_ref().is_none_or(Datagrams::is_settled)
        {
            let epoch = self.engine.epoch();
            for rank in 0..self.ranks {
                self.tell(Rank(rank), &Control::Bye { epoch });
            }
            for peer in self.peers.iter_mut().flatten() {
                peer.bye_end = peer.line.end();
            }
            self.leaving = Leaving::Told(thread);
        }
        if let Leaving::Told(thread) = self.leaving
            && self.present_peers().next().is_none()
        {
            self.flush();
            let is_told = |peer: &Peer| !peer.line.has_backlog() && peer.line.has_arrived(peer.bye_end);
            if self.peers.iter().flatten().all(|peer| peer.closed || is_told(peer)) {
                self.leaving = Leaving::Done;
                self.links.end();
                // It ends.
                self.waiters.need_service();
                self.memory.close();
                self.account.write();
                self.complete(thread, Outcome::Finished);
            }
        }
    }

    pub fn stats(&mut self) -> SharedStats {
        self.recall();
        SharedStats {
            engine: self.engine.stats().clone(),
            overhead_bytes: self.engine.overhead_bytes() as u64,
            resident_bytes: self.memory.resident(),
            away_bytes: self.memory.away(),
            away_sent_bytes: self.memory.traffic.sent_bytes,
            away_brought_bytes: self.memory.traffic.brought_bytes,
            ..self.account.stats()
        }
    }

    pub fn start_measuring(&mut self) {
        self.recall();
        self.account.start(self.engine.stats());
    }

    pub fn stop_measuring(&mut self) {
        self.recall();
        self.account.stop(self.engine.stats());
    }

    pub fn home(&self, page: PageIndex) -> Rank {
        self.engine.home(page)
    }
}
