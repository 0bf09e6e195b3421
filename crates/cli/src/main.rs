//! The binary `rampool`: a file for each subcommand.
//!
//! ```text
//!   run      a program with the agent in it: program (what cannot be run), rundir, signals, summary
//!      `-- private, hosts, redundancy   its servers, here and elsewhere; those that are back
//!   hold     the same for a process that runs already
//!   mount    a directory in the pool: kernel_files asks `rampool_files`, mover owns the pool
//!   serve    a memory server: settings, metrics, page
//!   launch   ranks of a parallel program, here or over ssh
//!   status, top, doctor            what servers, runs and this machine say; access: to servers
//!   bench, predict, plot           are in `rampool-bench`: other_binary
//! ```
//!
//! Read `run` first: `Options::check` refuses what cannot work, `begin` connects and leases, `start` runs the
//! program, `wait` watches over it. The other commands are read on their own.

mod access;
mod advice;
mod available;
mod copies;
mod dlmm_server;
mod doctor;
mod drain;
mod end_signals;
mod example;
mod generate;
mod grow;
mod hold;
mod key;
mod launch;
mod mount;
mod other_binary;
mod program;
mod run;
mod rundir;
mod serve;
mod signals;
mod status;
mod summary;
mod top;

use clap::{Parser, Subcommand};
use program::ProgramError;
use rampool_kernel::words::{last_words, say_line};
use rampool_wire::units::ByteLen;
use rustix::process::{Resource, getrlimit};

/// The RAM of many machines, as one pool, for any program
///
/// rampool serve lends a machine's memory. rampool run starts an unchanged program that uses it.
#[derive(Parser)]
#[command(name = "rampool", version, about, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(Box<run::Args>),
    Hold(hold::Args),
    Mount(mount::Args),
    Serve(Box<serve::Args>),
    Launch(launch::Args),
    Example(example::Args),
    /// Draw where the time of parallel programs went: stacked bars, as an SVG picture
    Plot(other_binary::Args),
    /// Predict how long a parallel program would take on another network
    Predict(other_binary::Args),
    Status(status::Args),
    Drain(drain::Args),
    Grow(grow::Args),
    Top(top::Args),
    Doctor(doctor::Args),
    /// Measure rampool and compare it with alternatives
    Bench(other_binary::Args),
    Key(key::Args),
    #[command(hide = true)]
    Generate(generate::Args),
}

/// Exit code of a program that writes to a closed pipe (128 + SIGPIPE).
const EXIT_NO_READER: i32 = 141;

/// A full disk or a closed pipe is no defect of rampool: print one line, or none, instead of a backtrace.
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

/// Least stack with which every command works.
const LEAST_STACK: ByteLen = ByteLen(256 << 10);

fn main() {
    say_what_cannot_be_written();
    let stack = stack_limit();
    if stack < LEAST_STACK {
        say_line(&format!(
            "rampool: a stack of {stack} is too small (ulimit -s): at least {LEAST_STACK} is needed"
        ));
        std::process::exit(EXIT_FAILURE);
    }
    command()
}

/// Limit of the first thread's stack.
fn stack_limit() -> ByteLen {
    ByteLen(getrlimit(Resource::Stack).current.unwrap_or(u64::MAX))
}

/// Separate from `main`, which otherwise needs the stack of all commands before its first line.
#[inline(never)]
fn command() -> ! {
    let keyed = std::env::var_os("RAMPOOL_KEY_FILE").is_some();
    let arguments =
        dlmm_server::translate(std::env::args_os().collect(), keyed, dlmm_server::machine_megabytes());
    let cli = Cli::try_parse_from(arguments).unwrap_or_else(|usage| {
        let _ = usage.print();
        std::process::exit(if usage.use_stderr() { EXIT_FAILURE } else { 0 });
    });
    let result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Hold(args) => hold::run(&args),
        Command::Mount(args) => mount::run(&args),
        Command::Serve(args) => serve::run(*args),
        Command::Launch(args) => launch::run(&args),
        Command::Example(args) => example::run(&args),
        Command::Plot(args) => other_binary::become_it("plot", &args),
        Command::Predict(args) => other_binary::become_it("predict", &args),
        Command::Status(args) => status::run(&args),
        Command::Drain(args) => drain::run(&args),
        Command::Grow(args) => grow::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Key(args) => key::run(&args),
        Command::Bench(args) => other_binary::become_it("bench", &args),
        Command::Generate(args) => generate::run(&args),
    };
    match result {
        Ok(code) => std::process::exit(code),
        Err(error) => {
            last_words(&format!("rampool: {}", said_once(error.chain())));
            std::process::exit(error.downcast_ref().map_or(EXIT_FAILURE, ProgramError::exit_code));
        }
    }
}

/// An error and its causes, without causes that the text already contains.
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

/// rampool itself failed. Distinct from the usual exit codes of programs, as with `env` and `nohup`.
const EXIT_FAILURE: i32 = 125;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_say_how_much_are_asked_for_that() {
        let servers = |texts: &[&str]| {
            texts.iter().map(|t| t.parse().unwrap()).collect::<Vec<rampool_client::pool::ServerSpec>>()
        };
        let local = rampool_wire::units::ByteLen(8 << 20);
        assert_eq!(run::wanted(&servers(&["a=30M", "b=2M"]), local, 1).0, 32 << 20);
        assert_eq!(run::wanted(&servers(&["a=30M", "b"]), local, 1).0, 1 << 30);
        assert_eq!(run::wanted(&servers(&["a"]), rampool_wire::units::ByteLen(1 << 30), 1).0, 4 << 30);
    }

    #[test]
    fn an_unknown_option_is_not_taken_for_the_program() {
        let parse = |line: &str| Cli::try_parse_from(line.split_whitespace());
        for line in [
            "rampool run --local 1M --locol 64M -- ls -l",
            "rampool launch -n 2 --rank 4 true",
            "rampool run --local 1M -x ls",
        ] {
            let error = parse(line).map(|_| ()).unwrap_err().to_string();
            let option =
                ["--locol", "--rank", "-x"].into_iter().find(|option| error.contains(&format!("'{option}'")));
            assert!(option.is_some() && error.contains("tip:"), "{line}: {error}");
        }
        for line in [
            "rampool run --local 1M ls -l --all",
            "rampool run --local 1M -- -odd --local",
            "rampool launch -n 2 ls -n 3",
        ] {
            let command = match parse(line).unwrap().command {
                Command::Run(args) => args.command,
                Command::Launch(args) => args.command,
                _ => panic!("{line}"),
            };
            assert!(
                command.len() >= 2
                    && line.ends_with(command.join(std::ffi::OsStr::new(" ")).to_str().unwrap()),
                "{line}: {command:?}"
            );
        }
    }

    #[test]
    fn a_cause_is_told_once() {
        let io = std::io::Error::from_raw_os_error(2);
        let listen =
            rampool_server::StartError::Listen { endpoint: "unix:/no/where".parse().unwrap(), source: io };
        let told = said_once(anyhow::Error::from(listen).context("no server").chain());
        assert_eq!(
            told,
            "no server: cannot listen on unix:/no/where: No such file or directory (os error 2)"
        );
    }
}
