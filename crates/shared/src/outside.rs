//! Processes outside a run that use its shared memory directly: each rank's listener for them, and the client
//! side.
//!
//! ```text
//!   outsider  -- Visit -->  a rank's listener, after the transport's handshake; Welcome, or Refused
//!   outsider  -- Open  -->  Opened: where the published region lies
//!   outsider  -- Do    -->  Did: done by this rank, as if one of its threads had done it
//!                           Busy: this rank is at a barrier; another one is not, or all leave it soon
//!                           NotDone: why
//! ```
//! A rank at a barrier refuses operations, because its writes have been announced already. So the outsider
//! asks the next rank, and no process waits for another. An outsider is like a thread that moves from rank to
//! rank: each rank holds the outsider's own lock while it changes something for it, so the next rank learns
//! of the change and passes it on.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rampool_sharing::control::{Control, SHARE_WIRE_VERSION};
use rampool_sharing::{DirectOp, LockId, ProtocolKind, Rank};
use rampool_wire::session::Encryption;
use rampool_wire::units::PageIndex;

use super::direct::{PagesOfRegion, SharedDirect};
use super::host::Waiting;
use super::line::{Line, LineError};
use super::mesh::{is_another_user, readable, shake};
use super::{AllocOptions, Inner, OWN_LOCKS, Region, Shared, SharedError};
use rampool_net::key::{Key, random_bytes};
use rampool_net::transport::{
    Endpoint, EndpointError, Handshake, HandshakeError, Listener, LocalPolicy, Stream,
};

/// The most processes that one rank serves at a time. Beyond it, those that have not shown the secret yet make
/// room, the oldest first.
const MOST_CLIENTS: usize = 64;
/// The longest that an unauthenticated peer may occupy a thread.
const UNAUTHENTICATED_TIMEOUT: Duration = Duration::from_secs(10);
/// More than a [`SharedDirect`] requests at a time.
const MOST_ANSWER_BYTES: usize = 16 << 20;
/// The locks of outsiders begin here, above those of semaphores.
const CLIENT_LOCKS: u64 = OWN_LOCKS + (1 << 32);
/// The longest that a finished rank waits for outsiders that do not take their answers.
const LAST_ANSWER: Duration = Duration::from_secs(2);
/// How often a rank's listener checks whether the run is over.
const LOOK: Duration = Duration::from_millis(500);
/// When all ranks are at a barrier, they are asked again after this.
const RETRY: Duration = Duration::from_micros(200);
/// The length of a ticket's secret.
const SECRET_BYTES: usize = 16;
/// The length of a rank's address in the list of all.
const ADDRESS_BYTES: usize = 256;

/// The addresses of a run's listeners for outsiders, and a secret that admits them: enough from this machine,
/// and from beyond it together with the key. As text it can be given to other processes; any process that
/// reads it is admitted.
#[derive(Clone, PartialEq, Eq)]
pub struct OutsideTicket {
    listeners: Vec<Endpoint>,
    secret: String,
}

impl fmt::Debug for OutsideTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutsideTicket").field("listeners", &self.listeners).finish_non_exhaustive()
    }
}

impl fmt::Display for OutsideTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listeners: Vec<String> = self.listeners.iter().map(ToString::to_string).collect();
        write!(f, "{}#{}", listeners.join(","), self.secret)
    }
}

/// A text that is not an [`OutsideTicket`].
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not a ticket for a run: write HOST:PORT,HOST:PORT#SECRET, as Shared::listen returns it")]
pub struct OutsideTicketError {
    text: String,
    #[source]
    source: Option<EndpointError>,
}

impl FromStr for OutsideTicket {
    type Err = OutsideTicketError;

    fn from_str(text: &str) -> Result<Self, OutsideTicketError> {
        let error = |source| OutsideTicketError { text: text.to_owned(), source };
        let (listeners, secret) = text.split_once('#').ok_or_else(|| error(None))?;
        let listeners = listeners
            .split(',')
            .map(|address| address.parse().map_err(|source| error(Some(source))))
            .collect::<Result<_, _>>()?;
        Ok(Self { listeners, secret: secret.to_owned() })
    }
}

/// Why a rank cannot listen for outsiders.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutsideListenError {
    #[error("rank {rank} cannot listen on {address}: {source}")]
    Listen { rank: u16, address: String, source: std::io::Error },
    #[error("rank {rank}: {address} is not an address to listen on for outsiders: write HOST:PORT, of at most {} bytes", ADDRESS_BYTES - 1)]
    Address { rank: u16, address: String },
    /// It would be in the ticket, and lead other machines to themselves.
    #[error(
        "rank {rank}: {address} means every interface; name the address at which other machines reach this one"
    )]
    Everywhere { rank: u16, address: String },
    #[error("rank {rank}: cannot start a thread: {source}")]
    Thread { rank: u16, source: std::io::Error },
    #[error("the ranks could not exchange the addresses of their listeners: {0}")]
    Exchange(Box<super::SharedDirectError>),
}

impl From<SharedError> for OutsideListenError {
    fn from(error: SharedError) -> Self {
        Self::Exchange(Box::new(error.into()))
    }
}

/// Regions that outsiders may use, by name.
pub(super) type Published = Mutex<BTreeMap<String, PagesOfRegion>>;

/// Outsiders whose requests came and are not answered yet. The ranks see their effects before the answer has
/// left: the last of them may end the run.
#[derive(Default)]
pub(super) struct Answering {
    count: Mutex<usize>,
    fewer: Condvar,
}

impl Answering {
    fn begin(&self) -> AnswerDue<'_> {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        AnswerDue(self)
    }

    /// Blocks until all are answered, at most as long as an outsider may delay a finished rank.
    pub(super) fn wait_for_all(&self) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        // A timeout does not matter: an outsider that does not take its answer gets none.
        drop(self.fewer.wait_timeout_while(count, LAST_ANSWER, |count| *count > 0));
    }
}

struct AnswerDue<'a>(&'a Answering);

impl Drop for AnswerDue<'_> {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.fewer.notify_all();
    }
}

impl Shared {
    /// Lets other processes use published regions directly. Every rank makes the same call, by one thread,
    /// each with an address of its own to listen on (`HOST:PORT`; port 0 lets the kernel choose) at which
    /// others reach it; the answer is the same on all. Blocks until all have called. The listeners close when
    /// the run ends.
    ///
    /// An outsider has to show the ticket's secret, which is made for this call; from another machine, where
    /// the run has a key, it proves the key.
    ///
    /// # Errors
    /// If this rank cannot listen, or the run is over.
    pub fn listen(&self, listen: &str) -> Result<OutsideTicket, OutsideListenError> {
        let rank = self.rank();
        let bad = || OutsideListenError::Address { rank, address: listen.to_owned() };
        let endpoint: Endpoint = listen.parse().map_err(|_| bad())?;
        let Endpoint::Tcp { host, .. } = &endpoint else { return Err(bad()) };
        if host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified()) {
            return Err(OutsideListenError::Everywhere { rank, address: listen.to_owned() });
        }
        let listener = Listener::bind(&endpoint).map_err(|source| OutsideListenError::Listen {
            rank,
            address: listen.to_owned(),
            source,
        })?;
        let address = listener.endpoint().to_string();
        if address.len() >= ADDRESS_BYTES {
            return Err(bad());
        }
        // Each rank writes its address into shared memory, and rank 0 the secret. The second allocation
        // completes when all have done that.
        let options = AllocOptions::new().protocol(ProtocolKind::Hlrc);
        let list = self.alloc((usize::from(self.ranks()) + 1) * ADDRESS_BYTES, options)?;
        let exchanged = |error| OutsideListenError::Exchange(Box::new(error));
        let there = self.direct(list)?;
        let slot = |rank: u16| u64::from(rank) * ADDRESS_BYTES as u64;
        there.put(slot(rank), address.as_bytes()).map_err(exchanged)?;
        if rank == 0 {
            let secret: [u8; SECRET_BYTES] = random_bytes();
            there.put(slot(self.ranks()), &secret).map_err(exchanged)?;
        }
        let all_have = self.alloc(1, options)?;
        let mut listeners = Vec::with_capacity(usize::from(self.ranks()));
        for rank in 0..self.ranks() {
            let mut text = [0; ADDRESS_BYTES];
            there.get(slot(rank), &mut text).map_err(exchanged)?;
            let text = String::from_utf8_lossy(text.split(|&byte| byte == 0).next().unwrap_or_default())
                .into_owned();
            listeners.push(text.parse().map_err(|_| OutsideListenError::Address { rank, address: text })?);
        }
        let mut secret = [0; SECRET_BYTES];
        there.get(slot(self.ranks()), &mut secret).map_err(exchanged)?;
        let secret = Arc::<str>::from(secret.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        self.free(all_have)?;
        self.free(list)?;
        let (host, ticket) = (self.clone(), OutsideTicket { listeners, secret: secret.to_string() });
        Inner::start_thread("rampool-listen", move || admit_outside_clients(&host, &listener, &secret))
            .map_err(|source| OutsideListenError::Thread { rank, source })?;
        Ok(ticket)
    }

    /// Lets outsiders use this region, by a name, until this rank frees it. Every rank makes the call; an
    /// outsider may ask any of them.
    ///
    /// # Errors
    /// If the region is not allocated.
    pub fn publish(&self, name: &str, region: Region) -> Result<(), SharedError> {
        let place = self.pages_of(region)?;
        self.published().insert(name.to_owned(), place);
        Ok(())
    }

    /// The region that begins there is freed: another region may get its pages.
    pub(super) fn withdraw(&self, first: PageIndex) {
        self.published().retain(|_, place| place.first != first);
    }

    fn published(&self) -> MutexGuard<'_, BTreeMap<String, PagesOfRegion>> {
        self.inner.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn policy(&self) -> LocalPolicy {
        LocalPolicy {
            key: self.config().key.clone(),
            encryption: self.config().encryption,
            features: 0,
            ucx: None,
        }
    }

    /// Serves an outsider's request.
    fn serve(&self, client: u32, asked: Control) -> Control {
        match asked {
            Control::Open { name } => match self.published().get(&name) {
                Some(&PagesOfRegion { first, page_bytes, bytes }) => {
                    Control::Opened { first, page_bytes, bytes }
                }
                None => Control::NotDone {
                    why: format!("{} has published no region {name:?}", Rank(self.rank())),
                },
            },
            Control::Do { accesses, moved } => {
                let all_published = {
                    let published = self.published();
                    accesses.iter().all(|one| published.values().any(|place| place.holds(one.page)))
                };
                if !all_published {
                    return Control::NotDone {
                        why: format!("{} has not published those pages", Rank(self.rank())),
                    };
                }
                if accesses.iter().map(|one| one.access.answer_bytes()).sum::<usize>() > MOST_ANSWER_BYTES {
                    return Control::NotDone {
                        why: format!("more than {MOST_ANSWER_BYTES} bytes are asked for at a time"),
                    };
                }
                let under = (moved || accesses.iter().any(|one| one.access.writes()))
                    .then_some(LockId(CLIENT_LOCKS + u64::from(client)));
                match self.carry_out(Waiting::Direct, accesses.into(), under, false) {
                    Ok(Some(bytes)) => Control::Did { bytes },
                    Ok(None) => Control::Busy {},
                    Err(error) => Control::NotDone { why: error.to_string() },
                }
            }
            other => Control::NotDone { why: format!("an outsider cannot send {other:?}") },
        }
    }

    fn is_over(&self) -> bool {
        self.inner.finished.load(Ordering::Acquire) || self.inner.lock().has_stopped()
    }
}

/// Sockets of those that have not shown the secret yet, in the order in which they came.
#[derive(Default)]
struct Unauthenticated(Mutex<BTreeMap<u64, OwnedFd>>);

impl Unauthenticated {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn came(&self, number: u64, socket: &impl AsFd) {
        // Without a descriptor for it, it cannot make room.
        if let Ok(socket) = socket.as_fd().try_clone_to_owned() {
            self.waiting().insert(number, socket);
        }
    }

    /// It has shown the secret, or is gone.
    fn is_known(&self, number: u64) {
        self.waiting().remove(&number);
    }

    /// Ends the connection of the oldest. False: there is none.
    fn make_room(&self) -> bool {
        let Some((_, socket)) = self.waiting().pop_first() else { return false };
        // The thread that waits for it sees its end.
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        true
    }
}

/// Admits outsiders until the run is over.
fn admit_outside_clients(shared: &Shared, listener: &Listener, secret: &Arc<str>) {
    let clients = Arc::new(AtomicUsize::new(0));
    let strangers = Arc::new(Unauthenticated::default());
    let mut number = 0;
    while !shared.is_over() {
        if !readable(listener, Instant::now() + LOOK) {
            continue;
        }
        let stream = match listener.accept() {
            Ok(Some(stream)) => stream,
            Ok(None) => continue,
            Err(error) => {
                // For example without descriptors: without a pause it would be tried again at once, and for
                // ever.
                tracing::debug!(%error, "an outsider could not be accepted");
                std::thread::sleep(LOOK);
                continue;
            }
        };
        let others = clients.fetch_add(1, Ordering::Relaxed);
        if others >= 2 * MOST_CLIENTS || (others >= MOST_CLIENTS && !strangers.make_room()) {
            clients.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!(
                "an outsider at {} was rejected: {MOST_CLIENTS} are connected already",
                stream.peer()
            );
            continue;
        }
        let (host, count, secret) = (shared.clone(), Arc::clone(&clients), Arc::clone(secret));
        number += 1;
        strangers.came(number, &stream);
        let serve = {
            let strangers = Arc::clone(&strangers);
            move || {
                let from = stream.peer().to_string();
                if let Err(why) = receive(&host, stream, &secret, || strangers.is_known(number)) {
                    tracing::warn!("an outsider at {from} has gone: {why}");
                }
                strangers.is_known(number);
                count.fetch_sub(1, Ordering::Relaxed);
            }
        };
        if let Err(error) = Inner::start_thread("rampool-outside", serve) {
            clients.fetch_sub(1, Ordering::Relaxed);
            strangers.is_known(number);
            tracing::warn!("an outsider was rejected: cannot start a thread: {error}");
        }
    }
}

/// Serves one outsider, from its first message to its last. `is_known`: it has shown the secret.
fn receive(shared: &Shared, stream: Stream, secret: &str, is_known: impl FnOnce()) -> Result<(), String> {
    if is_another_user(stream.peer()) {
        return Err("it is another user's".to_owned());
    }
    let deadline = Instant::now() + UNAUTHENTICATED_TIMEOUT;
    let mut line = shake(Handshake::server(stream, shared.policy(), None), deadline)
        .map_err(|error| error.to_string())?;
    let mut number = 0;
    let answer = match line.wait_control(deadline).map_err(|error| error.to_string())? {
        Some(Control::Visit { wire, .. }) if wire != SHARE_WIRE_VERSION => {
            let why = format!(
                "the run speaks sharing protocol {SHARE_WIRE_VERSION}, this process {wire}: both must be the same version of rampool"
            );
            Control::Refused { why }
        }
        Some(Control::Visit { secret: shown, client, .. }) if is_same(&shown, secret) => {
            number = client;
            is_known();
            Control::Welcome {}
        }
        Some(Control::Visit { .. }) => Control::Refused { why: "it belongs to another run".to_owned() },
        other => return Err(format!("its first word is {other:?}")),
    };
    let welcome = answer == (Control::Welcome {});
    say(&mut line, &answer, deadline).map_err(|error| error.to_string())?;
    while welcome && !shared.is_over() {
        match line.wait_control(Instant::now() + LOOK) {
            Ok(Some(asked)) => {
                let _due = shared.inner.answering.begin();
                say(&mut line, &shared.serve(number, asked), Instant::now() + UNAUTHENTICATED_TIMEOUT)
                    .map_err(|error| error.to_string())?
            }
            Ok(None) => {}
            Err(LineError::Closed) => break,
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}

/// Compares in constant time for texts of one length.
fn is_same(one: &str, other: &str) -> bool {
    one.len() == other.len() && one.bytes().zip(other.bytes()).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn say(line: &mut Line, what: &Control, deadline: Instant) -> Result<(), LineError> {
    line.queue_control(what);
    if line.flush_until(deadline)? { Ok(()) } else { Err(LineError::Io(std::io::ErrorKind::TimedOut.into())) }
}

/// Why an outsider's operation failed. The address names the rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutsideError {
    #[error("the run at {address}: {source} (from another machine, the run's key is needed)")]
    Handshake { address: String, source: HandshakeError },
    #[error("the run at {address}, {operation}: {source}")]
    Line { address: String, operation: &'static str, source: LineError },
    #[error("the run at {address} refuses: {why}")]
    Refused { address: String, why: String },
    #[error("the run at {address} sends an unexpected answer ({operation})")]
    Unexpected { address: String, operation: &'static str },
    #[error("{operation}: no answer from the run within {seconds} s")]
    TimedOut { operation: &'static str, seconds: u64 },
}

/// Settings for connecting to a run from outside.
#[derive(Clone, Debug)]
pub struct OutsideConfig {
    /// The ranks' key ([`SharedConfig::key`](super::SharedConfig::key)); not needed from the same machine.
    pub key: Option<Key>,
    pub encryption: Encryption,
    /// An operation that takes longer fails.
    pub deadline: Duration,
}

impl Default for OutsideConfig {
    fn default() -> Self {
        Self { key: None, encryption: Encryption::default(), deadline: Duration::from_secs(60) }
    }
}

/// This process, outside a run, connected to its ranks. Any thread may use it; operations of several threads
/// take turns.
#[derive(Debug)]
pub struct Outside {
    ticket: OutsideTicket,
    config: OutsideConfig,
    client: u32,
    lines: Mutex<Lines>,
}

struct Lines {
    open: Vec<Option<Line>>,
    /// The rank that was asked last.
    at: usize,
    /// The rank that did the last operation.
    did: usize,
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines").field("at", &self.at).finish_non_exhaustive()
    }
}

impl Outside {
    /// Connects to the first address of a run. Blocks at most until the deadline.
    ///
    /// # Errors
    /// [`OutsideError`], with the address.
    pub fn connect(ticket: &OutsideTicket, config: OutsideConfig) -> Result<Arc<Self>, OutsideError> {
        let open = std::iter::repeat_with(|| None).take(ticket.listeners.len()).collect();
        let client = u32::from_le_bytes(random_bytes());
        let outside =
            Self { ticket: ticket.clone(), config, client, lines: Mutex::new(Lines { open, at: 0, did: 0 }) };
        outside.line(
            &mut outside.lines.lock().unwrap_or_else(PoisonError::into_inner),
            Instant::now() + outside.config.deadline,
        )?;
        Ok(Arc::new(outside))
    }

    /// A region that the ranks have published.
    ///
    /// # Errors
    /// [`OutsideError::Refused`] if there is none of that name; others if the run is not reached.
    pub fn open(self: &Arc<Self>, name: &str) -> Result<SharedDirect, OutsideError> {
        const OPERATION: &str = "opening a region";
        let (address, answer) = self.ask(|_| Control::Open { name: name.to_owned() }, OPERATION)?;
        match answer {
            // An invalid answer would cause a panic later.
            Control::Opened { first, page_bytes, bytes }
                if page_bytes.is_power_of_two() && bytes <= 1 << 52 =>
            {
                Ok(SharedDirect::outside(Arc::clone(self), PagesOfRegion { first, page_bytes, bytes }))
            }
            _ => Err(OutsideError::Unexpected { address, operation: OPERATION }),
        }
    }

    pub(super) fn carry_out(&self, op: &DirectOp) -> Result<Arc<[u8]>, OutsideError> {
        const OPERATION: &str = "a direct operation";
        let wanted: usize = op.iter().map(|one| one.access.answer_bytes()).sum();
        let (address, answer) = self.ask(|moved| Control::Do { accesses: op.to_vec(), moved }, OPERATION)?;
        match answer {
            Control::Did { bytes } if bytes.len() == wanted => Ok(bytes),
            _ => Err(OutsideError::Unexpected { address, operation: OPERATION }),
        }
    }

    /// Asks one rank after the other until one answers.
    fn ask(
        &self,
        what: impl Fn(bool) -> Control,
        operation: &'static str,
    ) -> Result<(String, Control), OutsideError> {
        let deadline = Instant::now() + self.config.deadline;
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let timed_out = || OutsideError::TimedOut { operation, seconds: self.config.deadline.as_secs() };
        let mut busy = 0;
        loop {
            let at = lines.at;
            let address = self.ticket.listeners[at].to_string();
            let what = what(at != lines.did);
            let line = self.line(&mut lines, deadline)?;
            let answer = say(line, &what, deadline).and_then(|()| line.wait_control(deadline));
            if !matches!(answer, Ok(Some(_))) {
                // A late answer would be taken for that of the next question.
                lines.open[at] = None;
            }
            match answer {
                Ok(Some(Control::Busy {})) => {
                    lines.at = (at + 1) % self.ticket.listeners.len();
                    busy += 1;
                    if busy % self.ticket.listeners.len() == 0 {
                        std::thread::sleep(RETRY);
                    }
                    if Instant::now() >= deadline {
                        return Err(timed_out());
                    }
                }
                Ok(Some(Control::NotDone { why })) => return Err(OutsideError::Refused { address, why }),
                Ok(Some(answer)) => {
                    lines.did = if matches!(answer, Control::Did { .. }) { at } else { lines.did };
                    return Ok((address, answer));
                }
                Ok(None) => return Err(timed_out()),
                Err(source) => return Err(OutsideError::Line { address, operation, source }),
            }
        }
    }

    /// The connection to the next rank in turn.
    fn line<'a>(&self, lines: &'a mut Lines, deadline: Instant) -> Result<&'a mut Line, OutsideError> {
        const OPERATION: &str = "coming in";
        let at = lines.at;
        if lines.open[at].is_none() {
            let endpoint = &self.ticket.listeners[at];
            let address = || endpoint.to_string();
            let shaken =
                Stream::connect(endpoint, deadline).map_err(HandshakeError::Connect).and_then(|stream| {
                    let policy = LocalPolicy {
                        key: self.config.key.clone(),
                        encryption: self.config.encryption,
                        features: 0,
                        ucx: None,
                    };
                    shake(Handshake::client(stream, policy), deadline)
                });
            let mut line = shaken.map_err(|source| OutsideError::Handshake { address: address(), source })?;
            let visit = Control::Visit {
                wire: SHARE_WIRE_VERSION,
                secret: self.ticket.secret.clone(),
                client: self.client,
            };
            let answer = say(&mut line, &visit, deadline).and_then(|()| line.wait_control(deadline));
            match answer.map_err(|source| OutsideError::Line {
                address: address(),
                operation: OPERATION,
                source,
            })? {
                Some(Control::Welcome {}) => lines.open[at] = Some(line),
                Some(Control::Refused { why }) => {
                    return Err(OutsideError::Refused { address: address(), why });
                }
                Some(_) => return Err(OutsideError::Unexpected { address: address(), operation: OPERATION }),
                None => {
                    return Err(OutsideError::TimedOut {
                        operation: OPERATION,
                        seconds: self.config.deadline.as_secs(),
                    });
                }
            }
        }
        Ok(lines.open[at].as_mut().expect("just opened"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_survives_its_text_and_what_is_none_is_refused() {
        let text = "127.0.0.1:4000,host-2:4001,[::1]:7#run 7#x";
        let ticket: OutsideTicket = text.parse().unwrap();
        assert_eq!(
            (ticket.listeners.len(), ticket.secret.as_str(), ticket.to_string().as_str()),
            (3, "run 7#x", text)
        );
        for bad in ["", "127.0.0.1:4000", "#run", "127.0.0.1#run", "127.0.0.1:1,#run"] {
            let error = bad.parse::<OutsideTicket>().unwrap_err().to_string();
            assert!(error.contains("HOST:PORT"), "{error}");
        }
    }
}
