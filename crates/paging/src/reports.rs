//! What came of the cache's outputs, in the order in which the cache can be told.
//!
//! An install that the kernel did not do is told before anything else: until then the cache may still take it
//! back. Of all that came of one step, pages that were there already come first, then pages that were
//! missing, then what failed. What left is told afterwards, batch by batch: each makes the cache want
//! something new.

use std::collections::VecDeque;

use rampool_wire::units::{Extent, PageIndex, push_page};

use crate::cache::{BatchId, EvictOutcome, Input};

/// What came of one output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// The pages were mapped when they were to be installed.
    AlreadyThere(Extent),
    /// The page was absent though it counts as resident.
    WasMissing(PageIndex),
    /// The pages are not installed: an event waits to be read.
    Failed(Extent),
    /// The pages of a batch have left, or not.
    Evicted(BatchId, Vec<EvictOutcome>),
}

impl Report {
    /// What the cache is told.
    #[must_use]
    pub fn input(&self) -> Input<'_> {
        match self {
            Self::AlreadyThere(extent) => Input::AlreadyThere { extent: *extent },
            Self::WasMissing(page) => Input::WasMissing { page: *page },
            Self::Failed(extent) => Input::InstallFailed { extent: *extent },
            Self::Evicted(batch, outcomes) => Input::Evicted { batch: *batch, outcomes },
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Reports {
    /// Of installs.
    installs: Vec<Report>,
    later: VecDeque<Report>,
}

impl Reports {
    pub fn push(&mut self, report: Report) {
        match report {
            Report::Evicted(..) => self.later.push_back(report),
            install => self.installs.push(install),
        }
    }

    /// What is to be told together, before the cache is asked what it wants now; empty: nothing.
    pub fn next_step(&mut self) -> Vec<Report> {
        if self.installs.is_empty() {
            return self.later.pop_front().into_iter().collect();
        }
        let mut there: Vec<Extent> = Vec::new();
        let (mut step, mut failed) = (Vec::new(), Vec::new());
        for report in self.installs.drain(..) {
            match report {
                Report::AlreadyThere(extent) => extent.pages().for_each(|page| push_page(&mut there, page)),
                Report::Failed(_) => failed.push(report),
                other => step.push(other),
            }
        }
        let there = there.into_iter().map(Report::AlreadyThere);
        there.chain(step).chain(failed).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn e(first: u64, count: u32) -> Extent {
        Extent::new(PageIndex(first), count)
    }

    #[test]
    fn what_came_of_installs_is_told_together_and_before_anything_else() {
        let mut reports = Reports::default();
        let left = Report::Evicted(BatchId(3), vec![EvictOutcome::Moved]);
        reports.push(left.clone());
        reports.push(Report::Failed(e(9, 2)));
        reports.push(Report::AlreadyThere(e(4, 1)));
        reports.push(Report::WasMissing(PageIndex(7)));
        reports.push(Report::AlreadyThere(e(5, 1)));
        let first =
            [Report::AlreadyThere(e(4, 2)), Report::WasMissing(PageIndex(7)), Report::Failed(e(9, 2))];
        assert_eq!(reports.next_step(), first);
        reports.push(Report::Failed(e(2, 1)));
        assert_eq!(reports.next_step(), [Report::Failed(e(2, 1))]);
        assert_eq!(reports.next_step(), [left]);
        assert_eq!(reports.next_step(), []);
    }
}
