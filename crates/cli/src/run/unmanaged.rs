//! Processes of a run whose memory is not managed, because they executed a program into which no agent can be
//! loaded. `rampool run` refuses to start such a program itself. Those that the program starts are reported
//! once each. So are programs that have their heap in shared memory
//! ([`shared_memory`](super::shared_memory)).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rampool_wire::units::ByteLen;

use super::shared_memory;
use crate::program;
use crate::rundir::is_of_run;

const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Looking takes at most one part in this many of the time, however many processes there are.
const SHARE: u32 = 50;

/// Looks at the processes of a run now and then.
pub struct Unmanaged {
    agent: String,
    next: Instant,
    /// What each process ran when it was last looked at.
    seen: BTreeMap<u32, PathBuf>,
    /// One line for each program.
    found: BTreeSet<String>,
    /// Programs with much shared memory, which were reported.
    sharing: BTreeSet<PathBuf>,
}

impl Unmanaged {
    /// `agent` is the name of the library that a managed process has loaded. Processes that exist now are not
    /// looked at: they are the program itself, which was checked before.
    pub fn new(agent: &str) -> Self {
        Self {
            agent: agent.to_owned(),
            next: Instant::now() + LOOK_EVERY,
            seen: BTreeMap::new(),
            found: BTreeSet::new(),
            sharing: BTreeSet::new(),
        }
    }

    /// Calls `tell` with a line for each program seen for the first time, among process `root`, the processes
    /// registered in `run_dir`, and their descendants. Returns at once if the last look was a moment ago.
    pub fn look(&mut self, root: u32, run_dir: &Path, tell: &mut dyn FnMut(&str)) {
        let began = Instant::now();
        if began < self.next {
            return;
        }
        let processes = with_descendants(root, run_dir);
        self.seen.retain(|process, _| processes.contains(process));
        for process in processes {
            let Ok(program) = fs::read_link(format!("/proc/{process}/exe")) else { continue };
            if !self.sharing.contains(&program)
                && let Some((bytes, name)) = shared_memory::much(process)
            {
                tell(&format!(
                    "rampool: process {process} ({}) has {} in shared memory ({name}), which stays on this \
                     machine and does not count as local memory: only private anonymous memory leaves. Of a \
                     JVM with ZGC, choose another collector: -XX:+UseG1GC",
                    program.display(),
                    ByteLen(bytes)
                ));
                self.sharing.insert(program.clone());
            }
            if self.seen.get(&process) == Some(&program) {
                continue;
            }
            // A process that executes another program right now is looked at next time.
            let Some(reason) = while_unchanged(process, || self.reason(process, &program)) else { continue };
            if let Some(reason) = reason
                && self.found.insert(reason.clone())
            {
                tell(&format!(
                    "rampool: process {process} runs without rampool, with all of its memory on this \
                     machine: {reason}"
                ));
            }
            self.seen.insert(process, program);
        }
        self.next = began + LOOK_EVERY.max(began.elapsed() * SHARE);
    }

    /// Why each program seen so far is not managed.
    pub fn reasons(&self) -> impl Iterator<Item = &str> {
        self.found.iter().map(String::as_str)
    }

    fn reason(&self, process: u32, program: &Path) -> Option<String> {
        let of = |file: &str| PathBuf::from(format!("/proc/{process}/{file}"));
        if let Some(reason) = program::why_not(&of("exe"), program) {
            return Some(reason);
        }
        // Some programs overwrite their environment, but have the agent loaded by then. Both are empty for a
        // process that is about to end.
        let lacks_agent =
            |bytes: &[u8]| !bytes.windows(self.agent.len()).any(|part| part == self.agent.as_bytes());
        let read = |file: &str| fs::read(of(file)).ok().filter(|bytes| lacks_agent(bytes));
        (read("environ").is_some() && read("maps").is_some_and(|maps| !maps.is_empty()))
            .then(|| format!("{} was started without LD_PRELOAD, which loads the agent", program.display()))
    }
}

/// The result of `look`, if the process ran one program throughout. In the middle of `execve` a process has
/// its new name, but neither an environment nor libraries yet. The end address of its environment shows this:
/// it is 0 until all is there, and random each time.
fn while_unchanged<T>(process: u32, look: impl FnOnce() -> T) -> Option<T> {
    let environment = || {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // proc_pid_stat(5): env_end is the 51st field; the name (2nd) may contain spaces and parentheses.
        stat.rsplit_once(')')?.1.split_whitespace().nth(51 - 3)?.parse::<u64>().ok().filter(|end| *end != 0)
    };
    let before = environment()?;
    let found = look();
    (environment() == Some(before)).then_some(found)
}

fn with_descendants(root: u32, run_dir: &Path) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut left: Vec<u32> = vec![root];
    // Orphans are found by their registration. The id may meanwhile belong to a process that this run did not
    // start.
    if let Ok(entries) = fs::read_dir(run_dir) {
        let signed = |path: PathBuf| {
            (path.extension()? == "stats").then(|| path.file_stem()?.to_str()?.parse::<u32>().ok()).flatten()
        };
        left.extend(
            entries
                .filter_map(|entry| signed(entry.ok()?.path()))
                .filter(|process| is_of_run(*process, run_dir)),
        );
    }
    while let Some(process) = left.pop() {
        if !found.insert(process) {
            continue;
        }
        let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { continue };
        for thread in threads.filter_map(Result::ok) {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            left.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_program_without_the_agent_is_named_once() {
        let run_dir = tempfile::tempdir().unwrap();
        let start = |agent: Option<&str>| {
            let mut command = Command::new("cat");
            command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped());
            if let Some(agent) = agent {
                command.env("SOME_VARIABLE", agent);
            }
            let mut child = command.spawn().unwrap();
            // `spawn` returns while the child still becomes cat; what it copies, it copies as cat.
            child.stdin.as_mut().unwrap().write_all(b"!").unwrap();
            child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            child
        };
        let mut told = Vec::new();
        let mut unmanaged = Unmanaged::new("librampool_agent.so");
        let mut look = |unmanaged: &mut Unmanaged, root: u32| {
            unmanaged.next = Instant::now();
            unmanaged.look(root, run_dir.path(), &mut |line| told.push(line.to_owned()));
            told.len()
        };
        let mut with = start(Some("/somewhere/librampool_agent.so"));
        assert_eq!(look(&mut unmanaged, with.id()), 0, "one that has it");
        let (mut without, mut another) = (start(None), start(None));
        assert_eq!(look(&mut unmanaged, without.id()), 1);
        assert_eq!(look(&mut unmanaged, without.id()), 1, "the same process again");
        assert_eq!(look(&mut unmanaged, another.id()), 1, "the same program again");
        assert_eq!(unmanaged.reasons().count(), 1);
        // An id that once was a process of the run, and now belongs to an unrelated process.
        let mut unrelated = Command::new("sleep").env_clear().arg("1000").spawn().unwrap();
        std::fs::write(run_dir.path().join(format!("{}.stats", unrelated.id())), "").unwrap();
        assert_eq!(look(&mut unmanaged, with.id()), 1, "an unrelated process is not named");
        unrelated.kill().unwrap();
        unrelated.wait().unwrap();
        assert!(told[0].contains("cat was started without LD_PRELOAD"), "{told:?}");
        for child in [&mut with, &mut without, &mut another] {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }

    #[test]
    fn one_that_becomes_another_program_just_now_is_not_named() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("again.sh");
        std::fs::write(&script, "read line || exit 0; exec /bin/sh \"$0\"\n").unwrap();
        let mut command = Command::new("/bin/sh");
        command.arg(&script).env_clear().env("SOME_VARIABLE", "librampool_agent.so").stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = child.stdin.take().unwrap();
        let mut unmanaged = Unmanaged::new("librampool_agent.so");
        for _ in 0..2000 {
            // It executes itself again while it is looked at, and the next look takes it for another program.
            lines.write_all(b"\n").unwrap();
            unmanaged.seen.clear();
            unmanaged.next = Instant::now();
            unmanaged.look(child.id(), directory.path(), &mut |line| panic!("{line}"));
        }
        drop(lines);
        child.wait().unwrap();
    }
}
