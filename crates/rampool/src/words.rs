//! Words on standard error, each time by one call: other processes write there, too. That they cannot be written, on a full disk or for want of a reader, ends
//! nothing: programs are under way, and threads wait for their pages.

use std::io::Write;

/// Writes the text as it is. Nothing can be done about a failure, and nobody can be told.
pub fn say(text: &str) {
    pass_on(text.as_bytes());
}

/// As [`say`], what may be no text: somebody else's words.
pub fn pass_on(bytes: &[u8]) {
    let _ = std::io::stderr().write_all(bytes);
}

/// As [`say`], with the end of a line behind it.
pub fn say_line(line: &str) {
    say(&format!("{line}\n"));
}
