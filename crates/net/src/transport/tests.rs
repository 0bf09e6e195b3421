//! One suite over every way that frames can travel: TCP, Unix sockets, shared memory, and UCX over TCP and
//! over its own shared memory; open, proved, sealed.

mod rings;
mod ucx;

use super::*;
use crate::key::Key;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRng, TestRunner};
use rampool_wire::checksum;
use rampool_wire::frame::{Header, Opcode, WireError, encode_frame};
use rampool_wire::session::{Encryption, Refusal, Security, features};
use rampool_wire::tenant::TenantId;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(30);

struct Case {
    endpoint: Endpoint,
    client: LocalPolicy,
    server: LocalPolicy,
    expect: Security,
    means: Means,
    _dir: tempfile::TempDir,
}

fn cases() -> Vec<Case> {
    let key = Key::generate();
    let mut cases = Vec::new();
    let tcp = || Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 };
    for (means, ucx) in ucx::carriers() {
        let features = if means == Means::RINGS { features::RINGS } else { 0 };
        let policy = |keyed: bool, encryption| LocalPolicy {
            key: keyed.then(|| key.clone()),
            encryption,
            features,
            ucx: ucx.clone(),
        };
        for (keyed, encryption, expect) in [
            (false, Encryption::Auto, Security::Open),
            (true, Encryption::Auto, Security::ProvedPlain),
            (true, Encryption::On, Security::Sealed),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let endpoint = if matches!(means, Means::TCP | Means::UCX) {
                tcp()
            } else {
                Endpoint::Unix(dir.path().join("s"))
            };
            let (client, server) = (policy(keyed, encryption), policy(keyed, Encryption::Auto));
            cases.push(Case { endpoint, client, server, expect, means, _dir: dir });
        }
    }
    cases
}

/// Runs both sides of a handshake in one thread.
fn shake<G>(
    endpoint: &Endpoint,
    client: LocalPolicy,
    server: LocalPolicy,
) -> (Result<Link<G>, HandshakeError>, Result<Link<G>, HandshakeError>) {
    let listener = Listener::bind(endpoint).unwrap();
    let stream = Stream::connect(listener.endpoint(), Instant::now() + DEADLINE).unwrap();
    let mut client = Handshake::client(stream, client);
    let mut server = Handshake::server(accept(&listener), server, None);
    let (mut client_end, mut server_end) = (None, None);
    let deadline = Instant::now() + DEADLINE;
    while client_end.is_none() || server_end.is_none() {
        assert!(Instant::now() < deadline, "the handshake hangs");
        if client_end.is_none() {
            client_end = client.advance().transpose();
            if matches!(client_end, Some(Err(_))) {
                client = Handshake::client(
                    accept_none(),
                    LocalPolicy { key: None, encryption: Encryption::Auto, features: 0, ucx: None },
                );
            }
        }
        if server_end.is_none() {
            server_end = server.advance().transpose();
            if matches!(server_end, Some(Err(_))) {
                server = Handshake::server(
                    accept_none(),
                    LocalPolicy { key: None, encryption: Encryption::Auto, features: 0, ucx: None },
                    None,
                );
            }
        }
    }
    (client_end.unwrap(), server_end.unwrap())
}

/// A stream without a peer: what a closed server leaves.
fn accept_none() -> Stream {
    Stream::adopt(std::os::unix::net::UnixStream::pair().unwrap().0).unwrap()
}

fn accept(listener: &Listener) -> Stream {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(stream) = listener.accept().unwrap() {
            return stream;
        }
        assert!(Instant::now() < deadline, "no client connects");
        std::thread::yield_now();
    }
}

fn pair<G>(case: &Case) -> (Link<G>, Link<G>) {
    let (client, server) = shake(&case.endpoint, case.client.clone(), case.server.clone());
    let (client, server) = (client.unwrap(), server.unwrap());
    assert_eq!((client.security(), server.security()), (case.expect, case.expect));
    assert_eq!((client.means(), server.means()), (case.means, case.means));
    (client, server)
}

fn bytes_of(rng: &mut TestRng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill_bytes(&mut bytes);
    bytes
}

struct Sent {
    request: u64,
    table: Vec<u8>,
    bulk: Vec<u8>,
}

/// Receives what there is into `arriving`, and checks complete frames against what was sent.
fn drain<G>(link: &mut Link<G>, arriving: &mut Vec<u8>, expected: &mut VecDeque<Rc<Sent>>, cut: usize) {
    loop {
        match link.receive().unwrap() {
            Received::Blocked => return,
            Received::Head(header) => {
                let want = expected.front().expect("a frame that was never sent");
                assert_eq!((header.request, link.table()), (want.request, &want.table[..]));
                if header.bulk_len == 0 {
                    assert!(want.bulk.is_empty());
                    expected.pop_front();
                } else {
                    *arriving = vec![0xee; header.bulk_len as usize];
                    let cut = cut % arriving.len();
                    let start = arriving.as_mut_ptr();
                    let pieces = [
                        PieceMut { ptr: start, len: cut },
                        PieceMut { ptr: start.wrapping_add(cut), len: arriving.len() - cut },
                    ];
                    // SAFETY: `arriving` is not touched before `Bulk`.
                    unsafe { link.place(&pieces) };
                }
            }
            Received::Bulk(_) => {
                let want = expected.pop_front().expect("seen at its head");
                assert!(want.bulk == *arriving, "bulk of frame {} is altered", want.request);
            }
        }
    }
}

#[test]
fn frames_arrive_whole_and_in_order_over_every_way() {
    let mut runner = TestRunner::deterministic();
    for case in cases() {
        let mut rng = runner.new_rng();
        let (mut client, mut server) = pair::<Rc<Sent>>(&case);
        let mut expected = VecDeque::new();
        let mut arriving = Vec::new();
        for request in 0..120u64 {
            let table_len = [0, 16, 5000, 16384][rng.random_below(4)];
            let bulk_len = [0, 1, 4096, 65_536, 65_519, 300_000, 2_097_152][rng.random_below(7)];
            let sent = Rc::new(Sent {
                request,
                table: bytes_of(&mut rng, table_len),
                bulk: bytes_of(&mut rng, bulk_len),
            });
            let mut head = Vec::new();
            encode_frame(&mut head, Header::request(Opcode::Put, request), &sent.table, bulk_len);
            let cut = rng.random_below(bulk_len + 1);
            let (left, right) = sent.bulk.split_at(cut);
            let pieces = [left, right].map(|half| Piece { ptr: half.as_ptr(), len: half.len() });
            // SAFETY: the guard keeps the bytes alive.
            unsafe { client.send(Urgency::Demand, &head, &pieces, Rc::clone(&sent)) };
            expected.push_back(sent);
            client.flush().unwrap();
            if rng.random_below(3) == 0 {
                drain(&mut server, &mut arriving, &mut expected, rng.random_below(5000) + 1);
            }
        }
        let deadline = Instant::now() + DEADLINE;
        while !expected.is_empty() {
            assert!(Instant::now() < deadline, "frames do not arrive");
            client.flush().unwrap();
            drain(&mut server, &mut arriving, &mut expected, 77);
        }
        assert_eq!(client.queued_bytes(), 0);
    }
}

#[test]
fn guards_are_held_until_the_frame_has_left_and_dropped_with_the_link() {
    for case in cases() {
        let (mut client, mut server) = pair::<Rc<()>>(&case);
        let guard = Rc::new(());
        let page = vec![7u8; 2 << 20];
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::Put, 1), &[], page.len());
        let piece = [Piece { ptr: page.as_ptr(), len: page.len() }];
        // SAFETY: `page` outlives the link.
        let send = |client: &mut Link<Rc<()>>| unsafe {
            client.send(Urgency::Demand, &head, &piece, Rc::clone(&guard))
        };
        (0..20).for_each(|_| send(&mut client));
        assert_eq!(Rc::strong_count(&guard), 21);
        assert_eq!(client.flush().unwrap(), Flush::Blocked, "40 MiB fit neither a socket buffer nor a ring");
        assert!(Rc::strong_count(&guard) > 1);
        let mut room = vec![0u8; page.len()];
        let mut bulks = 0;
        let deadline = Instant::now() + DEADLINE;
        while bulks < 10 {
            assert!(Instant::now() < deadline);
            client.flush().unwrap();
            match server.receive().unwrap() {
                Received::Blocked => {}
                // SAFETY: `room` is not touched before `Bulk`.
                Received::Head(_) => unsafe {
                    server.place(&[PieceMut { ptr: room.as_mut_ptr(), len: room.len() }])
                },
                Received::Bulk(_) => bulks += 1,
            }
        }
        let held = Rc::strong_count(&guard);
        assert!(held <= 11, "{held} guards, 10 frames have arrived");
        // The kernel may have taken all of the others: it lets a socket's buffers grow, to 32 MiB by default.
        while Rc::strong_count(&guard) == 1 {
            send(&mut client);
            client.flush().unwrap();
        }
        drop(client);
        assert_eq!(Rc::strong_count(&guard), 1);
    }
}

/// With `copies`, the link does not read the pieces after `send`, whatever becomes of their memory.
#[test]
fn what_a_link_says_it_copies_arrives_as_it_was_when_it_was_sent() {
    for case in cases() {
        let (mut client, mut server) = pair::<()>(&case);
        let open = matches!(case.means, Means::TCP | Means::UNIX_SOCKET | Means::RINGS)
            && case.expect != Security::Sealed;
        assert_eq!(client.copies(4096), open, "{:?}, {:?}", case.means, case.expect);
        assert!(!client.copies(4097), "{:?}: long bulk leaves from where it lies", case.means);
        if !open {
            continue;
        }
        let was: Vec<u8> = (0..=u8::MAX).cycle().take(4096).collect();
        for cuts in [[0, 0], [1, 4095], [100, 100], [8, 4096]] {
            let mut bytes = was.clone();
            let start = bytes.as_mut_ptr();
            let pieces = [0..cuts[0], cuts[0]..cuts[1], cuts[1]..4096]
                .map(|part| Piece { ptr: start.wrapping_add(part.start), len: part.len() });
            let mut head = Vec::new();
            encode_frame(&mut head, Header::request(Opcode::Put, 1), b"table", bytes.len());
            // SAFETY: the link copies this much, so it reads nothing of it after this call.
            unsafe { client.send(Urgency::Demand, &head, &pieces, ()) };
            bytes.fill(0xee);
            drop(bytes);
            client.flush().unwrap();
            let header = next_head(&mut server);
            assert_eq!((header.bulk_len, server.table()), (4096, &b"table"[..]));
            let mut room = vec![0; 4096];
            // SAFETY: `room` is not touched before `Bulk`.
            unsafe { server.place(&[PieceMut { ptr: room.as_mut_ptr(), len: room.len() }]) };
            assert_eq!(next_received(&mut server), Received::Bulk(header));
            assert!(room == was, "cut at {cuts:?}");
        }
    }
}

#[test]
fn connections_within_a_machine_are_not_paced() {
    for case in cases().iter().filter(|case| case.means == Means::TCP) {
        let (client, server) = pair::<()>(case);
        for link in [&client, &server] {
            let name = socket2::SockRef::from(&link.socket()).tcp_congestion().unwrap();
            assert!(name.starts_with(b"reno"), "{:?}", String::from_utf8_lossy(&name));
        }
    }
}

#[test]
fn what_a_thread_waits_for_overtakes_what_has_not_begun_to_leave() {
    for case in cases() {
        let (mut client, mut server) = pair::<()>(&case);
        for (request, urgency) in [
            (1, Urgency::WriteBack),
            (2, Urgency::Prefetch),
            (3, Urgency::WriteBack),
            (4, Urgency::Demand),
            (5, Urgency::Prefetch),
        ] {
            client.send_head(urgency, &Header::request(Opcode::Heartbeat, request).encode(), ());
        }
        client.flush().unwrap();
        let mut order = Vec::new();
        let deadline = Instant::now() + DEADLINE;
        while order.len() < 5 {
            assert!(Instant::now() < deadline);
            // UCX sends while it is called.
            client.flush().unwrap();
            if let Received::Head(header) = server.receive().unwrap() {
                order.push(header.request);
            }
        }
        assert_eq!(order, [4, 2, 5, 1, 3]);
    }
}

/// Sends and receives that stop after each part bring what others bring, and stop where they are told to.
#[test]
fn a_long_frame_is_sent_and_received_in_parts() {
    for case in cases() {
        let (mut client, mut server) = pair::<()>(&case);
        let bulk: Vec<u8> = (0..2_u32 << 20).map(|byte| (byte % 251) as u8).collect();
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::Put, 1), &[], bulk.len());
        // SAFETY: `bulk` outlives the link.
        unsafe { client.send(Urgency::Demand, &head, &[Piece { ptr: bulk.as_ptr(), len: bulk.len() }], ()) };
        let mut room = vec![0u8; bulk.len()];
        let (mut sends, mut receives) = (0, 0);
        let deadline = Instant::now() + DEADLINE;
        loop {
            assert!(Instant::now() < deadline);
            let before = client.queued_bytes();
            let flushed = client.flush_some(50_000, || false).unwrap();
            assert!(before - client.queued_bytes() <= 2 * 65_536, "{:?}", case.means);
            assert_eq!(flushed == Flush::Empty, client.queued_bytes() == 0);
            sends += usize::from(flushed == Flush::Stopped);
            match server.receive_some(|_| {}, 50_000, || false).unwrap() {
                Received::Blocked => receives += usize::from(server.has_stopped()),
                // SAFETY: `room` is not touched before `Bulk`.
                Received::Head(_) => unsafe {
                    server.place(&[PieceMut { ptr: room.as_mut_ptr(), len: room.len() }])
                },
                Received::Bulk(_) => break,
            }
        }
        assert!(room == bulk, "{:?}", case.means);
        assert!(sends > 10 && receives > 2, "{:?}: {sends} {receives}", case.means);
    }
}

#[test]
fn a_started_frame_is_finished_before_anything_overtakes_it() {
    for case in cases() {
        let (mut client, mut server) = pair::<()>(&case);
        let bulk = vec![1u8; 2 << 20];
        let mut head = Vec::new();
        for request in 0..8 {
            head.clear();
            encode_frame(&mut head, Header::request(Opcode::Put, request), &[], bulk.len());
            // SAFETY: `bulk` outlives the link.
            unsafe {
                client.send(Urgency::WriteBack, &head, &[Piece { ptr: bulk.as_ptr(), len: bulk.len() }], ())
            };
        }
        assert_eq!(client.flush().unwrap(), Flush::Blocked);
        client.send_head(Urgency::Demand, &Header::request(Opcode::Get, 100).encode(), ());
        let mut room = vec![0u8; bulk.len()];
        let mut order = Vec::new();
        let deadline = Instant::now() + DEADLINE;
        while order.len() < 9 {
            assert!(Instant::now() < deadline);
            client.flush().unwrap();
            if let Received::Head(header) = server.receive().unwrap() {
                order.push(header.request);
                if header.bulk_len > 0 {
                    // SAFETY: `room` is not touched before `Bulk`.
                    unsafe { server.place(&[PieceMut { ptr: room.as_mut_ptr(), len: room.len() }]) };
                }
            }
        }
        let demand = order.iter().position(|r| *r == 100).unwrap();
        assert!(demand > 0 && demand < 8, "the demand came at place {demand}");
        order.remove(demand);
        assert_eq!(order, (0..8).collect::<Vec<_>>());
    }
}

#[test]
fn different_keys_are_told_apart_at_both_ends() {
    for unix in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let endpoint =
            if unix { Endpoint::Unix(dir.path().join("s")) } else { "127.0.0.1:0".parse().unwrap() };
        let policy =
            |key| LocalPolicy { key: Some(key), encryption: Encryption::Auto, features: 0, ucx: None };
        let (client, server) = shake::<()>(&endpoint, policy(Key::generate()), policy(Key::generate()));
        assert!(matches!(server, Err(HandshakeError::WrongKey)));
        assert!(matches!(client, Err(HandshakeError::WrongKey)));
    }
}

fn tenant(name: &str, generation: u32) -> TenantId {
    TenantId { name: name.parse().unwrap(), generation }
}

fn with_key(key: &Key) -> LocalPolicy {
    LocalPolicy { key: Some(key.clone()), encryption: Encryption::Auto, features: 0, ucx: None }
}

#[test]
fn a_server_with_the_master_knows_each_tenant_by_its_key() {
    let master = Key::generate();
    let endpoint: Endpoint = "127.0.0.1:0".parse().unwrap();
    for of in [tenant("alice", 1), tenant("alice", 2), tenant("bob", 1)] {
        let key = master.derive(of).unwrap();
        let (client, server) = shake::<()>(&endpoint, with_key(&key), with_key(&master));
        assert_eq!((client.unwrap().tenant(), server.unwrap().tenant()), (Some(of), Some(of)));
    }
    let (client, server) = shake::<()>(&endpoint, with_key(&master), with_key(&master));
    assert_eq!((client.unwrap().tenant(), server.unwrap().tenant()), (None, None));
}

#[test]
fn a_tenant_is_neither_another_nor_a_server_for_another() {
    let master = Key::generate();
    let endpoint: Endpoint = "127.0.0.1:0".parse().unwrap();
    let alice = master.derive(tenant("alice", 1)).unwrap();
    let bob = master.derive(tenant("bob", 1)).unwrap();
    // A key that says it is another's, or one's own later generation.
    for claimed in ["bob 1 ", "alice 2 "] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("forged.key");
        std::fs::write(&path, format!("{claimed}{}", alice.to_hex())).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let forged = Key::load(&path).unwrap();
        let (client, server) = shake::<()>(&endpoint, with_key(&forged), with_key(&master));
        assert!(matches!(server, Err(HandshakeError::WrongKey)), "{claimed}");
        assert!(matches!(client, Err(HandshakeError::WrongKey)), "{claimed}");
        // As a server it derives nothing, and has a wrong key where it says that it is the other.
        let (client, _) = shake::<()>(&endpoint, with_key(&bob), with_key(&forged));
        assert!(client.is_err(), "{claimed}");
    }
    // The bare digits of a tenant's key are not the master.
    let bare = Key::from_hex(&alice.to_hex()).unwrap();
    for (client, server) in [(&bare, &master), (&bob, &bare), (&master, &bare)] {
        let (client, server) = shake::<()>(&endpoint, with_key(client), with_key(server));
        assert!(matches!(server, Err(HandshakeError::WrongKey)));
        assert!(matches!(client, Err(HandshakeError::WrongKey)));
    }
    for other in [&bob, &master] {
        let (client, server) = shake::<()>(&endpoint, with_key(other), with_key(&alice));
        assert!(matches!(server, Err(HandshakeError::Refused(Refusal::OtherTenant))));
        assert!(client.is_err());
    }
    let (client, server) = shake::<()>(&endpoint, with_key(&alice), with_key(&alice));
    assert_eq!((client.unwrap().tenant(), server.unwrap().tenant()), (alice.tenant(), alice.tenant()));
}

#[test]
fn a_gate_refuses_before_the_proof() {
    let master = Key::generate();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let gate: Gate = Arc::new(|of: TenantId| (of.generation < 2).then_some(Refusal::Revoked));
    let mut server =
        Handshake::server(Stream::adopt(theirs).unwrap(), with_key(&master), None).with_gate(gate.clone());
    let old = master.derive(tenant("alice", 1)).unwrap();
    let mut client = Handshake::client(Stream::adopt(ours).unwrap(), with_key(&old));
    assert!(client.advance::<()>().unwrap().is_none());
    assert!(matches!(server.advance::<()>(), Err(HandshakeError::Refused(Refusal::Revoked))));
    let told = client.advance::<()>().err().unwrap();
    assert!(told.to_string().contains("revoked") && !told.may_pass(), "{told}");
}

/// Whatever in the first bytes of a tenant is changed on the way: there is no link.
#[test]
fn a_changed_tenant_or_preface_ends_the_handshake() {
    let master = Key::generate();
    let alice = master.derive(tenant("alice", 1)).unwrap();
    for at in 0..rampool_wire::session::PREFACE_BYTES + rampool_wire::tenant::TENANT_BYTES {
        let (client_side, middle_client) = std::os::unix::net::UnixStream::pair().unwrap();
        let (middle_server, server_side) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut client = Handshake::client(Stream::adopt(client_side).unwrap(), with_key(&alice));
        let mut server = Handshake::server(Stream::adopt(server_side).unwrap(), with_key(&master), None);
        assert!(client.advance::<()>().unwrap().is_none());
        let mut first = [0; 72];
        std::io::Read::read_exact(&mut &middle_client, &mut first).unwrap();
        first[at] ^= 2;
        let (preface, of) = first.split_at_mut(32);
        for part in [preface, of] {
            let (body, crc) = part.split_at_mut(part.len() - 4);
            crc.copy_from_slice(&checksum::crc32c(body).to_le_bytes());
        }
        if (28..32).contains(&at) || (68..72).contains(&at) {
            continue;
        }
        std::io::Write::write_all(&mut &middle_server, &first).unwrap();
        for socket in [&middle_client, &middle_server] {
            socket.set_nonblocking(true).unwrap();
        }
        let pass = |from: &std::os::unix::net::UnixStream, to: &std::os::unix::net::UnixStream| {
            let mut some = [0; 1024];
            if let Ok(n) = std::io::Read::read(&mut &*from, &mut some) {
                // The other end may have closed.
                let _ = std::io::Write::write_all(&mut &*to, &some[..n]);
            }
        };
        let (mut ours, mut theirs) = (None, None);
        for _ in 0..6 {
            theirs = theirs.or_else(|| server.advance::<()>().transpose());
            pass(&middle_server, &middle_client);
            ours = ours.or_else(|| client.advance::<()>().transpose());
            pass(&middle_client, &middle_server);
            if theirs.as_ref().is_some_and(Result::is_err) || ours.as_ref().is_some_and(Result::is_err) {
                break;
            }
        }
        assert!(!matches!(theirs, Some(Ok(_))), "byte {at}");
        assert!(!matches!(ours, Some(Ok(_))), "byte {at}");
    }
}

#[test]
fn a_missing_key_is_named_at_both_ends() {
    let keyed =
        LocalPolicy { key: Some(Key::generate()), encryption: Encryption::Auto, features: 0, ucx: None };
    let keyless = LocalPolicy { key: None, ..keyed.clone() };
    let endpoint: Endpoint = "127.0.0.1:0".parse().unwrap();
    let (client, server) = shake::<()>(&endpoint, keyless.clone(), keyed.clone());
    assert!(matches!(server, Err(HandshakeError::Refused(Refusal::KeyNeeded))));
    assert!(client.is_err_and(|e| e.to_string().contains("--key-file")));
    let (client, server) = shake::<()>(&endpoint, keyed, keyless);
    assert!(matches!(server, Err(HandshakeError::Refused(Refusal::NoKeyHere))));
    assert!(client.is_err());
}

/// Sends these bytes to a server that shakes hands with `policy`, then shuts the sending side; says how the
/// handshake ended.
fn greet(policy: &LocalPolicy, bytes: &[u8]) -> Result<Link, HandshakeError> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut handshake = Handshake::server(Stream::adopt(theirs).unwrap(), policy.clone(), None);
    let deadline = Instant::now() + DEADLINE;
    std::io::Write::write_all(&mut &ours, bytes).unwrap();
    ours.shutdown(std::net::Shutdown::Write).unwrap();
    loop {
        if let Some(link) = handshake.advance()? {
            return Ok(link);
        }
        assert!(Instant::now() < deadline, "the handshake hangs");
    }
}

#[test]
fn garbage_cut_and_foreign_greetings_end_in_an_error() {
    let policy =
        LocalPolicy { key: Some(Key::generate()), encryption: Encryption::Auto, features: 0, ucx: None };
    let good = rampool_wire::session::Preface::ask(Encryption::Auto, true, 0, 1).encode();
    assert!(matches!(
        greet(&policy, b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"),
        Err(HandshakeError::Preface(_))
    ));
    assert!(matches!(greet(&policy, &good[..20]), Err(HandshakeError::Closed)));
    assert!(matches!(greet(&policy, &good), Err(HandshakeError::Closed)));
    assert!(matches!(greet(&policy, &[&good[..], &[255, 255]].concat()), Err(HandshakeError::WrongKey)));
    assert!(matches!(
        greet(&policy, &[&good[..], &[48, 0], &[9; 48]].concat()),
        Err(HandshakeError::WrongKey)
    ));
    let newer = rampool_wire::session::Preface {
        min_version: 9,
        max_version: 12,
        ..rampool_wire::session::Preface::ask(Encryption::Auto, true, 0, 1)
    };
    let error = greet(&policy, &newer.encode()).err().unwrap().to_string();
    assert!(error.contains("versions 9 to 12") && error.contains("speaks 1"), "{error}");
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(200) });
    runner
        .run(&(prop::collection::vec(any::<u8>(), 0..300), any::<bool>()), |(bytes, prefaced)| {
            let bytes = if prefaced { [&good[..], &bytes].concat() } else { bytes };
            prop_assert!(greet(&policy, &bytes).is_err());
            Ok(())
        })
        .unwrap();
}

/// Someone recorded a whole conversation and plays the client's half again to the same server.
#[test]
fn a_replayed_conversation_does_not_get_through() {
    let policy =
        LocalPolicy { key: Some(Key::generate()), encryption: Encryption::Auto, features: 0, ucx: None };
    let (client_side, middle_client) = std::os::unix::net::UnixStream::pair().unwrap();
    let (middle_server, server_side) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut client = Handshake::client(Stream::adopt(client_side).unwrap(), policy.clone());
    let mut server = Handshake::server(Stream::adopt(server_side).unwrap(), policy.clone(), None);
    for socket in [&middle_client, &middle_server] {
        socket.set_nonblocking(true).unwrap();
    }
    let mut recorded = Vec::new();
    let (mut client_link, mut server_link) = (None, None);
    let deadline = Instant::now() + DEADLINE;
    while client_link.is_none() || server_link.is_none() {
        assert!(Instant::now() < deadline);
        if client_link.is_none() {
            client_link = client.advance::<()>().unwrap();
        }
        relay(&middle_client, &middle_server, Some(&mut recorded));
        if server_link.is_none() {
            server_link = server.advance::<()>().unwrap();
        }
        relay(&middle_server, &middle_client, None);
    }
    assert!(recorded.len() > 32 + 2 + 2, "the conversation was recorded");
    assert!(matches!(greet(&policy, &recorded), Err(HandshakeError::WrongKey)));
}

fn relay(
    from: &std::os::unix::net::UnixStream,
    to: &std::os::unix::net::UnixStream,
    record: Option<&mut Vec<u8>>,
) {
    let mut bytes = [0; 4096];
    if let Ok(n) = std::io::Read::read(&mut &*from, &mut bytes) {
        std::io::Write::write_all(&mut &*to, &bytes[..n]).unwrap();
        if let Some(record) = record {
            record.extend_from_slice(&bytes[..n]);
        }
    }
}

/// Flips one bit in what travels on a sealed link: the receiver must notice before it sees a byte of it.
#[test]
fn an_altered_sealed_stream_is_not_believed() {
    let key = Key::generate();
    let policy = LocalPolicy { key: Some(key), encryption: Encryption::On, features: 0, ucx: None };
    let (client, server) = shake::<()>(&"127.0.0.1:0".parse().unwrap(), policy.clone(), policy);
    let (mut client, server) = (client.unwrap(), server.unwrap());
    client.send_head(Urgency::Demand, &Header::request(Opcode::Heartbeat, 1).encode(), ());
    client.flush().unwrap();
    // Takes the ciphertext off the server's socket, and gives it back altered through a link over another
    // socket with the same keys.
    let mut cipher = [0u8; 4096];
    let deadline = Instant::now() + DEADLINE;
    let n = loop {
        match rustix::net::recv(server.as_fd(), &mut cipher[..], rustix::net::RecvFlags::DONTWAIT) {
            Ok((n, _)) => break n,
            Err(rustix::io::Errno::AGAIN) => assert!(Instant::now() < deadline),
            Err(error) => panic!("{error}"),
        }
    };
    cipher[n / 2] ^= 1;
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    rustix::io::dup2(theirs.as_fd(), &mut unowned(server.as_fd().as_raw_fd())).unwrap();
    std::io::Write::write_all(&mut &ours, &cipher[..n]).unwrap();
    let mut server = server;
    assert!(matches!(server.receive(), Err(LinkError::NotAuthentic)));
}

/// A descriptor for `dup2` to replace; the link goes on owning it.
fn unowned(fd: i32) -> std::mem::ManuallyDrop<std::os::fd::OwnedFd> {
    // SAFETY: wrapped in ManuallyDrop, so it is never closed here.
    std::mem::ManuallyDrop::new(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) })
}

#[test]
fn frames_that_are_too_long_or_damaged_are_named() {
    let case = &cases()[0];
    let oversize = {
        let mut bytes = Header { bulk_len: 1 << 22, ..Header::request(Opcode::Put, 1) }.encode();
        let crc = checksum::crc32c(&bytes[..44]);
        bytes[44..].copy_from_slice(&crc.to_le_bytes());
        bytes
    };
    let mut damaged = Header::request(Opcode::Get, 1).encode();
    damaged[20] ^= 4;
    for (bytes, want) in [(oversize, WireError::BulkTooLong(1 << 22)), (damaged, WireError::HeaderChecksum)] {
        let (client, mut server) = pair::<()>(case);
        rustix::net::send(client.as_fd(), &bytes, rustix::net::SendFlags::empty()).unwrap();
        let deadline = Instant::now() + DEADLINE;
        let error = loop {
            assert!(Instant::now() < deadline);
            match server.receive() {
                Ok(received) => assert_eq!(received, Received::Blocked),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, LinkError::Wire(got) if got == want), "{error}");
    }
}

#[test]
fn a_peer_that_goes_is_noticed() {
    for case in cases() {
        let (client, mut server) = pair::<()>(&case);
        drop(client);
        let deadline = Instant::now() + DEADLINE;
        loop {
            assert!(Instant::now() < deadline);
            match server.receive() {
                Ok(received) => assert_eq!(received, Received::Blocked),
                Err(error) => {
                    break assert!(matches!(error, LinkError::Closed | LinkError::Io(_)), "{error}");
                }
            }
        }
    }
}

/// One side sleeps whenever it finds nothing: bytes and room wake it.
#[test]
fn who_sleeps_is_woken_by_what_comes_and_by_room() {
    // An emulated network has slow wake-ups.
    let rounds = if ucx::instead().is_some() { 40 } else { 400 };
    for case in cases() {
        let (mut client, mut server) = pair::<Arc<Vec<u8>>>(&case);
        let echo = std::thread::spawn(move || {
            for _ in 0..rounds {
                let header = next_head(&mut server);
                let mut room = vec![0; header.bulk_len as usize];
                // SAFETY: `room` is not touched before `Bulk`.
                unsafe { server.place(&[PieceMut { ptr: room.as_mut_ptr(), len: room.len() }]) };
                assert!(matches!(next_received(&mut server), Received::Bulk(_)));
                let mut head = Vec::new();
                encode_frame(&mut head, header.reply(rampool_wire::frame::Status::Ok), &[], room.len());
                let piece = [Piece { ptr: room.as_ptr(), len: room.len() }];
                // SAFETY: the guard keeps the bytes.
                unsafe { server.send(Urgency::Demand, &head, &piece, Arc::new(room)) };
                while server.flush().unwrap() == Flush::Blocked {
                    assert!(server.wait(Instant::now() + DEADLINE).unwrap(), "the peer makes no room");
                }
            }
        });
        for round in 0..rounds {
            let bytes = Arc::new(vec![
                u8::try_from(round % 251).unwrap();
                if round % 50 == 0 { 1 << 20 } else { 64 }
            ]);
            let mut head = Vec::new();
            encode_frame(&mut head, Header::request(Opcode::Put, round), &[], bytes.len());
            let piece = [Piece { ptr: bytes.as_ptr(), len: bytes.len() }];
            // SAFETY: the guard keeps the bytes.
            unsafe { client.send(Urgency::Demand, &head, &piece, Arc::clone(&bytes)) };
            let header = next_head(&mut client);
            assert_eq!(header.request, round);
            let mut room = vec![0; bytes.len()];
            // SAFETY: `room` is not touched before `Bulk`.
            unsafe { client.place(&[PieceMut { ptr: room.as_mut_ptr(), len: room.len() }]) };
            assert!(matches!(next_received(&mut client), Received::Bulk(_)));
            assert!(room == *bytes, "round {round} came back altered");
        }
        echo.join().unwrap();
    }
}

/// Sends what is queued, and sleeps until something has come.
fn next_received<G>(link: &mut Link<G>) -> Received {
    loop {
        link.flush().unwrap();
        match link.receive().unwrap() {
            Received::Blocked => assert!(link.wait(Instant::now() + DEADLINE).unwrap(), "nothing comes"),
            received => return received,
        }
    }
}

fn next_head<G>(link: &mut Link<G>) -> Header {
    match next_received(link) {
        Received::Head(header) => header,
        other => panic!("{other:?} where a head was expected"),
    }
}

#[test]
fn connecting_to_a_silent_peer_ends_at_the_deadline() {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let policy = LocalPolicy { key: None, encryption: Encryption::Auto, features: 0, ucx: None };
    let result = connect::<()>(listener.endpoint(), policy, Instant::now() + Duration::from_millis(50));
    assert!(matches!(result, Err(HandshakeError::TimedOut)));
}

/// The kernel may give a connecting socket the very port that has no listener yet, and then connects it with
/// itself.
#[test]
fn a_connection_that_leads_back_to_itself_is_refused_and_leaves_its_port_to_who_shall_listen_there() {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let own = socket.local_addr().unwrap();
    socket.connect(&own).unwrap();
    assert_eq!(Stream::adopt(socket).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    Listener::bind(&own.as_socket().unwrap().to_string().parse().unwrap()).unwrap();
}

#[test]
fn addresses_are_read_and_written() {
    for text in [
        "127.0.0.1:80",
        "[::1]:80",
        "unix:/run/rampool.sock",
        "server.example:1234",
        "ucx:server.example:1234",
        "ucx:[::1]:80",
    ] {
        assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
    }
    for text in [
        "",
        "localhost",
        "::1:80",
        "[::1:80",
        ":80",
        "host:99999",
        "unix:",
        "[[::1]]:80",
        "a b:80",
        "\"x\":80",
        "ucx:",
        "ucx:host",
        "ucx:unix:/x",
        "ucx:ucx:host:1",
        "ucx:80",
    ] {
        assert!(text.parse::<Endpoint>().is_err(), "{text}");
    }
}

#[test]
fn a_stale_socket_file_is_replaced_and_a_live_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let endpoint = Endpoint::Unix(dir.path().join("s"));
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap());
    let deadline = Instant::now() + DEADLINE;
    let listener = loop {
        match Listener::bind(&endpoint) {
            Ok(listener) => break listener,
            // A child that another test has forked may have the old one a moment longer.
            Err(error) => {
                assert!(error.kind() == std::io::ErrorKind::AddrInUse && Instant::now() < deadline, "{error}")
            }
        }
    };
    assert_eq!(Listener::bind(&endpoint).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    drop(listener);
    assert!(!dir.path().join("s").exists());
}

#[test]
fn a_process_of_this_user_is_told_from_one_in_a_container() {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&Endpoint::Unix(dir.path().join("s"))).unwrap();
    let connect =
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()";
    for (wrapper, expected) in [(&["env"][..], true), (&["unshare", "--user"], false)] {
        let mut client = std::process::Command::new(wrapper[0])
            .args(&wrapper[1..])
            .args(["python3", "-c", connect])
            .arg(dir.path().join("s"))
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + DEADLINE;
        let stream = loop {
            match listener.accept().unwrap() {
                Some(stream) => break stream,
                None => assert!(Instant::now() < deadline, "{wrapper:?} does not connect"),
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        assert_eq!(stream.is_of_this_user(), expected, "{wrapper:?}");
        drop(client.stdin.take());
        assert!(client.wait().unwrap().success());
        assert!(!stream.is_of_this_user(), "it has ended");
    }
}

trait Below {
    fn random_below(&mut self, end: usize) -> usize;
}

impl Below for TestRng {
    fn random_below(&mut self, end: usize) -> usize {
        usize::try_from(self.next_u64() % end as u64).unwrap()
    }
}
