//! The named regions of a lease as files, for reading. What a name stands for was asked of the servers at
//! most [`FRESH`] ago; bytes come by gets of the direct view, and are not kept from one opening to the next.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyOpen, Request,
};
use rampool_client::direct::{Direct, DirectError, DirectRegion};
use rampool_files::{MOST_NAME_BYTES, Owner, ROOT};

use super::kernel_files::{BLOCK, REQUEST_BYTES};

/// How old the list of regions may be.
pub const FRESH: Duration = Duration::from_secs(1);
/// So begin the names of regions that rampool's own packages keep for themselves.
const OWN: &str = "rampool.";
/// A file's number is that of its region and so much more.
const FIRST: u64 = ROOT + 1;

struct Known {
    name: String,
    bytes: u64,
    opened: Option<DirectRegion>,
}

pub struct Regions {
    direct: Direct,
    /// By their numbers.
    known: BTreeMap<u64, Known>,
    listed: Option<Instant>,
    buffer: Vec<u8>,
}

impl Regions {
    pub fn new(direct: Direct) -> Self {
        Self { direct, known: BTreeMap::new(), listed: None, buffer: Vec::new() }
    }

    /// Keeps the connections alive while no file is used.
    pub fn progress(&mut self) {
        self.direct.progress();
    }

    pub fn close(&mut self) {
        self.direct.close();
    }

    fn refresh(&mut self) -> Result<(), DirectError> {
        if self.listed.is_some_and(|listed| listed.elapsed() < FRESH) {
            return Ok(());
        }
        let mut before = std::mem::take(&mut self.known);
        for region in self.direct.named()?.into_iter().filter(|region| !region.name.starts_with(OWN)) {
            let opened = before.remove(&region.region.0).and_then(|known| known.opened);
            let known = Known { name: region.name, bytes: region.bytes, opened };
            self.known.insert(region.region.0, known);
        }
        self.listed = Some(Instant::now());
        Ok(())
    }

    fn read(&mut self, number: u64, offset: u64, len: u32) -> Result<&[u8], Errno> {
        let known = self.known.get_mut(&number).ok_or(Errno::ESTALE)?;
        let len = known.bytes.saturating_sub(offset).min(len.into());
        let len = usize::try_from(len).expect("at most 32 bits");
        self.buffer.resize(self.buffer.len().max(len), 0);
        if len == 0 {
            return Ok(&[]);
        }
        let region = match known.opened {
            Some(region) => region,
            None => *known.opened.insert(self.direct.open(&known.name).map_err(|error| errno(&error))?),
        };
        let into = &mut self.buffer[..len];
        self.direct.get(region, offset, into).map_err(|error| errno(&error))?;
        Ok(into)
    }
}

/// The region is gone, or a server is, or does not do what it should.
fn errno(error: &DirectError) -> Errno {
    match error {
        DirectError::NoSuchName { .. } | DirectError::NoSuchRegion => Errno::ESTALE,
        _ => Errno::EIO,
    }
}

/// A region's name as that of a file: what no name of a file has becomes `%` and its number.
fn shown(name: &str) -> Cow<'_, str> {
    let is_bad = |char: char| matches!(char, '/' | '%') || char.is_control();
    if !name.contains(is_bad) && name != "." && name != ".." {
        return name.into();
    }
    let dots = name.chars().all(|char| char == '.');
    let shown = name.chars().map(|char| match char {
        char if is_bad(char) || dots => {
            char.to_string().bytes().map(|byte| format!("%{byte:02X}")).collect::<String>()
        }
        char => char.to_string(),
    });
    shown.collect::<String>().into()
}

pub struct RegionFiles {
    regions: Arc<Mutex<Regions>>,
    owner: Owner,
    since: SystemTime,
    /// Told when nothing is mounted any more.
    ends: Sender<()>,
}

impl RegionFiles {
    pub fn new(regions: Arc<Mutex<Regions>>, owner: Owner, ends: Sender<()>) -> Self {
        Self { regions, owner, since: SystemTime::now(), ends }
    }

    fn regions(&self) -> MutexGuard<'_, Regions> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attr(&self, number: u64, bytes: u64) -> FileAttr {
        let is_root = number == ROOT;
        FileAttr {
            ino: INodeNo(number),
            size: bytes,
            blocks: bytes.div_ceil(512),
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind: if is_root { FileType::Directory } else { FileType::RegularFile },
            perm: self.owner.permissions & if is_root { 0o555 } else { 0o444 },
            nlink: if is_root { 2 } else { 1 },
            uid: self.owner.user,
            gid: self.owner.group,
            rdev: 0,
            blksize: BLOCK,
            flags: 0,
        }
    }
}

impl Filesystem for RegionFiles {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        if let Err(most) = config.set_max_readahead(REQUEST_BYTES) {
            _ = config.set_max_readahead(most);
        }
        Ok(())
    }

    fn destroy(&mut self) {
        _ = self.ends.send(());
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut regions = self.regions();
        if let Err(error) = regions.refresh() {
            return reply.error(errno(&error));
        }
        match regions.known.iter().find(|(_, known)| *shown(&known.name) == *name) {
            Some((number, known)) => {
                reply.entry(&Duration::ZERO, &self.attr(number + FIRST, known.bytes), Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        if number.0 == ROOT {
            return reply.attr(&FRESH, &self.attr(ROOT, 0));
        }
        let mut regions = self.regions();
        let refreshed = regions.refresh();
        match regions.known.get(&(number.0 - FIRST)) {
            Some(known) => reply.attr(&Duration::ZERO, &self.attr(number.0, known.bytes)),
            None => reply.error(refreshed.map_or_else(|error| errno(&error), |()| Errno::ESTALE)),
        }
    }

    /// The kernel forgets what it has read before: others write.
    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
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
        match self.regions().read(number.0 - FIRST, offset, len) {
            Ok(bytes) => reply.data(bytes),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, behind: u64, mut reply: ReplyDirectory) {
        let mut regions = self.regions();
        if let Err(error) = regions.refresh() {
            return reply.error(errno(&error));
        }
        let dots = [(".", ROOT, FileType::Directory), ("..", ROOT, FileType::Directory)];
        let named = regions.known.iter().map(|(number, known)| (shown(&known.name), number + FIRST));
        let named = named.filter(|(name, _)| name.len() <= MOST_NAME_BYTES);
        let dots = dots.into_iter().map(|(name, number, kind)| (Cow::from(name), number, kind));
        let all = dots.chain(named.map(|(name, number)| (name, number, FileType::RegularFile)));
        let behind = usize::try_from(behind).unwrap_or(usize::MAX);
        for (place, (name, number, kind)) in (1..).zip(all).skip(behind) {
            if reply.add(INodeNo(number), place, kind, &*name) {
                break;
            }
        }
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_of_any_name_is_a_file() {
        for (name, file) in
            [("orders", "orders"), ("a/b", "a%2Fb"), ("5%", "5%25"), ("..", "%2E%2E"), ("...", "...")]
        {
            assert_eq!(shown(name), file);
        }
        assert_eq!(shown("a\u{7f}\0é"), "a%7F%00é");
    }
}
