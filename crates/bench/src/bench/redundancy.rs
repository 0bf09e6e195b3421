//! What copies of pages are for: what a reader notices when one of three servers fails ([`stalls`]) or is
//! slow ([`late`]). What they cost, `bench/paged.py` measures.

mod late;
mod stalls;

use anyhow::Result;

use super::Common;
use super::report::Report;

/// What a reader notices of a server that fails or is slow
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("redundancy", common.quick);
    stalls::measure(common, &mut report)?;
    late::measure(common, &mut report)?;
    report.finish(common.json.as_deref())
}
