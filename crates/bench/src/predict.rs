//! `rampool predict`: how long a parallel program would take on another network, from the trace of a run.
//!
//! ```text
//!   recording    a trace, as a program with waits and what ended them
//!    network      the cost of a message: presets, files, and what the trace itself shows
//!   replay       the run again, event by event, on another network
//!    additive     S4's own method: each wait's messages exchanged for those of another network
//! ```

pub mod additive;
pub mod network;
pub mod recording;
pub mod replay;

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use network::Network;
use recording::{Category, Recording};
use replay::{Machine, Phase, Prediction};

/// Predict how long a parallel program would take on another network
///
/// Reads the trace of `rampool launch --trace DIR`, and replays it with the costs of other networks:
/// computing stays the same, messages take the other network's time, barriers and links wait for the last
/// rank. Next to it stands the result of the additive method of Barli, Watanabe, Sakai and Tanaka. Only
/// programs with one thread a rank can be predicted. Then it names the phases, from barrier to barrier, that
/// one rank alone would compute sooner: there communication costs more than sharing the work saves.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Directory that `rampool launch --trace` wrote
    #[arg(value_name = "DIR")]
    trace: PathBuf,

    /// Network to predict for: eth100-1999, loh, loh-hb (the papers'), eth1g, eth10g, eth25g, rdma100, wan,
    /// or a TOML file; repeatable [default: all of these]
    #[arg(short, long = "network", value_name = "NAME")]
    networks: Vec<String>,

    /// Factor by which computing takes longer than in the trace
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR", value_parser = factor)]
    slower: f64,

    /// Factor by which the protocol's software and the kernel's part of a fault take longer [default: as
    /// --slower]
    #[arg(long, value_name = "FACTOR", value_parser = factor)]
    software_slower: Option<f64>,

    /// Milliseconds that one rank alone takes where the trace was taken, for the speed-up [default: computing
    /// of all ranks]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    sequential_ms: Option<f64>,

    /// Move changes of pages to their homes by memory-mapped hardware, at no CPU time: AURC as its authors
    /// meant it. For traces of hlrc
    #[arg(long)]
    updates_by_hardware: bool,

    /// Ignore time that ranks waited for a CPU, in a trace from a busy machine, or with more ranks than CPUs:
    /// steps other than computing count with the lower quartile of such steps
    #[arg(long)]
    undisturbed: bool,

    /// Also write the predictions to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if (1e-3..=1e6).contains(&factor) => Ok(factor),
        _ => Err("give a factor between 0.001 and 1000000".to_owned()),
    }
}

fn milliseconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(time) if time > 0.0 && time < 1e12 => Ok(time),
        _ => Err("give a number of milliseconds".to_owned()),
    }
}

/// The prediction for one network.
struct Row {
    network: Network,
    /// The time of one rank alone there, divided by the run's time.
    speed_up: f64,
    replayed: Prediction,
    additive_us: Option<f64>,
}

pub fn run(args: &Args) -> Result<i32> {
    let mut recording = Recording::read(&args.trace).context("cannot use the trace")?;
    ensure!(
        recording.elapsed_us() > 0.0,
        "cannot use the trace: there is nothing in it between start and stop"
    );
    if args.undisturbed {
        recording = recording.undisturbed();
    }
    let networks = match &args.networks[..] {
        [] => Network::presets(),
        names => names.iter().map(|name| Network::named(name)).collect::<Result<_>>()?,
    };
    let machine = Machine {
        slower: args.slower,
        software_slower: args.software_slower.unwrap_or(args.slower),
        updates_by_hardware: args.updates_by_hardware,
    };
    let mut rows = Vec::new();
    for network in Network::recorded(&recording).into_iter().chain(networks) {
        let replayed = replay::replay(&recording, &network, machine).context("cannot use the trace")?;
        // It keeps waits unchanged, those for a CPU, too.
        let additive_us = (!args.undisturbed).then(|| additive::additive(&recording, &network, machine));
        let alone_us = args.sequential_ms.map_or(recording.computed_us(), |ms| ms * 1e3) * machine.slower;
        rows.push(Row { network, speed_up: alone_us / replayed.elapsed_us(), replayed, additive_us });
    }
    print!("{}{}", table(&recording, machine, &rows), phases(&rows));
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&as_json(&recording, machine, &rows))?;
        std::fs::write(path, text + "\n")
            .with_context(|| format!("cannot write the predictions to {}", path.display()))?;
    }
    Ok(0)
}

/// The mean over ranks of a category's share of the run.
fn share(prediction: &Prediction, of: impl Fn(&replay::RankTime) -> f64) -> f64 {
    let ranks = prediction.ranks.len().max(1) as f64;
    prediction.ranks.iter().map(of).sum::<f64>() / ranks / prediction.elapsed_us() * 100.0
}

fn ms(us: f64) -> String {
    let ms = us / 1e3;
    if ms >= 1000.0 { format!("{ms:.0}") } else { format!("{ms:.*}", if ms >= 100.0 { 1 } else { 2 }) }
}

fn table(recording: &Recording, machine: Machine, rows: &[Row]) -> String {
    let sent = recording.ranks.iter().flat_map(|rank| &rank.sent);
    let (messages, bytes) = sent.fold((0_u64, 0_u64), |(count, bytes), sent| (count + 1, bytes + sent.bytes));
    let mut text = format!(
        "recorded: {} ranks, {} ms; computing of all ranks {} ms; {messages} messages, {} KiB in the whole \
         trace\n",
        recording.ranks.len(),
        ms(recording.elapsed_us()),
        ms(recording.computed_us()),
        bytes / 1024,
    );
    if machine.slower != 1.0 || machine.software_slower != 1.0 {
        let Machine { slower, software_slower, .. } = machine;
        let _ = writeln!(
            text,
            "on a machine that takes {slower} times as long to compute, and {software_slower} times for the \
             protocol"
        );
    }
    let mut lines = vec![
        [
            "network",
            "replayed ms",
            "speed-up",
            "computing",
            "read fault",
            "write fault",
            "lock",
            "unlock",
            "barrier",
            "word",
            "other",
            "additive ms",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for row in rows {
        let elapsed = row.replayed.elapsed_us();
        let mut line = vec![row.network.name.clone(), ms(elapsed), format!("{:.2}", row.speed_up)];
        line.push(format!("{:.0} %", share(&row.replayed, |rank| rank.computing_us)));
        for category in Category::ALL {
            line.push(format!(
                "{:.0} %",
                share(&row.replayed, |rank| rank.waits_us.get(&category).copied().unwrap_or(0.0))
            ));
        }
        line.push(row.additive_us.map_or("-".to_owned(), ms));
        lines.push(line);
    }
    text + &aligned(&lines)
}

/// The phases that do not pay, a line for each network.
fn phases(rows: &[Row]) -> String {
    let mut lines =
        vec![["network", "phases", "ms", "alone ms", "the worst", "", ""].map(str::to_owned).to_vec()];
    for row in rows {
        let (of, mut found) = unpaid(&row.replayed);
        if found.is_empty() {
            continue;
        }
        let sum = |part: fn(&Phase) -> f64| ms(found.iter().map(|(_, phase)| part(phase)).sum());
        let mut line = vec![row.network.name.clone(), format!("{} of {of}", found.len())];
        line.extend([sum(|phase| phase.us), sum(|phase| phase.computing_us)]);
        found.sort_by(|(_, a), (_, b)| b.lost_us().total_cmp(&a.lost_us()));
        let name = |(number, phase): &(usize, Phase)| {
            format!("{number} ({} for {})", ms(phase.us), ms(phase.computing_us))
        };
        line.extend(found.iter().take(3).map(name));
        line.resize(7, String::new());
        lines.push(line);
    }
    if lines.len() == 1 {
        return "every phase, from barrier to barrier, takes less than one rank alone would\n".to_owned();
    }
    format!("phases, from barrier to barrier, that one rank alone would compute sooner:\n{}", aligned(&lines))
}

/// How many phases there are, and those that one rank alone would compute sooner, numbered from 1.
fn unpaid(prediction: &Prediction) -> (usize, Vec<(usize, Phase)>) {
    let phases = prediction.phases();
    (phases.len(), (1..).zip(phases).filter(|(_, phase)| phase.lost_us() > 0.0).collect())
}

fn aligned(lines: &[Vec<String>]) -> String {
    let mut text = String::new();
    let widths: Vec<usize> =
        (0..lines[0].len()).map(|at| lines.iter().map(|line| line[at].len()).max().unwrap_or(0)).collect();
    for line in lines {
        for (at, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let _ = if at == 0 { write!(text, "{cell:<width$}") } else { write!(text, "  {cell:>width$}") };
        }
        text.push('\n');
    }
    text
}

fn as_json(recording: &Recording, machine: Machine, rows: &[Row]) -> serde_json::Value {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            let elapsed = row.replayed.elapsed_us();
            let waits: serde_json::Map<_, _> = Category::ALL
                .into_iter()
                .map(|category| {
                    let waits =
                        |rank: &replay::RankTime| rank.waits_us.get(&category).copied().unwrap_or(0.0);
                    (category.name().to_owned(), share(&row.replayed, waits).into())
                })
                .collect();
            let (phases, unpaid) = unpaid(&row.replayed);
            let unpaid: Vec<_> = unpaid
                .into_iter()
                .map(|(number, Phase { us, computing_us })| {
                    json!({ "phase": number, "ms": us / 1e3, "alone_ms": computing_us / 1e3 })
                })
                .collect();
            json!({
                "phases": phases, "phases_that_do_not_pay": unpaid,
                "network": row.network, "replayed_ms": elapsed / 1e3,
                "additive_ms": row.additive_us.map(|us| us / 1e3),
                "speed_up": row.speed_up,
                "computing_percent": share(&row.replayed, |rank| rank.computing_us), "waits_percent": waits,
            })
        })
        .collect();
    json!({
        "ranks": recording.ranks.len(), "recorded_ms": recording.elapsed_us() / 1e3,
        "computing_of_all_ranks_ms": recording.computed_us() / 1e3,
        "slower": machine.slower, "software_slower": machine.software_slower,
        "updates_by_hardware": machine.updates_by_hardware, "predictions": rows,
    })
}
