//! Lines on standard error, each written by one call, because other processes write there, too. A failure, on
//! a full disk or without a reader, ends nothing: programs run, and threads wait for their pages. The thread
//! that serves those must not wait for a reader either: it makes [`remark`]s, and ends with [`last_words`].

use crate::output::{write_all, write_if_room, write_within};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// So long do last words wait for a reader.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Remarks left out for lack of room, and not yet reported.
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// Writes the text unchanged; blocks while the other end of a pipe does not read. For threads with nothing
/// else to do. A failure cannot be handled or reported.
pub fn say(text: &str) {
    pass_on(text.as_bytes());
}

/// As [`say`], for bytes of another program that may be no text.
pub fn pass_on(bytes: &[u8]) {
    // Not by way of the standard library, whose lock may be held by a thread that waits for a reader, or was
    // when this process was forked.
    write_all(standard_error(), bytes);
}

/// As [`say`], with the end of a line behind it.
pub fn say_line(line: &str) {
    say(&format!("{line}\n"));
}

/// The last line of a process that must end: waits for a reader, within a limit, so that the process's parent
/// learns of its end.
pub fn last_words(line: &str) {
    last_words_to(standard_error(), line);
}

/// As [`last_words`], where standard error is another descriptor.
pub fn last_words_to(fd: BorrowedFd<'_>, line: &str) {
    // Without a reader there is nothing to report to.
    let _ = write_within(fd, format!("{line}\n").as_bytes(), TIMEOUT);
}

/// Writes a line if that is possible without waiting. The next one says how many were left out.
pub fn remark(line: &str) {
    remark_to(standard_error(), line);
}

/// As [`remark`], where standard error is another descriptor.
pub fn remark_to(fd: BorrowedFd<'_>, line: &str) {
    let left_out = LEFT_OUT.swap(0, Ordering::Relaxed);
    let before = if left_out > 0 {
        format!("rampool: {left_out} lines are missing: standard error was not read\n")
    } else {
        String::new()
    };
    if !write_if_room(fd, format!("{before}{line}\n").as_bytes()) {
        LEFT_OUT.fetch_add(left_out + 1, Ordering::Relaxed);
    }
}

/// Writes the text unchanged, if that is possible without waiting; otherwise the text is dropped silently.
pub fn show(text: &str) {
    let _ = write_if_room(standard_error(), text.as_bytes());
}

/// Descriptor 2 of this process.
#[must_use]
pub fn standard_error() -> BorrowedFd<'static> {
    // SAFETY: descriptor 2 is standard error by every program's agreement. Where a program has closed it,
    // writing fails; nothing here closes it.
    unsafe { BorrowedFd::borrow_raw(2) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsFd;

    #[test]
    fn unread_lines_are_counted_when_reading_resumes() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        while write_if_room(writer.as_fd(), &[b'x'; 4096]) {}
        remark_to(writer.as_fd(), "first");
        remark_to(writer.as_fd(), "second");
        reader.read_exact(&mut [0; 2 * 4096]).unwrap();
        remark_to(writer.as_fd(), "third");
        remark_to(writer.as_fd(), "fourth");
        drop(writer);
        let mut read = String::new();
        reader.read_to_string(&mut read).unwrap();
        let told = read.trim_start_matches('x');
        assert_eq!(told, "rampool: 2 lines are missing: standard error was not read\nthird\nfourth\n");
    }
}
