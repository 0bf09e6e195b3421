//! Programs from a seed: free of data races, and (where asked) legal under entry consistency.
//!
//! Memory is cut into objects of odd sizes that share pages. In each epoch an object is guarded by a lock,
//! belongs to one thread, or is read only; guards change at barriers. Under the release-consistent protocols
//! an object may also be handed from thread to thread by a message in a mailbox that a lock guards, without
//! ever being touched under that lock.

use std::sync::Arc;

use rampool_sharing::{
    AtomicOp, BarrierId, BarrierKind, CondId, Homes, LockId, LockMode, LockPath, Managers, ProtocolKind,
    Rank, Tuning,
};
use rampool_wire::units::PageIndex;

use super::program::{Op, Script};
use super::world::Setup;
use crate::rng::Rng;

/// The kind of program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    pub ranks: (u64, u64),
    pub threads: (u64, u64),
    pub pages: (u64, u64),
    pub epochs: (u64, u64),
    /// Actions of a thread in an epoch.
    pub actions: (u64, u64),
    pub locks: u64,
    /// Objects may move between threads without being touched under the lock.
    pub hand_over: bool,
    /// Only operations whose order does not matter: the final memory is the sequential one.
    pub commutative: bool,
    /// This many actions in a hundred are direct operations.
    pub direct: u64,
}

impl Shape {
    /// A small world with much sharing.
    #[must_use]
    pub fn small(protocol: ProtocolKind) -> Self {
        Self {
            ranks: (2, 4),
            threads: (1, 3),
            pages: (2, 5),
            epochs: (2, 4),
            actions: (2, 7),
            locks: 4,
            hand_over: protocol != ProtocolKind::Ibec,
            commutative: false,
            direct: 0,
        }
    }

    /// Few pages, several threads a rank.
    #[must_use]
    pub fn crowded(protocol: ProtocolKind) -> Self {
        Self {
            ranks: (3, 4),
            threads: (2, 3),
            pages: (1, 3),
            locks: 3,
            actions: (4, 9),
            ..Self::small(protocol)
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Guard {
    Lock(u64),
    Thread(usize),
    Unguarded,
    /// Moves during the epoch, from one thread to another.
    Handed(usize, usize),
    /// A word for atomic operations.
    Word,
    /// Belongs to a thread, which only uses it directly.
    Direct(usize),
    /// Words that all threads add to, directly.
    Sum,
}

#[derive(Clone, Copy, Debug)]
struct Object {
    at: usize,
    len: usize,
    guard: Guard,
}

/// The lock that guards mailboxes and event counts.
const MAIL_LOCK: LockId = LockId(100);
const MAIL_COND: CondId = CondId(7);

/// A world with a legal program.
#[must_use]
pub fn generate(seed: u64, protocol: ProtocolKind, shape: &Shape) -> Setup {
    Generator::new(seed, shape).generate(protocol)
}

struct Generator<'a> {
    random: Rng,
    shape: &'a Shape,
    seed: u64,
    ranks: usize,
    threads: usize,
    objects: Vec<Object>,
    /// Bytes of mailboxes (guarded by `MAIL_LOCK` in every epoch), each with its value.
    mailboxes: Vec<(usize, u8)>,
    scripts: Vec<Vec<Op>>,
}

impl<'a> Generator<'a> {
    fn new(seed: u64, shape: &'a Shape) -> Self {
        let mut random = Rng::new(seed);
        let ranks = random.between(shape.ranks.0, shape.ranks.1);
        let threads = random.between(shape.threads.0, shape.threads.1);
        let (ranks, threads) = (usize::try_from(ranks).expect("few"), usize::try_from(threads).expect("few"));
        Self {
            random,
            shape,
            seed,
            ranks,
            threads,
            objects: Vec::new(),
            mailboxes: Vec::new(),
            scripts: vec![Vec::new(); ranks * threads],
        }
    }

    fn generate(mut self, protocol: ProtocolKind) -> Setup {
        let page_bytes = 8 << self.random.below(4);
        let pages = self.random.between(self.shape.pages.0, self.shape.pages.1);
        self.cut(usize::try_from(pages * page_bytes).expect("small"));
        let epochs = self.random.between(self.shape.epochs.0, self.shape.epochs.1);
        for epoch in 0..epochs {
            self.epoch(epoch, pages);
        }
        let all: Vec<(usize, usize)> = self.objects.iter().map(|object| (object.at, object.len)).collect();
        for script in &mut self.scripts {
            script.extend(all.iter().map(|&(at, len)| Op::Read { at, len }));
        }
        let mut scripts: Vec<Vec<Script>> = Vec::new();
        let mut rest = self.scripts.into_iter().map(Arc::from);
        for _ in 0..self.ranks {
            scripts.push(rest.by_ref().take(self.threads).collect());
        }
        let random = &mut self.random;
        let pages = u32::try_from(pages).expect("few");
        let page_bytes = u32::try_from(page_bytes).expect("small");
        let mut setup = Setup::new(self.seed, protocol, pages, page_bytes, scripts);
        let last = Rank(u16::try_from(random.index(self.ranks)).expect("few"));
        setup.homes = match random.below(4) {
            0 => Homes::Cyclic,
            1 => Homes::Blocked,
            2 => Homes::BlockedFrom(last),
            _ => Homes::At(last),
        };
        setup.managers = if random.percent(70) { Managers::Cyclic } else { Managers::At(last) };
        setup.lock_path = match random.below(5) {
            0 => Some(LockPath::Forward),
            1 => Some(LockPath::Central),
            2 => Some(LockPath::Either),
            _ => None,
        };
        setup.tuning = Tuning {
            local_handovers: [1, 2, 16][random.index(3)],
            hold_us: [0, 0, 100][random.index(3)],
            hot_after: [0, 1, 3, 255][random.index(4)],
            ahead_bytes: [0, 64, 1 << 20][random.index(3)],
            cool_after: [1, 2, 8][random.index(3)],
            collect_bytes: [0, 40, 1 << 20][random.index(3)],
            barrier_arity: 2,
            flat_barrier: [0, 16][random.index(2)],
            keep_uses: 1 + u32::try_from(self.seed % 3).expect("small"),
            keep_us: [0, 20, 200][usize::try_from(self.seed / 3 % 3).expect("small")],
        };
        setup.unmap = [0, 0, 20][random.index(3)];
        setup.slow_phases = random.percent(80);
        setup.pauses = if random.percent(25) { 15 } else { 0 };
        if pages > 1 && random.percent(50) {
            // Neighbours: a run of pages may cross from one region into the next.
            let first = u32::try_from(random.between(1, u64::from(pages) - 1)).expect("few");
            setup.regions = vec![(first, protocol), (pages - first, protocol)];
        }
        setup
    }

    /// Cuts memory into objects; the first bytes are mailboxes.
    fn cut(&mut self, len: usize) {
        let mut at = 0;
        for _ in 0..3.min(len / 4) {
            self.mailboxes.push((at, 0));
            at += 1;
        }
        while at < len {
            let size = match self.random.below(4) {
                0 => 1,
                1 => self.random.between(2, 4),
                2 => self.random.between(3, 12),
                _ => self.random.between(8, 40),
            };
            let size = usize::try_from(size).expect("small").min(len - at);
            self.objects.push(Object { at, len: size, guard: Guard::Unguarded });
            at += size;
        }
    }

    fn epoch(&mut self, epoch: u64, pages: u64) {
        let all = self.scripts.len();
        for index in 0..self.objects.len() {
            let word = self.objects[index].at.is_multiple_of(4) && self.objects[index].len >= 4;
            self.objects[index].guard = match self.random.below(if self.shape.hand_over { 10 } else { 8 }) {
                0..=3 => Guard::Lock(self.random.below(self.shape.locks)),
                4..=5 => Guard::Thread(self.random.index(all)),
                6 => Guard::Unguarded,
                7 if word && self.random.percent(40) => Guard::Word,
                7 => Guard::Thread(self.random.index(all)),
                _ => Guard::Handed(self.random.index(all), self.random.index(all)),
            };
            if self.shape.direct > 0 && self.random.percent(40) {
                self.objects[index].guard = match self.random.below(3) {
                    0 if word => Guard::Sum,
                    1 if word => Guard::Word,
                    _ => Guard::Direct(self.random.index(all)),
                };
            }
        }
        let mut parts: Vec<Vec<Op>> = vec![Vec::new(); all];
        for (thread, part) in parts.iter_mut().enumerate() {
            let actions = self.random.between(self.shape.actions.0, self.shape.actions.1);
            for _ in 0..actions {
                let ops = self.action(thread, epoch, pages);
                part.extend(ops);
            }
        }
        self.mail(&mut parts);
        let kind = if self.random.percent(35) { BarrierKind::KeepReadWrite } else { BarrierKind::Normal };
        let barrier = BarrierId(u32::try_from(epoch).expect("few"));
        for (script, part) in self.scripts.iter_mut().zip(parts) {
            script.extend(part);
            script.push(Op::Barrier { barrier, kind });
        }
    }

    fn action(&mut self, thread: usize, epoch: u64, pages: u64) -> Vec<Op> {
        if self.shape.direct > 0 && self.random.percent(self.shape.direct) {
            return self.direct(thread);
        }
        match self.random.below(20) {
            0..=8 => self.section(),
            9 => self.readers(),
            10 => self.try_section(),
            11..=15 => self.own(thread),
            16 => self.read_only(),
            17 => self.words(),
            18 => vec![Op::Fence],
            _ if epoch > 0 || self.random.percent(30) => self.moves(pages),
            _ => self.section(),
        }
    }

    /// One to three nested locks, in ascending order, with accesses to their objects.
    fn section(&mut self) -> Vec<Op> {
        let mut locks: Vec<u64> = (0..self.shape.locks).filter(|_| self.random.percent(40)).collect();
        locks.truncate(3);
        if locks.is_empty() {
            locks.push(self.random.below(self.shape.locks));
        }
        let mut ops = Vec::new();
        for (depth, &lock) in locks.iter().enumerate() {
            ops.push(Op::Lock { lock: LockId(lock), mode: LockMode::Exclusive });
            ops.extend(self.touch(&locks[..=depth], false));
        }
        while let Some(lock) = locks.pop() {
            ops.push(Op::Unlock { lock: LockId(lock) });
            if !locks.is_empty() && self.random.percent(50) {
                ops.extend(self.touch(&locks, false));
            }
        }
        ops
    }

    fn readers(&mut self) -> Vec<Op> {
        let lock = self.random.below(self.shape.locks);
        let mut ops = vec![Op::Lock { lock: LockId(lock), mode: LockMode::Shared }];
        ops.extend(self.touch(&[lock], true));
        ops.push(Op::Unlock { lock: LockId(lock) });
        ops
    }

    fn try_section(&mut self) -> Vec<Op> {
        let lock = self.random.below(self.shape.locks);
        let read = self.random.percent(30);
        let body = self.touch(&[lock], read);
        let mode = if read { LockMode::Shared } else { LockMode::Exclusive };
        let mut ops = vec![Op::Try { lock: LockId(lock), mode, skip: body.len() + 1 }];
        ops.extend(body);
        ops.push(Op::Unlock { lock: LockId(lock) });
        ops
    }

    /// Accesses to objects that one of `locks` guards.
    fn touch(&mut self, locks: &[u64], read: bool) -> Vec<Op> {
        let guarded: Vec<Object> = self
            .objects
            .iter()
            .copied()
            .filter(|object| matches!(object.guard, Guard::Lock(lock) if locks.contains(&lock)))
            .collect();
        self.accesses(&guarded, 3, read)
    }

    fn own(&mut self, thread: usize) -> Vec<Op> {
        let own: Vec<Object> =
            self.objects.iter().copied().filter(|object| object.guard == Guard::Thread(thread)).collect();
        self.accesses(&own, 3, false)
    }

    fn read_only(&mut self) -> Vec<Op> {
        let free: Vec<Object> =
            self.objects.iter().copied().filter(|object| object.guard == Guard::Unguarded).collect();
        self.accesses(&free, 3, true)
    }

    /// Direct operations: on objects that are only used directly, and on words.
    fn direct(&mut self, thread: usize) -> Vec<Op> {
        let of_it = |object: &Object| {
            matches!(object.guard, Guard::Sum | Guard::Word) || object.guard == Guard::Direct(thread)
        };
        let objects: Vec<Object> = self.objects.iter().copied().filter(of_it).collect();
        if objects.is_empty() {
            return self.own(thread);
        }
        let mut ops = Vec::new();
        for _ in 0..self.random.between(1, 4) {
            let Object { at, len, guard } = objects[self.random.index(objects.len())];
            let value = if self.random.percent(30) { 0 } else { self.random.byte() };
            ops.push(match guard {
                Guard::Sum => {
                    Op::DirectAdd { at, len: len / 4 * 4, value: u32::from(value).wrapping_mul(0x0101_0203) }
                }
                Guard::Word if self.random.percent(30) => {
                    Op::Atomic { at, width: 4, op: AtomicOp::Add(u64::from(value)) }
                }
                Guard::Word => Op::DirectFetch {
                    at,
                    value: u32::from(value),
                    expect: self.random.percent(40).then_some(0),
                },
                _ if self.random.percent(50) => Op::DirectGet { at, len },
                _ => Op::DirectPut { at, len, value },
            });
        }
        ops
    }

    fn words(&mut self) -> Vec<Op> {
        let words: Vec<Object> =
            self.objects.iter().copied().filter(|object| object.guard == Guard::Word).collect();
        if words.is_empty() {
            return Vec::new();
        }
        let at = words[self.random.index(words.len())].at;
        let value = self.random.next_u64();
        let op = match self.random.below(5) {
            _ if self.shape.commutative => AtomicOp::Add(value),
            0 => AtomicOp::Load,
            1 => AtomicOp::Store(value),
            2 => AtomicOp::CompareExchange { expect: 0, new: value },
            3 => AtomicOp::Xor(value),
            _ => AtomicOp::Add(value),
        };
        vec![Op::Atomic { at, width: 4, op }]
    }

    fn moves(&mut self, pages: u64) -> Vec<Op> {
        let to = Rank(u16::try_from(self.random.index(self.ranks)).expect("few"));
        if self.random.percent(50) {
            vec![Op::SetHome { page: PageIndex(self.random.below(pages)), home: to }]
        } else {
            let lock = LockId(self.random.below(self.shape.locks));
            vec![Op::SetLockManager {
                lock: if self.random.percent(20) { MAIL_LOCK } else { lock },
                manager: to,
            }]
        }
    }

    fn accesses(&mut self, objects: &[Object], most: u64, read: bool) -> Vec<Op> {
        if objects.is_empty() {
            return Vec::new();
        }
        let count = self.random.between(1, most);
        let mut ops = Vec::new();
        for _ in 0..count {
            let object = objects[self.random.index(objects.len())];
            ops.push(self.access(object, read));
        }
        ops
    }

    fn access(&mut self, Object { at, len, guard }: Object, read: bool) -> Op {
        let start = self.random.index(len);
        let (at, len) = if self.random.percent(50) { (at, len) } else { (at + start, len - start) };
        // Few values: writes of the present value, and values that come back, happen.
        let value = if self.random.percent(60) {
            u8::try_from(self.random.below(3)).expect("small")
        } else {
            self.random.byte()
        };
        // Under entry consistency objects outside of locks move at barriers, whether they are used directly
        // or not.
        let directly = self.shape.direct > 0
            && (self.shape.hand_over || guard == Guard::Unguarded)
            && self.random.percent(40);
        match self.random.below(4) {
            _ if directly && read => Op::DirectGet { at, len },
            0 if directly => Op::DirectGet { at, len },
            _ if directly => Op::DirectPut { at, len, value },
            _ if read => Op::Read { at, len },
            0 => Op::Read { at, len },
            _ if self.shape.commutative => Op::Add { at, len, value },
            1 => Op::Write { at, len, value },
            _ => Op::Mutate { at, len, value },
        }
    }

    /// Mailboxes: one thread writes, counts up and signals; another waits for the count and continues with
    /// the object handed over.
    fn mail(&mut self, parts: &mut [Vec<Op>]) {
        // A thread waits only after all its sends, so no thread waits for one that waits.
        let mut tails: Vec<Vec<Op>> = vec![Vec::new(); parts.len()];
        let mut used: Vec<(usize, usize)> = Vec::new();
        for index in 0..self.mailboxes.len() {
            let (box_at, count) = self.mailboxes[index];
            let from = self.random.index(parts.len());
            let to = self.random.index(parts.len());
            let again = used.contains(&(from, to));
            if from == to || again || count > 200 || self.random.percent(30) {
                continue;
            }
            used.push((from, to));
            self.mailboxes[index].1 += 1;
            let handed: Vec<Object> = self
                .objects
                .iter()
                .copied()
                .filter(|object| object.guard == Guard::Handed(from, to))
                .collect();
            let before = self.accesses(&handed, 2, false);
            let at = self.random.index(parts[from].len() + 1);
            let at = boundary(&parts[from], at);
            let mut send = before;
            send.push(Op::Lock { lock: MAIL_LOCK, mode: LockMode::Exclusive });
            send.push(Op::Add { at: box_at, len: 1, value: 1 });
            let outside = self.random.percent(30);
            if !outside {
                send.push(Op::Signal { cond: MAIL_COND, lock: MAIL_LOCK, all: true });
            }
            send.push(Op::Unlock { lock: MAIL_LOCK });
            if outside {
                send.push(Op::Signal { cond: MAIL_COND, lock: MAIL_LOCK, all: true });
            }
            // The sender no longer touches an object that it handed over.
            parts[from].splice(at..at, send);
            let polls = self.random.percent(30);
            let least = count + 1;
            let after = self.accesses(&handed, 3, false);
            if polls {
                tails[to].push(Op::Lock { lock: MAIL_LOCK, mode: LockMode::Exclusive });
                tails[to].push(Op::Unless { at: box_at, least, skip: 2 + after.len() });
                tails[to].push(Op::Unlock { lock: MAIL_LOCK });
                tails[to].extend(&after);
                tails[to].push(Op::Skip { skip: 1 });
                tails[to].push(Op::Unlock { lock: MAIL_LOCK });
            } else {
                tails[to].push(Op::Lock { lock: MAIL_LOCK, mode: LockMode::Exclusive });
                tails[to].push(Op::Await { cond: MAIL_COND, lock: MAIL_LOCK, at: box_at, least });
                tails[to].push(Op::Unlock { lock: MAIL_LOCK });
                tails[to].extend(after);
            }
        }
        for (part, tail) in parts.iter_mut().zip(tails) {
            part.extend(tail);
        }
    }
}

/// The nearest place at or behind `at` where no lock is held and no jump crosses.
fn boundary(ops: &[Op], at: usize) -> usize {
    let mut held = 0_i32;
    let mut safe = Vec::from([0]);
    for (index, op) in ops.iter().enumerate() {
        match op {
            Op::Lock { .. } | Op::Try { .. } => held += 1,
            Op::Unlock { .. } => held -= 1,
            _ => {}
        }
        if held == 0 {
            safe.push(index + 1);
        }
    }
    safe.into_iter().find(|&place| place >= at).unwrap_or(ops.len())
}

/// Bytes of a page in [`many_ranks`].
pub const WIDE_PAGE: usize = 64;

/// Many ranks: each writes its own strip of pages, takes a few locks, reads its neighbour's border, and meets
/// all others at barriers.
///
/// # Panics
/// If there are fewer pages than ranks, or more than a world can have.
#[must_use]
pub fn many_ranks(protocol: ProtocolKind, ranks: usize, pages: usize, epochs: usize) -> Setup {
    let scripts = (0..ranks).map(|rank| vec![strip_script(rank, ranks, pages, epochs)]).collect();
    let count = u32::try_from(pages).expect("a number of pages");
    let mut setup = Setup::new(1, protocol, count, u32::try_from(WIDE_PAGE).expect("small"), scripts);
    setup.homes = Homes::Cyclic;
    setup.check = false;
    setup.siblings = 0;
    setup.slow_phases = false;
    setup.idle = 0;
    setup.most_events = u64::MAX;
    setup
}

fn strip_script(rank: usize, ranks: usize, pages: usize, epochs: usize) -> Script {
    let strip = pages / ranks;
    let (first, own) = (rank * strip, strip.min(16));
    let neighbour = (rank + 1) % ranks * strip;
    let locks = 64;
    // The last page of each strip belongs to a lock, one byte for each.
    let guarded = |lock: usize| (lock % ranks * strip + strip - 1) * WIDE_PAGE;
    let mut ops = Vec::new();
    for epoch in 0..epochs {
        let value = u8::try_from(epoch + 1).expect("few epochs");
        ops.extend((first..first + own).map(|page| Op::Write { at: page * WIDE_PAGE, len: 8, value }));
        for turn in 0..3 {
            let lock = (rank * 7 + turn * 11) % locks;
            ops.push(Op::Lock { lock: LockId(lock as u64), mode: LockMode::Exclusive });
            ops.push(Op::Add { at: guarded(lock), len: 1, value: 1 });
            ops.push(Op::Unlock { lock: LockId(lock as u64) });
        }
        let barrier = BarrierId(u32::try_from(epoch).expect("few epochs"));
        ops.push(Op::Barrier { barrier, kind: BarrierKind::Normal });
        ops.extend((neighbour..neighbour + 2).map(|page| Op::Read { at: page * WIDE_PAGE, len: 8 }));
        ops.push(Op::Barrier { barrier, kind: BarrierKind::Normal });
    }
    Arc::from(ops)
}
