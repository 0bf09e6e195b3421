//! C programs built against the installed library, as a user builds them, run against real memory servers.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rampool_testing::skip;
use runtime::server::{RunningServer, Server, ServerConfig};

const MIB: u64 = 1 << 20;
/// Ends a test that would hang; no test depends on it.
const WATCHDOG: Duration = Duration::from_secs(60);

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Where the library and the command lie: next to the binary that `RAMPOOL_BIN` names, as `make test` does
/// after building everything. Otherwise they are built here, because tests of a library that Rust programs
/// cannot link do not build it.
fn built() -> PathBuf {
    if let Some(binary) = std::env::var_os("RAMPOOL_BIN") {
        let profile_dir = here().join("../..").join(binary).parent().unwrap().to_path_buf();
        assert!(
            profile_dir.join("librampool.so").exists(),
            "no librampool.so in {}, where RAMPOOL_BIN points",
            profile_dir.display()
        );
        return profile_dir;
    }
    let profile_dir = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_path_buf();
    let mut build = Command::new(env!("CARGO"));
    build
        .args([
            "build",
            "--quiet",
            "--offline",
            "--package",
            "rampool-capi",
            "--package",
            "rampool-cli",
            "--target-dir",
        ])
        .arg(profile_dir.parent().unwrap());
    if profile_dir.ends_with("release") {
        build.arg("--release");
    }
    run(build.current_dir(here()));
    profile_dir
}

/// The library, installed under a directory of this test's own.
fn installed() -> &'static Path {
    static PREFIX: OnceLock<tempfile::TempDir> = OnceLock::new();
    let prefix = PREFIX.get_or_init(|| {
        let prefix = tempfile::tempdir().unwrap();
        let profile_dir = built();
        run(Command::new(here().join("pkg/install.sh")).arg(&profile_dir).arg(prefix.path()));
        prefix
    });
    prefix.path()
}

fn libraries() -> PathBuf {
    installed().join("lib")
}

/// Compiles an example with the flags that pkg-config prints.
fn compile(name: &str) -> PathBuf {
    let flags = run(Command::new("pkg-config")
        .args(["--cflags", "--libs", "rampool"])
        .env("PKG_CONFIG_PATH", libraries().join("pkgconfig")));
    let program = installed().join(name);
    let source = here().join("examples/c").join(name).with_extension("c");
    let flags = text(&flags.stdout);
    run(Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(source)
        .args(flags.split_whitespace()));
    program
}

fn started(program: &Path, arguments: &[&str]) -> Output {
    Command::new(program)
        .args(arguments)
        .env("LD_LIBRARY_PATH", libraries())
        .current_dir(installed())
        .output()
        .unwrap()
}

fn serve(bytes: u64) -> RunningServer {
    let mut config = ServerConfig::new(bytes, "127.0.0.1:0".parse().unwrap());
    config.lock_memory = false;
    Server::start(config).unwrap()
}

/// A file as in the paper, in this test's directory.
fn dlmm_conf(name: &str, local: u64, servers: &[(&RunningServer, u64)]) -> String {
    let mut conf = format!("// nodes of this test\nlocalhost\t{local} // compute node\n");
    for (server, megabytes) in servers {
        writeln!(conf, "{}   {megabytes} // memory server", server.addr()).unwrap();
    }
    std::fs::write(installed().join(name), conf).unwrap();
    name.to_owned()
}

#[test]
fn the_papers_program_runs_on_two_servers_and_leaves_nothing_behind() {
    let program = compile("dlmm_array");
    let servers = [serve(64 * MIB), serve(64 * MIB)];
    let conf = dlmm_conf("two.conf", 8, &[(&servers[0], 32), (&servers[1], 64)]);
    let output = started(&program, &["64", "--", "-n", "3", "-f", &conf]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout), "sum of 8388608 numbers: 35184367894528\n");
    for server in &servers {
        assert!(server.status().operations.puts > 0, "both servers held pages");
        assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
    }
    // -n 2 is the compute node and the first server: 32 MB and 8 MB do not hold 64.
    let output = started(&program, &["64", "--", "-n", "2", "-f", &conf]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("dlmm_alloc: cannot allocate 64 MiB"), "{output:?}");
}

#[test]
fn a_program_that_cannot_start_says_why_in_one_line() {
    let program = compile("dlmm_array");
    let server = serve(16 * MIB);
    let conf = dlmm_conf("one.conf", 8, &[(&server, 64)]);
    let gone = {
        let gone = serve(MIB);
        dlmm_conf("gone.conf", 8, &[(&gone, 1)])
    };
    let server_name = server.addr().to_string();
    for (arguments, words) in [
        (vec!["1", "--", "-n", "3", "-f", &conf], vec!["one.conf", "-n 3"]),
        (vec!["1", "--", "-f", "nowhere.conf"], vec!["nowhere.conf", "No such file"]),
        (vec!["1", "--", "-x"], vec!["-x"]),
        (vec!["1", "--", "-f", &conf], vec![server_name.as_str(), "64 MiB", "16 MiB"]),
        (vec!["1", "--", "-f", &gone], vec!["127.0.0.1:", "refused"]),
    ] {
        let output = started(&program, &arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {stderr}");
        assert!(
            stderr.starts_with("dlmm_startup: ") && stderr.lines().count() == 1,
            "{arguments:?}: {stderr}"
        );
        for word in words {
            assert!(stderr.contains(word), "{arguments:?}: {stderr}");
        }
    }
}

#[test]
fn a_service_in_c_answers_requests_with_bodies_out_of_a_queue() {
    let program = compile("queue");
    let server = serve(64 * MIB);
    for (messages, bytes) in [("20", "1000000"), ("50", "1")] {
        let output = started(&program, &[&server.addr().to_string(), messages, bytes]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(
            text(&output.stdout),
            format!("{messages} requests with {bytes} bytes each were answered\n")
        );
        assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
        server.check();
    }
}

#[test]
fn processes_in_c_share_a_store() {
    let program = compile("store");
    let servers = [serve(256 * MIB)];
    for bytes in ["1", "100000"] {
        let output = started(&program, &[&servers[0].addr().to_string(), "50", bytes]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(text(&output.stdout), format!("50 results of {bytes} bytes were put, read and removed\n"));
    }
}

#[test]
fn a_table_in_c_is_changed_filtered_and_added_up_where_it_lies() {
    let program = compile("table");
    let servers = [serve(64 * MIB), serve(64 * MIB)];
    let names = servers.each_ref().map(|server| server.addr().to_string());
    for (rows, printed) in
        [("10", "10 rows: sum 2243, 3 below zero\n"), ("20000", "20000 rows: sum 4120779, 5905 below zero\n")]
    {
        let output = started(&program, &[rows, &names[0], &names[1]]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(text(&output.stdout), printed);
        for server in &servers {
            assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
            server.check();
        }
    }
}

#[test]
fn gets_and_puts_in_c_overlap_and_bodies_stay_in_the_pool() {
    let program = compile("overlap");
    let servers = [serve(64 * MIB), serve(64 * MIB)];
    let names = servers.each_ref().map(|server| server.addr().to_string());
    for blocks in ["1", "1000"] {
        let output = started(&program, &[blocks, &names[0], &names[1]]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(text(&output.stdout), format!("{blocks} blocks went and came back\n"));
        for server in &servers {
            assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
            server.check();
        }
    }
}

#[test]
fn a_region_larger_than_local_memory_is_an_array_in_c() {
    let program = compile("array");
    let server = serve(64 * MIB);
    let output = started(&program, &[&format!("{}=64M", server.addr()), "48", "8"]);
    assert!(output.status.success(), "{output:?}");
    let stdout = text(&output.stdout);
    assert!(stdout.starts_with("sum of 6291456 numbers: 19791206154240\n"), "{stdout}");
    assert!(server.wait_until_idle(Instant::now() + WATCHDOG));

    let output = started(&program, &["127.0.0.1:1=1M", "1", "8"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("open: memory server 127.0.0.1:1:"), "{output:?}");
}

#[test]
fn cmake_finds_the_library_and_a_static_program_needs_none() {
    let server = serve(64 * MIB);
    let name = format!("{}=64M", server.addr());
    let build = installed().join("cmake-build");
    if Command::new("cmake").arg("--version").output().is_ok() {
        let prefix = format!("-DCMAKE_PREFIX_PATH={}", installed().display());
        run(Command::new("cmake").arg("-S").arg(here().join("examples/c")).arg("-B").arg(&build).arg(prefix));
        run(Command::new("cmake").arg("--build").arg(&build));
        let output = started(&build.join("array"), &[&name, "16", "8"]);
        assert!(output.status.success(), "{output:?}");
    } else {
        eprintln!("skipped: there is no cmake on this machine");
    }
    let program = installed().join("array-static");
    let libraries = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];
    let source = here().join("examples/c/array.c");
    let archive = self::libraries().join("librampool.a");
    let include = installed().join("include");
    run(Command::new("cc")
        .arg("-o")
        .arg(&program)
        .arg(source)
        .arg(archive)
        .arg("-I")
        .arg(include)
        .args(libraries));
    let output = Command::new(&program).args([&name, "16", "8"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

// --- the direct view, and MPI ------------------------------------------------------------------------------

/// Compiles a test with MPI's compiler, if there is one. `scripts/test.py` looks for it as well.
fn compile_with_mpi(name: &str) -> Option<PathBuf> {
    if Command::new("mpicc").arg("--version").output().is_err() {
        skip("mpi", "there is no mpicc on this machine");
        return None;
    }
    let flags = run(Command::new("pkg-config")
        .args(["--cflags", "--libs", "rampool"])
        .env("PKG_CONFIG_PATH", libraries().join("pkgconfig")));
    let program = installed().join(name);
    let source = here().join("tests").join(name).with_extension("c");
    let mut compiler = Command::new("mpicc");
    compiler.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-o"]).arg(&program).arg(source);
    run(compiler.args(text(&flags.stdout).split_whitespace()));
    Some(program)
}

#[test]
fn mpi_datatypes_become_layouts_that_select_what_mpi_packs() {
    let Some(program) = compile_with_mpi("mpi_layouts") else { return };
    let server = serve(64 * MIB);
    let name = format!("{}=16M", server.addr());
    for seed in ["1", "2", "3"] {
        let mut command = Command::new(&program);
        // No daemon of MPI's for a process that is alone.
        command
            .args([&name, seed, "800"])
            .env("LD_LIBRARY_PATH", libraries())
            .env("OMPI_MCA_ess_singleton_isolated", "1");
        let output = command.output().unwrap();
        assert!(output.status.success(), "seed {seed}: {}{}", text(&output.stdout), text(&output.stderr));
    }
    assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
}

#[test]
fn datatypes_of_mpi4py_become_layouts_that_select_what_mpi_packs() {
    let own = here().join("../../.venv/bin/python");
    let found = |python: &PathBuf| {
        Command::new(python).args(["-c", "from mpi4py import MPI"]).output().is_ok_and(|o| o.status.success())
    };
    let Some(python) = [own, "python3".into()].into_iter().find(found) else {
        return skip("mpi4py", "no Python here has mpi4py, with an MPI to load");
    };
    let server = serve(64 * MIB);
    let mut command = Command::new(python);
    command.arg(here().join("tests/mpi_datatypes.py")).args([&server.addr().to_string(), "1", "300"]);
    command
        .env("RAMPOOL_LIBRARY", libraries().join("librampool.so"))
        .env("OMPI_MCA_ess_singleton_isolated", "1");
    let output = command.env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
}

// --- shared memory -----------------------------------------------------------------------------------------

/// The launcher, which lies where the library was built.
fn rampool() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(built).join("rampool")
}

/// Compiles a program for PARMACS, given without its ending `.C`.
fn parmacs(source: &str, flags: &[&str]) -> PathBuf {
    let config = |what: &[&str]| {
        run(Command::new("pkg-config")
            .args(what)
            .arg("rampool")
            .env("PKG_CONFIG_PATH", libraries().join("pkgconfig")))
    };
    let macros = text(&config(&["--variable=parmacs"]).stdout);
    let mut m4 = Command::new("m4");
    let expanded = run(m4
        .args(flags.iter().filter(|flag| **flag == "-P"))
        .arg(macros.trim())
        .arg(here().join(source).with_extension("C")));
    let name = Path::new(source).file_name().unwrap();
    let program = installed().join(name);
    let file = program.with_extension("c");
    std::fs::write(&file, &expanded.stdout).unwrap();
    let libraries = text(&config(&["--cflags", "--libs"]).stdout);
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(file)
        .args(flags.iter().filter(|flag| **flag != "-P"));
    run(cc.args(libraries.split_whitespace()));
    program
}

/// Runs a program on this many ranks.
fn launched(ranks: u32, options: &[&str], program: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(rampool());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RAMPOOL_")) {
        command.env_remove(name);
    }
    command.args(["launch", "-n", &ranks.to_string()]).args(options).arg(program).args(arguments);
    command.env("LD_LIBRARY_PATH", libraries()).env("RAMPOOL_DEADLINE_S", "60").output().unwrap()
}

fn said(output: &Output) -> String {
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    text(&output.stdout)
}

#[test]
fn ranks_share_memory_in_c() {
    let program = compile("shared_sum");
    for ranks in [1, 2, 4] {
        assert_eq!(said(&launched(ranks, &[], &program, &[])), format!("sum {}\n", 199_990_000 * ranks));
    }
    assert_eq!(said(&launched(3, &["--protocol", "ibec"], &program, &[])), "sum 599970000\n");
}

#[test]
fn ranks_and_an_outsider_use_shared_memory_directly_in_c() {
    let program = compile("column");
    for protocol in ["hlrc", "sc", "lrc", "auto"] {
        assert_eq!(
            said(&launched(2, &["--protocol", protocol], &program, &[])),
            "2 ranks, 500 rows\n",
            "{protocol}"
        );
    }
    let mut command = Command::new(rampool());
    command
        .args(["launch", "-n", "3"])
        .arg(&program)
        .arg("wait")
        .env("LD_LIBRARY_PATH", libraries())
        .env("RAMPOOL_DEADLINE_S", "60");
    let mut run = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(run.stdout.take().unwrap());
    let mut ticket = String::new();
    output.read_line(&mut ticket).unwrap();
    assert_eq!(said(&started(&program, &[ticket.trim()])), "500 prices from outside\n");
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(run.wait().unwrap().success() && rest == "3 ranks, 500 rows\n", "{rest}");
    // The run is over, but the ticket is still well-formed.
    let late = started(&program, &[ticket.trim()]);
    assert!(text(&late.stderr).starts_with("come in: the run at 127.0.0.1:"), "{late:?}");
    let wrong = started(&program, &["somewhere"]);
    assert!(text(&wrong.stderr).contains("HOST:PORT"), "{wrong:?}");
}

#[test]
fn a_region_is_handed_over_to_another_process_in_c() {
    let server = serve(64 * MIB);
    assert_eq!(
        said(&started(&compile("handed"), &["copy", &server.addr().to_string()])),
        "2000 bytes of 2000 pages\n"
    );
    assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
}

#[test]
fn a_program_for_tsm_runs_on_one_two_and_four_nodes() {
    let program = compile("tsm_sum");
    for (nodes, protocol) in [(1, "sc"), (2, "sc"), (2, "lrc"), (4, "hlrc")] {
        let expected = format!("sum of 20000 numbers on {nodes} nodes: 199990000\n");
        assert_eq!(said(&launched(nodes, &["--protocol", protocol], &program, &["20000"])), expected);
    }
    // Only this rank is there. Its message comes in one piece, since other ranks may print at the same time.
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_read_timeout(Some(WATCHDOG)).unwrap();
    let mut command = Command::new(program);
    command
        .env("LD_LIBRARY_PATH", libraries())
        .env("RAMPOOL_RANK", "0")
        .env("RAMPOOL_RANKS", "2")
        .stderr(OwnedFd::from(theirs));
    assert_eq!(command.status().unwrap().code(), Some(1));
    let mut said = [0; 1000];
    let len = ours.recv(&mut said).unwrap();
    let said = text(&said[..len]);
    assert!(said.starts_with("tsm_startup: ") && said.ends_with('\n'), "{said}");
}

#[test]
fn programs_for_parmacs_run_unchanged_as_processes() {
    let histogram = parmacs("examples/parmacs/histogram", &[]);
    // More ranks than processes too: then no barrier spans all ranks.
    for (ranks, processes, protocol) in
        [(1, "1", "hlrc"), (2, "2", "sc"), (4, "4", "hlrc"), (4, "3", "lrc"), (3, "3", "aurc")]
    {
        let output = launched(
            ranks,
            &["--protocol", protocol],
            &histogram,
            &["-p", processes, "-n", "3000", "-t", "title"],
        );
        assert_eq!(said(&output), "title: total 26964\n", "{ranks} {protocol}");
    }
    let tasks = parmacs("examples/parmacs/tasks", &["-P", "-no-pie"]);
    for (ranks, protocol) in [(1, "hlrc"), (2, "lrc"), (4, "hlrc"), (3, "sc")] {
        let output = launched(ranks, &["--protocol", protocol], &tasks, &[&ranks.to_string(), "9"]);
        let expected = format!("511 moves, {ranks} tickets, {ranks}, 99, {}\n", f64::from(ranks) / 2.0);
        assert_eq!(said(&output), expected, "{protocol}");
    }
}

#[test]
fn what_programs_of_splash_do_works() {
    let program = parmacs("tests/splash", &[]);
    for (processes, protocol) in [(1, "hlrc"), (2, "lrc"), (4, "hlrc"), (3, "sc")] {
        let number = processes.to_string();
        let sum = processes * processes * (processes + 1) / 2;
        assert_eq!(
            said(&launched(processes, &["--protocol", protocol], &program, &[&number])),
            format!("{processes} processes: {sum}\n"),
            "{protocol}"
        );
    }
}

/// A macro that no program uses has never been compiled.
#[test]
fn every_macro_of_parmacs_is_used_by_a_program_and_words_change_as_they_say() {
    let read = |path: &str| std::fs::read_to_string(here().join(path)).unwrap();
    let sources = [
        "tests/macros.C",
        "tests/private.C",
        "tests/splash.C",
        "examples/parmacs/histogram.C",
        "examples/parmacs/tasks.C",
    ]
    .map(read);
    let used: BTreeSet<&str> = sources
        .iter()
        .flat_map(|source| source.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'))
        .collect();
    let macros = read("m4/rampool.m4");
    let is_macro = |name: &&str| {
        name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
    };
    let defined: Vec<&str> = macros
        .split("define(`")
        .skip(1)
        .filter_map(|rest| rest.split('\'').next())
        .filter(is_macro)
        .collect();
    assert!(defined.len() > 70, "{defined:?}");
    let unused: Vec<&&str> = defined.iter().filter(|name| !used.contains(*name)).collect();
    assert!(unused.is_empty(), "{unused:?}");

    let program = parmacs("tests/macros", &[]);
    for (processes, protocol) in [(1, "hlrc"), (4, "sc"), (4, "lrc"), (3, "hlrc"), (2, "aurc"), (4, "auto")] {
        let p = f64::from(processes);
        let expected = format!("0 wrong, {} {} {} {} 4950 {p}\n", 100.0 * p, 50.0 * p, 25.0 * p, 20.0 * p);
        assert_eq!(
            said(&launched(processes, &["--protocol", protocol], &program, &[&processes.to_string()])),
            expected,
            "{protocol}"
        );
    }
}

#[test]
fn signal_handlers_may_touch_shared_memory() {
    let program = parmacs("tests/signals", &[]);
    for protocol in ["sc", "hlrc", "auto"] {
        let output = launched(2, &["--protocol", protocol], &program, &[]);
        assert_eq!(said(&output), "64 pages right, sum 600, ticks came\n", "{protocol}");
    }
}

#[test]
fn created_processes_see_private_variables_as_forked_ones_do() {
    let program = parmacs("tests/private", &[]);
    let output = launched(4, &[], &program, &["look"]);
    // The first process changes what the next one is to begin with.
    let words = "some processes changed the variables zero after CREATE, and the others did not see it";
    assert!(output.status.success() && text(&output.stderr).contains(words), "{output:?}");
    let output = text(&output.stdout);
    let mut lines: Vec<&str> = output.lines().collect();
    // Ranks print in any order.
    lines.sort_unstable();
    assert_eq!(lines, ["all is well", "process 0", "process 1", "process 2", "process 3"]);
    assert_eq!(said(&launched(4, &[], &program, &["turns"])), "turn 4, small -8\n");
    assert_eq!(said(&launched(2, &[], &program, &["forks"])), "a forked child ends with 0\n");
    for (ranks, arguments, code, words) in [
        (2, &["usage"][..], 4, "rank 0 ended with exit code 4"),
        (2, &[], 2, "rank 0 ended with exit code 2"),
        (2, &["leaves"], 5, "rank 1 ended with exit code 5"),
        (2, &["crash"], 134, "rank 1"),
        (
            2,
            &["faults"],
            139,
            "rank 1 did not see what rank 0 has changed after CREATE in the variables zero:",
        ),
        (2, &["nested"], 86, "only the program's first process can create others"),
        (2, &["outside"], 86, "outside (0x"),
        (2, &["word"], 86, "FETCH_ADD: initialised (0x"),
        (2, &["double"], 86, "G_FREE: "),
        (
            3,
            &["turns"],
            86,
            "3 more processes are wanted, but the run has 3 and 1 of them are in use: start it with `rampool \
             launch -n 4`",
        ),
    ] {
        let output = launched(ranks, &[], &program, arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
        assert!(text(&output.stderr).contains(words), "{arguments:?}: {output:?}");
    }
    let output = launched(2, &[], &program, &["local"]);
    assert!(
        output.status.success() && text(&output.stderr).matches("points to a local variable").count() == 1,
        "{output:?}"
    );
    for only in ["alone", "other"] {
        let output = launched(2, &[], &program, &[only]);
        assert!(output.status.success() && text(&output.stderr).contains(words), "{output:?}");
    }
    assert_eq!(said(&launched(2, &[], &program, &["far"])), "");
    let output = launched(2, &["--protocol", "ibec"], &program, &["look"]);
    assert!(
        output.status.code() == Some(1) && text(&output.stderr).contains("protocol ibec hands over only"),
        "{output:?}"
    );
    the_static_library_is_refused();
}

fn the_static_library_is_refused() {
    let archive = libraries().join("librampool.a");
    let include = installed().join("include");
    let linked = installed().join("private-static");
    let system = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];
    run(Command::new("cc")
        .arg("-o")
        .arg(&linked)
        .arg(installed().join("private.c"))
        .arg(archive)
        .arg("-I")
        .arg(include)
        .args(system));
    let output = launched(2, &[], &linked, &["look"]);
    assert!(
        !output.status.success() && text(&output.stderr).contains("link with the shared library"),
        "{output:?}"
    );
}
