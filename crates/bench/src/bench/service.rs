//! The server processes of a benchmark, each on a CPU of its own and ended with it; and memory that is paged
//! to them.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rampool_client::pool::{Pool, PoolConfig};
use rampool_kernel::thread::{allowed_cpus, pin_to_cpu};
use rampool_net::key::Key;
use rampool_pager::fault::FaultModeChoice;
use rampool_pager::pager::Waiting;
use rampool_pager::region::{PagedConfig, PagedMemory, Region};
use rampool_wire::session::Encryption;
use rampool_wire::units::ByteLen;

use super::workload::word;

/// Where a benchmark's two sides run.
pub struct Place<'a> {
    /// The host that servers listen at.
    pub host: &'a str,
    /// The servers' CPU; none where there is only one.
    pub server_cpu: Option<usize>,
    /// The servers' network namespace.
    pub namespace: Option<&'a File>,
    /// Key for servers that other machines could reach.
    pub key: Option<&'a Path>,
}

impl Place<'_> {
    /// Loopback; this thread and what it starts on the first CPU, servers on the last.
    pub fn loopback() -> Self {
        Self { host: "127.0.0.1", server_cpu: pin_apart(), namespace: None, key: None }
    }

    pub fn describe(&self) -> String {
        match self.server_cpu {
            Some(cpu) => format!("the program and its pager run on one CPU, the server process on CPU {cpu}"),
            None => "there is one CPU for the program, its pager and the server".into(),
        }
    }
}

/// Pins this thread, and the threads it will start, to the first CPU; returns the last one if there is
/// another.
pub fn pin_apart() -> Option<usize> {
    let cpus = allowed_cpus();
    let (first, last) = (*cpus.first()?, *cpus.last()?);
    (first != last && pin_to_cpu(first).is_ok()).then_some(last)
}

/// The product's binary: what `RAMPOOL_BIN` names, or else the one next to this.
pub fn rampool() -> Result<Command> {
    match std::env::var_os("RAMPOOL_BIN").map(PathBuf::from) {
        Some(path) if path.is_file() => Ok(Command::new(path)),
        Some(path) => bail!("RAMPOOL_BIN names {}, which is no file", path.display()),
        None => Ok(Command::new(rampool_run::libraries::program("rampool")?)),
    }
}

/// A child process that listens. Ended when dropped, and with this process.
pub struct Service {
    child: Child,
    pub address: String,
}

impl Service {
    /// `rampool serve`, one shard, not encrypted, raw pages.
    pub fn memory_server(place: &Place<'_>, memory_bytes: u64, spin: Duration) -> Result<Self> {
        Self::memory_server_at(place, &format!("{}:0", place.host), memory_bytes, spin)
    }

    /// The same, listening at an address of one's own choice.
    pub fn memory_server_at(
        place: &Place<'_>,
        listen: &str,
        memory_bytes: u64,
        spin: Duration,
    ) -> Result<Self> {
        let mut command = rampool()?;
        command
            .args(["serve", "--shards", "1", "--log-level", "error", "--encryption", "off", "--memory"])
            .arg(memory_bytes.to_string())
            .args(["--listen", listen, "--spin-us", &spin.as_micros().to_string()]);
        if let Some(key) = place.key {
            command.arg("--key-file").arg(key);
        }
        Self::start(command, place).context("the memory server did not start")
    }

    /// The raw other end ([`super::peer`]).
    pub fn raw_peer(place: &Place<'_>, spin: Duration) -> Result<Self> {
        Self::start(Self::peer(place, spin)?, place).context("the raw peer did not start")
    }

    /// The same with sockets as this machine makes them for any program; it may pace even those within it.
    pub fn plain_peer(place: &Place<'_>, spin: Duration) -> Result<Self> {
        let mut command = Self::peer(place, spin)?;
        command.arg("--as-made");
        Self::start(command, place).context("the plain peer did not start")
    }

    fn peer(place: &Place<'_>, spin: Duration) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([
            "bench",
            "peer",
            "--listen",
            &format!("{}:0", place.host),
            "--spin-us",
            &spin.as_micros().to_string(),
        ]);
        Ok(command)
    }

    /// The same over memory, which the file is.
    pub fn raw_memory_peer(place: &Place<'_>, file: BorrowedFd<'_>) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "peer", "--memory"]).arg(format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            file.as_raw_fd()
        ));
        Self::start(command, place).context("the raw peer over memory did not start")
    }

    /// The same as a relay: what comes from its first client goes to its second.
    pub fn raw_relay(place: &Place<'_>, spin: Duration) -> Result<Self> {
        let mut command = Self::peer(place, spin)?;
        command.arg("--relay");
        Self::start(command, place).context("the raw relay did not start")
    }

    /// The raw other end for many connections, not pinned.
    pub fn least_server() -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "peer", "--many"]);
        let place = Place { host: "127.0.0.1", server_cpu: None, namespace: None, key: None };
        Self::start(command, &place).context("the least server did not start")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn start(mut command: Command, place: &Place<'_>) -> Result<Self> {
        // Removes what this process has loaded for its own calls: the other side should not pay for it.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).env_remove("LD_PRELOAD");
        before_exec(&mut command, place.namespace.map(AsRawFd::as_raw_fd), place.server_cpu);
        let program = command.get_program().display().to_string();
        let mut child = command.spawn()?;
        let out = child.stdout.take().expect("it is piped");
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let line = BufReader::new(out)
                .lines()
                .map_while(Result::ok)
                .find_map(|l| l.strip_prefix("listening on ").map(str::to_owned));
            // The wait is over.
            let _ = sender.send(line);
        });
        let address = receiver.recv_timeout(Duration::from_secs(20)).ok().flatten();
        let service = Self { child, address: address.unwrap_or_default() };
        if service.address.is_empty() {
            Err(anyhow!("{program} did not say within 20 s where it listens"))
        } else {
            Ok(service)
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Arranges that a child runs in a network namespace and on a CPU, and dies with this process.
pub fn before_exec(command: &mut Command, namespace: Option<RawFd>, cpu: Option<usize>) {
    // SAFETY: between fork and exec only setns, sched_setaffinity and prctl are called, which are
    // async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if let Some(namespace) = namespace
                && libc::setns(namespace, libc::CLONE_NEWNET) != 0
            {
                return Err(std::io::Error::last_os_error());
            }
            if let Some(cpu) = cpu {
                pin_to_cpu(cpu).map_err(std::io::Error::from_raw_os_error)?;
            }
            Ok(())
        });
    }
}

/// How a benchmark's memory is paged.
pub struct Paged<'a> {
    /// A server's address, or several with commas.
    pub server: &'a str,
    pub key: Option<&'a Path>,
    pub memory_bytes: u64,
    pub local_bytes: u64,
    pub page_bytes: u32,
    pub prefetch_bytes: u32,
    pub spin: Duration,
    pub fault_mode: FaultModeChoice,
}

impl Paged<'_> {
    pub fn open(&self) -> Result<PagedMemory> {
        let servers = self.server.split(',').map(str::parse).collect::<Result<Vec<_>, _>>()?;
        let mut pool = PoolConfig::new(servers, ByteLen(self.memory_bytes), "rampool bench");
        pool.encryption = Encryption::Off;
        pool.key = self.key.map(Key::load).transpose()?;
        let mut pool = Pool::connect(&pool)?;
        let region = pool.create_region()?;
        let waiting = Waiting { spin: self.spin, ..Waiting::default() };
        let config = PagedConfig {
            local_bytes: self.local_bytes,
            page_bytes: self.page_bytes,
            prefetch_bytes: self.prefetch_bytes,
            waiting,
            fault_mode: self.fault_mode,
            ..PagedConfig::default()
        };
        Ok(PagedMemory::start(&config, pool, region)?)
    }
}

/// A region as words of 8 bytes.
pub struct Words<'a> {
    region: &'a Region,
}

impl<'a> Words<'a> {
    pub fn new(region: &'a Region) -> Self {
        Self { region }
    }

    pub fn len(&self) -> usize {
        self.region.len() / 8
    }

    pub fn read(&self, index: usize) -> u64 {
        assert!(index < self.len());
        // SAFETY: inside the region, which is aligned to pages; only this thread writes it.
        unsafe { self.region.as_ptr().cast::<u64>().add(index).read_volatile() }
    }

    /// Fills the region with the content of `seed`.
    pub fn fill(&self, seed: u64) {
        for index in 0..self.len() {
            // SAFETY: as in `read`.
            unsafe { self.region.as_ptr().cast::<u64>().add(index).write(word(seed, index as u64)) };
        }
    }

    /// Compares words `[from, from + count)` with the content of `seed`.
    pub fn verify(&self, seed: u64, from: usize, count: usize) -> Result<()> {
        for index in from..from + count {
            let (is, should) = (self.read(index), word(seed, index as u64));
            if is != should {
                bail!("WRONG CONTENT: word {index} of the region is {is:#x} instead of {should:#x}");
            }
        }
        Ok(())
    }
}

/// A key in a file of its own, for servers on a link.
pub struct KeyFile {
    pub path: PathBuf,
}

impl KeyFile {
    pub fn make() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("rampool-bench-{}.key", std::process::id()));
        Key::generate().save_new(&path)?;
        Ok(Self { path })
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
