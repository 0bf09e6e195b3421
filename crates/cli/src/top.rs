//! `rampool top`: what the runs and servers of this user do right now.
//!
//! ```text
//!    look      one reading of everything: counter files of runs, answers of servers
//!   rates     two readings compared: the rows of the tables
//!   table     the columns: what a row looks like as text
//!   screen    the live view: keys, sorting, drawing
//! ```
//! It only reads: files that programs write anyway, and one status request for each server and interval.

mod look;
mod rates;
mod screen;
pub mod table;

use std::io::IsTerminal;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rampool_client::pool::ServerSpec;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use crate::access::Access;
use crate::end_signals::EndSignals;
pub use look::{Look, Watch, lacking};
pub use rates::compare;
use screen::{Action, Screen};

/// Watch the running programs and the memory servers
///
/// Shows every run of this user on this machine, the servers they use, and those named by --server. Keys: q
/// quit, p pause, s sort by the next column, r reverse the order, arrows scroll.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Memory server to watch: HOST[:PORT] or unix:/PATH. Repeat it, or separate by commas
    #[arg(long = "server", env = "RAMPOOL_SERVERS", value_name = "ADDR", value_delimiter = ',')]
    servers: Vec<ServerSpec>,

    #[command(flatten)]
    access: Access,

    /// Seconds between two readings, 0.05 to 3600; rates are averages over this time
    #[arg(long, default_value = "1", value_name = "SECONDS", value_parser = seconds)]
    interval: Duration,

    /// Print one table and end; this needs no terminal
    #[arg(long)]
    once: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.05..=3600.0).contains(&number) => Ok(Duration::from_secs_f64(number)),
        _ => Err("give a number of seconds from 0.05 to 3600".to_owned()),
    }
}

/// Always 0, because a server that is down is shown and is not a failure.
pub fn run(args: &Args) -> Result<i32> {
    let policy = args.access.policy()?;
    let mut watch = Watch::new(args.servers.iter().map(|server| (server.clone(), policy.clone())).collect());
    if args.once {
        let before = watch.look();
        std::thread::sleep(args.interval);
        let rows = rates::compare(&before, &watch.look());
        print!("{}", table::text(&rows));
        return Ok(0);
    }
    if !std::io::stdout().is_terminal() || std::env::var_os("TERM").is_some_and(|kind| kind == "dumb") {
        bail!(
            "the live view needs a terminal that can be drawn on (not TERM=dumb); `rampool top --once` \
             prints one table"
        );
    }
    // Before any thread starts, so that a signal that ends this process leaves the terminal as it was.
    let signals = EndSignals::block().context("cannot block signals")?;
    let interval = args.interval;
    let (sender, looks) = mpsc::channel();
    // A thread of its own asks the servers: one that does not answer delays the numbers, never the keys. Ends
    // with the process.
    std::thread::Builder::new()
        .name("look".into())
        .spawn(move || {
            while sender.send(watch.look()).is_ok() {
                std::thread::sleep(interval);
            }
        })
        .context("cannot start a thread")?;
    let mut terminal = ratatui::try_init().context("cannot prepare the terminal")?;
    let result = live(&mut terminal, &looks, &signals);
    ratatui::restore();
    result
}

fn live(
    terminal: &mut ratatui::DefaultTerminal,
    looks: &mpsc::Receiver<look::Look>,
    signals: &EndSignals,
) -> Result<i32> {
    let mut screen = Screen::default();
    let mut newest = None;
    loop {
        terminal.draw(|frame| screen.draw(frame))?;
        if let Some(signal) = signals.wait(Duration::ZERO) {
            return Ok(128 + signal);
        }
        let until = Instant::now() + Duration::from_millis(200);
        // Keys at once, numbers a moment later.
        while event::poll(until.saturating_duration_since(Instant::now()))? {
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => match screen.key(key) {
                    Action::Quit => return Ok(0),
                    Action::Redraw => break,
                    Action::Nothing => {}
                },
                Event::Resize(..) => break,
                _ => {}
            }
        }
        for look in looks.try_iter() {
            if let Some(before) = newest.replace(look) {
                screen.show(rates::compare(&before, newest.as_ref().expect("just put there")));
            }
        }
    }
}
