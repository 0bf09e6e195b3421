//! The mode of each page of an `auto` region, from its observed use.
//!
//! The rules. A page's home decides, when it learns of a release of the page or hands a copy out, and adds
//! the mode to what it sends anyway: a copy, the acknowledgement of a diff, notices. Only the root of the
//! barrier decides which rank becomes the owner of a page, since it alone sees every page's writers.
//!
//! | mode | seen | then |
//! |---|---|---|
//! | invalidate | nothing else | hlrc |
//! | private | the first change by one rank alone, or [`AGREE`] in a row | it becomes the home and writes without faults |
//! | prepared | its home wrote it before others used it | who writes all of it need not send it: it becomes the home |
//! | push | a rank missed it after a change | for 1 change, then 2, 4 .. 64, the barrier sends it there |
//! | stream | [`AGREE`] diffs in a row of 1/4 page or more, not under a lock | the writer streams, as in aurc |
//! | lock-bound | [`BOUND`] releases in a row under a lock, ranks in turns | it rides on the lock's grant |
//! | migratory | lock-bound; [`AGREE`] ranks in a row got and wrote it | it also arrives writable, with a twin |
//!
//! Hysteresis: a page that changes its mode stays in it for [`DWELL`] releases, and for twice as many each
//! time it changes again, up to [`LONGEST_DWELL`].
//!
//! A mode says which work is done earlier, never which may be skipped: notices, versions and refusals are
//! those of hlrc in every mode, so a wrong guess costs only time. It takes effect at a synchronisation: a
//! grant, a release, a barrier.

use std::collections::BTreeMap;

use super::ahead::Habit;
use super::pages::take_pages;
use super::wire::wire_enum;
use super::{LockId, Rank};
use rampool_wire::units::{Extent, PageIndex};

/// Observations that have to agree.
pub(crate) const AGREE: u8 = 2;
/// Releases in a row that bind a page to a lock.
pub(crate) const BOUND: u8 = 3;
/// Releases for which a page stays in its new mode.
pub(crate) const DWELL: u8 = 4;
pub(crate) const LONGEST_DWELL: u8 = 64;

/// Work done ahead of time for a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Mode {
    #[default]
    Invalidate,
    /// Announced with a copy: when the page changes, the home sends it at the end of the barrier.
    Push,
    Stream,
    LockBound {
        lock: LockId,
    },
    Migratory {
        lock: LockId,
    },
    /// Announced with a copy: the home wrote the page in an earlier epoch, and no rank has written it since.
    /// `pushed`: the home also announces what `Push` says.
    Prepared {
        pushed: bool,
    },
}

mod mode_wire {
    use super::{Mode, wire_enum};
    wire_enum!(Mode {
        0 => Invalidate {},
        1 => Push {},
        2 => Stream {},
        3 => LockBound { lock },
        4 => Migratory { lock },
        5 => Prepared { pushed },
    });
}

impl Mode {
    /// Whether the page comes with this lock.
    pub fn rides_on(self, lock: LockId) -> bool {
        matches!(self, Self::LockBound { lock: of } | Self::Migratory { lock: of } if of == lock)
    }

    pub fn is_migratory(self) -> bool {
        matches!(self, Self::Migratory { .. })
    }
}

/// A home's observations of a page.
#[derive(Clone, Hash, Debug, Default)]
pub(crate) struct Record {
    mode: Mode,
    /// Releases before the mode may change, and how many it was the last time.
    dwell: u8,
    dwelt: u8,
    /// The lock of the last releases, and how many in a row were under it, the first not counted.
    lock: Option<LockId>,
    bound: u8,
    /// The last rank to release, and how often in a row under the same lock it differed from the one before.
    writer: Option<Rank>,
    turns: u8,
    /// Large diffs in a row.
    large: u8,
    /// The last rank to get a copy, if it has not released the page since; ranks in a row that got the page
    /// and wrote it.
    holder: Option<Rank>,
    wrote: u8,
    readers: BTreeMap<Rank, Reader>,
}

#[derive(Clone, Copy, Hash, Debug, Default)]
struct Reader {
    habit: Habit,
    /// It missed the page since the last change.
    missed: bool,
    /// It was sent the last change.
    pushed: bool,
}

impl Record {
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The mode that `rank` is told with a copy.
    pub fn mode_for(&self, rank: Rank) -> Mode {
        match self.mode {
            Mode::Invalidate | Mode::Push | Mode::Stream
                if self.readers.get(&rank).is_some_and(|reader| reader.habit.is_believed()) =>
            {
                Mode::Push
            }
            mode => mode,
        }
    }

    /// Whether a rank has released changes of the page since its home is its home.
    pub fn has_changed(&self) -> bool {
        self.writer.is_some()
    }

    /// A thread of `rank` waits for a copy.
    pub fn missed(&mut self, rank: Rank) {
        let reader = self.readers.entry(rank).or_default();
        reader.habit.missed();
        reader.missed = true;
        self.handed(rank);
    }

    /// `rank` gets a copy.
    pub fn handed(&mut self, rank: Rank) {
        if self.holder.replace(rank).is_some_and(|before| before != rank) {
            self.wrote = 0;
        }
    }

    /// `rank` released changes of the page: under which lock, and whether they are a large part of it.
    pub fn released(&mut self, rank: Rank, under: Option<LockId>, large: bool) {
        if under.is_some() && under == self.lock {
            self.bound = self.bound.saturating_add(1);
        } else {
            (self.lock, self.bound, self.turns) = (under, 0, 0);
        }
        if self.writer.replace(rank).is_some_and(|before| before != rank) {
            self.turns = self.turns.saturating_add(1);
        }
        if self.holder.take_if(|holder| *holder == rank).is_some() {
            self.wrote = self.wrote.saturating_add(1);
        }
        self.large = if large && under.is_none() { self.large.saturating_add(1) } else { 0 };
        self.decide();
    }

    fn decide(&mut self) {
        let wish = match self.lock {
            Some(lock) if self.bound >= BOUND && self.turns >= AGREE => {
                if self.wrote >= AGREE {
                    Mode::Migratory { lock }
                } else {
                    Mode::LockBound { lock }
                }
            }
            _ if self.large >= AGREE => Mode::Stream,
            _ => Mode::Invalidate,
        };
        self.dwell = self.dwell.saturating_sub(1);
        if wish != self.mode && self.dwell == 0 {
            self.mode = wish;
            self.dwelt = (self.dwelt * 2).clamp(DWELL, LONGEST_DWELL);
            self.dwell = self.dwelt;
        }
    }

    /// The page has changed, by `writer` alone or by several, and a barrier ends. Returns the ranks to send
    /// the page to.
    pub fn changed(&mut self, writer: Option<Rank>) -> Vec<Rank> {
        let mut pushed = Vec::new();
        self.readers.retain(|&rank, reader| {
            if Some(rank) == writer {
                return true;
            }
            // A rank that neither got the last change nor missed it begins anew.
            let uses = std::mem::take(&mut reader.missed) || reader.pushed;
            reader.pushed = reader.habit.changed();
            if reader.pushed {
                pushed.push(rank);
            }
            uses || reader.pushed
        });
        pushed
    }
}

/// The single writer of a page's last changes, for the root of the barrier.
#[derive(Clone, Copy, Hash, Debug)]
struct Single {
    writer: Rank,
    changes: u8,
    /// Changes that have to agree.
    needed: u8,
}

/// Pages with single writers.
#[derive(Clone, Hash, Debug, Default)]
pub(crate) struct Singles(BTreeMap<PageIndex, Single>);

impl Singles {
    /// The page has changed. Returns its new owner, if it should have one: whoever changes it first, since
    /// its home was chosen without regard to its use.
    pub fn changed(&mut self, page: PageIndex, writer: Option<Rank>) -> Option<Rank> {
        let known = self.0.get_mut(&page);
        match (known, writer) {
            (None, Some(writer)) => {
                self.0.insert(page, Single { writer, changes: 1, needed: 1 });
                Some(writer)
            }
            (None, None) => {
                self.0.insert(page, Single { writer: Rank(0), changes: 0, needed: AGREE });
                None
            }
            (Some(single), writer) => {
                if writer == Some(single.writer) {
                    single.changes = single.changes.saturating_add(1);
                } else {
                    if single.changes >= single.needed {
                        // It had become the owner, which was wrong.
                        single.needed = (single.needed * 2).min(LONGEST_DWELL);
                    }
                    single.changes = u8::from(writer.is_some());
                    single.writer = writer.unwrap_or(single.writer);
                }
                (single.changes >= single.needed).then_some(single.writer)
            }
        }
    }

    /// These pages are freed: their next use is unrelated.
    pub fn forget(&mut self, pages: Extent) {
        take_pages(&mut self.0, pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Rank = Rank(0);
    const B: Rank = Rank(1);
    const LOCK: LockId = LockId(7);

    /// One turn of a rank that gets the page and, if it `writes`, releases it under the lock.
    fn turn(record: &mut Record, rank: Rank, writes: bool) {
        record.handed(rank);
        if writes {
            record.released(rank, Some(LOCK), false);
        }
    }

    #[test]
    fn a_page_that_ranks_write_in_turns_under_one_lock_becomes_migratory() {
        let mut record = Record::default();
        let mut modes = Vec::new();
        for turn_of in [A, B, A, B, A, B, A, B, A] {
            turn(&mut record, turn_of, true);
            modes.push(record.mode());
        }
        assert_eq!(modes[2], Mode::Invalidate, "three releases are two in a row behind the first");
        assert_eq!(modes[3], Mode::Migratory { lock: LOCK });
        assert!(record.mode().rides_on(LOCK) && !record.mode().rides_on(LockId(8)));
    }

    #[test]
    fn a_page_that_others_only_read_under_the_lock_is_bound_but_not_migratory() {
        let mut record = Record::default();
        for _ in 0..8 {
            turn(&mut record, A, true);
            turn(&mut record, Rank(2), false);
            turn(&mut record, B, true);
            turn(&mut record, Rank(3), false);
        }
        assert_eq!(record.mode(), Mode::LockBound { lock: LOCK });
    }

    #[test]
    fn one_rank_alone_or_several_locks_bind_nothing() {
        let mut alone = Record::default();
        let mut several = Record::default();
        for round in 0..20 {
            turn(&mut alone, A, true);
            several.released(if round % 2 == 0 { A } else { B }, Some(LockId(round % 3)), false);
        }
        assert_eq!((alone.mode(), several.mode()), (Mode::Invalidate, Mode::Invalidate));
    }

    #[test]
    fn large_changes_outside_of_locks_are_streamed() {
        let mut record = Record::default();
        record.released(A, None, true);
        assert_eq!(record.mode(), Mode::Invalidate);
        record.released(A, None, true);
        assert_eq!(record.mode(), Mode::Stream);
        let mut locked = Record::default();
        for _ in 0..5 {
            locked.released(A, Some(LOCK), true);
        }
        assert_eq!(locked.mode(), Mode::Invalidate);
    }

    #[test]
    fn a_page_that_changes_its_ways_changes_its_mode_ever_more_rarely() {
        let mut record = Record::default();
        let (mut changes, mut before) = (Vec::new(), record.mode());
        for release in 0..400 {
            // Two large ones, two small ones, and so on.
            record.released(A, None, release % 4 < 2);
            if record.mode() != before {
                before = record.mode();
                changes.push(release);
            }
        }
        let gaps: Vec<i32> = changes.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps[..5].is_sorted() && gaps[0] >= i32::from(DWELL), "{gaps:?}");
        assert!(gaps[4..].iter().all(|&gap| gap >= i32::from(LONGEST_DWELL)), "{gaps:?}");
        assert!(changes.len() < 12, "{changes:?}");
    }

    #[test]
    fn a_reader_is_sent_the_page_for_twice_as_many_changes_after_each_miss() {
        let mut record = Record::default();
        let mut missed = Vec::new();
        for change in 0..70 {
            if record.changed(Some(A)).is_empty() {
                record.missed(B);
                missed.push(change);
            }
        }
        assert_eq!(missed, [0, 2, 5, 10, 19, 36, 69], "pushed 1, 2, 4, 8, 16, 32 times");
        assert_eq!(record.mode_for(B), Mode::Push);
        assert_eq!(record.mode_for(A), Mode::Invalidate);
    }

    #[test]
    fn a_rank_that_wrote_alone_is_not_sent_what_it_has() {
        let mut record = Record::default();
        record.missed(B);
        assert!(record.changed(Some(B)).is_empty());
        assert_eq!(record.changed(Some(A)), [B]);
        assert!(record.changed(Some(A)).is_empty());
    }

    #[test]
    fn a_page_of_several_writers_has_an_owner_once_two_changes_agree() {
        let mut singles = Singles::default();
        let owners = [None, Some(A), Some(B), Some(B)].map(|writer| singles.changed(PageIndex(3), writer));
        assert_eq!(owners, [None, None, None, Some(B)]);
    }

    #[test]
    fn a_single_writer_becomes_the_owner_and_a_mistake_makes_that_harder() {
        let mut singles = Singles::default();
        let page = PageIndex(3);
        let mut changed = |writer| singles.changed(page, writer);
        assert_eq!(changed(Some(A)), Some(A), "the first");
        assert_eq!(changed(Some(A)), Some(A), "and stays it");
        assert_eq!(changed(Some(B)), None, "now two have to agree");
        assert_eq!(changed(Some(B)), Some(B));
        assert_eq!(changed(Some(A)), None, "now four");
        assert_eq!(changed(None), None);
        let owners: Vec<_> = (0..4).map(|_| changed(Some(B))).collect();
        assert_eq!(owners, [None, None, None, Some(B)]);
    }
}
