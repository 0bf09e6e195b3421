//! The one binary: `rampool`. One file per subcommand.

mod available;
mod bench;
mod dlmm_server;
mod doctor;
mod end_signals;
mod example;
mod generate;
mod key;
mod launch;
mod plot;
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
use rampool::words::{last_words, say_line};
use rampool_proto::units::ByteLen;
use rustix::process::{Resource, getrlimit};

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
    Plot(plot::Args),
    Predict(predict::Args),
    Status(status::Args),
    Top(top::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
    Key(key::Args),
    #[command(hide = true)]
    Generate(generate::Args),
}

/// What a reader that has gone away does to a program that writes to it (128 + SIGPIPE).
const EXIT_NO_READER: i32 = 141;

/// Writing to a full disk or to a reader that is gone is no bug of ours: one line, or none, instead of a trace of calls.
fn say_what_cannot_be_written() {
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>().map_or("", String::as_str);
        let Some(why) = text.strip_prefix("failed printing to ") else { return others(panic) };
        if why.contains("Broken pipe") {
            std::process::exit(EXIT_NO_READER);
        }
        say_line(&format!("rampool: cannot write to {why}"));
        std::process::exit(EXIT_FAILURE);
    }));
}

/// Stack that every command has enough of.
const LEAST_STACK: ByteLen = ByteLen(256 << 10);

fn main() {
    say_what_cannot_be_written();
    let stack = stack_limit();
    if stack < LEAST_STACK {
        say_line(&format!("rampool: a stack of {stack} is too small (ulimit -s): {LEAST_STACK} are needed"));
        std::process::exit(EXIT_FAILURE);
    }
    command()
}

/// What the first thread's stack may grow to.
fn stack_limit() -> ByteLen {
    ByteLen(getrlimit(Resource::Stack).current.unwrap_or(u64::MAX))
}

/// Not a part of `main`, which would need the stack of all commands before its first line.
#[inline(never)]
fn command() -> ! {
    let keyed = std::env::var_os("RAMPOOL_KEY_FILE").is_some();
    let arguments = dlmm_server::translate(std::env::args_os().collect(), keyed, dlmm_server::machine_megabytes());
    let result = match Cli::parse_from(arguments).command {
        Command::Run(args) => run::run(&args),
        Command::Serve(args) => serve::run(args),
        Command::Launch(args) => launch::run(&args),
        Command::Example(args) => example::run(&args),
        Command::Plot(args) => plot::run(&args),
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
            last_words(&format!("rampool: {}", said_once(error.chain())));
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
    fn servers_that_say_how_much_are_asked_for_that() {
        let servers = |texts: &[&str]| texts.iter().map(|t| t.parse().unwrap()).collect::<Vec<rampool::pool::ServerSpec>>();
        let local = rampool_proto::units::ByteLen(8 << 20);
        assert_eq!(run::wanted(&servers(&["a=30M", "b=2M"]), local).0, 32 << 20);
        assert_eq!(run::wanted(&servers(&["a=30M", "b"]), local).0, 1 << 30);
        assert_eq!(run::wanted(&servers(&["a"]), rampool_proto::units::ByteLen(1 << 30)).0, 4 << 30);
    }

    #[test]
    fn a_cause_is_told_once() {
        let io = std::io::Error::from_raw_os_error(2);
        let listen = rampool::server::StartError::Listen { endpoint: "unix:/no/where".parse().unwrap(), source: io };
        let told = said_once(anyhow::Error::from(listen).context("no server").chain());
        assert_eq!(told, "no server: cannot listen on unix:/no/where: No such file or directory (os error 2)");
    }
}
