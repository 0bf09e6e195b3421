//! A region that is paged here and read directly by another process, while its owner goes on with it.
#![allow(clippy::cast_possible_truncation)]

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rampool::direct::{Direct, DirectError};
use rampool::pool::{Pool, PoolConfig, RegionTicket, ServerSpec};
use rampool::proto::layout::Layout;
use rampool::proto::units::ByteLen;
use rampool::server::{RunningServer, Server, ServerConfig};
use rampool_kernel::probe::{Capabilities, NEEDED};
use rampool_pager::fault::FaultModeChoice;
use rampool_pager::pager::Waiting;
use rampool_pager::region::{HandOverError, HandedOver, PagedConfig, PagedMemory, Region, RegionAdvice};
use rampool_testing::skip;

const MIB: usize = 1 << 20;
const BYTES: usize = 24 * MIB;
const LOCAL: usize = 6 * MIB;
/// Given up before the first hand-over.
const DISCARDED: std::ops::Range<usize> = 9 * MIB..10 * MIB;
const HANDED: &str = "TEST_HANDED_OVER";
const VERSION: &str = "TEST_VERSION";
const WATCHDOG: Duration = Duration::from_secs(60);

fn serve(bytes: usize) -> RunningServer {
    let mut config = ServerConfig::new(bytes as u64, "127.0.0.1:0".parse().unwrap());
    config.lock_memory = false;
    Server::start(config).unwrap()
}

fn page(servers: &[&RunningServer], lease: usize, fault_mode: FaultModeChoice) -> PagedMemory {
    let specs =
        servers.iter().map(|server| ServerSpec { endpoint: server.addr().clone(), memory: None }).collect();
    let mut config = PoolConfig::new(specs, ByteLen(lease as u64), "owner");
    config.stripe_pages = 16;
    let mut pool = Pool::connect(&config).unwrap();
    let region = pool.create_region().unwrap();
    let waiting = Waiting { follow_faults: false, ..Waiting::default() };
    let config = PagedConfig { local_bytes: LOCAL as u64, waiting, fault_mode, ..PagedConfig::default() };
    PagedMemory::start(&config, pool, region).unwrap()
}

fn word(region: &Region, index: usize) -> &AtomicU64 {
    assert!(index * 8 < region.len());
    // SAFETY: inside the region, aligned, and only ever used as an atomic.
    unsafe { &*region.as_ptr().cast::<AtomicU64>().add(index) }
}

fn content(index: usize, version: u64) -> u64 {
    let x = (index as u64 ^ version << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 29)
}

fn fill(region: &Region, version: u64) {
    (0..region.len() / 8).for_each(|n| word(region, n).store(content(n, version), Ordering::Relaxed));
}

/// In another process: reads what was handed over, and compares.
fn read_elsewhere(handed: &HandedOver, version: u64) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "reader", "--nocapture"])
        .env(HANDED, handed.to_string())
        .env(VERSION, version.to_string());
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("every byte is right"), "{said}");
}

/// Not a test by itself: what [`read_elsewhere`] starts.
#[test]
fn reader() {
    let Ok(handed) = std::env::var(HANDED) else { return };
    let handed: HandedOver = handed.parse().unwrap();
    let version: u64 = std::env::var(VERSION).unwrap().parse().unwrap();
    let mut direct = Direct::connect(&PoolConfig::attach(handed.lease().clone(), "reader")).unwrap();
    let region = direct.open_ticket(handed.region()).unwrap();
    assert_eq!((handed.bytes(), region.bytes()), (BYTES as u64, handed.offset() + handed.bytes()));
    let expected =
        |at: usize| if version == 1 && DISCARDED.contains(&at) { 0 } else { content(at / 8, version) };
    let mut buffer = vec![0; 3 * MIB];
    for at in (0..BYTES).step_by(buffer.len()) {
        direct.get(region, handed.offset() + at as u64, &mut buffer).unwrap();
        for (n, bytes) in buffer.chunks(8).enumerate() {
            assert_eq!(
                u64::from_le_bytes(bytes.try_into().unwrap()),
                expected(at + n * 8),
                "byte {}",
                at + n * 8
            );
        }
    }
    // And at the servers: one word of each page.
    let column = Layout::bytes(8).unwrap().hvector((BYTES / 4096) as u64, 1, 4096).unwrap();
    let pending = direct.start_get(region, handed.offset() + 16, &column).unwrap();
    let words = direct.wait(pending).unwrap();
    for (n, bytes) in words.chunks(8).enumerate() {
        assert_eq!(u64::from_le_bytes(bytes.try_into().unwrap()), expected(n * 4096 + 16));
    }
    direct.close();
    println!("every byte is right");
}

struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn owner_goes_on(fault_mode: FaultModeChoice) {
    let servers = [serve(128 * MIB), serve(128 * MIB)];
    let memory = page(&[&servers[0], &servers[1]], 160 * MIB, fault_mode);
    // What comes first is not at the start of the pool's region.
    let _other = memory.alloc(MIB).unwrap();
    let region = memory.alloc(BYTES).unwrap();
    fill(&region, 1);
    region.advise(DISCARDED.start, DISCARDED.len(), RegionAdvice::Discard).unwrap();
    let first = region.hand_over().unwrap();
    assert!(first.offset() >= MIB as u64);
    assert_eq!(first.to_string().parse(), Ok(first.clone()));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // The owner writes, and pages come and go, while the other process reads.
        scope.spawn(|| {
            for version in 2.. {
                fill(&region, version);
                if over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        // Also when the reader finds something: the failure is to be told, not waited for.
        let _ends = OnDrop(|| over.store(true, Ordering::Relaxed));
        read_elsewhere(&first, 1);
    });
    fill(&region, 7);
    let second = region.hand_over().unwrap();
    fill(&region, 8);
    read_elsewhere(&second, 7);
    read_elsewhere(&first, 1);
    for n in 0..BYTES / 8 {
        assert_eq!(word(&region, n).load(Ordering::Relaxed), content(n, 8));
    }
    // The copies outlive their owner's pager while the lease has a member, and go with the last one.
    let mut member = Direct::connect(&PoolConfig::attach(second.lease().clone(), "member")).unwrap();
    let opened = member.open_ticket(second.region()).unwrap();
    drop((region, _other, memory));
    read_elsewhere(&second, 7);
    member.free(opened);
    assert!(matches!(member.open_ticket(second.region()), Err(DirectError::NoSuchRegion)));
    read_elsewhere(&first, 1);
    member.close();
    for server in &servers {
        assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
        server.check();
    }
}

#[test]
fn another_process_reads_what_was_handed_over_while_the_owner_goes_on() {
    if Capabilities::probe().full.is_ok_and(|found| found.has(NEEDED)) {
        owner_goes_on(FaultModeChoice::Full);
    } else {
        skip("uffd", "the kernel does not allow userfaultfd in full here");
    }
}

#[test]
fn also_where_faults_are_caught_by_sigsegv() {
    match Capabilities::probe().segv {
        Ok(()) => owner_goes_on(FaultModeChoice::Segv),
        Err(why) => skip("segv", &why.to_string()),
    }
}

#[test]
fn a_full_lease_says_so_and_the_owner_goes_on() {
    let server = serve(128 * MIB);
    // Room for what is not local, and for half of what is besides.
    let memory = page(&[&server], BYTES - LOCAL / 2, FaultModeChoice::Auto);
    let region = memory.alloc(BYTES).unwrap();
    fill(&region, 1);
    let error = region.hand_over().unwrap_err();
    assert!(
        matches!(
            &error,
            HandOverError::NotCopied(why)
                if why.contains("127.0.0.1") && why.contains("of this lease left")
        ),
        "{error}"
    );
    for n in 0..BYTES / 8 {
        assert_eq!(word(&region, n).load(Ordering::Relaxed), content(n, 1), "the owner has lost something");
    }
}

#[test]
fn what_was_not_handed_over_is_refused() {
    let server = serve(128 * MIB);
    let memory = page(&[&server], 64 * MIB, FaultModeChoice::Auto);
    let region = memory.alloc(MIB).unwrap();
    fill(&region, 2);
    let handed = region.hand_over().unwrap();
    let mut direct = Direct::connect(&PoolConfig::attach(handed.lease().clone(), "curious")).unwrap();
    assert_eq!(direct.open_ticket(handed.region()).unwrap().bytes(), handed.offset() + handed.bytes());
    // The numbers of regions are no secret: guessing the number of the owner's own region does not open it.
    let text = handed.region().to_string();
    let (mark, number) = text.split_once(';').unwrap();
    let (number, lease) = number.split_once('.').unwrap();
    let number = u64::from_str_radix(number, 16).unwrap();
    let mut refused = 0;
    for other in (0..number).chain(number + 1..number + 5) {
        let ticket: RegionTicket = format!("{mark};{other:x}.{lease}").parse().unwrap();
        match direct.open_ticket(&ticket) {
            Err(DirectError::NoSuchRegion) => {}
            Err(error) => {
                assert!(error.to_string().contains("127.0.0.1"), "{error}");
                refused += 1;
            }
            Ok(region) => panic!("{other:x} was opened: {region:?}"),
        }
    }
    assert!(refused >= 1, "the owner's region is there, and another member's");
}
