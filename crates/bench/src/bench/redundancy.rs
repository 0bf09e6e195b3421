//! What a second copy of each page costs: the same programs on the same two servers, over loopback TCP, with one
//! copy and with two. A read needs one copy; what is written travels twice. And what the copies are for: what
//! a reader notices when one of three servers fails ([`stalls`]).

mod stalls;

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::Common;
use super::miss::{Content, Touching};
use super::programs::{self, Bench, Sort, Wanted, Way, map};
use super::report::{Reach, Report};
use super::trial::Parts;

/// Two copies of each page compared with one
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    parts: Parts,
}

const WAYS: [Way; 3] = [Way::Native, Way::Servers(2, 1), Way::Servers(2, 2)];
const DEADLINE: Duration = Duration::from_secs(200);

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("redundancy", common.quick);
    report.note("two servers over loopback TCP on this machine, which share its CPUs with the program; not pinned; programs at a quarter of their own peak");
    stalls::measure(common, &mut report)?;
    faults(common, &mut report)?;
    let bench = Bench { common, ways: &WAYS, local_percent: 25, swap: None, deadline: DEADLINE };
    let most = |most| Wanted { two_copies: Some(Reach::AtMost(most)), ..Wanted::default() };
    match programs::columns(&args.parts, common) {
        Ok(program) => bench.program(&mut report, &program, &most(1.15))?,
        Err(reason) => report.note(format!("left out: {reason}")),
    }
    let (_lines, sort) = Sort::Kilobyte.program(common)?;
    bench.program(&mut report, &sort, &most(1.7))?;
    bench.program(&mut report, &map::program(common)?, &most(1.7))?;
    report.finish(common.json.as_deref())
}

/// Random touches, as `miss` has them.
fn faults(common: &Common, report: &mut Report) -> Result<()> {
    let touches = common.pick(100_000, 4000);
    let touching = Touching::new(common.pick(512 << 20, 32 << 20), common.pick(128 << 20, 8 << 20));
    let mut found = [(); 2].map(|()| [Vec::new(), Vec::new()]);
    for _ in 0..common.rounds(5, 1) {
        for (copies, samples) in ["1", "2"].into_iter().zip(&mut found) {
            let servers = [touching.server_at("127.0.0.1:0")?, touching.server_at("127.0.0.1:0")?];
            let times = touching.paged(Content::Random, touches, &servers, &["--copies", copies])?;
            samples.iter_mut().zip(times).for_each(|(samples, time)| samples.push(time));
        }
    }
    let [one, two] = &found;
    for (at, what) in ["wall", "CPU"].into_iter().enumerate() {
        for (copies, samples) in ["one copy", "two copies"].into_iter().zip(&found) {
            let parameters = json!({ "way": copies, "what": what });
            report.series(&format!("a miss, {copies}, {what}"), "us", parameters, &samples[at]);
        }
        report.ratio(&format!("a miss, {what}: two copies / one copy"), &two[at], &one[at], None);
    }
    Ok(())
}
