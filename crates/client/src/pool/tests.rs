#![allow(clippy::cast_possible_truncation)]

use super::*;
use crate::error::{ConnectReason, LostReason};
use fake::{Fake, MAX_BYTES, MAX_REQUESTS};
use rampool_net::transport::PieceMut;
use std::collections::BTreeMap;

mod fake;

/// Ends every test that would wait for ever; no test depends on it.
const WATCHDOG: Duration = Duration::from_secs(60);

const MIB: u64 = 1 << 20;

fn config(fakes: &[&Fake], bytes: u64) -> PoolConfig {
    let servers = fakes.iter().map(|f| ServerSpec { endpoint: f.endpoint.clone(), memory: None }).collect();
    let mut config = PoolConfig::new(servers, ByteLen(bytes), "test");
    config.stripe_pages = 4;
    config
}

fn pool(fakes: &[&Fake]) -> Pool {
    Pool::connect(&config(fakes, 8 * MIB)).unwrap()
}

fn next(pool: &mut Pool) -> PoolEvent {
    pool.next_event(Instant::now() + WATCHDOG).unwrap().expect("an event before the watchdog")
}

/// A page whose bytes tell which one it is.
fn content(page: u64, version: u8) -> Vec<u8> {
    (0..OS_PAGE_BYTES).map(|n| (page as u8).wrapping_mul(31).wrapping_add((n / 7) as u8) ^ version).collect()
}

fn extent(first: u64, count: u32) -> Extent {
    Extent::new(PageIndex(first), count)
}

fn submit_store(pool: &mut Pool, region: PoolRegion, token: u64, extent: Extent, memory: &[u8]) {
    assert_eq!(memory.len(), extent.count as usize * OS_PAGE_BYTES);
    // SAFETY: the tests keep the memory until the store's event, or drop the pool first.
    unsafe { pool.store(region, token, &[(extent, memory.as_ptr())]) };
}

fn store(pool: &mut Pool, region: PoolRegion, extent: Extent, version: u8) {
    let memory: Vec<u8> = extent.pages().flat_map(|p| content(p.0, version)).collect();
    submit_store(pool, region, 1, extent, &memory);
    assert!(matches!(next(pool), PoolEvent::Stored { token: 1 }));
}

fn submit_fetch(
    pool: &mut Pool,
    region: PoolRegion,
    token: u64,
    extents: &[Extent],
    memory: &mut Vec<u8>,
    demand: bool,
) {
    memory.clear();
    memory.resize(extents.iter().map(|e| e.count as usize).sum::<usize>() * OS_PAGE_BYTES, 0xaa);
    // SAFETY: as in `submit_store`.
    unsafe { pool.fetch(region, token, extents, memory.as_mut_ptr(), demand) };
}

fn fetch(pool: &mut Pool, region: PoolRegion, extents: &[Extent]) -> Vec<u8> {
    let mut memory = Vec::new();
    submit_fetch(pool, region, 2, extents, &mut memory, true);
    match next(pool) {
        PoolEvent::Fetched { token: 2 } => memory,
        other => panic!("{other:?}"),
    }
}

fn expected(extents: &[Extent], version: u8) -> Vec<u8> {
    extents.iter().flat_map(Extent::pages).flat_map(|p| content(p.0, version)).collect()
}

#[test]
fn pages_come_back_as_they_were_stored_and_zero_where_they_never_were() {
    let fake = Fake::start(16 * MIB);
    let mut pool = pool(&[&fake]);
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(10, 300), 1);
    store(&mut pool, region, extent(20, 1), 2);
    assert_eq!(fetch(&mut pool, region, &[extent(20, 1)]), content(20, 2));
    assert_eq!(
        fetch(&mut pool, region, &[extent(300, 10), extent(12, 1)]),
        expected(&[extent(300, 10), extent(12, 1)], 1)
    );
    assert_eq!(
        fetch(&mut pool, region, &[extent(309, 3)]),
        [content(309, 1), vec![0; 2 * OS_PAGE_BYTES]].concat()
    );
    assert_eq!(fetch(&mut pool, region, &[extent((1 << 40) - 1, 1)]), vec![0; OS_PAGE_BYTES]);
    assert_eq!(pool.operations_under_way(), 0);
}

#[test]
fn the_checksum_of_a_zero_page_is_known_and_zero_pages_do_not_travel() {
    assert_eq!(rampool_wire::frame::page_crc(&[0; OS_PAGE_BYTES]), rampool_wire::frame::ZERO_PAGE_CRC);
    let fake = Fake::start(16 * MIB);
    let mut pool = pool(&[&fake]);
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 3), 1);
    let memory = [content(0, 2), vec![0; OS_PAGE_BYTES], content(2, 2)].concat();
    submit_store(&mut pool, region, 5, extent(0, 3), &memory);
    assert!(matches!(next(&mut pool), PoolEvent::Stored { token: 5 }));
    assert_eq!(fake.state().regions.values().next().unwrap().keys().copied().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(fetch(&mut pool, region, &[extent(0, 3)]), memory);
}

#[test]
fn stripes_spread_over_servers_and_come_back_as_one() {
    let fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut pool = pool(&[&fakes[0], &fakes[1], &fakes[2]]);
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(3, 200), 1);
    let extents = [extent(100, 50), extent(3, 1), extent(5, 90)];
    assert_eq!(fetch(&mut pool, region, &extents), expected(&extents, 1));
    for fake in &fakes {
        let held = fake.state().regions.values().next().unwrap().len();
        assert!((60..75).contains(&held), "{held} of 200 pages on one of three servers");
    }
    pool.discard(region, extent(4, 2));
    pool.discard(region, extent(20, 150));
    let zeroes = |n| vec![0; n * OS_PAGE_BYTES];
    // Discards go behind stores, and a fetch may overtake them: ask once they are through,
    // which a store behind them tells.
    store(&mut pool, region, extent(1000, 64), 1);
    assert_eq!(fetch(&mut pool, region, &[extent(3, 4)]), [content(3, 1), zeroes(2), content(6, 1)].concat());
    assert_eq!(
        fetch(&mut pool, region, &[extent(19, 2), extent(169, 2)]),
        [content(19, 1), zeroes(2), content(170, 1)].concat()
    );
}

#[test]
fn a_lease_is_spread_by_what_servers_can_give() {
    let (small, large) = (Fake::start(2 * MIB), Fake::start(32 * MIB));
    let pool = Pool::connect(&config(&[&small, &large], 10 * MIB)).unwrap();
    assert_eq!(pool.stats().servers.iter().map(|s| s.lease_bytes).collect::<Vec<_>>(), [2 * MIB, 8 * MIB]);
    assert_eq!((small.state().lent, large.state().lent), (2 * MIB, 8 * MIB));
    assert_eq!(pool.lease_bytes(), ByteLen(10 * MIB));
}

#[test]
fn a_lease_that_does_not_fit_says_what_is_free() {
    let (small, large) = (Fake::start(2 * MIB), Fake::start(3 * MIB));
    let error = Pool::connect(&config(&[&small, &large], 10 * MIB)).err().unwrap().to_string();
    assert!(
        error.contains("10 MiB")
            && error.contains("5 MiB more")
            && error.contains("2 MiB free")
            && error.contains("3 MiB free"),
        "{error}"
    );
    // Servers of its own: these take no lease back.
    let (small, large) = (Fake::start(2 * MIB), Fake::start(3 * MIB));
    let mut named = config(&[&small, &large], 0);
    let LeaseRequest::Open { servers, .. } = &mut named.lease else { unreachable!() };
    servers[0].memory = Some(ByteLen(MIB));
    servers[1].memory = Some(ByteLen(4 * MIB));
    match Pool::connect(&named).err().unwrap() {
        ConnectError::Server { server, reason: ConnectReason::Refused { wanted, free } } => {
            assert_eq!((server, wanted.0, free.0), (large.endpoint.to_string(), 4 * MIB, 3 * MIB));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let mut fake = Fake::start(MIB);
    fake.kill();
    match Pool::connect(&config(&[&fake], MIB)).err().unwrap() {
        ConnectError::Server { server, reason: ConnectReason::NotThere(_) } => {
            assert_eq!(server, fake.endpoint.to_string())
        }
        other => panic!("{other}"),
    }
    assert!(matches!(
        Pool::connect(&PoolConfig::new(Vec::new(), ByteLen(1), "x")),
        Err(ConnectError::NoServers)
    ));
}

#[test]
fn a_server_that_never_answers_the_handshake_is_given_up() {
    // Accepted by the kernel, and not read.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let spec = silent.local_addr().unwrap().to_string().parse().unwrap();
    let mut config = PoolConfig::new(vec![spec], ByteLen(MIB), "test");
    config.connect_deadline = Duration::from_millis(100);
    match Pool::connect(&config).err().unwrap() {
        ConnectError::Server {
            reason: ConnectReason::Deadline { operation: Operation::Connect, .. },
            ..
        } => {}
        other => panic!("{other}"),
    }
}

/// Everything under way ends, once, with the server's name; later operations end at once.
fn assert_lost(pool: &mut Pool, region: PoolRegion, name: &str, tokens: &[u64]) -> LostReason {
    let mut failed = BTreeMap::new();
    let mut reason = None;
    while failed.len() < tokens.len() || reason.is_none() {
        match next(pool) {
            PoolEvent::Lost { name: lost, reason: why, .. } => {
                assert_eq!(lost, name);
                assert!(reason.replace(why).is_none(), "lost twice");
            }
            PoolEvent::Failed { token, error } => {
                assert!(error.to_string().contains(name), "{error}");
                assert!(failed.insert(token, ()).is_none(), "token {token} ended twice");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(failed.into_keys().collect::<Vec<_>>(), tokens);
    assert_eq!(pool.operations_under_way(), 0);
    let lost_page =
        (0..).find(|p| pool.servers().nth(pool.holder(PageIndex(*p)).as_usize()) == Some(name)).unwrap();
    let mut memory = Vec::new();
    submit_fetch(pool, region, 77, &[extent(lost_page, 1)], &mut memory, true);
    assert!(matches!(next(pool), PoolEvent::Failed { token: 77, error: PoolError::Lost { .. } }));
    assert!(matches!(pool.create_region(), Err(PoolError::Lost { .. })));
    reason.unwrap()
}

#[test]
fn a_server_killed_in_the_middle_ends_what_needed_it_and_nothing_else() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut pool = pool(&[&fakes[0], &fakes[1]]);
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 64), 1);
    for fake in &fakes {
        fake.state().mood.hold = true;
    }
    // Stripes of 4 pages: 0..4 on the first server, 4..8 on the second.
    let mut memory: Vec<Vec<u8>> = vec![Vec::new(); 3];
    submit_fetch(&mut pool, region, 10, &[extent(0, 4)], &mut memory[0], true);
    submit_fetch(&mut pool, region, 11, &[extent(4, 4)], &mut memory[1], true);
    submit_fetch(&mut pool, region, 12, &[extent(0, 8)], &mut memory[2], false);
    let name = fakes[1].endpoint.to_string();
    fakes[1].kill();
    fakes[0].state().mood.hold = false;
    let mut seen = BTreeMap::new();
    let mut lost = 0;
    while seen.len() < 3 {
        match next(&mut pool) {
            PoolEvent::Lost { name: who, reason, .. } => {
                assert_eq!((who.as_str(), reason), (name.as_str(), LostReason::Closed));
                lost += 1;
            }
            PoolEvent::Fetched { token } => assert!(seen.insert(token, true).is_none()),
            PoolEvent::Failed { token, error } => {
                assert!(error.to_string().contains(&name), "{error}");
                assert!(seen.insert(token, false).is_none());
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((lost, seen), (1, BTreeMap::from([(10, true), (11, false), (12, false)])));
    assert_eq!(memory[0], expected(&[extent(0, 4)], 1));
    assert_eq!(fetch(&mut pool, region, &[extent(8, 4)]), expected(&[extent(8, 4)], 1));
}

#[test]
fn a_link_that_is_cut_again_and_again_in_the_middle_of_the_same_pages_is_a_lost_server() {
    let fake = Fake::start(16 * MIB);
    let mut pool = pool(&[&fake]);
    let region = pool.create_region().unwrap();
    fake.state().mood.hang_up_on = Some(Opcode::Put);
    let memory = vec![7; 128 * OS_PAGE_BYTES];
    submit_store(&mut pool, region, 3, extent(0, 128), &memory);
    assert_eq!(assert_lost(&mut pool, region, &fake.endpoint.to_string(), &[3]), LostReason::Closed);
}

#[test]
fn a_server_that_reads_but_never_answers_is_lost_at_the_deadline() {
    let fake = Fake::start(16 * MIB);
    let mut config = config(&[&fake], MIB);
    config.op_deadline = Duration::from_millis(300);
    let mut pool = Pool::connect(&config).unwrap();
    let region = pool.create_region().unwrap();
    fake.state().mood.ignore = Some(Opcode::Get);
    let mut memory = Vec::new();
    submit_fetch(&mut pool, region, 4, &[extent(9, 1)], &mut memory, true);
    assert_eq!(
        assert_lost(&mut pool, region, &fake.endpoint.to_string(), &[4]),
        LostReason::Deadline(config.op_deadline)
    );
}

#[test]
fn a_server_that_stops_reading_is_lost_at_the_deadline() {
    let fake = Fake::start(64 * MIB);
    let mut config = config(&[&fake], 32 * MIB);
    config.op_deadline = Duration::from_millis(300);
    let mut pool = Pool::connect(&config).unwrap();
    let region = pool.create_region().unwrap();
    fake.state().mood.deaf = true;
    let memory = vec![3; 2048 * OS_PAGE_BYTES];
    for token in 0..4 {
        submit_store(&mut pool, region, token, extent(token * 2048, 2048), &memory);
    }
    assert_eq!(
        assert_lost(&mut pool, region, &fake.endpoint.to_string(), &[0, 1, 2, 3]),
        LostReason::Deadline(config.op_deadline)
    );
    fake.state().mood.deaf = false;
}

/// A process that got no time to send, or to look, for longer than the deadline does not blame
/// the server for it.
#[test]
fn a_client_that_was_held_up_itself_waits_for_the_answer_before_it_gives_the_server_up() {
    let fake = Fake::start(16 * MIB);
    let mut config = config(&[&fake], 8 * MIB);
    config.op_deadline = Duration::from_secs(2);
    let mut pool = Pool::connect(&config).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 4), 1);
    fake.state().mood.deaf = true;
    let mut memory = Vec::new();
    submit_fetch(&mut pool, region, 9, &[extent(0, 4)], &mut memory, true);
    let asked = Instant::now();
    while asked.elapsed() <= config.op_deadline {
        std::thread::yield_now();
    }
    fake.state().mood.deaf = false;
    assert!(matches!(next(&mut pool), PoolEvent::Fetched { token: 9 }));
    assert_eq!(memory, expected(&[extent(0, 4)], 1));
}

#[test]
fn a_control_operation_that_is_not_answered_ends_at_the_deadline() {
    let fake = Fake::start(16 * MIB);
    let mut config = config(&[&fake], MIB);
    config.op_deadline = Duration::from_millis(200);
    let mut pool = Pool::connect(&config).unwrap();
    fake.state().mood.ignore = Some(Opcode::CreateRegion);
    match pool.create_region().unwrap_err() {
        PoolError::Lost { server, operation: Operation::CreateRegion, reason: LostReason::Deadline(_) } => {
            assert_eq!(server, fake.endpoint.to_string());
        }
        other => panic!("{other}"),
    }
}

#[test]
fn an_idle_pool_notices_a_dead_server_by_its_heartbeat() {
    let fake = Fake::start(16 * MIB);
    let mut config = config(&[&fake], MIB);
    config.op_deadline = Duration::from_millis(200);
    let mut pool = Pool::connect(&config).unwrap();
    fake.state().mood.ignore = Some(Opcode::Heartbeat);
    match next(&mut pool) {
        PoolEvent::Lost { operation: Operation::Heartbeat, reason: LostReason::Deadline(_), .. } => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_page_damaged_on_the_way_is_asked_for_again_and_one_damaged_for_good_is_named() {
    let fake = Fake::start(16 * MIB);
    let mut pool = pool(&[&fake]);
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 8), 1);
    fake.state().mood.damage.insert(3, 1);
    assert_eq!(fetch(&mut pool, region, &[extent(0, 8)]), expected(&[extent(0, 8)], 1));
    assert_eq!(pool.stats().servers[0].damaged, 1);
    fake.state().mood.damage.insert(5, u32::MAX);
    let mut memory = Vec::new();
    submit_fetch(&mut pool, region, 6, &[extent(0, 8)], &mut memory, true);
    match next(&mut pool) {
        PoolEvent::Corrupt { token: 6, page, name, .. } => {
            assert_eq!((page, name), (PageIndex(5), fake.endpoint.to_string()))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(fetch(&mut pool, region, &[extent(0, 5)]), expected(&[extent(0, 5)], 1));
}

fn read_piece(pool: &mut Pool, region: PoolRegion, token: u64, offset: u64, bytes: &mut [u8]) -> bool {
    // SAFETY: the tests keep the bytes until the event, or drop the pool first.
    unsafe { pool.read_piece(region, token, offset, PieceMut { ptr: bytes.as_mut_ptr(), len: bytes.len() }) }
}

#[test]
fn a_part_of_a_page_is_asked_for_without_a_layout_where_the_server_takes_that_and_the_part_is_of_one_page() {
    let fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut pool = pool(&[&fakes[0], &fakes[1]]);
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 8), 1);
    for (page, within, len) in [(2, 100, 8), (5, 0, 4096), (5, 4095, 1), (9, 8, 8)] {
        let mut bytes = vec![0xaa; len];
        assert!(read_piece(&mut pool, region, 3, page * 4096 + within as u64, &mut bytes));
        assert!(matches!(next(&mut pool), PoolEvent::Fetched { token: 3 }));
        let page = if page < 8 { content(page, 1) } else { vec![0; OS_PAGE_BYTES] };
        assert_eq!(bytes, page[within..within + len]);
    }
    for (offset, len) in [(4090, 7), (0, 4097), (0, 0)] {
        assert!(!read_piece(&mut pool, region, 4, offset, &mut vec![0; len]));
    }
    pool.shell.servers.iter_mut().for_each(|server| server.takes_pieces = false);
    assert!(!read_piece(&mut pool, region, 4, 0, &mut [0; 8]));
    assert!(pool.next_event(Instant::now()).unwrap().is_none(), "what was not done has no end");
}

#[test]
fn a_part_of_a_page_damaged_on_the_way_is_asked_for_again_and_an_odd_answer_ends_its_server() {
    for odd in ["short", "checksum"] {
        let fake = Fake::start(16 * MIB);
        let mut pool = pool(&[&fake]);
        let region = pool.create_region().unwrap();
        store(&mut pool, region, extent(0, 8), 1);
        let mut bytes = [0; 8];
        fake.state().mood.damage.insert(3, 1);
        assert!(read_piece(&mut pool, region, 5, 3 * 4096 + 40, &mut bytes));
        assert!(matches!(next(&mut pool), PoolEvent::Fetched { token: 5 }));
        assert_eq!((&bytes[..], pool.stats().servers[0].damaged), (&content(3, 1)[40..48], 1));
        fake.state().mood.damage.insert(3, u32::MAX);
        assert!(read_piece(&mut pool, region, 6, 3 * 4096 + 40, &mut bytes));
        assert!(matches!(next(&mut pool), PoolEvent::Corrupt { token: 6, page: PageIndex(3), .. }));
        (fake.state().mood.short_piece, fake.state().mood.odd_checksum) = (odd == "short", odd == "checksum");
        assert!(read_piece(&mut pool, region, 7, 8, &mut bytes));
        assert!(matches!(next(&mut pool), PoolEvent::Lost { reason: LostReason::Wire(_), .. }), "{odd}");
        assert!(matches!(next(&mut pool), PoolEvent::Failed { token: 7, .. }), "{odd}");
    }
}

#[test]
fn a_full_server_says_so_and_goes_on() {
    let fake = Fake::start(16 * MIB);
    let mut pool = pool(&[&fake]);
    let region = pool.create_region().unwrap();
    fake.state().mood.room = Some(10 * OS_PAGE_BYTES as u64);
    store(&mut pool, region, extent(0, 8), 1);
    let memory = expected(&[extent(8, 4)], 1);
    submit_store(&mut pool, region, 9, extent(8, 4), &memory);
    match next(&mut pool) {
        PoolEvent::Full { token: 9, free, name, .. } => {
            assert_eq!((free.0, name), (2 * OS_PAGE_BYTES as u64, fake.endpoint.to_string()))
        }
        other => panic!("{other:?}"),
    }
    fake.state().mood.room = None;
    store(&mut pool, region, extent(8, 4), 1);
    assert_eq!(fetch(&mut pool, region, &[extent(0, 12)]), expected(&[extent(0, 12)], 1));
}

#[test]
fn answers_in_any_order_reach_their_own_request_and_credits_are_kept() {
    let fake = Fake::start(64 * MIB);
    let mut pool = pool(&[&fake]);
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 600), 1);
    fake.state().mood.hold = true;
    let mut memory: Vec<Vec<u8>> = vec![Vec::new(); 40];
    for (n, memory) in memory.iter_mut().enumerate() {
        submit_fetch(&mut pool, region, 100 + n as u64, &[extent(15 * n as u64, 15)], memory, n % 2 == 0);
    }
    // All that credits allow arrives and is held; then answers come, the last first, and make
    // room for the rest.
    while fake.state().most.0 < MAX_REQUESTS {
        assert!(pool.poll().is_none());
    }
    fake.state().mood.hold = false;
    let mut done = std::collections::BTreeSet::new();
    while done.len() < 40 {
        match next(&mut pool) {
            PoolEvent::Fetched { token } => assert!(done.insert(token)),
            other => panic!("{other:?}"),
        }
    }
    for (n, memory) in memory.iter().enumerate() {
        assert_eq!(*memory, expected(&[extent(15 * n as u64, 15)], 1), "fetch {n}");
    }
    let most = fake.state().most;
    assert!(most.0 <= MAX_REQUESTS && most.1 <= u64::from(MAX_BYTES), "{most:?}");
}

#[test]
fn a_demand_fetch_overtakes_queued_prefetches_and_stores() {
    let fake = Fake::start(64 * MIB);
    let mut pool = pool(&[&fake]);
    let region = pool.create_region().unwrap();
    fake.state().mood.hold = true;
    let memory = vec![1; 64 * OS_PAGE_BYTES];
    let mut prefetched = vec![Vec::new(); 20];
    let mut demanded = Vec::new();
    for token in 0..20 {
        submit_store(&mut pool, region, token, extent(1000 + 64 * token, 64), &memory);
    }
    for (n, memory) in prefetched.iter_mut().enumerate() {
        submit_fetch(&mut pool, region, 100 + n as u64, &[extent(100 + n as u64, 1)], memory, false);
    }
    // The lower classes leave credits to spare, so this leaves at once, before what was queued earlier.
    assert!(pool.poll().is_none());
    submit_fetch(&mut pool, region, 200, &[extent(5, 1)], &mut demanded, true);
    while !fake.state().order.contains(&(Opcode::Get, 5)) {
        assert!(pool.poll().is_none());
    }
    let queued = pool.stats().servers[0].queued;
    assert!(queued > 0, "nothing was left to overtake");
    fake.state().mood.hold = false;
    let mut ended = 0;
    while ended < 41 {
        assert!(matches!(next(&mut pool), PoolEvent::Stored { .. } | PoolEvent::Fetched { .. }));
        ended += 1;
    }
    let order = fake.state().order.clone();
    let at = |what| order.iter().position(|o| *o == what).unwrap();
    assert!(at((Opcode::Get, 5)) < at((Opcode::Put, 1000 + 64 * 19)));
}

#[test]
fn servers_that_break_the_protocol_are_lost() {
    for (mood, opcode) in [("echo", Opcode::Get), ("hasty", Opcode::Put)] {
        let fake = Fake::start(64 * MIB);
        let mut pool = pool(&[&fake]);
        let region = pool.create_region().unwrap();
        let memory = vec![1; 64 * OS_PAGE_BYTES];
        let mut fetched = Vec::new();
        if mood == "echo" {
            fake.state().mood.echo = true;
            submit_fetch(&mut pool, region, 1, &[extent(0, 1)], &mut fetched, true);
            assert!(matches!(next(&mut pool), PoolEvent::Fetched { token: 1 }));
        } else {
            fake.state().mood.hasty = true;
            for token in 0..16 {
                submit_store(&mut pool, region, token, extent(64 * token, 64), &memory);
            }
        }
        // A hasty answer is an offence only while the store's pages have not left; loopback
        // may be quicker than that.
        loop {
            match next(&mut pool) {
                PoolEvent::Lost { reason: LostReason::Protocol(_), .. } => break,
                PoolEvent::Failed { .. } => {}
                PoolEvent::Stored { token: 15 } if opcode == Opcode::Put => break,
                PoolEvent::Stored { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_second_member_reads_a_clone_and_takes_it_over() {
    let fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut parent = pool(&[&fakes[0], &fakes[1]]);
    let region = parent.create_region().unwrap();
    store(&mut parent, region, extent(0, 40), 1);
    let copy = parent.clone_region(region).unwrap();
    store(&mut parent, region, extent(0, 10), 2);
    let tickets = (parent.lease_ticket().to_string(), parent.region_ticket(copy).unwrap().to_string());

    let mut child = Pool::connect(&PoolConfig::attach(tickets.0.parse().unwrap(), "child")).unwrap();
    let mine = child.adopt_region(&tickets.1.parse().unwrap()).unwrap();
    assert_eq!(fetch(&mut child, mine, &[extent(0, 40)]), expected(&[extent(0, 40)], 1));
    store(&mut child, mine, extent(30, 10), 3);
    assert_eq!(
        fetch(&mut parent, region, &[extent(0, 10), extent(30, 10)]),
        [expected(&[extent(0, 10)], 2), expected(&[extent(30, 10)], 1)].concat()
    );
    child.close();
    assert_eq!(fakes.iter().map(|f| f.state().departed).collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn a_lease_is_resized_on_all_servers_or_on_none() {
    let fakes = [Fake::start(8 * MIB), Fake::start(16 * MIB)];
    let mut pool = Pool::connect(&config(&[&fakes[0], &fakes[1]], 8 * MIB)).unwrap();
    pool.resize_lease(ByteLen(12 * MIB)).unwrap();
    assert_eq!(fakes.iter().map(|f| f.state().lent).collect::<Vec<_>>(), [6 * MIB, 6 * MIB]);
    match pool.resize_lease(ByteLen(20 * MIB)).unwrap_err() {
        PoolError::Refused { server, wanted, free } => {
            assert_eq!((server, wanted.0, free.0), (fakes[0].endpoint.to_string(), 20 * MIB, 2 * MIB));
        }
        other => panic!("{other}"),
    }
    assert_eq!(fakes.iter().map(|f| f.state().lent).collect::<Vec<_>>(), [6 * MIB, 6 * MIB]);
    assert_eq!(pool.lease_bytes(), ByteLen(12 * MIB));
}

#[test]
fn freed_regions_are_gone_and_denied_requests_name_the_reason() {
    let fake = Fake::start(16 * MIB);
    let mut pool = pool(&[&fake]);
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 4), 1);
    pool.free_region(region);
    assert!(matches!(pool.clone_region(region), Err(PoolError::NoSuchRegion)));
    let other = pool.create_region().unwrap();
    store(&mut pool, other, extent(0, 1), 1);
    assert_eq!(fake.state().regions.len(), 1);
    fake.state().regions.clear();
    let mut memory = Vec::new();
    submit_fetch(&mut pool, other, 3, &[extent(0, 1)], &mut memory, true);
    match next(&mut pool) {
        PoolEvent::Failed { token: 3, error: PoolError::Denied { message, .. } } => {
            assert_eq!(message, "no such region")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn operations_without_pages_end_like_others() {
    let fake = Fake::start(16 * MIB);
    let mut pool = pool(&[&fake]);
    let region = pool.create_region().unwrap();
    assert!(fetch(&mut pool, region, &[]).is_empty());
    // SAFETY: no pages, no memory.
    unsafe { pool.store(region, 8, &[]) };
    assert!(matches!(next(&mut pool), PoolEvent::Stored { token: 8 }));
    pool.discard(region, extent(5, 0));
}

// --- Two copies --------------------------------------------------------------------------------------------

fn two_copies(fakes: &[&Fake]) -> PoolConfig {
    let mut config = config(fakes, 8 * MIB);
    config.copies = Copies::Two;
    config
}

/// Polls until the pool has said that a server is lost and its pages are not.
fn degraded(pool: &mut Pool) -> String {
    loop {
        match next(pool) {
            PoolEvent::Degraded { name, .. } => return name,
            PoolEvent::Lost { name, .. } => panic!("{name} is lost with its pages"),
            _ => {}
        }
    }
}

#[test]
fn pages_with_two_copies_outlive_any_one_server() {
    for victim in 0..3 {
        let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB), Fake::start(16 * MIB)];
        let mut pool = Pool::connect(&two_copies(&[&fakes[0], &fakes[1], &fakes[2]])).unwrap();
        assert_eq!((pool.copies(), pool.lease_bytes()), (2, ByteLen(16 * MIB)));
        let region = pool.create_region().unwrap();
        store(&mut pool, region, extent(0, 96), 1);
        for page in 0..96 {
            let holds = |fake: &Fake| fake.state().regions.values().any(|pages| pages.contains_key(&page));
            let holders: Vec<usize> = (0..3).filter(|n| holds(&fakes[*n])).collect();
            let mut expected: Vec<usize> =
                pool.holders(PageIndex(page)).iter().map(ServerIndex::as_usize).collect();
            expected.sort_unstable();
            assert_eq!(holders, expected, "page {page} lies on its two holders");
        }
        let name = fakes[victim].endpoint.to_string();
        fakes[victim].kill();
        assert_eq!(degraded(&mut pool), name);
        assert_eq!(fetch(&mut pool, region, &[extent(0, 96)]), expected(&[extent(0, 96)], 1));
        store(&mut pool, region, extent(10, 50), 2);
        pool.discard(region, extent(0, 4));
        assert_eq!(fetch(&mut pool, region, &[extent(10, 50)]), expected(&[extent(10, 50)], 2));
        assert_eq!(fetch(&mut pool, region, &[extent(0, 4)]), vec![0; 4 * OS_PAGE_BYTES]);
        let stats = pool.stats();
        assert!((stats.copies_left - 4.0 / 3.0).abs() < 1e-9, "{}", stats.copies_left);
        // A second loss takes the pages that the two had together.
        fakes[(victim + 1) % 3].kill();
        assert!(matches!(next(&mut pool), PoolEvent::Lost { .. }));
        let mut memory = Vec::new();
        submit_fetch(&mut pool, region, 9, &[extent(0, 96)], &mut memory, true);
        assert!(matches!(next(&mut pool), PoolEvent::Failed { token: 9, error: PoolError::Lost { .. } }));
    }
}

#[test]
fn what_is_under_way_with_a_lost_server_ends_well() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut pool = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 64), 1);
    for (token, ignored) in [(3, Opcode::Get), (4, Opcode::Put)] {
        fakes[0].state().mood.ignore = Some(ignored);
        let memory: Vec<u8> = extent(64, 64).pages().flat_map(|p| content(p.0, 2)).collect();
        let mut fetched = Vec::new();
        if ignored == Opcode::Get {
            // The other server answers while this one is silent.
            submit_fetch(&mut pool, region, token, &[extent(0, 64)], &mut fetched, true);
            assert!(matches!(next(&mut pool), PoolEvent::Fetched { token: 3 }));
            assert_eq!(fetched, expected(&[extent(0, 64)], 1));
            assert!(pool.stats().servers[0].moved > 0);
        } else {
            submit_store(&mut pool, region, token, extent(64, 64), &memory);
            // Not before the silent one is done without.
            wait_for(&mut pool, |event| matches!(event, PoolEvent::Absent { server: ServerIndex(0), .. }));
            assert!(matches!(next(&mut pool), PoolEvent::Stored { token: 4 }));
            assert_eq!(fetch_whatever(&mut pool, region, extent(64, 64)), memory);
        }
        fakes[0].state().mood.ignore = None;
        assert!(pool.stats().servers[0].alive);
    }
    // It gets what it has missed, and is read again when the other one is gone.
    wait_for(&mut pool, |event| matches!(event, PoolEvent::CaughtUp { server: ServerIndex(0), .. }));
    assert!((pool.stats().copies_left - 2.0).abs() < 1e-9);
    fakes[1].kill();
    assert_eq!(degraded(&mut pool), fakes[1].endpoint.to_string());
    let all = [expected(&[extent(0, 64)], 1), expected(&[extent(64, 64)], 2)].concat();
    assert_eq!(fetch(&mut pool, region, &[extent(0, 128)]), all);
}

fn wait_for(pool: &mut Pool, mut wanted: impl FnMut(&PoolEvent) -> bool) {
    while !wanted(&next(pool)) {}
}

/// Fetches, whatever is said about servers meanwhile.
fn fetch_whatever(pool: &mut Pool, region: PoolRegion, extent: Extent) -> Vec<u8> {
    let mut memory = Vec::new();
    submit_fetch(pool, region, 11, &[extent], &mut memory, true);
    wait_for(pool, |event| matches!(event, PoolEvent::Fetched { token: 11 }));
    memory
}

#[test]
fn a_full_server_costs_a_copy_and_no_store() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut pool = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 64), 1);
    fakes[0].state().mood.room = Some(0);
    store(&mut pool, region, extent(0, 64), 2);
    let stats = pool.stats();
    assert_eq!((stats.servers[0].state, stats.servers[0].missed_pages), (ServerState::CatchingUp, 64));
    assert!((stats.copies_left - 1.0).abs() < 1e-9, "{}", stats.copies_left);
    assert_eq!(fetch(&mut pool, region, &[extent(0, 64)]), expected(&[extent(0, 64)], 2));
    fakes[0].state().mood.room = None;
    wait_for(&mut pool, |event| matches!(event, PoolEvent::CaughtUp { server: ServerIndex(0), .. }));
    fakes[1].kill();
    assert_eq!(degraded(&mut pool), fakes[1].endpoint.to_string());
    assert_eq!(fetch(&mut pool, region, &[extent(0, 64)]), expected(&[extent(0, 64)], 2));
}

#[test]
fn what_is_stored_again_is_missed_no_longer() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut pool = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let region = pool.create_region().unwrap();
    fakes[0].state().mood.room = Some(0);
    store(&mut pool, region, extent(0, 64), 1);
    assert_eq!(pool.stats().servers[0].missed_pages, 64);
    fakes[0].state().mood.room = None;
    let memory = expected(&[extent(0, 60)], 2);
    submit_store(&mut pool, region, 1, extent(0, 60), &memory);
    // The rest may be there before the store is answered.
    let (mut stored, mut caught_up) = (false, false);
    while !(stored && caught_up) {
        match next(&mut pool) {
            PoolEvent::Stored { token: 1 } => {
                let missed = pool.stats().servers[0].missed_pages;
                assert!(missed <= 4, "{missed} pages are missed still");
                stored = true;
            }
            PoolEvent::CaughtUp { server: ServerIndex(0), .. } => caught_up = true,
            other => panic!("{other:?}"),
        }
    }
    fakes[1].kill();
    assert_eq!(degraded(&mut pool), fakes[1].endpoint.to_string());
    let all = [expected(&[extent(0, 60)], 2), expected(&[extent(60, 4)], 1)].concat();
    assert_eq!(fetch(&mut pool, region, &[extent(0, 64)]), all);
}

/// A child of a process that has the same servers.
#[test]
fn what_is_handed_over_after_a_lease_has_grown_has_its_copy_at_the_new_server() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut parent = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let region = parent.create_region().unwrap();
    store(&mut parent, region, extent(0, 96), 1);
    assert!(parent.grow(&ServerSpec { endpoint: fakes[2].endpoint.clone(), memory: None }));
    wait_for(&mut parent, |event| matches!(event, PoolEvent::CaughtUp { server: ServerIndex(2), .. }));
    let copy = parent.clone_region(region).unwrap();
    let ticket = parent.region_ticket(copy).unwrap();
    let mut child = Pool::connect(&PoolConfig::attach(parent.lease_ticket(), "child")).unwrap();
    let mine = child.adopt_region(&ticket).unwrap();
    assert!(!child.is_behind() && child.is_whole());
    fakes[0].kill();
    assert_eq!(child.gone(mine, &[extent(0, 96)]), []);
    assert_eq!(fetch_whatever(&mut child, mine, extent(0, 96)), expected(&[extent(0, 96)], 1));
}

#[test]
fn a_loss_costs_what_the_other_server_had_missed_and_no_more() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut pool = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 64), 1);
    fakes[0].state().mood.room = Some(0);
    store(&mut pool, region, extent(8, 3), 2);
    assert_eq!(pool.gone(region, &[extent(0, 64)]), []);
    fakes[1].kill();
    assert_eq!(degraded(&mut pool), fakes[1].endpoint.to_string());
    assert_eq!(pool.gone(region, &[extent(0, 64)]), [extent(8, 3)]);
    for there in [extent(0, 8), extent(11, 53)] {
        assert_eq!(fetch(&mut pool, region, &[there]), expected(&[there], 1));
    }
    let mut memory = Vec::new();
    submit_fetch(&mut pool, region, 9, &[extent(0, 64)], &mut memory, false);
    assert!(matches!(next(&mut pool), PoolEvent::Failed { token: 9, error: PoolError::Lost { .. } }));
    // A copy of the region lacks them as well, and is there.
    let copy = pool.clone_region(region).unwrap();
    assert_eq!(pool.gone(copy, &[extent(0, 64)]), [extent(8, 3)]);
    // What is stored now is there.
    fakes[0].state().mood.room = None;
    store(&mut pool, region, extent(8, 3), 3);
    assert_eq!(pool.gone(region, &[extent(0, 64)]), []);
    assert_eq!(fetch(&mut pool, region, &[extent(8, 3)]), expected(&[extent(8, 3)], 3));
}

#[test]
fn who_opens_a_region_reads_where_its_pages_are() {
    let fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut pool = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 8), 1);
    // The first holder has old bytes of these.
    let home = pool.holder(PageIndex(2));
    fakes[home.as_usize()].state().mood.room = Some(0);
    store(&mut pool, region, extent(2, 3), 2);
    let ticket: RegionTicket = pool.region_ticket(region).unwrap().to_string().parse().unwrap();
    let mut other = Pool::connect(&PoolConfig::attach(pool.lease_ticket(), "other")).unwrap();
    let (opened, _) = other.open_region(RegionSelector::Ticket(&ticket), 8 * 4096).unwrap();
    for (page, version) in [(1, 1), (2, 2), (4, 2), (5, 1)] {
        let mut bytes = vec![0; 4096];
        assert!(read_piece(&mut other, opened, 3, page * 4096, &mut bytes));
        assert!(matches!(next(&mut other), PoolEvent::Fetched { token: 3 }));
        assert!(bytes == content(page, version), "page {page} is not of version {version}");
    }
}

#[test]
fn a_child_joins_a_server_late_that_its_parent_did_without() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut parent = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let region = parent.create_region().unwrap();
    store(&mut parent, region, extent(0, 96), 1);
    let copy = parent.clone_region(region).unwrap();
    let ticket = parent.region_ticket(copy).unwrap().to_string();
    let mut fields: Vec<&str> = ticket.split(';').collect();
    fields[2] = "0";
    let ticket = fields.join(";").parse().unwrap();
    let mut attach = PoolConfig::attach(parent.lease_ticket(), "child");
    attach.to_adopt(&ticket);
    let mut child = Pool::connect(&attach).unwrap();
    let mine = child.adopt_region(&ticket).unwrap();
    assert_eq!(fetch_whatever(&mut child, mine, extent(0, 96)), expected(&[extent(0, 96)], 1));
    if child.stats().servers[1].state != ServerState::Well {
        wait_for(&mut child, |event| matches!(event, PoolEvent::CaughtUp { server: ServerIndex(1), .. }));
    }
    fakes[0].kill();
    assert_eq!(degraded(&mut child), fakes[0].endpoint.to_string());
    assert_eq!(fetch(&mut child, mine, &[extent(0, 96)]), expected(&[extent(0, 96)], 1));
}

#[test]
fn a_child_does_without_the_servers_that_its_parent_lost() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut parent = Pool::connect(&two_copies(&[&fakes[0], &fakes[1], &fakes[2]])).unwrap();
    let region = parent.create_region().unwrap();
    store(&mut parent, region, extent(0, 96), 1);
    fakes[1].kill();
    store_through_loss(&mut parent, region);
    let copy = parent.clone_region(region).unwrap();
    let tickets = (parent.lease_ticket().to_string(), parent.region_ticket(copy).unwrap());
    assert_eq!(tickets.1.to_string().split(';').nth(2).unwrap().split('.').next(), Some("0"));
    let mut attach = PoolConfig::attach(tickets.0.parse().unwrap(), "child");
    attach.to_adopt(&tickets.1);
    let mut child = Pool::connect(&attach).unwrap();
    let mine = child.adopt_region(&tickets.1).unwrap();
    assert_eq!(degraded(&mut child), fakes[1].endpoint.to_string());
    assert_eq!(fetch(&mut child, mine, &[extent(0, 96)]), expected(&[extent(0, 96)], 2));
    assert_eq!(child.lease_bytes(), parent.lease_bytes());
    // A program of its own finds a server that has ended as it is.
    let mut other = Pool::connect(&PoolConfig::attach(tickets.0.parse().unwrap(), "other")).unwrap();
    let own = other.create_region().unwrap();
    store_through_loss(&mut other, own);
    assert_eq!(fetch(&mut other, own, &[extent(0, 96)]), expected(&[extent(0, 96)], 2));
    // With another one gone, some pages have no holder.
    fakes[2].kill();
    let refused = Pool::connect(&PoolConfig::attach(tickets.0.parse().unwrap(), "too late"));
    assert!(matches!(refused, Err(ConnectError::Server { .. })), "{:?}", refused.err());
}

/// Stores the first 96 pages in version 2, whatever is said about servers meanwhile.
fn store_through_loss(pool: &mut Pool, region: PoolRegion) {
    let memory: Vec<u8> = extent(0, 96).pages().flat_map(|p| content(p.0, 2)).collect();
    submit_store(pool, region, 7, extent(0, 96), &memory);
    loop {
        match next(pool) {
            PoolEvent::Stored { token: 7 } => return,
            PoolEvent::Degraded { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn two_copies_are_kept_where_they_fit() {
    let fakes = [Fake::start(10 * MIB), Fake::start(6 * MIB)];
    let mut wish = config(&[&fakes[0], &fakes[1]], 6 * MIB);
    wish.copies = Copies::TwoIfTheyFit;
    let pool = Pool::connect(&wish).unwrap();
    assert_eq!((pool.copies(), pool.lease_bytes()), (2, ByteLen(12 * MIB)));
    drop(pool);
    let fakes = [Fake::start(10 * MIB), Fake::start(6 * MIB)];
    let mut wish = config(&[&fakes[0], &fakes[1]], 8 * MIB);
    wish.copies = Copies::TwoIfTheyFit;
    let pool = Pool::connect(&wish).unwrap();
    assert_eq!((pool.copies(), pool.lease_bytes()), (1, ByteLen(8 * MIB)));
    wish.copies = Copies::Two;
    assert!(matches!(Pool::connect(&wish), Err(ConnectError::TooLittle { .. })));
}

#[test]
fn a_member_is_dismissed_where_it_was_one() {
    let fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut parent = Pool::connect(&two_copies(&[&fakes[0], &fakes[1], &fakes[2]])).unwrap();
    let mut attach = PoolConfig::attach(parent.lease_ticket(), "child");
    attach.without = [false, true, false].map(|at_first| config::Without { at_first, out: false }).to_vec();
    let child = Pool::connect(&attach).unwrap();
    let membership = child.membership();
    // It may have joined the server that it was to do without, which is there after all.
    let joined: Vec<_> = membership.members.iter().map(|member| u64::from(member.0.0 != 0)).collect();
    assert_eq!((joined[0], joined[2]), (1, 1));
    parent.dismiss(&membership);
    parent.create_region().unwrap();
    assert_eq!(fakes.iter().map(|f| f.state().departed).collect::<Vec<_>>(), joined);
    assert!(parent.stats().servers.iter().all(|server| server.alive));
}

#[test]
fn each_server_is_restarted_in_turn_and_nothing_is_lost() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut owner = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let mut member = Pool::connect(&PoolConfig::attach(owner.lease_ticket(), "member")).unwrap();
    let (mine, freed) = (owner.create_region().unwrap(), owner.create_region().unwrap());
    let theirs = member.create_region().unwrap();
    store(&mut owner, mine, extent(0, 64), 1);
    store(&mut member, theirs, extent(0, 64), 2);
    for round in 0..4 {
        let (victim, version) = (round % 2, u8::try_from(round).unwrap() + 3);
        let before = owner.lease_ticket();
        fakes[victim].restart();
        assert_eq!(degraded(&mut owner), fakes[victim].endpoint.to_string());
        assert_eq!(degraded(&mut member), fakes[victim].endpoint.to_string());
        store(&mut member, theirs, extent(32, 64), version);
        let server = ServerIndex(u16::try_from(victim).unwrap());
        // The old lease is of no use, and it is not said again that the server is lost.
        assert!(member.join_anew(server, &before));
        let until = Instant::now() + WATCHDOG;
        while member.lost_servers().next().is_none() {
            assert!(Instant::now() < until);
            assert!(member.next_event(Instant::now() + Duration::from_millis(20)).unwrap().is_none());
        }
        assert_eq!(member.stats().servers[victim].state, ServerState::Lost);
        assert!(owner.lease_anew(server) && !owner.lease_anew(server));
        let is_back =
            |event: &PoolEvent| matches!(event, PoolEvent::CaughtUp { server: at, .. } if *at == server);
        wait_for(&mut owner, is_back);
        assert_ne!(owner.lease_ticket(), before, "others hear of the new lease by its ticket");
        assert!(member.join_anew(server, &owner.lease_ticket()));
        wait_for(&mut member, is_back);
        for pool in [&owner, &member] {
            assert!((pool.stats().copies_left - 2.0).abs() < 1e-9);
            assert_eq!(pool.lease_bytes(), ByteLen(16 * MIB));
        }
    }
    owner.free_region(freed);
    assert_eq!(fetch(&mut owner, mine, &[extent(0, 64)]), expected(&[extent(0, 64)], 1));
    let all = [expected(&[extent(0, 32)], 2), expected(&[extent(32, 64)], 6)].concat();
    assert_eq!(fetch(&mut member, theirs, &[extent(0, 96)]), all);
}

#[test]
fn a_server_without_room_for_its_share_says_how_much_is_free() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut owner = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let (server, wanted) = (ServerIndex(0), owner.leased[0]);
    owner.create_region().unwrap();
    fakes[0].restart();
    fakes[0].state().lendable = wanted - MIB;
    degraded(&mut owner);
    for round in 0..2 {
        assert!(owner.lease_anew(server));
        let until = Instant::now() + WATCHDOG;
        while owner.lost_servers().next().is_none() {
            assert!(Instant::now() < until);
            assert!(owner.next_event(Instant::now() + Duration::from_millis(20)).unwrap().is_none());
        }
        let name = fakes[0].endpoint.to_string();
        let without_room = owner.servers_without_room().collect::<Vec<_>>();
        assert_eq!(without_room, [(&*name, ByteLen(wanted), ByteLen(wanted - MIB))], "round {round}");
    }
    fakes[0].state().lendable = wanted;
    assert!(owner.lease_anew(server));
    wait_for(&mut owner, |event| matches!(event, PoolEvent::CaughtUp { .. }));
    assert_eq!(owner.servers_without_room().count(), 0);
}

#[test]
fn names_of_another_lease_are_neither_taken_over_nor_freed() {
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB)];
    let mut owner = Pool::connect(&two_copies(&[&fakes[0], &fakes[1]])).unwrap();
    let mut parent = Pool::connect(&PoolConfig::attach(owner.lease_ticket(), "parent")).unwrap();
    let for_child = parent.create_region().unwrap();
    store(&mut parent, for_child, extent(0, 64), 1);
    // The parent does not know yet.
    let handed = parent.hand_over(for_child).unwrap();
    let membership = parent.membership();
    fakes[0].restart();
    degraded(&mut owner);
    assert!(owner.lease_anew(ServerIndex(0)));
    wait_for(&mut owner, |event| matches!(event, PoolEvent::Returned { .. }));
    let own = owner.create_region().unwrap();
    store(&mut owner, own, extent(0, 64), 2);
    let mut child = Pool::connect(&PoolConfig::attach(owner.lease_ticket(), "child")).unwrap();
    let taken = child.adopt_region(&handed).unwrap();
    assert_eq!(fetch_whatever(&mut child, taken, extent(0, 64)), expected(&[extent(0, 64)], 1));
    wait_for(&mut child, |event| matches!(event, PoolEvent::CaughtUp { .. }));
    degraded(&mut parent);
    assert!(parent.join_anew(ServerIndex(0), &owner.lease_ticket()));
    wait_for(&mut parent, |event| matches!(event, PoolEvent::Returned { .. }));
    parent.free_what_was_not_taken(&handed);
    let departed = fakes[0].state().departed;
    owner.dismiss(&membership);
    parent.create_region().unwrap();
    assert_eq!(
        fakes[0].state().departed,
        departed,
        "who it was in the old run, another one is in the new one"
    );
    fakes[1].kill();
    degraded(&mut child);
    assert_eq!(fetch_whatever(&mut child, taken, extent(0, 64)), expected(&[extent(0, 64)], 1));
    degraded(&mut owner);
    assert_eq!(fetch(&mut owner, own, &[extent(0, 64)]), expected(&[extent(0, 64)], 2));
}

#[test]
fn a_pool_begins_without_one_of_its_servers_and_uses_it_when_it_is_there() {
    for down in 0..3 {
        let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB), Fake::start(16 * MIB)];
        fakes[down].kill();
        let wish = two_copies(&[&fakes[0], &fakes[1], &fakes[2]]);
        let server = ServerIndex(u16::try_from(down).unwrap());
        let mut owner = Pool::connect(&wish).unwrap();
        assert_eq!(owner.lost_servers().collect::<Vec<_>>(), [server]);
        assert!(matches!(owner.why_lost(server), Some(LostReason::Io(_))));
        let mut member = Pool::connect(&PoolConfig::attach(owner.lease_ticket(), "member")).unwrap();
        let regions = [owner.create_region().unwrap(), member.create_region().unwrap()];
        store(&mut owner, regions[0], extent(0, 96), 1);
        store(&mut member, regions[1], extent(0, 96), 2);
        assert!(!member.join_anew(server, &owner.lease_ticket()), "there is no lease yet");
        fakes[down].restart();
        assert!(owner.lease_anew(server));
        let is_whole =
            |event: &PoolEvent| matches!(event, PoolEvent::CaughtUp { server: at, .. } if *at == server);
        wait_for(&mut owner, is_whole);
        assert!(member.join_anew(server, &owner.lease_ticket()));
        wait_for(&mut member, is_whole);
        assert_eq!((owner.copies(), owner.lease_bytes()), (2, ByteLen(16 * MIB)));
        fakes[(down + 1) % 3].kill();
        for (pool, region, version) in [(&mut owner, regions[0], 1), (&mut member, regions[1], 2)] {
            degraded(pool);
            assert_eq!(fetch(pool, region, &[extent(0, 96)]), expected(&[extent(0, 96)], version));
        }
    }
    // Two of three may have had some pages together; with one copy none can be missed.
    let mut fakes = [Fake::start(16 * MIB), Fake::start(16 * MIB), Fake::start(16 * MIB)];
    fakes[0].kill();
    let mut wish = two_copies(&[&fakes[0], &fakes[1], &fakes[2]]);
    wish.copies = Copies::One;
    assert!(Pool::connect(&wish).is_err());
    fakes[1].kill();
    wish.copies = Copies::Two;
    assert!(Pool::connect(&wish).is_err());
}
