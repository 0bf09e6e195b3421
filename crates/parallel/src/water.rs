//! Molecules that all act on each other, in the manner of SPLASH's Water n-squared (S4, S5): three charged sites each, Lennard-Jones between the first ones.
//! A rank computes the pairs of its molecules with half of all others, sums up forces for itself, and adds them to the shared ones under a lock for each
//! molecule. Molecules do not turn: that would change what a pair costs, not what is shared.

use super::{ALL, Answer, Program, ProgramError, Team, random};

pub const PROGRAM: Program =
    Program { name: "water", sizes: &["molecules", "steps"], full: &[1331, 4], small: &[64, 3], protocols: ALL, fits: super::any, run };

type Vector = [f64; 3];

/// Where the sites lie, and their charges.
const SITES: [(Vector, f64); 3] = [([0.0, 0.0, 0.0], -0.8), ([0.08, 0.06, 0.0], 0.4), ([-0.08, 0.06, 0.0], 0.4)];
const STEP: f64 = 0.002;
/// The energy's lock; those of the molecules follow.
const ENERGY: usize = 0;

fn plus(a: Vector, b: Vector, times: f64) -> Vector {
    [a[0] + b[0] * times, a[1] + b[1] * times, a[2] + b[2] * times]
}

/// The force on the first of two molecules, and their energy.
fn pair(a: Vector, b: Vector) -> (Vector, f64) {
    let (mut force, mut energy) = ([0.0; 3], 0.0);
    for (first, (at, charge)) in SITES.iter().enumerate() {
        for (second, (other_at, other_charge)) in SITES.iter().enumerate() {
            let between = plus(plus(a, *at, 1.0), plus(b, *other_at, 1.0), -1.0);
            let square = between[0] * between[0] + between[1] * between[1] + between[2] * between[2];
            let distance = square.sqrt();
            let mut strength = charge * other_charge / (square * distance);
            energy += charge * other_charge / distance;
            if first == 0 && second == 0 {
                let sixth = 0.05 / (square * square * square);
                strength += (12.0 * sixth * sixth - 6.0 * sixth) / square;
                energy += sixth * sixth - sixth;
            }
            force = plus(force, between, strength);
        }
    }
    (force, energy)
}

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let &[count, steps] = sizes else { unreachable!("the sizes are checked") };
    let places = team.array::<Vector>(count)?;
    let forces = team.array::<Vector>(count)?;
    let energy = team.array::<f64>(1)?;
    let side = (1..).find(|side: &usize| side.pow(3) >= count).unwrap_or(1);
    let mine = team.part(count);
    for i in mine.clone() {
        let cell = [i % side, i / side % side, i / side / side];
        let place = std::array::from_fn(|axis| cell[axis] as f64 + 0.1 * random(3 * i + axis));
        // SAFETY: this rank's molecule.
        unsafe { places.set(i, place) };
    }
    let mut speeds = vec![[0.0; 3]; mine.len()];
    let took = team.time(|| {
        for _ in 0..steps {
            for i in mine.clone() {
                // SAFETY: this rank's molecule; the barrier comes before others add to it.
                unsafe { forces.set(i, [0.0; 3]) };
            }
            team.barrier()?;
            let mut own = vec![[0.0; 3]; count];
            let mut own_energy = 0.0;
            // SAFETY: nobody writes places between these barriers.
            let at = unsafe { places.slice(0..count) };
            for i in mine.clone() {
                // Each pair once: half of the others, and of even numbers of molecules the opposite one by the lower alone.
                let others = if count.is_multiple_of(2) && i >= count / 2 { (count - 1) / 2 } else { count / 2 };
                for j in (i + 1..=i + others).map(|j| j % count) {
                    let (force, energy) = pair(at[i], at[j]);
                    own[i] = plus(own[i], force, 1.0);
                    own[j] = plus(own[j], force, -1.0);
                    own_energy += energy;
                }
            }
            // Each rank begins with its own, so that they do not all queue for the same locks.
            for j in (mine.start..mine.start + count).map(|j| j % count).filter(|&j| own[j] != [0.0; 3]) {
                team.lock(ENERGY + 1 + j)?;
                // SAFETY: the lock orders all accesses between these barriers.
                unsafe { forces.set(j, plus(forces.get(j), own[j], 1.0)) };
                team.unlock(ENERGY + 1 + j)?;
            }
            team.lock(ENERGY)?;
            // SAFETY: the lock orders all accesses.
            unsafe { energy.set(0, energy.get(0) + own_energy) };
            team.unlock(ENERGY)?;
            team.barrier()?;
            for i in mine.clone() {
                let speed = &mut speeds[i - mine.start];
                // SAFETY: this rank's molecule between these barriers; nobody adds to its force.
                unsafe {
                    *speed = plus(*speed, forces.get(i), STEP);
                    places.set(i, plus(places.get(i), *speed, STEP));
                }
            }
            team.barrier()?;
        }
        Ok::<_, ProgramError>(())
    })?;
    // SAFETY: nobody writes any more.
    let close = unsafe { places.all(team).iter().chain(forces.all(team)).flatten().chain(energy.all(team)).copied().collect() };
    Ok(Answer { close, took, ..Answer::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forces_of_all_pairs_are_summed_and_cancel() {
        for count in [27, 30] {
            let answer = PROGRAM.alone(&[count, 1]).unwrap();
            let (places, rest) = answer.close.split_at(3 * count);
            let forces = &rest[..3 * count];
            let vector = |of: &[f64], i: usize| [of[3 * i], of[3 * i + 1], of[3 * i + 2]];
            let total = (0..count).fold([0.0; 3], |sum, i| plus(sum, vector(forces, i), 1.0));
            assert!(total.iter().all(|part| part.abs() < 1e-9), "{total:?}");
            // The places have moved by one small step since.
            for i in 0..count {
                let others = (0..count).filter(|&j| j != i);
                let force = others.fold([0.0; 3], |sum, j| plus(sum, pair(vector(places, i), vector(places, j)).0, 1.0));
                let off = plus(force, vector(forces, i), -1.0);
                assert!(off.iter().all(|part| part.abs() < 0.05), "{i} of {count}: {force:?} {:?}", vector(forces, i));
            }
        }
    }
}
