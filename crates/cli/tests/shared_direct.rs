//! Direct operations on the shared memory of a run, on real processes: by its ranks, and by a process outside
//! of it, which is this test.
//!
//! The ranks are this binary, too: the launcher starts it again, with the name of a program in the
//! environment.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rampool_shared::{
    AllocOptions, Homes, Outside, OutsideConfig, OutsideError, OutsideListenError, OutsideTicket,
    ProtocolKind, Shared, SharedDirectError,
};
use rampool_wire::elements::Combine;
use rampool_wire::layout::Layout;

mod settings;

const PROGRAM: &str = "RAMPOOL_TEST_PROGRAM";
const DEADLINE: Duration = Duration::from_secs(120);

/// A run under way. It is ended if the test fails first.
struct Run {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Run {
    fn start(ranks: u16, program: &str, protocol: ProtocolKind) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
        settings::clear(&mut command);
        command
            .arg("launch")
            .arg("-n")
            .arg(ranks.to_string())
            .arg("--protocol")
            .arg(protocol.name())
            .env(PROGRAM, program);
        command.env("RAMPOOL_JOIN_S", "60").env("RAMPOOL_DEADLINE_S", "60");
        command.arg(std::env::current_exe().unwrap()).args([
            "--exact",
            "this_binary_is_a_rank",
            "--nocapture",
            "--quiet",
        ]);
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// Where the listeners are: a rank prints it.
    fn ticket(&mut self) -> OutsideTicket {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(text) = line.trim().strip_prefix("ticket ") {
                return text.parse().unwrap();
            }
            line.clear();
        }
        panic!("the run ended without a listener");
    }

    fn succeeds(mut self) {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let mut rest = String::new();
                self.output.read_to_string(&mut rest).unwrap();
                assert!(status.success(), "{status}: {rest}");
                return;
            }
            assert!(started.elapsed() < DEADLINE, "the run does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What the launcher starts. By itself, under the test harness, it is one rank alone.
#[test]
fn this_binary_is_a_rank() {
    let program = std::env::var(PROGRAM).unwrap_or_else(|_| "columns".to_owned());
    let shared = Shared::join_from_env().unwrap_or_else(|error| panic!("{error}"));
    match program.as_str() {
        "columns" => columns(&shared),
        "outsider" => outsider(&shared),
        "barriers" => barriers(&shared),
        other => panic!("no program {other}"),
    }
    shared.close().unwrap();
}

const ROWS: usize = 64;
const ROW_BYTES: usize = 4096;

/// One rank fills a table, the others gather a column of it, scatter another, and add to a third.
fn columns(shared: &Shared) {
    let (rank, ranks) = (u64::from(shared.rank()), u64::from(shared.ranks()));
    let options = AllocOptions::new().homes(Homes::At(rampool_shared::Rank(0)));
    let region = shared.alloc(ROWS * ROW_BYTES, options).unwrap();
    let table = shared.direct(region).unwrap();
    let cell = |row: usize, column: usize| region.at::<u64>(row * ROW_BYTES / 8 + column);
    let column = Layout::bytes(8).unwrap().hvector(ROWS as u64, 1, ROW_BYTES as i64).unwrap();
    if rank == 0 {
        // SAFETY: inside of the region; the barriers order every access.
        (0..ROWS).for_each(|row| unsafe { *cell(row, 2) = 100 + row as u64 });
    }
    shared.barrier(0).unwrap();
    let before = shared.stats().engine.pages_fetched;
    let values: Vec<u64> = table.get_values(16, &column).unwrap();
    assert!(values.iter().zip(100..).all(|(&value, wanted)| value == wanted), "{values:?}");
    // Each rank has a column of its own, and all add to one.
    table.put_values(64 + 8 * rank, &column, &vec![rank + 1; ROWS]).unwrap();
    let mut mine = [0; 8];
    table.get(64 + 8 * rank, &mut mine).unwrap();
    if shared.config().protocol != ProtocolKind::Sc {
        assert_eq!(u64::from_le_bytes(mine), rank + 1, "what this rank put, it gets");
    }
    table.accumulate(40, &column, Combine::Sum, &vec![rank + 1; ROWS]).unwrap();
    assert!(
        matches!(table.put((ROWS * ROW_BYTES) as u64 - 4, &[0; 8]), Err(SharedDirectError::Layout(_))),
        "out of bounds"
    );
    if !matches!(shared.config().protocol, ProtocolKind::Sc | ProtocolKind::Lrc) {
        assert_eq!(shared.stats().engine.pages_fetched, before, "only useful bytes travel");
    }
    shared.barrier(1).unwrap();
    let sum = ranks * (ranks + 1) / 2;
    for row in 0..ROWS {
        // SAFETY: as above.
        unsafe {
            assert_eq!(*cell(row, 5), sum, "row {row}");
            (8..).zip(1..=ranks).for_each(|(column, wanted)| {
                assert_eq!(*cell(row, column), wanted, "row {row}, column {column}")
            });
        }
    }
    shared.barrier(2).unwrap();
    // What was stored and not released is there for one's own gets (not under ibec, where the barrier makes
    // it so).
    if rank == ranks - 1 && shared.config().protocol != ProtocolKind::Ibec {
        // SAFETY: no other rank uses these cells.
        unsafe { *cell(3, 200) = 77 };
        let mut got = [0; 8];
        table.get(3 * ROW_BYTES as u64 + 1600, &mut got).unwrap();
        assert_eq!(u64::from_le_bytes(got), 77);
        table.put(3 * ROW_BYTES as u64 + 1600, &78_u64.to_le_bytes()).unwrap();
        // SAFETY: as above; the compiler does not know of the put.
        unsafe { assert_eq!(cell(3, 200).read_volatile(), 78) };
    }
    // Words: ranks' atomics and fetched ones are of one kind.
    for _ in 0..20 {
        shared.fetch_add(cell(0, 300), 1).unwrap();
        table.fetch_add(2400, 1_u64).unwrap();
    }
    shared.barrier(3).unwrap();
    assert_eq!(shared.load(cell(0, 300)).unwrap(), 40 * ranks);
    shared.barrier(4).unwrap();
    let before = table.compare_exchange(2400, 40 * ranks, 5).unwrap();
    assert!(before == 40 * ranks || before == 5, "{before}");
    shared.barrier(5).unwrap();
}

#[test]
fn ranks_gather_scatter_and_add_directly_under_every_protocol() {
    for protocol in ProtocolKind::ALL {
        Run::start(if protocol == ProtocolKind::Hlrc { 3 } else { 2 }, "columns", protocol).succeeds();
    }
}

/// Ranks count with atomics, while an outsider does; then they wait for its word, and see what it has put.
fn outsider(shared: &Shared) {
    let region = shared.alloc(8 * ROW_BYTES, AllocOptions::new()).unwrap();
    shared.publish("board", region).unwrap();
    for everywhere in ["0.0.0.0:0", "[::]:0"] {
        let refused = shared.listen(everywhere).unwrap_err();
        assert!(
            matches!(&refused, OutsideListenError::Everywhere { address, .. } if address == everywhere),
            "{refused}"
        );
    }
    let ticket = shared.listen("127.0.0.1:0").unwrap();
    if shared.rank() == 0 {
        println!("ticket {ticket}");
    }
    let (count, flag) = (region.at::<u64>(0), region.at::<u64>(512));
    for _ in 0..30 {
        shared.fetch_add(count, 1).unwrap();
    }
    // The flag is ordered like a lock: what was put before it is visible after it. Under ibec what is not the
    // lock's comes with the barrier.
    while shared.load(flag).unwrap() != 1 {
        std::thread::yield_now();
    }
    if shared.config().protocol == ProtocolKind::Ibec {
        shared.barrier(0).unwrap();
    }
    for page in 2..8 {
        // SAFETY: the outsider wrote it before it set the flag.
        assert_eq!(unsafe { region.at::<u64>(512 * page + 7).read() }, 1000 + page as u64, "page {page}");
    }
    shared.barrier(1).unwrap();
    assert_eq!(shared.load(count).unwrap(), 30 * u64::from(shared.ranks()) + 30);
}

fn come_in(ticket: &OutsideTicket) -> Arc<Outside> {
    Outside::connect(ticket, OutsideConfig::default()).unwrap()
}

#[test]
fn an_outsider_counts_along_and_its_words_are_seen_under_every_protocol() {
    for protocol in ProtocolKind::ALL {
        let mut run = Run::start(2, "outsider", protocol);
        let ticket = run.ticket();
        let outside = come_in(&ticket);
        let board = outside.open("board").unwrap();
        for _ in 0..30 {
            board.fetch_add(0, 1_u64).unwrap();
        }
        // One word of each of six pages.
        let words = Layout::bytes(8).unwrap().hvector(6, 1, ROW_BYTES as i64).unwrap();
        board.put_values(2 * ROW_BYTES as u64 + 56, &words, &(1002_u64..1008).collect::<Vec<_>>()).unwrap();
        assert_eq!(
            board.get_values::<u64>(2 * ROW_BYTES as u64 + 56, &words).unwrap(),
            (1002..1008).collect::<Vec<_>>()
        );
        assert_eq!(board.fetch_op(ROW_BYTES as u64, Combine::Replace, 1_u64).unwrap(), 0);
        run.succeeds();
    }
}

/// Ranks meet at barriers again and again, until the outsider says that it is enough. One of them is always
/// far from the barrier: it waits for the outsider.
fn barriers(shared: &Shared) {
    let region = shared.alloc(ROW_BYTES, AllocOptions::new()).unwrap();
    shared.publish("board", region).unwrap();
    let ticket = shared.listen("127.0.0.1:0").unwrap();
    if shared.rank() == 0 {
        println!("ticket {ticket}");
    }
    let word = region.at::<u64>(0);
    for round in 1..=20_u32 {
        // The others are at the barrier already, and take nothing.
        if u32::from(shared.rank()) == round % u32::from(shared.ranks()) {
            while shared.load(word).unwrap() < u64::from(round) {
                std::thread::yield_now();
            }
            // Perhaps one rank did the put, and then another one the word.
            // SAFETY: the word orders it.
            let put = unsafe { region.at::<u64>(8 + round as usize).read_volatile() };
            assert_eq!(put, u64::from(round), "round {round}, before the barrier");
        }
        shared.barrier(round).unwrap();
        // SAFETY: the outsider's next put is to other bytes; the barrier was behind this one.
        assert_eq!(
            // SAFETY: as above.
            unsafe { region.at::<u64>(8 + round as usize).read_volatile() },
            u64::from(round),
            "round {round}"
        );
    }
}

#[test]
fn an_outsider_is_served_while_other_ranks_wait_at_a_barrier_for_the_one_that_waits_for_it() {
    for protocol in [ProtocolKind::Auto, ProtocolKind::Lrc] {
        let mut run = Run::start(3, "barriers", protocol);
        let board = come_in(&run.ticket()).open("board").unwrap();
        for round in 1..=20_u64 {
            board.put(64 + 8 * round, &round.to_le_bytes()).unwrap();
            assert_eq!(board.fetch_add(0, 1_u64).unwrap(), round - 1);
        }
        run.succeeds();
    }
}

#[test]
fn wrong_tickets_and_mistakes_are_refused_and_the_run_goes_on() {
    let mut run = Run::start(2, "outsider", ProtocolKind::Hlrc);
    let ticket = run.ticket();
    let other: OutsideTicket = format!("{ticket}x").parse().unwrap();
    let refused = Outside::connect(&other, OutsideConfig::default()).unwrap_err();
    assert!(
        matches!(&refused, OutsideError::Refused { why, .. } if why.contains("another run")),
        "{refused}"
    );
    let outside = come_in(&ticket);
    let missing = outside.open("blackboard").unwrap_err();
    assert!(
        matches!(&missing, OutsideError::Refused { why, .. } if why.contains("no region \"blackboard\"")),
        "{missing}"
    );
    let board = outside.open("board").unwrap();
    assert!(matches!(board.fetch_add(4, 1_u64), Err(SharedDirectError::Layout(_))), "not aligned");
    assert!(matches!(board.fetch_op(0, Combine::Xor, 1.0), Err(SharedDirectError::NotForKind { .. })));
    assert!(
        matches!(board.get(8 * ROW_BYTES as u64, &mut [0]), Err(SharedDirectError::Layout(_))),
        "out of bounds"
    );
    for _ in 0..30 {
        board.fetch_add(0, 1_u64).unwrap();
    }
    for page in 2..8 {
        board.put(page * ROW_BYTES as u64 + 56, &(1000 + page).to_le_bytes()).unwrap();
    }
    board.compare_exchange(ROW_BYTES as u64, 0_u64, 1).unwrap();
    run.succeeds();
    let gone = board.get(0, &mut [0]).unwrap_err();
    assert!(gone.to_string().contains("the run at"), "{gone}");
}
