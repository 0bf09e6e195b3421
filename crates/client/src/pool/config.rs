//! What a pool is made of: which servers, how much memory of each, who may read along, how long to wait.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rampool_paging::placement::DEFAULT_STRIPE_PAGES;
use rampool_pinning::path::Wish;
use rampool_wire::session::Encryption;
use rampool_wire::units::{ByteLen, ByteLenError};

use super::ticket::{LeaseTicket, RegionTicket};
use rampool_net::key::Key;
use rampool_net::transport::{Endpoint, SameHost};

/// How a pool comes to be. Make one with [`PoolConfig::new`] or [`PoolConfig::attach`] and
/// change what should be different.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolConfig {
    pub lease: LeaseRequest,
    /// The key shared with the servers; none: loopback and Unix sockets only.
    pub key: Option<Key>,
    pub encryption: Encryption,
    /// How long connecting to one server and opening a lease there may take.
    pub connect_deadline: Duration,
    /// How long a server may leave a request unanswered before it counts as lost.
    pub op_deadline: Duration,
    /// Consecutive pages on one server; a power of two. An attached pool takes it from the ticket.
    pub stripe_pages: u32,
    /// On how many servers each page lies. An attached pool takes it from the ticket.
    pub copies: Copies,
    /// Servers that an attached pool does without, by their place in the ticket.
    pub(super) without: Vec<Without>,
    /// Whether pages may travel compressed where the server agrees.
    pub compression: bool,
    /// How servers on this machine are reached; none: as the variable `RAMPOOL_SAME_HOST` says, or by
    /// shared memory where they can.
    pub same_host: Option<SameHost>,
    /// From how many bytes on the direct view sends without a copy; none: as the variable
    /// `RAMPOOL_ZERO_COPY` says, or by itself.
    pub zero_copy: Option<Wish>,
    /// The most memory that is kept pinned for it.
    pub pinned: ByteLen,
}

/// On how many servers each page of a pool lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Copies {
    /// On one: a lost server takes its pages with it.
    #[default]
    One,
    /// On two. Any one server may be lost. Open regions, queues and everything else of the direct view
    /// have one copy all the same.
    Two,
    /// On one of the servers and on the last one, which is read only where that one is lost.
    WithBackup,
    /// On two where there are two servers with room for that, else on one
    /// ([`super::Pool::copies`] says which).
    TwoIfTheyFit,
}

/// A new lease, or one that exists.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LeaseRequest {
    /// Open a lease on every server, together `bytes` (or the sum of the named amounts where that is more).
    Open {
        servers: Vec<ServerSpec>,
        bytes: ByteLen,
        /// Shown to people by the servers, such as the program's name.
        name: String,
    },
    /// Become one more member of a lease that another pool opened.
    Attach { ticket: LeaseTicket, name: String },
}

impl PoolConfig {
    /// A pool on these servers with a new lease of `bytes`; zero if every server's amount is named.
    #[must_use]
    pub fn new(servers: Vec<ServerSpec>, bytes: ByteLen, name: impl Into<String>) -> Self {
        Self::with_lease(LeaseRequest::Open { servers, bytes, name: name.into() })
    }

    /// A pool on the servers of a ticket, as one more member of its lease.
    #[must_use]
    pub fn attach(ticket: LeaseTicket, name: impl Into<String>) -> Self {
        Self::with_lease(LeaseRequest::Attach { ticket, name: name.into() })
    }

    /// Does without the servers that do not have this region, in a process that is to take it over.
    pub fn to_adopt(&mut self, region: &RegionTicket) {
        let out = |index: usize| region.handed.history.out.get(index) == Some(&true);
        let names = region.handed.names.iter().enumerate();
        self.without =
            names.map(|(index, name)| Without { at_first: name.0 == 0, out: out(index) }).collect();
    }

    /// Does without a server at first that is said not to answer, where that is one: the other holders of its
    /// pages are there. It is joined when it can be reached.
    pub fn without_silent(&mut self, silent: &[bool]) {
        let has_nothing = self.without.is_empty();
        self.without.resize(self.without.len().max(silent.len()), Without::default());
        let all = || self.without.iter().zip(silent);
        // Who has nothing yet goes with what others hold of it already.
        let out = |of: &Without, silent: bool| of.out || has_nothing && silent;
        let others = all().any(|(of, silent)| of.at_first && !silent && !of.out);
        let waited = all().filter(|(of, silent)| **silent && !out(of, **silent)).count();
        let without = !others && waited <= 1 && silent.contains(&true);
        for (of, silent) in self.without.iter_mut().zip(silent) {
            of.out |= has_nothing && *silent;
            of.at_first = if without { *silent } else { of.at_first };
        }
    }

    /// Whether this server is joined later, when it can be reached.
    pub(super) fn begins_without(&self, server: usize) -> bool {
        self.without.get(server).is_some_and(|of| of.at_first)
    }

    fn with_lease(lease: LeaseRequest) -> Self {
        Self {
            lease,
            key: None,
            encryption: Encryption::Auto,
            connect_deadline: Duration::from_secs(5),
            op_deadline: Duration::from_secs(10),
            stripe_pages: DEFAULT_STRIPE_PAGES,
            copies: Copies::One,
            without: Vec::new(),
            compression: false,
            same_host: None,
            zero_copy: None,
            pinned: ByteLen(64 << 20),
        }
    }
}

/// How a pool does without a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Without {
    /// It is joined later, when it can be reached.
    pub at_first: bool,
    /// Others have taken its place, as long as it cannot be reached.
    pub out: bool,
}

/// One memory server of a pool, and what is wanted from it.
///
/// Written `HOST`, `HOST:PORT`, `[V6ADDRESS]:PORT` or `unix:/PATH`, each perhaps followed by
/// `=AMOUNT` (such as `=4G`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerSpec {
    pub endpoint: Endpoint,
    /// The memory wanted from this very server; `None`: an equal part of what the other servers' named
    /// amounts leave of the lease.
    pub memory: Option<ByteLen>,
}

/// Why a text names no memory server.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerSpecError {
    #[error(
        "{0:?} names no memory server; write host:port, unix:/path or ucx:host:port, perhaps followed by =4G"
    )]
    NoAddress(String),
    #[error("{0:?} has no usable port: ports are numbers from 1 to 65535")]
    BadPort(String),
    #[error("the amount of memory wanted from {server}: {reason}")]
    BadAmount { server: String, reason: ByteLenError },
}

impl FromStr for ServerSpec {
    type Err = ServerSpecError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let (place, memory) = match text.rsplit_once('=') {
            Some((place, amount)) => {
                let bad = |reason| ServerSpecError::BadAmount { server: place.to_owned(), reason };
                (place, Some(amount.parse().map_err(bad)?))
            }
            None => (text, None),
        };
        Ok(Self { endpoint: endpoint_of(place)?, memory })
    }
}

/// An endpoint as people write it: the port may be left out.
pub(crate) fn endpoint_of(place: &str) -> Result<Endpoint, ServerSpecError> {
    let no_address = || ServerSpecError::NoAddress(place.to_owned());
    let bad_port = || ServerSpecError::BadPort(place.to_owned());
    if let Some(path) = place.strip_prefix("unix:") {
        return if path.is_empty() { Err(no_address()) } else { Ok(Endpoint::Unix(path.into())) };
    }
    if let Some(rest) = place.strip_prefix("ucx:") {
        return match endpoint_of(rest)? {
            Endpoint::Tcp { host, port } => Ok(Endpoint::Ucx { host, port }),
            Endpoint::Unix(_) | Endpoint::Ucx { .. } => Err(no_address()),
        };
    }
    let (host, port) = if let Some(rest) = place.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or_else(no_address)?;
        match port {
            "" => (host, None),
            port => (host, Some(port.strip_prefix(':').ok_or_else(no_address)?)),
        }
    } else {
        match place.split_once(':') {
            // A bare version 6 address has more colons and no port.
            Some((_, rest)) if rest.contains(':') => (place, None),
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        }
    };
    if !rampool_net::transport::is_host(host) {
        return Err(no_address());
    }
    let port = match port {
        None => rampool_net::DEFAULT_PORT,
        Some(port) => port.parse().ok().filter(|p| *p > 0).ok_or_else(bad_port)?,
    };
    Ok(Endpoint::Tcp { host: host.to_owned(), port })
}

impl fmt::Display for ServerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.memory {
            Some(memory) => write!(f, "{}={}", self.endpoint, memory.0),
            None => write!(f, "{}", self.endpoint),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16, memory: Option<u64>) -> ServerSpec {
        ServerSpec { endpoint: Endpoint::Tcp { host: host.into(), port }, memory: memory.map(ByteLen) }
    }

    #[test]
    fn servers_are_read_as_people_write_them() {
        let default = rampool_net::DEFAULT_PORT;
        for (text, spec) in [
            ("memhost1", tcp("memhost1", default, None)),
            ("memhost1:7000", tcp("memhost1", 7000, None)),
            ("memhost1:7000=4G", tcp("memhost1", 7000, Some(4 << 30))),
            ("10.0.0.1=512M", tcp("10.0.0.1", default, Some(512 << 20))),
            ("[::1]:7000", tcp("::1", 7000, None)),
            ("[::1]", tcp("::1", default, None)),
            ("fe80::1", tcp("fe80::1", default, None)),
            (
                "unix:/run/rp=1G",
                ServerSpec { endpoint: Endpoint::Unix("/run/rp".into()), memory: Some(ByteLen(1 << 30)) },
            ),
            ("unix:/run/rp", ServerSpec { endpoint: Endpoint::Unix("/run/rp".into()), memory: None }),
        ] {
            let parsed: ServerSpec = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(parsed, spec, "{text}");
            assert_eq!(
                parsed.to_string().parse::<ServerSpec>().as_ref(),
                Ok(&spec),
                "{text} shown and read again"
            );
        }
    }

    #[test]
    fn what_names_no_server_is_refused_with_a_reason() {
        for text in ["", ":7000", "unix:", "[::1", "[::1]7000", "a b:1", "dir/file"] {
            assert!(matches!(text.parse::<ServerSpec>(), Err(ServerSpecError::NoAddress(_))), "{text}");
        }
        for text in ["host:", "host:0", "host:65536", "host:http"] {
            assert!(matches!(text.parse::<ServerSpec>(), Err(ServerSpecError::BadPort(_))), "{text}");
        }
        assert!(matches!("host:1=lots".parse::<ServerSpec>(), Err(ServerSpecError::BadAmount { .. })));
    }
}
