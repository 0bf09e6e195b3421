//! Words on standard error, each time by one call: other processes write there, too. That they cannot be written, on a full disk or for want of a reader, ends
//! nothing: programs are under way, and threads wait for their pages. Nor may whoever serves those wait for a reader: it makes [`remark`]s, and ends with [`last_words`].

use rampool_sys::output::{write_all, write_if_room, write_within};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// So long do last words wait for somebody to read them.
const PATIENCE: Duration = Duration::from_secs(5);

/// Remarks for which there was no room, and that nobody has been told of.
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// Writes the text as it is; waits while the other end of a pipe does not read. For who has nothing else to do. Nothing can be done about a
/// failure, and nobody can be told.
pub fn say(text: &str) {
    pass_on(text.as_bytes());
}

/// As [`say`], what may be no text: somebody else's words.
pub fn pass_on(bytes: &[u8]) {
    // Not by way of the standard library, whose lock may be held by a thread that waits for a reader, or was when this process was forked.
    write_all(standard_error(), bytes);
}

/// As [`say`], with the end of a line behind it.
pub fn say_line(line: &str) {
    say(&format!("{line}\n"));
}

/// The last line of a process that ends without its program's doing: waits for a reader, but not for ever, so that whoever waits for the process learns of its end.
pub fn last_words(line: &str) {
    last_words_to(standard_error(), line);
}

/// As [`last_words`], where standard error is another descriptor.
pub fn last_words_to(fd: BorrowedFd<'_>, line: &str) {
    // Where there is no reader either, nobody can be told.
    let _ = write_within(fd, format!("{line}\n").as_bytes(), PATIENCE);
}

/// Writes a line if that is possible without waiting. The next one says how many were left out.
pub fn remark(line: &str) {
    remark_to(standard_error(), line);
}

/// As [`remark`], where standard error is another descriptor.
pub fn remark_to(fd: BorrowedFd<'_>, line: &str) {
    let left_out = LEFT_OUT.swap(0, Ordering::Relaxed);
    let before =
        if left_out > 0 { format!("rampool: nobody read here for a while, so {left_out} lines are missing\n") } else { String::new() };
    if !write_if_room(fd, format!("{before}{line}\n").as_bytes()) {
        LEFT_OUT.fetch_add(left_out + 1, Ordering::Relaxed);
    }
}

/// Writes the text as it is, if that is possible without waiting, and nobody misses it otherwise.
pub fn show(text: &str) {
    let _ = write_if_room(standard_error(), text.as_bytes());
}

/// Descriptor 2 of this process.
#[must_use]
pub fn standard_error() -> BorrowedFd<'static> {
    // SAFETY: descriptor 2 is standard error by every program's agreement. Where a program has closed it, writing fails; nothing here closes it.
    unsafe { BorrowedFd::borrow_raw(2) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsFd;

    #[test]
    fn lines_that_nobody_read_are_counted_when_somebody_reads_again() {
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
        assert_eq!(told, "rampool: nobody read here for a while, so 2 lines are missing\nthird\nfourth\n");
    }
}
