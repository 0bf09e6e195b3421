//! Memory that its owner publishes, and others write into.

use super::*;
use rampool::direct::{Direct, DirectError, PublishedMemory, Rights};
use rampool::proto::layout::LayoutError;
use rampool_net::transport::{Endpoint, SameHost};
use std::path::Path;

fn at(dir: &Path, name: &str) -> ServerConfig {
    ServerConfig { listen: vec![Endpoint::Unix(dir.join(name))], ..server_config(64 * MIB) }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len.div_ceil(8) as u64).flat_map(|n| mix(n ^ seed << 32).to_le_bytes()).take(len).collect()
}

fn content_of(memory: &PublishedMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes);
    bytes
}

/// Mappings in this process, the server's included, of the file that is mapped at this address; 1 of none.
fn mappings_of(memory: &PublishedMemory) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let lines: Vec<Vec<&str>> = maps.lines().map(|line| line.split_whitespace().collect()).collect();
    let address = memory.as_ptr().addr();
    let has = |range: &str| {
        let (low, high) = range.split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(low)..number(high)).contains(&address)
    };
    let inode = lines.iter().find(|line| has(line[0])).expect("it is mapped")[4];
    if inode == "0" { 1 } else { lines.iter().filter(|line| line[4] == inode).count() }
}

#[test]
fn memory_is_published_where_a_server_is_reached_through_shared_memory() {
    let dir = tempfile::tempdir().unwrap();
    let socket = Server::start(ServerConfig { rings: false, ..at(dir.path(), "s") }).unwrap();
    let rings = Server::start(at(dir.path(), "r")).unwrap();
    for (server, same_host) in
        [(&serve(64 * MIB), SameHost::Auto), (&socket, SameHost::Auto), (&rings, SameHost::Socket)]
    {
        let mut config = config(&[server], 32 * MIB);
        config.same_host = Some(same_host);
        let mut direct = Direct::connect(&config).unwrap();
        let refused = direct.publish(4096, Rights::Both, "inbox");
        assert!(matches!(refused, Err(DirectError::NoServerHere)), "{refused:?}");
    }
}

#[test]
fn a_server_that_is_lost_writes_to_no_memory_that_was_withdrawn() {
    let dir = tempfile::tempdir().unwrap();
    let (server, mut owner, _peer) = owner_and_peer(dir.path());
    let memory = owner.publish(MIB as usize, Rights::Both, "inbox").unwrap();
    memory.write(0, &pattern(MIB as usize, 3));
    let before = mappings_of(&memory);
    // It keeps its mapping, as one that is stopped in the middle of an answer would.
    server.stop();
    owner.withdraw(&memory).unwrap();
    assert_eq!((before, mappings_of(&memory)), (2, 1), "the memory that is there now is not shared");
    assert!(content_of(&memory) == pattern(MIB as usize, 3));
    drop(owner);
    memory.write(0, &[1]);
}

#[test]
fn memory_is_published_again_on_the_next_connection() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, mut owner, mut peer) = owner_and_peer(dir.path());
    let memory = owner.publish(4096, Rights::Write, "inbox").unwrap();
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
        let memory = owner.publish(MIB as usize, Rights::Write, "inbox").unwrap();
        let output = std::process::Command::new("ip")
            .args(["netns", "exec", &name])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "published::the_writer_in_the_namespace"])
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
    let memory = owner.publish(MIB as usize, Rights::Both, "inbox").unwrap();
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
}

#[test]
fn the_server_checks_the_rights_to_published_memory_and_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, mut owner, mut peer) = owner_and_peer(dir.path());
    let read = owner.publish(4096, Rights::Read, "to read").unwrap();
    let write = owner.publish(4096, Rights::Write, "to write").unwrap();
    denied(owner.publish(4096, Rights::Both, "to read").map(drop), "already");
    assert!(matches!(owner.publish(4096, Rights::Both, ""), Err(DirectError::Name)));
    let list = peer.published().unwrap();
    let [to_read, to_write] = &list[..] else { panic!("{list:?}") };
    denied(peer.put_remote(to_read, 0, b"x"), "written to");
    denied(peer.get_remote(to_write, 0, &mut [0]), "read");
    peer.put_remote(to_write, 4095, b"x").unwrap();
    assert_eq!(content_of(&write)[4095], b'x');
    // What is dropped goes with the next call, and its name with it.
    drop(read);
    let _again = owner.publish(4096, Rights::Write, "to read").unwrap();
    denied(peer.get_remote(to_read, 0, &mut [0]), "published no more");
    let names: Vec<String> = peer.published().unwrap().iter().map(|one| one.name().to_owned()).collect();
    assert_eq!(names, ["to write", "to read"]);
}

#[test]
fn memory_that_was_withdrawn_or_whose_owner_has_left_is_published_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let (server, mut owner, mut peer) = owner_and_peer(dir.path());
    let one = owner.publish(MIB as usize, Rights::Both, "one").unwrap();
    let _other = owner.publish(MIB as usize, Rights::Both, "other").unwrap();
    assert_eq!(mappings_of(&one), 2, "ours and the server's");
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
