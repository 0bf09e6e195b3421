//! `rampool bench`, `rampool predict`, `rampool plot`: they run the binary `rampool-bench` from the directory
//! of this one.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use rampool_run::libraries;

/// Arguments of the other binary, `--help` included.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
pub struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// A command of the other binary.
///
/// # Errors
/// If it does not exist.
pub fn command(name: &str) -> Result<Command> {
    let program = libraries::program("rampool-bench").map_err(|error| {
        anyhow!(
            "{error}, or start one that lies elsewhere, with RAMPOOL_BIN naming the rampool that it is to use"
        )
    })?;
    let mut command = Command::new(program);
    command.arg(name);
    Ok(command)
}

/// Replaces this process by the other binary.
pub fn become_it(name: &str, args: &Args) -> Result<i32> {
    let mut command = command(name)?;
    let error = command.args(&args.arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", command.get_program().display()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn one_that_is_missing_is_named_with_what_to_do() {
        // Nothing of that name lies next to the tests.
        let error = super::command("bench").unwrap_err().to_string();
        assert!(error.starts_with("rampool-bench is not in the directory of /"), "{error}");
        assert!(error.contains("RAMPOOL_BIN"), "{error}");
    }
}
