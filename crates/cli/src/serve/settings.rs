//! The settings of a server: arguments, then environment, then the settings file, then defaults. All three have the same names.

use anyhow::{Context, Result, bail};
use rampool::DEFAULT_PORT;
use rampool::proto::server::QueueLimits;
use rampool::proto::session::Encryption;
use rampool::proto::units::ByteLen;
use rampool::proto::wire::QueueBounds;
use rampool::server::StoreKind;
use rampool::transport::Endpoint;
use serde::{Deserialize, Deserializer};
use std::fmt::Display;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// Lend this machine's memory to programs on other machines
///
/// Memory is taken from the system as pages arrive and given back as they are freed. Every option can stand in the settings file under the same
/// name (memory = "8G"), and in the environment.
#[derive(clap::Args, Deserialize, Debug, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Args {
    /// A settings file (TOML) with these same names
    #[arg(long, env = "RAMPOOL_SERVE_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,

    /// Memory to lend, such as 512M, 8G or 1.5T
    #[arg(long, env = "RAMPOOL_SERVE_MEMORY", value_name = "SIZE")]
    #[serde(deserialize_with = "from_text")]
    memory: Option<ByteLen>,

    /// Where to listen: HOST:PORT, unix:PATH or ucx:HOST:PORT; port 0 lets the system choose. Repeat it, or separate by commas [default: 127.0.0.1:7117]
    #[arg(long, env = "RAMPOOL_SERVE_LISTEN", value_name = "ADDR", value_delimiter = ',')]
    #[serde(deserialize_with = "from_texts")]
    listen: Vec<Endpoint>,

    /// The pool's key file (see `rampool key`); needed to listen beyond this machine
    #[arg(long, env = "RAMPOOL_KEY_FILE", value_name = "FILE")]
    key_file: Option<PathBuf>,

    /// Encrypt what travels: auto (on beyond this machine), on or off [default: auto]
    #[arg(long, env = "RAMPOOL_ENCRYPTION", value_name = "WHEN")]
    #[serde(deserialize_with = "from_text")]
    encryption: Option<Encryption>,

    /// How pages are kept: raw (fastest) or compressed (more pages than memory, as far as they pack) [default: raw]
    #[arg(long, env = "RAMPOOL_SERVE_STORE", value_name = "KIND")]
    store: Option<Store>,

    /// Threads that serve [default: one per core]
    #[arg(long, env = "RAMPOOL_SERVE_SHARDS", value_name = "N")]
    shards: Option<usize>,

    /// How long an idle thread looks for work before it sleeps, while work mostly comes within this time [default: 100, on one core 0]
    #[arg(long, env = "RAMPOOL_SERVE_SPIN_US", value_name = "US")]
    spin_us: Option<u64>,

    /// How long a client whose connection broke keeps its pages [default: 10000]
    #[arg(long, env = "RAMPOOL_SERVE_GRACE_MS", value_name = "MS")]
    grace_ms: Option<u64>,

    /// How often a client's machine is asked whether it is there; after three times without an answer the client is lost [default: 2000]
    #[arg(long, env = "RAMPOOL_SERVE_HEARTBEAT_MS", value_name = "MS")]
    heartbeat_ms: Option<u64>,

    /// How long a client may say nothing while its machine is there: it may be stopped and go on later [default: 3600000]
    #[arg(long, env = "RAMPOOL_SERVE_SILENCE_MS", value_name = "MS")]
    silence_ms: Option<u64>,

    /// How long a stopping server waits for its clients to leave [default: 10000]
    #[arg(long, env = "RAMPOOL_SERVE_DRAIN_MS", value_name = "MS")]
    drain_ms: Option<u64>,

    /// Connections at a time [default: 1024]
    #[arg(long, env = "RAMPOOL_SERVE_MAX_CONNECTIONS", value_name = "N")]
    max_connections: Option<usize>,

    /// Queues of a lease [default: 1024]
    #[arg(long, env = "RAMPOOL_SERVE_QUEUES", value_name = "N")]
    queues: Option<usize>,

    /// Messages that a queue may be made for [default: 1048576]
    #[arg(long, env = "RAMPOOL_SERVE_QUEUE_MESSAGES", value_name = "N")]
    queue_messages: Option<u64>,

    /// Bytes of heads and bodies that a queue may be made for [default: 1T; the lease's memory bounds them anyway]
    #[arg(long, env = "RAMPOOL_SERVE_QUEUE_BYTES", value_name = "SIZE")]
    #[serde(deserialize_with = "from_text")]
    queue_bytes: Option<ByteLen>,

    /// Users (numbers) besides this one and root who may use the Unix sockets. Repeat it, or separate by commas
    #[arg(long, env = "RAMPOOL_SERVE_ALLOW_UID", value_name = "UID", value_delimiter = ',')]
    allow_uid: Vec<u32>,

    /// Do not lock the lent memory: the system may swap it out
    #[arg(long, env = "RAMPOOL_SERVE_NO_LOCK")]
    no_lock: bool,

    /// Serve clients on this machine through their Unix socket only, never through shared memory
    #[arg(long, env = "RAMPOOL_SERVE_NO_RINGS")]
    no_rings: bool,

    /// Answer Prometheus here: HOST:PORT
    #[arg(long, env = "RAMPOOL_SERVE_METRICS", value_name = "ADDR")]
    metrics: Option<SocketAddr>,

    /// Write the log as text or json [default: text]
    #[arg(long, env = "RAMPOOL_SERVE_LOG", value_name = "FORM")]
    log: Option<LogFormat>,

    /// What to log: error, warn, info, debug or trace [default: info]
    #[arg(long, env = "RAMPOOL_SERVE_LOG_LEVEL", value_name = "LEVEL")]
    log_level: Option<String>,

    /// Write the addresses into this file when the server is ready
    #[arg(long, env = "RAMPOOL_SERVE_READY_FILE", value_name = "FILE")]
    ready_file: Option<PathBuf>,

    /// End at once when standard input closes: for whoever starts a server for itself
    #[arg(long, hide = true)]
    #[serde(skip)]
    until_stdin_closes: bool,
}

#[derive(clap::ValueEnum, Deserialize, Clone, Copy, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Store {
    Raw,
    Compressed,
}

#[derive(clap::ValueEnum, Deserialize, Clone, Copy, Debug)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

/// What holds after all of them were heard.
#[derive(Debug)]
pub struct Settings {
    pub memory: ByteLen,
    pub listen: Vec<Endpoint>,
    pub key_file: Option<PathBuf>,
    pub encryption: Encryption,
    pub store: StoreKind,
    pub shards: Option<usize>,
    pub spin_us: Option<u64>,
    pub grace_ms: Option<u64>,
    pub heartbeat_ms: Option<u64>,
    pub silence_ms: Option<u64>,
    pub drain_ms: u64,
    pub max_connections: Option<usize>,
    pub queues: QueueLimits,
    pub allow_uid: Vec<u32>,
    pub no_lock: bool,
    pub no_rings: bool,
    pub metrics: Option<SocketAddr>,
    pub log: LogFormat,
    pub log_level: String,
    pub ready_file: Option<PathBuf>,
    pub until_stdin_closes: bool,
}

impl Args {
    /// Reads the settings file, if there is one, and settles what holds.
    pub fn settle(self) -> Result<Settings> {
        let file = match &self.config {
            None => Args::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path).with_context(|| format!("the settings file {} cannot be read", path.display()))?;
                toml::from_str(&text).with_context(|| format!("the settings file {} makes no sense", path.display()))?
            }
        };
        let Some(memory) = self.memory.or(file.memory) else { bail!("how much memory shall be lent? Say --memory 8G, for instance") };
        let several = |ours: Vec<Endpoint>, theirs: Vec<Endpoint>| if ours.is_empty() { theirs } else { ours };
        let mut listen = several(self.listen, file.listen);
        if listen.is_empty() {
            listen.push(Endpoint::Tcp { host: "127.0.0.1".into(), port: DEFAULT_PORT });
        }
        let defaults = QueueLimits::default();
        Ok(Settings {
            memory: super::parse_memory(memory)?,
            listen,
            key_file: self.key_file.or(file.key_file),
            encryption: self.encryption.or(file.encryption).unwrap_or_default(),
            store: match self.store.or(file.store) {
                None | Some(Store::Raw) => StoreKind::Raw,
                Some(Store::Compressed) => StoreKind::Compressed,
            },
            shards: self.shards.or(file.shards),
            spin_us: self.spin_us.or(file.spin_us),
            grace_ms: self.grace_ms.or(file.grace_ms),
            heartbeat_ms: self.heartbeat_ms.or(file.heartbeat_ms),
            silence_ms: self.silence_ms.or(file.silence_ms),
            drain_ms: self.drain_ms.or(file.drain_ms).unwrap_or(10_000),
            max_connections: self.max_connections.or(file.max_connections),
            queues: QueueLimits {
                queues: self.queues.or(file.queues).unwrap_or(defaults.queues),
                bounds: QueueBounds {
                    messages: self.queue_messages.or(file.queue_messages).unwrap_or(defaults.bounds.messages),
                    bytes: self.queue_bytes.or(file.queue_bytes).map_or(defaults.bounds.bytes, |bytes| bytes.0),
                },
            },
            allow_uid: if self.allow_uid.is_empty() { file.allow_uid } else { self.allow_uid },
            no_lock: self.no_lock || file.no_lock,
            no_rings: self.no_rings || file.no_rings,
            metrics: self.metrics.or(file.metrics),
            log: self.log.or(file.log).unwrap_or(LogFormat::Text),
            log_level: self.log_level.or(file.log_level).unwrap_or_else(|| "info".into()),
            ready_file: self.ready_file.or(file.ready_file),
            until_stdin_closes: self.until_stdin_closes,
        })
    }
}

fn from_text<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// One, or a list.
fn from_texts<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<Vec<T>, D::Error> {
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

    fn settle(file: &str, line: &[&str]) -> Result<Settings> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serve.toml");
        std::fs::write(&path, file).unwrap();
        let line = ["serve", "--config", path.to_str().unwrap()].into_iter().chain(line.iter().copied());
        Line::try_parse_from(line)?.args.settle()
    }

    #[test]
    fn arguments_come_before_the_file_and_the_file_before_defaults() {
        let file =
            "memory = \"1.5G\"\nlisten = [\"127.0.0.1:1\", \"unix:/run/x\"]\nencryption = \"on\"\nstore = \"compressed\"\nspin-us = 7\n";
        let settings = settle(file, &["--memory", "2G", "--spin-us", "9"]).unwrap();
        assert_eq!((settings.memory, settings.spin_us), (ByteLen(2 << 30), Some(9)));
        assert_eq!(settings.listen.iter().map(ToString::to_string).collect::<Vec<_>>(), ["127.0.0.1:1", "unix:/run/x"]);
        assert_eq!((settings.encryption, settings.store, settings.drain_ms), (Encryption::On, StoreKind::Compressed, 10_000));
        let settings = settle("memory = \"512M\"\nlisten = \"[::1]:5\"", &[]).unwrap();
        assert_eq!((settings.memory, settings.listen[0].to_string().as_str()), (ByteLen(512 << 20), "[::1]:5"));
    }

    #[test]
    fn every_argument_may_stand_in_the_file() {
        let file = "memory = \"1G\"\nlisten = \"127.0.0.1:0\"\nkey-file = \"k\"\nencryption = \"off\"\nstore = \"raw\"\nshards = 1\nspin-us = 0\n\
            grace-ms = 1\nheartbeat-ms = 1\nsilence-ms = 1\ndrain-ms = 1\nmax-connections = 1\nqueues = 1\nqueue-messages = 2\nqueue-bytes = \"3K\"\nallow-uid = [1, 2]\nno-lock = true\nno-rings = true\nmetrics = \"127.0.0.1:9\"\n\
            log = \"json\"\nlog-level = \"debug\"\nready-file = \"r\"\n";
        let settings = settle(file, &[]).unwrap();
        assert_eq!((settings.allow_uid, settings.log_level.as_str()), (vec![1, 2], "debug"));
        assert!(settings.no_lock && settings.no_rings);
        assert_eq!(settings.queues, QueueLimits { queues: 1, bounds: QueueBounds { messages: 2, bytes: 3072 } });
        let named = file.lines().count();
        let arguments =
            <Line as clap::CommandFactory>::command().get_arguments().filter(|a| a.get_id() != "help" && !a.is_hide_set()).count();
        assert_eq!(named + 1, arguments, "every argument but --config is named in this test's file");
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let error = |file: &str, line: &[&str]| format!("{:#}", settle(file, line).unwrap_err());
        assert!(error("", &[]).contains("--memory 8G"));
        assert!(error("memory = \"1G\"\nmemmory = 1", &[]).contains("memmory"));
        assert!(error("memory = \"lots\"", &[]).contains("lots"));
        assert!(error("memory = \"1K\"", &[]).contains("at least 1 MiB"));
        assert!(error("memory = \"1G\"\nlisten = \"nowhere\"", &[]).contains("nowhere"));
    }
}
