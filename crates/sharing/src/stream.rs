//! One end of a connection between two ranks that may be cut: frames are kept until the other end has them,
//! so that a new connection continues where the old one ended.
//!
//! Both ends count the bytes of whole frames that they have received, and report the count in each frame that
//! they send anyway ([`super::control`]). An end that has received much and has nothing to send reports it in
//! a frame of its own, which is not counted. After a cut each end tells the other its count
//! ([`Stream::received`]); an unfinished frame comes again from its beginning ([`Stream::resume`]). So no
//! frame is lost or duplicated, and the order stays.
//!
//! The kept bytes are the send buffer: there is no second copy. It is bounded: while [`Limits::window`] bytes
//! are in flight, nothing leaves beyond the current chunk. Acknowledgements do not wait for that, or two ends
//! could wait for each other.

use std::collections::VecDeque;

use super::control::{FrameKind, frame};
use super::relink::{RelinkRule, Rules};
use super::wire::Malformed;

/// Bounds of a stream, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// With this many bytes in flight, no further chunk is begun.
    pub window: u64,
    /// An end that has received this many bytes since its last report reports again. A fraction of the
    /// window.
    pub answer: u64,
    /// Frames are kept together up to this.
    pub chunk: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { window: 4 << 20, answer: 256 << 10, chunk: 256 << 10 }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Stream {
    /// `None`: sent frames are dropped, and nothing is acknowledged. The connection cannot be cut.
    limits: Option<Limits>,
    /// Whole frames each. The first begins at position `base`.
    chunks: VecDeque<Vec<u8>>,
    base: u64,
    /// The next bytes to leave: a chunk, and a place in it.
    chunk: usize,
    offset: usize,
    /// Positions: the peer has everything before the first; everything before the second has left; the third
    /// is the end of the queue.
    acknowledged: u64,
    sent: u64,
    end: u64,
    /// An acknowledgement by itself, which leaves next, and how much of it has left.
    aside: Vec<u8>,
    aside_done: usize,
    answer_now: bool,
    /// Bytes of whole frames received from the peer; the count in the last frame, and where that frame ends;
    /// and the count that has left.
    received: u64,
    told: u64,
    told_end: u64,
    told_before: u64,
    /// A chunk for reuse.
    spare: Vec<u8>,
    rules: Rules,
}

impl Stream {
    /// A stream that can be resumed (`Some`), or drops what has left.
    #[must_use]
    pub fn new(limits: Option<Limits>) -> Self {
        Self {
            limits,
            chunks: VecDeque::from([Vec::new()]),
            base: 0,
            chunk: 0,
            offset: 0,
            acknowledged: 0,
            sent: 0,
            end: 0,
            aside: Vec::new(),
            aside_done: 0,
            answer_now: false,
            received: 0,
            told: 0,
            told_end: 0,
            told_before: 0,
            spare: Vec::new(),
            rules: Rules::default(),
        }
    }

    /// Leaves a rule out, so that a test sees the failure.
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: RelinkRule) {
        self.rules.omit(rule);
    }

    /// Queues a frame whose content `write` appends. Returns its bytes.
    pub fn queue(&mut self, kind: FrameKind, write: impl FnOnce(&mut Vec<u8>)) -> usize {
        let most = self.chunk_bytes();
        if self.chunks.back().is_some_and(|last| last.len() >= most) {
            self.chunks.push_back(std::mem::take(&mut self.spare));
        }
        let has = if self.limits.is_some() { low(self.received) } else { 0 };
        self.told_before = self.told_to_peer();
        let last = self.chunks.back_mut().expect("there is always one");
        let before = last.len();
        frame(kind, has, last, write);
        let bytes = last.len() - before;
        self.end += bytes as u64;
        self.told = self.received;
        self.told_end = self.end;
        bytes
    }

    fn chunk_bytes(&self) -> usize {
        self.limits.unwrap_or_default().chunk
    }

    /// The count that has reached the network. A frame that is held back does not report its count.
    fn told_to_peer(&self) -> u64 {
        if self.sent >= self.told_end { self.told } else { self.told_before }
    }

    /// All that was taken has been told.
    fn told_all(&mut self) {
        (self.told, self.told_end, self.told_before) = (self.received, 0, self.received);
        self.answer_now = false;
    }

    /// The next bytes to send, as many as lie in one piece. Empty: none, or none now
    /// ([`Stream::is_held_back`]).
    pub fn front(&mut self) -> &[u8] {
        if self.aside.is_empty() && self.owes_answer() && self.is_between_frames() {
            frame(FrameKind::Acknowledgement, low(self.received), &mut self.aside, |_| {});
            self.told_all();
        }
        if !self.aside.is_empty() {
            return &self.aside[self.aside_done..];
        }
        self.go_to_next_chunk();
        if self.is_held_back() { &[] } else { &self.chunks[self.chunk][self.offset..] }
    }

    /// Whether a frame may be put between others here.
    fn is_between_frames(&self) -> bool {
        self.offset == 0 || self.offset == self.chunks[self.chunk].len()
    }

    fn go_to_next_chunk(&mut self) {
        if self.offset == self.chunks[self.chunk].len() && self.chunk + 1 < self.chunks.len() {
            self.chunk += 1;
            self.offset = 0;
        }
    }

    /// This many bytes of [`Stream::front`] have left.
    pub fn sent(&mut self, bytes: usize) {
        if !self.aside.is_empty() {
            self.aside_done += bytes;
            if self.aside_done == self.aside.len() {
                self.forget_aside();
            }
            return;
        }
        self.offset += bytes;
        self.sent += bytes as u64;
        if self.limits.is_none() || !self.rules.keep(RelinkRule::Keep) {
            self.forget(self.sent);
        }
    }

    fn forget_aside(&mut self) {
        self.aside.clear();
        self.aside_done = 0;
    }

    /// Whether queued frames have not left.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.waiting() > 0 || !self.aside.is_empty()
    }

    /// Queued bytes that have not left.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.end - self.sent
    }

    /// Whether queued frames may only leave after a further acknowledgement.
    #[must_use]
    pub fn is_held_back(&self) -> bool {
        let begins = self.offset == 0
            || (self.offset == self.chunks[self.chunk].len() && self.chunk + 1 < self.chunks.len());
        self.limits.is_some_and(|limits| {
            begins && self.waiting() > 0 && self.sent - self.acknowledged >= limits.window
        })
    }

    /// A whole frame of this many bytes has come, which counts; in it the other end reports its count.
    ///
    /// # Errors
    /// If the count exceeds what was sent.
    pub fn came(&mut self, kind: FrameKind, bytes: usize, has: u32) -> Result<(), Malformed> {
        if self.limits.is_none() {
            return Ok(());
        }
        if kind != FrameKind::Acknowledgement {
            self.received += bytes as u64;
        }
        let further = has.wrapping_sub(low(self.acknowledged));
        // An older report may come later, by another way.
        if further == 0 || further >= 1 << 31 {
            return Ok(());
        }
        let position = self.acknowledged + u64::from(further);
        if position > self.sent {
            return Err(NEVER_SENT);
        }
        self.forget(position);
        Ok(())
    }

    /// The peer has everything before this.
    fn forget(&mut self, position: u64) {
        self.acknowledged = position;
        let chunk_bytes = self.chunk_bytes();
        while self.base + self.chunks[0].len() as u64 <= position {
            if self.chunk == 0 {
                self.offset = 0;
            }
            self.base += self.chunks[0].len() as u64;
            if self.chunks.len() == 1 {
                self.chunks[0].clear();
                self.chunks[0].shrink_to(MOST_SPARE * chunk_bytes);
                return;
            }
            self.chunk = self.chunk.saturating_sub(1);
            let mut gone = self.chunks.pop_front().expect("there is always one");
            if gone.capacity() <= MOST_SPARE * chunk_bytes {
                gone.clear();
                self.spare = gone;
            }
        }
    }

    /// Whether the peer is owed an acknowledgement, although there may be nothing else to send.
    #[must_use]
    pub fn owes_answer(&self) -> bool {
        let much = |limits: Limits| {
            self.received - self.told_to_peer() >= limits.answer && self.rules.keep(RelinkRule::Answer)
        };
        self.limits.is_some_and(|limits| self.answer_now || much(limits))
    }

    /// The peer waits for an acknowledgement.
    pub fn answer_now(&mut self) {
        self.answer_now = self.limits.is_some();
    }

    /// Bytes of whole frames received from the peer: the count to report when it reconnects. Drop the start
    /// of a further frame.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received
    }

    /// The end of the queue so far, for [`Stream::has_arrived`].
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Whether the peer has everything before this position.
    #[must_use]
    pub fn has_arrived(&self, position: u64) -> bool {
        self.acknowledged >= position
    }

    /// Bytes that are kept, sent or not.
    #[must_use]
    pub fn kept(&self) -> u64 {
        self.end - self.base
    }

    /// Continues over a new connection to a peer that has received this many bytes, and was told
    /// [`Stream::received`].
    ///
    /// # Errors
    /// If that is impossible: it has more than was sent, or less than it reported.
    pub fn resume(&mut self, peer_has: u64) -> Result<(), Malformed> {
        if !(self.acknowledged..=self.sent).contains(&peer_has) {
            return Err(NEVER_SENT);
        }
        self.forget_aside();
        self.told_all();
        if !self.rules.keep(RelinkRule::Resend) {
            return Ok(());
        }
        let from = if self.rules.keep(RelinkRule::Once) { peer_has } else { self.acknowledged };
        self.forget(from);
        self.sent = from;
        let mut start = self.base;
        for (chunk, bytes) in self.chunks.iter().enumerate() {
            self.chunk = chunk;
            self.offset = usize::try_from(from - start).expect("what is kept fits into memory");
            start += bytes.len() as u64;
            if from < start {
                break;
            }
        }
        Ok(())
    }
}

const NEVER_SENT: Malformed = Malformed { what: "it claims to have bytes that were never sent", at: 0 };
/// A chunk that has grown beyond this many times its usual size is not reused.
const MOST_SPARE: usize = 8;

fn low(position: u64) -> u32 {
    u32::try_from(position & u64::from(u32::MAX)).expect("the low half")
}

#[cfg(test)]
mod tests {
    use super::super::control::{Control, Framed, deframe};
    use super::*;
    use proptest::prelude::*;

    const SMALL: Limits = Limits { window: 200, answer: 60, chunk: 50 };

    fn say(stream: &mut Stream, number: usize) {
        stream.queue(FrameKind::Control, |out| Control::NotDone { why: "x".repeat(number) }.encode(out));
    }

    /// Takes whole frames out of `arrived`.
    fn take(stream: &mut Stream, arrived: &mut Vec<u8>, got: &mut Vec<usize>) {
        while let Framed::Whole { kind, has, content, taken } = deframe(arrived).unwrap() {
            if kind == FrameKind::Control {
                let Ok(Control::NotDone { why }) = Control::decode(content) else {
                    panic!("that was never sent")
                };
                got.push(why.len());
            }
            stream.came(kind, taken, has).unwrap();
            arrived.drain(..taken);
        }
    }

    proptest! {
        /// Two ends send much; any prefix of the bytes that leave arrives before the connection is cut.
        #[test]
        fn what_is_said_arrives_once_and_in_order_however_often_it_is_cut(
            sizes in proptest::collection::vec(0_usize..300, 1..60),
            cuts in proptest::collection::vec(0_usize..400, 0..40),
        ) {
            let mut ends = [Stream::new(Some(SMALL)), Stream::new(Some(SMALL))];
            let (mut got, mut arrived) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
            for &size in &sizes {
                say(&mut ends[0], size);
                say(&mut ends[1], size + 1);
            }
            let mut cuts = cuts.into_iter();
            for _ in 0..20_000 {
                let mut cut = cuts.next();
                for from in 0..2 {
                    let mut left = cut.unwrap_or(97);
                    loop {
                        let piece = ends[from].front();
                        let len = piece.len().min(left);
                        if len == 0 {
                            break;
                        }
                        arrived[1 - from].extend_from_slice(&piece[..len]);
                        left -= len;
                        ends[from].sent(len);
                    }
                    // Bytes that leave after the cut never arrive.
                    let lost = ends[from].front().len();
                    if cut.is_some() {
                        ends[from].sent(lost);
                    }
                }
                for to in 0..2 {
                    take(&mut ends[to], &mut arrived[to], &mut got[to]);
                    prop_assert!(ends[to].sent - ends[to].acknowledged < SMALL.window + 300 + SMALL.chunk as u64 * 2);
                }
                if cut.take().is_some() {
                    for to in 0..2 {
                        arrived[to].clear();
                        let has = ends[1 - to].received();
                        ends[to].resume(has).unwrap();
                    }
                } else if got.iter().all(|got| got.len() == sizes.len()) {
                    break;
                }
            }
            prop_assert_eq!(&got[1], &sizes);
            prop_assert_eq!(&got[0], &sizes.iter().map(|size| size + 1).collect::<Vec<_>>());
        }

        #[test]
        fn whatever_a_peer_says_that_it_has_is_taken_or_refused(
            sizes in proptest::collection::vec(0_usize..300, 1..20), says in any::<u64>(), leaves in 0_usize..2000,
        ) {
            let mut stream = Stream::new(Some(SMALL));
            for size in sizes {
                say(&mut stream, size);
            }
            let mut left = leaves;
            while !stream.front().is_empty() && left > 0 {
                let len = stream.front().len().min(left);
                stream.sent(len);
                left -= len;
            }
            let _ = stream.came(FrameKind::Acknowledgement, 9, low(says));
            let _ = stream.resume(says);
            let _ = stream.resume(says % (stream.end + 1));
            stream.front();
        }
    }

    #[test]
    fn a_peer_that_has_more_than_was_sent_is_refused() {
        let mut stream = Stream::new(Some(Limits::default()));
        say(&mut stream, 100);
        assert!(stream.resume(1).is_err());
        assert!(stream.came(FrameKind::Acknowledgement, 9, 1).is_err());
        let len = stream.front().len();
        stream.sent(len);
        assert!(stream.came(FrameKind::Acknowledgement, 9, u32::try_from(len).unwrap()).is_ok());
        assert_eq!(stream.kept(), 0, "it is forgotten");
        assert!(stream.resume(0).is_err(), "it had it");
        assert!(stream.resume(len as u64).is_ok());
    }

    #[test]
    fn a_request_and_its_answer_use_the_same_memory_again() {
        let (mut one, mut other) =
            (Stream::new(Some(Limits::default())), Stream::new(Some(Limits::default())));
        let mut at = None;
        for round in 0..1000 {
            for turn in 0..2 {
                let (from, to) = if turn == 0 { (&mut one, &mut other) } else { (&mut other, &mut one) };
                say(from, 40);
                let mut bytes = from.front().to_vec();
                from.sent(bytes.len());
                take(to, &mut bytes, &mut Vec::new());
            }
            say(&mut one, 1);
            let now = one.front().as_ptr();
            // It has grown by then.
            if round > 10 {
                assert_eq!(*at.get_or_insert(now), now);
            }
            let mut bytes = one.front().to_vec();
            one.sent(bytes.len());
            take(&mut other, &mut bytes, &mut Vec::new());
        }
        assert!(one.kept() < 200);
    }

    /// A frame that is held back does not report its count: two ends that wait for each other's
    /// acknowledgement must send it by itself.
    #[test]
    fn two_ends_that_are_both_held_back_do_not_wait_for_each_other() {
        let mut ends = [Stream::new(Some(SMALL)), Stream::new(Some(SMALL))];
        let (mut got, mut arrived) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for _ in 0..200 {
            for (end, arrived) in ends.iter_mut().zip(arrived.iter_mut().rev()) {
                while !end.front().is_empty() {
                    let piece = end.front().to_vec();
                    end.sent(piece.len());
                    arrived.extend(piece);
                }
            }
            for at in 0..2 {
                take(&mut ends[at], &mut arrived[at], &mut got[at]);
                if got[at].len() < 40 {
                    (0..8).for_each(|_| say(&mut ends[at], 40));
                }
            }
        }
        assert!(
            ends.iter().all(|end| !end.waits()) && got.iter().all(|got| got.len() >= 40),
            "{} and {}",
            got[0].len(),
            got[1].len()
        );
    }

    #[test]
    fn one_that_cannot_be_cut_forgets_what_has_left() {
        let mut stream = Stream::new(None);
        say(&mut stream, 1 << 20);
        say(&mut stream, 10);
        while stream.waits() {
            let len = stream.front().len();
            stream.sent(len.min(1000));
        }
        assert_eq!(stream.kept(), 0);
        assert!(!stream.is_held_back());
    }
}
