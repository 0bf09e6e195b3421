//! Broken rules, to show that the oracle sees each.

rampool_wire::listed! {
    /// One rule of the runtime or of the servers that is broken on purpose, from time to time.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Mutation {
        /// A store is acknowledged although one of its pages was never kept.
        StoreLosesPage,
        /// A fetch brings the page next to the one asked for.
        FetchShifted,
        /// Write protection is left out at an install.
        ProtectionIgnored,
        /// A page with content is reported as zero.
        ContentReportedZero,
        /// A page that was written is reported as unchanged.
        WrittenReportedUnchanged,
        /// A page that comes back from a batch comes back as zeroes.
        StagedReturnsZero,
        /// A batch loses its frames when its store starts, not when it is released.
        BatchReleasedEarly,
        /// The servers do not hear that a page may be dropped.
        DiscardLost,
        /// A wake-up is lost.
        WakeLost,
        /// An install that failed is not reported.
        FailureUnreported,
        /// A batch is never given back.
        BatchLeaked,
        /// A page that refused to leave is reported as moved.
        BusyReportedMoved,
        /// Pages are filled beyond what was said.
        ExtraFrames,
        /// The cache is not told that there was a page already where zeroes were to be installed: one that
        /// was given up, and is still to go, counts as resident.
        PresenceUnreported,
        /// Memory that was read to be given up before it was adopted is adopted with that content.
        AdoptionForgetsRemovals,
        /// Of events that were read together, the cache is told of one, and what follows is carried out,
        /// before it is told of the next one, which is a removal.
        ActsBeforeRemove,
        /// As before, and the next one is an unmapping.
        ActsBeforeUnmap,
        /// As before, and the next one is a move.
        ActsBeforeRemap,
        /// As before, and the next one is a fork.
        ActsBeforeFork,
        /// The cache is not told that the kernel has dropped the protection of pages.
        MergesUnreported,
    }
}
