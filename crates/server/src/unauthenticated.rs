//! Limits on unauthenticated connections. They cost a server little, however many there are: few lines of its
//! log, and no client's place.

use super::lock::lock;
use rampool_lease::{LogLimiter, Repeated, Tick};
use rampool_net::transport::Peer;
use std::collections::VecDeque;
use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Mutex;

/// In each minute the same is said once about the same peer, and later how often it was.
const PERIOD_MS: u64 = 60_000;
/// So many events of a minute are kept apart.
const MOST_PEER_EVENTS: usize = 32;

/// What makes two events the same.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct PeerEvent {
    what: &'static str,
    from: String,
    error: String,
}

/// What the log says of unauthenticated peers.
pub(super) struct PeerLog(Mutex<LogLimiter<PeerEvent>>);

impl Default for PeerLog {
    fn default() -> Self {
        Self(Mutex::new(LogLimiter::new(PERIOD_MS, MOST_PEER_EVENTS)))
    }
}

impl PeerLog {
    /// Logs what went wrong with a peer, be it a client or not; what is repeated is counted instead.
    pub(super) fn say(&self, now: Tick, what: &'static str, peer: Option<&Peer>, error: &dyn Display) {
        let error = error.to_string();
        let event = PeerEvent { what, from: peer.map(origin).unwrap_or_default(), error: error.clone() };
        if lock(&self.0).hear(now, event) {
            match peer {
                Some(peer) => tracing::warn!(%peer, %error, "{what}"),
                None => tracing::warn!(%error, "{what}"),
            }
        }
    }

    /// Logs how often it was, when the minute is over, or, without a time, at the end.
    pub(super) fn say_repeated(&self, now: Option<Tick>) {
        let repeated = lock(&self.0).due(now);
        for Repeated { what, times } in repeated {
            match what {
                Some(PeerEvent { what, from, error }) => {
                    tracing::warn!(%from, %error, times, "{what}: more like this in the last minute")
                }
                None => {
                    tracing::warn!(times, "more errors of other kinds, or of other peers, in the last minute")
                }
            }
        }
    }
}

/// A peer, as far as it does not change from one connection to the next: a machine, the network from which an
/// IPv6 machine can choose its addresses, or a user.
fn origin(peer: &Peer) -> String {
    match peer {
        Peer::Tcp(address) => match address.ip().to_canonical() {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) if ip.is_loopback() => ip.to_string(),
            IpAddr::V6(ip) => {
                let [a, b, c, d, ..] = ip.segments();
                format!("{a:x}:{b:x}:{c:x}:{d:x}::/64")
            }
        },
        Peer::Unix { uid, .. } => format!("unix:uid={uid}"),
    }
}

/// The tokens of a shard's connections whose handshake is under way, the oldest first, and of some that have
/// gone on since.
#[derive(Default)]
pub(super) struct Unauthenticated(VecDeque<u64>);

impl Unauthenticated {
    /// `is_new`: whether the handshake of a token's connection is under way.
    pub(super) fn add(&mut self, token: u64, is_new: impl Fn(u64) -> bool) {
        if self.0.len() == self.0.capacity() {
            self.0.retain(|token| is_new(*token));
        }
        self.0.push_back(token);
    }

    /// The one that has been at it for longest.
    pub(super) fn take_oldest(&mut self, is_new: impl Fn(u64) -> bool) -> Option<u64> {
        std::iter::from_fn(|| self.0.pop_front()).find(|token| is_new(*token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_stays_the_same_from_one_connection_to_the_next() {
        let of = |text: &str| origin(&Peer::Tcp(text.parse().unwrap()));
        assert_eq!(of("10.0.0.1:50"), "10.0.0.1");
        assert_eq!(of("[::ffff:10.0.0.1]:51"), "10.0.0.1");
        assert_eq!(of("[2001:db8:1:2:3:4:5:6]:1"), of("[2001:db8:1:2:9::]:2"));
        assert_ne!(of("[2001:db8:1:2::]:1"), of("[2001:db8:1:3::]:1"));
        assert_eq!(origin(&Peer::Unix { pid: 7, uid: 8 }), origin(&Peer::Unix { pid: 9, uid: 8 }));
    }

    #[test]
    fn the_oldest_whose_handshake_goes_on_is_found_and_others_are_forgotten() {
        let mut unauthenticated = Unauthenticated::default();
        // All but every hundredth go on.
        let is_new = |token: u64| token.is_multiple_of(100);
        (1..=10_000).for_each(|token| unauthenticated.add(token, is_new));
        assert!(unauthenticated.0.len() < 1000, "{}", unauthenticated.0.len());
        assert_eq!(unauthenticated.take_oldest(is_new), Some(100));
        assert_eq!(unauthenticated.take_oldest(is_new), Some(200));
        assert_eq!(unauthenticated.take_oldest(|token| token > 10_000), None);
    }
}
