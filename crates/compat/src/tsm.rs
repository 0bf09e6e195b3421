//! The programming interface of the software DSM of Barli, Watanabe, Sakai and Tanaka: `tsm_startup`,
//! `tsm_alloc`, `tsm_create_procs`, `tsm_finish`, `tsm_barrier`, `tsm_lock`, `tsm_unlock`, `TSM_PID`,
//! `TSM_NUMNODES`, declared in `include/tsm.h`.
//!
//! The paper only names them. Here every node runs the whole program, and `tsm_create_procs` is a barrier
//! where they begin to compute together. Errors end the run with a message, because most of these functions
//! cannot return one.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use rampool::shared::{AllocOptions, EXIT_FAILED, JoinError, Region, Shared, SharedError};
use rampool_kernel::words::say_line;

static TSM: OnceLock<Shared> = OnceLock::new();

/// Barriers of the program have numbers below this.
const CREATION: u32 = u32::MAX;

/// Why a program could not start.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("tsm_startup was called before")]
    Twice,
    #[error(transparent)]
    Join(#[from] JoinError),
}

#[unsafe(no_mangle)]
pub extern "C" fn tsm_startup(_argc: c_int, _argv: *mut *mut c_char) -> c_int {
    let started = if TSM.get().is_some() {
        Err(StartError::Twice)
    } else {
        Shared::join_from_env().map_err(StartError::Join)
    };
    match started.and_then(|shared| TSM.set(shared).map_err(|_| StartError::Twice)) {
        Ok(()) => 0,
        Err(error) => {
            say_line(&format!("tsm_startup: {error}"));
            -1
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn tsm_alloc(bytes: usize) -> *mut c_void {
    match tsm("tsm_alloc").alloc(bytes, AllocOptions::new()).map(Region::as_ptr) {
        Ok(memory) => memory.cast(),
        Err(error) => {
            say_line(&format!("tsm_alloc: {error}"));
            std::ptr::null_mut()
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn tsm_create_procs() {
    must("tsm_create_procs", |shared| shared.barrier(CREATION));
}

#[unsafe(no_mangle)]
pub extern "C" fn tsm_barrier(barrier: c_int) {
    must("tsm_barrier", |shared| shared.barrier(barrier.unsigned_abs()));
}

#[unsafe(no_mangle)]
pub extern "C" fn tsm_lock(lock: c_int) {
    must("tsm_lock", |shared| shared.lock(number(lock)));
}

#[unsafe(no_mangle)]
pub extern "C" fn tsm_unlock(lock: c_int) {
    must("tsm_unlock", |shared| shared.unlock(number(lock)));
}

#[unsafe(no_mangle)]
pub extern "C" fn tsm_finish() {
    must("tsm_finish", Shared::close);
}

/// `TSM_PID`.
#[unsafe(no_mangle)]
pub extern "C" fn tsm_pid() -> c_int {
    tsm("TSM_PID").rank().into()
}

/// `TSM_NUMNODES`.
#[unsafe(no_mangle)]
pub extern "C" fn tsm_numnodes() -> c_int {
    tsm("TSM_NUMNODES").ranks().into()
}

/// Each number is a lock of its own, negative ones too.
fn number(lock: c_int) -> u64 {
    lock.cast_unsigned().into()
}

fn tsm(what: &str) -> &'static Shared {
    TSM.get().unwrap_or_else(|| {
        say_line(&format!("{what}: tsm_startup was not called, or failed"));
        std::process::exit(EXIT_FAILED);
    })
}

fn must(what: &str, operation: impl FnOnce(&Shared) -> Result<(), SharedError>) {
    let shared = tsm(what);
    if let Err(error) = operation(shared) {
        shared.abort(&format!("{what}: {error}"));
        std::process::exit(EXIT_FAILED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_a_lock_of_its_own() {
        let numbers = [c_int::MIN, -2, -1, 0, 1, 2, c_int::MAX];
        let locks: std::collections::BTreeSet<u64> = numbers.map(number).into();
        assert_eq!(locks.len(), numbers.len(), "{locks:?}");
    }
}
