//! Where the time of a run went: what `rampool launch --stats` gathers from its ranks and shows.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rampool_shared::TimeReport;

/// The directory where the ranks leave their statistics. Removed when dropped.
pub struct Inbox {
    dir: PathBuf,
}

impl Inbox {
    /// `run` must be unique: in containers every launcher has the same process id, and a launcher that was
    /// killed leaves its directory behind.
    pub fn make(run: &str) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("rampool-launch-{run}"));
        let made = std::fs::DirBuilder::new().mode(0o700).create(&dir);
        made.with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(Self { dir })
    }

    pub fn path(&self) -> OsString {
        self.dir.clone().into()
    }

    /// A file in the directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The reports, by rank. A rank that never joined, or did not finish, has none.
    pub fn reports(&self, ranks: u16) -> Result<Vec<TimeReport>> {
        let mut reports = Vec::new();
        for rank in 0..ranks {
            let path = self.dir.join(format!("rank-{rank}.json"));
            if let Ok(text) = std::fs::read_to_string(&path) {
                reports.push(
                    serde_json::from_str(&text)
                        .with_context(|| format!("invalid statistics of rank {rank}"))?,
                );
            }
        }
        Ok(reports)
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Checks, before the run, that a file can be written, and leaves its content unchanged.
pub fn try_file(file: &Path) -> Result<()> {
    let opened = std::fs::File::options().create(true).append(true).open(file);
    opened.map(drop).with_context(|| not_written(file))
}

/// Writes the reports to a file.
pub fn write(reports: &[TimeReport], file: &Path) -> Result<()> {
    let text = serde_json::to_string_pretty(reports)?;
    std::fs::write(file, text + "\n").with_context(|| not_written(file))
}

/// The error for a file that cannot be written.
pub fn not_written(file: &Path) -> String {
    format!("cannot write {}", file.display())
}

/// S4's categories by rank, in milliseconds, then messages and events of all ranks.
pub fn table(reports: &[TimeReport]) -> String {
    let mut rows = vec![
        ["rank", "time"]
            .into_iter()
            .chain(TimeReport::CATEGORIES.map(|(name, _)| name))
            .map(str::to_owned)
            .collect::<Vec<_>>(),
    ];
    for report in reports {
        let ms = |seconds: f64| format!("{:.1}", seconds * 1e3);
        let parts = TimeReport::CATEGORIES.map(|(_, seconds)| ms(seconds(report)));
        rows.push(
            [report.rank.to_string(), ms(report.elapsed_s * f64::from(report.threads))]
                .into_iter()
                .chain(parts)
                .collect(),
        );
    }
    let mut text = format!(
        "where the time went, ms ({})\n{}",
        reports.first().map_or("", |report| &report.protocol),
        aligned(&rows)
    );
    let (mut sent, mut counts, mut connections) =
        (BTreeMap::new(), BTreeMap::new(), BTreeMap::<&str, u64>::new());
    for report in reports {
        for (name, kind) in &report.sent {
            let sum: &mut (u64, u64) = sent.entry(name).or_default();
            *sum = (sum.0 + kind.messages, sum.1 + kind.bytes);
        }
        for (name, count) in &report.connections {
            *connections.entry(name).or_default() += count;
        }
        for (name, count) in &report.counts {
            *counts.entry(name).or_insert(0) += count;
        }
    }
    // Both ends count each connection.
    let connections: Vec<String> =
        connections.iter().map(|(name, ends)| format!("{} over {name}", ends / 2)).collect();
    if !connections.is_empty() {
        text += &format!("connections: {}\n", connections.join(", "));
    }
    text += &cpus(reports);
    let mut rows = vec![["messages of all ranks", "count", "bytes"].map(str::to_owned).to_vec()];
    rows.extend(
        sent.iter()
            .map(|(name, (count, bytes))| vec![name.to_string(), count.to_string(), bytes.to_string()]),
    );
    let total = sent.values().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    rows.push(vec!["all".to_owned(), total.0.to_string(), total.1.to_string()]);
    text += &aligned(&rows);
    let mut rows = vec![["events of all ranks", "count"].map(str::to_owned).to_vec()];
    rows.extend(counts.iter().map(|(name, count)| vec![name.to_string(), count.to_string()]));
    text + &aligned(&rows)
}

/// The CPUs that the ranks could use, if they reported them.
fn cpus(reports: &[TimeReport]) -> String {
    let Some(first) = reports.first().filter(|_| reports.iter().all(|report| !report.cpus.is_empty())) else {
        return String::new();
    };
    if reports.iter().all(|report| report.cpus == first.cpus) {
        return format!("CPUs of all ranks: {}\n", ranges(&first.cpus));
    }
    let shares: Vec<String> =
        reports.iter().map(|report| format!("{} of rank {}", ranges(&report.cpus), report.rank)).collect();
    format!("CPUs: {}\n", shares.join("; "))
}

/// Formats ascending numbers as `0-3,8`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|one, next| one + 1 == *next);
    let words = runs.map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    words.collect::<Vec<_>>().join(",")
}

/// Aligns columns; the first to the left, the others to the right.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let line = |row: &Vec<String>| {
        let cells = (0..columns).map(|column| match column {
            0 => format!("{:<1$}", row[0], width(0)),
            _ => format!("  {:>1$}", row[column], width(column)),
        });
        format!("  {}\n", cells.collect::<String>())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rampool_shared::Kind;

    #[test]
    fn a_table_sums_what_the_ranks_sent() {
        let one = |rank, messages, bytes| TimeReport {
            rank,
            threads: 2,
            cpus: if rank == 0 { vec![0, 1, 2, 8] } else { vec![4, 5] },
            elapsed_s: 0.25,
            connections: BTreeMap::from([("rings".to_owned(), 1)]),
            sent: BTreeMap::from([("GetPage".to_owned(), Kind { messages, bytes })]),
            ..TimeReport::default()
        };
        let table = table(&[one(0, 3, 40), one(1, 4, 50)]);
        let words = |start: &str| -> Vec<String> {
            let line = table.lines().find(|line| line.trim_start().starts_with(start)).unwrap();
            line.split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(words("GetPage"), ["GetPage", "7", "90"]);
        assert_eq!(words("all"), ["all", "7", "90"]);
        assert_eq!(words("1 ")[..2], ["1", "500.0"]);
        assert_eq!(words("connections"), ["connections:", "1", "over", "rings"]);
        assert!(table.contains("\nCPUs: 0-2,8 of rank 0; 4-5 of rank 1\n"), "{table}");
    }
}
