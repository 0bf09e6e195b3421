//! Publishing that no correct client does: without memory, of other memory, too much, on an old connection.

use super::*;
use rampool_kernel::sealed::SealedMemory;
use rampool_net::transport::Endpoint;
use rampool_wire::frame::{Publish, Reach, Rights};
use std::os::fd::OwnedFd;

const BYTES: usize = 64 << 10;

struct World {
    server: RunningServer,
    client: Client,
    _dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = ServerConfig { listen: vec![Endpoint::Unix(dir.path().join("s"))], ..config(64 * MIB) };
        let server = Server::start(config).unwrap();
        let client = Self::connect(&server);
        Self { server, client, _dir: dir }
    }

    fn connect(server: &RunningServer) -> Client {
        Client::with_lease(server.addr(), wishes(), 8 * MIB)
    }

    fn publish(&mut self, place: u64, bytes: u64, name: &str, file: Option<&OwnedFd>) -> Result<(), No> {
        publish(&mut self.client, place, bytes, name, file)
    }

    /// Writes a byte to a memory by its number.
    fn put(&mut self, number: u64) -> Result<(), No> {
        let mut table = Vec::new();
        let arg = Reach::Put { number, offset: 7, bytes: b"x" }.encode(&mut table);
        self.client.call(Opcode::Reach, |h| h.with_arg(arg), &table).map(drop)
    }
}

fn wishes() -> LocalPolicy {
    LocalPolicy { features: features::RINGS | features::PUBLISH, ..open_policy() }
}

fn publish(
    client: &mut Client,
    place: u64,
    bytes: u64,
    name: &str,
    file: Option<&OwnedFd>,
) -> Result<(), No> {
    if let Some(file) = file {
        assert!(client.link.hand_over(file.as_fd()).unwrap());
    }
    let mut table = Vec::new();
    Publish { rights: Rights::Both, bytes, name }.encode(&mut table);
    client.call(Opcode::Publish, |h| h.with_arg(place), &table).map(drop)
}

fn memory() -> (SealedMemory, OwnedFd) {
    SealedMemory::create(c"test", BYTES).unwrap()
}

fn byte_of(memory: &SealedMemory) -> u8 {
    // SAFETY: mapped, and nothing writes there now.
    unsafe { memory.span(7, 1).read() }
}

#[test]
fn a_place_has_one_memory_and_a_withdrawn_one_is_touched_no_more() {
    let mut world = World::new();
    let ((first, file), (second, other)) = (memory(), memory());
    world.publish(3, BYTES as u64, "a", Some(&file)).unwrap();
    world.put(1).unwrap();
    assert_eq!(byte_of(&first), b'x');
    // The next one at its place takes its name over.
    world.publish(3, BYTES as u64, "a", Some(&other)).unwrap();
    assert_eq!(world.put(1).unwrap_err().status, Status::NoSuchRegion);
    world.put(2).unwrap();
    assert_eq!(byte_of(&second), b'x');
    for place in [3, 3, 77, u64::MAX] {
        world.client.call(Opcode::Withdraw, |h| h.with_arg(place), &[]).unwrap();
    }
    assert_eq!(world.put(2).unwrap_err().status, Status::NoSuchRegion);
    world.server.check();
}

#[test]
fn what_is_no_memory_and_what_is_too_much_is_refused() {
    let mut world = World::new();
    let no = world.publish(0, 4096, "a", None).unwrap_err();
    assert_eq!((no.status, no.message.contains("no memory came")), (Status::BadRequest, true));
    let (_memory, file) = memory();
    let no = world.publish(0, 2 * BYTES as u64, "a", Some(&file)).unwrap_err();
    assert_eq!(no.status, Status::BadRequest, "longer than it is");
    for bytes in [u64::MAX, (256 << 20) + 1] {
        assert_eq!(world.publish(0, bytes, "a", Some(&file)).unwrap_err().status, Status::LimitReached);
    }
    let executable = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
    assert_eq!(world.publish(0, 4096, "a", Some(&executable)).unwrap_err().status, Status::BadRequest);
    for place in 1..=64 {
        world.publish(place, 4096, &place.to_string(), Some(&file)).unwrap();
    }
    assert_eq!(world.publish(65, 4096, "a", Some(&file)).unwrap_err().status, Status::LimitReached);
    assert_eq!(world.publish(64, 4096, "1", Some(&file)).unwrap_err().status, Status::NotAllowed, "taken");
    // More descriptors than requests: the server closes them, and the connection when it notices, which may
    // be before all are sent. Other connections go on.
    let flooding = World::connect(&world.server);
    for _ in 0..100 {
        if !matches!(flooding.link.hand_over(file.as_fd()), Ok(true)) {
            break;
        }
    }
    drop(flooding);
    world.publish(64, 4096, "a", Some(&file)).unwrap();
    // Without a lease, and over a connection that did not agree on it.
    let endpoint = world.server.addr().clone();
    let mut leaseless = Client::new(&endpoint, wishes());
    assert_eq!(publish(&mut leaseless, 0, 4096, "b", None).unwrap_err().status, Status::NotAllowed);
    let mut plain = Client::with_lease(&endpoint, open_policy(), MIB);
    assert_eq!(publish(&mut plain, 0, 4096, "b", None).unwrap_err().status, Status::NotAllowed);
    for cut in [&[1; 15][..], &[]] {
        let mut client = World::connect(&world.server);
        assert_eq!(client.call(Opcode::Publish, |h| h, cut).err().unwrap().status, Status::BadRequest);
        client.wait_closed();
    }
    world.server.check();
}
