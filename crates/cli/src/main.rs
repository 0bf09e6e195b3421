//! The one binary: `rampool`. One file per subcommand.

mod bench;
mod dlmm_server;
mod doctor;
mod example;
mod generate;
mod key;
mod launch;
mod predict;
mod program;
mod run;
mod rundir;
mod serve;
mod signals;
mod status;
mod summary;
mod top;

use clap::{Parser, Subcommand};

/// The RAM of many machines, as one pool, for any program
///
/// rampool serve lends a machine's memory; rampool run starts a program, unchanged, that uses it.
#[derive(Parser)]
#[command(name = "rampool", version, about, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Serve(serve::Args),
    Launch(launch::Args),
    Example(example::Args),
    Predict(predict::Args),
    Status(status::Args),
    Top(top::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
    Key(key::Args),
    #[command(hide = true)]
    Generate(generate::Args),
}

fn main() {
    let keyed = std::env::var_os("RAMPOOL_KEY_FILE").is_some();
    let arguments = dlmm_server::translate(std::env::args_os().collect(), keyed, dlmm_server::machine_megabytes());
    let result = match Cli::parse_from(arguments).command {
        Command::Run(args) => run::run(&args),
        Command::Serve(args) => serve::run(args),
        Command::Launch(args) => launch::run(&args),
        Command::Example(args) => example::run(&args),
        Command::Predict(args) => predict::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Key(args) => key::run(&args),
        Command::Bench(args) => bench::run(args),
        Command::Generate(args) => generate::run(&args),
    };
    match result {
        Ok(code) => std::process::exit(code),
        Err(error) => {
            eprintln!("rampool: {}", said_once(error.chain()));
            std::process::exit(EXIT_FAILURE);
        }
    }
}

/// An error and its causes, without those that the one before has told already.
fn said_once<'a>(chain: impl Iterator<Item = &'a (dyn std::error::Error + 'static)>) -> String {
    let mut text = String::new();
    for cause in chain.map(ToString::to_string) {
        if !text.contains(&cause) {
            let separator = if text.is_empty() { "" } else { ": " };
            text = format!("{text}{separator}{cause}");
        }
    }
    text
}

/// rampool itself failed: distinct from what programs usually return, as with `env` and `nohup`.
const EXIT_FAILURE: i32 = 125;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let io = std::io::Error::from_raw_os_error(2);
        let listen = rampool::server::StartError::Listen { endpoint: "unix:/no/where".parse().unwrap(), source: io };
        let told = said_once(anyhow::Error::from(listen).context("no server").chain());
        assert_eq!(told, "no server: cannot listen on unix:/no/where: No such file or directory (os error 2)");
    }
}
