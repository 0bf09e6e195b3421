//! The four kernels, over paged arrays and over local ones, and the check of their results.

use anyhow::{Result, bail};
use rampool_pager::region::{PagedMemory, Region};

use crate::bench::workload::word;

const SCALAR: f64 = 3.0;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kernel {
    Copy,
    Scale,
    Add,
    Triad,
}

impl Kernel {
    pub const ALL: [Self; 4] = [Self::Copy, Self::Scale, Self::Add, Self::Triad];

    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Scale => "scale",
            Self::Add => "add",
            Self::Triad => "triad",
        }
    }

    /// Bytes of one pass as STREAM counts them.
    pub fn bytes(self, elements: usize) -> f64 {
        let arrays = match self {
            Self::Copy | Self::Scale => 2.0,
            Self::Add | Self::Triad => 3.0,
        };
        arrays * 8.0 * elements as f64
    }
}

/// Three arrays of the same length.
pub struct Arrays<'a> {
    a: &'a mut [f64],
    b: &'a mut [f64],
    c: &'a mut [f64],
}

impl Arrays<'_> {
    pub fn run(&mut self, kernel: Kernel) {
        let (a, b, c) = (&mut *self.a, &mut *self.b, &mut *self.c);
        match kernel {
            Kernel::Copy => c.copy_from_slice(a),
            Kernel::Scale => b.iter_mut().zip(&*c).for_each(|(b, c)| *b = SCALAR * c),
            Kernel::Add => c.iter_mut().zip(&*a).zip(&*b).for_each(|((c, a), b)| *c = a + b),
            Kernel::Triad => a.iter_mut().zip(&*b).zip(&*c).for_each(|((a, b), c)| *a = b + SCALAR * c),
        }
    }

    fn fill(&mut self) {
        for index in 0..self.a.len() {
            [self.a[index], self.b[index], self.c[index]] = initial(index);
        }
    }
}

/// Values in [1, 2) with random mantissas: no page of them is zero or packs well.
fn initial(index: usize) -> [f64; 3] {
    [1, 2, 3].map(|array| f64::from_bits(1f64.to_bits() | word(array, index as u64) >> 12))
}

/// What was done, to be computed again element by element.
#[derive(Default)]
pub struct Replay {
    done: Vec<Kernel>,
}

impl Replay {
    pub fn did(&mut self, kernel: Kernel) {
        self.done.push(kernel);
    }

    /// Every element must be what the same kernels make of its first value, to the bit.
    pub fn verify(&self, arrays: &Arrays<'_>) -> Result<()> {
        for index in 0..arrays.a.len() {
            let [mut a, mut b, mut c] = initial(index);
            for kernel in &self.done {
                match kernel {
                    Kernel::Copy => c = a,
                    Kernel::Scale => b = SCALAR * c,
                    Kernel::Add => c = a + b,
                    Kernel::Triad => a = b + SCALAR * c,
                }
            }
            let is = [arrays.a[index], arrays.b[index], arrays.c[index]];
            if is.map(f64::to_bits) != [a, b, c].map(f64::to_bits) {
                bail!("WRONG RESULT: element {index} of the arrays is {is:?} instead of {:?}", [a, b, c]);
            }
        }
        Ok(())
    }
}

/// Arrays in paged memory.
pub struct RemoteArrays {
    regions: [Region; 3],
    elements: usize,
}

impl RemoteArrays {
    pub fn new(memory: &PagedMemory, elements: usize) -> Result<Self> {
        let alloc = || memory.alloc(elements * 8);
        let mut new = Self { regions: [alloc()?, alloc()?, alloc()?], elements };
        new.arrays().fill();
        Ok(new)
    }

    pub fn arrays(&mut self) -> Arrays<'_> {
        // SAFETY: each region is memory of its own, aligned to pages and at least this long; any bits are a
        // double; only this thread touches it, and only through the borrow made here (what the pager does to
        // it is not visible).
        let [a, b, c] = [0, 1, 2].map(|n: usize| unsafe {
            std::slice::from_raw_parts_mut(self.regions[n].as_ptr().cast::<f64>(), self.elements)
        });
        Arrays { a, b, c }
    }
}

/// Arrays in ordinary memory.
pub struct LocalArrays {
    arrays: [Vec<f64>; 3],
}

impl LocalArrays {
    pub fn new(elements: usize) -> Self {
        let mut new = Self { arrays: [0, 1, 2].map(|_| vec![1.0; elements]) };
        new.arrays().fill();
        new
    }

    pub fn arrays(&mut self) -> Arrays<'_> {
        let [a, b, c] = &mut self.arrays;
        Arrays { a, b, c }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_finds_one_wrong_bit() {
        let mut local = LocalArrays::new(1000);
        let mut replay = Replay::default();
        for kernel in Kernel::ALL.into_iter().chain([Kernel::Triad]) {
            local.arrays().run(kernel);
            replay.did(kernel);
        }
        replay.verify(&local.arrays()).unwrap();
        let arrays = local.arrays();
        arrays.b[777] = f64::from_bits(arrays.b[777].to_bits() ^ 1);
        assert!(replay.verify(&arrays).is_err());
    }
}
