//! The transmission phase: one command after the other, each in slices.

use super::{End, Failure, Input, Output, Outputs, Run, StatusExtent, Violation, front};
use crate::wire::{self, Request, Write, chunk, command, error, flag};
use crate::{MOST_PAYLOAD_BYTES, PREFERRED_BYTES, SLICE_BYTES, ZERO_SLICE_BYTES};

/// Extents of an answer to block status.
const MOST_EXTENTS: usize = 1024;

#[derive(Debug)]
pub struct Transmission {
    bytes: u64,
    structured: bool,
    allocation: bool,
    work: Option<Work>,
}

/// The command at work. Invariant: `offset + left` is within the export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Work {
    kind: Kind,
    cookie: u64,
    /// Of the next slice.
    offset: u64,
    left: u32,
    /// Length of the slice that the shell has; 0 while it has none.
    slice: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// `begun`: the head of a simple reply has been sent.
    Read {
        whole: bool,
        begun: bool,
    },
    Write,
    Zero {
        hint: bool,
    },
    Status {
        most: usize,
    },
    /// The data of a write that is refused already.
    Refused {
        error: u32,
        message: &'static str,
    },
}

impl Transmission {
    pub fn new(bytes: u64, structured: bool, allocation: bool) -> Self {
        Self { bytes, structured, allocation, work: None }
    }

    pub fn handle(&mut self, input: Input<'_>, out: &mut Outputs) -> Result<usize, End> {
        match input {
            Input::Bytes(bytes) => return self.take(bytes, out),
            Input::Draining => {}
            Input::Found(runs) => self.found(runs, out),
            Input::Done => self.done(out),
            Input::Extents(extents) => self.extents(extents, out),
            Input::Failed(failure) => self.failed(failure, out)?,
        }
        Ok(0)
    }

    pub fn check(&self) {
        if let Some(work) = &self.work {
            assert!(work.slice <= work.left, "a slice is a part of what is left");
            let refused = matches!(work.kind, Kind::Refused { .. });
            let end = work.offset.checked_add(work.left.into());
            assert!(refused || end.is_some_and(|end| end <= self.bytes), "a command stays within its export");
        }
    }

    fn take(&mut self, bytes: &[u8], out: &mut Outputs) -> Result<usize, End> {
        let Some(work) = &mut self.work else {
            let Some(head) = front::<{ wire::REQUEST_BYTES }>(bytes) else { return Ok(0) };
            let request = Request::parse(head).ok_or(Violation::NoRequest)?;
            self.begin(request, out)?;
            return Ok(wire::REQUEST_BYTES);
        };
        match work.kind {
            Kind::Write => {
                assert_eq!(work.slice, 0, "the last slice has been written");
                let there = u32::try_from(bytes.len()).unwrap_or(u32::MAX).min(SLICE_BYTES);
                let len = if there >= work.left { work.left } else { whole_pages(work.offset, there) };
                if len > 0 {
                    work.slice = len;
                    out.push(Output::Write { offset: work.offset, len });
                }
                Ok(len as usize)
            }
            Kind::Refused { error, message } => {
                let taken = bytes.len().min(work.left as usize);
                work.left -= u32::try_from(taken).expect("no more than is left");
                if work.left == 0 {
                    let cookie = work.cookie;
                    self.refuse(cookie, error, message, out);
                }
                Ok(taken)
            }
            Kind::Read { .. } | Kind::Zero { .. } | Kind::Status { .. } => panic!("the shell owes an answer"),
        }
    }

    fn begin(&mut self, request: Request, out: &mut Outputs) -> Result<(), End> {
        let Request { command, cookie, offset, len, .. } = request;
        if command == command::DISCONNECT {
            return Err(End::Goodbye);
        }
        if command == command::WRITE && len > MOST_PAYLOAD_BYTES {
            return Err(Violation::LongWrite(len).into());
        }
        if let Err((error, message)) = self.allows(&request) {
            if command == command::WRITE && len > 0 {
                // Its data comes all the same.
                self.work = Some(Work {
                    kind: Kind::Refused { error, message },
                    cookie,
                    offset: 0,
                    left: len,
                    slice: 0,
                });
            } else if command == command::READ && self.structured {
                out.error_chunk(error, cookie, message);
            } else {
                self.refuse(cookie, error, message, out);
            }
            return Ok(());
        }
        let kind = match command {
            command::READ if len == 0 => {
                self.acknowledge(cookie, true, out);
                return Ok(());
            }
            command::READ => Kind::Read { whole: request.flags & flag::DONT_FRAGMENT != 0, begun: false },
            command::WRITE => Kind::Write,
            command::TRIM => Kind::Zero { hint: true },
            command::WRITE_ZEROES => Kind::Zero { hint: false },
            command::BLOCK_STATUS => {
                Kind::Status { most: if request.flags & flag::ONE_EXTENT == 0 { MOST_EXTENTS } else { 1 } }
            }
            // Everything before has been carried out, and everything is in memory.
            _ => {
                self.acknowledge(cookie, false, out);
                return Ok(());
            }
        };
        if len == 0 {
            self.acknowledge(cookie, false, out);
            return Ok(());
        }
        self.work = Some(Work { kind, cookie, offset, left: len, slice: 0 });
        if kind != Kind::Write {
            self.next_slice(out);
        }
        Ok(())
    }

    /// An error where the request is refused: its number, and why.
    fn allows(&self, request: &Request) -> Result<(), (u32, &'static str)> {
        let dont_fragment = if self.structured { flag::DONT_FRAGMENT } else { 0 };
        let flags = match request.command {
            command::READ => dont_fragment,
            command::WRITE | command::TRIM | command::FLUSH | command::CACHE => 0,
            command::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS if self.allocation => flag::ONE_EXTENT,
            command::BLOCK_STATUS => {
                return Err((error::INVALID, "block status was not agreed upon in the handshake"));
            }
            _ => return Err((error::INVALID, "the command is unknown here")),
        };
        if request.flags & !(flags | flag::FUA) != 0 {
            return Err((error::INVALID, "a flag that does not belong to the command"));
        }
        if request.command == command::FLUSH {
            return Ok(());
        }
        let grows = matches!(request.command, command::WRITE | command::WRITE_ZEROES);
        if request.offset.checked_add(request.len.into()).is_none_or(|end| end > self.bytes) {
            return Err((
                if grows { error::NO_SPACE } else { error::INVALID },
                "beyond the end of the export",
            ));
        }
        if request.command == command::READ && request.len > MOST_PAYLOAD_BYTES {
            return Err((error::INVALID, "a read of more than 32 MiB"));
        }
        if request.flags & flag::DONT_FRAGMENT != 0 && request.len > SLICE_BYTES {
            return Err((error::OVERFLOW, "an unfragmented read of more than 256 KiB"));
        }
        if request.command == command::BLOCK_STATUS && request.len == 0 {
            return Err((error::INVALID, "the block status of nothing"));
        }
        Ok(())
    }

    /// Asks for the next slice, or, where nothing is left, answers the command.
    fn next_slice(&mut self, out: &mut Outputs) {
        let work = self.work.as_mut().expect("a command is at work");
        assert_eq!(work.slice, 0, "one slice at a time");
        let longest = if let Kind::Zero { .. } = work.kind { ZERO_SLICE_BYTES } else { SLICE_BYTES };
        let len = if work.left <= longest { work.left } else { whole_pages(work.offset, longest) };
        let offset = work.offset;
        match work.kind {
            Kind::Read { .. } if work.left > 0 => out.push(Output::Read { offset, len }),
            Kind::Zero { hint } if work.left > 0 => out.push(Output::Zero { offset, len, hint }),
            Kind::Status { most } => {
                out.push(Output::Status { offset, len: work.left, most });
                work.slice = work.left;
                return;
            }
            Kind::Write if work.left > 0 => return,
            Kind::Read { .. } => {
                self.work = None;
                return;
            }
            Kind::Zero { .. } | Kind::Write => {
                let cookie = work.cookie;
                self.acknowledge(cookie, false, out);
                return;
            }
            Kind::Refused { .. } => unreachable!("a refused write has no slices"),
        }
        work.slice = len;
    }

    fn done(&mut self, out: &mut Outputs) {
        let work = self.work.as_mut().expect("something was asked for");
        assert!(
            matches!(work.kind, Kind::Write | Kind::Zero { .. }) && work.slice > 0,
            "something was to be done"
        );
        work.advance();
        self.next_slice(out);
    }

    fn found(&mut self, runs: &[Run], out: &mut Outputs) {
        let work = self.work.as_mut().expect("something was asked for");
        let Kind::Read { whole, begun } = &mut work.kind else { panic!("nothing was to be read") };
        assert_eq!(
            runs.iter().map(|run| u64::from(run.len)).sum::<u64>(),
            work.slice.into(),
            "the runs make up the slice"
        );
        let len = work.slice;
        let last = work.slice == work.left;
        if !self.structured {
            if !std::mem::replace(begun, true) {
                out.simple_reply(0, work.cookie);
            }
            out.push(Output::SendData { len });
        } else if *whole {
            out.chunk(chunk::DATA, chunk::DONE, work.cookie, 8 + len);
            out.put(&work.offset.to_be_bytes());
            out.push(Output::SendData { len });
        } else {
            let mut offset = work.offset;
            let end = offset + u64::from(len);
            for run in runs {
                let after = offset + u64::from(run.len);
                let flags = if last && after == end { chunk::DONE } else { 0 };
                if run.hole {
                    out.chunk(chunk::HOLE, flags, work.cookie, 12);
                    out.put(&offset.to_be_bytes());
                    out.put(&run.len.to_be_bytes());
                    out.push(Output::SkipData { len: run.len });
                } else {
                    out.chunk(chunk::DATA, flags, work.cookie, 8 + run.len);
                    out.put(&offset.to_be_bytes());
                    out.push(Output::SendData { len: run.len });
                }
                offset = after;
            }
        }
        work.advance();
        self.next_slice(out);
    }

    fn extents(&mut self, extents: &[StatusExtent], out: &mut Outputs) {
        let work = self.work.take().expect("something was asked for");
        let Kind::Status { most } = work.kind else { panic!("no status was asked for") };
        let total: u64 = extents.iter().map(|extent| u64::from(extent.len)).sum();
        assert!(
            !extents.is_empty() && extents.len() <= most && total <= work.left.into(),
            "extents within what was asked for"
        );
        let len = 4 + 8 * u32::try_from(extents.len()).expect("at most MOST_EXTENTS");
        out.chunk(chunk::BLOCK_STATUS, chunk::DONE, work.cookie, len);
        out.put(&wire::ALLOCATION_ID.to_be_bytes());
        for extent in extents {
            assert!(extent.len > 0, "an extent has bytes");
            out.put(&extent.len.to_be_bytes());
            out.put(&if extent.hole { wire::HOLE | wire::ZERO } else { 0 }.to_be_bytes());
        }
    }

    fn failed(&mut self, failure: Failure, out: &mut Outputs) -> Result<(), End> {
        let work = self.work.as_mut().expect("something was asked for");
        let Work { kind, cookie, .. } = *work;
        if kind == Kind::Write {
            work.advance();
            if work.left > 0 {
                work.kind = Kind::Refused { error: error::IO, message: failure.0 };
                return Ok(());
            }
        }
        match kind {
            Kind::Read { begun: true, .. } => return Err(End::ReadFailed(failure)),
            Kind::Read { .. } if self.structured => {
                self.work = None;
                out.error_chunk(error::IO, cookie, failure.0);
            }
            _ => self.refuse(cookie, error::IO, failure.0, out),
        }
        Ok(())
    }

    /// The command is carried out.
    fn acknowledge(&mut self, cookie: u64, reads: bool, out: &mut Outputs) {
        self.work = None;
        if reads && self.structured {
            out.chunk(chunk::NONE, chunk::DONE, cookie, 0);
        } else {
            out.simple_reply(0, cookie);
        }
    }

    fn refuse(&mut self, cookie: u64, error: u32, message: &str, out: &mut Outputs) {
        self.work = None;
        if self.structured {
            out.error_chunk(error, cookie, message);
        } else {
            out.simple_reply(error, cookie);
        }
    }
}

impl Work {
    fn advance(&mut self) {
        self.offset += u64::from(self.slice);
        self.left -= self.slice;
        self.slice = 0;
    }
}

/// How much of `len` bytes from `offset` on ends where a page ends.
fn whole_pages(offset: u64, len: u32) -> u32 {
    let over = u32::try_from((offset + u64::from(len)) % u64::from(PREFERRED_BYTES)).expect("below a page");
    len.saturating_sub(over)
}
