//! What a second copy of each page costs: the same programs on the same two servers, over loopback TCP, with
//! one copy and with two. A read needs one copy; what is written travels twice. And what the copies are for:
//! what a reader notices when one of three servers fails ([`stalls`]) or is slow ([`late`]). And what a copy
//! on a disk costs where there is one server.

mod late;
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
/// The same for a program that only reads.
const READER_WAYS: [Way; 5] =
    [Way::Native, Way::Servers(2, 1), Way::Servers(2, 2), Way::Servers(1, 1), Way::Backup];
const DEADLINE: Duration = Duration::from_secs(200);

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let mut report = Report::start("redundancy", common.quick);
    report.note(
        "two servers over loopback TCP on this machine, which share its CPUs with the program; not \
        pinned; programs at a quarter of their own peak",
    );
    stalls::measure(common, &mut report)?;
    late::measure(common, &mut report)?;
    faults(common, &mut report)?;
    let bench = || Bench { common, ways: &WAYS, local_percent: 25, swap: None, deadline: DEADLINE };
    let most = |most| Wanted { two_copies: Some(Reach::AtMost(most)), ..Wanted::default() };
    match programs::columns(&args.parts, common) {
        Ok(program) => {
            let wanted = Wanted { backup: Some(Reach::AtMost(1.15)), ..most(1.15) };
            Bench { ways: &READER_WAYS, ..bench() }.program(&mut report, &program, &wanted)?;
        }
        Err(reason) => report.note(format!("left out: {reason}")),
    }
    let (_lines, sort) = Sort::Kilobyte.program(common)?;
    bench().program(&mut report, &sort, &most(1.7))?;
    bench().program(&mut report, &map::program(common)?, &most(1.7))?;
    report.finish(common.json.as_deref())
}

/// Random touches, as `miss` has them.
fn faults(common: &Common, report: &mut Report) -> Result<()> {
    let touches = common.pick(100_000, 4000);
    let touching = Touching::new(common.pick(512 << 20, 32 << 20), common.pick(128 << 20, 8 << 20));
    let ways = [
        ("one copy", 2, ["--copies".to_owned(), "1".to_owned()]),
        ("two copies", 2, ["--copies".to_owned(), "2".to_owned()]),
        ("one server", 1, ["--copies".to_owned(), "1".to_owned()]),
        ("one server and a disk", 1, programs::backup()?),
    ];
    let mut found = [(); 4].map(|()| [Vec::new(), Vec::new()]);
    for _ in 0..common.rounds(5, 1) {
        for ((_, count, options), samples) in ways.iter().zip(&mut found) {
            let servers: Vec<_> =
                (0..*count).map(|_| touching.server_at("127.0.0.1:0")).collect::<Result<_>>()?;
            let options = [options[0].as_str(), options[1].as_str()];
            let times = touching.paged(Content::Random, touches, &servers, &options)?;
            samples.iter_mut().zip(times).for_each(|(samples, time)| samples.push(time));
        }
    }
    let [one, two, server, backup] = &found;
    for (at, what) in ["wall", "CPU"].into_iter().enumerate() {
        for ((way, ..), samples) in ways.iter().zip(&found) {
            let parameters = json!({ "way": way, "what": what });
            report.series(&format!("a miss, {way}, {what}"), "us", parameters, &samples[at]);
        }
        report.ratio(&format!("a miss, {what}: two copies / one copy"), &two[at], &one[at], None);
        let reach = (what == "wall").then_some(Reach::AtMost(1.15));
        let name = format!("a miss, {what}: a backup / one server");
        report.ratio(&name, &backup[at], &server[at], reach);
    }
    Ok(())
}
