//! A queue of tasks under one lock. A task is a range of numbers; a wide one is split in two, a narrow one
//! computed. What a task *is* stands in a slot that its maker fills before it takes the queue's lock, which
//! publishes it: legal wherever programs without races are, not under entry consistency.

use super::{Answer, Program, ProgramError, RACE_FREE, Team, mix};

pub const PROGRAM: Program = Program {
    name: "tasks",
    sizes: &["numbers", "grain"],
    full: &[4_000_000, 2000],
    small: &[4000, 100],
    protocols: RACE_FREE,
    fits: super::any,
    run,
};

const QUEUE: usize = 1;

/// What the queue's lock guards, by index: how many tasks are not done, how many wait, the sum so far, and
/// then the slots of those that wait.
const UNDONE: usize = 0;
const WAITING: usize = 1;
const SUM: usize = 2;
const FIRST: usize = 3;

/// The weight of a number in the sum.
fn value(number: u64) -> u64 {
    let mut steps = 0;
    let mut n = mix(number) % 1000 + 1;
    while n != 1 {
        n = if n.is_multiple_of(2) { n / 2 } else { 3 * n + 1 };
        steps += 1;
    }
    steps
}

fn run(team: &Team<'_>, sizes: &[usize]) -> Result<Answer, ProgramError> {
    let &[numbers, grain] = sizes else { unreachable!("the sizes are checked") };
    // Halving leaves no task narrower than half the grain, and one splits into two: so many tasks there are
    // at most.
    let most = 4 * numbers.div_ceil(grain.min(numbers)) + 4;
    let queue = team.array::<u64>(FIRST + most)?;
    // Two words a slot, `most` slots for each rank, so that finding a free slot takes no lock.
    let slots = team.array::<u64>(2 * most * team.ranks())?;
    let mut next = team.rank() * most;
    if team.leads() {
        // SAFETY: no other rank uses the queue and its slots before the barrier.
        unsafe {
            slots.set(2 * next + 1, numbers as u64);
            queue.set(UNDONE, 1);
            queue.set(WAITING, 1);
            queue.set(FIRST, next as u64);
        }
        next += 1;
    }
    let took = team.time(|| {
        let mut sum = 0;
        team.lock(QUEUE)?;
        loop {
            // SAFETY: here this rank has the queue's lock.
            let (undone, waiting) = unsafe { (queue.get(UNDONE), queue.get(WAITING)) };
            if undone == 0 {
                break;
            }
            if waiting == 0 {
                team.wait(QUEUE)?;
                continue;
            }
            let top = FIRST + index(waiting - 1);
            // SAFETY: as above.
            let slot = index(unsafe {
                queue.set(WAITING, waiting - 1);
                queue.get(top)
            });
            team.unlock(QUEUE)?;
            // SAFETY: its maker has filled the slot before the lock was given back, and writes it no more.
            let (from, to) = unsafe { (slots.get(2 * slot), slots.get(2 * slot + 1)) };
            let made = if to - from > grain as u64 {
                let middle = from.midpoint(to);
                for (at, (from, to)) in (next..).zip([(from, middle), (middle, to)]) {
                    // SAFETY: a slot of this rank that no other rank knows yet.
                    unsafe {
                        slots.set(2 * at, from);
                        slots.set(2 * at + 1, to);
                    }
                }
                next += 2;
                2
            } else {
                sum += (from..to).map(value).sum::<u64>();
                0
            };
            team.lock(QUEUE)?;
            // SAFETY: here this rank has the queue's lock.
            let undone = unsafe {
                let waiting = queue.get(WAITING);
                for task in 0..made {
                    queue.set(FIRST + index(waiting + task), next as u64 - made + task);
                }
                queue.set(WAITING, waiting + made);
                queue.set(UNDONE, queue.get(UNDONE) + made - 1);
                queue.get(UNDONE)
            };
            if made > 0 || undone == 0 {
                team.broadcast(QUEUE)?;
            }
        }
        // SAFETY: as above.
        unsafe { queue.set(SUM, queue.get(SUM) + sum) };
        Ok::<_, ProgramError>(team.unlock(QUEUE)?)
    })?;
    // SAFETY: no rank writes any more.
    let exact = unsafe { queue.all(team) }.iter().take(FIRST).copied().collect();
    Ok(Answer { exact, took, ..Answer::default() })
}

/// A word of the queue as an index.
fn index(word: u64) -> usize {
    usize::try_from(word).expect("as many as there are slots")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_counts_once() {
        for (numbers, grain) in [(1, 1), (1000, 1), (1000, 7), (1000, 5000)] {
            let answer = PROGRAM.alone(&[numbers, grain]).unwrap();
            assert_eq!(answer.exact, [0, 0, (0..numbers as u64).map(value).sum::<u64>()]);
        }
    }
}
