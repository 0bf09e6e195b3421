//! First-in-first-out, exactly-once messages over a network that loses, duplicates and reorders datagrams.
//!
//! One [`Channel`] is this rank's end of the connection to one peer, both directions. Messages are cut into
//! fragments that fit a datagram; each has a sequence number. The receiver answers with the number up to
//! which it has everything and a map of what it has beyond that. The sender repeats missing fragments: at
//! once when three later ones have arrived, else after a time that follows the measured round trip (Jacobson
//! and Karels, SIGCOMM '88; a repeated fragment is not measured, Karn and Partridge, SIGCOMM '87). A window
//! bounds the fragments in flight. Idle ends exchange heartbeats, and a peer that is silent for too long is
//! lost. Time during which this end itself was stopped does not count.
//!
//! ```text
//! datagram   length u16 | checksum u32 (CRC32C of what follows) | acknowledged u32 | beyond u32 | fragment*
//! fragment   sequence u32 | flags u8 (1: the message ends here) | length u16 | bytes
//! ```
//! All little-endian. Time comes in as an argument, in microseconds. Nothing here does I/O.

use rampool_wire::checksum;
use std::collections::{BTreeMap, VecDeque};

/// The most bytes of one datagram.
pub const DATAGRAM_BYTES: usize = 1400;
const HEADER_BYTES: usize = 14;
const FRAGMENT_HEADER_BYTES: usize = 7;
/// Fragments in flight: as many as one acknowledgement map covers.
const WINDOW: u32 = 32;
/// The longest message that a peer may send.
const MESSAGE_BYTES: usize = 64 << 20;

/// Times and limits of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ChannelConfig {
    pub least_timeout_us: u64,
    pub most_timeout_us: u64,
    /// A peer that is silent for this long is lost.
    pub silence_us: u64,
    /// After this long without a message, a heartbeat is sent.
    pub heartbeat_us: u64,
}

impl Default for ChannelConfig {
    fn default() -> Self {
        Self {
            least_timeout_us: 2_000,
            most_timeout_us: 250_000,
            silence_us: 30_000_000,
            heartbeat_us: 1_000_000,
        }
    }
}

/// Bytes that are not a datagram of a channel. They are dropped, as the network might have done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatagramError {
    #[error("the datagram is cut off")]
    Short,
    #[error("the datagram's checksum is wrong")]
    Checksum,
    #[error("a message is longer than {MESSAGE_BYTES} bytes")]
    TooLong,
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub struct Channel {
    config: ChannelConfig,
    /// Messages' fragments that wait for room in the window.
    waiting: VecDeque<Fragment>,
    /// Sent and not acknowledged, by sequence number.
    under_way: BTreeMap<u32, UnderWay>,
    next_sequence: u32,
    /// The next fragment that is missing.
    expected: u32,
    /// Fragments received beyond that.
    early: BTreeMap<u32, Fragment>,
    /// The message that is being put together.
    partial: Vec<u8>,
    owes_answer: bool,
    smooth_us: Option<u64>,
    variance_us: u64,
    /// When this end last sent to the peer.
    spoke_us: u64,
    /// When this end last ran, and for how long it has run without hearing from the peer: at most a heartbeat
    /// for each run, since it runs that often unless it is stopped.
    looked_us: u64,
    unheard_us: u64,
    lost: bool,
}

#[derive(Clone, Debug)]
struct Fragment {
    last: bool,
    bytes: Vec<u8>,
}

#[derive(Clone, Debug)]
struct UnderWay {
    fragment: Fragment,
    sent_us: u64,
    due_us: u64,
    tries: u32,
    /// Later fragments that arrived before this one.
    overtaken: u32,
}

impl Channel {
    #[must_use]
    pub fn new(config: ChannelConfig, now_us: u64) -> Self {
        Self {
            config,
            waiting: VecDeque::new(),
            under_way: BTreeMap::new(),
            next_sequence: 0,
            expected: 0,
            early: BTreeMap::new(),
            partial: Vec::new(),
            owes_answer: false,
            smooth_us: None,
            variance_us: 0,
            spoke_us: now_us,
            looked_us: now_us,
            unheard_us: 0,
            lost: false,
        }
    }

    /// Queues a message (at least one byte, at most 64 MiB).
    pub fn send(&mut self, message: &[u8]) {
        let most = DATAGRAM_BYTES - HEADER_BYTES - FRAGMENT_HEADER_BYTES;
        let count = message.len().div_ceil(most).max(1);
        for index in 0..count {
            let bytes = message[index * most..message.len().min((index + 1) * most)].to_vec();
            self.waiting.push_back(Fragment { last: index + 1 == count, bytes });
        }
    }

    /// Takes a datagram from the peer; complete messages, in order, are appended to `out`.
    ///
    /// # Errors
    /// If it is not a whole, correct datagram. Nothing changes then.
    pub fn receive(
        &mut self,
        datagram: &[u8],
        now_us: u64,
        out: &mut Vec<Vec<u8>>,
    ) -> Result<(), DatagramError> {
        let len = usize::from(u16::from_le_bytes(part(datagram, 0)?));
        let body = datagram.get(6..len).filter(|_| len == datagram.len()).ok_or(DatagramError::Short)?;
        if checksum::crc32c(body) != u32::from_le_bytes(part(datagram, 2)?) {
            return Err(DatagramError::Checksum);
        }
        let acknowledged = u32::from_le_bytes(part(body, 0)?);
        let beyond = u32::from_le_bytes(part(body, 4)?);
        let mut fragments = Vec::new();
        let mut rest = &body[8..];
        while !rest.is_empty() {
            let sequence = u32::from_le_bytes(part(rest, 0)?);
            let last = rest.get(4).ok_or(DatagramError::Short)? & 1 == 1;
            let len = usize::from(u16::from_le_bytes(part(rest, 5)?));
            let end = FRAGMENT_HEADER_BYTES + len;
            let bytes = rest.get(FRAGMENT_HEADER_BYTES..end).ok_or(DatagramError::Short)?.to_vec();
            fragments.push((sequence, Fragment { last, bytes }));
            rest = &rest[end..];
        }
        self.looked_us = now_us;
        self.unheard_us = 0;
        self.acknowledge(acknowledged, beyond, now_us);
        for (sequence, fragment) in fragments {
            self.owes_answer = true;
            let ahead = sequence.wrapping_sub(self.expected);
            if ahead <= WINDOW {
                self.early.entry(sequence).or_insert(fragment);
            }
        }
        while let Some(fragment) = self.early.remove(&self.expected) {
            self.expected = self.expected.wrapping_add(1);
            if self.partial.len() + fragment.bytes.len() > MESSAGE_BYTES {
                self.lost = true;
                return Err(DatagramError::TooLong);
            }
            self.partial.extend_from_slice(&fragment.bytes);
            if fragment.last {
                out.push(std::mem::take(&mut self.partial));
            }
        }
        Ok(())
    }

    /// The peer has everything before `upto`, and beyond it the fragments in the map.
    fn acknowledge(&mut self, upto: u32, beyond: u32, now_us: u64) {
        let arrived: Vec<u32> = self
            .under_way
            .keys()
            .copied()
            .filter(|&sequence| {
                let ahead = sequence.wrapping_sub(upto);
                ahead >= 1 << 31 || ((1..=32).contains(&ahead) && beyond & (1 << (ahead - 1)) != 0)
            })
            .collect();
        for sequence in &arrived {
            let done = self.under_way.remove(sequence).expect("it is under way");
            if done.tries == 1 {
                self.measure(now_us.saturating_sub(done.sent_us));
            }
        }
        for (sequence, fragment) in &mut self.under_way {
            let later = arrived.iter().filter(|other| other.wrapping_sub(*sequence) < 1 << 31).count();
            fragment.overtaken += u32::try_from(later).expect("at most a window");
            if fragment.overtaken >= 3 {
                fragment.overtaken = 0;
                fragment.due_us = now_us;
            }
        }
    }

    fn measure(&mut self, round_trip_us: u64) {
        match self.smooth_us {
            None => {
                self.smooth_us = Some(round_trip_us);
                self.variance_us = round_trip_us / 2;
            }
            Some(smooth) => {
                self.variance_us = (3 * self.variance_us + smooth.abs_diff(round_trip_us)) / 4;
                self.smooth_us = Some((7 * smooth + round_trip_us) / 8);
            }
        }
    }

    fn timeout_us(&self, tries: u32) -> u64 {
        let measured =
            self.smooth_us.map_or(self.config.most_timeout_us / 4, |smooth| smooth + 4 * self.variance_us);
        let base = measured.max(self.config.least_timeout_us);
        (base << tries.min(6)).min(self.config.most_timeout_us)
    }

    /// The next datagram to send now, if there is one. Call until `None`.
    pub fn poll(&mut self, now_us: u64) -> Option<Vec<u8>> {
        self.unheard_us += now_us.saturating_sub(self.looked_us).min(self.config.heartbeat_us);
        self.looked_us = now_us;
        self.lost |= self.unheard_us >= self.config.silence_us;
        if self.lost {
            return None;
        }
        let mut datagram = vec![0; HEADER_BYTES];
        let room = |datagram: &Vec<u8>, bytes: &[u8]| {
            datagram.len() + FRAGMENT_HEADER_BYTES + bytes.len() <= DATAGRAM_BYTES
        };
        let due: Vec<u32> = self
            .under_way
            .iter()
            .filter(|(_, fragment)| fragment.due_us <= now_us)
            .map(|(&sequence, _)| sequence)
            .collect();
        for sequence in due {
            let tries = self.under_way[&sequence].tries;
            let timeout = self.timeout_us(tries);
            let fragment = self.under_way.get_mut(&sequence).expect("it is under way");
            if !room(&datagram, &fragment.fragment.bytes) {
                break;
            }
            fragment.tries = fragment.tries.saturating_add(1);
            fragment.due_us = now_us + timeout;
            put(&mut datagram, sequence, &fragment.fragment);
        }
        while let Some(fragment) = self.waiting.front() {
            let oldest = self
                .under_way
                .keys()
                .copied()
                .min_by_key(|sequence| sequence.wrapping_sub(self.next_sequence));
            let span = oldest.map_or(0, |oldest| self.next_sequence.wrapping_sub(oldest));
            if span >= WINDOW || !room(&datagram, &fragment.bytes) {
                break;
            }
            let fragment = self.waiting.pop_front().expect("there is one");
            put(&mut datagram, self.next_sequence, &fragment);
            let due_us = now_us + self.timeout_us(0);
            let under_way = UnderWay { fragment, sent_us: now_us, due_us, tries: 1, overtaken: 0 };
            self.under_way.insert(self.next_sequence, under_way);
            self.next_sequence = self.next_sequence.wrapping_add(1);
        }
        let silent = now_us >= self.spoke_us + self.config.heartbeat_us;
        if datagram.len() == HEADER_BYTES && !self.owes_answer && !silent {
            return None;
        }
        self.owes_answer = false;
        self.spoke_us = now_us;
        let beyond = self.early.keys().fold(0_u32, |map, sequence| {
            let ahead = sequence.wrapping_sub(self.expected);
            if (1..=32).contains(&ahead) { map | 1 << (ahead - 1) } else { map }
        });
        let len = u16::try_from(datagram.len()).expect("a datagram is small");
        datagram[6..10].copy_from_slice(&self.expected.to_le_bytes());
        datagram[10..14].copy_from_slice(&beyond.to_le_bytes());
        let checksum = checksum::crc32c(&datagram[6..]);
        datagram[0..2].copy_from_slice(&len.to_le_bytes());
        datagram[2..6].copy_from_slice(&checksum.to_le_bytes());
        Some(datagram)
    }

    /// When `poll` has something to send next, if nothing else happens.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        if self.lost {
            return None;
        }
        let due = self.under_way.values().map(|fragment| fragment.due_us).min();
        Some(due.unwrap_or(u64::MAX).min(self.spoke_us + self.config.heartbeat_us))
    }

    /// Whether everything sent is acknowledged.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.waiting.is_empty() && self.under_way.is_empty() && !self.owes_answer
    }

    /// Whether the peer was given up.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost
    }
}

fn put(datagram: &mut Vec<u8>, sequence: u32, fragment: &Fragment) {
    datagram.extend_from_slice(&sequence.to_le_bytes());
    datagram.push(u8::from(fragment.last));
    datagram
        .extend_from_slice(&u16::try_from(fragment.bytes.len()).expect("it fits a datagram").to_le_bytes());
    datagram.extend_from_slice(&fragment.bytes);
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], DatagramError> {
    bytes.get(at..at + N).and_then(|part| part.try_into().ok()).ok_or(DatagramError::Short)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Each number decides the fate of one datagram: lost, duplicated, delayed, or delivered.
        #[test]
        fn messages_arrive_once_and_in_order(
            messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..4000), 1..30),
            fates in proptest::collection::vec(0_u8..8, 200),
        ) {
            let mut ends = [Channel::new(ChannelConfig::default(), 0), Channel::new(ChannelConfig::default(), 0)];
            for message in &messages {
                ends[0].send(message);
            }
            let mut now = 0;
            let mut fate = fates.iter().copied().chain(std::iter::repeat(7));
            let mut kept: Vec<(usize, Vec<u8>)> = Vec::new();
            let mut got = Vec::new();
            for _ in 0..20_000 {
                if ends.iter().all(Channel::is_settled) && got.len() == messages.len() {
                    break;
                }
                for from in 0..2 {
                    while let Some(datagram) = ends[from].poll(now) {
                        match fate.next() {
                            Some(0 | 1) => {}
                            Some(2) => kept.push((1 - from, datagram)),
                            Some(3) => {
                                ends[1 - from].receive(&datagram, now, &mut got).unwrap();
                                ends[1 - from].receive(&datagram, now, &mut got).unwrap();
                            }
                            _ => ends[1 - from].receive(&datagram, now, &mut got).unwrap(),
                        }
                    }
                }
                if kept.len() > 3 {
                    for (to, datagram) in kept.drain(..) {
                        ends[to].receive(&datagram, now, &mut got).unwrap();
                    }
                }
                now = ends.iter().filter_map(Channel::poll_timeout).min().unwrap_or(now).max(now + 10);
            }
            prop_assert_eq!(got, messages);
        }

        #[test]
        fn any_bytes_are_refused_or_taken_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut channel = Channel::new(ChannelConfig::default(), 0);
            let mut out = Vec::new();
            let _ = channel.receive(&bytes, 1, &mut out);
            prop_assert!(out.is_empty());
        }
    }

    /// When the peer of this channel is given up, if it is silent and this end runs whenever it should.
    fn given_up(mut channel: Channel, mut now: u64) -> u64 {
        while let Some(due) = channel.poll_timeout() {
            now = now.max(due).max(now + 1);
            while channel.poll(now).is_some() {}
        }
        assert!(channel.is_lost());
        now
    }

    /// With messages to send and without; however short its round trips were.
    #[test]
    fn a_peer_that_says_nothing_is_lost_after_its_silence_and_not_before() {
        let config = ChannelConfig { silence_us: 7_000_000, ..ChannelConfig::default() };
        let in_time = config.silence_us..=config.silence_us + config.heartbeat_us;
        let idle = given_up(Channel::new(config, 0), 0);
        assert!(in_time.contains(&idle), "{idle} us");

        let mut ends = [Channel::new(config, 0), Channel::new(config, 0)];
        let mut out = Vec::new();
        for now in 1..100 {
            ends[0].send(b"are you there");
            for at in [0, 1] {
                while let Some(datagram) = ends[at].poll(now) {
                    ends[1 - at].receive(&datagram, now, &mut out).unwrap();
                }
            }
        }
        let [mut asks, _] = ends;
        asks.send(b"and now");
        let asked = given_up(asks, 99) - 99;
        assert!(in_time.contains(&asked), "{asked} us");
    }

    #[test]
    fn an_end_that_was_stopped_hears_the_peer_before_it_judges() {
        let config = ChannelConfig::default();
        let mut ends = [Channel::new(config, 0), Channel::new(config, 0)];
        ends[0].send(b"are you there");
        let asked = ends[0].poll(1).unwrap();
        let late = 1 + 3 * config.silence_us;
        let again = ends[0].poll(late).expect("it asks again");
        let mut out = Vec::new();
        ends[1].receive(&asked, late, &mut out).unwrap();
        ends[1].receive(&again, late, &mut out).unwrap();
        let answer = ends[1].poll(late).unwrap();
        ends[0].receive(&answer, late, &mut out).unwrap();
        assert!(ends[0].is_settled() && !ends[0].is_lost() && out == [b"are you there"]);
    }
}
