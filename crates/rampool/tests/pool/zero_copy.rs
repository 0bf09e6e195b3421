//! The direct view sending without a copy, over connections of this machine, where the network copies after
//! all.

use super::{MIB, config, serve, server_config};
use rampool::direct::{Direct, DirectError, DirectRegion, Kept};
use rampool::key::Key;
use rampool::proto::layout::Layout;
use rampool::proto::session::Encryption;
use rampool::proto::units::{ByteLen, OS_PAGE_BYTES};
use rampool::server::{RunningServer, Server};
use rampool_kernel::memory::{Advice, Mapping, advise};
use rampool_kernel::ring::Ring;
use rampool_kernel::uffd::{Features, Scope, Uffd};
use rampool_pinning::path::{BELIEVED, NoZeroCopy, Wish};
use rampool_testing::skip;

/// Whether this kernel lets us have a ring.
fn possible() -> bool {
    let Err(error) = Ring::open(1) else { return true };
    skip("io-uring", &error.to_string());
    false
}

fn bytes_of(mapping: &Mapping) -> &[u8] {
    // SAFETY: a mapping of the test's own, changed only while no such slice is in use.
    unsafe { std::slice::from_raw_parts(mapping.at(0), mapping.bytes()) }
}

fn fill(mapping: &Mapping, byte: u8) {
    // SAFETY: as above.
    unsafe { mapping.at(0).write_bytes(byte, mapping.bytes()) };
}

#[test]
fn operations_mean_the_same_without_copies() {
    if !possible() {
        return;
    }
    let servers = [serve(64 * MIB), serve(64 * MIB)];
    let mut config = config(&[&servers[0], &servers[1]], 32 * MIB);
    config.zero_copy = Some(Wish::From(1));
    super::direct::exercise(&config, 77, 150);
}

#[test]
fn large_puts_go_without_a_copy_and_small_ones_with_one() {
    if !possible() {
        return;
    }
    let server = serve(64 * MIB);
    let mut config = config(&[&server], 32 * MIB);
    config.zero_copy = Some(Wish::From(64 << 10));
    let mut direct = Direct::connect(&config).unwrap();
    assert_eq!(direct.zero_copy_from(), [Ok(64 << 10)]);
    let region = direct.create(8 * MIB).unwrap();
    let memory = Mapping::anonymous(1 << 20).unwrap();
    fill(&memory, 1);
    direct.put(region, 0, &bytes_of(&memory)[..60 << 10]).unwrap();
    assert_eq!(direct.zero_copy_stats().sends, 0);
    direct.put(region, 5, bytes_of(&memory)).unwrap();
    let stats = direct.zero_copy_stats();
    assert!(stats.bytes >= (1 << 20) - (64 << 10) && stats.registered == 0, "{stats:?}");
    // Kept memory is registered once, and found so by later puts.
    direct.keep(bytes_of(&memory));
    for _ in 0..3 {
        direct.put(region, MIB, bytes_of(&memory)).unwrap();
    }
    let registered = direct.zero_copy_stats().registered;
    assert!(registered >= 9, "{registered}");
    let mut got = vec![0; 1 << 20];
    direct.get(region, MIB, &mut got).unwrap();
    assert!(got == bytes_of(&memory));
    // Read-only memory, which cannot be registered, is sent all the same.
    static CONSTANT: [u8; 256 << 10] = [7; 256 << 10];
    direct.keep(&CONSTANT);
    direct.put(region, 0, &CONSTANT).unwrap();
    direct.get(region, 0, &mut got[..CONSTANT.len()]).unwrap();
    assert!(got[..CONSTANT.len()] == CONSTANT && direct.zero_copy_stats().registered == registered);
}

/// A region of 1 MiB, to which whole pages and more go without a copy.
fn without_copies() -> (RunningServer, Direct, DirectRegion) {
    let server = serve(64 * MIB);
    let mut config = config(&[&server], 32 * MIB);
    config.zero_copy = Some(Wish::From(OS_PAGE_BYTES as u64));
    let mut direct = Direct::connect(&config).unwrap();
    let region = direct.create(MIB).unwrap();
    (server, direct, region)
}

/// What a get finds of a put from this memory.
fn there_and_back(direct: &mut Direct, region: DirectRegion, memory: &[u8]) -> Result<Vec<u8>, DirectError> {
    let mut got = vec![0; memory.len()];
    direct.put(region, 0, memory)?;
    direct.get(region, 0, &mut got)?;
    Ok(got)
}

#[test]
fn kept_memory_that_changes_its_pages_is_sent_right_without_notice() {
    if !possible() {
        return;
    }
    let (_server, mut direct, region) = without_copies();
    // Long enough for one piece of a request of its own.
    let memory = Mapping::anonymous(256 << 10).unwrap();
    assert_eq!(direct.keep(bytes_of(&memory)), Kept::Watched);
    for (round, change) in
        ["nothing", "dropped", "nothing", "another", "nothing", "kept again"].into_iter().enumerate()
    {
        match change {
            // SAFETY: the mapping's content is given up here.
            "dropped" => unsafe { advise(memory.start(), memory.bytes(), Advice::DontNeed) }.unwrap(),
            // SAFETY: the test's own mapping, of which no slice is in use, becomes another one.
            "another" => unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                libc::mmap(
                    memory.at(0).cast(),
                    memory.bytes(),
                    libc::PROT_READ | libc::PROT_WRITE,
                    flags,
                    -1,
                    0,
                );
            },
            "kept again" => assert_eq!(direct.keep(bytes_of(&memory)), Kept::Watched),
            _ => {}
        }
        fill(&memory, u8::try_from(round + 1).unwrap());
        let before = direct.zero_copy_stats();
        let got = there_and_back(&mut direct, region, bytes_of(&memory)).unwrap();
        assert!(got == bytes_of(&memory), "{change}");
        let now = direct.zero_copy_stats();
        assert!(now.sends > before.sends);
        // Newly mapped memory is not kept: it is pinned for each send, until it is kept.
        assert_eq!(now.registered > before.registered, ![3, 4].contains(&round), "{change} ({round})");
    }
}

#[test]
fn kept_memory_that_cannot_be_watched_is_sent_right_if_it_is_forgotten_in_time() {
    if !possible() {
        return;
    }
    let (_server, mut direct, region) = without_copies();
    // Memory that its owner watches.
    let memory = Mapping::anonymous(256 << 10).unwrap();
    let other = Uffd::open(Scope::UserMode, Features::WP).unwrap();
    other.watch(memory.start(), memory.bytes()).unwrap();
    for tells in [true, false] {
        fill(&memory, 1);
        assert_eq!(direct.keep(bytes_of(&memory)), Kept::UntilForgotten);
        direct.put(region, 0, bytes_of(&memory)).unwrap();
        if tells {
            direct.forget(memory.at(0), memory.bytes());
        }
        // SAFETY: the mapping's content is given up here.
        unsafe { advise(memory.start(), memory.bytes(), Advice::DontNeed) }.unwrap();
        fill(&memory, 2);
        if tells {
            assert_eq!(direct.keep(bytes_of(&memory)), Kept::UntilForgotten);
        }
        match there_and_back(&mut direct, region, bytes_of(&memory)) {
            Ok(got) => assert!(tells && got == bytes_of(&memory)),
            // The checksums are those of what is there now, the bytes those of what was: no stale byte goes
            // unnoticed, even so.
            Err(error) => assert!(!tells && error.to_string().contains("127.0.0.1"), "{error}"),
        }
    }
}

#[test]
fn where_it_cannot_pay_or_work_everything_is_copied_and_the_reason_is_known() {
    if !possible() {
        return;
    }
    let server = serve(64 * MIB);
    let plain = config(&[&server], 4 * MIB);
    let direct = |config: &_| Direct::connect(config).unwrap();
    let mut never = plain.clone();
    never.zero_copy = Some(Wish::Never);
    assert_eq!(direct(&never).zero_copy_from(), [Err(NoZeroCopy::Off)]);
    let mut local = plain.clone();
    local.zero_copy = Some(Wish::Auto);
    assert_eq!(direct(&local).zero_copy_from(), [Err(NoZeroCopy::Local)]);

    let key = Key::generate();
    let mut sealed = server_config(64 * MIB);
    sealed.key = Some(key.clone());
    let sealed_server = Server::start(sealed).unwrap();
    let mut sealed = config(&[&sealed_server], 4 * MIB);
    (sealed.key, sealed.encryption, sealed.zero_copy) = (Some(key), Encryption::On, Some(Wish::From(1)));
    assert_eq!(direct(&sealed).zero_copy_from(), [Err(NoZeroCopy::Sealed)]);

    // A Unix socket cannot: it is found out with the first large put, which arrives by a copy.
    let directory = tempfile::tempdir().unwrap();
    let mut unix = server_config(64 * MIB);
    unix.listen = vec![rampool_net::transport::Endpoint::Unix(directory.path().join("socket"))];
    let unix_server = Server::start(unix).unwrap();
    let mut unix = config(&[&unix_server], 4 * MIB);
    unix.zero_copy = Some(Wish::From(1));
    let mut direct = direct(&unix);
    let region = direct.create(MIB).unwrap();
    let (bytes, mut got) = (vec![9; 1 << 20], vec![0; 1 << 20]);
    direct.put(region, 0, &bytes).unwrap();
    direct.get(region, 0, &mut got).unwrap();
    assert!(got == bytes);
    assert_eq!(direct.zero_copy_from(), [Err(NoZeroCopy::Missing)]);
    assert_eq!(direct.zero_copy_stats().sends, 0);
}

#[test]
fn a_network_that_copies_is_found_out_by_what_the_kernel_reports() {
    if !possible() {
        return;
    }
    let server = serve(64 * MIB);
    let mut config = config(&[&server], 32 * MIB);
    config.pinned = ByteLen(8 << 20);
    config.zero_copy = Some(Wish::From(1));
    let mut direct = Direct::connect(&config).unwrap();
    let region = direct.create(4 * MIB).unwrap();
    let bytes = vec![1; 4 << 20];
    let layout = Layout::bytes(bytes.len() as u64).unwrap();
    let pending = direct.start_put(region, 0, &layout, bytes).unwrap();
    direct.wait(pending).unwrap();
    // What the kernel says of a send comes after it, sometimes much later.
    for _ in 0..10_000 {
        let stats = direct.zero_copy_stats();
        if stats.copied >= u64::from(BELIEVED) && stats.copied > stats.sends / 2 {
            return;
        }
        direct.put(region, 0, &[1; 100_000]).unwrap();
    }
    panic!("on loopback every send is copied, and the kernel says so: {:?}", direct.zero_copy_stats());
}
