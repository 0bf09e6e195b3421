//! The thread that moves the bytes of files between the kernel's requests and the pool.
//!
//! It carries out the plans of [`rampool_files`] in the order in which they were made, as far as that matters
//! ([`Turns`]), and answers the kernel when the servers have answered.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use fuser::{Errno, ReplyAttr, ReplyData, ReplyEmpty, ReplyWrite};
use rampool_client::pool::{KNOCK_EVERY, Pool, PoolEvent, PoolRegion};
use rampool_files::{Access, Cleared, Edge, Piece, Turns, WritePlan};
use rampool_kernel::words::remark;
use rampool_wire::units::{Extent, OS_PAGE_BYTES as PAGE_BYTES, PageIndex};
use rustix::event::{EventfdFlags, eventfd};

use super::buffers::Buffers;
use crate::run::caretaker;

/// Bytes of reads that are under way for each server: two of the longest reads, so that one comes while the
/// other is copied to the kernel. More only take each other's place in the CPUs' caches, and in the rings.
const MOST_READ_BYTES: usize = 2 << 20;

/// What is to be done with bytes.
pub enum Job {
    /// `bytes` from behind `within` bytes of the pieces on are for the kernel.
    Read { pieces: Vec<Piece>, within: usize, bytes: usize, reply: ReplyData },
    /// `bytes` of `buffer` behind `within` go to the plan's pages.
    Write { plan: WritePlan, buffer: Vec<u8>, within: usize, bytes: usize, reply: ReplyWrite },
    /// Bytes become zero, and pages are given back.
    Clear { cleared: Cleared, done: Done },
    /// Everything before is done; then the thread ends.
    Stop,
}

/// Whom to tell that bytes are cleared.
pub enum Done {
    Nobody,
    Empty(ReplyEmpty),
    Attributes(ReplyAttr, Duration, Box<fuser::FileAttr>),
}

impl Done {
    pub fn tell(self, outcome: Result<(), Errno>) {
        match (self, outcome) {
            (Self::Nobody, _) => {}
            (Self::Empty(reply), Ok(())) => reply.ok(),
            (Self::Empty(reply), Err(error)) => reply.error(error),
            (Self::Attributes(reply, valid, attributes), Ok(())) => reply.attr(&valid, &attributes),
            (Self::Attributes(reply, ..), Err(error)) => reply.error(error),
        }
    }
}

/// The way to the thread. If that has ended, the kernel's requests fail.
#[derive(Clone)]
pub struct Jobs {
    jobs: Sender<Job>,
    doorbell: Arc<OwnedFd>,
}

impl Jobs {
    pub fn send(&self, job: Job) {
        // A reply that is dropped is an I/O error.
        if self.jobs.send(job).is_ok() {
            _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
        }
    }

    pub fn stop(&self) {
        self.send(Job::Stop);
    }
}

/// One job that waits for its turn or for servers.
struct Operation {
    buffer: Vec<u8>,
    work: Work,
}

enum Work {
    Read { pieces: Vec<Piece>, within: usize, bytes: usize, reply: ReplyData },
    Write { plan: WritePlan, edges: Vec<u8>, within: usize, bytes: usize, reply: ReplyWrite },
    Clear { zero: Vec<(PageIndex, Range<usize>)>, freed: Vec<Extent>, done: Done },
}

fn len_of(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.pages as usize * PAGE_BYTES).sum()
}

pub struct Mover {
    // Dropped before the buffers of `operations`: from then on nothing is received into them.
    pool: Pool,
    region: PoolRegion,
    jobs: Receiver<Job>,
    doorbell: Arc<OwnedFd>,
    buffers: Arc<Buffers>,
    turns: Turns,
    /// By their turns' numbers, which are the pool's tokens, too.
    operations: BTreeMap<u64, Operation>,
    /// Bytes of reads that are under way, how many may be, and reads that wait until there are fewer.
    read_bytes: usize,
    most_read_bytes: usize,
    later: VecDeque<u64>,
    said_full: bool,
}

impl Mover {
    pub fn new(pool: Pool, region: PoolRegion, buffers: Arc<Buffers>) -> std::io::Result<(Self, Jobs)> {
        let doorbell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (sender, jobs) = channel();
        let way = Jobs { jobs: sender, doorbell: Arc::clone(&doorbell) };
        let most_read_bytes = MOST_READ_BYTES * pool.servers().count();
        let mover = Self {
            pool,
            region,
            jobs,
            doorbell,
            buffers,
            turns: Turns::default(),
            operations: BTreeMap::new(),
            read_bytes: 0,
            most_read_bytes,
            later: VecDeque::new(),
            said_full: false,
        };
        Ok((mover, way))
    }

    /// Until [`Jobs::stop`].
    pub fn run(mut self) {
        let mut stops = false;
        while !(stops && self.turns.is_empty()) {
            let mut rests = true;
            while let Ok(job) = self.jobs.try_recv() {
                rests = false;
                stops |= matches!(job, Job::Stop);
                self.enter(job);
            }
            while let Some(event) = self.pool.poll() {
                rests = false;
                self.happened(event);
            }
            self.begin_reads();
            self.pool.tend();
            if rests {
                self.sleep();
            }
        }
        self.pool.close();
    }

    fn sleep(&self) {
        let mut watched =
            vec![libc::pollfd { fd: self.doorbell.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        self.pool.poll_fds(&mut watched);
        let due = self.pool.next_deadline().map(|due| due.saturating_duration_since(Instant::now()));
        let ms = due.unwrap_or(KNOCK_EVERY).min(KNOCK_EVERY).as_millis();
        let ms = i32::try_from(ms).expect("at most a second") + 1;
        // SAFETY: as many descriptors as it says, which live across the call.
        unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, ms) };
        _ = rustix::io::read(&self.doorbell, &mut [0; 8]);
    }

    fn enter(&mut self, job: Job) {
        let (access, pages, operation) = match job {
            Job::Stop => return,
            Job::Read { pieces, within, bytes, reply } => {
                let there = pieces.iter().filter_map(|piece| Some(Extent::new(piece.at?, piece.pages)));
                let pages = there.collect();
                let work = Work::Read { pieces, within, bytes, reply };
                (Access::Read, pages, Operation { buffer: Vec::new(), work })
            }
            Job::Write { plan, buffer, within, bytes, reply } => {
                let pages = plan.pages.clone();
                let work = Work::Write { plan, edges: Vec::new(), within, bytes, reply };
                (Access::Write, pages, Operation { buffer, work })
            }
            Job::Clear { cleared: Cleared { zero, freed }, done } => {
                let mut pages = freed.clone();
                pages.extend(zero.iter().map(|(page, _)| Extent::page(*page)));
                let buffer = self.buffers.take(zero.len() * PAGE_BYTES);
                (Access::Write, pages, Operation { buffer, work: Work::Clear { zero, freed, done } })
            }
        };
        let (number, begins) = self.turns.enter(access, pages);
        self.operations.insert(number, operation);
        if begins {
            self.may_begin(number);
        }
    }

    /// No other operation excludes this one. A read waits all the same while many bytes are under way.
    fn may_begin(&mut self, number: u64) {
        match self.operations[&number].work {
            Work::Read { .. } => self.later.push_back(number),
            Work::Write { .. } | Work::Clear { .. } => self.begin(number),
        }
    }

    fn begin_reads(&mut self) {
        while let Some(&number) = self.later.front() {
            let operation = self.operations.get_mut(&number).expect("it has entered");
            let Work::Read { pieces, .. } = &operation.work else { unreachable!("only reads wait here") };
            let len = len_of(pieces);
            if self.read_bytes > 0 && self.read_bytes + len > self.most_read_bytes {
                break;
            }
            self.later.pop_front();
            self.read_bytes += len;
            // Taken now: the one that was given back last is still in the CPU's caches.
            operation.buffer = self.buffers.take(len);
            self.begin(number);
        }
    }

    /// Asks for what an operation needs first.
    fn begin(&mut self, number: u64) {
        let operation = self.operations.get_mut(&number).expect("it has entered");
        let mut parts: Vec<(Extent, *mut u8)> = Vec::new();
        match &mut operation.work {
            Work::Read { pieces, .. } => {
                let mut at = 0;
                for piece in pieces {
                    let len = piece.pages as usize * PAGE_BYTES;
                    match piece.at {
                        Some(first) => parts.push((
                            Extent::new(first, piece.pages),
                            operation.buffer.as_mut_ptr().wrapping_add(at),
                        )),
                        None => operation.buffer[at..at + len].fill(0),
                    }
                    at += len;
                }
            }
            Work::Write { plan, edges, .. } => {
                let kept = [plan.head, plan.tail].map(|edge| match edge {
                    Some(Edge::Keep(page)) => Some(page),
                    _ => None,
                });
                if kept.iter().any(Option::is_some) {
                    edges.resize(2 * PAGE_BYTES, 0);
                }
                let start = edges.as_mut_ptr();
                let kept = kept.into_iter().zip([0, PAGE_BYTES]);
                let kept = kept.filter_map(|(page, at)| Some((Extent::page(page?), start.wrapping_add(at))));
                parts.extend(kept);
            }
            Work::Clear { zero, freed, .. } => {
                freed.iter().for_each(|extent| self.pool.discard(self.region, *extent));
                let start = operation.buffer.as_mut_ptr();
                let pages = zero
                    .iter()
                    .zip(0..)
                    .map(|((page, _), index)| (Extent::page(*page), start.wrapping_add(index * PAGE_BYTES)));
                parts.extend(pages);
            }
        }
        match parts[..] {
            [] => self.fetched(number),
            // SAFETY: the memory belongs to the operation, which leaves it alone until this has ended, or the
            // pool is dropped.
            [(extent, to)] => unsafe { self.pool.fetch(self.region, number, &[extent], to, true) },
            // SAFETY: as before; no two parts overlap.
            _ => unsafe { self.pool.fetch_parts(self.region, number, &parts, true) },
        }
    }

    /// What an operation needs first is there.
    fn fetched(&mut self, number: u64) {
        let operation = self.operations.get_mut(&number).expect("it has begun");
        let buffer = &mut operation.buffer;
        let mut parts: Vec<(Extent, *const u8)> = Vec::new();
        match &operation.work {
            Work::Read { .. } => {}
            Work::Write { plan, edges, within, bytes, .. } => {
                let len = plan.pages.iter().map(|run| run.count as usize * PAGE_BYTES).sum::<usize>();
                let data = *within..within + bytes;
                for (edge, page, kept) in [(plan.head, 0, 0), (plan.tail, len - PAGE_BYTES, PAGE_BYTES)] {
                    let Some(edge) = edge else { continue };
                    let kept = matches!(edge, Edge::Keep(_)).then(|| &edges[kept..kept + PAGE_BYTES]);
                    for rest in
                        [page..data.start.max(page), data.end.min(page + PAGE_BYTES)..page + PAGE_BYTES]
                    {
                        match kept {
                            Some(kept) => {
                                buffer[rest.clone()]
                                    .copy_from_slice(&kept[rest.start - page..rest.end - page]);
                            }
                            None => buffer[rest].fill(0),
                        }
                    }
                }
                let mut at = 0;
                for run in &plan.pages {
                    parts.push((*run, buffer.as_ptr().wrapping_add(at)));
                    at += run.count as usize * PAGE_BYTES;
                }
            }
            Work::Clear { zero, .. } => {
                for (index, (page, range)) in zero.iter().enumerate() {
                    let of_page = &mut buffer[index * PAGE_BYTES..][..PAGE_BYTES];
                    of_page[range.clone()].fill(0);
                    parts.push((Extent::page(*page), of_page.as_ptr()));
                }
            }
        }
        if parts.is_empty() {
            return self.end(number, Ok(()));
        }
        // SAFETY: the memory belongs to the operation, which leaves it as it is until the event that ends
        // this, or until the pool is dropped.
        unsafe { self.pool.store(self.region, number, &parts) };
    }

    fn end(&mut self, number: u64, outcome: Result<(), Errno>) {
        let Operation { buffer, work } = self.operations.remove(&number).expect("it ends once");
        if let Work::Read { pieces, .. } = &work {
            self.read_bytes -= len_of(pieces);
        }
        match (work, outcome) {
            (Work::Read { within, bytes, reply, .. }, Ok(())) => reply.data(&buffer[within..within + bytes]),
            (Work::Read { reply, .. }, Err(error)) => reply.error(error),
            (Work::Write { bytes, reply, .. }, Ok(())) => {
                reply.written(u32::try_from(bytes).expect("the kernel counts requests in 32 bits"));
            }
            (Work::Write { reply, .. }, Err(error)) => reply.error(error),
            (Work::Clear { done, .. }, outcome) => done.tell(outcome),
        }
        self.buffers.give(buffer);
        for next in self.turns.leave(number) {
            self.may_begin(next);
        }
    }

    fn happened(&mut self, event: PoolEvent) {
        match event {
            PoolEvent::Fetched { token } => self.fetched(token),
            PoolEvent::Stored { token } => self.end(token, Ok(())),
            PoolEvent::Failed { token, .. } => self.end(token, Err(Errno::EIO)),
            PoolEvent::Full { token, name, .. } => {
                if !std::mem::replace(&mut self.said_full, true) {
                    remark(&format!(
                        "rampool: server {name} has no room for pages that it has leased: writes fail"
                    ));
                }
                self.end(token, Err(Errno::ENOSPC));
            }
            PoolEvent::Corrupt { token, name, page, .. } => {
                remark(&format!(
                    "rampool: server {name} sent damaged bytes twice in a row for {page}: a read fails"
                ));
                self.end(token, Err(Errno::EIO));
            }
            PoolEvent::Lost { name, operation, reason, .. } => remark(&format!(
                "rampool: server {name} is lost (while waiting for {operation}): {reason}. Reads and \
                 writes of what lay there fail; unmount, and mount anew"
            )),
            other => caretaker::tell(&other, self.pool.copies()),
        }
    }
}
