//! The operations of a simulated thread, byte by byte.

use std::sync::Arc;

use rampool_sharing::{
    Access, AtomicOp, BarrierId, BarrierKind, CondId, Diff, DirectOp, LockId, LockMode, OpResult, PageAccess,
    Rank, Spans, SyncOp, ThreadId,
};
use rampool_wire::elements::{Combine, Kind};
use rampool_wire::units::PageIndex;

use super::golden::{Failure, Golden};
use super::memory::Memory;

/// One operation. Positions are bytes in the shared space.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// Every byte becomes `value`.
    Write {
        at: usize,
        len: usize,
        value: u8,
    },
    /// Every byte is read (and checked) and becomes `5 * old + value`: the order of such operations matters.
    Mutate {
        at: usize,
        len: usize,
        value: u8,
    },
    /// Every byte is read (and checked) and grows by `value`: the order does not matter.
    Add {
        at: usize,
        len: usize,
        value: u8,
    },
    /// Every byte is read and checked.
    Read {
        at: usize,
        len: usize,
    },
    /// Every byte is read, and must be `value` or `or`, the same for all of them.
    Expect {
        at: usize,
        len: usize,
        value: u8,
        or: u8,
    },
    /// As `Read`, without a check: for racy programs under relaxed protocols.
    Look {
        at: usize,
        len: usize,
    },
    /// Like `Read` or `Write`, a page's part of it in one step: for large programs whose bytes need no
    /// interleaving.
    Block {
        at: usize,
        len: usize,
        write: Option<u8>,
    },
    /// Works for that long without touching shared memory.
    Compute {
        ticks: u64,
    },
    Lock {
        lock: LockId,
        mode: LockMode,
    },
    /// Takes the lock, or skips that many operations.
    Try {
        lock: LockId,
        mode: LockMode,
        skip: usize,
    },
    Unlock {
        lock: LockId,
    },
    Barrier {
        barrier: BarrierId,
        kind: BarrierKind,
    },
    /// Waits (holding the lock) until the byte at `at` is at least `least`.
    Await {
        cond: CondId,
        lock: LockId,
        at: usize,
        least: u8,
    },
    Signal {
        cond: CondId,
        lock: LockId,
        all: bool,
    },
    /// Skips that many operations unless the byte is at least `least`.
    Unless {
        at: usize,
        least: u8,
        skip: usize,
    },
    Skip {
        skip: usize,
    },
    Fence,
    Atomic {
        at: usize,
        width: u8,
        op: AtomicOp,
    },
    /// Reads, or sets to `value`, every byte by a direct operation.
    DirectGet {
        at: usize,
        len: usize,
    },
    DirectPut {
        at: usize,
        len: usize,
        value: u8,
    },
    /// Adds to whole words of 4 bytes: the order does not matter.
    DirectAdd {
        at: usize,
        len: usize,
        value: u32,
    },
    /// Adds to a word of 4 bytes, or changes it if it is `expect`; its value before is checked.
    DirectFetch {
        at: usize,
        value: u32,
        expect: Option<u32>,
    },
    /// Adds to a word of 4 bytes that others add to as well: what it was before is not checked.
    DirectSum {
        at: usize,
        value: u32,
    },
    SetLockManager {
        lock: LockId,
        manager: Rank,
    },
    /// Frees a page. No thread uses it before the next barrier, nor earlier in this epoch.
    Free {
        page: PageIndex,
    },
    SetHome {
        page: PageIndex,
        home: Rank,
    },
    /// The next operation must fail with a mistake of the program.
    Mistake {
        op: SyncOp,
    },
}

/// A thread's operations.
pub type Script = Arc<[Op]>;

/// A thread.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Thread {
    pub id: ThreadId,
    script: Script,
    at: usize,
    /// Bytes of the current operation that are done, or its stage.
    progress: usize,
    pub state: State,
    /// Values that `Look` saw, in order.
    pub seen: Vec<u8>,
    /// Tries that found the lock held.
    pub refused: usize,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum State {
    Ready,
    /// Waits for a page.
    Faulting {
        page: PageIndex,
        write: bool,
    },
    /// Waits for the end of an operation.
    Waiting,
    Finished,
    /// The run ended during it.
    Stopped(rampool_sharing::OpError),
}

/// The result of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// It continues.
    Did,
    /// It continues after this many ticks.
    Computes(u64),
    Frees(PageIndex),
    Fault {
        page: PageIndex,
        write: bool,
    },
    Sync(SyncOp),
    Direct(DirectOp),
    Finished,
}

impl Thread {
    #[must_use]
    pub fn new(id: ThreadId, script: Script) -> Self {
        let state = if script.is_empty() { State::Finished } else { State::Ready };
        Self { id, script, at: 0, progress: 0, state, seen: Vec::new(), refused: 0 }
    }

    /// The operation it is at.
    #[must_use]
    pub fn position(&self) -> usize {
        self.at
    }

    /// The byte that the next step touches, if it touches one.
    #[must_use]
    pub fn next_access(&self) -> Option<(usize, bool)> {
        let write_after_read = |at: usize, progress: usize| (at + progress / 2, progress % 2 == 1);
        match *self.script.get(self.at)? {
            Op::Write { at, .. } => Some((at + self.progress, true)),
            Op::Mutate { at, .. } | Op::Add { at, .. } => Some(write_after_read(at, self.progress)),
            Op::Read { at, .. } | Op::Look { at, .. } | Op::Expect { at, .. } => {
                Some((at + self.progress, false))
            }
            Op::Block { at, write, .. } => Some((at + self.progress, write.is_some())),
            Op::Await { at, .. } | Op::Unless { at, .. } if self.progress == 0 => Some((at, false)),
            Op::Atomic { at, op, .. } if self.progress == 1 => Some((at, op != AtomicOp::Load)),
            _ => None,
        }
    }

    /// The lent lock that the next step takes, or gives back.
    fn next_lent(&self, memory: &Memory) -> Option<LockId> {
        let (lock, takes) = match *self.script.get(self.at)? {
            Op::Lock { lock, mode: LockMode::Exclusive } => (lock, true),
            Op::Unlock { lock } => (lock, false),
            Op::Atomic { at, .. } if self.progress != 1 => (word_lock(memory, at), self.progress == 0),
            _ => return None,
        };
        memory.is_lent(lock, (!takes).then_some(self.id)).then_some(lock)
    }

    /// Whether its next step needs no engine right now.
    #[must_use]
    pub fn can_go_on(&self, memory: &Memory) -> bool {
        matches!(self.state, State::Ready | State::Faulting { .. })
            && match self.next_access() {
                Some((at, write)) => memory.allows(memory.locate(at).0, write),
                None => self.next_lent(memory).is_some(),
            }
    }

    fn advance(&mut self, by: usize) {
        self.at += by;
        self.progress = 0;
        if self.at >= self.script.len() {
            self.state = State::Finished;
        }
    }

    /// One byte access, or the beginning of one operation.
    ///
    /// # Errors
    /// If a load returns a wrong value.
    pub fn step(
        &mut self,
        rank: Rank,
        threads: u16,
        memory: &mut Memory,
        golden: &mut Golden,
    ) -> Result<Step, Failure> {
        let Some(&op) = self.script.get(self.at) else { return Ok(Step::Finished) };
        if let Some((at, write)) = self.next_access() {
            let (page, offset) = memory.locate(at);
            if !memory.allows(page, write) {
                self.state = State::Faulting { page, write };
                return Ok(Step::Fault { page, write });
            }
            self.state = State::Ready;
            if let Op::Block { len, write, .. } = op {
                self.block(rank, (at, page, offset), len, write, memory, golden)?;
            } else if let Op::Atomic { .. } = op {
                self.change(rank, (at, page, offset), memory, golden)?;
                self.progress = 2;
            } else {
                self.access(rank, op, (at, page, offset), memory, golden)?;
            }
            return Ok(Step::Did);
        }
        if let Some(accesses) = direct(op, memory) {
            self.state = State::Waiting;
            return Ok(Step::Direct(accesses));
        }
        if let Some(lock) = self.next_lent(memory) {
            self.use_lent(lock, op, memory);
            return Ok(Step::Did);
        }
        let id = self.id;
        let sync = match op {
            Op::Lock { lock, mode } => SyncOp::Lock { lock, mode, wait: true },
            Op::Try { lock, mode, .. } => SyncOp::Lock { lock, mode, wait: false },
            Op::Unlock { lock } => SyncOp::Unlock { lock },
            Op::Barrier { barrier, kind } => SyncOp::Barrier { barrier, kind, threads },
            Op::Await { cond, lock, .. } => SyncOp::Wait { cond, lock },
            Op::Signal { cond, lock, all } => SyncOp::Signal { cond, lock, all },
            Op::Fence => SyncOp::Fence,
            Op::Atomic { at, .. } if self.progress == 2 => SyncOp::Unlock { lock: word_lock(memory, at) },
            Op::Atomic { at, width, op } => {
                let (page, offset) = memory.locate(at);
                SyncOp::Atomic { page, offset: u32::try_from(offset).expect("small"), width, op }
            }
            Op::SetLockManager { lock, manager } => SyncOp::SetLockManager { lock, manager },
            Op::SetHome { page, home } => SyncOp::SetHome { page, home },
            Op::Free { page } => {
                self.advance(1);
                return Ok(Step::Frees(page));
            }
            Op::Mistake { op } => op,
            Op::Compute { ticks } => {
                self.advance(1);
                return Ok(Step::Computes(ticks));
            }
            Op::Skip { skip } => {
                self.advance(1 + skip);
                return Ok(Step::Did);
            }
            _ => unreachable!("{id} accesses memory"),
        };
        self.state = State::Waiting;
        Ok(Step::Sync(sync))
    }

    /// Takes a lent lock, or gives it back.
    fn use_lent(&mut self, lock: LockId, op: Op, memory: &mut Memory) {
        let took = memory.take_lent(lock, self.id);
        assert!(took || memory.give_lent(lock, self.id), "{} may", self.id);
        if took && matches!(op, Op::Atomic { .. }) {
            self.progress = 1;
        } else {
            self.advance(1);
        }
    }

    /// An atomic operation on a word whose lock is lent.
    fn change(
        &self,
        rank: Rank,
        (at, page, offset): (usize, PageIndex, usize),
        memory: &mut Memory,
        golden: &mut Golden,
    ) -> Result<(), Failure> {
        let Op::Atomic { width, op, .. } = self.script[self.at] else { unreachable!("it is one") };
        let width = usize::from(width);
        let byte = |at: usize| u64::from(memory.byte(page, offset + at));
        let got = (0..width).rev().fold(0, |word, at| word << 8 | byte(at));
        let want = golden.word(at, width);
        if got != want {
            return Err(Failure::WrongValue { rank, thread: self.id, op: self.at, at, got, want });
        }
        if op != AtomicOp::Load {
            for (byte, value) in op.apply(got).to_le_bytes().into_iter().enumerate().take(width) {
                memory.set_byte(page, offset + byte, value);
            }
            golden.set_word(at, width, op.apply(want));
        }
        Ok(())
    }

    /// The rest of a block, up to the end of its page.
    fn block(
        &mut self,
        rank: Rank,
        (at, page, offset): (usize, PageIndex, usize),
        len: usize,
        write: Option<u8>,
        memory: &mut Memory,
        golden: &mut Golden,
    ) -> Result<(), Failure> {
        let count = (len - self.progress).min(memory.page_bytes() - offset);
        match write {
            Some(value) => {
                memory.fill_range(page, offset, count, value);
                golden.fill_range(at, count, value);
            }
            None => {
                let mut got = vec![0; memory.page_bytes()];
                memory.read_into(page, &mut got);
                let (got, want) = (&got[offset..offset + count], golden.range(at, count));
                if let Some(index) = (0..count).find(|&index| got[index] != want[index]) {
                    let (got, want) = (u64::from(got[index]), u64::from(want[index]));
                    return Err(Failure::WrongValue {
                        rank,
                        thread: self.id,
                        op: self.at,
                        at: at + index,
                        got,
                        want,
                    });
                }
            }
        }
        self.progress += count;
        if self.progress == len {
            self.advance(1);
        }
        Ok(())
    }

    fn access(
        &mut self,
        rank: Rank,
        op: Op,
        (at, page, offset): (usize, PageIndex, usize),
        memory: &mut Memory,
        golden: &mut Golden,
    ) -> Result<(), Failure> {
        let value = memory.byte(page, offset);
        let wrong = |want: u8| Failure::WrongValue {
            rank,
            thread: self.id,
            op: self.at,
            at,
            got: u64::from(value),
            want: u64::from(want),
        };
        let reads = !matches!(op, Op::Write { .. } | Op::Look { .. } | Op::Expect { .. });
        if reads && value != golden.load(at) {
            return Err(wrong(golden.load(at)));
        }
        let mut store = |byte: u8| {
            memory.set_byte(page, offset, byte);
            golden.store(at, byte);
        };
        self.progress += 1;
        let len = match op {
            Op::Write { len, value, .. } => {
                store(value);
                len
            }
            Op::Mutate { len, value: by, .. } => {
                if self.progress.is_multiple_of(2) {
                    store(value.wrapping_mul(5).wrapping_add(by));
                }
                2 * len
            }
            Op::Add { len, value: by, .. } => {
                if self.progress.is_multiple_of(2) {
                    store(value.wrapping_add(by));
                }
                2 * len
            }
            Op::Read { len, .. } => len,
            Op::Look { len, .. } => {
                self.seen.push(value);
                len
            }
            Op::Expect { len, value: one, or, .. } => {
                if self.progress > 1 {
                    let first = *self.seen.last().expect("seen before");
                    if value != first {
                        return Err(wrong(first));
                    }
                } else if value != one && value != or {
                    return Err(wrong(one));
                } else {
                    self.seen.push(value);
                }
                len
            }
            Op::Await { least, .. } => {
                if value >= least {
                    self.advance(1);
                }
                return Ok(());
            }
            Op::Unless { least, skip, .. } => {
                self.advance(if value >= least { 1 } else { 1 + skip });
                return Ok(());
            }
            _ => unreachable!("it accesses no memory"),
        };
        if self.progress == len {
            self.advance(1);
        }
        Ok(())
    }

    /// The awaited page may be there.
    pub fn retry(&mut self, page: PageIndex) -> bool {
        if matches!(self.state, State::Faulting { page: waits, .. } if waits == page) {
            self.state = State::Ready;
            return true;
        }
        false
    }

    /// Its operation ended.
    ///
    /// # Errors
    /// If it did not end as the program expects.
    pub fn done(&mut self, rank: Rank, result: &OpResult, golden: &mut Golden) -> Result<(), Failure> {
        assert_eq!(self.state, State::Waiting, "{} is woken but does not wait", self.id);
        if let OpResult::Failed(error @ rampool_sharing::OpError::Stopped(_)) = result {
            self.state = State::Stopped(error.clone());
            return Ok(());
        }
        let op = self.script[self.at];
        let failure = |what: String| Failure::WrongResult { rank, thread: self.id, op: self.at, what };
        let (thread, number) = (self.id, self.at);
        let wrong = |at, got, want| Failure::WrongValue { rank, thread, op: number, at, got, want };
        self.state = State::Ready;
        match (op, result) {
            (Op::Try { skip, .. }, OpResult::Busy) => {
                self.refused += 1;
                self.advance(1 + skip);
            }
            (Op::Atomic { at, width, op }, OpResult::Value(before)) => {
                let want = golden.word(at, usize::from(width));
                if *before != want {
                    return Err(wrong(at, *before, want));
                }
                golden.set_word(at, usize::from(width), op.apply(want));
                self.advance(1);
            }
            (Op::DirectGet { at, len }, OpResult::Bytes(bytes)) => {
                let want = golden.range(at, len);
                if let Some(index) = (0..len).find(|&index| bytes[index] != want[index]) {
                    let (got, want) = (u64::from(bytes[index]), u64::from(want[index]));
                    return Err(wrong(at + index, got, want));
                }
                self.advance(1);
            }
            (Op::DirectPut { at, len, value }, OpResult::Bytes(_)) => {
                golden.fill_range(at, len, value);
                self.advance(1);
            }
            (Op::DirectAdd { at, len, value }, OpResult::Bytes(_)) => {
                for at in (at..at + len).step_by(4) {
                    golden.set_word(at, 4, golden.word(at, 4).wrapping_add(u64::from(value)));
                }
                self.advance(1);
            }
            (Op::DirectSum { at, value }, OpResult::Bytes(_)) => {
                golden.set_word(at, 4, golden.word(at, 4).wrapping_add(u64::from(value)));
                self.advance(1);
            }
            (Op::DirectFetch { at, value, expect }, OpResult::Bytes(bytes)) => {
                let got = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
                let want = golden.word(at, 4);
                if got != want {
                    return Err(wrong(at, got, want));
                }
                match expect {
                    None => golden.set_word(at, 4, want.wrapping_add(u64::from(value))),
                    Some(expect) if u64::from(expect) == want => golden.set_word(at, 4, u64::from(value)),
                    Some(_) => {}
                }
                self.advance(1);
            }
            // The lock is held again: check once more.
            (Op::Await { .. }, OpResult::Ok) => self.progress = 0,
            (Op::Mistake { .. }, OpResult::Failed(_)) => self.advance(1),
            (Op::Atomic { .. }, OpResult::Ok) if self.progress == 2 => self.advance(1),
            (Op::Mistake { .. } | Op::Atomic { .. }, _) => return Err(failure(format!("{result:?}"))),
            (_, OpResult::Ok) => self.advance(1),
            _ => return Err(failure(format!("{result:?}"))),
        }
        Ok(())
    }
}

fn word_lock(memory: &Memory, at: usize) -> LockId {
    let (page, offset) = memory.locate(at);
    rampool_sharing::config::word_lock(page, u32::try_from(offset).expect("small"))
}

/// The direct operation of `op`, cut by pages.
fn direct(op: Op, memory: &Memory) -> Option<DirectOp> {
    let (at, len) = match op {
        Op::DirectGet { at, len } | Op::DirectPut { at, len, .. } | Op::DirectAdd { at, len, .. } => {
            (at, len)
        }
        Op::DirectFetch { at, .. } | Op::DirectSum { at, .. } => (at, 4),
        _ => return None,
    };
    let mut accesses = Vec::new();
    let mut done = 0;
    while done < len {
        let (page, offset) = memory.locate(at + done);
        let count = (len - done).min(memory.page_bytes() - offset);
        let small = |number: usize| u32::try_from(number).expect("small");
        let mut spans = Spans::default();
        assert!(spans.push(small(offset), small(count)), "one run");
        let access = match op {
            Op::DirectGet { .. } => Access::Get { spans },
            Op::DirectPut { value, .. } => {
                let mut diff = Diff::default();
                diff.push(offset, &vec![value; count]);
                Access::Put { diff }
            }
            Op::DirectAdd { value, .. } => {
                let operands = value.to_le_bytes().repeat(count / 4).into();
                Access::Update { spans, kind: Kind::U32, how: Combine::Sum, operands }
            }
            Op::DirectFetch { value, expect: None, .. } | Op::DirectSum { value, .. } => Access::Fetch {
                offset: small(offset),
                kind: Kind::U32,
                how: Combine::Sum,
                operand: u64::from(value),
            },
            Op::DirectFetch { value, expect: Some(expect), .. } => Access::Swap {
                offset: small(offset),
                kind: Kind::U32,
                expect: u64::from(expect),
                new: u64::from(value),
            },
            _ => return None,
        };
        accesses.push(PageAccess { page, access });
        done += count;
    }
    Some(accesses.into())
}
