//! The description of a world.

use rampool_sharing::{
    Config, Engine, Homes, LockPath, Managers, ProtocolKind, Rank, RegionConfig, Rule, ThreadId, Tuning,
};
use rampool_wire::units::{Extent, PageIndex};

use crate::share::cost::Cost;
use crate::share::golden::Golden;
use crate::share::memory::Memory;
use crate::share::network::Loss;
use crate::share::node::Node;
use crate::share::program::{Script, Thread};

/// The description of a world.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub page_bytes: u32,
    /// Regions: pages and protocol.
    pub regions: Vec<(u32, ProtocolKind)>,
    pub homes: Homes,
    pub managers: Managers,
    pub lock_path: Option<LockPath>,
    pub tuning: Tuning,
    /// The operations of each thread of each rank.
    pub scripts: Vec<Vec<Script>>,
    /// Chance, in percent, that siblings run at each point inside of a memory operation.
    pub siblings: u64,
    /// Chance, in percent, that a rank is given idle time after an event.
    pub idle: u64,
    /// Chance, in a thousand, that the kernel drops a mapping after an event.
    pub unmap: u64,
    /// Chance, in a thousand, that a rank needs room after an event and offers some of its pages.
    pub evict: u64,
    /// Some channels and threads are slow for a while.
    pub slow_phases: bool,
    /// Chance, in percent, that a rank stops for a while.
    pub pauses: u64,
    /// Costs instead of random delays.
    pub cost: Option<Cost>,
    /// Every message goes through its bytes.
    pub codec: bool,
    /// Messages travel as datagrams, which may be lost, duplicated and overtaken.
    pub datagrams: Option<Loss>,
    /// This rank dies at this event.
    pub crash: Option<(Rank, u64)>,
    /// Engines and MMUs are compared after every event.
    pub check: bool,
    pub omit: Option<Rule>,
    /// Threads of each rank that take part in barriers, if not all.
    pub parties: Option<u16>,
    pub most_events: u64,
    /// Prints everything that happens.
    pub trace: bool,
}

impl Setup {
    /// A world of one region with sensible defaults.
    #[must_use]
    pub fn new(
        seed: u64,
        protocol: ProtocolKind,
        pages: u32,
        page_bytes: u32,
        scripts: Vec<Vec<Script>>,
    ) -> Self {
        Self {
            seed,
            page_bytes,
            regions: vec![(pages, protocol)],
            homes: Homes::Cyclic,
            managers: Managers::Cyclic,
            lock_path: None,
            tuning: Tuning { hold_us: 0, ..Tuning::default() },
            scripts,
            siblings: 40,
            idle: if matches!(protocol, ProtocolKind::Aurc | ProtocolKind::Auto) { 30 } else { 0 },
            unmap: 0,
            evict: 0,
            slow_phases: true,
            pauses: 0,
            cost: None,
            codec: true,
            datagrams: None,
            crash: None,
            check: true,
            omit: None,
            parties: None,
            most_events: 4_000_000,
            trace: false,
        }
    }

    /// The configuration of one rank.
    #[must_use]
    pub fn config(&self, rank: Rank) -> Config {
        let mut first = 0;
        let mut regions = Vec::new();
        for &(pages, protocol) in &self.regions {
            regions.push(RegionConfig {
                pages: Extent::new(PageIndex(first), pages),
                page_bytes: self.page_bytes,
                protocol,
                homes: self.homes,
            });
            first += u64::from(pages);
        }
        Config {
            rank,
            ranks: u16::try_from(self.scripts.len()).expect("few ranks"),
            regions,
            managers: self.managers,
            lock_path: self.lock_path,
            tuning: self.tuning,
        }
    }

    /// The ranks at their start, and golden memory.
    #[must_use]
    pub fn build(&self) -> (Vec<Node>, Golden) {
        let pages: u32 = self.regions.iter().map(|&(pages, _)| pages).sum();
        let nodes = (0..self.scripts.len()).map(|rank| {
            let id = Rank(u16::try_from(rank).expect("few ranks"));
            let mut engine = Engine::new(&self.config(id)).expect("a well-formed world");
            if let Some(rule) = self.omit {
                omit(&mut engine, rule);
            }
            let threads = self.scripts[rank].iter().enumerate();
            let threads = threads.map(|(index, script)| {
                Thread::new(ThreadId(u16::try_from(index).expect("few threads")), script.clone())
            });
            let threads: Vec<Thread> = threads.collect();
            let parties = self.parties.unwrap_or(u16::try_from(threads.len()).expect("few threads"));
            Node { engine, memory: Memory::new(self.page_bytes as usize), threads, parties }
        });
        (nodes.collect(), Golden::new(pages as usize * self.page_bytes as usize))
    }
}

#[cfg(feature = "mutants")]
fn omit(engine: &mut Engine, rule: Rule) {
    engine.omit(rule);
}

#[cfg(not(feature = "mutants"))]
fn omit(_: &mut Engine, rule: Rule) {
    panic!("{rule:?} cannot be left out without the feature `mutants`");
}
