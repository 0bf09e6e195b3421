//! The process registry of a run: which of its processes live, and which members of the lease they are.
//!
//! A process may be killed, so it cannot report its own end. So each one signs with a file in the run's
//! directory and holds a lock on it, which the kernel releases when the process ends or starts another
//! program. The process that started the run reads the files and says goodbye at the servers for processes
//! that are gone; otherwise their pages would be kept for the grace time.
//!
//! A file is empty; after `joins` its process takes a region over from another one, and after a line with a
//! [`Membership`] it has done so. While any process joins, none may be dismissed: the region may still belong
//! to a process that is gone.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use rampool_client::pool::Membership;

const JOINS: &str = "joins\n";
/// Files whose lock is not held yet.
const UNSIGNED: &str = "unsigned-";
/// A process signs at most this often: once for each program that it becomes.
const SIGNATURES: u32 = 1 << 20;

/// Where the registry of a run lies.
#[must_use]
pub fn path(run_dir: &Path) -> PathBuf {
    run_dir.join("processes")
}

/// A process's line in the registry. It counts as alive until this is dropped, which the kernel does as well.
#[derive(Debug)]
pub struct Signature {
    file: File,
}

impl Signature {
    /// Signs for this process. `joins`: it is about to take over a region of another process of the run.
    /// `None` if the run's directory cannot be written, because the run is over or the process has given its
    /// rights away.
    #[must_use]
    pub fn sign(run_dir: &Path, joins: bool) -> Option<Self> {
        let (registry, pid) = (path(run_dir), std::process::id());
        for number in 0..SIGNATURES {
            let unsigned = registry.join(format!("{UNSIGNED}{pid}.{number}"));
            let signed = registry.join(format!("{pid}.{number}"));
            // An earlier program of this very process.
            if signed.exists() {
                continue;
            }
            let mut file = std::fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&unsigned)
                .ok()?;
            flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
            if joins {
                file.write_all(JOINS.as_bytes()).ok()?;
            }
            std::fs::rename(&unsigned, &signed).ok()?;
            return Some(Self { file });
        }
        None
    }

    /// This process is this member, and has what it took over; from now on.
    ///
    /// # Errors
    /// As writing a file.
    pub fn joined(&mut self, membership: &Membership) -> io::Result<()> {
        self.file.write_all(format!("{membership}\n").as_bytes())
    }
}

/// Reads the registry of a run.
#[derive(Debug)]
pub struct ProcessRegistry {
    path: PathBuf,
}

/// What a look at the registry showed.
#[derive(Debug, Default)]
pub struct Processes {
    /// Processes that live, by process id.
    pub present: Vec<u32>,
    /// Members whose process is gone; each is told once.
    pub gone: Vec<Membership>,
}

impl ProcessRegistry {
    /// A new, empty registry.
    ///
    /// # Errors
    /// As making a directory.
    pub fn create(run_dir: &Path) -> io::Result<Self> {
        let path = path(run_dir);
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }

    /// The registry of a run that exists, perhaps an empty one.
    #[must_use]
    pub fn of(run_dir: &Path) -> Self {
        Self { path: path(run_dir) }
    }

    /// Lists the processes that are present, and strikes out those that are not.
    #[must_use]
    pub fn look(&self) -> Processes {
        let mut gone = Vec::new();
        for (_, path) in self.entries() {
            if let Some(text) = read_if_left(&path) {
                gone.push((path, text));
            }
        }
        // A process that is gone had waited for those that it handed something to: they have signed before,
        // and are seen now.
        let mut processes = Processes::default();
        let mut joining = false;
        for (pid, path) in self.entries() {
            if gone.iter().any(|(left, _)| *left == path) {
                continue;
            }
            processes.present.push(pid);
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            joining |= text.starts_with(JOINS) && membership(&text).is_none();
        }
        if !joining {
            for (path, text) in gone {
                processes.gone.extend(membership(&text));
                // What stays is read once more, and dismissed twice: no harm.
                let _ = std::fs::remove_file(path);
            }
        }
        processes
    }

    fn entries(&self) -> Vec<(u32, PathBuf)> {
        let Ok(entries) = std::fs::read_dir(&self.path) else { return Vec::new() };
        let pid = |path: &Path| path.file_stem()?.to_str()?.parse().ok();
        entries
            .filter_map(|entry| entry.ok().map(|e| e.path()))
            .filter_map(|path| Some((pid(&path)?, path)))
            .collect()
    }
}

/// What a process wrote, if it is gone.
fn read_if_left(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    Some(text)
}

fn membership(text: &str) -> Option<Membership> {
    // The latest: it may have joined a server anew since.
    text.lines().rev().find_map(|line| line.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn member(text: &str) -> Membership {
        text.parse().unwrap()
    }

    /// Calls until this many are present, and returns those found gone on the way. A signature may be held a
    /// little longer than its owner lives: by a child that another test's thread has forked and that has not
    /// started its program yet.
    fn gone_when_present(registry: &ProcessRegistry, present: usize) -> Vec<Membership> {
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut gone = Vec::new();
        loop {
            let processes = registry.look();
            gone.extend(processes.gone);
            if processes.present.len() == present {
                return gone;
            }
            assert!(Instant::now() < deadline, "{} are present, not {present}", processes.present.len());
            std::thread::yield_now();
        }
    }

    #[test]
    fn who_is_gone_is_told_once_and_who_lives_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let registry = ProcessRegistry::create(dir.path()).unwrap();
        assert!(registry.look().present.is_empty() && registry.look().gone.is_empty());
        let (mut first, mut second) =
            (Signature::sign(dir.path(), false).unwrap(), Signature::sign(dir.path(), true).unwrap());
        let third = Signature::sign(dir.path(), false).unwrap();
        assert_eq!(registry.look().present, [std::process::id(); 3]);
        first.joined(&member("rampool-member-1;1.7;2.7")).unwrap();
        drop(first);
        drop(third);
        assert!(
            gone_when_present(&registry, 1).is_empty(),
            "a joining process may need what the first one left"
        );
        second.joined(&member("rampool-member-1;5.7;6.7")).unwrap();
        assert_eq!(gone_when_present(&registry, 1), [member("rampool-member-1;1.7;2.7")]);
        assert!(registry.look().gone.is_empty());
        drop(second);
        assert_eq!(gone_when_present(&registry, 0), [member("rampool-member-1;5.7;6.7")]);
    }

    #[test]
    fn a_process_gone_before_it_joined_delays_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let registry = ProcessRegistry::create(dir.path()).unwrap();
        let (mut parent, child) =
            (Signature::sign(dir.path(), false).unwrap(), Signature::sign(dir.path(), true).unwrap());
        parent.joined(&member("rampool-member-1;1.7")).unwrap();
        drop((parent, child));
        assert_eq!(gone_when_present(&registry, 0), [member("rampool-member-1;1.7")]);
        assert_eq!(std::fs::read_dir(path(dir.path())).unwrap().count(), 0);
    }

    #[test]
    fn where_nothing_can_be_written_no_process_signs() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Signature::sign(&dir.path().join("over"), false).is_none());
        assert!(ProcessRegistry::of(&dir.path().join("over")).look().present.is_empty());
    }
}
