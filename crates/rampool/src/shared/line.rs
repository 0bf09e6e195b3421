//! One connection to another rank, over TCP or through shared memory: frames in and out of a byte stream, plain or sealed. Never blocks.
//!
//! Over TCP it may be cut; frames then wait here until another connection takes its place ([`rampool_proto::share::stream`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rampool_proto::share::control::{Control, FrameKind, Framed, deframe};
use rampool_proto::share::stream::{Limits, Stream};
use rampool_proto::share::{Malformed, Message};

use crate::transport::{Carrier, MAX_MESSAGE_BYTES, MAX_PLAIN_BYTES, Means, Peer, Seal, TAG_BYTES};

/// Why a connection is of no use any more.
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

/// What a frame brought.
#[derive(Debug)]
pub enum Incoming {
    Message(Message),
    Control(Control),
}

/// Sealed bytes to send, of which the first `done` have left.
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
            // One large message must not hold its room for ever.
            if self.bytes.capacity() > MOST_IDLE_BYTES {
                self.bytes.shrink_to(READ_BYTES);
            }
        }
    }

    /// Moves what is left to the front, if that makes room worth having.
    fn compact(&mut self) {
        if self.done > READ_BYTES && self.done * 2 > self.bytes.len() {
            self.bytes.drain(..self.done);
            self.done = 0;
        }
    }
}

/// Bytes that came: `bytes[done..filled]` are not used up; what lies behind is room.
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

/// Asked of the kernel at once, at least.
const READ_BYTES: usize = 64 << 10;
/// Where somebody looks for what comes, those who sleep are woken when so much is there: more than comes at once, as long as it is taken.
const QUIET_BYTES: usize = 256 << 10;
/// No more than this is little: it may stay in the socket ([`Stay`]).
const LITTLE_BYTES: usize = 1 << 10;
/// So many times in a row as much has to be in the socket when nobody looks any more before that is expected the next time.
const ALIKE: u8 = 3;
/// No more is sealed ahead of what the kernel takes.
const MOST_SEALED_BYTES: usize = 1 << 20;
/// A buffer that is empty keeps no more.
const MOST_IDLE_BYTES: usize = 4 << 20;

/// What of that which is received may stay in the socket for a while, over TCP: little things only, until [`Line::empty_socket`] or the next call that receives. Who leaves something
/// there sees to it that it wakes nobody ([`Line::rest`]), or empties the socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stay {
    Nothing,
    /// What comes behind something that was not answered. The second time the call that takes it out of the socket would have the kernel acknowledge both, by a segment of its own: 1 us
    /// in which somebody waits. The answer acknowledges it.
    BehindUnanswered,
    /// That, and what comes after something little: to take it out of the socket is left for a time when nobody waits.
    Little,
}

/// From how many bytes in the socket on the kernel wakes who sleeps on it, where it is told at all.
///
/// Who looks is told of nothing if the socket is *quiet*, by a call each time; or if nothing comes but what came the last times, and stays in the socket: then `bytes` is one more than
/// that, so that the next byte wakes whoever sleeps when nobody looks any more, and no call is needed at all.
#[derive(Debug)]
struct WakesFrom {
    bytes: usize,
    /// As it was when nobody looked the last time, and how often in a row.
    rested: usize,
    alike: u8,
    /// Something has come since somebody began to look.
    came: bool,
}

impl WakesFrom {
    /// Whether what came the last times is going to come, and wakes nobody.
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
    /// As it came, where the connection is sealed.
    ciphertext: Arrived,
    plain: Arrived,
    /// Frames to send and those that may have to be sent again, and, where the connection is sealed, what became of what has left there.
    stream: Stream,
    sealed: Outgoing,
    /// Bytes that have come since something last left.
    unanswered: usize,
    /// Bytes that have been taken but are in the socket still.
    seen: usize,
    /// Bytes that came last.
    came: usize,
    wakes_from: WakesFrom,
}

impl Line {
    pub fn new(carrier: Carrier, seal: Option<Seal>) -> Self {
        Self {
            peer: carrier.peer().clone(),
            means: carrier.means(),
            local: carrier.is_local(),
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

    /// From now on what has left is kept, so that another connection can take the place of this one. Both ends say so at the same place of what they say, and nothing waits to be sent.
    pub fn keep(&mut self) {
        self.stream = Stream::new(Some(Limits::default()));
    }

    /// The connection is of no use any more; what was kept is.
    pub fn cut(&mut self) {
        self.carrier = None;
    }

    pub fn is_cut(&self) -> bool {
        self.carrier.is_none()
    }

    /// What this rank has taken, as the other end counts it.
    pub fn received(&self) -> u64 {
        self.stream.received()
    }

    /// Goes on over another connection, which nothing but the agreement to do so has passed; the other end has so many bytes.
    pub fn resume(&mut self, other: Self, peer_has: u64) -> Result<(), LineError> {
        self.stream.resume(peer_has)?;
        // What had come of a frame comes again, from its beginning.
        let stream = std::mem::replace(&mut self.stream, Stream::new(None));
        *self = Self { stream, sealed: Outgoing::default(), ..other };
        Ok(())
    }

    /// The other end waits to hear what has come.
    pub fn answer_now(&mut self) {
        self.stream.answer_now();
    }

    /// Whether the other end is to hear what has come, although there may be nothing else to say.
    pub fn owes_answer(&self) -> bool {
        self.stream.owes_answer()
    }

    /// Whether what waits may only leave when the other end has said what it has.
    pub fn is_held_back(&self) -> bool {
        self.stream.is_held_back()
    }

    /// The end of what was queued so far, and whether the other end has everything before such a place.
    pub fn end(&self) -> u64 {
        self.stream.end()
    }

    pub fn has_arrived(&self, end: u64) -> bool {
        self.stream.has_arrived(end)
    }

    /// What to sleep on; none while it is cut.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.carrier.as_ref().map(AsFd::as_fd)
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

    /// Whether to ask the connection whether something has come costs no call into the kernel, and whether it has to be told before a thread sleeps on it
    /// ([`Line::may_sleep`]).
    pub fn is_shared_memory(&self) -> bool {
        self.means() == Means::Rings
    }

    /// Whether what travels is encrypted.
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

    /// Whether something waits to be sent.
    pub fn has_backlog(&self) -> bool {
        self.stream.waits() || !self.sealed.rest().is_empty()
    }

    /// Bytes of frames that wait to be sent.
    pub fn queued_bytes(&self) -> u64 {
        self.stream.waiting()
    }

    /// Says to the other end that a thread is about to sleep until something comes, or there is room for what waits to be sent. Every other call takes that back.
    /// False: there is something already.
    pub fn may_sleep(&self) -> bool {
        let writing = self.has_backlog();
        self.carrier.as_ref().is_none_or(|carrier| carrier.has_said_that_it_sleeps(true, writing) || carrier.may_sleep(true, writing))
    }

    /// Over TCP: somebody looks for what comes from now on, and it wakes nobody, or only what is not expected does so. The end of the connection does so in any case.
    pub fn set_quiet(&mut self) {
        // What fails is seen by whoever receives next.
        let _ = self.empty_socket();
        self.wakes_from.came = false;
        if !self.wakes_from.is_expected() {
            self.wake_from(QUIET_BYTES);
        }
    }

    /// Over TCP: nobody looks any more. From now on what comes wakes who sleeps; if it is there already, now.
    pub fn rest(&mut self) {
        let bytes = self.seen + 1;
        if self.wakes_from.came {
            self.wakes_from.came = false;
            self.wakes_from.alike = if bytes == self.wakes_from.rested { self.wakes_from.alike.saturating_add(1) } else { 0 };
            self.wakes_from.rested = bytes;
        }
        self.wake_from(bytes);
    }

    fn wake_from(&mut self, bytes: usize) {
        if self.wakes_from.bytes != bytes
            && let Some(carrier) = &self.carrier
        {
            carrier.wake_from(i32::try_from(bytes).expect("little"));
            self.wakes_from.bytes = bytes;
        }
    }

    /// Takes out of the socket what was received and left there.
    pub fn empty_socket(&mut self) -> Result<(), LineError> {
        let Some(carrier) = self.carrier.as_mut().filter(|_| self.seen > 0) else { return Ok(()) };
        match carrier.discard(self.seen)? {
            // Not while they are there.
            Some(0) => return Err(LineError::Closed),
            gone => self.seen -= gone.unwrap_or(0),
        }
        Ok(())
    }

    /// Whether room for what waits to be sent is to be asked for as such. Otherwise it shows as something to read.
    pub fn shows_room(&self) -> bool {
        self.carrier.as_ref().is_some_and(Carrier::shows_room)
    }

    /// Sends what may be sent, and the kernel takes now. True if the kernel took all of that.
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

    /// Takes what has arrived. False if that was nothing. After an error, what came whole before it can still be had.
    pub fn receive(&mut self, stay: Stay) -> Result<bool, LineError> {
        self.empty_socket()?;
        if stay == Stay::Little && self.wakes_from.came {
            // It was not what ends the wait.
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
        let stays = may_stay && carrier.means() == Means::Tcp;
        let room = into.room(READ_BYTES / 2);
        match if stays { carrier.peek_into(room)? } else { carrier.receive_into(room)? } {
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

    /// The next frame that is whole.
    pub fn next(&mut self) -> Result<Option<Incoming>, LineError> {
        loop {
            let Framed::Whole { kind, has, content, taken } = deframe(self.plain.rest())? else { return Ok(None) };
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
                Some(Incoming::Message(_)) => return Err(Malformed { what: "a message before the ranks have met", at: 0 }.into()),
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
    use crate::transport;

    /// Longer than anything here takes.
    const LONG: Duration = Duration::from_secs(60);

    /// The two ends of a TCP connection.
    fn pair() -> (Line, Line) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let [near, far] = [near, far].map(|stream| Line::new(Carrier::over(transport::Stream::adopt(stream).unwrap()), None));
        (near, far)
    }

    fn say(line: &mut Line, what: &str) {
        line.queue_control(&Control::NotDone { why: what.to_owned() });
        assert!(line.flush_until(Instant::now() + LONG).unwrap());
    }

    /// What has been said, when some of that is there.
    fn hear(line: &mut Line) -> Vec<String> {
        hear_leaving(line, Stay::BehindUnanswered)
    }

    fn hear_leaving(line: &mut Line, stay: Stay) -> Vec<String> {
        let deadline = Instant::now() + LONG;
        let mut heard = Vec::new();
        loop {
            while let Some(incoming) = line.next().unwrap() {
                let Incoming::Control(Control::NotDone { why }) = incoming else { panic!("{incoming:?} was not said") };
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

    /// Whether who sleeps on it is awake now.
    fn wakes(line: &Line) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&line.fd().unwrap(), PollFlags::IN)], Some(&now)).unwrap() > 0
    }

    fn is_in_socket(line: &mut Line) -> bool {
        line.carrier.as_mut().unwrap().peek_into(&mut [0]).unwrap().is_some()
    }

    #[test]
    fn a_second_little_frame_stays_in_the_socket_until_the_answer_has_left_and_is_had_once() {
        let (mut near, mut far) = pair();
        say(&mut far, "first");
        assert_eq!(hear(&mut near), ["first"]);
        assert!(!is_in_socket(&mut near), "the kernel acknowledges one frame when it likes");
        say(&mut far, "second");
        assert_eq!(hear(&mut near), ["second"]);
        assert!(is_in_socket(&mut near), "it would acknowledge the second before the answer leaves");
        say(&mut near, "answer");
        near.empty_socket().unwrap();
        assert!(!is_in_socket(&mut near), "nobody is woken by what was had");
        assert_eq!(hear(&mut far), ["answer"]);
        for what in ["third", "fourth", "fifth", "sixth"] {
            say(&mut far, what);
            assert_eq!(hear(&mut near), [what], "nobody has emptied the socket in between");
        }
        assert!(!near.receive(Stay::BehindUnanswered).unwrap(), "nothing comes twice");
        assert!(!is_in_socket(&mut near));
    }

    #[test]
    fn what_stays_in_the_socket_wakes_nobody_and_the_next_byte_does() {
        let (mut near, mut far) = pair();
        for what in ["first", "another length", "x", "x"] {
            near.set_quiet();
            say(&mut far, what);
            assert_eq!(hear_leaving(&mut near, Stay::Little), [what]);
            assert!(is_in_socket(&mut near));
            near.rest();
            assert!(!wakes(&near), "it has been had");
            say(&mut far, "y");
            assert!(near.wait(false, Instant::now() + LONG).unwrap(), "what follows wakes");
            assert_eq!(hear_leaving(&mut near, Stay::Nothing), ["y"], "and nothing comes twice");
            near.rest();
            assert!(!wakes(&near) && !is_in_socket(&mut near));
            say(&mut far, "z");
            assert!(near.wait(false, Instant::now() + LONG).unwrap());
            assert_eq!(hear_leaving(&mut near, Stay::Nothing), ["z"]);
            near.rest();
        }
    }

    /// As one who looks does whom the same answer ends the wait of again and again.
    fn expect_the_same(near: &mut Line, far: &mut Line) {
        for _ in 0..=ALIKE {
            near.set_quiet();
            say(far, "same");
            assert_eq!(hear_leaving(near, Stay::Little), ["same"]);
            near.rest();
        }
        let bytes = near.wakes_from.bytes;
        near.set_quiet();
        assert!(near.wakes_from.bytes == bytes && !is_in_socket(near), "no call is needed to be quiet, nor to be that no more");
    }

    #[test]
    fn an_answer_like_those_before_wakes_nobody_who_sleeps_and_what_follows_does() {
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
        assert!(!is_in_socket(&mut near), "the other end is kept from sending on");
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
