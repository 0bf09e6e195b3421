//! The rules that prevent late uses, by name, so that a test can leave one out and see the failure.

/// A rule. In a build without the feature `mutants` none can be left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyRule {
    /// A peer answers a revocation only when its uses have ended.
    Drain,
    /// A grant that comes after its revocation opens nothing.
    Floor,
    /// A key opens the memory of its generation only.
    Generation,
    /// A use stays within the memory.
    Bounds,
    /// A use does what the key allows.
    Rights,
    /// Memory is free only when every peer has answered.
    EveryPeer,
    /// An answer counts for the generation that it names.
    Exact,
    /// A memory that a lost peer had a key to is replaced.
    Fence,
    /// No key is given to memory that is being withdrawn or replaced.
    Closed,
    /// A revocation is repeated until it is answered.
    Repeat,
    /// A key in use is not dropped to make room.
    InUse,
}

impl KeyRule {
    pub const ALL: [Self; 11] = [
        Self::Drain,
        Self::Floor,
        Self::Generation,
        Self::Bounds,
        Self::Rights,
        Self::EveryPeer,
        Self::Exact,
        Self::Fence,
        Self::Closed,
        Self::Repeat,
        Self::InUse,
    ];
}

/// The rule that a test left out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rules {
    #[cfg(feature = "mutants")]
    omitted: Option<KeyRule>,
}

impl Rules {
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: KeyRule) {
        self.omitted = Some(rule);
    }

    #[cfg(feature = "mutants")]
    pub fn keep(self, rule: KeyRule) -> bool {
        self.omitted != Some(rule)
    }

    #[cfg(not(feature = "mutants"))]
    pub const fn keep(self, _rule: KeyRule) -> bool {
        true
    }
}
