//! The experiments of S5: its locks, old and new, next to lazy release consistency; its barriers that keep
//! pages; its programs.
//!
//! Its nodes had a processor each and took 0.1 ms and more for what takes 1 us here. So a rank of this
//! machine finishes all its critical sections before another wakes: no rank ever waits, and a lock stays with
//! its last holder. With a pause after each section ranks meet at locks as the paper's did.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::{Run, SPIN, Samples, Way, get};
use crate::bench::Common;
use crate::bench::link::{Link, Rate};
use crate::bench::ranks;
use crate::bench::report::{Reach, Report};
use crate::bench::service::KeyFile;

/// Between the critical sections of ranks that take turns: longer than a section of each of eight ranks takes
/// on two CPUs.
const APART_US: usize = 2000;
const WAYS: [(usize, &str); 2] = [(0, "back to back"), (APART_US, "ranks take turns")];

/// The experiments that have this name: none, or one.
pub fn run(report: &mut Report, common: &Common, rounds: usize, part: &str) -> Result<()> {
    if ["s5", "s5-locks"].contains(&part) {
        report.note(format!(
            "ranks that take turns: {} ms behind each section, in which others have theirs; not counted",
            APART_US / 1000
        ));
    }
    match part {
        "s5" => {
            by_two(report, common, rounds, None)?;
            // A namespace of its own: the thread that makes the link is in it.
            let over_link =
                || -> Result<()> { by_two(report, common, rounds, Some(&Link::make(Rate::HundredMbit)?)) };
            std::thread::scope(|scope| scope.spawn(over_link).join().expect("the benchmark's thread"))
        }
        "s5-locks" => locks(report, common, rounds),
        "s5-programs" => programs(report, common, rounds),
        _ => Ok(()),
    }
}

/// As many runs as rounds: what rank 0 reports, each in a list.
fn rounds_of(
    rounds: usize,
    ranks: u16,
    protocol: &str,
    experiment: &str,
    sizes: &[usize],
) -> Result<Samples> {
    let mut all = Samples::new();
    for _ in 0..rounds {
        let arguments = sizes.iter().map(usize::to_string).collect();
        let (spin, way) = (Duration::ZERO, Way::Tcp);
        for (name, samples) in (Run { ranks, protocol, spin, way, experiment, arguments }).measure()? {
            all.entry(name).or_default().extend(samples);
        }
    }
    Ok(all)
}

/// Figure 2: each rank takes each of eight locks in turn, by the old scheme and the new one. Figure 3 and
/// table 3: two neighbours share a lock, under the new scheme and under lazy release consistency.
fn locks(report: &mut Report, common: &Common, rounds: usize) -> Result<()> {
    let patterns = [
        ("figure 2", common.pick(128, 16), 8, [("old", "ibec", 0), ("new", "ibec", 1)]),
        ("table 3", common.pick(34, 6), 2, [("ibec", "ibec", 1), ("lrc", "lrc", 0)]),
    ];
    for (of, sections, own, schemes) in patterns {
        let managers = [(0, "one manager"), (1, "managers spread")];
        for (ranks, (spread, managers)) in (1..=8).flat_map(|ranks| managers.map(|one| (ranks, one))) {
            for (apart, way) in WAYS {
                for (scheme, protocol, path) in schemes {
                    let sizes = [sections, own, spread, path, apart];
                    let samples = rounds_of(rounds, ranks, protocol, "several-locks", &sizes)?;
                    for (what, unit) in [("section", "us"), ("messages", ""), ("bytes", ""), ("first", "")] {
                        let parameters = json!({
                            "experiment": of, "what": what, "scheme": scheme, "ranks": ranks,
                            "managers": managers, "way": way,
                        });
                        let name = format!("{of}, {ranks} ranks, {way}, {managers}, {scheme}: {what}");
                        report.series(&name, unit, parameters, get(&samples, what)?);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Figure 4, Water with either lock scheme, and figure 5, SOR with either barrier, its pages at their writers
/// or dealt out in turn; by ranks, next to lazy release consistency.
fn programs(report: &mut Report, common: &Common, rounds: usize) -> Result<()> {
    let water = common.pick([1728, 2], [64, 1]);
    for (way, protocol, path) in [("old locks", "ibec", 0), ("new locks", "ibec", 1), ("lrc", "lrc", 0)] {
        let sizes = [&[1, 0, path], &water[..]].concat();
        program(report, rounds, ("water", way), protocol, &sizes)?;
    }
    let sor = common.pick(SOR, SMALL_SOR);
    for (way, protocol, keep, spread) in [
        ("plain barriers", "ibec", 0, 0),
        ("barriers that keep pages", "ibec", 1, 0),
        ("plain barriers, pages dealt out", "ibec", 0, 1),
        ("barriers that keep pages, pages dealt out", "ibec", 1, 1),
        ("lrc", "lrc", 0, 0),
    ] {
        let sizes = [&[keep, spread, usize::from(protocol == "ibec")], &sor[..]].concat();
        program(report, rounds, ("sor", way), protocol, &sizes)?;
    }
    Ok(())
}

fn program(
    report: &mut Report,
    rounds: usize,
    (program, way): (&str, &str),
    protocol: &str,
    sizes: &[usize],
) -> Result<()> {
    for ranks in 1..=8 {
        let samples = rounds_of(rounds, ranks, protocol, program, sizes)?;
        for what in ["alone", "parallel", "faults", "overhead"] {
            let parameters = json!({ "experiment": program, "what": what, "way": way, "ranks": ranks });
            report.series(
                &format!("{program}, {ranks} ranks, {way}: {what}"),
                "ms",
                parameters,
                get(&samples, what)?,
            );
        }
    }
    Ok(())
}

const SOR: [usize; 3] = [1024, 1536, 10];
const SMALL_SOR: [usize; 3] = [64, 256, 10];

/// The lock schemes and the barriers, over loopback or a link as fast as the paper's network.
fn by_two(report: &mut Report, common: &Common, rounds: usize, link: Option<&Link>) -> Result<()> {
    let key = KeyFile::make()?;
    let over = link.map_or("loopback", |link| link.rate.name());
    let measure = |experiment: &str, sizes: &[usize]| -> Result<Samples> {
        let printed = ranks::two(ranks::Where { link, apart: false }, "ibec", &key.path, experiment, || {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["bench", "shared-rank", experiment]).args(sizes.iter().map(usize::to_string));
            command.env("RAMPOOL_SPIN_US", SPIN.as_micros().to_string());
            Ok(command)
        })?;
        serde_json::from_str(printed.trim())
            .with_context(|| format!("rank 0 of `{experiment}` printed {printed:?}"))
    };
    let sections = common.pick(1000, 50);
    for (apart, way) in WAYS.into_iter().filter(|&(apart, _)| apart > 0 || link.is_none()) {
        let [mut old, mut new, mut chosen, mut local] = [const { Vec::new() }; 4];
        // Many short runs: most of the difference is where the kernel puts their threads.
        let sections = if apart > 0 { sections / 4 } else { sections };
        for _ in 0..rounds * 5 {
            for (path, times) in [&mut old, &mut new, &mut chosen].into_iter().enumerate() {
                let samples = measure("one-lock", &[sections, path, apart])?;
                times.extend_from_slice(get(&samples, "section")?);
                if path == 0 {
                    local.extend_from_slice(get(&samples, "local")?);
                }
            }
        }
        let name = format!("one lock by 2 ranks over {over}, {way}");
        let of = |what: &str| json!({ "experiment": "s5", "what": what, "over": over, "way": way });
        report.series(&format!("{name}: old scheme (forward)"), "us", of("old"), &old);
        report.series(&format!("{name}: new scheme (central)"), "us", of("new"), &new);
        report.series(&format!("{name}: chosen by the manager (default)"), "us", of("chosen"), &chosen);
        report.series(&format!("{name}: taken again without a message, old scheme"), "", of("local"), &local);
        report.ratio(
            &format!("{name}: old / new scheme (S5: 1.6 to 2.2)"),
            &old,
            &new,
            (apart > 0).then_some(Reach::AtLeast(1.6)),
        );
        let better: Vec<f64> = old.iter().zip(&new).map(|(old, new)| old.min(*new)).collect();
        report.ratio(
            &format!("{name}: chosen / the better scheme"),
            &chosen,
            &better,
            Some(Reach::AtMost(1.1)),
        );
    }
    for (keep, name, reach) in
        [(0, "plain barriers", None), (1, "barriers that keep pages", Some(Reach::AtMost(0.1)))]
    {
        let (mut faults, mut overhead) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let samples = measure("sor", &[&[keep, 1, 1], &common.pick(SOR, SMALL_SOR)[..]].concat())?;
            faults.extend_from_slice(get(&samples, "faults")?);
            overhead.extend_from_slice(get(&samples, "overhead")?);
        }
        let name = format!("SOR over {over}, {name}");
        let of = |what: &str| json!({ "experiment": "s5", "what": what, "of": name });
        report.series(&format!("{name}: write faults"), "ms", of("faults"), &faults);
        report.series(&format!("{name}: all waiting"), "ms", of("waiting"), &overhead);
        report.ratio(&format!("{name}: write faults / all waiting"), &faults, &overhead, reach);
    }
    Ok(())
}
