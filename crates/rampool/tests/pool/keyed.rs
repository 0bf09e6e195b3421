//! Memory that a server on this machine reaches by key.

use super::*;
use rampool::direct::{Direct, DirectError, DirectRegion, Exposed, Rights};
use rampool::proto::layout::{Layout, LayoutError};
use rampool_net::transport::{Endpoint, SameHost};
use std::path::Path;

fn at(dir: &Path, name: &str) -> ServerConfig {
    ServerConfig { listen: vec![Endpoint::Unix(dir.join(name))], ..server_config(64 * MIB) }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len.div_ceil(8) as u64).flat_map(|n| mix(n ^ seed << 32).to_le_bytes()).take(len).collect()
}

fn content_of(memory: &Exposed) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes);
    bytes
}

/// Mappings in this process, the server's included, of the file that is mapped at this address.
fn mappings_of(memory: &Exposed) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let lines: Vec<Vec<&str>> = maps.lines().map(|line| line.split_whitespace().collect()).collect();
    let address = memory.as_ptr().addr();
    let has = |range: &str| {
        let (low, high) = range.split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(low)..number(high)).contains(&address)
    };
    let inode = lines.iter().find(|line| has(line[0])).expect("it is mapped")[4];
    lines.iter().filter(|line| line[4] == inode).count()
}

/// Reads and writes at random, contiguous and strided, and compares every byte with a vector that is treated
/// alike.
fn exercise_memory(direct: &mut Direct, rounds: u64, mut between: impl FnMut(&mut Direct, u64)) {
    let region_bytes = 4 * MIB;
    let region = direct.create(region_bytes).unwrap();
    let memory = direct.expose(MIB as usize + 5).unwrap();
    let mut model = vec![0; memory.len()];
    let mut there = pattern(region_bytes as usize, 99);
    direct.put(region, 0, &there).unwrap();
    for round in 0..rounds {
        between(direct, round);
        let draw = |n: u64, below: u64| mix(round * 16 + n) % below;
        let len = (1 + draw(0, 600_000)) as usize;
        let here = draw(1, (memory.len() - len) as u64 + 1) as usize;
        if round % 3 == 0 {
            let new = pattern(len, round);
            memory.write(here, &new);
            model[here..here + len].copy_from_slice(&new);
            let offset = draw(2, region_bytes - len as u64);
            direct.put_from(region, offset, &Layout::bytes(len as u64).unwrap(), &memory, here).unwrap();
            there[offset as usize..offset as usize + len].copy_from_slice(&new);
        } else if round % 3 == 1 {
            let offset = draw(2, region_bytes - len as u64);
            direct.get_into(region, offset, &Layout::bytes(len as u64).unwrap(), &memory, here).unwrap();
            model[here..here + len].copy_from_slice(&there[offset as usize..offset as usize + len]);
        } else {
            // 2000 pieces of 40 bytes, 1000 bytes apart.
            let strided = Layout::bytes(40).unwrap().hvector(2000, 1, 1000).unwrap();
            let offset = draw(2, region_bytes - 2_000_000);
            let here = draw(1, (memory.len() - 80_000) as u64) as usize;
            direct.get_into(region, offset, &strided, &memory, here).unwrap();
            for n in 0..2000 {
                let from = offset as usize + n * 1000;
                model[here + n * 40..here + n * 40 + 40].copy_from_slice(&there[from..from + 40]);
            }
        }
        assert!(content_of(&memory) == model, "round {round}");
    }
    let mut back = vec![0; there.len()];
    direct.get(region, 0, &mut back).unwrap();
    assert!(back == there);
    direct.free(region);
}

/// A region of 1 MiB, and what it holds.
fn filled(direct: &mut Direct) -> (DirectRegion, Vec<u8>) {
    let region = direct.create(MIB).unwrap();
    let bytes = pattern(MIB as usize, 1);
    direct.put(region, 0, &bytes).unwrap();
    (region, bytes)
}

#[test]
fn bytes_land_in_exposed_memory_and_are_taken_from_there() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(at(dir.path(), "s")).unwrap();
    let mut direct = Direct::connect(&config(&[&server], 32 * MIB)).unwrap();
    exercise_memory(&mut direct, 30, |_, _| {});
    let stats = direct.key_stats();
    assert!(
        stats.requests >= 30 && stats.bytes > 3 * MIB && stats.stale == 0 && stats.replaced == 0,
        "{stats:?}"
    );
}

#[test]
fn what_is_on_other_servers_travels_as_requests() {
    let dir = tempfile::tempdir().unwrap();
    let near = Server::start(at(dir.path(), "near")).unwrap();
    let (far, other) = (serve(64 * MIB), Server::start(at(dir.path(), "other")).unwrap());
    let mut config = config(&[&far, &near, &other], 48 * MIB);
    config.stripe_pages = 16;
    let mut direct = Direct::connect(&config).unwrap();
    exercise_memory(&mut direct, 15, |_, _| {});
    assert!(direct.key_stats().requests > 0);
}

#[test]
fn no_peer_has_to_be_able_to() {
    let dir = tempfile::tempdir().unwrap();
    let socket = Server::start(ServerConfig { rings: false, ..at(dir.path(), "s") }).unwrap();
    let rings = Server::start(at(dir.path(), "r")).unwrap();
    for (server, same_host) in
        [(&serve(64 * MIB), SameHost::Auto), (&socket, SameHost::Auto), (&rings, SameHost::Socket)]
    {
        let mut config = config(&[server], 32 * MIB);
        config.same_host = Some(same_host);
        let mut direct = Direct::connect(&config).unwrap();
        let memory = direct.expose(4096).unwrap();
        assert!(!direct.is_exposed(&memory));
        exercise_memory(&mut direct, 3, |_, _| {});
        assert_eq!(direct.key_stats().requests, 0);
        direct.withdraw(&memory).unwrap();
    }
}

#[test]
fn memory_that_was_withdrawn_is_mapped_by_no_other_process() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(at(dir.path(), "s")).unwrap();
    let mut direct = Direct::connect(&config(&[&server], 32 * MIB)).unwrap();
    let (region, bytes) = filled(&mut direct);
    let all = Layout::bytes(MIB).unwrap();
    let memory = direct.expose(MIB as usize).unwrap();
    assert!(direct.is_exposed(&memory));
    assert_eq!(mappings_of(&memory), 2, "ours and the server's");
    direct.withdraw(&memory).unwrap();
    assert!(!direct.is_exposed(&memory));
    assert_eq!(mappings_of(&memory), 1);
    // It is as any other memory.
    direct.get_into(region, 0, &all, &memory, 0).unwrap();
    assert!(content_of(&memory) == bytes);
    assert_eq!(direct.key_stats().requests, 0);
    direct.withdraw(&memory).unwrap();
    // What is dropped goes by itself, and its place is used again: never with the same key.
    for round in 0..200 {
        let memory = direct.expose(MIB as usize).unwrap();
        assert!(direct.is_exposed(&memory), "round {round}");
        direct.get_into(region, 0, &all, &memory, 0).unwrap();
        assert!(content_of(&memory) == bytes);
    }
    let stats = direct.key_stats();
    assert!(stats.exposed <= 2 && stats.requests == 200 * 4 && stats.stale == 0, "{stats:?}");
    let beyond = direct.get_into(region, 0, &all, &memory, 1).unwrap_err().to_string();
    assert!(beyond.contains("1048576 bytes"), "{beyond}");
}

#[test]
fn keys_that_a_server_had_to_forget_are_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(at(dir.path(), "s")).unwrap();
    let mut direct = Direct::connect(&config(&[&server], 32 * MIB)).unwrap();
    let (region, bytes) = filled(&mut direct);
    // A server keeps 256 MiB for a connection. Nothing of it is touched but what is read into.
    let memories: Vec<Exposed> = (0..3).map(|_| direct.expose(100 * MIB as usize).unwrap()).collect();
    for round in 0..9 {
        let memory = &memories[round % 3];
        direct.get_into(region, 0, &Layout::bytes(MIB).unwrap(), memory, 70 * MIB as usize).unwrap();
        let mut back = vec![0; MIB as usize];
        memory.read(70 * MIB as usize, &mut back);
        assert!(back == bytes, "round {round}");
        memory.write(70 * MIB as usize, &vec![0; MIB as usize]);
    }
    let stats = direct.key_stats();
    assert!(stats.stale > 0 && stats.replaced == 0, "{stats:?}");
}

#[test]
fn a_broken_connection_takes_its_keys_along_and_the_memory_is_another() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(at(dir.path(), "s")).unwrap();
    let mut direct = Direct::connect(&config(&[&server], 32 * MIB)).unwrap();
    exercise_memory(&mut direct, 20, |direct, round| {
        if round % 4 == 1 {
            super::rings::cut(direct.pool());
        }
    });
    let stats = direct.key_stats();
    assert!(stats.replaced == 5 && stats.requests > 20, "{stats:?}");
}

#[test]
fn a_server_that_is_lost_in_the_middle_writes_to_no_memory_that_anybody_has() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(at(dir.path(), "s")).unwrap();
    let mut direct = Direct::connect(&config(&[&server], 32 * MIB)).unwrap();
    let region = direct.create(MIB).unwrap();
    let memory = direct.expose(MIB as usize).unwrap();
    memory.write(0, &pattern(MIB as usize, 3));
    let before = mappings_of(&memory);
    // It keeps its mapping, as one that is stopped in the middle of an answer would.
    server.stop();
    let error = direct.get_into(region, 0, &Layout::bytes(MIB).unwrap(), &memory, 0).unwrap_err().to_string();
    assert!(error.contains("unix:"), "{error}");
    assert_eq!((before, mappings_of(&memory)), (2, 1), "the memory that is there now is not shared");
    assert!(content_of(&memory) == pattern(MIB as usize, 3));
    assert!(!direct.is_exposed(&memory));
    assert_eq!(direct.key_stats().replaced, 1);
    drop(direct);
    memory.write(0, &[1]);
}

#[test]
fn memory_is_published_again_on_the_next_connection() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, mut owner, mut peer) = owner_and_peer(dir.path());
    let memory = owner.expose(4096).unwrap();
    assert!(owner.publish(&memory, Rights::Write, "inbox").unwrap());
    let before = peer.published().unwrap();
    super::rings::cut(owner.pool());
    let region = owner.create(4096).unwrap();
    owner.put(region, 0, &[1; 4096]).unwrap();
    let since = Instant::now();
    let after = loop {
        let after = peer.published().unwrap();
        if !after.is_empty() && after != before {
            break after;
        }
        owner.progress();
        assert!(since.elapsed() < WATCHDOG);
    };
    denied(peer.put_remote(&before[0], 0, b"x"), "published no more");
    peer.put_remote(&after[0], 0, b"x").unwrap();
    assert_eq!((after[0].name(), content_of(&memory)[0]), ("inbox", b'x'));
}

/// A process with memory that it publishes, reached through shared memory, and the address of its server for
/// another of the same lease.
fn owner_at(dir: &Path, address: &str, key: Option<Key>) -> (RunningServer, Direct, LeaseTicket) {
    let near = Endpoint::Unix(dir.join("s"));
    let listen = vec![address.parse().unwrap(), near.clone()];
    let server = Server::start(ServerConfig { listen, key: key.clone(), ..server_config(64 * MIB) }).unwrap();
    let mut near =
        PoolConfig::new(vec![ServerSpec { endpoint: near, memory: None }], ByteLen(32 * MIB), "owner");
    near.key = key;
    let owner = Direct::connect(&near).unwrap();
    let ticket = owner.pool().lease_ticket().reached_at(0, server.addr().clone());
    (server, owner, ticket)
}

fn owner_and_peer(dir: &Path) -> (RunningServer, Direct, Direct) {
    let (server, owner, ticket) = owner_at(dir, "127.0.0.1:0", None);
    let peer = Direct::connect(&PoolConfig::attach(ticket, "peer")).unwrap();
    (server, owner, peer)
}

const NAMESPACE_TICKET: &str = "RAMPOOL_TEST_NAMESPACE_TICKET";

/// What `a_process_in_another_network_namespace_writes_into_published_memory` starts there; by itself it does
/// nothing.
#[test]
fn the_writer_in_the_namespace() {
    let Ok(ticket) = std::env::var(NAMESPACE_TICKET) else { return };
    let (ticket, key) = ticket.split_once(' ').unwrap();
    let mut config = PoolConfig::attach(ticket.parse().unwrap(), "writer");
    config.key = Key::from_hex(key);
    let mut direct = Direct::connect(&config).unwrap();
    let inbox = direct.published().unwrap().remove(0);
    direct.put_remote(&inbox, 4096, &pattern(500_000, 5)).unwrap();
}

#[test]
fn a_process_in_another_network_namespace_writes_into_published_memory() {
    let name = format!("rk{}", std::process::id());
    let (here, there) = (format!("{name}a"), format!("{name}b"));
    let ip = |words: &str| {
        let output = std::process::Command::new("ip").args(words.split_whitespace()).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !ip(&format!("netns add {name}")) {
        eprintln!("not run: it needs root and ip(8)");
        return;
    }
    let subnet = format!("10.215.{}", 1 + std::process::id() % 250);
    let done = std::panic::catch_unwind(|| {
        assert!(ip(&format!("link add {here} type veth peer name {there} netns {name}")));
        assert!(ip(&format!("addr add {subnet}.1/30 dev {here}")) && ip(&format!("link set {here} up")));
        assert!(ip(&format!("-n {name} addr add {subnet}.2/30 dev {there}")));
        assert!(ip(&format!("-n {name} link set {there} up")));
        let (dir, key) = (tempfile::tempdir().unwrap(), Key::generate());
        let (_server, mut owner, ticket) = owner_at(dir.path(), &format!("{subnet}.1:0"), Some(key.clone()));
        let memory = owner.expose(MIB as usize).unwrap();
        assert!(owner.publish(&memory, Rights::Write, "inbox").unwrap());
        let output = std::process::Command::new("ip")
            .args(["netns", "exec", &name])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "keyed::the_writer_in_the_namespace"])
            .env(NAMESPACE_TICKET, format!("{ticket} {}", key.to_hex()))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let content = content_of(&memory);
        assert!(content[4096..504_096] == pattern(500_000, 5)[..]);
        assert!(content[..4096].iter().chain(&content[504_096..]).all(|byte| *byte == 0));
    });
    assert!(ip(&format!("netns delete {name}")));
    if let Err(panic) = done {
        std::panic::resume_unwind(panic);
    }
}

#[track_caller]
fn denied(result: Result<(), DirectError>, word: &str) {
    let said = result.unwrap_err();
    assert!(
        matches!(&said, DirectError::Pool(PoolError::Denied { message, .. }) if message.contains(word)),
        "{said}"
    );
    assert!(said.to_string().contains("published memory"), "{said}");
}

#[test]
fn published_memory_is_written_and_read_by_a_process_that_reaches_the_server_over_tcp() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, mut owner, mut peer) = owner_and_peer(dir.path());
    let memory = owner.expose(MIB as usize).unwrap();
    assert!(owner.publish(&memory, Rights::Both, "inbox").unwrap());
    let list = peer.published().unwrap();
    let [inbox] = &list[..] else { panic!("{list:?}") };
    assert_eq!((inbox.name(), inbox.bytes(), inbox.rights()), ("inbox", MIB, Rights::Both));
    let mut model = vec![0; MIB as usize];
    for round in 0..40 {
        let draw = |n: u64, below: u64| mix(round * 16 + n) % below;
        let len = (1 + draw(0, 200_000)) as usize;
        let at = draw(1, MIB - len as u64 + 1);
        let bytes = pattern(len, round);
        peer.put_remote(inbox, at, &bytes).unwrap();
        model[at as usize..at as usize + len].copy_from_slice(&bytes);
        assert!(content_of(&memory) == model, "round {round}");
        memory.write(7, &round.to_le_bytes());
        model[7..15].copy_from_slice(&round.to_le_bytes());
        let mut back = vec![1; len];
        peer.get_remote(inbox, at, &mut back).unwrap();
        assert!(back == model[at as usize..at as usize + len], "round {round}");
    }
    let outside = peer.put_remote(inbox, MIB - 2, &[1; 3]);
    assert!(matches!(outside, Err(DirectError::Layout(LayoutError::OutOfBounds { .. }))), "{outside:?}");
    // The same memory goes on being used by key.
    let (region, bytes) = filled(&mut owner);
    owner.get_into(region, 0, &Layout::bytes(MIB).unwrap(), &memory, 0).unwrap();
    let mut back = vec![0; MIB as usize];
    peer.get_remote(inbox, 0, &mut back).unwrap();
    assert!(back == bytes && owner.key_stats().requests > 0);
}

#[test]
fn the_server_checks_the_rights_to_published_memory_and_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, mut owner, mut peer) = owner_and_peer(dir.path());
    let [read, write, more] = [(); 3].map(|()| owner.expose(4096).unwrap());
    assert!(owner.publish(&read, Rights::Read, "to read").unwrap());
    assert!(owner.publish(&write, Rights::Write, "to write").unwrap());
    denied(owner.publish(&more, Rights::Both, "to read").map(drop), "already");
    assert!(matches!(owner.publish(&more, Rights::Both, ""), Err(DirectError::Name)));
    let list = peer.published().unwrap();
    let [to_read, to_write] = &list[..] else { panic!("{list:?}") };
    denied(peer.put_remote(to_read, 0, b"x"), "written to");
    denied(peer.get_remote(to_write, 0, &mut [0]), "read");
    peer.put_remote(to_write, 4095, b"x").unwrap();
    assert_eq!(content_of(&write)[4095], b'x');
    // A new name replaces the old one.
    assert!(owner.publish(&read, Rights::Write, "another").unwrap());
    denied(peer.get_remote(to_read, 0, &mut [0]), "published no more");
    let names: Vec<String> = peer.published().unwrap().iter().map(|one| one.name().to_owned()).collect();
    assert_eq!(names, ["to write", "another"]);
    // Only its owner uses memory that no server has a key to.
    let plain = peer.expose(4096).unwrap();
    assert!(!peer.publish(&plain, Rights::Both, "no key").unwrap());
}

#[test]
fn memory_that_was_withdrawn_or_whose_owner_has_left_is_published_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let (server, mut owner, mut peer) = owner_and_peer(dir.path());
    let (one, other) = (owner.expose(MIB as usize).unwrap(), owner.expose(MIB as usize).unwrap());
    assert!(owner.publish(&one, Rights::Both, "one").unwrap());
    assert!(owner.publish(&other, Rights::Both, "other").unwrap());
    let list = peer.published().unwrap();
    // Another process writes all the time, until it is told that it may not.
    let target = list[0].clone();
    let ticket = peer.pool().lease_ticket();
    let writer = std::thread::spawn(move || {
        let mut direct = Direct::connect(&PoolConfig::attach(ticket, "writer")).unwrap();
        loop {
            if let Err(error) = direct.put_remote(&target, 0, &[7; 100_000]) {
                return error.to_string();
            }
        }
    });
    while content_of(&one)[0] == 0 {
        std::thread::yield_now();
    }
    owner.withdraw(&one).unwrap();
    assert_eq!(mappings_of(&one), 1);
    one.write(0, &[1; 100_000]);
    assert!(writer.join().unwrap().contains("published no more"));
    assert!(content_of(&one)[..100_000].iter().all(|byte| *byte == 1), "nothing was under way");
    peer.put_remote(&list[1], 0, b"x").unwrap();
    owner.close();
    let since = Instant::now();
    while !peer.published().unwrap().is_empty() {
        assert!(since.elapsed() < WATCHDOG);
    }
    denied(peer.put_remote(&list[1], 0, b"x"), "owner has left");
    peer.close();
    all_gone(&[&server]);
}
