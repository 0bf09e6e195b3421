//! Strided gets and gathers compared with OpenMPI's one-sided operations (osc/pt2pt): TCP with TCP, and
//! within one host shared memory with shared memory.
//!
//! OpenMPI's side is a C program that is compiled when the benchmark starts and stays up. It gets one layout
//! for each line of its input, so that both alternate.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rampool_client::direct::{Direct, DirectRegion};
use rampool_wire::layout::Layout;

use super::Common;
use super::direct::{self, MIB, SEED, SPIN};
use super::report::{Reach, Report};
use super::service::{Place, Service, before_exec};

/// Strided gets and gathers, compared with OpenMPI's one-sided operations
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

const SOURCE: &str = include_str!("openmpi/gather.c");
const TIMEOUT: Duration = Duration::from_secs(60);
/// A gather must be this many times as fast, everything else faster.
const GATHER: f64 = 4.0;

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let rounds = common.rounds(9, 2);
    let place = Place::loopback();
    let mut report = Report::start("openmpi", common.quick);
    let dir = Scratch::make()?;
    let program = compile(&dir.path)?;
    report.note(format!(
        "OpenMPI: {}, osc/pt2pt, MPI_Get and MPI_Win_flush, types committed before; both ranks spin, each on \
         its CPU, and sleep between their turns; each side has been woken when its clock starts",
        version()?
    ));
    report.note(format!("rampool: one connection, both sides spin; {}", place.describe()));
    report.note("every byte of every answer is compared, on both sides");
    let (bytes, sparse) = (common.pick(64 * MIB, 16 * MIB), common.pick(16_384, 4096));
    let socket = format!("unix:{}", dir.path.join("server").display());
    let ways = [
        ("TCP", format!("{}:0", place.host), ["self,tcp", "--mca", "btl_tcp_if_include", "lo"].as_slice()),
        ("same host", socket, ["self,vader"].as_slice()),
    ];
    for (way, listen, layers) in ways {
        let server = Service::memory_server_at(&place, &listen, 2 * bytes, SPIN)?;
        let mut client = direct::connect(&server, bytes)?;
        let region = client.create(bytes)?;
        for at in (0..bytes).step_by(1 << 20) {
            client.put(region, at, &direct::content(at, MIB))?;
        }
        let mut theirs = OpenMpi::start(&program, layers, bytes, sparse)?;
        for (number, cell) in direct::cells(bytes, sparse)?.iter().enumerate() {
            one_cell(&mut report, (way, number), cell, (&mut client, region), &mut theirs, rounds)?;
        }
        client.free(region);
        client.close();
    }
    report.finish(common.json.as_deref())
}

fn one_cell(
    report: &mut Report,
    (way, number): (&str, usize),
    (name, layouts): &(String, Vec<Layout>),
    (client, region): (&mut Direct, DirectRegion),
    theirs: &mut OpenMpi,
    rounds: usize,
) -> Result<()> {
    let want: Vec<Vec<u8>> = layouts.iter().map(direct::selected).collect();
    let mut buffers = vec![Vec::new(); layouts.len()];
    let (mut ours_us, mut theirs_us) = (Vec::new(), Vec::new());
    // Round 0 warms both up.
    for round in 0..=rounds {
        // The server has slept during the others' turn. Theirs is awake when their clock starts: the two
        // ranks have exchanged messages by then, and a lock.
        client.get(region, 0, &mut [0; 8])?;
        let took = direct::get_all(client, region, layouts, &mut buffers)?;
        ensure!(buffers == want, "WRONG CONTENT: {name}");
        let their_us = theirs.get(number)?;
        if round > 0 {
            ours_us.push(took.as_secs_f64() * 1e6);
            theirs_us.push(their_us);
        }
    }
    let reach = if name.starts_with("random gather") { GATHER } else { 1.0 };
    report.samples(&format!("{way}: {name}"), "us", &ours_us);
    report.samples(&format!("{way}: {name}, OpenMPI"), "us", &theirs_us);
    report.ratio(
        &format!("{way}: {name}: OpenMPI / rampool"),
        &theirs_us,
        &ours_us,
        Some(Reach::AtLeast(reach)),
    );
    Ok(())
}

/// A directory that goes with the benchmark.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn make() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("rampool-bench-openmpi-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn compile(dir: &Path) -> Result<PathBuf> {
    let (source, program) = (dir.join("gather.c"), dir.join("gather"));
    std::fs::write(&source, SOURCE)?;
    let done = Command::new("mpicc").args(["-O2", "-o"]).arg(&program).arg(&source).output();
    let done =
        done.context("cannot run `mpicc`; install OpenMPI (Debian: openmpi-bin and libopenmpi-dev)")?;
    ensure!(done.status.success(), "mpicc failed: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(program)
}

fn version() -> Result<String> {
    let said = Command::new("mpirun")
        .arg("--version")
        .output()
        .context("cannot run `mpirun`; install OpenMPI (Debian: openmpi-bin)")?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let first = said.lines().next().unwrap_or_default().trim().to_owned();
    ensure!(first.contains("Open MPI"), "mpirun is {first:?}, not Open MPI's");
    Ok(first)
}

/// The other side, which does what it is told.
struct OpenMpi {
    child: Child,
    tell: Option<ChildStdin>,
    said: mpsc::Receiver<String>,
}

impl OpenMpi {
    fn start(program: &Path, layers: &[&str], bytes: u64, sparse: u64) -> Result<Self> {
        let mut command = Command::new("mpirun");
        command.args([
            "-n",
            "2",
            "--allow-run-as-root",
            "--oversubscribe",
            "--bind-to",
            "none",
            "--mca",
            "mpi_yield_when_idle",
            "0",
        ]);
        command.args(["--mca", "pml", "ob1", "--mca", "osc", "pt2pt", "--mca", "btl"]).args(layers);
        let pipe = program.with_extension("turns");
        if !pipe.exists() {
            rustix::fs::mknodat(
                rustix::fs::CWD,
                &pipe,
                rustix::fs::FileType::Fifo,
                rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
                0,
            )?;
        }
        command.arg(program).args([bytes, sparse, SEED].map(|n| n.to_string())).arg(&pipe);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        before_exec(&mut command, None, None);
        let mut child = command.spawn()?;
        let out = child.stdout.take().context("it is piped")?;
        let (sender, said) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut started = Self { tell: child.stdin.take(), child, said };
        let ready = started.hear()?;
        ensure!(ready == "ready", "OpenMPI's side says {ready:?}");
        Ok(started)
    }

    fn hear(&mut self) -> Result<String> {
        match self.said.recv_timeout(TIMEOUT) {
            Ok(line) => Ok(line),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                bail!("OpenMPI's side has said nothing for {} s", TIMEOUT.as_secs())
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                bail!("OpenMPI's side has ended; its messages are above")
            }
        }
    }

    /// Microseconds for one get of a layout.
    fn get(&mut self, cell: usize) -> Result<f64> {
        let tell = self.tell.as_mut().context("it has not been told to end")?;
        writeln!(tell, "{cell}").and_then(|()| tell.flush()).context("OpenMPI's side does not listen")?;
        let line = self.hear()?;
        line.parse().with_context(|| format!("OpenMPI's side says {line:?}"))
    }
}

impl Drop for OpenMpi {
    fn drop(&mut self) {
        // The end of its input is the end of its work; mpirun looks after the ranks.
        self.tell = None;
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
