//! Servers on this machine whose memory is read without asking.

use super::*;
use rampool::direct::{Direct, DirectRegion};
use rampool_net::transport::{Endpoint, SameHost};
use std::path::Path;

fn open_at(dir: &Path, store: StoreKind) -> RunningServer {
    let listen = vec![Endpoint::Unix(dir.join("s"))];
    Server::start(ServerConfig {
        listen,
        store,
        open_frames: OpenFrames::ForItsUser,
        ..server_config(64 * MIB)
    })
    .unwrap()
}

/// Pages that were read in place, and pages that were asked for.
fn read(pool: &Pool) -> (u64, u64) {
    let stats = pool.stats();
    let sum = |of: fn(&rampool::pool::ServerStats) -> u64| stats.servers.iter().map(of).sum();
    (sum(|server| server.in_place_pages), sum(|server| server.fetched_pages))
}

#[test]
fn what_was_stored_last_is_read_in_place() {
    for store in [StoreKind::Raw, StoreKind::Compressed] {
        let dir = tempfile::tempdir().unwrap();
        let server = open_at(dir.path(), store);
        let mut pool = Pool::connect(&config(&[&server], 48 * MIB)).unwrap();
        exercise(&mut pool, 11, 1500);
        let (in_place, _) = read(&pool);
        assert!(in_place > 1000, "{in_place} pages were read in place");
        pool.close();
        all_gone(&[&server]);
    }
}

#[test]
fn a_pool_of_several_servers_reads_in_place_what_lies_on_this_machine() {
    let dir = tempfile::tempdir().unwrap();
    let (near, far) = (open_at(dir.path(), StoreKind::Compressed), serve(64 * MIB));
    let mut pool = Pool::connect(&config(&[&near, &far], 48 * MIB)).unwrap();
    exercise(&mut pool, 12, 600);
    let stats = pool.stats();
    assert!(stats.servers[0].in_place_pages > 0 && stats.servers[1].in_place_pages == 0);
}

#[test]
fn a_server_that_keeps_its_memory_to_itself_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_at(dir.path(), StoreKind::Raw);
    let closed = Server::start(ServerConfig {
        listen: vec![Endpoint::Unix(dir.path().join("closed"))],
        ..server_config(64 * MIB)
    })
    .unwrap();
    for (server, same_host) in [(&open, SameHost::Socket), (&closed, SameHost::Auto)] {
        let mut config = config(&[server], 16 * MIB);
        config.same_host = Some(same_host);
        let mut pool = Pool::connect(&config).unwrap();
        exercise_pages(&mut pool, 13, 100, 300);
        assert_eq!(read(&pool).0, 0);
    }
}

#[test]
fn a_member_that_takes_a_region_over_learns_where_its_pages_lie() {
    let dir = tempfile::tempdir().unwrap();
    let server = open_at(dir.path(), StoreKind::Compressed);
    let mut parent = Pool::connect(&config(&[&server], 32 * MIB)).unwrap();
    let region = parent.create_region().unwrap();
    let all = [extent(0, 64)];
    store(&mut parent, region, all[0], 1);
    let copy = parent.clone_region(region).unwrap();
    let ticket = parent.region_ticket(copy).unwrap();
    let mut child = Pool::connect(&PoolConfig::attach(parent.lease_ticket(), "child")).unwrap();
    let adopted = child.adopt_region(&ticket).unwrap();
    // The first time it has to ask; then parent and child go on independently.
    for round in 0..3 {
        assert!(fetch(&mut child, adopted, &all) == expected(&all, 1));
        assert_eq!(read(&child), (64 * round, 64));
    }
    store(&mut parent, region, all[0], 2);
    assert!(fetch(&mut child, adopted, &all) == expected(&all, 1));
    assert!(fetch(&mut parent, region, &all) == expected(&all, 2));
    parent.free_region(region);
    store(&mut child, adopted, extent(0, 32), 3);
    assert!(fetch(&mut child, adopted, &[extent(0, 32)]) == expected(&[extent(0, 32)], 3));
    assert!(fetch(&mut child, adopted, &[extent(32, 32)]) == expected(&[extent(32, 32)], 1));
    assert_eq!(read(&child).1, 64, "nothing was asked for again");
}

/// A region of 16 pages, and what another member opens it by.
fn of_two_members(server: &RunningServer) -> (Pool, PoolRegion, Direct, DirectRegion) {
    let mut pool = Pool::connect(&config(&[server], 32 * MIB)).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 16), 1);
    let ticket = pool.region_ticket(region).unwrap();
    pool.open_region(rampool::pool::RegionSelector::Ticket(&ticket), 16 * OS_PAGE_BYTES as u64).unwrap();
    let mut other = Direct::connect(&PoolConfig::attach(pool.lease_ticket(), "other")).unwrap();
    let theirs = other.open_ticket(&ticket).unwrap();
    (pool, region, other, theirs)
}

#[test]
fn a_page_that_another_member_changed_is_asked_for() {
    for kind in [StoreKind::Raw, StoreKind::Compressed] {
        let dir = tempfile::tempdir().unwrap();
        let server = open_at(dir.path(), kind);
        let (mut pool, region, mut other, theirs) = of_two_members(&server);
        let all = [extent(0, 16)];
        assert!(fetch(&mut pool, region, &all) == expected(&all, 1));
        let before = read(&pool);
        assert_eq!(before.0, 16);
        // A part of a page, in its frame; whole pages, in other frames; and frames that are used again.
        let mut want = expected(&all, 1);
        for round in 0..4u8 {
            let (at, len) = (usize::from(round) * 5000 + 100, if round % 2 == 0 { 50 } else { 3 * 4096 });
            want[at..at + len].fill(round + 1);
            other.put(theirs, at as u64, &want[at..at + len]).unwrap();
            assert!(fetch(&mut pool, region, &all) == want, "round {round}");
            assert!(fetch(&mut pool, region, &all) == want, "round {round}, again");
        }
        assert!(read(&pool).1 > before.1);
    }
}

#[test]
fn a_page_is_asked_for_though_a_copy_keeps_its_frame() {
    for kind in [StoreKind::Raw, StoreKind::Compressed] {
        let dir = tempfile::tempdir().unwrap();
        let server = open_at(dir.path(), kind);
        let (mut pool, region, mut other, theirs) = of_two_members(&server);
        let all = [extent(0, 16)];
        let copy = pool.clone_region(region).unwrap();
        assert!(fetch(&mut pool, region, &all) == expected(&all, 1));
        // In part and as a whole: the copy keeps each as it was.
        let mut want = expected(&all, 1);
        for (at, len) in [(100, 50), (3 * OS_PAGE_BYTES, 2 * OS_PAGE_BYTES)] {
            want[at..at + len].fill(7);
            other.put(theirs, at as u64, &want[at..at + len]).unwrap();
            assert!(fetch(&mut pool, region, &all) == want, "{len} bytes at {at}");
        }
        assert!(fetch(&mut pool, copy, &all) == expected(&all, 1));
    }
}

#[test]
fn a_lost_server_is_lost_though_its_memory_is_still_there() {
    let dir = tempfile::tempdir().unwrap();
    let server = open_at(dir.path(), StoreKind::Raw);
    let mut pool = Pool::connect(&config(&[&server], 32 * MIB)).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 16), 1);
    server.stop();
    match next(&mut pool) {
        PoolEvent::Lost { .. } => {}
        other => panic!("{other:?}"),
    }
    let mut memory = vec![0; OS_PAGE_BYTES];
    // SAFETY: the memory lives until the event.
    unsafe { pool.fetch(region, 3, &[extent(0, 1)], memory.as_mut_ptr(), true) };
    assert!(matches!(next(&mut pool), PoolEvent::Failed { token: 3, .. }));
}
