//! The directory of one run: its settings, its private server's socket, and the counters of every process of
//! it.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rampool_client::stats::StatsSnapshot;
use rampool_run::process_registry::ProcessRegistry;
use rampool_run::settings::RUN_DIR_VARIABLE;
use rustix::fs::{FlockOperation, flock};

/// Removed with everything in it when dropped.
pub struct RunDir {
    path: PathBuf,
    /// Held by this process and, after it, by its caretaker.
    _lock: File,
}

impl RunDir {
    /// Creates a directory that only this user can enter, and removes those of runs that ended without doing
    /// so.
    pub fn create() -> io::Result<Self> {
        Self::create_in(&base_dir()?)
    }

    fn create_in(base: &Path) -> io::Result<Self> {
        for (pid, path) in runs_in(base)? {
            if !is_under_way(pid, &path) {
                let _ = std::fs::remove_dir_all(path);
            }
        }
        let name = format!("run-{}", std::process::id());
        let names = std::iter::once(name.clone()).chain((1_u32..).map(|number| format!("{name}.{number}")));
        // A run may outlive its `rampool run`, whose process id may now be this one's.
        let path = names
            .map(|name| base.join(name))
            .find(|path| !is_lived_in(path))
            .expect("there are more names than runs");
        if path.exists() {
            std::fs::remove_dir_all(&path)?;
        }
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        let lock = File::open(&path)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self { path, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The counters of every process of the run so far.
    pub fn read_stats(&self) -> Vec<StatsSnapshot> {
        read_stats(&self.path)
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Whether any part of a run is left: its `rampool run`, its caretaker, or a process.
pub fn is_under_way(pid: u32, run: &Path) -> bool {
    lives(pid.into()) || is_lived_in(run)
}

/// Whether there is a process with this number.
pub fn lives(process: u64) -> bool {
    Path::new("/proc").join(process.to_string()).exists()
}

/// Whether any process uses a run's directory, whatever process id its `rampool run` has, or had.
fn is_lived_in(run: &Path) -> bool {
    let is_held =
        || File::open(run).is_ok_and(|dir| flock(&dir, FlockOperation::NonBlockingLockExclusive).is_err());
    is_held() || !ProcessRegistry::of(run).look().present.is_empty()
}

/// Whether a process was started as part of the run with this directory, by its initial environment.
pub fn is_of_run(process: u32, run: &Path) -> bool {
    let wanted = [RUN_DIR_VARIABLE.as_bytes(), b"=", run.as_os_str().as_bytes()].concat();
    let environment = std::fs::read(format!("/proc/{process}/environ"));
    environment.is_ok_and(|bytes| bytes.split(|byte| *byte == 0).any(|variable| variable == wanted))
}

/// Every run of this user on this machine, as (process id of its `rampool run`, directory).
pub fn all_runs() -> io::Result<Vec<(u32, PathBuf)>> {
    runs_in(&base_dir()?)
}

fn runs_in(base: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut runs = Vec::new();
    for entry in std::fs::read_dir(base)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("run-"));
        if let Some(pid) = name.and_then(|name| name.split('.').next()?.parse().ok()) {
            runs.push((pid, path));
        }
    }
    runs.sort_unstable();
    Ok(runs)
}

/// The counters in a run's directory, by process.
pub fn read_stats(run: &Path) -> Vec<StatsSnapshot> {
    let Ok(entries) = std::fs::read_dir(run) else { return Vec::new() };
    let mut all: Vec<StatsSnapshot> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            (path.extension()? == "stats").then_some(())?;
            StatsSnapshot::from_bytes(&std::fs::read(path).ok()?)
        })
        .collect();
    all.sort_by_key(|s| s.pid);
    all
}

/// Memory-backed where possible, because the counters in it change all the time.
fn base_dir() -> io::Result<PathBuf> {
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    if let Some(dir) = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_dir()) {
        let path = Path::new(&dir).join("rampool");
        make_private(&path, user)?;
        return Ok(path);
    }
    let shared =
        if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
    private_in(&shared, user)
}

/// How many names other users may have taken, in a directory where all users may create names, before this
/// user gives up.
const NAMES: u32 = 16;

/// This user's first own directory in a directory that all users share. All users can create directories
/// there under any name, so the first name that is free or belongs to this user counts. It is always the
/// same, as long as none is removed.
fn private_in(shared: &Path, user: u32) -> io::Result<PathBuf> {
    let names = std::iter::once(format!("rampool-{user}"))
        .chain((2..=NAMES).map(|number| format!("rampool-{user}-{number}")));
    let mut first = None;
    for path in names.map(|name| shared.join(name)) {
        match make_private(&path, user) {
            Ok(()) => return Ok(path),
            Err(error) => _ = first.get_or_insert(error),
        }
    }
    Err(first.expect("there are names"))
}

/// Creates a directory that only `user` may enter, unless it exists.
fn make_private(path: &Path, user: u32) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display())));
        }
        _ => {}
    }
    let found = std::fs::symlink_metadata(path)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
        return Err(io::Error::other(format!(
            "{} belongs to another user, or others may enter it",
            path.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let error = make_private(Path::new("/proc/rampool"), 0).unwrap_err();
        assert!(error.to_string().contains("/proc/rampool: "), "{error}");
    }

    /// Another user took the name first, so no run of this user started.
    #[test]
    fn a_name_that_another_user_has_taken_is_left_to_it() {
        let shared = tempfile::tempdir().unwrap();
        // SAFETY: geteuid has no preconditions.
        let user = unsafe { libc::geteuid() };
        // A directory that others may enter counts as another user's.
        std::fs::create_dir(shared.path().join(format!("rampool-{user}"))).unwrap();
        std::fs::write(shared.path().join(format!("rampool-{user}-2")), "").unwrap();
        let found = private_in(shared.path(), user).unwrap();
        assert_eq!(found, shared.path().join(format!("rampool-{user}-3")));
        assert_eq!(private_in(shared.path(), user).unwrap(), found);
    }

    #[test]
    fn a_run_that_is_left_to_a_caretaker_keeps_its_directory_when_its_number_is_given_again() {
        let base = tempfile::tempdir().unwrap();
        let of_caretaker = RunDir::create_in(base.path()).unwrap();
        let socket = of_caretaker.path().join("server.sock");
        std::fs::write(&socket, "").unwrap();
        let again = RunDir::create_in(base.path()).unwrap();
        assert!(socket.exists());
        let pid = std::process::id();
        assert_eq!(
            runs_in(base.path()).unwrap(),
            [(pid, of_caretaker.path().to_owned()), (pid, again.path().to_owned())]
        );
        drop(of_caretaker);
        let third = RunDir::create_in(base.path()).unwrap();
        assert_eq!(
            runs_in(base.path()).unwrap(),
            [(pid, third.path().to_owned()), (pid, again.path().to_owned())]
        );
    }
}
