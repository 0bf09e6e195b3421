//! `rampool plot`: where the time of parallel programs went, as a picture.

mod bars;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use bars::{Run, draw};

/// Draw where the time of parallel programs went: stacked bars, as an SVG picture
///
/// Reads what `rampool launch --stats=FILE` wrote of each run, and draws the runs side by side, a bar for
/// each rank: to compare protocols, numbers of ranks, or versions of a program. For a single run, `rampool
/// launch --plot FILE` draws the same at once.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Files written by `rampool launch --stats=FILE`, one for each run; the name without its extension
    /// stands below the run's bars
    #[arg(required = true, value_name = "STATS")]
    runs: Vec<PathBuf>,

    /// File to write the picture to
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Title above the bars
    #[arg(long, default_value = "Where the time went", value_name = "TEXT")]
    title: String,

    /// Draw no labels below the bars
    #[arg(long, hide = true)]
    unlabelled: bool,
}

pub fn run(args: &Args) -> Result<i32> {
    let runs = args.runs.iter().map(|path| read(path, args.unlabelled)).collect::<Result<Vec<_>>>()?;
    write(&args.output, &args.title, &runs)?;
    Ok(0)
}

fn read(path: &Path, unlabelled: bool) -> Result<Run> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let wanted = || format!("{} is not a file of `rampool launch --stats=FILE`", path.display());
    let ranks: Vec<_> = serde_json::from_str(&text).with_context(wanted)?;
    ensure!(!ranks.is_empty(), "{} contains no rank: none finished its run", path.display());
    let name = path.file_stem().filter(|_| !unlabelled);
    let label = name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(Run { label, ranks })
}

/// Draws the runs into a file.
fn write(file: &Path, title: &str, runs: &[Run]) -> Result<()> {
    std::fs::write(file, draw(title, runs)).with_context(|| format!("cannot write {}", file.display()))
}
