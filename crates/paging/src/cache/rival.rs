//! Do pages that returned once deserve a place in main more than the pages that have one?
//!
//! Two classes of leaving pages are followed: *candidates* (they had come back while their ghost was young,
//! were kept in small and leave again) and *main* pages (one batch in sixteen leaves from main even when
//! small is large enough). Some of each are noted, and looked at again when a sixteenth, a quarter and the
//! whole of the ghost window has passed: is the page back? While candidates come back clearly more often, at
//! any of these ages, ghost hits go straight to main and push its pages out; else they go through small. In a
//! cyclic scan both come back alike and main does not change; after a change of phase main pages do not come
//! back at all, and are replaced.

use std::collections::VecDeque;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    Main = 0,
    Candidate = 1,
}

const AGES: usize = 3;
/// Pages followed at a time in each class, roughly.
const FOLLOWED: u32 = 1024;
/// Looked-at pages after which the older half counts no more.
const MEMORY: u32 = 128;
/// Looked-at pages needed for a verdict.
const ENOUGH: u32 = 8;
/// One candidate in so many goes through small although candidates win, so that there is something to
/// compare.
const CONTROL: u32 = 16;

#[derive(Clone, Debug)]
struct Followed {
    page: u32,
    clock: u32,
}

/// How often pages were back at one age.
#[derive(Clone, Debug, Default)]
struct Tally {
    back: u32,
    seen: u32,
}

impl Tally {
    fn add(&mut self, back: bool) {
        self.back += u32::from(back);
        self.seen += 1;
        if self.seen >= MEMORY {
            self.back /= 2;
            self.seen /= 2;
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Cohort {
    followed: VecDeque<Followed>,
    /// The first followed page that has not reached each age.
    cursors: [usize; AGES],
    tallies: [Tally; AGES],
    skipped: u32,
}

/// Invariant: in each cohort `cursors` do not grow with age, and pages before the last one's are gone.
#[derive(Clone, Debug)]
pub(super) struct Rivals {
    window: u32,
    cohorts: [Cohort; 2],
    winning: bool,
    admitted: u32,
}

impl Rivals {
    pub fn new(budget_pages: u64) -> Self {
        let mut rivals = Self { window: 1, cohorts: Default::default(), winning: false, admitted: 0 };
        rivals.set_budget(budget_pages);
        rivals
    }

    pub fn set_budget(&mut self, budget_pages: u64) {
        self.window = u32::try_from(2 * budget_pages).unwrap_or(u32::MAX / 2).clamp(16, u32::MAX / 2);
    }

    /// Evictions after which a ghost is old.
    pub fn window(&self) -> u32 {
        self.window
    }

    /// May this candidate go to main?
    pub fn admits(&mut self) -> bool {
        self.admitted = (self.admitted + 1) % CONTROL;
        self.winning && self.admitted != 0
    }

    /// A page of this class leaves.
    pub fn left(&mut self, class: Class, page: u32, clock: u32) {
        let cohort = &mut self.cohorts[class as usize];
        cohort.skipped += 1;
        if cohort.skipped >= (self.window / FOLLOWED).max(1) && cohort.followed.len() < 2 * FOLLOWED as usize
        {
            cohort.skipped = 0;
            cohort.followed.push_back(Followed { page, clock });
        }
    }

    /// Checks the pages that have reached an age. `back` tells whether a page that left at a clock has
    /// returned; `None` when its content is gone.
    pub fn judge(&mut self, now: u32, back: impl Fn(u32, u32) -> Option<bool>) {
        let mut changed = false;
        for cohort in &mut self.cohorts {
            for (age, shift) in [4u32, 2, 0].into_iter().enumerate() {
                let due = self.window >> shift;
                while let Some(f) = cohort.followed.get(cohort.cursors[age])
                    && now.wrapping_sub(f.clock) >= due
                {
                    if let Some(back) = back(f.page, f.clock) {
                        cohort.tallies[age].add(back);
                        changed = true;
                    }
                    cohort.cursors[age] += 1;
                }
            }
            for _ in 0..cohort.cursors[AGES - 1] {
                cohort.followed.pop_front();
                cohort.cursors.iter_mut().for_each(|c| *c -= 1);
            }
        }
        if changed {
            let [main, candidates] = &self.cohorts;
            self.winning = main.tallies.iter().zip(&candidates.tallies).any(|(m, c)| wins(c, m));
        }
    }
}

/// `back / seen` clearly larger: by a fifth and by 5 of 100.
fn wins(candidates: &Tally, main: &Tally) -> bool {
    if candidates.seen < ENOUGH || main.seen < ENOUGH {
        return false;
    }
    let c = u64::from(candidates.back) * u64::from(main.seen) * 100;
    let m = u64::from(main.back) * u64::from(candidates.seen) * 120;
    c > m + 5 * u64::from(candidates.seen) * u64::from(main.seen)
}
