//! The line between a forking process and its child: the child asks once, the parent answers with the
//! child's context and the list of its absent pages, and either end sees the other close.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use rampool_client::pool::RegionTicket;
use rampool_kernel::uffd::{Scope, Uffd};
use rampool_pager::fault::{CopyThread, FaultCatcher};
use rampool_pager::fork::ChildMemory;
use rampool_paging::space::Span;
use rampool_run::settings::Settings;

use crate::exclusion::{DEADLINE, settings};
use crate::faults;
use crate::report::end_process;

pub const NONE: i32 = -1;

/// The two ends of the line of the fork under way, in the program's table of descriptors; the pager takes a
/// copy of the first.
pub static PARENT_END: AtomicI32 = AtomicI32::new(NONE);
pub static CHILD_END: AtomicI32 = AtomicI32::new(NONE);
pub static FORKING_THREAD: AtomicU32 = AtomicU32::new(0);
pub static TAKEN: AtomicBool = AtomicBool::new(false);

/// What a forked child inherits from a parent whose memory was managed.
pub struct Inheritance {
    /// Catches the faults of the child's memory already.
    pub faults: FaultCatcher,
    pub memory: ChildMemory,
    pub region: RegionTicket,
    /// To be told when the region is taken over; `None` where there was no descriptor left for it.
    pub taking: Option<Taking>,
}

/// Whether a fork is under way, or just over, whose child has a line that was not taken.
pub fn waits() -> bool {
    PARENT_END.load(Ordering::Acquire) != NONE && !TAKEN.load(Ordering::Acquire)
}

/// The parent's end of the line to the child whose fork event was just read, as a descriptor of the agent's
/// own.
pub fn take_line() -> Option<OwnedFd> {
    let fd = PARENT_END.load(Ordering::Acquire);
    if fd == NONE || TAKEN.swap(true, Ordering::AcqRel) {
        return None;
    }
    match rampool_kernel::descriptors::take_from(FORKING_THREAD.load(Ordering::Relaxed), fd) {
        Some(line) => Some(line),
        None => end_process(
            settings(),
            "the kernel does not let the agent have the line to a forked child (pidfd_getfd)",
        ),
    }
}

/// What a child said.
pub enum Line {
    Quiet,
    Asked,
    Closed,
}

pub fn listen(line: &OwnedFd) -> Line {
    let mut byte = [0u8; 1];
    // SAFETY: reads into a buffer of ours.
    let n = unsafe { libc::recv(line.as_raw_fd(), byte.as_mut_ptr().cast(), 1, libc::MSG_DONTWAIT) };
    match n {
        1 => Line::Asked,
        _ if n < 0 && rampool_kernel::last_errno() == libc::EAGAIN => Line::Quiet,
        _ => Line::Closed,
    }
}

/// Gives a child its context and its state. A child that is gone meanwhile is no error.
///
/// `uffd` is the child's context, if the kernel reported the fork. On what comes back the child says
/// ([`listen`]) when it has taken its region over. It is closed without a word where the child is gone, or had
/// no descriptor left for it.
pub fn hand_over(
    line: &OwnedFd,
    uffd: Option<&Uffd>,
    memory: &ChildMemory,
    region: &RegionTicket,
) -> Option<OwnedFd> {
    let mut text = region.to_string().into_bytes();
    text.push(b'\n');
    text.extend(memory.encode());
    if let Some(file) = memory_file(&text) {
        let context = uffd.map_or(file.as_raw_fd(), Uffd::raw_fd);
        let (taken, taking): (_, Option<OwnedFd>) = pair().unzip();
        // The last one is what a child without room for all does without.
        let third = taking.as_ref().map_or(file.as_raw_fd(), OwnedFd::as_raw_fd);
        send_descriptors(line, [context, file.as_raw_fd(), third]);
        return taken;
    }
    None
}

fn pair() -> Option<(OwnedFd, OwnedFd)> {
    let mut ends = [NONE; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: fills two descriptors, or none.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: both are new.
    Some(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// The child's end of that.
#[derive(Debug)]
pub struct Taking(OwnedFd);

impl Taking {
    /// The region is this process's wherever it could be taken over.
    pub fn done(self) {
        // SAFETY: sends one byte of ours; a parent that is gone has nothing to free.
        unsafe { libc::send(self.0.as_raw_fd(), [1u8].as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
    }
}

fn memory_file(bytes: &[u8]) -> Option<OwnedFd> {
    use std::io::Write;
    // SAFETY: a constant, terminated name; the descriptor is new.
    let fd = unsafe { libc::memfd_create(c"rampool-child".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: as above.
    let mut file = unsafe { std::fs::File::from_raw_fd(fd) };
    file.write_all(bytes).ok()?;
    Some(file.into())
}

const CONTROL_BYTES: usize = 64;

/// Room for a control message with two descriptors, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

fn send_descriptors(line: &OwnedFd, descriptors: [RawFd; 3]) {
    let mut byte = [1u8];
    let mut control = Control([0; CONTROL_BYTES]);
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: the message points to locals that live across the call; the control buffer is larger than
    // CMSG_SPACE of three descriptors.
    unsafe {
        let mut message = std::mem::zeroed::<libc::msghdr>();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        let bytes = u32::try_from(size_of_val(&descriptors)).expect("twelve");
        message.msg_controllen = libc::CMSG_SPACE(bytes) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(bytes) as usize;
        libc::CMSG_DATA(header).cast::<[RawFd; 3]>().write_unaligned(descriptors);
        libc::sendmsg(line.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL);
    }
}

/// In the child's agent: asks the parent for its state, and waits for it.
///
/// # Errors
/// Why it did not come, for people.
pub fn ask(line: &OwnedFd, settings: &Settings, thread: Option<CopyThread>) -> Result<Inheritance, String> {
    let mut byte = [1u8];
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: sends one byte of ours.
    unsafe { libc::send(line.as_raw_fd(), byte.as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
    let mut poll = libc::pollfd { fd: line.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let millis = i32::try_from(DEADLINE.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one descriptor of ours.
    if unsafe { libc::poll(&raw mut poll, 1, millis) } <= 0 {
        return Err("no answer in time".into());
    }
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: the message points to locals that live across the call, with their true sizes; the header is
    // checked before it is read, and as many descriptors are taken as it says.
    let mut received = unsafe {
        let mut message = std::mem::zeroed::<libc::msghdr>();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES;
        let n = libc::recvmsg(line.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if n != 1 || header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Err("the parent is gone".into());
        }
        let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
        let all = libc::CMSG_DATA(header).cast::<[RawFd; 3]>().read_unaligned();
        let fds = all.into_iter().take(bytes / size_of::<RawFd>());
        fds.map(|fd| OwnedFd::from_raw_fd(fd)).collect::<Vec<_>>().into_iter()
    };
    let (Some(uffd), Some(file)) = (received.next(), received.next()) else {
        return Err("this process has no descriptor left for it".into());
    };
    // A parent without a pair has sent the file once more.
    let taking = received.next().map(Taking);
    use std::io::{Read, Seek};
    let mut file = std::fs::File::from(file);
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).map_err(|error| error.to_string())?;
    let end = bytes.iter().position(|b| *b == b'\n').ok_or("the list of pages is damaged")?;
    let region = std::str::from_utf8(&bytes[..end])
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or("the region's name is damaged")?;
    let memory = ChildMemory::decode(&bytes[end + 1..]).ok_or("the list of pages is damaged")?;
    let (catcher, memory) = if faults::follows_forks() {
        let features = faults::inherited_features();
        let catcher = FaultCatcher::from_uffd(Uffd::from_fd(uffd), Scope::Everything, features, thread)
            .map_err(|error| error.to_string())?;
        (catcher, memory)
    } else {
        let catcher = faults::open_faults(settings)?;
        faults::note_faults(&catcher);
        // A mapping that another thread of the parent took away at the last moment is not here.
        let here = |span: &Span| catcher.manage(span.start, span.end() - span.start).is_ok();
        let spans = memory.spans.iter().copied().filter(here).collect();
        (catcher, ChildMemory { spans, absent: memory.absent })
    };
    Ok(Inheritance { faults: catcher, memory, region, taking })
}

pub fn close(fd: RawFd) {
    if fd != NONE {
        // SAFETY: every caller owns the descriptor it passes.
        unsafe { libc::close(fd) };
    }
}
