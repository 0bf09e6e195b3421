//! A log limiter for what peers cause again and again: the first events in full, then a count.
//!
//! Any peer that reaches a server's port can cause log lines as often as it likes, and so can any client. In
//! each period an event is logged when it is seen for the first time (or the first few times), and once more,
//! with a count, when the period is over. Only a bounded number of different events are kept apart; those
//! beyond count together. So a period costs a bounded number of lines and bytes.

use std::collections::BTreeMap;

use super::Tick;

/// Events of one source and one kind, or `None` for all beyond those that are kept apart.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Repeated<K> {
    pub what: Option<K>,
    pub times: u64,
}

/// Decides which events are logged, and counts the others.
///
/// Invariant: the events logged in full, and those that [`LogLimiter::tell`] has counted or will count, are
/// all events.
#[derive(Debug)]
pub struct LogLimiter<K> {
    period_ms: u64,
    most: usize,
    in_full: u64,
    began: Option<Tick>,
    /// How many there were of each.
    known: BTreeMap<K, u64>,
    others: u64,
}

impl<K: Ord + Clone> LogLimiter<K> {
    /// In each period of so many milliseconds, so many different ones are kept apart.
    #[must_use]
    pub fn new(period_ms: u64, most: usize) -> Self {
        Self { period_ms, most, in_full: 1, began: None, known: BTreeMap::new(), others: 0 }
    }

    /// So many of each kind are logged in a period, instead of one.
    #[must_use]
    pub fn in_full(self, in_full: u64) -> Self {
        Self { in_full, ..self }
    }

    /// Takes an event. True: log it now; false: it is counted.
    pub fn hear(&mut self, now: Tick, what: K) -> bool {
        self.began.get_or_insert(now);
        if let Some(times) = self.known.get_mut(&what) {
            *times += 1;
            return *times <= self.in_full;
        }
        let is_kept = self.known.len() < self.most;
        if is_kept {
            self.known.insert(what, 1);
        } else {
            self.others += 1;
        }
        is_kept
    }

    /// What is to be told now, or, without a time, at the end.
    pub fn due(&mut self, now: Option<Tick>) -> Vec<Repeated<K>> {
        match now {
            Some(now) => self.tell(now),
            None => self.tell_all(),
        }
    }

    /// The count of a period that is over, if there is one. The next period begins with the next event.
    fn tell(&mut self, now: Tick) -> Vec<Repeated<K>> {
        match self.began {
            Some(began) if now.0 >= began.0.saturating_add(self.period_ms) => self.tell_all(),
            _ => Vec::new(),
        }
    }

    /// The events that were not logged so far, before the end.
    fn tell_all(&mut self) -> Vec<Repeated<K>> {
        self.began = None;
        let known = std::mem::take(&mut self.known)
            .into_iter()
            .map(|(what, times)| Repeated { what: Some(what), times: times.saturating_sub(self.in_full) });
        let others = Repeated { what: None, times: std::mem::take(&mut self.others) };
        known.chain([others]).filter(|repeated| repeated.times > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_is_said_and_the_rest_is_counted_until_the_minute_is_over() {
        let mut limiter = LogLimiter::new(60_000, 2);
        assert!(limiter.hear(Tick(5), "a"));
        assert!(!limiter.hear(Tick(6), "a") && !limiter.hear(Tick(60_004), "a"));
        assert!(limiter.hear(Tick(7), "b"));
        assert!(!limiter.hear(Tick(8), "c") && !limiter.hear(Tick(9), "d"), "two are kept apart");
        assert_eq!(limiter.tell(Tick(60_004)), []);
        assert_eq!(
            limiter.tell(Tick(60_005)),
            [Repeated { what: Some("a"), times: 2 }, Repeated { what: None, times: 2 }]
        );
        assert_eq!(limiter.tell(Tick(600_000)), []);
        assert!(limiter.hear(Tick(600_000), "a"), "another period");
        assert_eq!(limiter.tell_all(), []);
    }

    #[test]
    fn the_first_few_are_said_where_that_is_asked_for() {
        let mut limiter = LogLimiter::new(60_000, 1).in_full(3);
        let said = (0..10).filter(|_| limiter.hear(Tick(1), "a")).count();
        assert_eq!((said, limiter.hear(Tick(1), "b")), (3, false));
        let counted = [Repeated { what: Some("a"), times: 7 }, Repeated { what: None, times: 1 }];
        assert_eq!(limiter.tell(Tick(60_001)), counted);
    }

    proptest! {
        #[test]
        fn nothing_that_was_heard_is_forgotten_and_few_lines_say_it(
            heard in proptest::collection::vec((0u64..50, 0u32..12), 0..400),
        ) {
            let (mut limiter, mut now, mut told, mut lines) = (LogLimiter::new(100, 4), 0, 0, 0);
            for (pause, what) in &heard {
                now += pause;
                let repeated = limiter.tell(Tick(now));
                told += repeated.iter().map(|repeated| repeated.times).sum::<u64>();
                lines += repeated.len() as u64;
                let said = u64::from(limiter.hear(Tick(now), *what));
                (told, lines) = (told + said, lines + said);
                prop_assert!(limiter.known.len() <= 4);
            }
            told += limiter.tell_all().iter().map(|repeated| repeated.times).sum::<u64>();
            prop_assert_eq!(told, heard.len() as u64);
            prop_assert!(lines <= 9 * (now / 100 + 1));
        }
    }
}
