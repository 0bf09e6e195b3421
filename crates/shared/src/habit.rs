//! Something that is done as long as it mostly pays, and tried again now and then: later each time that it
//! does not.

use rampool_sharing::Stats;

/// So many tries are judged together.
const TRIES: u32 = 16;
/// Occasions that are left out after tries that did not pay; doubled each time.
const PAUSE: u32 = 256;
const LONGEST_PAUSE: u32 = 1 << 16;

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Habit {
    tries: u32,
    paid: u32,
    /// Occasions left of the pause.
    left: u32,
    next_pause: u32,
}

impl Habit {
    pub fn new() -> Self {
        Self { tries: 0, paid: 0, left: 0, next_pause: PAUSE }
    }

    /// An occasion. Whether to take it.
    pub fn takes(&mut self) -> bool {
        let takes = self.left == 0;
        self.left = self.left.saturating_sub(1);
        takes
    }

    /// These tries are over, and so many of them have paid.
    pub fn tried(&mut self, tries: u32, paid: u32) {
        self.tries += tries;
        self.paid += paid;
        if self.tries < TRIES {
            return;
        }
        if self.paid * 2 >= self.tries {
            self.next_pause = PAUSE;
        } else {
            self.left = self.next_pause;
            self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
        }
        (self.tries, self.paid) = (0, 0);
    }
}

/// The habits of a rank's threads.
#[derive(Debug)]
pub(super) struct Habits {
    /// Threads that begin an operation take messages.
    pub promptness: Habit,
    /// A thread that begins to wait rings no doorbell yet.
    pub patience: Habit,
    /// The locks that had been handed over, and wanted back, when that was judged last.
    judged: (u64, u64),
}

impl Habits {
    pub fn new() -> Self {
        Self { promptness: Habit::new(), patience: Habit::new(), judged: (0, 0) }
    }

    /// Messages have come, and a thread begins an operation. Whether it takes them: not while locks that
    /// leave so early are mostly wanted back at once. Then each rank does more under a lock at a time, by the
    /// time that the service thread takes to wake up.
    pub fn takes_messages(&mut self, stats: &Stats) -> bool {
        let since = |count: u64, before: &mut u64| {
            u32::try_from(count - std::mem::replace(before, count)).unwrap_or(u32::MAX)
        };
        let handed_over = since(stats.handed_over, &mut self.judged.0);
        let wanted_back = since(stats.wanted_back, &mut self.judged.1);
        let takes = self.promptness.takes();
        if takes {
            self.promptness.tried(handed_over, handed_over.saturating_sub(wanted_back));
        }
        takes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of these occasions are taken, where a try pays as `pays` says.
    fn taken(habit: &mut Habit, occasions: u32, pays: impl Fn(u32) -> bool) -> u32 {
        let mut taken = 0;
        for occasion in 0..occasions {
            if habit.takes() {
                taken += 1;
                habit.tried(1, pays(occasion).into());
            }
        }
        taken
    }

    #[test]
    fn what_pays_every_second_time_is_always_done() {
        assert_eq!(taken(&mut Habit::new(), 100_000, |occasion| occasion % 2 == 0), 100_000);
    }

    #[test]
    fn what_does_not_pay_becomes_rare_and_is_done_again_once_it_does() {
        let mut habit = Habit::new();
        assert!(taken(&mut habit, 1_000_000, |_| false) < 500);
        assert!(taken(&mut habit, 1_000_000, |_| true) > 900_000);
        // From then on it is given up no sooner than at first.
        assert_eq!(taken(&mut habit, TRIES + PAUSE, |_| false), TRIES);
    }

    #[test]
    fn messages_are_left_to_the_service_thread_where_locks_are_wanted_back_at_once() {
        let taken = |wanted_back: u64| {
            let (mut habits, mut stats, mut taken) = (Habits::new(), Stats::default(), 0);
            for _ in 0..10_000 {
                taken += u32::from(habits.takes_messages(&stats));
                stats.handed_over += 4;
                stats.wanted_back += wanted_back;
            }
            taken
        };
        assert_eq!(taken(1), 10_000);
        assert!(taken(4) < 200);
    }
}
