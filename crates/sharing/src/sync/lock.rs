//! Locks and condition variables.
//!
//! A lock is managed by one rank. It travels in one of two ways:
//!
//! * *Forward* (TreadMarks, and S5's old scheme). The lock is a token. The manager remembers the last
//!   requester and forwards each request to that rank, which passes the token on when it is done. The last
//!   holder takes it again without a message.
//! * *Central* (S5's new scheme). A release goes back to the manager, which grants.
//!
//! Or the manager chooses: it is central, until one rank alone requests it again and again. That rank gets a
//! token, and the first other one that requests the lock makes it central again.
//!
//! Readers and tries need to know whether a lock is held now, which only a central manager does. The first of
//! them on a forwarded lock recalls the token through the chain of waiters, and from then on the lock is
//! central.
//!
//! A condition variable's waiters queue at the lock's manager. A waiter is queued before its lock is free, so
//! no signal is lost: a central release carries the queueing with it, a forwarded token is held until the
//! manager has answered.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{After, Scope};
use crate::engine::Engine;
use crate::message::{Ask, Info, LockState, Part};
use crate::protocol::unexpected;
use crate::rule::Rule;
use crate::{
    Action, Body, Checked, CondId, Io, LockId, LockMode, LockPath, OpError, OpResult, ProtocolKind, Rank,
    Recalled, ThreadId, TimerId,
};

/// A lock at a rank that uses it.
///
/// Invariants: a holder implies `have == Exclusive`, readers imply `have == Shared`; `next` and `recall` are
/// never both set; nothing that is `leaving` leaves before the writes of every critical section that ended
/// here are available.
#[derive(Clone, Hash, Debug, Default)]
pub(crate) struct LockNode {
    have: Have,
    /// It goes back to the manager when no thread here wants it.
    central: bool,
    /// No thread waits for the readers here, and no rank is told when they end.
    snapshot: bool,
    /// The mode that was requested from the manager and is not granted yet.
    asked: Option<LockMode>,
    /// The thread whose request does not wait.
    trying: Option<ThreadId>,
    holder: Option<ThreadId>,
    readers: BTreeSet<ThreadId>,
    queue: VecDeque<(ThreadId, LockMode)>,
    /// The rank that gets the token after this one.
    next: Option<Ask>,
    /// The manager wants the token back.
    recall: bool,
    /// How often it passed between threads of this rank.
    streak: u8,
    /// How often threads of this rank took it without a message since it came.
    again: u32,
    /// It was wanted back right after it had been handed over.
    wanted_back: bool,
    /// Critical sections that have ended here, but whose writes are not all available. Threads of this rank
    /// need not wait for that, others do.
    leaving: u32,
    /// Critical sections whose writes are released at once, without waiting for a request, and how many those
    /// were the last time.
    prompt: u8,
    prompted: u8,
    /// The last one released its writes at once.
    was_prompt: bool,
    /// It is lent to this rank's threads, since the last critical section of this one.
    lent_after: Option<ThreadId>,
    /// It stays lent although `next` wants it: how often it had been taken when that asked.
    kept: Option<u32>,
    /// So many requests are not kept waiting, and how many those were the last time.
    rest: u8,
    rested: u8,
}

/// After a rank had to wait for writes that could have been sent earlier, this many critical sections release
/// theirs at once; twice as many each time, and half as many where this rank itself took the lock next.
const PROMPT: u8 = 2;
const LONGEST_PROMPT: u8 = 64;
/// After a lock was kept in vain, this many requests of it are not kept waiting; twice as many each time.
const REST: u8 = 2;
const LONGEST_REST: u8 = 64;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Have {
    #[default]
    Nothing,
    Exclusive,
    Shared,
}

/// A lock at its manager.
#[derive(Clone, Hash, Debug)]
pub(crate) struct LockManager {
    path: Path,
    /// Central: its holder.
    holder: Option<Rank>,
    readers: BTreeSet<Rank>,
    queue: VecDeque<Ask>,
    waiters: BTreeMap<CondId, VecDeque<(Rank, ThreadId)>>,
    alone: Alone,
}

/// Whether one rank alone requests a lock, as its manager sees it.
#[derive(Clone, Copy, Hash, Debug)]
struct Alone {
    /// The rank that got it last, and how often in a row.
    last: Option<Rank>,
    row: u8,
    /// After so many in a row it gets a token.
    needed: u8,
}

const ALONE: u8 = 2;
const LONGEST_ALONE: u8 = 64;

impl Alone {
    fn new() -> Self {
        Self { last: None, row: 0, needed: ALONE }
    }

    /// `rank` gets the lock. True: as a token.
    fn granted(&mut self, rank: Rank) -> bool {
        self.row = if self.last.replace(rank) == Some(rank) { self.row.saturating_add(1) } else { 1 };
        self.row >= self.needed
    }

    /// The token is back; it was used `again` times without a message. Recalling it costs two messages more.
    fn returned(&mut self, again: u32) {
        let paid = again >= u32::from(ALONE);
        self.needed = if paid { ALONE } else { self.needed.saturating_mul(2).min(LONGEST_ALONE) };
        (self.last, self.row) = (None, 0);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Path {
    Forward { last: Rank },
    Recalling { busy: bool },
    Central,
}

impl LockNode {
    fn is_free(&self) -> bool {
        self.have == Have::Exclusive && self.holder.is_none()
    }

    /// Whether it goes elsewhere as soon as it is free.
    fn is_wanted_elsewhere(&self) -> bool {
        self.central || self.next.is_some() || self.recall
    }

    /// A rank requested the lock before the writes of its last critical section were sent.
    fn asked_too_soon(&mut self) {
        self.prompted = self.prompted.saturating_mul(2).clamp(PROMPT, LONGEST_PROMPT);
        self.prompt = self.prompted;
    }

    /// This rank takes the lock again: if it sent the last section's writes at once, nobody wanted them.
    fn taken_again(&mut self) {
        if std::mem::take(&mut self.was_prompt) {
            self.prompted /= 2;
            self.prompt = self.prompt.min(self.prompted);
        }
    }

    /// `owed`: the writes of a critical section wait for a request.
    pub fn check(&self, lock: LockId, owed: bool) {
        assert!(!owed || self.leaving > 0, "{lock} is owed but nothing is leaving");
        let goes = self.is_free() && self.is_wanted_elsewhere() && self.kept.is_none();
        assert!(!(owed && goes), "{lock} is owed and asked for");
        assert!(self.holder.is_none() || self.have == Have::Exclusive, "{lock} is held but not here");
        assert!(self.readers.is_empty() || self.have == Have::Shared, "{lock} is read but not here");
        assert!(!(self.next.is_some() && self.recall), "{lock} has two successors");
        let front = self.queue.front().map(|&(_, mode)| mode);
        assert!(
            self.lent_after.is_none()
                || (self.is_free()
                    && front.is_none()
                    && (self.kept.is_some() || !self.is_wanted_elsewhere())),
            "{lock} is lent, but held or asked for"
        );
        assert!(
            self.kept.is_none() || (self.lent_after.is_some() && self.next.is_some()),
            "{lock} is kept, but not lent or not asked for"
        );
        if self.is_free() && self.leaving == 0 && self.kept.is_none() {
            assert!(front != Some(LockMode::Exclusive), "{lock} is free and waited for");
            assert!(self.next.is_none() && !self.recall, "{lock} is free and wanted elsewhere");
        }
    }
}

impl LockManager {
    fn new(path: Path) -> Self {
        Self {
            path,
            holder: None,
            readers: BTreeSet::new(),
            queue: VecDeque::new(),
            waiters: BTreeMap::new(),
            alone: Alone::new(),
        }
    }

    /// Central: whether no holder excludes the requester.
    fn is_free_for(&self, ask: &Ask) -> bool {
        self.holder.is_none()
            && (ask.mode != LockMode::Exclusive || self.readers.is_empty())
            && !(ask.mode == LockMode::Shared && self.readers.contains(&ask.by))
    }

    pub fn check(&self, lock: LockId) {
        assert!(self.holder.is_none() || self.readers.is_empty(), "{lock} has a holder and readers");
        assert!(
            self.path == Path::Central || self.holder.is_none(),
            "{lock} is not central but has a holder"
        );
        if self.path == Path::Central && self.holder.is_none() && self.readers.is_empty() {
            assert!(self.queue.is_empty(), "{lock} is free and asked for");
        }
    }
}

impl Engine {
    /// The lock's state here, made on first use: an unused lock is a free token at its first manager.
    fn node(&mut self, lock: LockId) -> &mut LockNode {
        let known = self.locks.get_mut(lock).is_some();
        if !known && self.manager(lock) == self.shared.rank && !self.awaited.contains_key(&lock) {
            self.manage(lock);
        }
        self.locks.get_or_insert_with(lock, LockNode::default)
    }

    /// The lock's management, made on first use.
    fn manage(&mut self, lock: LockId) -> &mut LockManager {
        let Self { shared, locks, managed, .. } = self;
        managed.get_or_insert_with(lock, || {
            let path = match shared.lock_path {
                LockPath::Forward => {
                    locks.get_or_insert_with(lock, LockNode::default).have = Have::Exclusive;
                    Path::Forward { last: shared.rank }
                }
                LockPath::Central | LockPath::Either => Path::Central,
            };
            LockManager::new(path)
        })
    }

    pub(super) fn holds_exclusively(&self, thread: ThreadId, lock: LockId) -> bool {
        self.locks.get(lock).is_some_and(|node| node.holder == Some(thread))
    }

    /// Whether the thread waits for the lock here. One that waits for a condition does so from its signal on.
    #[must_use]
    pub fn waits_for_lock(&self, thread: ThreadId, lock: LockId) -> bool {
        self.locks.get(lock).is_some_and(|node| node.queue.iter().any(|&(waiting, _)| waiting == thread))
    }

    pub(super) fn lock_begin(
        &mut self,
        io: &mut Io<'_>,
        thread: ThreadId,
        lock: LockId,
        mode: LockMode,
        wait: bool,
    ) {
        let only_entry = self.plugins.iter().all(|plugin| plugin.kind() == ProtocolKind::Ibec);
        let mode = if mode == LockMode::Snapshot && !only_entry { LockMode::Shared } else { mode };
        let handovers = self.shared.tuning.local_handovers;
        self.recall(io, lock);
        let node = self.node(lock);
        if node.holder == Some(thread) || node.readers.contains(&thread) {
            self.done(io, thread, OpResult::Failed(OpError::AlreadyHeld { thread, lock }));
            return;
        }
        let exclusive = mode == LockMode::Exclusive;
        let here = if exclusive {
            node.is_free()
                && node.queue.is_empty()
                && (!node.is_wanted_elsewhere() || node.streak < handovers)
        } else {
            node.have == Have::Shared
                && node.queue.is_empty()
                && node.snapshot == (mode == LockMode::Snapshot)
                && node.streak < handovers
        };
        if here {
            if !exclusive || node.is_wanted_elsewhere() {
                node.streak += 1;
            }
            node.again = node.again.saturating_add(1);
            node.taken_again();
            self.shared.stats.local_acquires += 1;
            self.lock_take(io, thread, lock, mode);
        } else if wait {
            node.queue.push_back((thread, mode));
            self.lock_ask(io, lock);
        } else {
            let taken = (node.have == Have::Exclusive && (exclusive || node.holder.is_some()))
                || node.have == Have::Shared
                || node.asked.is_some()
                || !node.queue.is_empty();
            if taken {
                self.done(io, thread, OpResult::Busy);
            } else {
                node.trying = Some(thread);
                self.ask(io, lock, mode, false);
            }
        }
    }

    /// Lends a lock whose last critical section was `thread`'s. Its writes wait for a request of the lock, as
    /// will those of the next ones.
    fn lend(&mut self, io: &mut Io<'_>, thread: ThreadId, lock: LockId) {
        if io.mem.lend(lock) {
            self.node(lock).lent_after = Some(thread);
            self.lent += 1;
        }
    }

    /// Ends that, if the lock is lent: what threads have done with it has happened here.
    pub(super) fn recall(&mut self, io: &mut Io<'_>, lock: LockId) {
        let Some(node) = self.locks.get_mut(lock) else { return };
        let Some(thread) = node.lent_after.take() else { return };
        self.lent -= 1;
        let Recalled { times, used, holder } = io.mem.recall(lock);
        let kept = node.kept.take().is_some();
        node.holder = holder;
        node.again = node.again.saturating_add(times);
        if times > 0 {
            node.taken_again();
        }
        self.shared.stats.lock_acquires += u64::from(times);
        self.shared.stats.local_acquires += u64::from(times);
        if times > 0 && self.shared.rules.keep(Rule::Lent) {
            if used {
                if self.owed.insert(lock, thread).is_none() {
                    self.node(lock).leaving += 1;
                }
            } else if !self.shared.flushes.settled(0, self.shared.flushes.next()) {
                // What was written under it is on its way, with a release that was not told of it.
                self.node(lock).leaving += 1;
                self.wait_for_flushes(After::Unlock { lock });
            }
        }
        if kept {
            self.lock_dispatch(io, lock).expect("this rank's own payload is well-formed");
        }
    }

    /// Another rank wants a lock that is lent, or about to be. Whether that rank waits a while. It does where
    /// the lock goes to and fro, since no rank can use a lock that is on its way.
    fn keeps(&mut self, lock: LockId) -> bool {
        let is_open = self.barrier.is_open() && self.shared.tuning.keep_us > 0;
        let node = self.node(lock);
        if !is_open || !node.wanted_back || node.kept.is_some() || node.recall || node.central {
            return false;
        }
        let rests = node.rest > 0;
        node.rest = node.rest.saturating_sub(1);
        !rests
    }

    /// The lock stays lent for a while although `next` wants it.
    fn keep(&mut self, io: &mut Io<'_>, lock: LockId) {
        let node = self.node(lock);
        node.kept = Some(node.again.saturating_add(io.mem.lent_times(lock)));
        let after_us = self.shared.tuning.keep_us;
        io.out.push(Action::SetTimer { timer: TimerId::Keep(lock), after_us });
    }

    /// It has waited. That has paid if threads of this rank took the lock as often meanwhile as is asked of a
    /// lock that is kept.
    pub(crate) fn kept(&mut self, io: &mut Io<'_>, lock: LockId) {
        let keep_uses = self.shared.tuning.keep_uses;
        let Some(node) = self.locks.get_mut(lock) else { return };
        let Some(before) = node.kept else { return };
        let now = node.again.saturating_add(io.mem.lent_times(lock));
        let paid = now.saturating_sub(before) >= keep_uses;
        node.rested = if paid { 0 } else { node.rested.saturating_mul(2).clamp(REST, LONGEST_REST) };
        (node.rest, node.wanted_back) = (node.rested, paid);
        self.recall(io, lock);
    }

    pub(crate) fn recall_all(&mut self, io: &mut Io<'_>) {
        if self.lent == 0 {
            return;
        }
        let is_lent = |(lock, node): (LockId, &LockNode)| node.lent_after.is_some().then_some(lock);
        let mut lent: Vec<LockId> = self.locks.iter().filter_map(is_lent).collect();
        lent.sort_unstable();
        for lock in lent {
            self.recall(io, lock);
        }
    }

    /// `thread` has the lock from now on.
    fn lock_take(&mut self, io: &mut Io<'_>, thread: ThreadId, lock: LockId, mode: LockMode) {
        let node = self.node(lock);
        if mode == LockMode::Exclusive {
            node.holder = Some(thread);
        } else {
            node.readers.insert(thread);
        }
        self.shared.stats.lock_acquires += 1;
        self.each(io, |plugin, cx| plugin.opened(cx, thread, lock, mode));
        self.locked(io, thread);
    }

    /// Requests from the manager what the first waiter here wants, unless it was requested or is here.
    fn lock_ask(&mut self, io: &mut Io<'_>, lock: LockId) {
        let node = self.node(lock);
        if node.asked.is_some() {
            return;
        }
        let Some(&(_, mode)) = node.queue.front() else { return };
        let missing = match node.have {
            Have::Nothing => true,
            // A reader does not read under a token: other ranks' readers could not join. The manager will
            // recall it.
            Have::Exclusive => node.holder.is_none() && mode != LockMode::Exclusive,
            Have::Shared => false,
        };
        if missing {
            self.ask(io, lock, mode, true);
        }
    }

    fn ask(&mut self, io: &mut Io<'_>, lock: LockId, mode: LockMode, wait: bool) {
        let wanted_back = self.handed_over.take() == Some(lock);
        self.shared.stats.wanted_back += u64::from(wanted_back);
        self.node(lock).wanted_back |= wanted_back;
        let ask = Ask { by: self.shared.rank, mode, wait, epoch: self.shared.epoch, infos: self.infos(lock) };
        self.node(lock).asked = Some(mode);
        self.send_manager(io, lock, Body::LockRequest { lock, ask });
    }

    /// The lock is here and free: it goes to the next thread of this rank, to the next rank, or back to the
    /// manager, or it stays.
    fn lock_dispatch(&mut self, io: &mut Io<'_>, lock: LockId) -> Checked {
        let handovers = self.shared.tuning.local_handovers;
        let node = self.node(lock);
        if !node.is_free() || node.kept.is_some() {
            return Ok(());
        }
        let wanted = node.is_wanted_elsewhere();
        if let Some(&(thread, LockMode::Exclusive)) = node.queue.front()
            && (!wanted || node.streak < handovers)
        {
            node.streak = node.streak.saturating_add(1);
            node.queue.pop_front();
            self.lock_take(io, thread, lock, LockMode::Exclusive);
            return Ok(());
        }
        if wanted && let Some(thread) = self.owed.remove(&lock) {
            let keeps = self.shared.rules.keep(Rule::Owed);
            let node = self.node(lock);
            node.asked_too_soon();
            if keeps {
                self.release(
                    io,
                    Scope::Lock { thread, lock, mode: LockMode::Exclusive },
                    After::Unlock { lock },
                );
                return Ok(());
            }
            node.leaving -= 1;
        }
        let node = self.node(lock);
        if node.leaving > 0 {
            return Ok(());
        }
        if let Some(ask) = node.next.take() {
            self.pass_token(io, lock, &ask);
        } else if node.recall {
            node.recall = false;
            node.have = Have::Nothing;
            let again = node.again;
            let (by, manager) = (self.shared.rank, self.manager(lock));
            let parts = self.make_parts(io, |plugin, cx, _| Ok(plugin.update(cx, lock, manager)))?;
            self.unacked += 1;
            self.send(io, manager, Body::LockReturn { lock, by, again, parts });
        } else if node.central {
            node.have = Have::Nothing;
            self.give_back(io, lock, LockMode::Exclusive)?;
        }
        self.lock_ask(io, lock);
        Ok(())
    }

    fn pass_token(&mut self, io: &mut Io<'_>, lock: LockId, ask: &Ask) {
        self.handed_over = Some(lock);
        self.shared.stats.handed_over += 1;
        let node = self.node(lock);
        node.have = Have::Nothing;
        node.streak = 0;
        self.send_token(io, lock, ask);
    }

    fn send_token(&mut self, io: &mut Io<'_>, lock: LockId, ask: &Ask) {
        let epoch = self.shared.epoch;
        match self
            .make_parts(io, |plugin, cx, kind| plugin.grant(cx, lock, ask.by, info_of(ask, kind, epoch)))
        {
            Ok(parts) => self.send(
                io,
                ask.by,
                Body::LockGrant { lock, mode: LockMode::Exclusive, central: false, parts },
            ),
            // The requester's knowledge is invalid. This may be long after its request.
            Err(violation) => self.violated(io, ask.by, violation),
        }
    }

    fn give_back(&mut self, io: &mut Io<'_>, lock: LockId, mode: LockMode) -> Checked {
        let (by, manager) = (self.shared.rank, self.manager(lock));
        self.node(lock).streak = 0;
        let parts = self.make_parts(io, |plugin, cx, _| Ok(plugin.update(cx, lock, manager)))?;
        self.unacked += 1;
        self.send(io, manager, Body::LockRelease { lock, by, mode, parts });
        Ok(())
    }

    /// Ends a critical section. The thread continues at once; the lock leaves this rank when the writes are
    /// available.
    pub(super) fn unlock(&mut self, io: &mut Io<'_>, thread: ThreadId, lock: LockId, result: OpResult) {
        let held = self.let_go(io, thread, lock);
        self.done(
            io,
            thread,
            if held { result } else { OpResult::Failed(OpError::NotHeld { thread, lock }) },
        );
    }

    /// Like `unlock`, but the thread's operation continues. False if it does not hold the lock.
    pub(super) fn let_go(&mut self, io: &mut Io<'_>, thread: ThreadId, lock: LockId) -> bool {
        self.recall(io, lock);
        let mode = match self.locks.get(lock) {
            Some(node) if node.holder == Some(thread) => LockMode::Exclusive,
            Some(node) if node.readers.contains(&thread) && node.snapshot => LockMode::Snapshot,
            Some(node) if node.readers.contains(&thread) => LockMode::Shared,
            _ => return false,
        };
        let waits = mode == LockMode::Exclusive && self.may_wait(lock);
        let node = self.node(lock);
        node.holder = None;
        node.readers.remove(&thread);
        if waits {
            if self.owed.insert(lock, thread).is_none() {
                self.node(lock).leaving += 1;
            }
            self.lend(io, thread, lock);
            let node = self.node(lock);
            match (node.lent_after, node.next.is_some()) {
                (_, false) => {}
                (Some(_), true) => self.keep(io, lock),
                (None, true) => self.lock_dispatch(io, lock).expect("this rank's own payload is well-formed"),
            }
        } else {
            node.leaving += 1;
            self.release(io, Scope::Lock { thread, lock, mode }, After::Unlock { lock });
        }
        true
    }

    /// Whether the writes under this lock can stay here until another rank requests the lock, or something
    /// else is released: no rank wants it now, or that rank is kept waiting; and few had to wait lately.
    fn may_wait(&mut self, lock: LockId) -> bool {
        let patient = self.barrier.is_open() && self.plugins.iter().all(|plugin| plugin.get().may_wait());
        let node = self.node(lock);
        if !patient || !node.queue.is_empty() {
            return false;
        }
        if node.is_wanted_elsewhere() {
            return self.keeps(lock);
        }
        let waits = node.prompt == 0;
        node.prompt = node.prompt.saturating_sub(1);
        node.was_prompt = !waits;
        waits
    }

    /// The writes of a finished critical section are available.
    pub(super) fn unlocked(&mut self, io: &mut Io<'_>, lock: LockId) {
        let node = self.node(lock);
        node.leaving -= 1;
        if node.leaving > 0 {
            return;
        }
        let result = if node.have == Have::Exclusive {
            self.lock_dispatch(io, lock)
        } else if node.readers.is_empty() {
            node.have = Have::Nothing;
            node.streak = 0;
            let told = if node.snapshot { Ok(()) } else { self.give_back(io, lock, LockMode::Shared) };
            self.lock_ask(io, lock);
            told
        } else {
            Ok(())
        };
        result.expect("this rank's own payload is well-formed");
    }

    /// The waiting thread's writes are available: it queues for the condition and releases the lock.
    pub(super) fn cond_wait(&mut self, io: &mut Io<'_>, thread: ThreadId, lock: LockId, cond: CondId) {
        let by = self.shared.rank;
        let node = self.node(lock);
        if !node.central {
            // The token must not be free before the manager knows of the waiter.
            self.send_manager(io, lock, Body::CondWait { cond, lock, by, thread, release: None });
            return;
        }
        node.holder = None;
        let handed_over = matches!(node.queue.front(), Some((_, LockMode::Exclusive)));
        if handed_over && node.streak < self.shared.tuning.local_handovers {
            self.send_manager(io, lock, Body::CondWait { cond, lock, by, thread, release: None });
            self.lock_dispatch(io, lock).expect("this rank's own payload is well-formed");
            return;
        }
        let node = self.node(lock);
        node.have = Have::Nothing;
        node.streak = 0;
        let manager = self.manager(lock);
        let parts = self.make_parts(io, |plugin, cx, _| Ok(plugin.update(cx, lock, manager)));
        let release = Some(parts.expect("this rank's own payload is well-formed"));
        self.unacked += 1;
        self.send(io, manager, Body::CondWait { cond, lock, by, thread, release });
        self.lock_ask(io, lock);
    }

    pub(super) fn lock_message(&mut self, io: &mut Io<'_>, from: Rank, epoch: u32, body: &Body) -> Checked {
        match body {
            Body::LockRequest { lock, .. }
            | Body::LockRelease { lock, .. }
            | Body::LockReturn { lock, .. }
            | Body::LockHeld { lock }
            | Body::CondWait { lock, .. }
            | Body::CondSignal { lock, .. } => self.manager_message(io, from, epoch, *lock, body),
            Body::LockForward { lock, ask, recall } => self.on_forward(io, *lock, ask, *recall),
            Body::LockGrant { lock, mode, central, parts } => {
                if self.barrier.is_inside() {
                    // Threads do not start to run inside of a barrier.
                    let message = crate::Message { epoch, body: body.clone() };
                    self.parked.push((from, message));
                    return Ok(());
                }
                self.on_grant(io, epoch, *lock, *mode, *central, parts)
            }
            Body::LockBusy { lock } => self.on_busy(io, *lock),
            Body::LockReleaseAck { lock } => {
                if self.unacked == 0 {
                    return unexpected(&format!("acknowledgement of {lock}"));
                }
                self.unacked -= 1;
                Ok(())
            }
            Body::CondQueued { lock, thread } => {
                if !self.holds_exclusively(*thread, *lock) {
                    return unexpected("queueing of a waiter");
                }
                self.node(*lock).holder = None;
                self.lock_dispatch(io, *lock)
            }
            Body::CondWake { lock, thread } => {
                if !self.is_blocked(*thread) {
                    return unexpected("waking of a thread");
                }
                self.recall(io, *lock);
                self.node(*lock).queue.push_back((*thread, LockMode::Exclusive));
                self.lock_dispatch(io, *lock)?;
                self.lock_ask(io, *lock);
                Ok(())
            }
            Body::ManagerMove { lock, state } => self.on_manager_move(io, *lock, state),
            _ => unexpected("message"),
        }
    }

    /// A message for the lock's manager: that may be another rank by now, or this one in a moment.
    fn manager_message(
        &mut self,
        io: &mut Io<'_>,
        from: Rank,
        epoch: u32,
        lock: LockId,
        body: &Body,
    ) -> Checked {
        if let Some(waiting) = self.awaited.get_mut(&lock) {
            waiting.push((from, epoch, body.clone()));
            return Ok(());
        }
        let manager = self.manager(lock);
        if manager != self.shared.rank {
            self.send(io, manager, body.clone());
            return Ok(());
        }
        match body {
            Body::LockRequest { ask, .. } => self.on_request(io, lock, ask.clone()),
            Body::LockRelease { by, mode, parts, .. } => self.on_release(io, epoch, lock, *by, *mode, parts),
            Body::LockReturn { by, again, parts, .. } => {
                let managed = self.manage(lock);
                if !matches!(managed.path, Path::Recalling { .. }) {
                    return unexpected("return of a lock");
                }
                managed.path = Path::Central;
                managed.alone.returned(*again);
                self.take_parts(io, epoch, parts, |plugin, cx, payload| plugin.absorb(cx, lock, payload))?;
                self.send(io, *by, Body::LockReleaseAck { lock });
                self.lock_pump(io, lock)
            }
            Body::LockHeld { .. } => {
                self.on_held(io, lock);
                Ok(())
            }
            Body::CondWait { cond, by, thread, release, .. } => {
                let queue = self.manage(lock).waiters.entry(*cond).or_default();
                queue.push_back((*by, *thread));
                match release {
                    Some(parts) => self.on_release(io, epoch, lock, *by, LockMode::Exclusive, parts)?,
                    None if self.manage(lock).path != Path::Central => {
                        self.send(io, *by, Body::CondQueued { lock, thread: *thread });
                    }
                    None => {}
                }
                Ok(())
            }
            Body::CondSignal { cond, all, .. } => {
                let waiters = &mut self.manage(lock).waiters;
                let Some(queue) = waiters.get_mut(cond) else { return Ok(()) };
                let woken: Vec<_> =
                    if *all { queue.drain(..).collect() } else { queue.pop_front().into_iter().collect() };
                if queue.is_empty() {
                    waiters.remove(cond);
                }
                for (by, thread) in woken {
                    self.send(io, by, Body::CondWake { lock, thread });
                }
                Ok(())
            }
            _ => unexpected("message"),
        }
    }

    fn on_request(&mut self, io: &mut Io<'_>, lock: LockId, ask: Ask) -> Checked {
        let me = self.shared.rank;
        let exclusive = ask.mode == LockMode::Exclusive && ask.wait;
        let unused = |engine: &Self| engine.managed.get(lock).is_none() && engine.locks.get(lock).is_none();
        if self.shared.lock_path == LockPath::Forward && exclusive && ask.by != me && unused(self) {
            // It is unused: it is here and free, and moves on before this rank has to record anything else of
            // it.
            self.managed.get_or_insert_with(lock, || LockManager::new(Path::Forward { last: ask.by }));
            self.send_token(io, lock, &ask);
            return Ok(());
        }
        let passes_on = exclusive && self.shared.lock_path != LockPath::Either;
        let managed = self.manage(lock);
        match managed.path {
            Path::Forward { last } => {
                if passes_on {
                    managed.path = Path::Forward { last: ask.by };
                    self.send(io, last, Body::LockForward { lock, ask, recall: false });
                } else {
                    managed.path = Path::Recalling { busy: false };
                    managed.queue.push_back(ask);
                    let back =
                        Ask { by: me, mode: LockMode::Exclusive, wait: true, epoch: 0, infos: Vec::new() };
                    self.send(io, last, Body::LockForward { lock, ask: back, recall: true });
                }
                Ok(())
            }
            Path::Recalling { busy: true } if !ask.wait => {
                self.send(io, ask.by, Body::LockBusy { lock });
                Ok(())
            }
            Path::Recalling { .. } => {
                managed.queue.push_back(ask);
                Ok(())
            }
            Path::Central if managed.queue.is_empty() && managed.is_free_for(&ask) => {
                self.lock_grant(io, lock, &ask)
            }
            Path::Central => {
                managed.queue.push_back(ask);
                self.lock_pump(io, lock)
            }
        }
    }

    /// Grants what can be granted, in order, and refuses tries that cannot.
    fn lock_pump(&mut self, io: &mut Io<'_>, lock: LockId) -> Checked {
        loop {
            let managed = self.manage(lock);
            let Some(first) = managed.queue.front() else { return Ok(()) };
            if !managed.is_free_for(first) {
                self.refuse_tries(io, lock);
                return Ok(());
            }
            let ask = managed.queue.pop_front().expect("there is a first");
            self.lock_grant(io, lock, &ask)?;
            if self.failure().is_some() {
                return Ok(());
            }
        }
    }

    /// The manager grants the lock to a requester for which it is free.
    fn lock_grant(&mut self, io: &mut Io<'_>, lock: LockId, ask: &Ask) -> Checked {
        let chooses = self.shared.lock_path == LockPath::Either;
        let managed = self.manage(lock);
        let exclusive = ask.mode == LockMode::Exclusive;
        let token = exclusive && chooses && managed.alone.granted(ask.by) && managed.queue.is_empty();
        match ask.mode {
            LockMode::Exclusive if token => managed.path = Path::Forward { last: ask.by },
            LockMode::Exclusive => managed.holder = Some(ask.by),
            LockMode::Shared => {
                managed.readers.insert(ask.by);
            }
            LockMode::Snapshot => {}
        }
        let epoch = self.shared.epoch;
        match self.make_parts(io, |plugin, cx, kind| plugin.serve(cx, lock, info_of(ask, kind, epoch))) {
            Ok(parts) => {
                self.send(io, ask.by, Body::LockGrant { lock, mode: ask.mode, central: !token, parts })
            }
            Err(violation) => self.violated(io, ask.by, violation),
        }
        Ok(())
    }

    fn refuse_tries(&mut self, io: &mut Io<'_>, lock: LockId) {
        let managed = self.manage(lock);
        let (stay, go): (VecDeque<_>, VecDeque<_>) = managed.queue.drain(..).partition(|ask| ask.wait);
        managed.queue = stay;
        for ask in go {
            self.send(io, ask.by, Body::LockBusy { lock });
        }
    }

    fn on_forward(&mut self, io: &mut Io<'_>, lock: LockId, ask: &Ask, recall: bool) -> Checked {
        let manager = self.manager(lock);
        let node = self.node(lock);
        if node.next.is_some() || node.recall {
            return unexpected("second successor");
        }
        if !recall && node.lent_after.is_some() && self.keeps(lock) {
            self.node(lock).next = Some(ask.clone());
            self.keep(io, lock);
            return Ok(());
        }
        self.recall(io, lock);
        let node = self.node(lock);
        if recall {
            node.recall = true;
        } else {
            node.next = Some(ask.clone());
        }
        if node.is_free() {
            return self.lock_dispatch(io, lock);
        }
        if recall {
            self.send(io, manager, Body::LockHeld { lock });
        }
        Ok(())
    }

    fn on_grant(
        &mut self,
        io: &mut Io<'_>,
        epoch: u32,
        lock: LockId,
        mode: LockMode,
        central: bool,
        parts: &[Part],
    ) -> Checked {
        if self.locks.get(lock).is_none_or(|node| node.asked != Some(mode) || node.have != Have::Nothing) {
            return unexpected(&format!("grant of {lock}"));
        }
        self.take_parts(io, epoch, parts, |plugin, cx, payload| plugin.acquire(cx, lock, payload))?;
        let node = self.node(lock);
        node.asked = None;
        node.streak = 0;
        node.again = 0;
        node.central = central;
        let trying = node.trying.take();
        if mode == LockMode::Exclusive {
            node.have = Have::Exclusive;
            match trying {
                Some(thread) => {
                    self.lock_take(io, thread, lock, mode);
                    Ok(())
                }
                None => self.lock_dispatch(io, lock),
            }
        } else {
            node.have = Have::Shared;
            node.snapshot = mode == LockMode::Snapshot;
            let mut readers: Vec<ThreadId> = trying.into_iter().collect();
            while let Some(&(thread, wanted)) = node.queue.front()
                && wanted == mode
            {
                node.queue.pop_front();
                readers.push(thread);
            }
            if readers.is_empty() {
                return unexpected("grant that no thread waits for");
            }
            for thread in readers {
                self.lock_take(io, thread, lock, mode);
            }
            Ok(())
        }
    }

    /// The manager refused a try.
    fn on_busy(&mut self, io: &mut Io<'_>, lock: LockId) -> Checked {
        let Some(thread) = self.node(lock).trying.take() else {
            return unexpected(&format!("refusal of {lock}"));
        };
        self.node(lock).asked = None;
        self.done(io, thread, OpResult::Busy);
        self.lock_ask(io, lock);
        Ok(())
    }

    /// The recalled token is in use: no try can have it.
    fn on_held(&mut self, io: &mut Io<'_>, lock: LockId) {
        let managed = self.manage(lock);
        if managed.path == (Path::Recalling { busy: false }) {
            managed.path = Path::Recalling { busy: true };
            self.refuse_tries(io, lock);
        }
    }

    fn on_release(
        &mut self,
        io: &mut Io<'_>,
        epoch: u32,
        lock: LockId,
        by: Rank,
        mode: LockMode,
        parts: &[Part],
    ) -> Checked {
        let managed = self.manage(lock);
        let held = match mode {
            LockMode::Exclusive => managed.holder.take() == Some(by),
            _ => managed.readers.remove(&by),
        };
        if !held {
            return unexpected(&format!("release of {lock}"));
        }
        self.take_parts(io, epoch, parts, |plugin, cx, payload| plugin.absorb(cx, lock, payload))?;
        self.send(io, by, Body::LockReleaseAck { lock });
        self.lock_pump(io, lock)
    }

    /// Hands the lock's management to another rank, at the end of a barrier.
    pub(super) fn export_lock(&mut self, io: &mut Io<'_>, lock: LockId, to: Rank) {
        self.manage(lock);
        let managed = self.managed.remove(lock).expect("just made");
        let last = match managed.path {
            Path::Forward { last } => Some(last),
            _ => None,
        };
        let state = LockState {
            last,
            recalling: matches!(managed.path, Path::Recalling { .. }),
            holder: managed.holder,
            readers: managed.readers.into_iter().collect(),
            queue: managed.queue.into_iter().collect(),
            waiters: managed
                .waiters
                .into_iter()
                .map(|(cond, queue)| (cond, queue.into_iter().collect()))
                .collect(),
        };
        self.send(io, to, Body::ManagerMove { lock, state });
    }

    fn on_manager_move(&mut self, io: &mut Io<'_>, lock: LockId, state: &LockState) -> Checked {
        let Some(waiting) = self.awaited.remove(&lock) else { return unexpected("management of a lock") };
        let path = match state.last {
            Some(last) => Path::Forward { last },
            None if state.recalling => Path::Recalling { busy: false },
            None => Path::Central,
        };
        let managed = LockManager {
            path,
            holder: state.holder,
            readers: state.readers.iter().copied().collect(),
            queue: state.queue.iter().cloned().collect(),
            waiters: state
                .waiters
                .iter()
                .map(|(cond, queue)| (*cond, queue.iter().copied().collect()))
                .collect(),
            alone: Alone::new(),
        };
        self.managed.insert(lock, managed);
        for (from, epoch, body) in waiting {
            self.manager_message(io, from, epoch, lock, &body)?;
        }
        if path == Path::Central { self.lock_pump(io, lock) } else { Ok(()) }
    }
}

/// The requester's knowledge, if it was sent in this epoch.
fn info_of(ask: &Ask, kind: ProtocolKind, epoch: u32) -> Option<&Info> {
    if ask.epoch != epoch {
        return None;
    }
    ask.infos.iter().find(|(of, _)| *of == kind).map(|(_, info)| info)
}
