//! Migratory data: one object under one lock moves from rank to rank, and each rank changes all of it.

use super::{ALL, Answer, Program, ProgramError, Team};

pub const PROGRAM: Program = Program {
    name: "migratory",
    sizes: &["words", "rounds"],
    full: &[1024, 1000],
    small: &[520, 20],
    protocols: ALL,
    fits: super::any,
    run,
};

const LOCK: usize = 1;

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let &[count, rounds] = sizes else { unreachable!("the sizes are checked") };
    let object = team.array::<u64>(count)?;
    let took = team.time(|| {
        for _ in team.part(rounds) {
            team.lock(LOCK)?;
            // SAFETY: the lock orders all accesses, and the slice ends before it is given back.
            for (at, word) in unsafe { object.slice_mut(0..count) }.iter_mut().enumerate() {
                *word += at as u64 + 1;
            }
            team.unlock(LOCK)?;
        }
        Ok::<_, ProgramError>(())
    })?;
    // SAFETY: no rank writes any more.
    Ok(Answer { exact: unsafe { object.all(team) }.to_vec(), took, ..Answer::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_changes_every_word() {
        assert_eq!(PROGRAM.alone(&[3, 7]).unwrap().exact, [7, 14, 21]);
    }
}
