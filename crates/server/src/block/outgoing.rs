//! What waits to be sent to a client.

use crate::store::PageStore;
use rampool_lease::FrameIndex;
use rampool_net::transport::Stream;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Answers are collected in one piece up to this length.
const TEXT_BYTES: usize = 4096;
/// Pieces that one call sends.
const MOST_PIECES: usize = 256;

static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// A part of what is sent.
#[derive(Debug)]
pub(super) enum Part {
    Text(Vec<u8>),
    /// A part of a page, which was stored with this checksum. The reference to the frame is the part's.
    Frame {
        frame: FrameIndex,
        crc: u32,
        from: usize,
        len: usize,
    },
    Zeroes(usize),
}

impl Part {
    pub(super) fn len(&self) -> usize {
        match self {
            Part::Text(text) => text.len(),
            Part::Frame { len, .. } | Part::Zeroes(len) => *len,
        }
    }

    pub(super) fn frame(self) -> Option<FrameIndex> {
        if let Part::Frame { frame, .. } = self { Some(frame) } else { None }
    }
}

/// The queue of one client. Invariant: `bytes` = length of all parts - `sent`.
pub(super) struct Outgoing {
    store: Arc<dyn PageStore>,
    parts: VecDeque<Part>,
    /// Bytes of the first part that have left.
    sent: usize,
    bytes: usize,
    released: Vec<FrameIndex>,
}

impl Outgoing {
    pub(super) fn new(store: Arc<dyn PageStore>) -> Self {
        Self { store, parts: VecDeque::new(), sent: 0, bytes: 0, released: Vec::new() }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn text(&mut self, text: &[u8]) {
        self.bytes += text.len();
        match self.parts.back_mut() {
            Some(Part::Text(last)) if last.len() + text.len() <= TEXT_BYTES => last.extend_from_slice(text),
            _ => self.parts.push_back(Part::Text(text.to_vec())),
        }
    }

    pub(super) fn part(&mut self, part: Part) {
        self.bytes += part.len();
        self.parts.push_back(part);
    }

    /// Sends what the socket takes. Whether it took anything.
    pub(super) fn flush(&mut self, stream: &Stream) -> io::Result<bool> {
        let mut any = false;
        while self.bytes > 0 {
            let pieces = self.pieces();
            // SAFETY: texts and zeroes are ours; frames have a reference each, and settled frames are never
            // written.
            let Some(sent) = (unsafe { stream.send(&pieces) })? else { break };
            any = true;
            self.forget(sent);
        }
        if !self.released.is_empty() {
            self.store.release(&self.released);
            self.released.clear();
        }
        Ok(any)
    }

    fn pieces(&self) -> Vec<libc::iovec> {
        let mut pieces: Vec<libc::iovec> = Vec::with_capacity(self.parts.len().min(MOST_PIECES));
        let mut skip = self.sent;
        for part in self.parts.iter().take(MOST_PIECES) {
            let len = part.len() - skip;
            let (start, there) = match part {
                Part::Text(text) => (text[skip..].as_ptr(), len),
                Part::Frame { frame, from, .. } => {
                    // SAFETY: within the frame.
                    (unsafe { self.store.memory(*frame).add(from + skip) }.cast_const(), len)
                }
                Part::Zeroes(_) => (ZEROES.as_ptr(), len.min(ZEROES.len())),
            };
            skip = 0;
            match pieces.last_mut() {
                // Frames that lie one after the other leave as one.
                Some(last) if last.iov_base.cast_const().cast::<u8>().wrapping_add(last.iov_len) == start => {
                    last.iov_len += there
                }
                _ => pieces.push(libc::iovec { iov_base: start.cast_mut().cast(), iov_len: there }),
            }
            if there < len {
                break;
            }
        }
        pieces
    }

    fn forget(&mut self, mut sent: usize) {
        self.bytes -= sent;
        sent += std::mem::take(&mut self.sent);
        while let Some(part) = self.parts.front() {
            if sent < part.len() {
                self.sent = sent;
                return;
            }
            sent -= part.len();
            self.released.extend(self.parts.pop_front().and_then(Part::frame));
        }
        assert_eq!(sent, 0, "no more leaves than was queued");
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.released.extend(self.parts.drain(..).filter_map(Part::frame));
        self.store.release(&self.released);
    }
}
