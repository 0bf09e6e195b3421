//! Which CPUs each rank may use.
//!
//! Two ranks that meet again and again sleep and wake in turns. The scheduler then sees only one of them
//! runnable at a time and leaves both on one CPU. So each gets CPUs of its own, as with `mpirun`.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rampool_shared::Binding;
use rampool_shared::environment::variable;

/// How ranks are bound to CPUs.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Bind {
    /// Each process may use only its share of the CPUs.
    #[default]
    Rank,
    /// The scheduler alone decides.
    None,
}

/// A share of `cpus` for each of `ranks` processes; CPUs of a share are on one core or in one socket. `None`
/// if there are too few CPUs, or nothing to share.
pub fn shares(mut cpus: Vec<Cpu>, ranks: u16) -> Option<Vec<Binding>> {
    let ranks = usize::from(ranks);
    if ranks < 2 || cpus.len() < ranks {
        return None;
    }
    cpus.sort_unstable();
    let all: Vec<usize> = cpus.iter().map(|cpu| cpu.number).collect();
    let at = |rank: usize| all.len() * rank / ranks;
    Some(
        (0..ranks)
            .map(|rank| Binding { own: all[at(rank)..at(rank + 1)].to_vec(), all: all.clone() })
            .collect(),
    )
}

/// Restricts the program, and all that it starts, to its share of the CPUs, and tells it so.
pub fn bind(command: &mut Command, binding: &Binding) {
    command.env(variable::BOUND, binding.to_string());
    let cpus = binding.own.clone();
    // SAFETY: between fork and exec only sched_setaffinity is called, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            // The CPUs may have been taken away meanwhile; the program then runs where it may.
            let _ = rampool_kernel::thread::pin_to(&cpus);
            Ok(())
        });
    }
}

/// Where a CPU is. CPUs that compare close are close to each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Cpu {
    socket: u32,
    core: u32,
    number: usize,
}

impl Cpu {
    /// The CPUs that this process may use.
    pub fn allowed() -> Vec<Self> {
        rampool_kernel::thread::allowed_cpus().into_iter().map(Self::find).collect()
    }

    /// A machine that does not report its topology has its CPUs in one row.
    fn find(number: usize) -> Self {
        let dir = Path::new("/sys/devices/system/cpu").join(format!("cpu{number}/topology"));
        let read = |name| {
            std::fs::read_to_string(dir.join(name))
                .ok()
                .and_then(|text| text.trim().parse().ok())
                .unwrap_or(0)
        };
        Self { socket: read("physical_package_id"), core: read("core_id"), number }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of `sockets` times `cores` with two threads each, numbered as Linux does: first threads
    /// first.
    fn machine(sockets: u32, cores: u32) -> Vec<Cpu> {
        let threads =
            (0..2).flat_map(|_| (0..sockets).flat_map(|socket| (0..cores).map(move |core| (socket, core))));
        threads.zip(0..).map(|((socket, core), number)| Cpu { socket, core, number }).collect()
    }

    fn own(cpus: Vec<Cpu>, ranks: u16) -> Vec<Vec<usize>> {
        shares(cpus, ranks).unwrap().into_iter().map(|binding| binding.own).collect()
    }

    #[test]
    fn ranks_share_no_core_while_there_are_enough() {
        assert_eq!(own(machine(1, 4), 2), [[0, 4, 1, 5], [2, 6, 3, 7]]);
        assert_eq!(own(machine(2, 2), 2), [[0, 4, 1, 5], [2, 6, 3, 7]], "a socket each");
        assert_eq!(own(machine(1, 4), 3).concat(), [0, 4, 1, 5, 2, 6, 3, 7], "every CPU is in a share");
        assert_eq!(own(machine(1, 2), 4), [[0], [2], [1], [3]]);
        assert_eq!(shares(machine(1, 2), 3).unwrap()[2].all, [0, 2, 1, 3]);
    }

    #[test]
    fn no_rank_is_bound_where_ranks_have_to_share_cpus_or_there_is_only_one() {
        assert_eq!(shares(machine(1, 1), 3), None);
        assert_eq!(shares(machine(1, 4), 1), None);
        assert_eq!(shares(Vec::new(), 2), None);
    }
}
