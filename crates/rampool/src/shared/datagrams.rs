//! Messages as datagrams: one socket, one [`Channel`] for each other rank.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rampool_proto::share::channel::{Channel, ChannelConfig, DATAGRAM_BYTES};
use rampool_proto::share::{Message, Rank};

/// All channels of this rank.
pub(super) struct Datagrams {
    socket: UdpSocket,
    began: Instant,
    ends: Vec<Option<End>>,
    ranks: BTreeMap<SocketAddr, Rank>,
    scratch: Vec<u8>,
    drop_percent: u8,
    random: u64,
}

struct End {
    channel: Channel,
    address: SocketAddr,
    told: bool,
}

impl Datagrams {
    /// `addresses` by rank; none for this one. `drop_percent` of what is sent is dropped, for tests.
    pub fn new(socket: UdpSocket, addresses: &[Option<SocketAddr>], config: ChannelConfig, drop_percent: u8) -> Self {
        let end = |address: &Option<SocketAddr>| address.map(|address| End { channel: Channel::new(config, 0), address, told: false });
        let known = addresses.iter().zip(0..).filter_map(|(address, rank)| Some((canonical((*address)?), Rank(rank))));
        Self {
            socket,
            began: Instant::now(),
            ends: addresses.iter().map(end).collect(),
            ranks: known.collect(),
            scratch: Vec::new(),
            drop_percent,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).expect("a run lasts less than half a million years")
    }

    /// Returns the message's bytes.
    pub fn send(&mut self, to: Rank, message: &Message) -> usize {
        self.scratch.clear();
        message.encode(&mut self.scratch);
        if let Some(end) = &mut self.ends[usize::from(to.0)] {
            end.channel.send(&self.scratch);
        }
        self.scratch.len()
    }

    /// Takes what has arrived: whole messages, in order. Returns ranks that were given up since the last call.
    pub fn receive(&mut self, out: &mut Vec<(Rank, Vec<u8>)>) -> Vec<Rank> {
        let mut datagram = [0; DATAGRAM_BYTES + 1];
        while let Ok((len, from)) = self.socket.recv_from(&mut datagram) {
            // What does not come from a rank, or is spoiled, was never sent as far as the channel is concerned.
            let Some(&rank) = self.ranks.get(&canonical(from)) else { continue };
            let now = self.now_us();
            let mut whole = Vec::new();
            if let Some(end) = &mut self.ends[usize::from(rank.0)]
                && let Err(error) = end.channel.receive(&datagram[..len], now, &mut whole)
            {
                tracing::debug!("a datagram of {rank} is dropped: {error}");
            }
            out.extend(whole.into_iter().map(|message| (rank, message)));
        }
        self.flush();
        let gone = self.ends.iter_mut().zip(0..).filter_map(|(end, rank)| {
            let end = end.as_mut().filter(|end| end.channel.is_lost() && !end.told)?;
            end.told = true;
            Some(Rank(rank))
        });
        gone.collect()
    }

    /// Sends what may be sent now.
    pub fn flush(&mut self) {
        let now = self.now_us();
        for end in self.ends.iter_mut().flatten() {
            while let Some(datagram) = end.channel.poll(now) {
                // Marsaglia's xorshift: good enough to lose some.
                self.random ^= self.random << 13;
                self.random ^= self.random >> 7;
                self.random ^= self.random << 17;
                if self.random % 100 < u64::from(self.drop_percent) {
                    continue;
                }
                // What the kernel does not take is lost like any other datagram, and comes again.
                let _ = self.socket.send_to(&datagram, end.address);
            }
        }
    }

    /// Whether everything that was sent is acknowledged.
    pub fn is_settled(&self) -> bool {
        self.ends.iter().flatten().all(|end| end.channel.is_settled() || end.channel.is_lost())
    }

    /// When a channel has something to do next, if nothing comes.
    pub fn due(&self) -> Option<Instant> {
        let due = self.ends.iter().flatten().filter_map(|end| end.channel.poll_timeout()).min()?;
        Some(self.began + Duration::from_micros(due))
    }
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
