//! One client's connection: bytes in, work on its export, bytes out.

use super::Blocks;
use super::disk::{Disk, Scratchpad};
use super::outgoing::{Outgoing, Part};
use crate::replies::{OWN_REPLY_BYTES, Replies};
use crate::shared::Shared;
use rampool_nbd::{End, Input, LARGEST_UNIT_BYTES, Output, SLICE_BYTES, Session};
use rampool_net::transport::{Peer, Stream};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// With so much queued, no commands of a client are read before it has taken some. Together with one slice it
/// is less than the store has for a connection.
const FULL_BYTES: usize = 512 << 10;
/// So much is sent while more is worked on.
const FLUSH_BYTES: usize = 128 << 10;
/// Bytes that come in at a time.
const BUFFER_BYTES: usize = 320 << 10;
/// With less room than this at the buffer's end, what is in it moves to its front.
const LEAST_ROOM_BYTES: usize = 64 << 10;
/// What a turn is worth: bytes moved, with `COMMAND_BYTES` for anything that moves none.
const TURN_BYTES: usize = 1 << 20;
const COMMAND_BYTES: usize = 4096;
/// So many bytes are made zero for what it costs to move one.
const ZEROES_FOR_A_BYTE: usize = 32;
/// Buffers that a worker keeps for its clients.
const MOST_SPARE: usize = 4;

const _: () = assert!(BUFFER_BYTES >= LARGEST_UNIT_BYTES + LEAST_ROOM_BYTES);
const _: () = assert!(FULL_BYTES + SLICE_BYTES as usize <= rampool_wire::frame::MAX_BULK_BYTES / 2);

/// What a turn left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// All received commands are answered.
    Idle,
    /// There is more; the client wants another turn.
    More,
    /// The client must read replies before more of its commands are read.
    Full,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum Gone {
    #[error(transparent)]
    Session(#[from] End),
    #[error("the client closed the connection")]
    Closed,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the handshake took too long")]
    Slow,
    #[error("the client does not read its replies")]
    Stuck,
    #[error("the server stops")]
    Stopping,
}

/// Buffers of a worker.
#[derive(Default)]
pub(super) struct ScratchBuffers {
    pad: Scratchpad,
    spare: Vec<Box<[u8]>>,
}

/// Bytes that have come and are not worked on yet.
struct Incoming {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// Work on the export. A write is not listed here: it is done when its bytes have arrived.
#[derive(Clone, Copy, Debug)]
enum Work {
    Read { offset: u64, len: u32 },
    Zero { offset: u64, len: u32, hint: bool },
    Status { offset: u64, len: u32, most: usize },
}

pub(super) struct Client {
    stream: Stream,
    session: Session,
    disk: Option<Arc<Disk>>,
    incoming: Option<Incoming>,
    outgoing: Outgoing,
    replies: Arc<Replies>,
    /// What of its answers counts among those of all connections.
    counted: usize,
    work: Option<Work>,
    end: Option<End>,
    pub(super) since: Instant,
    /// When it last read something of its queued replies, or nothing was queued.
    pub(super) took: Instant,
    arena: usize,
}

impl Client {
    pub(super) fn new(
        stream: Stream,
        shared: &Shared,
        blocks: &Blocks,
        arena: usize,
        buffers: &mut ScratchBuffers,
        now: Instant,
    ) -> Self {
        let session = Session::new(Arc::clone(&blocks.exports));
        let outgoing = Outgoing::new(Arc::clone(&shared.store));
        let (disk, incoming, work, end) = (None, None, None, None);
        let (replies, counted) = (Arc::clone(&shared.replies), 0);
        let mut client = Self {
            replies,
            counted,
            stream,
            session,
            disk,
            incoming,
            outgoing,
            work,
            end,
            since: now,
            took: now,
            arena,
        };
        client.carry_on(shared, blocks, buffers, &[]);
        if shared.draining() {
            client.say_draining(shared, blocks, buffers);
        }
        client
    }

    pub(super) fn peer(&self) -> &Peer {
        self.stream.peer()
    }

    pub(super) fn is_shaking(&self) -> bool {
        self.session.is_shaking()
    }

    /// The session has ended, and the last answers are on their way.
    pub(super) fn is_over(&self) -> bool {
        self.end.is_some()
    }

    pub(super) fn has_queued(&self) -> bool {
        self.outgoing.bytes() > 0
    }

    pub(super) fn export(&self) -> Option<&str> {
        self.disk.as_ref().map(|disk| disk.name())
    }

    /// The server stops: a client that has not chosen an export cannot any more.
    pub(super) fn say_draining(&mut self, shared: &Shared, blocks: &Blocks, buffers: &mut ScratchBuffers) {
        if self.is_shaking() {
            self.session.handle(Input::Draining);
            self.carry_on(shared, blocks, buffers, &[]);
        }
    }

    /// Works on received bytes, as much as a turn allows.
    pub(super) fn turn(
        &mut self,
        shared: &Shared,
        blocks: &Blocks,
        buffers: &mut ScratchBuffers,
        now: Instant,
    ) -> Result<Turn, Gone> {
        let mut left = TURN_BYTES;
        let mut drained = false;
        loop {
            if self.outgoing.bytes() >= FLUSH_BYTES {
                self.flush(now)?;
                let waiting = self.outgoing.bytes();
                if waiting >= FULL_BYTES || (waiting > OWN_REPLY_BYTES && self.replies.are_many()) {
                    return Ok(Turn::Full);
                }
            }
            if let Some(end) = self.end {
                self.flush(now)?;
                return if self.has_queued() { Ok(Turn::Full) } else { Err(end.into()) };
            }
            if left == 0 {
                self.flush(now)?;
                return Ok(Turn::More);
            }
            let cost = match self.work.take() {
                Some(work) => self.work_on(shared, blocks, buffers, work),
                None => self.hear(shared, blocks, buffers),
            };
            left = left.saturating_sub(cost);
            if cost > 0 {
                continue;
            }
            if drained {
                self.put_buffer_back(buffers);
                self.flush(now)?;
                return Ok(Turn::Idle);
            }
            match self.receive(buffers)? {
                Some(0) => return Err(Gone::Closed),
                // Where there was room for more, more has not come.
                Some(_) => {
                    drained =
                        self.incoming.as_ref().is_some_and(|incoming| incoming.end < incoming.bytes.len())
                }
                None => drained = true,
            }
        }
    }

    fn flush(&mut self, now: Instant) -> Result<(), Gone> {
        let flushed = self.outgoing.flush(&self.stream);
        self.count_replies(self.outgoing.bytes());
        if flushed? || !self.has_queued() {
            self.took = now;
        }
        Ok(())
    }

    fn count_replies(&mut self, waiting: usize) {
        let now = waiting.saturating_sub(OWN_REPLY_BYTES);
        self.replies.change(self.counted, now);
        self.counted = now;
    }

    /// `None`: nothing now; 0: the client has closed.
    fn receive(&mut self, buffers: &mut ScratchBuffers) -> Result<Option<usize>, Gone> {
        let incoming = self.incoming.get_or_insert_with(|| {
            let bytes = buffers.spare.pop().unwrap_or_else(|| vec![0; BUFFER_BYTES].into_boxed_slice());
            Incoming { bytes, start: 0, end: 0 }
        });
        if incoming.start == incoming.end {
            (incoming.start, incoming.end) = (0, 0);
        } else if incoming.bytes.len() - incoming.end < LEAST_ROOM_BYTES {
            incoming.bytes.copy_within(incoming.start..incoming.end, 0);
            (incoming.start, incoming.end) = (0, incoming.end - incoming.start);
        }
        let received = self.stream.receive_into(&mut incoming.bytes[incoming.end..])?;
        incoming.end += received.unwrap_or(0);
        Ok(received)
    }

    fn put_buffer_back(&mut self, buffers: &mut ScratchBuffers) {
        if let Some(Incoming { bytes, .. }) = self.incoming.take_if(|incoming| incoming.start == incoming.end)
            && buffers.spare.len() < MOST_SPARE
        {
            buffers.spare.push(bytes);
        }
    }

    /// Hands received bytes to the session. Returns the cost; 0 where it needs more bytes.
    fn hear(&mut self, shared: &Shared, blocks: &Blocks, buffers: &mut ScratchBuffers) -> usize {
        let Some(mut incoming) = self.incoming.take() else { return 0 };
        let bytes = &incoming.bytes[incoming.start..incoming.end];
        let taken = if bytes.is_empty() { 0 } else { self.session.handle(Input::Bytes(bytes)) };
        self.carry_on(shared, blocks, buffers, &bytes[..taken]);
        incoming.start += taken;
        self.incoming = Some(incoming);
        if taken == 0 { 0 } else { taken.max(COMMAND_BYTES) }
    }

    fn work_on(
        &mut self,
        shared: &Shared,
        blocks: &Blocks,
        buffers: &mut ScratchBuffers,
        work: Work,
    ) -> usize {
        let disk = self.disk.as_ref().expect("work is on the chosen export");
        let pad = &mut buffers.pad;
        let (result, cost) = match work {
            Work::Read { offset, len } => {
                let read = disk.read(shared, self.arena, pad, offset, len);
                (read.map(|()| Input::Found(&pad.runs)), len as usize)
            }
            Work::Zero { offset, len, hint } => {
                let zeroed = disk.zero(shared, self.arena, pad, offset, len, hint);
                (zeroed.map(|()| Input::Done), len as usize / ZEROES_FOR_A_BYTE)
            }
            Work::Status { offset, len, most } => {
                disk.extents(pad, offset, len, most);
                (Ok(Input::Extents(&pad.extents)), len as usize / ZEROES_FOR_A_BYTE)
            }
        };
        let input = result.unwrap_or_else(|failure| {
            disk.count_failure(failure);
            Input::Failed(failure)
        });
        self.session.handle(input);
        self.carry_on(shared, blocks, buffers, &[]);
        cost.max(COMMAND_BYTES)
    }

    /// Does what the session wants. `taken`: the bytes that it took last.
    fn carry_on(&mut self, shared: &Shared, blocks: &Blocks, buffers: &mut ScratchBuffers, taken: &[u8]) {
        let mut write = None;
        loop {
            while let Some(output) = self.session.poll() {
                match output {
                    Output::Send(bytes) => self.outgoing.text(bytes),
                    Output::SendData { len } => next_parts(buffers, len, |part| self.outgoing.part(part)),
                    Output::SkipData { len } => next_parts(buffers, len, |part| {
                        assert!(matches!(part, Part::Zeroes(_)), "a hole is not stored")
                    }),
                    Output::Opened { export } => {
                        let disk = Arc::clone(&blocks.disks[export]);
                        disk.clients.fetch_add(1, Ordering::Relaxed);
                        if shared.may_log("block client", None) {
                            tracing::info!(export = disk.name(), peer = %self.stream.peer(), "block client");
                        }
                        self.disk = Some(disk);
                    }
                    Output::Write { offset, .. } => write = Some(offset),
                    Output::Read { offset, len } => self.work = Some(Work::Read { offset, len }),
                    Output::Zero { offset, len, hint } => self.work = Some(Work::Zero { offset, len, hint }),
                    Output::Status { offset, len, most } => {
                        self.work = Some(Work::Status { offset, len, most })
                    }
                    Output::Close(end) => self.end = Some(end),
                }
            }
            let Some(offset) = write.take() else { return };
            let disk = self.disk.as_ref().expect("work is on the chosen export");
            let written = disk.write(shared, self.arena, &mut buffers.pad, offset, taken);
            self.session.handle(match written {
                Ok(()) => Input::Done,
                Err(failure) => {
                    disk.count_failure(failure);
                    Input::Failed(failure)
                }
            });
        }
    }
}

/// Takes the parts that make up the next `len` bytes of what was read.
fn next_parts(buffers: &mut ScratchBuffers, len: u32, mut tell: impl FnMut(Part)) {
    let mut left = len as usize;
    while left > 0 {
        let part = buffers.pad.parts.pop_front().expect("the runs are as long as the parts");
        left = left.checked_sub(part.len()).expect("no part is in two runs");
        tell(part);
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.count_replies(0);
        if let Some(disk) = &self.disk {
            disk.clients.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
