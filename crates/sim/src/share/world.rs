//! Many ranks, a network, virtual time. One seed decides everything.
//!
//! Uniformly random delays miss the deep races: some channels and some threads are slow for a while, so that
//! a message meets a world that has moved on. Time is in ticks, which the engine's timers take for
//! microseconds.

mod report;
mod setup;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use rampool_sharing::{Action, Body, Event, Message, OpError, ProtocolKind, Rank, Reason, ThreadId, TimerId};
use rampool_wire::units::{Extent, PageIndex};

use super::cost::Cost;
use super::golden::{Failure, Golden};
use super::network::{Arrived, Datagrams};
use super::node::{Node, Siblings};
use super::program::{State, Step};
use crate::rng::{Rng, mix};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Happening {
    Step {
        rank: usize,
        thread: usize,
    },
    Fault {
        rank: usize,
        thread: usize,
        page: PageIndex,
        write: bool,
    },
    /// A thread has finished its work, if messages did not take the processor away since `before`.
    Computed {
        rank: usize,
        thread: usize,
        before: u64,
    },
    Deliver {
        from: usize,
        to: usize,
    },
    Timer {
        rank: usize,
        timer: TimerId,
    },
    Lost {
        rank: usize,
        peer: usize,
    },
    /// The datagram network has an event due.
    Network,
}

impl Happening {
    /// The rank whose processor it needs.
    fn rank(self) -> Option<usize> {
        match self {
            Self::Step { rank, .. }
            | Self::Fault { rank, .. }
            | Self::Timer { rank, .. }
            | Self::Lost { rank, .. } => Some(rank),
            Self::Deliver { to, .. } => Some(to),
            // Time lost to messages is added when the thread's work would end.
            Self::Computed { .. } | Self::Network => None,
        }
    }
}

pub use report::Report;
use report::add;
pub use setup::Setup;

/// A running world.
pub struct World {
    setup: Setup,
    pub nodes: Vec<Node>,
    pub golden: Golden,
    random: Rng,
    now: u64,
    sequence: u64,
    agenda: BinaryHeap<Reverse<(u64, u64, Happening)>>,
    channels: BTreeMap<(usize, usize), Channel>,
    datagrams: Option<Datagrams>,
    network_due: u64,
    dead: Vec<bool>,
    /// With costs: when each rank's processor is free, when its wire is free, and the cost of messages for it
    /// so far.
    free_at: Vec<u64>,
    wire_free_at: Vec<u64>,
    interrupted_us: Vec<u64>,
    report: Report,
    out: Vec<Action>,
    scratch: Vec<u8>,
}

#[derive(Default)]
struct Channel {
    /// Messages and their bytes.
    queue: VecDeque<(Message, u64)>,
    /// When the last message arrives: none overtakes it.
    busy_until: u64,
}

/// Channels and threads keep their speed for this long.
const PHASE_TICKS: u64 = 1500;

impl World {
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        let (nodes, golden) = setup.build();
        let ranks = nodes.len();
        let datagrams = setup.datagrams.map(|loss| Datagrams::new(ranks, loss, setup.seed));
        let mut world = Self {
            random: Rng::new(setup.seed),
            nodes,
            golden,
            now: 0,
            sequence: 0,
            agenda: BinaryHeap::new(),
            channels: BTreeMap::new(),
            datagrams,
            network_due: u64::MAX,
            dead: vec![false; ranks],
            free_at: vec![0; ranks],
            wire_free_at: vec![0; ranks],
            interrupted_us: vec![0; ranks],
            report: Report::default(),
            out: Vec::new(),
            scratch: Vec::new(),
            setup,
        };
        for rank in 0..ranks {
            for thread in 0..world.nodes[rank].threads.len() {
                world.schedule_step(rank, thread);
            }
        }
        world
    }

    /// Runs until no event is left.
    ///
    /// # Errors
    /// The first failure.
    pub fn run(mut self) -> Result<Report, Failure> {
        while let Some(Reverse((at, _, happening))) = self.agenda.pop() {
            self.now = at;
            self.report.events += 1;
            if self.report.events > self.setup.most_events {
                return Err(Failure::Endless { events: self.report.events });
            }
            if let Some((rank, event)) = self.setup.crash
                && event == self.report.events
            {
                self.crash(usize::from(rank.0));
            }
            if let Some(rank) = happening.rank()
                && let Some(until) = self.busy_until(rank)
            {
                self.schedule(until - self.now, happening);
                continue;
            }
            self.happen(happening)?;
        }
        self.finish()
    }

    fn finish(mut self) -> Result<Report, Failure> {
        let mut waiting = Vec::new();
        for (rank, node) in self.nodes.iter().enumerate().filter(|&(rank, _)| !self.dead[rank]) {
            for thread in &node.threads {
                let at = (node.rank(), thread.id);
                if !matches!(thread.state, State::Finished | State::Stopped(_)) {
                    waiting.push((node.rank(), thread.id, thread.position()));
                }
                self.report.seen.insert(at, thread.seen.clone());
                self.report.refused += thread.refused;
                if let State::Stopped(error) = &thread.state {
                    self.report.stopped.insert(at, error.clone());
                }
            }
            let failed = node.engine.failure().is_some();
            if waiting.is_empty() && !failed && !node.engine.is_quiescent() {
                return Err(Failure::Unquiet { rank: node.rank() });
            }
            add(&mut self.report.stats, node.engine.stats());
            let _ = rank;
        }
        if !waiting.is_empty() {
            return Err(Failure::Stuck { waiting });
        }
        if let Some(datagrams) = &self.datagrams {
            self.report.datagrams = datagrams.counts();
        }
        self.report.ticks = self.now;
        Ok(self.report)
    }

    fn happen(&mut self, happening: Happening) -> Result<(), Failure> {
        match happening {
            Happening::Step { rank, .. }
            | Happening::Computed { rank, .. }
            | Happening::Fault { rank, .. }
            | Happening::Timer { rank, .. }
                if self.dead[rank] =>
            {
                Ok(())
            }
            Happening::Step { rank, thread } => self.step(rank, thread),
            Happening::Computed { rank, thread, before } => {
                let lost = self.interrupted_us[rank] - before;
                if lost > 0 {
                    self.schedule(lost, Happening::Computed { rank, thread, before: before + lost });
                } else {
                    self.schedule_step(rank, thread);
                }
                Ok(())
            }
            Happening::Fault { rank, thread, page, write } => self.handle(
                rank,
                Event::Fault { thread: ThreadId(u16::try_from(thread).expect("few")), page, write },
            ),
            Happening::Timer { rank, timer } => self.handle(rank, Event::Timer(timer)),
            Happening::Lost { rank, peer } if !self.dead[rank] => self.handle(
                rank,
                Event::PeerLost { peer: Rank(u16::try_from(peer).expect("few")), how: "it is silent" },
            ),
            Happening::Lost { .. } => Ok(()),
            Happening::Deliver { from, to } => {
                let channel = self.channels.get_mut(&(from, to)).expect("it was sent on");
                let (message, bytes) = channel.queue.pop_front().expect("one delivery for each message");
                if let Some(cost) = self.setup.cost {
                    let us = cost.receive_us(&message.body, bytes);
                    self.work(to, us);
                    self.interrupted_us[to] += us;
                }
                self.deliver(from, to, &message)
            }
            Happening::Network => self.run_datagrams(),
        }
    }

    fn deliver(&mut self, from: usize, to: usize, message: &Message) -> Result<(), Failure> {
        if self.dead[to] {
            return Ok(());
        }
        self.handle(to, Event::Receive { from: Rank(u16::try_from(from).expect("few")), message })
    }

    fn step(&mut self, rank: usize, thread: usize) -> Result<(), Failure> {
        if self.nodes[rank].threads[thread].state != State::Ready {
            return Ok(());
        }
        let id = ThreadId(u16::try_from(thread).expect("few threads"));
        match self.nodes[rank].step(thread, &mut self.golden)? {
            Step::Did => {
                self.schedule_step(rank, thread);
                return self.idle(rank);
            }
            Step::Finished => {}
            Step::Frees(page) => {
                let bytes = self.nodes[rank].memory.page_bytes();
                self.golden.fill_range(usize::try_from(page.0).expect("few pages") * bytes, bytes, 0);
                // Every rank is told, each in its own time.
                for other in 0..self.nodes.len() {
                    self.handle(other, Event::Freed { pages: Extent::page(page), renew: other == rank })?;
                }
                self.schedule_step(rank, thread);
            }
            Step::Computes(ticks) => {
                self.report.computed += ticks;
                let before = self.interrupted_us[rank];
                self.schedule(ticks, Happening::Computed { rank, thread, before });
            }
            Step::Fault { page, write } => {
                let delay = if self.setup.cost.is_some() { 0 } else { self.random.between(1, 30) };
                self.schedule(delay, Happening::Fault { rank, thread, page, write });
            }
            Step::Sync(op) => self.handle(rank, Event::Sync { thread: id, op })?,
            Step::Direct(op) => self.handle(rank, Event::Direct { thread: id, op, under: None })?,
        }
        Ok(())
    }

    fn handle(&mut self, rank: usize, event: Event<'_>) -> Result<(), Failure> {
        if self.setup.trace {
            println!("{:>8} rank {rank} {event:?}", self.now);
        }
        let mut out = std::mem::take(&mut self.out);
        let siblings = (self.setup.siblings > 0 && self.nodes[rank].threads.len() > 1)
            .then_some(Siblings { random: &mut self.random, chance: self.setup.siblings });
        let before = self.setup.cost.map(|_| self.nodes[rank].engine.stats().clone());
        self.nodes[rank].handle(event, &mut self.golden, siblings, &mut out)?;
        if let (Some(cost), Some(before)) = (self.setup.cost, before) {
            let us = cost.engine_us(&before, self.nodes[rank].engine.stats());
            self.work(rank, us);
            self.interrupted_us[rank] += us;
        }
        let acted = self.act(rank, &mut out);
        out.clear();
        self.out = out;
        acted?;
        if self.setup.check {
            self.check(rank)?;
        }
        if self.setup.evict > 0 && self.random.below(1000) < self.setup.evict {
            self.evict(rank)?;
        }
        if self.setup.unmap > 0 && self.random.below(1000) < self.setup.unmap {
            let pages: Vec<PageIndex> = self.nodes[rank].memory.pages().map(|(page, _)| page).collect();
            if !pages.is_empty() {
                let page = pages[self.random.index(pages.len())];
                self.nodes[rank].memory.unmap(page);
            }
        }
        self.idle(rank)
    }

    /// The rank needs room: any of its pages may go.
    fn evict(&mut self, rank: usize) -> Result<(), Failure> {
        let of_rank = self.nodes[rank].memory.pages().map(|(page, _)| page);
        let pages: Vec<PageIndex> = of_rank.filter(|_| self.random.percent(60)).collect();
        let siblings = (self.setup.siblings > 0 && self.nodes[rank].threads.len() > 1)
            .then_some(Siblings { random: &mut self.random, chance: self.setup.siblings });
        let mut out = Vec::new();
        self.nodes[rank].handle(Event::Evict { pages: &pages }, &mut self.golden, siblings, &mut out)?;
        self.act(rank, &mut out)?;
        if self.setup.check { self.check(rank) } else { Ok(()) }
    }

    /// The rank may be idle.
    fn idle(&mut self, rank: usize) -> Result<(), Failure> {
        if self.setup.idle > 0 && self.random.percent(self.setup.idle) {
            let budget_bytes = u32::try_from(self.random.between(1, 200)).expect("small");
            let siblings = (self.setup.siblings > 0 && self.nodes[rank].threads.len() > 1)
                .then_some(Siblings { random: &mut self.random, chance: self.setup.siblings });
            let mut out = Vec::new();
            self.nodes[rank].handle(Event::Idle { budget_bytes }, &mut self.golden, siblings, &mut out)?;
            self.act(rank, &mut out)?;
        }
        Ok(())
    }

    /// Carries out an engine's actions.
    fn act(&mut self, rank: usize, out: &mut Vec<Action>) -> Result<(), Failure> {
        for action in out.drain(..) {
            if self.setup.trace {
                println!("         rank {rank}     -> {action:?}");
            }
            match action {
                Action::Send { to, message } => self.send(rank, usize::from(to.0), message)?,
                Action::Done { thread, result } => {
                    let id = Rank(u16::try_from(rank).expect("few"));
                    self.nodes[rank].thread(thread).done(id, &result, &mut self.golden)?;
                    self.schedule_step(rank, usize::from(thread.0));
                }
                Action::Retry { page } => {
                    for thread in 0..self.nodes[rank].threads.len() {
                        if self.nodes[rank].threads[thread].retry(page) {
                            self.schedule_step(rank, thread);
                        }
                    }
                }
                Action::SetTimer { timer, after_us } => {
                    self.schedule(u64::from(after_us), Happening::Timer { rank, timer });
                }
                Action::Renewed { .. } => {}
                Action::Fatal(reason) => {
                    if self.setup.crash.is_none() {
                        return Err(Failure::Stopped {
                            rank: Rank(u16::try_from(rank).expect("few")),
                            reason,
                        });
                    }
                    self.stop_faulting(rank, &reason);
                }
            }
        }
        Ok(())
    }

    /// Threads that wait for a page when the run ends: the host ends them, with the same reason.
    fn stop_faulting(&mut self, rank: usize, reason: &Reason) {
        for thread in &mut self.nodes[rank].threads {
            if !matches!(thread.state, State::Finished | State::Stopped(_)) {
                thread.state = State::Stopped(OpError::Stopped(reason.clone()));
            }
        }
    }

    fn send(&mut self, from: usize, to: usize, message: Message) -> Result<(), Failure> {
        let mut bytes = 0;
        let mut message = message;
        if self.setup.codec || self.datagrams.is_some() {
            self.scratch.clear();
            message.encode(&mut self.scratch);
            bytes = self.scratch.len() as u64;
            if self.setup.codec {
                match Message::decode(&self.scratch) {
                    Ok(back) if back == message => message = back,
                    other => {
                        return Err(Failure::Codec { what: format!("{message:?} came back as {other:?}") });
                    }
                }
            }
        }
        let count = self.report.messages.entry(message.name()).or_default();
        count.0 += 1;
        count.1 += bytes;
        if self.dead[to] {
            return Ok(());
        }
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.send(self.now, from, to, &self.scratch);
            self.network_soon();
            return Ok(());
        }
        let latency = match self.setup.cost {
            None => self.latency(from, to),
            Some(cost) => self.cross(from, &cost, &message.body, bytes),
        };
        let channel = self.channels.entry((from, to)).or_default();
        channel.queue.push_back((message, bytes));
        channel.busy_until = channel.busy_until.max(self.now + latency);
        let delay = channel.busy_until - self.now;
        self.schedule(delay, Happening::Deliver { from, to });
        Ok(())
    }

    fn run_datagrams(&mut self) -> Result<(), Failure> {
        if self.setup.pauses > 0 {
            for rank in 0..self.nodes.len() {
                self.busy_until(rank);
            }
        }
        let Some(datagrams) = &mut self.datagrams else { return Ok(()) };
        if self.now >= self.network_due {
            self.network_due = u64::MAX;
        }
        let Arrived { messages, lost } = datagrams.run(self.now);
        for (from, to, bytes) in messages {
            match Message::decode(&bytes) {
                Ok(message) => self.deliver(from, to, &message)?,
                Err(error) => return Err(Failure::Codec { what: error.to_string() }),
            }
        }
        for (rank, peer) in lost {
            if !self.dead[rank] {
                self.handle(
                    rank,
                    Event::PeerLost { peer: Rank(u16::try_from(peer).expect("few")), how: "it is silent" },
                )?;
            }
        }
        self.network_soon();
        Ok(())
    }

    /// Makes the datagram network run when it is due.
    fn network_soon(&mut self) {
        let all_done =
            self.nodes.iter().enumerate().all(|(rank, node)| self.dead[rank] || node.is_finished());
        let due = self.datagrams.as_ref().and_then(|datagrams| datagrams.due(all_done));
        if let Some(due) = due
            && due < self.network_due
        {
            self.network_due = due;
            self.schedule(due.saturating_sub(self.now), Happening::Network);
        }
    }

    /// The rank's processor is busy for that long, after its present work.
    fn work(&mut self, rank: usize, us: u64) {
        self.free_at[rank] = self.free_at[rank].max(self.now) + us;
    }

    /// When, from now, a message reaches its receiver: the processor sends it, then it waits for the wire and
    /// crosses it.
    fn cross(&mut self, from: usize, cost: &Cost, body: &Body, bytes: u64) -> u64 {
        let us = cost.send_us(body, bytes);
        self.work(from, us);
        self.interrupted_us[from] += us;
        let leaves = self.free_at[from].max(self.wire_free_at[from]) + cost.wire_us(body, bytes);
        self.wire_free_at[from] = leaves;
        leaves + cost.latency_us() - self.now
    }

    /// Until when the rank is busy, if it is.
    fn busy_until(&mut self, rank: usize) -> Option<u64> {
        let phase = self.now / PHASE_TICKS;
        let paused = self.setup.pauses > 0
            && mix(self.setup.seed ^ phase << 16 ^ rank as u64 ^ 0x7a7a) % 100 < self.setup.pauses;
        let paused = paused.then_some((phase + 1) * PHASE_TICKS);
        if let (Some(until), Some(datagrams)) = (paused, &mut self.datagrams) {
            datagrams.pause(rank, until);
        }
        let working = self.free_at.get(rank).copied().filter(|&free| free > self.now);
        paused.max(working)
    }

    fn crash(&mut self, rank: usize) {
        self.dead[rank] = true;
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.kill(rank);
            return;
        }
        for peer in (0..self.nodes.len()).filter(|&peer| peer != rank) {
            let delay = self.random.between(500, 3000);
            self.schedule(delay, Happening::Lost { rank: peer, peer: rank });
        }
    }

    fn latency(&mut self, from: usize, to: usize) -> u64 {
        let base = self.random.between(5, 60);
        let phase = self.now / PHASE_TICKS;
        let draw = mix(self.setup.seed ^ phase << 20 ^ (from as u64) << 10 ^ to as u64) % 100;
        if self.setup.slow_phases && draw < 35 { base * self.random.between(5, 60) } else { base }
    }

    fn schedule_step(&mut self, rank: usize, thread: usize) {
        if self.nodes[rank].threads[thread].state != State::Ready {
            return;
        }
        if self.setup.cost.is_some() {
            self.schedule(0, Happening::Step { rank, thread });
            return;
        }
        let phase = self.now / PHASE_TICKS;
        let draw = mix(self.setup.seed ^ phase << 24 ^ (rank as u64) << 8 ^ thread as u64 ^ 0x5555) % 100;
        let slow = self.setup.slow_phases && draw < 20;
        let delay = self.random.between(1, if slow { 150 } else { 6 });
        self.schedule(delay, Happening::Step { rank, thread });
    }

    fn schedule(&mut self, delay: u64, happening: Happening) {
        self.sequence += 1;
        self.agenda.push(Reverse((self.now + delay, self.sequence, happening)));
    }

    fn check(&mut self, rank: usize) -> Result<(), Failure> {
        self.nodes[rank].check()?;
        self.report.overhead_bytes = self.report.overhead_bytes.max(self.nodes[rank].engine.overhead_bytes());
        let mut first = 0;
        for &(pages, protocol) in &self.setup.regions {
            if protocol == ProtocolKind::Sc && self.setup.crash.is_none() {
                for page in (first..first + u64::from(pages)).map(PageIndex) {
                    self.check_single_writer(page)?;
                }
            }
            first += u64::from(pages);
        }
        Ok(())
    }

    /// Sequential consistency: one writer or many readers.
    fn check_single_writer(&self, page: PageIndex) -> Result<(), Failure> {
        use rampool_sharing::Protection;
        let of = |wanted: Protection| {
            self.nodes.iter().filter(|node| node.memory.protection(page) == wanted).count()
        };
        let (writers, readers) = (of(Protection::ReadWrite), of(Protection::Read));
        if writers > 1 || (writers == 1 && readers > 0) {
            return Err(Failure::BadProtection {
                what: format!("{page} has {writers} writers and {readers} readers"),
            });
        }
        Ok(())
    }
}
