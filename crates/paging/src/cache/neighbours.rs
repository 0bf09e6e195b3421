//! Which neighbours of a wanted page are fetched along with it.
//!
//! Data that crosses a page's border, or that is next to its index, makes a program with random accesses
//! touch two or three neighbouring pages at each place: a round trip for each of them, where one would do.
//! Whether this program does so is measured, for the page below and the page above separately, as in feedback
//! directed prefetching (Srinath, Mutlu, Kim, Patt: Feedback directed prefetching, HPCA '07). The use of a
//! mapped page cannot be seen, so *probes* are counted: fetches without neighbours, and whether one of the
//! next few faults asks for a neighbour. While neighbours are fetched along, one random fault in
//! `PROBE_EVERY` is still a probe.
//!
//! ```text
//!   alone --- enough probes found the neighbour wanted ---> along
//!     ^                                                       |
//!     '--- after a trial, too few did (and waits longer ------'
//!          before the next trial, each time)
//! ```

use std::collections::VecDeque;

use super::Cache;

/// A neighbour that no fault asks for within so many random faults is not wanted with this page.
const WITHIN: u64 = 16;
/// While neighbours come along.
const PROBE_EVERY: u64 = 16;
/// Shares are in parts of this.
const ONE: u32 = 1 << 16;
/// Probes that are remembered, about.
const MEMORY: u32 = 64;
/// A neighbour that is fetched along costs about a fifth of a fault of its own.
const WORTH_A_TRIAL: u32 = ONE / 5;
/// What a trial must show, because what came along and was used no longer asks, and those that remain say
/// more: with a fifth here as well, SQLite fetched twice as many neighbours and was spared fewer faults.
const WORTH_IT: u32 = ONE / 4;
/// Probes of a trial, and of one that went well for good.
const TRIAL_PROBES: u32 = MEMORY;
const PROVEN_PROBES: u32 = 16 * MEMORY;
/// Random faults before another trial, after the first one that failed; and at most.
const RETRY: u64 = 4096;
const LONGEST_RETRY: u64 = 1 << 20;

/// One of the two neighbours.
#[derive(Clone, Debug)]
struct Side {
    /// How often it was wanted when it was not fetched along.
    share: u32,
    comes_along: bool,
    /// Probes since it began to come along.
    probes: u32,
    next_trial: u64,
    retry: u64,
}

impl Side {
    const NEW: Side = Side { share: 0, comes_along: false, probes: 0, next_trial: 0, retry: RETRY };

    fn probed(&mut self, wanted: bool, now: u64) {
        self.share = self.share - self.share / MEMORY + if wanted { ONE / MEMORY } else { 0 };
        if !self.comes_along {
            if self.share >= WORTH_A_TRIAL && now >= self.next_trial {
                (self.comes_along, self.probes) = (true, 0);
            }
            return;
        }
        self.probes = self.probes.saturating_add(1);
        if self.probes >= TRIAL_PROBES && self.share < WORTH_IT {
            self.comes_along = false;
            self.next_trial = now + self.retry;
            self.retry = (2 * self.retry).min(LONGEST_RETRY);
        } else if self.probes == PROVEN_PROBES {
            self.retry = RETRY;
        }
    }
}

/// A random fault whose page came alone.
#[derive(Clone, Debug)]
struct Probe {
    page: u32,
    clock: u64,
    /// Below and above: `None` if it needed no fetch, else whether it has been wanted since.
    wanted: [Option<bool>; 2],
}

#[derive(Clone, Debug)]
pub(super) struct Neighbours {
    /// Below and above.
    sides: [Side; 2],
    probes: VecDeque<Probe>,
    clock: u64,
    /// The random fault whose neighbours are fetched along.
    with: Option<u32>,
}

impl Neighbours {
    pub fn new() -> Self {
        Self { sides: [Side::NEW; 2], probes: VecDeque::new(), clock: 0, with: None }
    }

    /// A fault on `page` that no stream foresaw. `remote`: whether the pages below and above would have to be
    /// fetched as well.
    fn random_fault(&mut self, page: u32, remote: [bool; 2]) {
        self.clock += 1;
        while self.probes.front().is_some_and(|probe| probe.clock + WITHIN < self.clock) {
            let probe = self.probes.pop_front().expect("it was looked at");
            for (side, wanted) in self.sides.iter_mut().zip(probe.wanted) {
                wanted.into_iter().for_each(|wanted| side.probed(wanted, self.clock));
            }
        }
        for probe in &mut self.probes {
            let at = [probe.page.checked_sub(1), probe.page.checked_add(1)];
            for (wanted, at) in probe.wanted.iter_mut().zip(at) {
                if at == Some(page) {
                    *wanted = wanted.map(|_| true);
                }
            }
        }
        let alone = !self.sides.iter().any(|side| side.comes_along);
        if alone || self.clock.is_multiple_of(PROBE_EVERY) {
            self.with = None;
            self.probes.push_back(Probe {
                page,
                clock: self.clock,
                wanted: remote.map(|remote| remote.then_some(false)),
            });
        } else {
            self.with = Some(page);
        }
    }

    /// Which neighbours are fetched along with the wanted page `index`, below and above.
    fn with(&self, index: u32) -> [bool; 2] {
        let with = self.with == Some(index);
        [0, 1].map(|side| with && self.sides[side].comes_along)
    }
}

impl Cache {
    /// A fault on a Remote page that no stream predicted.
    pub(super) fn observe_neighbours(&mut self, index: u32) {
        if self.config.unit_pages == 1 && self.config.max_prefetch_pages > 1 {
            let remote = [index.checked_sub(1), index.checked_add(1)]
                .map(|at| at.is_some_and(|at| self.is_remote(at)));
            self.neighbours.random_fault(index, remote);
        }
    }

    /// First and last page that a fetch of the wanted page `index` brings with it, at most `most` more.
    pub(super) fn company(&self, index: u32, most: u64) -> (u32, u32) {
        let [below, above] = self.neighbours.with(index);
        let first = index.checked_sub(1).filter(|at| below && most > 0 && self.is_remote(*at));
        let most = most - u64::from(first.is_some());
        let last = index.checked_add(1).filter(|at| above && most > 0 && self.is_remote(*at));
        (first.unwrap_or(index), last.unwrap_or(index))
    }
}
