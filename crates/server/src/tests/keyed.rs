//! Keys that no correct client uses: old ones, foreign ones, beyond the end, without memory.

use super::*;
use rampool_kernel::sealed::SealedMemory;
use rampool_net::transport::Endpoint;
use rampool_pinning::keys::{Grant, Key, Rights};
use rampool_wire::frame::{ByKey, encode_grant, encode_revocation};
use std::os::fd::OwnedFd;

const BYTES: usize = 64 << 10;

struct World {
    server: RunningServer,
    client: Client,
    region: RegionId,
    content: Vec<u8>,
    _dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = ServerConfig { listen: vec![Endpoint::Unix(dir.path().join("s"))], ..config(64 * MIB) };
        let server = Server::start(config).unwrap();
        let mut client = Self::connect(&server);
        let region = client.create_region().unwrap();
        client.call(Opcode::OpenRegion, |h| h.with_region(region).with_arg(BYTES as u64), &[]).unwrap();
        let pages: Vec<Vec<u8>> = (0..16u8).map(|n| vec![n + 1; OS_PAGE_BYTES]).collect();
        client.put(region, 0, &pages, false).unwrap();
        Self { server, client, region, content: pages.concat(), _dir: dir }
    }

    fn connect(server: &RunningServer) -> Client {
        let policy = rampool_net::transport::LocalPolicy {
            features: features::RINGS | features::KEYS,
            ..open_policy()
        };
        Client::with_lease(server.addr(), policy, 8 * MIB)
    }

    /// Exposes a memory of `BYTES` bytes.
    fn expose(&mut self, place: u32, generation: u64, rights: Rights) -> Result<SealedMemory, No> {
        let (memory, file) = SealedMemory::create(c"test", BYTES).unwrap();
        self.expose_as(Grant { key: Key { place, generation }, bytes: BYTES as u64, rights }, Some(&file))
            .map(|()| memory)
    }

    fn expose_as(&mut self, grant: Grant, file: Option<&OwnedFd>) -> Result<(), No> {
        if let Some(file) = file {
            assert!(self.client.link.hand_over(file.as_fd()).unwrap());
        }
        let mut table = Vec::new();
        encode_grant(&grant, &mut table);
        self.client.call(Opcode::Expose, |h| h, &table).map(drop)
    }

    fn revoke(&mut self, place: u32, generation: u64) {
        let mut table = Vec::new();
        encode_revocation(Key { place, generation }, &mut table);
        self.client.call(Opcode::Revoke, |h| h, &table).unwrap();
    }

    /// All of the region into the memory, from `offset` on.
    fn get(&mut self, place: u32, generation: u64, offset: u64) -> Result<(), No> {
        self.by_key(Opcode::Gather, ByKey { key: Key { place, generation }, offset })
    }

    /// The other way.
    fn put(&mut self, place: u32, generation: u64) -> Result<(), No> {
        self.by_key(Opcode::Scatter, ByKey { key: Key { place, generation }, offset: 0 })
    }

    fn by_key(&mut self, opcode: Opcode, place: ByKey) -> Result<(), No> {
        let program = Layout::bytes(BYTES as u64).unwrap().placed(0, BYTES as u64).unwrap();
        let window = Window { program, from: 0, len: u32::try_from(BYTES).unwrap() };
        let mut table = Vec::new();
        place.encode(&mut table);
        if opcode == Opcode::Gather {
            window.encode(&mut table);
        } else {
            let crcs: Vec<u32> = self.content.chunks(OS_PAGE_BYTES).map(checksum::crc32c).collect();
            window.encode_with(&crcs, &mut table);
        }
        let region = self.region;
        let reply = self.client.call(opcode, |h| h.with_region(region).by_key(), &table)?;
        assert!(reply.bulk.is_empty());
        Ok(())
    }
}

fn content(memory: &SealedMemory) -> Vec<u8> {
    // SAFETY: mapped, and nothing writes there now.
    unsafe { std::slice::from_raw_parts(memory.span(0, BYTES), BYTES) }.to_vec()
}

#[test]
fn an_old_key_is_refused_and_touches_nothing() {
    let mut world = World::new();
    let first = world.expose(0, 1, Rights::Both).unwrap();
    world.get(0, 1, 0).unwrap();
    assert!(content(&first) == world.content);
    world.revoke(0, 1);
    let clear = || {
        // SAFETY: mapped, and the server is not to touch it.
        unsafe { first.span(0, BYTES).write_bytes(0, BYTES) };
    };
    clear();
    let no = world.get(0, 1, 0).unwrap_err();
    assert_eq!(no.status, Status::StaleKey);
    assert!(no.message.contains("0.1") && no.message.contains("current key"), "{}", no.message);
    // A late grant of the revoked generation opens nothing, even with memory.
    world.expose(0, 1, Rights::Both).unwrap();
    assert_eq!(world.get(0, 1, 0).unwrap_err().status, Status::StaleKey);
    // The next generation does; the old key stays what it is, and so does one that never was.
    let second = world.expose(0, 2, Rights::Both).unwrap();
    world.get(0, 2, 0).unwrap();
    assert!(content(&second) == world.content);
    for (place, generation) in [(0, 1), (0, 3), (1, 1)] {
        assert_eq!(
            world.get(place, generation, 0).unwrap_err().status,
            Status::StaleKey,
            "{place}.{generation}"
        );
        assert_eq!(
            world.put(place, generation).unwrap_err().status,
            Status::StaleKey,
            "{place}.{generation}"
        );
    }
    assert!(content(&first).iter().all(|byte| *byte == 0), "an old key touched memory");
    // What is revoked twice, or was never known, is revoked.
    world.revoke(0, 1);
    world.revoke(5, 77);
    world.revoke(u32::MAX, u64::MAX);
    world.get(0, 2, 0).unwrap();
    // A younger one takes the older one's place without a revocation.
    let third = world.expose(0, 9, Rights::Both).unwrap();
    assert_eq!(world.get(0, 2, 0).unwrap_err().status, Status::StaleKey);
    world.get(0, 9, 0).unwrap();
    assert!(content(&third) == world.content);
    // Keys are of their connection.
    let mut other = World::connect(&world.server);
    std::mem::swap(&mut world.client, &mut other);
    assert_eq!(world.get(0, 9, 0).unwrap_err().status, Status::NoSuchRegion, "of another lease");
    world.server.check();
}

#[test]
fn a_key_does_what_it_allows_within_its_memory() {
    let mut world = World::new();
    let source = world.expose(0, 1, Rights::Read).unwrap();
    let _target = world.expose(1, 1, Rights::Write).unwrap();
    let no = world.get(0, 1, 0).unwrap_err();
    assert_eq!((no.status, no.message.contains("write")), (Status::BadRequest, true), "{}", no.message);
    assert_eq!(world.put(1, 1).unwrap_err().status, Status::BadRequest);
    for offset in [1, BYTES as u64, u64::MAX, u64::MAX - BYTES as u64] {
        let no = world.get(1, 1, offset).unwrap_err();
        assert_eq!(no.status, Status::BadRequest, "{offset}: {}", no.message);
    }
    world.get(1, 1, 0).unwrap();
    for byte in 0..BYTES {
        // SAFETY: mapped, and the server does not read it now.
        unsafe { source.span(byte, 1).write(world.content[byte]) };
    }
    world.put(0, 1).unwrap();
    // Memory that changes while it is read, as it seems to the server: whole pages are found out when they
    // are read, parts at once.
    world.get(1, 1, 0).unwrap();
    world.server.check();
}

#[test]
fn what_is_no_memory_and_what_is_too_much_is_refused() {
    let mut world = World::new();
    let grant = |place, bytes| Grant { key: Key { place, generation: 1 }, bytes, rights: Rights::Both };
    let no = world.expose_as(grant(0, 4096), None).unwrap_err();
    assert_eq!((no.status, no.message.contains("no memory came")), (Status::BadRequest, true));
    let (_memory, file) = SealedMemory::create(c"test", BYTES).unwrap();
    assert_eq!(
        world.expose_as(grant(0, 2 * BYTES as u64), Some(&file)).unwrap_err().status,
        Status::BadRequest,
        "longer than it is"
    );
    assert_eq!(world.expose_as(grant(0, u64::MAX), Some(&file)).unwrap_err().status, Status::LimitReached);
    assert_eq!(world.expose_as(grant(64, 4096), Some(&file)).unwrap_err().status, Status::LimitReached);
    let other = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
    assert_eq!(world.expose_as(grant(0, 4096), Some(&other)).unwrap_err().status, Status::BadRequest);
    // More descriptors than keys: the server closes them, and the connection when it notices, which may be
    // before all are sent. Other connections go on.
    let flooding = World::connect(&world.server);
    for _ in 0..100 {
        if !matches!(flooding.link.hand_over(file.as_fd()), Ok(true)) {
            break;
        }
    }
    drop(flooding);
    world.expose_as(grant(0, 4096), Some(&file)).unwrap();
    assert_eq!(world.get(0, 1, 0).unwrap_err().status, Status::BadRequest, "beyond its end");
    // A peer without a lease, and a key where none belongs.
    let endpoint = world.server.addr().clone();
    let policy =
        rampool_net::transport::LocalPolicy { features: features::RINGS | features::KEYS, ..open_policy() };
    let mut leaseless = Client::new(&endpoint, policy);
    let mut table = Vec::new();
    encode_grant(&grant(0, 4096), &mut table);
    assert_eq!(leaseless.call(Opcode::Expose, |h| h, &table).err().unwrap().status, Status::NotAllowed);
    let no = leaseless.call(Opcode::Heartbeat, Header::by_key, &[]).err().unwrap();
    assert_eq!(
        (no.status, no.message.contains("a key where none belongs")),
        (Status::BadRequest, true),
        "{}",
        no.message
    );
    leaseless.wait_closed();
    // A connection that did not agree on keys has none.
    let mut plain = Client::with_lease(&endpoint, open_policy(), MIB);
    assert_eq!(plain.call(Opcode::Expose, |h| h, &table).err().unwrap().status, Status::NotAllowed);
    for cut in [&table[..23], &[]] {
        let mut client = World::connect(&world.server);
        assert_eq!(client.call(Opcode::Expose, |h| h, cut).err().unwrap().status, Status::BadRequest);
        client.wait_closed();
    }
    world.server.check();
}
