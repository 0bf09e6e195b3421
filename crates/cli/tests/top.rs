//! `rampool top --once` with a server and a run. The run is this test: a lease of its own, and a directory
//! such as `rampool run` makes.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rampool_client::pool::{Pool, PoolConfig};
use rampool_client::stats::{PagerStats, StatsPage};
use rampool_kernel::probe::FaultMode;
use rampool_net::transport::SameHost;
use rampool_run::settings::Settings;
use rampool_wire::session::Encryption;
use rampool_wire::units::ByteLen;

mod settings;

const DEADLINE: Duration = Duration::from_secs(60);

fn rampool(runtime_dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
    settings::clear(&mut command);
    command.env("XDG_RUNTIME_DIR", runtime_dir);
    command
}

struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(dir: &Path) -> (Served, String) {
    let (socket, ready) = (dir.join("pool.sock"), dir.join("ready"));
    let address = format!("unix:{}", socket.display());
    let mut command = rampool(dir);
    command
        .args([
            "serve",
            "--memory",
            "64M",
            "--no-lock",
            "--shards",
            "1",
            "--listen",
            &address,
            "--ready-file",
        ])
        .arg(&ready);
    let server = Served(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let deadline = Instant::now() + DEADLINE;
    while !ready.exists() {
        assert!(Instant::now() < deadline, "the server does not become ready");
        std::thread::sleep(Duration::from_millis(5));
    }
    (server, address)
}

/// The bytes of a counter file.
fn bytes_of(page: &StatsPage) -> Vec<u8> {
    // SAFETY: the page is plain 64-bit words, which only this thread writes.
    let words = unsafe {
        std::slice::from_raw_parts(std::ptr::from_ref(page).cast::<u64>(), size_of::<StatsPage>() / 8)
    };
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn top(dir: &Path, arguments: &[&str]) -> String {
    let out = rampool(dir).args(["top", "--once", "--interval", "0.05"]).args(arguments).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn a_run_its_server_and_its_lease_are_in_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, address) = serve(dir.path());
    assert!(top(dir.path(), &[]).starts_with("No process"));

    let pool =
        Pool::connect(&PoolConfig::new(vec![address.parse().unwrap()], ByteLen(16 << 20), "census")).unwrap();
    let own = std::process::id();
    let run_dir = dir.path().join("rampool").join(format!("run-{own}"));
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&run_dir).unwrap();
    let settings = Settings {
        run_dir: run_dir.clone(),
        ticket: pool.lease_ticket(),
        key_file: None,
        encryption: Encryption::Auto,
        same_host: SameHost::Auto,
        local_bytes: 24 << 20,
        page_bytes: 4096,
        prefetch_bytes: 0,
        fault_mode: FaultMode::Full,
        op_deadline_ms: 1000,
        compression: false,
        spin_us: 0,
        follow_faults: false,
        evict_by_copy: false,
        verify: false,
    };
    settings.write().unwrap();
    let counters = PagerStats::private();
    counters.page().anonymous_pages.store((20 << 20) / 4096, Relaxed);
    std::fs::write(settings.stats_path(own), bytes_of(counters.page())).unwrap();

    let table = top(dir.path(), &["--server", "127.0.0.1:1"]);
    let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    let name = std::fs::read_to_string("/proc/self/comm").unwrap();
    assert_eq!(
        row[..7],
        [&own.to_string(), &own.to_string(), name.trim(), "20", "MiB", "24", "MiB"],
        "{table}"
    );
    let served = table
        .lines()
        .find(|line| line.starts_with(&address))
        .expect("the server of the run is found by itself");
    assert!(served.contains("serving") && served.contains("64 MiB") && served.contains("48 MiB"), "{table}");
    assert!(table.lines().any(|line| line.starts_with("  census on ") && line.contains("16 MiB")), "{table}");
    assert!(table.contains("cannot reach 127.0.0.1:1: "), "{table}");

    // A process that has ended has no row.
    counters.page().state.store(2, Relaxed);
    std::fs::write(settings.stats_path(own), bytes_of(counters.page())).unwrap();
    assert!(top(dir.path(), &[]).starts_with("No process"));
}

/// A terminal whose other end is ours.
fn terminal() -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    // SAFETY: fills two descriptors, which only this test uses.
    unsafe {
        let (name, settings, size) = (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
        assert_eq!(libc::openpty(&raw mut ours, &raw mut theirs, name, settings, size), 0);
        (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
    }
}

fn in_terminal(command: &mut Command, terminal: &OwnedFd) -> Child {
    let end = || Stdio::from(terminal.try_clone().unwrap());
    command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap()
}

/// What is on the terminal next.
fn read_some(mut terminal: &File) -> String {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let deadline = Timespec { tv_sec: DEADLINE.as_secs().try_into().unwrap(), tv_nsec: 0 };
    assert!(
        poll(&mut [PollFd::new(&terminal, PollFlags::IN)], Some(&deadline)).unwrap() > 0,
        "nothing is shown"
    );
    let mut bytes = [0; 4096];
    let count = terminal.read(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes[..count]).into_owned()
}

/// Whether what is typed is shown, and comes line by line.
fn is_cooked(terminal: &OwnedFd) -> bool {
    // SAFETY: plain data, filled by the call.
    let settings = unsafe {
        let mut settings = std::mem::zeroed::<libc::termios>();
        assert_eq!(libc::tcgetattr(terminal.as_raw_fd(), &raw mut settings), 0);
        settings
    };
    settings.c_lflag & (libc::ICANON | libc::ECHO) == libc::ICANON | libc::ECHO
}

#[test]
fn a_signal_that_ends_the_live_view_leaves_the_terminal_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = terminal();
    let mut top = in_terminal(rampool(dir.path()).arg("top").env("TERM", "xterm"), &theirs);
    let mut shown = String::new();
    while !shown.contains("?1049h") {
        shown += &read_some(&ours);
    }
    assert!(!is_cooked(&theirs));
    let reader = std::thread::spawn(move || {
        // Until the other end is closed.
        while (&ours).read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
    });
    // SAFETY: a child of ours that has not been waited for.
    assert_eq!(unsafe { libc::kill(i32::try_from(top.id()).unwrap(), libc::SIGTERM) }, 0);
    assert_eq!(top.wait().unwrap().code(), Some(128 + libc::SIGTERM));
    assert!(is_cooked(&theirs));
    drop(theirs);
    reader.join().unwrap();
}

#[test]
fn the_live_view_does_not_draw_on_a_terminal_that_only_prints() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = terminal();
    let mut top = in_terminal(rampool(dir.path()).arg("top").env("TERM", "dumb"), &theirs);
    let said = read_some(&ours);
    let _ = top.kill();
    let code = top.wait().unwrap().code();
    assert!(said.contains("TERM=dumb") && !said.contains('\x1b'), "{code:?} {said}");
}

#[test]
fn the_live_view_says_what_it_needs_where_there_is_no_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let out = rampool(dir.path()).arg("top").output().unwrap();
    assert_eq!(out.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&out.stderr).contains("rampool top --once"), "{out:?}");
    let out = rampool(dir.path()).args(["top", "--interval", "0"]).output().unwrap();
    assert_eq!(out.status.code(), Some(125));
}
