//! The programs that S4 (Barli, Watanabe, Sakai and Tanaka) and S5 (Midorikawa, Ohashi, Katano and Iizuka;
//! SMS) measured, reduced to their use of shared pages: which rank writes and reads which page, under which
//! lock, between which barriers, and how long a processor of their time works in between.
//!
//! The engines are the real ones, checked by golden memory as always; only computing is a number. A
//! processor's work in a microsecond ([`FLOPS_PER_US`]) is this project's estimate: the papers do not print
//! the sequential times.

use std::sync::Arc;

use rampool_sharing::{
    BarrierId, BarrierKind, Homes, LockId, LockMode, LockPath, Managers, ProtocolKind, Rank, Tuning,
};

use super::cost::Cost;
use super::program::{Op, Script};
use super::world::{Report, Setup, World};

/// Floating point operations in a microsecond on a workstation of 75 MHz.
const FLOPS_PER_US: usize = 10;
/// S4's page.
const PAGE: usize = 8192;
/// S5's page.
const SMS_PAGE: usize = 4096;

/// S4's four programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    /// Six-step FFT of 262144 points.
    Fft,
    /// Blocked LU of 1024 x 1024.
    Lu,
    /// Multigrid of 258 x 258.
    Ocean,
    /// 1331 molecules, each guarded by a lock.
    Water,
}

impl Program {
    pub const ALL: [Self; 4] = [Self::Fft, Self::Lu, Self::Ocean, Self::Water];

    /// Runs on this many ranks; returns the speed-up over one rank alone, which shares with no other.
    ///
    /// # Panics
    /// If a load returns a wrong value.
    #[must_use]
    pub fn speed_up(self, ranks: usize, variant: Variant) -> f64 {
        let report = World::new(self.setup(ranks, variant)).run().expect("a program without races");
        ratio(report.computed, report.ticks)
    }

    fn setup(self, ranks: usize, variant: Variant) -> Setup {
        let scripts: Vec<Vec<Op>> = (0..ranks)
            .map(|rank| match self {
                Self::Fft => fft(rank, ranks),
                Self::Lu => lu(rank, ranks),
                Self::Ocean => ocean(rank, ranks),
                Self::Water => water(rank, ranks),
            })
            .collect();
        let (protocol, automatic_update) = match variant {
            Variant::Plain(protocol) => (protocol, false),
            Variant::AutomaticUpdate => (ProtocolKind::Hlrc, true),
        };
        let mut setup = quiet(protocol, PAGE, scripts);
        setup.cost = Some(Cost { automatic_update, ..Cost::ethernet_1999() });
        setup
    }
}

/// S4's protocols: three that it ran, and AURC, which it derived from HLRC's run without twins, diffs and
/// their messages, as is done here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Variant {
    Plain(ProtocolKind),
    AutomaticUpdate,
}

impl Variant {
    pub const ALL: [Self; 4] = [
        Self::Plain(ProtocolKind::Sc),
        Self::Plain(ProtocolKind::Lrc),
        Self::Plain(ProtocolKind::Hlrc),
        Self::AutomaticUpdate,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(protocol) => protocol.name(),
            Self::AutomaticUpdate => "aurc",
        }
    }
}

fn ratio(one: u64, other: u64) -> f64 {
    let number = |count| f64::from(u32::try_from(count).expect("less than an hour"));
    number(one) / number(other)
}

/// A world without random events. Pages follow S4's rules: no page stays writable because it is hot.
fn quiet(protocol: ProtocolKind, page_bytes: usize, scripts: Vec<Vec<Op>>) -> Setup {
    let end = |op: &Op| match *op {
        Op::Block { at, len, .. } | Op::Mutate { at, len, .. } | Op::Add { at, len, .. } => at + len,
        _ => 0,
    };
    let bytes = scripts.iter().flatten().map(end).max().unwrap_or(0);
    let pages = u32::try_from(bytes.div_ceil(page_bytes)).expect("a number of pages");
    let page_bytes = u32::try_from(page_bytes).expect("a page");
    let scripts: Vec<Vec<Script>> = scripts.into_iter().map(|ops| vec![Arc::from(ops)]).collect();
    let mut setup = Setup::new(1, protocol, pages, page_bytes, scripts);
    setup.slow_phases = false;
    setup.siblings = 0;
    setup.idle = 0;
    setup.check = false;
    setup.most_events = u64::MAX;
    setup.tuning = Tuning { hot_after: 255, ahead_bytes: 0, ..Tuning::default() };
    setup
}

/// A script under construction.
struct Writer {
    ops: Vec<Op>,
    barriers: u32,
    kind: BarrierKind,
}

impl Writer {
    fn new() -> Self {
        Self { ops: Vec::new(), barriers: 0, kind: BarrierKind::Normal }
    }

    fn read(&mut self, page: usize) {
        self.ops.push(Op::Block { at: page * PAGE, len: PAGE, write: None });
    }

    fn write(&mut self, page: usize, value: usize) {
        let value = u8::try_from(value % 251 + 1).expect("below 256");
        self.ops.push(Op::Block { at: page * PAGE, len: PAGE, write: Some(value) });
    }

    fn compute(&mut self, flops: usize) {
        self.ops.push(Op::Compute { ticks: (flops / FLOPS_PER_US) as u64 });
    }

    fn barrier(&mut self) {
        self.ops.push(Op::Barrier { barrier: BarrierId(self.barriers), kind: self.kind });
        self.barriers += 1;
    }

    fn locked(&mut self, lock: usize, op: Op) {
        self.ops.push(Op::Lock { lock: LockId(lock as u64), mode: LockMode::Exclusive });
        self.ops.push(op);
        self.ops.push(Op::Unlock { lock: LockId(lock as u64) });
    }
}

/// Two matrices of 256 pages. A transpose reads every page of the other ranks, `256 (N - 1) / N` of them, as
/// S4 counted.
fn fft(rank: usize, ranks: usize) -> Vec<Op> {
    const ROWS: usize = 256;
    const POINTS: usize = 262_144;
    let mut script = Writer::new();
    let own = rank * ROWS / ranks..(rank + 1) * ROWS / ranks;
    for (turn, (from, to)) in [(0, ROWS), (ROWS, 0), (0, ROWS)].into_iter().enumerate() {
        // Each rank begins with its own rows and goes around, as the program does to avoid asking the same
        // rank as all others.
        for row in 0..ROWS {
            script.read(from + (own.start + row) % ROWS);
        }
        for row in own.clone() {
            script.write(to + row, 3 * turn);
        }
        script.barrier();
        if turn < 2 {
            script.compute(5 * POINTS * 18 / 2 / ranks);
            for row in own.clone() {
                script.write(to + row, 3 * turn + 1);
            }
            script.barrier();
        }
    }
    script.ops
}

/// 32 x 32 blocks of one page each, dealt out in two dimensions.
fn lu(rank: usize, ranks: usize) -> Vec<Op> {
    const SIDE: usize = 32;
    const BLOCK_FLOPS: usize = 32 * 32 * 32;
    let (down, across) = if ranks == 4 { (2, 2) } else { (1, ranks) };
    let is_own = |i: usize, j: usize| i % down * across + j % across == rank;
    let block = |i: usize, j: usize| i * SIDE + j;
    let mut script = Writer::new();
    for step in 0..SIDE {
        if is_own(step, step) {
            script.compute(2 * BLOCK_FLOPS / 3);
            script.write(block(step, step), step + 100);
        }
        script.barrier();
        let edge = (step + 1..SIDE).flat_map(|other| [(other, step), (step, other)]);
        for (i, j) in edge.filter(|&(i, j)| is_own(i, j)) {
            script.read(block(step, step));
            script.compute(BLOCK_FLOPS);
            script.write(block(i, j), step + 100);
        }
        script.barrier();
        let inside = (step + 1..SIDE).flat_map(|i| (step + 1..SIDE).map(move |j| (i, j)));
        for (i, j) in inside.filter(|&(i, j)| is_own(i, j)) {
            script.read(block(i, step));
            script.read(block(step, j));
            script.compute(2 * BLOCK_FLOPS);
            script.write(block(i, j), step);
        }
    }
    script.barrier();
    script.ops
}

/// Sweeps over grids of three sizes. A rank's part of a grid is contiguous, so a row of the neighbour's is in
/// one page, a column in all of them.
fn ocean(rank: usize, ranks: usize) -> Vec<Op> {
    /// Pages set aside for a rank's part of a grid.
    const PART: usize = 40;
    let mut script = Writer::new();
    let (down, across) = if ranks == 4 { (2, 2) } else { (1, ranks) };
    let (row, column) = (rank / across, rank % across);
    for sweep in 0..24 {
        let side = [256, 128, 64, 128][sweep % 4];
        let points = side * side / ranks;
        let pages = (points * 8).div_ceil(PAGE);
        let part = |grid: usize, of: usize| (grid * ranks + of) * PART;
        let (old, new) = (sweep % 2, (sweep + 1) % 2);
        if across > 1 {
            let neighbour = row * across + (column + 1) % across;
            (0..pages).for_each(|page| script.read(part(old, neighbour) + page));
        }
        if down > 1 {
            script.read(part(old, (row + 1) % down * across + column));
        }
        script.compute(15 * points);
        (0..pages).for_each(|page| script.write(part(new, rank) + page, sweep));
        script.locked(1, Op::Add { at: 2 * ranks * PART * PAGE, len: 8, value: 1 });
        script.barrier();
    }
    script.ops
}

/// Twelve molecules in a page. Each rank reads half of all others, then adds forces to them, one lock after
/// the other.
fn water(rank: usize, ranks: usize) -> Vec<Op> {
    const MOLECULES: usize = 1331;
    const BYTES: usize = 672;
    /// Positions, then forces.
    const FORCE: usize = 336;
    const PAIR_FLOPS: usize = 500;
    let mut script = Writer::new();
    let own = rank * MOLECULES / ranks..(rank + 1) * MOLECULES / ranks;
    let reach = own.len() + MOLECULES / 2;
    let position = |molecule: usize, write| Op::Block { at: molecule * BYTES, len: FORCE, write };
    script.ops.extend(own.clone().map(|molecule| position(molecule, Some(1))));
    script.barrier();
    for _ in 0..2 {
        let others = (0..reach).map(|next| (own.start + next) % MOLECULES);
        script.ops.extend(others.clone().map(|molecule| position(molecule, None)));
        script.compute(PAIR_FLOPS * own.len() * MOLECULES / 2);
        for molecule in others {
            script.locked(molecule, Op::Add { at: molecule * BYTES + FORCE, len: 8, value: 1 });
        }
        script.barrier();
    }
    script.ops.extend(own.map(|molecule| position(molecule, Some(2))));
    script.barrier();
    script.ops
}

/// S5, figure 1: two ranks, one lock, `times` increments each.
///
/// # Panics
/// If a load returns a wrong value.
#[must_use]
pub fn two_ranks_one_lock(path: LockPath, times: usize) -> Report {
    let mut script = Writer::new();
    (0..times).for_each(|_| script.locked(1, Op::Add { at: 0, len: 1, value: 1 }));
    let mut setup = quiet(ProtocolKind::Ibec, SMS_PAGE, vec![script.ops.clone(), script.ops]);
    setup.lock_path = Some(path);
    setup.managers = Managers::At(Rank(0));
    setup.homes = Homes::At(Rank(0));
    setup.cost = Some(Cost::pentium_1999());
    World::new(setup).run().expect("a legal program")
}

/// S5, table 3: eight ranks, eight locks, each lock shared by two ranks that count up a word of its page.
/// `spread`: locks and pages are managed by all ranks in turn, otherwise by rank 0.
///
/// # Panics
/// If a load returns a wrong value.
#[must_use]
pub fn eight_locks(protocol: ProtocolKind, spread: bool, rounds: usize) -> Report {
    let script = |rank: usize| {
        let mut script = Writer::new();
        for round in 0..2 * rounds {
            let lock = (rank + round % 2) % 8;
            script.locked(lock, Op::Add { at: lock * SMS_PAGE, len: 4, value: 1 });
        }
        script.barrier();
        script.ops
    };
    let mut setup = quiet(protocol, SMS_PAGE, (0..8).map(script).collect());
    if !spread {
        setup.managers = Managers::At(Rank(0));
        setup.homes = Homes::At(Rank(0));
    }
    World::new(setup).run().expect("a legal program")
}

/// Time that was not computing, in microseconds over all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Overhead {
    pub total_us: f64,
    /// Catching faults, making twins, changing protections.
    pub faults_us: f64,
}

/// S5, figure 5: red-black SOR of 1024 x 1536 on eight ranks, a row in three pages, pages dealt out to homes
/// in turn.
///
/// # Panics
/// If a load returns a wrong value.
#[must_use]
pub fn sor(kind: BarrierKind, iterations: usize) -> (Report, Overhead) {
    const RANKS: usize = 8;
    const ROW_PAGES: usize = 3;
    const ROWS: usize = 1024 / RANKS;
    let script = |rank: usize| {
        let mut script = Writer { kind, ..Writer::new() };
        let row = |row: usize| row * ROW_PAGES..(row + 1) * ROW_PAGES;
        let half = |page: usize, colour: usize| page * SMS_PAGE + colour * SMS_PAGE / 2;
        for sweep in 0..2 * iterations {
            let (red, black) = (sweep % 2, 1 - sweep % 2);
            let above = (rank > 0).then(|| rank * ROWS - 1);
            let below = (rank + 1 < RANKS).then(|| (rank + 1) * ROWS);
            for page in above.into_iter().chain(below).flat_map(row) {
                script.ops.push(Op::Block { at: half(page, black), len: SMS_PAGE / 2, write: None });
            }
            script.compute(6 * 1024 * 1536 / 2 / RANKS);
            for page in (rank * ROWS..(rank + 1) * ROWS).flat_map(row) {
                let value = u8::try_from(sweep + 1).expect("few sweeps");
                script.ops.push(Op::Block { at: half(page, red), len: SMS_PAGE / 2, write: Some(value) });
            }
            script.barrier();
        }
        script.ops
    };
    let cost = Cost::pentium_1999();
    let mut setup = quiet(ProtocolKind::Ibec, SMS_PAGE, (0..RANKS).map(script).collect());
    setup.cost = Some(cost);
    let report = World::new(setup).run().expect("a legal program");
    let count = |number: u64| f64::from(u32::try_from(number).expect("few"));
    let stats = &report.stats;
    let faults_us = count(stats.read_faults + stats.write_faults) * cost.fault_us
        + count(stats.protects) * cost.protect_us
        + count(stats.twins) * 4.0 * cost.copy_us_per_kib;
    let total_us = count(report.ticks) * 8.0 - count(report.computed);
    (report, Overhead { total_us, faults_us })
}
