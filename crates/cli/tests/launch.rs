//! Parallel programs on shared memory, as users start them: `rampool launch`, real processes, the real
//! kernel.
//!
//! The programs are in this binary too: the launcher starts it again, once for each rank, with the name of a
//! program in the environment.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rampool_net::transport::SameHost;
use rampool_server::{RunningServer, Server, ServerConfig};
use rampool_shared::{
    AllocOptions, AtomicOp, Homes, OnFailure, ProtocolKind, Region, Shared, SharedConfig, SharedError,
};
use rampool_testing::free_port;
use rampool_wire::session::{Encryption, PREFACE_BYTES, Preface, Refusal, Verdict};
use ranks::{DEADLINE, end, output};

mod ranks;
mod settings;

const PROGRAM: &str = "RAMPOOL_TEST_PROGRAM";
/// What carries the connections of the program `connections`, and that its rank 1 wants no shared memory.
const CARRIED_BY: &str = "RAMPOOL_TEST_CARRIED_BY";
const APART: &str = "RAMPOOL_TEST_APART";
/// When the program `locked` locks its memory into RAM.
const WHEN: &str = "RAMPOOL_TEST_WHEN";
/// How many descriptors rank 0 of the program `few descriptors` may open.
const SPARE: &str = "RAMPOOL_TEST_SPARE";

/// The launcher with this binary as the program to start.
struct Launch {
    command: Command,
}

impl Launch {
    fn new(ranks: u16, program: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
        settings::clear(&mut command);
        command.arg("launch").arg("-n").arg(ranks.to_string()).env(PROGRAM, program);
        Self { command }
    }

    fn arg(mut self, argument: &str) -> Self {
        self.command.arg(argument);
        self
    }

    fn args(mut self, arguments: &[&str]) -> Self {
        self.command.args(arguments);
        self
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs it to its end.
    fn run(mut self) -> Output {
        let me = std::env::current_exe().unwrap();
        // A run that hangs says so before the harness times out.
        self.command.env("RAMPOOL_JOIN_S", "60");
        if !self.command.get_envs().any(|(name, _)| name == "RAMPOOL_DEADLINE_S") {
            self.command.env("RAMPOOL_DEADLINE_S", "60");
        }
        self.command.arg(me).args(["--exact", "this_binary_is_a_rank", "--nocapture", "--quiet"]);
        output(
            self.command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap(),
            "the run",
        )
    }

    fn succeeds(self) {
        let output = self.run();
        assert!(output.status.success(), "{output:?}");
    }

    /// Runs it to its bad end. Returns what it said, and its exit code.
    fn fails(self) -> (String, Option<i32>) {
        let output = self.run();
        assert!(!output.status.success(), "{output:?}");
        (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
    }
}

/// What the launcher starts. By itself, under the test harness, it is one rank alone.
#[test]
fn this_binary_is_a_rank() {
    let program = std::env::var(PROGRAM).unwrap_or_else(|_| "counter".to_owned());
    let mut config = SharedConfig::from_env().unwrap_or_else(|error| panic!("{error}"));
    if program == "versions" && config.rank == 1 {
        config.build = "0.0.9".to_owned();
    }
    if program == "settings" && config.rank == 1 {
        config.protocol = ProtocolKind::Lrc;
    }
    if program == "clean copies" && config.rank == 0 {
        config.local_bytes = None;
    }
    if program == "connections" && config.rank == 1 && std::env::var(APART).is_ok() {
        config.same_host = SameHost::Socket;
    }
    if program == "returns errors" {
        config.on_failure = OnFailure::ReturnError;
    }
    if program == "few descriptors" && config.rank == 0 {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        limit(libc::RLIMIT_NOFILE, open + std::env::var(SPARE).unwrap().parse::<u64>().unwrap());
    }
    if program == "locked" && std::env::var(WHEN).is_ok_and(|when| when == "before") {
        lock_all(libc::MCL_CURRENT | libc::MCL_FUTURE);
    }
    if program == "short files" {
        limit(libc::RLIMIT_FSIZE, 1 << 20);
    }
    let shared = match Shared::join(config) {
        Ok(shared) => shared,
        Err(error) => {
            // In one piece: the other ranks may say something at the same time.
            std::io::stderr().write_all(format!("{error}\n").as_bytes()).unwrap();
            std::process::exit(9);
        }
    };
    match program.as_str() {
        "few descriptors" | "short files" => {}
        "counter" => counter(&shared),
        "false sharing" => false_sharing(&shared),
        "bounded buffer" => bounded_buffer(&shared),
        "sor" => sor(&shared),
        "words" => words(&shared),
        "allocations" => allocations(&shared),
        "budget" => budget(&shared),
        "budget for ever" => budget_for_ever(&shared),
        "free and take" => free_and_take(&shared),
        "clean copies" => clean_copies(&shared),
        "protocols" => protocols(&shared),
        "litmus" => litmus(&shared),
        "placement" => placement(&shared),
        "connections" => connections(&shared),
        "much at once" => much_at_once(&shared),
        "cpus" => cpus(&shared),
        "forks" => forks(&shared),
        "stops" => stops(&shared),
        "vanishing mappings" => vanishing_mappings(&shared),
        "mistakes" => mistakes(&shared),
        "system call" => system_call(&shared),
        "locked" => locked(&shared),
        "lock of a variable" => lock_of_a_variable(&shared),
        other => fail(&shared, other),
    }
    shared.close().unwrap_or_else(|error| panic!("{error}"));
}

fn lock_all(flags: libc::c_int) {
    // SAFETY: changes no content.
    assert_eq!(unsafe { libc::mlockall(flags) }, 0, "{}", std::io::Error::last_os_error());
}

/// Pages change hands, are read by all, freed, and come again, in memory that the program has locked.
fn locked(shared: &Shared) {
    const PAGES: usize = 512;
    const WORDS: usize = 4096 / 8;
    let (rank, ranks) = (u64::from(shared.rank()), u64::from(shared.ranks()));
    for round in 0..3 {
        let region = shared.alloc(PAGES * 4096, AllocOptions::new()).unwrap();
        match std::env::var(WHEN).unwrap().as_str() {
            "after" if round == 0 => lock_all(libc::MCL_CURRENT),
            // SAFETY: changes no content.
            "region" => assert_eq!(unsafe { libc::mlock(region.at::<libc::c_void>(0), PAGES * 4096) }, 0),
            _ => {}
        }
        shared.barrier(0).unwrap();
        for epoch in 0..4_u64 {
            // SAFETY: each page has one writer between two barriers, and readers only behind them.
            unsafe {
                for page in (0..PAGES).filter(|&page| (page as u64 + epoch) % ranks == rank) {
                    add(region, page * WORDS, epoch + 1);
                }
                shared.barrier(1).unwrap();
                let expected = (1..=epoch + 1).sum::<u64>();
                assert!(
                    (0..PAGES).all(|page| region.at::<u64>(page * WORDS).read_volatile() == expected),
                    "round {round} epoch {epoch}"
                );
            }
            shared.barrier(2).unwrap();
        }
        shared.free(region).unwrap();
        shared.barrier(3).unwrap();
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    let resident: usize = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(resident < 64 << 10, "{resident} KiB, of a range of 1 GiB that is hardly used");
}

/// From now on this process may have no more of `what`.
fn limit(what: libc::__rlimit_resource_t, most: u64) {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills a structure of ours, and reads it.
    let done = unsafe {
        libc::getrlimit(what, &raw mut limits);
        limits.rlim_cur = most;
        libc::setrlimit(what, &raw const limits)
    };
    assert_eq!(done, 0);
}

// --- programs ----------------------------------------------------------------------------------------------

/// # Safety
/// No other rank may use the word during the call.
unsafe fn add(region: Region, index: usize, value: u64) {
    let word = region.at::<u64>(index);
    // SAFETY: by the caller.
    unsafe { word.write_volatile(word.read_volatile() + value) };
}

/// # Safety
/// No rank may write the value during the call.
unsafe fn get<T>(region: Region, index: usize) -> T {
    // SAFETY: by the caller.
    unsafe { region.at::<T>(index).read_volatile() }
}

/// # Safety
/// No other rank may use the value during the call.
unsafe fn put<T>(region: Region, index: usize, value: T) {
    // SAFETY: by the caller.
    unsafe { region.at::<T>(index).write_volatile(value) };
}

/// Runs `body` in this many threads of this rank, with their numbers among all threads.
fn threads(shared: &Shared, count: u16, body: impl Fn(usize) + Sync) {
    shared.set_threads(count);
    std::thread::scope(|scope| {
        for thread in 0..usize::from(count) {
            let body = &body;
            scope.spawn(move || body(usize::from(shared.rank()) * usize::from(count) + thread));
        }
    });
    shared.set_threads(1);
}

/// Every thread of every rank adds to one word under a lock.
fn counter(shared: &Shared) {
    const ROUNDS: u64 = 40;
    let region = shared.alloc(8192, AllocOptions::new()).unwrap();
    threads(shared, 2, |_| {
        for _ in 0..ROUNDS {
            shared.lock(7).unwrap();
            // SAFETY: the lock orders all accesses.
            unsafe { add(region, 3, 1) };
            shared.unlock(7).unwrap();
        }
    });
    shared.barrier(1).unwrap();
    // SAFETY: the barrier orders it behind all writes.
    assert_eq!(unsafe { get::<u64>(region, 3) }, ROUNDS * 2 * u64::from(shared.ranks()));
}

/// Threads of all ranks write neighbouring bytes of the same pages, and read each other's after a barrier.
fn false_sharing(shared: &Shared) {
    const BYTES: usize = 12_000;
    let region = shared.alloc(BYTES, AllocOptions::new()).unwrap();
    let all = usize::from(shared.ranks()) * 2;
    threads(shared, 2, |me| {
        for round in 0..6_usize {
            let value = |at: usize| u8::try_from((at * 7 + round * 13) % 251).unwrap();
            for at in (me..BYTES).step_by(all) {
                // SAFETY: this byte is this thread's between two barriers.
                unsafe { put(region, at, value(at)) };
            }
            shared.barrier(2).unwrap();
            for at in (0..BYTES).step_by(17) {
                // SAFETY: no rank writes between these barriers.
                assert_eq!(unsafe { get::<u8>(region, at) }, value(at), "byte {at} in round {round}");
            }
            shared.barrier(3).unwrap();
        }
    });
}

/// Producers and consumers on different ranks, through a buffer of a few places.
fn bounded_buffer(shared: &Shared) {
    const PLACES: u64 = 4;
    const ITEMS: u64 = 60;
    const FULL: u32 = 0;
    const EMPTY: u32 = 1;
    // 0: put so far, 1: taken so far, 2: sum of what was taken, 8..: places.
    let region = shared.alloc(4096, AllocOptions::new()).unwrap();
    let at = |index: u64| usize::try_from(8 + index % PLACES).unwrap();
    let total = ITEMS * u64::from(shared.ranks());
    // SAFETY: in this function the lock orders all accesses, and the barrier the last ones.
    threads(shared, 2, |me| unsafe {
        for item in 0..ITEMS {
            shared.lock(1).unwrap();
            if me % 2 == 0 {
                while get::<u64>(region, 0) - get::<u64>(region, 1) == PLACES {
                    shared.wait(FULL, 1).unwrap();
                }
                let index = get::<u64>(region, 0);
                put(region, at(index), (me as u64) << 32 | item);
                put(region, 0, index + 1);
                shared.signal(EMPTY, 1).unwrap();
            } else {
                while get::<u64>(region, 0) == get::<u64>(region, 1) {
                    shared.wait(EMPTY, 1).unwrap();
                }
                let index = get::<u64>(region, 1);
                add(region, 2, get::<u64>(region, at(index)));
                put(region, 1, index + 1);
                shared.broadcast(FULL, 1).unwrap();
            }
            shared.unlock(1).unwrap();
        }
    });
    shared.barrier(4).unwrap();
    let expected: u64 =
        (0..u64::from(shared.ranks())).map(|rank| ((rank * 2) << 32) * ITEMS + ITEMS * (ITEMS - 1) / 2).sum();
    // SAFETY: no rank writes after the barrier.
    assert_eq!(
        // SAFETY: as above.
        unsafe { (get::<u64>(region, 0), get::<u64>(region, 1), get::<u64>(region, 2)) },
        (total, total, expected)
    );
}

/// What `budget for ever` says when it begins, and then every 16 rounds.
const AWAY: &str = "pages are away";

/// More data than a rank may keep, read and written until something ends it.
fn budget_for_ever(shared: &Shared) {
    const PAGES: usize = 1024;
    let region = shared.alloc(PAGES * 4096, AllocOptions::new()).unwrap();
    for round in 1_u64.. {
        for page in (usize::from(shared.rank())..PAGES).step_by(usize::from(shared.ranks())) {
            // SAFETY: this rank's page.
            unsafe {
                assert_eq!(get::<u64>(region, page * 512), round - 1, "page {page}");
                put(region, page * 512, round);
            }
        }
        shared.barrier(0).unwrap();
        if round % 16 == 1 && shared.rank() == 0 {
            assert!(shared.stats().away_bytes > 0);
            println!("{AWAY}");
        }
    }
}

const ROWS: usize = 50;
const COLUMNS: usize = 130;

/// One half-sweep of red-black successive over-relaxation over `rows`.
fn relax(
    rows: std::ops::Range<usize>,
    colour: usize,
    mut read: impl FnMut(usize) -> f64,
    mut write: impl FnMut(usize, f64),
) {
    for row in rows {
        for column in (1 + (row + colour) % 2..COLUMNS - 1).step_by(2) {
            let at = row * COLUMNS + column;
            let around = read(at - 1) + read(at + 1) + read(at - COLUMNS) + read(at + COLUMNS);
            let old = read(at);
            write(at, old + 1.25 * (around / 4.0 - old));
        }
    }
}

fn start_value(at: usize) -> f64 {
    ((at * 37) % 101) as f64
}

/// Successive over-relaxation by rows, against the same done by one thread.
fn sor(shared: &Shared) {
    const SWEEPS: usize = 6;
    let region = shared.alloc(ROWS * COLUMNS * 8, AllocOptions::new().homes(Homes::Blocked)).unwrap();
    let all = usize::from(shared.ranks()) * 2;
    // SAFETY: in this function a cell is written by one thread, between barriers in which no other rank uses
    // it.
    threads(shared, 2, |me| unsafe {
        let share = (ROWS - 2).div_ceil(all);
        let rows = 1 + me * share..(1 + (me + 1) * share).min(ROWS - 1);
        if me == 0 {
            for at in 0..ROWS * COLUMNS {
                put(region, at, start_value(at));
            }
        }
        shared.barrier(0).unwrap();
        for sweep in 0..2 * SWEEPS {
            relax(rows.clone(), sweep % 2, |at| get(region, at), |at, value| put(region, at, value));
            shared.barrier_keep(1).unwrap();
        }
    });
    let alone = std::cell::RefCell::new((0..ROWS * COLUMNS).map(start_value).collect::<Vec<f64>>());
    for sweep in 0..2 * SWEEPS {
        relax(1..ROWS - 1, sweep % 2, |at| alone.borrow()[at], |at, value| alone.borrow_mut()[at] = value);
    }
    for (at, value) in alone.into_inner().into_iter().enumerate() {
        // SAFETY: no rank writes any more.
        assert_eq!(unsafe { get::<f64>(region, at) }.to_bits(), value.to_bits(), "cell {at}");
    }
    shared.barrier(2).unwrap();
}

/// Atomic words of all kinds, and semaphores.
fn words(shared: &Shared) {
    const ROUNDS: u64 = 20;
    // More than are kept at a time.
    const SUMS: usize = 5000;
    let region = shared.alloc(4096, AllocOptions::new()).unwrap();
    let sums = shared.alloc((SUMS + 1) * 8, AllocOptions::new()).unwrap();
    let ranks = u64::from(shared.ranks());
    if shared.rank() == 0 {
        shared.semaphore_set(0, 1).unwrap();
    }
    shared.barrier(5).unwrap();
    threads(shared, 2, |_| {
        for at in (0..SUMS).chain(0..SUMS / 2) {
            shared.add_f64_later(sums.at(at), 0.25).unwrap();
        }
        shared.add_f64_later(sums.at(SUMS), 0.5).unwrap();
        assert!(shared.add_last_f64().unwrap().unwrap() >= 0.0);
        assert_eq!(shared.add_last_f64().unwrap(), None, "all others went before it");
        assert!(shared.add_f64_at_home(sums.at(SUMS), 0.5).unwrap() >= 0.5);
        for _ in 0..ROUNDS {
            shared.fetch_add(region.at(0), 3).unwrap();
            shared.fetch_add_f64(region.at(1), 0.5).unwrap();
            let mut seen = shared.load(region.at(2)).unwrap();
            loop {
                let before = shared.compare_exchange(region.at(2), seen, seen + 1).unwrap();
                if before == seen {
                    break;
                }
                seen = before;
            }
            // A baton goes round all ranks.
            shared.semaphore_wait(shared.rank().into()).unwrap();
            shared.semaphore_post(u32::from((shared.rank() + 1) % shared.ranks())).unwrap();
        }
    });
    shared.barrier(6).unwrap();
    let value = |index| shared.load(region.at(index)).unwrap();
    let times = 2 * ROUNDS * ranks;
    assert_eq!((value(0), value(2)), (3 * times, times));
    assert!((f64::from_bits(value(1)) - 0.5 * times as f64).abs() < 1e-9);
    for at in 0..SUMS {
        // SAFETY: no rank writes any more.
        let sum: f64 = unsafe { get(sums, at) };
        assert_eq!(sum, (2 * ranks) as f64 * if at < SUMS / 2 { 0.5 } else { 0.25 }, "word {at}");
    }
    let both = shared.add_f64_at_home(sums.at(SUMS), 0.0).unwrap();
    assert_eq!(both, 2.0 * ranks as f64);
    shared.barrier(6).unwrap();
    // Kept until another operation of this thread: the barrier.
    shared.add_f64_later(sums.at(0), 1.0).unwrap();
    shared.barrier(7).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { get::<f64>(sums, 0) }, 2.0 * ranks as f64);
    assert!(shared.add_f64_later(std::ptr::without_provenance_mut(8), 1.0).is_ok());
    assert!(shared.fence().is_err(), "there is no such word");
    shared.barrier(8).unwrap();
}

/// Memory of all kinds: by all ranks, by one; freed and taken again; much more than there is.
fn allocations(shared: &Shared) {
    let mail = shared.alloc(4096, AllocOptions::new()).unwrap();
    let large = shared.alloc(16 << 30, AllocOptions::new().page_bytes(16384)).unwrap();
    assert!(large.bytes() >= 16 << 30 && large.address() > mail.address());
    let rank = usize::from(shared.rank());
    let last = large.bytes() / 8 - 1 - rank * 4096;
    // SAFETY: each rank has its own words; barriers order the rest.
    unsafe {
        assert_eq!(get::<u64>(large, last), 0);
        put(large, last, 77 + rank as u64);
        shared.barrier(0).unwrap();
        let next = (rank + 1) % usize::from(shared.ranks());
        assert_eq!(get::<u64>(large, large.bytes() / 8 - 1 - next * 4096), 77 + next as u64);
    }
    // One rank allocates, and the others find it by its address.
    if rank == usize::from(shared.ranks()) - 1 {
        let own = shared.alloc_alone(20_000, AllocOptions::new().protocol(ProtocolKind::Sc)).unwrap();
        // SAFETY: read after the barrier.
        unsafe { put(mail, 0, own.address()) };
        // SAFETY: as above.
        unsafe { put(own, 2000, 5_u64) };
    }
    shared.barrier(1).unwrap();
    // SAFETY: no rank writes it any more.
    let address = unsafe { get::<usize>(mail, 0) };
    let word: *mut u64 = std::ptr::with_exposed_provenance_mut(address + 16_000);
    shared.fetch_add(word, 1).unwrap();
    shared.barrier(2).unwrap();
    // SAFETY: no rank writes it after the barrier.
    assert_eq!(unsafe { word.read_volatile() }, 5 + u64::from(shared.ranks()));
    shared.barrier(3).unwrap();
    if rank == 0 {
        shared.free_alone(address).unwrap();
        assert!(matches!(shared.free_alone(address), Err(SharedError::Refused { .. })));
        assert!(matches!(shared.free_alone(0x1000), Err(SharedError::NotShared { .. })));
    }
    shared.free(large).unwrap();
    let other = shared.alloc(1 << 20, AllocOptions::new().page_bytes(16384)).unwrap();
    assert_ne!(
        other.address(),
        large.address(),
        "free does not wait until every rank has forgotten the memory"
    );
    shared.barrier(5).unwrap();
    let again = shared.alloc(1 << 20, AllocOptions::new().page_bytes(16384)).unwrap();
    assert_eq!(again.address(), large.address(), "freed memory is used again");
    if rank == 0 {
        let again = shared.alloc_alone(20_000, AllocOptions::new().protocol(ProtocolKind::Sc)).unwrap();
        assert_eq!(again.address(), address, "freed memory is used again");
    }
    let error = shared.alloc(1 << 50, AllocOptions::new()).unwrap_err();
    assert!(error.to_string().contains("are free"), "{error}");
    shared.barrier(4).unwrap();
}

/// Bytes of shared pages that the kernel has for this process now.
fn kernels_count() -> u64 {
    let shared = |fd: &std::path::PathBuf| {
        std::fs::read_link(fd).is_ok_and(|to| to.to_string_lossy().contains("memfd:rampool-shared"))
    };
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap().path());
    let bytes: Vec<u64> =
        fds.filter(shared).map(|fd| std::fs::metadata(fd).unwrap().blocks() * 512).collect();
    assert_eq!(bytes.len(), 1, "one object holds the shared pages");
    bytes[0]
}

/// Runs `body`, and returns the most bytes of shared pages that the kernel had meanwhile, as seen by polling.
fn most_resident(body: impl FnOnce()) -> u64 {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = 0;
            while !done.load(Ordering::Relaxed) {
                most = most.max(kernels_count());
                std::thread::sleep(Duration::from_micros(200));
            }
            most
        });
        body();
        done.store(true, Ordering::Relaxed);
        watcher.join().unwrap()
    })
}

/// Memory that is freed is the kernel's again on every rank, and zero when it is taken again.
fn free_and_take(shared: &Shared) {
    const PAGES: usize = 1024;
    let (rank, ranks) = (usize::from(shared.rank()), usize::from(shared.ranks()));
    let turns = shared.alloc(4096, AllocOptions::new().homes(Homes::Blocked)).unwrap();
    let before = kernels_count();
    let mut first = None;
    for round in 0..4_u64 {
        let region = shared.alloc(PAGES * 4096, AllocOptions::new()).unwrap();
        assert_eq!(*first.get_or_insert(region), region, "the memory of round {round} is that of the first");
        for page in 0..PAGES {
            // SAFETY: no rank writes before the barrier.
            assert_eq!(unsafe { get::<u64>(region, page * 512 + 7) }, 0, "page {page} in round {round}");
        }
        shared.barrier(0).unwrap();
        for page in (rank..PAGES).step_by(ranks) {
            // SAFETY: the page is this rank's until the next barrier.
            unsafe { put(region, page * 512 + 7, round + 1) };
        }
        shared.barrier_keep(1).unwrap();
        for page in 0..PAGES {
            // SAFETY: no rank writes between barriers.
            assert_eq!(unsafe { get::<u64>(region, page * 512 + 7) }, round + 1);
            if page % ranks == rank {
                // SAFETY: no rank reads word 8 of it.
                unsafe { put(region, page * 512 + 8, round) };
            }
        }
        shared.barrier(2).unwrap();
        assert!(kernels_count() >= before + (PAGES * 4096) as u64, "all pages are here: {}", kernels_count());
        // What was written and not released does not come back either.
        if rank == 0 {
            // SAFETY: no rank uses it any more.
            unsafe { put(region, 9, round) };
        }
        if round % 2 == 0 {
            shared.free(region).unwrap();
        } else {
            // The last one to be done with it.
            if shared.fetch_add(turns.at(0), 1).unwrap() % ranks as u64 == ranks as u64 - 1 {
                shared.free_alone(region.address()).unwrap();
            }
        }
        shared.barrier(3).unwrap();
        let after = kernels_count();
        assert!(
            after <= before + 64 * 1024,
            "{before} bytes were taken before it, {after} are after it was freed"
        );
        shared.barrier(4).unwrap();
    }
}

/// Five times as much data as a rank may keep: written by turns, read by all, and counted in under locks.
fn budget(shared: &Shared) {
    const PAGES: usize = 2048;
    const ROUNDS: usize = 2;
    let limit = shared.config().local_bytes.unwrap();
    let region = shared.alloc(PAGES * 4096, AllocOptions::new()).unwrap();
    let sums = shared.alloc(64 * 4096, AllocOptions::new()).unwrap();
    assert!(region.bytes() as u64 > 5 * limit, "the data is more than one rank may keep");
    let (rank, ranks) = (usize::from(shared.rank()), usize::from(shared.ranks()));
    let value = |page: usize, round: usize, at: usize| (page * 31 + round * 7 + at) as u64 | 1 << 40;
    let most = most_resident(|| {
        for round in 0..ROUNDS {
            for page in (0..PAGES).filter(|page| page % 3 % ranks == (rank + round) % ranks) {
                for at in (0..512).step_by(61) {
                    // SAFETY: between these barriers the page is this rank's.
                    unsafe { put(region, page * 512 + at, value(page, round, at)) };
                }
            }
            for sum in 0..64 {
                shared.lock(sum as u64).unwrap();
                // SAFETY: the lock orders all accesses.
                unsafe { add(sums, sum * 512, 1) };
                shared.unlock(sum as u64).unwrap();
            }
            shared.barrier(0).unwrap();
            for page in 0..PAGES {
                for at in (0..512).step_by(61) {
                    // SAFETY: no rank writes between these barriers.
                    assert_eq!(
                        // SAFETY: as above.
                        unsafe { get::<u64>(region, page * 512 + at) },
                        value(page, round, at),
                        "page {page} in round {round}"
                    );
                }
                // SAFETY: as above.
                assert_eq!(unsafe { get::<u64>(region, page * 512 + 1) }, 0, "page {page} in round {round}");
            }
            shared.barrier(1).unwrap();
        }
    });
    for sum in 0..64 {
        // SAFETY: no rank writes any more.
        assert_eq!(unsafe { get::<u64>(sums, sum * 512) }, (ROUNDS * ranks) as u64);
    }
    assert!(most > limit / 2, "the watcher saw {most} bytes");
    assert!(most <= limit, "{most} bytes were here, {limit} may be");
    let stats = shared.stats();
    assert!(stats.away_sent_bytes > 0 && stats.away_brought_bytes > 0, "{stats:?}");
    // Under lrc no other rank may have what a copy holds, so all of it goes to servers.
    assert_eq!(stats.engine.evictions > 0, shared.config().protocol != ProtocolKind::Lrc, "{stats:?}");
    shared.barrier(2).unwrap();
}

/// Reads more than fits, all of which another rank has: without memory servers.
fn clean_copies(shared: &Shared) {
    const PAGES: usize = 2048;
    let region =
        shared.alloc(PAGES * 4096, AllocOptions::new().homes(Homes::At(rampool_shared::Rank(0)))).unwrap();
    let reader = shared.rank() == 1;
    for round in 0..2_u64 {
        if !reader {
            for page in 0..PAGES {
                // SAFETY: barriers order it before the reads and behind those of the round before.
                unsafe { put(region, page * 512, page as u64 + round) };
            }
        }
        shared.barrier(0).unwrap();
        if let Some(limit) = shared.config().local_bytes.filter(|_| reader) {
            let most = most_resident(|| {
                for page in (0..PAGES).chain((0..PAGES).rev()) {
                    // SAFETY: no rank writes between these barriers.
                    assert_eq!(unsafe { get::<u64>(region, page * 512) }, page as u64 + round);
                }
            });
            assert!((limit / 2..=limit).contains(&most), "{most} bytes were here, {limit} may be");
            assert!(shared.stats().engine.evictions > PAGES as u64, "{:?}", shared.stats());
        }
        shared.barrier(1).unwrap();
    }
}

/// Regions of all protocols side by side.
fn protocols(shared: &Shared) {
    let all = ProtocolKind::ALL.map(|kind| shared.alloc(8192, AllocOptions::new().protocol(kind)).unwrap());
    for _ in 0..10 {
        for region in all {
            shared.lock(3).unwrap();
            // SAFETY: the lock orders all accesses.
            unsafe { add(region, 700, 1) };
            shared.unlock(3).unwrap();
        }
    }
    shared.barrier(0).unwrap();
    for region in all {
        // SAFETY: no rank writes after the barrier.
        assert_eq!(unsafe { get::<u64>(region, 700) }, 10 * u64::from(shared.ranks()));
    }
    shared.barrier(1).unwrap();
}

/// What must never be seen, often enough to be seen if it can be.
fn litmus(shared: &Shared) {
    const ROUNDS: u64 = 60;
    let protocol = shared.config().protocol;
    let region = shared.alloc(8 * 4096, AllocOptions::new()).unwrap();
    let word = |page: usize| page * 512;
    let (me, ranks) = (shared.rank(), u64::from(shared.ranks()));
    for round in 1..=ROUNDS {
        // Transitive causality: what rank 0 wrote before its lock is known to a rank that got it through
        // another rank's lock.
        // SAFETY: locks and barriers order all accesses, or the region is `sc`.
        unsafe {
            match me {
                0 => {
                    shared.lock(1).unwrap();
                    put(region, word(0), round);
                    put(region, word(1), round);
                    shared.unlock(1).unwrap();
                }
                1 => {
                    shared.lock(1).unwrap();
                    let seen: u64 = get(region, word(1));
                    assert!(get::<u64>(region, word(0)) >= seen, "both were written under the lock");
                    shared.unlock(1).unwrap();
                    shared.lock(2).unwrap();
                    put(region, word(2), seen);
                    shared.unlock(2).unwrap();
                }
                _ => {
                    shared.lock(2).unwrap();
                    let seen: u64 = get(region, word(2));
                    shared.unlock(2).unwrap();
                    // Entry consistency promises this only under the first lock.
                    if protocol != ProtocolKind::Ibec {
                        assert!(get::<u64>(region, word(0)) >= seen, "round {round}");
                    }
                }
            }
        }
        shared.barrier(0).unwrap();
        if protocol == ProtocolKind::Sc {
            // Store buffering: each of two ranks writes its word and reads the other's. One of them sees the
            // other's write.
            // SAFETY: valid aligned words, which are only used as atomics meanwhile.
            let cell = |page: usize| unsafe { AtomicU64::from_ptr(region.at(word(page))) };
            if me < 2 {
                cell(3 + usize::from(me)).store(round, Ordering::SeqCst);
                let other = cell(4 - usize::from(me)).load(Ordering::SeqCst);
                cell(5 + usize::from(me)).store(other, Ordering::SeqCst);
            }
            shared.barrier(1).unwrap();
            if ranks > 1 {
                let seen = [5, 6].map(|page| cell(page).load(Ordering::SeqCst));
                assert!(seen.contains(&round), "both read the old value in round {round}: {seen:?}");
            }
            shared.barrier(2).unwrap();
        }
    }
}

/// The kernel may take mappings away at any time, with or without write protection: the content stays, and so
/// does the protection.
fn vanishing_mappings(shared: &Shared) {
    const PAGES: usize = 6;
    let region = shared.alloc(PAGES * 4096, AllocOptions::new()).unwrap();
    let (me, ranks) = (usize::from(shared.rank()), usize::from(shared.ranks()));
    let vanish = |page: usize| {
        // SAFETY: pages of a shared mapping keep their content in its object.
        let done = unsafe { libc::madvise(region.at::<u8>(page * 4096).cast(), 4096, libc::MADV_DONTNEED) };
        assert_eq!(done, 0);
    };
    for round in 0..20_usize {
        let value = |page: usize, rank: usize| (round * 1000 + page * 10 + rank) as u64;
        for page in 0..PAGES {
            // SAFETY: this word is this rank's between two barriers.
            unsafe { put(region, page * 512 + me, value(page, me)) };
            if (page + round) % 3 == 0 {
                vanish(page);
            }
            // SAFETY: as above.
            assert_eq!(unsafe { get::<u64>(region, page * 512 + me) }, value(page, me));
            // SAFETY: as above.
            unsafe { put(region, page * 512 + 100 + me, value(page, me)) };
        }
        shared.barrier(0).unwrap();
        for page in 0..PAGES {
            vanish((page + round) % PAGES);
            for rank in 0..ranks {
                for at in [rank, 100 + rank] {
                    // SAFETY: no rank writes between these barriers.
                    assert_eq!(
                        // SAFETY: as above.
                        unsafe { get::<u64>(region, page * 512 + at) },
                        value(page, rank),
                        "round {round}"
                    );
                }
            }
        }
        shared.barrier(1).unwrap();
    }
}

/// Homes and managers that are set by hand.
fn placement(shared: &Shared) {
    let region =
        shared.alloc(64 * 4096, AllocOptions::new().homes(Homes::At(rampool_shared::Rank(0)))).unwrap();
    let last = shared.ranks() - 1;
    assert_eq!(shared.home(region.address()).unwrap(), 0);
    if shared.rank() == 0 {
        shared.set_home(region.address() + 4096, 8 * 4096, last).unwrap();
        shared.set_lock_manager(11, last).unwrap();
        assert!(matches!(shared.set_lock_manager(11, 99), Err(SharedError::Operation { .. })));
    }
    shared.barrier(0).unwrap();
    for (page, home) in [(0, 0), (1, last), (8, last), (9, 0)] {
        assert_eq!(shared.home(region.address() + page * 4096).unwrap(), home, "page {page}");
    }
    for _ in 0..20 {
        shared.lock(11).unwrap();
        // SAFETY: the lock orders all accesses.
        unsafe { add(region, 512, 1) };
        shared.unlock(11).unwrap();
    }
    shared.barrier(1).unwrap();
    // SAFETY: no rank writes after the barrier.
    assert_eq!(unsafe { get::<u64>(region, 512) }, 20 * u64::from(shared.ranks()));
    let stats = shared.stats();
    assert!(stats.engine.lock_acquires >= 20 && stats.engine.barriers == 2, "{stats:?}");
    assert!(shared.ranks() == 1 || stats.sent_messages > 0, "{stats:?}");
    shared.barrier(2).unwrap();
}

/// Mistakes that end a call, not the run.
fn mistakes(shared: &Shared) {
    let region = shared.alloc(4096, AllocOptions::new()).unwrap();
    let rank = format!("rank {}", shared.rank());
    shared.lock(5 + u64::from(shared.rank())).unwrap();
    let errors = [
        (shared.unlock(99).unwrap_err(), "lock 99"),
        (shared.lock(5 + u64::from(shared.rank())).unwrap_err(), "holds already"),
        (shared.wait(0, 98).unwrap_err(), "lock 98"),
        (shared.lock(1 << 62).unwrap_err(), "belong to the runtime"),
        (shared.semaphore_post(1 << 20).unwrap_err(), "semaphore"),
        (shared.atomic(region.address() + 1, 8, rampool_shared::AtomicOp::Load).unwrap_err(), "aligned"),
        (shared.fetch_add(std::ptr::with_exposed_provenance_mut(0x7000), 1).unwrap_err(), "0x7000"),
        (shared.set_home(region.address(), 1, 4000).unwrap_err(), "rank 4000"),
        (shared.alloc_alone(8, AllocOptions::new().page_bytes(5000)).unwrap_err(), "5000"),
    ];
    for (error, words) in errors {
        let text = error.to_string();
        assert!(text.contains(words) && text.contains(&rank), "{text}");
    }
    assert!(!shared.try_lock(5 + u64::from(shared.rank())).is_ok_and(|got| got));
    shared.unlock(5 + u64::from(shared.rank())).unwrap();
    assert!(shared.try_lock(50 + u64::from(shared.rank())).unwrap());
    shared.unlock(50 + u64::from(shared.rank())).unwrap();
    shared.lock_shared(40).unwrap();
    shared.unlock(40).unwrap();
    shared.barrier(0).unwrap();
}

/// `write(2)` from a page that is at another rank.
fn system_call(shared: &Shared) {
    use std::os::fd::AsRawFd;
    let region =
        shared.alloc(4096 * 4, AllocOptions::new().homes(Homes::At(rampool_shared::Rank(0)))).unwrap();
    if shared.rank() == 0 {
        // SAFETY: no rank reads before the barrier.
        unsafe { put(region, 512, u64::from_ne_bytes(*b"from far")) };
    }
    shared.barrier(0).unwrap();
    let (mut read_end, write_end) = std::io::pipe().unwrap();
    // SAFETY: eight bytes of our own region; the kernel reads them.
    let written = unsafe { libc::write(write_end.as_raw_fd(), region.at::<u64>(512).cast(), 8) };
    let expected = match shared.reach() {
        rampool_shared::Reach::SystemCalls => 8,
        rampool_shared::Reach::UserCode if shared.rank() == 0 => 8,
        rampool_shared::Reach::UserCode => -1,
    };
    assert_eq!(written, expected, "{}", std::io::Error::last_os_error());
    if written == 8 {
        let mut text = [0; 8];
        std::io::Read::read_exact(&mut read_end, &mut text).unwrap();
        assert_eq!(&text, b"from far");
    }
    // SAFETY: no rank writes any more. The program's own access always works.
    assert_eq!(unsafe { get::<u64>(region, 512) }, u64::from_ne_bytes(*b"from far"));
    shared.barrier(1).unwrap();
}

/// Looks by what its connections are carried.
fn connections(shared: &Shared) {
    let found = shared.stats().connections;
    let expected: &[(&str, u64)] = match std::env::var(CARRIED_BY).unwrap().as_str() {
        "rings" => &[("rings", 2)],
        "tcp" => &[("tcp", 2)],
        "udp" => &[("udp", 2)],
        _ if shared.rank() == 1 => &[("tcp", 2)],
        _ => &[("rings", 1), ("tcp", 1)],
    };
    assert_eq!(found, expected.iter().copied().collect(), "rank {}", shared.rank());
    shared.barrier(1).unwrap();
}

/// Says which CPUs its threads may use: the one that joined, one that it starts, the runtime's own, and the
/// first again when it has more threads than there are CPUs.
fn cpus(shared: &Shared) {
    let list = |status: &str| {
        let status = std::fs::read_to_string(status).unwrap();
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
    };
    let own = move || list("/proc/thread-self/status");
    let region = shared.alloc(4096 * usize::from(shared.ranks()), AllocOptions::new()).unwrap();
    // SAFETY: this rank's page. The service thread answers the fault, so it has begun and has its name.
    unsafe { put(region, 512 * usize::from(shared.rank()), 1_u64) };
    let mut tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let service = tasks
        .find(|task| std::fs::read_to_string(task.join("comm")).unwrap_or_default() == "rampool-share\n")
        .unwrap();
    let before = (own(), std::thread::spawn(own).join().unwrap());
    shared.set_threads(u16::MAX);
    println!("cpus {} {} {} {}", before.0, before.1, list(service.join("status").to_str().unwrap()), own());
    shared.set_threads(1);
    shared.barrier(1).unwrap();
}

/// Every rank changes all of what the next one is the home of, and sends it there: more than lies on the way
/// at a time.
fn much_at_once(shared: &Shared) {
    const WORDS: usize = 512 << 10;
    let ranks = usize::from(shared.ranks());
    let homes = |rank: usize| Homes::At(rampool_shared::Rank(u16::try_from(rank % ranks).unwrap()));
    let regions: Vec<Region> = (0..ranks)
        .map(|rank| {
            shared.alloc(WORDS * 8, AllocOptions::new().page_bytes(65536).homes(homes(rank + 1))).unwrap()
        })
        .collect();
    let me = usize::from(shared.rank());
    for round in 1..4 {
        for at in 0..WORDS {
            // SAFETY: this rank's until the barrier.
            unsafe { put(regions[me], at, (at * round) as u64) };
        }
        shared.barrier(1).unwrap();
        for at in 0..WORDS {
            // SAFETY: no rank writes between these barriers.
            assert_eq!(
                // SAFETY: as above.
                unsafe { get::<u64>(regions[(me + 1) % ranks], at) },
                (at * round) as u64,
                "word {at} in round {round}"
            );
        }
        shared.barrier(2).unwrap();
    }
}

/// Rank 1 forks while the other one wants something of it all the time: the children are no ranks, and end as
/// any process does.
fn forks(shared: &Shared) {
    let region = shared.alloc(4096, AllocOptions::new().homes(Homes::At(rampool_shared::Rank(1)))).unwrap();
    shared.barrier(0).unwrap();
    if shared.rank() == 1 {
        for _ in 0..100 {
            // SAFETY: the child calls what must not hang there, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let refused =
                    |result: Result<(), SharedError>| matches!(result, Err(SharedError::Forked { rank: 1 }));
                shared.set_threads(7);
                shared.abort("the child wants to");
                let right = refused(shared.barrier(7))
                    && refused(shared.lock(1))
                    && refused(shared.atomic(region.address(), 8, AtomicOp::Load).map(drop))
                    && refused(shared.close())
                    && !shared.is_here();
                // SAFETY: ends the child, after what is to be done when a thread ends.
                unsafe { libc::exit(i32::from(!right)) };
            }
            let (mut status, began) = (-1, Instant::now());
            // SAFETY: asks after our child.
            while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
                if began.elapsed() > Duration::from_secs(20) {
                    // SAFETY: our child.
                    unsafe { libc::kill(child, libc::SIGKILL) };
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(
                libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
                "a forked child ends with {status:#x}"
            );
        }
        shared.store(region.at(8), 1).unwrap();
    } else {
        while shared.load(region.at(8)).unwrap() == 0 {}
    }
    shared.barrier(1).unwrap();
}

/// Every rank stops itself; who goes on first waits for the others.
fn stops(shared: &Shared) {
    shared.barrier(0).unwrap();
    println!("\nstops {}", std::process::id());
    // SAFETY: a signal to this process.
    unsafe { libc::raise(libc::SIGSTOP) };
    for barrier in 1..10 {
        shared.barrier(barrier).unwrap();
    }
}

/// What `look` sees while this thread has the lock.
fn locked_by<T>(shared: &Shared, lock: u64, look: impl FnOnce() -> T) -> T {
    shared.lock(lock).unwrap();
    let seen = look();
    shared.unlock(lock).unwrap();
    seen
}

/// Threads of all ranks take a lock and keep it in a local variable, which gives it back when they end.
fn lock_of_a_variable(shared: &Shared) {
    struct Guard(Shared);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.unlock(6).unwrap();
        }
    }
    thread_local! {
        static GUARD: std::cell::RefCell<Option<Guard>> = const { std::cell::RefCell::new(None) };
    }
    for _ in 0..20 {
        let other = shared.clone();
        let thread = std::thread::spawn(move || {
            other.lock(6).unwrap();
            GUARD.set(Some(Guard(other.clone())));
        });
        thread.join().unwrap();
    }
    shared.barrier(5).unwrap();
}

/// Runs that end badly. Rank 1 is the one that does it.
fn fail(shared: &Shared, how: &str) {
    let culprit = shared.rank() == 1;
    let region =
        shared.alloc(64 * 4096, AllocOptions::new().homes(Homes::At(rampool_shared::Rank(1)))).unwrap();
    shared.barrier(0).unwrap();
    let raise = |signal| {
        // SAFETY: a signal to this process.
        unsafe { libc::raise(signal) };
    };
    // A reader of pages that rank 1 has, for as long as they come.
    let read_for_ever = || {
        for round in 0_u64.. {
            for page in 0..64 {
                // SAFETY: no rank writes.
                let _ = unsafe { get::<u64>(region, page * 512) };
            }
            shared.lock(round % 16).unwrap();
            shared.unlock(round % 16).unwrap();
        }
    };
    match how {
        "killed" => {
            if culprit {
                shared.lock(3).unwrap();
                raise(libc::SIGKILL);
            }
            if shared.rank() == 0 {
                read_for_ever();
            }
            shared.barrier(1).unwrap();
        }
        "hung" => {
            if culprit {
                raise(libc::SIGSTOP);
            }
            shared.barrier(1).unwrap();
        }
        "exits" => {
            if culprit {
                std::process::exit(0);
            }
            shared.barrier(1).unwrap();
        }
        "exit code" => {
            if culprit {
                std::process::exit(3);
            }
            shared.barrier(1).unwrap();
        }
        "panics" => {
            assert!(!culprit, "rank 1 has a mistake");
            shared.barrier(1).unwrap();
        }
        "finishes early" => {
            if !culprit {
                shared.barrier(17).unwrap();
            }
        }
        "other barrier" => shared.barrier(if culprit { 2 } else { 1 }).unwrap(),
        "other allocation" => {
            shared.alloc(if culprit { 4096 } else { 8192 }, AllocOptions::new()).unwrap();
        }
        "absent" => {
            if culprit {
                // Waits for what does not come, but not at the barrier.
                loop {
                    std::thread::park();
                }
            }
            shared.barrier(5).unwrap();
        }
        "keeps a lock" => {
            if culprit {
                shared.lock(6).unwrap();
            }
            shared.barrier(5).unwrap();
            if culprit {
                loop {
                    std::thread::park();
                }
            }
            shared.lock(6).unwrap();
        }
        "keeps a lock and waits" => {
            // Each has what the other wants.
            let (mine, other) = if culprit { (6, 7) } else { (7, 6) };
            if shared.rank() < 2 {
                shared.lock(mine).unwrap();
            }
            shared.barrier(5).unwrap();
            if shared.rank() < 2 {
                shared.lock(other).unwrap();
            }
            shared.barrier(8).unwrap();
        }
        "reads for ever" => {
            if culprit {
                shared.lock_shared(6).unwrap();
            }
            shared.barrier(5).unwrap();
            if !culprit {
                shared.lock(6).unwrap();
            }
            shared.barrier(8).unwrap();
        }
        "never signals" => {
            if shared.rank() == 0 {
                shared.lock(6).unwrap();
                shared.wait(1, 6).unwrap();
            }
            shared.barrier(8).unwrap();
        }
        "signals and keeps the lock" => {
            if shared.rank() == 0 {
                shared.lock(6).unwrap();
                // SAFETY: the lock orders all accesses.
                unsafe { put::<u64>(region, 0, 1) };
                shared.wait(1, 6).unwrap();
            }
            // SAFETY: as above.
            while culprit && unsafe { locked_by(shared, 6, || get::<u64>(region, 0)) } == 0 {}
            if culprit {
                shared.lock(6).unwrap();
                shared.signal(1, 6).unwrap();
            }
            shared.barrier(8).unwrap();
        }
        "never posts" => {
            if shared.rank() == 0 {
                shared.semaphore_wait(3).unwrap();
            }
            shared.barrier(8).unwrap();
        }
        "last is absent" => {
            if shared.rank() == shared.ranks() - 1 {
                loop {
                    std::thread::park();
                }
            }
            shared.barrier(5).unwrap();
        }
        "no allocation" => {
            if culprit {
                shared.alloc(4096, AllocOptions::new()).unwrap();
            }
            loop {
                std::thread::park();
            }
        }
        "a thread is absent" => {
            shared.set_threads(2);
            if culprit {
                shared.lock(6).unwrap();
            }
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    if culprit {
                        // The other thread of this rank has it and waits at the barrier.
                        shared.lock(6).unwrap();
                    }
                    shared.barrier(5).unwrap();
                });
                shared.barrier(5).unwrap();
            });
        }
        "ends with a lock" => {
            if culprit {
                // Joined: only then it has ended, and not merely done its work.
                std::thread::scope(|scope| scope.spawn(|| shared.lock(6).unwrap()).join().unwrap());
            }
            shared.barrier(5).unwrap();
        }
        "panics with a lock" => {
            if culprit {
                let ended = std::thread::scope(|scope| {
                    let thread = scope.spawn(|| {
                        shared.lock_shared(6).unwrap();
                        panic!("a thread of rank 1 has a mistake");
                    });
                    thread.join()
                });
                assert!(ended.is_err());
            }
            shared.barrier(5).unwrap();
        }
        "finishes with a lock" => {
            if culprit {
                shared.lock(6).unwrap();
            }
        }
        "exits with a lock" => {
            if culprit {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        shared.lock(6).unwrap();
                        std::process::exit(3);
                    });
                });
            }
            shared.barrier(5).unwrap();
        }
        "stray" => {
            if culprit {
                let outside: *mut u8 = std::ptr::with_exposed_provenance_mut(region.address() + (1 << 30));
                // SAFETY: none: this access is the mistake, and it ends the process.
                unsafe { outside.write_volatile(1) };
            }
            shared.barrier(1).unwrap();
        }
        "returns errors" => {
            let error = shared.barrier(if culprit { 2 } else { 1 }).unwrap_err();
            // A rank that knows the reason ends, and its end can be known before the reason.
            let known = ["different barriers", "its process ended without finishing"]
                .iter()
                .any(|reason| error.to_string().contains(reason));
            assert!(matches!(error, SharedError::Stopped { .. }) && known, "{error}");
            assert_eq!(shared.lock(1).unwrap_err().to_string(), error.to_string());
            assert!(matches!(shared.alloc(1, AllocOptions::new()), Err(SharedError::Stopped { .. })));
            assert!(matches!(shared.close(), Err(SharedError::Stopped { .. })));
            std::process::exit(0);
        }
        "gives up" => {
            if culprit {
                shared.abort("the input is wrong");
            }
            shared.barrier(1).unwrap();
        }
        other => panic!("no program {other}"),
    }
}

// --- tests -------------------------------------------------------------------------------------------------

const PROTOCOLS: [&str; 6] = ["sc", "lrc", "hlrc", "aurc", "ibec", "auto"];

/// Under every protocol, on 2 and 4 ranks, through shared memory and over TCP.
fn everywhere(program: &str) {
    for protocol in PROTOCOLS {
        for (ranks, same_host) in [(2, "rings"), (2, "socket"), (4, "rings"), (4, "socket")] {
            Launch::new(ranks, program).args(&["--protocol", protocol, "--same-host", same_host]).succeeds();
        }
    }
}

#[test]
fn ranks_of_one_machine_share_memory_unless_somebody_does_not_want_it() {
    let connections = |carried_by| Launch::new(3, "connections").env(CARRIED_BY, carried_by);
    connections("rings").succeeds();
    connections("rings").args(&["--same-host", "rings"]).succeeds();
    connections("tcp").args(&["--same-host", "socket"]).succeeds();
    connections("udp").args(&["--transport", "udp"]).succeeds();
    // Ranks 0 and 2 have shared memory between them, rank 1 has none.
    connections("both").env(APART, "1").succeeds();
    let (said, _) = connections("both").env(APART, "1").args(&["--same-host", "rings"]).fails();
    assert!(said.contains("rank 1 is on this machine, but shares no memory with this one"), "{said}");
    let output = connections("rings").arg("--stats").run();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("connections: 3 over rings"), "{said}");
}

#[test]
fn ranks_have_cpus_of_their_own_among_those_that_the_launcher_may_use() {
    let all = rampool_kernel::thread::allowed_cpus();
    let parse = |list: &str| -> Vec<usize> {
        let ends = list.split(',').map(|run| run.split_once('-').unwrap_or((run, run)));
        ends.flat_map(|(first, last)| first.parse().unwrap()..=last.parse().unwrap()).collect()
    };
    // Of each rank: its first thread, one that this started, the service thread, and the first when it has
    // many threads.
    let run = |launch: Launch| -> Vec<Vec<Vec<usize>>> {
        let output = launch.run();
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stdout).unwrap();
        let ranks: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("cpus ")).collect();
        assert_eq!(ranks.len(), 2, "{said}");
        ranks.into_iter().map(|lists| lists.split(' ').map(parse).collect()).collect()
    };
    if all.len() > 1 {
        for launch in [Launch::new(2, "cpus"), Launch::new(2, "cpus").args(&["--bind", "rank"])] {
            let ranks = run(launch);
            for threads in &ranks {
                assert!(threads[1] == threads[0] && threads[2] == threads[0], "{ranks:?}");
                assert_eq!(threads[3], all, "{ranks:?}");
            }
            let mut shares = [ranks[0][0].clone(), ranks[1][0].clone()].concat();
            shares.sort_unstable();
            assert_eq!(shares, all, "each CPU is one rank's: {ranks:?}");
            assert!(ranks[0][0].len().abs_diff(ranks[1][0].len()) <= 1, "{ranks:?}");
        }
        let output = Launch::new(2, "placement").arg("--stats").run();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            said.lines().any(|line| line.starts_with("CPUs: ") && line.ends_with(" of rank 1")),
            "{said}"
        );
    }
    assert_eq!(run(Launch::new(2, "cpus").args(&["--bind", "none"])), vec![vec![all.clone(); 4]; 2]);
    // A CPU for two ranks: no rank is bound any further than the launcher.
    let mut launch = Launch::new(2, "cpus");
    let one = all[0];
    // SAFETY: between fork and exec only sched_setaffinity is called, which is async-signal-safe.
    unsafe {
        launch.command.pre_exec(move || {
            rampool_kernel::thread::pin_to_cpu(one).map_err(std::io::Error::from_raw_os_error)
        })
    };
    assert_eq!(run(launch), vec![vec![vec![one]; 4]; 2]);
}

#[test]
fn a_forked_child_is_no_rank_and_ends_as_any_process() {
    for same_host in ["rings", "socket"] {
        Launch::new(2, "forks").args(&["--same-host", same_host]).succeeds();
    }
}

#[test]
fn more_than_fits_the_shared_memory_goes_through_it() {
    for (ranks, protocol) in [(2, "hlrc"), (3, "aurc"), (2, "lrc")] {
        Launch::new(ranks, "much at once").args(&["--protocol", protocol, "--same-host", "rings"]).succeeds();
    }
}

#[test]
fn a_counter_under_a_lock_counts_everything() {
    everywhere("counter");
}

#[test]
fn threads_of_all_ranks_share_pages_falsely() {
    everywhere("false sharing");
}

#[test]
fn a_bounded_buffer_passes_everything_on_once() {
    everywhere("bounded buffer");
}

#[test]
fn over_relaxation_gives_what_one_thread_gives() {
    everywhere("sor");
}

#[test]
fn atomic_words_and_semaphores_count() {
    everywhere("words");
}

#[test]
fn litmus_tests_hold_between_processes() {
    for protocol in PROTOCOLS {
        Launch::new(3, "litmus").arg("--protocol").arg(protocol).succeeds();
    }
}

#[test]
fn memory_is_allocated_and_freed_by_all_and_by_one() {
    for ranks in [1, 2, 3] {
        Launch::new(ranks, "allocations").succeeds();
    }
}

/// A memory server for a test's ranks.
fn memory_server() -> (RunningServer, String) {
    let mut config = ServerConfig::new(256 << 20, "127.0.0.1:0".parse().unwrap());
    config.lock_memory = false;
    let server = Server::start(config).unwrap();
    let address = format!("{}=64M", server.addr());
    (server, address)
}

#[test]
fn more_data_than_ranks_may_keep_goes_to_memory_servers_and_comes_back() {
    let (server, address) = memory_server();
    for protocol in PROTOCOLS {
        Launch::new(2, "budget")
            .args(&["--protocol", protocol, "--local", "1536K", "--server", &address])
            .succeeds();
    }
    drop(server);
}

/// `rampool serve` as a process of its own.
fn memory_server_process() -> (Child, String) {
    let mut server = Command::new(env!("CARGO_BIN_EXE_rampool"));
    server.args([
        "serve",
        "--memory",
        "128M",
        "--listen",
        "127.0.0.1:0",
        "--no-lock",
        "--log-level",
        "error",
    ]);
    let mut server = server.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let address =
        lines.find_map(|line| line.unwrap().strip_prefix("listening on ").map(str::to_owned)).unwrap();
    (server, address)
}

/// Two ranks that never end, once they use their servers; and what they say.
fn budget_run(args: &[&str]) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut launch = Launch::new(2, "budget for ever").args(&["--local", "1536K"]).args(args).command;
    launch.arg(std::env::current_exe().unwrap()).args([
        "--exact",
        "this_binary_is_a_rank",
        "--nocapture",
        "--quiet",
    ]);
    let mut run = launch.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut said = BufReader::new(run.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains(AWAY)), "the ranks use the server");
    (run, said)
}

#[test]
fn pages_beyond_the_budget_outlive_one_of_two_memory_servers() {
    let [(mut first, a), (mut second, b)] = [memory_server_process(), memory_server_process()];
    let (run, mut said) = budget_run(&["--memory", "32M", "--server", &a, "--server", &b]);
    first.kill().unwrap();
    // All pages are read and written many times.
    for _ in 0..4 {
        assert!(said.any(|line| line.contains(AWAY)), "{:?}", end(run));
    }
    second.kill().unwrap();
    let (message, code) = end(run);
    assert!(message.contains(&format!("memory server {b} is lost")), "{message}");
    assert_eq!(code, Some(rampool_shared::EXIT_FAILED), "{message}");
    first.wait().unwrap();
    second.wait().unwrap();
    let two = ["--local", "2M", "--server", "127.0.0.1:1=1M", "--copies", "2"];
    let (refused, _) = Launch::new(2, "sor").args(&two).fails();
    assert!(refused.contains("needs two servers"), "{refused}");
}

#[test]
fn a_memory_server_that_is_killed_ends_the_run_and_is_named_with_the_rank() {
    let (mut server, address) = memory_server_process();
    let (run, _said) = budget_run(&["--server", &format!("{address}=64M")]);
    server.kill().unwrap();
    server.wait().unwrap();
    let (message, code) = end(run);
    let line = message.lines().find(|line| line.starts_with("rampool: ")).unwrap_or_default();
    for word in [
        "rank ",
        "shared pages failed",
        &format!("memory server {address} is lost"),
        "so the other rank was ended",
    ] {
        assert!(line.contains(word), "{message}");
    }
    assert_eq!(code, Some(rampool_shared::EXIT_FAILED), "{message}");
}

#[test]
fn freed_memory_goes_back_to_the_kernel_and_is_zero_when_it_is_taken_again() {
    for protocol in PROTOCOLS {
        Launch::new(2, "free and take").args(&["--protocol", protocol]).succeeds();
    }
}

#[test]
fn copies_that_another_rank_has_leave_for_want_of_room() {
    for protocol in ["sc", "hlrc", "aurc", "ibec"] {
        Launch::new(2, "clean copies").args(&["--protocol", protocol, "--local", "1536K"]).succeeds();
    }
}

#[test]
fn a_budget_that_cannot_be_kept_ends_the_run_and_says_what_to_do() {
    let (said, _) = Launch::new(2, "budget").args(&["--local", "1M"]).fails();
    for word in ["rank", "cannot forget", "1 MiB", "--server", "--local"] {
        assert!(said.contains(word), "{said}");
    }
    for (arguments, word) in [
        (&["--server", "127.0.0.1:1=1M"][..], "--local"),
        (&["--local", "1M", "--server", "127.0.0.1:1"], "--memory"),
        (&["--local", "4K"], "1 MiB"),
        (&["--local", "1M", "--server", "127.0.0.1:1=1M"], "127.0.0.1:1"),
    ] {
        let (said, _) = Launch::new(2, "sor").args(arguments).fails();
        assert!(said.contains(word), "{said}");
    }
}

#[test]
fn protocols_live_side_by_side() {
    Launch::new(3, "protocols").succeeds();
    Launch::new(2, "protocols").arg("--protocol").arg("ibec").succeeds();
}

#[test]
fn homes_and_managers_are_set_by_hand() {
    for protocol in ["sc", "hlrc", "ibec"] {
        Launch::new(3, "placement").arg("--protocol").arg(protocol).succeeds();
    }
}

#[test]
fn mappings_that_the_kernel_takes_away_come_back_with_their_protection() {
    everywhere("vanishing mappings");
}

#[test]
fn a_mistake_ends_the_call_and_says_who_and_what() {
    Launch::new(2, "mistakes").succeeds();
}

#[test]
fn system_calls_reach_pages_of_other_ranks_where_the_kernel_allows_it() {
    Launch::new(2, "system call").succeeds();
    Launch::new(2, "system call").env("RAMPOOL_SHARED_USER_FAULTS", "1").succeeds();
}

#[test]
fn every_protocol_works_over_datagrams() {
    for (program, protocol) in [
        ("counter", "lrc"),
        ("sor", "hlrc"),
        ("bounded buffer", "ibec"),
        ("false sharing", "aurc"),
        ("words", "sc"),
    ] {
        Launch::new(3, program).args(&["--protocol", protocol, "--transport", "udp"]).succeeds();
    }
}

#[test]
fn a_key_seals_what_travels() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("one.key");
    rampool_net::key::Key::generate().save_new(&key).unwrap();
    let sealed = |program| {
        Launch::new(3, program).arg("--key-file").arg(key.to_str().unwrap()).env("RAMPOOL_ENCRYPTION", "on")
    };
    sealed("sor").args(&["--same-host", "rings"]).succeeds();
    sealed("sor").args(&["--same-host", "socket"]).succeeds();
    sealed("bounded buffer").args(&["--same-host", "socket"]).succeeds();
    for program in ["sor", "counter", "words"] {
        sealed(program).args(&["--transport", "udp"]).succeeds();
    }
}

/// This binary as one rank, started by the test alone.
fn rank(program: &str, rank: u16, ranks: u16, port: u16) -> Command {
    let mut command = alone(program);
    command.env("RAMPOOL_RANK", rank.to_string()).env("RAMPOOL_RANKS", ranks.to_string());
    command.env("RAMPOOL_RENDEZVOUS", format!("127.0.0.1:{port}")).env("RAMPOOL_JOIN_S", "60");
    command
}

/// This binary, with nothing in its environment that says which rank it is.
fn alone(program: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    settings::clear(&mut command);
    command.args(["--exact", "this_binary_is_a_rank", "--nocapture", "--quiet"]).env(PROGRAM, program);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).stdin(Stdio::null());
    command
}

#[test]
fn unauthenticated_peers_are_rejected_and_the_ranks_meet() {
    let port = free_port();
    let first = rank("counter", 0, 2, port).env("RAMPOOL_RUN", "ours").spawn().unwrap();
    let unauthenticated = loop {
        match std::net::TcpStream::connect(("127.0.0.1", port)) {
            Ok(unauthenticated) => break unauthenticated,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    (&unauthenticated).write_all(&[0xa5; 500]).unwrap();
    let (said, code) = end(rank("counter", 1, 2, port).env("RAMPOOL_RUN", "theirs").spawn().unwrap());
    assert!(said.contains("another run"), "{said}");
    assert_eq!(code, Some(9));
    let second = rank("counter", 1, 2, port).env("RAMPOOL_RUN", "ours").spawn().unwrap();
    for child in [first, second] {
        let (said, code) = end(child);
        assert_eq!(code, Some(0), "{said}");
    }
}

/// Each of them had ten seconds to itself.
#[test]
fn peers_that_say_nothing_keep_no_rank_out() {
    let port = free_port();
    let first = rank("counter", 0, 2, port).env("RAMPOOL_JOIN_S", "25").spawn().unwrap();
    let knock = || std::net::TcpStream::connect(("127.0.0.1", port));
    let mut silent = vec![loop {
        match knock() {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }];
    silent.extend((0..200).map(|_| knock().unwrap()));
    let second = rank("counter", 1, 2, port).env("RAMPOOL_JOIN_S", "25").spawn().unwrap();
    for child in [first, second] {
        let (said, code) = end(child);
        assert_eq!(code, Some(0), "{said}");
    }
    drop(silent);
}

/// The name of a run is easy to guess where another launcher gives it: it opens nothing. Nor does an address
/// that other machines reach, without a key.
#[test]
fn a_run_is_closed_to_all_who_do_not_have_its_key() {
    let port = free_port();
    let first = rank("counter", 0, 2, port).env("RAMPOOL_RUN", "slurm 77.0").spawn().unwrap();
    let mut unauthenticated = loop {
        match std::net::TcpStream::connect(("127.0.0.1", port)) {
            Ok(unauthenticated) => break unauthenticated,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    unauthenticated.write_all(&Preface::ask(Encryption::Auto, false, 0, 7).encode()).unwrap();
    let mut answer = [0; PREFACE_BYTES];
    unauthenticated.read_exact(&mut answer).unwrap();
    assert_eq!(Preface::parse(&answer).unwrap().verdict, Verdict::Refused(Refusal::KeyNeeded));
    let second = rank("counter", 1, 2, port).env("RAMPOOL_RUN", "slurm 77.0").spawn().unwrap();
    for child in [first, second] {
        let (said, code) = end(child);
        assert_eq!(code, Some(0), "{said}");
    }
    for number in [0, 1] {
        let mut far = rank("counter", number, 2, port);
        let (said, code) = end(far.env("RAMPOOL_RENDEZVOUS", "192.0.2.1:7118").spawn().unwrap());
        assert!(said.contains("RAMPOOL_KEY_FILE") && said.contains("192.0.2.1:7118"), "{said}");
        assert_eq!(code, Some(9));
    }
}

/// Neither in the command line of the remote shell, which everybody sees, nor in the name of a file.
#[test]
fn the_key_of_a_run_is_nowhere_but_in_its_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let (shell, hosts, temporary) =
        (dir.path().join("shell"), dir.path().join("hosts"), dir.path().join("temporary"));
    std::fs::create_dir(&temporary).unwrap();
    std::fs::write(&shell, format!("echo \"$@\" >> {0}/lines; exec sh -c \"$2\"\n", dir.path().display()))
        .unwrap();
    std::fs::write(&hosts, "localhost\n").unwrap();
    let here = dir.path().display();
    let say = format!(
        "echo \"$RAMPOOL_RUN_KEY\" > {here}/$RAMPOOL_RANK; ls -lR {here} > {here}/list.$RAMPOOL_RANK; cat > \
         {here}/input.$RAMPOOL_RANK"
    );
    let launch = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
        settings::clear(&mut command);
        command
            .args(["launch", "-n", "2"])
            .args(arguments)
            .args(["sh", "-c", &say])
            .env("TMPDIR", &temporary);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"for rank 0\n").unwrap();
        let (said, code) = end(child);
        assert_eq!(code, Some(0), "{said}");
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        let key = read("0").trim().to_owned();
        assert_eq!((key.len(), read("1").trim()), (64, key.as_str()));
        assert_eq!((read("input.0").as_str(), read("input.1").as_str()), ("for rank 0\n", ""));
        let public = read("list.0")
            + &read("list.1")
            + &std::fs::read_to_string(dir.path().join("lines")).unwrap_or_default();
        assert!(!public.contains(&key) && !public.contains(&key[..32]), "{public}");
        public
    };
    let public = launch(&["--stats"]);
    assert!(public.contains("drwx------") && public.contains("rampool-launch-"), "{public}");
    launch(&["--hosts", hosts.to_str().unwrap(), "--ssh", &format!("sh {}", shell.display())]);
}

#[test]
fn ranks_with_different_keys_do_not_meet() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let start = |number: u16| {
        let path = dir.path().join(number.to_string());
        rampool_net::key::Key::generate().save_new(&path).unwrap();
        rank("counter", number, 2, port)
            .env("RAMPOOL_KEY_FILE", path)
            .env("RAMPOOL_JOIN_S", "6")
            .spawn()
            .unwrap()
    };
    let ranks = [start(0), start(1)];
    let said = ranks.map(|child| end(child).0);
    assert!(said[0].contains("rank 1 did not come within 6 s"), "{}", said[0]);
    assert!(said[1].contains("different keys"), "{}", said[1]);
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let port = free_port();
    let ranks =
        [0, 2].map(|number| rank("counter", number, 4, port).env("RAMPOOL_JOIN_S", "6").spawn().unwrap());
    let said = ranks.map(|child| end(child).0);
    assert!(said[0].contains("rank 1, rank 3 did not come within 6 s"), "{}", said[0]);
    assert!(said[1].contains("did not come within 6 s"), "{}", said[1]);
}

#[test]
fn ranks_meet_over_a_remote_shell() {
    let dir = tempfile::tempdir().unwrap();
    let shell = dir.path().join("shell");
    // Stands for ssh: runs the command here, and remembers the machine's name.
    std::fs::write(&shell, format!("echo \"$1\" >> {0}/names; exec sh -c \"$2\"\n", dir.path().display()))
        .unwrap();
    let hosts = dir.path().join("hosts");
    std::fs::write(&hosts, "127.0.0.1 slots=2 # this machine\nlocalhost\n").unwrap();
    let port = free_port();
    Launch::new(3, "counter")
        .args(&[
            "--hosts",
            hosts.to_str().unwrap(),
            "--ssh",
            &format!("sh {}", shell.display()),
            "--port",
            &port.to_string(),
        ])
        .succeeds();
    let mut names: Vec<String> =
        std::fs::read_to_string(dir.path().join("names")).unwrap().lines().map(str::to_owned).collect();
    names.sort();
    assert_eq!(names, ["127.0.0.1", "127.0.0.1", "localhost"]);
}

/// As from one machine, though each rank sees the end of the run by itself, and ssh says of a command that
/// was killed only that something failed.
#[test]
fn a_run_that_fails_on_other_machines_is_told_in_one_message_too() {
    let dir = tempfile::tempdir().unwrap();
    let (shell, hosts) = (dir.path().join("shell"), dir.path().join("hosts"));
    let as_ssh = "import subprocess, sys; code = subprocess.call(['sh', '-c', sys.argv[1]]); sys.exit(255 if \
        code < 0 else code)";
    std::fs::write(&shell, format!("exec python3 -c \"{as_ssh}\" \"$2\"\n")).unwrap();
    std::fs::write(&hosts, "localhost\n127.0.0.1\nlocalhost\n").unwrap();
    let cases: [(&str, &str, i32); 5] = [
        ("killed", "rank 1 on 127.0.0.1 was killed, or the connection to it broke: ", 255),
        ("exits", "rank 1 is lost: its process ended without finishing; so the 2 other ranks were ended", 87),
        ("exit code", "rank 1 on 127.0.0.1 ended with exit code 3; so the 2 other ranks were ended", 3),
        ("other barrier", "ranks meet at different barriers", 86),
        ("gives up", "rank 1 gave up: the input is wrong", 86),
    ];
    for (how, words, code) in cases {
        let port = free_port().to_string();
        let arguments = [
            "--hosts",
            hosts.to_str().unwrap(),
            "--ssh",
            &format!("sh {}", shell.display()),
            "--port",
            &port,
        ];
        let (said, got) = Launch::new(3, how).args(&arguments).fails();
        let about: Vec<&str> =
            said.lines().filter(|line| line.contains("rampool") || line.contains("rank 1")).collect();
        assert!(
            about.len() == 1 && about[0].starts_with("rampool: ") && about[0].contains(words),
            "{how}: {said}"
        );
        assert_eq!(got, Some(code), "{how}: {said}");
    }
}

/// A command `ssh` for `PATH` that runs what it is given on this machine, in another directory, without the
/// caller's environment. The machine `refuses` denies access.
fn stand_in_for_ssh(dir: &std::path::Path) -> String {
    let (written, ssh) = (dir.join("ssh.sh"), dir.join("ssh"));
    let script = "#!/bin/sh\n[ $# = 2 ] || exit 99\n\
                  [ \"$1\" = refuses ] && { echo 'Permission denied (publickey).' >&2; exit 255; }\n\
                  cd / && exec env -i PATH=/usr/bin:/bin sh -c \"$2\"\n";
    std::fs::write(&written, script).unwrap();
    rampool_testing::copy_program(&written, &ssh);
    format!("{}:{}", dir.display(), std::env::var("PATH").unwrap())
}

#[test]
fn ssh_gets_words_variables_and_the_directory_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let path = stand_in_for_ssh(dir.path());
    let here = dir.path().join("it's $HOME; a `dir`");
    std::fs::create_dir(&here).unwrap();
    let (hosts, key) = (dir.path().join("hosts"), here.join("the key"));
    std::fs::write(&hosts, "# two machines\n\nlocalhost\n127.0.0.1 slots=2\n").unwrap();
    rampool_net::key::Key::generate().save_new(&key).unwrap();
    // Each rank says what it was given; the program does not use shared memory, so the ranks do not wait for
    // each other.
    let print = r#"printf '%s|' "$PWD" "$RAMPOOL_RANK/$RAMPOOL_RANKS" "$RAMPOOL_KEY_FILE" "$RAMPOOL_RENDEZVOUS" "$@" > "$RAMPOOL_RANK.said""#;
    let words = ["it's", "two words", "$HOME", "`ls`", "", "a\\b\"c", "*"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
    command.args(["launch", "-n", "3", "--port", "7199", "--hosts"]).arg(&hosts).arg("--key-file").arg(&key);
    command.args(["sh", "-c", print, "name"]).args(words).current_dir(&here).env("PATH", path);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    for rank in 0..3 {
        let said = std::fs::read_to_string(here.join(format!("{rank}.said"))).unwrap();
        let expected =
            format!("{}|{rank}/3|{}|localhost:7199|{}|", here.display(), key.display(), words.join("|"));
        assert_eq!(said, expected);
    }
}

#[test]
fn a_machine_that_denies_access_is_named_and_so_is_a_key_that_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let path = stand_in_for_ssh(dir.path());
    let hosts = dir.path().join("hosts");
    let launch = |file: &str| {
        std::fs::write(&hosts, file).unwrap();
        let port = free_port().to_string();
        Launch::new(2, "counter")
            .args(&["--hosts", hosts.to_str().unwrap(), "--port", &port])
            .env("PATH", &path)
    };
    let (said, code) = launch("localhost\nrefuses\n").fails();
    for word in ["Permission denied (publickey).", "rank 1 on refuses", "255", "the other rank was ended"] {
        assert!(said.contains(word), "{said}");
    }
    assert_eq!(code, Some(255));
    let missing = dir.path().join("no such key");
    let (said, _) = launch("localhost slots=2\n").arg("--key-file").arg(missing.to_str().unwrap()).fails();
    assert!(said.contains(missing.to_str().unwrap()) && said.contains("key"), "{said}");
    for (file, word) in [
        ("# empty\n", "names no machine"),
        ("localhost slots=many\n", "slots=many"),
        ("-oProxyCommand=x\n", "-oProxyCommand=x"),
    ] {
        let (said, _) = launch(file).fails();
        assert!(said.contains(word) && said.contains(hosts.to_str().unwrap()), "{said}");
    }
    std::fs::remove_file(&hosts).unwrap();
    let (said, _) = Launch::new(2, "counter").args(&["--hosts", hosts.to_str().unwrap()]).fails();
    assert!(said.contains("cannot read"), "{said}");
}

#[test]
fn ranks_meet_under_other_launchers() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let job = dir.path().to_str().unwrap();
    for names in [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("RANK", "WORLD_SIZE"),
    ] {
        let start = |rank: u16| {
            let mut command = alone("counter");
            command
                .env(names.0, rank.to_string())
                .env(names.1, "2")
                .env("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
                .env("PMIX_NAMESPACE", job);
            command.env("SLURM_JOB_ID", port.to_string()).env("SLURM_STEP_ID", "0").env("SLURM_NNODES", "1");
            if names.0 == "RANK" {
                command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            }
            command.spawn().unwrap()
        };
        for child in [start(1), start(0)] {
            let (said, code) = end(child);
            assert_eq!(code, Some(0), "{names:?}: {said}");
        }
    }
}

/// How each run of `fail` must be told, and its exit code.
#[test]
fn a_run_that_fails_is_told_in_one_message_that_names_the_rank_and_why() {
    // A connection that ends looks different by what carries it.
    let (rings, socket) = ("rings", "socket");
    let cases: [(&str, &str, &[&str], i32); 18] = [
        ("killed", rings, &["rank 1 was killed by signal 9 (SIGKILL)"], 137),
        ("killed", socket, &["rank 1 was killed by signal 9 (SIGKILL)"], 137),
        ("exits", rings, &["rank 1 is lost: its process ended without finishing"], 87),
        ("exits", socket, &["rank 1 is lost: its process ended without finishing"], 87),
        ("exit code", rings, &["rank 1 ended with exit code 3"], 3),
        ("panics", rings, &["rank 1 ended with exit code 101"], 101),
        ("finishes early", rings, &["waits at barrier 17", "rank 1 has finished"], 86),
        ("other barrier", rings, &["different barriers", "barrier 1", "barrier 2", "rank 1"], 86),
        ("other allocation", rings, &["do not agree", "8192 bytes", "4096 bytes", "rank 1"], 86),
        ("stray", rings, &["rank 1 was killed by signal 11 (SIGSEGV)"], 139),
        ("gives up", rings, &["rank 1 gave up: the input is wrong"], 86),
        ("hung", rings, &["rank 1 is lost: it has said nothing for 6 s"], 87),
        ("absent", rings, &["has waited 5 s at barrier 5", "not there: rank 1"], 86),
        ("keeps a lock", rings, &["has waited 5 s for lock 6; rank 1 (thread 0) has held lock 6 for "], 86),
        ("ends with a lock", rings, &["rank 1 (thread 1) ended while it held lock 6"], 86),
        ("panics with a lock", rings, &["rank 1 (thread 1) ended while it held lock 6"], 86),
        ("finishes with a lock", rings, &["rank 1 finishes while its thread 0 holds lock 6"], 86),
        ("exits with a lock", rings, &["rank 1 ended with exit code 3"], 3),
    ];
    for (how, same_host, words, code) in cases {
        let mut launch = Launch::new(3, how).args(&["--same-host", same_host]);
        match how {
            "hung" => launch = launch.env("RAMPOOL_SILENCE_S", "6"),
            "absent" | "keeps a lock" => launch = launch.env("RAMPOOL_DEADLINE_S", "5"),
            _ => {}
        }
        let (said, got) = launch.fails();
        let messages: Vec<&str> = said.lines().filter(|line| line.starts_with("rampool: ")).collect();
        assert_eq!(messages.len(), 1, "{how}: {said}");
        assert!(words.iter().all(|word| messages[0].contains(word)), "{how}: {said}");
        assert!(messages[0].contains("so the 2 other ranks were ended"), "{how}: {said}");
        assert_eq!(got, Some(code), "{how}: {said}");
    }
}

/// What a message may be: each way of it is some words.
type Ways<'a> = &'a [&'a [&'a str]];

/// Several ranks can notice first, and each reports it from its own side.
#[test]
fn who_waits_until_the_deadline_is_told_who_keeps_it_waiting() {
    let holder = "; rank 1 (thread 0) has held lock 6 for ";
    let cases: [(&str, u16, &[&str], Ways<'_>); 10] = [
        ("keeps a lock", 3, &["--protocol", "hlrc"], &[&["for lock 6", holder]]),
        ("keeps a lock", 3, &["--protocol", "ibec", "--transport", "udp"], &[&["for lock 6", holder]]),
        (
            "keeps a lock and waits",
            2,
            &[],
            &[
                &["rank 0 (thread 0) has waited", holder, "s and waits for lock 7"],
                &[
                    "rank 1 (thread 0) has waited",
                    "; rank 0 (thread 0) has held lock 7 for ",
                    "and waits for lock 6",
                ],
            ],
        ),
        (
            "reads for ever",
            2,
            &[],
            &[
                &["for lock 6", holder, "and waits at barrier 8"],
                &["at barrier 8; not there: rank 0 (thread 0 waits for lock 6)"],
            ],
        ),
        (
            "never signals",
            2,
            &[],
            &[
                &["for a signal of condition 1 of lock 6; no thread holds lock 6 now"],
                &["not there: rank 0 (thread 0 waits for a signal of condition 1 of lock 6)"],
            ],
        ),
        (
            "signals and keeps the lock",
            2,
            &[],
            &[
                &["for lock 6, behind a signal of condition 1", holder, "and waits at barrier 8"],
                &["not there: rank 0 (thread 0 waits for a signal of condition 1 of lock 6)"],
            ],
        ),
        ("never posts", 2, &[], &[&["for a post to semaphore 3"]]),
        ("last is absent", 18, &[], &[&["at barrier 5; not there: rank 17; so the"]]),
        (
            "no allocation",
            3,
            &[],
            &[&["rank 1 has waited ", " s for an allocation; rank 0, rank 2 did not make the same call;"]],
        ),
        (
            "a thread is absent",
            2,
            &[],
            &[
                &["at barrier 5; not there: rank 1 (1 of 2 threads are there; thread 1 waits for lock 6)"],
                &["for lock 6", holder, "and waits at barrier 5"],
            ],
        ),
    ];
    // They only wait, and may do so at the same time.
    std::thread::scope(|scope| {
        for (how, ranks, arguments, ways) in cases {
            scope.spawn(move || {
                let (said, code) =
                    Launch::new(ranks, how).args(arguments).env("RAMPOOL_DEADLINE_S", "3").fails();
                let messages: Vec<&str> = said.lines().filter(|line| line.starts_with("rampool: ")).collect();
                assert!(messages.len() == 1 && code == Some(86), "{how}: {said}");
                assert!(
                    ways.iter().any(|words| words.iter().all(|word| messages[0].contains(word))),
                    "{how}: {said}"
                );
            });
        }
    });
}

#[test]
fn a_lock_may_go_with_its_threads_variables() {
    Launch::new(2, "lock of a variable").succeeds();
}

#[test]
fn what_cannot_be_written_is_said_before_a_run_and_what_is_left_of_another_is_not_in_the_way() {
    let dir = tempfile::tempdir().unwrap();
    let launch = |option: String| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
        settings::clear(&mut command);
        command.args(["launch", "-n", "2", &option, "touch", "ran"]).current_dir(dir.path()).output().unwrap()
    };
    let output = launch("--stats=no such directory/stats.json".to_owned());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("no such directory/stats.json"), "{said}");
    assert!(!dir.path().join("ran").exists(), "the program began");
    // A trace of ranks that this run does not have.
    let traces = dir.path().join("traces");
    std::fs::create_dir(&traces).unwrap();
    for name in ["rank-0.jsonl", "rank-7.jsonl", "rank-of-mine.jsonl", "notes"] {
        std::fs::write(traces.join(name), "").unwrap();
    }
    let output = launch("--trace=traces".to_owned());
    assert!(output.status.success() && dir.path().join("ran").exists(), "{output:?}");
    let mut left: Vec<_> =
        std::fs::read_dir(&traces).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["notes", "rank-of-mine.jsonl"]);
}

#[test]
fn calls_return_the_error_where_the_program_asks_for_that() {
    Launch::new(3, "returns errors").succeeds();
}

#[test]
fn ranks_that_do_not_fit_together_refuse_each_other_by_name() {
    for (how, words) in [
        ("versions", ["rank 1 is rampool 0.0.9", "rank 0 is rampool"]),
        ("settings", ["rank 1 has lrc", "rank 0 has auto"]),
    ] {
        let (said, code) = Launch::new(2, how).fails();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert_eq!(code, Some(9), "{said}");
    }
}

/// To lock the range was to fill it, and locked pages could not be taken away.
#[test]
fn programs_that_lock_their_memory_into_ram_share_memory_too() {
    for when in ["before", "after", "region"] {
        for (protocol, budget) in
            [("hlrc", false), ("sc", false), ("lrc", false), ("ibec", false), ("hlrc", true)]
        {
            let launch = Launch::new(2, "locked")
                .env(WHEN, when)
                .env("RAMPOOL_SHARED_RANGE", "1G")
                .args(&["--protocol", protocol]);
            if budget {
                let (server, address) = memory_server();
                launch.args(&["--local", "1536K", "--server", &address]).succeeds();
                drop(server);
            } else {
                launch.succeeds();
            }
        }
    }
}

/// Once, rank 0 retried accepting until the time to join was over, and then reported the others as missing.
#[test]
fn a_rank_that_may_open_too_few_descriptors_says_so() {
    for spare in 0..12 {
        let output = Launch::new(3, "few descriptors").env(SPARE, &spare.to_string()).run();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() || said.contains("errno 24") || said.contains("os error 24"),
            "{spare}: {said}"
        );
    }
}

/// The kernel ended it by a signal.
#[test]
fn a_rank_whose_files_may_not_be_long_says_so() {
    let (said, code) = Launch::new(2, "short files").fails();
    assert!(said.contains("ulimit -f") && code == Some(9), "{said}");
}

#[test]
fn a_signal_to_the_launcher_reaches_the_ranks() {
    let mut launch = Launch::new(2, "absent");
    launch.command.arg(std::env::current_exe().unwrap()).args([
        "--exact",
        "this_binary_is_a_rank",
        "--nocapture",
        "--quiet",
    ]);
    let mut child = launch.command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    // SAFETY: our own child.
    unsafe { libc::kill(i32::try_from(child.id()).unwrap(), libc::SIGTERM) };
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < DEADLINE, "the launcher does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{output:?}");
}

/// As by Ctrl-Z, or with the machine that they are on.
#[test]
fn ranks_that_were_stopped_together_for_longer_than_a_silence_go_on() {
    const SILENCE: Duration = Duration::from_secs(4);
    for transport in ["tcp", "udp"] {
        let mut launch =
            Launch::new(3, "stops").args(&["--transport", transport]).env("RAMPOOL_SILENCE_S", "4");
        launch.command.arg(std::env::current_exe().unwrap()).args([
            "--exact",
            "this_binary_is_a_rank",
            "--nocapture",
            "--quiet",
        ]);
        let mut child = launch.command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut numbers = lines.filter_map(|line| line.strip_prefix("stops ")?.parse().ok());
        let ranks: Vec<i32> = numbers.by_ref().take(3).collect();
        assert_eq!(ranks.len(), 3, "{:?}", end(child));
        let is_stopped =
            |rank: &i32| std::fs::read_to_string(format!("/proc/{rank}/stat")).unwrap().contains(") T ");
        let began = Instant::now();
        while !ranks.iter().all(is_stopped) {
            assert!(began.elapsed() < DEADLINE, "the ranks do not stop");
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(2 * SILENCE);
        for rank in ranks {
            // SAFETY: a rank of ours, which is stopped.
            unsafe { libc::kill(rank, libc::SIGCONT) };
        }
        let (said, code) = end(child);
        assert_eq!(code, Some(0), "{transport}: {said}");
        assert_eq!(numbers.next(), None);
    }
}
