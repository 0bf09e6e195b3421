//! Which programs the agent can be loaded into, found out before they start.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Finds `name` as a shell would, and refuses what cannot work with the reason.
pub fn check(name: &OsStr) -> Result<PathBuf> {
    let path = find(name)?;
    check_file(&path, &path, 0)?;
    Ok(path)
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
    let mut file = std::fs::File::open(path).with_context(|| format!("{shown} cannot be read"))?;
    let meta = file.metadata()?;
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    if meta.mode() & 0o4000 != 0 && meta.uid() != user {
        bail!("{shown} is set-user-id: the system loads no agent into it. Run it as its owner, or copy it without that bit");
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

#[cfg(test)]
mod tests {
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
    fn damaged_headers_never_panic() {
        let elf = std::fs::read("/bin/sh").unwrap();
        for cut in [0, 3, 5, 20, 60, 64, 100, 500] {
            let _ = linkage(&elf[..cut]);
        }
        let mut wild = elf[..4096].to_vec();
        wild[32..40].fill(0xff);
        wild[54..58].fill(0xff);
        assert_eq!(linkage(&wild), Linkage::NoProgram);
    }
}
