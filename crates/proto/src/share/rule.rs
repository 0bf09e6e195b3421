//! The rules that make the protocols right, by name, so that a test can leave one out and see that it is caught.
//!
//! In a build without the feature `mutants` nothing can be left out, and the questions cost nothing.

/// A rule. What it demands, and what goes wrong without it, is said where it is kept.
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
    /// What comes ahead of its use is refused like what was waited for.
    Ahead,
    /// What nobody asked for, or asked for before the own diff, is refused if it may lack changes of this rank's own.
    Early,
    /// What a page's home has told about its mode ends when the home moves.
    Moved,
    /// A page that its home writes unnoticed is compared at each release with what was handed out.
    Handed,
    /// Copies of one version that differ make a new one, also where the page is in the end what it was in the first.
    HandedTwice,
    /// A diff or a copy is only taken of closed intervals.
    Cut,
    /// A diff of several intervals is applied at the place of its first.
    First,
    /// A diff ends where its writer learns of another rank's interval of the page, even if the content was there before.
    Split,
    /// Handing a whole page over ends the diff that was accumulating.
    Finalise,
    /// The directory decides whether data travels.
    Directory,
    /// Write permission only after all acknowledgements.
    Acks,
    /// A message of the next epoch waits for this rank's own departure.
    Park,
    /// A rank arrives only when what it released is acknowledged.
    ReleaseFence,
    /// A byte is imported only if it is newer.
    Stamps,
    /// A byte seen by two open locks travels with both.
    Carry,
    /// A release takes its bytes out of the sibling scopes' twins.
    SiblingTwin,
    /// A release brings twins that are younger than its own up to date, also where it put old values back.
    Transient,
    /// A release takes its bytes out of the outer twin.
    OuterTwin,
    /// An import goes into every twin as well.
    ImportTwin,
    /// What was written outside of locks is newer than what logs say.
    OuterLast,
    /// A rank hands on nothing that it has not released.
    Released,
    /// A new home answers nobody before it has the page.
    HomePull,
    /// Only a copy without changes of this rank's own is forgotten to make room.
    EvictClean,
    /// `sc`: the directory learns that a copy was forgotten.
    EvictTold,
    /// An old home keeps the page until the new one has it.
    EvictLent,
    /// `auto`: what waits until somebody asks for a lock is available before the lock leaves.
    Owed,
    /// What was stored here goes to the home before a direct operation reads or changes it there.
    DirectRelease,
    /// Others learn of what a direct operation changed.
    DirectTold,
    /// A direct operation makes the own copy stale.
    DirectOwn,
}

impl Rule {
    pub const ALL: [Self; 35] = [
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
        Self::DirectRelease,
        Self::DirectTold,
        Self::DirectOwn,
    ];
}

/// Which rule a test left out.
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
