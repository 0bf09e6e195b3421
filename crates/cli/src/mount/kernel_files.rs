//! What the kernel asks of the file system, as operations of [`Files`] and jobs of the mover.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use rampool_files::{
    Attributes, Change, Cleared, Files, Kind, MOST_INODES, MOST_NAME_BYTES, Onto, Owner, PAGE, Refusal,
};
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

use super::buffers::Buffers;
use super::mover::{Done, Job, Jobs};

/// Only this process changes names, so that what the kernel knows of them stays true; it does not know how
/// many pages a file has.
const NAME_VALID: Duration = Duration::from_secs(3600);
const ATTRIBUTES_VALID: Duration = Duration::from_secs(1);
/// The longest request for bytes, which is the longest of the kernel.
pub const REQUEST_BYTES: u32 = 1 << 20;
/// Requests that the kernel makes without a program that waits.
const BACKGROUND: u16 = 64;
/// Bytes of a page, as the kernel counts them.
pub const BLOCK: u32 = 4096;
const PERMISSIONS: u32 = 0o7777;

pub struct KernelFiles {
    files: Mutex<Files>,
    jobs: Jobs,
    buffers: Arc<Buffers>,
    /// Told when nothing is mounted any more.
    ends: Sender<()>,
}

impl KernelFiles {
    pub fn new(files: Files, jobs: Jobs, buffers: Arc<Buffers>, ends: Sender<()>) -> Self {
        Self { files: Mutex::new(files), jobs, buffers, ends }
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry(made: Result<Attributes, Refusal>, reply: ReplyEntry) {
        match made {
            Ok(made) => reply.entry_with_ttls(&ATTRIBUTES_VALID, &NAME_VALID, &attr(&made), Generation(0)),
            Err(refusal) => reply.error(errno(refusal)),
        }
    }

    /// Pages of a file that is gone are given back while the lock is held: later writes to them come later.
    fn discard(&self, freed: Vec<Extent>) {
        if !freed.is_empty() {
            let cleared = Cleared { zero: Vec::new(), freed };
            self.jobs.send(Job::Clear { cleared, done: Done::Nobody });
        }
    }

    fn removed(&self, parent: INodeNo, name: &OsStr, is_directory: bool, reply: ReplyEmpty) {
        let mut files = self.files();
        match files.remove(parent.0, name.as_bytes(), is_directory, SystemTime::now()) {
            Ok(freed) => {
                self.discard(freed);
                reply.ok();
            }
            Err(refusal) => reply.error(errno(refusal)),
        }
    }

    fn clear(&self, cleared: Cleared, done: Done) {
        if cleared == Cleared::default() {
            return done.tell(Ok(()));
        }
        self.jobs.send(Job::Clear { cleared, done });
    }
}

impl Filesystem for KernelFiles {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // Those that this kernel does not have are done without.
        for wanted in [
            InitFlags::FUSE_WRITEBACK_CACHE,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_CACHE_SYMLINKS,
        ] {
            _ = config.add_capabilities(wanted);
        }
        _ = config.set_max_write(REQUEST_BYTES);
        if let Err(most) = config.set_max_readahead(REQUEST_BYTES) {
            _ = config.set_max_readahead(most);
        }
        _ = config.set_max_background(BACKGROUND);
        Ok(())
    }

    fn destroy(&mut self) {
        _ = self.ends.send(());
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        Self::entry(self.files().look_up(parent.0, name.as_bytes()), reply);
    }

    fn forget(&self, _: &Request, number: INodeNo, times: u64) {
        let mut files = self.files();
        let freed = files.forget(number.0, times);
        self.discard(freed);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.files().attributes(number.0) {
            Ok(attributes) => reply.attr(&ATTRIBUTES_VALID, &attr(&attributes)),
            Err(refusal) => reply.error(errno(refusal)),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        bytes: Option<u64>,
        read: Option<TimeOrNow>,
        written: Option<TimeOrNow>,
        changed: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let now = SystemTime::now();
        let time = |of: TimeOrNow| match of {
            TimeOrNow::SpecificTime(time) => time,
            TimeOrNow::Now => now,
        };
        let permissions = mode.map(permissions);
        let (read, written) = (read.map(time), written.map(time));
        let change = Change { permissions, user, group, bytes, read, written, changed };
        let mut files = self.files();
        let cleared = files.change(number.0, change, now);
        match cleared.and_then(|cleared| Ok((cleared, files.attributes(number.0)?))) {
            Ok((cleared, attributes)) => {
                let attributes = Box::new(attr(&attributes));
                self.clear(cleared, Done::Attributes(reply, ATTRIBUTES_VALID, attributes));
            }
            Err(refusal) => reply.error(errno(refusal)),
        }
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        match self.files().read_link(number.0) {
            Ok(to) => reply.data(to),
            Err(refusal) => reply.error(errno(refusal)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let kind = match mode & libc::S_IFMT {
            libc::S_IFREG => Kind::File,
            kind => Kind::Special { mode: kind, device },
        };
        let owner = owner(request, mode);
        Self::entry(self.files().make(parent.0, name.as_bytes(), kind, owner, SystemTime::now()), reply);
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        let (owner, now) = (owner(request, mode), SystemTime::now());
        Self::entry(self.files().make(parent.0, name.as_bytes(), Kind::Directory, owner, now), reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.removed(parent, name, false, reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.removed(parent, name, true, reply);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, to: &Path, reply: ReplyEntry) {
        let (to, owner) = (to.as_os_str().as_bytes(), owner(request, 0o777));
        Self::entry(self.files().make_link(parent.0, name.as_bytes(), to, owner, SystemTime::now()), reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let onto = match flags {
            RenameFlags::RENAME_NOREPLACE => Onto::Refuse,
            RenameFlags::RENAME_EXCHANGE => Onto::Exchange,
            flags if flags.is_empty() => Onto::Replace,
            _ => return reply.error(Errno::EINVAL),
        };
        let (from, to) = ((parent.0, name.as_bytes()), (new_parent.0, new_name.as_bytes()));
        let mut files = self.files();
        match files.rename(from, to, onto, SystemTime::now()) {
            Ok(freed) => {
                self.discard(freed);
                reply.ok();
            }
            Err(refusal) => reply.error(errno(refusal)),
        }
    }

    fn link(&self, _: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        Self::entry(self.files().link(number.0, parent.0, name.as_bytes(), SystemTime::now()), reply);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let owner = owner(request, mode);
        match self.files().make(parent.0, name.as_bytes(), Kind::File, owner, SystemTime::now()) {
            Ok(made) => {
                let keep = FopenFlags::FOPEN_KEEP_CACHE;
                reply.created(&ATTRIBUTES_VALID, &attr(&made), Generation(0), FileHandle(0), keep);
            }
            Err(refusal) => reply.error(errno(refusal)),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        len: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let files = self.files();
        match files.read(number.0, offset, len.into()) {
            Ok((_, 0)) => reply.data(&[]),
            Ok((pieces, bytes)) => {
                let bytes = usize::try_from(bytes).expect("at most as many as were asked for");
                self.jobs.send(Job::Read { pieces, within: within_page(offset), bytes, reply });
            }
            Err(refusal) => reply.error(errno(refusal)),
        }
    }

    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if data.is_empty() {
            return reply.written(0);
        }
        let (within, bytes) = (within_page(offset), data.len());
        let mut buffer = self.buffers.take((within + bytes).next_multiple_of(OS_PAGE_BYTES));
        buffer[within..within + bytes].copy_from_slice(data);
        let mut files = self.files();
        match files.write(number.0, offset, bytes as u64, SystemTime::now()) {
            Ok(plan) => self.jobs.send(Job::Write { plan, buffer, within, bytes, reply }),
            Err(refusal) => {
                self.buffers.give(buffer);
                reply.error(errno(refusal));
            }
        }
    }

    /// What was written is at the servers: a write is answered only then.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn readdir(&self, _: &Request, number: INodeNo, _: FileHandle, behind: u64, mut reply: ReplyDirectory) {
        let files = self.files();
        let entries = match files.list(number.0, behind) {
            Ok(entries) => entries,
            Err(refusal) => return reply.error(errno(refusal)),
        };
        for entry in entries {
            let kind = files.kind(entry.number).map_or(FileType::Directory, file_type);
            if reply.add(INodeNo(entry.number), entry.place, kind, OsStr::from_bytes(entry.name)) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let totals = self.files().totals();
        let (all, free) = (MOST_INODES as u64, MOST_INODES as u64 - totals.inodes);
        let name = u32::try_from(MOST_NAME_BYTES).expect("255");
        reply.statfs(totals.pages, totals.free_pages, totals.free_pages, all, free, BLOCK, name, BLOCK);
    }

    fn fallocate(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let keeps_len = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let mut files = self.files();
        let cleared = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            0 => files.allocate(number.0, offset, len, keeps_len).map(|()| Cleared::default()),
            libc::FALLOC_FL_PUNCH_HOLE => files.punch(number.0, offset, len, SystemTime::now()),
            // The file gets as long before anything of it is cleared: it fails as a whole.
            libc::FALLOC_FL_ZERO_RANGE => files
                .allocate(number.0, offset, len, keeps_len)
                .and_then(|()| files.punch(number.0, offset, len, SystemTime::now())),
            _ => return reply.error(Errno::EOPNOTSUPP),
        };
        match cleared {
            Ok(cleared) => self.clear(cleared, Done::Empty(reply)),
            Err(refusal) => reply.error(errno(refusal)),
        }
    }
}

fn within_page(offset: u64) -> usize {
    usize::try_from(offset % PAGE).expect("within a page")
}

fn permissions(mode: u32) -> u16 {
    u16::try_from(mode & PERMISSIONS).expect("12 bits")
}

fn owner(request: &Request, mode: u32) -> Owner {
    Owner { user: request.uid(), group: request.gid(), permissions: permissions(mode) }
}

fn errno(refusal: Refusal) -> Errno {
    match refusal {
        Refusal::NotFound => Errno::ENOENT,
        Refusal::Exists => Errno::EEXIST,
        Refusal::NotDirectory => Errno::ENOTDIR,
        Refusal::IsDirectory => Errno::EISDIR,
        Refusal::NotEmpty => Errno::ENOTEMPTY,
        Refusal::NoSpace => Errno::ENOSPC,
        Refusal::TooLong => Errno::EFBIG,
        Refusal::LongName => Errno::ENAMETOOLONG,
        Refusal::ManyLinks => Errno::EMLINK,
        Refusal::Invalid => Errno::EINVAL,
    }
}

fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Link => FileType::Symlink,
        Kind::Special { mode: libc::S_IFIFO, .. } => FileType::NamedPipe,
        Kind::Special { mode: libc::S_IFCHR, .. } => FileType::CharDevice,
        Kind::Special { mode: libc::S_IFBLK, .. } => FileType::BlockDevice,
        Kind::Special { .. } => FileType::Socket,
    }
}

fn attr(of: &Attributes) -> FileAttr {
    let device = if let Kind::Special { device, .. } = of.kind { device } else { 0 };
    FileAttr {
        ino: INodeNo(of.number),
        size: of.bytes,
        blocks: of.pages * (PAGE / 512),
        atime: of.read,
        mtime: of.written,
        ctime: of.changed,
        crtime: of.changed,
        kind: file_type(of.kind),
        perm: of.owner.permissions,
        nlink: of.links,
        uid: of.owner.user,
        gid: of.owner.group,
        rdev: device,
        blksize: BLOCK,
        flags: 0,
    }
}
