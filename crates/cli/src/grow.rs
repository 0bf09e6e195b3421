//! `rampool grow`: gives a run one more server.

use anyhow::{Result, bail};
use rampool_client::pool::ServerSpec;
use rampool_run::settings::Settings;
use std::time::{Duration, Instant};

use crate::run::redundancy;
use crate::rundir;

const LOOK_EVERY: Duration = Duration::from_millis(50);
const ANSWER: Duration = Duration::from_secs(15);

/// Give a run of yours on this machine one more server
///
/// The server gets its share of the pages that the run has, and of new ones, and takes the place of others
/// that are lost.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The run, as `rampool top` names it: the process id of `rampool run`
    #[arg(value_name = "RUN")]
    run: u32,

    /// Memory server: HOST[:PORT] or unix:/PATH, perhaps followed by =AMOUNT [amount: as the run's others
    /// lend]
    #[arg(long, value_name = "ADDR")]
    server: ServerSpec,
}

/// 0 if the server is used from now on, 1 if it is not there yet.
pub fn run(args: &Args) -> Result<i32> {
    let runs = rundir::all_runs()?;
    let Some((_, path)) =
        runs.iter().find(|(run, path)| *run == args.run && rundir::is_under_way(*run, path))
    else {
        bail!("there is no run {} of yours on this machine; `rampool top` lists them", args.run);
    };
    let before = Settings::read(path)?.ticket;
    if before.copies() < 2 {
        bail!("run {} has one copy of each page: no server can be added to it", args.run);
    }
    redundancy::ask_to_grow(path, &args.server)?;
    let deadline = Instant::now() + ANSWER;
    while Instant::now() < deadline {
        std::thread::sleep(LOOK_EVERY);
        let now = Settings::read(path)?.ticket;
        let count = before.servers().count();
        if redundancy::has_heard(path) && now.servers().count() == count && now == before {
            bail!("run {} uses {} already", args.run, args.server.endpoint);
        }
        if now.leases().nth(count).is_some_and(|lease| lease.0 != 0) {
            println!("run {} uses {} from now on", args.run, args.server.endpoint);
            return Ok(0);
        }
    }
    println!("run {} cannot use {} yet: it asks every second", args.run, args.server.endpoint);
    Ok(1)
}
