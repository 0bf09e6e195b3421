//! `rampool generate`: manual pages and shell completions, made from the definitions that parse the command
//! line. Hidden, because it is for packagers.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;

/// Write manual pages and shell completions
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Directory to write to: pages go to share/man/man1 below it, completions where each shell looks for
    /// them
    dir: PathBuf,
}

pub fn run(args: &Args) -> Result<i32> {
    let command = crate::Cli::command();
    for (shell, place) in [
        (Shell::Bash, "share/bash-completion/completions"),
        (Shell::Zsh, "share/zsh/site-functions"),
        (Shell::Fish, "share/fish/vendor_completions.d"),
    ] {
        let dir = args.dir.join(place);
        made(&dir)?;
        clap_complete::generate_to(shell, &mut command.clone(), "rampool", &dir)
            .with_context(|| format!("completions for {shell}"))?;
    }
    let dir = args.dir.join("share/man/man1");
    made(&dir)?;
    clap_mangen::generate_to(command, &dir).context("manual pages")?;
    Ok(0)
}

fn made(dir: &Path) -> Result<&Path> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subcommand_has_a_page_and_every_shell_its_completions() {
        let dir = tempfile::tempdir().unwrap();
        run(&Args { dir: dir.path().to_owned() }).unwrap();
        let read = |path: &str| {
            std::fs::read_to_string(dir.path().join("share").join(path))
                .unwrap_or_else(|e| panic!("{path}: {e}"))
        };
        for sub in ["run", "serve", "launch", "status", "top", "doctor", "key"] {
            assert!(read(&format!("man/man1/rampool-{sub}.1")).contains("rampool"), "{sub}");
            assert!(
                read("bash-completion/completions/rampool.bash").contains(&format!("rampool__subcmd__{sub}")),
                "{sub}"
            );
        }
        assert!(read("man/man1/rampool-run.1").contains("\\-\\-local"));
        assert!(read("zsh/site-functions/_rampool").contains("--local"));
        assert!(read("fish/vendor_completions.d/rampool.fish").contains("local"));
    }

    #[test]
    fn the_command_line_is_well_formed() {
        crate::Cli::command().debug_assert();
    }
}
