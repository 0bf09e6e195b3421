//! A process's rank, the number of ranks, and their meeting point, from the variables of the launcher.

use rampool_wire::checksum;
use std::fmt::Write as _;

/// Names of the variables that `rampool launch` sets. They take precedence over those of other launchers.
pub mod variable {
    pub const RANK: &str = "RAMPOOL_RANK";
    pub const RANKS: &str = "RAMPOOL_RANKS";
    /// `HOST:PORT` where rank 0 listens.
    pub const RENDEZVOUS: &str = "RAMPOOL_RENDEZVOUS";
    /// The number of a listening descriptor that rank 0 inherits.
    pub const RENDEZVOUS_FD: &str = "RAMPOOL_RENDEZVOUS_FD";
    /// A name unique to the run. It is no secret.
    pub const RUN: &str = "RAMPOOL_RUN";
    /// The secret of the run's ranks: 64 hexadecimal digits.
    pub const RUN_KEY: &str = "RAMPOOL_RUN_KEY";
    /// Ranks on this machine.
    pub const LOCAL_RANKS: &str = "RAMPOOL_LOCAL_RANKS";
    /// The CPUs that a rank is bound to, out of those of all ranks on this machine: `0,4 of 0,1,4,5`.
    pub const BOUND: &str = "RAMPOOL_BOUND";
    /// The number of a descriptor into which a rank writes why it ends the run.
    pub const REPORT_FD: &str = "RAMPOOL_REPORT_FD";
    /// The prefix of such a line on standard error, for ranks on other machines, where no descriptor reaches
    /// the launcher.
    pub const REPORT_MARK: &str = "RAMPOOL_REPORT_MARK";
    /// Where a rank writes its statistics when it has finished.
    pub const STATS_DIR: &str = "RAMPOOL_STATS_DIR";
    /// Where a rank writes its trace.
    pub const TRACE_DIR: &str = "RAMPOOL_TRACE_DIR";
}

/// A process's place in a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    pub rank: u16,
    pub ranks: u16,
    /// `HOST:PORT` where rank 0 listens; none is needed for one rank.
    pub rendezvous: Option<String>,
    pub run: String,
    /// Ranks on this machine, if that is known.
    pub local_ranks: Option<u16>,
    /// The launcher's name.
    pub launcher: &'static str,
}

/// An incomplete or contradictory environment.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    #[error("{name}={value:?} is not {wanted}")]
    Value { name: &'static str, value: String, wanted: &'static str },
    #[error("{launcher} says that this is rank {rank}, but not how many ranks there are: set {missing}")]
    Size { launcher: &'static str, rank: u16, missing: &'static str },
    /// Otherwise each process would run alone without noticing.
    #[error(
        "RAMPOOL_RANKS says that there are {ranks} ranks, but nothing says which one this is: set RAMPOOL_RANK"
    )]
    Which { ranks: u16 },
    #[error("{launcher} says that this is rank {rank} of {ranks}: ranks count from 0")]
    Rank { launcher: &'static str, rank: u16, ranks: u16 },
    #[error(
        "{launcher} does not name rank 0's address: set RAMPOOL_RENDEZVOUS=HOST:PORT to an address of rank 0's machine{hint}"
    )]
    Rendezvous { launcher: &'static str, hint: &'static str },
}

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Place {
    /// The place of this process. Without any launcher it is the only rank.
    ///
    /// # Errors
    /// If the launcher left something out.
    pub fn detect() -> Result<Self, EnvironmentError> {
        Self::find(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// Like [`Place::detect`], in another environment.
    ///
    /// # Errors
    /// As [`Place::detect`].
    pub fn find(lookup: Lookup<'_>) -> Result<Self, EnvironmentError> {
        let mut place = Self::of_launcher(lookup)?;
        if let Some(address) = lookup(variable::RENDEZVOUS) {
            place.rendezvous = Some(address);
        }
        if let Some(run) = lookup(variable::RUN) {
            place.run = run;
        }
        if let Some(local) = number(lookup, variable::LOCAL_RANKS)? {
            place.local_ranks = Some(local);
        }
        let Self { rank, ranks, launcher, .. } = place;
        if rank >= ranks {
            return Err(EnvironmentError::Rank { launcher, rank, ranks });
        }
        if ranks > 1 && place.rendezvous.is_none() {
            let hint = if launcher == "mpirun" { " (mpirun -x RAMPOOL_RENDEZVOUS)" } else { "" };
            return Err(EnvironmentError::Rendezvous { launcher, hint });
        }
        Ok(place)
    }

    fn of_launcher(lookup: Lookup<'_>) -> Result<Self, EnvironmentError> {
        let place = |rank, ranks, launcher| Self {
            rank,
            ranks,
            rendezvous: None,
            run: String::new(),
            local_ranks: None,
            launcher,
        };
        if let Some(rank) = number(lookup, variable::RANK)? {
            let ranks = size(lookup, "rampool", rank, variable::RANKS)?;
            return Ok(place(rank, ranks, "rampool"));
        }
        if lookup("MASTER_ADDR").is_some()
            && let Some(rank) = number(lookup, "RANK")?
        {
            return Self::of_torchrun(lookup, rank);
        }
        if let Some(rank) = number(lookup, "OMPI_COMM_WORLD_RANK")? {
            let ranks = size(lookup, "mpirun", rank, "OMPI_COMM_WORLD_SIZE")?;
            let local = number(lookup, "OMPI_COMM_WORLD_LOCAL_SIZE")?;
            return Ok(Self::of_mpi(lookup, place(rank, ranks, "mpirun"), local));
        }
        if let Some(rank) = number(lookup, "PMI_RANK")? {
            let ranks = size(lookup, "PMI", rank, "PMI_SIZE")?;
            let local = number(lookup, "MPI_LOCALNRANKS")?;
            return Ok(Self::of_mpi(lookup, place(rank, ranks, "PMI"), local));
        }
        if let Some(rank) = number(lookup, "SLURM_PROCID")? {
            return Self::of_slurm(lookup, rank);
        }
        if let Some(rank) = number(lookup, "PMIX_RANK")? {
            let ranks = match number(lookup, "PMIX_SIZE")? {
                Some(ranks) => ranks,
                None => size(lookup, "PMIx", rank, variable::RANKS)?,
            };
            return Ok(Self::of_mpi(lookup, place(rank, ranks, "PMIx"), None));
        }
        if let Some(rank) = number(lookup, "JOB_COMPLETION_INDEX")? {
            let ranks = match number(lookup, "WORLD_SIZE")? {
                Some(ranks) => ranks,
                None => size(lookup, "the Kubernetes job", rank, variable::RANKS)?,
            };
            return Ok(place(rank, ranks, "the Kubernetes job"));
        }
        match number(lookup, variable::RANKS)? {
            Some(ranks) if ranks != 1 => Err(EnvironmentError::Which { ranks }),
            _ => Ok(place(0, 1, "no launcher")),
        }
    }

    fn of_torchrun(lookup: Lookup<'_>, rank: u16) -> Result<Self, EnvironmentError> {
        let ranks = size(lookup, "torchrun", rank, "WORLD_SIZE")?;
        let host = lookup("MASTER_ADDR").expect("checked");
        let port: Option<u16> = number(lookup, "MASTER_PORT")?;
        // The agent itself listens on the port where it offers its store.
        let taken = u16::from(lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True"));
        let rendezvous = port.and_then(|port| port.checked_add(taken)).map(|port| address(&host, port));
        let run = lookup("TORCHELASTIC_RUN_ID").map_or_else(String::new, |id| format!("torchrun {id}"));
        Ok(Self {
            rank,
            ranks,
            rendezvous,
            run,
            local_ranks: number(lookup, "LOCAL_WORLD_SIZE")?,
            launcher: "torchrun",
        })
    }

    /// MPI launchers give no addresses. All ranks on one machine can compute one.
    fn of_mpi(lookup: Lookup<'_>, place: Self, local_ranks: Option<u16>) -> Self {
        let job = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDI_CONTROL_FD", "PMI_FD"]
            .iter()
            .find_map(|name| lookup(name));
        let run = job.map_or_else(String::new, |job| format!("{} {job}", place.launcher));
        let alone = local_ranks == Some(place.ranks) && !run.is_empty();
        let rendezvous = alone.then(|| address("127.0.0.1", port_of(&run)));
        Self { rendezvous, run, local_ranks, ..place }
    }

    fn of_slurm(lookup: Lookup<'_>, rank: u16) -> Result<Self, EnvironmentError> {
        let ranks = match number(lookup, "SLURM_STEP_NUM_TASKS")? {
            Some(ranks) => ranks,
            None => size(lookup, "srun", rank, "SLURM_NTASKS")?,
        };
        let mut run = String::new();
        for (word, name) in [("slurm ", "SLURM_JOB_ID"), (".", "SLURM_STEP_ID")] {
            let _ = write!(run, "{word}{}", lookup(name).unwrap_or_default());
        }
        let nodes = lookup("SLURM_STEP_NODELIST").or_else(|| lookup("SLURM_JOB_NODELIST"));
        let one = [lookup("SLURM_STEP_NUM_NODES"), lookup("SLURM_NNODES")]
            .into_iter()
            .flatten()
            .next()
            .is_some_and(|count| count == "1");
        let host = if one { Some("127.0.0.1".to_owned()) } else { nodes.as_deref().and_then(first_node) };
        let rendezvous = host.map(|host| address(&host, port_of(&run)));
        Ok(Self { rank, ranks, rendezvous, run, local_ranks: one.then_some(ranks), launcher: "srun" })
    }
}

fn number(lookup: Lookup<'_>, name: &'static str) -> Result<Option<u16>, EnvironmentError> {
    lookup(name)
        .map(|value| {
            value.parse().map_err(|_| EnvironmentError::Value {
                name,
                value,
                wanted: "a number from 0 to 65535",
            })
        })
        .transpose()
}

fn size(
    lookup: Lookup<'_>,
    launcher: &'static str,
    rank: u16,
    name: &'static str,
) -> Result<u16, EnvironmentError> {
    number(lookup, name)?.ok_or(EnvironmentError::Size { launcher, rank, missing: name })
}

fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// A port that all ranks of a run compute alike, below those that kernels assign by themselves.
fn port_of(run: &str) -> u16 {
    10_000 + u16::try_from(checksum::crc32c(run.as_bytes()) % 20_000).expect("below 20000")
}

/// The first name in a list in Slurm's format: `node[07-12,20],other`.
fn first_node(list: &str) -> Option<String> {
    let Some((prefix, rest)) = list.split_once('[') else {
        return list.split(',').next().filter(|name| !name.is_empty()).map(str::to_owned);
    };
    if let Some((first, _)) = prefix.split_once(',') {
        return Some(first.to_owned());
    }
    let (inside, behind) = rest.split_once(']')?;
    let first = inside.split([',', '-']).next().filter(|number| !number.is_empty())?;
    let suffix = behind.split(',').next().unwrap_or_default();
    Some(format!("{prefix}{first}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Place, EnvironmentError> {
        Place::find(&|name| {
            variables.iter().find(|(key, _)| *key == name).map(|&(_, value)| value.to_owned())
        })
    }

    #[test]
    fn a_program_by_itself_is_the_only_rank() {
        let found = place(&[]).unwrap();
        assert_eq!((found.rank, found.ranks, found.rendezvous), (0, 1, None));
    }

    #[test]
    fn every_launcher_is_understood() {
        type Case<'a> = (&'a [(&'a str, &'a str)], u16, u16, &'a str);
        let cases: &[Case<'_>] = &[
            (
                &[
                    ("RAMPOOL_RANK", "2"),
                    ("RAMPOOL_RANKS", "4"),
                    ("RAMPOOL_RENDEZVOUS", "h:1"),
                    ("SLURM_PROCID", "9"),
                ],
                2,
                4,
                "h:1",
            ),
            (
                &[
                    ("RANK", "1"),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "m"),
                    ("MASTER_PORT", "29500"),
                    ("SLURM_PROCID", "0"),
                ],
                1,
                2,
                "m:29500",
            ),
            (
                &[
                    ("RANK", "1"),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "::1"),
                    ("MASTER_PORT", "29500"),
                    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
                ],
                1,
                2,
                "[::1]:29501",
            ),
            (
                &[
                    ("OMPI_COMM_WORLD_RANK", "3"),
                    ("OMPI_COMM_WORLD_SIZE", "4"),
                    ("RAMPOOL_RENDEZVOUS", "a:7"),
                ],
                3,
                4,
                "a:7",
            ),
            (&[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("RAMPOOL_RENDEZVOUS", "a:7")], 0, 2, "a:7"),
            (&[("PMIX_RANK", "1"), ("RAMPOOL_RANKS", "2"), ("RAMPOOL_RENDEZVOUS", "a:7")], 1, 2, "a:7"),
            (
                &[
                    ("JOB_COMPLETION_INDEX", "1"),
                    ("RAMPOOL_RANKS", "3"),
                    ("RAMPOOL_RENDEZVOUS", "job-0.svc:7118"),
                ],
                1,
                3,
                "job-0.svc:7118",
            ),
        ];
        for (variables, rank, ranks, rendezvous) in cases {
            let found = place(variables).unwrap();
            assert_eq!(
                (found.rank, found.ranks, found.rendezvous.as_deref()),
                (*rank, *ranks, Some(*rendezvous)),
                "{variables:?}"
            );
        }
    }

    #[test]
    fn ranks_of_one_job_compute_the_same_meeting_point() {
        let of = |rank: &str, job: &str| {
            place(&[
                ("OMPI_COMM_WORLD_RANK", rank),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
                ("PMIX_NAMESPACE", job),
            ])
            .unwrap()
        };
        assert_eq!(of("0", "prterun-1@1").rendezvous, of("1", "prterun-1@1").rendezvous);
        assert_ne!(of("0", "prterun-1@1").rendezvous, of("0", "prterun-2@1").rendezvous);
        let slurm = |rank: &str| {
            place(&[
                ("SLURM_PROCID", rank),
                ("SLURM_NTASKS", "8"),
                ("SLURM_JOB_ID", "77"),
                ("SLURM_STEP_ID", "0"),
                ("SLURM_STEP_NODELIST", "cn[07-12,20],x"),
                ("SLURM_NNODES", "7"),
            ])
            .unwrap()
        };
        assert_eq!(slurm("1").rendezvous, slurm("5").rendezvous);
        assert!(slurm("1").rendezvous.unwrap().starts_with("cn07:"));
    }

    #[test]
    fn lists_of_nodes_begin_with_a_name() {
        for (list, first) in
            [("a", "a"), ("a,b", "a"), ("n[3-9]", "n3"), ("n[003,5]-ib,m", "n003-ib"), ("x,n[1-2]", "x")]
        {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        for list in ["", "n[", "n[]"] {
            assert_eq!(first_node(list), None, "{list}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        for (variables, words) in [
            (&[("RAMPOOL_RANK", "x")][..], "RAMPOOL_RANK"),
            (&[("OMPI_COMM_WORLD_RANK", "1")], "OMPI_COMM_WORLD_SIZE"),
            (&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")], "mpirun -x RAMPOOL_RENDEZVOUS"),
            (&[("RAMPOOL_RANK", "2"), ("RAMPOOL_RANKS", "2"), ("RAMPOOL_RENDEZVOUS", "a:1")], "rank 2 of 2"),
            (&[("JOB_COMPLETION_INDEX", "0")], "RAMPOOL_RANKS"),
            (&[("RAMPOOL_RANKS", "3")], "set RAMPOOL_RANK"),
        ] {
            let error = place(variables).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
