//! Kernel swap on zram within a memory cgroup (version 1): what a user would use today. Set up for a
//! benchmark, and removed after it.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::bench::trial::{self, Outcome};

/// Makes devices, and takes them away.
const CONTROL: &str = "/sys/class/zram-control";
const SIZE: &str = "6G";
const CGROUPS: &str = "/sys/fs/cgroup/memory";

/// zram as swap. It is turned off when dropped, and also when this process dies: a guard process waits for
/// its end.
pub struct KernelSwap {
    guard: Child,
}

/// Ends swapping once its standard input ends, and removes the cgroup named by its first argument and the
/// device with the number that is its second.
const GUARD: &str = "cat >/dev/null; swapoff /dev/zram$1; echo 1 >/sys/block/zram$1/reset; \
    echo $1 >/sys/class/zram-control/hot_remove; sleep 0.2; rmdir \"$0\"";

impl KernelSwap {
    /// Refuses if the machine already swaps: it would be unknown where pages go.
    pub fn set_up() -> Result<Self> {
        let swaps = fs::read_to_string("/proc/swaps").context("cannot read /proc/swaps")?;
        if swaps.lines().count() > 1 {
            bail!("this machine already has swap; turn it off first (swapoff -a)");
        }
        if !Path::new(CGROUPS).join("memory.limit_in_bytes").exists() {
            bail!("there is no version 1 memory cgroup at {CGROUPS}");
        }
        if !Path::new(CONTROL).exists() {
            // Where zram is a module.
            let _ = Command::new("modprobe").arg("zram").output();
        }
        // A device of its own: others may be in use.
        let number = fs::read_to_string(format!("{CONTROL}/hot_add"))
            .context("this kernel has no zram, or keeps it for root")?;
        let number = number.trim();
        let device = format!("/dev/zram{number}");
        fs::write(format!("/sys/block/zram{number}/disksize"), SIZE)
            .with_context(|| format!("cannot set the size of {device}"))?;
        let mut guard = Command::new("sh");
        guard
            .args(["-c", GUARD])
            .arg(cgroup())
            .arg(number)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        let swap = Self { guard: guard.spawn().context("cannot run `sh`")? };
        for (program, arguments) in [("mkswap", &[device.as_str()][..]), ("swapon", &["-p", "100", &device])]
        {
            let done = Command::new(program)
                .args(arguments)
                .output()
                .with_context(|| format!("cannot run `{program}`"))?;
            if !done.status.success() {
                bail!("`{program} {device}` failed: {}", String::from_utf8_lossy(&done.stderr).trim());
            }
        }
        Ok(swap)
    }

    /// A memory cgroup with this limit.
    pub fn limit(&self, bytes: u64) -> Result<Limit> {
        let path = cgroup();
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let limit = Limit { path };
        fs::write(limit.path.join("memory.limit_in_bytes"), bytes.to_string())
            .context("cannot set the cgroup's limit")?;
        Ok(limit)
    }
}

impl Drop for KernelSwap {
    fn drop(&mut self) {
        // Its standard input ends with this; it then does the work.
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }
}

fn cgroup() -> PathBuf {
    Path::new(CGROUPS).join(format!("rampool-bench-{}", std::process::id()))
}

/// A memory cgroup, removed when dropped.
pub struct Limit {
    path: PathBuf,
}

impl Limit {
    /// Arranges that a command runs within the limit.
    pub fn put(&self, command: &mut Command) -> Result<()> {
        let mut tasks = fs::OpenOptions::new()
            .write(true)
            .open(self.path.join("cgroup.procs"))
            .context("cannot join the cgroup")?;
        // SAFETY: between fork and exec only write is called, which is async-signal-safe; `0` stands for the
        // writing process.
        unsafe {
            command.pre_exec(move || tasks.write_all(b"0"));
        }
        Ok(())
    }

    pub fn run(&self, mut command: Command, deadline: Duration) -> Result<Outcome> {
        self.put(&mut command)?;
        trial::run(command, deadline)
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        // A process that ended leaves its group a moment later.
        for _ in 0..100 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("rampool: {} is left behind", self.path.display());
    }
}
