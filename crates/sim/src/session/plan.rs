//! What a seed decides before a run begins.

use std::time::Duration;

use rampool_session::Rule;

use crate::rng::Rng;

/// What goes wrong in a run, each kind in half of the seeds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Faults {
    pub cuts: bool,
    /// One direction, or both, carry nothing for a while.
    pub silence: bool,
    pub slow: bool,
    /// The client itself gets no time.
    pub pauses: bool,
    /// A server ends and is started again.
    pub restarts: bool,
    pub full: bool,
    pub drain: bool,
    pub damage: bool,
    /// A server answers what it was not asked, or in another's name.
    pub lies: bool,
    /// Attempts to connect lead nowhere.
    pub hangs: bool,
    /// A request cuts its connection whenever it comes.
    pub poison: bool,
    /// A server takes this member for gone.
    pub dismissals: bool,
}

impl Faults {
    pub const NONE: Self = Self {
        cuts: false,
        silence: false,
        slow: false,
        pauses: false,
        restarts: false,
        full: false,
        drain: false,
        damage: false,
        lies: false,
        hangs: false,
        poison: false,
        dismissals: false,
    };
}

/// One run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub servers: u16,
    /// Of each page.
    pub copies: u8,
    pub op_deadline: Duration,
    pub grace: Duration,
    pub heartbeat: Duration,
    pub max_requests: u32,
    pub max_bytes: u32,
    /// Operations of the program in a burst, at most.
    pub burst: u64,
    /// The program submits nothing for long times.
    pub idle: bool,
    /// It only updates.
    pub updates: bool,
    /// It only stores and fetches.
    pub pages: bool,
    /// Bytes leave slowly.
    pub narrow: bool,
    /// The kind of lie; none: any.
    pub lie: Option<u64>,
    /// The program forks a child that goes on beside it.
    pub child: bool,
    /// Servers that are lost are joined anew.
    pub renews: bool,
    /// A thread of the program fetches a page every few milliseconds, also when everything else is over.
    pub watches: bool,
    /// A server comes in addition.
    pub grows: bool,
    /// Answers of a server are late for a while, though it is never silent.
    pub lags: bool,
    pub faults: Faults,
    /// A rule that is left out.
    pub omit: Option<Rule>,
}

impl Plan {
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut half = || rng.one_in(2);
        let quiet = half() && half() && half();
        let mut faults = Faults {
            cuts: half(),
            silence: half(),
            slow: half(),
            pauses: half(),
            restarts: half() && half(),
            full: half(),
            drain: half(),
            damage: half(),
            lies: half() && half(),
            hangs: half(),
            poison: half() && half(),
            dismissals: half() && half() && half(),
        };
        if quiet {
            faults = Faults::NONE;
        }
        let op_ms = [1000, 10_000][rng.index(2)];
        let many = rng.one_in(4);
        let servers = u16::try_from(rng.between(1, 4)).expect("small");
        Self {
            seed,
            servers,
            // The seed's lowest bit.
            copies: if servers > 1 && seed.is_multiple_of(2) { 2 } else { 1 },
            op_deadline: Duration::from_millis(op_ms),
            grace: Duration::from_millis(op_ms * rng.between(1, 2)),
            heartbeat: Duration::from_millis(op_ms / 5),
            max_requests: if many { 1000 } else { [4, 16, 64][rng.index(3)] },
            max_bytes: [256 << 10, 1 << 20, 4 << 20][rng.index(3)],
            burst: if many { 400 } else { 12 },
            idle: rng.one_in(4),
            updates: false,
            pages: false,
            narrow: rng.one_in(3),
            lie: None,
            child: servers > 1 && seed.is_multiple_of(2) && !faults.lies && !rng.one_in(4),
            renews: servers > 1 && seed.is_multiple_of(2) && !faults.lies && rng.one_in(2),
            watches: seed.is_multiple_of(2) && rng.one_in(6),
            grows: servers > 1 && seed.is_multiple_of(2) && !faults.lies && rng.one_in(3),
            lags: servers > 1 && seed.is_multiple_of(2) && rng.one_in(4),
            faults,
            omit: None,
        }
    }

    /// A run in which this rule has much to do, if a seed alone rarely gives it that.
    #[must_use]
    pub fn stressing(rule: Rule, seed: u64) -> Self {
        let plan = Self::from_seed(seed).alone();
        let none = Faults::NONE;
        let lies =
            |lie| Self { faults: Faults { lies: true, ..none }, lie: Some(lie), servers: 3, ..plan.clone() };
        match rule {
            Rule::Remembered => Self {
                servers: 1,
                copies: 1,
                max_requests: 1000,
                burst: 400,
                updates: true,
                faults: Faults { cuts: true, slow: true, ..none },
                ..plan
            },
            Rule::Generation => Self { pages: true, ..lies(0) },
            Rule::OwnOperation => lies(1),
            Rule::OwnServer => lies(2),
            Rule::DepartedFirst => Self { pages: true, narrow: true, ..lies(3) },
            Rule::SameMember => {
                Self { copies: 1, faults: Faults { lies: true, cuts: true, ..none }, lie: Some(3), ..plan }
            }
            Rule::GivenUp => Self { faults: Faults { dismissals: true, ..none }, ..plan },
            Rule::LastChance | Rule::OwnPauses => {
                Self { faults: Faults { silence: true, pauses: true, ..none }, narrow: true, ..plan }
            }
            Rule::BreakLimit | Rule::AgeLimit => {
                Self { faults: Faults { poison: true, ..none }, idle: rule == Rule::BreakLimit, ..plan }
            }
            Rule::ReconnectLimit | Rule::AttemptLimit | Rule::AttemptPause => {
                Self { faults: Faults { cuts: true, hangs: true, silence: true, ..none }, ..plan }
            }
            Rule::StoreAtAll | Rule::AwaitAll | Rule::OneHolderSuffices | Rule::OneHolderIsNeeded => {
                plan.with_copies(Faults { cuts: true, silence: true, restarts: true, ..none })
            }
            Rule::FetchFromOther | Rule::OwnName | Rule::OnlySpareEarly => {
                plan.with_copies(Faults { silence: true, dismissals: true, ..none })
            }
            Rule::FitsBoth => {
                Self { max_bytes: 256 << 10, ..plan.with_copies(Faults { cuts: true, hangs: true, ..none }) }
            }
            Rule::LateAnswer | Rule::Suspicion => plan.with_copies(Faults { silence: true, ..none }),
            Rule::ReadElsewhere => plan.with_copies(Faults { cuts: true, hangs: true, ..none }),
            Rule::MissedIsNotRead
            | Rule::MissesWhileAbsent
            | Rule::MissesWhatWasUnderWay
            | Rule::CatchUp
            | Rule::StoreRepairs
            | Rule::VoidPiece
            | Rule::NewNameMissedAll
            | Rule::FreesLater
            | Rule::MissedIsInherited
            | Rule::SpareByPages
            | Rule::OnlyHolderIsAwaited => Self {
                burst: 40,
                ..plan.with_copies(Faults { cuts: true, hangs: true, silence: true, ..none })
            },
            Rule::QuietPiece | Rule::PiecesGiveWay | Rule::PiecesGoOn => Self {
                watches: true,
                burst: 40,
                ..plan.with_copies(Faults { cuts: true, hangs: true, silence: true, ..none })
            },
            Rule::MissedIsTakenOver
            | Rule::FreesWhatIsLeft
            | Rule::FreesWhatIsNotTaken
            | Rule::FreesWhatMayBeTaken => Self {
                child: true,
                burst: 40,
                ..plan.with_copies(Faults { cuts: true, hangs: true, silence: true, ..none })
            },
            Rule::OtherAnswers => Self {
                burst: 40,
                narrow: true,
                ..plan.with_copies(Faults { cuts: true, silence: true, full: true, ..none })
            },
            Rule::LosesPagesOnly => Self {
                burst: 40,
                ..plan.with_copies(Faults { cuts: true, hangs: true, silence: true, restarts: true, ..none })
            },
            Rule::RenewedIsAnother
            | Rule::RenewedHasNothing
            | Rule::RenewedIsNotLost
            | Rule::RenewedIsNotAwaited
            | Rule::RenewedNumbersGoOn
            | Rule::NothingIsNotLost => Self {
                renews: true,
                burst: 40,
                ..plan.with_copies(Faults { cuts: true, hangs: true, silence: true, restarts: true, ..none })
            },
            Rule::FullIsMissed => plan.with_copies(Faults { full: true, silence: true, ..none }),
            Rule::GoneIsNotAwaited => Self {
                burst: 40,
                op_deadline: Duration::from_secs(1),
                ..plan.with_copies(Faults { cuts: true, hangs: true, silence: true, ..none })
            },
            Rule::OwnPausesDown => plan.with_copies(Faults { cuts: true, hangs: true, pauses: true, ..none }),
            _ => plan.moving(rule),
        }
    }

    /// One process, on the servers that there are at first.
    fn alone(self) -> Self {
        Self { child: false, renews: false, watches: false, grows: false, lags: false, ..self }
    }

    /// The same for rules about servers that are out, drain or come in addition.
    fn moving(self, rule: Rule) -> Self {
        let from = |first| Rule::ALL.iter().skip_while(move |of| **of != first);
        if from(Rule::HedgesLateReads).any(|of| *of == rule) {
            return self.lagging();
        }
        if !from(Rule::Rebuilds).any(|of| *of == rule) {
            return self;
        }
        let grows = self.seed.is_multiple_of(2);
        let cuts = rule != Rule::OtherViewIsTurned;
        let faults = Faults { cuts, silence: true, restarts: true, drain: true, ..Faults::NONE };
        Self { renews: true, grows, child: !cuts, burst: 40, ..self.with_copies(faults) }
    }

    /// The same for rules about servers that are slow: a thread reads page after page.
    fn lagging(self) -> Self {
        let op_deadline = Duration::from_secs(2);
        let (grace, heartbeat) = (op_deadline, op_deadline / 5);
        let plan = Self { servers: 2, ..self.with_copies(Faults::NONE) };
        Self { lags: true, watches: true, burst: 1, op_deadline, grace, heartbeat, ..plan }
    }

    /// Whether nothing is wrong but that servers are slow now and then.
    #[must_use]
    pub fn only_lags(&self) -> bool {
        self.lags && self.watches && self.burst == 1 && self.faults == Faults::NONE
    }

    /// Two copies, little work and these faults.
    fn with_copies(self, faults: Faults) -> Self {
        let (servers, op_deadline) = (self.servers.max(2), Duration::from_secs(10));
        let (grace, heartbeat) = (op_deadline, op_deadline / 5);
        let (burst, narrow, pages, idle) = (12, false, true, false);
        let (max_requests, max_bytes) = (64, 4 << 20);
        Self {
            servers,
            copies: 2,
            op_deadline,
            grace,
            heartbeat,
            burst,
            narrow,
            pages,
            idle,
            max_requests,
            max_bytes,
            faults,
            ..self
        }
    }

    /// Bytes that this server lets be outstanding.
    #[must_use]
    pub fn max_bytes(&self, server: usize) -> u32 {
        if self.copies > 1 && server % 2 == 1 { self.max_bytes / 2 } else { self.max_bytes }
    }
}
