//! The six-step fast Fourier transform (Bailey; SPLASH's FFT, S4): n = m * m complex numbers as a square
//! whose rows are divided among the ranks. Ranks communicate only in the transposes.

use std::f64::consts::PI;

use super::{ALL, Answer, Array, Program, ProgramError, Team, bits, random};

pub const PROGRAM: Program = Program {
    name: "fft",
    sizes: &["points"],
    full: &[262_144],
    small: &[4096],
    protocols: ALL,
    fits: |sizes| {
        if sizes[0].is_power_of_two() && sizes[0].ilog2().is_multiple_of(2) {
            Ok(())
        } else {
            Err("a power of four")
        }
    },
    run,
};

type Complex = [f64; 2];

fn times(a: Complex, b: Complex) -> Complex {
    [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]]
}

/// The `k`-th of the `n` roots of unity.
fn root(k: usize, n: usize) -> Complex {
    let (sin, cos) = (-2.0 * PI * k as f64 / n as f64).sin_cos();
    [cos, sin]
}

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let n = sizes[0];
    let m = 1 << (n.ilog2() / 2);
    let (a, b) = (team.array::<Complex>(n)?, team.array::<Complex>(n)?);
    let roots: Vec<Complex> = (0..m).map(|k| root(k, m)).collect();
    let mine = team.part(m);
    for i in mine.clone() {
        for j in 0..m {
            // SAFETY: this rank's row.
            unsafe { a.set(i * m + j, [random(2 * (i * m + j)), random(2 * (i * m + j) + 1)]) };
        }
    }
    let took = team.time(|| {
        transpose(team, a, b, m)?;
        for i in mine.clone() {
            // SAFETY: this rank's row, which no other rank reads before the barrier.
            let row = unsafe { b.slice_mut(i * m..(i + 1) * m) };
            transform(row, &roots);
            for (j, value) in row.iter_mut().enumerate() {
                *value = times(*value, root(i * j, n));
            }
        }
        team.barrier()?;
        transpose(team, b, a, m)?;
        for i in mine.clone() {
            // SAFETY: as above.
            transform(unsafe { a.slice_mut(i * m..(i + 1) * m) }, &roots);
        }
        team.barrier()?;
        transpose(team, a, b, m)
    })?;
    // SAFETY: no rank writes any more.
    let exact = unsafe { b.all(team) }.iter().flat_map(|value| bits(value)).collect();
    Ok(Answer { exact, took, ..Answer::default() })
}

/// Rows of `to` become columns of `from`, in squares that fit the cache. Ends with a barrier.
fn transpose(
    team: &Team<'_>,
    from: Array<'_, Complex>,
    to: Array<'_, Complex>,
    m: usize,
) -> Result<(), ProgramError> {
    const SQUARE: usize = 16;
    let mine = team.part(m);
    for left in (0..m).step_by(SQUARE) {
        for i in mine.clone() {
            for j in left..(left + SQUARE).min(m) {
                // SAFETY: `from` is only read between these barriers, and this rank alone writes its rows of
                // `to`.
                unsafe { to.set(i * m + j, from.get(j * m + i)) };
            }
        }
    }
    Ok(team.barrier()?)
}

/// An FFT of one row, in place: decimation in time.
fn transform(row: &mut [Complex], roots: &[Complex]) {
    let m = row.len();
    if m < 2 {
        return;
    }
    for i in 0..m {
        let j = i.reverse_bits() >> (usize::BITS - m.ilog2());
        if i < j {
            row.swap(i, j);
        }
    }
    let mut half = 1;
    while half < m {
        for block in row.chunks_exact_mut(2 * half) {
            let (low, high) = block.split_at_mut(half);
            for (k, (low, high)) in low.iter_mut().zip(high).enumerate() {
                let turned = times(*high, roots[k * (m / (2 * half))]);
                let sum = [low[0] + turned[0], low[1] + turned[1]];
                *high = [low[0] - turned[0], low[1] - turned[1]];
                *low = sum;
            }
        }
        half *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_fourier_transform() {
        let n = 256;
        let answer = PROGRAM.alone(&[n]).unwrap();
        for k in 0..n {
            let mut sum = [0.0, 0.0];
            for j in 0..n {
                let term = times([random(2 * j), random(2 * j + 1)], root(j * k % n, n));
                sum = [sum[0] + term[0], sum[1] + term[1]];
            }
            let found = [f64::from_bits(answer.exact[2 * k]), f64::from_bits(answer.exact[2 * k + 1])];
            assert!(
                (found[0] - sum[0]).abs() < 1e-9 && (found[1] - sum[1]).abs() < 1e-9,
                "{k}: {found:?} {sum:?}"
            );
        }
    }
}
