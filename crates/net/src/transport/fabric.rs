//! Bytes over UCX: RDMA where there is some, otherwise shared memory or TCP, as UCX chooses for the two
//! machines.
//!
//! The two ends first connect and authenticate over TCP. Only then do they exchange their UCX addresses
//! ([`rampool_wire::fabric`]), because UCX accepts any peer that knows one. Bytes are cut into messages,
//! copied into memory of ours on the way out (which UCX hands to the network) and out of UCX's on the way in.
//!
//! The TCP connection stays open. Its end is the end of the peer, also over fabrics that do not report it. An
//! end that closes in good order sends the number of its messages over TCP last; the other end first reads
//! what is still in flight.

use super::means::{LocalPolicy, Means, Next, Setup, SetupError, Side, Transport, TransportKind};
use super::tcp::{Peer, Stream};
use rampool_ucx::{Channel, Context, Mode, SEGMENT_BYTES, UcxError};
use rampool_wire::fabric::{Flow, MAX_ADDRESS_BYTES, MAX_WINDOW, OFFER_BYTES, Offer};
use rampool_wire::session::features;
use rustix::event::epoll;
use rustix::net::SendFlags;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Messages that a side lets the other have on their way: half a MiB.
const WINDOW: u32 = 64;
/// After so many empty polls of UCX the socket is read.
const LOOKS: u32 = 64;
/// The shortest address: its header, which says the version and what is in it, the peer's number, and one
/// device.
const LEAST_ADDRESS_BYTES: usize = 12;
/// Behind an address that ends too early UCX reads these zeroes, and not what else is in memory.
const PADDING_BYTES: usize = 4096;
/// How long a side that goes waits for UCX to have handed over what it has sent, as a client and as a server,
/// which has others to serve. While the peer is awake, it takes no time to speak of.
const FLUSH_TIMES: [Duration; 2] = [Duration::from_secs(1), Duration::from_millis(20)];
/// So often a side that sleeps looks at UCX all the same: UCX 1.13 does not wake for everything that comes
/// over reliable connections (soft-RoCE).
const LOOK_PERIOD: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long messages may be on their way after their sender has gone.
const LATE_TIME: Duration = Duration::from_secs(1);

/// Why two do not talk over UCX.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    #[error("no connection over UCX: {0}")]
    Ucx(#[from] UcxError),
    #[error("no connection over UCX: polling: {0}")]
    Poll(#[from] io::Error),
    #[error(
        "no connection over UCX: the peer has UCX {theirs}, this side UCX {ours}; install the same version \
         on both"
    )]
    Version { ours: u32, theirs: u16 },
    #[error("no connection over UCX: the peer's length of UCX messages is not supported")]
    Messages,
    #[error("no connection over UCX: the peer's UCX address is not valid for this version of UCX")]
    Address,
    /// The server was asked for UCX and does not offer it.
    #[error(
        "no connection over UCX: it does not offer UCX there; start it with --listen ucx:HOST:PORT, or name \
         it without `ucx:`"
    )]
    NotOffered,
    /// It offers it, and could not after all.
    #[error("no connection over UCX: its UCX has failed; its log says why")]
    Refused,
}

impl Means {
    /// UCX over whatever fabric it has found; a TCP connection stays open next to it.
    pub const UCX: Self = Self::named("ucx");
}

/// Both ends have [`features::UCX`], over TCP.
pub(super) struct FabricKind;

impl TransportKind for FabricKind {
    fn bits(&self) -> (u32, u32) {
        (features::UCX, features::UCX)
    }

    fn offered(&self, local: &LocalPolicy, stream: &Stream) -> u32 {
        let tcp = matches!(stream.peer(), Peer::Tcp(_));
        if local.ucx.is_some() && tcp { features::UCX } else { 0 }
    }

    fn misses(&self, local: &LocalPolicy) -> Option<SetupError> {
        local.ucx.as_ref().map(|_| FabricError::NotOffered.into())
    }

    fn setup(&self) -> Box<dyn Setup> {
        Box::new(Exchange(None))
    }
}

/// Both ends tell their addresses, the server first. It has opened its half by then.
struct Exchange(Option<Opening>);

impl Setup for Exchange {
    fn begin(&mut self, side: &mut Side<'_>) -> Result<Next, SetupError> {
        if !side.is_client {
            // Takes some milliseconds.
            match open(side.local) {
                Ok((opening, offer)) => {
                    self.0 = Some(opening);
                    side.say_sealed(&offer.encode());
                }
                Err(error) => {
                    tracing::warn!(peer = %side.peer(), %error, "a client cannot be served over UCX");
                    side.say_sealed(&Offer::NONE.encode());
                    return Ok(Next::Failed(FabricError::Refused.into()));
                }
            }
        }
        Ok(Next::AwaitSealed(OFFER_BYTES..=OFFER_BYTES + MAX_ADDRESS_BYTES))
    }

    fn hear(&mut self, side: &mut Side<'_>, message: &[u8]) -> Result<Next, SetupError> {
        let theirs = Offer::parse(message)?;
        if theirs == Offer::NONE {
            return Err(FabricError::Refused.into());
        }
        let (opening, answer) = match self.0.take() {
            Some(opening) => (opening, None),
            None => {
                open(side.local).map(|(opening, offer)| (opening, Some(offer))).map_err(FabricError::from)?
            }
        };
        let (fabric, watch) = opening.connect(&theirs, side.take_stream())?;
        if let Some(answer) = answer {
            side.say_sealed(&Offer { watch, ..answer }.encode());
        }
        Ok(Next::Made(Some(Box::new(fabric))))
    }
}

fn open(local: &LocalPolicy) -> Result<(Opening, Offer), UcxError> {
    let context = local.ucx.as_ref().expect("it was agreed on only where this side has it");
    let opening = Opening::new(context)?;
    let offer = opening.offer(0)?;
    Ok((opening, offer))
}

/// Half a connection: this side's, made before the other's address is known.
struct Opening(Channel);

impl Opening {
    fn new(context: &Context) -> Result<Self, UcxError> {
        Channel::open(context, WINDOW as usize).map(Self)
    }

    /// What to tell the peer.
    fn offer(&self, watch: u8) -> Result<Offer, UcxError> {
        let version = rampool_ucx::version()?;
        Ok(Offer {
            major: u16::try_from(version.major).unwrap_or(u16::MAX),
            watch,
            message_bytes: u32::try_from(SEGMENT_BYTES).expect("some KiB"),
            window: WINDOW,
            address: self.0.address()?,
        })
    }

    /// Goes on with what the peer has told. The second is how this side watches the peer, for a client to
    /// tell.
    fn connect(mut self, peer: &Offer, stream: Stream) -> Result<(Fabric, u8), FabricError> {
        let version = rampool_ucx::version().map_err(UcxError::from)?;
        if u32::from(peer.major) != version.major {
            return Err(FabricError::Version { ours: version.major, theirs: peer.major });
        }
        if peer.message_bytes as usize > SEGMENT_BYTES || peer.window == 0 || peer.window > MAX_WINDOW {
            return Err(FabricError::Messages);
        }
        // A server has not been told yet how the peer is watched when it tells where it is.
        let flush_time = FLUSH_TIMES[usize::from(peer.watch != 0)];
        let mode = match peer.watch {
            0 => None,
            1 => Some(Mode::Watched),
            _ => Some(Mode::Unwatched),
        };
        let own = self.0.address()?;
        if peer.address.len() < LEAST_ADDRESS_BYTES || peer.address[0] != own[0] {
            return Err(FabricError::Address);
        }
        // UCX is not told where it ends.
        let padded = [&peer.address[..], &[0; PADDING_BYTES]].concat();
        // SAFETY: the peer promises that UCX made the address. A user who names a server at `ucx:` trusts it,
        // and one who starts such a server trusts all its clients.
        let mode = unsafe { self.0.connect(&padded, mode) }?;
        let clock = ticking()?;
        let poll = self.poll_set(&stream, &clock)?;
        let inside = Inside {
            channel: self.0,
            flow: Flow::new(WINDOW, peer.window),
            end: End::None,
            promise: Vec::new(),
            looks: 0,
        };
        let fabric = Fabric {
            inside: RefCell::new(inside),
            message_bytes: peer.message_bytes as usize,
            flush_time,
            stream,
            poll,
            clock,
        };
        Ok((fabric, if mode == Mode::Watched { 1 } else { 2 }))
    }

    /// UCX's descriptor, the socket and the clock as one.
    fn poll_set(&self, stream: &Stream, clock: &OwnedFd) -> io::Result<OwnedFd> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let channel = self.0.descriptor().map_err(io::Error::other)?;
        epoll::add(&poll, channel, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        epoll::add(&poll, stream, epoll::EventData::new_u64(1), epoll::EventFlags::IN)?;
        epoll::add(&poll, clock, epoll::EventData::new_u64(2), epoll::EventFlags::IN)?;
        Ok(poll)
    }
}

fn ticking() -> io::Result<OwnedFd> {
    let clock = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
    timerfd_settime(
        &clock,
        TimerfdTimerFlags::empty(),
        &Itimerspec { it_interval: LOOK_PERIOD, it_value: LOOK_PERIOD },
    )?;
    Ok(clock)
}

/// One side of a connection over UCX.
pub(super) struct Fabric {
    /// Progresses UCX as well, because the caller is about to sleep.
    inside: RefCell<Inside>,
    /// The longest message that the peer takes.
    message_bytes: usize,
    flush_time: Duration,
    stream: Stream,
    poll: OwnedFd,
    /// Wakes a sleeping thread now and then ([`LOOK_PERIOD`]).
    clock: OwnedFd,
}

struct Inside {
    channel: Channel,
    flow: Flow,
    end: End,
    /// The bytes received so far of the number of messages that the peer has sent in all.
    promise: Vec<u8>,
    looks: u32,
}

/// What the socket says of the peer.
#[derive(Clone, Copy)]
enum End {
    /// It is there.
    None,
    /// It has gone, having sent so many messages; they are waited for until then.
    Announced { sent: u64, until: Instant },
    /// It is dead, or gone without a word.
    Sudden,
}

impl Transport for Fabric {
    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn means(&self) -> Means {
        Means::UCX
    }

    unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Option<usize>> {
        let message_bytes = self.message_bytes;
        let inside = self.inside.get_mut();
        let wanted: usize = pieces.iter().map(|piece| piece.iov_len).sum();
        let (mut total, mut piece, mut done) = (0, 0, 0);
        while total < wanted {
            inside.work()?;
            if !inside.flow.may_send() {
                break;
            }
            let fill = |to: *mut u8| {
                let mut filled = 0;
                while filled < message_bytes && piece < pieces.len() {
                    let left = pieces[piece].iov_len - done;
                    let step = left.min(message_bytes - filled);
                    // SAFETY: the source by the caller's promise, `done + step` being within the piece; the
                    // target has room for a message. Raw copies: another thread may write there.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            pieces[piece].iov_base.cast::<u8>().add(done),
                            to.add(filled),
                            step,
                        )
                    };
                    (filled, done) = (filled + step, done + step);
                    if step == left {
                        (piece, done) = (piece + 1, 0);
                    }
                }
                total += filled;
                filled
            };
            if !inside.channel.send(inside.flow.read(), fill).map_err(broken)? {
                break;
            }
            inside.flow.has_sent();
        }
        if total == 0 && wanted > 0 {
            inside.look_at_socket(&self.stream);
            if !matches!(inside.end, End::None) {
                // The peer will not make room any more.
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            return Ok(None);
        }
        Ok(Some(total))
    }

    unsafe fn receive(&mut self, pieces: &mut [libc::iovec]) -> io::Result<Option<usize>> {
        let inside = self.inside.get_mut();
        let (mut total, mut progressed, mut failed) = (0, false, None);
        'pieces: for piece in pieces.iter() {
            let mut done = 0;
            while done < piece.iov_len {
                let to = piece.iov_base.cast::<u8>().wrapping_add(done);
                // SAFETY: the target by the caller's promise, `done + len` being within the piece; the source
                // is a received message.
                let took = inside.channel.take(piece.iov_len - done, |from, len| unsafe {
                    std::ptr::copy_nonoverlapping(from, to, len)
                });
                let Some((len, whole)) = took else {
                    if std::mem::replace(&mut progressed, true) {
                        break 'pieces;
                    }
                    match inside.work() {
                        Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(error),
                        // What came before is read first.
                        Err(error) if !inside.channel.has_bytes() => {
                            failed = Some(error);
                            break 'pieces;
                        }
                        _ => continue,
                    }
                };
                (done, total) = (done + len, total + len);
                if whole {
                    inside.flow.has_read();
                    // A peer that is gone need not be told; other errors show when UCX works next.
                    let _ = inside.tell();
                }
            }
        }
        if total > 0 {
            inside.looks = 0;
            return Ok(Some(total));
        }
        if let Some(error) = failed {
            inside.look(&self.stream);
            return if matches!(inside.end, End::None) { Err(error) } else { Ok(Some(0)) };
        }
        inside.look_at_socket(&self.stream);
        Ok(inside.is_over().then_some(0))
    }

    /// Lets UCX work on what it was given.
    fn drive(&mut self) {
        self.inside.get_mut().channel.progress();
    }

    /// Announces that this side is about to sleep on the descriptor, until there is something to read or, if
    /// `writing`, room to write. False: do not sleep, it is there already.
    fn may_sleep(&self, reading: bool, writing: bool) -> bool {
        let mut inside = self.inside.borrow_mut();
        // Whether it has struck does not matter: UCX is looked at now.
        let _ = rustix::io::read(&self.clock, &mut [0u8; 8]);
        // The next read or write reports the error at once.
        inside.look(&self.stream);
        let quiet = inside.channel.may_sleep() && inside.hears().is_ok() && inside.tell().is_ok();
        let readable = reading && (inside.channel.has_bytes() || !matches!(inside.end, End::None));
        let writable = writing && inside.flow.may_send() && inside.channel.has_room();
        quiet && !readable && !writable
    }

    /// It is asked each time.
    fn has_said_that_it_sleeps(&self, _: bool, _: bool) -> bool {
        false
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }
}

/// What was sent is handed over, and the peer is told how much that was.
impl Drop for Fabric {
    fn drop(&mut self) {
        let inside = self.inside.get_mut();
        if matches!(inside.end, End::None) && inside.channel.check().is_ok() {
            inside.channel.flush(Instant::now() + self.flush_time);
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            // A socket that takes no eight bytes has no other end.
            let _ = rustix::net::send(&self.stream, &inside.flow.sent().to_le_bytes(), flags);
        }
    }
}

impl Inside {
    /// Lets UCX work, and hears what the peer has read.
    fn work(&mut self) -> io::Result<()> {
        self.channel.progress();
        self.hears()
    }

    fn hears(&mut self) -> io::Result<()> {
        self.channel.check().map_err(broken)?;
        match self.channel.number() {
            Some(read) => {
                self.flow.hears(read).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
            }
            None => Ok(()),
        }
    }

    /// Tells the peer what was read, where it may be waiting for that.
    fn tell(&mut self) -> io::Result<()> {
        if self.flow.should_tell() && self.channel.send(self.flow.read(), |_| 0).map_err(broken)? {
            self.flow.has_told();
        }
        Ok(())
    }

    /// A poll of UCX was empty.
    fn look_at_socket(&mut self, stream: &Stream) {
        self.looks += 1;
        if self.looks >= LOOKS {
            self.look(stream);
        }
    }

    /// Whether the peer is still there.
    fn look(&mut self, stream: &Stream) {
        self.looks = 0;
        while matches!(self.end, End::None) {
            let mut bytes = [0; 8];
            match stream.receive_into(&mut bytes) {
                Ok(None) => break,
                Ok(Some(0)) | Err(_) => self.end = End::Sudden,
                Ok(Some(len)) => self.promise.extend_from_slice(&bytes[..len]),
            }
            if let Some(sent) = self.promise.first_chunk::<8>() {
                self.end =
                    End::Announced { sent: u64::from_le_bytes(*sent), until: Instant::now() + LATE_TIME };
            }
        }
    }

    /// Whether nothing will come any more.
    fn is_over(&mut self) -> bool {
        if self.channel.has_bytes() {
            return false;
        }
        match self.end {
            End::None => false,
            End::Announced { sent, until } => self.flow.read() >= sent || Instant::now() >= until,
            End::Sudden => true,
        }
    }
}

fn broken(error: UcxError) -> io::Error {
    let kind = if matches!(error, UcxError::Peer(_)) {
        io::ErrorKind::InvalidData
    } else {
        io::ErrorKind::ConnectionAborted
    };
    io::Error::new(kind, error)
}
