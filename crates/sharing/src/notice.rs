//! Write notices of the home-based protocols: which pages changed, up to which version, by which rank.
//!
//! On the wire notices are runs of pages that changed alike: a strip of a matrix takes a few bytes.

use std::collections::BTreeMap;

use super::Rank;
use super::wire::{Limits, Wire, wire_enum, wire_struct};
use rampool_wire::units::{Extent, PageIndex};

/// A page that changed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Notice {
    pub version: u32,
    /// The only rank that wrote it, `None` for several.
    pub writer: Option<Rank>,
    /// At a barrier: a writer has not sent its changes to the page's home. If it is the only one, it becomes
    /// the home.
    pub unsent: bool,
}

impl Notice {
    /// Its changes are at its home.
    pub fn sent(version: u32, writer: Option<Rank>) -> Self {
        Self { version, writer, unsent: false }
    }
}

/// Who wrote a page, in a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Writers {
    Several,
    One { rank: Rank },
    OneUnsent { rank: Rank },
    SeveralUnsent,
}

/// Notices of pages that follow each other and changed alike.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NoticeRun {
    first: PageIndex,
    count: u32,
    version: u32,
    writers: Writers,
}

/// Notices in a message.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct NoticeRuns {
    runs: Vec<NoticeRun>,
}

mod run_wire {
    use super::{NoticeRun, Writers, wire_enum, wire_struct};
    wire_struct!(NoticeRun { first, count, version, writers });
    wire_enum!(Writers {
        0 => Several {},
        1 => One { rank },
        2 => OneUnsent { rank },
        3 => SeveralUnsent {},
    });
}

impl Notice {
    fn writers(self) -> Writers {
        match (self.writer, self.unsent) {
            (None, false) => Writers::Several,
            (Some(rank), false) => Writers::One { rank },
            (Some(rank), true) => Writers::OneUnsent { rank },
            (None, true) => Writers::SeveralUnsent,
        }
    }
}

impl NoticeRun {
    fn notice(&self) -> Notice {
        let (writer, unsent) = match self.writers {
            Writers::Several => (None, false),
            Writers::One { rank } => (Some(rank), false),
            Writers::OneUnsent { rank } => (Some(rank), true),
            Writers::SeveralUnsent => (None, true),
        };
        Notice { version: self.version, writer, unsent }
    }
}

impl NoticeRuns {
    /// Pages that were written by several ranks, not all of which have sent their changes.
    pub(crate) fn disputed(&self) -> impl Iterator<Item = PageIndex> {
        self.written(|writers| writers == Writers::SeveralUnsent)
    }

    /// Pages of which a writer has not sent its changes.
    pub(crate) fn unsent(&self) -> impl Iterator<Item = PageIndex> {
        self.written(|writers| matches!(writers, Writers::OneUnsent { .. } | Writers::SeveralUnsent))
    }

    fn written(&self, by: impl Fn(Writers) -> bool) -> impl Iterator<Item = PageIndex> {
        let runs = self.runs.iter().filter(move |run| by(run.writers));
        runs.flat_map(|run| Extent::new(run.first, run.count).pages())
    }
}

impl Wire for NoticeRuns {
    fn put(&self, out: &mut Vec<u8>) {
        self.runs.put(out);
    }
    fn take(from: &mut super::wire::Reader<'_>) -> Result<Self, super::Malformed> {
        Ok(Self { runs: Wire::take(from)? })
    }
    /// Runs ascend and lie inside of regions (one run may go on in the next), so there are never more notices
    /// than pages.
    fn sane(&self, limits: &Limits<'_>) -> bool {
        let mut behind = PageIndex(0);
        self.runs.iter().all(|run| {
            let inside = run.count > 0
                && run.first >= behind
                && run.writers.sane(limits)
                && limits.regions.hold(Extent { first: run.first, count: run.count });
            behind = run.first.offset(u64::from(run.count));
            inside
        })
    }
}

/// The pages that changed.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Notices(BTreeMap<PageIndex, Notice>);

impl Notices {
    pub fn add(&mut self, page: PageIndex, notice: Notice) {
        self.0
            .entry(page)
            .and_modify(|known| {
                known.version = known.version.max(notice.version);
                known.unsent |= notice.unsent;
                if known.writer != notice.writer {
                    known.writer = None;
                }
            })
            .or_insert(notice);
    }

    pub fn merge(&mut self, other: &NoticeRuns) {
        for run in &other.runs {
            for page in 0..u64::from(run.count) {
                self.add(run.first.offset(page), run.notice());
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (PageIndex, Notice)> {
        self.0.iter().map(|(&page, &notice)| (page, notice))
    }

    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    pub fn runs(&self) -> NoticeRuns {
        let mut runs: Vec<NoticeRun> = Vec::new();
        for (page, notice) in self.iter() {
            match runs.last_mut() {
                Some(run) if run.first.offset(u64::from(run.count)) == page && run.notice() == notice => {
                    run.count += 1;
                }
                _ => runs.push(NoticeRun {
                    first: page,
                    count: 1,
                    version: notice.version,
                    writers: notice.writers(),
                }),
            }
        }
        NoticeRuns { runs }
    }
}

impl From<&NoticeRuns> for Notices {
    fn from(runs: &NoticeRuns) -> Self {
        let mut notices = Self::default();
        notices.merge(runs);
        notices
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Regions;
    use crate::{Homes, ProtocolKind, RegionConfig};

    #[test]
    fn a_strip_of_pages_is_one_run_and_two_writers_are_many() {
        let mut notices = Notices::default();
        for page in 10..20 {
            notices.add(PageIndex(page), Notice::sent(3, Some(Rank(1))));
        }
        assert_eq!(notices.runs().runs.len(), 1);
        notices.add(PageIndex(12), Notice::sent(2, Some(Rank(0))));
        assert_eq!(notices.runs().runs.len(), 3);
        let back = Notices::from(&notices.runs());
        assert_eq!(back, notices);
        assert_eq!(back.iter().nth(2), Some((PageIndex(12), Notice::sent(3, None))));
    }

    #[test]
    fn a_run_may_go_on_in_the_next_region_but_not_behind_the_last() {
        let mut regions = Regions::new();
        for (first, count) in [(10, 4), (14, 2), (20, 1)] {
            let pages = Extent { first: PageIndex(first), count };
            let region =
                RegionConfig { pages, page_bytes: 4096, protocol: ProtocolKind::Hlrc, homes: Homes::Cyclic };
            regions.add(region, 2).unwrap();
        }
        let limits = Limits { ranks: 2, regions: &regions };
        let run = |first: u64, last: u64| {
            let mut notices = Notices::default();
            for page in first..=last {
                notices.add(PageIndex(page), Notice::sent(1, None));
            }
            assert_eq!(notices.runs().runs.len(), 1);
            notices.runs().sane(&limits)
        };
        assert!(run(10, 15) && run(13, 14) && run(20, 20));
        assert!(!run(9, 10) && !run(15, 16) && !run(15, 20) && !run(20, 21));
    }
}
