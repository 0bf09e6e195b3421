//! A server in threads of the test, and clients of NBD that check every byte.

use super::*;
use crate::{RunningServer, Server, ServerConfig, StoreKind};
use proptest::prelude::Rng as _;
use proptest::test_runner::TestRng;
use rampool_wire::units::PageIndex;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Far above what anything here takes.
const WATCHDOG: Duration = Duration::from_secs(60);

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const EIO: u32 = 5;

/// A client that waits for each answer; it asks for simple replies.
struct Client(UnixStream);

impl Client {
    fn connect(path: &Path, export: &str) -> Self {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        let mut hello = vec![0, 0, 0, 3];
        hello.extend_from_slice(b"IHAVEOPT\0\0\0\x01");
        hello.extend(u32::try_from(export.len()).unwrap().to_be_bytes());
        hello.extend_from_slice(export.as_bytes());
        stream.write_all(&hello).unwrap();
        let mut size = [0; 10];
        stream.read_exact(&mut size).unwrap();
        Self(stream)
    }

    fn request(command: u16, offset: u64, len: u32, data: &[u8]) -> Vec<u8> {
        let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0];
        request.extend(command.to_be_bytes());
        request.extend(7u64.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(len.to_be_bytes());
        request.extend_from_slice(data);
        request
    }

    /// The error of the answer.
    fn ask(&mut self, command: u16, offset: u64, len: u32, data: &[u8]) -> u32 {
        self.0.write_all(&Self::request(command, offset, len, data)).unwrap();
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..4], [0x67, 0x44, 0x66, 0x98]);
        assert_eq!(reply[8..], 7u64.to_be_bytes());
        u32::from_be_bytes(reply[4..8].try_into().unwrap())
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        assert_eq!(self.ask(WRITE, offset, u32::try_from(data.len()).unwrap(), data), 0);
    }

    fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        assert_eq!(self.ask(READ, offset, len, &[]), 0);
        let mut data = vec![0; len as usize];
        self.0.read_exact(&mut data).unwrap();
        data
    }
}

fn export(name: &str, bytes: u64) -> Export {
    Export { name: name.to_owned(), bytes }
}

fn config(dir: &Path, memory_bytes: u64, exports: Vec<Export>) -> ServerConfig {
    let block = BlockConfig { listen: vec![Endpoint::Unix(dir.join("nbd"))], exports, plain: false };
    let local = "127.0.0.1:0".parse().unwrap();
    ServerConfig { shards: 2, lock_memory: false, block, ..ServerConfig::new(memory_bytes, local) }
}

fn start(dir: &Path, memory_bytes: u64, exports: Vec<Export>) -> RunningServer {
    Server::start(config(dir, memory_bytes, exports)).unwrap()
}

fn rng() -> TestRng {
    TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha)
}

fn below(rng: &mut TestRng, end: u64) -> u64 {
    rng.next_u64() % end
}

fn noise(rng: &mut TestRng, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    rng.fill_bytes(&mut data);
    data
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !holds() {
        assert!(Instant::now() < deadline, "still not so: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn two_clients_find_what_either_wrote_in_every_store() {
    for store in [StoreKind::Raw, StoreKind::Compressed] {
        let dir = tempfile::tempdir().unwrap();
        let bytes = 3 * MIB + 1000;
        let server = Server::start(ServerConfig {
            store,
            ..config(dir.path(), 8 * MIB, vec![export("other", 1), export("disk", bytes)])
        })
        .unwrap();
        let mut clients = [0; 2].map(|_| Client::connect(&dir.path().join("nbd"), "disk"));
        let mut model = vec![0; usize::try_from(bytes).unwrap()];
        let mut rng = rng();
        for step in 0..1500 {
            let client = &mut clients[step % 2];
            let most = [30, 5000, 100_000, 1_000_000][usize::try_from(below(&mut rng, 4)).unwrap()];
            let mut offset = below(&mut rng, bytes);
            let mut len = (below(&mut rng, most) + 1).min(bytes - offset);
            if below(&mut rng, 2) == 0 && offset + PAGE < bytes {
                offset -= offset % PAGE;
                len = (len.next_multiple_of(PAGE)).min(bytes - offset);
            }
            let range = usize::try_from(offset).unwrap()..usize::try_from(offset + len).unwrap();
            let len = u32::try_from(len).unwrap();
            match below(&mut rng, 8) {
                0..=2 => {
                    let mut data = noise(&mut rng, range.len());
                    // Some of it is zero, some packs well.
                    data.chunks_mut(4096).step_by(3).for_each(|part| part.fill(0));
                    data.chunks_mut(4096).step_by(4).for_each(|part| part.fill(7));
                    client.write(offset, &data);
                    model[range].copy_from_slice(&data);
                }
                3 => {
                    assert_eq!(client.ask(WRITE_ZEROES, offset, len, &[]), 0);
                    model[range].fill(0);
                }
                4 => {
                    assert_eq!(client.ask(TRIM, offset, len, &[]), 0);
                    // Whole pages are gone, the rest is as it was: this server is that exact.
                    let end = if range.end == model.len() { range.end } else { range.end / 4096 * 4096 };
                    let whole = range.start.next_multiple_of(4096)..end;
                    if !whole.is_empty() {
                        model[whole].fill(0);
                    }
                }
                5 => assert_eq!(client.ask(FLUSH, 0, 0, &[]), 0),
                _ => {
                    assert!(client.read(offset, len) == model[range], "step {step}: {len} bytes at {offset}")
                }
            }
        }
        assert!(clients[0].read(0, u32::try_from(bytes).unwrap()) == model);
        // A packed page that is read has a frame more until its bytes have left; the thread gives that back
        // before it answers again.
        assert_eq!(clients[0].ask(FLUSH, 0, 0, &[]), 0);
        let stored = model.chunks(4096).filter(|page| page.iter().any(|byte| *byte != 0)).count() as u64;
        let status = server.status();
        assert_eq!(status.frames, stored, "a page of zeroes takes no frame");
        assert_eq!((status.exports[1].clients, status.exports[1].failures), (2, 0));
        server.check();
        drop(clients);
        until("the clients are gone", || server.status().connections == 0);
        server.check();
        assert_eq!(server.status().frames, stored, "what is sent keeps no frame");
    }
}

#[test]
fn clients_that_write_parts_of_the_same_pages_at_once_undo_nothing_of_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path(), 4 * MIB, vec![export("disk", MIB)]);
    let path = dir.path().join("nbd");
    let pages = 8;
    std::thread::scope(|scope| {
        for part in 0..4u8 {
            let path = &path;
            scope.spawn(move || {
                let mut client = Client::connect(path, "disk");
                for round in 0..200u8 {
                    let fill = [part ^ round; 1024];
                    let at = |page: u64| page * PAGE + u64::from(part) * 1024;
                    // All at once, so that the server's threads are at the same pages at the same time.
                    let writes: Vec<u8> = (0..20 * pages)
                        .flat_map(|n| Client::request(WRITE, at(n % pages), 1024, &fill))
                        .collect();
                    client.0.write_all(&writes).unwrap();
                    let mut replies = vec![0; usize::try_from(20 * pages * 16).unwrap()];
                    client.0.read_exact(&mut replies).unwrap();
                    for page in 0..pages {
                        assert!(
                            client.read(at(page), 1024) == fill,
                            "somebody else has undone round {round}"
                        );
                    }
                }
            });
        }
    });
    let mut client = Client::connect(&path, "");
    for page in 0..pages {
        let expected: Vec<u8> = (0..4u8).flat_map(|part| [part ^ 199; 1024]).collect();
        assert_eq!(client.read(page * PAGE, 4096), expected);
    }
    server.check();
}

#[test]
fn an_export_of_all_the_memory_is_filled_and_rewritten() {
    for store in [StoreKind::Raw, StoreKind::Compressed] {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(ServerConfig {
            store,
            ..config(dir.path(), 4 * MIB, vec![export("disk", 4 * MIB)])
        })
        .unwrap();
        assert_eq!(server.status().free_bytes, 0);
        let mut client = Client::connect(&dir.path().join("nbd"), "disk");
        let mut rng = rng();
        for _ in 0..3 {
            let data = noise(&mut rng, 4 << 20);
            client.write(0, &data);
            for _ in 0..50 {
                let at = below(&mut rng, 4 * MIB - 9000);
                client.write(at, &data[usize::try_from(at).unwrap()..][..9000]);
            }
            assert!(client.read(0, 4 << 20) == data);
        }
        assert_eq!(server.status().exports[0].used_bytes, 4 * MIB);
        assert_eq!(client.ask(TRIM, 0, 4 << 20, &[]), 0);
        let status = server.status();
        assert_eq!((status.frames, status.exports[0].used_bytes), (0, 0), "what was trimmed is back at once");
        assert!(client.read(0, 4 << 20).iter().all(|byte| *byte == 0));
        server.check();
    }
}

#[test]
fn what_cannot_be_served_is_refused_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let error = |config: ServerConfig| Server::start(config).err().expect("refused").to_string();
    let full = error(config(dir.path(), 4 * MIB, vec![export("a", 3 * MIB), export("b", 2 * MIB)]));
    assert!(
        full.contains("\"b\"") && full.contains("1048576 bytes are free") && full.contains("--memory"),
        "{full}"
    );
    let twice = error(config(dir.path(), 4 * MIB, vec![export("a", 1), export("a", 1)]));
    assert!(twice.contains("two exports"), "{twice}");
    assert!(error(config(dir.path(), 4 * MIB, Vec::new())).contains("--export"));
    let mut nowhere = config(dir.path(), 4 * MIB, vec![export("a", 1)]);
    nowhere.block.listen.clear();
    assert!(error(nowhere.clone()).contains("--nbd"));
    nowhere.block.listen.push("0.0.0.0:0".parse().unwrap());
    assert!(error(nowhere.clone()).contains("--nbd-plain"));
    nowhere.block.plain = true;
    Server::start(nowhere.clone()).unwrap();
    nowhere.block.listen = vec!["ucx:127.0.0.1:0".parse().unwrap()];
    assert!(error(nowhere).contains("TCP and Unix"));
}

#[test]
fn a_client_that_takes_no_answers_keeps_none_waiting_and_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path(), 64 * MIB, vec![export("disk", 32 * MIB)]);
    let path = dir.path().join("nbd");
    let mut rng = rng();
    let data = noise(&mut rng, 32 << 20);
    let mut good = [0; 4].map(|_| Client::connect(&path, "disk"));
    good[0].write(0, &data);
    let full = server.status().frames;
    let greedy: Vec<Client> = (0..4)
        .map(|_| {
            let mut client = Client::connect(&path, "disk");
            for _ in 0..50 {
                client.0.write_all(&Client::request(READ, 0, 32 << 20, &[])).unwrap();
            }
            client
        })
        .collect();
    let done = |server: &RunningServer| server.status().exports[0].read_bytes;
    until("the greedy ones are at work", || done(&server) > 0);
    for (at, client) in good.iter_mut().enumerate() {
        // Every page is another one now, and what is on its way keeps the old ones.
        client.write(0, &data[at..]);
        assert!(client.read(4096, 8 << 20) == data[at + 4096..][..8 << 20]);
    }
    let kept = server.status().frames - full;
    assert!(kept <= 4 * 2 * MIB / PAGE, "{kept} frames are queued for clients that do not read");
    // A client that breaks the protocol is closed, and no other.
    let mut rude = Client::connect(&path, "disk");
    rude.0.write_all(&[0; 28]).unwrap();
    assert_eq!(rude.0.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(server.status().protocol_errors, 1);
    assert!(server.shared.replies.waiting_bytes() > 0, "they count among the replies of all");
    drop(greedy);
    until("they are gone", || server.status().exports[0].clients == 4);
    let kept = || (server.status().frames, server.shared.replies.waiting_bytes());
    until("what was kept for them is given back", || kept() == (full, 0));
    server.check();
}

#[test]
fn a_damaged_page_is_an_error_and_never_data() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path(), 4 * MIB, vec![export("disk", MIB)]);
    let mut client = Client::connect(&dir.path().join("nbd"), "disk");
    client.write(0, &[9; 8192]);
    let disk = &server.blocks.disks[0];
    let page = disk.stored(PageIndex(1)).unwrap();
    // SAFETY: no other thread looks at the page: no request is under way.
    unsafe { *server.shared.store.memory(page.frame).add(100) ^= 4 };
    assert_eq!(client.ask(READ, 4096, 10, &[]), EIO);
    assert_eq!(client.ask(WRITE, 4000, 200, &[1; 200]), EIO);
    assert_eq!(client.read(0, 4096), [9; 4096]);
    assert_eq!(server.status().exports[0].failures, 2);
    // Replaced as a whole, it is well again.
    client.write(4096, &[3; 4096]);
    assert_eq!(client.read(4096, 4096), [3; 4096]);
    server.check();
}

#[test]
fn a_stopping_server_waits_for_block_clients_and_takes_no_new_ones() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd");
    // Without a client there is nothing to wait for.
    start(dir.path(), 4 * MIB, vec![export("disk", MIB)]).drain(100 * WATCHDOG);

    let server = start(dir.path(), 4 * MIB, vec![export("disk", MIB)]);
    let observer = server.observer();
    let mut client = Client::connect(&path, "disk");
    let draining = std::thread::spawn(move || server.drain(100 * WATCHDOG));
    until("it drains", || observer.status().draining);
    client.write(0, &[5; 4096]);
    assert_eq!(client.read(0, 4096), [5; 4096]);
    let mut late = UnixStream::connect(&path).unwrap();
    late.set_read_timeout(Some(WATCHDOG)).unwrap();
    late.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x0a\0\0\0\x04disk\0\0").unwrap();
    let mut answer = [0; 18 + 20];
    late.read_exact(&mut answer).unwrap();
    assert_eq!(answer[18 + 12..18 + 16], [0x80, 0, 0, 7]);
    assert!(!draining.is_finished());
    drop((client, late));
    draining.join().unwrap();
}

#[test]
fn block_clients_leave_places_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd");
    let small = ServerConfig { max_connections: 8, ..config(dir.path(), 4 * MIB, vec![export("disk", MIB)]) };
    let server = Server::start(small).unwrap();
    let mut clients = vec![Client::connect(&path, "disk"), Client::connect(&path, "disk")];
    let mut third = UnixStream::connect(&path).unwrap();
    third.set_read_timeout(Some(WATCHDOG)).unwrap();
    assert_eq!(third.read(&mut [0; 18]).unwrap(), 0, "closed without a greeting");
    assert_eq!((server.status().connections, server.status().failed_handshakes), (2, 1));
    clients.pop();
    until("its place is free", || server.status().connections == 1);
    assert_eq!(Client::connect(&path, "disk").ask(FLUSH, 0, 0, &[]), 0);
}
