//! Synchronisation, the same for all protocols: operations that wait, words, fences. Locks and barriers are
//! in submodules.
//!
//! Nothing here touches a page, with one exception: an atomic operation is a lock of its word, an ordinary
//! access to the page, and an unlock, so every protocol orders it as it orders locks.

mod barrier;
mod direct;
mod lock;

use super::config::word_lock;
use super::direct::DirectOp;
use super::engine::Engine;
use super::message::{Info, Payload};
use super::protocol::Scope;
use super::rule::Rule;
use super::{
    AtomicOp, Body, Checked, CondId, Diff, Io, LockId, LockMode, OpError, OpResult, Protection, ProtocolKind,
    Rank, SyncOp, ThreadId,
};
use rampool_wire::units::PageIndex;

pub(crate) use barrier::Barrier;
pub(crate) use direct::Direct;
pub(crate) use lock::{LockManager, LockNode};

/// An operation of a thread.
#[derive(Clone, Hash, Debug)]
pub(crate) enum Begun {
    Sync(SyncOp),
    Direct(DirectOp, Option<LockId>),
}

/// An operation that waits for flushes.
#[derive(Clone, Hash, Debug)]
pub(crate) struct Pending {
    after: After,
    /// Its own flushes are `from .. upto`; it waits for all before `upto`.
    from: u64,
    upto: u64,
}

/// What follows when the flushes are acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum After {
    /// The lock may leave this rank. No thread waits for that here.
    Unlock {
        lock: LockId,
    },
    Wait {
        thread: ThreadId,
        lock: LockId,
        cond: CondId,
    },
    Fence {
        thread: ThreadId,
    },
    /// No thread waits for it.
    Nothing,
    /// All threads of this rank are at the barrier.
    Arrive,
}

/// A thread's atomic operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Word {
    page: PageIndex,
    offset: u32,
    width: u8,
    op: AtomicOp,
    state: WordState,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum WordState {
    /// Waits for the word's lock.
    Locking,
    /// Has it, and waits for the page.
    Faulting,
}

impl Engine {
    /// Begins an operation.
    pub(crate) fn start(&mut self, io: &mut Io<'_>, thread: ThreadId, op: Begun) {
        let op = match op {
            Begun::Sync(op) => op,
            Begun::Direct(op, under) => return self.direct_begin(io, thread, op, under),
        };
        match op {
            SyncOp::Lock { lock, mode, wait } => self.lock_begin(io, thread, lock, mode, wait),
            SyncOp::Unlock { lock } => self.unlock(io, thread, lock, OpResult::Ok),
            SyncOp::Wait { cond, lock } => {
                self.recall(io, lock);
                if self.holds_exclusively(thread, lock) {
                    let mode = LockMode::Exclusive;
                    self.release(io, Scope::Lock { thread, lock, mode }, After::Wait { thread, lock, cond });
                } else {
                    let result = OpResult::Failed(OpError::NotHeld { thread, lock });
                    self.done(io, thread, result);
                }
            }
            SyncOp::Signal { cond, lock, all } => {
                self.send_manager(io, lock, Body::CondSignal { cond, lock, all });
                self.done(io, thread, OpResult::Ok);
            }
            SyncOp::Fence => self.release(io, Scope::Fence, After::Fence { thread }),
            SyncOp::Barrier { barrier, kind, threads } => {
                self.barrier_begin(io, thread, barrier, kind, threads)
            }
            SyncOp::Atomic { page, offset, width, op } => {
                self.word_begin(io, thread, page, offset, width, op)
            }
            SyncOp::SetLockManager { lock, manager } => {
                let result = self.propose(|moves, me| moves.managers.push((lock, (me, manager))), manager);
                self.done(io, thread, result);
            }
            SyncOp::SetHome { page, home } => {
                let result = if self.shared.regions.find(page).is_none() {
                    OpResult::Failed(OpError::NoSuchPage { page })
                } else {
                    self.propose(|moves, me| moves.homes.push((page, (me, home))), home)
                };
                self.done(io, thread, result);
            }
        }
    }

    /// Begins to make this rank's writes available, with those of all owed critical sections; `after` follows
    /// when they are.
    fn release(&mut self, io: &mut Io<'_>, scope: Scope, after: After) {
        let from = self.shared.flushes.next();
        io.mem.begin_release();
        self.shared.released |= !matches!(scope, Scope::Barrier) || !self.owed.is_empty();
        self.each(io, |plugin, cx| plugin.release(cx, scope));
        let upto = self.shared.flushes.next();
        let owed = std::mem::take(&mut self.owed).into_keys();
        self.pending.extend(owed.map(|lock| Pending { after: After::Unlock { lock }, from, upto }));
        let pending = Pending { after, from, upto };
        if matches!(after, After::Unlock { .. }) && self.is_ready(&pending) {
            // Before the thread returns, so that others get the lock first.
            self.finish(io, after);
        } else {
            self.pending.push_back(pending);
        }
    }

    /// `after` follows when everything released so far is available.
    fn wait_for_flushes(&mut self, after: After) {
        let upto = self.shared.flushes.next();
        self.pending.push_back(Pending { after, from: upto, upto });
    }

    /// Continues one waiting operation. False if there is none.
    pub(crate) fn progress(&mut self, io: &mut Io<'_>) -> bool {
        let ready = self.pending.iter().position(|pending| self.is_ready(pending));
        if let Some(at) = ready {
            let pending = self.pending.remove(at).expect("it is there");
            self.finish(io, pending.after);
            return true;
        }
        self.word_progress(io)
            || self.direct_progress(io)
            || self.barrier_progress(io)
            || self.enter_epoch(io)
    }

    fn is_ready(&self, pending: &Pending) -> bool {
        // An acknowledgement may be for a flush that a sibling began and that carried this thread's bytes.
        let from = if self.shared.rules.keep(Rule::Generation) { 0 } else { pending.from };
        if !self.shared.flushes.settled(from, pending.upto) {
            return false;
        }
        match pending.after {
            // Management that is on its way here may have to move on at this very barrier.
            After::Arrive => {
                let released = self.unacked == 0 || !self.shared.rules.keep(Rule::ReleaseFence);
                // Homes may move: a rank that was asked for a page answers before that. A thread that waits
                // for a word's lock gets nothing inside a barrier, and the others may wait for that word
                // before they arrive. Writes that they have released since the rank was ready to arrive go
                // first, too: no lock is released inside.
                let others = self.pending.iter().any(|pending| pending.after != After::Arrive);
                let quiet = self.words.is_empty() && self.directs.is_empty() && !others;
                released && quiet && self.awaited.is_empty() && !self.fetches_ahead()
            }
            // A release inside a barrier would be in no payload.
            _ => !self.barrier.is_inside(),
        }
    }

    fn finish(&mut self, io: &mut Io<'_>, after: After) {
        self.each(io, |plugin, cx| plugin.released(cx));
        match after {
            After::Unlock { lock } => self.unlocked(io, lock),
            After::Wait { thread, lock, cond } => self.cond_wait(io, thread, lock, cond),
            After::Fence { thread } => self.done(io, thread, OpResult::Ok),
            After::Nothing => {}
            After::Arrive => self.arrive(io),
        }
    }

    /// `thread` got `lock`: ends its operation, or continues with its word.
    fn locked(&mut self, io: &mut Io<'_>, thread: ThreadId) {
        match self.words.get_mut(&thread) {
            Some(word) => {
                word.state = WordState::Faulting;
                let page = word.page;
                self.shared.retried.insert(page);
            }
            None if self.directs.contains_key(&thread) => self.direct_locked(thread),
            None => self.done(io, thread, OpResult::Ok),
        }
    }

    fn word_begin(
        &mut self,
        io: &mut Io<'_>,
        thread: ThreadId,
        page: PageIndex,
        offset: u32,
        width: u8,
        op: AtomicOp,
    ) {
        let error = match self.shared.regions.find(page) {
            None => Some(OpError::NoSuchPage { page }),
            Some(region) => {
                let fits = matches!(width, 1 | 2 | 4 | 8)
                    && offset.is_multiple_of(u32::from(width))
                    && offset < region.page_bytes
                    && (width == 8 || !matches!(op, AtomicOp::AddDouble(_)));
                (!fits).then_some(OpError::Misaligned { width, offset, page_bytes: region.page_bytes })
            }
        };
        if let Some(error) = error {
            self.done(io, thread, OpResult::Failed(error));
            return;
        }
        self.words.insert(thread, Word { page, offset, width, op, state: WordState::Locking });
        self.lock_begin(io, thread, word_lock(page, offset), LockMode::Exclusive, true);
    }

    /// Does the atomic operations whose page may have come.
    fn word_progress(&mut self, io: &mut Io<'_>) -> bool {
        let waiting = self
            .words
            .iter()
            .find(|(_, word)| word.state == WordState::Faulting && self.shared.retried.contains(&word.page));
        let Some((&thread, &word)) = waiting else {
            return false;
        };
        let writes = word.op != AtomicOp::Load;
        let needed = if writes { Protection::ReadWrite } else { Protection::Read };
        let (plugin, mut cx) = self.plugin_of(io, word.page).expect("the page was checked");
        if plugin.access(word.page) < needed {
            cx.shared.retried.remove(&word.page);
            plugin.fault(&mut cx, thread, word.page, writes);
            return true;
        }
        let (at, width) = (word.offset as usize, usize::from(word.width));
        let before = cx.mem.word(word.page, cx.page_bytes(word.page), at, width);
        let (old, new) = (before.to_le_bytes(), word.op.apply(before).to_le_bytes());
        let mut diff = Diff::default();
        for (index, (old, new)) in old.iter().zip(&new).enumerate().take(width) {
            if old != new {
                diff.push(at + index, std::slice::from_ref(new));
            }
        }
        if !diff.is_empty() {
            cx.mem.store(word.page, &diff);
        }
        let lock = word_lock(word.page, word.offset);
        self.words.remove(&thread);
        self.unlock(io, thread, lock, OpResult::Value(before));
        true
    }

    /// The requester's knowledge, for each protocol.
    fn infos(&self, lock: LockId) -> Vec<(ProtocolKind, Info)> {
        let infos = self.plugins.iter().map(|plugin| (plugin.kind(), plugin.get().info(lock)));
        infos.filter(|(_, info)| *info != Info::Nothing).collect()
    }

    /// Hands every protocol its part of a message. A payload of an earlier epoch brings nothing new: the
    /// barrier did.
    fn take_parts(
        &mut self,
        io: &mut Io<'_>,
        epoch: u32,
        parts: &[super::message::Part],
        mut take: impl FnMut(
            &mut dyn super::protocol::Protocol,
            &mut super::protocol::Cx<'_>,
            &Payload,
        ) -> Checked,
    ) -> Checked {
        if epoch < self.shared.epoch {
            return Ok(());
        }
        for part in parts {
            self.add_protocol(part.protocol);
            let plugin = self
                .plugins
                .iter_mut()
                .find(|plugin| plugin.kind() == part.protocol)
                .expect("it is there now");
            let mut cx =
                super::protocol::Cx { shared: &mut self.shared, mem: &mut *io.mem, out: &mut *io.out };
            take(plugin.get_mut(), &mut cx, &part.payload)?;
        }
        Ok(())
    }

    /// Collects one payload of every protocol.
    fn make_parts(
        &mut self,
        io: &mut Io<'_>,
        mut make: impl FnMut(
            &mut dyn super::protocol::Protocol,
            &mut super::protocol::Cx<'_>,
            ProtocolKind,
        ) -> Checked<Payload>,
    ) -> Checked<Vec<super::message::Part>> {
        let mut parts = Vec::new();
        for plugin in &mut self.plugins {
            let protocol = plugin.kind();
            let mut cx =
                super::protocol::Cx { shared: &mut self.shared, mem: &mut *io.mem, out: &mut *io.out };
            let payload = make(plugin.get_mut(), &mut cx, protocol)?;
            if payload != Payload::Nothing {
                parts.push(super::message::Part { protocol, payload });
            }
        }
        Ok(parts)
    }

    fn manager(&self, lock: LockId) -> Rank {
        self.shared.tables.manager(&self.shared.regions, lock)
    }

    fn send_manager(&mut self, io: &mut Io<'_>, lock: LockId, body: Body) {
        let manager = self.manager(lock);
        self.send(io, manager, body);
    }

    /// A message of the synchronisation core.
    pub(crate) fn synchronise(&mut self, io: &mut Io<'_>, from: Rank, epoch: u32, body: &Body) -> Checked {
        match body {
            Body::BarrierArrive { .. }
            | Body::BarrierFlush { .. }
            | Body::BarrierFlushed { .. }
            | Body::BarrierDepart { .. } => self.barrier_message(io, from, body),
            Body::DirectDone { call, bytes, changed } => self.on_direct_done(io, from, *call, bytes, changed),
            _ => self.lock_message(io, from, epoch, body),
        }
    }
}

impl AtomicOp {
    /// The word's new value. Widths below 8 use the low bytes.
    #[must_use]
    pub fn apply(self, before: u64) -> u64 {
        match self {
            Self::Load => before,
            Self::Store(value) | Self::Swap(value) => value,
            Self::Add(value) => before.wrapping_add(value),
            Self::And(value) => before & value,
            Self::Or(value) => before | value,
            Self::Xor(value) => before ^ value,
            Self::AddDouble(value) => (f64::from_bits(before) + f64::from_bits(value)).to_bits(),
            Self::CompareExchange { expect, new } => {
                if before == expect {
                    new
                } else {
                    before
                }
            }
        }
    }
}
