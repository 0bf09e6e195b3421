//! Samples, their medians and spread, and ratios next to their targets; as text while it runs, as JSON at the
//! end.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// What a ratio should reach.
#[derive(Clone, Copy, Debug)]
pub enum Reach {
    AtMost(f64),
    AtLeast(f64),
}

impl Reach {
    fn met(self, value: f64) -> bool {
        match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) => value >= limit,
        }
    }
    fn text(self) -> String {
        match self {
            Self::AtMost(limit) => format!("<= {limit}"),
            Self::AtLeast(limit) => format!(">= {limit}"),
        }
    }
}

/// One benchmark's findings.
pub struct Report {
    name: String,
    quick: bool,
    load_before: String,
    series: Vec<Value>,
    ratios: Vec<Value>,
    notes: Vec<String>,
}

impl Report {
    pub fn start(name: impl Into<String>, quick: bool) -> Self {
        let report = Self {
            name: name.into(),
            quick,
            load_before: load_average(),
            series: Vec::new(),
            ratios: Vec::new(),
            notes: Vec::new(),
        };
        println!("bench {} on {}, load average {}", report.name, machine(), report.load_before);
        if quick {
            println!("  --quick: these figures mean nothing");
        }
        report
    }

    /// How something was measured, for the reader of the figures.
    pub fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        println!("  {text}");
        self.notes.push(text);
    }

    /// Samples of one thing, whose name says which.
    pub fn samples(&mut self, name: &str, unit: &str, samples: &[f64]) -> f64 {
        self.series(name, unit, json!({}), samples)
    }

    /// Samples of one thing. `parameters` is an object that says which, for tables and plots.
    pub fn series(&mut self, name: &str, unit: &str, parameters: Value, samples: &[f64]) -> f64 {
        let [low, middle, high] = quartiles(samples);
        println!(
            "  {name:<46} {} {unit}  (quartiles {} to {}, {} samples)",
            short(middle),
            short(low),
            short(high),
            samples.len()
        );
        self.series.push(json!({
            "name": name, "unit": unit, "parameters": parameters,
            "median": middle, "low": low, "high": high, "samples": samples,
        }));
        middle
    }

    /// Samples of several things in the same unit.
    pub fn all<const N: usize>(&mut self, unit: &str, names: [&str; N], samples: &[Vec<f64>; N]) {
        for (name, samples) in names.iter().zip(samples) {
            self.samples(name, unit, samples);
        }
    }

    /// The median of the ratios of neighbours: `a[n] / b[n]`.
    pub fn ratio(&mut self, name: &str, a: &[f64], b: &[f64], reach: Option<Reach>) -> f64 {
        let ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / b).collect();
        self.figure(name, &ratios, reach)
    }

    /// The median of samples, next to what it should reach.
    pub fn figure(&mut self, name: &str, samples: &[f64], reach: Option<Reach>) -> f64 {
        let [low, middle, high] = quartiles(samples);
        let spread = format!("quartiles {} to {}", short(low), short(high));
        match reach {
            Some(reach) => {
                let verdict = if reach.met(middle) { "ok" } else { "missed" };
                println!("  {name:<46} reach {}: {} {verdict}  ({spread})", reach.text(), short(middle));
            }
            None => println!("  {name:<46} {}  ({spread})", short(middle)),
        }
        self.ratios.push(json!({
            "name": name, "value": middle, "low": low, "high": high, "reach": reach.map(Reach::text),
            "met": reach.map(|r| r.met(middle)),
        }));
        middle
    }

    /// Prints the end and writes the file.
    pub fn finish(self, file: Option<&Path>) -> Result<i32> {
        let load_after = load_average();
        println!("  load average at the end {load_after}");
        if let Some(file) = file {
            let all = json!({
                "bench": self.name, "quick": self.quick, "machine": machine(),
                "load_before": self.load_before, "load_after": load_after,
                "series": self.series, "ratios": self.ratios, "notes": self.notes,
            });
            std::fs::write(file, format!("{all:#}\n"))
                .with_context(|| format!("cannot write the figures to {}", file.display()))?;
        }
        Ok(0)
    }
}

/// Measures several things in turns, all in each round. The first round warms them up and does not count.
pub fn in_rounds<const N: usize>(
    rounds: usize,
    mut measure: impl FnMut(usize) -> Result<[f64; N]>,
) -> Result<[Vec<f64>; N]> {
    let mut all = [const { Vec::new() }; N];
    for round in 0..=rounds {
        let found = measure(round)?;
        if round > 0 {
            all.iter_mut().zip(found).for_each(|(samples, one)| samples.push(one));
        }
    }
    Ok(all)
}

/// The median of what so many take, in microseconds; each says how long it took.
pub fn p50_of(count: usize, one: impl FnMut(usize) -> Result<Duration>) -> Result<f64> {
    Ok(p50((0..count).map(one).collect::<Result<_>>()?))
}

/// The median in microseconds.
pub fn p50(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// Three figures, for every magnitude.
pub fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

pub fn median(samples: &[f64]) -> f64 {
    quartiles(samples)[1]
}

/// The lower quartile, the median and the upper quartile; NaN without samples.
fn quartiles(samples: &[f64]) -> [f64; 3] {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return [f64::NAN; 3] };
    [1, 2, 3].map(|quarter| {
        let (at, rest) = (last * quarter / 4, last * quarter % 4);
        let next = sorted[(at + 1).min(last)];
        sorted[at] + (next - sorted[at]) * rest as f64 / 4.0
    })
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

fn machine() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        cpuinfo.lines().find_map(|l| l.strip_prefix(name)?.split_once(':')).map(|(_, v)| v.trim().to_owned())
    };
    // Not what this thread may use: it may be pinned.
    let cpus = cpuinfo.lines().filter(|l| l.starts_with("processor")).count().max(1);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = kernel.trim().split('-').next().unwrap_or_default();
    let virtual_machine = if cpuinfo.contains(" hypervisor") { " (virtual)" } else { "" };
    format!(
        "{cpus} CPUs, {}{virtual_machine}, Linux {release}",
        field("model name").unwrap_or_else(|| std::env::consts::ARCH.into())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_the_samples() {
        assert_eq!(quartiles(&[5.0, 1.0, 3.0, 2.0, 4.0]), [2.0, 3.0, 4.0]);
        assert_eq!(quartiles(&[1.0, 2.0]), [1.25, 1.5, 1.75]);
        assert_eq!(quartiles(&[7.0]), [7.0; 3]);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_ratio_is_that_of_neighbours_and_knows_its_target() {
        let mut report = Report::start("test", true);
        assert_eq!(report.ratio("r", &[2.0, 20.0, 9.0], &[1.0, 10.0, 3.0], Some(Reach::AtMost(2.0))), 2.0);
        report.ratio("s", &[1.0], &[2.0], Some(Reach::AtLeast(0.6)));
        assert_eq!(report.ratios[0]["met"], true);
        assert_eq!(report.ratios[1]["met"], false);
    }
}
