//! Which programs the agent can be loaded into, found out before they start.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Finds `name` as a shell would, and refuses what cannot work with the reason.
pub fn check(name: &OsStr) -> Result<PathBuf> {
    let path = find(name)?;
    check_file(&path, &path, 0)?;
    let runtime =
        File::open(&path).ok().and_then(|file| needed(&file)).and_then(|names| names.into_iter().find(|name| stops_threads(name)));
    if let Some(runtime) = runtime {
        bail!(
            "{} is built with a sanitizer ({runtime}), which wants no library before itself and stops the agent's thread when it looks for leaks, for ever. Use a build without",
            path.display()
        );
    }
    Ok(path)
}

/// What works only where the kernel waits for pages in system calls and signals too.
pub fn check_below_full(program: &Path) -> Result<()> {
    if File::open(program).ok().and_then(|file| is_of_go(&file)) == Some(true) {
        bail!(
            "{} is a Go program: its runtime makes system calls itself and takes signals on stacks in memory that may leave, which works on the rung `uffd` alone; `rampool doctor` says how to get it",
            program.display()
        );
    }
    Ok(())
}

fn stops_threads(library: &str) -> bool {
    ["libasan.so", "liblsan.so", "libhwasan.so", "libclang_rt.asan", "libclang_rt.lsan"].iter().any(|name| library.starts_with(name))
}

/// Why the agent is not in a process that runs `file`, which people know as `shown`; `None` if it can be, or the file cannot be read.
pub fn why_not(file: &Path, shown: &Path) -> Option<String> {
    check_file(file, shown, 0).err().filter(|error| error.downcast_ref::<std::io::Error>().is_none()).map(|error| error.to_string())
}

fn find(name: &OsStr) -> Result<PathBuf> {
    let shown = name.to_string_lossy();
    if shown.contains('/') {
        let path = PathBuf::from(name);
        if !path.exists() {
            bail!("{shown}: no such program");
        }
        return Ok(path);
    }
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&dirs)
        .map(|dir| dir.join(name))
        .find(|path| path.metadata().is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0))
        .with_context(|| format!("{shown}: not found in PATH"))
}

fn check_file(path: &Path, shown: &Path, depth: u32) -> Result<()> {
    let shown = shown.display();
    let mut file = File::open(path).with_context(|| format!("{shown} cannot be read"))?;
    let meta = file.metadata()?;
    if meta.is_dir() {
        bail!("{shown} is a directory");
    }
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    if let Some((what, cure)) =
        gains_rights((meta.mode(), meta.uid(), meta.gid(), has_capabilities(&file)), (user.as_raw(), group.as_raw()))
    {
        bail!("{shown} {what}: the system loads no agent into a program that gains rights. {cure}");
    }
    let mut head = vec![0; 4096];
    let mut length = 0;
    while length < head.len() {
        match file.read(&mut head[length..])? {
            0 => break,
            n => length += n,
        }
    }
    head.truncate(length);
    if let Some(script) = head.strip_prefix(b"#!") {
        let line = script.split(|b| *b == b'\n').next().unwrap_or_default();
        let interpreter = String::from_utf8_lossy(line).split_whitespace().next().unwrap_or_default().to_owned();
        if depth > 3 || interpreter.is_empty() {
            bail!("{shown}: its interpreter cannot be found");
        }
        let interpreter = Path::new(&interpreter);
        return check_file(interpreter, interpreter, depth + 1)
            .with_context(|| format!("{shown} is a script for {}", interpreter.display()));
    }
    match linkage(&head) {
        Linkage::Dynamic(loader) if loader.contains("musl") => {
            bail!("{shown} is linked with musl ({loader}), the agent with the GNU C library: they cannot live in one process")
        }
        Linkage::Dynamic(_) => Ok(()),
        Linkage::Static => bail!(
            "{shown} is statically linked: nothing can be loaded into it. Use a dynamically linked build, or the C or Rust interface of rampool"
        ),
        Linkage::OtherMachine => bail!("{shown} is built for another kind of processor than this rampool"),
        Linkage::NoProgram => bail!("{shown} is no program that this system can run"),
    }
}

/// A file system that knows no attributes has no such programs.
fn has_capabilities(file: &File) -> bool {
    // Its size alone is asked for.
    rustix::fs::fgetxattr(file, "security.capability", &mut [0u8; 0]).is_ok()
}

/// How a program with this mode, owner, group, and perhaps capabilities gets rights that `user` of `group` lacks, for which its loader ignores
/// `LD_PRELOAD` (`AT_SECURE`, ld.so(8)); and what to do.
fn gains_rights(
    (mode, owner, owning_group, capable): (u32, u32, u32, bool),
    (user, group): (u32, u32),
) -> Option<(&'static str, &'static str)> {
    const SET_GROUP: u32 = 0o2010;
    if mode & 0o4000 != 0 && owner != user {
        Some(("is set-user-id", "Run it as its owner, or copy it without that bit"))
    } else if mode & SET_GROUP == SET_GROUP && owning_group != group {
        Some(("is set-group-id", "Run it with its group (`sg`), or copy it without that bit"))
    } else if capable && user != 0 {
        Some(("carries file capabilities (`getcap` lists them)", "Copy it: a copy has none"))
    } else {
        None
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Linkage {
    /// With the path of its loader.
    Dynamic(String),
    Static,
    OtherMachine,
    NoProgram,
}

/// Reads the program headers of a 64-bit little-endian ELF file from its first bytes.
fn linkage(head: &[u8]) -> Linkage {
    const INTERP: u64 = 3;
    #[cfg(target_arch = "x86_64")]
    const MACHINE: u64 = 62;
    #[cfg(target_arch = "aarch64")]
    const MACHINE: u64 = 183;
    let number = |at: usize, bytes: usize| -> Option<u64> {
        let slice = head.get(at..at.checked_add(bytes)?)?;
        Some(slice.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    if head.get(..4) != Some(b"\x7fELF") {
        return Linkage::NoProgram;
    }
    if head.get(4..6) != Some(&[2, 1]) || number(18, 2) != Some(MACHINE) {
        return Linkage::OtherMachine;
    }
    let size = |v: Option<u64>| v.and_then(|v| usize::try_from(v).ok());
    let (Some(table), Some(entry), Some(count)) = (size(number(32, 8)), size(number(54, 2)), size(number(56, 2))) else {
        return Linkage::NoProgram;
    };
    for index in 0..count {
        let Some(at) = index.checked_mul(entry).and_then(|o| o.checked_add(table)) else { return Linkage::NoProgram };
        if number(at, 4) == Some(INTERP) {
            let path = match (size(number(at + 8, 8)), size(number(at + 32, 8))) {
                (Some(from), Some(bytes)) => from.checked_add(bytes).and_then(|to| head.get(from..to)).unwrap_or_default(),
                _ => &[],
            };
            return Linkage::Dynamic(String::from_utf8_lossy(path).trim_end_matches('\0').to_owned());
        }
    }
    Linkage::Static
}

/// A part of a 64-bit little-endian ELF file.
struct Segment {
    kind: u64,
    /// Where it is in the file, and in memory.
    place: u64,
    address: u64,
    bytes: u64,
}

fn read_part(file: &File, at: u64, bytes: usize) -> Option<Vec<u8>> {
    let mut buffer = vec![0; bytes];
    let n = file.read_at(&mut buffer, at).ok()?;
    buffer.truncate(n);
    Some(buffer)
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// `None` where the file makes no sense, which is the loader's to say.
fn segments(file: &File) -> Option<Vec<Segment>> {
    let head = read_part(file, 0, 64)?;
    let half = |at: usize| Some(usize::from(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?)));
    let (table, entry, count) = (word(&head, 32)?, half(54)?, half(56)?);
    let segment = |header: &[u8]| {
        Some(Segment {
            kind: word(header, 0)? & 0xffff_ffff,
            place: word(header, 8)?,
            address: word(header, 16)?,
            bytes: word(header, 32)?,
        })
    };
    const LONGEST_TABLE: usize = 64 << 10;
    Some(read_part(file, table, (entry * count).min(LONGEST_TABLE))?.chunks_exact(entry.max(1)).filter_map(segment).collect())
}

/// The libraries that the file names.
fn needed(file: &File) -> Option<Vec<String>> {
    const LOAD: u64 = 1;
    const DYNAMIC: u64 = 2;
    const NEEDED: u64 = 1;
    const NAMES: u64 = 5;
    /// A program's dynamic section, and a library's name, are far shorter.
    const MOST_ENTRIES: usize = 4096;
    const LONGEST_NAME: usize = 256;
    let segments = segments(file)?;
    let dynamic = segments.iter().find(|segment| segment.kind == DYNAMIC)?;
    let dynamic = read_part(file, dynamic.place, usize::try_from(dynamic.bytes).ok()?.min(16 * MOST_ENTRIES))?;
    let entries: Vec<(u64, u64)> =
        dynamic.chunks_exact(16).map_while(|pair| Some((word(pair, 0)?, word(pair, 8)?))).take_while(|(tag, _)| *tag != 0).collect();
    let (_, names) = *entries.iter().find(|(tag, _)| *tag == NAMES)?;
    let holds =
        |segment: &&Segment| segment.kind == LOAD && names.checked_sub(segment.address).is_some_and(|offset| offset < segment.bytes);
    let segment = segments.iter().find(holds)?;
    let names = segment.place.checked_add(names - segment.address)?;
    let name = |offset: u64| {
        let bytes = read_part(file, names.checked_add(offset)?, LONGEST_NAME)?;
        Some(String::from_utf8_lossy(bytes.split(|b| *b == 0).next()?).into_owned())
    };
    Some(entries.iter().filter(|(tag, _)| *tag == NEEDED).filter_map(|(_, offset)| name(*offset)).collect())
}

/// Whether a Go compiler made the program: it leaves a note of the build's identity (kind 4, by the name `Go`).
fn is_of_go(file: &File) -> Option<bool> {
    const NOTE: u64 = 4;
    const LONGEST: u64 = 64 << 10;
    let is_note = |part: &[u8]| part[..4] == [4, 0, 0, 0] && part[8..] == *b"\x04\0\0\0Go\0\0";
    let mut notes = segments(file)?.into_iter().filter(|segment| segment.kind == NOTE);
    Some(notes.any(|note| {
        let bytes = usize::try_from(note.bytes.min(LONGEST)).unwrap_or(0);
        read_part(file, note.place, bytes).is_some_and(|bytes| bytes.windows(16).step_by(4).any(is_note))
    }))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_dynamic_program_is_taken_and_its_loader_known() {
        let head = std::fs::read("/bin/sh").unwrap();
        let Linkage::Dynamic(loader) = linkage(&head[..4096]) else { panic!("/bin/sh is dynamic here") };
        assert!(loader.contains("ld"), "{loader}");
        assert!(check(OsStr::new("sh")).is_ok());
    }

    #[test]
    fn what_cannot_work_is_refused_with_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            check(path.as_os_str()).unwrap_err().root_cause().to_string()
        };
        assert!(file("text", b"hello").contains("no program"));
        assert!(file("lost-script", b"#!/no/such/interpreter\n").contains("No such file"));
        let mut elf = std::fs::read("/bin/sh").unwrap();
        elf[18] = 0xf3;
        assert!(file("riscv", &elf).contains("another kind of processor"));
        let mut elf = std::fs::read("/bin/sh").unwrap();
        elf[56] = 0;
        elf[57] = 0;
        assert!(file("static", &elf).contains("statically linked"));
        assert!(check(OsStr::new("no-such-program-anywhere")).is_err());
    }

    #[test]
    fn programs_that_gain_rights_are_refused() {
        let refused = |mode, owner, group, capable| gains_rights((mode, owner, group, capable), (1000, 100)).map(|(what, _)| what);
        assert_eq!(refused(0o755, 0, 0, false), None);
        assert_eq!(refused(0o4755, 0, 0, false), Some("is set-user-id"));
        assert_eq!(refused(0o4755, 1000, 0, false), None, "its owner gains nothing");
        assert_eq!(refused(0o2755, 0, 42, false), Some("is set-group-id"));
        assert_eq!(refused(0o2755, 0, 100, false), None);
        assert_eq!(refused(0o2745, 0, 42, false), None, "the bit alone means mandatory locks");
        assert!(refused(0o755, 0, 0, true).unwrap().contains("capabilities"));
        assert_eq!(gains_rights((0o755, 0, 0, true), (0, 0)), None, "root gains nothing");
    }

    #[test]
    fn a_file_with_capabilities_is_known() {
        let file = tempfile::tempfile().unwrap();
        assert!(!has_capabilities(&file));
        // cap_net_raw=ep, version 2 (capability.h).
        let mut attribute = [0u8; 20];
        attribute[..4].copy_from_slice(&0x0200_0001_u32.to_le_bytes());
        attribute[4..8].copy_from_slice(&(1u32 << 13).to_le_bytes());
        let set = rustix::fs::fsetxattr(&file, "security.capability", &attribute, rustix::fs::XattrFlags::empty());
        // Only root may, and not on every file system.
        assert_eq!(has_capabilities(&file), set.is_ok());
    }

    #[test]
    fn the_libraries_of_a_program_are_known() {
        let sh = File::open("/bin/sh").unwrap();
        let names = needed(&sh).unwrap();
        assert!(names.iter().any(|name| name.starts_with("libc.so")), "{names:?}");
        assert!(!names.iter().any(|name| stops_threads(name)));
        assert!(stops_threads("libasan.so.8") && stops_threads("liblsan.so.0") && !stops_threads("libubsan.so.1"));
    }

    #[test]
    fn programs_of_go_are_known() {
        let mut elf = std::fs::read("/bin/sh").unwrap();
        let known = |elf: &[u8]| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(elf).unwrap();
            is_of_go(&file)
        };
        assert_eq!(known(&elf), Some(false));
        let gnu = elf.windows(16).position(|part| part[8..] == *b"\x03\0\0\0GNU\0").expect("a note of the build's identity");
        elf[gnu + 8..gnu + 16].copy_from_slice(b"\x04\0\0\0Go\0\0");
        assert_eq!(known(&elf), Some(true));
        assert_eq!(known(b"#!/bin/sh"), None);
    }

    #[test]
    fn damaged_headers_never_panic() {
        let elf = std::fs::read("/bin/sh").unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&elf).unwrap();
        for (at, byte) in elf.iter().enumerate() {
            if at < 0x400 || at % 1024 == 0 {
                file.write_at(&[byte ^ 0xff], at as u64).unwrap();
                let _ = (needed(&file), is_of_go(&file));
                file.write_at(&[*byte], at as u64).unwrap();
            }
        }
        for cut in [0, 1, 60, 64, 100, 1000, 5000] {
            file.set_len(cut).unwrap();
            let _ = (needed(&file), is_of_go(&file));
        }
        for cut in [0, 3, 5, 20, 60, 64, 100, 500] {
            let _ = linkage(&elf[..cut]);
        }
        let mut wild = elf[..4096].to_vec();
        wild[32..40].fill(0xff);
        wild[54..58].fill(0xff);
        assert_eq!(linkage(&wild), Linkage::NoProgram);
    }
}
