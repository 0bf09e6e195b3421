//! `rampool-bench` measures rampool and evaluates measurements. `rampool bench`, `rampool predict` and
//! `rampool plot` start it.
//!
//! ```text
//!    bench      every benchmark, each with its reference
//!    predict    how long a parallel program would take on another network, from the trace of a run
//!   plot       where the time of parallel programs went, as a picture
//! ```
//!
//! Read `bench` from its first page. `predict` and `plot` are read on their own. Memory servers, runs and
//! parallel programs are processes of the binary `rampool` in the same directory
//! ([`rampool_run::libraries::program`]).

mod bench;
mod manual;
mod plot;
mod predict;

use clap::{Parser, Subcommand};
use rampool_kernel::words::last_words;

/// Measure rampool, predict parallel programs, draw where their time went
#[derive(Parser)]
#[command(name = "rampool-bench", bin_name = "rampool", version, about, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Predict(predict::Args),
    Plot(plot::Args),
    #[command(hide = true)]
    Manual(manual::Args),
}

/// rampool itself failed, as with the binary `rampool`.
const EXIT_FAILURE: i32 = 125;

fn main() {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(args),
        Command::Predict(args) => predict::run(&args),
        Command::Plot(args) => plot::run(&args),
        Command::Manual(args) => manual::run(&args),
    };
    match result {
        Ok(code) => std::process::exit(code),
        Err(error) => {
            last_words(&format!("rampool: {error:#}"));
            std::process::exit(EXIT_FAILURE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
