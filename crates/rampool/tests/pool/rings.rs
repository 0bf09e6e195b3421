//! Servers on this machine, reached through shared memory.

use super::*;
use rampool::direct::Direct;
use rampool_net::transport::{Endpoint, Means, SameHost};
use std::path::Path;

fn at(dir: &Path, name: &str) -> ServerConfig {
    ServerConfig { listen: vec![Endpoint::Unix(dir.join(name))], ..server_config(64 * MIB) }
}

fn means(pool: &Pool) -> Vec<Option<Means>> {
    pool.stats().servers.iter().map(|server| server.means).collect()
}

#[test]
fn pages_come_back_through_shared_memory_whichever_side_sleeps_or_spins() {
    let dir = tempfile::tempdir().unwrap();
    for (spin, seed) in [(Duration::ZERO, 1), (Duration::from_millis(1), 2)] {
        let servers: Vec<_> = ["a", "b"]
            .map(|name| Server::start(ServerConfig { spin, ..at(dir.path(), name) }).unwrap())
            .into();
        let mut pool = Pool::connect(&config(&[&servers[0], &servers[1]], 48 * MIB)).unwrap();
        assert_eq!(means(&pool), [Some(Means::RINGS), Some(Means::RINGS)]);
        exercise(&mut pool, seed, 1500);
        let members: Vec<_> =
            servers[0].status().leases[0].members.iter().map(|member| member.means.clone()).collect();
        assert_eq!(members, ["rings"]);
        pool.close();
        for server in servers {
            assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
            server.check();
        }
    }
}

#[test]
fn many_clients_at_once_are_each_served_and_woken() {
    let dir = tempfile::tempdir().unwrap();
    // More than a shard keeps awake.
    let server = Server::start(ServerConfig { shards: 1, ..at(dir.path(), "s") }).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..24 {
            let server = &server;
            scope.spawn(move || {
                let mut pool = Pool::connect(&config(&[server], 2 * MIB)).unwrap();
                exercise_pages(&mut pool, seed, 60, 200);
                pool.close();
            });
        }
    });
    assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
    server.check();
}

#[test]
fn megabytes_and_elements_of_the_direct_view_travel_through_shared_memory() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(at(dir.path(), "s")).unwrap();
    let mut direct = Direct::connect(&config(&[&server], 48 * MIB)).unwrap();
    assert_eq!(means(direct.pool()), [Some(Means::RINGS)]);
    let region = direct.create(16 * MIB).unwrap();
    let bytes: Vec<u8> = (0..16 * MIB).map(|n| ((n * n) >> 7) as u8).collect();
    for (at, part) in (0..).step_by(3_000_000).zip(bytes.chunks(3_000_000)) {
        direct.put(region, at, part).unwrap();
    }
    let mut back = vec![0; bytes.len()];
    direct.get(region, 0, &mut back).unwrap();
    assert!(back == bytes);
    for n in 0..2000u64 {
        let at = mix(n) % (16 * MIB - 8);
        let mut word = [0; 8];
        direct.get(region, at, &mut word).unwrap();
        assert_eq!(word, bytes[at as usize..][..8]);
    }
    direct.free(region);
}

#[test]
fn the_way_is_the_users_choice() {
    let dir = tempfile::tempdir().unwrap();
    let with = Server::start(at(dir.path(), "with")).unwrap();
    let without = Server::start(ServerConfig { rings: false, ..at(dir.path(), "without") }).unwrap();
    let connect = |server: &RunningServer, same_host| {
        let mut config = config(&[server], 8 * MIB);
        config.same_host = Some(same_host);
        Pool::connect(&config)
    };
    for (server, same_host, want) in [
        (&with, SameHost::Auto, Means::RINGS),
        (&with, SameHost::Rings, Means::RINGS),
        (&with, SameHost::Socket, Means::UNIX_SOCKET),
        (&without, SameHost::Auto, Means::UNIX_SOCKET),
        (&without, SameHost::Socket, Means::UNIX_SOCKET),
    ] {
        let mut pool = connect(server, same_host).unwrap();
        assert_eq!(means(&pool), [Some(want)]);
        exercise_pages(&mut pool, 3, 100, 500);
        pool.close();
    }
    let error = connect(&without, SameHost::Rings).err().expect("there are no rings").to_string();
    assert!(error.contains("unix:") && error.contains("--no-rings"), "{error}");
    // Over TCP there is nothing to insist on.
    assert_eq!(means(&connect(&serve(16 * MIB), SameHost::Rings).unwrap()), [Some(Means::TCP)]);
}

/// Ends the socket next to the rings, as a server does that gives the client up.
pub(super) fn cut(pool: &Pool) {
    let mut fds = Vec::new();
    pool.poll_fds(&mut fds);
    // SAFETY: a descriptor of the pool's, which stays open.
    assert_eq!(unsafe { libc::shutdown(fds[0].fd, libc::SHUT_RDWR) }, 0);
}

#[test]
fn a_broken_connection_is_made_again_with_new_memory() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(at(dir.path(), "s")).unwrap();
    let mut pool = Pool::connect(&config(&[&server], 32 * MIB)).unwrap();
    let region = pool.create_region().unwrap();
    for round in 1..6 {
        store(&mut pool, region, extent(0, 300), round);
        cut(&pool);
        assert!(
            fetch(&mut pool, region, &[extent(0, 300)]) == expected(&[extent(0, 300)], round),
            "round {round}"
        );
        // The answer may have come through the memory before either side saw the socket's end.
        let deadline = Instant::now() + WATCHDOG;
        while pool.stats().servers[0].reconnects < u64::from(round) {
            assert!(Instant::now() < deadline, "round {round}: no client reconnects");
            assert!(pool.next_event(Instant::now() + Duration::from_millis(10)).unwrap().is_none());
        }
        assert_eq!(means(&pool), [Some(Means::RINGS)]);
    }
    assert_eq!(pool.stats().servers[0].reconnects, 5);
}

#[test]
fn a_server_that_was_started_again_is_lost_and_the_next_pool_is_well() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(at(dir.path(), "s")).unwrap();
    let mut pool = Pool::connect(&config(&[&server], 32 * MIB)).unwrap();
    let region = pool.create_region().unwrap();
    store(&mut pool, region, extent(0, 8), 1);
    server.stop();
    let server = Server::start(at(dir.path(), "s")).unwrap();
    let mut memory = vec![0; 8 * OS_PAGE_BYTES];
    // SAFETY: the memory lives until the fetch's event.
    unsafe { pool.fetch(region, 2, &[extent(0, 8)], memory.as_mut_ptr(), true) };
    assert!(matches!(next(&mut pool), PoolEvent::Lost { .. }));
    assert!(matches!(next(&mut pool), PoolEvent::Failed { token: 2, .. }));
    drop(pool);
    let mut pool = Pool::connect(&config(&[&server], 32 * MIB)).unwrap();
    assert_eq!(means(&pool), [Some(Means::RINGS)]);
    exercise_pages(&mut pool, 9, 100, 500);
}

/// This test again, in a process of its own, told by the environment what it is to be there. Ends with the
/// test.
struct Other(std::process::Child);

const ROLE: &str = "TEST_OTHER_PROCESS";

impl Other {
    /// Returns when it has said `ready`.
    fn start(test: &str, role: &str) -> Self {
        use std::io::{BufRead, BufReader};
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(ROLE, role).stdout(std::process::Stdio::piped());
        let mut other = Self(command.spawn().unwrap());
        let said = BufReader::new(other.0.stdout.take().unwrap());
        assert!(
            said.lines().map_while(Result::ok).any(|line| line.contains("ready")),
            "the other process has ended"
        );
        other
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Keeps many stores and fetches under way until a server is lost.
fn pump(pool: &mut Pool, mut started: impl FnMut()) {
    let region = pool.create_region().unwrap();
    let pages = 512;
    let memory: Vec<u8> = extent(0, pages).pages().flat_map(|page| content(page.0, 1)).collect();
    let mut back = vec![0; memory.len()];
    for round in 0.. {
        // SAFETY: both live until their events, or the pool's loss, after which nothing touches them.
        unsafe {
            pool.store(region, 1, &[(extent(0, pages), memory.as_ptr())]);
            pool.fetch(region, 2, &[extent(600, pages)], back.as_mut_ptr(), true);
        }
        if round == 10 {
            started();
        }
        let mut ended = 0;
        while ended < 2 {
            match next(pool) {
                PoolEvent::Fetched { .. } | PoolEvent::Stored { .. } => ended += 1,
                PoolEvent::Lost { .. } => return,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_client_that_is_killed_in_the_middle_leaves_nothing_behind() {
    if let Ok(address) = std::env::var(ROLE) {
        let spec = ServerSpec { endpoint: address.parse().unwrap(), memory: None };
        let mut pool = Pool::connect(&PoolConfig::new(vec![spec], ByteLen(32 * MIB), "killed")).unwrap();
        assert_eq!(means(&pool), [Some(Means::RINGS)]);
        return pump(&mut pool, || println!("ready"));
    }
    let dir = tempfile::tempdir().unwrap();
    let config = ServerConfig {
        grace: Duration::from_millis(50),
        spin: Duration::from_micros(100),
        ..at(dir.path(), "s")
    };
    let server = Server::start(config).unwrap();
    let others: Vec<_> = (0..2)
        .map(|_| {
            Other::start(
                "rings::a_client_that_is_killed_in_the_middle_leaves_nothing_behind",
                &server.addr().to_string(),
            )
        })
        .collect();
    others.into_iter().for_each(Other::kill);
    assert!(server.wait_until_idle(Instant::now() + WATCHDOG), "something is left: {:?}", server.status());
    server.check();
}

#[test]
fn a_server_that_is_killed_in_the_middle_is_lost_at_once() {
    if let Ok(path) = std::env::var(ROLE) {
        let config = ServerConfig { listen: vec![Endpoint::Unix(path.into())], ..server_config(64 * MIB) };
        let _server = Server::start(config).unwrap();
        println!("ready");
        // Until it is killed, or the test that wants that has ended.
        std::thread::sleep(2 * WATCHDOG);
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let mut other = Some(Other::start(
        "rings::a_server_that_is_killed_in_the_middle_is_lost_at_once",
        path.to_str().unwrap(),
    ));
    let spec = ServerSpec { endpoint: Endpoint::Unix(path), memory: None };
    let mut pool = Pool::connect(&PoolConfig::new(vec![spec], ByteLen(32 * MIB), "left alone")).unwrap();
    assert_eq!(means(&pool), [Some(Means::RINGS)]);
    pump(&mut pool, || other.take().unwrap().kill());
    assert_eq!(means(&pool), [None]);
}
