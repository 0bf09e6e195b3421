//! Intervals: a rank's writes between two synchronisations, and the ranks that know of them (Keleher, Cox and
//! Zwaenepoel, ISCA '92).
//!
//! A rank's intervals are numbered. A *vector time* says for each rank up to which interval one has learned
//! of it; knowledge is always a prefix, for each rank. All ranks know the same after a barrier, so records
//! live from one barrier to the next, and a vector time is sent as its difference from the last barrier's.
//!
//! Invariant: `time[r] >= base[r]`, and every record in the store is newer than `base`. The store may hold
//! more than this rank has learned of: a lock's manager keeps the records that releases bring without acting
//! on them. Only `time` says what took effect here.

use std::collections::BTreeMap;

use super::{LockId, Rank};

/// Interval numbers by rank. A rank that is missing stands at the last barrier's number.
pub(crate) type VectorTime = BTreeMap<Rank, u32>;

/// Names an interval: `(rank, number)`.
pub(crate) type IntervalId = (Rank, u32);

#[derive(Clone, Hash, Debug)]
pub(crate) struct Intervals<R> {
    base: VectorTime,
    time: VectorTime,
    store: BTreeMap<IntervalId, R>,
    /// For locks that this rank manages: the time that an acquirer has to learn.
    locks: BTreeMap<LockId, VectorTime>,
    /// The time up to which this rank has informed each manager.
    told: BTreeMap<Rank, VectorTime>,
}

impl<R: Clone> Intervals<R> {
    pub fn new() -> Self {
        Self {
            base: BTreeMap::new(),
            time: BTreeMap::new(),
            store: BTreeMap::new(),
            locks: BTreeMap::new(),
            told: BTreeMap::new(),
        }
    }

    /// The intervals that this rank has learned of, if newer than the last barrier.
    pub fn time(&self) -> VectorTime {
        self.time
            .iter()
            .filter(|(rank, at)| self.base.get(rank) != Some(at))
            .map(|(&rank, &at)| (rank, at))
            .collect()
    }

    pub fn number(&self, rank: Rank) -> u32 {
        self.time.get(&rank).copied().unwrap_or(0)
    }

    /// Sum of the vector time: grows along happens-before.
    pub fn sum(&self) -> u64 {
        self.time.values().map(|&at| u64::from(at)).sum()
    }

    /// The number the next interval of `me` will have.
    pub fn next(&self, me: Rank) -> u32 {
        self.number(me) + 1
    }

    /// Ends an interval of this rank.
    pub fn close(&mut self, me: Rank, record: R) {
        let number = self.next(me);
        self.time.insert(me, number);
        self.store.insert((me, number), record);
    }

    /// This rank's own intervals since the last barrier.
    pub fn own(&self, me: Rank) -> Vec<(IntervalId, R)> {
        self.store.range((me, 0)..=(me, u32::MAX)).map(|(&id, record)| (id, record.clone())).collect()
    }

    /// Records that this rank knows and a rank at `than` does not.
    pub fn unknown_to(&self, than: &VectorTime) -> Vec<(IntervalId, R)> {
        self.between(&self.time, than)
    }

    /// Records that an acquirer at `than` has to learn from `lock`.
    pub fn unknown_of_lock(&self, lock: LockId, than: &VectorTime) -> Vec<(IntervalId, R)> {
        self.locks.get(&lock).map_or_else(Vec::new, |time| self.between(time, than))
    }

    fn between(&self, upto: &VectorTime, than: &VectorTime) -> Vec<(IntervalId, R)> {
        let mut records = Vec::new();
        for (&rank, &last) in upto {
            let first = than.get(&rank).copied().unwrap_or(0).max(self.base.get(&rank).copied().unwrap_or(0));
            if first < last {
                let news = self.store.range((rank, first + 1)..=(rank, last));
                records.extend(news.map(|(&id, record)| (id, record.clone())));
            }
        }
        records
    }

    /// Records for the manager `to`, without those that this rank gave it before.
    pub fn news_for(&mut self, to: Rank) -> Vec<(IntervalId, R)> {
        let told = self.told.entry(to).or_default().clone();
        let records = self.unknown_to(&told);
        self.told.insert(to, self.time());
        records
    }

    /// Stores records without acting on them: an acquirer of `lock` will learn everything up to `upto`.
    pub fn keep_for_lock(&mut self, lock: LockId, records: Vec<(IntervalId, R)>, upto: &[(Rank, u32)]) {
        for (id, record) in records {
            if !self.is_known(id) {
                self.store.insert(id, record);
            }
        }
        let time = self.locks.entry(lock).or_default();
        for &(rank, number) in upto {
            let at = time.entry(rank).or_insert(0);
            *at = number.max(*at);
        }
    }

    /// Whether all ranks knew this interval after the last barrier.
    pub fn is_known(&self, (rank, number): IntervalId) -> bool {
        self.base.get(&rank).is_some_and(|&base| number <= base)
    }

    /// Whether this interval is news.
    pub fn is_news(&self, (rank, number): IntervalId) -> bool {
        number > self.number(rank)
    }

    /// Learns an interval. Records of one rank come in order.
    pub fn learn(&mut self, (rank, number): IntervalId, record: R) {
        if number > self.number(rank) {
            self.time.insert(rank, number);
            self.store.insert((rank, number), record);
        }
    }

    /// After a barrier all ranks know these. Later ones, of threads that took no part in it, live on.
    pub fn barrier(&mut self, known: impl Iterator<Item = IntervalId>) {
        for (rank, number) in known {
            let base = self.base.entry(rank).or_default();
            *base = number.max(*base);
        }
        let base = &self.base;
        let is_later = |rank: &Rank, number: &u32| base.get(rank).is_none_or(|base| number > base);
        self.store.retain(|(rank, number), _| is_later(rank, number));
        self.locks.retain(|_, time| {
            time.retain(|rank, number| is_later(rank, number));
            !time.is_empty()
        });
        self.told.clear();
    }

    /// Like `barrier`, for protocols whose barriers carry a summary instead of the records: numbers start
    /// again.
    pub fn restart(&mut self) {
        self.base.clear();
        self.time.clear();
        self.store.clear();
        self.locks.clear();
        self.told.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_passes_on_what_its_manager_keeps_but_did_not_learn() {
        let (a, b) = (Rank(0), Rank(1));
        let mut writer = Intervals::new();
        writer.close(a, "one");
        writer.close(a, "two");
        let mut manager = Intervals::new();
        manager.keep_for_lock(LockId(1), writer.news_for(b), &[(a, 2)]);
        assert!(writer.news_for(b).is_empty());
        assert_eq!(manager.number(a), 0);
        assert!(manager.unknown_to(&VectorTime::new()).is_empty());
        let knows_one = VectorTime::from([(a, 1)]);
        assert_eq!(manager.unknown_of_lock(LockId(1), &knows_one), vec![((a, 2), "two")]);
        assert!(manager.unknown_of_lock(LockId(2), &knows_one).is_empty());
        assert!(manager.is_news((a, 1)) && manager.is_news((b, 1)));
    }

    #[test]
    fn after_a_barrier_only_news_travel() {
        let a = Rank(0);
        let mut log = Intervals::new();
        log.close(a, 1);
        log.barrier([(a, 1)].into_iter());
        assert!(log.time().is_empty());
        log.close(a, 2);
        assert_eq!(log.time(), VectorTime::from([(a, 2)]));
        assert_eq!(log.unknown_to(&VectorTime::new()), vec![((a, 2), 2)]);
        log.barrier(std::iter::empty());
        assert_eq!(log.own(a), vec![((a, 2), 2)], "it was not told at this barrier");
    }
}
