//! Names, attributes, and which file has which bytes.

mod directory;

use std::collections::BTreeMap;
use std::time::SystemTime;

use rampool_wire::units::Extent;

use crate::attributes::{Attributes, Change, Kind, Owner};
use crate::bytes::{Bytes, Cleared, Piece, WritePlan};
use crate::refusal::Refusal;
use crate::space::Space;
use crate::{MOST_BYTES, MOST_INODES, MOST_LINKS, MOST_NAME_BYTES};
use directory::Directory;
pub use directory::Entry;

/// The number of the directory that is mounted.
pub const ROOT: u64 = 1;
/// New files of a directory with this bit have its group.
const SET_GROUP: u16 = 0o2000;

/// What a rename does with a name that is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Onto {
    Replace,
    Refuse,
    Exchange,
}

/// What there is in all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Totals {
    pub pages: u64,
    pub free_pages: u64,
    pub inodes: u64,
}

#[derive(Debug)]
enum Content {
    File(Bytes),
    Directory(Directory),
    Link(Vec<u8>),
    Special { mode: u32, device: u32 },
}

#[derive(Debug)]
struct Inode {
    content: Content,
    owner: Owner,
    links: u32,
    /// How often the kernel was told of it, and has not forgotten it. It may be open while this is not 0.
    known: u64,
    read: SystemTime,
    written: SystemTime,
    changed: SystemTime,
}

/// A file system. Invariants: a page belongs to one file or is free; what has no name and is not known to the
/// kernel is gone.
#[derive(Debug)]
pub struct Files {
    inodes: BTreeMap<u64, Inode>,
    next: u64,
    space: Space,
}

impl Files {
    /// An empty file system in these pages, which are discarded. `owner`: of its root.
    #[must_use]
    pub fn new(pages: impl IntoIterator<Item = Extent>, owner: Owner, now: SystemTime) -> Self {
        let root = Inode::new(Content::Directory(Directory::new(ROOT)), owner, 2, now);
        Self { inodes: BTreeMap::from([(ROOT, root)]), next: ROOT + 1, space: Space::new(pages) }
    }

    #[must_use]
    pub fn totals(&self) -> Totals {
        Totals {
            pages: self.space.all_pages(),
            free_pages: self.space.free_pages(),
            inodes: self.inodes.len() as u64,
        }
    }

    /// The file of this name; the kernel knows it once more.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn look_up(&mut self, directory: u64, name: &[u8]) -> Result<Attributes, Refusal> {
        let number = self.directory(directory)?.find(name)?;
        self.learn(number)
    }

    fn learn(&mut self, number: u64) -> Result<Attributes, Refusal> {
        self.inode_mut(number)?.known += 1;
        self.attributes(number)
    }

    /// The kernel has forgotten a file so often; the pages to discard.
    pub fn forget(&mut self, number: u64, times: u64) -> Vec<Extent> {
        if let Ok(inode) = self.inode_mut(number) {
            inode.known = inode.known.saturating_sub(times);
        }
        self.end_if_gone(number)
    }

    /// # Errors
    /// [`Refusal`].
    pub fn attributes(&self, number: u64) -> Result<Attributes, Refusal> {
        let inode = self.inode(number)?;
        let (kind, bytes, pages) = match &inode.content {
            Content::File(bytes) => (Kind::File, bytes.len, bytes.pages()),
            Content::Directory(directory) => (Kind::Directory, directory.len() as u64, 0),
            Content::Link(to) => (Kind::Link, to.len() as u64, 0),
            Content::Special { mode, device } => (Kind::Special { mode: *mode, device: *device }, 0, 0),
        };
        let Inode { owner, links, read, written, changed, .. } = *inode;
        Ok(Attributes { number, kind, bytes, pages, links, owner, read, written, changed })
    }

    /// # Errors
    /// [`Refusal`]; nothing is changed then.
    pub fn change(&mut self, number: u64, to: Change, now: SystemTime) -> Result<Cleared, Refusal> {
        let mut cleared = Cleared::default();
        if let Some(len) = to.bytes {
            let (bytes, space) = self.bytes(number)?;
            cleared = bytes.set_len(space, len)?;
        }
        let inode = self.inode_mut(number)?;
        inode.owner.permissions = to.permissions.unwrap_or(inode.owner.permissions);
        inode.owner.user = to.user.unwrap_or(inode.owner.user);
        inode.owner.group = to.group.unwrap_or(inode.owner.group);
        inode.read = to.read.unwrap_or(inode.read);
        inode.written = to.written.unwrap_or(if to.bytes.is_some() { now } else { inode.written });
        inode.changed = to.changed.unwrap_or(now);
        Ok(cleared)
    }

    /// A new file, which the kernel knows. `Kind::Link` is made by [`Files::make_link`].
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn make(
        &mut self,
        directory: u64,
        name: &[u8],
        kind: Kind,
        owner: Owner,
        now: SystemTime,
    ) -> Result<Attributes, Refusal> {
        let content = match kind {
            Kind::File => Content::File(Bytes::default()),
            Kind::Directory => Content::Directory(Directory::new(directory)),
            Kind::Link => return Err(Refusal::Invalid),
            Kind::Special { mode, device } => Content::Special { mode, device },
        };
        self.add(directory, name, content, owner, now)
    }

    /// A new symbolic link, which the kernel knows.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn make_link(
        &mut self,
        directory: u64,
        name: &[u8],
        to: &[u8],
        owner: Owner,
        now: SystemTime,
    ) -> Result<Attributes, Refusal> {
        self.add(directory, name, Content::Link(to.to_vec()), owner, now)
    }

    fn add(
        &mut self,
        directory: u64,
        name: &[u8],
        content: Content,
        mut owner: Owner,
        now: SystemTime,
    ) -> Result<Attributes, Refusal> {
        let of = self.inode(directory)?.owner;
        let is_directory = matches!(content, Content::Directory(_));
        if of.permissions & SET_GROUP != 0 {
            owner.group = of.group;
            owner.permissions |= if is_directory { SET_GROUP } else { 0 };
        }
        if self.inodes.len() >= MOST_INODES {
            return Err(Refusal::NoSpace);
        }
        let number = self.next;
        self.insert(directory, name, number)?;
        self.next += 1;
        let links = if is_directory { 2 } else { 1 };
        self.inodes.insert(number, Inode::new(content, owner, links, now));
        self.touch(directory, now);
        if is_directory {
            self.inode_mut(directory)?.links += 1;
        }
        self.learn(number)
    }

    /// One more name of a file; the kernel knows it once more.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn link(
        &mut self,
        number: u64,
        directory: u64,
        name: &[u8],
        now: SystemTime,
    ) -> Result<Attributes, Refusal> {
        let inode = self.inode(number)?;
        match inode.content {
            Content::Directory(_) => return Err(Refusal::IsDirectory),
            // One without a name stays so.
            _ if inode.links == 0 => return Err(Refusal::NotFound),
            _ if inode.links >= MOST_LINKS => return Err(Refusal::ManyLinks),
            _ => {}
        }
        self.insert(directory, name, number)?;
        let inode = self.inode_mut(number)?;
        (inode.links, inode.changed) = (inode.links + 1, now);
        self.touch(directory, now);
        self.learn(number)
    }

    fn insert(&mut self, directory: u64, name: &[u8], number: u64) -> Result<(), Refusal> {
        if name.len() > MOST_NAME_BYTES {
            return Err(Refusal::LongName);
        }
        let inode = self.inode(directory)?;
        if inode.links == 0 {
            return Err(Refusal::NotFound);
        }
        self.directory_mut(directory)?.insert(name, number)
    }

    /// Takes a name away; the pages to discard, if that was the last one and nobody knows the file.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn remove(
        &mut self,
        directory: u64,
        name: &[u8],
        is_directory: bool,
        now: SystemTime,
    ) -> Result<Vec<Extent>, Refusal> {
        let number = self.directory(directory)?.find(name)?;
        match &self.inode(number)?.content {
            Content::Directory(_) if !is_directory => return Err(Refusal::IsDirectory),
            Content::Directory(of) if of.len() > 0 => return Err(Refusal::NotEmpty),
            Content::Directory(_) => {}
            _ if is_directory => return Err(Refusal::NotDirectory),
            _ => {}
        }
        self.directory_mut(directory)?.remove(name);
        self.touch(directory, now);
        Ok(self.lose_name(number, directory, now))
    }

    /// A file has one name less, which was in this directory.
    fn lose_name(&mut self, number: u64, directory: u64, now: SystemTime) -> Vec<Extent> {
        let Ok(inode) = self.inode_mut(number) else { return Vec::new() };
        inode.changed = now;
        if matches!(inode.content, Content::Directory(_)) {
            inode.links = 0;
            if let Ok(parent) = self.inode_mut(directory) {
                parent.links -= 1;
            }
        } else {
            inode.links -= 1;
        }
        self.end_if_gone(number)
    }

    fn end_if_gone(&mut self, number: u64) -> Vec<Extent> {
        if self.inodes.get(&number).is_none_or(|inode| inode.links > 0 || inode.known > 0) {
            return Vec::new();
        }
        match self.inodes.remove(&number).map(|inode| inode.content) {
            Some(Content::File(bytes)) => bytes.free(&mut self.space),
            _ => Vec::new(),
        }
    }

    /// Gives a file another name; the pages to discard, as of [`Files::remove`].
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn rename(
        &mut self,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        onto: Onto,
        now: SystemTime,
    ) -> Result<Vec<Extent>, Refusal> {
        let number = self.directory(from.0)?.find(from.1)?;
        let taken = match self.directory(to.0)?.find(to.1) {
            Ok(taken) => Some(taken),
            Err(Refusal::NotFound) if onto != Onto::Exchange => None,
            Err(refusal) => return Err(refusal),
        };
        if to.1.len() > MOST_NAME_BYTES {
            return Err(Refusal::LongName);
        }
        if self.inode(to.0)?.links == 0 {
            return Err(Refusal::NotFound);
        }
        if self.is_within(to.0, number)
            || onto == Onto::Exchange && taken.is_some_and(|of| self.is_within(from.0, of))
        {
            return Err(Refusal::Invalid);
        }
        match taken {
            Some(taken) if taken == number && onto != Onto::Refuse => return Ok(Vec::new()),
            Some(_) if onto == Onto::Refuse => return Err(Refusal::Exists),
            Some(taken) if onto == Onto::Replace => self.may_replace(number, taken)?,
            _ => {}
        }
        let mut freed = Vec::new();
        self.directory_mut(from.0)?.remove(from.1);
        if taken.is_some() {
            self.directory_mut(to.0)?.remove(to.1);
        }
        self.directory_mut(to.0)?.insert(to.1, number).expect("the name is free");
        self.move_to(number, from.0, to.0, now);
        match taken {
            Some(taken) if onto == Onto::Exchange => {
                self.directory_mut(from.0)?.insert(from.1, taken).expect("the name is free");
                self.move_to(taken, to.0, from.0, now);
            }
            Some(taken) => freed = self.lose_name(taken, to.0, now),
            None => {}
        }
        self.touch(from.0, now);
        self.touch(to.0, now);
        Ok(freed)
    }

    fn may_replace(&self, number: u64, taken: u64) -> Result<(), Refusal> {
        let is_directory = matches!(self.inode(number)?.content, Content::Directory(_));
        match &self.inode(taken)?.content {
            Content::Directory(of) if of.len() > 0 && is_directory => Err(Refusal::NotEmpty),
            Content::Directory(_) if !is_directory => Err(Refusal::IsDirectory),
            Content::Directory(_) => Ok(()),
            _ if is_directory => Err(Refusal::NotDirectory),
            _ => Ok(()),
        }
    }

    /// Whether a directory is another one, or lies in it.
    fn is_within(&self, mut directory: u64, other: u64) -> bool {
        loop {
            if directory == other {
                return true;
            }
            match self.directory(directory) {
                Ok(of) if directory != ROOT => directory = of.parent,
                _ => return false,
            }
        }
    }

    fn move_to(&mut self, number: u64, from: u64, to: u64, now: SystemTime) {
        if let Ok(inode) = self.inode_mut(number) {
            inode.changed = now;
            if let Content::Directory(directory) = &mut inode.content {
                directory.parent = to;
                self.inode_mut(from).expect("it was found").links -= 1;
                self.inode_mut(to).expect("it was found").links += 1;
            }
        }
    }

    /// Where a symbolic link leads.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn read_link(&self, number: u64) -> Result<&[u8], Refusal> {
        match &self.inode(number)?.content {
            Content::Link(to) => Ok(to),
            _ => Err(Refusal::Invalid),
        }
    }

    /// The names of a directory from behind a place on ([`Entry::place`]; 0: all).
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn list(&self, number: u64, behind: u64) -> Result<impl Iterator<Item = Entry<'_>>, Refusal> {
        Ok(self.directory(number)?.list(number, behind))
    }

    /// What an inode is, for a list.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn kind(&self, number: u64) -> Result<Kind, Refusal> {
        Ok(self.attributes(number)?.kind)
    }

    /// The pages of bytes from `offset` on, and how many bytes there are.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn read(&self, number: u64, offset: u64, len: u64) -> Result<(Vec<Piece>, u64), Refusal> {
        match &self.inode(number)?.content {
            Content::File(bytes) => Ok(bytes.read(offset, len)),
            Content::Directory(_) => Err(Refusal::IsDirectory),
            _ => Err(Refusal::Invalid),
        }
    }

    /// Takes pages for bytes from `offset` on; the file is at least as long afterwards.
    ///
    /// # Errors
    /// [`Refusal`]; nothing is changed then.
    pub fn write(
        &mut self,
        number: u64,
        offset: u64,
        len: u64,
        now: SystemTime,
    ) -> Result<WritePlan, Refusal> {
        let (bytes, space) = self.bytes(number)?;
        let plan = bytes.write(space, offset, len)?;
        let inode = self.inode_mut(number)?;
        (inode.written, inode.changed) = (now, now);
        Ok(plan)
    }

    /// Takes pages for a range; the file gets as long, unless `keep_len`.
    ///
    /// # Errors
    /// [`Refusal`]; nothing is changed then.
    pub fn allocate(&mut self, number: u64, offset: u64, len: u64, keep_len: bool) -> Result<(), Refusal> {
        let end = end_of(offset, len)?;
        let (bytes, space) = self.bytes(number)?;
        bytes.allocate(space, offset / crate::PAGE..end.div_ceil(crate::PAGE))?;
        if !keep_len {
            bytes.len = bytes.len.max(end);
        }
        Ok(())
    }

    /// Makes a range zero, and gives its pages back.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn punch(&mut self, number: u64, offset: u64, len: u64, now: SystemTime) -> Result<Cleared, Refusal> {
        let end = end_of(offset, len)?;
        let (bytes, space) = self.bytes(number)?;
        let cleared = bytes.clear(space, offset..end);
        let inode = self.inode_mut(number)?;
        (inode.written, inode.changed) = (now, now);
        Ok(cleared)
    }

    fn inode(&self, number: u64) -> Result<&Inode, Refusal> {
        self.inodes.get(&number).ok_or(Refusal::NotFound)
    }

    fn inode_mut(&mut self, number: u64) -> Result<&mut Inode, Refusal> {
        self.inodes.get_mut(&number).ok_or(Refusal::NotFound)
    }

    fn directory(&self, number: u64) -> Result<&Directory, Refusal> {
        match &self.inode(number)?.content {
            Content::Directory(directory) => Ok(directory),
            _ => Err(Refusal::NotDirectory),
        }
    }

    fn directory_mut(&mut self, number: u64) -> Result<&mut Directory, Refusal> {
        match &mut self.inode_mut(number)?.content {
            Content::Directory(directory) => Ok(directory),
            _ => Err(Refusal::NotDirectory),
        }
    }

    fn bytes(&mut self, number: u64) -> Result<(&mut Bytes, &mut Space), Refusal> {
        let inode = self.inodes.get_mut(&number).ok_or(Refusal::NotFound)?;
        match &mut inode.content {
            Content::File(bytes) => Ok((bytes, &mut self.space)),
            Content::Directory(_) => Err(Refusal::IsDirectory),
            _ => Err(Refusal::Invalid),
        }
    }

    fn touch(&mut self, directory: u64, now: SystemTime) {
        if let Ok(inode) = self.inode_mut(directory) {
            (inode.written, inode.changed) = (now, now);
        }
    }

    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        self.space.check();
        let mut names: BTreeMap<u64, u32> = BTreeMap::new();
        let mut used: Vec<Extent> = Vec::new();
        for (number, inode) in &self.inodes {
            assert!(inode.links > 0 || inode.known > 0, "{number} is gone");
            match &inode.content {
                Content::File(bytes) => used.extend(bytes.runs()),
                Content::Directory(directory) => {
                    let named = directory.list(*number, directory::PLACES);
                    named.for_each(|entry| *names.entry(entry.number).or_default() += 1);
                }
                _ => {}
            }
        }
        for (number, inode) in &self.inodes {
            let named = names.remove(number).unwrap_or(0);
            match inode.content {
                Content::Directory(_) => assert!(named == u32::from(inode.links > 0 && *number != ROOT)),
                _ => assert_eq!(inode.links, named, "the names of {number}"),
            }
        }
        assert!(names.is_empty(), "what has a name is there");
        used.sort_unstable();
        assert!(used.windows(2).all(|pair| pair[0].end() <= pair[1].first), "a page belongs to one file");
        let sum: u64 = used.iter().map(|run| u64::from(run.count)).sum();
        assert_eq!(sum + self.space.free_pages(), self.space.all_pages(), "no page is lost");
    }
}

impl Inode {
    fn new(content: Content, owner: Owner, links: u32, now: SystemTime) -> Self {
        Self { content, owner, links, known: 0, read: now, written: now, changed: now }
    }
}

fn end_of(offset: u64, len: u64) -> Result<u64, Refusal> {
    offset.checked_add(len).filter(|end| *end <= MOST_BYTES).ok_or(Refusal::TooLong)
}
