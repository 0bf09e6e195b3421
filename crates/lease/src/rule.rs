//! The rules that keep tenants apart, by name, so that a test can leave one out and see the failure.

rampool_wire::listed! {
    /// A rule. In a build without the feature `mutants` none can be left out.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum TenantRule {
        /// A tenant pays for its turns.
        Turns,
        /// A connection pays for its turns, among those of its tenant.
        OwnTurns,
        /// Who was idle has saved nothing.
        Idle,
        /// What is done outside of turns is paid for.
        Outside,
        /// A clone has what changes before its turn as it was.
        CopyFirst,
        /// What a clone is still to have is not changed in place.
        Wanted,
        /// Clones of a region that is freed are given up.
        StopClones,
        /// A lease uses no more than it was granted.
        Room,
        /// A tenant has no more memory than its quota.
        Quota,
        /// A tenant has no more than its part of the places for leases.
        Places,
        /// A member that has lost its connection counts as a connection.
        Lost,
        /// A lease's ticket is of use to its tenant only.
        Ticket,
        /// What a closed lease had is its tenant's no more.
        Closed,
    }
}

/// The rule that a test left out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
    #[cfg(feature = "mutants")]
    omitted: Option<TenantRule>,
}

impl Kept {
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: TenantRule) {
        self.omitted = Some(rule);
    }

    #[cfg(feature = "mutants")]
    pub fn keep(self, rule: TenantRule) -> bool {
        self.omitted != Some(rule)
    }

    #[cfg(not(feature = "mutants"))]
    pub const fn keep(self, _rule: TenantRule) -> bool {
        true
    }
}
