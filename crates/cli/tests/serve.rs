//! The server as users start it: a process of its own.

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

mod settings;

const DEADLINE: Duration = Duration::from_secs(60);

fn rampool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
    settings::clear(&mut command);
    command
}

/// A server, ended with the test.
struct Served {
    child: Child,
    address: String,
}

impl Served {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").map(str::to_owned);
        let Some(address) = address else {
            let _ = child.kill();
            let mut said = String::new();
            child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("the server did not start: {line}{said}");
        };
        Self { child, address }
    }

    fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.child.id()).unwrap();
        // SAFETY: a child of ours that has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    /// Waits for its end. Returns the exit code and what it logged.
    fn end(mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + DEADLINE;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        (self.child.wait().unwrap().code(), log)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn status(address: &str, key: Option<&Path>, more: &[&str]) -> Output {
    let mut command = rampool();
    command.args(["status", "--server", address]).args(more);
    if let Some(key) = key {
        command.arg("--key-file").arg(key);
    }
    command.output().unwrap()
}

#[test]
fn a_server_says_when_it_is_ready_tells_its_status_and_stops_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let notify = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(DEADLINE)).unwrap();
    let ready = dir.path().join("ready");
    let mut command = rampool();
    command
        .args([
            "serve",
            "--memory",
            "64M",
            "--listen",
            "127.0.0.1:0",
            "--no-lock",
            "--log",
            "json",
            "--ready-file",
        ])
        .arg(&ready);
    let server = Served::start(command.env("NOTIFY_SOCKET", dir.path().join("notify")));
    let mut said = [0; 200];
    let n = notify.recv(&mut said).unwrap();
    assert!(String::from_utf8_lossy(&said[..n]).contains("READY=1"));
    assert_eq!(std::fs::read_to_string(&ready).unwrap().trim(), server.address);

    let shown = status(&server.address, None, &[]);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.status.success() && text.contains("64 MiB"), "{text}");
    let json = status(&server.address, None, &["--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json[0]["status"]["memory_bytes"], 64 << 20);

    server.signal(libc::SIGTERM);
    let n = notify.recv(&mut said).unwrap();
    assert!(String::from_utf8_lossy(&said[..n]).contains("STOPPING=1"));
    let address = server.address.clone();
    let (code, log) = server.end();
    assert_eq!(code, Some(0), "{log}");
    for line in log.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|_| panic!("not JSON: {line}"));
    }
    let gone = status(&address, None, &["--timeout-ms", "2000"]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(String::from_utf8(gone.stdout).unwrap().contains(&format!("cannot reach {address}")));
}

/// Passes one connection on to a server; later ones have no answer, as those to a machine that hangs.
fn answers_once(server: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(server).unwrap();
        let (mut asks, mut from_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from_client, &mut asks));
        let _ = std::io::copy(&mut server, &mut client);
        let silent: Vec<_> = listener.incoming().collect();
        drop(silent);
    });
    address
}

#[test]
fn a_server_that_drains_has_ended_when_nothing_listens_there_and_not_when_it_is_silent() {
    let serve = || Served::start(rampool().args(["serve", "--memory", "8M", "--listen", "127.0.0.1:0"]));
    let drain = |address: &str| rampool().args(["drain", address, "--timeout", "1"]).output().unwrap();
    let server = serve();
    let drained = drain(&server.address);
    assert_eq!(drained.status.code(), Some(0), "{drained:?}");
    assert!(String::from_utf8_lossy(&drained.stdout).ends_with("has ended\n"), "{drained:?}");
    assert_eq!(server.end().0, Some(0));

    let server = serve();
    let address = answers_once(server.address.clone());
    let drained = drain(&address);
    let said = String::from_utf8_lossy(&drained.stderr);
    assert_eq!(drained.status.code(), Some(125), "{drained:?}");
    assert!(said.contains(&format!("whether {address} has ended is not known")), "{said}");
    assert_eq!((drained.stdout, server.end().0), (Vec::new(), Some(0)), "it was asked to drain");
}

#[test]
fn a_key_is_made_once_and_needed_where_the_server_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("pool.key");
    assert!(rampool().arg("key").arg(&key).output().unwrap().status.success());
    assert!(
        !rampool().arg("key").arg(&key).output().unwrap().status.success(),
        "it must not overwrite a key"
    );
    let mut command = rampool();
    let server = Served::start(
        command
            .args(["serve", "--memory", "1M", "--listen", "0.0.0.0:0", "--no-lock", "--key-file"])
            .arg(&key),
    );
    let port = server.address.rsplit_once(':').unwrap().1.to_owned();
    let address = format!("127.0.0.1:{port}");
    assert!(status(&address, Some(&key), &["--encryption", "on"]).status.success());
    let keyless = status(&address, None, &[]);
    assert_eq!(keyless.status.code(), Some(1));
    assert!(String::from_utf8(keyless.stdout).unwrap().contains("--key-file"));
    server.signal(libc::SIGINT);
    let (code, log) = server.end();
    assert_eq!(code, Some(0));
    assert!(log.contains("handshake failed"), "{log}");
}

#[test]
fn a_log_that_cannot_be_written_ends_no_server() {
    let dir = tempfile::tempdir().unwrap();
    for (name, start) in [
        ("full disk", "exec \"$0\" \"$@\" 2>/dev/full"),
        ("longest file", "ulimit -f 0; exec \"$0\" \"$@\" 2>>\"$LOG\""),
    ] {
        let mut command = Command::new("sh");
        settings::clear(&mut command);
        command.env("LOG", dir.path().join("log")).args(["-c", start, env!("CARGO_BIN_EXE_rampool")]);
        let server =
            Served::start(command.args(["serve", "--memory", "1M", "--listen", "127.0.0.1:0", "--no-lock"]));
        for _ in 0..2 {
            visit_unauthenticated(&server.address);
            assert!(status(&server.address, None, &[]).status.success(), "{name}");
        }
        server.signal(libc::SIGTERM);
        assert_eq!(server.end().0, Some(0), "{name}");
    }
}

/// Sends what is no preface, and waits until the server has closed the connection, and said so in its log.
fn visit_unauthenticated(address: &str) {
    use std::io::Write;
    let mut unauthenticated = std::net::TcpStream::connect(address).unwrap();
    unauthenticated.write_all(&[7; 64]).unwrap();
    let _ = unauthenticated.read_to_end(&mut Vec::new());
}

/// The log goes to a full pipe, which is not read until the server has ended.
#[test]
fn a_log_that_is_not_read_delays_no_client() {
    use rampool_kernel::output::write_if_room;
    use std::os::fd::AsFd;
    let (mut reader, writer) = std::io::pipe().unwrap();
    while write_if_room(writer.as_fd(), &[b'x'; 4096]) {}
    let mut command = rampool();
    command.args([
        "serve",
        "--memory",
        "1M",
        "--listen",
        "127.0.0.1:0",
        "--no-lock",
        "--shards",
        "1",
        "--log",
        "json",
    ]);
    let mut child = command.stdout(Stdio::piped()).stderr(writer).spawn().unwrap();
    drop(command);
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let server = Served { child, address: line.trim().strip_prefix("listening on ").unwrap().to_owned() };
    for _ in 0..3 {
        visit_unauthenticated(&server.address);
        assert!(status(&server.address, None, &[]).status.success());
    }
    server.signal(libc::SIGTERM);
    let mut server = server;
    let deadline = Instant::now() + DEADLINE;
    while server.child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "the server does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
    drop(server);
    // What found room is whole.
    let mut log = String::new();
    reader.read_to_string(&mut log).unwrap();
    assert!(
        log.trim_start_matches('x')
            .lines()
            .all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()),
        "{log}"
    );
}

/// Every connection that is no client counts, and few are logged.
#[test]
fn repeated_unauthenticated_visits_cost_the_log_few_lines() {
    const TIMES: u64 = 500;
    let mut command = rampool();
    let server = Served::start(command.args([
        "serve",
        "--memory",
        "1M",
        "--listen",
        "127.0.0.1:0",
        "--no-lock",
        "--log",
        "json",
    ]));
    for _ in 0..TIMES {
        visit_unauthenticated(&server.address);
    }
    server.signal(libc::SIGTERM);
    let (code, log) = server.end();
    assert_eq!(code, Some(0));
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let failed: Vec<_> = lines
        .iter()
        .filter(|line| line["message"].as_str().unwrap().starts_with("handshake failed"))
        .collect();
    assert_eq!(failed.iter().map(|line| line["times"].as_u64().unwrap_or(1)).sum::<u64>(), TIMES, "{log}");
    // Two for each minute that this took.
    assert!(failed.len() < 20, "{log}");
    assert!(
        failed
            .iter()
            .all(|line| line["error"].as_str().unwrap().contains("does not speak rampool's protocol")),
        "{log}"
    );
}

/// How often a server's only shard has fallen asleep.
fn sleeps(server: &Served) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.child.id())).unwrap();
    let mut statuses =
        tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok());
    let shard = statuses.find(|status| status.starts_with("Name:\trampool-shard0\n")).unwrap();
    let count = shard.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    count.trim().parse().unwrap()
}

/// Connections that there are no descriptors for wait until others end, and the server does nothing
/// meanwhile.
#[test]
fn a_server_without_descriptors_left_sleeps_until_some_are_given_back() {
    use rampool_wire::session::{Encryption, PREFACE_BYTES, Preface};
    use std::io::Write;
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new("sh");
    settings::clear(&mut command);
    command.env("LOG", log.path()).args([
        "-c",
        "ulimit -n 40; exec \"$0\" \"$@\" 2>>\"$LOG\"",
        env!("CARGO_BIN_EXE_rampool"),
    ]);
    let server = Served::start(command.args([
        "serve",
        "--memory",
        "1M",
        "--listen",
        "127.0.0.1:0",
        "--no-lock",
        "--shards",
        "1",
    ]));
    let said = || std::fs::read_to_string(log.path()).unwrap();
    let deadline = Instant::now() + DEADLINE;
    // A thread of its own writes the log, so a line may come after the address.
    let wait_for = |line: &str| {
        while !said().contains(line) {
            assert!(Instant::now() < deadline, "{}", said());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_for("fewer descriptors");
    // Clients, which new connections do not end.
    let clients: Vec<_> = (0..60)
        .map(|_| {
            let mut client = std::net::TcpStream::connect(&server.address).unwrap();
            client.write_all(&Preface::ask(Encryption::Auto, false, 0, 1).encode()).unwrap();
            client
        })
        .collect();
    wait_for("could not accept a connection");
    let before = sleeps(&server);
    while sleeps(&server) < before + 3 {
        assert!(Instant::now() < deadline, "the shard does not sleep");
        std::thread::sleep(Duration::from_millis(5));
    }
    for mut client in clients {
        // The first have their answer; the last have it once the first are gone.
        client.read_exact(&mut [0; PREFACE_BYTES]).unwrap();
    }
    assert!(status(&server.address, None, &[]).status.success());
    assert_eq!(said().matches("could not accept a connection").count(), 1, "{}", said());
}

/// Since version 254, systemd grants credentials by an access list: the group bits are the mask of that list.
#[test]
fn a_key_that_systemd_hands_over_is_taken_and_others_like_it_are_not() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("pool.key");
    assert!(rampool().arg("key").arg(&key).output().unwrap().status.success());
    let mode = |mode| std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
    let serve = |credentials: Option<&Path>| {
        let mut command = rampool();
        command
            .args(["serve", "--memory", "1M", "--listen", "127.0.0.1:0", "--no-lock", "--key-file"])
            .arg(&key);
        command
            .env_remove("CREDENTIALS_DIRECTORY")
            .envs(credentials.map(|directory| ("CREDENTIALS_DIRECTORY", directory)));
        command
    };
    mode(0o440);
    let server = Served::start(&mut serve(Some(dir.path())));
    server.signal(libc::SIGTERM);
    assert_eq!(server.end().0, Some(0));
    for (rights, credentials) in [(0o440, None), (0o440, Some(Path::new("/"))), (0o444, Some(dir.path()))] {
        mode(rights);
        let output = serve(credentials).output().unwrap();
        assert_eq!(output.status.code(), Some(125));
        assert!(
            String::from_utf8(output.stderr).unwrap().contains("can be read by others"),
            "{rights:o} {credentials:?}"
        );
    }
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let refuse = |arguments: &[&str]| {
        let output = rampool().arg("serve").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(125));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refuse(&["--memory", "1M", "--listen", "0.0.0.0:0"]).contains("needs a key"));
    assert!(
        refuse(&["--memory", "1M", "--listen", "127.0.0.1:0", "--key-file", "/nonexistent"])
            .contains("/nonexistent")
    );
    assert!(refuse(&["--listen", "127.0.0.1:0"]).contains("how much memory"));
}

#[test]
fn a_stack_that_is_too_small_is_named() {
    let with_stack = |kib: &str| {
        let command = format!("ulimit -s {kib}; exec \"$0\" --version");
        Command::new("sh").args(["-c", &command, env!("CARGO_BIN_EXE_rampool")]).output().unwrap()
    };
    let refused = with_stack("64");
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(
        (refused.status.code(), said.contains("64 KiB is too small (ulimit -s): at least 256 KiB")),
        (Some(125), true),
        "{said}"
    );
    assert!(with_stack("256").status.success());
}

/// The variable that makes a process of this test a client; it has the server's address.
const UCX_CLIENT: &str = "RAMPOOL_TEST_UCX_CLIENT";

/// A client over UCX in a process of its own, which does what it is told by lines and answers each.
struct UcxClient(Child);

impl UcxClient {
    fn start(address: &str, transports: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "--nocapture", "a_client_over_ucx_in_a_process_of_its_own"])
            .env(UCX_CLIENT, address);
        Self(command.env("UCX_TLS", transports).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// What the client answers; what the test's own harness prints is passed over.
    fn told(&mut self, what: &str) -> String {
        use std::io::Write;
        writeln!(self.0.stdin.as_mut().unwrap(), "{what}").unwrap();
        let mut line = Vec::new();
        let out = self.0.stdout.as_mut().unwrap();
        loop {
            let mut byte = [0];
            assert_eq!(out.read(&mut byte).unwrap(), 1, "the client has ended");
            match byte[0] {
                b'\n' => match String::from_utf8_lossy(&line).split_once("answer: ") {
                    Some((_, answer)) => return answer.to_owned(),
                    None => line.clear(),
                },
                byte => line.push(byte),
            }
        }
    }
}

impl Drop for UcxClient {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test but where [`UCX_CLIENT`] is set.
#[test]
fn a_client_over_ucx_in_a_process_of_its_own() {
    let Ok(address) = std::env::var(UCX_CLIENT) else { return };
    let server: rampool_client::pool::ServerSpec = address.parse().unwrap();
    let mut config = rampool_client::pool::PoolConfig::new(
        vec![server],
        rampool_wire::units::ByteLen(8 << 20),
        "ucx-test",
    );
    config.op_deadline = DEADLINE;
    let mut direct = rampool_client::direct::Direct::connect(&config).unwrap();
    let region = direct.create(4 << 20).unwrap();
    for line in std::io::stdin().lines() {
        let seed = line.unwrap().len();
        let bytes: Vec<u8> =
            (0..3_000_000usize).map(|at| (at.wrapping_mul(seed) >> 7).to_le_bytes()[0]).collect();
        let mut back = vec![0; bytes.len()];
        let done = direct.put(region, 5000, &bytes).and_then(|()| direct.get(region, 5000, &mut back));
        println!(
            "answer: {}",
            done.map_or_else(
                |error| error.to_string(),
                |()| if back == bytes { "same" } else { "other" }.to_owned()
            )
        );
    }
}

/// Over each kind of transport: either side is killed, the other notices, and a server that comes again
/// serves again.
#[test]
fn the_survivor_of_two_over_ucx_notices_and_goes_on() {
    for transports in ["tcp", "posix,cma"] {
        let dir = tempfile::tempdir().unwrap();
        let start = |listen: &str| {
            let mut command = rampool();
            command.args(["serve", "--memory", "64M", "--no-lock", "--grace-ms", "100", "--listen", listen]);
            command
                .args(["--ucx-clients", "trusted"])
                .arg("--listen")
                .arg(format!("unix:{}", dir.path().join("s").display()));
            Served::start(command.env("UCX_TLS", transports))
        };
        let server = start("ucx:127.0.0.1:0");
        assert!(server.address.starts_with("ucx:127.0.0.1:"), "{}", server.address);
        let json = || {
            let json = status(&server.address, None, &["--json"]);
            serde_json::from_slice::<serde_json::Value>(&json.stdout).unwrap()[0]["status"].clone()
        };
        let mut first = UcxClient::start(&server.address, transports);
        let mut second = UcxClient::start(&server.address, transports);
        assert_eq!((first.told("123"), second.told("12345")), ("same".into(), "same".into()), "{transports}");
        let leases = json()["leases"].clone();
        assert_eq!(leases[0]["members"][0]["means"], "ucx", "{leases}");
        drop(first);
        let deadline = Instant::now() + DEADLINE;
        while json()["leases"].as_array().unwrap().len() != 1 {
            assert!(
                Instant::now() < deadline,
                "the server does not notice that a client was killed: {}",
                json()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(second.told("1"), "same", "the other client is served on");
        let address = server.address.clone();
        server.signal(libc::SIGKILL);
        server.end();
        let error = second.told("1234567");
        assert!(error.contains(&address), "{error}");
        let _server = start(&address);
        let mut third = UcxClient::start(&address, transports);
        assert_eq!(third.told("12"), "same", "{transports}");
    }
}

/// `rampool run` refuses UCX, and says why.
#[test]
fn a_program_that_knows_nothing_of_rampool_is_not_given_ucx() {
    let out = rampool()
        .args(["run", "--server", "ucx:127.0.0.1:1", "--local", "64M", "--", "/bin/true"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        !out.status.success() && said.contains("ucx:127.0.0.1:1") && said.contains("HOST:PORT"),
        "{said}"
    );
}
