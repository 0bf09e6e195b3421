//! UCX: peers that are hostile, of another kind, or gone.

use super::*;
use rampool_ucx::{Channel, Context, UcxError};
use rampool_wire::fabric;
use rampool_wire::session::{PREFACE_BYTES, Preface};

pub(super) const TCP: &str = "tcp";
pub(super) const SHARED_MEMORY: &str = "posix,cma";
pub(super) const SYSV: &str = "sysv";
/// What a side lets the other have on its way.
const WINDOW: usize = 64;

fn why(error: &HandshakeError) -> Option<&FabricError> {
    let HandshakeError::Transport(error) = error else { return None };
    error.downcast_ref()
}

/// UCX with these transports alone.
pub(super) fn over(transports: &str) -> Context {
    Context::open(Some(transports))
        .unwrap_or_else(|error| panic!("the tests need UCX (scripts/setup.sh test installs it): {error}"))
}

/// Transports of UCX that go through the suite instead of those that are everywhere, each as `UCX_TLS` has
/// it, with spaces between: `scripts/test-rdma.sh` names those over RDMA.
const INSTEAD: &str = "RAMPOOL_TEST_UCX";

/// Those transports, if there are any.
pub(super) fn instead() -> Option<String> {
    std::env::var(INSTEAD).ok()
}

/// What carries a link, with UCX over what is everywhere.
pub(super) fn carriers() -> Vec<(Means, Option<Context>)> {
    let plain = [Means::TCP, Means::UNIX_SOCKET, Means::RINGS].map(|means| (means, None));
    let everywhere = [TCP, SHARED_MEMORY, SYSV].map(str::to_owned).to_vec();
    let ucx: Vec<String> =
        instead().map_or(everywhere, |instead| instead.split_whitespace().map(str::to_owned).collect());
    plain.into_iter().chain(ucx.iter().map(|transports| (Means::UCX, Some(over(transports))))).collect()
}

fn plain(ucx: Option<Context>) -> LocalPolicy {
    LocalPolicy { key: None, encryption: Encryption::Auto, features: 0, ucx }
}

fn tcp() -> Endpoint {
    "127.0.0.1:0".parse().unwrap()
}

/// A client that follows the protocol as far as UCX, and does there what it likes.
struct Hostile {
    socket: Stream,
    channel: Channel,
}

/// A client that follows the protocol until the server has told where it is in UCX.
fn half_way(context: &Context) -> (Handshake, Stream, fabric::Offer) {
    let listener = Listener::bind(&tcp()).unwrap();
    let socket = Stream::connect(listener.endpoint(), Instant::now() + DEADLINE).unwrap();
    let mut server = Handshake::server(accept(&listener), plain(Some(context.clone())), None);
    socket.send_from(&Preface::ask(Encryption::Auto, false, features::UCX, 1).encode()).unwrap();
    let mut got = Vec::new();
    let told = |got: &[u8]| {
        got.get(PREFACE_BYTES..PREFACE_BYTES + 2).map(|len| usize::from(u16::from_le_bytes([len[0], len[1]])))
    };
    let deadline = Instant::now() + DEADLINE;
    loop {
        assert!(Instant::now() < deadline, "the server tells nothing");
        assert!(server.advance::<()>().unwrap().is_none());
        let mut bytes = [0; 4096];
        if let Some(len) = socket.receive_into(&mut bytes).unwrap() {
            got.extend_from_slice(&bytes[..len]);
        }
        if let Some(len) = told(&got)
            && let Some(offer) = got.get(PREFACE_BYTES + 2..PREFACE_BYTES + 2 + len)
        {
            return (server, socket, fabric::Offer::parse(offer).unwrap());
        }
    }
}

fn say(socket: &Stream, offer: &[u8]) {
    let message = [&u16::try_from(offer.len()).unwrap().to_le_bytes()[..], offer].concat();
    assert_eq!(socket.send_from(&message).unwrap(), Some(message.len()));
}

/// What comes of the server's handshake.
fn outcome(server: &mut Handshake) -> Result<Link, HandshakeError> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        assert!(Instant::now() < deadline, "the handshake hangs");
        if let Some(link) = server.advance()? {
            return Ok(link);
        }
    }
}

/// A server's link, and the hostile client at its other end.
fn hostile() -> (Link, Hostile) {
    let context = over(TCP);
    let (mut server, socket, theirs) = half_way(&context);
    let mut channel = Channel::open(&context, WINDOW).unwrap();
    let address = channel.address().unwrap();
    // SAFETY: the server has made it so.
    let mode = unsafe { channel.connect(&theirs.address, None) }.unwrap();
    assert_eq!(mode, rampool_ucx::Mode::Watched);
    say(&socket, &fabric::Offer { watch: 1, address, ..theirs }.encode());
    let link = outcome(&mut server).unwrap();
    assert_eq!(link.means(), Means::UCX);
    (link, Hostile { socket, channel })
}

/// UCX ends the process over an invalid address. What can be checked of it is checked before.
#[test]
fn addresses_that_ucx_never_makes_are_refused() {
    let context = over(TCP);
    for address in [vec![0xff; 100], vec![0], vec![0; 100], b"nonsense".to_vec()] {
        let (mut server, socket, theirs) = half_way(&context);
        say(&socket, &fabric::Offer { watch: 1, address, ..theirs }.encode());
        let error = outcome(&mut server).err().unwrap();
        assert!(matches!(why(&error), Some(FabricError::Address)), "{error}");
    }
}

impl Hostile {
    fn send(&mut self, number: u64, bytes: &[u8]) {
        let deadline = Instant::now() + DEADLINE;
        let fill = |to: *mut u8| {
            // SAFETY: there is room for a message.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            bytes.len()
        };
        while !self.channel.has_room() {
            assert!(Instant::now() < deadline, "nothing leaves");
            self.channel.progress();
        }
        assert!(self.channel.send(number, fill).unwrap());
    }

    /// Lets both sides work until the link has something to say.
    fn until_an_error(&mut self, link: &mut Link) -> LinkError {
        let deadline = Instant::now() + DEADLINE;
        loop {
            assert!(Instant::now() < deadline, "nothing was noticed");
            self.channel.progress();
            match link.receive() {
                Ok(_) => {}
                Err(error) => return error,
            }
        }
    }
}

fn is_invalid(error: &LinkError) -> bool {
    matches!(error, LinkError::Io(error) if error.kind() == std::io::ErrorKind::InvalidData)
}

#[test]
fn counts_that_cannot_be_end_the_link() {
    for number in [1, u64::MAX] {
        let (mut link, mut peer) = hostile();
        peer.send(number, &[]);
        let error = peer.until_an_error(&mut link);
        assert!(is_invalid(&error), "{number}: {error}");
        assert!(!link.may_sleep(true), "what is wrong is to be seen at once");
    }
}

#[test]
fn a_peer_that_sends_more_than_it_was_granted_is_cut_off() {
    let (mut link, mut peer) = hostile();
    for _ in 0..=WINDOW {
        peer.send(0, &[7; 100]);
    }
    let deadline = Instant::now() + DEADLINE;
    // The receiver does not read: the messages stay where they are, and the one too many is noticed all the
    // same.
    loop {
        assert!(Instant::now() < deadline, "it was not noticed");
        peer.channel.progress();
        link.send_head(Urgency::Demand, &Header::request(Opcode::Heartbeat, 1).encode(), ());
        match link.flush() {
            Ok(_) => {}
            Err(error) => {
                break assert!(
                    matches!(
                        error,
                        LinkError::Io(ref error) if error.kind() == std::io::ErrorKind::InvalidData
                    ),
                    "{error}"
                );
            }
        }
    }
}

/// What is to be fetched may lie anywhere that the peer says, in this process's memory too.
#[test]
fn a_message_that_stays_with_its_sender_is_not_fetched_and_ends_the_link() {
    static BYTES: [u8; 100_000] = [5; 100_000];
    let (mut link, mut peer) = hostile();
    peer.channel.send_to_be_fetched(&BYTES);
    let error = peer.until_an_error(&mut link);
    assert!(is_invalid(&error), "{error}");
}

#[test]
fn no_message_harms_the_server() {
    let mut rng = TestRunner::deterministic().new_rng();
    for _ in 0..4 {
        let (mut link, mut peer) = hostile();
        for _ in 0..WINDOW / 2 {
            let len = rng.random_below(rampool_ucx::SEGMENT_BYTES + 1);
            let bytes = bytes_of(&mut rng, len);
            peer.send(0, &bytes);
        }
        let error = peer.until_an_error(&mut link);
        assert!(matches!(error, LinkError::Wire(_)), "{error}");
    }
}

#[test]
fn what_does_not_set_ucx_up_is_refused() {
    let context = over(TCP);
    type Answer = fn(fabric::Offer) -> Vec<u8>;
    type Refused = fn(&HandshakeError) -> bool;
    let malformed: Refused =
        |error| matches!(error, HandshakeError::Transport(error) if error.is::<fabric::OfferError>());
    let cases: [(Answer, Refused); 5] = [
        (|offer| offer.encode()[1..].to_vec(), malformed),
        (|_| vec![0; 40], malformed),
        (|_| fabric::Offer::NONE.encode(), |error| matches!(why(error), Some(FabricError::Refused))),
        (
            |offer| fabric::Offer { major: offer.major + 1, ..offer }.encode(),
            |error| matches!(why(error), Some(FabricError::Version { .. })),
        ),
        (
            |offer| fabric::Offer { message_bytes: 1 << 20, ..offer }.encode(),
            |error| matches!(why(error), Some(FabricError::Messages)),
        ),
    ];
    for (answer, refused) in cases {
        let (mut server, socket, theirs) = half_way(&context);
        say(&socket, &answer(theirs));
        let error = outcome(&mut server).err().expect("it was taken for an address");
        assert!(refused(&error), "{error}");
    }
    for len in [0u16, 10, u16::MAX] {
        let (mut server, socket, _) = half_way(&context);
        socket.send_from(&len.to_le_bytes()).unwrap();
        let error = outcome(&mut server).err().expect("it was taken for an address");
        assert!(malformed(&error), "{len}: {error}");
    }
}

/// With a key, the UCX addresses are sealed: a machine between the two cannot redirect UCX.
#[test]
fn addresses_are_sealed_where_there_is_a_key() {
    let policy = LocalPolicy { key: Some(Key::generate()), ..plain(Some(over(TCP))) };
    let (ours, theirs) = (Listener::bind(&tcp()).unwrap(), Listener::bind(&tcp()).unwrap());
    let deadline = Instant::now() + DEADLINE;
    let connect =
        |listener: &Listener| (Stream::connect(listener.endpoint(), deadline).unwrap(), accept(listener));
    let ((client, near), (far, server)) = (connect(&ours), connect(&theirs));
    let (mut client, mut server) =
        (Handshake::client(client, policy.clone()), Handshake::server(server, policy, None));
    let mut from_server = Vec::new();
    let error = loop {
        assert!(Instant::now() < deadline, "the handshake hangs");
        match client.advance::<()>() {
            Ok(link) => assert!(link.is_none(), "an altered address was believed"),
            Err(error) => break error,
        }
        let mut bytes = [0; 4096];
        if let Some(len) = near.receive_into(&mut bytes).unwrap() {
            far.send_from(&bytes[..len]).unwrap();
        }
        assert!(server.advance::<()>().unwrap().is_none());
        if let Some(len) = far.receive_into(&mut bytes).unwrap() {
            // The preface, the server's half of the proof and its length; then what it tells.
            let before = PREFACE_BYTES + 2 + 48;
            for (at, byte) in (from_server.len()..).zip(&mut bytes[..len]) {
                from_server.push(*byte);
                *byte ^= u8::from(at == before + 40);
            }
            near.send_from(&bytes[..len]).unwrap();
        }
    };
    assert!(matches!(error, HandshakeError::WrongKey), "{error}");
    assert!(!from_server.windows(8).any(|bytes| bytes == b"RAMPLUCX"), "it travels for all to read");
}

#[test]
fn who_does_not_offer_ucx_is_named_and_who_does_not_ask_is_served_over_tcp() {
    let (client, _server) = shake::<()>(&tcp(), plain(Some(over(TCP))), plain(None));
    assert!(matches!(why(&client.err().unwrap()), Some(FabricError::NotOffered)));
    let (client, server) = shake::<()>(&tcp(), plain(None), plain(Some(over(TCP))));
    assert_eq!((client.unwrap().means(), server.unwrap().means()), (Means::TCP, Means::TCP));
}

#[test]
fn two_without_a_transport_in_common_do_not_meet() {
    let (client, _server) = shake::<()>(&tcp(), plain(Some(over(SYSV))), plain(Some(over(TCP))));
    let error = client.err().expect("they have nothing in common").to_string();
    assert!(error.contains("UCX_TLS") && error.contains("sysv"), "{error}");
}

/// What UCX itself has to say to such a peer still waits when the connection is closed.
#[test]
fn who_has_gone_before_the_connection_was_made_does_not_end_the_process() {
    for transports in instead().as_deref().unwrap_or(TCP).split_whitespace() {
        let context = over(transports);
        let address = Channel::open(&context, WINDOW).unwrap().address().unwrap();
        for calls in [0, 1, 100] {
            let mut channel = Channel::open(&context, WINDOW).unwrap();
            // SAFETY: made by `address`.
            match unsafe { channel.connect(&address, None) } {
                Ok(_) => (0..calls).for_each(|_| _ = channel.progress()),
                // Sockets say so at once.
                Err(error) => assert!(matches!(error, UcxError::Unreachable(_)), "{transports}: {error}"),
            }
        }
    }
}

/// When a peer closes in good order, its last messages are read, however late; when a peer dies, its socket
/// tells.
#[test]
fn the_last_words_of_a_peer_are_heard_and_its_death_is_noticed() {
    for case in super::cases().into_iter().filter(|case| case.means == Means::UCX) {
        let (mut client, mut server) = pair::<()>(&case);
        let bulk = vec![3u8; 5000];
        for request in 0..40 {
            let mut head = Vec::new();
            encode_frame(&mut head, Header::request(Opcode::Put, request), &[], bulk.len());
            // SAFETY: `bulk` outlives the link.
            unsafe {
                client.send(Urgency::Demand, &head, &[Piece { ptr: bulk.as_ptr(), len: bulk.len() }], ())
            };
        }
        let deadline = Instant::now() + DEADLINE;
        let reader = std::thread::spawn(move || {
            let mut room = [0u8; 5000];
            let mut bulks = 0;
            loop {
                match server.receive() {
                    Ok(Received::Blocked) => {
                        assert!(server.wait(deadline).unwrap(), "neither the end nor the frames, but {bulks}")
                    }
                    // SAFETY: `room` is not touched before `Bulk`.
                    Ok(Received::Head(_)) => unsafe {
                        server.place(&[PieceMut { ptr: room.as_mut_ptr(), len: room.len() }])
                    },
                    Ok(Received::Bulk(_)) => bulks += 1,
                    Err(error) => return (bulks, error),
                }
            }
        });
        while client.flush().unwrap() == Flush::Blocked {
            assert!(client.wait(deadline).unwrap(), "the peer does not read");
        }
        drop(client);
        let (bulks, error) = reader.join().unwrap();
        assert!(bulks == 40 && matches!(error, LinkError::Closed), "{bulks} frames, then {error}");
    }
    let (mut link, peer) = hostile();
    let Hostile { socket, channel } = peer;
    drop(socket);
    let deadline = Instant::now() + DEADLINE;
    assert!(link.wait(deadline).unwrap(), "the link is not woken");
    loop {
        assert!(Instant::now() < deadline, "a death is not noticed while UCX says nothing of it");
        match link.receive() {
            Ok(received) => assert_eq!(received, Received::Blocked),
            Err(error) => break assert!(matches!(error, LinkError::Closed), "{error}"),
        }
    }
    drop(channel);
}
