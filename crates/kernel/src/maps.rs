//! What this process has mapped, and which of its pages are present.

use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};

use linux_raw_sys::general as k;

use crate::OS_PAGE_BYTES;

/// One line of /proc/self/maps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vma {
    pub start: usize,
    pub end: usize,
    pub readable: bool,
    pub writable: bool,
    pub private: bool,
    pub kind: VmaKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VmaKind {
    /// No file and no name (or a name given by prctl).
    Anonymous,
    Heap,
    MainStack,
    /// `[vdso]`, `[vvar]` and other things of the kernel's.
    Kernel,
    File,
}

impl Vma {
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.end - self.start
    }

    /// Private memory without a file, open for reading and writing.
    #[must_use]
    pub fn is_private_memory(&self) -> bool {
        self.private
            && self.readable
            && self.writable
            && matches!(self.kind, VmaKind::Anonymous | VmaKind::Heap)
    }
}

/// Reads the whole map, in the order of addresses. Needs no memory but the stack's: there may be tens of
/// thousands of mappings, and no room for one more.
///
/// # Errors
/// When /proc is not mounted.
pub fn read_maps(mut each: impl FnMut(&Vma)) -> std::io::Result<()> {
    let mut file = crate::procfs::open("maps")?;
    // Longer than any line: a path has at most 4096 bytes, of which each may be written as four.
    let mut text = [0u8; 32 << 10];
    let mut have = 0;
    loop {
        let n = file.read(&mut text[have..])?;
        have += n;
        let mut rest = &text[..have];
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            if let Some(vma) = parse_line(&rest[..end]) {
                each(&vma);
            }
            rest = &rest[end + 1..];
        }
        if n == 0 {
            return Ok(());
        }
        let left = rest.len();
        text.copy_within(have - left..have, 0);
        have = left;
    }
}

/// Looks single mappings up.
#[derive(Debug)]
pub struct Maps {
    file: std::fs::File,
}

impl Maps {
    /// # Errors
    /// When /proc cannot be read.
    pub fn open() -> std::io::Result<Self> {
        Ok(Self { file: crate::procfs::open("maps")? })
    }

    /// The mapping that has `address`, or else the next one above. Asks the kernel for this one alone (Linux
    /// 6.11), and reads the whole map on older kernels.
    #[must_use]
    pub fn from(&self, address: usize) -> Option<Vma> {
        match self.query(address) {
            Ok(vma) => Some(vma),
            Err(libc::ENOENT) => None,
            Err(_) => read_from(address),
        }
    }

    /// The mapping that has `address`.
    #[must_use]
    pub fn at(&self, address: usize) -> Option<Vma> {
        self.from(address).filter(|vma| vma.start <= address)
    }

    fn query(&self, address: usize) -> Result<Vma, i32> {
        // What has a longer name is a file.
        let mut name = [0u8; 256];
        // SAFETY: plain data.
        let mut query: k::procmap_query = unsafe { std::mem::zeroed() };
        query.size = size_of::<k::procmap_query>() as u64;
        query.query_flags = k::procmap_query_flags::PROCMAP_QUERY_COVERING_OR_NEXT_VMA as u64;
        query.query_addr = address as u64;
        query.vma_name_addr = (&raw mut name).expose_provenance() as u64;
        query.vma_name_size = u32::try_from(name.len()).expect("a short buffer");
        const PROCMAP_QUERY: u64 =
            (3 << 30) | ((size_of::<k::procmap_query>() as u64) << 16) | ((b'f' as u64) << 8) | 17;
        // SAFETY: the argument and the buffer it points to live across the call, with their true sizes.
        if unsafe { libc::ioctl(self.file.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) } != 0 {
            return Err(crate::last_errno());
        }
        let has = |flag: k::procmap_query_flags| query.vma_flags & flag as u64 != 0;
        // Its length counts the zero behind it; a mapping without a name has none.
        let name = std::ffi::CStr::from_bytes_until_nul(&name)
            .map_or(&[][..], |name| if query.vma_name_size == 0 { &[] } else { name.to_bytes() });
        Ok(Vma {
            start: usize::try_from(query.vma_start).expect("an address"),
            end: usize::try_from(query.vma_end).expect("an address"),
            readable: has(k::procmap_query_flags::PROCMAP_QUERY_VMA_READABLE),
            writable: has(k::procmap_query_flags::PROCMAP_QUERY_VMA_WRITABLE),
            private: !has(k::procmap_query_flags::PROCMAP_QUERY_VMA_SHARED),
            kind: kind_of(name, query.inode != 0),
        })
    }
}

fn read_from(address: usize) -> Option<Vma> {
    let mut found = None;
    let read = read_maps(|vma| {
        if found.is_none() && address < vma.end {
            found = Some(*vma);
        }
    });
    read.ok().and(found)
}

/// Calls `each` with every mapping whose pages the kernel may merge with others (KSM), for a process where
/// there is one; returns at once where there is none. Before Linux 6.16 it returns at once until the kernel
/// has looked at one.
///
/// # Errors
/// When /proc cannot be read, or the kernel merges no pages.
pub fn mergeable(mut each: impl FnMut(usize, usize)) -> std::io::Result<()> {
    let mut text = [0u8; 1024];
    let length = crate::procfs::open("ksm_stat")?.read(&mut text)?;
    let text = &text[..length];
    let value = |name: &str| {
        let lines = text.split(|b| *b == b'\n');
        lines.filter_map(|line| line.strip_prefix(name.as_bytes())).map(<[u8]>::trim_ascii).next()
    };
    let may = match value("ksm_mergeable:") {
        Some(answer) => answer == b"yes",
        None => value("ksm_rmap_items").is_some_and(|items| items != b"0"),
    };
    if may { mappings_with(&[b"mg"], |start, end, _| each(start, end)) } else { Ok(()) }
}

/// Whether the kernel merges pages on this machine now (`/sys/kernel/mm/ksm/run`).
///
/// # Errors
/// `NotFound` where it cannot; others where it does not say now, as for want of a descriptor.
pub fn merges_pages() -> std::io::Result<bool> {
    let mut text = [0u8; 8];
    let length = std::fs::File::open("/sys/kernel/mm/ksm/run")?.read(&mut text)?;
    Ok(!text[..length].starts_with(b"0"))
}

/// Calls `each` with every mapping that has one of these flags, and which of them.
fn mappings_with<const N: usize>(
    names: &[&[u8]; N],
    mut each: impl FnMut(usize, usize, [bool; N]),
) -> std::io::Result<()> {
    let mut text = Vec::new();
    crate::procfs::open("smaps")?.read_to_end(&mut text)?;
    let mut range = None;
    for line in text.split(|b| *b == b'\n') {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let Some((start, end)) = range else { continue };
            let has = names.map(|name| flags.split(|b| *b == b' ').any(|flag| flag == name));
            if has.contains(&true) {
                each(start, end, has);
            }
        } else if line.first().is_some_and(u8::is_ascii_hexdigit)
            && let Some(vma) = parse_line(line)
        {
            range = Some((vma.start, vma.end));
        }
    }
    Ok(())
}

/// What a forked child does not get of this process's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotInherited {
    /// It is not there at all (`MADV_DONTFORK`). `watched`: a userfaultfd context has it.
    Missing { start: usize, end: usize, watched: bool },
    /// It is there and reads as zeroes (`MADV_WIPEONFORK`).
    Wiped { start: usize, end: usize },
}

/// Reads which memory a forked child does not inherit. The kernel walks all page tables for the answer.
///
/// # Errors
/// When /proc cannot be read.
pub fn not_inherited() -> std::io::Result<Vec<NotInherited>> {
    let mut found = Vec::new();
    mappings_with(&[b"dc", b"wf", b"um"], |start, end, [missing, wiped, watched]| {
        // Both may hold: what is not there now is wiped once it is made inheritable for a fork.
        if missing {
            found.push(NotInherited::Missing { start, end, watched });
        }
        if wiped {
            found.push(NotInherited::Wiped { start, end });
        }
    })?;
    Ok(found)
}

fn parse_line(line: &[u8]) -> Option<Vma> {
    let mut fields = line.split(|b| *b == b' ').filter(|f| !f.is_empty());
    let mut range = fields.next()?.split(|b| *b == b'-');
    let (start, end) = (hex(range.next()?)?, hex(range.next()?)?);
    let mode = fields.next()?;
    let (_offset, _device) = (fields.next()?, fields.next()?);
    let inode = fields.next()?;
    let name = fields.next().unwrap_or(b"");
    let kind = kind_of(name, inode != b"0");
    Some(Vma {
        start,
        end,
        readable: mode.first() == Some(&b'r'),
        writable: mode.get(1) == Some(&b'w'),
        private: mode.get(3) == Some(&b'p'),
        kind,
    })
}

fn kind_of(name: &[u8], has_inode: bool) -> VmaKind {
    match name {
        b"[heap]" => VmaKind::Heap,
        b"[stack]" => VmaKind::MainStack,
        _ if name.starts_with(b"[anon:") || (name.is_empty() && !has_inode) => VmaKind::Anonymous,
        _ if name.starts_with(b"[") => VmaKind::Kernel,
        _ => VmaKind::File,
    }
}

fn hex(digits: &[u8]) -> Option<usize> {
    usize::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// In an entry of a page map.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;

/// Asks the kernel which pages are there.
#[derive(Debug)]
pub struct Pagemap {
    /// None for a process that may not read its own page map: after giving up its rights, a process may not
    /// even be inspected by itself.
    fd: Option<OwnedFd>,
}

/// A run of present pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PresentRun {
    pub start: usize,
    pub bytes: usize,
}

impl Pagemap {
    /// # Errors
    /// When /proc is not mounted.
    pub fn open() -> std::io::Result<Self> {
        match crate::procfs::open("pagemap") {
            Ok(file) => Ok(Self { fd: Some(file.into()) }),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Ok(Self { fd: None }),
            Err(error) => Err(error),
        }
    }

    /// Asks `mincore` alone.
    #[must_use]
    pub fn without() -> Self {
        Self { fd: None }
    }

    /// Whether it knows what the kernel has swapped out as well.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.fd.is_some()
    }

    /// Whether the page table has something at this page: a page, the shared zero page, one that the kernel
    /// swapped out or is just moving to another place.
    ///
    /// # Errors
    /// The errno of a page map that cannot be read.
    pub fn has(&self, page: usize) -> Result<bool, i32> {
        let fd = self.fd.as_ref().ok_or(libc::EACCES)?;
        let mut entry = 0u64;
        // SAFETY: the buffer is ours, and as long as is asked for.
        let n = unsafe {
            libc::pread(
                fd.as_raw_fd(),
                (&raw mut entry).cast(),
                8,
                i64::try_from(page / OS_PAGE_BYTES * 8).expect("an offset"),
            )
        };
        match n {
            8 => Ok(entry & (PRESENT | SWAPPED) != 0),
            0.. => Err(libc::EIO),
            _ => Err(crate::last_errno()),
        }
    }

    /// The runs of pages in `[start, end)` that are present or swapped out by the kernel, in address order.
    /// The shared zero page does not count: nothing is lost with it.
    ///
    /// Uses PAGEMAP_SCAN (Linux 6.7), reads the page map itself on older kernels, and asks `mincore` where
    /// neither is allowed (which takes the shared zero page for a page, and does not see what the kernel
    /// swapped out).
    pub fn present_runs(&self, start: usize, end: usize, out: &mut Vec<PresentRun>) {
        match &self.fd {
            Some(fd) if self.scan(fd, start, end, out) => {}
            Some(fd) => self.read(fd, start, end, out),
            None => in_core(start, end, out),
        }
    }

    fn scan(&self, fd: &OwnedFd, start: usize, end: usize, out: &mut Vec<PresentRun>) -> bool {
        const PAGEMAP_SCAN: u64 =
            (3 << 30) | ((size_of::<k::pm_scan_arg>() as u64) << 16) | ((b'f' as u64) << 8) | 16;
        let mut at = start;
        while at < end {
            // SAFETY: plain data.
            let mut regions: [k::page_region; 128] = unsafe { std::mem::zeroed() };
            // SAFETY: plain data.
            let mut arg: k::pm_scan_arg = unsafe { std::mem::zeroed() };
            arg.size = size_of::<k::pm_scan_arg>() as u64;
            arg.start = at as u64;
            arg.end = end as u64;
            arg.vec = regions.as_mut_ptr() as u64;
            arg.vec_len = regions.len() as u64;
            arg.category_anyof_mask = u64::from(k::PAGE_IS_PRESENT | k::PAGE_IS_SWAPPED);
            arg.category_mask = u64::from(k::PAGE_IS_PFNZERO);
            arg.category_inverted = u64::from(k::PAGE_IS_PFNZERO);
            arg.return_mask = u64::from(k::PAGE_IS_PRESENT);
            // SAFETY: the argument and the region buffer it points to live across the call, with their true
            // sizes.
            let n = unsafe { libc::ioctl(fd.as_raw_fd(), PAGEMAP_SCAN as _, &raw mut arg) };
            let Ok(n) = usize::try_from(n) else { return false };
            for region in &regions[..n] {
                let (from, to) = (region.start, region.end);
                push(
                    out,
                    usize::try_from(from).expect("an address"),
                    usize::try_from(to).expect("an address"),
                );
            }
            let walked = usize::try_from(arg.walk_end).expect("an address");
            if walked <= at {
                break;
            }
            at = walked;
        }
        true
    }

    fn read(&self, fd: &OwnedFd, start: usize, end: usize, out: &mut Vec<PresentRun>) {
        let mut entries = [0u64; 512];
        let mut page = start / OS_PAGE_BYTES;
        let last = end / OS_PAGE_BYTES;
        while page < last {
            let want = entries.len().min(last - page);
            // SAFETY: the buffer is ours and at least `want` entries long.
            let n = unsafe {
                libc::pread(
                    fd.as_raw_fd(),
                    entries.as_mut_ptr().cast(),
                    want * 8,
                    i64::try_from(page * 8).expect("an offset"),
                )
            };
            let Ok(n) = usize::try_from(n) else { return };
            if n == 0 {
                return;
            }
            for entry in &entries[..n / 8] {
                if entry & (PRESENT | SWAPPED) != 0 {
                    push(out, page * OS_PAGE_BYTES, (page + 1) * OS_PAGE_BYTES);
                }
                page += 1;
            }
        }
    }
}

/// Which pages of `[start, end)` are there, by `mincore`: pages that the kernel moves about in physical
/// memory at this moment count as there, those that it swapped out do not.
fn in_core(start: usize, end: usize, out: &mut Vec<PresentRun>) {
    let mut vector = [0u8; 4096];
    let mut at = start;
    while at < end {
        let bytes = (end - at).min(vector.len() * OS_PAGE_BYTES);
        // SAFETY: the vector has a byte for each page asked for; no memory is touched.
        let rc = unsafe { libc::syscall(libc::SYS_mincore, at, bytes, vector.as_mut_ptr()) };
        if rc == 0 {
            for (index, flags) in vector[..bytes / OS_PAGE_BYTES].iter().enumerate() {
                if flags & 1 != 0 {
                    push(out, at + index * OS_PAGE_BYTES, at + (index + 1) * OS_PAGE_BYTES);
                }
            }
        }
        at += bytes;
    }
}

fn push(out: &mut Vec<PresentRun>, start: usize, end: usize) {
    match out.last_mut() {
        Some(last) if last.start + last.bytes == start => last.bytes = end - last.start,
        _ => out.push(PresentRun { start, bytes: end - start }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Mapping;

    #[test]
    fn maps_lists_our_mapping_as_private_anonymous() {
        let memory = Mapping::anonymous(1 << 20).unwrap();
        // More text than is read at a time.
        let many = Mapping::anonymous(2000 * 2 * OS_PAGE_BYTES).unwrap();
        for page in (0..4000).step_by(2) {
            let at = many.at(page * OS_PAGE_BYTES).cast();
            // SAFETY: inside our own mapping, which is not in use.
            assert_eq!(unsafe { libc::mprotect(at, OS_PAGE_BYTES, libc::PROT_READ) }, 0);
        }
        let mut vmas = Vec::new();
        read_maps(|vma| vmas.push(*vma)).unwrap();
        assert!(vmas.len() > 3000 && vmas.windows(2).all(|w| w[0].end <= w[1].start));
        let vma = vmas.iter().find(|v| v.start <= memory.start() && v.end >= memory.end()).unwrap();
        assert!(vma.private && vma.writable && vma.kind == VmaKind::Anonymous);
        assert!(vmas.iter().any(|v| v.kind == VmaKind::MainStack));
        assert!(vmas.iter().any(|v| v.kind == VmaKind::File));
    }

    #[test]
    fn one_mapping_is_found_as_in_the_whole_map() {
        let memory = Mapping::anonymous(1 << 20).unwrap();
        let maps = Maps::open().unwrap();
        // Nothing else stays unchanged while other tests run.
        let code = (one_mapping_is_found_as_in_the_whole_map as *const ()).addr();
        let mut stack = None;
        read_maps(|vma| stack = stack.or((vma.kind == VmaKind::MainStack).then_some(vma.end - 1))).unwrap();
        for (address, kind) in [(code, VmaKind::File), (stack.unwrap(), VmaKind::MainStack)] {
            let asked = maps.at(address).unwrap();
            assert_eq!((asked.kind, Some(asked)), (kind, read_from(address)));
        }
        let vma = maps.at(memory.start()).unwrap();
        assert!(vma.start <= memory.start() && vma.end >= memory.end());
        assert!(vma.is_private_memory() && vma.kind == VmaKind::Anonymous);
        assert_eq!(maps.at(OS_PAGE_BYTES), None);
        let lowest = maps.from(OS_PAGE_BYTES).unwrap();
        assert_eq!(read_from(OS_PAGE_BYTES).unwrap().start, lowest.start);
        assert_eq!(maps.from(usize::MAX - OS_PAGE_BYTES + 1), None);
        assert_eq!(read_from(usize::MAX), None);
    }

    #[test]
    fn what_is_neither_inherited_nor_kept_is_both() {
        let memory = Mapping::anonymous(4 * OS_PAGE_BYTES).unwrap();
        for advice in [libc::MADV_DONTFORK, libc::MADV_WIPEONFORK] {
            let at = memory.at(OS_PAGE_BYTES).cast();
            // SAFETY: our own mapping; changes no content.
            assert_eq!(unsafe { libc::madvise(at, 2 * OS_PAGE_BYTES, advice) }, 0);
        }
        let (start, end) = (memory.start() + OS_PAGE_BYTES, memory.start() + 3 * OS_PAGE_BYTES);
        let found = not_inherited().unwrap();
        assert!(found.contains(&NotInherited::Missing { start, end, watched: false }));
        assert!(found.contains(&NotInherited::Wiped { start, end }));
    }

    #[test]
    fn both_ways_of_finding_present_pages_agree() {
        let memory = Mapping::anonymous(4 << 20).unwrap();
        // SAFETY: advice that changes no content of our own mapping.
        assert_eq!(unsafe { libc::madvise(memory.at(0).cast(), memory.bytes(), libc::MADV_NOHUGEPAGE) }, 0);
        for page in [0usize, 1, 2, 7, 100, 101, 1023] {
            // SAFETY: inside our own mapping.
            unsafe { memory.at(page * OS_PAGE_BYTES).write_volatile(1) };
        }
        let map = Pagemap::open().unwrap();
        let (mut read, mut runs) = (Vec::new(), Vec::new());
        map.read(map.fd.as_ref().unwrap(), memory.start(), memory.end(), &mut read);
        let mut in_memory = Vec::new();
        in_core(memory.start(), memory.end(), &mut in_memory);
        assert_eq!(in_memory, read);
        map.present_runs(memory.start(), memory.end(), &mut runs);
        let pages = |runs: &[PresentRun]| {
            runs.iter()
                .map(|r| ((r.start - memory.start()) / OS_PAGE_BYTES, r.bytes / OS_PAGE_BYTES))
                .collect::<Vec<_>>()
        };
        assert_eq!(pages(&read), [(0, 3), (7, 1), (100, 2), (1023, 1)]);
        assert_eq!(read, runs);
    }

    #[test]
    fn memory_that_children_do_not_get_is_found() {
        let (missing, wiped) = (Mapping::anonymous(1 << 20).unwrap(), Mapping::anonymous(1 << 20).unwrap());
        for (memory, advice) in [(&missing, libc::MADV_DONTFORK), (&wiped, libc::MADV_WIPEONFORK)] {
            // SAFETY: advice that changes no content of our own mapping.
            assert_eq!(unsafe { libc::madvise(memory.at(0).cast(), memory.bytes(), advice) }, 0);
        }
        let found = not_inherited().unwrap();
        let within =
            |memory: &Mapping, start: usize, end: usize| start <= memory.start() && memory.end() <= end;
        assert!(found.iter().any(
            |n| matches!(n, NotInherited::Missing { start, end, .. } if within(&missing, *start, *end))
        ));
        assert!(
            found
                .iter()
                .any(|n| matches!(n, NotInherited::Wiped { start, end } if within(&wiped, *start, *end)))
        );
    }
}
