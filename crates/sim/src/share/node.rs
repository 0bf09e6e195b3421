//! One rank: its engine, its memory, its threads.
//!
//! Threads do not stop while the engine works. So inside every memory operation of the engine siblings may
//! make accesses, as the protection *at that moment* allows. That finds twins made too late, memory that is
//! read twice, and copies taken away without protection.

use rampool_sharing::{Action, Diff, Engine, Event, LockId, Mem, Protection, Rank, Recalled, ThreadId};
use rampool_wire::units::{Extent, PageIndex};

use super::golden::{Failure, Golden};
use super::memory::Memory;
use super::program::{State, Step, Thread};
use crate::rng::Rng;

/// A rank.
#[derive(Clone, Hash, Debug)]
pub struct Node {
    pub engine: Engine,
    pub memory: Memory,
    pub threads: Vec<Thread>,
    /// How many of them meet at barriers.
    pub parties: u16,
}

/// How siblings behave inside of memory operations.
pub struct Siblings<'a> {
    pub random: &'a mut Rng,
    /// Chance, in percent, that they do something at one point.
    pub chance: u64,
}

impl Node {
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.engine.rank()
    }

    /// Hands the engine an event. Threads may run meanwhile.
    ///
    /// # Errors
    /// If one of them reads a wrong value.
    pub fn handle(
        &mut self,
        event: Event<'_>,
        golden: &mut Golden,
        siblings: Option<Siblings<'_>>,
        out: &mut Vec<Action>,
    ) -> Result<(), Failure> {
        let rank = self.engine.rank();
        self.memory.lend_next();
        let mut port = Port {
            rank,
            memory: &mut self.memory,
            threads: &mut self.threads,
            golden,
            siblings,
            failure: None,
        };
        self.engine.handle(event, &mut port, out);
        port.failure.map_or(Ok(()), Err)
    }

    /// One step of a thread.
    ///
    /// # Errors
    /// If a load returns a wrong value.
    pub fn step(&mut self, thread: usize, golden: &mut Golden) -> Result<Step, Failure> {
        self.memory.lend_next();
        self.threads[thread].step(self.engine.rank(), self.parties, &mut self.memory, golden)
    }

    #[must_use]
    pub fn thread(&mut self, id: ThreadId) -> &mut Thread {
        &mut self.threads[usize::from(id.0)]
    }

    /// Whether a thread could run.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.threads.iter().all(|thread| matches!(thread.state, State::Finished | State::Stopped(_)))
    }

    /// Compares the engine's protections with the MMU's.
    ///
    /// # Errors
    /// If they differ.
    pub fn check(&self) -> Result<(), Failure> {
        self.engine.check();
        if self.engine.failure().is_some() {
            return Ok(());
        }
        for (page, protection) in self.memory.pages() {
            let believed = self.engine.access(page);
            if believed != Some(protection) {
                let what = format!("{} of {}: engine {believed:?}, MMU {protection:?}", page, self.rank());
                return Err(Failure::BadProtection { what });
            }
        }
        Ok(())
    }
}

/// The memory as the engine gets it.
struct Port<'a> {
    rank: Rank,
    memory: &'a mut Memory,
    threads: &'a mut [Thread],
    golden: &'a mut Golden,
    siblings: Option<Siblings<'a>>,
    failure: Option<Failure>,
}

impl Port<'_> {
    /// Lets threads of this rank touch bytes, and take lent locks and give them back, as far as they can
    /// without the engine.
    fn run_siblings(&mut self) {
        let Some(siblings) = &mut self.siblings else { return };
        if self.failure.is_some() || !siblings.random.percent(siblings.chance) {
            return;
        }
        let accesses = siblings.random.between(1, 6);
        let count = u16::try_from(self.threads.len()).expect("few threads");
        for _ in 0..accesses {
            let index = siblings.random.index(self.threads.len());
            let thread = &mut self.threads[index];
            if !thread.can_go_on(self.memory) {
                continue;
            }
            let before = thread.state.clone();
            if let Err(failure) = thread.step(self.rank, count, self.memory, self.golden) {
                self.failure = Some(failure);
                return;
            }
            // A thread whose page has just been mapped may run before it is woken; the wake-up still comes.
            if thread.state == State::Ready {
                thread.state = before;
            }
        }
    }
}

impl Mem for Port<'_> {
    fn protect(&mut self, runs: &[Extent], to: Protection) {
        for run in runs {
            self.run_siblings();
            self.memory.protect(&[*run], to);
            self.run_siblings();
        }
    }

    fn reassert(&mut self, page: PageIndex) {
        self.memory.reassert(page);
    }

    fn snapshot(&mut self, page: PageIndex, into: &mut [u8]) {
        self.run_siblings();
        if self.siblings.is_some() && self.memory.protection(page) == Protection::ReadWrite {
            let piece = into.len().div_ceil(4);
            for start in (0..into.len()).step_by(piece) {
                for (offset, byte) in into.iter_mut().enumerate().skip(start).take(piece) {
                    *byte = self.memory.byte(page, offset);
                }
                self.run_siblings();
            }
        } else {
            self.memory.read_into(page, into);
        }
        self.run_siblings();
    }

    fn store(&mut self, page: PageIndex, diff: &Diff) {
        self.run_siblings();
        if self.siblings.is_some() && self.memory.protection(page) == Protection::ReadWrite {
            for (offset, bytes) in diff.iter() {
                for (index, &byte) in bytes.iter().enumerate() {
                    self.memory.set_byte(page, offset + index, byte);
                }
                self.run_siblings();
            }
        } else {
            self.memory.store(page, diff);
        }
        self.run_siblings();
    }

    fn install(&mut self, page: PageIndex, bytes: &[u8], to: Protection) {
        self.run_siblings();
        assert_eq!(self.memory.protection(page), Protection::None, "{page} is installed over a mapping");
        self.memory.fill(page, bytes);
        self.run_siblings();
        self.memory.protect(&[Extent::page(page)], to);
        self.run_siblings();
    }

    fn discard(&mut self, page: PageIndex) {
        self.memory.discard(page);
    }

    fn lend(&mut self, lock: LockId) -> bool {
        self.memory.lend(lock);
        self.run_siblings();
        true
    }

    fn lent_times(&self, lock: LockId) -> u32 {
        self.memory.lent_times(lock)
    }

    fn recall(&mut self, lock: LockId) -> Recalled {
        self.run_siblings();
        self.memory.recall(lock)
    }

    fn begin_release(&mut self) {
        self.run_siblings();
        self.memory.begin_release();
        self.run_siblings();
    }

    fn clear(&mut self, pages: Extent) {
        for page in pages.pages() {
            self.memory.clear(page);
        }
    }
}
