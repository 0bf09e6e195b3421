//! Settings of a rank: how it joins a run, and how its regions are kept.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use rampool_sharing::channel::ChannelConfig;
use rampool_sharing::control::Wish;
use rampool_sharing::{Homes, LockPath, Managers, ProtocolKind, Tuning};
use rampool_wire::session::Encryption;
use rampool_wire::units::{ByteLen, OS_PAGE_BYTES};

use super::environment::{EnvironmentError, Place, variable};
use rampool_client::pool::{Copies, PoolConfig, ServerSpec};
use rampool_net::key::{Key, KeyError};
use rampool_net::transport::{SAME_HOST_VARIABLE, SameHost};

/// The transport of the ranks' messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Transport {
    /// Between ranks on one machine shared memory instead, unless [`SharedConfig::same_host`] says otherwise.
    #[default]
    Tcp,
    /// Datagrams, repeated until they are acknowledged. They are sealed where the ranks' connections are. The
    /// ranks still keep a TCP connection each, by which they notice each other's end.
    Udp,
}

impl Transport {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// The CPUs of a rank, as assigned by `rampool launch --bind rank`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Binding {
    /// The CPUs of this rank.
    pub own: Vec<usize>,
    /// The CPUs of all ranks on this machine.
    pub all: Vec<usize>,
}

impl Binding {
    /// Parses the format of `Display`.
    fn parse(text: &str) -> Option<Self> {
        let (own, all) = text.split_once(" of ")?;
        let list = |text: &str| text.split(',').map(|cpu| cpu.parse().ok()).collect::<Option<Vec<usize>>>();
        Some(Self { own: list(own)?, all: list(all)? })
    }
}

impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |cpus: &[usize]| cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        write!(f, "{} of {}", list(&self.own), list(&self.all))
    }
}

/// The smallest budget of shared pages.
pub const LEAST_LOCAL_BYTES: u64 = 1 << 20;

/// The sizes that a shared page may have, as users write them. `None`: no such size.
#[must_use]
pub fn shared_page_bytes(text: &str) -> Option<u32> {
    let bytes = u32::try_from(text.parse::<ByteLen>().ok()?.0).ok()?;
    (bytes.is_power_of_two() && (4096..=65536).contains(&bytes)).then_some(bytes)
}

/// These sizes, for errors.
pub const SHARED_PAGE_SIZES: &str = "4K, 8K, 16K, 32K or 64K";

/// What happens in this process when the run cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnFailure {
    /// Reports why on standard error and ends the process, with [`EXIT_FAILED`] or [`EXIT_FOLLOWED`]. This is
    /// the only way to stop a thread that waits for a page that will never come.
    #[default]
    EndProcess,
    /// Calls return the error. A thread that touches a page that is not here still ends the process.
    ReturnError,
}

/// A process that ended because *it* saw the run fail, or failed itself.
pub const EXIT_FAILED: i32 = 86;
/// A process that ended because another rank ended or was lost.
pub const EXIT_FOLLOWED: i32 = 87;

/// How a rank joins. [`SharedConfig::from_env`] fills it from the environment, [`SharedConfig::new`] by hand.
#[derive(Clone, Debug)]
pub struct SharedConfig {
    pub rank: u16,
    pub ranks: u16,
    /// `HOST:PORT` where rank 0 listens. Not used by a single rank.
    pub rendezvous: String,
    /// The run's name, which its ranks have in common. It tells runs apart and is no secret.
    pub run: String,
    /// The secret that only the ranks of this run know, and prove to each other. `None`: they prove `key`.
    /// Without `key`, too, they must meet at an address of their machine, where rank 0 hands a key to
    /// processes of its own user.
    pub run_key: Option<Key>,
    /// The version of this rank; ranks of different versions refuse each other.
    #[doc(hidden)]
    pub build: String,
    /// The default consistency protocol of regions.
    pub protocol: ProtocolKind,
    /// The page of regions that name none: 4096 to 65536, a power of two.
    pub page_bytes: u32,
    pub homes: Homes,
    pub managers: Managers,
    /// `None`: chosen by the default protocol.
    pub lock_path: Option<LockPath>,
    pub tuning: Tuning,
    /// The address of shared memory, the same on every rank.
    pub base: usize,
    /// The size of shared memory: addresses, not memory.
    pub range_bytes: u64,
    pub transport: Transport,
    /// The transport between ranks on this machine.
    pub same_host: SameHost,
    pub channel: ChannelConfig,
    /// The key of the memory servers and of processes outside the run; also of the ranks if there is no
    /// `run_key`.
    pub key: Option<Key>,
    pub encryption: Encryption,
    /// All ranks must join within this time.
    pub join_deadline: Duration,
    /// A lock, a barrier, an allocation or a page that takes longer ends the run. `None`: never.
    pub deadline: Option<Duration>,
    /// A rank that is silent for this long is lost.
    pub silence: Duration,
    /// A connection that is cut while both ranks live is made again within this time, without loss; the same
    /// on all ranks. 0: a cut connection ends the run.
    pub reconnect: Duration,
    /// How long the runtime polls before it sleeps, while a thread waits. With more ranks than CPUs: at most,
    /// and only while that proves better than to sleep at once.
    pub spin: Duration,
    /// This machine has more ranks than CPUs: a polling thread keeps others from sending.
    pub crowded: bool,
    /// The launcher bound each rank to CPUs of its own. `None`: not bound, or unknown.
    pub binding: Option<Binding>,
    pub on_failure: OnFailure,
    /// Catches only faults of the program's own code, as a user without privileges must: see
    /// [`Reach`](super::Reach).
    pub user_faults: bool,
    /// The most bytes of shared pages in this rank's memory at a time, at least [`LEAST_LOCAL_BYTES`]. Copies
    /// that can be fetched again are dropped first; pages whose home is here, and written ones, go to
    /// `servers`. Twins and diffs do not count. `None`: no limit.
    pub local_bytes: Option<u64>,
    /// Memory servers for pages beyond the budget, with their key and the lease that each rank takes.
    pub servers: Option<PoolConfig>,
    /// Threads of this rank that take part in barriers ([`Shared::set_threads`](super::Shared::set_threads)).
    pub threads: u16,
}

/// A setting in the environment that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error("{name}={value:?} is not {wanted}")]
    Value { name: &'static str, value: String, wanted: &'static str },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("RAMPOOL_RUN_KEY is not 64 hexadecimal digits")]
    RunKey,
    #[error(
        "RAMPOOL_SHARED_SERVERS names servers without the memory to lease for each rank: write HOST=4G, or set RAMPOOL_SHARED_MEMORY"
    )]
    NoMemory,
    #[error(
        "RAMPOOL_SHARED_SERVERS names memory servers, which hold pages beyond each rank's budget: set the budget in RAMPOOL_SHARED_LOCAL"
    )]
    NoBudget,
    #[error("RAMPOOL_SHARED_COPIES=2 needs two servers: name each one in RAMPOOL_SHARED_SERVERS")]
    TooFewServers,
}

impl SharedConfig {
    /// Rank `rank` of `ranks`, which meet at `rendezvous`, with the defaults for the rest.
    #[must_use]
    pub fn new(rank: u16, ranks: u16, rendezvous: &str) -> Self {
        Self {
            rank,
            ranks,
            rendezvous: rendezvous.to_owned(),
            run: String::new(),
            run_key: None,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: ProtocolKind::Auto,
            page_bytes: 4096,
            homes: Homes::Cyclic,
            managers: Managers::Cyclic,
            lock_path: None,
            tuning: Tuning::default(),
            base: 0x2000_0000_0000,
            range_bytes: 256 << 30,
            transport: Transport::Tcp,
            same_host: SameHost::default(),
            channel: ChannelConfig::default(),
            key: None,
            encryption: Encryption::Auto,
            join_deadline: Duration::from_secs(60),
            deadline: Some(Duration::from_secs(600)),
            silence: Duration::from_secs(30),
            reconnect: Duration::from_secs(10),
            spin: default_spin(is_crowded(ranks, available_cpus())),
            crowded: is_crowded(ranks, available_cpus()),
            binding: None,
            on_failure: OnFailure::default(),
            user_faults: false,
            local_bytes: None,
            servers: None,
            threads: 1,
        }
    }

    /// The place in the run from the launcher that started this process ([`Place::detect`]); the rest from
    /// `RAMPOOL_RUN_KEY` (which `rampool launch` sets), `RAMPOOL_PROTOCOL` (sc, lrc, hlrc, aurc, ibec, auto),
    /// `RAMPOOL_TRANSPORT` (tcp, udp), `RAMPOOL_SAME_HOST` (auto, rings, socket), `RAMPOOL_KEY_FILE`,
    /// `RAMPOOL_ENCRYPTION`, `RAMPOOL_SHARED_PAGE_SIZE` (4K to 64K), `RAMPOOL_SHARED_BASE` (hexadecimal),
    /// `RAMPOOL_SHARED_RANGE` (bytes, such as 64G), `RAMPOOL_JOIN_S`, `RAMPOOL_DEADLINE_S` (0: none),
    /// `RAMPOOL_SHARED_LOCAL` (bytes), `RAMPOOL_SHARED_SERVERS` (as for `rampool run --server`),
    /// `RAMPOOL_SHARED_MEMORY` (bytes to lease for each rank), `RAMPOOL_SHARED_COPIES` (of each page there, 1
    /// or 2), `RAMPOOL_SILENCE_S`, `RAMPOOL_RECONNECT_S`, `RAMPOOL_SPIN_US`, `RAMPOOL_BOUND` (which `rampool
    /// launch` sets) and `RAMPOOL_SHARED_USER_FAULTS` (1).
    ///
    /// # Errors
    /// An incomplete or invalid variable.
    pub fn from_env() -> Result<Self, ConfigError> {
        let place = Place::detect()?;
        let mut config = Self::new(place.rank, place.ranks, place.rendezvous.as_deref().unwrap_or_default());
        config.run = place.run;
        config.binding =
            setting(variable::BOUND, "numbers of CPUs, such as `0,4 of 0,1,4,5`", Binding::parse)?;
        let cpus = config.binding.as_ref().map_or_else(available_cpus, |binding| binding.all.len());
        config.crowded = is_crowded(place.local_ranks.unwrap_or(1), cpus);
        config.spin = default_spin(config.crowded);
        if let Some(kind) =
            setting("RAMPOOL_PROTOCOL", "sc, lrc, hlrc, aurc, ibec or auto", ProtocolKind::from_name)?
        {
            config.protocol = kind;
        }
        let transport =
            |name: &str| [Transport::Tcp, Transport::Udp].into_iter().find(|kind| kind.name() == name);
        if let Some(kind) = setting("RAMPOOL_TRANSPORT", "tcp or udp", transport)? {
            config.transport = kind;
        }
        if let Some(how) = setting(SAME_HOST_VARIABLE, "auto, rings or socket", |text| text.parse().ok())? {
            config.same_host = how;
        }
        // The value is a secret: the error does not show it.
        config.run_key = match std::env::var(variable::RUN_KEY) {
            Ok(digits) if !digits.is_empty() => Some(Key::from_hex(&digits).ok_or(ConfigError::RunKey)?),
            _ => None,
        };
        if let Some(path) = std::env::var_os("RAMPOOL_KEY_FILE") {
            config.key = Some(Key::load(Path::new(&path))?);
        }
        if let Some(encryption) = setting("RAMPOOL_ENCRYPTION", "auto, on or off", |text| text.parse().ok())?
        {
            config.encryption = encryption;
        }
        memory_from_env(&mut config)?;
        let size_of_budget = |text: &str| {
            ByteLen::from_str(text).ok().map(|bytes| bytes.0).filter(|&bytes| bytes >= LEAST_LOCAL_BYTES)
        };
        config.local_bytes = setting("RAMPOOL_SHARED_LOCAL", "a size of at least 1M", size_of_budget)?;
        config.servers = servers_from_env(&config)?;
        let seconds =
            |text: &str| text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        if let Some(time) = setting("RAMPOOL_JOIN_S", "a number of seconds", seconds)? {
            config.join_deadline = time;
        }
        if let Some(time) = setting("RAMPOOL_DEADLINE_S", "a number of seconds", seconds)? {
            config.deadline = Some(time).filter(|time| !time.is_zero());
        }
        // Live ranks send something every second.
        let silence = |text: &str| seconds(text).filter(|&time| time >= Duration::from_secs(2));
        if let Some(time) = setting("RAMPOOL_SILENCE_S", "a number of seconds, at least 2", silence)? {
            config.silence = time;
        }
        if let Some(time) = setting("RAMPOOL_RECONNECT_S", "a number of seconds", seconds)? {
            config.reconnect = time;
        }
        if let Some(spin) = setting("RAMPOOL_SPIN_US", "a number of microseconds", |text| text.parse().ok())?
        {
            config.spin = Duration::from_micros(spin);
        }
        config.user_faults = setting("RAMPOOL_SHARED_USER_FAULTS", "0 or 1", |text| {
            ["0", "1"].iter().position(|known| *known == text)
        })? == Some(1);
        Ok(config)
    }

    /// The settings that must be the same on all ranks.
    pub(super) fn common(&self) -> String {
        let Self {
            protocol,
            page_bytes,
            homes,
            managers,
            lock_path,
            tuning,
            base,
            range_bytes,
            transport,
            reconnect,
            ..
        } = self;
        format!(
            "{} by default, pages of {page_bytes}, homes {homes:?}, managers {managers:?}, locks {lock_path:?}, {range_bytes} bytes at {base:#x}, {}, cut connections made again within {} s, {tuning:?}",
            protocol.name(),
            transport.name(),
            reconnect.as_secs_f64(),
        )
    }
}

/// The pages, and where they lie.
fn memory_from_env(config: &mut SharedConfig) -> Result<(), ConfigError> {
    if let Some(bytes) = setting("RAMPOOL_SHARED_PAGE_SIZE", SHARED_PAGE_SIZES, shared_page_bytes)? {
        config.page_bytes = bytes;
    }
    let address = |text: &str| {
        usize::from_str_radix(text.trim_start_matches("0x"), 16).ok().filter(|base| base % (1 << 21) == 0)
    };
    if let Some(base) = setting("RAMPOOL_SHARED_BASE", "a hexadecimal address, a multiple of 2 MiB", address)?
    {
        config.base = base;
    }
    let size =
        |text: &str| ByteLen::from_str(text).ok().map(|bytes| bytes.0).filter(|&bytes| bytes >= 1 << 20);
    if let Some(bytes) = setting("RAMPOOL_SHARED_RANGE", "a size of at least 1M", size)? {
        config.range_bytes = bytes.next_multiple_of(OS_PAGE_BYTES as u64);
    }
    Ok(())
}

fn servers_from_env(config: &SharedConfig) -> Result<Option<PoolConfig>, ConfigError> {
    let list =
        |text: &str| text.split(',').map(|server| server.parse().ok()).collect::<Option<Vec<ServerSpec>>>();
    let Some(servers) = setting("RAMPOOL_SHARED_SERVERS", "a list such as host1:7117=4G,host2=4G", list)?
    else {
        return Ok(None);
    };
    let memory = setting("RAMPOOL_SHARED_MEMORY", "a size such as 4G", |text| ByteLen::from_str(text).ok())?;
    if memory.is_none() && servers.iter().any(|server| server.memory.is_none()) {
        return Err(ConfigError::NoMemory);
    }
    let count = servers.len();
    if config.local_bytes.is_none() {
        return Err(ConfigError::NoBudget);
    }
    let mut pool = PoolConfig::new(
        servers,
        memory.unwrap_or(ByteLen(0)),
        format!("rank {} of {}", config.rank, config.ranks),
    );
    let copies = |text: &str| match text {
        "1" => Some(Copies::One),
        "2" => Some(Copies::Two),
        _ => None,
    };
    pool.copies = setting("RAMPOOL_SHARED_COPIES", "1 or 2", copies)?.unwrap_or(Copies::TwoIfTheyFit);
    if pool.copies == Copies::Two && count < 2 {
        return Err(ConfigError::TooFewServers);
    }
    pool.key.clone_from(&config.key);
    pool.encryption = config.encryption;
    Ok(Some(pool))
}

fn is_crowded(local_ranks: u16, cpus: usize) -> bool {
    cpus < usize::from(local_ranks).max(2)
}

/// Each rank has one thread that computes and one that answers. Ranks with equal work arrive at a barrier
/// some hundred microseconds apart. A thread that sleeps meanwhile is woken on the CPU of the thread that
/// wakes it, and two ranks that take turns to sleep share that CPU for long, since the scheduler never sees
/// both in need of one. Where no CPU is free for it, spinning gives the CPU to the next rank, or to another
/// program for long: both ways are tried.
fn default_spin(crowded: bool) -> Duration {
    if crowded { Duration::from_micros(200) } else { Duration::from_millis(1) }
}

/// CPUs for the ranks of this machine. A rank that was bound to a part, as `mpirun` and `srun` do it, has its
/// launcher's: the other ranks have other parts.
fn available_cpus() -> usize {
    use rampool_kernel::thread::{allowed_cpus, allowed_cpus_of_parent};
    let own = allowed_cpus().len();
    // Fewer where a group of processes gets less time.
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    if available < own { available } else { own.max(allowed_cpus_of_parent().len()) }
}

fn setting<T>(
    name: &'static str,
    wanted: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, ConfigError> {
    match std::env::var(name) {
        Ok(value) if !value.is_empty() => match parse(&value) {
            Some(value) => Ok(Some(value)),
            None => Err(ConfigError::Value { name, value, wanted }),
        },
        _ => Ok(None),
    }
}

/// Options of an allocation. Starts from the run's defaults.
///
/// ```
/// use rampool::shared::{AllocOptions, Homes, ProtocolKind};
/// let options = AllocOptions::new().protocol(ProtocolKind::Ibec).homes(Homes::Blocked).page_bytes(16384);
/// # let _ = options;
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AllocOptions {
    protocol: Option<ProtocolKind>,
    homes: Option<Homes>,
    page_bytes: Option<u32>,
}

impl AllocOptions {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The consistency protocol of the memory.
    #[must_use]
    pub fn protocol(mut self, protocol: ProtocolKind) -> Self {
        self.protocol = Some(protocol);
        self
    }

    /// Where the pages' homes are at the start.
    #[must_use]
    pub fn homes(mut self, homes: Homes) -> Self {
        self.homes = Some(homes);
        self
    }

    /// The unit in which memory is kept consistent: 4096 to 65536, a power of two.
    #[must_use]
    pub fn page_bytes(mut self, page_bytes: u32) -> Self {
        self.page_bytes = Some(page_bytes);
        self
    }

    pub(super) fn wish(self, bytes: u64, config: &SharedConfig) -> Wish {
        Wish {
            bytes,
            page_bytes: self.page_bytes.unwrap_or(config.page_bytes),
            protocol: self.protocol.unwrap_or(config.protocol),
            homes: self.homes.unwrap_or(config.homes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_has_the_pages_of_the_run_unless_it_names_others() {
        let mut config = SharedConfig::new(0, 1, "");
        config.page_bytes = shared_page_bytes("8K").unwrap();
        assert_eq!(AllocOptions::new().wish(1, &config).page_bytes, 8192);
        assert_eq!(AllocOptions::new().page_bytes(16384).wish(1, &config).page_bytes, 16384);
    }

    #[test]
    fn a_binding_is_read_as_it_is_written_and_nothing_else_is() {
        let binding = Binding { own: vec![4, 0], all: vec![0, 1, 4, 5] };
        assert_eq!(Binding::parse(&binding.to_string()), Some(binding));
        for text in
            ["", "0", "0 of", " of 0", "0 of 0,", "0-1 of 0-3", "-1 of 0", "99999999999999999999 of 0"]
        {
            assert_eq!(Binding::parse(text), None, "{text:?}");
        }
    }
}
