//! `rampool-bench manual`: manual pages of the three commands, next to those of `rampool generate`. Hidden,
//! because it is for packagers.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::CommandFactory;

/// Write manual pages
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Directory to write to: pages go to share/man/man1 below it
    dir: PathBuf,
}

pub fn run(args: &Args) -> Result<i32> {
    let dir = args.dir.join("share/man/man1");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let mut rampool = crate::Cli::command().name("rampool").disable_help_subcommand(true);
    rampool.build();
    for command in rampool.get_subcommands().filter(|command| !command.is_hide_set()) {
        clap_mangen::generate_to(command.clone(), &dir).context("manual pages")?;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_with_its_options() {
        let dir = tempfile::tempdir().unwrap();
        run(&Args { dir: dir.path().to_owned() }).unwrap();
        let read = |page: &str| {
            std::fs::read_to_string(dir.path().join("share/man/man1").join(page))
                .unwrap_or_else(|e| panic!("{page}: {e}"))
        };
        for (page, option) in
            [("rampool-bench-fault.1", "json"), ("rampool-predict.1", "slower"), ("rampool-plot.1", "title")]
        {
            assert!(read(page).contains(&format!("\\-\\-{option}")), "{page}");
        }
        assert!(read("rampool-bench.1").contains("fault"));
        assert!(!dir.path().join("share/man/man1/rampool.1").exists(), "the other binary writes it");
    }
}
