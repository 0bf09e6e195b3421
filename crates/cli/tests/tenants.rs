//! Tenants of a server process: keys from one master, the tenants file, SIGHUP, and what the log says.

use rampool_client::pool::{Pool, PoolConfig};
use rampool_net::key::Key;
use rampool_wire::units::ByteLen;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

mod settings;

const DEADLINE: Duration = Duration::from_secs(60);

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
    settings::clear(&mut command);
    command
}

fn rampool(arguments: &[&str]) -> std::process::Output {
    command().args(arguments).output().unwrap()
}

/// Runs a command that must succeed, and returns what it prints.
fn done(arguments: &[&str]) -> String {
    let output = rampool(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

struct Serving {
    child: Child,
    address: String,
    log: Arc<Mutex<String>>,
}

impl Serving {
    fn start(key: &Path, tenants: &Path) -> Self {
        let mut child = command()
            .args(["serve", "--memory", "64M", "--listen", "127.0.0.1:0", "--no-lock", "--log", "json"])
            .args(["--grace-ms", "60000", "--key-file"])
            .arg(key)
            .arg("--tenants")
            .arg(tenants)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").expect(&line).to_owned();
        let log = Arc::new(Mutex::new(String::new()));
        let (mut from, to) = (child.stderr.take().unwrap(), Arc::clone(&log));
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut some) {
                to.lock().unwrap().push_str(&String::from_utf8_lossy(&some[..n]));
            }
        });
        Self { child, address, log }
    }

    /// Waits until the log has so many lines with all of these words.
    fn says(&self, words: &[&str], times: usize) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let log = self.log.lock().unwrap().clone();
            if log.lines().filter(|line| words.iter().all(|word| line.contains(word))).count() >= times {
                return;
            }
            assert!(Instant::now() < deadline, "no {words:?} in {log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn hang_up(&self) {
        let pid = i32::try_from(self.child.id()).unwrap();
        // SAFETY: a signal to a child that was not waited for.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGHUP) }, 0);
    }

    fn status(&self, key: &Path) -> String {
        done(&["status", "--server", &self.address, "--key-file", key.to_str().unwrap(), "--json"])
    }

    fn pool(&self, key: &Path, bytes: u64) -> Result<Pool, String> {
        let mut config = PoolConfig::new(vec![self.address.parse().unwrap()], ByteLen(bytes), "test");
        config.key = Some(Key::load(key).unwrap());
        Pool::connect(&config).map_err(|error| error.to_string())
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Keys {
    dir: tempfile::TempDir,
    master: PathBuf,
}

impl Keys {
    fn make() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let master = dir.path().join("pool.key");
        done(&["key", master.to_str().unwrap()]);
        Self { dir, master }
    }

    fn derive(&self, tenant: &str, generation: &str) -> PathBuf {
        let path = self.dir.path().join(format!("{tenant}-{generation}.key"));
        let from = self.master.to_str().unwrap();
        done(&[
            "key",
            "--tenant",
            tenant,
            "--generation",
            generation,
            "--from",
            from,
            path.to_str().unwrap(),
        ]);
        path
    }

    fn tenants(&self, text: &str) -> PathBuf {
        let path = self.dir.path().join("tenants.toml");
        std::fs::write(&path, text).unwrap();
        path
    }
}

#[test]
fn keys_are_derived_from_a_master_only() {
    let keys = Keys::make();
    let alice = keys.derive("alice", "1");
    let refused = |arguments: &[&str], what: &str| {
        let output = rampool(arguments);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && told.contains(what), "{arguments:?}: {told}");
    };
    let (from, out) = (keys.master.to_str().unwrap(), keys.dir.path().join("x"));
    let out = out.to_str().unwrap();
    refused(&["key", "--tenant", "bob", "--from", alice.to_str().unwrap(), out], "the key of tenant alice");
    refused(&["key", "--tenant", "bob", out], "--from");
    refused(&["key", "--from", from, out], "--tenant");
    refused(&["key", "--tenant", "b b", "--from", from, out], "no name of a tenant");
    refused(&["key", "--tenant", "bob", "--from", from, alice.to_str().unwrap()], "exists");
    let tenants = keys.tenants("");
    let file = tenants.to_str().unwrap();
    let serve = ["serve", "--memory", "1M", "--listen", "127.0.0.1:0", "--tenants", file];
    refused(&serve, "--tenants needs the master key");
    refused(&[&serve[..], &["--key-file", alice.to_str().unwrap()]].concat(), "needs the master key");
}

#[test]
fn a_tenants_file_counts_is_read_again_and_a_broken_one_changes_nothing() {
    let keys = Keys::make();
    let tenants = keys.tenants("[default]\nmemory = \"4M\"\n\n[tenant.alice]\nmemory = \"16M\"\n");
    let server = Serving::start(&keys.master, &tenants);
    let (alice, bob) = (keys.derive("alice", "1"), keys.derive("bob", "1"));
    let _held = server.pool(&alice, 12 << 20).unwrap();
    server.says(&["lease granted", "\"tenant\":\"alice\"", "\"generation\":1", "12582912"], 1);
    let refused = server.pool(&bob, 8 << 20).map(drop).unwrap_err();
    // The server tells the client what is left of its tenant's memory, so it does not ask for more.
    assert!(refused.contains("4 MiB more are needed"), "{refused}");
    let seen = server.status(&bob);
    assert!(!seen.contains("alice") && seen.contains("\"memory_bytes\": 4194304"), "{seen}");
    assert!(server.status(&keys.master).contains("\"tenant\": \"alice\""));

    keys.tenants("[default]\nmemory = \"32M\"\n\n[tenant.alice]\nmemory = \"16M\"\nwieght = 2\n");
    server.hang_up();
    server.says(&["does not count", "tenants.toml, line 6, tenant.alice.wieght: unknown field"], 1);
    assert!(server.pool(&bob, 8 << 20).is_err(), "the settings from before stay");

    keys.tenants("[default]\nmemory = \"32M\"\n[tenant.alice]\nrevoked = [1]\n");
    server.hang_up();
    server.says(&["read the tenants file again"], 1);
    server.says(&["lease revoked", "\"tenant\":\"alice\"", "\"generation\":1"], 1);
    // The server frees what the lease held after it has revoked it.
    let deadline = Instant::now() + DEADLINE;
    let _bob = loop {
        match server.pool(&bob, 8 << 20) {
            Ok(pool) => break pool,
            Err(error) => assert!(error.contains("free") && Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let revoked = server.pool(&alice, 1 << 20).map(drop).unwrap_err();
    assert!(revoked.contains("revoked"), "{revoked}");
    server.pool(&keys.derive("alice", "2"), 1 << 20).unwrap();

    // Without the file: what was said before stays as well.
    std::fs::remove_file(&tenants).unwrap();
    server.hang_up();
    server.says(&["does not count", "cannot read the tenants file"], 1);
    assert!(server.pool(&alice, 1 << 20).is_err());
}

#[test]
fn a_server_does_not_start_with_a_broken_tenants_file() {
    let keys = Keys::make();
    let tenants = keys.tenants("[tenant.alice]\nweight = 1000\n");
    let (key, file) = (keys.master.to_str().unwrap(), tenants.to_str().unwrap());
    let output = rampool(&[
        "serve",
        "--memory",
        "1M",
        "--listen",
        "127.0.0.1:0",
        "--key-file",
        key,
        "--tenants",
        file,
    ]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && told.contains("line 2, tenant.alice.weight"), "{told}");
}

/// One client that asks again and again with a wrong ticket, over one connection, costs one line a minute.
#[test]
fn wrong_tickets_fill_no_log() {
    use rampool_net::transport::{LocalPolicy, Received, Urgency, connect};
    use rampool_wire::frame::{AttachLease, Header, LeaseId, LeaseToken, MemberId, Opcode, encode_frame};
    let keys = Keys::make();
    let server = Serving::start(&keys.master, &keys.tenants(""));
    let key = Some(Key::load(&keys.derive("alice", "1")).unwrap());
    let encryption = rampool_wire::session::Encryption::Auto;
    let policy = LocalPolicy { key, encryption, features: 0, ucx: None };
    let deadline = Instant::now() + DEADLINE;
    let mut link = connect::<()>(&server.address.parse().unwrap(), policy, deadline).unwrap();
    let attach = AttachLease {
        lease: LeaseId(1),
        token: LeaseToken([9; 16]),
        member: MemberId(0),
        pid: 1,
        name: "guess".into(),
        host: "here".into(),
    };
    for number in 0..500 {
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::AttachLease, number), &attach.encode(), 0);
        link.send_head(Urgency::Demand, &head, ());
        loop {
            link.flush().unwrap();
            match link.receive().unwrap() {
                Received::Blocked => assert!(link.wait(deadline).unwrap()),
                _ => break,
            }
        }
    }
    server.says(&["could not join a lease"], 1);
    let lines = server.log.lock().unwrap().matches("could not join a lease").count();
    assert!(lines <= 3, "{lines} lines for 500 requests");
}

/// What the kernel counts for a process.
fn resident_bytes(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Tenants do their worst: half of their connections take no answers, the others send a large put but for
/// its last byte. The server uses no more memory than the guide states, as the kernel counts it, and
/// lends what it has promised.
#[test]
fn a_server_full_of_the_worst_tenants_uses_what_the_guide_states() {
    use rampool_net::transport::{Link, LocalPolicy, Received, Urgency, connect};
    use rampool_wire::frame::{Header, Opcode, OpenLease, PageEntry, RegionId, Status, Window};
    use rampool_wire::frame::{encode_frame, encode_put};
    use rampool_wire::layout::Layout;
    use rampool_wire::units::{Extent, PageIndex};
    use std::io::Write;
    const CONNECTIONS: u64 = 24;
    const MIB: u64 = 1 << 20;
    let keys = Keys::make();
    let server = Serving::start(&keys.master, &keys.tenants(""));
    let shards = std::thread::available_parallelism().unwrap().get() as u64;
    // docs/guide/serve.md, "How much to lend".
    let stated = CONNECTIONS * (3 * MIB + (64 << 10)) + 32 * MIB + shards * 2 * MIB;
    let before = resident_bytes(server.child.id());
    let deadline = Instant::now() + DEADLINE;
    let key = Key::load(&keys.derive("alice", "1")).unwrap();
    let call = |link: &mut Link, opcode, arg, table: &[u8]| -> Header {
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(opcode, 1).with_arg(arg), table, 0);
        link.send_head(Urgency::Demand, &head, ());
        loop {
            link.flush().unwrap();
            match link.receive().unwrap() {
                Received::Blocked => assert!(link.wait(deadline).unwrap()),
                Received::Head(header) | Received::Bulk(header) => {
                    assert_eq!(header.status, Status::Ok);
                    return header;
                }
            }
        }
    };
    let mut links: Vec<Link> = (0..CONNECTIONS)
        .map(|number| {
            let encryption = rampool_wire::session::Encryption::Auto;
            let policy = LocalPolicy { key: Some(key.clone()), encryption, features: 0, ucx: None };
            let mut link = connect::<()>(&server.address.parse().unwrap(), policy, deadline).unwrap();
            let open = OpenLease { bytes: 16 << 10, pid: 1, name: "worst".into(), host: String::new() };
            call(&mut link, Opcode::OpenLease, 0, &open.encode());
            let region = RegionId(call(&mut link, Opcode::OpenRegion, 4 * MIB, b"zeroes").region);
            let mut head = Vec::new();
            if number % 2 == 0 {
                let layout = Layout::bytes(16).unwrap().hvector(1 << 16, 1, 64).unwrap();
                let mut table = Vec::new();
                Window { program: layout.program().clone(), from: 0, len: 1 << 20 }.encode(&mut table);
                let header = Header::request(Opcode::Gather, 7).with_region(region);
                encode_frame(&mut head, header, &table, 0);
                (0..24).for_each(|_| link.send_head(Urgency::Demand, &head, ()));
            } else {
                let header = Header::request(Opcode::Put, 7).with_region(region);
                let entries = [PageEntry { crc: 1, len: 4096 }; 512];
                encode_put(&mut head, header, &[Extent::new(PageIndex(0), 512)], &entries);
                head.resize(head.len() + (2 << 20) - 1, 7);
                let mut socket = std::fs::File::from(link.socket().try_clone_to_owned().unwrap());
                let mut rest = &head[..];
                while !rest.is_empty() {
                    match socket.write(rest) {
                        Ok(some) => rest = &rest[some..],
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                            assert!(Instant::now() < deadline, "the server does not take a put");
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            link
        })
        .collect();
    let mut looks = 0;
    while looks < 20 {
        assert!(Instant::now() < deadline, "it does not fill");
        links.iter_mut().for_each(|link| _ = link.flush().unwrap());
        let used = resident_bytes(server.child.id()) - before;
        assert!(used <= stated, "{used} bytes beyond --memory; the guide states {stated}");
        // The puts alone, and most of the replies that may wait.
        looks += u32::from(used >= CONNECTIONS / 2 * 2 * MIB + 16 * MIB);
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut pool = server.pool(&keys.derive("bob", "1"), 40 * MIB).unwrap();
    let region = pool.create_region().unwrap();
    drop((pool, region, links));
}
