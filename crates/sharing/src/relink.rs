//! Decisions about a cut connection between two ranks: which rank makes a new one, when, until when, and
//! which process may use it.
//!
//! The rank that connected while the ranks met connects again, since that way is known to work. The other
//! cannot know such a way; it *probes*: it checks whether the process still listens, since a killed process
//! never comes back, and no rank should wait for it.
//!
//! ```text
//!            cut                   Dial, Probe                 asked / resumed
//!   Up ------------> Down(pausing) -----------> Down(trying) -------------------> Up
//!                         ^        came_to(failed)   |
//!                         +--------------------------+
//!                         | no process listens any more, or it takes too long
//!                         v
//!                       Over
//! ```
//! Attempts of a pair are numbered by the rank that connects. One that was overtaken by a later one is
//! refused, so of several simultaneous connections the last counts. If a process no longer listens, its own
//! machine reports that at once. A refusal from another machine may come from a firewall; it has to last for
//! [`RelinkTiming::sure_us`].

use super::control::Resume;

/// How long and how often to try. Microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RelinkTiming {
    /// A cut connection is given up after this.
    pub grace_us: u64,
    /// The pause after an attempt that failed, at first, and at most; it doubles.
    pub least_pause_us: u64,
    pub most_pause_us: u64,
    /// A process on another machine that refuses connections for this long has ended.
    pub sure_us: u64,
}

impl RelinkTiming {
    /// With the default pauses.
    #[must_use]
    pub fn new(grace_us: u64) -> Self {
        Self { grace_us, least_pause_us: 20_000, most_pause_us: 500_000, sure_us: 1_000_000 }
    }
}

/// What to do now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Connect, and ask to resume ([`Resume`]). Report the outcome: [`Relink::came_to`], [`Relink::resumed`].
    Dial { attempt: u32 },
    /// Check whether the process listens, and report the outcome.
    Probe,
    /// The rank is lost. Returned once.
    GiveUp(Verdict),
}

/// Why a rank is given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Its process has ended.
    Ended,
    /// This many attempts failed.
    TooLong { tries: u32 },
}

/// The outcome of an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attempt {
    /// No process listens there.
    Refused,
    /// No answer came, or the network failed.
    Failed,
    /// A process listens there.
    Answered,
}

/// See the module. One for each connection that may be cut.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Relink {
    timing: RelinkTiming,
    dials: bool,
    near: bool,
    /// The last attempt that was made, or accepted.
    attempt: u32,
    state: State,
    rules: Rules,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum State {
    Up,
    Down(Down),
    Over,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Down {
    until_us: u64,
    /// When to try next; `None` during an attempt.
    due_us: Option<u64>,
    tries: u32,
    /// Since when every attempt was refused.
    refused_us: Option<u64>,
    ended: bool,
}

impl Relink {
    /// `dials`: this rank connected to the other. `near`: the other is on this machine.
    #[must_use]
    pub fn new(timing: RelinkTiming, dials: bool, near: bool) -> Self {
        Self { timing, dials, near, attempt: 0, state: State::Up, rules: Rules::default() }
    }

    /// Leaves a rule out, so that a test sees the failure.
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: RelinkRule) {
        self.rules.omit(rule);
    }

    /// The connection is broken. It is given up at `until_us`, or after the grace time.
    pub fn cut(&mut self, now_us: u64, until_us: Option<u64>) {
        if self.state == State::Up {
            // Mostly the other end reconnects by itself before a check is necessary.
            let due_us = if self.dials { now_us } else { now_us + self.timing.least_pause_us };
            let until_us = until_us.unwrap_or(now_us + self.timing.grace_us);
            self.state = State::Down(Down {
                until_us,
                due_us: Some(due_us),
                tries: 0,
                refused_us: None,
                ended: false,
            });
        }
    }

    #[must_use]
    pub fn is_down(&self) -> bool {
        matches!(self.state, State::Down(_))
    }

    /// Whether this is the attempt that is awaited.
    #[must_use]
    pub fn awaits(&self, attempt: u32) -> bool {
        self.is_down() && self.dials && self.attempt == attempt
    }

    /// What to do now, if anything.
    pub fn poll(&mut self, now_us: u64) -> Option<Step> {
        let State::Down(down) = &mut self.state else { return None };
        let verdict = if down.ended {
            Verdict::Ended
        } else if now_us >= down.until_us {
            Verdict::TooLong { tries: down.tries }
        } else {
            down.due_us.filter(|&due| due <= now_us)?;
            down.due_us = None;
            down.tries += 1;
            if !self.dials {
                return Some(Step::Probe);
            }
            self.attempt += 1;
            return Some(Step::Dial { attempt: self.attempt });
        };
        self.state = State::Over;
        Some(Step::GiveUp(verdict))
    }

    /// When [`Relink::poll`] has something next, if nothing else happens.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        match &self.state {
            State::Down(down) if down.ended => Some(0),
            State::Down(down) => Some(down.due_us.unwrap_or(u64::MAX).min(down.until_us)),
            State::Up | State::Over => None,
        }
    }

    /// The outcome of the last step.
    pub fn came_to(&mut self, now_us: u64, outcome: Attempt) {
        let State::Down(down) = &mut self.state else { return };
        if down.due_us.is_some() {
            return;
        }
        down.refused_us = match outcome {
            Attempt::Refused => Some(down.refused_us.unwrap_or(now_us)),
            Attempt::Failed | Attempt::Answered => None,
        };
        down.ended = down.refused_us.is_some_and(|since| self.near || now_us >= since + self.timing.sure_us);
        let pause = self.timing.least_pause_us << down.tries.saturating_sub(1).min(16);
        down.due_us = Some(now_us + pause.min(self.timing.most_pause_us));
    }

    /// The other end asks to resume over a connection that it made. `true`: the old connection is broken,
    /// even if its state does not show that yet.
    ///
    /// # Errors
    /// The reason for the other end.
    pub fn asked(&mut self, attempt: u32) -> Result<(), &'static str> {
        if self.dials {
            return Err("it is this rank that connects");
        }
        if self.state == State::Over {
            return Err("it has been given up");
        }
        if attempt <= self.attempt && self.rules.keep(RelinkRule::Overtaken) {
            return Err("it has asked again since");
        }
        self.attempt = attempt;
        self.state = State::Up;
        Ok(())
    }

    /// The other end agrees to this attempt. False: it is no longer awaited.
    pub fn resumed(&mut self, attempt: u32) -> bool {
        let is_awaited = self.awaits(attempt);
        if is_awaited {
            self.state = State::Up;
        }
        is_awaited
    }

    /// No further attempts.
    pub fn give_up(&mut self) {
        self.state = State::Over;
    }

    /// Whether the peer is the process that this rank has met, and looks for the process that this rank is.
    ///
    /// # Errors
    /// The mismatch, for the peer and for the log.
    pub fn check(&self, resume: &Resume, run: &str, mine: u64, theirs: u64) -> Result<(), String> {
        let rank = resume.rank;
        if resume.run != run {
            return Err("it belongs to another run".to_owned());
        }
        if !self.rules.keep(RelinkRule::Incarnation) {
            return Ok(());
        }
        if resume.incarnation != theirs {
            return Err(format!(
                "it claims to be {rank}, but is another process than the one that joined as {rank}"
            ));
        }
        if resume.of != mine {
            return Err(format!(
                "{rank} wants to resume with a process that has ended; another process replaced it"
            ));
        }
        Ok(())
    }
}

/// A rule of [`super::stream`] or of this module. In a build without the feature `mutants` none can be left
/// out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RelinkRule {
    /// Sent frames are kept until the peer has them.
    Keep,
    /// Frames that the peer does not have are sent again.
    Resend,
    /// Frames that it has are not.
    Once,
    /// A side that has received much acknowledges.
    Answer,
    /// Only the process that joined may reconnect.
    Incarnation,
    /// An attempt that was overtaken by a later one is refused.
    Overtaken,
}

impl RelinkRule {
    pub const ALL: [Self; 6] =
        [Self::Keep, Self::Resend, Self::Once, Self::Answer, Self::Incarnation, Self::Overtaken];
}

/// The rule that a test left out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Rules {
    #[cfg(feature = "mutants")]
    omitted: Option<RelinkRule>,
}

impl Rules {
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: RelinkRule) {
        self.omitted = Some(rule);
    }

    #[cfg(feature = "mutants")]
    pub fn keep(self, rule: RelinkRule) -> bool {
        self.omitted != Some(rule)
    }

    #[cfg(not(feature = "mutants"))]
    #[expect(clippy::unused_self, reason = "nothing can be left out")]
    pub fn keep(self, _rule: RelinkRule) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::Rank;
    use super::*;

    const TIMING: RelinkTiming =
        RelinkTiming { grace_us: 10_000, least_pause_us: 10, most_pause_us: 100, sure_us: 1000 };

    /// Every attempt has this outcome; when is the rank given up, and how?
    fn given_up(dials: bool, near: bool, outcome: Attempt) -> (u64, Verdict) {
        let mut relink = Relink::new(TIMING, dials, near);
        assert_eq!(relink.poll(0), None, "nothing is to be done while it is up");
        relink.cut(5, None);
        let mut now = 5;
        loop {
            now = now.max(relink.poll_timeout().expect("it is down"));
            match relink.poll(now) {
                Some(Step::GiveUp(verdict)) => {
                    assert_eq!(
                        (relink.poll(now), relink.poll_timeout()),
                        (None, None),
                        "it is returned once"
                    );
                    return (now, verdict);
                }
                Some(step) => {
                    assert_eq!(step == Step::Probe, !dials);
                    relink.came_to(now, outcome);
                }
                None => {}
            }
        }
    }

    #[test]
    fn who_refuses_has_ended_and_who_is_silent_gets_its_time() {
        for dials in [false, true] {
            let begins = if dials { 5 } else { 15 };
            assert_eq!(
                given_up(dials, true, Attempt::Refused),
                (begins, Verdict::Ended),
                "the machine itself says so"
            );
            let (when, verdict) = given_up(dials, false, Attempt::Refused);
            assert!(
                verdict == Verdict::Ended && (begins + 1000..begins + 1200).contains(&when),
                "{when} {verdict:?}"
            );
            for outcome in [Attempt::Failed, Attempt::Answered] {
                let (when, verdict) = given_up(dials, true, outcome);
                let Verdict::TooLong { tries } = verdict else { panic!("{verdict:?}") };
                assert!(when == 10_005 && (100..120).contains(&tries), "{when} {tries}");
            }
        }
    }

    #[test]
    fn a_way_that_hangs_is_given_up_in_time() {
        let mut relink = Relink::new(TIMING, true, false);
        relink.cut(0, Some(77));
        assert_eq!(relink.poll(0), Some(Step::Dial { attempt: 1 }));
        assert_eq!(relink.poll(76), None, "one attempt at a time");
        assert_eq!(relink.poll_timeout(), Some(77));
        assert_eq!(relink.poll(77), Some(Step::GiveUp(Verdict::TooLong { tries: 1 })));
        assert!(!relink.resumed(1), "too late");
    }

    #[test]
    fn the_last_attempt_counts() {
        let mut relink = Relink::new(TIMING, false, false);
        assert_eq!(relink.asked(2), Ok(()), "the other end may notice first");
        assert!(relink.asked(1).is_err() && relink.asked(2).is_err());
        relink.cut(0, None);
        assert_eq!(relink.asked(4), Ok(()));
        assert!(!relink.is_down());
        let mut dials = Relink::new(TIMING, true, false);
        assert!(dials.asked(1).is_err());
        dials.cut(0, None);
        assert_eq!(dials.poll(0), Some(Step::Dial { attempt: 1 }));
        dials.came_to(1, Attempt::Failed);
        assert_eq!(dials.poll(50), Some(Step::Dial { attempt: 2 }));
        assert!(!dials.resumed(1) && dials.resumed(2) && !dials.resumed(2));
    }

    #[test]
    fn unauthenticated_peers_are_told_apart() {
        let relink = Relink::new(TIMING, false, false);
        let resume =
            Resume { run: "ours".into(), rank: Rank(3), incarnation: 30, of: 10, attempt: 1, received: 0 };
        assert_eq!(relink.check(&resume, "ours", 10, 30), Ok(()));
        for (other, word) in [
            (Resume { run: "theirs".into(), ..resume.clone() }, "another run"),
            (
                Resume { incarnation: 31, ..resume.clone() },
                "another process than the one that joined as rank 3",
            ),
            (Resume { of: 9, ..resume.clone() }, "a process that has ended"),
        ] {
            let why = relink.check(&other, "ours", 10, 30).unwrap_err();
            assert!(why.contains(word), "{why}");
        }
    }
}
