//! The team that computes: the ranks of a run, or one thread by itself.

use std::cell::{RefCell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;
use std::time::Instant;

use rampool::shared::{AllocOptions, Shared, SharedError, cpu_of_this_thread};

use super::{Took, Ways};

/// The ranks that run a program together. One thread of each uses it.
#[derive(Debug)]
pub struct Team<'a> {
    place: Place<'a>,
    ways: Ways,
}

#[derive(Debug)]
enum Place<'a> {
    /// What it allocated; nothing is freed before the team is.
    Alone(RefCell<Vec<Box<[UnsafeCell<u64>]>>>),
    Ranks(&'a Shared),
}

impl<'a> Team<'a> {
    /// One thread, with memory of its own.
    #[must_use]
    pub fn alone() -> Self {
        Self { place: Place::Alone(RefCell::new(Vec::new())), ways: Ways::default() }
    }

    /// All ranks of a run.
    #[must_use]
    pub fn of(shared: &'a Shared, ways: Ways) -> Self {
        Self { place: Place::Ranks(shared), ways }
    }

    #[must_use]
    pub fn rank(&self) -> usize {
        match self.place {
            Place::Alone(_) => 0,
            Place::Ranks(shared) => shared.rank().into(),
        }
    }

    #[must_use]
    pub fn ranks(&self) -> usize {
        match self.place {
            Place::Alone(_) => 1,
            Place::Ranks(shared) => shared.ranks().into(),
        }
    }

    /// Whether this rank reports the result.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// This rank's part of `0 .. count`; the parts of all ranks are all of it, in order.
    #[must_use]
    pub fn part(&self, count: usize) -> Range<usize> {
        let at = |rank: usize| count * rank / self.ranks();
        at(self.rank())..at(self.rank() + 1)
    }

    /// `count` zeroes in memory that all ranks share; each makes the same call.
    ///
    /// # Errors
    /// If there is no room.
    ///
    /// # Panics
    /// If so many bytes have no number.
    pub fn array<T: Plain>(&self, count: usize) -> Result<Array<'_, T>, SharedError> {
        let bytes = count.checked_mul(size_of::<T>()).expect("the sizes are small").max(8);
        let start = match &self.place {
            Place::Alone(all) => {
                let memory: Box<[UnsafeCell<u64>]> =
                    (0..bytes.div_ceil(8)).map(|_| UnsafeCell::new(0)).collect();
                let start = UnsafeCell::raw_get(memory.as_ptr());
                all.borrow_mut().push(memory);
                start.cast()
            }
            Place::Ranks(shared) => {
                shared.alloc(bytes, AllocOptions::new().homes(self.ways.homes))?.as_ptr().cast()
            }
        };
        Ok(Array { start, count, team: PhantomData })
    }

    /// Takes a lock.
    ///
    /// # Errors
    /// Those of the run.
    pub fn lock(&self, lock: usize) -> Result<(), SharedError> {
        self.ask(|shared| shared.lock(lock as u64))
    }

    /// Gives it back.
    ///
    /// # Errors
    /// Those of the run.
    pub fn unlock(&self, lock: usize) -> Result<(), SharedError> {
        self.ask(|shared| shared.unlock(lock as u64))
    }

    /// Waits for a signal for this lock. A team of one does not wait.
    ///
    /// # Errors
    /// Those of the run.
    pub fn wait(&self, lock: usize) -> Result<(), SharedError> {
        self.ask(|shared| shared.wait(0, lock as u64))
    }

    /// Wakes all that wait for this lock's signal.
    ///
    /// # Errors
    /// Those of the run.
    pub fn broadcast(&self, lock: usize) -> Result<(), SharedError> {
        self.ask(|shared| shared.broadcast(0, lock as u64))
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// Those of the run.
    pub fn barrier(&self) -> Result<(), SharedError> {
        self.ask(|shared| shared.barrier(0))
    }

    /// As [`Team::barrier`], for data of which each page is mostly written by one rank.
    ///
    /// # Errors
    /// Those of the run.
    pub fn barrier_keep(&self) -> Result<(), SharedError> {
        self.ask(|shared| if self.ways.keep { shared.barrier_keep(1) } else { shared.barrier(1) })
    }

    /// Runs the parallel part and returns how long it took, all ranks together. The run's statistics cover
    /// this part only. Pages that a single rank has filled before count as that rank's own.
    ///
    /// # Errors
    /// Those of the part.
    pub fn time<E: From<SharedError>>(&self, part: impl FnOnce() -> Result<(), E>) -> Result<Took, E> {
        self.barrier_keep()?;
        if let Place::Ranks(shared) = self.place {
            shared.start_measuring();
        }
        let (began, used) = (Instant::now(), cpu_of_this_thread());
        part()?;
        self.barrier()?;
        let cpu = cpu_of_this_thread().saturating_sub(used);
        let mut took = Took { clock: began.elapsed(), cpu, ..Took::default() };
        if let Place::Ranks(shared) = self.place {
            shared.stop_measuring();
            let waits = shared.stats();
            took.write_faults = waits.write_fault_wait;
            took.waits = waits.read_fault_wait
                + waits.write_fault_wait
                + waits.lock_wait
                + waits.unlock_wait
                + waits.barrier_wait;
        }
        Ok(took)
    }

    fn ask(&self, what: impl FnOnce(&Shared) -> Result<(), SharedError>) -> Result<(), SharedError> {
        match self.place {
            Place::Alone(_) => Ok(()),
            Place::Ranks(shared) => what(shared),
        }
    }
}

/// Types of which all bit patterns are values.
///
/// # Safety
/// They are: numbers and arrays of numbers, aligned to 8 bytes at most.
pub unsafe trait Plain: Copy {}
// SAFETY: a number.
unsafe impl Plain for u64 {}
// SAFETY: a number.
unsafe impl Plain for f64 {}
// SAFETY: numbers side by side.
unsafe impl Plain for [f64; 2] {}
// SAFETY: numbers side by side.
unsafe impl Plain for [f64; 3] {}

/// Values in a team's memory. Copies are the same memory.
#[derive(Debug)]
pub struct Array<'a, T> {
    start: *mut T,
    count: usize,
    team: PhantomData<&'a T>,
}

impl<T> Clone for Array<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Array<'_, T> {}

impl<'a, T: Plain> Array<'a, T> {
    #[must_use]
    pub fn count(self) -> usize {
        self.count
    }

    /// # Safety
    /// No rank writes the value during the call.
    ///
    /// # Panics
    /// If there is no such value.
    #[must_use]
    pub unsafe fn get(self, at: usize) -> T {
        assert!(at < self.count, "value {at} of {}", self.count);
        // SAFETY: in the array, which lives as long as the team; the rest by the caller.
        unsafe { self.start.add(at).read() }
    }

    /// # Safety
    /// No other rank uses the value during the call.
    ///
    /// # Panics
    /// If there is no such value.
    pub unsafe fn set(self, at: usize, value: T) {
        assert!(at < self.count, "value {at} of {}", self.count);
        // SAFETY: in the array, which lives as long as the team; the rest by the caller.
        unsafe { self.start.add(at).write(value) };
    }

    /// # Safety
    /// No rank writes these values while the slice is used.
    ///
    /// # Panics
    /// If they are not all there.
    #[must_use]
    pub unsafe fn slice(self, at: Range<usize>) -> &'a [T] {
        assert!(at.start <= at.end && at.end <= self.count, "values {at:?} of {}", self.count);
        // SAFETY: in the array, which lives as long as the team, aligned, and every bit pattern is a value;
        // the rest by the caller.
        unsafe { std::slice::from_raw_parts(self.start.add(at.start), at.len()) }
    }

    /// # Safety
    /// No other rank uses these values while the slice is used.
    ///
    /// # Panics
    /// If they are not all there.
    #[must_use]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(self, at: Range<usize>) -> &'a mut [T] {
        assert!(at.start <= at.end && at.end <= self.count, "values {at:?} of {}", self.count);
        // SAFETY: as in `slice`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at.start), at.len()) }
    }

    /// All of it, at rank 0; nothing elsewhere.
    ///
    /// # Safety
    /// No rank writes it any more.
    #[must_use]
    pub unsafe fn all(self, team: &Team<'_>) -> &'a [T] {
        // SAFETY: by the caller.
        unsafe { self.slice(0..if team.leads() { self.count } else { 0 }) }
    }
}
