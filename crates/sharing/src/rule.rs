//! The rules that make the protocols correct, by name, so that a test can leave one out and see the failure.
//!
//! In a build without the feature `mutants` no rule can be left out, and the checks cost nothing.

/// A rule. The code that keeps it explains it, and what goes wrong without it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Rule {
    /// A diff and the twin that follows it come from one snapshot.
    Snapshot,
    /// The twin is made before the page becomes writable.
    TwinFirst,
    /// A dirty page that is invalidated keeps its twin, and the next copy is merged with it.
    ThreeWay,
    /// A release waits for every flush sent so far, a sibling's too.
    Generation,
    /// A copy that may predate the rank's own diff is refused.
    Restart,
    /// A copy older than a notice that came meanwhile is refused.
    Need,
    /// A page fetched ahead is refused like one that was waited for.
    Ahead,
    /// A copy that was not requested, or requested before the own diff, is refused if it may lack changes of
    /// this rank's own.
    Early,
    /// The mode announced by a page's home ends when the home moves.
    Moved,
    /// A page that its home writes unnoticed is compared at each release with the copy handed out.
    Handed,
    /// Copies of one version that differ make a new one, even if the page ends up equal to the first.
    HandedTwice,
    /// A diff or a copy is only taken of closed intervals.
    Cut,
    /// A diff of several intervals is applied at the place of its first.
    First,
    /// A diff ends where its writer learns of another rank's interval of the page, even if the content was
    /// there before.
    Split,
    /// Handing a whole page over ends the diff that was accumulating.
    Finalise,
    /// A page that is written unnoticed is write-protected before another rank gets what is in it.
    Alone,
    /// The directory decides whether data travels.
    Directory,
    /// Write permission only after all acknowledgements.
    Acks,
    /// A message of the next epoch waits for this rank's own departure.
    Park,
    /// A rank arrives only when everything it released is acknowledged.
    ReleaseFence,
    /// A byte is imported only if it is newer.
    Stamps,
    /// A byte seen by two open locks travels with both.
    Carry,
    /// A release takes its bytes out of the sibling scopes' twins.
    SiblingTwin,
    /// A release updates twins that are younger than its own, even where it restored old values.
    Transient,
    /// A release takes its bytes out of the outer twin.
    OuterTwin,
    /// An import goes into every twin as well.
    ImportTwin,
    /// Writes outside of locks are newer than logs.
    OuterLast,
    /// A rank hands on nothing that it has not released.
    Released,
    /// A new home answers no request before it has the page.
    HomePull,
    /// Only a copy without changes of this rank's own is dropped to make room.
    EvictClean,
    /// `sc`: the directory learns that a copy was dropped.
    EvictTold,
    /// An old home keeps the page until the new one has it.
    EvictLent,
    /// `auto`: writes that wait for a request of a lock are available before the lock leaves.
    Owed,
    /// What was written under a lock that was lent is available before the lock leaves.
    Lent,
    /// A rank's own stores go to the home before a direct operation reads or changes the page there.
    DirectRelease,
    /// Changes that a lock's next holder has to see are sent before the barrier.
    Unsent,
    /// The changes of a page that several ranks wrote are sent before any leaves the barrier.
    Disputed,
    /// What a thread outside of a barrier writes while a home moves goes to the new home.
    Outside,
    /// Others learn of the changes of a direct operation.
    DirectTold,
    /// A direct operation makes the own copy stale.
    DirectOwn,
}

impl Rule {
    pub const ALL: [Self; 40] = [
        Self::Snapshot,
        Self::TwinFirst,
        Self::ThreeWay,
        Self::Generation,
        Self::Restart,
        Self::Need,
        Self::Ahead,
        Self::Early,
        Self::Moved,
        Self::Handed,
        Self::HandedTwice,
        Self::Cut,
        Self::First,
        Self::Split,
        Self::Finalise,
        Self::Alone,
        Self::Directory,
        Self::Acks,
        Self::Park,
        Self::ReleaseFence,
        Self::Stamps,
        Self::Carry,
        Self::SiblingTwin,
        Self::Transient,
        Self::OuterTwin,
        Self::ImportTwin,
        Self::OuterLast,
        Self::Released,
        Self::HomePull,
        Self::EvictClean,
        Self::EvictTold,
        Self::EvictLent,
        Self::Owed,
        Self::Lent,
        Self::DirectRelease,
        Self::Unsent,
        Self::Disputed,
        Self::Outside,
        Self::DirectTold,
        Self::DirectOwn,
    ];
}

/// The rule that a test left out.
#[derive(Clone, Copy, Hash, Debug, Default)]
pub(crate) struct Rules {
    #[cfg(feature = "mutants")]
    omitted: Option<Rule>,
}

impl Rules {
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: Rule) {
        self.omitted = Some(rule);
    }

    #[cfg(feature = "mutants")]
    pub fn keep(self, rule: Rule) -> bool {
        self.omitted != Some(rule)
    }

    #[cfg(not(feature = "mutants"))]
    pub const fn keep(self, _rule: Rule) -> bool {
        true
    }
}
