//! Paged memory of the library with two copies of each page, on servers that are processes and are killed.

mod words;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rampool::Builder;
use rampool::builder::OpenError;
use rampool::direct::{Direct, DirectError};
use rampool::error::PoolError;
use rampool::pool::{Copies, PoolConfig};
use rampool::proto::units::ByteLen;
use rampool::region::{HandedOver, PagedMemory, Region};
use rampool::server::{Server, ServerConfig};
use rampool_kernel::probe::{Capabilities, NEEDED};
use rampool_pager::fault::FaultModeChoice;
use rampool_testing::skip;
use words::{mix, word};

const ROLE: &str = "TEST_COPIES_LISTEN";
const WATCHDOG: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;
const BYTES: usize = 24 * MIB;
const WORDS: usize = BYTES / 8;

/// Not a test by itself: a server in a process of its own, until it is killed.
#[test]
fn process() {
    let Ok(listen) = std::env::var(ROLE) else { return };
    let mut config = ServerConfig::new(256 << 20, listen.parse().unwrap());
    config.lock_memory = false;
    config.spin = Duration::ZERO;
    let server = Server::start(config).unwrap();
    println!("@ {}", server.addr());
    loop {
        std::thread::park();
    }
}

struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    fn start(listen: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "process", "--nocapture"]).env(ROLE, listen).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = out.find_map(|line| Some(line.unwrap().split_once("@ ")?.1.to_owned()));
        Self { child, address: address.expect("a server that starts says where") }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// An empty server at the same address.
    fn restart(&mut self) {
        self.kill();
        *self = Self::start(&self.address.clone());
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn servers<const N: usize>() -> [ServerProcess; N] {
    std::array::from_fn(|_| ServerProcess::start("127.0.0.1:0"))
}

fn builder(servers: &[ServerProcess]) -> Builder {
    let mut builder = Builder::new().memory(ByteLen(64 << 20)).local(ByteLen(2 << 20));
    for server in servers {
        builder.set("server", &server.address).unwrap();
    }
    builder
}

fn write(region: &Region, version: u64) {
    for index in 0..WORDS {
        word(region, index).store(mix(index as u64 + version), Ordering::Relaxed);
    }
}

fn check(region: &Region, version: u64) {
    for index in 0..WORDS {
        let read = word(region, index).load(Ordering::Relaxed);
        assert_eq!(read, mix(index as u64 + version), "word {index} of version {version}");
    }
}

/// For what happens in its own time.
fn wait_until(what: &str, memory: &PagedMemory, happened: impl Fn(&PagedMemory) -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !happened(memory) {
        assert!(Instant::now() < deadline, "never happened: {what}: {:?}", memory.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Each server is killed in turn, and comes back empty: nothing is lost, and each page has two copies again.
fn survives(fault_mode: FaultModeChoice) {
    let mut servers = servers::<2>();
    let memory = builder(&servers).fault_mode(fault_mode).open().unwrap();
    let region = memory.alloc(BYTES).unwrap();
    write(&region, 0);
    for (version, index) in (1..).zip([0, 1, 0]) {
        servers[index].kill();
        check(&region, version - 1);
        write(&region, version);
        check(&region, version);
        let lacking = memory.stats().lacking_pages;
        assert!(lacking > 0, "a server is gone, and no page lacks a copy");
        servers[index].restart();
        wait_until("two copies again", &memory, |memory| {
            let stats = memory.stats();
            stats.lacking_pages == 0 && stats.lost_mask == 0 && stats.stored_pages > 0
        });
        check(&region, version);
    }
    assert_eq!(memory.lost(), None);
}

#[test]
fn a_region_outlives_kill_9_of_either_server_again_and_again() {
    match Capabilities::probe().full {
        Ok(found) if found.has(NEEDED) => survives(FaultModeChoice::Full),
        _ => skip("uffd", "the kernel does not allow userfaultfd in full here"),
    }
}

#[test]
fn also_where_faults_are_caught_by_sigsegv() {
    match Capabilities::probe().segv {
        Ok(()) => survives(FaultModeChoice::Segv),
        Err(why) => skip("segv", &why.to_string()),
    }
}

#[test]
fn one_of_three_is_replaced_by_the_others_and_then_a_second_one_may_go() {
    let mut servers = servers::<3>();
    let memory = builder(&servers).fault_mode(FaultModeChoice::Segv).open().unwrap();
    let region = memory.alloc(BYTES).unwrap();
    write(&region, 0);
    for (version, server) in (0..).zip(&mut servers[..2]) {
        server.kill();
        check(&region, version);
        // Others take its place after some seconds; then there are two copies of all again.
        if version == 0 {
            let whole = |memory: &PagedMemory| memory.stats().lacking_pages == 0;
            wait_until("others hold its pages", &memory, whole);
        }
        write(&region, version + 1);
        check(&region, version + 1);
    }
    assert_eq!(memory.lost(), None);
}

/// How many copies a region has by default, and by request.
#[test]
fn two_servers_with_room_give_two_copies_and_one_is_told_apart() {
    let servers = servers::<2>();
    let room = |memory: &PagedMemory| {
        let error = memory.alloc(1 << 40).err().expect("more than there is").to_string();
        assert!(error.contains("66 MiB"), "usable memory is counted once: {error}");
    };
    room(&builder(&servers).open().unwrap());
    room(&builder(&servers).copies(Copies::Two).open().unwrap());
    room(&builder(&servers).copies(Copies::One).open().unwrap());
    let too_much = builder(&servers).memory(ByteLen(300 << 20));
    drop(too_much.open().unwrap());
    let refused = too_much.copies(Copies::Two).open().err().expect("600 MiB at servers that lend 512");
    assert!(matches!(refused, OpenError::Connect(_)), "{refused}");
    let one = builder(&servers[..1]);
    drop(one.open().unwrap());
    let refused = one.copies(Copies::Two).open().err().expect("a second server is needed").to_string();
    assert!(refused.contains("need two servers"), "{refused}");
    let refused = builder(&servers).copies(Copies::Two).open_direct().err().expect("one copy").to_string();
    assert!(refused.contains("has one copy"), "{refused}");
    // Named amounts alone: half of them is usable.
    let mut named = Builder::new().copies(Copies::Two).local(ByteLen(2 << 20));
    for server in &servers {
        named.set("server", &format!("{}=64M", server.address)).unwrap();
    }
    room(&named.open().unwrap());
}

fn reader(handed: &HandedOver) -> Direct {
    Direct::connect(&PoolConfig::attach(handed.lease().clone(), "reader")).unwrap()
}

/// What others open has one copy: a lost server is named, and nothing is read that may be out of date.
#[test]
fn what_is_handed_over_has_one_copy_and_says_so() {
    let mut servers = servers::<2>();
    let memory = builder(&servers).fault_mode(FaultModeChoice::Segv).open().unwrap();
    let region = memory.alloc(BYTES).unwrap();
    write(&region, 3);
    let handed = region.hand_over().unwrap();
    let adopted = reader(&handed).into_pool().adopt_region(handed.region());
    assert!(matches!(adopted, Err(PoolError::TwoCopies)), "{adopted:?}");
    let mut direct = reader(&handed);
    let opened = direct.open_ticket(handed.region()).unwrap();
    let named = direct.open_or_create("named", 4 << 20).unwrap();
    direct.put(named, 0, &vec![7; 4 << 20]).unwrap();
    servers[1].kill();
    let (mut lost, mut read) = (0, 0);
    for (of, from, value) in [(opened, handed.offset(), None), (named, 0, Some(7))] {
        for at in (0..4u64 << 20).step_by(256 << 10) {
            let mut bytes = [0; 8];
            match direct.get(of, from + at, &mut bytes) {
                Ok(()) => {
                    let word = value.map_or(mix(at / 8 + 3), |byte: u8| u64::from_le_bytes([byte; 8]));
                    assert_eq!(u64::from_le_bytes(bytes), word);
                    read += 1;
                }
                Err(DirectError::Pool(PoolError::Lost { server, .. })) => {
                    assert_eq!(server, servers[1].address);
                    lost += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert_eq!((lost, read), (16, 16), "each stripe of 256 KiB lies on one of the two");
    // The paged view goes on; what it hands over would need both.
    check(&region, 3);
    let refused = region.hand_over().unwrap_err().to_string();
    assert!(refused.contains(&servers[1].address) && refused.contains("one copy"), "{refused}");
    check(&region, 3);
}
