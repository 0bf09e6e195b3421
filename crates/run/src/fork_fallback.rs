//! The fork fallback: answers a child's faults when the process that served them is gone.
//!
//! A child that cannot take its memory over (made by a bare `clone`, or without a descriptor left) is served
//! by its parent to its end. When the parent dies first, the kernel closes the child's context with the
//! parent's descriptors, and what is absent would read as zeroes from then on. So the parent's agent entrusts
//! a copy of each such context to the process that started the run, the *fork fallback*, as soon
//! as it has it. A context that is open somewhere keeps its faults waiting; once the line to the agent hangs
//! up, the fallback answers them: what is absent is lost, and an access to it a SIGBUS.
//!
//! The fallback reads nothing from a context while the agent lives. Between the moment when the agent has a
//! context and the moment when it has handed it over lie a few microseconds: reading the event is what lets
//! the child run. A parent that is killed in between leaves a child that reads zeroes, unless it was made by
//! `fork(3)`, asks for its memory first, and ends because it gets no answer.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rampool_kernel::uffd::{Event, Reply, Uffd};
use rustix::io::Errno;
use rustix::net;

use rampool_wire::units::OS_PAGE_BYTES;

/// Connections that wait to be looked at.
const BACKLOG: i32 = 4096;

fn path(run_dir: &Path) -> PathBuf {
    run_dir.join("fork-fallback.sock")
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = net::SocketFlags::CLOEXEC | net::SocketFlags::NONBLOCK;
    net::socket_with(net::AddressFamily::UNIX, net::SocketType::SEQPACKET, flags, None)
}

/// A process's line to the fork fallback of its run, held as long as the process lives.
#[derive(Debug)]
pub struct FallbackLine {
    line: OwnedFd,
}

impl FallbackLine {
    /// `None`: the run is over, or this process has given away the right to enter its directory.
    #[must_use]
    pub fn connect(run_dir: &Path) -> Option<Self> {
        let line = socket().ok()?;
        net::connect(&line, &net::SocketAddrUnix::new(path(run_dir)).ok()?).ok()?;
        Some(Self { line })
    }

    /// Gives the fallback a copy of the context of a child that this process serves. Does not block. False if
    /// there is no fallback any more, or it has not looked for very long.
    pub fn hand_over(&self, context: &Uffd) -> bool {
        let descriptors = [context.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = net::SendAncillaryBuffer::new(&mut space);
        let fits = control.push(net::SendAncillaryMessage::ScmRights(&descriptors));
        let flags = net::SendFlags::DONTWAIT | net::SendFlags::NOSIGNAL;
        fits && net::sendmsg(&self.line, &[IoSlice::new(&[1])], &mut control, flags).is_ok()
    }
}

/// Keeps the contexts of children that are served by others.
#[derive(Debug)]
pub struct ForkFallback {
    listener: OwnedFd,
    lines: Vec<Line>,
    orphans: Vec<Orphan>,
}

#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    pid: i32,
    children: Vec<Uffd>,
}

#[derive(Debug)]
struct Orphan {
    context: Uffd,
    parent: i32,
    told: bool,
}

impl ForkFallback {
    /// # Errors
    /// When the socket cannot be made in the run's directory.
    pub fn create(run_dir: &Path) -> std::io::Result<Self> {
        let listener = socket()?;
        net::bind(&listener, &net::SocketAddrUnix::new(path(run_dir))?)?;
        net::listen(&listener, BACKLOG)?;
        Ok(Self { listener, lines: Vec::new(), orphans: Vec::new() })
    }

    /// Children are alive that depend on this fallback, or may come to do so.
    #[must_use]
    pub fn is_needed(&self) -> bool {
        !self.orphans.is_empty() || self.lines.iter().any(|line| !line.children.is_empty())
    }

    /// Takes what was handed over, and answers children whose parents are gone. Returns at once; `say` gets a
    /// line for people.
    pub fn look(&mut self, say: &mut dyn FnMut(&str)) {
        while let Ok(socket) =
            net::accept_with(&self.listener, net::SocketFlags::CLOEXEC | net::SocketFlags::NONBLOCK)
        {
            let pid =
                net::sockopt::socket_peercred(&socket).map_or(0, |peer| peer.pid.as_raw_nonzero().get());
            self.lines.push(Line { socket, pid, children: Vec::new() });
        }
        let orphans = &mut self.orphans;
        self.lines.retain_mut(|line| {
            let alive = line.receive();
            line.children.retain(is_alive);
            if !alive {
                let orphan = |context: Uffd| {
                    // The parent may have read of a fault, and died before it answered.
                    context.wake_all();
                    Orphan { context, parent: line.pid, told: false }
                };
                orphans.extend(line.children.drain(..).map(orphan));
            }
            alive
        });
        let mut more = Vec::new();
        orphans.retain_mut(|orphan| {
            orphan.serve(&mut more, say);
            is_alive(&orphan.context)
        });
        orphans.append(&mut more);
    }
}

/// A context whose process has ended refuses everything in these words; to any other this does nothing of
/// consequence.
fn is_alive(context: &Uffd) -> bool {
    const ANYWHERE: usize = 1 << 20;
    context.write_protect(ANYWHERE, OS_PAGE_BYTES, false) != Reply::Exiting
}

impl Line {
    /// Reads all that has arrived; false once the other end is gone.
    fn receive(&mut self) -> bool {
        loop {
            let mut byte = [0u8; 1];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = net::RecvAncillaryBuffer::new(&mut space);
            let flags = net::RecvFlags::DONTWAIT | net::RecvFlags::CMSG_CLOEXEC;
            match net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags) {
                Ok(message) if message.bytes == 1 => {
                    for message in control.drain() {
                        if let net::RecvAncillaryMessage::ScmRights(descriptors) = message {
                            self.children.extend(descriptors.map(Uffd::from_fd));
                        }
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                _ => return false,
            }
        }
    }
}

impl Orphan {
    fn serve(&mut self, more: &mut Vec<Self>, say: &mut dyn FnMut(&str)) {
        let mut events = Vec::new();
        while self.context.read_events::<16>(&mut events) > 0 {}
        for event in events {
            match event {
                Event::Fault { address, write_protected: true, .. } => {
                    let _ = self.context.write_protect(address, OS_PAGE_BYTES, false);
                    self.context.wake(address, OS_PAGE_BYTES);
                }
                Event::Fault { address, thread, .. } => self.refuse(address, thread, say),
                Event::Fork { child } => {
                    more.push(Self { context: child, parent: self.parent, told: self.told })
                }
                Event::Remap { .. } | Event::Remove { .. } | Event::Unmap { .. } => {}
            }
        }
    }

    /// What is at `address` is lost.
    fn refuse(&mut self, address: usize, thread: u32, say: &mut dyn FnMut(&str)) {
        match self.context.poison(address, OS_PAGE_BYTES) {
            Reply::Done | Reply::Partial(_) => {}
            // It is there, or something else will be: the access is repeated.
            Reply::AlreadyMapped | Reply::MapChanging | Reply::Gone => {
                return self.context.wake(address, OS_PAGE_BYTES);
            }
            Reply::Exiting => return,
            // Before Linux 6.6 a page cannot be made to raise SIGBUS.
            Reply::Busy | Reply::NoMemory | Reply::Unexpected(_) => {
                if let Some(thread) = i32::try_from(thread).ok().and_then(rustix::process::Pid::from_raw) {
                    let _ = rustix::process::kill_process(thread, rustix::process::Signal::KILL);
                }
            }
        }
        if !std::mem::replace(&mut self.told, true) {
            say(&format!(
                "rampool: process {thread} could not take over its memory from process {}, which served it \
                 and has ended: what it lacks is lost (SIGBUS)",
                self.parent
            ));
        }
    }
}
