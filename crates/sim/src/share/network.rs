//! A network that loses, duplicates and reorders datagrams, with the sharing protocol's channels above it.

use std::collections::BTreeMap;

use rampool_sharing::channel::{Channel, ChannelConfig};

use crate::rng::{Rng, mix};

/// How bad the network is: chances in percent, delays in ticks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Loss {
    pub lost: u64,
    pub doubled: u64,
    /// One bit of it flips on the way.
    pub spoiled: u64,
    /// Two ranks do not hear each other for a while (chance for each pair and period).
    pub cut: u64,
    /// Delays vary this much: datagrams overtake each other.
    pub jitter: u64,
}

/// Two ranks that are cut off from each other stay so for this long.
const CUT_TICKS: u64 = 4000;

/// The outcome of a run of the network.
#[derive(Debug, Default)]
pub struct Arrived {
    /// Messages that are whole and in order: from, to, bytes.
    pub messages: Vec<(usize, usize, Vec<u8>)>,
    /// Ranks that gave a peer up: the rank, and its peer.
    pub lost: Vec<(usize, usize)>,
}

/// Counts of the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    pub sent: u64,
    pub lost: u64,
    pub doubled: u64,
    /// Corrupt datagrams that the receiver detected.
    pub refused: u64,
}

/// All ranks' channels and the datagrams in flight.
pub struct Datagrams {
    ranks: usize,
    loss: Loss,
    random: Rng,
    seed: u64,
    /// Until when each rank is stopped.
    paused: Vec<u64>,
    /// `(at, to)`: the end at rank `at` of its connection with `to`.
    ends: BTreeMap<(usize, usize), Channel>,
    /// By arrival time and number: from, to, bytes.
    flying: BTreeMap<(u64, u64), (usize, usize, Vec<u8>)>,
    number: u64,
    dead: Vec<bool>,
    told: Vec<(usize, usize)>,
    counts: Counts,
}

impl Datagrams {
    #[must_use]
    pub fn new(ranks: usize, loss: Loss, seed: u64) -> Self {
        let config = ChannelConfig {
            least_timeout_us: 500,
            most_timeout_us: 20_000,
            silence_us: 240_000,
            heartbeat_us: 20_000,
        };
        let pairs = (0..ranks).flat_map(|at| (0..ranks).map(move |to| (at, to))).filter(|(at, to)| at != to);
        Self {
            ranks,
            loss,
            random: Rng::new(seed ^ 0x6e65_7477),
            seed,
            paused: vec![0; ranks],
            ends: pairs.map(|pair| (pair, Channel::new(config, 0))).collect(),
            flying: BTreeMap::new(),
            number: 0,
            dead: vec![false; ranks],
            told: Vec::new(),
            counts: Counts::default(),
        }
    }

    pub fn send(&mut self, now: u64, from: usize, to: usize, message: &[u8]) {
        self.end(from, to).send(message);
        self.pump(now, from, to);
    }

    fn end(&mut self, at: usize, to: usize) -> &mut Channel {
        self.ends.get_mut(&(at, to)).expect("two different ranks")
    }

    /// Lets one end send as much as it can.
    fn pump(&mut self, now: u64, at: usize, to: usize) {
        if self.paused[at] > now {
            return;
        }
        while let Some(mut datagram) = self.end(at, to).poll(now) {
            self.counts.sent += 1;
            if self.random.percent(self.loss.lost) || self.is_cut(now, at, to) {
                self.counts.lost += 1;
                continue;
            }
            if self.random.percent(self.loss.spoiled) {
                let byte = self.random.index(datagram.len());
                datagram[byte] ^= 1 << self.random.below(8);
            }
            let copies = if self.random.percent(self.loss.doubled) { 2 } else { 1 };
            self.counts.doubled += copies - 1;
            for _ in 0..copies {
                let delay = 10 + self.random.below(self.loss.jitter + 1);
                self.number += 1;
                self.flying.insert((now + delay, self.number), (at, to, datagram.clone()));
            }
        }
    }

    /// Whether two ranks are cut off from each other now.
    fn is_cut(&self, now: u64, at: usize, to: usize) -> bool {
        let pair = (at.min(to) * self.ranks + at.max(to)) as u64;
        mix(self.seed ^ (now / CUT_TICKS) << 20 ^ pair) % 100 < self.loss.cut
    }

    /// The rank is stopped until then.
    pub fn pause(&mut self, rank: usize, until: u64) {
        self.paused[rank] = until;
    }

    /// Handles everything that is due.
    pub fn run(&mut self, now: u64) -> Arrived {
        let mut messages = Vec::new();
        while let Some(entry) = self.flying.first_entry()
            && entry.key().0 <= now
        {
            let (from, to, bytes) = entry.remove();
            if self.dead[to] {
                continue;
            }
            if self.paused[to] > now {
                self.number += 1;
                self.flying.insert((self.paused[to], self.number), (from, to, bytes));
                continue;
            }
            let mut whole = Vec::new();
            if self.end(to, from).receive(&bytes, now, &mut whole).is_err() {
                self.counts.refused += 1;
            }
            messages.extend(whole.into_iter().map(|message| (from, to, message)));
            self.pump(now, to, from);
        }
        let mut lost = Vec::new();
        for at in 0..self.ranks {
            for to in (0..self.ranks).filter(|&to| to != at) {
                if self.dead[at] || self.ends[&(at, to)].is_lost() {
                    continue;
                }
                self.pump(now, at, to);
                if self.ends[&(at, to)].is_lost() && !self.told.contains(&(at, to)) {
                    self.told.push((at, to));
                    lost.push((at, to));
                }
            }
        }
        Arrived { messages, lost }
    }

    /// When the next event is due. `all_done`: only unacknowledged fragments keep the network going.
    #[must_use]
    pub fn due(&self, all_done: bool) -> Option<u64> {
        let flying = self.flying.first_key_value().map(|(&(at, _), _)| at);
        let alive = self
            .ends
            .iter()
            .filter(|((at, to), end)| !self.dead[*at] && !(all_done && (end.is_settled() || self.dead[*to])));
        let ends =
            alive.filter_map(|((at, _), end)| end.poll_timeout().map(|due| due.max(self.paused[*at]))).min();
        flying.into_iter().chain(ends).min()
    }

    /// This rank neither sends nor receives any more.
    pub fn kill(&mut self, rank: usize) {
        self.dead[rank] = true;
    }

    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }
}
