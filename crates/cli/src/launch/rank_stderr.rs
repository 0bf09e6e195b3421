//! Standard error of ranks on other machines: passed on at once, except the lines in which a rank tells the
//! launcher why it ends the run.

use std::io::{ErrorKind, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use rampool_kernel::words::pass_on;

/// After all remote shells have ended, a process that a rank left behind may still keep standard error open.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Threads that each read the output of one rank.
pub struct RankStderr {
    mark: String,
    teller: Sender<String>,
    told: Receiver<String>,
}

impl RankStderr {
    /// `mark` begins the lines that are not passed on. A program does not print it by chance.
    pub fn new(mark: String) -> Self {
        let (teller, told) = channel();
        Self { mark, teller, told }
    }

    pub fn mark(&self) -> &str {
        &self.mark
    }

    /// Passes on what comes from `source` until its end.
    pub fn listen(&self, mut source: impl Read + Send + 'static) {
        let (teller, mut sieve) =
            (self.teller.clone(), Sieve { mark: self.mark.clone().into_bytes(), held: Vec::new() });
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            loop {
                match source.read(&mut bytes) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => return pass_on(&sieve.held),
                    Ok(len) => {
                        let mut taken = Vec::new();
                        pass_on(&sieve.sift(&bytes[..len], &mut taken));
                        // The receiver is gone when the launcher ends.
                        taken.into_iter().for_each(|line| _ = teller.send(line));
                    }
                }
            }
        });
    }

    /// The lines that were not passed on, without the mark. Waits a moment for the ends of the streams.
    pub fn reports(self) -> String {
        drop(self.teller);
        let (deadline, mut reports) = (Instant::now() + TIMEOUT, String::new());
        loop {
            match self.told.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => reports.extend([line.as_str(), "\n"]),
                Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => return reports,
            }
        }
    }
}

/// Takes lines with a mark out of a stream. Invariant: only bytes that are, or may begin, such a line are
/// held back.
struct Sieve {
    mark: Vec<u8>,
    held: Vec<u8>,
}

impl Sieve {
    /// The bytes to pass on after these have arrived. Whole marked lines go to `taken`.
    fn sift(&mut self, bytes: &[u8], taken: &mut Vec<String>) -> Vec<u8> {
        self.held.extend_from_slice(bytes);
        let mut passed = Vec::new();
        loop {
            let Some(at) = self.held.windows(self.mark.len()).position(|window| window == self.mark) else {
                let begun = (1..self.mark.len())
                    .rev()
                    .find(|&len| self.held.ends_with(&self.mark[..len]))
                    .unwrap_or(0);
                passed.extend(self.held.drain(..self.held.len() - begun));
                return passed;
            };
            passed.extend(self.held.drain(..at));
            let Some(end) = self.held.iter().position(|&byte| byte == b'\n') else { return passed };
            let line: Vec<u8> = self.held.drain(..=end).collect();
            taken.push(String::from_utf8_lossy(&line[self.mark.len()..end]).into_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_lines_are_taken_out_wherever_the_stream_is_cut() {
        let text = b"one\nMARK: rank 1: why\ntwo MAMARK: rank 2: that\nthree MARK";
        for cut in 1..text.len() {
            let mut sieve = Sieve { mark: b"MARK: ".to_vec(), held: Vec::new() };
            let (mut passed, mut taken) = (Vec::new(), Vec::new());
            for part in text.chunks(cut) {
                passed.extend(sieve.sift(part, &mut taken));
            }
            passed.extend(sieve.held);
            assert_eq!(String::from_utf8(passed).unwrap(), "one\ntwo MAthree MARK", "{cut}");
            assert_eq!(taken, ["rank 1: why", "rank 2: that"], "{cut}");
        }
    }

    #[test]
    fn what_cannot_be_marked_is_passed_on_at_once() {
        let mut sieve = Sieve { mark: b"MARK: ".to_vec(), held: Vec::new() };
        let mut taken = Vec::new();
        assert_eq!(sieve.sift(b"Password: ", &mut taken), b"Password: ");
        assert_eq!(sieve.sift(b"MARX", &mut taken), b"MARX");
        assert!(taken.is_empty() && sieve.held.is_empty());
    }
}
