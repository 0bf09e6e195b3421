//! Shared memory whose other side is spoilt, slow, deaf, or dead.

use super::*;
use crate::transport::rings::{LONG_RING_BYTES, RING_BYTES};
use rampool_kernel::sealed::SealedMemory;
use rampool_wire::rings::{Direction, Geometry, OFFER_BYTES, Offer, OfferError, Word};
use rampool_wire::session::{PREFACE_BYTES, Preface};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

const PLAIN: LocalPolicy =
    LocalPolicy { key: None, encryption: Encryption::Auto, features: BOTH_RINGS, ucx: None };
const BOTH_RINGS: u32 = features::RINGS | features::LONG_RINGS;

/// A client that follows the protocol as far as the shared memory, and does with that what it likes.
struct Hostile {
    socket: Stream,
    memory: SealedMemory,
    geometry: Geometry,
}

/// A server's link, and the hostile client at its other end.
fn hostile() -> (Link, Hostile) {
    hostile_with(features::RINGS)
}

fn hostile_with(features: u32) -> (Link, Hostile) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let socket = Stream::adopt(ours).unwrap();
    let mut server = Handshake::server(Stream::adopt(theirs).unwrap(), PLAIN, None);
    socket.send_from(&Preface::ask(Encryption::Auto, false, features, 1).encode()).unwrap();
    assert!(server.advance::<()>().unwrap().is_none());
    let mut preface = [0; PREFACE_BYTES];
    assert_eq!(socket.receive_into(&mut preface).unwrap(), Some(PREFACE_BYTES));
    let (mut offer, mut handed) = ([0; OFFER_BYTES], Vec::new());
    assert_eq!(socket.receive_with(&mut offer, &mut handed).unwrap(), Some(OFFER_BYTES));
    let geometry = Offer::parse(&offer).unwrap().geometry().unwrap();
    let memory = SealedMemory::adopt(handed[0].as_fd(), geometry.memory_bytes()).unwrap();
    socket.send_from(&offer).unwrap();
    let link = server.advance().unwrap().expect("the handshake is over");
    assert_eq!(link.means(), Means::RINGS);
    (link, Hostile { socket, memory, geometry })
}

impl Hostile {
    fn count(&self, direction: Direction, word: Word) -> &std::sync::atomic::AtomicU64 {
        self.memory.word64(self.geometry.word(direction, word))
    }
}

#[test]
fn rings_are_as_long_as_the_client_asks() {
    for (features, bytes) in [(features::RINGS, RING_BYTES), (BOTH_RINGS, LONG_RING_BYTES)] {
        let (_link, peer) = hostile_with(features);
        assert_eq!(peer.geometry.ring_bytes(), bytes as usize);
    }
}

#[test]
fn counts_that_the_peer_has_spoilt_end_the_link() {
    let ring = u64::from(RING_BYTES);
    for spoilt in [ring + 1, 1 << 32, u64::MAX, u64::MAX / 2] {
        let (mut link, peer) = hostile();
        peer.count(Direction::ToServer, Word::Written).store(spoilt, Ordering::Release);
        assert!(!link.may_sleep(true), "what is wrong is to be seen at once");
        assert!(
            matches!(
                link.receive(),
                Err(LinkError::Io(error)) if error.kind() == std::io::ErrorKind::InvalidData
            ),
            "{spoilt}"
        );

        let (mut link, peer) = hostile();
        peer.count(Direction::ToClient, Word::Read).store(spoilt, Ordering::Release);
        let bulk = vec![0; 2 * RING_BYTES as usize];
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::Put, 1), &[], bulk.len());
        // SAFETY: the bytes outlive the link, which is dropped first.
        unsafe { link.send(Urgency::Demand, &head, &[Piece { ptr: bulk.as_ptr(), len: bulk.len() }], ()) };
        assert!(
            matches!(
                link.flush(),
                Err(LinkError::Io(error)) if error.kind() == std::io::ErrorKind::InvalidData
            ),
            "{spoilt}"
        );
        drop(link);
    }
}

/// All of the memory is rewritten at random while the server's side reads, writes and falls asleep: each call
/// ends, and ends well or with an error.
#[test]
fn no_content_of_the_memory_harms_the_server() {
    let mut rng = TestRunner::deterministic().new_rng();
    for _ in 0..200 {
        let (mut link, peer) = hostile();
        let good = Header::request(Opcode::Heartbeat, 1).encode();
        for _ in 0..20 {
            for direction in [Direction::ToServer, Direction::ToClient] {
                for word in [Word::Written, Word::Read, Word::ReaderSleeps, Word::WriterSleeps] {
                    let value = match rng.random_below(4) {
                        0 => rng.next_u64(),
                        1 => rng.next_u64() % u64::from(2 * RING_BYTES),
                        _ => continue,
                    };
                    peer.count(direction, word).store(value, Ordering::Release);
                }
            }
            let at = peer.geometry.bytes(Direction::ToServer) + rng.random_below(200);
            let bytes = if rng.random_below(2) == 0 { good.to_vec() } else { bytes_of(&mut rng, 300) };
            // SAFETY: within the peer's mapping; both sides use it by raw copies only.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), peer.memory.span(at, bytes.len()), bytes.len())
            };
            link.send_head(Urgency::Demand, &good, ());
            let flushed = link.flush();
            let received = link.receive();
            let _ = link.may_sleep(true);
            let placed = matches!(&received, Ok(Received::Head(header)) if header.bulk_len > 0);
            if flushed.is_err() || received.is_err() || placed {
                break;
            }
        }
    }
}

#[test]
fn unrequested_doorbells_do_not_keep_the_socket_readable() {
    let (mut link, peer) = hostile();
    let deadline = Instant::now() + DEADLINE;
    for _ in 0..3 {
        peer.socket.send_from(&[7; 400]).unwrap();
        // Each time it has been woken for nothing it takes some away.
        while !link.may_sleep(true) || is_readable(&link) {
            assert_eq!(link.receive().unwrap(), Received::Blocked);
            assert!(Instant::now() < deadline, "the doorbells ring for ever");
        }
    }
}

fn is_readable(link: &Link) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    poll(&mut [PollFd::new(link, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

#[test]
fn what_was_written_before_the_peer_ended_is_read_first() {
    let (mut link, peer) = hostile();
    let header = Header::request(Opcode::Heartbeat, 9).encode();
    let at = peer.geometry.bytes(Direction::ToServer);
    // SAFETY: within the peer's mapping; both sides use it by raw copies only.
    unsafe {
        std::ptr::copy_nonoverlapping(header.as_ptr(), peer.memory.span(at, header.len()), header.len())
    };
    peer.count(Direction::ToServer, Word::Written).store(header.len() as u64, Ordering::Release);
    drop(peer);
    assert!(matches!(next_received(&mut link), Received::Head(header) if header.request == 9));
    let deadline = Instant::now() + DEADLINE;
    loop {
        assert!(Instant::now() < deadline);
        match link.receive() {
            Ok(received) => assert_eq!(received, Received::Blocked),
            Err(error) => break assert!(matches!(error, LinkError::Closed), "{error}"),
        }
    }
}

#[test]
fn a_reader_that_takes_nothing_blocks_the_writer_until_it_does() {
    let case =
        cases().into_iter().find(|case| case.means == Means::RINGS && case.expect == Security::Open).unwrap();
    let (mut client, mut server) = pair::<()>(&case);
    let bulk = vec![5u8; 2 << 20];
    let mut head = Vec::new();
    encode_frame(&mut head, Header::request(Opcode::Put, 1), &[], bulk.len());
    // SAFETY: `bulk` outlives the link.
    unsafe { client.send(Urgency::Demand, &head, &[Piece { ptr: bulk.as_ptr(), len: bulk.len() }], ()) };
    for _ in 0..100 {
        assert_eq!(client.flush().unwrap(), Flush::Blocked);
    }
    assert_eq!(
        client.queued_bytes(),
        head.len() + bulk.len() - RING_BYTES as usize,
        "a ring takes as much as it is long"
    );
    assert!(client.may_sleep(true));
    assert!(!client.wait(Instant::now() + Duration::from_millis(1)).unwrap(), "nothing has happened");
    assert!(matches!(server.receive().unwrap(), Received::Head(_)));
    assert!(client.wait(Instant::now() + DEADLINE).unwrap(), "there is room");
    assert_eq!(client.flush().unwrap(), Flush::Blocked);
}

/// A server that hears a client no more, because that takes no answers, only ever sends to it.
#[test]
fn who_waits_for_room_hears_that_the_peer_has_ended() {
    let (mut link, peer) = hostile();
    let bulk = vec![0; 2 * RING_BYTES as usize];
    let mut head = Vec::new();
    encode_frame(&mut head, Header::request(Opcode::Put, 1), &[], bulk.len());
    // SAFETY: the bytes outlive the link, which is dropped first.
    unsafe { link.send(Urgency::Demand, &head, &[Piece { ptr: bulk.as_ptr(), len: bulk.len() }], ()) };
    assert_eq!(link.flush().unwrap(), Flush::Blocked);
    assert!(link.may_sleep(false));
    drop(peer);
    let deadline = Instant::now() + DEADLINE;
    let error = loop {
        assert!(Instant::now() < deadline, "the end is not noticed");
        match link.flush() {
            Ok(flushed) => assert_eq!(flushed, Flush::Blocked),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LinkError::Closed), "{error}");
    drop(link);
}

#[test]
fn rings_are_not_forced_on_who_cannot_take_them() {
    // The client does not map what it is offered.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut server = Handshake::server(Stream::adopt(theirs).unwrap(), PLAIN, None);
    let socket = Stream::adopt(ours).unwrap();
    socket.send_from(&Preface::ask(Encryption::Auto, false, features::RINGS, 1).encode()).unwrap();
    assert!(server.advance::<()>().unwrap().is_none());
    socket.send_from(&Offer::NONE.encode()).unwrap();
    assert_eq!(server.advance::<()>().unwrap().expect("the handshake is over").means(), Means::UNIX_SOCKET);
    // One side knows nothing of them.
    let without = LocalPolicy { features: 0, ..PLAIN };
    let dir = tempfile::tempdir().unwrap();
    for (client, server) in [(PLAIN, without.clone()), (without, PLAIN)] {
        let (client, server) = shake::<()>(&Endpoint::Unix(dir.path().join("s")), client, server);
        assert_eq!(
            (client.unwrap().means(), server.unwrap().means()),
            (Means::UNIX_SOCKET, Means::UNIX_SOCKET)
        );
    }
    // Nothing shares memory over TCP, whatever both ends can.
    let (client, server) = shake::<()>(&"127.0.0.1:0".parse().unwrap(), PLAIN, PLAIN);
    assert_eq!((client.unwrap().means(), server.unwrap().means()), (Means::TCP, Means::TCP));
}

/// A server that offers what a client must not map: nothing at all, memory that is not sealed, garbage.
#[test]
fn an_offer_that_is_not_what_it_says_is_declined_or_ends_the_handshake() {
    let offer = Offer::of(RING_BYTES).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let short = SealedMemory::create(c"test", 4096).unwrap().1;
    for handed in [None, Some(file.as_fd()), Some(short.as_fd())] {
        let (mut client, server) = offered(&offer.encode(), handed);
        assert_eq!(
            client.advance::<()>().unwrap().expect("the handshake is over").means(),
            Means::UNIX_SOCKET
        );
        let mut answer = [0; OFFER_BYTES];
        assert_eq!(server.receive_into(&mut answer).unwrap(), Some(OFFER_BYTES));
        assert_eq!(Offer::parse(&answer), Ok(Offer::NONE));
    }
    let (mut client, _server) = offered(&[0xff; OFFER_BYTES], None);
    assert!(
        matches!(client.advance::<()>(), Err(HandshakeError::Transport(error)) if error.is::<OfferError>())
    );
}

/// A client that has been offered this.
fn offered(offer: &[u8], handed: Option<std::os::fd::BorrowedFd<'_>>) -> (Handshake, Stream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut client = Handshake::client(Stream::adopt(ours).unwrap(), PLAIN);
    assert!(client.advance::<()>().unwrap().is_none());
    let server = Stream::adopt(theirs).unwrap();
    let mut preface = [0; PREFACE_BYTES];
    assert_eq!(server.receive_into(&mut preface).unwrap(), Some(PREFACE_BYTES));
    let policy = rampool_wire::session::ServerPolicy {
        encryption: Encryption::Auto,
        has_key: false,
        features: features::RINGS,
        local_peer: true,
        refuse: None,
    };
    let answer = rampool_wire::session::agree(&Preface::parse(&preface).unwrap(), &policy, 2);
    server.send_from(&answer.encode()).unwrap();
    match handed {
        Some(fd) => server.send_with(offer, &[fd]).unwrap(),
        None => server.send_from(offer).unwrap(),
    };
    (client, server)
}
