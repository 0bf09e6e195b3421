//! Messages as datagrams: one socket, one [`Channel`] for each other rank. Where the connection to a rank is
//! sealed, so is each datagram, with keys that were exchanged over it. A datagram that does not decrypt
//! counts as lost.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rampool_sharing::channel::{Channel, ChannelConfig, DATAGRAM_BYTES};
use rampool_sharing::{Message, Rank};

use rampool_net::transport::{DATAGRAM_SEAL_BYTES, DatagramSeal};

/// All channels of this rank.
pub(super) struct Datagrams {
    socket: UdpSocket,
    began: Instant,
    ends: Vec<Option<End>>,
    ranks: BTreeMap<SocketAddr, Rank>,
    scratch: Vec<u8>,
    sealed: Vec<u8>,
    /// A network that loses this many percent.
    #[cfg(test)]
    loss: Loss,
}

struct End {
    channel: Channel,
    address: SocketAddr,
    seal: Option<DatagramSeal>,
    told: bool,
}

/// The address of a rank's datagrams, and their encryption.
pub(super) struct DatagramPeer {
    pub address: SocketAddr,
    pub seal: Option<DatagramSeal>,
}

impl Datagrams {
    /// `places` by rank; `None` for this one.
    pub fn new(socket: UdpSocket, places: Vec<Option<DatagramPeer>>, config: ChannelConfig) -> Self {
        let known = places
            .iter()
            .zip(0..)
            .filter_map(|(place, rank)| Some((canonical(place.as_ref()?.address), Rank(rank))));
        let ranks = known.collect();
        let end = |DatagramPeer { address, seal }| End {
            channel: Channel::new(config, 0),
            address,
            seal,
            told: false,
        };
        Self {
            socket,
            began: Instant::now(),
            ends: places.into_iter().map(|place| place.map(end)).collect(),
            ranks,
            scratch: Vec::new(),
            sealed: Vec::new(),
            #[cfg(test)]
            loss: Loss::default(),
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

    /// Takes everything that has arrived: whole messages, in order. Returns ranks that were given up since
    /// the last call.
    pub fn receive(&mut self, out: &mut Vec<(Rank, Vec<u8>)>) -> Vec<Rank> {
        let mut datagram = [0; DATAGRAM_BYTES + DATAGRAM_SEAL_BYTES + 1];
        let mut plain = [0; DATAGRAM_BYTES + DATAGRAM_SEAL_BYTES + 1];
        while let Ok((len, from)) = self.socket.recv_from(&mut datagram) {
            // A datagram that does not come from a rank, or is corrupt, counts as lost.
            let Some(&rank) = self.ranks.get(&canonical(from)) else { continue };
            let now = self.now_us();
            let mut whole = Vec::new();
            let Some(end) = &mut self.ends[usize::from(rank.0)] else { continue };
            let content = match &mut end.seal {
                None => &datagram[..len],
                Some(seal) => match seal.open(&datagram[..len], &mut plain) {
                    Ok(len) => &plain[..len],
                    Err(_) => {
                        tracing::debug!("a datagram from {from} is dropped: it is not authentic");
                        continue;
                    }
                },
            };
            if let Err(error) = end.channel.receive(content, now, &mut whole) {
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

    /// Sends everything that may be sent now.
    pub fn flush(&mut self) {
        let now = self.now_us();
        for end in self.ends.iter_mut().flatten() {
            while let Some(datagram) = end.channel.poll(now) {
                // Marsaglia's xorshift: good enough to drop some.
                #[cfg(test)]
                if self.loss.hits() {
                    continue;
                }
                let datagram = match &mut end.seal {
                    None => &datagram,
                    Some(seal) => {
                        seal.seal(&datagram, &mut self.sealed);
                        &self.sealed
                    }
                };
                // A datagram that the kernel does not take is lost like any other, and is sent again.
                let _ = self.socket.send_to(datagram, end.address);
            }
        }
    }

    /// Whether everything sent is acknowledged.
    pub fn is_settled(&self) -> bool {
        self.ends.iter().flatten().all(|end| end.channel.is_settled() || end.channel.is_lost())
    }

    /// When a channel has something to do next, if nothing arrives.
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

/// Which datagrams a test's network loses.
#[cfg(test)]
#[derive(Default)]
struct Loss {
    percent: u64,
    random: u64,
}

#[cfg(test)]
impl Loss {
    fn hits(&mut self) -> bool {
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.random >> 33) % 100 < self.percent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rampool_sharing::{Body, Message};

    const SECRET: &str = "a secret message";

    fn socket() -> (UdpSocket, SocketAddr) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = socket.local_addr().unwrap();
        socket.set_nonblocking(true).unwrap();
        (socket, at)
    }

    fn message() -> Message {
        Message { epoch: 1, body: Body::Abort { why: SECRET.into() } }
    }

    fn one_peer(
        socket: UdpSocket,
        peer: Rank,
        address: SocketAddr,
        seal: Option<DatagramSeal>,
        drop_percent: u64,
    ) -> Datagrams {
        let mut places: Vec<Option<DatagramPeer>> = [None, None].into();
        places[usize::from(peer.0)] = Some(DatagramPeer { address, seal });
        let mut datagrams = Datagrams::new(socket, places, ChannelConfig::default());
        datagrams.loss.percent = drop_percent;
        datagrams
    }

    /// What a socket without the keys receives.
    fn overheard(socket: &UdpSocket) -> Vec<u8> {
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut datagram = [0; 2000];
        let len = socket.recv(&mut datagram).unwrap();
        datagram[..len].to_vec()
    }

    #[test]
    fn sealed_datagrams_say_nothing_to_who_listens_and_plain_ones_everything() {
        for sealed in [false, true] {
            let ((ours, _), (listener, there)) = (socket(), socket());
            let seal = sealed.then(|| DatagramSeal::new(&[1; 32], &[2; 32]));
            let mut sender = one_peer(ours, Rank(1), there, seal, 0);
            sender.send(Rank(1), &message());
            sender.flush();
            let heard = overheard(&listener);
            assert_eq!(heard.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()), !sealed);
        }
    }

    #[test]
    fn what_is_changed_forged_or_said_again_much_later_does_not_open() {
        let (mut one, mut other) =
            (DatagramSeal::new(&[1; 32], &[2; 32]), DatagramSeal::new(&[2; 32], &[1; 32]));
        let (mut sealed, mut plain) = (Vec::new(), [0; 100]);
        one.seal(b"hello", &mut sealed);
        assert_eq!(other.open(&sealed, &mut plain).map(|len| plain[..len].to_vec()), Ok(b"hello".to_vec()));
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(other.open(&changed, &mut plain).is_err(), "byte {at}");
            assert!(other.open(&sealed[..at], &mut plain).is_err(), "{at} bytes of it");
        }
        let mut foreign = DatagramSeal::new(&[3; 32], &[3; 32]);
        let first = sealed.clone();
        foreign.seal(b"hello", &mut sealed);
        assert!(other.open(&sealed, &mut plain).is_err());
        for _ in 0..5000 {
            one.seal(b"more", &mut sealed);
        }
        assert!(other.open(&sealed, &mut plain).is_ok());
        assert!(other.open(&first, &mut plain).is_err(), "an old one comes again");
    }

    #[test]
    fn sealed_messages_arrive_once_and_in_order_though_datagrams_are_lost_and_forged() {
        let ((one, here), (two, there), (foreign, _)) = (socket(), socket(), socket());
        let mut sender = one_peer(one, Rank(1), there, Some(DatagramSeal::new(&[1; 32], &[2; 32])), 30);
        let mut receiver = one_peer(two, Rank(0), here, Some(DatagramSeal::new(&[2; 32], &[1; 32])), 30);
        let numbered = |number: u32| Message { epoch: number, body: Body::Abort { why: SECRET.repeat(60) } };
        for number in 0..200 {
            sender.send(Rank(1), &numbered(number));
        }
        let mut got = Vec::new();
        let watchdog = Instant::now() + Duration::from_secs(60);
        while got.len() < 200 || !sender.is_settled() {
            assert!(Instant::now() < watchdog, "{} of 200 messages came", got.len());
            let _ = foreign.send_to(&[7; 64], there);
            assert!(
                sender.receive(&mut Vec::new()).is_empty() && receiver.receive(&mut got).is_empty(),
                "no rank is lost"
            );
            std::thread::yield_now();
        }
        let epochs: Vec<u32> = got.iter().map(|(_, bytes)| Message::decode(bytes).unwrap().epoch).collect();
        assert_eq!(epochs, (0..200).collect::<Vec<u32>>());
    }
}
