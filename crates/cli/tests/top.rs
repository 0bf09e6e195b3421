//! `rampool top --once` beside a server and a run. The run is this test: a lease of its own, and a directory such as `rampool run` makes.

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rampool::pool::{Pool, PoolConfig};
use rampool::proto::session::Encryption;
use rampool::proto::units::ByteLen;
use rampool::settings::Settings;
use rampool::stats::{PagerStats, StatsPage};
use rampool::transport::SameHost;
use rampool_sys::probe::Rung;

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
    command.args(["serve", "--memory", "64M", "--no-lock", "--shards", "1", "--listen", &address, "--ready-file"]).arg(&ready);
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
    let words = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(page).cast::<u64>(), size_of::<StatsPage>() / 8) };
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

    let pool = Pool::connect(&PoolConfig::new(vec![address.parse().unwrap()], ByteLen(16 << 20), "census")).unwrap();
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
        rung: Rung::Full,
        op_deadline_ms: 1000,
        compression: false,
        spin_us: 0,
        follow_faults: false,
        evict_by_copy: false,
    };
    settings.write().unwrap();
    let counters = PagerStats::private();
    counters.page().anonymous_pages.store((20 << 20) / 4096, Relaxed);
    std::fs::write(settings.stats_path(own), bytes_of(counters.page())).unwrap();

    let table = top(dir.path(), &["--server", "127.0.0.1:1"]);
    let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    let name = std::fs::read_to_string("/proc/self/comm").unwrap();
    assert_eq!(row[..7], [&own.to_string(), &own.to_string(), name.trim(), "20", "MiB", "24", "MiB"], "{table}");
    let served = table.lines().find(|line| line.starts_with(&address)).expect("the server of the run is found by itself");
    assert!(served.contains("serving") && served.contains("64 MiB") && served.contains("48 MiB"), "{table}");
    assert!(table.lines().any(|line| line.starts_with("  census on ") && line.contains("16 MiB")), "{table}");
    assert!(table.contains("cannot reach 127.0.0.1:1: "), "{table}");

    // A process that has ended has no row.
    counters.page().state.store(2, Relaxed);
    std::fs::write(settings.stats_path(own), bytes_of(counters.page())).unwrap();
    assert!(top(dir.path(), &[]).starts_with("No process"));
}

#[test]
fn the_live_view_says_what_it_needs_where_there_is_no_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let out = rampool(dir.path()).arg("top").output().unwrap();
    assert_eq!(out.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&out.stderr).contains("rampool top --once"), "{out:?}");
    let out = rampool(dir.path()).args(["top", "--interval", "0"]).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
}
