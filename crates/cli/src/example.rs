//! `rampool example`: the parallel programs of the papers, to try shared memory and to measure it.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use rampool_parallel::{PROGRAMS, Program, Report, Ways};
use rampool_shared::{ProtocolKind, Shared};
use serde_json::json;

/// Run a parallel program on shared memory, and compare its answer with a sequential run
///
/// `rampool launch -n 2 rampool example sor` runs it as two processes. Without `launch` it is one process. A
/// wrong answer ends the run with an error.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The program; `all` runs every program that is correct under the protocol, `list` lists them
    name: String,

    /// The program's sizes, in the order that `list` shows [default: the papers' sizes]
    sizes: Vec<usize>,

    /// Use small sizes: this shows that the program works, but its times mean nothing
    #[arg(long, conflicts_with = "sizes")]
    small: bool,

    /// Also write the times to FILE as JSON, one line a program
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<i32> {
    if args.name == "list" {
        list();
        return Ok(0);
    }
    let one = Program::find(&args.name);
    if one.is_none() && args.name != "all" {
        bail!("unknown program {}; `rampool example list` lists them", args.name);
    }
    if one.is_none() && !args.sizes.is_empty() {
        bail!("each program takes its own sizes: name one program instead of `all`");
    }
    let shared = Shared::join_from_env()?;
    let protocol = shared.config().protocol;
    let mut lines = String::new();
    for program in one.map_or_else(|| legal(protocol), |program| vec![program]) {
        let sizes: &[usize] = match (&args.sizes[..], args.small) {
            ([], true) => program.small,
            ([], false) => program.full,
            (sizes, _) => sizes,
        };
        let report = program.run(&shared, sizes, Ways::default())?;
        if shared.rank() == 0 {
            lines += &tell(program, sizes, &shared, report);
        }
    }
    shared.close()?;
    if let Some(file) = args.json.as_ref().filter(|_| shared.rank() == 0) {
        std::fs::write(file, lines)
            .with_context(|| format!("cannot write the times to {}", file.display()))?;
    }
    Ok(0)
}

fn legal(protocol: ProtocolKind) -> Vec<&'static Program> {
    PROGRAMS.iter().filter(|program| program.protocols.contains(&protocol)).collect()
}

fn list() {
    for program in &PROGRAMS {
        let sizes: Vec<String> =
            program.sizes.iter().zip(program.full).map(|(name, full)| format!("{name} {full}")).collect();
        let protocols: Vec<&str> = program.protocols.iter().map(|protocol| protocol.name()).collect();
        println!("{:<12} {:<44} {}", program.name, sizes.join(", "), protocols.join(" "));
    }
}

/// Prints the result, and returns it as a line of JSON.
fn tell(program: &Program, sizes: &[usize], shared: &Shared, report: Report) -> String {
    let (parallel, sequential) = (report.parallel.clock.as_secs_f64(), report.sequential.clock.as_secs_f64());
    let shown: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    let (name, protocol, ranks) = (program.name, shared.config().protocol.name(), shared.ranks());
    println!(
        "{name} {}: {ranks} ranks, {protocol}: {parallel:.4} s, sequential {sequential:.4} s, speed-up \
         {:.2}, verified",
        shown.join(" "),
        sequential / parallel
    );
    let line = json!({
        "program": name, "sizes": sizes, "protocol": protocol, "ranks": ranks,
        "parallel_s": parallel, "sequential_s": sequential,
        "sequential_cpu_s": report.sequential.cpu.as_secs_f64(),
    });
    format!("{line}\n")
}
