//! The server's log, written by a thread of its own, so that the threads that serve never wait for a pipe's
//! reader or a disk. If lines come faster than they can be written for long, some are dropped, and the log
//! says how many and where.

use anyhow::{Context, Result};
use rampool_kernel::words::say;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::settings::{Args, LogFormat};

/// Most lines that wait to be written.
const MOST_WAITING: usize = 1024;
/// Longest time that a server waits at its end until its log is written.
const END_TIMEOUT: Duration = Duration::from_secs(1);

enum Entry {
    /// A line, and how many were dropped before it.
    Line(Vec<u8>, u64),
    /// Everything before is written, and this many lines were dropped since.
    End(u64, SyncSender<()>),
}

/// Where log lines go, from any thread. Never blocks.
#[derive(Clone)]
struct Queue {
    entries: SyncSender<Entry>,
    left_out: Arc<AtomicU64>,
}

/// The log of this process. Dropping it waits, a moment at most, until it is written.
pub struct Log {
    queue: Queue,
}

impl Log {
    /// Starts the log on standard error.
    pub fn start(settings: &Args) -> Result<Self> {
        let level = settings.log_level.as_deref().unwrap_or("info");
        let filter = tracing_subscriber::EnvFilter::try_new(level).with_context(|| {
            format!("invalid log level {level:?}: give error, warn, info, debug or trace")
        })?;
        let (queue, entries) = queue();
        let form = settings.log.unwrap_or(LogFormat::Text);
        let writer = move || write_all(&entries, form, &mut |text| say(text));
        std::thread::Builder::new()
            .name("rampool-log".into())
            .spawn(writer)
            .context("cannot start the log thread")?;
        let builder =
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(queue.clone()).with_target(false);
        match form {
            LogFormat::Text => builder.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).init(),
            LogFormat::Json => builder.json().flatten_event(true).init(),
        }
        Ok(Self { queue })
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let deadline = Instant::now() + END_TIMEOUT;
        let (written, is_written) = sync_channel(1);
        let mut end = Entry::End(self.queue.left_out.swap(0, Ordering::Relaxed), written);
        while let Err(TrySendError::Full(again)) = self.queue.entries.try_send(end) {
            if Instant::now() >= deadline {
                return;
            }
            end = again;
            std::thread::sleep(Duration::from_millis(1));
        }
        // Without a reader the line is not missed.
        let _: Result<(), RecvTimeoutError> =
            is_written.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

fn queue() -> (Queue, Receiver<Entry>) {
    let (entries, receiver) = sync_channel(MOST_WAITING);
    (Queue { entries, left_out: Arc::default() }, receiver)
}

impl<'a> MakeWriter<'a> for Queue {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl io::Write for Queue {
    /// One line, written in one piece.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        if self.entries.try_send(Entry::Line(line.to_vec(), left_out)).is_err() {
            self.left_out.fetch_add(left_out + 1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes what arrives until all senders are gone.
fn write_all(entries: &Receiver<Entry>, form: LogFormat, write: &mut dyn FnMut(&str)) {
    while let Ok(entry) = entries.recv() {
        match entry {
            Entry::Line(line, left_out) => {
                gap(form, left_out).inspect(|gap| write(gap));
                write(&String::from_utf8_lossy(&line));
            }
            Entry::End(left_out, written) => {
                gap(form, left_out).inspect(|gap| write(gap));
                // The time to wait is over.
                let _ = written.send(());
            }
        }
    }
}

/// The line that stands for dropped lines, if there were any.
fn gap(form: LogFormat, lines: u64) -> Option<String> {
    const WHAT: &str = "log lines are missing here: they came faster than the reader or the disk took them";
    if lines == 0 {
        return None;
    }
    let mut now = String::new();
    // Without the time it is the same line.
    let _ = SystemTime.format_time(&mut Writer::new(&mut now));
    Some(match form {
        LogFormat::Text => format!("{now}  WARN {WHAT} lines={lines}\n"),
        LogFormat::Json => format!(
            "{}\n",
            serde_json::json!({ "timestamp": now, "level": "WARN", "message": WHAT, "lines": lines })
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines_that_find_no_room_are_counted_where_they_are_missing() {
        let (mut queue, entries) = queue();
        for line in 0..MOST_WAITING + 7 {
            queue.write_all(format!("{line}\n").as_bytes()).unwrap();
        }
        let (mut written, mut later) = (Vec::new(), Some(queue));
        write_all(&entries, LogFormat::Text, &mut |text| {
            written.push(text.to_owned());
            // There is room again.
            if let Some(mut queue) = later.take() {
                queue.write_all(b"later\n").unwrap();
            }
        });
        let [first, .., last, gap, later] = &written[..] else { panic!("{written:?}") };
        assert_eq!((first.as_str(), last.as_str(), later.as_str()), ("0\n", "1023\n", "later\n"));
        assert!(gap.contains("WARN") && gap.ends_with("lines=7\n"), "{gap}");
        assert_eq!(written.len(), MOST_WAITING + 2);
    }

    #[test]
    fn the_line_for_missing_ones_is_of_the_form_of_the_others() {
        let value: serde_json::Value = serde_json::from_str(&gap(LogFormat::Json, 3).unwrap()).unwrap();
        assert_eq!((&value["lines"], &value["level"]), (&3.into(), &"WARN".into()));
        assert!(value["timestamp"].as_str().unwrap().contains('T'), "{value}");
    }
}
