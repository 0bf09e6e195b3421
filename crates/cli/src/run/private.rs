//! A server for one run alone: in memory where no other is named, or as the backup of those on a disk.

use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use rampool_client::pool::ServerSpec;
use rampool_wire::units::ByteLen;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;

use crate::available;

/// Its log, in the run's directory.
const LOG: &str = "server.log";
/// The part of a disk's free bytes that a backup takes at most, unless its size is named.
const OF_DISK: (u64, u64) = (9, 10);

/// A directory on a disk that has copies of pages, and how much of the disk they may take.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Backup {
    pub directory: PathBuf,
    size: Option<ByteLen>,
}

impl FromStr for Backup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (directory, size) = match text.rsplit_once('=') {
            Some((directory, size)) => {
                let size = size.parse().map_err(|error| format!("{size}: {error}; give DIR or DIR=SIZE"))?;
                (directory, Some(size))
            }
            None => (text, None),
        };
        if directory.is_empty() {
            return Err("give a directory on a disk, perhaps with a size: DIR=64G".to_owned());
        }
        Ok(Self { directory: directory.into(), size })
    }
}

impl Backup {
    fn bytes(&self) -> Result<ByteLen> {
        if let Some(size) = self.size {
            return Ok(size);
        }
        let disk = rustix::fs::statvfs(&self.directory)
            .with_context(|| format!("cannot use {} for --backup", self.directory.display()))?;
        let free = (disk.f_bavail * disk.f_frsize) / OF_DISK.1 * OF_DISK.0;
        Ok(ByteLen((free / ByteLen::MIB).max(1) * ByteLen::MIB))
    }
}

/// It ends when its standard input closes, that is when this process, and its caretaker if there is one, have
/// ended.
pub struct PrivateServer {
    child: Child,
    pub spec: ServerSpec,
    pub memory: ByteLen,
}

impl PrivateServer {
    /// Lends memory; how much is what is available unless `memory` says it. It is not ready yet.
    pub fn in_memory(run_dir: &Path, memory: Option<ByteLen>, local: ByteLen) -> Result<Self> {
        let memory = match memory {
            Some(memory) => memory,
            None => private_memory(available::bytes()?, available::in_all()?, local.0),
        };
        Self::start(run_dir, memory, |command| command.arg("--open-frames"))
    }

    /// Lends a part of a disk. It is not ready yet.
    pub fn on_disk(run_dir: &Path, backup: &Backup, key_file: Option<&Path>) -> Result<Self> {
        Self::start(run_dir, backup.bytes()?, |command| {
            if let Some(key_file) = key_file {
                command.arg("--key-file").arg(key_file);
            }
            command.arg("--disk").arg(&backup.directory)
        })
    }

    fn start(
        run_dir: &Path,
        memory: ByteLen,
        more: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Result<Self> {
        let endpoint = format!("unix:{}", socket(run_dir).display());
        let spec = endpoint.parse()?;
        let log = run_dir.join(LOG);
        let log = std::fs::File::create(&log)
            .with_context(|| format!("cannot write the run's directory: {}", log.display()))?;
        let mut command = Command::new(std::env::current_exe()?);
        // Settings for a server that this machine lends to others, such as its file and its metrics port, do
        // not apply to this one.
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.as_bytes().starts_with(b"RAMPOOL_SERVE_"))
        {
            command.env_remove(name);
        }
        command
            .args(["serve", "--store", "compressed", "--shards", "1", "--memory"])
            .arg(memory.0.to_string())
            .args(["--listen", &endpoint, "--until-stdin-closes"]);
        let child = more(&mut command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            // Keeps the terminal's signals away from it.
            .process_group(0)
            .spawn()
            .context("cannot start a private server")?;
        Ok(Self { child, spec, memory })
    }

    /// Waits until the server prints where it listens.
    pub fn wait_until_ready(&mut self, run_dir: &Path) -> Result<()> {
        const TIMEOUT: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };
        let output = self.child.stdout.as_mut().context("a private server has no standard output")?;
        let mut watched = [PollFd::new(output, PollFlags::IN)];
        if retry_on_intr(|| poll(&mut watched, Some(&TIMEOUT)))? == 0 {
            bail!("the private server did not become ready in {} s", TIMEOUT.tv_sec);
        }
        if output.read(&mut [0; 512])? == 0 {
            let status = self.child.wait()?;
            let said = std::fs::read_to_string(run_dir.join(LOG)).unwrap_or_default();
            bail!("the private server ended at once ({status}): {}", said.trim());
        }
        Ok(())
    }
}

impl Drop for PrivateServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("server.sock")
}

/// What a private server may lend: most of the available memory that the program's local memory leaves. At
/// least half of all memory: what leaves the program takes no more room compressed than it did before, also
/// where little is available, as right after a machine has swapped.
fn private_memory(available: u64, in_all: u64, local: u64) -> ByteLen {
    const MIB: u64 = 1 << 20;
    let lent = (available.saturating_sub(local) / 10 * 8).max(in_all / 2);
    // Whole MiB: a server lends whole pages.
    ByteLen((lent / MIB).max(1) * MIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_server_leaves_room_for_the_program() {
        let lent = |available: u64, in_all: u64, local: u64| {
            private_memory(available << 20, in_all << 20, local << 20).0 >> 20
        };
        assert_eq!(lent(1000, 1000, 200), 640);
        assert_eq!(lent(1000, 1000, 990), 500);
        assert_eq!(lent(0, 1000, 5000), 500, "when little is available people need it");
        assert_eq!(lent(0, 0, 1), 1, "a server lends something");
    }

    #[test]
    fn a_backup_is_a_directory_and_perhaps_a_size() {
        let of = |text: &str| text.parse::<Backup>().map(|backup| (backup.directory, backup.size));
        assert_eq!(of("/data"), Ok(("/data".into(), None)));
        assert_eq!(of("/a=b=4G"), Ok(("/a=b".into(), Some(ByteLen(4 << 30)))));
        assert!(of("=4G").unwrap_err().contains("a directory"));
        assert!(of("/data=much").unwrap_err().contains("DIR=SIZE"));
    }
}
