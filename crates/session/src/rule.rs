//! The machine's rules by name, so that a test can leave one out and see that the simulator notices.

rampool_wire::listed! {
    /// A rule. Only a build with the feature `mutants` can leave one out.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Rule {
        /// No more requests are outstanding than the server granted.
        RequestCredits,
        /// No more bytes are outstanding than the server granted.
        ByteCredits,
        /// Prefetches and write-backs leave credits for what a thread waits for.
        SpareCredits,
        /// Prefetches and write-backs have a window of bytes each.
        BulkWindow,
        /// A control request leaves before everything else.
        ControlFirst,
        /// A demand request leaves before prefetches and write-backs.
        DemandFirst,
        /// What is asked again keeps its order.
        ResendInOrder,
        /// What is asked again after a break keeps its number.
        SameNumber,
        /// No more requests are outstanding than the server remembers the answers to.
        Remembered,
        /// A change waits until the reads of the same bytes have their answers.
        ReadsBeforeChanges,
        /// One request that makes a region is outstanding at a time.
        OneRegionAtATime,
        /// An answer counts for the request of exactly this number.
        Generation,
        /// An answer counts for a request to this server.
        OwnServer,
        /// An answer has the operation of its request.
        OwnOperation,
        /// What comes over a connection that was given up does not count.
        CurrentConnection,
        /// A store is not answered before all of it has left.
        DepartedFirst,
        /// A server that answers in another run's name is not believed.
        SameRun,
        /// A server that takes this client for another member is not believed.
        SameMember,
        /// A server that has given this member up is lost.
        GivenUp,
        /// A server that answers nothing for too long is lost.
        Deadline,
        /// A server that answers other requests meanwhile is not lost.
        Progress,
        /// A server is listened to once more after its deadline.
        LastChance,
        /// Time in which this process did not listen is no chance.
        OwnPauses,
        /// An idle session asks now and then whether the server is there.
        Heartbeat,
        /// A connection that breaks again and again without an answer is not made again.
        BreakLimit,
        /// A request that breaks its connections for too long is not asked again.
        AgeLimit,
        /// Making the connection again ends after the grace time.
        ReconnectLimit,
        /// An attempt to connect that leads nowhere is given up for the next one.
        AttemptLimit,
        /// Attempts to connect are some time apart.
        AttemptPause,
        /// A connection is closed before the operations that use its memory end.
        CloseFirst,
        /// A new connection starts with all its credits.
        FreshCredits,
        /// Damaged bytes are asked for once more.
        AskAgain,
        /// Damaged bytes are asked for once more only.
        AskAgainOnce,
        /// An operation ends with its last part.
        EveryPart,
        /// An operation fails if one of its parts does.
        FailAsOne,
        /// A store that found no room is not done.
        FullIsNotStored,
        /// A server that drains keeps working.
        DrainingWorks,
        /// A store goes to every holder of its pages.
        StoreAtAll,
        /// A store ends when every holder has answered.
        AwaitAll,
        /// A store does not fail with a holder while another one is left.
        OneHolderSuffices,
        /// A store that another holder has yet to answer does not fail with this one.
        OtherAnswers,
        /// A store fails with the last holder.
        OneHolderIsNeeded,
        /// What a lost holder was asked for comes from the other one.
        FetchFromOther,
        /// The other holder is asked by its own name for the region.
        OwnName,
        /// Requests are of a size that each holder takes.
        FitsBoth,
        /// Pages are fetched elsewhere while a holder's connection is broken.
        ReadElsewhere,
        /// Pages are fetched elsewhere while a holder is silent.
        Suspicion,
        /// The answer of a holder that was asked in vain is expected, and has no place.
        LateAnswer,
        /// Only a server whose pages all have another holder is given up early.
        OnlySpareEarly,
        /// Time in which this process did nothing does not count for a broken connection.
        OwnPausesDown,
        /// A holder is not asked for pages that it has missed.
        MissedIsNotRead,
        /// What is stored or discarded while a holder is absent, it has missed.
        MissesWhileAbsent,
        /// What was on its way to a holder when that became absent, it has missed.
        MissesWhatWasUnderWay,
        /// A holder without room has missed the store, which is done if another one has it.
        FullIsMissed,
        /// A holder that is back gets what it has missed.
        CatchUp,
        /// What a holder has stored or discarded again, it has missed no longer.
        StoreRepairs,
        /// A piece whose pages change while it is read is not stored.
        VoidPiece,
        /// A piece does not begin while a change of its pages is under way.
        QuietPiece,
        /// While threads wait for pages, one piece at a time is under way.
        PiecesGiveWay,
        /// ... but one is.
        PiecesGoOn,
        /// Where a region is made later, it has missed everything.
        NewNameMissedAll,
        /// A holder is given up early also where another one has missed some pages.
        SpareByPages,
        /// A page that only an absent holder has is waited for.
        OnlyHolderIsAwaited,
        /// ... but not for ever.
        GoneIsNotAwaited,
        /// Where other holders are there, a holder that is lost costs the pages that those have
        /// missed, and no more.
        LosesPagesOnly,
        /// A region that was freed while a holder was absent is freed there later.
        FreesLater,
        /// What a holder has missed of a region, it has missed of what is made of that.
        MissedIsInherited,
        /// What a holder had missed of a region, it has missed for the process that takes the region over.
        MissedIsTakenOver,
        /// A region that is handed over is freed where the other process cannot have it.
        FreesWhatIsLeft,
        /// What the other process has not taken over is freed.
        FreesWhatIsNotTaken,
        /// A region that may have been taken over at a holder that became absent is freed there later.
        FreesWhatMayBeTaken,
        /// A server that is joined anew may be another run of it, with another lease.
        RenewedIsAnother,
        /// ... and has no region.
        RenewedHasNothing,
        /// ... and can be what others get what they have missed from, once it has that.
        RenewedIsNotLost,
        /// ... and is not waited for: it brings nothing.
        RenewedIsNotAwaited,
        /// ... and its connections have new numbers.
        RenewedNumbersGoOn,
        /// A server that never was here takes nothing with it when it is lost.
        NothingIsNotLost,
        /// Others take the place of a server that is away.
        Rebuilds,
        /// ... but not at once.
        RebuildsLate,
        /// ... and only where there are enough.
        RebuildsWhereOthersAre,
        /// A server that drains holds no pages.
        DrainingIsOut,
        /// The last server that can hold pages holds them.
        LastOneStays,
        /// Who comes to hold a page has missed it.
        NewHolderMissedAll,
        /// What is left at a server is of no use once the page changes.
        LeftIsOutdated,
        /// What only a former holder has is read there.
        LeftIsRead,
        /// What is left at a server is dropped there.
        LeftIsDropped,
        /// ... but not before all holders have it.
        LeftUntilCopied,
        /// A server that drains is left when nothing is left there.
        LeavesEmpty,
        /// With a server that holds nothing, nothing is lost.
        NothingLeftIsNotLost,
        /// A piece from before pages got other holders brings nothing.
        VoidWhereHoldersChange,
        /// A region of another process has the holders that it would have here.
        OtherViewIsTurned,
        /// A read that takes longer than nearly all others at its server turns to another holder.
        HedgesLateReads,
        /// ... as far as reads have earned that.
        HedgesFewReads,
        /// The first answer to a read counts, whichever holder it was asked of last.
        FirstAnswerCounts,
        /// A slow server is not read where another one has the pages.
        SlowIsAvoided,
        /// ... but now and then, so that it is seen when that is over.
        SlowIsProbed,
    }
}

/// Which rule a test left out.
#[derive(Clone, Copy, Debug, Default)]
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
    #[inline]
    pub const fn keep(self, _rule: Rule) -> bool {
        true
    }
}
