//! A server in threads of the test, and clients that check every byte.

mod client;
mod hostile;
mod published;
mod tenants;
mod updates;

use super::*;
use client::{Client, DEADLINE, No, open_policy, policy};
use proptest::prelude::Rng as _;
use proptest::test_runner::{TestRng, TestRunner};
use rampool_net::transport::{LinkError, LocalPolicy, Means, Piece, Urgency};
use rampool_wire::checksum;
use rampool_wire::frame::{
    Header, MemberId, Opcode, PageEntry, RegionId, ScanRequest, Status, Window, encode_extents, encode_frame,
    encode_put,
};
use rampool_wire::layout::Layout;
use rampool_wire::session::features;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::collections::BTreeMap;
use std::os::fd::AsFd;

const MIB: u64 = 1 << 20;

fn local() -> Endpoint {
    "127.0.0.1:0".parse().unwrap()
}

fn config(memory_bytes: u64) -> ServerConfig {
    let defaults = ServerConfig::new(memory_bytes, local());
    ServerConfig {
        shards: 2,
        lock_memory: false,
        grace: Duration::from_millis(100),
        ucx_clients_are_trusted: true,
        ..defaults
    }
}

fn below(rng: &mut TestRng, end: u64) -> u64 {
    rng.next_u64() % end
}

fn random_page(rng: &mut TestRng) -> Vec<u8> {
    let mut page = vec![0; OS_PAGE_BYTES];
    let random = [0, 32, 1500, 4096][usize::try_from(below(rng, 4)).unwrap()];
    rng.fill_bytes(&mut page[..random]);
    page
}

fn idle(server: &RunningServer) {
    assert!(server.wait_until_idle(Instant::now() + DEADLINE), "something is left: {:?}", server.status());
    server.check();
    assert_eq!(server.status().used_bytes, 0);
}

/// Random puts, gets, discards, clones and frees of one client against a model.
fn exercise(client: &mut Client, rng: &mut TestRng, steps: usize) {
    let mut model: BTreeMap<RegionId, BTreeMap<u64, Vec<u8>>> = BTreeMap::new();
    model.insert(client.create_region().unwrap(), BTreeMap::new());
    for _ in 0..steps {
        let regions: Vec<RegionId> = model.keys().copied().collect();
        let region = regions[usize::try_from(below(rng, regions.len() as u64)).unwrap()];
        let (first, count) = (below(rng, 1100), below(rng, 12) + 1);
        let pages = model.get_mut(&region).unwrap();
        match below(rng, 10) {
            0..=3 => {
                let new: Vec<Vec<u8>> = (0..count).map(|_| random_page(rng)).collect();
                let pack = client.link.features() & features::LZ4 != 0 && below(rng, 2) == 0;
                client.put(region, first, &new, pack).unwrap();
                pages.extend((first..).zip(new));
            }
            4..=6 => {
                let got = client.get(region, first, u32::try_from(count).unwrap()).unwrap();
                for (number, page) in (first..).zip(got) {
                    match pages.get(&number) {
                        Some(want) => assert!(page == *want, "page {number} is another one"),
                        None => assert!(page.iter().all(|b| *b == 0), "page {number} was never written"),
                    }
                }
            }
            7 => {
                client.discard(region, first, u32::try_from(count).unwrap()).unwrap();
                pages.retain(|number, _| !(first..first + count).contains(number));
            }
            8 if model.len() < 4 => {
                let copy = client.region_call(Opcode::CloneRegion, region).unwrap();
                let pages = model[&region].clone();
                model.insert(copy, pages);
            }
            9 if model.len() > 1 => {
                client.region_call(Opcode::FreeRegion, region).unwrap();
                model.remove(&region);
            }
            _ => {}
        }
    }
}

#[test]
fn many_clients_read_what_they_wrote_over_every_way_and_store() {
    let key = rampool_net::key::Key::generate();
    let dir = tempfile::tempdir().unwrap();
    for store in [StoreKind::Raw, StoreKind::Compressed] {
        for (server_key, encryption, means) in [
            (None, Encryption::Auto, Means::TCP),
            (Some(key.clone()), Encryption::On, Means::TCP),
            (Some(key.clone()), Encryption::Auto, Means::UNIX_SOCKET),
            (Some(key.clone()), Encryption::Auto, Means::RINGS),
            (Some(key.clone()), Encryption::Auto, Means::UCX),
        ] {
            let listen = match means {
                Means::TCP => local(),
                Means::UCX => "ucx:127.0.0.1:0".parse().unwrap(),
                _ => Endpoint::Unix(dir.path().join("s")),
            };
            let rings = means == Means::RINGS;
            let server = Server::start(ServerConfig {
                listen: vec![listen],
                key: server_key.clone(),
                encryption,
                store,
                rings,
                ..config(256 * MIB)
            })
            .unwrap();
            std::thread::scope(|scope| {
                for _ in 0..6 {
                    let (server, server_key) = (&server, &server_key);
                    scope.spawn(move || {
                        let mut rng = TestRunner::deterministic().new_rng();
                        let ucx = (means == Means::UCX).then(|| rampool_ucx::Context::process().unwrap());
                        let policy = LocalPolicy { ucx, ..policy(server_key.as_ref(), Encryption::Auto) };
                        let mut client = Client::with_lease(server.addr(), policy, 32 * MIB);
                        assert_eq!(client.link.means(), means);
                        exercise(&mut client, &mut rng, 300);
                        client.call(Opcode::Goodbye, |h| h, &[]).unwrap();
                    });
                }
            });
            idle(&server);
        }
    }
}

#[test]
fn a_lease_that_does_not_fit_is_refused_with_what_is_free() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let _first = Client::with_lease(server.addr(), open_policy(), 40 * MIB);
    let mut second = Client::new(server.addr(), open_policy());
    let no = second.open(25 * MIB).unwrap_err();
    assert_eq!((no.status, no.arg), (Status::LeaseRefused, 24 * MIB));
    assert!(no.message.contains("25165824 bytes are free"), "{}", no.message);
    second.open(24 * MIB).unwrap();
    let no = second.open(1).unwrap_err();
    assert_eq!(no.status, Status::BadRequest, "one lease per connection");
}

/// The reaper frees what a lease held after its last member's goodbye was answered. A request for that memory
/// waits meanwhile, and its connection is still served; it is refused once no more can be freed.
#[test]
fn a_lease_that_fits_once_closed_leases_are_freed_waits_for_them() {
    let server = Server::start(config(8 * MIB)).unwrap();
    let mut owner = Client::with_lease(server.addr(), open_policy(), 5 * MIB);
    let mut neighbour = Client::with_lease(server.addr(), open_policy(), MIB);
    let region = owner.create_region().unwrap();
    owner.put(region, 0, &[vec![1; OS_PAGE_BYTES]], false).unwrap();
    let lease = server.shared.lease(owner.granted().lease).unwrap();
    // The reaper cannot go on while this test holds the lease.
    let space = lease.space();
    owner.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    let ask = |client: &mut Client, opcode, bytes| {
        let request = client.number();
        let table =
            rampool_wire::frame::OpenLease { bytes, pid: 1, name: "test".into(), host: "here".into() }
                .encode();
        let table = if opcode == Opcode::OpenLease { &table[..] } else { &[] };
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(opcode, request).with_arg(bytes), table, 0);
        client.link.send_head(rampool_net::transport::Urgency::Demand, &head, ());
        // Answered in its turn: so the request before it was looked at, and was not answered.
        client.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
        request
    };
    let mut second = Client::new(server.addr(), open_policy());
    let opens = ask(&mut second, Opcode::OpenLease, 4 * MIB);
    let grows = ask(&mut neighbour, Opcode::ResizeLease, 3 * MIB + MIB / 2);
    let no = second.open(1).unwrap_err();
    assert_eq!(no.status, Status::BadRequest, "one request for memory of a connection at a time");
    let mut third = Client::new(server.addr(), open_policy());
    let no = third.open(8 * MIB).unwrap_err();
    assert_eq!(
        (no.status, no.arg),
        (Status::LeaseRefused, 7 * MIB),
        "what will never fit is refused at once, with what is about to be free"
    );
    // A client that goes away while it waits leaves nothing behind.
    let mut gone = Client::new(server.addr(), open_policy());
    ask(&mut gone, Opcode::OpenLease, 3 * MIB);
    drop(gone);
    let deadline = Instant::now() + DEADLINE;
    while server.shared.connections.load(Ordering::Relaxed) > 3 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    drop(space);
    second.reply(opens).unwrap().unwrap();
    neighbour.reply(grows).unwrap().unwrap();
    assert_eq!(server.status().lent_bytes, 7 * MIB + MIB / 2);
    let mut last = Client::new(server.addr(), open_policy());
    last.open(MIB / 2).unwrap();

    // Freeing that takes too long is not waited for for ever.
    let lease = server.shared.lease(last.granted().lease).unwrap();
    let space = lease.space();
    last.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    let no = third.open(MIB / 2).unwrap_err();
    assert_eq!((no.status, no.arg), (Status::LeaseRefused, 0));
    assert!(no.message.contains("524288 more are being freed by closing leases"), "{}", no.message);
    drop(space);
}

/// A member's goodbye waits for the reaper while the grace time of the lease's other member ends: the reaper
/// then hears of the last member first.
#[test]
fn a_goodbye_that_is_settled_after_its_lease_has_closed_changes_nothing() {
    let server = Server::start(config(8 * MIB)).unwrap();
    let mut busy = Client::with_lease(server.addr(), open_policy(), MIB);
    let mut leaves = Client::with_lease(server.addr(), open_policy(), MIB);
    let region = leaves.create_region().unwrap();
    leaves.put(region, 0, &[vec![1; OS_PAGE_BYTES]], false).unwrap();
    let mut cut = Client::new(server.addr(), open_policy());
    cut.attach(leaves.granted(), MemberId(0)).unwrap();
    // The reaper cannot go on while this test holds the lease that it frees.
    let held = server.shared.lease(busy.granted().lease).unwrap();
    let space = held.space();
    busy.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    drop(cut);
    let deadline = Instant::now() + DEADLINE;
    while server.shared.directory().next_expiry().is_none_or(|due| due > server.shared.now()) {
        assert!(Instant::now() < deadline, "the lost member's grace time does not end");
        std::thread::yield_now();
    }
    leaves.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    drop(space);
    idle(&server);
    // By the time that another lease is freed, the order has been looked at.
    let mut last = Client::with_lease(server.addr(), open_policy(), 8 * MIB);
    last.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    idle(&server);
    assert!(!server.is_broken());
}

#[test]
fn a_lease_grows_and_shrinks() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), 8192);
    let region = client.create_region().unwrap();
    let page = vec![7; OS_PAGE_BYTES];
    let pages = vec![page; 3];
    let no = client.put(region, 0, &pages, false).unwrap_err();
    assert_eq!((no.status, no.arg), (Status::PoolFull, 8192));
    client.call(Opcode::ResizeLease, |h| h.with_arg(64 * MIB), &[]).unwrap();
    client.put(region, 0, &pages, false).unwrap();
    let no = client.call(Opcode::ResizeLease, |h| h.with_arg(8192), &[]).err().unwrap();
    assert_eq!((no.status, no.arg), (Status::PoolFull, 3 * 4096));
    let no = client.call(Opcode::ResizeLease, |h| h.with_arg(65 * MIB), &[]).err().unwrap();
    assert_eq!(no.status, Status::LeaseRefused);
    assert_eq!(client.get(region, 0, 3).unwrap(), pages);
    assert_eq!(server.status().lent_bytes, 64 * MIB);
}

#[test]
fn memory_is_taken_as_pages_arrive_and_given_back() {
    let server = Server::start(config(256 * MIB)).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), 256 * MIB);
    assert_eq!(server.status().held_bytes, 0, "a lease alone takes nothing");
    let region = client.create_region().unwrap();
    let pages = vec![vec![3; OS_PAGE_BYTES]; 512];
    for chunk in 0..16 {
        client.put(region, chunk * 512, &pages, false).unwrap();
    }
    let status = server.status();
    assert_eq!(status.used_bytes, 32 * MIB);
    assert!(status.held_bytes <= 40 * MIB, "{} bytes held for 32 MiB", status.held_bytes);
    client.region_call(Opcode::FreeRegion, region).unwrap();
    let status = server.status();
    assert_eq!(status.used_bytes, 0);
    assert!(status.held_bytes <= 8 * MIB, "{} bytes still held", status.held_bytes);
}

/// What one tenant wrote, wherever its frames go next, no other ever reads.
#[test]
fn no_tenant_reads_what_another_tenant_wrote() {
    let server = Server::start(config(8 * MIB)).unwrap();
    let secret = vec![0x5e; OS_PAGE_BYTES];
    for round in 0..3 {
        let mut owner = Client::with_lease(server.addr(), open_policy(), 4 * MIB);
        let region = owner.create_region().unwrap();
        owner.put(region, 0, &vec![secret.clone(); 512], false).unwrap();
        let mut other = Client::with_lease(server.addr(), open_policy(), 4 * MIB);
        // The same region number, in another lease, is another region; and region numbers of others cannot be
        // used.
        assert_eq!(other.get(region, 0, 1).unwrap_err().status, Status::NoSuchRegion);
        let own = other.create_region().unwrap();
        assert_eq!(own, region);
        let seen = |client: &mut Client| {
            client.get(own, 0, 512).unwrap().iter().flatten().filter(|b| **b != 0).count()
        };
        assert_eq!(seen(&mut other), 0);
        owner.call(Opcode::Goodbye, |h| h, &[]).unwrap();
        // A put that is cut off in the middle leaves a frame half written; no client ever reads it.
        let mut cut = Client::with_lease(server.addr(), open_policy(), MIB);
        let cut_region = cut.create_region().unwrap();
        let (granted, number) = (cut.granted().clone(), cut.number());
        let mut head = Vec::new();
        let entry = rampool_wire::frame::PageEntry { crc: 1, len: 4096 };
        let extent = rampool_wire::units::Extent::page(rampool_wire::units::PageIndex(round));
        rampool_wire::frame::encode_put(
            &mut head,
            Header::request(Opcode::Put, number).with_region(cut_region),
            &[extent],
            &[entry],
        );
        head.extend_from_slice(&[1; 100]);
        rustix::net::send(cut.link.as_fd(), &head, rustix::net::SendFlags::empty()).unwrap();
        drop(cut);
        let mut back = Client::new(server.addr(), open_policy());
        back.attach(&granted, granted.member).unwrap();
        assert_eq!(back.get(cut_region, round, 1).unwrap(), [vec![0; OS_PAGE_BYTES]]);
        back.call(Opcode::Goodbye, |h| h, &[]).unwrap();
        assert_eq!(seen(&mut other), 0);
        other.call(Opcode::Goodbye, |h| h, &[]).unwrap();
        idle(&server);
    }
}

#[test]
fn a_forked_child_takes_over_a_copy_and_both_go_their_way() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut parent = Client::with_lease(server.addr(), open_policy(), 32 * MIB);
    let region = parent.create_region().unwrap();
    let old = vec![vec![1; OS_PAGE_BYTES]; 100];
    parent.put(region, 0, &old, false).unwrap();
    let copy = parent.region_call(Opcode::CloneRegion, region).unwrap();
    let mut child = Client::new(server.addr(), open_policy());
    child.attach(parent.granted(), MemberId(0)).unwrap();
    assert_ne!(child.granted().member, parent.granted().member);
    assert_eq!(child.get(copy, 0, 1).unwrap_err().status, Status::NotAllowed);
    child.region_call(Opcode::AdoptRegion, copy).unwrap();
    let new = vec![vec![2; OS_PAGE_BYTES]; 50];
    parent.put(region, 0, &new, false).unwrap();
    assert_eq!(child.get(copy, 0, 100).unwrap(), old);
    child.put(copy, 90, &new[..10], false).unwrap();
    assert_eq!(parent.get(region, 0, 50).unwrap(), new);
    assert_eq!(parent.get(region, 90, 10).unwrap(), old[..10]);
    assert_eq!(server.status().leases[0].used_bytes, (100 + 60) * 4096, "shared frames are paid for once");
    parent.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    assert_eq!(child.get(copy, 0, 10).unwrap(), old[..10]);
    child.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    idle(&server);
}

#[test]
fn a_client_that_comes_back_in_time_finds_its_pages_and_a_dead_one_is_given_up() {
    let server = Server::start(ServerConfig { grace: Duration::from_secs(60), ..config(64 * MIB) }).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), MIB);
    let region = client.create_region().unwrap();
    let pages = vec![vec![9; OS_PAGE_BYTES]; 4];
    client.put(region, 7, &pages, false).unwrap();
    let granted = client.granted().clone();
    drop(client);
    let mut back = Client::new(server.addr(), open_policy());
    back.attach(&granted, granted.member).unwrap();
    assert_eq!(back.granted().server, granted.server);
    assert_eq!(back.get(region, 7, 4).unwrap(), pages);
    drop(server);

    let server =
        Server::start(ServerConfig { grace: Duration::from_millis(20), ..config(64 * MIB) }).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), MIB);
    let granted = client.granted().clone();
    let region = client.create_region().unwrap();
    client.put(region, 7, &pages, false).unwrap();
    drop(client);
    idle(&server);
    let mut late = Client::new(server.addr(), open_policy());
    assert_eq!(late.attach(&granted, granted.member).unwrap_err().status, Status::NoSuchLease);
}

#[test]
fn a_client_that_says_nothing_is_dropped_and_one_that_beats_is_not() {
    // Long enough for a machine that keeps this thread from beating for a while.
    let server = Server::start(ServerConfig {
        silence: Duration::from_secs(1),
        grace: Duration::from_millis(1),
        ..config(64 * MIB)
    })
    .unwrap();
    let mut silent = Client::with_lease(server.addr(), open_policy(), MIB);
    let mut beating = Client::with_lease(server.addr(), open_policy(), MIB);
    let deadline = Instant::now() + DEADLINE;
    while server.status().leases.len() == 2 {
        assert!(Instant::now() < deadline);
        beating.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
    }
    assert!(matches!(
        silent.wait_closed(),
        rampool_net::transport::LinkError::Closed | rampool_net::transport::LinkError::Io(_)
    ));
    beating.create_region().unwrap();
}

/// As where a machine is held up as a whole, or has no CPU to spare.
#[test]
fn a_shard_that_was_kept_away_for_longer_than_a_silence_hears_its_clients_before_it_counts_them_silent() {
    let silence = Duration::from_millis(300);
    let server = Server::start(ServerConfig { shards: 1, silence, ..config(64 * MIB) }).unwrap();
    let mailbox = &server.shared.shards[0];
    let (mut client, kept) = loop {
        let client = Client::with_lease(server.addr(), open_policy(), MIB);
        let kept = crate::lock::lock(&mailbox.arrivals);
        mailbox.ring();
        // Once it has heard the doorbell it waits for the lock.
        while is_readable(mailbox.doorbell.as_fd()) {
            std::thread::yield_now();
        }
        // Unless this thread was held up itself, and the client counts as silent already.
        if server.shared.connections.load(Ordering::Relaxed) == 1 {
            break (client, kept);
        }
    };
    let request = client.number();
    let mut beat = Vec::new();
    encode_frame(&mut beat, Header::request(Opcode::Heartbeat, request), &[], 0);
    client.link.send_head(Urgency::Demand, &beat, ());
    client.link.flush().unwrap();
    std::thread::sleep(2 * silence);
    drop(kept);
    client.reply(request).unwrap().unwrap();
}

fn is_readable(fd: std::os::fd::BorrowedFd<'_>) -> bool {
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

/// Every kind of nonsense after a good handshake: the sender is told and cut off; other clients do not
/// notice.
#[test]
fn a_client_that_talks_nonsense_is_cut_off_and_the_others_are_served() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut bystander = Client::with_lease(server.addr(), open_policy(), MIB);
    let region = bystander.create_region().unwrap();
    let page = vec![vec![4; OS_PAGE_BYTES]];
    bystander.put(region, 1, &page, false).unwrap();
    let frame = |header: Header, table: &[u8], bulk: usize| {
        let mut bytes = Vec::new();
        encode_frame(&mut bytes, header, table, bulk);
        bytes
    };
    let get = Header::request(Opcode::Get, 1).with_region(region);
    let nonsense: Vec<(&str, Vec<u8>)> = vec![
        ("garbage", vec![0xa5; 200]),
        ("a reply", frame(Header { flags: 1, ..get }, &[], 0)),
        ("no extents", frame(get, &[], 0)),
        ("too many extents", frame(get.with_arg(u64::MAX), &[1; 64], 0)),
        ("pages with a get", frame(get.with_arg(1), &[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], 4096)),
        ("pages with a heartbeat", frame(Header::request(Opcode::Heartbeat, 1), &[], 1)),
        (
            "a put whose lengths do not add up",
            frame(Header { opcode: Opcode::Put, ..get }.with_arg(1), &[1; 24], 4096),
        ),
        ("a lease request cut short", frame(Header::request(Opcode::OpenLease, 1), &[1; 9], 0)),
    ];
    for (index, (what, bytes)) in nonsense.iter().enumerate() {
        let mut client = Client::new(server.addr(), open_policy());
        rustix::net::send(client.link.as_fd(), bytes, rustix::net::SendFlags::empty()).unwrap();
        client.wait_closed();
        let deadline = Instant::now() + DEADLINE;
        while server.status().protocol_errors <= index as u64 {
            assert!(Instant::now() < deadline, "{what} is not counted");
        }
        assert_eq!(bystander.get(region, 1, 1).unwrap(), page, "after {what}");
    }
    assert_eq!(server.status().protocol_errors, nonsense.len() as u64);
    // Where the frame boundary is still known, the client is told why.
    let mut client = Client::new(server.addr(), open_policy());
    let no = client.call(Opcode::Draining, |h| h, &[]).err().unwrap();
    assert_eq!((no.status, no.message.as_str()), (Status::BadRequest, "not a request of a client"));
    assert!(!server.is_broken());
}

#[test]
fn random_bytes_after_the_handshake_hurt_no_other_client() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut bystander = Client::with_lease(server.addr(), open_policy(), MIB);
    let region = bystander.create_region().unwrap();
    let mut rng = TestRunner::deterministic().new_rng();
    for round in 0..300u64 {
        // A valid header with random contents, or just noise.
        let mut bytes = vec![0; usize::try_from(below(&mut rng, 300) + 1).unwrap()];
        rng.fill_bytes(&mut bytes);
        if round % 2 == 0 {
            let opcode = Opcode::ALL[usize::try_from(below(&mut rng, Opcode::ALL.len() as u64)).unwrap()];
            let header = Header::request(opcode, round)
                .with_arg(below(&mut rng, 4))
                .with_region(RegionId(below(&mut rng, 3)));
            let bulk = usize::try_from(below(&mut rng, 9000)).unwrap();
            let noise = std::mem::take(&mut bytes);
            encode_frame(&mut bytes, header, &noise, bulk);
        }
        let client = Client::new(server.addr(), open_policy());
        rustix::net::send(client.link.as_fd(), &bytes, rustix::net::SendFlags::empty()).unwrap();
        if round % 50 == 0 {
            bystander.put(region, round, &[vec![8; OS_PAGE_BYTES]], false).unwrap();
            assert_eq!(bystander.get(region, round, 1).unwrap(), [vec![8; OS_PAGE_BYTES]]);
        }
    }
    assert!(!server.is_broken());
    drop(bystander);
    idle(&server);
}

/// A request of the direct view with these bytes behind its table.
fn direct(
    client: &mut Client,
    opcode: Opcode,
    region: RegionId,
    arg: u64,
    table: &[u8],
    bulk: &[u8],
) -> Result<Result<client::Reply, No>, LinkError> {
    let request = client.number();
    let mut head = Vec::new();
    encode_frame(
        &mut head,
        Header::request(opcode, request).with_region(region).with_arg(arg),
        table,
        bulk.len(),
    );
    // SAFETY: `bulk` lives until the reply has come, which is after the frame has left, or the link has
    // ended.
    unsafe { client.link.send(Urgency::Demand, &head, &[Piece { ptr: bulk.as_ptr(), len: bulk.len() }], ()) };
    client.reply(request)
}

/// Pieces in any order, some of them over each other, many of one page: as if one was changed after the
/// other, and the pages' checksums follow.
#[test]
fn pieces_of_one_page_are_changed_in_their_order() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), 4 * MIB);
    let open = client.call(Opcode::OpenRegion, |h| h.with_arg(4 * 4096), b"words").unwrap();
    let region = RegionId(open.header.region);
    let mut rng = TestRunner::deterministic().new_rng();
    let mut model = vec![0u64; 4 * 512];
    for round in 0..300 {
        let list: Vec<(u64, i64)> = (0..below(&mut rng, 60) + 1)
            .map(|_| (below(&mut rng, 3) + 1, i64::try_from(8 * below(&mut rng, 3 * 512)).unwrap()))
            .collect();
        let layout = Layout::bytes(8).unwrap().hindexed(&list).unwrap();
        let len = u32::try_from(layout.size()).unwrap();
        let window = Window { program: layout.program().clone(), from: 0, len };
        let words: Vec<u64> = (0..len / 8).map(|_| below(&mut rng, 1 << 60)).collect();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (mut table, mut rest) = (Vec::new(), &bytes[..]);
        let adds = round % 2 == 0;
        let crcs: Vec<u32> = if adds {
            vec![checksum::crc32c(&bytes)]
        } else {
            let crc = |block: rampool_wire::frame::Block| {
                let (block, tail) = rest.split_at(block.len as usize);
                rest = tail;
                checksum::crc32c(block)
            };
            window.blocks().into_iter().map(crc).collect()
        };
        window.encode_with(&crcs, &mut table);
        let (opcode, arg) = if adds { (Opcode::Accumulate, 0x204) } else { (Opcode::Scatter, 0) };
        direct(&mut client, opcode, region, arg, &table, &bytes).unwrap().unwrap();
        let mut words = words.into_iter();
        for piece in window.pieces() {
            let first = usize::try_from(piece.offset() / 8).unwrap();
            for word in &mut model[first..first + piece.len / 8] {
                let operand = words.next().unwrap();
                *word = if adds { word.wrapping_add(operand) } else { operand };
            }
        }
        // Compares the checksums as well.
        let pages = client.get(region, 0, 4).unwrap().concat();
        let expected: Vec<u8> = model.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert!(pages == expected, "round {round}: {list:?}");
    }
}

#[test]
fn damaged_and_hostile_requests_for_bytes_change_nothing() {
    for store in [StoreKind::Raw, StoreKind::Compressed] {
        let server = Server::start(ServerConfig { store, ..config(64 * MIB) }).unwrap();
        let mut client = Client::with_lease(server.addr(), open_policy(), 4 * MIB);
        let open = client.call(Opcode::OpenRegion, |h| h.with_arg(40_000), b"all").unwrap();
        let region = RegionId(open.header.region);
        let parts = Layout::bytes(64).unwrap().hvector(100, 1, 400).unwrap();
        let window = |layout: &Layout, len: u32| Window { program: layout.program().clone(), from: 0, len };
        let put = |client: &mut Client, window: &Window, crcs: &[u32], bytes: &[u8]| {
            let mut table = Vec::new();
            window.encode_with(crcs, &mut table);
            direct(client, Opcode::Scatter, region, 0, &table, bytes)
        };
        let good = vec![5; 6400];
        put(&mut client, &window(&parts, 6400), &[checksum::crc32c(&good)], &good).unwrap().unwrap();
        // Damaged on the way: refused as a whole.
        let no = put(&mut client, &window(&parts, 6400), &[1], &vec![6; 6400]).unwrap().err().unwrap();
        assert_eq!(
            (no.status, no.message.as_str()),
            (Status::BadRequest, "the bytes came damaged (checksum differs)")
        );
        // Beyond the region's end.
        let far = Layout::bytes(8).unwrap().hvector(2, 1, 39_993).unwrap();
        let no = put(&mut client, &window(&far, 16), &[checksum::crc32c(&[6; 16])], &[6; 16])
            .unwrap()
            .err()
            .unwrap();
        assert_eq!(no.status, Status::BadRequest);
        let mut update = Vec::new();
        for word in [40_000u64, 1, 0] {
            update.extend_from_slice(&word.to_le_bytes());
        }
        assert_eq!(
            direct(&mut client, Opcode::FetchOp, region, 0x204, &update, &[]).unwrap().err().unwrap().status,
            Status::BadRequest
        );
        assert_eq!(
            direct(&mut client, Opcode::FetchOp, RegionId(99), 0x204, &update, &[])
                .unwrap()
                .err()
                .unwrap()
                .status,
            Status::NoSuchRegion
        );
        // A page as a whole and in part.
        let both =
            Layout::structure(&[(4096, 0, Layout::bytes(1).unwrap()), (8, 16, Layout::bytes(1).unwrap())])
                .unwrap();
        let mut attacker = Client::new(server.addr(), open_policy());
        attacker.attach(client.granted(), MemberId(0)).unwrap();
        let refused = put(&mut attacker, &window(&both, 4104), &[7, 7], &[6; 4104]);
        assert_eq!(refused.unwrap().err().unwrap().status, Status::BadRequest);
        attacker.wait_closed();
        // Any mutation of good requests.
        let mut rng = TestRunner::deterministic().new_rng();
        let mut column = Vec::new();
        let words = window(&Layout::bytes(8).unwrap().hvector(90, 1, 400).unwrap(), 720);
        ScanRequest::encode_table(&words, [0; 8], [9; 8], &mut column);
        let grouped = ScanRequest::keyed_table(&words, ([0; 8], [9; 8]), (region, &words.program));
        let (mut gather, mut scatter) = (Vec::new(), Vec::new());
        window(&parts, 6400).encode(&mut gather);
        window(&parts, 6400).encode_with(&[checksum::crc32c(&good)], &mut scatter);
        let requests = [
            (Opcode::Gather, 0, &gather),
            (Opcode::Scatter, 0, &scatter),
            (Opcode::Accumulate, 0x604, &scatter),
            (Opcode::Scan, 0x07_0504, &column),
            (Opcode::Scan, 0x0407_0104, &grouped),
        ];
        for round in 0..200 {
            let (opcode, arg, table) = requests[round % requests.len()];
            let mut table = table.clone();
            for _ in 0..=below(&mut rng, 3) {
                let at = usize::try_from(below(&mut rng, table.len() as u64)).unwrap();
                table[at] = u8::try_from(below(&mut rng, 256)).unwrap();
            }
            let mut attacker = Client::new(server.addr(), open_policy());
            attacker.attach(client.granted(), MemberId(0)).unwrap();
            let carries = matches!(opcode, Opcode::Scatter | Opcode::Accumulate);
            // It may well go through, somewhere else: what is there is the same bytes then, or was zero, and
            // a bit-wise or leaves that so where it counts.
            let _ = direct(&mut attacker, opcode, region, arg, &table, if carries { &good } else { &[] });
            let _ = direct(&mut attacker, Opcode::Goodbye, RegionId(0), 0, &[], &[]);
        }
        let reply = direct(&mut client, Opcode::Gather, region, 0, &gather, &[]).unwrap().unwrap();
        assert_eq!(reply.bulk, good);
        assert!(!server.is_broken());
        drop(client);
        idle(&server);
    }
}

/// Making sense of a layout is work. A connection without a lease gets none of the server's time for it, and
/// is told.
#[test]
fn requests_without_a_lease_are_refused_before_they_are_read() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut leaseless = Client::new(server.addr(), open_policy());
    for (opcode, bulk) in [
        (Opcode::Gather, &[][..]),
        (Opcode::Scan, &[]),
        (Opcode::Copy, &[]),
        (Opcode::PushHeads, &[]),
        (Opcode::Scatter, &[5; 9000]),
        (Opcode::Accumulate, &[5; 8]),
    ] {
        let no = direct(&mut leaseless, opcode, RegionId(1), 0, b"no layout", bulk).unwrap().err().unwrap();
        assert_eq!(no.status, Status::NotAllowed, "{opcode:?}");
    }
    leaseless.open(MIB).unwrap();
    let no =
        direct(&mut leaseless, Opcode::Gather, RegionId(1), 0, b"no layout", &[]).unwrap().err().unwrap();
    assert_eq!(no.status, Status::BadRequest);
    leaseless.wait_closed();
    idle(&server);
}

#[test]
fn parts_of_pages_are_read_without_a_layout_and_nonsense_is_refused() {
    let key = rampool_net::key::Key::generate();
    for (store, key) in [(StoreKind::Raw, None), (StoreKind::Compressed, None), (StoreKind::Raw, Some(&key))]
    {
        let server = Server::start(ServerConfig { store, key: key.cloned(), ..config(64 * MIB) }).unwrap();
        let wishes = || policy(key, if key.is_some() { Encryption::On } else { Encryption::Auto });
        let mut client = Client::with_lease(server.addr(), wishes(), 4 * MIB);
        let region =
            RegionId(client.call(Opcode::OpenRegion, |h| h.with_arg(40_000), b"all").unwrap().header.region);
        let page: Vec<u8> =
            (0..OS_PAGE_BYTES).map(|n| u8::try_from(n / 7 % 251).expect("below 251") + 1).collect();
        client.put(region, 3, std::slice::from_ref(&page), store == StoreKind::Compressed).unwrap();
        let arg = |offset, len| rampool_wire::frame::Piece::at(offset, len).unwrap().encode();
        let read = |client: &mut Client, region, arg| {
            direct(client, Opcode::ReadPiece, region, arg, &[], &[]).unwrap()
        };
        for (at, len) in [(0, 8), (0, 4096), (1, 4095), (4095, 1), (1000, 17), (64, 1024)] {
            let reply = read(&mut client, region, arg(3 * 4096 + at as u64, len)).unwrap();
            let want = &page[at..at + len];
            assert_eq!(
                (&reply.bulk[..], reply.header.arg, reply.table.len()),
                (want, checksum::crc32c(want).into(), 0)
            );
        }
        assert_eq!(read(&mut client, region, arg(4096, 4096)).unwrap().bulk, [0; 4096], "never written");
        assert_eq!(read(&mut client, region, arg(39_999, 1)).unwrap().bulk, [0]);
        assert_eq!(read(&mut client, region, arg(39_999, 2)).err().unwrap().status, Status::BadRequest);
        assert_eq!(read(&mut client, RegionId(99), arg(0, 8)).err().unwrap().status, Status::NoSuchRegion);
        let mut leaseless = Client::new(server.addr(), wishes());
        assert_eq!(read(&mut leaseless, region, arg(0, 8)).err().unwrap().status, Status::NotAllowed);
        // Into the next page; a table; a bulk.
        let good = Header::request(Opcode::ReadPiece, 900).with_region(region).with_arg(arg(0, 8));
        let nonsense: [(Header, &[u8], usize); 3] =
            [(good.with_arg(4095 << 12 | 1), &[], 0), (good, b"?", 0), (good, &[], 8)];
        for (header, table, bulk) in nonsense {
            let mut attacker = Client::new(server.addr(), wishes());
            attacker.attach(client.granted(), MemberId(0)).unwrap();
            let mut head = Vec::new();
            encode_frame(&mut head, header, table, bulk);
            let bytes = vec![1; bulk];
            // SAFETY: the bytes live until the connection is over.
            unsafe {
                attacker.link.send(Urgency::Demand, &head, &[Piece { ptr: bytes.as_ptr(), len: bulk }], ())
            };
            assert_eq!(attacker.reply(900).unwrap().err().unwrap().status, Status::BadRequest);
            attacker.wait_closed();
        }
        assert_eq!(read(&mut client, region, arg(3 * 4096, 4096)).unwrap().bulk, page);
        assert!(!server.is_broken());
        drop((client, leaseless));
        idle(&server);
    }
}

#[test]
fn wrong_keys_and_other_protocols_are_turned_away_and_counted() {
    let key = rampool_net::key::Key::generate();
    let server = Server::start(ServerConfig { key: Some(key.clone()), ..config(64 * MIB) }).unwrap();
    let attempt =
        |policy| rampool_net::transport::connect::<()>(server.addr(), policy, Instant::now() + DEADLINE);
    let wrong = rampool_net::key::Key::generate();
    assert!(matches!(
        attempt(policy(Some(&wrong), Encryption::Auto)),
        Err(rampool_net::transport::HandshakeError::WrongKey)
    ));
    assert!(attempt(policy(None, Encryption::Auto)).is_err_and(|e| e.to_string().contains("key")));
    let Endpoint::Tcp { host, port } = server.addr() else { unreachable!() };
    let mut web = std::net::TcpStream::connect((host.as_str(), *port)).unwrap();
    std::io::Write::write_all(&mut web, b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n").unwrap();
    web.set_read_timeout(Some(DEADLINE)).unwrap();
    let answer = std::io::Read::read(&mut web, &mut [0; 100]);
    assert!(matches!(answer, Ok(0)) || answer.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset));
    // A client that notices the wrong key itself is gone before the server has noticed and counted.
    assert!(server.wait_until_idle(Instant::now() + DEADLINE));
    assert_eq!(server.status().failed_handshakes, 3);
    exercise(
        &mut Client::with_lease(server.addr(), policy(Some(&key), Encryption::Auto), MIB),
        &mut TestRunner::deterministic().new_rng(),
        5,
    );
}

/// A client that asks for more and more and reads nothing: it waits, the others do not.
#[test]
fn a_client_that_does_not_read_stops_only_itself() {
    let server = Server::start(ServerConfig {
        shards: 1,
        max_bytes: 1 << 20,
        max_requests: 100_000,
        ..config(64 * MIB)
    })
    .unwrap();
    let mut greedy = Client::with_lease(server.addr(), open_policy(), 8 * MIB);
    let region = greedy.create_region().unwrap();
    greedy.put(region, 0, &vec![vec![1; OS_PAGE_BYTES]; 512], false).unwrap();
    let mut head = Vec::new();
    let extent = rampool_wire::units::Extent::new(rampool_wire::units::PageIndex(0), 512);
    rampool_wire::frame::encode_extents(
        &mut head,
        Header::request(Opcode::Get, 5).with_region(region),
        &[extent],
    );
    for _ in 0..200 {
        greedy.link.send_head(rampool_net::transport::Urgency::Demand, &head, ());
    }
    greedy.link.flush().unwrap();
    let mut other = Client::with_lease(server.addr(), open_policy(), 8 * MIB);
    exercise(&mut other, &mut TestRunner::deterministic().new_rng(), 50);
    // 400 MiB are owed to the greedy one: when it reads at last, all of it comes.
    for _ in 0..200 {
        let reply = greedy.receive().unwrap();
        assert_eq!((reply.header.status, reply.bulk.len()), (Status::Ok, 2 << 20));
    }
}

/// Waits until the server does nothing more for clients that take none of its replies.
fn stuck(server: &RunningServer, bystander: &mut Client, greedy: &mut [Client]) {
    let (mut gets, mut same) = (0, 0);
    while same < 200 {
        greedy.iter_mut().for_each(|client| _ = client.link.flush().unwrap());
        bystander.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
        let now = server.status().operations.gets;
        same = if now == gets { same + 1 } else { 0 };
        gets = now;
    }
}

/// Each connection may have 16 MiB of replies waiting, but not all of them.
#[test]
fn unread_replies_take_bounded_memory() {
    let server = Server::start(ServerConfig { shards: 1, ..config(16 * MIB) }).unwrap();
    let mut bystander = Client::with_lease(server.addr(), open_policy(), MIB);
    let parts = Layout::bytes(16).unwrap().hvector(1 << 16, 1, 64).unwrap();
    let mut table = Vec::new();
    Window { program: parts.program().clone(), from: 0, len: 1 << 20 }.encode(&mut table);
    let mut greedy: Vec<Client> =
        (0..12).map(|_| Client::with_lease(server.addr(), open_policy(), 4096)).collect();
    for client in &mut greedy {
        socket2::SockRef::from(&client.link.as_fd()).set_recv_buffer_size(64 << 10).unwrap();
        let region = RegionId(
            client.call(Opcode::OpenRegion, |h| h.with_arg(4 * MIB), b"zeroes").unwrap().header.region,
        );
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::Gather, 7).with_region(region), &table, 0);
        (0..32).for_each(|_| client.link.send_head(Urgency::Demand, &head, ()));
    }
    stuck(&server, &mut bystander, &mut greedy);
    let status = server.status();
    assert!(status.operations.bytes_out < 140 * MIB, "{} bytes were collected", status.operations.bytes_out);
    assert!(
        status.reply_bytes <= server.shared.config.reply_bytes() + 2 * MIB,
        "{} bytes wait",
        status.reply_bytes
    );
    // A client that reads gets everything.
    for _ in 0..32 {
        assert_eq!(greedy[0].receive().unwrap().bulk.len(), 1 << 20);
    }
    drop((greedy, bystander));
    idle(&server);
}

/// Pages that are gone for their clients, and that unread replies hold, take no room of others.
#[test]
fn a_lease_that_was_granted_can_be_filled_whatever_others_do_not_read() {
    let server = Server::start(ServerConfig { shards: 1, max_connections: 4, ..config(48 * MIB) }).unwrap();
    let mut victim = Client::with_lease(server.addr(), open_policy(), 40 * MIB);
    let mut greedy: Vec<Client> =
        (0..2).map(|_| Client::with_lease(server.addr(), open_policy(), 4 * MIB)).collect();
    let (extent, entry) = (Extent::new(PageIndex(0), 512), PageEntry { crc: 1, len: 4096 });
    let pages = vec![1; 2 << 20];
    for client in &mut greedy {
        let region = client.create_region().unwrap();
        let request = |opcode| Header::request(opcode, 9).with_region(region);
        for _ in 0..20 {
            let mut head = Vec::new();
            encode_put(&mut head, request(Opcode::Put), &[extent], &[entry; 512]);
            // SAFETY: the pages live until the client is gone.
            unsafe {
                client.link.send(
                    Urgency::Demand,
                    &head,
                    &[Piece { ptr: pages.as_ptr(), len: pages.len() }],
                    (),
                )
            };
            for opcode in [Opcode::Get, Opcode::Discard] {
                let mut head = Vec::new();
                encode_extents(&mut head, request(opcode), &[extent]);
                client.link.send_head(Urgency::Demand, &head, ());
            }
        }
    }
    stuck(&server, &mut victim, &mut greedy);
    let region = victim.create_region().unwrap();
    for chunk in 0..20 {
        victim.put(region, chunk * 512, &vec![vec![3; OS_PAGE_BYTES]; 512], false).unwrap();
    }
    drop((greedy, victim));
    idle(&server);
}

#[test]
fn more_requests_than_granted_end_the_connection() {
    let server =
        Server::start(ServerConfig { shards: 1, max_requests: 10, max_bytes: 64 << 20, ..config(64 * MIB) })
            .unwrap();
    let mut greedy = Client::with_lease(server.addr(), open_policy(), 8 * MIB);
    let region = greedy.create_region().unwrap();
    greedy.put(region, 0, &vec![vec![1; OS_PAGE_BYTES]; 512], false).unwrap();
    let mut head = Vec::new();
    let extent = rampool_wire::units::Extent::new(rampool_wire::units::PageIndex(0), 512);
    rampool_wire::frame::encode_extents(
        &mut head,
        Header::request(Opcode::Get, 5).with_region(region),
        &[extent],
    );
    for _ in 0..40 {
        greedy.link.send_head(rampool_net::transport::Urgency::Demand, &head, ());
    }
    greedy.link.flush().unwrap();
    // Answers that are read are outstanding no more.
    let deadline = Instant::now() + DEADLINE;
    while server.status().protocol_errors == 0 {
        assert!(Instant::now() < deadline, "more requests than granted are served");
        std::thread::sleep(Duration::from_millis(5));
    }
    greedy.wait_closed();
    assert_eq!(server.status().protocol_errors, 1);
}

/// Raw requests to a queue that no correct client makes.
#[test]
fn queues_refuse_leaseless_greedy_and_malformed_requests() {
    use rampool_wire::frame::{
        AwaitBody, Body, Push, PushHeads, QueueBounds, Settlement, Take, encode_frame,
    };
    let server = Server::start(ServerConfig { shards: 1, max_requests: 10, ..config(64 * MIB) }).unwrap();
    let table = |write: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        write(&mut out);
        out
    };
    let open = table(&|out| QueueBounds { messages: 10, bytes: 1 << 20 }.encode("jobs", out));
    let mut leaseless = Client::new(server.addr(), open_policy());
    assert_eq!(
        leaseless.call(Opcode::OpenQueue, |h| h.with_arg(1), &open).err().unwrap().status,
        Status::NotAllowed
    );
    let mut client = Client::with_lease(server.addr(), open_policy(), 8 * MIB);
    let opened = client.call(Opcode::OpenQueue, |h| h.with_arg(1), &open).unwrap().header;
    let (queue, region) = (opened.arg, RegionId(opened.region));
    // The queue's region belongs to the queue alone.
    assert_eq!(
        client.put(region, 0, &[vec![1; OS_PAGE_BYTES]], false).unwrap_err().status,
        Status::NotAllowed
    );
    for opcode in [Opcode::FreeRegion, Opcode::AdoptRegion, Opcode::CloneRegion] {
        assert_eq!(client.region_call(opcode, region).unwrap_err().status, Status::NotAllowed, "{opcode:?}");
    }
    assert_eq!(client.discard(region, 0, 1).unwrap_err().status, Status::NotAllowed);
    // What is not there, or not one's own.
    let push = table(&|out| Push { timeout_ms: 0, head: b"head", body: Body::Bytes(5000) }.encode(out));
    assert_eq!(
        client.call(Opcode::Push, |h| h.with_arg(99), &push).err().unwrap().status,
        Status::NoSuchQueue
    );
    let pushed = client.call(Opcode::Push, |h| h.with_arg(queue), &push).unwrap();
    assert_eq!((pushed.header.arg, &pushed.table[..]), (1, &0u64.to_le_bytes()[..]));
    let heads = |heads: &[&[u8]]| table(&|out| PushHeads::encode(0, heads, out));
    let group = heads(&[b"a", b"b", b"c"]);
    assert_eq!(
        client.call(Opcode::PushHeads, |h| h.with_arg(99), &group).err().unwrap().status,
        Status::NoSuchQueue
    );
    let too_many = heads(&[&b""[..]; 11]);
    assert_eq!(
        client.call(Opcode::PushHeads, |h| h.with_arg(queue), &too_many).err().unwrap().status,
        Status::BadRequest
    );
    assert_eq!(client.call(Opcode::PushHeads, |h| h.with_arg(queue), &group).unwrap().header.arg, 2);
    let wait = |number| table(&|out| AwaitBody { number, timeout_ms: 0 }.encode(out));
    assert_eq!(
        client.call(Opcode::AwaitBody, |h| h.with_arg(queue), &wait(1)).err().unwrap().status,
        Status::NoSuchMessage,
        "not taken"
    );
    let done = table(&|out| Settlement::Done.encode(&[1, 2, u64::MAX], out));
    assert_eq!(client.call(Opcode::Settle, |h| h.with_arg(queue), &done).unwrap().header.arg, 0);
    let withdraw = table(&|out| Settlement::Withdraw.encode(&[1, 1], out));
    assert_eq!(client.call(Opcode::Settle, |h| h.with_arg(queue), &withdraw).unwrap().header.arg, 1);
    server.check();
    // More that waits than may be unanswered.
    let take = table(&|out| Take { timeout_ms: 60_000, most: 1, acknowledged: Vec::new() }.encode(out));
    for request in 1000..1020 {
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::Take, request).with_arg(queue), &take, 0);
        client.link.send_head(rampool_net::transport::Urgency::Demand, &head, ());
    }
    client.link.flush().unwrap();
    client.wait_closed();
    // Every table that is cut short ends its connection, and no other.
    for (opcode, table) in [
        (Opcode::OpenQueue, open),
        (Opcode::Push, push),
        (Opcode::PushHeads, group),
        (Opcode::Take, take),
        (Opcode::Settle, withdraw),
        (Opcode::AwaitBody, wait(1)),
    ] {
        let mut client = Client::with_lease(server.addr(), open_policy(), MIB);
        let cut = &table[..if opcode == Opcode::OpenQueue { 16 } else { table.len() - 1 }];
        let refused = client.call(opcode, |h| h.with_arg(1), cut).err().unwrap();
        assert_eq!(refused.status, Status::BadRequest, "{opcode:?}: {}", refused.message);
        client.wait_closed();
    }
    drop((leaseless, client));
    assert!(server.wait_until_idle(Instant::now() + DEADLINE));
    server.check();
}

#[test]
fn a_stopping_server_tells_its_clients_and_waits_for_them() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), MIB);
    let region = client.create_region().unwrap();
    let mut idle = Client::new(server.addr(), open_policy());
    let endpoint = server.addr().clone();
    let drained = std::thread::spawn(move || server.drain(DEADLINE));
    let deadline = Instant::now() + DEADLINE;
    while client.unasked.is_empty() {
        assert!(Instant::now() < deadline);
        client.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
    }
    assert_eq!(client.unasked[0].opcode, Opcode::Draining);
    assert!(client.unasked[0].arg > 0);
    client.put(region, 0, &[vec![1; OS_PAGE_BYTES]], false).unwrap();
    assert_eq!(client.get(region, 0, 1).unwrap(), [vec![1; OS_PAGE_BYTES]]);
    assert_eq!(idle.open(1).unwrap_err().status, Status::Draining);
    assert_eq!(Client::new(&endpoint, open_policy()).open(1).unwrap_err().status, Status::Draining);
    assert!(
        query_status(&endpoint, open_policy(), Instant::now() + DEADLINE).unwrap().draining,
        "the status says so"
    );
    // A program that is served goes on: a child of it joins, and a process whose connection breaks
    // reconnects, and is waited for.
    let mut child = Client::new(&endpoint, open_policy());
    child.attach(client.granted(), MemberId(0)).unwrap();
    let member = child.granted().member;
    drop(child);
    client.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    client.wait_closed();
    let mut again = Client::new(&endpoint, open_policy());
    again.attach(client.granted(), member).unwrap();
    again.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    drained.join().unwrap();
}

#[test]
fn a_server_tells_what_it_does() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), MIB);
    let region = client.create_region().unwrap();
    client.put(region, 0, &[vec![1; OS_PAGE_BYTES], vec![0; OS_PAGE_BYTES]], false).unwrap();
    client.get(region, 0, 2).unwrap();
    let status = query_status(server.addr(), open_policy(), Instant::now() + DEADLINE).unwrap();
    assert_eq!((status.memory_bytes, status.lent_bytes, status.free_bytes), (64 * MIB, MIB, 63 * MIB));
    let lease = &status.leases[0];
    assert_eq!((lease.name.as_str(), lease.pages, lease.used_bytes, lease.regions), ("test", 1, 4096, 1));
    assert_eq!((lease.members[0].pid, lease.members[0].connections), (std::process::id(), 1));
    let operations = lease.operations;
    assert_eq!((operations.puts, operations.put_pages, operations.bytes_in), (1, 2, 4096));
    assert_eq!((operations.gets, operations.got_pages, operations.bytes_out), (1, 2, 4096));
    drop(server);
    let error = query_status(client_endpoint(), open_policy(), Instant::now() + DEADLINE).unwrap_err();
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
}

fn client_endpoint() -> &'static Endpoint {
    static UNREACHABLE: std::sync::OnceLock<Endpoint> = std::sync::OnceLock::new();
    UNREACHABLE.get_or_init(|| "127.0.0.1:1".parse().unwrap())
}

#[test]
fn a_server_does_not_start_where_it_would_be_unsafe() {
    let start = |config: ServerConfig| Server::start(config).err().unwrap();
    let everywhere = ServerConfig { listen: vec!["0.0.0.0:0".parse().unwrap()], ..config(MIB) };
    assert!(matches!(start(everywhere.clone()), StartError::KeyNeeded(_)));
    assert!(matches!(
        start(ServerConfig { encryption: Encryption::On, ..config(MIB) }),
        StartError::EncryptionNeedsKey
    ));
    assert!(matches!(start(ServerConfig { shards: 0, ..config(MIB) }), StartError::Nothing));
    let ucx = ServerConfig {
        listen: vec!["ucx:127.0.0.1:0".parse().unwrap()],
        ucx_clients_are_trusted: false,
        ..config(MIB)
    };
    assert!(matches!(start(ucx), StartError::UcxClients(_)));
    let taken = Server::start(config(MIB)).unwrap();
    let again = ServerConfig { listen: vec![taken.addr().clone()], ..config(MIB) };
    assert!(matches!(start(again), StartError::Listen { .. }));
    drop(Server::start(ServerConfig { key: Some(rampool_net::key::Key::generate()), ..everywhere }).unwrap());
}

/// A connection that is asked without the poll set ([`shard`]) is heard when its shard has slept, and while
/// others have more to say than it.
#[test]
fn a_warm_connection_is_heard_after_a_sleep_and_among_others() {
    let server =
        Server::start(ServerConfig { shards: 1, spin: Duration::from_millis(2), ..config(MIB) }).unwrap();
    let mut clients: Vec<Client> = (0..6).map(|_| Client::new(server.addr(), open_policy())).collect();
    let beat = |client: &mut Client, times: usize| {
        for _ in 0..times {
            client.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
        }
    };
    for warm in 1..=clients.len() {
        for client in &mut clients[..warm] {
            beat(client, 200);
        }
        for _ in 0..20 {
            clients.iter_mut().for_each(|client| beat(client, 1));
        }
        beat(&mut clients[0], 200);
        let (slept, deadline) = (server.status().sleeps, Instant::now() + DEADLINE);
        while server.status().sleeps == slept {
            assert!(Instant::now() < deadline, "the shard does not sleep");
            std::thread::yield_now();
        }
        clients.iter_mut().for_each(|client| beat(client, 1));
    }
    // And its end is noticed.
    drop(clients);
    idle(&server);
}

#[test]
fn connections_beyond_the_limit_are_told_so() {
    let server = Server::start(ServerConfig { max_connections: 2, ..config(MIB) }).unwrap();
    let _two = [Client::new(server.addr(), open_policy()), Client::new(server.addr(), open_policy())];
    let third =
        rampool_net::transport::connect::<()>(server.addr(), open_policy(), Instant::now() + DEADLINE);
    assert!(third.is_err_and(|e| e.to_string().contains("as many connections")));
}

/// Its mode kept out every user that `allow_uids` let in.
#[test]
fn users_that_are_allowed_reach_the_socket() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let mode = |allow_uids: Vec<u32>| {
        let path = dir.path().join(format!("s{}", allow_uids.len()));
        let server = Server::start(ServerConfig {
            listen: vec![Endpoint::Unix(path.clone())],
            allow_uids,
            ..config(MIB)
        })
        .unwrap();
        Client::with_lease(server.addr(), open_policy(), 4096);
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    };
    assert_eq!((mode(vec![]), mode(vec![65534])), (0o600, 0o666));
}

/// The kernel takes seconds to close this socket, as its owner has said. The shard that gets it serves others
/// meanwhile.
#[test]
fn descriptors_that_take_long_to_close_hold_up_no_shard() {
    const LINGER: Duration = Duration::from_secs(20);
    let dir = tempfile::tempdir().unwrap();
    let listen = vec![Endpoint::Unix(dir.path().join("s"))];
    let server = Server::start(ServerConfig { shards: 1, listen, ..config(64 * MIB) }).unwrap();
    let mut other = Client::with_lease(server.addr(), open_policy(), MIB);
    let policy = || LocalPolicy { features: features::RINGS | features::PUBLISH, ..open_policy() };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let began = Instant::now();
    // With a request that asks for it, with none, and two at a time.
    for way in 0..3 {
        let lingers = |_| {
            let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            socket2::SockRef::from(&socket).set_linger(Some(LINGER)).unwrap();
            socket.set_nonblocking(true).unwrap();
            while std::io::Write::write(&mut &socket, &[1; 1 << 16]).is_ok() {}
            socket
        };
        let mut rude = Client::with_lease(server.addr(), policy(), MIB);
        for socket in (0..=way / 2).map(lingers) {
            assert!(rude.link.hand_over(socket.as_fd()).unwrap());
        }
        if way != 1 {
            let mut table = Vec::new();
            let rights = rampool_wire::frame::Rights::Both;
            rampool_wire::frame::Publish { rights, bytes: 4096, name: "a" }.encode(&mut table);
            assert_eq!(rude.call(Opcode::Publish, |h| h, &table).err().unwrap().status, Status::BadRequest);
        }
        drop(rude);
        for _ in 0..100 {
            other.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
        }
    }
    // Not how long it takes: that it does not wait for what would take far longer.
    assert!(began.elapsed() < LINGER, "the shard waited for a client's socket");
}

/// A connection without a lease, which a client wants as soon as it has a place, keeps its place only until
/// another one comes.
#[test]
fn clients_that_take_no_lease_keep_no_owner_out() {
    let server = Server::start(ServerConfig { max_connections: 2, shards: 1, ..config(MIB) }).unwrap();
    let mut idle = [Client::new(server.addr(), open_policy()), Client::new(server.addr(), open_policy())];
    let deadline = Instant::now() + DEADLINE;
    let mut owner = loop {
        // They say something, now and then.
        idle.iter_mut().for_each(|client| _ = direct(client, Opcode::Heartbeat, RegionId(0), 0, &[], &[]));
        match rampool_net::transport::connect::<()>(server.addr(), open_policy(), Instant::now() + DEADLINE) {
            Ok(link) => break Client::over(link),
            Err(error) => assert!(
                Instant::now() < deadline && error.to_string().contains("as many connections"),
                "{error}"
            ),
        }
        std::thread::yield_now();
    };
    owner.open(4096).unwrap();
    // And one that says nothing is not waited for.
    drop(idle);
    let mut silent = loop {
        match rampool_net::transport::connect::<()>(server.addr(), open_policy(), Instant::now() + DEADLINE) {
            Ok(link) => break Client::over(link),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::yield_now();
    };
    silent.wait_closed();
}

/// One tenant's lease is busy, and a process joins it: the other tenants do not wait, those of the same shard
/// neither. One that goes away meanwhile is no member.
#[test]
fn joining_a_busy_lease_leaves_the_directory_and_the_shard_to_others() {
    let server = Server::start(ServerConfig { shards: 1, ..config(64 * MIB) }).unwrap();
    let tenant = Client::with_lease(server.addr(), open_policy(), MIB);
    let mut joins = Client::new(server.addr(), open_policy());
    let mut gone = Client::new(server.addr(), open_policy());
    let mut other = Client::with_lease(server.addr(), open_policy(), MIB);
    let lease = server.shared.lease(tenant.granted().lease).unwrap();
    let busy = lease.space();
    let to = tenant.granted();
    let attach = rampool_wire::frame::AttachLease {
        lease: to.lease,
        token: to.token,
        member: MemberId(0),
        pid: 1,
        name: "child".into(),
        host: "here".into(),
    };
    let ask = |client: &mut Client| {
        let request = client.number();
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::AttachLease, request), &attach.encode(), 0);
        client.link.send_head(Urgency::Demand, &head, ());
        client.link.flush().unwrap();
        request
    };
    let request = ask(&mut joins);
    ask(&mut gone);
    for round in 0..2000 {
        other.call(Opcode::ResizeLease, |h| h.with_arg(MIB + round), &[]).unwrap();
    }
    let members = || {
        let leases = server.status().leases;
        leases.iter().find(|lease| lease.lease == to.lease.0).map_or(0, |lease| lease.members.len())
    };
    assert_eq!(members(), 3);
    drop((gone, busy));
    let deadline = Instant::now() + DEADLINE;
    joins.reply(request).unwrap().unwrap();
    let region = joins.create_region().unwrap();
    joins.put(region, 0, &[vec![1; OS_PAGE_BYTES]], false).unwrap();
    while members() > 2 {
        joins.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
        assert!(Instant::now() < deadline, "who went away is a member");
    }
    // And one that waits when the server stops.
    let busy = lease.space();
    ask(&mut Client::new(server.addr(), open_policy()));
    other.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
    // The reaper wants this lock as well, if it comes to it first.
    let stopping = std::thread::spawn(move || drop(server));
    std::thread::sleep(Duration::from_millis(20));
    drop(busy);
    stopping.join().unwrap();
}

/// A peer that does not authenticate keeps its place only until another one comes.
#[test]
fn silent_unauthenticated_connections_keep_no_client_out() {
    let server = Server::start(ServerConfig { max_connections: 2, shards: 1, ..config(MIB) }).unwrap();
    let Endpoint::Tcp { host, port } = server.addr() else { unreachable!() };
    let unauthenticated = [(); 2].map(|()| std::net::TcpStream::connect((host.as_str(), *port)).unwrap());
    let deadline = Instant::now() + DEADLINE;
    while server.status().connections < 2 {
        assert!(Instant::now() < deadline, "the unauthenticated connections have no places");
        std::thread::yield_now();
    }
    let mut clients =
        [Client::with_lease(server.addr(), open_policy(), 4096), Client::new(server.addr(), open_policy())];
    for mut connection in &unauthenticated {
        connection.set_read_timeout(Some(DEADLINE)).unwrap();
        assert_eq!(std::io::Read::read(&mut connection, &mut [0]).unwrap(), 0, "it is cut off");
    }
    assert_eq!((server.status().connections, server.status().failed_handshakes), (2, 2));
    let third =
        rampool_net::transport::connect::<()>(server.addr(), open_policy(), Instant::now() + DEADLINE);
    assert!(
        third.is_err_and(|e| e.to_string().contains("as many connections")),
        "clients are not cut off for others"
    );
    for client in &mut clients {
        client.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
    }
}

/// Requests that make sense but may not be: answered, counted, and the connection goes on.
#[test]
fn what_is_not_allowed_is_answered_with_the_reason() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut client = Client::new(server.addr(), open_policy());
    let expect = |result: Result<(), No>, status: Status| assert_eq!(result.unwrap_err().status, status);
    expect(client.create_region().map(drop), Status::NotAllowed);
    expect(client.get(RegionId(1), 0, 1).map(drop), Status::NotAllowed);
    expect(client.put(RegionId(1), 0, &[vec![1; OS_PAGE_BYTES]], false), Status::NotAllowed);
    client.open(MIB).unwrap();
    expect(client.get(RegionId(77), 0, 1).map(drop), Status::NoSuchRegion);
    expect(client.put(RegionId(77), 0, &[vec![1; OS_PAGE_BYTES]], false), Status::NoSuchRegion);
    expect(client.discard(RegionId(77), 0, 1), Status::NoSuchRegion);
    expect(client.region_call(Opcode::FreeRegion, RegionId(77)).map(drop), Status::NoSuchRegion);
    let region = client.create_region().unwrap();
    client.put(region, 0, &[vec![1; OS_PAGE_BYTES]], false).unwrap();
    assert_eq!(server.status().operations.refused, 7);
    assert_eq!(server.status().used_bytes, 4096, "refused pages keep no frames");
}
