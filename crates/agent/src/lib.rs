//! The agent: loaded into an unmodified program by `rampool run`, it takes the program's memory over when
//! there is too much of it.
//!
//! ```text
//!   heap     the agent's own heap: nothing here may depend on memory that it serves
//!   scan     which of the program's memory may be taken over
//!   watch    while the program fits: a thread that looks at one counter now and then, and nothing else
//!   budget_controller  when it does not fit any more: runs the pager, adopts new memory, keeps the budget
//!   priority  the agent's thread goes first while the program holds too much
//!   exclusion  who may change mappings or fork; what this process is to the agent
//!   requests   what the program's threads ask of the agent's thread where the kernel does not report it
//!   faults   what catches this process's faults
//!   fork     a child gets its own agent, and the parent serves it until then
//!   line     what parent and child tell each other meanwhile
//!   alone    calls of programs that must be single-threaded: the agent's thread steps aside
//!   touch    buffers made resident for system calls, where the kernel cannot wait for pages
//!   report   the counters that `rampool top` reads, and last words
//! ```
//!
//! Of the C library's functions only `fork` and those that `alone` lists are replaced. Until the program
//! comes near its budget it runs exactly as without the agent.
//!
//! Read `watch` first: `run` waits until the program comes near its budget (`wait_for_pressure`), then starts
//! the pager. Then read `budget_controller` and `scan`; `fork` and `line` come last.

mod alone;
mod budget_controller;
mod ending;
mod exclusion;
mod faults;
mod fork;
mod guard;
mod heap;
mod line;
mod next;
mod priority;
mod rejoining;
mod report;
mod requests;
mod scan;
mod touch;
mod watch;

use std::path::Path;

use rampool_run::settings::{RUN_DIR_VARIABLE, Settings};

use crate::report::without_rampool;

#[cfg(not(test))]
#[used]
// SAFETY: the C library calls what stands here once, on the main thread, before `main`; `start` has its
// signature.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

#[cfg_attr(test, allow(dead_code))]
extern "C" fn start() {
    let Some(run_dir) = std::env::var_os(RUN_DIR_VARIABLE) else { return };
    alone::prepare();
    fork::prepare();
    rampool_net::transport::forbid_ucx();
    match Settings::read(Path::new(&run_dir)) {
        Ok(settings) => {
            let settings: &'static Settings = Box::leak(Box::new(settings));
            touch::note_main_thread();
            touch::prepare(settings.fault_mode);
            guard::prepare(settings.fault_mode);
            if settings.fault_mode == rampool_kernel::probe::FaultMode::Segv {
                keep_malloc_in_place();
            }
            fork::install_handlers(settings);
            watch::begin(settings, None);
        }
        // The run is over (a program that outlives it starts another one): nothing to serve from. Or a sandbox
        // hides it, with all others of this user.
        Err(rampool_run::settings::SettingsError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            if let Some(runs) = Path::new(&run_dir).parent().filter(|runs| !runs.exists()) {
                without_rampool(&format!(
                    "{} is not there, as in a sandbox with other files",
                    runs.display()
                ));
            }
        }
        // What is in the run's directory is for its owner alone, and nothing of this process is away yet.
        Err(rampool_run::settings::SettingsError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            without_rampool("it belongs to another user than the run");
        }
        Err(error) => report::end_process(None, &format!("the agent cannot start: {error}")),
    }
}

/// The C library's malloc changes mappings without calling the functions that `librampool_agent_io.so`
/// replaces, except when told to live in memory that only grows.
fn keep_malloc_in_place() {
    // SAFETY: no preconditions; settings that this C library does not know are ignored.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_TOP_PAD, 1 << 20);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
