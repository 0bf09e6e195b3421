//! Writing to descriptors shared with other processes, such as standard error: their flags are shared too, so
//! this never makes a pipe non-blocking.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::last_errno;

/// A pipe takes so many bytes as a whole, or none of them (`PIPE_BUF`).
const PIPE_PIECE_BYTES: usize = 4096;

/// Writes all of it, and blocks until it is read. Stops on failure.
pub fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the bytes are borrowed for the whole call.
        let written = unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(written) {
            Ok(written) => bytes = &bytes[written..],
            Err(_) if last_errno() == libc::EINTR => {}
            Err(_) => return,
        }
    }
}

/// Writes what there is room for now, up to 4096 bytes, as a whole or not at all, and never waits for the
/// reader. False where something is left out.
///
/// (Where two processes write into one terminal, or into one pipe before Linux 6.4, the other one may take
/// the room between the look at it and the use of it.)
#[must_use]
pub fn write_if_room(fd: BorrowedFd<'_>, bytes: &[u8]) -> bool {
    write_within(fd, bytes, Duration::ZERO)
}

/// As [`write_if_room`], but waits for the reader for so long in all, to the millisecond.
#[must_use]
pub fn write_within(fd: BorrowedFd<'_>, bytes: &[u8], timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    bytes.chunks(PIPE_PIECE_BYTES).all(|piece| {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match try_to_write(fd, piece, left) {
                Attempt::Written => return true,
                Attempt::NoRoom if !left.is_zero() => {}
                Attempt::NoRoom | Attempt::Failed => return false,
            }
        }
    })
}

enum Attempt {
    Written,
    NoRoom,
    Failed,
}

/// Writes a piece once there is room for something, within this time.
fn try_to_write(fd: BorrowedFd<'_>, piece: &[u8], timeout: Duration) -> Attempt {
    let raw = fd.as_raw_fd();
    let mut asked = libc::pollfd { fd: raw, events: libc::POLLOUT, revents: 0 };
    let millis = i32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: one entry, which lives across the call.
    match unsafe { libc::poll(&raw mut asked, 1, millis) } {
        0 => return Attempt::NoRoom,
        1 if asked.revents == libc::POLLOUT => {}
        -1 if last_errno() == libc::EINTR => return Attempt::NoRoom,
        _ => return Attempt::Failed,
    }
    let vector = libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() };
    // SAFETY: the kernel fills the status, and reads the piece, which is borrowed for all of the calls,
    // through the vector and without it.
    let written = unsafe {
        let mut status = std::mem::zeroed::<libc::stat>();
        let kind = if libc::fstat(raw, &raw mut status) == 0 { status.st_mode & libc::S_IFMT } else { 0 };
        match kind {
            libc::S_IFSOCK => {
                libc::send(raw, piece.as_ptr().cast(), piece.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            }
            libc::S_IFIFO => match libc::pwritev2(raw, &raw const vector, 1, -1, libc::RWF_NOWAIT) {
                -1 if last_errno() == libc::EOPNOTSUPP => {
                    libc::write(raw, piece.as_ptr().cast(), piece.len())
                }
                written => written,
            },
            _ => libc::write(raw, piece.as_ptr().cast(), piece.len()),
        }
    };
    match usize::try_from(written) {
        Ok(written) if written == piece.len() => Attempt::Written,
        Err(_) if matches!(last_errno(), libc::EAGAIN | libc::EINTR) => Attempt::NoRoom,
        _ => Attempt::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{PipeReader, PipeWriter, Read};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn full_pipe() -> (PipeReader, PipeWriter) {
        let (reader, writer) = std::io::pipe().unwrap();
        while write_if_room(writer.as_fd(), &[b'x'; PIPE_PIECE_BYTES]) {}
        (reader, writer)
    }

    #[test]
    fn a_pipe_without_a_reading_end_gets_nothing_more() {
        let (mut reader, writer) = full_pipe();
        assert!(
            !write_if_room(writer.as_fd(), b"lost")
                && !write_within(writer.as_fd(), b"lost", Duration::from_millis(2))
        );
        let mut read = vec![0; PIPE_PIECE_BYTES];
        reader.read_exact(&mut read).unwrap();
        assert!(write_if_room(writer.as_fd(), b"told"));
        drop(writer);
        read.clear();
        reader.read_to_end(&mut read).unwrap();
        assert!(read.ends_with(b"xtold"));
    }

    #[test]
    fn a_pipe_without_a_reader_and_a_full_socket_get_nothing() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert!(!write_within(writer.as_fd(), b"lost", Duration::from_secs(3600)));
        let (_reader, writer) = UnixStream::pair().unwrap();
        while write_if_room(writer.as_fd(), &[b'x'; PIPE_PIECE_BYTES]) {}
        assert!(!write_if_room(writer.as_fd(), &[b'x'; PIPE_PIECE_BYTES]));
    }

    #[test]
    fn a_file_gets_everything() {
        let (path, text) =
            (std::env::temp_dir().join(format!("rampool-output-{}", std::process::id())), [b'y'; 10_000]);
        let file = std::fs::File::create(&path).unwrap();
        assert!(write_if_room(file.as_fd(), &text));
        write_all(file.as_fd(), b"end");
        let written = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(written, [&text[..], b"end"].concat());
    }
}
