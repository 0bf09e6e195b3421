//! One builder with named options: from a list of servers to memory that a program can use.
//!
//! The same names serve everywhere: methods here, `rampool_builder_set` in C, and `--name` on the command
//! line. A builder is a plain value; nothing happens before [`Builder::open`].

use std::path::{Path, PathBuf};
use std::time::Duration;

use rampool_pinning::path::Wish;
use rampool_wire::session::Encryption;
use rampool_wire::units::ByteLen;

use rampool_client::direct::Direct;
use rampool_client::error::{ConnectError, PoolError};
use rampool_client::pool::{Copies, LeaseRequest, LeaseTicket, Pool, PoolConfig, ServerSpec};
use rampool_net::key::{Key, KeyError};
use rampool_net::transport::SameHost;
use rampool_net::transport::zero_copy::parse_wish;
use rampool_pager::fault::FaultModeChoice;
use rampool_pager::region::{PagedConfig, PagedError, PagedMemory};

/// Every option: its name, what it takes, and what it is for.
pub const OPTIONS: &[(&str, &str, &str)] = &[
    (
        "server",
        "HOST[:PORT][=AMOUNT]",
        "a memory server, and the memory wanted from it; several separated by commas, or set several times",
    ),
    (
        "memory",
        "AMOUNT",
        "memory wanted from the servers together; those without an amount of their own share it",
    ),
    (
        "copies",
        "1|2",
        "on how many servers each page lies: of two, one may be lost (default 2 where there is room, else 1)",
    ),
    ("local", "AMOUNT", "local memory all regions together may use (default 1G)"),
    ("page-size", "AMOUNT", "bytes one fault brings, a power of two from 4K to 2M (default 4K)"),
    ("prefetch", "AMOUNT", "the most that is read ahead of a stream; 0 turns it off (default 2M)"),
    (
        "fault-mode",
        "auto|uffd|uffd-user|segv|in-thread",
        "how page faults are caught (default auto: the best that this machine allows; in-thread never by \
         itself)",
    ),
    ("name", "TEXT", "what the servers show people (default: the program's name)"),
    ("key-file", "PATH", "the key shared with the servers"),
    (
        "encryption",
        "auto|on|off",
        "whether page data is encrypted on its way (default auto: off this machine's own addresses)",
    ),
    ("compression", "on|off", "whether page data is compressed on its way (default off)"),
    (
        "same-host",
        "auto|rings|socket",
        "how servers named unix:PATH are reached: rings of shared memory, or their socket (default auto: \
         rings where they can)",
    ),
    (
        "zero-copy",
        "auto|off|AMOUNT",
        "from how many bytes on the direct view sends without a copy (default auto: as measured, never to \
         this machine or encrypted)",
    ),
    ("pinned", "AMOUNT", "the most memory that is kept pinned for sending without a copy (default 64M)"),
    ("stripe", "AMOUNT", "consecutive bytes on one server, a power of two (default 256K)"),
    ("connect-deadline-ms", "NUMBER", "how long connecting to one server may take (default 5000)"),
    (
        "op-deadline-ms",
        "NUMBER",
        "how long a server may leave a request unanswered before it counts as lost (default 10000)",
    ),
];

/// Settings for [`PagedMemory`] on a pool of memory servers.
#[derive(Clone, Debug)]
pub struct Builder {
    servers: Vec<ServerSpec>,
    memory: ByteLen,
    copies: Copies,
    name: String,
    key_file: Option<PathBuf>,
    encryption: Encryption,
    compression: bool,
    stripe: Option<ByteLen>,
    connect_deadline: Option<Duration>,
    op_deadline: Option<Duration>,
    same_host: Option<SameHost>,
    zero_copy: Option<Wish>,
    pinned: Option<ByteLen>,
    paged: PagedConfig,
}

/// Why an option could not be set.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    #[error("there is no option `{0}`")]
    Unknown(String),
    #[error("option `{name}`: {reason}")]
    Value { name: String, reason: String },
}

/// Why a builder's memory could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error("no memory server is named; name one with the option `server`")]
    NoServers,
    #[error("no memory is asked for; say how much with the option `memory`, or with the servers")]
    NoMemory,
    #[error(
        "two copies of each page need two servers, and {0} is named: name one more with the option `server`, \
         or set `copies` to 1"
    )]
    TooFewServers(usize),
    #[error(
        "what the direct view reads and changes has one copy, queues too: leave the option `copies` out, or \
         use paged memory"
    )]
    OneCopy,
    #[error("the stripe {0} is not a power of two between 4 KiB and 4 GiB")]
    Stripe(ByteLen),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Paged(#[from] PagedError),
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

impl Builder {
    #[must_use]
    pub fn new() -> Self {
        Self {
            servers: Vec::new(),
            memory: ByteLen(0),
            copies: Copies::TwoIfTheyFit,
            name: program_name(),
            key_file: None,
            encryption: Encryption::Auto,
            compression: false,
            stripe: None,
            connect_deadline: None,
            op_deadline: None,
            same_host: None,
            zero_copy: None,
            pinned: None,
            paged: PagedConfig::default(),
        }
    }

    /// One more memory server.
    #[must_use]
    pub fn server(mut self, server: ServerSpec) -> Self {
        self.servers.push(server);
        self
    }

    /// Memory wanted from the servers together.
    #[must_use]
    pub fn memory(mut self, memory: ByteLen) -> Self {
        self.memory = memory;
        self
    }

    /// On how many servers each page lies.
    #[must_use]
    pub fn copies(mut self, copies: Copies) -> Self {
        self.copies = copies;
        self
    }

    /// Local memory all regions together may use.
    #[must_use]
    pub fn local(mut self, local: ByteLen) -> Self {
        self.paged.local_bytes = local.0;
        self
    }

    /// Bytes one fault brings: a power of two, 4 KiB to 2 MiB.
    #[must_use]
    pub fn page_size(mut self, bytes: u32) -> Self {
        self.paged.page_bytes = bytes;
        self
    }

    /// The most that is read ahead of a stream, in bytes; 0 turns it off.
    #[must_use]
    pub fn prefetch(mut self, bytes: u32) -> Self {
        self.paged.prefetch_bytes = bytes;
        self
    }

    /// How page faults are caught.
    #[must_use]
    pub fn fault_mode(mut self, fault_mode: FaultModeChoice) -> Self {
        self.paged.fault_mode = fault_mode;
        self
    }

    /// What the servers show people.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    #[must_use]
    pub fn key_file(mut self, path: impl AsRef<Path>) -> Self {
        self.key_file = Some(path.as_ref().to_owned());
        self
    }

    #[must_use]
    pub fn encryption(mut self, encryption: Encryption) -> Self {
        self.encryption = encryption;
        self
    }

    #[must_use]
    pub fn compression(mut self, on: bool) -> Self {
        self.compression = on;
        self
    }

    /// Consecutive bytes that lie on one server: a power of two, 4 KiB to 4 GiB.
    #[must_use]
    pub fn stripe(mut self, bytes: ByteLen) -> Self {
        self.stripe = Some(bytes);
        self
    }

    /// How long a server may leave a request unanswered before it counts as lost.
    #[must_use]
    pub fn op_deadline(mut self, deadline: Duration) -> Self {
        self.op_deadline = Some(deadline);
        self
    }

    /// How long connecting to one server may take.
    #[must_use]
    pub fn connect_deadline(mut self, deadline: Duration) -> Self {
        self.connect_deadline = Some(deadline);
        self
    }

    /// How servers on this machine are reached.
    #[must_use]
    pub fn same_host(mut self, how: SameHost) -> Self {
        self.same_host = Some(how);
        self
    }

    /// From how many bytes on the direct view sends without a copy.
    #[must_use]
    pub fn zero_copy(mut self, wish: Wish) -> Self {
        self.zero_copy = Some(wish);
        self
    }

    /// The most memory that is kept pinned for it.
    #[must_use]
    pub fn pinned(mut self, bytes: ByteLen) -> Self {
        self.pinned = Some(bytes);
        self
    }

    /// Sets an option by its name ([`OPTIONS`]).
    ///
    /// # Errors
    /// [`OptionError`]; the builder is as before.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), OptionError> {
        let bad = |reason: String| OptionError::Value { name: name.to_owned(), reason };
        let amount = || value.parse::<ByteLen>().map_err(|e| bad(e.to_string()));
        let small = || u32::try_from(amount()?.0).map_err(|_| bad(format!("{value:?} is too much")));
        let millis = || {
            value
                .parse()
                .map(Duration::from_millis)
                .map_err(|_| bad(format!("{value:?} is no number of milliseconds")))
        };
        match name {
            "server" => {
                let servers: Result<Vec<ServerSpec>, _> = value.split(',').map(str::parse).collect();
                self.servers.extend(servers.map_err(|e| bad(e.to_string()))?);
            }
            "memory" => self.memory = amount()?,
            "copies" => {
                self.copies = match value {
                    "1" => Copies::One,
                    "2" => Copies::Two,
                    _ => return Err(bad(format!("{value:?} is neither `1` nor `2`"))),
                }
            }
            "local" => self.paged.local_bytes = amount()?.0,
            "page-size" => self.paged.page_bytes = small()?,
            "prefetch" => self.paged.prefetch_bytes = small()?,
            "fault-mode" => {
                self.paged.fault_mode = match value {
                    "auto" => FaultModeChoice::Auto,
                    "uffd" => FaultModeChoice::Full,
                    "uffd-user" => FaultModeChoice::UserMode,
                    "segv" => FaultModeChoice::Segv,
                    "in-thread" => FaultModeChoice::InThread,
                    _ => {
                        return Err(bad(format!(
                            "{value:?} is not `auto`, `uffd`, `uffd-user`, `segv` or `in-thread`"
                        )));
                    }
                }
            }
            "name" => value.clone_into(&mut self.name),
            "key-file" => self.key_file = Some(value.into()),
            "encryption" => {
                self.encryption =
                    value.parse().map_err(|e: rampool_wire::session::EncryptionError| bad(e.to_string()))?
            }
            "compression" => {
                self.compression = match value {
                    "on" => true,
                    "off" => false,
                    _ => return Err(bad(format!("{value:?} is neither `on` nor `off`"))),
                }
            }
            "same-host" => self.same_host = Some(value.parse().map_err(bad)?),
            "zero-copy" => self.zero_copy = Some(parse_wish(value).map_err(bad)?),
            "pinned" => self.pinned = Some(amount()?),
            "stripe" => self.stripe = Some(amount()?),
            "connect-deadline-ms" => self.connect_deadline = Some(millis()?),
            "op-deadline-ms" => self.op_deadline = Some(millis()?),
            _ => return Err(OptionError::Unknown(name.to_owned())),
        }
        Ok(())
    }

    /// Connects, leases, and starts the pager. Blocks, for each server at most the connect deadline.
    ///
    /// # Errors
    /// [`OpenError`], which names the server or the setting.
    pub fn open(&self) -> Result<PagedMemory, OpenError> {
        self.paged.cache_config()?;
        let pool = Pool::connect(&self.pool_config()?)?;
        self.start(pool)
    }

    /// Paged memory of a lease that exists, whose servers the ticket names. Blocks, for each server at most
    /// the connect deadline. With two copies it leases anew from a server that was lost and is back.
    ///
    /// # Errors
    /// [`OpenError`], which names the server or the setting.
    pub fn join(&self, ticket: &LeaseTicket) -> Result<PagedMemory, OpenError> {
        self.paged.cache_config()?;
        self.start(Pool::connect(&self.attachment(ticket)?)?)
    }

    fn start(&self, mut pool: Pool) -> Result<PagedMemory, OpenError> {
        let region = pool.create_region()?;
        // What is local need not be at a server, so regions may be as large as both together.
        let leased = pool.lease_bytes().0 / u64::from(pool.copies());
        let capacity = leased.saturating_add(self.paged.local_bytes);
        let paged = PagedConfig { capacity_bytes: Some(capacity), ..self.paged.clone() };
        Ok(PagedMemory::start(&paged, pool, region)?)
    }

    /// Connects, and leases, for the direct view and its queues. Blocks, for each server at most the connect
    /// deadline. What concerns paging is of no concern here.
    ///
    /// # Errors
    /// [`OpenError`], which names the server or the setting; [`OpenError::OneCopy`] where two copies are
    /// asked for.
    pub fn open_direct(&self) -> Result<Direct, OpenError> {
        let two = self.copies == Copies::Two;
        let one = self.clone().copies(Copies::One);
        if two { Err(OpenError::OneCopy) } else { one.open_for_both() }
    }

    /// As [`Builder::open_direct`], of a lease that paged memory joins ([`Builder::join`]): its pages have
    /// the copies that are asked for, what the direct view works on has one.
    ///
    /// # Errors
    /// [`OpenError`], which names the server or the setting.
    pub fn open_for_both(&self) -> Result<Direct, OpenError> {
        Ok(Direct::connect(&self.pool_config()?)?)
    }

    /// Joins a lease, whose servers the ticket names. Blocks, for each server at most the connect deadline.
    ///
    /// # Errors
    /// [`OpenError`], which names the server or the setting.
    pub fn join_direct(&self, ticket: &LeaseTicket) -> Result<Direct, OpenError> {
        Ok(Direct::connect(&self.attachment(ticket)?)?)
    }

    fn attachment(&self, ticket: &LeaseTicket) -> Result<PoolConfig, OpenError> {
        let mut config = self.settings()?;
        config.lease = LeaseRequest::Attach { ticket: ticket.clone(), name: self.name.clone() };
        Ok(config)
    }

    fn pool_config(&self) -> Result<PoolConfig, OpenError> {
        if self.servers.is_empty() {
            return Err(OpenError::NoServers);
        }
        if self.memory.0 == 0 && self.servers.iter().all(|s| s.memory.is_none()) {
            return Err(OpenError::NoMemory);
        }
        if self.copies == Copies::Two && self.servers.len() < 2 {
            return Err(OpenError::TooFewServers(self.servers.len()));
        }
        self.settings()
    }

    /// What does not depend on whose lease it is.
    fn settings(&self) -> Result<PoolConfig, OpenError> {
        let stripe_pages = self.stripe.map(stripe_pages).transpose()?;
        let mut config = PoolConfig::new(self.servers.clone(), self.memory, self.name.clone());
        config.key = self.key_file.as_deref().map(Key::load).transpose()?;
        config.encryption = self.encryption;
        config.compression = self.compression;
        config.copies = self.copies;
        config.stripe_pages = stripe_pages.unwrap_or(config.stripe_pages);
        config.connect_deadline = self.connect_deadline.unwrap_or(config.connect_deadline);
        config.op_deadline = self.op_deadline.unwrap_or(config.op_deadline);
        config.same_host = self.same_host;
        config.zero_copy = self.zero_copy;
        config.pinned = self.pinned.unwrap_or(config.pinned);
        Ok(config)
    }
}

fn stripe_pages(stripe: ByteLen) -> Result<u32, OpenError> {
    let fits = stripe.0.is_power_of_two() && (4096..=4 << 30).contains(&stripe.0);
    u32::try_from(stripe.0 / 4096).ok().filter(|_| fits).ok_or(OpenError::Stripe(stripe))
}

fn program_name() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    path.file_name().map_or_else(|| "rampool".into(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_known_by_its_name() {
        for (name, takes, _) in OPTIONS {
            let value = match *takes {
                "HOST[:PORT][=AMOUNT]" => "a:1=1G,b",
                "AMOUNT" => "64K",
                "NUMBER" => "100",
                "1|2" => "2",
                "auto|on|off" | "on|off" => "on",
                "auto|off|AMOUNT" => "64K",
                "auto|rings|socket" => "rings",
                "auto|uffd|uffd-user|segv|in-thread" => "in-thread",
                "TEXT" | "PATH" => "x",
                other => panic!("{other}"),
            };
            let mut builder = Builder::new();
            assert_eq!(builder.set(name, value), Ok(()), "{name}");
        }
        assert_eq!(Builder::new().set("locale", "x"), Err(OptionError::Unknown("locale".into())));
    }

    #[test]
    fn bad_values_name_the_option_and_change_nothing() {
        let mut builder = Builder::new();
        for (name, value) in [
            ("server", "a:1,:2"),
            ("memory", "lots"),
            ("copies", "3"),
            ("page-size", "8G"),
            ("encryption", "yes"),
            ("op-deadline-ms", "1s"),
        ] {
            let error = builder.set(name, value).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        assert!(builder.servers.is_empty());
        assert!(matches!(builder.open(), Err(OpenError::NoServers)));
        builder.set("server", "127.0.0.1:1").unwrap();
        assert!(matches!(builder.open(), Err(OpenError::NoMemory)));
        builder.set("memory", "1M").unwrap();
        for copies in [Copies::Two, Copies::TwoIfTheyFit] {
            let open = builder.clone().copies(copies).open();
            assert_eq!(copies == Copies::Two, matches!(open, Err(OpenError::TooFewServers(1))));
            let direct = builder.clone().copies(copies).open_direct();
            assert_eq!(copies == Copies::Two, matches!(direct, Err(OpenError::OneCopy)));
        }
        assert!(matches!(
            builder.clone().page_size(5000).open(),
            Err(OpenError::Paged(PagedError::PageSize(5000)))
        ));
        for stripe in [0, 5000, 2048, 8 << 30] {
            let open = builder.clone().stripe(ByteLen(stripe)).open();
            assert!(matches!(open, Err(OpenError::Stripe(ByteLen(bytes))) if bytes == stripe));
        }
    }
}
