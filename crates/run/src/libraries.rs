//! Where the agent's libraries, and the other binaries, lie.

use std::io;
use std::path::{Path, PathBuf};

/// Why a file that belongs to rampool is not found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotFound {
    #[error("the path of this binary is unknown: {0}")]
    Binary(#[from] io::Error),
    #[error("{name} is not in the directory of {binary} nor in ../lib/rampool; set {variable} to its path")]
    Library { name: &'static str, binary: PathBuf, variable: &'static str },
    #[error("{name} is not in the directory of {binary}; install it there")]
    Program { name: &'static str, binary: PathBuf },
}

/// What is loaded into programs by `rampool run`.
///
/// # Errors
/// [`NotFound`].
pub fn agent() -> Result<PathBuf, NotFound> {
    library("librampool_agent.so", "RAMPOOL_AGENT_LIB")
}

/// What makes system calls on absent pages work where the kernel cannot wait for them.
///
/// # Errors
/// [`NotFound`].
pub fn agent_io() -> Result<PathBuf, NotFound> {
    library("librampool_agent_io.so", "RAMPOOL_AGENT_IO_LIB")
}

/// The libraries are next to the binary, or where packages put libraries.
fn library(name: &'static str, variable: &'static str) -> Result<PathBuf, NotFound> {
    if let Some(path) = std::env::var_os(variable) {
        return Ok(path.into());
    }
    let binary = std::env::current_exe()?;
    let here = binary.parent().unwrap_or(Path::new("/"));
    let places = [here.join(name), here.join("../lib/rampool").join(name), here.join("../lib").join(name)];
    places.into_iter().find(|place| place.exists()).ok_or(NotFound::Library { name, binary, variable })
}

/// Another of rampool's binaries: it is next to this one.
///
/// # Errors
/// [`NotFound`].
pub fn program(name: &'static str) -> Result<PathBuf, NotFound> {
    let binary = std::env::current_exe()?;
    let program = binary.with_file_name(name);
    if program.exists() { Ok(program) } else { Err(NotFound::Program { name, binary }) }
}
