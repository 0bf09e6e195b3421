//! The barrier: all threads of all ranks meet, and leave with every write visible.
//!
//! Ranks form a tree (flat while there are few). Payloads are merged on the way up; the root decides, and the
//! result goes down. Where a protocol needs it, a second round goes down and up in between. A barrier ends an
//! *epoch*: tables change only here, and a message from a rank that has left already waits until this rank
//! leaves too.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::After;
use crate::engine::Engine;
use crate::message::{Departure, Moves, Part, Payload};
use crate::protocol::{Cx, Scope, unexpected};
use crate::{
    Action, BarrierId, BarrierKind, Body, Checked, Io, OpError, OpResult, Rank, Reason, ThreadId, Violation,
};
use rampool_wire::units::{Extent, PageIndex};

/// This rank's place in the barrier that is gathering.
#[derive(Clone, Hash, Debug, Default)]
pub(crate) struct Barrier {
    stage: Stage,
    /// The barrier's name, given by the first to arrive (a thread of this rank, or ranks below), and that
    /// rank.
    name: Option<(Rank, BarrierId, BarrierKind)>,
    threads: Vec<ThreadId>,
    expected: u16,
    /// Children whose subtrees are here.
    arrived: BTreeSet<Rank>,
    moves: Moves,
    /// The root's: moves of homes that wait for the next barrier.
    late: Vec<(PageIndex, (Rank, Rank))>,
    parts: Vec<Part>,
    /// The root's: the payload of all, during the second round.
    total: Vec<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Stage {
    /// Threads run.
    #[default]
    Open,
    /// All threads are here and their writes are on their way.
    Releasing,
    /// All threads are here and their writes are available.
    Arrived,
    /// So are those of all ranks below, and the parent knows.
    Waiting,
    /// In the second round, with this rank's flushes before the number outstanding.
    Flushing {
        upto: u64,
    },
    Flushed,
}

impl Barrier {
    /// The next barrier makes these pages new.
    pub fn propose_freed(&mut self, pages: Extent) {
        self.moves.freed.push((pages.first, pages.count));
    }

    /// Whether this rank has running threads that the barrier needs.
    pub fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Whether this rank has arrived and not left.
    pub fn is_inside(&self) -> bool {
        !matches!(self.stage, Stage::Open | Stage::Releasing)
    }
}

impl Engine {
    fn parent(&self) -> Option<Rank> {
        let tuning = &self.shared.tuning;
        match self.shared.rank.0 {
            0 => None,
            _ if self.shared.ranks <= tuning.flat_barrier => Some(Rank(0)),
            rank => Some(Rank((rank - 1) / tuning.barrier_arity.max(2))),
        }
    }

    fn children(&self) -> impl Iterator<Item = Rank> + use<> {
        let (rank, ranks) = (u32::from(self.shared.rank.0), u32::from(self.shared.ranks));
        let tuning = &self.shared.tuning;
        let range = if self.shared.ranks > tuning.flat_barrier {
            let arity = u32::from(tuning.barrier_arity.max(2));
            (rank * arity + 1).min(ranks)..(rank * arity + arity + 1).min(ranks)
        } else if rank == 0 {
            1..ranks
        } else {
            0..0
        };
        range.map(|child| Rank(u16::try_from(child).expect("below the number of ranks")))
    }

    pub(super) fn propose(&mut self, push: impl FnOnce(&mut Moves, Rank), to: Rank) -> OpResult {
        if to.0 >= self.shared.ranks {
            return OpResult::Failed(OpError::NoSuchRank { rank: to, ranks: self.shared.ranks });
        }
        push(&mut self.barrier.moves, self.shared.rank);
        OpResult::Ok
    }

    pub(super) fn barrier_begin(
        &mut self,
        io: &mut Io<'_>,
        thread: ThreadId,
        barrier: BarrierId,
        kind: BarrierKind,
        threads: u16,
    ) {
        let rank = self.shared.rank;
        if self.barrier.threads.is_empty() {
            self.barrier.expected = threads;
        } else if self.barrier.expected != threads {
            let before = self.barrier.expected;
            self.fail(io, Reason::BarrierThreads { rank, thread, said: threads, before });
            return;
        }
        if let Err(reason) = self.name_barrier(rank, barrier, kind) {
            self.fail(io, reason);
            return;
        }
        self.barrier.threads.push(thread);
        if self.barrier.threads.len() == usize::from(threads) {
            self.barrier.stage = Stage::Releasing;
            // Inside nothing is released.
            self.recall_all(io);
            self.release(io, Scope::Barrier, After::Arrive);
        }
    }

    /// Whether a barrier has to wait for threads of this rank.
    #[must_use]
    pub fn awaits_threads(&self) -> bool {
        self.barrier.is_open()
    }

    /// All threads have to name the same barrier.
    fn name_barrier(&mut self, rank: Rank, barrier: BarrierId, kind: BarrierKind) -> Result<(), Reason> {
        match self.barrier.name {
            None => self.barrier.name = Some((rank, barrier, kind)),
            Some((one, id, of)) if (id, of) != (barrier, kind) => {
                let (here, there) = (describe(id, of), describe(barrier, kind));
                return Err(Reason::BarrierMismatch { one, here, other: rank, there });
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// This rank's threads are here and their writes are available.
    pub(super) fn arrive(&mut self, io: &mut Io<'_>) {
        self.shared.stats.barriers += 1;
        self.barrier.stage = Stage::Arrived;
        self.shared.at_barrier = true;
        let parts = self.make_parts(io, |plugin, cx, _| Ok(plugin.arrive(cx)));
        let joined = parts.and_then(|parts| self.join(&parts)).and_then(|()| self.barrier_up(io));
        self.blame_below(io, joined);
    }

    /// This rank's own payload is well-formed; the ones merged into it may not be.
    fn blame_below(&mut self, io: &mut Io<'_>, joined: Checked) {
        if let Err(Violation(what)) = joined {
            let ranks: Vec<String> = self.children().map(|child| child.to_string()).collect();
            self.fail(
                io,
                Reason::Stopped {
                    why: format!("the barrier's payload of {} is invalid: {what}", ranks.join(", ")),
                },
            );
        }
    }

    /// Merges the payload of a rank or a subtree.
    fn join(&mut self, parts: &[Part]) -> Checked {
        for part in parts {
            self.add_protocol(part.protocol);
            let plugin =
                self.plugins.iter().find(|plugin| plugin.kind() == part.protocol).expect("it is there now");
            match self.barrier.parts.iter_mut().find(|known| known.protocol == part.protocol) {
                Some(known) => plugin.get().merge(&mut known.payload, &part.payload)?,
                None => self.barrier.parts.push(part.clone()),
            }
        }
        Ok(())
    }

    /// If this rank and all below it have arrived, tells the parent, or decides.
    fn barrier_up(&mut self, io: &mut Io<'_>) -> Checked {
        if self.barrier.arrived.len() < self.children().count() {
            return Ok(());
        }
        match self.barrier.stage {
            Stage::Arrived => {
                let parts = std::mem::take(&mut self.barrier.parts);
                if let Some(parent) = self.parent() {
                    let moves = std::mem::take(&mut self.barrier.moves);
                    let (rank, barrier, kind) = self.barrier.name.expect("a thread named it");
                    self.barrier.stage = Stage::Waiting;
                    self.send(io, parent, Body::BarrierArrive { barrier, kind, rank, moves, parts });
                    return Ok(());
                }
                let wanted = self.plugins.iter().any(|plugin| {
                    let of = parts.iter().find(|part| part.protocol == plugin.kind());
                    of.is_some_and(|part| plugin.get().wants_flush(&part.payload))
                });
                self.barrier.total.clone_from(&parts);
                if wanted {
                    return self.barrier_flush(io, &Arc::new(parts));
                }
                self.decide(io)
            }
            Stage::Flushed => {
                let parts = std::mem::take(&mut self.barrier.parts);
                if let Some(parent) = self.parent() {
                    self.send(io, parent, Body::BarrierFlushed { parts });
                    return Ok(());
                }
                self.barrier.parts = std::mem::take(&mut self.barrier.total);
                self.join(&parts)?;
                self.barrier.total = std::mem::take(&mut self.barrier.parts);
                self.decide(io)
            }
            _ => Ok(()),
        }
    }

    /// The second round: down.
    fn barrier_flush(&mut self, io: &mut Io<'_>, parts: &Arc<Vec<Part>>) -> Checked {
        for child in self.children() {
            self.send(io, child, Body::BarrierFlush { parts: Arc::clone(parts) });
        }
        self.barrier.arrived.clear();
        let epoch = self.shared.epoch;
        self.take_parts(io, epoch, parts, |plugin, cx, payload| plugin.flush(cx, payload))?;
        self.barrier.stage = Stage::Flushing { upto: self.shared.flushes.next() };
        Ok(())
    }

    /// The second round: up, once this rank's part in it is over.
    pub(super) fn barrier_progress(&mut self, io: &mut Io<'_>) -> bool {
        let Stage::Flushing { upto } = self.barrier.stage else { return false };
        if !self.shared.flushes.settled(0, upto) || self.plugins.iter().any(|plugin| plugin.get().flushing())
        {
            return false;
        }
        self.barrier.stage = Stage::Flushed;
        let parts = self.make_parts(io, |plugin, cx, _| Ok(plugin.flushed(cx)));
        let joined = parts.and_then(|parts| self.join(&parts)).and_then(|()| self.barrier_up(io));
        self.blame_below(io, joined);
        true
    }

    /// The root: all may leave.
    fn decide(&mut self, io: &mut Io<'_>) -> Checked {
        let mut moves = std::mem::take(&mut self.barrier.moves);
        moves.homes.sort_unstable();
        moves.homes.dedup_by_key(|&mut (page, _)| page);
        moves.managers.sort_unstable();
        moves.managers.dedup_by_key(|&mut (lock, _)| lock);
        // Freed pages need not move.
        let freed: Vec<Extent> =
            moves.freed.iter().map(|&(first, count)| Extent::new(first, count)).collect();
        let is_used = |page: PageIndex| !freed.iter().any(|pages| pages.contains(page));
        moves.homes.retain(|&(page, _)| is_used(page));
        let (_, _, kind) = self.barrier.name.expect("a thread named it");
        let parts = std::mem::take(&mut self.barrier.total);
        let mut kept = Vec::new();
        for plugin in &mut self.plugins {
            let of = plugin.kind();
            let Some(part) = parts.iter().find(|part| part.protocol == of) else { continue };
            let unsent = plugin.get().unsent(&part.payload);
            self.barrier.late.extend(moves.homes.extract_if(.., |(page, _)| unsent.contains(page)));
            let cx = Cx { shared: &mut self.shared, mem: &mut *io.mem, out: &mut *io.out };
            kept.extend(plugin.get_mut().kept(&cx, kind, &part.payload));
        }
        kept.sort_unstable();
        kept.retain(|&(page, _)| is_used(page));
        kept.retain(|(page, _)| moves.homes.binary_search_by_key(page, |&(page, _)| page).is_err());
        self.depart(io, &Arc::new(Departure { kind, moves, kept, parts }))
    }

    /// Leaves the barrier.
    fn depart(&mut self, io: &mut Io<'_>, departure: &Arc<Departure>) -> Checked {
        for child in self.children() {
            self.send(io, child, Body::BarrierDepart { departure: Arc::clone(departure) });
        }
        let epoch = self.shared.epoch;
        self.take_parts(io, epoch, &departure.parts, |plugin, cx, payload| plugin.depart(cx, payload))?;
        self.each_without_part(io, departure)?;
        for &(first, count) in &departure.moves.freed {
            let pages = Extent::new(first, count);
            let known =
                self.shared.regions.find(first).is_some_and(|region| pages.end() <= region.pages.end());
            let Some((plugin, mut cx)) = self.plugin_of(io, first).filter(|_| known && count > 0) else {
                return unexpected("freed pages");
            };
            plugin.renew(&mut cx, pages);
            cx.mem.clear(pages);
            cx.out.push(Action::Renewed { pages });
        }
        let me = self.shared.rank;
        self.shared.epoch += 1;
        let moved = departure.moves.homes.iter().map(|&(page, (_, to))| (page, to, false));
        for (page, to, kept) in moved.chain(departure.kept.iter().map(|&(page, to)| (page, to, true))) {
            let from = self.home(page);
            if from != to {
                self.shared.tables.move_home(page, to);
                self.shared.stats.homes_gained += u64::from(to == me);
                let (plugin, mut cx) =
                    self.plugin_of(io, page).ok_or_else(|| Violation::new("moves no page"))?;
                plugin.rehome(&mut cx, page, from, to, kept);
            }
        }
        for &(lock, (_, to)) in &departure.moves.managers {
            let from = self.manager(lock);
            if from == to {
                continue;
            }
            if from == me {
                self.export_lock(io, lock, to);
            } else if to == me {
                self.awaited.insert(lock, Vec::new());
            }
            self.shared.tables.move_manager(lock, to);
        }
        self.entering = std::mem::take(&mut self.barrier.threads);
        let moves = Moves { homes: std::mem::take(&mut self.barrier.late), ..Moves::default() };
        self.barrier = Barrier { moves, ..Barrier::default() };
        (self.shared.at_barrier, self.shared.released) = (false, false);
        self.each(io, |plugin, cx| plugin.begin_epoch(cx));
        self.enter_epoch(io);
        let (now, later) = std::mem::take(&mut self.parked)
            .into_iter()
            .partition(|(_, message)| message.epoch <= self.shared.epoch);
        self.parked = later;
        let now: Vec<(Rank, crate::Message)> = now;
        for (from, message) in now {
            self.deliver(io, from, message.epoch, &message.body);
        }
        while self.failure().is_none()
            && !self.barrier.is_inside()
            && let Some((thread, op)) = self.deferred.pop_front()
        {
            self.start(io, thread, op);
        }
        Ok(())
    }

    /// Resumes the threads that the barrier held, once the pages that they will read are here.
    pub(super) fn enter_epoch(&mut self, io: &mut Io<'_>) -> bool {
        if self.entering.is_empty() || self.fetches_ahead() {
            return false;
        }
        for thread in std::mem::take(&mut self.entering) {
            self.done(io, thread, OpResult::Ok);
        }
        true
    }

    /// Protocols without any payload leave the barrier too.
    fn each_without_part(&mut self, io: &mut Io<'_>, departure: &Departure) -> Checked {
        let mut result = Ok(());
        let kinds: Vec<_> = departure.parts.iter().map(|part| part.protocol).collect();
        for plugin in &mut self.plugins {
            if !kinds.contains(&plugin.kind()) {
                let mut cx = Cx { shared: &mut self.shared, mem: &mut *io.mem, out: &mut *io.out };
                result = result.and(plugin.get_mut().depart(&mut cx, &Payload::Nothing));
            }
        }
        result
    }

    pub(super) fn barrier_message(&mut self, io: &mut Io<'_>, from: Rank, body: &Body) -> Checked {
        match body {
            Body::BarrierArrive { barrier, kind, rank, moves, parts } => {
                let gathering = matches!(self.barrier.stage, Stage::Open | Stage::Releasing | Stage::Arrived);
                if !gathering
                    || !self.children().any(|child| child == from)
                    || !self.barrier.arrived.insert(from)
                {
                    return unexpected("arrival at a barrier");
                }
                if let Err(reason) = self.name_barrier(*rank, *barrier, *kind) {
                    self.fail(io, reason);
                    return Ok(());
                }
                self.barrier.moves.homes.extend_from_slice(&moves.homes);
                self.barrier.moves.managers.extend_from_slice(&moves.managers);
                self.barrier.moves.freed.extend_from_slice(&moves.freed);
                self.join(parts)?;
                self.barrier_up(io)
            }
            Body::BarrierFlush { parts } => {
                if Some(from) != self.parent() || self.barrier.stage != Stage::Waiting {
                    return unexpected("second round of a barrier");
                }
                self.barrier_flush(io, parts)
            }
            Body::BarrierFlushed { parts } => {
                let second = matches!(self.barrier.stage, Stage::Flushing { .. } | Stage::Flushed);
                if !second
                    || !self.children().any(|child| child == from)
                    || !self.barrier.arrived.insert(from)
                {
                    return unexpected("end of a barrier's second round");
                }
                self.join(parts)?;
                self.barrier_up(io)
            }
            Body::BarrierDepart { departure } => {
                if Some(from) != self.parent()
                    || !matches!(self.barrier.stage, Stage::Waiting | Stage::Flushed)
                {
                    return unexpected("end of a barrier");
                }
                self.depart(io, departure)
            }
            _ => unexpected("message"),
        }
    }
}

fn describe(id: BarrierId, kind: BarrierKind) -> String {
    match kind {
        BarrierKind::Normal => id.to_string(),
        BarrierKind::KeepReadWrite => format!("{id} (keep read-write)"),
    }
}
