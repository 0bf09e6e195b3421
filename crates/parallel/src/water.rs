//! Liquid water, molecule by molecule: what SPLASH's Water n-squared (S4, S5) computes and shares.
//!
//! Molecules of three atoms that bend and stretch, after Lie and Clementi (1986). Within a molecule: the
//! quartic force field of Bartlett, Shavitt and Purvis (1979). Between molecules: Matsuoka, Clementi and
//! Yoshimine (1976), charges on the hydrogens and on a point near the oxygen, and exponentials between atoms.
//! Charges beyond half the box, or 11 angstrom, are a continuum, whose reaction field is in the force. The
//! atoms move by Gear's method of sixth order. Lengths are in angstrom, times in femtoseconds, masses in
//! atomic units.
//!
//! A molecule's state is one record of 672 bytes, as in SPLASH: six of them share a page, and computing a
//! force reads a record's positions and changes its forces. A rank computes the pairs of its molecules with
//! half of all others, sums up the forces locally, and adds them to the shared ones under a lock for each
//! molecule. Virial, kinetic and potential energies are sums under locks of their own; the potential energy
//! is computed in each third step, in a pass over all pairs.

use super::{ALL, Answer, Array, Program, ProgramError, Team, random};

pub const PROGRAM: Program = Program {
    name: "water",
    sizes: &["molecules", "steps"],
    full: &[1331, 3],
    small: &[64, 3],
    protocols: ALL,
    fits: super::any,
    run,
};

type Vector = [f64; 3];
/// One vector for each atom.
type Atoms = [Vector; 3];

const STEP: f64 = 0.15;
const STEPS_AN_ENERGY: usize = 3;
const TEMPERATURE: f64 = 298.0;
/// In masses a cubic angstrom.
const DENSITY: f64 = 0.998 * 0.602_214;
const BOLTZMANN: f64 = 8.314_46e-7;
const KCAL_A_MOL: f64 = 4.184e-4;

const OXYGEN: usize = 1;
const MASSES: [f64; 3] = [1.007_825, 15.999_45, 1.007_825];
/// The equilibrium bond length.
const BOND: f64 = 0.9572;
const ANGLE: f64 = 1.824_218;

// Where the parts of a molecule are in its record, in vectors.
const CENTRE: usize = 0;
/// Places of the atoms, and their derivatives by time: the n-th times the step to the n-th, divided by n!.
const MOTION: usize = 1;
const ORDER: usize = 6;
const SPEED: usize = 1;
const ACCELERATION: usize = 2;
const FORCES: usize = MOTION + 3 * (ORDER + 1);
/// With room for one order more.
const RECORD: usize = FORCES + 2 * 3;

/// How much the n-th derivative is corrected by: Gear (1971), equations of second order.
const CORRECTOR: [f64; ORDER + 1] =
    [863.0 / 6048.0, 665.0 / 1008.0, 1.0, 25.0 / 36.0, 35.0 / 144.0, 1.0 / 24.0, 1.0 / 360.0];

/// The potential within a molecule: coefficients, and powers of three terms: how much each bond is too long,
/// and the bond length times how much the angle is too large. Each power above two has a factor of the bond
/// length.
const WITHIN: [(f64, [i32; 3]); 31] = [
    (0.512_596 / 2.0, [2, 0, 0]),
    (0.512_596 / 2.0, [0, 2, 0]),
    (0.048_098 / 2.0, [0, 0, 2]),
    (-0.005_823, [1, 1, 0]),
    (0.016_452, [1, 0, 1]),
    (0.016_452, [0, 1, 1]),
    (-0.571_91, [3, 0, 0]),
    (-0.571_91, [0, 3, 0]),
    (-0.007_636, [0, 0, 3]),
    (-0.001_867, [2, 1, 0]),
    (-0.001_867, [1, 2, 0]),
    (-0.002_047, [2, 0, 1]),
    (-0.002_047, [0, 2, 1]),
    (-0.030_83, [1, 1, 1]),
    (-0.009_424_5, [1, 0, 2]),
    (-0.009_424_5, [0, 1, 2]),
    (0.8431, [4, 0, 0]),
    (0.8431, [0, 4, 0]),
    (-0.001_93, [0, 0, 4]),
    (-0.003, [3, 1, 0]),
    (-0.003, [1, 3, 0]),
    (0.0036, [2, 2, 0]),
    (-0.012, [3, 0, 1]),
    (-0.012, [0, 3, 1]),
    (0.006, [2, 1, 1]),
    (0.006, [1, 2, 1]),
    (-0.0048, [2, 0, 2]),
    (-0.0048, [0, 2, 2]),
    (0.0211, [1, 1, 2]),
    (0.006_263, [1, 0, 3]),
    (0.006_263, [0, 1, 3]),
];

/// The negative charge lies on the molecule's axis, so much of the way from the oxygen to the hydrogens.
const TOWARDS_HYDROGEN: f64 = 0.456_825_9;
/// Of two hydrogens' charges.
const CHARGE_SQUARED: f64 = 170.9389 * KCAL_A_MOL;
/// The pairs of sites that act on each other: nine of charges (the centre's is minus two hydrogens'), then
/// those of the oxygens.
const PAIRS: [(usize, usize); 14] = {
    const O: usize = MOTION + OXYGEN;
    const H: usize = MOTION;
    const I: usize = MOTION + 2;
    [
        (CENTRE, CENTRE),
        (CENTRE, H),
        (CENTRE, I),
        (H, CENTRE),
        (I, CENTRE),
        (H, H),
        (H, I),
        (I, H),
        (I, I),
        (O, O),
        (O, H),
        (O, I),
        (H, O),
        (I, O),
    ]
};
const CHARGED: usize = 9;
const CHARGES: [f64; CHARGED] = [4.0, -2.0, -2.0, -2.0, -2.0, 1.0, 1.0, 1.0, 1.0];
/// Exponentials between atoms, factors and exponents, for the pairs from this one on.
const HYDROGENS: usize = 5;
const BETWEEN_HYDROGENS: [(f64, f64); 1] = [(666.3373 * KCAL_A_MOL, 2.760_844)];
const OXYGENS: usize = 9;
const BETWEEN_OXYGENS: [(f64, f64); 1] = [(1_088_213.2 * KCAL_A_MOL, 5.152_712)];
const OXYGEN_HYDROGEN: usize = 10;
const BETWEEN_BOTH: [(f64, f64); 2] =
    [(1455.427 * KCAL_A_MOL, 2.961_895), (-273.5954 * KCAL_A_MOL, 2.233_264)];

// Sums that all ranks add to.
const VIRIAL: usize = 0;
const POTENTIAL_WITHIN: usize = 1;
const POTENTIAL_BETWEEN: usize = 2;
const KINETIC: usize = 3;
const SUMS: usize = KINETIC + 3;

// Locks.
const OF_VIRIAL: usize = 0;
const OF_POTENTIAL: usize = 1;
const OF_KINETIC: usize = 2;
const OF_MOLECULES: usize = 3;

fn plus(a: Vector, b: Vector, times: f64) -> Vector {
    [a[0] + b[0] * times, a[1] + b[1] * times, a[2] + b[2] * times]
}

fn minus(a: Vector, b: Vector) -> Vector {
    plus(a, b, -1.0)
}

fn dot(a: Vector, b: Vector) -> f64 {
    a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
}

fn centre(atoms: &Atoms) -> Vector {
    let middle = plus(atoms[0], minus(atoms[2], atoms[0]), 0.5);
    plus(atoms[OXYGEN], minus(middle, atoms[OXYGEN]), TOWARDS_HYDROGEN)
}

/// A molecule's shape, and its derivatives by the places of the hydrogens.
struct Shape {
    /// The three terms of [`WITHIN`].
    off: [f64; 3],
    of_first: [Vector; 3],
    of_second: [Vector; 3],
}

fn shape(atoms: &Atoms) -> Shape {
    let bonds = [minus(atoms[0], atoms[OXYGEN]), minus(atoms[2], atoms[OXYGEN])];
    let lengths = bonds.map(|bond| dot(bond, bond).sqrt());
    let units: [Vector; 2] = std::array::from_fn(|at| bonds[at].map(|part| part / lengths[at]));
    let cosine = dot(units[0], units[1]);
    let sine = (1.0 - cosine * cosine).sqrt();
    // The angle grows when a hydrogen goes away from the other one, at right angles to its bond.
    let turn = |at: usize| {
        minus(units[at].map(|part| part * cosine), units[1 - at])
            .map(|part| part * BOND / (sine * lengths[at]))
    };
    Shape {
        off: [lengths[0] - BOND, lengths[1] - BOND, (cosine.acos() - ANGLE) * BOND],
        of_first: [units[0], [0.0; 3], turn(0)],
        of_second: [[0.0; 3], units[1], turn(1)],
    }
}

/// The energy of a molecule's shape.
fn energy_within(atoms: &Atoms) -> f64 {
    let off = shape(atoms).off;
    WITHIN.iter().map(|(factor, powers)| factor * scale(powers) * product(&off, powers)).sum()
}

fn scale(powers: &[i32; 3]) -> f64 {
    BOND.powi(2 - powers.iter().sum::<i32>())
}

fn product(of: &[f64; 3], powers: &[i32; 3]) -> f64 {
    of[0].powi(powers[0]) * of[1].powi(powers[1]) * of[2].powi(powers[2])
}

/// The forces that bring a molecule back into shape.
fn forces_within(atoms: &Atoms) -> Atoms {
    let shape = shape(atoms);
    let mut slopes = [0.0; 3];
    for (factor, powers) in &WITHIN {
        for (along, slope) in slopes.iter_mut().enumerate().filter(|&(along, _)| powers[along] > 0) {
            let mut less = *powers;
            less[along] -= 1;
            *slope += factor * scale(powers) * f64::from(powers[along]) * product(&shape.off, &less);
        }
    }
    let force = |of: &[Vector; 3]| (0..3).fold([0.0; 3], |sum, along| plus(sum, of[along], -slopes[along]));
    let (first, second) = (force(&shape.of_first), force(&shape.of_second));
    [first, plus(first, second, 1.0).map(|part| -part), second]
}

/// The cube that repeats itself without end.
#[derive(Clone, Copy)]
struct Space {
    side: f64,
    cutoff_squared: f64,
    /// One over the cube of the cutoff.
    field: f64,
    /// The energy of two charges at the cutoff.
    at_cutoff: f64,
}

impl Space {
    fn of(molecules: usize) -> Self {
        let side = (molecules as f64 * MASSES.iter().sum::<f64>() / DENSITY).cbrt();
        let cutoff = (side / 2.0).min(11.0);
        Self { side, cutoff_squared: cutoff * cutoff, field: cutoff.powi(-3), at_cutoff: 1.5 / cutoff }
    }

    /// From `b` to the nearest image of `a`.
    fn between(&self, a: Vector, b: Vector) -> Vector {
        minus(a, b)
            .map(|part| if part.abs() > self.side / 2.0 { part - self.side.copysign(part) } else { part })
    }
}

/// The centre and the atoms: the beginning of a record.
type Sites = [Vector; MOTION + 3];

/// What two sites do to each other: the force on the first as a multiple of the vector from the second, and
/// the energy.
#[derive(Clone, Copy, Default)]
struct Effect {
    strength: f64,
    energy: f64,
}

impl Effect {
    #[inline(always)]
    fn exponentials(&mut self, square: f64, of: &[(f64, f64)]) {
        let distance = square.sqrt();
        for &(factor, exponent) in of {
            let part = factor * (-exponent * distance).exp();
            self.strength += part * exponent / distance;
            self.energy += part;
        }
    }
}

/// Calls `each` for every pair of sites of two molecules: which two, their effect, and the vector between
/// them.
#[inline(always)]
fn interact(a: &Sites, b: &Sites, space: &Space, mut each: impl FnMut((usize, usize), Vector, Effect)) {
    let mut between = [[0.0; 3]; PAIRS.len()];
    let mut squares = [0.0; PAIRS.len()];
    let mut measure = |pairs: std::ops::Range<usize>| {
        for at in pairs {
            between[at] = space.between(a[PAIRS[at].0], b[PAIRS[at].1]);
            squares[at] = dot(between[at], between[at]);
        }
        (between, squares)
    };
    let (_, near) = measure(0..CHARGED);
    let beyond = near[..CHARGED].iter().filter(|&&square| square > space.cutoff_squared).count();
    if beyond == CHARGED {
        return;
    }
    let mut effects = [Effect::default(); PAIRS.len()];
    for at in 0..CHARGED {
        let charges = CHARGES[at] * CHARGE_SQUARED;
        let inverse = 1.0 / near[at].sqrt();
        let strength = charges * (inverse * inverse * inverse - space.field);
        let energy = charges * (inverse + near[at] * space.field / 2.0 - space.at_cutoff);
        effects[at] =
            if near[at] <= space.cutoff_squared { Effect { strength, energy } } else { Effect::default() };
    }
    let acting = if beyond == 0 { PAIRS.len() } else { CHARGED };
    let (between, squares) = measure(CHARGED..acting);
    if beyond == 0 {
        (HYDROGENS..OXYGENS).for_each(|at| effects[at].exponentials(squares[at], &BETWEEN_HYDROGENS));
        effects[OXYGENS].exponentials(squares[OXYGENS], &BETWEEN_OXYGENS);
        (OXYGEN_HYDROGEN..PAIRS.len()).for_each(|at| effects[at].exponentials(squares[at], &BETWEEN_BOTH));
    }
    for at in 0..acting {
        each(PAIRS[at], between[at], effects[at]);
    }
}

/// Adds the forces on a molecule's sites to those on its atoms: a force on the centre acts on all three
/// atoms.
fn add_forces(to: &mut Atoms, on: &Sites) {
    for (atom, force) in to.iter_mut().enumerate() {
        let share = if atom == OXYGEN { 1.0 - TOWARDS_HYDROGEN } else { TOWARDS_HYDROGEN / 2.0 };
        *force = plus(plus(*force, on[MOTION + atom], 1.0), on[CENTRE], share);
    }
}

/// The molecules after `i` whose pairs with it are its rank's: half of the others. With an even number of
/// molecules, the pair with the opposite one belongs to the lower.
fn others(i: usize, count: usize) -> impl Iterator<Item = usize> {
    let half = if count.is_multiple_of(2) && i >= count / 2 { (count - 1) / 2 } else { count / 2 };
    (i + 1..=i + half).map(move |j| j % count)
}

/// Where each molecule starts, on a lattice, and the speed of its atoms: at the given temperature, with no
/// total momentum.
fn beginning(count: usize, space: &Space) -> (Vec<Atoms>, Vec<Atoms>) {
    let edge = (1..).find(|edge: &usize| edge.pow(3) >= count).unwrap_or(1);
    let apart = space.side / edge as f64;
    let arm = [BOND * (ANGLE / 2.0).cos(), BOND * (ANGLE / 2.0).sin()];
    let places = (0..count).map(|i| {
        let oxygen = [i / edge / edge, i / edge % edge, i % edge].map(|cell| (cell as f64 + 0.5) * apart);
        [plus(oxygen, [arm[0], arm[1], 0.0], 1.0), oxygen, plus(oxygen, [arm[0], -arm[1], 0.0], 1.0)]
    });
    let mut momenta: Vec<Atoms> = (0..count)
        .map(|i| std::array::from_fn(|atom| std::array::from_fn(|axis| random(9 * i + 3 * atom + axis))))
        .collect();
    for axis in 0..3 {
        let parts = || momenta.iter().flatten().map(|momentum| momentum[axis]);
        let mean = parts().sum::<f64>() / (3 * count) as f64;
        let masses = MASSES.iter().cycle();
        let twice_energy: f64 = parts().zip(masses).map(|(part, mass)| (part - mean).powi(2) / mass).sum();
        let factor = ((3 * count) as f64 * BOLTZMANN * TEMPERATURE / twice_energy).sqrt();
        for (part, mass) in
            momenta.iter_mut().flatten().map(|momentum| &mut momentum[axis]).zip(MASSES.iter().cycle())
        {
            *part = (*part - mean) * factor / mass * STEP;
        }
    }
    (places.collect(), momenta)
}

/// The ranks' common state.
struct Water<'a> {
    team: &'a Team<'a>,
    space: Space,
    count: usize,
    /// [`RECORD`] for each molecule.
    records: Array<'a, Vector>,
    sums: Array<'a, f64>,
}

impl Water<'_> {
    fn mine(&self) -> std::ops::Range<usize> {
        self.team.part(self.count)
    }

    /// # Safety
    /// No rank writes the part during the call.
    unsafe fn atoms(&self, molecule: usize, part: usize) -> Atoms {
        // SAFETY: by the caller.
        std::array::from_fn(|atom| unsafe { self.records.get(molecule * RECORD + part + atom) })
    }

    /// # Safety
    /// No other rank uses the part during the call.
    unsafe fn set_atoms(&self, molecule: usize, part: usize, values: &Atoms) {
        for (atom, &value) in values.iter().enumerate() {
            // SAFETY: by the caller.
            unsafe { self.records.set(molecule * RECORD + part + atom, value) };
        }
    }

    fn add(&self, lock: usize, to: &[(usize, f64)]) -> Result<(), ProgramError> {
        self.team.lock(lock)?;
        for &(sum, value) in to {
            // SAFETY: the lock orders all accesses between the barriers around it.
            unsafe { self.sums.set(sum, self.sums.get(sum) + value) };
        }
        Ok(self.team.unlock(lock)?)
    }

    fn predict(&self) {
        for i in self.mine() {
            // SAFETY: this rank's molecule, which others use after the next barrier.
            let mut motion: [Atoms; ORDER + 1] =
                std::array::from_fn(|order| unsafe { self.atoms(i, MOTION + 3 * order) });
            // Taylor's series for each: Pascal's triangle, summed up in place.
            for from in 0..ORDER {
                for order in (from..ORDER).rev() {
                    motion[order] =
                        std::array::from_fn(|atom| plus(motion[order][atom], motion[order + 1][atom], 1.0));
                }
            }
            for (order, values) in motion.iter().enumerate() {
                // SAFETY: as above.
                unsafe { self.set_atoms(i, MOTION + 3 * order, values) };
            }
        }
    }

    /// Sets the forces on this rank's molecules to those within them.
    fn within(&self) -> Result<(), ProgramError> {
        let mut virial = 0.0;
        for i in self.mine() {
            // SAFETY: this rank's molecule, which others use after the next barrier.
            unsafe {
                let places = self.atoms(i, MOTION);
                let forces = forces_within(&places);
                virial += (0..3).map(|atom| dot(places[atom], forces[atom])).sum::<f64>();
                self.records.set(i * RECORD + CENTRE, centre(&places));
                self.set_atoms(i, FORCES, &forces);
            }
        }
        self.add(OF_VIRIAL, &[(VIRIAL, virial)])
    }

    /// The beginning of a molecule's record, which all ranks read and no rank writes between two barriers.
    fn sites(&self, molecule: usize) -> &Sites {
        // SAFETY: only forces are written between these barriers, which are not in it.
        let sites = unsafe { self.records.slice(molecule * RECORD..molecule * RECORD + MOTION + 3) };
        sites.try_into().expect("as many")
    }

    /// Adds the forces between molecules, to all of them, and waits until the other ranks have done so.
    fn between(&self) -> Result<(), ProgramError> {
        let (mine, count) = (self.mine(), self.count);
        let mut own: Vec<Atoms> = vec![[[0.0; 3]; 3]; count];
        let mut virial = 0.0;
        for i in mine.clone() {
            let sites = self.sites(i);
            let mut on_it: Sites = [[0.0; 3]; 4];
            for j in others(i, count) {
                let mut on_other: Sites = [[0.0; 3]; 4];
                interact(
                    sites,
                    self.sites(j),
                    &self.space,
                    |(first, second), between, Effect { strength, .. }| {
                        on_it[first] = plus(on_it[first], between, strength);
                        on_other[second] = plus(on_other[second], between, -strength);
                        virial += strength * dot(between, between);
                    },
                );
                add_forces(&mut own[j], &on_other);
            }
            add_forces(&mut own[i], &on_it);
        }
        self.add(OF_VIRIAL, &[(VIRIAL, virial)])?;
        // Each rank starts with its own molecules, so that the ranks do not all queue for the same locks, and
        // stops after its last pair.
        let touched = if mine.is_empty() { 0 } else { (mine.len() + count / 2).min(count) };
        for j in (mine.start..mine.start + touched).map(|j| j % count) {
            self.team.lock(OF_MOLECULES + j)?;
            for (atom, force) in own[j].iter().enumerate() {
                let at = j * RECORD + FORCES + atom;
                // SAFETY: the lock orders all accesses between these barriers.
                unsafe { self.records.set(at, plus(self.records.get(at), *force, 1.0)) };
            }
            self.team.unlock(OF_MOLECULES + j)?;
        }
        Ok(self.team.barrier()?)
    }

    /// Turns forces into corrections of the second derivative.
    fn accelerations(&self, i: usize) -> Atoms {
        // SAFETY: this rank's molecule; no rank adds to its forces any more.
        let forces = unsafe { self.atoms(i, FORCES) };
        std::array::from_fn(|atom| forces[atom].map(|part| part * STEP * STEP / 2.0 / MASSES[atom]))
    }

    fn correct(&self) {
        for i in self.mine() {
            let accelerations = self.accelerations(i);
            // SAFETY: this rank's molecule, which others use after the next barrier.
            unsafe {
                self.set_atoms(i, FORCES, &accelerations);
                let expected = self.atoms(i, MOTION + 3 * ACCELERATION);
                for (order, factor) in CORRECTOR.into_iter().enumerate() {
                    let values = self.atoms(i, MOTION + 3 * order);
                    let error = |atom: usize| minus(accelerations[atom], expected[atom]);
                    let corrected = std::array::from_fn(|atom| plus(values[atom], error(atom), factor));
                    self.set_atoms(i, MOTION + 3 * order, &corrected);
                }
            }
        }
    }

    /// Molecules that have left the box come in at its other side.
    fn bring_back(&self) {
        for i in self.mine() {
            // SAFETY: this rank's molecule, which others use after the next barrier.
            let mut places = unsafe { self.atoms(i, MOTION) };
            for axis in 0..3 {
                let over = places[OXYGEN][axis].div_euclid(self.space.side) * self.space.side;
                places.iter_mut().for_each(|place| place[axis] -= over);
            }
            // SAFETY: as above.
            unsafe { self.set_atoms(i, MOTION, &places) };
        }
    }

    fn kinetic(&self) -> Result<(), ProgramError> {
        for axis in 0..3 {
            let mut energy = 0.0;
            for i in self.mine() {
                // SAFETY: this rank's molecule.
                let speeds = unsafe { self.atoms(i, MOTION + 3 * SPEED) };
                energy +=
                    (0..3).map(|atom| MASSES[atom] * (speeds[atom][axis] / STEP).powi(2) / 2.0).sum::<f64>();
            }
            self.add(OF_KINETIC, &[(KINETIC + axis, energy)])?;
        }
        Ok(())
    }

    fn potential(&self) -> Result<(), ProgramError> {
        let mut within = 0.0;
        for i in self.mine() {
            // SAFETY: this rank's molecule, which others use after the next barrier.
            unsafe {
                let places = self.atoms(i, MOTION);
                within += energy_within(&places);
                self.records.set(i * RECORD + CENTRE, centre(&places));
            }
        }
        self.team.barrier()?;
        let mut between = 0.0;
        for i in self.mine() {
            for j in others(i, self.count) {
                interact(self.sites(i), self.sites(j), &self.space, |_, _, effect| between += effect.energy);
            }
        }
        self.add(OF_POTENTIAL, &[(POTENTIAL_WITHIN, within), (POTENTIAL_BETWEEN, between)])
    }

    fn step(&self, energies: bool) -> Result<[f64; SUMS], ProgramError> {
        if self.team.leads() {
            for sum in 0..SUMS {
                // SAFETY: between two barriers this rank alone uses them.
                unsafe { self.sums.set(sum, 0.0) };
            }
        }
        self.team.barrier()?;
        self.predict();
        self.within()?;
        self.team.barrier()?;
        self.between()?;
        self.correct();
        self.bring_back();
        self.kinetic()?;
        self.team.barrier()?;
        if energies {
            self.potential()?;
            self.team.barrier()?;
        }
        // SAFETY: no rank writes them between these barriers.
        let sums = std::array::from_fn(|sum| unsafe { self.sums.get(sum) });
        self.team.barrier()?;
        Ok(sums)
    }
}

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let &[count, steps] = sizes else { unreachable!("the sizes are checked") };
    let records = team.array::<Vector>(count * RECORD)?;
    let sums = team.array::<f64>(SUMS)?;
    let water = Water { team, space: Space::of(count), count, records, sums };
    let (places, speeds) = beginning(count, &water.space);
    for i in water.mine() {
        // SAFETY: this rank's molecule; a barrier comes before others use it.
        unsafe {
            water.set_atoms(i, MOTION, &places[i]);
            water.set_atoms(i, MOTION + 3 * SPEED, &speeds[i]);
        }
    }
    let mut found = Vec::new();
    let took = team.time(|| {
        water.within()?;
        team.barrier()?;
        water.between()?;
        for i in water.mine() {
            let accelerations = water.accelerations(i);
            // SAFETY: this rank's molecule.
            unsafe { water.set_atoms(i, MOTION + 3 * ACCELERATION, &accelerations) };
        }
        for step in 1..=steps {
            found.extend(water.step(step % STEPS_AN_ENERGY == 0)?);
        }
        Ok::<_, ProgramError>(())
    })?;
    // SAFETY: no rank writes any more.
    let state = unsafe { records.all(team) };
    Ok(Answer { close: state.iter().flatten().copied().chain(found).collect(), took, ..Answer::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bent(n: usize) -> Atoms {
        let (places, _) = beginning(1, &Space::of(1));
        std::array::from_fn(|atom| {
            std::array::from_fn(|axis| places[0][atom][axis] + 0.05 * random(100 * n + 3 * atom + axis))
        })
    }

    /// The numeric gradient of an energy.
    fn slopes(atoms: &Atoms, energy: impl Fn(&Atoms) -> f64) -> Atoms {
        std::array::from_fn(|atom| {
            std::array::from_fn(|axis| {
                let moved = |by: f64| {
                    let mut there = *atoms;
                    there[atom][axis] += by;
                    energy(&there)
                };
                (moved(1e-5) - moved(-1e-5)) / 2e-5
            })
        })
    }

    fn same(got: &Atoms, wanted: &Atoms, within: f64) {
        for (got, wanted) in got.iter().flatten().zip(wanted.iter().flatten()) {
            assert!((got - wanted).abs() <= within * wanted.abs().max(1e-3), "{got} {wanted}");
        }
    }

    #[test]
    fn forces_are_what_the_energies_fall_by() {
        for n in 0..5 {
            let atoms = bent(n);
            same(
                &forces_within(&atoms),
                &slopes(&atoms, energy_within).map(|slope| slope.map(|part| -part)),
                1e-5,
            );
        }
        let space = Space::of(64);
        let record = |atoms: &Atoms| -> Sites { [centre(atoms), atoms[0], atoms[1], atoms[2]] };
        // One pair near; one so far that some charges are beyond the cutoff, but none at it; and one across
        // the box's side.
        for away in [2.8, 5.7, space.side - 3.0] {
            let (a, b) = (bent(7), bent(8).map(|place| plus(place, [away, 0.3, -0.2], 1.0)));
            let energy = |a: &Atoms| {
                let mut sum = 0.0;
                interact(&record(a), &record(&b), &space, |_, _, effect| sum += effect.energy);
                sum
            };
            let (mut on_a, mut on_b): (Atoms, Atoms) = ([[0.0; 3]; 3], [[0.0; 3]; 3]);
            interact(
                &record(&a),
                &record(&b),
                &space,
                |(first, second), between, Effect { strength, .. }| {
                    let of = |site: usize, times: f64| {
                        let mut sites: Sites = [[0.0; 3]; 4];
                        sites[site] = between.map(|part| part * times);
                        sites
                    };
                    add_forces(&mut on_a, &of(first, strength));
                    add_forces(&mut on_b, &of(second, -strength));
                },
            );
            assert!(energy(&a) != 0.0, "{away}");
            same(&on_a, &slopes(&a, energy).map(|slope| slope.map(|part| -part)), 1e-4);
            for axis in 0..3 {
                let sum: f64 = on_a.iter().chain(&on_b).map(|force| force[axis]).sum();
                assert!(sum.abs() < 1e-12, "{sum}");
            }
        }
    }

    #[test]
    fn two_molecules_attract_each_other_as_water_does() {
        // A hydrogen bond: the published minimum is 5.87 kcal/mol at 2.87 angstrom between the oxygens.
        let half = ANGLE / 2.0;
        let giver = [[BOND, 0.0, 0.0], [0.0; 3], [BOND * ANGLE.cos(), BOND * ANGLE.sin(), 0.0]];
        let taker = |away: f64| {
            let tilt = 37_f64.to_radians();
            let axis = [tilt.cos(), -tilt.sin(), 0.0];
            let arm = |sign: f64| {
                plus(axis.map(|part| part * BOND * half.cos()), [0.0, 0.0, 1.0], sign * BOND * half.sin())
            };
            [arm(1.0), [0.0; 3], arm(-1.0)].map(|place| plus(place, [away, 0.0, 0.0], 1.0))
        };
        let far = Space { side: 1e3, cutoff_squared: 1e4, field: 0.0, at_cutoff: 0.0 };
        let record = |atoms: &Atoms| -> Sites { [centre(atoms), atoms[0], atoms[1], atoms[2]] };
        let energy = |away: f64| {
            let mut sum = 0.0;
            interact(&record(&giver), &record(&taker(away)), &far, |_, _, effect| sum += effect.energy);
            sum / KCAL_A_MOL
        };
        let (at, least) = (240..360)
            .map(|n| f64::from(n) / 100.0)
            .map(|at| (at, energy(at)))
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap();
        assert!((at - 2.87).abs() < 0.03 && (least + 5.87).abs() < 0.05, "{at} {least}");
    }

    #[test]
    fn energy_and_momentum_stay() {
        for count in [27, 64] {
            let steps = 60;
            let answer = PROGRAM.alone(&[count, steps]).unwrap();
            let (state, sums) = answer.close.split_at(3 * RECORD * count);
            let totals: Vec<f64> = sums
                .chunks(SUMS)
                .skip(2)
                .step_by(3)
                .map(|sums| sums[POTENTIAL_WITHIN..].iter().sum())
                .collect();
            let kinetic: f64 = sums[KINETIC..SUMS].iter().sum();
            let hot = 4.5 * count as f64 * BOLTZMANN * TEMPERATURE;
            assert!(
                totals.len() == steps / 3 && kinetic > hot / 3.0 && kinetic < hot * 1.5,
                "{kinetic} {hot}"
            );
            let spread = totals.iter().fold(0.0_f64, |most, total| most.max((total - totals[0]).abs()));
            assert!(spread < 2e-2 * hot, "{count}: {spread} of {hot}: {totals:?}");
            for axis in 0..3 {
                let speed =
                    |i: usize, atom: usize| state[3 * (i * RECORD + MOTION + 3 * SPEED + atom) + axis];
                let momentum: f64 =
                    (0..count).flat_map(|i| (0..3).map(move |atom| MASSES[atom] * speed(i, atom))).sum();
                assert!(momentum.abs() < 1e-9, "{momentum}");
            }
        }
    }

    #[test]
    fn each_pair_is_somebodys() {
        for count in [1, 2, 5, 8] {
            let mut pairs: Vec<(usize, usize)> =
                (0..count).flat_map(|i| others(i, count).map(move |j| (i.min(j), i.max(j)))).collect();
            pairs.sort_unstable();
            assert_eq!(
                pairs,
                (0..count).flat_map(|i| (i + 1..count).map(move |j| (i, j))).collect::<Vec<_>>()
            );
        }
    }
}
