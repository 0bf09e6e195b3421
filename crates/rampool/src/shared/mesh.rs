//! How ranks meet: rank 0 listens where everybody knows, hears where the others listen, and tells all. Then each connects to those below it.
//!
//! ```text
//!   rank 0   <-- Hello --   every other rank, which listens somewhere by then
//!   rank 0   --- Table -->  all of them
//!   rank i   -- Hello -->   rank j, for 0 < j < i, which answers Welcome
//!   rank j   -- Nearby -->  rank i, for j < i: the name of a Unix socket on j's machine
//!   rank i   --- Move -->   rank j: whether it found the socket
//! ```
//! A socket's name is known to one machine only (to one network namespace of it), so who finds it there is near. The two shake hands again over that socket, are given memory to share
//! ([`crate::transport`]), and leave their TCP connection.
//!
//! Each connection begins with the handshake of [`crate::transport`]: beyond this machine both ends prove a key, and what follows is sealed.
//! Who does not know the run's name, has another version or other settings is refused, with both named.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rampool_proto::rings::MIN_RING_BYTES;
use rampool_proto::session::features;
use rampool_proto::share::Rank;
use rampool_proto::share::control::{Control, Hello, SHARE_WIRE_VERSION};

use super::config::{SharedConfig, Transport};
use super::datagrams::Place;
use super::environment::variable;
use super::error::JoinError;
use super::line::{Line, LineError};
use super::relink::Known;
use crate::key::random_bytes;
use crate::transport::{
    DATAGRAM_KEY_BYTES, DatagramSeal, Endpoint, Handshake, HandshakeError, Listener, LocalPolicy, Peer, RING_BYTES, SameHost, Stream, Wants,
};

/// All ranks, connected.
pub(super) struct Mesh {
    /// How those come back whose connection is cut; `None` where none can be.
    pub known: Option<Known>,
    /// By rank; none for this one.
    pub lines: Vec<Option<Line>>,
    /// Where datagrams go, by rank, and the socket that they leave from.
    pub datagrams: Option<(UdpSocket, Vec<Option<Place>>)>,
}

/// A stranger may not keep the others waiting for longer than this.
const STRANGER_S: u64 = 10;
/// Only rank 0 knows who is missing, and has this long to say so.
const TO_SAY_WHO: Duration = Duration::from_secs(5);
/// A rank whose program starts late is tried again after this.
const RETRY: Duration = Duration::from_millis(20);
/// Rings of all the connections of one rank together take at most about twice this.
const RINGS_OF_A_RANK_BYTES: u32 = 4 << 20;
/// With what the names of the sockets begin at which ranks of one machine find each other.
const NEARBY: &str = "rampool-rank-";

impl Mesh {
    /// Meets the other ranks. Blocks until all are connected, or an error, or the deadline.
    pub fn meet(config: &SharedConfig) -> Result<Self, JoinError> {
        let ranks = usize::from(config.ranks);
        let mut lines: Vec<Option<Line>> = std::iter::repeat_with(|| None).take(ranks).collect();
        if ranks == 1 {
            return Ok(Self { known: None, lines, datagrams: None });
        }
        let deadline = Instant::now() + config.join_deadline;
        let mut meeting =
            Meeting { config, deadline, hello: hello(config), socket: None, listener: None, places: Vec::new(), incarnations: Vec::new() };
        let addresses = if config.rank == 0 { meeting.receive_all(&mut lines)? } else { meeting.go_to_first(&mut lines)? };
        meeting.go_nearer(&mut lines)?;
        let datagrams = match meeting.socket.take() {
            None => None,
            Some(socket) => {
                let seals = meeting.exchange_keys(&mut lines)?;
                let place = |(address, seal): (Option<SocketAddr>, _)| address.map(|address| Place { address, seal });
                Some((socket, addresses.into_iter().zip(seals).map(place).collect()))
            }
        };
        Ok(Self { known: meeting.keep(&mut lines), lines, datagrams })
    }
}

fn hello(config: &SharedConfig) -> Hello {
    Hello {
        wire: SHARE_WIRE_VERSION,
        build: config.build.clone(),
        run: config.run.clone(),
        settings: config.common(),
        rank: Rank(config.rank),
        ranks: config.ranks,
        port: 0,
        datagram_port: 0,
        incarnation: u64::from_le_bytes(random_bytes()),
    }
}

struct Meeting<'a> {
    config: &'a SharedConfig,
    deadline: Instant,
    hello: Hello,
    socket: Option<UdpSocket>,
    /// Where this rank is found again, where the others are, and who they are, by rank.
    listener: Option<Listener>,
    places: Vec<Option<SocketAddr>>,
    incarnations: Vec<u64>,
}

/// Somebody who connected and said who it is.
struct Guest {
    line: Line,
    hello: Hello,
}

impl Meeting<'_> {
    fn policy(&self) -> LocalPolicy {
        LocalPolicy { key: self.config.key.clone(), encryption: self.config.encryption, features: features::RINGS, ucx: None }
    }

    /// The ranks have met: connections that can be cut are kept from now on. Nothing that was said before waits to be heard.
    fn keep(self, lines: &mut [Option<Line>]) -> Option<Known> {
        if self.config.reconnect.is_zero() {
            return None;
        }
        let mut sockets = lines.iter_mut().flatten().filter(|line| !line.is_shared_memory()).peekable();
        sockets.peek()?;
        sockets.for_each(Line::keep);
        let policy = LocalPolicy { features: 0, ..self.policy() };
        Some(Known { listener: self.listener?, hello: self.hello, policy, places: self.places, incarnations: self.incarnations })
    }

    /// Rank 0: waits for all others, then tells them where they are.
    fn receive_all(&mut self, lines: &mut [Option<Line>]) -> Result<Vec<Option<SocketAddr>>, JoinError> {
        let listener = self.rendezvous()?;
        // The rendezvous is for those who come for the first time, to this run or the next; who comes again does so here.
        let at = bound(&listener).map_or(Ipv4Addr::UNSPECIFIED.into(), |at| at.ip());
        let again = Endpoint::Tcp { host: at.to_string(), port: 0 };
        let again = Listener::bind(&again).map_err(|source| JoinError::Listen { address: again.to_string(), source })?;
        self.hello.port = bound(&again).map_or(0, |at| at.port());
        self.listener = Some(again);
        let everywhere = Ipv4Addr::UNSPECIFIED.into();
        self.open_datagrams(if at.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { everywhere })?;
        let mut hellos: Vec<Option<(Hello, IpAddr)>> = vec![None; lines.len()];
        while lines[1..].iter().any(Option::is_none) {
            let guest = match self.accept(&listener, || missing(lines)) {
                Ok(Some(guest)) => guest,
                Ok(None) => continue,
                Err(error) => {
                    for line in lines.iter_mut().flatten() {
                        self.refuse(line, &error.to_string());
                    }
                    return Err(error);
                }
            };
            let rank = usize::from(guest.hello.rank.0);
            let why = match guest.hello.compatible(&self.hello) {
                Ok(()) if lines[rank].is_some() => Some(format!("two processes say that they are {}", guest.hello.rank)),
                Ok(()) => None,
                Err(why) => Some(why),
            };
            if let Some(why) = why {
                for line in lines.iter_mut().flatten().chain([&mut { guest }.line]) {
                    self.refuse(line, &why);
                }
                return Err(JoinError::Refused { why });
            }
            let Peer::Tcp(peer) = *guest.line.peer() else { unreachable!("rank 0 listens on TCP") };
            hellos[rank] = Some((guest.hello, peer.ip().to_canonical()));
            lines[rank] = Some(guest.line);
        }
        let at = |port: fn(&Hello) -> u16| {
            let text = |entry: &Option<(Hello, IpAddr)>| entry.as_ref().map(|(hello, ip)| SocketAddr::new(*ip, port(hello)));
            hellos.iter().map(text).collect::<Vec<_>>()
        };
        let own = self.socket.as_ref().map_or(Ok(0), |socket| socket.local_addr().map(|at| at.port())).map_err(JoinError::Socket)?;
        let (addresses, mut datagrams) = (at(|hello| hello.port), at(|hello| hello.datagram_port));
        let incarnation = |entry: &Option<(Hello, IpAddr)>| entry.as_ref().map_or(self.hello.incarnation, |(hello, _)| hello.incarnation);
        self.incarnations = hellos.iter().map(incarnation).collect();
        let incarnations = self.incarnations.clone();
        let table = Control::Table { addresses: texts(&addresses, self.hello.port), datagrams: texts(&datagrams, own), incarnations };
        self.places = addresses;
        for (rank, line) in lines.iter_mut().enumerate().skip(1) {
            let line = line.as_mut().expect("all have come");
            line.queue_control(&table);
            self.sent(line, rank)?;
        }
        datagrams[0] = None;
        self.places[0] = None;
        Ok(datagrams)
    }

    /// Any other rank: connects to rank 0, then to those between, then waits for those above.
    fn go_to_first(&mut self, lines: &mut [Option<Line>]) -> Result<Vec<Option<SocketAddr>>, JoinError> {
        let endpoint = self.address()?;
        let stream = self.reach(&endpoint, 0)?;
        let here = local_address(&stream)?;
        let Peer::Tcp(first) = *stream.peer() else { return Err(JoinError::NotTcp { address: endpoint.to_string() }) };
        let above = Endpoint::Tcp { host: here.ip().to_string(), port: 0 };
        let listener = Listener::bind(&above).map_err(|source| JoinError::Listen { address: above.to_string(), source })?;
        let Endpoint::Tcp { port, .. } = *listener.endpoint() else { unreachable!("bound to TCP") };
        self.hello.port = port;
        self.hello.datagram_port = self.open_datagrams(here.ip())?;
        let mut line = self.introduce(stream, 0)?;
        let (addresses, datagrams) = match line.wait_control(self.deadline + TO_SAY_WHO).map_err(|error| self.trouble(0, error))? {
            Some(Control::Table { addresses, datagrams, incarnations })
                if [addresses.len(), datagrams.len(), incarnations.len()] == [lines.len(); 3] =>
            {
                self.incarnations = incarnations;
                (addresses, datagrams)
            }
            Some(Control::Refused { why }) => return Err(JoinError::Refused { why }),
            Some(_) => return Err(self.trouble(0, unexpected())),
            None => return Err(JoinError::Missing { ranks: "other ranks".into(), seconds: self.config.join_deadline.as_secs() }),
        };
        lines[0] = Some(line);
        for rank in 1..usize::from(self.config.rank) {
            let endpoint: Endpoint = addresses[rank].parse().map_err(|_| self.trouble(rank, unexpected()))?;
            let stream = self.reach(&endpoint, rank)?;
            let mut line = self.introduce(stream, rank)?;
            match self.next_control(&mut line, rank)? {
                Control::Welcome {} => lines[rank] = Some(line),
                _ => return Err(self.trouble(rank, unexpected())),
            }
        }
        while lines[usize::from(self.config.rank) + 1..].iter().any(Option::is_none) {
            let mut awaited = vec![false; lines.len()];
            for rank in usize::from(self.config.rank) + 1..lines.len() {
                awaited[rank] = lines[rank].is_none();
            }
            let names = || list(awaited.iter().enumerate().filter(|&(_, &is)| is).map(|(rank, _)| rank));
            let Some(mut guest) = self.accept(&listener, names)? else { continue };
            let rank = usize::from(guest.hello.rank.0);
            if let Err(why) = guest.hello.compatible(&self.hello) {
                self.refuse(&mut guest.line, &why);
                return Err(JoinError::Refused { why });
            }
            if !awaited[rank] {
                self.refuse(&mut guest.line, &format!("{} is here already", guest.hello.rank));
                continue;
            }
            guest.line.queue_control(&Control::Welcome {});
            self.sent(&mut guest.line, rank)?;
            lines[rank] = Some(guest.line);
        }
        self.listener = Some(listener);
        let places = |texts: &[String]| {
            let mut places: Vec<Option<SocketAddr>> = texts.iter().map(|text| text.parse().ok()).collect();
            // Rank 0 does not know by which of its addresses this rank reaches it.
            places[0] = places[0].map(|at| SocketAddr::new(first.ip(), at.port()));
            places
        };
        self.places = places(&addresses);
        let mut places = places(&datagrams);
        if self.socket.is_some() && places.iter().any(|place| place.is_none_or(|at| at.port() == 0)) {
            return Err(self.trouble(0, unexpected()));
        }
        places[usize::from(self.config.rank)] = None;
        Ok(places)
    }

    /// Ranks on one machine exchange their connections for shared memory.
    fn go_nearer(&self, lines: &mut [Option<Line>]) -> Result<(), JoinError> {
        let me = usize::from(self.config.rank);
        // Datagrams carry what matters where they are wanted.
        let wanted = self.config.same_host != SameHost::Socket && self.config.transport == Transport::Tcp;
        let name = format!("{NEARBY}{:032x}", u128::from_le_bytes(random_bytes()));
        // Where the kernel refuses the socket, a sandbox say, the ranks stay as they are.
        let listener = wanted.then(|| Listener::bind(&Endpoint::unix_name(&name)).ok()).flatten();
        let name = if listener.is_some() { name } else { String::new() };
        for (rank, line) in lines.iter_mut().enumerate().skip(me + 1) {
            let line = line.as_mut().expect("all have met");
            line.queue_control(&Control::Nearby { name: name.clone() });
            self.sent(line, rank)?;
        }
        for (rank, place) in lines.iter_mut().enumerate().take(me) {
            let line = place.as_mut().expect("all have met");
            let Control::Nearby { name } = self.next_control(line, rank)? else { return Err(self.trouble(rank, unexpected())) };
            let found = if wanted { self.reach_nearby(&name) } else { None };
            line.queue_control(&Control::Move { there: found.is_some() });
            self.sent(line, rank)?;
            if let Some(stream) = found {
                let near = self.introduce(stream, rank)?;
                if near.is_shared_memory() {
                    *place = Some(near);
                }
            }
        }
        let mut near: Vec<Option<Line>> = std::iter::repeat_with(|| None).take(lines.len()).collect();
        for rank in me + 1..lines.len() {
            let Control::Move { there } = self.next_control(lines[rank].as_mut().expect("all have met"), rank)? else {
                return Err(self.trouble(rank, unexpected()));
            };
            let Some(listener) = listener.as_ref().filter(|_| there) else { continue };
            while near[rank].is_none() {
                let Some(mut guest) = self.accept(listener, || Rank(number(rank)).to_string())? else { continue };
                let who = usize::from(guest.hello.rank.0);
                if guest.hello.compatible(&self.hello).is_err() || who <= me || near[who].is_some() {
                    self.refuse(&mut guest.line, "it is not awaited here");
                    continue;
                }
                near[who] = Some(guest.line);
            }
        }
        for (place, near) in lines.iter_mut().zip(near) {
            if let Some(near) = near.filter(Line::is_shared_memory) {
                *place = Some(near);
            }
        }
        let socket = lines.iter().position(|line| line.as_ref().is_some_and(|line| line.is_local() && !line.is_shared_memory()));
        match socket.filter(|_| self.config.same_host == SameHost::Rings) {
            Some(rank) => Err(JoinError::NoSharedMemory { rank: Rank(number(rank)) }),
            None => Ok(()),
        }
    }

    /// A connection to the rank that has this name on this machine, if there is one, and it is the same user's.
    fn reach_nearby(&self, name: &str) -> Option<Stream> {
        let is_a_name = |name: &str| name.len() < 64 && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        name.strip_prefix(NEARBY).filter(|rest| is_a_name(rest))?;
        let endpoint = Endpoint::unix_name(name);
        loop {
            match Stream::connect(&endpoint, self.deadline) {
                Ok(stream) => return Some(stream).filter(|stream| !is_another_user(stream.peer())),
                // Many knock at once.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && Instant::now() + RETRY < self.deadline => {
                    std::thread::sleep(RETRY);
                }
                Err(_) => return None,
            }
        }
    }

    /// What the rank says next.
    fn next_control(&self, line: &mut Line, rank: usize) -> Result<Control, JoinError> {
        let missing = || JoinError::Missing { ranks: Rank(number(rank)).to_string(), seconds: self.config.join_deadline.as_secs() };
        match line.wait_control(self.deadline).map_err(|error| self.trouble(rank, error))?.ok_or_else(missing)? {
            Control::Refused { why } => Err(JoinError::Refused { why }),
            control => Ok(control),
        }
    }

    /// Gives each rank with a sealed connection a key for this one's datagrams, and takes its.
    fn exchange_keys(&self, lines: &mut [Option<Line>]) -> Result<Vec<Option<DatagramSeal>>, JoinError> {
        let mut ours = Vec::with_capacity(lines.len());
        for (rank, line) in lines.iter_mut().enumerate() {
            let key = line.as_mut().filter(|line| line.is_sealed()).map(|line| {
                let key: [u8; DATAGRAM_KEY_BYTES] = random_bytes();
                line.queue_control(&Control::DatagramKey { key: key.to_vec() });
                self.sent(line, rank).map(|()| key)
            });
            ours.push(key.transpose()?);
        }
        let mut seals = Vec::with_capacity(lines.len());
        for (rank, (line, ours)) in lines.iter_mut().zip(ours).enumerate() {
            let (Some(line), Some(ours)) = (line, ours) else {
                seals.push(None);
                continue;
            };
            let theirs = match self.next_control(line, rank)? {
                Control::DatagramKey { key } => <[u8; DATAGRAM_KEY_BYTES]>::try_from(key).map_err(|_| self.trouble(rank, unexpected()))?,
                _ => return Err(self.trouble(rank, unexpected())),
            };
            seals.push(Some(DatagramSeal::new(&ours, &theirs)));
        }
        Ok(seals)
    }

    /// Where the ranks meet.
    fn address(&self) -> Result<Endpoint, JoinError> {
        match self.config.rendezvous.parse() {
            Ok(Endpoint::Ucx { .. }) => Err(JoinError::NotTcp { address: self.config.rendezvous.clone() }),
            Ok(endpoint) => Ok(endpoint),
            Err(error) => Err(JoinError::Address(Box::new(error))),
        }
    }

    /// The socket that rank 0 was given, or one at the rendezvous.
    fn rendezvous(&self) -> Result<Listener, JoinError> {
        let address = &self.config.rendezvous;
        if let Some(listener) = inherited(address) {
            return Ok(listener);
        }
        let endpoint = self.address()?;
        Listener::bind(&endpoint).map_err(|source| JoinError::Listen { address: address.clone(), source })
    }

    fn open_datagrams(&mut self, at: IpAddr) -> Result<u16, JoinError> {
        if self.config.transport != Transport::Udp {
            return Ok(0);
        }
        let socket = UdpSocket::bind((at, 0)).map_err(JoinError::Socket)?;
        socket.set_nonblocking(true).map_err(JoinError::Socket)?;
        let sock = socket2::SockRef::from(&socket);
        // Best effort: the kernel caps it, and what does not fit is sent again.
        let _ = sock.set_recv_buffer_size(4 << 20);
        let _ = sock.set_send_buffer_size(4 << 20);
        let port = socket.local_addr().map_err(JoinError::Socket)?.port();
        self.socket = Some(socket);
        Ok(port)
    }

    /// Connects, again and again until somebody listens there.
    fn reach(&self, endpoint: &Endpoint, rank: usize) -> Result<Stream, JoinError> {
        loop {
            match Stream::connect(endpoint, self.deadline) {
                Ok(stream) => return Ok(stream),
                Err(source) if Instant::now() + RETRY >= self.deadline => {
                    return Err(JoinError::Unreachable { rank: Rank(number(rank)), address: endpoint.to_string(), source });
                }
                Err(error) if lacks_descriptors(&error) => return Err(JoinError::Socket(error)),
                // Not started yet, or its name is not known yet. Nothing tells when that changes.
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }

    /// As the side that connected: shakes hands, then says who this is.
    fn introduce(&self, stream: Stream, rank: usize) -> Result<Line, JoinError> {
        let handshake = Handshake::client(stream, self.policy());
        let mut line = shake(handshake, self.deadline).map_err(|source| JoinError::Handshake { rank: Rank(number(rank)), source })?;
        line.queue_control(&Control::Hello { hello: self.hello.clone() });
        self.sent(&mut line, rank)?;
        Ok(line)
    }

    /// Waits for somebody who knows the run. `None`: somebody came and was sent away.
    fn accept(&self, listener: &Listener, missing: impl Fn() -> String) -> Result<Option<Guest>, JoinError> {
        let stream = loop {
            match listener.accept() {
                Ok(Some(stream)) => break stream,
                // Whoever came waits at the door for as long as there is no descriptor for it.
                Err(error) if lacks_descriptors(&error) => return Err(JoinError::Socket(error)),
                // Somebody came and went again.
                Ok(None) | Err(_) => {}
            }
            if !readable(listener, self.deadline) {
                return Err(JoinError::Missing { ranks: missing(), seconds: self.config.join_deadline.as_secs() });
            }
        };
        let deadline = self.deadline.min(Instant::now() + Duration::from_secs(STRANGER_S));
        let from = stream.peer().to_string();
        if is_another_user(stream.peer()) {
            // At once: ranks of this run look first whose socket it is.
            tracing::warn!("another user at {from} was sent away");
            return Ok(None);
        }
        let handshake = Handshake::server(stream, self.policy(), None).with_rings_of(ring_bytes(self.config.ranks));
        let mut line = match shake(handshake, deadline) {
            Ok(line) => line,
            Err(error) => {
                tracing::warn!("somebody at {from} was sent away: {error}");
                return Ok(None);
            }
        };
        match line.wait_control(deadline) {
            Ok(Some(Control::Hello { hello })) if hello.run == self.hello.run => Ok(Some(Guest { line, hello })),
            Ok(Some(Control::Hello { .. })) => {
                self.refuse(&mut line, "it belongs to another run");
                tracing::warn!("a process of another run at {from} was sent away");
                Ok(None)
            }
            other => {
                tracing::warn!("somebody at {from} was sent away: {other:?}");
                Ok(None)
            }
        }
    }

    fn refuse(&self, line: &mut Line, why: &str) {
        line.queue_control(&Control::Refused { why: why.to_owned() });
        if let Err(error) = line.flush_until(Instant::now() + Duration::from_secs(1)) {
            tracing::debug!("the refusal could not be sent: {error}");
        }
    }

    fn sent(&self, line: &mut Line, rank: usize) -> Result<(), JoinError> {
        match line.flush_until(self.deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(JoinError::Missing { ranks: Rank(number(rank)).to_string(), seconds: self.config.join_deadline.as_secs() }),
            Err(error) => Err(self.trouble(rank, error)),
        }
    }

    fn trouble(&self, rank: usize, source: LineError) -> JoinError {
        JoinError::Line { rank: Rank(number(rank)), source }
    }
}

fn unexpected() -> LineError {
    rampool_proto::share::Malformed { what: "it answers what was not asked", at: 0 }.into()
}

fn number(rank: usize) -> u16 {
    u16::try_from(rank).expect("there are at most 65535 ranks")
}

fn missing(lines: &[Option<Line>]) -> String {
    list(lines.iter().enumerate().skip(1).filter(|(_, line)| line.is_none()).map(|(rank, _)| rank))
}

fn list(ranks: impl Iterator<Item = usize>) -> String {
    let names: Vec<String> = ranks.map(|rank| format!("rank {rank}")).collect();
    names.join(", ")
}

fn texts(addresses: &[Option<SocketAddr>], own_port: u16) -> Vec<String> {
    let own = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), own_port);
    addresses.iter().map(|address| address.unwrap_or(own).to_string()).collect()
}

fn local_address(stream: &Stream) -> Result<SocketAddr, JoinError> {
    let name = rustix::net::getsockname(stream.as_fd()).map_err(|error| JoinError::Socket(error.into()))?;
    let name: SocketAddr = name.try_into().map_err(|_| JoinError::Socket(std::io::ErrorKind::AddrNotAvailable.into()))?;
    Ok(SocketAddr::new(name.ip().to_canonical(), name.port()))
}

fn bound(listener: &Listener) -> Option<SocketAddr> {
    rustix::net::getsockname(listener.as_fd()).ok().and_then(|name| SocketAddr::try_from(name).ok())
}

/// The listening socket that the launcher passed on, if it is the one at `address`.
fn inherited(address: &str) -> Option<Listener> {
    let fd: i32 = std::env::var(variable::RENDEZVOUS_FD).ok()?.parse().ok().filter(|&fd| fd > 2)?;
    // SAFETY: the descriptor may be any, or none: it is only looked at, and copied.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let socket = socket2::SockRef::from(&fd);
    if !socket.is_listener().ok()? || socket.local_addr().ok()?.as_socket()?.to_string() != address {
        return None;
    }
    // SAFETY: it is the socket that the launcher made for this process, and nobody else here knows of it.
    let owned = unsafe { OwnedFd::from_raw_fd(fd.as_raw_fd()) };
    Listener::adopt(owned.into()).ok()
}

/// Over a Unix socket: the two could not open each other's memory as a file either.
pub(super) fn is_another_user(peer: &Peer) -> bool {
    matches!(peer, Peer::Unix { uid, .. } if *uid != rustix::process::geteuid().as_raw())
}

/// The more ranks there may be on this machine, the shorter the rings between two of them.
fn ring_bytes(ranks: u16) -> u32 {
    let share = RINGS_OF_A_RANK_BYTES / u32::from(ranks.max(1)).next_power_of_two();
    share.clamp(MIN_RING_BYTES, RING_BYTES)
}

/// That the process, or the machine, has no more of them does not end by waiting.
fn lacks_descriptors(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

pub(super) fn readable(listener: &Listener, deadline: Instant) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return false;
    }
    let timeout = Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(left.subsec_nanos()) };
    let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&timeout));
    true
}

pub(super) fn shake(mut handshake: Handshake, deadline: Instant) -> Result<Line, HandshakeError> {
    loop {
        if let Some(link) = handshake.advance::<()>()? {
            let (carrier, seal) = link.into_parts();
            return Ok(Line::new(carrier, seal));
        }
        if !handshake.wait(handshake.wants() == Wants::Write, deadline)? {
            return Err(HandshakeError::TimedOut);
        }
    }
}
