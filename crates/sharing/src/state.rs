//! What protocols and the synchronisation core share.

use std::collections::{BTreeSet, VecDeque};

use super::config::{Regions, Tables};
use super::rule::Rules;
use super::{Body, Checked, LockPath, Rank, Stats, Tuning, Violation};
use rampool_wire::units::PageIndex;

/// State that protocols and the synchronisation core share.
#[derive(Clone, Hash, Debug)]
pub(crate) struct Shared {
    pub rank: Rank,
    pub ranks: u16,
    /// Barriers this rank has left.
    pub epoch: u32,
    /// It has arrived at a barrier and not left: nothing is fetched ahead, since homes may move.
    pub at_barrier: bool,
    /// In this epoch writes were made available for a lock or a fence, or are owed to one.
    pub released: bool,
    pub regions: Regions,
    pub tables: Tables,
    pub lock_path: LockPath,
    pub tuning: Tuning,
    pub rules: Rules,
    pub flushes: Flushes,
    /// Messages of this rank to itself.
    pub loopback: VecDeque<Body>,
    /// Pages whose waiters were woken by this event.
    pub retried: BTreeSet<PageIndex>,
    pub stats: Stats,
}

/// Changes on their way to homes, numbered.
#[derive(Clone, Hash, Debug, Default)]
pub(crate) struct Flushes {
    next: u64,
    open: BTreeSet<u64>,
}

impl Flushes {
    pub fn begin(&mut self) -> u64 {
        let flush = self.next;
        self.next += 1;
        self.open.insert(flush);
        flush
    }

    pub fn end(&mut self, flush: u64) -> Checked {
        if self.open.remove(&flush) {
            Ok(())
        } else {
            Err(Violation::new(format!("acknowledges flush {flush}")))
        }
    }

    /// The number the next flush will have.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Whether every flush from `from` on and before `upto` is acknowledged.
    pub fn settled(&self, from: u64, upto: u64) -> bool {
        self.open.range(from..upto).next().is_none()
    }
}
