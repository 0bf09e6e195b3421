//! How ranks meet: rank 0 listens at the rendezvous, learns where the others listen, and tells all. Then each
//! connects to the ranks below it.
//!
//! ```text
//!   rank 0   <-- Hello --   every other rank, which listens somewhere by then
//!   rank 0   --- Table -->  all of them
//!   rank i   -- Hello -->   rank j, for 0 < j < i, which answers Welcome
//!   rank j   -- Nearby -->  rank i, for j < i: the name of a Unix socket on j's machine
//!   rank i   --- Move -->   rank j: whether it found the socket
//! ```
//! A socket's name is known to one machine only (to one network namespace of it), so a rank that finds it
//! there is near. The two repeat the handshake over that socket, get memory to share
//! ([`rampool_net::transport`]), and drop their TCP connection.
//!
//! Each connection begins with the handshake of [`rampool_net::transport`], in which both ends prove the
//! run's key ([`RunKey`]); traffic that leaves the machine is sealed. A peer with another run's name, another
//! version or other settings is refused, with both named. Handshakes run concurrently, and their number is
//! bounded: a peer that has not proved the key keeps no rank waiting.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rampool_sharing::Rank;
use rampool_sharing::control::{Control, Hello, SHARE_WIRE_VERSION};
use rampool_wire::rings::MIN_RING_BYTES;
use rampool_wire::session::features;

use super::config::{SharedConfig, Transport};
use super::datagrams::DatagramPeer;
use super::environment::variable;
use super::error::JoinError;
use super::line::{Incoming, Line, LineError, Stay};
use super::relink::Known;
use rampool_net::key::{KEY_BYTES, Key, random_bytes};
use rampool_net::transport::{
    DATAGRAM_KEY_BYTES, DatagramSeal, Endpoint, Handshake, HandshakeError, Listener, LocalPolicy, Peer,
    RING_BYTES, SameHost, Stream, Wants,
};

/// All ranks, connected.
pub(super) struct Mesh {
    /// State for reconnecting; `None` if no connection may be cut.
    pub known: Option<Known>,
    /// By rank; `None` for this one.
    pub lines: Vec<Option<Line>>,
    /// The address for each rank's datagrams, by rank, and the socket that sends them.
    pub datagrams: Option<(UdpSocket, Vec<Option<DatagramPeer>>)>,
}

/// The time for a peer to prove the key and to introduce itself.
const TO_SAY_ITSELF: Duration = Duration::from_secs(10);
/// Handshakes under way at a time, in addition to one for each rank; the oldest makes room.
const MOST_UNAUTHENTICATED: usize = 64;
/// Connections that are accepted before those under way continue.
const MOST_ACCEPTED: usize = 64;
/// Only rank 0 knows which ranks are missing, and has this long to report it.
const TO_SAY_WHO: Duration = Duration::from_secs(5);
/// A rank that does not listen yet is tried again after this.
const RETRY: Duration = Duration::from_millis(20);
/// The rings of all connections of one rank together take at most about twice this.
const RINGS_OF_A_RANK_BYTES: u32 = 4 << 20;
/// The prefix of the names of sockets at which ranks of one machine find each other.
const NEARBY: &str = "rampool-rank-";
/// The prefix of sockets at which rank 0 hands out the run's key; the address of the rendezvous follows.
const KEY_AT: &str = "rampool-key-";

impl Mesh {
    /// Meets the other ranks. Blocks until all are connected, or an error, or the deadline.
    pub fn meet(config: &SharedConfig) -> Result<Self, JoinError> {
        let ranks = usize::from(config.ranks);
        let mut lines: Vec<Option<Line>> = std::iter::repeat_with(|| None).take(ranks).collect();
        if ranks == 1 {
            return Ok(Self { known: None, lines, datagrams: None });
        }
        let deadline = Instant::now() + config.join_deadline;
        let RunKey { key, hands_out } = RunKey::find(config, deadline)?;
        let (hello, places, incarnations) = (hello(config), Vec::new(), Vec::new());
        let mut meeting = Meeting {
            config,
            deadline,
            key,
            hands_out,
            hello,
            socket: None,
            listener: None,
            places,
            incarnations,
        };
        let addresses = if config.rank == 0 {
            meeting.receive_all(&mut lines)?
        } else {
            meeting.go_to_first(&mut lines)?
        };
        meeting.go_nearer(&mut lines)?;
        let datagrams = match meeting.socket.take() {
            None => None,
            Some(socket) => {
                let seals = meeting.exchange_keys(&mut lines)?;
                let place = |(address, seal): (Option<SocketAddr>, _)| {
                    address.map(|address| DatagramPeer { address, seal })
                };
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

/// The key by which the ranks of a run recognise each other.
struct RunKey {
    key: Key,
    /// Rank 0: the socket at which it gives the key to others.
    hands_out: Option<Listener>,
}

impl RunKey {
    /// The key that the launcher made, or that of the key file. Where there is neither, and the ranks meet on
    /// this machine, rank 0 makes one, and gives it over a Unix socket to processes of its own user; those
    /// check the socket's owner. Blocks until rank 0 is there, or the deadline.
    fn find(config: &SharedConfig, deadline: Instant) -> Result<Self, JoinError> {
        if let Some(key) = config.run_key.as_ref().or(config.key.as_ref()) {
            return Ok(Self { key: key.clone(), hands_out: None });
        }
        let address = || config.rendezvous.clone();
        let endpoint: Endpoint =
            config.rendezvous.parse().map_err(|error| JoinError::Address(Box::new(error)))?;
        let Endpoint::Tcp { .. } = &endpoint else { return Err(JoinError::NotTcp { address: address() }) };
        let here = endpoint.on_this_machine().map_err(|source| JoinError::Unreachable {
            rank: Rank(0),
            address: address(),
            source,
        })?;
        let Some(here) = here else { return Err(JoinError::NoKey { address: address() }) };
        let socket = Endpoint::unix_name(&format!("{KEY_AT}{here}"));
        if config.rank == 0 {
            let listener =
                Listener::bind(&socket).map_err(|source| JoinError::Listen { address: address(), source })?;
            return Ok(Self { key: Key::generate(), hands_out: Some(listener) });
        }
        loop {
            let source = match Stream::connect(&socket, deadline) {
                Ok(stream) => {
                    if let (Peer::Unix { uid, .. }, true) = (stream.peer(), is_another_user(stream.peer())) {
                        return Err(JoinError::AnotherUser { address: address(), uid: *uid });
                    }
                    match take_key(&stream, deadline) {
                        Ok(key) => return Ok(Self { key, hands_out: None }),
                        Err(error) => error,
                    }
                }
                Err(error) if lacks_descriptors(&error) => return Err(JoinError::Socket(error)),
                Err(error) => error,
            };
            // Not started yet. Nothing signals when that changes.
            if Instant::now() + RETRY >= deadline {
                return Err(JoinError::Unreachable { rank: Rank(0), address: address(), source });
            }
            std::thread::sleep(RETRY);
        }
    }
}

fn take_key(stream: &Stream, deadline: Instant) -> std::io::Result<Key> {
    let (mut bytes, mut have) = ([0; KEY_BYTES], 0);
    while have < KEY_BYTES {
        match stream.receive_into(&mut bytes[have..])? {
            Some(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Some(came) => have += came,
            None if stream.wait(false, deadline)? => {}
            None => return Err(std::io::ErrorKind::TimedOut.into()),
        }
    }
    Ok(Key::from_bytes(bytes))
}

struct Meeting<'a> {
    config: &'a SharedConfig,
    deadline: Instant,
    key: Key,
    hands_out: Option<Listener>,
    hello: Hello,
    socket: Option<UdpSocket>,
    /// Where this rank listens for reconnections, where the others do, and their incarnations, by rank.
    listener: Option<Listener>,
    places: Vec<Option<SocketAddr>>,
    incarnations: Vec<u64>,
}

/// A peer that connected and introduced itself.
struct Joining {
    line: Line,
    hello: Hello,
}

impl Meeting<'_> {
    fn policy(&self) -> LocalPolicy {
        LocalPolicy {
            key: Some(self.key.clone()),
            encryption: self.config.encryption,
            features: features::RINGS,
            ucx: None,
        }
    }

    /// The ranks have met: connections that may be cut are kept from now on. No earlier message is still
    /// unread.
    fn keep(self, lines: &mut [Option<Line>]) -> Option<Known> {
        if self.config.reconnect.is_zero() {
            return None;
        }
        let mut sockets = lines.iter_mut().flatten().filter(|line| !line.is_shared_memory()).peekable();
        sockets.peek()?;
        sockets.for_each(Line::keep);
        let policy = LocalPolicy { features: 0, ..self.policy() };
        Some(Known {
            listener: self.listener?,
            hello: self.hello,
            policy,
            places: self.places,
            incarnations: self.incarnations,
        })
    }

    /// Rank 0: waits for all others, then tells them where they are.
    fn receive_all(&mut self, lines: &mut [Option<Line>]) -> Result<Vec<Option<SocketAddr>>, JoinError> {
        let listener = self.rendezvous()?;
        // The rendezvous is for ranks that join, this run or the next; ranks that reconnect do so here.
        let at = bound(&listener).map_or(Ipv4Addr::UNSPECIFIED.into(), |at| at.ip());
        let again = Endpoint::Tcp { host: at.to_string(), port: 0 };
        let again = Listener::bind(&again)
            .map_err(|source| JoinError::Listen { address: again.to_string(), source })?;
        self.hello.port = bound(&again).map_or(0, |at| at.port());
        self.listener = Some(again);
        let everywhere = Ipv4Addr::UNSPECIFIED.into();
        self.open_datagrams(if at.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { everywhere })?;
        let mut hellos: Vec<Option<(Hello, IpAddr)>> = vec![None; lines.len()];
        let mut arrivals = Arrivals::at(&listener, self.hands_out.as_ref());
        while lines[1..].iter().any(Option::is_none) {
            let joining = match self.accept(&mut arrivals, || missing(lines)) {
                Ok(joining) => joining,
                Err(error) => {
                    for line in lines.iter_mut().flatten() {
                        self.refuse(line, &error.to_string());
                    }
                    return Err(error);
                }
            };
            let rank = usize::from(joining.hello.rank.0);
            let why = match joining.hello.compatible(&self.hello) {
                Ok(()) if lines[rank].is_some() => {
                    Some(format!("two processes say that they are {}", joining.hello.rank))
                }
                Ok(()) => None,
                Err(why) => Some(why),
            };
            if let Some(why) = why {
                for line in lines.iter_mut().flatten().chain([&mut { joining }.line]) {
                    self.refuse(line, &why);
                }
                return Err(JoinError::Refused { why });
            }
            let Peer::Tcp(peer) = *joining.line.peer() else { unreachable!("rank 0 listens on TCP") };
            hellos[rank] = Some((joining.hello, peer.ip().to_canonical()));
            lines[rank] = Some(joining.line);
        }
        let at = |port: fn(&Hello) -> u16| {
            let text = |entry: &Option<(Hello, IpAddr)>| {
                entry.as_ref().map(|(hello, ip)| SocketAddr::new(*ip, port(hello)))
            };
            hellos.iter().map(text).collect::<Vec<_>>()
        };
        let own = self
            .socket
            .as_ref()
            .map_or(Ok(0), |socket| socket.local_addr().map(|at| at.port()))
            .map_err(JoinError::Socket)?;
        let (addresses, mut datagrams) = (at(|hello| hello.port), at(|hello| hello.datagram_port));
        let incarnation = |entry: &Option<(Hello, IpAddr)>| {
            entry.as_ref().map_or(self.hello.incarnation, |(hello, _)| hello.incarnation)
        };
        self.incarnations = hellos.iter().map(incarnation).collect();
        let incarnations = self.incarnations.clone();
        let table = Control::Table {
            addresses: texts(&addresses, self.hello.port),
            datagrams: texts(&datagrams, own),
            incarnations,
        };
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
        let (mut line, here) = self.reach(&endpoint, 0)?;
        let Peer::Tcp(first) = *line.peer() else {
            return Err(JoinError::NotTcp { address: endpoint.to_string() });
        };
        let above = Endpoint::Tcp { host: here.ip().to_string(), port: 0 };
        let listener = Listener::bind(&above)
            .map_err(|source| JoinError::Listen { address: above.to_string(), source })?;
        let Endpoint::Tcp { port, .. } = *listener.endpoint() else { unreachable!("bound to TCP") };
        self.hello.port = port;
        self.hello.datagram_port = self.open_datagrams(here.ip())?;
        self.introduce(&mut line, 0)?;
        let (addresses, datagrams) =
            match line.wait_control(self.deadline + TO_SAY_WHO).map_err(|error| self.trouble(0, error))? {
                Some(Control::Table { addresses, datagrams, incarnations })
                    if [addresses.len(), datagrams.len(), incarnations.len()] == [lines.len(); 3] =>
                {
                    self.incarnations = incarnations;
                    (addresses, datagrams)
                }
                Some(Control::Refused { why }) => return Err(JoinError::Refused { why }),
                Some(_) => return Err(self.trouble(0, unexpected())),
                None => {
                    return Err(JoinError::Missing {
                        ranks: "other ranks".into(),
                        seconds: self.config.join_deadline.as_secs(),
                    });
                }
            };
        lines[0] = Some(line);
        for rank in 1..usize::from(self.config.rank) {
            let endpoint: Endpoint = addresses[rank].parse().map_err(|_| self.trouble(rank, unexpected()))?;
            let (mut line, _) = self.reach(&endpoint, rank)?;
            self.introduce(&mut line, rank)?;
            match self.next_control(&mut line, rank)? {
                Control::Welcome {} => lines[rank] = Some(line),
                _ => return Err(self.trouble(rank, unexpected())),
            }
        }
        let mut arrivals = Arrivals::at(&listener, None);
        while lines[usize::from(self.config.rank) + 1..].iter().any(Option::is_none) {
            let mut awaited = vec![false; lines.len()];
            for rank in usize::from(self.config.rank) + 1..lines.len() {
                awaited[rank] = lines[rank].is_none();
            }
            let names = || list(awaited.iter().enumerate().filter(|&(_, &is)| is).map(|(rank, _)| rank));
            let mut joining = self.accept(&mut arrivals, names)?;
            let rank = usize::from(joining.hello.rank.0);
            if let Err(why) = joining.hello.compatible(&self.hello) {
                self.refuse(&mut joining.line, &why);
                return Err(JoinError::Refused { why });
            }
            if !awaited[rank] {
                self.refuse(&mut joining.line, &format!("{} is here already", joining.hello.rank));
                continue;
            }
            joining.line.queue_control(&Control::Welcome {});
            self.sent(&mut joining.line, rank)?;
            lines[rank] = Some(joining.line);
        }
        self.listener = Some(listener);
        let places = |texts: &[String]| {
            let mut places: Vec<Option<SocketAddr>> = texts.iter().map(|text| text.parse().ok()).collect();
            // Rank 0 does not know at which of its addresses this rank reaches it.
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

    /// Ranks on one machine replace their connections by shared memory.
    fn go_nearer(&self, lines: &mut [Option<Line>]) -> Result<(), JoinError> {
        let me = usize::from(self.config.rank);
        // With datagrams, they carry most messages.
        let wanted = self.config.same_host != SameHost::Socket && self.config.transport == Transport::Tcp;
        let name = format!("{NEARBY}{:032x}", u128::from_le_bytes(random_bytes()));
        // If the kernel refuses the socket, in a sandbox for example, the ranks keep TCP.
        let listener = wanted.then(|| Listener::bind(&Endpoint::unix_name(&name)).ok()).flatten();
        let name = if listener.is_some() { name } else { String::new() };
        for (rank, line) in lines.iter_mut().enumerate().skip(me + 1) {
            let line = line.as_mut().expect("all have met");
            line.queue_control(&Control::Nearby { name: name.clone() });
            self.sent(line, rank)?;
        }
        for (rank, place) in lines.iter_mut().enumerate().take(me) {
            let line = place.as_mut().expect("all have met");
            let Control::Nearby { name } = self.next_control(line, rank)? else {
                return Err(self.trouble(rank, unexpected()));
            };
            let found = if wanted { self.reach_nearby(&name) } else { None };
            line.queue_control(&Control::Move { there: found.is_some() });
            self.sent(line, rank)?;
            if let Some(stream) = found {
                let handshake = Handshake::client(stream, self.policy());
                let shaken = shake(handshake, self.deadline);
                let mut near =
                    shaken.map_err(|source| JoinError::Handshake { rank: Rank(number(rank)), source })?;
                self.introduce(&mut near, rank)?;
                if near.is_shared_memory() {
                    *place = Some(near);
                }
            }
        }
        let mut near: Vec<Option<Line>> = std::iter::repeat_with(|| None).take(lines.len()).collect();
        let mut arrivals = listener.as_ref().map(|listener| Arrivals::at(listener, None));
        for rank in me + 1..lines.len() {
            let Control::Move { there } =
                self.next_control(lines[rank].as_mut().expect("all have met"), rank)?
            else {
                return Err(self.trouble(rank, unexpected()));
            };
            let Some(arrivals) = arrivals.as_mut().filter(|_| there) else { continue };
            while near[rank].is_none() {
                let mut joining = self.accept(arrivals, || Rank(number(rank)).to_string())?;
                let who = usize::from(joining.hello.rank.0);
                if joining.hello.compatible(&self.hello).is_err() || who <= me || near[who].is_some() {
                    self.refuse(&mut joining.line, "it is not awaited here");
                    continue;
                }
                near[who] = Some(joining.line);
            }
        }
        for (place, near) in lines.iter_mut().zip(near) {
            if let Some(near) = near.filter(Line::is_shared_memory) {
                *place = Some(near);
            }
        }
        let socket = lines
            .iter()
            .position(|line| line.as_ref().is_some_and(|line| line.is_local() && !line.is_shared_memory()));
        match socket.filter(|_| self.config.same_host == SameHost::Rings) {
            Some(rank) => Err(JoinError::NoSharedMemory { rank: Rank(number(rank)) }),
            None => Ok(()),
        }
    }

    /// A connection to the rank that has this name on this machine, if there is one and its user is the same.
    fn reach_nearby(&self, name: &str) -> Option<Stream> {
        let is_a_name = |name: &str| name.len() < 64 && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        name.strip_prefix(NEARBY).filter(|rest| is_a_name(rest))?;
        let endpoint = Endpoint::unix_name(name);
        loop {
            match Stream::connect(&endpoint, self.deadline) {
                Ok(stream) => return Some(stream).filter(|stream| !is_another_user(stream.peer())),
                // Many connect at once.
                Err(error)
                    if error.kind() == std::io::ErrorKind::WouldBlock
                        && Instant::now() + RETRY < self.deadline =>
                {
                    std::thread::sleep(RETRY);
                }
                Err(_) => return None,
            }
        }
    }

    /// The rank's next message.
    fn next_control(&self, line: &mut Line, rank: usize) -> Result<Control, JoinError> {
        let missing = || JoinError::Missing {
            ranks: Rank(number(rank)).to_string(),
            seconds: self.config.join_deadline.as_secs(),
        };
        match line
            .wait_control(self.deadline)
            .map_err(|error| self.trouble(rank, error))?
            .ok_or_else(missing)?
        {
            Control::Refused { why } => Err(JoinError::Refused { why }),
            control => Ok(control),
        }
    }

    /// Gives each rank with a sealed connection a key for this one's datagrams, and takes its key.
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
                Control::DatagramKey { key } => {
                    <[u8; DATAGRAM_KEY_BYTES]>::try_from(key).map_err(|_| self.trouble(rank, unexpected()))?
                }
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

    /// The listener that rank 0 was given, or a new one at the rendezvous.
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
        // Best effort: the kernel caps it, and datagrams that do not fit are sent again.
        let _ = sock.set_recv_buffer_size(4 << 20);
        let _ = sock.set_send_buffer_size(4 << 20);
        let port = socket.local_addr().map_err(JoinError::Socket)?.port();
        self.socket = Some(socket);
        Ok(port)
    }

    /// Connects and proves the key, again and again until the rank listens there and accepts. Also returns
    /// the local address used.
    fn reach(&self, endpoint: &Endpoint, rank: usize) -> Result<(Line, SocketAddr), JoinError> {
        loop {
            match Stream::connect(endpoint, self.deadline) {
                Ok(stream) => {
                    let here = local_address(&stream)?;
                    match shake(Handshake::client(stream, self.policy()), self.deadline) {
                        Ok(line) => return Ok((line, here)),
                        // It had to make room for others, which may not be ranks.
                        Err(error) if error.may_pass() && Instant::now() + RETRY < self.deadline => {}
                        Err(source) => return Err(JoinError::Handshake { rank: Rank(number(rank)), source }),
                    }
                }
                Err(source) if Instant::now() + RETRY >= self.deadline => {
                    return Err(JoinError::Unreachable {
                        rank: Rank(number(rank)),
                        address: endpoint.to_string(),
                        source,
                    });
                }
                Err(error) if lacks_descriptors(&error) => return Err(JoinError::Socket(error)),
                // Not started yet, or its name is not known yet. Nothing signals when that changes.
                Err(_) => {}
            }
            std::thread::sleep(RETRY);
        }
    }

    /// The connecting side introduces itself.
    fn introduce(&self, line: &mut Line, rank: usize) -> Result<(), JoinError> {
        line.queue_control(&Control::Hello { hello: self.hello.clone() });
        self.sent(line, rank)
    }

    /// Waits for a process that has proved the key and belongs to the run.
    fn accept(
        &self,
        arrivals: &mut Arrivals<'_>,
        missing: impl Fn() -> String,
    ) -> Result<Joining, JoinError> {
        loop {
            if let Some(joining) = arrivals.go_on(self) {
                return Ok(joining);
            }
            if Instant::now() >= self.deadline {
                return Err(JoinError::Missing {
                    ranks: missing(),
                    seconds: self.config.join_deadline.as_secs(),
                });
            }
            arrivals.take_in(self).map_err(JoinError::Socket)?;
            arrivals.sleep(self.deadline);
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
            Ok(false) => Err(JoinError::Missing {
                ranks: Rank(number(rank)).to_string(),
                seconds: self.config.join_deadline.as_secs(),
            }),
            Err(error) => Err(self.trouble(rank, error)),
        }
    }

    fn trouble(&self, rank: usize, source: LineError) -> JoinError {
        JoinError::Line { rank: Rank(number(rank)), source }
    }
}

/// Peers that have connected to a listener and have not introduced themselves yet.
struct Arrivals<'a> {
    listener: &'a Listener,
    hands_out: Option<&'a Listener>,
    waiting: Vec<Arrival>,
}

struct Arrival {
    step: Step,
    from: String,
    until: Instant,
}

enum Step {
    /// It has not proved the key.
    Shaking(Box<Handshake>),
    Talking(Box<Line>),
}

/// The outcome for one of them.
enum Became {
    Waits(Step),
    Joining(Box<Joining>),
    /// It was rejected.
    Gone,
}

impl<'a> Arrivals<'a> {
    fn at(listener: &'a Listener, hands_out: Option<&'a Listener>) -> Self {
        Self { listener, hands_out, waiting: Vec::new() }
    }

    /// Advances each as far as that does not block, until one has introduced itself. Peers that take too long
    /// are rejected.
    fn go_on(&mut self, meeting: &Meeting<'_>) -> Option<Joining> {
        let now = Instant::now();
        for at in (0..self.waiting.len()).rev() {
            let Arrival { step, from, until } = self.waiting.swap_remove(at);
            match step.advance(meeting, &from) {
                Became::Joining(joining) => return Some(*joining),
                Became::Waits(step) if now < until => self.waiting.push(Arrival { step, from, until }),
                Became::Waits(_) => {
                    tracing::warn!("a process at {from} was rejected: it did not introduce itself in time")
                }
                Became::Gone => {}
            }
        }
        None
    }

    /// Accepts new connections, and gives the key to those that ask for it.
    fn take_in(&mut self, meeting: &Meeting<'_>) -> std::io::Result<()> {
        for _ in 0..MOST_ACCEPTED {
            let Some(stream) = next_of(self.listener)? else { break };
            let from = stream.peer().to_string();
            if is_another_user(stream.peer()) {
                // At once: ranks of this run check the socket's owner first.
                tracing::warn!("another user at {from} was rejected");
                continue;
            }
            let handshake = Handshake::server(stream, meeting.policy(), None)
                .with_rings_of(ring_bytes(meeting.config.ranks));
            let step = Step::Shaking(Box::new(handshake));
            self.waiting.push(Arrival { step, from, until: Instant::now() + TO_SAY_ITSELF });
            self.make_room(MOST_UNAUTHENTICATED + usize::from(meeting.config.ranks));
        }
        let Some(listener) = self.hands_out else { return Ok(()) };
        for _ in 0..MOST_ACCEPTED {
            let Some(stream) = next_of(listener)? else { break };
            if is_another_user(stream.peer()) {
                tracing::warn!("another user at {} was rejected", stream.peer());
            } else if let Err(error) = stream.send_from(meeting.key.bytes()) {
                tracing::warn!("the key could not be given to {}: {error}", stream.peer());
            }
        }
        Ok(())
    }

    /// Rejects the oldest unauthenticated peer when there are more than `most`.
    fn make_room(&mut self, most: usize) {
        let new =
            self.waiting.iter().enumerate().filter(|(_, arrival)| matches!(arrival.step, Step::Shaking(_)));
        if new.clone().count() > most
            && let Some((oldest, _)) = new.min_by_key(|(_, arrival)| arrival.until)
        {
            let gone = self.waiting.swap_remove(oldest);
            tracing::warn!(
                "a process at {} was rejected: it made room for others before it had proved the key",
                gone.from
            );
        }
    }

    /// Blocks until a peer connects, one of them can continue or has taken too long, or the deadline.
    fn sleep(&self, deadline: Instant) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let until =
            self.waiting.iter().map(|arrival| arrival.until).chain([deadline]).min().unwrap_or(deadline);
        let watched: Vec<(BorrowedFd<'_>, PollFlags)> =
            self.waiting.iter().filter_map(|arrival| arrival.step.watched()).collect();
        let all_sleep = watched.len() == self.waiting.len();
        let left = if all_sleep { until.saturating_duration_since(Instant::now()) } else { Duration::ZERO };
        let mut fds = vec![PollFd::new(self.listener, PollFlags::IN)];
        fds.extend(self.hands_out.map(|listener| PollFd::new(listener, PollFlags::IN)));
        fds.extend(watched.iter().map(|(fd, flags)| PollFd::new(fd, *flags)));
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        // A signal ends the sleep early.
        let _ = poll(&mut fds, Some(&timeout));
    }
}

impl Step {
    /// The descriptors to sleep on; `None` if there is something already.
    fn watched(&self) -> Option<(BorrowedFd<'_>, rustix::event::PollFlags)> {
        use rustix::event::PollFlags;
        match self {
            Self::Shaking(handshake) => Some((
                handshake.as_fd(),
                if handshake.wants() == Wants::Write { PollFlags::OUT } else { PollFlags::IN },
            )),
            Self::Talking(line) if line.may_sleep() => Some((line.fd()?, PollFlags::IN)),
            Self::Talking(_) => None,
        }
    }

    fn advance(self, meeting: &Meeting<'_>, from: &str) -> Became {
        let mut line = match self {
            Self::Talking(line) => line,
            Self::Shaking(mut handshake) => match handshake.advance::<()>() {
                Ok(None) => return Became::Waits(Self::Shaking(handshake)),
                Ok(Some(link)) => {
                    let (carrier, seal) = link.into_parts();
                    Box::new(Line::new(carrier, seal))
                }
                Err(error) => {
                    tracing::warn!("a process at {from} was rejected: {error}");
                    return Became::Gone;
                }
            },
        };
        loop {
            match line.next() {
                Ok(None) => match line.receive(Stay::Nothing) {
                    Ok(true) => {}
                    Ok(false) => return Became::Waits(Self::Talking(line)),
                    Err(error) => {
                        tracing::warn!("a process at {from} was rejected: {error}");
                        return Became::Gone;
                    }
                },
                Ok(Some(Incoming::Control(Control::Hello { hello }))) if hello.run == meeting.hello.run => {
                    return Became::Joining(Box::new(Joining { line: *line, hello }));
                }
                Ok(Some(Incoming::Control(Control::Hello { .. }))) => {
                    meeting.refuse(&mut line, "it belongs to another run");
                    tracing::warn!("a process of another run at {from} was rejected");
                    return Became::Gone;
                }
                other => {
                    tracing::warn!("a process at {from} was rejected: {other:?}");
                    return Became::Gone;
                }
            }
        }
    }
}

/// The next connection, if one waits.
fn next_of(listener: &Listener) -> std::io::Result<Option<Stream>> {
    match listener.accept() {
        // The connection waits until a descriptor is free for it.
        Err(error) if lacks_descriptors(&error) => Err(error),
        // The peer has gone again.
        Err(_) => Ok(None),
        came => came,
    }
}

fn unexpected() -> LineError {
    rampool_sharing::Malformed { what: "it answers a question that was not asked", at: 0 }.into()
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
    let name: SocketAddr =
        name.try_into().map_err(|_| JoinError::Socket(std::io::ErrorKind::AddrNotAvailable.into()))?;
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
    // SAFETY: it is the socket that the launcher made for this process, and no other code here knows of it.
    let owned = unsafe { OwnedFd::from_raw_fd(fd.as_raw_fd()) };
    Listener::adopt(owned.into()).ok()
}

/// Over a Unix socket: another user could not open the peer's memory as a file either.
pub(super) fn is_another_user(peer: &Peer) -> bool {
    matches!(peer, Peer::Unix { uid, .. } if *uid != rustix::process::geteuid().as_raw())
}

/// The more ranks this machine may have, the shorter the rings between two of them.
fn ring_bytes(ranks: u16) -> u32 {
    let share = RINGS_OF_A_RANK_BYTES / u32::from(ranks.max(1)).next_power_of_two();
    share.clamp(MIN_RING_BYTES, RING_BYTES)
}

/// Whether the process, or the machine, is out of descriptors. Waiting does not help.
fn lacks_descriptors(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

pub(super) fn readable(listener: &Listener, deadline: Instant) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return false;
    }
    let timeout = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(left.subsec_nanos()),
    };
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
