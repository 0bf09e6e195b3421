//! Replacements of cut connections: the thread that makes them, answers ranks that reconnect, and rejects
//! unauthenticated peers. [`rampool_sharing::relink`] decides which rank connects when, and [`super::host`]
//! what is sent over the new connection.
//!
//! Nothing here blocks: a peer that sends nothing keeps no rank waiting. The thread sleeps while no
//! connection is cut.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rampool_sharing::Rank;
use rampool_sharing::control::{Control, Hello};
use rampool_sharing::relink::Attempt;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::Inner;
use super::line::{Incoming, Line, Stay};
use super::service::EndWithPanic;
use rampool_net::transport::{
    Connecting, Handshake, HandshakeError, Listener, LocalPolicy, PeerAddress, Stream, Wants,
};

/// The longest for one attempt, or for one peer's introduction; the kernel resends a lost packet of it after
/// a second.
const ATTEMPT: Duration = Duration::from_millis(2500);
/// Unidentified peers at a time, in addition to one for each rank.
const MOST_OUTSIDE_CLIENTS: usize = 32;
/// The pause after the kernel refused a connection, for example for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Addresses and incarnations of the ranks, exchanged when they met.
pub(super) struct Known {
    /// Where this rank listens for reconnections.
    pub listener: Listener,
    pub hello: Hello,
    pub policy: LocalPolicy,
    /// Where the others do, by rank.
    pub places: Vec<Option<SocketAddr>>,
    /// Incarnations, by rank.
    pub incarnations: Vec<u64>,
}

/// Orders to the thread.
pub(super) struct Orders {
    doorbell: OwnedFd,
    waiting: Mutex<Vec<Order>>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    Dial {
        rank: Rank,
        attempt: u32,
    },
    Probe {
        rank: Rank,
    },
    /// The run is over.
    End,
}

impl Orders {
    /// # Errors
    /// If there are too many descriptors.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            doorbell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            waiting: Mutex::default(),
        })
    }

    pub fn give(&self, order: Order) {
        self.waiting.lock().expect("no thread panics while holding it").push(order);
        // It can only fail if the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes());
    }

    fn take(&self) -> Vec<Order> {
        let _ = rustix::io::read(&self.doorbell, &mut [0; 8]);
        std::mem::take(&mut *self.waiting.lock().expect("no thread panics while holding it"))
    }
}

/// Serves until the rank has finished.
pub(super) fn run(inner: &Arc<Inner>, known: &Known, orders: &Orders) {
    let _guard = EndWithPanic;
    let mut talks: Vec<Talk> = Vec::new();
    let mut deaf_until = Instant::now();
    loop {
        sleep(known, orders, &talks, deaf_until);
        for order in orders.take() {
            match order {
                Order::End => return,
                Order::Dial { rank, attempt } => {
                    talks.extend(Talk::begin(inner, known, Whom::Dialled { rank, attempt }))
                }
                Order::Probe { rank } => talks.extend(Talk::begin(inner, known, Whom::Probed { rank })),
            }
        }
        while Instant::now() >= deaf_until {
            match known.listener.accept() {
                Ok(Some(stream)) => {
                    let clients =
                        talks.iter().filter(|talk| matches!(talk.whom, Whom::OutsideClient)).count();
                    if clients < MOST_OUTSIDE_CLIENTS + known.places.len() {
                        talks.push(Talk::welcome(stream, known));
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::debug!(%error, "a connection could not be accepted");
                    deaf_until = Instant::now() + PAUSE;
                }
            }
        }
        let now = Instant::now();
        talks.retain_mut(|talk| !talk.go_on(inner, known, now));
    }
}

/// Sleeps until something can continue, or an attempt has taken too long.
fn sleep(known: &Known, orders: &Orders, talks: &[Talk], deaf_until: Instant) {
    let now = Instant::now();
    let is_deaf = now < deaf_until;
    let until = talks.iter().map(|talk| talk.until).chain(is_deaf.then_some(deaf_until)).min();
    let timeout = until.map(|until| {
        let left = until.saturating_duration_since(now);
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        }
    });
    let mut fds = vec![PollFd::new(&orders.doorbell, PollFlags::IN)];
    if !is_deaf {
        fds.push(PollFd::new(&known.listener, PollFlags::IN));
    }
    let watched: Vec<(BorrowedFd<'_>, PollFlags)> = talks.iter().filter_map(Talk::watched).collect();
    fds.extend(watched.iter().map(|(fd, flags)| PollFd::new(fd, *flags)));
    // A signal ends the sleep early.
    let _ = poll(&mut fds, timeout.as_ref());
}

/// A connection that is being made, and its peer.
struct Talk {
    whom: Whom,
    step: Step,
    until: Instant,
}

#[derive(Clone, Copy, Debug)]
enum Whom {
    Dialled { rank: Rank, attempt: u32 },
    Probed { rank: Rank },
    OutsideClient,
}

enum Step {
    Connecting(Connecting),
    Shaking(Box<Handshake>),
    Talking(Box<Line>),
    /// It was handed on, or is over.
    Over,
}

/// Why it does not continue.
enum Trouble {
    /// The connection was refused: no process listens there.
    Refused,
    /// The next attempt may succeed.
    Again(String),
    /// A process listens there, which is all that was asked.
    Listens,
    /// The peer will never accept this rank.
    Never(String),
}

impl Talk {
    /// Begins to connect. `None`: that failed at once, and was reported.
    fn begin(inner: &Inner, known: &Known, whom: Whom) -> Option<Self> {
        let (Whom::Dialled { rank, .. } | Whom::Probed { rank }) = whom else {
            unreachable!("clients come by themselves")
        };
        let place = known.places[usize::from(rank.0)]
            .ok_or_else(|| Trouble::Again("its address is unknown".to_owned()));
        match place.and_then(|place| Stream::begin(&PeerAddress::Tcp(place)).map_err(trouble_to_connect)) {
            Ok(connecting) => {
                Some(Self { whom, step: Step::Connecting(connecting), until: Instant::now() + ATTEMPT })
            }
            Err(trouble) => {
                tell(inner, whom, trouble);
                None
            }
        }
    }

    fn welcome(stream: Stream, known: &Known) -> Self {
        let handshake = Handshake::server(stream, known.policy.clone(), None);
        Self {
            whom: Whom::OutsideClient,
            step: Step::Shaking(Box::new(handshake)),
            until: Instant::now() + ATTEMPT,
        }
    }

    /// The descriptor to sleep on.
    fn watched(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        match &self.step {
            Step::Connecting(connecting) => Some((connecting.as_fd(), PollFlags::OUT)),
            Step::Shaking(handshake) => Some((
                handshake.as_fd(),
                if handshake.wants() == Wants::Write { PollFlags::OUT } else { PollFlags::IN },
            )),
            Step::Talking(line) => Some((line.fd()?, PollFlags::IN)),
            Step::Over => None,
        }
    }

    /// Advances as far as possible without blocking. True: it is over.
    fn go_on(&mut self, inner: &Inner, known: &Known, now: Instant) -> bool {
        let came = self.advance(inner, known);
        let came = if now >= self.until && matches!(came, Ok(())) && !matches!(self.step, Step::Over) {
            Err(Trouble::Again("no answer in time".to_owned()))
        } else {
            came
        };
        if let Err(trouble) = came {
            tell(inner, self.whom, trouble);
            return true;
        }
        matches!(self.step, Step::Over)
    }

    fn advance(&mut self, inner: &Inner, known: &Known) -> Result<(), Trouble> {
        loop {
            self.step = match std::mem::replace(&mut self.step, Step::Over) {
                Step::Connecting(mut connecting) => match connecting.finish().map_err(trouble_to_connect)? {
                    None => {
                        self.step = Step::Connecting(connecting);
                        return Ok(());
                    }
                    Some(_) if matches!(self.whom, Whom::Probed { .. }) => {
                        return Err(Trouble::Listens);
                    }
                    Some(stream) => Step::Shaking(Box::new(Handshake::client(stream, known.policy.clone()))),
                },
                Step::Shaking(mut handshake) => match handshake.advance::<()>() {
                    Ok(None) => {
                        self.step = Step::Shaking(handshake);
                        return Ok(());
                    }
                    Ok(Some(link)) => {
                        let (carrier, seal) = link.into_parts();
                        let mut line = Box::new(Line::new(carrier, seal));
                        if let Whom::Dialled { rank, attempt } = self.whom {
                            let Some(resume) = inner.lock().resume_request(rank, attempt, &known.hello.run)
                            else {
                                return Ok(());
                            };
                            line.queue_control(&Control::Resume { resume });
                            line.flush().map_err(|error| Trouble::Again(error.to_string()))?;
                        }
                        Step::Talking(line)
                    }
                    Err(error) if error.may_pass() => return Err(Trouble::Again(error.to_string())),
                    Err(error) => return Err(Trouble::Never(error.to_string())),
                },
                Step::Talking(mut line) => {
                    let said = loop {
                        match line.next().map_err(|error| Trouble::Never(error.to_string()))? {
                            Some(Incoming::Control(control)) => break control,
                            Some(Incoming::Message(_)) => {
                                return Err(Trouble::Never("it does not introduce itself".to_owned()));
                            }
                            None => {}
                        }
                        if !line.receive(Stay::Nothing).map_err(|error| Trouble::Again(error.to_string()))? {
                            self.step = Step::Talking(line);
                            return Ok(());
                        }
                    };
                    return self.hear(inner, known, said, line);
                }
                Step::Over => return Ok(()),
            }
        }
    }

    /// The first message of a peer that connected, or the answer to this rank's.
    fn hear(&self, inner: &Inner, known: &Known, said: Control, line: Box<Line>) -> Result<(), Trouble> {
        match (self.whom, said) {
            (Whom::Dialled { rank, attempt }, Control::Resumed { incarnation, received }) => {
                with_host(inner, |host| host.resumed(rank, attempt, incarnation, *line, received));
                Ok(())
            }
            (Whom::Dialled { .. }, Control::Refused { why }) => Err(Trouble::Never(why)),
            (Whom::OutsideClient, Control::Resume { resume }) => {
                let from = line.peer().to_string();
                if let Err((line, why)) = with_host(inner, |host| host.asked(&resume, &known.hello.run, line))
                {
                    tracing::warn!("{} at {from} was refused: {why}", resume.rank);
                    refuse(line, why);
                }
                Ok(())
            }
            (Whom::OutsideClient, Control::Hello { hello }) => {
                let own = hello.run == known.hello.run;
                tracing::warn!("a process at {} that says it is {} came too late", line.peer(), hello.rank);
                refuse(
                    line,
                    if own { "the run has begun without it" } else { "it belongs to another run" }.to_owned(),
                );
                Ok(())
            }
            (_, other) => Err(Trouble::Never(format!("it sent an unexpected message: {other:?}"))),
        }
    }
}

fn refuse(mut line: Box<Line>, why: String) {
    line.queue_control(&Control::Refused { why });
    // A new connection has room for it.
    if let Err(error) = line.flush() {
        tracing::debug!("the refusal could not be sent: {error}");
    }
}

fn trouble_to_connect(error: std::io::Error) -> Trouble {
    if error.kind() == ErrorKind::ConnectionRefused {
        Trouble::Refused
    } else {
        Trouble::Again(HandshakeError::Connect(error).to_string())
    }
}

fn tell(inner: &Inner, whom: Whom, trouble: Trouble) {
    let (rank, attempt) = match whom {
        Whom::Dialled { rank, attempt } => (rank, Some(attempt)),
        Whom::Probed { rank } => (rank, None),
        Whom::OutsideClient => {
            // A probe sends nothing, and unauthenticated peers do not concern the run.
            if let Trouble::Never(why) = trouble {
                tracing::warn!("an unauthenticated peer was rejected: {why}");
            }
            return;
        }
    };
    with_host(inner, |host| match trouble {
        Trouble::Refused => host.tried(rank, attempt, Attempt::Refused, "no process listens there"),
        Trouble::Listens => host.tried(rank, attempt, Attempt::Answered, "its process listens"),
        Trouble::Again(why) => host.tried(rank, attempt, Attempt::Failed, &why),
        Trouble::Never(why) => host.refused(rank, attempt, &why),
    });
}

/// Drives the rank, and wakes its service thread if necessary.
fn with_host<T>(inner: &Inner, act: impl FnOnce(&mut super::host::Host) -> T) -> T {
    let mut host = inner.lock();
    let result = act(&mut host);
    let ring = host.wants_service();
    drop(host);
    if ring {
        inner.watch.ring();
    }
    result
}
