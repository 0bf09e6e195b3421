//! Sockets: TCP and Unix streams as one [`Stream`], addresses as one [`Endpoint`].
//!
//! Sends and receives take raw memory pieces instead of slices: the memory may be a program's own, mapped and
//! written by others.

use super::{Piece, PieceMut};
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Where a server listens: `HOST:PORT`, `unix:PATH` or `ucx:HOST:PORT`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Endpoint {
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
    /// The two meet over TCP, and talk over UCX.
    Ucx {
        host: String,
        port: u16,
    },
}

/// A text that is no address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} is no address; write HOST:PORT, [IPV6]:PORT, unix:PATH or ucx:HOST:PORT")]
pub struct EndpointError {
    text: String,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let error = || EndpointError { text: text.to_owned() };
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(error()) } else { Ok(Endpoint::Unix(path.into())) };
        }
        if let Some(rest) = text.strip_prefix("ucx:") {
            return match rest.parse() {
                Ok(Endpoint::Tcp { host, port }) => Ok(Endpoint::Ucx { host, port }),
                _ => Err(error()),
            };
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(error)?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(error)?,
            None if host.contains(':') => return Err(error()),
            None => host,
        };
        if !is_host(host) {
            return Err(error());
        }
        Ok(Endpoint::Tcp { host: host.to_owned(), port: port.parse().map_err(|_| error())? })
    }
}

/// Whether this can be a host's name or number: no white space, brackets, quotes or other signs of a mistake,
/// and not the word that stands before a socket's path.
pub fn is_host(host: &str) -> bool {
    !host.is_empty()
        && host != "unix"
        && host != "ucx"
        && host.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%'))
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Unix(path) => return write!(f, "unix:{}", path.display()),
            Endpoint::Ucx { .. } => f.write_str("ucx:")?,
            Endpoint::Tcp { .. } => {}
        }
        match self {
            Endpoint::Tcp { host, port } | Endpoint::Ucx { host, port } if host.contains(':') => {
                write!(f, "[{host}]:{port}")
            }
            Endpoint::Tcp { host, port } | Endpoint::Ucx { host, port } => write!(f, "{host}:{port}"),
            Endpoint::Unix(_) => unreachable!("written above"),
        }
    }
}

impl Endpoint {
    /// A Unix socket that is no file: a name in this network namespace, gone with the process that listens.
    /// The name is no secret: judge a connection by its credentials.
    pub fn unix_name(name: &str) -> Self {
        Endpoint::Unix(format!("\0{name}").into())
    }

    fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            Endpoint::Tcp { host, port } | Endpoint::Ucx { host, port } => {
                let addresses: Vec<_> = (host.as_str(), *port).to_socket_addrs()?.collect();
                if addresses.is_empty() {
                    return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
                }
                Ok(addresses)
            }
            Endpoint::Unix(_) => Ok(Vec::new()),
        }
    }

    /// Whether only this machine can reach it. Resolves the name.
    ///
    /// # Errors
    /// Where the name cannot be resolved.
    pub fn is_local(&self) -> io::Result<bool> {
        Ok(self.resolve()?.iter().all(|a| a.ip().is_loopback()))
    }

    /// The first of its addresses, if this machine has all of them. Resolves the name.
    ///
    /// # Errors
    /// Where the name cannot be resolved.
    pub fn on_this_machine(&self) -> io::Result<Option<SocketAddr>> {
        let addresses = self.resolve()?;
        let is_here = |address: &SocketAddr| {
            address.ip().is_loopback() || std::net::UdpSocket::bind((address.ip(), 0)).is_ok()
        };
        Ok(addresses.first().filter(|_| addresses.iter().all(is_here)).copied())
    }
}

/// The peer at the other end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Peer {
    Tcp(SocketAddr),
    /// A process on this machine, as the kernel names it.
    Unix {
        pid: u32,
        uid: u32,
    },
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Tcp(address) => address.fmt(f),
            Peer::Unix { pid, uid } => write!(f, "unix:pid={pid},uid={uid}"),
        }
    }
}

/// A connected, non-blocking stream socket.
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
    peer: Peer,
    local: bool,
}

impl Stream {
    /// Connects. Blocks until connected or `deadline`; resolving a host name (not a number) may block longer,
    /// as the system's resolver does.
    ///
    /// # Errors
    /// The last address's error; `TimedOut` at the deadline.
    pub fn connect(endpoint: &Endpoint, deadline: Instant) -> io::Result<Self> {
        match endpoint {
            Endpoint::Unix(path) => {
                Self::connect_one(socket2::Domain::UNIX, &socket2::SockAddr::unix(path)?, deadline)
            }
            Endpoint::Tcp { .. } | Endpoint::Ucx { .. } => {
                let mut last = io::Error::from(io::ErrorKind::NotFound);
                for address in endpoint.resolve()? {
                    match Self::connect_one(socket2::Domain::for_address(address), &address.into(), deadline)
                    {
                        Ok(stream) => return Ok(stream),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    fn connect_one(
        domain: socket2::Domain,
        address: &socket2::SockAddr,
        deadline: Instant,
    ) -> io::Result<Self> {
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        socket.connect_timeout(address, left)?;
        Self::adopt(socket)
    }

    /// Begins to connect, without blocking. Finish with [`Connecting::finish`] when the socket can be
    /// written.
    ///
    /// # Errors
    /// As `connect(2)`.
    pub fn begin(way: &PeerAddress) -> io::Result<Connecting> {
        let (domain, address) = match way {
            PeerAddress::Tcp(address) => (socket2::Domain::for_address(*address), (*address).into()),
            PeerAddress::Unix(path) => (socket2::Domain::UNIX, socket2::SockAddr::unix(path)?),
        };
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
            _ => Ok(Connecting { socket }),
        }
    }

    /// Makes a stream of a connected socket.
    ///
    /// # Errors
    /// Where the socket has no peer any more. `ConnectionRefused` where it is its own peer: no process
    /// listens at a port of this machine, and the kernel gave that same port to the connecting socket.
    pub fn adopt(socket: impl Into<socket2::Socket>) -> io::Result<Self> {
        let socket: socket2::Socket = socket.into();
        socket.set_nonblocking(true)?;
        let (peer, local) = match socket.peer_addr()?.as_socket() {
            Some(address) => {
                socket.set_tcp_nodelay(true)?;
                let own = socket.local_addr()?.as_socket();
                if own == Some(address) {
                    // Closed at once, so that the intended process can listen there.
                    socket.set_linger(Some(Duration::ZERO))?;
                    return Err(io::ErrorKind::ConnectionRefused.into());
                }
                let ip = address.ip().to_canonical();
                let local = ip.is_loopback() || own.is_some_and(|own| own.ip().to_canonical() == ip);
                if local {
                    send_unpaced(&socket);
                }
                (Peer::Tcp(address), local)
            }
            None => {
                let credentials = credentials_of_peer(socket.as_fd())?;
                (Peer::Unix { pid: credentials.pid.unsigned_abs(), uid: credentials.uid }, true)
            }
        };
        Ok(Self { fd: socket.into(), peer, local })
    }

    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Whether the process that made the other end of this Unix socket is this process's user's and in no
    /// container of its own, so that it may look into this process anyway. False also where the kernel does
    /// not tell (before Linux 6.5), or where that process has ended.
    #[must_use]
    pub fn is_of_this_user(&self) -> bool {
        let Peer::Unix { pid, uid } = self.peer else { return false };
        let own = rustix::process::geteuid().as_raw();
        let process = process_of_peer(self.fd.as_fd()).ok().filter(|_| pid != 0 && uid == own);
        process.is_some_and(|process| shares_namespaces(pid, &process))
    }

    /// Whether the peer is on this machine, by its address.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.local
    }

    /// Lets the kernel ask the peer's machine, about this often, whether it is there, and end the connection
    /// after three times without an answer. The kernel answers for a process that is stopped, too. Whole
    /// seconds, at least one; a Unix socket does not need it.
    ///
    /// # Errors
    /// Where the connection is over.
    pub fn keep_alive(&self, every: Duration) -> io::Result<()> {
        if matches!(self.peer, Peer::Unix { .. }) {
            return Ok(());
        }
        let every = Duration::from_secs(every.as_secs().max(1));
        let probes = socket2::TcpKeepalive::new().with_time(every).with_interval(every).with_retries(3);
        socket2::SockRef::from(&self.fd).set_tcp_keepalive(&probes)
    }

    /// What sleeps on the socket until something can be read is woken when so many bytes can be, or the
    /// connection ends. If they can be already, it is woken now. It is much cheaper to change than what an
    /// epoll set is interested in.
    pub fn wake_from(&self, bytes: i32) {
        let Ok(len) = libc::socklen_t::try_from(size_of::<i32>()) else { return };
        // SAFETY: the option's value is a number, of which the address and the size are given.
        let set = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                (&raw const bytes).cast(),
                len,
            )
        };
        assert!(set == 0, "a socket refuses to say when it can be read: {}", io::Error::last_os_error());
    }

    /// Sends from these pieces, in order, as much as the kernel takes now. `Ok(None)`: nothing now.
    ///
    /// # Errors
    /// Where the connection is over.
    ///
    /// # Safety
    /// Every piece is readable memory for the whole call.
    pub unsafe fn send(&self, pieces: &[libc::iovec]) -> io::Result<Option<usize>> {
        const FLAGS: i32 = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        if let [piece] = pieces {
            // One piece needs no message around it, which the kernel would have to fetch, and a call that
            // does not block no point where a thread may be cancelled.
            // SAFETY: the caller vouches for the one piece.
            let sent = unsafe {
                libc::syscall(
                    libc::SYS_sendto,
                    self.fd.as_raw_fd(),
                    piece.iov_base,
                    piece.iov_len,
                    FLAGS,
                    null::<u8>(),
                    0usize,
                )
            };
            return non_blocking(sent);
        }
        let mut message = empty_message();
        message.msg_iov = pieces.as_ptr().cast_mut();
        message.msg_iovlen = pieces.len();
        // SAFETY: the header points at `pieces`, whose entries the caller vouches for; the kernel only reads
        // them.
        let sent = unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const message, FLAGS) };
        non_blocking(sent)
    }

    /// Receives into these pieces, in order, what has arrived. `Ok(None)`: nothing now; `Ok(Some(0))`: the
    /// peer has closed.
    ///
    /// # Safety
    /// Every piece is writable memory for the whole call, and not used otherwise meanwhile.
    pub(crate) unsafe fn receive(&self, pieces: &mut [libc::iovec]) -> io::Result<Option<usize>> {
        // SAFETY: the caller's promise.
        unsafe { self.receive_with_flags(pieces, 0) }
    }

    /// # Safety
    /// As [`Self::receive`].
    unsafe fn receive_with_flags(&self, pieces: &mut [libc::iovec], flags: i32) -> io::Result<Option<usize>> {
        let flags = flags | libc::MSG_DONTWAIT;
        if let [piece] = pieces {
            // As in `send`.
            // SAFETY: the caller vouches for the one piece.
            let got = unsafe {
                let (fd, no_address) = (self.fd.as_raw_fd(), null::<u8>());
                libc::syscall(
                    libc::SYS_recvfrom,
                    fd,
                    piece.iov_base,
                    piece.iov_len,
                    flags,
                    no_address,
                    no_address,
                )
            };
            return non_blocking(got);
        }
        let mut message = empty_message();
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = pieces.len();
        // SAFETY: the header points at `pieces`, whose entries the caller vouches for.
        let got = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, flags) };
        non_blocking(got)
    }

    /// Copies what has arrived into memory of our own, and leaves it in the socket until [`Self::discard`].
    /// `Ok(None)`: nothing now; `Ok(Some(0))`: the peer has closed.
    pub fn peek_into(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let mut piece = [iovec_mut(PieceMut { ptr: buffer.as_mut_ptr(), len: buffer.len() })];
        // SAFETY: the piece is the exclusively borrowed buffer.
        unsafe { self.receive_with_flags(&mut piece, libc::MSG_PEEK) }
    }

    /// Takes so many bytes, which have been seen by [`Self::peek_into`], out of the TCP socket. `Ok(None)`:
    /// it was interrupted.
    pub fn discard(&self, bytes: usize) -> io::Result<Option<usize>> {
        // SAFETY: with MSG_TRUNC a TCP socket copies nothing, so no memory is needed.
        let gone = unsafe {
            libc::recv(self.fd.as_raw_fd(), null_mut(), bytes, libc::MSG_DONTWAIT | libc::MSG_TRUNC)
        };
        non_blocking(gone)
    }

    /// [`Self::receive`] into memory of our own.
    pub fn receive_into(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let mut piece = [iovec_mut(PieceMut { ptr: buffer.as_mut_ptr(), len: buffer.len() })];
        // SAFETY: the piece is the exclusively borrowed buffer.
        unsafe { self.receive(&mut piece) }
    }

    /// [`Self::send`] from memory of our own.
    pub fn send_from(&self, buffer: &[u8]) -> io::Result<Option<usize>> {
        let piece = [iovec(Piece { ptr: buffer.as_ptr(), len: buffer.len() })];
        // SAFETY: the piece is the borrowed buffer.
        unsafe { self.send(&piece) }
    }

    /// [`Self::send_from`] together with a descriptor, over a Unix socket. Where any bytes are sent, so is
    /// the descriptor.
    pub(crate) fn send_with(&self, buffer: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Option<usize>> {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "there is room for two descriptors");
        match sendmsg(
            &self.fd,
            &[io::IoSlice::new(buffer)],
            &mut control,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        ) {
            Ok(sent) => Ok(Some(sent)),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// [`Self::receive_into`], and the descriptors that come with the bytes. What they are of, and what it
    /// takes to close them, is the peer's choice.
    pub(crate) fn receive_with(
        &self,
        buffer: &mut [u8],
        handed: &mut Vec<OwnedFd>,
    ) -> io::Result<Option<usize>> {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
        // As many as one message can bring: what there is no room for the kernel closes on this thread.
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.fd, &mut [io::IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                handed.extend(fds);
            }
        }
        Ok(Some(received))
    }

    /// Waits until the socket can be read (or written, too) or the deadline is past. Returns false at the
    /// deadline.
    pub fn wait(&self, write: bool, deadline: Instant) -> io::Result<bool> {
        wait(self.fd.as_fd(), write, deadline)
    }
}

/// Lets a connection within this machine send as much as the other end has room for. Nothing is lost on the
/// way and there is no link to share, but where BBR is the machine's choice, it paces all the same, by a
/// timer for each few segments.
fn send_unpaced(socket: &socket2::Socket) {
    // Every kernel has it, and allows it to all users. Where it cannot be set, the machine's choice stays.
    let _ = socket.set_tcp_congestion(b"reno");
}

/// Waits until a descriptor can be read (or written, too) or the deadline is past. Returns false at the
/// deadline.
pub(super) fn wait(fd: BorrowedFd<'_>, write: bool, deadline: Instant) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let flags = if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(&fd, flags)], Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Where a peer was reached: an address that needs no name service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerAddress {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A connection that is being made.
#[derive(Debug)]
pub struct Connecting {
    socket: socket2::Socket,
}

impl Connecting {
    /// The stream, if it is connected by now.
    ///
    /// # Errors
    /// Why it never will be; do not call again.
    pub fn finish(&mut self) -> io::Result<Option<Stream>> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        match self.socket.peer_addr() {
            Ok(_) => Stream::adopt(self.socket.try_clone()?).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Connecting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Who made a Unix socket's other end. The process has the number 0 where it is in no namespace of ours, as
/// when one of the two runs in a container: the crates that ask the kernel for this take that for an error.
fn credentials_of_peer(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = libc::socklen_t::try_from(size_of_val(&found)).expect("a few bytes");
    // SAFETY: an open descriptor, a place for a `ucred`, and its length.
    let done = unsafe {
        let place = (&raw mut found).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, place, &raw mut bytes)
    };
    if done == 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
}

/// The process that made a Unix socket's other end.
fn process_of_peer(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut found: libc::c_int = -1;
    let mut bytes = libc::socklen_t::try_from(size_of_val(&found)).expect("a few bytes");
    // SAFETY: an open descriptor, a place for a descriptor, and its length.
    let done = unsafe {
        let place = (&raw mut found).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, place, &raw mut bytes)
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(found) })
}

/// Whether a process, of this number, has this one's users and processes.
fn shares_namespaces(pid: u32, process: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let same = ["user", "pid"].iter().all(|kind| {
        let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/{kind}")).ok();
        of("self").is_some_and(|own| of(&pid.to_string()) == Some(own))
    });
    // It has not ended, so its number was no other process's meanwhile.
    let mut ended = [PollFd::new(process, PollFlags::IN)];
    same && poll(&mut ended, Some(&Timespec::default())) == Ok(0)
}

pub(crate) fn iovec(piece: Piece) -> libc::iovec {
    libc::iovec { iov_base: piece.ptr.cast_mut().cast(), iov_len: piece.len }
}

pub(crate) fn iovec_mut(piece: PieceMut) -> libc::iovec {
    libc::iovec { iov_base: piece.ptr.cast(), iov_len: piece.len }
}

fn empty_message() -> libc::msghdr {
    // SAFETY: msghdr is plain data for which all zero bits mean "no address, no pieces, no control data".
    unsafe { std::mem::zeroed() }
}

fn non_blocking(result: impl TryInto<usize>) -> io::Result<Option<usize>> {
    if let Ok(bytes) = result.try_into() {
        return Ok(Some(bytes));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR) => Ok(None),
        _ => Err(error),
    }
}

/// A listening, non-blocking socket. A Unix socket's file is removed when the listener goes.
#[derive(Debug)]
pub struct Listener {
    socket: ListenSocket,
    endpoint: Endpoint,
}

#[derive(Debug)]
enum ListenSocket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Listens. Port 0 lets the kernel choose; [`Listener::endpoint`] tells. A Unix socket's file without a
    /// listener is replaced; the new one is for its owner only (mode 0600), and connections are also judged
    /// by the kernel's credentials.
    ///
    /// # Errors
    /// As `bind` and `listen`.
    pub fn bind(endpoint: &Endpoint) -> io::Result<Self> {
        Self::bind_for(endpoint, false)
    }

    /// As [`Listener::bind`], but every user reaches a Unix socket whose directory it can enter (mode 0666).
    /// The listener judges them by the kernel's credentials.
    ///
    /// # Errors
    /// As `bind` and `listen`.
    pub fn bind_for_all_users(endpoint: &Endpoint) -> io::Result<Self> {
        Self::bind_for(endpoint, true)
    }

    fn bind_for(endpoint: &Endpoint, all_users: bool) -> io::Result<Self> {
        match endpoint {
            Endpoint::Tcp { host, .. } | Endpoint::Ucx { host, .. } => {
                let addresses = endpoint.resolve()?;
                let listener = TcpListener::bind(&addresses[..])?;
                listener.set_nonblocking(true)?;
                let port = listener.local_addr()?.port();
                let host = host.clone();
                let endpoint = if matches!(endpoint, Endpoint::Ucx { .. }) {
                    Endpoint::Ucx { host, port }
                } else {
                    Endpoint::Tcp { host, port }
                };
                Ok(Self { socket: ListenSocket::Tcp(listener), endpoint })
            }
            Endpoint::Unix(path) => {
                let listener = if let Some(name) = name_of(path) {
                    UnixListener::bind_addr(&std::os::unix::net::SocketAddr::from_abstract_name(name)?)?
                } else {
                    remove_stale_socket(path)?;
                    let listener = UnixListener::bind(path)?;
                    let mode = if all_users { 0o666 } else { 0o600 };
                    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
                    listener
                };
                listener.set_nonblocking(true)?;
                Ok(Self { socket: ListenSocket::Unix(listener), endpoint: endpoint.clone() })
            }
        }
    }

    /// Takes over a TCP socket that listens already.
    ///
    /// # Errors
    /// Where it cannot be made non-blocking, or has no address.
    pub fn adopt(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let at = listener.local_addr()?;
        let endpoint = Endpoint::Tcp { host: at.ip().to_string(), port: at.port() };
        Ok(Self { socket: ListenSocket::Tcp(listener), endpoint })
    }

    /// Where it listens, with the port the kernel chose.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The next connection. `Ok(None)`: none waits.
    ///
    /// # Errors
    /// As `accept`; a connection that vanished while it waited is an error here, too, and the listener goes
    /// on.
    pub fn accept(&self) -> io::Result<Option<Stream>> {
        let accepted: io::Result<socket2::Socket> = match &self.socket {
            ListenSocket::Tcp(listener) => listener.accept().map(|(socket, _)| socket.into()),
            ListenSocket::Unix(listener) => listener.accept().map(|(socket, _)| socket.into()),
        };
        match accepted {
            Ok(socket) => Stream::adopt(socket).map(Some),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            ListenSocket::Tcp(listener) => listener.as_fd(),
            ListenSocket::Unix(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Endpoint::Unix(path) = &self.endpoint
            && name_of(path).is_none()
        {
            // Best effort: the file may be gone already.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The name that stands in for a path ([`Endpoint::unix_name`]).
fn name_of(path: &Path) -> Option<&[u8]> {
    path.as_os_str().as_bytes().strip_prefix(&[0])
}

/// Removes a socket file that refuses connections; anything else is left for `bind` to complain about.
fn remove_stale_socket(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let Ok(metadata) = std::fs::symlink_metadata(path) else {
        return Ok(());
    };
    if metadata.file_type().is_socket()
        && let Err(error) = std::os::unix::net::UnixStream::connect(path)
        && error.kind() == io::ErrorKind::ConnectionRefused
    {
        std::fs::remove_file(path)?;
    }
    Ok(())
}
