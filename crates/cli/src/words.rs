//! Words on standard error. That they cannot be written, on a full disk or for want of a reader, ends nothing: a program is under way.

use std::io::Write;

/// Writes the text as it is. Nothing can be done about a failure, and nobody can be told.
pub fn say(text: &str) {
    let mut stderr = std::io::stderr();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}
