//! DLM-M's interface (Saito, Midorikawa, Kai: "DLM-M"): `dlmm_startup`, `dlmm_alloc`, `dlmm_free`,
//! `dlmm_shutdown`, declared in `include/dlmm.h`.
//!
//! One pool a process, made from `dlmm.conf` and the words after `--` on the command line. Environment
//! variables named like the options of the pool set what the paper leaves open: `RAMPOOL_PAGE_SIZE` (the DLM
//! page), `RAMPOOL_KEY_FILE`, `RAMPOOL_PREFETCH` and so on. Differs from the paper: memory is fetched ahead
//! of need, and evicted ahead of need instead of after the fetch.

mod conf;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use conf::{Conf, ConfError, Options, OptionsError};
use rampool::Builder;
use rampool::builder::{OPTIONS, OpenError, OptionError};
use rampool::region::{AllocError, PagedMemory, Region};
use rampool_kernel::words::say_line;

/// The process's pool, with its regions by address. Regions come first: they must be dropped before the pager
/// ends.
struct Dlmm {
    regions: BTreeMap<usize, Region>,
    memory: PagedMemory,
}

static DLMM: Mutex<Option<Dlmm>> = Mutex::new(None);

/// Why a DLM-M program could not start.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("dlmm_startup was called before")]
    Twice,
    #[error("{0}")]
    Options(#[from] OptionsError),
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {source}", path.display())]
    Conf { path: PathBuf, source: ConfError },
    #[error("environment variable {variable}: {source}")]
    Environment { variable: String, source: OptionError },
    #[error(transparent)]
    Open(#[from] OpenError),
}

#[derive(Debug, thiserror::Error)]
enum DlmmAllocError {
    #[error("dlmm_startup was not called, or failed")]
    NotStarted,
    #[error(transparent)]
    Alloc(#[from] AllocError),
}

/// # Safety
/// `argv` is null or points to `argc` texts that end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlmm_startup(argc: c_int, argv: *mut *mut c_char) -> c_int {
    let mut arguments = Vec::new();
    for n in 0..usize::try_from(argc).unwrap_or(0) {
        if argv.is_null() {
            break;
        }
        // SAFETY: `argc` texts are there, as the caller promises.
        let word = unsafe { *argv.add(n) };
        if word.is_null() {
            break;
        }
        // SAFETY: it ends with a zero byte, as the caller promises.
        arguments.push(unsafe { CStr::from_ptr(word) }.to_string_lossy().into_owned());
    }
    match start(&arguments) {
        Ok(()) => 0,
        Err(error) => {
            say_line(&format!("dlmm_startup: {error}"));
            -1
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn dlmm_alloc(bytes: usize) -> *mut c_void {
    match alloc(bytes) {
        Ok(address) => address,
        Err(error) => {
            say_line(&format!("dlmm_alloc: {error}"));
            std::ptr::null_mut()
        }
    }
}

/// # Safety
/// Nothing uses the memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlmm_free(memory: *mut c_void) {
    if memory.is_null() {
        return;
    }
    let region = lock().as_mut().and_then(|dlmm| dlmm.regions.remove(&memory.addr()));
    if region.is_none() {
        say_line(&format!("dlmm_free: {memory:p} is not memory of dlmm_alloc"));
    }
    // Dropped here, after the lock is released.
}

#[unsafe(no_mangle)]
pub extern "C" fn dlmm_shutdown() -> c_int {
    let Some(Dlmm { regions, memory }) = lock().take() else {
        say_line("dlmm_shutdown: dlmm_startup was not called, or failed");
        return -1;
    };
    drop(regions);
    drop(memory);
    0
}

fn start(arguments: &[String]) -> Result<(), StartError> {
    let mut slot = lock();
    if slot.is_some() {
        return Err(StartError::Twice);
    }
    let options = Options::parse(arguments)?;
    let path = Path::new(&options.file);
    let text =
        std::fs::read_to_string(path).map_err(|source| StartError::Read { path: path.to_owned(), source })?;
    let conf = Conf::parse(&text, options.nodes)
        .map_err(|source| StartError::Conf { path: path.to_owned(), source })?;
    let mut builder = Builder::new();
    for (option, _, _) in OPTIONS {
        let variable = format!("RAMPOOL_{}", option.to_uppercase().replace('-', "_"));
        // The environment does not override the file.
        if ["server", "memory", "local"].contains(option) {
            continue;
        }
        if let Ok(value) = std::env::var(&variable) {
            builder.set(option, &value).map_err(|source| StartError::Environment { variable, source })?;
        }
    }
    for server in conf.servers {
        builder = builder.server(server);
    }
    let memory = builder.local(conf.local).open()?;
    *slot = Some(Dlmm { regions: BTreeMap::new(), memory });
    Ok(())
}

fn alloc(bytes: usize) -> Result<*mut c_void, DlmmAllocError> {
    let mut slot = lock();
    let dlmm = slot.as_mut().ok_or(DlmmAllocError::NotStarted)?;
    let region = dlmm.memory.alloc(bytes)?;
    let address = region.as_ptr();
    dlmm.regions.insert(address.addr(), region);
    Ok(address.cast())
}

fn lock() -> MutexGuard<'static, Option<Dlmm>> {
    // Nothing under this lock leaves it half-changed.
    DLMM.lock().unwrap_or_else(PoisonError::into_inner)
}
