//! One connection to another rank, over TCP or through shared memory: frames in and out of a byte stream,
//! plain or sealed. Never blocks.
//!
//! A TCP connection may be cut; frames then wait here until another connection replaces it
//! ([`rampool_sharing::stream`]).

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use rampool_sharing::control::{Control, FrameKind, Framed, deframe};
use rampool_sharing::stream::{Limits, Stream};
use rampool_sharing::{Malformed, Message};

use rampool_net::transport::{
    Carrier, Glance, MAX_MESSAGE_BYTES, MAX_PLAIN_BYTES, Means, Peer, Seal, TAG_BYTES,
};

/// Why a connection is broken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    #[error("its connection closed")]
    Closed,
    #[error("its connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Malformed(#[from] Malformed),
    #[error("its bytes are not authentic")]
    NotAuthentic,
}

/// The content of a frame.
#[derive(Debug)]
pub enum Incoming {
    Message(Message),
    Control(Control),
}

/// Sealed bytes to send; the first `done` have left.
#[derive(Debug, Default)]
struct Outgoing {
    bytes: Vec<u8>,
    done: usize,
}

impl Outgoing {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.done..]
    }

    fn take(&mut self, count: usize) {
        self.done += count;
        if self.done == self.bytes.len() {
            self.bytes.clear();
            self.done = 0;
            // A single large message must not hold its buffer for ever.
            if self.bytes.capacity() > MOST_IDLE_BYTES {
                self.bytes.shrink_to(READ_BYTES);
            }
        }
    }

    /// Moves the rest to the front, if that frees enough room.
    fn compact(&mut self) {
        if self.done > READ_BYTES && self.done * 2 > self.bytes.len() {
            self.bytes.drain(..self.done);
            self.done = 0;
        }
    }
}

/// Received bytes: `bytes[done..filled]` are unread; the rest behind is room.
#[derive(Debug, Default)]
struct Arrived {
    bytes: Vec<u8>,
    done: usize,
    filled: usize,
}

impl Arrived {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.done..self.filled]
    }

    fn take(&mut self, count: usize) {
        self.done += count;
        if self.done == self.filled {
            self.done = 0;
            self.filled = 0;
            if self.bytes.len() > MOST_IDLE_BYTES {
                self.bytes = Vec::new();
            }
        }
    }

    /// Room for at least this many bytes more.
    fn room(&mut self, wanted: usize) -> &mut [u8] {
        if self.bytes.len() - self.filled < wanted {
            self.bytes.copy_within(self.done..self.filled, 0);
            self.filled -= self.done;
            self.done = 0;
            let len = (self.filled + wanted).max(READ_BYTES);
            if self.bytes.len() < len {
                self.bytes.resize(len.next_power_of_two(), 0);
            }
        }
        &mut self.bytes[self.filled..]
    }
}

/// The least that is read from the kernel at once.
const READ_BYTES: usize = 64 << 10;
/// While a thread polls, sleepers are woken when this much is there: more than arrives at once, as long as it
/// is taken.
const QUIET_BYTES: usize = 256 << 10;
/// The most that counts as little and may stay in the socket ([`Stay`]).
const LITTLE_BYTES: usize = 1 << 10;
/// After this many equal amounts in the socket at the end of polling, that amount is expected the next time.
const ALIKE: u8 = 3;
/// The most that is sealed before the kernel takes it.
const MOST_SEALED_BYTES: usize = 1 << 20;
/// The most room that an empty buffer keeps.
const MOST_IDLE_BYTES: usize = 4 << 20;

/// Which received bytes may stay in the socket for a while, over TCP: short ones only, until
/// [`Line::empty_socket`] or the next receive. A caller that leaves bytes there makes sure that they wake no
/// thread ([`Line::rest`]), or empties the socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stay {
    Nothing,
    /// Bytes that follow an unanswered message. The second time the read that takes them out of the socket
    /// would make the kernel acknowledge both, by a segment of its own: 1 us during which a thread waits. The
    /// answer acknowledges them.
    BehindUnanswered,
    /// Those, and bytes that follow a short message: they are taken out of the socket when no thread waits.
    Little,
}

/// The number of bytes in the socket from which the kernel wakes its sleepers, if it is told at all.
///
/// A polling thread needs no wake-ups. Either the socket is made *quiet*, by a call each time; or only the
/// same bytes come as the last times, and stay in the socket: then `bytes` is one more than that, so that
/// after polling the next byte wakes a sleeper, and no call is needed at all.
#[derive(Debug)]
struct WakesFrom {
    bytes: usize,
    /// The amount in the socket when polling last ended, and how often in a row.
    rested: usize,
    alike: u8,
    /// Bytes have come since polling began.
    came: bool,
}

impl WakesFrom {
    /// Whether the same amount as the last times is expected, and wakes no thread.
    fn is_expected(&self) -> bool {
        self.alike >= ALIKE && self.rested > 1 && self.bytes == self.rested
    }
}

/// A connection.
pub(super) struct Line {
    /// `None`: it was cut.
    carrier: Option<Carrier>,
    peer: Peer,
    means: Means,
    local: bool,
    seal: Option<Seal>,
    /// Encrypted bytes as received, where the connection is sealed.
    ciphertext: Arrived,
    plain: Arrived,
    /// Frames to send and frames that may have to be sent again, and, where the connection is sealed, the
    /// sealed form of those that have left.
    stream: Stream,
    sealed: Outgoing,
    /// Bytes that have come since this end last sent.
    unanswered: usize,
    /// Bytes that have been read but are in the socket still.
    seen: usize,
    /// Bytes that came last.
    came: usize,
    wakes_from: WakesFrom,
}

impl Line {
    pub fn new(carrier: Carrier, seal: Option<Seal>) -> Self {
        Self {
            peer: carrier.stream().peer().clone(),
            means: carrier.means(),
            local: carrier.stream().is_local(),
            carrier: Some(carrier),
            seal,
            ciphertext: Arrived::default(),
            plain: Arrived::default(),
            stream: Stream::new(None),
            sealed: Outgoing::default(),
            unanswered: 0,
            seen: 0,
            came: 0,
            wakes_from: WakesFrom { bytes: 1, rested: 1, alike: 0, came: false },
        }
    }

    /// From now on sent frames are kept, so that another connection can replace this one. Both ends call this
    /// at the same place in their streams, with nothing queued.
    pub fn keep(&mut self) {
        self.stream = Stream::new(Some(Limits::default()));
    }

    /// The connection is broken; kept frames stay.
    pub fn cut(&mut self) {
        self.carrier = None;
    }

    pub fn is_cut(&self) -> bool {
        self.carrier.is_none()
    }

    /// The place in the stream up to which this rank has received, as the other end counts it.
    pub fn received(&self) -> u64 {
        self.stream.received()
    }

    /// Continues over another connection, which has carried only the agreement to do so; the other end has
    /// received this many bytes.
    pub fn resume(&mut self, other: Self, peer_has: u64) -> Result<(), LineError> {
        self.stream.resume(peer_has)?;
        // A partly received frame comes again, from its beginning.
        let stream = std::mem::replace(&mut self.stream, Stream::new(None));
        *self = Self { stream, sealed: Outgoing::default(), ..other };
        Ok(())
    }

    /// The other end waits for an acknowledgement.
    pub fn answer_now(&mut self) {
        self.stream.answer_now();
    }

    /// Whether the other end is owed an acknowledgement, although there may be nothing else to send.
    pub fn owes_answer(&self) -> bool {
        self.stream.owes_answer()
    }

    /// Whether queued frames may leave only after the other end's acknowledgement.
    pub fn is_held_back(&self) -> bool {
        self.stream.is_held_back()
    }

    /// The end of the frames queued so far, and whether the other end has received everything before such a
    /// place.
    pub fn end(&self) -> u64 {
        self.stream.end()
    }

    pub fn has_arrived(&self, end: u64) -> bool {
        self.stream.has_arrived(end)
    }

    /// The descriptor to sleep on; `None` while it is cut.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.carrier.as_ref().map(|carrier| carrier.descriptor())
    }

    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Whether the other rank is on this machine, by its address.
    pub fn is_local(&self) -> bool {
        self.local
    }

    pub fn means(&self) -> Means {
        self.means
    }

    /// Whether polling the connection costs no system call, and whether the other end must be told before a
    /// thread sleeps on it ([`Line::may_sleep`]).
    pub fn is_shared_memory(&self) -> bool {
        self.means() == Means::RINGS
    }

    /// Shows without a system call whether something can be received, if that is possible.
    pub fn glance(&self) -> Option<Glance> {
        self.carrier.as_ref()?.glance()
    }

    /// Whether the connection is encrypted.
    pub fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }

    /// Returns the frame's bytes.
    pub fn queue_message(&mut self, message: &Message) -> usize {
        self.stream.queue(FrameKind::Message, |out| message.encode(out))
    }

    pub fn queue_control(&mut self, control: &Control) {
        self.stream.queue(FrameKind::Control, |out| control.encode(out));
    }

    /// Whether frames wait to be sent.
    pub fn has_backlog(&self) -> bool {
        self.stream.waits() || !self.sealed.rest().is_empty()
    }

    /// Bytes of frames that wait to be sent.
    pub fn queued_bytes(&self) -> u64 {
        self.stream.waiting()
    }

    /// Tells the other end that a thread is about to sleep until bytes come, or there is room for queued
    /// frames. Every other call takes that back. False: there is something already.
    pub fn may_sleep(&self) -> bool {
        let writing = self.has_backlog();
        self.carrier.as_ref().is_none_or(|carrier| {
            carrier.has_said_that_it_sleeps(true, writing) || carrier.may_sleep(true, writing)
        })
    }

    /// Over TCP: a thread polls from now on. Arriving bytes wake no thread, or only unexpected bytes do. The
    /// end of the connection always does.
    pub fn set_quiet(&mut self) {
        // The next receive reports a failure.
        let _ = self.empty_socket();
        self.wakes_from.came = false;
        if !self.wakes_from.is_expected() {
            self.wake_from(QUIET_BYTES);
        }
    }

    /// Over TCP: polling has ended. From now on arriving bytes wake a sleeper; bytes that are there already
    /// wake it now.
    pub fn rest(&mut self) {
        let bytes = self.seen + 1;
        if self.wakes_from.came {
            self.wakes_from.came = false;
            self.wakes_from.alike =
                if bytes == self.wakes_from.rested { self.wakes_from.alike.saturating_add(1) } else { 0 };
            self.wakes_from.rested = bytes;
        }
        self.wake_from(bytes);
    }

    fn wake_from(&mut self, bytes: usize) {
        if self.wakes_from.bytes != bytes
            && let Some(carrier) = &self.carrier
        {
            if self.means == Means::TCP {
                carrier.stream().wake_from(i32::try_from(bytes).expect("little"));
            }
            self.wakes_from.bytes = bytes;
        }
    }

    /// Takes received bytes that were left in the socket out of it.
    pub fn empty_socket(&mut self) -> Result<(), LineError> {
        let Some(carrier) = self.carrier.as_mut().filter(|_| self.seen > 0) else { return Ok(()) };
        match carrier.stream().discard(self.seen)? {
            // Not while they are there.
            Some(0) => return Err(LineError::Closed),
            gone => self.seen -= gone.unwrap_or(0),
        }
        Ok(())
    }

    /// Whether to ask epoll for room to send. Otherwise room shows as something to read.
    pub fn shows_room(&self) -> bool {
        self.carrier.as_ref().is_some_and(|carrier| carrier.asks_kernel())
    }

    /// Sends as much as may be sent, and the kernel takes now. True if the kernel took all of that.
    pub fn flush(&mut self) -> Result<bool, LineError> {
        let Some(carrier) = &mut self.carrier else { return Ok(true) };
        loop {
            if let Some(seal) = &mut self.seal {
                while self.sealed.rest().len() < MOST_SEALED_BYTES {
                    let piece = self.stream.front();
                    let len = piece.len().min(MAX_PLAIN_BYTES);
                    if len == 0 {
                        break;
                    }
                    seal.seal(&piece[..len], &mut self.sealed.bytes);
                    self.stream.sent(len);
                }
            }
            let rest = if self.seal.is_some() { self.sealed.rest() } else { self.stream.front() };
            if rest.is_empty() {
                return Ok(true);
            }
            match carrier.send_from(rest)? {
                Some(sent) => {
                    self.unanswered = 0;
                    if self.seal.is_some() { self.sealed.take(sent) } else { self.stream.sent(sent) }
                }
                None => {
                    self.sealed.compact();
                    return Ok(false);
                }
            }
        }
    }

    /// As [`Line::flush`], but wakes no peer: [`Line::ring`] does that later.
    pub fn flush_quietly(&mut self) -> Result<bool, LineError> {
        self.hold_doorbell(true);
        let flushed = self.flush();
        self.hold_doorbell(false);
        flushed
    }

    fn hold_doorbell(&mut self, held: bool) {
        if let Some(carrier) = &mut self.carrier {
            carrier.hold_doorbell(held);
        }
    }

    /// Wakes the peer if it sleeps and has not taken everything.
    pub fn ring(&self) {
        if let Some(carrier) = &self.carrier {
            carrier.ring();
        }
    }

    /// Sends everything, or gives up at the deadline.
    pub fn flush_until(&mut self, deadline: Instant) -> Result<bool, LineError> {
        while !self.flush()? {
            if !self.wait(true, deadline)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn wait(&self, write: bool, deadline: Instant) -> Result<bool, LineError> {
        Ok(self.carrier.as_ref().ok_or(LineError::Closed)?.wait(write, deadline)?)
    }

    /// Takes everything that has arrived. False if nothing has. After an error, whole frames that came before
    /// it can still be read.
    pub fn receive(&mut self, stay: Stay) -> Result<bool, LineError> {
        self.empty_socket()?;
        if stay == Stay::Little && self.wakes_from.came {
            // The awaited message was not in it.
            self.wake_from(QUIET_BYTES);
        }
        let Some(carrier) = self.carrier.as_mut().filter(|_| self.seen == 0) else { return Ok(false) };
        let into = if self.seal.is_some() { &mut self.ciphertext } else { &mut self.plain };
        let is_behind = (1..=LITTLE_BYTES).contains(&self.unanswered);
        let may_stay = match stay {
            Stay::Nothing => false,
            Stay::BehindUnanswered => is_behind,
            Stay::Little => is_behind || self.came <= LITTLE_BYTES,
        };
        let stays = may_stay && self.means == Means::TCP;
        let room = into.room(READ_BYTES / 2);
        match if stays { carrier.stream().peek_into(room)? } else { carrier.receive_into(room)? } {
            None => return Ok(false),
            Some(0) => return Err(LineError::Closed),
            Some(got) => {
                into.filled += got;
                self.unanswered += got;
                self.came = got;
                self.wakes_from.came = true;
                self.seen = if stays { got } else { 0 };
            }
        }
        if self.seen > LITTLE_BYTES {
            self.empty_socket()?;
        }
        if let Some(seal) = &mut self.seal {
            while let Some((head, rest)) = self.ciphertext.rest().split_first_chunk::<2>() {
                let len = usize::from(u16::from_le_bytes(*head));
                if !(TAG_BYTES..=MAX_MESSAGE_BYTES).contains(&len) {
                    return Err(LineError::NotAuthentic);
                }
                let Some(message) = rest.get(..len) else { break };
                let plain = &mut self.plain.room(len - TAG_BYTES)[..len - TAG_BYTES];
                seal.open(message, plain).map_err(|_| LineError::NotAuthentic)?;
                self.plain.filled += len - TAG_BYTES;
                self.ciphertext.take(2 + len);
            }
        }
        Ok(true)
    }

    /// The next whole frame.
    pub fn next(&mut self) -> Result<Option<Incoming>, LineError> {
        loop {
            let Framed::Whole { kind, has, content, taken } = deframe(self.plain.rest())? else {
                return Ok(None);
            };
            let incoming = match kind {
                FrameKind::Message => Some(Incoming::Message(Message::decode(content)?)),
                FrameKind::Control => Some(Incoming::Control(Control::decode(content)?)),
                FrameKind::Acknowledgement => None,
            };
            self.stream.came(kind, taken, has)?;
            self.plain.take(taken);
            if incoming.is_some() {
                return Ok(incoming);
            }
        }
    }

    /// Waits for one control message, while ranks meet.
    pub fn wait_control(&mut self, deadline: Instant) -> Result<Option<Control>, LineError> {
        loop {
            match self.next()? {
                Some(Incoming::Control(control)) => return Ok(Some(control)),
                Some(Incoming::Message(_)) => {
                    return Err(Malformed { what: "a message before the ranks have met", at: 0 }.into());
                }
                None => {}
            }
            if !self.receive(Stay::Nothing)? && !self.wait(false, deadline)? {
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use rampool_net::transport;

    /// Longer than any wait here takes.
    const LONG: Duration = Duration::from_secs(60);

    /// The two ends of a TCP connection.
    fn pair() -> (Line, Line) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let [near, far] = [near, far]
            .map(|stream| Line::new(transport::carried_by(transport::Stream::adopt(stream).unwrap()), None));
        (near, far)
    }

    fn say(line: &mut Line, what: &str) {
        line.queue_control(&Control::NotDone { why: what.to_owned() });
        assert!(line.flush_until(Instant::now() + LONG).unwrap());
    }

    /// The messages heard so far, once some have arrived.
    fn hear(line: &mut Line) -> Vec<String> {
        hear_leaving(line, Stay::BehindUnanswered)
    }

    fn hear_leaving(line: &mut Line, stay: Stay) -> Vec<String> {
        let deadline = Instant::now() + LONG;
        let mut heard = Vec::new();
        loop {
            while let Some(incoming) = line.next().unwrap() {
                let Incoming::Control(Control::NotDone { why }) = incoming else {
                    panic!("{incoming:?} was not said")
                };
                heard.push(why);
            }
            if !heard.is_empty() {
                return heard;
            }
            if !line.receive(stay).unwrap() {
                assert!(Instant::now() < deadline, "nothing comes");
            }
        }
    }

    /// Whether a thread that sleeps on it would be awake now.
    fn wakes(line: &Line) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&line.fd().unwrap(), PollFlags::IN)], Some(&now)).unwrap() > 0
    }

    fn is_in_socket(line: &mut Line) -> bool {
        line.carrier.as_mut().unwrap().stream().peek_into(&mut [0]).unwrap().is_some()
    }

    #[test]
    fn a_second_little_frame_stays_in_the_socket_until_the_answer_has_left_and_is_had_once() {
        let (mut near, mut far) = pair();
        say(&mut far, "first");
        assert_eq!(hear(&mut near), ["first"]);
        assert!(!is_in_socket(&mut near), "the kernel acknowledges one frame when it likes");
        say(&mut far, "second");
        assert_eq!(hear(&mut near), ["second"]);
        assert!(is_in_socket(&mut near), "the kernel would acknowledge the second before the answer leaves");
        say(&mut near, "answer");
        near.empty_socket().unwrap();
        assert!(!is_in_socket(&mut near), "read bytes wake no thread");
        assert_eq!(hear(&mut far), ["answer"]);
        for what in ["third", "fourth", "fifth", "sixth"] {
            say(&mut far, what);
            assert_eq!(hear(&mut near), [what], "the socket was not emptied in between");
        }
        assert!(!near.receive(Stay::BehindUnanswered).unwrap(), "nothing comes twice");
        assert!(!is_in_socket(&mut near));
    }

    #[test]
    fn what_stays_in_the_socket_wakes_no_thread_and_the_next_byte_does() {
        let (mut near, mut far) = pair();
        for what in ["first", "another length", "x", "x"] {
            near.set_quiet();
            say(&mut far, what);
            assert_eq!(hear_leaving(&mut near, Stay::Little), [what]);
            assert!(is_in_socket(&mut near));
            near.rest();
            assert!(!wakes(&near), "it has been read");
            say(&mut far, "y");
            assert!(near.wait(false, Instant::now() + LONG).unwrap(), "later bytes wake");
            assert_eq!(hear_leaving(&mut near, Stay::Nothing), ["y"], "and nothing comes twice");
            near.rest();
            assert!(!wakes(&near) && !is_in_socket(&mut near));
            say(&mut far, "z");
            assert!(near.wait(false, Instant::now() + LONG).unwrap());
            assert_eq!(hear_leaving(&mut near, Stay::Nothing), ["z"]);
            near.rest();
        }
    }

    /// Polls as a thread does whose wait is ended by the same answer again and again.
    fn expect_the_same(near: &mut Line, far: &mut Line) {
        for _ in 0..=ALIKE {
            near.set_quiet();
            say(far, "same");
            assert_eq!(hear_leaving(near, Stay::Little), ["same"]);
            near.rest();
        }
        let bytes = near.wakes_from.bytes;
        near.set_quiet();
        assert!(
            near.wakes_from.bytes == bytes && !is_in_socket(near),
            "no call is needed to become quiet or to end that"
        );
    }

    #[test]
    fn an_answer_like_those_before_wakes_no_sleeper_and_what_follows_does() {
        let (mut near, mut far) = pair();
        expect_the_same(&mut near, &mut far);
        say(&mut far, "same");
        assert_eq!(hear_leaving(&mut near, Stay::Little), ["same"]);
        assert!(!wakes(&near));
        let bytes = near.wakes_from.bytes;
        near.rest();
        assert_eq!(near.wakes_from.bytes, bytes);
        say(&mut far, "");
        assert!(near.wait(false, Instant::now() + LONG).unwrap());
    }

    #[test]
    fn who_looks_on_after_something_else_has_come_is_told_of_nothing() {
        let (mut near, mut far) = pair();
        expect_the_same(&mut near, &mut far);
        say(&mut far, "?");
        assert_eq!(hear_leaving(&mut near, Stay::Little), ["?"]);
        assert!(!near.receive(Stay::Little).unwrap());
        let much = "m".repeat(LITTLE_BYTES);
        say(&mut far, &much);
        let deadline = Instant::now() + LONG;
        while !is_in_socket(&mut near) {
            assert!(Instant::now() < deadline, "it comes");
        }
        assert!(!wakes(&near));
        assert_eq!(hear_leaving(&mut near, Stay::Little), [much]);
        near.rest();
        assert!(!wakes(&near));
        near.set_quiet();
        assert_eq!(near.wakes_from.bytes, QUIET_BYTES, "nothing is expected");
    }

    #[test]
    fn much_does_not_stay_in_the_socket() {
        let (mut near, mut far) = pair();
        say(&mut far, "first");
        assert_eq!(hear(&mut near), ["first"]);
        let much = "m".repeat(100 * LITTLE_BYTES);
        far.queue_control(&Control::NotDone { why: much.clone() });
        while far.has_backlog() {
            far.flush().unwrap();
            near.receive(Stay::Little).unwrap();
        }
        assert_eq!(hear(&mut near), [much]);
        assert!(!is_in_socket(&mut near), "the other end is blocked");
    }

    #[test]
    fn the_end_of_a_connection_is_seen_behind_what_stayed_in_its_socket() {
        let (mut near, mut far) = pair();
        for what in ["first", "second"] {
            say(&mut far, what);
            assert_eq!(hear(&mut near), [what]);
        }
        assert!(is_in_socket(&mut near));
        drop(far);
        assert!(near.wait(false, Instant::now() + LONG).unwrap());
        let end = loop {
            match near.receive(Stay::BehindUnanswered) {
                Ok(came) => assert!(!came, "nothing comes twice"),
                Err(end) => break end,
            }
        };
        assert!(matches!(end, LineError::Closed), "{end}");
    }
}
