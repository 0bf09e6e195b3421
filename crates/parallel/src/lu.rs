//! Blocked LU factorisation without pivoting (SPLASH's contiguous blocks, S4). Blocks are dealt out over a
//! grid of ranks. The rank of a block writes it, and others read it after the barrier that follows.

use super::{ALL, Answer, Program, ProgramError, Team, bits, random};

pub const PROGRAM: Program = Program {
    name: "lu",
    sizes: &["rows", "block"],
    full: &[1024, 32],
    small: &[64, 16],
    protocols: ALL,
    fits: |sizes| if sizes[0].is_multiple_of(sizes[1]) { Ok(()) } else { Err("rows in whole blocks") },
    run,
};

/// Element (i, j) at the start, such that no pivot is small.
fn element(i: usize, j: usize, n: usize) -> f64 {
    random(i * n + j) + if i == j { n as f64 } else { 0.0 }
}

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let &[n, width] = sizes else { unreachable!("the sizes are checked") };
    let (blocks, area) = (n / width, width * width);
    let matrix = team.array::<f64>(n * n)?;
    let down = (1..=team.ranks())
        .rev()
        .find(|down| down * down <= team.ranks() && team.ranks().is_multiple_of(*down))
        .unwrap_or(1);
    let across = team.ranks() / down;
    let mine = |i: usize, j: usize| i % down * across + j % across == team.rank();
    let whole = move |i: usize, j: usize| (i * blocks + j) * area..(i * blocks + j + 1) * area;
    for (i, j) in (0..blocks).flat_map(|i| (0..blocks).map(move |j| (i, j))).filter(|&(i, j)| mine(i, j)) {
        // SAFETY: this rank's block.
        let block = unsafe { matrix.slice_mut(whole(i, j)) };
        for (at, value) in block.iter_mut().enumerate() {
            *value = element(i * width + at / width, j * width + at % width, n);
        }
    }
    // Blocks read here were finished before the last barrier; blocks written are this rank's, and no other
    // rank reads it before the next.
    let took = team.time(|| {
        for k in 0..blocks {
            if mine(k, k) {
                // SAFETY: this rank's block, see above.
                factor(unsafe { matrix.slice_mut(whole(k, k)) }, width);
            }
            team.barrier()?;
            for i in k + 1..blocks {
                if mine(i, k) {
                    // SAFETY: see above.
                    unsafe { divide_right(matrix.slice_mut(whole(i, k)), matrix.slice(whole(k, k)), width) };
                }
                if mine(k, i) {
                    // SAFETY: see above.
                    unsafe { divide_left(matrix.slice_mut(whole(k, i)), matrix.slice(whole(k, k)), width) };
                }
            }
            team.barrier()?;
            for (i, j) in (k + 1..blocks)
                .flat_map(|i| (k + 1..blocks).map(move |j| (i, j)))
                .filter(|&(i, j)| mine(i, j))
            {
                // SAFETY: see above.
                unsafe {
                    subtract(
                        matrix.slice_mut(whole(i, j)),
                        matrix.slice(whole(i, k)),
                        matrix.slice(whole(k, j)),
                        width,
                    )
                };
            }
            team.barrier()?;
        }
        Ok::<_, ProgramError>(())
    })?;
    // SAFETY: no rank writes any more.
    let exact = bits(unsafe { matrix.all(team) });
    Ok(Answer { exact, took, ..Answer::default() })
}

/// LU of one block, in place; the lower part has ones on its diagonal.
fn factor(block: &mut [f64], width: usize) {
    for k in 0..width {
        for i in k + 1..width {
            let part = block[i * width + k] / block[k * width + k];
            block[i * width + k] = part;
            for j in k + 1..width {
                block[i * width + j] -= part * block[k * width + j];
            }
        }
    }
}

/// A block below the diagonal: times the inverse of the upper part of `diagonal`.
fn divide_right(block: &mut [f64], diagonal: &[f64], width: usize) {
    for row in block.chunks_exact_mut(width) {
        for k in 0..width {
            row[k] /= diagonal[k * width + k];
            for j in k + 1..width {
                row[j] -= row[k] * diagonal[k * width + j];
            }
        }
    }
}

/// A block right of the diagonal: the inverse of the lower part of `diagonal` times it.
fn divide_left(block: &mut [f64], diagonal: &[f64], width: usize) {
    for k in 0..width {
        for i in k + 1..width {
            let part = diagonal[i * width + k];
            for j in 0..width {
                block[i * width + j] -= part * block[k * width + j];
            }
        }
    }
}

/// `block -= left * above`.
fn subtract(block: &mut [f64], left: &[f64], above: &[f64], width: usize) {
    for (row, left) in block.chunks_exact_mut(width).zip(left.chunks_exact(width)) {
        for (part, above) in left.iter().zip(above.chunks_exact(width)) {
            for (value, above) in row.iter_mut().zip(above) {
                *value -= part * above;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lower_times_upper_is_the_matrix() {
        let (n, width) = (24, 8);
        let answer = PROGRAM.alone(&[n, width]).unwrap();
        let at = |i: usize, j: usize| {
            let block = (i / width * (n / width) + j / width) * width * width;
            f64::from_bits(answer.exact[block + i % width * width + j % width])
        };
        for i in 0..n {
            for j in 0..n {
                let sum: f64 =
                    (0..=i.min(j)).map(|k| if k == i { at(k, j) } else { at(i, k) * at(k, j) }).sum();
                assert!((sum - element(i, j, n)).abs() < 1e-9, "{i}, {j}: {sum}");
            }
        }
    }
}
