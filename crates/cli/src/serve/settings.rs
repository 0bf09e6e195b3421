//! The settings of a server: arguments, then environment, then the settings file, then defaults, under the
//! same names.

use anyhow::{Context, Result, bail};
use rampool_lease::QueueLimits;
use rampool_net::DEFAULT_PORT;
use rampool_net::transport::Endpoint;
use rampool_server::StoreKind;
use rampool_server::block::{BlockConfig, Export};
use rampool_wire::frame::QueueBounds;
use rampool_wire::session::Encryption;
use rampool_wire::units::ByteLen;
use serde::{Deserialize, Deserializer};
use std::fmt::Display;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Lend this machine's memory to programs on other machines
///
/// The server takes memory from the system as pages arrive and returns it as they are freed. Every option can
/// also be set in the settings file under the same name (memory = "8G"), and in the environment.
#[derive(clap::Args, Deserialize, Debug, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Args {
    /// Settings file (TOML) with the names of these options
    #[arg(long, env = "RAMPOOL_SERVE_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Memory to lend, in bytes, such as 512M, 8G or 1.5T
    #[arg(long, env = "RAMPOOL_SERVE_MEMORY", value_name = "SIZE")]
    #[serde(deserialize_with = "from_text")]
    pub memory: Option<ByteLen>,

    /// Address to listen on: HOST:PORT, unix:PATH or ucx:HOST:PORT; with port 0 the system chooses one.
    /// Repeat it, or separate by commas [default: 127.0.0.1:7117]
    #[arg(long, env = "RAMPOOL_SERVE_LISTEN", value_name = "ADDR", value_delimiter = ',')]
    #[serde(deserialize_with = "from_texts")]
    pub listen: Vec<Endpoint>,

    /// Key file of the pool (see `rampool key`); required to listen on an address that other machines can
    /// reach
    #[arg(long, env = "RAMPOOL_KEY_FILE", value_name = "FILE")]
    pub key_file: Option<PathBuf>,

    /// File (TOML) with quotas of tenants and their revoked keys; SIGHUP makes the server read it again
    /// [default: none]
    #[arg(long, env = "RAMPOOL_SERVE_TENANTS", value_name = "FILE")]
    pub tenants: Option<PathBuf>,

    /// Encrypt connections: auto (those from other machines), on or off [default: auto]
    #[arg(long, env = "RAMPOOL_ENCRYPTION", value_name = "WHEN")]
    #[serde(deserialize_with = "from_text")]
    pub encryption: Option<Encryption>,

    /// How to store pages: raw (fastest) or compressed (more pages than memory, if they compress) [default:
    /// raw]
    #[arg(long, env = "RAMPOOL_SERVE_STORE", value_name = "KIND")]
    pub store: Option<Store>,

    /// Number of threads that serve [default: one per core]
    #[arg(long, env = "RAMPOOL_SERVE_SHARDS", value_name = "N")]
    pub shards: Option<usize>,

    /// Microseconds that an idle thread polls before it sleeps, as long as work mostly arrives within this
    /// time [default: 100; 0 on one core]
    #[arg(long, env = "RAMPOOL_SERVE_SPIN_US", value_name = "US")]
    pub spin_us: Option<u64>,

    /// Milliseconds that a client with a broken connection keeps its pages [default: 10000]
    #[arg(long, env = "RAMPOOL_SERVE_GRACE_MS", value_name = "MS")]
    pub grace_ms: Option<u64>,

    /// Milliseconds between keepalive probes to a client's machine; after three without an answer the client
    /// is lost [default: 2000]
    #[arg(long, env = "RAMPOOL_SERVE_HEARTBEAT_MS", value_name = "MS")]
    pub heartbeat_ms: Option<u64>,

    /// Milliseconds that a client may stay silent while its machine answers: it may be stopped and go on
    /// later [default: 3600000]
    #[arg(long, env = "RAMPOOL_SERVE_SILENCE_MS", value_name = "MS")]
    pub silence_ms: Option<u64>,

    /// Milliseconds that a stopping server waits for its clients to leave [default: 10000]
    #[arg(long, env = "RAMPOOL_SERVE_DRAIN_MS", value_name = "MS")]
    pub drain_ms: Option<u64>,

    /// Most connections at a time [default: 1024]
    #[arg(long, env = "RAMPOOL_SERVE_MAX_CONNECTIONS", value_name = "N")]
    pub max_connections: Option<usize>,

    /// Most queues in a lease [default: 1024]
    #[arg(long, env = "RAMPOOL_SERVE_QUEUES", value_name = "N")]
    pub queues: Option<usize>,

    /// Most messages that a queue may be created for [default: 1048576]
    #[arg(long, env = "RAMPOOL_SERVE_QUEUE_MESSAGES", value_name = "N")]
    pub queue_messages: Option<u64>,

    /// Most bytes of heads and bodies that a queue may be created for [default: 1T; the lease's memory limits
    /// them anyway]
    #[arg(long, env = "RAMPOOL_SERVE_QUEUE_BYTES", value_name = "SIZE")]
    #[serde(deserialize_with = "from_text")]
    pub queue_bytes: Option<ByteLen>,

    /// User IDs, other than this one and root, that may use the Unix sockets. Repeat it, or separate by
    /// commas
    #[arg(long, env = "RAMPOOL_SERVE_ALLOW_UID", value_name = "UID", value_delimiter = ',')]
    pub allow_uid: Vec<u32>,

    /// Servers that clients may let this one copy to, as the clients name them. Repeat it, or separate by
    /// commas [default: any HOST:PORT; without a key this machine's]
    #[arg(long, env = "RAMPOOL_SERVE_COPY_TO", value_name = "ADDR", value_delimiter = ',')]
    #[serde(deserialize_with = "from_texts")]
    pub copy_to: Vec<Endpoint>,

    /// Required to listen on ucx:HOST:PORT. The only WORD is `trusted`: you trust every client there, because
    /// a malformed UCX message from one can end the server for all
    #[arg(long, env = "RAMPOOL_SERVE_UCX_CLIENTS", value_name = "WORD")]
    pub ucx_clients: Option<UcxClients>,
    /// Address to serve block devices over NBD: unix:PATH or HOST:PORT. Repeat it, or separate by commas
    #[arg(long, env = "RAMPOOL_SERVE_NBD", value_name = "ADDR", value_delimiter = ',')]
    #[serde(deserialize_with = "from_texts")]
    pub nbd: Vec<Endpoint>,

    /// Name and size in bytes of a block device to serve over NBD (swap=4G); its memory is taken out of
    /// --memory at once. Repeat it, or separate by commas
    #[arg(long, env = "RAMPOOL_SERVE_EXPORT", value_name = "NAME=SIZE", value_delimiter = ',')]
    #[serde(deserialize_with = "from_texts")]
    pub export: Vec<NamedSize>,

    /// Allow NBD on an address that other machines can reach, although it has no key and no encryption: every
    /// client there can read and write [default: refuse]
    #[arg(long, env = "RAMPOOL_SERVE_NBD_PLAIN")]
    pub nbd_plain: bool,

    /// Do not lock the lent memory: the system may swap it out [default: lock it]
    #[arg(long, env = "RAMPOOL_SERVE_NO_LOCK")]
    pub no_lock: bool,

    /// Serve clients on this machine only through their Unix socket, never through shared memory [default:
    /// shared memory if the client can]
    #[arg(long, env = "RAMPOOL_SERVE_NO_RINGS")]
    pub no_rings: bool,

    /// Address to serve Prometheus metrics on, as HOST:PORT [default: none]
    #[arg(long, env = "RAMPOOL_SERVE_METRICS", value_name = "ADDR")]
    pub metrics: Option<SocketAddr>,

    /// Format of the log: text or json [default: text]
    #[arg(long, env = "RAMPOOL_SERVE_LOG", value_name = "FORM")]
    pub log: Option<LogFormat>,

    /// Least severe level to log: error, warn, info, debug or trace [default: info]
    #[arg(long, env = "RAMPOOL_SERVE_LOG_LEVEL", value_name = "LEVEL")]
    pub log_level: Option<String>,

    /// File to write the addresses to when the server is ready
    #[arg(long, env = "RAMPOOL_SERVE_READY_FILE", value_name = "FILE")]
    pub ready_file: Option<PathBuf>,

    /// End at once when standard input closes: for a process that starts a server for itself
    #[arg(long, hide = true)]
    #[serde(skip)]
    pub until_stdin_closes: bool,

    /// Keep what is lent in a file on a disk, below this directory, instead of memory. The file has no name,
    /// and goes with the server [default: in memory]
    #[arg(long, env = "RAMPOOL_SERVE_DISK", value_name = "DIR")]
    #[serde(default)]
    pub disk: Option<PathBuf>,

    /// Let clients read the memory of all leases themselves: for a process that starts a server for its own
    /// programs
    #[arg(long, hide = true)]
    #[serde(skip)]
    pub open_frames: bool,
}

/// An export's name and size: `swap=4G`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedSize(Export);

impl FromStr for NamedSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("invalid export {text:?}: give a name and a size, such as swap=4G");
        let (name, size) = text.split_once('=').ok_or_else(wrong)?;
        let bytes = size.parse::<ByteLen>().map_err(|error| format!("export {name:?}: {error}"))?.0;
        Ok(Self(Export { name: name.to_owned(), bytes }))
    }
}

#[derive(clap::ValueEnum, Deserialize, Clone, Copy, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Store {
    Raw,
    Compressed,
}

#[derive(clap::ValueEnum, Deserialize, Clone, Copy, Debug)]
#[serde(rename_all = "lowercase")]
pub enum UcxClients {
    Trusted,
}

#[derive(clap::ValueEnum, Deserialize, Clone, Copy, Debug)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

impl Args {
    /// The same, with what the settings file says where there is one and they do not.
    pub fn effective(mut self) -> Result<Self> {
        let file = match &self.config {
            None => Args::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read the settings file {}", path.display()))?;
                toml::from_str(&text).with_context(|| format!("invalid settings file {}", path.display()))?
            }
        };
        macro_rules! complete {
            (one: $($one:ident)*; some: $($some:ident)*; flags: $($flag:ident)*) => {
                $(self.$one = self.$one.or(file.$one);)*
                $(if self.$some.is_empty() { self.$some = file.$some })*
                $(self.$flag |= file.$flag;)*
            };
        }
        complete! {
            one: memory key_file tenants encryption store shards spin_us grace_ms heartbeat_ms silence_ms
                drain_ms max_connections queues queue_messages queue_bytes ucx_clients metrics log log_level
                ready_file disk;
            some: listen allow_uid copy_to nbd export;
            flags: nbd_plain no_lock no_rings
        }
        let Some(memory) = self.memory else {
            bail!("--memory is missing: give how much memory to lend, such as --memory 8G")
        };
        self.memory = Some(super::parse_memory(memory)?);
        if self.listen.is_empty() {
            self.listen.push(Endpoint::Tcp { host: "127.0.0.1".into(), port: DEFAULT_PORT });
        }
        Ok(self)
    }

    /// Of effective settings.
    pub fn memory(&self) -> ByteLen {
        self.memory.expect("it is there, or an error was said")
    }

    pub fn store(&self) -> StoreKind {
        match self.store {
            None | Some(Store::Raw) => StoreKind::Raw,
            Some(Store::Compressed) => StoreKind::Compressed,
        }
    }

    pub fn drain_time(&self) -> Duration {
        Duration::from_millis(self.drain_ms.unwrap_or(10_000))
    }

    pub fn queue_limits(&self) -> QueueLimits {
        let QueueLimits { queues, bounds } = QueueLimits::default();
        let messages = self.queue_messages.unwrap_or(bounds.messages);
        let bytes = self.queue_bytes.map_or(bounds.bytes, |bytes| bytes.0);
        QueueLimits { queues: self.queues.unwrap_or(queues), bounds: QueueBounds { messages, bytes } }
    }

    pub fn block(&self) -> BlockConfig {
        let exports = self.export.iter().map(|export| export.0.clone()).collect();
        BlockConfig { listen: self.nbd.clone(), exports, plain: self.nbd_plain }
    }
}

fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// One, or a list.
fn from_texts<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Texts {
        One(String),
        Many(Vec<String>),
    }
    let texts = match Texts::deserialize(deserializer)? {
        Texts::One(text) => vec![text],
        Texts::Many(texts) => texts,
    };
    texts.iter().map(|text| text.parse().map_err(serde::de::Error::custom)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn effective(file: &str, line: &[&str]) -> Result<Args> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serve.toml");
        std::fs::write(&path, file).unwrap();
        let line = ["serve", "--config", path.to_str().unwrap()].into_iter().chain(line.iter().copied());
        Line::try_parse_from(line)?.args.effective()
    }

    #[test]
    fn arguments_come_before_the_file_and_the_file_before_defaults() {
        let file = "memory = \"1.5G\"\nlisten = [\"127.0.0.1:1\", \"unix:/run/x\"]\nencryption = \"on\"\n\
                    store = \"compressed\"\nspin-us = 7\n";
        let settings = effective(file, &["--memory", "2G", "--spin-us", "9"]).unwrap();
        assert_eq!((settings.memory(), settings.spin_us), (ByteLen(2 << 30), Some(9)));
        assert_eq!(
            settings.listen.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["127.0.0.1:1", "unix:/run/x"]
        );
        assert_eq!(
            (settings.encryption, settings.store(), settings.drain_time()),
            (Some(Encryption::On), StoreKind::Compressed, Duration::from_secs(10))
        );
        let settings = effective("memory = \"512M\"\nlisten = \"[::1]:5\"", &[]).unwrap();
        assert_eq!(
            (settings.memory(), settings.listen[0].to_string().as_str()),
            (ByteLen(512 << 20), "[::1]:5")
        );
    }

    #[test]
    fn every_argument_may_stand_in_the_file() {
        let file = "memory = \"1G\"\nlisten = \"127.0.0.1:0\"\nkey-file = \"k\"\ntenants = \"t\"\n\
                    encryption = \"off\"\nstore = \"raw\"\nshards = 1\nspin-us = 0\n\
            grace-ms = 1\nheartbeat-ms = 1\nsilence-ms = 1\ndrain-ms = 1\nmax-connections = 1\nqueues = 1\n\
            queue-messages = 2\nqueue-bytes = \"3K\"\nallow-uid = [1, 2]\ncopy-to = \"h:1\"\n\
            ucx-clients = \"trusted\"\n\
            nbd = \"unix:/run/n\"\nexport = [\"swap=4G\", \"a b=512M\"]\nnbd-plain = true\nno-lock = true\n\
            no-rings = true\nmetrics = \"127.0.0.1:9\"\n\
            log = \"json\"\nlog-level = \"debug\"\nready-file = \"r\"\ndisk = \"/d\"\n";
        let settings = effective(file, &[]).unwrap();
        let text = format!("{settings:?}");
        assert!(!text.contains("None") && !text.contains("[]"), "something is left out: {text}");
        assert_eq!(
            text.matches("false").count(),
            2,
            "of what only a process says that starts a server: {text}"
        );
        let (block, queues) = (settings.block(), settings.queue_limits());
        assert_eq!((settings.allow_uid, settings.log_level.as_deref()), (vec![1, 2], Some("debug")));
        assert!(
            settings.no_lock
                && settings.no_rings
                && settings.ucx_clients.is_some()
                && settings.copy_to.len() == 1
        );
        assert_eq!(settings.disk, Some("/d".into()));
        let export = |name: &str, bytes| Export { name: name.to_owned(), bytes };
        assert_eq!(block.exports, [export("swap", 4 << 30), export("a b", 512 << 20)]);
        assert!(block.plain && block.listen[0].to_string() == "unix:/run/n");
        assert_eq!(queues, QueueLimits { queues: 1, bounds: QueueBounds { messages: 2, bytes: 3072 } });
        let named = file.lines().count();
        let arguments = <Line as clap::CommandFactory>::command()
            .get_arguments()
            .filter(|a| a.get_id() != "help" && !a.is_hide_set())
            .count();
        assert_eq!(named + 1, arguments, "every argument but --config is named in this test's file");
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let error = |file: &str, line: &[&str]| format!("{:#}", effective(file, line).unwrap_err());
        assert!(error("", &[]).contains("--memory 8G"));
        assert!(error("memory = \"1G\"\nmemmory = 1", &[]).contains("memmory"));
        assert!(error("memory = \"lots\"", &[]).contains("lots"));
        assert!(error("memory = \"1K\"", &[]).contains("at least 1 MiB"));
        assert!(error("memory = \"1G\"\nlisten = \"nowhere\"", &[]).contains("nowhere"));
        assert!(error("memory = \"1G\"", &["--export", "swap"]).contains("swap=4G"));
        assert!(error("memory = \"1G\"\nexport = \"swap=much\"", &[]).contains("much"));
    }
}
