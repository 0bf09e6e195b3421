//! Finds out, before a program starts, whether the agent can be loaded into it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::elf::{self, FileHeader64, ProgramHeader64};
use object::read::elf::{Dyn as _, FileHeader as _, Note, ProgramHeader as _};
use object::{LittleEndian, ReadCache, ReadRef as _, StringTable};
use rustix::fs::{Access, access};

/// Why a program cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    NotExecutable(String),
    /// The program would run without rampool, because the agent cannot be loaded into it.
    #[error("{0}")]
    Refused(String),
}

impl ProgramError {
    /// As `env` and shells do. If rampool itself refuses, the exit code is that of its own failures.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::NotFound(_) => 127,
            Self::NotExecutable(_) => 126,
            Self::Refused(_) => crate::EXIT_FAILURE,
        }
    }

    /// The system failed to start `program`.
    pub fn from_start(program: &Path, error: &io::Error) -> Self {
        let text = format!("cannot start {}: {error}", program.display());
        if error.kind() == io::ErrorKind::NotFound { Self::NotFound(text) } else { Self::NotExecutable(text) }
    }
}

/// A program that the agent can be loaded into.
#[derive(Debug)]
pub struct Found {
    pub path: PathBuf,
    /// A script without an interpreter line: the shell runs it, as `env` and shells do.
    pub for_shell: bool,
}

pub const SHELL: &str = "/bin/sh";

/// Finds `name` as a shell does, and refuses a program that cannot work, with the reason.
pub fn check(name: &OsStr) -> Result<Found, ProgramError> {
    let path = find(name)?;
    let for_shell = check_file(&path, &path, 0)? == Kind::ForShell;
    let runtime = File::open(&path)
        .ok()
        .and_then(|file| needed(&file))
        .and_then(|names| names.into_iter().find(|name| stops_threads(name)));
    if let Some(runtime) = runtime {
        return Err(ProgramError::Refused(format!(
            "{} is built with a sanitizer ({runtime}), which must be loaded first and stops the agent's \
             thread for ever when it looks for leaks. Use a build without it",
            path.display()
        )));
    }
    Ok(Found { path, for_shell })
}

/// Checks for what works only where the kernel waits for pages in system calls and signals too.
pub fn check_below_full(program: &Path) -> Result<(), ProgramError> {
    if File::open(program).ok().and_then(|file| is_of_go(&file)) == Some(true) {
        return Err(ProgramError::Refused(format!(
            "{} is a Go program: its runtime makes system calls itself and takes signals on stacks that may \
             be paged out, which works only on the fault mode `uffd`; `rampool doctor` says how to enable it",
            program.display()
        )));
    }
    Ok(())
}

fn stops_threads(library: &str) -> bool {
    ["libasan.so", "liblsan.so", "libhwasan.so", "libclang_rt.asan", "libclang_rt.lsan"]
        .iter()
        .any(|name| library.starts_with(name))
}

/// Why the agent is not in a process that runs `file`, shown to the user as `shown`. `None` if it can be, or
/// if the file cannot be read.
pub fn why_not(file: &Path, shown: &Path) -> Option<String> {
    File::open(file).ok()?;
    check_file(file, shown, 0).err().map(|error| error.to_string())
}

fn find(name: &OsStr) -> Result<PathBuf, ProgramError> {
    let shown = name.to_string_lossy();
    if shown.contains('/') {
        let path = PathBuf::from(name);
        return match path.metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(ProgramError::NotFound(format!("{shown}: no such program")))
            }
            Err(error) => Err(ProgramError::NotExecutable(format!("{shown}: {error}"))),
            Ok(_) => Ok(path),
        };
    }
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    let mut refused = None;
    for path in std::env::split_paths(&dirs).map(|dir| dir.join(name)) {
        match path.metadata() {
            Ok(meta) if meta.is_file() && meta.mode() & 0o111 != 0 => return Ok(path),
            Ok(meta) if meta.is_file() => refused = Some(path),
            _ => {}
        }
    }
    Err(match refused {
        Some(path) => ProgramError::NotExecutable(format!("{} is not executable (chmod +x)", path.display())),
        None => ProgramError::NotFound(format!("{shown}: not found in PATH")),
    })
}

/// What the system does with a file that it is to execute.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// It loads the program, or the interpreter that the file names.
    Known,
    /// It refuses the file (ENOEXEC), and shells run it as a script.
    ForShell,
}

fn check_file(path: &Path, shown: &Path, depth: u32) -> Result<Kind, ProgramError> {
    let shown = shown.display();
    let unreadable = |error: io::Error| {
        let text = format!("cannot read {shown}: {error}");
        match error.kind() {
            io::ErrorKind::NotFound => ProgramError::NotFound(text),
            // A file that may be executed but not read runs without rampool.
            _ if access(path, Access::EXEC_OK).is_ok() => ProgramError::Refused(text),
            _ => ProgramError::NotExecutable(text),
        }
    };
    let mut file = File::open(path).map_err(unreadable)?;
    let meta = file.metadata().map_err(unreadable)?;
    if meta.is_dir() {
        return Err(ProgramError::NotExecutable(format!("{shown} is a directory")));
    }
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    if let Some((what, cure)) = gains_rights(
        (meta.mode(), meta.uid(), meta.gid(), has_capabilities(&file)),
        (user.as_raw(), group.as_raw()),
    ) {
        return Err(ProgramError::Refused(format!(
            "{shown} {what}: the system loads no agent into a program that gains privileges. {cure}"
        )));
    }
    let mut head = vec![0; 4096];
    let mut length = 0;
    while length < head.len() {
        match file.read(&mut head[length..]).map_err(unreadable)? {
            0 => break,
            n => length += n,
        }
    }
    head.truncate(length);
    if let Some(script) = head.strip_prefix(b"#!") {
        let line = script.split(|b| *b == b'\n').next().unwrap_or_default();
        let interpreter =
            String::from_utf8_lossy(line).split_whitespace().next().unwrap_or_default().to_owned();
        if depth > 3 || interpreter.is_empty() {
            return Err(ProgramError::NotExecutable(format!("{shown}: its interpreter does not exist")));
        }
        let of_script = |text: String| format!("{shown} is a script for {interpreter}: {text}");
        return match check_file(Path::new(&interpreter), Path::new(&interpreter), depth + 1) {
            // The system executes an interpreter directly, never through a shell.
            Ok(Kind::ForShell) => {
                Err(ProgramError::NotExecutable(of_script("this system cannot run that".into())))
            }
            Ok(Kind::Known) => Ok(Kind::Known),
            Err(ProgramError::NotFound(text)) => Err(ProgramError::NotFound(of_script(text))),
            Err(ProgramError::NotExecutable(text)) => Err(ProgramError::NotExecutable(of_script(text))),
            Err(ProgramError::Refused(text)) => Err(ProgramError::Refused(of_script(text))),
        };
    }
    match linkage(&file) {
        Linkage::Dynamic(loader) if loader.contains("musl") => Err(ProgramError::Refused(format!(
            "{shown} is linked with musl ({loader}), the agent with the GNU C library: one process cannot \
             hold both. Use a build for the GNU C library"
        ))),
        Linkage::Dynamic(_) => Ok(Kind::Known),
        Linkage::Static => Err(ProgramError::Refused(format!(
            "{shown} is statically linked: the agent cannot be loaded into it. Use a dynamically linked \
             build, or the C or Rust interface of rampool"
        ))),
        Linkage::OtherMachine => Err(ProgramError::NotExecutable(format!(
            "{shown} is built for another kind of processor than this rampool"
        ))),
        Linkage::NoProgram if is_text(&head) && access(path, Access::EXEC_OK).is_ok() => Ok(Kind::ForShell),
        Linkage::NoProgram => Err(ProgramError::NotExecutable(format!("this system cannot run {shown}"))),
    }
}

/// Shells tell scripts from files for other systems by a zero byte in the first line.
fn is_text(head: &[u8]) -> bool {
    !head.split(|byte| *byte == b'\n').next().unwrap_or_default().contains(&0)
}

/// On a file system without attributes no program has capabilities.
fn has_capabilities(file: &File) -> bool {
    // Asks for its size only.
    rustix::fs::fgetxattr(file, "security.capability", &mut [0u8; 0]).is_ok()
}

/// How a program with this mode, owner, group and capabilities gains privileges that `user` of `group` lacks,
/// and what to do. For such a program the loader ignores `LD_PRELOAD` (`AT_SECURE`, ld.so(8)).
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

type Elf = FileHeader64<LittleEndian>;
type Data<'a> = ReadCache<&'a File>;
const ORDER: LittleEndian = LittleEndian;
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = elf::EM_X86_64;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = elf::EM_AARCH64;

fn linkage(file: &File) -> Linkage {
    let data = ReadCache::new(file);
    if (&data).read_bytes_at(0, 4) != Ok(&elf::ELFMAG[..]) {
        return Linkage::NoProgram;
    }
    let header = Elf::parse(&data).ok().filter(|header| header.e_machine(ORDER) == MACHINE);
    let Some(header) = header else { return Linkage::OtherMachine };
    let Ok(segments) = header.program_headers(ORDER, &data) else { return Linkage::NoProgram };
    match segments.iter().find(|segment| segment.p_type(ORDER) == elf::PT_INTERP) {
        Some(segment) => {
            let loader = segment.interpreter(ORDER, &data).ok().flatten().unwrap_or_default();
            Linkage::Dynamic(String::from_utf8_lossy(loader).into_owned())
        }
        None => Linkage::Static,
    }
}

/// `None` if the file is invalid, which the loader reports.
fn segments<'a>(data: &'a Data<'_>) -> Option<&'a [ProgramHeader64<LittleEndian>]> {
    Elf::parse(data).ok()?.program_headers(ORDER, data).ok()
}

/// The libraries that the file names.
fn needed(file: &File) -> Option<Vec<String>> {
    let data = ReadCache::new(file);
    let segments = segments(&data)?;
    let entries = segments.iter().find_map(|segment| segment.dynamic(ORDER, &data).ok()?)?;
    let value = |tag| entries.iter().find(|entry| entry.tag(ORDER) == tag).map(|entry| entry.val(ORDER));
    let (names, bytes) = (value(elf::DT_STRTAB)?, value(elf::DT_STRSZ)?);
    // The loader finds them by their address. A part of memory may be long, and is not read as a whole.
    let holds = |segment: &&ProgramHeader64<LittleEndian>| {
        let offset = names.checked_sub(segment.p_vaddr(ORDER));
        segment.p_type(ORDER) == elf::PT_LOAD && offset.is_some_and(|offset| offset < segment.p_filesz(ORDER))
    };
    let segment = segments.iter().find(holds)?;
    let start = segment.p_offset(ORDER).checked_add(names - segment.p_vaddr(ORDER))?;
    let names = StringTable::new(&data, start, start.checked_add(bytes)?);
    let libraries = entries.iter().filter(|entry| entry.tag(ORDER) == elf::DT_NEEDED);
    let name = |entry: &elf::Dyn64<LittleEndian>| entry.string(ORDER, names).ok();
    Some(libraries.filter_map(name).map(|name| String::from_utf8_lossy(name).into_owned()).collect())
}

/// Whether a Go compiler made the program: it leaves a note of the build's identity.
fn is_of_go(file: &File) -> Option<bool> {
    let data = ReadCache::new(file);
    let notes = segments(&data)?.iter().filter_map(|segment| segment.notes(ORDER, &data).ok()?);
    let is_gos =
        |note: Note<'_, Elf>| note.name() == elf::ELF_NOTE_GO && note.n_type(ORDER) == elf::NT_GO_BUILD_ID;
    Some(notes.flatten().filter_map(Result::ok).any(is_gos))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{FileExt, PermissionsExt};

    use super::*;

    #[test]
    fn a_dynamic_program_is_taken_and_its_loader_known() {
        let sh = File::open("/bin/sh").unwrap();
        let Linkage::Dynamic(loader) = linkage(&sh) else { panic!("/bin/sh is dynamic here") };
        assert!(loader.contains("ld"), "{loader}");
        assert!(check(OsStr::new("sh")).is_ok());
    }

    #[test]
    fn what_cannot_work_is_refused_with_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            let error = check(path.as_os_str()).unwrap_err();
            (error.exit_code(), error.to_string())
        };
        let refused = |(code, text): (i32, String), wanted: i32, why: &str| {
            assert!(code == wanted && text.contains(why), "{code}: {text}")
        };
        refused(file("data", b"hel\0lo"), 126, "cannot run");
        refused(file("lost-script", b"#!/no/such/interpreter\n"), 127, "No such file");
        refused(
            file("odd-script", format!("#!{}\n", dir.path().join("data").display()).as_bytes()),
            126,
            "cannot run",
        );
        let mut elf = std::fs::read("/bin/sh").unwrap();
        elf[18] = 0xf3;
        refused(file("riscv", &elf), 126, "another kind of processor");
        let mut elf = std::fs::read("/bin/sh").unwrap();
        elf[56] = 0;
        elf[57] = 0;
        refused(file("static", &elf), 125, "statically linked");
        let code = |name: &OsStr| check(name).unwrap_err().exit_code();
        assert_eq!(code(OsStr::new("no-such-program-anywhere")), 127);
        assert_eq!(code(dir.path().join("not-there").as_os_str()), 127);
        assert_eq!(code(dir.path().as_os_str()), 126);
        let closed = dir.path().join("closed");
        std::fs::write(&closed, "echo\n").unwrap();
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(code(closed.as_os_str()), 126, "the shell does not execute it either");
    }

    #[test]
    fn a_script_without_an_interpreter_is_the_shells() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text, for_shell) in
            [("plain", "echo\n", true), ("empty", "", true), ("named", "#!/bin/sh\necho\n", false)]
        {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            assert_eq!(check(path.as_os_str()).unwrap().for_shell, for_shell, "{name}");
        }
    }

    #[test]
    fn programs_that_gain_rights_are_refused() {
        let refused = |mode, owner, group, capable| {
            gains_rights((mode, owner, group, capable), (1000, 100)).map(|(what, _)| what)
        };
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
        let set =
            rustix::fs::fsetxattr(&file, "security.capability", &attribute, rustix::fs::XattrFlags::empty());
        // Only root may do this, and not on every file system.
        assert_eq!(has_capabilities(&file), set.is_ok());
    }

    #[test]
    fn the_libraries_of_a_program_are_known() {
        let sh = File::open("/bin/sh").unwrap();
        let names = needed(&sh).unwrap();
        assert!(names.iter().any(|name| name.starts_with("libc.so")), "{names:?}");
        assert!(!names.iter().any(|name| stops_threads(name)));
        assert!(
            stops_threads("libasan.so.8") && stops_threads("liblsan.so.0") && !stops_threads("libubsan.so.1")
        );
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
        let gnu = elf
            .windows(16)
            .position(|part| part[8..] == *b"\x03\0\0\0GNU\0")
            .expect("a note of the build's identity");
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
                let _ = (linkage(&file), needed(&file), is_of_go(&file));
                file.write_at(&[*byte], at as u64).unwrap();
            }
        }
        let mut wild = elf[..4096].to_vec();
        wild[32..40].fill(0xff);
        wild[54..56].fill(0xff);
        file.write_all_at(&wild, 0).unwrap();
        assert_eq!(linkage(&file), Linkage::NoProgram);
        file.write_all_at(&elf, 0).unwrap();
        for cut in [5000, 1000, 500, 100, 64, 60, 20, 5, 3, 1, 0] {
            file.set_len(cut).unwrap();
            let _ = (linkage(&file), needed(&file), is_of_go(&file));
        }
    }
}
