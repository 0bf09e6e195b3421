//! Programs that fit their budget, compared with the same programs natively: the cost of being ready for
//! more.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::Common;
use super::report::{Reach, Report};
use super::service::{Place, Service};
use super::trial::{self, Lines, Parts, Program};

/// Programs that fit their budget, compared with the same natively
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    parts: Parts,
}

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("fit", common.quick);
    report.note(
        "each program natively and under `rampool run --local 4G`, which it does not need; pairs take turns \
         in who goes first; not pinned",
    );
    let place = Place { host: "127.0.0.1", server_cpu: None, namespace: None, key: None };
    let server = Service::memory_server(&place, 1 << 30, Duration::ZERO)?;
    let options = ["--local", "4G", "--memory", "512M", "--server", &server.address].map(str::to_owned);
    let lines = Lines::make(common.pick(200_000_000, 2_000_000), 16..80)?;
    let sort = Program {
        name: "GNU sort, 200 MB",
        argv: ["sort", "-S", "1G", "--parallel=2"]
            .into_iter()
            .map(Into::into)
            .chain([lines.path.clone().into()])
            .collect(),
    };
    let python = [
        args.parts.python("NumPy sort, 256 MiB", "numpy_work.py", &["sort", common.pick("256", "16"), "1"]),
        args.parts.python(
            "NumPy column scan, 512 MiB",
            "numpy_work.py",
            &["columns", common.pick("512", "16"), "1"],
        ),
        args.parts.python(
            "SQLite, 100 k rows",
            "sqlite_work.py",
            &[common.pick("100000", "5000"), common.pick("20000", "500"), "1"],
        ),
    ];
    for program in std::iter::once(Ok(sort)).chain(python) {
        let program = match program {
            Ok(program) => program,
            Err(reason) => {
                report.note(format!("left out: {reason}"));
                continue;
            }
        };
        let (mut native, mut paged) = (Vec::new(), Vec::new());
        for round in 0..common.rounds(10, 1) {
            for first in [round % 2 == 0, round % 2 != 0] {
                let (command, to) = if first {
                    (program.native(), &mut native)
                } else {
                    (program.paged(&options)?, &mut paged)
                };
                to.push(trial::must(command, Duration::from_secs(120))?);
            }
        }
        for (n, p) in native.iter().zip(&paged) {
            p.same_output(n, program.name)?;
        }
        let wall = |trials: &[trial::Trial]| trials.iter().map(|t| t.wall_s).collect::<Vec<_>>();
        let cpu = |trials: &[trial::Trial]| trials.iter().map(|t| t.cpu_s).collect::<Vec<_>>();
        let name = program.name;
        report.series(
            &format!("{name}: native"),
            "s",
            json!({ "program": name, "what": "native" }),
            &wall(&native),
        );
        report.series(
            &format!("{name}: under rampool"),
            "s",
            json!({ "program": name, "what": "rampool" }),
            &wall(&paged),
        );
        report.ratio(&format!("{name}: time"), &wall(&paged), &wall(&native), Some(Reach::AtMost(1.02)));
        report.ratio(&format!("{name}: CPU time"), &cpu(&paged), &cpu(&native), None);
    }
    report.finish(common.json.as_deref())
}
