//! False sharing: adjacent words of all ranks in the same pages. Each rank writes its own word, and all read
//! all, barrier after barrier.

use super::{ALL, Answer, Program, ProgramError, Team, mix};

pub const PROGRAM: Program = Program {
    name: "falseshare",
    sizes: &["words", "rounds"],
    full: &[4096, 200],
    small: &[1024, 8],
    protocols: ALL,
    fits: super::any,
    run,
};

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let &[count, rounds] = sizes else { unreachable!("the sizes are checked") };
    let words = team.array::<u64>(count)?;
    let mut sum = 0_u64;
    let took = team.time(|| {
        for round in 0..rounds {
            for at in (team.rank()..count).step_by(team.ranks()) {
                // SAFETY: this rank's word between these barriers.
                unsafe { words.set(at, mix((round * count + at) as u64)) };
            }
            team.barrier()?;
            // SAFETY: no rank writes between these barriers.
            sum = unsafe { words.slice(0..count) }
                .iter()
                .fold(sum, |sum, word| sum.rotate_left(1).wrapping_add(*word));
            team.barrier()?;
        }
        Ok::<_, ProgramError>(())
    })?;
    Ok(Answer { exact: if team.leads() { vec![sum] } else { Vec::new() }, took, ..Answer::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_every_round_counts() {
        let expected = (0..30).fold(0_u64, |sum, at| sum.rotate_left(1).wrapping_add(mix(at)));
        assert_eq!(PROGRAM.alone(&[10, 3]).unwrap().exact, [expected]);
    }
}
