//! Parallel programs on shared memory: those that the papers measured, and small ones that each show one
//! pattern of sharing.
//!
//! A program is written once, against a [`Team`]: the ranks of a run, or one thread with memory of its own.
//! Every answer is compared with a sequential run, which is the same program with a team of one and without
//! the runtime. The tests of each file show that the sequential run computes the right thing.
//!
//! | program | sharing | from |
//! |---|---|---|
//! | `sor` | rows of neighbours, barriers | S5: red-black successive over-relaxation |
//! | `fft` | transposes, all to all | S4 and SPLASH: six-step FFT |
//! | `lu` | blocks, one writer, many readers | S4 and SPLASH: blocked LU without pivoting |
//! | `ocean` | rows of neighbours on grids of all sizes | S4's Ocean, reduced to its multigrid solver |
//! | `water` | forces under a lock for each molecule | S4's and S5's Water, n-squared |
//! | `tasks` | a queue under a lock, its tasks published by it | |
//! | `hash` | chains under locks | |
//! | `falseshare` | neighbouring words of one page | |
//! | `migratory` | one object under one lock | |
//!
//! `rampool launch -n 2 rampool example sor 1024 1536 50` runs one of them.

mod falseshare;
mod fft;
mod hash;
mod lu;
mod migratory;
mod ocean;
mod sor;
mod tasks;
mod team;
mod water;

use std::time::Duration;

use rampool::shared::{Homes, ProtocolKind, Shared, SharedError};

pub use team::{Array, Plain, Team};

/// A program of this crate.
#[derive(Debug)]
pub struct Program {
    pub name: &'static str,
    /// Names of its sizes, in order.
    pub sizes: &'static [&'static str],
    /// The papers' sizes.
    pub full: &'static [usize],
    /// Sizes that share pages and run quickly.
    pub small: &'static [usize],
    /// The consistency protocols it runs under.
    pub protocols: &'static [ProtocolKind],
    /// Checks the sizes; the error says what is wrong with them.
    fits: fn(&[usize]) -> Result<(), &'static str>,
    run: fn(&Team<'_>, &[usize]) -> Result<Answer, ProgramError>,
}

/// The answer of a program, at rank 0; elsewhere it is empty.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Answer {
    /// Must be the same, bit by bit.
    pub exact: Vec<u64>,
    /// May differ by [`TOLERANCE`] of the largest: sums whose order depends on the order of the locks.
    pub close: Vec<f64>,
    pub took: Took,
}

/// How long the parallel part took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Took {
    pub clock: Duration,
    /// CPU time of the calling thread for it.
    pub cpu: Duration,
    /// What of it this rank's write faults took, and what all faults, locks and barriers did.
    pub write_faults: Duration,
    pub waits: Duration,
}

/// See [`Answer::close`].
pub const TOLERANCE: f64 = 1e-9;

/// How a team uses shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ways {
    /// Of arrays.
    pub homes: Homes,
    /// Whether [`Team::barrier_keep`] keeps pages writable.
    pub keep: bool,
}

impl Default for Ways {
    /// What suits the programs: homes lie in blocks, as [`Team::part`] does.
    fn default() -> Self {
        Self { homes: Homes::Blocked, keep: true }
    }
}

/// Why a program failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    #[error(transparent)]
    Shared(#[from] SharedError),
    #[error("{program} takes {} sizes ({}): {why}", sizes.len(), sizes.join(", "))]
    Sizes { program: &'static str, sizes: &'static [&'static str], why: &'static str },
    #[error("{program} needs guarantees that {} does not give; it runs under {}", protocol.name(), names(legal))]
    Protocol { program: &'static str, protocol: ProtocolKind, legal: &'static [ProtocolKind] },
    #[error("WRONG ANSWER: {program}: value {at} of {of} is {got}, sequentially {wanted}")]
    Wrong { program: &'static str, at: usize, of: usize, got: String, wanted: String },
}

fn names(protocols: &[ProtocolKind]) -> String {
    protocols.iter().map(|protocol| protocol.name()).collect::<Vec<_>>().join(", ")
}

/// Times of a run, at rank 0.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Report {
    pub parallel: Took,
    pub sequential: Took,
}

/// All of them.
pub static PROGRAMS: [Program; 9] = [
    sor::PROGRAM,
    fft::PROGRAM,
    lu::PROGRAM,
    ocean::PROGRAM,
    water::PROGRAM,
    tasks::PROGRAM,
    hash::PROGRAM,
    falseshare::PROGRAM,
    migratory::PROGRAM,
];

impl Program {
    /// The program of that name.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        PROGRAMS.iter().find(|program| program.name == name)
    }

    /// Runs it on all ranks, each of which makes the same call, and compares the answer with a sequential run
    /// at rank 0. Elsewhere the times are zero.
    ///
    /// # Errors
    /// Sizes or a protocol that do not fit, what ended the run, and a wrong answer.
    pub fn run(&self, shared: &Shared, sizes: &[usize], ways: Ways) -> Result<Report, ProgramError> {
        let protocol = shared.config().protocol;
        if !self.protocols.contains(&protocol) {
            return Err(ProgramError::Protocol { program: self.name, protocol, legal: self.protocols });
        }
        let sequential = (shared.rank() == 0).then(|| self.alone(sizes)).transpose()?;
        self.check(sizes)?;
        let team = Team::of(shared, ways);
        let answer = (self.run)(&team, sizes)?;
        team.barrier()?;
        let Some(sequential) = sequential else {
            return Ok(Report { parallel: Took::default(), sequential: Took::default() });
        };
        self.compare(&answer, &sequential)?;
        Ok(Report { parallel: answer.took, sequential: sequential.took })
    }

    /// Runs it by one thread, in memory of its own.
    ///
    /// # Errors
    /// Sizes that do not fit.
    pub fn alone(&self, sizes: &[usize]) -> Result<Answer, ProgramError> {
        self.check(sizes)?;
        (self.run)(&Team::alone(), sizes)
    }

    fn check(&self, sizes: &[usize]) -> Result<(), ProgramError> {
        let wrong = |why| ProgramError::Sizes { program: self.name, sizes: self.sizes, why };
        if sizes.len() != self.sizes.len() || sizes.contains(&0) {
            return Err(wrong("each a number above 0"));
        }
        (self.fits)(sizes).map_err(wrong)
    }

    fn compare(&self, got: &Answer, wanted: &Answer) -> Result<(), ProgramError> {
        let wrong = |at, of, got: String, wanted: String| ProgramError::Wrong {
            program: self.name,
            at,
            of,
            got,
            wanted,
        };
        if (got.exact.len(), got.close.len()) != (wanted.exact.len(), wanted.close.len()) {
            let lengths =
                |answer: &Answer| format!("{} and {} values", answer.exact.len(), answer.close.len());
            return Err(wrong(0, 0, lengths(got), lengths(wanted)));
        }
        for (at, (a, b)) in got.exact.iter().zip(&wanted.exact).enumerate() {
            if a != b {
                return Err(wrong(at, got.exact.len(), format!("{a:#x}"), format!("{b:#x}")));
            }
        }
        let scale = wanted.close.iter().fold(f64::MIN_POSITIVE, |most, value| most.max(value.abs()));
        for (at, (a, b)) in got.close.iter().zip(&wanted.close).enumerate() {
            // Not `>`: NaN is wrong, too.
            let close = (a - b).abs() <= TOLERANCE * scale;
            if !close {
                return Err(wrong(at, got.close.len(), a.to_string(), b.to_string()));
            }
        }
        Ok(())
    }
}

/// Programs whose shared bytes are, between two barriers, used under one lock, or by one rank, or only read.
const ALL: &[ProtocolKind] = &ProtocolKind::ALL;
/// Programs without data races.
const RACE_FREE: &[ProtocolKind] =
    &[ProtocolKind::Sc, ProtocolKind::Lrc, ProtocolKind::Hlrc, ProtocolKind::Aurc, ProtocolKind::Auto];

fn any(_: &[usize]) -> Result<(), &'static str> {
    Ok(())
}

/// A pseudorandom number for `n`.
fn mix(n: u64) -> u64 {
    // The finaliser of SplitMix64.
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A pseudorandom number in -1 .. 1 for `n`.
fn random(n: usize) -> f64 {
    (mix(n as u64) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_answer_is_told() {
        let program = &PROGRAMS[0];
        let answer = Answer { exact: vec![1, 2], close: vec![1e6, 1.0], took: Took::default() };
        program.compare(&answer, &answer).unwrap();
        program.compare(&Answer { close: vec![1e6, 1.0 + 1e-6], ..answer.clone() }, &answer).unwrap();
        for wrong in [
            Answer { exact: vec![1, 3], ..answer.clone() },
            Answer { exact: vec![1], ..answer.clone() },
            Answer { close: vec![1e6, 1.01], ..answer.clone() },
            Answer { close: vec![f64::NAN, 1.0], ..answer.clone() },
        ] {
            assert!(matches!(program.compare(&wrong, &answer), Err(ProgramError::Wrong { .. })), "{wrong:?}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        for program in &PROGRAMS {
            program.check(program.full).unwrap();
            program.check(program.small).unwrap();
            assert!(
                program.check(&[]).is_err() && program.check(&vec![0; program.sizes.len()]).is_err(),
                "{}",
                program.name
            );
        }
        assert!(Program::find("fft").unwrap().check(&[1000]).is_err());
    }
}
