//! What `rampool run` tells the agent inside the programs that it starts.
//!
//! One file, `settings`, in a directory that only its owner can read; the environment variable
//! [`RUN_DIR_VARIABLE`] names the directory. The text is `name = value`, a line each. It changes when a
//! server that was lost is leased anew, or one comes in addition: processes look there. The file `silent` has
//! a byte for each server. Every process of the run publishes its counters there as `PID.stats`, and its last
//! words as `PID.lost`.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::SystemTime;

use rampool_client::pool::{LeaseTicket, TicketError};
use rampool_kernel::probe::FaultMode;
use rampool_net::transport::SameHost;
use rampool_wire::session::Encryption;

/// Names the run's directory to the agent.
pub const RUN_DIR_VARIABLE: &str = "RAMPOOL_RUN_DIR";

/// The exit code of a program that was ended because pages of it are lost.
pub const LOST_EXIT_CODE: i32 = 74;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where this file lies.
    pub run_dir: PathBuf,
    /// The lease that every process of the run shares.
    pub ticket: LeaseTicket,
    pub key_file: Option<PathBuf>,
    pub encryption: Encryption,
    pub same_host: SameHost,
    /// Local memory of each process, in bytes.
    pub local_bytes: u64,
    pub page_bytes: u32,
    pub prefetch_bytes: u32,
    pub fault_mode: FaultMode,
    /// Evict by copying even where the kernel can move pages.
    pub evict_by_copy: bool,
    /// Compare every page that returns with the bytes that left.
    pub verify: bool,
    pub op_deadline_ms: u64,
    pub compression: bool,
    /// Spin this long for an answer or a fault.
    pub spin_us: u64,
    /// Keep the pager on the CPU where faults happen.
    pub follow_faults: bool,
}

/// Why settings could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: `{name}` is missing or invalid", path.display())]
    Field { path: PathBuf, name: &'static str },
    #[error("{}: {source}", path.display())]
    Ticket { path: PathBuf, source: TicketError },
}

/// A byte for each server of the ticket.
const SILENT: &str = "silent";

/// Puts a file, readable by its owner only, in the place of the one before.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), SettingsError> {
    let new = path.with_extension("new");
    let write = || {
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(bytes)?;
        std::fs::rename(&new, path)
    };
    write().map_err(|source| SettingsError::Io { path: path.to_owned(), source })
}

impl Settings {
    fn path(run_dir: &Path) -> PathBuf {
        run_dir.join("settings")
    }

    /// Writes the file, readable by its owner only. Who reads meanwhile reads the one before.
    ///
    /// # Errors
    /// [`SettingsError::Io`].
    pub fn write(&self) -> Result<(), SettingsError> {
        replace(&Self::path(&self.run_dir), self.text().as_bytes())
    }

    fn text(&self) -> String {
        let mut text = format!(
            "ticket = {}\nencryption = {}\nsame_host = {}\nlocal_bytes = {}\npage_bytes = {}\n\
             prefetch_bytes = {}\nfault_mode = {}\nevict_by_copy = {}\nverify = {}\nop_deadline_ms = {}\n\
             compression = {}\nspin_us = {}\nfollow_faults = {}\n",
            self.ticket,
            self.encryption,
            self.same_host,
            self.local_bytes,
            self.page_bytes,
            self.prefetch_bytes,
            self.fault_mode.name(),
            self.evict_by_copy,
            self.verify,
            self.op_deadline_ms,
            self.compression,
            self.spin_us,
            self.follow_faults,
        );
        if let Some(key) = &self.key_file {
            text.push_str(&format!("key_file = {}\n", key.display()));
        }
        text
    }

    /// Reads what [`Settings::write`] wrote.
    ///
    /// # Errors
    /// [`SettingsError`] names the file and the field.
    pub fn read(run_dir: &Path) -> Result<Self, SettingsError> {
        let path = Self::path(run_dir);
        let text = std::fs::read_to_string(&path)
            .map_err(|source| SettingsError::Io { path: path.clone(), source })?;
        let find = |name: &str| {
            text.lines().find_map(|line| {
                let (found, value) = line.split_once('=')?;
                (found.trim() == name).then(|| value.trim())
            })
        };
        fn field<T: FromStr>(
            path: &Path,
            name: &'static str,
            value: Option<&str>,
        ) -> Result<T, SettingsError> {
            value
                .and_then(|v| v.parse().ok())
                .ok_or_else(|| SettingsError::Field { path: path.to_owned(), name })
        }
        let missing = |name| SettingsError::Field { path: path.clone(), name };
        Ok(Self {
            run_dir: run_dir.to_owned(),
            ticket: find("ticket")
                .ok_or_else(|| missing("ticket"))?
                .parse()
                .map_err(|source| SettingsError::Ticket { path: path.clone(), source })?,
            key_file: find("key_file").map(PathBuf::from),
            encryption: field(&path, "encryption", find("encryption"))?,
            same_host: field(&path, "same_host", find("same_host"))?,
            local_bytes: field(&path, "local_bytes", find("local_bytes"))?,
            page_bytes: field(&path, "page_bytes", find("page_bytes"))?,
            prefetch_bytes: field(&path, "prefetch_bytes", find("prefetch_bytes"))?,
            fault_mode: find("fault_mode").and_then(FaultMode::parse).ok_or_else(|| missing("fault_mode"))?,
            evict_by_copy: field(&path, "evict_by_copy", find("evict_by_copy"))?,
            verify: field(&path, "verify", find("verify"))?,
            op_deadline_ms: field(&path, "op_deadline_ms", find("op_deadline_ms"))?,
            compression: field(&path, "compression", find("compression"))?,
            spin_us: field(&path, "spin_us", find("spin_us"))?,
            follow_faults: field(&path, "follow_faults", find("follow_faults"))?,
        })
    }

    /// The page by which a process says that it wants the other CPU kept awake.
    #[must_use]
    pub fn awake_path(run_dir: &Path) -> PathBuf {
        run_dir.join("awake")
    }

    /// When the file was written last.
    #[must_use]
    pub fn changed_at(run_dir: &Path) -> Option<SystemTime> {
        std::fs::metadata(Self::path(run_dir)).ok()?.modified().ok()
    }

    /// Says which servers are silent, as far as the run's processes know, so that new ones do
    /// not wait for them.
    ///
    /// # Errors
    /// [`SettingsError::Io`].
    pub fn write_silent(run_dir: &Path, silent: &[bool]) -> Result<(), SettingsError> {
        let bytes: Vec<u8> = silent.iter().map(|silent| if *silent { b'1' } else { b'0' }).collect();
        replace(&run_dir.join(SILENT), &bytes)
    }

    /// What was said last; nothing: that all are well.
    #[must_use]
    pub fn read_silent(run_dir: &Path) -> Vec<bool> {
        let bytes = std::fs::read(run_dir.join(SILENT)).unwrap_or_default();
        bytes.iter().map(|byte| *byte == b'1').collect()
    }

    /// Where process `pid` of the run publishes its counters.
    #[must_use]
    pub fn stats_path(&self, pid: u32) -> PathBuf {
        self.run_dir.join(format!("{pid}.stats"))
    }

    /// Where process `pid` of the run says why it was ended.
    #[must_use]
    pub fn lost_path(&self, pid: u32) -> PathBuf {
        self.run_dir.join(format!("{pid}.lost"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_servers_is_read_as_it_was_said_last() {
        let run = tempfile::tempdir().unwrap();
        assert!(Settings::read_silent(run.path()).is_empty(), "nothing was said");
        for silent in [[true, false, false], [false, false, true]] {
            Settings::write_silent(run.path(), &silent).unwrap();
            assert_eq!(Settings::read_silent(run.path()), silent);
        }
        std::fs::write(run.path().join(SILENT), b"\xff1x").unwrap();
        assert_eq!(Settings::read_silent(run.path()), [false, true, false]);
        assert!(Settings::write_silent(&run.path().join("over"), &[true]).is_err());
    }
}
