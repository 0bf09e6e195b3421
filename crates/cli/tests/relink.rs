//! Connections between ranks that are really cut, by resets and by a network that ends in the middle: the run
//! goes on, and what it computes is right. And which ranks may not reconnect.
//!
//! The programs are in this binary, as in `launch.rs`: the launcher starts it again, once for each rank.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{BorrowedFd, RawFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rampool_net::transport::{Handshake, LocalPolicy, Stream};
use rampool_shared::{AllocOptions, Homes, Rank, Region, Shared, SharedConfig};
use rampool_sharing::control::{
    Control, FrameKind, Framed, Hello, Resume, SHARE_WIRE_VERSION, deframe, frame,
};
use rampool_testing::free_port;
use rampool_wire::session::{Encryption, PREFACE_BYTES, Preface, Refusal, Verdict};
use ranks::{DEADLINE, end};

mod ranks;
mod settings;

const PROGRAM: &str = "RAMPOOL_TEST_PROGRAM";
/// So many times each rank resets one of its connections.
const CUTS: &str = "RAMPOOL_TEST_CUTS";

/// This binary as a program, with nothing in its environment that says which rank it is.
fn alone(program: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    prepare(&mut command, program);
    command.args(["--exact", "this_binary_is_a_rank", "--nocapture", "--quiet"]);
    command
}

fn prepare(command: &mut Command, program: &str) {
    settings::clear(command);
    command
        .env(PROGRAM, program)
        .env("RAMPOOL_JOIN_S", "60")
        .env("RAMPOOL_DEADLINE_S", "60")
        .env("RAMPOOL_SAME_HOST", "socket");
    // A run that waits this long has missed that it need not.
    command.env("RAMPOOL_RECONNECT_S", "1000");
    command.stdout(Stdio::null()).stderr(Stdio::piped()).stdin(Stdio::null());
}

/// Under the launcher.
fn launch(ranks: u16, program: &str, variables: &[(&str, &str)]) -> (String, Option<i32>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
    prepare(&mut command, program);
    command.args(["launch", "-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap());
    command
        .args(["--exact", "this_binary_is_a_rank", "--nocapture", "--quiet"])
        .envs(variables.iter().copied());
    end(command.spawn().unwrap())
}

/// One rank, started by hand.
fn rank(program: &str, rank: u16, ranks: u16, port: u16) -> Command {
    let mut command = alone(program);
    command.env("RAMPOOL_RUN_KEY", "0123456789abcdef".repeat(4));
    command.env("RAMPOOL_RANK", rank.to_string()).env("RAMPOOL_RANKS", ranks.to_string());
    command.env("RAMPOOL_RENDEZVOUS", format!("127.0.0.1:{port}"));
    command
}

/// What the tests start. By itself, under the test harness, it is one rank alone.
#[test]
fn this_binary_is_a_rank() {
    let program = std::env::var(PROGRAM).unwrap_or_else(|_| "all".to_owned());
    let shared = Shared::join(SharedConfig::from_env().unwrap()).unwrap_or_else(|error| panic!("{error}"));
    let cuts: u64 = std::env::var(CUTS).map_or(0, |cuts| cuts.parse().unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let saboteur = scope.spawn(|| cut_connections(&shared, cuts, &is_over));
        match program.as_str() {
            "all" => {
                counter(&shared);
                relaxation(&shared);
                much_at_once(&shared);
            }
            "much at once" => much_at_once(&shared),
            "killed" => killed(&shared),
            "stopped" => stopped(&shared),
            "unauthenticated" => unauthenticated(&shared),
            other => panic!("no program {other}"),
        }
        is_over.store(true, Ordering::Release);
        let made = saboteur.join().unwrap();
        assert!(cuts == 0 || made > 0, "nothing was cut");
    });
    if std::env::var("RAMPOOL_TEST_CUT_BY_OTHERS").is_ok() {
        wait_for(|| shared.stats().reconnections > 0);
    }
    shared.close().unwrap_or_else(|error| panic!("{error}"));
}

fn wait_for(mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < DEADLINE, "it never comes");
        std::thread::yield_now();
    }
}

/// Resets connections of this process, in turn, each time the last one has been made again. Returns how many.
fn cut_connections(shared: &Shared, cuts: u64, is_over: &AtomicBool) -> u64 {
    let mut made = 0;
    while made < cuts && !is_over.load(Ordering::Acquire) {
        let connections: Vec<RawFd> =
            sockets(libc::SO_TYPE, libc::SOCK_STREAM).into_iter().filter(|&fd| is_connected(fd)).collect();
        let Some(&fd) = connections.get(usize::try_from(made).unwrap() % connections.len().max(1)) else {
            continue;
        };
        let before = shared.stats().reconnections;
        reset(fd);
        made += 1;
        wait_for(|| shared.stats().reconnections > before);
    }
    made
}

fn option(fd: RawFd, name: libc::c_int) -> Option<libc::c_int> {
    let (mut value, mut len) = (0_i32, libc::socklen_t::try_from(size_of::<i32>()).unwrap());
    // SAFETY: writes one integer; a number that names no socket is an error.
    let done = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
    (done == 0).then_some(value)
}

/// Descriptors of this process that are TCP sockets with this option so.
fn sockets(name: libc::c_int, value: libc::c_int) -> Vec<RawFd> {
    let is_tcp = |fd: RawFd| option(fd, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP);
    (3..256).filter(|&fd| is_tcp(fd) && option(fd, name) == Some(value)).collect()
}

fn is_connected(fd: RawFd) -> bool {
    // SAFETY: only asked for its peer; it may be closed meanwhile, which is an error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::net::getpeername(fd).is_ok()
}

/// As `ss -K` does: both ends see a reset, and what lay in the socket, either way, is gone.
fn reset(fd: RawFd) {
    // SAFETY: all zeroes is an address of no family.
    let nowhere: libc::sockaddr = unsafe { std::mem::zeroed() };
    // SAFETY: the address is valid for the call; on a TCP socket it ends the connection.
    unsafe {
        libc::connect(fd, &raw const nowhere, libc::socklen_t::try_from(size_of::<libc::sockaddr>()).unwrap())
    };
}

// --- programs ----------------------------------------------------------------------------------------------

/// Locks and barriers: every rank adds to one word under a lock.
fn counter(shared: &Shared) {
    const ROUNDS: u64 = 300;
    let region = shared.alloc(8192, AllocOptions::new()).unwrap();
    let word = region.at::<u64>(3);
    for round in 0..ROUNDS {
        shared.lock(7).unwrap();
        // SAFETY: the lock orders all accesses.
        unsafe { word.write_volatile(word.read_volatile() + 1) };
        shared.unlock(7).unwrap();
        if round % 50 == 0 {
            shared.barrier(1).unwrap();
        }
    }
    shared.barrier(2).unwrap();
    // SAFETY: no rank writes after the barrier.
    assert_eq!(unsafe { word.read_volatile() }, ROUNDS * u64::from(shared.ranks()));
    shared.barrier(3).unwrap();
}

/// Red and black over-relaxation of a small grid, in integers, against one thread's result.
fn relaxation(shared: &Shared) {
    const SIDE: usize = 96;
    const STEPS: usize = 30;
    let region = shared.alloc(SIDE * SIDE * 8, AllocOptions::new().homes(Homes::Blocked)).unwrap();
    let start = |at: usize| (at * 2_654_435_761) as u64 >> 3;
    let relax = |get: &dyn Fn(usize) -> u64, at: usize| {
        (get(at - 1).wrapping_add(get(at + 1)).wrapping_add(get(at - SIDE)).wrapping_add(get(at + SIDE))) / 4
            + get(at) % 7
    };
    let points = |rows: std::ops::Range<usize>, colour: usize| {
        rows.flat_map(move |row| {
            (1..SIDE - 1)
                .filter(move |column| (row + column) % 2 == colour)
                .map(move |column| row * SIDE + column)
        })
    };
    let mut expected: Vec<u64> = (0..SIDE * SIDE).map(start).collect();
    for step in 0..STEPS {
        for at in points(1..SIDE - 1, step % 2) {
            expected[at] = relax(&|at| expected[at], at);
        }
    }
    let (me, ranks) = (usize::from(shared.rank()), usize::from(shared.ranks()));
    let share = |rank: usize| 1 + (SIDE - 2) * rank / ranks;
    // SAFETY: rows are written by one rank, between barriers; the other colour's points are only read.
    let get = |at: usize| unsafe { region.at::<u64>(at).read_volatile() };
    // SAFETY: as above.
    let put = |at: usize, value: u64| unsafe { region.at::<u64>(at).write_volatile(value) };
    if me == 0 {
        (0..SIDE * SIDE).for_each(|at| put(at, start(at)));
    }
    shared.barrier(4).unwrap();
    for step in 0..STEPS {
        for at in points(share(me)..share(me + 1), step % 2) {
            put(at, relax(&get, at));
        }
        shared.barrier(5).unwrap();
    }
    assert!((0..SIDE * SIDE).all(|at| get(at) == expected[at]), "the grid is wrong");
    shared.barrier(6).unwrap();
}

/// Every rank changes all of what the next one is the home of: more than the window of a connection, both
/// ways.
fn much_at_once(shared: &Shared) {
    const WORDS: usize = 1 << 20;
    let ranks = usize::from(shared.ranks());
    let home = |rank: usize| Homes::At(Rank(u16::try_from((rank + 1) % ranks).unwrap()));
    let regions: Vec<Region> = (0..ranks)
        .map(|rank| shared.alloc(WORDS * 8, AllocOptions::new().page_bytes(65536).homes(home(rank))).unwrap())
        .collect();
    let me = usize::from(shared.rank());
    for round in 1..3 {
        for at in 0..WORDS {
            // SAFETY: this rank's until the barrier.
            unsafe { regions[me].at::<u64>(at).write_volatile((at * round) as u64) };
        }
        shared.barrier(7).unwrap();
        for at in 0..WORDS {
            // SAFETY: no rank writes between these barriers.
            let found = unsafe { regions[(me + 1) % ranks].at::<u64>(at).read_volatile() };
            assert_eq!(found, (at * round) as u64, "word {at} in round {round}");
        }
        shared.barrier(8).unwrap();
    }
}

fn killed(shared: &Shared) {
    shared.barrier(0).unwrap();
    if shared.rank() == 1 {
        // SAFETY: a signal to this process.
        unsafe { libc::raise(libc::SIGKILL) };
    }
    shared.barrier(1).unwrap();
}

/// Rank 0 stops, so that it cannot answer; then the connection to it is cut.
fn stopped(shared: &Shared) {
    let word = shared.alloc(4096, AllocOptions::new()).unwrap().at::<u64>(0);
    if shared.rank() == 0 {
        // SAFETY: no rank reads it before the barrier.
        unsafe { word.write_volatile(std::process::id().into()) };
    }
    shared.barrier(0).unwrap();
    // SAFETY: no rank writes after the barrier.
    let first = unsafe { word.read_volatile() };
    shared.barrier(1).unwrap();
    if shared.rank() == 0 {
        // SAFETY: a signal to this process.
        unsafe { libc::raise(libc::SIGSTOP) };
    } else {
        let is_stopped =
            |status: String| status.lines().any(|line| line.starts_with("State:") && line.contains('T'));
        wait_for(|| std::fs::read_to_string(format!("/proc/{first}/status")).is_ok_and(is_stopped));
        sockets(libc::SO_TYPE, libc::SOCK_STREAM).into_iter().filter(|&fd| is_connected(fd)).for_each(reset);
    }
    shared.barrier(2).unwrap();
}

/// Rank 0 accepts reconnecting ranks. Any other connection is refused with a reason, and the run goes on.
fn unauthenticated(shared: &Shared) {
    shared.barrier(0).unwrap();
    if shared.rank() == 0 {
        let listeners = sockets(libc::SO_ACCEPTCONN, 1);
        assert_eq!(listeners.len(), 1, "the rendezvous is free again");
        // SAFETY: it stays open while the rank lives.
        let name = rustix::net::getsockname(unsafe { BorrowedFd::borrow_raw(listeners[0]) }).unwrap();
        let port = std::net::SocketAddr::try_from(name).unwrap().port();
        let config = shared.config();
        let resume =
            Resume { run: config.run.clone(), rank: Rank(1), incarnation: 1, of: 2, attempt: 1, received: 0 };
        let hello = |run: &str| Control::Hello {
            hello: Hello {
                wire: SHARE_WIRE_VERSION,
                build: config.build.clone(),
                run: run.to_owned(),
                settings: String::new(),
                rank: Rank(1),
                ranks: config.ranks,
                port: 0,
                datagram_port: 0,
                incarnation: 5,
            },
        };
        for (said, word) in [
            (Control::Resume { resume: Resume { run: "another".into(), ..resume.clone() } }, "another run"),
            (
                Control::Resume { resume: resume.clone() },
                "another process than the one that joined as rank 1",
            ),
            (Control::Resume { resume: Resume { rank: Rank(77), ..resume } }, "no rank 77"),
            (hello(&config.run), "has begun without it"),
            (hello("another"), "another run"),
        ] {
            let why = say(port, config, &said);
            assert!(why.contains(word), "{said:?}: {why}");
        }
        assert_eq!(asked_without_key(port), Verdict::Refused(Refusal::KeyNeeded), "whatever it would say");
        // A silent connection, and one that sends garbage, delay no rank.
        let silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
        (&TcpStream::connect(("127.0.0.1", port)).unwrap()).write_all(&[0x5a; 400]).unwrap();
        let connections: Vec<RawFd> =
            sockets(libc::SO_TYPE, libc::SOCK_STREAM).into_iter().filter(|&fd| is_connected(fd)).collect();
        let before = shared.stats().reconnections;
        connections.into_iter().filter(|&fd| fd != std::os::fd::AsRawFd::as_raw_fd(&silent)).for_each(reset);
        wait_for(|| shared.stats().reconnections > before);
    }
    shared.barrier(1).unwrap();
}

/// What is answered to one that has no key.
fn asked_without_key(port: u16) -> Verdict {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(&Preface::ask(Encryption::Auto, false, 0, 7).encode()).unwrap();
    let mut answer = [0; PREFACE_BYTES];
    stream.read_exact(&mut answer).unwrap();
    Preface::parse(&answer).unwrap().verdict
}

/// Introduces itself as a rank would, says that, and returns why it is refused.
fn say(port: u16, config: &SharedConfig, control: &Control) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let policy =
        LocalPolicy { key: config.run_key.clone(), encryption: Encryption::Auto, features: 0, ucx: None };
    let mut handshake = Handshake::client(Stream::adopt(stream.try_clone().unwrap()).unwrap(), policy);
    // Kept until the end: what follows on this machine is plain.
    let mut link = None;
    wait_for(|| {
        link = handshake.advance::<()>().unwrap();
        link.is_some()
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut bytes = Vec::new();
    frame(FrameKind::Control, 0, &mut bytes, |out| control.encode(out));
    stream.write_all(&bytes).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let Ok(Framed::Whole { content, .. }) = deframe(&answer) else { panic!("no answer: {answer:?}") };
    match Control::decode(content) {
        Ok(Control::Refused { why }) => why,
        other => panic!("{other:?}"),
    }
}

// --- tests -------------------------------------------------------------------------------------------------

#[test]
fn resets_in_the_middle_of_everything_change_nothing() {
    for (ranks, protocol, cuts) in
        [(2, "hlrc", "40"), (3, "auto", "25"), (3, "lrc", "15"), (2, "sc", "25"), (4, "ibec", "10")]
    {
        let (said, code) = launch(ranks, "all", &[(CUTS, cuts), ("RAMPOOL_PROTOCOL", protocol)]);
        assert_eq!(code, Some(0), "{protocol}: {said}");
    }
}

#[test]
fn sealed_connections_and_those_next_to_datagrams_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.key");
    rampool_net::key::Key::generate().save_new(&path).unwrap();
    let key = ("RAMPOOL_KEY_FILE", path.to_str().unwrap());
    let (said, code) = launch(3, "all", &[(CUTS, "12"), key, ("RAMPOOL_ENCRYPTION", "on")]);
    assert_eq!(code, Some(0), "{said}");
    let (said, code) = launch(2, "all", &[(CUTS, "12"), ("RAMPOOL_TRANSPORT", "udp")]);
    assert_eq!(code, Some(0), "{said}");
}

/// A network that ends: what rank 1 and rank 0 say passes through here until so much has passed, wherever in
/// a frame that is.
#[test]
fn a_network_that_ends_in_the_middle_of_a_frame_loses_nothing() {
    for after in [30_000, 1_000_001, 7_654_321] {
        let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
        let (behind, port) = (free_port(), proxy.local_addr().unwrap().port());
        let start = |number: u16, port: u16| {
            rank("much at once", number, 2, port).env("RAMPOOL_TEST_CUT_BY_OTHERS", "1").spawn().unwrap()
        };
        let ranks = [start(0, behind), start(1, port)];
        let (client, _) = proxy.accept().unwrap();
        let server = loop {
            match TcpStream::connect(("127.0.0.1", behind)) {
                Ok(server) => break server,
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionRefused),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        std::thread::scope(|scope| {
            for (mut from, mut to) in [(&client, &server), (&server, &client)] {
                scope.spawn(move || {
                    let (mut left, mut bytes) = (after, vec![0; 8192]);
                    while left > 0 {
                        let room = left.min(bytes.len());
                        let Ok(count @ 1..) = from.read(&mut bytes[..room]) else { break };
                        if to.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                        left -= count;
                    }
                    // Both directions end.
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
            }
        });
        for child in ranks {
            let (said, code) = end(child);
            assert_eq!(code, Some(0), "after {after} bytes: {said}");
        }
    }
}

#[test]
fn a_rank_that_was_killed_is_not_waited_for() {
    for ranks in [2_u16, 3] {
        let port = free_port();
        let children: Vec<Child> =
            (0..ranks).map(|number| rank("killed", number, ranks, port).spawn().unwrap()).collect();
        let ended: Vec<(String, Option<i32>)> = children.into_iter().map(end).collect();
        assert_eq!(ended[1].1, None, "a signal");
        for (said, code) in
            [&ended[0], &ended[usize::from(ranks) - 1]].into_iter().filter(|(_, code)| code.is_some())
        {
            assert_eq!(*code, Some(87), "{said}");
            assert!(said.contains("rank 1 is lost: its process ended without finishing"), "{said}");
        }
    }
}

#[test]
fn only_the_process_that_was_met_may_come_back() {
    let (said, code) = launch(3, "unauthenticated", &[]);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn a_connection_that_cannot_be_made_again_ends_the_run_and_says_why() {
    for (time, word) in
        [("2", "reconnecting failed for 2 s"), ("0", "rank 0 is lost: its connection failed: ")]
    {
        let (said, code) = launch(2, "stopped", &[("RAMPOOL_RECONNECT_S", time)]);
        let messages: Vec<&str> = said.lines().filter(|line| line.starts_with("rampool: ")).collect();
        assert!(
            messages.len() == 1 && messages[0].contains(word) && messages[0].contains("rank 0 is lost"),
            "{said}"
        );
        assert_eq!(code, Some(87), "{said}");
    }
}
