//! Red-black successive over-relaxation on a grid whose border is fixed: S5's program with barriers.
//!
//! Red and black cells lie in arrays of their own, so while one colour is computed, the other is only read.
//! Cell (i, j) is red if i + j is even; the k-th red cell of an even row stands at column 2k, of an odd one
//! at 2k + 1, and black ones the other way round.

use super::{ALL, Answer, Array, Program, ProgramError, Team, bits, random};

pub const PROGRAM: Program = Program {
    name: "sor",
    sizes: &["rows", "columns", "sweeps"],
    full: &[1024, 1536, 50],
    small: &[42, 260, 6],
    protocols: ALL,
    fits: |sizes| {
        if sizes[0] > 2 && sizes[1] > 3 && sizes[1].is_multiple_of(2) {
            Ok(())
        } else {
            Err("an even number of columns, and cells inside")
        }
    },
    run,
};

const OMEGA: f64 = 1.25;

/// Hot at the upper border, cold elsewhere, and nowhere so even that a sweep changes nothing.
fn start(i: usize, j: usize, columns: usize) -> f64 {
    if i == 0 { 1.0 + j as f64 / columns as f64 } else { 0.001 * random(i * columns + j) }
}

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let &[rows, columns, sweeps] = sizes else { unreachable!("the sizes are checked") };
    let width = columns / 2;
    let colours = [team.array::<f64>(rows * width)?, team.array::<f64>(rows * width)?];
    let mine = team.part(rows);
    for (colour, cells) in colours.iter().enumerate() {
        for i in mine.clone() {
            // SAFETY: this rank's row.
            let row = unsafe { cells.slice_mut(i * width..(i + 1) * width) };
            for (k, cell) in row.iter_mut().enumerate() {
                let j = 2 * k + (i + colour) % 2;
                *cell = start(i, j, columns);
            }
        }
    }
    let inside = mine.start.max(1)..mine.end.min(rows - 1);
    let took = team.time(|| {
        for _ in 0..sweeps {
            for colour in [0, 1] {
                for i in inside.clone() {
                    relax(colours[colour], colours[1 - colour], width, i, (i + colour) % 2);
                }
                team.barrier_keep()?;
            }
        }
        Ok::<_, ProgramError>(())
    })?;
    // SAFETY: no rank writes any more.
    let exact = colours.iter().flat_map(|cells| bits(unsafe { cells.all(team) })).collect();
    Ok(Answer { exact, took, ..Answer::default() })
}

/// New values for one row of one colour. `odd`: its cells stand in odd columns.
fn relax(own: Array<'_, f64>, other: Array<'_, f64>, width: usize, i: usize, odd: usize) {
    let row = |i: usize| i * width..(i + 1) * width;
    // SAFETY: the other colour is only read between these barriers, and this rank alone uses its rows of the
    // own one.
    let (above, level, below, cells) = unsafe {
        (other.slice(row(i - 1)), other.slice(row(i)), other.slice(row(i + 1)), own.slice_mut(row(i)))
    };
    // The neighbours of cell k in the other colour's row are k - 1 and k in even columns, k and k + 1 in odd
    // ones. The first column, or the last, is border.
    let inside = 1 - odd..width - odd;
    let (left, right) = (&level[..width - 1], &level[1..]);
    let around = above[inside.clone()].iter().zip(&below[inside.clone()]).zip(left.iter().zip(right));
    for (cell, ((above, below), (left, right))) in cells[inside].iter_mut().zip(around) {
        *cell += OMEGA * ((above + below + left + right) * 0.25 - *cell);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same on one plain grid, cell by cell.
    #[test]
    fn it_relaxes_what_a_plain_grid_would() {
        let (rows, columns, sweeps) = (12, 14, 9);
        let answer = PROGRAM.alone(&[rows, columns, sweeps]).unwrap();
        let mut grid: Vec<Vec<f64>> =
            (0..rows).map(|i| (0..columns).map(|j| start(i, j, columns)).collect()).collect();
        for half in 0..2 * sweeps {
            for i in 1..rows - 1 {
                for j in (1..columns - 1).filter(|j| (i + j) % 2 == half % 2) {
                    let around = grid[i - 1][j] + grid[i + 1][j] + grid[i][j - 1] + grid[i][j + 1];
                    grid[i][j] += OMEGA * (around * 0.25 - grid[i][j]);
                }
            }
        }
        let width = columns / 2;
        for (i, row) in grid.iter().enumerate() {
            for (j, wanted) in row.iter().enumerate() {
                let at = (i + j) % 2 * rows * width + i * width + j / 2;
                let found = f64::from_bits(answer.exact[at]);
                assert!((found - wanted).abs() < 1e-12, "cell {i}, {j}: {found} {wanted}");
            }
        }
        assert!(grid[rows / 2][columns / 2] > 0.01, "the heat has arrived");
    }
}
