//! `rampool plot`: where the time of parallel programs went, as a picture.

mod bars;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

pub use bars::{Run, draw};

use crate::launch::stats::not_written;

/// Draw where the time of parallel programs went: stacked bars, as an SVG picture
///
/// Reads what `rampool launch --stats=FILE` wrote of each run, and draws the runs side by side, a bar for each rank: to compare protocols, numbers of ranks, or
/// versions of a program. Of one run alone, `rampool launch --plot FILE` draws the same at once.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// What `rampool launch --stats=FILE` wrote, one file for each run. Its name, without its ending, stands below the run's bars
    #[arg(required = true, value_name = "STATS")]
    runs: Vec<PathBuf>,

    /// The picture
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// What stands above the bars
    #[arg(long, default_value = "Where the time went", value_name = "TEXT")]
    title: String,
}

pub fn run(args: &Args) -> Result<i32> {
    let runs = args.runs.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    write(&args.output, &args.title, &runs)?;
    Ok(0)
}

fn read(path: &Path) -> Result<Run> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    let wanted = || format!("{} is not what `rampool launch --stats=FILE` writes", path.display());
    let ranks: Vec<_> = serde_json::from_str(&text).with_context(wanted)?;
    ensure!(!ranks.is_empty(), "{} has no rank in it: none finished its run", path.display());
    let label = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(Run { label, ranks })
}

/// Draws the runs into a file.
pub fn write(file: &Path, title: &str, runs: &[Run]) -> Result<()> {
    std::fs::write(file, draw(title, runs)).with_context(|| not_written(file))
}
