//! The client's side of a pool against real memory servers in this process.
#![allow(clippy::cast_possible_truncation)]

#[path = "pool/direct.rs"]
mod direct;
#[path = "pool/places.rs"]
mod places;
#[path = "pool/published.rs"]
mod published;
#[path = "pool/queue.rs"]
mod queue;
#[path = "pool/relay.rs"]
mod relay;
#[path = "pool/rings.rs"]
mod rings;
#[path = "pool/zero_copy.rs"]
mod zero_copy;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rampool::error::{ConnectError, ConnectReason, PoolError};
use rampool::key::Key;
use rampool::pool::{LeaseTicket, Pool, PoolConfig, PoolEvent, PoolRegion, RegionTicket, ServerSpec};
use rampool::proto::session::Encryption;
use rampool::proto::units::{ByteLen, Extent, OS_PAGE_BYTES, PageIndex};
use rampool::server::{OpenFrames, RunningServer, Server, ServerConfig, StoreKind};
use relay::{Cut, Relay};

const MIB: u64 = 1 << 20;
/// Ends every test that would wait for ever; no test depends on it.
const WATCHDOG: Duration = Duration::from_secs(60);

fn server_config(bytes: u64) -> ServerConfig {
    let mut config = ServerConfig::new(bytes, "127.0.0.1:0".parse().unwrap());
    config.lock_memory = false;
    config.spin = Duration::ZERO;
    config
}

fn serve(bytes: u64) -> RunningServer {
    Server::start(server_config(bytes)).unwrap()
}

fn config(servers: &[&RunningServer], bytes: u64) -> PoolConfig {
    let specs = servers.iter().map(|s| ServerSpec { endpoint: s.addr().clone(), memory: None }).collect();
    let mut config = PoolConfig::new(specs, ByteLen(bytes), "test");
    config.stripe_pages = 4;
    config
}

fn next(pool: &mut Pool) -> PoolEvent {
    pool.next_event(Instant::now() + WATCHDOG).unwrap().expect("an event before the watchdog")
}

/// Every member has left these servers, and nothing is left of them there.
fn all_gone(servers: &[&RunningServer]) {
    for server in servers {
        assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
        server.check();
    }
}

/// For what a server does in its own time.
fn wait_until(what: &str, happened: impl Fn() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !happened() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::yield_now();
    }
}

/// What a page looks like after its `version`th change; 0 is never written.
fn content(page: u64, version: u32) -> Vec<u8> {
    let mut seed = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(version);
    let mut bytes = Vec::with_capacity(OS_PAGE_BYTES);
    while bytes.len() < OS_PAGE_BYTES {
        if version == 0 {
            bytes.push(0);
            continue;
        }
        seed = mix(seed);
        // Some pages pack well, some do not.
        let run = if version.is_multiple_of(2) { 8 } else { 512 };
        bytes.extend(seed.to_le_bytes().iter().cycle().take(run));
    }
    bytes
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd).wrapping_add(0x9e37_79b9);
    x ^ (x >> 29)
}

fn extent(first: u64, count: u32) -> Extent {
    Extent::new(PageIndex(first), count)
}

fn store(pool: &mut Pool, region: PoolRegion, extent: Extent, version: u32) {
    let memory: Vec<u8> = extent.pages().flat_map(|p| content(p.0, version)).collect();
    // SAFETY: the memory lives until the store's event.
    unsafe { pool.store(region, 1, &[(extent, memory.as_ptr())]) };
    match next(pool) {
        PoolEvent::Stored { token: 1 } => {}
        other => panic!("{other:?}"),
    }
}

fn fetch(pool: &mut Pool, region: PoolRegion, extents: &[Extent]) -> Vec<u8> {
    let mut memory = vec![0xaa; extents.iter().map(|e| e.count as usize).sum::<usize>() * OS_PAGE_BYTES];
    // SAFETY: the memory lives until the fetch's event.
    unsafe { pool.fetch(region, 2, extents, memory.as_mut_ptr(), true) };
    match next(pool) {
        PoolEvent::Fetched { token: 2 } => memory,
        other => panic!("{other:?}"),
    }
}

fn expected(extents: &[Extent], version: u32) -> Vec<u8> {
    extents.iter().flat_map(Extent::pages).flat_map(|p| content(p.0, version)).collect()
}

/// Random stores, fetches and discards, many under way at once, against a map of what must be there.
fn exercise(pool: &mut Pool, seed: u64, steps: u32) {
    exercise_pages(pool, seed, steps, 3000);
}

fn exercise_pages(pool: &mut Pool, seed: u64, steps: u32, pages_in_use: u64) {
    struct Pending {
        fetch: bool,
        extents: Vec<Extent>,
        memory: Vec<u8>,
        expected: Vec<u8>,
    }
    let region = pool.create_region().unwrap();
    let mut versions: BTreeMap<u64, u32> = BTreeMap::new();
    let mut pending: BTreeMap<u64, Pending> = BTreeMap::new();
    let mut busy: Vec<bool> = vec![false; pages_in_use as usize];
    let mut seed = seed;
    let mut random = |below: u64| {
        seed = mix(seed);
        (seed >> 20) % below
    };
    let mut token = 0;
    let mut next_version = 1;
    let settle = |pool: &mut Pool, pending: &mut BTreeMap<u64, Pending>, busy: &mut Vec<bool>| {
        let (token, fetched) = match next(pool) {
            PoolEvent::Fetched { token } => (token, true),
            PoolEvent::Stored { token } => (token, false),
            other => panic!("{other:?}"),
        };
        let done = pending.remove(&token).expect("an event for each operation, once");
        assert_eq!(done.fetch, fetched);
        if fetched {
            assert!(done.memory == done.expected, "wrong bytes for {:?}", done.extents);
        }
        for page in done.extents.iter().flat_map(Extent::pages) {
            busy[page.0 as usize] = false;
        }
    };
    for _ in 0..steps {
        let mut extents = Vec::new();
        for _ in 0..=random(3) {
            let first = random(pages_in_use);
            let most = if random(4) == 0 { 200 } else { 6 };
            let count = (1 + random(most)).min(pages_in_use - first) as u32;
            let candidate = extent(first, count);
            if candidate.pages().all(|p| !busy[p.0 as usize]) {
                candidate.pages().for_each(|p| busy[p.0 as usize] = true);
                extents.push(candidate);
            }
        }
        let pages: Vec<u64> = extents.iter().flat_map(Extent::pages).map(|p| p.0).collect();
        token += 1;
        match random(8) {
            0 => {
                for extent in &extents {
                    pool.discard(region, *extent);
                }
                // A fetch may overtake a discard, a store may not: what was discarded is stored before it is
                // read again.
                next_version += 1;
                let memory: Vec<u8> = pages.iter().flat_map(|p| content(*p, next_version)).collect();
                submit_store(pool, region, token, &extents, &memory);
                versions.extend(pages.iter().map(|p| (*p, next_version)));
                pending.insert(token, Pending { fetch: false, extents, memory, expected: Vec::new() });
            }
            1..4 => {
                next_version += 1;
                let version = if random(5) == 0 { 0 } else { next_version };
                let memory: Vec<u8> = pages.iter().flat_map(|p| content(*p, version)).collect();
                submit_store(pool, region, token, &extents, &memory);
                versions.extend(pages.iter().map(|p| (*p, version)));
                pending.insert(token, Pending { fetch: false, extents, memory, expected: Vec::new() });
            }
            kind => {
                let expected: Vec<u8> =
                    pages.iter().flat_map(|p| content(*p, versions.get(p).copied().unwrap_or(0))).collect();
                let mut memory = vec![0xaa; expected.len()];
                // SAFETY: the memory is in `pending`, unmoved, until the event.
                unsafe { pool.fetch(region, token, &extents, memory.as_mut_ptr(), kind > 5) };
                pending.insert(token, Pending { fetch: true, extents, memory, expected });
            }
        }
        while pending.len() > random(12) as usize {
            settle(pool, &mut pending, &mut busy);
        }
    }
    while !pending.is_empty() {
        settle(pool, &mut pending, &mut busy);
    }
    pool.free_region(region);
}

fn submit_store(pool: &mut Pool, region: PoolRegion, token: u64, extents: &[Extent], memory: &[u8]) {
    let mut at = 0;
    let pages: Vec<(Extent, *const u8)> = extents
        .iter()
        .map(|e| {
            let here = memory[at..].as_ptr();
            at += e.count as usize * OS_PAGE_BYTES;
            (*e, here)
        })
        .collect();
    // SAFETY: the callers keep the memory until the store's event.
    unsafe { pool.store(region, token, &pages) };
}

#[test]
fn random_operations_over_three_servers_return_what_was_stored_last() {
    let servers = [serve(64 * MIB), serve(64 * MIB), serve(64 * MIB)];
    let mut config = config(&[&servers[0], &servers[1], &servers[2]], 96 * MIB);
    for compression in [false, true] {
        config.compression = compression;
        let mut pool = Pool::connect(&config).unwrap();
        exercise(&mut pool, 7 + u64::from(compression), 600);
        pool.close();
        assert!(
            servers.iter().all(|s| s.wait_until_idle(Instant::now() + WATCHDOG)),
            "a goodbye returns everything at once"
        );
        servers.iter().for_each(RunningServer::check);
    }
}

#[test]
fn sealed_links_unix_sockets_and_the_compressed_store_behave_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let key = Key::generate();
    let sealed = {
        let mut config = server_config(64 * MIB);
        config.key = Some(key.clone());
        config.encryption = Encryption::On;
        Server::start(config).unwrap()
    };
    let packed = {
        let mut config = server_config(64 * MIB);
        config.listen = vec![format!("unix:{}", dir.path().join("socket").display()).parse().unwrap()];
        config.key = Some(key.clone());
        config.store = StoreKind::Compressed;
        Server::start(config).unwrap()
    };
    let mut config = config(&[&sealed, &packed], 64 * MIB);
    config.key = Some(key);
    let mut pool = Pool::connect(&config).unwrap();
    exercise(&mut pool, 3, 400);
    // A second member needs no name service and no list of servers, only the ticket and the key.
    let ticket: LeaseTicket = pool.lease_ticket().to_string().parse().unwrap();
    let mut attach = PoolConfig::attach(ticket, "second");
    attach.key = config.key.clone();
    let mut second = Pool::connect(&attach).unwrap();
    exercise(&mut second, 4, 100);

    attach.key = Some(Key::generate());
    match Pool::connect(&attach).err().unwrap() {
        ConnectError::Server { reason: ConnectReason::Link(message), .. } => {
            assert!(message.contains("key"), "{message}")
        }
        other => panic!("{other}"),
    }
    exercise(&mut pool, 5, 50);
}

#[test]
fn a_server_that_stops_in_the_middle_is_lost_with_its_name_and_the_others_go_on() {
    let servers = [serve(64 * MIB), serve(64 * MIB)];
    let mut pool = Pool::connect(&config(&[&servers[0], &servers[1]], 32 * MIB)).unwrap();
    let region = pool.create_region().unwrap();
    let all = extent(0, 512);
    store(&mut pool, region, all, 1);
    let mut memory = vec![vec![0u8; 512 * OS_PAGE_BYTES]; 16];
    for (token, memory) in (100..).zip(&mut memory) {
        // SAFETY: the memory lives until the events, or the pool's end.
        unsafe { pool.fetch(region, token, &[all], memory.as_mut_ptr(), false) };
    }
    let [first, second] = servers;
    let name = second.addr().to_string();
    second.stop();
    let (mut fetched, mut failed, mut lost) = (0, 0, 0);
    while fetched + failed < 16 || lost == 0 {
        match next(&mut pool) {
            PoolEvent::Fetched { .. } => fetched += 1,
            PoolEvent::Failed { error: PoolError::Lost { server, .. }, .. } => {
                assert_eq!(server, name);
                failed += 1;
            }
            PoolEvent::Lost { name: who, .. } => {
                assert_eq!(who, name);
                lost += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(lost, 1);
    let of_first: Vec<Extent> = all.pages().filter(|p| pool.holder(*p).0 == 0).map(Extent::page).collect();
    assert_eq!(fetch(&mut pool, region, &of_first), expected(&of_first, 1));
    assert!(matches!(pool.clone_region(region), Err(PoolError::Lost { .. })));
    drop(pool);
    first.check();
}

#[test]
fn a_full_lease_refuses_and_takes_pages_again_once_there_is_room() {
    let server = serve(64 * MIB);
    let mut pool = Pool::connect(&config(&[&server], 4 * MIB)).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 1000), 1);
    let memory: Vec<u8> = extent(1000, 64).pages().flat_map(|p| content(p.0, 1)).collect();
    submit_store(&mut pool, region, 9, &[extent(1000, 64)], &memory);
    match next(&mut pool) {
        PoolEvent::Full { token: 9, free, name, .. } => {
            assert_eq!((free, name), (ByteLen(24 * 4096), server.addr().to_string()))
        }
        other => panic!("{other:?}"),
    }
    // Writing again what is there needs no room; discarding makes some; so does a larger lease.
    store(&mut pool, region, extent(0, 1000), 2);
    pool.discard(region, extent(0, 40));
    store(&mut pool, region, extent(1000, 64), 1);
    pool.resize_lease(ByteLen(8 * MIB)).unwrap();
    store(&mut pool, region, extent(2000, 1000), 3);
    assert_eq!(fetch(&mut pool, region, &[extent(39, 2), extent(1063, 1), extent(2000, 2)]), {
        [content(39, 0), content(40, 2), content(1063, 1), expected(&[extent(2000, 2)], 3)].concat()
    });
    match pool.resize_lease(ByteLen(100 * MIB)).unwrap_err() {
        PoolError::Refused { server: who, free, .. } => {
            assert_eq!((who, free), (server.addr().to_string(), ByteLen(56 * MIB)))
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_lease_is_spread_over_what_is_free_and_refused_with_what_there_is() {
    let servers = [serve(8 * MIB), serve(64 * MIB)];
    let pool = Pool::connect(&config(&[&servers[0], &servers[1]], 40 * MIB)).unwrap();
    assert_eq!(pool.stats().servers.iter().map(|s| s.lease_bytes).collect::<Vec<_>>(), [8 * MIB, 32 * MIB]);
    match Pool::connect(&config(&[&servers[0], &servers[1]], 40 * MIB)).err().unwrap() {
        ConnectError::TooLittle { wanted, missing, free } => {
            assert_eq!((wanted, missing), (ByteLen(40 * MIB), ByteLen(8 * MIB)));
            assert!(free.contains("0 bytes free") && free.contains("32 MiB free"), "{free}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_server_that_is_short_of_memory_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let pressure = dir.path().join("memory");
    std::fs::write(&pressure, "full avg10=40.00 avg60=0.00 total=1\n").unwrap();
    let server = Server::start(ServerConfig { pressure: vec![pressure], ..server_config(64 * MIB) }).unwrap();
    let deadline = std::time::Instant::now() + WATCHDOG;
    while !server.status().short_of_memory {
        assert!(std::time::Instant::now() < deadline, "the server does not notice");
        std::thread::sleep(Duration::from_millis(10));
    }
    let refused = Pool::connect(&config(&[&server], 8 * MIB)).err().unwrap();
    assert_eq!(refused.short_of_memory(), Some(server.addr().to_string().as_str()), "{refused}");
    assert!(refused.to_string().contains("short of memory"), "{refused}");
}

#[test]
fn a_pool_that_one_server_refuses_gives_back_what_the_others_granted() {
    let servers = [64 * MIB, 64 * MIB].map(|bytes| {
        let mut config = server_config(bytes);
        config.grace = 10 * WATCHDOG;
        Server::start(config).unwrap()
    });
    let too_much = Pool::connect(&config(&[&servers[0], &servers[1]], 200 * MIB)).err().unwrap();
    assert!(matches!(too_much, ConnectError::TooLittle { .. }), "{too_much}");
    let spec = |server: &RunningServer, bytes| ServerSpec {
        endpoint: server.addr().to_string().parse().unwrap(),
        memory: Some(ByteLen(bytes)),
    };
    let named = PoolConfig::new(
        vec![spec(&servers[0], 32 * MIB), spec(&servers[1], 65 * MIB)],
        ByteLen(97 * MIB),
        "test",
    );
    let refused = Pool::connect(&named).err().unwrap().to_string();
    assert!(refused.contains("it has 64 MiB free, 65 MiB are wanted"), "{refused}");
    assert!(
        servers.iter().all(|s| s.wait_until_idle(Instant::now() + WATCHDOG)),
        "a lease without an owner is left"
    );
    Pool::connect(&config(&[&servers[0], &servers[1]], 128 * MIB)).unwrap();
}

#[test]
fn what_a_child_could_not_take_over_is_freed() {
    let servers = [serve(64 * MIB), serve(64 * MIB)];
    let mut wish = config(&[&servers[0], &servers[1]], 32 * MIB);
    wish.copies = rampool::pool::Copies::Two;
    let mut parent = Pool::connect(&wish).unwrap();
    let region = parent.create_region().unwrap();
    store(&mut parent, region, extent(0, 100), 1);
    let count =
        |server: &RunningServer| server.status().leases.iter().map(|lease| lease.regions).sum::<u64>();
    let regions = || servers.each_ref().map(count);
    let before = regions();
    let clone = parent.clone_region(region).unwrap();
    let ticket = parent.hand_over(clone).unwrap();
    // The child does without the second server, for now.
    let mut attach = PoolConfig::attach(parent.lease_ticket(), "child");
    let text = ticket.to_string();
    let mut fields: Vec<&str> = text.split(';').collect();
    fields[2] = "0";
    let without: RegionTicket = fields.join(";").parse().unwrap();
    attach.to_adopt(&without);
    let mut child = Pool::connect(&attach).unwrap();
    let mine = child.adopt_region(&without).unwrap();
    parent.free_what_was_not_taken(&ticket);
    let until = Instant::now() + WATCHDOG;
    let caught_up = |event: PoolEvent| matches!(event, PoolEvent::CaughtUp { .. });
    while !caught_up(next(&mut child)) {}
    // One more at each: the one that was taken over, and the one that the child made where it came late.
    while regions() != before.map(|count| count + 1) {
        assert!(Instant::now() < until, "{:?} regions, {before:?} before the fork", regions());
        let _ = parent.next_event(Instant::now() + Duration::from_millis(10));
    }
    assert_eq!(fetch(&mut child, mine, &[extent(0, 100)]), expected(&[extent(0, 100)], 1));
    child.close();
    parent.close();
    all_gone(&[&servers[0], &servers[1]]);
}

#[test]
fn a_forked_childs_region_is_a_clone_that_the_child_takes_over() {
    let servers = [serve(64 * MIB), serve(64 * MIB)];
    let mut parent = Pool::connect(&config(&[&servers[0], &servers[1]], 32 * MIB)).unwrap();
    let region = parent.create_region().unwrap();
    store(&mut parent, region, extent(0, 2000), 1);
    let clone = parent.clone_region(region).unwrap();
    store(&mut parent, region, extent(0, 1000), 2);
    let ticket: RegionTicket = parent.region_ticket(clone).unwrap().to_string().parse().unwrap();

    let mut child = Pool::connect(&PoolConfig::attach(parent.lease_ticket(), "child")).unwrap();
    // Not before it is handed over: regions belong to members.
    let mine = child.adopt_region(&ticket).unwrap();
    store(&mut child, mine, extent(500, 1000), 3);
    assert_eq!(fetch(&mut child, mine, &[extent(0, 500)]), expected(&[extent(0, 500)], 1));
    assert_eq!(fetch(&mut child, mine, &[extent(1499, 2)]), [content(1499, 3), content(1500, 1)].concat());
    assert_eq!(fetch(&mut parent, region, &[extent(999, 2)]), [content(999, 2), content(1000, 1)].concat());
    // The parent's end does not take the child's pages along.
    parent.close();
    assert_eq!(
        fetch(&mut child, mine, &[extent(0, 2000)]),
        [
            expected(&[extent(0, 500)], 1),
            expected(&[extent(500, 1000)], 3),
            expected(&[extent(1500, 500)], 1)
        ]
        .concat()
    );
    child.close();
    assert!(servers.iter().all(|s| s.wait_until_idle(Instant::now() + WATCHDOG)));
}

#[test]
fn the_lease_of_a_pool_that_vanishes_returns_after_the_grace_time() {
    let server = {
        let mut config = server_config(64 * MIB);
        config.grace = Duration::from_millis(50);
        Server::start(config).unwrap()
    };
    let mut pool = Pool::connect(&config(&[&server], 32 * MIB)).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 100), 1);
    drop(pool);
    assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
}

fn through(relay: &Relay, bytes: u64) -> PoolConfig {
    let spec = ServerSpec { endpoint: relay.address.to_string().parse().unwrap(), memory: None };
    PoolConfig::new(vec![spec], ByteLen(bytes), "test")
}

fn address_of(server: &RunningServer) -> std::net::SocketAddr {
    server.addr().to_string().parse().unwrap()
}

/// Connections that break at any byte, again and again: nothing is lost, nothing done twice that may be done
/// once, and the regions that were made are those that the client knows.
#[test]
fn a_cut_link_is_made_again_and_nothing_is_lost() {
    let key = Key::generate();
    for encrypted in [false, true] {
        let server = {
            let mut config = server_config(64 * MIB);
            config.key = encrypted.then(|| key.clone());
            Server::start(config).unwrap()
        };
        let relay = Relay::start(address_of(&server), Cut::Clean, 1_000_000);
        let mut config = through(&relay, 32 * MIB);
        (config.key, config.encryption) =
            (encrypted.then(|| key.clone()), if encrypted { Encryption::On } else { Encryption::Auto });
        let mut pool = Pool::connect(&config).unwrap();
        exercise(&mut pool, 11, 400);
        assert!(relay.cuts() >= 10, "{} cuts", relay.cuts());
        assert!(pool.stats().servers[0].reconnects >= 5, "{:?}", pool.stats());
        let mut make = |from: Option<PoolRegion>| {
            relay.lose_answer();
            match from {
                None => pool.create_region().unwrap(),
                Some(region) => pool.clone_region(region).unwrap(),
            }
        };
        let mut regions: Vec<PoolRegion> = (0..10).map(|_| make(None)).collect();
        regions.extend((0..10).map(|i| make(Some(regions[i]))).collect::<Vec<_>>());
        let status = server.status();
        assert_eq!(status.leases[0].regions, regions.len() as u64, "a repeated request made a second region");
        relay.calm();
        pool.close();
        assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
        server.check();
    }
}

/// What a client said over a connection that it has given up reaches the server when the client has said more
/// since: it must not undo that.
#[test]
fn what_arrives_late_over_a_replaced_connection_changes_nothing() {
    let server = serve(64 * MIB);
    let relay = Relay::start(address_of(&server), Cut::Late, 1_000_000);
    let mut pool = Pool::connect(&through(&relay, 32 * MIB)).unwrap();
    for round in 0..4 {
        exercise_pages(&mut pool, 100 + round, 200, 120);
    }
    assert!(relay.late_bytes() > 100_000, "{} bytes came late in {} cuts", relay.late_bytes(), relay.cuts());
    relay.calm();
    pool.close();
    assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
    server.check();
}

/// A joining process has memory that depends on the lease: a link that breaks just then is retried.
#[test]
fn a_link_that_is_cut_while_a_lease_is_joined_is_made_again() {
    let server = serve(64 * MIB);
    let relay = Relay::start(address_of(&server), Cut::Clean, 0);
    let pool = Pool::connect(&through(&relay, 32 * MIB)).unwrap();
    let mut attach = PoolConfig::attach(pool.lease_ticket(), "second");
    relay.lose_answer();
    let mut second = Pool::connect(&attach).unwrap();
    assert_eq!(relay.cuts(), 1);
    exercise(&mut second, 12, 50);
    // For so long and no longer.
    relay.refuse();
    attach.op_deadline = Duration::from_millis(300);
    match Pool::connect(&attach).err().unwrap() {
        ConnectError::Server { reason: ConnectReason::Broken(_) | ConnectReason::Lost { .. }, .. } => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_link_that_stays_cut_is_a_lost_server() {
    let server = serve(64 * MIB);
    let relay = Relay::start(address_of(&server), Cut::Clean, 1_000_000);
    let mut config = through(&relay, 32 * MIB);
    config.op_deadline = Duration::from_millis(700);
    let mut pool = Pool::connect(&config).unwrap();
    let region = pool.create_region().unwrap();
    relay.refuse();
    let memory: Vec<u8> = (0..400).flat_map(|p| content(p, 1)).collect();
    let mut token = 0;
    let lost = loop {
        token += 1;
        // SAFETY: the memory lives until the store's event.
        unsafe { pool.store(region, token, &[(extent(0, 400), memory.as_ptr())]) };
        match next(&mut pool) {
            PoolEvent::Stored { .. } => {}
            PoolEvent::Lost { name, .. } => break name,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(lost, relay.address.to_string());
    assert!(matches!(next(&mut pool), PoolEvent::Failed { .. }));
    assert!(matches!(pool.create_region(), Err(PoolError::Lost { .. })));
}
