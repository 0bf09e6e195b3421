//! What threads of this rank wait for and hold, and which threads keep others waiting.
//!
//! A thread that has waited past its deadline asks the other ranks what keeps it waiting: each knows which
//! locks its threads hold, what they wait for themselves, and which of them are not at a barrier. With the
//! answers that come within a moment, the run ends.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rampool_sharing::allocator::Allocator;
use rampool_sharing::control::{Control, Wait};
use rampool_sharing::{BarrierId, CondId, LockId, OpResult, Rank, ThreadId};

use super::{Category, Host, Outcome, Slot};
use crate::OWN_LOCKS;

/// How long the other ranks have to answer what keeps a thread waiting.
const ANSWERS: Duration = Duration::from_secs(2);

/// What a thread waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waiting {
    Lock(LockId),
    Unlock(LockId),
    Barrier(BarrierId),
    /// A signal, and then its lock.
    Condition {
        cond: CondId,
        lock: LockId,
    },
    /// The same, for work, however long it takes.
    Idle {
        lock: LockId,
    },
    /// The same, for a semaphore that is 0.
    Semaphore {
        semaphore: u32,
        lock: LockId,
    },
    Signal(CondId),
    Fence,
    Word {
        address: usize,
    },
    Direct,
    Proposal,
    Allocation,
    Finish,
}

impl Waiting {
    fn category(self) -> Category {
        match self {
            Self::Lock(_) => Category::Lock,
            Self::Unlock(_) => Category::Unlock,
            Self::Barrier(_) => Category::Barrier,
            Self::Word { .. } => Category::Word,
            _ => Category::Other,
        }
    }

    /// Whether the answer mostly takes no longer than a few messages.
    pub fn is_answered_soon(self) -> bool {
        matches!(self, Self::Lock(_) | Self::Word { .. })
    }

    /// The lock of a lock operation.
    fn lock(self) -> Option<LockId> {
        match self {
            Self::Lock(lock) | Self::Unlock(lock) => Some(lock),
            _ => None,
        }
    }

    /// The lock that the thread has released, and takes again.
    fn without(self) -> Option<LockId> {
        match self {
            Self::Condition { lock, .. } | Self::Idle { lock } | Self::Semaphore { lock, .. } => Some(lock),
            _ => None,
        }
    }
}

/// The text behind "waits": for what.
impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Lock(lock) => write!(f, "for {}", name(lock)),
            Self::Unlock(lock) => write!(f, "for the release of {}", name(lock)),
            Self::Barrier(barrier) => write!(f, "at {barrier}"),
            Self::Condition { cond, lock } => write!(f, "for a signal of {cond} of {}", name(lock)),
            Self::Idle { .. } => f.write_str("for something to do"),
            Self::Semaphore { semaphore, .. } => write!(f, "for a post to semaphore {semaphore}"),
            Self::Signal(cond) => write!(f, "for the signal of {cond}"),
            Self::Fence => f.write_str("for a fence"),
            Self::Word { address } => write!(f, "for the word at {address:#x}"),
            Self::Direct => f.write_str("for a direct operation"),
            Self::Proposal => f.write_str("for a proposal"),
            Self::Allocation => f.write_str("for an allocation"),
            Self::Finish => f.write_str("to finish"),
        }
    }
}

/// The program's name for it.
fn name(lock: LockId) -> String {
    match lock.0.checked_sub(OWN_LOCKS) {
        Some(semaphore) => format!("the lock of semaphore {semaphore}"),
        None => lock.to_string(),
    }
}

/// A thread of the program.
#[derive(Debug, Default)]
pub(super) struct Thread {
    pub slot: Arc<Slot>,
    /// Locks that its operations took, in any mode, and have not released.
    held: Vec<Held>,
    waits: Option<Waiting>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    lock: LockId,
    since: Instant,
}

/// The question to other ranks for a thread that has waited too long.
#[derive(Debug)]
pub(super) struct Inquiry {
    number: u32,
    thread: ThreadId,
    what: Waiting,
    /// Which thread waits, how long, and for what.
    stuck: String,
    /// Threads that keep it waiting, and ranks that have not answered.
    who: Vec<String>,
    silent: BTreeSet<Rank>,
    until: Instant,
}

impl Host {
    /// A thread begins an operation. `computed`: as for [`Account::enter`](super::Account::enter).
    pub fn enter(&mut self, thread: ThreadId, what: Waiting, computed: Option<Duration>) {
        self.account.enter(thread, computed);
        self.threads[usize::from(thread.0)].waits = Some(what);
    }

    /// Its operation, which began then, is over.
    pub fn returns(&mut self, thread: ThreadId, what: Waiting, outcome: &Outcome, began: Instant) {
        let now = Instant::now();
        self.account.leave();
        self.account.operation(thread, what.category(), what.lock(), began, now);
        let Thread { held, waits, .. } = &mut self.threads[usize::from(thread.0)];
        *waits = None;
        if !matches!(outcome, Outcome::Operation(OpResult::Ok)) {
            return;
        }
        match what {
            Waiting::Lock(lock) => held.push(Held { lock, since: now }),
            Waiting::Unlock(lock) => held.retain(|held| held.lock != lock),
            _ => held
                .iter_mut()
                .filter(|held| what.without() == Some(held.lock))
                .for_each(|held| held.since = now),
        }
    }

    /// The thread has ended. If it holds a lock, the run ends: that lock could never be taken again.
    pub fn dismiss(&mut self, thread: ThreadId) {
        self.recall();
        if let Some(&Held { lock, .. }) = self.threads[usize::from(thread.0)].held.first()
            && !self.is_leaving()
        {
            self.stop(&format!("{} ({thread}) ended while it held {}", self.rank, name(lock)));
            self.flush();
        }
        self.threads[usize::from(thread.0)].held.clear();
        self.idle_threads.push_back(thread);
    }

    /// The thread has taken the lock without the rank.
    pub(super) fn holds(&mut self, thread: ThreadId, lock: LockId) {
        self.threads[usize::from(thread.0)].held.push(Held { lock, since: Instant::now() });
    }

    /// A thread of this rank that holds a lock.
    pub(super) fn holder(&self) -> Option<(ThreadId, String)> {
        let threads = self.threads.iter().zip(0..);
        threads
            .filter_map(|(thread, number)| Some((ThreadId(number), name(thread.held.first()?.lock))))
            .next()
    }

    /// A thread has waited too long. Returns when to check again, if its wait is not over then.
    pub fn give_up(&mut self, thread: ThreadId, waited: Duration, what: Waiting) -> Instant {
        let now = Instant::now();
        match &self.inquiry {
            Some(inquiry) if inquiry.until > now => return inquiry.until,
            Some(_) => self.conclude(),
            None => self.inquire(thread, waited, what),
        }
        self.flush();
        now + ANSWERS
    }

    fn inquire(&mut self, thread: ThreadId, waited: Duration, what: Waiting) {
        let seconds = waited.as_secs();
        let (rank, mut phrase) = (self.rank, what.to_string());
        if let Waiting::Condition { cond, lock } = what
            && self.engine.waits_for_lock(thread, lock)
        {
            phrase = format!("for {}, behind a signal of {cond}", name(lock));
        }
        let (wait, stuck) = match what {
            Waiting::Lock(lock) | Waiting::Condition { lock, .. } => {
                (Some(Wait::Lock { lock }), format!("{rank} ({thread}) has waited {seconds} s {phrase}"))
            }
            Waiting::Barrier(_) => (
                Some(Wait::Barrier { epoch: self.engine.epoch() }),
                format!("{rank} has waited {seconds} s {phrase}"),
            ),
            Waiting::Allocation => {
                (Some(Wait::Allocation {}), format!("{rank} has waited {seconds} s {phrase}"))
            }
            Waiting::Finish => {
                let missing: Vec<String> = self.present_peers().map(|rank| rank.to_string()).collect();
                (
                    None,
                    format!("{rank} has waited {seconds} s {phrase}; not finished: {}", missing.join(", ")),
                )
            }
            _ => (None, format!("{rank} ({thread}) has waited {seconds} s {phrase}")),
        };
        let Some(wait) = wait else { return self.stop(&stuck) };
        let silent: BTreeSet<Rank> =
            self.open_peers().filter(|&peer| wait != Wait::Allocation {} || peer == Rank(0)).collect();
        self.inquiries += 1;
        let number = self.inquiries;
        for &peer in &silent {
            self.tell(peer, &Control::WhoKeeps { inquiry: number, wait });
        }
        let who = self.blockers(wait);
        let until = Instant::now() + ANSWERS;
        self.inquiry = Some(Inquiry { number, thread, what, stuck, who, silent, until });
        self.conclude_if_answered();
    }

    /// Another rank asks.
    pub(super) fn on_who_keeps(&mut self, from: Rank, inquiry: u32, wait: Wait) {
        let who = self.blockers(wait);
        self.tell(from, &Control::Keeps { inquiry, who });
    }

    /// Another rank answers.
    pub(super) fn on_keeps(&mut self, from: Rank, number: u32, who: Vec<String>) {
        if let Some(inquiry) = self.inquiry.as_mut().filter(|inquiry| inquiry.number == number)
            && inquiry.silent.remove(&from)
        {
            inquiry.who.extend(who);
            self.conclude_if_answered();
        }
    }

    /// The thread's wait is over, perhaps by itself.
    pub(super) fn forget_inquiry_of(&mut self, thread: ThreadId) {
        if self.inquiry.as_ref().is_some_and(|inquiry| inquiry.thread == thread) {
            self.inquiry = None;
        }
    }

    fn conclude_if_answered(&mut self) {
        if self.inquiry.as_ref().is_some_and(|inquiry| inquiry.silent.is_empty()) {
            self.conclude();
        }
    }

    /// Ends the run, with the answers so far.
    fn conclude(&mut self) {
        let Some(Inquiry { what, stuck, who, silent, .. }) = self.inquiry.take() else { return };
        let mut why = stuck;
        match what {
            Waiting::Barrier(_) if !who.is_empty() => why += &format!("; not there: {}", who.join(", ")),
            Waiting::Allocation if !who.is_empty() => {
                why += &format!("; {} did not make the same call", who.join(", "))
            }
            Waiting::Lock(lock) | Waiting::Condition { lock, .. } if who.is_empty() && silent.is_empty() => {
                why += &format!(
                    "; no thread holds {} now; {} manages it",
                    name(lock),
                    self.engine.lock_manager(lock)
                );
            }
            _ => why.extend(who.iter().map(|who| format!("; {who}"))),
        }
        if !silent.is_empty() {
            let silent: Vec<String> = silent.iter().map(ToString::to_string).collect();
            why += &format!("; no answer from {}", silent.join(", "));
        }
        self.stop(&why);
    }

    /// Threads of this rank that keep others waiting.
    fn blockers(&self, wait: Wait) -> Vec<String> {
        match wait {
            Wait::Lock { lock } => self.holders(lock),
            Wait::Barrier { epoch } if self.engine.epoch() == epoch && self.engine.awaits_threads() => {
                vec![self.absent_threads()]
            }
            // It has not even left the one before.
            Wait::Barrier { epoch } if self.engine.epoch() < epoch => vec![self.rank.to_string()],
            Wait::Barrier { .. } => Vec::new(),
            Wait::Allocation {} => {
                let absent = self.allocator.as_ref().and_then(Allocator::absent).unwrap_or_default();
                absent.iter().map(ToString::to_string).collect()
            }
        }
    }

    fn holders(&self, lock: LockId) -> Vec<String> {
        let mut who = Vec::new();
        for (thread, number) in self.threads.iter().zip(0..) {
            let Some(held) = thread.held.iter().find(|held| held.lock == lock) else { continue };
            if thread.waits.and_then(Waiting::without) == Some(lock) {
                continue;
            }
            let waits = thread.waits.map(|what| format!(" and waits {what}")).unwrap_or_default();
            let seconds = held.since.elapsed().as_secs();
            who.push(format!(
                "{} ({}) has held {} for {seconds} s{waits}",
                self.rank,
                ThreadId(number),
                name(lock)
            ));
        }
        who
    }

    /// This rank, with its threads that are not at the barrier.
    fn absent_threads(&self) -> String {
        let mut known = Vec::new();
        if !self.in_barrier.is_empty() {
            known.push(format!("{} of {} threads are there", self.in_barrier.len(), self.account.threads()));
        }
        let elsewhere = self
            .threads
            .iter()
            .zip(0..)
            .filter(|(_, number)| !self.in_barrier.contains_key(&ThreadId(*number)));
        known
            .extend(elsewhere.filter_map(|(thread, number)| {
                Some(format!("{} waits {}", ThreadId(number), thread.waits?))
            }));
        if known.is_empty() { self.rank.to_string() } else { format!("{} ({})", self.rank, known.join("; ")) }
    }
}
