//! The multigrid solver of SPLASH's Ocean (S4), by itself: Poisson's equation on a square, V-cycles with
//! red-black Gauss-Seidel. Each rank has rows of each grid. On the coarse grids ranks wait longer than they
//! compute, which is what the papers measured it for.

use super::{ALL, Answer, Array, Program, ProgramError, Team, bits, random};

pub const PROGRAM: Program = Program {
    name: "ocean",
    sizes: &["side", "cycles"],
    full: &[258, 6],
    small: &[34, 2],
    protocols: ALL,
    fits: |sizes| {
        if sizes[0] > 5 && (sizes[0] - 2).is_power_of_two() {
            Ok(())
        } else {
            Err("a side of 2 more than a power of two")
        }
    },
    run,
};

const SWEEPS: usize = 2;
const SWEEPS_ON_COARSEST: usize = 16;

/// One grid of the hierarchy: cells inside `1 ..= side - 2`, zeroes around them.
struct Grid<'a> {
    side: usize,
    solution: Array<'a, f64>,
    source: Array<'a, f64>,
    /// The residual.
    rest: Array<'a, f64>,
}

impl Grid<'_> {
    fn rows(&self, team: &Team<'_>) -> impl Iterator<Item = usize> + use<> {
        let mine = team.part(self.side - 2);
        mine.start + 1..mine.end + 1
    }

    /// The sum of the four cells around one.
    ///
    /// # Safety
    /// No rank writes them during the call.
    unsafe fn around(&self, at: usize) -> f64 {
        let cells = self.solution;
        // SAFETY: by the caller.
        unsafe {
            cells.get(at - self.side) + cells.get(at + self.side) + cells.get(at - 1) + cells.get(at + 1)
        }
    }

    fn smooth(&self, team: &Team<'_>, sweeps: usize) -> Result<(), ProgramError> {
        for half in 0..2 * sweeps {
            for i in self.rows(team) {
                for j in (1 + (i + half) % 2..self.side - 1).step_by(2) {
                    let at = i * self.side + j;
                    // SAFETY: a cell of this rank's rows; those around it have the other colour, which no
                    // rank writes between these barriers.
                    unsafe { self.solution.set(at, (self.around(at) + self.source.get(at)) * 0.25) };
                }
            }
            team.barrier_keep()?;
        }
        Ok(())
    }

    fn leave_over(&self, team: &Team<'_>) -> Result<(), ProgramError> {
        for i in self.rows(team) {
            for j in 1..self.side - 1 {
                let at = i * self.side + j;
                // SAFETY: the solution is only read between these barriers; the rest is this rank's.
                unsafe {
                    self.rest.set(at, self.source.get(at) + self.around(at) - 4.0 * self.solution.get(at))
                };
            }
        }
        Ok(team.barrier_keep()?)
    }
}

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let &[side, cycles] = sizes else { unreachable!("the sizes are checked") };
    let mut grids = Vec::new();
    let mut inside = side - 2;
    while inside >= 4 {
        let cells = (inside + 2) * (inside + 2);
        grids.push(Grid {
            side: inside + 2,
            solution: team.array(cells)?,
            source: team.array(cells)?,
            rest: team.array(cells)?,
        });
        inside /= 2;
    }
    for i in grids[0].rows(team) {
        for j in 1..side - 1 {
            // SAFETY: this rank's row.
            unsafe { grids[0].source.set(i * side + j, random(i * side + j)) };
        }
    }
    let took = team.time(|| {
        for _ in 0..cycles {
            cycle(team, &grids)?;
        }
        grids[0].leave_over(team)
    })?;
    // SAFETY: no rank writes any more.
    let exact = [grids[0].solution, grids[0].rest]
        .iter()
        .flat_map(|cells| bits(unsafe { cells.all(team) }))
        .collect();
    Ok(Answer { exact, took, ..Answer::default() })
}

/// One V-cycle from the first of these grids down and up again.
fn cycle(team: &Team<'_>, grids: &[Grid<'_>]) -> Result<(), ProgramError> {
    let [fine, coarser @ ..] = grids else { unreachable!("there is a grid") };
    let [coarse, ..] = coarser else { return fine.smooth(team, SWEEPS_ON_COARSEST) };
    fine.smooth(team, SWEEPS)?;
    fine.leave_over(team)?;
    for i in coarse.rows(team) {
        for j in 1..coarse.side - 1 {
            let above = (2 * i - 1) * fine.side + 2 * j - 1;
            // SAFETY: `rest` is only read between these barriers; the coarse rows are this rank's.
            unsafe {
                let rest = fine.rest;
                let sum = rest.get(above)
                    + rest.get(above + 1)
                    + rest.get(above + fine.side)
                    + rest.get(above + fine.side + 1);
                // The equation is of second order: twice as wide, four times as much.
                coarse.source.set(i * coarse.side + j, sum);
                coarse.solution.set(i * coarse.side + j, 0.0);
            }
        }
    }
    team.barrier_keep()?;
    cycle(team, coarser)?;
    for i in fine.rows(team) {
        for j in 1..fine.side - 1 {
            let at = i * fine.side + j;
            // SAFETY: the coarse solution is only read between these barriers; the fine row is this rank's.
            unsafe {
                fine.solution.set(
                    at,
                    fine.solution.get(at) + coarse.solution.get(i.div_ceil(2) * coarse.side + j.div_ceil(2)),
                )
            };
        }
    }
    team.barrier_keep()?;
    fine.smooth(team, SWEEPS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cycle_leaves_less_over() {
        let rest = |cycles| {
            let answer = PROGRAM.alone(&[34, cycles]).unwrap();
            answer.exact[34 * 34..].iter().map(|&value| f64::from_bits(value).powi(2)).sum::<f64>().sqrt()
        };
        let rests = [1, 2, 3, 6].map(rest);
        assert!(
            rests[1] < 0.6 * rests[0] && rests[2] < 0.6 * rests[1] && rests[3] < 0.2 * rests[2],
            "{rests:?}"
        );
        assert!(rests[3] > 0.0);
    }
}
