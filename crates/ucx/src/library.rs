//! `libucp.so.0`: found and loaded on first use.

use crate::Status;
use crate::api::{API, Functions};
use libc::{c_char, c_void};
use std::ffi::{CStr, CString};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why UCX cannot be loaded.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    #[error(
        "UCX is not installed: {0} (Debian and Ubuntu: apt-get install libucx0; elsewhere the package is \
         mostly called ucx)"
    )]
    Missing(String),
    #[error("UCX {0} is too old: install {major}.{minor} or newer", major = API.0, minor = API.1)]
    TooOld(Version),
    #[error("libucp.so.0 is not a usable UCX: it lacks {0}")]
    Foreign(&'static str),
    #[error(
        "UCX is not loaded into programs that did not ask for it: name the server by HOST:PORT or unix:PATH"
    )]
    Forbidden,
}

/// The version of UCX that is loaded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub release: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

pub(crate) struct Library {
    pub functions: Functions,
    version: Version,
}

impl Library {
    pub fn explain(&self, status: Status) -> String {
        // SAFETY: any status may be asked for; what comes back is a text that stays.
        let text = unsafe { CStr::from_ptr((self.functions.status_string)(status)) };
        text.to_string_lossy().into_owned()
    }
}

static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();
static FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// From now on UCX is never loaded into this process, because its program did not ask for it.
pub fn forbid() {
    FORBIDDEN.store(true, Ordering::Relaxed);
}

/// The version of UCX, which is loaded first if necessary.
///
/// # Errors
/// [`LoadError`].
pub fn version() -> Result<Version, LoadError> {
    library().map(|library| library.version)
}

pub(crate) fn library() -> Result<&'static Library, LoadError> {
    if FORBIDDEN.load(Ordering::Relaxed) {
        return Err(LoadError::Forbidden);
    }
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}

pub(crate) fn loaded() -> Option<&'static Library> {
    LIBRARY.get().and_then(|library| library.as_ref().ok())
}

/// Variables that keep UCX from changing the process. UCX reads them while it is loaded; they override the
/// environment.
const RESTRAINTS: [&CStr; 3] = [
    // It would write jumps over the first bytes of mmap, munmap, madvise and others.
    c"UCX_MEM_EVENTS=n",
    // It would catch SIGSEGV and others.
    c"UCX_ERROR_SIGNALS=",
    // It would serve a file system that shows its objects.
    c"UCX_VFS_ENABLE=n",
];
/// UCX logs to the standard output of the process; every failure is returned as an error as well.
const QUIET: &CStr = c"UCX_LOG_LEVEL=fatal";

fn load() -> Result<Library, LoadError> {
    let handle = with_restraints(|| {
        // SAFETY: loads a library, whose constructors run. It stays for good: nothing unloads it.
        unsafe { libc::dlopen(c"libucp.so.0".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) }
    });
    if handle.is_null() {
        // SAFETY: after a failure there is a text, valid until this thread's next call of its kind.
        let text = unsafe { CStr::from_ptr(libc::dlerror()) };
        return Err(LoadError::Missing(text.to_string_lossy().into_owned()));
    }
    // SAFETY: the handle was opened and is not closed; these names are UCX's functions.
    let functions =
        unsafe { Functions::find(|name| libc::dlsym(handle, name.as_ptr())) }.map_err(LoadError::Foreign)?;
    let mut version = Version { major: 0, minor: 0, release: 0 };
    // SAFETY: three places to write to.
    unsafe {
        (functions.get_version)(&raw mut version.major, &raw mut version.minor, &raw mut version.release)
    };
    if (version.major, version.minor) < API || version.major > API.0 {
        return Err(LoadError::TooOld(version));
    }
    Ok(Library { functions, version })
}

/// Runs `work` while the environment has the restraints. The variables themselves are not touched, since
/// other threads may be reading them: during the call another list of them is in force, which is never freed.
fn with_restraints<T>(work: impl FnOnce() -> T) -> T {
    unsafe extern "C" {
        static mut environ: *mut *mut c_char;
    }
    let name_of =
        |variable: &CStr| variable.to_bytes().split(|byte| *byte == b'=').next().unwrap_or_default().to_vec();
    let restrained: Vec<Vec<u8>> = RESTRAINTS.iter().map(|variable| name_of(variable)).collect();
    let mut list: Vec<*mut c_char> = Vec::new();
    let mut quiet = true;
    // SAFETY: the list of the environment, whose last entry is null, and whose entries are texts that the C
    // library does not free. No thread may change the environment while other threads run, which is the rule
    // of every process with threads.
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            let name = name_of(CStr::from_ptr(*at));
            quiet &= name != b"UCX_LOG_LEVEL";
            if !restrained.contains(&name) {
                list.push(*at);
            }
            at = at.add(1);
        }
    }
    list.extend(RESTRAINTS.iter().map(|variable| variable.as_ptr().cast_mut()));
    if quiet {
        list.push(QUIET.as_ptr().cast_mut());
    }
    list.push(std::ptr::null_mut());
    let list: &'static mut [*mut c_char] = list.leak();
    // SAFETY: one pointer of the C library's, set to a valid list; readers find the old or the new one, both
    // valid for good.
    let before = unsafe { std::ptr::replace(&raw mut environ, list.as_mut_ptr()) };
    let result = work();
    // SAFETY: as above. If another thread has changed the environment meanwhile, it has changed the list, and
    // its change is lost.
    unsafe { (&raw mut environ).write(before) };
    result
}

/// A null-terminated copy for a call.
pub(crate) fn text(text: &str) -> CString {
    CString::new(text.replace('\0', "")).expect("without zero bytes")
}

/// The result of a call that may go on: nothing, a request, or a status.
pub(crate) enum Started {
    Done,
    Request(*mut c_void),
    Failed(Status),
}

impl Started {
    pub fn of(pointer: *mut c_void) -> Self {
        // Statuses are the 100 highest addresses.
        let value = pointer.addr().cast_signed();
        match i8::try_from(value) {
            Ok(0) => Self::Done,
            Ok(status @ -100..0) => Self::Failed(Status(status)),
            _ => Self::Request(pointer),
        }
    }
}
